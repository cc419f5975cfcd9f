"""A cache whose files or folder others damage or delete: the right bytes, or an error that names what to delete."""

from __future__ import annotations

import os
import random
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pytest
from mutations import damaged
from shards import place_of, tar

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


def set_back(path: Path) -> None:
    """Zeros, and the time of the last change is as before."""
    path.write_bytes(bytes(len(CONTENT)))
    changed = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == changed:  # until the file system's clock ticks
        os.utime(path, (cache_module.SEALED_MTIME, cache_module.SEALED_MTIME))


def holding(content: bytes | str) -> Callable[[Path], Any]:
    return lambda path: path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)


DAMAGE: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "empty": (".shard", holding(b"")),
    "short": (".shard", holding(CONTENT[:-1])),
    "long": (".shard", holding(CONTENT + b"x")),
    "zeros": (".shard", holding(bytes(len(CONTENT)))),
    "one bit": (".shard", holding(CONTENT[:-1] + bytes([CONTENT[-1] ^ 1]))),
    "the time set back": (".shard", set_back),
    "no checksum": (".sum", Path.unlink),
    **{f"checksum {text!r}": (".sum", holding(text)) for text in ("", "nonsense", "00000000 1", "00000000 1 2 3")},
    **{f"checksum {text!r}": (".sum", holding(text)) for text in ("zz 1 2", "\0" * 13)},
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_fetched_again(tmp_path: Path, damage: str) -> None:
    if sys.platform == "win32" and damage == "the time set back":
        pytest.skip("the time of the last change is not kept there")
    source, (suffix, change) = Source(), DAMAGE[damage]
    read(tmp_path, source)
    [path] = tmp_path.glob(f"*{suffix}")
    change(path)
    assert [read(tmp_path, source) for _ in range(2)] == [CONTENT, CONTENT]
    assert source.fetches == 2


@pytest.mark.slow
def test_mutants_of_a_shard_are_never_read(tmp_path: Path) -> None:
    source = Source()
    read(tmp_path, source)
    for seed in range(2100):
        told, mutant = damaged(CONTENT, seed)
        fetches = source.fetches
        shard_in(tmp_path).write_bytes(mutant)
        assert read(tmp_path, source) == CONTENT, (seed, told)
        assert source.fetches - fetches == (mutant != CONTENT), (seed, told)


@pytest.fixture
def in_memory(tmp_path: Path) -> Iterator[tuple[ShardDataset, ShardCache]]:
    """A shard of twenty samples in fsspec's memory, with a cache; sample 0 was read."""
    store = fsspec.filesystem("memory")
    store.pipe_file("/damaged/a.tar", tar({f"{i}.txt": str(i).encode() * 100 for i in range(20)}))
    cache = ShardCache(tmp_path / "cache", "1 MB")
    dataset = ShardDataset("memory://damaged/a.tar", cache=cache)
    assert dataset[0]["txt"] == b"0" * 100
    yield dataset, cache
    dataset.close()
    store.rm("/damaged", recursive=True)


def zeros(path: Path) -> None:
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))


def half(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
@pytest.mark.parametrize("damage", [zeros, half, os.unlink])
def test_a_shard_that_is_damaged_while_it_is_open_is_fetched_again(
    in_memory: tuple[ShardDataset, ShardCache], damage: Callable[[Path], None]
) -> None:
    dataset, cache = in_memory
    damage(shard_in(cache.folder))
    assert [sample["txt"] for sample in dataset] == [str(i).encode() * 100 for i in range(20)]
    assert cache.fetched == 1 + (damage is not os.unlink)  # what was deleted can be read while it is open


def test_a_shard_that_is_written_to_again_and_again_is_an_error_that_names_it(
    in_memory: tuple[ShardDataset, ShardCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LocalFile, "is_touched", lambda file: True)
    with pytest.raises(ShardError, match=r"a\.tar .*is written to again and again"):
        in_memory[0][0]


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


@pytest.fixture
def undeletable(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files that may not be deleted."""
    found: list[Path] = []
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self in found:
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(cache_module, "DELETE_SECONDS", 0.0)
    return found


def test_a_file_that_may_not_be_deleted_is_named(tmp_path: Path, undeletable: list[Path]) -> None:
    foreign = tmp_path / f"{'0' * 40}-9000.shard"
    foreign.write_bytes(bytes(9000))
    undeletable.append(foreign)
    with pytest.raises(ShardError, match=rf"1\.tar has no room .*{foreign.name} cannot be deleted.*not p"):
        read(tmp_path, Source(), 11_000)
    assert read(tmp_path, Source(), 15_000) == CONTENT  # there is room beside it


def test_another_shard_goes_in_place_of_one_that_may_not_be_deleted(tmp_path: Path, undeletable: list[Path]) -> None:
    read(tmp_path, Source())
    undeletable.append(shard_in(tmp_path))
    read(tmp_path, Source(), url="s3://b/2.tar")
    assert read(tmp_path, Source(), 11_000, "s3://b/3.tar") == CONTENT
    source = Source()
    assert read(tmp_path, source, 11_000) == CONTENT and source.fetches == 0  # it is still there, and sound


@pytest.mark.parametrize("suffix", [".shard", ".part", ".sum"])
def test_a_folder_in_a_place_of_the_cache_is_named(tmp_path: Path, suffix: str) -> None:
    cache = ShardCache(tmp_path, "20 kB")
    path = place_of(cache, URL, STAT).with_suffix(suffix)
    path.mkdir()
    with pytest.raises(ShardError, match=rf"1\.tar: .*{path.name}"):
        read(tmp_path, Source())
    assert path.is_dir()


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
    """Without locks two may fetch it: it is whole all the same."""
    folder, other = tmp_path / "cache", Source()

    def delete() -> None:
        shutil.rmtree(folder / what)
        if what:
            thread = threading.Thread(target=read, args=(folder, other))
            thread.start()
            thread.join()

    source = Source(delete)
    assert read(folder, source) == CONTENT
    assert (source.fetches, other.fetches) == ((1, 1) if what else (2, 0))
    assert [path.suffix for path in sorted(folder.glob("*-*"))] == [".shard", ".sum"]


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
