"""What goes wrong where a dataset is read: errors, deaths and hangs. Torch-free: a spawned worker starts fast."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

KILL = getattr(signal, "SIGKILL", signal.SIGTERM)
"""Ends a process at once, also on Windows."""


class Boom(Exception):
    """Cannot be made from its args."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} went wrong")
        self.code = code


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.both = (a, b)


def local_error() -> type[Exception]:
    class Local(ValueError):
        marker = "of the class"

        def __init__(self, a: str, *, keyword: int) -> None:
            super().__init__(a)
            self.keyword = keyword

    return Local


Local = local_error()


class Unpicklable(Exception):
    """Cannot travel: it holds a lock."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __str__(self) -> str:
        return f"cannot travel {self.lock.locked()}"  # its twin has no lock


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NoNotes(Exception):
    __notes__ = ()  # type: ignore[assignment]


class OwnNew(Exception):
    def __new__(cls, a: int, b: int) -> "OwnNew":
        return super().__new__(cls)

    def __init__(self, a: int, b: int) -> None:
        self.both = a, b


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def odd_errors() -> list[Exception]:
    plain = KeyError((1, object())), ValueError(np.zeros(100_000))
    return [Frozen(3), NoNotes("x"), OwnNew(1, 2), Unprintable(), *plain]


def nothing() -> None:
    """Does not fail."""


def boom() -> None:
    raise Boom("sample", 42)


def raise_lookup() -> None:
    raise LookupError("of the test")


_SAME = Boom("always the same", 1)


def same_again() -> None:
    raise _SAME


def raise_unpicklable() -> None:
    raise Unpicklable


def stop() -> None:
    raise StopIteration("early")


def exit_() -> None:
    raise SystemExit(4)


def leave() -> None:
    os._exit(3)


def kill() -> None:
    os.kill(os.getpid(), KILL)


def crashes() -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGSEGV, signal.SIG_DFL)  # pytest's faulthandler is inherited by forked workers
    os.kill(os.getpid(), signal.SIGSEGV)


def hang() -> None:
    time.sleep(1000)


def hang_for_a_while() -> None:
    """In a thread, which nobody can end."""
    time.sleep(3)


def stops_itself() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)


def hangs_with_the_gil() -> None:
    while True:  # a signal, such as the one that asks for stacks, ends one sleep
        if hasattr(ctypes, "WinDLL"):
            ctypes.PyDLL("kernel32").Sleep(30_000)
        else:
            ctypes.PyDLL(None).sleep(30)


class Fails:
    """Fails when called, or only in the first call that any process makes."""

    def __init__(self, how: Callable[[], Any], count_in: Path, times: int = 1_000_000) -> None:
        self.how, self.count_in, self.times = how, count_in, times

    def __call__(self) -> None:
        with self.count_in.open("a") as file:
            file.write("x")
        if self.count <= self.times:
            self.how()

    @property
    def count(self) -> int:
        """How often it was called."""
        return self.count_in.stat().st_size if self.count_in.exists() else 0
