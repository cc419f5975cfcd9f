"""`ShardedDataLoader`: the arguments, and what becomes of them.

    dataset, sampling arguments  -> MapOrder   which samples, in which order        (sampling/)
    num_workers, pool            -> Pool         who reads them                       (pools/)
    devices, pin_memory          -> Placement    where the batches end up             (devices/)
    pool                         -> Pipeline     keeps batches in flight              (engine/)
    all of them                  -> Epochs       begins an epoch for an iterator

The loader owns the pipeline, the pipeline the pool, the pool its workers. Iterators hold the loader. The loader holds
no iterator: a loop over a temporary loader closes it by ending.

What can go wrong is rejected here, in the constructor, as far as it can be known there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn

import numpy.typing as npt
import torch

from sharded_loader.base.imports import provided
from sharded_loader.base.limits import warn_of_workers
from sharded_loader.data.bulk import Indexed
from sharded_loader.data.datasets import has_mixture
from sharded_loader.data.inspection import is_stream
from sharded_loader.devices.names import DeviceLike, find_devices
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import ErrorAction, Job
from sharded_loader.engine.pipeline import Pipeline
from sharded_loader.engine.pool import Pool
from sharded_loader.loader import arguments
from sharded_loader.loader.arguments import Batch, OnError, OtherNames, Placement
from sharded_loader.loader.attributes import LoaderAttributes, keeps_arguments
from sharded_loader.loader.epochs import Epochs
from sharded_loader.loader.iterator import EpochIterator
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.own import takes_order
from sharded_loader.streams.order import NO_SKIP, StreamOrder

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self, Unpack


class ShardedDataLoader(LoaderAttributes, Generic[Batch]):
    """Batches of a dataset, in order, split over devices, prefetched by workers.

    For type checkers, ``ShardedDataLoader[Batch]`` says what a batch is; a ``collate_fn`` says it too.

    Args: Common
        dataset: Anything with ``__getitem__`` and ``__len__``: a list, a NumPy array, a torch or Hugging Face dataset,
            a `Dataset`. Samples are read in bulk if it has ``get_batch`` or ``__getitems__``. Or iterable data: an
            object that only has ``__iter__``, or a function that returns an iterable.
        batch_size: The number of samples per step of this process, in all its shards together.
        shuffle: Whether every epoch has a new random order.
        batchify_fn: The collate function: list of samples -> batch. Default: `default_batchify_fn`.
        num_workers: The number of worker processes (threads with ``thread_pool``). 0 or less: the main process reads.
            ``"auto"``: 2 at first, then as many as training needs. Batches, states and errors stay what they are.
        device: The device of the batches. ``"cuda"`` is the current device, whatever LOCAL_RANK says: call
            ``torch.cuda.set_device`` first, or give ``"cuda:1"``. A `Placement` has options besides.
        devices: A list of devices, or ``"auto"`` for all accelerators. Each batch is a list: shard i is on device i.
            A `Placement` of such a list has options besides.
        num_replicas: The number of processes (ranks) that divide the samples. ``"auto"``: ask torch.distributed,
            otherwise WORLD_SIZE and RANK. ``batch_size`` is per rank. All ranks read the same number of samples. If
            they do not divide, the first ones come again at the end of the epoch, so an evaluation counts a few twice.
            With ``last_batch="discard"``, the last ones are left out instead. Or a mesh, a
            `torch.distributed.device_mesh.DeviceMesh`, or one dimension of it, without ``rank``: its dimensions of data
            parallelism (``"dp"``, ``"dp_replicate"``, ``"fsdp"``, ...) are ranks. Processes that differ in other
            dimensions (``"tp"``, ``"cp"``, ``"pp"``) get equal batches.
        seed: The seed of everything random. None: drawn from torch's default generator; with ``num_replicas``, 0.
        on_error: What to do with a sample that raises an error: ``"raise"`` it, ``"skip"`` the sample, ``"replace"`` it
            by another sample of the batch, or a function ``(SampleError) -> sample``. A batch or shard without samples
            is left out with a warning, and later shards move up. With ``num_replicas`` it is an error, because ranks go
            in step. A sample that ends its worker, or hangs, always raises: `WorkerDiedError`, `WorkerTimeoutError`.
            `OnError` limits how many samples.

    Args: Data
        streams: The number of parts that iterable data is divided into. Each part sees its number as
            ``get_worker_info().id``, and the number of parts as ``num_workers``; a function may take both as arguments.
            Batches come from the parts in turn. The order depends on ``streams``, not on the workers. Default: the
            dataset's ``num_shards``, up to 32; otherwise one part per worker of each rank.

    Args: Order
        sampler: The order of the samples: any sampler of this library or torch, or an iterable of indices.
        batch_sampler: A sampler that yields lists of indices, or lists of such lists, which are shards. Use it without
            ``batch_size``, ``shuffle``, ``sampler`` and ``last_batch``.
        last_batch: What to do with an incomplete last batch: ``"keep"`` it (default), ``"discard"`` it, or
            ``"rollover"``: move its samples to the next epoch.
        steps_per_epoch: The number of batches of every epoch on every rank. Samplers and parts that end start over, and
            no batch is short. The next epoch continues where the last one ended.
        rank: The number of this process, from 0. ``num_replicas="auto"`` finds it.
        costs: What each sample costs, such as its length: an array, or a function of the index. Then the order is
            random, and in each step all ranks have samples of nearly the same cost in all. The samples of a step are
            the same for any number of ranks, as long as they are as many.
        evaluate: Whether iteration gives ``(batch, real)``, for an evaluation that counts each sample once. All ranks
            take equally many steps, and all batches have ``batch_size`` samples. The first ``real`` samples of a batch
            count; the others, at the end of the epoch, are fillers. ``real`` may be 0.
        skip: Steps to leave out, for instance after the loss has jumped: a list of pairs (first, last). The last one is
            left out too. Steps count from 0 since the beginning of epoch 0, with the ranks and the batch size of this
            loader. All other batches stay what they are, and ``len(loader)`` gets smaller. A state has them too, and
            `load_state_dict` takes others. Not for iterable data.

    Args: Workers
        thread_pool: Whether workers are threads instead of processes.
        pool: What reads the samples: ``"thread"``, ``"process"``, ``"ray"``, ``"inline"`` (the main process, whatever
            ``num_workers`` says), or a pool object.
        prefetch: The number of batches to prefetch. Default: ``2 * num_workers``; more if a batch takes < 1 ms. With
            ``num_workers="auto"`` more, too, while training waits for single samples that take long.

    Args: Devices
        num_shards: The number of shards to split each batch into, in host memory.
        pin_memory: Whether batches are in pinned host memory. Only without devices, which use pinned memory anyway.
        **names: Names that mean one of the arguments above: torch's ``collate_fn`` (``batchify_fn``), ``drop_last``
            (``last_batch="discard"``), ``prefetch_factor`` (k is ``prefetch=k * num_workers``), and ``mesh``
            (``num_replicas``). ``worker_init_fn`` and ``timeout`` are options of the pool: what each worker calls when
            it starts, and the seconds that it may stand still. ``persistent_workers`` changes nothing: workers live as
            long as the loader.

    Attributes:
        arguments: What the loader was given, by name; enough to make another one like it. Read-only.
        prefetch: The number of batches to prefetch. You may set it while you iterate.
        prefetch_epochs: Whether workers read the first batches of the next epoch while you consume the last ones. They
            are dropped if you ask for another epoch, or call `refresh`. Only samplers of this library are read early.
            True with processes; threads share the dataset and the global random generators with you. You may set it
            while you iterate.
        device_prefetch: The number of batches copied to accelerators in advance (2). You may set it while you iterate.
        shard_weights: The shares of the shards; None: all the same. You may set them while you iterate.

    Raises:
        ValueError: Arguments are wrong or contradict each other.
        TypeError: An argument has a wrong type.

    A short last batch has fewer shards, never an empty one. The attributes that are not listed here are read-only.

    Example:
        >>> loader = ShardedDataLoader(range(10), 4, num_shards=2)
        >>> for shards in loader:
        ...     print([shard.tolist() for shard in shards])
        [[0, 1], [2, 3]]
        [[4, 5], [6, 7]]
        [[8], [9]]

    Source of the idea: ``ShardedDataLoader`` of GluonNLP, ``DataLoader`` of MXNet Gluon and PyTorch.
    """

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
        costs: Sequence[float] | npt.NDArray[Any] | Callable[[int], float] | None = None,
        evaluate: bool = False,
        skip: Sequence[tuple[int, int]] | None = None,
        seed: int | None = None,
        on_error: ErrorAction | OnError = "raise",
        streams: int | None = None,
        steps_per_epoch: int | None = None,
        **names: Unpack[OtherNames[Batch]],
    ) -> None:
        arguments.refuse_names(names, type(self).__init__)
        dataset = arguments.dataset_given(dataset, sampler is not None or batch_sampler is not None)
        action, limit = arguments.action_and_limit(on_error)
        batchify_fn = arguments.collate_function(batchify_fn, names.get("collate_fn"))
        workers = arguments.make_pool(pool, num_workers, thread_pool, names.get("worker_init_fn"), names.get("timeout"))
        factor = names.get("prefetch_factor")
        prefetch = arguments.prefetch_of(prefetch, factor, workers.num_workers)
        num_replicas, rank = arguments.ranks_given(num_replicas, rank, names.get("mesh"))
        device, devices, options = arguments.placement_given(device, devices)
        arguments.check_evaluate(evaluate, action)
        common: dict[str, Any] = {
            "batch_size": batch_size,
            "last_batch": arguments.last_batch_of(last_batch, names.get("drop_last")),
            "num_replicas": num_replicas,
            "rank": rank,
            "seed": seed,
            "steps_per_epoch": steps_per_epoch,
        }
        order: MapOrder | StreamOrder
        if is_stream(dataset):
            given = {"shuffle": shuffle, "sampler": sampler, "batch_sampler": batch_sampler, "costs": costs}
            arguments.check_stream(dataset, **given, evaluate=evaluate)
            if skip is not None:
                raise TypeError(NO_SKIP)
            order = StreamOrder(dataset, streams=streams, num_workers=workers.num_workers, **common)
        else:
            arguments.refuse_streams(streams, dataset)
            size = arguments.length(dataset, needed=sampler is None and batch_sampler is None)
            if has_mixture(dataset):
                is_given = bool(shuffle) or not takes_order(sampler) or batch_sampler is not None or costs is not None
                rolls_over = steps_per_epoch is not None or last_batch == "rollover"
                sampler = provided("sampler", "mixture")(dataset, sampler, is_given, rolls_over)
            common |= {"sampler": sampler, "batch_sampler": batch_sampler, "skip": skip}
            order = MapOrder(size, dataset, shuffle=shuffle, costs=costs, evaluate=evaluate, **common)
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
        super().__init__(epochs, observer, batch_size, bool(pin_memory))
        self.prefetch = prefetch
        if factor is not None:
            pipeline.scheduler.per_worker = pipeline.scheduler.prefetch // workers.num_workers
        if arguments.number_of_workers(num_workers)[0] and workers.num_workers:
            provided("num_workers", "auto")(observer)
        arguments.claim(workers, pipeline)
        workers.use_memory(placement.empty, placement.register, pinned=placement.pinned)
        self.device_prefetch = placement.ahead
        workers.notices = observer.notices
        if isinstance(workers, ProcessPool):
            warn_of_workers(workers.num_workers)
        self._closer = weakref.finalize(self, call_all, workers.closer(), placement.closer())

    # -- epochs ---------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator[Batch]:
        """An iterator over the next epoch, or over the rest of the one that was loaded.

        It changes nothing in the loader: the epoch begins when its first batch is asked for. Workers start then.
        """
        self._pipeline.check_open()
        return EpochIterator(self._epochs, self._meter, self)

    # -- single batches and samples -------------------------------------------------------------------------

    def peek(self) -> Batch:
        """The first batch of the next epoch, read here and now: starts no worker, counts no epoch.

        The batch that comes next stays the same. A sampler of another library is started for it, and put back to what
        it was: its attributes, and the generators, lists and arrays among them. One that keeps its state elsewhere (in
        a file, in an object inside it, in compiled code) goes on from where ``peek`` has read to. So does a dataset
        that changes when it is read.

        Returns:
            What the first ``next`` of the next epoch will return.

        Raises:
            IndexError: the next epoch has no batches.
            Exception: what the samples raise.

        Example:
            >>> ShardedDataLoader(range(10), 4).peek()
            tensor([0, 1, 2, 3])
        """
        self._pipeline.check_open()
        with self._order.undisturbed(but=self.dataset):
            return self._known_steps.first_batch()  # type: ignore[no-any-return]

    def read(self, index: Hashable, epoch: int | None = None) -> Any:
        """One sample, read here and now, with its random generator: where a debugger works.

        Args:
            index: as the sampler yields it.
            epoch: the epoch whose random numbers it draws. Default: `epoch`.

        Returns:
            The sample, as the dataset returns it.

        Raises:
            Exception: what the dataset raises.

        Example:
            >>> ShardedDataLoader([10, 20, 30], 2).read(1)
            20
        """
        self._pipeline.check_open()
        return self._known_steps.sample(index, self.epoch if epoch is None else epoch)

    def indices(self, epoch: int, step: int, rank: int | None = None) -> Any:
        """The indices of the samples of a step, past or to come, from the order alone: no sample is read.

        It takes the same time for any step if the samplers are this library's. A sampler of another library is started
        twice and read up to the step, and put back as by `peek`. ``shard_weights`` do not count.

        Args:
            epoch: From 0.
            step: The number of the batch in its epoch, from 0, as errors name it. With ``skip``, the steps that are
                left out have numbers too.
            rank: Which rank's batch. Default: this one's.

        Returns:
            A list of indices, as the dataset is asked for them. A list of such lists, if ``batch_sampler`` yields
            shards. Of a mixture (`interleave`), pairs (number of the dataset, index in it). With ``evaluate``, a pair:
            the indices, and how many of them are no fillers.

        Raises:
            IndexError: The epoch has no such step.
            TypeError: The dataset is iterable data. The error tells which part of the data the step is from.
            ValueError: The step is not known: a sampler of another library yields other indices when it is read again;
                or the step was read by other ranks, before `rescale` or before the loaded state was saved.

        Example:
            >>> loader = ShardedDataLoader(range(10), 4, shuffle=True, seed=1)
            >>> batches = [batch.tolist() for batch in loader]
            >>> batches[1] == loader.indices(epoch=0, step=1)
            True
        """
        self._pipeline.check_open()
        return self._known_steps.indices(epoch, step, rank)

    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of a step, past or to come, read here and now: starts no worker, changes no epoch.

        It has the values that iteration gives, to the last bit, if the dataset still has the same samples. That
        includes `sample_rng`, ``transform(fn, seeded=True)`` and ``device_transform``. The global generators are seeded
        as a worker process seeds them, and put back. Threads, and a loader without workers, leave them to your program.

        Args:
            epoch, step: As in `indices`.

        Returns:
            The batch, on the devices of the loader. With ``evaluate``, a pair, as iteration gives it. Shards are split
            by the ``shard_weights`` of now.

        Raises:
            Exception: As `indices`, and what the samples raise. ``on_error`` counts.
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
            shards: What you computed of each shard: tensors with one row per sample, numbers, or a structure of them.
            device: Where the joined result is. Default: the first of ``devices``; without devices, the CPU.

        Returns:
            The same structure. Its tensors are joined along the first axis, in the order of the shards. Gradients flow
            back through them.

        Raises:
            ValueError: There are no shards, their structures differ, or they hold something that cannot be joined.

        Example:
            >>> loader = ShardedDataLoader(range(5), 5, devices=["cpu", "cpu"])
            >>> loader.gather([shard * 10 for shard in next(iter(loader))])
            tensor([ 0, 10, 20, 30, 40])
        """
        devices = self._placement.devices or [torch.device("cpu")]
        return provided("function", "gather")(shards, devices[0] if device is None else device)

    # -- life -----------------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Send the dataset, which has changed, to the workers before the next epoch.

        Iterators that are under way go on, over the changed dataset, once the next epoch has begun.

        Raises:
            LoaderClosedError: after `close`.

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
        """Go on with other ranks, from the next batch on: processes have left or joined.

        Call it on all ranks that stay, between the same two steps. A loop that is under way goes on. Each sample of the
        epoch still comes once. A rank that joins loads the `state_dict` of another one that is at this step.

        Args:
            num_replicas, rank: As in the constructor.
            batch_size: The number of samples per step of each rank from now on. Default: as before. If all ranks
                together then read another number of samples in a step, a `LoaderWarning` says so. Of a batch sampler
                it changes the size of the batches, as far as they have one.

        Raises:
            TypeError: The dataset is iterable data: its parts belong to ranks.
            ValueError: Wrong arguments. Or the order does not allow it: with ``costs``, in mid-epoch, all ranks
                together must read as many samples in a step as before. With ``steps_per_epoch``, ``num_replicas`` must
                divide the dataset's length and the samples that are done, unless the sampler has no end.
            RuntimeError: You call it inside ``next``.
            LoaderClosedError: after `close`.

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
        self._epochs.rescale(num_replicas, rank, batch_size)
        self._resized(num_replicas, rank, batch_size)

    def close(self) -> None:
        """Stop the workers. The loader cannot be used any more; batches that are held stay. Safe to call twice.

        From any thread; one that waits in ``next`` gets a `LoaderClosedError`.

        Example:
            >>> with ShardedDataLoader(range(4), 2, num_workers=1, thread_pool=True) as loader:
            ...     next(iter(loader))
            tensor([0, 1])
        """
        self._pipeline.close()
        self._placement.closer()()
        self._epochs.forget()
        self._closer.detach()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ShardedDataLoader has workers and memory of its own, and can be neither pickled nor copied: "
            "make it from the same arguments where it is needed; state_dict() holds its position"
        )


def call_all(*functions: Callable[[], Any]) -> None:
    """Call them one after the other: what a finalizer does, which must not hold the loader."""
    for function in functions:
        function()
