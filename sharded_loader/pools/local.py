"""Pools that read in this process: in the iterating thread, or in others.

    InlinePool   submit -> tasks -> wait: Reader.read -> Result
    ThreadPool   submit -> tasks --> thread i: Reader -> results, bell --> wait

With the inline pool there is nothing to start or prefetch, and debuggers work. A task interrupted by an exception such
as Ctrl-C stays queued, and the next `wait` reads it again.

Threads share one dataset object, which must be thread-safe. They suit datasets that wait for I/O or release the GIL,
and environments where processes are a burden: notebooks, Windows.

Queues are `queue.SimpleQueue`, whose ``put`` is reentrant: a signal handler may close the loader during `submit`. Tasks
carry their reader, so a waiting thread does not hold it: threads are roots of the garbage collector, and a reader leads
to the user's dataset, and often to the loader itself.

A thread in user code cannot be stopped. When the pool closes, it ends after its sample, as a daemon. If it stalls for
``timeout`` seconds it is abandoned: its batch gets an error, and another thread takes its number. If the sample arrives
after all, the pipeline uses the first result. A hanging thread gives up the global generators that it has seeded.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from sharded_loader.base import host_clock
from sharded_loader.base.errors import add_note, as_exception
from sharded_loader.base.interrupts import ENDING_SECONDS, program_ends
from sharded_loader.base.system import write_to_stderr
from sharded_loader.batching.protocol import Empty
from sharded_loader.data.inspection import warn_of_open_file
from sharded_loader.engine.heartbeat import BEGINNING, IDLE, RUN, SAMPLE, SEQ, UNUSED
from sharded_loader.engine.messages import NOTHING, Job, Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken, WorkerPool
from sharded_loader.engine.reader import Reader
from sharded_loader.pools.deaths import Watch, timed_out
from sharded_loader.pools.task_reader import reader_for, stack_of

CLOSING_GRACE = 0.2
"""Seconds that `close` waits for threads in user code; the end of the program waits for `ENDING_SECONDS`."""

_pool_numbers = itertools.count()


class _Shared:
    """State shared by the threads of one start. They do not refer to the pool, so it can be collected."""

    def __init__(self, empty: Empty, queues: int) -> None:
        self.empty = empty
        # One queue for all threads, or one per thread if tasks have lanes.
        # None tells a thread to look up its queue again. It stays in the queue, for the next thread.
        self.queues: list[queue.SimpleQueue[tuple[Any, Task] | None]] = [queue.SimpleQueue() for _ in range(queues)]
        self.live: set[int] = set()  # runs that are not cancelled
        self.abandoned: set[tuple[int, int]] = set()  # (run, part) in which a thread hangs: the part ends there
        self.results: deque[Result | Exception] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closing = False
        self.threads: list[_Thread] = []

    def move(self, queues: int) -> None:
        """Replace the queues, and move waiting tasks and all threads to the new ones."""
        before, self.queues = self.queues, [queue.SimpleQueue() for _ in range(queues)]
        for tasks in before:
            with contextlib.suppress(queue.Empty):
                while (taken := tasks.get_nowait()) is not None:
                    self.queues[(taken[1].lane or 0) % queues].put(taken)
            tasks.put(None)

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that will. Only a waiting thread may take the token."""
        if self.bell.empty():
            self.bell.put(None)

    def end(self) -> None:
        """End the threads as far as possible. May be called again after an interruption."""
        self.closing = True
        for tasks in self.queues:
            tasks.put(None)
        self.ring()
        left = [one for one in self.threads if one is not threading.current_thread() and one.ident is not None]
        deadline = host_clock.now() + (ENDING_SECONDS if program_ends() else CLOSING_GRACE)
        for thread in left:
            thread.join(max(0.0, deadline - host_clock.now()))
        self.threads.clear()


