"""One epoch over iterable data: which part gives the next batch, as far as anybody can know it.

    StreamEpoch.task(seq) -> Task with a PartBatch    batch b of part p: which samples it has is known when it is read
    StreamEpoch.came(seq, result) -> Result           how far the part has got: only its reader finds out
    StreamEpoch.position(delivered)                   the position between two batches

The next batch comes from the part that has given the fewest batches, of several the first. So parts take turns, and
parts that have ended are passed over. That order depends on the parts alone, not on workers or on how fast they are.

Batches are planned before it is known where a part ends. What is planned behind the end of its part comes back empty,
and the user does not see it. So numbers of batches in flight (``seq``) have gaps, and positions count batches instead.

An epoch owns what was planned, and how far each part has got. What can go wrong: a result that does not say how far
its part has got (a worker died over it, or the dataset's ``__iter__`` raised). The part ends there. What was planned
behind it comes back empty, whether anybody has tried to read it or not: how much was in flight must not show.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

from sharded_loader.base.described import an
from sharded_loader.engine.messages import NOTHING, PartBatch, PartIndices, PartPoint, Result, Stream, Task
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.streams.state import StreamSignature, dump

# No two epochs of a process have the same number: a pool that outlives an order tells their parts apart.
_openings = itertools.count()


class SharedParts:
    """What the epochs of one order share.

    Attributes:
        dataset: the data.
        reached: of each part, the farthest point that was read.
        begun: the openings of the epochs that an iterator goes on with. Workers close the parts of older ones.
    """

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset
        self.reached: dict[int, PartPoint] = {}
        self.begun: dict[weakref.ref[StreamEpoch], int] = {}

    def begin(self, epoch: StreamEpoch) -> None:
        """An epoch begins: its parts stay open as long as the epoch lives."""
        # A callback in Python would swallow a Ctrl-C that strikes in it.
        self.begun[weakref.ref(epoch, self.begun.pop)] = epoch.opening


Passed = tuple[int, dict[int, int], dict[int, PartPoint]]
"""How many batches were done at some time, how many of each part, and the point of each part there."""


class Ends(NamedTuple):
    """What the parts of an epoch have lost at their ends.

    Attributes:
        discarded: of each part, the samples that filled no batch.
        empty: the batches that were planned behind the end of a part that was given up.
    """

    discarded: dict[int, int]
    empty: set[int]


class StreamEpoch(Epoch):
    """One epoch of iterable data for one rank, from a position on.

    If a part ends in the middle of a batch, its reader splits the batch again.

    Args:
        shared: what the epochs of the loader share.
        signature: how the data is cut into batches, and what positions are positions in.
        begin: where it begins.
        resumed: that is a position that was saved.

    Attributes:
        opening: identifies the epoch to those who hold parts open.
    """

    takes_turns = True

    def __init__(self, shared: SharedParts, signature: StreamSignature, begin: Position, resumed: bool) -> None:
        self.number, self.first, self.resumed = begin.epoch, begin.done, resumed
        self.in_mid_epoch = resumed and bool(begin.done)
        endless, parts = signature.stream.endless, signature.parts_of_rank()
        self.opening = 0 if endless else next(_openings)
        self._shared, self._signature = shared, signature
        self.second_turn = self.first + len(parts)
        counts = {part: begin.counts.get(part, 0) for part in parts}
        beginning = PartPoint(passes=0 if endless else begin.epoch)
        points = {part: begin.points.get(part, beginning) for part in parts}
        self._passed: Passed = begin.done, counts, points  # by what is forgotten: changed in one assignment
        self._known = dict(points)  # of each part the farthest point that was reached
        turns = [(counts[part], part) for part in parts if not points[part].ended]
        heapq.heapify(turns)
        # The number that is planned next, and how many batches are planned of each part: changed in one assignment.
        self._line: tuple[int, list[tuple[int, int]]] = self.first, turns
        # By number: what was planned, and the point behind it once it has come.
        self._planned: dict[int, tuple[PartBatch, PartPoint | None]] = {}
        self.given_up: dict[int, int] = {}
        self._ends = Ends({}, set())

    @property
    def stream(self) -> Stream:
        """How the data is cut into batches."""
        return self._signature.stream

    @property
    def _last(self) -> int | None:
        """No batch has this number, or a greater one; None: that is not known."""
        steps = self._signature.steps_per_epoch
        return None if steps is None else steps + len(self._ends.empty)

    def task(self, seq: int) -> Task | None:
        """Batch ``seq`` as a task; None after the last one."""
        part, signature = self.batch(seq), self._signature
        if part is None:
            return None
        size, lane = signature.batch_size, part.number // signature.num_replicas
        indices = PartIndices(part.number, range(part.batch * size, (part.batch + 1) * size))
        position = part.batch * signature.streams + part.number
        return Task(self.run, seq, self.number, position, (indices,), False, lane=lane, part=part)

    def batch(self, seq: int) -> PartBatch | None:
        """The batch of this number; None behind the last one.

        Args:
            seq: at least `first`, and not forgotten.
        """
        while (coming := self._line[0]) <= seq:
            known, turns = self._known, self._line[1].copy()
            while turns and known[turns[0][1]].ended:
                heapq.heappop(turns)
            if not turns or (self._last is not None and coming >= self._last):
                return None
            if self.any_order:  # not to wait for a slow part: the one with the fewest batches in flight
                turns = [turn for turn in turns if not known[turn[1]].ended]
                count, part = min(turns, key=lambda turn: (turn[0] - known[turn[1]].batches, turn))
                turns[turns.index((count, part))] = count + 1, part
                heapq.heapify(turns)
            else:
                count, part = turns[0]
                heapq.heapreplace(turns, (count + 1, part))
            oldest = min(self._shared.begun.values(), default=0)
            self._planned[coming] = PartBatch(self.opening, oldest, part, count, known[part]), None
            self._line = coming + 1, turns
        return self._planned[seq][0] if seq in self._planned else None

    def came(self, seq: int, result: Result) -> Result:
        """A batch has come back: its part has got further, or has ended."""
        if seq not in self._planned:
            return result
        planned, point = self._planned[seq][0], result.point
        part, known = planned.number, self._known[planned.number]
        if planned.batch > self.given_up.get(part, planned.batch):
            result, point = Result(result.run, seq, NOTHING), known
            self._ends.empty.add(seq)
        elif point is None:
            # It is not known how far the part was read. Behind it nothing can be read. If a later batch of the part has
            # come first, with an error of its own, that is left out when its turn comes (`Run.leave_out`).
            self.given_up[part] = planned.batch
            point = known._replace(batches=planned.batch + 1, ended=True, state=None)
        self._planned[seq] = planned, point
        if point.ended and not known.ended and result.batch is NOTHING and self.stream.drops_last:
            self._ends.discarded[part] = point.samples - known.samples
        if point.ended or point.batches > known.batches:
            self._known[part] = point
        self._shared.reached[part] = point
        return result

    def discarded(self) -> tuple[int, str]:
        found = self._ends.discarded
        lost = sum(count == self._known[part].samples for part, count in found.items() if count)
        return sum(found.values()), f"{lost} of its {self._signature.streams} parts" if lost else ""

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        """What is kept of batches in flight, by their numbers."""
        return (self._planned,)

    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again (that batch itself may be taken back)."""
        # From the oldest one on: many are in flight. If batches have changed places, some are forgotten later.
        over = list(itertools.takewhile((delivered - 1).__gt__, self._planned))
        self._passed = self._advanced({seq: self._planned[seq] for seq in over})
        for seq in over:  # at the end: interrupted before, all of it is done again
            del self._planned[seq]

    def _advanced(self, planned: Mapping[int, tuple[PartBatch, PartPoint | None]]) -> Passed:
        """What was passed, after these batches too. Another thread may `forget` meanwhile: a part never goes back."""
        done, counts, points = self._passed
        counts, points = counts.copy(), points.copy()
        for seq in sorted(planned):
            batch, point = planned[seq]
            if point is not None and point.batches >= counts[batch.number]:
                done += point.batches - counts[batch.number]
                counts[batch.number], points[batch.number] = point.batches, point
        return done, counts, points

    def repeats(self, delivered: int, at_end: bool) -> bool | None:
        """Whether the parts give the same samples, because the dataset has not asked which part it is to read.

        Args:
            delivered: how many batches were received.
            at_end: the epoch is over.

        Returns:
            None if it is not known.
        """
        if self.stream.parts == 1 or any(point.asked for point in self._known.values()):
            return False
        read = [point for point in self.position(delivered).points.values() if point.batches or point.ended]
        if not at_end:  # the dataset may still ask, but not if two parts begin alike
            begins = [(point.samples, point.checksum) for point in read if point.checksum]
            return True if len(set(begins)) < len(begins) else None
        if self.resumed or len({point.samples for point in read if point.ended}) > 1:
            return None
        return True if read and all(point.samples or self.stream.endless for point in read) else None

    # -- positions ------------------------------------------------------------------------------------------

    def position(self, delivered: int) -> Position:
        """The position after the batches before number ``delivered`` were received."""
        planned = self._planned.copy()
        done, counts, points = self._advanced({seq: one for seq, one in planned.items() if seq < delivered})
        if self._last is None and not any(counts.values()):
            return Position(self.number)
        return Position(self.number, done, None, counts, points)

    def primed(self, part: int, point: PartPoint) -> None:
        """A part has been opened, and is at this point."""
        self._passed[2][part] = self._known[part] = point

    def at_beginning(self) -> Position:
        """The position that the reading began at, with a point for each part."""
        return Position(self.number, self.first, None, *self._advanced({})[1:])

    def batches(self, delivered: int) -> int:
        """How many batches of the epoch were received, if ``delivered`` numbers are done."""
        return self.position(delivered).done

    def state(self, position: Position) -> dict[str, Any]:
        return dump(position, self._signature)

    def is_over(self) -> bool:
        """Whether no batch is left at the position, as far as that can be known now."""
        if self._last is not None:
            return self.first >= self._last
        return self.resumed and all(point.ended for point in self._passed[2].values())

    def following(self) -> Position:
        """Where the next epoch begins, if this one `is_over`."""
        return self.after(Position(self.number + 1))

    def after(self, begin: Position) -> Position:
        """The beginning of the next epoch, as it is after this one."""
        passed = self._advanced(self._planned.copy())
        return begin if self._last is None else Position(begin.epoch, 0, None, *passed[1:])

    def counts_behind(self) -> Mapping[int, int]:
        """How many batches each part has given when the epoch is over, also if its loop was left before."""
        counts = {part: point.batches for part, point in self._known.items()}
        turns = [(count, part) for count, part in self._line[1] if not self._known[part].ended]
        counts.update((part, count) for count, part in turns)
        heapq.heapify(turns)
        for _ in range(0 if self._last is None or not turns else self._last - self._line[0]):
            count, part = turns[0]
            heapq.heapreplace(turns, (count + 1, part))
            counts[part] = count + 1
        return counts

    def length(self) -> int:
        """The number of batches in the epoch; see `length_of_epoch`."""
        return length_of_epoch(self._shared.dataset, self._signature)


def length_of_epoch(dataset: Any, kept: StreamSignature) -> int:
    """The number of batches in an epoch of a rank: ``steps_per_epoch``, or by the dataset's length if it is one part.

    Raises:
        TypeError: it is not known: the dataset has no length, or divides its samples among several parts.
    """
    if kept.steps_per_epoch is not None:
        return kept.steps_per_epoch
    kind = an(type(dataset).__name__)
    if kept.streams > 1:
        why = f"{kind} decides how many samples each of its {kept.streams} parts has, which is only known at their end"
        raise TypeError(f"the loader has no length: {why}. Give steps_per_epoch=, or streams=1")
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        raise TypeError(
            f"the loader has no length: the number of batches of {kind} is only known at its end. Give "
            f"steps_per_epoch=, or the dataset a __len__"
        ) from None
    return length // kept.batch_size if kept.last_batch == "discard" else -(-length // kept.batch_size)
