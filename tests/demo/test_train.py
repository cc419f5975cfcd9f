"""The training run: its accuracy, what it depends on, and how it goes on from a file or is disturbed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_loader.cli.main import main
from sharded_loader.demo import train
from sharded_loader.demo.train import CheckpointFile, Options, Report, stop_and_resume, train_and_test

CPU_TWICE = (torch.device("cpu"), torch.device("cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_the_accuracy_is_no_luck(seed: int) -> None:
    assert train_and_test(Options(CPU_TWICE, seed=seed)).accuracy > 0.97


def trained(pool: str, workers: int, seed: int = 5) -> tuple[float, tuple[float, ...]]:
    report = train_and_test(Options(CPU_TWICE, pool=pool, workers=workers, epochs=2, seed=seed))
    return report.accuracy, report.losses


@pytest.mark.slow
def test_same_seed_same_training_whoever_reads() -> None:
    inline = trained("inline", 0)
    for pool, workers in (("thread", 3), ("process", 1), ("process", 2)):
        assert trained(pool, workers) == inline, (pool, workers)
    assert trained("inline", 0, seed=6) != inline


@pytest.mark.slow
def test_the_demo_leaves_torch_as_it_was() -> None:
    before = torch.get_num_threads(), torch.backends.cudnn.deterministic
    trained("inline", 0)
    assert before == (torch.get_num_threads(), torch.backends.cudnn.deterministic)


@pytest.mark.slow
def test_each_batch_is_shown_once() -> None:
    shown: list[tuple[int, float]] = []
    report = train_and_test(
        Options(CPU_TWICE, pool="inline", workers=0, epochs=2), lambda epoch, loss: shown.append((epoch, loss))
    )
    assert len(shown) == report.stats.batches
    assert [epoch for epoch, _ in shown] == sorted(epoch for epoch, _ in shown)


@pytest.mark.slow
def test_a_run_that_goes_on_from_a_checkpoint_ends_as_one_that_was_left_alone(tmp_path: Path) -> None:
    checkpoint = CheckpointFile(tmp_path / "checkpoint.pt", save_at=30)
    whole = train_and_test(Options(CPU_TWICE, pool="inline", workers=0, epochs=2), checkpoint=checkpoint)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]
    shown: list[int] = []
    rest = train_and_test(
        Options(CPU_TWICE, pool="thread", workers=2, epochs=2),
        lambda epoch, loss: shown.append(epoch),
        CheckpointFile(checkpoint.path),
    )
    assert (rest.accuracy, rest.losses) == (whole.accuracy, whole.losses)
    assert shown == [1] * 16  # 46 steps in all


# -- disturbed ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--stop-resume", "--epochs", "2", "--seed", "2"]) == 0
    *before, resumed, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]  # a busy machine adds a line
    accuracy = undisturbed.split()[2]
    assert resumed.startswith(f"killed and resumed  {accuracy}: saved after step 34, killed in mid-epoch")
    assert compared.strip() == "the same accuracy and losses as in the first run"


@pytest.mark.slow
def test_a_resumed_run_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Report(0.5, 359, (1.0,), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(train, "stop_and_resume", lambda options, on_wait: (other, ""))
    assert main(["demo", "--stop-resume", "--epochs", "1", "--pool", "inline"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out


def fails(*arguments: Any) -> None:
    raise SystemExit(3)


@pytest.mark.slow
@pytest.mark.parametrize("save_at", ["never", "at once"])
def test_a_process_that_fails_is_an_error(save_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it is killed, or after it was resumed."""
    monkeypatch.setattr(train, "_train", fails)
    if save_at == "at once":
        monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(RuntimeError, match=r"ended by itself, exit code 3|resumed training run failed, exit code"):
        stop_and_resume(Options(CPU_TWICE[:1], "inline", 0, epochs=1))


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", "--epochs", "2", "--seed", "2"]) == 0
    *before, shown, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]
    found = re.fullmatch(r"with workers killed ([\d.]+%): (\d+) killed at random while it trained", shown)
    assert found and int(found[2]) >= 1
    assert undisturbed.split()[2] == found[1]
    assert compared.strip() == "the same accuracy and losses as in the first run"


@pytest.mark.slow
def test_a_run_with_killed_workers_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sharded_loader.demo.train.train_and_kill",
        lambda options, on_batch: (Report(0.5, 359, (1.0,), None, None), ""),  # type: ignore[arg-type]
    )
    assert main(["demo", "--kill", "--epochs", "1"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out
