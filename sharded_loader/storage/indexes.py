"""Sample offsets of shards: computed once by a `Format`, then saved in a folder or in one file beside the shards.

    Indexes(folder).of(format, url, stat, make) -> {name: array}
    read_entries(store, url)      -> {URL of a shard: ShardEntry}     one small request
    read_index(store, entry)      -> the index of a shard             a byte range, when the shard is first read

An index is a dict of arrays, saved with a hash: damaged ones are built again. In the folder, file names are a hash of
format, URL, size and tag, so a changed shard has another index. Of the processes that share a folder, one builds an
index while the others wait for its lock. In a read-only folder, or one without locks, each process builds its own.

The index file of a set of shards has relative names, so both can be copied together. About 40 bytes describe a shard::

    mark | version | bytes of the table | bytes of the file | table | indexes, one after the other

An entry is used only for a shard of the same size and tag. Where tags cannot be compared, as after a copy from disk to
a store, checksums of parts of the shard are compared when it is first read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from sharded_loader.extend import Int64s, Notices
from sharded_loader.extend.tools import logger, write_whole
from sharded_loader.recordio.positioned import lock_at, regular
from sharded_loader.storage.files import ShardError, ShardFile, Stat, joined, local_path, shown
from sharded_loader.storage.parts import UNKNOWN, is_same
from sharded_loader.storage.stores import ObjectStore

Index = dict[str, npt.NDArray[Any]]
"""Arrays by name that describe the samples of one shard; "length" is their number."""

VERSION = 10
"""Version of the formats' indexes and of index files; other versions are built again."""

NAME = "shards.index"
"""Name of the index file that is looked for beside shards."""

SUFFIX = ".index"

FIRST = 512 << 10
"""Bytes of the first request: the table of 12,000 shards, and small files completely."""

_HEAD = struct.Struct("<8sIQQ")
_MARK = b"\x89SHARDS\n"


class Format(Protocol):
    """How to find and read the samples of a shard; see `Tar` for an example.

    Attributes:
        name: unique name, part of the key of each saved index.
        suffixes: file name suffixes that select this format.
        scans: optional; False if `index` reads only a small part of a shard, such as a footer.
    """

    name: str
    suffixes: tuple[str, ...]

    def index(self, file: ShardFile) -> Index:
        """Return arrays that describe the samples; "length" is their number."""

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """Return the samples at ``rows``, in that order."""


