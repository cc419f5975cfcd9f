"""One epoch of a sampler as a table: any item by its position, and the arithmetic of positions.

    Table(length, at)                   a sampler of ours: ``at(positions)`` takes the same time for any position
    Streamed(open)                      an iterator: it is read as far as somebody asks
    Dealt(table, replicas, rank)        what one rank gets of a table: every R-th item
    Filled(table, length, begin, total) a table with fillers at its end
    Batched(table, size)                batches of a table's items
    Rolling(length, size, epoch)        one epoch with rollover: its batches, and where they lie among all epochs
    Stretch(length, replicas, ...)      the arithmetic: steps of all ranks, in an endless sequence of epochs
    Endless(open, stretch, rank)        the items of such a stretch as a table, for one rank
    StepCount(steps)                    steps of all epochs, and those that an epoch leaves out (``skip=``)

Every table answers two questions, and both in one:
    table.upto(begin, end)   where the items from ``begin`` on end: at ``end``, or before it if the epoch ends
    table.at(positions)      the items at these positions: int64, ascending, below what `upto` said
    table.slice(begin, end)  the items from ``begin`` up to where they end

Batches, ranks, resuming and rollover are arithmetic on positions. A rank computes only the items at its own.

With rollover, or with ``steps_per_epoch``, the epochs are one endless sequence, which is cut into whole batches. The
samples that do not fill a batch begin the next epoch. An epoch is the stretch between two cuts; ``steps_per_epoch``
says how many batches that is. Where it begins follows from the lengths alone, so any epoch can be read without those
before it.

What can go wrong: an iterator of another library raises an error, or yields more or fewer items than its length says
(ValueError). Ranges of steps are reversed, or overlap.
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
from sharded_loader.randomness.shuffle import IN_MEMORY, Indices

BLOCK = 2**15
"""How many indices are made at once. 256 KB of indices and their temporaries stay in the second-level cache."""


def parts(count: int, size: int, cut: bool) -> int:
    """How many parts of ``size`` there are in ``count``; an incomplete last part counts unless ``cut``.

    Example:
        >>> parts(7, 3, cut=False), parts(7, 3, cut=True)
        (3, 2)
    """
    return count // size if cut else -(-count // size)


def checksum_of(numbers: Any, before: int = 0) -> int:
    """The same for equal numbers of any dtype, in a list, an array or a range; 3 ms for a million.

    Of a range that is too long to be looked at: the same where it is made in the same way.

    Args:
        numbers: the numbers.
        before: the checksum of those before them.

    Example:
        >>> checksum_of(range(3)) == checksum_of(np.array([0, 1, 2], np.uint8)) != checksum_of([0, 1, 3])
        True
    """
    if isinstance(numbers, range) and len(numbers) > IN_MEMORY:
        return zlib.crc32(repr(numbers).encode(), before)
    array = np.asarray(numbers)
    return zlib.crc32(array.astype("<f8" if array.dtype.kind == "f" else "<i8", copy=False).tobytes(), before)


def bytes_of(items: Any) -> bytes:
    """Bytes that depend on the items, not on where one list of them ends and the next begins."""
    try:
        return struct.pack(f"<{len(items)}q", *items)
    except (struct.error, TypeError):  # not all of them are integers of 64 bits
        return b"".join(map(bytes_of_one, items))


def bytes_of_one(item: object) -> bytes:
    """The bytes of a list of this one item, without a list."""
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
    """The items of one epoch of a sampler of ours.

    Args:
        length: the number of items.
        at: positions -> an int64 array of indices, or a list of other items.
        block: the number to ask for at once, where the items are read one after the other.

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

    def __init__(self, open: Callable[[int], Iterator[object]]) -> None:
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


