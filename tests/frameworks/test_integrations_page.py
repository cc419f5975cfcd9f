"""The code on `docs/integrations.md` runs and prints what the page says, each block in a program of its own."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from indices import IN_FRAMEWORKS

pytestmark = IN_FRAMEWORKS

PAGE = Path(__file__).resolve().parents[2] / "docs/integrations.md"
BLOCKS = {
    section.partition("\n")[0]: block
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL)
}


def libraries(block: str) -> set[str]:
    """What a block imports."""
    nodes = list(ast.walk(ast.parse(block)))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    return {name.partition(".")[0] for name in names}


def test_every_section_has_code() -> None:
    assert len(BLOCKS) > 10


@pytest.mark.parametrize("section", BLOCKS)
def test_the_code_of_the_page_runs(section: str, tmp_path: Path) -> None:
    missing = [name for name in libraries(BLOCKS[section]) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")
    (tmp_path / "program.py").write_text("import indices\n" + BLOCKS[section], encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "program.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parent)},
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"^ *# -> (.*)$", BLOCKS[section], re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line in promised] == promised
