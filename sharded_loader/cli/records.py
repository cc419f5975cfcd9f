"""``sharded-loader records`` and ``index``: pack files into a RecordIO file, write indexes.

    records pack FOLDER OUT.rec --> find_folder (a sub-folder is a class) --> pack_files
    records index FILE.rec -------> reads every byte once, and writes where each record begins
    index URL... -----------------> ShardDataset(...).write_index(...), and opened once

A record is MXNet's label header and the bytes of the file as they are. Output is written elsewhere and renamed at the
end. So a full disk, Ctrl-C or a file that cannot be read leaves no half of a file.

Exit code 0; 1 if the record file is damaged, and one line says where; 2 if the command cannot run: missing files, a
name without a number, an output that exists, a folder that cannot be written to, a shard that cannot be indexed.
"""

from __future__ import annotations

import json
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import CannotRun, Steps, check_output, complain, counted, os_errors_in_one_line

DAMAGED = 1

records = click.Group(
    "records", callback=output.print_help, invoke_without_command=True, help="RecordIO files.",
    short_help="Pack files into RecordIO, write the index of a record file.",
)  # fmt: skip


@records.command(short_help="Pack the files of a folder.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.rec")
@click.option("--labels", type=click.Path(path_type=Path), help="Numbers, name<TAB>number: read, or written if absent.")
@output.force_option
@output.quiet_option
def pack(folder: Path, out: Path, labels: Path | None, force: bool, quiet: bool) -> None:
    """Pack files into OUT.rec and OUT.idx. The bytes of the files do not change.

    Each sub-folder is a class. The classes get the numbers 0, 1, 2 ... in the order of their names.
    """
    if out.suffix != ".rec":
        raise CannotRun(f"{out}: give a name that ends in .rec, so that readers find the index beside it")
    check_output(out, out.with_suffix(".idx"), force=force)
    with os_errors_in_one_line(out):
        given = read_labels(labels) if labels is not None and labels.exists() else None
        files, names = find_folder(folder, given)
        with Steps("packing", len(files), quiet) as steps:
            nbytes = pack_files(files, out, steps.update)
        if labels is not None and given is None and names:
            labels.write_text("".join(f"{name}\t{number}\n" for name, number in names.items()), "utf-8")
    if not quiet:
        click.echo(f"{out}: {counted(len(files), 'record')}, {output.size_text(nbytes)}; index in {out.stem}.idx")
        click.echo(f"labels: {_listed([f'{number} {name}' for name, number in names.items()])}")


def find_folder(folder: Path, given: dict[str, int] | None) -> tuple[list[tuple[Path, int]], dict[str, int]]:
    """The files of a folder with their labels, and the number of each class. Files beside sub-folders are left out.

    Args:
        folder: where to look. Names that begin with a dot are passed over.
        given: the number of each class. None: 0, 1, 2 ... in the order of the names.

    Raises:
        CannotRun: there are no files, or a class has no number in ``given``.
    """
    walked = [Path(at, one).relative_to(folder) for at, _, files in os.walk(folder, followlinks=True) for one in files]
    paths = sorted(path for path in walked if not any(part.startswith(".") for part in path.parts))
    paths = [path for path in paths if len(path.parts) > 1] or paths
    if not paths:
        raise CannotRun(f"{folder} has no files: give a folder with a sub-folder of files for each class")
    classes = sorted({path.parts[0] for path in paths if len(path.parts) > 1})
    numbers = dict(zip(classes, count())) if given is None else given
    if unknown := [repr(name) for name in classes if name not in numbers]:
        raise CannotRun(f"no number for {', '.join(unknown[:5])} in the file of --labels: add it there")
    labelled = [(folder / path, numbers[path.parts[0]] if classes else 0) for path in paths]
    return labelled, {name: numbers[name] for name in classes}


def read_labels(file: Path) -> dict[str, int]:
    """The number of each class name, from a file with ``name<TAB>number`` on each line.

    Raises:
        CannotRun: a line is not like that, or a name stands there twice.
    """
    names: dict[str, int] = {}
    for number, line in enumerate(file.read_text("utf-8", "replace").splitlines(), 1):
        name, _, label = line.rpartition("\t")
        if line.strip() and (not name or not label.isdecimal() or names.setdefault(name, int(label)) != int(label)):
            raise CannotRun(f"{file}, line {number}: {line[:80]!r} is not name<TAB>number with a new name")
    return names


