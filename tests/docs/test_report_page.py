"""The page that ``loader.report("report.html")`` writes, in a real browser: it fits every window, in both schemes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader
from tests.docs import render

WIDTHS = (1400, 400)
WHY_NOT = render.missing()

pytestmark = [pytest.mark.slow, pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")]


class Photos:
    """Every 40th sample takes long, and the argument of the loader with the longest name is this class's."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.05 if index % 40 == 7 else 0.001)
        return np.zeros(8, np.float32)


async def seen(page: Path, scheme: str, screenshots: Path | None = None) -> list[dict[str, Any]]:
    """What a browser sees of a page at each width: `look`, what it asks for, the colours, the plots.

    Args:
        page: the file.
        scheme: of colours.
        screenshots: a folder for a picture of each.
    """
    found = []
    async with render.browser() as running:
        context = await running.new_context(color_scheme=scheme, reduced_motion="reduce")
        tab = await context.new_page()
        asked: list[str] = []
        tab.on("request", lambda request: asked.append(request.url))
        tab.on("console", lambda said: asked.append(f"{said.type}: {said.text}"))
        await tab.add_init_script(render.LOOK)
        for width in WIDTHS:
            await tab.set_viewport_size({"width": width, "height": 900})
            await tab.goto(page.as_uri())
            look = await tab.evaluate("narrow => look(narrow)", width < 800)
            about = await tab.evaluate("""() => ({
                paper: getComputedStyle(document.body).backgroundColor,
                ink: getComputedStyle(document.body).color,
                plots: [...document.querySelectorAll("svg")].map((one) => [one.clientWidth, one.clientHeight]),
                titles: [...document.querySelectorAll("h2")].map((one) => one.innerText),
                cut: [...document.querySelectorAll(".table")].filter((one) => one.scrollWidth > one.clientWidth).length,
            })""")
            if screenshots is not None:
                await tab.screenshot(path=screenshots / f"{page.stem}-{width}-{scheme}.png", full_page=True)
            found.append(look | about | {"asked": list(asked)})
        await context.close()
    return found


def brightness(colour: str) -> float:
    red, green, blue = map(int, colour[4:-1].split(","))
    return (red + green + blue) / 3


@pytest.mark.parametrize("scheme", render.SCHEMES)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_a_report_fits_every_window_in_both_schemes_and_asks_no_network(
    kind: type, scheme: str, tmp_path: Path
) -> None:
    loader = kind(Photos(), batch_size=8, num_workers=2, thread_pool=True)
    for _ in loader:
        time.sleep(0.001)
    path = tmp_path / "report.html"
    loader.report(path)
    if isinstance(loader, ShardedDataLoader):
        loader.close()
    for width, found in zip(WIDTHS, asyncio.run(seen(path, scheme)), strict=True):
        assert found["faults"] == []
        assert set(found["asked"]) == {path.as_uri()}
        assert found["titles"] == ["Causes", "Stages", "Workers", "Slowest samples", "Arguments"]
        assert len(found["plots"]) == 1
        assert all(wide > width / 3 and high > 10 for wide, high in found["plots"])
        assert found["cut"] == 0
        dark = brightness(found["paper"]) < 60 and brightness(found["ink"]) > 180
        light = brightness(found["paper"]) > 220 and brightness(found["ink"]) < 80
        assert (dark, light) == (scheme == "dark", scheme == "light")
