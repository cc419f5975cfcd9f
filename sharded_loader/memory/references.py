"""What goes to spawned workers by reference, not by value: arrays over files, and locks of ``multiprocessing``.

    MappedFiles().reduce(array) -> reduction     in the main process: which part of which file, and the view of it
    view_mapping(opened, ...) -> array           in the worker: the array over the file, which it has opened again
    Inherited().fds                              descriptors that the workers have to be started with
    with inherited: pickle                       inside, locks and values can be pickled: they name those descriptors

*Files.* A worker opens the file of a `numpy.memmap`, of its views and slices, itself, so 100 MB cost neither a copy nor
a page. What is written to a file that was opened with ``"r+"`` is written to that file, as in the main process. A file
goes by name only if the worker would find the same bytes. These go by value: a file that has been deleted or replaced
since it was mapped, and one in mode ``"c"``, because nobody can say portably whether its pages were written to. A
tensor over a memmap also does: torch does not say where its memory is from.

*Locks.* ``multiprocessing`` pickles a ``Value``, a ``Lock`` or a ``Queue`` only while it starts a process, because the
process inherits the descriptors behind them. Our workers get the dataset after their start. So such a dataset is
pickled before that, with an object in the place of the process that is being started. It keeps the descriptors.

What can go wrong: the file goes before a worker has opened it; that is the error with which the worker cannot start.
Locks that were made for forked processes raise a RuntimeError, as with ``multiprocessing``.
"""

from __future__ import annotations

import mmap
import os
import sys
from multiprocessing import context
from typing import Any

import numpy as np

from sharded_loader.base.private import duplicated, reducer_of
from sharded_loader.memory.codec import Array, array_address


class Mapping:
    """A part of a file, which arrives in the worker as that part, mapped again: arguments of `numpy.memmap`."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return np.memmap, self.arguments


class MappedFiles:
    """The files under the arrays of one dataset, each described once, so that views of one stay views of one."""

    def __init__(self) -> None:
        # By id of the mapping, which is kept beside its description, so that its id stays its own.
        self._known: dict[int, tuple[Mapping | None, Any]] = {}

    def reduce(self, array: Array) -> Any:
        """A reduction of an array over a file; NotImplemented if it is none, and has to go by value."""
        if type(array) not in (np.ndarray, np.memmap) or array.base is None or not array.nbytes:
            return NotImplemented
        found = memmap_of(array)
        if found is None:
            return NotImplemented
        whole, start = found
        key = id(whole._mmap)
        if key not in self._known:
            self._known[key] = _describe(whole), whole._mmap
        mapping, _ = self._known[key]
        if mapping is not None:
            layout = array.shape, array.dtype, start, array.strides
            return view_mapping, (mapping, type(array), array.flags.writeable, *layout)
        # NumPy itself would pickle its subclass in band.
        return (np.ndarray.view, (array.view(np.ndarray), np.memmap)) if type(array) is np.memmap else NotImplemented


def _describe(whole: Any) -> Mapping | None:
    """The part of the file under this memmap; None if opening the file again would not give the same."""
    # numpy.memmap maps whole pages, and keeps the offset that it was asked for.
    offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY
    mode = "r+" if whole.mode == "w+" else whole.mode  # which would empty it
    if mode == "c":
        return None
    filename, shape = os.fspath(whole.filename), (len(whole._mmap),)
    try:
        again = np.memmap(filename, np.uint8, "r", offset, shape)
    except (OSError, ValueError):  # it has gone, or is shorter
        return None
    before = np.frombuffer(whole._mmap, np.uint8)
    ends = slice(mmap.PAGESIZE), slice(-mmap.PAGESIZE, None)
    same = all(np.array_equal(before[end], again[end]) for end in ends)
    return Mapping(filename, np.uint8, mode, offset, shape) if same else None


def memmap_of(array: Array) -> tuple[Any, int] | None:
    """The memmap that ``array`` is, or is a view of, and the offset of its first element there; None if none.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile() as file:
        ...     whole = np.memmap(file, np.int64, "w+", shape=(10, 2))
        ...     memmap_of(np.asarray(whole)[3:, 1])[1]
        56
        >>> memmap_of(np.arange(3))
    """
    base: Any = array
    # Between the views may be a memoryview, and what as_strided and sliding_window_view hold their array by.
    while base is not None and getattr(base, "filename", None) is None:
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    memory = getattr(base, "_mmap", None)
    if not isinstance(base, np.memmap) or not isinstance(memory, mmap.mmap) or memory.closed:
        return None
    start = array_address(array) - array_address(np.frombuffer(memory, np.uint8))
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in reach if step < 0)
    high = start + sum(step for step in reach if step > 0) + array.itemsize
    return (base, start) if low >= 0 and high <= len(memory) else None


def view_mapping(whole: Any, kind: type, writeable: bool, shape: Any, dtype: Any, start: int, strides: Any) -> Array:
    """The array of this kind (`numpy.ndarray` or `numpy.memmap`) over an opened mapping."""
    array: Any = np.ndarray(shape, dtype, whole, start, strides)
    array.flags.writeable = writeable
    if kind is np.memmap:
        array = array.view(kind)
        # What numpy.memmap's own slices have. Without it flush() does nothing.
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, whole.mode
    return array  # type: ignore[no-any-return]


# -- locks and shared values -------------------------------------------------------------------------------------------


def needs_inheritance(error: BaseException | None) -> bool:
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


def reduced_lock(obj: Any) -> Any:
    """How ``multiprocessing`` pickles an object, inside a ``with`` block of `Inherited`; otherwise NotImplemented."""
    if not isinstance(context.get_spawning_popen(), Inherited):
        return NotImplemented
    reduce = reducer_of(type(obj))
    return NotImplemented if reduce is None else reduce(obj)
