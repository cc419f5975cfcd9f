"""The iterator of the drop-in: torch's own base class around our iterator.

    check_arguments(loader)                           rejects what would otherwise fail at the first batch
    make_pool(loader) -> Pool                         the pool that the loader's arguments ask for
    make_sharded(loader) -> ShardedDataLoader         reads in its stead, if an argument asks for another order
    LoaderIterator(loader, state)._next_data() -> EpochIterator -> Pipeline -> ProcessPool | InlinePool
    WorkerView(handle)                                a worker process as torch's iterator shows it

An iterator owns its workers, as in torch. They start with the first ``next`` and end with the epoch. With
``persistent_workers`` they live as long as the iterator, which the loader then keeps and resets for each epoch.

What goes wrong in a worker is raised here as torch raises it: a dead worker and a timeout are a RuntimeError in torch's
words, with this library's error as its cause.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.imports import leave_alone
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.data.inspection import is_stateful
from sharded_loader.data.seeding import told_in
from sharded_loader.devices.names import accelerators, find_devices
from sharded_loader.devices.placement import Placer
from sharded_loader.drop_in import sampler as samplers
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.pinning import Pinner
from sharded_loader.drop_in.sampler import SamplerStart, SamplerState, TorchEpoch
from sharded_loader.drop_in.state import LoaderState, TorchRun, check_data, job_of, stream_epoch
from sharded_loader.engine.messages import PartPoint
from sharded_loader.extend import Pipeline, Pool, Task
from sharded_loader.loader import arguments
from sharded_loader.loader.arguments import length
from sharded_loader.loader.epochs import OneRun, warn_of_length
from sharded_loader.loader.iterator import EpochIterator, profiler_enabled
from sharded_loader.loader.loader import ShardedDataLoader, call_all
from sharded_loader.pools.local import InlinePool, ThreadPool
from sharded_loader.pools.process.pool import ArenaInUse, ProcessPool
from sharded_loader.sampling.base import nested
from sharded_loader.streams.epoch import StreamEpoch
from sharded_loader.streams.reader import StreamReader

if TYPE_CHECKING:
    from sharded_loader.torch import DataLoader

    Loader = DataLoader[Any]

_numbers = itertools.count()


def check_arguments(loader: Loader) -> None:
    """Reject arguments that torch's constructor accepts, but that fail at the first batch.

    Raises:
        ValueError, TypeError: An argument has a wrong value or type.
    """
    arguments.collate_function(None, loader.collate_fn)
    if loader.generator is not None and not isinstance(loader.generator, torch.Generator):
        raise TypeError(f"generator is {loader.generator!r}; it must be a torch.Generator, or give seed= (an int)")
    if loader.prefetch_factor is not None:
        check_int("prefetch_factor", loader.prefetch_factor, 0, "give the number of batches to prefetch per worker")
    if loader.seed is not None:
        loader.seed = check_int("seed", loader.seed, -math.inf, "give an integer, or None")
    arguments.make_split(*find_devices(loader.device, loader.devices), loader.num_shards)
    if loader.streams is not None:
        check_int("streams", loader.streams, 1, "give the number of parts, or None for one per worker")
        if not isinstance(loader.dataset, IterableDataset):
            arguments.refuse_streams(loader.streams, loader.dataset)
    if loader.start_method and loader.multiprocessing_context is not None:
        raise ValueError("start_method and multiprocessing_context set the same thing: leave out one of them")
    if loader.max_worker_memory is not None and (loader.num_workers == 0 or _uses_threads(loader)):
        raise ValueError(
            f"max_worker_memory={loader.max_worker_memory!r} needs worker processes on this machine: give num_workers= "
            f"without thread_pool and pool, or leave max_worker_memory out"
        )
    _process_pool(loader, max(1, loader.num_workers))
    for one in () if isinstance(loader.dataset, IterableDataset) else nested(loader._index_sampler):
        if hasattr(one, "check_dataset") and hasattr(loader.dataset, "__len__"):
            one.check_dataset(len(loader.dataset))


def make_pool(loader: Loader) -> Pool:
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
    pool = _process_pool(loader, count)
    pool.workers_last = loader.persistent_workers or loader._sharded is not None
    return pool


def _uses_threads(loader: Loader) -> bool:
    """True if workers are threads: by ``thread_pool``, or by a context whose processes are threads, as MONAI's."""
    process: object = getattr(loader.multiprocessing_context, "Process", None)
    return loader.thread_pool or (isinstance(process, type) and issubclass(process, threading.Thread))


