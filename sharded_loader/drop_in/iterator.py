"""The iterator of the drop-in: torch's own base class around this library's iterator.

    LoaderIterator(loader, state)._next_data() -> EpochIterator -> Pipeline -> ProcessPool | InlinePool

An iterator owns its workers, as in torch. They start with the first ``next`` and end with the epoch. With
``persistent_workers`` they live as long as the iterator, which the loader then keeps and resets for each epoch.

What goes wrong in a worker is raised here as torch raises it: a dead worker and a timeout are a RuntimeError in torch's
words, with this library's error as its cause.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import IterableDataset, _utils
from torch.utils.data.dataloader import _BaseDataLoaderIter

from sharded_loader.base.errors import WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.imports import leave_alone
from sharded_loader.batching.tree import TensorBatch
from sharded_loader.data.inspection import is_stateful
from sharded_loader.devices.names import find_devices
from sharded_loader.devices.placement import Placement
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.epoch import TorchEpoch
from sharded_loader.drop_in.place import Place, stream_of
from sharded_loader.drop_in.start import SamplerStart, set_generator
from sharded_loader.drop_in.workers import Worker, in_torchs_words, make_pool
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.pipeline import Pipeline, Run
from sharded_loader.engine.stream import PartPoint
from sharded_loader.loader.arguments import length, make_split
from sharded_loader.loader.epochs import warn_of_length
from sharded_loader.loader.iterator import BatchIterator, profiler_enabled
from sharded_loader.loader.stats import Meter
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.streams.epoch import StreamEpoch
from sharded_loader.streams.order import StreamOrder
from sharded_loader.streams.reader import StreamReader

_numbers = itertools.count()


class AsCollated(Placement):
    """Leaves batches as the collate function made them, or puts them on devices."""

    def __init__(self, devices: list[torch.device] | None) -> None:
        super().__init__(devices, pin_memory=False)
        self.is_plain = False

    def place(self, batch: Any, sharded: bool) -> Any:
        if not self._on_host:
            return super().place(batch, sharded)
        shards = [one.to_torch() if type(one) is TensorBatch else one for one in (batch if sharded else [batch])]
        return shards if sharded else shards[0]

    def begin(self, batch: Any, sharded: bool) -> Any:
        shards = [one.arrays if type(one) is TensorBatch else one for one in (batch if sharded else [batch])]
        return super().begin(shards if sharded else shards[0], sharded)


class RunIterator(BatchIterator[Any]):
    """Batches of one run. It is the only one of its loader's iterator.

    Args:
        pipeline, placement, meter: of the iterator.
        run: the run.
        job: what workers are told with it.
    """

    def __init__(self, pipeline: Pipeline, placement: Placement, meter: Meter, run: Run, job: Job) -> None:
        super().__init__(pipeline, placement, meter)
        self._only, self._job = run, job

    def _choose(self) -> Run:
        return self._only

    def _open(self, run: Run) -> None:
        self._pipeline.open(run, self._job)


class LoaderIterator(_BaseDataLoaderIter):
    """One epoch of a `sharded_loader.torch.DataLoader`; with persistent workers one after the other.

    Args:
        loader: the loader.
        state: where to go on; see `Place.state_dict`.

    Attributes:
        place: where it is.
    """

    def __init__(self, loader: Any, state: dict[str, Any] | None = None) -> None:
        # A loaded epoch draws nothing: its seed and its order are in the state. If the user puts the global generator
        # back too, the epochs after it are those that would have come. Nor does an epoch of workers that live on.
        lives_on = loader.persistent_workers and loader.num_workers > 0
        draws = state is None or (state["_iterator_finished"] and not lives_on)
        before = None if draws else torch.get_rng_state()
        if before is None:
            _load_generator(loader.generator, state)
        self._start = _start_of(loader, state)
        drawn = _drawn_before(loader, self._start, state)
        if loader.num_workers == 0 and draws and state is not None:
            _load_dataset(loader.dataset, state)
        super().__init__(loader)
        if drawn is not None:
            self._base_seed = drawn
        if before is not None:
            _load_generator(loader.generator, state)
            torch.set_rng_state(before)
        self._is_stream = isinstance(loader.dataset, IterableDataset)
        self._length = None if self._is_stream else length(loader.dataset)  # of the copies that the workers get
        self._devices, self._sharded = find_devices(loader.device, loader.devices)
        self._placement = AsCollated(self._devices)
        self._pool = make_pool(loader)
        self._pool.notices = loader._meter.notices
        place = self._placement
        self._pool.use_memory(place.empty, place.register, pinned=bool(place.asynchronous))
        self._pipeline = Pipeline(self._pool, make_split(self._devices, self._sharded, loader.num_shards))
        # With prefetch_factor left to us, as many batches as make a message worth while are in flight.
        self._pipeline.scale_by_group = loader._scales_prefetch
        self._pipeline.prefetch = (loader.prefetch_factor or 0) * loader.num_workers
        self._closer = weakref.finalize(self, _close, self._pool.closer(), self._placement.closer())
        self._shutdown = False
        self._processes: list[Worker] = []
        self._before: dict[int, PartPoint] = {}  # of each part, or worker, before this epoch: it is there already
        self._number = next(_numbers)
        self._unread: set[int] = set()  # parts that had ended in a loaded state: no worker has read them
        self._begin(loader, state, self._sampler_iter if loader.num_workers == 0 else None)

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        """Begin another epoch with the workers that run."""
        if isinstance(self._pool, ProcessPool) and not self._is_stream:
            then = "Persistent workers still have the old one: leave out persistent_workers, or make a new loader"
            warn_of_length(self._dataset, self._length, self._pool.notices, then)
        self._start = _start_of(loader, None)
        super()._reset(loader, first_iter)
        self._before = self.place.after()
        self._begin(loader, None, self._sampler_iter)

    def _begin(self, loader: Any, state: dict[str, Any] | None, items: Any) -> None:
        """Make the parts of one epoch. Nothing is read yet.

        Args:
            loader, state: as above.
            items: of the sampler. None: torch asks for them a second time if it has workers, so it is done here too.
        """
        finished = state is not None and bool(state["_iterator_finished"])
        # A state may tell nothing of a worker that has done nothing: its generators are what they were.
        # An epoch without persistent workers begins with new ones.
        ignores_state = state is None or (finished and not loader.persistent_workers and loader.num_workers > 0)
        begins = ignores_state or (finished and loader.num_workers == 0)
        drawn = int(self._base_seed if state is None or begins else state["_base_seed"])
        start = self._start
        epoch = _epoch_of(loader, start, state, finished)
        loader._epochs.next = epoch + 1
        seed, base = (drawn, drawn) if loader.seed is None else (int(loader.seed), None)
        batchify = batchify_fn_of(self._collate_fn, batched=self._auto_collation)
        job = Job(self._dataset, batchify, seed, loader.on_error, base_seed=base, in_bulk=self._auto_collation)
        order: StreamOrder | None = None
        reading: TorchEpoch | StreamEpoch
        if start is None:
            order, reading = self._stream(loader, seed, None if ignores_state else state, finished)
            job = replace(job, stream=order.stream._replace(tells_epoch=False))
        else:
            # As in torch, a worker has the dataset as it was when the worker started, unless the loader was told.
            job = replace(job, keeps_state=is_stateful(self._dataset), tells_epoch=loader._is_told)
            reading = self._sampled(start, state, items, begins)
            self._pipeline.one_by_one = start.may_draw
        reading.number = epoch  # what is random differs from epoch to epoch, also in workers that live on
        any_order = not loader.in_order and loader.num_workers > 0
        if any_order:
            reading.any_order = True
        run = Run(next(_numbers), reading, any_order=any_order)
        self._inner = RunIterator(self._pipeline, self._placement, loader._meter, run, job)
        self._job = loader._job = job
        self._num_yielded = 0 if state is None or finished else state["_num_yielded"]
        self.place = Place(reading, run, order, loader, drawn, self._num_yielded, self._before)
        if loader.num_workers == 0:
            self._prime(reading, is_new=state is None or finished)

    def _stream(
        self, loader: Any, seed: int, state: dict[str, Any] | None, finished: bool
    ) -> tuple[StreamOrder, StreamEpoch]:
        """The order and the reading of an epoch of iterable data; see `stream_of`."""
        missing = {part: self._before[part] for part in self._unread & set(self._before)}
        order, reading = stream_of(loader, seed, state and state["_stream"], finished, missing)
        order.begun(reading)
        self._unread = {part for part, point in reading.at_beginning().points.items() if point.ended}
        return order, reading

    def _sampled(self, start: SamplerStart, state: dict[str, Any] | None, items: Any, begins: bool) -> TorchEpoch:
        """The reading of an epoch of map-style data.

        Args:
            start: of the sampler.
            state, items: as in `_begin`.
            begins: the workers are new, or there are none: the state tells nothing of their generators and datasets.
        """
        lanes, found = max(1, self._num_workers), state and state["_sampler"]
        if start.loaded is None:
            start.begin(items)
        points = self._before
        if not begins:
            datasets = enumerate((found or {}).get("datasets", ()))
            points = {lane % lanes: PartPoint(state=of_dataset) for lane, of_dataset in datasets}
        reading = TorchEpoch(start, lanes, self._auto_collation, points, is_stateful(self._dataset), self._number)
        if self._num_workers > 0 and start.loaded is None:  # torch's workers are sent the first indices now
            start.settle()
            if not start.may_be_told:
                reading.begin()
        return reading

    def _prime(self, reading: TorchEpoch | StreamEpoch, is_new: bool) -> None:
        """Ask for the iterator of a dataset that is read in this process, and for its state, as torch does now."""
        if isinstance(reading, TorchEpoch):
            if self._job.keeps_state and is_new:
                dataset: Any = self._dataset
                reading.primed(copy.deepcopy(dataset.state_dict()))
            return
        with self._pipeline.lock:
            inside = self._pipeline.begin()
            self._pool.start(self._job)
            self._pipeline.end(inside)
        task, reader = reading.task(reading.first), getattr(self._pool, "reader", None)
        if isinstance(task, Task) and isinstance(reader, StreamReader) and task.part is not None:
            reading.primed(task.part.number, reader.prime(task))
        elif self._unread == {0}:  # the state was taken behind the last batch, but the end was not seen
            of_dataset, _ = reading.at_beginning().points[0].state or (None, None)
            if of_dataset is not None:
                stream: Any = self._dataset
                stream.load_state_dict(copy.deepcopy(of_dataset))

    # -- batches --------------------------------------------------------------------------------------------

    def next(self) -> Any:
        """As in PyTorch before 1.13: ``next(iterator)``."""
        return self.__next__()

    def __next__(self) -> Any:
        # torch's notes each batch for a profiler, which takes 5 to 9 us, and warns of wrong lengths of iterable data.
        if self._is_stream or profiler_enabled():
            return super().__next__()
        data = self._next_data()
        self._num_yielded += 1
        return data

    def _next_data(self) -> Any:
        if self._shutdown:
            raise StopIteration
        try:
            data = next(self._inner)
        except StopIteration:
            self.place.finished = True
            if not self._persistent_workers:
                self._shutdown_workers()
            raise
        except (WorkerDiedError, WorkerTimeoutError) as error:
            raise in_torchs_words(error, self._timeout) from error
        self.place.yielded += 1
        if self._pin_memory and self._devices is None:
            data = _utils.pin_memory.pin_memory(data, self._pin_memory_device)  # type: ignore[no-untyped-call]
        return data

    # -- workers --------------------------------------------------------------------------------------------

    @property
    def _workers(self) -> list[Worker]:
        """The worker processes, as torch's iterator shows them. They are started now."""
        pool = self._pool
        if isinstance(pool, ProcessPool) and not self._shutdown:
            if not pool.started:
                with self._pipeline.lock:
                    inside = self._pipeline.begin()
                    pool.start(self._job)
                    self._pipeline.end(inside)
            self._processes = [Worker(handle) for handle in pool._transport.workers]
        return self._processes

    def _shutdown_workers(self) -> None:
        """End the workers. Safe to call twice."""
        if not self._shutdown:
            if self._pool.started:
                self._processes = self._workers
            self._shutdown = True
            self._pipeline.close()
            self._placement.closer()()
            for worker in self._processes:
                worker.let_go()

    def __len__(self) -> int:
        return len(self._index_sampler)


