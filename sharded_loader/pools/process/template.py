"""The process that forked workers come from: a copy of the main process that does nothing else.

    main process                       template                          worker
    Template.fork(number, conn) -----> forks; the descriptor goes along -> worker.main(conn, ...)
                 <--- pid ------------
    ForkedWorker.join            ----> waits for the dead child
                 <--- exit code ------

A worker that is replaced in the middle of training must not be forked from the main process: by then that has threads,
locks and a GPU context, and its dataset may have changed. The template has one thread and the dataset as it was. The
first workers are forked from the main process. The template follows in the step after the first batch, which it would
delay. Where workers live for one epoch there is none before one of them dies.

It reaps a child only when it is told to, so a pid that the main process knows is that of its worker until then. It ends
with the pipe to the main process, when that shuts it or dies. Before, it reaps the workers that are left, which have
pipes of their own.

What can go wrong: it is slow, or stopped. The main process waits, and warns once after `SLOW` seconds: a fork may wait
for processor time, or for memory that is swapped. Or it is killed. Then the next `fork` raises TemplateGone, and the
pool makes another template out of the main process as it is now: a last resort, of which it warns. Exit codes of its
workers are unknown from then on (None).
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import struct
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from multiprocess import popen_fork, process

from sharded_loader.base.errors import describe_exit
from sharded_loader.base.interrupts import python_handlers, should_stop
from sharded_loader.base.private import forget_child, fork_quietly
from sharded_loader.engine.messages import NewJob
from sharded_loader.pools.process import worker
from sharded_loader.pools.process.link import NO_SIGNAL, send_descriptors

NAME = "sharded_loader-worker"
"""How the processes of workers are named, before their numbers."""

SLOW = 10
"""Seconds after which the main process says what it waits for. A fork takes 10 ms per GB of the process."""

STEP = 1.0
"""The same as in `deaths.Watch`: seconds that are counted at once, however long the main process itself was stopped."""

ENDING = 0.1
"""Seconds in which the template ends when it is told to. It takes 5 ms, half of them to tear down its memory."""

_REQUEST = struct.Struct("!cqq")
_ANSWER = struct.Struct("!q")
_FORK, _REAP = b"F", b"R"
_UNKNOWN = 1 << 32


# -- our own processes ----------------------------------------------------------------------------------------

_this_thread = threading.local()


def is_starting_worker() -> bool:
    """Whether this thread is starting a worker: a fork that happens now is ours, not the user's."""
    return bool(getattr(_this_thread, "starts_worker", False))


@contextlib.contextmanager
def starting_worker() -> Iterator[None]:
    """Inside, this thread's processes start without the user's script, and with SIGINT blocked.

    Blocked, because a Ctrl-C goes to the whole process group, and a worker that has not yet come to ignore
    it would end in a traceback.
    """
    block = hasattr(signal, "pthread_sigmask")
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if block else set()
    _this_thread.starts_worker = True
    try:
        yield
    finally:
        _this_thread.starts_worker = False
        if block:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _leave_garbage_alone() -> None:
    """In a forked worker: what the main process has made is never collected here.

    Its garbage may be a connection. To close that waits for a thread that is not here, and may take connections of the
    main process out of its selector. A web session of fsspec delayed the first batch by a second. Besides, a collection
    writes to each page of inherited objects, and so copies all of them.
    """
    if is_starting_worker():
        gc.freeze()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_garbage_alone)


class _ForkedPopen(popen_fork.Popen):  # type: ignore[misc]
    """A fork that Python does not warn about."""

    def _launch(self, started: _ForkedProcess) -> None:
        fork_quietly(self, started)


class _ForkedProcess(process.BaseProcess):  # type: ignore[misc]
    _start_method = "fork"
    _Popen = _ForkedPopen


