"""One epoch of a sampler: its batches for this rank, from any position on, and the position after each of them.

    (SamplerSource, epoch, Position or None) -> MapEpoch.task(seq) -> Task         -> engine/pipeline.py
                                                MapEpoch.position(delivered)       -> state_dict

A `Position` counts in the global order, which all ranks share: samples, or batches if a batch sampler was given. So
it holds nothing of the rank. What lies behind it can be dealt to any number of ranks, in batches of any size.
Without a position an epoch is the sampler's own. From a position on:

    keep, discard, given batches    the rest of the epoch's items, dealt and padded again, is cut into batches;
    rollover                        the endless sequence of epochs goes on up to where epoch + 1 begins for this number
                                    of ranks and batch size. If those have changed, the last batch may be smaller. If
                                    the position lies behind the beginning of epoch + 1, the rest of the epoch is empty
                                    and epoch + 1 begins at the position (`carry`).

Batches keep their numbers: after k whole ones the next is number k, also where batches were of another size.

`_Batches` owns the table, the batches that are ready, and the checkpoints of a sampler of another library.
Samplers of ours, and lists, are read in blocks, at any number. A sampler of another library is read batch after batch,
and its batches are kept until `forget`. `batch` may be interrupted between any two lines: it then drops the table, and
the next call opens it again.

What can go wrong: the sampler raises an error, which comes at its batch and ends the epoch. A sampler of another
library cannot get back to its checkpoint (`sharded_loader.sampling.foreign`). A batch is empty, has an index out of
range, or more shards than there are devices. Then the batches after it are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.base.errors import as_batch_error
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.engine.epoch_requests import last_requests, restore_requests
from sharded_loader.engine.messages import NOTHING, Nothing, Task
from sharded_loader.engine.order import Epoch, Position, sampler_error
from sharded_loader.engine.split import is_sharded, plain_indices
from sharded_loader.sampling.base import EVERY, find_foreign, nested
from sharded_loader.sampling.foreign import Listed, Replay, known_length, len_epoch, name_of, over_replay, table_of
from sharded_loader.sampling.state import Checkpoint, Signature, dump
from sharded_loader.sampling.tables import ENDLESS, Batched, Dealt, Filled, Rolling, Table, parts


@dataclass(frozen=True)
class SamplerSource:
    """What an epoch is read from, as it is settled when the epoch begins.

    Attributes:
        items: the sampler of the global order: of samples, or of batches.
        signature: seed, ``batch_size`` and ``last_batch`` (None: ``items`` are batches), and what a state compares.
        replicas, rank: how many ranks there are, and which is this one.
        dealt: whether the items are dealt to ranks.
        arrays: batches may be int64 arrays instead of lists (only with ``batch_size``).
        max_shards: how many shards a batch may have; None: any number.
        evaluates: all batches are whole: fillers follow the items, and `MapEpoch.real` tells them apart.
        skips: the numbers of the batches that are left out; they may reach beyond the epoch.
    """

    items: Any
    signature: Signature
    replicas: int
    rank: int
    dealt: bool
    arrays: bool = False
    max_shards: int | None = None
    evaluates: bool = False
    skips: tuple[range, ...] = ()

    @property
    def batch_size(self) -> int | None:
        """Of this rank; None: the items are batches, and may be lists of shards. A tuple as an index is no shard."""
        return self.signature.batch_size

    @property
    def cuts(self) -> bool:
        """Whether the last items of an epoch may belong to no batch of it."""
        given = (getattr(sampler, "last_batch", "keep") for sampler in nested(self.items))
        own = self.signature
        return own.rolls_over or own.drops_last or any(last_batch != "keep" for last_batch in given)


class MapEpoch(Epoch):
    """One epoch of a sampler, from a position on.

    Args:
        source: the sampler, and how it is read.
        epoch: which epoch.
        position: where in it; None: at its beginning.

    Attributes:
        foreign: the sampler of another library that is read; None: there is none.
    """

    def __init__(self, source: SamplerSource, epoch: int, position: Position | None) -> None:
        self.number, self.resumed, self.evaluates = epoch, position is not None, source.evaluates
        self.source, self._position, own = source, position or Position(epoch), source.signature
        self._counting = next((one for one in nested(source.items) if hasattr(one, "landmark")), None)
        if self._counting is not None and self._position.landmark is not None:
            self._counting.note_landmark(self._position_in_items(self._position)[0], self._position.landmark)
        self._span: _SeparateSpan | _RollingSpan
        self._span = _RollingSpan(source, epoch, position) if own.rolls_over else _SeparateSpan(source, self._position)
        self.first, self.in_mid_epoch = self._span.first, self._span.is_begun
        self.carry = self.following() if self._span.is_behind else None
        self._batches = _Batches(source, self._span, self._position.mark)
        self.foreign, self.keeps = self._batches.foreign, self._batches.foreign is not None
        self._within: object = None  # the last array that was checked and has no index out of range

    def go_on_from(self, before: Epoch) -> None:
        """Go on where the epoch before has left a sampler of another library, if this one begins in its middle."""
        if not isinstance(before, MapEpoch) or before.source.signature != self.source.signature:
            return
        if before.number + 1 == self.number and isinstance(self._span, _RollingSpan):
            self._batches.go_on_from(before._batches, self._span.is_endless)

    def again(self) -> MapEpoch:
        """The same batches once more, for a dataset that looks ahead. Not of a sampler of another library."""
        return MapEpoch(self.source, self.number, self._position if self.resumed else None)

    # -- tasks ----------------------------------------------------------------------------------------------

    def task(self, seq: int) -> Task | Exception | Nothing | None:
        """Batch ``seq`` as a task; the error to raise in its place; `NOTHING`: left out; None after the last one."""
        found = self._batches.ready.get(seq)
        if found is None:
            try:
                found = self.batch(seq)
            except Exception as raised:
                return sampler_error(raised, f", in epoch {self.number} at batch {seq}")
            if found is None:
                return None
        if self.source.skips and any(seq in one for one in self.source.skips):
            return NOTHING
        try:
            return self._make_task(seq, *found)
        except Exception as raised:
            return as_batch_error(raised, "by a batch of the sampler's")

    def _make_task(self, seq: int, batch: Any, first: int) -> Task:
        limit, given = self.limit, self.source.signature.batch_size is None
        if type(batch) is np.ndarray and not given and batch.dtype == np.int64 and batch.ndim == 1 and batch.size:
            if limit is not None and (batch.base is None or batch.base is not self._within):
                # Batches that are views of one block are checked together: 3 us for it, and 0.2 each, instead of 2.5.
                self._within = next((one for one in (batch.base, batch) if _are_within(one, limit)), None)
                if self._within is None:
                    _check_range(batch.tolist(), limit, f"epoch {self.number}, batch {seq}")
            return Task(self.run, seq, self.number, first, (batch,), False)
        where = f"epoch {self.number}, batch {seq}"
        try:
            size = -1 if isinstance(batch, (str, bytes)) else len(batch)
        except TypeError:
            size = -1
        if size < 0:
            text = f"{where}: the batch sampler yielded {batch!r} ({type(batch).__name__})"
            raise TypeError(f"{text}; it must yield lists of indices, or lists of such lists (shards)")
        if size == 0:
            raise ValueError(f"{where} is empty: the batch sampler must yield at least one index")
        if not (given and is_sharded(batch)):
            indices = plain_indices(batch)
            _check_range(indices, limit, where)
            return Task(self.run, seq, self.number, first, (indices,), False)
        shards, most = [plain_indices(shard) for shard in batch], self.source.max_shards
        for number, shard in enumerate(shards):
            if not shard:
                advice = "at the end of a batch leave empty shards out, and give one in the middle an index of another"
                raise ValueError(f"{where}, shard {number} is empty, and shard i goes to device i: {advice}")
            _check_range(shard, limit, f"{where}, shard {number}")
        if most is not None and len(shards) > most:
            advice = f"let the batch sampler yield at most {most} shards, or name more devices"
            raise ValueError(f"{where} has {len(shards)} shards, but there are only {most} devices: {advice}")
        return Task(self.run, seq, self.number, first, tuple(shards), True)

    # -- batches --------------------------------------------------------------------------------------------

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
        return self._batches.batch(number)

    def read_to(self, number: int) -> tuple[Any, int] | None:
        """A batch, as `batch` has it, in an epoch that is read for it alone. Those that it depends on are read before.

        A batch depends on those before it if a sampler of another library gives them, or if it has fillers alone.
        """
        begin = self.first if self.keeps else number - self.evaluates
        for seq in range(max(begin, self.first), number):
            if self.batch(seq) is None:
                return None
            self.forget(seq)
        return self.batch(number)

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        return self._batches.ready, self._batches.marks

    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again (that batch itself may be taken back)."""
        for number in [ready for ready in self._batches.ready if ready < delivered - 1]:
            del self._batches.ready[number]
            self._batches.marks.pop(number, None)

    # -- positions ------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether it began in mid-epoch and no batch was left there, as far as that can be known now."""
        if not self.in_mid_epoch:
            return False
        if self.source.skips and self._left_out(self.first) == self._span.length():
            return True
        mark: Checkpoint | None = self._position.mark
        if self._counting is not None and not self.source.signature.rolls_over:
            return self._batches.open(self.first).upto(0, 1) <= 0  # its length would take a pass
        if mark is not None and not (self.source.cuts or self.evaluates):
            return mark.finished  # a sampler of another library may yield more than its length says
        try:
            return self._span.length() == 0
        except Exception:
            return False  # it has no length

    def following(self) -> Position:
        """Where the next epoch begins, if this one `is_over`."""
        done, mark = self._position.done, self._position.mark
        if self.source.skips:  # all that is left of the epoch is left out
            done = self._span.done(self._left_out(self.first))
        if self.source.signature.rolls_over:
            return Position(self.number + 1, done - self._span.length_of_epoch, mark)
        if mark is None or mark.state is None:
            return Position(self.number + 1)
        # A sampler that goes on by a state of its own is led through the end of this epoch.
        return Position(self.number + 1, 0, replace(mark, finished=True))

    def length(self) -> int:
        """The number of batches in the epoch, those before `first` included.

        Raises:
            TypeError: a sampler of another library has no ``__len__``.
        """
        return self.first + self._span.length() - (self._left_out(0) if self.source.skips else 0)

    def discarded(self) -> tuple[int, str]:
        source, span, size = self.source, self._span, self.source.batch_size
        end = span.items_from(0)
        if size is None or not source.signature.drops_last or end >= sys.maxsize:
            return 0, ""
        mine = len(range(self._position.done + source.rank, end, source.replicas))
        return max(0, mine - span.length() * size), ""

    def _left_out(self, begin: int) -> int:
        """How many batches from number ``begin`` on are left out."""
        end = self.first + self._span.length()
        return sum(max(0, min(one.stop, end) - max(one.start, begin)) for one in self.source.skips)

    def real(self, task: Task) -> int:
        """How many samples of a batch are no fillers, if the epoch ``evaluates``: the first ones."""
        before, size = self._span.items_from(task.position), self.source.batch_size
        if size is None:
            return sum(map(len, task.shards)) if before > 0 else 0
        return min(parts(max(before, 0), self.source.replicas, cut=False), size)

    def state(self, position: Position) -> dict[str, Any]:
        if self._counting is not None:
            position = replace(position, landmark=self._counting.landmark(*self._position_in_items(position)))
        return dump(position, self.source.signature)

    def _position_in_items(self, position: Position) -> tuple[int, int]:
        """The epoch of a sampler with ``counts_by_pass``, and the number of an item there."""
        own = self.source.signature
        if not own.rolls_over:
            return position.epoch, position.done
        before = position.epoch * (own.steps_per_epoch or 0) * self.source.replicas + own.shift
        return EVERY, before + position.done

    def position(self, delivered: int) -> Position:
        """The position after ``delivered`` batches of the epoch (at least `first`)."""
        done, mark = self._span.done(delivered - self.first), self._batches.marks.get(delivered)
        listed = self._batches.listed
        if listed is not None and mark is None and delivered > self.first:
            mark = listed.checkpoint(self.number, done)
        return Position(self.number, done, mark)

    def reached(self, delivered: int) -> tuple[int, int]:
        """The epoch of the sampler, and the position in it, after ``delivered`` batches of the epoch."""
        return self._span.reached(delivered - self.first)

    def after(self, begin: Position) -> Position:
        """The position that the next epoch begins at, as a sampler of another library gets there after this epoch.

        That matters where the sampler goes on from it: with rollover, or by a state of its own.
        """
        mark = self._batches.at_end
        if mark is None or begin.mark is not None or (mark.state is None and not self.source.signature.rolls_over):
            return begin
        return replace(begin, mark=mark)


