"""A cache of shards: each is fetched once, by one process; nothing half is read; no other file is touched."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from served import serving
from shards import closed, write_tar  # noqa: F401

from sharded_loader import ProcessPool, ShardDataset, ShardedDataLoader
from sharded_loader.storage import cache as cache_module
from sharded_loader.storage import dataset as dataset_module
from sharded_loader.storage.cache import ShardCache
from sharded_loader.storage.files import ShardError, Stat

SIZE = 1000


def writes(content: bytes, calls: list[int] | None = None) -> Callable[[BinaryIO], None]:
    def fetch(file: BinaryIO) -> None:
        if calls is not None:
            calls.append(1)
        file.write(content)

    return fetch


def put(cache: ShardCache, number: int, calls: list[int] | None = None) -> bytes:
    """Open shard ``number`` and read it."""
    content = bytes([number]) * SIZE
    file = cache.open(f"s3://b/{number}.tar", Stat(SIZE, "tag"), writes(content, calls))
    [found] = file.ranges([0], [SIZE])
    file.close()
    assert found == content
    return found


def test_a_shard_is_fetched_once(tmp_path: Path) -> None:
    calls: list[int] = []
    for cache in (ShardCache(tmp_path, "10 kB"), ShardCache(tmp_path, "10 kB")):
        put(cache, 1, calls)
        put(cache, 1, calls)
    assert len(calls) == 1 and cache.used_bytes == SIZE


def test_another_file_at_the_same_place_is_another_shard(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, "10 kB"), []
    for tag in ("first", "second", "first"):
        cache.open("s3://b/1.tar", Stat(3, tag), writes(b"abc", calls)).close()
    assert len(calls) == 2


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
@pytest.mark.parametrize("idle", [0.0, dataset_module.IDLE_SECONDS])
def test_a_shard_that_was_deleted_while_open_is_closed_when_it_is_not_read_any_more(
    tmp_path: Path, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "IDLE_SECONDS", idle)
    with serving() as served:
        for number in range(3):
            write_tar(tmp_path / "x.tar", {"0.txt": str(number).encode()})
            served.files[f"/{number}.tar"] = (tmp_path / "x.tar").read_bytes()
        cache = ShardCache(tmp_path / "cache", len(served.files["/0.tar"]))
        dataset = ShardDataset([f"{served.url}/{number}.tar" for number in range(3)], cache=cache)
        for _ in range(2):
            for number in range(3):
                assert dataset[number]["txt"] == str(number).encode()
            if idle:  # the cache is too small for the three, and each was fetched once
                assert cache.fetched == 3
            else:
                assert len(dataset._shards._open) <= 2


def test_the_shard_goes_that_was_not_opened_for_the_longest_time(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, 3 * SIZE), []
    for number in (1, 2, 3):
        put(cache, number, calls)
        for age, path in enumerate(sorted(tmp_path.glob("*.sum"), key=lambda one: one.stat().st_mtime_ns)):
            os.utime(path, (1000 + age, 1000 + age))  # times of files have steps
    for number in (1, 4):
        put(cache, number, calls)
    assert cache.used_bytes == 3 * SIZE and cache.evicted == 1
    put(cache, 1, calls)
    assert len(calls) == 4
    put(cache, 2, calls)
    assert len(calls) == 5


def test_a_shard_that_gets_its_name_now_is_not_the_first_to_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, note, calls = ShardCache(tmp_path, 2 * SIZE), cache_module._note, []

    def another_needs_room(path: Path, checksum: int) -> None:
        monkeypatch.setattr(cache_module, "_note", note)
        put(ShardCache(tmp_path, 2 * SIZE), 3)
        note(path, checksum)

    put(cache, 1)
    cache.let_go("s3://b/1.tar", Stat(SIZE, "tag"), 5)
    monkeypatch.setattr(cache_module, "_note", another_needs_room)
    put(cache, 2, calls)
    assert len(calls) == 1  # it was not fetched again
    assert [cache.keep(f"s3://b/{number}.tar", Stat(SIZE, "tag")) for number in (1, 2, 3)] == [False, True, True]


def test_a_part_that_becomes_a_shard_while_another_looks_for_room_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, files = ShardCache(tmp_path, 2 * SIZE), ShardCache._files
    put(cache, 1)
    put(cache, 2)
    cache.let_go("s3://b/2.tar", Stat(SIZE, "tag"))
    whole = cache._path("s3://b/2.tar", Stat(SIZE, "tag"))
    part = whole.with_suffix(".part").name
    before = [(part if name == whole.name else name, size) for name, size in files(cache).items()]
    monkeypatch.setattr(ShardCache, "_files", lambda self: dict(before))
    put(cache, 3)
    monkeypatch.setattr(ShardCache, "_files", files)
    assert [cache.keep(f"s3://b/{number}.tar", Stat(SIZE, "tag")) for number in (1, 2, 3)] == [False, True, True]


def test_a_shard_that_is_open_is_read_to_its_end(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE)
    file = cache.open("s3://b/1.tar", Stat(SIZE, "tag"), writes(b"x" * SIZE))
    if sys.platform != "win32":
        put(cache, 2)
    assert file.ranges([0], [SIZE]) == [b"x" * SIZE]
    file.close()


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    others = ("mine.shard", "a" * 40 + ".shard", "notes.txt")
    for name in others:
        (tmp_path / name).write_bytes(b"x" * 5000)
    cache = ShardCache(tmp_path, SIZE)
    for number in range(4):
        put(cache, number)
    assert cache.used_bytes == SIZE
    assert all(
        (tmp_path / name).read_bytes() == b"x" * 5000 for name in ("mine.shard", "a" * 40 + ".shard", "notes.txt")
    )


@pytest.mark.skipif(sys.platform == "win32", reason="its locks are others")
def test_a_machine_whose_locks_keep_nobody_out_does_not_empty_what_another_one_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fcntl.flock", lambda fd, how: None)
    content, found = b"x" * SIZE, []

    def fetch_too(file: BinaryIO) -> None:
        found.append(os.fstat(file.fileno()).st_size)
        file.write(content)

    def fetch(file: BinaryIO) -> None:
        file.write(content)
        file.flush()
        other = ShardCache(tmp_path, "10 kB")
        with ThreadPoolExecutor() as threads:  # a thread of its own: filelock refuses two locks of a file in one
            threads.submit(other.open, "s3://b/1.tar", Stat(SIZE, "tag"), fetch_too).result().close()

    file = ShardCache(tmp_path, "10 kB").open("s3://b/1.tar", Stat(SIZE, "tag"), fetch)
    assert found == [SIZE] and file.ranges([0], [SIZE]) == [content]
    file.close()


@pytest.mark.parametrize("wrong", [b"short", b"x" * (SIZE + 1)])
def test_a_shard_of_another_size_is_not_kept(tmp_path: Path, wrong: bytes) -> None:
    cache = ShardCache(tmp_path, "10 kB")
    with pytest.raises(ShardError, match=r"1\.tar has [\d,]+ bytes, and had 1,000"):
        cache.open("s3://b/1.tar", Stat(SIZE, "tag"), writes(wrong))
    assert cache.used_bytes == 0
    put(cache, 1)


def test_an_error_while_fetching_leaves_nothing(tmp_path: Path) -> None:
    def fail(file: BinaryIO) -> None:
        file.write(b"half")
        raise PermissionError("s3://b/1.tar: forbidden")

    cache = ShardCache(tmp_path, "10 kB")
    with pytest.raises(PermissionError, match="forbidden"):
        cache.open("s3://b/1.tar", Stat(SIZE, "tag"), fail)
    assert cache.used_bytes == 0


def test_threads_that_want_one_shard_fetch_it_once(tmp_path: Path) -> None:
    cache, calls, together = ShardCache(tmp_path, "10 kB"), [], threading.Barrier(4)

    def take() -> None:
        together.wait()
        put(cache, 1, calls)

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_ranks_fetch_each_shard_once(tmp_path: Path) -> None:
    """Each with an object of its own, in an order of its own."""
    pids = []
    for rank in range(3):
        pid = os.fork()
        if pid == 0:
            cache = ShardCache(tmp_path / "cache", "10 kB")
            for number in range(6):
                put(cache, (number + 2 * rank) % 6)
            os._exit(10 + cache.fetched)
        pids.append(pid)
    fetched = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 10 for pid in pids]
    assert min(fetched) >= 0 and sum(fetched) == 6


def test_more_threads_than_there_is_room_for_wait_for_each_other(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 2 * SIZE)
    threads = [
        threading.Thread(target=lambda number=number: [put(cache, number) for _ in range(3)]) for number in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cache.used_bytes <= 2 * SIZE


KILLED = """
    import sys, time
    from sharded_loader.storage.cache import ShardCache
    from sharded_loader.storage.files import Stat

    def fetch(file):
        file.write(b"half")
        file.flush()
        print("fetching", flush=True)
        time.sleep(60)

    ShardCache(sys.argv[1], "10 kB").open("s3://b/1.tar", Stat(1000, "tag"), fetch)
