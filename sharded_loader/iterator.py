"""One way through one epoch of a loader.

    pipeline.next -> entry -> placement -> pipeline.done -> the user

An iterator owns its run's position, nothing else. Handing out is the last step: interrupted before it, the
batch is the next one again.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from sharded_loader.execution.pipeline import Entry, Run
from sharded_loader.execution.pools.base import NOTHING

if TYPE_CHECKING:
    from sharded_loader.loader import ShardedDataLoader


class EpochIterator(Iterator[Any]):
    """One way through one epoch."""

    def __init__(self, loader: ShardedDataLoader, run: Run) -> None:
        self._loader = loader
        self.run = run
        self._lock = threading.RLock()
        self._last_ended: float | None = None
        # Not a __del__: a finalizer must not touch what may be half gone, and must not run in a forked child.
        weakref.finalize(self, loader._pipeline.end, run.number).atexit = False

    def __iter__(self) -> EpochIterator:
        return self

    def __length_hint__(self) -> int:
        """Batches still to come, for progress bars."""
        return max(0, self._loader._order.length(self.run.epoch) - self.run.delivered)

    def __next__(self) -> Any:
        handed: list[Entry] = []
        try:
            with self._lock:
                return self._next_batch(handed)
        except BaseException as error:
            # Handing out was interrupted: the batch is the next one again.
            if handed and handed[0].result is not None and error is not handed[0].result.error:
                self._loader._pipeline.undo(self.run, handed[0])
            raise

    def _next_batch(self, handed: list[Entry]) -> Any:
        """The next batch. ``handed`` gets its entry before it leaves the window."""
        loader, run, pipeline = self._loader, self.run, self._loader._pipeline
        began = time.perf_counter()
        while True:
            try:
                entry = pipeline.next(run)
            except StopIteration:
                run.ended = True
                raise
            result = entry.result
            assert result is not None  # the pipeline returns finished entries
            arrived = time.perf_counter()
            batch: Any = None
            if result.error is None and result.batch is not NOTHING:
                batch = loader._placement.place(result.batch, entry.task is not None and entry.task.sharded)
            placing = time.perf_counter() - arrived
            handed[:] = [entry]
            pipeline.done(run, entry)
            if result.skipped:
                loader._note_skipped(result)
            if result.error is not None:
                raise result.error
            if result.batch is not NOTHING:
                loader._note_batch(batch)
                self._last_ended = loader._meter.delivered(
                    result.samples, result.seconds, placing, began, self._last_ended
                )
                return batch
            self._warn_left_out(entry.seq)

    def _warn_left_out(self, batch: int) -> None:
        warnings.warn(
            f"epoch {self.run.epoch}, batch {batch} was left out: no sample of it could be read "
            f"(see loader.skipped for the errors)",
            stacklevel=4,
        )
