"""Steps that a Ctrl-C must not cut in two."""

from __future__ import annotations

import contextlib
import signal
import threading
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
