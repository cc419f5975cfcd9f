"""What travels between the pipeline, the pools and the workers.

    Task(run, seq, ...)    pipeline -> pool -> worker
    Result(run, seq, ...)  worker -> pool -> pipeline
    BatchTimes             in a `Result`: what was measured of the batch
    Job                    loader -> pool -> worker, once
    Grouping               how many batches travel in one message

Iterable data is cut into parts, and each part is read in its own order. This is what the messages say of it:

    Stream                 how it is cut                        in the `Job`
    PartBatch              which batch of which part            in a `Task`
    PartIndices            the indices of its samples           ``Task.shards``
    PartPoint              how far the part has got             in a `Result`, and from there in later tasks

Between processes each message is a head and buffers (`memory.codec`), see `pools.process.link`. What a task or a result
is about (run, seq) is told apart from the user's objects, so that either side knows it even when those cannot be read:
a batch that cannot be unpickled is one batch's error.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from math import inf
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from sharded_loader.base.errors import Location, as_batch_error, leave_frames
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.memory.codec import IN_BAND_BYTES, IN_SLOT_BYTES, Encoded, SlotWriter, is_plain


class Stream(NamedTuple):
    """How iterable data is cut into batches.

    Attributes:
        parts: how many parts there are.
        batch_size: samples in a batch; all of a batch come from one part.
        drops_last: leave out what does not fill a batch at the end of a part.
        endless: a part that has ended starts over, and no batch is short.
        tells_epoch: call the dataset's ``set_epoch`` when a part is opened.
    """

    parts: int
    batch_size: int
    drops_last: bool = False
    endless: bool = False
    tells_epoch: bool = True


class PartPoint(NamedTuple):
    """How far a part of iterable data has been read: between two batches.

    Attributes:
        batches: how many batches have been read.
        passes: which pass over the part this is. It is the epoch, unless parts start over.
        samples: how many samples of this pass have been read.
        checksum: of the first sample of each batch; see `streams.reader`.
        ended: the part has no more samples.
        state: of the dataset's own ``state_dict``; None: it has none.
        asked: the dataset has asked which part it is to read. Not in a saved state.
    """

    batches: int = 0
    passes: int = 0
    samples: int = 0
    checksum: int = 0
    ended: bool = False
    state: Any = None
    asked: bool = False


class PartBatch(NamedTuple):
    """Which batch of iterable data a task asks for.

    Attributes:
        stream: number of the reading. Its parts are opened once, and stay open from batch to batch.
        oldest: readings of smaller numbers are over: their parts are closed.
        number: which part.
        batch: which batch of the part, from 0.
        point: a point at or before this batch. A worker that does not have the part open goes on from there.
    """

    stream: int
    oldest: int
    number: int
    batch: int
    point: PartPoint

    def is_same(self, other: PartBatch | None) -> bool:
        """Whether it is a batch of the same part, in the same reading."""
        return other is not None and (other.stream, other.number) == (self.stream, self.number)


class PartIndices(Sequence[Any]):
    """The indices of samples of one part: ``(part, 0)``, ``(part, 1)``, ... A slice is again such a sequence.

    Example:
        >>> indices = PartIndices(3, range(8, 12))
        >>> indices[0], indices[1:3].places, len(indices)
        ((3, 8), range(9, 11), 4)
        >>> [one.places for one in indices.cut([3, 0, 1])]
        [range(8, 11), range(11, 12)]
    """

    __slots__ = ("part", "places")

    def __init__(self, part: int, places: range) -> None:
        self.part, self.places = part, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, place: Any) -> Any:
        found = self.places[place]
        return PartIndices(self.part, found) if isinstance(place, slice) else (self.part, found)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(repeat(self.part), self.places)

    def cut(self, sizes: Iterable[int]) -> list[PartIndices]:
        """Pieces of these sizes, one behind the other, without those of size 0."""
        ends = list(accumulate(sizes, initial=0))
        return [self[begin:end] for begin, end in pairwise(ends) if begin < end]

    def __reduce__(self) -> Any:
        return PartIndices, (self.part, self.places)


class RowIndices(list[int]):
    """The indices of samples that lie side by side in rows, which shards do not break up: a batch of a batch sampler.

    Attributes:
        rows: how many rows there are.
    """

    __slots__ = ("rows",)
    rows: int

    def taken(self, positions: Sequence[int]) -> RowIndices:
        """Some of the indices, in the same rows."""
        raise NotImplementedError

    def cut(self, sizes: Iterable[int]) -> list[RowIndices]:
        """Shards of whole rows. ``sizes`` says how many rows each shard has. A shard of no rows is left out."""
        raise NotImplementedError


class BatchTimes(SimpleNamespace):
    """One batch on its way. Its worker, the pipeline and ``next`` each fill in by keyword what they know.

    Stamps are of `host_clock.now` in the main process, the others are seconds.

    Attributes:
        idle: before the worker began, since the end of its batch before.
        processor: in which a core ran the worker; negative: that was not measured.
        queued: in which the worker waited for a core. In the others it waited for something else.
        collate: in ``batchify_fn``.
        write: until the batch lay in its slot.
        retries: requests of the dataset that had to be tried again. They count in the `Result`.
        weight: how many batches it stands for: few of the cheapest are measured, see `Reader`; 0: it was not.
        is_first: it is the worker's first batch.
        slow: place among the task's indices, and seconds, of samples that took long.
        sent: when it was given to the workers; 0: it was not.
        wait_began, wait_ended: when ``next`` waited for workers; 0: it did not.
        lacks_tasks: then a worker had no task, as no more batches may be in flight (``prefetch``), or as the pool took
            no more: the user holds too many batches.
        threads: how many workers are threads of this process; 1 if none is.
        per_core: workers for each core that they can use.
        epoch, step: which batch.
        samples: how many are in it; -1: an error stands in its place.
        worker, began, seconds: who read it, when, and for how long, without `write`. -1: the main process.
        turn: when the batch before it was handed out.
        asked, taken: when ``next`` began, and when it returned.
        placing: conversion and copies.
        behind: of these, in which the host waited for a device.
        starts: it is an iterator's first one, and nothing was read before.
        is_lost: a worker ended over it.
        shards: the indices that `slow` counts by; nothing where no sample was slow.
        cause: the largest cause of `waited`.

    Example:
        >>> times = BatchTimes(asked=1.0, taken=1.5, placing=0.25, behind=0.125)
        >>> times.waited, times.weight
        (0.375, 0)
    """

    idle = queued = collate = write = sent = wait_began = wait_ended = 0.0
    began = seconds = turn = asked = taken = placing = behind = per_core = 0.0
    processor = -1.0
    retries = weight = epoch = step = samples = 0
    worker, threads = -1, 1
    is_first = lacks_tasks = starts = is_lost = False
    slow: tuple[tuple[int, float], ...] = ()
    shards: tuple[Any, ...] = ()
    cause = ""

    @property
    def ended(self) -> float:
        """When its worker had read and collated it."""
        return self.began + self.seconds

    @property
    def written(self) -> float:
        """When its worker had put it into its slot."""
        return self.began + self.seconds + self.write

    @property
    def waited(self) -> float:
        """Seconds of ``next``, without those behind a device."""
        return self.taken - self.asked - self.behind


# Run, seq, wanted, buffers, size of the times; the size of the pickle last: with strings in it, it may exceed 4 GiB.
_REPLY = struct.Struct("!qqqIIQ")


def task_of(fields: Any) -> Task:
    """The task, from what `unpack_tasks` has returned for it.

    Raises:
        Exception: its indices cannot be unpickled.
    """
    run, seq, epoch, position, shards, *rest = pickle.loads(fields) if type(fields) is bytes else fields
    if type(shards[0]) is bytes:
        shards = (np.frombuffer(bytearray(shards[0]), np.int64),)
    return Task(run, seq, epoch, position, shards, *rest)


def pack_reply(run: int, seq: int, wanted: int, encoded: Encoded, times: BatchTimes | None = None) -> bytes:
    """One result in the content of a RESULTS message.

    Args:
        run, seq: of the task.
        wanted: how many bytes of a slot its batch needed.
        encoded: the reply; its buffers and places are part of the message's.
        times: of the batch. They are beside the pickle: only when it is made it is known how long that took.
    """
    told = b"" if times is None else pickle.dumps(times, protocol=5)
    head = _REPLY.pack(run, seq, wanted, len(encoded.places), len(told), len(encoded.head))
    return head + told + encoded.head


def unpack_reply(content: memoryview) -> tuple[int, int, int, int, memoryview, memoryview, BatchTimes | None]:
    """The first result in the content: run, seq, wanted, how many buffers, pickle; the rest of it; the times."""
    run, seq, wanted, buffers, told, size = _REPLY.unpack_from(content)
    begin = _REPLY.size + told
    times = pickle.loads(content[_REPLY.size : begin]) if told else None
    return run, seq, wanted, buffers, content[begin : begin + size], content[begin + size :], times


ErrorAction = Literal["raise", "skip", "replace"] | Callable[[Any], Any]
"""What to do with a bad sample: ``"raise"``, ``"skip"``, ``"replace"``, or a function ``(SampleError) -> sample``."""


@dataclass(slots=True)
class Task:
    """One batch to make.

    Not a named tuple, nor is `Result`: one with 14 fields takes 1.3 us to make, a class with slots 0.3.

    Attributes:
        run: which iterator it belongs to.
        seq: number of the batch in the epoch, from 0.
        epoch: number of the epoch.
        position: place of its first sample in the epoch's global order; seeds the global generators.
        shards: the indices of each shard (lists, or int64 arrays where the dataset gathers by them); of the whole
            batch, in a tuple of one, if it has no shards.
        sharded: whether the batch is a list of shards.
        careful: a worker has died, and it is not known over which sample. Note each one; read each alone first, if the
            dataset reads several at once.
        lane: tasks of one lane are read by one worker, number ``lane % num_workers``, in their order. None: by any.
        part: of iterable data; ``shards`` are `PartIndices` then.
    """

    run: int
    seq: int
    epoch: int
    position: int
    shards: tuple[Any, ...]
    sharded: bool
    careful: bool = False
    lane: int | None = None
    part: PartBatch | None = None

    @property
    def fields(self) -> tuple[Any, ...]:
        """The values of all fields, in their order: what workers are sent."""
        return _fields_of_task(self)

    @property
    def key(self) -> int:
        """What the batch's own random numbers are keyed by. The seq of iterable data depends on what is known."""
        return self.seq if self.part is None else self.position

    def error(self, raised: Exception, where: str) -> Exception:
        """What stands in the place of the batch, because the main process could not begin it; see `as_batch_error`."""
        error = as_batch_error(raised, where)
        Location(self.epoch, self.seq).note(error, samples=self.shards[0])
        leave_frames(error)
        return error


