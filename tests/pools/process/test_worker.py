"""One worker's two threads, in this process: what they are sent, and what they answer."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

import multiprocess
import numpy as np
import pytest
from conftest import until
from failures import Boom, boom
from samples import Bad, Gate

from sharded_loader.engine.heartbeat import IDLE, SAMPLE
from sharded_loader.engine.messages import Job, Result, Task, unpack_reply
from sharded_loader.memory.codec import decode_error, encode
from sharded_loader.memory.segments import Slot
from sharded_loader.pools import task_reader
from sharded_loader.pools.process import link
from sharded_loader.pools.process.link import Link
from sharded_loader.pools.process.worker import WorkerThreads, close_in_children, die_with
from sharded_loader.pools.supervised import decode_result


@pytest.fixture(autouse=True)
def this_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reader, "_tell_torch", lambda *_: None)


class Trainer:
    """The other end of the pipe of a worker whose main thread is a thread here."""

    def __init__(self, dataset: Any = None) -> None:
        ours, theirs = multiprocess.Pipe()
        self.link, self._theirs = Link(ours, blocks=True), Link(theirs, blocks=True)
        self.worker = WorkerThreads(self._theirs, 4, 5)
        self.worker._finished.set()  # otherwise the end of the pipe may end this process
        self._thread = threading.Thread(
            target=self.worker.run, args=(None if dataset is None else Job(dataset, None, 0),)
        )
        self._thread.start()
        if dataset is not None:
            self.send(link.JOB)
            assert self.answer()[0] == link.READY

    @property
    def cancelled(self) -> Any:
        return self.worker._reader.cancelled

    def send(self, kind: bytes, run: int = 0, seq: int = 0, content: bytes = b"") -> None:
        self.link.send(kind, run, seq, content)

    def send_tasks(self, *tasks: Any) -> None:
        self.link.send(link.TASKS, content=pickle.dumps(tasks))

    def answer(self) -> tuple[bytes, memoryview, Any]:
        while not self.link.inbox:
            self.link.read()
        message = self.link.inbox.popleft()
        return message.kind, message.content, message.buffers

    def results(self, count: int) -> list[Result]:
        found: list[Result] = []
        while len(found) < count:
            kind, content, buffers = self.answer()
            assert kind == link.RESULTS
            while len(content):
                run, seq, _, places, pickled, content, _ = unpack_reply(content)
                found.append(decode_result(run, seq, pickled, [buffers.popleft() for _ in range(places)], None))
        return found

    def close(self) -> None:
        self.link.close()
        self._thread.join()
        self._theirs.close()


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    found = Trainer(Bad(boom))
    yield found
    found.close()


def task(seq: int, *indices: Any, run: int = 0) -> tuple[int, int, Slot | None, Any]:
    return run, seq, None, Task(run, seq, 0, 2 * seq, (list(indices),), False).fields


def test_tasks_of_one_message_are_answered_in_order_with_the_error_of_one(trainer: Trainer) -> None:
    trainer.send_tasks(task(0, 0, 1), task(1, 6, 7), task(2, 4, 5))
    first, second, third = trainer.results(3)
    assert [(one.run, one.seq, one.samples) for one in (first, third)] == [(0, 0, 2), (0, 2, 2)]
    assert [np.asarray(one.batch).tolist() for one in (first, third)] == [[0, 1], [4, 5]]
    assert type(second.error) is Boom
    assert "batch 1" in second.error.__notes__[0] and "worker 4 (pid " in second.error.__notes__[0]


def test_the_tasks_of_a_cancelled_run_are_answered_and_not_read() -> None:
    gate = Gate()
    trainer = Trainer(gate)
    trainer.send_tasks(task(0, 1, run=8))
    trainer.send_tasks(task(0, 2, run=7))
    trainer.send(link.CANCEL, 7)
    assert until(lambda: 7 in trainer.cancelled)  # it is taken while the first task is under way
    gate.open_for_all()
    assert [(result.run, result.samples) for result in trainer.results(2)] == [(8, 1), (7, 0)]
    assert gate.reads == 1
    trainer.close()


def test_indices_that_cannot_be_read_are_the_error_of_their_batch(trainer: Trainer) -> None:
    trainer.send_tasks((0, 0, None, b"no pickle"), task(1, 1))
    broken, good = trainer.results(2)
    assert isinstance(broken.error, pickle.UnpicklingError)
    assert "batch 0: its indices could not be unpickled in worker 4" in broken.error.__notes__[-1]
    assert good.samples == 1


@pytest.mark.skipif(sys.platform == "win32", reason="opened by path")
def test_a_segment_that_cannot_be_opened_is_told_and_batches_go_through_the_pipe(
    trainer: Trainer, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer.send(link.SEGMENT, 0, 4096, b"/no/such/segment")
    trainer.send_tasks((0, 0, Slot(0, 0, 4096), task(0, 1)[3]))
    (result,) = trainer.results(1)
    assert result.samples == 1
    assert "worker 4 (pid " in (text := capfd.readouterr().err) and "through the pipe, which is slower" in text


def test_a_job_that_cannot_be_unpickled_is_the_answer() -> None:
    trainer = Trainer()
    trainer.send(link.JOB, content=b"no pickle")
    kind, content, _ = trainer.answer()
    assert kind == link.FAILED
    error = decode_error(pickle.loads(content))
    assert isinstance(error, pickle.UnpicklingError)
    assert "while worker 4 (pid " in error.__notes__[0] and "unpickling the dataset" in error.__notes__[0]
    trainer.close()


def test_a_job_that_comes_in_a_message_is_read() -> None:
    trainer = Trainer()
    trainer.send(link.JOB, content=encode(Job(range(8), None, 0)).pickled)
    assert trainer.answer()[0] == link.READY
    trainer.send_tasks(task(0, 6, 7))
    assert np.asarray(trainer.results(1)[0].batch).tolist() == [6, 7]
    trainer.close()


def test_a_worker_between_batches_is_idle_on_its_heartbeat(trainer: Trainer) -> None:
    trainer.send_tasks(task(0, 1))
    trainer.results(1)
    assert until(lambda: trainer.worker._reader.heartbeat[SAMPLE] == IDLE)  # it is told after the answer


# -- workers end with their trainer -----------------------------------------------------------------------------------


linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a pipe: Linux")


@linux
@pytest.mark.parametrize("before", [False, True])
def test_a_process_dies_with_the_other_end_of_its_pipe_also_if_that_is_closed_already(before: bool) -> None:
    reader, writer = os.pipe()
    ready, tell = os.pipe()
    if before:
        os.close(writer)
    pid = os.fork()
    if pid == 0:
        if not before:
            os.close(writer)
        die_with(f"/proc/self/fd/{reader}")
        os.write(tell, b"x")
        os._exit(7) if before else signal.pause()
    if not before:
        os.read(ready, 1)
        os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in ((1, -signal.SIGKILL) if before else (-signal.SIGKILL,))
    for end in (reader, ready, tell):
        os.close(end)


@linux
def test_what_the_trainer_watches_is_closed_in_the_children_of_a_worker() -> None:
    ours, theirs = multiprocess.Pipe()
    sentinel, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        link = Link(theirs, blocks=True)
        end = link.waitable
        close_in_children(held)
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{held}") or os.path.exists(f"/proc/self/fd/{end}"))
        assert os.get_inheritable(held) is False
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (sentinel, held):
        os.close(end)
    ours.close()
    theirs.close()
