"""A worker process, from its first line to its last.

    receiver thread:  pipe -> inbox                            always drains, so the trainer's sends never wait
    main thread:      inbox -> Reader -> slot, encode -> pipe

Before each sample the main thread notes on the board where it is, so that a trainer that finds it dead or silent can
say which sample it was (`engine.board`).

The job (the dataset and how to read it) comes by inheritance under fork, else in a message; in either case the
message says when to begin. The process ends when the pipe does: the trainer closed it, or is gone. A main thread that
is in the user's code then gets `GRACE` seconds, because nobody waits for what it does.

Where that code holds the GIL (in C) no thread of ours can run, and the kernel has to see to it: on Linux by a signal
(`inheritance.die_with`), on Windows by the trainer's job object (`pools.job_object`). On macOS nothing does: where the
trainer was killed or left by ``os._exit``, such a worker ends `GRACE` seconds after that call (`close` kills it, at the
end of a program too). What ends a process there without the GIL (faulthandler's watchdog, a timer's signal) would have
to be put off again and again by a thread that needs it, and so would also end workers whose trainer lives.

SIGINT is the trainer's affair: it is ignored here (and was blocked while the process started). BLAS and
OpenMP are limited to one thread: a pool is parallel by its processes.

Nothing here imports torch. If the user's dataset does, torch is told that it is in a worker, also when the
import comes later, in the middle of a batch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from sharded_loader.engine.board import BEGINNING, IDLE, RUN, SAMPLE, SENDING, SEQ, SHARD, board_in, new_board
from sharded_loader.engine.grouping import GROUP_SECONDS
from sharded_loader.engine.messages import (
    BOARD,
    CANCEL,
    CRASHED,
    DEATH,
    FAILED,
    JOB,
    READY,
    RESULTS,
    SEGMENT,
    STACKS,
    Job,
    NewJob,
    Reply,
    Result,
    Task,
    pack_head,
    pack_reply,
    pack_result,
    unpack_head,
    unpack_tasks,
)
from sharded_loader.engine.reader import Reader
from sharded_loader.errors import Location, add_note, as_exception, format_traceback
from sharded_loader.global_generators import seed_globals
from sharded_loader.memory.codec import (
    Encoded,
    End,
    PlainPickler,
    SetApart,
    SlotWriter,
    decode,
    encode,
    set_apart,
)
from sharded_loader.memory.exceptions import encode_error
from sharded_loader.memory.segments import attach
from sharded_loader.process_hooks import call_after_import
from sharded_loader.rng import derive_key
from sharded_loader.system import why_refused
from sharded_loader.workers.inheritance import die_with, forget_handlers, keep_from_children
from sharded_loader.workers.link import Message, receive_descriptor, receive_message, send_message
from sharded_loader.workers.preload import THREADS

GRACE = 0.3
"""Seconds between end-of-file and the end of a worker that is in the user's code."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", None)
"""Makes a worker write its stacks to stderr and end, also while it holds the GIL: a signal that nobody else uses. Where
there is none, the receiver thread does it when told to."""


