"""The pipe between the main process and one worker process: its messages, and both ends of it.

    message = head frame, then one frame per buffer that is sent
    head frame = number of buffers, (offset, size) of each, head        offset -1: its frame follows
    head = kind, run, seq, content

    TASKS            tasks, each with its slot (`pack_tasks`)              main process -> worker
    CANCEL  run                             do not begin the tasks of this run
    BOARD            offset, size, name     where the worker notes what it is at (`engine.board`); without a name a
                     descriptor follows
    DEATH            name: the worker dies when the other end of that pipe is closed; likewise
    STACKS  run         write what is read, and the user's stacks, to stderr. 1: and end
    FLUSH            send what is finished now: the consumer waits for it, and the worker still reads what comes after
    LEAVE            end when the tasks that came before are done
    SEGMENT          number, size, name     shared memory; likewise
    JOB              pickled NewJob; its buffers lie in the segment that came before, or follow. To a forked worker,
                     which has it: begin
    READY                                                         worker -> main process: it has its dataset
    FAILED           pickled EncodedError   it could not take the job
    CRASHED          text: a traceback      it ends, before it could take the job
    GROWN   bytes, batches                  it takes more memory than it may, after this number of batches
    RESULTS          of each: run, seq, pickled reply; its buffers lie in the task's slot, or follow

A message carries several tasks or results where batches are cheap: a system call, and the waking of the other
process, costs more than a small batch (`engine.grouping`).

A frame is one message of `multiprocess.connection`. A buffer with an offset lies in the slot of the task and is not
sent. A descriptor (POSIX) follows its message.

The worker's end is an ordinary connection that blocks (`send_message`, `receive_message`). The main process's end must
not block: two processes that both send 400 KB through one duplex pipe wait for each other for ever. So `SocketLink`
frames its own messages over a non-blocking socket. What cannot be sent now waits in `outbox`, and what has come in part
waits in the link until the rest is there.

`PortableLink` does the same with nothing but ``Connection``: on Windows, where a pipe has no descriptor that could be
made non-blocking, and wherever there is no ``poll``. Its sends block until the worker's receiver thread has taken them,
which is soon: that thread does nothing else. ``SHARDED_LOADER_PORTABLE=1`` chooses it anywhere.

What can go wrong: the other end is gone (at the worker's end EOFError or OSError; the links note it in `ended`). An
exception that strikes between a system call and the note of what it did leaves the stream at an unknown place. The
pipeline then closes the pool, and with it the link.
Ownership: frames in `inbox` belong to the code that decodes them; frames in `outbox` must stay unchanged until sent.
"""

from __future__ import annotations

import array
import errno
import os
import pickle
import select
import socket
import struct
import sys
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from sharded_loader.base.system import is_on
from sharded_loader.engine.messages import Task
from sharded_loader.memory.segments import Segment, Slot

PORTABLE = not hasattr(select, "poll") or is_on("SHARDED_LOADER_PORTABLE")

CHUNK = 65536
"""Bytes that a link reads at once: two batches that go through the pipe, or hundreds of small ones."""

TASKS, CANCEL, SEGMENT, JOB, READY, FAILED, RESULTS = b"T", b"C", b"S", b"J", b"Y", b"F", b"R"
BOARD, DEATH, STACKS, CRASHED, LEAVE, GROWN, FLUSH = b"B", b"D", b"P", b"X", b"L", b"G", b"U"

_HEAD = struct.Struct("!cqq")
TASKS_HEAD = _HEAD.pack(TASKS, 0, 0)

NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)
"""Flag of a send: a worker that is gone is an error here, also where the user has SIGPIPE end the program."""

Places = Sequence[tuple[int, int]]
"""Offset and size of each buffer of a message; offset -1: it is sent."""

Buffers = Sequence[memoryview]

# Of a frame, as `multiprocess.connection` writes it. -1: the long one follows.
_SIZE, _LONG_SIZE = struct.Struct("!i"), struct.Struct("!Q")
_COUNT = struct.Struct("!I")
_PLACE = struct.Struct("!qq")
_NO_PLACES = _COUNT.pack(0)
"""How the head frame of a message without buffers begins."""


