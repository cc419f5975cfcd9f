"""The samplers that a loader makes, and how they combine with those of the user (`Sampling`).

Each epoch is a table, a pure function of (seed, epoch), with constant-time access. Shuffles of up to 16 M indices are
computed when the epoch is opened.

With ``last_batch="rollover"`` the endless sequence of epochs is cut into batches. With N items per epoch and B per
batch, epoch e owns batches floor(e*N/B) to floor((e+1)*N/B) - 1: of 5 items in batches of 2, epoch 0 owns batches 0
and 1, and epoch 1 owns 2 to 4. These are Gluon's batches, but independent of earlier iteration.

Invalid or contradictory arguments are rejected in the constructors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

from sharded_loader.base.checks import check_choice, check_int
from sharded_loader.base.imports import provided
from sharded_loader.randomness.rng import MAX_LENGTH, Indices, shuffle
from sharded_loader.sampling import base
from sharded_loader.sampling.base import DrawnSeed, Sampler, WrapperSampler, is_own, nested, resolve_seed
from sharded_loader.sampling.state import arguments_of, has_weights
from sharded_loader.sampling.tables import BLOCK, BatchedTable, Rollover, StridedTable, Table, parts
from sharded_loader.sampling.third_party import known_length, len_epoch, name_of, table_of

LAST_BATCH = ("keep", "discard", "rollover")

kept_shuffle = lru_cache(maxsize=1)(shuffle)
"""`shuffle`, which keeps the last order, as ``loader.indices`` asks for one step after the other."""


def check_length(length: object) -> int:
    return check_int("length", length, 0, "give the number of samples, len(dataset)")


class IndexSampler(Sampler[int]):
    """Base class of samplers with a fixed length; subclasses map positions to indices."""

    _length: int
    _order: Callable[[int], Callable[[Indices], Indices]]
    """Returns a function from positions to indices of an epoch. Arrays for the whole epoch are computed then."""

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._order(epoch), BLOCK)

    def len_epoch(self, epoch: int) -> int:
        return self._length


class SequentialSampler(IndexSampler):
    """Indices in order: start, start + 1, ... start + length - 1.

    Args:
        length: number of samples.
        start: first index.

    Raises:
        TypeError, ValueError: if ``length`` is not an integer or negative.

    Example:
        >>> list(SequentialSampler(4, start=3))
        [3, 4, 5, 6]

    Source of the idea: `mxnet.gluon.data.SequentialSampler`.
    """

    decided_by = (("start", "_first"),)

    def __init__(self, length: int, start: int = 0) -> None:
        self._length = check_length(length)
        self._first = check_int("start", start, -MAX_LENGTH, "give the first index")

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return lambda positions: positions + self._first


class RandomSampler(IndexSampler):
    """Every index once per epoch, in a new random order each epoch.

    Up to 2**24 (16 M) indices the order is one array; above, each position is computed in constant memory (see
    `sharded_loader.randomness.rng`).

    Args:
        length: number of samples, up to 2**62.
        seed: integer that, with the epoch, decides the order. None draws one from torch's default generator.

    Raises:
        TypeError, ValueError: if ``length`` is not an integer, negative, or above 2**62.

    Example:
        >>> sampler = RandomSampler(10**12, seed=7)
        >>> len(sampler)
        1000000000000
        >>> next(sampler.iter_epoch(0, start=10**11)) < 10**12
        True

    Source of the idea: `mxnet.gluon.data.RandomSampler`.
    """

    def __init__(self, length: int, seed: int | None = None) -> None:
        self._length = check_length(length)
        if self._length > MAX_LENGTH:
            text = f"RandomSampler shuffles up to 2**62 samples, got length={self._length}"
            raise ValueError(f"{text}: use SequentialSampler, or SplitSampler over parts")
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return kept_shuffle(self._length, self.seed, "order", epoch)


# -- batches -----------------------------------------------------------------------------------------------------------


class BatchSampler(WrapperSampler[list[int]]):
    """Batches of ``batch_size`` items of another sampler.

    Args:
        sampler: any sampler, or a re-iterable object.
        batch_size: items per batch.
        last_batch: treatment of items that do not fill a batch: ``"keep"`` yields a smaller batch, ``"discard"`` drops
            them, ``"rollover"`` moves them to the start of the next epoch.
        seed: seed of a third-party ``sampler``, such as torch's. None draws one from torch's default generator if
            needed.

    Raises:
        TypeError, ValueError: for a ``batch_size`` that is not an integer of at least 1, an unknown ``last_batch``, and
            a ``sampler`` that can be read only once.

    Example:
        >>> from sharded_loader import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(5), 2, "rollover")
        >>> list(batches), list(batches)
        ([[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]])

    Source of the idea: `mxnet.gluon.data.BatchSampler`.
    """

    decided_by = (("batch_size", "batch_size"), ("last_batch", "last_batch"))
    cut_by = sized_by = ("batch_size",)
    yields_batches = True
    sampler: Iterable[Any]

    def __init__(
        self, sampler: Iterable[object], batch_size: int, last_batch: str = "keep", *, seed: int | None = None
    ) -> None:
        self.batch_size = check_int("batch_size", batch_size, 1, "give the number of samples in a batch")
        self.last_batch = check_choice("last_batch", last_batch, LAST_BATCH, "BatchSampler")
        super().__init__(sampler, seed)

    @property
    def drop_last(self) -> bool:
        """torch's name for ``last_batch == "discard"``."""
        return self.last_batch == "discard"

    def epoch_table(self, epoch: int) -> Table:
        open_epoch, rolls = partial(table_of, self.sampler, seed=self.seed), self.last_batch == "rollover"
        table = self._epoch_batches(epoch).items(open_epoch, 0, name_of(self.sampler)) if rolls else open_epoch(epoch)
        return BatchedTable(table, self.batch_size, self.drop_last)

    def len_epoch(self, epoch: int) -> int:
        if self.last_batch == "rollover":
            return self._epoch_batches(epoch).length()
        return parts(len_epoch(self.sampler, epoch), self.batch_size, self.drop_last)

    def resized(self, size: int, before: int) -> Sampler[list[int]] | None:
        # With rollover, another batch size moves the beginnings of epochs.
        return None if self.last_batch == "rollover" and size != before else super().resized(size, before)

    def _epoch_batches(self, epoch: int) -> Rollover:
        return Rollover(len_epoch(self.sampler, epoch), self.batch_size, epoch)


