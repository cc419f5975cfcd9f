"""A worker process, from its first line to its last.

    receiver thread:  pipe -> inbox                            always drains, so the trainer's sends never wait
    main thread:      inbox -> Reader -> slot, encode -> pipe

The job (the dataset and how to read it) comes by inheritance under fork, else as the first message. The
process ends when the pipe does: the trainer closed it, or is gone. A main thread that is in the user's code
then gets `GRACE` seconds, because nobody waits for what it does.

SIGINT is the trainer's affair: it is ignored here (and was blocked while the process started). BLAS and
OpenMP are limited to one thread: a pool is parallel by its processes.

Nothing here imports torch. If the user's dataset does, torch is told that it is in a worker, also when the
import comes later, in the middle of a batch.
"""

from __future__ import annotations

import errno
import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from typing import Any

import numpy as np

from sharded_loader.errors import Place, add_note, as_exception
from sharded_loader.execution.messages import (
    CANCEL,
    FAILED,
    JOB,
    READY,
    RESULT,
    SEGMENT,
    Job,
    NewJob,
    Reply,
    Result,
    Task,
    pack_head,
    pack_wanted,
    unpack_head,
    unpack_slot,
)
from sharded_loader.execution.pools.link import Message, receive_descriptor, receive_message, send_message
from sharded_loader.execution.preload import THREADS
from sharded_loader.execution.reader import Reader
from sharded_loader.imports import call_after_import
from sharded_loader.memory.codec import SlotWriter, decode, encode, encode_error
from sharded_loader.memory.segments import attach
from sharded_loader.rng import derive_key, seed_globals

GRACE = 0.3
"""Seconds between end-of-file and the end of a worker that is in the user's code."""


class _Worker:
    def __init__(self, conn: Any, number: int, num_workers: int) -> None:
        self._conn = conn
        self._number = number
        self._num_workers = num_workers
        self._name = f"worker {number} (pid {os.getpid()})"
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._finished = threading.Event()
        self._job: Job | None = None
        self._reader: Reader | None = None
        self._segments: dict[int, np.ndarray[Any, Any]] = {}
        self._refused: dict[int, OSError] = {}

    # -- receiver thread ------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while True:
                message = receive_message(self._conn)
                kind, run, seq, content = unpack_head(message.head)
                if kind == CANCEL:
                    self._cancelled.add(run)
                elif kind == SEGMENT:
                    self._attach(run, seq, bytes(content).decode() or None)
                else:  # the user's objects are unpickled by the main thread
                    self._inbox.put(message)
        except (EOFError, OSError):
            self._inbox.put(None)
            if not self._finished.wait(GRACE):
                os._exit(1)
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # nobody would feed the main thread any more; the trainer notices the death

    def _attach(self, number: int, nbytes: int, name: str | None) -> None:
        """Map a segment; without one, its batches go through the pipe, and its dataset cannot be taken."""
        fd = None
        try:
            fd = None if name else receive_descriptor(self._conn)
            # Batches are written for the trainer to see; a dataset's segment (negative) stays private.
            segment = attach(number, nbytes, fd, name, private=number < 0)
        except EOFError:
            raise
        except OSError as error:
            self._refused[number] = error
            if number >= 0:
                # No warning: where the user makes errors of those, the worker would die of it.
                text = f"{self._name} sends batches through the pipe, which is slower: {_explain(error)}"
                print(f"sharded_loader: {text}", file=sys.stderr, flush=True)
        else:
            self._segments[number] = np.frombuffer(segment.mapping, np.uint8)

    # -- main thread ----------------------------------------------------------------------------------------

    def run(self, inherited: NewJob | None) -> None:
        threading.Thread(target=self._receive, name="sharded_loader-receiver", daemon=True).start()
        taken = inherited is None or self._take_job(inherited)
        while taken and (message := self._inbox.get()) is not None:
            kind, run, seq, content = unpack_head(message.head)
            if kind == JOB:
                taken = self._take_job(message)
            elif run in self._cancelled:
                self._send(pack_head(RESULT, run, seq), Reply(Result(run, seq)), SlotWriter(None))
            else:
                self._do(run, seq, content)
            del message, content
        self._finished.set()

    def _take_job(self, source: NewJob | Message) -> bool:
        first = self._job is None
        try:
            new = self._load(source) if isinstance(source, Message) else source
            self._job = new.job
            _prepare_torch(self._number, self._num_workers, new.job)
            if first and new.worker_init_fn is not None:
                seed_globals(_worker_key(new.job, self._number))
                new.worker_init_fn(self._number)
            self._reader = Reader(new.job, tells_epoch=True)
        except BaseException as error:
            failure = as_exception(error, "while a worker started")
            add_note(failure, f"sharded_loader: while {self._name} started (unpickling the dataset, worker_init_fn)")
            self._send(pack_head(FAILED), encode_error(failure))
            return False
        self._send(pack_head(READY), None)
        return True

    def _load(self, message: Message) -> NewJob:
        _, number, _, content = unpack_head(message.head)
        memory = self._segments.pop(number, None)
        if (error := self._refused.pop(number, None)) is not None:
            raise OSError(error.errno, f"the dataset cannot be mapped: {_explain(error)}") from error
        buffers = [
            memory[place[0] : sum(place)] if isinstance(place, tuple) and memory is not None else place
            for place in message.buffers
        ]
        new: NewJob = decode(content, buffers)
        return new

    def _do(self, run: int, seq: int, content: memoryview) -> None:
        assert self._job is not None and self._reader is not None  # the job is the first message
        place, content = unpack_slot(content)
        segment = None if place is None else self._segments.get(place.segment)
        memory = None if place is None or segment is None else segment[place.offset : place.offset + place.nbytes]
        try:
            task: Task = pickle.loads(content)
        except Exception as error:
            add_note(error, f"sharded_loader: batch {seq}: its indices could not be unpickled in {self._name}")
            self._send(pack_head(RESULT, run, seq), Reply(Result(run, seq), encode_error(error)), SlotWriter(None))
            return
        # The same for a batch that is made again, by whichever worker.
        seed_globals(derive_key(self._job.seed, "globals", task.epoch, task.position))
        slot = SlotWriter(memory)
        self._reply(self._reader.read(task, self._name, slot.empty), task, slot)

    def _reply(self, result: Result, task: Task, slot: SlotWriter) -> None:
        head = pack_head(RESULT, task.run, task.seq)
        skipped = tuple((index, encode_error(error)) for index, error in result.skipped)
        error = None if result.error is None else encode_error(result.error)
        try:
            self._send(head, Reply(result._replace(error=None, skipped=()), error, skipped), slot)
        except Exception as unpicklable:
            failure = TypeError(
                f"the batch cannot leave its worker process ({type(unpicklable).__name__}: {unpicklable}): "
                f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
            )
            Place(task.epoch, task.seq, None, self._name).note(failure, samples=task.shards[0])
            failure.__cause__ = unpicklable
            self._send(head, Reply(Result(task.run, task.seq), encode_error(failure), ()), SlotWriter(None))

    def _send(self, head: bytes, content: Any, slot: SlotWriter | None = None) -> None:
        encoded = encode(content, slot)
        if slot is not None:
            head += pack_wanted(slot.wanted)
        try:
            send_message(self._conn, head + encoded.head, encoded.places, encoded.buffers)
        except OSError:
            os._exit(1)  # the trainer is gone


