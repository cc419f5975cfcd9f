"""`ShardedDataLoader`: creates the parts of a loader from its arguments, and shows their attributes and the position.

    dataset, sampling arguments  -> MapOrder   samples and their order            (sampling/)
    num_workers, pool            -> Pool       workers that read them             (pools/)
    devices, pin_memory          -> Placement  destination of the batches         (devices/)
    pool                         -> Pipeline   batches in flight                  (engine/)
    all of them                  -> Epochs     begins an epoch for an iterator

The loader owns the pipeline, which owns the pool and its workers. Iterators hold the loader, but the loader holds no
iterator, so a temporary loader is closed when the loop over it ends. Many attributes have the names that other
libraries look for. Anything that decides the samples or their order is read-only.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import multiprocessing
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, ParamSpec

import numpy.typing as npt
import torch

from sharded_loader.base.imports import provided
from sharded_loader.base.interrupts import call_all, uninterrupted
from sharded_loader.base.limits import warn_of_workers
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.data.bulk import Indexed
from sharded_loader.data.datasets import Mixture, nested
from sharded_loader.data.inspection import is_stream
from sharded_loader.devices.names import DeviceLike, find_devices
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import ErrorAction, Job
from sharded_loader.engine.pipeline import PER_WORKER, Pipeline
from sharded_loader.engine.pool import Pool
from sharded_loader.loader import arguments
from sharded_loader.loader.arguments import Batch, OnError, OtherNames, Placement
from sharded_loader.loader.epochs import At, Epochs
from sharded_loader.loader.iterator import EpochIterator
from sharded_loader.loader.lookup import LookUp
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.own import takes_order
from sharded_loader.streams.order import StreamOrder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack

    from sharded_loader.instruments.report import Instruments
    from sharded_loader.leases import Leasing
else:
    Instruments, Leasing = provided("methods", "instruments"), provided("methods", "leases")

Given = ParamSpec("Given")

NO_WEIGHTS = (
    "set_weights needs what interleave() returned for datasets that are read by index, or a transform of it, as the "
    "dataset of a loader without a sampler and without shuffle=True. Make it with interleave(..., shuffle=True), or "
    "with a schedule, weights=[(0, [...])]. Iterable data can only have a schedule that is given from the start. For a "
    "WeightedRandomSampler, call its update()"
)


def _context(loader: Any) -> Any:
    if isinstance(loader._order, StreamOrder):
        provided("trainer", "skipping")(loader)
    method = getattr(loader._workers, "start_method", None)
    return None if method is None else multiprocessing.get_context(method)


shown: Any = property
"""Read-only attribute of a loader, defined by a function of the loader."""


def keeps_arguments(init: Callable[Given, None]) -> Callable[Given, None]:
    """Wrap a loader's constructor so that it records its arguments; see `ShardedDataLoader.arguments`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def keep(*args: Given.args, **named: Given.kwargs) -> None:
        init(*args, **named)
        given = signature.bind(*args, **named).arguments
        loader, names = given.pop("self"), given.pop("names", {})
        loader._arguments = MappingProxyType({**given, **names})

    return keep


