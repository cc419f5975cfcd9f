"""Loaders with random arguments, driven at random, against one that is too simple to be wrong.

    python -m tests.fuzz --cases 2000 [KIND] [--seed N]
    python -m tests.fuzz --minutes 60 [KIND] [--seed N]
    python -m tests.fuzz --case SEED [KIND]                  one case alone, as a difference names it
    python -m tests.fuzz --cases 300 [--twins] --record FILE write down what they do: batches, errors, states, warnings
    python -m tests.fuzz --check FILE                        do the same again, and print each difference

Prints a line every 10 s and a table at the end. Exit status 1: there was a difference, something was left behind, or
a step took `run.HANG` seconds; then every thread's stack is printed. A case is decided by its seed, but not the timing
of faults: ``--case SEED --faults --minutes 5`` runs one again and again.
"""

import argparse
import itertools
import random
import sys
import time
from pathlib import Path

from tests.fuzz import recorded
from tests.fuzz.run import KINDS, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=str(__doc__).partition("\n")[0])
    parser.add_argument("--cases", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20), help="cases begin at a million x this")
    parser.add_argument("--case", type=int, metavar="SEED", help="this one alone")
    for name in (
        *("--faults", "--twins", "--ranks", "--leases", "--shares", "--growth", "--packed"),
        *("--records", "--caches", "--groups", "--nodes"),
    ):
        kind = name[2:]
        parser.add_argument(name, dest="kind", action="store_const", const=kind, default="plain", help=KINDS[kind][0])
    parser.add_argument("--record", type=Path, metavar="FILE", help="write down what the loaders do")
    parser.add_argument("--check", type=Path, metavar="FILE", help="compare with what was written down")
    arguments = parser.parse_args()
    if arguments.check is not None:
        return recorded.check(arguments.check)
    cases, minutes, alone = arguments.cases, arguments.minutes, arguments.case
    if cases is None and minutes is None:
        cases = 2000 if alone is None else 1
    given = {"cases": cases, "minutes": minutes, "case": alone, "seed": arguments.seed if alone is None else None}
    shown = [f"--{name} {value}" for name, value in given.items() if value is not None]
    print("python -m tests.fuzz", *shown, f"--{arguments.kind}" * (arguments.kind != "plain"), flush=True)
    seeds = itertools.count(1_000_000 * arguments.seed) if alone is None else itertools.repeat(alone)
    some = itertools.islice(seeds, cases)
    if arguments.record is not None:
        return recorded.record(arguments.record, some, arguments.kind)
    return run(some, arguments.kind, time.monotonic() + 60 * (1e9 if minutes is None else minutes))


if __name__ == "__main__":
    sys.exit(main())