# -- ranks -------------------------------------------------------------------------------------------------------------


class ReplicaSampler(WrapperSampler[Any]):
    """One rank's share of another sampler: the items [rank::num_replicas], equally many for every rank.

    ``ask`` returns (num_replicas, rank). It is called on each use, because the process group may not be up yet.
    ``truncate`` drops the end of an epoch that does not divide evenly; otherwise it wraps around to the beginning.

    Example:
        >>> from sharded_loader import SequentialSampler
        >>> [list(ReplicaSampler(SequentialSampler(5), lambda: (2, rank))) for rank in range(2)]
        [[0, 2, 4], [1, 3, 0]]

    Source of the idea: `torch.utils.data.DistributedSampler`.
    """

    shown = (("num_replicas", "num_replicas"), ("rank", "rank"), ("truncate", "_truncate"))
    sampler: Iterable[Any]

    def __init__(
        self, sampler: Iterable[object], ask: Callable[[], tuple[int, int]], truncate: bool = False, seed: int = 0
    ) -> None:
        super().__init__(sampler, seed)
        self._ask, self._truncate = ask, truncate

    @property
    def num_replicas(self) -> int:
        return self._ask()[0]

    @property
    def rank(self) -> int:
        return self._ask()[1]

    def epoch_table(self, epoch: int) -> Table:
        replicas, rank = self._ask()
        table = table_of(base.for_ranks(self.sampler, replicas), epoch, self.seed)
        return StridedTable(table, replicas, rank, truncate=self._truncate)

    def len_epoch(self, epoch: int) -> int:
        replicas = self.num_replicas
        return parts(len_epoch(base.for_ranks(self.sampler, replicas), epoch), replicas, self._truncate)


