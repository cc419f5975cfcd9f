"""Windows or macOS, as far as Linux can stand in for them: ``make test-portable``.

    interpreter --PYTHONPATH--> this file --import of os, sys, ... in a file of this repository--> its stand-in

With ``SHARDED_LOADER_TEST_PORTABLE=windows`` or ``macos`` the package and its tests see modules that lack what the
other system lacks. The standard library, torch and pytest see the real ones. Each process of a test begins here, also a
spawned worker. What the package does by another way, such as a fork of ``multiprocess``, an audit hook refuses.
"""

import builtins
import contextlib
import errno
import importlib
import itertools
import os
import re
import stat
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType

SYSTEM = os.environ.get("SHARDED_LOADER_TEST_PORTABLE", "")
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
PACKAGE, TESTS = ROOT + "sharded_loader" + os.sep, ROOT + "tests" + os.sep
HIDDEN = re.compile(r"/(proc|sys|dev/shm)\b")

LINUX = r"""os\.(memfd_create|MFD_\w+|pidfd_open|posix_fallocate|posix_fadvise|sched_\w+|O_TMPFILE|splice|eventfd\w*)
    |signal\.(SIGRTM\w+|SIGPOLL|pidfd_send_signal) |select\.epoll |socket\.(MSG_NOSIGNAL|SOCK_CLOEXEC|AF_NETLINK)
    |fcntl\.(F_SETSIG|F_GETSIG|F_ADD_SEALS|F_OFD\w+) |mmap\.(MAP_POPULATE|MADV_HUGEPAGE)"""
POSIX = r"""os\.(fork\w*|register_at_fork|preadv?|pwritev?|posix_\w+|sysconf\w*|get(e?[ug]id|pg\w+|loadavg)|setsid
        |setpgid|killpg|wait|waitid|W[A-Z]\w+|fchmod|fchown|chown|set_blocking|get_blocking|mkfifo|f?statvfs|nice|uname
        |O_(CLOEXEC|NONBLOCK|NOFOLLOW|DIRECTORY|ASYNC|SYNC|DIRECT))
    |signal\.(SIG(?!ABRT|FPE|ILL|INT|SEGV|TERM|_DFL|_IGN)[A-Z]\w+|pthread_\w+|sig(wait\w*|pending)|setitimer|alarm|pause)
    |select\.(poll|POLL\w+) |socket\.(AF_UNIX|SCM_\w+|send_fds|recv_fds|CMSG_\w+|MSG_(CTRUNC|DONTWAIT))
    |mmap\.(MAP_\w+|PROT_\w+|MADV_\w+)"""
MISSING = {"windows": re.compile(f"{LINUX}|{POSIX}", re.VERBOSE), "macos": re.compile(LINUX, re.VERBOSE)}
ABSENT = {"windows": {"fcntl", "resource", "_posixshmem", "termios", "pwd", "grp"}, "macos": set()}


class StandIn(ModuleType):
    """A module without some names, and with others in place of its own; what else is set or read is the real one's."""

    def __init__(self, real: ModuleType, **own: object) -> None:
        super().__init__(real.__name__, real.__doc__)
        self.__dict__.update(own, real_one=real)

    def __getattr__(self, name: str) -> object:
        if MISSING[SYSTEM].fullmatch(f"{self.real_one.__name__}.{name}"):
            raise AttributeError(f"module {self.real_one.__name__!r} has no attribute {name!r} on {SYSTEM}")
        return getattr(self.real_one, name)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value) if name in self.__dict__ else setattr(self.real_one, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if name in self.__dict__ else delattr(self.real_one, name)

    def __dir__(self) -> list[str]:
        return [name for name in dir(self.real_one) if hasattr(self, name)]

    def __reduce__(self) -> tuple:
        return importlib.import_module, (self.real_one.__name__,)


def asks(through: str = "multiprocess") -> bool:
    """Whether the package asks by itself: its file is the nearest one on the stack, but for the standard library's."""
    frame = sys._getframe(1)
    while frame is not None:
        if (name := frame.f_code.co_filename).startswith((PACKAGE, TESTS)) and name != __file__:
            return name.startswith(PACKAGE)
        if "-packages" in name and f"{os.sep}{through}{os.sep}" not in name:
            return False
        frame = frame.f_back
    return False


def is_open(path: str) -> bool:
    """Whether this process, its parent or a child has a file open or mapped."""
    me, wanted = os.getpid(), os.stat(path)
    tasks = [Path(f"/proc/{me}/task/{task}/children").read_text().split() for task in os.listdir(f"/proc/{me}/task")]
    for pid in (me, os.getppid(), *itertools.chain(*tasks)):
        with contextlib.suppress(OSError):  # it has ended
            if f" {os.path.realpath(path)}\n" in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                return True
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    if os.path.samestat(os.stat(f"/proc/{pid}/fd/{fd}"), wanted):
                        return stat.S_ISREG(wanted.st_mode)
    return False


def audit(event: str, values: tuple) -> None:
    """Refuse the package what the other system has not, or does not allow."""
    if getattr(busy, "asks", False):
        return
    if event in ("open", "os.listdir", "os.scandir"):
        if isinstance(values[0], str) and HIDDEN.match(values[0]) and asks():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), values[0])
    elif SYSTEM == "windows" and event in ("os.rename", "os.remove"):
        for path in values[: 1 + (event == "os.rename")] if asks() else ():
            with looking():
                held = os.path.exists(path) and is_open(os.fspath(path))
            if held:
                raise PermissionError(errno.EACCES, "the file is open in a process", path)
    elif (event == "os.fork" or (event == "os.kill" and not values[1])) and SYSTEM == "windows" and asks():
        raise AssertionError(f"{event}{values} in the package: not on {SYSTEM}")


