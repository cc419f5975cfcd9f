"""The process that forked workers come from: a copy of the trainer, made when the pool starts, that does nothing else.

    trainer                            template                          worker
    Template.fork(number, conn) -----> forks; the descriptor goes along -> worker.main(conn, ...)
                 <--- pid ------------
    ForkedWorker.join            ----> waits for the dead child
                 <--- exit code ------

A worker that is replaced in the middle of training must not be forked from the trainer: by then that has threads,
locks and a GPU context, and its dataset may have changed. The template has one thread and the dataset as it was.

It reaps a child only when it is told to, so a pid that the trainer knows is that of its worker until then. It ends
with the pipe to the trainer, when the trainer shuts it or dies, after it has reaped the workers that are left, which
have pipes of their own.

What can go wrong: it is killed, or stopped. Then the next `fork` raises TemplateGone, if need be after `ANSWER`
seconds, and the pool makes another template out of the trainer as it is now: a last resort, of which it warns. Exit
codes of its workers are unknown from then on (None).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import struct
import time
import traceback
import weakref
from typing import Any

from multiprocess import connection

from sharded_loader.engine.messages import NewJob
from sharded_loader.workers import worker
from sharded_loader.workers.forking import ForkedProcess
from sharded_loader.workers.inheritance import ignore_signals
from sharded_loader.workers.link import NO_SIGNAL, send_descriptors
from sharded_loader.workers.starting import forget_process, starting_worker

ANSWER = 5.0
"""Seconds in which the template answers, however large the process is that it forks (10 ms per GB)."""

ENDING = 0.1
"""Seconds in which the template ends when it is told to. It takes 5 ms, half of them to tear down its memory."""

_LOOKS = 10
"""How many pieces `ANSWER` is waited in. A program that was stopped (Ctrl-Z) loses one of them, not all."""

_REQUEST = struct.Struct("!cq")
_ANSWER = struct.Struct("!q")
_FORK, _REAP = b"F", b"R"
_UNKNOWN = 1 << 32


class TemplateGone(Exception):
    """The template is dead, or does not answer. It may have forked a worker, which ends with its pipe."""


class Template:
    """The trainer's end.

    Args:
        new_job: what the workers are to read.
        num_workers: how many the pool has.

    Attributes:
        lost: whether it has died, or stopped answering: another is needed.
        finished: whether it has been told to end: it reaps its workers when it likes.

    Raises:
        OSError: the process cannot be forked.
    """

    def __init__(self, new_job: NewJob, num_workers: int) -> None:
        self._control, theirs = socket.socketpair()
        try:
            # Not daemonic: those may have no children. It is forgotten at once, so nobody joins it.
            process = ForkedProcess(
                target=_serve,
                args=(theirs, self._control, new_job, num_workers),
                name="sharded_loader-template",
                daemon=False,
            )
            with starting_worker("fork"):
                process.start()
            forget_process(process)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._process = process
        self.lost = False
        self.finished = False
        self._control.settimeout(ANSWER / _LOOKS)
        self._pid = os.getpid()
        _templates.add(self)

    def fork(self, number: int, conn: Any) -> ForkedWorker:
        """A new worker.

        Args:
            number: its number.
            conn: its end of the pipe; the caller closes its own copy.

        Raises:
            OSError: the template cannot fork.
            TemplateGone: it is gone: close it, and ``conn``, which a worker may have.
        """
        if self.lost:
            raise TemplateGone("the template process has not answered")
        # The worker holds the other end: where there is no pidfd, that is how its death is noticed.
        sentinel, held = os.pipe()
        try:
            try:
                self._send_fds(_REQUEST.pack(_FORK, number), [conn.fileno(), held])
                pid = self._answer()
            except OSError as error:
                raise TemplateGone(f"the template process is gone: {error}") from error
            if pid < 0:
                raise OSError(-pid, f"the template process cannot fork a worker: {os.strerror(-pid)}")
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            os.close(held)
        return ForkedWorker(self, pid, sentinel)

    def reap(self, pid: int) -> int | None:
        """Exit code of a worker that has ended; None if it is not known."""
        if self.lost or self.finished:
            return None
        try:
            self._control.sendall(_REQUEST.pack(_REAP, pid), NO_SIGNAL)
            code = self._answer()
        except OSError:
            return None
        return None if code == _UNKNOWN else code

    def _send_fds(self, request: bytes, descriptors: list[int]) -> None:
        deadline = time.monotonic() + ANSWER
        while True:
            try:
                send_descriptors(self._control, request, descriptors)
                return
            except (ConnectionError, TimeoutError):
                self.lost = True
                raise
            except OSError as error:
                # Not for ever: so many descriptors are on their way to workers that have not taken them yet.
                if error.errno != getattr(errno, "ETOOMANYREFS", None) or time.monotonic() > deadline:
                    raise
                time.sleep(0.001)

    def _answer(self) -> int:
        data = b""
        looks = _LOOKS
        try:
            while len(data) < _ANSWER.size:
                try:
                    part = self._control.recv(_ANSWER.size - len(data))
                except TimeoutError:
                    looks -= 1
                    if not looks:
                        raise TimeoutError(f"it has not answered for {ANSWER:g} s") from None
                    continue
                if not part:
                    raise ConnectionResetError("it has ended")
                data += part
        except OSError:
            self.lost = True  # also if it was too slow: its next answer would be to the last question
            raise
        return int(_ANSWER.unpack(data)[0])

    def finish(self) -> None:
        """Tell the process to end when its workers have, which have been told; their exit codes are not wanted."""
        if not self.finished and os.getpid() == self._pid:
            self.finished = True
            with contextlib.suppress(OSError):
                self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process; its workers have ended before."""
        if os.getpid() != self._pid:
            return
        self.finish()
        with contextlib.suppress(ValueError):
            if self.lost or not self._has_ended(ENDING):
                self._process.kill()
            self._process.join()
            self._process.close()
        self.close_descriptors()

    def _has_ended(self, timeout: float) -> bool:
        """Wait for its end of the pipe: what ``multiprocess`` waits for is held by its workers' children too."""
        self._control.settimeout(timeout)
        try:
            while self._control.recv(_ANSWER.size):  # an answer that an interrupted call has not waited for
                pass
        except TimeoutError:
            return False
        except OSError:
            pass
        return True

    def close_descriptors(self) -> None:
        """Close this end of the pipe; in a forked child, where the other end must not be kept from ending."""
        _templates.discard(self)
        self._control.close()


