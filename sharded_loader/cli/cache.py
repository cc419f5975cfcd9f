"""``sharded-loader cache``: look into the file of a cache, or delete it.

    info PATH, clear PATH --> caching.store.examine, is_cache

Exit code 0; 2 if there is no such file, or if it is no cache of samples: then it stays.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import CannotRun, counted, size_text

_FILE = click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="PATH")

cache = click.Group(
    "cache",
    callback=output.print_help,
    invoke_without_command=True,
    help="Look into the file of dataset.cache(path=...), or delete it.",
    short_help="Look into the file of a cache, or delete it.",
)


@cache.command(short_help="Say what is in the file of a cache.")
@_FILE
@output.json_option
def info(path: Path, as_json: bool) -> None:
    """Say how many samples are in the file of a cache, and what they take."""
    from sharded_loader.caching.store import examine

    with _errors_in_one_line():
        found = examine(str(path))
    if as_json:
        output.show_json(found._asdict())
    else:
        click.echo(f"{path}: {found.stored:,} of {counted(found.length, 'sample')}, {size_text(found.nbytes)}")
        click.echo(f"key: {'none' if found.key is None else found.key}; version {found.version} of the layout")


@cache.command(short_help="Delete the file of a cache.")
@_FILE
@output.quiet_option
def clear(path: Path, quiet: bool) -> None:
    """Delete the file of a cache. Programs that use it go on; the next one makes a new file."""
    from sharded_loader.caching.store import is_cache

    with _errors_in_one_line():
        if not is_cache(str(path)):
            raise CannotRun(f"{path} is no cache of samples: it was not deleted")
        os.unlink(path)
    if not quiet:
        click.echo(f"deleted {path}")


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError) as error:
        raise CannotRun(str(error)) from None
