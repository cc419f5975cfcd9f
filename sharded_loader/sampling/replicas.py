"""Which part of an order belongs to whom: to a rank of several processes, or to one of several parts of a dataset.

    ReplicaSampler                          the items [rank::num_replicas] of a sampler's order
    SplitSampler                            one of several contiguous parts of a dataset, shuffled in itself

All ranks read one global order, so they must agree on its seed, and every rank gets the same number of items: the end
is padded by wrapping round to the beginning of the epoch, or cut off. The arithmetic is
`sharded_loader.sampling.tables.Dealt`. Parts of a split are contiguous, so that each reads its own stretch of a file.

What can go wrong: ranks with different seeds (each then reads its own order, and nobody can notice); a rank outside
its number of replicas; wrong arguments, rejected in the constructors.

Source of the idea: `torch.utils.data.DistributedSampler`, `gluonnlp.data.SplitSampler`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.engine.order import process_group
from sharded_loader.randomness.shuffle import Indices, shuffle
from sharded_loader.sampling.base import Sampler, WrapperSampler, nested, resolve_seed
from sharded_loader.sampling.foreign import len_epoch, rank_of, table_of
from sharded_loader.sampling.tables import BLOCK, Dealt, Table, parts


def text_if_ranks_repeat(samplers: Iterable[Any], environ: Mapping[str, str] = os.environ) -> str | None:
    """What to say if the ranks of a process group, or of WORLD_SIZE, would all read the same samples; otherwise None.

    Example:
        >>> text_if_ranks_repeat([], {"WORLD_SIZE": "2"})
        'this process is one of 2 ranks (WORLD_SIZE), and each reads the whole dataset: '
    """
    distributed, found = process_group(), "(torch.distributed)"
    if distributed is not None:
        ranks = int(distributed.get_world_size())
    else:
        given, found = environ.get("WORLD_SIZE", ""), "(WORLD_SIZE)"
        ranks = int(given) if given.strip().isdecimal() else 1
    knows_ranks = ("num_replicas", "num_processes")  # of Accelerate's samplers
    if ranks <= 1 or any(
        rank_of(one) is not None or isinstance(one, SplitSampler) or any(hasattr(one, name) for name in knows_ranks)
        for one in samplers
    ):
        return None
    return f"this process is one of {ranks} ranks {found}, and each reads the whole dataset: "


def refuse_distributed_sampler(samplers: Iterable[Any]) -> None:
    """Reject a sampler of torch's that shares out the samples, where the loader does."""
    kind = getattr(sys.modules.get("torch.utils.data"), "DistributedSampler", ())
    if any(isinstance(one, kind) for sampler in samplers for one in nested(sampler)):
        raise ValueError(
            "num_replicas and a torch DistributedSampler would share out the samples twice: leave out one of the two"
        )


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
        self, sampler: Iterable[Any], ask: Callable[[], tuple[int, int]], truncate: bool = False, seed: int = 0
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
        return Dealt(table_of(self.sampler, epoch, self.seed), *self._ask(), truncate=self._truncate)

    def len_epoch(self, epoch: int) -> int:
        return parts(len_epoch(self.sampler, epoch), self.num_replicas, self._truncate)


class SplitSampler(Sampler[int]):
    """One of ``num_parts`` contiguous parts of the dataset, shuffled within itself, each part in an order of its own.

    Args:
        length: number of samples of the whole dataset.
        num_parts: the number of parts.
        part_index: which of them, from 0.
        even_size: make all parts equally long: parts of ceil(length / num_parts), and where the last ones
            are short, random samples of other parts are added.
        repeat: how many times the part comes in one epoch, in another order each time. A sample that comes again in
            the epoch has the same `sample_rng`, so it is augmented in the same way.
        shuffle: whether to shuffle.
        seed: with the epoch it decides the order and the added samples. None draws one from torch's default
            generator (only if something is random).

    Raises:
        TypeError, ValueError: for ``part_index`` outside 0 .. num_parts - 1, more parts than samples, and
            ``repeat`` or ``num_parts`` below 1.

    Example:
        >>> [list(SplitSampler(7, 3, part, shuffle=False)) for part in range(3)]
        [[0, 1, 2], [3, 4], [5, 6]]

    Source of the idea: `gluonnlp.data.SplitSampler`.
    """

    decided_by = (
        ("num_parts", "_parts"),
        ("even_size", "_even_size"),
        ("repeat", "_repeat"),
        ("shuffle", "_shuffle"),
    )
    shown = (("total", "_total"), ("part_index", "_part"), *decided_by)

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        even_size: bool = False,
        repeat: int = 1,
        shuffle: bool = True,
        seed: int | None = None,
    ) -> None:
        self._total = check_int("length", length, 0, "give the number of samples, len(dataset)")
        parts = check_int("num_parts", num_parts, 1, "give how many parts the dataset is split into")
        part = check_int("part_index", part_index, 0, "parts count from 0")
        self._repeat = check_int("repeat", repeat, 1, "give how many times the part comes in an epoch")
        if part >= parts:
            raise ValueError(f"part_index is {part}, but there are {parts} parts: give 0 to {parts - 1}")
        if 0 < self._total < parts:
            raise ValueError(
                f"{self._total} samples cannot be split into {parts} parts that all have one: give fewer parts"
            )
        if even_size:
            self._size = -(-self._total // parts)
            self._begin = min(self._size * part, self._total)
            self._own = min(self._size, self._total - self._begin)
        else:
            size, longer = divmod(self._total, parts)
            self._begin = size * part + min(part, longer)
            self._own = self._size = size + (part < longer)
        self._parts, self._part, self._even_size = parts, part, bool(even_size)
        self._shuffle = bool(shuffle)
        self.seed = resolve_seed(seed) if shuffle or self._own < self._size or seed is not None else None

    def epoch_table(self, epoch: int) -> Table:
        # The part belongs to the key: parts of one size would otherwise be shuffled alike.
        key = (self.seed, "split sampler", self._part, epoch)

        @lru_cache(maxsize=2)
        def once(number: int) -> Callable[[Indices], Indices]:
            """One round of the part: positions in it -> indices."""
            order = shuffle(self._size, *key, "order", number) if self._shuffle else None
            extra = self._extra((*key, "extra", number))

            def at(positions: Indices) -> Indices:
                place = positions if order is None else order(positions)
                # The last places of a short part are the samples added to it.
                own = np.minimum(place, self._own - 1) + self._begin
                return np.where(place < self._own, own, extra[np.maximum(place - self._own, 0)]) if len(extra) else own

            return at

        def order(positions: Indices) -> Indices:
            found = np.empty_like(positions)
            rounds = positions // self._size
            for number in np.unique(rounds).tolist():
                here = rounds == number
                found[here] = once(number)(positions[here] % self._size)
            return found

        return Table(self.len_epoch(epoch), order, BLOCK)

    def _extra(self, key: tuple[int | str | None, ...]) -> Indices:
        """Samples of other parts, each at most once, that fill a short part (fewer than num_parts)."""
        missing = self._size - self._own
        if not missing:
            return np.zeros(0, dtype=np.int64)
        others = shuffle(self._total - self._own, *key)(np.arange(missing))
        return others + np.where(others >= self._begin, self._own, 0)

    def len_epoch(self, epoch: int) -> int:
        return self._size * self._repeat
