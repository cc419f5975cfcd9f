"""`DataLoader`: torch's own loader, with this library's engine inside.

    from sharded_loader.torch import DataLoader      instead of torch.utils.data's; nothing else changes

A subclass of torch's `DataLoader`, with the same arguments, checks and attributes. The iterator is new
(`sharded_loader.drop_in`): batches lie in reused shared memory, killed workers are replaced, errors name the sample,
and `state_dict` is exact. It owns the workers, so a loader can be pickled and copied before and between epochs.

Calls are passed on to `_reads`: a `TorchReading`, or a `ShardedDataLoader` if an argument asks for its order.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn

import numpy.typing as npt
import torch.utils.data
from torch.utils.data import BatchSampler, IterableDataset, IterDataPipe, MapDataPipe

from sharded_loader import Lease, LoaderWarning, OnError, ShardedDataLoader
from sharded_loader.drop_in import iterator as drop_in
from sharded_loader.drop_in.collate import batchify_fn_of
from sharded_loader.drop_in.iterator import LoaderIterator
from sharded_loader.drop_in.sampler import EpochCount, InOrderSampler, ShuffleSampler
from sharded_loader.drop_in.state import ADVICE, LoaderState, TorchProgress, TorchSteps
from sharded_loader.drop_in.trainers import rebuilt_by_accelerate, refuse_skipping
from sharded_loader.extend import NOTHING, Entry, ErrorAction, Pool, Task, reader_for
from sharded_loader.extend import engine as core
from sharded_loader.extend import order as orders
from sharded_loader.extend.data import as_dataset, describe_change, epoch_listeners, fingerprint_of
from sharded_loader.extend.engine import Batch
from sharded_loader.extend.tools import an, entries, exclude_from_compilation, refuse_arguments, uninterrupted, warn
from sharded_loader.instruments.auto import Tuner
from sharded_loader.instruments.report import Instruments
from sharded_loader.instruments.stats import Meter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["DataLoader"]

_TORCHS = torch.utils.data.DataLoader  # looked up once, because programs replace torch's class by this module's


SHARDED = (
    *("num_replicas", "rank", "mesh", "costs", "evaluate", "with_source", "steps_per_epoch"),
    *("global_batch", "micro_batch", "keep"),
)
"""Arguments of `ShardedDataLoader` that are incompatible with torch's order."""

_TORCHS_ARGUMENTS = tuple(inspect.signature(_TORCHS).parameters)
"""Before torch 2.6 without ``in_order``."""

_INSTEAD = {
    "max_skipped": core.INSTEAD["max_skipped"],
    "last_batch": 'write drop_last=True instead of "discard"',
    "batchify_fn": "write collate_fn= instead",
    "prefetch": "write prefetch_factor= instead, the number per worker",
    "pool": "write num_workers=, and start_method= or thread_pool=True, instead",
}
"""Arguments of `ShardedDataLoader` that have another name in torch, and the replacement."""


