"""Tar shards: the members of one name are one sample, read by their places."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import write_tar

from sharded_loader.storage.files import LocalFile
from sharded_loader.storage.stores import ShardError
from sharded_loader.storage.tar import Tar

MEMBERS = {
    "train/000.jpg": b"first image",
    "train/000.cls": b"3",
    "train/001.JPG": b"second",
    "train/001.seg.png": b"\0" * 700,
    "__meta__/x.json": b"{}",
    "notes": b"no extension",
    "__index__": b"of another library",
    "é 002.txt": "ü".encode(),
}


def read(path: Path, rows: list[int]) -> list[dict[str, object]]:
    file = LocalFile(str(path))
    try:
        index = Tar().index(file)
        return Tar().read(file, index, rows)
    finally:
        file.close()


def test_members_of_one_name_are_one_sample(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    assert read(tmp_path / "a.tar", [2, 0, 1, 0]) == [
        {"__key__": "__meta__/x", "json": b"{}"},
        {"__key__": "train/000", "jpg": b"first image", "cls": b"3"},
        {"__key__": "train/001", "jpg": b"second", "seg.png": b"\0" * 700},
        {"__key__": "train/000", "jpg": b"first image", "cls": b"3"},
    ]
    assert read(tmp_path / "a.tar", [3]) == [{"__key__": "é 002", "txt": "ü".encode()}]
    assert read(tmp_path / "a.tar", []) == []


@settings(max_examples=20, deadline=None)
@given(contents=st.lists(st.lists(st.binary(max_size=1200), min_size=1, max_size=3), max_size=6), data=st.data())
def test_any_row_is_read(
    tmp_path_factory: pytest.TempPathFactory, contents: list[list[bytes]], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_tar(path, {f"{i}.x{j}": part for i, parts in enumerate(contents) for j, part in enumerate(parts)})
    rows = data.draw(st.lists(st.integers(0, len(contents) - 1), max_size=9)) if contents else []
    expected = [{"__key__": str(i), **{f"x{j}": part for j, part in enumerate(contents[i])}} for i in rows]
    assert read(path, rows) == expected


def test_what_is_no_plain_tar_file_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", MEMBERS)
    (tmp_path / "b.tar").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    (tmp_path / "c.tar").write_bytes(b"nonsense" * 200)
    (tmp_path / "d.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:700])
    for name in "bcd":
        with pytest.raises(ShardError, match=rf"{name}\.tar is no (plain|whole) tar file"):
            read(tmp_path / f"{name}.tar", [0])


def test_an_extension_that_comes_twice_is_named(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"1.jpg": b"a", "1.JPG": b"b"})
    with pytest.raises(ShardError, match=r"a\.tar: the sample '1' has two members \.jpg"):
        read(tmp_path / "a.tar", [0])
