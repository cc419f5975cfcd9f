"""Reads one batch of iterable data: the samples that come next in a part, then batchify. The same code in every pool.

    Task (part, number of the batch) -> StreamReader.read -> Result, with the point that the part has got to

A part stays open from batch to batch, so its tasks come to one worker (``Task.lane``). Nothing depends on that: a
reader that does not have the part open, or has read past the batch, opens it again and reads up to the batch. It begins
at the point that the task brings, if that has a state of the dataset's own, otherwise at the beginning of the part. So
a killed worker, an interrupted batch and a loaded state are one case.

The samples on the way must be the ones of before. If their checksum is another one, the batch is an error.

Owns the open parts. What can go wrong is the user's: the error of its batch. An iterator that has raised an error is
asked for the next sample again. A generator has ended then, and so does its part.
"""

from __future__ import annotations

import copy
import operator
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.base.errors import HAS_ENDED, add_note
from sharded_loader.data.inspection import sampled
from sharded_loader.engine.board import BEGINNING, ONE_BY_ONE, SAMPLE, SHARD, UNUSED
from sharded_loader.engine.messages import Job, PartBatch, PartIndices, PartPoint, Stream, Task
from sharded_loader.engine.reader import Bad, BatchScope, Reader
from sharded_loader.engine.split import shard_sizes
from sharded_loader.randomness.rng import SampleScope, derive_key, reading
from sharded_loader.streams.parts import Copies, OpenPart
from sharded_loader.streams.worker_info import here


