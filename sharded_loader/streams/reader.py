"""Read one batch of iterable data: fetch the next samples of a part, then collate them. Every pool uses this code.

    Task (part, batch index) -> StreamReader.read -> Result with the part's progress

As in torch's workers, the dataset learns from ``get_worker_info()`` which part to yield (``id`` of ``num_workers``); a
function may take the two numbers as arguments instead.

A part stays open from batch to batch, so its tasks go to one worker (``Task.lane``). That is only an optimisation: a
reader that does not have the part open, or is past the batch, opens it again and reads up to the batch. It starts from
the dataset's own state if the task has one, otherwise from the beginning. So a dead worker, an interrupted batch and a
loaded state are one case. A checksum of each batch's first sample ensures that the samples are those of before.

Owns the open parts, each with its own copy of the dataset if several are open in one process, because many datasets
keep their position in themselves. An iterator that has raised is asked for the next sample again; a generator, and so
its part, has ended.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
import types
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from inspect import isasyncgenfunction, iscoroutinefunction
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.base.errors import HAS_ENDED, add_note
from sharded_loader.batching.protocol import refuse_async
from sharded_loader.data.inspection import is_stateful, iterable_of, sampled
from sharded_loader.data.seeding import epoch_setter
from sharded_loader.engine.heartbeat import BEGINNING, ONE_BY_ONE, SAMPLE, SHARD, UNUSED
from sharded_loader.engine.messages import Job, PartBatch, PartIndices, PartPoint, Stream, Task
from sharded_loader.engine.reader import BadSample, BatchScope, Reader
from sharded_loader.engine.split import shard_sizes
from sharded_loader.randomness.rng import derive_key, reading
from sharded_loader.streams.worker_info import Part, here, set_current_part

SHARED_BYTES = 64 << 20
"""Size from which arrays are shared by all parts, as data. A smaller one may be an order that is shuffled in place.
Objects whose class has ``shared_by_parts`` are shared, too."""


class Copies:
    """Copies of a dataset as it is now. Functions, classes, modules and large arrays in it are shared.

    Example:
        >>> data = [1, print]
        >>> copies = Copies(data)
        >>> data.append(2)
        >>> copies.make() == [1, print]
        True
    """

    def __init__(self, dataset: object) -> None:
        self._dataset, self._shared, stream = dataset, list[object](), io.BytesIO()
        copier = _Copier(stream, protocol=5)
        copier.shared = self._shared
        try:
            copier.dump(dataset)
            self._pickled = stream.getvalue()
        except Exception:  # it cannot be pickled
            self._pickled = b""

    def make(self) -> Any:
        """Return a copy, or the dataset itself if it cannot be pickled."""
        if not self._pickled:
            return self._dataset
        made = _Unpickler(io.BytesIO(self._pickled))
        made.shared = self._shared
        return made.load()


class _Copier(pickle.Pickler):
    shared: list[object]

    def persistent_id(self, obj: object) -> int | None:
        large = getattr(obj, "nbytes", 0) if hasattr(obj, "__array__") else 0
        is_shared = large >= SHARED_BYTES or hasattr(type(obj), "shared_by_parts")
        if not is_shared and not isinstance(obj, type | types.FunctionType | types.ModuleType):
            return None
        self.shared.append(obj)
        return len(self.shared) - 1


class _Unpickler(pickle.Unpickler):  # a subclass: in Python 3.13 the method cannot be set
    shared: list[object]

    def persistent_load(self, pid: int) -> object:
        return self.shared[pid]


class OpenPart(Part):
    """One part of iterable data that is being read, from the dataset or from the part's own copy.

    Args:
        alone: no other thread of this process reads a part.
        sets_epoch: call the dataset's ``set_epoch``.

    Attributes:
        point: progress, which the reader updates.
        busy: a thread is in the middle of a batch.
        next_sample: returns the next sample; StopIteration ends the pass.
        is_stateful: the dataset, or its iterator, has a ``state_dict``.
        begins_anew: "next" if the pass of the loaded state is over, "perhaps" if it may be.
    """

    is_stateful = busy = False
    items: Any = None

    def __init__(
        self, dataset: object, number: int, parts: int, seed: int, *, alone: bool = False, sets_epoch: bool = True
    ) -> None:
        super().__init__(number, parts, seed, dataset)
        self._alone, self._sets_epoch = alone, sets_epoch
        self._last_state: tuple[Any, Any] | None = None
        self.point = PartPoint()
        self.next_sample: Callable[[], Any] = _nothing

    def begin(self, passes: int, state: Any = None) -> None:
        """Begin a pass, or resume from what `state` has returned. A third item is `begins_anew`."""
        dataset: Any = self.dataset
        if self._sets_epoch and (set_epoch := epoch_setter(dataset)) is not None:
            set_epoch(passes)
        of_dataset, of_items, self.begins_anew = (*(state or (None, None)), False)[:3]
        if of_dataset is not None:
            dataset.load_state_dict(copy.deepcopy(of_dataset))
        before = self.set_current()
        try:
            items = iterable_of(dataset, lambda: self.place)
            method: Any = getattr(type(items), "__iter__", None)
            if iscoroutinefunction(method) or isasyncgenfunction(method):
                items = method(items)
            refuse_async([items], "the dataset")
            self.items = iter(items)
            if of_items is not None:
                self.items.load_state_dict(copy.deepcopy(of_items))
            if self.begins_anew == "next":  # the state was taken at the end of a pass
                self.items = iter(items)
        finally:
            here.part = before
        self.is_stateful = state is not None or is_stateful(dataset) or is_stateful(self.items)
        self.next_sample = self.items.__next__

    def set_current(self) -> Part | None:
        """Announce the part to this thread; see `streams.worker_info`."""
        # As in torch, there is no worker info if the main process reads everything.
        return set_current_part(None if self.parts == 1 and not self._alone else self, alone=self._alone)

    def end(self) -> None:
        """Release the iterator at the end of the part."""
        self._last_state = self.state()
        self.items, self.next_sample = None, _nothing

    def state(self) -> tuple[Any, Any] | None:
        """Return the state that `begin` resumes from, or None if the dataset has none."""
        if self._last_state is not None or not self.is_stateful:
            return self._last_state
        # A dataset that is its own iterator has one state: the iterator's.
        states = None if self.items is self.dataset else _state_of(self.dataset), _state_of(self.items)
        return None if states[0] is None is states[1] else states


def _state_of(obj: Any) -> Any:
    # A copy, because some datasets return a dict that they change later.
    return copy.deepcopy(obj.state_dict()) if is_stateful(obj) else None


def _nothing() -> Any:
    raise StopIteration


_EMPTY = (
    "part {} of {} has no samples, so it cannot start over: give fewer parts (streams=), or leave steps_per_epoch out"
)


class EmptyPartError(ValueError):
    """A part without samples cannot start over."""


Seed = Callable[[int, int], None] | None
"""Seeds the global generators for a batch, by epoch and ``position``; None: they are not seeded."""


class StreamReader(Reader):
    """Reads batches of iterable data.

    Args:
        several: several parts may be open in this process; each gets its own copy of the dataset.
        alone: no other thread of this process reads samples.
        seed: see `Seed`.
    """

    def __init__(self, job: Job, *, several: bool = True, alone: bool = False, seed: Seed = None) -> None:
        super().__init__(job, in_bulk=False)
        assert job.stream is not None  # see `reader_for`
        self._stream: Stream = job.stream
        self._copies_dataset, self._alone, self._seed = several, alone, seed or (lambda epoch, position: None)
        self._copies: Copies | None = None
        self._opened: dict[tuple[int, int], OpenPart] = {}

    def read_sample(self, index: Any, epoch: int) -> Any:
        """Read sample ``(part, place)``, reading the part up to it."""
        try:
            part, place = map(operator.index, index)
        except (TypeError, ValueError):
            raise TypeError(f"a sample of iterable data is read as (part, position), not as {index!r}") from None
        parts, size, samples = self._stream.parts, self._stream.batch_size, list[Any]()
        if 0 <= part < parts and place >= 0:
            part_batch = PartBatch(0, 0, part, place // size, PartPoint())
            indices = PartIndices(part, range(place - place % size, place + 1))
            task = Task(0, 0, epoch, 0, (indices,), False, part=part_batch)
            reader = StreamReader(replace(self._job, on_error="raise"))
            with suppress(EmptyPartError), reader._begun(task) as scope:
                samples = reader._read_batch(reader._open_at(part_batch, scope), task.shards, scope)
        if len(samples) != place % size + 1:
            raise IndexError(f"part {part} of epoch {epoch} has no sample {place}; there are {parts} parts")
        return samples[-1]

    def prime(self, task: Task) -> PartPoint:
        """Open the part of a task before its first batch, as torch does in the main process. Return its progress."""
        assert task.part is not None  # a task of iterable data has one
        with self._begun(task) as scope:  # the samples that are passed over may draw random numbers
            opened = self._open_at(task.part, scope)
        opened.busy = False
        return opened.point._replace(state=opened.state())

    @contextmanager
    def _begun(self, task: Task) -> Iterator[BatchScope]:
        """Read a task's samples inside the context, outside any batch."""
        scope, before = BatchScope(self._job.seed, 0 if self._stream.endless else task.epoch), reading.get()
        scope.task, scope.worker, scope.empty, scope.heartbeat = task, None, np.empty, list(UNUSED)
        try:
            reading.set(scope)
            yield scope
        finally:
            reading.set(before)

    # -- one batch ------------------------------------------------------------------------------------------

    def _make_batches(self, scope: BatchScope) -> list[Any]:
        task, part = scope.task, scope.task.part
        assert part is not None  # a task of iterable data has one
        if self._stream.endless:
            scope.epoch = 0  # a pass may begin in one epoch and end in the next
        opened = self._open_at(part, scope)
        if opened.point.ended:
            scope.point, opened.busy = opened.point, False
            return []
        self._seed(scope.epoch, task.position)
        scope.is_alone = True
        try:
            samples = self._read_batch(opened, task.shards, scope)
        except BaseException as error:
            if not scope.is_for_caller(error):
                scope.point, opened.busy = opened.point, False
            raise
        scope.point, opened.busy = opened.point, False
        if opened.is_stateful:
            scope.point = opened.point = opened.point._replace(state=opened.state())
        planned = sum(map(len, task.shards))
        shards: Sequence[Any] = task.shards
        if len(samples) < planned:
            if not samples or self._stream.drops_last:
                return []
            scope.dropped += planned - len(samples)
            first, sizes = shards[0], shard_sizes(len(samples), len(shards), list(map(len, shards)))
            shards = PartIndices(first.part, range(first.places.start, first.places.start + len(samples))).cut(sizes)
        cuts = pairwise(accumulate(map(len, shards), initial=0))
        return self._collated([(samples[i:j], indices) for (i, j), indices in zip(cuts, shards, strict=True)], scope)

    def _read_batch(self, opened: OpenPart, shards: Sequence[Any], scope: BatchScope) -> list[Any]:
        """Read the next samples, at most as many as ``shards`` have indices; a failed one is a `BadSample`."""
        heartbeat, stream = scope.heartbeat, self._stream
        point, samples, failed = opened.point, list[Any](), False
        passes, ended, base = point.passes, False, point.samples  # len(samples) + base: read in this pass
        next_sample, part_before = opened.next_sample, opened.set_current()
        try:
            for number, indices in enumerate(shards):
                heartbeat[SHARD], heartbeat[SAMPLE] = number, ONE_BY_ONE
                scope.indices, scope.drawn, before = indices, None, len(samples)
                while not ended:
                    first = len(samples) - before
                    scope.items = places = iter(range(first, len(indices)))
                    if scope.records_samples or scope.is_timed:
                        places = scope.watch_items(places, first)
                    try:
                        for _ in places:
                            samples.append(next_sample())
                        break
                    except StopIteration:
                        is_first = len(samples) + base == 0
                        # A generator may take up the loaded state only here, and end the old pass.
                        ended = not stream.endless and not (is_first and opened.begins_anew)
                        if not ended:
                            if is_first and not opened.begins_anew:
                                raise EmptyPartError(_EMPTY.format(opened.number, stream.parts)) from None
                            passes, base = passes + (not is_first), -len(samples)
                            opened.begin(passes)
                            next_sample = opened.next_sample
                    except Exception as error:
                        if self._policy.raises or scope.is_for_caller(error):
                            raise
                        samples.append(self._policy.substitute(indices[len(samples) - before], error, scope))
                        if getattr(opened.items, "gi_frame", opened) is None:  # a generator that raises has ended
                            add_note(scope.skipped[-1][1], f"part {opened.number} of {stream.parts} {HAS_ENDED}")
                if scope.is_timed:
                    scope.add_durations(len(samples) - before)
        except BaseException as error:
            failed = not scope.is_for_caller(error)
            raise
        finally:
            here.part = part_before
            is_batch = bool(samples) and not (ended and stream.drops_last and len(samples) < sum(map(len, shards)))
            count, total = point.batches + (failed or is_batch), len(samples) + base + failed
            checked = point.checksum
            if samples and (not opened.is_stateful or hasattr(type(opened.dataset), "needs_full_replay")):
                sample = None if type(samples[0]) is BadSample else samples[0]
                checked = zlib.crc32(sampled(sample).encode(), checked)
            opened.point = PartPoint(count, passes, total, checked, ended, asked=opened.asked)
            if ended:
                opened.end()
        return samples

    # -- parts ----------------------------------------------------------------------------------------------

    def _open_at(self, part: PartBatch, scope: BatchScope) -> OpenPart:
        """Return the part, open at the batch of the task, or at its end."""
        for key in list(self._opened):
            if key[0] < part.oldest:
                self._opened.pop(key, None)
        opened = self._opened.get((part.stream, part.number))
        if opened is None or opened.busy or opened.point.batches > part.batch:
            scope.heartbeat[SAMPLE] = BEGINNING
            opened = self._open(part, scope)
            self._opened[part.stream, part.number] = opened
        opened.busy = True  # until its batch is read: an interruption before that may lose samples
        self._skip(opened, part.batch, scope)
        return opened

    def _open(self, part: PartBatch, scope: BatchScope) -> OpenPart:
        if self._copies is None and self._copies_dataset:
            self._copies = Copies(self._job.dataset)  # before any part changes it
        dataset = self._job.dataset if self._copies is None else self._copies.make()
        job, stream = self._job, self._stream
        seed = derive_key(job.seed, "part", scope.epoch, part.number) & 0x7FFFFFFFFFFFFFFF
        if job.base_seed is not None:
            seed = job.base_seed + part.number
        opened = OpenPart(dataset, part.number, stream.parts, seed, alone=self._alone, sets_epoch=stream.sets_epoch)
        point, first = part.point, scope.epoch
        opened.point = PartPoint(passes=first) if point.state is None else point
        self._seed(scope.epoch, opened.point.batches * self._stream.parts + part.number)
        # Random numbers drawn on opening are the first sample's, as in a generator, which begins there.
        scope.indices, scope.items, scope.drawn = PartIndices(part.number, range(1)), iter(range(1)), None
        next(scope.items)
        opened.begin(opened.point.passes, point.state)
        if point.state is None and not point.ended:
            self._skip(opened, point.batches, scope)
            passes = point.passes if self._stream.endless else first  # the program may have named another epoch
            known = point.checksum or opened.point.checksum  # 0: of an earlier version's mixture
            if opened.point != point._replace(passes=passes, checksum=known, asked=opened.point.asked):
                raise self._not_reproducible(part, opened.point)
        return opened

    def _skip(self, opened: OpenPart, batch: int, scope: BatchScope) -> None:
        """Read and drop the batches before ``batch``."""
        number, size = opened.number, self._stream.batch_size
        while opened.point.batches < batch and not opened.point.ended:
            count = opened.point.batches
            self._seed(scope.epoch, count * self._stream.parts + number)
            indices = PartIndices(number, range(count * size, (count + 1) * size))
            try:
                self._read_batch(opened, [indices], scope)
            except BaseException as error:  # it was the error of its batch, and later ones can still be read
                if scope.is_for_caller(error):
                    raise
            scope.skipped = scope.durations = ()
            scope.heartbeat[SHARD], scope.heartbeat[SAMPLE] = count & 1023, BEGINNING  # shows progress

    def _not_reproducible(self, part: PartBatch, actual: PartPoint) -> ValueError:
        expected, kind = part.point, type(self._job.dataset).__name__
        others = f"other samples than the {expected.samples} that it had yielded"
        if actual.ended and actual.samples < expected.samples:
            others = f"only {actual.samples} samples, where it had yielded {expected.samples}"
        return ValueError(
            f"the epoch cannot go on after a resume or a lost worker: part {part.number} of the dataset, {an(kind)}, "
            f"yields {others}. Its samples must be the same each time it is read, in every pool: draw random numbers "
            f"from sample_rng(), not from the modules random, numpy.random and torch, set attributes before its "
            f"workers start, or give the dataset state_dict() and load_state_dict()"
        )


class StatefulReader(Reader):
    """Reads a map-style dataset with a ``state_dict``: loads it unless the lane's last batch was read here."""

    _next_batch = 0, 0, 0  # the batch that the dataset's state is at: the first, as far as known

    def _make_batches(self, scope: BatchScope) -> list[Any]:
        part = scope.task.part
        assert part is not None  # of a dataset with a state, each batch belongs to a lane
        if self._next_batch != (part.stream, part.number, part.batch) and part.point.state is not None:
            self._job.dataset.load_state_dict(copy.deepcopy(part.point.state))
        self._next_batch = part.stream, part.number, part.batch + 1
        try:
            return super()._make_batches(scope)
        finally:
            scope.point = PartPoint(part.batch + 1, state=copy.deepcopy(self._job.dataset.state_dict()))
