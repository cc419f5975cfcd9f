"""Some samples of a dataset, chosen by indices: what `shard`, `take`, `sample`, `filter` and `split` return.

Which indices is a pure function, tested on numbers: `shard_range`, `take_range`, `sampler_indices`,
`split_indices`. `SubsetDataset` only looks them up; a range stays a range, anything else is an int64 array.
What can go wrong is refused when the subset is made, not when it is read.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from sharded_loader import rng
from sharded_loader.data.base import Indices, Wrapper, check_dataset
from sharded_loader.data.bulk import checked_index, checked_indices, gather, offered_if, translated
from sharded_loader.data.errors import Empty, new_array
from sharded_loader.data.overrides import has

Selection = range | np.ndarray[Any, np.dtype[np.int64]]


class SubsetDataset(Wrapper):
    """The samples of ``dataset`` at ``indices``, in that order: what ``take``, ``shard``, ``split``, ... return.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        indices: integers in 0..len(dataset)-1; a range costs no memory.

    Raises:
        IndexError: an index is out of range.
        TypeError: the dataset cannot be indexed, or the indices are no integers.

    Example:
        >>> list(SubsetDataset("abc", [2, 0]))
        ['c', 'a']

    Source of the idea: ``torch.utils.data.Subset``.
    """

    def __init__(self, dataset: Any, indices: Selection | Sequence[int]) -> None:
        self._dataset = dataset = check_dataset(dataset, "SubsetDataset")
        if isinstance(indices, range):
            if len(indices):
                checked_indices([indices[0], indices[-1]], len(dataset))
            self._indices: Selection = indices
        else:
            # A copy: the caller may shuffle an array of indices again, for another subset.
            self._indices = np.array(checked_indices(indices, len(dataset)))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._dataset[int(self._indices[checked_index(index, len(self._indices))])]

    @property
    def indices(self) -> Selection:
        """Where the samples stand in the wrapped dataset.

        Example:
            >>> SubsetDataset("abc", range(2)).indices
            range(0, 2)
        """
        return self._indices

    def _inner(self, indices: Indices) -> np.ndarray[Any, np.dtype[np.int64]]:
        where = checked_indices(indices, len(self._indices))
        if isinstance(self._indices, range):
            inner: np.ndarray[Any, np.dtype[np.int64]] = self._indices.start + self._indices.step * where
        else:
            inner = self._indices[where]
        return inner

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        return list(self._dataset.__getitems__(translated(self._inner(indices).tolist(), indices)))

    @offered_if(has("get_batch"))
    def get_batch(self, indices: Indices) -> Any:
        """A finished batch."""
        return self._gather(indices, new_array)

    @offered_if(has("get_batch"))
    def _gather(self, indices: Indices, empty: Empty) -> Any:
        return gather(self._dataset, self._inner(indices), empty)

    def __repr__(self) -> str:
        return f"<{len(self)} of {self._dataset!r}>"


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
    """The indices of the first ``count`` samples of ``length``.

    Raises:
        ValueError: ``count`` is negative.

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


def sampler_indices(sampler: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The indices that a sampler yields in its epoch 0 (a sampler without ``iter_epoch``: that it yields now).

    They are drawn at once: a sampler that draws from a global generator would give another order in each worker.

    Raises:
        TypeError: it is no Sampler, of ours or of torch, or yields something other than indices.

    Example:
        >>> from torch.utils.data import SequentialSampler
        >>> sampler_indices(SequentialSampler(range(3)))
        array([0, 1, 2])
    """
    # Looked up, not imported: where the module is not loaded, no object of its classes exists.
    homes = [sys.modules.get("sharded_loader.sampling.base"), sys.modules.get("torch.utils.data")]
    classes = tuple(getattr(home, "Sampler") for home in homes if hasattr(home, "Sampler"))  # noqa: B009 - may be None
    if not isinstance(sampler, classes):
        raise TypeError(
            f"Invalid sampler type: {type(sampler)}. Expected a Sampler of sharded_loader or torch; for a list of "
            "indices use SubsetDataset(dataset, indices)"
        )
    # A subclass that overrides __iter__ means that to be used, whatever it inherits.
    is_own = getattr(sys.modules.get("sharded_loader.sampling.base"), "is_own", lambda _: False)
    order = sampler.iter_epoch(0) if is_own(sampler) else iter(sampler)
    try:
        return np.fromiter((operator.index(index) for index in order), np.int64)
    except TypeError:
        raise TypeError(
            f"{type(sampler).__name__} does not yield single indices: give a sampler of samples, not of batches"
        ) from None


def split_sizes(length: int, sizes_or_ratios: Sequence[float]) -> list[int]:
    """Sizes of parts that sum to ``length``, from sizes or ratios.

    Raises:
        ValueError: see `Dataset.split`.

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


def split_indices(
    length: int, sizes_or_ratios: Sequence[float], seed: int | None
) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """A random permutation of 0..length-1, cut into parts; a pure function of its arguments if ``seed`` is given.

    Example:
        >>> [len(part) for part in split_indices(10, [0.8, 0.2], seed=3)]
        [8, 2]
    """
    sizes = split_sizes(length, sizes_or_ratios)
    key = rng.draw_seed() if seed is None else operator.index(seed)
    order = rng.philox(key, "split").permutation(length).astype(np.int64, copy=False)
    return np.split(order, np.cumsum(sizes)[:-1])
