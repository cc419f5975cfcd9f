"""One epoch of a sampler: this rank's batches from any position on, and the position after each of them.

    (SamplerSource, epoch, Position or None) -> MapEpoch.task(seq) -> Task         -> engine/pipeline.py
                                                MapEpoch.position(delivered)       -> state_dict

A `Position` counts samples (or batches, with a batch sampler) in the global order shared by all ranks. So the rest of
the epoch can be split among any number of ranks, in batches of any size. Without a position an epoch is the sampler's
own. From a position on:

    keep, discard, batch sampler    the remaining items are split, padded and batched again;
    rollover                        the endless sequence continues to the start of epoch + 1 for this number of ranks
                                    and batch size; if those changed, the last batch may be smaller. Past that start
                                    the rest of the epoch is empty, and epoch + 1 begins at the position (`carry`).

`_Batches` owns the table, the prepared batches, and the checkpoints of a third-party sampler, which is read batch by
batch and buffered until `forget`. If `batch` is interrupted it drops the table, and the next call opens it again.

What can go wrong: the sampler raises an error, which surfaces at its batch and ends the epoch. A batch is empty, has an
index out of range, or more shards than devices; later batches are not affected.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
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
from sharded_loader.sampling.base import EVERY, find_third_party, nested
from sharded_loader.sampling.state import Checkpoint, Signature, dump
from sharded_loader.sampling.tables import ENDLESS, BatchedTable, PaddedTable, Rollover, StridedTable, Table, parts
from sharded_loader.sampling.third_party import ListSampler, RecordedSampler, known_length, len_epoch, name_of, table_of


@dataclass(frozen=True)
class SamplerSource:
    """Everything an epoch is read from, fixed when the epoch begins.

    Attributes:
        items: sampler of the global order: of samples, or of batches.
        strided: items are split among ranks.
        max_shards: maximum number of shards per batch; None: unlimited.
        evaluates: pad to whole batches; `MapEpoch.real` returns the number of samples that are not padding.
        skips: numbers of skipped batches; they may reach beyond the epoch.
        cut: function of a task, and of its number of real samples, that returns this rank's share; None: no shares.
    """

    items: Any
    signature: Signature
    replicas: int
    rank: int
    strided: bool
    arrays: bool = False
    max_shards: int | None = None
    evaluates: bool = False
    skips: tuple[range, ...] = ()
    cut: Callable[[Task, int | None], Task] | None = None

    @property
    def cuts(self) -> bool:
        """True if the last items of an epoch may belong to none of its batches."""
        last_batches = (getattr(sampler, "last_batch", "keep") for sampler in nested(self.items))
        own = self.signature
        return own.rolls_over or own.drops_last or any(last_batch != "keep" for last_batch in last_batches)


class MapEpoch(Epoch):
    """One epoch of a sampler, from a position on (None: its beginning).

    ``third_party`` is its third-party sampler, and ``announced`` the functions that are told of each task (`follow`).
    """

    announced: Sequence[Callable[[int], object]] = ()

    def __init__(self, source: SamplerSource, epoch: int, position: Position | None) -> None:
        self.number, self.resumed, self.evaluates = epoch, position is not None, source.evaluates
        self.source, self._position, own = source, position or Position(epoch), source.signature
        self._rows = next((one for one in nested(source.items) if hasattr(one, "row_checkpoint")), None)
        if self._rows is not None and self._position.row_checkpoint is not None:
            self._rows.add_row_checkpoint(self._position_in_items(self._position)[0], self._position.row_checkpoint)
        self._span: _SeparateSpan | _RolloverSpan
        self._span = _RolloverSpan(source, epoch, position) if own.rolls_over else _SeparateSpan(source, self._position)
        self.first, self.in_mid_epoch = self._span.first, self._span.is_begun
        self.carry = self.following() if self._span.is_behind else None
        self._batches = _Batches(source, self._span, self._position.mark)
        self.third_party, self.keeps = self._batches.third_party, self._batches.third_party is not None
        self._checked_array: object = None  # last array without an index out of range

    def go_on_from(self, before: Epoch) -> None:
        is_next = before.number + 1 == self.number
        if is_next and isinstance(before, MapEpoch) and isinstance(self._span, _RolloverSpan):
            self._batches.go_on_from(before._batches, self._span.is_endless)

    def again(self) -> MapEpoch:
        """Return an independent copy of the epoch, for lookahead. Not for third-party samplers."""
        return MapEpoch(self.source, self.number, self._position if self.resumed else None)

    # -- tasks ----------------------------------------------------------------------------------------------

    def task(self, seq: int) -> Task | Exception | Nothing | None:
        found = self._batches.ready.get(seq)
        if found is None:
            try:
                found = self.batch(seq)
            except Exception as raised:
                return sampler_error(raised, f", in epoch {self.number} at batch {seq}")
            if found is None:
                return None
        for announce in self.announced:
            announce(seq)
        if self.source.skips and any(seq in one for one in self.source.skips):
            return NOTHING
        try:
            task, cut = self._make_task(seq, *found), self.source.cut
            return task if cut is None else cut(task, self.real(task) if self.evaluates else None)
        except Exception as raised:
            return as_batch_error(raised, "by a batch of the sampler's")

    def _make_task(self, seq: int, batch: Any, first: int) -> Task:
        limit, is_batched = self.limit, self.source.signature.batch_size is None
        if type(batch) is np.ndarray and not is_batched and batch.dtype == np.int64 and batch.ndim == 1 and batch.size:
            if limit is not None and (batch.base is None or batch.base is not self._checked_array):
                # Views of one block are checked together: 3 us per block and 0.2 us per batch, instead of 2.5.
                self._checked_array = next((one for one in (batch.base, batch) if _is_in_range(one, limit)), None)
                if self._checked_array is None:
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
        if not (is_batched and is_sharded(batch)):
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
        """Return a batch that is not forgotten, and the position of its first sample (with a batch sampler, its own).

        A batch is a list of indices, an int64 array, or a list of lists (shards). None after the last one. Any error of
        the sampler is raised, and ends the epoch.
        """
        return self._batches.batch(number)

    def read_to(self, number: int) -> tuple[Any, int] | None:
        """Return a batch after those it depends on: all of a third-party sampler, or the one before pure padding."""
        begin = self.first if self.keeps else number - self.evaluates
        for seq in range(max(begin, self.first), number):
            if self.batch(seq) is None:
                return None
            self.forget(seq)
        return self.batch(number)

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        return self._batches.ready, self._batches.checkpoints

    def forget(self, delivered: int) -> None:
        for number in [ready for ready in self._batches.ready if ready < delivered - 1]:
            del self._batches.ready[number]
            self._batches.checkpoints.pop(number, None)

    # -- positions ------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        if not self.in_mid_epoch:
            return False
        if self.source.skips and self._count_skipped(self.first) == self._span.length():
            return True
        checkpoint: Checkpoint | None = self._position.mark
        if self._rows is not None and not self.source.signature.rolls_over:
            return self._batches.open(self.first).upto(0, 1) <= 0  # its length would take a pass
        if checkpoint is not None and not (self.source.cuts or self.evaluates):
            return checkpoint.finished  # a third-party sampler may exceed its length
        try:
            return self._span.length() == 0
        except Exception:
            return False  # it has no length

    def following(self) -> Position:
        done, checkpoint = self._position.done, self._position.mark
        if self.source.skips:  # the rest of the epoch is skipped
            done = self._span.done(self._count_skipped(self.first))
        if self.source.signature.rolls_over:
            return Position(self.number + 1, done - self._span.length_of_epoch, checkpoint)
        if checkpoint is None or checkpoint.state is None:
            return Position(self.number + 1)
        # A sampler with its own state continues from the end of this epoch.
        return Position(self.number + 1, 0, replace(checkpoint, finished=True))

    def length(self) -> int:
        return self.first + self._span.length() - (self._count_skipped(0) if self.source.skips else 0)

    def discarded(self) -> tuple[int, str]:
        source, span, size = self.source, self._span, self.source.signature.batch_size
        end = span.items_from(0)
        if size is None or not source.signature.drops_last or end >= sys.maxsize:
            return 0, ""
        mine = len(range(self._position.done + source.rank, end, source.replicas))
        return max(0, mine - span.length() * size), "" if self.first + span.length() else "the whole epoch"

    def _count_skipped(self, begin: int) -> int:
        end = self.first + self._span.length()
        return sum(max(0, min(one.stop, end) - max(one.start, begin)) for one in self.source.skips)

    def real(self, task: Task) -> int:
        if task.share is not None:
            return task.share[0]
        before, size = self._span.items_from(task.position), self.source.signature.batch_size
        if size is None:
            return sum(map(len, task.shards)) if before > 0 else 0
        return min(parts(max(before, 0), self.source.replicas, cut=False), size)

    def state(self, position: Position) -> dict[str, Any]:
        if self._rows is not None:
            position = replace(position, row_checkpoint=self._rows.row_checkpoint(*self._position_in_items(position)))
        return dump(position, self.source.signature)

    def _position_in_items(self, position: Position) -> tuple[int, int]:
        """Return the epoch and item number in a sampler with ``counts_by_pass``."""
        own = self.source.signature
        if not own.rolls_over:
            return position.epoch, position.done
        before = position.epoch * (own.steps_per_epoch or 0) * self.source.replicas + own.shift
        return EVERY, before + position.done

    def position(self, delivered: int) -> Position:
        done, checkpoint = self._span.done(delivered - self.first), self._batches.checkpoints.get(delivered)
        if (sequence := self._batches.sequence) is not None and checkpoint is None and delivered > self.first:
            checkpoint = sequence.checkpoint(self.number, done)
        return Position(self.number, done, checkpoint)

    def reached(self, delivered: int) -> tuple[int, int]:
        """Return the sampler's epoch, and the position in it, after ``delivered`` batches."""
        return self._span.reached(delivered - self.first)

    def after(self, begin: Position) -> Position:
        """Add the checkpoint at this epoch's end if a third-party sampler continues from it: rollover, or own state."""
        end = self._batches.at_end
        if end is None or begin.mark is not None or (end.state is None and not self.source.signature.rolls_over):
            return begin
        return replace(begin, mark=end)


class _Batches:
    """Batches of an epoch by number. Those of a third-party sampler are read sequentially.

    Attributes:
        ready: batches read together with a requested one, with the positions of their first samples.
        checkpoints: checkpoints before batches of a third-party sampler, by batch number.
        at_end: checkpoint at the end, once reached.
    """

    def __init__(self, source: SamplerSource, span: _SeparateSpan | _RolloverSpan, begin: Checkpoint | None) -> None:
        self._source, self._span, self.sequence, own = source, span, None, source.signature
        self.third_party, self._seed = find_third_party(source.items, own.seed)
        if type(source.items) in (list, tuple, range) and own.batch_size and isinstance(span, _SeparateSpan):
            self.third_party, self.sequence = None, ListSampler(source.items, begin)
        self._noted = [sampler for sampler, _ in last_requests(nested(self.third_party))]
        self._table: Table | None = None
        self._recorded: RecordedSampler | None = None
        self._previous: RecordedSampler | None = None  # left open by the previous epoch
        self.ready: dict[int, tuple[Any, int]] = {}
        self._next_number = span.first  # next batch of a third-party sampler
        self.checkpoints: dict[int, Checkpoint | None] = {span.first: begin}
        self._ended = sys.maxsize  # first number without a batch
        self.at_end: Checkpoint | None = None

    def go_on_from(self, before: _Batches, is_endless: bool) -> None:
        """Continue where another epoch left the sampler.

        A sampler without a length stays open, because skipping to the position would take longer each epoch.
        """
        ended = before.at_end is not None
        checkpoint = before.at_end if ended else before.checkpoints.get(before._next_number)  # the loop was interrupted
        if checkpoint is None or before.third_party is not self.third_party:
            return
        if checkpoint.state is not None or is_endless:
            self.checkpoints[self._span.first] = checkpoint
        if is_endless and ended:
            self._previous, before._recorded = before._recorded, None

    def batch(self, number: int) -> tuple[Any, int] | None:
        found = self.ready.get(number)
        if found is not None or number >= self._ended:
            return found
        before = last_requests(self._noted)
        try:
            if self.third_party is None:
                self.ready = self._read(number)
            else:
                self._read_third_party(number)
            restore_requests(before)
        except BaseException as error:  # also a Ctrl-C in restore_requests()
            restore_requests(before)
            self._table = None
            # Batches read but not yet counted are read again, possibly in another order.
            self.ready = {seq: found for seq, found in self.ready.items() if seq < self._next_number}
            if isinstance(error, Exception) and not is_from_outside(error):
                self._ended = number + 1
            raise
        return self.ready.get(number)

    def _read(self, number: int) -> dict[int, tuple[Any, int]]:
        """Return a batch and those computed with it: indices come in blocks."""
        if self._table is None:
            self._table = self.open(number)
        first, rank = self._span.first, self._source.rank
        batches = self._table.slice(number - first, number - first + self._table.block)
        return {first + n: (batch, self._span.done(n) + rank) for n, batch in enumerate(batches, number - first)}

    def open(self, number: int) -> Table:
        """Return the batches as a table, starting at a number."""
        items = self.sequence or self._source.items
        if self.third_party is not None:
            self._recorded = RecordedSampler(self.third_party, self._seed, self.checkpoints[number], self._previous)
            self._previous = None
            items = self._recorded.in_wrappers(items)
        table, own = self._span.open(items), self._source.signature
        if own.batch_size is None:
            return table
        return BatchedTable(table, own.batch_size, own.drops_last, arrays=True, convert=self._source.arrays)

    def _read_third_party(self, number: int) -> None:
        """Read a third-party sampler up to a batch, with a checkpoint after each batch."""
        while self._next_number <= number:
            found = self._read(self._next_number)
            checkpoint = None if self._recorded is None else self._recorded.checkpoint()
            if not found:
                self.at_end, self._ended = checkpoint, self._next_number
                return
            self.checkpoints[self._next_number + 1] = checkpoint
            self.ready.update(found)
            self._next_number += 1


def _is_in_range(indices: object, limit: int) -> bool:
    """Return True for an int64 array of indices below ``limit``."""
    if type(indices) is not np.ndarray or indices.dtype != np.int64:
        return False
    # As unsigned numbers, negative indices are too large.
    return int(np.maximum.reduce(indices.view(np.uint64), axis=None)) < limit


def _check_range(indices: Sequence[Any], limit: int | None, where: str) -> None:
    if limit is None:
        return
    try:
        if max(indices) < limit and min(indices) >= -limit:
            return
    except (TypeError, ValueError, RuntimeError):
        return  # keys that are not numbers: left to the dataset
    bad = next(index for index in indices if not -limit <= index < limit)
    advice = "give the sampler this dataset's length, or call loader.refresh() if the dataset has changed its length"
    raise IndexError(f"{where}: the sampler yielded index {bad}, but the dataset has {limit} samples: {advice}")


class Ahead(NamedTuple):
    """The current and the following epoch, for a dataset that looks ahead (`data.datasets.follow`). Picklable."""

    epoch: MapEpoch
    following: MapEpoch

    def batches(self, number: int) -> Any:
        """Return all indices of a batch of the epoch, with its shards joined; None after the last one."""
        return _flat_indices(self.epoch, number)

    def later(self, number: int) -> Any:
        """Return the same for the next epoch, counted from 0."""
        return _flat_indices(self.following, self.following.first + number)


