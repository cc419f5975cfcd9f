"""Iterator over one epoch of a loader.

    pipeline.next --deliver--> placement.place -> the user

It owns only the count of its delivered batches, and keeps its loader open by holding it. The epoch begins when the
first batch is handed out: an iterator dropped before that has changed nothing.

One ``next`` is one step of the pipeline. An exception in the middle of it (a Ctrl-C, a signal handler that raises)
passes unchanged, and the next ``next`` gives the same batch. An error of the batch itself, such as a failed copy to the
device, is raised once, in the batch's place.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from sharded_loader.base import host_clock
from sharded_loader.base.errors import LoaderClosedError
from sharded_loader.base.imports import exclude_from_compilation
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.private import find_profiler_enabled, is_owned
from sharded_loader.batching.tree import to_torch
from sharded_loader.devices.placement import placement_error
from sharded_loader.engine.messages import NOTHING, Result
from sharded_loader.engine.pipeline import Entry, Observer, Run
from sharded_loader.loader.arguments import Batch
from sharded_loader.loader.epochs import Epochs

profiler_enabled = find_profiler_enabled()
"""Function that tells if torch's profiler runs; looked up once, because each ``next`` calls it."""


class EpochIterator(Iterator[Batch]):
    """Batches of one epoch, in order. A temporary ``owner`` (the loader) lives as long as its loop.

    ``run`` is this iterator's run of the pipeline; None before the first batch is asked for.
    """

    run: Run | None = None

    def __init__(self, epochs: Epochs, observer: Observer, owner: Any = None) -> None:
        self._epochs, self._observer, self._owner = epochs, observer, owner
        self._pipeline, self._placement, self._progress = epochs.pipeline, epochs.placement, epochs.progress
        self._pipeline.scheduler.is_timed = observer.times
        self._last_ended: float | None = None  # time when it last handed out a batch or an error
        self._counts: Any = None  # the observer's
        self._skipped = 0  # samples of this epoch
        self._is_new = self._is_first = True  # the run is not open; nothing was handed out
        self._starts = False  # the first batch waits for workers to start
        # Name for torch.profiler, as torch names the ranges of its own loader.
        self._range = "" if owner is None else f"enumerate({type(owner).__name__})#{type(self).__name__}.__next__"

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # Not weakref.finalize: its registry is a root, and would keep alive all that the pipeline refers to.
        if self.run is not None and not _is_finalizing():
            self._pipeline.drop(self.run.number)

    def __len__(self) -> int:
        """Return the number of batches in the epoch, delivered or not; a TypeError if the sampler has no length."""
        return len(self._owner) if self.run is None else self.run.epoch.length()

    def __bool__(self) -> bool:
        """Return True, as other iterators do, whatever ``len`` says."""
        return True

    def next(self) -> Batch:
        """Return ``next(iterator)``: the spelling of old Gluon and Python 2 scripts."""
        return self.__next__()

    def __next__(self) -> Batch:
        if profiler_enabled() and self._range:
            name, self._range = self._range, ""
            try:
                with torch.autograd.profiler.record_function(name):
                    return next(self)
            finally:
                self._range = name
        if (probes := self._placement.capture_probes) and any(is_capturing() for is_capturing in probes):
            self._placement.check_not_capturing()
        pipeline, clock, is_read = self._pipeline, self._placement.clock, None
        if os.getpid() != pipeline.pid:
            pipeline.check_open()  # before the lock: in a forked child no thread would release it
        is_nested = pipeline.is_open_step and is_owned(pipeline.lock)
        try:
            with pipeline.lock:
                run, is_read = self.run, False
                if run is not None and pipeline.closed:
                    pipeline.check_open()  # raises: another loader may have the pool
                delivered, current_run = 0 if run is None else run.delivered, self._progress.current_run
                for record in clock.records.values():
                    with contextlib.suppress(RuntimeError):  # the device is broken: the batch says so
                        record()
                clock.calls += 1  # now, so that what was interrupted before does not count
                try:
                    clock.times = self._counts = self._observer.counts() if self._last_ended is None else self._counts
                    if run is None:
                        self._choose_run()
                    batch, error, is_read = *self._step(is_nested), True
                    if run is None and self._is_first and error is not None and not isinstance(error, StopIteration):
                        self._go_back_to_choose()  # nothing was handed out, not even an error in a batch's place
                except BaseException as raised:
                    is_read = False
                    self._go_back(run, delivered, current_run)
                    if pipeline.closed and isinstance(raised, Exception) and not is_from_outside(raised):
                        raise LoaderClosedError from None  # closed in the middle of the step
                    raise
        except BaseException:
            if is_read is None and not is_nested and is_owned(pipeline.lock):  # Python 3.14: before the block began
                pipeline.lock.release()
            if is_read:  # a Ctrl-C as the lock was released; behind it there is no call at which one could come
                with pipeline.lock:
                    self._go_back(run, delivered, current_run)
            raise
        if error is None:
            return batch  # type: ignore[no-any-return]
        try:
            raise error
        finally:
            del error  # otherwise error -> traceback -> this frame -> error, and the loader waits for the collector

    def _step(self, is_nested: bool) -> tuple[Any, BaseException | None]:
        """Return the next batch, or the error to raise: of the batch, of the pipeline, or `StopIteration`."""
        run, first, clock, observer = self.run, None, self._placement.clock, self._observer
        assert run is not None  # it was chosen
        behind, asked = clock.behind, host_clock.now() if observer.times else 0.0
        self._starts = False
        if self._is_new:
            self._is_new, first = False, self._take_up
        elif run.epoch.keeps:  # no earlier: an interrupted `next` rolls back over empty batches
            run.epoch.forget(run.delivered)
        found = self._pipeline.next(run, self._deliver, is_nested, first, self._epochs.read_ahead)
        while found is None and (following := self._end(run)) is not None:
            run = following
            found = self._pipeline.next(run, self._deliver, is_nested, self._take_up, self._epochs.read_ahead)
        try:
            if type(found) is not Entry:
                return None, found or StopIteration()  # type: ignore[return-value]
            turn, taken = self._last_ended, host_clock.now() if observer.times else 0.0
            if turn is None:
                turn = asked
                observer.begin(run.epoch.number, self._counts)
            self._last_ended = taken
            if observer.times:
                stamps = turn, asked, taken, clock.behind - behind, self._starts
                observer.step(self._counts, found, stamps, self._pipeline)
            return found.batch, None if found.result is None else found.result.error
        finally:
            del found  # as in `__next__`

    def _take_up(self, run: Run) -> None:
        self._epochs.open(run, self)
        self._starts = not run.window and self._pipeline.pool.num_workers > 0

    def _choose_run(self) -> Run:
        self.run, self._is_new, self._is_first = self._epochs.choose(), True, True
        return self.run

    def _end(self, run: Run) -> Run | None:
        """End a run; return the run that replaces it if its epoch was already over when its state was saved."""
        self._check_parts(run, at_end=True)
        self._check_discarded(run)
        # Break the chain run -> next run: an iterator that the user holds would keep every later run alive.
        run.ended, run.next = True, None
        if self._is_first:
            self._progress.begun(run, self)
        self._progress.current_run = run
        if self._progress.was_over(run):
            self._pipeline.drop(run.number)
            following = self._choose_run()  # discards even empty batches of the old run
            following.rollback_point, self._is_new = run.rollback_point, False
            return following
        self._placement.end_epoch()
        return None

    def _deliver(self, run: Run, entry: Entry) -> bool:
        """Place a batch on its devices and count it as delivered; an exception undoes that. Return False if it is
        empty.
        """
        result, task, placement = entry.result, entry.task, self._placement
        assert result is not None  # it is finished
        began = host_clock.now() if self._observer.times else 0.0
        if entry.seq == run.epoch.second_pass:
            self._check_parts(run, at_end=False)
        if result.error is None and result.batch is not NOTHING:
            assert task is not None  # it has a batch
            try:
                if placement.is_plain:
                    entry.batch = to_torch(result.batch)
                else:
                    entry.batch = placement.place(run.window, () if run.next is None else run.next.window)
                if task.share is not None:
                    self._progress.share = task.share[1]
                if run.epoch.evaluates:
                    entry.batch = entry.batch, run.epoch.real(task)
                if self._epochs.sources is not None:
                    entry.batch = entry.batch, self._epochs.sources(task, result)
            except Exception as raised:
                error = placement_error(task, raised, "while the batch was placed")
                entry.result = result = replace(result, batch=None, error=error)
                del error
        if self._observer.times:
            entry.placing = host_clock.now() - began
        run.delivered = entry.seq + 1
        self._progress.current_run = run
        if self._is_first:
            self._is_first = False
            self._progress.begun(run, self)
            self._epochs.open_ahead(run)
        if result.skipped:
            entry.result = result = self._note_skipped(f"epoch {run.epoch.number}, batch {entry.seq}", result)
        try:
            return result.batch is not NOTHING or result.error is not None
        finally:
            del result, entry  # the error of a batch that was not placed leads to this frame

    def _check_parts(self, run: Run, at_end: bool) -> None:
        if self._pipeline.pool.worker_init_fn is None:  # otherwise it may divide them
            run.epoch.check_parts(run.delivered, at_end, self._observer.notices)

    def _check_discarded(self, run: Run) -> None:
        """Count the samples that ``last_batch="discard"`` left out of an epoch; warn if whole parts are among them."""
        count, parts = run.epoch.discarded()
        self._observer.notices.counts["discarded_samples"] += count
        if count and parts:
            self._observer.notices.warn(
                "discarded",
                f'epoch {run.epoch.number}: last_batch="discard" (drop_last) has left out {count} samples: {parts} had '
                f"fewer than a batch. Give smaller batches or fewer parts (streams=), or keep incomplete batches",
            )

    def _go_back(self, run: Run | None, delivered: int, current_run: Run | None) -> None:
        """Restore the run, its count of delivered batches, and the current run after a ``next`` that raised."""
        if self.run is None:
            return
        self._pipeline.fail()
        if self._progress.current_run is self.run:
            self._progress.current_run = current_run
        self.run.delivered, self.run.ended = self.run.epoch.first if run is None else delivered, False
        if run is None:
            self._go_back_to_choose()

    def _go_back_to_choose(self) -> None:
        run, self.run = self.run, None
        if run is not None:
            self._epochs.keep(run)

    def _note_skipped(self, where: str, result: Result) -> Result:
        """Count the samples left out by ``on_error``, and warn of the first whole batch or shard.

        Return the result, with an error if too many samples were left out or the user turns warnings into errors.
        """
        error = self._observer.skip(result.skipped, where, self._skipped)
        self._skipped += len(result.skipped)
        message = ""
        if result.batch is NOTHING:
            message = f"{where} was left out"
        elif result.lost_shards:
            message = f"{where}: shard {', '.join(map(str, result.lost_shards))} was left out, those after it moved up"
        if message and error is None and result.error is None:
            try:
                text = f"{message}: no sample of it could be read (shown once; see loader.skipped)"
                self._observer.notices.warn("left out", text)
            except Warning as raised:
                error = raised
        return result if error is None or result.error is not None else replace(result, batch=None, error=error)


exclude_from_compilation(EpochIterator.__next__, EpochIterator.__del__)