# -- what is sent ------------------------------------------------------------------------------------------------------


def pack_head(kind: bytes, run: int = 0, seq: int = 0, content: bytes = b"") -> bytes:
    """The head of a message."""
    return _HEAD.pack(kind, run, seq) + content


def unpack_head(head: Any) -> tuple[bytes, int, int, memoryview]:
    """Kind, run, seq and the pickle of a head."""
    kind, run, seq = _HEAD.unpack_from(head)
    return kind, run, seq, memoryview(head)[_HEAD.size :]


def pack_tasks(tasks: Sequence[tuple[Slot | None, Task, bytes | None]]) -> bytes:
    """Tasks in one message.

    Args:
        tasks: each with its slot and, if its indices are the user's own objects, with its own pickle: one that
            cannot be read is that batch's error. The others go into one pickle: 1 us each, instead of 4.
    """
    packed = []
    for slot, task, own in tasks:
        fields: Any = own or tuple(task)
        if own is None and type(indices := task.shards[0]) is np.ndarray:
            # As bytes: a tenth of the time that an array takes.
            fields = (*task[:4], (indices.tobytes(),), *task[5:])
        packed.append((task.run, task.seq, None if slot is None else tuple(slot), fields))
    return pickle.dumps(packed, protocol=5)


def unpack_tasks(content: bytes | memoryview) -> list[tuple[int, int, tuple[int, int, int] | None, Any]]:
    """Of each task run, seq, the slot (segment, offset, size), and its fields or its pickle."""
    return pickle.loads(content)  # type: ignore[no-any-return]


@dataclass(slots=True)
class Message:
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


def head_frame(head: bytes, places: Places) -> bytes:
    """The first frame of a message: offset and size of each buffer, then the head. Offset -1: a frame follows."""
    if not places:
        return _NO_PLACES + head
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


# -- the worker's end --------------------------------------------------------------------------------------------------


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
    return Message(*unpack_head(head), buffers)


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


# -- the main process's end --------------------------------------------------------------------------------------------


class Link(ABC):
    """The main process's end of the pipe to one worker.

    Attributes:
        inbox: messages that have come completely.
        outbox: what waits to be sent.
        ended: the worker's end is closed.
    """

    live: ClassVar[weakref.WeakSet[Link]] = weakref.WeakSet()
    """Every open link of this process."""

    def __init__(self) -> None:
        self.inbox: deque[Message] = deque()
        self.outbox: deque[memoryview | int] = deque()
        self.ended = False
        Link.live.add(self)

    @property
    @abstractmethod
    def waitable(self) -> Any:
        """What `Poller` watches."""

    @abstractmethod
    def send(
        self, head: bytes, buffers: Buffers = (), *, places: Places | None = None, descriptor: int | None = None
    ) -> None:
        """Send a message, or as much of it as goes now. `receive` notices a worker that is gone.

        Args:
            head: kind, run, seq and content.
            buffers: sent through the pipe.
            places: of the buffers, where not all of them are sent (see `Encoded`).
            descriptor: sent along; stays open here.
        """

    def send_segment(self, segment: Segment, kind: bytes = SEGMENT, number: int | None = None) -> None:
        """Let the worker know a segment; ``number`` instead of the segment's own."""
        name = (segment.name or "").encode()
        number = segment.number if number is None else number
        self.send(pack_head(kind, number, segment.nbytes, name), descriptor=None if segment.name else segment.fd)

    @abstractmethod
    def flush(self) -> None:
        """Send more of what waits."""

    @abstractmethod
    def receive(self) -> None:
        """Put what has come completely into `inbox`; sets `ended` when the worker's end is closed."""

    @abstractmethod
    def close(self) -> None:
        """Close this end: the worker sees end-of-file."""


