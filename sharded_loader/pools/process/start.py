"""How worker processes start.

    choose_start_method(None) -> "fork"
    Template(job) .fork(number, ...) -> process        fork: a copy of the main process that does nothing else
    start_forked(name, target, ...) -> process             fork: that itself, and the first workers
    spawn_worker(number, ..., conn) -> process             spawn: `SpawnedProcess`; forkserver: forked from that
    start_forkserver(modules)                              it has them imported before it forks

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

What can go wrong: the template is slow, or stopped. The main process waits, and warns once after `SLOW` seconds: a fork
may wait for processor time, or for memory that is swapped. Or it is killed. Then the next `fork` raises TemplateGone,
and the worker comes from the main process as it is now, as does the next template: a last resort, of which it warns.
Exit codes of the dead one's workers are unknown from then on (None).

``multiprocess`` re-runs the user's script in a spawned worker, and in the forkserver. Not in ours: the entries that say
so are taken out of what it sends, for this thread and only while it starts a worker. So a script needs no
``if __name__ == "__main__"``, and nothing imports torch by accident.

No process, no descriptor is an OSError everywhere.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import signal
import socket
import struct
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import multiprocess
from multiprocess import forkserver, popen_fork, process, resource_tracker, spawn, util
from multiprocess.context import SpawnProcess

from sharded_loader.base import private
from sharded_loader.base.errors import describe_exit
from sharded_loader.base.interrupts import python_handlers, should_stop, uninterrupted
from sharded_loader.base.system import can_pass_descriptors
from sharded_loader.engine.messages import Job
from sharded_loader.pools.process import spawned, worker
from sharded_loader.pools.process.link import send_descriptors

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


def choose_start_method(start_method: str | None) -> str:
    """The start method to use: what is asked for, else what the user set for the process, else the default.

    Raises:
        ValueError: this platform does not have it.
    """
    known = multiprocess.get_all_start_methods()
    if start_method is None:
        chosen = multiprocessing.get_start_method(allow_none=True) or multiprocess.get_start_method(allow_none=True)
        start_method = chosen or ("fork" if sys.platform.startswith("linux") else "spawn")
    if start_method not in known:
        raise ValueError(f"start_method is {start_method!r}; this platform has {', '.join(map(repr, known))}")
    with uninterrupted():  # a descriptor that has come must be closed
        falls_back = start_method == "forkserver" and not can_pass_descriptors()
    if falls_back:
        text = 'this system does not pass descriptors between processes, as a forkserver must: start_method="spawn"'
        warnings.warn(f"{text} is used instead", RuntimeWarning, stacklevel=3)
        return "spawn"
    return start_method


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
        private.fork_quietly(self, started)


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
    return _started(_ForkedProcess(name=name, target=target, args=args, daemon=daemon))


def _started(process: Any) -> Any:
    with starting_worker():
        process.start()
    private.forget_child(process)
    return process


def warn(text: str) -> None:
    """A warning that costs no batch where the user has made warnings errors."""
    try:
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    except RuntimeWarning:
        print(f"sharded_loader: {text}", file=sys.stderr, flush=True)


# -- the process that workers are forked from -------------------------------------------------------------------------


class TemplateGone(Exception):
    """The template is dead, or a question was interrupted. It may have forked a worker, which ends with its pipe.

    `ProcessTransport.launch` catches it: no user gets to see it.
    """


class Template:
    """The main process's end.

    Args:
        job: what the workers are to read.

    Attributes:
        control: this end of the pipe to it. A forked child closes it, so that the process can end.
        finished: whether it has been told to end: it reaps its workers when it likes.
        has_forked: whether there were any.

    Raises:
        OSError: the process cannot be forked.
    """

    def __init__(self, job: Job) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(STEP)
        try:
            self._process = start_forked("sharded_loader-template", _serve, theirs, self.control, job, daemon=False)
        except BaseException:
            self.control.close()
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
            pid = self.ask(_FORK, number, num_workers, conn.fileno(), held)
            if pid < 0:
                reason = f"the process that workers are forked from cannot fork another one: {os.strerror(-pid)}"
                raise OSError(-pid, reason)
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            os.close(held)
        return ForkedWorker(self, pid, sentinel)

    def ask(self, kind: bytes, number: int, num_workers: int = 0, *descriptors: int) -> int:
        """The answer to a request.

        Raises:
            TemplateGone: it is gone, or has not answered the one before.
        """
        if self._lost:
            raise TemplateGone(self._lost)
        # Until it has answered: if this one is interrupted, its next answer is to this question.
        self._lost = "the wait for the process that workers are forked from was interrupted"
        answer = b""
        with contextlib.suppress(OSError):
            send_descriptors(self.control, _REQUEST.pack(kind, number, num_workers), descriptors)
            answer = self._receive()
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
                return self.control.recv(_ANSWER.size)
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
            self.control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process; its workers have ended before."""
        self.finish()
        try:
            # Its end of the pipe: what ``multiprocess`` waits for is held by its workers' children too.
            self.control.settimeout(ENDING)
            self.control.recv(1)
        except TimeoutError:
            self._lost = "it did not end"
        except OSError:
            pass  # it has ended
        with contextlib.suppress(ValueError):  # the program has reaped it
            if self._lost:
                self._process.kill()
            self._process.join()
            self._process.close()
        self.control.close()


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
        if not self.template.finished:
            with contextlib.suppress(TemplateGone):
                code = self.template.ask(_REAP, self.pid)
                self.exitcode = None if code == _UNKNOWN else code

    def close(self) -> None:
        """Close the sentinel."""
        os.close(self.sentinel)


