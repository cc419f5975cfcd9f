"""What a process pool owns, and gives back: worker processes, their links and slots, the waker, the arena.

    WorkerResources    all of it, also the board (`engine.board`), the lifeline, the template that forked workers come
                       from, the memory of the published job. It knows no job, so finalizers may hold it
    ProcessWorker       one worker: process, link, the tasks and slots that it has in hand

`WorkerResources.close` ends the workers (end-of-file, then SIGKILL, after `BUSY_GRACE` or `CLOSING_GRACE`) and frees a
slot only when its writer has ended: never, if that is left behind (`KILLED_GRACE`). It is called by the pool, or by a
finalizer when the loader is garbage. In a process that the user forks it does nothing: the workers are the trainer's.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import weakref
from typing import Any

import multiprocess
from multiprocess import connection

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.limits import oom_kills
from sharded_loader.base.system import open_pidfd
from sharded_loader.engine.board import IDLE, SAMPLE, WORDS, new_board
from sharded_loader.engine.messages import STACKS, Task, pack_head
from sharded_loader.memory.arena import Arena, Register
from sharded_loader.memory.publish import Published
from sharded_loader.memory.references import Inherited
from sharded_loader.memory.segments import Segment, Slot, create
from sharded_loader.pools.process.lifeline import Lifeline
from sharded_loader.pools.process.link import Link, Poller
from sharded_loader.pools.process.template import Template, is_starting_worker
from sharded_loader.pools.process.worker import STACKS_SIGNAL
from sharded_loader.pools.supervisor import Worker

CLOSING_GRACE = 0.02
"""Seconds that workers get to end by themselves in `close`. An idle one needs 2 ms; under fork 4, because the kernel
takes apart its copy of the trainer's page tables (4 ms for 150 MB), and then the template's.

`close`, two workers, two cores, medians of 16, the machine busy with other things (load 4 to 7): fork 29 ms idle and
39 ms with workers that hold the GIL (least 13, 18); spawn 8 and 14 ms (least 5, 10)."""

BUSY_GRACE = 0.005
"""The same for those that are in a batch. They would not notice before its end."""

SHORT_GRACE = 0.5
"""How many seconds a worker that hangs has to write the user's frames. If it holds the GIL, it cannot."""

STACKS_GRACE = 1.0
"""Seconds in which a worker that hangs writes its stacks and ends: 1 to 20 ms, and more on a busy machine."""

KILLED_GRACE = 3.0
"""Seconds in which a killed process ends. One that does not is inside the kernel, with a disk or a network file system
that does not answer: nothing ends it before that does, so it is left behind."""


class WorkerResources:
    """The worker processes and the pipe that wakes who waits for them. Knows no job, so finalizers may hold it."""

    def __init__(self, max_bytes: int | None) -> None:
        self.workers: list[ProcessWorker] = []
        self.max_bytes = max_bytes
        self.register: Register | None = None
        self.arena = Arena(max_bytes)
        self.wake_reader: Any = None
        self._wake_writer: Any = None
        self.board: Segment | None = None
        self.lifeline: Lifeline | None = None
        self.template: Template | None = None
        self.published: Published | None = None
        self.inherited: Inherited | None = None  # descriptors that spawned workers are started with
        self.poller: Poller | None = None  # of these workers; made again after one of them was replaced
        self._oom_kills: int | None = None
        self._pid = os.getpid()
        _in_use[id(self)] = self

    def open(self, num_workers: int) -> None:
        """Make what workers need to start. Twice does nothing."""
        if self.wake_reader is not None:
            return
        self._pid = os.getpid()
        self.wake_reader, self._wake_writer = multiprocess.Pipe(duplex=False)
        try:
            self.board = create(0, num_workers * WORDS * 8)
        except OSError as error:
            raise MemoryError(f"no shared memory to start workers with ({error}): free some, or files") from error
        self.lifeline = Lifeline()
        self._oom_kills = oom_kills()

    def oom_kills(self) -> int | None:
        """How many processes of this cgroup the kernel has killed for want of memory since the workers started."""
        if self._oom_kills is None or (now := oom_kills()) is None:
            return None
        return max(0, now - self._oom_kills)

    def wake(self) -> None:
        writer = self._wake_writer
        if writer is not None:
            with contextlib.suppress(OSError):  # closed by another thread just now
                writer.send_bytes(b"")

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child has the object, but not the workers
        workers, published = self.workers, self.published
        steps: list[Any] = [worker.link.close for worker in workers]  # the workers end
        steps += [worker.slots.clear for worker in workers]
        # Meanwhile: to give 150 MB back takes as long as a process takes to end. Workers have mappings of their own.
        steps += [one.close for one in (published, self.arena) if one is not None]
        steps.append(self.stop_workers)
        owned = self.wake_reader, self._wake_writer, self.lifeline, self.board, self.inherited
        steps += [one.close for one in owned if one is not None]
        with uninterrupted(), contextlib.ExitStack() as last:  # each step is done, whatever another one raises
            self.wake_reader = self._wake_writer = self.lifeline = self.board = self.published = None
            self.inherited = None
            self.arena = Arena(self.max_bytes, self.register)
            for step in reversed(steps):
                last.callback(step)

    def free_slots(self, worker: ProcessWorker) -> None:
        """The worker is reaped: what it was writing into is free; what is lent comes back by itself."""
        slots, worker.slots = worker.slots, {}
        for slot in slots.values():
            if slot is not None and not worker.left_behind:
                self.arena.give(slot)

    def stop_workers(self) -> None:
        workers, self.workers, self.poller = self.workers, [], None
        template, self.template = self.template, None
        for worker in workers:
            worker.link.close()
        began = time.monotonic()
        for grace, reluctant in ((BUSY_GRACE, ProcessWorker.is_busy), (CLOSING_GRACE, ProcessWorker.is_alive)):
            for worker in workers:
                worker.wait(max(0.0, began + grace - time.monotonic()))
            # All of them first, then wait: to tear down a process takes 5 ms, and they can do it side by side.
            for worker in workers:
                if reluctant(worker):
                    worker.ended_by_close |= not worker.was_killed
                    worker.kill()
        if template is not None:
            template.finish()  # it reaps what is left while we wait for that
        for worker in workers:
            worker.release()
            self.free_slots(worker)
        if template is not None:
            template.close()


