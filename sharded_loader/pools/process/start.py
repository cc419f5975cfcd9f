"""Start of worker processes.

    choose_start_method(None) -> "fork"
    Zygote(job) .fork(number, ...) -> process          fork: from a single-threaded copy of the main process
    start_forked(name, target, ...) -> process         fork: the zygote itself, and the first workers
    spawn_worker(number, ..., conn) -> process         spawn: `SpawnedProcess`; forkserver: forked from that
    start_forkserver(modules)                          the forkserver imports modules before it forks

    main process                       zygote                            worker
    Zygote.fork(number, conn) -------> forks; the descriptor goes along -> worker.main(conn, ...)
                 <--- pid ------------
    ForkedWorker.join            ----> waits for the dead child
                 <--- exit code ------

The *zygote* is a fork server of our own, unlike Python's ``forkserver``: it inherits the dataset. A replacement worker
must not be forked from the main process in the middle of training: by then that has threads, locks and a GPU context,
and its dataset may have changed. The first workers are forked from the main process, because the zygote would delay
the first batch; it follows one step later. Where workers live for one epoch, it is made when one dies.

The zygote reaps a child only on request, so a pid known to the main process stays valid until then. It ends with its
pipe to the main process, after reaping the remaining workers, which have their own pipes.

What can go wrong: the zygote is slow (processor time, swapped memory) or stopped: the main process waits, with a
warning after `SLOW` seconds. If it was killed, the next `fork` raises ZygoteGone, and with a warning the worker and the
next zygote are forked from the main process as it is now. Exit codes of the old one's workers stay unknown (None). A
lack of processes or descriptors is an OSError everywhere.

``multiprocess`` re-runs the user's script in spawned workers and the forkserver, but not in ours: those entries are
removed from what it sends, for this thread and only while it starts a worker. So scripts need no
``if __name__ == "__main__"``.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import multiprocess
from multiprocess import forkserver, popen_fork, process, resource_tracker, spawn, util
from multiprocess.context import SpawnProcess

from sharded_loader.base import notices, private
from sharded_loader.base.errors import describe_exit
from sharded_loader.base.interrupts import python_handlers, set_handlers, should_stop, uninterrupted
from sharded_loader.base.system import after_fork, can_pass_descriptors
from sharded_loader.engine.messages import Job
from sharded_loader.pools.process import spawned, worker
from sharded_loader.pools.process.link import NAME, send_descriptors

SLOW = 10
"""Seconds before a warning about a fork without an answer. A fork takes 10 ms per GB of the process."""

STEP = 1.0
"""Granularity of waiting in seconds: as in `deaths.Watch`, time in which the main process was stopped does not count.
"""

ENDING = 0.1
"""Seconds that the zygote gets to end on request. It needs 5 ms, half of them to tear down its memory."""

_REQUEST = struct.Struct("!cqq")
_ANSWER = struct.Struct("!q")
_FORK, _REAP = b"F", b"R"
_UNKNOWN = 1 << 32


def choose_start_method(start_method: str | None) -> str:
    """Return the requested start method, that of ``set_start_method``, or the default. ValueError if unavailable."""
    known = multiprocess.get_all_start_methods()
    if start_method is None:
        chosen = multiprocessing.get_start_method(allow_none=True) or multiprocess.get_start_method(allow_none=True)
        start_method = chosen or ("fork" if sys.platform.startswith("linux") else "spawn")
    if start_method not in known:
        raise ValueError(f"start_method is {start_method!r}; this platform has {', '.join(map(repr, known))}")
    with uninterrupted():  # a received descriptor must be closed
        falls_back = start_method == "forkserver" and not can_pass_descriptors()
    if falls_back:
        text = 'this system does not pass descriptors between processes, as a forkserver must: start_method="spawn"'
        notices.warn(f"{text} is used instead")
        return "spawn"
    return start_method


# -- our own processes ----------------------------------------------------------------------------------------

_this_thread = threading.local()


def is_starting_worker() -> bool:
    """Return True if this thread is starting a worker, so that a fork is ours rather than the user's."""
    return bool(getattr(_this_thread, "starts_worker", False))


