"""Where the samples of shards lie: found once by a `Format`, kept in a folder, or read from one file beside the shards.

    Indexes(folder).of(format, url, stat, make) -> {name: array}
    entries_in(store, url)      -> {URL of a shard: ShardEntry}     one small request
    index_of(store, entry)      -> the index of a shard             a part of the file, when the shard is first read
    content(...)                -> the bytes of such a file

An index is a few arrays. `dumped` makes bytes of them, which end with their hash: so damage is found, and the index is
built again.

In the folder, the name of a file is a hash of the format, the URL, and the size and tag of the shard. So a shard that
has changed has another index, and two processes that make the same one write the same bytes. A file appears by being
renamed: half of one is never read. If the folder cannot be written to, indexes are made in memory, with one warning. Of
the processes that share a folder, one makes an index and the others wait for it. A process that dies loses its lock.
Where the file system has no locks, each process makes its own.

The file beside the shards:

    mark | version | bytes of the table | bytes of the file | table | indexes, one after the other

The table has the name, size, tag and number of samples of each shard, and where its index ends. That is about 40 bytes
for a shard. Names are relative to the folder of the file, so shards and file can be copied to another place together.
A shard is read by its entry only if it has the size and the tag of the entry. Shards that were indexed on a disk have
no tag there, and tags of two kinds of stores cannot be compared. Then the content of a shard is compared when it is
first read: each index has a few checksums.

What can go wrong: the shard cannot be indexed (see the formats). A file that is no index file, is damaged or cut, or of
another version of this library: a `ShardError` that names the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Notices
from sharded_loader.extend.tools import lock_at, logger, write_whole
from sharded_loader.storage.files import ShardError, ShardFile, Stat, joined, local_path, shown
from sharded_loader.storage.parts import UNKNOWN, is_same
from sharded_loader.storage.stores import ObjectStore

Index = dict[str, npt.NDArray[Any]]
"""Where the samples of one shard lie: arrays by name. "length" says how many samples there are."""

VERSION = 9
"""Of what the formats put into an index, and of index files. Another one makes all of them again."""

NAME = "shards.index"
"""How the file is called that is looked for beside shards."""

SUFFIX = ".index"

FIRST = 512 << 10
"""Bytes of the first request: the table of 12,000 shards, and small files whole."""

_HEAD = struct.Struct("<8sIQQ")
_MARK = b"\x89SHARDS\n"


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
        self._notices = Notices()
        self._unkept: dict[Path, Index] = {}  # of shards without a tag; it goes to the workers

    def path(self, name: str, url: str, stat: Stat) -> Path:
        """Where the index of a shard in this format is kept."""
        key = "\0".join((str(VERSION), name, url, str(stat.size), stat.tag))
        return self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.arrays"

    def of(self, name: str, url: str, stat: Stat, make: Callable[[], Index]) -> Index:
        """The index of a shard; it is made if there is none."""
        path = self.path(name, url, stat)
        found = self._unkept.get(path) or load(path)
        if found is not None:
            return found
        if stat.tag.startswith(UNKNOWN):
            return self._unkept.setdefault(path, make())
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, NotImplementedError):  # a folder that is read-only, or has no locks
                (self._folder / "locks").mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_at(self._folder / "locks" / path.name[:3]))  # 4,096 locks
            found = load(path)  # another process may have made it
            if found is None:
                found = make()
                self._keep(path, dumped(found))
        return found

    def _keep(self, path: Path, content: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            advice = "give ShardDataset(index_folder=...) a folder that can be written to"
            where = f"the indexes of shards cannot be kept in {self._folder} ({error})"
            self._notices.warn("index_folder", f"{where}, so each process makes them again: {advice}")


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
    file = io.BytesIO()
    arrays: dict[str, Any] = {**index}
    np.savez_compressed(file, **arrays)
    return file.getvalue() + hashlib.sha256(file.getvalue()).digest()


def loaded(content: bytes) -> Index | None:
    """The index of `dumped`; None if the bytes are damaged."""
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    try:
        with np.load(io.BytesIO(content[:-32]), allow_pickle=False) as found:  # refuses arrays of objects
            return dict(found)
    except Exception:  # what has the right hash may still be anything
        return None


def by_part(where: Int64s, ends: Int64s) -> tuple[Int64s, list[tuple[int, Int64s]]]:
    """Numbers of samples by the part that they lie in.

    Args:
        where: numbers of samples.
        ends: of each part, the number of the sample after its last one.

    Returns:
        The positions in ``where`` in ascending order of the numbers, and in that order for each part its number, and
        the rows in it.

    Example:
        >>> by_part(np.array([5, 0, 4, 1]), np.array([2, 6]))
        (array([1, 3, 2, 0]), [(0, array([0, 1])), (1, array([2, 3]))])
    """
    order = where.argsort(kind="stable")
    where = where[order]
    parts = np.searchsorted(ends, where, side="right")
    cuts = sorted({0, *((parts[1:] != parts[:-1]).nonzero()[0] + 1).tolist(), len(where)})
    found = [(int(parts[begin]), where[begin:end]) for begin, end in pairwise(cuts)]
    return order, [(part, rows - (ends[part - 1] if part else 0)) for part, rows in found]


def in_order(order: Int64s, values: Iterable[object]) -> list[Any]:
    """Values at their positions.

    Example:
        >>> in_order(np.array([1, 2, 0]), "abc")
        ['c', 'a', 'b']
    """
    found: list[Any] = [None] * len(order)
    for position, value in zip(order.tolist(), values, strict=True):
        found[position] = value
    return found


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
    places = zip(ends[where].tolist(), ends[where + 1].tolist(), strict=True)
    return [str(raw[begin:end], "utf-8", "surrogateescape") for begin, end in places]


# -- one file with the indexes of many shards --------------------------------------------------------------------------


class ShardEntry(NamedTuple):
    """What an index file says of a shard.

    Attributes:
        file: the URL of the index file.
        format: the name of the format.
        stat: of the shard, when it was indexed.
        length: how many samples it has.
        begin, end: where its index lies in the index file.
    """

    file: str
    format: str
    stat: Stat
    length: int
    begin: int
    end: int

    def describes(self, format: str, stat: Stat) -> bool:
        """Whether it may be of this version of its shard."""
        is_other = is_same(self.stat.tag, stat.tag) is False
        return self.format == format and self.stat.size == stat.size and not is_other


def place_of(urls: Sequence[str]) -> str | None:
    """Where the index file of shards is looked for: in the innermost folder that has them all; None: there is none.

    Example:
        >>> place_of(["s3://bucket/a/1.tar", "s3://bucket/b/2.tar"]), place_of(["s3://one/1.tar", "s3://two/2.tar"])
        ('s3://bucket/shards.index', None)
    """
    common = "/".join(os.path.commonprefix([url.split("/")[:-1] for url in urls]))  # noqa: RUF071  # by folders
    has_one = re.match("[^:]*://.", common) if any("://" in url for url in urls) else common
    return f"{common}/{NAME}" if has_one and not any("?" in url for url in urls) else None


def entries_in(store: ObjectStore, url: str) -> dict[str, ShardEntry]:
    """What an index file says of its shards, by their URLs.

    Raises:
        ShardError: it is no index file, or it is damaged or of another version. Also a FileNotFoundError or a
            PermissionError.
    """
    content = store.beginning(url, FIRST)
    mark, version, table_size, size = _HEAD.unpack_from(content.ljust(_HEAD.size, b"\0"))
    if mark != _MARK:
        raise _unusable(url, "is no index file")
    if version != VERSION:
        raise _unusable(url, f"is an index file of version {version}, and this library reads version {VERSION}")
    begin = _HEAD.size + table_size
    if begin > size or (len(content) < FIRST and len(content) != size):
        raise _unusable(url, f"is cut or damaged: it has {len(content):,} bytes, and had {size:,}")
    if begin > len(content):
        content += store.ranges(url, [len(content)], [begin])[0]
    try:
        table = loaded(content[_HEAD.size : begin]) or {}
        [format], names, tags = (unpacked(table[name]) for name in ("format", "names", "tags"))
        counts = [table[name].astype(np.int64, casting="safe") for name in ("sizes", "lengths", "ends")]
        sizes, lengths, ends = np.stack(counts).reshape(3, len(names))
        begins = np.append(0, ends)  # the index of the last shard ends with the file
        if min(map(np.min, [*counts, np.diff(begins)])) < 0 or lengths.max() >> 48 or begins[-1] != size - begin:
            raise ValueError
        columns = sizes, lengths, begins[:-1] + begin, ends + begin
        rows = zip(tags, *(column.tolist() for column in columns), strict=True)
        entries = [ShardEntry(url, format, Stat(size, tag), *row) for tag, size, *row in rows]
    except Exception:  # what has the right hash may still be anything
        raise _unusable(url, "is damaged") from None
    return dict(zip(joined(url, names, store.trust), entries, strict=True))


def index_of(store: ObjectStore, entry: ShardEntry) -> Index | None:
    """The index of a shard, out of its index file; None, and a line of the logger, if it is not there any more."""
    try:
        found = loaded(store.ranges(entry.file, [entry.begin], [entry.end])[0])
    except ShardError:
        found = None
    if found is None:
        what = "was deleted, cut or written again since the dataset was made, so shards are indexed one by one"
        logger.warning("%s %s: make the dataset again", shown(entry.file), what)
    elif repr(found.get("length", np.array(-1)).tolist()) != repr(entry.length):  # one integer
        raise _unusable(entry.file, "is damaged")
    return found


def content(url: str, format: str, urls: Sequence[str], stats: Sequence[Stat], found: list[tuple[int, bytes]]) -> bytes:
    """The bytes of an index file.

    Args:
        url: where it will lie.
        format: of the shards.
        urls, stats: of each shard.
        found: of each shard: how many samples it has, and its index as `dumped` has made it.
    """
    folder, parts = url.rpartition("/")[0] + "/", [part for _, part in found]
    table = dumped(
        {
            "format": packed([format]),
            "names": packed([url.removeprefix(folder) for url in urls]),
            "tags": packed(["" if local_path(url) else stat.tag for url, stat in zip(urls, stats, strict=True)]),
            "sizes": np.array([stat.size for stat in stats], np.int64),
            "lengths": np.array([length for length, _ in found], np.int64),
            "ends": np.cumsum(list(map(len, parts)), dtype=np.int64),
        }
    )
    size = _HEAD.size + len(table) + sum(map(len, parts))
    return b"".join([_HEAD.pack(_MARK, VERSION, len(table), size), table, *parts])


def _unusable(url: str, why: str) -> ShardError:
    return ShardError(f"{shown(url)} {why}: write it again (sharded-loader index), or delete it")