def _serve(control: socket.socket, theirs: socket.socket, job: Job) -> None:
    """The template, from its first line to its last.

    Args:
        control: its end of the pipe to the main process.
        theirs: the other end.
        job: for the workers.
    """
    theirs.close()
    control.setblocking(True)  # whatever the user's socket.setdefaulttimeout says
    handlers = _ignore_signals()
    children: dict[int, Any] = {}  # that have not been reaped

    def work(number: int, num_workers: int, fd: int, held: int) -> None:
        control.close()
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)
        worker.main(Connection(fd), number, num_workers, job, held=held)

    def fork(number: int, num_workers: int, descriptors: list[int]) -> int:
        """The pid of a new worker, or an error number below 0."""
        try:
            if len(descriptors) < 2:
                return -errno.EMFILE  # there was no room for them
            child = start_forked(f"{NAME}-{number}", work, number, num_workers, *descriptors)
        except OSError as error:
            return -(error.errno or 1)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        children[child.pid] = child
        return int(child.pid)

    try:
        while True:
            data, descriptors, _, _ = socket.recv_fds(control, _REQUEST.size, 2)
            if not data:
                break
            kind, number, num_workers = _REQUEST.unpack(data)
            if kind == _FORK:
                answer = fork(number, num_workers, descriptors)
            else:
                child = children.pop(number)
                child.join()
                answer = _UNKNOWN if child.exitcode is None else child.exitcode
                child.close()
            control.sendall(_ANSWER.pack(answer))
    except OSError:
        pass  # the main process is gone
    finally:
        for child in children.values():
            child.join()
        os._exit(0)


