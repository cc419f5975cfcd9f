"""One way through one epoch of a loader.

    pipeline.next -> entry -> placement.begin, finish -> pipeline.done -> the user
                     and placement.begin for the next ones, where they are copied by streams

An iterator owns its position in the epoch, nothing else. It keeps its loader open by holding it. The epoch begins when
the first batch is asked for: until then an iterator has no run, and dropping it changes nothing. If the first ``next``
is interrupted, the epoch has not begun. Handing out is the last step: if it is interrupted, the batch is the next one
again. If something goes wrong with a batch here (a copy to the device fails), that is the batch's error, like any
other: it is raised once, in the batch's place.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from sharded_loader.devices.placement import Placement
from sharded_loader.devices.resident import Residence
from sharded_loader.devices.streams import OUT_OF_MEMORY, note_late
from sharded_loader.errors import Place, as_exception
from sharded_loader.execution.messages import NOTHING, Result
from sharded_loader.execution.pipeline import Pipeline
from sharded_loader.execution.run import Entry, Run
from sharded_loader.progress import Mark, Progress
from sharded_loader.stats import Meter


class Owner(Protocol):
    """The loader of an iterator."""

    def __len__(self) -> int: ...

    def _begin(self, iterator: EpochIterator) -> None: ...

    def _take_back(self, iterator: EpochIterator) -> None: ...


class EpochIterator(Iterator[Any]):
    """Batches of one epoch, in order.

    Args:
        owner: the loader. It is held, so that a temporary one lives as long as its loop.
        placement, meter, progress: the loader's.

    Attributes:
        run: this iterator's run of the pipeline; None before the first batch is asked for.
        pipeline: where the run is open.
        before: where the loader was before the run began.
    """

    run: Run | None = None
    pipeline: Pipeline
    before: Mark | None = None

    def __init__(self, owner: Owner, placement: Placement | Residence, meter: Meter, progress: Progress) -> None:
        self._owner = owner
        self._placement = placement
        self._meter = meter
        self._progress = progress
        self._lock = threading.RLock()
        self._last_ended: float | None = None

    def begin(self, run: Run, pipeline: Pipeline, placement: Placement | Residence, before: Mark) -> None:
        """Read this run from now on. The loader calls it when the first batch is asked for."""
        self.pipeline, self._placement, self.before = pipeline, placement, before
        self.run = run

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not weakref.finalize: that registry is a root, and would keep alive what the pipeline leads to.
        if self.run is not None and not _is_finalizing():
            self.pipeline.end(self.run.number)

    def __iter__(self) -> EpochIterator:
        return self

    def __len__(self) -> int:
        """Batches in the epoch, those that were delivered included, as torch's iterators count.

        Raises:
            TypeError: the sampler has no length.
        """
        return len(self._owner) if self.run is None else self.run.reading.length()

    def __bool__(self) -> bool:
        """True, as for other iterators, whatever ``len`` says."""
        return True

    def __next__(self) -> Any:
        self._placement.check_not_capturing()
        handed: list[Entry] = []
        try:
            with self._lock:
                batch, error = self._next_batch(handed)
                if error is None:
                    return batch
        except BaseException:
            if self.run is not None:
                if handed:
                    self.pipeline.undo(self.run, handed[0])
                self._owner._take_back(self)
            raise
        try:
            raise error
        finally:
            del error  # else error -> traceback -> this frame -> error, and the loader waits for the collector

    def _next_batch(self, handed: list[Entry]) -> tuple[Any, BaseException | None]:
        """The next batch, or the error in its place.

        Args:
            handed: holds the batch's entry from before it leaves the window until its fate is settled.
        """
        began = time.perf_counter()
        working = 0.0 if self._last_ended is None else began - self._last_ended
        run = self.run or self._begun()
        while True:
            try:
                entry = self.pipeline.next(run)
            except StopIteration:
                run.ended = True
                self._progress.delivered(run)
                if self._progress.was_over(run):
                    self.run = None
                    run = self._begun()
                    continue
                self._placement.end_epoch()
                raise
            arrived = time.perf_counter()
            result, batch = self._place(run, entry)
            placing = time.perf_counter() - arrived
            handed[:] = [entry]
            self.pipeline.done(run, entry)
            self._progress.delivered(run)
            if result.skipped or result.error is not None:
                handed.clear()
                self._meter.skip(result.skipped)
            if result.error is None:
                if result.skipped:
                    self._warn_of_lost(run.epoch, entry.seq, result)
                if result.batch is NOTHING:
                    handed.clear()
                    continue
                if self._meter.looks is None:
                    self._meter.look(batch)
                self._meter.handed(result.samples, result.seconds, placing)
            self._last_ended = time.perf_counter()
            self._meter.waited(self._last_ended - began, working)
            return batch, result.error

    def _begun(self) -> Run:
        """The run that begins now, with the first batch."""
        self._owner._begin(self)
        assert self.run is not None
        return self.run

    def _place(self, run: Run, entry: Entry) -> tuple[Result, Any]:
        """The entry's result and the batch as the user gets it, or the error that came up on the way."""
        result = entry.result
        assert result is not None  # the pipeline returns finished entries
        if result.error is not None or result.batch is NOTHING or entry.task is None:
            return result, None
        placement = self._placement
        try:
            sharded = entry.task.sharded
            if entry.begun is None:
                entry.begun = self._with_room(run, lambda: placement.begin(result.batch, sharded))
            if placement.ahead:
                self._begin_behind(run)
            return result, self._with_room(run, lambda: placement.finish(entry.begun))
        except Exception as raised:
            error = as_exception(raised, "while the batch was placed")
            # Of an error of an earlier kernel no sample is the cause.
            Place(run.epoch, entry.seq).note(error, samples=() if note_late(error) else entry.task.shards[0])
            return Result(result.run, result.seq, error=error), None

    def _with_room(self, run: Run, place: Callable[[], Any]) -> Any:
        """Place the next batch, at the expense of those behind it where a device has no memory for all."""
        placement = self._placement
        try:
            return place()
        except OUT_OF_MEMORY:
            pass  # what follows is not done in here: the error's traceback holds the parts that had found room
        for other in self.pipeline.finished(run, placement.ahead):
            other.begun = None
        placement.make_room()
        return place()

    def _begin_behind(self, run: Run) -> None:
        """Send those behind it that are finished on their way too. What goes wrong comes again in their turn."""
        placement = self._placement
        for entry in self.pipeline.finished(run, placement.ahead):
            result = entry.result
            if entry.begun is not None or entry.task is None or result is None or result.error is not None:
                continue
            if result.batch is NOTHING:
                continue
            try:
                entry.begun = placement.begin(result.batch, entry.task.sharded)
                continue
            except OUT_OF_MEMORY:
                pass
            except Exception:
                return
            placement.make_room()
            return

    def _warn_of_lost(self, epoch: int, batch: int, result: Result) -> None:
        where = f"epoch {epoch}, batch {batch}"
        if result.batch is NOTHING:
            message = f"{where} was left out"
        elif result.lost_shards:
            message = f"{where}: shard {', '.join(map(str, result.lost_shards))} was left out, those after it moved up"
        else:
            return
        warnings.warn(f"{message}: no sample of it could be read (see loader.skipped)", stacklevel=4)
