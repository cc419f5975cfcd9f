"""One part of a dataset: `SplitSampler`.

In: how many samples, how many parts, which part. Out: the indices of that part, shuffled among themselves.
Parts are contiguous, so that each reads its own stretch of a file.

What can go wrong: arguments, all refused in the constructor.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sharded_loader.sampling.base import IndexSampler, Indices, check_int, resolve_seed
from sharded_loader.sampling.permutation import CHUNK, permuted_chunks


class SplitSampler(IndexSampler):
    """One of ``num_parts`` contiguous parts of the dataset, shuffled within itself, each part in an order of its own.

    Args:
        length: number of samples of the whole dataset.
        num_parts: how many parts.
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
    shown = (("part_index", "_part"), *decided_by)

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

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        # The part belongs to the key: parts of one size would otherwise be shuffled alike.
        return self._repeated((self.seed, "split sampler", self._part, epoch), start)

    def _repeated(self, key: tuple[int | str | None, ...], start: int) -> Iterator[Indices]:
        if not self._size:
            return
        for round_ in range(start // self._size, self._repeat):
            extra = self._extra((*key, "extra", round_))
            for place in self._places((*key, "order", round_), max(start - round_ * self._size, 0)):
                inside = place + self._begin
                if extra.size:
                    # The last places of a short part are the samples added to it.
                    added = place >= self._own
                    inside[added] = extra[place[added] - self._own]
                yield inside

    def _places(self, key: tuple[int | str | None, ...], start: int) -> Iterator[Indices]:
        if self._shuffle:
            yield from permuted_chunks(self._size, key, start)
            return
        for begin in range(start, self._size, CHUNK):
            yield np.arange(begin, min(begin + CHUNK, self._size), dtype=np.int64)

    def _extra(self, key: tuple[int | str | None, ...]) -> Indices:
        """Samples of other parts, each at most once, that fill a short part (fewer than num_parts)."""
        missing = self._size - self._own
        if not missing:
            return np.zeros(0, dtype=np.int64)
        chunks = list(_first(permuted_chunks(self._total - self._own, key), missing))
        others = np.concatenate(chunks)
        return others + np.where(others >= self._begin, self._own, 0)

    def len_epoch(self, epoch: int) -> int:
        return self._size * self._repeat


def _first(chunks: Iterator[Indices], count: int) -> Iterator[Indices]:
    for chunk in chunks:
        yield chunk[:count]
        count -= len(chunk)
        if count <= 0:
            return
