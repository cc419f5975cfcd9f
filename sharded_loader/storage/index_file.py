"""One file with the indexes of many shards, which lies beside them in the store.

    entries_in(store, url)     -> {URL of a shard: ShardEntry}     one small request
    index_of(store, entry)     -> the index of a shard             a part of the file, when the shard is first read
    content(...)               -> the bytes of such a file

    mark | version | bytes of the table | bytes of the file | table | indexes, one after the other

The table has the name, size, tag and number of samples of each shard, and where its index ends. That is about 40 bytes
for a shard. Table and indexes are arrays, each with its hash (`indexes.dumped`). Names are relative to the folder of
the file, so shards and file can be copied to another place together.

A shard is read by its entry only if it has the size and the tag of the entry. Shards that were indexed on a disk have
no tag there, and tags of two kinds of stores cannot be compared. Then the content of a shard is compared when it is
first read: each index has a few checksums.

What can go wrong: a file that is no index file, is damaged or cut, or of another version of this library. All are a
`ShardError` that names the file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

import numpy as np

from sharded_loader.base.notices import logger
from sharded_loader.storage.files import ShardError, Stat, joined, local_path, shown
from sharded_loader.storage.indexes import VERSION, Index, dumped, loaded, packed, unpacked
from sharded_loader.storage.stores import ObjectStore

NAME = "shards.index"
"""How the file is called that is looked for beside shards."""

SUFFIX = ".index"

FIRST = 512 << 10
"""Bytes of the first request: the table of 12,000 shards, and small files whole."""

_HEAD = struct.Struct("<8sIQQ")
_MARK = b"\x89SHARDS\n"


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


def place_of(urls: Sequence[str]) -> str | None:
    """Where the index file of shards is looked for: in the innermost folder that has them all; None: there is none.

    Example:
        >>> place_of(["s3://bucket/a/1.tar", "s3://bucket/b/2.tar"]), place_of(["s3://one/1.tar", "s3://two/2.tar"])
        ('s3://bucket/shards.index', None)
    """
    folders = {url.rpartition("/")[0] + "/" for url in urls}
    levels = zip(min(folders).split("/"), max(folders).split("/"), strict=False)
    common = "/".join(name for name, _ in takewhile(lambda names: names[0] == names[1], levels)).removesuffix("/")
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


def content(
    url: str, format: str, urls: Sequence[str], stats: Sequence[Stat], indexes: Sequence[tuple[int, bytes]]
) -> bytes:
    """The bytes of an index file.

    Args:
        url: where it will lie.
        format: of the shards.
        urls, stats: of each shard.
        indexes: of each shard: how many samples it has, and its index as `dumped` has made it.
    """
    folder, parts = url.rpartition("/")[0] + "/", [part for _, part in indexes]
    table = dumped(
        {
            "format": packed([format]),
            "names": packed([url.removeprefix(folder) for url in urls]),
            "tags": packed(["" if local_path(url) else stat.tag for url, stat in zip(urls, stats, strict=True)]),
            "sizes": np.array([stat.size for stat in stats], np.int64),
            "lengths": np.array([length for length, _ in indexes], np.int64),
            "ends": np.cumsum(list(map(len, parts)), dtype=np.int64),
        }
    )
    size = _HEAD.size + len(table) + sum(map(len, parts))
    return b"".join([_HEAD.pack(_MARK, VERSION, len(table), size), table, *parts])


def _unusable(url: str, why: str) -> ShardError:
    return ShardError(f"{shown(url)} {why}: write it again (sharded-loader index), or delete it")
