"""How datasets read that are made of other datasets; and which indices `shard`, `take`, `sample` and `split` choose.

    Wrapper          around one other dataset
      View           some of its samples, by translated indices: `SimpleDataset`, `SubsetDataset`
      Transformed    its samples through a function: `TransformDataset`
    Joined           several others, one after the other: `ConcatDataset`

The classes here only read. `sharded_loader.data.datasets` gives them the methods of a `Dataset`, which in turn make
these classes. Names and docstrings for users are there. A wrapper has ``set_epoch``, ``get_batch`` and
``__getitems__`` exactly where what it wraps has them. Which indices are chosen is a pure function, tested on numbers.

What can go wrong: an index out of range is an IndexError that says the length. Indices that do not fit a dataset are
rejected when the subset is made, not when it is read.
"""

from __future__ import annotations

import math
import operator
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import rng
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, known_to, new_array
from sharded_loader.data.bulk import (
    READS,
    Indices,
    Int64s,
    check_one_index,
    checked_index,
    checked_indices,
    each_by_its_key,
    gather,
    handed_out,
    has,
    offered_if,
    offers,
    read_many,
    translated,
)
from sharded_loader.data.columns import are_alike, check_dataset, merge_rows
from sharded_loader.data.seeding import next_level, transform_seed


class Wrapper:
    """Around one other dataset: forwards ``set_epoch`` where the other has it."""

    _dataset: Any
    _part: Callable[[slice], Any]  # of `Dataset`: the samples of a slice

    def __len__(self) -> int:
        return len(self._dataset)

    @offered_if(has("set_epoch"))
    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped dataset which epoch is read."""
        self._dataset.set_epoch(epoch)


class View(Wrapper):
    """Samples of the other dataset, by translated indices. Subclasses write `_one` and `_inner`, not ``__getitem__``.

    A ``__getitem__`` that is not of the same class as the bulk methods is an override, and they are not used.
    """

    def _one(self, index: Any) -> Any:
        """The sample at one index."""
        raise NotImplementedError

    def _inner(self, indices: Indices) -> Int64s:
        """Indices into the wrapped dataset."""
        raise NotImplementedError

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        return list(self._dataset.__getitems__(translated(self._inner(indices).tolist(), indices)))

    @offered_if(has("get_batch"))
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        return gather(self._dataset, self._inner(indices), empty)

    def _rows_in(self, where: Int64s) -> Any:
        return rows_in(self._dataset, self._inner(where))


def rows_in(dataset: Any, where: Int64s) -> Any:
    """The `ArrayDataset` that a dataset reads, perhaps through others, and the rows in it; None if it reads none."""
    found = known_to(type(dataset), "_rows_in", READS)
    return None if found is None else found(dataset, where)


class Transformed(Wrapper):
    """Samples of the other dataset, each passed through a function."""

    def __init__(self, dataset: Any, fn: Callable[..., Any], seeded: bool = False) -> None:
        self._dataset = check_dataset(dataset, "TransformDataset")
        if not callable(fn):
            raise TypeError(f"transform was given {fn!r}, which is not callable: give a function of a sample")
        self._fn = fn
        self._level = next_level(dataset, _level_of) if seeded else None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        check_one_index(index)
        return self._apply(self._dataset[index])

    def _apply(self, sample: Any) -> Any:
        if self._level is None:
            return self._fn(*sample) if isinstance(sample, tuple) else self._fn(sample)
        with transform_seed(self._fn, self._level):
            return self._fn(*sample) if isinstance(sample, tuple) else self._fn(sample)

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: read at once, then transformed one by one."""
        indices = translated(indices, indices)
        samples = read_many(self._dataset, indices)  # which hands out a copy: these are looked at again
        with each_by_its_key(indices) as turn_to:
            for position, sample in enumerate(samples):
                turn_to(position)
                samples[position] = self._apply(sample)
        return samples

    def __repr__(self) -> str:
        return f"{self._dataset!r}.transform({self._fn!r}{'' if self._level is None else ', seeded=True'})"


def _level_of(dataset: Any) -> int | None:
    return dataset._level if isinstance(dataset, Transformed) else None


