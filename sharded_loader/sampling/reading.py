"""One epoch's batches for this rank, from any position on, and the position after each of them.

    (Source, epoch, Position or None) -> EpochReading.batch(number) -> a batch     -> engine/plan.py
                                         EpochReading.place(delivered) -> Position -> state_dict

A `Position` counts in the global order, which all ranks share: samples, or batches if a batch sampler was given. So
it holds nothing of the rank, and what lies behind it can be dealt to any number of ranks, in batches of any size.
Without a position an epoch is the sampler's own. From a position on:

    keep, discard, given batches    the rest of the epoch's items, dealt and padded again, is cut into batches;
    rollover                        the endless sequence of epochs goes on up to where epoch + 1 begins for this number
                                    of ranks and batch size. If those have changed, the last batch may be smaller. If
                                    the position lies behind the beginning of epoch + 1, the rest of the epoch is empty
                                    and epoch + 1 begins at the position (`carry`).

Batches keep their numbers: after k whole ones the next is number k, also where batches were of another size.

A reading owns the epoch's table, the batches that were read ahead, and the checkpoints of a sampler of another library.
`batch` may be interrupted between any two lines: it then drops the table, and the next call opens it again. What can go
wrong: an error of the sampler, which comes at its batch and ends the epoch; a sampler of another library that cannot
get back to its checkpoint (`sharded_loader.sampling.foreign`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sharded_loader.interrupts import is_from_outside
from sharded_loader.sampling.borrowing import nested, noted, put_back
from sharded_loader.sampling.foreign import Replay, find_foreign, len_epoch, name_of, over_replay, table_of
from sharded_loader.sampling.state import Checkpoint, Position, Signature
from sharded_loader.sampling.tables import Batched, Dealt, Endless, Stretch, Table, parts


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
        self.rollover = self.signature.last_batch == "rollover"
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
        place: where in it; None: at its beginning.

    Attributes:
        resumed: whether there was a position.
        first: number of the first batch.
        carry: where the next epoch begins, if that is not its own beginning.
    """

    def __init__(self, source: Source, epoch: int, place: Position | None) -> None:
        self.epoch = epoch
        self.signature = source.signature
        self.resumed = place is not None
        self.carry: Position | None = None
        self._source = source
        self._place = place or Position(epoch)
        self._foreign, self._foreign_seed = find_foreign(source.items, source.seed)
        self._line: _Fixed | _Rolling
        if source.rollover:
            self._line = _Rolling(source, epoch, place)
            if self._line.behind:
                self.carry = Position(epoch + 1, self._place.done - self._line.length_of_epoch, self._place.mark)
        else:
            self._line = _Fixed(source, epoch, self._place.done, self._foreign is None)
        self.first = self._line.first
        self._table: Table | None = None
        self._replay: Replay | None = None
        self._ahead: tuple[int, list[Any]] = self.first, []  # the number of the first batch that is kept, and batches
        self._marks: dict[int, Checkpoint | None] = {self.first: self._place.mark}  # by number: before that batch
        self._ended: int | None = None  # no batch of this number, or of a greater one
        self._at_end: Checkpoint | None = None

    def batch(self, number: int) -> Any:
        """A batch of the epoch: a list of indices, an int64 array, or a list of lists (shards).

        Batches of a sampler of another library can be asked for again until `forget`.

        Args:
            number: of the batch, at least `first`.

        Returns:
            The batch; None after the last one.

        Raises:
            Exception: what the sampler raises. The epoch ends there.
        """
        first, batches = self._ahead
        if 0 <= number - first < len(batches):
            return batches[number - first]
        if self._ended is not None and number >= self._ended:
            return None
        try:
            return self._read(number) if self._foreign is None else self._read_foreign(number)
        except BaseException as error:
            self._table = None
            if isinstance(error, Exception) and not is_from_outside(error):
                self._ended = number + 1
            raise

    def _read(self, number: int) -> Any:
        if self._table is None:
            self._table = self._line.open(self._source.items)
        table, begin = self._table, number - self.first
        end = table.upto(begin, begin + table.block)
        if end <= begin:
            return None
        batches = table.at(np.arange(begin, end))
        if not isinstance(batches, list):
            batches = list(batches)
        self._ahead = number, batches
        return batches[0]

    def _read_foreign(self, number: int) -> Any:
        """Read a sampler of another library up to a batch, and note a checkpoint after each batch."""
        first, batches = self._ahead
        if number < first:
            raise LookupError(f"batch {number} of epoch {self.epoch} was forgotten: the first one kept is {first}")
        before = noted(nested(self._foreign))
        try:
            while (coming := first + len(batches)) <= number:
                if self._table is None:
                    self._replay = Replay(self._foreign, self._foreign_seed, self._marks[coming])
                    self._table = self._line.open(over_replay(self._source.items, self._replay))
                begin = coming - self.first
                more = self._table.upto(begin, begin + 1) > begin
                batch = self._table.at(np.array([begin]))[0] if more else None
                mark = None if self._replay is None else self._replay.checkpoint()
                if not more:
                    self._at_end, self._ended = mark, coming
                    return None
                if batch is None:
                    raise TypeError(
                        f"epoch {self.epoch}, batch {coming}: the batch sampler yielded None (NoneType); it must yield "
                        f"lists of indices, or lists of such lists (shards)"
                    )
                self._marks[coming + 1] = mark
                batches.append(batch)
            put_back(before)
        except BaseException:  # also a Ctrl-C that comes while they are put back
            put_back(before)
            raise
        return batches[number - first]

    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again (that batch itself may be taken back)."""
        if self._foreign is None:
            return
        first, batches = self._ahead
        for number in range(first, delivered - 1):
            self._marks.pop(number, None)
        self._ahead = max(first, delivered - 1), batches[max(delivered - 1 - first, 0) :]

    # -- positions ------------------------------------------------------------------------------------------

    @property
    def in_mid_epoch(self) -> bool:
        """Whether some of the epoch's own items were done at the position."""
        return self._line.begun

    def is_over(self) -> bool:
        """Whether the position lies in mid-epoch and no batch is left there, as far as that can be known now."""
        if not self.in_mid_epoch:
            return False
        mark, source = self._place.mark, self._source
        if mark is not None and mark.finished and not source.rollover:
            return True
        if mark is not None and not source.cuts:
            return False  # a sampler of another library may yield more than its length says
        try:
            return self._line.length() == 0
        except Exception:
            return False  # it has no length

    def following(self) -> Position:
        """Where the next epoch begins, if this one `is_over`."""
        place = self._place
        if self._source.rollover:
            return Position(self.epoch + 1, place.done - self._line.length_of_epoch, place.mark)
        mark = place.mark
        # A sampler that goes on by a state of its own is led through the end of this epoch.
        return Position(self.epoch + 1, 0, None if mark is None or mark.state is None else replace(mark, finished=True))

    def length(self) -> int:
        """How many batches the epoch has, those before `first` included.

        Raises:
            TypeError: a sampler of another library has no ``__len__``.
        """
        return self.first + self._line.length()

    def position(self, batch: int) -> int:
        """Where in the global order the batch begins for this rank."""
        return self._line.done(batch - self.first) + self._source.rank

    def place(self, delivered: int) -> Position:
        """The position after ``delivered`` batches of the epoch (at least `first`)."""
        mark = self._marks.get(delivered)
        done = self._line.done(delivered - self.first)
        return Position(self.epoch, done if delivered == self.first else self._line.clamp(done), mark)

    def after(self, place: Position) -> Position:
        """The position that the next epoch begins at, as a sampler of another library gets there after this epoch.

        That matters where the sampler goes on from it: with rollover, or by a state of its own.
        """
        mark = self._at_end
        if mark is None or place.mark is not None or (mark.state is None and not self._source.rollover):
            return place
        return Position(place.epoch, place.done, mark)


