"""A worker process, from its first line to its last.

    receiver thread:  pipe -> inbox                            always drains, so the main process's sends never wait
    main thread:      inbox -> TaskReader -> slot, packed reply -> pipe

The main thread records its step in the heartbeat (`engine.heartbeat`). So a main process that finds it dead or silent
knows the batch, and the sample if the user has to know that.

A message brings the job (the dataset and how to read it). A forked worker inherits the job, and the message says when
to begin. A job that cannot be taken is the answer (`FAILED`). What else strikes ends the process, with its traceback.

A worker that takes more memory than it may says so (`GROWN`). One that is told to leave (`LEAVE`) does the tasks that
came before, and ends.

The process ends when the pipe does: the main process closed it, or is gone. If the main thread waits, the receiver ends
the process. A main thread that is in the user's code gets `GRACE` seconds. Where that code holds the GIL (in C), the
kernel ends the process (`die_with`), but not on macOS: there `close` kills the worker, and without a `close` it ends
after that call.

SIGINT is handled by the main process and is ignored here. BLAS and OpenMP are limited to one thread. Nothing here
imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import numpy as np

from sharded_loader.base import host_clock
from sharded_loader.base.interrupts import python_handlers
from sharded_loader.base.private import end_compiling, limit_to_one_thread
from sharded_loader.base.system import ONE_THREAD, is_readable, why_refused
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, heartbeat_in
from sharded_loader.engine.messages import GROUP_SECONDS, Job
from sharded_loader.memory.codec import Array, decode
from sharded_loader.memory.segments import attach
from sharded_loader.pools.process import link as wire
from sharded_loader.pools.process.link import Link, Message
from sharded_loader.pools.task_reader import TaskReader, write_stacks

try:
    import fcntl
except ImportError:  # Windows
    pass

LOOK_SECONDS = 0.1
"""Seconds between two looks at `own_bytes`: about 40 us."""

LOOK_SHARE = 50
"""A look at `private_bytes` takes 17 ms in a process of 740 MB. The next one comes after this many times as long, which
is 2 % of the worker's time."""

GRACE = 0.3
"""Seconds between end-of-file and the end of a worker that is in the user's code."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", None)
"""Makes a worker write all its stacks to stderr and end, also while it holds the GIL: a signal that nothing else uses.
It is sent to a worker whose receiver thread has not written them."""


class _MemoryWatch:
    """Looks whether this process takes more memory than it may: after the start, and after each batch.

    Args:
        limit: bytes of its own that it may have.

    Attributes:
        batches: since the start, which counts as one.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches, self._next_look = -1, 0.0

    def look(self) -> int | None:
        """The memory that it takes, if that is too much."""
        self.batches += 1
        began = host_clock.now()
        if self.batches > 1 and began < self._next_look:
            return None
        from sharded_loader.base import limits  # which few workers need

        nbytes = limits.own_bytes()
        if nbytes > self._limit:
            nbytes = limits.private_bytes()
        now = host_clock.now()
        self._next_look = now + max(LOOK_SECONDS, LOOK_SHARE * (now - began))
        return nbytes if nbytes > self._limit else None


