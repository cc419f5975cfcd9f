"""Threads that read: one dataset object for all, nothing is pickled, nothing is copied.

    submit -> tasks --> thread i: Reader -> results, bell --> receive

For datasets that wait (network, disk) or whose work releases the GIL (decoding, NumPy), and wherever starting
processes is a burden: notebooks, Windows. The dataset must be safe to read from several threads.

Queues are `queue.SimpleQueue`, whose ``put`` may interrupt itself: a signal handler may close the loader in
the middle of `submit`. A task brings its reader along, and a thread that waits holds neither: threads are
roots of the garbage collector, and a reader leads to the user's dataset, often to the loader itself.

A thread that is in the user's code when the pool is closed cannot be stopped: it ends after its sample, its
result is dropped, and as a daemon it does not keep the program alive.
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from sharded_loader.errors import add_note, as_exception
from sharded_loader.execution.messages import Job, Result, Task
from sharded_loader.execution.pools.base import Pool, check_init_fn, check_num_workers, check_reserved
from sharded_loader.execution.reader import Reader

CLOSING_GRACE = 0.2
"""Seconds that `close` waits for threads that are in the user's code."""

_pool_numbers = itertools.count()


class _Shared:
    """What the threads of one start of the pool see. They do not see the pool, so it can be collected."""

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Reader, Task] | None] = queue.SimpleQueue()
        self.cancelled: set[int] = set()
        self.results: deque[Result | Exception] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closing = False
        self.threads: list[threading.Thread] = []

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that will.

        One token is enough, and only who waits may take it: a token taken by a thread that merely looks for
        results would be missing to the one that waits for them.
        """
        if self.bell.empty():
            self.bell.put(None)

    def close(self) -> None:
        """End the threads, as far as they can be ended."""
        if self.closing:
            return
        self.closing = True
        for _ in self.threads:
            self.tasks.put(None)
        self.ring()
        deadline = time.monotonic() + CLOSING_GRACE
        for thread in self.threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


class ThreadPool(Pool):
    """Read in threads.

    Args:
        num_workers: how many threads.
        worker_init_fn: called with the worker's number, once in each thread, before it reads.
        timeout: reserved (seconds without progress on one sample); this version takes only None.

    Raises:
        TypeError, ValueError: a bad number of workers.

    Example:
        >>> from sharded_loader import ShardedDataLoader, ThreadPool
        >>> [batch.tolist() for batch in ShardedDataLoader(range(4), 2, pool=ThreadPool(2))]
        [[0, 1], [2, 3]]

    Source of the idea: ``thread_pool=True`` of Gluon's loaders.
    """

    def __init__(
        self,
        num_workers: int,
        *,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        self.num_workers = check_num_workers(num_workers)
        check_init_fn(worker_init_fn)
        check_reserved("ThreadPool", timeout=timeout)
        self.worker_init_fn = worker_init_fn
        self._shared: _Shared | None = None
        self._reader: Reader | None = None
        self._closers: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"ThreadPool({self.num_workers})"

    @property
    def started(self) -> bool:
        return self._shared is not None and not self._shared.closing

    def start(self, job: Job) -> None:
        self._reader = Reader(job)
        if self._shared is not None:
            return
        shared = _Shared()
        pool = next(_pool_numbers)
        shared.threads = [
            threading.Thread(
                target=_work,
                args=(shared, number, [self.worker_init_fn]),
                name=f"sharded_loader-{pool}-thread-{number}",
                daemon=True,
            )
            for number in range(self.num_workers)
        ]
        self._shared = shared
        self._closers.append(shared.close)
        for thread in shared.threads:
            thread.start()

    def capacity(self) -> int:
        # Any number: threads take from one queue, and a task that has not begun can still be dropped.
        return 1 << 30 if self._shared is not None else 0

    def submit(self, task: Task) -> None:
        if self._shared is not None and self._reader is not None:
            self._shared.tasks.put((self._reader, task))

    def receive(self) -> Iterator[Result]:
        shared = self._shared
        if shared is None:
            return
        while shared.results:
            result = shared.results[0]
            if isinstance(result, Exception):
                self.close()
                raise result
            yield result
            shared.results.popleft()

    def wait(self) -> None:
        if self._shared is not None:
            self._shared.bell.get()

    def wake(self) -> None:
        if self._shared is not None:
            self._shared.ring()

    def cancel(self, run: int) -> None:
        if self._shared is not None:
            self._shared.cancelled.add(run)

    def close(self) -> None:
        shared, self._shared = self._shared, None
        self._reader = None
        if shared is not None:
            shared.close()
            self._closers.clear()

    def closer(self) -> Callable[[], None]:
        closers, pid = self._closers, os.getpid()
        return lambda: _close_all(closers) if os.getpid() == pid else None


def _close_all(closers: list[Callable[[], None]]) -> None:
    while closers:
        closers.pop()()


def _work(shared: _Shared, number: int, init: list[Callable[[int], Any] | None]) -> None:
    """A thread, from its first line to its last. ``init`` is emptied: a thread's arguments live as long as it."""
    worker_init_fn = init.pop()
    if worker_init_fn is not None:
        try:
            worker_init_fn(number)
        except BaseException as error:
            failure = as_exception(error, "while a worker started")
            add_note(failure, f"sharded_loader: while thread {number} started (worker_init_fn)")
            shared.results.append(failure)
            shared.ring()
            return
    del worker_init_fn
    while (taken := shared.tasks.get()) is not None and not shared.closing:
        reader, task = taken
        if task.run not in shared.cancelled:
            result = reader.read(task, f"thread {number}")
            if shared.closing:
                return
            shared.results.append(result)
            shared.ring()
            del result
        del taken, reader, task  # a thread that waits holds nobody's batch
