"""The command as programs see it: exit codes, one line for each error, pipes that close, Ctrl-C, no click."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click
import pytest
from interrupted import interrupt

from sharded_loader import __version__
from sharded_loader.cli import main, make_command
from sharded_loader.recordio import MXRecordIO

COMMAND = [sys.executable, "-m", "sharded_loader"]
VERBS = [
    ["demo"],
    ["doctor"],
    ["bench"],
    ["records"],
    ["records", "pack"],
    ["records", "index"],
    ["diff"],
]


def at(folder: Path) -> dict[str, Any]:
    """How to run a program in a folder, with what this process imports."""
    return {"cwd": folder, "env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}


@pytest.mark.parametrize("arguments", [[], ["records"]])
def test_without_a_verb_it_prints_its_help(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "Commands:" in shown.out
    assert shown.err == ""


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_and_can_be_quiet(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: sharded-loader {' '.join(verb)}")
    assert "--quiet" in shown or "Commands:" in shown


def test_the_verbs_are_listed_with_a_sentence() -> None:
    assert sorted(make_command().commands) == [
        "bench",
        "demo",
        "diff",
        "doctor",
        "index",
        "records",
    ]
    assert [name for name, verb in make_command().commands.items() if not (verb.short_help or "").endswith(".")] == []


def test_every_option_is_explained() -> None:
    verbs = [*make_command().commands.values()]
    verbs += [inner for verb in verbs if isinstance(verb, click.Group) for inner in verb.commands.values()]
    options = [(verb.name, one) for verb in verbs for one in verb.params if isinstance(one, click.Option)]
    assert len(options) > 20
    assert [(name, one.name) for name, one in options if not (one.help or "").endswith(".")] == []


def test_an_unknown_verb_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dmo"]) == 2
    shown = capsys.readouterr()
    assert "No such command" in shown.err and "dmo" in shown.err
    assert shown.err.count("\n") == 1


def test_version_and_help_wait_for_nothing_heavy() -> None:
    program = (
        "import sys; from sharded_loader.cli import main\n"
        f"codes = [main(['--version']), main([]), *(main([*verb, '--help']) for verb in {VERBS})]\n"
        "print(codes, [m for m in ('torch', 'numpy', 'psutil', 'sklearn', 'multiprocess') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == f"sharded-loader {__version__}"
    assert lines[-1] == f"{[0] * (2 + len(VERBS))} []"


def test_without_a_package_that_the_command_needs_one_line_says_what_to_install() -> None:
    program = "import sys, runpy; sys.modules['click'] = None\nrunpy.run_module('sharded_loader', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert done.stderr == "sharded-loader: the command needs click: pip install click\n"
    assert done.stdout == ""


def test_the_module_is_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sharded-loader {__version__}\n", "")


TABLE = ["bench", "keyword:kwlist", "--pools", "inline", "--seconds", "0.01", "-q"]


@pytest.mark.costly
@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["records"], ["records", "index", "letters.rec"], pytest.param(TABLE, marks=pytest.mark.slow)],
    ids=" ".join,
)
def test_a_closed_pipe_ends_the_command_without_a_traceback(arguments: list[str], tmp_path: Path) -> None:
    with MXRecordIO(tmp_path / "letters.rec", "w") as file:
        file.write(b"a")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        pipes = {"stdout": writer, "stderr": subprocess.PIPE}
        done = subprocess.run([*COMMAND, *arguments], timeout=300, **pipes, **at(tmp_path))
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="sends SIGINT to a process group")
def test_ctrl_c_stops_bench_and_its_workers_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "data_to_stop.py").write_text(
        "import os, time\n"
        "class Slow:\n"
        "    def __len__(self): return 10**6\n"
        "    def __getitem__(self, index):\n"
        "        open(f'read-by-{os.getpid()}', 'w').close()\n"
        "        time.sleep(0.01)\n"
        "        return index\n"
        "slow = Slow()\n"
    )

    def workers_that_read(running: subprocess.Popen[str]) -> list[Path]:
        deadline = time.monotonic() + 60
        while len(readers := list(tmp_path.glob("read-by-*"))) < 2:
            assert running.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        return readers

    arguments = ["bench", "data_to_stop:slow", "--pools", "process", "--seconds", "999", "-q"]
    readers, out = interrupt([*COMMAND, *arguments], workers_that_read, **at(tmp_path))
    assert out == ""
    for reader in readers:
        with pytest.raises(ProcessLookupError):
            os.kill(int(reader.name.rpartition("-")[2]), 0)