class WorkerThreads:
    """The two threads of a worker process.

    Args:
        link: the worker's end of the pipe.
        number, num_workers: as of `main`.
    """

    def __init__(self, link: Link, number: int, num_workers: int) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None: the pipe has ended
        self._waits = False  # the main thread, for a message
        self._finished = threading.Event()
        self._reading = TaskReader(number, num_workers, f"worker {number} (pid {os.getpid()})")
        self._sending = threading.RLock()  # of what follows, and of the pipe: both threads send
        self._replies: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._sent = 0.0
        self._segments: dict[int, Array | OSError] = {}
        self._memory: _MemoryWatch | None = None

    # -- receiver thread ------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Take what comes, until the pipe ends."""
        try:
            while not self._link.ended:
                self._link.read()
                while self._link.inbox:
                    self._take(self._link.inbox.popleft())
            if self._waits and self._inbox.empty() and not self._finished.is_set():
                _leave(0)  # here: to wake the main thread for it takes a turn of a busy processor
            self._inbox.put(None)
            if not self._finished.wait(GRACE):
                os._exit(1)
        except BaseException:  # otherwise the main thread would wait for ever
            _crash()

    def _take(self, message: Message) -> None:
        kind, run = message.kind, message.run
        if kind in (wire.HEARTBEAT, wire.DEATH, wire.SEGMENT):
            self._open_shared(message)
        elif kind == wire.FLUSH:
            if self._sending.acquire(blocking=False):  # otherwise the main thread sends; this one must drain
                try:
                    self._send_replies()
                finally:
                    self._sending.release()
        elif kind == wire.STACKS:
            write_stacks(__file__)
            if run:  # it is to end
                os._exit(1)
        else:
            if kind == wire.CANCEL:  # at once: the message lies behind the last of the tasks
                self._reading.cancelled.add(run)
            self._inbox.put(message)

    def _open_shared(self, message: Message) -> None:
        """Open what the main process has made, by its name or by a descriptor. Nothing of it is vital."""
        kind, number, nbytes, name = message.kind, message.run, message.seq, bytes(message.content).decode()
        try:
            fd = None if name else self._link.take_descriptor()
            if kind == wire.DEATH:
                try:
                    die_with(name or f"/proc/self/fd/{fd}")
                finally:
                    if fd is not None:
                        os.close(fd)
            elif kind == wire.HEARTBEAT:
                self._reading.heartbeat = heartbeat_in(attach(0, nbytes, fd, name).mapping, number)
            else:
                # Batches are written for the main process to see; a dataset's segment (negative) stays private.
                segment = attach(number, nbytes, fd, name, private=number < 0)
                self._segments[number] = np.frombuffer(segment.mapping, np.uint8)
        except OSError as error:
            # Without the heartbeat errors will not name the sample; without the lifeline this thread ends the process.
            if kind == wire.SEGMENT:
                self._segments[number] = error
                if number >= 0:
                    # No warning: where the user makes errors of those, the worker would die of it.
                    text = f"{self._reading.name} sends batches through the pipe, which is slower: {why_refused(error)}"
                    print(f"sharded_loader: {text}", file=sys.stderr, flush=True)

    # -- main thread ----------------------------------------------------------------------------------------

    def run(self, inherited: Job | None) -> None:
        """Do what comes, until the pipe ends or the job cannot be taken."""
        try:
            threading.Thread(target=self.receive, name="sharded_loader-receiver", daemon=True).start()
            self._waits = True
            while (message := self._inbox.get()) is not None:
                self._waits = False
                if message.kind == wire.JOB:
                    if not self._take_job(message, inherited):
                        break
                elif message.kind == wire.CANCEL:
                    self._reading.cancelled.discard(message.run)
                elif message.kind == wire.LEAVE:
                    self._send_replies()
                    break
                else:
                    for task in decode(message.content):
                        self._do(*task)
                        self._look_at_memory()
                del message
                if self._inbox.empty():
                    self._send_replies()
                    self._reading.heartbeat[SAMPLE] = IDLE
                self._waits = True
        finally:
            self._finished.set()

    def _take_job(self, message: Message, inherited: Job | None) -> bool:
        def load() -> Job:
            # Its own segment has a number below 0; those of batches may be there already.
            memory = self._segments.pop(message.run, None) if message.run < 0 else None
            buffers = list(message.buffers)
            if isinstance(memory, OSError):
                raise OSError(memory.errno, f"the dataset cannot be mapped: {why_refused(memory)}") from memory
            if memory is not None:
                buffers = [memory[place[0] : sum(place)] if isinstance(place, tuple) else place for place in buffers]
            job: Job = inherited or decode(message.content, buffers)
            self._memory = None if job.max_memory is None else _MemoryWatch(job.max_memory)
            return job

        failure = self._reading.begin(load)
        with self._sending:
            self._link.send(wire.READY if failure is None else wire.FAILED, content=failure or b"")
        if failure is None:
            self._look_at_memory()
        return failure is None

    def _look_at_memory(self) -> None:
        if self._memory is not None and (nbytes := self._memory.look()) is not None:
            with self._sending:
                self._link.send(wire.GROWN, nbytes, self._memory.batches)

    def _do(self, run: int, seq: int, place: tuple[int, int, int] | None, fields: object) -> None:
        """Answer a task; the reply is sent at once if the main process may wait for it."""
        memory = None
        if place is not None:
            segment, offset, nbytes = place
            whole = self._segments.get(segment)
            memory = whole[offset : offset + nbytes] if isinstance(whole, np.ndarray) else None
        reply, encoded, _ = self._reading.answer(run, seq, fields, memory)
        with self._sending:
            self._replies.append(reply)
            self._places.extend(encoded.places)
        # Buffers are views into the batch's own arrays, which nothing else keeps after this.
        if encoded.buffers or host_clock.now() - self._sent >= GROUP_SECONDS:
            self._send_replies(encoded.buffers)

    def _send_replies(self, buffers: Sequence[memoryview] = ()) -> None:
        with self._sending:
            if self._replies:
                _flush()  # what samples have printed is there when their batch is, even if this process is killed then
                content = b"".join(self._replies)
                self._link.send(wire.RESULTS, content=content, places=self._places, buffers=buffers)
                self._replies.clear()
                self._places.clear()
                self._sent = host_clock.now()


