"""The samplers of a loader: those that it makes, and how they go with those that the user gave (`Sampling`).

It makes samplers of indices in turn or shuffled, of the share of a rank, and of batches.
In: how many samples there are, and a seed where order is random. Out: a table per epoch, a pure function of (seed,
epoch). Any position takes the same time. Shuffles of up to 16 M indices are made whole when the epoch is opened.

Batch k of an epoch is a pure function of (seed, epoch, k). With ``last_batch="rollover"`` the epochs follow each other
without end, and are cut into batches. With N items per epoch and B items per batch, epoch e owns the batches
floor(e*N/B) to floor((e+1)*N/B) - 1. Example: of 5 items in twos epoch 0 owns batches 0 and 1, and epoch 1 owns batches
2 to 4. These are the batches that Gluon gives, but they do not depend on what was iterated before.

What can go wrong: arguments, all rejected in the constructors; those of a loader may contradict each other. With
rollover, a sampler of another library yields more or fewer items than its ``len``: ValueError.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

from sharded_loader.base.checks import check_choice, check_int
from sharded_loader.base.imports import provided
from sharded_loader.randomness.shuffle import MAX_LENGTH, Indices, shuffle
from sharded_loader.sampling import base
from sharded_loader.sampling.base import DrawnSeed, Sampler, WrapperSampler, is_own, nested, resolve_seed
from sharded_loader.sampling.foreign import known_length, len_epoch, name_of, table_of
from sharded_loader.sampling.state import arguments_of
from sharded_loader.sampling.tables import BLOCK, Batched, Dealt, Rolling, Table, parts

LAST_BATCH = ("keep", "discard", "rollover")


def check_length(length: object) -> int:
    return check_int("length", length, 0, "give the number of samples, len(dataset)")


class IndexSampler(Sampler[int]):
    """Base class: a subclass says how many indices an epoch has, and which one is where."""

    _length: int

    def epoch_table(self, epoch: int) -> Table:
        return Table(self.len_epoch(epoch), self._order(epoch), BLOCK)

    def len_epoch(self, epoch: int) -> int:
        return self._length

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        """Positions -> indices. What the whole epoch needs is made now."""
        raise NotImplementedError


class SequentialSampler(IndexSampler):
    """Indices in order: start, start + 1, ... start + length - 1.

    Args:
        length: the number of samples.
        start: the first.

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

    Up to 2**24 (16 M) indices the order is one array; above, each position is computed, in constant
    memory (see `sharded_loader.randomness.shuffle`).

    Args:
        length: number of samples, up to 2**62.
        seed: with the epoch it decides the order. None draws one from torch's default generator.

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
        return shuffle(self._length, self.seed, "order", epoch)


# -- batches -----------------------------------------------------------------------------------------------------------


class BatchSampler(WrapperSampler[list[int]]):
    """Items of another sampler, ``batch_size`` at a time.

    Args:
        sampler: any sampler, or an iterable that can be read again and again.
        batch_size: items per batch.
        last_batch: what happens to the items that do not fill a batch. ``"keep"``: a smaller last batch;
            ``"discard"``: left out; ``"rollover"``: first in the next epoch.
        seed: starts ``sampler`` if it is foreign (torch's, say). None draws one from torch's default
            generator if it is needed.

    Raises:
        TypeError, ValueError: for a ``batch_size`` that is not an integer of at least 1, an unknown
            ``last_batch``, and a ``sampler`` that can be read only once.

    Example:
        >>> from sharded_loader import SequentialSampler
        >>> batches = BatchSampler(SequentialSampler(5), 2, "rollover")
        >>> list(batches), list(batches)
        ([[0, 1], [2, 3]], [[4, 0], [1, 2], [3, 4]])

    Source of the idea: `mxnet.gluon.data.BatchSampler`.
    """

    decided_by = (("batch_size", "batch_size"), ("last_batch", "last_batch"))
    cut_by = sized_by = ("batch_size",)
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
        if self.last_batch != "rollover":
            return Batched(table_of(self.sampler, epoch, self.seed), self.batch_size, self.drop_last)
        open_epoch = partial(table_of, self.sampler, seed=self.seed)
        return self._rolling(epoch).table(open_epoch, 0, name_of(self.sampler))

    def len_epoch(self, epoch: int) -> int:
        if self.last_batch == "rollover":
            return self._rolling(epoch).length()
        return parts(len_epoch(self.sampler, epoch), self.batch_size, self.drop_last)

    def resized(self, size: int, before: int) -> Sampler[list[int]] | None:
        # With rollover, epochs of other batches begin elsewhere.
        return None if self.last_batch == "rollover" and size != before else super().resized(size, before)

    def _rolling(self, epoch: int) -> Rolling:
        return Rolling(len_epoch(self.sampler, epoch), self.batch_size, epoch)


