"""Output shared by the verbs: results on stdout, progress and complaints on stderr, checks of files.

    complain(text)                                  --> stderr
    Steps("packing", total).update(done)            --> stderr: a line now and then

`Steps` is silent for the first two seconds. It starts no thread, so workers may fork and speed be measured meanwhile.
If the reader of a pipe goes away, click ends the command with exit code 1.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterator
from pathlib import Path

import click

PATIENCE, EVERY = 2.0, 5.0
"""Seconds before progress is shown, and between two lines of it."""

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print results only: no progress, no explanations.")
force_option = click.option("--force", is_flag=True, help="Replace files that exist.")


@click.pass_context
def print_help(context: click.Context) -> None:
    """Print the help of a command that needs a verb and got none."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


class CannotRun(click.UsageError):
    """The command cannot run as typed. The message is one line that says why and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message, click.get_current_context(silent=True))


def complain(text: str) -> None:
    """Print a line about something that is wrong."""
    click.echo(f"{click.get_current_context().command_path}: {' '.join(text.split())}", err=True)


def counted(number: int, noun: str) -> str:
    """Format a number of things.

    Example:
        >>> counted(1, "file"), counted(1200, "file")
        ('1 file', '1,200 files')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def one_line(error: BaseException) -> str:
    """Format an exception in one line.

    Example:
        >>> one_line(ValueError("a\\nb"))
        'ValueError: a b'
    """
    return ": ".join(filter(None, [type(error).__name__, " ".join(str(error).split())]))


def say_error(error: BaseException) -> str:
    """Format an exception of the user's code in one line, with the loader's notes: epoch, batch, sample.

    Example:
        >>> say_error(KeyError("label"))
        "KeyError: 'label'"
    """
    from sharded_loader.extend.tools import notes_of

    where = [note.partition(" in ")[2] for note in notes_of(error) if note.startswith("sharded_loader: in ")]
    return one_line(error) + (f" (in {where[-1]})" if where else "")


def ms_text(ms: float) -> str:
    """Format milliseconds with three digits.

    Example:
        >>> ms_text(0.01234), ms_text(12.345), ms_text(1234.5)
        ('0.0123', '12.3', '1,234')
    """
    return f"{ms:.3g}" if ms < 100 else f"{ms:,.0f}"


def size_text(nbytes: float) -> str:
    """Format a number of bytes.

    Example:
        >>> size_text(64), size_text(1536), size_text(64 << 20), size_text(3 << 40)
        ('64 bytes', '1.5 KiB', '64.0 MiB', '3,072.0 GiB')
    """
    power = min(max(0, int(nbytes).bit_length() - 1) // 10, 3)
    return f"{nbytes / 1024**power:,.{min(power, 1)}f} {('bytes', 'KiB', 'MiB', 'GiB')[power]}"


class Steps:
    """Progress of one long job, named ``what``, such as ``packing``. ``total`` is None if unknown."""

    def __init__(self, what: str, total: int | None, quiet: bool = False) -> None:
        self._what, self._total = what, total
        self._next = math.inf if quiet else time.monotonic() + PATIENCE

    def update(self, done: int, note: str = "") -> None:
        """Show the number of steps done, with a note of a few words, if it is time to."""
        if (now := time.monotonic()) >= self._next:
            self._next = now + EVERY
            of = "" if self._total is None else f"{done:,} of {self._total:,}"
            click.echo(f"{self._what}: {', '.join(filter(None, [of, note]))}", err=True)


def check_output(*files: Path, force: bool) -> None:
    """Raise an error if files would be replaced by accident."""
    if not force and (existing := [str(file) for file in files if file.exists()]):
        raise CannotRun(f"there is already {' and '.join(existing)}: give another name, or --force to replace it")


@contextlib.contextmanager
def os_errors_in_one_line(file: Path) -> Iterator[None]:
    """End the command with one line if the block raises an OSError."""
    try:
        yield
    except OSError as error:
        raise CannotRun(f"{error.filename or file}: {error.strerror or error}") from None
