"""Two ranks on gloo: a training that goes on from a checkpoint has the batches of one that was not interrupted.

Each library trains three epochs in `ranks.py`. Checkpoints are of the middle of the first and the second epoch, and of
the last step of each. The expected order is that of torch's loader with a `DistributedSampler`, where there is one.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from indices import IN_FRAMEWORKS
from ranks import EPOCHS, LENGTH, LIBRARIES, SIZE, STEPS, STOPS

pytestmark = IN_FRAMEWORKS

NEEDED = {"fabric": "lightning"} | {name: name for name in ("lightning", "accelerate", "transformers", "ignite")}


def run(library: str, folder: Path, *resume: str) -> list[dict[str, dict[str, Any]]]:
    """What each rank has read."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    program = [str(Path(__file__).with_name("ranks.py")), library, str(folder), *resume]
    done = subprocess.run([sys.executable, *launch, *program], capture_output=True, text=True, timeout=270)
    assert done.returncode == 0, done.stderr
    kind = "resumed" if resume else "whole"
    return [json.loads((folder / f"{kind}{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]


@pytest.mark.parametrize("library", LIBRARIES)
def test_two_ranks_go_on_exactly_in_every_epoch(library: str, tmp_path: Path) -> None:
    needed = NEEDED.get(library.partition(",")[0], "torch")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"needs {needed}")
    whole, resumed = run(library, tmp_path), run(library, tmp_path, "resume")
    for loader in LIBRARIES[library][1]:
        ranks = [rank[loader]["0"] for rank in whole]
        for epoch in range(EPOCHS):
            steps = slice(epoch * STEPS, (epoch + 1) * STEPS)
            parts = [sum(rank[steps], []) for rank in ranks]
            assert [len(part) for part in parts] == [STEPS * SIZE] * 2
            assert sorted(parts[0] + parts[1]) == list(range(LENGTH))
        assert ranks[0][:STEPS] != ranks[0][STEPS : 2 * STEPS]
        if "torch" in whole[0] and loader != "sharded":
            assert ranks == [rank["torch"]["0"] for rank in whole]
        for before, after in zip(ranks, resumed, strict=True):
            assert loader == "torch" or after[loader] == {str(stop): before[stop:] for stop in STOPS}, loader
