"""The bytes on the pipe: what one end writes the other end reads."""

from __future__ import annotations

import os
import socket

import multiprocess
import pytest

from sharded_loader.pools.process.wire import (
    NO_PLACES,
    head_frame,
    piped,
    read_head,
    receive_descriptor,
    receive_message,
    send_descriptors,
    send_message,
)


@pytest.mark.parametrize("places", [[], [(-1, 7)], [(64, 8), (-1, 0), (2**40, 2**33)]], ids=len)
def test_a_head_frame_tells_the_places_of_the_buffers(places: list[tuple[int, int]]) -> None:
    found, head = read_head(head_frame(b"head", places))
    assert ([tuple(place) for place in found], bytes(head)) == (places, b"head")


def test_a_head_frame_without_buffers_begins_with_no_places() -> None:
    assert head_frame(b"head", []) == NO_PLACES + b"head"


def test_buffers_that_are_all_sent_have_the_offset_minus_one() -> None:
    assert piped([memoryview(b"abc"), memoryview(b"")]) == [(-1, 3), (-1, 0)]


def test_a_message_arrives_with_its_buffers_in_order() -> None:
    ours, theirs = multiprocess.Pipe()
    send_message(ours, b"head", [(-1, 3), (8, 9), (-1, 0)], [memoryview(b"abc"), memoryview(b"")])
    message = receive_message(theirs)
    first, second, third = message.buffers
    assert (bytes(message.head), bytes(first), second, bytes(third)) == (b"head", b"abc", (8, 9), b"")
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