def _process_pool(loader: Loader, count: int) -> ProcessPool:
    """``count`` worker processes, as the loader's arguments ask for them."""
    context, restarts = loader.multiprocessing_context, loader.restarts
    method: Any = loader.start_method
    if method is None and context is not None:
        # Other libraries' contexts have names of their own.
        methods = multiprocessing.get_all_start_methods()
        kinds = [name for name in methods if isinstance(context, type(multiprocessing.get_context(name)))]
        name = context.get_start_method()
        method = name if name in methods else [*kinds, "spawn"][0]
    return ProcessPool(
        count,
        start_method=method,
        worker_init_fn=loader.worker_init_fn,
        timeout=loader.timeout or None,
        restarts=(0 if loader.timeout else 3) if restarts is None else restarts,
        max_bytes=loader.max_bytes,
        max_worker_memory=loader.max_worker_memory,
    )


def as_collated(devices: list[torch.device] | None, pinner: Pinner | None = None) -> Placer:
    """What leaves batches as the collate function returned them, pins them, or puts them on devices.

    Args:
        devices: as for `Placer`.
        pinner: pins batches as torch does; None: nothing does.
    """
    return Placer(devices, pin_memory=False, in_host_memory=_collated, pinner=pinner)


def _collated(shard: object) -> Any:
    return shard.to_torch() if type(shard) is TensorBatch else shard


class DeviceMemory:
    """What a loader with devices keeps from epoch to epoch: its copy streams, and the pinned memory of its workers.

    The workers of an epoch end with it. To pin other memory for those of the next would take time.
    """

    def __init__(self) -> None:
        self._placement: Placer | None = None
        self._left: list[ArenaInUse] = []  # by pools that have ended
        weakref.finalize(self, _close_arenas, self._left)

    def placement(self, devices: list[torch.device]) -> Placer:
        """What puts batches on these devices; a new one if they are others than before."""
        if self._placement is None or self._placement.devices != devices:
            _close_arenas(self._left)
            self._placement = as_collated(devices)
        return self._placement

    def lend(self, pool: Pool, placement: Placer) -> None:
        """Let a new pool use memory that another one has left; otherwise memory of its own."""
        if isinstance(pool, ProcessPool) and placement is self._placement and self._left:
            pool.take_over(self._left.pop())
        pool.use_memory(placement.empty, placement.register, pinned=placement.pinned)

    def ready_event(self) -> Any:
        """As `ShardedDataLoader.ready_event`."""
        return None if self._placement is None else self._placement.ready_event()

    def take_back(self, pool: Pool, placement: Placer) -> None:
        """End the workers of a pool, and keep its memory, if a device reads it."""
        if isinstance(pool, ProcessPool) and placement is self._placement and placement.asynchronous:
            left = pool.hand_over()
            if left[0].segments:
                self._left.append(left)


def _close_arenas(left: list[ArenaInUse]) -> None:
    while left:
        left.pop()[0].close()


# -- the iterator ------------------------------------------------------------------------------------------------------


