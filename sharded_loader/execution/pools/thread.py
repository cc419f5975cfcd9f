"""Threads that read: one dataset object for all, nothing is pickled, nothing is copied.

    submit -> tasks --(semaphore)--> thread i: Reader -> results --(event)--> receive

For datasets that wait (network, disk) or whose work releases the GIL (decoding, NumPy), and wherever starting
processes is a burden: notebooks, Windows. The dataset must be safe to read from several threads.

A thread that is in the user's code when the pool is closed cannot be stopped: it ends after its sample, its
result is dropped, and as a daemon it does not keep the program alive.
"""

from __future__ import annotations

import itertools
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
        self.tasks: deque[Task] = deque()
        self.available = threading.Semaphore(0)
        self.results: deque[Result | Exception] = deque()
        self.arrived = threading.Event()
        self.readers: list[Reader] = []
        self.closing = False


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
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        return f"ThreadPool({self.num_workers})"

    @property
    def started(self) -> bool:
        return self._shared is not None

    def start(self, job: Job) -> None:
        readers = [Reader(job, f"thread {number}") for number in range(self.num_workers)]
        if self._shared is not None:
            self._shared.readers = readers
            return
        shared = self._shared = _Shared()
        shared.readers = readers
        pool = next(_pool_numbers)
        self._threads = [
            threading.Thread(
                target=_work,
                args=(shared, number, self.worker_init_fn),
                name=f"sharded_loader-{pool}-thread-{number}",
                daemon=True,
            )
            for number in range(self.num_workers)
        ]
        for thread in self._threads:
            thread.start()

    def capacity(self) -> int:
        # Any number: threads take from one queue, and a task that has not begun can still be dropped.
        return 1 << 30 if self._shared is not None else 0

    def submit(self, task: Task) -> None:
        if self._shared is not None:
            self._shared.tasks.append(task)
            self._shared.available.release()

    def receive(self) -> Iterator[Result]:
        shared = self._shared
        if shared is None:
            return
        shared.arrived.clear()  # before looking: what arrives from here on sets it again
        while shared.results:
            result = shared.results[0]
            if isinstance(result, Exception):
                self.close()
                raise result
            yield result
            shared.results.popleft()

    def wait(self) -> None:
        if self._shared is not None:
            self._shared.arrived.wait()

    def wake(self) -> None:
        if self._shared is not None:
            self._shared.arrived.set()

    def cancel(self, run: int) -> None:
        if self._shared is None:
            return
        for task in list(self._shared.tasks):
            if task.run == run:
                try:
                    self._shared.tasks.remove(task)
                except ValueError:
                    continue  # a thread took it just now

    def close(self) -> None:
        shared, self._shared = self._shared, None
        threads, self._threads = self._threads, []
        if shared is None:
            return
        shared.closing = True
        shared.tasks.clear()
        for _ in threads:
            shared.available.release()
        shared.arrived.set()
        deadline = time.monotonic() + CLOSING_GRACE
        for thread in threads:
            if thread is not threading.current_thread() and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))


def _work(shared: _Shared, number: int, worker_init_fn: Callable[[int], Any] | None) -> None:
    """A thread, from its first line to its last."""
    if worker_init_fn is not None:
        try:
            worker_init_fn(number)
        except BaseException as error:
            failure = as_exception(error, "while a worker started")
            add_note(failure, f"sharded_loader: while thread {number} started (worker_init_fn)")
            shared.results.append(failure)
            shared.arrived.set()
            return
    while True:
        shared.available.acquire()
        if shared.closing:
            return
        try:
            task = shared.tasks.popleft()
        except IndexError:
            continue  # it was cancelled
        result = shared.readers[number].read(task)
        if shared.closing:
            return
        shared.results.append(result)
        shared.arrived.set()
        del task, result  # a thread that waits holds nobody's batch
