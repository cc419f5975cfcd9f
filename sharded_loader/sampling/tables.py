"""One epoch of a sampler as a table: random access to items, and the arithmetic of positions.

    Table(length, at)                         a sampler of this library: constant time for any position
    LazyTable(open)                           an iterator, read on demand
    StridedTable(table, replicas, rank)       one rank's share of a table: every R-th item
    PaddedTable(table, length, begin, total)  a table with padding at its end
    BatchedTable(table, size)                 batches of a table's items
    Rollover(length, size, epoch)             the batches of one epoch with rollover
    EpochSegment(length, replicas, ...)            arithmetic of steps of all ranks in an endless sequence of epochs
    EndlessTable(open, segment, rank)         the items of a segment, for one rank
    StepCount(steps)                          steps before each epoch, and the skipped ones (``skip=``)

All tables have `Table.upto`, `Table.at` and `Table.slice`. Batching, ranks, resuming and rollover are arithmetic on
positions, so a rank computes only its own items. With rollover or ``steps_per_epoch`` the epochs form one endless
sequence, cut into whole batches; leftover samples begin the next epoch. Where an epoch begins follows from the lengths
alone, so it can be read without those before it.

What can go wrong: a third-party iterator raises an error, or its length is wrong (ValueError).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an
from sharded_loader.engine.split import are_plain, plain_index
from sharded_loader.randomness.rng import IN_MEMORY, Indices

BLOCK = 2**15
"""Indices computed at once: 256 KB and their temporaries stay in the L2 cache."""


def parts(count: int, size: int, cut: bool) -> int:
    """Return the number of chunks of ``size`` in ``count``; an incomplete last chunk counts unless ``cut``.

    Example:
        >>> parts(7, 3, cut=False), parts(7, 3, cut=True)
        (3, 2)
    """
    return count // size if cut else -(-count // size)


def checksum_of(numbers: Any, before: int = 0) -> int:
    """Return a CRC-32 of numbers, continuing from ``before``, independent of dtype and container; 3 ms per million.

    Example:
        >>> checksum_of(range(3)) == checksum_of(np.array([0, 1, 2], np.uint8)) != checksum_of([0, 1, 3])
        True
    """
    if isinstance(numbers, range) and len(numbers) > IN_MEMORY:
        return zlib.crc32(repr(numbers).encode(), before)
    array = np.ascontiguousarray(numbers)
    return zlib.crc32(array.astype("<f8" if array.dtype.kind == "f" else "<i8", copy=False).data, before)


def bytes_of(items: Any) -> bytes:
    """Serialize items for a checksum. Concatenated chunks give the same bytes as one list."""
    try:
        return struct.pack(f"<{len(items)}q", *items)
    except (struct.error, TypeError):  # not all are 64-bit integers
        return b"".join(map(bytes_of_one, items))


def bytes_of_one(item: object) -> bytes:
    if type(item) is not list and hasattr(item, "tolist"):
        item = item.tolist()
    if isinstance(item, list | tuple):
        try:
            return struct.pack(f"<{1 + len(item)}q", len(item), *item)
        except (struct.error, TypeError):
            return len(item).to_bytes(8, "little") + bytes_of(item)
    try:
        return struct.pack("<q", item)
    except struct.error:
        return repr(item).encode()


class Table:
    """Items of one epoch, by position.

    Args:
        length: number of items.
        at: function of positions that returns an int64 array of indices, or a list of other items.
        block: number of items to compute at once when reading sequentially.

    Example:
        >>> squares = Table(5, lambda positions: positions**2, block=3)
        >>> squares.at(np.array([1, 3])), list(squares.items(2)), squares.upto(2, 9)
        (array([1, 9]), [4, 9, 16], 5)
    """

    _block = 1

    def __init__(self, length: int, at: Callable[[Indices], object], block: int = 1) -> None:
        self._length, self._at, self._block = length, at, block

    @property
    def block(self) -> int:
        return self._block

    def upto(self, begin: int, end: int) -> int:
        return min(end, self._length)

    def at(self, positions: Indices) -> Any:
        return self._at(positions)

    def slice(self, begin: int, end: int) -> Any:
        """Return the items from ``begin`` to ``end``; fewer at the end of the epoch."""
        end = self.upto(begin, end)
        return self.at(np.arange(begin, end)) if end > begin else []

    def items(self, start: int = 0) -> Iterator[Any]:
        """Iterate over the items from position ``start`` on; indices are Python ints."""
        while len(block := self.slice(start, start + self.block)):
            yield from block.tolist() if isinstance(block, np.ndarray) else block
            start += len(block)


class LazyTable(Table):
    """Items of an iterator, read as far as `upto` asks and buffered until `at` returns them."""

    def __init__(self, open: Callable[[int], Iterator[object]]) -> None:
        self._open = open
        self._items: Any = None  # iterator, once the epoch is open
        self._base = 0  # position of the first item in the buffer
        self._buffer: list[Any] = []
        self._ended = False

    def upto(self, begin: int, end: int) -> int:
        if begin > self._base + len(self._buffer):
            self._skip_to(begin)
        missing = end - self._base - len(self._buffer)
        if missing > 0 and not self._ended:
            found = self._read(missing)
            self._ended = len(found) < missing
            self._buffer += found
        return min(end, self._base + len(self._buffer))

    def at(self, positions: Indices) -> list[Any]:
        first, last = int(positions[0]), int(positions[-1])
        if first < self._base:
            return self._reread(positions)
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

    def _skip_to(self, begin: int) -> None:
        self._items, self._base, self._buffer = None, begin, []

    def _reread(self, positions: Indices) -> list[Any]:
        return LazyTable(self._open).at(positions)


class WrapperTable(Table):
    """A table that is made of another one, and read in the blocks of that."""

    _table: Table

    @property
    def block(self) -> int:
        return self._table.block


class PaddedTable(WrapperTable):
    """A table of ``length`` items, padded to ``total`` with copies of one item so that all ranks get whole batches.

    Items of one rank are ``replicas`` apart; 0 if the table cannot be read before position ``begin``.

    Example:
        >>> list(PaddedTable(Table(3, lambda positions: positions + 10, block=8), 3, 0, 5).items())
        [10, 11, 12, 12, 12]
    """

    def __init__(self, table: Table, length: int, begin: int, total: int, replicas: int = 0) -> None:
        self._table, self._filled, self._begin, self._length = table, length, begin, total
        self._replicas = replicas
        self._last: Any = None  # the last item read, in a list or array

    def at(self, positions: Indices) -> Any:
        within = positions[: np.searchsorted(positions, self._filled)]
        if len(within) or self._last is None:
            first = int(positions[0])
            # A rank without items repeats its last one, or the first of all; rank 0 has its own table.
            if replicas := self._replicas:
                first = max(first - parts(first + 1 - self._filled, replicas, cut=False) * replicas, 0)
            items = self._table.at(within if len(within) else np.array([first if replicas else self._begin]))
            if len(items) < max(len(within), 1):
                text = f"the sampler yielded fewer items than its length, {self._filled}, says"
                raise ValueError(f"{text}: correct its __len__, or do without evaluate=True")
            self._last = items[-1:]
        padding = [self._last] * (len(positions) - len(within))
        return concatenated([items, *padding] if len(within) else padding)


class StridedTable(WrapperTable):
    """One rank's share of a table: positions ``rank``, ``rank + replicas``, ... after ``offset``. All shares are equal.

    An incomplete last group wraps around to the beginning of the epoch, or is dropped if ``truncate``.

    Example:
        >>> five = Table(5, lambda positions: positions, block=8)
        >>> [list(StridedTable(five, 2, rank).items()) for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """

    def __init__(self, table: Table, replicas: int, rank: int, offset: int = 0, truncate: bool = False) -> None:
        self._table, self._replicas, self._rank = table, replicas, rank
        self._offset, self._truncate = offset, truncate

    def upto(self, begin: int, end: int) -> int:
        return parts(self._end(begin, end) - self._offset, self._replicas, self._truncate)

    def _end(self, begin: int, end: int) -> int:
        # Whole groups, even of an iterator: ranks that have read equally far save the same state.
        return self._table.upto(self._offset + begin * self._replicas, self._offset + end * self._replicas)

    def at(self, positions: Indices) -> Any:
        wanted = positions * self._replicas + (self._offset + self._rank)
        end = self._end(int(positions[0]), int(positions[-1]) + 1)
        if wanted[-1] < end:
            return self._table.at(wanted)
        # Only the last item can lie past the end.
        return concatenated([self._table.at(part) for part in (wanted[:-1], wanted[-1:] % end) if len(part)])


class BatchedTable(Table):
    """Batches of ``size`` items, as lists of Python ints (or of other items); with ``arrays`` as int64 arrays.

    ``convert`` also turns lists that contain only ints into arrays.

    Example:
        >>> list(BatchedTable(Table(5, lambda positions: positions + 10, block=8), 2).items(1))
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
        wanted = (positions[:, None] * size + np.arange(size)).ravel()
        return self._split(self._table.at(wanted if wanted[-1] < end else wanted[wanted < end]))

    def slice(self, begin: int, end: int) -> list[Any]:
        items = self._table.slice(begin * self._size, end * self._size)
        return self._split(items[: len(items) // self._size * self._size] if self._drop_last else items)

    def _split(self, items: Any) -> list[Any]:
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
        if not are_plain(items):
            items = [plain_index(item) for item in items]
        return as_numbers(items) if self._convert else items


def as_numbers(items: list[Any]) -> Any:
    """Convert a list of ints to an int64 array; return any other list unchanged.

    Example:
        >>> as_numbers([3, 1]), as_numbers([3, "a"]), as_numbers([True])
        (array([3, 1]), [3, 'a'], [True])
    """
    if set(map(type, items)) == {int}:
        with suppress(OverflowError):  # too large for an index: rejected later, with the batch's number
            return np.array(items, np.int64)
    return items


def concatenated(found: list[Any]) -> Any:
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if isinstance(found[0], np.ndarray) else list(chain.from_iterable(found))


# -- epochs as one endless sequence ------------------------------------------------------------------------------------


ENDLESS = 1 << 61
"""Stand-in length of a sampler without one under ``steps_per_epoch``; no run gets that far."""


class Rollover:
    """Batches of one epoch with rollover, as a segment of the endless sequence of epochs.

    Args:
        done: items of the epoch already done, counted from ``origin``; None: start at the epoch's beginning.
        batches: batches per epoch, regardless of the length; None: as many as fit.
        shift: offset of all epoch starts in items. If nonzero, ``replicas`` divides ``length``.

    Attributes:
        is_begun: some items of the epoch are already done.
        is_behind: the start is past the start of epoch + 1, so no batch is left.
        origin: global number of the epoch's own first item, from which its positions count; with ``batches``, of the
            item where its first batch begins.
        length_of_epoch: distance in items from this origin to that of epoch + 1.

    Example:
        With 5 items in batches of 2, epoch 0 has 2 batches, and epoch 1 begins at item 4.

        >>> one, rest = Rollover(5, 2, epoch=1), Rollover(5, 2, epoch=1, done=1)
        >>> one.length(), one.total(0), rest.first, rest.length()
        (3, 4, 1, 2)
    """

    def __init__(
        self,
        length: int,
        size: int,
        epoch: int,
        replicas: int = 1,
        done: int | None = None,
        batches: int | None = None,
        shift: int = 0,
    ) -> None:
        whole = EpochSegment(length, replicas, 0, 0)
        cuts = [e * whole.steps // size if batches is None else e * batches * bool(length) for e in (epoch, epoch + 1)]
        begin, end = whole.total(cuts[0] * size) + shift, whole.total(cuts[1] * size) + shift
        self.origin, self.length_of_epoch = (epoch * length, length) if batches is None else (begin, end - begin)
        total = begin if done is None else self.origin + done
        self._size, self._end = size, max(end, total)
        self._segment = EpochSegment(length, replicas, *divmod(total, max(length, 1)))
        self._count = self._segment.steps_before(self._end) if total < end else 0
        self.is_begun, self.is_behind = total > begin, total > end
        steps = whole.steps_before(total, cut=True) - whole.steps_before(begin)
        self.first = max(0, ((total - begin) // replicas if shift else steps) // size)

    def items(self, open: Callable[[int], Table], rank: int, name: str) -> Table:
        return EndlessTable(open, self._segment, rank, self._count, name)

    def length(self) -> int:
        return parts(self._count, self._size, cut=False)

    def total(self, batches: int) -> int:
        """Return the number of items, over all epochs, before a batch counted from the start."""
        return min(self._segment.total(batches * self._size), self._end)


class EpochSegment:
    """A segment of the endless sequence of epochs, after ``offset`` items of ``epoch``, in steps of one item per rank.

    Example:
        10 items on 3 ranks give 4 steps per epoch. After 4 items of epoch 0 two steps are left. Steps 2 to 5 are epoch
        1.

        >>> segment = EpochSegment(10, 3, 0, 4)
        >>> [segment.where(step) for step in (1, 2, 6)], [segment.total(step) for step in (1, 2, 3)]
        ([(0, 0), (1, 2), (2, 6)], [7, 10, 13])
    """

    def __init__(self, length: int, replicas: int, epoch: int, offset: int) -> None:
        self.length, self.replicas, self.epoch, self.offset = length, replicas, epoch, offset
        self.steps = parts(length, replicas, cut=False)
        self.left = parts(length - offset, replicas, cut=False)

    def where(self, step: int) -> tuple[int, int]:
        """Return the epoch of a step, and the first step of that epoch."""
        if step < self.left or not self.steps:
            return self.epoch, 0
        later = (step - self.left) // self.steps
        return self.epoch + 1 + later, self.left + later * self.steps

    def steps_before(self, total: int, cut: bool = False) -> int:
        """Return the number of steps before item ``total`` of all epochs; a partial last step counts unless ``cut``."""
        epoch, offset = divmod(total, max(self.length, 1))
        if epoch == self.epoch:
            return parts(offset - self.offset, self.replicas, cut)
        return self.left + (epoch - self.epoch - 1) * self.steps + parts(offset, self.replicas, cut)

    def total(self, step: int) -> int:
        """Return the number of items, over all epochs, before a step."""
        epoch, first = self.where(step)
        offset = self.offset if epoch == self.epoch else 0
        return epoch * self.length + offset + (step - first) * self.replicas


class EndlessTable(Table):
    """One rank's items of ``count`` steps of a segment; ``open`` returns the table of an epoch when it is needed."""

    def __init__(self, open: Callable[[int], Table], segment: EpochSegment, rank: int, count: int, name: str) -> None:
        self._open, self._segment, self._rank, self._length, self._name = open, segment, rank, count, name
        self._epoch = -1  # no epoch is open
        self._items: Table
        self._strided: Table

    @property
    def block(self) -> int:
        return 1 if self._epoch < 0 else self._items.block

    def at(self, positions: Indices) -> Any:
        found = []
        while len(positions):
            epoch, first = self._segment.where(int(positions[0]))
            self._open_epoch(epoch)
            steps = self._segment.left if epoch == self._segment.epoch else self._segment.steps
            here = positions[: np.searchsorted(positions, first + steps)]
            self._check_length(int(here[0]) - first, int(here[-1]) + 1 - first)
            found.append(self._strided.at(here - first))
            positions = positions[len(here) :]
        return concatenated(found)

    def _open_epoch(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        length = self._segment.length
        if epoch > self._epoch >= 0 and self._items.upto(length, length + 1) > length:
            self._raise_wrong_length(f"more than {length}")
        self._items, self._offset = self._open(epoch), self._segment.offset if epoch == self._segment.epoch else 0
        self._strided = StridedTable(self._items, self._segment.replicas, self._rank, self._offset)
        self._epoch = epoch

    def _check_length(self, begin: int, end: int) -> None:
        """Raise an error if the sampler ends before its length, as far as these steps of the epoch reach."""
        replicas = self._segment.replicas
        wanted = min(self._offset + end * replicas, self._segment.length)
        found = self._items.upto(self._offset + begin * replicas, wanted)
        if found < wanted:
            self._raise_wrong_length(found)

    def _raise_wrong_length(self, found: object) -> None:
        if self._segment.length == ENDLESS:
            text = f"the sampler, {an(self._name)}, has no length and ended after {found} items"
            raise ValueError(f"{text}: give it a __len__, so that it can start over under steps_per_epoch=")
        text = f"the sampler, {an(self._name)}, yielded {found} items in epoch {self._epoch}, but its length is"
        advice = "correct its __len__, or do without last_batch='rollover' and steps_per_epoch="
        raise ValueError(f"{text} {self._segment.length}: {advice}")


# -- steps that are left out -------------------------------------------------------------------------------------------


Ranges = tuple[tuple[int, int], ...]
"""Pairs (first, last) of steps, ascending; both ends are included."""

Length = Callable[[int], int]

_ADVICE = "give pairs of steps (first, last), counted from 0 since the first epoch: skip=[(41700, 41720)]"


def check_skip(skip: Any) -> Ranges:
    """Convert ``skip`` to ascending ranges, or raise a TypeError or ValueError.

    Example:
        >>> check_skip([(7, 9), [2, 2]])
        ((2, 2), (7, 9))
    """
    try:
        pairs = sorted((first, last) for first, last in skip or ())
    except (TypeError, ValueError):
        raise TypeError(f"skip is {skip!r}: {_ADVICE}") from None
    ranges = []
    for pair in pairs:
        begin, end = (check_int(f"a step of skip, in {pair!r},", step, 0, _ADVICE) for step in pair)
        if end < begin:
            raise ValueError(f"skip has {pair!r}, whose last step comes before its first: {_ADVICE}")
        ranges.append((begin, end))
    for before, after in pairwise(ranges):
        if after[0] <= before[1]:
            raise ValueError(f"skip has {before} and {after}, which overlap: join them, or correct one of them")
    return tuple(ranges)


def merged(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    """Return the union of two lists of ranges.

    Example:
        >>> merged([(2, 5)], [(4, 6), (9, 9)])
        ((2, 6), (9, 9))
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted([*ranges, *others]):
        if found and first <= found[-1][1]:
            first, last = found[-1][0], max(last, found.pop()[1])
        found.append((first, last))
    return tuple(found)


class StepCount:
    """Number of steps before each epoch, including skipped ones, from ``steps_per_epoch`` or the lengths of the epochs.

    Example:
        >>> count = StepCount(None)
        >>> count.before(2, lambda epoch: 3 + epoch), count.within(((6, 8), (20, 20)), 1, lambda epoch: 5)
        (7, (range(3, 6), range(17, 18)))
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._starts = [0]

    def forget(self, epoch: int = 0) -> None:
        """Discard the lengths of epochs from this one on."""
        del self._starts[epoch + 1 :]

    def before(self, epoch: int, length: Length) -> int:
        if self._steps is not None:
            return epoch * self._steps
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + length(len(self._starts) - 1))
        return self._starts[epoch]

    def within(self, ranges: Ranges, epoch: int, length: Length) -> tuple[range, ...]:
        """Return the batch numbers skipped in an epoch. They may reach beyond its end."""
        begin = self.before(epoch, length) if ranges else 0
        return tuple(range(max(0, first - begin), last + 1 - begin) for first, last in ranges if last >= begin)