class Indexes:
    """Indexes of shards, saved in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder.expanduser().absolute()  # the working directory may change
        self._notices = Notices()
        self._unsaved: dict[Path, Index] = {}  # indexes of shards without a tag; pickled to the workers

    def path(self, name: str, url: str, stat: Stat) -> Path:
        key = "\0".join((str(VERSION), name, url, str(stat.size), stat.tag)).encode(errors="surrogatepass")
        return self._folder / f"{hashlib.sha256(key).hexdigest()[:40]}.arrays"

    def of(self, name: str, url: str, stat: Stat, make: Callable[[], Index]) -> Index:
        """Return the index of a shard, calling ``make`` if none is saved."""
        path = self.path(name, url, stat)
        found = self._unsaved.get(path) or load(path)
        if found is not None:
            return found
        if stat.tag.startswith(UNKNOWN):
            return self._unsaved.setdefault(path, make())
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError, NotImplementedError):  # read-only, or without locks
                (self._folder / "locks").mkdir(parents=True, exist_ok=True)
                held.enter_context(lock_at(self._folder / "locks" / path.name[:3]))  # 4,096 locks
            found = load(path)  # saved by another process meanwhile?
            if found is None:
                found = make()
                self._save(path, dumped(found))
        return found

    def _save(self, path: Path, content: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, content)
        except OSError as error:
            advice = "give ShardDataset(index_folder=...) a folder that can be written to"
            where = f"the indexes of shards cannot be kept in {self._folder} ({error})"
            self._notices.warn("index_folder", f"{where}, so each process makes them again: {advice}")


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or os.path.expanduser("~/.cache")
    return Path(home) / "sharded_loader" / "indexes"


def load(path: Path) -> Index | None:
    """Read an index; return None if it is missing or damaged."""
    try:
        return loaded(regular(path).read_bytes())
    except OSError:
        return None


def dumped(index: Index) -> bytes:
    """Serialize an index, followed by its SHA-256. The format of NumPy takes 15 times as long to load (0.9 ms).

    Example:
        >>> loaded(dumped({"length": np.array(2)}))
        {'length': array(2)}
    """
    arrays = {name: np.asarray(array) for name, array in index.items()}
    head = json.dumps({name: (array.dtype.str, array.shape) for name, array in arrays.items()}).encode()
    content = zlib.compress(b"\n".join([head, b"".join(array.tobytes() for array in arrays.values())]))
    return content + hashlib.sha256(content).digest()


def loaded(content: bytes) -> Index | None:
    """Parse the bytes of `dumped`; return None if they are damaged."""
    if hashlib.sha256(content[:-32]).digest() != content[-32:]:
        return None
    found, at = Index(), 0
    try:
        head, _, raw = zlib.decompress(content[:-32]).partition(b"\n")
        for name, (dtype, shape) in json.loads(head).items():
            flat = np.frombuffer(raw, dtype, math.prod(shape), at)  # refuses arrays of objects
            found[name], at = flat.reshape(shape).copy(), at + flat.nbytes
    except Exception:  # a crafted file may have the right hash
        return None
    return found


def by_part(where: Int64s, ends: Int64s) -> tuple[Int64s, list[tuple[int, Int64s]]]:
    """Group sample numbers by the part (shard or row group) that contains them.

    ``ends`` are the cumulative lengths of the parts. Returns the permutation that sorts ``where``, and for each part in
    that order its number and the rows in it.

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
    """Undo the permutation of `by_part`: return the list whose item ``order[i]`` is the i-th value.

    Example:
        >>> in_order(np.array([1, 2, 0]), "abc")
        ['c', 'a', 'b']
    """
    found: list[Any] = [None] * len(order)
    for position, value in zip(order.tolist(), values, strict=True):
        found[position] = value
    return found


def encode_texts(texts: list[str]) -> npt.NDArray[np.uint8]:
    """Encode strings as one array of bytes.

    Example:
        >>> decode_texts(encode_texts(["a", "", "bc"])), decode_texts(encode_texts(["a", "", "bc"]), [2, 0])
        (['a', '', 'bc'], ['bc', 'a'])
    """
    encoded = [text.encode("utf-8", "surrogateescape") for text in texts]
    ends = np.cumsum([0, *map(len, encoded)], dtype="<i8")
    head = np.array([len(texts)], "<i8").tobytes() + ends.tobytes()
    return np.frombuffer(head + b"".join(encoded), np.uint8)


def decode_texts(array: npt.NDArray[np.uint8], which: Iterable[int] | None = None) -> list[str]:
    """Decode all strings of `encode_texts`, or those at ``which``."""
    raw = array.view(np.uint8).data if array.dtype.itemsize == 1 else b""  # of no texts: ValueError
    count = int(np.frombuffer(raw[:8], "<i8")[0])
    base = 8 * (count + 2)
    ends = np.frombuffer(raw[8:base], "<i8")
    where = np.arange(count) if which is None else np.array(list(which), np.int64)
    places = zip((base + ends[where]).tolist(), (base + ends[where + 1]).tolist(), strict=True)
    return [str(raw[begin:end], "utf-8", "surrogateescape") for begin, end in places]


# -- one file with the indexes of many shards --------------------------------------------------------------------------


class ShardEntry(NamedTuple):
    """Description of a shard in the index file ``file``, where its index has the byte range ``begin``, ``end``."""

    file: str
    format: str
    stat: Stat
    length: int
    begin: int
    end: int

    def describes(self, format: str, stat: Stat) -> bool:
        """Return True unless format, size or tag show that the entry is for another version."""
        is_other = is_same(self.stat.tag, stat.tag) is False
        return self.format == format and self.stat.size == stat.size and not is_other