class _Fixed:
    """Epochs on their own: keep, discard, given batches."""

    length_of_epoch = 0

    def __init__(self, source: Source, epoch: int, done: int, sized: bool) -> None:
        self._source, self._epoch, self._done, self._sized = source, epoch, done, sized
        self.begun = done > 0
        self._step = source.replicas * (source.batch_size or 1)
        at_end = done > 0 and sized and done >= len_epoch(source.items, epoch)
        # At the end a short last batch counts as one.
        self.first = parts(done, self._step, cut=not at_end)

    def open(self, items: Any) -> Table:
        """The batches of the epoch after `done` items, as a table."""
        source, table = self._source, table_of(items, self._epoch, self._source.seed)
        if source.dealt or self._done:
            table = Dealt(table, source.replicas, source.rank, self._done, source.dealt and source.drops_last)
        if source.batch_size is None:
            return table
        return Batched(table, source.batch_size, source.drops_last, source.arrays)

    def length(self) -> int:
        source = self._source
        rest = max(len_epoch(source.items, self._epoch) - self._done, 0)
        mine = parts(rest, source.replicas, source.dealt and source.drops_last)
        return parts(mine, source.batch_size or 1, source.drops_last)

    def done(self, batches: int) -> int:
        return self._done + batches * self._step

    def clamp(self, done: int) -> int:
        # A sampler of another library may yield more than its length.
        return min(done, len_epoch(self._source.items, self._epoch)) if self._sized else done


class _Rolling:
    """A stretch of the endless sequence of epochs, counted in steps (`sharded_loader.sampling.tables.Stretch`)."""

    behind = False

    def __init__(self, source: Source, epoch: int, place: Position | None) -> None:
        self._source, self._epoch = source, epoch
        self._batch: int = source.batch_size or 1
        self.length_of_epoch = length = len_epoch(source.items, 0)
        whole = Stretch(length, source.replicas, 0, 0)
        begin, end = (whole.total(e * whole.steps // self._batch * self._batch) for e in (epoch, epoch + 1))
        total = begin if place is None else place.done + epoch * length
        self._from = Stretch(length, source.replicas, *divmod(total, max(length, 1)))
        self._until = max(end, total)
        self.behind = total > end
        self.begun = total > begin
        self.first = max(0, (whole.steps_before(total, cut=True) - whole.steps_before(begin)) // self._batch)
        self._count = self._from.steps_before(self._until) if total < end else 0

    def open(self, items: Any) -> Table:
        """The batches of the stretch, as a table."""
        source = self._source
        open_epoch = partial(table_of, items, seed=source.seed)
        endless = Endless(open_epoch, self._from, source.rank, self._count, name_of(items))
        return Batched(endless, self._batch, arrays=source.arrays)

    def length(self) -> int:
        return parts(self._count, self._batch, cut=False)

    def done(self, batches: int) -> int:
        """Samples done after this many batches, counted from the epoch's own first."""
        return self._from.total(batches * self._batch) - self._epoch * self.length_of_epoch

    def clamp(self, done: int) -> int:
        return min(done, self._until - self._epoch * self.length_of_epoch)
