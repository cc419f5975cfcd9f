"""Asynchronous interruptions: signals in the middle of a step, exceptions of signal handlers, interpreter exit."""

from __future__ import annotations

import atexit
import contextlib
import functools
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

from sharded_loader.base.notices import is_ours
from sharded_loader.base.private import getsignal

_SIGNALS = tuple(map(int, signal.valid_signals()))  # valid_signals() takes 150 us


@contextlib.contextmanager
def uninterrupted() -> Iterator[dict[int, Any]]:
    """Defer Python signal handlers to the end of the block. Yields the signals that have come, which it may take out.

    For the few places where an interrupted step would leak a process or a descriptor. Masking signals is not enough:
    another thread (OpenBLAS starts some) receives them, and Python runs the handlers in the main thread anyway.
    """
    if threading.current_thread() is not threading.main_thread():
        yield {}
        return
    pending: dict[int, Any] = {}
    before = python_handlers()
    is_restoring = False

    def note(number: int, frame: object) -> None:
        if is_restoring:  # the handlers are being restored
            before[number](number, frame)
        else:
            pending.setdefault(number, frame)  # like the kernel: repeated pending signals count once

    _pending_signals.append(pending)
    try:
        set_handlers(dict.fromkeys(before, note))
        yield pending
    finally:
        _pending_signals.pop()
        with contextlib.ExitStack() as calls:  # each handler runs, even if another one raises
            try:
                for is_restoring in (False, True):  # noqa: B007  # `note` reads it; a signal may come before it does
                    while pending:
                        number, frame = pending.popitem()
                        calls.callback(before[number], number, frame)
                set_handlers(before)
            finally:
                set_handlers(before)  # again, in case a handler has raised meanwhile


def set_handlers(handlers: dict[int, Any]) -> None:
    """Install signal handlers, by the number of the signal."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


_pending_signals: list[dict[int, Any]] = []
"""Signals deferred by each active `uninterrupted` block."""


def should_stop() -> bool:
    """Return True if a deferred SIGINT or SIGTERM is pending, so that a step of minutes can give up."""
    return any(number in pending for pending in _pending_signals for number in (signal.SIGINT, signal.SIGTERM))


def python_handlers() -> dict[int, Any]:
    """Return the signal handlers of this process that are Python callables, by signal number."""
    return {number: handler for number in _SIGNALS if callable(handler := getsignal(number))}


_handler_codes: set[CodeType | None] = set()
"""Code objects of all signal handlers seen so far: a handler may replace itself before it raises."""


def note_handlers() -> None:
    """Record the current signal handlers for later calls of `is_from_outside`."""
    _handler_codes.update(map(_code_of, python_handlers().values()))


def is_from_outside(error: BaseException, *, reads: bool = False) -> bool:
    """Return True if the error was raised by a signal handler or a debugger, and therefore belongs to no batch.

    Args:
        error: an exception caught by this package.
        reads: it was caught while samples were read. An `Exception` raised inside the user's dataset then counts as the
            dataset's own, which may handle signals itself (for example, a time limit per sample).
    """
    if isinstance(error, KeyboardInterrupt):
        return True
    if threading.current_thread() is not threading.main_thread():
        return False
    note_handlers()
    # A debugger traces the frames below; a frame that it has left by an exception is no longer traced.
    codes = _handler_codes | {_code_of(frame.f_trace) for frame, _ in traceback.walk_stack(sys._getframe(1))}
    anywhere = not (reads and isinstance(error, Exception))
    may_strike = anywhere
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if may_strike and frame.f_code in codes:
            return True
        may_strike = anywhere or is_ours(frame.f_code.co_filename)
    return False


def pass_on(error: BaseException) -> None:
    """Raise the error again if it `is_from_outside`."""
    if is_from_outside(error):
        raise error


def _code_of(handler: object) -> CodeType | None:
    """Return the code object of a function, method, partial or callable object."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    for function in (handler, type(handler).__call__ if callable(handler) else None):
        code = getattr(function, "__code__", None)
        if isinstance(code, CodeType):
            return code
    return None


ENDING_SECONDS = 2.0
"""Seconds that the end of a program waits for a thread of the library. Python ends the threads that are left as soon as
they ask for the interpreter, and inside torch this aborts the process: C++ lets no exception of a thread's end pass."""

_is_exiting = threading.Event()

# atexit handlers run in reverse order. weakref registers its own here, so ours runs before any finalizer.
weakref.finalize(_is_exiting, _is_exiting.is_set).detach()
atexit.register(_is_exiting.set)


def program_ends() -> bool:
    """Return True during interpreter exit: device resources are then left to the driver.

    Example:
        >>> program_ends()
        False
    """
    return _is_exiting.is_set()


def call_all(*functions: Callable[[], Any]) -> None:
    """Call the functions in turn: a finalizer. Python drops what is raised in one, so signals come again behind it."""
    send = getattr(signal, "pthread_kill", lambda _, number: signal.raise_signal(number))
    with uninterrupted() as pending:
        for function in functions:
            function()
        while pending and not program_ends():
            # The finalizer has nothing left to do, and has ended by then.
            threading.Timer(0.05, send, [threading.get_ident(), pending.popitem()[0]]).start()
