"""Files that list shards, as other libraries write them beside the shards.

    urls_in(url of the list, its bytes) -> the URLs of the shards, in the order of the list

Known are MosaicML's ``index.json``, the lists of WebDataset's ``wids``, and a plain JSON list of names. Names that are
no URLs lie beside the list. Lengths and sizes in the list are not used: each shard is indexed anyway, so a list that is
older than its shards does no harm.

What can go wrong: a file that is no list of shards, or a list of compressed ones (`ShardError`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from sharded_loader.storage.redacted import shown
from sharded_loader.storage.stores import ShardError

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
        names = [one["url"] for one in listed["shardlist"]] if "shardlist" in listed else _of_mosaic(listed["shards"])
    else:
        names = list(listed)
    if not all(isinstance(name, str) for name in names):
        raise TypeError("a name is no string")
    return names


def _of_mosaic(shards: Any) -> list[str]:
    if any(one.get("raw_data") is None or one.get("zip_data") for one in shards):
        raise ValueError("its shards are compressed, or of several files each: decompress them first")
    return [one["raw_data"]["basename"] for one in shards]


def _beside(url: str, name: str) -> str:
    if "://" in url:
        return f"{url.rpartition('/')[0]}/{name}"
    return os.path.join(os.path.dirname(url), name)
