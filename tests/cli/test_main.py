"""The command as programs see it: exit codes, one line for each error, progress, pipes that close, Ctrl-C, the demo."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import psutil
import pytest

from sharded_loader import __version__
from sharded_loader.cli import main, make_command, output
from sharded_loader.cli.output import Steps
from sharded_loader.recordio import MXRecordIO

COMMAND = [sys.executable, "-m", "sharded_loader"]
VERBS = [["demo"], ["doctor"], ["bench"], ["records"], ["records", "pack"], ["records", "index"], ["diff"]]


def at(folder: Path) -> dict[str, Any]:
    """How to run a program in a folder, with what this process imports."""
    return {"cwd": folder, "env": os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}}


def test_without_a_verb_it_prints_its_help_and_an_unknown_one_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["records"]):
        assert main(arguments) == 0
        shown = capsys.readouterr()
        assert "Commands:" in shown.out and shown.err == ""
    assert main(["dmo"]) == 2
    shown = capsys.readouterr()
    assert "No such command" in shown.err and "dmo" in shown.err and shown.err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_and_can_be_quiet(verb: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*verb, "--help"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"Usage: sharded-loader {' '.join(verb)}")
    assert "--quiet" in shown or "Commands:" in shown


def test_every_verb_has_a_sentence_and_every_option_an_explanation() -> None:
    commands = make_command().commands
    assert sorted(commands) == ["bench", "demo", "diff", "doctor", "index", "records"]
    assert [name for name, verb in commands.items() if not (verb.short_help or "").endswith(".")] == []
    verbs = [*commands.values()]
    verbs += [inner for verb in verbs if isinstance(verb, click.Group) for inner in verb.commands.values()]
    options = [(verb.name, one) for verb in verbs for one in verb.params if isinstance(one, click.Option)]
    assert len(options) > 20
    assert [(name, one.name) for name, one in options if not (one.help or "").endswith(".")] == []
    shown = {tuple(word for word in command.split()[1:3] if word.isalpha()) for command, _ in EXAMPLES}
    assert shown >= {("doctor",), ("bench",), ("demo",), ("diff",), ("records", "pack"), ("records", "index")}


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


def test_the_module_is_the_command_and_without_click_one_line_says_what_to_install() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"sharded-loader {__version__}\n", "")
    program = "import sys, runpy; sys.modules['click'] = None\nrunpy.run_module('sharded_loader', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program, "doctor"], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "sharded-loader: the command needs click: pip install click\n"


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


def interrupt(command: Sequence[str], until_it_works: Callable[[subprocess.Popen[str]], Any], **where: Any) -> Any:
    """Start a command, and send Ctrl-C when it works, as a terminal does: to it and all of its workers.

    It has to end with one line and its own exit code. Returns what ``until_it_works`` returned, and its stdout.
    """
    pipe = subprocess.PIPE
    running = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True, **where)
    try:
        found = until_it_works(running)
        os.killpg(running.pid, signal.SIGINT)
        out, said = running.communicate(timeout=300)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()
    # A shell sees 130 either way: Python ends itself by the signal where it struck inside an exec().
    assert running.returncode in (130, -signal.SIGINT)
    assert said.splitlines()[-1] == "sharded-loader: stopped by Ctrl-C" and "Traceback" not in said
    return found, out


def progress_of(seconds_per_step: float, steps: int, quiet: bool = False) -> None:
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.time, "monotonic", lambda: now[0])
        progress = Steps("packing", steps, quiet)
        for done in range(1, steps + 1):
            now[0] += seconds_per_step
            progress.update(done, "a note")


def test_progress_is_a_line_now_and_then_if_it_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    progress_of(1.0, 1200)
    lines = capsys.readouterr().err.splitlines()
    assert lines[:2] == ["packing: 2 of 1,200, a note", "packing: 7 of 1,200, a note"] and len(lines) == 240
    progress_of(0.01, 100)
    progress_of(10.0, 100, quiet=True)
    assert capsys.readouterr().err == ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "PATIENCE", 0.0)
        Steps("resuming", None).update(0, "training")
    assert capsys.readouterr().err == "resuming: training\n"  # of unknown length


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
        ([], "pip install scikit-learn"),
    ],
)
def test_what_is_wrong_with_the_demo_is_said_in_one_line(
    options: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if not options:
        monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["demo", *options]) == 2
    shown = capsys.readouterr()
    assert re.search(said, shown.err) and shown.err.startswith("sharded-loader demo: ")
    assert shown.err.count("\n") == 1 and shown.out == ""


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


PAGE = (Path(__file__).resolve().parents[2] / "docs/guides/command.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```console\n\$ (.*)\n((?:.*\n)*?)```", PAGE)
SLOW_VERBS = ("bench", "demo", "doctor")
NUMBER = re.compile(r"[\d.,]*\d")


def without_numbers(line: str) -> str:
    return " ".join(NUMBER.sub("0", line).split())


@pytest.fixture
def page_folder(tmp_path: Path) -> Path:
    """What the page supposes: the module, and images in two classes, packed already."""
    modules = {"my_data": "scans = Scans()", "compared": "json.dump(loader.fingerprint"}
    for name, line in modules.items():
        [module] = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if line in block]
        (tmp_path / f"{name}.py").write_text(module, encoding="utf-8")
    for name in ("cat/0", "cat/1", "dog/0", "dog/1"):
        path = tmp_path / "photos" / f"{name}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\xff\xd8\xff" + bytes(1230))
    return tmp_path


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "COLUMNS": "80"}


def run_example(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    program, *arguments = shlex.split(command)
    assert program == "sharded-loader"
    where: dict[str, Any] = {"cwd": folder, "env": ENVIRONMENT, "encoding": "utf-8", "timeout": 100}
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, **where)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "promised"),
    [
        pytest.param(*example, id=example[0], marks=[pytest.mark.slow] if example[0].split()[1] in SLOW_VERBS else [])
        for example in EXAMPLES
    ],
)
def test_an_example_prints_what_the_page_says(command: str, promised: str, page_folder: Path) -> None:
    if "train.rec" in command and " pack " not in command:
        assert run_example("sharded-loader records pack photos train.rec", page_folder).returncode == 0
    if " diff" in command:
        subprocess.run([sys.executable, "compared.py"], cwd=page_folder, env=ENVIRONMENT, check=True)
    done = run_example(command, page_folder)
    if " doctor" in command:  # each machine has other facts, and the names are the same
        assert done.returncode in (0, 1), done.stderr
        promised = "\n".join(line.split("  ")[0] for line in promised.splitlines() if "  " in line)
        printed = [line.split("  ")[0].strip() for line in done.stdout.splitlines()]
        printed = [name if len(name) < 15 else name[:15].strip() for name in printed]
    else:
        assert done.returncode == (" diff" in command), done.stderr
        printed = [without_numbers(line) for line in done.stdout.splitlines()]
    wanted = [
        line if " doctor" in command else without_numbers(line) for line in promised.splitlines() if line != "..."
    ]
    if " bench" in command:
        *wanted, advice = wanted
        # It depends on the machine.
        assert printed.pop().startswith(("Use num_workers", "Inline is enough")) and advice.startswith(
            "Use num_workers"
        )
    remaining = iter(printed)
    assert [line for line in wanted if line not in remaining] == []
