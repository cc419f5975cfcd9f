"""Read one batch: fetch its samples from the dataset, then collate them. Every pool uses this code.

    Task -> Reader.read -> Result       the batch, or the error with notes that name epoch, batch, shard, sample, worker

`OneByOne` fetches with ``dataset[index]``. `Bulk` fetches many samples at once: a finished batch from ``get_batch``
(see `data.bulk`; with the default batchify_fn, or one with ``bulk_of``), or samples from ``__getitems__(indices)``. If
a bulk read raises, the samples are read one by one to find the one to blame. `ErrorPolicy` applies ``on_error``.

`BatchScope` is the current position, for random numbers, error notes and `sharded_loader.empty`. The loops of
`OneByOne.samples` do nothing per sample but read it: the position follows from the iterator. If the worker dies, the
main process looks at its heartbeat instead.

`Timing` selects batches to measure. A reader keeps no batch, so threads may share it. It does not import torch.
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
from sharded_loader.data.seeding import epoch_setter
from sharded_loader.engine.heartbeat import IN_BATCHIFY, IN_BULK, ONE_BY_ONE, SAMPLE, SHARD, UNUSED, Heartbeat
from sharded_loader.engine.messages import NOTHING, BatchTimes, Job, PartPoint, Result, Task
from sharded_loader.randomness.rng import NO_SAMPLE, OF_BATCH, OfBatch, SampleScope, philox, reading


class BatchScope(SampleScope):
    """The task that is being read, and its outcome so far.

    Attributes:
        uncollatable: positions of the sample, or the two samples, that ``batchify_fn`` could not collate.
        skipped, dropped: samples left out or replaced, with their errors; number of those left out.
        lost: shards without any sample left.
        read: indices of the samples in each batch, if they differ from those of the task.
        records_samples, is_timed: record each sample in the heartbeat before it is read; and time it.
        cpu_before: `core_seconds` at the beginning; None: not measured.
        is_alone: samples are read one by one.
        collate_seconds: time in ``batchify_fn``.
        stamps, durations: if samples are timed, start stamps of the shard's samples; seconds of all.
    """

    task: Task
    worker: str | None
    empty: Empty
    heartbeat: Heartbeat
    uncollatable: tuple[int, ...] = ()
    skipped: tuple[tuple[Any, BaseException], ...] = ()
    lost: tuple[int, ...] = ()
    read: tuple[Any, ...] = ()
    durations: Sequence[float] = ()
    dropped = 0
    error: BaseException | None = None
    point: PartPoint | None = None
    records_samples = is_timed = is_alone = False
    cpu_before: tuple[float, float] | None = None
    began = collate_seconds = 0.0
    stamps: Sequence[float] = ()

    @property
    def of_batch(self) -> OfBatch:
        """Key of the random numbers of ``batchify_fn``."""
        return OfBatch(self.task.key, self.heartbeat[SHARD])

    def watch_items(self, items: Iterator[object], first: int = 0) -> Iterator[Any]:
        """Record, and perhaps time, each item from position ``first`` on, without a Python call per item.

        The time of a sample that fails lasts until the next one begins.
        """
        watchers: list[Any] = [map(partial(operator.setitem, self.heartbeat, SAMPLE), count(first))]
        if self.is_timed:
            self.stamps = stamps = list(self.stamps[:first])
            watchers.append(map(stamps.append, iter(host_clock.now, None)))
        return map(operator.itemgetter(0), zip(items, *watchers))  # noqa: B905 - these have no end

    def add_durations(self, samples: int) -> None:
        begins = self.stamps[:samples]
        self.durations = [*self.durations, *map(operator.sub, [*begins[1:], host_clock.now()], begins)]

    def is_for_caller(self, error: BaseException) -> bool:
        """Return True for an exception that is not the batch's, but meant for the loop that reads in its own thread."""
        return self.worker is None and is_from_outside(error, reads=True)

    def locate_error(self, error: BaseException) -> Exception:
        """Return the exception with notes that say where the reader is."""
        task, indices, heartbeat = self.task, self.indices, self.heartbeat
        error = errors.as_exception(error, "by the dataset or collate_fn")
        location = errors.Location(task.epoch, task.seq, heartbeat[SHARD] if task.sharded else None, self.worker)
        positions = self.uncollatable if self.items is None else (self.place,)
        suspects = [indices[position] for position in positions if len(indices)]
        if len(suspects) == 2:
            location.note(error, uncollatable=(suspects[0], suspects[1]))
        else:
            location.note(error, suspects or None, samples=indices)
        errors.shorten(error)
        return error


