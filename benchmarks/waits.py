"""What the loader says of itself, beside what is measured: ``python -m benchmarks.waits``.

    causes      eight jobs: the waiting share, the largest cause, and how far the causes are from the waiting time
    predict     each job read otherwise: the rate and the waiting share that `LoaderStats.predict` expects, and those
                that are measured then

A job is a dataset whose samples take a known time: of a core, of a sleep, or of both. It takes two minutes. Processor
jobs need a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, ThreadPool

BATCH = 10
LARGE = 1 << 20
"""Bytes of a sample of the job with large batches."""


class Samples:
    """Samples that take a time.

    Args:
        length: how many.
        core, sleep: seconds of a sample.
        tail: the seconds of sleep are drawn, with this shape of a Pareto distribution; 0: they are all the same.
        nbytes: of a sample.
    """

    def __init__(self, length: int, core: float = 0.0, sleep: float = 0.0, tail: float = 0.0, nbytes: int = 8) -> None:
        self.length, self.core, self.nbytes = length, core, nbytes
        draw = np.random.default_rng(5).pareto(tail, length) if tail else np.ones(length)
        self.sleeps = (sleep * np.minimum(draw, 100.0)).tolist()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        until = time.thread_time() + self.core
        if self.sleeps[index]:
            time.sleep(self.sleeps[index])
        while time.thread_time() < until:
            pass
        return np.zeros(self.nbytes, np.uint8)


def slow_collate(samples: Sequence[Any]) -> Any:
    """Takes 64 ms."""
    time.sleep(0.064)
    return np.stack(samples)


class Work(NamedTuple):
    """A job: its samples, seconds of the loop for each batch, and other arguments of the loader."""

    samples: Callable[[bool], Samples]
    loop: float = 0.0
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


JOBS = {
    "processor": Work(lambda cached: Samples(600, core=0.002)),
    "sleep": Work(lambda cached: Samples(600, sleep=0.0 if cached else 0.004)),
    "both": Work(lambda cached: Samples(600, core=0.001, sleep=0.0 if cached else 0.003)),
    "heavy tail": Work(lambda cached: Samples(1000, core=0.0005, sleep=0.0 if cached else 0.002, tail=1.5)),
    "slow collate": Work(lambda cached: Samples(300), options={"collate_fn": slow_collate}),
    "large batches": Work(lambda cached: Samples(600, sleep=0.0 if cached else 0.002, nbytes=LARGE)),
    "slow consumer": Work(lambda cached: Samples(600, sleep=0.0 if cached else 0.004), loop=0.03),
    "object store": Work(lambda cached: Samples(400, core=0.0002, sleep=0.0 if cached else 0.02)),
}

HOW: dict[str, dict[str, Any]] = {
    "1 worker": {"num_workers": 1},
    "4 workers": {"num_workers": 4},
    "2 threads": {"num_workers": 2, "threads": True},
    "prefetch 2": {"prefetch": 2},
    "cached": {"cached": True},
    "inline": {"num_workers": 0},
}


def read(work: Work, *, num_workers: int = 2, threads: bool = False, prefetch: int | None = None, cached: bool = False):
    """The statistics of an epoch, after one batch has been read."""
    pool = ThreadPool(num_workers) if threads else ProcessPool(num_workers) if num_workers else InlinePool()
    with ShardedDataLoader(work.samples(cached), BATCH, pool=pool, prefetch=prefetch, **work.options) as loader:
        next(iter(loader))
        for _ in loader:
            if work.loop:
                time.sleep(work.loop)
        return loader.stats(1)


def steady(stats: Any) -> tuple[float, float]:
    """The rate and the waiting share, without the beginning of the epoch."""
    start = stats.causes["start"]
    seconds = stats.seconds - start
    return stats.samples / seconds, (stats.waiting_seconds - start) / seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the two tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description="Why training waits, and what if.")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    given = parser.parse_args(arguments)
    known = {name: read(JOBS[name]) for name in given.only}
    print("| job, 2 workers | waits | largest cause | causes - waiting time | verdict |\n|---|---|---|---|---|")
    for name, stats in known.items():
        cause = max(stats.causes, key=stats.causes.get)
        apart = sum(stats.causes.values()) / stats.waiting_seconds - 1
        print(f"| {name} | {stats.waiting_share:.0%} | `{cause}` | {apart:+.2%} | {stats.verdict} |", flush=True)
    print("\n| job | read otherwise | samples/s: predicted | measured | apart | waits: predicted | measured |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for name, stats in known.items():
        for how, options in HOW.items():
            expected, (rate, share) = stats.predict(**options), steady(read(JOBS[name], **options))
            apart = expected.samples_per_second / rate - 1
            worst = max(worst, abs(apart))
            rates = f"{expected.samples_per_second:,.0f} | {rate:,.0f} | {apart:+.0%}"
            print(f"| {name} | {how} | {rates} | {expected.waiting_share:.0%} | {share:.0%} |", flush=True)
    print(f"\nThe worst prediction is {worst:.0%} from what was measured.")


if __name__ == "__main__":
    main()
