"""Who is busy while batches are read: ``python -m benchmarks.cpu``.

    measure(workload) -> Busy     microseconds per batch: of the clock, of the main process, of all workers together

Each workload that is a rate is read by ours for three seconds, in a process of its own. Where main process and workers
together take twice the time of the clock, two cores are busy all the time. Linux, macOS and Windows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from benchmarks.loaders import LOADERS, OURS
from benchmarks.plans import Plan
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
WORKERS = 2
WARM, SPAN = 1.0, 3.0
"""Seconds before, and of, the stretch that counts. The clock of CPU time has steps of 10 ms on Linux."""


class Busy(NamedTuple):
    """Microseconds per batch."""

    clock: float
    main: float
    workers: float


def measure(name: str) -> Busy:
    """Read a workload in this process."""
    workload = WORKLOADS[name]
    plan = Plan(workload, workload.build(), workload.workers or WORKERS, WARM + SPAN)
    stream = LOADERS[OURS].open(plan)
    batches = iter(stream)
    _read(batches, WARM)
    workers = psutil.Process().children(recursive=True)
    before = sum(sum(worker.cpu_times()[:2]) for worker in workers)
    began, own = time.perf_counter(), time.process_time()
    count = _read(batches, SPAN)
    clock, main = time.perf_counter() - began, time.process_time() - own
    others = sum(sum(worker.cpu_times()[:2]) for worker in workers) - before
    del batches
    stream.close()
    return Busy(*(seconds / count * 1e6 for seconds in (clock, main, others)))


def _read(batches: Iterator[Any], seconds: float) -> int:
    until = time.perf_counter() + seconds
    for count, _ in enumerate(batches, 1):
        if time.perf_counter() >= until:
            return count
    raise RuntimeError("the epoch has ended before the stretch")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each workload."""
    rates = [name for name, workload in WORKLOADS.items() if workload.kind == "rate" and not workload.records]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cpu", description="Who is busy while batches are read.")
    parser.add_argument("--only", nargs="+", choices=rates, default=rates, metavar="WORKLOAD")
    parser.add_argument("--one", choices=rates, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(measure(given.one)))
        return
    print("| work | a batch takes, us | main process, us | workers together, us | cores busy |\n|---|---|---|---|---|")
    for name in given.only:
        command = [sys.executable, "-m", "benchmarks.cpu", "--one", name]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        busy = Busy(*json.loads(found.stdout.splitlines()[-1]))
        cores = (busy.main + busy.workers) / busy.clock
        print(f"| `{name}` | {busy.clock:,.0f} | {busy.main:,.0f} | {busy.workers:,.0f} | {cores:.2f} |", flush=True)


if __name__ == "__main__":
    main()