class Reader:
    """Reads the batches of one job.

    Args:
        sets_epoch: call the dataset's ``set_epoch`` when the epoch changes (if the reader owns the dataset).
        in_bulk: read several samples at once where the dataset and the job can.
    """

    def __init__(self, job: Job, *, sets_epoch: bool = False, in_bulk: bool = True) -> None:
        self._job = job
        self._policy = ErrorPolicy(job)
        self._fetcher = _make_fetcher(job, self._policy, in_bulk and job.in_bulk)
        self._set_epoch: Any = epoch_setter(job.dataset) if sets_epoch else None
        self._epoch: int | None = None
        self.timing = Timing()

    def read(
        self,
        task: Task,
        worker: str | None = None,
        empty: Empty = np.empty,
        heartbeat: Heartbeat | None = None,
        number: int = -1,
    ) -> Result:
        """Return the batch that ``task`` asks for; exceptions become part of the result.

        Args:
            worker: the worker in error messages (``worker 2 (pid 4711)``); None in the caller's own thread, where
                KeyboardInterrupt and errors of signal handlers pass (`base.interrupts.is_from_outside`).
            empty: allocates the memory that the batch is assembled in.
            heartbeat: records what is being read.
            number: of the worker; -1: the main process.
        """
        scope, timing, previous_scope = BatchScope(self._job.seed, task.epoch), self.timing, reading.get()
        scope.task, scope.worker, scope.empty, retries_before = task, worker, empty, len(RETRIES)
        scope.heartbeat = list(UNUSED) if heartbeat is None else heartbeat
        scope.records_samples, scope.indices = self._job.notes_samples or task.is_suspect, task.shards[0]
        timing.batches += 1
        scope.is_timed, scope.cpu_before = timing.spare <= 0, core_seconds() if timing.batches > timing.next else None
        batch: Any = NOTHING
        samples, scope.began = 0, host_clock.now()
        try:
            reading.set(scope)
            if self._set_epoch is not None and task.epoch != self._epoch:
                self._set_dataset_epoch(task.epoch)
            if batches := self._make_batches(scope):
                batch = batches if task.sharded else batches[0]
                samples = sum(map(len, task.shards)) - scope.dropped
        except BaseException as raised:
            if scope.is_for_caller(raised):
                raise
            scope.lost, scope.error = (), scope.locate_error(raised)
        finally:
            reading.set(previous_scope)
        seconds, times, retries = host_clock.now() - scope.began, None, len(RETRIES) - retries_before
        if scope.cpu_before is not None or scope.durations or seconds > MEASURED_SECONDS or retries:
            times = timing.times(scope, samples, seconds, number, retries)
        if number >= 0:
            timing.free[number] = scope.began + seconds
        rest = seconds, scope.point, 0, scope.began, number, False, times, scope.read
        try:
            return Result(task.run, task.seq, batch, samples, scope.error, scope.skipped, scope.lost, *rest)
        finally:
            scope.error = None  # breaks the cycle error -> traceback -> frame -> scope -> error

    def read_sample(self, index: object, epoch: int) -> Any:
        """Read one sample, with its own random generator. Exceptions pass unchanged."""
        scope, previous_scope = SampleScope(self._job.seed, epoch, index), reading.get()
        try:
            reading.set(scope)
            sample = self._fetcher.dataset[index]
            refuse_async([sample], "dataset[index]")
            return sample
        finally:
            reading.set(previous_scope)

    def probe(self, task: Task, heartbeat: Heartbeat) -> None:
        """Read each sample of a task alone and drop it, if the dataset reads in bulk.

        A worker has died over it: now the next death points to one sample. The caller seeds the generators afterwards.
        """
        if isinstance(self._fetcher, Bulk):
            for number, indices in enumerate(task.shards):
                for ordinal, index in enumerate(plain_indices(indices)):
                    heartbeat[SHARD], heartbeat[SAMPLE] = number, ordinal
                    self.read(replace(task, shards=([index],), sharded=False), "a worker")  # its error is raised later

    def _set_dataset_epoch(self, epoch: int) -> None:
        try:
            self._set_epoch(epoch)
        except BaseException as error:
            errors.add_note(error, f"raised by dataset.set_epoch({epoch})")
            raise
        self._epoch = epoch

    def _make_batches(self, scope: BatchScope) -> list[Any]:
        """Return the batches of all shards; empty if `ErrorPolicy` leaves none."""
        fetcher, numbers, batches = self._fetcher, range(len(scope.task.shards)), []
        if self._policy.raises:
            for number in numbers:
                batches.append(fetcher.fetch(number, scope))
            return batches
        if isinstance(fetcher, Bulk):
            try:
                batches = [fetcher.at_once(number, scope) for number in numbers]
                if not any(batch is NOT_IN_BULK for batch in batches):
                    return batches
            except BaseException as error:
                if scope.is_for_caller(error):
                    raise
        # If a bulk read failed, this is the second read, with the same random numbers.
        return self._collated([(fetcher.samples(number, scope), scope.indices) for number in numbers], scope)

    def _collated(self, shards: list[tuple[list[Any], Any]], scope: BatchScope) -> list[Any]:
        """Collate shards, each given as samples and indices.

        All shards are read before a bad sample is replaced, because the replacement may come from any shard.
        """
        batches = []
        for number, indices, samples in self._policy.apply(shards, scope):
            scope.heartbeat[SHARD], scope.indices = number, indices
            if scope.skipped or scope.dropped:
                scope.read += (indices,)
            batches.append(self._fetcher.collate(samples, scope))
        return batches