def main(conn: Any, number: int, num_workers: int, inherited: NewJob | None, *, fresh: bool = False) -> None:
    """Run a worker process until its pipe is closed.

    Args:
        conn: the worker's end of the pipe.
        number: number of the worker, from 0.
        num_workers: how many there are.
        inherited: the job under fork; else None, and it comes as the first message.
        fresh: libraries were limited to one thread before any was loaded (`spawned`).
    """
    _forget_handlers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if not fresh:
        limit_threads()
    _Worker(conn, number, num_workers).run(inherited)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    # Not by returning: tearing down an interpreter with torch in it takes 100 ms that close() would wait for.
    os._exit(0)


def _explain(error: OSError) -> str:
    """Why a segment could not be mapped, and what to do."""
    if error.errno not in (errno.EMFILE, errno.ENFILE):
        return str(error)
    from sharded_loader.memory.limits import open_files

    limit = "" if (most := open_files()) is None else f" of {most}"
    return f"its limit{limit} of open files is reached: raise it (ulimit -n), or close files in the dataset"


def _forget_handlers() -> None:
    """Signal handlers that a forked worker has inherited are the trainer's: here SIGTERM ends the process."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)


def limit_threads() -> None:
    """One BLAS and OpenMP thread in this process, in the libraries that are loaded and those to come."""
    import threadpoolctl  # 2 ms, where it has not been inherited

    os.environ.update(dict.fromkeys(THREADS, "1"))
    threadpoolctl.threadpool_limits(1)


# -- torch ----------------------------------------------------------------------------------------------------


def _prepare_torch(number: int, num_workers: int, job: Job) -> None:
    """Tell torch, if it is here or as soon as it comes, that this is worker ``number``."""
    call_after_import("torch", lambda: _tell_torch(number, num_workers, job))


def _tell_torch(number: int, num_workers: int, job: Job) -> None:
    import torch
    from torch.utils.data._utils import worker as torch_worker

    torch.set_num_threads(1)
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number,
        num_workers=num_workers,
        # What torch.initial_seed() says in worker_init_fn. Not seed + number: worker 1 of one run would have
        # the numbers of worker 0 of the next.
        seed=_worker_key(job, number) & 0x7FFFFFFFFFFFFFFF,
        dataset=job.dataset,
    )


def _worker_key(job: Job, number: int) -> int:
    return derive_key(job.seed, "worker_init_fn", number)
