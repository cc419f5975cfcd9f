"""Transport of process pools: worker processes, and all system resources of a pool.

    start(job)             fork: launches workers with the job. spawn, forkserver: publishes it once, and sends it
    drain(worker)          tells a worker to end when it has answered its tasks
    explain_death(worker)  reaps a worker: exit code, heartbeat
    close()                ends workers (end-of-file, then SIGKILL), and frees links, slots and memory

A `ProcessTransport` owns the workers, the heartbeats (`engine.heartbeat`), the parent guard, the zygote, the memory of
the published job, the arena, and the waker pipe. It keeps no job, so that a finalizer may hold it: a job leads to the
user's dataset, and often to the loader. In a process that the user forks `close` does nothing.

A dead worker's slots are freed once its process has been reaped. A process that does not end within `KILLED_GRACE` of
being killed could still write: its slots are never used again.

The parent guard is a pipe whose end in the main process is closed by the kernel when that ends, also by SIGKILL. The
kernel then kills the workers (`worker.die_with`), even ones that hold the GIL. The user's own child processes of a
worker live on. If the kernel refuses the signal (a sandbox), or has none (not Linux), the receiver thread ends the
process, which it cannot while C code holds the GIL.

What can go wrong: no process, descriptor or memory (OSError, MemoryError), an unpicklable job. If the zygote is dead,
the worker and the next zygote are forked from the main process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import multiprocess
from multiprocess import connection

from sharded_loader.base import host_clock
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.limits import oom_kills
from sharded_loader.base.system import PORTABLE, can_pass_descriptors, open_pidfd, write_to_stderr
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, UNUSED, WORDS, Heartbeat, heartbeat_in
from sharded_loader.engine.messages import Job, Task
from sharded_loader.memory import publish
from sharded_loader.memory.arena import Arena
from sharded_loader.memory.codec import Encoded
from sharded_loader.memory.segments import Segment, Slot, create
from sharded_loader.pools.deaths import Death
from sharded_loader.pools.process import start
from sharded_loader.pools.process.link import CANCEL, GUARD, HEARTBEAT, JOB, LEAVE, NAME, STACKS, Link
from sharded_loader.pools.process.worker import STACKS_SIGNAL, find_libraries
from sharded_loader.pools.process.worker import main as work
from sharded_loader.pools.supervised import Transport, Worker

CLOSING_GRACE = 0.02
"""Seconds that workers get to end by themselves in `close`. An idle one needs 2 ms, or 4 under fork (page tables).

`close`, two workers, two cores, medians of 16, the machine busy with other things (load 4 to 7): fork 29 ms idle and 39
ms with workers that hold the GIL (least 13, 18); spawn 8 and 14 ms (least 5, 10).
"""

BUSY_GRACE = 0.005
"""The same for workers in a batch, which would not notice before its end."""

SHORT_GRACE = 0.5
"""Seconds that a hung worker gets to write the user's frames. If it holds the GIL, it cannot."""

STACKS_GRACE = 1.0
"""Seconds in which a hung worker writes its stacks and ends: 1 to 20 ms, more on a busy machine."""

ROWS = 2048
"""Maximum number of workers on the heartbeat, including draining ones: 128 KB of memory."""

KILLED_GRACE = 3.0
"""Seconds in which a killed process must end. One that is stuck in the kernel (disk, network) is abandoned."""

# Segment numbers of published jobs: negative, unlike those of batches, and unique, because a worker that is in a sample
# may receive two jobs in a row.
_numbers = itertools.count(-1, -1)

_AS_IT_IS_NOW = (
    "workers are forked from the main process as it is now: with its threads, and with the dataset as it is now"
)


