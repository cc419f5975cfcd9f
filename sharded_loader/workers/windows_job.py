"""Windows: workers that end when their trainer does, whatever they are doing.

    JobObject() .add(process handle of a worker)       the trainer holds the only handle of the job
    the trainer closes it, or is terminated       -->  the kernel terminates the workers that are in it

So also a worker ends that holds the GIL, in which none of its own threads can notice that the pipe has ended. (On
Linux a signal of the kernel's does the same: `workers.worker`.) Processes that a worker starts are not in the job:
they are the user's.

A job that cannot be made (Windows 7 inside another job, a sandbox) is an OSError; the pool goes on without.

Source: "Job Objects" and "JOBOBJECT_EXTENDED_LIMIT_INFORMATION" in Microsoft's Win32 documentation.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

KILL_ON_JOB_CLOSE = 0x2000
SILENT_BREAKAWAY_OK = 0x1000
EXTENDED_LIMIT_INFORMATION = 9
"""`JobObjectExtendedLimitInformation` of the enumeration `JOBOBJECTINFOCLASS`."""


class BasicLimits(ctypes.Structure):
    """`JOBOBJECT_BASIC_LIMIT_INFORMATION`. DWORD is 32 bits: `ctypes.wintypes` says otherwise off Windows."""

    _fields_ = (
        ("PerProcessUserTimeLimit", ctypes.c_int64),
        ("PerJobUserTimeLimit", ctypes.c_int64),
        ("LimitFlags", ctypes.c_uint32),
        ("MinimumWorkingSetSize", ctypes.c_size_t),
        ("MaximumWorkingSetSize", ctypes.c_size_t),
        ("ActiveProcessLimit", ctypes.c_uint32),
        ("Affinity", ctypes.c_size_t),
        ("PriorityClass", ctypes.c_uint32),
        ("SchedulingClass", ctypes.c_uint32),
    )


class IoCounters(ctypes.Structure):
    """`IO_COUNTERS`."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "ReadOperationCount",
            "WriteOperationCount",
            "OtherOperationCount",
            "ReadTransferCount",
            "WriteTransferCount",
            "OtherTransferCount",
        )
    )


class ExtendedLimits(ctypes.Structure):
    """`JOBOBJECT_EXTENDED_LIMIT_INFORMATION`."""

    _fields_ = (
        ("BasicLimitInformation", BasicLimits),
        ("IoInfo", IoCounters),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


def load_kernel32() -> Any:
    """kernel32 with the signatures of what is called: without them a handle is cut to 32 bits."""
    if sys.platform != "win32":
        raise OSError("there are job objects on Windows only")
    return with_signatures(ctypes.WinDLL("kernel32", use_last_error=True))


def with_signatures(kernel32: Any) -> Any:
    """``kernel32``, its functions declared: HANDLE and LPVOID are pointers, BOOL is an int."""
    pointer, number = ctypes.c_void_p, ctypes.c_uint32
    for name, result, arguments in (
        ("CreateJobObjectW", pointer, (pointer, ctypes.c_wchar_p)),
        ("SetInformationJobObject", ctypes.c_int, (pointer, ctypes.c_int, pointer, number)),
        ("AssignProcessToJobObject", ctypes.c_int, (pointer, pointer)),
        ("CloseHandle", ctypes.c_int, (pointer,)),
    ):
        function = getattr(kernel32, name)
        function.restype, function.argtypes = result, arguments
    return kernel32


class JobObject:
    """A job whose processes end with its handle. Owns the handle, which no child inherits.

    Args:
        kernel32: the system's library; None: that of this process.

    Raises:
        OSError: there are none here, or the system refuses.
    """

    def __init__(self, kernel32: Any = None) -> None:
        self._kernel32 = load_kernel32() if kernel32 is None else kernel32
        self._handle = self._kernel32.CreateJobObjectW(None, None)
        if not self._handle:
            raise _last_error("CreateJobObjectW")
        limits = ExtendedLimits()
        limits.BasicLimitInformation.LimitFlags = KILL_ON_JOB_CLOSE | SILENT_BREAKAWAY_OK
        size = ctypes.sizeof(limits)
        done = self._kernel32.SetInformationJobObject(
            self._handle, EXTENDED_LIMIT_INFORMATION, ctypes.byref(limits), size
        )
        if not done:
            error = _last_error("SetInformationJobObject")
            self.close()
            raise error

    def add(self, process: int) -> None:
        """Put a process into the job.

        Args:
            process: its handle, with the right to terminate it, as `multiprocess` has of what it starts.

        Raises:
            OSError: the system refuses, or it has ended.
        """
        if not self._kernel32.AssignProcessToJobObject(self._handle, process):
            raise _last_error("AssignProcessToJobObject")

    def close(self) -> None:
        """Terminate the processes that are in it still. Twice does nothing."""
        handle, self._handle = self._handle, None
        if handle:
            self._kernel32.CloseHandle(handle)


def _last_error(function: str) -> OSError:
    """The error of the call that has just failed."""
    number = getattr(ctypes, "get_last_error", int)()
    return OSError(number, f"{function} failed (Windows error {number})")
