"""Worker processes, as `pools.supervised` reaches them, and all that a process pool owns in the system.

    start(job)         fork: workers are launched with the job. spawn, forkserver: it is published once, and sent
    retire(worker)     it is told to end when it has answered
    last_words(worker) reaped: its exit code, its heartbeat
    close()            workers end (end-of-file, then SIGKILL), and their links, slots and memory are given back

A `ProcessTransport` owns the workers, and what they start with: the heartbeats (`engine.heartbeat`), the lifeline, the
template that forked workers come from, the memory of the published job. It also owns the arena, and the pipe that wakes
the thread that waits for the workers. It keeps no job, so that a finalizer may hold it: a job leads to the
user's dataset, and that often to the loader.

A slot is free only when its writer has ended: never, if that is left behind (`KILLED_GRACE`). In a process that the
user forks `close` does nothing: the workers belong to the main process.

The lifeline is a pipe. The kernel closes the main process's end of it when that process ends, also by SIGKILL, and then
kills the workers (`worker.die_with`). So a worker ends that holds the GIL, in which none of its own threads can notice
anything. Processes that a worker starts are the user's: they live on. The kernel may refuse the signal (a sandbox), and
elsewhere than on Linux there is none. Then the worker's receiver thread ends the process, which it cannot while code in
C holds the GIL.

What can go wrong: no process, descriptor or memory (OSError, MemoryError), a job that cannot be pickled. If the
template is dead, the worker is forked from the main process, and the next one from another template.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Any

import multiprocess
from multiprocess import connection

from sharded_loader.base import host_clock
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.limits import oom_kills
from sharded_loader.base.system import PORTABLE, can_pass_descriptors, open_pidfd, write_to_stderr
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, WORDS, Heartbeat, heartbeat_in, new_heartbeat
from sharded_loader.engine.messages import Job, Task
from sharded_loader.memory import publish
from sharded_loader.memory.arena import Arena
from sharded_loader.memory.codec import Encoded
from sharded_loader.memory.segments import Segment, Slot, create
from sharded_loader.pools.deaths import Death
from sharded_loader.pools.process import start
from sharded_loader.pools.process.link import CANCEL, DEATH, HEARTBEAT, JOB, LEAVE, STACKS, Link
from sharded_loader.pools.process.worker import STACKS_SIGNAL, find_libraries
from sharded_loader.pools.process.worker import main as work
from sharded_loader.pools.supervised import Transport, Worker

CLOSING_GRACE = 0.02
"""Seconds that workers get to end by themselves in `close`. An idle one needs 2 ms, under fork 4. There the
kernel takes apart its copy of the main process's page tables (4 ms for 150 MB), and then the template's.

`close`, two workers, two cores, medians of 16, the machine busy with other things (load 4 to 7): fork 29 ms idle and
39 ms with workers that hold the GIL (least 13, 18); spawn 8 and 14 ms (least 5, 10)."""

BUSY_GRACE = 0.005
"""The same for those that are in a batch. They would not notice before its end."""

SHORT_GRACE = 0.5
"""How many seconds a worker that hangs has to write the user's frames. If it holds the GIL, it cannot."""

STACKS_GRACE = 1.0
"""Seconds in which a worker that hangs writes its stacks and ends: 1 to 20 ms, and more on a busy machine."""

ROWS = 2048
"""Workers whose heartbeats have room in the shared memory, with those that are leaving: 128 KB."""

KILLED_GRACE = 3.0
"""Seconds in which a killed process ends. One that does not is inside the kernel, with a disk or a network file system
that does not answer: nothing ends it before that does, so it is left behind."""

