"""One epoch's batches for this rank, from any position on, and the position after each of them.

    (Source, epoch, Position or None) -> EpochReading.batch(number) -> (batch, first sample)         -> engine/plan.py
                                         EpochReading.position_after(delivered) -> Position          -> state_dict

A `Position` counts in the global order, which all ranks share: samples, or batches if a batch sampler was given. So
it holds nothing of the rank. What lies behind it can be dealt to any number of ranks, in batches of any size.
Without a position an epoch is the sampler's own. From a position on:

    keep, discard, given batches    the rest of the epoch's items, dealt and padded again, is cut into batches;
    rollover                        the endless sequence of epochs goes on up to where epoch + 1 begins for this number
                                    of ranks and batch size. If those have changed, the last batch may be smaller. If
                                    the position lies behind the beginning of epoch + 1, the rest of the epoch is empty
                                    and epoch + 1 begins at the position (`carry`).

Batches keep their numbers: after k whole ones the next is number k, also where batches were of another size.

A reading owns the epoch's table, the batches that are ready, and the checkpoints of a sampler of another library.
Samplers of ours, and lists, are read in blocks, at any number. A sampler of another library is read batch after batch,
and its batches are kept until `forget`. `batch` may be interrupted between any two lines: it then drops the table, and
the next call opens it again.

What can go wrong: an error of the sampler, which comes at its batch and ends the epoch; a sampler of another library
that cannot get back to its checkpoint (`sharded_loader.sampling.foreign`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.sampling.base import find_foreign, nested, noted, put_back
from sharded_loader.sampling.foreign import (
    Replay,
    known_length,
    len_epoch,
    name_of,
    over_replay,
    table_of,
)
from sharded_loader.sampling.listed import Listed
from sharded_loader.sampling.rollover import ENDLESS, Rolling
from sharded_loader.sampling.state import Checkpoint, Position, Signature
from sharded_loader.sampling.tables import Batched, Dealt, Table, parts


@dataclass
class Source:
    """What an epoch is read from, as it is settled when the epoch begins.

    Attributes:
        items: the sampler of the global order: of samples, or of batches.
        signature: seed, ``batch_size`` and ``last_batch`` (None: ``items`` are batches), and what a state compares.
        replicas, rank: how many ranks there are, and which is this one.
        dealt: whether the items are dealt to ranks.
        arrays: batches may be int64 arrays instead of lists (only with ``batch_size``).
    """

    items: Any
    signature: Signature
    replicas: int
    rank: int
    dealt: bool
    arrays: bool = False

    def __post_init__(self) -> None:
        self.seed, self.batch_size = self.signature.seed, self.signature.batch_size
        self.steps = self.signature.steps_per_epoch
        self.rollover = self.signature.last_batch == "rollover" or self.steps is not None
        self.drops_last = self.signature.last_batch == "discard"

    @property
    def cuts(self) -> bool:
        """Whether the last items of an epoch may belong to no batch of it."""
        given = (getattr(one, "last_batch", "keep") for one in nested(self.items))
        return self.rollover or self.drops_last or any(last_batch != "keep" for last_batch in given)


class EpochReading:
    """One epoch's batches, from a position on.

    Args:
        source: the sampler, and how it is read.
        epoch: which epoch.
        position: where in it; None: at its beginning.

    Attributes:
        resumed: whether there was a position.
        first: number of the first batch.
        keeps: whether batches are kept until `forget` (those of a sampler of another library).
        ready: batches that were made together with one that was asked for; see `batch`.
        carry: where the next epoch begins, if that is not its own beginning.
        second_turn: see `StreamReading`; -1 where there are no parts.
    """

    second_turn = -1

    def __init__(self, source: Source, epoch: int, position: Position | None) -> None:
        self.epoch, self.signature, self.resumed = epoch, source.signature, position is not None
        self._source, self._position = source, position or Position(epoch)
        self._foreign, self._foreign_seed = find_foreign(source.items, source.seed)
        self._listed: Listed | None = None
        if type(source.items) in (list, tuple, range) and source.batch_size is not None and not source.rollover:
            self._foreign, self._listed = None, Listed(source.items, self._position.mark)
        self.keeps = self._foreign is not None
        self._told = [one for one, _ in noted(nested(self._foreign))]
        self._line: _Separate | _Rolling
        self._line = _Rolling(source, epoch, position) if source.rollover else _Separate(source, self._position)
        self.first = self._line.first
        self.carry = self.following() if self._line.is_behind else None
        self._table: Table | None = None
        self._replay: Replay | None = None
        self._open_before: Replay | None = None  # as the epoch before has left it
        self.ready: dict[int, tuple[Any, int]] = {}
        self._coming = self.first  # the batch that a sampler of another library is read for next
        self._marks: dict[int, Checkpoint | None] = {self.first: self._position.mark}  # by number: before that batch
        self._ended = sys.maxsize  # no batch of this number, or of a greater one
        self._at_end: Checkpoint | None = None

    def go_on_from(self, before: EpochReading) -> None:
        """Go on where the epoch before has left a sampler of another library, if this one begins in its middle.

        A sampler without a length stays open, since the way from its beginning would get longer with each epoch.
        """
        ended, line = before._at_end is not None, self._line
        mark = before._at_end if ended else before._marks.get(before._coming)  # its loop was left
        follows = before.epoch + 1 == self.epoch and before.signature == self.signature
        if mark is None or not follows or before._foreign is not self._foreign or not isinstance(line, _Rolling):
            return
        if mark.state is not None or line.is_endless:
            self._marks[self.first] = mark
        if line.is_endless and ended:
            self._open_before, before._replay = before._replay, None

    def again(self) -> EpochReading:
        """The same batches once more, for somebody who looks ahead. Not of a sampler of another library."""
        return EpochReading(self._source, self.epoch, self._position if self.resumed else None)

    def batch(self, number: int) -> tuple[Any, int] | None:
        """A batch of the epoch, and where its first sample lies in the global order.

        Args:
            number: of the batch, at least `first`, and not forgotten.

        Returns:
            A list of indices, an int64 array, or a list of lists (shards); with the number of its first sample (or of
            the batch, if batches were given). None after the last batch.

        Raises:
            Exception: what the sampler raises. The epoch ends there.
        """
        found = self.ready.get(number)
        if found is not None or number >= self._ended:
            return found
        before = noted(self._told)
        try:
            if self._foreign is None:
                self.ready = self._read(number)
            else:
                self._read_foreign(number)
            put_back(before)
        except BaseException as error:  # also a Ctrl-C that comes while they are put back
            put_back(before)
            self._table = None
            # A batch that was read, but not counted, is read again: perhaps in another order.
            self.ready = {one: found for one, found in self.ready.items() if one < self._coming}
            if isinstance(error, Exception) and not is_from_outside(error):
                self._ended = number + 1
            raise
        return self.ready.get(number)

    def _read(self, number: int) -> dict[int, tuple[Any, int]]:
        """A batch, and those behind it that come with it at no cost: a block of indices is made at once."""
        if self._table is None:
            self._table = self._open(number)
        begin, rank = number - self.first, self._source.rank
        batches = self._table.slice(begin, begin + self._table.block)
        return {self.first + at: (batch, self._line.done(at) + rank) for at, batch in enumerate(batches, begin)}

    def _open(self, number: int) -> Table:
        items = self._listed or self._source.items
        if self._foreign is not None:
            self._replay = Replay(self._foreign, self._foreign_seed, self._marks[number], self._open_before)
            self._open_before = None
            items = over_replay(items, self._replay)
        return self._line.open(items)

    def _read_foreign(self, number: int) -> None:
        """Read a sampler of another library up to a batch, and note a checkpoint after each batch."""
        while self._coming <= number:
            found = self._read(self._coming)
            mark = None if self._replay is None else self._replay.checkpoint()
            if not found:
                self._at_end, self._ended = mark, self._coming
                return
            self._marks[self._coming + 1] = mark
            self.ready.update(found)
            self._coming += 1

    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again (that batch itself may be taken back)."""
        for number in [one for one in self.ready if one < delivered - 1]:
            del self.ready[number]
            self._marks.pop(number, None)

    # -- positions ------------------------------------------------------------------------------------------

    @property
    def in_mid_epoch(self) -> bool:
        """Whether some of the epoch's own items were done at the position."""
        return self._line.is_begun

    def is_over(self) -> bool:
        """Whether the position lies in mid-epoch and no batch is left there, as far as that can be known now."""
        if not self.in_mid_epoch:
            return False
        mark = self._position.mark
        if mark is not None and not self._source.cuts:
            return mark.finished  # a sampler of another library may yield more than its length says
        try:
            return self._line.length() == 0
        except Exception:
            return False  # it has no length

    def following(self) -> Position:
        """Where the next epoch begins, if this one `is_over`."""
        done, mark = self._position.done, self._position.mark
        if self._source.rollover:
            return Position(self.epoch + 1, done - self._line.length_of_epoch, mark)
        # A sampler that goes on by a state of its own is led through the end of this epoch.
        return Position(self.epoch + 1, 0, None if mark is None or mark.state is None else replace(mark, finished=True))

    def length(self) -> int:
        """The number of batches in the epoch, those before `first` included.

        Raises:
            TypeError: a sampler of another library has no ``__len__``.
        """
        return self.first + self._line.length()

    def batches(self, delivered: int) -> int:
        """How many batches of the epoch were received, if so many numbers are done: the same, of any sampler."""
        return delivered

    def position_after(self, delivered: int) -> Position:
        """The position after ``delivered`` batches of the epoch (at least `first`)."""
        done, mark = self._line.done(delivered - self.first), self._marks.get(delivered)
        if self._listed is not None and mark is None and delivered > self.first:
            mark = self._listed.checkpoint(self.epoch, done)
        return Position(self.epoch, done, mark)

    def after(self, begin: Position) -> Position:
        """The position that the next epoch begins at, as a sampler of another library gets there after this epoch.

        That matters where the sampler goes on from it: with rollover, or by a state of its own.
        """
        mark = self._at_end
        if mark is None or begin.mark is not None or (mark.state is None and not self._source.rollover):
            return begin
        return replace(begin, mark=mark)