# -- the samplers of a loader ------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """Samplers of a loader: the user's, and those made in their place or around them.

    Attributes:
        given, read: the user's sampler or None, and the same or a copy with other seeds.
        takes_seed: for each sampler, outermost first: its seed comes from the loader or a state.
        arguments: other arguments that decide the order, as in a state.
        sampler, batch_sampler: samplers that the loader exposes, after `make`.
        grown: samples that were added and removed in mid-epoch, as in a state; see `samplers.growth`.
    """

    batch_size: Any
    shuffle: bool
    sampler: Any
    batch_sampler: Any
    last_batch: str | None
    steps_per_epoch: int | None = None
    costs: Any = None
    evaluate: bool = False
    grown: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        _check_arguments(self)
        self.given_batches = self.batch_sampler is not None
        self.given = self.read = self.batch_sampler if self.given_batches else self.sampler
        self.takes_seed = [isinstance(getattr(one, "seed", None), DrawnSeed) for one in self.samplers]
        self.arguments = arguments_of(self.samplers)
        self._length: int | None = None

    @property
    def samplers(self) -> list[Any]:
        """The user's samplers as they are read, outermost first."""
        return [] if self.read is None else list(nested(self.read))

    @property
    def items(self) -> Any:
        """The sampler of the global order: of batches, or of samples."""
        return self.batch_sampler if self.given_batches else self.sampler

    @property
    def is_endless(self) -> bool:
        return self.steps_per_epoch is not None and known_length(self.items, 0) is None

    @property
    def size(self) -> object:
        """Number of samples in a batch of one rank; not an integer if batches vary in size."""
        return getattr(self.read, "samples_in_batch", None) if self.given_batches else self.batch_size

    def make(self, length: int | None, seed: int, ask: Callable[[], tuple[int, int]] | None) -> None:
        """Make the samplers for ``length`` samples (None: unknown). ``ask``: as for `ReplicaSampler`, or None."""
        for sampler in self.samplers:
            if length is not None and hasattr(sampler, "check_dataset"):
                sampler.check_dataset(length)
        self._length = length
        if self.given_batches:
            self.batch_sampler, self.sampler = self.read, self.samplers[-1] if len(self.samplers) > 1 else None
            return
        self.sampler = indices = self._indices(length, seed)
        if self.costs is not None:
            self.arguments = arguments_of([indices])
        if ask is not None:
            indices = ReplicaSampler(indices, ask, self.last_batch == "discard", seed)
        self.batch_sampler = BatchSampler(indices, self.batch_size, self.last_batch or "keep", seed=seed)

    def items_of(self, length: int | None, seed: int) -> Any:
        """Return the sampler of the global order for the first ``length`` samples, as before the dataset grew."""
        if length is None or length == self._length:
            return self.items
        if takes_order(self.read) and not self.given_batches:
            return self._indices(length, seed)
        return _limit_length(self.read, length, self._length)

    def _indices(self, length: int | None, seed: int) -> Any:
        read = self.read
        if not takes_order(read):
            return read
        if length is None:
            raise TypeError("the dataset has no __len__: give it one, or give the loader a sampler of its indices")
        if self.costs is not None:
            whole = self.steps_per_epoch is not None
            return provided("sampler", "costs")(self.costs, self.batch_size, length, seed, whole, self._length)
        made: Any = RandomSampler(length, seed=seed) if self.shuffle else SequentialSampler(length)
        if self.grown:
            made = provided("sampler", "grown")(made, self.grown)
        return made if read is None else read.over(made)

    def follow_given(self) -> None:
        """Copy attributes that the user has changed, such as ``batch_size``, to the copies that are read."""
        for given, read in zip(nested(self.given), self.samplers, strict=False):
            if given is not read and is_own(given):
                own = {"seed", "epoch_request", "_epoch", "_history", getattr(given, "_wraps", "")}
                vars(read).update((name, value) for name, value in vars(given).items() if name not in own)
                if not isinstance(getattr(given, "seed", None), DrawnSeed):
                    read.seed = given.seed
        self.arguments = arguments_of(self.samplers if self.costs is None else [self.sampler])

    def resized(self, size: int | None) -> Sampling:
        twin, before = copy.copy(self), self.size
        if size is not None and self.given_batches:
            twin.read = twin.given = self.read.resized(size, before) if isinstance(before, int) else None
            if twin.read is None:
                text = f"rescale: the batch_sampler decides the batches, and the {type(self.read).__name__}"
                raise ValueError(f"{text} cannot have batches of {size} in the same order: leave out batch_size")
            twin.arguments = arguments_of(twin.samplers)
        elif size is not None:
            twin.batch_size = size
        return twin


