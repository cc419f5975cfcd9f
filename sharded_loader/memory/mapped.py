"""Arrays over files (`numpy.memmap`, views and slices of them) on their way to spawned workers: by name, not by value.

    memmap_of(array) -> memmap, start       what an array is a view of, and where in its memory it begins
    describe(memmap) -> Mapping | None      which stretch of which file, opened how; pickles, and arrives
                                            in the worker as the same stretch, opened again
    view_mapping(opened, ...) -> array      in the worker, the array over it

A worker opens the file itself, so 100 MB cost neither a copy nor a page, and what is written to a file that was
opened with ``"r+"`` is written to that file, as in the trainer.

Only what the worker would find again: a file that has been deleted or replaced since it was mapped goes by value, and
so does one in mode ``"c"`` whose pages the trainer has written to. Linux tells both (/proc/self/smaps); elsewhere
mode ``"c"`` always goes by value. So does a tensor over a memmap: torch does not say where its memory is from.

What can go wrong: the file goes before a worker has opened it; that is the error with which the worker cannot start.
"""

from __future__ import annotations

import bisect
import itertools
import mmap
import operator
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Mapping:
    """A stretch of a file.

    Attributes:
        filename: of the file, absolute.
        offset, nbytes: of what is mapped.
        mode: how to open it: ``"r"``, ``"r+"`` or ``"c"``.
    """

    filename: str
    offset: int
    nbytes: int
    mode: str

    def __reduce__(self) -> Any:
        return _open, (self.filename, self.offset, self.nbytes, self.mode)


def _open(filename: str, offset: int, nbytes: int, mode: Any) -> Any:
    return np.memmap(filename, np.uint8, mode, offset, (nbytes,))


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
    start = _address(array) - _address(np.frombuffer(memory, np.uint8))
    reach = [stride * (size - 1) for size, stride in zip(array.shape, array.strides, strict=True)]
    low = start + sum(step for step in reach if step < 0)
    high = start + sum(step for step in reach if step > 0) + array.itemsize
    return (base, start) if low >= 0 and high <= len(memory) else None


def describe(whole: Any, regions: Regions) -> Mapping | None:
    """The stretch of the file that lies under this memmap; None if opening the file again would not give the same.

    Args:
        whole: the memmap.
        regions: of this process.
    """
    # numpy.memmap maps whole pages, and keeps the offset that it was asked for.
    offset = whole.offset - whole.offset % mmap.ALLOCATIONGRANULARITY
    mode = "r+" if whole.mode == "w+" else whole.mode  # which would empty it
    mapping = Mapping(os.fspath(whole.filename), offset, len(whole._mmap), mode)
    return mapping if _is_found_again(mapping, _address(np.frombuffer(whole._mmap, np.uint8)), regions) else None


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


class Region(NamedTuple):
    """A stretch of this process's memory: addresses, the file's inode, whether pages of it are its own (smaps only)."""

    low: int
    high: int
    inode: int
    written: bool


class Regions:
    """What Linux says of this process's memory, read once for all files of a dataset: it has a line for each.

    (2,000 files: 0.1 s. Read for each of them 24 s, and in mode ``"c"`` minutes.)
    """

    def __init__(self) -> None:
        self._read: dict[str, list[Region]] = {}

    def over(self, low: int, high: int, source: str) -> list[Region]:
        """The regions that share an address with ``low`` to ``high``.

        Args:
            source: ``"maps"``; or ``"smaps"``, which says also what is written privately, but takes the time to look
                at every page.

        Raises:
            OSError, ValueError, IndexError: this system does not say.
        """
        if source not in self._read:
            self._read[source] = list(_regions(f"/proc/self/{source}"))
        regions = self._read[source]  # by address
        begin = bisect.bisect_right(regions, low, key=operator.attrgetter("high"))
        return list(itertools.takewhile(lambda region: region.low < high, regions[begin:]))


def _regions(source: str) -> Iterator[Region]:
    region: Region | None = None
    with open(source) as lines:
        for line in lines:
            first, *rest = line.split(maxsplit=5)
            if not first.endswith(":"):
                if region is not None:
                    yield region
                low, high = (int(part, 16) for part in first.split("-"))
                region = Region(low, high, int(rest[3]), written=False)
            elif region is not None and first in ("Anonymous:", "Swap:") and int(rest[0]):
                region = region._replace(written=True)
    if region is not None:
        yield region


def _is_found_again(mapping: Mapping, address: int, regions: Regions) -> bool:
    """Whether opening the file anew gives what is mapped at ``address``."""
    try:
        status = os.stat(mapping.filename)
    except OSError:
        return False
    if status.st_size < mapping.offset + mapping.nbytes:
        return False
    if not sys.platform.startswith("linux"):
        return mapping.mode != "c"
    try:
        over = regions.over(address, address + mapping.nbytes, "smaps" if mapping.mode == "c" else "maps")
    except (OSError, ValueError, IndexError):
        return False
    return not any(region.written or region.inode != status.st_ino for region in over)


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


def as_memmap(array: Array) -> Array:
    """An array in memory, of the class that it had in the trainer."""
    return array.view(np.memmap)