class _Separate:
    """Epochs on their own: keep, discard, given batches."""

    is_behind = False
    length_of_epoch = 0

    def __init__(self, source: Source, position: Position) -> None:
        self._source, self._epoch, self._done = source, position.epoch, position.done
        self._step = source.replicas * (source.batch_size or 1)
        length = source.signature.sampler_length
        # A sampler of another library may yield more than its length.
        self._end = sys.maxsize if length is None else length
        self.is_begun = position.done > 0
        # At the end a short last batch counts as one.
        self.first = parts(position.done, self._step, cut=position.done < self._end)

    def open(self, items: Any) -> Table:
        """The batches of the epoch after the position, as a table."""
        source, table = self._source, table_of(items, self._epoch, self._source.seed)
        if source.dealt or self._done:
            table = Dealt(table, source.replicas, source.rank, self._done, source.dealt and source.drops_last)
        if source.batch_size is None:
            return table
        return Batched(table, source.batch_size, source.drops_last, arrays=True, convert=source.arrays)

    def length(self) -> int:
        source = self._source
        rest = max(len_epoch(source.items, self._epoch) - self._done, 0)
        mine = parts(rest, source.replicas, source.dealt and source.drops_last)
        return parts(mine, source.batch_size or 1, source.drops_last)

    def done(self, batches: int) -> int:
        """Items of the epoch that are done after so many batches from the position on."""
        return min(self._done + batches * self._step, self._end)


