"""A cache of shards: each is fetched once, by one process; nothing half is read; no other file is touched."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO
from unittest.mock import Mock

import fsspec
import pytest
from shards import Served, closed, place_of, serves, tar, tar_of_numbers  # noqa: F401

from sharded_loader import ShardDataset
from sharded_loader.extend.tools import NO_SPACE
from sharded_loader.storage import cache as cache_module
from sharded_loader.storage import dataset as dataset_module
from sharded_loader.storage.cache import ShardCache
from sharded_loader.storage.files import LocalFile, ShardError, Stat
from sharded_loader.storage.read_ahead import reading
from sharded_loader.storage.stores import ObjectStore

SIZE = 1000


def writes(
    content: bytes, calls: list[int] | None = None, meanwhile: Callable[[], Any] = lambda: None
) -> Callable[[BinaryIO], None]:
    """Fetches these bytes, and notes it. In its first call it does something after half of them."""
    noted: list[int] = [] if calls is None else calls

    def fetch(file: BinaryIO) -> None:
        noted.append(1)
        file.write(content[: len(content) // 2])
        file.flush()
        if len(noted) == 1:
            meanwhile()
        file.write(content[len(content) // 2 :])

    return fetch


def named(number: int) -> tuple[str, Stat]:
    """Which shard it is."""
    return f"s3://b/{number}.tar", Stat(SIZE, "tag")


def kept(cache: ShardCache, *numbers: int) -> list[bool]:
    """Whether the cache has these shards; it learns that they are needed."""
    return [cache.keep(*named(number)) for number in numbers]


def together(*works: Callable[[], Any]) -> None:
    """Do this in threads that begin at once."""
    begin = threading.Barrier(len(works))
    with ThreadPoolExecutor(len(works)) as threads:
        for done in [threads.submit(lambda work=work: (begin.wait(), work())) for work in works]:  # type: ignore[misc]
            done.result()


def disk(monkeypatch: pytest.MonkeyPatch, total: int, free: int) -> Any:
    """A disk that has so many bytes; its values may be changed."""
    found = types.SimpleNamespace(total=total, free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: found)
    return found


def put(cache: ShardCache, number: int, calls: list[int] | None = None) -> bytes:
    """Open shard ``number`` and read it."""
    content = bytes([number]) * SIZE
    file = cache.open(*named(number), writes(content, calls))
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
    for tag in ("first", "second", "first"):  # others at the same place
        cache.open("s3://b/1.tar", Stat(3, tag), writes(b"abc", calls)).close()
    assert len(calls) == 3
    together(*[lambda: put(cache, 2, calls)] * 4)
    assert len(calls) == 4


@pytest.mark.skipif(sys.platform == "win32", reason="an open file cannot be deleted there")
@pytest.mark.parametrize("idle", [0.0, dataset_module.IDLE_SECONDS])
def test_a_shard_that_was_deleted_while_open_is_closed_when_it_is_not_read_any_more(
    served: Served, tmp_path: Path, idle: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset_module, "IDLE_SECONDS", idle)
    served.files = {f"/{number}.tar": tar_of_numbers(range(number, number + 1)) for number in range(3)}
    cache = ShardCache(tmp_path / "cache", len(served.files["/0.tar"]))
    dataset = ShardDataset([f"{served.url}/{number}.tar" for number in range(3)], cache=cache)
    for _ in range(2):
        for number in range(3):
            assert dataset[number]["txt"] == b"%d" % number
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
    cache.let_go(*named(1), 5)
    monkeypatch.setattr(cache_module, "_note", another_needs_room)
    put(cache, 2, calls)
    assert len(calls) == 1  # it was not fetched again
    assert kept(cache, 1, 2, 3) == [False, True, True]


def test_a_part_that_becomes_a_shard_while_another_looks_for_room_stays(tmp_path: Path, monkeypatch: Any) -> None:
    cache, files = ShardCache(tmp_path, 2 * SIZE), ShardCache._files
    put(cache, 1)
    put(cache, 2)
    cache.let_go(*named(2))
    whole = place_of(cache, *named(2))
    part = whole.with_suffix(".part").name
    before = [(part if name == whole.name else name, size) for name, size in files(cache).items()]
    monkeypatch.setattr(ShardCache, "_files", lambda self: dict(before))
    put(cache, 3)
    monkeypatch.setattr(ShardCache, "_files", files)
    assert kept(cache, 1, 2, 3) == [False, True, True]


def test_files_of_others_are_never_touched(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("mine.shard", "a" * 40 + ".shard", "notes.txt")]
    for path in others:
        path.write_bytes(b"x" * 5000)
    cache = ShardCache(tmp_path, SIZE)
    for number in range(4):
        put(cache, number)
    assert cache.used_bytes == SIZE
    assert [path.read_bytes() for path in others] == [b"x" * 5000] * 3


@pytest.mark.skipif(sys.platform == "win32", reason="its locks are others")
def test_locks_that_keep_nobody_out_do_not_empty_what_another_machine_writes(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fcntl.flock", lambda fd, how: None)
    content, found = b"x" * SIZE, list[int]()

    def fetch_too(file: BinaryIO) -> None:
        found.append(os.fstat(file.fileno()).st_size)
        file.write(content)

    def fetch(file: BinaryIO) -> None:
        file.write(content)
        file.flush()  # filelock refuses two locks of a file in one thread
        together(lambda: ShardCache(tmp_path, "10 kB").open(*named(1), fetch_too).close())

    file = ShardCache(tmp_path, "10 kB").open(*named(1), fetch)
    assert found == [SIZE] and file.ranges([0], [SIZE]) == [content]
    file.close()


BAD: dict[str, tuple[Callable[[BinaryIO], None], type[OSError], str]] = {
    "short": (writes(b"short"), ShardError, "has 5 bytes, and had 1,000"),
    "long": (writes(b"x" * (SIZE + 1)), ShardError, "has 1,001 bytes, and had 1,000"),
    "forbidden": (Mock(side_effect=PermissionError("1.tar: forbidden")), PermissionError, ": forbidden"),
    "full disk": (
        writes(b"x" * SIZE, meanwhile=Mock(side_effect=OSError(28, "No space left"))),
        ShardError,
        "cannot be written to .*No space left.*free some",
    ),
}


@pytest.mark.parametrize(("fetch", "error", "said"), BAD.values(), ids=BAD)
def test_a_shard_that_comes_in_part_is_not_kept(tmp_path: Path, fetch: Any, error: type[OSError], said: str) -> None:
    cache = ShardCache(tmp_path, "10 kB")
    with pytest.raises(error, match=rf"1\.tar ?{said}"):
        cache.open(*named(1), fetch)
    assert cache.used_bytes == 0
    put(cache, 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_ranks_fetch_each_shard_once(tmp_path: Path) -> None:
    """Each with an object of its own, in an order of its own."""
    pids = []
    for rank in range(3):
        if (pid := os.fork()) == 0:
            cache = ShardCache(tmp_path / "cache", "10 kB")
            for number in range(6):
                put(cache, (number + 2 * rank) % 6)
            os._exit(10 + cache.fetched)
        pids.append(pid)
    fetched = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) - 10 for pid in pids]
    assert min(fetched) >= 0 and sum(fetched) == 6


def test_more_threads_than_there_is_room_for_wait_for_each_other(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path, 2 * SIZE)
    together(*(lambda number=number: [put(cache, number) for _ in range(3)] for number in range(6)))  # type: ignore[misc]
    assert cache.used_bytes <= 2 * SIZE


KILLED = """
    import sys
    from sharded_loader.storage.cache import ShardCache
    from sharded_loader.storage.files import Stat

    def fetch(file):
        file.write(b"half")
        file.flush()
        print("fetching", flush=True)
        sys.stdin.read()  # until it is killed

    ShardCache(sys.argv[1], "10 kB").open("s3://b/1.tar", Stat(1000, "tag"), fetch)
