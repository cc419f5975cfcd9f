"""The supervisor over real processes: it notices their ends, and reads their boards after their death."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sharded_loader import WorkerDiedError
from sharded_loader.engine.board import RUN, SAMPLE, SEQ, SHARD
from sharded_loader.engine.messages import Job, NewJob, Task
from sharded_loader.pools.process.resources import ProcessWorker
from sharded_loader.pools.process.transport import ProcessTransport
from sharded_loader.pools.supervisor import Supervisor

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills by signals")

NEW_JOB = NewJob(Job([1, 2, 3], None, 0), None)


@pytest.fixture
def transport() -> ProcessTransport:
    """Two forked workers."""
    return ProcessTransport(2, "fork", None)


@pytest.fixture
def supervisor(transport: ProcessTransport) -> Iterator[Supervisor[ProcessWorker]]:
    """A batch may kill two workers."""
    made = Supervisor(transport, 2, None)
    made.start(NEW_JOB)
    yield made
    made.close()


def kill(worker: Any) -> None:
    """Kill a worker, and wait for its end. Safe to call twice."""
    worker.ready = True
    with contextlib.suppress(ProcessLookupError):
        os.kill(worker.pid, signal.SIGKILL)
    worker.wait(120.0)


def give(worker: Any, seq: int) -> None:
    """A dead worker had a task, and its board says that it read its second sample."""
    worker.tasks[0, seq] = Task(0, seq, 0, 0, ([10, 11, 12],), False)
    worker.slots[0, seq] = None
    worker.board[RUN], worker.board[SEQ], worker.board[SHARD], worker.board[SAMPLE] = 0, seq, 0, 1


def test_a_dead_worker_is_reaped_and_replaced(
    transport: ProcessTransport, supervisor: Supervisor[ProcessWorker]
) -> None:
    before = list(transport.workers)
    kill(before[1])
    transport.ended.add(before[1].sentinel)
    assert supervisor.replace(before[1]) == []
    assert [worker.number for worker in transport.workers] == [0, 1]
    assert (transport.workers[0], transport.workers[1].pid != before[1].pid) == (before[0], True)
    assert (before[1].exitcode, transport.ended) == (-signal.SIGKILL, set())


def test_the_board_of_a_dead_worker_says_what_it_read(
    transport: ProcessTransport, supervisor: Supervisor[ProcessWorker]
) -> None:
    for number in (0, 1):
        worker = transport.workers[number]
        kill(worker)
        give(worker, 3)
        supervisor.requeued.clear()
        results = supervisor.replace(worker)
        assert len(results) == number
    assert isinstance(results[0].error, WorkerDiedError)
    assert (results[0].seq, results[0].error.index, results[0].error.exitcode) == (3, 11, -signal.SIGKILL)


def test_a_new_job_finds_new_forked_workers_which_do_what_was_begun(
    transport: ProcessTransport, supervisor: Supervisor[ProcessWorker]
) -> None:
    transport.workers[0].tasks[0, 5] = Task(0, 5, 0, 0, ([10],), False)
    before = {worker.pid for worker in transport.workers}
    supervisor.start(NEW_JOB)
    assert before.isdisjoint(worker.pid for worker in transport.workers)
    assert [task.seq for task in supervisor.requeued] == [5]
