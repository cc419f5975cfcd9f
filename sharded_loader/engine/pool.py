"""What every pool is: six verbs over numbered tasks.

    start(job)                       start the workers; those that run already are sent the new job
    submit(tasks)                    give tasks to the workers, at most `room` of them
    wait(block) -> results           block until something has come; what has come, in any order
    wake()                           make a `wait` in another thread return
    cancel(run)                      drop the tasks of a run that have not begun
    close()                          stop the workers and give everything back; `start` may follow

A task names its run (which iterator it belongs to) and its seq (which batch of the epoch it is). A result names the
same. A thread that was written off may answer a task for a second time: the pipeline ignores the second result.

If ``next`` waits for long, `tell_of_wait` tells on stderr for which worker. A pool may leave it as it is.

A pool whose number of workers can change has `resize`, for users: it notes the number, and the pipeline calls `adopt`
between two verbs.

One thread at a time calls a pool, under the pipeline's lock; only `wake` and `resize` may come from another thread. A
pool need not survive an exception that strikes inside a verb, such as a Ctrl-C: the pipeline then calls `close` and
`start`, and submits again what was in flight. So `close` must work in every state. The exception is the moment in
`wait` when the pool only waits: `waiting` is True then, and an exception changes nothing.

What can go wrong: the workers cannot work at all (`PoolBroken`). What goes wrong with one task is its result.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import call_of
from sharded_loader.base.notices import Notices
from sharded_loader.base.system import write_to_stderr
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.memory.arena import Register


class PoolBroken(Exception):
    """Raised by `Pool.wait`: no worker can do anything. The pool is closed.

    Attributes:
        error: what the user is told.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Pool(ABC):
    """Reads samples and makes batches of them. One loader owns one pool.

    Attributes:
        num_workers: the number of workers that read at the same time; 0 if the caller does.
        wanted: the number that `resize` has asked for last; None: it was not called.
        group: the number of tasks that are best submitted together, more than one while batches are cheap.
        room: the number of tasks that `submit` takes now.
        notices: counts the workers that are replaced, and the batches that take a slow way. The loader sets it.
        shares_dataset: whether the samples are read from the main process's own dataset object.
        is_here: whether the workers are on this machine, and see its files.
        empty: gives the memory that batches are put together in, where that is this process's own.
        worker_init_fn: called with its number in each worker when it starts.
        timeout: seconds that a worker may stand still; None: for ever.
        unsettled: `settle` is to be called in the next step.
        waiting: `wait` only waits at this moment, or runs the user's code, and has changed nothing.
    """

    num_workers: int = 0
    wanted: int | None = None
    group: int = 1
    room: int = 0
    notices: Notices = Notices()
    shares_dataset: bool = True
    is_here: bool = True
    unsettled: bool = False
    waiting: bool = False
    worker_init_fn: Callable[[int], Any] | None = None
    timeout: float | None = None
    empty: Empty = staticmethod(new_array)

    def use_memory(self, empty: Empty, register: Register, *, pinned: Empty | None = None) -> None:
        """Say where batches are to lie; before the pool is started.

        Args:
            empty: gives the memory that batches are put together in, where that is this process's own.
            register: to be called with each stretch of shared memory that batches come through.
            pinned: gives pinned memory for one array, because a device is going to copy the batches; otherwise None.
        """
        self.empty = empty

    @property
    @abstractmethod
    def started(self) -> bool:
        """Whether the workers run."""

    @abstractmethod
    def start(self, job: Job) -> None:
        """Start the workers; those that run already are sent the new job before any later task."""

    def settle(self) -> None:
        """Do what `start` has left for the step behind it, because it would delay the first batch."""
        self.unsettled = False

    @abstractmethod
    def submit(self, tasks: Sequence[Task]) -> None:
        """Give tasks to the workers. A task that cannot be given to one has an error as its result."""

    @abstractmethod
    def wait(self, block: bool = True) -> Sequence[Result]:
        """Block until results have come, a worker has ended, or a thread calls `wake`; what has come.

        Args:
            block: False: only look whether something has come.

        Raises:
            PoolBroken: no worker can work.
        """

    def tell_of_wait(self, text: str, task: Task | None) -> None:
        """Tell on stderr that ``next`` has waited long, who has the task, and that worker's stack.

        Args:
            text: how long, and for which batch.
            task: the batch; None: it is in no task.
        """
        write_to_stderr(f"{text}\n")

    def wake(self) -> None:  # noqa: B027
        """Make a `wait` in another thread return."""

    def follow(self, run: int, ahead: object, position: Callable[[], int | None]) -> None:  # noqa: B027
        """Tell datasets on other machines which samples come. Called if the workers are not here (`is_here`).

        Args:
            run: whose order it is.
            ahead: ``batches`` and ``later`` of `data.datasets.follow`, in an object that can be pickled.
            position: as there.
        """

    def cancel(self, run: int) -> None:  # noqa: B027
        """Drop the tasks of this run that have not begun."""

    def resize(self, num_workers: int) -> None:
        """Have another number of workers from now on.

        Raises:
            TypeError: this pool cannot.
        """
        raise TypeError(
            f"{type(self).__name__} cannot change its number of workers: give the loader a ThreadPool, a ProcessPool "
            f"or a RayPool (num_workers= makes one)"
        )

    def adopt(self) -> None:  # noqa: B027
        """Have the number of workers that is `wanted`. The pipeline calls this in a step, between two other verbs."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers and give everything back. The pool may be started again."""

    def closer(self) -> Callable[[], None]:
        """What `close` does, as a function that holds neither the pool nor its job.

        For finalizers, which are roots of the garbage collector: a job leads to the user's dataset, and that
        often to the loader.
        """
        return lambda: None