class ForkedWorker:
    """A worker that the template forked; as much of ``multiprocess.Process`` as `WorkerHandle` uses."""

    def __init__(self, template: Template, pid: int, sentinel: int) -> None:
        self._template = template
        self.pid = pid
        self.sentinel = sentinel
        self.exitcode: int | None = None
        self._reaped = False

    def kill(self) -> None:
        """SIGKILL, if it has not been reaped, and no longer may be."""
        if not self._reaped and not self._template.finished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def join(self, timeout: float | None = None) -> None:
        """Take note of its end. It has ended: `WorkerHandle` has waited for that."""
        if not self._reaped:
            self._reaped = True
            self.exitcode = self._template.reap(self.pid)

    def close(self) -> None:
        """Close the sentinel."""
        sentinel, self.sentinel = self.sentinel, -1
        if sentinel >= 0:
            os.close(sentinel)


_templates: weakref.WeakSet[Template] = weakref.WeakSet()


def _leave_to_the_trainer() -> None:
    for template in list(_templates):
        template.close_descriptors()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_trainer)


# -- in the template ------------------------------------------------------------------------------------------


def _serve(control: socket.socket, theirs: socket.socket, new_job: NewJob, num_workers: int) -> None:
    """The template, from its first line to its last."""
    theirs.close()
    handlers = ignore_signals()
    children: dict[int, Any] = {}
    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
            while data and len(data) < _REQUEST.size:
                more = control.recv(_REQUEST.size - len(data))
                data = data + more if more else b""
            if not data:
                break
            kind, number = _REQUEST.unpack(data)
            if kind == _FORK:
                answer = _fork(control, descriptors, number, new_job, num_workers, handlers, children)
            else:
                answer = _reap(children.pop(number, None))
            control.sendall(_ANSWER.pack(answer))
    except OSError:
        pass  # the trainer is gone
    finally:
        for process in children.values():
            process.join()
        os._exit(0)


def _fork(
    control: socket.socket,
    descriptors: list[int],
    number: int,
    new_job: NewJob,
    num_workers: int,
    handlers: dict[int, Any],
    children: dict[int, Any],
) -> int:
    if len(descriptors) < 2:  # there was no room for them
        for descriptor in descriptors:
            os.close(descriptor)
        return -errno.EMFILE
    conn = connection.Connection(descriptors[0])
    process = ForkedProcess(
        target=_work,
        args=(control, conn, descriptors[1], number, num_workers, handlers, new_job),
        name=f"sharded_loader-worker-{number}",
        daemon=True,
    )
    try:
        with starting_worker("fork"):
            process.start()
    except OSError as error:
        return -(error.errno or 1)
    finally:
        conn.close()
        os.close(descriptors[1])
    children[process.pid] = process
    return int(process.pid)


def _reap(process: Any) -> int:
    if process is None:
        return _UNKNOWN
    process.join()
    code = process.exitcode
    process.close()
    return _UNKNOWN if code is None else int(code)


def _work(
    control: socket.socket,
    conn: Any,
    held: int,
    number: int,
    num_workers: int,
    handlers: dict[int, Any],
    new_job: NewJob,
) -> None:
    control.close()
    for signal_number, handler in handlers.items():
        signal.signal(signal_number, handler)
    try:
        worker.main(conn, number, num_workers, new_job, held=held)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