def main(
    conn: object, number: int, num_workers: int, job: Job | None, *, limited: bool = False, held: int | None = None
) -> None:
    """Run a worker process until its pipe is closed.

    Args:
        conn: the worker's end of the pipe.
        number: number of the worker, from 0.
        num_workers: how many there are.
        job: the job under fork; otherwise None, and it comes as the first message.
        limited: libraries have been limited to one thread, before any was loaded.
        held: the other end of the process object's sentinel, if the worker knows it.
    """
    link = Link(conn, blocks=True)
    if held is not None:
        close_in_children(held)
    end_compiling()
    # Handlers that a forked worker has inherited are the main process's: here SIGTERM ends the process.
    signal.set_wakeup_fd(-1)
    for number_of_signal in python_handlers():
        signal.signal(number_of_signal, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        if not limited:
            limit_threads()
        own_progress_lock()
        if STACKS_SIGNAL is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the system may deny a stack of its own
                # Chained to the default action, the end of the process: so the main process knows they are written.
                faulthandler.unregister(STACKS_SIGNAL)
                signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
                faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=True)
        WorkerThreads(link, number, num_workers).run(job)
    except BaseException:  # this process may have no more threads
        _crash()
    _leave(0)


def close_in_children(held: int) -> None:
    """Close the end by which the main process notices the death of this process in what the user's code starts."""
    if hasattr(os, "register_at_fork"):
        os.set_inheritable(held, False)  # by other programs
        os.register_at_fork(after_in_child=lambda: os.close(held))


def die_with(path: str) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed. Linux.

    PDEATHSIG would not do: it fires when the *thread* ends that has started this process. The owner of a signal belongs
    to the open file, which workers share. So the pipe is opened once more, by its path under /proc.

    Raises:
        OSError: no /proc, no descriptors, or the kernel refuses.
    """
    own = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        os.close(own)
        raise
    if is_readable(own):
        os._exit(1)  # it was closed just before


def own_progress_lock() -> None:
    """Give this process a lock of its own for progress bars.

    All forked processes share tqdm's lock, which tqdm takes for each bar. Hugging Face's datasets make a hidden bar for
    each row. A worker that is killed while it holds the lock would stop all others for ever.
    """
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is not None:  # otherwise nothing is shared: it makes a lock when it is imported
        tqdm.set_lock(threading.RLock())


def find_libraries() -> None:
    """Find the libraries that start threads, for the workers that this process forks: 9 ms beside torch, then 2."""
    import threadpoolctl  # 2 ms, where it has not been inherited

    _libraries[:] = threadpoolctl.ThreadpoolController().lib_controllers


_libraries: list[Any] = []


def limit_threads() -> None:
    """Limit libraries to one thread each, in this process and in those that it forks."""
    os.environ.update(ONE_THREAD)
    if not _libraries:
        find_libraries()
    for library in _libraries:
        limit_to_one_thread(library)


def _crash() -> NoReturn:
    """End, with the traceback of the error that is being handled."""
    traceback.print_exc()
    _leave(1)


def _leave(exitcode: int) -> NoReturn:
    """End the process. Not by returning: tearing down an interpreter with torch in it takes 100 ms, for nothing."""
    _flush()
    os._exit(exitcode)


def _flush() -> None:
    """Write what this process has printed. 1 us if there is nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
