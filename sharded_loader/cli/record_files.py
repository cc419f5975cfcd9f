"""RecordIO files: packed from other files, and read from the beginning to the end. No output here.

    find_folder(folder) ----> Listing(entries, names)     a sub-folder is a class
    find_list(file) --------> Listing(entries, names)     MXNet's list, or a path on each line
    pack_files(entries, out)                              out.rec and out.idx, both or neither
    examine(path) ----------> Examination                 sizes, labels, contents, the index, the damage
                              and where each record begins
    write_index(rec, offsets)

A record is MXNet's label header and the bytes of the file as they are. Both files are written under other names and
renamed at the end. So a full disk, Ctrl-C or a file that cannot be read leaves no half of a record file.

`examine` reads every byte once, with one record at a time in memory.

What can go wrong (`CannotRun`, one line): no files, missing files, a line that cannot be read, a name without a number.
A file that cannot be opened or written is an OSError.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from sharded_loader.cli.files import replaced
from sharded_loader.cli.output import CannotRun, counted

SIGNATURES = {
    "JPEG": b"\xff\xd8\xff",
    "PNG": b"\x89PNG\r\n\x1a\n",
    "GIF": b"GIF8",
    "RIFF": b"RIFF",
    "NumPy": b"\x93NUMPY",
}
"""How the contents of well-known files begin. WebP and WAV are RIFF."""


@dataclass(frozen=True)
class FileToPack:
    """A file to pack: the key of its record, its label (or several), and its path."""

    key: int
    label: float | tuple[float, ...]
    path: Path


@dataclass(frozen=True)
class Listing:
    """What is to be packed.

    Attributes:
        entries: the files, in the order of the records.
        names: the number of each class name; empty if the list has numbers instead.
        left_out: files directly in the folder, beside sub-folders, which are in no class.
    """

    entries: Sequence[FileToPack]
    names: dict[str, int]
    left_out: int = 0


def find_folder(folder: Path, suffixes: Sequence[str] = (), names: dict[str, int] | None = None) -> Listing:
    """The files of a folder. Each sub-folder is a class; files in folders below belong to it too.

    Args:
        folder: where to look. Names that begin with a dot are passed over.
        suffixes: such as ``.jpg``; none: all files.
        names: the number of each class. None: 0, 1, 2 ... in the order of the names.

    Raises:
        CannotRun: there are no files, or a class has no number in ``names``.
    """
    by_class: dict[str, list[Path]] = {}
    for path in _files_in(folder, suffixes):
        by_class.setdefault(path.relative_to(folder).parts[0] if path.parent != folder else "", []).append(path)
    direct = by_class.pop("", [])
    if not by_class:
        wanted = f" that end in {' or '.join(suffixes)}" if suffixes else ""
        if not direct:
            raise CannotRun(f"{folder} has no files{wanted}: give a folder with a sub-folder of files for each class")
        return Listing([FileToPack(key, 0.0, path) for key, path in enumerate(direct)], {})
    names = _numbers(by_class, names)
    labelled = [(names[name], path) for name, files in by_class.items() for path in files]
    return Listing([FileToPack(key, *pair) for key, pair in enumerate(labelled)], names, len(direct))


def find_list(file: Path, root: Path | None = None, names: dict[str, int] | None = None) -> Listing:
    """The files that a list names.

    Args:
        file: a path on each line, whose folder is its class; or MXNet's ``key<TAB>label<TAB>path``, also with several
            labels. Empty lines do not count.
        root: paths in the list begin there. None: in the folder of the list.
        names: the number of each class, as for `find_folder`.

    Raises:
        CannotRun: a line is wrong, a key stands there twice, a file is missing, or the list is empty.
    """
    root = file.parent if root is None else root
    try:
        lines = list(_lines_of(file))
    except UnicodeDecodeError:
        raise CannotRun(f"{file} is not a text file: give a folder, or a list with a path on each line") from None
    if not lines:
        raise CannotRun(f"{file} is empty: write a path on each line")
    if any("\t" in line for _, line in lines):
        listing = Listing([_entry(f"{file}, {where}", line.strip(), root) for where, line in lines], {})
    else:
        paths = [root / line.strip() for _, line in lines]
        names = _numbers(sorted({path.parent.name for path in paths}), names)
        listing = Listing(
            [FileToPack(key, float(names[path.parent.name]), path) for key, path in enumerate(paths)], names
        )
    lines_by_key: dict[int, str] = {}
    missing = []
    for (where, _), entry in zip(lines, listing.entries, strict=True):
        if (before := lines_by_key.setdefault(entry.key, where)) != where:
            raise CannotRun(f"{file}, {where}: the key {entry.key} is also in {before}: give each its own")
        if not entry.path.is_file():
            missing.append(f"{file}, {where}: there is no file {entry.path}")
    if missing:
        more = f" ({len(missing) - 1:,} more are missing)" if len(missing) > 1 else ""
        raise CannotRun(f"{missing[0]}{more}: correct the list, or give --root")
    return listing


def read_labels(file: Path) -> dict[str, int]:
    """The number of each class name, from a file with ``name<TAB>number`` on each line.

    Raises:
        CannotRun: a line is not like that, or a name stands there twice.
    """
    names: dict[str, int] = {}
    for where, line in _lines_of(file):
        name, _, label = line.rpartition("\t")
        if not name or not label.strip().isdecimal() or name in names:
            raise CannotRun(f"{file}, {where}: {line[:80]!r} is not name<TAB>number with a new name")
        names[name] = int(label)
    return names


def write_labels(file: Path, names: dict[str, int]) -> None:
    """Write what `read_labels` reads."""
    file.write_text("".join(f"{name}\t{number}\n" for name, number in names.items()), "utf-8")


def pack_files(entries: Sequence[FileToPack], out: Path, on_file: Callable[[int], object] = lambda done: None) -> int:
    """Write the files as records, and the index beside them.

    Args:
        entries: the files.
        out: the record file. An existing one is replaced at the end.
        on_file: called with the number of files that are written.

    Returns:
        The size of the record file in bytes.

    Raises:
        CannotRun: a file is too large for a record, or its label does not fit.
        OSError: a file cannot be read, or the output cannot be written.
    """
    from sharded_loader.recordio import IRHeader, MXIndexedRecordIO, pack
    from sharded_loader.recordio.files import MAX_LENGTH

    with replaced(out.with_suffix(".idx"), out) as (idx, rec):
        with MXIndexedRecordIO(idx, rec, "w") as records:
            for done, entry in enumerate(entries, 1):
                content = entry.path.read_bytes()
                try:
                    record = pack(IRHeader(0, entry.label, entry.key, 0), content)
                    if len(record) > MAX_LENGTH:
                        raise ValueError(f"it has {len(content):,} bytes, and a record has room for {MAX_LENGTH:,}")
                except ValueError as error:
                    raise CannotRun(f"{entry.path}: {error}") from None
                records.write_idx(entry.key, record)
                on_file(done)
        return int(rec.stat().st_size)


def write_index(rec: Path, offsets: Iterable[int]) -> None:
    """Write the index of a record file: the keys are 0, 1, 2 ..."""
    from sharded_loader.recordio.files import index_line

    with replaced(rec.with_suffix(".idx")) as (idx,):
        idx.write_text("".join(index_line(key, offset) for key, offset in enumerate(offsets)), "ascii", newline="\n")


def _files_in(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for current, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (not suffixes or name.lower().endswith(tuple(suffixes))):
                yield Path(current, name)


def _lines_of(file: Path) -> Iterator[tuple[str, str]]:
    """The number of each line, in words, and the line. Lines that hold only spaces are left out."""
    for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
        if line.strip():
            yield f"line {number}", line


def _numbers(classes: Iterable[str], names: dict[str, int] | None) -> dict[str, int]:
    if names is None:
        return {name: number for number, name in enumerate(classes)}
    if unknown := [repr(name) for name in classes if name not in names]:
        raise CannotRun(f"no number for {', '.join(unknown[:5])} in the file of --labels: add it there")
    return names


def _number(text: str) -> float:
    try:
        return int(text)  # large ones are no floats
    except ValueError:
        return float(text)


def _entry(where: str, line: str, root: Path) -> FileToPack:
    key, *labels, path = line.split("\t")
    try:
        numbers = tuple(map(_number, labels))
        if int(key) < 0 or not numbers or not path:
            raise ValueError
    except ValueError:
        wanted = "key<TAB>label<TAB>path, with numbers as key and label"
        raise CannotRun(f"{where}: {line[:80]!r} is not {wanted}") from None
    return FileToPack(int(key), numbers[0] if len(numbers) == 1 else numbers, root / path)


# -- what is in a record file ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordSummary:
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
    first: list[RecordSummary] = field(default_factory=list)
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
        result.smallest, result.median, result.largest = min(sizes), statistics.median_high(sizes), max(sizes)
    result.labels, result.contents = dict(labels.most_common()), dict(contents.most_common())
    result.index, result.index_is_wrong = _check_index(path.with_suffix(".idx"), offsets)
    return result, offsets


def describe(offset: int, record: bytes) -> RecordSummary:
    """One record: its label header, if it has one, and what it holds.

    Example:
        >>> from sharded_loader.recordio import pack
        >>> describe(0, pack((0, 3.0, 7, 0), b"GIF89a..."))
        RecordSummary(offset=0, nbytes=9, label='3', id=7, content='GIF')
        >>> describe(64, b"plain")
        RecordSummary(offset=64, nbytes=5, label='', id=None, content='other')
    """
    from sharded_loader.recordio import unpack

    label, key, payload = "", None, record
    with contextlib.suppress(ValueError):
        header, rest = unpack(record)
        numbers = [float(header.label)] if header.flag == 0 else header.label.tolist()
        if all(map(math.isfinite, numbers)):
            label = " ".join(f"{number:.{9 if number.is_integer() else 6}g}" for number in numbers)
            key, payload = header.id, rest
    kinds = (name for name, beginning in SIGNATURES.items() if payload.startswith(beginning))
    return RecordSummary(offset, len(payload), label, key, next(kinds, "other" if payload else "empty"))


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
