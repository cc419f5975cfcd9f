"""Main loop of a worker process.

    receiver thread:  pipe -> inbox                            always drains, so the main process's sends never wait
    main thread:      inbox -> TaskReader -> slot, packed reply -> pipe

The main thread records its progress in the heartbeat. If it dies or stalls, the main process can name the batch, and
if needed the sample (`engine.heartbeat`).

The job comes in a message; a forked worker inherits it, and the message starts it. The reply to a job that cannot be
taken is `FAILED`. Any other error ends the process with its traceback. A worker above its memory limit says so
(`GROWN`); one that is told to leave (`LEAVE`) drains.

The process ends with the pipe, when the main process closes it or dies: at once if the main thread is idle, after
`GRACE` seconds if it is in user code. If that holds the GIL (in C), the kernel ends the process (`die_with`), except on
macOS: there `close` kills the worker, and without a `close` it ends after that call.

SIGINT is handled by the main process and is ignored here. BLAS and OpenMP are limited to one thread. Nothing here
imports torch.
"""

from __future__ import annotations

import contextlib
import faulthandler
import mmap
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
from sharded_loader.base.interrupts import python_handlers, set_handlers
from sharded_loader.base.private import become_worker, end_compiling, limit_to_one_thread
from sharded_loader.base.system import ONE_THREAD, after_fork, is_readable, why_refused
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, heartbeat_in
from sharded_loader.engine.messages import GROUP_SECONDS, Job
from sharded_loader.memory.codec import Array, decode
from sharded_loader.memory.segments import attach
from sharded_loader.pools.process import link as wire
from sharded_loader.pools.process.link import NAME, Link, Message
from sharded_loader.pools.task_reader import TaskReader, write_stacks

CHECK_SHARE = 50
"""Pause after a check, as a multiple of its duration: at most 2 % of the worker's time. `own_bytes` takes 40 us,
`private_bytes` 17 ms at 740 MB."""

GRACE = 0.3
"""Seconds between end-of-file and the end of a worker in user code."""

STACKS_SIGNAL = getattr(signal, "SIGRTMAX", None)
"""Unused signal that makes a worker write all stacks and end, even if it holds the GIL, should `STACKS` fail."""


