"""How worker processes start that are not forked from the template, and how all of them end with the main process.

    choose_start_method(None) -> "fork"
    spawn_worker(number, ..., conn, fds) -> process        spawn: `SpawnedProcess`; forkserver: forked from that
    start_forkserver(modules)                              it has them imported before it forks
    Lifeline() .tie(process, link) .close()                Linux: the only writing end of a pipe. Windows: a job object

``multiprocess`` re-runs the user's script in a spawned worker, and in the forkserver. Not in ours: the entries that say
so are taken out of what it sends, for this thread and only while it starts a worker. So a script needs no
``if __name__ == "__main__"``, and nothing imports torch by accident.

The kernel closes the main process's end of a lifeline when that process ends, also by SIGKILL, and then kills the
workers (`worker.die_with`). So a worker ends that holds the GIL, in which none of its own threads can notice anything.
Processes that a worker starts are the user's: they live on.

What can go wrong: no process, no descriptor (OSError). The kernel refuses the signal or the job (a sandbox, Windows 7
inside another job). There is nothing of the kind on macOS. Then the worker's receiver thread ends the process, which it
cannot while code in C holds the GIL.

Source: "Job Objects" and "JOBOBJECT_EXTENDED_LIMIT_INFORMATION" in Microsoft's Win32 documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import pickle
import struct
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import multiprocess
from multiprocess import forkserver, resource_tracker, spawn, util
from multiprocess.context import SpawnProcess

from sharded_loader.base.interrupts import uninterrupted
from sharded_loader.base.private import (
    change_preparation_data,
    forget_child,
    forget_forkserver,
    has_forkserver_preload,
    interpreter_flags,
    tracker_descriptor,
)
from sharded_loader.base.system import PORTABLE, can_pass_descriptors
from sharded_loader.pools.process import spawned, template, worker
from sharded_loader.pools.process.link import DEATH, Link
from sharded_loader.pools.process.template import NAME


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


# Handles take another way on Windows. The interpreter of a frozen program takes no `-c`.
_HAS_INTERPRETER = sys.platform != "win32" and not getattr(sys, "frozen", False)

# The path first: without it the library itself might not be found.
_PROGRAM = (
    "import pickle, sys; orders = pickle.load(open({pipe}, 'rb')); sys.path = orders['sys_path']; "
    "from sharded_loader.pools.process.spawned import main; main(orders)"
)


def spawn_worker(number: int, num_workers: int, start_method: str, conn: Any, fds: Sequence[int]) -> Any:
    """Start a worker in an interpreter of its own, or from the forkserver.

    Args:
        number, num_workers: of the worker, and of the pool.
        start_method: ``"spawn"`` or ``"forkserver"``.
        conn: the worker's end of its pipe; the caller closes its own copy.
        fds: other descriptors that a spawned worker gets, with the numbers that they have here.

    Returns:
        The process, as ``multiprocess`` has it.
    """
    name = f"{NAME}-{number}"
    started: Any
    if start_method == "spawn" and _HAS_INTERPRETER:
        started = SpawnedProcess(name, {"number": number, "num_workers": num_workers}, conn, fds)
    else:
        context = multiprocess.get_context(start_method)
        started = context.Process(name=name, target=worker.main, args=(conn, number, num_workers, None), daemon=True)
        if sys.platform != "win32":
            resource_tracker.ensure_running()  # its start would unblock SIGINT again
    with template.starting_worker():
        started.start()
    forget_child(started)
    return started


def start_forkserver(modules: Iterable[str] = ()) -> None:
    """Start the forkserver of ``multiprocess``, if none runs: workers fork from it.

    Args:
        modules: what it imports, beside our own; never the user's script. One that runs already stays as it is, and so
            does a choice that the user has made with ``multiprocess.set_forkserver_preload``.
    """
    if not has_forkserver_preload():
        forkserver.set_forkserver_preload([spawned.__name__])
    resource_tracker.ensure_running()  # as above
    wanted = sorted(set(modules) - {"__main__", "__mp_main__"})
    request = {"modules": [worker.__name__, "threadpoolctl", *wanted], "path": sys.path}
    os.environ[spawned.PRELOAD] = json.dumps(request)
    try:
        with template.starting_worker():
            forkserver.ensure_running()
    finally:
        os.environ.pop(spawned.PRELOAD, None)


def _forget_forkserver() -> None:
    alive = forget_forkserver()
    if alive is not None:
        os.close(alive)  # the forkserver lives as long as a process has this open


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_forkserver)


def _without_script(data: dict[str, Any]) -> dict[str, Any]:
    """What ``multiprocess`` sends, without the user's script for our own workers."""
    if template.is_starting_worker():
        data.pop("init_main_from_name", None)
        data.pop("init_main_from_path", None)
    return data


change_preparation_data(_without_script)
worker.find_libraries()  # what has been found once is found fast

