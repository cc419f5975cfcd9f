"""``sharded-loader doctor``: is this machine fit for a loader, and what should be changed?

    facts.collect() --> Facts --> findings.find --> lines on stdout, exit code

Exit code 0: usable. 1: a problem means that the loader fails or is slow here.
"""

from __future__ import annotations

import dataclasses

import click

from sharded_loader.cli.facts import collect
from sharded_loader.cli.findings import find, lines
from sharded_loader.cli.output import counted, json_option, quiet_option, say, say_json


@click.command(short_help="Check this machine, and say what to change.")
@json_option
@quiet_option
def doctor(as_json: bool, quiet: bool) -> int:
    """Check versions, cores, memory, shared memory, limits, worker processes and GPUs, and say what to change.

    The exit code is 1 if there is a problem. With --quiet it prints only problems and notes.
    """
    facts = collect()
    found = find(facts)
    problems = sum(finding.is_problem for finding in found)
    if as_json:
        say_json({"facts": dataclasses.asdict(facts), "findings": list(map(dataclasses.asdict, found))})
        return int(problems > 0)
    if not quiet:
        for name, text in lines(facts):
            say(f"{name:15} {text}")
        say()
    for finding in found:
        say(f"{'problem' if finding.is_problem else 'note'}: {finding.what}")
        say(f"  change: {finding.change}")
    if not quiet:
        notes = len(found) - problems
        say(f"{counted(problems, 'problem')}, {counted(notes, 'note')}." if found else "No problem found.")
    return int(problems > 0)