def _epoch_of(loader: Any, start: SamplerStart | None, state: dict[str, Any] | None, finished: bool) -> int:
    """The number of an epoch: of the sampler that shuffles, if it counts, so that ``set_epoch`` there is enough."""
    shuffle = None if start is None else start.shuffle
    if start is not None and shuffle is not None and shuffle.seed is not None:
        return int(start.state.get("shuffle", {}).get("epoch", shuffle.epoch))
    return int(loader._epochs.next if state is None or finished else state.get("_epoch", 0))


def _load_generator(generator: Any, state: dict[str, Any] | None) -> None:
    """Give the user's generator the state that it had."""
    if generator is not None and state is not None and "_generator" in state:
        set_generator(generator, state["_generator"])


def _drawn_before(loader: Any, start: SamplerStart | None, state: dict[str, Any] | None) -> int | None:
    """What the next epoch would have drawn when a state was taken at the end of an epoch; None: it draws now.

    The user's program decides if it has seeded, or used, the default generator since it has loaded the state.
    """
    seed = of_sampler = None
    if state is not None and "_next" in state and torch.equal(loader._rng_at_load, torch.get_rng_state()):
        seed, of_sampler = state["_next"]
    if start is not None and start.shuffle is not None:
        start.shuffle.expect(of_sampler)
    return seed


def _load_dataset(dataset: Any, state: dict[str, Any]) -> None:
    """Give a map-style dataset of this process the state from the end of an epoch.

    It may put the global generator back, so it comes before the next epoch draws its seed.
    """
    if not isinstance(dataset, IterableDataset) and is_stateful(dataset):
        for one in state["_sampler"].get("datasets", ())[-1:]:
            if one is not None:
                dataset.load_state_dict(copy.deepcopy(one))


def _start_of(loader: Any, state: dict[str, Any] | None) -> Any:
    """How the sampler is started; None for iterable data."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    finished = state is not None and bool(state["_iterator_finished"])
    found = None if state is None else state["_sampler"]
    return SamplerStart(loader._index_sampler, found, finished, loader._epochs)


def _close(close_pool: Any, close_placement: Any) -> None:
    close_pool()
    close_placement()


leave_alone(LoaderIterator.__next__)