def _flat_indices(epoch: MapEpoch, number: int) -> Any:
    found = epoch.batch(number)
    if epoch.source.cut is not None and isinstance(task := epoch.task(number), Task):
        return list(chain.from_iterable(task.shards))
    if found is None or not (epoch.source.signature.batch_size is None and is_sharded(found[0])):
        return found and found[0]
    return list(chain.from_iterable(found[0]))


class _SeparateSpan:
    """Batches of an epoch on its own: keep, discard, or a batch sampler."""

    is_behind = False
    length_of_epoch = 0

    def __init__(self, source: SamplerSource, position: Position) -> None:
        self.source, self._epoch, self._done, own = source, position.epoch, position.done, source.signature
        self._step, length = source.replicas * (own.batch_size or 1), own.sampler_length
        if source.evaluates and length is None:
            length = len_epoch(source.items, position.epoch)
        # A third-party sampler may exceed its length.
        self._end = sys.maxsize if length is None else length
        self.is_begun = position.done > 0
        # A short last batch counts only at the end.
        self.first = parts(position.done, self._step, cut=position.done < self._end)

    def open(self, items: object) -> Table:
        source, own = self.source, self.source.signature
        table = table_of(items, self._epoch, own.seed)
        if source.evaluates:
            steps = parts(self._end - self._done, self._step, cut=False)
            stride = source.replicas if find_third_party(source.items, 0)[0] is None else 0
            table = PaddedTable(table, self._end, self._done, self._done + steps * self._step, stride)
        if source.strided or self._done:
            table = StridedTable(table, source.replicas, source.rank, self._done, source.strided and own.drops_last)
        return table

    def length(self) -> int:
        source, own = self.source, self.source.signature
        rest = max(len_epoch(source.items, self._epoch) - self._done, 0)
        mine = parts(rest, source.replicas, source.strided and own.drops_last)
        return parts(mine, own.batch_size or 1, own.drops_last)

    def done(self, batches: int) -> int:
        """Return the items of the epoch done after a number of batches from the position on."""
        return min(self._done + batches * self._step, self._end)

    def items_from(self, position: int) -> int:
        """Return the number of items from a position on; negative past the end."""
        return self._end - position

    def reached(self, batches: int) -> tuple[int, int]:
        return self._epoch, self.done(batches)


class _RolloverSpan(Rollover):
    """Batches of an epoch in the endless sequence of epochs; same methods as `_SeparateSpan`."""

    def __init__(self, source: SamplerSource, epoch: int, position: Position | None) -> None:
        self.source, own, steps = source, source.signature, source.signature.steps_per_epoch
        self.is_endless = steps is not None and known_length(source.items, 0) is None
        length = ENDLESS if self.is_endless else len_epoch(source.items, 0)
        size, done = own.batch_size or 1, None if position is None else position.done
        super().__init__(length, size, epoch, source.replicas, done, steps, own.shift)

    def open(self, items: object) -> Table:
        seed, counts_by_pass = self.source.signature.seed, getattr(items, "counts_by_pass", False)
        open_epoch = (lambda _: table_of(items, EVERY, seed)) if counts_by_pass else partial(table_of, items, seed=seed)
        return self.items(open_epoch, self.source.rank, name_of(items))

    def done(self, batches: int) -> int:
        return self.total(batches) - self.origin

    def items_from(self, position: int) -> int:
        return ENDLESS

    def reached(self, batches: int) -> tuple[int, int]:
        return divmod(self.total(batches), max(self._segment.length, 1))
