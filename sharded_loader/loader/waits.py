"""Why ``next`` waited, and what to do about it: pure functions of what was measured.

    causes_of(wait, result, ...) -> [(cause, seconds)]      of one wait for one batch
    limit_of(stats) -> name        what limits the rate: a cause, or what is behind it
    verdict(stats), advice(stats)  one sentence each; ``stats`` is a `LoaderStats`

A wait is a stretch of time. It is cut where the batch's worker began and ended, and each piece has one cause:

    before its worker began      `start`: the worker had just been started. `main_process` or `held_batches`: the worker
                                 had no task. Otherwise it read other batches: as in the next row
    while it was read            `retries`; `late_sample`; `main_process`, `held_batches`: other workers had no task;
                                 otherwise `compute` or `input`, by the share of the time in which the worker ran
    until it was here            `held_batches`: it had to take the slow way. Otherwise as in the row before

A batch that was read again because a worker has ended is `replaced`. The other time in ``next`` is `placing` or the
main process's own work. The first ``next`` of an iterator is `start`, if nothing was read before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.engine.messages import Result
from sharded_loader.engine.pipeline import Wait
from sharded_loader.loader.times import WorkerTimes

CAUSES = (
    "compute",
    "input",
    "late_sample",
    "main_process",
    "held_batches",
    "placing",
    "start",
    "replaced",
    "retries",
)
"""Why ``next`` waits, by names that never change."""

COMPUTING = 0.5
"""A worker that runs for this share of the time computes. Otherwise it waits for input."""

LATE = 8
"""A sample is late if it takes this many times as long as usual, and half of the time of its batch."""

ENOUGH = 0.05
"""If training waits for a smaller share of the time, a faster loader would not help."""

SLOWER = 2.0
"""A worker is slow if its batches take this many times as long as those of the others."""


def reading_cause(wait: Wait, result: Result, usual: float) -> str:
    """Why a batch was not there while it was read.

    Args:
        wait: for the batch.
        result: the batch.
        usual: seconds of one sample.
    """
    times = result.times
    if times is None:
        failed = isinstance(result.error, (WorkerDiedError, WorkerTimeoutError))
        return "replaced" if failed else "main_process" if wait.lacks_tasks else "compute"
    if times.rebuilt or times.retries:
        return "replaced" if times.rebuilt else "retries"
    if wait.overtaken and times.longest > max(LATE * usual, result.seconds / 2):
        return "late_sample"
    if wait.is_held or wait.lacks_tasks:
        return "held_batches" if wait.is_held else "main_process"
    # Threads that compute wait for each other: Python runs one at a time.
    return "compute" if times.ran * wait.threads >= COMPUTING * result.seconds else "input"


def causes_of(wait: Wait, result: Result, usual: float, *, is_slow: bool = False) -> list[tuple[str, float]]:
    """The causes of one wait. Their seconds add up to it.

    Args:
        wait, result, usual: as of `reading_cause`.
        is_slow: the batch found no room in shared memory, and took the slow way.

    Example:
        >>> from sharded_loader.engine.messages import Times
        >>> result = Result(0, 7, samples=8, seconds=2.0, times=Times(0, 11.0, 13.0, ran=1.9, is_first=True))
        >>> causes_of(Wait(10.0, 14.0), result, 0.25)
        [('start', 1.0), ('compute', 2.0), ('compute', 1.0)]
    """
    began, ended = wait.began, wait.ended
    times, cause = result.times, reading_cause(wait, result, usual)
    if times is None or times.rebuilt or (times.began <= began and not is_slow):
        return [(cause, ended - began)]
    first = min(max(times.began, began), ended)
    last = min(max(times.ended, first), ended)
    free = min(max(times.began - times.idle, began), first)  # since then the worker had no task
    pieces = [
        ("start" if times.is_first else cause, free - began),
        ("start" if times.is_first else "held_batches" if wait.is_held else "main_process", first - free),
        (cause, last - first),
        ("held_batches" if is_slow else cause, ended - last),
    ]
    return [piece for piece in pieces if piece[1] > 0]


def limit_of(stats: Any) -> str:
    """What limits the rate: one of `CAUSES`, ``"collate"``, ``"worker"``, ``"device"``, ``"loop"``; "": not known."""
    if not stats.seconds:
        return ""
    if stats.waiting_share < ENOUGH:
        return "device" if stats.device_seconds >= ENOUGH * stats.seconds else "loop"
    cause = max(stats.causes, key=lambda name: stats.causes[name], default="")
    if not cause or not stats.causes[cause]:
        return ""
    if cause not in ("compute", "input") or not stats.stages:
        return cause
    if slow_worker(stats.workers) is not None:
        return "worker"
    return "collate" if stats.stages["collate"].seconds >= stats.stages["read"].seconds else cause


def slow_worker(workers: Mapping[int, WorkerTimes]) -> tuple[int, float] | None:
    """The number of a worker that is much slower than the others, and how long a batch takes those; None: none is."""
    known = {number: times.p50 for number, times in workers.items() if times.batches >= 3}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda number: known[number])
    others = median(seconds for number, seconds in known.items() if number != slowest)
    return (slowest, others) if known[slowest] >= SLOWER * others else None


def verdict(stats: Any) -> str:
    """What limits the rate, in one sentence; "" where that is not known."""
    limit, workers, slow = limit_of(stats), stats.workers, slow_worker(stats.workers)
    who = f"the {len(workers) or ''} workers, which".replace("  ", " ")
    if len(workers) == 1:
        who = "the main process, which reads by itself and" if -1 in workers else "the worker, which"
    one = "s" * (len(workers) == 1)
    share, device = f"{stats.waiting_share:.0%}", stats.device_seconds / stats.seconds if stats.seconds else 0.0
    if limit == "worker" and slow is not None:
        number, others = slow
        return (
            f"Worker {number} is slow: a batch takes it {_time(workers[number].p50)}, and the others {_time(others)}."
        )
    if limit == "collate":
        mean = {name: stats.stages[name].seconds / max(1, stats.batches) for name in ("read", "collate")}
        took = f"{_time(mean['collate'])} for each batch, and to read it takes {_time(mean['read'])}"
        return f"The collate function is slow: it takes {took}."
    late = "Training waits for single samples while other batches are finished"
    if stats.slowest:
        index, seconds, *_ = stats.slowest[0]
        late += f": the slowest one, index {index!r}, took {_time(seconds)}"
    told = {
        "loop": f"The training loop is the limit: it waits for data for {share} of the time.",
        "device": f"The device is the limit: training waits for it for {device:.0%} of the time.",
        "compute": f"Training waits for {who} compute{one}.",
        "input": f"Training waits for {who} wait{one} for a disk or a network.",
        "late_sample": f"{late}.",
        "main_process": "Training waits for the main process, which gives the workers too few tasks or too late.",
        "held_batches": "The batches that the program holds leave no room in shared memory for others.",
        "placing": "Training waits while the main process converts and copies batches.",
        "start": "Training waits for workers to start, and for the first batches of epochs.",
        "replaced": f"Training waits for batches of workers that ended: {stats.replaced_workers} were replaced.",
        "retries": f"Training waits for requests that are tried again: {stats.retries} so far.",
    }
    return told.get(limit, "")


_ADVICE = {
    "loop": "Leave the loader as it is, and make the training step cheaper.",
    "device": "Leave the loader as it is, and make the step cheaper on the device.",
    "worker": "Look at what this worker shares with no other one: its core, its disk, its part of the data.",
    "collate": "Make the collate function cheaper: join arrays at once, or do its work on the device.",
    "input": "Read with more workers or with threads, read neighbours together (shards), or cache the files.",
    "late_sample": "Make these samples cheaper (stats().slowest lists them), or raise prefetch=.",
    "main_process": "Raise prefetch= to at least two batches for each worker, or use a cheaper sampler.",
    "held_batches": "Let go of batches that you have used, or raise max_bytes= of the pool.",
    "placing": "Make batches smaller, for example of uint8, and let device= copy them in the background.",
    "start": "Keep one loader for all epochs, and import less in the workers.",
    "replaced": "Look at the log for what has ended the workers; too little memory is the most frequent reason.",
    "retries": "Ask the server less often: larger shards, a cache, or fewer workers.",
}


def advice(stats: Any, cores: int) -> str:
    """What to do about the verdict, in one sentence; "" where that is not known.

    Args:
        stats: the numbers.
        cores: how many the workers can use.
    """
    limit, workers = limit_of(stats), stats.workers
    if limit != "compute":
        return _ADVICE.get(limit, "")
    if -1 in workers:
        return "Read with workers: give num_workers=."
    if not workers:
        return "Do less for each sample, or read with more workers."
    if len(workers) < cores:
        return f"Read with more workers: there are cores for {cores}."
    return "Do less for each sample, or read whole batches at once (get_batch): the workers have all cores."


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
