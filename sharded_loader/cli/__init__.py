"""The command ``sharded-loader``: a module for each verb, and the parts that they share.

main --> doctor
     --> bench      find_dataset --> measure
     --> records    and ``index``
     --> runs       ``diff``, ``demo`` (the run itself is in ``sharded_loader.demo``)

A new verb is a click command in a module, and a name in `make_command`. Verbs import what they need when they run, so
``--help`` does not wait for torch.

Exit codes: 0: done; 1: the command found something wrong, or its output was closed; 2: it cannot run as typed, with one
line on stderr; 130: Ctrl-C. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click

CANNOT_RUN = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command with ``argv`` (default: this process's arguments), and return the exit code.

    Example:
        >>> main(["--version"])
        sharded-loader ...
        0
    """
    try:
        import click
    except ImportError:
        print("sharded-loader: the command needs click: pip install click", file=sys.stderr)
        return CANNOT_RUN
    try:
        return make_command().main(argv, prog_name="sharded-loader", standalone_mode=False) or 0
    except (KeyboardInterrupt, click.Abort):
        print("sharded-loader: stopped by Ctrl-C", file=sys.stderr)
        return INTERRUPTED
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "sharded-loader"
        print(f"{where}: {' '.join(error.format_message().split())}", file=sys.stderr)
        return CANNOT_RUN
    except SystemExit as stop:  # click, when the output is closed: `sharded-loader doctor | head -1`
        return stop.code if isinstance(stop.code, int) else 1


def make_command() -> click.Group:
    """Build the command with its verbs; without a verb it prints its help."""
    import click

    from sharded_loader import __version__
    from sharded_loader.cli.bench import bench
    from sharded_loader.cli.doctor import doctor
    from sharded_loader.cli.output import print_help
    from sharded_loader.cli.records import index_shards, records
    from sharded_loader.cli.runs import demo, diff

    command = click.Group(
        commands=[demo, doctor, bench, records, diff, index_shards],
        callback=print_help,
        invoke_without_command=True,
        help="A data loader for PyTorch: try it, check this machine, measure a dataset, pack files, compare runs.",
        context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    )
    return click.version_option(__version__, message="%(prog)s %(version)s")(command)
