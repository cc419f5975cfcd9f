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

from sharded_loader.engine.messages import Task, task_of
from sharded_loader.pools.process.link import (
    BOARD,
    CANCEL,
    CHUNK,
    RESULTS,
    SEGMENT,
    TASKS,
    TASKS_HEAD,
    Link,
    Poller,
    PortableLink,
    SocketLink,
    head_frame,
    pack_head,
    pack_tasks,
    piped,
    read_head,
    receive_descriptor,
    receive_message,
    send_descriptors,
    send_message,
    unpack_head,
    unpack_tasks,
)

LINKS = [SocketLink, PortableLink] if hasattr(os, "fork") else [PortableLink]


def test_a_head_tells_kind_run_and_number() -> None:
    kind, run, seq, content = unpack_head(pack_head(CANCEL, 3, 2**40, b"rest"))
    assert (kind, run, seq, bytes(content)) == (CANCEL, 3, 2**40, b"rest")


@pytest.mark.parametrize(
    "shards",
    [([1, 2], [3]), (["a", ("b", 1)],), (np.array([5, 2**40]),), ([2**70],)],
    ids=["shards", "keys", "array", "large"],
)
def test_tasks_arrive_as_they_were_sent(shards: tuple[Any, ...]) -> None:
    sent = Task(1, 2, 3, 4, shards, len(shards) > 1, careful=True)
    kind, _, _, content = unpack_head(TASKS_HEAD + pack_tasks([(None, sent, None), (None, sent._replace(seq=9), None)]))
    first, second = unpack_tasks(content)
    assert kind == TASKS
    assert (first[:3], second[:2]) == ((1, 2, None), (1, 9))
    got = task_of(first[3])
    assert [list(shard) for shard in got.shards] == [list(shard) for shard in shards]
    assert got._replace(shards=()) == sent._replace(shards=())


def test_indices_that_came_as_an_array_may_be_written_to() -> None:
    _, _, _, content = unpack_head(TASKS_HEAD + pack_tasks([(None, Task(0, 0, 0, 0, (np.arange(3),), False), None)]))
    (indices,) = task_of(unpack_tasks(content)[0][3]).shards
    indices += 1
    assert indices.tolist() == [1, 2, 3]


@pytest.mark.parametrize("places", [[], [(-1, 7)], [(64, 8), (-1, 0), (2**40, 2**33)]], ids=len)
def test_a_head_frame_tells_the_places_of_the_buffers(places: list[tuple[int, int]]) -> None:
    found, head = read_head(head_frame(b"head", places))
    assert ([tuple(place) for place in found], bytes(head)) == (places, b"head")


def test_buffers_that_are_all_sent_have_the_offset_minus_one() -> None:
    assert piped([memoryview(b"abc"), memoryview(b"")]) == [(-1, 3), (-1, 0)]


def test_a_message_arrives_with_its_buffers_in_order() -> None:
    ours, theirs = multiprocess.Pipe()
    head = pack_head(CANCEL, 3, 2**40, b"rest")
    send_message(ours, head, [(-1, 3), (8, 9), (-1, 0)], [memoryview(b"abc"), memoryview(b"")])
    message = receive_message(theirs)
    assert (message.kind, message.run, message.seq) == (CANCEL, 3, 2**40)
    assert contents(message) == [b"rest", b"abc", (8, 9), b""]
    ours.close()
    with pytest.raises(EOFError):
        receive_message(theirs)
    theirs.close()


@pytest.mark.skipif(not hasattr(socket, "recv_fds"), reason="descriptors are passed on POSIX only")
def test_a_descriptor_follows_its_message() -> None:
    ours, theirs = multiprocess.Pipe()
    reader, writer = os.pipe()
    with socket.socket(fileno=os.dup(ours.fileno())) as end:
        assert send_descriptors(end, b"\0", [writer]) == 1
    received = receive_descriptor(theirs)
    os.close(writer)
    os.write(received, b"x")
    assert os.read(reader, 1) == b"x"
    os.close(received)
    assert os.read(reader, 1) == b""
    os.close(reader)
    ours.close()
    with pytest.raises(EOFError):
        receive_descriptor(theirs)
    theirs.close()


def test_a_segment_is_known_by_its_name_or_by_a_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[tuple[bytes, int, int, bytes, bool]] = []
    link = PortableLink(None)

    def send(head: bytes, descriptor: int | None = None) -> None:
        kind, run, seq, content = unpack_head(head)
        sent.append((kind, run, seq, bytes(content), descriptor is not None))

    monkeypatch.setattr(link, "send", send)
    link.send_segment(SimpleNamespace(number=3, nbytes=4096, name=None, fd=9))  # type: ignore[arg-type]
    link.send_segment(SimpleNamespace(number=3, nbytes=64, name="/x", fd=9), BOARD, 5)  # type: ignore[arg-type]
    assert sent == [(SEGMENT, 3, 4096, b"", True), (BOARD, 5, 64, b"/x", False)]


@pytest.fixture(params=LINKS)
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[Link, Any]]:
    """A link, and the worker's end of its pipe."""
    ours, theirs = multiprocess.Pipe()
    link = request.param(ours)
    yield link, theirs
    link.close()
    theirs.close()


def received(link: Link, count: int) -> list[Any]:
    """The next messages, once they have come."""
    while len(link.inbox) < count and not link.ended:
        link.receive()
    return [link.inbox.popleft() for _ in range(len(link.inbox))]


