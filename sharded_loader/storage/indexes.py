"""Where the samples of a shard lie: a `Format` finds out once, and `Indexes` keeps it in a folder.

    Indexes(folder).of(format, url, stat, make) -> {name: array}

An index is a few arrays in one ``.npz`` file. Its name is a hash of the format, the URL, and the size and tag of the
shard. So a shard that has changed has another index, and two processes that make the same one write the same bytes. A
file appears by being renamed: half of one is never read. It ends with a hash of its bytes, so a damaged one is found,
and replaced. If the folder cannot be written to, indexes are made in memory, with one warning.

Of the processes that share a folder, one makes an index and the others wait for it. A process that dies loses its lock.
Where the file system has no locks, each process makes its own.

What can go wrong: the shard cannot be indexed (see the formats).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sharded_loader.base.notices import warn
from sharded_loader.base.system import lock_at, write_whole
from sharded_loader.data.bulk import Int64s
from sharded_loader.storage.files import ShardFile, Stat
from sharded_loader.storage.parts import UNKNOWN

Index = dict[str, npt.NDArray[Any]]
"""Where the samples of one shard lie: arrays by name. "length" says how many samples there are."""

_one_at_a_time = threading.Lock()
"""NumPy parses the head of an array as Python, which two threads cannot do at once: a SystemError in Python 3.11."""


def _after_fork_in_child() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()  # a thread of the parent may hold the other one


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)

VERSION = 7
"""Of what the formats put into an index, and of index files. Another one makes all of them again."""


class Format(Protocol):
    """How the samples of one shard are found and read; see `Tar` for one.

    Attributes:
        name: of the format; part of the name of each kept index.
        suffixes: of file names, by which the format is found.

    A format may have an attribute ``scans``: whether `index` reads the whole shard, or only a small part of it, such as
    a footer. Without it, True.
    """

    name: str
    suffixes: tuple[str, ...]

    def index(self, file: ShardFile) -> Index:
        """Arrays that say where the samples lie; "length" says how many there are."""

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The samples at these rows, in this order."""


class Indexes:
    """The indexes of shards.

    Args:
        folder: where they are kept.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()  # the process may go to another one
        self._has_warned = False
        self._unkept: dict[Path, Index] = {}  # of shards without a tag; it goes to the workers

    def path(self, name: str, url: str, stat: Stat) -> Path:
        """Where the index of a shard in this format is kept."""
        key = "\0".join((str(VERSION), name, url, str(stat.size), stat.tag))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.npz"

    def of(self, name: str, url: str, stat: Stat, make: Callable[[], Index]) -> Index:
        """The index of a shard; it is made if there is none."""
        path = self.path(name, url, stat)
        found = self._unkept.get(path) or load(path)
        if found is not None:
            return found
        if stat.tag.startswith(UNKNOWN):
            return self._unkept.setdefault(path, make())
        with self._locked(path):
            found = load(path)  # another process may have made it
            if found is None:
                found = make()
                self._keep(path, found)
        return found

    @contextlib.contextmanager
    def _locked(self, path: Path) -> Iterator[None]:
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, NotImplementedError):  # a folder that is read-only, or has no locks
                (self._folder / "locks").mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_at(self._folder / "locks" / path.name[:3]))  # 4,096 locks
            yield

    def _keep(self, path: Path, index: Index) -> None:
        content = dumped(index)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            if self._has_warned:
                return
            self._has_warned = True
            warn(
                f"the indexes of shards cannot be kept in {self._folder} ({error}), so each process makes them again: "
                "give ShardDataset(index_folder=...) a folder that can be written to"
            )


def default_folder() -> Path:
    """Where indexes are kept: the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/.cache")
    return Path(home) / "sharded_loader" / "indexes"


def load(path: Path) -> Index | None:
    """An index from its file; None if there is none, or it is damaged."""
    try:
        return loaded(path.read_bytes())
    except OSError:
        return None


def dumped(index: Index) -> bytes:
    """An index as bytes, which end with their hash.

    Example:
        >>> loaded(dumped({"length": np.array(2)}))
        {'length': array(2)}
    """
    content, arrays = io.BytesIO(), dict[str, Any](index)
    np.savez_compressed(content, **arrays)
    return content.getvalue() + hashlib.sha256(content.getvalue()).digest()


def loaded(content: bytes) -> Index | None:
    """The index of `dumped`; None if the bytes are damaged."""
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None  # NumPy does not find all damage: it may load arrays that are empty
    try:
        with _one_at_a_time, np.load(io.BytesIO(content[:-32]), allow_pickle=False) as found:
            return dict(found)
    except Exception:  # arrays of objects, of a format of the user's; bytes of no such file raise anything
        return None


def by_part(where: Int64s, ends: Int64s) -> list[tuple[int, list[int], list[int]]]:
    """Numbers of samples by the part that they lie in, in the order of the first sample of each part.

    Args:
        where: numbers of samples.
        ends: of each part, the number of the sample after its last one.

    Returns:
        For each part: its number, the positions in ``where``, and the rows in the part.

    Example:
        >>> by_part(np.array([5, 0, 4, 1]), np.array([2, 6]))
        [(1, [0, 2], [3, 2]), (0, [1, 3], [0, 1])]
    """
    parts, begins = np.searchsorted(ends, where, side="right"), np.append(0, ends)
    positions = {part: np.flatnonzero(parts == part) for part in dict.fromkeys(parts.tolist())}
    return [(part, here.tolist(), (where[here] - begins[part]).tolist()) for part, here in positions.items()]


def ascending_by_part(where: Int64s, ends: Int64s) -> list[tuple[int, Int64s]]:
    """As `by_part`, of numbers in ascending order: each part, and the rows in it.

    Example:
        >>> [(part, rows.tolist()) for part, rows in ascending_by_part(np.array([0, 1, 4, 5]), np.array([2, 6]))]
        [(0, [0, 1]), (1, [2, 3])]
    """
    parts = np.searchsorted(ends, where, side="right")
    cuts = [0, *((parts[1:] != parts[:-1]).nonzero()[0] + 1).tolist(), len(where)]
    found = zip(parts[cuts[:-1]].tolist(), cuts, cuts[1:], strict=False)
    return [(part, where[begin:end] - (ends[part - 1] if part else 0)) for part, begin, end in found]


def packed(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Many texts as one array of bytes.

    Example:
        >>> unpacked(packed(["a", "", "bc"])), unpacked(packed(["a", "", "bc"]), [2, 0])
        (['a', '', 'bc'], ['bc', 'a'])
    """
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype="<i8")
    head = np.array([len(texts)], "<i8").tobytes() + ends.tobytes()
    return np.frombuffer(head + b"".join(encoded), np.uint8)


def unpacked(array: npt.NDArray[np.uint8], which: Iterable[int] | None = None) -> list[str]:
    """The texts of `packed`, or some of them."""
    raw = array.view(np.uint8).data if array.dtype.itemsize == 1 else b""  # of no texts: ValueError
    count = int(np.frombuffer(raw[:8], "<i8")[0])
    base = 8 * (count + 2)
    ends = np.frombuffer(raw[8:base], "<i8") + base
    where = np.arange(count) if which is None else np.array(list(which), np.int64)
    return [
        str(raw[begin:end], "utf-8", "surrogateescape")
        for begin, end in zip(ends[where].tolist(), ends[where + 1].tolist(), strict=True)
    ]
