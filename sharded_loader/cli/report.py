"""``sharded-loader report FILES``: the reports that a job's ranks have written, in the terminal.

    one file ------> `facts.text_of`
    several files -> `facts.joined`: a row for each rank, and which one is slow, and why

Exit code 0; 2 if a file cannot be read or is no report, or if the files are of different jobs.
"""

from __future__ import annotations

from pathlib import Path

import click

from sharded_loader.cli.output import CannotRun, quiet_option


@click.command(short_help="Read the reports of all ranks, and name the slow one.")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILES")
@quiet_option
def report(files: tuple[Path, ...], quiet: bool) -> None:
    """Read what loader.report("rank0.html") has written.

    Of one file it prints the causes of waiting, stages, workers and slowest samples. Of several files, one for each
    rank of a job, it names the rank that the others wait for, and says why it is slow.
    """
    from sharded_loader.loader.facts import joined, text_of
    from sharded_loader.loader.page import facts_in

    found = {}
    for path in files:
        try:
            found[str(path)] = facts_in(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise CannotRun(f"{path} cannot be read ({error.strerror}): give files that exist") from None
        except ValueError as error:
            raise CannotRun(f"{path}: {error}") from None
    try:
        text = joined(found) if len(found) > 1 else text_of(found[str(files[0])])
    except ValueError as error:
        raise CannotRun(str(error)) from None
    click.echo(text.partition("\n\n")[0] if quiet else text)