class _Batches:
    """The batches of an epoch by number. Those of another library's sampler are read one after the other.

    Args:
        source: what is read.
        span: where its batches lie.
        mark: the checkpoint before the first batch.

    Attributes:
        foreign: the sampler of another library, or None.
        listed: a list as the sampler, or None.
        ready: batches that were made together with one that was asked for, and where their first samples lie.
        marks: by number, the checkpoint before a batch; of a sampler of another library.
        at_end: the checkpoint at the end, when it was reached.
    """

    def __init__(self, source: SamplerSource, span: _SeparateSpan | _RollingSpan, mark: Checkpoint | None) -> None:
        self._source, self._span, self.listed = source, span, None
        self.foreign, self._seed = find_foreign(source.items, source.signature.seed)
        if type(source.items) in (list, tuple, range) and source.batch_size and isinstance(span, _SeparateSpan):
            self.foreign, self.listed = None, Listed(source.items, mark)
        self._noted = [sampler for sampler, _ in last_requests(nested(self.foreign))]
        self._table: Table | None = None
        self._replay: Replay | None = None
        self._open_before: Replay | None = None  # as the epoch before has left it
        self.ready: dict[int, tuple[Any, int]] = {}
        self._coming = span.first  # the batch that a sampler of another library is read for next
        self.marks: dict[int, Checkpoint | None] = {span.first: mark}
        self._ended = sys.maxsize  # no batch of this number, or of a greater one
        self.at_end: Checkpoint | None = None

    def go_on_from(self, before: _Batches, is_endless: bool) -> None:
        """Go on where another epoch has left the sampler.

        A sampler without a length stays open, since the way from its beginning would get longer with each epoch.
        """
        ended = before.at_end is not None
        mark = before.at_end if ended else before.marks.get(before._coming)  # its loop was left
        if mark is None or before.foreign is not self.foreign:
            return
        if mark.state is not None or is_endless:
            self.marks[self._span.first] = mark
        if is_endless and ended:
            self._open_before, before._replay = before._replay, None

    def batch(self, number: int) -> tuple[Any, int] | None:
        """See `MapEpoch.batch`."""
        found = self.ready.get(number)
        if found is not None or number >= self._ended:
            return found
        before = last_requests(self._noted)
        try:
            if self.foreign is None:
                self.ready = self._read(number)
            else:
                self._read_foreign(number)
            restore_requests(before)
        except BaseException as error:  # also a Ctrl-C that comes while they are put back
            restore_requests(before)
            self._table = None
            # A batch that was read, but not counted, is read again: perhaps in another order.
            self.ready = {seq: found for seq, found in self.ready.items() if seq < self._coming}
            if isinstance(error, Exception) and not is_from_outside(error):
                self._ended = number + 1
            raise
        return self.ready.get(number)

    def _read(self, number: int) -> dict[int, tuple[Any, int]]:
        """A batch, and those behind it that come with it at no cost: a block of indices is made at once."""
        if self._table is None:
            self._table = self.open(number)
        first, rank = self._span.first, self._source.rank
        batches = self._table.slice(number - first, number - first + self._table.block)
        return {first + n: (batch, self._span.done(n) + rank) for n, batch in enumerate(batches, number - first)}

    def open(self, number: int) -> Table:
        """The batches as a table, read from a number on."""
        items = self.listed or self._source.items
        if self.foreign is not None:
            self._replay = Replay(self.foreign, self._seed, self.marks[number], self._open_before)
            self._open_before = None
            items = over_replay(items, self._replay)
        return self._span.open(items)

    def _read_foreign(self, number: int) -> None:
        """Read a sampler of another library up to a batch, and note a checkpoint after each batch."""
        while self._coming <= number:
            found = self._read(self._coming)
            mark = None if self._replay is None else self._replay.checkpoint()
            if not found:
                self.at_end, self._ended = mark, self._coming
                return
            self.marks[self._coming + 1] = mark
            self.ready.update(found)
            self._coming += 1


def _are_within(indices: object, limit: int) -> bool:
    """Whether these are indices of a dataset of ``limit`` samples."""
    if type(indices) is not np.ndarray or indices.dtype != np.int64:
        return False
    # A negative index is a large unsigned one; a negative length is none.
    return int(np.maximum.reduce(indices.view(np.uint64), axis=None)) < limit


def _check_range(indices: Sequence[Any], limit: int | None, where: str) -> None:
    if limit is None:
        return
    try:
        if max(indices) < limit and min(indices) >= -limit:
            return
    except TypeError:
        return  # keys that are no numbers: the dataset knows them
    bad = next(index for index in indices if not -limit <= index < limit)
    advice = "give the sampler this dataset's length, or call loader.refresh() if the dataset has changed its length"
    raise IndexError(f"{where}: the sampler yielded index {bad}, but the dataset has {limit} samples: {advice}")


class Ahead(NamedTuple):
    """Which samples come, for a dataset that looks ahead (`data.datasets.follow`). It can be sent to other machines.

    Attributes:
        epoch: the epoch that is read.
        following: the next one.
    """

    epoch: MapEpoch
    following: MapEpoch

    def batches(self, number: int) -> Any:
        """The indices of a batch of the epoch, those of all its shards together; None after the last one."""
        return _flat(self.epoch, number)

    def later(self, number: int) -> Any:
        """The same of the next epoch, counted from 0."""
        return _flat(self.following, self.following.first + number)


def _flat(epoch: MapEpoch, number: int) -> Any:
    found = epoch.batch(number)
    if found is None or not (epoch.source.batch_size is None and is_sharded(found[0])):
        return found and found[0]
    return list(chain.from_iterable(found[0]))


class _SeparateSpan:
    """The batches of an epoch on its own: keep, discard, given batches."""

    is_behind = False
    length_of_epoch = 0

    def __init__(self, source: SamplerSource, position: Position) -> None:
        self.source, self._epoch, self._done = source, position.epoch, position.done
        self._step = source.replicas * (source.batch_size or 1)
        length = source.signature.sampler_length
        if source.evaluates and length is None:
            length = len_epoch(source.items, position.epoch)
        # A sampler of another library may yield more than its length.
        self._end = sys.maxsize if length is None else length
        self.is_begun = position.done > 0
        # At the end a short last batch counts as one.
        self.first = parts(position.done, self._step, cut=position.done < self._end)

    def open(self, items: object) -> Table:
        """The batches of the epoch after the position, as a table."""
        source, table = self.source, table_of(items, self._epoch, self.source.signature.seed)
        if source.evaluates:
            steps = parts(self._end - self._done, self._step, cut=False)
            goes_back = source.replicas if find_foreign(source.items, 0)[0] is None else 0
            table = Filled(table, self._end, self._done, self._done + steps * self._step, goes_back)
        if source.dealt or self._done:
            table = Dealt(table, source.replicas, source.rank, self._done, source.dealt and source.signature.drops_last)
        if source.batch_size is None:
            return table
        return Batched(table, source.batch_size, source.signature.drops_last, arrays=True, convert=source.arrays)

    def length(self) -> int:
        source = self.source
        rest = max(len_epoch(source.items, self._epoch) - self._done, 0)
        mine = parts(rest, source.replicas, source.dealt and source.signature.drops_last)
        return parts(mine, source.batch_size or 1, source.signature.drops_last)

    def done(self, batches: int) -> int:
        """Items of the epoch that are done after a number of batches from the position on."""
        return min(self._done + batches * self._step, self._end)

    def items_from(self, position: int) -> int:
        """How many items come from a position on; less than 0 behind the end."""
        return self._end - position

    def reached(self, batches: int) -> tuple[int, int]:
        """The epoch of the sampler, and the position in it, after a number of batches."""
        return self._epoch, self.done(batches)


class _RollingSpan(Rolling):
    """The batches of an epoch in the endless sequence of epochs."""

    def __init__(self, source: SamplerSource, epoch: int, position: Position | None) -> None:
        self.source, steps = source, source.signature.steps_per_epoch
        self.is_endless = steps is not None and known_length(source.items, 0) is None
        length = ENDLESS if self.is_endless else len_epoch(source.items, 0)
        size, done = source.batch_size or 1, None if position is None else position.done
        super().__init__(length, size, epoch, source.replicas, done, steps, source.signature.shift)

    def open(self, items: object) -> Table:
        """The batches as a table."""
        source, seed = self.source, self.source.signature.seed
        open_epoch = partial(table_of, items, seed=seed)
        if getattr(items, "counts_by_pass", False):
            return self.items(lambda _: table_of(items, EVERY, seed), source.rank, name_of(items))
        if source.batch_size is None:
            return self.items(open_epoch, source.rank, name_of(items))
        return self.table(open_epoch, source.rank, name_of(items), arrays=True, convert=source.arrays)

    def done(self, batches: int) -> int:
        """Items of the epoch that are done after a number of batches from the position on."""
        return self.total(batches) - self.origin

    def items_from(self, position: int) -> int:
        """Any number: there are no fillers."""
        return ENDLESS

    def reached(self, batches: int) -> tuple[int, int]:
        """The epoch of the sampler, and the position in it, after a number of batches."""
        return divmod(self.total(batches), max(self._stretch.length, 1))