# -- one shard: samples, then a batch ----------------------------------------------------------------------------------


def _make_fetcher(job: Job, policy: ErrorPolicy, in_bulk: bool) -> OneByOne:
    if in_bulk:
        fn = job.batchify_fn
        # Look on the class: a mock object has every attribute.
        bulk_of: Any = as_bulk if fn is None else hasattr(type(fn), "bulk_of") and getattr(fn, "bulk_of")  # noqa: B009
        bulk = Bulk(job, policy, bulk_of(job.dataset) if bulk_of else None, as_items(job.dataset))
        if bulk.gather is not None or bulk.get_items is not None:
            return bulk
    return OneByOne(job, policy)


class OneByOne:
    """Reads a shard by ``dataset[index]`` for each sample, as any dataset allows."""

    def __init__(self, job: Job, policy: ErrorPolicy) -> None:
        self.dataset = Awaited(job.dataset) if is_awaited(job.dataset) else job.dataset
        self._policy = policy
        self._assemble = assembler(default_batchify_fn if job.batchify_fn is None else job.batchify_fn)

    def fetch(self, number: int, scope: BatchScope) -> Any:
        return self.collate(self.samples(number, scope), scope)

    def samples(self, number: int, scope: BatchScope) -> list[Any]:
        """Read the samples of shard ``number``; the policy replaces those that fail.

        Measured (256 images of 3 KB, warm): 36 us; 85 if index, position and generator are recorded per sample.
        """
        dataset, given = self.dataset, scope.task.shards[number]
        scope.indices = indices = given.tolist() if isinstance(given, np.ndarray) else given  # `plain_indices` inlined
        items, scope.drawn, scope.is_alone = iter(indices), None, scope.cpu_before is not None
        scope.items = items
        scope.heartbeat[SHARD], scope.heartbeat[SAMPLE] = number, ONE_BY_ONE
        items = scope.watch_items(items) if scope.records_samples or scope.is_timed else items
        samples: list[Any] = [dataset[index] for index in items] if self._policy.raises else []
        while not self._policy.raises:
            try:
                for index in items:
                    samples.append(dataset[index])
                break
            except Exception as error:
                if scope.is_for_caller(error):
                    raise
                samples.append(self._policy.substitute(index, error, scope))
        if scope.is_timed:
            scope.add_durations(len(samples))
        return samples

    def collate(self, samples: Any, scope: BatchScope) -> Any:
        """Collate ``samples``: a list, or the object that ``__getitems__`` returned."""
        scope.heartbeat[SAMPLE] = IN_BATCHIFY
        scope.items, scope.index, scope.drawn, scope.uncollatable = None, OF_BATCH, None, ()
        began = 0.0 if scope.cpu_before is None else host_clock.now()
        is_list = type(samples) is list
        try:
            if is_list and samples and type(samples[0]) in ASYNC:
                refuse_async(samples, "dataset[index]")
            batch = self._assemble(list(samples) if is_list else samples, scope.empty)  # a copy: it may change the list
            if type(batch) in ASYNC:
                refuse_async([batch], "collate_fn")
            if began:
                scope.collate_seconds += host_clock.now() - began
            return batch
        except BatchifyError:
            scope.uncollatable = self._find_uncollatable(samples, scope) if is_list else ()
            raise

    def _find_uncollatable(self, samples: list[Any], scope: BatchScope) -> tuple[int, ...]:
        """Find the first sample that cannot be collated alone, or else with the first sample; empty if none."""
        candidates = chain.from_iterable(((position,), (0, position)) for position in range(len(samples)))
        return next((positions for positions in candidates if not self._can_collate(samples, positions, scope)), ())

    def _can_collate(self, samples: list[Any], positions: Sequence[int], scope: BatchScope) -> bool:
        indices = scope.indices
        try:
            if hasattr(indices, "taken"):  # rows hold each sample once
                scope.indices = indices.taken(positions := sorted({*positions}))
            self._assemble([samples[position] for position in positions], np.empty)
        except Exception as error:  # the user's function may fail on part of a batch
            pass_on(error)
            return not isinstance(error, BatchifyError)
        finally:
            scope.indices = indices
        return True


