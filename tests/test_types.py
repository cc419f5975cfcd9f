"""Type checkers find the package after ``pip install`` and ``pip install -e``, and know what a user's loader yields."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import installed
import pytest

SCRIPT = """
from __future__ import annotations

import numpy as np
import torch

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.torch import DataLoader


def collate(samples: list[int]) -> tuple[torch.Tensor, int]:
    return torch.tensor(samples), len(samples)


loader = ShardedDataLoader(range(10), 4, batchify_fn=collate, last_batch="discard")
for tensor, count in loader:
    a: torch.Tensor = tensor
    b: int = count
    wrong_from_batchify_fn: str = count
by_torchs_name = ShardedDataLoader(range(10), 4, collate_fn=collate, timeout=3)
for tensor, count in by_torchs_name:
    wrong_from_torchs_name: str = count
declared: ShardedDataLoader[list[torch.Tensor]] = ShardedDataLoader(ArrayDataset(np.zeros(4), np.zeros(4)), 2)
for x, y in declared:
    c: torch.Tensor = x
wrong_from_declaration: int = declared.peek()
plain = ShardedDataLoader(range(4), 2, pool=ProcessPool(2), num_replicas="auto", on_error="skip", timeout=3)
for batch in plain:
    batch.anything()
drop_in = DataLoader(range(4), batch_size=2, collate_fn=collate)
for tensor, count in drop_in:
    wrong_from_collate_fn: str = count
for batch in DataLoader(range(4), batch_size=2):
    batch.anything()
wrong_word = ShardedDataLoader(range(4), 2, last_batch="drop")
wrong_pool = ShardedDataLoader(range(4), 2, pool="processes")
wrong_argument = ShardedDataLoader(range(4), batchsize=2)
wrong_timeout = ShardedDataLoader(range(4), 2, timeout="long")
wrong_argument_of_drop_in = DataLoader(range(4), batchsize=2)
wrong_method = ProcessPool(2, start_method="forks")
wrong_method_of_drop_in = DataLoader(range(4), num_workers=1, start_method="forks")
"""

WRONG = (
    "wrong_from_batchify_fn",
    "wrong_from_torchs_name",
    "wrong_from_declaration",
    "wrong_from_collate_fn",
    "wrong_word",
    "wrong_pool",
    "wrong_argument",
    "wrong_timeout",
    "wrong_argument_of_drop_in",
    "wrong_method",
    "wrong_method_of_drop_in",
)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def lines_with_errors(output: str) -> list[str]:
    """The lines of the script that a checker's output calls wrong."""
    numbers = {int(line.split(":")[1]) for line in output.splitlines() if " error: " in line or " - error: " in line}
    return [SCRIPT.splitlines()[number - 1].split("#")[0].strip() for number in sorted(numbers)]


INSTALLS = pytest.mark.parametrize("how", ["installed_wheel", "editable_sdist"])


def check(command: list[str | Path], script: Path) -> None:
    """Run a checker outside of the checkout: it has to find the package as a user's does."""
    found = installed.attempt(*command, script.name, where=script.parent, limit=300)
    wrong = lines_with_errors(found.stdout)
    assert len(wrong) == len(WRONG), found.stdout + found.stderr
    assert all(name in line for name, line in zip(WRONG, wrong, strict=True)), found.stdout


@installed.ON_LINKS
@INSTALLS
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_mypy_knows_what_a_loader_yields(script: Path, how: str, request: pytest.FixtureRequest) -> None:
    environment: installed.Environment = request.getfixturevalue(how)
    mypy = [sys.executable, "-m", "mypy", "--strict", "--no-incremental"]
    check([*mypy, "--cache-dir", script.parent, "--python-executable", environment.python], script)


@installed.ON_LINKS
@INSTALLS
@pytest.mark.frameworks
@pytest.mark.timeout(400)
def test_pyright_knows_what_a_loader_yields(script: Path, how: str, request: pytest.FixtureRequest) -> None:
    environment: installed.Environment = request.getfixturevalue(how)
    program = Path(sysconfig.get_path("scripts")) / "basedpyright"
    check([program, "--pythonpath", environment.python, "--level", "error"], script)