def takes_order(sampler: object) -> bool:
    """Return True if the loader makes the order: no sampler, or a wrapper without an inner sampler."""
    return sampler is None or (base.is_wrapper(sampler) and sampler.inner is None)


def _limit_length(sampler: Any, length: int, now: int | None) -> Any:
    """Return a sampler of the first ``length`` of ``now`` samples, if it depends on nothing but their number."""
    if base.is_wrapper(sampler):
        return sampler.over(_limit_length(sampler.inner, length, now))
    if type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == now:
        sampler = copy.copy(sampler)
        sampler._length = length
    return sampler


def with_seeds(sampler: Any, seeds: Sequence[int | None]) -> Any:
    """Return the sampler with other seeds, one per sampler as in `nested`; None leaves a seed unchanged.

    Samplers are copied, because other loaders may read them, and so are samplers whose changes belong to a loader. Not
    copied is a library sampler inside a third-party one: the outer one cannot be copied safely.
    """
    if not seeds:
        return sampler
    seed, *inner_seeds = seeds
    twin = sampler
    if base.is_wrapper(sampler):
        inner = with_seeds(sampler.inner, inner_seeds)
        if inner is not sampler.inner:
            twin = sampler.over(inner)
    else:
        for inner_sampler, inner_seed in zip(islice(nested(sampler), 1, None), inner_seeds, strict=True):
            if inner_seed is not None:
                inner_sampler.seed = inner_seed
    if seed is not None or (has_weights(sampler) and hasattr(sampler, "read_by")):
        twin = copy.copy(sampler) if twin is sampler else twin
        twin.seed = sampler.seed if seed is None else seed
    return twin


def _check_arguments(args: Sampling) -> None:
    sampler, batch_sampler, last_batch, shuffle = args.sampler, args.batch_sampler, args.last_batch, args.shuffle
    if isinstance(batch_sampler, int):
        text = f"batch_sampler is {batch_sampler!r}, a number. Here this position is that of batch_sampler, as in Gluon"
        raise TypeError(f"{text}: write the names, such as num_workers=")
    if batch_sampler is not None:
        if args.batch_size is not None or shuffle or sampler is not None or last_batch is not None:
            text = "batch_size, shuffle, sampler and last_batch must not be specified if batch_sampler is specified"
            raise ValueError(f"{text}: it decides all of that. drop_last is torch's name for last_batch")
        base.check_sampler(batch_sampler, "batch_sampler")
    elif getattr(sampler, "yields_batches", False):
        raise TypeError(f"sampler is a {type(sampler).__name__}, which yields batches: give it as batch_sampler= alone")
    elif last_batch not in (None, *LAST_BATCH):
        raise ValueError(f'last_batch is {last_batch!r}; it must be "keep", "discard" or "rollover"')
    elif args.batch_size is None:
        text = "batch_size must be specified unless batch_sampler is specified. For single samples, as in torch with"
        raise ValueError(f"{text} batch_size=None: from sharded_loader.torch import DataLoader")
    elif shuffle and not takes_order(sampler):
        raise ValueError("shuffle must not be specified if sampler is specified: the sampler decides the order")
    elif sampler is not None:
        base.check_sampler(sampler)
    if args.costs is not None and (sampler is not None or batch_sampler is not None):
        name = "sampler" if batch_sampler is None else "batch_sampler"
        raise ValueError(f"costs= and {name}= both decide the order: leave out one of them")
    if args.costs is not None and last_batch == "rollover":
        advice = 'give last_batch="discard", or steps_per_epoch='
        raise ValueError(f'costs= makes whole steps, and last_batch="rollover" would cut them elsewhere: {advice}')
    if args.evaluate and (last_batch not in (None, "keep") or args.steps_per_epoch is not None):
        contrary = f"last_batch={last_batch!r}" if args.steps_per_epoch is None else "steps_per_epoch"
        raise ValueError(f"evaluate gives each sample once, and {contrary} does not: leave out one of them")
