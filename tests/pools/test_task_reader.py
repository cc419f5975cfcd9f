"""Each kind of job gets its reader. What every worker does with a job and its tasks, whoever brings them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.heartbeat import SAMPLE, SENDING
from sharded_loader.engine.messages import Job, Stream, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import decode, decode_error
from sharded_loader.pools import task_reader
from sharded_loader.pools.task_reader import TaskReader, reader_for
from sharded_loader.streams.reader import StatefulReader, StreamReader


@pytest.fixture(autouse=True)
def this_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reader, "_tell_torch", lambda *_: None)


def reader(dataset: Any, **options: Any) -> TaskReader:
    made = TaskReader(0, 2, "worker 0")
    made.take(Job(dataset, None, 7, **options))
    return made


def fields(*indices: Any, seq: int = 0) -> tuple[Any, ...]:
    return Task(0, seq, 1, 10 * seq, (list(indices),), False).fields


def test_the_batch_lies_in_the_memory_that_is_given() -> None:
    memory = np.zeros(1 << 12, np.uint8)
    made = reader(np.arange(2000.0).reshape(20, 100))
    result, slot, task = made.read(0, 0, fields(2, 3), memory)
    assert task == Task(*fields(2, 3))
    assert np.shares_memory(result.batch, memory)
    assert slot.used == slot.wanted >= 1600
    assert made.heartbeat[SAMPLE] == SENDING


def test_worker_init_fn_is_called_with_the_first_job_only() -> None:
    called: list[int] = []
    made = reader(range(3), worker_init_fn=called.append)
    made.take(Job(range(4), None, 7, worker_init_fn=called.append))
    assert called == [0]
    assert made.read(0, 0, fields(3), None)[0].batch.tolist() == [3]


def test_a_batch_that_cannot_be_pickled_is_an_error_that_says_so() -> None:
    made = reader([(n for n in range(3))])
    result, slot, task = made.read(0, 0, fields(0), None)
    reply = decode(made.pack(result, slot, task).pickled)
    assert "cannot leave its worker process" in reply.error.summary


def test_a_start_that_fails_says_where() -> None:
    failure = TaskReader(0, 1, "worker 0").begin(partial(exit, 3))
    assert failure is not None
    error = decode_error(decode(failure))
    assert isinstance(error, Exception)
    assert "while worker 0 started" in "\n".join(error.__notes__)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({}, Reader), ({"keeps_state": True}, StatefulReader), ({"stream": Stream(2, 4)}, StreamReader)],
)
def test_a_job_gets_the_reader_that_it_needs(given: dict[str, Any], kind: type) -> None:
    assert type(reader_for(Job([1, 2, 3], None, 0, **given))) is kind
