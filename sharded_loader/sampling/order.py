"""The order of a loader: every epoch's batches, for this rank, as a pure function of the epoch.

    sampler, batch_size, last_batch  or  batch_sampler
        -> dealt out to replicas -> batches -> EpochOrder.batches(epoch, start)

Also the one place that knows which epoch comes next. `set_epoch` may be called on the order, or on any of
the samplers in it (timm, Lightning and accelerate call it there): `next_epoch` looks whether one of them has
been given another epoch since the order last told them theirs.

What can go wrong: a foreign sampler that is told its epoch while it is read changes the epoch that it shows;
that is not a user's wish, and is put back (`_watched`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from sharded_loader.rng import draw_seed
from sharded_loader.sampling.base import check_int
from sharded_loader.sampling.batches import BatchSampler
from sharded_loader.sampling.foreign import check_sampler, is_own, iter_epoch, len_epoch
from sharded_loader.sampling.replicas import ReplicaBatchSampler, ReplicaSampler, resolve_replicas
from sharded_loader.sampling.samplers import RandomSampler, SequentialSampler


class EpochOrder:
    """Builds the samplers that a loader's arguments ask for, and reads their epochs.

    Args:
        length: samples in the dataset.
        batch_size, shuffle, sampler, last_batch, batch_sampler, num_replicas, rank, seed: as the loader's.

    Raises:
        ValueError, TypeError: arguments that contradict each other (Gluon's three among them).
    """

    def __init__(
        self,
        length: int | None,
        *,
        batch_size: Any,
        shuffle: bool,
        sampler: Any,
        last_batch: str | None,
        batch_sampler: Any,
        num_replicas: Any,
        rank: Any,
        seed: int | None,
    ) -> None:
        _check_arguments(batch_size, shuffle, sampler, last_batch, batch_sampler)
        self._replicas = (num_replicas, rank)
        self.replicated = num_replicas is not None or rank is not None
        if num_replicas != "auto":
            resolve_replicas(num_replicas, rank)
        if self.replicated and (num_replicas, rank) not in ((1, None), (1, 0)):
            _refuse_distributed_sampler(sampler, batch_sampler)
        if seed is None:
            seed = 0 if self.replicated else draw_seed()
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer, or None")
        self._last_batch = last_batch or "keep"
        self._batch_size = batch_size
        self._shuffle = shuffle
        self._given_sampler = sampler is not None
        self.sampler: Any = sampler
        self.batch_sampler: Any = batch_sampler
        self._own_batches = batch_sampler is None
        if self._own_batches:
            if sampler is not None:
                check_sampler(sampler)
            self.resize(length)
        else:
            check_sampler(batch_sampler, "batch_sampler")
            self._source = batch_sampler
            if self.replicated:
                self._source = ReplicaBatchSampler(batch_sampler, *self._lazy_replicas(), seed=self.seed)
            self.sampler = getattr(batch_sampler, "sampler", None)
            self._told: dict[int, Any] = {}
            self._next_epoch = 0
            self._tell(0)

    def resize(self, length: int | None) -> None:
        """Make the samplers anew for a dataset of this length; the epoch to come stays."""
        if not self._own_batches:
            return
        if not self._given_sampler:
            if length is None:
                raise TypeError(
                    "the dataset has no __len__: give it one, or give the loader a sampler that knows the indices"
                )
            self.sampler = RandomSampler(length, seed=self.seed) if self._shuffle else SequentialSampler(length)
        indices = self.sampler
        if self.replicated:
            indices = ReplicaSampler(
                self.sampler, *self._lazy_replicas(), truncate=self._last_batch == "discard", seed=self.seed
            )
        self._source = self.batch_sampler = BatchSampler(indices, self._batch_size, self._last_batch, seed=self.seed)
        self._told = {}
        self._next_epoch = getattr(self, "_next_epoch", 0)
        self._tell(self._next_epoch)

    def _lazy_replicas(self) -> tuple[Any, Any]:
        """What the replica samplers are given: resolved at first use, when the process group is up."""
        return (lambda: self.replicas()[0]), (lambda: self.replicas()[1])

    def replicas(self) -> tuple[int, int]:
        """``(num_replicas, rank)``; looked up once if they were given as ``"auto"``."""
        self._replicas = resolve_replicas(*self._replicas)
        return self._replicas

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch that comes next."""
        for holder in self._holders():
            told = self._told.get(id(holder))
            shown = holder.epoch
            if shown != told and isinstance(shown, int):
                self._tell(shown)
                break
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next."""
        self._tell(check_int("epoch", epoch, 0, "epochs count from 0", ValueError))

    def _tell(self, epoch: int) -> None:
        self._next_epoch = epoch
        for holder in self._holders():
            if holder.epoch != epoch:
                holder.set_epoch(epoch)
            self._told[id(holder)] = holder.epoch

    def _holders(self) -> list[Any]:
        """The samplers that a user may call ``set_epoch`` on and that show the epoch they were given."""
        found: list[Any] = []
        for sampler in (self.batch_sampler, getattr(self.batch_sampler, "batch_sampler", None), self.sampler):
            if hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
                found.append(sampler)
        return found

    # -- reading --------------------------------------------------------------------------------------------

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """The batches of an epoch from number ``start`` on, for this rank."""
        return self._watched(epoch, start)

    def _watched(self, epoch: int, start: int) -> Iterator[Any]:
        foreign = [holder for holder in self._holders() if not is_own(holder)]
        if not foreign:
            yield from iter_epoch(self._source, epoch, self.seed, start)
            return
        batches: Iterator[Any] | None = None
        while True:
            shown = [holder.epoch for holder in foreign]
            if batches is None:
                batches = iter_epoch(self._source, epoch, self.seed, start)
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                for holder, before in zip(foreign, shown, strict=True):
                    if holder.epoch != before:
                        holder.set_epoch(before)
            yield batch

    def length(self, epoch: int) -> int:
        """How many batches the epoch has for this rank."""
        return len_epoch(self._source, epoch)

    def position(self, epoch: int, batch: int) -> int:
        """Where in the epoch's global order the batch begins: of samples, or of batches if they were given."""
        replicas, rank = self.replicas()
        if not self._own_batches or self._batch_size is None:
            return batch * replicas + rank
        return batch * int(self._batch_size) * replicas + rank

    def warn_if_ranks_repeat(self) -> str | None:
        """What to warn of, inside a process group whose ranks would all read the same samples."""
        distributed = sys.modules.get("torch.distributed")
        if self.replicated or distributed is None:
            return None
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return None
        if any(hasattr(one, "num_replicas") for one in (self.sampler, self.batch_sampler)):
            return None
        return (
            f"this process is one of {distributed.get_world_size()} ranks, and each reads the whole dataset: "
            f'give num_replicas="auto" to share it out, or num_replicas=1 if that is meant'
        )


def _check_arguments(batch_size: Any, shuffle: Any, sampler: Any, last_batch: Any, batch_sampler: Any) -> None:
    if batch_sampler is not None:
        if batch_size is not None or shuffle or sampler is not None or last_batch is not None:
            raise ValueError(
                "batch_size, shuffle, sampler and last_batch must not be specified if batch_sampler is specified: "
                "it decides all of that"
            )
        return
    if batch_size is None:
        raise ValueError("batch_size must be specified unless batch_sampler is specified")
    if sampler is not None and shuffle:
        raise ValueError("shuffle must not be specified if sampler is specified: the sampler decides the order")


def _refuse_distributed_sampler(*samplers: Any) -> None:
    torch_data = sys.modules.get("torch.utils.data")
    kind = getattr(torch_data, "DistributedSampler", None)
    for sampler in samplers:
        for one in (sampler, getattr(sampler, "sampler", None)):
            if kind is not None and isinstance(one, kind):
                raise ValueError(
                    "num_replicas and a torch DistributedSampler would share out the samples twice: "
                    "leave out one of the two"
                )
