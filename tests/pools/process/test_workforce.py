"""The workers of a process pool are kept running, whatever ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sharded_loader import WorkerDiedError
from sharded_loader.engine.board import IN_BULK, RUN, SAMPLE, SEQ, SHARD
from sharded_loader.engine.messages import Job, NewJob, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.pools.deaths import IDLE_DEATHS
from sharded_loader.pools.process.workforce import Workforce

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills by signals")

NEW_JOB = NewJob(Job([1, 2, 3], None, 0), None)


@pytest.fixture
def workforce() -> Iterator[Workforce]:
    """Two forked workers, of which a batch may kill two."""
    made = Workforce(2, "fork", 2, None, None)
    made.start(NEW_JOB)
    yield made
    made.close()


def end(handle: Any) -> None:
    """Kill a worker, and wait for its end. Safe to call twice."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(handle.pid, signal.SIGKILL)
    handle.wait(120.0)


def kill(workforce: Workforce, number: int) -> Any:
    """Kill a worker, and deal with its death as the pool does."""
    handle = workforce.resources.handles[number]
    handle.ready = True
    end(handle)
    workforce.ended.add(handle.sentinel)
    return workforce.bury(handle)


def give(workforce: Workforce, number: int, task: Task, sample: int | None = None) -> None:
    """A worker has a task; with ``sample``, its board says that it reads that one."""
    handle = workforce.resources.handles[number]
    handle.tasks[task.run, task.seq] = task
    handle.slots[task.run, task.seq] = None
    if sample is not None:
        end(handle)  # now: it may just be starting, and would write to its board again
        handle.board[RUN], handle.board[SEQ], handle.board[SHARD], handle.board[SAMPLE] = task.run, task.seq, 0, sample


def task(seq: int) -> Task:
    return Task(0, seq, 0, 0, ([10, 11, 12],), False)


def test_a_dead_worker_is_replaced_by_one_of_its_number(workforce: Workforce) -> None:
    before = [handle.pid for handle in workforce.resources.handles]
    assert kill(workforce, 1) == []
    after = workforce.resources.handles
    assert [handle.number for handle in after] == [0, 1]
    assert (after[0].pid, after[1].pid != before[1]) == (before[0], True)
    assert workforce.ended == set()


def test_its_tasks_are_for_others(workforce: Workforce) -> None:
    give(workforce, 0, task(3))
    give(workforce, 0, task(4))
    kill(workforce, 0)
    assert [one.seq for one in workforce.requeued] == [3, 4]


def test_a_batch_that_kills_too_many_workers_is_given_up_and_its_sample_named(workforce: Workforce) -> None:
    give(workforce, 0, task(3), sample=1)
    give(workforce, 0, task(4))
    assert kill(workforce, 0) == []
    give(workforce, 1, task(3), sample=1)
    [given_up] = kill(workforce, 1)
    assert isinstance(given_up.error, WorkerDiedError)
    assert (given_up.run, given_up.seq, given_up.error.index) == (0, 3, 11)
    assert [one.seq for one in workforce.requeued] == [3, 4], "those of the first worker"


def test_after_a_death_in_bulk_the_samples_are_read_one_by_one(workforce: Workforce) -> None:
    give(workforce, 0, task(3), sample=IN_BULK)
    kill(workforce, 0)
    assert [one.careful for one in workforce.requeued] == [True]


def test_workers_that_die_of_nothing_again_and_again_break_the_pool(workforce: Workforce) -> None:
    with pytest.raises(PoolBroken) as caught:
        for _ in range(IDLE_DEATHS):
            kill(workforce, 0)
    assert isinstance(caught.value.error, WorkerDiedError)
    assert workforce.resources.handles == []


def test_a_new_job_finds_new_forked_workers_which_do_what_was_begun(workforce: Workforce) -> None:
    give(workforce, 0, task(5))
    before = {handle.pid for handle in workforce.resources.handles}
    workforce.start(NEW_JOB)
    assert before.isdisjoint(handle.pid for handle in workforce.resources.handles)
    assert [one.seq for one in workforce.requeued] == [5]


def test_closed_it_has_neither_workers_nor_tasks_and_may_be_started_again(workforce: Workforce) -> None:
    give(workforce, 0, task(5))
    kill(workforce, 0)
    workforce.close()
    assert (workforce.resources.handles, list(workforce.requeued), workforce.ended) == ([], [], set())
    workforce.start(NEW_JOB)
    assert len(workforce.resources.handles) == 2