class _Rolling:
    """A stretch of the endless sequence of epochs."""

    def __init__(self, source: Source, epoch: int, position: Position | None) -> None:
        self._source = source
        self.is_endless = source.steps is not None and known_length(source.items, 0) is None
        self.length_of_epoch = length = ENDLESS if self.is_endless else len_epoch(source.items, 0)
        self._before = epoch * length
        size = source.batch_size or 1
        rolling = Rolling(length, size, epoch, source.replicas, None, source.steps)
        if source.steps is not None:
            self._before, self.length_of_epoch = rolling.begin, rolling.total(source.steps) - rolling.begin
        if position is not None:
            total = position.done + self._before
            rolling = Rolling(length, size, epoch, source.replicas, total, source.steps)
        self._rolling = rolling
        self.is_begun, self.is_behind, self.first = rolling.is_begun, rolling.is_behind, rolling.first
        self.length = rolling.length

    def open(self, items: Any) -> Table:
        """The batches of the stretch, as a table."""
        source = self._source
        open_epoch = partial(table_of, items, seed=source.seed)
        if source.batch_size is None:
            return self._rolling.items(open_epoch, source.rank, name_of(items))
        return self._rolling.table(open_epoch, source.rank, name_of(items), arrays=True, convert=source.arrays)

    def done(self, batches: int) -> int:
        """Samples done after so many batches from the position on, counted from the epoch's own first."""
        return self._rolling.total(batches) - self._before