class Filled(Table):
    """A table, filled up at its end, so that all ranks get whole batches. The fillers repeat one item.

    Args:
        table, length: the items, and how many they are.
        begin: the first item that anybody reads.
        total: the number of items with the fillers.
        replicas: the items of one rank lie so far apart; 0: the table cannot be read before ``begin``.

    Example:
        >>> list(Filled(Table(3, lambda positions: positions + 10, block=8), 3, 0, 5).items())
        [10, 11, 12, 12, 12]
    """

    def __init__(self, table: Table, length: int, begin: int, total: int, replicas: int = 0) -> None:
        self._table, self._length, self._begin, self._total = table, length, begin, total
        self._replicas = replicas
        self._last: Any = None  # items that were read, at least one of them

    @property
    def block(self) -> int:
        return self._table.block

    def upto(self, begin: int, end: int) -> int:
        return min(end, self._total)

    def at(self, positions: Indices) -> Any:
        within = positions[: np.searchsorted(positions, self._length)]
        if len(within) or self._last is None:
            first = int(positions[0])
            # A rank that has no item reads its last one before, or the first of all: rank 0 has a table of its own.
            if replicas := self._replicas:
                first = max(first - parts(first + 1 - self._length, replicas, cut=False) * replicas, 0)
            items = self._table.at(within if len(within) else np.array([first if replicas else self._begin]))
            if len(items) < max(len(within), 1):
                text = f"the sampler yielded fewer items than its length, {self._length}, says"
                raise ValueError(f"{text}: correct its __len__, or do without evaluate=True")
            self._last = items[-1:]
        fillers = [self._last] * (len(positions) - len(within))
        return joined([items, *fillers] if len(within) else fillers)


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
        wanted = (positions[:, None] * size + np.arange(size)).ravel()
        return self._cut(self._table.at(wanted if wanted[-1] < end else wanted[wanted < end]))

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
        if not are_plain(items):
            items = [plain_index(item) for item in items]
        return as_numbers(items) if self._convert else items


def as_numbers(items: list[Any]) -> Any:
    """Items that are all ints as an int64 array; a list of other items as it is.

    Example:
        >>> as_numbers([3, 1]), as_numbers([3, "a"]), as_numbers([True])
        (array([3, 1]), [3, 'a'], [True])
    """
    if set(map(type, items)) == {int}:
        with suppress(OverflowError):  # out of any range: the error names the batch later
            return np.array(items, np.int64)
    return items


def joined(found: list[Any]) -> Any:
    """Items that were found in parts, as one array or list."""
    if len(found) == 1:
        return found[0]
    return np.concatenate(found) if isinstance(found[0], np.ndarray) else list(chain.from_iterable(found))


# -- epochs as one endless sequence ------------------------------------------------------------------------------------


ENDLESS = 1 << 61
"""The length of a sampler that has none, under ``steps_per_epoch``: no run comes to its end."""


