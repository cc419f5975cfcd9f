"""One way through one epoch of a loader.

    pipeline.next -> entry -> placement.begin, finish -> pipeline.done -> the user
                     and placement.begin for the next ones, where they are copied by streams

An iterator owns its place in the epoch, nothing else; it keeps its loader open by holding it. Handing out is
the last step: interrupted before it is over, the batch is the next one again. What goes wrong with a batch
here (a copy to the device fails) is that batch's error, like any other: raised once, in its place.
"""

from __future__ import annotations

import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from sharded_loader.devices.placement import Placement
from sharded_loader.devices.resident import Residence
from sharded_loader.devices.streams import OUT_OF_MEMORY, note_late
from sharded_loader.errors import Place, as_exception
from sharded_loader.execution.messages import NOTHING, Result
from sharded_loader.execution.pipeline import Pipeline
from sharded_loader.execution.run import Entry, Run
from sharded_loader.progress import Progress
from sharded_loader.stats import Meter


class EpochIterator(Iterator[Any]):
    """Batches of one epoch, in order.

    Args:
        owner: the loader; held, so that a temporary one lives as long as its loop.
        run: this iterator's run of the pipeline, opened.
        pipeline, placement, meter, progress: the loader's.
    """

    def __init__(
        self,
        owner: object,
        run: Run,
        pipeline: Pipeline,
        placement: Placement | Residence,
        meter: Meter,
        progress: Progress,
    ) -> None:
        self._owner = owner
        self.run = run
        self._pipeline = pipeline
        self._placement = placement
        self._meter = meter
        self._progress = progress
        self._lock = threading.RLock()
        self._last_ended: float | None = None

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not weakref.finalize: that registry is a root, and would keep alive what the pipeline leads to.
        if not _is_finalizing() and hasattr(self, "_pipeline"):
            self._pipeline.end(self.run.number)

    def __iter__(self) -> EpochIterator:
        return self

    def __length_hint__(self) -> int:
        """Batches still to come."""
        return max(0, self.run.reading.length() - self.run.delivered)

    def __next__(self) -> Any:
        self._placement.check_not_capturing()
        handed: list[Entry] = []
        try:
            with self._lock:
                batch, error = self._next_batch(handed)
                if error is None:
                    return batch
        except BaseException:
            if handed:
                self._pipeline.undo(self.run, handed[0])
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
        while True:
            try:
                entry = self._pipeline.next(self.run)
            except StopIteration:
                self.run.ended = True
                self._progress.delivered(self.run)
                self._placement.end_epoch()
                raise
            arrived = time.perf_counter()
            result, batch = self._place(entry)
            placing = time.perf_counter() - arrived
            handed[:] = [entry]
            self._pipeline.done(self.run, entry)
            self._progress.delivered(self.run)
            if result.skipped or result.error is not None:
                handed.clear()
                self._meter.skip(result.skipped)
            if result.error is None:
                if result.skipped:
                    self._warn_of_lost(entry.seq, result)
                if result.batch is NOTHING:
                    handed.clear()
                    continue
                if self._meter.looks is None:
                    self._meter.look(batch)
                self._meter.handed(result.samples, result.seconds, placing)
            self._last_ended = time.perf_counter()
            self._meter.waited(self._last_ended - began, working)
            return batch, result.error

    def _place(self, entry: Entry) -> tuple[Result, Any]:
        """The entry's result and the batch as the user gets it, or the error that came up on the way."""
        result = entry.result
        assert result is not None  # the pipeline returns finished entries
        if result.error is not None or result.batch is NOTHING or entry.task is None:
            return result, None
        placement = self._placement
        try:
            sharded = entry.task.sharded
            if entry.begun is None:
                entry.begun = self._with_room(lambda: placement.begin(result.batch, sharded))
            if placement.ahead:
                self._begin_behind()
            return result, self._with_room(lambda: placement.finish(entry.begun))
        except Exception as raised:
            error = as_exception(raised, "while the batch was placed")
            # Of an error of an earlier kernel no sample is the cause.
            Place(self.run.epoch, entry.seq).note(error, samples=() if note_late(error) else entry.task.shards[0])
            return Result(result.run, result.seq, error=error), None

    def _with_room(self, place: Callable[[], Any]) -> Any:
        """Place the next batch, at the expense of those behind it where a device has no memory for all."""
        placement = self._placement
        try:
            return place()
        except OUT_OF_MEMORY:
            pass  # what follows is not done in here: the error's traceback holds the parts that had found room
        for other in self._pipeline.finished(self.run, placement.ahead):
            other.begun = None
        placement.make_room()
        return place()

    def _begin_behind(self) -> None:
        """Send those behind it that are finished on their way too. What goes wrong comes again in their turn."""
        placement = self._placement
        for entry in self._pipeline.finished(self.run, placement.ahead):
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

    def _warn_of_lost(self, batch: int, result: Result) -> None:
        where = f"epoch {self.run.epoch}, batch {batch}"
        if result.batch is NOTHING:
            message = f"{where} was left out"
        elif result.lost_shards:
            message = f"{where}: shard {', '.join(map(str, result.lost_shards))} was left out, those after it moved up"
        else:
            return
        warnings.warn(f"{message}: no sample of it could be read (see loader.skipped)", stacklevel=4)
