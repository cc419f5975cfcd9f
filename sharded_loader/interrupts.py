"""Steps that a Ctrl-C must not cut in two, and whether the program ends."""

from __future__ import annotations

import atexit
import contextlib
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, a Ctrl-C is noted; it is raised at the end of the block.

    For the few places where half a job leaks a process or a descriptor. Blocking the signal would not do:
    another thread of the process (OpenBLAS starts some) takes it, and Python raises in the main thread.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    noted: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: noted.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if noted:
            before(*noted[-1])


_ends = threading.Event()

# Handlers run in reverse order. This makes weakref register its own first, so ours runs before any finalizer does.
weakref.finalize(_ends, _ends.is_set).detach()
atexit.register(_ends.set)


def program_ends() -> bool:
    """Whether the interpreter is at its exit: what a device holds is then left to its driver.

    Example:
        >>> program_ends()
        False
    """
    return _ends.is_set()
