"""``sharded-loader demo``: a network trained on real scans, by one command, that fails in words and stops when told."""

from __future__ import annotations

import re
import subprocess
import sys

import psutil
import pytest
from interrupted import interrupt

from sharded_loader.cli import main

DEMO = [sys.executable, "-m", "sharded_loader", "demo"]


@pytest.mark.slow
def test_a_quiet_demo_prints_its_three_results(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "1", "-q"]) == 0
    said = capsys.readouterr()
    accuracy, speed, waiting = said.out.splitlines()
    assert re.fullmatch(r"held-out accuracy +[\d.]+% of 359 scans", accuracy)
    assert re.fullmatch(r"samples per second +[\d,]+", speed)
    assert re.fullmatch(r"waiting for data +[\d.]+% of the last epoch", waiting)
    assert said.err == ""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_recognises_digits() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, encoding="utf-8", timeout=280)
    assert done.returncode == 0, done.stderr
    # In a pipe, progress is lines without control characters.
    assert [
        line for line in done.stderr.splitlines() if not re.fullmatch(r"training: \d+ of 20, loss [\d.]+", line)
    ] == []
    found = re.search(r"^held-out accuracy +([\d.]+)% of 359 scans$", done.stdout, re.MULTILINE)
    assert found and float(found[1]) > 97


@pytest.mark.costly(3)
@pytest.mark.last  # scikit-learn
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--epochs", "0"], r"--epochs.*0 is not in the range"),
        (["--epochs", "many"], r"--epochs.*'many' is not a valid integer"),
        (["--seed", "-1"], r"--seed.*-1 is not in the range"),
        (["--seed", str(2**63)], r"--seed.* is not in the range"),
        (["--sed", "1"], r"No such option.*--sed.*--seed"),
    ],
)
def test_a_bad_option_is_said_in_one_line(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr()
    assert re.search(said, shown.err)
    assert shown.err.startswith("sharded-loader demo: ")
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_what_the_demo_needs_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo"]) == 2
    shown = capsys.readouterr()
    assert "pip install scikit-learn" in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_stops_the_demo_and_its_workers() -> None:
    def workers_that_train(running: subprocess.Popen[str]) -> list[psutil.Process]:
        assert running.stderr is not None
        while not running.stderr.readline().startswith("training: "):  # said after two seconds
            assert running.poll() is None
        return psutil.Process(running.pid).children(recursive=True)

    workers, _ = interrupt([*DEMO, "--epochs", "100000"], workers_that_train)
    assert len(workers) >= 2
    assert not any(worker.is_running() for worker in workers)
