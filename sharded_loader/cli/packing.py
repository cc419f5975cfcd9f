"""Files into a RecordIO file: which files, with which labels, and the writing itself.

    find_folder(folder) ----> Listing(entries, names)     a sub-folder is a class
    find_list(file) --------> Listing(entries, names)     MXNet's list, or a path on each line
    pack_files(entries, out)                              out.rec and out.idx, both or neither

A record is MXNet's label header and the bytes of the file as they are. Both files are written under other names and
renamed at the end. So a full disk, Ctrl-C or a file that cannot be read leaves no half of a record file.

What can go wrong (`CannotRun`, one line): no files, missing files, a line that cannot be read, a name without a number.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sharded_loader.cli.output import CannotRun


@dataclass(frozen=True)
class Entry:
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

    entries: Sequence[Entry]
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
        return Listing([Entry(key, 0.0, path) for key, path in enumerate(direct)], {})
    names = _numbers(by_class, names)
    labelled = [(float(names[name]), path) for name, files in by_class.items() for path in files]
    return Listing([Entry(key, *pair) for key, pair in enumerate(labelled)], names, len(direct))


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
        listing = Listing([Entry(key, float(names[path.parent.name]), path) for key, path in enumerate(paths)], names)
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


def index_of(rec: Path) -> Path:
    """Where the index of a record file lies.

    Example:
        >>> index_of(Path("train.rec")).name
        'train.idx'
    """
    return rec.with_suffix(".idx")


def pack_files(entries: Sequence[Entry], out: Path, on_file: Callable[[int], object] = lambda done: None) -> int:
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

    with _replaced(index_of(out), out) as (idx, rec):
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
    with _replaced(index_of(rec)) as (idx,):
        idx.write_text("".join(f"{key}\t{offset}\n" for key, offset in enumerate(offsets)), "ascii", newline="\n")


@contextlib.contextmanager
def _replaced(*files: Path) -> Iterator[list[Path]]:
    """Other names to write to. At the end they take the place of the files; after an exception they are removed."""
    partial = [file.with_name(f".{file.name}.{os.getpid()}.partial") for file in files]
    try:
        yield partial
        for written, file in zip(partial, files, strict=True):
            written.replace(file)
    finally:
        for written in partial:
            written.unlink(missing_ok=True)


def _files_in(folder: Path, suffixes: Sequence[str]) -> Iterator[Path]:
    for place, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and (not suffixes or name.lower().endswith(tuple(suffixes))):
                yield Path(place, name)


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


def _entry(where: str, line: str, root: Path) -> Entry:
    key, *labels, path = line.split("\t")
    try:
        numbers = tuple(map(float, labels))
        if int(key) < 0 or not numbers or not path:
            raise ValueError
    except ValueError:
        wanted = "key<TAB>label<TAB>path, with numbers as key and label"
        raise CannotRun(f"{where}: {line[:80]!r} is not {wanted}") from None
    return Entry(int(key), numbers[0] if len(numbers) == 1 else numbers, root / path)
