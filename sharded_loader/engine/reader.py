"""Reads one batch: samples from the dataset, then batchify. The same code in every pool.

    Task -> Reader.read -> Result (NumPy arrays and tensors, or the error with notes that say where)

    Bulk or OneByOne   how a shard is read, chosen when the reader is made
    ErrorPolicy        what becomes of samples that cannot be read: ``on_error``
    BatchScope         where the reader is at every moment: `sample_rng()` and the notes of an error look there

`Bulk` is for datasets that read many samples at once: as a finished batch (``get_batch``, columns: see `data.bulk`;
with the default batchify, or one that has ``bulk_of``, as the drop-in's), then by ``__getitems__(indices)``. The user's
``batchify_fn`` gets what ``__getitems__`` returns as it is. If a bulk read raises, the samples are read one by one, to
name the one that fails. While ``batchify_fn`` or ``get_batch`` runs, `sharded_loader.empty` gives the user's code
memory of the same kind.

All samples that are read alone pass the loops of `OneByOne.samples`, which do nothing for a sample but read it. What
fails, fails in the user's code, and is caught in one place. The main process looks at the board, over a dead worker.

What is measured of a batch beside its seconds, and of which batches, is decided by its `Timing`. A reader
keeps nothing of a batch that was read, so several threads may use one. Nothing here imports torch.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.base import errors, host_clock
from sharded_loader.base.interrupts import is_from_outside, pass_on
from sharded_loader.base.notices import RETRIES
from sharded_loader.base.system import core_seconds
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import ASYNC, BatchifyError, Empty, assembler, refuse_async
from sharded_loader.data.bulk import NOT_IN_BULK, Awaited, as_bulk, as_items, is_awaited, listed, takes_arrays
from sharded_loader.data.seeding import set_epoch_of
from sharded_loader.engine.board import IN_BATCHIFY, IN_BULK, ONE_BY_ONE, SAMPLE, SHARD, UNUSED, Board
from sharded_loader.engine.messages import NOTHING, BatchTimes, Job, PartPoint, Result, Task
from sharded_loader.randomness.rng import NO_SAMPLE, OF_BATCH, OfBatch, SampleScope, philox, reading


class BatchScope(SampleScope):
    """One task while it is read.

    Attributes:
        task, worker, empty, board: what `Reader.read` was given.
        misfit: positions of the sample that ``batchify_fn`` cannot use, or of two that do not fit together.
        skipped: the index and the error of each sample that was left out or replaced.
        dropped: how many samples were left out and not replaced.
        lost: the shards that have no sample left.
        batch, samples, error, point: see `Result`.
        notes: each sample is noted on the board before it is read.
        is_timed: each sample that is read alone is timed, and noted too.
        began: when the batch began.
        measure: `core_seconds` when the batch began; None: not measured.
        is_alone: its samples are read one by one.
        collating: seconds in ``batchify_fn``.
        stamps: when each sample of the shard began, if samples are timed.
        durations: seconds of each sample, if samples are timed.
    """

    task: Task
    worker: str | None
    empty: Empty
    board: Board
    misfit: tuple[int, ...] = ()
    skipped: tuple[tuple[Any, BaseException], ...] = ()
    lost: tuple[int, ...] = ()
    durations: Sequence[float] = ()
    dropped = samples = 0
    batch: Any = NOTHING
    error: BaseException | None = None
    point: PartPoint | None = None
    notes = is_timed = is_alone = False
    measure: tuple[float, float] | None = None
    began = collating = 0.0
    stamps: Sequence[float] = ()

    def set_index(self, index: object) -> None:
        """The samples are not read one by one from here on: `sample_rng()` goes by ``index``."""
        self.items, self.index, self.drawn = None, index, None

    @property
    def of_batch(self) -> OfBatch:
        """What ``batchify_fn`` is keyed by now."""
        return OfBatch(self.task.key, self.board[SHARD])

    def watched(self, items: Iterator[object], first: int = 0) -> Iterator[Any]:
        """The items, from place ``first`` on: each is noted on the board, and timed if that is wanted. No call each.

        A sample that cannot be read takes the time until the next one begins.
        """
        watchers: list[Any] = [map(partial(operator.setitem, self.board, SAMPLE), count(first))]
        if self.is_timed:
            self.stamps = stamps = list(self.stamps[:first])
            watchers.append(map(stamps.append, iter(host_clock.now, None)))
        return map(operator.itemgetter(0), zip(items, *watchers))  # noqa: B905 - these have no end

    def timed(self, samples: int) -> None:
        """The first ``samples`` of those that are timed have been read."""
        begins = self.stamps[:samples]
        self.durations = [*self.durations, *map(operator.sub, [*begins[1:], host_clock.now()], begins)]

    def passes(self, error: BaseException) -> bool:
        """Whether an exception is no error of the batch, but is meant for the loop that reads in its own thread."""
        return self.worker is None and is_from_outside(error, reads=True)

    def noted(self, error: BaseException) -> Exception:
        """The exception as the error of the batch, with notes that say where the reader is."""
        task, indices, board = self.task, self.indices, self.board
        error = errors.as_exception(error, "by the dataset or collate_fn")
        place = errors.Location(task.epoch, task.seq, board[SHARD] if task.sharded else None, self.worker)
        places = self.misfit if self.items is None else (self.place,)
        found = [indices[place] for place in places if len(indices)]
        if len(found) == 2:
            place.note(error, misfit=(found[0], found[1]))
        else:
            place.note(error, found or None, samples=indices)
        errors.shorten(error)
        return error


class Reader:
    """Makes batches of one job, one after the other.

    Args:
        job: dataset, batchify function, seed, what to do about bad samples.
        tells_epoch: call the dataset's ``set_epoch`` when a task's epoch differs from the last one's (where
            the dataset is this reader's own).
        in_bulk: read several samples at once where the dataset and the job can.

    Attributes:
        timing: what measures its batches.
    """

    def __init__(self, job: Job, *, tells_epoch: bool = False, in_bulk: bool = True) -> None:
        self._job = job
        self._policy = ErrorPolicy(job)
        self._way = _way_of(job, self._policy, in_bulk and job.in_bulk)
        self._set_epoch: Any = set_epoch_of(job.dataset) if tells_epoch else None
        self._epoch: int | None = None
        self.timing = Timing()

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
        at, timing, tried, before = BatchScope(self._job.seed, task.epoch), self.timing, len(RETRIES), reading.get()
        at.task, at.worker, at.empty, at.board = task, worker, empty, list(UNUSED) if board is None else board
        at.notes, at.indices = self._job.notes_samples or task.careful, task.shards[0]
        timing.batches += 1
        at.is_timed, at.measure = timing.spare <= 0, core_seconds() if timing.batches > timing.next else None
        at.began = host_clock.now()
        try:
            reading.set(at)
            if self._set_epoch is not None and task.epoch != self._epoch:
                self._tell_epoch(task.epoch)
            if batches := self._make_batches(at):
                at.batch = batches if task.sharded else batches[0]
                at.samples = sum(map(len, task.shards)) - at.dropped
        except BaseException as raised:
            if at.passes(raised):
                raise
            at.lost, at.error = (), at.noted(raised)
        finally:
            reading.set(before)
        seconds, times = host_clock.now() - at.began, None
        if at.measure is not None or at.durations or seconds > MEASURED_SECONDS or len(RETRIES) > tried:
            times = timing.times(at, seconds, number, len(RETRIES) - tried)
        if number >= 0:
            timing.free[number] = at.began + seconds
        rest = seconds, at.point, 0, at.began, number, False, times
        try:
            return Result(task.run, task.seq, at.batch, at.samples, at.error, at.skipped, at.lost, *rest)
        finally:
            at.error = None  # otherwise error -> traceback -> frame -> scope -> error, and all wait for the collector

    def read_sample(self, index: object, epoch: int) -> Any:
        """One sample, with its generator; exceptions pass as they are."""
        scope, before = SampleScope(self._job.seed, epoch, index), reading.get()
        try:
            reading.set(scope)
            sample = self._way.dataset[index]
            refuse_async([sample], "dataset[index]")
            return sample
        finally:
            reading.set(before)

    def probe(self, task: Task, board: Board) -> None:
        """Read each sample of a task alone and drop it, if the dataset reads several at once.

        For a task over which a worker has died then: the next one that dies has noted at which sample. The caller
        seeds the global generators afterwards.
        """
        if isinstance(self._way, Bulk):
            for number, indices in enumerate(task.shards):
                for ordinal, index in enumerate(plain_indices(indices)):
                    board[SHARD], board[SAMPLE] = number, ordinal
                    self.read(replace(task, shards=([index],), sharded=False), "a worker")  # errors come again later

    def _tell_epoch(self, epoch: int) -> None:
        try:
            self._set_epoch(epoch)
        except BaseException as error:
            errors.add_note(error, f"raised by dataset.set_epoch({epoch})")
            raise
        self._epoch = epoch

    def _make_batches(self, at: BatchScope) -> list[Any]:
        """The batches of all shards; none where `ErrorPolicy` leaves none."""
        way, numbers, batches = self._way, range(len(at.task.shards)), []
        if self._policy.raises:
            for number in numbers:
                batches.append(way.fetch(number, at))
            return batches
        if isinstance(way, Bulk):
            try:
                batches = [way.at_once(number, at) for number in numbers]
                if not any(batch is NOT_IN_BULK for batch in batches):
                    return batches
            except BaseException as error:
                if at.passes(error):
                    raise
        # If the bulk read failed, this is the second time, with the same random numbers.
        return self._collated([(way.samples(number, at), at.indices) for number in numbers], at)

    def _collated(self, shards: list[tuple[list[Any], Any]], at: BatchScope) -> list[Any]:
        """The batches of shards that have been read: the samples and the indices of each.

        Every sample is read before any bad one is replaced or left out: a replacement may come from any shard.
        """
        batches = []
        for number, indices, samples in self._policy.kept(shards, at):
            at.board[SHARD], at.indices = number, indices
            batches.append(self._way.collate(samples, at))
        return batches


# -- one shard: samples, then a batch ----------------------------------------------------------------------------------


def _way_of(job: Job, policy: ErrorPolicy, in_bulk: bool) -> OneByOne:
    if in_bulk:
        fn = job.batchify_fn
        # Of its class: a mock has every attribute.
        bulk_of: Any = as_bulk if fn is None else hasattr(type(fn), "bulk_of") and getattr(fn, "bulk_of")  # noqa: B009
        bulk = Bulk(job, policy, bulk_of(job.dataset) if bulk_of else None, as_items(job.dataset))
        if bulk.gather is not None or bulk.get_items is not None:
            return bulk
    return OneByOne(job, policy)


class OneByOne:
    """Reads a shard as any dataset can be read: ``dataset[index]`` of each sample.

    Attributes:
        dataset: gives the samples.
    """

    def __init__(self, job: Job, policy: ErrorPolicy) -> None:
        self.dataset = Awaited(job.dataset) if is_awaited(job.dataset) else job.dataset
        self._policy = policy
        self._assemble = assembler(default_batchify_fn if job.batchify_fn is None else job.batchify_fn)

    def fetch(self, number: int, at: BatchScope) -> Any:
        """The batch of shard ``number``."""
        return self.collate(self.samples(number, at), at)

    def samples(self, number: int, at: BatchScope) -> list[Any]:
        """The samples of shard ``number``; where one could not be read, what the policy puts in its place.

        Measured (256 images of 3 KB, warm): 36 us; 85 with an index, a place and a generator noted for each sample.
        """
        dataset, given = self.dataset, at.task.shards[number]
        at.indices = indices = given.tolist() if isinstance(given, np.ndarray) else given  # `plain_indices`, here
        items, at.drawn, at.is_alone = iter(indices), None, at.measure is not None
        at.items = items
        at.board[SHARD], at.board[SAMPLE] = number, ONE_BY_ONE
        items = at.watched(items) if at.notes or at.is_timed else items
        samples: list[Any] = [dataset[index] for index in items] if self._policy.raises else []
        while not self._policy.raises:
            try:
                for index in items:
                    samples.append(dataset[index])
                break
            except Exception as error:
                if at.passes(error):
                    raise
                samples.append(self._policy.in_place_of(index, error, at))
        if at.is_timed:
            at.timed(len(samples))
        return samples

    def collate(self, samples: Any, at: BatchScope) -> Any:
        """The batch of ``samples``: a list, or what ``__getitems__`` has returned."""
        at.board[SAMPLE] = IN_BATCHIFY
        at.items, at.index, at.drawn, at.misfit = None, OF_BATCH, None, ()  # `set_index`, without a call
        began = 0.0 if at.measure is None else host_clock.now()
        is_list = type(samples) is list
        try:
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
        tried = chain.from_iterable(((position,), (0, position)) for position in range(len(samples)))
        return next((positions for positions in tried if not self._fits(samples, positions, at)), ())

    def _fits(self, samples: list[Any], positions: Sequence[int], at: BatchScope) -> bool:
        indices = at.indices
        try:
            if hasattr(indices, "taken"):  # rows: each sample is there once
                at.indices = indices.taken(positions := sorted({*positions}))
            self._assemble([samples[position] for position in positions], np.empty)
        except Exception as error:  # perhaps of a function of the user's that wants whole batches
            pass_on(error)
            return not isinstance(error, BatchifyError)
        finally:
            at.indices = indices
        return True


class Bulk(OneByOne):
    """Reads the samples of a shard at once where the dataset can, and one by one where it cannot.

    Args:
        job, policy: see `Reader`.
        gather: gives finished batches, see `as_bulk`; None: there is no such way.
        get_items: gives the samples, see `as_items`; None: there is no such way.
    """

    def __init__(self, job: Job, policy: ErrorPolicy, gather: Any, get_items: Any) -> None:
        super().__init__(job, policy)
        self.gather, self.get_items = gather, get_items
        self._takes_arrays = gather is not None and takes_arrays(job.dataset)
        # A function of the user's gets what ``__getitems__`` returns, as in torch: also one object of the whole batch.
        self._passes_on = not hasattr(job.batchify_fn or default_batchify_fn, "assemble")

    def fetch(self, number: int, at: BatchScope) -> Any:
        """The batch of shard ``number``."""
        failed: BaseException | None = None
        try:
            batch = self.at_once(number, at)
            if batch is not NOT_IN_BULK:
                return batch
        except BaseException as error:
            if at.board[SAMPLE] != IN_BULK or at.passes(error):  # not of the samples, but of the batch; or of neither
                raise
            failed = error
        try:
            # Here, not above: its error would be told with this one, which is the same.
            samples = self.samples(number, at)  # raises the error of the sample that is to blame, if it is one
            if failed is None:
                return self.collate(samples, at)
            at.set_index(NO_SAMPLE)
            at.board[SAMPLE] = IN_BULK
            raise failed
        finally:
            failed = None  # otherwise error -> traceback -> this frame -> error

    def at_once(self, number: int, at: BatchScope) -> Any:
        """The batch of shard ``number``, read at once; `NOT_IN_BULK` if its samples have to be read one by one."""
        given = at.task.shards[number]
        at.indices = indices = given if self._takes_arrays else plain_indices(given)
        at.board[SHARD], at.board[SAMPLE] = number, IN_BULK
        at.items, at.index, at.drawn = None, NO_SAMPLE, None  # `set_index`, without a call
        if self.gather is not None:
            batch = self.gather(indices, at.empty)
            if type(batch) in ASYNC:
                refuse_async([batch], "dataset.get_batch")
            if batch is not NOT_IN_BULK:
                return batch
        if self.get_items is None:
            return NOT_IN_BULK
        if self._takes_arrays:
            at.indices = indices = plain_indices(given)
        samples = self.get_items(indices)
        refuse_async([samples], "dataset.__getitems__")
        return self.collate(samples if self._passes_on else listed(samples, len(indices)), at)


# -- samples that cannot be read ---------------------------------------------------------------------------------------


class Bad(NamedTuple):
    """Stands in for a sample that could not be read: its index and its error."""

    skipped: tuple[Any, BaseException]


_KEPT = (
    "sharded_loader: no sample of its batch or shard could be read, and with num_replicas none is left out, as all "
    'ranks take the same steps with the same shards: on_error="replace" fills a shard from the others of the batch'
)


class ErrorPolicy:
    """What becomes of samples that cannot be read: raise, skip, replace, or the user's ``on_error``.

    Attributes:
        raises: the first error is that of the batch.
    """

    def __init__(self, job: Job) -> None:
        self._job, self.raises = job, job.on_error == "raise"

    def in_place_of(self, index: object, error: Exception, at: BatchScope) -> Any:
        """What stands in for a sample that could not be read: what the user's ``on_error`` returns, or `Bad`."""
        on_error, task = self._job.on_error, at.task
        failed, shard = at.noted(error), at.board[SHARD] if task.sharded else None
        found = on_error(errors.SampleError(index, task.epoch, task.seq, shard, failed)) if callable(on_error) else None
        at.skipped += ((index, errors.without_frames(failed)),)
        return found if callable(on_error) else Bad(at.skipped[-1])

    def kept(self, shards: list[tuple[list[Any], Any]], at: BatchScope) -> Iterator[tuple[int, Any, list[Any]]]:
        """What batches are made of, without the bad samples: number, indices and samples of each shard that is left.

        Nothing, if a shard without a good sample is the error of the batch.
        """
        if not at.skipped:
            yield from ((number, indices, samples) for number, (samples, indices) in enumerate(shards))
            return
        job, task = self._job, at.task
        good = [pair for shard in shards for pair in zip(*shard, strict=True) if type(pair[0]) is not Bad]
        replaces = job.on_error == "replace" and bool(good)
        lost = next((its[-1].skipped for its, _ in shards if its and all(type(one) is Bad for one in its)), None)
        if lost is not None and job.keep_batch and not replaces:
            # The error is raised, so it is not skipped: `loader.skipped` would keep its frames, and so the iterator.
            at.skipped, at.error = tuple(one for one in at.skipped if one is not lost), lost[1]
            errors.set_notes(lost[1], [_KEPT, *errors.notes_of(lost[1])])
            return
        for number, (samples, indices) in enumerate(shards):
            if replaces and not hasattr(indices, "taken"):  # a row has no room for another document
                indices = list(indices)
                for place in (place for place, sample in enumerate(samples) if type(sample) is Bad):
                    rng = philox(job.seed, "replace", task.epoch, task.key, number, place)
                    samples[place], indices[place] = good[int(rng.integers(len(good)))]
            places = [place for place, sample in enumerate(samples) if type(sample) is not Bad]
            at.dropped += len(samples) - len(places)
            if places or not samples:  # a batch may be empty from the start
                yield number, taken(indices, places), [samples[place] for place in places]
            else:
                at.lost += (number,)


