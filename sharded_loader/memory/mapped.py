"""Arrays over files (`numpy.memmap`, views and slices of them) on their way to spawned workers: by name, not by value.

    MappedFiles().reduce(array) -> reduction     in the main process: which part of which file, and the view of it
    view_mapping(opened, ...) -> array           in the worker: the array over the file, which it has opened again

A worker opens the file itself, so 100 MB cost neither a copy nor a page. What is written to a file that was opened with
``"r+"`` is written to that file, as in the main process.

A file goes by name only if the worker would find the same bytes. By value go: a file that has been deleted or replaced
since it was mapped; a file in mode ``"c"`` whose pages the main process has written to. Linux tells both (/proc/self);
elsewhere mode ``"c"`` always goes by value. A tensor over a memmap also does: torch does not say where its memory is
from.

What can go wrong: the file goes before a worker has opened it; that is the error with which the worker cannot start.
"""

from __future__ import annotations

import bisect
import functools
import mmap
import operator
import os
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.memory.codec import Array, array_address


@dataclass(frozen=True)
class Mapping:
    """A part of a file, which arrives in the worker as that part, mapped again.

    Attributes:
        filename: name of the file, absolute.
        offset, nbytes: what is mapped.
        mode: how to open it: ``"r"``, ``"r+"`` or ``"c"``.
    """

    filename: str
    offset: int
    nbytes: int
    mode: Any

    def __reduce__(self) -> Any:
        return np.memmap, (self.filename, np.uint8, self.mode, self.offset, (self.nbytes,))


class MappedFiles:
    """The files under the arrays of one dataset, each described once, so that views of one stay views of one."""

    def __init__(self) -> None:
        # By id of the mapping, which is kept beside its description, so that its id stays its own.
        self._known: dict[int, tuple[Mapping | None, Any]] = {}
        # Read once for all files: it has a line for each. (2,000 files: 0.1 s. Read for each of them 24 s.)
        self._regions = functools.cache(_regions)

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
            self._known[key] = self._describe(whole), whole._mmap
        mapping, _ = self._known[key]
        if mapping is not None:
            layout = array.dtype, array.shape, array.strides, array.flags.writeable
            return view_mapping, (mapping, type(array), start, *layout)
        # NumPy itself would pickle its subclass in band.
        return (np.ndarray.view, (array.view(np.ndarray), np.memmap)) if type(array) is np.memmap else NotImplemented

    def _describe(self, whole: Any) -> Mapping | None:
        """The part of the file under this memmap; None if opening the file again would not give the same."""
        # numpy.memmap maps whole pages, and keeps the offset that it was asked for.
        offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY
        mode = "r+" if whole.mode == "w+" else whole.mode  # which would empty it
        mapping = Mapping(os.fspath(whole.filename), offset, len(whole._mmap), mode)
        try:
            status = os.stat(mapping.filename)
            if status.st_size < offset + mapping.nbytes:
                return None
            if not sys.platform.startswith("linux"):
                return None if mode == "c" else mapping
            regions = self._regions("smaps" if mode == "c" else "maps")
        except (OSError, ValueError, IndexError):
            return None
        low = array_address(np.frombuffer(whole._mmap, np.uint8))
        begin = bisect.bisect_right(regions, low, key=operator.attrgetter("high"))
        for region in regions[begin:]:
            if region.low >= low + mapping.nbytes:
                break
            if region.written or region.inode != status.st_ino:
                return None
        return mapping


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
    while isinstance(base, np.ndarray) and getattr(base, "filename", None) is None:
        base = base.base
    memory = getattr(base, "_mmap", None)
    if not isinstance(base, np.memmap) or not isinstance(memory, mmap.mmap) or memory.closed:
        return None
    start = array_address(array) - array_address(np.frombuffer(memory, np.uint8))
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in reach if step < 0)
    high = start + sum(step for step in reach if step > 0) + array.itemsize
    return (base, start) if low >= 0 and high <= len(memory) else None


class Region(NamedTuple):
    """Part of this process's memory: addresses, the file's inode, whether pages of it are its own (smaps only)."""

    low: int
    high: int
    inode: int
    written: bool


def _regions(source: str) -> list[Region]:
    """What Linux says of this process's memory, by address.

    Args:
        source: ``"maps"``; or ``"smaps"``, which says also what is written privately, but looks at every page.
    """
    regions: list[Region] = []
    with open(f"/proc/self/{source}") as lines:
        for line in lines:
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                low, high = (int(part, 16) for part in first.split("-"))
                regions.append(Region(low, high, int(rest[3]), written=False))
            elif first in ("Anonymous:", "Swap:") and int(rest[0]):
                regions[-1] = regions[-1]._replace(written=True)
    return regions


def view_mapping(
    whole: Any,
    kind: type[Array],
    start: int,
    dtype: Any,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    writeable: bool,
) -> Array:
    """The array of this kind (`numpy.ndarray` or `numpy.memmap`) over an opened mapping."""
    array: Array = np.ndarray(shape, dtype, whole, start, strides)
    if not writeable:
        array.flags.writeable = False
    if kind is np.ndarray:
        return array
    found: Any = array.view(kind)
    # What numpy.memmap's own slices have. Without it flush() does nothing.
    found._mmap, found.filename, found.offset, found.mode = whole._mmap, whole.filename, whole.offset, whole.mode
    return found  # type: ignore[no-any-return]