@dataclass(slots=True, eq=False)
class Result:
    """What became of one task: a batch (a list of batches if sharded), or an error.

    Attributes:
        run, seq: of the task.
        batch: the finished batch; `NOTHING` if ``on_error`` left no sample of it.
        samples: how many samples are in it.
        error: raised at the batch's place, instead of a batch. On its way between two processes it is encoded
            (`codec.EncodedError`), and so are those of ``skipped``.
        skipped: ``(index, error)`` of the samples that ``on_error`` left out or replaced.
        lost_shards: numbers of the shards that ``on_error`` left no sample of.
        seconds: how long the worker took.
        point: of iterable data: where its part is after this batch. None where that is unknown: the part ends there.
        retries: how many requests of the worker's dataset had to be tried again.
        began: when the worker began, by `host_clock.now`, which all processes of a machine share. The pool that
            receives stamps of another machine moves them.
        worker: the number of the worker; -1: the main process.
        rebuilt: a worker that has ended had the batch before.
        times: what else was measured; None: nothing.
    """

    run: int
    seq: int
    batch: Any = None
    samples: int = 0
    error: BaseException | None = None
    skipped: tuple[tuple[Any, BaseException], ...] = ()
    lost_shards: tuple[int, ...] = ()
    seconds: float = 0.0
    point: PartPoint | None = None
    retries: int = 0
    began: float = 0.0
    worker: int = -1
    rebuilt: bool = False
    times: BatchTimes | None = None

    def __reduce__(self) -> Any:
        return Result, _fields_of_result(self)


