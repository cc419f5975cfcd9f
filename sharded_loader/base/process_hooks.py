"""What Python calls when a module is imported, and when this process is forked.

    call_after_import("torch", then)    calls ``then`` when torch has been imported; at once if it is imported already
    Fork()                              before a fork of the user's: later it tells whether that process lives

`call_after_import` serves what a worker has to tell a library, or has to seed in it. Most workers never import torch,
and nothing here imports it either.

A `Fork` owns a pipe and a page of shared memory. The child inherits the writing end of the pipe and passes it on to its
own children; the main process keeps the reading end. Each of these processes notes its id in the page. The fork has
ended when the pipe has no other end and none of the noted processes lives. The pipe alone is not enough: a daemon
closes its descriptors. The page alone is not enough either: a child of a child may not have noted itself yet.

What can go wrong: there are no descriptors for a pipe. Then the fork counts as alive for ever.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any


def call_after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` once, when the module has been imported, in the thread that imports it; at once if it is here.

    Args:
        name: name of the module.
        then: the function; it replaces the function of an earlier call for this module.
    """
    forget_import(name)
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def forget_import(name: str) -> None:
    """Take back what `call_after_import` was told about this module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)]


class _Finder:
    """Import hooks are Python's own way to wait for an import. No `MetaPathFinder`: its import takes 3 ms."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        forget_import(fullname)
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# -- forks ------------------------------------------------------------------------------------------------------------


def is_readable(fd: int) -> bool:
    """Whether a read would return at once. POSIX; unlike ``select``, for any number of open descriptors.

    Example:
        >>> reader, writer = os.pipe()
        >>> is_readable(reader), os.write(writer, b"x"), is_readable(reader), os.close(reader), os.close(writer)
        (False, 1, True, None, None)
    """
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(0))


class Fork:
    """One fork. It must be made in the thread that forks, before it forks."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._ends: list[int | None] = [None, None]
        with contextlib.suppress(OSError):
            self._ends = [*os.pipe()]
        # Shared with the processes that come of the fork.
        self._processes = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("q")
        self._ended = False
        _this_thread.fork = weakref.ref(self)

    def has_ended(self) -> bool:
        """Whether no process is left that came of this fork."""
        reader = self._ends[0]
        if reader is not None and is_readable(reader) and not any(map(_lives, self._processes)):
            self._ended = True
            self.close(0)
        return self._ended

    def note_process(self) -> None:
        """This process has come of the fork. If the page is full, the fork counts as alive for ever."""
        free = next((place for place, pid in enumerate(self._processes) if not pid), None)
        self._processes[free or 0] = _FOR_EVER if free is None else os.getpid()

    def close(self, end: int) -> None:
        """Close the reading end (0) or the writing end (1)."""
        descriptor, self._ends[end] = self._ends[end], None
        if descriptor is not None:
            os.close(descriptor)

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # a child keeps its writing end as long as it lives
            self.close(0)
            self.close(1)


_FOR_EVER = 1
"""A process that always lives: the first one."""


def _lives(pid: int) -> bool:
    """Whether there is such a process. One that is dead, but was not reaped, counts."""
    if not pid:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


_this_thread = threading.local()

_came_of: list[Fork] = []
"""The forks that this process has come of, one after the other."""


def _after_fork(end: int) -> None:
    """The main process closes its writing end, the child its reading end."""
    reference = _this_thread.__dict__.pop("fork", lambda: None)
    fork = reference()
    if fork is not None:
        fork.close(end)
        if end == 0:
            _came_of.append(fork)


def _in_child() -> None:
    _after_fork(0)
    for fork in _came_of:
        fork.note_process()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=lambda: _after_fork(1), after_in_child=_in_child)
