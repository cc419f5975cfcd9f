"""Slow batches and late samples: ``python -m benchmarks.stragglers``.

    first batch    64 samples of 20 ms, by 8 workers, beside 1
    late samples   1 sample in 500 takes 2 s by chance, beside none

Rates and times are those of the second epoch: the workers have started.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool

KINDS: dict[str, Callable[[int], Any]] = {
    "threads": ThreadPool,
    "processes": lambda workers: ProcessPool(workers, start_method="fork"),
}


class Waiting:
    """Samples that take ``seconds``, and one in ``one_in`` 2 s."""

    def __init__(self, length: int, seconds: float, one_in: int = 0) -> None:
        self.length, self.seconds, self.one_in = length, seconds, one_in

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        is_late = self.one_in and random.SystemRandom().random() * self.one_in < 1
        time.sleep(2.0 if is_late else self.seconds)
        return np.full(16, index, np.float32)


def first_batch(pool: Any, prefetch: int | None) -> float:
    """Seconds until the first batch of the second epoch."""
    with ShardedDataLoader(Waiting(256, 0.02), 64, pool=pool, prefetch=prefetch) as loader:
        for _ in loader:
            pass
        began = time.perf_counter()
        next(iter(loader))
        return time.perf_counter() - began


JOBS = ((4, 16, 0.002, 8000), (4, 32, 0.001, 8000), (8, 32, 0.004, 6000), (8, 32, 0.02, 3200))
"""Workers, samples in a batch, seconds of a sample, samples."""


def rate(pool: Any, batch_size: int, seconds: float, length: int, one_in: int) -> tuple[float, int]:
    """Samples per second of the second epoch, and how many batches were read twice.

    Args:
        pool: reads.
        batch_size: samples in a batch.
        seconds: of a sample.
        length: samples of an epoch.
        one_in: of this number of samples, one is late.
    """
    with ShardedDataLoader(Waiting(length, seconds, one_in), batch_size, pool=pool) as loader:
        next(iter(loader))
        began = time.perf_counter()
        for _ in loader:
            pass
        return length / (time.perf_counter() - began), loader.stats().second_reads


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    for kind, pool in KINDS.items():
        for prefetch in (1, None):
            alone, shared = first_batch(pool(1), prefetch), first_batch(pool(8), prefetch)
            share = f"1/{alone / shared:.1f}"
            print(f"{kind}, prefetch={prefetch}: first batch {alone:.3f} s, with 8 {shared:.3f} s: {share}")
        for workers, batch_size, seconds, length in JOBS:
            without, _ = rate(pool(workers), batch_size, seconds, length // 2, 0)
            late, twice = rate(pool(workers), batch_size, seconds, length, 500)
            where = f"{kind}, {workers} workers, batches of {batch_size} x {1e3 * seconds:g} ms"
            print(f"{where}: {without:.0f}/s, late samples {late:.0f}/s: {late / without:.2f}, {twice} read twice")


if __name__ == "__main__":
    main()
