"""What a cache of decoded samples gains, beside other libraries: `python -m benchmarks.cached`. Half an hour.

    benchmarks.cached_jobs      photographs, sound, rows, an object store -> samples
    benchmarks.cached_loaders   ours with and without a cache, torch, other caches, other formats
    here                        each job x each loader, in turns, each in a process of its own -> a table for each job

A row has the samples per second of epoch 1, of epoch 2, and of the epochs after it: medians of the rounds. Epoch 1
starts the workers, fills the cache, and writes the format if there is one. "ours" is the rate of our cache in memory in
epoch 2, divided by that of the row in the same round. All loaders have to deliver the same samples: after the last
epoch, one more is read and compared.

The others are optional: a row says if a library is not installed. To install them all, in an environment of their own:

    make .venv-frameworks/frameworks.stamp VENV=.venv-frameworks
    .venv-frameworks/bin/pip install -c constraints.txt diskcache lmdb turboloader
    .venv-frameworks/bin/python -m benchmarks.cached
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cached_jobs import KINDS, Job, load, make, sum_of
from benchmarks.cached_loaders import LIMIT, LOADERS, OURS, PART, TURBO, UNCACHED, Epochs
from benchmarks.range_server import serving

SPAN = 0.5
"""Seconds in which later epochs are read, and one of them at least."""

TIMEOUT = 600
CLOSE = 12
"""Grey levels by which another decoder may differ, as the mean of a photograph."""

Found = dict[str, list[Any]]
"""For each loader, what `measured` returned in each round."""


# -- one measurement ---------------------------------------------------------------------------------------------------


def rates(epochs: Epochs, length: int) -> list[float]:
    """Samples per second of the first epoch, of the second, and of later ones together."""
    found = []
    for span in (0, 0, SPAN):
        began, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began < span:
            for _ in next(epochs):
                pass
            count += 1
        found.append(count * length / (time.perf_counter() - began))
    return found


def verdict(job: Job, batches: Any, is_exact: bool) -> str:
    """Whether one epoch has each sample of the job once."""
    seen = []
    for samples, indices in batches:
        for sample, index in zip(np.asarray(samples), np.asarray(indices).tolist(), strict=True):
            seen.append(index)
            if is_exact and sum_of(sample) != job.sums[index]:
                return "OTHER SAMPLES"
            if not is_exact and np.abs(255 * sample - job.arrays()[index]).mean() > CLOSE:
                return "OTHER SAMPLES"
    if sorted(seen) != list(range(len(job))):
        return f"{len(seen)} SAMPLES, {len(set(seen))} different ones, of {len(job)}"
    return "same" if is_exact else "similar"


def one(name: str, folder: Path, workers: int) -> dict[str, Any]:
    """What one loader does, in this process."""
    warnings.simplefilter("ignore")
    loader, job = LOADERS[name], load(folder)
    try:
        kept = loader.load()
    except ImportError:
        return {"why": f"not installed: {loader.package}"}
    with tempfile.TemporaryDirectory(dir=folder) as own, contextlib.redirect_stdout(sys.stderr):
        try:
            epochs = loader.open(job, Path(own), workers)
            found = rates(epochs, len(job))
        except NotImplementedError as error:
            return {"why": str(error)}
        same = verdict(job, next(epochs), loader.is_exact)
        epochs.close()  # type: ignore[attr-defined]
        del kept
    return {"rates": found, "same": same}


def measured(name: str, folder: Path, workers: int) -> dict[str, Any]:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.cached", "--one", name, str(folder), "--workers", str(workers)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"why": f"more than {TIMEOUT} s"}
    if done.returncode:
        return {"why": "failed: " + (done.stderr.strip().splitlines() or [str(done.returncode)])[-1]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# -- the tables --------------------------------------------------------------------------------------------------------


def ratio(found: Found, above: str, below: str, epoch: int = 1) -> float | None:
    """The median over the rounds of one loader's rate divided by another's; None if one was not measured."""
    pairs = [
        (a["rates"][epoch], b["rates"][epoch]) for a, b in _rounds(found, above, below) if "rates" in a and "rates" in b
    ]
    return statistics.median(a / b for a, b in pairs) if pairs else None


def _rounds(found: Found, above: str, below: str) -> Any:
    return zip(found.get(above, []), found.get(below, []), strict=False)


def table(job: Job, found: Found) -> str:
    """The rows of a job, as Markdown."""
    lines = [
        f"{job.name}: {len(job):,} samples, {job.nbytes / 1e6:,.0f} MB, samples per second",
        "",
        "| loader | epoch 1 | epoch 2 | later | ours | samples |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        whole = [one for one in rounds if "rates" in one]
        if not whole:
            lines.append(f"| {name} | | | | | {rounds[0]['why']} |")
            continue
        medians = [f"{statistics.median(column):,.0f}" for column in zip(*(one["rates"] for one in whole), strict=True)]
        verdicts = ", ".join(sorted({one.get("same") or one["why"] for one in rounds}))
        lines.append(f"| {name} | {' | '.join(medians)} | {ratio(found, OURS, name):.2f} | {verdicts} |")
    return "\n".join([*lines, "", *bars(job, found)])


def bars(job: Job, found: Found) -> list[str]:
    """What a cache has to reach, beside what was measured."""
    if not job.tar.exists():
        return []
    asked = [
        ("epoch 1 with a cache / without", ratio(found, OURS, UNCACHED, 0), 0.97),
        ("epoch 2 / ArrayDataset", ratio(found, OURS, LIMIT), 0.7),
        ("epoch 2 with room for 40 % / without a cache", ratio(found, PART, UNCACHED), 1.6),
        ("epoch 2 / TurboLoader", ratio(found, OURS, TURBO), 2.0),
    ]
    return [
        f"- {text}: {value:.2f} (bar {bar}: {'met' if value >= bar else 'not met'})"
        for text, value, bar in asked
        if value is not None
    ]


def read_job(name: str, names: Sequence[str], options: argparse.Namespace) -> str:
    """Measure all loaders in turns, and return the table."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(serving(folder, None))[0] if name == "object store" else ""
        job = make(name, folder, max(64, int(KINDS[name].count * options.scale)), url)
        found: Found = {one: [] for one in names}
        for number, one in itertools.product(range(options.rounds), names):
            if number and "rates" not in found[one][0]:
                continue
            found[one].append(measured(one, folder, options.workers))
        return table(job, found)


def _load() -> str:
    return " ".join(f"{load:.1f}" for load in os.getloadavg()) if hasattr(os, "getloadavg") else "unknown"


def main() -> None:
    """Print the tables, or measure one loader."""
    parser = argparse.ArgumentParser(description="What a cache of decoded samples gains, beside other libraries.")
    parser.add_argument("--jobs", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--scale", type=float, default=1.0, help="how many samples, as a multiple")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--one", nargs=2, metavar=("LOADER", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one[0], Path(options.one[1]), options.workers)), flush=True)
        return
    print(f"{options.workers} workers, {os.cpu_count()} cores, {options.rounds} rounds")
    for name in options.jobs:
        print(f"\nload average {_load()}")
        print(read_job(name, options.loaders, options), flush=True)
    print(f"\nload average {_load()}")


if __name__ == "__main__":
    main()
