"""Reads one batch: samples from the dataset, then batchify. The same code in every pool.

    Task -> Reader.read -> Result (NumPy arrays and tensors, or the error with notes that say where)

In bulk where the dataset can: as a finished batch (``get_batch``, columns: see `data.bulk`; with the default
batchify, or one that has ``bulk_of``, as the drop-in's), then ``__getitems__(indices)``, then one ``__getitem__`` per
sample. The user's ``batchify_fn`` gets what ``__getitems__`` returns as it is. If a bulk read raises, the samples are
read one by one, to name the one that fails. The batch is put together in memory from the caller's ``empty``. While
``batchify_fn`` or ``get_batch`` runs, `sharded_loader.empty` gives the user's code memory of the same kind.

A `BatchScope` says at every moment where the reader is: `sample_rng()` and the notes of an error look there. The main
process looks at the board, over a dead worker. All samples that are read alone pass the loops of `_read_one_by_one`,
which do nothing for a sample but read it. What fails, fails in the user's code, and is caught in `Reader.read`.

A reader keeps nothing of a batch that was read, so several threads may use one. Nothing here imports torch.

It notes when a batch began and how long it took, and of some batches more (`messages.BatchTimes`): of the first one, of
one in `MEASURED_SECONDS` of work, of those that take longer, and of those whose requests were tried again. Samples are
timed where one takes `SAMPLE_SECONDS` on average. If two threads write what a reader knows of the batches so far, an
update may be lost: it decides on no batch.

`reading_in(frame)` tells from outside what a thread reads.
"""

from __future__ import annotations

import heapq
import operator
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np

from sharded_loader.base import host_clock
from sharded_loader.base.errors import (
    Location,
    SampleError,
    add_note,
    as_exception,
    notes_of,
    set_notes,
    shorten,
    without_frames,
)
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.notices import RETRIES
from sharded_loader.base.system import core_seconds
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.pack import Packed
from sharded_loader.batching.protocol import ASYNC, BatchifyError, Empty, assembler, refuse_async
from sharded_loader.data.awaiting import Awaited, is_awaited
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk, as_items, listed, takes_arrays
from sharded_loader.data.inspection import set_epoch_of
from sharded_loader.engine.board import IN_BATCHIFY, IN_BULK, ONE_BY_ONE, SAMPLE, SHARD, UNUSED, Board, phase
from sharded_loader.engine.messages import NOTHING, BatchTimes, Job, PartPoint, Result, Task
from sharded_loader.randomness.rng import NO_SAMPLE, OfBatch, SampleScope, philox, reading

MEASURED_SECONDS = 2e-2
"""Of work that is measured once. To measure a batch takes 40 us, and 200 us where other processes have the caches: that
is 0.2 to 1 %. Of batches of 40 us (`tiny`) it is one in 500, of 400 us (`images`) one in 50. A batch that takes 20 ms
is always measured. The clocks and counts of the other batches take 0.8 us, by the least of five runs with and
without them: 1 % of the 76 us of `tiny` in a worker."""

SAMPLE_SECONDS = 2e-5
"""To time a sample takes 0.1 us."""

KEPT_SAMPLES = 20
"""The slowest samples of an epoch that a reader, and the loader, keep."""