class ShardedDataLoader(Instruments, Leasing[Batch], Generic[Batch]):
    """Batches of a dataset, in order, split over devices, prefetched by workers.

    For type checkers, ``ShardedDataLoader[Batch]`` or ``collate_fn`` determines the type of a batch.

    Args: Common
        dataset: Anything with ``__getitem__`` and ``__len__``: a list, a NumPy array, a torch or Hugging Face dataset,
            a `Dataset`. ``get_batch`` or ``__getitems__`` is used to read in bulk. Or iterable data: an object that
            only has ``__iter__``, or a function that returns an iterable.
        batch_size: Number of samples per step of this process, in all its shards together. See ``global_batch``.
        shuffle: Whether every epoch has a new random order.
        batchify_fn: The collate function: list of samples -> batch. Default: `default_batchify_fn`.
        num_workers: Number of worker processes (threads with ``thread_pool``). 0 or less: the main process reads.
            ``"auto"``: 2 at first, then as many as training needs, with the same batches, states and errors.
        device: Device of the batches, or a `Placement` with more options. ``"cuda"`` is the current device, whatever
            LOCAL_RANK says: call ``torch.cuda.set_device`` first, or give ``"cuda:1"``.
        devices: List of devices, ``"auto"`` for all accelerators, or a `Placement` of either. Each batch is a list of
            shards, shard i on device i.
        num_replicas: Number of processes (ranks) that divide the samples; ``batch_size`` is per rank. ``"auto"``: ask
            torch.distributed, otherwise WORLD_SIZE and RANK. All ranks read equally many samples: if necessary, the
            first ones come again at the end of the epoch (an evaluation counts them twice), or with
            ``last_batch="discard"`` the last ones are left out. Or, without ``rank``, a
            `torch.distributed.device_mesh.DeviceMesh` or one dimension of it: its data-parallel dimensions (``"dp"``,
            ``"dp_replicate"``, ``"fsdp"``, ...) are ranks. Processes that differ in other dimensions (``"tp"``,
            ``"cp"``, ``"pp"``) get equal batches.
        seed: Seed of everything random. None: drawn from torch's default generator; with ``num_replicas``, 0.
        on_error: Treatment of a sample that raises an error: ``"raise"`` it, ``"skip"`` the sample, ``"replace"`` it by
            another sample of the batch, or ``"refill"`` the batch with the next sample (see ``keep``). Or a function
            ``(SampleError) -> sample``. `OnError` sets a limit. A batch or shard without samples is left out with a
            warning, and later shards move up. With ``num_replicas`` it is an error, because ranks must stay in step. A
            sample that ends or hangs its worker always raises `WorkerDiedError` or `WorkerTimeoutError`.

    Args: Data
        streams: Number of parts that iterable data is divided into; batches come from them in turn. A part sees its
            number as ``get_worker_info().id`` and the number of parts as ``num_workers``; a function may take both as
            arguments. The order depends on ``streams``, not on the workers. Default: the dataset's ``num_shards``, up
            to 32; otherwise one part per worker of each rank.

    Args: Order
        sampler: Order of the samples: any sampler of this library or torch, or an iterable of indices.
        batch_sampler: Sampler that yields lists of indices, or lists of such lists, which are shards. Excludes
            ``batch_size``, ``shuffle``, ``sampler`` and ``last_batch``.
        last_batch: Treatment of an incomplete last batch: ``"keep"`` it (default), ``"discard"`` it, or ``"rollover"``:
            move its samples to the next epoch.
        steps_per_epoch: Number of batches of every epoch on every rank. Samplers and parts that end start over, and no
            batch is short. The next epoch continues where the last one ended.
        rank: Number of this process, from 0. ``num_replicas="auto"`` finds it.
        costs: Cost of each sample, such as its length: an array, or a function of the index. The order is random, and
            in each step all ranks get samples of nearly the same total cost. Which samples a step has does not depend
            on the number of ranks, if all ranks together read as many. Several costs are an array of shape (samples,
            columns), a dict of arrays, or a function that returns a tuple: ranks are then nearly equal in each column.
            A sample may cost 0 in some columns, such as a text without pictures.
        evaluate: Whether iteration gives ``(batch, real)``, for an evaluation that counts each sample once. All ranks
            take equally many steps of ``batch_size`` samples. The first ``real`` samples of a batch count (perhaps 0);
            the others are padding at the end of the epoch.
        with_source: Whether iteration gives pairs: what it gives without it, and the `SampleSource` of the samples,
            which stays in host memory.
        skip: Steps to leave out, for instance after a loss spike: a list of pairs (first, last), last included. Steps
            count from the beginning of epoch 0, with the ranks and batch size of this loader. All other batches stay
            the same, and ``len(loader)`` gets smaller. States include them, and `load_state_dict` accepts more. Not for
            iterable data.

    Args: Workers
        thread_pool: Whether workers are threads instead of processes.
        pool: ``"thread"``, ``"process"``, ``"ray"``, ``"inline"`` (the main process, whatever ``num_workers`` says), or
            a pool object.
        prefetch: Number of batches to prefetch. Default: ``2 * num_workers``; more if a batch takes < 1 ms, and with
            ``num_workers="auto"`` while training waits for single slow samples.

    Args: Devices
        num_shards: Number of shards to split each batch into, in host memory.
        pin_memory: Whether batches are in pinned host memory. Only without devices, which use pinned memory anyway.
        **names: Other names: torch's ``collate_fn`` (``batchify_fn``), ``drop_last`` (``last_batch="discard"``),
            ``prefetch_factor`` (k is ``prefetch=k * num_workers``), and ``mesh`` (``num_replicas``). In the place of
            ``batch_size``, ``global_batch``: the number of samples in a step of all ranks. Each rank has a share, of
            sizes that differ by at most one; multiply the mean loss by `share`. Steps and states are the same on any
            number of ranks, up to ``global_batch``. A last step of fewer samples than ranks has copies, with a share of
            0. True with a ``batch_sampler``, whose batches (or rows) are then those of all ranks. ``micro_batch``: the
            maximum number of samples in a micro-batch. Each batch is a list of micro-batches on one device, as many on
            all ranks (with ``micro_batch=1``, a share that is one sample smaller has one less). Options of the
            pool: ``worker_init_fn``, called by each worker process when it gets the dataset, and by each thread when it
            starts, and ``timeout``, the seconds before a stalled worker is an error. ``persistent_workers`` has no
            effect: workers live as long as the loader. ``keep``, a function of a sample, read by index: if it returns
            False, the next sample of the order takes the place, so that batches stay full. The order is then read in
            parts, without an end: of each ``streams`` positions, a part has one, and a state has one number per part.
            ``steps_per_epoch`` is by default the number of full batches that the order has without ``keep``.

    Attributes:
        arguments: Arguments of the loader, by name, to create another one like it. Read-only.
        prefetch: Number of batches to prefetch. May be set while you iterate, like the attributes below.
        prefetch_epochs: Whether workers read the first batches of the next epoch while you consume the last ones. They
            are dropped if you ask for another epoch or call `refresh`. Only samplers of this library are read early.
            True with processes; threads share the dataset and the global random generators with you.
        device_prefetch: Number of batches copied to accelerators in advance (2).
        shard_weights: Relative sizes of the shards; None: equal.

    Raises:
        ValueError, TypeError: Arguments are wrong or contradict each other.

    A short last batch has fewer shards, never an empty one. Attributes not listed here are read-only.

    Example:
        >>> loader = ShardedDataLoader(range(10), 4, num_shards=2)
        >>> for shards in loader:
        ...     print([shard.tolist() for shard in shards])
        [[0, 1], [2, 3]]
        [[4, 5], [6, 7]]
        [[8], [9]]

    Source of the idea: ``ShardedDataLoader`` of GluonNLP, ``DataLoader`` of MXNet Gluon and PyTorch.
    """

    _arguments: Mapping[str, Any] = MappingProxyType({})

    @keeps_arguments
    def __init__(
        self,
        dataset: Indexed | Iterable[Any] | Callable[..., Iterable[Any]],
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        last_batch: Literal["keep", "discard", "rollover"] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        batchify_fn: Callable[[list[Any]], Batch] | None = None,
        num_workers: int | Literal["auto"] = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        thread_pool: bool = False,
        *,
        pool: Literal["inline", "thread", "process", "ray"] | Pool | None = None,
        device: str | torch.device | Placement | None = None,
        devices: Sequence[DeviceLike] | Literal["auto"] | Placement | None = None,
        num_shards: int | None = None,
        num_replicas: int | Literal["auto"] | DeviceMesh | None = None,
        rank: int | None = None,
        costs: Sequence[Any] | npt.NDArray[Any] | Mapping[str, Any] | Callable[[int], Any] | None = None,
        evaluate: bool = False,
        skip: Sequence[tuple[int, int]] | None = None,
        seed: int | None = None,
        on_error: ErrorAction | OnError = "raise",
        streams: int | None = None,
        steps_per_epoch: int | None = None,
        **names: Unpack[OtherNames[Batch]],
    ) -> None:
        arguments.refuse_names(names, type(self).__init__)
        arguments.check_flags({**locals(), **names})
        dataset = arguments.dataset_given(dataset, sampler is not None or batch_sampler is not None)
        action, limit = arguments.action_and_limit(on_error)
        batchify_fn = arguments.collate_function(batchify_fn, names.get("collate_fn"))
        workers = arguments.make_pool(pool, num_workers, thread_pool, names.get("worker_init_fn"), names.get("timeout"))
        factor = names.get("prefetch_factor")
        prefetch = arguments.prefetch_of(prefetch, factor, workers.num_workers)
        num_replicas, rank = arguments.ranks_given(num_replicas, rank, names.get("mesh"))
        device, devices, options = arguments.placement_given(device, devices)
        arguments.check_evaluate(evaluate, action)
        last, keep, shares = arguments.last_batch_of(last_batch, names.get("drop_last")), names.get("keep"), None
        size = batch_size = getattr(dataset, "rows", None) if batch_size is None and is_stream(dataset) else batch_size
        if keep is not None or action == "refill":
            refilled, order_given = provided("dataset", "refill"), (keep, action == "refill", shuffle, sampler)
            dataset, steps_per_epoch = refilled(dataset, order_given, batch_size, steps_per_epoch, (num_replicas, rank))
            shuffle, sampler, action = False, None, "raise" if action == "refill" else action
        if names.get("global_batch") is not None or names.get("micro_batch") is not None:
            several = devices is not None or num_shards is not None or options.resident is not False
            shares = provided("batch", "shares")(dataset, batch_size, batch_sampler, names, several)
            size = shares.batch_size
        common: dict[str, Any] = {"batch_size": size, "last_batch": last, "steps_per_epoch": steps_per_epoch}
        common |= {"num_replicas": num_replicas, "rank": rank, "seed": seed}
        order: MapOrder | StreamOrder
        if is_stream(dataset):
            given = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler, "costs": costs}
            arguments.check_stream(dataset, **given, evaluate=evaluate)
            order = StreamOrder(dataset, streams=streams, num_workers=workers.num_workers, **common)
            order.add_skip(skip)
        else:
            arguments.refuse_streams(streams, dataset)
            length = arguments.length(dataset, needed=sampler is None and batch_sampler is None)
            if any(isinstance(inner, Mixture) for inner in nested(dataset)):
                is_given = bool(shuffle) or not takes_order(sampler) or batch_sampler is not None or costs is not None
                rolls_over = steps_per_epoch is not None or last_batch == "rollover"
                sampler = provided("sampler", "mixture")(dataset, sampler, is_given, rolls_over)
            common |= {"sampler": sampler, "batch_sampler": batch_sampler, "skip": skip}
            order = MapOrder(length, dataset, shuffle=shuffle, costs=costs, evaluate=evaluate, shares=shares, **common)
        found, sharded = find_devices(device, devices)
        pipeline = Pipeline(workers, arguments.make_split(found, sharded, num_shards, options.shard_weights))
        transform = arguments.transform_of(options, lambda: order.seed, devices=found, pin_memory=pin_memory)
        placement, kept = Placer(found, pin_memory, workers.num_workers > 0, transform), None
        if options.resident is not False:
            make = provided("pool on devices", "resident")
            kept = make(options.resident, dataset, batchify_fn, placement, bool(workers.num_workers))
        job = Job(dataset, batchify_fn, order.seed, action, order.replicated)
        observer = provided("observer", "instruments")(dataset, limit)
        epochs = Epochs(job, order, pipeline, placement, kept)
        if names.get("with_source"):
            epochs.sources = provided("batches", "sources")(dataset, order)
        self._meter, self._epochs, self._known_steps = observer, epochs, LookUp(epochs)
        self._progress, self._order, self._pipeline, self._placement = epochs.progress, order, pipeline, placement
        self._workers, self._split = workers, pipeline.split
        self._batch_size, self._pin_memory = batch_size, bool(pin_memory)
        self.prefetch = prefetch
        if factor is not None:
            pipeline.scheduler.per_worker = pipeline.scheduler.prefetch // workers.num_workers
        if arguments.number_of_workers(num_workers)[0] and workers.num_workers:
            provided("num_workers", "auto")(observer)
        arguments.claim(workers, pipeline)
        workers.use_memory(placement.empty, placement.register, pinned=placement.pinned)
        self.device_prefetch = placement.ahead
        placement.clock.timeout = getattr(workers, "timeout", None) or math.inf
        workers.notices = observer.notices
        if isinstance(workers, ProcessPool):
            warn_of_workers(workers.num_workers)
        self._closer = weakref.finalize(self, call_all, workers.closer(), placement.closer())

    dataset: Any = shown(lambda loader: loader._epochs.dataset)
    """Dataset, as it is read."""

    sampler: Any = shown(lambda loader: loader._order.sampler)
    """Sampler of single indices."""

    batch_size: int | None = shown(lambda loader: loader._batch_size)
    """Samples per step; None with a ``batch_sampler`` or ``global_batch``. Read-only: `rescale` changes it."""

    share: float = shown(lambda loader: loader._progress.share)
    """With ``global_batch``, the factor for the loss of the last batch: its samples * ranks / samples of all ranks."""

    num_workers: int = shown(lambda loader: loader._workers.num_workers)
    """Number of workers that read in parallel; 0 if the main process reads."""

    seed: int = shown(lambda loader: loader._order.seed)
    """Seed of everything random."""

    pool: Pool = shown(lambda loader: loader._workers)
    """Pool of the workers that read the samples."""

    epoch: int = shown(lambda loader: loader._progress.at()[0])
    """Epoch in progress, or the next one."""

    position: int = shown(lambda loader: loader._progress.at()[1])
    """Batches delivered in `epoch`, including the steps that ``skip`` leaves out."""

    skip: list[tuple[int, int]] = shown(lambda loader: list(loader._order.skip))
    """Steps to leave out, as pairs (first, last): from the argument, and from a loaded state."""

    # Other libraries read these attributes of PyTorch's ``DataLoader``.
    batch_sampler: Any = shown(lambda loader: loader._order.batch_sampler)  # as given, or this rank's
    collate_fn: Callable[[list[Any]], Any] = shown(lambda loader: loader._epochs.batchify_fn or default_batchify_fn)
    drop_last: bool = shown(lambda loader: loader._order.drops_last)
    generator: None = shown(lambda loader: None)  # the order follows from `seed`
    in_order: bool = shown(lambda loader: True)
    multiprocessing_context: Any = shown(_context)
    persistent_workers: bool = shown(lambda loader: loader.num_workers > 0)  # they outlive an epoch
    pin_memory: bool = shown(lambda loader: loader._pin_memory)
    pin_memory_device: str = shown(lambda loader: "")
    prefetch_factor: int | None = shown(
        lambda one: max(1, one.prefetch // one.num_workers) if one.num_workers else None
    )
    timeout: float = shown(lambda loader: loader._workers.timeout or 0)
    worker_init_fn: Callable[[int], Any] | None = shown(lambda loader: loader._workers.worker_init_fn)

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Arguments of the loader, by name: ``ShardedDataLoader(**loader.arguments)`` creates an equivalent one.

        Read-only. Without ``seed`` each loader draws one: add ``seed=loader.seed`` for the same order. A pool object
        serves one open loader at a time.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4, last_batch="discard")
            >>> dict(loader.arguments)
            {'dataset': range(0, 10), 'batch_size': 4, 'last_batch': 'discard'}
            >>> len(ShardedDataLoader(**loader.arguments))
            2
        """
        return self._arguments

    def _given(self) -> Mapping[str, Any]:
        return self._arguments

    def _inspected(self) -> tuple[LookUp, int, Pool]:
        self._pipeline.check_open()
        return self._known_steps, self.epoch, self._workers

    def _replicas(self) -> tuple[int, int]:
        return self._order.replicas() if self._order.replicated else super()._replicas()

    @property
    def prefetch(self) -> int:
        """Number of batches in flight, from the next batch on."""
        return self._pipeline.scheduler.prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int | None) -> None:
        scheduler, is_own = self._pipeline.scheduler, prefetch is None
        scheduler.scale_by_group, scheduler.per_worker = is_own, PER_WORKER * is_own
        scheduler.prefetch = arguments.check_count("prefetch", PER_WORKER * self.num_workers if is_own else prefetch)

    @property
    def prefetch_epochs(self) -> bool:
        """True if workers read the next epoch's first batches while the last ones of an epoch are consumed."""
        return self._epochs.prefetch_epochs

    @prefetch_epochs.setter
    def prefetch_epochs(self, wanted: bool | None) -> None:
        self._epochs.prefetch_epochs = not self._workers.shares_dataset if wanted is None else bool(wanted)

    @property
    def device_prefetch(self) -> int:
        """Number of batches copied to accelerators in advance, from the next batch on: 2, or 0 without any."""
        return self._placement.ahead

    @device_prefetch.setter
    def device_prefetch(self, ahead: int) -> None:
        self._placement.copy_ahead(arguments.check_count("device_prefetch", ahead))
        # The pool must have this many batches ready, or there is nothing to copy ahead.
        self._pipeline.min_ready = max(2, 1 + self._placement.ahead)

    @property
    def ready_event(self) -> Any:
        """Event recorded on the device when the last returned batch is ready; a list of events for a list of shards.

        To use a batch on another stream than the one current at ``next``, call
        ``stream.wait_event(loader.ready_event)``, and ``tensor.record_stream(stream)`` for each tensor. None in host
        memory, and before the first batch.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(4), 2)
            >>> batch = next(iter(loader))
            >>> loader.ready_event is None
            True
        """
        return self._placement.ready_event()

    @property
    def shard_weights(self) -> list[float] | None:
        """Relative sizes of the shards, from the next batch planned on; None: equal shards."""
        return None if self._split.weights is None else list(self._split.weights)

    @shard_weights.setter
    def shard_weights(self, weights: Sequence[float] | None) -> None:
        self._split.weights = arguments.check_shard_weights(weights, self._split)

    def set_weights(self, weights: Sequence[float] | None) -> None:
        """Change the weights of the datasets in `interleave`, from the next batch on and for later epochs.

        Call it on all ranks, after the same step. Batches prefetched with the old weights are dropped, and later states
        have the new ones. ``len(loader)`` stays: a dataset that ends early starts over, or drops out with
        ``stop="each_once"``.

        Args:
            weights: One non-negative number per dataset, as in `interleave`. None: equal weights.

        Raises:
            TypeError: The dataset is not a mixture made with ``shuffle=True``, a schedule, ``stop="each_once"`` or a
                number of samples; or a sampler gives the order.
            ValueError: Invalid weights; nothing has changed.
            RuntimeError: Called inside ``next``.

        Example:
            >>> from sharded_loader import ShardedDataLoader, interleave
            >>> mixed = interleave([["a"] * 9, ["b"] * 9], stop=12, shuffle=True)
            >>> loader = ShardedDataLoader(mixed, batch_size=4)
            >>> for batch in loader:
            ...     print(batch)
            ...     loader.set_weights([0, 1])
            ['b', 'a', 'a', 'b']
            ['b', 'b', 'b', 'b']
            ['b', 'b', 'b', 'b']
        """
        self._pipeline.check_open()
        sampler: Any = self._order.sampler
        if not hasattr(type(sampler), "set_weights"):
            raise TypeError(NO_WEIGHTS)
        self._epochs.replan(functools.partial(sampler.set_weights, weights))

    # -- position ------------------------------------------------------------------------------------------

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one; if it already is, a loaded position in it stays.

        An epoch begins with an iterator's first ``next``, so a call between ``iter(loader)`` and that ``next`` counts.
        ``set_epoch`` of the sampler or the dataset does the same.

        Args:
            epoch: Number of an epoch, from 0.

        Raises:
            ValueError: ``epoch`` is negative or not an integer.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 10, shuffle=True, seed=1)
            >>> loader.set_epoch(3)
            >>> loader.epoch
            3
        """
        self._progress.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of batches in `epoch`, without those that ``skip`` leaves out.

        It varies between epochs with ``last_batch="rollover"``. A TypeError if the dataset has no length, or several
        parts.
        """
        return self._progress.length()

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last delivered batch, in a few microseconds; prefetched batches do not count.

        With several iterators, it is the position of the one that began or delivered last. All ranks share the order,
        so one rank saves, and any number of ranks load.

        Returns:
            A small JSON-serializable dict: ``epoch``, ``samples`` done in it (``batches`` with a ``batch_sampler``),
            and the facts that `load_state_dict` compares.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4, shuffle=True, seed=1)
            >>> first, state = next(iter(loader)), loader.state_dict()
            >>> state["epoch"], state["samples"]
            (0, 4)
        """
        return self._progress.state()

    def load_state_dict(
        self, state: Mapping[str, object], strict: bool = True, skip: Sequence[tuple[int, int]] | None = None
    ) -> None:
        """Continue where `state_dict` was taken, in any pool and on any number of ranks, when the next epoch begins.

        Iterators that have begun their epoch are not affected. ``set_epoch`` with the state's epoch keeps the position;
        any other epoch begins at its first batch. A state saved after the last batch of an epoch means the beginning of
        the next one. The loader takes over the state's seed.

        Args:
            state: Result of `state_dict`.
            strict: False allows another ``batch_size`` for the remaining samples, samplers of this library with other
                arguments (weights, budgets) in mid-epoch, and other data of the same length.
            skip: Steps to leave out, as the argument ``skip`` of the loader, in addition to those of the loader and the
                state.

        Raises:
            ValueError, TypeError: Not a state, or saved with other data, another dataset length, sampler, batch size or
                version; the error says what differs. Nothing has changed.

        Example:
            >>> from sharded_loader import ShardedDataLoader
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> first, state = next(iter(loader)), loader.state_dict()
            >>> loader.load_state_dict(state)
            >>> [batch.tolist() for batch in loader]
            [[4, 5, 6, 7], [8, 9]]
        """
        self._pipeline.check_open()
        with contextlib.ExitStack() as doing, self._taking_leases(state) as position:
            self._epochs.load(position, strict, skip, self._known_steps.digest, doing)

    # -- what it has done ----------------------------------------------------------------------------------

    def __repr__(self) -> str:
        if self._pipeline.closed:
            return "ShardedDataLoader(closed)"
        size = self._order.dataset_length
        parts = ["unknown number of samples" if size is None else f"{size} samples"]
        try:  # a repr must not raise
            if self._order.steps is None and getattr(self.batch_sampler, "counts_by_pass", False):
                raise TypeError("it would take a pass over the data")
            parts.append(f"{len(self)} batches" + (f" of {self.batch_size}" if self.batch_size else ""))
        except Exception:
            parts.append("unknown number of batches")
        if self._placement.devices is not None:
            parts.append("on " + ", ".join(map(str, self._placement.devices)))
            if (resident := self._epochs.resident) is not None and (counts := resident.counts):
                whole = f" ({{:,}} of {size:,} samples)" if size is not None and max(counts.values()) < size else ""
                parts.append("resident on " + ", ".join(f"{device}{whole.format(n)}" for device, n in counts.items()))
        elif self._split.num_shards is not None:
            parts.append(f"{self._split.num_shards} shards")
        parts.append(repr(self.pool))
        at = "resumes at" if self._progress.now is At.LOADED else "at"
        return f"ShardedDataLoader({', '.join(parts)}; epoch {self.epoch}, {at} batch {self.position})"

    # -- epochs ---------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator[Batch]:
        """Return an iterator over the next epoch, or over the rest of a loaded one.

        The loader does not change: workers start, and the epoch begins, when the first batch is asked for.
        """
        self._pipeline.check_open()
        return EpochIterator(self._epochs, self._meter, self)

    # -- single batches and samples -------------------------------------------------------------------------

    def peek(self) -> Batch:
        """Return the first batch of the next epoch, read in this process: starts no worker, counts no epoch.

        The iteration still begins with it. The attributes of a third-party sampler, and the generators, lists and
        arrays among them, are restored. State kept elsewhere (in a file, a nested object, compiled code) stays
        advanced, as does a dataset that changes when it is read.

        Returns:
            The batch that the first ``next`` of the next epoch will return.

        Raises:
            IndexError: The next epoch has no batches.
            Exception: Any error of the samples.

        Example:
            >>> ShardedDataLoader(range(10), 4).peek()
            tensor([0, 1, 2, 3])
        """
        self._pipeline.check_open()
        with self._order.undisturbed(but=self.dataset):
            return self._known_steps.first_batch()  # type: ignore[no-any-return]

    def read(self, index: Hashable, epoch: int | None = None) -> Any:
        """Return one sample, read in this process with its random generator, for instance under a debugger.

        Args:
            index: Index as the sampler yields it.
            epoch: Epoch whose random numbers it draws. Default: `epoch`.

        Returns:
            The sample, as the dataset returns it.

        Raises:
            Exception: Any error of the dataset.

        Example:
            >>> ShardedDataLoader([10, 20, 30], 2).read(1)
            20
        """
        self._pipeline.check_open()
        return self._known_steps.sample(index, self.epoch if epoch is None else epoch)

    def indices(self, epoch: int, step: int, rank: int | None = None) -> Any:
        """Return the indices of the samples of a past or future step, from the order alone: no sample is read.

        Takes constant time with samplers of this library. A third-party sampler is started twice, read up to the step,
        and restored as by `peek`. ``shard_weights`` are ignored.

        Args:
            epoch: From 0.
            step: Number of the batch in its epoch, from 0, as in errors. Steps left out by ``skip`` are numbered too.
            rank: Rank that reads the batch. Default: this one.

        Returns:
            A list of indices, as the dataset gets them; a list of such lists if ``batch_sampler`` yields shards. For a
            mixture (`interleave`), pairs (number of the dataset, index in it). With ``evaluate``, a pair: the indices,
            and how many of them are not padding.

        Raises:
            IndexError: The epoch has no such step.
            TypeError: The dataset is iterable data. The error says which part of the data the step comes from.
            ValueError: The step is unknown: a third-party sampler yields other indices when it is read again; or other
                ranks read the step, before `rescale` or before the loaded state was saved.

        Example:
            >>> loader = ShardedDataLoader(range(10), 4, shuffle=True, seed=1)
            >>> batches = [batch.tolist() for batch in loader]
            >>> batches[1] == loader.indices(epoch=0, step=1)
            True
        """
        self._pipeline.check_open()
        return self._known_steps.indices(epoch, step, rank)

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of a past or future step, read in this process: starts no worker, changes no epoch.

        It equals the batch of the iteration, to the last bit, if the dataset still has the same samples: also with
        `sample_rng`, ``transform(fn, seeded=True)`` and ``device_transform``. The global generators are seeded as in a
        worker process, then restored; threads, and loaders without workers, leave them to your program.

        Args:
            epoch, step: As in `indices`.

        Returns:
            The batch on its devices, split by the current ``shard_weights``; with ``evaluate``, a pair, as in
            iteration.

        Raises:
            Exception: As `indices`, and any error of the samples, subject to ``on_error``.
            ValueError: ``on_error`` has left out all samples.

        Example:
            >>> ShardedDataLoader(range(10), 4).batch(epoch=2, step=1)
            tensor([4, 5, 6, 7])
        """
        self._pipeline.check_open()
        return self._known_steps.batch(epoch, step)  # type: ignore[no-any-return]

    def gather(self, shards: Sequence[Any], device: DeviceLike | None = None) -> Any:
        """Join the results of your program, one per shard, on one device.

        Args:
            shards: Results for each shard: tensors with one row per sample, numbers, or a structure of them.
            device: Device of the joined result. Default: the first of ``devices``, or the CPU.

        Returns:
            The same structure, its tensors joined along the first axis in the order of the shards. Gradients flow back.

        Raises:
            ValueError: No shards, different structures, or values that cannot be joined.

        Example:
            >>> loader = ShardedDataLoader(range(5), 5, devices=["cpu", "cpu"])
            >>> loader.gather([shard * 10 for shard in next(iter(loader))])
            tensor([ 0, 10, 20, 30, 40])
        """
        devices = self._placement.devices or [torch.device("cpu")]
        return provided("function", "gather")(shards, devices[0] if device is None else device)

    # -- life -----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Send the dataset, which has changed, to the workers before the next epoch; iterators in progress then read
        it, too.

        Raises:
            LoaderClosedError: The loader is closed.

        Example:
            >>> data = [1, 2]
            >>> loader = ShardedDataLoader(data, 2)
            >>> data.append(3)
            >>> loader.refresh()
            >>> len(loader)
            2
        """
        self._pipeline.check_open()
        self._epochs.refresh()

    def rescale(self, num_replicas: int, rank: int, batch_size: int | None = None) -> None:
        """Continue with other ranks from the next batch on, after processes have left or joined.

        Call it on all remaining ranks, between the same two steps. Loops in progress go on, and each sample of the
        epoch still comes once. A joining rank loads the `state_dict` of another one at this step.

        Args:
            num_replicas, rank: As in the constructor.
            batch_size: Samples per step of each rank from now on, also of a batch sampler that has such a size.
                Default: unchanged. A `LoaderWarning` reports a different total over all ranks. Not with
                ``global_batch``, which stays.

        Raises:
            TypeError: The dataset is iterable data, whose parts belong to ranks.
            ValueError: Wrong arguments, or an order that does not allow it: with ``costs``, in mid-epoch, the total per
                step over all ranks must stay the same. With ``steps_per_epoch``, ``num_replicas`` must divide the
                dataset's length and the samples done, unless the sampler is endless.
            RuntimeError: Called inside ``next``.
            LoaderClosedError: The loader is closed.

        Example:
            Two ranks become one:

            >>> loader = ShardedDataLoader(range(8), 2, num_replicas=2, rank=0)
            >>> batches = iter(loader)
            >>> next(batches)
            tensor([0, 2])
            >>> loader.rescale(1, 0, batch_size=4)
            >>> list(batches)
            [tensor([4, 5, 6, 7])]
        """
        self._pipeline.check_open()
        with uninterrupted():
            self._epochs.rescale(num_replicas, rank, batch_size)
            given = {**self._arguments, "num_replicas": num_replicas, "rank": rank}
            given.pop("mesh", None)
            if given.get("batch_sampler") is not None:
                given["batch_sampler"] = self._order.batch_sampler
            elif batch_size is not None:
                given["batch_size"] = self._batch_size = batch_size
            self._arguments = MappingProxyType(given)

    def grow(self, dataset: Any = None) -> None:
        """Take in samples that were appended to the dataset, from the next batch on; loops in progress go on.

        Nothing that was read in this epoch comes again. The rest and the new samples are mixed, or come in order
        without ``shuffle``. Later epochs are ordinary ones over all. States contain the growth: load them
        over the grown dataset. Call it on all ranks after the same step.

        Args:
            dataset: The old samples, then new ones. None: the same object has more samples now, or a state of the first
                samples was loaded with ``strict=False``.

        Raises:
            TypeError: The loader has iterable data, a sampler, ``costs``, a mixture, or data resident on devices; or
                epochs share passes, with ``steps_per_epoch`` or ``last_batch="rollover"``; or ``dataset`` cannot be
                read by index.
            ValueError: Fewer samples, or the first new sample has other fields than sample 0. Nothing has changed.
            RuntimeError: Called inside ``next``.

        Example:
            >>> loader = ShardedDataLoader(range(6), 2)
            >>> batches = iter(loader)
            >>> next(batches)
            tensor([0, 1])
            >>> loader.grow(range(8))
            >>> list(batches)
            [tensor([2, 3]), tensor([4, 5]), tensor([6, 7])]
        """

        def grown() -> None:
            self._arguments = MappingProxyType({**self._arguments, "dataset": self.dataset})

        provided("sampler", "grown").grow(self._epochs, self._known_steps, dataset, grown)

    def without(self, indices: Iterable[int]) -> None:
        """Leave out samples from the next batch on, in this epoch and all later ones; loops in progress go on.

        The other samples of the epoch still come once. States contain the indices. Call it on all ranks after the same
        step.

        Args:
            indices: Indices of the samples.

        Raises:
            TypeError, RuntimeError: As `grow`.
            IndexError: The dataset has no such sample, or none would be left.

        Example:
            >>> loader = ShardedDataLoader(range(6), 2)
            >>> loader.without([1, 2])
            >>> list(loader)
            [tensor([0, 3]), tensor([4, 5])]
        """
        provided("sampler", "grown").without(self._epochs, indices)

    def close(self) -> None:
        """Stop the workers for good, from any thread, also twice; batches that you hold stay valid.

        A thread that waits in ``next`` gets a `LoaderClosedError`.

        Example:
            >>> with ShardedDataLoader(range(4), 2, num_workers=1, thread_pool=True) as loader:
            ...     next(iter(loader))
            tensor([0, 1])
        """
        for part in (self._pipeline.close, self._placement.closer(), self._epochs.forget, self._closer.detach):
            part()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        text = "a ShardedDataLoader has workers and memory of its own, and can be neither pickled nor copied"
        raise TypeError(f"{text}: make it from the same arguments where it is needed; state_dict() holds its position")
