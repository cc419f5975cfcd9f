"""No workers: the caller reads, when it waits.

The least there is between a dataset and a loop: nothing to start, a debugger works. A task stays in the
queue until its result has been taken, so a KeyboardInterrupt in the dataset loses nothing: the batch is read
again at the next call.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sharded_loader.execution.messages import Job, Result, Task
from sharded_loader.execution.pools.base import Pool
from sharded_loader.execution.reader import Reader


class InlinePool(Pool):
    """Read in the thread that iterates.

    Example:
        >>> from sharded_loader import InlinePool, ShardedDataLoader
        >>> [batch.tolist() for batch in ShardedDataLoader(range(4), 2, pool=InlinePool())]
        [[0, 1], [2, 3]]
    """

    num_workers = 0

    def __init__(self) -> None:
        self._reader: Reader | None = None
        self._tasks: deque[Task] = deque()
        self._results: deque[Result] = deque()

    def __repr__(self) -> str:
        return "InlinePool()"

    @property
    def started(self) -> bool:
        return self._reader is not None

    def start(self, job: Job) -> None:
        self._reader = Reader(job)

    def capacity(self) -> int:
        return 1 - len(self._tasks)

    def submit(self, task: Task) -> None:
        self._tasks.append(task)

    def receive(self) -> Iterator[Result]:
        while self._results:
            yield self._results[0]
            done = self._results.popleft()
            if self._tasks and (self._tasks[0].run, self._tasks[0].seq) == (done.run, done.seq):
                self._tasks.popleft()

    def wait(self) -> None:
        if self._reader is not None and self._tasks and not self._results:
            self._results.append(self._reader.read(self._tasks[0]))

    def wake(self) -> None:
        pass

    def cancel(self, run: int) -> None:
        self._tasks = deque(task for task in self._tasks if task.run != run)

    def close(self) -> None:
        self._reader = None
        self._tasks.clear()
        self._results.clear()