_fields_of_task, _fields_of_result = attrgetter(*Task.__slots__), attrgetter(*Result.__slots__)


class Nothing:
    """The batch that is left when every sample of it was skipped, or when the order leaves the batch out."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


@dataclass(frozen=True)
class Job:
    """What all workers of a pool are told once. Worker processes inherit it under fork; otherwise it is published.

    Attributes:
        dataset: the dataset, as the user gave it.
        batchify_fn: samples -> batch; None for the default, which also reads in bulk.
        seed: the loader's seed.
        on_error: see the loader.
        keep_batch: a batch without a good sample is an error, even with ``on_error="skip"``.
        stream: how the dataset is read if it is iterable data.
        base_seed: worker i seeds the global generators with ``base_seed + i`` when it starts, as torch's workers do,
            and not for each batch. None: for each batch.
        in_bulk: read several samples at once where the dataset can.
        keeps_state: the dataset has a state that each worker keeps; it is part of the results.
        tells_epoch: process workers call the dataset's ``set_epoch``.
        worker_init_fn: the pool's, for workers that are processes.
        notes_samples: note each sample on the board before it is read, not only those of careful tasks.
        max_memory: bytes of its own that a worker process may have; None: any number.
    """

    dataset: Any
    batchify_fn: Callable[[list[Any]], Any] | None
    seed: int
    on_error: ErrorAction = "raise"
    keep_batch: bool = False
    stream: Stream | None = None
    base_seed: int | None = None
    in_bulk: bool = True
    keeps_state: bool = False
    tells_epoch: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    notes_samples: bool = False
    max_memory: int | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The user's objects in it, by the names that the user knows."""
        return {name: getattr(self, name) for name in ("dataset", "batchify_fn", "on_error", "worker_init_fn")}


