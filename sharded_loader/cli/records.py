"""``sharded-loader records``: pack files into a RecordIO file, look into one, write its index.

    pack FOLDER_OR_LIST OUT.rec --> packing
    inspect FILE.rec -------------> examine
    index FILE.rec ---------------> examine.records_of, packing.write_index

Exit code 0; 1 if the record file is damaged, and one line says where; 2 if the command cannot run: missing files, an
output that exists, a folder that cannot be written to.
"""

from __future__ import annotations

import dataclasses
import os
from array import array
from collections import Counter
from pathlib import Path

import click

from sharded_loader.cli.examine import Examination, examine, records_of, short
from sharded_loader.cli.output import (
    CannotRun,
    Steps,
    complain,
    counted,
    json_option,
    quiet_option,
    say,
    say_json,
    show_table,
    size_text,
)
from sharded_loader.cli.packing import (
    Listing,
    find_folder,
    find_list,
    index_of,
    pack_files,
    read_labels,
    write_index,
    write_labels,
)

DAMAGED = 1
_PATH = click.Path(path_type=Path)
_REC = click.argument("file", type=_PATH, metavar="FILE.rec")
force_option = click.option("--force", is_flag=True, help="Replace files that exist.")


@click.group(
    short_help="Pack files into RecordIO, look into a record file, write its index.", invoke_without_command=True
)
@click.pass_context
def records(context: click.Context) -> None:
    """Pack files into a RecordIO file, look into one, or write its index."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@records.command(short_help="Pack the files of a folder or a list.")
@click.argument("source", type=_PATH, metavar="FOLDER_OR_LIST")
@click.argument("out", type=_PATH, metavar="OUT.rec")
@click.option(
    "--labels", type=_PATH, metavar="FILE", help="Class numbers, name<TAB>number: read, or written if absent."
)
@click.option("--suffix", multiple=True, metavar=".EXT", help="Pack only such files of the folder. May be repeated.")
@click.option("--root", type=_PATH, metavar="FOLDER", help="Where the paths of a list begin. Default: beside the list.")
@force_option
@quiet_option
def pack(
    source: Path, out: Path, labels: Path | None, suffix: tuple[str, ...], root: Path | None, force: bool, quiet: bool
) -> None:
    """Pack files into OUT.rec and OUT.idx. The bytes of the files do not change.

    In a folder, each sub-folder is a class. The classes get the numbers 0, 1, 2 ... in the order of their names. A list
    has a path on each line, or MXNet's key<TAB>label<TAB>path.
    """
    if out.suffix != ".rec":
        raise CannotRun(f"{out}: give a name that ends in .rec, so that readers find the index beside it")
    _check_output(out, index_of(out), force=force)
    names = None
    try:
        if labels is not None and labels.exists():
            names = read_labels(labels)
        listing = _listing(source, suffix, root, names)
        if labels is not None and not listing.names:
            raise CannotRun(f"{source} has no class names for --labels {labels}: leave out --labels")
        with Steps("packing", len(listing.entries), quiet) as steps:
            nbytes = pack_files(listing.entries, out, steps.update)
        if labels is not None and names is None:
            write_labels(labels, listing.names)
    except OSError as error:
        raise _cannot(error, out) from None
    if quiet:
        return
    say(f"{out}: {counted(len(listing.entries), 'record')}, {size_text(nbytes)}; index in {index_of(out).name}")
    kinds = Counter(entry.path.suffix.lower() or "no suffix" for entry in listing.entries)
    if len(kinds) > 1:
        shown = [f"{count:,} {kind}" for kind, count in kinds.most_common(10)]
        say(f"files: {', '.join(shown)}. To pack one kind only, give --suffix .EXT")
    if listing.names:
        shown = [f"{number} {name}" for name, number in list(listing.names.items())[:10]]
        say(f"labels: {', '.join(shown)}{', ...' if len(listing.names) > 10 else ''}")
    if listing.left_out:
        say(f"left out: {counted(listing.left_out, 'file')} directly in {source}, in no class")


@records.command(short_help="Say what is in a record file, and where it is damaged.")
@_REC
@click.option("--first", type=click.IntRange(0), default=5, show_default=True, help="How many records to list.")
@json_option
@quiet_option
def inspect(file: Path, first: int, as_json: bool, quiet: bool) -> int:
    """Read all of a record file: sizes, labels, contents, its index, and where it is damaged.

    With --quiet it prints only what is wrong.
    """
    try:
        with Steps("reading", _size_of(file), quiet) as steps:
            found = examine(file, first, steps.update)
    except OSError as error:
        raise _cannot(error, file) from None
    if as_json:
        say_json(dataclasses.asdict(found))
    elif not quiet:
        _show(found)
    if found.damage is not None:
        complain(f"{file} is damaged at offset {found.damage_offset:,}: {found.damage}")
        complain(f"{counted(found.records, 'whole record')} before that can be read: pack or copy the file again")
    elif found.index_is_wrong:
        complain(f"the index is wrong: {found.index}. Write it again: sharded-loader records index {file} --force")
    return DAMAGED if found.damage is not None or found.index_is_wrong else 0


@records.command(short_help="Write the index of a record file.")
@_REC
@force_option
@quiet_option
def index(file: Path, force: bool, quiet: bool) -> int:
    """Write FILE.idx beside FILE.rec. The keys are 0, 1, 2 ... in the order of the records."""
    from sharded_loader.recordio import RecordIOError

    idx = index_of(file)
    try:
        size = _size_of(file)
        _check_output(idx, force=force)
        offsets = array("q")
        with Steps("reading", size, quiet) as steps:
            for offset, _ in records_of(file):
                offsets.append(offset)
                steps.update(offset)
        write_index(file, offsets)
    except RecordIOError as error:
        complain(f"{file} is damaged at offset {error.offset:,}, no index was written: {short(error)}")
        return DAMAGED
    except OSError as error:
        raise _cannot(error, file) from None
    if not quiet:
        say(f"{idx}: {counted(len(offsets), 'key')}")
    return 0


def _listing(source: Path, suffix: tuple[str, ...], root: Path | None, names: dict[str, int] | None) -> Listing:
    if source.is_dir():
        if root is not None:
            raise CannotRun(f"--root is for lists, and {source} is a folder: leave out --root")
        return find_folder(source, [f".{one.lower().lstrip('.')}" for one in suffix], names)
    if not source.is_file():
        raise CannotRun(f"there is no folder or list {source}")
    if suffix:
        raise CannotRun(f"--suffix is for folders, and {source} is a list: leave out --suffix")
    return find_list(source, root, names)


def _size_of(file: Path) -> int:
    if not file.is_file():
        raise CannotRun(f"there is no file {file}")
    return file.stat().st_size


def _check_output(*files: Path, force: bool) -> None:
    """The output can be written to its folder, and replaces nothing by accident."""
    folder = files[0].absolute().parent
    if not folder.is_dir():
        raise CannotRun(f"there is no folder {folder}: create it first")
    if not os.access(folder, os.W_OK):
        raise CannotRun(f"{folder} cannot be written to: choose another folder")
    existing = [str(file) for file in files if file.exists()]
    if existing and not force:
        raise CannotRun(f"there is already {' and '.join(existing)}: give another name, or --force to replace it")


def _cannot(error: OSError, file: Path) -> CannotRun:
    return CannotRun(f"{error.filename or file}: {error.strerror or error}")


def _show(found: Examination) -> None:
    def listed(counts: dict[str, int]) -> str:
        shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:10]]
        return ", ".join(shown) + (", ..." if len(counts) > 10 else "") or "none"

    say(f"file      {found.path}, {size_text(found.nbytes)}")
    say(f"records   {found.records:,}; {found.headers:,} with a label header")
    if found.records:
        sizes = [size_text(one) for one in (found.smallest, found.median, found.largest)]
        say(f"sizes     smallest {sizes[0]}, median {sizes[1]}, largest {sizes[2]}")
    say(f"contents  {listed(found.contents)}")
    say(f"labels    {listed(found.labels)}")
    say(f"index     {found.index}")
    if found.first:
        say()
        rows = [
            [
                str(n),
                f"{one.offset:,}",
                f"{one.nbytes:,}",
                one.label or "-",
                "-" if one.id is None else str(one.id),
                one.content,
            ]
            for n, one in enumerate(found.first)
        ]
        show_table(["record", "offset", "bytes", "label", "id", "content"], rows, left=0)
