"""The batches of a sampler that belongs to the user, as torch reads it: once, from its beginning, in this process.

    TorchEpoch(start, ...)              the sampler's items, and where it is after each of them
    TorchEpoch.task(seq) -> Task        batch number i is read by worker i % num_workers, as in torch
    TorchEpoch.position(delivered)      its ``mark`` is a `SamplerState`, which `TorchEpoch.state` writes

`SamplerStart` starts the sampler, at its beginning or where a state says.

What can go wrong: the sampler raises an error, which comes in the batch's place and ends the epoch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler

from sharded_loader.base.entries import written
from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.drop_in.sampler import BegunEpoch, SamplerStart, SamplerState, keep_epochs, raising
from sharded_loader.engine.messages import NOTHING, Nothing, PartBatch, PartPoint, Result, RowIndices, Task
from sharded_loader.engine.order import Epoch, Position, sampler_error
from sharded_loader.sampling.foreign import ForeignItems, known_length, rank_of
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import bytes_of_one


class _Planned(NamedTuple):
    """A batch in flight.

    Attributes:
        number: the number of the sampler's item.
        item: the item: the indices of the batch.
        lane: the worker that reads it, if the dataset has a state.
        turn: how many batches that worker was given before.
        left_out: the batch is not read.
    """

    number: int
    item: Any
    lane: int
    turn: int
    left_out: bool = False


class TorchEpoch(Epoch):
    """One epoch of a sampler, read once.

    Args:
        start: starts the sampler. If it resumes, that is when the first batch is asked for, because trainers call the
            sampler's ``set_epoch`` after ``iter(loader)``.
        lanes: the number of workers, at least 1.
        batched: whether an item is a list of indices; otherwise it is a single index.
        points: worker -> its position, with the state of its dataset. A new worker has no entry.
        keeps_state: whether the dataset has a state, which each worker keeps.
        number: identifies this set of workers. A worker that is at its position already does not load the state.
        skips: number of the epoch -> the numbers of the sampler's items that are left out.
    """

    takes_turns = True

    def __init__(
        self,
        start: SamplerStart,
        lanes: int,
        batched: bool,
        points: Mapping[int, PartPoint],
        keeps_state: bool,
        number: int,
        skips: Callable[[int], Sequence[range]] = lambda number: (),
    ) -> None:
        self._start, self._lanes, self._batched = start, lanes, batched
        self._skips = skips
        self._left_out: Sequence[range] = ()
        self._items: ForeignItems | None = None  # once the sampler has been started
        self._length: int | None = None  # likewise, if it has one
        state = start.state
        self.first = self._low = self._drawn = self._coming = state.yielded
        self.number = 0
        self._is_started = self._ended = False
        self._is_open = False  # the sampler is asked for an item; afterwards: a Ctrl-C, or a signal, has struck there
        self._planned: dict[int, _Planned] = {}  # by seq
        # Items that were delivered although one before them was not, with in_order=False.
        self._ahead: set[int] = set(state.ahead or ())
        # By item: the checksum of those before it, and the sampler's own state there.
        self._marks: dict[int, tuple[int, Any]] = {self._drawn: (state.checksum, state.own)}
        self._forgotten = self._low, self._low  # the first seq, and the first item, that are kept
        self._keeps_state, self._workers = keeps_state, number
        self._points = {**dict.fromkeys(range(lanes), PartPoint()), **points}
        self._turns = [self._points[lane].batches for lane in range(lanes)]  # that each worker has had before
        self._known = dict(self._points)
        self._notes: dict[int, tuple[int, PartPoint]] = {}

    def task(self, seq: int) -> Task | Exception | Nothing | None:
        """Batch ``seq`` as a task; the error to raise in its place; `NOTHING`: left out; None after the last one."""
        try:
            planned = self.batch(seq)
        except Exception as raised:
            return sampler_error(raised, f" at batch {seq}")
        if planned is None:
            return None
        if planned.left_out:
            return NOTHING
        indices = planned.item if self._batched else (planned.item,)
        if type(indices) is not tuple and not isinstance(indices, RowIndices):
            indices = list(indices)  # a sampler may fill its own list again while this one waits
        # In any order, and if the number of workers changes, a batch goes to the worker that has the least to do.
        lane: int | None = seq % self._lanes if self.takes_turns and not self.any_order else None
        part: PartBatch | None = None
        if self._keeps_state:  # the state that the worker's dataset must have before this batch
            lane = planned.lane
            part = PartBatch(self._workers, self._workers, lane, planned.turn, self._known[lane])
        return Task(self.run, seq, self.number, seq, (indices,), False, False, lane, part)

    def batch(self, seq: int) -> _Planned | None:
        """Batch ``seq``; None behind the last one. The sampler is read up to there."""
        if self._is_open:  # a generator that was interrupted has ended: start the sampler again, where it was
            checksum, own = self._marks[self._drawn]
            self._start = self._start.again(self._drawn, checksum, own)
            self._start.settle()
            self._is_started = False
        if self._drawn == self.first or self._is_open:
            self.begin()
        items = self._items
        while items is not None and self._coming <= seq and not self._ended:
            number, coming, self._is_open = self._drawn, self._coming, True
            try:
                item = next(items.rest)
                items.checksum = zlib.crc32(bytes_of_one(item), items.checksum)
            except StopIteration:
                self._ended, self._is_open = True, False
                break
            except Exception as error:
                self._ended, self._is_open = True, is_from_outside(error)
                raise
            self._marks[number + 1] = items.checksum, None if items.stateful is None else items.own_state()
            # In one statement: an interruption before it has the sampler started again in front of this item.
            if number in self._ahead:
                self._drawn, self._is_open = number + 1, False
            else:
                lane = coming % self._lanes
                left_out = any(number in one for one in self._left_out) if self._left_out else False
                turn = self._turns[lane]
                self._planned[coming] = _Planned(number, item, lane, turn, left_out)
                following = turn + (not left_out), coming + 1, number + 1, False
                self._turns[lane], self._coming, self._drawn, self._is_open = following
            # Some samplers draw at their end. A loop that never asks for a batch after the last one, and a resumed loop
            # that has to, go on alike. Trainers name the epochs of others, and read them in between.
            if self._drawn == self._length and items.stateful is None and not keep_epochs(self._start.sampler):
                try:
                    self._ended = items.is_over()
                except Exception as error:  # it is the one of the next batch
                    if is_from_outside(error):
                        raise
                    items.rest = raising(error)
        return self._planned.get(seq)

    def ends_after(self, delivered: int) -> bool:
        """True if no batch is left after ``delivered`` ones. A sampler with a state may yield more than its length."""
        is_at_end = self._items is not None and self._items.stateful is None and self._drawn == self._length
        return (self._ended or is_at_end) and delivered == self._coming

    def begin(self) -> None:
        """Start the sampler, unless it has started: it draws now what it draws for its first item."""
        if self._drawn == self.first and not self._ended:
            self._start.settle()
            self.number = self._start.epoch(self.number)
            self._left_out = self._skips(self.number)
        if not self._is_started:
            self._is_started = self._ended = self._is_open = True  # unless it starts
            mark, at = None, self._start.state
            if self._start.resumes:
                mark = Checkpoint(self.number, at.yielded, at.checksum, at.rank, bool(at.over), at.own)
            try:
                self._items = ForeignItems(self._start.sampler, self._start.started, mark)
            except Exception as error:
                self._is_open = is_from_outside(error)
                raise
            self._length = known_length(self._start.sampler, self.number)
            self._ended = self._is_open = False

    def begun(self, delivered: int) -> BegunEpoch | None:
        """What is known of the epoch after ``delivered`` batches, to look up its items; None: it has not begun."""
        if not self._is_started and not self._start.resumes:
            return None
        drawn = {planned.number: planned.item for planned in self._planned.values()}
        return BegunEpoch(self.number, self.position(delivered).mark, drawn)

    def came(self, seq: int, result: Result) -> Result:
        """Note the state of the worker's dataset that came with a batch."""
        if result.point is not None:
            lane = self._planned[seq].lane
            self._notes[seq] = lane, result.point
            self._known[lane] = result.point
        return result

    def primed(self, state: Any) -> None:
        """Note the state of the dataset in this process, before the first batch."""
        self._points[0] = self._known[0] = PartPoint(state=state)

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        """What is kept of batches in flight, by their numbers."""
        return self._planned, self._notes

    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again."""
        (seq, number), low = self._forgotten, self._low
        over = range(seq, delivered - 1)
        for one in over:
            if one in self._planned and self._planned[one].number >= low:
                self._ahead.add(self._planned[one].number)
            if one in self._notes:
                lane, self._points[lane] = self._notes[one]
        while low in self._ahead:
            low += 1
        self._low = low
        for one in over:  # interrupted before the end, all of it is done again
            self._planned.pop(one, None)
            self._notes.pop(one, None)
        for one in range(number, low):
            self._marks.pop(one, None)
            self._ahead.discard(one)
        self._forgotten = max(seq, delivered - 1), low

    # -- positions ------------------------------------------------------------------------------------------

    def length(self) -> int:
        return len(self._start.sampler)

    def discarded(self) -> tuple[int, str]:
        one = self._start.sampler
        # Only torch's own class: a subclass may choose its batches itself, or lack these attributes.
        cuts = type(one) is BatchSampler and one.drop_last and self._ended
        return ((known_length(one.sampler, 0) or 0) % one.batch_size if cuts else 0), ""

    def points_after(self, delivered: int) -> dict[int, PartPoint]:
        """The position of each worker after ``delivered`` batches, with the state of its dataset."""
        points = dict(self._points)
        for seq in sorted(self._notes):
            if seq < delivered:
                lane, points[lane] = self._notes[seq]
        return points

    def position(self, delivered: int, finished: bool = False) -> Position:
        """The position after ``delivered`` batches, with the state of each worker's dataset.

        If the sampler has drawn nothing yet, it draws now, because a position says what comes.

        Args:
            delivered: how many batches were received.
            finished: the user has seen the end of the epoch.
        """
        points, start = self.points_after(delivered), self._start
        if start.resumes and not self._is_started:
            return Position(self.number, self.first, start.state, {}, points)
        self.begin()
        over = {planned.number for seq, planned in self._planned.items() if seq < delivered}
        ahead = {number for number in self._ahead | over if number >= self._low}
        low = self._low
        while low in ahead:
            ahead.remove(low)
            low += 1
        checksum, own = self._marks[low]
        state = SamplerState(low, checksum, rank_of(start.sampler), own=own, ahead=sorted(ahead) or None)
        state.shuffle, state.rng, state.epochs = start.state.shuffle, start.state.rng, start.state.epochs
        state.keyed = start.state.keyed
        if finished:
            state.own = None if self._items is None else self._items.own_state()
            start.set_end(state)
        elif own is not None and start.stateful is not None and low == self._drawn > 0:
            # A short batch has taken the sampler over its end: then it says what comes in the next epoch.
            state.over = self.batch(delivered) is None
        if self._keeps_state:
            state.datasets = [point.state for point in points.values()]
        return Position(self.number, low, state, {}, points)

    def state(self, position: Position) -> dict[str, Any]:
        """What a state says of the sampler, and of the workers' datasets."""
        return written(position.mark)
