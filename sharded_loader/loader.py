"""`ShardedDataLoader`: the arguments, and what becomes of them.

    dataset, sampling arguments  -> EpochOrder   which samples, in which order        (sampling/)
    num_workers, pool            -> Pool         who reads them                       (execution/pools/)
    devices, pin_memory          -> Placement    where the batches end up             (devices/)
    all three                    -> Pipeline     keeps batches in flight              (execution/)

An iterator is a `Run` of the pipeline and a position. The loader owns the pipeline, the pipeline the pool,
the pool its workers. Iterators hold the loader, the loader holds no iterator: a loop over a temporary loader
closes it by ending.

What can go wrong is refused here, in the constructor, as far as it can be known there.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, NoReturn

from sharded_loader.arguments import (
    check_batchify_fn,
    check_dataset,
    check_on_error,
    claim,
    length,
    make_pool,
    make_split,
    refuse_unknown,
)
from sharded_loader.data.default import default_batchify_fn
from sharded_loader.data.foreign import takes_arrays
from sharded_loader.devices.placement import Placement, find_devices
from sharded_loader.execution.epochs import begin_epoch, in_epoch
from sharded_loader.execution.messages import NOTHING, Job, OnError
from sharded_loader.execution.pipeline import Pipeline, Run
from sharded_loader.execution.plan import EpochPlan
from sharded_loader.execution.pools.base import Pool
from sharded_loader.execution.reader import Reader
from sharded_loader.iterator import EpochIterator
from sharded_loader.sampling.order import EpochOrder
from sharded_loader.sampling.shards import check_shares
from sharded_loader.stats import LoaderStats, Meter


class ShardedDataLoader:
    """Batches of a dataset, in order, split over devices, read by workers ahead of time.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``: a list, a NumPy array, a torch or Hugging Face
            dataset, one of `sharded_loader`'s. Read in bulk where it has ``get_batch`` or ``__getitems__``.
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
        prefetch: batches in flight. Default ``2 * num_workers``, more while a batch takes a worker less than 0.15 ms.
            May be changed while iterating.
        thread_pool: threads instead of processes.
        pool: ``"inline"`` (whatever ``num_workers`` says), ``"thread"`` or ``"process"`` (sized by it), or a pool
            object, which has its own.
        device: plain batches on this device.
        devices: a list, or ``"auto"`` for all accelerators: batches are lists, shard i on device i.
        num_shards: split batches into that many shards, in host memory.
        shard_weights: shares of the shards, e.g. ``[2, 1]``. May be changed while iterating.
        num_replicas, rank: this process is one of several, each with its part of the samples; ``"auto"``
            asks torch.distributed, else WORLD_SIZE and RANK. ``batch_size`` is per rank. Every rank reads equally
            many samples: if they do not divide, the first of the epoch come again at its end (so an
            evaluation counts a few twice), or, with ``last_batch="discard"``, the last are left out.
        seed: of everything random. None: drawn from torch's default generator; with ``num_replicas``, 0.
        on_error: ``"raise"``; ``"skip"``: leave bad samples out; ``"replace"``: put another one of the batch in
            their place; or a callable ``(SampleError) -> sample``.
        resident: reserved (columns kept on the device); this version takes only False.

    Attributes:
        dataset, batch_size, sampler, batch_sampler, num_workers, drop_last: as other loaders name them.
        epoch: the epoch in progress, or the one that the next ``iter`` begins.
        position: batches delivered in it.

    Raises:
        ValueError, TypeError: arguments that are wrong or contradict each other.

    A short last batch has no empty shard: it has fewer shards.

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
        last_batch: str | None = None,
        batch_sampler: Any = None,
        batchify_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        pin_memory: bool = False,
        prefetch: int | None = None,
        thread_pool: bool = False,
        *,
        pool: str | Pool | None = None,
        device: Any = None,
        devices: Any = None,
        num_shards: int | None = None,
        shard_weights: Sequence[float] | None = None,
        num_replicas: int | str | None = None,
        rank: int | None = None,
        seed: int | None = None,
        on_error: OnError = "raise",
        resident: bool | str = False,
        **unknown: NoReturn,
    ) -> None:
        refuse_unknown(unknown, type(self).__init__)
        check_dataset(dataset)
        check_on_error(on_error)
        if resident is not False:
            raise ValueError(f"resident={resident!r} has no effect in this version; leave it out")
        check_batchify_fn(batchify_fn)
        self.dataset = dataset
        self._batch_size = batch_size
        self._order = EpochOrder(
            length(dataset),
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            last_batch=last_batch,
            batch_sampler=batch_sampler,
            num_replicas=num_replicas,
            rank=rank,
            seed=seed,
        )
        # The default given by name is the default: it reads in bulk too.
        self._batchify_fn = None if batchify_fn is default_batchify_fn else batchify_fn
        self._on_error = on_error
        found, sharded = find_devices(device, devices)
        self._split = make_split(found, sharded, num_shards)
        self.shard_weights = shard_weights
        self._placement = Placement(found, pin_memory)
        workers = make_pool(pool, num_workers, thread_pool)
        self._pipeline = Pipeline(workers, 0)
        self.prefetch = prefetch
        claim(workers)
        self._meter = Meter()
        self._shown: tuple[Run, int, weakref.ref[EpochIterator]] | None = None
        self._live: weakref.WeakSet[EpochIterator] = weakref.WeakSet()
        self._stale = False
        self._closer = weakref.finalize(self, workers.closer())

    # -- plain attributes -----------------------------------------------------------------------------------

    @property
    def sampler(self) -> Any:
        """The sampler of single indices."""
        return self._order.sampler

    @property
    def batch_sampler(self) -> Any:
        """The sampler of batches: the one that was given, or this rank's."""
        return self._order.batch_sampler

    @property
    def batch_size(self) -> int | None:
        """Samples per step; None with a given ``batch_sampler``. Read-only: make a new loader for another."""
        return self._batch_size

    @property
    def drop_last(self) -> bool:
        """Whether an incomplete last batch is left out. Read-only."""
        return self._order.drops_last

    @property
    def num_workers(self) -> int:
        """How many workers read at the same time; 0 if the loop reads itself."""
        return self._pipeline.pool.num_workers

    @property
    def seed(self) -> int:
        """The seed of everything random."""
        return self._order.seed

    @property
    def pool(self) -> Pool:
        """Who reads."""
        return self._pipeline.pool

    @property
    def prefetch(self) -> int:
        """Batches in flight, from the next batch on."""
        return self._prefetch

    @prefetch.setter
    def prefetch(self, prefetch: int | None) -> None:
        self._pipeline.deepens = prefetch is None
        if prefetch is None:
            prefetch = 2 * self.num_workers
        if isinstance(prefetch, bool) or not hasattr(prefetch, "__index__"):
            raise TypeError(f"prefetch is {prefetch!r}; it must be an int, the number of batches in flight")
        self._prefetch = max(0, int(prefetch))
        # Without workers nothing is read ahead, whatever was asked for.
        self._pipeline.prefetch = self._prefetch if self.num_workers else 0

    @property
    def shard_weights(self) -> list[float] | None:
        """Shares of the shards, from the next batch dispatched on; None: equal ones."""
        return None if self._split.weights is None else list(self._split.weights)

    @shard_weights.setter
    def shard_weights(self, weights: Sequence[float] | None) -> None:
        if weights is None:
            self._split.weights = None
            return
        if self._split.num_shards is None:
            raise ValueError("shard_weights need shards: give devices=[...] or num_shards= as well")
        self._split.weights = check_shares(weights, self._split.num_shards)

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch in progress, or the one that the next ``iter`` begins."""
        return self._place()[0]

    @property
    def position(self) -> int:
        """Batches delivered in `epoch`."""
        return self._place()[1]

    def _place(self) -> tuple[int, int]:
        coming = self._order.next_epoch
        if self._shown is not None:
            run, then_coming, iterator = self._shown
            # After a break the place is kept, until set_epoch names another epoch.
            if not run.ended and (iterator() is not None or then_coming == coming):
                return run.epoch, run.delivered
        return coming, 0

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next ``iter`` begins.

        Args:
            epoch: number of an epoch, from 0.

        Raises:
            ValueError, TypeError: it is no such number.

        Example:
            >>> loader = ShardedDataLoader(range(10), 10, shuffle=True, seed=1)
            >>> first = next(iter(loader))
            >>> loader.set_epoch(0)
            >>> bool((next(iter(loader)) == first).all())
            True
        """
        self._order.set_epoch(epoch)

    def __len__(self) -> int:
        """Batches in `epoch` (with ``last_batch="rollover"`` not every epoch has the same number)."""
        return self._order.length(self.epoch)

    def __iter__(self) -> EpochIterator:
        """Begin the next epoch. Workers start at the first one."""
        self._pipeline.check_open()
        began = time.perf_counter()
        self._order.settle_replicas()
        epoch = self._order.next_epoch
        run = self._new_run(epoch)
        if self._pipeline.pool.shares_dataset:
            begin_epoch(self.dataset, epoch, self._runs())
        self._pipeline.open(run, self._job(), renew=self._stale)
        self._stale = False
        self._order.set_epoch(epoch + 1)
        order = self._order
        iterator = EpochIterator(self, run, self._pipeline, self._placement, self._meter, lambda: order.length(epoch))
        self._live.add(iterator)
        self._shown = (run, epoch + 1, weakref.ref(iterator))
        self._meter.waited(time.perf_counter() - began)
        return iterator

    def _new_run(self, epoch: int) -> Run:
        order = self._order
        number = self._pipeline.new_number()
        plan = EpochPlan(
            number,
            epoch,
            order.batches(epoch, arrays=self._batchify_fn is None and takes_arrays(self.dataset)),
            lambda batch: order.position(epoch, batch),
            length(self.dataset) if not isinstance(self.dataset, Mapping) else None,
            self._split,
            may_shard=order.given_batches,
        )
        return Run(number, epoch, plan)

    def _job(self) -> Job:
        return Job(self.dataset, self._batchify_fn, self._order.seed, self._on_error, keep_batch=self._order.replicated)

    def _runs(self) -> list[Run]:
        """The runs of the iterators that are alive."""
        return [iterator.run for iterator in self._live]

    # -- single batches and samples -------------------------------------------------------------------------

    def peek(self) -> Any:
        """The first batch of the next epoch, read here and now: starts no worker, counts no epoch.

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
        epoch = self._order.next_epoch
        plan = self._new_run(epoch).plan
        while (planned := plan.head()) is not None:
            if isinstance(planned, BaseException):
                raise planned
            task = plan.split(planned)
            with self._in_epoch(epoch):
                result = Reader(self._job()).read(task)
            if result.error is not None:
                raise result.error
            if result.batch is not NOTHING:
                return self._placement.finish(self._placement.begin(result.batch, task.sharded))
            plan.advance()
        raise IndexError(f"epoch {epoch} has no batches to peek at")

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
        epoch = self.epoch if epoch is None else epoch
        with self._in_epoch(epoch):
            return Reader(self._job()).read_sample(index, epoch)

    def _in_epoch(self, epoch: int) -> AbstractContextManager[None]:
        threads = self.num_workers and self._pipeline.pool.shares_dataset
        return in_epoch(self.dataset, epoch, self.epoch, self._runs() if threads else [])

    # -- life -----------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> list[tuple[Any, BaseException]]:
        """``(index, error)`` of the last 1,000 samples that ``on_error`` skipped or replaced."""
        return self._meter.skipped

    @property
    def num_skipped(self) -> int:
        """How many samples ``on_error`` has skipped or replaced."""
        return self._meter.num_skipped

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
        self._stale = True
        self._order.resize(length(self.dataset))

    def stats(self) -> LoaderStats:
        """Samples per second, the share of time spent waiting for data, where the time went.

        Example:
            >>> loader = ShardedDataLoader(range(10), 4)
            >>> for batch in loader: pass
            >>> loader.stats().samples
            10
        """
        return self._meter.report()

    def close(self) -> None:
        """Stop the workers. The loader cannot be used any more; batches that are held stay. Twice is fine.

        From any thread; one that waits in ``next`` gets a `LoaderClosedError`.

        Example:
            >>> with ShardedDataLoader(range(4), 2, num_workers=1, thread_pool=True) as loader:
            ...     next(iter(loader))
            tensor([0, 1])
        """
        self._pipeline.close()
        self._closer.detach()

    def __enter__(self) -> ShardedDataLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._pipeline.closed:
            return "ShardedDataLoader(closed)"
        size = length(self.dataset)
        parts = [f"{'?' if size is None else size} samples"]
        try:
            parts.append(f"{len(self)} batches" + (f" of {self.batch_size}" if self.batch_size else ""))
        except TypeError:
            parts.append("batches without number")
        if self._placement.devices is not None:
            parts.append("on " + ", ".join(map(str, self._placement.devices)))
        elif self._split.num_shards is not None:
            parts.append(f"{self._split.num_shards} shards")
        parts.append(repr(self.pool))
        parts.append(f"batch: {self._meter.looks or 'none read yet'}")
        return f"ShardedDataLoader({', '.join(parts)}; epoch {self.epoch}, at batch {self.position})"
