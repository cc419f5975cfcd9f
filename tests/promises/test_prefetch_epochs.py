"""While the last batches of an epoch are consumed, the first of the next are read. Nobody sees it but the clock."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import PROCESS_POOLS, ahead, begin, covering, make_pool
from inside import pipeline_of
from samples import Gate, Told

from sharded_loader import (
    BatchSampler,
    Placement,
    RandomSampler,
    Sampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    ThreadPool,
    WeightedRandomSampler,
)
from sharded_loader.engine.pipeline import Run

POOLS = ["thread", *PROCESS_POOLS]
LENGTH = 22


class Noted:
    """Notes which samples are read, in this process. Those above ``upto`` wait until `go`."""

    def __init__(self, length: int = LENGTH) -> None:
        self.length = length
        self.read: list[int] = []
        self.come = threading.Condition()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        with self.come:
            self.read.append(index)
            self.come.notify_all()
        return index

    def wait_for(self, count: int) -> None:
        with self.come:
            assert self.come.wait_for(lambda: len(self.read) >= count, 30)


def lists(batches: Any) -> list[Any]:
    return [[part.tolist() for part in one] if isinstance(one, list) else one.tolist() for one in batches]


def run_ahead(loader: ShardedDataLoader) -> Run | None:
    """The run that is read ahead."""
    return next((run for run in pipeline_of(loader).runs.values() if run.is_ahead), None)


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": 4},
    "shuffled": lambda: {"batch_size": 4, "shuffle": True},
    "discard": lambda: {"batch_size": 4, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": 4, "shuffle": True, "last_batch": "rollover"},
    "rank": lambda: {"batch_size": 4, "shuffle": True, "num_replicas": 3, "rank": 1},
    "rank, rollover": lambda: {
        "batch_size": 3, "shuffle": True, "num_replicas": 2, "rank": 1, "last_batch": "rollover",
    },
    "given": lambda: {"batch_size": 4, "sampler": RandomSampler(LENGTH, seed=2)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=2), 4, "rollover")},
    "shards": lambda: {"batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(LENGTH, seed=2), 4), 2)},
    "split": lambda: {"batch_size": 4, "shuffle": True, "num_shards": 2},
    "a list": lambda: {"batch_size": 4, "sampler": list(range(LENGTH))[::-1]},
    "steps": lambda: {"batch_size": 4, "shuffle": True, "steps_per_epoch": 3},
    "one batch": lambda: {"batch_size": 40, "shuffle": True},
}  # fmt: skip


@covering(1, pool=POOLS, order=ORDERS, prefetch=[1, None, 50])
def test_batches_are_the_same_with_and_without(pool: str, order: str, prefetch: int | None) -> None:
    expected = ShardedDataLoader(range(LENGTH), seed=5, **ORDERS[order]())
    with ahead(
        ShardedDataLoader(range(LENGTH), seed=5, prefetch=prefetch, pool=make_pool(pool), **ORDERS[order]()), True
    ) as loader:
        for _ in range(4):
            assert lists(loader) == lists(expected)
            assert (loader.epoch, loader.position, loader.state_dict()) == (
                expected.epoch,
                expected.position,
                expected.state_dict(),
            )


def test_the_next_epoch_is_read_before_it_begins() -> None:
    data = Noted()
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(2), prefetch=4), True) as loader:
        iterator = iter(loader)
        for _ in range(LENGTH // 2):
            next(iterator)
        data.wait_for(LENGTH + 8)  # the last batch is in the user's hands: all that is in flight is of the next epoch
        assert data.read.count(0) == 2 and (loader.epoch, loader.position) == (0, LENGTH // 2)
        assert next(iterator, None) is None
        assert (loader.epoch, loader.position) == (1, 0)
        assert lists(loader) == [[i, i + 1] for i in range(0, LENGTH, 2)]
        data.wait_for(2 * LENGTH + 8)
        assert data.read.count(0) == 3  # what was read ahead is not read again


@pytest.mark.parametrize("prefetch", [1, 3])
def test_no_more_is_in_flight_than_prefetch_says(prefetch: int) -> None:
    gate = Gate()
    loader = ahead(ShardedDataLoader(gate, 10, pool=ThreadPool(1), prefetch=prefetch), True)
    loader.pool.group = 8  # however cheap batches are
    iterator = iter(loader)
    for number in range(10):
        for _ in range(10):
            gate.opened.release()
        next(iterator)
        in_flight = sum(len(run.window) for run in pipeline_of(loader).runs.values())
        assert in_flight <= prefetch, number
    found = run_ahead(loader)
    assert found is not None and len(found.window) == prefetch
    gate.open_for_all()
    loader.close()


@pytest.mark.parametrize(("pool", "wanted"), [("inline", False), ("inline", True), ("thread", False)])
def test_without_workers_or_if_told_so_nothing_is_read_ahead(pool: str, wanted: bool) -> None:
    data = Noted()
    with ahead(ShardedDataLoader(data, 2, pool=make_pool(pool)), wanted) as loader:
        lists(loader)
        assert run_ahead(loader) is None
        assert sorted(data.read) == list(range(LENGTH))


def test_by_default_processes_read_ahead_and_threads_do_not() -> None:
    for pool, expected in (("inline", False), ("thread", False), (PROCESS_POOLS[0], True)):
        with ShardedDataLoader(range(8), 2, pool=make_pool(pool)) as loader:
            assert loader.prefetch_epochs == expected
            lists(loader)
            assert (run_ahead(loader) is not None) == expected
            loader.prefetch_epochs = not expected
            lists(loader)
            assert (run_ahead(loader) is not None) == (not expected and pool != "inline")


def shuffled(epoch: int, seed: int = 5, **options: Any) -> list[Any]:
    loader = ShardedDataLoader(range(LENGTH), 4, True, seed=seed, **options)
    loader.set_epoch(epoch)
    return lists(loader)


@pytest.mark.parametrize("pool", POOLS)
def test_another_epoch_is_another_epoch(pool: str) -> None:
    with ahead(ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(pool)), True) as loader:
        assert lists(loader) == shuffled(0)
        loader.set_epoch(7)
        assert lists(loader) == shuffled(7)
        loader.set_epoch(8)
        assert run_ahead(loader) is not None
        assert lists(loader) == shuffled(8)
        loader.sampler.set_epoch(3)
        assert lists(loader) == shuffled(3)
        assert lists(loader) == shuffled(4)
        assert len(pipeline_of(loader).runs) <= 1


@pytest.mark.parametrize("pool", ["thread", PROCESS_POOLS[0]])
def test_a_state_that_is_loaded_counts(pool: str) -> None:
    with ahead(ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(pool)), True) as loader:
        iterator = iter(loader)
        first = lists([next(iterator), next(iterator)])
        state = loader.state_dict()
        rest = lists(iterator)
        assert first + rest == shuffled(0)
        loader.load_state_dict(state)
        assert lists(loader) == rest
        assert lists(loader) == shuffled(1)
        other = ShardedDataLoader(range(LENGTH), 4, True, seed=9)
        loader.load_state_dict(other.state_dict())
        assert lists(loader) == shuffled(0, seed=9)


@pytest.mark.parametrize("pool", ["thread", *PROCESS_POOLS])
def test_refresh_shows_the_dataset_as_it_is(pool: str) -> None:
    data = [np.zeros(2) for _ in range(12)]
    with ahead(ShardedDataLoader(data, 4, pool=make_pool(pool)), True) as loader:
        assert {value for batch in lists(loader) for row in batch for value in row} == {0}
        data[:] = [np.ones(2) for _ in range(12)]
        loader.refresh()
        assert {value for batch in lists(loader) for row in batch for value in row} == {1}
        data += [np.ones(2)] * 4
        loader.refresh()
        assert sum(map(len, lists(loader))) == 16


def test_what_decides_the_batches_may_change_until_the_epoch_begins() -> None:
    weights = np.ones(LENGTH)
    batches = BatchSampler(WeightedRandomSampler(weights, 12, seed=1), 4)
    with ahead(
        ShardedDataLoader(range(LENGTH), batch_sampler=batches, pool=ThreadPool(2), num_shards=2), True
    ) as loader:
        assert [[len(part) for part in batch] for batch in lists(loader)] == [[2, 2]] * 3
        assert run_ahead(loader) is not None
        loader.shard_weights = [3, 1]
        assert [[len(part) for part in batch] for batch in lists(loader)] == [[3, 1]] * 3
        batches.batch_size = 6
        assert [len(batch[0]) for batch in lists(loader)] == [5, 5]
        batches.sampler.seed = 2  # type: ignore[attr-defined]
        fresh = ShardedDataLoader(
            range(LENGTH),
            batch_sampler=BatchSampler(WeightedRandomSampler(weights, 12, seed=2), 6),
            num_shards=2,
            device=Placement(shard_weights=[3, 1]),
        )
        fresh.set_epoch(3)
        assert lists(loader) == lists(fresh)


class Counted:
    """A sampler of another library that notes when it is asked."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        self.begun.append(self.epoch)
        return iter(range(8))