class Bulk(OneByOne):
    """Reads the samples of a shard at once where the dataset can (`as_bulk`, `as_items`), otherwise one by one."""

    def __init__(self, job: Job, policy: ErrorPolicy, gather: Any, get_items: Any) -> None:
        super().__init__(job, policy)
        self.gather, self.get_items = gather, get_items
        self._takes_arrays = gather is not None and takes_arrays(job.dataset)
        # As in torch, the user's function gets the object that ``__getitems__`` returns, even one for the whole batch.
        self._passes_on = not hasattr(job.batchify_fn or default_batchify_fn, "assemble")

    def fetch(self, number: int, scope: BatchScope) -> Any:
        failed: BaseException | None = None
        try:
            batch = self.at_once(number, scope)
            if batch is not NOT_IN_BULK:
                return batch
        except BaseException as error:
            if scope.heartbeat[SAMPLE] != IN_BULK or scope.is_for_caller(error):  # the samples are not to blame
                raise
            failed = error
        try:
            # Outside the except clause, or the sample's error would show the bulk read's as its context.
            samples = self.samples(number, scope)  # raises the error of the sample to blame, if one is
            if failed is None:
                return self.collate(samples, scope)
            scope.items, scope.index, scope.drawn = None, NO_SAMPLE, None
            scope.heartbeat[SAMPLE] = IN_BULK
            raise failed
        finally:
            failed = None  # breaks the cycle error -> traceback -> this frame -> error

    def at_once(self, number: int, scope: BatchScope) -> Any:
        """Return the batch of shard ``number``, read at once; `NOT_IN_BULK` if it must be read one by one."""
        given = scope.task.shards[number]
        scope.indices = indices = given if self._takes_arrays else plain_indices(given)
        scope.heartbeat[SHARD], scope.heartbeat[SAMPLE] = number, IN_BULK
        scope.items, scope.index, scope.drawn = None, NO_SAMPLE, None  # `sample_rng()` is of no sample from here on
        if self.gather is not None:
            batch = self.gather(indices, scope.empty)
            if type(batch) in ASYNC:
                refuse_async([batch], "dataset.get_batch")
            if batch is not NOT_IN_BULK:
                return batch
        if self.get_items is None:
            return NOT_IN_BULK
        if self._takes_arrays:
            scope.indices = indices = plain_indices(given)
        samples = self.get_items(indices)
        refuse_async([samples], "dataset.__getitems__")
        return self.collate(samples if self._passes_on else listed(samples, len(indices)), scope)


