"""The training run: its accuracy, what it depends on, and how it goes on from a file or is disturbed."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, ThreadPool
from sharded_loader.cli import main
from sharded_loader.demo import train
from sharded_loader.demo.train import Report, stop_and_resume, train_and_test
from sharded_loader.engine.pool import Pool

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [1, 2])
def test_the_accuracy_is_no_luck(seed: int) -> None:
    assert train_and_test(20, seed).accuracy > 0.97


def test_same_seed_same_training_whoever_reads_and_torch_is_left_as_it_was() -> None:
    def trained(pool: Pool, seed: int = 5) -> tuple[float, list[float]]:
        report = train_and_test(2, seed, pool=pool)
        return report.accuracy, report.losses

    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    inline = trained(InlinePool())
    for pool in (ThreadPool(3), ProcessPool(1), ProcessPool(2)):
        assert trained(pool) == inline, pool
    assert trained(InlinePool(), seed=6) != inline
    assert before == (torch.get_num_threads(), torch.backends.cudnn.deterministic)


def test_each_batch_is_shown_once_and_waiting_is_that_of_the_last_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = {None: 0.5, 0: 0.9, 1: 0.05}
    found = lambda epoch: SimpleNamespace(waiting_share=shares[epoch], samples_per_second=1.0)  # noqa: E731
    monkeypatch.setattr(ShardedDataLoader, "stats", lambda self, epoch=None: found(epoch))
    shown: list[int] = []
    report = train_and_test(2, on_batch=lambda epoch, loss: shown.append(epoch), pool=InlinePool())
    assert shown == [0] * 23 + [1] * 23
    assert report.waiting_share == 0.05


def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint.pt"
    whole = train_and_test(2, pool=InlinePool(), checkpoint=checkpoint, save_at=30)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    shown: list[int] = []
    rest = train_and_test(2, 0, lambda epoch, loss: shown.append(epoch), ThreadPool(2), checkpoint)
    assert (rest.accuracy, rest.losses) == (whole.accuracy, whole.losses)
    assert shown == [1] * 16  # 46 steps in all


@pytest.mark.timeout(300)
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--stop-resume", "--epochs", "2", "--seed", "2"]) == 0
    *before, resumed, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]  # a busy machine adds a line
    accuracy = undisturbed.split()[2]
    assert resumed.startswith(f"killed and resumed  {accuracy}: saved after step 34, killed in mid-epoch")
    assert compared.strip() == "the same accuracy and losses as in the first run"


@pytest.mark.parametrize(("option", "function"), [("--stop-resume", "stop_and_resume"), ("--kill", "train_and_kill")])
def test_a_disturbed_run_that_differs_is_an_exit_code(
    option: str, function: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, function, lambda *given: (Report(0.5, [1.0], 1.0, 0.5), ""))
    assert main(["demo", option, "--epochs", "1"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out


def train_in_vain(*given: object, **named: object) -> None:
    raise ArithmeticError("no training")


@pytest.mark.parametrize("save_at", ["never", "at once"])
def test_a_process_that_fails_is_an_error(save_at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is killed, or after it was resumed."""
    monkeypatch.setattr(train, "train_and_test", train_in_vain)
    if save_at == "at once":
        monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises((RuntimeError, ArithmeticError), match="ended by itself, exit code 1|no training"):
        stop_and_resume(1, 0, lambda epoch, text: None)


def test_a_run_whose_workers_are_killed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", "--epochs", "2", "--seed", "2"]) == 0
    *before, shown, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]
    found = re.fullmatch(r"with workers killed ([\d.]+%): (\d+) killed at random while it trained", shown)
    assert found and int(found[2]) >= 1
    assert undisturbed.split()[2] == found[1]
    assert compared.strip() == "the same accuracy and losses as in the first run"
