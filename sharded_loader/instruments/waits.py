"""Why ``next`` waited, and what to do about it: pure functions of what was measured.

    causes_of(row, ...) -> [(cause, seconds)]      of one ``next``; what is left of it is the main process's own work
    limit_of(stats) -> name        what limits the rate: a cause, or what is behind it
    verdict(stats), advice(stats)  one sentence each; ``stats`` is a `LoaderStats`

A wait is a stretch of time. It is cut where the batch's worker began, and each part has one cause:

    before its worker began      `start`: the worker had just been started. `main_process`: it had no task. Otherwise it
                                 read other batches: as in the next row
    since then                   `main_process`: other workers had no task. Otherwise `compute`, as far as the worker
                                 ran, and `input`

A worker has no task if no more batches may be in flight, or if the batches that the program holds leave no room. That a
worker waits for a core is `compute` too, if the workers use the cores. If other programs use them, it is shared out:
training would wait for the same if it had the machine for itself.

A batch that was read again because a worker has ended is `start`: another one had to be started. So is the first
``next`` of an iterator, if nothing was read before it. The other time in ``next`` is `placing` or the main process's
own work.

Source of the idea: Plumber (MLSys 2022) and DS-Analyzer (VLDB 2021), which ask what a step would gain if it were free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from sharded_loader.engine.messages import BatchTimes
from sharded_loader.instruments.times import WorkerTimes

CAUSES = ("compute", "input", "main_process", "placing", "start")
"""Why ``next`` waits, by names that never change."""

LATE = 2
"""Single samples are late if batches take this many times as long on average as half of them take at most."""

ENOUGH = 0.05
"""If training waits for a smaller share of the time, a faster loader would not help."""

SLOWER = 2.5
"""A worker is slow if its batches take this many times as long as those of the others."""

TURNS = 0.7
"""Threads that together run for this share of the time wait for each other: Python runs one at a time. So do workers
that together run for this share of the time of all cores."""

LASTING = 4.0
"""A start that is over is the verdict only if it took this many times as long as what training waits for since then."""


def compute_share(rows: Iterable[BatchTimes], before: float) -> float:
    """The share of the time in which workers computed, of those batches that were measured; ``before``, if none was."""
    known = [row for row in rows if row.processor >= 0]
    seconds = sum(row.weight * row.seconds for row in known)
    ran = sum(row.weight * row.processor for row in known)
    queued = sum(row.weight * row.queued for row in known)
    if max((row.per_core for row in known), default=0.0) * ran >= TURNS * seconds:
        ran += queued
    else:  # other programs have the cores
        seconds -= queued
    return min(1.0, ran / seconds) if seconds > 0 else before


def causes_of(row: BatchTimes, share: float) -> list[tuple[str, float]]:
    """The causes of one ``next``, without ``placing`` and the main process's own work.

    Args:
        row: the batch.
        share: of the time of other batches, in which workers computed.

    Example:
        >>> waited = {"wait_began": 10.0, "wait_ended": 14.0, "processor": 1.5, "weight": 1, "is_first": True}
        >>> causes_of(BatchTimes(began=11.0, seconds=2.0, worker=0, **waited), 1.0)
        [('start', 1.0), ('compute', 2.25), ('input', 0.75)]
    """
    if row.starts:
        return [("start", row.taken - row.asked - row.placing)]
    since, until, began = row.wait_began, row.wait_ended, row.began
    if not until:
        if row.worker >= 0 or began < row.asked:
            return []
        since, until = began, began + row.seconds
    pieces = []
    if began > since and not row.is_lost:
        began = min(began, until)
        free = max(row.began - row.idle, since)  # since then the worker had no task
        free = since if row.is_first else min(free, began)
        pieces, since = [("start" if row.is_first else "main_process", began - free)], since + began - free
    if row.is_lost or row.lacks_tasks:
        return [*pieces, ("start" if row.is_lost else "main_process", until - since)]
    if row.processor >= 0:
        share = compute_share([row], share)
    if row.threads > 1 and share * row.threads >= TURNS:
        share = 1.0
    return [*pieces, ("compute", share * (until - since)), ("input", (1 - share) * (until - since))]


def name_causes(rows: Sequence[BatchTimes]) -> None:
    """Note the largest cause of each wait."""
    share = compute_share(rows, 1.0)
    for row in rows:
        causes = causes_of(row, share)
        placing = row.placing - row.behind
        own = row.waited - placing - sum(seconds for _, seconds in causes)
        causes += [("placing", placing), ("main_process", own)]
        row.cause = max(causes, key=lambda one: one[1])[0] if row.waited else ""


# -- what it means -----------------------------------------------------------------------------------------------------


def limit_of(stats: Any) -> str:
    """What limits the rate: one of `CAUSES`, or what is behind it: ``"collate"``, ``"late"``, ``"worker"``,
    ``"device"``, ``"loop"``; "": not known."""
    if not stats.seconds:
        return ""
    if stats.waiting_share < ENOUGH or stats.waiting_seconds < stats.device_seconds:
        return "device" if stats.device_seconds >= ENOUGH * stats.seconds else "loop"
    causes = {name: stats.causes.get(name, 0.0) for name in CAUSES}
    computing, inputs = causes.pop("compute"), causes.pop("input")
    causes["reading"] = computing + inputs
    first, second = sorted(causes, key=lambda name: causes[name], reverse=True)[:2]
    cause = second if first == "start" and causes[first] < LASTING * causes[second] else first
    if not causes[cause] or cause != "reading":
        return cause if causes[cause] else ""
    if slow_worker(stats.workers) is not None:
        return "worker"
    if stages := stats.stages:
        read, batches = stages["read"], sum(worker.batches for worker in stats.workers.values())
        if stages["collate"].seconds >= read.seconds:
            return "collate"
        if stats.slowest and read.seconds > LATE * read.p50 * batches:
            return "late"
    return "compute" if computing >= inputs else "input"


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
        its, theirs = time_text(workers[number].p50), time_text(others)
        return f"Worker {number} is slow: a batch takes it {its}, and the others {theirs}."
    if limit == "collate":
        mean = {name: stats.stages[name].seconds / max(1, stats.batches) for name in ("read", "collate")}
        took = f"{time_text(mean['collate'])} for each batch, and to read it takes {time_text(mean['read'])}"
        return f"The collate function is slow: it takes {took}."
    if limit == "late":
        index, seconds, *_ = stats.slowest[0]
        return f"Training waits for single samples: the slowest one, index {index!r}, took {time_text(seconds)}."
    also = f" ({stats.replaced_workers} in the place of others)" if stats.replaced_workers else ""
    told = {
        "loop": f"The training loop is the limit: it waits for data for {share} of the time.",
        "device": f"The device is the limit: training waits for it for {device:.0%} of the time.",
        "compute": f"Training waits for {who} compute{one}.",
        "input": f"Training waits for {who} wait{one} for a disk or a network.",
        "main_process": "Training waits for the main process, which gives the workers too few tasks or too late.",
        "placing": "Training waits while the main process converts and copies batches.",
        "start": f"Training waits for workers to start{also}, and for the first batches of epochs.",
    }
    return told.get(limit, "")


_MORE = 'or let num_workers="auto" find how many workers help'

_ADVICE = {
    "loop": "Leave the loader as it is, and make the training step cheaper",
    "device": "Leave the loader as it is, and make the step cheaper on the device",
    "worker": "Look at what this worker shares with no other one: its core, its disk, its part of the data",
    "compute": f"Do less for each sample, {_MORE}",
    "collate": "Make the collate function cheaper: join arrays at once, or do its work on the device",
    "input": f"Read neighbours together (shards), cache the files, {_MORE}",
    "late": "Make the slowest samples cheaper (stats().slowest lists them)",
    "main_process": "Use larger batches, a cheaper sampler or a larger prefetch=, and hold fewer batches",
    "placing": "Make batches smaller, for example of uint8, and let device= copy them in the background",
    "start": "Keep one loader for all epochs, and import less in the workers; the log says why workers ended",
}


def advice(stats: Any) -> str:
    """What to do about the verdict, in one sentence; "" where it is not known."""
    limit = limit_of(stats)
    return f"{_ADVICE[limit]}." if limit else ""


def time_text(seconds: float) -> str:
    """A time for people.

    Example:
        >>> time_text(0.25), time_text(0.0312)
        ('0.25 s', '31.2 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