# Of published jobs. Negative, unlike those of batches, and each its own: a worker that is in a sample may get two in a
# row.
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
        self.row = -1  # of the shared memory
        self.heartbeat: Heartbeat = new_heartbeat()
        self.has_grown = False  # it takes more memory than it may
        self.has_ended = False  # as far as is known, and it was not replaced yet; or it was killed for its silence
        self._released = False
        self._killed_at = math.inf
        self.exitcode: int | None = None
        # The process itself. Its twin is the process object's sentinel: a pipe that the worker holds, and closes in
        # what the dataset forks (`worker.main`). What code in C forks keeps it open after the worker's death.
        pidfd = open_pidfd(process.pid)
        self.sentinel: int = process.sentinel if pidfd is None else pidfd

    @property
    def who(self) -> str:
        return f"worker {self.number} (pid {self.pid})"

    def is_alive(self) -> bool:
        """Whether the process is not over, whatever program may have reaped it."""
        return not self._released and not connection.wait([self.sentinel], 0)

    def is_busy(self) -> bool:
        """Whether it is in a batch, and lives."""
        return bool(self.heartbeat[SAMPLE] != IDLE) and self.is_alive()

    def kill(self) -> None:
        """SIGKILL, if it has not been released; on Windows, TerminateProcess."""
        if not self._released:
            self._killed_at = min(self._killed_at, host_clock.now())
            with contextlib.suppress(ValueError, OSError):
                self.process.kill()

    def is_over(self) -> bool:
        """Whether nothing is to be expected of one that `has_ended`: or it was killed for its silence, and stays."""
        return (self.hung and host_clock.now() - self._killed_at > KILLED_GRACE) or not self.is_alive()

    def kill_late(self, seconds: float) -> None:
        with uninterrupted():
            write_to_stderr(f"sharded_loader: {self.who} made no progress for {seconds:g} s. Its stacks:\n")
            # It writes them and ends; a stopped worker does neither.
            self.link.send(STACKS, 1)
            self.wait(SHORT_GRACE)
            if STACKS_SIGNAL is not None and self.is_alive():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.pid, STACKS_SIGNAL)
            self.wait(STACKS_GRACE)
            self.kill()
        self.has_ended = True

    def wait(self, timeout: float) -> None:
        """Wait for the end of the process."""
        if not self._released:
            connection.wait([self.sentinel], timeout)

    def release(self) -> None:
        """End the process, if it has not ended, and give back what belongs to it."""
        if self._released:
            return
        owns_sentinel = self.sentinel != self.process.sentinel
        try:
            if self.is_alive():
                self.kill()
                self.wait(max(0.0, self._killed_at + KILLED_GRACE - host_clock.now()))
                if self.is_alive():
                    self.slots.clear()  # it may still write there
                    fate = "waits inside the kernel, for a disk or a network file system, say. It is left behind"
                    write_to_stderr(f"sharded_loader: {self.who} was killed and does not end: it {fate}\n")
                    self.process.close()  # what it can be waited for with
                    return
            self.process.join()
            self.exitcode = self.process.exitcode
            self.process.close()
        except ValueError:
            # The user's program has reaped it (SIGCHLD ignored, a waitpid(-1) loop), so multiprocess believes that
            # it runs for ever. Its descriptors are closed with the process object.
            pass
        finally:
            self._released = True
            self.heartbeat = list(self.heartbeat)  # a copy, so that holding the worker does not hold the memory
            if owns_sentinel:
                os.close(self.sentinel)

    def where(self) -> Sequence[int] | None:
        if not self.ready:
            return ()
        return self.heartbeat if self.tasks else None

    def cancel(self, run: int) -> None:
        self.link.send(CANCEL, run)  # its last task may not have begun; it answers for each that it drops

    def tell(self) -> None:
        self.link.send(STACKS, 0)


