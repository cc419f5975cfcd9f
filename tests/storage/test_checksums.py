"""A cache whose files or folder others damage or delete: the right bytes, or an error that names what to delete."""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
from mutations import damaged
from shards import write_tar

from sharded_loader import ShardDataset
from sharded_loader.storage import cache as cache_module
from sharded_loader.storage.cache import ShardCache
from sharded_loader.storage.files import LocalFile, ShardError, Stat

CONTENT = random.Random(0).randbytes(5000)
URL = "s3://b/1.tar"
STAT = Stat(len(CONTENT), "tag")


class Source:
    """Writes the content, and counts.

    Attributes:
        fetches: how often it was asked.
        meanwhile: called by the first fetch, after half of the bytes.
    """

    def __init__(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        self.fetches, self.meanwhile = 0, meanwhile

    def __call__(self, file: BinaryIO) -> None:
        self.fetches += 1
        file.write(CONTENT[:2000])
        if self.fetches == 1:
            self.meanwhile()
        file.write(CONTENT[2000:])


def read(folder: Path, source: Source, max_bytes: int = 20_000, url: str = URL) -> bytes:
    """The shard, as another process would read it."""
    file = ShardCache(folder, max_bytes).open(url, STAT, source)
    try:
        [found] = file.ranges([0], [file.size])
    finally:
        file.close()
    return found


def shard_in(folder: Path) -> Path:
    [path] = folder.glob("*.shard")
    return path


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [b"", CONTENT[:-1], CONTENT + b"x", bytes(len(CONTENT)), CONTENT[:-1] + bytes([CONTENT[-1] ^ 1])],
    ids=["empty", "short", "long", "zeros", "one bit"],
)
def test_a_damaged_shard_is_fetched_again(tmp_path: Path, damage: bytes) -> None:
    source = Source()
    read(tmp_path, source)
    shard_in(tmp_path).write_bytes(damage)
    assert [read(tmp_path, source) for _ in range(2)] == [CONTENT, CONTENT]
    assert source.fetches == 2


@pytest.mark.skipif(sys.platform == "win32", reason="the time of the last change is not kept there")
def test_a_damaged_shard_whose_time_was_set_back_is_fetched_again(tmp_path: Path) -> None:
    source = Source()
    read(tmp_path, source)
    path = shard_in(tmp_path)
    path.write_bytes(bytes(len(CONTENT)))
    changed = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == changed:  # until the file system's clock ticks
        os.utime(path, (cache_module.SEALED_MTIME, cache_module.SEALED_MTIME))
    assert [read(tmp_path, source) for _ in range(2)] == [CONTENT, CONTENT]
    assert source.fetches == 2


def zeros(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
@pytest.mark.parametrize("damage", [zeros, half, os.unlink])
def test_a_shard_that_is_damaged_while_it_is_open_is_fetched_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    values = {f"{i:04}.txt": str(i).encode() * 100 for i in range(20)}
    write_tar(tmp_path / "a.tar", values)
    store = fsspec.filesystem("memory")
    store.pipe_file("/damaged/a.tar", (tmp_path / "a.tar").read_bytes())
    cache = ShardCache(tmp_path / "cache", "1 MB")
    dataset = ShardDataset("memory://damaged/a.tar", cache=cache)
    assert dataset[0]["txt"] == values["0000.txt"]
    damage(shard_in(tmp_path / "cache"))
    assert [sample["txt"] for sample in dataset] == [*values.values()]
    assert cache.fetched == 1 + (damage is not os.unlink)  # what was deleted can be read while it is open
    store.rm("/damaged", recursive=True)


def test_a_shard_that_is_written_to_again_and_again_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tar(tmp_path / "a.tar", {"0.txt": b"0"})
    store = fsspec.filesystem("memory")
    store.pipe_file("/damaged/a.tar", (tmp_path / "a.tar").read_bytes())
    dataset = ShardDataset("memory://damaged/a.tar", cache=ShardCache(tmp_path / "cache", "1 MB"))
    monkeypatch.setattr(LocalFile, "is_touched", lambda file: True)
    with pytest.raises(ShardError, match=r"a\.tar .*is written to again and again"):
        dataset[0]
    store.rm("/damaged", recursive=True)


@pytest.mark.parametrize("text", [None, "", "nonsense", "00000000 1", "00000000 1 2 3", "zz 1 2", "\0" * 13])
def test_a_shard_without_its_checksum_is_fetched_again(tmp_path: Path, text: str | None) -> None:
    source = Source()
    read(tmp_path, source)
    beside = cache_module.checksum_path(shard_in(tmp_path))
    if text is None:
        beside.unlink()
    else:
        beside.write_text(text)
    assert [read(tmp_path, source) for _ in range(2)] == [CONTENT, CONTENT]
    assert source.fetches == 2


def assert_healed(folder: Path, seeds: Iterable[int]) -> None:
    source = Source()
    read(folder, source)
    for seed in seeds:
        told, mutant = damaged(CONTENT, seed)
        fetches = source.fetches
        shard_in(folder).write_bytes(mutant)
        assert read(folder, source) == CONTENT, (seed, told)
        assert source.fetches - fetches == (mutant != CONTENT), (seed, told)


@pytest.mark.slow
def test_mutants_of_a_shard_are_never_read(tmp_path: Path) -> None:
    assert_healed(tmp_path, range(100))


@pytest.mark.slow
def test_many_mutants_of_a_shard_are_never_read(tmp_path: Path) -> None:
    assert_healed(tmp_path, range(100, 2100))


def test_a_file_system_that_keeps_no_times_compares_the_checksum_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "utime", refused)
    source = Source()
    assert [read(tmp_path, source) for _ in range(2)] == [CONTENT, CONTENT] and source.fetches == 1
    shard_in(tmp_path).write_bytes(bytes(len(CONTENT)))
    assert read(tmp_path, source) == CONTENT and source.fetches == 2


