"""A RecordIO file, read from its beginning to its end: what is in it, and where it is damaged.

    records_of(path) -> (offset, record), one after the other        RecordIOError at the damage
    examine(path) -> Examination: sizes, labels, contents, the index, the damage

Every byte is read once, and a record at a time is in memory. What can go wrong: the file cannot be opened (OSError).
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from sharded_loader.cli.output import counted
from sharded_loader.cli.packing import index_of

if TYPE_CHECKING:
    from sharded_loader.recordio import RecordIOError

SIGNATURES = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "RIFF": (b"RIFF",),
    "NumPy": (b"\x93NUMPY",),
}
"""How the contents of well-known files begin. WebP and WAV are RIFF."""


@dataclass(frozen=True)
class First:
    """One of the first records: where it begins, bytes of the payload, label, id, and what it holds."""

    offset: int
    nbytes: int
    label: str
    id: int | None
    content: str


@dataclass
class Examination:
    """What is in a record file.

    Attributes:
        path: the file.
        nbytes: its size.
        records: the number of whole records.
        smallest, median, largest: bytes of a record without its label header; 0 without records.
        headers: the number of records with MXNet's label header.
        labels: the number of records with each label.
        contents: the number of records with each kind of content.
        first: the first records.
        damage: what is wrong, and where; None if all of the file can be read.
        damage_offset: where the damaged record begins.
        index: what the index beside the file says, in words.
        index_is_wrong: a key of it leads to no record.
    """

    path: str
    nbytes: int
    records: int = 0
    smallest: int = 0
    median: int = 0
    largest: int = 0
    headers: int = 0
    labels: dict[str, int] = field(default_factory=dict)
    contents: dict[str, int] = field(default_factory=dict)
    first: list[First] = field(default_factory=list)
    damage: str | None = None
    damage_offset: int | None = None
    index: str = "none"
    index_is_wrong: bool = False


def records_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Where each record begins, and the record.

    Raises:
        RecordIOError: the file is damaged there.
        OSError: it cannot be opened.
    """
    from sharded_loader.recordio import MXRecordIO

    with MXRecordIO(path, "r") as file:
        offset = 0
        while (record := file.read()) is not None:
            yield offset, record
            offset = file.tell()


def examine(path: Path, first: int = 5, on_bytes: Callable[[int], object] = lambda done: None) -> Examination:
    """Read a record file, and its index if there is one.

    Args:
        path: the ``.rec`` file.
        first: how many records to describe one by one.
        on_bytes: called with the number of bytes that are read.

    Raises:
        OSError: it cannot be opened.
    """
    from sharded_loader.recordio import RecordIOError

    found = Examination(str(path), path.stat().st_size)
    offsets, sizes = array("q"), array("q")
    labels: Counter[str] = Counter()
    contents: Counter[str] = Counter()
    try:
        for offset, record in records_of(path):
            described = describe(offset, record)
            if len(sizes) < first:
                found.first.append(described)
            offsets.append(offset)
            sizes.append(described.nbytes)
            contents[described.content] += 1
            if described.id is not None:
                found.headers += 1
                labels[described.label] += 1
            on_bytes(offset)
    except RecordIOError as error:
        found.damage, found.damage_offset = short(error), error.offset
    found.records = len(sizes)
    if sizes:
        ordered = sorted(sizes)
        found.smallest, found.median, found.largest = ordered[0], ordered[len(ordered) // 2], ordered[-1]
    found.labels, found.contents = dict(labels.most_common()), dict(contents.most_common())
    found.index, found.index_is_wrong = _index(index_of(path), offsets)
    return found


def short(error: RecordIOError) -> str:
    """What is wrong at the damage, without the advice for programs.

    Example:
        >>> from sharded_loader.recordio import RecordIOError
        >>> short(RecordIOError("a.rec", 8, "the file ends at 20. Copy it again."))
        'the file ends at 20'
    """
    return error.problem.partition(". ")[0] if error.offset else error.problem


def describe(offset: int, record: bytes) -> First:
    """One record: its label header, if it has one, and what it holds.

    Example:
        >>> from sharded_loader.recordio import pack
        >>> describe(0, pack((0, 3.0, 7, 0), b"GIF89a..."))
        First(offset=0, nbytes=9, label='3', id=7, content='GIF')
        >>> describe(64, b"plain")
        First(offset=64, nbytes=5, label='', id=None, content='other')
    """
    from sharded_loader.recordio import unpack

    try:
        header, payload = unpack(record)
        numbers = [float(header.label)] if header.flag == 0 else [float(number) for number in header.label]
    except ValueError:
        return First(offset, len(record), "", None, _content(record))
    if not all(map(math.isfinite, numbers)):
        return First(offset, len(record), "", None, _content(record))
    return First(offset, len(payload), " ".join(f"{number:g}" for number in numbers), header.id, _content(payload))


def _content(payload: bytes) -> str:
    for name, beginnings in SIGNATURES.items():
        if payload.startswith(beginnings):
            return name
    return "other" if payload else "empty"


def _index(idx: Path, offsets: array[int]) -> tuple[str, bool]:
    from sharded_loader.recordio.dataset import load_index

    if not idx.exists():
        return "none", False
    try:
        _, listed = load_index(str(idx), str)
    except ValueError as error:
        return str(error), True
    known = set(offsets)
    wrong = sum(offset not in known for offset in listed)
    if wrong:
        return f"{idx.name}: {wrong:,} of {len(listed):,} keys lead to no whole record", True
    missing = len(known.difference(listed))
    without = f"; {counted(missing, 'record')} {'has' if missing == 1 else 'have'} no key" if missing else ""
    return f"{idx.name}: {counted(len(listed), 'key')}{without}", False
