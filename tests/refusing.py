"""A child process in which the kernel refuses chosen system calls, as the seccomp profile of a container does."""

import ctypes
import errno
import os
import platform
import select
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable

CALLS = {
    # name: (number on x86_64, number on arm64)
    "pidfd_open": (434, 434),
    "memfd_create": (319, 279),
    "fallocate": (285, 47),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    "sigaltstack": (131, 132),
    "sched_getaffinity": (204, 123),
    "eventfd2": (290, 19),
    "epoll_create1": (291, 20),
    "copy_file_range": (326, 285),
    "sendfile": (40, 71),
    "madvise": (28, 233),
    "fcntl": (72, 25),
}

FCNTL = {"F_SETOWN": 8, "F_SETSIG": 10}  # only these commands of ``fcntl`` are refused: the others are everywhere
ERRORS = {"ENOSYS": errno.ENOSYS, "EPERM": errno.EPERM, "EACCES": errno.EACCES}

_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _FILTER = 38, 22, 2


_MOST = 50_000  # bytes that a pipe takes although nobody reads


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def refuse(calls: Iterable[str], error: str) -> None:
    """Have the kernel refuse these calls, and commands of ``fcntl``, in this process and all that it starts.

    Raises:
        OSError: there is no seccomp here.
    """
    machine = {"x86_64": 0, "aarch64": 1}.get(platform.machine())
    if machine is None or not sys.platform.startswith("linux"):
        raise OSError(errno.ENOSYS, "the numbers of this machine's system calls are not known")
    no = (_RETURN, 0, 0, _ERROR | ERRORS[error])
    program = [(_LOAD, 0, 0, 0)]
    for call in calls:
        if call in FCNTL:  # the second argument, a C int: the low half of the word at 24
            program += [(_EQUAL, 0, 4, CALLS["fcntl"][machine]), (_LOAD, 0, 0, 24), (_EQUAL, 0, 1, FCNTL[call]), no]
            program += [(_LOAD, 0, 0, 0)]
        else:
            program += [(_EQUAL, 0, 1, CALLS[call][machine]), no]
    program.append((_RETURN, 0, 0, _ALLOW))
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    libc = ctypes.CDLL(None, use_errno=True)
    filter = _Program(len(program), ctypes.addressof(code))
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(filter), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def in_child(work: Callable[[], object], seconds: int = 60) -> str:
    """What ``work`` returns, as text, when a forked child calls it; its traceback, if it raises.

    The child is killed after so many seconds: a hang is a failure of this test, not the end of all tests.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(seconds)
        try:
            text = str(work())
        except BaseException:
            text = traceback.format_exc()
        os.write(writer, text.encode()[:_MOST])
        os._exit(0)
    # Its end first, not that of the pipe: what it has forked holds that too.
    exitcode = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(writer)
    text = (select.select([reader], [], [], 0)[0] and os.read(reader, _MOST).decode()) or ""
    os.close(reader)
    return text if exitcode == 0 else f"{text}the child ended with exit code {exitcode}"


def can_refuse() -> bool:
    """Whether this machine has seccomp."""
    return sys.platform.startswith("linux") and in_child(lambda: refuse([], "EPERM")) == "None"
