"""The interface of a pool: six verbs over numbered tasks.

    start(job)                       start the workers; those that run already are sent the new job
    submit(tasks)                    give tasks to the workers, at most `room` of them
    wait(block) -> results           block until results arrive; return them, in any order
    wake()                           make a `wait` in another thread return
    cancel(run)                      drop the tasks of a run that have not begun
    close()                          stop the workers and release everything; `start` may follow

A result carries the run and seq of its task. A pool whose worker dies submits the task to another worker, and may
return two results for one task (a thread that was thought to hang): the pipeline ignores the second. A task's failure
is its result; `PoolBroken` means that no worker can run at all.

One thread at a time calls a pool, under the pipeline's lock; only `wake` and `resize` may come from other threads.
After an exception inside a verb, such as Ctrl-C, the pipeline calls `close` and `start`, and submits again what was in
flight. So `close` must work in every state. While `waiting` is True, `wait` only waits, and an exception does no harm.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from sharded_loader.base.checks import check_function, check_int
from sharded_loader.base.described import call_of
from sharded_loader.base.notices import Notices
from sharded_loader.base.system import write_to_stderr
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.memory.arena import Register


class PoolBroken(Exception):
    """Raised by `Pool.wait` when no worker can run. The pool is closed, and ``error`` is shown to the user."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Pool(ABC):
    """Reads samples and makes batches of them. One loader owns one pool.

    Attributes:
        num_workers: workers that read at the same time; 0 if the caller does.
        wanted: the number that `resize` was last called with; None: never called.
        group: number of tasks to submit together, above 1 while batches are cheap.
        room: number of tasks that `submit` accepts now.
        notices: counts replaced workers, and batches that take a slow path. Set by the loader.
        shares_dataset: samples are read from the main process's own dataset object.
        is_here: workers are on this machine, and see its files.
        empty: allocates the memory for batches that are assembled in this process.
        worker_init_fn: called with its number in each worker when it starts.
        timeout: seconds without progress after which a worker is replaced; None: never.
        start_unfinished: `finish_start` must be called in the next step.
        waiting: `wait` is idle, or runs the user's code, and has changed nothing.
    """

    num_workers: int = 0
    wanted: int | None = None
    group: int = 1
    room: int = 0
    notices: Notices = Notices()
    shares_dataset: bool = True
    is_here: bool = True
    start_unfinished: bool = False
    waiting: bool = False
    worker_init_fn: Callable[[int], Any] | None = None
    timeout: float | None = None
    empty: Empty = staticmethod(new_array)

    def use_memory(self, empty: Empty, register: Register, *, pinned: Empty | None = None) -> None:
        """Set the memory for batches, before the pool is started.

        Args:
            empty: see `Pool`.
            register: called with each region of shared memory that batches arrive in.
            pinned: allocates pinned memory for one array, if a device is to copy the batches.
        """
        self.empty = empty

    @property
    @abstractmethod
    def started(self) -> bool:
        """True while the workers run."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Start the workers. Running workers are sent the new job before any later task."""

    def finish_start(self) -> None:
        """Do the work that `start` has deferred because it would delay the first batch."""
        self.start_unfinished = False

    @abstractmethod
    def submit(self, tasks: Sequence[Task]) -> None:
        """Give tasks to the workers. If a task cannot be sent, its result is an error."""

    @abstractmethod
    def wait(self, block: bool = True) -> Sequence[Result]:
        """Block until results arrive, a worker has ended, or a thread calls `wake`; return the results.

        With ``block=False``, return the results at hand. If no worker can run, raise `PoolBroken`.
        """

    def tell_of_wait(self, text: str, task: Task | None) -> None:
        """Report a long wait of ``next`` on stderr: ``text``, the worker that has the task, and its stack."""
        write_to_stderr(f"{text}\n")

    def wake(self) -> None:  # noqa: B027
        """Make a `wait` in another thread return."""

    def follow(self, run: int, ahead: object, position: Callable[[], int | None]) -> None:  # noqa: B027
        """Announce the coming samples of a run to datasets on other machines, unless `is_here`.

        ``ahead`` is a picklable object with ``batches`` and ``later`` of `data.datasets.follow`; ``position`` as there.
        """

    def cancel(self, run: int) -> None:  # noqa: B027
        """Drop the tasks of this run that have not begun."""

    def resize(self, num_workers: int) -> None:
        """Change the number of workers. A pool that cannot raises a TypeError."""
        text = f"{type(self).__name__} cannot change its number of workers"
        raise TypeError(f"{text}: give the loader a ThreadPool, a ProcessPool or a RayPool (num_workers= makes one)")

    def adopt(self) -> None:  # noqa: B027
        """Apply the `wanted` number of workers. The pipeline calls this in a step, between two other verbs."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and release everything. The pool may be started again."""

    def closer(self) -> Callable[[], None]:
        """Return a function that does what `close` does, but holds neither the pool nor its job.

        Finalizers are roots of the garbage collector, and a job often leads to the loader through the user's dataset.
        """
        return lambda: None


