"""The training run whose workers are killed."""

from __future__ import annotations

import re

import pytest

from sharded_loader.cli.main import main
from sharded_loader.demo.train import Report


@pytest.mark.slow
def test_a_run_whose_workers_are_killed_ends_as_one_that_was_left_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kill", "--epochs", "2", "--seed", "2"]) == 0
    *before, disturbed, compared = capsys.readouterr().out.splitlines()
    [undisturbed] = [line for line in before if line.startswith("held-out accuracy")]
    found = re.fullmatch(r"with workers killed ([\d.]+%): (\d+) killed at random while it trained", disturbed)
    assert found and int(found[2]) >= 1
    assert undisturbed.split()[2] == found[1]
    assert compared.strip() == "the same accuracy and losses as in the first run"


def test_a_disturbed_run_that_differs_is_an_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        "sharded_loader.demo.kill.train_and_kill",
        lambda options, on_batch: (Report(0.5, 359, (1.0,), None, None), ""),  # type: ignore[arg-type]
    )
    assert main(["demo", "--kill", "--epochs", "1"]) == 1
    assert "NOT the same accuracy and losses" in capsys.readouterr().out
