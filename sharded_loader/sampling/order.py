"""The order of a loader: every epoch's batches, for this rank, as a pure function of the epoch.

    sampler, batch_size, last_batch  or  batch_sampler
        -> EpochOrder.read(epoch, position) -> EpochReading

Also the one place that knows which epoch comes next. The samplers that the user gave belong to the user: the order
reads them as functions of (seed, epoch), and changes nothing in them, so several loaders may share one. Where a sampler
has no seed of its own and the loader has one, the order reads a copy of it. ``set_epoch`` may be called on the order,
or on any of the samplers in it (`sharded_loader.sampling.base`).

What can go wrong: arguments that contradict each other; a state that belongs to another order.
"""

from __future__ import annotations

import sys
import warnings
import zlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from sharded_loader.rng import draw_seed
from sharded_loader.sampling.base import (
    DrawnSeed,
    EpochRequests,
    Sampler,
    check_int,
    check_sampler,
    find_foreign,
    is_own,
    nested,
    with_seeds,
)
from sharded_loader.sampling.batch_samplers import BatchSampler
from sharded_loader.sampling.foreign import known_length, len_epoch, undisturbed
from sharded_loader.sampling.index_samplers import RandomSampler, SequentialSampler
from sharded_loader.sampling.reading import EpochReading, Source
from sharded_loader.sampling.replicas import ReplicaSampler, SplitSampler, resolve_replicas
from sharded_loader.sampling.state import SUM, Position, Signature, differences, other_arguments, out_of_epoch