owners: weakref.WeakKeyDictionary[Pool, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""Pipeline of the loader that owns each pool."""


class WorkerPool(Pool):
    """Base class of pools with workers. Its repr and pickle call the constructor: each argument is an attribute.

    Raises:
        TypeError, ValueError: An argument has the wrong type, ``num_workers`` is below 1, or ``timeout`` not above 0.
    """

    def __init__(self, num_workers: int, worker_init_fn: Callable[[int], object] | None, timeout: float | None) -> None:
        self.num_workers = check_num_workers(num_workers)
        check_init_fn(worker_init_fn)
        self.worker_init_fn = worker_init_fn
        self.timeout = check_timeout(timeout)

    def resize(self, num_workers: int) -> None:
        """Change the number of workers. The batches, their order, states and errors stay the same.

        You may call it at any time and from any thread. Inside an epoch, ``next`` makes the change: at once in a thread
        that waits there, otherwise in the next call. `num_workers` of the loader changes when it is done. Surplus
        workers finish their batches, and end. If the system cannot start another worker, there is a warning.
        ``loader.prefetch`` follows, unless you have set it. Iterable data keeps its number of parts.

        Args:
            num_workers: The number of workers, at least 1.

        Raises:
            TypeError, ValueError: ``num_workers`` is no integer, or below 1.
            LoaderClosedError: The loader of the pool is closed.
            RuntimeError: This process is a forked child of the one that made the loader.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> with ShardedDataLoader(range(8), 2, num_workers=1, thread_pool=True) as loader:
            ...     batches = iter(loader)
            ...     print(next(batches), loader.num_workers, loader.prefetch)
            ...     loader.pool.resize(3)
            ...     print(next(batches), loader.num_workers, loader.prefetch)
            tensor([0, 1]) 1 2
            tensor([2, 3]) 3 6

        Source of the idea: ``AUTOTUNE`` of tf.data, which changes its parallelism while a program trains.
        """
        wanted = check_num_workers(num_workers)
        pipeline = owner() if (owner := owners.get(self)) is not None else None
        if pipeline is not None:
            pipeline.check_open()
        self.wanted = wanted
        if pipeline is None:
            self.adopt()
        else:
            pipeline.resize(self)

    def adopt(self) -> None:
        if self.wanted is not None:
            try:
                self._have(self.wanted)
            except (OSError, MemoryError, RuntimeError) as error:
                self.wanted = self.num_workers
                self.notices.warn(
                    "workers",
                    f"{self!r} cannot have more workers: the system cannot start another one ({error}). It goes on "
                    f"with those that it has",
                )

    @abstractmethod
    def _have(self, num_workers: int) -> None:
        """Start or stop workers to have this many. `num_workers` always counts those that exist."""

    def _options(self) -> tuple[type[WorkerPool], dict[str, tuple[Any, Any]]]:
        """Return this library's class, and (value, default) of each argument but the first."""
        kind = next(kind for kind in type(self).__mro__ if kind.__module__.startswith("sharded_loader."))
        _, *others = inspect.signature(kind).parameters.items()
        return kind, {name: (getattr(self, name), parameter.default) for name, parameter in others}

    def __repr__(self) -> str:
        return call_of(self, [self.num_workers], **self._options()[1])

    def __reduce__(self) -> Any:
        # A dataset may refer to the pool that it is being sent to: there it is one that has not been started.
        kind, options = self._options()
        return functools.partial(kind, self.num_workers, **{name: value for name, (value, _) in options.items()}), ()


def check_num_workers(num_workers: object) -> int:
    hint = '. For "auto", give num_workers="auto" to the loader' if num_workers == "auto" else ""
    return check_int("num_workers", num_workers, 1, f"InlinePool() has no workers{hint}")


check_init_fn = functools.partial(check_function, "worker_init_fn", kind="of the worker's number")


def check_timeout(timeout: object) -> float | None:
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds, or None")
    return float(timeout)
