"""Messages between the pipeline, the pools and the workers.

    Job        loader -> pool -> worker, once     dataset, batchify_fn, seed: whatever stays the same
    Task       pipeline -> pool -> worker         one batch to read: run (iterator), seq (batch index), sample indices
    Result     worker -> pool -> pipeline         the batch or its error, under the same (run, seq)

Iterable data is cut into parts (stream shards), each read in its own order. The job holds their layout (`Stream`), a
task names a part's batch (`PartBatch`, `PartIndices`), and its result reports the part's progress (`PartPoint`).

Between processes a message is a header and out-of-band buffers (`memory.codec`, `pools.process.link`). Run and seq are
packed outside the user's objects, so a batch that cannot be unpickled is an error of that batch alone. When a worker
dies, the pool sends its tasks to another one, perhaps marked as a suspect.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import numpy as np

from sharded_loader.base.errors import Location, as_batch_error, leave_frames
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.memory.codec import IN_BAND_BYTES, IN_SLOT_BYTES, Encoded, SlotWriter, is_plain


class Stream(NamedTuple):
    """Layout of iterable data: parts, each cut into batches of ``batch_size``.

    Attributes:
        drops_last: drop the incomplete batch at the end of a part.
        endless: a part that has ended starts over, and no batch is short.
        sets_epoch: call the dataset's ``set_epoch`` when a part is opened.
    """

    parts: int
    batch_size: int
    drops_last: bool = False
    endless: bool = False
    sets_epoch: bool = True


class PartPoint(NamedTuple):
    """Progress of a part of iterable data, between two batches.

    Attributes:
        passes, samples: current pass over the part, which is the epoch unless parts start over; samples read in it.
        checksum: of the first sample of each batch; see `streams.reader`.
        state: of the dataset's own ``state_dict``, or None.
        asked: the dataset has asked for its part number. Not in a saved state.
    """

    batches: int = 0
    passes: int = 0
    samples: int = 0
    checksum: int = 0
    ended: bool = False
    state: Any = None
    asked: bool = False


class PartBatch(NamedTuple):
    """The batch of iterable data that a task asks for: number ``batch`` of part ``number``.

    Attributes:
        stream, oldest: ids of this reading (an epoch), and of the oldest one whose parts must stay open.
        point: progress at or before this batch, from which a worker resumes that does not have the part open.
    """

    stream: int
    oldest: int
    number: int
    batch: int
    point: PartPoint

    def is_same(self, other: PartBatch | None) -> bool:
        return other is not None and (other.stream, other.number) == (self.stream, self.number)


class PartIndices(Sequence[Any]):
    """Indices of consecutive samples of a part: ``(part, 0)``, ``(part, 1)``, ... Slices are `PartIndices` too.

    Indices with a method `cut` divide themselves into shards. They have ``rows``, which shards do not break: here
    samples, in a batch of a packing batch sampler rows of samples. The latter also have ``taken(positions)``, the
    indices at these positions in the same rows.

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

    rows = property(__len__)

    def __getitem__(self, place: Any) -> Any:
        selected = self.places[place]
        return PartIndices(self.part, selected) if isinstance(place, slice) else (self.part, selected)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(repeat(self.part), self.places)

    def cut(self, sizes: Iterable[int]) -> list[PartIndices]:
        """Divide the rows into shards of the given sizes. Empty shards are left out."""
        return cut(self, sizes)

    def __reduce__(self) -> Any:
        return PartIndices, (self.part, self.places)


def cut(items: Any, sizes: Iterable[int]) -> list[Any]:
    """Return the consecutive parts of a sequence that have these sizes; those of size 0 are left out.

    Example:
        >>> cut("abcd", [3, 0, 1])
        ['abc', 'd']
    """
    return [items[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0)) if begin < end]