class Curriculum(Sampler[int]):
    """A user's sampler, whose order the training loop decides on between epochs."""

    count = 8

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return iter(range(start, self.count))

    def len_epoch(self, epoch: int) -> int:
        return self.count


def test_samplers_of_others_are_not_asked_before_their_epoch() -> None:
    sampler = Counted()
    with ahead(ShardedDataLoader(range(8), 2, sampler=sampler, pool=ThreadPool(2)), True) as loader:
        for epoch in range(3):
            lists(loader)
            assert sampler.begun == list(range(epoch + 1)) and run_ahead(loader) is None
    order = list(range(8))
    with ahead(ShardedDataLoader(range(8), 2, sampler=order, pool=ThreadPool(2)), True) as loader:
        lists(loader)
        order.reverse()
        assert lists(loader) == [[7, 6], [5, 4], [3, 2], [1, 0]]
    own = Curriculum()
    with ahead(ShardedDataLoader(range(8), 2, sampler=own, pool=ThreadPool(2)), True) as loader:
        lists(loader)
        own.count = 4
        assert lists(loader) == [[0, 1], [2, 3]]


@pytest.mark.parametrize("pool", POOLS)
def test_a_dataset_that_is_told_the_epoch_is_in_one_at_a_time(pool: str) -> None:
    data = Told()
    with ahead(ShardedDataLoader(data, 2, pool=make_pool(pool)), True) as loader:
        for epoch in range(4):
            assert lists(loader) == [[100 * epoch + i, 100 * epoch + i + 1] for i in range(0, 12, 2)]
        assert (run_ahead(loader) is None) == (pool == "thread")


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_workers_that_are_killed_between_two_epochs_lose_no_batch(method: str) -> None:
    with ShardedDataLoader(range(LENGTH), 4, True, seed=5, pool=make_pool(method)) as loader:
        for epoch in range(3):
            assert lists(loader) == shuffled(epoch)
            for pid in loader.pool.pids:  # type: ignore[attr-defined]
                with contextlib.suppress(ProcessLookupError):  # killed before, and not missed since: all was read ahead
                    os.kill(pid, signal.SIGKILL)


