"""A RecordIO file, read from its beginning to its end: what is in it, and where it is damaged.

    examine(path) -> Examination (sizes, labels, contents, the index, the damage), and where each record begins

Every byte is read once, and a record at a time is in memory. What can go wrong: the file cannot be opened (OSError).
"""

from __future__ import annotations

import contextlib
import math
import statistics
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sharded_loader.cli.output import counted
from sharded_loader.cli.packing import index_of

SIGNATURES = {
    "JPEG": b"\xff\xd8\xff",
    "PNG": b"\x89PNG\r\n\x1a\n",
    "GIF": b"GIF8",
    "RIFF": b"RIFF",
    "NumPy": b"\x93NUMPY",
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


def examine(
    path: Path, first: int = 5, on_bytes: Callable[[int], object] = lambda done: None
) -> tuple[Examination, array[int]]:
    """Read a record file, and its index if there is one.

    Args:
        path: the ``.rec`` file.
        first: how many records to describe one by one.
        on_bytes: called with the number of bytes that are read.

    Returns:
        What is in the file, and the offset of each whole record.

    Raises:
        OSError: it cannot be opened.
    """
    from sharded_loader.recordio import MXRecordIO, RecordIOError

    result = Examination(str(path), path.stat().st_size)
    offsets, sizes = array("q"), array("q")
    labels: Counter[str] = Counter()
    contents: Counter[str] = Counter()
    try:
        with MXRecordIO(path, "r") as file:
            offset = 0
            while (content := file.read()) is not None:
                record = describe(offset, content)
                if len(sizes) < first:
                    result.first.append(record)
                offsets.append(offset)
                sizes.append(record.nbytes)
                contents[record.content] += 1
                if record.id is not None:
                    labels[record.label] += 1
                on_bytes(offset)
                offset = file.tell()
    except RecordIOError as error:  # what is wrong, without the advice for programs, which is worth reading at offset 0
        result.damage = error.problem.partition(". ")[0] if error.offset else error.problem
        result.damage_offset = error.offset
    result.records, result.headers = len(sizes), labels.total()
    if sizes:
        result.smallest, result.median, result.largest = (
            min(sizes),
            statistics.median_high(sizes),
            max(sizes),
        )
    result.labels, result.contents = dict(labels.most_common()), dict(contents.most_common())
    result.index, result.index_is_wrong = _check_index(index_of(path), offsets)
    return result, offsets


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

    label, key, payload = "", None, record
    with contextlib.suppress(ValueError):
        header, rest = unpack(record)
        numbers = [float(header.label)] if header.flag == 0 else header.label.tolist()
        if all(map(math.isfinite, numbers)):
            label, key, payload = " ".join(f"{number:g}" for number in numbers), header.id, rest
    kinds = (name for name, beginning in SIGNATURES.items() if payload.startswith(beginning))
    return First(offset, len(payload), label, key, next(kinds, "other" if payload else "empty"))


def _check_index(idx: Path, offsets: array[int]) -> tuple[str, bool]:
    from sharded_loader.recordio.files import load_index

    if not idx.exists():
        return "none", False
    try:
        _, listed = load_index(str(idx), str)
    except ValueError as error:
        return str(error), True
    known = set(offsets)
    if wrong := sum(offset not in known for offset in listed):
        return f"{idx.name}: {wrong:,} of {len(listed):,} keys lead to no whole record", True
    missing = len(known.difference(listed))
    without = f"; {counted(missing, 'record')} {'has' if missing == 1 else 'have'} no key" if missing else ""
    return f"{idx.name}: {counted(len(listed), 'key')}{without}", False
