"""The pipe between the main process and one worker process: its messages, and both ends of it.

    message = kind, run, seq, number of buffers, bytes of content; (offset, size) of each buffer; content; buffers

    TASKS            pickled list of tasks, each with its slot             main process -> worker
    CANCEL  run                             do not begin the tasks of this run
    HEARTBEAT        row, size, name        memory of its heartbeat (`engine.heartbeat`); or a descriptor, no name
    GUARD            name: parent guard, a pipe whose closing kills the worker; likewise
    STACKS  run         write what is read, and the user's stacks, to stderr; 1: and end
    FLUSH            send finished results now: the consumer waits for them while the worker still reads
    LEAVE            end after the tasks that came before
    SEGMENT          number, size, name     shared memory; likewise
    JOB              pickled Job; its buffers lie in the preceding segment, or follow. A forked worker has it: begin
    READY                                                         worker -> main process: it has its dataset
    FAILED           pickled EncodedError   it could not take the job
    GROWN   bytes, batches                  it exceeds its memory limit after this many batches
    TOUCH            slot that the worker has not written yet: touch its pages
    SLOT    run, seq, bytes                 its batch needs a slot of this size; it waits for the slot, or None
    RESULTS          of each: run, seq, pickled reply; its buffers lie in the task's slot, or follow

Cheap batches share messages: a system call, and waking the other process, costs more than a small batch
(`engine.messages`). A buffer with an offset lies in the task's slot and is not sent; others have offset -1.

Both ends are a `Link`. The worker's end blocks. The main process's must not: two processes that send 400 KB each
through one duplex pipe would wait for each other forever. Unsent data waits in `outbox`, partial messages in the link.

`PortableSocket` sends the same bytes through a ``Connection``: on Windows, without ``poll``, and with
``SHARDED_LOADER_PORTABLE=1``. Its sends block until the worker's receiver thread, which does nothing else, has taken
them. It passes no descriptors, so memory has names (`memory.segments`).

What can go wrong: the other end is gone (`ended`). An exception between a system call and the bookkeeping for it leaves
the stream at an unknown position; the pipeline then closes the pool.
Ownership: messages in `inbox` belong to the code that decodes them; data in `outbox` must stay unchanged until sent.
"""

from __future__ import annotations

import array
import contextlib
import errno
import math
import os
import select
import socket
import struct
import sys
import weakref
from collections import deque
from collections.abc import Generator, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sharded_loader.base.system import PORTABLE, after_fork
from sharded_loader.memory.segments import Segment

NAME = "sharded_loader-worker"
"""Prefix of the process names of workers, before their numbers."""

CHUNK = 65536
"""Bytes per read: two batches that go through the pipe, or hundreds of small ones."""

TASKS, CANCEL, SEGMENT, JOB, READY, FAILED, RESULTS = b"T", b"C", b"S", b"J", b"Y", b"F", b"R"
HEARTBEAT, GUARD, STACKS, LEAVE, GROWN, FLUSH, SLOT, TOUCH = b"B", b"D", b"P", b"L", b"G", b"U", b"A", b"O"

SLOT_BYTES = 4096
"""Smaller batches go through the pipe: the copies that a slot saves cost less than its bookkeeping.

Time per batch with a slot, as a share of the time without one: 1.12 at 2.3 KB, 0.9 at 4.6, 0.8 at 7, 0.67 at 18."""

HANDLES, TURN = 63, 0.002
"""Handles that Windows waits for at once. From 32 workers on there are more, which take turns, in seconds."""

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Send flag that makes a dead worker an error, even if SIGPIPE would end the program."""

_HEADER = struct.Struct("!cqqIQ")
_BUFFER_ENTRY = struct.Struct("!qq")


class Message(NamedTuple):
    """A pickle with its out-of-band buffers, or several replies in a row.

    ``buffers`` holds bytes, or (offset, size) in the task's slot.
    """

    kind: bytes
    run: int
    seq: int
    content: memoryview
    buffers: deque[Any]


def _parse(inbox: deque[Message]) -> Generator[int, Any, None]:
    """Assemble messages: a generator that yields the size of the next part, and is sent the part."""
    while True:
        kind, run, seq, count, size = _HEADER.unpack((yield _HEADER.size))
        places = _BUFFER_ENTRY.iter_unpack((yield _BUFFER_ENTRY.size * count)) if count else ()
        message = Message(kind, run, seq, memoryview((yield size)), deque())
        for offset, nbytes in places:
            message.buffers.append((offset, nbytes) if offset >= 0 else (yield nbytes))
        inbox.append(message)


def send_descriptors(end: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """Return the bytes sent: `socket.send_fds`, which ignores its flags up to Python 3.11 at least."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return end.sendmsg([data], [rights] if descriptors else [], NO_SIGNAL)