class DataLoader(Instruments, torch.utils.data.DataLoader[Batch]):
    """torch's ``DataLoader`` with this library's engine.

    Args:
        dataset: A map-style or an iterable dataset.
        batch_size, shuffle, sampler, batch_sampler: As in torch's ``DataLoader``.
        num_workers: Number of worker processes. ``"auto"``: 2 at first, then as many as training needs. Workers then
            seed the global generators for each batch, as with ``seed``, so the samples do not depend on the number.
            Iterable data keeps its 2 parts, and a map-style dataset with a ``state_dict`` its 2 workers.
        collate_fn, pin_memory, pin_memory_device, drop_last, worker_init_fn: As in torch's ``DataLoader``.
        multiprocessing_context, generator, persistent_workers, in_order: As in torch's ``DataLoader``.
        prefetch_factor: Number of batches to prefetch per worker. None: 2, and more while a batch takes less than 1 ms.
        timeout: Time limit for each sample, in seconds. 0: none.
        seed: Seed for the order of ``shuffle=True``, for `sample_rng`, and for the global generators, which workers
            seed for each batch: nothing depends on the number of workers. None: as in torch.
        on_error: ``"raise"``, ``"skip"``, ``"replace"``, ``"refill"``, a function or an `OnError`; see
            `ShardedDataLoader`.
        device: Device that the loader copies each batch to.
        devices, num_shards: Several devices, or the number of shards: each batch is a list; see `ShardedDataLoader`.
        start_method: Start method of worker processes; instead of ``multiprocessing_context``.
        thread_pool: Whether workers are threads instead of processes.
        restarts: Number of workers that a batch may kill before it is an error. None: 3, or 0 with ``timeout``.
        max_bytes, max_worker_memory: Limits of shared memory and of each worker process; see `ProcessPool`.
        streams: Number of parts of iterable data, or with ``keep`` of the order; see `ShardedDataLoader`. None: one per
            worker, as in torch.
        skip: Steps to leave out, as batches of the sampler, whose length must be known; see `ShardedDataLoader`.
        num_replicas, rank, mesh: Number of ranks, and this rank; see `ShardedDataLoader`. With one of these or the next
            seven arguments, or with ``on_error="refill"``, the loader reads as a `ShardedDataLoader` does: its order,
            states, `rescale` and `set_weights`, and workers that live as long as the loader, whatever
            ``persistent_workers`` says. ``generator`` and ``in_order=False`` are then errors.
        costs, evaluate, with_source, steps_per_epoch, micro_batch, keep: As in `ShardedDataLoader`.
        global_batch: As in `ShardedDataLoader`. ``batch_size`` stays 1, torch's default, and is None afterwards.
        snapshot_every_n_steps: Argument of torchdata's ``StatefulDataLoader``, without effect: states are always exact.

    Attributes:
        skip: Steps to leave out: from the argument, and from a loaded state.

    Raises:
        ValueError, TypeError: As torch's constructor. Unknown arguments are a TypeError that names all of them.

    Example:
        >>> loader = DataLoader(range(10), batch_size=4)
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]

    Source of the idea: ``torch.utils.data.DataLoader``, and ``StatefulDataLoader`` of torchdata.
    """

    _sharded: ShardedDataLoader[Batch] | tuple[int, Any] | None = None  # until it is created: its epoch, and changes
    _given_order: dict[str, Any]  # `shuffle`, `sampler` and `batch_sampler`, if the order is not torch's
    skip: Sequence[tuple[int, int]] = ()  # torchdata's subclass has a constructor that calls no other
    thread_pool = False

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Sequence[Any]] | None = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        seed: int | None = None,
        on_error: ErrorAction | OnError = "raise",
        device: Any = None,
        devices: Any = None,
        num_shards: int | None = None,
        start_method: Literal["fork", "forkserver", "spawn"] | None = None,
        thread_pool: bool = False,
        restarts: int | None = None,
        max_bytes: int | str | None = None,
        max_worker_memory: int | str | None = None,
        streams: int | None = None,
        skip: Sequence[tuple[int, int]] | None = None,
        num_replicas: int | Literal["auto"] | DeviceMesh | None = None,
        rank: int | None = None,
        mesh: DeviceMesh | None = None,
        costs: Sequence[Any] | npt.NDArray[Any] | Mapping[str, Any] | Callable[[int], Any] | None = None,
        evaluate: bool = False,
        with_source: bool = False,
        steps_per_epoch: int | None = None,
        global_batch: int | None = None,
        micro_batch: int | None = None,
        keep: Callable[[Any], Any] | None = None,
        snapshot_every_n_steps: int = 1,
        **unknown: NoReturn,
    ) -> None:
        given = dict(locals())
        refuse_arguments("DataLoader", unknown, type(self).__init__, _INSTEAD)
        if not hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset):  # an array with a shape
            dataset = as_dataset(dataset, "DataLoader", needs_length=sampler is None and batch_sampler is None)
        is_auto, workers = core.number_of_workers(num_workers)
        self.num_replicas, self.rank, self.mesh = num_replicas, rank, mesh
        self.costs, self.evaluate, self.steps_per_epoch = costs, evaluate, steps_per_epoch
        self.global_batch, self.micro_batch, self.keep = global_batch, micro_batch, keep
        self.with_source = with_source
        # As attributes, because libraries rebuild loaders.
        self.seed, self.on_error, self.in_order, self.streams = seed, on_error, in_order, streams
        self.device, self.devices, self.num_shards, self.thread_pool = device, devices, num_shards, thread_pool
        self.start_method, self.restarts, self.max_bytes = start_method, restarts, max_bytes
        self.max_worker_memory, self.snapshot_every_n_steps = max_worker_memory, snapshot_every_n_steps
        self._meter = Meter(dataset, core.action_and_limit(on_error)[1])
        self._tuner = Tuner(self._meter) if is_auto else None  # finds the number of workers
        refills = core.action_and_limit(on_error)[0] == "refill"
        if refills or any(given[name] is not None and given[name] is not False for name in SHARDED):
            self._sharded = 0, ()
            self._given_order = {"shuffle": shuffle or False, "sampler": sampler, "batch_sampler": batch_sampler}
        self._scales_prefetch = prefetch_factor is None
        self._progress = TorchProgress(EpochCount(), orders.check_skip(skip))
        self._progress.requests.listen(epoch_listeners(dataset, but=self) if persistent_workers else [])
        self.skip = list(self._progress.given_skip)
        self._memory = drop_in.DeviceMemory()
        if shuffle and not isinstance(dataset, IterableDataset):
            core.length(dataset, needed=True)
        is_ours = sampler is None and batch_sampler is None and self._sharded is None
        if is_ours and not isinstance(dataset, IterableDataset):
            # torch does not keep `shuffle`: a sampler takes its place.
            if shuffle:
                sampler, shuffle = ShuffleSampler(dataset, generator, seed), None
            elif seed is not None:
                sampler = InOrderSampler(dataset)
        given |= {"dataset": dataset, "num_workers": workers, "shuffle": shuffle, "sampler": sampler}
        super().__init__(**{name: given[name] for name in _TORCHS_ARGUMENTS if name in given})
        drop_in.check_arguments(self)
        if isinstance(self._reads, ShardedDataLoader):
            return
        TorchReading(self).check_skip(self._progress.given_skip)
        made: Any = self.batch_sampler if batch_sampler is None else None
        if isinstance(made, BatchSampler) and hasattr(self.sampler, "set_epoch"):
            # transformers and Accelerate wrap the batch sampler and call it there. The class stays torch's own, which
            # Lightning can rebuild.
            made.set_epoch = self.sampler.set_epoch  # type: ignore[attr-defined]

    def check_worker_number_rationality(self) -> None:
        """Warn of more worker processes than cores, as torch does. More threads than cores are no mistake."""
        if not drop_in.uses_threads(self):
            super().check_worker_number_rationality()

    def _get_iterator(self) -> Any:
        if isinstance(self.dataset, IterDataPipe | MapDataPipe):
            return super()._get_iterator()  # datapipes are bound to torch's own workers
        if self.num_workers and self._tuner is None:
            self.check_worker_number_rationality()
        if not isinstance(self.dataset, IterableDataset):
            text = orders.text_if_ranks_repeat(orders.nested(self._index_sampler))
            if text is not None:
                self._meter.notices.record("ranks", f"{text}give sampler=DistributedSampler(dataset) to share it out")
        state = self._progress.state_to_begin(self._index_sampler)
        iterator = LoaderIterator(self, state)
        if state is not None and self._progress.is_of_fabric:
            orders.announce_epoch(self._index_sampler, state.epoch_to_begin)
        return iterator

    @property
    def _reads(self) -> ShardedDataLoader[Batch] | TorchReading[Batch]:
        """Object that reads: in torch's order, or in that of `ShardedDataLoader`. Each copy of a loader has its own."""
        if self._sharded is None:
            return TorchReading(self)
        if isinstance(self._sharded, tuple):
            (epoch, grown), self._sharded = self._sharded, make_sharded(self)
            if grown:  # `grow` and `without` of the loader that this one is a copy of
                order: Any = self._sharded._order
                order.sampling.grown = grown
                order.resize(order.dataset_length)
            self._sharded.set_epoch(epoch)
            self._show_sharded(self._sharded)
        return self._sharded

    def _show_sharded(self, inner: ShardedDataLoader[Batch]) -> None:
        self._meter, self.skip = inner._meter, inner.skip
        vars(self)["batch_size"] = inner.batch_size
        if not isinstance(self.dataset, IterableDataset):  # torch's class forbids setting these attributes
            vars(self).update(sampler=inner.sampler, batch_sampler=inner.batch_sampler)

    def __iter__(self) -> Iterator[Batch]:  # type: ignore[override]  # the base class has no batch type
        reads = self._reads
        if isinstance(reads, ShardedDataLoader):
            return iter(reads)
        promised = reads.promised()
        return super().__iter__() if promised is None else promised

    @_TORCHS.multiprocessing_context.getter  # type: ignore[attr-defined, untyped-decorator]
    def multiprocessing_context(self) -> Any:
        """As torch's, with its setter. Accelerate reads it when it builds torch's loader from this one."""
        if isinstance(self.dataset, IterableDataset):
            refuse_skipping(self)
        return super().multiprocessing_context

    @property
    def _is_accelerate_prepared(self) -> bool:
        """False. Accelerate reads it before it builds torch's loader from this one."""
        if rebuilt_by_accelerate("prepare_data_loader"):
            warnings.warn(
                "accelerator.prepare() makes a PyTorch DataLoader of this loader, so crashed workers end the program "
                "and seed= has no effect. Call prepare(loader, accelerator) of sharded_loader.integrations.accelerate",
                LoaderWarning,
                stacklevel=6,
            )
        return False

    @property
    def ready_event(self) -> Any:
        """Event recorded when the last returned batch of any iterator is ready; see `ShardedDataLoader.ready_event`.

        Example:
            >>> loader = DataLoader(range(4), batch_size=2)
            >>> batch = next(iter(loader))
            >>> loader.ready_event is None  # in host memory
            True
        """
        return self._reads.ready_event

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` begin ``epoch``, also for the samplers and the dataset.

        Without ``seed``, ``shuffle=True`` has torch's order in every epoch, whatever its number. After a state was
        loaded, the next ``iter()`` begins in the state's epoch, unless the state is of that epoch's last batch and a
        sampler was given another epoch since.

        Example:
            >>> loader = DataLoader(range(6), batch_size=3, shuffle=True, seed=1)
            >>> first, second = ([batch.tolist() for batch in loader] for _ in range(2))
            >>> loader.set_epoch(1)
            >>> [batch.tolist() for batch in loader] == second
            True
        """
        self._reads.set_epoch(epoch)

    def read(self, index: Any, epoch: int = 0) -> Any:
        """Return one sample, read in this process with its random generator, for instance under a debugger.

        Args:
            index: Index as the sampler yields it; for iterable data, (part, position), as in errors.
            epoch: Number of the epoch, as in errors.

        Raises:
            RuntimeError: Iterable data has no parts before an epoch has begun.
            Exception: Any error of the dataset.

        Example:
            >>> DataLoader([10, 20, 30], batch_size=2).read(1)
            20
        """
        return self._reads.read(index, epoch)

    def indices(self, epoch: int, step: int) -> list[Any]:
        """Return the indices of the samples of a past or future step; see `ShardedDataLoader.indices`.

        Steps are known with ``seed=``, without shuffling, and with samplers whose order follows from
        ``set_epoch(epoch)`` alone, if you name the epochs with ``loader.set_epoch``.

        Args:
            epoch: As counted by the loader, from 0, or as named by ``set_epoch``.
            step: Number of the sampler's batch in the epoch, from 0, as in errors.

        Returns:
            A list of indices; for a mixture (`interleave`), pairs (number of the dataset, index in it).

        Raises:
            IndexError, ValueError: The epoch has no such step, or it is unknown; the error says why.
            TypeError: The dataset is iterable data. The error says which part of the data the step comes from.

        Example:
            >>> loader = DataLoader(range(10), batch_size=4, shuffle=True, seed=1)
            >>> batches = [batch.tolist() for batch in loader]
            >>> batches[1] == loader.indices(epoch=0, step=1)
            True
        """
        return self._reads.indices(epoch, step)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a past or future step, read in this process: starts no worker, changes no epoch.

        With ``seed=`` it equals the batch of the iteration (see `ShardedDataLoader.batch`); without, its random numbers
        come from the newest epoch's seed. Without ``device``, it is not in pinned memory.

        Raises:
            Exception: As `indices`, and any error of the samples, subject to ``on_error``.

        Example:
            >>> DataLoader(range(10), batch_size=4).batch(epoch=2, step=1)
            tensor([4, 5, 6, 7])
        """
        return self._reads.batch(epoch, step)

    def _replicas(self) -> tuple[int, int]:
        reads = self._reads
        return reads._replicas() if isinstance(reads, ShardedDataLoader) else super()._replicas()

    def _inspected(self) -> tuple[core.KnownSteps, int, Pool]:
        return self._reads._inspected()

    def __len__(self) -> int:
        """Return the number of batches in the epoch, without those of ``skip``; a TypeError for several parts of
        iterable data.
        """
        return len(self._reads)

    def _given(self) -> Mapping[str, Any]:
        kept, usual = vars(self), inspect.signature(DataLoader.__init__).parameters.items()
        return {name: kept[name] for name, one in usual if name in kept and kept[name] is not one.default}

    # -- state ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the newest iterator, in the form of torchdata's ``StatefulDataLoader``.

        Returns:
            A dict of numbers, strings and lists, with the states of a dataset and a sampler that have a ``state_dict``.

        Example:
            >>> loader = DataLoader(range(6), batch_size=2)
            >>> first, state = next(iter(loader)), loader.state_dict()
            >>> other = DataLoader(range(6), batch_size=2, num_workers=2)
            >>> other.load_state_dict(state)
            >>> [batch.tolist() for batch in other]
            [[2, 3], [4, 5]]
        """
        return self._reads.state_dict()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], skip: Sequence[tuple[int, int]] | None = None, strict: bool = True
    ) -> None:
        """Make the next ``iter()`` continue where `state_dict` was called, with any number of workers.

        Args:
            state_dict: Result of `state_dict`.
            skip: Steps to leave out, in addition to those of the loader and of the state.
            strict: As in `ShardedDataLoader.load_state_dict`; False needs its order.

        Raises:
            TypeError, ValueError: The argument is not a state of such a loader.
        """
        reads = self._reads if strict else need_sharded(self._reads, "strict=False")
        try:
            reads.load_state_dict(state_dict, strict, skip)
        finally:  # a Ctrl-C may take effect behind the load
            if isinstance(reads, ShardedDataLoader):
                self._show_sharded(reads)

    # -- the order of `ShardedDataLoader` -------------------------------------------------------------------

    def rescale(self, num_replicas: int, rank: int, batch_size: int | None = None) -> None:
        """Continue as rank ``rank`` of ``num_replicas`` from the next batch on; see `ShardedDataLoader.rescale`.

        ``batch_size`` is that of each rank; None: as before.

        Raises:
            TypeError: The loader was made without ``num_replicas`` and the arguments described with it.
            TypeError, ValueError, RuntimeError: As `ShardedDataLoader.rescale`.

        Example:
            >>> loader = DataLoader(range(8), 2, num_replicas=2, rank=0)
            >>> batches = iter(loader)
            >>> next(batches)
            tensor([0, 2])
            >>> loader.rescale(1, 0, batch_size=4)
            >>> list(batches)
            [tensor([4, 5, 6, 7])]
        """
        inner, order = need_sharded(self._reads, "rescale"), self._given_order
        with uninterrupted():
            inner.rescale(num_replicas, rank, batch_size)
            vars(self).update(num_replicas=num_replicas, rank=rank, mesh=None)
            if order["batch_sampler"] is not None:
                self._given_order = {**order, "batch_sampler": inner.batch_sampler}
            self._show_sharded(inner)

    @property
    def share(self) -> float:
        """With ``global_batch``, the factor for the loss of the last batch; see `ShardedDataLoader.share`.

        Raises:
            TypeError: As `rescale`.

        Example:
            >>> loader = DataLoader(range(8), global_batch=5, num_replicas=2, rank=0)
            >>> for batch in loader:
            ...     print(batch, loader.share)
            tensor([0, 2, 4]) 1.2
            tensor([6]) 0.6666666666666666
        """
        return need_sharded(self._reads, "share").share

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Change the weights of the datasets in `interleave`; see `ShardedDataLoader.set_weights`.

        Raises:
            TypeError, ValueError, RuntimeError: As `rescale`, and as `ShardedDataLoader.set_weights`.

        Example:
            >>> from sharded_loader import interleave
            >>> mixed = interleave([["a"] * 9, ["b"] * 9], stop=12, shuffle=True)
            >>> loader = DataLoader(mixed, batch_size=4, num_replicas=1)
            >>> loader.set_weights([0, 1])
            >>> next(iter(loader))
            ['b', 'b', 'b', 'b']
        """
        need_sharded(self._reads, "set_weights").set_weights(weights)

    def lease(self) -> Lease[Batch] | None:
        """Return the next batch as a `Lease`, which is finished in any order; see `ShardedDataLoader.lease`.

        Raises:
            TypeError, ValueError, RuntimeError: As `rescale`, and as `ShardedDataLoader.lease`.

        Example:
            >>> loader = DataLoader(range(4), batch_size=2, num_replicas=1)
            >>> loader.lease().batch
            tensor([0, 1])
        """
        return need_sharded(self._reads, "lease").lease()

    def grow(self, dataset: Any = None) -> None:
        """Take in samples that were appended to the dataset; see `ShardedDataLoader.grow`.

        Raises:
            TypeError, ValueError, RuntimeError: As `rescale`, and as `ShardedDataLoader.grow`.
        """
        inner = need_sharded(self._reads, "grow")
        try:
            inner.grow(dataset)
        finally:  # a Ctrl-C may take effect behind it
            vars(self)["dataset"] = inner.dataset
            self._show_sharded(inner)

    def without(self, indices: Iterable[int]) -> None:
        """Leave out the samples ``indices`` from the next batch on; see `ShardedDataLoader.without`.

        Raises:
            TypeError, ValueError, IndexError, RuntimeError: As `rescale`, and as `ShardedDataLoader.without`.
        """
        need_sharded(self._reads, "without").without(indices)

    def refresh(self) -> None:
        """Send the dataset, which has changed, to the workers before the next epoch; see `ShardedDataLoader.refresh`.

        Raises:
            TypeError: As `rescale`; in torch's order, only ``persistent_workers`` have an old copy.

        Example:
            >>> data = [1, 2]
            >>> loader = DataLoader(data, 2, num_replicas=1)
            >>> data.append(3)
            >>> loader.refresh()
            >>> len(loader)
            2
        """
        inner = need_sharded(self._reads, "refresh")
        inner.refresh()
        self._show_sharded(inner)

    # -- copies ---------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        """Return the arguments, without workers and positions."""
        if "_meter" not in self.__dict__:  # made by ``__new__`` alone
            return self.__dict__
        meter = Meter(self.dataset, core.action_and_limit(self.on_error)[1])
        own: dict[str, Any] = {"_meter": meter, "_memory": drop_in.DeviceMemory(), "_iterator": None}
        own |= {"_tuner": self._tuner and Tuner(meter), "_progress": copy.copy(self._progress)}
        if isinstance(reads := self._reads, ShardedDataLoader):
            grown = getattr(getattr(reads._order, "sampling", None), "grown", ())
            own |= {"_sharded": (reads.epoch, grown), "seed": reads.seed}
        return {**self.__dict__, **own}


exclude_from_compilation(DataLoader.__iter__)


# -- torch's order -----------------------------------------------------------------------------------------------------


class TorchReading(TorchSteps, Generic[Batch]):
    """Methods of `ShardedDataLoader` in torch's order. Created per call: a reference cycle would delay the loader's
    end.
    """

    def check_skip(self, skip: Any) -> None:
        if skip and isinstance(self._loader.dataset, IterableDataset | IterDataPipe | MapDataPipe):
            raise TypeError(core.NO_SKIP)
        try:
            self._loader._progress.steps.within(skip, 1, self.length)
        except TypeError as error:
            raise ValueError(f"skip counts the steps of all epochs: {error}") from error

    def promised(self) -> LoaderIterator | None:
        """Return the iterator of the epoch whose state was taken, or None; then stale persistent workers end."""
        iterator, promised = self._loader._iterator, self._loader._progress.promised()
        if promised is None and isinstance(iterator, LoaderIterator) and iterator.is_stale(self._loader):
            self._end_persistent_workers()
        return promised

    def _end_persistent_workers(self) -> None:
        if isinstance(self._loader._iterator, LoaderIterator):
            self._loader._iterator.end(self._loader)
            self._loader._iterator = None

    @property
    def ready_event(self) -> Any:
        return self._loader._memory.ready_event()

    def set_epoch(self, epoch: int) -> None:
        loader = self._loader
        listeners = [*epoch_listeners(loader.dataset, nearest=True, but=loader)]
        with uninterrupted():  # halfway, the dataset would be in another epoch than the sampler
            loader._progress.set_epoch(epoch)
            orders.announce_epoch(loader._index_sampler, epoch)
            for one in listeners:
                one.set_epoch(epoch)

    def read(self, index: Any, epoch: int) -> Any:
        if self._loader._progress.current_run is None and isinstance(self._loader.dataset, IterableDataset):
            raise RuntimeError("there are no parts before an epoch has begun: call next(iter(loader)) first")
        return reader_for(self.job, readers=0).read_sample(index, epoch)

    def indices(self, epoch: int, step: int) -> list[Any]:
        return core.shown_indices(self.dataset, self.samples_of(epoch, step), epoch)

    def batch(self, epoch: int, step: int) -> Batch:
        loader = self._loader
        devices, sharded = core.find_devices(loader.device, loader.devices)
        placement = drop_in.as_collated(None) if devices is None else loader._memory.placement(devices)
        placement.check_not_capturing()
        job, split = replace(self.job, keeps_state=False), core.make_split(devices, sharded, loader.num_shards)
        task = split.sharded(Task(0, step, epoch, step, (self.samples_of(epoch, step),), False))
        with self.in_epoch(epoch), core.seeded_as_worker(job.seed, task):
            result = reader_for(job, readers=0).read(task)
            if result.error is not None:
                raise result.error
            if result.batch is NOTHING:
                raise ValueError(f"epoch {epoch}, batch {step} was left out: on_error has skipped all of its samples")
            return placement.place([Entry(step, task, result)])  # type: ignore[no-any-return]

    def _inspected(self) -> tuple[core.KnownSteps, int, Pool]:
        return self, self._loader._progress.epoch, drop_in.make_pool(self._loader)

    def __len__(self) -> int:
        loader, parts = self._loader, self.parts
        if parts > 1 and (loader.batch_size or 1) > 1:
            text = f"the loader has no length: {an(type(loader.dataset).__name__)} decides how many samples"
            raise TypeError(f"{text} each of its {parts} parts has. Give streams=1, or steps_per_epoch=")
        whole = _TORCHS.__len__(loader)
        left_out = self.left_out(loader._progress.epoch) if loader.skip else ()
        return whole - sum(len(range(whole)[one.start : one.stop]) for one in left_out)

    def state_dict(self) -> dict[str, Any]:
        loader, progress = self._loader, self._loader._progress
        if progress.pending is not None:
            state = copy.deepcopy(progress.pending)
        elif isinstance(loader.dataset, IterDataPipe | MapDataPipe):
            raise TypeError("datapipes are read by torch's own workers, which have no state_dict()")
        else:
            if (run := progress.known_run(loader)) is None:
                _TORCHS.__iter__(loader)  # fixes the epoch now, so that the state is that of the coming epoch
                run = progress.known_run(loader)
                assert run is not None  # the iterator waits
            state, progress.data = run.state_dict(loader), progress.data or fingerprint_of(loader.dataset)
            if progress.data is not None:
                state["_data"] = progress.data
        state["_version"] = entries.VERSION
        return {**state, "_skip": list(map(list, loader.skip))} if loader.skip else state

    def load_state_dict(self, state_dict: Any, strict: bool, skip: Any) -> None:
        """Load a state; ``strict`` is True, because only the order of `ShardedDataLoader` takes others."""
        loader, progress, advice = self._loader, self._loader._progress, ADVICE
        if not isinstance(state_dict, Mapping):
            raise TypeError(f"the state is {an(type(state_dict))}; give what state_dict() has returned")
        numbered = {"version": state_dict.get("_version", 1), "epoch": state_dict.get("_epoch")}
        entries.check_version(numbered, advice)
        kind = "_stream" if isinstance(loader.dataset, IterableDataset) else "_sampler"
        state = entries.from_state(LoaderState, state_dict, advice)
        entries.read_entry(state_dict, kind, entries.instance(Mapping, "a dict"), advice)
        state.check_length(core.length(loader.dataset), loader.sampler)
        given = orders.merged(progress.given_skip, orders.check_skip(skip))
        saved = entries.read_entry({"_skip": (), **state_dict}, "_skip", orders.steps_to_skip, advice)
        self.check_skip(given)
        if given and state.sampler is not None:
            before = progress.steps.before(state.epoch or 0, self.length)
            orders.warn_of_done_steps(given, saved, before + state.sampler.yielded)
        if change := describe_change(state_dict.get("_data"), fingerprint_of(loader.dataset)):
            warn(
                f"the state was saved with other data: {change}. The loader continues at this position in its own "
                f"data. Load the original data. If you mean the change, ignore this LoaderWarning"
            )
        copied, listeners = copy.deepcopy(dict(state_dict)), list[Any]()
        if state.epoch_of_dataset is not None:
            listeners = [*epoch_listeners(loader.dataset, nearest=True, but=loader)]
        with uninterrupted():  # halfway, an epoch would begin elsewhere
            progress.given_skip, loader.skip = given, list(orders.merged(given, saved))
            # A later `set_epoch` decides, as at the end of an epoch.
            progress.load(copied, state.epoch_to_begin)
            for one in filter(orders.has_weights, orders.nested(loader._index_sampler)):
                one.adopt((state.sampler and state.sampler.weights) or {})
            sampler, shuffle = loader.sampler, state.sampler and state.sampler.shuffle
            if isinstance(sampler, ShuffleSampler):
                sampler.is_named, sampler.seed = False, (shuffle or {}).get("seed", sampler.seed)
            for one in listeners:
                one.set_epoch(state.epoch_of_dataset)
            self._end_persistent_workers()  # their datasets and generators are out of date


# -- the order of `ShardedDataLoader` ----------------------------------------------------------------------------------

KEPT = ("pin_memory", "drop_last", "device", "devices", "num_shards", "seed", "on_error", "streams")


def need_sharded(reads: object, method: str) -> ShardedDataLoader[Any]:
    """Return the `ShardedDataLoader` that reads for a loader, or raise a TypeError."""
    if not isinstance(reads, ShardedDataLoader):
        raise TypeError(f"{method} needs the order of ShardedDataLoader, and this is torch's: give num_replicas=1")
    return reads


def make_sharded(loader: DataLoader[Any]) -> ShardedDataLoader[Any]:
    """Return the `ShardedDataLoader` that reads for a drop-in, with the same arguments."""
    is_ours = loader._given_order["batch_sampler"] is None and (loader.global_batch is None or loader.batch_size != 1)
    batch_size = loader.batch_size if is_ours else None
    wrong = {"generator": loader.generator is not None, "in_order": not loader.in_order}
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        text = f"{name} goes with torch's order; {', '.join(SHARDED)} and on_error='refill' have another"
        raise ValueError(f"{text}: {core.INSTEAD[name]}")
    if batch_size is None and loader._given_order["batch_sampler"] is None and loader.global_batch is None:
        raise ValueError("batch_size=None gives single samples, and this order is one of batches: give a batch_size")
    options = {name: getattr(loader, name) for name in (*SHARDED, *KEPT)} | loader._given_order
    return ShardedDataLoader(
        loader.dataset,
        batch_size=batch_size,
        collate_fn=batchify_fn_of(loader.collate_fn, batched=True),
        num_workers=0 if loader._tuner is None else "auto",
        pool=drop_in.make_pool(loader),
        prefetch_factor=None if loader._scales_prefetch else loader.prefetch_factor,
        skip=loader._progress.given_skip or None,
        **options,
    )