def pack_files(files: Sequence[tuple[Path, float]], out: Path, on_file: Callable[[int], object]) -> int:
    """Write the files as records, and the index beside them.

    Args:
        files: what to pack, with their labels. The keys of the records are 0, 1, 2 ...
        out: the record file. An existing one is replaced at the end.
        on_file: called with the number of files that are written.

    Returns:
        The size of the record file in bytes.

    Raises:
        CannotRun: a file is too large for a record, or its label does not fit.
        OSError: a file cannot be read, or the output cannot be written.
    """
    from sharded_loader import recordio

    with tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as folder:
        idx, rec = (Path(folder, file.name) for file in (out.with_suffix(".idx"), out))
        with recordio.MXIndexedRecordIO(idx, rec, "w") as packed:
            for key, (path, label) in enumerate(files):
                try:
                    packed.write_idx(key, recordio.pack((0, label, key, 0), path.read_bytes()))
                except ValueError as error:
                    raise CannotRun(f"{path}: {error}") from None
                on_file(key + 1)
        for file in (idx, rec):
            file.replace(out.with_name(file.name))
    return out.stat().st_size


@records.command(short_help="Write the index of a record file.")
@click.argument("file", type=output.FILE, metavar="FILE.rec")
@output.force_option
@output.quiet_option
def index(file: Path, force: bool, quiet: bool) -> int:
    """Write FILE.idx beside FILE.rec. The keys are 0, 1, 2 ... in the order of the records.

    All of the file is read. If it is damaged, one line says where.
    """
    from sharded_loader.base.system import write_whole
    from sharded_loader.recordio import MXRecordIO, RecordIOError
    from sharded_loader.recordio.files import index_line

    idx, lines, offset = file.with_suffix(".idx"), list[str](), 0
    check_output(idx, force=force)
    with os_errors_in_one_line(file), Steps("reading", file.stat().st_size, quiet) as steps:
        try:
            with MXRecordIO(str(file), "r") as records_in_file:
                while records_in_file.read() is not None:
                    lines.append(index_line(len(lines), offset))
                    steps.update(offset := records_in_file.tell())
        except RecordIOError as error:
            complain(f"no index was written, the file is damaged after {counted(len(lines), 'record')}: {error}")
            return DAMAGED
        write_whole(idx, "".join(lines).encode())
    if not quiet:
        click.echo(f"{idx}: {counted(len(lines), 'key')}")
    return 0


def _listed(texts: Sequence[str]) -> str:
    return ", ".join([*texts[:10], *["..."] * (len(texts) > 10)]) or "none"


# -- shards ------------------------------------------------------------------------------------------------------------


@click.command("index", short_help="Write one index file for shards.")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--output", "where", metavar="URL", help="Where to write it. Default: shards.index beside the shards.")
@click.option("--format", metavar="NAME", help="The format of the shards. Default: by their names.")
@click.option("--storage-options", metavar="JSON", default="{}", help="For the file system, as fsspec takes them.")
@click.option("--trust", metavar="URL", multiple=True, help="What lists may name elsewhere: all below this URL.")
@output.quiet_option
def index_shards(
    urls: tuple[str, ...], where: str | None, format: str | None, storage_options: str, trust: tuple[str], quiet: bool
) -> None:
    """Write one file that says where the samples of all these shards lie.

    URL is a pattern in quotes, such as "s3://bucket/train-*.tar", a shard, or a file that lists shards. The file lists
    exactly these shards. If it is there already, only shards that were added or replaced are read.
    """
    from sharded_loader.base.notices import LoaderWarning
    from sharded_loader.storage.dataset import ShardDataset

    try:
        options = json.loads(storage_options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LoaderWarning)  # the file that is there is about to be replaced
            dataset = ShardDataset(urls, format, options, trust=trust)
        with Steps("shards indexed", None, quiet) as steps:
            written = dataset.write_index(where, lambda done: steps.update(done, f"{done:,}"))
        again = ShardDataset(written, format, options, trust=True)  # it was just written
    except (OSError, TypeError, ValueError) as error:
        raise CannotRun(" ".join(str(error).split())) from None
    if not quiet:
        click.echo(f"{written}: {counted(len(again.lengths), 'shard')}, {counted(len(again), 'sample')}")
