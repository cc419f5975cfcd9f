"""What strikes from outside: signals in the middle of a step, exceptions of signal handlers, the program's end."""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator
from types import CodeType
from typing import Any

from sharded_loader.base.notices import is_ours
from sharded_loader.base.private import getsignal

_SIGNALS = tuple(map(int, signal.valid_signals()))  # asking takes 150 us


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Inside, signals are noted; their handlers run at the end of the block.

    For the few places where half a job leaks a process or a descriptor. Blocking the signals would not do:
    another thread of the process (OpenBLAS starts some) takes them, and Python runs the handlers in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    noted: dict[int, Any] = {}
    before = python_handlers()
    is_over = False

    def note(number: int, frame: object) -> None:
        if is_over:  # the handlers are being put back
            before[number](number, frame)
        else:
            noted.setdefault(number, frame)  # as the kernel does: a signal that waits is one signal

    _noted.append(noted)
    try:
        for number in before:
            signal.signal(number, note)
        yield
    finally:
        _noted.pop()
        with contextlib.ExitStack() as calls:  # each handler runs, whatever another one raises
            try:
                for is_over in (False, True):  # noqa: B007  # `note` reads it; a signal may come before it does
                    while noted:
                        number, frame = noted.popitem()
                        calls.callback(before[number], number, frame)
                _put_back(before)
            finally:
                _put_back(before)  # once more, if a handler has raised meanwhile


def _put_back(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)


_noted: list[dict[int, Any]] = []
"""The signals that wait for the end of `uninterrupted`."""


def should_stop() -> bool:
    """Whether a Ctrl-C or a SIGTERM waits for the end of `uninterrupted`. Then a step that takes minutes gives up."""
    return any(number in noted for noted in _noted for number in (signal.SIGINT, signal.SIGTERM))


def python_handlers() -> dict[int, Any]:
    """The signals that this process handles in Python, with their handlers."""
    found = {number: getsignal(number) for number in _SIGNALS}
    return {number: handler for number, handler in found.items() if callable(handler)}


_seen: set[CodeType | None] = set()
"""The code of every signal handler that `note_handlers` has met: one may put another in its place before it raises."""


def note_handlers() -> None:
    """Look at the signal handlers of the program, so that `is_from_outside` knows them later."""
    _seen.update(map(_code_of, python_handlers().values()))


def is_from_outside(error: BaseException, *, reads: bool = False) -> bool:
    """Whether a signal handler, or a debugger, has raised the error. Such an error belongs to no batch.

    Args:
        error: an exception that this package has caught.
        reads: it was caught while samples were read. An `Exception` that strikes inside the user's dataset then counts
            as the dataset's own, which may handle signals itself (a time limit for a sample, say).
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    note_handlers()
    # A debugger traces frames; the one that it has left by an exception is no longer traced.
    codes = _seen | {_code_of(frame.f_trace) for frame, _ in traceback.walk_stack(sys._getframe(1))}
    anywhere = not (reads and isinstance(error, Exception))
    strikes_here = anywhere
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if strikes_here and frame.f_code in codes:
            return True
        strikes_here = anywhere or is_ours(frame.f_code.co_filename)
    return False


def pass_on(error: BaseException) -> None:
    """Raise an error again that belongs to no batch, because it `is_from_outside`."""
    if is_from_outside(error):
        raise error


def _code_of(handler: object) -> CodeType | None:
    """The code of a function, a method, a partial object or an object that can be called."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for one in (handler, type(handler).__call__ if callable(handler) else None):
        code = getattr(one, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


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
