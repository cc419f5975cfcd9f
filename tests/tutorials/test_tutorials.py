"""What the tutorials show is what happens.

``python tests/tutorials/test_tutorials.py`` executes the notebooks, writes their outputs into them. With
``02 05`` behind it, it executes only these two. Run it on a machine that does nothing
else, because some outputs are measurements.
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from PIL import Image
from programs import without_notices

# Creates the font cache. If a notebook on a slow machine creates it, matplotlib says so on stderr.
import matplotlib.font_manager  # isort: skip  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))

COLUMNS = 80
"""The width of code that fits on the pages of the site."""

LIMIT = 280
"""Seconds that a notebook may take. All need less than a minute on a machine that does nothing else."""

# In a process of its own: the client's event loop and sockets would outlive the test.
EXECUTE = """
import sys, nbformat, nbclient
source, target = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
# No "record_timing": times would differ at every execution.
nbclient.NotebookClient(notebook, timeout=None, kernel_name="python3", record_timing=False).execute()
notebook.metadata.language_info = {"name": "python"}
nbformat.write(notebook, target)
"""


def execute(source: Path, target: Path, scratch: Path) -> None:
    """Execute a notebook in a new kernel. Jupyter keeps its own files in ``scratch``."""
    folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    environment = os.environ | {name: str(scratch / name.lower()) for name in folders}
    # Threads of OpenMP wait for each other in a loop. On a busy machine, training then takes fourteen times as long.
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(source), str(target)],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def lighten(path: Path) -> None:
    """Write the pictures of a notebook in 128 colours: less than half the bytes, and no visible difference."""
    notebook = nbformat.read(path, as_version=4)
    for output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            picture = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))).convert("RGB")
            light = io.BytesIO()
            picture.quantize(128, dither=Image.Dither.NONE).save(light, "PNG", optimize=True)
            output["data"]["image/png"] = base64.b64encode(light.getvalue()).decode()
    nbformat.write(notebook, path)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def code_of(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def defined_by(source: str) -> set[str]:
    """The names that a cell defines for other cells."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        names |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}
    return names


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def notebook(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def minutes_to_read(notebook: Any) -> float:
    """For a reader of 180 words and 25 lines of code a minute."""
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    lines = sum(line.strip() != "" for cell in code_of(notebook) for line in cell.source.splitlines())
    return words / 180 + lines / 25


@pytest.mark.slow  # five to thirty seconds each
@pytest.mark.timeout(LIMIT + 20)
def test_the_notebook_runs_from_a_clean_kernel(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path / path.name, tmp_path)
    for output in outputs(nbformat.read(tmp_path / path.name, as_version=4)):
        assert output.output_type != "error"
        assert output.get("name") != "stderr" or not without_notices(output.text), output.text


@pytest.mark.lint
def test_the_committed_outputs_are_whole_light_and_of_no_machine(path: Path, notebook: Any) -> None:
    nbformat.validate(notebook)
    code = code_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "execute it once more, in order"
    assert notebook.metadata.kernelspec.name == "python3"
    assert not any(one.output_type == "error" or one.get("name") == "stderr" for one in outputs(notebook))
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/Users/|/work/|/tmp/|/root/|[A-Z]:\\\\|\bpid \d", text)
    assert path.stat().st_size < 180_000
    targets = re.findall(r"\]\(([^)]+)\)", "\n".join(cell.source for cell in notebook.cells))
    assert [target for target in targets if not (path.parent / target).is_file()] == []


@pytest.mark.lint
def test_the_notebook_opens_with_what_and_how_long(notebook: Any) -> None:
    opening, *others = notebook.cells
    assert opening.cell_type == "markdown"
    title, promise, needs, *_ = opening.source.split("\n\n")
    assert re.fullmatch(r"# \S.*", title)
    assert re.fullmatch(r"After this notebook you can .*\.", promise, re.DOTALL)
    assert not re.search(r"[.?!:]\s", promise), "one sentence"
    minutes = re.match(r"It takes about (\d+) minutes to read and less than a minute to run", needs)
    assert minutes and abs(int(minutes[1]) - minutes_to_read(notebook)) < 1.5, minutes_to_read(notebook)
    assert "You need the extra" in needs.replace("\n", " ")
    assert not any(re.match(r"# \S", cell.source) for cell in others if cell.cell_type == "markdown")


@pytest.mark.lint
def test_the_code_is_as_wide_as_the_page(notebook: Any) -> None:
    blocks = [cell.source for cell in code_of(notebook)]
    blocks += re.findall(r"```.*?```", "\n".join(cell.source for cell in notebook.cells), re.DOTALL)
    assert [line for block in blocks for line in block.splitlines() if len(line) > COLUMNS] == []


@pytest.mark.lint
def test_every_cell_shows_something_or_defines_what_the_next_one_uses(notebook: Any) -> None:
    code = code_of(notebook)
    for cell, following in zip(code, [*code[1:], None], strict=True):
        if not cell.outputs:
            assert following is not None, cell.source
            assert any(re.search(rf"\b{name}\b", following.source) for name in defined_by(cell.source)), cell.source


@pytest.mark.lint
def test_pictures_are_white_behind_on_light_and_on_dark_pages(notebook: Any) -> None:
    coded = [output.data.get("image/png") for output in outputs(notebook) if "data" in output]
    pictures = [Image.open(io.BytesIO(base64.b64decode(one))) for one in coded if one]
    assert pictures, "the first picture is shown on the page of the tutorials"
    for picture in pictures:
        assert not picture.has_transparency_data
        assert min(picture.convert("RGB").getpixel((0, 0))) > 250


# -- the page of the tutorials shows a card for each notebook ----------------------------------------------------------


@pytest.fixture(scope="module")
def cards() -> Any:
    """docs/cards.py, which no package holds."""
    spec = importlib.util.spec_from_file_location("cards", ROOT / "docs" / "cards.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.lint
def test_every_notebook_is_on_the_page_in_its_order(cards: Any) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=cards.PAGE))
    text = cards.on_page_markdown((ROOT / "docs" / cards.PAGE).read_text(encoding="utf-8"), page)
    places = [text.find(f"]({path.relative_to(ROOT).as_posix()})") for path in NOTEBOOKS]
    assert len(places) > 9
    assert -1 not in places
    assert places == sorted(places)
    assert cards.MARK not in text


@pytest.mark.lint
def test_a_card_says_what_how_long_and_shows_a_picture(cards: Any) -> None:
    for card in cards.cards():
        assert card.title in card.markdown()
        assert card.promise in card.markdown()
        assert f"{card.minutes} minutes" in card.markdown()
        assert Image.open(io.BytesIO(card.picture)).width > 200


@pytest.mark.lint
def test_a_notebook_without_a_picture_is_an_error(cards: Any, tmp_path: Path) -> None:
    opening = "# Title\n\nAfter this notebook you can do it.\n\nIt takes about 3 minutes to read."
    path = tmp_path / "01_plain.ipynb"
    path.write_text(json.dumps({"cells": [{"source": [opening]}]}), encoding="utf-8")
    with pytest.raises(ValueError, match=r"01_plain\.ipynb.*picture"):
        cards.card(path)


if __name__ == "__main__":
    import tempfile

    for notebook in [path for path in NOTEBOOKS if not sys.argv[1:] or path.name[:2] in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as scratch:
            execute(notebook, notebook, Path(scratch))
            lighten(notebook)
        print(notebook.name, flush=True)
