"""Locks and shared values of ``multiprocessing`` in a dataset, on their way to workers that are spawned.

    Inherited().fds            descriptors that the workers have to be started with
    with inherited: pickle     inside, such objects can be pickled: they name those descriptors

``multiprocessing`` pickles a ``Value``, a ``Lock`` or a ``Queue`` only while it starts a process, because the process
inherits the descriptors behind them. Our workers get the dataset after their start. So such a dataset is pickled
before that, with an object in the place of the process that is being started. It keeps the descriptors.

What can go wrong: objects that were made for forked processes. They raise a RuntimeError, as with ``multiprocessing``.
"""

from __future__ import annotations

import os
import sys
from multiprocessing import context
from typing import Any

from sharded_loader.base.private import duplicated, reducer_of


def is_needed(error: BaseException | None) -> bool:
    """Whether pickling has failed because a process would have to inherit something."""
    while error is not None:
        if isinstance(error, RuntimeError) and "through inheritance" in str(error):
            return sys.platform != "win32"
        error = error.__cause__ or error.__context__
    return False


class Inherited:
    """What workers inherit.

    Attributes:
        fds: descriptors of the objects that were pickled inside a ``with`` block. This object owns them.
    """

    def __init__(self) -> None:
        self.fds: list[int] = []
        self._before: Any = None

    def __enter__(self) -> Inherited:
        self._before = context.get_spawning_popen()
        context.set_spawning_popen(self)  # type: ignore[arg-type]  # it has their methods
        return self

    def __exit__(self, *error: Any) -> None:
        context.set_spawning_popen(self._before)

    def DupFd(self, fd: int) -> Any:
        """A descriptor as an object that can be pickled."""
        return duplicated(fd)

    def duplicate_for_child(self, fd: int) -> int:
        """The number that a descriptor has in the workers: the same as here."""
        self.fds.append(os.dup(fd))
        return self.fds[-1]

    def close(self) -> None:
        """Close the descriptors; workers that run have their own."""
        while self.fds:
            os.close(self.fds.pop())


def reduced(obj: Any) -> Any:
    """How ``multiprocessing`` pickles an object, inside a ``with`` block of `Inherited`; otherwise NotImplemented."""
    if not isinstance(context.get_spawning_popen(), Inherited):
        return NotImplemented
    reduce = reducer_of(type(obj))
    return NotImplemented if reduce is None else reduce(obj)