def _ignore_signals() -> dict[int, Any]:
    """Ignore what the main process's program handles: its handlers would run here too, in the wrong process.

    A whole process group gets a Ctrl-C or a batch system's SIGTERM, and the template ends with its pipe anyway.
    But SIGCHLD gets its default: otherwise the dead workers would be reaped before the main process asks for them.

    Returns:
        What workers do about these signals.
    """
    signal.set_wakeup_fd(-1)
    handlers: dict[int, Any] = dict.fromkeys(python_handlers(), signal.SIG_DFL)
    for number in (*handlers, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    if signal.signal(signal.SIGCHLD, signal.SIG_DFL) is signal.SIG_IGN and signal.SIGCHLD not in handlers:
        handlers[signal.SIGCHLD] = signal.SIG_IGN  # the user's choice, as spawned workers have it
    return handlers


# -- interpreters of their own, and the forkserver ---------------------------------------------------------------------

# Handles take another way on Windows. The interpreter of a frozen program takes no `-c`.
_HAS_INTERPRETER = sys.platform != "win32" and not getattr(sys, "frozen", False)

# The path first: without it the library itself might not be found.
_PROGRAM = (
    "import pickle, sys; orders = pickle.load(open({pipe}, 'rb')); sys.path = orders['sys_path']; "
    "from sharded_loader.pools.process.spawned import main; main(orders)"
)


def spawn_worker(number: int, num_workers: int, start_method: str, conn: Any) -> Any:
    """Start a worker in an interpreter of its own, or from the forkserver.

    Args:
        number, num_workers: of the worker, and of the pool.
        start_method: ``"spawn"`` or ``"forkserver"``.
        conn: the worker's end of its pipe; the caller closes its own copy.

    Returns:
        The process, as ``multiprocess`` has it.
    """
    name = f"{NAME}-{number}"
    if start_method == "spawn" and _HAS_INTERPRETER:
        return _started(SpawnedProcess(name, {"number": number, "num_workers": num_workers}, conn))
    context = multiprocess.get_context(start_method)
    process = context.Process(name=name, target=worker.main, args=(conn, number, num_workers, None), daemon=True)
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # its start would unblock SIGINT again
    return _started(process)


def start_forkserver(modules: Iterable[str] = ()) -> None:
    """Start the forkserver of ``multiprocess``, if none runs: workers fork from it.

    Args:
        modules: what it imports, beside our own; never the user's script. One that runs already stays as it is, and so
            does a choice that the user has made with ``multiprocess.set_forkserver_preload``.
    """
    if not private.has_forkserver_preload():
        forkserver.set_forkserver_preload([spawned.__name__])
    resource_tracker.ensure_running()  # as above
    wanted = sorted(set(modules) - {"__main__", "__mp_main__"})
    request = {"modules": [worker.__name__, "threadpoolctl", *wanted], "path": sys.path}
    os.environ[spawned.PRELOAD] = json.dumps(request)
    try:
        with starting_worker():
            forkserver.ensure_running()
    finally:
        os.environ.pop(spawned.PRELOAD, None)


def _forget_forkserver() -> None:
    alive = private.forget_forkserver()
    if alive is not None:
        os.close(alive)  # the forkserver lives as long as a process has this open


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_forkserver)


def _without_script(data: dict[str, Any]) -> dict[str, Any]:
    """What ``multiprocess`` sends, without the user's script for our own workers."""
    if is_starting_worker():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


private.change_preparation_data(_without_script)
worker.find_libraries()  # what has been found once is found fast

if _HAS_INTERPRETER:
    from multiprocess import popen_spawn_posix

    class _SpawnedPopen(popen_spawn_posix.Popen):  # type: ignore[misc]
        def _launch(self, started: SpawnedProcess) -> None:
            fd = started.conn.fileno()
            # Where one runs. None is started for a worker, which makes nothing that it would look after: 20 ms, 11 MB.
            tracker = private.tracker_descriptor()
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                self.sentinel, alive, source, orders = ends
                command = [spawn.get_executable(), *private.interpreter_flags()]
                # The last argument is how ``multiprocess`` marks what it spawns.
                command += ["-c", _PROGRAM.format(pipe=source), "--multiprocessing-fork"]
                inherited = [fd, source, alive, *([] if tracker is None else [tracker])]
                self.pid = util.spawnv_passfds(command[0], command, inherited)
                with open(orders, "wb", closefd=False) as stream:
                    data = spawn.get_preparation_data(started.name)
                    data |= {"authkey": bytes(data["authkey"]), "tracker": tracker, "fd": fd, "alive": alive}
                    pickle.dump(data | started.orders, stream)
            finally:
                for end in ends[1:]:
                    os.close(end)
                if ends:
                    self.finalizer = util.Finalize(self, util.close_fds, ends[:1])


class SpawnedProcess(SpawnProcess):  # type: ignore[misc]
    """A ``multiprocess`` process whose child does not import ``multiprocess``.

    All that comes after the start (join, kill, exit code, sentinel) is ``multiprocess``'s own.

    Args:
        name: of the process.
        orders: what `spawned.main` gets beside what ``multiprocess`` tells its children.
        conn: the worker's end of the pipe; closed by the caller when the process has started.
    """

    def __init__(self, name: str, orders: dict[str, Any], conn: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.orders = orders
        self.conn = conn

    @staticmethod
    def _Popen(started: SpawnedProcess) -> Any:
        return _SpawnedPopen(started)
