"""Iterator of the drop-in: torch's own base class around our iterator.

    check_arguments(loader)                           rejects arguments that would fail at the first batch
    make_pool(loader) -> Pool                         pool that the loader's arguments ask for
    LoaderIterator(loader, state)._next_data() -> EpochIterator -> Pipeline -> ProcessPool | InlinePool
    WorkerView(handle)                                worker process as torch's iterator shows it

An iterator owns its workers, as in torch. They start with the first ``next`` and end with the epoch. With
``persistent_workers`` they live as long as the iterator, which the loader then keeps and resets for each epoch. If
their datasets are out of date, it makes another iterator: forked workers end, spawned ones are sent the changed one.

Worker failures are raised as torch raises them: a dead worker and a timeout are a RuntimeError in torch's words, with
this library's error as its cause.
"""

from __future__ import annotations

import copy
import itertools
import math
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sharded_loader import InlinePool, LoaderClosedError, ProcessPool, ThreadPool, WorkerDiedError, WorkerTimeoutError
from sharded_loader.drop_in import sampler as samplers
from sharded_loader.drop_in.pinning import Pinner
from sharded_loader.drop_in.sampler import Points, SamplerStart, Skips, TorchEpoch
from sharded_loader.drop_in.state import (
    LoaderState,
    TorchRun,
    TorchSteps,
    check_data,
    job_of,
    keeps_state,
    lives_on,
    stream_epoch,
)
from sharded_loader.drop_in.trainers import length_was_asked
from sharded_loader.extend import PartPoint, Pipeline, Pool, Run, Task
from sharded_loader.extend import engine as core
from sharded_loader.extend.data import TensorBatch, to_torch
from sharded_loader.extend.order import nested
from sharded_loader.extend.tools import check_int, exclude_from_compilation, uninterrupted

if TYPE_CHECKING:
    from sharded_loader.drop_in.state import Loader

_numbers = itertools.count()

_OF_ENGINE = (
    *("num_workers", "thread_pool", "multiprocessing_context", "start_method", "worker_init_fn", "timeout", "restarts"),
    *("max_bytes", "max_worker_memory", "prefetch_factor", "pin_memory", "pin_memory_device"),
    *("device", "devices", "num_shards"),
)
"""Arguments that an `Engine` depends on: if one has changed, workers that wait are not used again."""


def check_arguments(loader: Loader) -> None:
    """Reject arguments that torch's constructor accepts, but that fail at the first batch (ValueError, TypeError)."""
    core.collate_function(None, loader.collate_fn)
    if loader.generator is not None and not isinstance(loader.generator, torch.Generator):
        raise TypeError(f"generator is {loader.generator!r}; it must be a torch.Generator, or give seed= (an int)")
    if loader.prefetch_factor is not None:
        check_int("prefetch_factor", loader.prefetch_factor, 0, "give the number of batches to prefetch per worker")
    if loader.seed is not None:
        loader.seed = check_int("seed", loader.seed, -math.inf, "give an integer, or None")
    core.make_split(*core.find_devices(loader.device, loader.devices), loader.num_shards)
    if loader.streams is not None and loader._sharded is None:  # which takes them with ``keep`` too
        check_int("streams", loader.streams, 1, "give the number of parts, or None for one per worker")
        if not isinstance(loader.dataset, IterableDataset):
            core.refuse_streams(loader.streams, loader.dataset)
    if loader.start_method and loader.multiprocessing_context is not None:
        raise ValueError("start_method and multiprocessing_context set the same thing: leave out one of them")
    if loader.max_worker_memory is not None and (loader.num_workers == 0 or uses_threads(loader)):
        text = f"max_worker_memory={loader.max_worker_memory!r} needs worker processes on this machine"
        raise ValueError(f"{text}: give num_workers= without thread_pool, or leave max_worker_memory out")
    _process_pool(loader, max(1, loader.num_workers))
    for one in () if isinstance(loader.dataset, IterableDataset) else nested(loader._index_sampler):
        if hasattr(one, "check_dataset") and hasattr(loader.dataset, "__len__"):
            one.check_dataset(len(loader.dataset))