class ProcessTransport(Transport[ProcessWorker]):
    """Worker processes, and the pipes to them. Keeps no job, so finalizers may hold it.

    Args:
        num_workers, start_method, max_bytes: of the `ProcessPool`.

    Attributes:
        waker: both ends of the pipe that `wake` writes to.
        arena: the slots that batches lie in.
        template, heartbeats, lifeline: what workers start with.
        published: its number, the job and its memory; None: forked workers have the job.
    """

    def __init__(self, num_workers: int, start_method: str, max_bytes: int | None) -> None:
        self.num_workers = num_workers
        self.start_method = start_method
        self.max_bytes = max_bytes
        self.workers: list[ProcessWorker] = []
        self.leaving: list[ProcessWorker] = []
        self.arena = Arena(max_bytes)
        self.waker: tuple[connection.Connection, connection.Connection] | None = None
        self.heartbeats: Segment | None = None
        self.lifeline: tuple[int, int] | None = None
        self.template: start.Template | None = None
        self.published: tuple[int, Encoded, Segment | None] | None = None
        self._oom_kills: int | None = None
        self._is_up = False  # the workers have been started: one that is launched now joins them
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
        # Forked workers hold the dataset as it was: new ones are born with the new one, and do what was begun.
        begun = [task for worker in (*self.leaving, *self.workers) for task in worker.tasks.values()]
        with uninterrupted():
            self.stop_workers()
            self.open()
            self.launch_all(job)
        if self.start_method == "spawn":
            self._publish(job)  # while they start: that takes as long as to publish 150 MB
        self._send_job(*self.workers)
        self._is_up = True
        return begun

    def _publish(self, job: Job) -> frozenset[str]:
        """Pickle the job, for workers that do not inherit it; the modules that they need for it."""
        encoded = publish.publish(job, **job.parts)
        with uninterrupted():
            self._unpublish()
            self.published = (number := next(_numbers)), *publish.share(encoded, number)
        return encoded.modules

    def _unpublish(self) -> None:
        published, self.published = self.published, None
        if published is not None and (segment := published[2]) is not None:
            segment.close()  # workers that have mapped it keep theirs

    def _send_job(self, *workers: ProcessWorker) -> None:
        """Send workers the job, if it is published."""
        if self.published is not None:
            number, job, segment = self.published
            for worker in workers:
                if segment is not None:
                    worker.link.send_segment(segment)
                worker.link.send(JOB, number, content=job.head, buffers=job.buffers, places=job.places)

    def make_template(self, job: Job) -> None:
        """Fork the template, if there is none."""
        try:
            with uninterrupted():
                if self.template is None and can_pass_descriptors():
                    self.template = start.Template(job)
        except OSError as error:
            start.warn(f"the process that workers are forked from could not be forked ({error}); {_AS_IT_IS_NOW}")

    def open(self) -> None:
        """Make what workers need to start. Twice does nothing."""
        if self.waker is not None:
            return
        self._pid = os.getpid()
        self.waker = multiprocess.Pipe(duplex=False)
        try:
            self.heartbeats = create(0, ROWS * WORDS * 8)
        except OSError as error:
            raise MemoryError(f"no shared memory to start workers with ({error}): free some, or files") from error
        self.lifeline = os.pipe() if sys.platform == "linux" else None
        self._oom_kills = oom_kills()

    def launch(self, number: int, job: Job) -> ProcessWorker:
        if multiprocess.current_process().daemon:
            raise RuntimeError(
                "this is a worker process, which may have none of its own: give the loader that the dataset makes "
                "num_workers=0, or threads (thread_pool=True)"
            )
        if self.start_method == "fork" and not can_pass_descriptors() and self._is_up:
            # The template could not be given the worker's end of the pipe, so there is none.
            start.warn(f"this system does not pass descriptors between processes; {_AS_IT_IS_NOW}")
        try:
            process, link = self._start_process(number, job)
        except start.TemplateGone as error:
            if (gone := self.template) is not None:
                self.template = None
                gone.close()
            start.warn(f"{error}; {_AS_IT_IS_NOW}")
            process, link = self._start_process(number, job, directly=True)
        worker = ProcessWorker(number, process, link)
        with contextlib.ExitStack() as undo:  # another thread may close the transport in the middle of this
            undo.callback(worker.release)
            undo.callback(link.close)
            if self.heartbeats is not None:
                # A row that no worker has. Its number will not do: one that is leaving may have it too.
                used = {one.row for one in (*self.workers, *self.leaving)}
                worker.row = next(row for row in range(ROWS) if row not in used)
                worker.heartbeat = heartbeat_in(self.heartbeats.mapping, worker.row)
                worker.heartbeat[SAMPLE] = IDLE
                link.send_segment(self.heartbeats, HEARTBEAT, worker.row)
            if (lifeline := self.lifeline) is not None and not PORTABLE:
                if can_pass_descriptors():
                    link.send(DEATH, descriptor=lifeline[0])
                else:
                    link.send(DEATH, content=f"/proc/{os.getpid()}/fd/{lifeline[0]}".encode())
            # A forked worker has its job, but begins when a message tells it to. It has then taken the lifeline, which
            # comes before: it ends with the main process even if the user's code holds the GIL from its first line on.
            if self.start_method == "fork":
                link.send(JOB)
            elif self._is_up:
                self._send_job(worker)
            undo.pop_all()
        return worker

    def _start_process(self, number: int, job: Job, *, directly: bool = False) -> tuple[Any, Link]:
        """The process of a worker, and the link to it."""
        forks = self.start_method == "fork"
        if forks and self._is_up and not directly:
            self.make_template(job)  # before the pipe is made, whose end it would keep: that would hide a death
        # A pipe for every try: a template that is killed may have forked a worker before, which holds its end.
        ours, theirs = multiprocess.Pipe(duplex=True)
        link = Link(ours)
        try:
            if self.template is not None:
                return self.template.fork(number, self.num_workers, theirs), link
            if forks:
                name = f"{start.NAME}-{number}"
                return start.start_forked(name, work, theirs, number, self.num_workers, job), link
            return start.spawn_worker(number, self.num_workers, self.start_method, theirs), link
        except BaseException:
            link.close()
            raise
        finally:
            theirs.close()

    def retire(self, worker: ProcessWorker) -> None:
        self.leaving.append(worker)
        worker.link.send(LEAVE)  # behind its tasks

    def wake(self) -> None:
        """Wake who waits for the workers. Any thread may call this."""
        waker = self.waker
        if waker is not None:
            with contextlib.suppress(OSError):  # closed by another thread just now
                waker[1].send_bytes(b"")

    # -- workers that end, or stand still -------------------------------------------------------------------

    def last_words(self, worker: ProcessWorker, error: BaseException | None) -> Death:
        worker.wait(0.0 if worker.hung else 1.0)
        worker.release()
        death = Death(worker.number, worker.pid, worker.exitcode, self.oom_kills())
        return death._replace(hung=worker.hung, heartbeat=list(worker.heartbeat))

    def oom_kills(self) -> int | None:
        """How many processes of this cgroup the kernel has killed for want of memory since the workers started."""
        if self._oom_kills is None or (now := oom_kills()) is None:
            return None
        return max(0, now - self._oom_kills)

    def release(self, worker: ProcessWorker) -> None:
        worker.row = -1
        worker.link.close()
        self.free_slots(worker)

    def free_slots(self, worker: ProcessWorker) -> None:
        """The worker is reaped: what it was writing into is free; what is lent comes back by itself."""
        slots, worker.slots = worker.slots, {}
        for slot in filter(None, slots.values()):
            self.arena.give(slot)

    # -- the end --------------------------------------------------------------------------------------------

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the workers
        workers = [*self.workers, *self.leaving]
        steps: list[Any] = [worker.link.close for worker in workers]  # the workers end
        steps += [worker.slots.clear for worker in workers]
        # Meanwhile: to give 150 MB back takes as long as a process takes to end. Workers have mappings of their own.
        steps += [self._unpublish, self.arena.close, self.stop_workers]
        steps += [one.close for one in (*(self.waker or ()), self.heartbeats) if one is not None]
        steps += [functools.partial(os.close, end) for end in self.lifeline or ()]
        with uninterrupted(), contextlib.ExitStack() as stack:  # each step is done, whatever another one raises
            self.waker = self.lifeline = self.heartbeats = None
            self._new_arena()
            for step in reversed(steps):
                stack.callback(step)

    def _new_arena(self) -> Arena:
        """Have another arena; the one before."""
        before, self.arena = self.arena, Arena(self.max_bytes, self.arena.register, self.arena.pinned)
        return before

    def hand_over(self) -> Arena:
        """End the workers, and give up the arena as it is: another pool may use it."""
        with uninterrupted():
            self.stop_workers()
            arena = self._new_arena()
            _owned[id(arena)] = arena
        return arena

    def stop_workers(self) -> None:
        """End the workers, after `BUSY_GRACE` or `CLOSING_GRACE` by SIGKILL."""
        workers, self.workers, leaving, self.leaving = self.workers, [], self.leaving, []
        workers += leaving
        self._is_up = False
        ended, self.template = self.template, None
        for worker in workers:
            worker.link.close()
        if ended is not None and not ended.has_forked:
            ended.finish()
        began = host_clock.now()
        for grace, reluctant in ((BUSY_GRACE, ProcessWorker.is_busy), (CLOSING_GRACE, ProcessWorker.is_alive)):
            for worker in workers:
                worker.wait(max(0.0, began + grace - host_clock.now()))
            # All of them first, then wait: to tear down a process takes 5 ms, and they can do it side by side.
            for worker in workers:
                if reluctant(worker):
                    worker.kill()
        if ended is not None:
            ended.finish()  # it reaps what is left while we wait for that
        for worker in workers:
            worker.release()
            self.free_slots(worker)
        if ended is not None:
            ended.close()