owners: weakref.WeakKeyDictionary[Pool, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The pipeline of the loader that has each pool."""


class WorkerPool(Pool):
    """A pool that has workers. Its repr, and its pickle, are the call that makes it: each argument is an attribute.

    Args:
        num_workers, worker_init_fn, timeout: of the pool.

    Raises:
        ValueError: ``num_workers`` is below 1, or ``timeout`` is not above 0.
        TypeError: An argument is not a number, or ``worker_init_fn`` cannot be called.
    """

    def __init__(self, num_workers: int, worker_init_fn: Callable[[int], object] | None, timeout: float | None) -> None:
        self.num_workers = check_num_workers(num_workers)
        check_init_fn(worker_init_fn)
        self.worker_init_fn = worker_init_fn
        self.timeout = check_timeout(timeout)

    def resize(self, num_workers: int) -> None:
        """Have another number of workers from now on. The batches, their order, states and errors stay what they are.

        You may call it at any time and from any thread. Inside an epoch, ``next`` makes the change: at once in a thread
        that waits there, otherwise in the next call. Workers that are too many finish the batches that they have, and
        end. `num_workers` of the loader tells when it is done. If the system cannot start another worker, there is a
        warning, and the pool keeps those that it has. ``loader.prefetch`` follows, unless you have set it. Iterable
        data keeps its number of parts.

        Args:
            num_workers: The number of workers, at least 1.

        Raises:
            ValueError: ``num_workers`` is below 1.
            TypeError: ``num_workers`` is no integer.
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
        """Have this number of workers. `num_workers` is always the number of those that there are."""

    def _options(self) -> tuple[type[WorkerPool], dict[str, tuple[Any, Any]]]:
        """The class of this library, and of each argument but the first its value and its usual value."""
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
    """``num_workers`` of a pool that has workers, or an error that says what is wrong."""
    hint = '. For "auto", give num_workers="auto" to the loader' if num_workers == "auto" else ""
    return check_int("num_workers", num_workers, 1, f"InlinePool() has no workers{hint}")


def check_init_fn(worker_init_fn: object) -> None:
    """An error if ``worker_init_fn`` cannot be called."""
    if worker_init_fn is not None and not callable(worker_init_fn):
        raise TypeError(f"worker_init_fn is {worker_init_fn!r}; it must be a function of the worker's number")


def check_timeout(timeout: object) -> float | None:
    """``timeout`` of a pool, or an error that says what is wrong."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout is {timeout!r}; it must be a number of seconds, or None")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"timeout is {timeout!r}; it must be a positive number of seconds, or None")
    return float(timeout)
