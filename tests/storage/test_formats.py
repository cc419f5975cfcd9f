"""The format of a shard is the one that was named, or that of its file name."""

from __future__ import annotations

import pytest

from sharded_loader.storage.formats import format_of


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
