"""Workers end with the main process, whatever they are doing. The main process notices the end of a worker.

    main:     Lifeline() .tie(process, link) .close()    Linux: the only writing end of a pipe. Windows: a job object
    worker:   die_with(path)                             the kernel kills this process when that end is closed
              keep_from_children(conn, held)             the pipes that end with the worker, not with its children

The kernel closes the main process's end when that process ends, also by SIGKILL. So a worker ends that holds the GIL,
in which none of its own threads can notice anything. Processes that a worker starts are the user's: they live on.

What can go wrong: the kernel refuses the signal or the job (a sandbox, Windows 7 inside another job). There is nothing
of the kind on macOS. Then the worker's receiver thread ends the process, which it cannot while code in C holds the GIL.

Source: "Job Objects" and "JOBOBJECT_EXTENDED_LIMIT_INFORMATION" in Microsoft's Win32 documentation.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import sys
from typing import Any

from sharded_loader.base.system import can_pass_descriptors, is_readable
from sharded_loader.pools.process.link import DEATH, PORTABLE, Link, pack_head

try:
    import fcntl
except ImportError:  # Windows
    pass


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
                link.send(pack_head(DEATH), descriptor=self._ends[0])
            else:
                link.send(pack_head(DEATH, content=f"/proc/{os.getpid()}/fd/{self._ends[0]}".encode()))

    def close(self) -> None:
        """End the workers that live. In a forked child this ends no worker: its copy must not keep them alive."""
        ends, self._ends = self._ends, ()
        for end in ends:
            os.close(end)
        if self.job is not None:
            self.job.close()


# -- in a worker ----------------------------------------------------------------------------------------------


def die_with(path: str) -> None:
    """Have the kernel kill this process when the other end of a pipe is closed. Linux.

    PDEATHSIG would not do: it fires when the *thread* ends that has started this process. The owner of a signal belongs
    to the open file, which workers share. So the pipe is opened once more, by its path under /proc.

    Raises:
        OSError: no /proc, no descriptors, or the kernel refuses.
    """
    own = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    except OSError:
        os.close(own)
        raise
    if is_readable(own):
        os._exit(1)  # it was closed just before


def keep_from_children(conn: Any, held: int | None) -> None:
    """Close the ends by which the main process notices the death of this process in what the user's code starts.

    Args:
        conn: the worker's end of the pipe.
        held: the other end of the process object's sentinel, if the worker knows it.
    """
    if not hasattr(os, "register_at_fork"):
        return
    os.set_inheritable(conn.fileno(), False)  # by other programs
    os.register_at_fork(after_in_child=conn.close)
    if held is not None:
        os.set_inheritable(held, False)
        os.register_at_fork(after_in_child=lambda: os.close(held))


# -- Windows --------------------------------------------------------------------------------------------------

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