class LoaderIterator(_BaseDataLoaderIter):
    """One epoch of a `sharded_loader.torch.DataLoader`; with persistent workers one after the other.

    Args:
        loader: the loader.
        state: where the epoch goes on. None: it begins.

    Attributes:
        run: the run of the epoch, with its position.
    """

    run: TorchRun
    _owner: Loader | None = None  # until the first `next`
    _asked: Any = None  # for what its epoch was planned; see `TorchProgress.asked`

    def __init__(self, loader: Loader, state: LoaderState | None = None) -> None:
        check_data(loader)
        # Resuming must not advance torch's global generator: the state already holds the seed and the order. The same
        # holds when persistent workers continue.
        self._workers_live_on = loader.persistent_workers and loader.num_workers > 0
        draws = state is None or (state.finished and not self._workers_live_on)
        before, generator, saved = torch.get_rng_state(), loader.generator, None if state is None else state.generator
        dataset: Any = loader.dataset
        if draws and generator is not None and saved is not None:
            samplers.set_generator(generator, saved)
        drawn = self._plan(loader, state)
        if draws and state is not None and state.sampler is not None and loader.num_workers == 0:
            # The dataset may restore the global generator, so this comes before the next epoch draws its seed.
            datasets = state.sampler.datasets
            if datasets and datasets[-1] is not None and is_stateful(dataset):
                dataset.load_state_dict(copy.deepcopy(datasets[-1]))
        super().__init__(loader)
        if self._start is not None:
            self._start.put_back()  # torch has asked for items that may not be used
        if drawn is not None:
            self._base_seed = drawn
        if not draws:
            if generator is not None and saved is not None:
                samplers.set_generator(generator, saved)
            torch.set_rng_state(before)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._length = None if self._is_stream else length(loader.dataset)  # of the copies that the workers get
        devices, sharded = find_devices(loader.device, loader.devices)
        pinner, self._memory = None, loader._memory
        if self._pin_memory and devices is None:  # as torch does
            kind = torch.device(self._pin_memory_device or accelerators()[0]).type
            pin = functools.partial(_utils.pin_memory.pin_memory, device=self._pin_memory_device)
            pinner = Pinner(kind, self._num_workers > 0, pin)
        placement = as_collated(None, pinner) if devices is None else self._memory.placement(devices)
        self._placement, self._pool = placement, make_pool(loader)
        self._pool.notices = loader._meter.notices
        self._memory.lend(self._pool, placement)
        self._pipeline = Pipeline(self._pool, arguments.make_split(devices, sharded, loader.num_shards))
        arguments.claim(self._pool, self._pipeline)
        # Without prefetch_factor, enough batches are in flight to fill the messages to the workers.
        self._pipeline.scheduler.scale_by_group = loader._scales_prefetch
        self._pipeline.scheduler.per_worker = loader.prefetch_factor or 0
        self._pipeline.scheduler.follow(self._pool)
        self._pipeline.min_ready = max(2, 1 + placement.ahead)
        self._closer = weakref.finalize(self, call_all, self._pool.closer(), placement.closer())
        self._shutdown = False
        self._processes: list[WorkerView] = []
        # Part or worker -> where the previous epoch left it.
        self._points_at_start: dict[int, PartPoint] = {}
        self._unread: set[int] = set()  # parts that had ended in a loaded state: no worker has read them
        self._begin(loader, state, self._sampler_iter if loader.num_workers == 0 else None)
        if drawn is not None:  # what this iterator has drawn changes nothing for others that begin at this state
            loader._progress.rng_at_load = torch.get_rng_state()

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Begin another epoch with the persistent workers. torch's loader calls this."""
        if self._owner is not None and loader._progress.pending is not None:  # no epoch has begun since
            self._make_again(loader)
            return
        if isinstance(self._pool, ProcessPool) and not self._is_stream:
            then = "Persistent workers still have the old one: leave out persistent_workers, or make a new loader"
            warn_of_length(self._dataset, self._length, self._pool.notices, then)
        self._plan(loader, None)
        super()._reset(loader, first_iter)
        if self._start is not None:
            self._start.put_back()
        if self._owner is None:
            self._points_at_start = self.run.after()
        self._begin(loader, None, self._sampler_iter)

    def _plan(self, loader: Loader, state: LoaderState | None) -> int | None:
        """Prepare the start of the sampler, if the data has one, and say which seed the epoch draws.

        Returns:
            The seed that the next epoch would have drawn when a state of an epoch's end was saved. None: it draws now.
            It does so, too, if the program has seeded, or used, the default generator since it loaded the state.
        """
        progress, seed, of_sampler = loader._progress, None, None
        self._start = None if isinstance(loader.dataset, IterableDataset) else start_of(loader, state)
        loaded_at, following = progress.rng_at_load, progress.following if state is None else state.next_draws
        self._following = following if state is not None and not state.finished else None
        is_as_loaded = loaded_at is not None and torch.equal(loaded_at, torch.get_rng_state())
        if following and not self._following and is_as_loaded:
            seed, of_sampler = following
        if self._start is not None and self._start.shuffle is not None:
            self._start.shuffle.expect(of_sampler)
        return seed

    def _begin(self, loader: Loader, state: LoaderState | None, items: Iterator[object] | None) -> None:
        """Build the epoch's plan, run and iterator. Reads no sample.

        Args:
            loader, state: as above.
            items: the sampler's iterator. None: `SamplerStart` asks for it. With workers, torch asks a second time too.
        """
        is_new, workers, start = state is None or state.finished, self._num_workers, self._start
        # Ignore the state if its epoch was finished and the workers were not persistent: the next epoch starts new
        # workers with new seeds.
        if is_new and workers > 0 and not self._workers_live_on:
            state = None
        # New workers, or none, have the seeds and the datasets of a new epoch.
        saved = None if is_new and workers == 0 else state
        drawn = int(self._base_seed if saved is None else saved.base_seed)
        number = None if start is None else start.epoch_of_seed()
        if number is None:
            number = loader._progress.count.next_epoch if state is None or is_new else state.epoch or 0
        base = drawn if loader.seed is None and loader._tuner is None else None  # None: nothing depends on the workers
        seed = drawn if loader.seed is None else int(loader.seed)
        job = replace(job_of(loader, self._collate_fn), seed=seed, base_seed=base)
        epoch: TorchEpoch | StreamEpoch
        of_epoch = None
        if start is None:
            unread = {part: self._points_at_start[part] for part in self._unread & set(self._points_at_start)}
            epoch = stream_epoch(loader, seed, state, unread)
            self._unread = {part for part, point in epoch.at_beginning().points.items() if point.ended}
            job = replace(job, stream=epoch.stream._replace(tells_epoch=False))
            epochs = (getattr(one, "epoch", None) for one in told_in(loader.dataset, nearest=True))
            of_epoch = next((number for number in epochs if isinstance(number, int)), None)
        else:
            # As in torch, a worker has the dataset as it was when the worker started.
            job = replace(job, keeps_state=is_stateful(self._dataset))
            epoch = self._sampler_epoch(start, None if saved is None else saved.sampler, items, loader._left_out)
            epoch.takes_turns = loader._tuner is None or job.keeps_state
            if job.keeps_state:
                loader._meter.tune_at = math.inf  # each worker has a state of its own: their number stays
        epoch.number = number  # the random numbers of an epoch depend on it, also in persistent workers
        epoch.any_order = not loader.in_order and workers > 0
        self._job, self._num_yielded = job, 0 if state is None or is_new else state.yielded
        at: dict[str, Any] = {"points_at_start": self._points_at_start, "epoch_of_dataset": of_epoch}
        at |= {"base_seed": drawn, "yielded": self._num_yielded}
        self.run = TorchRun(next(_numbers), epoch=epoch, **at)
        self._inner = EpochIterator(OneRun(self._pipeline, self._placement, self.run, job), loader._meter)
        if workers == 0:
            self._prime(epoch, is_new)
        # Until the first `next` the loader is what it was: an iterator that reads nothing changes nothing.
        self._owner, self._asked, loader._progress.waiting = loader, loader._progress.asked(), self

    def _sampler_epoch(self, start: SamplerStart, state: SamplerState | None, items: Any, skips: Any) -> TorchEpoch:
        """An epoch of map-style data.

        Args:
            start: starts the sampler.
            state: with the states of the workers' datasets. None: persistent workers go on with the datasets they have.
            items: as in `_begin`.
            skips: as of `TorchEpoch`.
        """
        lanes, points = max(1, self._num_workers), self._points_at_start
        if not start.resumes:
            start.begin(items)
        if state is not None:
            points = {lane % lanes: PartPoint(state=dataset) for lane, dataset in enumerate(state.datasets or ())}
        epoch = TorchEpoch(start, lanes, self._auto_collation, points, is_stateful(self._dataset), skips)
        if self._num_workers > 0 and not start.resumes:  # torch's workers are sent the first indices now
            start.settle()
            if not start.has_set_epoch:
                epoch.begin()
        self._pipeline.scheduler.one_by_one = start.may_draw
        return epoch

    def is_stale(self, loader: Loader) -> bool:
        """Return True if persistent workers have exited, or hold copies of the dataset from another epoch."""
        told = loader._progress.requests.take() is not None
        has_copies = self._is_stream or not self._pool.shares_dataset
        return self._shutdown or (told and has_copies and self._pool.started)

    def _make_again(self, loader: Loader) -> None:
        """Begin where an iterator would begin that is made now."""
        self._asked = None, self  # no state of the loader: if this is interrupted, the next `next` does it again
        self._shutdown_workers()
        self._closer()
        self.__init__(loader, loader._progress.state_to_begin(loader._index_sampler))  # type: ignore[misc]
        if self._workers_live_on:
            loader._iterator = self

    def _take_over(self, loader: Loader) -> None:
        """Become the newest iterator of the loader: the first batch is asked for."""
        progress, (request, pending) = loader._progress, self._asked
        is_named = progress.count.request is not request
        is_stale = self.is_stale(loader) if self._workers_live_on else self._shutdown
        if is_stale or progress.pending is not pending or (is_named and pending is not None):
            self._make_again(loader)
        elif is_named:
            self._start = start_of(loader, None)
            self._begin(loader, None, None)
        with uninterrupted():
            self._owner, progress.following, progress.job = None, self._following, self._job
            progress.begun(self.run, self)

    def _prime(self, epoch: TorchEpoch | StreamEpoch, is_new: bool) -> None:
        """Ask a dataset of this process for its iterator and for its state. torch asks at this moment too."""
        dataset: Any = self._dataset
        if isinstance(epoch, TorchEpoch):
            if self._job.keeps_state and is_new:
                epoch.primed(copy.deepcopy(dataset.state_dict()))
            return
        self._pipeline.start(self._job)
        task, reader = epoch.task(epoch.first), getattr(self._pool, "reader", None)
        if isinstance(task, Task) and isinstance(reader, StreamReader) and task.part is not None:
            epoch.primed(task.part.number, reader.prime(task))
        elif self._unread == {0}:  # the state was taken behind the last batch, but the end was not seen
            of_dataset, _ = epoch.at_beginning().points[0].state or (None, None)
            if of_dataset is not None:
                dataset.load_state_dict(copy.deepcopy(of_dataset))

    # -- batches --------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """``next(iterator)``, as scripts for PyTorch before 1.13 write it."""
        return self.__next__()

    def __next__(self) -> Any:
        # torch's method records each batch for a profiler (5 to 9 us), and warns if iterable data has a wrong length.
        if self._is_stream or profiler_enabled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._owner is not None:
            self._take_over(self._owner)
        if self._shutdown:
            raise StopIteration
        try:
            data = next(self._inner)
        except StopIteration:
            if not self._persistent_workers:
                self._shutdown_workers()
            raise
        except (WorkerDiedError, WorkerTimeoutError) as error:
            raise in_torchs_words(error, self._timeout) from error
        self.run.yielded += 1
        return data

    # -- workers --------------------------------------------------------------------------------------------

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # After a ``break``: so that the loader keeps the memory. `_closer` sees to the rest.
        if _is_finalizing() or getattr(self, "_shutdown", True):
            return
        if self._placement.devices is not None and os.getpid() == self._pipeline.pid:
            self._shutdown_workers()

    @property
    def _workers(self) -> list[WorkerView]:
        """The worker processes, as torch's iterator shows them. This starts them."""
        pool = self._pool
        if isinstance(pool, ProcessPool) and not self._shutdown:
            if not pool.started:
                self._pipeline.start(self._job)
            self._processes = [WorkerView(handle) for handle in pool.workers]
        return self._processes

    def _shutdown_workers(self) -> None:
        """End the workers. Safe to call twice."""
        if not self._shutdown:
            if self._pool.started:
                self._processes = self._workers
            self._shutdown = True
            if not self._pipeline.is_open_step:  # otherwise an exception has struck, and the arena may be wrong
                self._memory.take_back(self._pool, self._placement)
            self._pipeline.close()
            self._placement.closer()()
            for worker in self._processes:
                worker.let_go()


