"""The pipe between the main process and one worker process: its messages, and both ends of it.

    message = kind, run, seq, number of buffers, bytes of content; (offset, size) of each buffer; content; buffers

    TASKS            pickled list of tasks, each with its slot             main process -> worker
    CANCEL  run                             do not begin the tasks of this run
    HEARTBEAT        row, size, name        memory in which the worker records its step (`engine.heartbeat`); without a
                     name a descriptor comes along
    DEATH            name: the worker dies when the other end of that pipe is closed; likewise
    STACKS  run         write what is read, and the user's stacks, to stderr. 1: and end
    FLUSH            send what is finished now: the consumer waits for it, and the worker still reads what comes after
    LEAVE            end when the tasks that came before are done
    SEGMENT          number, size, name     shared memory; likewise
    JOB              pickled Job; its buffers lie in the segment that came before, or follow. To a forked worker,
                     which has it: begin
    READY                                                         worker -> main process: it has its dataset
    FAILED           pickled EncodedError   it could not take the job
    GROWN   bytes, batches                  it takes more memory than it may, after this number of batches
    RESULTS          of each: run, seq, pickled reply; its buffers lie in the task's slot, or follow

A message carries several tasks or results where batches are cheap: a system call, and the waking of the other
process, costs more than a small batch (`engine.messages`). A buffer with an offset lies in the slot of the task and is
not sent; the offset of one that follows is -1.

Both ends are a `Link`. That of the worker blocks. That of the main process must not: two processes that both send
400 KB through one duplex pipe wait for each other for ever. What cannot be sent now waits in `outbox`, and what has
come in part waits in the link until the rest is there.

`PortableSocket` sends the same bytes through a ``Connection``: on Windows, where a pipe has no descriptor that could be
made non-blocking, and wherever there is no ``poll``. Its sends block until the worker's receiver thread has taken them,
which is soon: that thread does nothing else. ``SHARDED_LOADER_PORTABLE=1`` chooses it anywhere. It passes no
descriptors: memory has a name then (`memory.segments`).

What can go wrong: the other end is gone, which `read` notes in `ended`. An exception that strikes between a system
call and the note of what it did leaves the stream at an unknown place. The pipeline then closes the pool, and with it
the link.
Ownership: messages in `inbox` belong to the code that decodes them; what is in `outbox` must stay unchanged until sent.
"""

from __future__ import annotations

import array
import errno
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

from sharded_loader.base.system import PORTABLE
from sharded_loader.memory.segments import Segment

CHUNK = 65536
"""Bytes that a link reads at once: two batches that go through the pipe, or hundreds of small ones."""

TASKS, CANCEL, SEGMENT, JOB, READY, FAILED, RESULTS = b"T", b"C", b"S", b"J", b"Y", b"F", b"R"
HEARTBEAT, DEATH, STACKS, LEAVE, GROWN, FLUSH = b"B", b"D", b"P", b"L", b"G", b"U"

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of a send: a worker that is gone is an error here, also where the user has SIGPIPE end the program."""

_HEAD = struct.Struct("!cqqIQ")
_PLACE = struct.Struct("!qq")


class Message(NamedTuple):
    """A pickle and the buffers that it refers to; or several replies, one behind the other.

    Attributes:
        kind, run, seq: what the message is, and what it is about.
        content: the pickle, or the replies.
        buffers: one per out-of-band buffer: its bytes, or (offset, size) in the slot that belongs to the task.
    """

    kind: bytes
    run: int
    seq: int
    content: memoryview
    buffers: deque[Any]


def _parse(inbox: deque[Message]) -> Generator[int, Any, None]:
    """Put messages together out of parts: yields the size of the next one, and is sent it."""
    while True:
        kind, run, seq, count, size = _HEAD.unpack((yield _HEAD.size))
        places = _PLACE.iter_unpack((yield _PLACE.size * count)) if count else ()
        message = Message(kind, run, seq, memoryview((yield size)), deque())
        for offset, nbytes in places:
            message.buffers.append((offset, nbytes) if offset >= 0 else (yield nbytes))
        inbox.append(message)


def send_descriptors(end: socket.socket, data: bytes | memoryview, descriptors: Sequence[int]) -> int:
    """`socket.send_fds`, which (up to Python 3.11 at least) forgets its flags; how many bytes went."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    return end.sendmsg([data], [rights] if descriptors else [], NO_SIGNAL)