class BatchTimes(SimpleNamespace):
    """Measurements of one batch. The worker, the pipeline and ``next`` each fill in their own.

    Stamps are of `host_clock.now` in the main process, durations are seconds.

    Attributes:
        idle: from the end of the worker's previous batch to the start of this one.
        processor, queued: CPU time of the worker (negative: not measured), and its wait for a core. The rest of
            ``seconds`` is other waiting, such as for files.
        collate, write: time in ``batchify_fn``, and to write the batch into its slot.
        retries: requests of the dataset that were retried. `Result` counts them.
        weight: number of batches it stands for, as few of the cheapest are measured (see `Timing`); 0: not measured.
        is_first, starts: the worker's first batch; an iterator's first one, with nothing read before.
        slow, shards: position and seconds of slow samples; the indices that the positions refer to.
        sent, wait_began, wait_ended: stamps of submission to the pool and of the wait of ``next`` for workers; 0: none.
        lacks_tasks: meanwhile a worker had no task: ``prefetch`` batches were in flight, or the user held too many.
        threads, per_core: number of workers that are threads of this process, or 1; workers per usable core.
        samples: number of samples; -1 for an error in the batch's place.
        worker, began, seconds: reader (-1: the main process), start, and duration without `write`.
        turn, asked, taken: stamps of the delivery of the batch before, and of the start and end of this ``next``.
        placing, behind: time for conversion and copies; the part of it in which the host waited for a device.
        is_lost: a worker died over it.
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
        """Stamp at which the worker had read and collated it."""
        return self.began + self.seconds

    @property
    def written(self) -> float:
        """Stamp at which the worker had written it into its slot."""
        return self.began + self.seconds + self.write

    @property
    def waited(self) -> float:
        """Seconds of ``next``, without waits for a device."""
        return self.taken - self.asked - self.behind


# Run, seq, wanted, buffers, size of the times, size of the pickle: 64 bits, because strings may make it exceed 4 GiB.
_REPLY = struct.Struct("!qqqIIQ")


def task_of(fields: Any) -> Task:
    """Return the task from the fields that `unpack_tasks` returned. Raises if its indices cannot be unpickled."""
    run, seq, epoch, position, shards, *rest = pickle.loads(fields) if type(fields) is bytes else fields
    if type(shards[0]) is bytes:
        shards = (np.frombuffer(bytearray(shards[0]), np.int64),)
    return Task(run, seq, epoch, position, shards, *rest)


def pack_reply(run: int, seq: int, wanted: int, encoded: Encoded, times: BatchTimes | None = None) -> bytes:
    """Pack one result for a RESULTS message. The times stay outside the pickle: they include the time to make it."""
    packed_times = b"" if times is None else pickle.dumps(times, protocol=5)
    header = _REPLY.pack(run, seq, wanted, len(encoded.places), len(packed_times), len(encoded.pickled))
    return header + packed_times + encoded.pickled


def unpack_reply(content: memoryview) -> tuple[int, int, int, int, memoryview, memoryview, BatchTimes | None]:
    """Unpack the first result: run, seq, wanted, number of buffers, pickle; remaining content; times."""
    run, seq, wanted, buffers, times_size, size = _REPLY.unpack_from(content)
    begin = _REPLY.size + times_size
    times = pickle.loads(content[_REPLY.size : begin]) if times_size else None
    return run, seq, wanted, buffers, content[begin : begin + size], content[begin + size :], times


ErrorAction = Literal["raise", "skip", "replace", "refill"] | Callable[[Any], Any]
"""Action for a bad sample; a function is ``(SampleError) -> sample``."""


@dataclass(slots=True)
class Task:
    """One batch to read.

    A dataclass with slots, as is `Result`: a named tuple of 14 fields takes 1.3 us to make, this takes 0.3 us.

    Attributes:
        run: the iterator that it belongs to.
        seq: batch index in the epoch, from 0.
        position: of its first sample in the epoch's global order; seeds the global generators.
        shards: the indices of each shard (lists, or int64 arrays where the dataset gathers by them). A batch without
            shards is a tuple of one.
        sharded: the batch is a list of shards.
        is_suspect: a worker has died over the task. Each sample is recorded, and before a bulk read each is read alone.
        lane: worker ``lane % num_workers`` reads all tasks of a lane, in order. None: any worker.
        part: of iterable data, whose ``shards`` are `PartIndices`.
        share: of a global batch: samples of it that count, and the factor for their loss; None: a batch of one rank.
    """

    run: int
    seq: int
    epoch: int
    position: int
    shards: tuple[Any, ...]
    sharded: bool
    is_suspect: bool = False
    lane: int | None = None
    part: PartBatch | None = None
    share: tuple[int, float] | None = None

    @property
    def fields(self) -> tuple[Any, ...]:
        """Values of all fields, in order: the form that is sent to workers."""
        return _fields_of_task(self)

    @property
    def key(self) -> int:
        """Key of the batch's random numbers. The seq of iterable data depends on which ends of parts were known."""
        return self.seq if self.part is None else self.position

    def error(self, raised: Exception, where: str) -> Exception:
        """Return the error that takes the batch's place if the main process cannot prepare it; see `as_batch_error`."""
        error = as_batch_error(raised, where)
        Location(self.epoch, self.seq).note(error, samples=self.shards[0])
        leave_frames(error)
        return error


