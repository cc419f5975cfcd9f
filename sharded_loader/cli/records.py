"""``sharded-loader records``: pack files into a RecordIO file, look into one, write its index.

    pack FOLDER_OR_LIST OUT.rec --> record_files.pack_files
    inspect FILE.rec -------------> record_files.examine
    index FILE.rec ---------------> record_files.examine, record_files.write_index

Exit code 0; 1 if the record file is damaged, and one line says where; 2 if the command cannot run: missing files, an
output that exists, a folder that cannot be written to.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections import Counter
from pathlib import Path

import click

from sharded_loader.cli import output, record_files
from sharded_loader.cli.files import check_output, force_option, os_errors_in_one_line
from sharded_loader.cli.output import CannotRun, Steps, complain, counted, size_text

DAMAGED = 1
_PATH = click.Path(path_type=Path)
_INPUT = click.Path(exists=True, path_type=Path)
_REC = click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.rec")

records = click.Group(
    "records",
    callback=output.print_help,
    invoke_without_command=True,
    help="Pack files into a RecordIO file, look into one, or write its index.",
    short_help="Pack files into RecordIO, look into a record file, write its index.",
)


@records.command(short_help="Pack the files of a folder or a list.")
@click.argument("source", type=_INPUT, metavar="FOLDER_OR_LIST")
@click.argument("out", type=_PATH, metavar="OUT.rec")
@click.option(
    "--labels", type=_PATH, metavar="FILE", help="Class numbers, name<TAB>number: read, or written if absent."
)
@click.option("--suffix", multiple=True, metavar=".EXT", help="Pack only such files of the folder. May be repeated.")
@click.option("--root", type=_PATH, metavar="FOLDER", help="Where the paths of a list begin. Default: beside the list.")
@force_option
@output.quiet_option
def pack(
    source: Path, out: Path, labels: Path | None, suffix: tuple[str, ...], root: Path | None, force: bool, quiet: bool
) -> None:
    """Pack files into OUT.rec and OUT.idx. The bytes of the files do not change.

    In a folder, each sub-folder is a class. The classes get the numbers 0, 1, 2 ... in the order of their names. A list
    has a path on each line, or MXNet's key<TAB>label<TAB>path.
    """
    if out.suffix != ".rec":
        raise CannotRun(f"{out}: give a name that ends in .rec, so that readers find the index beside it")
    check_output(out, out.with_suffix(".idx"), force=force)
    with os_errors_in_one_line(out):
        names = record_files.read_labels(labels) if labels is not None and labels.exists() else None
        listing = _listing(source, suffix, root, names)
        if labels is not None and not listing.names:
            raise CannotRun(f"{source} has no class names for --labels {labels}: leave out --labels")
        with Steps("packing", len(listing.entries), quiet) as steps:
            nbytes = record_files.pack_files(listing.entries, out, steps.update)
        if labels is not None and names is None:
            record_files.write_labels(labels, listing.names)
    if quiet:
        return
    count = counted(len(listing.entries), "record")
    click.echo(f"{out}: {count}, {size_text(nbytes)}; index in {out.with_suffix('.idx').name}")
    kinds = Counter(entry.path.suffix.lower() or "no suffix" for entry in listing.entries)
    if len(kinds) > 1:
        shown = [f"{count:,} {kind}" for kind, count in kinds.most_common(10)]
        click.echo(f"files: {', '.join(shown)}. To pack one kind only, give --suffix .EXT")
    if listing.names:
        shown = [f"{number} {name}" for name, number in list(listing.names.items())[:10]]
        click.echo(f"labels: {', '.join(shown)}{', ...' if len(listing.names) > 10 else ''}")
    if listing.left_out:
        click.echo(f"left out: {counted(listing.left_out, 'file')} directly in {source}, in no class")


@records.command(short_help="Say what is in a record file, and where it is damaged.")
@_REC
@click.option("--first", type=click.IntRange(0), default=5, help="How many records to list.")
@output.json_option
@output.quiet_option
def inspect(file: Path, first: int, as_json: bool, quiet: bool) -> int:
    """Read all of a record file: sizes, labels, contents, its index, and where it is damaged.

    With --quiet it prints only what is wrong.
    """
    result, _ = _examine(file, first, quiet)
    if as_json:
        output.show_json(dataclasses.asdict(result))
    elif not quiet:
        _show(result)
    if result.damage is not None:
        complain(f"{file} is damaged at offset {result.damage_offset:,}: {result.damage}")
        complain(f"{counted(result.records, 'whole record')} before that can be read: pack or copy the file again")
    elif result.index_is_wrong:
        complain(f"the index is wrong: {result.index}. Write it again: sharded-loader records index {file} --force")
    return DAMAGED if result.damage is not None or result.index_is_wrong else 0


@records.command(short_help="Write the index of a record file.")
@_REC
@force_option
@output.quiet_option
def index(file: Path, force: bool, quiet: bool) -> int:
    """Write FILE.idx beside FILE.rec. The keys are 0, 1, 2 ... in the order of the records."""
    idx = file.with_suffix(".idx")
    check_output(idx, force=force)
    result, offsets = _examine(file, 0, quiet)
    if result.damage is not None:
        complain(f"{file} is damaged at offset {result.damage_offset:,}, no index was written: {result.damage}")
        return DAMAGED
    with os_errors_in_one_line(idx):
        record_files.write_index(file, offsets)
    if not quiet:
        click.echo(f"{idx}: {counted(len(offsets), 'key')}")
    return 0


def _examine(file: Path, first: int, quiet: bool) -> tuple[record_files.Examination, array[int]]:
    with os_errors_in_one_line(file), Steps("reading", file.stat().st_size, quiet) as steps:
        return record_files.examine(file, first, steps.update)


def _listing(
    source: Path, suffix: tuple[str, ...], root: Path | None, names: dict[str, int] | None
) -> record_files.Listing:
    if source.is_dir():
        if root is not None:
            raise CannotRun(f"--root is for lists, and {source} is a folder: leave out --root")
        return record_files.find_folder(source, [f".{end.lower().lstrip('.')}" for end in suffix], names)
    if suffix:
        raise CannotRun(f"--suffix is for folders, and {source} is a list: leave out --suffix")
    return record_files.find_list(source, root, names)


def _show(result: record_files.Examination) -> None:
    def listed(counts: dict[str, int]) -> str:
        shown = [f"{name} ({count:,})" for name, count in list(counts.items())[:10]]
        return ", ".join(shown) + (", ..." if len(counts) > 10 else "") or "none"

    sizes = [size_text(nbytes) for nbytes in (result.smallest, result.median, result.largest)]
    click.echo(f"file      {result.path}, {size_text(result.nbytes)}")
    click.echo(f"records   {result.records:,}; {result.headers:,} with a label header")
    if result.records:
        click.echo("sizes     smallest {}, median {}, largest {}".format(*sizes))
    click.echo(f"contents  {listed(result.contents)}")
    click.echo(f"labels    {listed(result.labels)}")
    click.echo(f"index     {result.index}")
    rows = []
    for number, record in enumerate(result.first):
        key = "-" if record.id is None else str(record.id)
        rows.append([str(number), f"{record.offset:,}", f"{record.nbytes:,}", record.label or "-", key, record.content])
    if rows:
        click.echo()
        output.show_table(["record", "offset", "bytes", "label", "id", "content"], rows, left=0)
