"""Does ``num_workers="auto"`` find the best number of workers? ``python -m benchmarks.auto``.

    JOBS[name] -> Job(dataset, batch_size, seconds of a step)      eight jobs, each with one known bottleneck
    fixed(job, workers), tuned(job) -> Run                         samples per second, and processor seconds of a sample

Each job is read with each number of workers in `NUMBERS`, and with ``"auto"``, which has `LEARN` seconds first. Then
the best of them and ``"auto"`` are read in turns, in `ROUNDS` stretches of `SPAN` seconds, so that a machine that slows
down slows down both. A row shows the medians of rate and processor time of ``"auto"``, divided by those of the best.
Processor time is that of this process and of its workers. Exit status 1: a row misses 0.95 of the rate, or 1.2 times
the processor time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil

from sharded_loader import ShardedDataLoader, default_batchify_fn

NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
LEARN, WARM, SPAN, ROUNDS = 20.0, 0.5, 1.5, 5
"""Seconds that ``"auto"`` has; seconds of a stretch that do not count, and that do; stretches of each."""


def compute(seconds: float) -> None:
    """Keep a core busy for as long as that takes on a core that does nothing else."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


class Samples:
    """A dataset whose samples take time: each computes and waits."""

    def __init__(self, computes: float = 0.0, waits: float = 0.0, tail: float = 0.0, shape: tuple[int, ...] = (16,)):
        self.computes, self.waits, self.tail, self.shape = computes, waits, tail, shape

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Any:
        compute(self.computes)
        if wait := self.tail if index % 101 == 7 else self.waits:
            time.sleep(wait)
        return np.full(self.shape, index, np.float32)


class Objects(Samples):
    """An object store: requests wait, and a batch is one request for each sample, one after the other."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002 + 0.006 * (index * 2654435761 % 1000 / 1000))
        return np.frombuffer(np.full(4096, index, np.float32).tobytes(), np.float32)


def slow_collate(samples: list[Any]) -> Any:
    compute(0.016)
    return default_batchify_fn(samples)


class Job(NamedTuple):
    """A job: what is read, the batch size, the seconds of a training step, and the collate function."""

    dataset: Any
    batch_size: int = 16
    step: float = 0.0
    collate: Callable[[list[Any]], Any] | None = None


JOBS = {
    "processor": Job(Samples(computes=0.001)),
    "sleep": Job(Samples(waits=0.004), step=0.003),
    "both": Job(Samples(computes=0.0005, waits=0.001)),
    "heavy tail": Job(Samples(waits=0.0005, tail=0.2), step=0.005),
    "slow collate": Job(Samples(), collate=slow_collate),
    "large batches": Job(Samples(shape=(3, 224, 224)), batch_size=64),
    "slow consumer": Job(Samples(waits=0.001), step=0.03),
    "object store": Job(Objects(), step=0.004),
}


class Run:
    """A loader that is open, and read in stretches."""

    def __init__(self, job: Job, workers: Any, thread_pool: bool) -> None:
        self.step = job.step
        self.loader = ShardedDataLoader(
            job.dataset,
            job.batch_size,
            True,
            num_workers=workers,
            thread_pool=thread_pool,
            collate_fn=job.collate,
            seed=1,
        )
        self._batches: Iterator[Any] = iter(self.loader)
        self.rates: list[float] = []
        self.costs: list[float] = []

    def read(self, seconds: float) -> int:
        """Train for some time; how many samples came."""
        samples, until = 0, time.perf_counter() + seconds
        while time.perf_counter() < until:
            batch = next(self._batches)
            samples += len(batch)
            if self.step:
                time.sleep(self.step)
        return samples

    def measure(self, warm: float, span: float) -> None:
        """One stretch."""
        self.read(warm)
        began, cost = time.perf_counter(), self._processor_seconds()
        samples = self.read(span)
        self.rates.append(samples / (time.perf_counter() - began))
        self.costs.append((self._processor_seconds() - cost) / samples)

    def _processor_seconds(self) -> float:
        this = psutil.Process()
        times = [one.cpu_times() for one in (this, *this.children(recursive=True)) if one.is_running()]
        return float(sum(one.user + one.system for one in times))

    @property
    def rate(self) -> float:
        """Samples per second."""
        return statistics.median(self.rates)


def row(name: str, thread_pool: bool) -> tuple[str, float, float]:
    """Measure one job: the row, and its two ratios."""
    job, rates = JOBS[name], {}
    for workers in NUMBERS:
        run = Run(job, workers, thread_pool)
        run.measure(WARM, SPAN)
        rates[workers] = run.rate
        run.loader.close()
        if workers >= 8 and run.rate < 0.7 * max(rates.values()):
            break  # more of them are no better
    most = max(rates.values())
    best = min(workers for workers, rate in rates.items() if rate > 0.99 * most)
    auto = Run(job, "auto", thread_pool)
    auto.read(LEARN)
    other = Run(job, best, thread_pool)
    for _ in range(ROUNDS):
        for run in (auto, other):
            run.measure(WARM, SPAN)
    found = auto.loader.num_workers, auto.loader.prefetch
    rate, cost = (
        statistics.median(getattr(auto, kind)) / statistics.median(getattr(other, kind)) for kind in ("rates", "costs")
    )
    for run in (auto, other):
        run.loader.close()
    text = f"{name:14}{best:>6}{other.rate:>12,.0f}{found[0]:>8}{found[1]:>10}{auto.rate:>12,.0f}"
    return f"{text}{rate:>8.2f}{cost:>8.2f}", rate, cost


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one row for each job."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto", description='num_workers="auto"')
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    parser.add_argument("--threads", action="store_true", help="threads in the place of processes")
    given = parser.parse_args(arguments)
    print(f"{'job':14}{'best':>6}{'samples/s':>12}{'auto':>8}{'prefetch':>10}{'samples/s':>12}{'rate':>8}{'cpu':>8}")
    missed = 0
    for name in given.only:
        text, rate, cost = row(name, given.threads)
        missed += rate < 0.95 or cost > 1.2
        print(text, flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