@dataclass(slots=True, eq=False)
class Result:
    """Outcome of one task: a batch (a list of batches if sharded) or an error.

    Attributes:
        batch, samples: the batch and its size; `NOTHING` if ``on_error`` left no sample of it.
        error: raised in the batch's place. Between processes, errors are encoded (`codec.EncodedError`).
        skipped: ``(index, error)`` of the samples that ``on_error`` left out or replaced.
        lost_shards: numbers of the shards that ``on_error`` left no sample of.
        seconds, began: duration, and start by `host_clock.now`, which all processes of a machine share. A pool with
            workers on other machines converts their stamps.
        point: progress of the part after this batch. None: unknown, and the part ends here.
        retries: requests of the dataset that were retried.
        worker: number of the worker; -1: the main process.
        rebuilt: a worker that had the batch before has ended.
        read: indices of the samples in each shard, if they differ from those of the task; otherwise empty.
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
    read: tuple[Any, ...] = ()

    def __reduce__(self) -> Any:
        return Result, _fields_of_result(self)


_fields_of_task, _fields_of_result = attrgetter(*Task.__slots__), attrgetter(*Result.__slots__)


class Nothing:
    """Batch without samples: all were skipped, or the order leaves the batch out."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


@dataclass(frozen=True)
class Job:
    """Configuration that all workers of a pool get once: inherited under fork, otherwise published.

    Attributes:
        batchify_fn: samples -> batch; None for the default, which also reads in bulk.
        keep_batch: a batch without a good sample is an error, even with ``on_error="skip"``.
        stream: layout of iterable data; None for data with an index.
        base_seed: worker i seeds the global generators once, with ``base_seed + i``, as in torch; None: for each batch.
        in_bulk: read several samples at once where the dataset can.
        keeps_state: the dataset has a state that each worker keeps; results include it.
        sets_epoch: worker processes call the dataset's ``set_epoch``.
        notes_samples: record each sample of every task in the heartbeat before it is read.
        max_memory: private bytes that a worker process may use; None: no limit.
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
    sets_epoch: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    notes_samples: bool = False
    max_memory: int | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """The user's objects, by the names that the user knows."""
        return {name: getattr(self, name) for name in ("dataset", "batchify_fn", "on_error", "worker_init_fn")}


def pack_result(result: Result, slot: SlotWriter) -> Encoded | None:
    """Pack a result whose batch is an array of numbers or a list of such arrays; return None for any other.

    Takes 5 us; pickling the classes and the arrays' own reduction takes 25. Arrays go into ``slot`` if they fit.
    """
    point = result.point
    if result.error is not None or result.skipped or result.lost_shards or result.retries or result.read:
        return None
    if point and point.state is not None:
        return None
    batch, is_tensors = result.batch, type(result.batch) is TensorBatch
    if is_tensors:
        batch = batch.arrays
    arrays = batch if type(batch) is list else [batch]
    # An array that is twice in the list must stay one array, which pickle ensures.
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
    progress = None if point is None else tuple(point)
    numbers = result.samples, result.seconds, result.began, result.worker
    pickled = pickle.dumps((type(batch) is list, is_tensors, fields, *numbers, progress), protocol=5)
    return Encoded(pickled, tuple(places), tuple(buffers))


def unpack_result(run: int, seq: int, packed: Any, buffers: Sequence[Any], times: BatchTimes | None = None) -> Result:
    """Return the result that `pack_result` has packed, with its arrays over the memory of ``buffers``."""
    is_list, is_tensors, fields, samples, seconds, began, worker, progress = packed
    remaining = iter(buffers)
    arrays = [np.ndarray(shape, dtype, next(remaining) if data is None else data) for shape, dtype, data in fields]
    point = None if progress is None else PartPoint(*progress)
    batch: Any = arrays if is_list else arrays[0]
    batch = TensorBatch(batch) if is_tensors else batch
    return Result(run, seq, batch, samples, None, (), (), seconds, point, 0, began, worker, False, times)


# -- number of batches in one message ----------------------------------------------------------------------------------

GROUP_SECONDS = 4e-3
"""Work in one message. More gains little, and delays finished batches by as much.

Measured (2 workers, 2 cores, medians of 8 epochs in turns; CPU time of the main process, and time, both per batch):

    a group takes                    0.3 ms         1 ms           2 ms           4 ms
    images, 256 of 3 KB              166, 508 us    143, 521 us    106, 472 us    96, 464 us
    rows of 64 float32, 1,024        145, 272       106, 215       101, 209       98, 206
    64 padded texts                  147, 359        86, 264        69, 236       54, 209
    16 numbers                        51, 113        42, 100        43, 104       40, 99
"""

MAX_BYTES = 16 << 20
"""Memory of the batches in one message, unless one batch is larger."""

MAX_GROUP = 64
"""Batches in one message. 16 numbers a batch, 24 turns: 1.09 times as fast with 32 as with 16, 1.23 with 64."""

HELD = 2
"""Groups that a worker holds: one in work, one queued."""

_MEMORY = 0.1


class Grouping:
    """Number of batches in one message, learned from the time that workers take for a batch.

    Sending a message and waking the receiver costs 20 to 50 us on each side, more than reading a small batch. So cheap
    batches travel in groups of about `GROUP_SECONDS` of work, and a worker holds `HELD` groups so that it never waits.
    An expensive batch is a group of its own: with more in its queue, one worker would be busy while others idle.

    Args:
        seconds, most, most_bytes: limits of one message, in seconds of work, batches and bytes.
        patient: ignore a single batch that takes eight times the mean; the second in a row counts. Set where processes
            outnumber cores, so that a batch may be slow because its worker waited for one.

    Attributes:
        mean: seconds per batch, of recent ones.

    Example:
        >>> grouping = Grouping()
        >>> for _ in range(100): size = grouping.note(390e-6)
        >>> grouping.size
        10
        >>> for _ in range(100): size = grouping.note(5e-3)
        >>> grouping.size
        1
    """

    def __init__(
        self, seconds: float = GROUP_SECONDS, most: int = MAX_GROUP, most_bytes: int = MAX_BYTES, patient: bool = False
    ) -> None:
        self._seconds, self._most, self._most_bytes, self._patient = seconds, most, most_bytes, patient
        self.mean = seconds
        self._was_long = False
        self.size = 1

    def note(self, seconds: float, nbytes: int = 0) -> int:
        """Record the seconds that a worker took for a batch of ``nbytes``, and return the new group size."""
        is_long, was_long = seconds > 8 * self.mean, self._was_long
        self._was_long = is_long
        if is_long and (was_long or not self._patient):
            # Replaces the mean: the next ones may take as long, and the main process waits for them.
            self.mean = seconds
        elif not is_long:
            self.mean += _MEMORY * (seconds - self.mean)
        most = min(self._most, self._most_bytes / max(nbytes, 1), self._seconds / max(self.mean, 1e-9))
        self.size = max(1, int(most))
        return self.size
