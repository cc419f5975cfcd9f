"""What the pipeline keeps of an iterator: its run, and the batches that are in flight.

    EpochPlan -> Entry(task) -> Entry(task, result) -> the user        in `Run.window`, in order

Only the pipeline fills and empties a window, under its lock. An entry owns its batch until the batch is handed out.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.plan import EpochPlan
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
    """One iterator's way through one epoch.

    Attributes:
        number: identifies the run in tasks and results.
        epoch: number of the epoch.
        plan: gives the run's tasks.
        reading: the epoch's batches, and the positions between them.
        delivered: how many batches of the epoch the user has received, errors in a batch's place included. This is the
            only truth: everything below can be thrown away and built again from it.
        planned: the number of the batch behind the window.
        window: the batches in flight, in order.
        dead: why the run can never go on. Text, because an exception would hold the frames that hold the run.
        failure: the error of the pool that ended the run, until the run's iterator has raised it.
        ended: the user has seen the end.
    """

    number: int
    epoch: int
    plan: EpochPlan
    reading: EpochReading
    delivered: int = 0
    planned: int = 0
    window: deque[Entry] = field(default_factory=deque)
    dead: str | None = None
    failure: Exception | None = None
    ended: bool = False
