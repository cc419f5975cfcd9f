"""Messages of any size arrive whole and in order, whatever the pipe takes and gives at a time."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import multiprocess
import numpy as np
import pytest

from sharded_loader.pools.process import link as module
from sharded_loader.pools.process.link import CANCEL, CHUNK, HEARTBEAT, RESULTS, SEGMENT, Link, Poller


def pipe() -> tuple[Link, Link]:
    """Both ends: the main process's, and the worker's."""
    ours, theirs = multiprocess.Pipe()
    return Link(ours), Link(theirs, blocks=True)


@pytest.fixture(params=["socket", "portable"] if hasattr(os, "fork") else ["portable"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Link, Link]]:
    """Both ends of a pipe."""
    monkeypatch.setattr(module, "PORTABLE", request.param == "portable")
    link, theirs = pipe()
    yield link, theirs
    link.close()
    theirs.close()


def received(link: Link, count: int) -> list[Any]:
    """The next messages, once they have come."""
    while len(link.inbox) < count and not link.ended:
        link.read()
    return [link.inbox.popleft() for _ in range(len(link.inbox))]


def contents(message: Any) -> list[bytes | tuple[int, int]]:
    return [bytes(message.content), *[part if isinstance(part, tuple) else bytes(part) for part in message.buffers]]


def test_a_message_arrives_with_its_buffers_in_order(ends: tuple[Link, Link]) -> None:
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


@pytest.mark.skipif(not hasattr(socket, "recv_fds"), reason="descriptors are passed on POSIX only")
def test_descriptors_come_with_their_messages_however_many_are_read_at_once() -> None:
    ours, theirs = pipe()
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
    ours.close()
    theirs.close()


def test_a_segment_is_known_by_its_name_or_by_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[bytes, int, int, bytes, bool]] = []
    link, theirs = pipe()

    def send(kind: bytes, run: int, seq: int, content: bytes, descriptor: int | None = None) -> None:
        sent.append((kind, run, seq, content, descriptor is not None))

    monkeypatch.setattr(link, "send", send)
    link.send_segment(SimpleNamespace(number=3, nbytes=4096, name=None, fd=9))  # type: ignore[arg-type]
    link.send_segment(SimpleNamespace(number=3, nbytes=64, name="/x", fd=9), HEARTBEAT, 5)  # type: ignore[arg-type]
    assert sent == [(SEGMENT, 3, 4096, b"", True), (HEARTBEAT, 5, 64, b"/x", False)]
    link.close()
    theirs.close()


SIZES = [0, 1, CHUNK // 2, CHUNK - 8, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


def test_messages_of_any_size_arrive_in_their_order(ends: tuple[Link, Link]) -> None:
    link, theirs = ends
    sizes = [size for _ in range(3) for size in SIZES] + [7] * 500
    data = [os.urandom(size) for size in sizes]

    def send() -> None:
        for one, other in zip(data, reversed(data), strict=True):
            places = [(-1, len(other)), (64, 8)]
            theirs.send(RESULTS, content=one, places=places, buffers=[np.frombuffer(other, np.uint8).data])

    sender = threading.Thread(target=send)
    sender.start()
    messages = received(link, len(sizes))
    sender.join()
    assert [contents(message) for message in messages] == [
        [one, other, (64, 8)] for one, other in zip(data, data[::-1], strict=True)
    ]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs a socket that does not block")
def test_what_the_pipe_does_not_take_waits_in_the_outbox_and_goes_later() -> None:
    link, theirs = pipe()
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
    link.close()
    theirs.close()


def test_the_end_of_the_worker_is_noticed_after_its_last_message(ends: tuple[Link, Link]) -> None:
    link, theirs = ends
    theirs.send(RESULTS, content=b"last")
    theirs.close()
    assert [contents(message) for message in received(link, 2)] == [[b"last"]]
    assert link.ended
    link.send(RESULTS, content=b"to nobody")
    assert not link.outbox


class Handle:
    """What `Poller` needs of a worker."""

    def __init__(self) -> None:
        self.link, self.theirs = pipe()
        self.end, self._alive = multiprocess.Pipe(duplex=False)
        self.sentinel = self.end.fileno()

    def die(self) -> None:
        self._alive.close()

    def close(self) -> None:
        for one in (self.link, self.theirs, self.end, self._alive):
            one.close()


@pytest.fixture
def polled() -> Iterator[tuple[Poller, list[Handle], Any]]:
    """A poller, the two workers that it looks at, and what wakes it."""
    made = [Handle(), Handle()]
    waker, bell = multiprocess.Pipe(duplex=False)
    yield Poller(made, waker), made, bell
    for one in (*made, waker, bell):
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
    workers[0].die()
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