def test_the_disk_has_a_shard_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: calls.append("sync") or sync(fd))
    monkeypatch.setattr(os, "replace", lambda *paths: calls.append("rename") or replace(*paths))
    read(tmp_path, Source())
    assert calls == ["sync", "rename"]


# -- what may not be deleted -------------------------------------------------------------------------------------------


def test_a_file_that_may_not_be_deleted_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = tmp_path / f"{'0' * 40}-9000.shard"
    foreign.write_bytes(bytes(9000))
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self == foreign:
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(cache_module, "DELETE_SECONDS", 0.0)
    with pytest.raises(ShardError, match=rf"1\.tar has no room .*{foreign.name} cannot be deleted.*not p"):
        read(tmp_path, Source(), 11_000)
    assert read(tmp_path, Source(), 15_000) == CONTENT  # there is room beside it


def test_another_shard_goes_in_place_of_one_that_may_not_be_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read(tmp_path, Source())
    first = shard_in(tmp_path)
    read(tmp_path, Source(), url="s3://b/2.tar")
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self == first:
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert read(tmp_path, Source(), 11_000, "s3://b/3.tar") == CONTENT
    source = Source()
    assert read(tmp_path, source, 11_000) == CONTENT and source.fetches == 0  # it is still there, and sound


@pytest.mark.parametrize("suffix", [".shard", ".part", ".sum"])
def test_a_folder_in_a_place_of_the_cache_is_named(tmp_path: Path, suffix: str) -> None:
    cache = ShardCache(tmp_path, "20 kB")
    path = cache._path(URL, STAT).with_suffix(suffix)
    path.mkdir()
    with pytest.raises(ShardError, match=rf"1\.tar: .*{path.name}"):
        read(tmp_path, Source())
    assert path.is_dir()


# -- what others delete ------------------------------------------------------------------------------------------------


def test_a_folder_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = ShardCache(folder, "20 kB")
    shutil.rmtree(folder)
    source = Source()
    assert cache.used_bytes == 0 and not cache.keep(URL, STAT)
    cache.prepare(URL, STAT, source, lambda: True)
    assert cache.keep(URL, STAT) and read(folder, source) == CONTENT and source.fetches == 1


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
@pytest.mark.parametrize("what", ["", "locks"], ids=["all", "locks"])
def test_a_folder_that_is_deleted_while_a_shard_is_fetched(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "cache"
    assert read(folder, Source(lambda: shutil.rmtree(folder / what))) == CONTENT
    assert [path.suffix for path in sorted(folder.glob("*-*"))] == [".shard", ".sum"]


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
def test_a_shard_that_two_fetch_for_want_of_locks_is_whole(tmp_path: Path) -> None:
    other = Source()

    def without_locks() -> None:
        shutil.rmtree(tmp_path / "locks")
        thread = threading.Thread(target=read, args=(tmp_path, other))
        thread.start()
        thread.join()

    source = Source(without_locks)
    assert read(tmp_path, source) == CONTENT and (source.fetches, other.fetches) == (1, 1)


def test_a_folder_that_cannot_be_made_again_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    cache = ShardCache(folder, "20 kB")
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(ShardError, match=r"1\.tar: the cache folder .*cache cannot be used"):
        cache.open(URL, STAT, Source())


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
def test_a_folder_that_is_deleted_again_and_again_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    def fetch(file: BinaryIO) -> None:
        file.write(CONTENT)
        shutil.rmtree(folder)

    with pytest.raises(ShardError, match=r"1\.tar was deleted from .*cache at once.*no other program cleans"):
        ShardCache(folder, "20 kB").open(URL, STAT, fetch)


def test_shards_go_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read(tmp_path, Source())
    full = types.SimpleNamespace(total=9000, free=4000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert read(tmp_path, Source(), url="s3://b/2.tar") == CONTENT
    assert ShardCache(tmp_path, "20 kB").used_bytes == len(CONTENT)
    full.total = 0  # the system does not know
    assert read(tmp_path, Source()) == CONTENT
    assert ShardCache(tmp_path, "20 kB").used_bytes == 2 * len(CONTENT)
