"""No workers: the caller reads, when it waits.

    submit -> tasks -> wait: Reader.read -> Result

The least there is between a dataset and a loop: nothing to start, nothing prefetched, a debugger works. If an exception
strikes inside the dataset, such as a Ctrl-C, the task stays, and the next `wait` reads it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.engine.reader import Reader
from sharded_loader.pools.task_reader import reader_for


class InlinePool(Pool):
    """Read in the thread that iterates.

    Example:
        >>> from sharded_loader import InlinePool, ShardedDataLoader
        >>> [batch.tolist() for batch in ShardedDataLoader(range(4), 2, pool=InlinePool())]
        [[0, 1], [2, 3]]
    """

    num_workers = 0
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
        # Out of the queue while it is read: a dataset may itself iterate over the loader.
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
            del result  # otherwise error -> traceback -> this frame -> error, and the loader waits for the collector

    def cancel(self, run: int) -> None:
        self._tasks = deque(task for task in self._tasks if task.run != run)

    def close(self) -> None:
        self.reader = None
        self._tasks.clear()