def _leave_to_the_main_process() -> None:
    """In a forked child, worker or the user's own: the main process's ends are not for it.

    A worker learns that the main process has gone by end-of-file, which never comes while a relative holds the
    other end.
    """
    for link in list(Link.live):
        link.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_main_process)


class SocketLink(Link):
    """A link over a non-blocking socket. Small frames are read many at a time, large ones into memory of their own."""

    def __init__(self, conn: Any) -> None:
        super().__init__()
        self._socket = socket.socket(fileno=os.dup(conn.fileno()))
        conn.close()
        self._socket.setblocking(False)
        self._chunk = bytearray(CHUNK)
        self._filled = 0  # bytes of the chunk that belong to no complete frame yet
        self._large: np.ndarray[Any, Any] | None = None
        self._rest = memoryview(b"")  # what is still to come of the large frame
        self._message: Message | None = None
        self._places: deque[tuple[int, int]] = deque()

    @property
    def waitable(self) -> Any:
        return self._socket.fileno()

    def send(
        self, head: bytes, buffers: Buffers = (), *, places: Places | None = None, descriptor: int | None = None
    ) -> None:
        if not buffers and not places:
            first = _NO_PLACES + head
        else:
            first = head_frame(head, piped(buffers) if places is None else places)
        for frame in (memoryview(first), *buffers):
            size = frame.nbytes
            prefix = _SIZE.pack(size) if size <= 0x7FFFFFFF else _SIZE.pack(-1) + _LONG_SIZE.pack(size)
            if size < 16384:
                # One write for a small frame: two would be two system calls and wake the worker twice.
                self.outbox.append(memoryview(prefix + bytes(frame)))
            else:
                self.outbox.extend((memoryview(prefix), frame.cast("B")))
        if descriptor is not None:
            self.outbox.append(descriptor)
        self.flush()

    def flush(self) -> None:
        while self.outbox:
            item = self.outbox[0]
            try:
                if isinstance(item, int):
                    sent = send_descriptors(self._socket, b"\0", [item])
                else:
                    sent = self._socket.send(item, NO_SIGNAL)
            except BlockingIOError:
                break
            except OSError as error:
                # Not for ever: too many descriptors are on their way to workers that have not taken them yet.
                if error.errno != getattr(errno, "ETOOMANYREFS", None):
                    self.outbox.clear()
                break
            if isinstance(item, int) or sent == item.nbytes:
                self.outbox.popleft()
            else:
                self.outbox[0] = item[sent:]

    def receive(self) -> None:
        while True:
            target = memoryview(self._chunk)[self._filled :] if self._large is None else self._rest
            try:
                count = self._socket.recv_into(target)
            except BlockingIOError:
                return
            except OSError:
                count = 0
            if count == 0:
                self.ended = True
                return
            if self._large is None:
                self._filled += count
                self._split()
            else:
                self._rest = target[count:]
                if not self._rest.nbytes:
                    frame, self._large = self._large, None
                    self._add(frame)
            if count < target.nbytes:
                return  # there was no more

    def _split(self) -> None:
        """Take the complete frames out of the chunk. A frame that is larger gets memory of its own."""
        chunk, begin, filled = self._chunk, 0, self._filled
        while filled - begin >= _SIZE.size:
            start = begin + _SIZE.size
            (size,) = _SIZE.unpack_from(chunk, begin)
            if size == -1:
                start += _LONG_SIZE.size
                if start > filled:
                    break
                (size,) = _LONG_SIZE.unpack_from(chunk, start - _LONG_SIZE.size)
            if start + size <= filled:
                begin = start + size
                self._add(chunk[start:begin])
                continue
            if start + size - begin > CHUNK:
                self._large = np.empty(size, np.uint8)
                self._large.data[: filled - start] = memoryview(chunk)[start:filled]
                self._rest = self._large.data[filled - start :]
                begin = filled
            break
        chunk[: filled - begin] = chunk[begin:filled]
        self._filled = filled - begin

    def _add(self, frame: Any) -> None:
        """Put a frame into its message: a head, or one of the buffers that follow it."""
        message, places = self._message, self._places
        if message is None:
            found, head = read_head(frame)
            message, places = Message(*unpack_head(head), deque()), deque(found)
            self._message, self._places = message, places
        else:
            message.buffers.append(frame)
            places.popleft()
        while places and places[0][0] >= 0:
            message.buffers.append(places.popleft())
        if not places:
            self.inbox.append(message)
            self._message = None

    def close(self) -> None:
        Link.live.discard(self)
        self.outbox.clear()
        self._socket.close()


