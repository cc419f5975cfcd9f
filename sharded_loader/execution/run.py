"""What the pipeline keeps of an iterator: its run, and the batches that are in flight.

    EpochPlan -> Entry(task) -> Entry(task, result) -> the user        in `Run.window`, in order

Only the pipeline fills and empties a window, under its lock. An entry owns its batch until that is handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sharded_loader.execution.messages import Result, Task
from sharded_loader.execution.plan import EpochPlan
from sharded_loader.sampling.reading import EpochReading


@dataclass(slots=True)
class Entry:
    """A batch in flight: planned, perhaps dispatched, perhaps finished, perhaps on its way to the devices (`begun`)."""

    seq: int
    task: Task | None
    result: Result | None = None
    dispatched: bool = False
    begun: Any = None


@dataclass(eq=False)
class Run:
    """One iterator's way through one epoch. Filled and emptied by the pipeline only.

    Attributes:
        number: identifies the run in tasks and results.
        epoch: number of the epoch.
        plan: where its tasks come from.
        reading: the epoch's batches, and the places between them.
        window: the batches in flight, in order.
        urgent: errors to raise at the next call, whatever is in the window.
        dead: why the run can never go on. Not the exception itself: it would hold the frames that hold the run.
        delivered: batches that the user has had, those in whose place an error was raised included.
        ended: the user has seen the end.
    """

    number: int
    epoch: int
    plan: EpochPlan
    reading: EpochReading
    window: deque[Entry] = field(default_factory=deque)
    urgent: deque[BaseException] = field(default_factory=deque)
    dead: str | None = None
    delivered: int = 0
    ended: bool = False
