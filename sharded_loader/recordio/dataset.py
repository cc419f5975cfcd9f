"""`RecordFileDataset`: the records of a ``.rec`` file by their position in its index, one by one or a batch at once.

    train.idx --or a scan of train.rec--> offsets --[i]--> RecordFile.read --> bytes
    offsets, sizes --stretches of the file--> one positioned read each --> one buffer
    buffer --headers, as one array--> where in the buffer each record lies --> `Records`

The offsets are one array that travels with the dataset to its workers, as do the sizes of the records. The sizes are
guesses by the next offset, corrected as records are read (two threads that correct the same one write the same). The
file is opened by each process for itself, and serves all its threads.

A run of records is one read. A shuffled batch is one read per record, in the order of the file, or for several that lie
within `GAP` bytes.

The size of a record is not known before its header is read: until then it is taken to reach to the next record of the
index. A read may not show a whole record: a payload cut at magics, a record of more than `LARGE` bytes, damage. Then
`RecordFile.read` reads the record, and names the damage. Where records are large on average, all are read by it: then a
call for each costs nothing beside its bytes.

Memory: records, headers and gaps, at most the size of the file, and once more while they are joined.

What can go wrong: a damaged record raises `RecordIOError` with file and offset, also in a batch. So does a file that
was replaced or written again.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, overload

import numpy as np

from sharded_loader.batching.protocol import Empty
from sharded_loader.data.bulk import Indices, Int64s, bulk, checked_index, checked_indices
from sharded_loader.data.datasets import Dataset
from sharded_loader.recordio.files import HEAD_SIZE, MAGIC_NUMBER, Closable, RecordFile, load_index, padded

GAP = 256
"""Bytes between two records that are read in vain: a read costs 0.6 us, but what is read is kept with the batch."""

LARGE = 1 << 18
"""A record that reaches further is read by itself: an index may list only a few records of a file."""

LARGE_MEAN = 1 << 15
"""Bytes of an average record; above, they are made one by one: memory for a large buffer costs more than the reads."""


class RecordFileDataset(Closable, Dataset):
    """The records of a ``.rec`` file as a dataset: ``dataset[i]`` is the i-th record of its index, as bytes.

    The index is the ``.idx`` file beside it (``train.rec``, ``train.idx``). If there is none, the dataset scans the
    file once, and workers get the offsets with the dataset. It does not read records that the index does not list:
    if you have joined files, delete the ``.idx``. It ignores keys, so it reads all records with the same key. You can
    read it in threads and after a fork, and pickle it.

    Args:
        filename: the ``.rec`` file.

    Raises:
        OSError: The file cannot be opened.
        ValueError: The index is malformed, or it is empty and the file is not.
        RecordIOError: It is no RecordIO file. ``dataset[i]`` raises it for a damaged record, and for a file that was
            replaced or written again. You may append records: the dataset does not read them.

    Example:
        >>> import os, tempfile
        >>> from sharded_loader.recordio import MXRecordIO
        >>> folder = tempfile.TemporaryDirectory()
        >>> path = os.path.join(folder.name, "letters.rec")
        >>> with MXRecordIO(path, "w") as file:
        ...     for record in (b"a", b"b", b"c"):
        ...         file.write(record)
        >>> with RecordFileDataset(path) as dataset:
        ...     len(dataset), dataset[0], dataset[-1], list(dataset.get_batch([2, 0]))
        (3, b'a', b'c', [b'c', b'a'])
        >>> folder.cleanup()

    Source: ``mxnet.gluon.data.RecordFileDataset``.
    """

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        self.filename = os.fspath(filename)
        self._file = RecordFile(self.filename)
        self._file.watch()
        idx_path = os.path.splitext(self.filename)[0] + ".idx"
        if os.path.exists(idx_path):
            _, offsets = load_index(idx_path, str)
            if not offsets and self._file.size:
                raise ValueError(
                    f"{idx_path} is empty, {self.filename} has {self._file.size} bytes: "
                    "delete the .idx to have it rebuilt"
                )
        else:
            offsets = self._file.scan(stacklevel=3)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._sizes = guessed_sizes(self._offsets)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> bytes:
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"{self.filename}: index {number} is out of range, it has {len(self)} records")
        record: bytes = self._file.read(int(self._offsets[number]))[0]
        self._file.check()
        return record

    @bulk
    def __getitems__(self, indices: Iterable[int]) -> list[bytes]:
        """Many records, as `get_batch` reads them."""
        return list(self._read(list(indices)))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty | None = None) -> Sequence[bytes]:
        """Many records, read together: for records of a few hundred bytes several times as fast as one by one.

        Args:
            indices: of the records, in any order; negative ones count from the end.
            empty: given by a loader, whose batch is a list, as of any bytes. It is not used.

        Returns:
            The same as ``[dataset[i] for i in indices]``, to be read only. Small records lie in one buffer, and the
            ``bytes`` objects are made when they are asked for.

        Raises:
            RecordIOError: the first damaged record, with its file and offset.
            IndexError: an index is out of range.

        A subclass that has a ``__getitem__`` of its own has no ``get_batch``, unless it writes one.
        """
        records = self._read(indices)
        return records if empty is None else list(records)

    def _read(self, indices: Indices) -> Records | list[bytes]:
        numbers = checked_indices(indices, len(self))
        guesses = self._sizes[numbers]
        records, sizes = read_records(self._file, self._offsets[numbers], guesses)
        self._file.check()
        if sizes is not guesses and self._sizes.flags.writeable:  # only news: after a fork each page is copied for it
            self._sizes[numbers] = np.minimum(sizes, LARGE)
        return records

    def close(self) -> None:
        """Closes the file, in this process. Again is no error."""
        self._file.close()

    def __repr__(self) -> str:
        return f"RecordFileDataset({self.filename!r}, {len(self)} records)"


# -- many records at once ----------------------------------------------------------------------------------------------


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

    def __init__(self, buffer: bytes, starts: Int64s, ends: Int64s) -> None:
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
        return self._buffer[self._starts[number] : self._ends[number]]

    def __iter__(self) -> Iterator[bytes]:
        buffer, places = self._buffer, zip(self._starts.tolist(), self._ends.tolist(), strict=True)
        return iter([buffer[start:end] for start, end in places])

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Records | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal to a list, which has none

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
        begins = offsets - begin
    else:
        inside = np.flatnonzero(limits >= HEAD_SIZE)
        order = inside[np.argsort(offsets[inside], kind="stable")]
        limits = limits[order]
        buffer, begins = _read_stretches(file, offsets[order], limits)
    lengths, all_as_guessed = _stored_lengths(buffer, begins, limits)
    starts = begins + HEAD_SIZE
    if order is not None:
        starts, lengths = _scattered(starts, order, len(offsets)), _scattered(lengths, order, len(offsets))
    if all_as_guessed and len(begins) == len(offsets):
        return Records(buffer, starts, starts + lengths), sizes
    sizes = padded(lengths) + HEAD_SIZE
    parts, total = [buffer], len(buffer)
    for number in np.flatnonzero(lengths < 0).tolist():
        record, following = file.read(int(offsets[number]))
        starts[number], lengths[number], sizes[number] = total, len(record), following - offsets[number]
        parts.append(record)
        total += len(record)
    return Records(b"".join(parts), starts, starts + lengths), sizes


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


def _stored_lengths(buffer: bytes, begins: Int64s, limits: Int64s) -> tuple[Int64s, bool]:
    """The payload's length of each record that lies whole in the buffer, from its header, -1 for others; and whether
    each reaches just to its limit."""
    if not len(begins) or len(buffer) < begins[-1] + limits[-1] or np.bitwise_or.reduce(begins) & 3:
        # Nothing is there, or (the file was truncated just now) not where it is looked for, or not by words.
        return np.full_like(begins, -1), False
    words = np.frombuffer(buffer, "<u4", len(buffer) // 4)
    heads = begins >> 2
    lengths = words[heads + 1].astype(np.int64)  # of a part, the flag in the upper bits makes it exceed any limit
    is_head = words[heads] == MAGIC_NUMBER
    taken = padded(lengths) + HEAD_SIZE
    if np.logical_and.reduce(is_head & (taken == limits)):
        return lengths, True
    return np.where(is_head & (taken <= limits), lengths, -1), False
