"""The verbs of ``sharded-loader``, and the help that lists them.

    command --> demo, doctor, bench, records
    command without a verb --> the help, exit code 0

A new verb is a module of its own with a click command, and one line here.
"""

from __future__ import annotations

import click

from sharded_loader import __version__
from sharded_loader.cli.bench import bench
from sharded_loader.cli.demo import demo
from sharded_loader.cli.doctor import doctor
from sharded_loader.cli.records import records


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="%(prog)s %(version)s")
@click.pass_context
def command(context: click.Context) -> None:
    """A data loader for PyTorch: try it, check this machine, measure your dataset, pack record files."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for verb in (demo, doctor, bench, records):
    command.add_command(verb)