def start_of(loader: Loader, state: LoaderState | None) -> SamplerStart:
    """What starts the loader's sampler."""
    saved, finished = (None, False) if state is None else (state.sampler, state.finished)
    return SamplerStart(loader._index_sampler, saved, finished, loader._progress.count)


class WorkerView:
    """A worker process as torch's iterator shows it to programs that watch or kill workers."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.pid: int = handle.pid

    def is_alive(self) -> bool:
        """Whether the process runs."""
        return self._handle is not None and bool(self._handle.is_alive())

    def let_go(self) -> None:
        """Drop the handle, which holds shared memory: the loader has ended the process."""
        self._handle = None

    @property
    def exitcode(self) -> int | None:
        """The exit code; None while the process runs. As in torch, 0 if the loader has ended it."""
        return None if self.is_alive() else getattr(self._handle, "exitcode", None) or 0

    def join(self, timeout: float | None = None) -> None:
        """Wait until the process has ended."""
        if self._handle is not None:
            self._handle.wait(timeout)

    def terminate(self) -> None:
        """Kill the process."""
        if self._handle is not None:
            self._handle.kill()

    kill = terminate


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


leave_alone(LoaderIterator.__next__)


# -- the order of `ShardedDataLoader` ----------------------------------------------------------------------------------

SHARDED = ("num_replicas", "rank", "mesh", "costs", "evaluate", "steps_per_epoch")
"""Arguments of `ShardedDataLoader` that torch's order cannot have."""

