"""The built site: no warning, no fault in a browser, a reference with links, a search that finds the guide first."""

from __future__ import annotations

import asyncio
import html
import importlib.util
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sharded_loader
from sharded_loader import ShardedDataLoader
from tests.docs import render

ROOT = Path(__file__).resolve().parents[2]
WHY_NOT = render.missing()
browser = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("mkdocs_jupyter") is None, reason='needs the extra "docs"'),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=800,  # 30 s on an idle machine
    )
    assert done.returncode == 0, done.stderr
    return folder


def page(site: Path, name: str) -> str:
    return (site / name).read_text(encoding="utf-8")


def test_the_site_is_built_without_a_warning_and_has_every_tutorial(site: Path) -> None:
    tutorials = {path.stem for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert tutorials == {path.stem for path in (site / "tutorials").glob("*.html")}
    landing = (site / "tutorials.html").read_text(encoding="utf-8")
    assert [name for name in sorted(tutorials) if f'<a href="tutorials/{name}.html"><img' not in landing] == []
    assert {path.stem for path in (site / "tutorials").glob("*.png")} == tutorials


@browser
def test_no_page_has_a_fault_at_any_width_in_any_scheme(site: Path) -> None:
    faults = render.render(site)
    assert faults == [], "\n".join(["", *map(str, faults)])


def test_every_page_shows_the_version_and_the_changelog_has_an_anchor_for_each(site: Path) -> None:
    shown = f"sharded_loader {sharded_loader.__version__}"
    assert [path for path in site.rglob("*.html") if shown not in page(site, str(path))] == []
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert versions
    assert [one for one in versions if f'<h2 id="{one}">' not in page(site, "CHANGELOG.html")] == []


# -- the reference ------------------------------------------------------------------------------------------


def test_every_type_in_a_signature_is_a_link(site: Path) -> None:
    """mkdocstrings shows a name without an entry as a span whose title is the full name."""
    spans = {
        name
        for path in (site / "reference").glob("*.html")
        for name in re.findall(r'<span title="(sharded_loader\.[\w.]*)"', page(site, path))
    }
    # Attributes and functions that are default values are written small.
    assert sorted(name for name in spans if re.match("_?[A-Z]", name.rpartition(".")[2])) == []


def entry(site: Path) -> str:
    text = page(site, "reference/loader.html")
    return text[
        text.index('id="sharded_loader.ShardedDataLoader"') : text.index('id="sharded_loader.torch.DataLoader"')
    ]


def test_the_arguments_of_the_loader_come_in_groups(site: Path) -> None:
    found = re.findall(
        r'class="doc-section-title">(\w+)</span>|id="sharded_loader\.ShardedDataLoader\((\w+)\)"',
        entry(site).partition('id="sharded_loader.ShardedDataLoader-methods"')[0],
    )
    groups = {title: [] for title, _ in found if title}
    title = ""
    for begun, argument in found:
        title = begun or title
        groups[title] += [argument] if argument else []
    assert list(groups) == ["Common", "Data", "Order", "Workers", "Devices"]
    assert len(groups["Common"]) == 10
    assert all(groups.values())
    parameters = [name for name in inspect.signature(ShardedDataLoader).parameters if name != "names"]
    assert sorted(sum(groups.values(), [])) == sorted(parameters)


def test_methods_come_before_properties_names_are_links_and_the_source_is_shown(site: Path) -> None:
    text = entry(site)
    order = ("-methods", ".close", "-properties", ".epoch")
    places = [text.index(f'id="sharded_loader.ShardedDataLoader{name}"') for name in order]
    assert places == sorted(places)
    assert re.search(r'<a [^>]*href="#sharded_loader\.ShardedDataLoader\.refresh"[^>]*><code>refresh', text)
    assert re.search(r'<a [^>]*href="datasets\.html#sharded_loader\.ArrayDataset"[^>]*><code>ArrayDataset', text)
    source = html.unescape(re.sub("<[^>]+>", "", page(site, "reference/randomness.html")))
    assert source.count("def sample_rng(") == 1 and "sharded_loader/randomness/rng.py" in source


WORDS = ["parquet", "webdataset", "Lightning", "S3", "ImageFolder", "collate", "pretraining", "h5py", "logging"]
WORDS += ["loss spike", "re-initialize CUDA"]


@pytest.fixture(scope="module")
def hits(site: Path) -> dict[str, list[str]]:
    """The pages that the search box lists for each word, the best first."""

    async def search() -> dict[str, list[str]]:
        found = {}
        with render.served(site) as address:
            async with render.browser() as running:
                tab = await running.new_page()
                await tab.goto(f"{address}index.html")
                await tab.click("[data-md-component=search-query]")
                for word in WORDS:
                    for text, said in (("", "Type to start"), (word, "matching")):
                        await tab.fill("[data-md-component=search-query]", text)
                        await tab.press("[data-md-component=search-query]", "End")  # the box listens to keys
                        await tab.locator(".md-search-result__meta", has_text=said).wait_for()
                    links = tab.locator("[data-md-component=search-result] li > a.md-search-result__link")
                    found[word] = [
                        (await link.get_attribute("href") or "").removeprefix(address) for link in await links.all()
                    ]
        return found

    return asyncio.run(search())


@browser
@pytest.mark.parametrize("word", WORDS)
def test_the_search_finds_a_guide_or_the_reference_first(hits: dict[str, list[str]], word: str) -> None:
    kinds = [link.partition("?")[0].partition("/")[0] for link in hits[word]]
    later = {"tutorials", "benchmarks", "CHANGELOG.html", "how-it-works.html"}
    assert kinds
    assert kinds[0] not in later
    # All guides and pages of the reference come before all tutorials.
    assert [kind in later for kind in kinds] == sorted(kind in later for kind in kinds), hits[word]