def pack_result(result: Result, slot: SlotWriter) -> Encoded | None:
    """A result without errors whose batch is an array of numbers or a list of such arrays; None for others.

    The others are pickled, their exceptions encoded.

    It takes 5 us, where pickling the classes and the array's own reduction takes 25.

    Args:
        result: what a worker has made.
        slot: where its arrays lie already, or are put if there is room.
    """
    point = result.point
    if result.error is not None or result.skipped or result.lost_shards or result.retries:
        return None
    if point and point.state is not None:
        return None
    batch, is_tensors = result.batch, type(result.batch) is TensorBatch
    if is_tensors:
        batch = batch.arrays
    arrays = batch if type(batch) is list else [batch]
    # If a list holds one array twice, pickle keeps it one array.
    if not all(map(is_plain, arrays)) or len(set(map(id, arrays))) < len(arrays):
        return None
    fields: list[tuple[Any, str, bytearray | None]] = []
    places: list[tuple[int, int]] = []
    buffers: list[memoryview] = []
    for array in arrays:
        nbytes, data = array.nbytes, None
        offset = slot.place(array) if nbytes >= IN_SLOT_BYTES else -1
        if offset < 0 and nbytes < IN_BAND_BYTES:
            data = bytearray(array.tobytes())
        else:
            places.append((offset, nbytes))
            if offset < 0:
                buffers.append(array.reshape(-1).view(np.uint8).data)
        fields.append((array.shape, array.dtype.str, data))
    told = None if point is None else tuple(point)
    numbers = result.samples, result.seconds, result.began, result.worker
    head = pickle.dumps((type(batch) is list, is_tensors, fields, *numbers, told), protocol=5)
    return Encoded(head, tuple(places), tuple(buffers))


