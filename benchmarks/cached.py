"""What a cache of decoded photographs gains: `python -m benchmarks.cached`.

JPEGs that Pillow makes -> decode to 224 x 224 -> rates in samples per second, the best of some rounds:

    uncached            every epoch decodes
    cache, epoch 1      decodes and stores; in memory, and in a file
    cache, later        all from the cache
    cache of 40 %       an epoch after the first one
    ArrayDataset        of the same arrays
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from sharded_loader import ArrayDataset, ShardedDataLoader, SimpleDataset

SIZES = {"500 x 375": (500, 375), "1,024 x 768": (1024, 768)}
LATER = 8
"""Epochs of what takes milliseconds."""


def decode(path: str) -> Any:
    """A photograph as an array of 224 x 224 pixels."""
    from PIL import Image

    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((224, 224)))


def make_photos(folder: Path, count: int, size: tuple[int, int]) -> list[str]:
    """Write JPEGs with large and small shapes, as photographs have."""
    from PIL import Image

    rng, paths = np.random.default_rng(0), []
    for number in range(count):
        layers = [
            Image.fromarray(rng.integers(0, 255, (edge, edge, 3), np.uint8)).resize(size, Image.Resampling.BICUBIC)
            for edge in (5, 20, 100)
        ]
        photo = Image.blend(Image.blend(layers[0], layers[1], 0.4), layers[2], 0.2)
        paths.append(str(folder / f"{size[0]}-{number}.jpg"))
        photo.save(paths[-1], quality=85)
    return paths


def rates(make: Callable[[], Any], workers: int, *epochs: int) -> list[float]:
    """Samples per second of the first epochs, then of the next ones, and so on: one rate for each number of epochs."""
    dataset, found = make(), []
    with ShardedDataLoader(dataset, 32, shuffle=True, seed=0, num_workers=workers) as loader:
        for count in epochs:
            began = time.perf_counter()
            for _ in range(count):
                for _ in loader:
                    pass
            found.append(count * len(dataset) / (time.perf_counter() - began))
    return found


def measure(paths: list[str], workers: int, rounds: int) -> dict[str, float]:
    """The best rate of each way, by its name."""
    photos = SimpleDataset(paths).transform(decode)
    arrays = np.stack([photos[index] for index in range(len(paths))])
    part = int(0.4 * arrays.nbytes)
    best: dict[str, float] = {}

    def note(names: list[str], found: list[float]) -> None:
        for name, rate in zip(names, found, strict=True):
            best[name] = max(rate, best.get(name, 0.0))

    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            note(["uncached"], rates(lambda: photos, workers, 1))
            note(["cache, epoch 1", "cache, later"], rates(partial(photos.cache, "90%"), workers, 1, LATER))
            in_file = partial(photos.cache, path=f"{folder}/it.cache")
            note(["file, epoch 1", "file, later"], rates(in_file, workers, 1, LATER))
            note(["file, next run"], rates(in_file, workers, 1))
            note(["40 %, epoch 1", "40 %, later"], rates(partial(photos.cache, part), workers, 1, 1))
            note(["ArrayDataset, epoch 1", "ArrayDataset"], rates(lambda: ArrayDataset(arrays), workers, 1, LATER))
    return best


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description="What a cache of decoded photographs gains.")
    parser.add_argument("--count", type=int, default=600, help="photographs of each size")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for title, size in SIZES.items():
            best = measure(make_photos(Path(folder), options.count, size), options.workers, options.rounds)
            print(f"{title}, {options.count} photographs, {options.workers} workers, samples/s")
            for name, rate in best.items():
                print(f"    {name:24}{rate:10,.0f}   {rate / best['uncached']:8.2f} x uncached")
            print(f"    epoch 1 / uncached: {best['cache, epoch 1'] / best['uncached']:.3f} (target 0.97)")
            print(f"    later / ArrayDataset: {best['cache, later'] / best['ArrayDataset']:.2f} (target 0.7)")
            print(f"    40 % / uncached: {best['40 %, later'] / best['uncached']:.2f} (target 1.6)", flush=True)


if __name__ == "__main__":
    main()
