"""Any part of a shard is read by its place, local or remote. Errors name the shard, and show no secret."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import serving

from sharded_loader import ShardDataset
from sharded_loader.storage.files import LocalFile, ShardError, ShardFile, redacted, shown
from sharded_loader.storage.stores import ObjectStore, RemoteFile

CONTENT = bytes(range(200)) * 50


@pytest.fixture(params=["local", "remote"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShardFile]:
    if request.param == "local":
        (tmp_path / "a.bin").write_bytes(CONTENT)
        made = LocalFile(str(tmp_path / "a.bin"))
        yield made
        made.close()
        return
    with serving() as served:
        served.files["/a.bin"] = CONTENT
        store, url = ObjectStore(), f"{served.url}/a.bin"
        yield RemoteFile(store, url, store.stat(url))
        store.close()


def test_parts_are_those_of_the_file(file: ShardFile) -> None:
    begins = [900, 0, 7, 9990, 40]
    ends = [950, 1, 7, 10_000, 45]
    assert file.size == 10_000
    assert file.ranges(begins, ends) == [CONTENT[begin:end] for begin, end in zip(begins, ends, strict=True)]


def test_a_library_may_read_it_as_a_stream(file: ShardFile) -> None:
    stream = file.stream()
    assert stream.read(3) == CONTENT[:3]
    assert stream.seek(-5, io.SEEK_END) == 9995 and stream.read() == CONTENT[-5:]
    stream.seek(100)
    assert stream.read(10) == CONTENT[100:110] and stream.tell() == 110
    assert stream.seek(20_000) and stream.read(1) == b""
    file.kept["table"] = object()  # what a format keeps goes with the file
    file.close()
    assert not file.kept


def test_a_file_that_was_cut_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "cut.tar"
    path.write_bytes(CONTENT)
    file = LocalFile(str(path))
    path.write_bytes(CONTENT[:50])
    with pytest.raises(ShardError, match=r"cut\.tar ends within bytes 40 to 60, of which 10 are there"):
        file.ranges([0, 40], [10, 60])
    file.close()
    file.close()
    with pytest.raises(ShardError, match=r"nothing\.tar: the shard is missing .*put it back") as caught:
        LocalFile(str(tmp_path / "nothing.tar"))
    assert isinstance(caught.value, FileNotFoundError) and isinstance(caught.value.__cause__, FileNotFoundError)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    (tmp_path / "a.parquet").write_bytes(b"x")
    with pytest.raises(ShardError, match="pip install pyarrow"):
        ShardDataset(tmp_path / "a.parquet", index_folder=tmp_path)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("/data/a b?.tar", "/data/a b?.tar"),
        ("s3://bucket/a.tar", "s3://bucket/a.tar"),
        ("https://me:pass@host:80/a.tar?sig=1&b=2#x", "https://host:80/a.tar"),
        ("ftp://token@host/a@b.tar", "ftp://host/a@b.tar"),
    ],
)
def test_a_url_is_shown_without_what_it_hides(url: str, expected: str) -> None:
    assert shown(url) == expected


def test_values_of_options_are_not_shown() -> None:
    options = {"key": "AKIA1234", "client": {"headers": [("Authorization", "Bearer abcdef")]}, "anon": False, "n": "ab"}
    text = "403 for AKIA1234 with Bearer abcdef at https://u:p@h/x?sig=9, see https://h/y?z (ab)"
    assert redacted(text, options) == "403 for *** with *** at https://h/x see https://h/y (ab)"