def unpack_result(run: int, seq: int, packed: Any, buffers: Sequence[Any], times: BatchTimes | None = None) -> Result:
    """The result that `pack_result` has packed, its arrays over the memory in ``buffers``."""
    is_list, is_tensors, fields, samples, seconds, began, worker, told = packed
    following = iter(buffers)
    arrays = [np.ndarray(shape, dtype, next(following) if data is None else data) for shape, dtype, data in fields]
    point = None if told is None else PartPoint(*told)
    batch = arrays if is_list else arrays[0]
    made = TensorBatch(batch) if is_tensors else batch
    return Result(run, seq, made, samples, None, (), (), seconds, point, 0, began, worker, False, times)


# -- how many batches travel in one message ----------------------------------------------------------------------------

GROUP_SECONDS = 2e-3
"""Work in one message.

Measured (2 workers, 2 cores, medians of 8 epochs in turns; CPU time of the main process, and time, both per batch):

    a group takes                    0.3 ms         1 ms           2 ms           4 ms
    images, 256 of 3 KB              166, 508 us    143, 521 us    106, 472 us    96, 464 us
    rows of 64 float32, 1,024        145, 272       106, 215       101, 209       98, 206
    64 padded texts                  147, 359        86, 264        69, 236       54, 209
    16 numbers                        51, 113        42, 100        43, 104       40, 99

More than 2 ms saves little, and for so long a batch that is finished may wait in its worker."""

MAX_GROUP = 64
"""Batches in one message. 16 numbers a batch, 24 turns: 1.09 times as fast with 32 as with 16, 1.23 with 64."""

HELD = 2
"""Groups that a worker holds: the one it does and one more."""

_MEMORY = 0.1
"""Weight of the newest batch in the mean."""


class Grouping:
    """Learns from the batches that have come how many go together.

    To send a message and to wake the process that waits for it costs 20 to 50 us on each side. A small batch takes less
    to read. So cheap batches go in groups, each about `GROUP_SECONDS` of work. Workers hold `HELD` groups, so that none
    waits for the next. A batch that takes longer is a group by itself. Then a worker holds one batch beyond the one
    that it does: with more, uneven batches would leave one worker with work while others idle.

    Args:
        seconds: work in one message.
        most: batches in one message.
        most_bytes: bytes in one message.
        patient: one batch that took eight times as long as usual does not count, only the second in a row does. Where
            more processes run than there are cores, a batch may take long because its worker had to wait.

    Attributes:
        size: batches in a group, at least 1.

    Example:
        >>> grouping = Grouping()
        >>> for _ in range(100): size = grouping.note(190e-6)
        >>> grouping.size
        10
        >>> for _ in range(100): size = grouping.note(5e-3)
        >>> grouping.size
        1
    """

    def __init__(
        self, seconds: float = GROUP_SECONDS, most: int = MAX_GROUP, *, most_bytes: float = inf, patient: bool = False
    ) -> None:
        self._seconds, self._most, self._most_bytes, self._patient = seconds, most, most_bytes, patient
        self._mean = seconds
        self._was_long = False
        self.size = 1

    def note(self, seconds: float, nbytes: int = 0) -> int:
        """A worker took so long for a batch; how many batches of ``nbytes`` go together from now on."""
        is_long, was_long = seconds > 8 * self._mean, self._was_long
        self._was_long = is_long
        if is_long and (was_long or not self._patient):
            # It counts in full: the next ones may take as long, and the main process waits for them.
            self._mean = seconds
        elif not is_long:
            self._mean += _MEMORY * (seconds - self._mean)
        most = min(self._most, self._most_bytes / max(nbytes, 1), self._seconds / max(self._mean, 1e-9))
        self.size = max(1, int(most))
        return self.size