# -- processes that the user forks ------------------------------------------------------------------------------------

_owned: weakref.WeakValueDictionary[int, ProcessTransport | Arena] = weakref.WeakValueDictionary()
"""What pools have, and the arenas of pools that have ended, also in between two pools. By their ids: another thread may
add to it at any time, and `valuerefs` makes its list in one step."""


def _live() -> tuple[list[ProcessTransport], list[Arena]]:
    found = [one for reference in _owned.valuerefs() if (one := reference()) is not None]
    transports = [one for one in found if isinstance(one, ProcessTransport)]
    return transports, [one for one in found if isinstance(one, Arena)] + [one.arena for one in transports]


def _before_fork() -> None:
    """A child that the user forks shares the memory of the batches that it holds: they must stay as they are."""
    if not start.is_starting_worker():
        for arena in _live()[1]:
            arena.retire_lent()


def _after_fork_in_child() -> None:
    transports, arenas = _live()
    for arena in arenas:
        arena.close_descriptors()
    for transport in transports:
        ends, transport.lifeline = transport.lifeline, None
        for end in ends or ():  # its copy must not keep the workers alive
            os.close(end)
        if transport.heartbeats is not None:
            transport.heartbeats.close_descriptor()
        if transport.template is not None:
            transport.template.control.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