class EpochOrder:
    """Builds the samplers that a loader's arguments ask for, and reads their epochs.

    Args:
        length: samples in the dataset.
        batch_size, shuffle, sampler, last_batch, batch_sampler, num_replicas, rank, seed: as the loader's.

    Attributes:
        arrays: batches may be int64 arrays instead of lists, from the next epoch on.

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
        self.replicated = num_replicas is not None or rank is not None
        if num_replicas == "auto" and rank is not None:
            raise ValueError(f'num_replicas="auto" finds the rank itself: leave out rank={rank!r}')
        if num_replicas != "auto":
            num_replicas, rank = resolve_replicas(num_replicas, rank)
        self._replicas: tuple[Any, Any] = num_replicas, rank
        if self._replicas != (1, 0):
            _refuse_distributed_sampler(sampler, batch_sampler)
        decides = seed is not None or self.replicated
        if seed is None:
            seed = 0 if self.replicated else draw_seed()
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer, or None")
        self._last_batch = last_batch or "keep"
        self._batch_size = batch_size
        self._shuffle = shuffle
        self.given_batches = batch_sampler is not None
        self._user = batch_sampler if self.given_batches else sampler
        if self._user is not None:
            check_sampler(self._user, "batch_sampler" if self.given_batches else "sampler")
        self.drops_last = last_batch == "discard" or bool(
            self.given_batches
            and (getattr(batch_sampler, "drop_last", False) or getattr(batch_sampler, "last_batch", "") == "discard")
        )
        # What is read: the user's sampler, or a copy with other seeds.
        self._read = self._user
        # By position in the chain: whether a sampler has no seed of its own, and takes the loader's or that of a state.
        self._seedless = [isinstance(getattr(one, "seed", None), DrawnSeed) for one in self._given]
        if decides:
            self._reseed([self.seed if seedless else None for seedless in self._seedless])
        self._arguments = _arguments(self._given)
        self._settled = False
        self.arrays = False
        self._next_epoch = 0
        self._requests = EpochRequests()
        self.resize(length)

    @property
    def _given(self) -> list[Any]:
        """The samplers that the user gave, as they are read: the outermost first."""
        return [] if self._read is None else list(nested(self._read))

    def _reseed(self, seeds: Sequence[int | None]) -> None:
        """Read the given samplers with these seeds; None leaves a sampler its own."""
        wanted = {id(one): seed for one, seed in zip(self._given, seeds, strict=True)}
        self._read = with_seeds(self._read, lambda one: wanted.get(id(one)))

    def resize(self, length: int | None) -> None:
        """Make the loader's samplers again, for a dataset of this length; the epoch that comes next stays."""
        self._next_epoch = self.next_epoch
        self.dataset_length = length
        self.sampler: Any
        self.batch_sampler: Any
        if self.given_batches:
            self.batch_sampler = self._read
            _, *inner = self._given
            self.sampler = inner[-1] if inner else None
        else:
            self.sampler = indices = self._read if self._user is not None else self._make_sampler(length)
            if self.replicated:
                indices = ReplicaSampler(
                    self.sampler, lambda: self.replicas(), self._last_batch == "discard", self.seed
                )
            self.batch_sampler = BatchSampler(indices, self._batch_size, self._last_batch, seed=self.seed)
        # set_epoch may be called on the samplers that the user gave, and on those that the loader shows.
        chains = (self._user, self.batch_sampler, self.sampler)
        listened = [one for chain in chains if chain is not None for one in nested(chain)]
        self._requests.listen(listened)

    def _make_sampler(self, length: int | None) -> Sampler[int]:
        if length is None:
            raise TypeError(
                "the dataset has no __len__: give it one, or give the loader a sampler that knows the indices"
            )
        return RandomSampler(length, seed=self.seed) if self._shuffle else SequentialSampler(length)

    def undisturbed(self, but: Any) -> AbstractContextManager[None]:
        """Inside, the samplers may be read; afterwards those of other libraries are what they were before.

        Args:
            but: an object that is not copied where a sampler refers to it: the dataset.
        """
        found = [*nested(self.batch_sampler), *([] if self.sampler is None else nested(self.sampler))]
        return undisturbed([one for one in found if not is_own(one)], but)

    # -- state ----------------------------------------------------------------------------------------------

    @property
    def _items(self) -> Any:
        """The sampler of the global order: of samples, or of batches."""
        return self.batch_sampler if self.given_batches else self.sampler

    def signature(self, epoch: int) -> Signature:
        """What a position in this order is a position in."""
        return Signature(
            seed=self.seed,
            dataset_length=self.dataset_length,
            sampler=_kind(self._items),
            # Samplers of other libraries may have another length when they are read.
            sampler_length=known_length(self._items, epoch) if find_foreign(self._items, 0)[0] is None else None,
            sampler_seeds=tuple(map(_seed_of, self._given)),
            batch_size=None if self.given_batches else self.batch_sampler.batch_size,
            last_batch=None if self.given_batches else self._last_batch,
            sampler_arguments=self._arguments,
        )

    def differences(self, saved: Signature, place: Position, strict: bool) -> list[str]:
        """Why a state does not fit; none if `adopt` can make it fit."""
        own = self.signature(place.epoch)
        found = differences(saved, own, strict)
        if not found and own.sampler_length is None and own.last_batch == "rollover":
            outside = out_of_epoch(saved, len_epoch(self.sampler, place.epoch), place.epoch, place.done)
            found += [] if outside is None else [f"the state has {outside}"]
        if strict and place.done:
            found += other_arguments(saved, own)
        if not found and len(saved.sampler_seeds) != len(self._given):
            found.append("the sampler was made by the loader, and is given; or the other way round")
        if not found:
            for one, seedless, seed in zip(self._given, self._seedless, saved.sampler_seeds, strict=True):
                if _seed_of(one) != seed and (seed is None or not seedless):
                    found.append(f"the seed of the {type(one).__name__} was {seed}, and is {_seed_of(one)}")
        return found

    def adopt(self, saved: Signature) -> bool:
        """Take over the seeds of a state that fits, and say whether they differ from the ones before."""
        own = [_seed_of(one) for one in self._given]
        seeds = [None if seed == before else seed for before, seed in zip(own, saved.sampler_seeds, strict=True)]
        if saved.seed == self.seed and not any(seed is not None for seed in seeds):
            return False
        self.seed = saved.seed
        self._reseed(seeds)
        self.resize(self.dataset_length)
        return True

    # -- replicas -------------------------------------------------------------------------------------------

    def replicas(self) -> tuple[int, int]:
        """``(num_replicas, rank)``, as far as is known now."""
        return resolve_replicas(*self._replicas)

    def settle_replicas(self) -> None:
        """An epoch begins: what ``"auto"`` means is not asked again; ranks that would repeat each other are warned."""
        self._replicas = self.replicas()
        if not self._settled:
            self._settled = True
            self._warn_if_ranks_repeat()

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch that comes next: as the loader counts, or as ``set_epoch`` of a sampler has asked."""
        asked = self._requests.take()
        if asked is not None:
            self._next_epoch = asked
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next."""
        self._next_epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        self._requests.drop()

    @property
    def rolls_over(self) -> bool:
        """Whether samples of an incomplete last batch begin the next epoch."""
        return self._last_batch == "rollover"

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, epoch: int, position: Position | None = None) -> EpochReading:
        """The epoch's batches for this rank, from a position on.

        What it reads is settled now, not when it is read: `resize` may come in between.
        """
        source = Source(self._items, self.signature(epoch), *self.replicas(), self.replicated, self.arrays)
        return EpochReading(source, epoch, position)

    def length(self, epoch: int) -> int:
        """How many batches the epoch has for this rank."""
        return self.read(epoch).length()

    def _warn_if_ranks_repeat(self) -> None:
        """Inside a process group whose ranks would all read the same samples."""
        distributed = sys.modules.get("torch.distributed")
        if self.replicated or distributed is None:
            return
        if not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1):
            return
        used = [self.sampler, *nested(self.batch_sampler)]
        if any(hasattr(one, "num_replicas") or isinstance(one, SplitSampler) for one in used):
            return
        warnings.warn(
            f"this process is one of {distributed.get_world_size()} ranks, and each reads the whole dataset: "
            f'give num_replicas="auto" to share it out, or num_replicas=1 if that is meant',
            stacklevel=4,
        )


