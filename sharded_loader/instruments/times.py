"""Stage times of batches, causes of waiting, and advice.

    Histograms.adding(rows) -> Histograms -> .stages(), .workers()      `StageTimes`, `WorkerTimes`
    causes_of(row, ...) -> [(cause, seconds)]      of one ``next``; the rest is the main process's own work
    limit_of(stats) -> name -> verdict(stats)      the bottleneck; in a sentence

Quantiles are within 5 percent (`PER_POWER` buckets per power of two), maxima are exact. Only measured batches count, by
their weights (`messages.BatchTimes`). A wait is split where the batch's worker began:

    before     `start`: the worker was new. `main_process`: it had no task. Otherwise as below
    after      `main_process`: other workers had no task. Otherwise `compute` while the worker ran, and `input`

Workers have no task if the batches in flight, or those held by the program, have reached their limit. CPU contention
among workers counts as `compute`; contention with other programs is distributed proportionally. Batches read again
after a worker's death count as `start`, and so does the first ``next`` of an iterator if nothing was read before it.

Source of the idea: Plumber (MLSys 2022) and DS-Analyzer (VLDB 2021), which ask what a step would gain if it were free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import BatchTimes

if TYPE_CHECKING:
    from sharded_loader.instruments.stats import LoaderStats

Table = npt.NDArray[np.float64]

STAGES = ("queued", "read", "collate", "write", "behind", "ready", "placing")
"""Stages of a batch, in order; see `LoaderStats.stages`."""

_BATCH, _IDLE, _RAN = range(len(STAGES), len(STAGES) + 3)  # per worker: whole batches, idle time, running time
_ROWS = len(STAGES) + 3

SHORTEST = 1e-6
PER_POWER = 8
BUCKETS = 1 + 34 * PER_POWER
"""From 1 us to 5 hours; the first and last buckets are open."""


class SlowSample(NamedTuple):
    """A sample that was slow to read: its index from the sampler, seconds, epoch, and worker (-1: the main process)."""

    index: Any
    seconds: float
    epoch: int
    worker: int


class StageTimes(NamedTuple):
    """One stage over all batches: sum of seconds, quantiles and maximum of the seconds per batch."""

    seconds: float
    p50: float
    p90: float
    p99: float
    longest: float


class WorkerTimes(NamedTuple):
    """Times of one worker. ``processor_seconds``: part of ``seconds`` on a core or waiting for one, not for input."""

    batches: int
    seconds: float
    processor_seconds: float
    idle_seconds: float
    p50: float
    p90: float
    p99: float
    longest: float


class Histograms:
    """Counts, sums and maxima of the stages, for each worker. The main process comes first, as worker -1.

    Example:
        >>> batch = BatchTimes(worker=1, began=0.5, seconds=2.0, asked=3.0, collate=0.5, weight=1)
        >>> times = Histograms().adding([batch] * 10)
        >>> times.stages()["read"].seconds, times.workers()[1].batches
        (15.0, 10)
    """

    def __init__(self, workers: int = 0) -> None:
        self.num_workers = workers
        self._counts = np.zeros((workers, _ROWS, BUCKETS))
        self._sums, self._longest = np.zeros((2, workers, _ROWS))

    def __add__(self, other: Histograms) -> Histograms:
        made = Histograms(max(self.num_workers, other.num_workers))
        for one in (self, other):
            size = one.num_workers
            made._counts[:size] += one._counts
            made._sums[:size] += one._sums
            np.maximum(made._longest[:size], one._longest, out=made._longest[:size])
        return made

    def adding(self, rows: Iterable[BatchTimes]) -> Histograms:
        """Return these histograms with the measured batches among ``rows`` added."""
        found = [_stages_of(row) for row in rows if row.weight]
        if not found:
            return self
        table = np.array(found)
        workers, weights, values = table[:, 0].astype(int) + 1, table[:, 1:2], table[:, 2:].clip(0.0)
        buckets = 1 + PER_POWER * np.log2(np.maximum(values, SHORTEST / 2) / SHORTEST)
        places = (workers[:, None] * _ROWS + np.arange(_ROWS)) * BUCKETS + buckets.clip(0, BUCKETS - 1).astype(int)
        made = Histograms(int(workers.max()) + 1)
        # `numpy.add.at` takes ten times as long.
        counted = np.bincount(places.ravel(), np.repeat(weights, _ROWS), made._counts.size)
        made._counts[:] = counted.reshape(made._counts.shape)
        made._sums[:] = (np.arange(made.num_workers)[:, None] == workers) @ (values * weights)
        for worker in set(workers.tolist()):
            made._longest[worker] = values[workers == worker].max(0)
        return self + made

    def stages(self) -> dict[str, StageTimes]:
        """Return the times of each of `STAGES`; empty before the first batch."""
        counts, sums, longest = self._counts.sum(0), self._sums.sum(0), self._longest.max(0, initial=0.0)
        rows = enumerate(STAGES if counts.any() else ())
        return {name: StageTimes(float(sums[row]), *_quantiles(counts[row], longest[row])) for row, name in rows}

    def workers(self) -> dict[int, WorkerTimes]:
        """Return the times of each worker that has read a batch, by its number."""
        found = {}
        for place, counts in enumerate(self._counts[:, _BATCH]):
            if batches := int(counts.sum()):
                seconds, idle, ran = map(float, self._sums[place, [_BATCH, _IDLE, _RAN]])
                longest = self._longest[place, _BATCH]
                found[place - 1] = WorkerTimes(batches, seconds, ran, idle, *_quantiles(counts, longest))
        return found


def _stages_of(row: BatchTimes) -> tuple[float, ...]:
    """Return the worker, the weight, and the seconds of each of the `_ROWS`."""
    done, sent = row.written, row.sent or row.began  # 0: the main process has read it itself
    return (
        *(row.worker, row.weight, row.began - sent, row.seconds - row.collate, row.collate, row.write),
        *(row.turn - done, row.asked - max(row.turn, done), row.placing - row.behind, row.seconds + row.write),
        *(row.idle, row.seconds if row.processor < 0 else row.processor + row.queued),
    )


def _quantiles(counts: Table, longest: float) -> tuple[float, float, float, float]:
    """Return the midpoints of the buckets at 50, 90 and 99 percent, and the maximum."""
    reached = counts.cumsum()
    places = np.searchsorted(reached, np.array([0.5, 0.9, 0.99]) * reached[-1])
    middles = np.where(places == 0, 0.0, SHORTEST * 2.0 ** ((places - 0.5) / PER_POWER))
    p50, p90, p99 = np.minimum(middles, longest).tolist()
    return p50, p90, p99, float(longest)


# -- why next() waited -------------------------------------------------------------------------------------------------

CAUSES = ("compute", "input", "main_process", "placing", "start")
"""Causes of waiting in ``next``. The names are stable."""

LATE = 2
"""Single samples are slow if the mean time of a batch exceeds the median by this factor."""

ENOUGH = 0.05
"""Share of waiting below which a faster loader would not help."""

SLOWER = 2.5
"""A worker is slow if its batches take this many times as long as those of the others."""

TURNS = 0.7
"""Share of running time from which threads contend for the GIL, and workers for all cores."""

LASTING = 4.0
"""A finished start-up is reported as the bottleneck only if it cost this many times the later waits."""


def compute_share(rows: Iterable[BatchTimes], before: float) -> float:
    """Return the share of time in which workers computed, over the measured batches; ``before`` if there are none."""
    seconds = ran = queued = per_core = 0.0
    for row in rows:
        if row.processor >= 0:
            seconds += row.weight * row.seconds
            ran += row.weight * row.processor
            queued += row.weight * row.queued
            per_core = max(per_core, row.per_core)
    if per_core * ran >= TURNS * seconds:
        ran += queued
    else:  # other programs have the cores
        seconds -= queued
    return min(1.0, ran / seconds) if seconds > 0 else before


def causes_of(row: BatchTimes, share: float) -> list[tuple[str, float]]:
    """Return the causes of one ``next``, without ``placing`` and the main process's own work.

    ``share`` is the share of computing in the time of other batches, for rows that were not measured.

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
    if row.is_lost:
        return [("start", until - since)]
    pieces = []
    if began > since:
        began = min(began, until)
        free = max(row.began - row.idle, since)  # since then the worker had no task
        free = since if row.is_first else min(free, began)
        pieces, since = [("start" if row.is_first else "main_process", began - free)], since + began - free
    if row.lacks_tasks:
        return [*pieces, ("main_process", until - since)]
    if row.processor >= 0:
        share = compute_share([row], share)
    if row.threads > 1 and share * row.threads >= TURNS:
        share = 1.0
    return [*pieces, ("compute", share * (until - since)), ("input", (1 - share) * (until - since))]


