"""The workers of the drop-in: the pool that the loader's arguments ask for, and what torch's users see of it.

check_arguments(loader)              rejects what would otherwise fail at the first batch
check_data(loader)                   rejects, when an epoch begins, what no batch can be read from
make_pool(loader) -> Pool
job_of(loader) -> Job                  what they read
WorkerView(handle)                     a worker process as torch's iterator shows it
in_torchs_words(error, timeout)      a dead or silent worker as the RuntimeError that torch raises
"""

from __future__ import annotations

import math
import multiprocessing
import signal
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset

from sharded_loader.base.checks import check_int, refuse_async_iterable, refuse_class
from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.devices.names import find_devices
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.engine.messages import Job
from sharded_loader.engine.pool import Pool
from sharded_loader.loader.arguments import (
    collate_function,
    make_split,
    refuse_streams,
    refuse_worker_memory,
)
from sharded_loader.pools.inline import InlinePool
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.pools.threads import ThreadPool

if TYPE_CHECKING:
    from sharded_loader.torch import DataLoader


def check_arguments(loader: DataLoader[Any]) -> None:
    """Reject arguments that torch's constructor accepts, but that fail at the first batch.

    Raises:
        ValueError, TypeError: An argument has a wrong value or type.
    """
    collate_function(None, loader.collate_fn)
    if loader.generator is not None and not isinstance(loader.generator, torch.Generator):
        raise TypeError(f"generator is {loader.generator!r}; it must be a torch.Generator, or give seed= (an int)")
    if loader.prefetch_factor is not None:
        check_int("prefetch_factor", loader.prefetch_factor, 0, "give the number of batches to prefetch per worker")
    if loader.seed is not None:
        loader.seed = check_int("seed", loader.seed, -math.inf, "give an integer, or None")
    make_split(*find_devices(loader.device, loader.devices), loader.num_shards)
    if loader.streams is not None:
        check_int("streams", loader.streams, 1, "give the number of parts, or None for one per worker")
        if not isinstance(loader.dataset, IterableDataset):
            refuse_streams(loader.streams, loader.dataset)
    if loader.start_method and loader.multiprocessing_context is not None:
        raise ValueError("start_method and multiprocessing_context set the same thing: leave out one of them")
    refuse_worker_memory(loader.max_worker_memory, loader.num_workers > 0 and not _uses_threads(loader))
    _processes(loader, max(1, loader.num_workers))


def check_data(loader: DataLoader[Any]) -> None:
    """Reject a dataset or a sampler that cannot be read. Programs make loaders of mocks, and never read them.

    Raises:
        TypeError: It cannot be read.
    """
    for name, given in (("sampler", loader.sampler), ("batch_sampler", loader.batch_sampler)):
        if given is not None and not hasattr(given, "__iter__") and not hasattr(given, "__getitem__"):
            raise TypeError(f"{name} is {given!r}; it must be an iterable of indices, or of lists of them")
    refuse_class("the dataset", loader.dataset)
    refuse_async_iterable(loader.dataset)
    if not any(hasattr(loader.dataset, name) for name in ("__getitem__", "__getitems__", "__iter__")):
        raise TypeError(f"a dataset needs __getitem__, and {type(loader.dataset).__name__} has none")


def make_pool(loader: DataLoader[Any]) -> Pool:
    """The pool that a loader's arguments ask for. Its workers have not started.

    With ``timeout`` alone the pool restarts no worker: a silent or dead worker is an error, as in torch.
    """
    if loader.num_workers == 0:
        if loader.timeout:
            raise AssertionError("a DataLoader without workers requires timeout == 0")  # the type is torch's
        return InlinePool()
    timeout, count = loader.timeout or None, loader.num_workers if loader._tuner is None else loader._tuner.workers
    if _uses_threads(loader):
        return ThreadPool(count, worker_init_fn=loader.worker_init_fn, timeout=timeout)
    pool = _processes(loader, count)
    pool.workers_last = loader.persistent_workers
    return pool


def _uses_threads(loader: DataLoader[Any]) -> bool:
    """True if workers are threads: by ``thread_pool``, or by a context whose processes are threads, as MONAI's."""
    process: Any = getattr(loader.multiprocessing_context, "Process", None)
    return loader.thread_pool or (isinstance(process, type) and issubclass(process, threading.Thread))


def _start_method(context: Any) -> Any:
    """The start method of a context. Other libraries' contexts have names of their own."""
    methods = multiprocessing.get_all_start_methods()
    kinds = [name for name in methods if isinstance(context, type(multiprocessing.get_context(name)))]
    name = context.get_start_method()
    return name if name in methods else [*kinds, "spawn"][0]


def _processes(loader: DataLoader[Any], count: int) -> ProcessPool:
    context, timeout, restarts = loader.multiprocessing_context, loader.timeout or None, loader.restarts
    if restarts is None:
        restarts = 3 if timeout is None else 0
    return ProcessPool(
        count,
        start_method=loader.start_method or (None if context is None else _start_method(context)),
        worker_init_fn=loader.worker_init_fn,
        timeout=timeout,
        restarts=restarts,
        max_bytes=loader.max_bytes,
        max_worker_memory=loader.max_worker_memory,
    )


def job_of(loader: DataLoader[Any]) -> Job:
    """The job of the newest epoch; before the first one, what is known of it."""
    if loader._job is not None:
        return loader._job
    check_data(loader)
    batched = loader._auto_collation
    batchify = batchify_fn_of(loader.collate_fn, batched=batched)
    return Job(loader.dataset, batchify, int(loader.seed or 0), loader.on_error, in_bulk=batched)


class WorkerView:
    """A worker process as torch's iterator shows it to programs that watch or kill workers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.pid: int = handle.pid
        self._exitcode: int | None = None

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._handle is not None and bool(self._handle.is_alive())

    def let_go(self) -> None:
        """Drop the handle, which holds shared memory: the loader has ended the process."""
        if self._handle is not None:
            self._exitcode, self._handle = _exitcode_of(self._handle), None

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended."""
        if self._handle is not None:
            self._handle.wait(timeout)

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs, or until the loader has noticed its end."""
        if self.is_alive() or self._handle is None:
            return self._exitcode
        return _exitcode_of(self._handle)

    def terminate(self) -> None:
        """Kill the process."""
        if self._handle is not None:
            self._handle.kill()

    kill = terminate


def _exitcode_of(handle: Any) -> int | None:
    code: int | None = handle.exitcode
    # As in torch, a worker that the loader has ended has the code 0. The code of a forked worker is not kept.
    return 0 if handle.ended_by_close or (code is None and not handle.was_killed) else code


def in_torchs_words(error: WorkerDiedError | WorkerTimeoutError, timeout: float) -> RuntimeError:
    """The error that torch raises in this case. Its text begins as torch's, because programs look for those words."""
    if isinstance(error, WorkerTimeoutError):
        return RuntimeError(f"DataLoader timed out after {timeout} seconds. {error}")
    code = error.exitcode
    if code is not None and code < 0:
        return RuntimeError(
            f"DataLoader worker (pid {error.pid}) is killed by signal: {signal.strsignal(-code)}. {error}"
        )
    return RuntimeError(f"DataLoader worker (pid(s) {error.pid}) exited unexpectedly. {error}")
