"""Where a reader is: for errors, for the loop around it."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

from sharded_loader.base.errors import notes_of
from sharded_loader.engine.heartbeat import UNUSED
from sharded_loader.engine.messages import PartIndices, Task
from sharded_loader.engine.reader import BatchScope
from sharded_loader.randomness.rng import OF_BATCH


def scope_of(*shards: Any) -> BatchScope:
    at = BatchScope(7, 2)
    at.task = Task(0, 4, 2, 0, shards, len(shards) > 1)
    at.worker, at.empty, at.heartbeat = None, np.empty, list(UNUSED)
    at.indices = shards[0]
    return at


def reading(at: BatchScope, position: int) -> None:
    at.items = iter(range(len(at.indices)))
    for _ in range(position + 1):
        next(at.items)


def test_samples_of_a_part_are_named_by_part_and_place() -> None:
    at = scope_of(PartIndices(3, range(8, 12)))
    reading(at, 2)
    assert "sample (3, 10)" in notes_of(at.locate_error(KeyError("x")))[0]
    at.set_index(OF_BATCH)
    where, again = notes_of(at.locate_error(KeyError("x")))
    assert "sample" not in where.partition("batch 4")[2]
    assert again.endswith("[loader.read(i, epoch=2) for i in ((3, 8), (3, 9), (3, 10), (3, 11))]")


def test_a_handler_that_raises_inside_the_dataset_is_the_dataset_s() -> None:
    class TimeIsUp(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGTERM, handler)
    try:
        signal.raise_signal(signal.SIGTERM)
    except TimeIsUp as error:
        assert not scope_of([1]).is_for_caller(error)
    finally:
        signal.signal(signal.SIGTERM, before)