KEPT = ("pin_memory", "drop_last", "device", "devices", "num_shards", "seed", "on_error", "streams")


def is_sharded(loader: Loader) -> bool:
    """Return whether a loader was given one of the arguments in `SHARDED`."""
    return any(getattr(loader, name) is not None and getattr(loader, name) is not False for name in SHARDED)


def need_sharded(inner: ShardedDataLoader[Any] | None, method: str) -> ShardedDataLoader[Any]:
    """Return the inner loader, or raise a TypeError if there is none."""
    if inner is None:
        raise TypeError(f"{method} needs the order of ShardedDataLoader, and this is torch's: give num_replicas=1")
    return inner


def make_sharded(loader: Loader) -> ShardedDataLoader[Any]:
    """Make the `ShardedDataLoader` that reads for a drop-in, with the same arguments.

    Raises:
        TypeError, ValueError: they contradict each other.
    """
    shuffle, sampler, batch_sampler = loader._given_order
    wrong = {"generator": loader.generator is not None, "in_order": not loader.in_order}
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        text = f"{name} goes with torch's order, and {' and '.join(SHARDED)} with another"
        raise ValueError(f"{text}: {arguments.INSTEAD[name]}")
    if batch_sampler is None and loader.batch_size is None:
        raise ValueError("batch_size=None gives single samples, and this order is one of batches: give a batch_size")
    options = {name: getattr(loader, name) for name in (*SHARDED, *KEPT)}
    return ShardedDataLoader(
        loader.dataset,
        batch_size=loader.batch_size if batch_sampler is None else None,
        shuffle=shuffle or False,
        sampler=sampler,
        batch_sampler=batch_sampler,
        collate_fn=batchify_fn_of(loader.collate_fn, batched=True),
        num_workers=0 if loader._tuner is None else "auto",
        pool=make_pool(loader),
        prefetch_factor=None if loader._scales_prefetch else loader.prefetch_factor,
        skip=loader._given_skip or None,
        **options,
    )