class ProcessWorker(Worker):
    """A worker as the main process sees it. Owns the process object, the link and a descriptor of the process."""

    def __init__(self, number: int, process: Any, link: Link) -> None:
        super().__init__(number)
        self.process = process
        self.pid: int = process.pid
        self.link = link
        self.slots: dict[tuple[int, int], Slot | None] = {}
        self.unread: list[Segment | None] = []  # of jobs sent: a name is gone with the last that has the memory open
        self.row = -1  # row on the heartbeat
        self.heartbeat: Heartbeat = list(UNUSED)
        self.has_grown = False  # above its memory limit
        self.has_ended = False  # known to have ended but not replaced, or killed because it stalled
        self._released = False
        self._killed_at = math.inf
        self.exitcode: int | None = None
        # Prefer the pidfd to the process object's sentinel. That is a pipe which the worker closes in what the dataset
        # forks (`worker.main`), but children forked by C code keep it open after the worker's death.
        pidfd = open_pidfd(process.pid)
        self.sentinel: int = process.sentinel if pidfd is None else pidfd

    @property
    def who(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    def is_alive(self) -> bool:
        """Return True if the process has not ended, regardless of who reaped it."""
        return not self._released and not connection.wait([self.sentinel], 0)

    def is_busy(self) -> bool:
        return bool(self.heartbeat[SAMPLE] != IDLE) and self.is_alive()

    def kill(self) -> None:
        """Send SIGKILL, if not released; on Windows, TerminateProcess."""
        if not self._released:
            self._killed_at = min(self._killed_at, host_clock.now())
            with contextlib.suppress(ValueError, OSError):
                self.process.kill()

    def is_over(self) -> bool:
        """Return True if nothing more will come from a worker that `has_ended`, or was killed but does not end."""
        return (self.hung and host_clock.now() - self._killed_at > KILLED_GRACE) or not self.is_alive()

    def kill_stalled(self, seconds: float) -> None:
        with uninterrupted():
            write_to_stderr(f"sharded_loader: {self.who} made no progress for {seconds:g} s. Its stacks:\n")
            # Makes it write its stacks and end, unless it is stopped.
            self.link.send(STACKS, 1)
            self.wait(SHORT_GRACE)
            if STACKS_SIGNAL is not None and self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, STACKS_SIGNAL)
            self.wait(STACKS_GRACE)
            self.kill()
        self.has_ended = True

    def wait(self, timeout: float) -> None:
        if not self._released:
            connection.wait([self.sentinel], timeout)

    def release(self) -> None:
        """End the process, if it has not ended, and release its resources."""
        if self._released:
            return
        owns_sentinel = self.sentinel != self.process.sentinel
        try:
            if self.is_alive():
                self.kill()
                self.wait(max(0.0, self._killed_at + KILLED_GRACE - host_clock.now()))
                if self.is_alive():
                    self.slots.clear()  # it may still write there
                    why = "a disk or a network keeps it in the kernel, or the machine is very busy"
                    write_to_stderr(f"sharded_loader: {self.who} was killed and does not end: {why}. It is abandoned\n")
                    self.process.close()  # closes the sentinel
                    return
            self.process.join()
            self.exitcode = self.process.exitcode
            self.process.close()
        except ValueError:
            # Reaped by the user's program (SIGCHLD ignored, a waitpid(-1) loop), so multiprocess believes that it still
            # runs. Its descriptors are closed with the process object.
            pass
        finally:
            self._released = True
            self.heartbeat = list(self.heartbeat)  # a copy, so that holding the worker does not hold the memory
            if owns_sentinel:
                os.close(self.sentinel)

    def where(self) -> Sequence[int] | None:
        return () if not self.ready else self.heartbeat if self.tasks else None

    def cancel(self, run: int) -> None:
        self.link.send(CANCEL, run)  # it also answers tasks that it drops

    def tell(self) -> None:
        self.link.send(STACKS, 0)


