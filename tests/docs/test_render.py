"""The browser finds what is wrong with a page: each fault, on a small page that has it.

A report of a loader has none: it fits every window, in both schemes.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.torch import DataLoader
from tests.docs import render
from tests.docs.render import Fault

WHY_NOT = render.missing()
browser = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

HEAD = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>A page</title>
<link rel="icon" href="data:,"><meta name="viewport" content="width=device-width"><style>
body { margin: 0; background: white; color: black }
@media (prefers-color-scheme: dark) { body { background: #222; color: white } img.paper { background: white } }
pre { overflow-x: auto }
</style></head><body>"""
# As wide as a long line of code, and almost as dark as ink; the rest is transparent.
DRAWING = "<svg xmlns='http://www.w3.org/2000/svg' width='90' height='90'><path d='M0 0h90' stroke='black'/></svg>"
BUTTON = (
    '<button data-clipboard-text="{}" onclick="navigator.clipboard.writeText(this.dataset.clipboardText)">copy</button>'
)


def code(text: str, copied: str, language: str = "python") -> str:
    return f'<div class="language-{language} highlight">{BUTTON.format(copied)}<pre><code>{text}</code></pre></div>'


SESSION = code("&gt;&gt;&gt; 1 + 1\n2", "1 + 1", "pycon")
GOOD = f"""
<h1 id="top">Title</h1><p>Text with <b>bold</b>, <code>**code**</code>, 2**62, a [1, 2] and a * b * c.</p>
<a href="#top">up</a> <a href="other/index.html#there">there</a> <a href="drawing.svg">a file</a>
<img src="drawing.svg" alt="a drawing" class="paper">{SESSION}
<div style="overflow-x: auto"><div style="width: 2000px">scrolled within</div></div>
"""

# A page for each fault: its body, and what is said of it. None of the others may be said.
FAULTS = {
    "wide": ('<div style="width: 1400px">x</div>', "is wider than the window"),
    "code": (f"<pre><code>{'x' * 300}</code></pre>", "code is wider than its box (300 columns)"),
    "closed": (
        f"<details><summary>more</summary><pre><code>{'x' * 300}</code></pre></details>",
        "code is wider than its box (300 columns)",
    ),
    "link": ('<a href="nowhere.html">x</a>', "dead link: nowhere.html"),
    "anchor": ('<a href="other/index.html#here">x</a>', "dead anchor: other/index.html#here"),
    "picture": ('<img src="gone.png" alt="x">', "picture is missing: gone.png"),
    "silent": ('<img src="drawing.svg" class="paper">', "picture has no alternative text: drawing.svg"),
    "dark": ('<img src="drawing.svg" alt="x">', "picture is transparent on a dark page: drawing.svg"),
    "console": ("<script>console.error('it broke')</script>", "console error: it broke"),
    "network": ('<script src="https://example.com/x.js"></script>', "asks the network for https://example.com/x.js"),
    "bold": ("<p>some **text**</p>", "markup is not rendered (**)"),
    "reference": ("<li>see [x][y.z]</li>", "markup is not rendered ([text][name])"),
    "block": ("<p>::: sharded_loader.Dataset</p>", "markup is not rendered (:::)"),
    "table": ("<p>| a | b |</p>", "markup is not rendered (a row of a table)"),
    "tag": ("<p>&lt;b&gt;bold&lt;/b&gt;</p>", "markup is not rendered (a tag)"),
    "prompt": (code("$ ls", "$ ls", "console"), "the copy button copies what does not run: '$ ls'"),
    "nothing": ('<button data-clipboard-text="x">copy</button>', "nothing was copied"),
}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pictures")


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory, pictures: Path) -> list[Fault]:
    site = tmp_path_factory.mktemp("site")
    (site / "other").mkdir()
    (site / "drawing.svg").write_text(DRAWING)
    (site / "other" / "index.html").write_text(f'{HEAD}<p id="there">x</p>')
    (site / "good.html").write_text(HEAD + GOOD)
    for name, (body, _) in FAULTS.items():
        (site / f"{name}.html").write_text(HEAD + body)
    return render.render(site, pictures)


@browser
@pytest.mark.slow
def test_a_good_page_has_no_faults_and_a_picture_at_each_width_in_each_scheme(
    faults: list[Fault], pictures: Path
) -> None:
    assert [fault for fault in faults if fault.page in ("good.html", "other/index.html")] == []
    assert {path.name for path in pictures.glob("good-*")} == {
        f"good-{width}-{scheme}.png" for width in (1300, 400) for scheme in ("light", "dark")
    }


@browser
@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_found(faults: list[Fault], name: str) -> None:
    told = [fault.what for fault in faults if fault.page == f"{name}.html"]
    assert told
    expected = FAULTS[name][1]
    # A missing file is also an error that the browser itself writes to the console.
    also = ("console error: Failed to load resource", "is not there (404)")
    assert [what for what in told if expected not in what and not what.startswith(also)] == []
    assert any(expected in what for what in told)


@browser
@pytest.mark.slow
def test_a_fault_says_where_it_is_seen(faults: list[Fault]) -> None:
    places = {fault.page: (fault.width, fault.scheme) for fault in faults}
    assert places["wide.html"] == ("any", "any")
    assert places["code.html"] == (1300, "any")  # on a phone, code is scrolled
    assert places["dark.html"] == ("any", "dark")
    assert places["link.html"] == ("any", "any")


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("python", "x = 1\nprint(x)"),
        ("python", "    indented = 1"),
        ("pycon", 'def f():\n    """Text with >>> f()"""'),
        ("python", "!pip list\n%timeit 1"),
        ("console", "make demo\nexport X=$HOME"),
        ("", "any text at all"),
    ],
)
def test_what_runs_may_be_copied(language: str, text: str) -> None:
    assert render.wrong_copy(language, text) is None


# -- the page that ``loader.report("report.html")`` writes -------------------------------------------------------------

WIDTHS = (1400, 400)


async def seen(page: Path, scheme: str) -> list[dict[str, Any]]:
    """What a browser sees of a page at each width: `look`, what it asks for, the colours, the plots."""
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
            found.append(look | about | {"asked": list(asked)})
        await context.close()
    return found


def brightness(colour: str) -> float:
    red, green, blue = map(int, colour[4:-1].split(","))
    return (red + green + blue) / 3


@browser
@pytest.mark.slow
@pytest.mark.parametrize("scheme", render.SCHEMES)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_a_report_fits_every_window_in_both_schemes_and_asks_no_network(
    kind: type, scheme: str, tmp_path: Path
) -> None:
    def photo(index: int) -> Any:
        """Every 40th sample takes long."""
        time.sleep(0.05 if index % 40 == 7 else 0.001)
        return np.zeros(8, np.float32)

    photos = SimpleDataset(range(240)).transform(photo)
    loader = kind(photos, batch_size=8, num_workers=2, thread_pool=True)
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