def name_causes(rows: Sequence[BatchTimes]) -> None:
    """Set the largest cause of each wait."""
    share = compute_share(rows, 1.0)
    for row in rows:
        causes, placing = causes_of(row, share), row.placing - row.behind
        own = row.waited - placing - sum(seconds for _, seconds in causes)
        causes += [("placing", placing), ("main_process", own)]
        row.cause = max(causes, key=lambda one: one[1])[0] if row.waited else ""


# -- what it means -----------------------------------------------------------------------------------------------------


def limit_of(stats: LoaderStats) -> str:
    """Return the bottleneck: a cause, ``"collate"``, ``"late"``, ``"worker"``, ``"device"``, ``"loop"``, or ``""``."""
    if not stats.seconds:
        return ""
    if stats.waiting_share < ENOUGH or stats.waiting_seconds < stats.device_seconds:
        return "device" if stats.device_seconds >= ENOUGH * stats.seconds else "loop"
    causes = {**dict.fromkeys(CAUSES, 0.0), **stats.causes}
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
    """Return a worker much slower than the others, and the others' seconds per batch; None if there is none."""
    known = {number: times.p50 for number, times in workers.items() if times.batches >= 3}
    if len(known) < 2:
        return None
    slowest = max(known, key=lambda number: known[number])
    others = float(np.median([seconds for number, seconds in known.items() if number != slowest]))
    return (slowest, others) if known[slowest] >= SLOWER * others else None