class BatchScope(SampleScope):
    """One task while it is read.

    Attributes:
        task, worker, empty, board: what `Reader.read` was given.
        misfit: positions of the sample that ``batchify_fn`` cannot use, or of two that do not fit together.
        skipped: the index and the error of each sample that was left out or replaced.
        dropped: how many samples were left out and not replaced.
        lost: the shards that have no sample left.
        point: see `Result`.
        measure: `core_seconds` when the batch began; None: not measured.
        is_alone: its samples are read one by one.
        collating: seconds in ``batchify_fn``.
        durations: seconds of each sample, if samples are timed.
    """

    task: Task
    worker: str | None
    empty: Empty
    board: Board
    misfit: tuple[int, ...] = ()
    skipped: list[tuple[Any, BaseException]]
    dropped = 0
    lost: list[int]
    point: PartPoint | None = None
    measure: tuple[float, float] | None = None
    is_alone = False
    collating = 0.0
    durations: Sequence[float] = ()

    def set_index(self, index: Any) -> None:
        """The samples are not read one by one from here on: `sample_rng()` goes by ``index``."""
        self.items, self.index, self.drawn = None, index, None

    def passes(self, error: BaseException) -> bool:
        """Whether an exception is no error of the batch, but is meant for the loop that reads in its own thread."""
        return self.worker is None and is_from_outside(error, reads=True)

    def noted(self, error: BaseException) -> Exception:
        """The exception as the error of the batch, with notes that say where the reader is."""
        task, indices, board = self.task, self.indices, self.board
        error = as_exception(error, "by the dataset or collate_fn")
        place = Location(task.epoch, task.seq, board[SHARD] if task.sharded else None, self.worker)
        places = self.misfit if self.items is None else (self.place,)
        found = [indices[place] for place in places if len(indices)]
        if len(found) == 2:
            place.note(error, misfit=(found[0], found[1]))
        else:
            place.note(error, found or None, samples=indices)
        shorten(error)
        return error


class Bad:
    """Stands in for a sample that could not be read: its index and its error."""

    def __init__(self, skipped: tuple[Any, BaseException]) -> None:
        self.skipped = skipped


_KEPT = (
    "sharded_loader: no sample of its batch or shard could be read, and with num_replicas none is left out, as all "
    'ranks take the same steps with the same shards: on_error="replace" fills a shard from the others of the batch'
)


