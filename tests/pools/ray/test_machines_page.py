"""The simulated cluster of `docs/guides/machines.md` runs as pasted."""

from __future__ import annotations

from pathlib import Path

import pytest
from pages import blocks, kept, promised, run_block

pytestmark = pytest.mark.ray

PAGE = Path(__file__).parents[3] / "docs/guides/machines.md"


def test_the_simulated_cluster_runs_as_pasted(tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE, "python") if "import ray\n" in block]
    assert kept(block, run_block(block, tmp_path)) == promised(block)
