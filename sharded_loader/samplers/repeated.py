"""Each sample several times, one copy behind the other, and each copy with its own random numbers.

In: any order of indices, or none: then a loader puts its own order inside. Out: a table per epoch. The first copy of an
index is a plain int; the others are ints that `sample_rng` tells apart.

What can go wrong: the order inside yields something else than integers, or there is none (TypeError, ValueError).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import brief
from sharded_loader.extend import Table, WrapperSampler
from sharded_loader.randomness.rng import repeated_index
from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.foreign import len_epoch, table_of
from sharded_loader.sampling.tables import parts


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

    def __init__(self, copies: int, sampler: Iterable[object] | None = None, *, seed: int | None = None) -> None:
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
            advice = "give it to a loader as sampler=, or give it a sampler as its second argument"
            raise ValueError(f"RepeatedSampler({self.copies}) has no order to repeat: {advice}")


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
        kinds, copies = [int, *map(repeated_index, range(1, self._copies))], positions % self._copies
        try:
            return [kinds[copy](items[place]) for place, copy in zip(which.tolist(), copies.tolist(), strict=True)]
        except (TypeError, ValueError):
            text = f"RepeatedSampler repeats single integer indices, and its sampler yields {brief(items[0])}"
            raise TypeError(f"{text}: put the RepeatedSampler inside the batch sampler") from None
