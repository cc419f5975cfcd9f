"""Progress is a line in a terminal and lines in a pipe, and shows nothing of what is done soon."""

from __future__ import annotations

import io
import sys

import pytest

from sharded_loader.cli import output
from sharded_loader.cli.output import Steps


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(seconds_per_step: float, steps: int, quiet: bool = False) -> None:
    now = [100.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output.time, "monotonic", lambda: now[0])
        with Steps("packing", steps, quiet) as progress:
            for done in range(1, steps + 1):
                now[0] += seconds_per_step
                progress.update(done, "a note")


def test_in_a_pipe_progress_is_a_line_now_and_then(capsys: pytest.CaptureFixture[str]) -> None:
    work(1.0, 1200)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "packing: 2 of 1,200, a note"
    assert lines[1] == "packing: 7 of 1,200, a note"
    assert len(lines) == 240


@pytest.mark.parametrize(("seconds", "quiet"), [(0.01, False), (10.0, True)])
def test_what_is_done_soon_or_quietly_shows_nothing(
    seconds: float, quiet: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    work(seconds, 100, quiet)
    assert capsys.readouterr().err == ""


def test_in_a_terminal_progress_is_a_line_that_is_taken_away(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    work(1.0, 10)
    first, *_, last, empty = terminal.getvalue().split("\r")[1:]
    assert (first, last) == ("packing: 2 of 10, a note\x1b[K", "packing: 10 of 10, a note\x1b[K")
    assert empty == "\x1b[K"


def test_a_terminal_that_cannot_move_its_cursor_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "dumb")
    work(1.0, 3)
    assert terminal.getvalue() == "packing: 2 of 3, a note\n"


def test_a_job_of_unknown_length_shows_its_note(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "PATIENCE", 0.0)
    with Steps("resuming", None) as progress:
        progress.update(0, "training")
    assert capsys.readouterr().err == "resuming: training\n"