def index_url(urls: Sequence[str]) -> str | None:
    """Return the URL of the index file for shards, in their innermost common folder; None if they have none in common.

    Example:
        >>> index_url(["s3://bucket/a/1.tar", "s3://bucket/b/2.tar"]), index_url(["s3://one/1.tar", "s3://two/2.tar"])
        ('s3://bucket/shards.index', None)
    """
    common = "/".join(os.path.commonprefix([url.split("/")[:-1] for url in urls]))  # noqa: RUF071  # by folders
    has_one = re.match("[^:]*://.", common) if any("://" in url for url in urls) else common
    return f"{common}/{NAME}" if has_one and not any("?" in url for url in urls) else None


def read_entries(store: ObjectStore, url: str) -> dict[str, ShardEntry]:
    """Read the table of an index file, by the URLs of its shards.

    Raises:
        ShardError: The file is not an index file, damaged, of another version, missing or forbidden.
    """
    content = store.beginning(url, FIRST)
    mark, version, table_size, size = _HEAD.unpack_from(content.ljust(_HEAD.size, b"\0"))
    if mark != _MARK:
        raise _unusable(url, "is not an index file")
    if version != VERSION:
        raise _unusable(url, f"is an index file of version {version}, and this library reads version {VERSION}")
    begin = _HEAD.size + table_size
    if begin > size or (len(content) < FIRST and len(content) != size):
        raise _unusable(url, f"is cut or damaged: it has {len(content):,} bytes, and had {size:,}")
    if begin > len(content):
        content += store.ranges(url, [len(content)], [begin])[0]
    try:
        table = loaded(content[_HEAD.size : begin]) or {}
        [format], names, tags = (decode_texts(table[name]) for name in ("format", "names", "tags"))
        counts = [table[name].astype(np.int64, casting="safe") for name in ("sizes", "lengths", "ends")]
        sizes, lengths, ends = np.stack(counts).reshape(3, len(names))
        begins = np.append(0, ends)  # the index of the last shard ends with the file
        if min(map(np.min, [*counts, np.diff(begins)])) < 0 or lengths.max() >> 48 or begins[-1] != size - begin:
            raise ValueError
        columns = sizes, lengths, begins[:-1] + begin, ends + begin
        rows = zip(tags, *(column.tolist() for column in columns), strict=True)
        entries = [ShardEntry(url, format, Stat(size, tag), *row) for tag, size, *row in rows]
    except Exception:  # a crafted file may have the right hash
        raise _unusable(url, "is damaged") from None
    return dict(zip(joined(url, names, store.trust), entries, strict=True))


def read_index(store: ObjectStore, entry: ShardEntry) -> Index | None:
    """Read the index of a shard from its index file; return None, with a log line, if that was changed or deleted."""
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
    """Return the bytes of an index file for ``url``; ``found`` are the length and `dumped` index of each shard."""
    folder, parts = url.rpartition("/")[0] + "/", [part for _, part in found]
    table = dumped(
        {
            "format": encode_texts([format]),
            "names": encode_texts([url.removeprefix(folder) for url in urls]),
            "tags": encode_texts(["" if local_path(url) else stat.tag for url, stat in zip(urls, stats, strict=True)]),
            "sizes": np.array([stat.size for stat in stats], np.int64),
            "lengths": np.array([length for length, _ in found], np.int64),
            "ends": np.cumsum(list(map(len, parts)), dtype=np.int64),
        }
    )
    size = _HEAD.size + len(table) + sum(map(len, parts))
    return b"".join([_HEAD.pack(_MARK, VERSION, len(table), size), table, *parts])


def _unusable(url: str, why: str) -> ShardError:
    return ShardError(f"{shown(url)} {why}: write it again (sharded-loader index), or delete it")
