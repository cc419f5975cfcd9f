"""The training runs that are disturbed: killed in mid-epoch and resumed in a new process, or with workers killed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_loader.cli.main import main
from sharded_loader.demo import disturbed
from sharded_loader.demo.disturbed import stop_and_resume
from sharded_loader.demo.train import Options, Report

CPU = (torch.device("cpu"),)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_that_is_killed_and_resumed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--stop-resume", "--epochs", "2", "--seed", "2"]) == 0
    *before, resumed, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]  # a busy machine adds a line
    accuracy = undisturbed.split()[2]
    assert resumed.startswith(f"killed and resumed  {accuracy}: saved after step 34, killed in mid-epoch")
    assert compared.strip() == "the same accuracy and losses as in the first run"


def test_a_resumed_run_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = Report(0.5, 359, (1.0,), None, None)  # type: ignore[arg-type]
    monkeypatch.setattr(disturbed, "stop_and_resume", lambda options, on_wait: (other, ""))
    assert main(["demo", "--stop-resume", "--epochs", "1", "--pool", "inline"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out


def fails(*arguments: Any) -> None:
    raise SystemExit(3)


@pytest.mark.slow
@pytest.mark.parametrize("save_at", ["never", "at once"])
def test_a_process_that_fails_is_an_error(save_at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before it is killed, or after it was resumed."""
    monkeypatch.setattr(disturbed, "_train", fails)
    if save_at == "at once":
        monkeypatch.setattr(Path, "exists", lambda path: True)
    with pytest.raises(RuntimeError, match=r"ended by itself, exit code 3|resumed training run failed, exit code"):
        stop_and_resume(Options(CPU, "inline", 0, epochs=1))


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", "--epochs", "2", "--seed", "2"]) == 0
    *before, shown, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]
    found = re.fullmatch(r"with workers killed ([\d.]+%): (\d+) killed at random while it trained", shown)
    assert found and int(found[2]) >= 1
    assert undisturbed.split()[2] == found[1]
    assert compared.strip() == "the same accuracy and losses as in the first run"


def test_a_run_with_killed_workers_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sharded_loader.demo.disturbed.train_and_kill",
        lambda options, on_batch: (Report(0.5, 359, (1.0,), None, None), ""),  # type: ignore[arg-type]
    )
    assert main(["demo", "--kill", "--epochs", "1"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out