def plain_indices(indices: object) -> Any:
    """Indices as datasets and users see them: of an array, Python ints."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def taken(indices: Any, places: Sequence[int]) -> Any:
    """Those at some places; of samples that lie side by side in rows, with their rows."""
    return indices.taken(places) if hasattr(indices, "taken") else [indices[place] for place in places]


# -- what is measured --------------------------------------------------------------------------------------------------

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
        batches: batches that were begun; the reader counts them.
        next: the last batch that is not measured.
        spare: seconds by which samples that were read alone were below `SAMPLE_SECONDS`; above 0 none is timed.
        free: of each worker that uses the reader, when it was done with its last batch.
    """

    def __init__(self) -> None:
        self.free: dict[int, float] = {}
        self._core: dict[int, tuple[float, float]] = {}  # `core_seconds` after the last batch that was measured
        self.batches = self.next = self._counted = 0  # the last: what is in the sums
        self.spare = self._seconds = 0.0
        # The epoch of the slowest samples, the seconds of the least of them, and of each.
        self._slow_epoch, self._least, self._slow = -1, SAMPLE_SECONDS, list[float]()

    def times(self, at: BatchScope, seconds: float, worker: int, retries: int) -> BatchTimes | None:
        """What was measured of a batch that took so long; None: nothing. Learns what to measure from now on."""
        is_slow = seconds > MEASURED_SECONDS or (at.durations and max(at.durations) > self._least)
        if at.measure is None and not is_slow and not retries:
            return None
        weight, processor, queued = 1 if at.measure is None else max(1, self.batches - self._counted), -1.0, 0.0
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
        self.next = self.batches + left_out
        if at.is_alone:
            # With waits for a core: on a busy machine they may seem to be all of it. Needless times cost little.
            self.spare += weight * (SAMPLE_SECONDS * at.samples - max(0.0, seconds - at.collating))
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