@contextlib.contextmanager
def starting_worker() -> Iterator[None]:
    """Start this thread's processes without the user's script, and with SIGINT blocked, inside the context.

    A Ctrl-C goes to the whole process group, and would end a worker that does not ignore it yet with a traceback.
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


@after_fork
def _freeze_garbage() -> None:
    """Keep a forked worker from collecting garbage of the main process.

    Closing a garbage connection may wait for a thread that does not exist here, or remove connections of the main
    process from its selector: a web session of fsspec delayed the first batch by a second. A collection would also
    write to, and so copy, each page of inherited objects.
    """
    if is_starting_worker():
        gc.freeze()


class _ForkedPopen(popen_fork.Popen):  # type: ignore[misc]
    def _launch(self, started: _ForkedProcess) -> None:
        private.fork_quietly(self, started)


class _ForkedProcess(process.BaseProcess):  # type: ignore[misc]
    _start_method = "fork"
    _Popen = _ForkedPopen


def start_forked(name: str, target: Callable[..., None], *args: Any, daemon: bool = True) -> Any:
    """Start a forked process that ``multiprocess`` does not track. A daemon may have no children."""
    return _started(_ForkedProcess(name=name, target=target, args=args, daemon=daemon))


def _started(process: Any) -> Any:
    with starting_worker():
        process.start()
    private.forget_child(process)
    return process


def warn(text: str) -> None:
    """Emit a warning that costs no batch even if the user turns warnings into errors."""
    try:
        notices.warn(text)
    except notices.LoaderWarning:
        print(f"sharded_loader: {text}", file=sys.stderr, flush=True)


# -- the process that workers are forked from -------------------------------------------------------------------------


class ZygoteGone(Exception):
    """The zygote is dead, or a request was interrupted. A worker that it may have forked ends with its pipe."""


class Zygote:
    """Main process's handle of the zygote. ``control`` is closed in forked children, so that the zygote can end."""

    def __init__(self, job: Job) -> None:
        self.control, theirs = socket.socketpair()
        self.control.settimeout(STEP)
        try:
            self._process = start_forked("sharded_loader-zygote", _serve, theirs, self.control, job, daemon=False)
        except BaseException:
            self.control.close()
            raise
        finally:
            theirs.close()
        self._failure = ""  # reason why no requests are possible
        self.finished = self.has_forked = False

    def fork(self, number: int, num_workers: int, conn: Any) -> ForkedWorker:
        """Return a new worker. ``conn``, the worker's end of the pipe, must be closed by the caller.

        Raises:
            OSError: the zygote cannot fork.
            ZygoteGone: close it, and ``conn``, which a worker may have.
        """
        # The worker holds the other end, so that its death is noticed without a pidfd too.
        sentinel, held = os.pipe()
        self.has_forked = True
        try:
            pid = self.request(_FORK, number, num_workers, conn.fileno(), held)
            if pid < 0:
                reason = f"the process that workers are forked from cannot fork another one: {os.strerror(-pid)}"
                raise OSError(-pid, reason)
        except BaseException:
            os.close(sentinel)
            raise
        finally:
            os.close(held)
        return ForkedWorker(self, pid, sentinel)

    def request(self, kind: bytes, number: int, num_workers: int = 0, *descriptors: int) -> int:
        """Return the answer to a request. ZygoteGone if it is gone, or has not answered the previous one."""
        if self._failure:
            raise ZygoteGone(self._failure)
        # Until the answer: after an interruption, the next answer would belong to this request.
        self._failure = "the wait for the process that workers are forked from was interrupted"
        answer = b""
        with contextlib.suppress(OSError):
            send_descriptors(self.control, _REQUEST.pack(kind, number, num_workers), descriptors)
            answer = self._receive()
        if not answer:
            with contextlib.suppress(ValueError):  # reaped by the program
                self._process.join(STEP)  # the pipe closes slightly before the process ends
            fate = describe_exit(self._process.exitcode)
            self._failure = f"the process that workers are forked from (pid {self._process.pid}) died: {fate}"
            raise ZygoteGone(self._failure)
        self._failure = ""
        return int(_ANSWER.unpack(answer)[0])

    def _receive(self) -> bytes:
        """Wait for the answer as long as it takes. Return b"" if the process has ended."""
        waited = 0
        while True:
            try:
                return self.control.recv(_ANSWER.size)
            except TimeoutError:
                waited += 1
                if should_stop():
                    raise ZygoteGone(self._failure) from None
                if waited == SLOW:
                    warn(
                        f"the process that workers are forked from (pid {self._process.pid}) has not answered for "
                        f"{SLOW} s. It is stopped, or the machine or the container is short of processor time or "
                        f"memory. The loader keeps waiting"
                    )

    def finish(self) -> None:
        """Tell the process to end after its workers, which have been told to; their exit codes are lost."""
        self.finished = True
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End the process, after its workers."""
        self.finish()
        try:
            # Wait for its end of the pipe: the sentinel of ``multiprocess`` is also held by its workers' children.
            self.control.settimeout(ENDING)
            self.control.recv(1)
        except TimeoutError:
            self._failure = "it did not end"
        except OSError:
            pass  # it has ended
        with contextlib.suppress(ValueError):  # reaped by the program
            if self._failure:
                self._process.kill()
            self._process.join()
            self._process.close()
        self.control.close()


@dataclass
class ForkedWorker:
    """A worker forked by the zygote, with the part of ``multiprocess.Process`` that `ProcessWorker` uses."""

    zygote: Zygote
    pid: int
    sentinel: int
    exitcode: int | None = None

    def kill(self) -> None:
        """Send SIGKILL, unless it may have been reaped. `ProcessWorker` kills no process after `join`."""
        if not self.zygote.finished:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def join(self) -> None:
        """Fetch the exit code. `ProcessWorker` has waited for the end."""
        if not self.zygote.finished:
            with contextlib.suppress(ZygoteGone):
                code = self.zygote.request(_REAP, self.pid)
                self.exitcode = None if code == _UNKNOWN else code

    def close(self) -> None:
        os.close(self.sentinel)


def _serve(control: socket.socket, theirs: socket.socket, job: Job) -> None:
    """Run the zygote: ``control`` is its end of the pipe to the main process, ``theirs`` the other one."""
    theirs.close()
    control.setblocking(True)  # overrides the user's socket.setdefaulttimeout
    handlers = _ignore_signals()
    children: dict[int, Any] = {}  # not yet reaped

    def work(number: int, num_workers: int, fd: int, held: int) -> None:
        control.close()
        set_handlers(handlers)
        worker.main(Connection(fd), number, num_workers, job, held=held)

    def fork(number: int, num_workers: int, descriptors: list[int]) -> int:
        try:
            if len(descriptors) < 2:
                return -errno.EMFILE  # descriptor limit
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
    """Ignore signals that the main process handles, and return how workers are to handle them.

    Ctrl-C and a batch system's SIGTERM reach the whole process group, and inherited handlers would run in the wrong
    process. The zygote ends with its pipe anyway. SIGCHLD gets its default, so that dead workers are not reaped before
    the main process asks for them.
    """
    signal.set_wakeup_fd(-1)
    handlers: dict[int, Any] = dict.fromkeys(python_handlers(), signal.SIG_DFL)
    set_handlers(dict.fromkeys((*handlers, signal.SIGINT), signal.SIG_IGN))
    if signal.signal(signal.SIGCHLD, signal.SIG_DFL) is signal.SIG_IGN and signal.SIGCHLD not in handlers:
        handlers[signal.SIGCHLD] = signal.SIG_IGN  # the user's choice, as for spawned workers
    return handlers


# -- interpreters of their own, and the forkserver ---------------------------------------------------------------------

# Windows passes handles differently. The interpreter of a frozen program has no `-c`.
_HAS_INTERPRETER = sys.platform != "win32" and not getattr(sys, "frozen", False)

# The path comes first: it may be needed to find this library.
_PROGRAM = (
    "import pickle, sys; pipe = open({pipe}, 'rb'); orders = pickle.load(pipe); pipe.close(); "
    "sys.path = orders['sys_path']; from sharded_loader.pools.process.spawned import main; main(orders)"
)


def spawn_worker(number: int, num_workers: int, start_method: str, conn: Any) -> Any:
    """Start a worker in its own interpreter, or from the forkserver. The caller closes its own copy of ``conn``."""
    name = f"{NAME}-{number}"
    if start_method == "spawn" and _HAS_INTERPRETER:
        return _started(SpawnedProcess(name, {"number": number, "num_workers": num_workers}, conn))
    context = multiprocess.get_context(start_method)
    process = context.Process(name=name, target=worker.main, args=(conn, number, num_workers, None), daemon=True)
    if sys.platform != "win32":
        resource_tracker.ensure_running()  # its start would unblock SIGINT
    return _started(process)


def start_forkserver(modules: Iterable[str] = ()) -> None:
    """Start the forkserver of ``multiprocess``, if none runs, which imports ``modules`` except the user's script.

    A running one is left as it is, as is the user's choice with ``multiprocess.set_forkserver_preload``.
    """
    if not private.has_forkserver_preload():
        forkserver.set_forkserver_preload([spawned.__name__])
    resource_tracker.ensure_running()  # as above
    wanted = sorted(set(modules) - {"__main__", "__mp_main__"})
    os.environ[spawned.PRELOAD] = json.dumps({"modules": [worker.__name__, "threadpoolctl", *wanted], "path": sys.path})
    try:
        with uninterrupted(), starting_worker():  # blocking SIGINT runs the handler of one that has just come
            forkserver.ensure_running()
    finally:
        os.environ.pop(spawned.PRELOAD, None)


@after_fork
def _forget_forkserver() -> None:
    alive = private.forget_forkserver()
    if alive is not None:
        os.close(alive)  # the forkserver lives while any process has this open


def _without_script(data: dict[str, Any]) -> dict[str, Any]:
    """Remove the user's script from what ``multiprocess`` sends to our workers."""
    if is_starting_worker():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


private.change_preparation_data(_without_script)
worker.find_libraries()  # a second search is fast

if _HAS_INTERPRETER:
    from multiprocess import popen_spawn_posix

    class _SpawnedPopen(popen_spawn_posix.Popen):  # type: ignore[misc]
        def _launch(self, started: SpawnedProcess) -> None:
            fd = started.conn.fileno()
            # Only if one runs. Workers need none, and starting it takes 20 ms and 11 MB.
            tracker = private.tracker_descriptor()
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                self.sentinel, alive, source, orders = ends
                command = [spawn.get_executable(), *private.interpreter_flags()]
                # ``multiprocess`` marks spawned processes by the last argument.
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
    """A ``multiprocess`` process whose child does not import ``multiprocess``. The caller closes ``conn``."""

    def __init__(self, name: str, orders: dict[str, Any], conn: Any) -> None:
        super().__init__(name=name, daemon=True)
        self.orders = orders
        self.conn = conn

    @staticmethod
    def _Popen(started: SpawnedProcess) -> Any:
        return _SpawnedPopen(started)