def head(content: bytes = b"") -> bytes:
    """The head of some message."""
    return pack_head(RESULTS, content=content)


def contents(message: Any) -> list[bytes | tuple[int, int]]:
    return [bytes(message.content), *[part if isinstance(part, tuple) else bytes(part) for part in message.buffers]]


SIZES = [0, 1, CHUNK // 2, CHUNK - 8, CHUNK, CHUNK + 1, 3 * CHUNK + 5]


@pytest.mark.parametrize("size", SIZES)
def test_a_message_of_any_size_arrives(ends: tuple[Link, Any], size: int) -> None:
    link, theirs = ends
    data = os.urandom(size)
    buffer = np.frombuffer(os.urandom(size), np.uint8)
    sender = threading.Thread(target=send_message, args=(theirs, head(data), [(-1, size), (64, 8)], [buffer.data]))
    sender.start()
    (message,) = received(link, 1)
    sender.join()
    assert contents(message) == [data, buffer.tobytes(), (64, 8)]


def test_many_messages_keep_their_order(ends: tuple[Link, Any]) -> None:
    link, theirs = ends
    sizes = [size for _ in range(3) for size in SIZES] + [7] * 500

    def send() -> None:
        for number, size in enumerate(sizes):
            send_message(theirs, head(str(number).encode()), [(-1, size)], [memoryview(bytes([number % 251]) * size)])

    sender = threading.Thread(target=send)
    sender.start()
    messages = received(link, len(sizes))
    sender.join()
    assert [contents(message) for message in messages] == [
        [str(number).encode(), bytes([number % 251]) * size] for number, size in enumerate(sizes)
    ]


def test_what_was_received_may_be_written_to(ends: tuple[Link, Any]) -> None:
    link, theirs = ends
    send_message(theirs, head(), [(-1, 4)], [memoryview(b"abcd")])
    (message,) = received(link, 1)
    array = np.frombuffer(message.buffers[0], np.uint8)
    array += 1
    assert array.tobytes() == b"bcde"


def test_what_the_pipe_does_not_take_waits_in_the_outbox_and_goes_later() -> None:
    if SocketLink not in LINKS:
        pytest.skip("needs a socket that does not block")
    ours, theirs = multiprocess.Pipe()
    link = SocketLink(ours)
    large = os.urandom(4 << 20)
    link.send(head(b"first"), [memoryview(large)])
    link.send(head(b"second"))
    assert link.outbox
    got: list[Any] = []
    receiver = threading.Thread(target=lambda: got.extend(receive_message(theirs) for _ in range(2)))
    receiver.start()
    while link.outbox:
        link.flush()
    receiver.join()
    assert [contents(message) for message in got] == [[b"first", large], [b"second"]]
    link.close()
    theirs.close()


def test_the_end_of_the_worker_is_noticed_after_its_last_message(ends: tuple[Link, Any]) -> None:
    link, theirs = ends
    send_message(theirs, head(b"last"), (), ())
    theirs.close()
    assert [contents(message) for message in received(link, 2)] == [[b"last"]]
    assert link.ended
    link.send(head(b"to nobody"))


class Handle:
    """What `Poller` needs of a worker."""

    def __init__(self) -> None:
        ours, self.theirs = multiprocess.Pipe()
        self.link = SocketLink(ours) if SocketLink in LINKS else PortableLink(ours)
        self.end, self._alive = multiprocess.Pipe(duplex=False)
        self.sentinel = self.end.fileno()

    def die(self) -> None:
        self._alive.close()

    def close(self) -> None:
        for one in (self.link, self.theirs, self.end, self._alive):
            one.close()


@pytest.fixture
def workers() -> Iterator[list[Handle]]:
    made = [Handle(), Handle()]
    yield made
    for worker in made:
        worker.close()


@pytest.mark.skipif(SocketLink not in LINKS, reason="sentinels are workers there")
def test_a_poller_tells_who_is_ready_who_has_ended_and_when_it_is_woken(workers: list[Handle]) -> None:
    waker, bell = multiprocess.Pipe(duplex=False)
    poller = Poller(workers, waker)
    assert poller.wait(0.0) == ([], set())
    send_message(workers[1].theirs, head(b"x"), (), ())
    assert poller.wait() == ([workers[1]], set())
    workers[1].link.receive()
    bell.send_bytes(b"")
    assert poller.wait() == ([], set())
    assert poller.wait(0.0) == ([], set()), "what the waker was sent is taken out"
    workers[0].die()
    assert poller.wait() == ([], {workers[0].sentinel})
    waker.close()
    bell.close()


@pytest.mark.skipif(SocketLink not in LINKS, reason="needs a socket that does not block")
def test_a_poller_tells_when_more_can_be_sent(workers: list[Handle]) -> None:
    waker, bell = multiprocess.Pipe(duplex=False)
    poller, (worker, _) = Poller(workers, waker), workers
    worker.link.send(head(), [memoryview(bytes(4 << 20))])
    assert poller.wait(0.0) == ([], set())
    receiver = threading.Thread(target=receive_message, args=(worker.theirs,))
    receiver.start()
    while worker.link.outbox:
        assert poller.wait(120.0) == ([worker], set())
        worker.link.flush()
    receiver.join()
    assert poller.wait(0.0) == ([], set()), "nothing waits to be sent any more"
    waker.close()
    bell.close()