def _all_have(name: str) -> Callable[[Any], bool]:
    return lambda self: all(offers(part, name) for part in self.__dict__.get("_parts", [None]))


class Chunk(NamedTuple):
    """The samples of a batch that lie in one part: where in the part, and where in the batch."""

    part: Any
    inner: Int64s
    positions: Int64s


class Joined:
    """Several datasets as one, one after the other."""

    _part: Callable[[slice], Any]  # of `Dataset`: the samples of a slice

    def __init__(self, datasets: Iterable[Any]) -> None:
        self._parts = [check_dataset(part, "ConcatDataset") for part in datasets]
        if not self._parts:
            raise ValueError("ConcatDataset was given no datasets: give at least one")
        *self._begins, self._length = accumulate(map(len, self._parts), initial=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = checked_index(index, self._length)
        number = bisect_right(self._begins, index) - 1
        return self._parts[number][index - self._begins[number]]

    def _chunks(self, indices: Indices) -> list[Chunk]:
        """Which samples lie in which part."""
        where = checked_indices(indices, self._length)
        owners = np.searchsorted(self._begins, where, side="right") - 1
        chunks = []
        for number in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == number)
            chunks.append(Chunk(self._parts[number], where[positions] - self._begins[number], positions))
        return chunks

    @offered_if(_all_have("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: each part reads its own at once."""
        return self._read(indices, self._chunks(indices))

    def _read(self, indices: Indices, chunks: Sequence[Chunk]) -> list[Any]:
        outer = handed_out(indices)
        outer = translated(outer, outer)
        samples: list[Any] = [None] * len(outer)
        for part, inner, positions in chunks:
            chosen = positions.tolist()
            for position, sample in zip(
                chosen, read_many(part, translated(inner.tolist(), outer, chosen)), strict=True
            ):
                samples[position] = sample
        return samples

    @offered_if(_all_have("get_batch"))
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        chunks = self._chunks(indices)
        if len(chunks) == 1:
            return gather(chunks[0].part, chunks[0].inner, empty)
        batch = _merged(chunks, empty)
        return default_batchify_fn.assemble(self._read(indices, chunks), empty) if batch is None else batch

    @offered_if(lambda self: any(hasattr(part, "set_epoch") for part in self.__dict__.get("_parts", [])))
    def set_epoch(self, epoch: int) -> None:
        """Tell the parts that care which epoch is read."""
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._parts))


def _merged(chunks: Sequence[Chunk], empty: Empty) -> Any:
    """The batch of chunks that are rows of `ArrayDataset`s, column by column; None unless their columns are alike."""
    found = [rows_in(chunk.part, chunk.inner) for chunk in chunks]
    if not found or any(one is None for one in found):
        return None
    arrays, rows = zip(*found, strict=True)
    if len({(array._names, len(array._columns)) for array in arrays}) > 1:
        return None
    together = list(zip(*(array._columns for array in arrays), strict=True))
    if not all(map(are_alike, together)):
        return None
    positions = [chunk.positions for chunk in chunks]
    return arrays[0].as_batch([merge_rows(each, rows, positions, empty) for each in together])


# -- which indices -----------------------------------------------------------------------------------------------------


def shard_range(length: int, num_shards: int, index: int) -> range:
    """The indices of one of ``num_shards`` contiguous shards; the first ``length % num_shards`` are one larger.

    Raises:
        ValueError: ``num_shards`` < 1, or ``index`` is not in 0..num_shards-1.

    Example:
        >>> [shard_range(10, 4, i) for i in range(4)]
        [range(0, 3), range(3, 6), range(6, 8), range(8, 10)]
    """
    if num_shards < 1:
        raise ValueError(f"shard(num_shards={num_shards}): the number of shards must be greater than 0")
    if not 0 <= index < num_shards:
        raise ValueError(f"shard index {index} is out of bounds for {num_shards} shards: give 0..{num_shards - 1}")
    size, larger = divmod(length, num_shards)
    begin = size * index + min(index, larger)
    return range(begin, begin + size + (index < larger))