class StreamReader(Reader):
    """Makes batches of iterable data.

    Args:
        job, notes_samples: see `Reader`.
        several: several parts may be open here at a time, or one for several iterators, and the dataset would mix them
            up. Each then has a copy of the dataset to itself.
        alone: no other thread of this process reads samples.
        seed: seeds the global generators for a batch, by epoch and ``position``; None: they are not seeded.
    """

    def __init__(
        self,
        job: Job,
        *,
        notes_samples: bool = False,
        several: bool = True,
        alone: bool = False,
        seed: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(job, notes_samples=notes_samples, in_bulk=False)
        assert job.stream is not None  # see `reader_for`
        self._stream: Stream = job.stream
        self._several, self._alone, self._seed_globals = several, alone, seed
        self._copies: Copies | None = None
        self._opened: dict[tuple[int, int], OpenPart] = {}

    def read_sample(self, index: Any, epoch: int) -> Any:
        """Sample ``(part, place)``: the part is read up to it."""
        try:
            part, place = map(operator.index, index)
        except (TypeError, ValueError):
            raise TypeError(f"a sample of iterable data is read as (part, position), not as {index!r}") from None
        stream, passes = self._stream, 0 if self._stream.endless else epoch
        missing = IndexError(f"part {part} of epoch {epoch} has no sample {place}; there are {stream.parts} parts")
        if not 0 <= part < stream.parts or place < 0:
            raise missing
        opened = OpenPart(Copies(self._job.dataset).make(), part, stream.parts, self._part_seed(part, epoch))
        scope, before, told = SampleScope(self._job.seed, passes), reading.get(), here.part
        try:
            reading.set(scope)
            _at_first(scope, part)
            opened.begin(passes)
            scope.indices, scope.items = PartIndices(part, range(place + 1)), iter(range(place + 1))
            opened.tell()
            for _ in scope.items:
                try:
                    sample = opened.advance()
                except StopIteration:
                    if not stream.endless:
                        raise
                    passes += 1
                    opened.begin(passes)
                    sample = opened.advance()
        except StopIteration:
            raise missing from None
        finally:
            _, here.part = reading.set(before), told
        return sample

    def prime(self, task: Task) -> PartPoint:
        """Open the part of a task, and say where it is: before the first batch, as torch does in the main process."""
        at = BatchScope(self._job.seed, task.epoch)
        at.task, at.worker, at.empty, at.board = task, None, np.empty, list(UNUSED)
        assert task.part is not None  # a task of iterable data has one
        opened = self._open_at(task.part, at)
        opened.busy = False
        return opened.point._replace(state=opened.state())

    # -- one batch ------------------------------------------------------------------------------------------

    def _make_batches(self, at: BatchScope) -> list[Any]:
        task, part = at.task, at.task.part
        assert part is not None  # a task of iterable data has one
        if self._stream.endless:
            at.epoch = 0  # a pass may begin in one epoch and end in the next
        opened = self._open_at(part, at)
        if opened.point.ended:
            at.point, opened.busy = opened.point, False
            return []
        self._seed(task.epoch, task.position)
        at.is_alone = True
        try:
            samples = self._read_batch(opened, task.shards, at)
        except BaseException as error:
            if not at.passes(error):
                at.point, opened.busy = opened.point, False
            raise
        at.point, opened.busy = opened.point, False
        if opened.is_stateful:
            at.point = opened.point = opened.point._replace(state=opened.state())
        planned = sum(map(len, task.shards))
        shards: Sequence[Any] = task.shards
        if len(samples) < planned:
            if not samples or self._stream.drops_last:
                return []
            at.dropped += planned - len(samples)
            first, sizes = shards[0], shard_sizes(len(samples), len(shards), list(map(len, shards)))
            shards = PartIndices(first.part, range(first.places.start, first.places.start + len(samples))).cut(sizes)
        found, begin = [], 0
        for indices in shards:
            found.append((samples[begin : begin + len(indices)], indices))
            begin += len(indices)
        return self._collated(found, at)

    def _read_batch(self, opened: OpenPart, shards: Sequence[Any], at: BatchScope) -> list[Any]:
        """The samples that come next, at most as many as ``shards`` have indices; `Bad` where one failed."""
        board, stream = at.board, self._stream
        point, samples, failed = opened.point, list[Any](), False
        passes, ended, base = point.passes, False, point.samples  # len(samples) + base: read in this pass
        advance, told = opened.advance, opened.tell()
        try:
            for number, indices in enumerate(shards):
                board[SHARD], board[SAMPLE] = number, ONE_BY_ONE
                at.indices, at.drawn, before = indices, None, len(samples)
                at.items = items = iter(range(len(indices)))
                places = at.watched(items) if at.notes or at.is_timed else items
                while not ended:
                    try:
                        for _ in places:
                            samples.append(advance())
                        break
                    except StopIteration:
                        ended = not stream.endless
                        if stream.endless:
                            if len(samples) + base == 0:
                                raise self._is_empty(at) from None
                            passes, base = passes + 1, -len(samples)
                            opened.begin(passes)
                            advance = opened.advance
                            at.items = items = iter(range(len(samples) - before, len(indices)))
                            places = at.watched(items, len(samples) - before) if at.notes or at.is_timed else items
                    except Exception as error:
                        if self._policy.raises or at.passes(error):
                            raise
                        samples.append(self._policy.in_place_of(indices[len(samples) - before], error, at))
                        if opened.is_over:
                            add_note(at.skipped[-1][1], f"part {opened.number} of {stream.parts} {HAS_ENDED}")
                if at.is_timed:
                    at.timed(len(samples) - before)
        except BaseException as error:
            failed = not at.passes(error)
            raise
        finally:
            here.part = told
            is_batch = bool(samples) and not (ended and stream.drops_last and len(samples) < sum(map(len, shards)))
            count, total = point.batches + (failed or is_batch), len(samples) + base + failed
            checked = point.checksum
            if samples and not opened.is_stateful:
                first = None if type(samples[0]) is Bad else samples[0]
                checked = zlib.crc32(sampled(first).encode(), checked)
            opened.point = PartPoint(count, passes, total, checked, ended, asked=opened.asked)
            if ended:
                opened.end()
        return samples

    def _is_empty(self, at: BatchScope) -> ValueError:
        part = at.task.part
        number = None if part is None else part.number
        return ValueError(
            f"part {number} of {self._stream.parts} has no samples, so it cannot start over: give fewer parts "
            f"(streams=), or leave steps_per_epoch out"
        )

    # -- parts ----------------------------------------------------------------------------------------------

    def _open_at(self, part: PartBatch, at: BatchScope) -> OpenPart:
        """The part, open at the batch that is asked for, or at its end."""
        for key in list(self._opened):
            if key[0] < part.oldest:
                self._opened.pop(key, None)
        opened = self._opened.get((part.stream, part.number))
        if opened is None or opened.busy or opened.point.batches > part.batch:
            at.board[SAMPLE] = BEGINNING
            opened = self._open(part, at)
            self._opened[part.stream, part.number] = opened
        opened.busy = True  # until its batch is read: if something strikes before that, it has perhaps lost samples
        self._skip(opened, part.batch, at)
        return opened

    def _open(self, part: PartBatch, at: BatchScope) -> OpenPart:
        if self._copies is None and self._several:
            self._copies = Copies(self._job.dataset)  # before any part has changed it
        dataset = self._job.dataset if self._copies is None else self._copies.make()
        seed = self._part_seed(part.number, at.task.epoch)
        stream = self._stream
        opened = OpenPart(dataset, part.number, stream.parts, seed, alone=self._alone, told=stream.tells_epoch)
        point, first = part.point, 0 if self._stream.endless else at.task.epoch
        opened.point = PartPoint(passes=first) if point.state is None else point
        self._seed(at.task.epoch, opened.point.batches * self._stream.parts + part.number)
        _at_first(at, part.number)
        opened.begin(opened.point.passes, point.state)
        if point.state is None and not point.ended:
            self._skip(opened, point.batches, at)
            if opened.point != point._replace(passes=max(first, point.passes), asked=opened.point.asked):
                raise self._differs(part, opened.point)
        return opened

    def _skip(self, opened: OpenPart, batch: int, at: BatchScope) -> None:
        """Read the batches before ``batch``, and drop them."""
        number, size = opened.number, self._stream.batch_size
        while opened.point.batches < batch and not opened.point.ended:
            count = opened.point.batches
            self._seed(at.task.epoch, count * self._stream.parts + number)
            indices = PartIndices(number, range(count * size, (count + 1) * size))
            try:
                self._read_batch(opened, [indices], at)
            except BaseException as error:  # as when it was read: the batches behind it come all the same
                if at.passes(error):
                    raise
            at.skipped = ()
            at.durations = ()
            at.board[SHARD], at.board[SAMPLE] = count & 1023, BEGINNING  # a sign of life

    def _differs(self, part: PartBatch, found: PartPoint) -> ValueError:
        then, kind = part.point, type(self._job.dataset).__name__
        what = f"other samples than the {then.samples} that it had yielded"
        if found.ended and found.samples < then.samples:
            what = f"only {found.samples} samples, where it had yielded {then.samples}"
        return ValueError(
            f"the epoch cannot go on after a resume or a lost worker: part {part.number} of the dataset, {an(kind)}, "
            f"yields {what}. Its samples must be the same each time it is read, in every pool: draw random numbers "
            f"from sample_rng(), not from the modules random, numpy.random and torch, or give the dataset state_dict() "
            f"and load_state_dict()"
        )

    def _seed(self, epoch: int, position: int) -> None:
        if self._seed_globals is not None:
            self._seed_globals(0 if self._stream.endless else epoch, position)

    def _part_seed(self, part: int, epoch: int) -> int:
        if self._job.base_seed is not None:
            return self._job.base_seed + part
        epoch = 0 if self._stream.endless else epoch
        return derive_key(self._job.seed, "part", epoch, part) & 0x7FFFFFFFFFFFFFFF


class StatefulReader(Reader):
    """Makes batches of a map-style dataset that has ``state_dict``: its state is part of the results.

    A batch belongs to a lane. If the batch before it was not read here, the dataset gets the state of the task's point.
    """

    def __init__(self, job: Job, *, notes_samples: bool = False) -> None:
        super().__init__(job, notes_samples=notes_samples)
        self._at: tuple[int, int, int] | None = None

    def _make_batches(self, at: BatchScope) -> list[Any]:
        part = at.task.part
        assert part is not None  # of a dataset with a state, each batch belongs to a lane
        here = part.stream, part.number, part.batch
        if self._at != here and part.point.state is not None:
            self._job.dataset.load_state_dict(copy.deepcopy(part.point.state))
        self._at = part.stream, part.number, part.batch + 1
        try:
            return super()._make_batches(at)
        finally:
            at.point = PartPoint(part.batch + 1, state=copy.deepcopy(self._job.dataset.state_dict()))


def _at_first(scope: SampleScope, part: int) -> None:
    """A part is opened: what it draws belongs to its first sample, as in a generator, which begins there."""
    scope.indices, scope.items, scope.drawn = PartIndices(part, range(1)), iter(range(1)), None
    next(scope.items)
