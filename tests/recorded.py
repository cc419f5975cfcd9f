"""Recordings of random loaders: what they do at one commit, compared with what they do at another one.

    python -m tests.recorded record FILE [--fuzz N] [--drop-in N] [--iterable N] [--jobs 2]
    python -m tests.recorded compare FILE FILE
    python -m tests.recorded check FOLDER            record the first seeds again and compare with FOLDER/*.jsonl
    python -m tests.recorded show PROGRAM SEED       one seed alone, as a difference names it

    (program, seed) -> run -> {"arguments", "events": [[step, batch | error | state], ...], "warnings"}   one JSON line

Two recordings of one commit are equal. `tests.recorded_programs` has the programs.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import itertools
import json
import logging
import multiprocessing
import random
import sys
import warnings
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.recorded_programs import DropIn, Fuzz, Streams, clean, outcome

PROGRAMS: dict[str, Any] = {"fuzz": Fuzz, "drop-in": DropIn, "iterable": Streams}


def run(program: str, seed: int, processes: bool = True) -> dict[str, Any]:
    """What one program does, as one line of a recording."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    lines: set[str] = set()
    handler = logging.Handler()
    handler.emit = lambda record: lines.add(clean(record.getMessage()))  # type: ignore[method-assign]
    logger = logging.getLogger("sharded_loader")
    logger.addHandler(handler)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = PROGRAMS[program](seed, processes)
        failed = outcome(made.run)
    logger.removeHandler(handler)
    lines |= {clean(f"{warning.category.__name__}: {warning.message}") for warning in caught}
    arguments, events = made.arguments, [*made.events, ["run", failed]]
    return {"program": program, "seed": seed, "arguments": arguments, "events": events, "warnings": sorted(lines)}


def run_in_job(program: str, seed: int) -> dict[str, Any]:
    """Run one program; if it hangs, end with a traceback of each thread."""
    faulthandler.dump_traceback_later(300, exit=True)
    try:
        return run(program, seed)
    finally:
        faulthandler.cancel_dump_traceback_later()


def record(counts: dict[str, int], jobs: int) -> Iterator[dict[str, Any]]:
    tasks = [(program, seed) for program, count in counts.items() for seed in range(count)]
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), gc.freeze) as pool:
        yield from pool.map(run_in_job, *zip(*tasks, strict=True), chunksize=10)


def differences(was: Any, now: Any, where: str = "") -> Iterator[str]:
    """Each difference of two lines, or parts of lines, as text."""
    if isinstance(was, dict) and isinstance(now, dict):
        for key in {**was, **now}:
            yield from differences(was.get(key, "missing"), now.get(key, "missing"), f"{where}/{key}")
    elif isinstance(was, list) and isinstance(now, list):
        for number, (one, other) in enumerate(itertools.zip_longest(was, now, fillvalue="missing")):
            name = f"{number}" if not isinstance(one, list) or len(one) != 2 else f"{number} {one[0]}"
            yield from differences(one, other, f"{where}/{name}")
    elif was != now:
        yield f"    {where}\n        was {was}\n        now {now}"


def compare(before: Iterable[Any], after: Iterable[Any]) -> int:
    """Print how two recordings differ; how many seeds do."""
    known, seeds, differing = {(line["program"], line["seed"]): line for line in before}, 0, 0
    for line in after:
        was = known.get((line["program"], line["seed"]))
        if was is None:
            continue
        seeds += 1
        found = list(itertools.islice(differences(was, line), 4))
        if found:
            differing += 1
            print(f"{line['program']} {line['seed']}: {line['arguments'][:2]}", *found, sep="\n", flush=True)
    print(f"{seeds} seeds compared, {differing} differ")
    return differing


def read(path: Path) -> Iterator[dict[str, Any]]:
    with path.open() as file:
        yield from map(json.loads, file)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.recorded", description=str(__doc__).partition("\n")[0])
    parser.add_argument("command", choices=["record", "compare", "check", "show"])
    parser.add_argument("what", nargs="+", metavar="FILE, FOLDER, or PROGRAM SEED")
    for name, count in (("fuzz", 300), ("drop-in", 100), ("iterable", 100)):
        parser.add_argument(f"--{name}", type=int, default=count, metavar="N")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    counts = {"fuzz": arguments.fuzz, "drop-in": arguments.drop_in, "iterable": arguments.iterable}
    if arguments.command == "compare":
        return min(1, compare(*map(read, map(Path, arguments.what))))
    if arguments.command == "check":
        lines = [line for path in sorted(Path(arguments.what[0]).glob("*.jsonl")) for line in read(path)]
        return min(1, compare(lines, record(counts, arguments.jobs)))
    if arguments.command == "show":
        print(json.dumps(run(arguments.what[0], int(arguments.what[1])), indent=1))
        return 0
    with Path(arguments.what[0]).open("w") as file:
        for line in record(counts, arguments.jobs):
            file.write(json.dumps(line) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