def make_pool(loader: Loader) -> Pool:
    """Return the pool for a loader. With ``timeout`` alone, a silent or dead worker is an error, as in torch."""
    if loader.num_workers == 0:
        if loader.timeout:
            raise AssertionError("a DataLoader without workers requires timeout == 0")  # the type is torch's
        return InlinePool()
    timeout, count = loader.timeout or None, loader.num_workers if loader._tuner is None else loader._tuner.workers
    if uses_threads(loader):
        return ThreadPool(count, worker_init_fn=loader.worker_init_fn, timeout=timeout)
    pool = _process_pool(loader, count)
    pool.workers_last = loader.persistent_workers or loader._sharded is not None
    return pool


def uses_threads(loader: Loader) -> bool:
    """Return True if workers are threads: by ``thread_pool``, or by a context whose processes are threads (MONAI's)."""
    process: object = getattr(loader.multiprocessing_context, "Process", None)
    return loader.thread_pool or (isinstance(process, type) and issubclass(process, threading.Thread))


def _call_as_worker(call: Callable[[int], object], count: int, base_seed: int, dataset: object, number: int) -> None:
    """Call ``worker_init_fn`` in a thread, where ``get_worker_info()`` answers as in torch's worker ``number``."""
    before = core.set_current_part(core.Part(number, count, base_seed + number, dataset))
    try:
        call(number)
    finally:
        core.set_current_part(before)


def _process_pool(loader: Loader, count: int) -> ProcessPool:
    context = loader.multiprocessing_context
    method: Any = loader.start_method
    if method is None and context is not None:
        name = context.get_start_method()  # other libraries' contexts may have names that are no start methods
        method = name if name in multiprocessing.get_all_start_methods() else "spawn"
    restarts = (0 if loader.timeout else 3) if loader.restarts is None else loader.restarts
    given = {name: getattr(loader, name) for name in ("worker_init_fn", "max_bytes", "max_worker_memory")}
    return ProcessPool(count, start_method=method, timeout=loader.timeout or None, restarts=restarts, **given)


def as_collated(devices: list[torch.device] | None, pinner: Pinner | None = None) -> core.Placer:
    """Return a `Placer` that moves batches to ``devices``, pins them as torch does, or leaves them as collated."""
    return core.Placer(devices, pin_memory=False, in_host_memory=_collated, pinner=pinner)


def _collated(shard: object) -> Any:
    return to_torch(shard.arrays) if type(shard) is TensorBatch else shard


class DeviceMemory:
    """Copy streams, memory of batches on the host, and pinned memory of the workers, kept from epoch to epoch.

    New memory takes time: an epoch of 4 batches of 9.6 MB takes 24 ms of CPU time instead of 8 without workers.
    """

    def __init__(self) -> None:
        self._placement: core.Placer | None = None
        self._on_host: core.Placer | None = None  # its memory only
        self._left: list[core.ArenaInUse] = []  # from pools that have ended
        weakref.finalize(self, _close_arenas, self._left)

    def placement(self, devices: list[torch.device]) -> core.Placer:
        """Return the `Placer` for these devices; a new one if they have changed."""
        if self._placement is None or self._placement.devices != devices:
            _close_arenas(self._left)
            self._placement = as_collated(devices)
        return self._placement

    def lend(self, pool: Pool, placement: core.Placer) -> None:
        """Give a new pool memory that a previous one has left, or memory of its own."""
        if isinstance(pool, ProcessPool) and placement is self._placement and self._left:
            pool.take_over(self._left.pop())
        kept = placement
        if placement.devices is None:
            kept = self._on_host = self._on_host or as_collated(None)
        pool.use_memory(kept.empty, placement.register, pinned=placement.pinned)

    def ready_event(self) -> Any:
        return None if self._placement is None else self._placement.ready_event()

    def take_back(self, pool: Pool, placement: core.Placer) -> None:
        """End the workers of a pool, and keep its memory if a device reads it."""
        if isinstance(pool, ProcessPool) and placement is self._placement and placement.asynchronous:
            left = pool.hand_over()
            if left[0].segments:
                self._left.append(left)


