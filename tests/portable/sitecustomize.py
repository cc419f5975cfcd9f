"""Windows or macOS, as far as Linux can stand in for them: ``make test-portable``.

    interpreter --PYTHONPATH--> this file --import of os, sys, ... in a file of this repository--> its stand-in

With ``SHARDED_LOADER_TEST_PORTABLE=windows`` or ``macos`` the package and its tests see modules that lack what the
other system lacks. The standard library, torch and pytest see the real ones. Each process of a test begins here, also a
spawned worker. What the package does by another way, such as a fork of ``multiprocess``, an audit hook refuses.
"""

import atexit
import builtins
import contextlib
import errno
import fcntl
import importlib
import itertools
import os
import re
import stat
import struct
import sys
import threading
import weakref
from pathlib import Path
from types import ModuleType, SimpleNamespace

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


own_names = ModuleType.__dict__["__dict__"].__get__  # `vars` shows those of the real one too


class StandIn(ModuleType):
    """A module without some names, and with others in place of its own; what else is set or read is the real one's."""

    def __init__(self, real: ModuleType, **own: object) -> None:
        super().__init__(real.__name__, real.__doc__)
        own_names(self).update(own, real_one=real)

    @property
    def __dict__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in dir(self)}

    def __getattr__(self, name: str) -> object:
        if MISSING[SYSTEM].fullmatch(f"{self.real_one.__name__}.{name}"):
            raise AttributeError(f"module {self.real_one.__name__!r} has no attribute {name!r} on {SYSTEM}")
        return getattr(self.real_one, name)

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, value) if name in own_names(self) else setattr(self.real_one, name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name) if name in own_names(self) else delattr(self.real_one, name)

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


TEMPORARY = 1 << 40
"""``O_TEMPORARY``: the system deletes the file with its last handle. Its sticky bit says so here."""

folders: set[str] = set()
"""Where this process has made such files."""


def open_file(path: str, flags: int, mode: int = 0o777, **options: object) -> int:
    """``os.open`` of Windows, which shares the right to delete only with who has it too."""
    if flags & TEMPORARY:
        folders.add(os.path.dirname(path))
        fd = os.open(path, flags & ~TEMPORARY | os.O_CLOEXEC, mode, **options)
        os.fchmod(fd, stat.S_IMODE(os.fstat(fd).st_mode) | stat.S_ISVTX)
        return fd
    if asks() and is_temporary(path):
        raise PermissionError(errno.EACCES, "another process may delete the file", path)
    return os.open(path, flags, mode, **options)


def is_temporary(path: str) -> bool:
    with contextlib.suppress(OSError):
        return stat.S_ISREG(found := os.stat(path).st_mode) and bool(found & stat.S_ISVTX)
    return False


def sweep(folder: str, ending: str = "") -> None:
    """Delete the temporary files in a folder whose last handle is closed, or is that of a process that ends."""
    with looking(), contextlib.suppress(OSError):
        names = [one.path for one in os.scandir(folder) if one.name.startswith("sharded_loader-")]
        if found := set(filter(is_temporary, names)):
            for pid in set(filter(str.isdigit, os.listdir("/proc"))) - {ending}:
                with contextlib.suppress(OSError):
                    for fd in os.listdir(f"/proc/{pid}/fd"):
                        with contextlib.suppress(OSError):
                            found.discard(os.readlink(f"/proc/{pid}/fd/{fd}"))
            for path in found:
                os.unlink(path)


@atexit.register
def end() -> None:
    for folder in folders:
        sweep(folder, ending=f"{os.getpid()}")


def list_folder(path: str = ".") -> list[str]:
    if isinstance(path, (str, os.PathLike)) and not HIDDEN.match(os.fspath(path)):
        sweep(os.fspath(path))
    return os.listdir(path)


def create_file(path: str, access: int, share: int, *others: int) -> int:
    """``CreateFile`` of Windows."""
    if is_temporary(path):
        sweep(os.path.dirname(path))
        if not share & 4:
            raise PermissionError(errno.EACCES, "another process may delete the file", path)
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)


FAR = 1 << 43
"""Linux has files of up to 16 TB, and lets nobody seek further."""

positions: dict[int, int] = {}


def seek(fd: int, offset: int, how: int) -> int:
    if how == os.SEEK_SET:
        positions[fd] = offset
    return offset if how == os.SEEK_SET and offset >= FAR else os.lseek(fd, offset, how)


def lock(fd: int, mode: int, nbytes: int) -> None:
    """``msvcrt.locking``: a lock of this handle, from its position on."""
    of_handle = struct.pack("hhqqi", mode, os.SEEK_SET, positions[fd], nbytes, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, of_handle)
    except BlockingIOError:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES)) from None


OF_WINDOWS = {
    "_winapi": SimpleNamespace(CreateFile=create_file, GENERIC_READ=1 << 31, GENERIC_WRITE=1 << 30, OPEN_EXISTING=3),
    "msvcrt": SimpleNamespace(
        locking=lock, LK_NBLCK=fcntl.F_WRLCK, LK_UNLCK=fcntl.F_UNLCK, open_osfhandle=lambda handle, flags: handle
    ),
}


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
        if windows:
            calls = {"open": open_file, "listdir": list_folder, "lseek": seek}
            return StandIn(real, name="nt", path=path, O_BINARY=0, O_NOINHERIT=0, O_TEMPORARY=TEMPORARY, **calls)
        return StandIn(real, path=path)
    if name == "mmap":
        return StandIn(real, mmap=mapped(real))
    if name == "_posixshmem":
        return Names(real)
    if name == "multiprocess" and windows:
        for library in ("multiprocess", "multiprocessing"):
            pipes(importlib.import_module(f"{library}.connection"))
            context = importlib.import_module(f"{library}.context")
            context._default_context._default_context = context._concrete_contexts["spawn"]
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
    if ours and SYSTEM == "windows" and name in OF_WINDOWS and names["__file__"].startswith(PACKAGE):
        return OF_WINDOWS[name]
    module = _import(name, names, locals, fromlist, level)
    if ours and (top := name.partition(".")[0]) in STOOD_IN and (top == name or not fromlist):
        if top not in found:
            found[top] = stand_in(sys.modules[top])
        return found[top]
    return module


if SYSTEM:
    builtins.__import__ = importing
    sys.addaudithook(audit)
