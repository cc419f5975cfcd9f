"""Threads that read: one dataset object for all, nothing is pickled, nothing is copied.

    submit -> tasks --> thread i: Reader -> results, bell --> wait

For datasets that wait (network, disk) or whose work releases the GIL (decoding, NumPy), and wherever starting
processes is a burden: notebooks, Windows. The dataset must be safe to read from several threads.

Queues are `queue.SimpleQueue`, whose ``put`` may interrupt itself: a signal handler may close the loader in
the middle of `submit`. A task brings its reader along, and a thread that waits holds neither: threads are
roots of the garbage collector, and a reader leads to the user's dataset, often to the loader itself.

A thread that is in the user's code when the pool is closed cannot be stopped: it ends after its sample, its
result is dropped, and as a daemon it does not keep the program alive. The same with one that has stood still for
``timeout`` seconds: it is written off, an error stands in its batch's place, and another thread has its number.
Whether it has finished just then is settled under its handle's lock, so a batch has one fate. Either way it is relieved
of the global generators, if it hangs where it has seeded them for itself: others wait for those.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from sharded_loader.batching.protocol import Empty
from sharded_loader.engine.board import BEGINNING, IDLE, RUN, SAMPLE, SEQ, new_board
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken, check_init_fn, check_num_workers, check_timeout
from sharded_loader.engine.reader import Reader
from sharded_loader.errors import add_note, as_exception
from sharded_loader.global_generators import free_globals_of, holder_before
from sharded_loader.interrupts import uninterrupted
from sharded_loader.workers.supervision import Silent, Watch, timed_out

CLOSING_GRACE = 0.2
"""Seconds that `close` waits for threads that are in the user's code."""

_pool_numbers = itertools.count()


class ThreadHandle:
    """The place of one thread: what it reads, and whether anybody waits for it still (both change under ``lock``)."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lock = threading.Lock()
        self.board = new_board()
        self.silent = Silent()
        self.task: Task | None = None
        self.written_off = False
        self.thread: threading.Thread | None = None


class _Shared:
    """What the threads of one start of the pool see. They do not see the pool, so it can be collected."""

    def __init__(self, empty: Empty) -> None:
        self.empty = empty
        self.tasks: queue.SimpleQueue[tuple[Reader, Task] | None] = queue.SimpleQueue()
        self.live: set[int] = set()  # runs whose tasks are wanted
        self.results: deque[Result | Exception] = deque()
        self.bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closing = False
        self.handles: list[ThreadHandle] = []

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
        for _ in self.handles:
            self.tasks.put(None)
        self.ring()
        deadline = time.monotonic() + CLOSING_GRACE
        for handle in self.handles:
            thread = handle.thread
            if thread not in (None, threading.current_thread()) and thread.ident is not None:
                thread.join(max(0.0, deadline - time.monotonic()))
                if thread.is_alive():
                    free_globals_of(thread.ident)


class ThreadPool(Pool):
    """Read in threads.

    Args:
        num_workers: how many threads.
        worker_init_fn: called with the worker's number, once in each thread, before it reads.
        timeout: seconds without progress on one sample, after which a `WorkerTimeoutError` stands in the batch's
            place. Counted while the loop waits for a batch. The thread cannot be stopped; another takes over. None:
            never.

    Raises:
        ValueError: ``num_workers`` below 1, or a ``timeout`` that is not above 0.
        TypeError: they are no numbers, or ``worker_init_fn`` cannot be called.

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
        self._watch = Watch(check_timeout(timeout))
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
        if self.started:
            return
        shared = _Shared(self.empty)
        # Any number of tasks: threads take from one queue, and a task that has not begun can still be dropped.
        self.room = 1 << 30
        self._number = next(_pool_numbers)
        shared.handles = [self._new_handle(shared, number) for number in range(self.num_workers)]
        try:
            self._shared = shared
            self._closers.append(shared.close)
            for handle in shared.handles:
                assert handle.thread is not None  # just made
                handle.thread.start()
        except BaseException:  # interrupted: without its threads it would be waited for in vain
            self.close()
            raise

    def _new_handle(self, shared: _Shared, number: int) -> ThreadHandle:
        handle = ThreadHandle(number)
        handle.thread = threading.Thread(
            target=_work,
            args=(shared, handle, [self.worker_init_fn]),
            name=f"sharded_loader-{self._number}-thread-{number}",
            daemon=True,
        )
        return handle

    def submit(self, tasks: Sequence[Task]) -> None:
        if self._shared is not None and self._reader is not None:
            for task in tasks:
                self._shared.live.add(task.run)
                self._shared.tasks.put((self._reader, task))

    def wait(self, block: bool = True) -> Sequence[Result]:
        shared = self._shared
        if shared is None:
            return ()
        if block and not shared.results:
            self.waiting = True
            with contextlib.suppress(queue.Empty):
                shared.bell.get(timeout=self._watch.step)
            self.waiting = False
        if self._watch.timeout is not None:
            self._write_off(shared, self._watch.timeout)
        results: list[Result] = []
        while shared.results:
            result = shared.results.popleft()
            if isinstance(result, Exception):
                self.close()
                raise PoolBroken(result)
            results.append(result)
        return results

    def _write_off(self, shared: _Shared, timeout: float) -> None:
        """Errors for the batches over which threads stand still; others take their places."""
        threads = {handle.thread.ident for handle in shared.handles if handle.thread is not None}
        busy = []
        for handle in shared.handles:
            if handle.task is None:
                continue
            if handle.thread is not None and holder_before(handle.thread.ident) in threads:
                handle.silent = Silent()  # the one that it waits for is watched itself
            busy.append((handle, handle.silent, handle.board))
        for handle in self._watch.late(busy):
            task, words = handle.task, list(handle.board)
            if task is None or words[SAMPLE] == IDLE:
                continue  # it has just finished
            error = timed_out(f"thread {handle.number}", timeout, task, words, 1, killed=False)
            another = self._new_handle(shared, handle.number)
            assert handle.thread is not None and another.thread is not None  # made with their handles
            with uninterrupted():  # half of it would be a batch, or a thread, that nobody has
                with handle.lock:
                    if handle.task is not task:
                        continue  # likewise, while its error was made
                    handle.written_off = True
                shared.results.append(Result(task.run, task.seq, error=error))
                shared.handles[shared.handles.index(handle)] = another
                another.thread.start()
            free_globals_of(handle.thread.ident)

    def wake(self) -> None:
        if self._shared is not None:
            self._shared.ring()

    def cancel(self, run: int) -> None:
        if self._shared is not None:
            self._shared.live.discard(run)

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


def _work(shared: _Shared, handle: ThreadHandle, init: list[Callable[[int], Any] | None]) -> None:
    """A thread, from its first line to its last. ``init`` is emptied: a thread's arguments live as long as it."""
    number, board = handle.number, handle.board
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
        if task.run in shared.live:
            board[RUN], board[SEQ], board[SAMPLE] = task.run, task.seq, BEGINNING
            handle.task = task
            result = reader.read(task, f"thread {number}", shared.empty, board)
            with handle.lock:
                board[SAMPLE], handle.task = IDLE, None
                if shared.closing or handle.written_off:
                    return
            shared.results.append(result)
            shared.ring()
            del result
        del taken, reader, task  # a thread that waits holds nobody's batch
