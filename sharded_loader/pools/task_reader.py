"""Readers for a job, and task handling in workers with their own dataset.

    reader_for(job) -> Reader           imports the reader of iterable data only if needed
    stack_of(frame, until) -> text      what a thread reads, and the user's frames of it
    write_stacks(until)                 the same for all other threads, to stderr
    TaskReader(number, ...)             for workers with their own dataset, wherever they run:
      begin(load) -> None, or an encoded error    takes the job: reader, torch's worker info, worker_init_fn
      answer(run, seq, fields, memory) -> reply   reads a task with seeded generators, and packs the result

`process.worker` feeds it messages and slots from a pipe, `ray.actor` Ray calls. It is used by one thread. Exceptions of
user code are part of the result; a result that cannot be pickled is the error of its batch. Nothing here imports torch.
"""

from __future__ import annotations

import faulthandler
import sys
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from threading import get_ident
from types import FrameType

import numpy as np

from sharded_loader.base import host_clock
from sharded_loader.base.errors import FULL_TRACEBACKS, Location, add_note, as_exception
from sharded_loader.base.imports import call_after_import
from sharded_loader.base.notices import is_ours
from sharded_loader.base.system import is_on, write_to_stderr
from sharded_loader.batching.protocol import Array
from sharded_loader.engine.heartbeat import BEGINNING, RUN, SAMPLE, SENDING, SEQ, SHARD, UNUSED, Heartbeat, phase
from sharded_loader.engine.messages import Job, Result, Task, pack_reply, pack_result, task_of
from sharded_loader.engine.reader import Reader, plain_indices
from sharded_loader.memory.codec import Encoded, End, HostParts, Movers, SlotWriter, encode, encode_error, host_parts
from sharded_loader.randomness.rng import derive_key, seed_as_torch, seed_globals, seeded_globals


def reader_for(job: Job, *, readers: int = 1, seed: Callable[[int, int], None] | None = None) -> Reader:
    """Return the reader of a job. ``readers`` and ``seed`` are those of `StreamReader`."""
    if job.stream is None and not job.keeps_state:
        return Reader(job, sets_epoch=seed is not None and job.sets_epoch)
    from sharded_loader.data.inspection import keeps_place
    from sharded_loader.streams.reader import StatefulReader, StreamReader

    if job.stream is None:
        return StatefulReader(job)
    # The drop-in (no sets_epoch) has one iterator at a time, and reads the user's own object, as torch does.
    several = job.stream.parts > readers or (job.stream.sets_epoch and keeps_place(job.dataset))
    return StreamReader(job, several=several, alone=seed is not None, seed=seed)


def _globals_key(seed: int, epoch: int, position: int) -> int:
    """Return the seed of the global generators for one batch; see `seed_globals`."""
    return derive_key(seed, "batch globals", epoch, position)


def seeded_as_worker(seed: int, task: Task) -> AbstractContextManager[None]:
    """Seed the global generators inside the context as a process worker does for a batch."""
    return seeded_globals(_globals_key(seed, task.epoch, task.position), whole=False)


def _reading_in(frame: FrameType | None) -> str:
    """Describe what a thread reads, from the locals of its frames (no overhead for reading); "": nothing."""
    while frame is not None and frame.f_code is not Reader.read.__code__:
        frame = frame.f_back
    # The local variable of `Reader.read`. Without the GIL, looking at another thread's variables may crash Python.
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    scope = frame.f_locals.get("scope") if frame is not None and has_gil else None
    if scope is None:
        return ""
    task, place, now = scope.task, scope.place, host_clock.now()
    doing = f"reading sample {plain_indices(scope.indices)[place]!r}" if place >= 0 else phase(scope.heartbeat)
    took = f"which it began {now - scope.began:.0f} s ago"
    if scope.stamps and place >= 0:
        took = f"for {now - scope.stamps[-1]:.0f} s"
    shard = f", shard {scope.heartbeat[SHARD]}" if task.sharded else ""
    return f"{doing} of epoch {task.epoch}, batch {task.seq}{shard}, {took}"


def stack_of(newest: FrameType, until: str) -> str:
    """Describe what a thread reads, with the user's frames.

    ``until`` is the file that calls user code; frames before it belong to the process that forked this one.
    """
    frames = [frame for frame, _ in traceback.walk_stack(newest)]
    ours = [number for number, frame in enumerate(frames) if frame.f_code.co_filename == until]
    users = [one for one in frames[: ours[0] if ours else 0] if not is_ours(one.f_code.co_filename)]
    where = _reading_in(newest)
    stack = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in users[::-1]).format()
    text = "".join(["The thread that reads (most recent call last):\n", *stack]) if stack else ""
    return (f"It is {where}.\n" if where else "") + text


def write_stacks(until: str) -> None:
    """Write `stack_of` the reading thread to stderr, or all frames if it has none of the user's."""
    frames = [frame for thread, frame in sys._current_frames().items() if thread != get_ident()]
    text = "".join(stack_of(frame, until) for frame in frames)
    write_to_stderr(text)
    if "most recent call" not in text or is_on(FULL_TRACEBACKS):
        faulthandler.dump_traceback(2, all_threads=True)


