"""Two loaders side by side in one process, read in turns: ``python -m benchmarks.turns --only images tokens``.

The table of `python -m benchmarks` compares loaders that were measured seconds apart, in processes of their own. On a
machine that others share, that is good for a factor of two. To see five per cent, both loaders are open at once here,
and each is read for a quarter of a second in its turn, after a tenth of a second that does not count. A loader that is
not read stands still: its workers have finished what may be in flight.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.loaders import LOADERS, OURS
from benchmarks.plans import Plan
from benchmarks.workloads import WORKLOADS

TURNS = 36
WARM, SPAN = 0.1, 0.25
"""Seconds of a turn that do not count, and that do."""


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Batches per second."""
    began = time.perf_counter()
    for count, _ in enumerate(batches, 1):
        now = time.perf_counter()
        if now - began >= seconds:
            return count / (now - began)
    raise RuntimeError("the epoch has ended before the stretch")


def compare(name: str, one: str, other: str, turns: int = TURNS) -> list[float]:
    """The rates of ``other`` divided by those of ``one``, turn by turn, in ascending order."""
    workload = WORKLOADS[name]
    plan = Plan(workload, workload.build(), workload.workers or 2, 2 * turns * (WARM + SPAN))
    streams = {loader: LOADERS[loader].open(plan) for loader in (one, other)}
    batches = {loader: iter(stream) for loader, stream in streams.items()}
    ratios = []
    for turn in range(turns + 1):
        rates = {}
        for loader in (one, other) if turn % 2 else (other, one):
            rate(batches[loader], WARM)
            rates[loader] = rate(batches[loader], SPAN)
        ratios.append(rates[other] / rates[one])
    for loader in (one, other):
        del batches[loader]
        streams[loader].close()
    return sorted(ratios[1:])  # in the first turn the workers were started


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each workload."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.turns", description="Two loaders, read in turns.")
    parser.add_argument(
        "--only", nargs="+", choices=WORKLOADS, default=["images", "tiny", "tokens"], metavar="WORKLOAD"
    )
    parser.add_argument("--loaders", nargs=2, choices=LOADERS, default=[OURS, "drop-in"], metavar="LOADER")
    given = parser.parse_args(arguments)
    one, other = given.loaders
    print(f"| work | {other} / {one} | quartiles |\n|---|---|---|")
    for name in given.only:
        ratios = compare(name, one, other)
        low, high = ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]
        print(f"| `{name}` | {statistics.median(ratios):.2f} | {low:.2f} .. {high:.2f} |", flush=True)


if __name__ == "__main__":
    main()
