"""``sharded-loader records`` and ``index``: pack files into a RecordIO file, write indexes.

    records pack FOLDER OUT.rec --> find_folder (a sub-folder is a class) --> records
    records index FILE.rec -------> reads every byte once, and writes where each record begins
    index URL... -----------------> ShardDataset(...).write_index(...), and opened once

A record is MXNet's label header and the unchanged bytes of a file. Output is renamed into place at the end, so failures
leave no partial files. Exit code 1: the record file is damaged, and one line says where; 2: missing files, an existing
output, a folder that cannot be written to, a shard that cannot be indexed.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import CannotRun, Steps, check_output, complain, counted, os_errors_in_one_line

records = click.Group(
    "records", callback=output.print_help, invoke_without_command=True, help="RecordIO files.",
    short_help="Pack files into RecordIO, write the index of a record file.",
)  # fmt: skip


@records.command(short_help="Pack the files of a folder.")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.rec")
@output.force_option
@output.quiet_option
def pack(folder: Path, out: Path, force: bool, quiet: bool) -> None:
    """Pack files into OUT.rec and OUT.idx. The bytes of the files do not change.

    Each sub-folder is a class. The classes get the numbers 0, 1, 2 ... in the order of their names.
    """
    from sharded_loader import recordio
    from sharded_loader.recordio.positioned import regular

    if out.suffix != ".rec":
        raise CannotRun(f"{out}: give a name that ends in .rec, so that readers find the index beside it")
    check_output(out, out.with_suffix(".idx"), force=force)
    with os_errors_in_one_line(out):
        files, classes = find_folder(folder)
        steps = Steps("packing", len(files), quiet)
        with tempfile.TemporaryDirectory(prefix=".", dir=out.parent) as partial:
            idx, rec = (Path(partial, file.name) for file in (out.with_suffix(".idx"), out))
            with recordio.MXIndexedRecordIO(idx, rec, "w") as packed:
                for key, (path, label) in enumerate(files):
                    try:
                        packed.write_idx(key, recordio.pack((0, label, key, 0), regular(path).read_bytes()))
                    except ValueError as error:  # too large for a record, or a label that does not fit
                        raise CannotRun(f"{path}: {error}") from None
                    steps.update(key + 1)
            out.with_suffix(".idx").unlink(missing_ok=True)  # killed at any moment, no index is left of other records
            for file in (rec, idx):
                file.replace(out.with_name(file.name))
    if not quiet:
        size = output.size_text(out.stat().st_size)
        click.echo(f"{out}: {counted(len(files), 'record')}, {size}; index in {out.stem}.idx")
        texts = [f"{number} {name}" for number, name in enumerate(classes)]
        click.echo(f"labels: {', '.join([*texts[:10], *['...'] * (len(texts) > 10)]) or 'none'}")


def find_folder(folder: Path) -> tuple[list[tuple[Path, int]], list[str]]:
    """Return the files of a folder with their class numbers, and the classes. Raises CannotRun if there are no files.

    Files beside sub-folders, and names that begin with a dot, are ignored.
    """
    from sharded_loader.recordio.positioned import walk

    def refuse(error: OSError) -> None:
        raise error

    paths = sorted(
        Path(at, one).relative_to(folder)
        for at, files in walk(str(folder), refuse)
        for one in files
        if not one.startswith(".")
    )
    paths = [path for path in paths if len(path.parts) > 1] or paths
    if not paths:
        raise CannotRun(f"{folder} has no files: give a folder with a sub-folder of files for each class")
    classes = sorted({path.parts[0] for path in paths if len(path.parts) > 1})
    return [(folder / path, classes.index(path.parts[0]) if classes else 0) for path in paths], classes


@records.command(short_help="Write the index of a record file.")
@click.argument("file", type=output.FILE, metavar="FILE.rec")
@output.force_option
@output.quiet_option
def index(file: Path, force: bool, quiet: bool) -> int:
    """Write FILE.idx beside FILE.rec. The keys are 0, 1, 2 ... in the order of the records.

    All of the file is read. If it is damaged, one line says where.
    """
    from sharded_loader.extend.tools import write_whole
    from sharded_loader.recordio import MXRecordIO, RecordIOError
    from sharded_loader.recordio.files import index_line

    idx, lines, offset = file.with_suffix(".idx"), list[str](), 0
    check_output(idx, force=force)
    with os_errors_in_one_line(file):
        steps = Steps("reading", file.stat().st_size, quiet)
        try:
            with MXRecordIO(str(file), "r") as records_in_file:
                while records_in_file.read() is not None:
                    lines.append(index_line(len(lines), offset))
                    steps.update(offset := records_in_file.tell())
        except RecordIOError as error:
            complain(f"no index was written, the file is damaged after {counted(len(lines), 'record')}: {error}")
            return 1
        write_whole(idx, "".join(lines).encode())
    if not quiet:
        click.echo(f"{idx}: {counted(len(lines), 'key')}")
    return 0


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
    from sharded_loader import LoaderWarning
    from sharded_loader.storage.dataset import ShardDataset

    try:
        options = json.loads(storage_options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LoaderWarning)  # the file that is there is about to be replaced
            dataset = ShardDataset(urls, format, options, trust=trust)
        steps = Steps("shards indexed", None, quiet)
        written = dataset.write_index(where, lambda done: steps.update(done, f"{done:,}"))
        again = ShardDataset(written, format, options, trust=True)  # it was just written
    except (OSError, TypeError, ValueError) as error:
        raise CannotRun(" ".join(str(error).split())) from None
    if not quiet:
        click.echo(f"{written}: {counted(len(again.lengths), 'shard')}, {counted(len(again), 'sample')}")
