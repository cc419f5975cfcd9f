"""What a reader measures of some batches beside their seconds: single samples, ``batchify_fn``, the core that ran it.

    Timing.begin()                -> what is measured of the batch that begins
    Timing.times(scope, seconds)  -> BatchTimes of a batch that was measured, or that took long

Each `Reader` has one. If several threads use one, and two of them write what it knows of the batches so far, an update
may be lost: it decides on no batch. A worker imports this module, so it imports little.
"""

from __future__ import annotations

import operator

from sharded_loader.base.system import core_seconds
from sharded_loader.engine.messages import BatchTimes
from sharded_loader.engine.reader import BatchScope

MEASURED_SECONDS = 2e-2
"""Of work that is measured once. To measure a batch takes 40 us, and 200 us where other processes have the caches: that
is 0.2 to 1 %. Of batches of 40 us (`tiny`) it is one in 500, of 400 us (`images`) one in 50. A batch that takes 20 ms
is always measured. The clocks and counts of the other batches take 0.8 us, by the least of five runs with and
without them: 1 % of the 76 us of `tiny` in a worker."""

SAMPLE_SECONDS = 2e-5
"""To time a sample takes 0.1 us."""

KEPT_SAMPLES = 20
"""The slowest samples of an epoch that a reader, and the loader, keep."""


class Timing:
    """Decides which batches are measured, and puts together what was.

    Measured are the first one, one in `MEASURED_SECONDS` of work, those that take longer, and those whose requests were
    tried again. Samples are timed where one takes `SAMPLE_SECONDS` on average.

    Attributes:
        LONG: seconds from which on a batch is measured; see `times`.
        free: of each worker that uses the reader, when it was done with its last batch.
    """

    LONG = MEASURED_SECONDS

    def __init__(self) -> None:
        self.free: dict[int, float] = {}
        self._core: dict[int, tuple[float, float]] = {}  # `core_seconds` after the last batch that was measured
        self._batches = self._next = self._counted = 0  # that were read; the next to measure; what is in the sums
        self._seconds = self._spare = 0.0  # of batches; by which samples that were read alone were below SAMPLE_SECONDS
        # The epoch of the slowest samples, the seconds of the least of them, and of each.
        self._slow_epoch, self._least, self._slow = -1, SAMPLE_SECONDS, list[float]()

    def begin(self) -> tuple[bool, tuple[float, float] | None]:
        """A batch begins: whether its samples are timed, and `core_seconds` if it is measured."""
        self._batches += 1
        return self._spare <= 0, core_seconds() if self._batches > self._next else None

    def times(self, at: BatchScope, seconds: float, worker: int, retries: int) -> BatchTimes | None:
        """What was measured of a batch that took so long; None: nothing. Learns what to measure from now on."""
        is_slow = seconds > MEASURED_SECONDS or (at.durations and max(at.durations) > self._least)
        if at.measure is None and not is_slow and not retries:
            return None
        weight, processor, queued = 1 if at.measure is None else max(1, self._batches - self._counted), -1.0, 0.0
        if at.measure is not None or seconds > MEASURED_SECONDS:
            core = core_seconds()
            # Of one that was not to be measured, the last batches before it are cheap beside it.
            before, self._core[worker] = at.measure or self._core.get(worker, core), core
            queued = min(seconds, core[1] - before[1])
            processor = min(seconds - queued, core[0] - before[0])
        self._counted += weight
        self._seconds += weight * (seconds - queued)
        # At most as many are left out as were counted, or 16: one odd measurement must not decide for long.
        left_out = min(max(16, self._counted), int(MEASURED_SECONDS * self._counted / max(self._seconds, 1e-6)))
        self._next = self._batches + left_out
        if at.is_alone:
            # With waits for a core: on a busy machine they may seem to be all of it. Needless times cost little.
            self._spare += weight * (SAMPLE_SECONDS * at.samples - max(0.0, seconds - at.collating))
        free = at.began if worker < 0 else self.free.get(worker)  # between two batches, the main process does not idle
        times = BatchTimes(processor=processor, queued=queued, collate=at.collating, weight=weight, retries=retries)
        times.slow, times.is_first = self._slowest(at), free is None
        if free is not None:
            times.idle = max(0.0, at.began - free)
        return times

    def _slowest(self, at: BatchScope) -> tuple[tuple[int, float], ...]:
        """The place and the seconds of those samples of a batch that are among the slowest of the epoch."""
        if at.task.epoch != self._slow_epoch:
            self._slow_epoch, self._slow, self._least = at.task.epoch, [], SAMPLE_SECONDS
        found = [(place, seconds) for place, seconds in enumerate(at.durations) if seconds > self._least]
        found = sorted(found, key=operator.itemgetter(1), reverse=True)[:KEPT_SAMPLES]
        self._slow = sorted([*self._slow, *map(operator.itemgetter(1), found)])[-KEPT_SAMPLES:]
        if len(self._slow) == KEPT_SAMPLES:
            self._least = self._slow[0]
        return tuple(found)