# -- samples that cannot be read ---------------------------------------------------------------------------------------


class BadSample(NamedTuple):
    """Placeholder of a sample that could not be read: its index and its error."""

    skipped: tuple[Any, BaseException]


_NO_GOOD_SAMPLE = (
    "sharded_loader: no sample of its batch or shard could be read, and with num_replicas none is left out, as all "
    'ranks take the same steps with the same shards: on_error="replace" fills a shard from the others of the batch'
)


class ErrorPolicy:
    """Treatment of samples that cannot be read: raise, skip, replace, or the user's ``on_error``."""

    def __init__(self, job: Job) -> None:
        self._job, self.raises = job, job.on_error == "raise"

    def substitute(self, index: object, error: Exception, scope: BatchScope) -> Any:
        """Return the substitute for a failed sample: the result of the user's ``on_error``, or a `BadSample`."""
        on_error, task = self._job.on_error, scope.task
        failed, shard = scope.locate_error(error), scope.heartbeat[SHARD] if task.sharded else None
        value = on_error(errors.SampleError(index, task.epoch, task.seq, shard, failed)) if callable(on_error) else None
        scope.skipped += ((index, errors.without_frames(failed)),)
        return value if callable(on_error) else BadSample(scope.skipped[-1])

    def apply(self, shards: list[tuple[list[Any], Any]], scope: BatchScope) -> Iterator[tuple[int, Any, list[Any]]]:
        """Yield number, indices and samples of each shard that is left once bad samples are replaced or left out."""
        if not scope.skipped:
            yield from ((number, indices, samples) for number, (samples, indices) in enumerate(shards))
            return
        job, task = self._job, scope.task
        good = [pair for shard in shards for pair in zip(*shard, strict=True) if type(pair[0]) is not BadSample]
        replaces = job.on_error == "replace" and bool(good)
        lost_shards = (samples for samples, _ in shards if samples and all(type(one) is BadSample for one in samples))
        lost = next((samples[-1].skipped for samples in lost_shards), None)
        if lost is not None and job.keep_batch and not replaces:
            # It is raised, not skipped: `loader.skipped` would keep its frames alive, and with them the iterator.
            scope.skipped, scope.error = tuple(pair for pair in scope.skipped if pair is not lost), lost[1]
            errors.set_notes(lost[1], [_NO_GOOD_SAMPLE, *errors.notes_of(lost[1])])
            return
        for number, (samples, indices) in enumerate(shards):
            if replaces and not hasattr(indices, "taken"):  # rows have no room for other documents
                indices = list(indices)
                for place in (place for place, sample in enumerate(samples) if type(sample) is BadSample):
                    rng = philox(job.seed, "replace", task.epoch, task.key, number, place)
                    samples[place], indices[place] = good[int(rng.integers(len(good)))]
            places = [place for place, sample in enumerate(samples) if type(sample) is not BadSample]
            scope.dropped += len(samples) - len(places)
            if places or not samples:  # the batch sampler may yield an empty shard
                yield number, taken(indices, places), [samples[place] for place in places]
            else:
                scope.lost += (number,)


def plain_indices(indices: object) -> Any:
    return indices.tolist() if isinstance(indices, np.ndarray) else indices


def taken(indices: Any, places: Sequence[int]) -> Any:
    """Return the indices at some positions; samples packed into rows keep their rows."""
    return indices.taken(places) if hasattr(indices, "taken") else [indices[place] for place in places]


# -- measurement ------------------------------------------------------------------------------------------------------

