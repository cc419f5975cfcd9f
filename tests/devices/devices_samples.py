"""Copy streams of the simulated device, and windows of a pipeline, for tests of what is on its way."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from simulated import Machine, SimulatedStreams

from sharded_loader.devices.copies import CopyStream
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.pipeline import Entry

PLAIN, SHARDED = (Task(0, 0, 0, 0, ([0],), sharded) for sharded in (False, True))
"""Tasks whose batch is plain, or a list of shards."""


def streams_on(machine: Machine, number: int = 0) -> SimulatedStreams:
    return SimulatedStreams(machine, machine.devices[number])


def copies_on(machine: Machine) -> CopyStream:
    """The copy stream of the first device."""
    return CopyStream(streams_on(machine))  # type: ignore[arg-type]


def placer_on(machine: Machine, **options: Any) -> Placer:
    """A placer of the first device."""
    return Placer([machine.devices[0]], pin_memory=False, **options)


def copied(machine: Machine) -> int:
    """How many copies there were."""
    return sum(what == "copy" for what, _ in machine.log)


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


class Checks:
    """Kernels of the first device that compare what they find, late.

    Attributes:
        mismatched: labels of what was not as expected.
        seen: kernels that have run.
    """

    def __init__(self, machine: Machine) -> None:
        self.machine, self.mismatched, self.seen = machine, list[Any](), 0

    def compare(self, tensor: torch.Tensor, expected: Any, label: Any = None) -> None:
        """Let the current stream compare all values, when it gets there."""

        def look(found: np.ndarray) -> None:
            self.seen += 1
            if not (found == expected).all():
                self.mismatched.append(label)

        self.machine.kernel(self.machine.devices[0], tensor, look)

    def done(self) -> tuple[list[Any], list[str]]:
        """What was wrong, and the machine's faults, when all is done."""
        self.machine.finish()
        return self.mismatched, self.machine.faults


class Refusing:
    """An object that cannot even be pinned; it counts the tries."""

    tries = 0

    def pin_memory(self) -> object:
        self.tries += 1
        raise ValueError("this cannot be pinned")

    def to(self, device: object) -> object:
        raise AssertionError


GOOD: tuple[list[Any], list[str]] = ([], [])
"""What `Checks.done` says where nothing is wrong."""
