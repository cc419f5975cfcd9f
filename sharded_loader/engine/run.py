"""One iterator's way through one epoch: how far it is, and its batches in flight, which are put in order here.

    planned task -> Entry, at the end of the window            a result -> its entry, whenever it comes
    the head of the window, once it has a result -> the user

What is in flight is a cache: `Run.delivered` is the only truth, and `Run.forget_window` throws the rest away. With
``any_order``, the first finished entry changes places with the head (`Run.advance`).

A run owns its entries, and an entry its batch. The pipeline changes them under its lock. Nothing here blocks, or fails.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sharded_loader.engine.messages import NOTHING, BatchTimes, Result, Task
from sharded_loader.engine.order import Epoch

_FAR = 1 << 40  # farther than any batch of a run whose epoch has begun


@dataclass(slots=True)
class Entry:
    """A batch in flight: planned, perhaps finished, perhaps on its way to the devices (`begun`).

    An entry owns its batch until the batch is handed out.

    Attributes:
        sent: when the task was given to the pool.
        waited: seconds in which the consumer has waited for it.
        times: what is known of that; None: nothing.
    """

    seq: int
    task: Task | None
    result: Result | None = None
    begun: Any = None
    sent: float = 0.0
    waited: float = 0.0
    times: BatchTimes | None = None


class ShownRun:
    """Which run has handed out a batch, or its end, most recently.

    Attributes:
        shown: the run, whose position the loader tells.
    """

    shown: Run | None = None


@dataclass(eq=False)
class Run:
    """One iterator's way through one epoch.

    Attributes:
        number: identifies the run in tasks and results.
        epoch: its batches.
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
        next: the prefetched run behind this one.
        any_order: a batch that is finished is handed out before one that is not.
        moved: the places of batches that have changed places and have not come yet, by their own numbers.
        waited: since when the consumer has waited, while empty batches came; 0: it does not.
    """

    number: int
    epoch: Epoch
    delivered: int = field(init=False)
    planned: int = field(init=False)
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
    waited: float = 0.0

    def __post_init__(self) -> None:
        self.epoch.run, self.delivered, self.planned = self.number, self.epoch.first, self.epoch.first

    def is_finished(self) -> bool:
        """Whether any batch in the window is finished."""
        return any(entry.result is not None for entry in self.window)

    def advance(self) -> None:
        """Move the first finished batch to the head of the window."""
        window = self.window
        entry = next((one for one in window if one.result is not None), None)
        if entry is not None and entry is not window[0]:
            self.epoch.move(entry.seq, window[0].seq)
            origins = {place: number for number, place in self.moved.items()}
            between = [one for one in window if one.seq <= entry.seq]
            contents = [(origins.get(one.seq, one.seq), one.task, one.result, one.sent) for one in between]
            # Those it overtakes keep their order: batches of one part must.
            for one, (origin, task, result, sent) in zip(between, [contents[-1], *contents[:-1]], strict=True):
                one.task, one.result, one.sent = task, result, sent
                if result is None:
                    self.moved[origin] = one.seq

    def leave_out(self, entry: Entry) -> bool:
        """Whether the entry's part was given up before it. Then its batch is empty."""
        part = None if entry.task is None else entry.task.part
        is_given_up = part is not None and part.batch > self.epoch.given_up.get(part.number, part.batch)
        if is_given_up:
            entry.result = self.epoch.came(entry.seq, Result(self.number, entry.seq, NOTHING))
        return is_given_up

    def distance(self) -> float:
        """How many batches come before the first one that waits for the pool. A run that is ahead is last."""
        if not self.waiting:
            return math.inf
        return self.waiting[0].seq - self.delivered + (_FAR if self.is_ahead else 0)

    def forget_window(self) -> None:
        """Throw away what is in flight. It is planned again from `delivered`."""
        self.exhausted = False
        for entry in list(self.window):
            for copy in entry.begun or ():
                copy.drop()
        self.window.clear()
        self.waiting.clear()
        self.moved.clear()
        self.planned = self.delivered
