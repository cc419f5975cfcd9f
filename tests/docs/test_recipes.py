"""The recipes run as pasted, on the data that their pages make, and print what the pages say.

A page in docs/recipes/ has two Python blocks: the recipe, which is ``train.py``, and in a collapsible block the program
that makes data to try it with. The recipe is started by the commands of the page; without any, by ``python train.py``.
"""

from __future__ import annotations

import re
import shlex
import socket
from pathlib import Path
from typing import Any

import pytest
from pages import WITH_LIBRARIES, blocks, kept, promised, run_together

FOLDER = Path(__file__).resolve().parents[2] / "docs/recipes"
INDEX = (FOLDER / "index.md").read_text(encoding="utf-8")
PAGES = {page.stem: page.read_text(encoding="utf-8") for page in sorted(FOLDER.glob("*.md")) if page.stem != "index"}
FRAMEWORKS = re.compile(
    r"^(?:import|from) (accelerate|datasets|pandas|pyarrow|torchmetrics|torchvision|transformers)\b", re.MULTILINE
)
"""Imports that need the extra ``frameworks``. The others need the extra ``test``."""


def marked(name: str) -> Any:
    """The name of a page as a parameter, with the mark of the environment that it runs in."""
    is_apart = any(FRAMEWORKS.search(block) for block in blocks(PAGES[name], "python"))
    return pytest.param(name, marks=pytest.mark.frameworks if is_apart else pytest.mark.slow)


def recipe_and_data(name: str) -> tuple[str, str]:
    """The two Python blocks of a page."""
    recipe, data = blocks(PAGES[name], "python")
    return recipe, data


def commands(name: str) -> list[list[str]]:
    """The commands of a page, started here instead of on several machines."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    here = PAGES[name].replace("--master-addr 10.0.0.1", f"--master-addr 127.0.0.1 --master-port {port}")
    found = [line[2:] for block in blocks(here, "console") for line in block.splitlines() if line.startswith("$ ")]
    return [shlex.split(command) for command in found] or [["python", "train.py"]]


def make_data(name: str, folder: Path) -> None:
    """What the reader of a page does first: save the recipe, and make the data."""
    before = WITH_LIBRARIES if marked(name).marks[0].name == "frameworks" else ""
    for program, block in zip(("train.py", "data.py"), recipe_and_data(name), strict=True):
        (folder / program).write_text(before + block, encoding="utf-8")
    run_together([["python", "data.py"]], folder, **variables(folder))


def run(name: str, folder: Path) -> list[str]:
    """What the recipe prints."""
    return run_together(commands(name), folder, **variables(folder))


def variables(folder: Path) -> dict[str, str]:
    """Keep the caches of libraries in the folder, and ask no server for anything."""
    return {
        "HF_HOME": str(folder / "hugging-face"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


@pytest.mark.parametrize("name", [marked(name) for name in PAGES])
def test_the_recipe_prints_what_its_page_says(name: str, tmp_path: Path) -> None:
    make_data(name, tmp_path)
    recipe, _ = recipe_and_data(name)
    assert kept(recipe, run(name, tmp_path)) == promised(recipe)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_machines_that_start_again_read_what_is_left_also_if_there_are_fewer(tmp_path: Path) -> None:
    make_data("several-machines", tmp_path)
    assert run("several-machines", tmp_path)[-1] == "epoch 1: 160 samples"
    assert run("several-machines", tmp_path) == ["epoch 1: 40 samples"]
    one_machine = ["torchrun", "--standalone", "--nproc-per-node=2", "train.py"]
    assert run_together([one_machine], tmp_path, **variables(tmp_path)) == ["epoch 1: 40 samples"]


@pytest.mark.lint
@pytest.mark.parametrize("name", PAGES)
def test_a_recipe_is_short_and_its_page_complete(name: str) -> None:
    recipe, _ = recipe_and_data(name)
    assert len(recipe.splitlines()) <= 30
    assert promised(recipe)
    headings = re.findall(r"^## (.*)$", PAGES[name], re.MULTILINE)
    assert headings == ["Change it for your data", "Pitfalls", "Read more"]
    before_code = PAGES[name].partition("```python")[0].partition("\n\n")[2]
    assert re.match(r"You get [^.]+\.\s", before_code)
    assert '??? example "Make some data to try it with"' in PAGES[name]


@pytest.mark.lint
def test_the_index_leads_to_every_recipe() -> None:
    assert sorted(re.findall(r"\(([\w-]+)\.md\)", INDEX)) == sorted(PAGES)


@pytest.mark.lint
@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("ImageFolder", "images"),
        ("collate", "hugging-face"),
        ("collate", "detection"),
        ("webdataset", "tar-shards"),
        ("parquet", "parquet"),
        ("S3", "tar-shards"),
        ("Lightning", "lightning"),
    ],
)
def test_a_search_for_the_word_of_the_field_finds_the_recipe(word: str, page: str) -> None:
    assert re.search(rf"\b{word}\b", PAGES[page], re.IGNORECASE if word.islower() else 0)