class Link:
    """One end of the pipe to a worker.

    Args:
        conn: the end of the pipe, which it takes over.
        blocks: `send` waits until all is sent, and `read` until something has come: the worker's end.

    Attributes:
        inbox: messages that have come completely.
        outbox: what waits to be sent, each with a descriptor that goes along.
        ended: the other end is closed.
        segments: how many segments of the arena the worker was sent.
    """

    live: ClassVar[weakref.WeakSet[Link]] = weakref.WeakSet()
    """Every open link of this process."""

    def __init__(self, conn: Any, *, blocks: bool = False) -> None:
        self.inbox: deque[Message] = deque()
        self.outbox: deque[tuple[memoryview, int | None]] = deque()
        self.ended = False
        self.segments = 0
        self._blocks = blocks
        self._chunk = bytearray(CHUNK)
        self._filled = 0  # bytes of the chunk that are not parsed yet
        self._large: memoryview | None = None  # what is still to come of a part that has memory of its own
        self._whole: np.ndarray[Any, Any] | None = None  # that part
        self._parser = _parse(self.inbox)
        self._wanted = next(self._parser)
        self._descriptors: deque[int] = deque()
        if PORTABLE:
            self._socket: Any = PortableSocket(conn, blocks)
        else:
            self._socket = socket.socket(fileno=os.dup(conn.fileno()))
            conn.close()
            self._socket.setblocking(blocks)  # whatever the user's socket.setdefaulttimeout says
        Link.live.add(self)

    @property
    def waitable(self) -> Any:
        """What `Poller` watches."""
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
        """Send a message, behind what waits, or as much as goes now. `read` notices if the other end is gone.

        Args:
            kind, run, seq, content: see `Message`; without a kind only what waits is sent.
            buffers: sent through the pipe.
            places: of the buffers, where not all of them are sent (see `Encoded`).
            descriptor: sent along; stays open here.
        """
        outbox = self.outbox
        if kind:
            sent, table = iter(buffers), []
            for offset, nbytes in places or [(-1, 0)] * len(buffers):
                table.append(_PLACE.pack(offset, nbytes if offset >= 0 else next(sent).nbytes))
            head = _HEAD.pack(kind, run, seq, len(table), len(content))
            # One write for all: two would be two system calls and wake the other end twice.
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
                # Not for ever: too many descriptors are on their way to workers that have not taken them yet.
                if error.errno != getattr(errno, "ETOOMANYREFS", None):
                    outbox.clear()
                break
            if count == data.nbytes:
                outbox.popleft()
            else:
                outbox[0] = data[count:], None

    def send_segment(self, segment: Segment, kind: bytes = SEGMENT, number: int | None = None) -> None:
        """Let the worker know a segment; ``number`` instead of the segment's own."""
        name = (segment.name or "").encode()
        number = segment.number if number is None else number
        self.send(kind, number, segment.nbytes, name, descriptor=None if segment.name else segment.fd)

    def read(self) -> bool:
        """Read once, and put what has come completely into `inbox`; `ended` is set when the other end is closed.

        Returns:
            Whether there may be more.
        """
        target = memoryview(self._chunk)[self._filled :] if self._large is None else self._large
        try:
            count = self._read(target)
        except BlockingIOError:
            return False
        except (OSError, EOFError):
            count = 0
        if not count:
            self.ended = True
            return False
        if self._large is None:
            self._filled += count
            self._take_parts()
        elif count == self._large.nbytes:
            whole, self._large, self._whole = self._whole, None, None
            self._wanted = self._parser.send(whole)
            self._take_parts()
        else:
            self._large = target[count:]
        return count == target.nbytes

    def _read(self, target: memoryview) -> int:
        """Read what is there into the target; how many bytes."""
        count: int
        if PORTABLE or not self._blocks:
            count = self._socket.recv_into(target)
            return count
        # On Linux the rest behind a descriptor is another read.
        count, ancillary, flags, _ = self._socket.recvmsg_into([target], socket.CMSG_SPACE(4))
        for _, _, data in ancillary:
            self._descriptors.extend(array.array("i", data))
        if flags & socket.MSG_CTRUNC:
            self._descriptors.append(-1)  # this process may have no more
        return count

    def take_descriptor(self) -> int:
        """The descriptor that came along with the message.

        Raises:
            OSError: this process may have no more descriptors.
        """
        descriptor = self._descriptors.popleft()
        if descriptor < 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return descriptor

    def _take_parts(self) -> None:
        """Give the parser what the chunk has of it. A part that is larger than the chunk gets memory of its own."""
        chunk, begin, filled = self._chunk, 0, self._filled
        while (end := begin + self._wanted) <= filled:
            part = chunk[begin:end]
            begin = end
            self._wanted = self._parser.send(part)
        if self._wanted > CHUNK:
            self._whole = np.empty(self._wanted, np.uint8)
            self._whole.data[: filled - begin] = memoryview(chunk)[begin:filled]
            self._large = self._whole.data[filled - begin :]
            begin = filled
        chunk[: filled - begin] = chunk[begin:filled]
        self._filled = filled - begin

    def close(self) -> None:
        """Close this end: the other one sees end-of-file."""
        Link.live.discard(self)
        self.outbox.clear()
        self._socket.close()


