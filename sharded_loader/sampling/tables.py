"""One epoch of a sampler as a table: any item by its position, and the arithmetic of positions.

    Table(length, at)                   a sampler of ours: ``at(positions)`` takes the same time for any position
    Streamed(open)                      an iterator: it is read as far as somebody asks
    Dealt(table, replicas, rank)        what one rank gets of a table: every R-th item
    Batched(table, size)                batches of a table's items

Every table answers two questions, and both in one:
    table.upto(begin, end)   where the items from ``begin`` on end: at ``end``, or before it if the epoch ends
    table.at(positions)      the items at these positions: int64, ascending, below what `upto` said
    table.slice(begin, end)  the items from ``begin`` up to where they end

Batches, ranks, resuming and rollover (`sharded_loader.sampling.rollover`) are arithmetic on positions. A rank computes
only the items at its own.

What can go wrong: an iterator of another library raises an error.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np

from sharded_loader.engine.split import plain_index
from sharded_loader.randomness.indices import is_computed, recipe_of
from sharded_loader.randomness.shuffle import IN_MEMORY, Indices

BLOCK = 2**15
"""How many indices are made at once. 256 KB of indices and their temporaries stay in the second-level cache."""
BATCHES = 64
"""How many batches a batch sampler of ours makes at once: to ask for one takes 12 us, whatever its size."""


def parts(count: int, size: int, cut: bool) -> int:
    """How many parts of ``size`` there are in ``count``; an incomplete last part counts unless ``cut``.

    Example:
        >>> parts(7, 3, cut=False), parts(7, 3, cut=True)
        (3, 2)
    """
    return count // size if cut else -(-count // size)


def checksum_of(numbers: Any, before: int = 0) -> int:
    """The same for equal numbers of any dtype, in a list, an array or a range; 3 ms for a million.

    Of a range, or a part of a shuffle, that is too long to be looked at: the same where it is made in the same way.

    Args:
        numbers: the numbers.
        before: the checksum of those before them.

    Example:
        >>> checksum_of(range(3)) == checksum_of(np.array([0, 1, 2], np.uint8)) != checksum_of([0, 1, 3])
        True
    """
    if is_computed(numbers) and len(numbers) > IN_MEMORY:
        return zlib.crc32(recipe_of(numbers).encode(), before)
    array = np.asarray(numbers)
    return zlib.crc32(array.astype("<f8" if array.dtype.kind == "f" else "<i8", copy=False).tobytes(), before)


def bytes_of(items: Any) -> bytes:
    """Bytes that depend on the items, not on where one list of them ends and the next begins."""
    try:
        return struct.pack(f"<{len(items)}q", *items)
    except (struct.error, TypeError):  # not all of them are integers of 64 bits
        return b"".join(map(bytes_of_one, items))


def bytes_of_one(item: Any) -> bytes:
    """The bytes of a list of this one item, without a list."""
    if type(item) is not list and hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, list | tuple):
        return len(item).to_bytes(8, "little") + bytes_of(item)
    try:
        return struct.pack("<q", item)
    except struct.error:
        return repr(item).encode()


class Table:
    """The items of one epoch of a sampler of ours.

    Args:
        length: the number of items.
        at: positions -> an int64 array of indices, or a list of other items.
        block: the number to ask for at once, where somebody reads them one after the other.

    Example:
        >>> squares = Table(5, lambda positions: positions**2, block=3)
        >>> squares.at(np.array([1, 3])), list(squares.items(2)), squares.upto(2, 9)
        (array([1, 9]), [4, 9, 16], 5)
    """

    def __init__(self, length: int, at: Callable[[Indices], Any], block: int = 1) -> None:
        self._length, self._at, self._block = length, at, block

    @property
    def block(self) -> int:
        return self._block

    def upto(self, begin: int, end: int) -> int:
        return min(end, self._length)

    def at(self, positions: Indices) -> Any:
        return self._at(positions)

    def slice(self, begin: int, end: int) -> Any:
        """The items at these positions, in one step; fewer at the end of the epoch."""
        end = self.upto(begin, end)
        return self.at(np.arange(begin, end)) if end > begin else []

    def items(self, start: int = 0) -> Iterator[Any]:
        """The items from position ``start`` on, indices as Python ints."""
        while len(block := self.slice(start, start + self.block)):
            yield from block.tolist() if isinstance(block, np.ndarray) else block
            start += len(block)


class Streamed(Table):
    """The items of an iterator. They are read as far as `upto` asks, and kept until `at` has returned them.

    Args:
        open: the number of items to leave out -> an iterator over the rest.
    """

    def __init__(self, open: Callable[[int], Iterator[Any]]) -> None:
        self._block = 1
        self._open = open
        self._items: Any = None  # an iterator, once the epoch is opened
        self._base = 0  # position of the first item in the buffer
        self._buffer: list[Any] = []
        self._ended = False

    def upto(self, begin: int, end: int) -> int:
        if begin > self._base + len(self._buffer):
            self._jump(begin)
        missing = end - self._base - len(self._buffer)
        if missing > 0 and not self._ended:
            found = self._read(missing)
            self._ended = len(found) < missing
            self._buffer += found
        return min(end, self._base + len(self._buffer))

    def at(self, positions: Indices) -> list[Any]:
        first, last = int(positions[0]), int(positions[-1])
        if first < self._base:
            return self._again(positions)
        self.upto(first, last + 1)
        if last - first + 1 == len(positions):
            found = self._buffer[first - self._base : last + 1 - self._base]
        else:
            found = [self._buffer[position] for position in (positions - self._base).tolist()]
        del self._buffer[: last + 1 - self._base]
        self._base = last + 1
        return found

    def slice(self, begin: int, end: int) -> list[Any]:
        if begin < self._base:
            return list(super().slice(begin, end))
        end = self.upto(begin, end) - self._base
        found = self._buffer[begin - self._base : end]
        del self._buffer[:end]
        self._base += end
        return found

    def _read(self, count: int) -> list[Any]:
        if self._items is None:
            self._items = self._open(self._base)
        return list(islice(self._items, count))

    def _jump(self, begin: int) -> None:
        self._items, self._base, self._buffer = None, begin, []

    def _again(self, positions: Indices) -> list[Any]:
        """Items that were returned before."""
        return Streamed(self._open).at(positions)


class Dealt(Table):
    """What one rank gets of a table: positions ``rank``, ``rank + replicas``, ... after ``offset``.

    All ranks get equally many items. The last group of ``replicas`` items is filled from the epoch's beginning.

    Args:
        table, replicas, rank: the global order, how many ranks there are, and which is this one.
        offset: the number of items at the beginning of the global order that are left out.
        truncate: leave an incomplete last group out.

    Example:
        >>> five = Table(5, lambda positions: positions, block=8)
        >>> [list(Dealt(five, 2, rank).items()) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(self, table: Table, replicas: int, rank: int, offset: int = 0, truncate: bool = False) -> None:
        self._table, self._replicas, self._rank = table, replicas, rank
        self._offset, self._truncate = offset, truncate

    @property
    def block(self) -> int:
        return self._table.block

    def upto(self, begin: int, end: int) -> int:
        return parts(self._end(begin, end) - self._offset, self._replicas, self._truncate)

    def _end(self, begin: int, end: int) -> int:
        # Whole groups, also of a stream: all ranks have read equally far, so they save the same state.
        return self._table.upto(self._offset + begin * self._replicas, self._offset + end * self._replicas)

    def at(self, positions: Indices) -> Any:
        wanted = positions * self._replicas + (self._offset + self._rank)
        end = self._end(int(positions[0]), int(positions[-1]) + 1)
        if wanted[-1] < end:
            return self._table.at(wanted)
        # Only the last one can lie past the end.
        found = [self._table.at(part) for part in (wanted[:-1], wanted[-1:] % end) if len(part)]
        return joined(found)


class Batched(Table):
    """A table's items, ``size`` at a time, as lists of Python ints (or of what else the items are).

    Args:
        table, size: the items, and how many make a batch.
        drop_last: leave an incomplete last batch out.
        arrays, convert: batches of numbers are int64 arrays; batches of other items that are ints become arrays too.

    Example:
        >>> list(Batched(Table(5, lambda positions: positions + 10, block=8), 2).items(1))
        [[12, 13], [14]]
    """

    def __init__(
        self, table: Table, size: int, drop_last: bool = False, *, arrays: bool = False, convert: bool = False
    ) -> None:
        self._table, self._size, self._drop_last = table, size, drop_last
        self._arrays, self._convert = arrays, convert

    @property
    def block(self) -> int:
        return max(self._table.block // self._size, 1)

    def upto(self, begin: int, end: int) -> int:
        return parts(self._table.upto(begin * self._size, end * self._size), self._size, self._drop_last)

    def at(self, positions: Indices) -> list[Any]:
        size, first, last = self._size, int(positions[0]), int(positions[-1])
        end = self._table.upto(first * size, (last + 1) * size)
        if last - first + 1 == len(positions):
            wanted = np.arange(first * size, end)
        else:
            wanted = (positions[:, None] * size + np.arange(size)).ravel()
            wanted = wanted[wanted < end]
        return self._cut(self._table.at(wanted))

    def slice(self, begin: int, end: int) -> list[Any]:
        items = self._table.slice(begin * self._size, end * self._size)
        return self._cut(items[: len(items) // self._size * self._size] if self._drop_last else items)

    def _cut(self, items: Any) -> list[Any]:
        size = self._size
        if not isinstance(items, np.ndarray):
            return [self._batch(items[begin : begin + size]) for begin in range(0, len(items), size)]
        whole = len(items) // size * size
        rows = items[:whole].reshape(-1, size)
        batches: list[Any] = list(rows) if self._arrays else rows.tolist()
        if whole < len(items):
            batches.append(items[whole:] if self._arrays else items[whole:].tolist())
        return batches

    def _batch(self, items: list[Any]) -> Any:
        if set(map(type, items)) != {int}:
            items = [plain_index(item) for item in items]
        if self._convert and set(map(type, items)) == {int}:
            try:
                return np.array(items, np.int64)
            except OverflowError:
                pass  # out of any range: the plan says so
        return items


def joined(found: list[Any]) -> Any:
    """Items that were found in parts, as one array or list."""
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if isinstance(found[0], np.ndarray) else list(chain.from_iterable(found))