busy = threading.local()


@contextlib.contextmanager
def looking():
    """This thread looks at what the package must not see."""
    busy.asks = True
    try:
        yield
    finally:
        busy.asks = False


def find_by_tag(tag: str) -> int | None:
    """A descriptor of the memory that some process holds under this name."""
    with looking():
        for pid in (os.getpid(), os.getppid(), *filter(str.isdigit, os.listdir("/proc"))):
            with contextlib.suppress(OSError):
                for fd in os.listdir(folder := f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):  # closed meanwhile, as that of the list is
                        if os.readlink(f"{folder}/{fd}") == f"/memfd:{tag} (deleted)":
                            return os.open(f"{folder}/{fd}", os.O_RDWR)
    return None


def mapped(mmap: ModuleType) -> type:
    class Windows(mmap.mmap):
        """A map that has a name as long as one process has it open; it takes no flags."""

        def __new__(cls, fileno: int, length: int, tagname: str | None = None, access: int = 0, offset: int = 0):
            fd = fileno
            if tagname is not None and (fd := find_by_tag(tagname)) is None:
                fd = os.memfd_create(tagname)
                os.ftruncate(fd, length)
            try:  # the map has a descriptor of its own: the handle
                return super().__new__(cls, fd, length, access=access, offset=offset)
            finally:
                if fd != fileno:
                    os.close(fd)

    class MacOS(mmap.mmap):
        """Memory of ``shm_open`` is mapped as shared memory only."""

        def __new__(cls, fileno: int, length: int, *args: object, **options: object):
            of_shm = fileno >= 0 and os.readlink(f"/proc/self/fd/{fileno}").startswith("/dev/shm/")
            if of_shm and options.get("access") == mmap.ACCESS_COPY:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return super().__new__(cls, fileno, length, *args, **options)

    return Windows if SYSTEM == "windows" else MacOS


def pipes(connection: ModuleType) -> None:
    """Pipes of Windows: one sender at a time, and no more than 63 handles are waited for."""
    send, wait, turns = connection.Connection._send_bytes, connection.wait, weakref.WeakKeyDictionary()

    def _send_bytes(self, buf):
        turn = turns.setdefault(self, threading.Lock())
        if not turn.acquire(blocking=False):
            raise ValueError("concurrent send_bytes() calls are not supported")
        with contextlib.ExitStack() as stack:
            stack.callback(turn.release)
            send(self, buf)

    def wait_for_some(handles, timeout=None):
        if len(handles := list(handles)) > 63:
            raise ValueError(f"need at most 63 handles, got a sequence of length {len(handles)}")
        return wait(handles, timeout)

    connection.Connection._send_bytes, connection.wait = _send_bytes, wait_for_some


class Names:
    """``shm_open`` of macOS: at most 31 characters."""

    def __init__(self, real: ModuleType) -> None:
        self.shm_unlink, self.opened = real.shm_unlink, real.shm_open

    def shm_open(self, name: str, *args: object, **options: object) -> int:
        if len(name) > 31:
            raise OSError(errno.ENAMETOOLONG, os.strerror(errno.ENAMETOOLONG), name)
        return self.opened(name, *args, **options)


def stand_in(real: ModuleType) -> object:
    name, windows = real.__name__, SYSTEM == "windows"
    if name == "sys":
        return StandIn(real, platform="win32" if windows else "darwin")
    if name == "os":
        path = StandIn(real.path, isdir=unless_hidden(real.path.isdir), exists=unless_hidden(real.path.exists))
        return StandIn(real, name="nt" if windows else real.name, path=path)
    if name == "mmap":
        return StandIn(real, mmap=mapped(real))
    if name == "_posixshmem":
        return Names(real)
    if name == "multiprocess" and windows:
        for library in ("multiprocess", "multiprocessing"):
            pipes(importlib.import_module(f"{library}.connection"))
        return StandIn(real, get_all_start_methods=lambda: ["spawn"])
    return StandIn(real)


def unless_hidden(ask):
    return lambda path: False if isinstance(path, str) and HIDDEN.match(path) and asks() else ask(path)


STOOD_IN = {"sys", "os", "signal", "socket", "select", "mmap", "fcntl", "multiprocess", "_posixshmem"}
found: dict[str, object] = {}


def importing(name, names=None, locals=None, fromlist=(), level=0, _import=builtins.__import__):
    ours = level == 0 and str((names or {}).get("__file__", "")).startswith((PACKAGE, TESTS))
    if ours and name in ABSENT[SYSTEM] and names["__file__"].startswith(PACKAGE):
        raise ModuleNotFoundError(f"No module named {name!r} on {SYSTEM}", name=name)
    module = _import(name, names, locals, fromlist, level)
    if ours and (top := name.partition(".")[0]) in STOOD_IN and (top == name or not fromlist):
        if top not in found:
            found[top] = stand_in(sys.modules[top])
        return found[top]
    return module


if SYSTEM:
    builtins.__import__ = importing
    sys.addaudithook(audit)
