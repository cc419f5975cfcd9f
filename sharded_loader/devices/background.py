"""A thread that makes calls in the order of arrival, for work that the user's thread must not wait for.

    Background.submit(call) -> Later       a thread calls
    Later.wait()            -> result      waits for it, interruptible by Ctrl-C; raises what it has raised

Copies to a device (`devices.copies`) and into pinned memory (`drop_in.pinning`) have one each. The thread starts with
the first call and holds nothing between calls. An exception belongs to its call, the next call is made all the same. A
call that does not return blocks those behind it: `Later.wait` has a limit, and `close` leaves the thread behind.
"""

from __future__ import annotations

import math
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from sharded_loader.base import host_clock
from sharded_loader.base.interrupts import should_stop, uninterrupted

POLL_SECONDS = 0.1
"""Poll interval in seconds: on Windows a Ctrl-C does not interrupt the wait for a lock."""

CLOSING_SECONDS = 10.0
"""Seconds that `Background.close` waits for a call that does not return."""


class Later:
    """A call and, once a thread has made it, its result.

    Attributes:
        done: set once the call was made.
        error: what it has raised, until `wait` raises it.

    Example:
        >>> later = Later(lambda: 1 + 1)
        >>> later.make(), later.wait()
        (True, 2)
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call: Callable[[], Any] | None = call
        self._result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()

    def make(self, prepare: Callable[[], object] | None = None) -> bool:
        """Make the call, after ``prepare``. Return True on success, whatever they raise."""
        call, self._call = self._call, None
        assert call is not None  # made once
        try:
            if prepare is not None:
                prepare()
            self._result = call()
        except BaseException as error:
            self.error = error
        finally:
            del call
            self.done.set()
        return self.error is None

    def is_made(self, seconds: float) -> bool:
        """Wait for the call, at most ``seconds``, and return True if it was made."""
        deadline = host_clock.now() + seconds
        while not self.done.wait(min(POLL_SECONDS, seconds)):
            if host_clock.now() >= deadline or should_stop():
                return False
        return True

    def wait(self, seconds: float = math.inf) -> Any:
        """Return the result, or raise what the call has raised, once. Raises TimeoutError after ``seconds``."""
        if not self.is_made(seconds):
            raise TimeoutError
        if self.error is not None:
            error, self.error = self.error, None
            try:
                raise error
            finally:
                del error  # otherwise error -> traceback -> this frame -> error, and the batch waits for the collector
        return self._result


class Background:
    """Makes calls in a thread.

    Args:
        name: of the thread.

    Example:
        >>> background = Background("example")
        >>> [later.wait() for later in [background.submit(lambda: "copied"), background.submit(lambda: "too")]]
        ['copied', 'too']
        >>> background.close()
        True

    Source of the idea: the pinning thread of PyTorch's DataLoader.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Later | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Later | None = None

    def submit(self, call: Callable[[], Any], prepare: Callable[[], object] | None = None) -> Later:
        """Make a call after those before it. A new thread calls ``prepare`` first, until that call has succeeded."""
        later = Later(call)
        if self._thread is None:
            with uninterrupted():
                args = self._calls, prepare
                thread = threading.Thread(target=_make_all, args=args, name=self._name, daemon=True)
                thread.start()  # the limit of threads is an error, also of the next call
                self._end = weakref.finalize(self, self._calls.put, None)
                self._thread, self._end.atexit = thread, False
        self._last = later
        self._calls.put(later)
        return later

    def wait(self, seconds: float) -> bool:
        """Wait until the calls so far are made. Return False after ``seconds``."""
        last = self._last
        return last is None or self._thread is threading.current_thread() or last.is_made(seconds)

    def close(self, seconds: float = CLOSING_SECONDS) -> bool:
        """End the thread after the calls so far; a later `submit` starts another one. False: it has not ended yet."""
        thread, self._thread = self._thread, None
        if thread is None:
            return True
        self._end()
        self._calls = queue.SimpleQueue()  # another thread takes nothing from one that is left behind
        if thread is not threading.current_thread():
            thread.join(seconds)
        if not thread.is_alive():
            self._last = None  # its error would hold its batch
        return not thread.is_alive()


def _make_all(calls: queue.SimpleQueue[Later | None], prepare: Callable[[], object] | None) -> None:
    while (later := calls.get()) is not None:
        if later.make(prepare):
            prepare = None
        del later


def use_one_core() -> None:
    """Let the copies of this thread use one core: on all of them they would slow down the program."""
    import threadpoolctl
    import torch

    torch.get_num_threads()  # initializes the number for this thread
    # Not `torch.set_num_threads`: it also affects threads that the program starts later.
    threadpoolctl.threadpool_limits(1, user_api="openmp")