class Rolling:
    """The batches of one epoch with rollover: a stretch of the endless sequence of epochs.

    Args:
        length, replicas: items in an epoch, and how many ranks there are.
        size: items of a batch, for each rank.
        epoch: which epoch. It begins where the whole batches of the epochs before it end.
        done: the number of items of the epoch before the beginning, counted from ``origin``. The batches end where
            epoch + 1 begins. None: begin where the epoch begins.
        batches: the number of batches in an epoch, whatever the length; None: those that fit.
        shift: how many items later all epochs begin. If it is not 0, ``replicas`` divides ``length``.

    Attributes:
        first: number of the first batch.
        is_begun: some of the epoch's own items come before the beginning.
        is_behind: the beginning lies behind that of epoch + 1, so there is no batch.
        origin: where the items of the epoch are counted from, as a number of items of all epochs: its own first item,
            which may belong to the last batch of the epoch before. With ``batches``, where the epoch begins.
        length_of_epoch: how many items later the origin of epoch + 1 is.

    Example:
        Of 5 items in twos epoch 0 has 2 batches, and epoch 1 begins at item 4.

        >>> one, rest = Rolling(5, 2, epoch=1), Rolling(5, 2, epoch=1, done=1)
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
        whole = Stretch(length, replicas, 0, 0)
        cuts = [e * whole.steps // size if batches is None else e * batches * bool(length) for e in (epoch, epoch + 1)]
        begin, end = whole.total(cuts[0] * size) + shift, whole.total(cuts[1] * size) + shift
        self.origin, self.length_of_epoch = (epoch * length, length) if batches is None else (begin, end - begin)
        total = begin if done is None else self.origin + done
        self._size, self._end = size, max(end, total)
        self._stretch = Stretch(length, replicas, *divmod(total, max(length, 1)))
        self._count = self._stretch.steps_before(self._end) if total < end else 0
        self.is_begun, self.is_behind = total > begin, total > end
        steps = whole.steps_before(total, cut=True) - whole.steps_before(begin)
        self.first = max(0, ((total - begin) // replicas if shift else steps) // size)

    def items(self, open: Callable[[int], Table], rank: int, name: str) -> Table:
        """The items of one rank. Arguments as `Endless` has them."""
        return Endless(open, self._stretch, rank, self._count, name)

    def table(self, open: Callable[[int], Table], rank: int, name: str, **arrays: bool) -> Table:
        """The batches of one rank. Arguments as `Endless` and `Batched` have them."""
        return Batched(self.items(open, rank, name), self._size, **arrays)

    def length(self) -> int:
        """The number of batches from the beginning on."""
        return parts(self._count, self._size, cut=False)

    def total(self, batches: int) -> int:
        """The number of items before batch number ``batches``, counted over all epochs from epoch 0."""
        return min(self._stretch.total(batches * self._size), self._end)


class Stretch:
    """A stretch of the endless sequence of epochs, in steps. One step is one item per rank.

    Args:
        length: items in an epoch.
        replicas: the number of ranks. ``ceil(length / replicas)`` steps are an epoch.
        epoch, offset: where the stretch begins: after ``offset`` items of this epoch.

    Attributes:
        steps: steps in a whole epoch.
        left: steps in the first epoch, after its ``offset``.

    Example:
        10 items on 3 ranks give 4 steps per epoch. After 4 items of epoch 0 two steps are left. Steps 2 to 5 are
        epoch 1.

        >>> stretch = Stretch(10, 3, 0, 4)
        >>> [stretch.where(step) for step in (1, 2, 6)], [stretch.total(step) for step in (1, 2, 3)]
        ([(0, 0), (1, 2), (2, 6)], [7, 10, 13])
    """

    def __init__(self, length: int, replicas: int, epoch: int, offset: int) -> None:
        self.length, self.replicas, self.epoch, self.offset = length, replicas, epoch, offset
        self.steps = parts(length, replicas, cut=False)
        self.left = parts(length - offset, replicas, cut=False)

    def where(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the first step of that epoch."""
        if step < self.left or not self.steps:
            return self.epoch, 0
        later = (step - self.left) // self.steps
        return self.epoch + 1 + later, self.left + later * self.steps

    def steps_before(self, total: int, cut: bool = False) -> int:
        """How many steps come before item ``total`` of all epochs; an incomplete last step counts unless ``cut``."""
        epoch, offset = divmod(total, max(self.length, 1))
        if epoch == self.epoch:
            return parts(offset - self.offset, self.replicas, cut)
        return self.left + (epoch - self.epoch - 1) * self.steps + parts(offset, self.replicas, cut)

    def total(self, step: int) -> int:
        """How many items of all epochs, from epoch 0 on, come before a step."""
        epoch, first = self.where(step)
        offset = self.offset if epoch == self.epoch else 0
        return epoch * self.length + offset + (step - first) * self.replicas


class Endless(Table):
    """What one rank gets of a stretch of epochs.

    Args:
        open: epoch -> its table. Each epoch is opened when it is needed.
        stretch, count: where to begin, and how many steps there are.
        rank: which rank this is.
        name: what an error calls the sampler.

    Raises:
        ValueError: an epoch of the sampler has not ``stretch.length`` items.
    """

    def __init__(
        self, open: Callable[[int], Table], stretch: Stretch, rank: int, count: int, name: str = "sampler"
    ) -> None:
        self._open, self._stretch, self._rank, self._count, self._name = open, stretch, rank, count, name
        self._epoch = -1  # none is open
        self._items: Table
        self._dealt: Table

    @property
    def block(self) -> int:
        return 1 if self._epoch < 0 else self._items.block

    def upto(self, begin: int, end: int) -> int:
        return min(end, self._count)

    def at(self, positions: Indices) -> Any:
        found = []
        while len(positions):
            epoch, first = self._stretch.where(int(positions[0]))
            self._go_to(epoch)
            steps = self._stretch.left if epoch == self._stretch.epoch else self._stretch.steps
            here = positions[: np.searchsorted(positions, first + steps)]
            self._check(int(here[0]) - first, int(here[-1]) + 1 - first)
            found.append(self._dealt.at(here - first))
            positions = positions[len(here) :]
        return joined(found)

    def _go_to(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        length = self._stretch.length
        if epoch > self._epoch >= 0 and self._items.upto(length, length + 1) > length:
            self._refuse(f"more than {length}")
        self._items, self._offset = self._open(epoch), self._stretch.offset if epoch == self._stretch.epoch else 0
        self._dealt = Dealt(self._items, self._stretch.replicas, self._rank, self._offset)
        self._epoch = epoch

    def _check(self, begin: int, end: int) -> None:
        """Whether the sampler yields as many items as its length says, as far as these steps of the epoch reach."""
        replicas = self._stretch.replicas
        wanted = min(self._offset + end * replicas, self._stretch.length)
        found = self._items.upto(self._offset + begin * replicas, wanted)
        if found < wanted:
            self._refuse(found)

    def _refuse(self, found: object) -> None:
        if self._stretch.length == ENDLESS:
            text = f"the sampler, {an(self._name)}, has no length and ended after {found} items"
            raise ValueError(f"{text}: give it a __len__, so that it can start over under steps_per_epoch=")
        text = f"the sampler, {an(self._name)}, yielded {found} items in epoch {self._epoch}, but its length is"
        advice = "correct its __len__, or do without last_batch='rollover' and steps_per_epoch="
        raise ValueError(f"{text} {self._stretch.length}: {advice}")


# -- steps that are left out -------------------------------------------------------------------------------------------


Ranges = tuple[tuple[int, int], ...]
"""Pairs (first, last) of steps, ascending. The last one is left out too."""

Length = Callable[[int], int]

_ADVICE = "give pairs of steps (first, last), counted from 0 since the first epoch: skip=[(41700, 41720)]"


def check_skip(skip: Any) -> Ranges:
    """``skip`` as ascending ranges.

    Raises:
        TypeError: It is no list of pairs of integers.
        ValueError: A range is reversed or negative, or two overlap.

    Example:
        >>> check_skip([(7, 9), [2, 2]])
        ((2, 2), (7, 9))
    """
    try:
        pairs = [(first, last) for first, last in skip or ()]
    except (TypeError, ValueError):
        raise TypeError(f"skip is {skip!r}: {_ADVICE}") from None
    ranges = []
    for pair in pairs:
        begin, end = (check_int(f"a step of skip, in {pair!r},", step, 0, _ADVICE) for step in pair)
        if end < begin:
            raise ValueError(f"skip has {pair!r}, whose last step comes before its first: {_ADVICE}")
        ranges.append((begin, end))
    ranges.sort()
    for before, after in pairwise(ranges):
        if after[0] <= before[1]:
            raise ValueError(f"skip has {before} and {after}, which overlap: join them, or correct one of them")
    return tuple(ranges)


def merged(ranges: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> Ranges:
    """Two lists of ranges as one.

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
    """How many steps come before each epoch. Steps that are left out count.

    Args:
        steps: ``steps_per_epoch``. Without it, ``length(epoch)`` tells how many steps an epoch has on each rank.

    Example:
        >>> count = StepCount(None)
        >>> count.before(2, lambda epoch: 3 + epoch), count.within(((6, 8), (20, 20)), 1, lambda epoch: 5)
        (7, (range(3, 6), range(17, 18)))
    """

    def __init__(self, steps: int | None) -> None:
        self._steps = steps
        self._starts = [0]

    def forget(self, epoch: int = 0) -> None:
        """Epochs from this one on have other lengths than before."""
        del self._starts[epoch + 1 :]

    def before(self, epoch: int, length: Length) -> int:
        """The number of steps before an epoch."""
        if self._steps is not None:
            return epoch * self._steps
        while len(self._starts) <= epoch:
            self._starts.append(self._starts[-1] + length(len(self._starts) - 1))
        return self._starts[epoch]

    def within(self, ranges: Ranges, epoch: int, length: Length) -> tuple[range, ...]:
        """The batches that an epoch leaves out, by their numbers in it. They may reach beyond its end."""
        begin = self.before(epoch, length) if ranges else 0
        return tuple(range(max(0, first - begin), last + 1 - begin) for first, last in ranges if last >= begin)
