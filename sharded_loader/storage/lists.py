"""Discovery of shards: their names, format, versions, and lengths as far as they are listed.

    pattern      one list request                           names, sizes, tags
    URL, path    a request each, or a list of the folder    size, tag
    .json list   one request                                names, and perhaps lengths
    .index file  one request                                everything

An index file beside the shards is used even if it is not named. It describes only shards of the same size and tag, as
far as tags can be compared. Known JSON lists are MosaicML's ``index.json``, those of WebDataset's ``wids``, and plain
arrays of names. Relative names are resolved against the list; names elsewhere must be trusted (`joined`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, product
from typing import Any, NamedTuple

from sharded_loader.extend.tools import path_of, warn
from sharded_loader.storage.files import ShardError, Stat, Trust, joined, local_path, local_stat, normal, shown
from sharded_loader.storage.indexes import SUFFIX, Format, ShardEntry, index_url, read_entries
from sharded_loader.storage.records import MDS, Lines, RecordIO
from sharded_loader.storage.stores import ObjectStore, existing_prefix, is_pattern
from sharded_loader.storage.tables import Arrow, Parquet
from sharded_loader.storage.tar import Tar

Place = str | os.PathLike[str]
"""URL or path."""

LIST_SUFFIX = ".json"

UNCOUNTED = -1
"""Length of a shard whose samples have not been counted."""


class FoundShards(NamedTuple):
    """Shards in order, with their common format.

    Attributes:
        stats: version of each shard, by its URL.
        lengths: number of samples of each, or `UNCOUNTED`.
        entries: descriptions from an index file, by URL; perhaps not of all.
    """

    format: Format
    stats: dict[str, Stat]
    lengths: list[int]
    entries: dict[str, ShardEntry]


def find_shards(store: ObjectStore, patterns: Iterable[Place], format: str | Format | None) -> FoundShards:
    """Find the shards that patterns, names and lists refer to.

    Raises:
        ShardError: A shard is missing or forbidden, or a list or named index file cannot be used.
        ValueError: There are no shards, or their format is unknown.
    """
    stats: dict[str, Stat | None] = {}
    counts: dict[str, int] = {}
    entries: dict[str, ShardEntry] = {}
    names = list(chain.from_iterable(expand_names(absolute(os.fsdecode(pattern))) for pattern in patterns))
    store.limit_options(names)
    for name in names:
        named: Mapping[str, Stat | None] = store.find(name) if is_pattern(name) else {name: None}
        store.limit_options(named)
        for url, stat in named.items():
            if shown(url).endswith(SUFFIX):
                entries.update(read_entries(store, url))
                stats.update(dict.fromkeys(entries))
            elif shown(url).endswith(LIST_SUFFIX):
                stat = stat or store.stat(url)
                listed = parse_list(url, store.ranges(url, [0], [stat.size], stat)[0], store.trust)
                counts.update({absolute(name): count for name, count in listed.items()})
                stats.update(dict.fromkeys(counts))
            else:
                stats[url] = stat
    if not stats:
        raise ValueError("ShardDataset was given no shards: give a pattern, or a list of URLs")
    kind = format_of(format, list(stats))
    entries = entries or _entries_beside(store, list(stats))
    tagged = {url for url, entry in entries.items() if entry.stat.tag and not local_path(url)}
    unknown = [url for url, stat in stats.items() if stat is None and url not in tagged]
    stats.update(zip(unknown, store.stats(unknown), strict=True))
    stats.update({url: local_stat(path) for url in stats if (path := local_path(url)) is not None})
    found = {url: stat or entries[url].stat for url, stat in stats.items()}
    # If tags cannot be compared, contents are, at the first read.
    fitting = {url: entry for url, entry in entries.items() if url in found and entry.describes(kind.name, found[url])}
    others = [url for url in found if url not in fitting]
    if entries and others:
        why = "it has changed since then, or has another format" if others[0] in entries else "it is not listed"
        file, some = shown(next(iter(entries.values())).file), f"{len(others):,} of the shards, such as"
        text = f"the index file {file} does not describe {some} {shown(others[0])} ({why})"
        warn(f"{text}: these are indexed one by one. Write it again: sharded-loader index")
    lengths = [fitting[url].length if url in fitting else counts.get(url, UNCOUNTED) for url in found]
    return FoundShards(kind, found, lengths, fitting)


def _entries_beside(store: ObjectStore, urls: Sequence[str]) -> dict[str, ShardEntry]:
    """Read the index file beside shards, if there is a usable one."""
    place = index_url(urls)
    try:
        return {} if place is None else read_entries(store, place)
    except (FileNotFoundError, PermissionError):  # S3 answers 403 for missing files where lists are forbidden
        pass
    except ShardError as error:
        warn(f"{error}. Until then, shards are indexed one by one")
    return {}


def expand_names(url: str) -> list[str]:
    """Expand number ranges such as ``{000..012}``, except braces in names of existing local files."""
    begin = existing_prefix(url, "{") if local_path(url) is not None else ""
    return [begin + end for end in expanded(url[len(begin) :])]


MOST_NAMES = 1_000_000
"""Maximum number of names from braces: more are a mistake, and would fill the memory."""


def expanded(text: str) -> list[str]:
    """Expand the number ranges in braces (ValueError above `MOST_NAMES`); the first number sets the width.

    Example:
        >>> expanded("{08..10}.tar"), expanded("{0..1}{0..1}"), expanded("{a}")
        (['08.tar', '09.tar', '10.tar'], ['00', '01', '10', '11'], ['{a}'])
    """
    parts = re.split(r"\{(\d+\.\.\d+)\}", text)
    ranges = [part.split("..") for part in parts[1::2]]
    if math.prod(max(0, int(last) - int(first) + 1) for first, last in ranges) > MOST_NAMES:
        raise ValueError(f"the braces of {shown(text)} mean more than {MOST_NAMES:,} names: check their numbers")
    choices = [[f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)] for first, last in ranges]
    texts = [[part] for part in parts[::2]]
    return list(map("".join, product(*chain.from_iterable(zip(texts, [*choices, [""]], strict=True)))))


def absolute(url: str) -> str:
    """Make a local path absolute; return other URLs unchanged."""
    if local_path(url) is None:
        return url
    from fsspec.implementations.local import LocalFileSystem

    return path_of(LocalFileSystem, url)


def parse_trust(trust: Any) -> Trust:
    """Normalize ``trust`` to places with storage options. Raise TypeError if it contains anything else."""
    if isinstance(trust, bool):
        return trust
    trust = [trust] if isinstance(trust, (str, os.PathLike)) else trust
    try:
        places = trust if isinstance(trust, Mapping) else {place: {} for place in trust}
        named = {absolute(os.fspath(place)): dict(options) for place, options in places.items()}
        return {place if local_path(place) is None else normal(place): named[place] for place in named}
    except (TypeError, ValueError):
        raise TypeError("trust must be a URL or path, a list of them, or a dict from them to storage options") from None


FORMATS: tuple[type[Format], ...] = (Tar, Parquet, Arrow, MDS, RecordIO, Lines)


def format_of(format: str | Format | None, urls: Sequence[str]) -> Format:
    """Return the format by its name, or by the suffixes of the shards; raise ValueError if that is impossible."""
    kinds = {kind.name: kind for kind in FORMATS}
    if isinstance(format, str):
        if format not in kinds:
            advice = f"give one of {list(kinds)}, or an object with index() and read()"
            raise ValueError(f"format {format!r} is unknown: {advice}")
        return kinds[format]()
    if format is not None:
        return format
    found = {next((kind for kind in FORMATS if shown(url).endswith(kind.suffixes)), None) for url in urls}
    kind = found.pop() if len(found) == 1 else None
    if kind is None:
        advice = f"give format=, one of {list(kinds)}. Compressed files, such as .tar.gz, must be decompressed first"
        raise ValueError(f"the names of the shards, such as {shown(urls[0])}, do not tell one format: {advice}")
    return kind()


def parse_list(url: str, content: bytes, trust: Trust = False) -> dict[str, int]:
    """Parse a list of shards: URLs and lengths, `UNCOUNTED` if missing. Raise `ShardError` if it cannot be used.

    Example:
        >>> parse_list("s3://bucket/set/index.json", b'["a.tar", "s3://bucket/b.tar"]')
        {'s3://bucket/set/a.tar': -1, 's3://bucket/b.tar': -1}
    """
    try:
        shards = _shards(json.loads(content))
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        advice = "give a JSON list of names, the index.json of MosaicML, or a list of WebDataset's wids"
        raise ShardError(f"{shown(url)} is not a list of shards ({type(error).__name__}: {error}): {advice}") from None
    if not shards:
        raise ShardError(f"{shown(url)} lists no shards")
    return dict(zip(joined(url, [name for name, _ in shards], trust), [count for _, count in shards], strict=True))


def _shards(listed: Any) -> list[tuple[str, int]]:
    if isinstance(listed, list):
        shards = [(name, UNCOUNTED) for name in listed]
    elif "shardlist" in listed:  # of WebDataset's wids
        shards = [(shard["url"], int(shard.get("nsamples", UNCOUNTED))) for shard in listed["shardlist"]]
    else:
        if any(shard.get("raw_data") is None or shard.get("zip_data") for shard in listed["shards"]):
            raise ValueError("its shards are compressed, or of several files each: decompress them first")
        shards = [(shard["raw_data"]["basename"], int(shard.get("samples", UNCOUNTED))) for shard in listed["shards"]]
    if not all(isinstance(name, str) and UNCOUNTED <= count < 1 << 48 for name, count in shards):
        raise ValueError("a name is not a string, or a number of samples is impossible")
    return shards
