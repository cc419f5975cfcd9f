"""What the user forks, as far as batches are concerned: who may still hold what was lent at that moment.

    before the fork   Fork() -> a mark in every arena that has lent something
    in the parent     lives there from now on: `has_ended` asks the kernel
    in the child      keeps one end of a pipe, and notes its process id in a page that parent and child share. A child
                      of the child does the same

A fork has ended when the pipe has no other end left and none of the noted processes lives. The pipe alone is not
enough: a daemon closes all its descriptors. The noted processes alone are not enough either: a child of a child may not
have noted itself yet.

Owns: the pipe and the page. What can go wrong: no descriptors or no memory for them, or too many forks at a time. Then
nobody can tell, and what was lent stays unused. It also stays unused as long as a child lives that has nothing to do
with batches, another program (``exec``) included.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar, TypeVar

from sharded_loader.system import is_readable

MOST = 64
"""Forks that are followed at a time: each is a descriptor. Those beyond are taken to live for ever."""

_NUMBER = struct.Struct("q")

T = TypeVar("T")

_this_thread = threading.local()


class Fork:
    """One fork; made before it happens, in the thread that forks."""

    live: ClassVar[weakref.WeakSet[Fork]] = weakref.WeakSet()
    """Those of this process that have not been collected."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._reader: int | None = None
        self._writer: int | None = None
        self._processes: mmap.mmap | None = None
        if len(Fork.live) < MOST:
            with contextlib.suppress(OSError):
                self._processes = mmap.mmap(-1, mmap.PAGESIZE)
                self._reader, self._writer = os.pipe()
        Fork.live.add(self)
        _this_thread.fork = weakref.ref(self)

    @property
    def is_followed(self) -> bool:
        """Whether anybody will ever know that it has ended."""
        return self._reader is not None

    def has_ended(self) -> bool:
        """Whether nobody is left who came of it."""
        if self._reader is None or self._processes is None or not is_readable(self._reader):
            return False
        return not any(_lives(pid) for (pid,) in _NUMBER.iter_unpack(self._processes) if pid)

    def note_process(self) -> None:
        """This process has come of the fork. If the page has no room for it, the fork is taken to live for ever."""
        page = self._processes
        if page is None:
            return
        for offset in range(0, len(page), _NUMBER.size):
            if not any(page[offset : offset + _NUMBER.size]):
                _NUMBER.pack_into(page, offset, os.getpid())
                return
        _NUMBER.pack_into(page, 0, _FOR_EVER)

    def close_reader(self) -> None:
        """Nobody asks any more."""
        reader, self._reader = self._reader, None
        if reader is not None:
            os.close(reader)

    def close_writer(self) -> None:
        """The child, if there is one, has its copy."""
        writer, self._writer = self._writer, None
        if writer is not None:
            os.close(writer)

    def __del__(self) -> None:
        if os.getpid() == self._pid:  # in a child the writer is what it is known by
            self.close_reader()
            self.close_writer()


_FOR_EVER = 1
"""A process that always lives: the first one."""


def _lives(pid: int) -> bool:
    """Whether there is such a process, a dead one that nobody has asked for included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to somebody else
        return True
    return True


def members(live: weakref.WeakSet[T]) -> list[T]:
    """What is in the set at one moment, although other threads add to it.

    Example:
        >>> members(weakref.WeakSet())
        []
    """
    while True:
        try:
            return list(live)
        except RuntimeError:  # changed in the middle, which takes microseconds: hardly ever twice
            continue


def _none() -> None:
    """No arena had anything to mark."""


def _in_parent() -> None:
    made: Callable[[], Fork | None] = _this_thread.__dict__.pop("fork", _none)
    fork = made()
    if fork is not None:
        fork.close_writer()


_came_of: list[Fork] = []
"""The forks by which this process has come into being, one after the other."""


def _in_child() -> None:
    made: Callable[[], Fork | None] = _this_thread.__dict__.pop("fork", _none)
    fork = made()
    if fork is not None:
        _came_of.append(fork)
    for one in _came_of:
        one.note_process()
    for one in list(Fork.live):
        one.close_reader()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_in_parent, after_in_child=_in_child)
