"""The formats of shards, which of them a file has, and files that list shards.

    format_of(name | object | None, urls) -> an object with ``index`` and ``read``
    urls_in(url of a list, its bytes)     -> the URLs of the shards, in the order of the list

Known lists are MosaicML's ``index.json``, the lists of WebDataset's ``wids``, and a plain JSON list of names. Names
that are no URLs lie beside the list. Lengths and sizes in the list are not used: each shard is indexed anyway, so a
list that is older than its shards does no harm.

What can go wrong: a name of a format that is unknown, or file names that do not tell one format (ValueError); a file
that is no list of shards, or a list of compressed ones (`ShardError`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from sharded_loader.storage.errors import ShardError, shown
from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index
from sharded_loader.storage.mds import MDS
from sharded_loader.storage.parquet import Arrow, Parquet
from sharded_loader.storage.records import Records
from sharded_loader.storage.tar import Tar


class Format(Protocol):
    """How the samples of one shard are found and read; see `Tar` for one.

    Attributes:
        name: of the format; part of the name of each kept index.
        suffixes: of file names, by which the format is found.
    """

    name: str
    suffixes: tuple[str, ...]

    def index(self, file: ShardFile) -> Index:
        """Arrays that say where the samples lie; "length" says how many there are."""

    def read(self, file: ShardFile, index: Index, rows: list[int]) -> list[Any]:
        """The samples at these rows, in this order."""


FORMATS: tuple[type[Format], ...] = (Tar, Parquet, Arrow, MDS, Records)


def format_of(format: str | Format | None, urls: Sequence[str]) -> Format:
    """The format that was named, or the one of the file names.

    Raises:
        ValueError: it is unknown, or the shards are of several formats.
    """
    names = [kind.name for kind in FORMATS]
    if isinstance(format, str):
        named = next((kind for kind in FORMATS if kind.name == format), None)
        if named is None:
            raise ValueError(f"format {format!r} is unknown: give one of {names}, or an object with index() and read()")
        return named()
    if format is not None:
        return format
    kinds = {next((kind for kind in FORMATS if shown(url).endswith(kind.suffixes)), None) for url in urls}
    if len(kinds) > 1 or None in kinds:
        raise ValueError(
            f"the names of the shards, such as {shown(urls[0])}, do not tell one format: give format=, one of {names}. "
            "Compressed files, such as .tar.gz, must be decompressed first"
        )
    [kind] = kinds
    assert kind is not None
    return kind()


# -- lists of shards ---------------------------------------------------------------------------------------------------


SUFFIX = ".json"


def urls_in(url: str, content: bytes) -> list[str]:
    """The shards that a file lists.

    Raises:
        ShardError: it lists none that can be read.

    Example:
        >>> urls_in("s3://bucket/set/index.json", b'["a.tar", "s3://other/b.tar"]')
        ['s3://bucket/set/a.tar', 's3://other/b.tar']
    """
    try:
        names = _names(json.loads(content))
    except (KeyError, TypeError, ValueError) as error:
        raise ShardError(
            f"{shown(url)} is no list of shards ({type(error).__name__}: {error}): give a JSON list of names, the "
            f"index.json of MosaicML, or a list of WebDataset's wids"
        ) from None
    if not names:
        raise ShardError(f"{shown(url)} lists no shards")
    return [name if "://" in name or os.path.isabs(name) else _beside(url, name) for name in names]


def _names(listed: Any) -> list[str]:
    if isinstance(listed, Mapping):
        names = (
            [shard["url"] for shard in listed["shardlist"]] if "shardlist" in listed else _of_mosaic(listed["shards"])
        )
    else:
        names = list(listed)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a name is no string")
    return names


def _of_mosaic(shards: Any) -> list[str]:
    if any(shard.get("raw_data") is None or shard.get("zip_data") for shard in shards):
        raise ValueError("its shards are compressed, or of several files each: decompress them first")
    return [shard["raw_data"]["basename"] for shard in shards]


def _beside(url: str, name: str) -> str:
    if "://" in url:
        return f"{url.rpartition('/')[0]}/{name}"
    return os.path.join(os.path.dirname(url), name)