class Link:
    """One end of the pipe to a worker. Takes over ``conn``.

    Attributes:
        inbox: complete messages.
        outbox: unsent data, each with a descriptor to send along.
        ended: the other end is closed.
        segments: number of arena segments that the worker was sent.
    """

    live: ClassVar[weakref.WeakSet[Link]] = weakref.WeakSet()
    """All open links of this process."""

    def __init__(self, conn: Any, *, blocks: bool = False) -> None:
        self.inbox: deque[Message] = deque()
        self.outbox: deque[tuple[memoryview, int | None]] = deque()
        self.ended = False
        self.segments = 0
        self._blocks = blocks
        self._chunk = bytearray(CHUNK)
        self._filled = 0  # unparsed bytes in the chunk
        self._missing: memoryview | None = None  # missing rest of a large part
        self._large_part: np.ndarray[Any, Any] | None = None  # memory of that part
        self._parser = _parse(self.inbox)
        self._wanted = next(self._parser)
        self._descriptors: deque[int] = deque()
        if PORTABLE:
            self._socket: Any = PortableSocket(conn, blocks)
        else:
            self._socket = socket.socket(fileno=os.dup(conn.fileno()))
            conn.close()
            self._socket.setblocking(blocks)  # overrides the user's socket.setdefaulttimeout
        Link.live.add(self)

    @property
    def waitable(self) -> Any:
        return self._socket.conn if PORTABLE else self._socket.fileno()

    def send(
        self,
        kind: bytes = b"",
        run: int = 0,
        seq: int = 0,
        content: bytes | memoryview = b"",
        *,
        buffers: Sequence[memoryview] = (),
        places: Sequence[tuple[int, int]] = (),
        descriptor: int | None = None,
    ) -> None:
        """Send a message behind waiting data, as far as possible now. `read` notices if the other end is gone.

        Without ``kind`` only waiting data is sent. ``places`` are (offset, size) of all buffers, if not all are sent
        (see `Encoded`). ``descriptor`` is sent along, and stays open here.
        """
        outbox = self.outbox
        if kind:
            sent, table = iter(buffers), []
            for offset, nbytes in places or [(-1, 0)] * len(buffers):
                table.append(_BUFFER_ENTRY.pack(offset, nbytes if offset >= 0 else next(sent).nbytes))
            head = _HEADER.pack(kind, run, seq, len(table), len(content))
            # One write: two system calls would wake the other end twice.
            outbox.append((memoryview(b"".join([head, *table, content])), descriptor))
            for buffer in buffers:
                if buffer.nbytes:
                    outbox.append((buffer.cast("B"), None))
        while outbox:
            data, descriptor = outbox[0]
            try:
                if descriptor is None:
                    count = self._socket.send(data, NO_SIGNAL)
                else:
                    count = send_descriptors(self._socket, data, [descriptor])
            except BlockingIOError:
                break
            except OSError as error:
                # Temporary: no memory, or too many descriptors are in flight to workers that have not taken them yet.
                if error.errno not in (errno.ENOBUFS, errno.ENOMEM, getattr(errno, "ETOOMANYREFS", None)):
                    outbox.clear()
                elif self._blocks:
                    raise  # in a worker, which another one replaces
                break
            if count == data.nbytes:
                outbox.popleft()
            else:
                outbox[0] = data[count:], None

    def send_segment(self, segment: Segment, kind: bytes = SEGMENT, number: int | None = None) -> None:
        """Share a segment with the worker; ``number`` replaces the segment's own."""
        name = (segment.name or "").encode()
        number = segment.number if number is None else number
        self.send(kind, number, segment.nbytes, name, descriptor=None if segment.name else segment.fd)

    def read(self) -> bool:
        """Read once into `inbox`; sets `ended` when the other end is closed. Return True if there may be more."""
        target = memoryview(self._chunk)[self._filled :] if self._missing is None else self._missing
        try:
            count = self._read(target)
        except BlockingIOError:
            return False
        except (OSError, EOFError):
            count = 0
        if not count:
            self.ended = True
            return False
        if self._missing is None:
            self._filled += count
            self._take_parts()
        elif count == self._missing.nbytes:
            whole, self._missing, self._large_part = self._large_part, None, None
            self._wanted = self._parser.send(whole)
            self._take_parts()
        else:
            self._missing = target[count:]
        # A ``Connection`` gives one message at a time. What the dead have sent is taken before they are replaced.
        return count == target.nbytes or (PORTABLE and not self._blocks)

    def _read(self, target: memoryview) -> int:
        if self._blocks and not PORTABLE:
            with contextlib.suppress(OSError):  # a sandbox may refuse recvmsg; a broken socket is noticed below
                # On Linux data behind a descriptor takes another read.
                count, ancillary, flags, _ = self._socket.recvmsg_into([target], socket.CMSG_SPACE(4))
                for _, _, data in ancillary:
                    self._descriptors.extend(array.array("i", data))
                if flags & socket.MSG_CTRUNC:
                    self._descriptors.append(-1)  # descriptor limit of this process
                return int(count)
        return int(self._socket.recv_into(target))

    def take_descriptor(self) -> int:
        """Return the descriptor that came with the message. OSError if this process may have no more of them."""
        descriptor = self._descriptors.popleft()
        if descriptor < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def _take_parts(self) -> None:
        """Pass complete parts in the chunk to the parser. A part larger than the chunk gets its own memory."""
        chunk, begin, filled = self._chunk, 0, self._filled
        while (end := begin + self._wanted) <= filled:
            part = chunk[begin:end]
            begin = end
            self._wanted = self._parser.send(part)
        if self._wanted > CHUNK:
            self._large_part = np.empty(self._wanted, np.uint8)
            self._large_part.data[: filled - begin] = memoryview(chunk)[begin:filled]
            self._missing = self._large_part.data[filled - begin :]
            begin = filled
        chunk[: filled - begin] = chunk[begin:filled]
        self._filled = filled - begin

    def close(self) -> None:
        """Close this end. The other one sees end-of-file."""
        Link.live.discard(self)
        self.outbox.clear()
        self._socket.close()


