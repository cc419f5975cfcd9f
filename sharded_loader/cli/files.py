"""Files of a verb. What it writes appears only when it is whole, and replaces another only if asked.

    check_output(file, force=force)        an error before any work is done
    with replaced(file) as (written,):     written under another name; the file at the end
    with os_errors_in_one_line(file):      a full disk is one line

What can go wrong: the folder is absent or read-only, the disk is full. Nothing appears then.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from sharded_loader.cli.output import CannotRun

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

force_option = click.option("--force", is_flag=True, help="Replace files that exist.")


def check_output(*files: Path, force: bool) -> None:
    """The output can be written to its folder, and replaces nothing by accident."""
    folder = files[0].absolute().parent
    if not folder.is_dir():
        raise CannotRun(f"there is no folder {folder}: create it first")
    if not os.access(folder, os.W_OK):
        raise CannotRun(f"{folder} cannot be written to: choose another folder")
    if not force and (existing := [str(file) for file in files if file.exists()]):
        raise CannotRun(f"there is already {' and '.join(existing)}: give another name, or --force to replace it")


@contextlib.contextmanager
def replaced(*files: Path) -> Iterator[list[Path]]:
    """Other names to write to. At the end they take the place of the files; after an exception they are removed."""
    partial = [file.with_name(f".{file.name}.{os.getpid()}.partial") for file in files]
    try:
        yield partial
        for written, file in zip(partial, files, strict=True):
            written.replace(file)
    finally:
        for written in partial:
            written.unlink(missing_ok=True)


@contextlib.contextmanager
def os_errors_in_one_line(file: Path) -> Iterator[None]:
    """Inside, an error of the system ends the command with one line."""
    try:
        yield
    except OSError as error:
        raise CannotRun(f"{error.filename or file}: {error.strerror or error}") from None


def read_state(file: Path) -> Any:
    """A state that was saved as JSON, also as a part of a fingerprint. Whether it is one is said where it is loaded."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CannotRun(f"{file} has no JSON ({error}): give a file with json.dumps(loader.state_dict())") from None
    return content["state"] if isinstance(content, dict) and "fingerprint" in content else content
