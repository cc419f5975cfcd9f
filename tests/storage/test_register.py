"""Readers of one cache know each other, whatever has started them, and divide its room."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from served import Served, serving
from shards import tar_of_numbers
from test_read_ahead import Walk, until

from sharded_loader import ShardCache, ShardDataset
from sharded_loader.storage import read_ahead
from sharded_loader.storage.read_ahead import reading

READER = """
import sys
from pathlib import Path
from sharded_loader.storage.read_ahead import reading

with reading(Path(sys.argv[1])) as count:
    print(count(), flush=True)
    sys.stdin.read()
"""


def reader(folder: Path) -> subprocess.Popen[str]:
    """A process in the register."""
    command, pipe = [sys.executable, "-c", READER, str(folder)], subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def test_readers_join_and_leave(tmp_path: Path) -> None:
    with ExitStack() as stack:
        counts = [stack.enter_context(reading(tmp_path / "readers")) for _ in range(3)]
        assert [count() for count in counts] == [1, 2, 3] and counts[0]() == 3
    with reading(tmp_path / "readers") as count:
        assert count() == 1
    assert not list((tmp_path / "readers").iterdir())


@pytest.mark.costly
@pytest.mark.parametrize("killed", [False, True])
def test_a_process_that_ends_or_is_killed_is_not_counted(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with reading(tmp_path) as count, reader(tmp_path) as other:
        assert other.stdin is not None and other.stdout is not None
        assert other.stdout.readline() == "1\n" and count() == 2
        if killed:
            other.send_signal(signal.SIGTERM if sys.platform == "win32" else signal.SIGKILL)
        other.stdin.close()
        other.wait()
        monkeypatch.setattr(read_ahead, "DEAD_SECONDS", 0.0 if killed else 100.0)
        assert count() == 1
    assert not list(tmp_path.iterdir())


def test_a_register_that_is_deleted_is_made_again(tmp_path: Path) -> None:
    with reading(tmp_path / "readers") as count, reading(tmp_path / "readers") as other:
        assert (count(), other()) == (1, 2)
        shutil.rmtree(tmp_path / "readers")
        assert (count(), other(), count()) == (1, 2, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_takes_nobody_out_of_the_register(tmp_path: Path) -> None:
    with reading(tmp_path) as count, reading(tmp_path) as other:
        assert (count(), other()) == (1, 2)
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        assert count() == 2


def test_a_folder_that_cannot_be_used_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with reading(tmp_path / "file" / "readers") as count:
        assert count() == 1


def test_a_reader_gives_back_what_it_needs_last_when_another_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "RENEW_SECONDS", 0.01)
    batches = [[number] for number in range(20)]
    walk = Walk(batches, room=4, register=tmp_path)
    until(lambda: sorted(walk.fetched) == [0, 1, 2, 3])
    with reading(tmp_path / "readers") as count:
        assert count() == 2
        until(lambda: walk.there == {0, 1})
        assert walk.said[-2:] == [(3, 3), (2, 2)]  # when they are needed again
        walk.position = 1
        until(lambda: walk.there == {1, 2})
        assert walk.fetched.count(2) == 2 and walk.fetched.count(3) == 1
    until(lambda: {1, 2, 3, 4} <= walk.there)
    walk.ahead.stop()
    assert walk.ahead.error is None and not list((tmp_path / "readers").iterdir())


RANKS = """
import multiprocessing, sys
from sharded_loader import ShardCache, ShardDataset, ShardedDataLoader, ShardShuffleSampler

def number(sample):
    return int(sample["txt"])

def read(urls, folder, room, rank, started):
    cache = ShardCache(folder + "/cache", room)
    shards = ShardDataset(urls.split(), cache=cache, index_folder=folder + "/indexes")
    order = ShardShuffleSampler(shards.lengths, window=1, lanes=8, seed=1)
    started.wait()
    with ShardedDataLoader(shards.transform(number), 5, sampler=order, num_replicas=4, rank=rank) as loader:
        print("".join(f"{i}\\n" for batch in loader for i in batch.tolist()), end="", flush=True)
    shards.close()

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    started = context.Barrier(4)
    ranks = [context.Process(target=read, args=(*sys.argv[1:3], int(sys.argv[3]), i, started)) for i in range(4)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    sys.exit(any(rank.exitcode for rank in ranks))
"""


@pytest.fixture
def served() -> Iterator[Served]:
    with serving() as found:
        for shard in range(32):
            found.files[f"/{shard:02}.tar"] = tar_of_numbers(range(20 * shard, 20 * shard + 20))
        yield found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_without_a_launcher_fetch_few_shards_twice(tmp_path: Path, served: Served) -> None:
    urls = [f"{served.url}{name}" for name in sorted(served.files)]
    first = ShardDataset(urls, index_folder=tmp_path / "indexes")
    assert len(first) == 640  # the shards are indexed now
    first.close()
    served.asked.clear()
    (tmp_path / "ranks.py").write_text(RANKS)
    environ = {name: value for name, value in os.environ.items() if name != "LOCAL_WORLD_SIZE"}
    room = 17 * len(served.files["/00.tar"])
    command = [sys.executable, str(tmp_path / "ranks.py"), " ".join(urls), str(tmp_path), str(room)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    assert sorted(map(int, done.stdout.split())) == list(range(640))
    assert len([path for path, wanted in served.asked if wanted and path.endswith(".tar")]) <= 40
    assert ShardCache(tmp_path / "cache", room).used_bytes <= room