"""


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.costly
def test_a_killed_fetcher_leaves_its_place_to_another(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "fetching\n"
        cache = ShardCache(tmp_path, SIZE + 1)
        assert cache.used_bytes == SIZE
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    put(cache, number)  # the same shard, or another one: there is room for one
    assert cache.used_bytes == SIZE and not list(tmp_path.glob("*.part"))


def test_a_shard_that_is_larger_than_the_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"1\.tar has 1,000 bytes, and the cache .* 999: give a larger"):
        put(ShardCache(tmp_path, 999), 1)


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShardError, match="cannot be written to"):
        ShardCache(tmp_path / "file" / "cache", "1 GB")


def test_a_folder_that_is_read_only_gives_the_shards_that_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    put(ShardCache(tmp_path / "full", "1 GB"), 1, calls)
    next((tmp_path / "full").glob("*.shard")).chmod(0o600)  # as of a copy: the checksum is compared
    (tmp_path / "empty").mkdir()

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(ShardCache, "_lock", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    cache = ShardCache(tmp_path / "full", "1 GB")
    assert cache.read_only and put(cache, 1, calls) == bytes([1]) * SIZE and len(calls) == 1
    cache.prepare("s3://b/2.tar", Stat(SIZE, "tag"), writes(b"", calls), lambda: True)
    for number in (2, 1):
        with pytest.raises(ShardError, match=rf"{number}\.tar is missing or damaged in .*full, which is read-only"):
            put(cache, number, calls)
        (tmp_path / "full" / cache._path("s3://b/1.tar", Stat(SIZE, "tag")).name).write_bytes(b"0" * SIZE)
    assert len(calls) == 1
    with pytest.raises(ShardError, match="empty cannot be written to"):
        ShardCache(tmp_path / "empty", "1 GB")


def test_arguments_that_are_missing_or_wrong_get_advice(tmp_path: Path) -> None:
    missing: Any = ShardCache
    with pytest.raises(TypeError, match=r'ShardCache needs max_bytes.*ShardCache\(folder, "100 GB"\)'):
        missing(tmp_path)
    with pytest.raises(TypeError, match=r"ShardCache has no argument 'max_byte'; did you mean 'max_bytes'\?"):
        missing(tmp_path, max_byte="1 GB")


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    def fetch(file: BinaryIO) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(ShardError, match=r"1\.tar cannot be written to .*No space left.*free some space"):
        ShardCache(tmp_path, "1 GB").open("s3://b/1.tar", Stat(SIZE, "tag"), fetch)


def test_a_disk_that_fills_up_under_way_has_the_cache_delete_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, free, calls = ShardCache(tmp_path, "1 GB"), [10 * SIZE], []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=10 * SIZE, free=free[0]))
    for number in (1, 2):
        put(cache, number)

    def fetch(file: BinaryIO) -> None:
        calls.append(1)
        if len(calls) == 1:
            free[0] = 0  # another program has written
            raise OSError(errno.ENOSPC, "No space left on device")
        file.write(b"x" * SIZE)

    cache.open("s3://b/3.tar", Stat(SIZE, "tag"), fetch).close()
    assert len(calls) == 2 and cache.evicted == 1 and cache.used_bytes == 2 * SIZE


def test_what_others_are_about_to_write_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = ShardCache(tmp_path, "1 GB"), ShardCache(tmp_path, "1 GB")
    put(cache, 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: types.SimpleNamespace(total=1, free=3 * SIZE // 2))

    def fetch(file: BinaryIO) -> None:
        put(other, 3)  # 1,500 bytes are free, and 1,000 of them are for the shard that is being fetched here
        file.write(b"x" * SIZE)

    cache.open("s3://b/2.tar", Stat(SIZE, "tag"), fetch).close()
    assert other.evicted == 1


def test_a_shard_that_is_needed_goes_last_and_that_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache, calls = ShardCache(tmp_path, 2 * SIZE), []
    for number in (1, 2):
        put(cache, number)
    cache.let_go("s3://b/2.tar", Stat(SIZE, "tag"))
    assert cache.keep("s3://b/1.tar", Stat(SIZE, "tag"))
    put(cache, 1)  # to open it does not make it needed less
    put(cache, 3, calls)
    assert all(cache.keep(f"s3://b/{number}.tar", Stat(SIZE, "tag")) for number in (1, 3)) and not caplog.messages
    cache.prepare("s3://b/4.tar", Stat(SIZE, "tag"), writes(b"x" * SIZE, calls), lambda: True)
    assert len(calls) == 1  # there is no room for what is fetched ahead
    for _ in range(2):
        assert cache.keep("s3://b/3.tar", Stat(SIZE, "tag"))
        put(cache, 5)
        put(cache, 3)
    [said] = caplog.messages
    assert "a reader still needs" in said and f"{tmp_path} may take 2,000" in said and "larger max_bytes" in said


def test_what_is_fetched_ahead_waits_for_what_others_fetch_and_deletes_nothing_needed(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, 2 * SIZE), []
    put(cache, 1)
    assert cache.keep("s3://b/1.tar", Stat(SIZE, "tag"))

    def fetch(file: BinaryIO) -> None:
        cache.prepare("s3://b/3.tar", Stat(SIZE, "tag"), writes(b"x" * SIZE, calls), lambda: True)
        file.write(b"x" * SIZE)

    cache.open("s3://b/2.tar", Stat(SIZE, "tag"), fetch).close()
    assert not calls and cache.keep("s3://b/1.tar", Stat(SIZE, "tag"))


def test_what_a_worker_fetched_before_its_turn_came_is_needed_too(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, SIZE)
    put(cache, 1)
    cache.prepare("s3://b/1.tar", Stat(SIZE, "tag"), writes(b""), lambda: True)
    cache.prepare("s3://b/2.tar", Stat(SIZE, "tag"), writes(b""), lambda: True)
    assert cache.fetched == 1


def test_what_the_user_passes_at_the_moment_when_it_comes_is_not_needed(tmp_path: Path) -> None:
    cache, wanted = ShardCache(tmp_path, SIZE), iter([True, True, False])
    cache.prepare("s3://b/1.tar", Stat(SIZE, "tag"), writes(b"x" * SIZE), lambda: next(wanted))
    cache.prepare("s3://b/2.tar", Stat(SIZE, "tag"), writes(b"x" * SIZE), lambda: True)
    assert (cache.fetched, cache.evicted) == (2, 1)


def test_a_folder_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Any:
        raise NotImplementedError("FileSystem does not appear to support flock")

    monkeypatch.setattr("sharded_loader.storage.cache.lock_at", refused)
    with pytest.raises(ShardError, match=r"cannot be written to \(FileSystem does not appear to support flock\): give"):
        ShardCache(tmp_path, "1 kB")


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
def test_a_folder_that_is_deleted_while_a_shard_is_fetched_is_made_again(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path / "cache", "10 kB"), []

    def fetch(file: BinaryIO) -> None:
        calls.append(1)
        file.write(b"x" * SIZE)
        if len(calls) == 1:
            shutil.rmtree(tmp_path / "cache")

    cache.open("s3://b/1.tar", Stat(SIZE, "tag"), fetch).close()
    assert len(calls) == 2 and cache.used_bytes == SIZE


@pytest.mark.slow
@pytest.mark.parametrize("method", ["inline", "spawn", *(["fork"] if hasattr(os, "fork") else [])])
def test_a_dataset_fetches_each_shard_once_for_all_workers(tmp_path: Path, method: str) -> None:
    with serving() as served:
        for shard in range(4):
            write_tar(tmp_path / "x.tar", {f"{i}.txt": str(i).encode() for i in range(5 * shard, 5 * shard + 5)})
            served.files[f"/{shard}.tar"] = (tmp_path / "x.tar").read_bytes()
        urls = [f"{served.url}{name}" for name in sorted(served.files)]
        cache = ShardCache(tmp_path / "cache", "1 GB")
        dataset = ShardDataset(urls, cache=cache)
        numbers = dataset.transform(lambda sample: int(sample["txt"]))
        how = {} if method == "inline" else {"pool": ProcessPool(2, start_method=method)}
        with ShardedDataLoader(numbers, 3, shuffle=True, seed=1, **how) as loader:
            for _ in range(2):
                assert sorted(i for batch in loader for i in batch.tolist()) == list(range(20))
        assert len([path for path, wanted in served.asked if wanted and path.endswith(".tar")]) == 4
        dataset.close()