class _MemoryWatch:
    """Checks the memory of this process after the start and after each batch.

    ``limit`` is in bytes. ``batches`` counts from the start, which is number 0.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.batches, self._next_check, self._next_exact = -1, 0.0, 0.0
        self._shared = 0  # bytes that it had in common with other processes at the last exact check, or less now

    def check(self) -> int | None:
        """Return the memory in use, if it exceeds the limit."""
        self.batches += 1
        began = host_clock.now()
        if self.batches > 1 and began < self._next_check:
            return None
        from sharded_loader.base import limits  # few workers need it

        own = limits.own_bytes()
        nbytes, now = own - self._shared, host_clock.now()
        self._next_check = now + CHECK_SHARE * (now - began)
        if own > self._limit and (nbytes > self._limit or now >= self._next_exact):
            nbytes = limits.private_bytes()
            self._shared, ended = own - nbytes, host_clock.now()
            self._next_exact = ended + CHECK_SHARE * (ended - now)
        return nbytes if nbytes > self._limit else None


class WorkerThreads:
    """The two threads of a worker process."""

    def __init__(self, link: Link, number: int, num_workers: int) -> None:
        self._link = link
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()  # None marks the end of the pipe
        self._slots: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()  # answers to `_larger_slot`
        self._is_idle = False  # the main thread waits for a message
        self._finished = threading.Event()
        self._reader = TaskReader(number, num_workers, f"worker {number} (pid {os.getpid()})")
        self._sending = threading.RLock()  # guards the replies and the pipe: both threads send
        self._replies: list[bytes] = []
        self._places: list[tuple[int, int]] = []
        self._sent = 0.0
        self._segments: dict[int, Array | OSError] = {}
        self._memory: _MemoryWatch | None = None

    # -- receiver thread ------------------------------------------------------------------------------------

    def receive(self) -> None:
        """Receive messages until the pipe ends."""
        try:
            while not self._link.ended:
                self._link.read()
                while self._link.inbox:
                    self._handle(self._link.inbox.popleft())
            if self._is_idle and self._inbox.empty() and not self._finished.is_set():
                _exit_process(0)  # here: waking the main thread would cost a scheduling delay
            self._inbox.put(None)
            self._slots.put(None)
            if not self._finished.wait(GRACE):
                os._exit(1)
        except BaseException:  # otherwise the main thread would wait forever
            _crash()

    def _handle(self, message: Message) -> None:
        kind, run = message.kind, message.run
        if kind in (wire.HEARTBEAT, wire.GUARD, wire.SEGMENT):
            self._open_shared(message)
        elif kind == wire.FLUSH:
            # This one must keep reading: where links block, the main process may be sending to it.
            with contextlib.suppress(RuntimeError):  # the limit of threads: they are sent after the task
                threading.Thread(target=self._send_replies, daemon=True).start()
        elif kind == wire.TOUCH:
            if (memory := self._memory_at(decode(message.content))) is not None:
                memory[:: mmap.PAGESIZE] = 0
        elif kind == wire.SLOT:
            self._slots.put(decode(message.content))
        elif kind == wire.STACKS:
            write_stacks(__file__)
            if run:  # told to end
                os._exit(1)
        else:
            if kind == wire.CANCEL:  # now: the queued message comes after all tasks
                self._reader.cancelled.add(run)
            self._inbox.put(message)

    def _open_shared(self, message: Message) -> None:
        """Open shared objects of the main process by name or descriptor. None of them is vital."""
        kind, number, nbytes, name = message.kind, message.run, message.seq, bytes(message.content).decode()
        try:
            fd = None if name else self._link.take_descriptor()
            if kind == wire.GUARD:
                with contextlib.ExitStack() as stack:
                    if fd is not None:
                        stack.callback(os.close, fd)
                    die_with(name or f"/proc/self/fd/{fd}")
            elif kind == wire.HEARTBEAT:
                self._reader.heartbeat = heartbeat_in(attach(0, nbytes, fd, name).mapping, number)
            else:
                # Batches are shared with the main process; a dataset's segment (negative) stays private.
                segment = attach(number, nbytes, fd, name, private=number < 0)
                self._segments[number] = np.frombuffer(segment.mapping, np.uint8)
        except OSError as error:
            # Without a heartbeat errors do not name the sample; without the parent guard this thread ends the process.
            if kind == wire.SEGMENT:
                self._segments[number] = error
                if number >= 0:
                    # Not a warning, which would kill the worker if the user turns warnings into errors.
                    text = f"{self._reader.name} sends batches through the pipe, which is slower: {why_refused(error)}"
                    print(f"sharded_loader: {text}", file=sys.stderr, flush=True)

    # -- main thread ----------------------------------------------------------------------------------------

    def run(self, inherited: Job | None) -> None:
        """Handle messages until the pipe ends or the job cannot be taken."""
        try:
            threading.Thread(target=self.receive, name="sharded_loader-receiver", daemon=True).start()
            self._is_idle = True
            while (message := self._inbox.get()) is not None:
                self._is_idle = False
                if message.kind == wire.JOB:
                    if not self._begin_job(message, inherited):
                        break
                elif message.kind == wire.CANCEL:
                    self._reader.cancelled.discard(message.run)
                elif message.kind == wire.LEAVE:
                    self._send_replies()
                    break
                else:
                    for task in decode(message.content):
                        self._answer_task(*task)
                        self._report_memory()
                del message
                if self._inbox.empty():
                    self._send_replies()
                    self._reader.heartbeat[SAMPLE] = IDLE
                self._is_idle = True
        finally:
            self._finished.set()

    def _begin_job(self, message: Message, inherited: Job | None) -> bool:
        def load() -> Job:
            # The job's segment has a negative number; those of batches may be there already.
            memory = self._segments.pop(message.run, None) if message.run < 0 else None
            buffers = list(message.buffers)
            if isinstance(memory, OSError):
                raise OSError(memory.errno, f"the dataset cannot be mapped: {why_refused(memory)}") from memory
            if memory is not None:
                buffers = [memory[place[0] : sum(place)] if isinstance(place, tuple) else place for place in buffers]
            job: Job = inherited or decode(message.content, buffers)
            self._memory = None if job.max_memory is None else _MemoryWatch(job.max_memory)
            return job

        failure = self._reader.begin(load)
        with self._sending:
            self._link.send(wire.READY if failure is None else wire.FAILED, content=failure or b"")
        if failure is None:
            self._report_memory()
        return failure is None

    def _report_memory(self) -> None:
        if self._memory is not None and (nbytes := self._memory.check()) is not None:
            with self._sending:
                self._link.send(wire.GROWN, nbytes, self._memory.batches)

    def _memory_at(self, slot: tuple[int, int, int] | None) -> Array | None:
        """Return the memory of a slot, or None without a slot or if its segment could not be opened."""
        if slot is None or not isinstance(whole := self._segments.get(slot[0]), np.ndarray):
            return None
        return whole[slot[1] : slot[1] + slot[2]]

    def _larger_slot(self, run: int, seq: int, nbytes: int) -> Array | None:
        """Ask the main process for a slot for a batch that is read, and wait for it."""
        if nbytes < wire.SLOT_BYTES:
            return None
        with self._sending:
            self._send_replies()  # it may wait for them
            self._link.send(wire.SLOT, run, seq, b"%d" % nbytes)
        return self._memory_at(self._slots.get())

    def _answer_task(self, run: int, seq: int, slot: tuple[int, int, int] | None, fields: object) -> None:
        """Answer a task. The reply is sent at once if the main process may wait for it."""
        reply, encoded, _ = self._reader.answer(run, seq, fields, self._memory_at(slot), self._larger_slot)
        with self._sending:
            self._replies.append(reply)
            self._places.extend(encoded.places)
        # Send buffers now: they are views of the batch's arrays, which nothing else keeps alive.
        if encoded.buffers or host_clock.now() - self._sent >= GROUP_SECONDS:
            self._send_replies(encoded.buffers)

    def _send_replies(self, buffers: Sequence[memoryview] = ()) -> None:
        with self._sending:
            if self._replies:
                _flush()  # output of samples precedes their batch, even if this process is killed next
                content = b"".join(self._replies)
                self._link.send(wire.RESULTS, content=content, places=self._places, buffers=buffers)
                self._replies.clear()
                self._places.clear()
                self._sent = host_clock.now()


def main(
    conn: object, number: int, num_workers: int, job: Job | None, *, limited: bool = False, held: int | None = None
) -> None:
    """Run a worker process until its pipe is closed.

    ``job`` is None unless forked: it comes in a message. ``limited``: libraries are already limited to one thread.
    ``held`` is the other end of the process object's sentinel, if known.
    """
    link = Link(conn, blocks=True)
    if held is not None:
        close_in_children(held)
    become_worker(f"{NAME}-{number}")
    end_compiling()
    # Inherited handlers belong to the main process: here SIGTERM ends the process.
    signal.set_wakeup_fd(-1)
    set_handlers({**dict.fromkeys(python_handlers(), signal.SIG_DFL), signal.SIGINT: signal.SIG_IGN})
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    try:
        if not limited:
            limit_threads()
        own_progress_lock()
        # glibc then keeps freed blocks of up to this size, and twice as much at the end of its heap. Otherwise samples
        # give their memory back to the kernel after each collate_fn: 1,920 pictures of 600 KB per second, now 4,800.
        np.empty((32 << 20) - 2 * mmap.PAGESIZE, np.uint8)
        if STACKS_SIGNAL is not None:
            with contextlib.suppress(OSError, RuntimeError):  # the system may deny an alternate stack
                # Chained to the default action, so that the end of the process tells that they are written.
                faulthandler.unregister(STACKS_SIGNAL)
                signal.signal(STACKS_SIGNAL, signal.SIG_DFL)
                faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True, chain=True)
        WorkerThreads(link, number, num_workers).run(job)
    except BaseException:  # such as at the thread limit
        _crash()
    _exit_process(0)


def close_in_children(held: int) -> None:
    """Close the descriptor that signals the death of this process in all children that user code starts."""
    os.set_inheritable(held, False)  # in other programs
    after_fork(lambda: os.close(held))


def die_with(path: str) -> None:
    """Make the kernel kill this process when the other end of a pipe is closed. OSError if that is impossible. Linux.

    PDEATHSIG fires when the *thread* that started this process ends. The signal's owner belongs to the open file, which
    workers share, so the pipe is opened again by its path under /proc.
    """
    import fcntl

    own = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        os.close(own)
        raise
    if is_readable(own):
        os._exit(1)  # already closed


def own_progress_lock() -> None:
    """Give this process its own lock for progress bars.

    Forked processes share tqdm's lock, taken for each bar; Hugging Face's datasets make a hidden bar per row. A worker
    that is killed while it holds the lock would block all others forever.
    """
    tqdm = getattr(sys.modules.get("tqdm.std"), "tqdm", None)
    if tqdm is not None:  # otherwise its lock is made on import, and not shared
        tqdm.set_lock(threading.RLock())


def find_libraries() -> None:
    """Find the libraries that start threads, for workers forked from here: 9 ms with torch loaded, then 2."""
    import threadpoolctl  # 2 ms, unless inherited

    _libraries[:] = threadpoolctl.ThreadpoolController().lib_controllers


_libraries: list[Any] = []


def limit_threads() -> None:
    """Limit libraries to one thread each, in this process and its forks."""
    os.environ.update(ONE_THREAD)
    if not _libraries:
        find_libraries()
    for library in _libraries:
        limit_to_one_thread(library)


def _crash() -> NoReturn:
    """End the process with the traceback of the current error."""
    traceback.print_exc()
    _exit_process(1)


def _exit_process(exitcode: int) -> NoReturn:
    """End the process immediately: tearing down an interpreter with torch in it takes 100 ms."""
    _flush()
    os._exit(exitcode)


def _flush() -> None:
    """Flush stdout and stderr. 1 us if there is nothing."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
