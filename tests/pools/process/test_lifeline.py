"""Workers end with their trainer. Windows' job objects, as far as they can be tried anywhere."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import multiprocess
import pytest

from sharded_loader.pools.process.link import make_link
from sharded_loader.pools.process.start import (
    EXTENDED_LIMIT_INFORMATION,
    FLAGS_OFFSET,
    LIMITS_SIZE,
    JobObject,
    Lifeline,
)
from sharded_loader.pools.process.worker import close_in_children, die_with


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


class ExtendedLimits(ctypes.Structure):
    """`JOBOBJECT_EXTENDED_LIMIT_INFORMATION`. The counters are those of `IO_COUNTERS`."""

    _fields_ = (
        ("BasicLimitInformation", BasicLimits),
        ("IoInfo", ctypes.c_uint64 * 6),
        ("ProcessMemoryLimit", ctypes.c_size_t),
        ("JobMemoryLimit", ctypes.c_size_t),
        ("PeakProcessMemoryUsed", ctypes.c_size_t),
        ("PeakJobMemoryUsed", ctypes.c_size_t),
    )


class Kernel32:
    """Notes what it is asked for. The function named ``fails`` does."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[str] = []
        self.flags = 0
        self.processes: list[int] = []

    def _call(self, name: str) -> int:
        self.calls.append(name)
        return 0 if name == self.fails else 77

    def CreateJobObjectW(self, security: Any, name: Any) -> int:
        assert security is None and name is None  # not inherited; not to be found by others
        return self._call("create")

    def SetInformationJobObject(self, handle: ctypes.c_void_p, kind: int, limits: Any, size: int) -> int:
        assert (handle.value, kind, size, len(limits)) == (77, EXTENDED_LIMIT_INFORMATION, LIMITS_SIZE, LIMITS_SIZE)
        self.flags = ExtendedLimits.from_buffer(limits).BasicLimitInformation.LimitFlags
        return self._call("set")

    def AssignProcessToJobObject(self, handle: ctypes.c_void_p, process: ctypes.c_void_p) -> int:
        assert handle.value == 77
        assert process.value is not None
        self.processes.append(process.value)
        return self._call("assign")

    def CloseHandle(self, handle: ctypes.c_void_p) -> int:
        assert handle.value == 77
        return self._call("close")


def test_limits_are_laid_out_as_documented() -> None:
    assert ctypes.sizeof(ExtendedLimits) == LIMITS_SIZE
    assert ExtendedLimits.BasicLimitInformation.offset + BasicLimits.LimitFlags.offset == FLAGS_OFFSET


def test_a_job_ends_its_processes_with_its_handle_and_lets_theirs_be() -> None:
    kernel32 = Kernel32()
    job = JobObject(kernel32)
    assert kernel32.flags == 0x2000 | 0x1000  # KILL_ON_JOB_CLOSE, SILENT_BREAKAWAY_OK
    job.add(5)
    job.close()
    job.close()
    assert kernel32.processes == [5]
    assert kernel32.calls == ["create", "set", "assign", "close"]


@pytest.mark.parametrize("fails", ["create", "set"])
def test_a_job_that_cannot_be_made_is_an_error(fails: str) -> None:
    with pytest.raises(OSError, match="JobObject"):
        JobObject(Kernel32(fails))


@pytest.mark.parametrize("fails", ["", "assign"])
def test_every_worker_is_put_into_the_job_and_one_that_cannot_be_is_no_error(fails: str) -> None:
    kernel32 = Kernel32(fails)
    lifeline = Lifeline()
    lifeline.job = JobObject(kernel32)
    link: Any = SimpleNamespace(send=lambda *_, **__: None)
    for process in (SimpleNamespace(sentinel=5), SimpleNamespace(sentinel=6)):
        lifeline.tie(process, link)
    assert kernel32.processes == [5, 6]
    assert "close" not in kernel32.calls
    for _ in range(2):
        lifeline.close()
    assert kernel32.calls.count("close") == 1


# -- Linux ----------------------------------------------------------------------------------------------------

linux = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's signal for a pipe: Linux")


@linux
def test_a_process_dies_with_the_other_end_of_its_pipe() -> None:
    reader, writer = os.pipe()
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        die_with(f"/proc/self/fd/{reader}")
        os.write(tell, b"x")
        while True:
            time.sleep(60)
    os.read(ready, 1)
    os.close(writer)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    for end in (reader, ready, tell):
        os.close(end)


@linux
def test_a_pipe_that_is_closed_already_ends_the_process_at_once() -> None:
    reader, writer = os.pipe()
    os.close(writer)
    pid = os.fork()
    if pid == 0:
        die_with(f"/proc/self/fd/{reader}")
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) in (1, -signal.SIGKILL)
    os.close(reader)


@linux
def test_what_the_trainer_watches_is_closed_in_the_children_of_a_worker() -> None:
    ours, theirs = multiprocess.Pipe()
    sentinel, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        ours.close()
        link = make_link(theirs, blocks=True)
        end = link.waitable
        close_in_children(held)
        child = os.fork()
        if child == 0:
            os._exit(os.path.exists(f"/proc/self/fd/{held}") or os.path.exists(f"/proc/self/fd/{end}"))
        assert os.get_inheritable(held) is False
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    for end in (sentinel, held):
        os.close(end)
    ours.close()
    theirs.close()
