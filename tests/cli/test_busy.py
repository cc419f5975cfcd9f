"""What the command says of other programs that use the machine."""

from __future__ import annotations

import sys
from typing import Any

import psutil
import pytest

from sharded_loader.cli import bench
from sharded_loader.cli.busy import busy_text, cores_of_others
from sharded_loader.cli.facts import Facts
from sharded_loader.cli.findings import find
from sharded_loader.cli.main import main


@pytest.mark.parametrize(
    ("others", "cores", "usable", "said"),
    [
        (None, 2, 2, False),
        (0.0, 2, 2, False),
        (0.2, 2, 2, False),
        (1.7, 2, 2, True),
        (30.0, 64, 8, False),
        (60.0, 64, 8, True),
        (60.0, 64, 64, True),
    ],
)
def test_it_is_said_only_if_workers_lack_cores(others: float | None, cores: int, usable: int, said: bool) -> None:
    assert (busy_text(others, cores, usable) is not None) == said


def test_without_psutil_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert cores_of_others() is None


def test_the_cores_of_others_are_a_share_of_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 85.0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert cores_of_others() == pytest.approx(1.7)


def test_doctor_notes_a_busy_machine() -> None:
    [note] = find(Facts(cores=2, usable_cores=2, others=1.7))
    assert not note.is_problem
    assert note.what == "Other programs use 1.7 of 2 cores. Workers get what is left."


@pytest.mark.parametrize(("others", "said"), [(1.7, True), (0.0, False), (None, False)])
def test_bench_says_that_the_machine_is_busy(
    others: float | None, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "cores_of_others", lambda: others)
    monkeypatch.setattr(bench, "cores_for_workers", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    arguments: Any = ["bench", "keyword:kwlist", "--pools", "inline", "--seconds", "0.01"]
    assert main(arguments) == 0
    assert ("Other programs use 1.7 of 2 cores. The figures are lower" in capsys.readouterr().out) == said
