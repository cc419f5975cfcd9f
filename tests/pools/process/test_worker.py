"""A worker, in this process: what its pipe carries, what its two threads answer, and what it does with a task."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from functools import partial
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import multiprocess
import numpy as np
import pytest
from conftest import until
from failures import Boom, boom
from samples import Bad, Gate

from sharded_loader.base import limits
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, SENDING
from sharded_loader.engine.messages import Job, Result, Stream, Task, unpack_reply
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import decode, decode_error, encode
from sharded_loader.memory.segments import Slot
from sharded_loader.pools import task_reader
from sharded_loader.pools.process import link as wire
from sharded_loader.pools.process import worker as worker_module
from sharded_loader.pools.process.link import CANCEL, CHUNK, HEARTBEAT, RESULTS, SEGMENT, Link, Poller
from sharded_loader.pools.process.worker import WorkerThreads, close_in_children, die_with
from sharded_loader.pools.supervised import decode_result
from sharded_loader.pools.task_reader import TaskReader, reader_for
from sharded_loader.streams.reader import StatefulReader, StreamReader

Ends = tuple[Link, Link]


@pytest.fixture(autouse=True)
def this_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reader, "_tell_torch", lambda *_: None)


# -- messages of any size arrive whole and in order, whatever the pipe takes and gives at a time -----------------------


def pipe() -> Ends:
    """Both ends: the main process's, and the worker's."""
    ours, theirs = multiprocess.Pipe()
    return Link(ours), Link(theirs, blocks=True)


@pytest.fixture(params=["socket", "portable"] if hasattr(os, "fork") else ["portable"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """Both ends of a pipe."""
    monkeypatch.setattr(wire, "PORTABLE", request.param == "portable")
    link, theirs = pipe()
    yield link, theirs
    link.close()
    theirs.close()


no_socket = pytest.mark.skipif(not hasattr(socket, "recv_fds"), reason="descriptors are passed on POSIX only")
SOCKET = pytest.mark.parametrize("ends", [pytest.param("socket", marks=no_socket)], indirect=True)


def received(link: Link, count: int) -> list[Any]:
    """The next messages, once they have come."""
    while len(link.inbox) < count and not link.ended:
        link.read()
    return [link.inbox.popleft() for _ in range(len(link.inbox))]


def contents(message: Any) -> list[bytes | tuple[int, int]]:
    return [bytes(message.content), *[part if isinstance(part, tuple) else bytes(part) for part in message.buffers]]


def test_a_message_arrives_with_its_buffers_in_order(ends: Ends) -> None:
    ours, theirs = ends
    buffers = [memoryview(b"abc"), memoryview(b"")]
    ours.send(CANCEL, 3, 2**40, b"rest", buffers=buffers, places=[(-1, -(1 << 62)), (8, 9), (2**40, 2**33), (-1, 0)])
    (message,) = received(theirs, 1)
    assert (message.kind, message.run, message.seq) == (CANCEL, 3, 2**40)
    assert contents(message) == [b"rest", b"abc", (8, 9), (2**40, 2**33), b""]
    np.frombuffer(message.buffers[0], np.uint8)[...] += 1  # may be written to
    assert bytes(message.buffers[0]) == b"bcd"
    ours.close()
    assert received(theirs, 1) == [] and theirs.ended


@SOCKET
def test_descriptors_come_with_their_messages_however_many_are_read_at_once(ends: Ends) -> None:
    ours, theirs = ends
    pipes = [os.pipe(), os.pipe()]
    ours.send(CANCEL, 1)
    for number, (_, writer) in enumerate(pipes):
        ours.send(SEGMENT, number, content=bytes(CHUNK), descriptor=writer)
        ours.send(CANCEL, 2)
    assert [message.kind for message in received(theirs, 5)] == [CANCEL, SEGMENT, CANCEL, SEGMENT, CANCEL]
    for reader, writer in pipes:
        os.close(writer)
        with open(theirs.take_descriptor(), "wb") as file:
            file.write(b"x")
        assert os.read(reader, 2) == b"x"
        assert os.read(reader, 1) == b""
        os.close(reader)


@SOCKET
@pytest.mark.parametrize("code", [errno.ENOBUFS, errno.ENOMEM])
def test_for_want_of_memory_a_message_waits_and_a_worker_that_cannot_send_ends(
    ends: Ends, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = ends
    full = Mock(send=Mock(side_effect=OSError(code, os.strerror(code))))
    with monkeypatch.context() as short:
        short.setattr(ours, "_socket", full)
        ours.send(CANCEL, 1)
    ours.send(CANCEL, 2)
    assert [message.run for message in received(theirs, 2)] == [1, 2]
    with monkeypatch.context() as short, pytest.raises(OSError, match=os.strerror(code)):
        short.setattr(theirs, "_socket", full)
        theirs.send(CANCEL, 3)


@SOCKET
def test_a_segment_is_known_by_its_name_or_by_a_descriptor(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[Any, ...]] = []
    monkeypatch.setattr(ends[0], "send", lambda *given, descriptor: sent.append((*given, descriptor)))
    ends[0].send_segment(SimpleNamespace(number=3, nbytes=4096, name=None, fd=9))  # type: ignore[arg-type]
    ends[0].send_segment(SimpleNamespace(number=3, nbytes=64, name="/x", fd=9), HEARTBEAT, 5)  # type: ignore[arg-type]
    assert sent == [(SEGMENT, 3, 4096, b"", 9), (HEARTBEAT, 5, 64, b"/x", None)]


def test_messages_of_any_size_arrive_in_their_order(ends: Ends) -> None:
    link, theirs = ends
    sizes = [0, 1, CHUNK // 2, CHUNK - 8, CHUNK, CHUNK + 1, 3 * CHUNK + 5] * 3 + [7] * 500
    data = [os.urandom(size) for size in sizes]

    def send() -> None:
        for one, other in zip(data, reversed(data), strict=True):
            places = [(-1, len(other)), (64, 8)]
            theirs.send(RESULTS, content=one, places=places, buffers=[np.frombuffer(other, np.uint8).data])

    sender = threading.Thread(target=send)
    sender.start()
    messages = received(link, len(sizes))
    sender.join()
    expected = [[one, other, (64, 8)] for one, other in zip(data, data[::-1], strict=True)]
    assert [contents(message) for message in messages] == expected


@SOCKET
def test_what_the_pipe_does_not_take_waits_in_the_outbox_and_goes_later(ends: Ends) -> None:
    link, theirs = ends
    large = os.urandom(4 << 20)
    link.send(RESULTS, content=b"first", buffers=[memoryview(large)])
    link.send(RESULTS, content=b"second")
    assert link.outbox
    got: list[Any] = []
    receiver = threading.Thread(target=lambda: got.extend(received(theirs, 2)))
    receiver.start()
    while link.outbox:
        link.send()
    receiver.join()
    assert [contents(message) for message in got] == [[b"first", large], [b"second"]]


def test_the_end_of_the_worker_is_noticed_after_its_last_message(ends: Ends) -> None:
    link, theirs = ends
    theirs.send(RESULTS, content=b"last")
    theirs.close()
    assert [contents(message) for message in received(link, 2)] == [[b"last"]]
    assert link.ended
    link.send(RESULTS, content=b"to nobody")
    assert not link.outbox


@pytest.fixture
def polled() -> Iterator[tuple[Poller, list[Any], Any]]:
    """A poller, the two workers that it looks at, and what wakes it."""
    waker, bell = multiprocess.Pipe(duplex=False)
    workers, opened = list[Any](), [waker, bell]
    for _ in range(2):
        (link, theirs), (end, alive) = pipe(), multiprocess.Pipe(duplex=False)
        workers.append(SimpleNamespace(link=link, theirs=theirs, alive=alive, sentinel=end.fileno()))
        opened += link, theirs, end, alive
    yield Poller(workers, waker), workers, bell
    for one in opened:
        one.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="sentinels are workers there")
def test_a_poller_tells_who_is_ready_who_has_ended_and_when_it_is_woken(polled: Any) -> None:
    poller, workers, bell = polled
    assert poller.wait(0.0) == ([], set())
    workers[1].theirs.send(RESULTS, content=b"x")
    assert poller.wait() == ([workers[1]], set())
    workers[1].link.read()
    bell.send_bytes(b"")
    assert poller.wait() == ([], set())
    assert poller.wait(0.0) == ([], set()), "what the waker was sent is taken out"
    workers[0].alive.close()
    assert poller.wait() == ([], {workers[0].sentinel})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a socket that does not block")
def test_a_poller_tells_when_more_can_be_sent(polled: Any) -> None:
    poller, (worker, _), _ = polled
    worker.link.send(RESULTS, buffers=[memoryview(bytes(4 << 20))])
    assert poller.wait(0.0) == ([], set())
    receiver = threading.Thread(target=received, args=(worker.theirs, 1))
    receiver.start()
    while worker.link.outbox:
        assert poller.wait(120.0) == ([worker], set())
        worker.link.send()
    receiver.join()
    assert poller.wait(0.0) == ([], set()), "nothing waits to be sent any more"


class Trainer:
    """The other end of the pipe of a worker whose main thread is a thread here."""

    def __init__(self, dataset: Any = None, **options: Any) -> None:
        ours, theirs = multiprocess.Pipe()
        self.link, self._theirs = Link(ours, blocks=True), Link(theirs, blocks=True)
        self.worker = WorkerThreads(self._theirs, 4, 5)
        self.worker._finished.set()  # otherwise the end of the pipe may end this process
        job = None if dataset is None else Job(dataset, None, 0, **options)
        self._thread = threading.Thread(target=self.worker.run, args=[job])
        self._thread.start()
        if dataset is not None:
            self.link.send(wire.JOB)
            assert self.answer()[0] == wire.READY

    def send_tasks(self, *tasks: Any) -> None:
        self.link.send(wire.TASKS, content=pickle.dumps(tasks))

    def message(self) -> wire.Message:
        while not self.link.inbox:
            self.link.read()
        return self.link.inbox.popleft()

    def answer(self) -> tuple[bytes, memoryview, Any]:
        message = self.message()
        return message.kind, message.content, message.buffers

    def results(self, count: int) -> list[Result]:
        found: list[Result] = []
        while len(found) < count:
            kind, content, buffers = self.answer()
            assert kind == wire.RESULTS
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


def fields(seq: int, *indices: Any) -> tuple[Any, ...]:
    return Task(0, seq, 1, 2 * seq, (list(indices),), False).fields


def task(seq: int, *indices: Any) -> tuple[int, int, Slot | None, Any]:
    return 0, seq, None, fields(seq, *indices)


def test_tasks_of_one_message_are_answered_in_order_with_the_error_of_one(trainer: Trainer) -> None:
    trainer.send_tasks(task(0, 0, 1), task(1, 6, 7), task(2, 4, 5))
    first, second, third = trainer.results(3)
    assert [(one.run, one.seq, one.samples) for one in (first, third)] == [(0, 0, 2), (0, 2, 2)]
    assert [np.asarray(one.batch).tolist() for one in (first, third)] == [[0, 1], [4, 5]]
    assert type(second.error) is Boom
    assert "batch 1" in second.error.__notes__[0] and "worker 4 (pid " in second.error.__notes__[0]
    assert until(lambda: trainer.worker._reader.heartbeat[SAMPLE] == IDLE)  # it is told after the answer


def test_the_tasks_of_a_cancelled_run_are_answered_and_not_read() -> None:
    trainer = Trainer(gate := Gate())
    trainer.send_tasks(task(0, 1))
    trainer.send_tasks((7, 0, None, fields(0, 2)))
    trainer.link.send(CANCEL, 7)
    assert until(lambda: 7 in trainer.worker._reader.cancelled)  # it is taken while the first task is under way
    gate.open_for_all()
    assert [(result.run, result.samples) for result in trainer.results(2)] == [(0, 1), (7, 0)] and gate.reads == 1
    trainer.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="waits for a socket")
def test_a_finished_batch_is_sent_on_request_while_the_worker_reads_the_next_one(
    host_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "GROUP_SECONDS", 3600.0)  # all replies wait for the end of the message
    trainer = Trainer(gate := Gate(free=0))
    trainer.send_tasks(task(0, 0), task(1, 1), task(2, 2))
    for seq in range(2):
        assert all(gate.begun.acquire(timeout=60) for _ in range(2 - seq))  # it reads batch seq + 1
        trainer.link.send(wire.FLUSH)
        assert connection.wait([trainer.link.waitable], 60)
        assert [result.seq for result in trainer.results(1)] == [seq]
        gate.opened.release()
    assert [result.seq for result in trainer.results(1)] == [2]
    trainer.close()


def test_at_the_limit_of_threads_a_worker_that_is_asked_for_its_results_reads_on(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    trainer.link.send(wire.FLUSH)
    trainer.send_tasks(task(0, 1))
    assert [result.samples for result in trainer.results(1)] == [1]


def test_a_worker_above_its_limit_says_so_after_its_start_and_after_its_first_batch() -> None:
    trainer, said = Trainer(range(8), max_memory=1), []
    for seq in range(2):
        trainer.send_tasks(task(seq, seq))
        while (message := trainer.message()).kind != RESULTS:
            said.append((message.kind, message.seq))
    trainer.close()
    assert said[:2] == [(wire.GROWN, 0), (wire.GROWN, 1)]


def test_what_a_worker_shares_does_not_count_until_it_has_more_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "CHECK_SHARE", 0.0)  # exactly, each time
    monkeypatch.setattr(limits, "own_bytes", Mock(side_effect=[120, 95, 140]))
    monkeypatch.setattr(limits, "private_bytes", Mock(side_effect=[70, 101]))
    trainer = Trainer(range(8), max_memory=100)
    trainer.send_tasks(task(0, 0), task(1, 1))
    while (message := trainer.message()).kind != wire.GROWN:
        assert message.kind == RESULTS
    trainer.close()
    assert (message.run, message.seq) == (101, 2)


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
    trainer.link.send(SEGMENT, 0, 4096, b"/no/such/segment")
    trainer.send_tasks((0, 0, Slot(0, 0, 4096), fields(0, 1)))
    assert trainer.results(1)[0].samples == 1
    assert "worker 4 (pid " in (text := capfd.readouterr().err) and "through the pipe, which is slower" in text
    trainer.link.send(wire.JOB)  # whose own segment would have a negative number
    assert trainer.answer()[0] == wire.READY


def test_a_job_comes_in_a_message_and_one_that_cannot_be_unpickled_is_the_answer() -> None:
    trainer = Trainer()
    trainer.link.send(wire.JOB, content=encode(Job(range(8), None, 0)).pickled)
    assert trainer.answer()[0] == wire.READY
    trainer.send_tasks(task(0, 6, 7))
    assert np.asarray(trainer.results(1)[0].batch).tolist() == [6, 7]
    trainer.link.send(wire.JOB, content=b"no pickle")
    kind, content, _ = trainer.answer()
    error = decode_error(pickle.loads(content))
    assert kind == wire.FAILED and isinstance(error, pickle.UnpicklingError)
    assert "while worker 4 (pid " in error.__notes__[0] and "unpickling the dataset" in error.__notes__[0]
    trainer.close()


def reader_of(dataset: Any, **options: Any) -> TaskReader:
    made = TaskReader(0, 2, "worker 0")
    made.take(Job(dataset, None, 7, **options))
    return made


def test_the_batch_lies_in_the_memory_that_is_given() -> None:
    memory = np.zeros(1 << 12, np.uint8)
    reader = reader_of(np.arange(2000.0).reshape(20, 100))
    result, slot, found = reader.read(0, 0, fields(5, 2, 3), memory)
    assert found == Task(*fields(5, 2, 3))
    assert np.shares_memory(result.batch, memory)
    assert slot.used == slot.wanted >= 1600
    assert reader.heartbeat[SAMPLE] == SENDING


def test_the_time_to_write_a_batch_is_measured_from_the_end_of_its_reading(host_time: Any) -> None:
    class Slow:
        def __reduce__(self) -> Any:
            host_time.move(3.0)
            return Slow, ()

    def read(samples: list[int]) -> Slow:
        host_time.move(5.0)
        return Slow()

    reader = TaskReader(0, 1, "worker 0")
    reader.take(Job(range(3), read, 7))
    (*_, times) = unpack_reply(memoryview(reader.answer(0, 0, fields(0, 1), None)[0]))
    assert times is not None and times.write == 3.0


def test_worker_init_fn_is_called_with_each_job_whose_dataset_it_may_change() -> None:
    called: list[int] = []
    reader = reader_of(range(3), worker_init_fn=called.append)
    reader.take(Job(range(4), None, 7, worker_init_fn=called.append))
    assert called == [0, 0]
    assert reader.read(0, 0, fields(0, 3), None)[0].batch.tolist() == [3]


@pytest.mark.parametrize("sets_epoch", [True, False])
def test_the_dataset_of_a_worker_is_told_the_epoch_but_in_the_drop_in(sets_epoch: bool) -> None:
    told: list[int] = []
    dataset = Bad(boom)
    dataset.set_epoch = told.append  # type: ignore[attr-defined]
    reader_of(dataset, sets_epoch=sets_epoch).read(0, 0, fields(0, 1), None)
    assert told == [1] * sets_epoch


def test_a_batch_that_cannot_be_pickled_is_an_error_that_says_so() -> None:
    reader = reader_of([(n for n in range(3))])
    reply = decode(reader.pack(*reader.read(0, 0, fields(0, 0), None)).pickled)
    assert "cannot leave its worker process" in reply.error.summary


def test_a_start_that_fails_says_where() -> None:
    failure = TaskReader(0, 1, "worker 0").begin(partial(exit, 3))
    assert failure is not None
    assert "while worker 0 started" in "\n".join(decode_error(decode(failure)).__notes__)


@pytest.mark.parametrize(
    ("given", "kind"),
    [({}, Reader), ({"keeps_state": True}, StatefulReader), ({"stream": Stream(2, 4)}, StreamReader)],
)
def test_a_job_gets_the_reader_that_it_needs(given: dict[str, Any], kind: type) -> None:
    assert type(reader_for(Job([1, 2, 3], None, 0, **given))) is kind


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