def _close_all() -> None:
    """In a forked child, worker or the user's own: the ends of its parent are not for it.

    A worker learns that the main process has gone by end-of-file, which never comes while a relative holds the
    other end. The main process learns so that a worker has gone.
    """
    for link in list(Link.live):
        link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)


class PortableSocket:
    """As much of a socket as `Link` needs, over a ``Connection``.

    Args:
        conn: the end of the pipe, which it takes over.
        blocks: see `Link`.
    """

    def __init__(self, conn: Any, blocks: bool) -> None:
        self.conn, self._blocks, self._rest = conn, blocks, memoryview(b"")

    def send(self, data: memoryview, flags: int) -> int:
        """Send all of the data."""
        self.conn.send_bytes(data)
        return data.nbytes

    def recv_into(self, target: memoryview) -> int:
        """What is there, as far as there is room."""
        if not self._rest:
            if not self._blocks and not self.conn.poll():
                raise BlockingIOError
            self._rest = memoryview(self.conn.recv_bytes())
        count = min(self._rest.nbytes, target.nbytes)
        target[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        """Close the connection."""
        self.conn.close()


class Poller:
    """Waits for workers: for what they send, for their ends, and for a thread that wakes the one that waits.

    Args:
        workers: of the workers; each has a ``link`` and a ``sentinel``.
        waker: the end of a pipe that is written to in order to wake.
    """

    def __init__(self, workers: Sequence[Any], waker: Any) -> None:
        self.workers, self._waker = list(workers), waker
        self._sentinels = {worker.sentinel for worker in workers}
        self._by_waitable = {worker.link.waitable: worker for worker in workers}
        if not PORTABLE:
            self._poller = select.poll()
            for number in (*self._by_waitable, *self._sentinels, waker.fileno()):
                self._poller.register(number, select.POLLIN)

    def wait(self, timeout: float | None = None) -> tuple[list[Any], set[int]]:
        """Block until a link can be read (or, with something unsent, written), a worker has ended, or the waker woke.

        Args:
            timeout: seconds, at most; None: no limit.

        Returns:
            The workers whose links are ready; the sentinels of the workers that have ended.
        """
        ready: list[Any] = []
        ended: set[int] = set()
        if PORTABLE:
            from multiprocessing import connection  # which a spawned worker does without

            watched = [*self._by_waitable, self._waker]
            # At most 63 handles on Windows: of many workers the end shows as end-of-file alone.
            if sys.platform != "win32" or len(watched) + len(self._sentinels) <= 63:
                watched += self._sentinels
            found: Sequence[Any] = [(one, 0) for one in connection.wait(watched, timeout)]
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
                while self._waker.poll():  # what it was sent: it woke this process
                    self._waker.recv_bytes()
        return ready, ended
