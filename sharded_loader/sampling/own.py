"""The samplers that a loader makes itself: of indices in turn or shuffled, of each index several times, of batches.

In: how many samples there are, and a seed where order is random. Out: a table per epoch, a pure function of (seed,
epoch). Any position takes the same time. Shuffles of up to 16 M indices are made whole when the epoch is opened.

Batch k of an epoch is a pure function of (seed, epoch, k). With ``last_batch="rollover"`` the epochs follow each other
without end, and are cut into batches. With N items per epoch and B items per batch, epoch e owns the batches
floor(e*N/B) to floor((e+1)*N/B) - 1. Example: of 5 items in twos epoch 0 owns batches 0 and 1, and epoch 1 owns batches
2 to 4. These are the batches that Gluon gives, but they do not depend on what was iterated before.

What can go wrong: arguments, all rejected in the constructors. With rollover, a sampler of another library yields more
or fewer items than its ``len``: ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import brief
from sharded_loader.randomness.rng import repeated_index
from sharded_loader.randomness.shuffle import MAX_LENGTH, Indices, shuffle
from sharded_loader.sampling.base import Sampler, WrapperSampler, check_choice, resolve_seed
from sharded_loader.sampling.foreign import len_epoch, name_of, table_of
from sharded_loader.sampling.tables import BLOCK, Batched, Rolling, Table, parts

LAST_BATCH = ("keep", "discard", "rollover")


def check_length(length: Any) -> int:
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
            raise ValueError(
                f"RandomSampler shuffles up to 2**62 samples, got length={self._length}: "
                "use SequentialSampler, or SplitSampler over parts"
            )
        self.seed = resolve_seed(seed)

    def _order(self, epoch: int) -> Callable[[Indices], Indices]:
        return shuffle(self._length, self.seed, "order", epoch)


# -- each sample several times -----------------------------------------------------------------------------------------


class RepeatedSampler(WrapperSampler[int]):
    """Each index of another order ``copies`` times, one behind the other, and each copy with its own random numbers.

    This is repeated augmentation: the copies of a sample are augmented differently, because `sample_rng`,
    `sample_generator` and ``transform(fn, seeded=True)`` know the copy. Under ``num_replicas`` the copies go to
    different ranks. On one rank they lie in one batch.

    Without ``sampler`` it repeats the loader's own order: ``ShardedDataLoader(dataset, 64, shuffle=True,
    sampler=RepeatedSampler(3))``. That is the only sampler that may come with ``shuffle``.

    Args:
        copies: how many times each sample comes in an epoch.
        sampler: any sampler of single indices. None: the order that the loader would have without a sampler.
        seed: starts ``sampler`` if another library made it. None draws one if it is needed.

    Raises:
        TypeError, ValueError: ``copies`` is no integer of at least 1, or ``sampler`` is no sampler.

    Example:
        >>> from sharded_loader import SequentialSampler, ShardedDataLoader
        >>> list(RepeatedSampler(2, SequentialSampler(3)))
        [0, 0, 1, 1, 2, 2]
        >>> loader = ShardedDataLoader(range(3), 4, sampler=RepeatedSampler(2))
        >>> [batch.tolist() for batch in loader]
        [[0, 0, 1, 1], [2, 2]]

    Source of the idea: Hoffer et al., "Augment your batch" (2019), MultiGrain (2019), timm's ``RepeatAugSampler``.
    """

    decided_by = (("copies", "copies"),)
    fixed = ("copies",)
    sampler: Any

    def __init__(self, copies: int, sampler: Iterable[Any] | None = None, *, seed: int | None = None) -> None:
        self.copies = check_int("copies", copies, 1, "give how many times each sample comes in an epoch")
        if sampler is None:  # until a loader has put its own order inside
            self.sampler, self._shares_epoch, self.seed = None, False, 0
        else:
            super().__init__(sampler, seed)

    def epoch_table(self, epoch: int) -> Table:
        self._check()
        return _Copied(table_of(self.sampler, epoch, self.seed), self.copies)

    def len_epoch(self, epoch: int) -> int:
        self._check()
        return self.copies * len_epoch(self.sampler, epoch)

    def _check(self) -> None:
        if self.sampler is None:
            raise ValueError(
                f"RepeatedSampler({self.copies}) has no order to repeat: give it to a loader as sampler=, or give it a "
                f"sampler, RepeatedSampler({self.copies}, sampler)"
            )


class _Copied(Table):
    """The items of another table, each of them several times. The first copy is a plain int."""

    def __init__(self, table: Table, copies: int) -> None:
        self._table, self._copies = table, copies
        self._block = min(table.block, 1024)
        self._last: tuple[int, Any] = -1, None  # an iterator is not read twice for copies in two batches

    def upto(self, begin: int, end: int) -> int:
        copies = self._copies
        return min(end, copies * self._table.upto(begin // copies, parts(end, copies, cut=False)))

    def at(self, positions: Indices) -> list[Any]:
        places, which = np.unique(positions // self._copies, return_inverse=True)
        held, item = self._last
        known = [item] if held == places[0] else []
        found = self._table.at(places[len(known) :]) if len(places) > len(known) else []
        items = known + (found.tolist() if isinstance(found, np.ndarray) else found)
        self._last = int(places[-1]), items[-1]
        kinds = [int, *map(repeated_index, range(1, self._copies))]
        try:
            return [
                kinds[copy](items[place])
                for place, copy in zip(which.tolist(), (positions % self._copies).tolist(), strict=True)
            ]
        except (TypeError, ValueError):
            raise TypeError(
                f"RepeatedSampler repeats single integer indices, and its sampler yields others, such as "
                f"{brief(items[0])}: put the RepeatedSampler inside the batch sampler"
            ) from None


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
        self, sampler: Iterable[Any], batch_size: int, last_batch: str = "keep", *, seed: int | None = None
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

    def resized(self, size: int, before: int) -> Any:
        # With rollover, epochs of other batches begin elsewhere.
        return None if self.last_batch == "rollover" and size != before else super().resized(size, before)

    def _rolling(self, epoch: int) -> Rolling:
        return Rolling(len_epoch(self.sampler, epoch), self.batch_size, epoch)