"""


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.costly
def test_a_killed_fetcher_leaves_its_place_to_another(tmp_path: Path, number: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "fetching\n"
        cache = ShardCache(tmp_path, SIZE + 1)
        assert cache.used_bytes == SIZE
        process.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
    put(cache, number)  # the same shard, or another one: there is room for one
    assert cache.used_bytes == SIZE and not list(tmp_path.glob("*.part"))


def test_a_folder_that_is_read_only_gives_the_shards_that_it_has(tmp_path: Path, monkeypatch: Any) -> None:
    calls: list[int] = []
    put(ShardCache(tmp_path / "full", "1 GB"), 1, calls)
    next((tmp_path / "full").glob("*.shard")).chmod(0o600)  # as of a copy: the checksum is compared
    (tmp_path / "empty").mkdir()

    refuse = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    monkeypatch.setattr(ShardCache, "_lock", refuse)
    monkeypatch.setattr(os, "utime", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    cache = ShardCache(tmp_path / "full", "1 GB")
    assert cache.read_only and put(cache, 1, calls) == bytes([1]) * SIZE and len(calls) == 1
    cache.prepare(*named(2), writes(b"", calls), lambda: True)
    for number in (2, 1):
        with pytest.raises(ShardError, match=rf"{number}\.tar is missing or damaged in .*full, which is read-only"):
            put(cache, number, calls)
        (tmp_path / "full" / place_of(cache, *named(1)).name).write_bytes(b"0" * SIZE)
    assert len(calls) == 1
    with pytest.raises(ShardError, match="empty cannot be written to"):
        ShardCache(tmp_path / "empty", "1 GB")


def test_what_cannot_be_a_cache_gets_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = ShardCache
    with pytest.raises(TypeError, match=r'ShardCache needs max_bytes.*ShardCache\(folder, "100 GB"\)'):
        missing(tmp_path)
    with pytest.raises(TypeError, match=r"ShardCache has no argument 'max_byte'; did you mean 'max_bytes'\?"):
        missing(tmp_path, max_byte="1 GB")
    with pytest.raises(ShardError, match=r"1\.tar has 1,000 bytes, and the cache .* 999: give a larger"):
        put(ShardCache(tmp_path, 999), 1)
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ShardError, match="cannot be written to"):
        ShardCache(tmp_path / "file" / "cache", "1 GB")
    refuse = Mock(side_effect=NotImplementedError("FileSystem does not appear to support flock"))
    monkeypatch.setattr(cache_module, "lock_at", refuse)
    with pytest.raises(ShardError, match=r"cannot be written to \(FileSystem does not appear to support flock\): give"):
        ShardCache(tmp_path, "1 kB")


def test_a_disk_that_fills_up_under_way_has_the_cache_delete_its_own(tmp_path: Path, monkeypatch: Any) -> None:
    room, cache, calls = disk(monkeypatch, 10 * SIZE, 10 * SIZE), ShardCache(tmp_path, "1 GB"), list[int]()
    for number in (1, 2):
        put(cache, number)

    def fill() -> None:
        room.free = 0  # another program has written
        raise OSError(errno.ENOSPC, "No space left on device")

    cache.open(*named(3), writes(b"x" * SIZE, calls, fill)).close()
    assert len(calls) == 2 and cache.evicted == 1 and cache.used_bytes == 2 * SIZE


@pytest.mark.parametrize("number", NO_SPACE)
def test_shards_go_when_a_quota_is_full_that_the_free_space_does_not_show(tmp_path: Path, number: int) -> None:
    cache, calls = ShardCache(tmp_path, "1 GB"), list[int]()
    for shard in (1, 2):
        put(cache, shard)
    cache.keep(*named(2))

    def fill() -> None:
        if cache.evicted == 0:
            raise OSError(number, os.strerror(number))

    cache.open(*named(3), writes(b"x" * SIZE, calls, fill)).close()
    assert len(calls) == 2 and cache.evicted == 1 and kept(cache, 1, 2, 3) == [False, True, True]


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at the open files")
def test_an_open_shard_that_was_deleted_gives_its_room_to_one_that_finds_the_disk_full(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = ObjectStore.fetch

    def fetch_if_two_fit(self: ObjectStore, *args: Any, **options: Any) -> int:
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        if sum(".shard" in os.readlink(link) for link in links if os.path.islink(link)) >= 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return fetch(self, *args, **options)

    monkeypatch.setattr(ObjectStore, "fetch", fetch_if_two_fit)
    served.files = {f"/{number}.tar": tar_of_numbers(range(number, number + 1)) for number in range(4)}
    cache = ShardCache(tmp_path / "cache", "1 GB")
    dataset = ShardDataset([f"{served.url}/{number}.tar" for number in range(4)], cache=cache, index_folder=tmp_path)
    assert len(dataset) == 4
    dataset.close()
    shutil.rmtree(tmp_path / "cache")
    for number in (0, 1, 2, 3, 0):
        assert dataset[number]["txt"] == b"%d" % number


def test_a_clock_that_is_put_back_keeps_no_shard_for_long(tmp_path: Path) -> None:
    cache, later = ShardCache(tmp_path, 2 * SIZE), 1 << 32  # in 2106
    for shard in (1, 2):
        put(cache, shard)
    for path in tmp_path.glob("*.sum"):
        os.utime(path, (later, later))
    kept(cache, 2)
    assert cache.prepare(*named(3), writes(b"x" * SIZE), lambda: True)
    assert kept(cache, 1, 2, 3) == [False, True, True]
    with reading(tmp_path / "readers") as count, reading(tmp_path / "readers") as other:
        other()
        [path] = (tmp_path / "readers").iterdir()
        os.utime(path, (later, later))
        assert count() == 1


def test_shards_go_when_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ShardCache(tmp_path, "1 GB")
    put(cache, 1)
    room = disk(monkeypatch, 9 * SIZE, SIZE - 1)
    put(cache, 2)
    assert cache.used_bytes == SIZE
    room.total = 0  # the system does not know
    put(cache, 1)
    assert cache.used_bytes == 2 * SIZE


def test_what_others_are_about_to_write_is_not_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = ShardCache(tmp_path, "1 GB"), ShardCache(tmp_path, "1 GB")
    put(cache, 1)
    disk(monkeypatch, 1, 3 * SIZE // 2)
    # 1,500 bytes are free, and 1,000 of them are for the shard that is being fetched here.
    cache.open(*named(2), writes(b"x" * SIZE, meanwhile=lambda: put(other, 3))).close()
    assert other.evicted == 1


def test_a_shard_that_is_needed_goes_last_and_that_is_said_once(tmp_path: Path, caplog: Any) -> None:
    cache, calls = ShardCache(tmp_path, 2 * SIZE), []
    for number in (1, 2):
        put(cache, number)
    cache.let_go(*named(2))
    assert all(kept(cache, 1))
    put(cache, 1)  # to open it does not make it needed less
    put(cache, 3, calls)
    assert all(kept(cache, 1, 3)) and not caplog.messages
    cache.prepare(*named(4), writes(b"x" * SIZE, calls), lambda: True)
    assert len(calls) == 1  # there is no room for what is fetched ahead
    for _ in range(2):
        assert all(kept(cache, 3))
        put(cache, 5)
        put(cache, 3)
    [said] = caplog.messages
    assert "a reader still needs" in said and f"{tmp_path} may take 2,000" in said and "larger max_bytes" in said


def test_making_room_does_not_look_at_each_file_of_the_cache_again(tmp_path: Path, monkeypatch: Any) -> None:
    cache, looked, stat = ShardCache(tmp_path, 50 * SIZE), list[Any](), os.stat
    monkeypatch.setattr(cache_module, "host_clock", Mock(now=lambda: 0.0))
    monkeypatch.setattr(os, "stat", lambda path, **how: looked.append(path) or stat(path, **how))
    for number in range(60):
        put(cache, number)
        cache.let_go(*named(number))
    assert cache.evicted == 10 and cache.used_bytes == 50 * SIZE
    assert sum(str(path).endswith(".sum") for path in looked) < 50 + 10 * 10  # 50 for each of 10 otherwise


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_shard_that_another_process_came_to_need_stays(tmp_path: Path, is_ahead: bool) -> None:
    cache = ShardCache(tmp_path, 3 * SIZE)
    for number in (1, 2, 3):
        put(cache, number)
        cache.let_go(*named(number), 10 - number)  # 1 goes first
    put(cache, 4)
    cache.let_go(*named(4), 1)
    assert all(kept(ShardCache(tmp_path, 3 * SIZE), 2))
    if is_ahead:
        assert cache.prepare(*named(5), writes(b"x" * SIZE), lambda: True)
    else:
        put(cache, 5)
    assert kept(cache, 1, 2, 3, 4, 5) == [False, True, False, True, True]


def test_what_is_fetched_ahead_waits_for_what_others_fetch_and_deletes_nothing_needed(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, 2 * SIZE), list[int]()
    put(cache, 1)
    assert all(kept(cache, 1))
    ahead = lambda: cache.prepare(*named(3), writes(b"x" * SIZE, calls), lambda: True)  # noqa: E731
    cache.open(*named(2), writes(b"x" * SIZE, meanwhile=ahead)).close()
    assert not calls and all(kept(cache, 1))


def test_a_worker_may_have_fetched_what_is_needed_and_the_user_have_passed_what_comes(tmp_path: Path) -> None:
    cache = ShardCache(tmp_path / "worker", SIZE)
    put(cache, 1)
    for number in (1, 2):
        cache.prepare(*named(number), writes(b""), lambda: True)
    assert cache.fetched == 1
    cache, wanted = ShardCache(tmp_path / "user", SIZE), iter([True, True, False])
    cache.prepare(*named(1), writes(b"x" * SIZE), lambda: next(wanted))
    cache.prepare(*named(2), writes(b"x" * SIZE), lambda: True)
    assert (cache.fetched, cache.evicted) == (2, 1)


CONTENT = random.Random(0).randbytes(5000)
URL, STAT = "s3://b/1.tar", Stat(len(CONTENT), "tag")


def read(folder: Path, calls: list[int] | None = None, max_bytes: int = 20_000, url: str = URL, **more: Any) -> bytes:
    """The shard, as another process would read it."""
    file = ShardCache(folder, max_bytes).open(url, STAT, writes(CONTENT, calls, **more))
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
    calls, (suffix, change) = list[int](), DAMAGE[damage]
    read(tmp_path, calls)
    [path] = tmp_path.glob(f"*{suffix}")
    change(path)
    assert [read(tmp_path, calls) for _ in range(2)] == [CONTENT, CONTENT]
    assert len(calls) == 2


def test_a_file_system_without_times_compares_the_checksum_each_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(os, "utime", Mock(side_effect=OSError(95, "Operation not supported")))
    calls: list[int] = []
    assert [read(tmp_path, calls) for _ in range(2)] == [CONTENT, CONTENT] and len(calls) == 1
    shard_in(tmp_path).write_bytes(bytes(len(CONTENT)))
    assert read(tmp_path, calls) == CONTENT and len(calls) == 2


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


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
@pytest.mark.parametrize("damage", ["zeros", "half", "deleted"])
def test_a_shard_that_is_damaged_while_it_is_open_is_fetched_again(
    in_memory: tuple[ShardDataset, ShardCache], monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    dataset, cache = in_memory
    path = shard_in(cache.folder)
    if damage == "deleted":
        path.unlink()  # what was deleted can be read while it is open
    else:
        os.truncate(path, path.stat().st_size // 2)
        if damage == "zeros":
            with open(path, "r+b") as file:
                file.write(bytes(2 * path.stat().st_size))
    assert [sample["txt"] for sample in dataset] == [str(i).encode() * 100 for i in range(20)]
    assert cache.fetched == 1 + (damage != "deleted")
    monkeypatch.setattr(LocalFile, "is_touched", lambda file: True)
    with pytest.raises(ShardError, match=r"a\.tar .*is written to again and again"):
        dataset[0]


def test_the_disk_has_a_shard_before_it_gets_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Mock()
    for name in ("fsync", "replace"):
        monkeypatch.setattr(os, name, Mock(wraps=getattr(os, name)))
        calls.attach_mock(getattr(os, name), name)
    read(tmp_path)
    assert [call[0] for call in calls.mock_calls] == ["fsync", "replace"]


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
        read(tmp_path, max_bytes=11_000)
    assert read(tmp_path, max_bytes=15_000) == CONTENT  # there is room beside it
    read(tmp_path / "other")
    undeletable.append(shard_in(tmp_path / "other"))
    read(tmp_path / "other", url="s3://b/2.tar")
    assert read(tmp_path / "other", None, 11_000, "s3://b/3.tar") == CONTENT
    calls: list[int] = []
    assert read(tmp_path / "other", calls, 11_000) == CONTENT and not calls  # it is still there, and sound


@pytest.mark.parametrize("suffix", [".shard", ".part", ".sum"])
def test_a_folder_in_a_place_of_the_cache_is_named(tmp_path: Path, suffix: str) -> None:
    cache = ShardCache(tmp_path, "20 kB")
    path = place_of(cache, URL, STAT).with_suffix(suffix)
    path.mkdir()
    with pytest.raises(ShardError, match=rf"1\.tar: .*{path.name}"):
        read(tmp_path)
    assert path.is_dir()


def test_a_folder_that_was_deleted_is_made_again_or_named(tmp_path: Path) -> None:
    folder, calls = tmp_path / "cache", list[int]()
    cache = ShardCache(folder, "20 kB")
    shutil.rmtree(folder)
    assert cache.used_bytes == 0 and not cache.keep(URL, STAT)
    cache.prepare(URL, STAT, writes(CONTENT, calls), lambda: True)
    assert cache.keep(URL, STAT) and read(folder, calls) == CONTENT and len(calls) == 1
    shutil.rmtree(folder)
    folder.write_bytes(b"")
    with pytest.raises(ShardError, match=r"1\.tar: the cache folder .*cache cannot be used"):
        cache.open(URL, STAT, writes(CONTENT))


@pytest.mark.skipif(sys.platform == "win32", reason="what is open cannot be deleted there")
@pytest.mark.parametrize("what", ["", "locks"], ids=["all", "locks"])
def test_a_folder_that_is_deleted_while_a_shard_is_fetched(tmp_path: Path, what: str) -> None:
    """Without locks two may fetch it: it is whole all the same."""
    folder, calls, others = tmp_path / "cache", list[int](), list[int]()

    def delete() -> None:
        shutil.rmtree(folder / what)
        if what:
            together(lambda: read(folder, others))

    assert read(folder, calls, meanwhile=delete) == CONTENT
    assert (len(calls), len(others)) == ((1, 1) if what else (2, 0))
    assert [path.suffix for path in sorted(folder.glob("*-*"))] == [".shard", ".sum"]
    with pytest.raises(ShardError, match=r"2\.tar was deleted from .*cache at once.*no other program cleans"):
        ShardCache(folder, "20 kB").open(*named(2), lambda file: file.write(bytes(SIZE)) and shutil.rmtree(folder))
