"""Tar shards: the members of one name are one sample, read by their places."""

from __future__ import annotations

import gzip
import io
import lzma
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import POOLS, make_pool
from hypothesis import given, settings
from hypothesis import strategies as st
from shards import closed, write_tar  # noqa: F401

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage.files import LocalFile, ShardError
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
        with pytest.raises(ShardError, match=rf"{name}\.tar is not a (plain|complete) tar file"):
            read(tmp_path / f"{name}.tar", [0])


def test_an_empty_or_compressed_file_is_called_that(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    for content, text in (
        (b"", "it is empty.*: copy or write it again"),
        (gzip.compress(bytes(ten())), "it is compressed with gzip.*: decompress it with gzip -d"),
        (lzma.compress(bytes(ten())), "it is compressed with xz"),
        (b"<html>" * 200, "invalid header.*: give format= if it has another format"),
    ):
        path.write_bytes(content)
        with pytest.raises(ShardError, match=rf"a\.tar is not a plain tar file \(offset 0: {text}"):
            Tar().index(LocalFile(str(path)))


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


def ten() -> bytearray:
    """A tar file of ten members, of a header and a block each."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for i in range(10):
            member = tarfile.TarInfo(f"{i:04}.txt")
            member.size = 4
            tar.addfile(member, io.BytesIO(b"%04d" % i))
    return bytearray(content.getvalue())


def flipped() -> bytes:
    content = ten()
    content[4096 + 10] ^= 1
    return bytes(content)


@pytest.mark.parametrize(
    ("damage", "offset"),
    [
        (flipped, 4096),
        (lambda: ten()[:4096], 4096),
        (lambda: ten()[: 6 * 1024 + 100], 6144),
        (lambda: ten()[: 6 * 1024 + 514], 6144),
        (lambda: ten()[:4096] + bytes(1024) + ten()[5120:], 4096),
        (lambda: ten()[:10240] + bytes(512), 10240),
        (lambda: ten()[:4096] + bytes(20480 - 4096), 4096),
        (lambda: ten() + ten(), 10240),
        (lambda: ten()[:10240] + bytes(1024) + b"x", 10240),
    ],
    ids=["bit", "between", "header", "data", "hole", "end mark", "zeros", "two", "rest"],
)
def test_a_damaged_header_is_an_error_that_names_the_offset(
    tmp_path: Path, damage: Callable[[], bytes], offset: int
) -> None:
    (tmp_path / "a.tar").write_bytes(damage())
    with pytest.raises(
        ShardError, match=rf"a\.tar is not a complete tar file \(offset {offset}: .*Copy or write it again"
    ):
        read(tmp_path / "a.tar", [0])


@pytest.mark.parametrize("blocks", [1, 20, 64, 2048])
def test_zeros_up_to_the_end_of_a_record_are_no_damage(tmp_path: Path, blocks: int) -> None:
    record = 512 * blocks
    (tmp_path / "a.tar").write_bytes(ten()[:10240] + bytes(-(-(10240 + 1024) // record) * record - 10240))
    assert read(tmp_path / "a.tar", [9]) == [{"__key__": "0009", "txt": b"0009"}]


def with_links(path: Path, links: dict[str, tuple[bytes, str]]) -> None:
    with tarfile.open(path, "w") as tar:
        for name in ("d/000.txt", "d/notes"):
            member = tarfile.TarInfo(name)
            member.size = 3
            tar.addfile(member, io.BytesIO(b"abc"))
        for name, (kind, target) in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = kind, target
            tar.addfile(link)


def test_directories_and_devices_are_skipped(tmp_path: Path) -> None:
    with_links(tmp_path / "a.tar", {"e.d": (tarfile.DIRTYPE, ""), "g.fifo": (tarfile.FIFOTYPE, ""), "h": (b"V", "")})
    assert read(tmp_path / "a.tar", [0]) == [{"__key__": "d/000", "txt": b"abc"}]


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE])
@pytest.mark.parametrize("target", ["d/000.txt", "/etc/passwd"])
def test_a_link_is_named(tmp_path: Path, kind: bytes, target: str) -> None:
    with_links(tmp_path / "a.tar", {"d/001.txt": (kind, target)})
    with pytest.raises(ShardError, match=r"a\.tar, offset 2048: 'd/001\.txt' is a link to .*tar -h"):
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


@pytest.mark.parametrize(("kind", "is_read"), [(b"M", False), (b"7", True), (b"Z", True)])
def test_a_member_of_an_unknown_kind_is_a_file_and_a_part_of_one_an_error(
    tmp_path: Path, kind: bytes, is_read: bool
) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        member = tarfile.TarInfo("a.txt")
        member.type, member.size = kind, 3
        tar.addfile(member, io.BytesIO(b"abc"))
    if is_read:
        assert read(tmp_path / "a.tar", [0]) == [{"__key__": "a", "txt": b"abc"}]
    else:
        with pytest.raises(ShardError, match=r"offset 0: 'a\.txt' is a part of a file of several volumes"):
            read(tmp_path / "a.tar", [0])


@pytest.mark.parametrize("between", [1, 3])
def test_a_member_that_damage_has_copied_is_an_error_and_no_sample_more(tmp_path: Path, between: int) -> None:
    content = ten()
    for number in (0, 4):
        (tmp_path / "a.tar").write_bytes(content[: (number + between) * 1024] + content[number * 1024 :])
        with pytest.raises(
            ShardError, match=rf"the sample '{number:04}' has two members \.txt|not a complete tar file"
        ):
            read(tmp_path / "a.tar", [0])