def take_range(length: int, count: int | None) -> range:
    """The indices of the first ``count`` samples of ``length``; a ValueError if ``count`` is negative.

    Example:
        >>> take_range(10, 3), take_range(2, 3), take_range(2, None)
        (range(0, 3), range(0, 2), range(0, 2))
    """
    if count is None:
        return range(length)
    try:
        count = operator.index(count)
    except TypeError:
        raise TypeError(f"take({count!r}): give an int, or None for all") from None
    if count < 0:
        raise ValueError(f"take({count}): the count is negative: give 0 or more, or None for all")
    return range(min(count, length))


def sampler_indices(sampler: Any) -> Int64s:
    """The indices that a sampler yields in its epoch 0 (a sampler without ``iter_epoch``: that it yields now).

    They are drawn at once: a sampler that draws from a global generator would give another order in each worker.
    What is no Sampler, of ours or of torch, is a TypeError; so is one that yields something other than indices.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> sampler_indices(SequentialSampler(range(3)))
        array([0, 1, 2])
    """
    # Looked up, not imported: where torch is not loaded, no sampler of torch exists.
    torchs = getattr(sys.modules.get("torch.utils.data"), "Sampler", ())
    if not (hasattr(type(sampler), "iter_epoch") or isinstance(sampler, torchs)):
        raise TypeError(
            f"Invalid sampler type: {type(sampler)}. Expected a Sampler of sharded_loader or torch; for a list of "
            "indices use SubsetDataset(dataset, indices)"
        )
    # A subclass that overrides __iter__ means that to be used, whatever it inherits.
    is_pure = any(known_to(type(sampler), name, ["__iter__"]) for name in ("iter_epoch", "chunks"))
    order = sampler.iter_epoch(0) if is_pure else iter(sampler)
    try:
        return np.fromiter((operator.index(index) for index in order), np.int64)
    except TypeError:
        raise TypeError(
            f"{type(sampler).__name__} does not yield single indices: give a sampler of samples, not of batches"
        ) from None


def split_sizes(length: int, sizes_or_ratios: Sequence[float]) -> list[int]:
    """Sizes of parts that sum to ``length``, from sizes or ratios; a ValueError where `Dataset.split` has one.

    Example:
        >>> split_sizes(10, [0.5, 0.25, 0.25]), split_sizes(10, [7, 3])
        ([5, 3, 2], [7, 3])
    """
    parts = list(sizes_or_ratios)
    if not parts:
        raise ValueError("split([]): give at least one size or ratio")
    if any(isinstance(part, (bool, np.bool_)) or not math.isfinite(part) or part < 0 for part in parts):
        raise ValueError(f"split({parts}): sizes and ratios are numbers of 0 or more")
    if all(isinstance(part, (int, np.integer)) for part in parts):
        sizes = [int(part) for part in parts]
        if sum(sizes) != length:
            raise ValueError(
                f"split({parts}): the sizes sum to {sum(sizes)}, the dataset has {length} samples: "
                "make them sum to its length, or give ratios (floats) that sum to 1"
            )
        return sizes
    total = math.fsum(parts)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"split({parts}): the ratios sum to {total:g}: make them sum to 1, or give sizes (ints)")
    shares = [length * part / total for part in parts]
    sizes = [math.floor(share) for share in shares]
    # Largest remainder; ties go to the earlier part. Rounded, so that 0.29 * 100 counts as a whole 29.
    order = sorted(range(len(parts)), key=lambda i: (round(sizes[i] - shares[i], 9), i))
    for i in order[: length - sum(sizes)]:
        sizes[i] += 1
    return sizes


def split_indices(length: int, sizes_or_ratios: Sequence[float], seed: int | None) -> list[Int64s]:
    """A random permutation of 0..length-1, cut into parts; a pure function of its arguments if ``seed`` is given.

    Example:
        >>> [len(part) for part in split_indices(10, [0.8, 0.2], seed=3)]
        [8, 2]
    """
    sizes = split_sizes(length, sizes_or_ratios)
    key = rng.draw_seed() if seed is None else operator.index(seed)
    order = rng.philox(key, "split").permutation(length).astype(np.int64, copy=False)
    return np.split(order, np.cumsum(sizes)[:-1])
