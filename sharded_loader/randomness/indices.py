"""The indices of a part of a dataset: a range, an array, or a view that computes them when they are read.

    shuffled_parts(n, sizes, *key)      a shuffle cut into parts: sequences of indices, of any length
    taken(indices, positions)           the indices at these positions
    composed(outer, inner)              the indices of a part of a part

A `Selection` is never changed once it is made. Ranges and views take no memory, however long they are. What can go
wrong: a position out of range. An `IndexView` checks positions that users give; the functions here check nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from sharded_loader.randomness import shuffle
from sharded_loader.randomness.shuffle import Bijection, Indices, shuffled


class IndexView(Sequence[int]):
    """Read-only indices that are computed when you ask for them. They take no memory, however many there are.

    You get a view from ``dataset.split(...)[0].indices``, if the dataset has more than 2**24 (16 M) samples. An integer
    gives one index, a slice gives another view, and an array of integers gives an array of indices. ``list(view)`` and
    ``np.asarray(view)`` compute all of them.

    Args:
        length, key: The whole shuffle; see `Bijection`.
        positions: Which positions of the shuffle.
        of: The indices among which the shuffle chooses. None: all from 0 to ``length - 1``.

    Example:
        >>> from sharded_loader import SimpleDataset
        >>> train, test = SimpleDataset(range(10**12)).split([0.9, 0.1], seed=7)
        >>> len(test.indices), test.indices[-1] == test[-1]
        (100000000000, True)
        >>> test.indices[:1000]
        <IndexView of 1000 indices below 1000000000000>
        >>> test.indices[np.array([5, 0])].tolist() == [test[5], test[0]]
        True
    """

    def __init__(self, length: int, key: tuple[Hashable, ...], positions: range, of: Selection | None = None) -> None:
        self._length, self._key, self._positions, self._of = length, key, positions, of
        self._order = Bijection(length, *key)

    def __len__(self) -> int:
        return len(self._positions)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (list, np.ndarray)):
            return self.at(_checked(np.asarray(index), len(self)))
        found = self._positions[index]
        if isinstance(found, range):
            return IndexView(self._length, self._key, found, self._of)
        return int(self._at(np.array([found]))[0])

    def at(self, positions: Indices) -> Indices:
        """The indices at these positions, which are not checked."""
        return self._at(taken(self._positions, positions))

    def _at(self, places: Indices) -> Indices:
        """The indices at these places of the whole shuffle."""
        found = self._order(places)
        return found if self._of is None else taken(self._of, found)

    @property
    def bound(self) -> int:
        """A number that is greater than all indices."""
        return self._length if self._of is None else bound_of(self._of)

    @property
    def recipe(self) -> str:
        """What the indices follow from, as a text."""
        text = f"ShuffledPart({self._length}, {self._key}, {self._positions})"
        return text if self._of is None else f"{text} of {recipe_of(self._of)}"

    def within(self, of: Selection) -> IndexView:
        """The same positions of another selection: what this view chooses is looked up in ``of``."""
        inside = of if self._of is None else composed(of, self._of)
        return IndexView(self._length, self._key, self._positions, inside)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self.at(np.arange(len(self))).astype(np.int64 if dtype is None else dtype, copy=False)

    def __repr__(self) -> str:
        return f"<IndexView of {len(self)} indices below {self.bound}>"


Selection = range | IndexView | Indices
"""The indices of a part of a dataset: a ``range``, an `IndexView`, or an array of int64."""


def shuffled_parts(length: int, sizes: Sequence[int], *key: Hashable) -> list[Indices | IndexView]:
    """A shuffle of ``range(length)``, cut into parts: arrays up to ``IN_MEMORY`` indices, `IndexView` above.

    Example:
        >>> [len(part) for part in shuffled_parts(10, [7, 3], 7, "split")]
        [7, 3]
    """
    ends = list(accumulate(sizes))
    if length <= shuffle.IN_MEMORY:
        return [*np.split(shuffled(length, *key), ends[:-1])]
    return [IndexView(length, key, range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def is_computed(indices: Any) -> bool:
    """Whether these are indices that take no memory, and must not become an array: a range, or an `IndexView`."""
    return isinstance(indices, range | IndexView)


def recipe_of(indices: Selection) -> str:
    """What these indices follow from, as a text. Saved states hold checksums of it: it must stay as it is.

    Example:
        >>> recipe_of(range(0, 10**12, 2))
        'range(0, 1000000000000, 2)'
    """
    if isinstance(indices, range):
        return repr(indices)
    return indices.recipe if isinstance(indices, IndexView) else f"{zlib.crc32(indices.tobytes()):08x}"


def bound_of(indices: Selection) -> int:
    """A number that is greater than all indices.

    Example:
        >>> bound_of(range(7, 0, -2)), bound_of(np.array([3, 4, 1])), bound_of(range(0))
        (8, 5, 0)
    """
    if isinstance(indices, IndexView):
        return indices.bound
    if not len(indices):
        return 0
    return 1 + (max(indices[0], indices[-1]) if isinstance(indices, range) else int(indices.max()))


def composed(outer: Selection, inner: Selection) -> Selection:
    """The indices of a part of a part: ``outer`` at the positions ``inner``, which are not checked.

    It takes no memory where neither of them is an array.

    Example:
        >>> composed(range(100, 200, 10), range(5, 0, -2)), composed(range(100, 200, 10), np.array([3, 0]))
        (range(150, 100, -20), array([130, 100]))
    """
    if isinstance(inner, IndexView):
        return inner.within(outer)
    if isinstance(inner, range):
        found: Selection = outer[slice(inner.start, inner.stop if inner.stop >= 0 else None, inner.step)]
        return found
    return taken(outer, inner)


def _checked(positions: npt.NDArray[Any], length: int) -> Indices:
    if positions.size and positions.dtype.kind not in "iu":
        raise TypeError(f"positions of dtype {positions.dtype}: give integers, a slice, or an array of integers")
    found: Indices = positions.astype(np.int64)
    found = np.where(found < 0, found + length, found)
    if ((found < 0) | (found >= length)).any():
        raise IndexError(f"a position is out of range for {length} indices: valid is -{length}..{length - 1}")
    return found


def taken(indices: Selection, positions: Indices) -> Indices:
    """The indices at these positions, which are not checked.

    Example:
        >>> taken(range(10**12, 0, -2), np.array([0, 3]))
        array([1000000000000,  999999999994])
    """
    if isinstance(indices, range):
        return indices.start + indices.step * positions
    return indices.at(positions) if isinstance(indices, IndexView) else indices[positions]
