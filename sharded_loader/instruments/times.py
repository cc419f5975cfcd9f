"""How long batches took on their way, in histograms.

    Histograms.adding(rows) -> Histograms        of fixed size, for each worker and each stage
    Histograms.stages(), .workers() -> `StageTimes`, `WorkerTimes`: sums and quantiles

A histogram has `PER_POWER` buckets for each power of two. So a quantile is at most 5 percent from the true one. The
largest value is exact. Only measured batches are in it, by their weights (`messages.BatchTimes`).

Nothing here changes: a reader in another thread has what was counted when it asked. Nothing can go wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.engine.messages import BatchTimes

Table = np.ndarray[Any, Any]

STAGES = ("queued", "read", "collate", "write", "behind", "ready", "placing")
"""The way of a batch: it waits for a worker, is read, goes through the collate function, is written into its slot. It
waits for the batches before it, then for the loop to ask for it, and is put where it belongs."""

_BATCH, _IDLE, _RAN = range(len(STAGES), len(STAGES) + 3)  # of a worker: whole batches, and what is in them
_ROWS = len(STAGES) + 3

SHORTEST = 1e-6
PER_POWER = 8
BUCKETS = 1 + 34 * PER_POWER
"""From 1 us to 5 hours. The first bucket has what is shorter, the last one what is longer."""


class SlowSample(NamedTuple):
    """A sample that took long to read.

    Attributes:
        index: as the sampler yielded it.
        seconds: that it took.
        epoch: in which it was read.
        worker: the number of its worker; -1: the main process.
    """

    index: Any
    seconds: float
    epoch: int
    worker: int


class StageTimes(NamedTuple):
    """One stage of all batches: the sum of its seconds, quantiles of the seconds of a batch, and the longest."""

    seconds: float
    p50: float
    p90: float
    p99: float
    longest: float


class WorkerTimes(NamedTuple):
    """What one worker has done.

    Attributes:
        batches: how many.
        seconds: in which it read, collated and wrote them.
        processor_seconds: of these, those in which it ran, or waited for a core. In the others it waited for input.
        idle_seconds: in which it had no batch to read, between two batches.
        p50, p90, p99, longest: seconds of one batch.
    """

    batches: int
    seconds: float
    processor_seconds: float
    idle_seconds: float
    p50: float
    p90: float
    p99: float
    longest: float


class Histograms:
    """Counts, sums and largest values of the stages, for each worker. The main process comes first, as worker -1.

    Args:
        workers: for how many there is room.

    Example:
        >>> batch = BatchTimes(worker=1, began=0.5, seconds=2.0, asked=3.0, collate=0.5, weight=1)
        >>> times = Histograms().adding([batch] * 10)
        >>> times.stages()["read"].seconds, times.workers()[1].batches
        (15.0, 10)
    """

    def __init__(self, workers: int = 0) -> None:
        self.num_workers = workers
        self._counts = np.zeros((workers, _ROWS, BUCKETS), np.int64)
        self._sums = np.zeros((workers, _ROWS))
        self._longest = np.zeros((workers, _ROWS))

    def __add__(self, other: Histograms) -> Histograms:
        made = Histograms(max(self.num_workers, other.num_workers))
        for one in (self, other):
            size = one.num_workers
            made._counts[:size] += one._counts
            made._sums[:size] += one._sums
            np.maximum(made._longest[:size], one._longest, out=made._longest[:size])
        return made

    def adding(self, rows: Iterable[BatchTimes]) -> Histograms:
        """These, and those of some more batches, as far as they were measured."""
        found = [_stages_of(row) for row in rows if row.weight]
        if not found:
            return self
        table = np.array(found)
        workers, weights, values = table[:, 0].astype(int) + 1, table[:, 1], table[:, 2:].clip(0.0)
        buckets = 1 + PER_POWER * np.log2(np.maximum(values, SHORTEST / 2) / SHORTEST)
        places = workers[:, None] * _ROWS + np.arange(_ROWS)
        made = Histograms(int(workers.max()) + 1)
        made._sums += _added(places, values * weights[:, None], made._sums)
        places = places * BUCKETS + buckets.clip(0, BUCKETS - 1).astype(int)
        made._counts += _added(places, np.broadcast_to(weights[:, None], places.shape), made._counts).astype(int)
        for worker in set(workers.tolist()):
            made._longest[worker] = values[workers == worker].max(0)
        return self + made

    def stages(self) -> dict[str, StageTimes]:
        """Each of `STAGES`; nothing before the first batch."""
        counts, sums, longest = self._counts.sum(0), self._sums.sum(0), self._longest.max(0, initial=0.0)
        if not counts.any():
            return {}
        return {
            name: StageTimes(float(sums[row]), *_quantiles(counts[row], longest[row]), float(longest[row]))
            for row, name in enumerate(STAGES)
        }

    def workers(self) -> dict[int, WorkerTimes]:
        """Each worker that has read a batch, by its number."""
        found = {}
        for place, counts in enumerate(self._counts[:, _BATCH]):
            if batches := int(counts.sum()):
                seconds, idle, ran = map(float, self._sums[place, [_BATCH, _IDLE, _RAN]])
                longest = float(self._longest[place, _BATCH])
                found[place - 1] = WorkerTimes(batches, seconds, ran, idle, *_quantiles(counts, longest), longest)
        return found


def _stages_of(row: BatchTimes) -> tuple[float, ...]:
    """The worker, the weight, and the seconds of each of the `_ROWS`."""
    done, sent = row.written, row.sent or row.began  # 0: the main process has read it itself
    return (
        *(row.worker, row.weight, row.began - sent, row.seconds - row.collate, row.collate, row.write),
        *(row.turn - done, row.asked - max(row.turn, done), row.placing - row.behind, row.seconds + row.write),
        *(row.idle, row.seconds if row.processor < 0 else row.processor + row.queued),
    )


def _added(places: Table, values: Table, like: Table) -> Table:
    """The sum of the values of each place, in the shape of an array. `numpy.add.at` takes ten times as long."""
    return np.bincount(places.ravel(), values.ravel(), like.size).reshape(like.shape)


def _quantiles(counts: Table, longest: float) -> tuple[float, float, float]:
    """The middles of the buckets in which 50, 90 and 99 percent of the values are reached."""
    reached = counts.cumsum()
    places = np.searchsorted(reached, np.array([0.5, 0.9, 0.99]) * reached[-1])
    middles = np.where(places == 0, 0.0, SHORTEST * 2.0 ** ((places - 0.5) / PER_POWER))
    p50, p90, p99 = np.minimum(middles, longest).tolist()
    return p50, p90, p99
