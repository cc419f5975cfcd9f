"""`ShardedDataLoader`: the arguments, and what becomes of them.

    dataset, sampling arguments  -> EpochOrder   which samples, in which order        (sampling/)
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
from collections.abc import Callable, Hashable, Sequence
from types import TracebackType
from typing import Any, Generic, Literal, NoReturn

from sharded_loader.arguments import (
    check_batchify_fn,
    check_dataset,
    check_on_error,
    check_prefetch_epochs,
    check_stream,
    claim,
    last_batch_of,
    length,
    make_pool,
    make_split,
    one_of,
    prefetch_of,
    refuse_streams,
    refuse_unknown,
)
from sharded_loader.attributes import LoaderAttributes
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.data.inspection import is_stream
from sharded_loader.devices.names import find_devices
from sharded_loader.devices.placement import Placement
from sharded_loader.engine.messages import OnError
from sharded_loader.engine.pipeline import Pipeline
from sharded_loader.engine.pool import Pool
from sharded_loader.engine.stream_order import StreamOrder
from sharded_loader.epochs import Epochs
from sharded_loader.iterator import Batch, EpochIterator
from sharded_loader.pools.resident import ResidentPool, check_resident
from sharded_loader.progress import Progress
from sharded_loader.sampling.order import EpochOrder
from sharded_loader.stats import Meter


class ShardedDataLoader(LoaderAttributes, Generic[Batch]):
    """Batches of a dataset, in order, split over devices, read by workers ahead of time.

    For type checkers, ``ShardedDataLoader[Batch]`` says what a batch is; a ``batchify_fn`` says it too.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``: a list, a NumPy array, a torch or Hugging Face
            dataset, one of `sharded_loader`'s. Read in bulk where it has ``get_batch`` or ``__getitems__``.
            Or iterable data: an object with ``__iter__`` only, or a function that returns an iterable.
        batch_size: samples per step of this process, all its shards together.
        shuffle: a new random order every epoch.
        sampler: the order: any sampler of `sharded_loader` or torch, or an iterable of indices.
        last_batch: of an epoch whose length is no multiple of ``batch_size``: ``"keep"`` (default),
            ``"discard"``, or ``"rollover"``: its samples begin the next epoch.
        batch_sampler: yields lists of indices, or lists of such lists, which are shards; instead of the four
            arguments before.
        batchify_fn: list of samples -> batch. Default: `default_batchify_fn`.
        num_workers: that many worker processes (threads with ``thread_pool``); 0 or less: read in the loop.
        pin_memory: batches in pinned host memory. Only without devices, which see to it themselves.
        prefetch: how many batches are read ahead. Default ``2 * num_workers``, more while a batch takes a worker less
            than 1 ms.
        prefetch_epochs: while the last batches of an epoch are consumed, workers read the first ones of the next, so
            there is no gap. They are dropped if you ask for another epoch, or call `refresh`. Samplers of other
            libraries and of your own are not read ahead. None: processes do this. Threads share the dataset and the
            global random generators with you, so between epochs they leave both alone.
        thread_pool: threads instead of processes.
        pool: ``"thread"``, ``"process"``, ``"ray"``; ``"inline"``, whatever ``num_workers`` says; or a pool object.
        device: plain batches on this device. ``"cuda"`` is the current device, whatever LOCAL_RANK says: call
            ``torch.cuda.set_device`` first, or give ``"cuda:1"``.
        devices: a list, or ``"auto"`` for all accelerators: batches are lists, shard i on device i.
        num_shards: split batches into that many shards, in host memory.
        shard_weights: shares of the shards, e.g. ``[2, 1]``. A positive weight gets at least one sample, while there
            are enough samples. Weights of 0 must come last. `ShardedBatchSampler` follows the same rule.
        num_replicas, rank: this process is one of several, each with its part of the samples; ``"auto"``
            asks torch.distributed, else WORLD_SIZE and RANK. ``batch_size`` is per rank. Every rank reads equally
            many samples: if they do not divide, the first of the epoch come again at its end (so an
            evaluation counts a few twice), or, with ``last_batch="discard"``, the last are left out.
        seed: of everything random. None: drawn from torch's default generator; with ``num_replicas``, 0.
        on_error: ``"raise"``; ``"skip"``: leave bad samples out; ``"replace"``: put another one of the batch in
            their place; or a callable ``(SampleError) -> sample``. A batch or shard that loses all its samples is
            left out with a warning; with ``num_replicas`` it is an error instead, because ranks go in step. A bad
            sample raises: one that ends its worker, or hangs, is a `WorkerDiedError` or `WorkerTimeoutError` of its
            batch, whatever ``on_error`` says.
            If a shard is left out, the shards after it move up before they are copied: shards[i] is on devices[i].
        resident: keep the columns of an `ArrayDataset` on the devices, and gather batches there: no workers, no work
            per sample. ``"auto"``: where they can be kept and there is room; True: the same, with an error if they
            cannot be kept, and a warning if there is no room.

        streams: the number of parts that iterable data is cut into. Each part sees its number as
            ``get_worker_info().id``, and the number of parts as ``num_workers``; a function may take both as arguments.
            Batches come from the parts in turn. The order depends on ``streams``, not on the workers. Default: the
            dataset's ``num_shards``, up to 32; otherwise one part per worker of each rank.
        steps_per_epoch: every epoch has this number of batches on every rank. Samplers and parts that have ended start
            over, and no batch is short. The next epoch continues where the last one ended.
        collate_fn, drop_last, prefetch_factor, worker_init_fn, timeout: torch's names. ``collate_fn`` is
            ``batchify_fn``, ``drop_last=True`` is ``last_batch="discard"``, ``prefetch_factor=k`` is
            ``prefetch=k * num_workers``. The other two are arguments of the pool.
        persistent_workers: torch's argument. It changes nothing: workers live as long as the loader.

    Attributes:
        prefetch: as above. May be set while iterating.
        prefetch_epochs: as above, True or False. May be set while iterating.
        device_prefetch: of the batches read ahead, how many are copied to the devices ahead of the one that is handed
            out (2; 0 without accelerators). May be set while iterating.
        shard_weights: shares of the shards, None for equal ones. May be set while iterating.

    Raises:
        ValueError: arguments that are wrong or contradict each other.
        TypeError: the same, where it is the kind of argument that is wrong.

    A short last batch has no empty shard: it has fewer shards. Read-only are ``epoch``, ``position``, ``skipped``,
    ``num_skipped``, ``seed``, ``pool`` and the names that other loaders have (``batch_size``, ``sampler``, ...).

    Example:
        >>> loader = ShardedDataLoader(range(10), 4, num_shards=2)
        >>> for shards in loader:
        ...     print([shard.tolist() for shard in shards])
        [[0, 1], [2, 3]]
        [[4, 5], [6, 7]]
        [[8], [9]]

    Source of the idea: ``ShardedDataLoader`` of GluonNLP, ``DataLoader`` of MXNet Gluon and PyTorch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = None,
        shuffle: bool = False,
        sampler: Any = None,
        last_batch: Literal["keep", "discard", "rollover"] | None = None,
        batch_sampler: Any = None,
        batchify_fn: Callable[[list[Any]], Batch] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        thread_pool: bool = False,
        *,
        pool: Literal["inline", "thread", "process", "ray"] | Pool | None = None,
        device: Any = None,
        devices: Any = None,
        num_shards: int | None = None,
        shard_weights: Sequence[float] | None = None,
        num_replicas: int | Literal["auto"] | None = None,
        rank: int | None = None,
        seed: int | None = None,
        on_error: OnError = "raise",
        resident: bool | Literal["auto"] = False,
        prefetch_epochs: bool | None = None,
        streams: int | None = None,
        steps_per_epoch: int | None = None,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
        drop_last: bool | None = None,
        prefetch_factor: int | None = None,
        persistent_workers: bool | None = None,
        worker_init_fn: Callable[[int], Any] | None = None,
        timeout: float | None = None,
        **unknown: NoReturn,
    ) -> None:
        # What it was given, to make another one like it: see `integrations.accelerate`.
        self._given = {name: one for name, one in locals().items() if name not in ("self", "unknown", "__class__")}
        refuse_unknown(unknown, type(self).__init__)
        dataset = check_dataset(dataset, sampler is not None or batch_sampler is not None)
        check_on_error(on_error)
        check_batchify_fn(batchify_fn := one_of("batchify_fn", batchify_fn, "collate_fn", collate_fn))
        self._batch_size, self._pin_memory = batch_size, bool(pin_memory)
        self._workers = make_pool(pool, num_workers, thread_pool, worker_init_fn, timeout)
        prefetch = prefetch_of(prefetch, prefetch_factor, self._workers.num_workers)
        common: dict[str, Any] = {
            "batch_size": batch_size,
            "last_batch": last_batch_of(last_batch, drop_last),
            "num_replicas": num_replicas,
            "rank": rank,
            "seed": seed,
            "steps_per_epoch": steps_per_epoch,
        }
        self._order: EpochOrder | StreamOrder
        if is_stream(dataset):
            check_stream(dataset, shuffle=shuffle, sampler=sampler, batch_sampler=batch_sampler)
            self._order = StreamOrder(
                dataset,
                streams=streams,
                num_workers=self._workers.num_workers,
                **common,
            )
        else:
            refuse_streams(streams, dataset)
            self._order = EpochOrder(
                length(dataset, needed=sampler is None and batch_sampler is None),
                shuffle=shuffle,
                sampler=sampler,
                batch_sampler=batch_sampler,
                **common,
            )
        # The default given by name is the default: it reads in bulk too.
        batchify_fn = None if batchify_fn is default_batchify_fn else batchify_fn
        found, sharded = find_devices(device, devices)
        self._split = make_split(found, sharded, num_shards)
        self.shard_weights = shard_weights
        self._placement = Placement(found, pin_memory)
        self._resident: ResidentPool | None = None
        if check_resident(resident, dataset, found, batchify_fn):
            self._resident = ResidentPool(dataset, found or [], self._placement, insists=resident is True)
        reads_ahead = check_prefetch_epochs(prefetch_epochs, self._workers)
        self._pipeline = Pipeline(self._workers)
        self.prefetch = prefetch
        claim(self._workers, self._pipeline)
        place = self._placement
        self._workers.use_memory(place.empty, place.register, pinned=bool(place.asynchronous))
        self.device_prefetch = self._placement.ahead
        self._meter = Meter()
        self._progress = Progress(self._order)
        self._epochs = Epochs(
            dataset,
            batchify_fn,
            on_error,
            self._order,
            self._split,
            self._placement,
            self._pipeline,
            self._progress,
            self._resident,
            reads_ahead,
        )
        self._closer = weakref.finalize(self, _close_both, self._workers.closer(), self._placement.closer())

    # -- epochs ---------------------------------------------------------------------------------------------

    def __iter__(self) -> EpochIterator[Batch]:
        """An iterator over the next epoch, or over the rest of the one that was loaded.

        It changes nothing in the loader: the epoch begins when its first batch is asked for. Workers start then.
        """
        self._pipeline.check_open()
        return EpochIterator(self, self._epochs, self._pipeline, self._placement, self._meter, self._progress)

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
            return self._epochs.first_batch()  # type: ignore[no-any-return]

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
        return self._epochs.sample(index, self.epoch if epoch is None else epoch)

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
        self._epochs.stale = True
        self._order.resize(length(self.dataset))

    def close(self) -> None:
        """Stop the workers. The loader cannot be used any more; batches that are held stay. Twice is fine.

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

    def __enter__(self) -> ShardedDataLoader[Batch]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ShardedDataLoader has workers and memory of its own, and can be neither pickled nor copied: "
            "make it from the same arguments where it is needed; state_dict() takes its place along"
        )


def _close_both(close_pool: Callable[[], Any], close_placement: Callable[[], Any]) -> None:
    close_pool()
    close_placement()