def _arguments(samplers: Iterable[Any]) -> tuple[tuple[str, Any], ...]:
    """What decides the order of our own samplers beside seed and length: numbers and words; of arrays a checksum."""
    return tuple(
        (f"{type(one).__name__}.{name}", _told(getattr(one, attribute)))
        for one in samplers
        if isinstance(one, Sampler) and is_own(one)
        for name, attribute in one.decided_by
    )


def _told(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    parts = value if isinstance(value, list) and value and isinstance(value[0], np.ndarray) else [value]
    checksum = 0
    for part in parts:
        array = np.asarray(part)
        # The same for equal numbers of another dtype; 3 ms for a million weights, once.
        checksum = zlib.crc32(array.astype("<f8" if array.dtype.kind == "f" else "<i8", copy=False).tobytes(), checksum)
    return f"{SUM}{checksum:08x}"


def _kind(sampler: Any) -> str:
    """The classes of a sampler and those inside it. Classes of torch have the name of the package in front."""
    names = []
    for one in nested(sampler):
        package = type(one).__module__.partition(".")[0]
        names.append(f"torch.{type(one).__name__}" if package == "torch" else type(one).__name__)
    return "(".join(names) + ")" * (len(names) - 1)


def _seed_of(sampler: Any) -> int | None:
    seed = getattr(sampler, "seed", None)
    return int(seed) if isinstance(seed, int) else None


def _check_arguments(batch_size: Any, shuffle: Any, sampler: Any, last_batch: Any, batch_sampler: Any) -> None:
    if batch_sampler is not None:
        if isinstance(batch_sampler, int):
            raise TypeError(
                f"batch_sampler is {batch_sampler!r}, a number. By position it comes after last_batch, as in GluonNLP, "
                "not in torch's order: write the names, such as num_workers="
            )
        if batch_size is not None or shuffle or sampler is not None or last_batch is not None:
            raise ValueError(
                "batch_size, shuffle, sampler and last_batch must not be specified if batch_sampler is specified: "
                "it decides all of that"
            )
        return
    if last_batch not in (None, "keep", "discard", "rollover"):
        raise ValueError(f'last_batch is {last_batch!r}; it must be "keep", "discard" or "rollover"')
    if batch_size is None:
        raise ValueError("batch_size must be specified unless batch_sampler is specified")
    if sampler is not None and shuffle:
        raise ValueError("shuffle must not be specified if sampler is specified: the sampler decides the order")


def _refuse_distributed_sampler(*samplers: Any) -> None:
    torch_data = sys.modules.get("torch.utils.data")
    kind = getattr(torch_data, "DistributedSampler", None)
    for sampler in samplers:
        for one in nested(sampler):
            if kind is not None and isinstance(one, kind):
                raise ValueError(
                    "num_replicas and a torch DistributedSampler would share out the samples twice: "
                    "leave out one of the two"
                )