class TaskReader:
    """Reads the tasks of one worker.

    Attributes:
        name: name of the worker in errors.
        heartbeat: progress of the worker.
        job: None before `begin`.
        cancelled: runs whose tasks are not to be read.
    """

    def __init__(self, number: int, num_workers: int, name: str) -> None:
        self._number = number
        self._num_workers = num_workers
        self.name = name
        self.heartbeat: Heartbeat = list(UNUSED)
        self.job: Job | None = None
        self.cancelled: set[int] = set()
        self._reader: Reader | None = None

    def explain(self, error: BaseException, *, in_start: bool) -> None:
        """Add possible causes to an error. A hook for subclasses."""

    def begin(self, load: Callable[[], Job]) -> bytes | None:
        """Take the job that `load` returns. Return an encoded error if that fails."""
        try:
            self.take(load())
        except BaseException as error:
            failure = as_exception(error, "while a worker started")
            add_note(failure, f"sharded_loader: while {self.name} started (unpickling the dataset, worker_init_fn)")
            self.explain(failure, in_start=True)
            return encode(encode_error(failure)).pickled
        return None

    def take(self, job: Job) -> None:
        """Read this job from now on. ``worker_init_fn`` is called, which may change the dataset, and raise anything."""
        self.job = job
        base, number = job.base_seed, self._number
        key = derive_key(job.seed, "worker_init_fn", number)
        # A derived key rather than seed + number, which worker 1 of one run would share with worker 0 of the next.
        seed = key & 0x7FFFFFFFFFFFFFFF if base is None else base + number
        call_after_import("torch", lambda: _tell_torch(number, self._num_workers, seed, job))
        if base is not None:
            seed_as_torch(base, number)
        if job.worker_init_fn is not None:
            if base is None:
                seed_globals(key)
            job.worker_init_fn(number)
        self._reader = reader_for(job, readers=self._num_workers, seed=self._seed_globals)

    def answer(
        self, run: int, seq: int, fields: object, memory: Array | None, more: Callable[..., Array | None] | None = None
    ) -> tuple[bytes, Encoded, SlotWriter]:
        """Read one task, unless its run is cancelled. Return the packed reply, its buffers, and their slot.

        ``more(run, seq, nbytes)`` is asked for a larger slot if the batch exceeds its own.
        """
        result, slot, task = Result(run, seq), SlotWriter(None), None
        if run not in self.cancelled:
            result, slot, task = self.read(run, seq, fields, memory)
            if result.error is not None:
                self.explain(result.error, in_start=False)
        encoded, times = self.pack(result, slot, task), result.times
        if more is not None and encoded.buffers and (larger := more(run, seq, slot.wanted)) is not None:
            slot = SlotWriter(larger)
            encoded = self.pack(result, slot, task)
        if times is not None and self._reader is not None:
            self._reader.timing.free[self._number] = now = host_clock.now()
            times.write = now - result.began - result.seconds
        return pack_reply(run, seq, slot.wanted, encoded, times), encoded, slot

    def read(self, run: int, seq: int, fields: object, memory: Array | None) -> tuple[Result, SlotWriter, Task | None]:
        """Read one task into ``memory``. Return the result, its slot, and the task (None if unreadable)."""
        assert self._reader is not None  # set by the job
        slot, heartbeat = SlotWriter(memory), self.heartbeat
        heartbeat[RUN], heartbeat[SEQ], heartbeat[SHARD], heartbeat[SAMPLE] = run, seq, 0, BEGINNING
        try:
            task = task_of(fields)
        except Exception as error:
            add_note(error, f"sharded_loader: batch {seq}: its indices could not be unpickled in {self.name}")
            return Result(run, seq, error=error), slot, None
        if task.is_suspect:
            self._reader.probe(task, heartbeat)
        empty = np.empty if memory is None else slot.empty
        self._seed_globals(task.epoch, task.position)
        result = self._reader.read(task, self.name, empty, heartbeat, self._number)
        if result.times is not None and result.times.retries:
            result = replace(result, retries=result.times.retries)
        heartbeat[SAMPLE] = SENDING
        return result, slot, task

    def _seed_globals(self, epoch: int, position: int) -> None:
        assert self.job is not None  # set before a batch is read
        if self.job.base_seed is None:
            seed_globals(_globals_key(self.job.seed, epoch, position), whole=False)

    def pack(self, result: Result, slot: SlotWriter, task: Task | None = None) -> Encoded:
        """Encode a result; one that cannot be pickled becomes an error."""
        try:
            return pack_result(result, slot) or _encode(result, slot)
        except BaseException as unpicklable:  # a __reduce__ may call sys.exit
            failure = TypeError(
                f"the batch cannot leave its worker process ({type(unpicklable).__name__}: {unpicklable}): "
                f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
            )
            if task is not None:
                Location(task.epoch, task.seq, None, self.name).note(failure, samples=task.shards[0])
            failure.__cause__ = unpicklable
            point = None if result.point is None or result.point.state is not None else result.point
            return _encode(Result(result.run, result.seq, error=failure, point=point), SlotWriter(None))


def _encode(result: Result, slot: SlotWriter) -> Encoded:
    skipped = tuple((index, encode_error(error)) for index, error in result.skipped)
    error = None if result.error is None else encode_error(result.error)
    reply = replace(result, error=error, skipped=skipped, times=None)  # type: ignore[arg-type]  # these lie beside it
    objects, movers = host_parts(result.batch)
    if objects or movers or skipped:
        return encode(HostParts([*objects, skipped], Movers, movers, End, reply), slot)
    return encode(reply, slot)


def _tell_torch(number: int, num_workers: int, seed: int, job: Job) -> None:
    from sharded_loader.streams.worker_info import announce_worker

    announce_worker(number, num_workers, seed, job)
