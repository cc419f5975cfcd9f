"""Why eight jobs wait, by the loader's own statistics: ``python -m benchmarks.waits``.

It prints the waiting share, the largest cause, how far the causes are from the waiting time, and the verdict. A job is
a dataset whose samples take a known time: of a core, of a sleep, or of both.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import ProcessPool, ShardedDataLoader

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

    samples: Callable[[], Samples]
    loop: float = 0.0
    options: dict[str, Any] = {}  # noqa: RUF012 - nobody changes it


JOBS = {
    "processor": Work(lambda: Samples(600, core=0.002)),
    "sleep": Work(lambda: Samples(600, sleep=0.004)),
    "both": Work(lambda: Samples(600, core=0.001, sleep=0.003)),
    "heavy tail": Work(lambda: Samples(1000, core=0.0005, sleep=0.002, tail=1.5)),
    "slow collate": Work(lambda: Samples(300), options={"collate_fn": slow_collate}),
    "large batches": Work(lambda: Samples(600, sleep=0.002, nbytes=LARGE)),
    "slow consumer": Work(lambda: Samples(600, sleep=0.004), loop=0.03),
    "object store": Work(lambda: Samples(400, core=0.0002, sleep=0.02)),
}


def read(work: Work) -> Any:
    """The statistics of an epoch, after one batch has been read."""
    with ShardedDataLoader(work.samples(), BATCH, pool=ProcessPool(2), **work.options) as loader:
        next(iter(loader))
        for _ in loader:
            if work.loop:
                time.sleep(work.loop)
        return loader.stats(1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.waits", description="Why training waits.")
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS), metavar="JOB")
    given = parser.parse_args(arguments)
    print("| job, 2 workers | waits | largest cause | causes - waiting time | verdict |\n|---|---|---|---|---|")
    for name in given.only:
        stats = read(JOBS[name])
        cause = max(stats.causes, key=stats.causes.get)
        apart = sum(stats.causes.values()) / stats.waiting_seconds - 1
        print(f"| {name} | {stats.waiting_share:.0%} | `{cause}` | {apart:+.2%} | {stats.verdict} |", flush=True)


if __name__ == "__main__":
    main()
