"""What the tutorials show is what happens.

``python tests/tutorials/test_tutorials.py`` executes the notebooks and writes their outputs into them; with ``02 05``
behind it only those.
"""

from __future__ import annotations

import base64
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from PIL import Image

# Makes the font cache, once: made by a notebook on a slow machine, it is announced on stderr.
import matplotlib.font_manager  # isort: skip  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "tutorials").glob("*.ipynb"))

# In a process of its own: the client's event loop and sockets would outlive the test.
EXECUTE = """
import sys, nbformat, nbclient
source, target = sys.argv[1:]
notebook = nbformat.read(source, as_version=4)
for cell in notebook.cells:
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
# No "record_timing": times would differ at every execution.
nbclient.NotebookClient(notebook, timeout=100, kernel_name="python3", record_timing=False).execute()
notebook.metadata.language_info = {"name": "python"}
nbformat.write(notebook, target)
"""


def execute(source: Path, target: Path, scratch: Path) -> None:
    """Execute a notebook from a clean kernel; Jupyter keeps its own files in ``scratch``."""
    folders = ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
    environment = os.environ | {name: str(scratch / name.lower()) for name in folders}
    # Threads of OpenMP wait for each other by spinning: on a busy machine the training takes fourteen times as long.
    environment.setdefault("OMP_NUM_THREADS", "1")
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE, str(source), str(target)],
        cwd=scratch,
        env=environment,
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def lighten(path: Path) -> None:
    """Write the pictures of a notebook in 256 colours: less than half the bytes, and no difference to be seen."""
    notebook = nbformat.read(path, as_version=4)
    for output in outputs(notebook):
        if "image/png" in output.get("data", {}):
            picture = Image.open(io.BytesIO(base64.b64decode(output["data"]["image/png"]))).convert("RGB")
            light = io.BytesIO()
            picture.quantize(256, dither=Image.Dither.NONE).save(light, "PNG", optimize=True)
            output["data"]["image/png"] = base64.b64encode(light.getvalue()).decode()
    nbformat.write(notebook, path)


def outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


@pytest.mark.slow  # five to twenty seconds each
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_runs_from_a_clean_kernel(path: Path, tmp_path: Path) -> None:
    execute(path, tmp_path / path.name, tmp_path)
    for output in outputs(nbformat.read(tmp_path / path.name, as_version=4)):
        assert output.output_type != "error"
        assert output.get("name") != "stderr", output.text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_committed_outputs_are_whole_and_of_no_machine(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "execute it once more, in order"
    assert notebook.metadata.kernelspec.name == "python3"
    for output in outputs(notebook):
        assert output.output_type != "error"
        assert output.get("name") != "stderr"
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/home/|/Users/|/work/|/tmp/|/root/|[A-Z]:\\\\|\bpid \d", text)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_opens_with_what_and_how_long(path: Path) -> None:
    opening, *others = nbformat.read(path, as_version=4).cells
    assert opening.cell_type == "markdown"
    assert re.match(r"# \S", opening.source)
    assert re.search(r"^After this notebook you can\n\n- ", opening.source, re.MULTILINE)
    assert re.search(r"^It takes about .*(minutes|hour) to read", opening.source, re.MULTILINE)
    assert "You need the extra" in opening.source.replace("\n", " ")
    assert not any(re.match(r"# \S", cell.source) for cell in others if cell.cell_type == "markdown")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_notebook_is_light_to_download(path: Path) -> None:
    assert path.stat().st_size < 120_000


if __name__ == "__main__":
    import tempfile

    for notebook in [path for path in NOTEBOOKS if not sys.argv[1:] or path.name[:2] in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as scratch:
            execute(notebook, notebook, Path(scratch))
            lighten(notebook)
