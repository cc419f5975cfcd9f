"""Loaders under the real Accelerate: ranks, devices, the last step, metrics, states, skipped batches.

What Accelerate makes of torch's own loader is the yardstick.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.frameworks

PROGRAM = Path(__file__).with_name("accelerated.py")
LOADERS = ("drop-in", "sharded", "drop-in, workers", "sharded, workers")


def run(ranks: int) -> list[str]:
    """What the program says, which compares every loader with Accelerate's own, in so many processes."""
    launch = [sys.executable, str(PROGRAM)]
    if ranks > 1:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
            str(PROGRAM),
        ]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("ok "))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.timeout(300)
def test_a_prepared_loader_is_what_accelerate_makes_of_torchs(ranks: int) -> None:
    said = run(ranks)
    checks = ["as torch's", "passes prepare", "skipped", "resumed", "shuffled", "skipped, shuffled", "uneven"]
    checks += ["skipped by Trainer", "split_batches", "even_batches"]
    assert said == sorted(f"ok {rank}: {name}: {what}" for rank in range(ranks) for name in LOADERS for what in checks)


def prepared(loader: Any) -> Any:
    from sharded_loader.integrations.accelerate import prepare

    return prepare(loader, accelerate.Accelerator(cpu=True))


def test_loaders_of_other_libraries_are_rejected() -> None:
    with pytest.raises(TypeError, match=r"accelerator\.prepare"):
        prepared(torch.utils.data.DataLoader(range(4)))


def test_samples_are_not_dealt_to_ranks_twice() -> None:
    from sharded_loader import ShardedDataLoader

    with pytest.raises(ValueError, match="leave out num_replicas"):
        prepared(ShardedDataLoader(range(4), 2, num_replicas=2, rank=0))


def test_only_prepared_loaders_skip_batches() -> None:
    from sharded_loader.integrations.accelerate import skip_first_batches

    with pytest.raises(TypeError, match="prepare"):
        skip_first_batches(torch.utils.data.DataLoader(range(4)), 1)


def test_accelerates_own_prepare_warns() -> None:
    from sharded_loader.torch import DataLoader

    with pytest.warns(UserWarning, match=r"makes a PyTorch DataLoader"):
        accelerate.Accelerator(cpu=True).prepare(DataLoader(range(4)))
