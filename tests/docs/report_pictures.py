"""The pictures of the guide "Why does training wait?": reports of two jobs that are slow in different ways.

    python -m tests.docs.report_pictures

    a job of `JOBS` -> loader.report -> Chromium, light and dark -> docs/assets/reports/<job>-<scheme>.png

Run it again after a change of the page of reports. It needs what `tests.docs.render` needs, and Pillow.
"""

from __future__ import annotations

import asyncio
import io
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sharded_loader import ShardedDataLoader, SimpleDataset
from tests.docs import render

FOLDER = render.ROOT / "docs/assets/reports"
WIDTH = 760
COLOURS = 128
"""Of a picture: with so few, it has 30 KB."""


def computes(index: int) -> int:
    """Keeps a core busy for 2 ms."""
    until = time.thread_time() + 0.002
    while time.thread_time() < until:
        pass
    return index


def slow_collate(samples: list[int]) -> Any:
    """Takes 64 ms for each batch."""
    time.sleep(0.064)
    return np.array(samples)


JOBS: dict[str, dict[str, Any]] = {
    "too-few-workers": {"dataset": SimpleDataset(range(1600)).transform(computes), "num_workers": 1},
    "slow-collate": {"dataset": range(1600), "num_workers": 2, "collate_fn": slow_collate},
}
"""The arguments of a loader for each picture."""


def write_reports(folder: Path) -> None:
    """Run each job, and write its report."""
    for name, given in JOBS.items():
        with ShardedDataLoader(batch_size=16, shuffle=True, seed=0, **given) as loader:
            for _ in loader:
                time.sleep(0.01)  # the training step
            loader.report(folder / f"{name}.html")
            print(f"{name}\n{loader.stats()}\n")


async def draw(folder: Path) -> None:
    """Take a picture of each report in each scheme: from its top to the end of the causes."""
    async with render.browser() as running:
        for scheme in render.SCHEMES:
            context = await running.new_context(color_scheme=scheme, viewport={"width": WIDTH, "height": 1200})
            tab = await context.new_page()
            for name in JOBS:
                await tab.goto((folder / f"{name}.html").as_uri())
                end = await tab.evaluate("document.querySelector('.causes').getBoundingClientRect().bottom + 12")
                shot = await tab.screenshot(clip={"x": 0, "y": 0, "width": WIDTH, "height": int(end)})
                picture = Image.open(io.BytesIO(shot)).convert("RGB").quantize(COLOURS)
                picture.save(FOLDER / f"{name}-{scheme}.png", optimize=True)
            await context.close()


if __name__ == "__main__":
    if why := render.missing():
        sys.exit(why)
    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        write_reports(Path(made))
        asyncio.run(draw(Path(made)))