class _Worker:
    def __init__(self, conn: Any, number: int, num_workers: int) -> None:
        self._conn = conn
        self._number = number
        self._num_workers = num_workers
        self._name = f"worker {number} (pid {os.getpid()})"
        self._inbox: queue.SimpleQueue[Message | BaseException | None] = queue.SimpleQueue()
        self._cancelled: set[int] = set()
        self._finished = threading.Event()
        self._job: Job | None = None
        self._reader: Reader | None = None
        self._board = new_board()
        self._replies: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._sent = 0.0
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
                    self._inbox.put(message)  # behind the last of the tasks that it is about
                elif kind == BOARD:
                    self._map_board(run, seq, bytes(content).decode() or None)
                elif kind == DEATH:
                    self._take_death_pipe(bytes(content).decode() or None)
                elif kind == STACKS:
                    faulthandler.dump_traceback(2, all_threads=True)
                    os._exit(1)
                elif kind == SEGMENT:
                    self._attach(run, seq, bytes(content).decode() or None)
                else:  # the user's objects are unpickled by the main thread
                    self._inbox.put(message)
        except (EOFError, OSError):
            self._inbox.put(None)
            if not self._finished.wait(GRACE):
                os._exit(1)
        except BaseException as error:
            # Nobody would feed the main thread any more; the trainer notices the death.
            if self._job is None:
                self._inbox.put(error)  # it waits for its job, and tells the trainer
                self._finished.wait(GRACE)
            traceback.print_exc()
            os._exit(1)

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
                text = f"{self._name} sends batches through the pipe, which is slower: {why_refused(error)}"
                print(f"sharded_loader: {text}", file=sys.stderr, flush=True)
        else:
            self._segments[number] = np.frombuffer(segment.mapping, np.uint8)

    def _map_board(self, number: int, nbytes: int, name: str | None) -> None:
        try:
            fd = None if name else receive_descriptor(self._conn)
            self._board = board_in(attach(0, nbytes, fd, name).mapping, number)
        except EOFError:
            raise
        except OSError:
            pass  # no descriptors: errors will not name the sample

    def _take_death_pipe(self, name: str | None) -> None:
        if name:
            die_with(name)
            return
        try:
            fd = receive_descriptor(self._conn)
        except EOFError:
            raise
        except OSError:
            return  # no descriptors: this thread has to do
        try:
            die_with(f"/proc/self/fd/{fd}")
        finally:
            os.close(fd)

    # -- main thread ----------------------------------------------------------------------------------------

    def start(self) -> None:
        threading.Thread(target=self._receive, name="sharded_loader-receiver", daemon=True).start()

    def run(self, inherited: NewJob | None) -> None:
        try:
            self.start()
        except BaseException as error:  # this process may have no more threads
            _crash(self._conn, error)
        taken = True
        while taken and (message := self._inbox.get()) is not None:
            if isinstance(message, BaseException):
                _crash(self._conn, message)
            kind, cancelled, _, content = unpack_head(message.head)
            if kind == JOB:
                taken = self._take_job(message if inherited is None else inherited)
            elif kind == CANCEL:
                self._cancelled.discard(cancelled)
            else:
                for task in unpack_tasks(content):
                    self._do(*task)
            del message, content
            if self._inbox.empty():
                self._send_replies()
                self._board[SAMPLE] = IDLE
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
            self._send(pack_head(FAILED), encode(encode_error(failure)))
            return False
        self._send(pack_head(READY), encode(None))
        return True

    def _load(self, message: Message) -> NewJob:
        _, number, _, content = unpack_head(message.head)
        memory = self._segments.pop(number, None)
        if (error := self._refused.pop(number, None)) is not None:
            raise OSError(error.errno, f"the dataset cannot be mapped: {why_refused(error)}") from error
        buffers = [
            memory[place[0] : sum(place)] if isinstance(place, tuple) and memory is not None else place
            for place in message.buffers
        ]
        new: NewJob = decode(content, buffers)
        return new

    def _do(self, run: int, seq: int, place: tuple[int, int, int] | None, fields: Any) -> None:
        assert self._job is not None and self._reader is not None  # the job is the first message
        if run in self._cancelled:
            self._reply(Result(run, seq), SlotWriter(None))
            return
        board = self._board
        board[RUN], board[SEQ], board[SHARD], board[SAMPLE] = run, seq, 0, BEGINNING
        try:
            task = Task._make(pickle.loads(fields) if isinstance(fields, bytes) else fields)
        except Exception as error:
            add_note(error, f"sharded_loader: batch {seq}: its indices could not be unpickled in {self._name}")
            self._reply(Result(run, seq, error=error), SlotWriter(None))
            return
        memory = None
        if place is not None:
            segment, offset, nbytes = place
            whole = self._segments.get(segment)
            memory = None if whole is None else whole[offset : offset + nbytes]
        if task.careful:
            self._reader.probe(task, board)
        # The same for a batch that is made again, by whichever worker.
        seed_globals(derive_key(self._job.seed, "batch globals", task.epoch, task.position), whole=False)
        slot = SlotWriter(memory)
        result = self._reader.read(task, self._name, np.empty if memory is None else slot.empty, board)
        board[SAMPLE] = SENDING
        self._reply(result, slot, task)

    def _reply(self, result: Result, slot: SlotWriter, task: Task | None = None) -> None:
        """Put up a reply for sending; it is sent at once if somebody may wait for it."""
        try:
            packed = pack_result(result)
            if packed is None:
                encoded = encode(_apart(_for_travel(result)), slot)
            else:
                encoded = encode(packed, slot, PlainPickler)
        except BaseException as unpicklable:  # a __reduce__ may call sys.exit
            failure = TypeError(
                f"the batch cannot leave its worker process ({type(unpicklable).__name__}: {unpicklable}): "
                f"return arrays, tensors and plain objects, or read with threads (thread_pool=True)"
            )
            if task is not None:
                Location(task.epoch, task.seq, None, self._name).note(failure, samples=task.shards[0])
            failure.__cause__ = unpicklable
            encoded = encode(_for_travel(Result(result.run, result.seq, error=failure)))
        self._replies.append(pack_reply(result.run, result.seq, slot.wanted, encoded))
        self._places.extend(encoded.places)
        now = time.perf_counter()
        # Buffers are views into the batch's own arrays, which nobody keeps after this.
        if encoded.buffers or now - self._sent >= GROUP_SECONDS:
            self._send_replies(encoded.buffers)

    def _send_replies(self, buffers: Sequence[memoryview] = ()) -> None:
        if self._replies:
            head = pack_head(RESULTS, content=b"".join(self._replies))
            self._send(head, Encoded(b"", tuple(self._places), tuple(buffers)))
            self._replies.clear()
            self._places.clear()
        self._sent = time.perf_counter()

    def _send(self, head: bytes, content: Encoded) -> None:
        try:
            send_message(self._conn, head + content.head, content.places, content.buffers)
        except OSError:
            _leave(1)  # the trainer has closed the pipe, or is gone