def start_forked(name: str, target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """A process of the fork start method, which ``multiprocess`` does not look after (see `forget_child`).

    Args:
        name: of the process.
        target, args: what it calls.
        daemon: whether it may have no children.
    """
    forked = _ForkedProcess(name=name, target=target, args=args, daemon=daemon)
    with starting_worker():
        forked.start()
    forget_child(forked)
    return forked


def warn(text: str) -> None:
    """A warning that costs no batch where the user has made warnings errors."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(f"sharded_loader: {text}", file=sys.stderr, flush=True)


# -- in the main process -------------------------------------------------------------------------------------------


class TemplateGone(Exception):
    """The template is dead, or a question was interrupted. It may have forked a worker, which ends with its pipe.

    `start.launch` catches it: no user gets to see it.
    """


class Template:
    """The main process's end.

    Args:
        new_job: what the workers are to read.

    Attributes:
        finished: whether it has been told to end: it reaps its workers when it likes.
        has_forked: whether there were any.

    Raises:
        OSError: the process cannot be forked.
    """

    def __init__(self, new_job: NewJob) -> None:
        self._control, theirs = socket.socketpair()
        self._control.settimeout(STEP)
        serving = _Serving(theirs, new_job)
        try:
            self._process = start_forked("sharded_loader-template", serving.run, self._control, daemon=False)
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()
        self._lost = ""  # why it can be asked no more
        self.finished = self.has_forked = False

    def fork(self, number: int, num_workers: int, conn: Any) -> ForkedWorker:
        """A new worker.

        Args:
            number: its number.
            num_workers: how many the pool has.
            conn: its end of the pipe; the caller closes its own copy.

        Raises:
            OSError: the template cannot fork.
            TemplateGone: it is gone: close it, and ``conn``, which a worker may have.
        """
        # The worker holds the other end: where there is no pidfd, that is how its death is noticed.
        sentinel, held = os.pipe()
        self.has_forked = True
        try:
            pid = self._ask(_FORK, number, num_workers, conn.fileno(), held)
            if pid < 0:
                reason = f"the process that workers are forked from cannot fork another one: {os.strerror(-pid)}"
                raise OSError(-pid, reason)
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            os.close(held)
        return ForkedWorker(self, pid, sentinel)

    def reap(self, pid: int) -> int | None:
        """Exit code of a worker that has ended; None if it is not known."""
        try:
            code = _UNKNOWN if self.finished else self._ask(_REAP, pid)
        except TemplateGone:
            return None
        return None if code == _UNKNOWN else code

    def _ask(self, kind: bytes, number: int, num_workers: int = 0, *descriptors: int) -> int:
        if self._lost:
            raise TemplateGone(self._lost)
        # Until it has answered: if this one is interrupted, its next answer is to this question.
        self._lost = "the wait for the process that workers are forked from was interrupted"
        try:
            if descriptors:
                send_descriptors(self._control, _REQUEST.pack(kind, number, num_workers), descriptors)
            else:
                self._control.sendall(_REQUEST.pack(kind, number, num_workers), NO_SIGNAL)
            answer = self._receive()
        except OSError:
            answer = b""
        if not answer:
            with contextlib.suppress(ValueError):  # the program has reaped it
                self._process.join(STEP)  # the pipe ends a moment before the process
            fate = describe_exit(self._process.exitcode)
            self._lost = f"the process that workers are forked from (pid {self._process.pid}) died: {fate}"
            raise TemplateGone(self._lost)
        self._lost = ""
        return int(_ANSWER.unpack(answer)[0])

    def _receive(self) -> bytes:
        """The answer, however long it takes; empty: the process has ended."""
        waited = 0
        while True:
            try:
                return self._control.recv(_ANSWER.size)
            except TimeoutError:
                waited += 1
                if should_stop():
                    raise TemplateGone(self._lost) from None
                if waited == SLOW:
                    warn(
                        f"the process that workers are forked from (pid {self._process.pid}) has not answered for "
                        f"{SLOW} s. It is stopped, or the machine or the container is short of processor time or "
                        f"memory. The loader keeps waiting"
                    )

    def finish(self) -> None:
        """Tell the process to end when its workers have, which have been told; their exit codes are not wanted."""
        self.finished = True
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process; its workers have ended before."""
        self.finish()
        try:
            # Its end of the pipe: what ``multiprocess`` waits for is held by its workers' children too.
            self._control.settimeout(ENDING)
            self._control.recv(1)
        except TimeoutError:
            self._lost = "it did not end"
        except OSError:
            pass  # it has ended
        with contextlib.suppress(ValueError):  # the program has reaped it
            if self._lost:
                self._process.kill()
            self._process.join()
            self._process.close()
        self.close_descriptors()

    def close_descriptors(self) -> None:
        """Close this end of the pipe; in a forked child, where the other end must not be kept from ending."""
        self._control.close()


@dataclass
class ForkedWorker:
    """A worker that the template forked; as much of ``multiprocess.Process`` as `ProcessWorker` uses."""

    template: Template
    pid: int
    sentinel: int
    exitcode: int | None = None

    def kill(self) -> None:
        """SIGKILL, if it cannot have been reaped. `ProcessWorker` kills no process after `join`."""
        if not self.template.finished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """Take note of its end. It has ended: `ProcessWorker` has waited for that."""
        self.exitcode = self.template.reap(self.pid)

    def close(self) -> None:
        """Close the sentinel."""
        os.close(self.sentinel)


# -- in the template ------------------------------------------------------------------------------------------


@dataclass
class _Serving:
    """The template, from its first line to its last. Made in the main process.

    Attributes:
        control: the pipe to the main process.
        new_job: for the workers.
        children: the workers that have not been reaped, by pid.
        handlers: what workers do about the signals that the template ignores.
    """

    control: socket.socket
    new_job: NewJob
    children: dict[int, Any] = field(default_factory=dict)
    handlers: dict[int, Any] = field(default_factory=dict)

    def run(self, theirs: socket.socket) -> None:
        theirs.close()
        self.control.setblocking(True)  # whatever the user's socket.setdefaulttimeout says
        self._ignore_signals()
        try:
            while True:
                data, descriptors, _, _ = socket.recv_fds(self.control, _REQUEST.size, 2)
                if not data:
                    break
                kind, number, num_workers = _REQUEST.unpack(data)
                answer = self._fork(number, num_workers, descriptors) if kind == _FORK else self._reap(number)
                self.control.sendall(_ANSWER.pack(answer))
        except OSError:
            pass  # the main process is gone
        finally:
            for child in self.children.values():
                child.join()
            os._exit(0)

    def _ignore_signals(self) -> None:
        """Ignore what the main process's program handles: its handlers would run here too, in the wrong process.

        A whole process group gets a Ctrl-C or a batch system's SIGTERM, and the template ends with its pipe anyway.
        But SIGCHLD gets its default: otherwise the dead workers would be reaped before the main process asks for them.
        """
        signal.set_wakeup_fd(-1)
        self.handlers = dict.fromkeys(python_handlers(), signal.SIG_DFL)
        for number in self.handlers:
            signal.signal(number, signal.SIG_IGN)
        if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
            self.handlers.setdefault(signal.SIGCHLD, signal.SIG_IGN)  # the user's choice, as spawned workers have it
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def _fork(self, number: int, num_workers: int, descriptors: list[int]) -> int:
        """The pid of a new worker, or an error number below 0."""
        try:
            if len(descriptors) < 2:
                return -errno.EMFILE  # there was no room for them
            child = start_forked(f"{NAME}-{number}", self._work, number, num_workers, *descriptors)
        except OSError as error:
            return -(error.errno or 1)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self.children[child.pid] = child
        return int(child.pid)

    def _reap(self, pid: int) -> int:
        child = self.children.pop(pid)
        child.join()
        code = child.exitcode
        child.close()
        return _UNKNOWN if code is None else int(code)

    def _work(self, number: int, num_workers: int, fd: int, held: int) -> None:
        """A worker."""
        self.control.close()
        for signal_number, handler in self.handlers.items():
            signal.signal(signal_number, handler)
        try:
            worker.main(Connection(fd), number, num_workers, self.new_job, held=held)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