MEASURED_SECONDS = 2e-2
"""Work per measured batch. Measuring takes 40 us, and 200 us if other processes own the caches: 0.2 to 1 % of it. Of
batches of 40 us (`tiny`) one in 500 is measured, of 400 us (`images`) one in 50, of 20 ms all. The counters of other
batches take 0.8 us (least of five runs with and without): 1 % of the 76 us of `tiny` in a worker.
"""

SAMPLE_SECONDS = 2e-5
"""Mean time of a sample above which samples are timed, which takes 0.1 us each."""

KEPT_SAMPLES = 20
"""Number of slowest samples of an epoch that a reader, and the loader, keep."""


class Timing:
    """Selects batches to measure, and computes their `BatchTimes`.

    Measured are the first batch, one per `MEASURED_SECONDS` of work, those that take longer, and those with retries.

    Attributes:
        batches, next: number of batches begun; of the last one that is not measured.
        spare: seconds by which samples read alone stayed below `SAMPLE_SECONDS`; above 0, none is timed.
        free: end of the last batch of each worker that uses the reader.
    """

    def __init__(self) -> None:
        self.free: dict[int, float] = {}
        self._core: dict[int, tuple[float, float]] = {}  # `core_seconds` after each worker's last measured batch
        self.batches = self.next = self._counted = 0  # `_counted`: batches in the sums
        self.spare = self._seconds = 0.0
        # Slowest samples: their epoch, the smallest of their times, and all times.
        self._slow_epoch, self._least_slow, self._slow = -1, SAMPLE_SECONDS, list[float]()

    def times(self, scope: BatchScope, samples: int, seconds: float, worker: int, retries: int) -> BatchTimes | None:
        """Return the measurements of a batch, or None, and learn which batches to measure from now on."""
        is_slow = seconds > MEASURED_SECONDS or (scope.durations and max(scope.durations) > self._least_slow)
        if scope.cpu_before is None and not is_slow and not retries:
            return None
        weight, processor, queued = 1 if scope.cpu_before is None else max(1, self.batches - self._counted), -1.0, 0.0
        if scope.cpu_before is not None or seconds > MEASURED_SECONDS:
            core = core_seconds()
            # A slow batch that was not selected: the cheap batches since the last measurement do not matter.
            before, self._core[worker] = scope.cpu_before or self._core.get(worker, core), core
            queued = min(seconds, core[1] - before[1])
            processor = min(seconds - queued, core[0] - before[0])
        self._counted += weight
        self._seconds += weight * (seconds - queued)
        # Skip no more batches than were counted so far, or 16: one odd measurement must not decide for long.
        unmeasured = min(max(16, self._counted), int(MEASURED_SECONDS * self._counted / max(self._seconds, 1e-6)))
        self.next = self.batches + unmeasured
        if scope.is_alone:
            # Includes waits for a core, which a busy machine may overstate. Timing in vain costs little.
            self.spare += weight * (SAMPLE_SECONDS * samples - max(0.0, seconds - scope.collate_seconds))
        free = scope.began if worker < 0 else self.free.get(worker)  # the main process is not idle between batches
        times = BatchTimes(processor=processor, queued=queued, weight=weight, retries=retries)
        times.slow, times.is_first, times.collate = self._slowest(scope), free is None, scope.collate_seconds
        if free is not None:
            times.idle = max(0.0, scope.began - free)
        return times

    def _slowest(self, scope: BatchScope) -> tuple[tuple[int, float], ...]:
        """Return position and seconds of a batch's samples that are among the slowest of the epoch."""
        if scope.task.epoch != self._slow_epoch:
            self._slow_epoch, self._slow, self._least_slow = scope.task.epoch, [], SAMPLE_SECONDS
        slow = [(place, seconds) for place, seconds in enumerate(scope.durations) if seconds > self._least_slow]
        slow = sorted(slow, key=operator.itemgetter(1), reverse=True)[:KEPT_SAMPLES]
        # Another thread that shares the reader may begin an epoch meanwhile, and empty the list.
        self._slow = kept = sorted([*self._slow, *map(operator.itemgetter(1), slow)])[-KEPT_SAMPLES:]
        if len(kept) == KEPT_SAMPLES:
            self._least_slow = kept[0]
        return tuple(slow)
