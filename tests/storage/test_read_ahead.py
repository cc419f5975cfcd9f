"""Shards are fetched before they are needed, in the order in which they are, as far as the cache has room."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import Served, serving
from shards import write_tar

from sharded_loader import (
    ProcessPool,
    RandomSampler,
    SequentialSampler,
    ShardCache,
    ShardDataset,
    ShardedDataLoader,
    ShardShuffleSampler,
)
from sharded_loader.storage import read_ahead
from sharded_loader.storage.read_ahead import ReadAhead
from sharded_loader.storage.stores import Stat


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that other threads do."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


class Walk:
    """A `ReadAhead` over batches that need the given shards, of size 1."""

    def __init__(self, batches: list[list[int]], room: int) -> None:
        self.fetched: list[int] = []
        self.gone: list[int] = []
        self.lost: set[int] = set()  # that others have deleted
        self.position: int | None = 0
        self.ahead = ReadAhead(
            lambda number: batches[number] if number < len(batches) else None,
            lambda: self.position,
            [1] * 100,
            room,
            lambda shard, is_needed: self.fetched.append(shard) if is_needed() else None,
            lambda shard: shard not in self.lost,
            self.gone.append,
        )
        self.ahead.start()


def test_it_goes_as_far_as_there_is_room() -> None:
    walk = Walk([[0, 1], [1, 2], [2, 3], [9], [1]], room=3)
    until(lambda: sorted(walk.fetched) == [0, 1, 2])
    walk.position = 1
    until(lambda: sorted(walk.fetched) == [0, 1, 2, 3])
    assert walk.gone == [0]
    walk.position = 2
    until(lambda: sorted(walk.fetched) == [0, 1, 2, 3, 9])
    walk.position = 4
    until(lambda: walk.fetched.count(1) == 2)
    walk.ahead.stop()


def test_what_others_have_deleted_is_fetched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_ahead, "YOUNG", 0.01)
    walk = Walk([[0], [1], [2]], room=3)
    until(lambda: sorted(walk.fetched) == [0, 1, 2])
    walk.lost = {1}
    until(lambda: walk.fetched.count(1) > 1)
    walk.ahead.stop()
    assert walk.fetched.count(0) == walk.fetched.count(2) == 1


def test_what_was_passed_while_it_waited_for_its_turn_is_not_fetched(tmp_path: Path) -> None:
    cache, calls = ShardCache(tmp_path, "1 kB"), []
    cache.prepare("s3://b/1.tar", Stat(1, "x"), lambda file: calls.append(file.write(b"a")), lambda: False)
    assert not calls and cache.used_bytes == 0
    for _ in range(2):
        cache.prepare("s3://b/1.tar", Stat(1, "x"), lambda file: calls.append(file.write(b"a")), lambda: True)
    assert calls == [1] and cache.used_bytes == 1


def test_it_goes_on_from_where_the_user_is_and_ends_with_the_epoch() -> None:
    before = set(threading.enumerate())
    walk = Walk([[0], [1], [2]], room=50)
    walk.position = 3
    until(lambda: not set(threading.enumerate()) - before)
    assert set(walk.fetched) <= {0, 1, 2}


@pytest.mark.parametrize("end", ["nobody reads", "stopped", "an order that fails"])
def test_its_threads_end(end: str) -> None:
    before = set(threading.enumerate())
    if end == "an order that fails":
        ahead = ReadAhead(lambda number: [][number], lambda: 0, [], 1, lambda *_: None, bool, id)  # type: ignore[arg-type]
        ahead.start()
        until(lambda: type(ahead.error) is IndexError)
    else:
        walk = Walk([[number] for number in range(90)], room=2)
        until(lambda: len(walk.fetched) == 2)
        if end == "stopped":
            walk.ahead.stop()
        else:
            walk.position = None
    until(lambda: not set(threading.enumerate()) - before)


# -- with a loader -----------------------------------------------------------------------------------------------------

SHARDS, LENGTH = 12, 20


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving() as found:
        for shard in range(SHARDS):
            numbers = range(shard * LENGTH, (shard + 1) * LENGTH)
            write_tar(tmp_path / "x.tar", {f"{i}.txt": str(i).encode() for i in numbers})
            found.files[f"/{shard:02}.tar"] = (tmp_path / "x.tar").read_bytes()
        yield found


def make(served: Served, folder: Path, shards: float) -> ShardDataset:
    """A dataset whose cache has room for so many shards. Its indexes are there already."""
    urls = [f"{served.url}{name}" for name in sorted(served.files)]
    ShardDataset(urls, index_folder=folder / "indexes").close()
    size = max(map(len, served.files.values()))
    served.asked.clear()
    return ShardDataset(urls, cache=ShardCache(folder / "cache", int(shards * size)), index_folder=folder / "indexes")


def number(sample: dict[str, Any]) -> int:
    return int(sample["txt"])


def downloads(served: Served) -> int:
    return len([path for path, wanted in served.asked if wanted])


@pytest.mark.parametrize("method", ["inline", "fork", "spawn"])
def test_each_shard_is_fetched_once_in_an_epoch(tmp_path: Path, served: Served, method: str) -> None:
    dataset = make(served, tmp_path, shards=6)
    order = ShardShuffleSampler(dataset.lengths, window=3, seed=5)
    how: dict[str, Any] = {} if method == "inline" else {"pool": ProcessPool(2, start_method=method)}

    def is_there(shard: int) -> bool:
        return dataset._cache is not None and dataset._cache._path(dataset._urls[shard], dataset._stats[shard]).exists()

    with ShardedDataLoader(dataset.transform(number), 10, sampler=order, prefetch=2, **how) as loader:
        batches = iter(loader)
        for number_of_it, expected in enumerate(np.array(list(order.iter_epoch(0))).reshape(-1, 10)):
            shards = set((expected // LENGTH).tolist())
            until(lambda n=number_of_it, shards=shards: n == 0 or all(map(is_there, shards)))  # type: ignore[misc]
            assert next(batches).tolist() == expected.tolist()
        del batches
        assert downloads(served) == SHARDS
    dataset.close()


def test_shards_are_there_before_they_are_needed(tmp_path: Path, served: Served) -> None:
    dataset = make(served, tmp_path, shards=6.5)
    order = ShardShuffleSampler(dataset.lengths, window=3, seed=5)
    loader = ShardedDataLoader(dataset.transform(number), 10, sampler=order)
    batches = iter(loader)
    next(batches)
    until(lambda: downloads(served) == 6)  # two windows
    needed = [index // LENGTH for index in order.iter_epoch(0)]
    assert {path for path, _ in served.asked} == {f"/{shard:02}.tar" for shard in set(needed[: 6 * LENGTH])}
    del batches
    until(lambda: dataset._ahead is None or not any(thread.is_alive() for thread in dataset._ahead._threads))
    loader.close()
    dataset.close()


def test_a_run_that_goes_on_in_mid_epoch_fetches_what_is_left(tmp_path: Path, served: Served) -> None:
    dataset = make(served, tmp_path, shards=20)
    order = ShardShuffleSampler(dataset.lengths, window=3, seed=5)
    before = ShardedDataLoader(range(SHARDS * LENGTH), 10, sampler=order)
    batches = iter(before)
    for _ in range(18):  # three of four windows
        next(batches)
    loader = ShardedDataLoader(dataset.transform(number), 10, sampler=order)
    loader.load_state_dict(before.state_dict())
    assert len(list(loader)) == 6
    assert downloads(served) == 3
    loader.close()
    dataset.close()


def test_a_full_shuffle_over_a_small_cache_reads_samples_and_says_so_once(tmp_path: Path, served: Served) -> None:
    dataset = make(served, tmp_path, shards=2)
    order = RandomSampler(SHARDS * LENGTH, seed=1)
    loader = ShardedDataLoader(dataset.transform(number), 40, sampler=order)
    with pytest.warns(
        UserWarning, match=r"a batch needs 1[0-2] shards of .* and the cache .* ShardShuffleSampler"
    ) as told:
        assert [i for batch in loader for i in batch.tolist()] == list(order.iter_epoch(0))
    assert len(told) == 1
    assert dataset._cache is not None and dataset._cache.fetched == 0
    loader.close()
    dataset.close()


def test_an_index_that_is_no_sample_is_the_error_of_its_batch(tmp_path: Path, served: Served) -> None:
    dataset = make(served, tmp_path, shards=20)
    order = SequentialSampler(6, start=SHARDS * LENGTH - 3)  # three samples, and three that are none
    loader = ShardedDataLoader(dataset.transform(number), 3, sampler=order)
    batches = iter(loader)
    assert len(next(batches)) == 3
    with pytest.raises(IndexError, match="240") as error:
        next(batches)
    assert "batch 1" in f"{error.value} {getattr(error.value, '__notes__', '')}"
    backwards = ShardedDataLoader(dataset, 3, sampler=SequentialSampler(6, start=SHARDS * LENGTH))
    with pytest.raises(IndexError, match="240"):
        next(iter(backwards))
    assert list(batches) == []
    del batches
    backwards.close()
    loader.close()
    dataset.close()


@pytest.mark.parametrize(("shards", "kept"), [(20, SHARDS), (5, 0)])
def test_what_is_fetched_for_the_indexes_is_kept_if_there_is_room(
    tmp_path: Path, served: Served, shards: int, kept: int
) -> None:
    size = max(map(len, served.files.values()))
    urls = [f"{served.url}{name}" for name in sorted(served.files)]
    cache = ShardCache(tmp_path / "cache", shards * size)
    dataset = ShardDataset(urls, cache=cache)
    assert len(dataset) == SHARDS * LENGTH and cache.fetched == kept
    dataset.close()
