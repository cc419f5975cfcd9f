"""Hugging Face Accelerate: a loader that `Accelerator` knows as its own.

    loader = prepare(loader, accelerator)           instead of accelerator.prepare(loader)
    rest = skip_first_batches(loader, 100)          instead of accelerator.skip_first_batches(loader, 100)

`Accelerator.prepare` builds a loader of torch's from a loader that it is given, without this library's engine.
`prepare` builds one of the same class as before: batches on the accelerator's device, each rank its own, as Accelerate
shares them out (``even_batches``, ``split_batches``). While it is iterated over, it tells Accelerate where the epoch
ends, so the last gradient accumulation step is complete and ``gather_for_metrics`` drops what was filled up.
``accelerator.save_state`` and ``load_state`` keep the position, exactly.

The ranks get the same seed, from rank 0. Each rank reads all of iterable data and keeps its share: it is not known
beforehand where it ends. What can go wrong: a loader that has been iterated over already, or that deals samples to
ranks itself.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import Any

import accelerate.data_loader
import torch.utils.data
from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from accelerate.state import GradientState
from accelerate.utils import broadcast_object_list, find_batch_size, synchronize_rng_states
from torch.utils.data import IterableDataset, RandomSampler

from sharded_loader import ShardedDataLoader
from sharded_loader.drop_in.sampler import ShuffleSampler
from sharded_loader.drop_in.trainers import begin_loader, called_by, end_loader, note_prepared
from sharded_loader.extend.data import is_stream
from sharded_loader.extend.engine import placement_given
from sharded_loader.extend.order import announce_epoch, len_epoch, nested
from sharded_loader.extend.tools import an, warn
from sharded_loader.torch import DataLoader


class Prepared:
    """What Accelerate reads from a loader of its own; a mixin.

    Attributes:
        remainder: how many samples of the last batches of all ranks are no repetitions; 0: all of them. -1: unknown.
            Of iterable data: of the batches that were handed out last.
        total_batch_size: samples of a step, all ranks together.
        iteration: the epoch.
    """

    _is_accelerate_prepared = True
    use_stateful_dataloader = True  # accelerator.save_state() asks for state_dict()
    remainder = -1
    iteration = 0
    total_batch_size: int
    _given: dict[str, Any]
    _skips = 0
    _state: dict[str, Any] | None = None
    _synchronized: torch.Generator | None = None
    _is_last = _is_shared = False
    _share = 1.0

    @property
    def end_of_dataloader(self) -> bool:
        """The batch that was handed out last is the last one of the epoch.

        Several parts of iterable data end one after the other: to `gather_for_metrics`, each batch that was filled up
        is a last one.
        """
        filled = self._is_shared and self.remainder > 0
        return self._is_last or (filled and called_by("gather_for_metrics", "accelerate") is not None)

    def __iter__(self) -> Iterator[Any]:
        """The batches. Each is handed out when the next one has come, or the end: so it is known which is the last."""
        if self._synchronized is not None:
            synchronize_rng_states(["generator"], self._synchronized)
        gradient_state = GradientState()
        self._is_last, self.remainder = False, self._remainder()
        begin_loader(gradient_state, self)
        nothing: Any = object()
        try:
            left, self._skips = self._skip(self._skips), 0
            batches = super().__iter__()  # type: ignore[misc]
            if (passed := sum(1 for _ in islice(batches, left))) < left:
                text = f"{left} batches were to be left out, but the epoch has only {passed}: the checkpoint is in a"
                advice = "give the loader steps_per_epoch=, or the dataset a __len__"
                raise ValueError(f"{text} later epoch. Trainer cannot know this without a length: {advice}")
            batch = next(batches, nothing)
            while batch is not nothing:
                # The position that the user knows: the batch ahead is not handed out.
                self._state = super().state_dict()  # type: ignore[misc]
                self._share = getattr(getattr(self, "_progress", None), "share", 1.0)
                following = next(batches, nothing)
                if following is nothing:  # as Accelerate's own loaders: the next epoch begins after a resume
                    self._is_last, self._state = True, super().state_dict()  # type: ignore[misc]
                if self._is_shared:
                    self.remainder, batch = batch
                yield batch
                batch = following
            self.iteration += 1
        finally:
            self._state = None
            end_loader(gradient_state, self)

    def _skip(self, count: int) -> int:
        """Begin the next epoch behind its first ``count`` batches; how many of them have to be read for that."""
        return count

    def _remainder(self) -> int:
        for one in nested(self._given.get("batch_sampler")):
            if isinstance(one, RankBatches):
                return one.remainder(getattr(self, "epoch", self.iteration), self.dataset)  # type: ignore[attr-defined]
        return 0  # nothing is filled up

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was handed out last."""
        return super().state_dict() if self._state is None else self._state  # type: ignore[misc]

    def load_state_dict(self, state_dict: Mapping[str, object], *args: object, **kwargs: object) -> None:
        """Continue at a position; see the loader's own ``load_state_dict``."""
        self._state = None
        super().load_state_dict(state_dict, *args, **kwargs)  # type: ignore[misc]

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that begins next."""
        self.iteration = epoch
        super().set_epoch(epoch)  # type: ignore[misc]


class RankBatches(BatchSamplerShard):  # type: ignore[misc]
    """The batches of one rank. `set_epoch` reaches the sampler inside: transformers' `Trainer` calls it here."""

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that the next ``iter()`` begins."""
        announce_epoch(self.batch_sampler, epoch)

    def remainder(self, epoch: int, dataset: Any) -> int:
        """How many samples of the last step of an epoch, all ranks together, are no repetitions.

        Returns:
            0: all of them. -1: it is not known.
        """
        if self.drop_last:
            return 0
        inside = self.batch_sampler
        try:
            size = int(self.batch_size)
            samples = size * len_epoch(inside, epoch)
            if getattr(inside, "last_batch", None) != "rollover":  # the last batch may be short
                sampler = getattr(inside, "sampler", None)
                samples = min(samples, len(dataset) if sampler is None else len_epoch(sampler, epoch))
        except TypeError:  # batches of any size (None), or samplers without lengths
            return -1
        return samples % (size if self.split_batches else size * int(self.num_processes))


@dataclass
class RankShare:
    """Collates one rank's share of a batch that all ranks read. A batch that is not full is filled up with its samples.

    Attributes:
        collate_fn: collates the share.
        replicas, rank: how many ranks there are, and which one this is.
        size: samples of a share; None: the dataset yields batches, and a share is one of them.
    """

    collate_fn: Callable[[Any], object]
    replicas: int
    rank: int
    size: int | None

    def __call__(self, samples: list[Any]) -> tuple[int, object]:
        """How many samples of all ranks are no repetitions, 0: all of them; the batch of this rank."""
        size, count = self.size, len(samples)
        if size is None:
            filled = count < self.replicas
            return sum(map(find_batch_size, samples)) if filled else 0, self.collate_fn(samples[self.rank % count])
        begin = self.rank * size
        return count % (self.replicas * size), self.collate_fn(list(islice(cycle(samples), begin, begin + size)))


class PreparedDataLoader(Prepared, DataLoader[Any]):  # type: ignore[misc]
    """A `sharded_loader.torch.DataLoader` that Accelerate knows; `prepare` makes it."""

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value) if name in vars(Prepared) else super().__setattr__(name, value)


class PreparedShardedDataLoader(Prepared, ShardedDataLoader):  # type: ignore[misc]
    """A `ShardedDataLoader` that Accelerate knows; `prepare` makes it."""

    share: Any = property(lambda prepared: prepared._share)
    """That of the batch that was handed out last."""

    def _skip(self, count: int) -> int:
        if not count or self._order.stream is not None:
            return count
        epoch = self._order.epoch(self.epoch)
        self.load_state_dict(epoch.state(epoch.position(epoch.first + count)))
        return 0


def prepare(loader: Any, accelerator: Any, device_placement: bool | None = None) -> Any:
    """A loader for this rank, whose batches are on the accelerator's device.

    Args:
        loader: a `ShardedDataLoader`, or a `sharded_loader.torch.DataLoader`, that your program has not iterated over
            yet. It is the same on all ranks. It is closed.
        accelerator: an ``accelerate.Accelerator``.
        device_placement: put batches on the device. None: as the accelerator does.

    Returns:
        A loader of the same class. ``accelerator.prepare`` passes it through unchanged.

    Raises:
        TypeError: a loader of another library.
        ValueError: a loader that deals samples to ranks itself. Of iterable data, ``num_replicas`` is allowed: the
            dataset then yields a part of its own on each rank. ``split_batches`` with a ``batch_size`` that the ranks
            do not divide.

    Example:
        ```python
        from accelerate import Accelerator
        from sharded_loader.integrations.accelerate import prepare

        accelerator = Accelerator()
        model, optimizer = accelerator.prepare(model, optimizer)
        loader = prepare(loader, accelerator)
        ```

    Source of the idea: ``accelerate.data_loader.prepare_data_loader``.
    """
    for name in ("accelerate", "accelerate.data_loader", "accelerate.accelerator", "transformers.trainer"):
        module: Any = sys.modules.get(name)
        if getattr(module, "skip_first_batches", None) is _accelerates_own:
            module.skip_first_batches = _skip_first_batches
    if accelerator.dispatch_batches and accelerator.num_processes > 1:
        same = "each rank reads the data itself, and gets the same batches as if rank 0 had sent them"
        warn(f"dispatch_batches=True has no effect here: {same}")
    on_device = accelerator.device_placement if device_placement is None else device_placement
    if not isinstance(loader, DataLoader | ShardedDataLoader):
        text = f"prepare() takes a ShardedDataLoader or a sharded_loader.torch.DataLoader, not {an(type(loader))}"
        raise TypeError(f"{text}: give that to accelerator.prepare()")
    if not isinstance(loader, Prepared):
        make: Any = _prepare_drop_in if isinstance(loader, DataLoader) else _prepare_sharded
        loader = make(loader, accelerator, on_device)
    note_prepared(accelerator, loader)
    return loader


def skip_first_batches(loader: object, num_batches: int = 0) -> Any:
    """A loader whose next epoch begins ``num_batches`` later.

    Args:
        loader: what `prepare` has returned.
        num_batches: how many batches of the epoch that comes next to leave out. They are not read, except those of
            iterable data.

    Returns:
        The loader itself; or one of the same class with the same sampler, to read this epoch with: go on with
        ``loader`` then.
    """
    if not isinstance(loader, Prepared):
        raise TypeError(f"skip_first_batches() takes what prepare() has returned, not {an(type(loader))}")
    batch_sampler = loader._given.get("batch_sampler")
    if isinstance(loader, ShardedDataLoader) or batch_sampler is None:
        loader._skips = num_batches
        return loader
    given = {**loader._given, "batch_sampler": SkipBatchSampler(batch_sampler, skip_batches=num_batches)}
    rest = _made(type(loader), given, loader.total_batch_size, loader._synchronized)
    rest.iteration = loader.iteration
    return rest


_accelerates_own = accelerate.data_loader.skip_first_batches


def _skip_first_batches(dataloader: object, num_batches: int = 0) -> Any:
    """Stands in for Accelerate's function, which would read the rest of the epoch with torch's loader."""
    own = skip_first_batches if isinstance(dataloader, Prepared) else _accelerates_own
    return own(dataloader, num_batches)


def _prepare_drop_in(loader: DataLoader[Any], accelerator: Any, on_device: bool) -> Prepared:
    if isinstance(loader._reads, ShardedDataLoader):
        raise ValueError("prepare() needs torch's order of a sharded_loader.torch.DataLoader: make a ShardedDataLoader")
    names = inspect.signature(DataLoader.__init__).parameters
    given = {name: getattr(loader, name) for name in names if hasattr(loader, name)}
    if loader._scales_prefetch:
        del given["prefetch_factor"]
    replicas, batch_sampler, synchronized = accelerator.num_processes, loader.batch_sampler, None
    if on_device:
        given["device"] = accelerator.device
    if isinstance(loader.dataset, IterableDataset):
        given["sampler"] = given["batch_sampler"] = None
        if replicas > 1:
            synchronized = getattr(loader.dataset, "generator", None)
            given.update(_share(loader, accelerator, given))
    elif batch_sampler is not None:
        given.update(batch_size=1, drop_last=False, sampler=None, shuffle=None)
        synchronized = _same_order(batch_sampler, replicas)
        if replicas > 1:
            given["batch_sampler"] = _shard(batch_sampler, accelerator, loader.drop_last)
    elif replicas > 1:
        raise ValueError("batch_size=None cannot be shared out to ranks: give a batch_size")
    size = loader.batch_size or getattr(batch_sampler, "batch_size", None) or 1
    total = size * (1 if accelerator.split_batches else replicas)
    return _made(PreparedDataLoader, given, total, synchronized)


def _prepare_sharded(loader: ShardedDataLoader, accelerator: Any, on_device: bool) -> Any:
    given = dict(loader.arguments)
    divided = any(given.get(name) is not None for name in ("num_replicas", "mesh"))
    if divided and not is_stream(loader.dataset):
        raise ValueError("num_replicas and prepare() would share out the samples twice: leave out num_replicas")
    replicas, whole = accelerator.num_processes, given.get("global_batch")
    given["seed"] = broadcast_object_list([loader.seed])[0] if replicas > 1 else loader.seed
    loader.close()  # its pool, if it was given one, is the new loader's
    device, devices, placement = placement_given(given.get("device"), given.get("devices"))
    if on_device and all(one is None for one in (device, devices, given.get("num_shards"))):
        given["device"] = replace(placement, device=accelerator.device)
        given.pop("devices", None)
    if is_stream(loader.dataset):
        if replicas > 1 and not divided:
            given.pop("batchify_fn", None)
            given.update(_share(loader, accelerator, given))
    elif replicas > 1 and whole is not None:
        given.update(num_replicas=replicas, rank=accelerator.process_index)
    elif replicas > 1:
        none = dict.fromkeys(("pool", "device", "timeout"))
        order = ShardedDataLoader(**{**given, **none, "num_workers": 0, "thread_pool": False})
        for name in ("batch_size", "shuffle", "sampler", "last_batch", "drop_last"):
            given.pop(name, None)
        given["batch_sampler"] = _shard(order.batch_sampler, accelerator, loader.drop_last)
    total = int(whole or 0) or (loader.batch_size or 1) * (1 if accelerator.split_batches else replicas)
    prepared: Any = _made(PreparedShardedDataLoader, given, total)
    prepared.prefetch_epochs = loader.prefetch_epochs
    return prepared


def _made(kind: Any, given: dict[str, Any], total: int, synchronized: torch.Generator | None = None) -> Prepared:
    prepared: Prepared = kind(**given)
    prepared._given, prepared._synchronized, prepared.total_batch_size = given, synchronized, total
    prepared._is_shared = isinstance(given.get("collate_fn"), RankShare)
    return prepared


def _share(loader: Any, accelerator: Any, given: Mapping[str, object]) -> dict[str, object]:
    """Arguments for iterable data: the batches of all ranks, of which this rank keeps its share."""
    replicas, size = accelerator.num_processes, loader.batch_size
    if given.get("devices") or given.get("num_shards"):
        raise ValueError("iterable data cannot be shared out to ranks and to shards: leave out devices and num_shards")
    if size and accelerator.split_batches:
        if size % replicas:
            raise ValueError(
                f"split_batches=True cannot split a batch of {size} among {replicas} ranks: give a multiple"
            )
        size //= replicas
    share = RankShare(loader.collate_fn, replicas, accelerator.process_index, size)
    return {"batch_size": (size or 1) * replicas, "collate_fn": share}


def _shard(batch_sampler: Any, accelerator: Any, drop_last: bool) -> RankBatches:
    ranks = accelerator.num_processes, accelerator.process_index
    shard = RankBatches(batch_sampler, *ranks, accelerator.split_batches, accelerator.even_batches)
    shard.drop_last = drop_last
    return shard


def _same_order(batch_sampler: object, replicas: int) -> torch.Generator | None:
    """See to it that all ranks draw the same order, and that ``skip_first_batches`` can draw it again.

    Returns:
        The generator to synchronise at each epoch, if there is one.
    """
    for one in nested(batch_sampler):
        if type(one) is ShuffleSampler and one.generator is None:
            one.seed = broadcast_object_list([one.begin_state()["next"][0] if one.seed is None else one.seed])[0]
            return None
        if isinstance(one, RandomSampler) and replicas > 1:
            if one.generator is None:
                one.generator = torch.Generator()
                one.generator.manual_seed(int(torch.empty((), dtype=torch.int64, device="cpu").random_().item()))
            return one.generator  # type: ignore[no-any-return]
    return None
