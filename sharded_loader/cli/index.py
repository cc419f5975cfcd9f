"""``sharded-loader index``: write one file with the indexes of shards, which datasets open with one small request.

    index URL... --> ShardDataset(...).write_index(...), and opened once

Exit code 0; 2 if a shard cannot be indexed, or the file cannot be written.
"""

from __future__ import annotations

import json
import warnings

import click

from sharded_loader.cli import output
from sharded_loader.cli.output import CannotRun, Steps, counted


@click.command(short_help="Write one index file for shards.")
@click.argument("urls", nargs=-1, required=True, metavar="URL...")
@click.option("--output", "where", metavar="URL", help="Where to write it. Default: shards.index beside the shards.")
@click.option("--format", metavar="NAME", help="The format of the shards. Default: by their names.")
@click.option("--storage-options", metavar="JSON", default="{}", help="For the file system, as fsspec takes them.")
@click.option("--trust", metavar="URL", multiple=True, help="What lists may name elsewhere: all below this URL.")
@output.quiet_option
def index(
    urls: tuple[str, ...],
    where: str | None,
    format: str | None,
    storage_options: str,
    trust: tuple[str, ...],
    quiet: bool,
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
