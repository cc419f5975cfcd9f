"""One epoch of iterable data: selects the part that gives the next batch, and tracks the progress of each part.

    StreamEpoch.task(seq) -> Task with a PartBatch    batch b of part p; its samples are known only when it is read
    StreamEpoch.record_result(seq, result) -> Result  record the progress that the reader reports, or the part's end
    StreamEpoch.position(delivered)                   the position between two batches

The next batch comes from the part with the fewest batches so far, the first of several. So parts take turns and ended
ones are passed over, independently of the number and speed of workers.

Batches are planned before the end of a part is known. Those planned behind it come back empty, and the user does not
see them: ``seq`` has gaps, and positions count batches instead. If a result has no progress (a worker died over it, or
``__iter__`` raised), the part is abandoned: it ends there, and all batches planned behind it are made empty, so that
the result does not depend on how many were in flight.
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Mapping
from typing import Any

from sharded_loader.base.described import an
from sharded_loader.base.notices import Notices
from sharded_loader.engine.messages import NOTHING, PartBatch, PartIndices, PartPoint, Result, Stream, Task
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.streams.state import StreamSignature, dump

# Unique in the process, because a pool may outlive an order.
_openings = itertools.count()


class SharedParts:
    """State that the epochs of one order share.

    Attributes:
        progress: farthest progress of each part.
        live: openings of the epochs with a live iterator. Workers close the parts of older ones.
    """

    def __init__(self, dataset: object) -> None:
        self.dataset = dataset
        self.progress: dict[int, PartPoint] = {}
        self.live: dict[weakref.ref[StreamEpoch], int] = {}

    def register(self, epoch: StreamEpoch) -> None:
        """Keep the parts of an epoch open as long as the epoch lives."""
        # A built-in as callback: one in Python would swallow a Ctrl-C that interrupts it.
        self.live[weakref.ref(epoch, self.live.pop)] = epoch.opening


Dropped = tuple[int, dict[int, int], dict[int, PartPoint]]
"""Number of batches dropped, number of each part, and the progress of each part behind them."""


class StreamEpoch(Epoch):
    """One epoch of iterable data for one rank, from position ``begin`` on.

    If a part ends in mid-batch, its reader splits the batch into shards again.

    Attributes:
        opening: id of the reading, for readers that hold parts open.
    """

    takes_turns = True

    def __init__(self, shared: SharedParts, signature: StreamSignature, begin: Position, resumed: bool) -> None:
        self.number, self.first, self.resumed = begin.epoch, begin.done, resumed
        self.in_mid_epoch = resumed and bool(begin.done)
        endless, parts = signature.stream.endless, signature.parts_of_rank()
        self.opening = 0 if endless else next(_openings)
        self._shared, self._signature = shared, signature
        self.second_pass = self.first + len(parts)
        counts = {part: begin.counts.get(part, 0) for part in parts}
        beginning = PartPoint(passes=0 if endless else begin.epoch)
        points = {part: begin.points.get(part, beginning) for part in parts}
        self._dropped: Dropped = begin.done, counts, points  # replaced in one assignment
        self._progress = dict(points)  # farthest progress of each part
        queue = [(counts[part], part) for part in parts if not points[part].ended]
        heapq.heapify(queue)
        # Next index to plan, and a heap of (batches planned, part). Replaced in one assignment.
        self._plan: tuple[int, list[tuple[int, int]]] = self.first, queue
        # By index: the batch planned, and once read, the progress behind it.
        self._planned: dict[int, tuple[PartBatch, PartPoint | None]] = {}
        self.abandoned: dict[int, int] = {}
        # At the ends of parts: samples that filled no batch, by part; indices planned behind abandoned parts.
        self._discarded, self._empty = dict[int, int](), set[int]()

    @property
    def stream(self) -> Stream:
        return self._signature.stream

    @property
    def _last(self) -> int | None:
        """Upper bound of the batch indices (exclusive), or None if unknown."""
        steps = self._signature.steps_per_epoch
        return None if steps is None else steps + len(self._empty)

    def task(self, seq: int) -> Task | None:
        """Return batch ``seq`` as a task; None after the last one."""
        part, signature = self.batch(seq), self._signature
        if part is None:
            return None
        size, lane = signature.batch_size, part.number // signature.num_replicas
        indices = PartIndices(part.number, range(part.batch * size, (part.batch + 1) * size))
        position = part.batch * signature.streams + part.number
        return Task(self.run, seq, self.number, position, (indices,), False, lane=lane, part=part)

    def batch(self, seq: int) -> PartBatch | None:
        """Return the part's batch at index ``seq``, planning up to it; None after the last one."""
        while (next_seq := self._plan[0]) <= seq:
            progress, queue = self._progress, self._plan[1].copy()
            while queue and progress[queue[0][1]].ended:
                heapq.heappop(queue)
            if not queue or (self._last is not None and next_seq >= self._last):
                return None
            if self.any_order:  # avoid slow parts: take the part with the fewest batches in flight
                queue = [item for item in queue if not progress[item[1]].ended]
                count, part = min(queue, key=lambda item: (item[0] - progress[item[1]].batches, item))
                queue[queue.index((count, part))] = count + 1, part
                heapq.heapify(queue)
            else:
                count, part = queue[0]
                heapq.heapreplace(queue, (count + 1, part))
            oldest = min(self._shared.live.values(), default=0)
            self._planned[next_seq] = PartBatch(self.opening, oldest, part, count, progress[part]), None
            self._plan = next_seq + 1, queue
        return self._planned[seq][0] if seq in self._planned else None

    def record_result(self, seq: int, result: Result) -> Result:
        """Record the progress of the batch's part, or its end."""
        if seq not in self._planned:
            return result
        planned, point = self._planned[seq][0], result.point
        part, progress = planned.number, self._progress[planned.number]
        if planned.batch > self.abandoned.get(part, planned.batch):
            result, point = Result(result.run, seq, NOTHING), progress
            self._empty.add(seq)
        elif point is None:
            # The part's progress is lost, so nothing behind this batch can be read. A later batch that has already
            # returned, with an error of its own, is emptied when it is delivered (`Run.empty_if_abandoned`).
            self.abandoned[part] = planned.batch
            point = progress._replace(batches=planned.batch + 1, ended=True, state=None)
        self._planned[seq] = planned, point
        if point.ended and not progress.ended and result.batch is NOTHING and self.stream.drops_last:
            self._discarded[part] = point.samples - progress.samples
        if point.ended or point.batches > progress.batches:
            self._progress[part] = point
        self._shared.progress[part] = point
        return result

    def discarded(self) -> tuple[int, str]:
        counts = self._discarded
        lost = sum(count == self._progress[part].samples for part, count in counts.items() if count)
        return sum(counts.values()), f"{lost} of its {self._signature.streams} parts" if lost else ""

    @property
    def tables(self) -> tuple[dict[int, Any], ...]:
        return (self._planned,)

    def forget(self, delivered: int) -> None:
        """Drop batches before the last delivered one, which itself may still be taken back."""
        # Stops at the first later one, because many are in flight. Batches that were moved may be dropped later.
        delivered_seqs = list(itertools.takewhile((delivered - 1).__gt__, self._planned))
        self._dropped = self._advanced({seq: self._planned[seq] for seq in delivered_seqs})
        for seq in delivered_seqs:  # last, so that an interruption before it can be repeated
            del self._planned[seq]

    def _advanced(self, planned: Mapping[int, tuple[PartBatch, PartPoint | None]]) -> Dropped:
        """Return the progress of dropped batches, advanced by these; never back: a thread may call `forget`."""
        done, counts, points = self._dropped
        counts, points = counts.copy(), points.copy()
        for seq in sorted(planned):
            batch, point = planned[seq]
            if point is not None and point.batches >= counts[batch.number]:
                done += point.batches - counts[batch.number]
                counts[batch.number], points[batch.number] = point.batches, point
        return done, counts, points

    def check_parts(self, delivered: int, at_end: bool, notices: Notices) -> None:
        parts = self.stream.parts
        if parts == 1 or any(point.asked for point in self._progress.values()):
            notices.suppress("parts")
            return
        read = [point for point in self.position(delivered).points.values() if point.batches or point.ended]
        if at_end:
            differ = self.resumed or len({point.samples for point in read if point.ended}) > 1
            repeats = not differ and bool(read) and all(point.samples or self.stream.endless for point in read)
        else:  # the dataset may still ask, but two equal beginnings prove a repetition
            beginnings = [(point.samples, point.checksum) for point in read if point.checksum]
            repeats = len(set(beginnings)) < len(beginnings)
        if repeats:
            but = ", unless its samples are random" if at_end else ""
            notices.warn(
                "parts",
                f"the iterable data is read in {parts} parts, but its __iter__ has not asked which part to read. So "
                f"each part gives all samples, and you get each sample {parts} times{but}. Call get_worker_info() in "
                f"__iter__, and yield only part .id of .num_workers; or give streams=1",
            )

    # -- positions ------------------------------------------------------------------------------------------

    def position(self, delivered: int) -> Position:
        """Return the position after the batches before ``delivered`` were received."""
        planned = self._planned.copy()
        done, counts, points = self._advanced({seq: batch for seq, batch in planned.items() if seq < delivered})
        if self._last is None and not any(counts.values()):
            return Position(self.number)
        return Position(self.number, done, None, counts, points)

    def primed(self, part: int, point: PartPoint) -> None:
        """Set the progress of a part that has been opened."""
        self._dropped[2][part] = self._progress[part] = point

    def at_beginning(self) -> Position:
        """Return the position that the epoch was made from, with the progress of each part."""
        return Position(self.number, self.first, None, *self._advanced({})[1:])

    def batches(self, delivered: int) -> int:
        return self.position(delivered).done

    def state(self, position: Position) -> dict[str, Any]:
        return dump(position, self._signature)

    def is_over(self) -> bool:
        """Return True if no batch is known to be left at the position that the epoch was made from."""
        if self._last is not None:
            return self.first >= self._last
        return self.resumed and all(point.ended for point in self._dropped[2].values())

    def following(self) -> Position:
        return self.after(Position(self.number + 1))

    def after(self, begin: Position) -> Position:
        dropped = self._advanced(self._planned.copy())
        return begin if self._last is None else Position(begin.epoch, 0, None, *dropped[1:])

    def counts_at_end(self) -> Mapping[int, int]:
        """Return the number of batches of each part at the end of the epoch, even if its loop was left early."""
        counts = {part: point.batches for part, point in self._progress.items()}
        queue = [(count, part) for count, part in self._plan[1] if not self._progress[part].ended]
        counts.update((part, count) for count, part in queue)
        heapq.heapify(queue)
        for _ in range(0 if self._last is None or not queue else self._last - self._plan[0]):
            count, part = queue[0]
            heapq.heapreplace(queue, (count + 1, part))
            counts[part] = count + 1
        return counts

    def length(self) -> int:
        return length_of_epoch(self._shared.dataset, self._signature)


def length_of_epoch(dataset: Any, own: StreamSignature) -> int:
    """Return the number of batches of a rank's epoch: ``steps_per_epoch``, or from the length of a dataset of one part.

    Raises:
        TypeError: the dataset has no length, or divides its samples among several parts.
    """
    if own.steps_per_epoch is not None:
        return own.steps_per_epoch
    kind = an(type(dataset).__name__)
    if own.streams > 1:
        why = f"{kind} decides how many samples each of its {own.streams} parts has, which is only known at their end"
        raise TypeError(f"the loader has no length: {why}. Give steps_per_epoch=, or streams=1")
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError):
        text = f"the loader has no length: the number of batches of {kind} is only known at its end"
        raise TypeError(f"{text}. Give steps_per_epoch=, or the dataset a __len__") from None
    return length // own.batch_size if own.last_batch == "discard" else -(-length // own.batch_size)