class _Thread(threading.Thread):
    """A worker thread, its current task, and whether its result is still needed."""

    def __init__(self, shared: _Shared, name: str, number: int, init: Callable[[int], object] | None) -> None:
        super().__init__(name=f"{name}-{number}", daemon=True)
        self.shared = shared
        self.number = number
        self.init = init
        self.heartbeat = list(UNUSED)
        self.task: Task | None = None
        self.abandoned = False

    def run(self) -> None:
        """Run the thread. Whatever it raises becomes an error of the pool."""
        try:
            if (init := self.init) is not None:
                init(self.number)
            self.init = init = None
            self._serve()
        except BaseException as error:
            failure = as_exception(error, "while a worker started" if self.init else "by a thread of the loader")
            if self.init is not None:
                add_note(failure, f"sharded_loader: while thread {self.number} started (worker_init_fn)")
            self.shared.results.append(failure)
            self.shared.ring()

    def _serve(self) -> None:
        """Read tasks until the end. While waiting, hold no reference to user objects."""
        shared, heartbeat, who = self.shared, self.heartbeat, f"thread {self.number}"
        while not self.abandoned and not shared.closing:
            queues = shared.queues
            tasks = queues[self.number % len(queues)]
            if (taken := tasks.get()) is None or shared.closing:
                tasks.put(None)  # for the next thread
                continue
            reader, task = taken
            if task.run in shared.live:
                heartbeat[RUN], heartbeat[SEQ], heartbeat[SAMPLE] = task.run, task.seq, BEGINNING
                self.task = task
                result = Result(task.run, task.seq, NOTHING)
                if task.part is None or (task.run, task.part.number) not in shared.abandoned:
                    result = reader.read(task, who, shared.empty, heartbeat, self.number)
                heartbeat[SAMPLE], self.task = IDLE, None
                if not shared.closing:
                    shared.results.append(result)
                    shared.ring()
                del result
            del taken, reader, task


class InlinePool(Pool):
    """Read in the thread that iterates.

    Example:
        >>> from sharded_loader import InlinePool, ShardedDataLoader
        >>> [batch.tolist() for batch in ShardedDataLoader(range(4), 2, pool=InlinePool())]
        [[0, 1], [2, 3]]
    """

    room = 1

    def __init__(self) -> None:
        self.reader: Reader | None = None
        self._tasks: deque[Task] = deque()

    def __repr__(self) -> str:
        return "InlinePool()"

    @property
    def started(self) -> bool:
        return self.reader is not None

    def start(self, job: Job) -> None:
        self.reader = reader_for(job)

    def submit(self, tasks: Sequence[Task]) -> None:
        self._tasks.extend(tasks)

    def wait(self, block: bool = True) -> Sequence[Result]:
        reader = self.reader
        if reader is None or not self._tasks or not block:
            return ()
        # Dequeued while it is read, because a dataset may itself iterate over the loader.
        task = self._tasks.popleft()
        self.waiting = True
        try:
            result = reader.read(task, empty=self.empty)
            self.waiting = False
        except BaseException:
            self._tasks.appendleft(task)
            raise
        try:
            return (result,)
        finally:
            del result  # break the cycle error -> traceback -> this frame -> error, which only the collector could free

    def cancel(self, run: int) -> None:
        self._tasks = deque(task for task in self._tasks if task.run != run)

    def close(self) -> None:
        self.reader = None
        self._tasks.clear()