_in_use: weakref.WeakValueDictionary[int, WorkerResources] = weakref.WeakValueDictionary()
"""By their ids. Another thread may add to it at any time: `valuerefs` makes its list in one step."""


def _live() -> list[WorkerResources]:
    return [resources for reference in _in_use.valuerefs() if (resources := reference()) is not None]


def _before_fork() -> None:
    """A child that the user forks shares the memory of the batches that it holds: they must stay as they are."""
    if not is_starting_worker():
        for resources in _live():
            resources.arena.retire_lent()


def _after_fork_in_child() -> None:
    for resources in _live():
        resources.arena.close_descriptors()
        if resources.lifeline is not None:
            resources.lifeline.close()
        if resources.board is not None:
            resources.board.close_descriptor()
        if resources.template is not None:
            resources.template.close_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)


class ProcessWorker(Worker):
    """A worker as the trainer sees it. Owns the process object, the link and a descriptor of the process."""

    def __init__(self, number: int, process: Any, link: Link) -> None:
        super().__init__(number)
        self.process = process
        self.pid: int = process.pid
        self.link = link
        self.slots: dict[tuple[int, int], Slot | None] = {}
        self.unsent: list[tuple[Slot | None, Task, bytes | None]] = []
        self.segments = 0
        self.board: Any = new_board()
        self.left_behind = False
        self.ended_by_close = False  # it was told to end, and killed because that took long
        self._released = False
        self._killed_at = math.inf
        self.exitcode: int | None = None
        self.traceback: str | None = None  # of its end in its start
        # The process itself. Its twin is the process object's sentinel: a pipe that the worker holds, and closes in
        # what the dataset forks (`keep_from_children`). What code in C forks keeps it open after the worker's death.
        self._pidfd = open_pidfd(process.pid)
        self.sentinel: int = process.sentinel if self._pidfd is None else self._pidfd

    def has_ended(self) -> bool:
        """Whether the process is over, whoever may have reaped it."""
        return self._released or bool(connection.wait([self.sentinel], 0))

    def is_alive(self) -> bool:
        """Whether the process is not over."""
        return not self.has_ended()

    def is_busy(self) -> bool:
        """Whether it is in a batch, and lives."""
        return bool(self.board[SAMPLE] != IDLE) and self.is_alive()

    def kill(self) -> None:
        """SIGKILL, if it has not been released; on Windows, TerminateProcess."""
        if not self._released:
            self._killed_at = min(self._killed_at, time.monotonic())
            with contextlib.suppress(ValueError, OSError):
                self.process.kill()

    @property
    def was_killed(self) -> bool:
        """Whether `kill` was called."""
        return self._killed_at < math.inf

    def is_over(self, noted: set[int]) -> bool:
        """Whether nothing is to be expected of it: it has ended, or was killed for its silence, and even so does not.

        Args:
            noted: sentinels that have been seen to end; only of those is it asked whether that is still true.
        """
        given_up = self.hung and time.monotonic() - self._killed_at > KILLED_GRACE
        return given_up or (self.sentinel in noted and self.has_ended())

    def dump_stacks(self) -> None:
        """Have the worker write its stacks to stderr and end; wait for that. A stopped worker does neither."""
        self.link.send(pack_head(STACKS))
        self.wait(SHORT_GRACE)
        if STACKS_SIGNAL is not None and self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, STACKS_SIGNAL)
        self.wait(STACKS_GRACE)

    def wait(self, timeout: float) -> None:
        """Wait for the end of the process."""
        if not self._released:
            connection.wait([self.sentinel], timeout)

    def release(self) -> None:
        """End the process, if it has not ended, and give back what belongs to it."""
        if self._released:
            return
        try:
            if self.is_alive():
                self.kill()
                self.wait(max(0.0, self._killed_at + KILLED_GRACE - time.monotonic()))
                if self.is_alive():
                    self.left_behind = True
                    print(
                        f"sharded_loader: worker {self.number} (pid {self.pid}) was killed and does not end: it waits "
                        f"inside the kernel, for a disk or a network file system, say. It is left behind",
                        file=sys.stderr,
                        flush=True,
                    )
                    self.process.close()  # what it can be waited for with
                    return
            self.process.join()
            self.exitcode = self.process.exitcode
            self.process.close()
        except ValueError:
            # Somebody else has reaped it (SIGCHLD ignored, a waitpid(-1) loop), so multiprocess believes that
            # it runs for ever. Its descriptors are closed with the process object.
            pass
        finally:
            self._released = True
            if self._pidfd is not None:
                os.close(self._pidfd)
                self._pidfd = None
