"""The main job: a network trained on real scans, by one command, that fails in words and stops when told."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch

from sharded_loader import __version__
from sharded_loader.demo.cli import main

DEMO = [sys.executable, "-m", "sharded_loader", "demo"]
CPU_TWICE = (torch.device("cpu"), torch.device("cpu"))


def test_the_demo_says_what_it_did_and_how_fast(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--epochs", "1", "--pool", "inline"]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    accuracy, speed, waiting = said.out.splitlines()[-3:]
    assert re.fullmatch(r"held-out accuracy +[\d.]+% of 359 scans", accuracy)
    assert re.fullmatch(r"samples per second +[\d,]+", speed)
    assert re.fullmatch(r"waiting for data +[\d.]+% of the time", waiting)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_recognises_digits() -> None:
    done = subprocess.run(DEMO, capture_output=True, text=True, encoding="utf-8", timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = re.search(r"^held-out accuracy +([\d.]+)% of 359 scans$", done.stdout, re.MULTILINE)
    assert found and float(found[1]) > 97


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "cpu,tpu9"], r"device 'tpu9' is unknown; this process sees: cpu"),
        (["--devices", "cuda:99"], r"device 'cuda:99' is not there; this process sees: cpu"),
        (["--devices", "cpu,"], r"device '' is unknown"),
        (["--devices", "meta"], r"meta"),
        (["--pool", "dask"], r"invalid choice: 'dask' \(choose from '?inline'?, '?thread'?, '?process'?, '?ray'?\)"),
        (["--workers", "0"], r"--workers: 0 is out of range: give a number from 1"),
        (["--pool", "inline", "--workers", "2"], r"leave out --workers"),
        (["--kill", "--pool", "thread"], r"--kill kills worker processes, and --pool thread has none"),
        (["--kill", "--pool", "ray"], r"--kill kills worker processes, and --pool ray has none here"),
        (["--kill", "--pool", "inline"], r"--kill kills worker processes, and --pool inline has none"),
        (["--epochs", "0"], r"--epochs: 0 is out of range"),
        (["--epochs", "many"], r"--epochs: invalid int value: 'many'"),
        (["--seed", "-1"], r"--seed: -1 is out of range"),
        (["--sed", "1"], r"unrecognized arguments: --sed 1"),
    ],
)
def test_a_bad_option_is_said_in_words(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr()
    assert re.search(said, shown.err)
    assert "Traceback" not in shown.err
    assert shown.out == ""


def test_no_command_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("absent", ["sklearn.datasets", "rich.console"])
def test_a_missing_extra_is_named(
    absent: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    assert main(["demo"]) == 2
    shown = capsys.readouterr()
    assert 'pip install "sharded_loader[demo]"' in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_version_and_help_wait_for_nothing_heavy() -> None:
    program = (
        "import sys; from sharded_loader.demo.cli import main\n"
        "codes = main(['--version']), main(['--help']), main(['demo', '--help'])\n"
        "print(codes, [m for m in ('torch', 'numpy', 'rich', 'sklearn') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"sharded-loader {__version__}"
    assert lines[-1] == "(0, 0, 0) []"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_stops_the_demo_and_its_workers() -> None:
    # stdout to nowhere: a pipe that nobody reads could fill up.
    running = subprocess.Popen(
        [*DEMO, "--epochs", "100000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 60
        while len(workers := psutil.Process(running.pid).children(recursive=True)) < 2:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        time.sleep(0.5)
        os.killpg(running.pid, signal.SIGINT)
        _, said = running.communicate(timeout=30)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    # A shell sees 130 either way: Python ends itself by the signal where it struck inside an exec().
    assert running.returncode in (130, -signal.SIGINT)
    assert said == "sharded-loader: stopped by Ctrl-C\n"
    assert not any(worker.is_running() for worker in workers)
