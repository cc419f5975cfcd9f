"""Attributes of a loader: arguments that may change while it runs, statistics, and its position as a state.

Many have the names that other libraries look for. The parts belong to the loader; nothing is owned here. Wrong values
and states are rejected with an error. Anything that decides the samples or their order is read-only.
"""

from __future__ import annotations

import functools
import inspect
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ParamSpec

from sharded_loader.base.imports import provided
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.engine.pipeline import PER_WORKER
from sharded_loader.engine.pool import Pool
from sharded_loader.loader import arguments
from sharded_loader.loader.epochs import At, Epochs
from sharded_loader.loader.lookup import LookUp
from sharded_loader.sampling.state import has_weights
from sharded_loader.streams.order import StreamOrder

if TYPE_CHECKING:
    from sharded_loader.instruments.report import Instruments
else:
    Instruments = provided("methods", "instruments")

Given = ParamSpec("Given")

NO_WEIGHTS = (
    "set_weights needs what interleave() returned for datasets that are read by index, or a transform of it, as the "
    "dataset of a loader without a sampler and without shuffle=True. Make it with interleave(..., shuffle=True), or "
    "with a schedule, weights=[(0, [...])]. Iterable data can only have a schedule that is given from the start"
)


def _context(loader: Any) -> Any:
    if isinstance(loader._order, StreamOrder):
        provided("trainer", "skipping")(loader)
    method = getattr(loader._workers, "start_method", None)
    return None if method is None else multiprocessing.get_context(method)


shown: Any = property
"""Read-only attribute of a loader, defined by a function of the loader."""


def keeps_arguments(init: Callable[Given, None]) -> Callable[Given, None]:
    """Wrap a loader's constructor so that it records its arguments; see `LoaderAttributes.arguments`."""
    signature = inspect.signature(init)

    @functools.wraps(init)
    def keep(*args: Given.args, **named: Given.kwargs) -> None:
        init(*args, **named)
        given = signature.bind(*args, **named).arguments
        loader, names = given.pop("self"), given.pop("names", {})
        loader._arguments = MappingProxyType({**given, **names})

    return keep


class LoaderAttributes(Instruments):
    """Attributes of a `ShardedDataLoader`, which creates the parts."""

    _arguments: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, epochs: Epochs, observer: Any, batch_size: int | None, pin_memory: bool) -> None:
        self._meter = observer
        self._epochs, self._known_steps = epochs, LookUp(epochs)
        self._progress = epochs.progress
        self._batch_size, self._pin_memory = batch_size, pin_memory
        self._order, self._pipeline, self._placement = epochs.order, epochs.pipeline, epochs.placement
        self._workers, self._split = epochs.pipeline.pool, epochs.pipeline.split

    dataset: Any = shown(lambda loader: loader._epochs.dataset)
    """Dataset, as it is read."""

    sampler: Any = shown(lambda loader: loader._order.sampler)
    """Sampler of single indices."""

    batch_size: int | None = shown(lambda loader: loader._batch_size)
    """Samples per step; None with a ``batch_sampler``. Read-only: `rescale` changes it."""

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

    def _resized(self, num_replicas: int, rank: int, batch_size: int | None) -> None:
        given = {**self._arguments, "num_replicas": num_replicas, "rank": rank}
        given.pop("mesh", None)
        if self._batch_size is None:
            given["batch_sampler"] = self._order.batch_sampler
        elif batch_size is not None:
            given["batch_size"] = self._batch_size = batch_size
        self._arguments = MappingProxyType(given)

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
        """Number of batches copied to the accelerators in advance, from the next batch on: 2, or 0 without
        accelerators.
        """
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
        if not has_weights(sampler):
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

        With several iterators, the one that began or delivered last counts. The position is one in the order that all
        ranks share: one rank saves, any number of ranks load.

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
        self._epochs.load(state, strict, skip, self._known_steps.digest)

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
