"""The formats that the page on shards adds over other libraries read what those libraries write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pages import blocks, promised

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "shards.md"


@pytest.mark.stores
@pytest.mark.parametrize("name", ["ArrayRecord", "Lance"])
def test_a_format_over_another_library_reads_its_files(name: str, tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE, "python") if f"class {name}:" in block]
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(block)