# -- ranks -------------------------------------------------------------------------------------------------------------


class ReplicaSampler(WrapperSampler[Any]):
    """What one rank reads of another sampler's order: the items [rank::num_replicas], equally many for every rank.

    Args:
        sampler: any sampler of indices or of batches, the same on all ranks.
        ask: a function that returns the number of ranks, and which is this one. It is asked whenever that matters,
            because the process group may not be up yet.
        truncate: leave out the end of the epoch that not all ranks get a share of; otherwise pad it by
            wrapping round to the beginning.
        seed: starts ``sampler`` if another library made it; the same on all ranks.

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
        """The number of ranks, as far as is known now."""
        return self._ask()[0]

    @property
    def rank(self) -> int:
        """Which of them this is, as far as is known now."""
        return self._ask()[1]

    def epoch_table(self, epoch: int) -> Table:
        replicas, rank = self._ask()
        table = table_of(base.for_ranks(self.sampler, replicas), epoch, self.seed)
        return Dealt(table, replicas, rank, truncate=self._truncate)

    def len_epoch(self, epoch: int) -> int:
        replicas = self.num_replicas
        return parts(len_epoch(base.for_ranks(self.sampler, replicas), epoch), replicas, self._truncate)


# -- the samplers of a loader ------------------------------------------------------------------------------------------


@dataclass
class Sampling:
    """The samplers of a loader: the one that the user gave, and those that it makes in its place, or around it.

    Args:
        batch_size, shuffle, sampler, batch_sampler, last_batch, steps_per_epoch, costs, evaluate: of the loader.

    Attributes:
        given_batches: the user gave a batch sampler.
        given, read: what the user gave, and the same or a copy with other seeds; None: nothing.
        takes_seed: of it and of those inside it, the outermost first: it takes the seed of the loader or of a state.
        arguments: what else decides their order, as a state has it.
        sampler, batch_sampler: what the loader shows, after `make`.

    Raises:
        TypeError, ValueError: the arguments contradict each other.
    """

    batch_size: Any
    shuffle: bool
    sampler: Any
    batch_sampler: Any
    last_batch: str | None
    steps_per_epoch: int | None = None
    costs: Any = None
    evaluate: bool = False

    def __post_init__(self) -> None:
        _check(self)
        self.given_batches = self.batch_sampler is not None
        self.given = self.read = self.batch_sampler if self.given_batches else self.sampler
        self.takes_seed = [isinstance(getattr(one, "seed", None), DrawnSeed) for one in self.samplers]
        self.arguments = arguments_of(self.samplers)
        self._length: int | None = None

    @property
    def samplers(self) -> list[Any]:
        """The samplers that the user gave, as they are read: the outermost first."""
        return [] if self.read is None else list(nested(self.read))

    @property
    def items(self) -> Any:
        """The sampler of the global order: of batches, or of samples."""
        return self.batch_sampler if self.given_batches else self.sampler

    @property
    def is_endless(self) -> bool:
        """Whether no epoch of the samplers comes to its end."""
        return self.steps_per_epoch is not None and known_length(self.items, 0) is None

    @property
    def size(self) -> object:
        """The number of samples in a batch of one rank. No number: they have several sizes."""
        return getattr(self.read, "samples_in_batch", None) if self.given_batches else self.batch_size

    def make(self, length: int | None, seed: int, ask: Callable[[], tuple[int, int]] | None) -> None:
        """Make the samplers for a dataset of this length.

        Args:
            length: None: it has none.
            seed: of the loader.
            ask: returns the number of ranks, and which is this one; None: the samples are not shared out.
        """
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
        """The sampler of the global order for the first samples, as it was before the dataset grew."""
        if length is None or length == self._length:
            return self.items
        if takes_order(self.read) and not self.given_batches:
            return self._indices(length, seed)
        return _of_first(self.read, length, self._length)

    def _indices(self, length: int | None, seed: int) -> Any:
        given = self.read
        if not takes_order(given):
            return given
        if length is None:
            raise TypeError("the dataset has no __len__: give it one, or give the loader a sampler of its indices")
        if self.costs is not None:
            costs = self.costs if callable(self.costs) or length == self._length else self.costs[:length]
            return provided("sampler", "costs")(costs, self.batch_size, length, seed, self.steps_per_epoch is not None)
        made = RandomSampler(length, seed=seed) if self.shuffle else SequentialSampler(length)
        return made if given is None else given.over(made)

    def follow_given(self) -> None:
        """Take over what the user has set in the given samplers, such as ``batch_size``, where copies are read."""
        for given, read in zip(nested(self.given), self.samplers, strict=False):
            if given is not read and is_own(given):
                own = {"seed", "epoch_request", "_epoch", getattr(given, "_wraps", "")}
                vars(read).update((name, value) for name, value in vars(given).items() if name not in own)
                if not isinstance(getattr(given, "seed", None), DrawnSeed):
                    read.seed = given.seed
        self.arguments = arguments_of(self.samplers if self.costs is None else [self.sampler])

    def resized(self, size: int | None) -> Sampling:
        """A copy with batches of another size; None: of the same."""
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
    """Whether the loader makes the order: without a sampler, or with one that has to wrap the loader's order."""
    return sampler is None or (base.is_wrapper(sampler) and sampler.inner is None)


