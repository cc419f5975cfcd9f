"""From a sampler's batches of one epoch to numbered tasks: checked, and split into shards.

    batches (lists of indices, or lists of lists) -> EpochPlan.task(seq) -> Task | the error for that place
    Task, when it is dispatched -> Plan.split() -> Task with shards

Whatever is wrong with a batch (empty, an index out of range, more shards than devices) is an error at that
batch's place in the order, not at the moment when the sampler is asked ahead of time; the batches after it
are not affected.

The plan has no position: after an interruption the pipeline asks again for the batches that were not delivered. What
the pipeline keeps of an iterator, its batches in flight too, is a `Run`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharded_loader.base.errors import add_note, as_batch_error
from sharded_loader.engine.messages import NOTHING, Result, Task
from sharded_loader.sampling.reading import EpochReading
from sharded_loader.sampling.shards import is_sharded, split_batch
from sharded_loader.sampling.tables import plain_indices


@dataclass
class Split:
    """How batches become shards. Read for each batch, so a change holds from the next one.

    Attributes:
        num_shards: into how many shards flat batches are split; None: not at all.
        max_shards: how many a batch may have, the number of devices; None: any number.
        weights: shares of the shards; None: equal ones.
    """

    num_shards: int | None = None
    max_shards: int | None = None
    weights: list[float] | None = None


class Plan:
    """The tasks of one iterator, and what is the same for every kind of data.

    Args:
        run: which iterator asks.
        reading: gives the batches.
        split: how batches become shards.

    Attributes:
        splits: flat batches are split into shards.
        takes_turns: batch after batch goes to one worker after the other, by the tasks' lanes.
    """

    takes_turns = False
    _in_epoch = ""  # for errors

    def __init__(self, run: int, reading: Any, split: Split) -> None:
        self._run, self._reading, self._split = run, reading, split
        self.splits = split.num_shards is not None

    def _next(self, seq: int) -> Any:
        """Batch ``seq`` of the reading; the error to raise in its place; None after the last one."""
        try:
            return self._reading.batch(seq)
        except Exception as raised:
            error = as_batch_error(raised, "by the sampler")
            add_note(error, f"sharded_loader: raised by the sampler{self._in_epoch} at batch {seq}")
            try:
                return error
            finally:
                del error  # otherwise error -> traceback -> this frame -> error, and the loader waits for the collector

    def split(self, task: Task) -> Task:
        """A flat batch as shards, by the weights of this moment; called when it is dispatched, if the plan `splits`."""
        if task.sharded or self._split.num_shards is None:
            return task
        return task._replace(shards=tuple(self._shards(task.shards[0], self._split.num_shards)), sharded=True)

    def _shards(self, indices: Any, count: int) -> list[Any]:
        return split_batch(indices, count, self._split.weights)

    def move(self, seq: int, to: int) -> None:
        """A batch comes earlier than planned; those that it overtakes keep their order."""
        for table in self._reading.tables:
            moved(table, seq, to)

    def is_given_up(self, task: Task) -> bool:
        """Whether nobody has to try to read a task."""
        return False


class EpochPlan(Plan):
    """The batches of one epoch, one after the other.

    Args:
        run, reading, split: see `Plan`.
        epoch: number of the epoch.
        length: samples in the dataset, to check indices against; None: not checked.
        may_shard: whether a batch may be a list of shards (a given ``batch_sampler``); indices of a
            ``sampler`` are indices, tuples among them too.
    """

    def __init__(
        self,
        run: int,
        epoch: int,
        reading: EpochReading,
        length: int | None,
        split: Split,
        *,
        may_shard: bool,
    ) -> None:
        super().__init__(run, reading, split)
        self._epoch, self._in_epoch = epoch, f", in epoch {epoch}"
        self._length = length
        self._may_shard = may_shard
        self._within = np.empty(0)  # the last array that was checked and has no index out of range

    def task(self, seq: int) -> Task | Exception | None:
        """Batch ``seq`` as a task; the error to raise in its place; None after the last one."""
        found = self._reading.ready.get(seq) or self._next(seq)
        if found is None or isinstance(found, Exception):
            return found
        try:
            return self._make_task(seq, *found)
        except Exception as raised:
            return as_batch_error(raised, "by a batch of the sampler's")

    def _make_task(self, seq: int, batch: Any, first: int) -> Task:
        try:
            size = -1 if isinstance(batch, (str, bytes)) else len(batch)
        except TypeError:
            size = -1
        if size < 0:
            raise TypeError(
                f"{self._where(seq)}: the batch sampler yielded {batch!r} ({type(batch).__name__}); "
                f"it must yield lists of indices, or lists of such lists (shards)"
            )
        if size == 0:
            raise ValueError(f"{self._where(seq)} is empty: the batch sampler must yield at least one index")
        if type(batch) is np.ndarray and not self._may_shard and batch.dtype == np.int64 and batch.ndim == 1:
            length = self._length
            if length is not None and not (self._is_within(batch.base, length) or self._is_within(batch, length)):
                self._check_range(batch.tolist(), seq)
            return Task(self._run, seq, self._epoch, first, (batch,), False)
        sharded = self._may_shard and is_sharded(batch)
        if sharded:
            shards = [plain_indices(shard) for shard in batch]
            for number, shard in enumerate(shards):
                if not shard:
                    where = f"{self._where(seq)}, shard {number}"
                    raise ValueError(
                        f"{where} is empty: a shard has at least one index, and shard i goes to device i. At the end "
                        f"of a batch leave empty shards out. Give an empty shard in the middle an index of another one"
                    )
                self._check_range(shard, seq, number)
        else:
            shards = [plain_indices(batch)]
            self._check_range(shards[0], seq)
        limit = self._split.max_shards
        if sharded and limit is not None and len(shards) > limit:
            raise ValueError(
                f"{self._where(seq)} has {len(shards)} shards, but there are only {limit} devices: "
                f"let the batch sampler yield at most {limit} shards, or name more devices"
            )
        return Task(self._run, seq, self._epoch, first, tuple(shards), sharded)

    def _is_within(self, indices: Any, length: int) -> bool:
        """Whether these are indices of the dataset. Batches that are views of one block are checked together.

        That takes 3 us for a block, and 0.2 for each batch, instead of 2.5.
        """
        if indices is self._within:
            return True
        if type(indices) is not np.ndarray or indices.dtype != np.int64:
            return False
        # A negative index is a large unsigned one; a negative length is none.
        if int(np.maximum.reduce(indices.view(np.uint64), axis=None)) >= length:
            return False
        self._within = indices
        return True

    def _where(self, seq: int) -> str:
        return f"epoch {self._epoch}, batch {seq}"

    def _check_range(self, indices: Sequence[Any], seq: int, shard: int | None = None) -> None:
        length = self._length
        if length is None:
            return
        try:
            if max(indices) < length and min(indices) >= -length:
                return
        except TypeError:
            return  # keys that are no numbers: the dataset knows them
        bad = next(index for index in indices if not -length <= index < length)
        where = self._where(seq) + ("" if shard is None else f", shard {shard}")
        raise IndexError(
            f"{where}: the sampler yielded index {bad}, but the dataset has {length} samples: "
            f"give the sampler this dataset's length, or call loader.refresh() if the dataset has changed its length"
        )


def moved(table: dict[int, Any], seq: int, to: int) -> None:
    """Give what stands under ``seq`` the number ``to``, and what stands from there on the next numbers.

    Example:
        >>> table = {4: "a", 5: "b", 7: "d"}
        >>> moved(table, 7, 4)
        >>> table
        {4: 'd', 5: 'a', 6: 'b'}
    """
    numbers = range(to, seq + 1)
    found = [table.pop(number, None) for number in (seq, *numbers[:-1])]
    table.update((number, one) for number, one in zip(numbers, found, strict=True) if one is not None)


@dataclass(slots=True)
class Entry:
    """A batch in flight: planned, perhaps finished, perhaps on its way to the devices (`begun`).

    An entry owns its batch until the batch is handed out.
    """

    seq: int
    task: Task | None
    result: Result | None = None
    begun: Any = None


@dataclass(eq=False)
class Run:
    """One iterator's way through one epoch.

    Attributes:
        number: identifies the run in tasks and results.
        epoch: number of the epoch.
        plan: gives the run's tasks: an `EpochPlan`, or one that has its methods.
        reading: the epoch's batches, and the positions between them: an `EpochReading`, or one that has its methods.
        delivered: how many batches of the epoch the user has received, errors in a batch's place included. This is the
            only truth: everything below can be thrown away and built again from it.
        planned: the number of the batch behind the window.
        window: the batches in flight, in order. Only the pipeline fills and empties it, under its lock.
        waiting: those of them that the pool has not been given yet.
        dead: why the run can never go on. Text, because an exception would hold the frames that hold the run.
        failure: the error of the pool that ended the run, until the run's iterator has raised it.
        ended: the user has seen the end.
        exhausted: all its batches have been planned.
        is_ahead: its epoch has not begun; it is read while the one before it is consumed.
        next: the run that is read ahead behind this one.
        any_order: a batch that is finished is handed out before one that is not.
        moved: the places of batches that have changed places and have not come yet, by their own numbers.
    """

    number: int
    epoch: int
    plan: Any
    reading: Any
    delivered: int = 0
    planned: int = 0
    window: deque[Entry] = field(default_factory=deque)
    waiting: deque[Entry] = field(default_factory=deque)
    dead: str | None = None
    failure: Exception | None = None
    ended: bool = False
    exhausted: bool = False
    is_ahead: bool = False
    next: Run | None = None
    any_order: bool = False
    moved: dict[int, int] = field(default_factory=dict)

    def is_finished(self) -> bool:
        """Whether any batch in the window is finished."""
        return any(entry.result is not None for entry in self.window)

    def advance(self) -> None:
        """Move the first finished batch to the head of the window."""
        window = self.window
        entry = next((one for one in window if one.result is not None), None)
        if entry is not None and entry is not window[0]:
            self.plan.move(entry.seq, window[0].seq)
            origins = {place: number for number, place in self.moved.items()}
            between = [one for one in window if one.seq <= entry.seq]
            contents = [(origins.get(one.seq, one.seq), one.task, one.result) for one in between]
            # Those it overtakes keep their order: batches of one part must.
            for one, (origin, task, result) in zip(between, [contents[-1], *contents[:-1]], strict=True):
                one.task, one.result = task, result
                if result is None:
                    self.moved[origin] = one.seq

    def leave_out(self, entry: Entry) -> bool:
        """Whether the entry's part had ended before it. Then its batch is empty."""
        given_up = entry.task is not None and self.plan.is_given_up(entry.task)
        if given_up:
            entry.result = self.plan.note(Result(self.number, entry.seq, NOTHING), entry.seq)
        return given_up

    def forget_window(self) -> None:
        """Throw away what is in flight. It is planned again from `delivered`."""
        self.exhausted = False
        self.window.clear()
        self.waiting.clear()
        self.moved.clear()
        self.planned = self.delivered