class ThreadPool(WorkerPool):
    """Read in threads.

    Args:
        num_workers: number of threads.
        worker_init_fn: function called once in each thread, with its number, before it reads.
        timeout: seconds that a thread may spend on one sample without progress; None: no limit. After that `next`
            raises `WorkerTimeoutError` instead of the batch, and another thread replaces the stalled one, which cannot
            be stopped. Only time in which `next` waits for a batch counts.

    Raises:
        ValueError: ``num_workers`` is below 1, or ``timeout`` is not above 0.
        TypeError: an argument is not a number, or ``worker_init_fn`` cannot be called.

    Example:
        >>> from sharded_loader import ShardedDataLoader, ThreadPool
        >>> [batch.tolist() for batch in ShardedDataLoader(range(4), 2, pool=ThreadPool(2))]
        [[0, 1], [2, 3]]

    Source of the idea: ``thread_pool=True`` of Gluon's loaders.
    """

    def __init__(
        self, num_workers: int, *, worker_init_fn: Callable[[int], object] | None = None, timeout: float | None = None
    ) -> None:
        super().__init__(num_workers, worker_init_fn, timeout)
        self._watch = Watch(self.timeout)
        self._reader: Reader | None = None  # only while the pool runs
        self._job: Any = None  # as above
        self._running: list[_Shared] = []  # at most one

    @property
    def started(self) -> bool:
        return bool(self._running)

    def start(self, job: Job) -> None:
        self._job = replace(job, notes_samples=self.timeout is not None)
        self._reader = reader_for(self._job)
        if self.started:
            return
        if self.num_workers > 1:
            warn_of_open_file(job.dataset, "threads")
        # Unlimited: threads share a queue, and tasks that have not begun can still be dropped.
        self.room = 1 << 30
        self._name = f"sharded_loader-{next(_pool_numbers)}-thread"
        shared = _Shared(self.empty, 1 if job.stream is None else self.num_workers)
        self._running.append(shared)
        for number in range(self.num_workers):
            self._launch(shared, number)

    def _launch(self, shared: _Shared, number: int) -> None:
        shared.threads.append(_Thread(shared, self._name, number, self.worker_init_fn))
        shared.threads[-1].start()

    def _have(self, num_workers: int) -> None:
        for shared in self._running:
            if self.num_workers == 1 < num_workers:
                warn_of_open_file(self._job.dataset, "threads")
            by_lane = self._job.stream is not None
            shared.threads = [thread for thread in shared.threads if thread.is_alive()]
            remaining = [thread for thread in shared.threads if not thread.abandoned]
            for thread in remaining:
                thread.abandoned = thread.number >= num_workers
            if by_lane or len(remaining) > num_workers:
                shared.move(num_workers if by_lane else 1)
            for number in range(len(remaining), num_workers):
                self._launch(shared, number)
                self.num_workers = number + 1
        self.num_workers = num_workers

    def submit(self, tasks: Sequence[Task]) -> None:
        for shared in self._running:
            for task in tasks:
                shared.live.add(task.run)
                shared.queues[(task.lane or 0) % len(shared.queues)].put((self._reader, task))

    def wait(self, block: bool = True) -> Sequence[Result]:
        shared = next(iter(self._running), None)
        if shared is None:
            return ()
        if block and not shared.results:
            self.waiting = True
            with contextlib.suppress(queue.Empty):
                shared.bell.get(timeout=self._watch.step)
            self.waiting = False
        if self.timeout is not None:
            self._abandon_stalled(shared, self.timeout)
        results: list[Result] = []
        while shared.results:
            result = shared.results.popleft()
            if isinstance(result, Exception):
                self.close()
                raise PoolBroken(result)
            results.append(result)
        return results

    def _abandon_stalled(self, shared: _Shared, timeout: float) -> None:
        """Report errors for the batches of stalled threads, and replace these threads."""
        busy = [(thread, thread.heartbeat) for thread in shared.threads if thread.task is not None]
        for thread in self._watch.stalled(busy):
            task, words = thread.task, list(thread.heartbeat)
            if task is None:
                continue
            error = timed_out(f"thread {thread.number}", timeout, task, words, 1, killed=False)
            # Set before checking its task: a thread that has just finished ends after its next batch, without an error.
            was_abandoned, thread.abandoned = thread.abandoned, True
            if thread.task is task:
                if task.part is not None:
                    shared.abandoned.add((task.run, task.part.number))
                shared.results.append(Result(task.run, task.seq, error=error))
            shared.threads.remove(thread)
            if not was_abandoned:
                self._launch(shared, thread.number)
                text = f"thread {thread.number} made no progress for {timeout:g} s. Another has its place"
                self.notices.record("replaced_workers", text)

    def tell_of_wait(self, text: str, task: Task | None) -> None:
        busy = [(each, one) for shared in self._running for each in shared.threads if (one := each.task) is not None]
        has = [(thread, one) for thread, one in busy if task and (one.run, one.seq) == (task.run, task.seq)]
        for thread, _ in (has or busy)[:1]:
            frame = sys._current_frames().get(thread.ident or 0)
            text += ", which " if has else ". No worker has it yet: all are busy, such as "
            text += f"thread {thread.number}{' has' if has else ''}. Its stack:\n"
            text += "" if frame is None else stack_of(frame, __file__)
        write_to_stderr(text.rstrip() + "\n")

    def wake(self) -> None:
        for shared in self._running:
            shared.ring()

    def cancel(self, run: int) -> None:
        for shared in self._running:
            shared.live.discard(run)

    def close(self) -> None:
        self._job = self._reader = None
        self.closer()()

    def closer(self) -> Callable[[], None]:
        running, pid = self._running, os.getpid()

        def close() -> None:
            if os.getpid() == pid:
                for shared in running:
                    shared.end()
                running.clear()

        return close
