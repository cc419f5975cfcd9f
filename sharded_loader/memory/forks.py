"""What the user forks, as far as batches are concerned: who may still hold what was lent at that moment.

    before the fork   Fork() -> a mark in every arena that has lent something
    in the parent     lives there from now on: `has_ended` asks the kernel
    in the child      keeps one end of a pipe, as long as it lives, or a child of its own that has inherited it

A process that becomes another program (``exec``) loses the end with its memory, so it counts as ended.

Owns: the pipe. What can go wrong: no descriptors for one, or too many forks at a time; then nobody can tell, and what
was lent stays unused. So it does for as long as a child lives that has nothing to do with batches.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable
from typing import ClassVar, TypeVar

from sharded_loader.system import is_readable

MOST = 64
"""Forks that are followed at a time: each is a descriptor. Those beyond are taken to live for ever."""

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
        if len(Fork.live) < MOST:
            with contextlib.suppress(OSError):
                self._reader, self._writer = os.pipe()
        Fork.live.add(self)
        _this_thread.fork = weakref.ref(self)

    @property
    def is_followed(self) -> bool:
        """Whether anybody will ever know that it has ended."""
        return self._reader is not None

    def has_ended(self) -> bool:
        """Whether nobody is left who came of it."""
        return self._reader is not None and is_readable(self._reader)

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


def _in_child() -> None:
    _this_thread.__dict__.pop("fork", None)
    for fork in list(Fork.live):
        fork.close_reader()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_parent=_in_parent, after_in_child=_in_child)
