"""Tar shards: the members of one name are one sample, read by their places."""

from __future__ import annotations

import gzip
import io
import lzma
import subprocess
import tarfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import POOLS, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import closed, read_rows, write_tar  # noqa: F401

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage.files import ShardError
from sharded_loader.storage.tar import Tar

MEMBERS = {
    "train/000.jpg": b"first image",
    "train/000.cls": b"3",
    "train/001.JPG": b"second",
    "train/001.seg.png": b"\0" * 700,
    "__meta__/x.json": b"{}",
    "notes": b"no extension",
    "__index__": b"of another library",
    "train/._001.jpg": b"what macOS adds",
    ".hidden.txt": b"no name",
    "é 002.txt": "ü".encode(),
}


read = partial(read_rows, Tar())


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
def test_any_row_is_read(tmp_path_factory: Any, contents: list[list[bytes]], data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("tar") / "a.tar"
    write_tar(path, {f"{i}.x{j}": part for i, parts in enumerate(contents) for j, part in enumerate(parts)})
    rows = data.draw(st.lists(st.integers(0, len(contents) - 1), max_size=9)) if contents else []
    expected = [{"__key__": str(i), **{f"x{j}": part for j, part in enumerate(contents[i])}} for i in rows]
    assert read(path, rows) == expected


def test_members_of_a_sample_that_stand_apart_are_one_sample(tmp_path: Path) -> None:
    names = ["d/2.jpg", "d/1.jpg", "1.jpg", "d/1.cls", "./d/2.cls", "3.cls", "d/2.seg.png"]
    write_tar(tmp_path / "a.tar", {name: name.encode() for name in names})
    assert read(tmp_path / "a.tar", [3, 2, 0, 1]) == [
        {"__key__": "3", "cls": b"3.cls"},
        {"__key__": "1", "jpg": b"1.jpg"},
        {"__key__": "d/2", "jpg": b"d/2.jpg", "cls": b"./d/2.cls", "seg.png": b"d/2.seg.png"},
        {"__key__": "d/1", "jpg": b"d/1.jpg", "cls": b"d/1.cls"},
    ]


@pytest.mark.parametrize("pool", POOLS)
def test_a_plain_tar_of_two_patterns_has_whole_samples_in_every_pool(tmp_path: Path, pool: str) -> None:
    for shard in range(2):
        names = [f"{shard}{i}.{end}" for end in ("jpg", "txt") for i in range(4)]
        write_tar(tmp_path / f"{shard}.tar", {name: name.encode() for name in names})
    dataset = ShardDataset(str(tmp_path / "*.tar"), index_folder=tmp_path)
    with ShardedDataLoader(dataset, 4, pool=make_pool(pool, 2)) as loader:
        samples = [sample for batch in loader for sample in zip(*batch.values(), strict=True)]
    keys = [f"{shard}{i}" for shard in range(2) for i in range(4)]
    assert samples == [(key, f"{key}.jpg".encode(), f"{key}.txt".encode()) for key in keys]


@pytest.mark.parametrize("between", [{}, {"2.jpg": b"c"}, {"2.jpg": b"c", "1.cls": b"d"}])
@pytest.mark.parametrize("again", ["1.jpg", "1.JPG", "./1.jpg"])
def test_an_extension_that_comes_twice_is_named(tmp_path: Path, between: dict[str, bytes], again: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("1.jpg", *between, again):
            tar.addfile(tarfile.TarInfo(name))
    with pytest.raises(ShardError, match=r"a\.tar: the sample '(\./)?1' has two members \.jpg, one at offset \d+"):
        read(tmp_path / "a.tar", [0])


def written(names: Sequence[str]) -> bytes:
    """A tar file of members of four bytes: a header and a block each."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as file:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = 4
            file.addfile(member, io.BytesIO(name[:4].encode()))
    return content.getvalue()


TEN = written([f"{i:04}.txt" for i in range(10)])
PLAIN, WHOLE = (
    r"is not a plain tar file \(offset 0: {}",
    r"is not a complete tar file \(offset {}: .*Copy or write it again",
)
NO_TAR: dict[str, tuple[bytes, str]] = {
    "bit": (TEN[:4106] + bytes([TEN[4106] ^ 1]) + TEN[4107:], WHOLE.format(4096)),
    "between": (TEN[:4096], WHOLE.format(4096)),
    "header": (TEN[: 6 * 1024 + 100], WHOLE.format(6144)),
    "data": (TEN[: 6 * 1024 + 514], WHOLE.format(6144)),
    "hole": (TEN[:4096] + bytes(1024) + TEN[5120:], WHOLE.format(4096)),
    "end mark": (TEN[:10240] + bytes(512), WHOLE.format(10240)),
    "zeros": (TEN[:4096] + bytes(20480 - 4096), WHOLE.format(4096)),
    "two": (TEN + TEN, WHOLE.format(10240)),
    "rest": (TEN[:10240] + bytes(1024) + b"x", WHOLE.format(10240)),
    "a copied member": (TEN[:1024] + TEN, "the sample '0000' has two members"),
    "some copied members": (TEN[: 7 * 1024] + TEN[4 * 1024 :], "the sample '0004' has two members"),
    "empty": (b"", PLAIN.format("empty file.*: give format= .*copy or write it again")),
    "gzip": (gzip.compress(TEN), PLAIN.format("it is gzip.*: decompress it")),
    "xz": (lzma.compress(TEN), PLAIN.format("it is xz")),
    "a page": (b"<html>" * 200, PLAIN.format("invalid header.*: give format= if it has another format")),
}


@pytest.mark.parametrize("kind", NO_TAR)
def test_what_is_no_whole_tar_file_is_an_error_that_says_why_and_where(tmp_path: Path, kind: str) -> None:
    content, said = NO_TAR[kind]
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises(ShardError, match=rf"a\.tar(:)? {said}"):
        read(tmp_path / "a.tar", [0])


@pytest.mark.parametrize("blocks", [1, 20, 64, 2048])
def test_zeros_up_to_the_end_of_a_record_are_no_damage(tmp_path: Path, blocks: int) -> None:
    record = 512 * blocks
    (tmp_path / "a.tar").write_bytes(TEN[:10240] + bytes(-(-(10240 + 1024) // record) * record - 10240))
    assert read(tmp_path / "a.tar", [9]) == [{"__key__": "0009", "txt": b"0009"}]


NOT_READ: dict[str, tuple[dict[str, Any], str | None]] = {
    "a folder": ({"type": tarfile.DIRTYPE}, None),
    "a pipe": ({"type": tarfile.FIFOTYPE}, None),
    "a volume": ({"type": b"V"}, None),
    "a part": ({"type": b"M"}, "is a part of a file of several volumes"),
    **{
        f"{kind.decode()} {target}": ({"type": kind, "linkname": target}, "is a link to .*tar -h")
        for kind in (tarfile.LNKTYPE, tarfile.SYMTYPE)
        for target in ("0000.txt", "/etc/passwd")
    },
}


@pytest.mark.parametrize("kind", NOT_READ)
def test_a_member_that_is_no_file_is_left_out_or_named(tmp_path: Path, kind: str) -> None:
    """Left out are those that hold nothing."""
    facts, said = NOT_READ[kind]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as file:
        file.addfile(tarfile.TarInfo("0000.txt"))
        member = tarfile.TarInfo("0001.txt")
        for name, value in facts.items():
            setattr(member, name, value)
        file.addfile(member)
    if said is None:
        assert read(tmp_path / "a.tar", [0]) == [{"__key__": "0000", "txt": b""}]
        return
    with pytest.raises(ShardError, match=rf"a\.tar, offset 512: '0001\.txt' {said}"):
        read(tmp_path / "a.tar", [0])


SPARSE = {
    "0.0": {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "1", "GNU.sparse.offset": "0", "GNU.sparse.numbytes": "3"},
    "0.1": {"GNU.sparse.size": "9", "GNU.sparse.numblocks": "1", "GNU.sparse.map": "0,3"},
    "1.0": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "x.txt", "GNU.sparse.realsize": "900"},
    "another": {"GNU.sparse.major": "2", "GNU.sparse.minor": "0"},
}


@pytest.mark.parametrize("version", SPARSE)
def test_a_sparse_member_is_an_error(tmp_path: Path, version: str) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(tarfile.TarInfo("a.txt"))
        member = tarfile.TarInfo("b.txt")
        member.pax_headers, content = SPARSE[version], b"1\n0\n3\n".ljust(512, b"\0") + b"abc"
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    with pytest.raises(ShardError, match=r"a\.tar, offset 512: '.*' is a sparse file, .* without -M and -S"):
        read(tmp_path / "a.tar", [0])


@pytest.mark.parametrize("kind", ["gnu", "posix", "oldgnu"])
def test_a_sparse_member_of_the_program_tar_is_an_error(tmp_path: Path, kind: str) -> None:
    with open(tmp_path / "0.bin", "wb") as file:
        file.seek(1 << 20)
        file.write(b"end")
    made = subprocess.run(["tar", f"--format={kind}", "-S", "-cf", "a.tar", "0.bin"], cwd=tmp_path, capture_output=True)
    if made.returncode or (tmp_path / "a.tar").stat().st_size > 1 << 20:
        pytest.skip("this tar, or this file system, knows no sparse files")
    with pytest.raises(ShardError, match=r"a\.tar, offset 0: '0\.bin' is a sparse file"):
        read(tmp_path / "a.tar", [0])


@pytest.mark.parametrize("kind", [b"7", b"Z"])
def test_a_member_of_an_unknown_kind_is_a_file(tmp_path: Path, kind: bytes) -> None:
    member = tarfile.TarInfo("a.txt")
    member.type, member.size = kind, 3
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as file:
        file.addfile(member, io.BytesIO(b"abc"))
    assert read(tmp_path / "a.tar", [0]) == [{"__key__": "a", "txt": b"abc"}]
