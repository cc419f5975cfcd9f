"""The pool without workers reads a task when somebody waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_loader import InlinePool
from sharded_loader.engine.messages import Job, Task


class Counted:
    """Indices times ten. Notes what is read, and raises ``error`` once, if it is set."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.error: BaseException | None = None

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        return index * 10


def started(dataset: Any) -> InlinePool:
    pool = InlinePool()
    pool.start(Job(dataset, None, 0))
    return pool


def task(seq: int, run: int = 0) -> Task:
    return Task(run, seq, 0, seq, ([seq],), False)


def test_nothing_is_read_before_somebody_waits_and_then_one_task() -> None:
    dataset = Counted()
    pool = started(dataset)
    pool.submit([task(1), task(2)])
    assert dataset.read == []
    (result,) = pool.wait()
    assert (result.seq, result.batch.tolist()) == (1, [10])
    assert dataset.read == [1]


def test_a_look_without_waiting_reads_nothing() -> None:
    dataset = Counted()
    pool = started(dataset)
    pool.submit([task(1)])
    assert list(pool.wait(block=False)) == []
    assert dataset.read == []


def test_a_task_that_was_interrupted_is_read_again() -> None:
    dataset = Counted()
    dataset.error = KeyboardInterrupt()
    pool = started(dataset)
    pool.submit([task(1)])
    with pytest.raises(KeyboardInterrupt):
        pool.wait()
    assert pool.waiting, "the user's code was interrupted, not the pool"
    assert [result.batch.tolist() for result in pool.wait()] == [[10]]


def test_cancelled_and_closed_tasks_are_not_read() -> None:
    dataset = Counted()
    pool = started(dataset)
    pool.submit([task(1, run=0), task(2, run=1)])
    pool.cancel(0)
    assert [result.seq for result in pool.wait()] == [2]
    pool.submit([task(3)])
    pool.close()
    assert not pool.started
    assert list(pool.wait()) == []
