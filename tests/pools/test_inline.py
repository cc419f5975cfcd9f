"""The pool without workers reads a task when somebody waits for it."""

from __future__ import annotations

import pytest

from sharded_loader import InlinePool, SimpleDataset
from sharded_loader.engine.messages import Job, Task


def started(*errors: BaseException) -> tuple[InlinePool, list[int]]:
    """A pool over indices times ten, and what it reads. The first reads raise these errors."""
    read: list[int] = []
    left = list(errors)

    def times_ten(index: int) -> int:
        read.append(index)
        if left:
            raise left.pop()
        return index * 10

    pool = InlinePool()
    pool.start(Job(SimpleDataset(range(10)).transform(times_ten), None, 0))
    return pool, read


def task(seq: int, run: int = 0) -> Task:
    return Task(run, seq, 0, seq, ([seq],), False)


def test_nothing_is_read_before_somebody_waits_and_then_one_task() -> None:
    pool, read = started()
    pool.submit([task(1), task(2)])
    assert list(pool.wait(block=False)) == read == []
    (result,) = pool.wait()
    assert (result.seq, result.batch.tolist(), read) == (1, [10], [1])


def test_a_task_that_was_interrupted_is_read_again() -> None:
    pool, _ = started(KeyboardInterrupt())
    pool.submit([task(1)])
    with pytest.raises(KeyboardInterrupt):
        pool.wait()
    assert pool.waiting, "the user's code was interrupted, not the pool"
    assert [result.batch.tolist() for result in pool.wait()] == [[10]]


def test_cancelled_and_closed_tasks_are_not_read() -> None:
    pool, read = started()
    pool.submit([task(1, run=0), task(2, run=1)])
    pool.cancel(0)
    assert [result.seq for result in pool.wait()] == [2]
    pool.submit([task(3)])
    pool.close()
    assert not pool.started and list(pool.wait()) == [] and read == [2]
