"""No workers: the caller reads, when it waits.

    pipeline.next -> InlinePool.read(task) -> Result

The least there is between a dataset and a loop: nothing to start, nothing in flight, a debugger works. One batch
is read at a time, whoever asks, because a dataset may not bear two threads. A KeyboardInterrupt in the dataset
loses nothing: the task stays with the pipeline, which has it read again at the next call.
"""

from __future__ import annotations

import threading

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
        # Reentrant: a dataset may itself iterate over the loader.
        self._reading = threading.RLock()

    def __repr__(self) -> str:
        return "InlinePool()"

    @property
    def started(self) -> bool:
        return self._reader is not None

    def start(self, job: Job) -> None:
        self._reader = Reader(job)

    def read(self, task: Task) -> Result | None:
        """The batch of a task; None if the pool has been closed."""
        with self._reading:
            return None if self._reader is None else self._reader.read(task, empty=self.empty)

    def close(self) -> None:
        self._reader = None