class Reader:
    """Makes batches of one job, one after the other.

    Args:
        job: dataset, batchify function, seed, what to do about bad samples.
        tells_epoch: call the dataset's ``set_epoch`` when a task's epoch differs from the last one's (where
            the dataset is this reader's own).
        notes_samples: note each sample on the board before it is read, not only those of careful tasks.
        in_bulk: read several samples at once where the dataset and the job can.

    Attributes:
        free: of each worker that uses this reader, when it was done with its last batch.
    """

    def __init__(
        self, job: Job, *, tells_epoch: bool = False, notes_samples: bool = False, in_bulk: bool = True
    ) -> None:
        self._job = job
        self._dataset = job.dataset
        self._samples = Awaited(job.dataset) if is_awaited(job.dataset) else job.dataset
        self._assemble = assembler(default_batchify_fn if job.batchify_fn is None else job.batchify_fn)
        in_bulk = in_bulk and job.in_bulk
        self._gather = None
        if in_bulk:
            # Of its class: a mock has every attribute.
            of_batchify = hasattr(type(job.batchify_fn), "bulk_of") and getattr(job.batchify_fn, "bulk_of")  # noqa: B009
            if job.batchify_fn is None or of_batchify:
                self._gather = (of_batchify or as_bulk)(job.dataset)
        self._takes_arrays = self._gather is not None and takes_arrays(job.dataset)
        self._get_items = as_items(job.dataset) if in_bulk else None
        # A function of the user's gets what ``__getitems__`` returns, as in torch: also one object of the whole batch.
        self._passes_on = not hasattr(job.batchify_fn or default_batchify_fn, "assemble")
        self._tolerant = job.on_error != "raise"
        self._in_bulk = self._gather is not None or self._get_items is not None
        self._set_epoch: Any = set_epoch_of(job.dataset) if tells_epoch else None
        self._epoch: int | None = None
        self._notes_samples = notes_samples
        self.free: dict[int, float] = {}
        self._core: dict[int, tuple[float, float]] = {}  # `core_seconds` after the last batch that was measured
        self._batches = self._next = self._counted = 0  # that were read; the next to measure; what is in the sums
        self._seconds = self._lone_seconds = 0.0  # of batches, and of samples that were read alone
        self._lone, self._times_samples = 0, True
        self._slow_epoch, self._least = -1, SAMPLE_SECONDS
        self._slow: list[float] = []  # seconds of the slowest samples of this epoch

    def read(
        self,
        task: Task,
        worker: str | None = None,
        empty: Empty = np.empty,
        board: Board | None = None,
        number: int = -1,
    ) -> Result:
        """The batch that ``task`` asks for.

        Args:
            task: what to read.
            worker: how errors name who reads (``worker 2 (pid 4711)``); None in the caller's own thread.
            empty: gives the memory that the batch is put together in.
            board: where to note what is being read.
            number: of the worker; -1: the main process.

        Exceptions become part of the result. Only in the caller's own thread a KeyboardInterrupt passes, and what a
        signal handler raises (`sharded_loader.base.interrupts.is_from_outside`).
        """
        self._batches, tried = self._batches + 1, len(RETRIES)
        measure = core_seconds() if self._batches >= self._next else None
        began = host_clock.now()
        at = BatchScope(self._job.seed, task.epoch)
        at.task, at.worker, at.empty, at.board = task, worker, empty, list(UNUSED) if board is None else board
        at.skipped, at.lost = [], []
        at.measure = measure
        batches: list[Any] = []
        error: BaseException | None = None
        batch: Any = NOTHING
        count = 0
        before = reading.get()
        try:
            reading.set(at)
            at.indices = task.shards[0]
            if self._set_epoch is not None and task.epoch != self._epoch:
                self._tell_epoch(task.epoch)
            batches, error = self._make_batches(at)
        except BaseException as raised:
            if at.passes(raised):
                raise
            batches, at.lost, error = [], [], at.noted(raised)
        finally:
            reading.set(before)
        if batches:
            batch, count = batches if task.sharded else batches[0], sum(map(len, task.shards)) - at.dropped
        ended = host_clock.now()
        seconds, times = ended - began, None
        is_slow = at.durations and max(at.durations) > self._least
        if measure is not None or is_slow or seconds > MEASURED_SECONDS or len(RETRIES) > tried:
            times = self._times(at, count, began, seconds, number, len(RETRIES) - tried)
        if number >= 0:
            self.free[number] = ended
        try:
            numbers = tuple(at.skipped), tuple(at.lost), seconds, at.point, 0, began, number, False, times
            return Result(task.run, task.seq, batch, count, error, *numbers)
        finally:
            del error  # otherwise error -> traceback -> this frame -> error, and each frame waits for the collector

    def _times(
        self, at: BatchScope, samples: int, began: float, seconds: float, worker: int, retries: int
    ) -> BatchTimes:
        """What was measured of a batch; learn from it what to measure.

        Args:
            at: the batch.
            samples: how many are in it.
            began, seconds, worker, retries: see `Result` and `BatchTimes`.
        """
        weight, processor, queued = 1 if at.measure is None else max(1, self._batches - self._counted), -1.0, 0.0
        if at.measure is not None or seconds > MEASURED_SECONDS:
            core = core_seconds()
            # Of one that was not to be measured, the last batches before it are cheap beside it.
            before, self._core[worker] = at.measure or self._core.get(worker, core), core
            queued = min(seconds, core[1] - before[1])
            processor = min(seconds - queued, core[0] - before[0])
        used = seconds - queued
        self._counted += weight
        self._seconds += weight * used
        # At most as many are left out as were counted, or 16: one odd measurement must not decide for long.
        left_out = min(max(16, self._counted), int(MEASURED_SECONDS * self._counted / max(self._seconds, 1e-6)))
        self._next = self._batches + 1 + left_out
        if at.is_alone:
            self._lone += weight * samples
            # With waits for a core: on a busy machine they may seem to be all of it. Needless times cost little.
            self._lone_seconds += weight * max(0.0, seconds - at.collating)
            self._times_samples = self._lone_seconds >= SAMPLE_SECONDS * self._lone
        free = began if worker < 0 else self.free.get(worker)  # between two batches, the main process does not idle
        idle = 0.0 if free is None else max(0.0, began - free)
        measured = {"idle": idle, "processor": processor, "queued": queued, "collate": at.collating, "weight": weight}
        return BatchTimes(**measured, retries=retries, is_first=free is None, slow=self._slowest(at))

    def _slowest(self, at: BatchScope) -> tuple[tuple[int, float], ...]:
        """The place and the seconds of those samples of a batch that are among the slowest of the epoch."""
        if at.task.epoch != self._slow_epoch:
            self._slow_epoch, self._slow, self._least = at.task.epoch, [], SAMPLE_SECONDS
        found = [(place, seconds) for place, seconds in enumerate(at.durations) if seconds > self._least]
        found = heapq.nlargest(KEPT_SAMPLES, found, key=operator.itemgetter(1))
        self._slow = sorted([*self._slow, *[seconds for _, seconds in found]])[-KEPT_SAMPLES:]
        if len(self._slow) == KEPT_SAMPLES:
            self._least = self._slow[0]
        return tuple(found)

    def read_sample(self, index: Any, epoch: int) -> Any:
        """One sample, with its generator; exceptions pass as they are."""
        scope, before = self._scope(epoch), reading.get()
        try:
            reading.set(scope)
            scope.index = index
            sample = self._samples[index]
            refuse_async([sample], "dataset[index]")
            return sample
        finally:
            reading.set(before)

    def _scope(self, epoch: int) -> SampleScope:
        return SampleScope(self._job.seed, epoch)

    def probe(self, task: Task, board: Board) -> None:
        """Read each sample of a task alone and drop it, if the dataset reads several at once.

        For a task over which a worker has died then: the next one that dies has noted at which sample. The caller
        seeds the global generators afterwards.
        """
        if self._in_bulk:
            for number, indices in enumerate(task.shards):
                for ordinal, index in enumerate(plain_indices(indices)):
                    board[SHARD], board[SAMPLE] = number, ordinal
                    self.read(task._replace(shards=([index],), sharded=False), "a worker")  # errors come again later

    def _tell_epoch(self, epoch: int) -> None:
        try:
            self._set_epoch(epoch)
        except BaseException as error:
            add_note(error, f"raised by dataset.set_epoch({epoch})")
            raise
        self._epoch = epoch

    def _make_batches(self, at: BatchScope) -> tuple[list[Any], BaseException | None]:
        """The batches of all shards; with ``on_error``, perhaps the error to raise instead."""
        if self._tolerant:
            return self._read_tolerantly(at)
        batches = []
        for number in range(len(at.task.shards)):
            made = self._read_in_bulk(number, at) if self._in_bulk else NOT_IN_BULK
            if made is NOT_IN_BULK:
                made = self._make_batch(self._read_one_by_one(number, at), at)
            batches.append(made)
        return batches, None

    # -- one shard: samples, then a batch -------------------------------------------------------------------

    def _read_in_bulk(self, number: int, at: BatchScope) -> Any:
        """The batch of a shard whose samples are read at once; `NOT_IN_BULK` if they have to be read one by one."""
        given = at.task.shards[number]
        at.indices = indices = given if self._takes_arrays else plain_indices(given)
        at.board[SHARD], at.board[SAMPLE] = number, IN_BULK
        at.set_index(NO_SAMPLE)
        try:
            if self._gather is not None:
                batch = self._gather(indices, at.empty)
                if type(batch) in ASYNC:
                    refuse_async([batch], "dataset.get_batch")
                if batch is not NOT_IN_BULK:
                    return batch
            if self._get_items is None:
                return NOT_IN_BULK
            at.indices = indices = plain_indices(indices)
            found: Any = self._get_items(indices)
            refuse_async([found], "dataset.__getitems__")
            samples = found if self._passes_on else listed(found)
            if not self._passes_on and len(samples) != len(indices):
                raise ValueError(
                    f"__getitems__ was asked for {len(indices)} samples and returned {len(samples)}: "
                    f"return one sample per index, in the order of the indices"
                )
        except BaseException as error:
            if self._tolerant or at.passes(error):
                raise
            failed: BaseException | None = error
        else:
            return self._make_batch(samples, at)
        try:
            # Here, not above: its error would be told with this one, which is the same.
            self._read_one_by_one(number, at)  # raises the error of the sample that is to blame, if it is one
            at.set_index(NO_SAMPLE)
            at.board[SAMPLE] = IN_BULK
            assert failed is not None  # for mypy
            raise failed
        finally:
            failed = None  # otherwise error -> traceback -> this frame -> error

    def _read_one_by_one(self, number: int, at: BatchScope) -> list[Any]:
        """The samples of a shard; `Bad` where one could not be read, if that is no error of the batch.

        Measured (256 images of 3 KB, warm): 36 us; 85 with an index, a place and a generator noted for each sample.
        """
        board, dataset = at.board, self._samples
        at.indices = indices = plain_indices(at.task.shards[number])
        at.items = items = iter(indices)
        at.drawn = None
        board[SHARD], board[SAMPLE] = number, ONE_BY_ONE
        notes, stamps = self._notes_samples or at.task.careful, [host_clock.now()] if self._times_samples else []
        if at.measure is not None:
            at.is_alone = True
        samples: list[Any] = []
        if not (notes or self._tolerant or stamps):
            return [dataset[index] for index in items]
        while True:
            try:
                for index in items:
                    if notes or stamps:
                        board[SAMPLE] = len(samples)
                    samples.append(dataset[index])
                    if stamps:
                        stamps.append(host_clock.now())
                break
            except Exception as error:
                if not self._tolerant or at.passes(error):
                    raise
                samples.append(self._in_place_of(index, error, at))
                stamps += stamps[-1:]  # it is over, but has not been read
        if stamps:
            at.durations = [*at.durations, *map(operator.sub, stamps[1:], stamps)]
        return samples

    def _make_batch(self, samples: Any, at: BatchScope) -> Any:
        at.board[SAMPLE] = IN_BATCHIFY
        task = at.task
        at.set_index(OfBatch(task.seq if task.part is None else task.key, at.board[SHARD]))
        at.misfit = ()
        began = 0.0 if at.measure is None else host_clock.now()
        try:
            is_list = type(samples) is list
            if is_list and samples and type(samples[0]) in ASYNC:
                refuse_async(samples, "dataset[index]")
            batch = self._assemble(list(samples) if is_list else samples, at.empty)  # a list that it may change
            if type(batch) in ASYNC:
                refuse_async([batch], "collate_fn")
            if began:
                at.collating += host_clock.now() - began
            return batch
        except BatchifyError:
            at.misfit = self._misfit(samples, at) if is_list else ()
            raise

    def _misfit(self, samples: list[Any], at: BatchScope) -> tuple[int, ...]:
        """The first sample that cannot be in a batch, or in none with the first sample; nothing if none is such."""
        for position in range(len(samples)):
            if not self._fits(samples, [position], at):
                return (position,)
            if not self._fits(samples, [0, position], at):
                return 0, position
        return ()

    def _fits(self, samples: list[Any], positions: list[int], at: BatchScope) -> bool:
        indices = at.indices
        try:
            if isinstance(indices, Packed):
                at.indices = indices.taken(positions := sorted({*positions}))
            self._assemble([samples[position] for position in positions], np.empty)
        except BatchifyError:
            return False
        except Exception as error:  # a function of the user's that wants whole batches
            if is_from_outside(error):
                raise
        finally:
            at.indices = indices
        return True

    # -- on_error other than "raise" ------------------------------------------------------------------------

    def _read_tolerantly(self, at: BatchScope) -> tuple[list[Any], BaseException | None]:
        """The batches of all shards; or the error, if a shard without a good sample is one.

        Every sample is read before any bad one is replaced or left out: a replacement may come from any shard.
        """
        task = at.task
        if self._in_bulk:
            try:
                batches = [self._read_in_bulk(number, at) for number in range(len(task.shards))]
                if not any(batch is NOT_IN_BULK for batch in batches):
                    return batches, None
            except BaseException as error:
                if at.passes(error):
                    raise
        # If the bulk read failed, this is the second time, with the same random numbers.
        shards: list[list[tuple[Any, Any]]] = []
        for number in range(len(task.shards)):
            samples = self._read_one_by_one(number, at)
            shards.append(list(zip(at.indices, samples, strict=True)))
        return self._make_of_good(shards, at)

    def _make_of_good(
        self, shards: list[list[tuple[Any, Any]]], at: BatchScope
    ) -> tuple[list[Any], BaseException | None]:
        """The batches of shards that have been read, without the bad samples.

        Args:
            shards: of each, the indices and the samples, `Bad` where one could not be read.
            at: the reading.
        """
        job, task = self._job, at.task
        bad = (pairs[-1][1] for pairs in shards if pairs and all(type(sample) is Bad for _, sample in pairs))
        lost = next((sample.skipped for sample in bad), None)
        good = [pair for pairs in shards for pair in pairs if type(pair[1]) is not Bad]
        replaces = job.on_error == "replace" and bool(good)
        if lost is not None and job.keep_batch and not replaces:
            # The error is raised, so it is not skipped: `loader.skipped` would keep its frames, and so the iterator.
            at.skipped = [one for one in at.skipped if one is not lost]
            set_notes(lost[1], [_KEPT, *notes_of(lost[1])])
            return [], lost[1]
        batches = []
        for number, pairs in enumerate(shards):
            given = task.shards[number]
            if replaces and not isinstance(given, Packed):  # a row has no room for another document
                for i, (_, sample) in enumerate(pairs):
                    if type(sample) is Bad:
                        rng = philox(job.seed, "replace", task.epoch, task.key, number, i)
                        pairs[i] = good[int(rng.integers(len(good)))]
            kept = [pair for pair in pairs if type(pair[1]) is not Bad]
            at.dropped += len(pairs) - len(kept)
            if kept or not pairs:  # a batch may be empty from the start
                at.board[SHARD] = number
                at.indices = [index for index, _ in kept]
                if isinstance(given, Packed):
                    at.indices = given.taken([i for i, (_, sample) in enumerate(pairs) if type(sample) is not Bad])
                batches.append(self._make_batch([sample for _, sample in kept], at))
            else:
                at.lost.append(number)
        return batches, None

    def _in_place_of(self, index: Any, error: Exception, at: BatchScope) -> Any:
        """What stands in for a sample that could not be read: what the user's ``on_error`` returns, or `Bad`."""
        on_error, task = self._job.on_error, at.task
        failed = at.noted(error)
        sample: Any = None
        if callable(on_error):
            shard = at.board[SHARD] if task.sharded else None
            sample = on_error(SampleError(index, task.epoch, task.seq, shard, failed))
        at.skipped.append((index, without_frames(failed)))
        return sample if callable(on_error) else Bad(at.skipped[-1])


def reading_in(frame: FrameType | None) -> str:
    """What a thread reads, in words, by the frame that it is in; "": nothing. Reading itself notes nothing for this."""
    stamps: list[float] = []
    while frame is not None and frame.f_code is not Reader.read.__code__:
        if frame.f_code is Reader._read_one_by_one.__code__:
            stamps = frame.f_locals.get("stamps") or []
        frame = frame.f_back
    at = None if frame is None else frame.f_locals.get("at")
    if frame is None or at is None or not hasattr(at, "board"):  # it has just begun
        return ""
    task, place, now = at.task, at.place, host_clock.now()
    doing = f"reading sample {plain_indices(at.indices)[place]!r}" if place >= 0 else phase(at.board)
    took = f"which it began {now - frame.f_locals['began']:.0f} s ago"
    if stamps and place >= 0:
        took = f"for {now - stamps[-1]:.0f} s"
    shard = f", shard {at.board[SHARD]}" if task.sharded else ""
    return f"{doing} of epoch {task.epoch}, batch {task.seq}{shard}, {took}"


def plain_indices(indices: Any) -> Any:
    """Indices as datasets and users see them: of an array, Python ints."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices
