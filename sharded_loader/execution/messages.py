"""What travels between the pipeline, the pools and the workers.

    Task(run, seq, ...)    pipeline -> pool -> worker
    Result(run, seq, ...)  worker -> pool -> pipeline
    Job                    loader -> pool -> worker, once

Between processes each message is a head and buffers (`memory.codec`). The head begins with its kind and with
(run, seq) in plain bytes, so that either side knows what a message is about even when the pickle behind it
cannot be read: a batch that cannot be unpickled is one batch's error.

    TASK    run seq  slot, pickled Task     trainer -> worker
    CANCEL  run                             do not begin the tasks of this run
    SEGMENT          number, size, name     shared memory; without a name a descriptor follows
    JOB              pickled NewJob; its buffers lie in the segment that came before, or follow
    READY                                   worker -> trainer: it has its dataset
    FAILED           pickled EncodedError   it could not take the job
    RESULT  run seq  pickled Reply; its buffers lie in the task's slot, or follow
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sharded_loader.memory.codec import EncodedError
from sharded_loader.memory.slot import Slot

TASK, CANCEL, SEGMENT, JOB, READY, FAILED, RESULT = b"T", b"C", b"S", b"J", b"Y", b"F", b"R"

_HEAD = struct.Struct("!cqq")
_SLOT = struct.Struct("!qqq")
_WANTED = struct.Struct("!q")


def pack_head(kind: bytes, run: int = 0, seq: int = 0, content: bytes = b"") -> bytes:
    """The head of a message."""
    return _HEAD.pack(kind, run, seq) + content


def unpack_head(head: Any) -> tuple[bytes, int, int, memoryview]:
    """Kind, run, seq and the pickle of a head."""
    kind, run, seq = _HEAD.unpack_from(head)
    return kind, run, seq, memoryview(head)[_HEAD.size :]


def pack_slot(slot: Slot | None) -> bytes:
    """The slot of a task, before its pickle."""
    return _SLOT.pack(*((-1, 0, 0) if slot is None else (slot.segment, slot.offset, slot.nbytes)))


def pack_wanted(nbytes: int) -> bytes:
    """How many bytes a batch needed, before the pickle of its reply."""
    return _WANTED.pack(nbytes)


def unpack_wanted(content: memoryview) -> tuple[int, memoryview]:
    """How many bytes, and the pickle behind it."""
    return _WANTED.unpack_from(content)[0], content[_WANTED.size :]


def unpack_slot(content: memoryview) -> tuple[Slot | None, memoryview]:
    """The slot, and the pickle behind it."""
    segment, offset, nbytes = _SLOT.unpack_from(content)
    return None if segment < 0 else Slot(segment, offset, nbytes), content[_SLOT.size :]


OnError = str | Callable[[Any], Any]
"""``"raise"``, ``"skip"``, ``"replace"`` or a callable ``(SampleError) -> sample``."""


class Task(NamedTuple):
    """One batch to make. A named tuple, like `Result`: made and pickled in half the time of a frozen dataclass.

    Attributes:
        run: which iterator it belongs to.
        seq: number of the batch in the epoch, from 0.
        epoch: number of the epoch.
        position: place of its first sample in the epoch's global order; seeds the global generators.
        shards: the indices of each shard; of the whole batch, in a list of one, if it has no shards.
        sharded: whether the batch is a list of shards.
    """

    run: int
    seq: int
    epoch: int
    position: int
    shards: tuple[Sequence[Any], ...]
    sharded: bool


class Result(NamedTuple):
    """What became of one task: a batch (a list of batches if sharded), or an error.

    Attributes:
        run, seq: of the task; `run` is `ANY_RUN` for an event that belongs to no task.
        batch: the finished batch; `NOTHING` if ``on_error`` left no sample of it.
        samples: how many samples are in it.
        error: raised at the batch's place, instead of a batch.
        skipped: ``(index, error)`` of the samples that ``on_error`` left out or replaced.
        lost_shards: numbers of the shards that ``on_error`` left no sample of.
        seconds: how long the worker took.
        at_once: the error is raised by the next call, whatever its place in the order.
    """

    run: int
    seq: int
    batch: Any = None
    samples: int = 0
    error: BaseException | None = None
    skipped: tuple[tuple[Any, BaseException], ...] = ()
    lost_shards: tuple[int, ...] = ()
    seconds: float = 0.0
    at_once: bool = False


ANY_RUN = -1


class Nothing:
    """The batch that is left when every sample of it was skipped."""

    def __reduce__(self) -> str:
        return "NOTHING"


NOTHING = Nothing()


@dataclass(frozen=True)
class Job:
    """What all workers of a pool are told once.

    Attributes:
        dataset: the dataset, as the user gave it.
        batchify_fn: samples -> batch; None for the default, which also reads in bulk.
        seed: the loader's seed.
        on_error: see the loader.
        keep_batch: a batch without a good sample is an error, even with ``on_error="skip"``.
    """

    dataset: Any
    batchify_fn: Callable[[list[Any]], Any] | None
    seed: int
    on_error: OnError = "raise"
    keep_batch: bool = False


@dataclass(frozen=True)
class NewJob:
    """What a worker process is to read: inherited under fork, else published."""

    job: Job
    worker_init_fn: Callable[[int], Any] | None


class Reply(NamedTuple):
    """A result whose exceptions are encoded."""

    result: Result
    error: EncodedError | None = None
    skipped: tuple[tuple[Any, EncodedError], ...] = ()