def _close_arenas(left: list[core.ArenaInUse]) -> None:
    while left:
        left.pop()[0].close()


# -- the iterator ------------------------------------------------------------------------------------------------------


class InlinePipeline(Pipeline):
    """Pipeline without workers: as in torch, a forked child may continue."""

    def check_open(self) -> None:
        if os.getpid() != self.pid:
            self.pid, self.lock = os.getpid(), threading.RLock()  # the parent's may be held
        super().check_open()


class Engine:
    """Pool, pipeline and placement of an iterator, which owns this, and its ``run``, known from the start.

    ``length`` is the dataset's, whose copies the workers get; ``views`` are the workers that the user has seen, by
    handle. An `EpochIterator` uses it in place of `loader.epochs.Epochs` and its `Progress`.
    """

    run: TorchRun
    current_run: Run | None = None
    length: int | None = None
    sources = None  # batches come alone
    renews = False  # the workers have the dataset of the iterator before

    def __init__(self, loader: Loader, pins: bool, kind: str | None) -> None:
        devices, sharded = core.find_devices(loader.device, loader.devices)
        pinner, self._memory = None, loader._memory
        if pins and devices is None:
            pin = partial(_utils.pin_memory.pin_memory, device=kind)
            pinner = Pinner(torch.device(kind or core.accelerators()[0]).type, loader.num_workers > 0, pin)
        self.placement = as_collated(None, pinner) if devices is None else self._memory.placement(devices)
        self.pool, self.asked = make_pool(loader), _asked(loader)
        self.pool.notices = loader._meter.notices
        self._memory.lend(self.pool, self.placement)
        kind_of = Pipeline if loader.num_workers else InlinePipeline
        self.pipeline = kind_of(self.pool, core.make_split(devices, sharded, loader.num_shards))
        core.claim(self.pool, self.pipeline)
        # Without prefetch_factor, enough batches are in flight to fill the messages to the workers.
        self.pipeline.scheduler.scale_by_group = loader._scales_prefetch
        self.pipeline.scheduler.per_worker = loader.prefetch_factor or 0
        self.pipeline.scheduler.update_prefetch(self.pool)
        self.pipeline.min_ready = max(2, 1 + self.placement.ahead)
        self.views: dict[Any, WorkerView] = {}
        over = partial(_let_go, self.views), self.pool.closer(), self.placement.closer()
        self.close = weakref.finalize(self, core.call_all, *over)

    def shown(self) -> list[WorkerView]:
        """Return the worker processes, as torch's iterator shows them."""
        handles = self.pool.workers if isinstance(self.pool, ProcessPool) else []
        return [self.views.setdefault(handle, WorkerView(handle)) for handle in handles]

    def shut_down(self) -> None:
        """End the workers; memory that a device reads is kept for the next iterator."""
        self.shown()  # before the pool forgets them
        _let_go(self.views)
        if not self.pipeline.is_open_step:  # an interrupted step may have left the arena inconsistent
            self._memory.take_back(self.pool, self.placement)
        self.pipeline.close()
        self.placement.closer()()

    @property
    def progress(self) -> Engine:
        """A property, because an object that holds itself would wait for the garbage collector."""
        return self

    def choose(self) -> Run:
        return self.run

    def open(self, run: TorchRun, iterator: object) -> None:
        self.pipeline.open(run, run.job, renew=self.renews)
        self.renews = False

    def begun(self, *_: object) -> None:
        """Do nothing, and say no."""

    was_over = keep = read_ahead = open_ahead = begun


