"""The iterator of the drop-in: torch's own base class around this library's iterator.

    LoaderIterator(loader, state)._next_data() -> EpochIterator -> Pipeline -> ProcessPool | InlinePool

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
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.imports import leave_alone
from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.data.inspection import is_stateful
from sharded_loader.devices.names import accelerators, find_devices
from sharded_loader.devices.pinning import Pinner
from sharded_loader.devices.placement import Placement
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.epoch import TorchEpoch
from sharded_loader.drop_in.sampler import SamplerStart, SamplerState, set_generator
from sharded_loader.drop_in.state import LoaderState, TorchRun, stream_epoch
from sharded_loader.drop_in.workers import WorkerView, in_torchs_words, make_pool
from sharded_loader.engine.messages import Job, PartPoint, Task
from sharded_loader.engine.pipeline import Pipeline
from sharded_loader.engine.pool import Pool
from sharded_loader.loader.arguments import claim, length, make_split
from sharded_loader.loader.epochs import warn_of_length
from sharded_loader.loader.iterator import RunIterator, profiler_enabled
from sharded_loader.pools.process.pool import ArenaInUse, ProcessPool
from sharded_loader.streams.epoch import StreamEpoch
from sharded_loader.streams.reader import StreamReader

if TYPE_CHECKING:
    from sharded_loader.torch import DataLoader

_numbers = itertools.count()


def as_collated(devices: list[torch.device] | None, pinner: Pinner | None = None) -> Placement:
    """What leaves batches as the collate function returned them, pins them, or puts them on devices.

    Args:
        devices: as for `Placement`.
        pinner: pins batches as torch does; None: nothing does.
    """
    return Placement(devices, pin_memory=False, in_host_memory=_collated, pinner=pinner)


def _collated(shard: Any) -> Any:
    return shard.to_torch() if type(shard) is TensorBatch else shard


class DeviceMemory:
    """What a loader with devices keeps from epoch to epoch: its copy streams, and the pinned memory of its workers.

    The workers of an epoch end with it. To pin other memory for those of the next would take time.
    """

    def __init__(self) -> None:
        self._placement: Placement | None = None
        self._left: list[ArenaInUse] = []  # by pools that have ended
        weakref.finalize(self, _close_arenas, self._left)

    def placement(self, devices: list[torch.device]) -> Placement:
        """What puts batches on these devices; a new one if they are others than before."""
        if self._placement is None or self._placement.devices != devices:
            _close_arenas(self._left)
            self._placement = as_collated(devices)
        return self._placement

    def lend(self, pool: Pool, placement: Placement) -> None:
        """Let a new pool use memory that another one has left; otherwise memory of its own."""
        if isinstance(pool, ProcessPool) and placement is self._placement and self._left:
            pool.take_over(self._left.pop())
        pool.use_memory(placement.empty, placement.register, pinned=placement.pinned)

    def ready_event(self) -> Any:
        """As `ShardedDataLoader.ready_event`."""
        return None if self._placement is None else self._placement.ready_event()

    def take_back(self, pool: Pool, placement: Placement) -> None:
        """End the workers of a pool, and keep its memory, if a device reads it."""
        if isinstance(pool, ProcessPool) and placement is self._placement and placement.asynchronous:
            left = pool.hand_over()
            if left.arena.segments:
                self._left.append(left)


def _close_arenas(left: list[ArenaInUse]) -> None:
    while left:
        left.pop().arena.close()


class LoaderIterator(_BaseDataLoaderIter):
    """One epoch of a `sharded_loader.torch.DataLoader`; with persistent workers one after the other.

    Args:
        loader: the loader.
        state: where the epoch goes on. None: it begins.

    Attributes:
        run: the run of the epoch, with its position.
    """

    _owner: DataLoader[Any] | None = None  # until the first `next`
    _asked: Any = None  # for what its epoch was planned; see `TorchProgress.asked`

    def __init__(self, loader: DataLoader[Any], state: LoaderState | None = None) -> None:
        # Resuming must not advance torch's global generator: the state already holds the seed and the order. The same
        # holds when persistent workers continue.
        self._workers_live_on = loader.persistent_workers and loader.num_workers > 0
        draws = state is None or (state.finished and not self._workers_live_on)
        before = torch.get_rng_state()
        if draws:
            _load_generator(loader.generator, state)
        self._start = _start_of(loader, state)
        drawn = self._drawn_before(loader, state)
        if loader.num_workers == 0 and draws and state is not None:
            _load_dataset(loader.dataset, state)
        super().__init__(loader)
        if self._start is not None:
            self._start.put_back()  # torch has asked for items that may not be used
        if drawn is not None:
            self._base_seed = drawn
        if not draws:
            _load_generator(loader.generator, state)
            torch.set_rng_state(before)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._length = None if self._is_stream else length(loader.dataset)  # of the copies that the workers get
        self._devices, self._sharded = find_devices(loader.device, loader.devices)
        self._memory = memory = loader._memory
        if self._devices is None:
            placement = as_collated(None, self._make_pinner())
        else:
            placement = memory.placement(self._devices)
        self._placement, self._pool = placement, make_pool(loader)
        self._pool.notices = loader._meter.notices
        memory.lend(self._pool, placement)
        self._pipeline = Pipeline(self._pool, make_split(self._devices, self._sharded, loader.num_shards))
        claim(self._pool, self._pipeline)
        # Without prefetch_factor, enough batches are in flight to fill the messages to the workers.
        self._pipeline.scheduler.scale_by_group = loader._scales_prefetch
        self._pipeline.scheduler.per_worker = loader.prefetch_factor or 0
        self._pipeline.scheduler.follow(self._pool)
        self._pipeline.min_ready = max(2, 1 + placement.ahead)
        self._closer = weakref.finalize(self, _close, self._pool.closer(), placement.closer())
        self._shutdown = False
        self._processes: list[WorkerView] = []
        # Part or worker -> where the previous epoch left it.
        self._points_at_start: dict[int, PartPoint] = {}
        self._number = next(_numbers)
        self._unread: set[int] = set()  # parts that had ended in a loaded state: no worker has read them
        self._begin(loader, state, self._sampler_iter if loader.num_workers == 0 else None)
        if drawn is not None:  # what this iterator has drawn changes nothing for others that begin at this state
            loader._progress.rng_at_load = torch.get_rng_state()

    def _make_pinner(self) -> Pinner | None:
        """What pins batches as torch does; None: nothing does."""
        if not self._pin_memory or self._devices is not None:
            return None
        kind = torch.device(self._pin_memory_device or accelerators()[0]).type
        pin = functools.partial(_utils.pin_memory.pin_memory, device=self._pin_memory_device)
        return Pinner(pin, kind, in_thread=self._num_workers > 0)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin another epoch with the persistent workers. torch's loader calls this."""
        if self._owner is not None and loader._progress.pending is not None:  # no epoch has begun since
            self._make_again(loader)
            return
        if isinstance(self._pool, ProcessPool) and not self._is_stream:
            then = "Persistent workers still have the old one: leave out persistent_workers, or make a new loader"
            warn_of_length(self._dataset, self._length, self._pool.notices, then)
        self._start = _start_of(loader, None)
        self._drawn_before(loader, None)
        super()._reset(loader, first_iter)
        if self._start is not None:
            self._start.put_back()
        if self._owner is None:
            self._points_at_start = self.run.after()
        self._begin(loader, None, self._sampler_iter)

    def _begin(self, loader: DataLoader[Any], state: LoaderState | None, items: Any) -> None:
        """Build the epoch's plan, run and iterator. Reads no sample.

        Args:
            loader, state: as above.
            items: the sampler's iterator. None: `SamplerStart` asks for it. With workers, torch asks a second time too.
        """
        # Ignore the state if its epoch was finished and the workers were not persistent: the next epoch starts new
        # workers with new seeds.
        finished = state is not None and state.finished
        if finished and not loader.persistent_workers and loader.num_workers > 0:
            state = None
        # New workers, or none, have the seeds and the datasets of a new epoch.
        saved = None if finished and loader.num_workers == 0 else state
        drawn = int(self._base_seed if saved is None else saved.base_seed)
        start = self._start
        number = None if start is None else start.epoch_of_seed()
        if number is None:
            number = loader._progress.count.next_epoch if state is None or finished else state.epoch or 0
        seed = drawn if loader.seed is None else int(loader.seed)
        base = drawn if loader.seed is None and loader._tuner is None else None  # None: nothing depends on the workers
        batchify = batchify_fn_of(self._collate_fn, batched=self._auto_collation)
        job = Job(self._dataset, batchify, seed, loader.on_error, base_seed=base, in_bulk=self._auto_collation)
        epoch: TorchEpoch | StreamEpoch
        if start is None:
            unread = {part: self._points_at_start[part] for part in self._unread & set(self._points_at_start)}
            epoch = stream_epoch(loader, seed, state, unread)
            self._unread = {part for part, point in epoch.at_beginning().points.items() if point.ended}
            job = replace(job, stream=epoch.stream._replace(tells_epoch=False))
        else:
            # As in torch, a worker has the dataset as it was when the worker started.
            job = replace(job, keeps_state=is_stateful(self._dataset), tells_epoch=False)
            epoch = self._sampler_epoch(start, None if saved is None else saved.sampler, items, loader._left_out)
            self._pipeline.scheduler.one_by_one = start.may_draw
            epoch.takes_turns = loader._tuner is None or job.keeps_state
            if job.keeps_state:
                loader._meter.tune_at = math.inf  # each worker has a state of its own: their number stays
        epoch.number = number  # the random numbers of an epoch depend on it, also in persistent workers
        epoch.any_order = not loader.in_order and loader.num_workers > 0
        self._job = job
        self._num_yielded = 0 if state is None or finished else state.yielded
        of_dataset = getattr(loader.dataset, "epoch", None) if self._is_stream else None
        self.run = TorchRun(
            next(_numbers),
            epoch=epoch,
            any_order=epoch.any_order,
            base_seed=drawn,
            yielded=self._num_yielded,
            num_workers=self._num_workers,
            generator=loader.generator,
            workers_live_on=self._workers_live_on,
            points_at_start=self._points_at_start,
            epoch_of_dataset=of_dataset if isinstance(of_dataset, int) else None,
        )
        self._inner = RunIterator(self._pipeline, self._placement, loader._meter, self.run, job)
        if loader.num_workers == 0:
            self._prime(epoch, is_new=state is None or finished)
        # Until the first `next` the loader is what it was: an iterator that reads nothing changes nothing.
        self._owner, self._asked, loader._progress.waiting = loader, loader._progress.asked(), self

    def _drawn_before(self, loader: DataLoader[Any], state: LoaderState | None) -> int | None:
        """The seed that the next epoch would have drawn when a state of an epoch's end was saved; None: it draws now.

        It draws one if the program has seeded, or used, the default generator since it loaded the state.
        """
        seed = of_sampler = None
        progress = loader._progress
        loaded_at, following = progress.rng_at_load, progress.following if state is None else state.next_draws
        self._following = following if state is not None and not state.finished else None
        is_as_loaded = loaded_at is not None and torch.equal(loaded_at, torch.get_rng_state())
        if following and not self._following and is_as_loaded:
            seed, of_sampler = following
        if self._start is not None and self._start.shuffle is not None:
            self._start.shuffle.expect(of_sampler)
        return seed

    def is_stale(self, loader: DataLoader[Any]) -> bool:
        """Return True if persistent workers have exited, or hold copies of the dataset from another epoch."""
        told, has_copies = loader._requests.take() is not None, self._is_stream or not self._pool.shares_dataset
        return self._shutdown or (told and has_copies and self._pool.started)

    def _make_again(self, loader: DataLoader[Any]) -> None:
        """Begin where an iterator would begin that is made now."""
        self._asked = None, self  # no state of the loader: if this is interrupted, the next `next` does it again
        self._shutdown_workers()
        self._closer()
        self.__init__(loader, loader._state_to_begin())  # type: ignore[misc]
        if self._workers_live_on:
            loader._iterator = self

    def _take_over(self, loader: DataLoader[Any]) -> None:
        """Become the newest iterator of the loader: the first batch is asked for."""
        progress, (request, pending) = loader._progress, self._asked
        is_named = progress.count.request is not request
        is_stale = self.is_stale(loader) if self._workers_live_on else self._shutdown
        if is_stale or progress.pending is not pending or (is_named and pending is not None):
            self._make_again(loader)
        elif is_named:
            self._start = _start_of(loader, None)
            self._begin(loader, None, None)
        with uninterrupted():
            self._owner, progress.following, loader._job = None, self._following, self._job
            progress.begun(self.run, self)

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
        epoch = TorchEpoch(start, lanes, self._auto_collation, points, is_stateful(self._dataset), self._number, skips)
        if self._num_workers > 0 and not start.resumes:  # torch's workers are sent the first indices now
            start.settle()
            if not start.has_set_epoch:
                epoch.begin()
        return epoch

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
        """As in PyTorch before 1.13: ``next(iterator)``."""
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
        if self._devices is not None and os.getpid() == self._pipeline.pid:
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


def _start_of(loader: DataLoader[Any], state: LoaderState | None) -> SamplerStart | None:
    """What starts the loader's sampler; None for iterable data."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    saved, finished = (None, False) if state is None else (state.sampler, state.finished)
    return SamplerStart(loader._index_sampler, saved, finished, loader._progress.count)


def _load_generator(generator: torch.Generator | None, state: LoaderState | None) -> None:
    """Restore the generator that the user gave to the loader."""
    if generator is not None and state is not None and state.generator is not None:
        set_generator(generator, state.generator)


def _load_dataset(dataset: Any, state: LoaderState) -> None:
    """Restore a map-style dataset of this process from a state of an epoch's end.

    The dataset may restore the global generator, so this comes before the next epoch draws its seed.
    """
    saved = None if state.sampler is None else state.sampler.datasets
    if saved and saved[-1] is not None and is_stateful(dataset):
        dataset.load_state_dict(copy.deepcopy(saved[-1]))


def _close(close_pool: Any, close_placement: Any) -> None:
    close_pool()
    close_placement()


leave_alone(LoaderIterator.__next__)
