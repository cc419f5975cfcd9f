"""Files that list shards."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from sharded_loader import ShardError
from sharded_loader.storage.listing import urls_in


def test_names_lie_beside_the_list_and_urls_where_they_say() -> None:
    listed = json.dumps(["a.tar", "more/b.tar", "gs://other/c.tar"]).encode()
    assert urls_in("s3://bucket/set/index.json", listed) == [
        "s3://bucket/set/a.tar",
        "s3://bucket/set/more/b.tar",
        "gs://other/c.tar",
    ]
    local = os.path.join("set", "index.json")
    assert urls_in(local, listed)[0] == os.path.join("set", "a.tar")


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        (b"no json", "no list of shards"),
        (b"{}", "no list of shards"),
        (b"[1, 2]", "no list of shards"),
        (b"7", "no list of shards"),
        (b"[]", "lists no shards"),
        (b'{"shards": [{"raw_data": {}}]}', "no list of shards"),
    ],
)
def test_a_file_that_lists_no_shards_is_named(listed: bytes, text: str) -> None:
    with pytest.raises(ShardError, match=rf"index\.json.*{text}|{text}"):
        urls_in("s3://bucket/index.json", listed)


@pytest.mark.parametrize(
    "shard",
    [
        {"raw_data": {"basename": "a.mds"}, "zip_data": {"basename": "a.mds.zstd"}},
        {"raw_data": None, "zip_data": {"basename": "a.mds.zstd"}},
        {"raw_meta": {"basename": "a.meta"}},
    ],
)
def test_compressed_shards_have_to_be_decompressed_first(shard: dict[str, Any]) -> None:
    with pytest.raises(ShardError, match="decompress them first"):
        urls_in("index.json", json.dumps({"shards": [shard]}).encode())