class LoaderIterator(_BaseDataLoaderIter):
    """One epoch of a `sharded_loader.torch.DataLoader`, from ``state`` on, or all of its epochs with persistent
    workers.
    """

    run: TorchRun
    # Until the first `next`: the loader, and the basis of the plan: the last ``set_epoch``, and the loaded state.
    _waits: tuple[Loader, Any] | None = None

    def __init__(self, loader: Loader, state: LoaderState | None = None) -> None:
        check_data(loader)
        # Resuming must not advance torch's global generator: the state already holds the seed and the order. The same
        # holds when persistent workers continue.
        draws = state is None or (state.finished and not lives_on(loader))
        before, generator, saved = torch.get_rng_state(), loader.generator, None if state is None else state.generator
        dataset: Any = loader.dataset
        if draws and generator is not None and saved is not None:
            samplers.set_generator(generator, saved)
        drawn = self._plan(loader, state)
        if draws and state is not None and state.sampler is not None and loader.num_workers == 0:
            # The dataset may restore the global generator, so this comes before the next epoch draws its seed.
            datasets = state.sampler.datasets
            if datasets and datasets[-1] is not None and keeps_state(dataset):
                dataset.load_state_dict(copy.deepcopy(datasets[-1]))
        with _where_drawn(loader):
            super().__init__(loader)
        skipped, items = self._num_yielded, self._sampler_iter if loader.num_workers == 0 else None
        if self._start is not None:
            self._start.put_back()  # torch's constructor has asked for items that may not be used
            if skipped:  # SpeechBrain resumes so: it has patched torch's constructor
                items, self._start.shuffle = (item for item in self._sampler_iter), None
        self._base_seed = self._base_seed if drawn is None else drawn
        if not draws:
            if generator is not None and saved is not None:
                samplers.set_generator(generator, saved)
            torch.set_rng_state(before)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        kept, loader._progress.engine = loader._progress.engine, None
        if kept is None or kept.asked != _asked(loader):
            kept = Engine(loader, self._pin_memory, self._pin_memory_device)
            if isinstance(kept.pool, ThreadPool) and (call := loader.worker_init_fn) is not None:
                seed = int(self._base_seed)
                kept.pool.worker_init_fn = partial(_call_as_worker, call, loader.num_workers, seed, dataset)
        self._engine = kept
        self._engine.length, self._shutdown = None if self._is_stream else core.length(dataset), False
        self._begin(loader, state, items)
        self._num_yielded += skipped
        if drawn is not None:  # other iterators that begin at this state draw the same
            loader._progress.rng_at_load = torch.get_rng_state()

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        """Begin another epoch with the persistent workers; called by torch's loader."""
        if self._waits is not None and loader._progress.pending is not None:  # no epoch has begun since
            self._make_again(loader)
            return
        if isinstance(self._engine.pool, ProcessPool):
            then = "Persistent workers still have the old one: leave out persistent_workers, or make a new loader"
            core.warn_of_length(self._dataset, self._engine.length, self._engine.pool.notices, then)
        self._plan(loader, None)
        with _where_drawn(loader):
            super()._reset(loader, first_iter)
        if self._start is not None:
            self._start.put_back()
        self._begin(loader, None, self._sampler_iter, self.run)

    def _plan(self, loader: Loader, state: LoaderState | None) -> int | None:
        """Prepare the start of the sampler, if the data has one, and return the seed that the epoch has already drawn.

        That is the seed the next epoch would have drawn when an end-of-epoch state was saved. None: the epoch draws one
        now, also if the program has seeded or used the default generator since it loaded the state.
        """
        progress, seed, of_sampler = loader._progress, None, None
        self._start = None if isinstance(loader.dataset, IterableDataset) else start_of(loader, state)
        loaded_at, draws = progress.rng_at_load, progress.following if state is None else state.next_draws
        self._following = draws if state is not None and not state.finished else None
        if draws and not self._following and loaded_at is not None and torch.equal(loaded_at, torch.get_rng_state()):
            seed, of_sampler = draws
        if self._start is not None and self._start.shuffle is not None:
            self._start.shuffle.expect(of_sampler)
        return seed

    def _begin(
        self, loader: Loader, state: LoaderState | None, items: Iterator[object] | None, before: TorchRun | None = None
    ) -> None:
        """Build the epoch's plan, run and iterator; read no sample.

        Args:
            items: Iterator of the sampler. None: `SamplerStart` creates it; with workers, torch creates a second one,
                too.
            before: Previous run of the same workers.
        """
        is_new, workers, start = state is None or state.finished, self._num_workers, self._start
        # Ignore the state if its epoch was finished and the workers were not persistent: the next epoch starts new
        # workers with new seeds.
        if is_new and workers > 0 and not lives_on(loader):
            state = None
        # New workers, or none, have the seeds and the datasets of a new epoch.
        saved = None if is_new and workers == 0 else state
        drawn = int(self._base_seed if saved is None else saved.base_seed)
        number = None if start is None else start.epoch_of_seed()
        if number is None:
            number = loader._progress.count.next_epoch if state is None or is_new else state.epoch or 0
        job = job_of(loader, self._collate_fn, drawn)
        points: Points = {} if before is None else before.points_at_start if self._waits else before.after()
        epoch: TorchEpoch | core.StreamEpoch
        unread, of_epoch = set[int](), loader._progress.epoch_of_dataset(loader)
        if start is None:
            last = before if workers else loader._progress.current_run
            left = points if workers or last is None else last.after()
            behind = {} if last is None else {part: left[part] for part in last.unread & left.keys()}
            epoch = stream_epoch(loader, job.seed, state, behind)
            unread = {part for part, point in epoch.at_beginning().points.items() if point.ended}
            job = replace(job, stream=epoch.stream._replace(sets_epoch=False))
        else:
            # As in torch, a worker has the dataset as it was when the worker started.
            job, at_start = replace(job, keeps_state=keeps_state(self._dataset)), points
            if saved is not None and saved.sampler is not None:  # otherwise workers keep their datasets
                of_workers = enumerate(saved.sampler.datasets or ())
                at_start = {i % max(1, workers): PartPoint(1, state=dataset) for i, dataset in of_workers}
            epoch = self._sampler_epoch(start, items, at_start, TorchSteps(loader).left_out)
            epoch.takes_turns = loader._tuner is None or job.keeps_state
            if job.keeps_state:
                loader._meter.tune_at = math.inf  # each worker has its own state: keep their number
        epoch.number = number  # keys the random numbers, also in persistent workers
        epoch.any_order = not loader.in_order and workers > 0
        self._num_yielded = 0 if state is None or is_new else state.yielded
        at: dict[str, Any] = {"points_at_start": points, "unread": unread, "epoch_of_dataset": of_epoch}
        at |= {"base_seed": drawn, "yielded": self._num_yielded}
        self.run = self._engine.run = TorchRun(next(_numbers), epoch=epoch, job=job, **at)
        self._inner = core.EpochIterator(cast(Any, self._engine), loader._meter)
        if workers == 0:
            self._prime(is_new)
        # The loader changes with the first `next`: an iterator that reads nothing has no effect.
        progress = loader._progress
        self._waits, progress.waiting = (loader, (progress.count.request, progress.pending)), self

    def _sampler_epoch(self, start: SamplerStart, items: Any, points: Points, left_out: Skips) -> TorchEpoch:
        """Return an epoch of map-style data; the arguments are those of `_begin` and `TorchEpoch`."""
        lanes = max(1, self._num_workers)
        if not start.resumes:
            start.begin(items)
        epoch = TorchEpoch(start, lanes, self._auto_collation, points, keeps_state(self._dataset), left_out)
        if self._num_workers > 0 and not start.resumes:  # torch sends its workers the first indices now
            start.draw_seed()
            if not start.has_set_epoch:
                epoch.begin()
            elif start.shuffle is not None and start.shuffle.seed is None:  # no `set_epoch` has an effect
                epoch.batch(0)
        self._engine.pipeline.scheduler.one_by_one = start.may_draw
        return epoch

    def is_stale(self, loader: Loader) -> bool:
        """Return True if persistent workers have exited, or hold copies of the dataset from another epoch."""
        is_requested, pool = loader._progress.requests.take() is not None, self._engine.pool
        has_copies = pool.started and not self._engine.renews and (self._is_stream or not pool.shares_dataset)
        return self._shutdown or (is_requested and has_copies)

    def _make_again(self, loader: Loader) -> None:
        """Start over as if the iterator were created now."""
        self._waits = loader, (None, self)  # matches no state: after an interruption the next `next` does it again
        self.end(loader)
        self.__init__(loader, loader._progress.state_to_begin(loader._index_sampler))  # type: ignore[misc]
        if lives_on(loader):
            loader._iterator = self

    def _take_over(self, loader: Loader, asked: Any) -> None:
        """Become the newest iterator of the loader, when the first batch is asked for."""
        progress, (request, pending) = loader._progress, asked
        is_stale = self.is_stale(loader) if lives_on(loader) else self._shutdown
        is_named = pending is not None and (progress.count.request is not request or self._is_outdated)
        if is_stale or is_named or progress.pending is not pending:
            self._make_again(loader)
        else:
            self.plan_again(loader)
        with uninterrupted():
            self._waits, progress.following = None, self._following
            progress.begun(self.run, self)

    @property
    def _is_outdated(self) -> bool:
        return self._start is not None and self._start.is_outdated

    def plan_again(self, loader: Loader) -> None:
        """Plan the epoch that ``set_epoch`` has named since, if any, and that of samplers that were replaced."""
        asked = None if self._waits is None else self._waits[1]
        if asked is not None and (asked[0] is not loader._progress.count.request or self._is_outdated):
            self._start = None if self._is_stream else start_of(loader, None)
            self._begin(loader, None, None, self.run)

    def _prime(self, is_new: bool) -> None:
        """Ask a dataset in this process for its iterator and its state, at the same moment as torch."""
        dataset, run, engine = cast(Any, self._dataset), self.run, self._engine
        if isinstance(run.epoch, TorchEpoch):
            if run.job.keeps_state and is_new:
                run.epoch.primed(dataset)
            return
        engine.pipeline.start(run.job)
        task, reader = run.epoch.task(run.epoch.first), getattr(engine.pool, "reader", None)
        if isinstance(task, Task) and isinstance(reader, core.StreamReader) and task.part is not None:
            point = reader.prime(task)
            if point.state is not None and not point.batches:  # it may still be that of the end of the pass before
                point = point._replace(state=(*point.state[:2], "perhaps"))
            run.epoch.primed(task.part.number, point)
        elif run.unread == {0}:  # saved after the last batch, before the end was seen
            of_dataset, _ = run.epoch.at_beginning().points[0].state or (None, None)
            if of_dataset is not None:
                dataset.load_state_dict(copy.deepcopy(of_dataset))

    # -- batches --------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """Return ``next(iterator)``: the spelling of scripts for PyTorch before 1.13."""
        return self.__next__()

    def __next__(self) -> Any:
        # torch's method costs 5 to 9 us: it records each batch for a profiler, and checks a length that was asked for.
        if (self._is_stream and length_was_asked(self)) or core.profiler_enabled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._waits is not None:
            self._take_over(*self._waits)
        if self._shutdown:
            raise StopIteration
        try:
            data = self._inner.__next__()  # no `next`: a Ctrl-C behind that call would lose the batch
        except StopIteration:
            run, dataset = self.run, cast(Any, self._dataset)
            is_unread = self._num_workers == 0 and run.job.keeps_state and 0 < run.epoch.first == run.delivered
            # Saved after the last batch, before the end was seen: no batch has brought the dataset there.
            if is_unread and (state := run.after()[0].state) is not None:
                dataset.load_state_dict(copy.deepcopy(state))
            if not self._persistent_workers:
                self._shutdown_workers()
            raise
        except (WorkerDiedError, WorkerTimeoutError) as error:
            raise in_torchs_words(error, self._timeout) from error
        except LoaderClosedError:
            if self._shutdown:  # another thread, which shares the iterator, has seen the end
                raise StopIteration from None
            raise
        self.run.yielded += 1
        return data

    # -- workers --------------------------------------------------------------------------------------------

    def __del__(self, _is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        # After a ``break``, return the memory to the loader. `Engine.close` does the rest.
        if _is_finalizing() or getattr(self, "_shutdown", True):
            return
        if self._engine.placement.devices is not None and os.getpid() == self._engine.pipeline.pid:
            self._shutdown_workers()

    @property
    def _workers(self) -> list[WorkerView]:
        """Worker processes, as torch's iterator shows them. Starts them."""
        engine = self._engine
        if isinstance(engine.pool, ProcessPool) and not self._shutdown and not engine.pool.started:
            engine.pipeline.start(self.run.job)
        return engine.shown() or list(engine.views.values())

    def end(self, loader: Loader) -> None:
        """End the workers, or keep them for the next iterator, if it can send them another dataset."""
        engine = self._engine
        if self._shutdown:  # another iterator may have the engine
            return
        if isinstance(pool := engine.pool, ProcessPool) and pool.start_method != "fork" and pool.workers:
            engine.pipeline.drop(self.run.number)
            self._shutdown = engine.renews = True
            loader._progress.engine = engine
            return
        self._shutdown_workers()
        engine.close()

    def _shutdown_workers(self) -> None:
        """End the workers. Safe to call twice."""
        if not self._shutdown:
            self._shutdown = True
            self._engine.shut_down()


def _asked(loader: Loader) -> list[object]:
    """Return what an engine depends on; one of another process has no workers."""
    return [os.getpid(), *(getattr(loader, name) for name in _OF_ENGINE)]


def _where_drawn(loader: Loader) -> AbstractContextManager[Any]:
    """Return a context in which torch's iterator can draw its seed, although it does so on the default device."""
    device = torch.device("cpu") if loader.generator is None else loader.generator.device
    return nullcontext() if torch.empty(0).device == device else device


def start_of(loader: Loader, state: LoaderState | None) -> SamplerStart:
    saved, finished = (None, False) if state is None else (state.sampler, state.finished)
    return SamplerStart(loader._index_sampler, saved, finished, loader._progress.count)


def _let_go(views: dict[Any, WorkerView]) -> None:
    """Mark the workers as ended by the loader, which is about to end them."""
    for view in views.values():
        if view.is_alive():
            view.handle = None


class WorkerView:
    """Worker process as torch shows it to programs that watch or kill workers; ``handle`` is None once ended by the
    loader.
    """

    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self.pid: int = handle.pid

    def is_alive(self) -> bool:
        return self.handle is not None and bool(self.handle.is_alive())

    @property
    def exitcode(self) -> int | None:
        """Exit code; None while the process runs. As in torch, 0 if the loader has ended it."""
        return None if self.is_alive() else getattr(self.handle, "exitcode", None) or 0

    def join(self, timeout: float | None = None) -> None:
        if self.handle is not None:
            self.handle.wait(timeout)

    def terminate(self) -> None:
        if self.handle is not None:
            self.handle.kill()

    kill = terminate


def in_torchs_words(error: WorkerDiedError | WorkerTimeoutError, timeout: float) -> RuntimeError:
    """Return the error that torch raises in this case. It begins with torch's text, which programs search for."""
    if isinstance(error, WorkerTimeoutError):
        return RuntimeError(f"DataLoader timed out after {timeout} seconds. {error}")
    code = error.exitcode
    if code is not None and code < 0:
        name = signal.strsignal(-code)
        return RuntimeError(f"DataLoader worker (pid {error.pid}) is killed by signal: {name}. {error}")
    return RuntimeError(f"DataLoader worker (pid(s) {error.pid}) exited unexpectedly. {error}")


exclude_from_compilation(LoaderIterator.__next__)
