"""What the verbs print: results on stdout, progress and complaints on stderr.

    show_table(...), show_json(...)                 --> stdout
    complain(text)                                  --> stderr
    with Steps("packing", total) as steps:
        steps.update(done)                          --> stderr: a bar in a terminal, lines in a pipe

`Steps` prints nothing in the first two seconds. It starts no thread: the bar moves when `update` is called. So it may
run while workers are forked and while speed is measured. It owns the bar, and takes it away at the end.

What can go wrong: the reader of a pipe goes away. Then click, or rich in a table, ends the command: exit code 1.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.progress import Progress

BUSY = 0.3
"""Cores. Measurements vary visibly if workers lack more than this."""

PATIENCE = 2.0
"""Seconds without any progress shown."""

LINES_EVERY = 5.0
"""Seconds between two lines in a pipe."""

FRAMES_EVERY = 0.1
"""Seconds between two pictures of the bar."""

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print results only: no progress, no explanations.")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead.")


@click.pass_context
def print_help(context: click.Context) -> None:
    """What a command does that needs a verb and got none."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


class CannotRun(click.UsageError):
    """The command cannot run as typed. The message is one line that says why and what to do.

    Args:
        message: the line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, click.get_current_context(silent=True))


def show_json(content: Any) -> None:
    """Print the result as JSON."""
    click.echo(json.dumps(content, indent=2))


def complain(text: str) -> None:
    """Print a line about something that is wrong."""
    click.echo(f"{click.get_current_context().command_path}: {' '.join(text.split())}", err=True)


def show_table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> None:
    """Print a table.

    Args:
        columns: the headings.
        rows: the cells, as text.
        left: how many columns are aligned to the left; the others hold numbers.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for number, heading in enumerate(columns):
        table.add_column(heading, justify="left" if number < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)


def counted(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "file"), counted(1200, "file")
        ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """An exception as one line of text.

    Example:
        >>> one_line(ValueError("a\\nb"))
        'ValueError: a b'
    """
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


def size_text(nbytes: float) -> str:
    """A number of bytes for people.

    Example:
        >>> size_text(64), size_text(1536), size_text(64 << 20), size_text(3 << 40)
        ('64 bytes', '1.5 KiB', '64.0 MiB', '3,072.0 GiB')
    """
    from rich.filesize import pick_unit_and_suffix

    unit, name = pick_unit_and_suffix(int(nbytes), ["bytes", "KiB", "MiB", "GiB"], 1024)
    return f"{nbytes / unit:,.{0 if unit == 1 else 1}f} {name}"


def cores_of_others(seconds: float = 0.1) -> float:
    """The number of cores that other programs use.

    Args:
        seconds: how long to look. This process must do nothing meanwhile.
    """
    import psutil

    return float(psutil.cpu_percent(interval=seconds)) / 100 * (os.cpu_count() or 1)


def busy_text(others: float, cores: int, usable: float) -> str | None:
    """A sentence about other programs, if they use cores that workers need; otherwise None.

    Args:
        others: as `cores_of_others` returns it.
        cores: the cores of the machine.
        usable: how many of them workers may use.

    Example:
        >>> busy_text(1.7, cores=2, usable=2), busy_text(1.7, cores=64, usable=8)
        ('Other programs use 1.7 of 2 cores.', None)
    """
    if others + usable < cores + BUSY:
        return None
    return f"Other programs use {others:.1f} of {cores} cores."


class Steps(AbstractContextManager["Steps"]):
    """Progress of one long job.

    Args:
        what: what is being done, such as ``packing``.
        total: how many steps there are. None: unknown.
        quiet: print nothing.
        clock: tells the time in seconds; another one in tests.
    """

    def __init__(
        self, what: str, total: int | None, quiet: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._total, self._quiet, self._clock = what, total, quiet, clock
        self._next = clock() + PATIENCE
        self._in_terminal = sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._bar: Progress | None = None

    def update(self, done: int, note: str = "") -> None:
        """Show how many steps are done, if it is time to.

        Args:
            done: the number of steps.
            note: a few words beside it.
        """
        now = self._clock()
        if self._quiet or now < self._next:
            return
        if not self._in_terminal:
            self._next = now + LINES_EVERY
            of = "" if self._total is None else f"{done:,} of {self._total:,}"
            click.echo(f"{self._what}: {', '.join(filter(None, [of, note]))}", err=True)
            return
        self._next = now + FRAMES_EVERY
        if self._bar is None:
            self._bar = _start_bar()
            self._task = self._bar.add_task("", total=self._total)
        self._bar.update(self._task, completed=done, description=f"{self._what} {note}")
        self._bar.refresh()

    def __exit__(self, *raised: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _start_bar() -> Progress:
    """A bar on stderr without a thread. It leaves stdout and stderr alone, because workers may be forked meanwhile."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    console = Console(stderr=True)
    bar = Progress(
        *columns, console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False
    )
    bar.start()
    return bar