if _HAS_INTERPRETER:
    from multiprocess import popen_spawn_posix

    class _SpawnedPopen(popen_spawn_posix.Popen):  # type: ignore[misc]
        def _launch(self, started: SpawnedProcess) -> None:
            fd = started.conn.fileno()
            # Where one runs. None is started for a worker, which makes nothing that it would look after: 20 ms, 11 MB.
            tracker = tracker_descriptor()
            ends: list[int] = []
            try:
                ends += os.pipe()
                ends += os.pipe()
                self.sentinel, alive, source, orders = ends
                command = [spawn.get_executable(), *interpreter_flags()]
                # The last argument is how ``multiprocess`` marks what it spawns.
                command += ["-c", _PROGRAM.format(pipe=source), "--multiprocessing-fork"]
                inherited = [fd, source, alive, *([] if tracker is None else [tracker]), *started.fds]
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
        fds: other descriptors that it gets, with the numbers that they have here.
    """

    def __init__(self, name: str, orders: dict[str, Any], conn: Any, fds: Sequence[int] = ()) -> None:
        super().__init__(name=name, daemon=True)
        self.orders = orders
        self.conn = conn
        self.fds = fds

    @staticmethod
    def _Popen(started: SpawnedProcess) -> Any:
        return _SpawnedPopen(started)


# -- the end of the main process ---------------------------------------------------------------------------------------


class Lifeline:
    """The main process's end. Owns a pipe (Linux) or the handle of a job object (Windows).

    Raises:
        OSError: no descriptors.
    """

    def __init__(self) -> None:
        self._ends: tuple[int, ...] = os.pipe() if sys.platform == "linux" else ()
        self.job: JobObject | None = None
        if sys.platform == "win32":
            with contextlib.suppress(OSError):
                self.job = JobObject(load_kernel32())

    def tie(self, process: Any, link: Link) -> None:
        """Have a worker end with this process."""
        if self.job is not None:
            with contextlib.suppress(OSError):  # the worker has ended, or the system refuses
                self.job.add(process.sentinel)
        if self._ends and not PORTABLE:
            if can_pass_descriptors():
                link.send(DEATH, descriptor=self._ends[0])
            else:
                link.send(DEATH, content=f"/proc/{os.getpid()}/fd/{self._ends[0]}".encode())

    def close(self) -> None:
        """End the workers that live. In a forked child this ends no worker: its copy must not keep them alive."""
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)
        if self.job is not None:
            self.job.close()


KILL_ON_JOB_CLOSE = 0x2000
SILENT_BREAKAWAY_OK = 0x1000
EXTENDED_LIMIT_INFORMATION = 9
"""`JobObjectExtendedLimitInformation` of the enumeration `JOBOBJECTINFOCLASS`."""

LIMITS_SIZE = 144 if ctypes.sizeof(ctypes.c_void_p) == 8 else 112
"""Bytes of a `JOBOBJECT_EXTENDED_LIMIT_INFORMATION`."""

FLAGS_OFFSET = 16
"""Where its `BasicLimitInformation.LimitFlags` begin: 32 bits. Everything else stays 0."""


def load_kernel32() -> Any:
    """kernel32 of this process."""
    kernel32 = ctypes.WinDLL("kernel32", use_last_error=True)  # type: ignore[attr-defined,unused-ignore]
    kernel32.CreateJobObjectW.restype = ctypes.c_void_p  # otherwise the handle would be cut to 32 bits
    return kernel32


class JobObject:
    """A job whose processes end with its handle. Owns the handle, which no child inherits.

    Args:
        kernel32: the system's library, see `load_kernel32`. Handles are passed to it as pointers.

    Raises:
        OSError: the system refuses.
    """

    def __init__(self, kernel32: Any) -> None:
        self._kernel32 = kernel32
        self._handle = ctypes.c_void_p(kernel32.CreateJobObjectW(None, None))
        self._check(self._handle, "CreateJobObjectW")
        limits = ctypes.create_string_buffer(LIMITS_SIZE)
        struct.pack_into("=I", limits, FLAGS_OFFSET, KILL_ON_JOB_CLOSE | SILENT_BREAKAWAY_OK)
        done = kernel32.SetInformationJobObject(self._handle, EXTENDED_LIMIT_INFORMATION, limits, LIMITS_SIZE)
        self._check(done, "SetInformationJobObject")

    def add(self, process: int) -> None:
        """Put a process into the job.

        Args:
            process: its handle, with the right to terminate it, as `multiprocess` has of what it starts.

        Raises:
            OSError: the system refuses, or it has ended.
        """
        done = self._kernel32.AssignProcessToJobObject(self._handle, ctypes.c_void_p(process))
        self._check(done, "AssignProcessToJobObject")

    def close(self) -> None:
        """Terminate the processes that are in it still. Twice does nothing."""
        handle, self._handle = self._handle, ctypes.c_void_p()
        if handle:
            self._kernel32.CloseHandle(handle)

    @staticmethod
    def _check(done: Any, function: str) -> None:
        if not done:
            number = getattr(ctypes, "get_last_error", int)()
            raise OSError(number, f"{function} failed (Windows error {number})")