def test_what_was_dropped_is_not_read_on_by_the_epoch_before_it() -> None:
    data = Noted(40)
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(1), prefetch=8), True) as loader:
        one = iter(loader)
        first = lists([next(one) for _ in range(16)])
        dropped = run_ahead(loader)
        assert dropped is not None
        loader.set_epoch(5)
        other = iter(loader)
        second = lists([next(other)])
        assert not dropped.window and not dropped.is_ahead
        first += lists(one)
        assert not dropped.window and dropped.number not in pipeline_of(loader).runs
        assert first == second + lists(other)


class Unsure(Noted):
    """Its length cannot be told in the middle of an epoch."""

    known = True

    def __len__(self) -> int:
        if not self.known:
            raise OSError("the file is not there")
        return self.length


def test_what_cannot_be_asked_yet_is_no_error_of_this_epoch() -> None:
    data = Unsure()
    with ahead(ShardedDataLoader(data, 2, pool=ThreadPool(2)), True) as loader:
        iterator = iter(loader)
        found = lists([next(iterator)])
        data.known = False
        found += lists(iterator)
        assert found == [[i, i + 1] for i in range(0, LENGTH, 2)] and run_ahead(loader) is None
        with pytest.raises(OSError, match="the file is not there"):
            next(iter(loader))
        data.known = True
        assert lists(loader) == found


@pytest.mark.parametrize("pool", POOLS)
def test_a_loader_that_is_not_closed_goes_with_what_it_reads_ahead(pool: str) -> None:
    loader = ahead(ShardedDataLoader(range(LENGTH), 4, pool=make_pool(pool)), True)
    lists(loader)
    gone = weakref.ref(loader)
    del loader
    gc.collect()
    assert gone() is None  # and nothing of it is left: the fixture looks


def test_a_loader_is_closed_while_the_next_epoch_hangs() -> None:
    gate = Gate()
    for _ in range(100):
        gate.opened.release()
    # One thread: with two, the next epoch could take what this one has been let through for.
    loader = ahead(ShardedDataLoader(gate, 10, pool=ThreadPool(1)), True)
    lists(loader)
    waits = begin(loader)
    loader.close()
    gate.open_for_all()
    waits.join()
