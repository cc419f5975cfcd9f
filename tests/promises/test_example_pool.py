"""A pool of one's own: forty lines over the executor of the standard library, which keep the promises of every pool."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from samples import Drawing

from sharded_loader import ShardedDataLoader
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.engine.reader import Reader


class ExecutorPool(Pool):
    """Two threads of `concurrent.futures`."""

    num_workers = 2
    room = 1 << 30

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    @property
    def started(self) -> bool:
        return self._executor is not None

    def start(self, job: Job) -> None:
        self._reader = Reader(job)
        if self._executor is None:
            self._results: deque[Result] = deque()
            self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
            self._executor = ThreadPoolExecutor(self.num_workers)

    def submit(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            if self._executor is not None:
                self._executor.submit(self._read, self._reader, task, self._results, self._bell)

    def _read(self, reader: Reader, task: Task, results: deque[Result], bell: queue.SimpleQueue[None]) -> None:
        results.append(reader.read(task, "a thread of the executor", self.empty))
        bell.put(None)

    def wait(self, block: bool = True) -> Sequence[Result]:
        if self._executor is None:
            return ()
        if block and not self._results:
            self.waiting = True
            self._bell.get()
            self.waiting = False
        return [self._results.popleft() for _ in range(len(self._results))]

    def wake(self) -> None:
        if self._executor is not None:
            self._bell.put(None)

    def close(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False, cancel_futures=True)


def test_it_keeps_the_promises_of_every_pool() -> None:
    expected = [batch.tolist() for batch in ShardedDataLoader(Drawing(40), 4, shuffle=True, seed=3)]
    with ShardedDataLoader(Drawing(40), 4, shuffle=True, seed=3, pool=ExecutorPool()) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist() for _ in range(3)] == expected[:3]
        state = loader.state_dict()
        assert [batch.tolist() for batch in iterator] == expected[3:]
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loader] == expected[3:]
    assert not loader.pool.started
    with ShardedDataLoader(Drawing(12, [6]), 4, pool=ExecutorPool()) as loader:
        iterator = iter(loader)
        assert len(next(iterator)) == 4
        with pytest.raises(ValueError, match="bad 6"):
            next(iterator)
        assert len(next(iterator)) == 4