def _of_first(sampler: Any, length: int, now: int | None) -> Any:
    """A sampler of the first samples, as far as it knows nothing of them but how many there are ``now``."""
    if base.is_wrapper(sampler):
        return sampler.over(_of_first(sampler.inner, length, now))
    if type(sampler) in (RandomSampler, SequentialSampler) and len(sampler) == now:
        sampler = copy.copy(sampler)
        sampler._length = length
    return sampler


def with_seeds(sampler: Any, seeds: Sequence[int | None]) -> Any:
    """The sampler with other seeds. What the user gave is not changed, because other loaders may read it too.

    Args:
        sampler: any sampler, or None.
        seeds: the new seeds of the sampler and of those inside it, in the order of `nested`; None: its own.

    Returns:
        The sampler itself, or a copy where it or one inside it has got another seed. Only a sampler of ours inside a
        sampler of another library is changed itself: that library's sampler cannot be copied safely.
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
    if seed is not None:
        twin = copy.copy(sampler) if twin is sampler else twin
        twin.seed = seed
    return twin


def _check(given: Sampling) -> None:
    """Refuse arguments that contradict each other."""
    sampler, batch_sampler, last_batch, shuffle = given.sampler, given.batch_sampler, given.last_batch, given.shuffle
    if isinstance(batch_sampler, int):
        text = f"batch_sampler is {batch_sampler!r}, a number. Here this position is that of batch_sampler, as in Gluon"
        raise TypeError(f"{text}: write the names, such as num_workers=")
    if batch_sampler is not None:
        if given.batch_size is not None or shuffle or sampler is not None or last_batch is not None:
            text = "batch_size, shuffle, sampler and last_batch must not be specified if batch_sampler is specified"
            raise ValueError(f"{text}: it decides all of that. drop_last is torch's name for last_batch")
        base.check_sampler(batch_sampler, "batch_sampler")
    elif getattr(sampler, "yields_batches", False):
        kind = type(sampler).__name__
        raise TypeError(f"sampler is a {kind}, which yields batches: give it as batch_sampler=, without batch_size")
    elif last_batch not in (None, *LAST_BATCH):
        raise ValueError(f'last_batch is {last_batch!r}; it must be "keep", "discard" or "rollover"')
    elif given.batch_size is None:
        text = "batch_size must be specified unless batch_sampler is specified. For single samples, as in torch with"
        raise ValueError(f"{text} batch_size=None: from sharded_loader.torch import DataLoader")
    elif isinstance(shuffle, str) or callable(shuffle):
        raise TypeError(f"shuffle is {shuffle!r}; it must be True or False. An order of your own is a sampler=")
    elif shuffle and not takes_order(sampler):
        raise ValueError("shuffle must not be specified if sampler is specified: the sampler decides the order")
    elif sampler is not None:
        base.check_sampler(sampler)
    if given.costs is not None and (sampler is not None or batch_sampler is not None):
        name = "sampler" if batch_sampler is None else "batch_sampler"
        raise ValueError(f"costs= and {name}= both decide the order: leave out one of them")
    if given.costs is not None and last_batch == "rollover":
        advice = 'give last_batch="discard", or steps_per_epoch='
        raise ValueError(f'costs= makes whole steps, and last_batch="rollover" would cut them elsewhere: {advice}')
    if given.evaluate and (last_batch not in (None, "keep") or given.steps_per_epoch is not None):
        contrary = f"last_batch={last_batch!r}" if given.steps_per_epoch is None else "steps_per_epoch"
        raise ValueError(f"evaluate gives each sample once, and {contrary} does not: leave out one of them")
