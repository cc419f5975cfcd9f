"""What every pool is: a few verbs over numbered tasks.

    Task(run, seq, ...)  --submit, send-->  pool  --receive-->  Result(run, seq, batch | error)

`run` says which iterator a task belongs to, `seq` which batch of its epoch it is. Results come in any
order, each task's at least once (a task may be done twice after an interruption: the later result is
ignored), and a pool never blocks except in `wait`.

All verbs but `wait` and `wake` are called under the pipeline's lock, by whatever thread happens to drive.
`wait` is called without it, by one thread at a time; it returns when `receive` may have something, when a
worker has ended, or after `wake`.

A pool without workers (`InlinePool`) takes no tasks: it has `read` instead, and the verbs' defaults.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.execution.messages import Job, Result, Task
from sharded_loader.memory.arena import Register


class Pool(ABC):
    """Reads samples and makes batches of them. One loader owns one pool.

    Attributes:
        num_workers: how many workers read at the same time; 0 if the caller does.
        group: how many tasks are best submitted together, more than one while batches are cheap.
        shares_dataset: whether the samples are read from the trainer's own dataset object.
        empty: gives the memory that batches are put together in, where that is this process's own.
    """

    num_workers: int = 0
    group: int = 1
    shares_dataset: bool = True
    worker_init_fn: Callable[[int], Any] | None = None
    empty: Empty = staticmethod(new_array)

    def use_memory(self, empty: Empty, register: Register) -> None:
        """Say where batches are to lie; before the pool is started.

        Args:
            empty: gives the memory that batches are put together in, where that is this process's own.
            register: to be called with each stretch of shared memory that batches come through.
        """
        self.empty = empty

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether the workers run."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Start the workers; those that run already are sent the new job before any later task."""

    def capacity(self) -> int:
        """How many tasks `submit` takes now."""
        return 0

    def submit(self, task: Task) -> None:
        """Give a task to a worker; `send` follows."""
        raise NotImplementedError(f"{self!r} has no workers")

    def send(self) -> None:  # noqa: B027
        """Let the workers have what was submitted."""

    def receive(self) -> Iterable[Result]:
        """The results that are there, without waiting.

        A result counts as received only when the next one is asked for: if the caller is interrupted while
        it files one, that one comes again.
        """
        return ()

    def wait(self) -> None:  # noqa: B027
        """Block until there is something to receive or somebody calls `wake`."""

    def wake(self) -> None:  # noqa: B027
        """Make a `wait` in another thread return."""

    def cancel(self, run: int) -> None:  # noqa: B027
        """Drop the tasks of this run that have not begun."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and give everything back. The pool may be started again."""

    def closer(self) -> Callable[[], None]:
        """What `close` does, as a function that holds neither the pool nor its job.

        For finalizers, which are roots of the garbage collector: a job leads to the user's dataset, and that
        often to the loader.
        """
        return _nothing


def _nothing() -> None:
    """There is nothing to close."""


def check_num_workers(num_workers: Any) -> int:
    """``num_workers`` of a pool that has workers, or an error that says what is wrong."""
    if isinstance(num_workers, bool) or not hasattr(num_workers, "__index__"):
        raise TypeError(f"num_workers is {num_workers!r}; it must be an int, the number of workers")
    if num_workers < 1:
        raise ValueError(f"num_workers is {num_workers}; a pool needs at least 1, InlinePool() has none")
    return int(num_workers)


def check_init_fn(worker_init_fn: Any) -> None:
    """An error if ``worker_init_fn`` cannot be called."""
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError(f"worker_init_fn is {worker_init_fn!r}; it must be a function of the worker's number")


def check_timeout(timeout: Any) -> float | None:
    """``timeout`` of a pool, or an error that says what is wrong."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds, or None")
    return float(timeout)
