"""Windows of a pipeline, for tests of `Placer`."""

from __future__ import annotations

from typing import Any

from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry

PLAIN, SHARDED = (Task(0, 0, 0, 0, ([0],), sharded) for sharded in (False, True))
"""Tasks whose batch is plain, or a list of shards."""


def entries(*batches: object) -> list[Entry]:
    """Entries with these batches or errors; None: not finished."""
    made = []
    for seq, batch in enumerate(batches):
        entry = Entry(seq, Task(0, seq, 0, seq, ([seq],), False))
        if isinstance(batch, Exception):
            entry.result = Result(0, seq, error=batch)
        elif batch is not None:
            entry.result = Result(0, seq, batch)
        made.append(entry)
    return made


def begun(window: list[Entry]) -> list[int]:
    """The numbers of the entries that are on their way."""
    return [entry.seq for entry in window if entry.begun is not None]


def place_now(placement: Placer, batch: object, task: Task = PLAIN) -> Any:
    """The batch, put where it belongs."""
    return placement.place([Entry(0, task, Result(0, 0, batch))])
