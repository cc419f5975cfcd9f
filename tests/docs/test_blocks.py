"""What the code blocks of the README and of the documentation show is what happens."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pages import blocks, promised

ROOT = Path(__file__).resolve().parents[2]


def is_script(block: str) -> bool:
    """Whether a block runs as it stands: nothing in it is left out as ``...``."""
    return not any(isinstance(node, ast.Constant) and node.value is ... for node in ast.walk(ast.parse(block)))


README = blocks(ROOT / "README.md", "python")
SCRIPTS = [block for block in README if is_script(block)]
SKETCHES = [block for block in README if not is_script(block)]
APART = ("import ray\n", "import pyarrow\n", "import ArrayRecordReader")
"""What blocks with other libraries import: test_machines_page.py and test_shards_page.py run them."""

DOCS = {
    f"{page.relative_to(ROOT / 'docs').with_suffix('').as_posix()}-{number}": block
    for page in sorted((ROOT / "docs").rglob("*.md"))
    # Run by test_integrations_page.py, test_command_page.py and test_recipes.py.
    if page.name not in ("integrations.md", "command.md") and page.parent.name != "recipes"
    for number, block in enumerate(blocks(page, "python"))
    if not any(line in block for line in APART)
}


@pytest.mark.lint
def test_the_readme_has_scripts_and_loops() -> None:
    assert SCRIPTS
    assert SKETCHES


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_of_the_readme_run_as_they_stand(script: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(script, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, encoding="utf-8", timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines() == promised(script)


@pytest.mark.parametrize("loops", SKETCHES)
def test_loops_of_the_readme_run_on_any_dataset(loops: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setenv("LOCAL_RANK", "0")
    names: dict[str, Any] = {"dataset": [(torch.zeros(3), 0)] * 300}
    exec(loops.replace('"cuda"', '"cpu"').replace("num_workers=8", "num_workers=0"), names)
    assert chosen == ([0] if "torchrun" in loops else [])  # otherwise all ranks would use GPU 0


# All blocks in one process, each as its own ``__main__``: to import torch for every one would take a minute.
RUN = """
import contextlib, io, json, sys, traceback, types
ours = sys.modules["__main__"]
done = []
for block in json.load(sys.stdin):
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        try:
            exec(block, module.__dict__)
        except BaseException:
            traceback.print_exc()
    done.append([printed.getvalue(), errors.getvalue()])
print(json.dumps(done))
"""


def run_blocks(folder: Path) -> dict[str, tuple[str, str]]:
    """What each block of the documentation wrote to stdout and to stderr."""
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=folder,
        input=json.dumps(list(DOCS.values())),
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "written by a worker"
    return {name: (out, err) for name, (out, err) in zip(DOCS, json.loads(done.stdout), strict=True)}


@pytest.mark.lint
def test_nothing_is_left_out_in_blocks_of_the_documentation() -> None:
    assert DOCS
    assert [name for name, block in DOCS.items() if not is_script(block)] == []
    assert [name for name, block in DOCS.items() if not promised(block)] == []


@pytest.mark.slow
def test_blocks_of_the_documentation_run_as_they_stand(tmp_path: Path) -> None:
    ran = run_blocks(tmp_path)
    assert {name: err for name, (_, err) in ran.items() if err} == {}
    assert {name: out.splitlines() for name, (out, _) in ran.items()} == {n: promised(DOCS[n]) for n in DOCS}
