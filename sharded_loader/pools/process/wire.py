"""Messages on the pipe between the main process and a worker: the same bytes at both ends.

    message = head frame, then one frame per buffer that is sent
    head frame = number of buffers, (offset, size) of each, head        offset -1: its frame follows

A frame is one message of `multiprocess.connection`. A buffer with an offset lies in the slot of the task and is not
sent. A descriptor (POSIX) follows its message. These functions block: they are the worker's end, and the portable link.

What can go wrong: the other end is gone (EOFError, OSError).
"""

from __future__ import annotations

import array
import errno
import os
import socket
import struct
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of a send: a worker that is gone is an error here, also where the user has SIGPIPE end the program."""

Places = Sequence[tuple[int, int]]
"""Offset and size of each buffer of a message; offset -1: it is sent."""

Buffers = Sequence[memoryview]

_COUNT = struct.Struct("!I")
_PLACE = struct.Struct("!qq")
NO_PLACES = _COUNT.pack(0)
"""How the head frame of a message without buffers begins."""


@dataclass(slots=True)
class Message:
    """A pickle and the buffers that it refers to; or several replies, one behind the other.

    Attributes:
        head: kind, run, seq and the content.
        buffers: one per out-of-band buffer: its bytes, or (offset, size) in the slot that belongs to the task.
    """

    head: Any
    buffers: deque[Any]


def head_frame(head: bytes, places: Places) -> bytes:
    """The first frame of a message: offset and size of each buffer, then the head. Offset -1: a frame follows."""
    if not places:
        return NO_PLACES + head
    return b"".join([_COUNT.pack(len(places)), *[_PLACE.pack(*place) for place in places], head])


def read_head(frame: Any) -> tuple[list[Any], memoryview]:
    """Offset and size of each buffer, and the head."""
    (count,) = _COUNT.unpack_from(frame)
    if not count:
        return [], memoryview(frame)[_COUNT.size :]
    end = _COUNT.size + _PLACE.size * count
    return list(_PLACE.iter_unpack(memoryview(frame)[_COUNT.size : end])), memoryview(frame)[end:]


def piped(buffers: Buffers) -> list[tuple[int, int]]:
    """The places of buffers that are all sent through the pipe."""
    return [(-1, buffer.nbytes) for buffer in buffers]


def send_message(conn: Any, head: bytes, places: Places, buffers: Buffers) -> None:
    """Send a message through a blocking connection (the worker's end)."""
    conn.send_bytes(head_frame(head, places))
    for buffer in buffers:
        conn.send_bytes(buffer)


def receive_message(conn: Any) -> Message:
    """Receive a message from a blocking connection; EOFError or OSError when the other end is gone."""
    places, head = read_head(conn.recv_bytes())
    buffers: deque[Any] = deque()
    for offset, size in places:
        if offset >= 0:
            buffers.append((offset, size))
            continue
        buffer = np.empty(size, np.uint8)
        # A buffer of size 0 cannot be given to recv_bytes_into, but its frame has to be read.
        if size:
            conn.recv_bytes_into(buffer)
        else:
            conn.recv_bytes()
        buffers.append(buffer)
    return Message(head, buffers)


def receive_descriptor(conn: Any) -> int:
    """The descriptor that the other end sent after its last message.

    Raises:
        EOFError: the other end is gone.
        OSError: this process may have no more descriptors. The stream is in order all the same.
    """
    end = socket.socket(fileno=conn.fileno())  # no second descriptor: there may be none
    try:
        end.setblocking(True)  # whatever the user's socket.setdefaulttimeout says
        data, descriptors, _, _ = socket.recv_fds(end, 1, 1)
    finally:
        end.detach()
    if not data:
        raise EOFError
    if not descriptors:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return descriptors[0]


def send_descriptors(end: socket.socket, data: bytes, descriptors: Sequence[int]) -> int:
    """`socket.send_fds`, which (up to Python 3.11 at least) forgets its flags; how many bytes went."""
    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors)
    return end.sendmsg([data], [rights], NO_SIGNAL)
