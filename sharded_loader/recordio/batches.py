"""Many records of a ``.rec`` file at once: few reads, headers checked together, no object per record.

    offsets, sizes --stretches of the file--> one positioned read each --> one buffer
    buffer --headers, as one array--> where in the buffer each record lies --> `Records`

Records that follow one upon the other (give or take `GAP` bytes) are one read; a shuffled batch is one read per record,
in the order of the file. The size of a record is not known before its header is read: until then it is taken to reach
to the next record of the index, and what that read does not show to be a whole record (a payload cut at magics, a
record of more than `LARGE` bytes, damage) is read by `RecordFile.read`, which also names the damage. Where records
are large on average all are: then a call for each costs nothing beside its bytes.

Nothing is mapped: a mapped file that is truncated, or whose disk fails, ends the process with SIGBUS where a read is an
error. Memory: records, headers and gaps, each byte of the file at most once, and once more while stretches are joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from sharded_loader.data.bulk import checked_index
from sharded_loader.recordio.files import HEAD_SIZE, MAGIC_NUMBER, RecordFile, padded

GAP = 256
"""Bytes between two records that are read in vain: a read costs 0.6 us, but what is read is kept with the batch."""

LARGE = 1 << 18
"""A record that reaches further is read by itself: an index may list only a few records of a file."""

LARGE_MEAN = 1 << 15
"""Bytes of an average record; above, they are made one by one: memory for a large buffer costs more than the reads."""

Int64s = np.ndarray[Any, np.dtype[np.int64]]


class Records(Sequence[bytes]):
    """Records in one buffer: a read-only sequence of ``bytes``, each made when it is asked for.

    Args:
        buffer: holds them all, in any order, with anything between them.
        starts, ends: int64, where in the buffer each lies.

    Example:
        >>> records = Records(b"..one.two", np.array([6, 2]), np.array([9, 5]))
        >>> records[0], records[-1], len(records), records == [b"two", b"one"], records[:1]
        (b'two', b'one', 2, True, Records(1 records, 3 bytes))
    """

    __slots__ = ("_buffer", "_ends", "_starts")

    def __init__(self, buffer: bytes | np.ndarray[Any, np.dtype[np.uint8]], starts: Int64s, ends: Int64s) -> None:
        self._buffer = buffer
        self._starts = starts
        self._ends = ends

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> Records: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return Records(self._buffer, self._starts[index], self._ends[index])
        number = checked_index(index, len(self._starts))
        return bytes(self._buffer[self._starts[number] : self._ends[number]])

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.tolist())

    def tolist(self) -> list[bytes]:
        """All of them as bytes.

        Example:
            >>> Records(b"ab", np.array([0, 1]), np.array([1, 2])).tolist()
            [b'a', b'b']
        """
        places = zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        buffer = self._buffer
        if isinstance(buffer, bytes):
            return [buffer[start:end] for start, end in places]
        return [buffer[start:end].tobytes() for start, end in places]

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Records | list):
            return self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none

    def __reduce__(self) -> Any:
        return Records, (np.frombuffer(self._buffer, np.uint8), self._starts, self._ends)  # arrays go out of band

    def __repr__(self) -> str:
        return f"Records({len(self):,} records, {int((self._ends - self._starts).sum()):,} bytes)"


def guessed_sizes(offsets: Int64s) -> Int64s:
    """How many bytes to read for each record: up to the next one of the index, at most `LARGE`.

    Example:
        >>> guessed_sizes(np.array([40, 0, 12])).tolist()
        [262144, 12, 28]
    """
    begins = np.unique(offsets)
    gaps: Int64s = np.minimum(np.diff(begins, append=begins[-1:]), LARGE)
    gaps[-1:] = LARGE
    return gaps[np.searchsorted(begins, offsets)]


def read_records(file: RecordFile, offsets: Int64s, sizes: Int64s) -> tuple[Records | list[bytes], Int64s]:
    """The records at these offsets, and how many bytes each takes in the file.

    Args:
        file: where they are.
        offsets: int64, in any order, also several times the same.
        sizes: int64, how many bytes to read for each; a guess.

    Returns:
        The records in the order of ``offsets`` (large ones as a list), and their sizes with header and padding:
        ``sizes`` itself where the guesses were right.

    Raises:
        RecordIOError: the first that is damaged or is no record.
    """
    if not len(offsets):
        return [], sizes
    limits = np.minimum(sizes, file.size - offsets)
    if np.add.reduce(limits) > LARGE_MEAN * len(limits):
        found = [file.read(offset) for offset in offsets.tolist()]
        return [record for record, _ in found], np.array([following for _, following in found]) - offsets
    if not (offsets[1:] - offsets[:-1] - limits[:-1]).any() and limits[-1] >= HEAD_SIZE:  # one after the other
        begin, order = int(offsets[0]), None
        buffer = file.read_stretches([begin], [int(offsets[-1] + limits[-1]) - begin])[0]
        at = offsets - begin
    else:
        inside = np.flatnonzero(limits >= HEAD_SIZE)
        order = inside[np.argsort(offsets[inside], kind="stable")]
        limits = limits[order]
        buffer, at = _read_stretches(file, offsets[order], limits)
    lengths, all_as_guessed = _stored_lengths(buffer, at, limits)
    starts = at + HEAD_SIZE
    if order is not None:
        starts, lengths = _scattered(starts, order, len(offsets)), _scattered(lengths, order, len(offsets))
    if all_as_guessed and len(at) == len(offsets):
        return Records(buffer, starts, starts + lengths), sizes
    sizes = padded(lengths) + HEAD_SIZE
    rest = np.flatnonzero(lengths < 0)
    if len(rest):
        buffer = _read_singly(file, offsets, rest, buffer, starts, lengths, sizes)
    return Records(buffer, starts, starts + lengths), sizes


def _scattered(values: Int64s, places: Int64s, length: int) -> Int64s:
    """The values at their places, -1 elsewhere."""
    out = np.full(length, -1, np.int64)
    out[places] = values
    return out


def _read_stretches(file: RecordFile, begins: Int64s, sizes: Int64s) -> tuple[bytes, Int64s]:
    """What lies in the file at ascending offsets, and where each begins in the buffer."""
    if not len(begins):
        return b"", begins
    ends = begins + sizes
    first = np.concatenate(([0], np.flatnonzero(begins[1:] > ends[:-1] + GAP) + 1))
    offsets = begins[first]
    counts = np.maximum.reduceat(ends, first) - offsets
    buffer = b"".join(file.read_stretches(offsets.tolist(), counts.tolist()))
    moved = np.cumsum(counts) - counts - offsets
    return buffer, begins + np.repeat(moved, np.diff(first, append=len(begins)))


def _stored_lengths(buffer: bytes, at: Int64s, limits: Int64s) -> tuple[Int64s, bool]:
    """The payload's length of each record that lies whole in the buffer, from its header, -1 for others; and whether
    each reaches just to its limit."""
    if not len(at) or len(buffer) < at[-1] + limits[-1] or np.bitwise_or.reduce(at) & 3:
        # Nothing is there, or (the file was truncated just now) not where it is looked for, or not by words.
        return np.full_like(at, -1), False
    words = np.frombuffer(buffer, "<u4", len(buffer) // 4)
    place = at >> 2
    lengths = words[place + 1].astype(np.int64)  # of a part, the flag in the upper bits makes it exceed any limit
    is_head = words[place] == MAGIC_NUMBER
    taken = padded(lengths) + HEAD_SIZE
    if np.logical_and.reduce(is_head & (taken == limits)):
        return lengths, True
    return np.where(is_head & (taken <= limits), lengths, -1), False


def _read_singly(
    file: RecordFile, offsets: Int64s, which: Int64s, buffer: bytes, starts: Int64s, lengths: Int64s, sizes: Int64s
) -> bytes:
    """Appends these records to the buffer, each once, and fills in where they lie."""
    parts, total = [buffer], len(buffer)
    places: dict[int, tuple[int, int, int]] = {}
    for number in which.tolist():
        offset = int(offsets[number])
        if offset not in places:
            record, following = file.read(offset)
            places[offset] = total, len(record), following - offset
            parts.append(record)
            total += len(record)
        starts[number], lengths[number], sizes[number] = places[offset]
    return b"".join(parts)
