"""Which shards there are, of which format, and what is known of each before it is read.

    find_shards(store, ["s3://bucket/train-*.tar"], None) -> FoundShards(format, urls, stats, lengths, entries)

    pattern      one list of the store                          names, sizes, tags
    URL, path    a question for each, or a list of the folder   size, tag
    .json list   a request                                      names; numbers of samples, if they are in the list
    .index file  a request                                      all of it

If no index file is given, the one beside the shards is used. It describes a shard only if both have the same size and
tag, as far as tags can be compared. The sizes and tags of other shards are asked for.

Known lists of shards are MosaicML's ``index.json``, the lists of WebDataset's ``wids``, and a plain JSON list of names.
Names that are no URLs lie beside the list. A list may name other places only if the user trusts these (`joined`).

What can go wrong: a shard that is missing or must not be read (`ShardError`, also a FileNotFoundError or
PermissionError). A file that is no list of shards, or a list of compressed ones (`ShardError`). A format that is
unknown, or file names that do not tell one format (ValueError). An index file that cannot be used: a `ShardError` if
it was given, a warning if it only lies there.
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
from sharded_loader.storage.indexes import SUFFIX, Format, ShardEntry, entries_in, place_of
from sharded_loader.storage.records import MDS, Lines, RecordIO
from sharded_loader.storage.stores import ObjectStore, existing, is_pattern
from sharded_loader.storage.tables import Arrow, Parquet
from sharded_loader.storage.tar import Tar

Place = str | os.PathLike[str]
"""A URL or a path."""

LIST_SUFFIX = ".json"

UNCOUNTED = -1
"""The length of a shard whose samples were not counted yet."""


class FoundShards(NamedTuple):
    """Shards, in their order.

    Attributes:
        format: of all of them.
        stats: size and tag of each, by its URL.
        lengths: how many samples each has, as far as it is known without reading it; `UNCOUNTED`.
        entries: what an index file says of some of them, by their URLs.
    """

    format: Format
    stats: dict[str, Stat]
    lengths: list[int]
    entries: dict[str, ShardEntry]


def find_shards(store: ObjectStore, patterns: Iterable[Place], format: str | Format | None) -> FoundShards:
    """The shards that patterns, names and lists mean.

    Raises:
        ShardError: see above.
        ValueError: there are none, or their format is not known.
    """
    stats: dict[str, Stat | None] = {}
    counts: dict[str, int] = {}
    entries: dict[str, ShardEntry] = {}
    names = list(chain.from_iterable(named_by(absolute(os.fsdecode(pattern))) for pattern in patterns))
    store.give(names)
    for name in names:
        named: Mapping[str, Stat | None] = store.find(name) if is_pattern(name) else {name: None}
        store.give(named)
        for url, stat in named.items():
            if shown(url).endswith(SUFFIX):
                entries.update(entries_in(store, url))
                stats.update(dict.fromkeys(entries))
            elif shown(url).endswith(LIST_SUFFIX):
                stat = stat or store.stat(url)
                listed = urls_in(url, store.ranges(url, [0], [stat.size], stat)[0], store.trust)
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
    # If tags tell nothing, the content of a shard is compared later.
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
    """What the index file beside shards says, if there is one that can be used."""
    place = place_of(urls)
    if place is None:
        return {}
    try:
        return entries_in(store, place)
    except (FileNotFoundError, PermissionError):  # S3 forbids what is missing, where lists are forbidden
        return {}
    except ShardError as error:
        warn(f"{error}. Until then, shards are indexed one by one")
        return {}


def named_by(url: str) -> list[str]:
    """The names and patterns that a name with numbers in braces means, such as ``{000..012}``.

    On this machine, braces that are part of an existing name are that name.
    """
    begin = existing(url, "{") if local_path(url) is not None else ""
    return [begin + end for end in expanded(url[len(begin) :])]


MOST_NAMES = 1_000_000
"""That braces may mean: more are a mistake, and would fill the memory."""


def expanded(text: str) -> list[str]:
    """A text with each number that its braces name; the first number has as many digits as all.

    Raises:
        ValueError: they are more than `MOST_NAMES`.

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
    """A path as it is from any folder; another URL as it is."""
    if local_path(url) is None:
        return url
    from fsspec.implementations.local import LocalFileSystem

    return path_of(LocalFileSystem, url)


def places_of(trust: Any) -> Trust:
    """What the user trusts, as places with their options.

    Raises:
        TypeError: it is no place.
    """
    if isinstance(trust, bool):
        return trust
    trust = [trust] if isinstance(trust, (str, os.PathLike)) else trust
    try:
        places = trust if isinstance(trust, Mapping) else {place: {} for place in trust}
        named = {absolute(os.fspath(place)): dict(options) for place, options in places.items()}
        return {place if local_path(place) is None else normal(place): named[place] for place in named}
    except (TypeError, ValueError):
        raise TypeError("trust is no URL or path, no list of them, and no dict of storage options by them") from None


FORMATS: tuple[type[Format], ...] = (Tar, Parquet, Arrow, MDS, RecordIO, Lines)


def format_of(format: str | Format | None, urls: Sequence[str]) -> Format:
    """The format that was named, or the one of the file names.

    Raises:
        ValueError: it is unknown, or the shards are of several formats.
    """
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


def urls_in(url: str, content: bytes, trust: Trust = False) -> dict[str, int]:
    """The shards that a file lists, and how many samples each has; `UNCOUNTED` if the list does not say it.

    Raises:
        ShardError: it lists none that can be read, or one elsewhere that is not trusted (`joined`).

    Example:
        >>> urls_in("s3://bucket/set/index.json", b'["a.tar", "s3://bucket/b.tar"]')
        {'s3://bucket/set/a.tar': -1, 's3://bucket/b.tar': -1}
    """
    try:
        shards = _shards(json.loads(content))
    except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        advice = "give a JSON list of names, the index.json of MosaicML, or a list of WebDataset's wids"
        raise ShardError(f"{shown(url)} is no list of shards ({type(error).__name__}: {error}): {advice}") from None
    if not shards:
        raise ShardError(f"{shown(url)} lists no shards")
    return dict(zip(joined(url, [name for name, _ in shards], trust), [count for _, count in shards], strict=True))


def _shards(listed: Any) -> list[tuple[str, int]]:
    """The names of shards in a list, as it was parsed, and their numbers of samples."""
    if isinstance(listed, list):
        shards = [(name, UNCOUNTED) for name in listed]
    elif "shardlist" in listed:  # of WebDataset's wids
        shards = [(shard["url"], int(shard.get("nsamples", UNCOUNTED))) for shard in listed["shardlist"]]
    else:
        if any(shard.get("raw_data") is None or shard.get("zip_data") for shard in listed["shards"]):
            raise ValueError("its shards are compressed, or of several files each: decompress them first")
        shards = [(shard["raw_data"]["basename"], int(shard.get("samples", UNCOUNTED))) for shard in listed["shards"]]
    if not all(isinstance(name, str) for name, _ in shards):
        raise TypeError("a name is no string")
    if not all(UNCOUNTED <= count < 1 << 48 for _, count in shards):
        raise ValueError("a number of samples is impossible")
    return shards