class PortableLink(Link):
    """A link over a blocking ``Connection``."""

    def __init__(self, conn: Any) -> None:
        super().__init__()
        self._conn = conn

    @property
    def waitable(self) -> Any:
        return self._conn

    def send(
        self, head: bytes, buffers: Buffers = (), *, places: Places | None = None, descriptor: int | None = None
    ) -> None:
        try:
            send_message(self._conn, head, piped(buffers) if places is None else places, buffers)
            if descriptor is not None:
                with socket.fromfd(self._conn.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as end:
                    send_descriptors(end, b"\0", [descriptor])
        except OSError:
            pass  # the worker is gone: `receive` finds end-of-file

    def flush(self) -> None:
        pass

    def receive(self) -> None:
        try:
            while self._conn.poll():
                self.inbox.append(receive_message(self._conn))
        except (EOFError, OSError):
            self.ended = True

    def close(self) -> None:
        Link.live.discard(self)
        self._conn.close()


def make_link(conn: Any) -> Link:
    """The main process's end over ``conn``, which it takes over."""
    return PortableLink(conn) if PORTABLE else SocketLink(conn)


class Poller:
    """Waits for workers: for what they send, for their ends, and for a thread that wakes the one that waits.

    Args:
        workers: of the workers; each has a ``link`` and a ``sentinel``.
        waker: the end of a pipe that is written to in order to wake.
    """

    def __init__(self, workers: Sequence[Any], waker: Any) -> None:
        self.workers, self._waker = list(workers), waker
        self._sentinels = {worker.sentinel for worker in workers}
        if not PORTABLE:
            self._by_number = {worker.link.waitable: worker for worker in workers}
            self._writing: set[Link] = set()
            self._poller = select.poll()
            for number in (*self._by_number, *self._sentinels, waker.fileno()):
                self._poller.register(number, select.POLLIN)

    def wait(self, timeout: float | None = None) -> tuple[list[Any], set[int]]:
        """Block until a link can be read (or, with something unsent, written), a worker has ended, or the waker woke.

        Args:
            timeout: seconds, at most; None: no limit.

        Returns:
            The workers whose links are ready; the sentinels of the workers that have ended.
        """
        if PORTABLE:
            return self._wait_portably(timeout)
        for worker in self.workers:
            link = worker.link
            if link.outbox or link in self._writing:
                self._poller.modify(link.waitable, select.POLLIN | (select.POLLOUT if link.outbox else 0))
                (self._writing.add if link.outbox else self._writing.discard)(link)
        ready: list[Any] = []
        ended: set[int] = set()
        for number, _ in self._poller.poll(None if timeout is None else 1000 * timeout):
            if number in self._by_number:
                ready.append(self._by_number[number])
            elif number in self._sentinels:
                ended.add(number)
            else:
                self._calm()
        return ready, ended

    def _wait_portably(self, timeout: float | None) -> tuple[list[Any], set[int]]:
        from multiprocess import connection  # which a spawned worker does without

        watched = [*[worker.link.waitable for worker in self.workers], self._waker]
        # At most 63 handles on Windows: of many workers the end shows as end-of-file alone.
        if sys.platform != "win32" or len(watched) + len(self._sentinels) <= 63:
            watched += self._sentinels
        found = connection.wait(watched, timeout)
        if self._waker in found:
            self._calm()
        return [one for one in self.workers if one.link.waitable in found], self._sentinels.intersection(found)

    def _calm(self) -> None:
        """Take out what the waker was sent: it woke this process."""
        while self._waker.poll():
            self._waker.recv_bytes()
