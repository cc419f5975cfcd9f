"""Where the command ``sharded-loader`` begins: arguments in, exit code out.

    main(argv) --click--> the function of the verb -> exit code

Only click is imported here. Each verb imports what it needs when it runs, so ``--help`` and ``--version`` wait neither
for torch nor for rich.

Exit codes: 0 done; 1 the command ran and found something wrong, or its output was closed; 2 the command cannot run as
typed, and one line on stderr says why; 130 Ctrl-C. Any other exception is a bug and keeps its traceback.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

CANNOT_RUN = 2
INTERRUPTED = 130  # 128 + SIGINT, as shells say it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: its arguments. None: those of this process.

    Returns:
        The exit code.

    Example:
        >>> main(["--version"])
        sharded-loader ...
        0
    """
    if any(importlib.util.find_spec(name) is None for name in ("click", "rich")):
        print("sharded-loader: the command needs click and rich: pip install click rich", file=sys.stderr)
        return CANNOT_RUN
    try:
        import click

        from sharded_loader.cli.commands import command
    except KeyboardInterrupt:
        return _interrupted()
    try:
        return command.main(argv, prog_name="sharded-loader", standalone_mode=False) or 0
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx else "sharded-loader"
        click.echo(f"{where}: {' '.join(error.format_message().split())}", err=True)
        return CANNOT_RUN
    except (click.Abort, KeyboardInterrupt):
        return _interrupted()
    except SystemExit as stop:  # click, when the output is closed: `sharded-loader doctor | head -1`
        return stop.code if isinstance(stop.code, int) else 1


def _interrupted() -> int:
    print("sharded-loader: stopped by Ctrl-C", file=sys.stderr)
    return INTERRUPTED