class ProcessTransport(Transport[ProcessWorker]):
    """Worker processes, and the pipes to them. Keeps no job, so finalizers may hold it.

    Attributes:
        waker: both ends of the pipe that `wake` writes to.
        published: number, job and memory of the published job; None if forked workers inherit it.
    """

    def __init__(self, num_workers: int, start_method: str, max_bytes: int | None) -> None:
        self.num_workers = num_workers
        self.start_method = start_method
        self.max_bytes = max_bytes
        self.workers: list[ProcessWorker] = []
        self.draining: list[ProcessWorker] = []
        self.arena = Arena(max_bytes)
        self.waker: tuple[connection.Connection, connection.Connection] | None = None
        self.heartbeat: Segment | None = None
        self.parent_guard: tuple[int, int] | None = None
        self.zygote: start.Zygote | None = None
        self.published: tuple[int, Encoded, Segment | None] | None = None
        self._oom_kills: int | None = None
        self._is_up = False  # workers have been started; later ones join them
        self._pid = os.getpid()
        _owned[id(self)] = self

    # -- start ----------------------------------------------------------------------------------------------

    def start(self, job: Job) -> list[Task]:
        if self.workers and self.start_method != "fork":
            self._publish(job)
            self._send_job(*self.workers)
            return []
        if self.start_method == "forkserver":
            start.start_forkserver(self._publish(job))
        elif self.start_method == "fork":
            find_libraries()
        # Forked workers have the old dataset. New ones inherit the new one, and redo tasks in progress.
        interrupted = [task for worker in (*self.draining, *self.workers) for task in worker.tasks.values()]
        with uninterrupted():
            self.stop_workers()
            self.open()
            self.launch_all(job)
        if self.start_method == "spawn":
            self._publish(job)  # concurrent with their start, which takes as long as publishing 150 MB
        self._send_job(*self.workers)
        self._is_up = True
        return interrupted

    def _publish(self, job: Job) -> frozenset[str]:
        """Pickle the job for workers that do not inherit it. Return the modules that they need."""
        encoded = publish.publish(job, **job.parts)
        with uninterrupted():  # workers keep their mappings of the one before
            self.published = (number := next(_numbers)), *publish.share(encoded, number)
        return encoded.modules

    def _send_job(self, *workers: ProcessWorker) -> None:
        if self.published is not None:
            number, job, segment = self.published
            for worker in workers:
                worker.unread.append(segment)
                if segment is not None:
                    worker.link.send_segment(segment)
                worker.link.send(JOB, number, content=job.pickled, buffers=job.buffers, places=job.places)

    def make_zygote(self, job: Job) -> None:
        """Fork the zygote, if there is none."""
        try:
            with uninterrupted():
                if self.zygote is None and can_pass_descriptors():
                    self.zygote = start.Zygote(job)
        except OSError as error:
            start.warn(f"the process that workers are forked from could not be forked ({error}); {_AS_IT_IS_NOW}")

    def open(self) -> None:
        """Create the resources that workers need to start. Calling it again has no effect."""
        if self.waker is not None:
            return
        self._pid = os.getpid()
        self.waker = multiprocess.Pipe(duplex=False)
        try:
            self.heartbeat = create(0, ROWS * WORDS * 8)
        except OSError as error:
            raise MemoryError(f"no shared memory for workers ({error}): free memory, or close files") from error
        self.parent_guard = os.pipe() if sys.platform == "linux" else None
        self._oom_kills = oom_kills()

    def launch(self, number: int, job: Job) -> ProcessWorker:
        if multiprocess.current_process().daemon:
            text = "this is a worker process, which may have none of its own: give the loader that the dataset makes"
            raise RuntimeError(f"{text} num_workers=0, or threads (thread_pool=True)")
        if self.start_method == "fork" and not can_pass_descriptors() and self._is_up:
            # A zygote could not receive the worker's end of the pipe, so there is none.
            start.warn(f"this system does not pass descriptors between processes; {_AS_IT_IS_NOW}")
        try:
            process, link = self._start_process(number, job)
        except start.ZygoteGone as error:
            if (gone := self.zygote) is not None:
                self.zygote = None
                gone.close()
            start.warn(f"{error}; {_AS_IT_IS_NOW}")
            process, link = self._start_process(number, job, directly=True)
        worker = ProcessWorker(number, process, link)
        with contextlib.ExitStack() as undo:  # another thread may close the transport meanwhile
            undo.callback(worker.release)
            undo.callback(link.close)
            if self.heartbeat is not None:
                # A free row: a draining worker may have the same number.
                used = {one.row for one in (*self.workers, *self.draining)}
                worker.row = next(row for row in range(ROWS) if row not in used)
                worker.heartbeat = heartbeat_in(self.heartbeat.mapping, worker.row)
                worker.heartbeat[SAMPLE] = IDLE
                link.send_segment(self.heartbeat, HEARTBEAT, worker.row)
            if (parent_guard := self.parent_guard) is not None and not PORTABLE:
                name = "" if can_pass_descriptors() else f"/proc/{os.getpid()}/fd/{parent_guard[0]}"
                link.send(GUARD, content=name.encode(), descriptor=None if name else parent_guard[0])
            # A forked worker has its job, but waits for a message. By then it has received the parent guard, so it ends
            # with the main process even if user code holds the GIL from its first line on.
            if self.start_method == "fork":
                link.send(JOB)
            elif self._is_up:
                self._send_job(worker)
            undo.pop_all()
        return worker

    def _start_process(self, number: int, job: Job, *, directly: bool = False) -> tuple[Any, Link]:
        forks = self.start_method == "fork"
        if forks and self._is_up and not directly:
            self.make_zygote(job)  # before the pipe: an inherited end would hide the worker's death
        # A new pipe per attempt: a killed zygote may already have forked a worker that holds the old one's end.
        ours, theirs = multiprocess.Pipe(duplex=True)
        link = Link(ours)
        try:
            if self.zygote is not None:
                return self.zygote.fork(number, self.num_workers, theirs), link
            if forks:
                return start.start_forked(f"{NAME}-{number}", work, theirs, number, self.num_workers, job), link
            return start.spawn_worker(number, self.num_workers, self.start_method, theirs), link
        except BaseException:
            link.close()
            raise
        finally:
            theirs.close()

    def drain(self, worker: ProcessWorker) -> None:
        self.draining.append(worker)
        worker.link.send(LEAVE)  # after its tasks

    def wake(self) -> None:
        """Wake the thread that waits for the workers. May be called from any thread."""
        waker = self.waker
        if waker is not None:
            # Just closed by another thread, even in the call; on Windows since Python 3.12, another one wakes it now.
            with contextlib.suppress(OSError, ValueError, TypeError):
                waker[1].send_bytes(b"")

    # -- workers that end, or stand still -------------------------------------------------------------------

    def explain_death(self, worker: ProcessWorker, error: BaseException | None) -> Death:
        worker.wait(0.0 if worker.hung else 1.0)
        worker.release()
        death = Death(worker.number, worker.pid, worker.exitcode, self.oom_kills())
        return death._replace(hung=worker.hung, heartbeat=list(worker.heartbeat))

    def oom_kills(self) -> int | None:
        """Return the number of out-of-memory kills in this cgroup since the workers started; None if unknown."""
        if self._oom_kills is None or (now := oom_kills()) is None:
            return None
        return max(0, now - self._oom_kills)

    def release(self, worker: ProcessWorker) -> None:
        worker.row = -1
        worker.link.close()
        self.free_slots(worker)

    def free_slots(self, worker: ProcessWorker) -> None:
        """Free the slots of a reaped worker. Borrowed ones return by themselves."""
        slots, worker.slots = worker.slots, {}
        for slot in filter(None, slots.values()):
            self.arena.give(slot)

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the workers
        workers = [*self.workers, *self.draining]
        steps: list[Any] = [worker.link.close for worker in workers]  # this ends the workers
        steps += [clear for worker in workers for clear in (worker.slots.clear, worker.unread.clear)]
        # Meanwhile free the memory: 150 MB take as long as the end of a process. Workers have their own mappings.
        steps += [functools.partial(setattr, self, "published", None), self.arena.close, self.stop_workers]
        steps += [one.close for one in (*(self.waker or ()), self.heartbeat) if one is not None]
        steps += [functools.partial(os.close, end) for end in self.parent_guard or ()]
        with uninterrupted(), contextlib.ExitStack() as stack:  # run all steps, even if some raise
            self.waker = self.parent_guard = self.heartbeat = None
            self._new_arena()
            for step in reversed(steps):
                stack.callback(step)

    def _new_arena(self) -> Arena:
        """Replace the arena, and return the old one."""
        before, self.arena = self.arena, Arena(self.max_bytes, self.arena.register, self.arena.pinned)
        return before

    def hand_over(self) -> Arena:
        with uninterrupted():
            self.stop_workers()
            arena = self._new_arena()
            _owned[id(arena)] = arena
        return arena

    def stop_workers(self) -> None:
        """End the workers, after `BUSY_GRACE` or `CLOSING_GRACE` by SIGKILL."""
        workers, self.workers, draining, self.draining = self.workers, [], self.draining, []
        workers += draining
        self._is_up = False
        ended, self.zygote = self.zygote, None
        for worker in workers:
            worker.link.close()
        if ended is not None and not ended.has_forked:
            ended.finish()
        began = host_clock.now()
        for grace, reluctant in ((BUSY_GRACE, ProcessWorker.is_busy), (CLOSING_GRACE, ProcessWorker.is_alive)):
            for worker in workers:
                worker.wait(max(0.0, began + grace - host_clock.now()))
            # Kill all before waiting: tearing down a process takes 5 ms, and they can do so in parallel.
            for worker in workers:
                if reluctant(worker):
                    worker.kill()
        if ended is not None:
            ended.finish()  # it reaps the remaining workers meanwhile
        for worker in workers:
            worker.release()
            self.free_slots(worker)
        if ended is not None:
            ended.close()


