"""The format of a shard is the one that was named, or that of its file name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sharded_loader import ShardError
from sharded_loader.storage.lists import format_of, parse_list


def test_the_format_is_that_of_the_names_or_the_one_that_was_given() -> None:
    assert [format_of(None, [f"a{end}"]).name for end in (".tar", ".parquet", ".pq", ".arrow", ".mds", ".rec")] == [
        "tar",
        "parquet",
        "parquet",
        "arrow",
        "mds",
        "records",
    ]
    assert format_of(None, ["s3://b/a.tar?versionId=3"]).name == "tar"
    assert format_of("mds", ["a.bin"]).name == "mds"
    for urls_of_it in (["a.bin"], ["a.tar", "b.mds"]):
        with pytest.raises(ValueError, match="do not tell one format"):
            format_of(None, urls_of_it)
    with pytest.raises(ValueError, match=r"format 'zip' is unknown: give one of \['tar'"):
        format_of("zip", ["a.zip"])


def test_names_lie_beside_the_list_and_urls_where_they_say() -> None:
    listed = json.dumps(["a.tar", "more/b.tar", "gs://other/c.tar"]).encode()
    trust = {"gs://other": dict[str, Any]()}
    assert list(parse_list("s3://bucket/set/index.json", listed, trust)) == [
        "s3://bucket/set/a.tar",
        "s3://bucket/set/more/b.tar",
        "gs://other/c.tar",
    ]
    assert next(iter(parse_list("set/index.json", listed, trust))) == "set/a.tar"


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        (b"no json", "not a list of shards"),
        (b"{}", "not a list of shards"),
        (b"[1, 2]", "not a list of shards"),
        (b"7", "not a list of shards"),
        (b"[]", "lists no shards"),
        (b'"abc"', "not a list of shards"),
        (b"[" * 100_000, "not a list of shards"),
        (b'{"shards": [7]}', "not a list of shards"),
        (b'{"shardlist": [{"url": "a.tar", "nsamples": Infinity}]}', "not a list of shards"),
        (b'{"shardlist": [{"url": "a.tar", "nsamples": 1%s}]}' % (b"0" * 20), "not a list of shards"),
        (b'{"shards": [{"raw_data": {}}]}', "not a list of shards"),
    ],
)
def test_a_file_that_lists_no_shards_is_named(listed: bytes, text: str) -> None:
    with pytest.raises(ShardError, match=rf"index\.json.*{text}|{text}"):
        parse_list("s3://bucket/index.json", listed)


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
        parse_list("index.json", json.dumps({"shards": [shard]}).encode())