@after_fork
def _close_all() -> None:
    """Close the parent's links in a forked child, a worker or the user's own.

    End-of-file signals to each side that the other is gone, and never comes while a relative holds the other end.
    """
    for link in list(Link.live):
        link.close()


class PortableSocket:
    """The part of a socket's interface that `Link` needs, over a ``Connection``, which it takes over."""

    def __init__(self, conn: Any, blocks: bool) -> None:
        self.conn, self._blocks, self._rest = conn, blocks, memoryview(b"")

    def send(self, data: memoryview, flags: int) -> int:
        self.conn.send_bytes(data)
        return data.nbytes

    def recv_into(self, target: memoryview) -> int:
        if not self._rest:
            if not self._blocks and not self.conn.poll():
                raise BlockingIOError
            self._rest = memoryview(self.conn.recv_bytes())
        count = min(self._rest.nbytes, target.nbytes)
        target[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        self.conn.close()


def wait_for_any(watched: Sequence[Any], timeout: float | None) -> list[Any]:
    """Wait for connections and sentinels, and return those that are ready. On Windows many take turns."""
    from multiprocessing import connection  # not needed by spawned workers

    if sys.platform != "win32" or len(watched) <= HANDLES:
        return connection.wait(watched, timeout)
    found, left = list[Any](), math.inf if timeout is None else timeout
    while True:
        for begin in range(0, len(watched), HANDLES):
            found += connection.wait(watched[begin : begin + HANDLES], max(0.0, min(TURN, left)))
            left -= TURN
        if found or left <= 0:
            return found


class Poller:
    """Waits for messages of workers, for their ends, and for the waker, a pipe written to by other threads."""

    def __init__(self, workers: Sequence[Any], waker: Any) -> None:
        self.workers, self._waker = list(workers), waker
        self._sentinels = {worker.sentinel for worker in workers}
        self._by_waitable = {worker.link.waitable: worker for worker in workers}
        if not PORTABLE:
            self._poller = select.poll()
            for number in (*self._by_waitable, *self._sentinels, waker.fileno()):
                self._poller.register(number, select.POLLIN)

    def wait(self, timeout: float | None = None) -> tuple[list[Any], set[int]]:
        """Wait for a readable link (or a writable one, with unsent data), the end of a worker, or the waker.

        Returns:
            The workers whose links are ready, and the sentinels of the workers that have ended.
        """
        ready: list[Any] = []
        ended: set[int] = set()
        if PORTABLE:
            watched = [*self._by_waitable, self._waker, *self._sentinels]
            found: Sequence[Any] = [(one, 0) for one in wait_for_any(watched, timeout)]
        else:
            for number, worker in self._by_waitable.items():
                self._poller.modify(number, select.POLLIN | (select.POLLOUT if worker.link.outbox else 0))
            found = self._poller.poll(None if timeout is None else 1000 * timeout)
        for one, _ in found:
            if one in self._by_waitable:
                ready.append(self._by_waitable[one])
            elif one in self._sentinels:
                ended.add(one)
            else:
                while self._waker.poll():  # drain the wake-up messages
                    self._waker.recv_bytes()
        return ready, ended