# -- processes that the user forks ------------------------------------------------------------------------------------

_owned: weakref.WeakValueDictionary[int, ProcessTransport | Arena] = weakref.WeakValueDictionary()
"""Transports, and arenas of ended pools. Keyed by id: `valuerefs` is atomic, and other threads may add to it."""


def _live_objects() -> tuple[list[ProcessTransport], list[Arena]]:
    found = [one for reference in _owned.valuerefs() if (one := reference()) is not None]
    transports = [one for one in found if isinstance(one, ProcessTransport)]
    return transports, [one for one in found if isinstance(one, Arena)] + [one.arena for one in transports]


_ends: dict[int, list[int]] = {}
"""By thread that forks: descriptors that the child is to hold as long as it lives, see `Arena.hold_for_child`."""


def _before_fork() -> None:
    """Keep the memory of batches unchanged that a child forked by the user shares."""
    if not start.is_starting_worker():
        ends = _ends[threading.get_ident()] = []
        for arena in _live_objects()[1]:
            if (end := arena.hold_for_child()) is not None:
                ends.append(end)


def _after_fork_in_parent() -> None:
    for end in _ends.pop(threading.get_ident(), ()):
        os.close(end)


def _after_fork_in_child() -> None:
    if start.is_starting_worker():  # those of other threads
        for end in itertools.chain(*_ends.values()):
            os.close(end)
    _ends.clear()
    transports, arenas = _live_objects()
    for arena in arenas:
        arena.close_descriptors()
    for transport in transports:
        ends, transport.parent_guard = transport.parent_guard, None
        for end in ends or ():  # this copy must not keep workers alive
            os.close(end)
        if transport.heartbeat is not None:
            transport.heartbeat.close_descriptor()
        if transport.zygote is not None:
            transport.zygote.control.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