def _for_travel(result: Result) -> Reply:
    """The result with its exceptions encoded."""
    skipped = tuple((index, encode_error(error)) for index, error in result.skipped)
    error = None if result.error is None else encode_error(result.error)
    return Reply(result._replace(error=None, skipped=()), error, skipped)


def _apart(reply: Reply) -> Reply | SetApart:
    """The reply, with what the library does not copy to a device itself set apart."""
    objects = set_apart(reply.result.batch)
    return SetApart([*objects, reply.skipped], End, reply) if objects or reply.skipped else reply


def main(
    conn: Any,
    number: int,
    num_workers: int,
    inherited: NewJob | None,
    *,
    fresh: bool = False,
    held: int | None = None,
) -> None:
    """Run a worker process until its pipe is closed.

    Args:
        conn: the worker's end of the pipe.
        number: number of the worker, from 0.
        num_workers: how many there are.
        inherited: the job under fork; else None, and it comes as the first message.
        fresh: libraries were limited to one thread before any was loaded (`spawned`).
        held: a descriptor that is open for as long as the worker lives, if it knows of one.
    """
    keep_from_children(conn, held)
    forget_handlers()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        if not fresh:
            limit_threads()
        if STACKS_SIGNAL is not None:
            with contextlib.suppress(OSError, RuntimeError):  # a stack of its own may be refused
                # Chained to the default action, the end of the process: so the trainer knows they are written.
                faulthandler.unregister(STACKS_SIGNAL)
                signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
                faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=True)
    except BaseException as error:
        _crash(conn, error)
    _Worker(conn, number, num_workers).run(inherited)
    _leave(0)


def _crash(conn: Any, error: BaseException) -> NoReturn:
    """End, and leave the traceback to the trainer: of many workers that end alike it prints one."""
    with contextlib.suppress(OSError):
        send_message(conn, pack_head(CRASHED, content=format_traceback(error).encode(errors="replace")), (), ())
    _leave(1)


def _leave(exitcode: int) -> NoReturn:
    """End the process. Not by returning: tearing down an interpreter with torch in it takes 100 ms, for nothing."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, OSError, ValueError):
            continue
    os._exit(exitcode)


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
