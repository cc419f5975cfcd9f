"""The formats that the page on shards adds over other libraries read what those libraries write."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "shards.md"


@pytest.mark.stores
@pytest.mark.parametrize("name", ["ArrayRecord", "Lance"])
def test_a_format_over_another_library_reads_its_files(name: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    [block] = [block for block in blocks if f"class {name}:" in block]
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"^# -> (.*)$", block, re.MULTILINE)
