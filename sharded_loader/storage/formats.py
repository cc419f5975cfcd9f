"""The formats of shards, and which of them a file has.

    format_of(name | object | None, urls) -> an object with ``index`` and ``read``

What can go wrong: a name that is unknown, or file names that do not tell one format. Both are a ValueError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sharded_loader.storage.files import ShardFile
from sharded_loader.storage.indexes import Index
from sharded_loader.storage.mds import MDS
from sharded_loader.storage.parquet import Arrow, Parquet
from sharded_loader.storage.records import Records
from sharded_loader.storage.redacted import shown
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