_MORE = 'or let num_workers="auto" find how many workers help'

_VERDICTS = {
    "loop": "The training loop is the limit: it waits for data for {share:.0%} of the time.",
    "device": "The device is the limit: training waits for it for {device:.0%} of the time.",
    "worker": "Worker {number} is slow: a batch takes it {its}, and the others {others}.",
    "compute": "Training waits for {who} compute{s}.",
    "collate": "The collate function is slow: it takes {collate} for each batch, and to read it takes {read}.",
    "input": "Training waits for {who} wait{s} for a disk or a network.",
    "late": "Training waits for single samples: the slowest one, index {index!r}, took {took}.",
    "main_process": "Training waits for the main process, which gives the workers too few tasks or too late.",
    "placing": "Training waits while the main process converts and copies batches.",
    "start": "Training waits for workers to start{also}, and for the first batches of epochs.",
}

ADVICE = {
    "loop": "Leave the loader as it is, and make the training step cheaper.",
    "device": "Leave the loader as it is, and make the step cheaper on the device.",
    "worker": "Look at what this worker shares with no other one: its core, its disk, its part of the data.",
    "compute": f"Do less for each sample, {_MORE}.",
    "collate": "Make the collate function cheaper: join arrays at once, or do its work on the device.",
    "input": f"Read neighbours together (shards), cache the files, {_MORE}.",
    "late": "Make the slowest samples cheaper (stats().slowest lists them).",
    "main_process": "Use larger batches, a cheaper sampler or a larger prefetch=, and hold fewer batches.",
    "placing": "Make batches smaller, for example of uint8, and let device= copy them in the background.",
    "start": "Keep one loader for all epochs, and import less in the workers; the log says why workers ended.",
}


def verdict(stats: LoaderStats) -> str:
    """Return the bottleneck in one sentence; empty if unknown."""
    limit, workers = limit_of(stats), stats.workers
    if not limit:
        return ""
    who = f"the {len(workers) or ''} workers, which".replace("  ", " ")
    if len(workers) == 1:
        who = "the main process, which reads by itself and" if -1 in workers else "the worker, which"
    also = f" ({stats.replaced_workers} in the place of others)" if stats.replaced_workers else ""
    facts: dict[str, object] = {"who": who, "s": "s" * (len(workers) == 1), "also": also}
    facts |= {"share": stats.waiting_share, "device": stats.device_seconds / stats.seconds}
    if limit == "worker" and (slow := slow_worker(workers)) is not None:
        number, others = slow
        facts |= {"number": number, "its": time_text(workers[number].p50), "others": time_text(others)}
    elif limit == "collate":
        batches = max(1, stats.batches)
        facts |= {name: time_text(stats.stages[name].seconds / batches) for name in ("read", "collate")}
    elif limit == "late":
        facts |= {"index": stats.slowest[0].index, "took": time_text(stats.slowest[0].seconds)}
    return _VERDICTS[limit].format(**facts)


def time_text(seconds: float) -> str:
    """Format a duration.

    Example:
        >>> time_text(0.25), time_text(0.0312)
        ('0.25 s', '31.2 ms')
    """
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
