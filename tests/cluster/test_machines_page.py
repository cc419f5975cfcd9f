"""The simulated cluster of `docs/guides/machines.md` runs as pasted."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray

PAGE = Path(__file__).parents[2] / "docs/guides/machines.md"


@pytest.mark.timeout(110)
def test_the_simulated_cluster_runs_as_pasted(tmp_path: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    [block] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "import ray\n" in block]
    (tmp_path / "program.py").write_text(block, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    promised = re.findall(r"^# -> (.*)$", block, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line in promised] == promised
