"""The code on `docs/integrations.md` runs and prints what the page says, each block in a program of its own."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest
from indices import IN_FRAMEWORKS
from pages import WITH_LIBRARIES, blocks, kept, promised, run_block

pytestmark = IN_FRAMEWORKS

PAGE = Path(__file__).resolve().parents[2] / "docs/integrations.md"
BLOCKS = {
    section.partition("\n")[0]: block
    for section in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]
    for block in blocks(section, "python")
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
    printed = run_block(BLOCKS[section], tmp_path, before=WITH_LIBRARIES)
    assert kept(BLOCKS[section], printed) == promised(BLOCKS[section])
