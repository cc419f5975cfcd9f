"""``loader.fetch``: a batch of any samples, read by the workers beside the epoch, which stays what it is."""

from __future__ import annotations

import gc
import os
import signal
import threading
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PATIENCE, POOLS, PROCESS_POOLS, covering, make_pool, until
from samples import Augmented, summed

from sharded_loader import LoaderClosedError, LoaderWarning, ProcessPool, ShardedDataLoader, interleave
from sharded_loader.torch import DataLoader

LENGTH = 40


class OneBad(Augmented):
    """One sample cannot be read."""

    def __getitem__(self, index: int) -> Any:
        if index == 39:
            raise KeyError("bad")
        return super().__getitem__(index)


def loader_of(pool: str = "inline", **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(
        OneBad(LENGTH), 4, shuffle=True, seed=3, collate_fn=summed, pool=make_pool(pool, 2), sampler=None, **given
    )


def whole() -> list[Any]:
    """What two epochs give."""
    loader = loader_of(on_error="skip")
    return [[batch.tolist() for batch in loader] for _ in range(2)]


@covering(pool=POOLS)
def test_it_works_before_between_and_inside_epochs_which_stay_the_same(pool: str) -> None:
    wanted, fetched, read = whole(), [], list[list[Any]]()
    with loader_of(pool, on_error="skip") as loader:
        early = loader.fetch([7, 3, 5])
        assert early.result()[:, 0].shape == (3,)
        for _ in range(2):
            read.append([])
            for batch in loader:
                read[-1].append(batch.tolist())
                fetched.append(loader.fetch([len(read[-1]), 0]))
                if len(read[-1]) % 3 == 0:
                    fetched[-1].result()
            state = loader.state_dict()
            between = loader.fetch(range(3), epoch=0)
            assert torch.equal(between.result(), loader_of().fetch([0, 1, 2], epoch=0).result())
            assert loader.state_dict() == state
        assert read == wanted
        assert all(one.result().shape == (2, 2) for one in fetched)
        assert loader.stats().batches == sum(map(len, wanted))


@covering(pool=POOLS)
def test_random_numbers_depend_on_the_seed_the_epoch_and_the_indices(pool: str) -> None:
    with loader_of(pool) as loader, loader_of() as other:
        next(iter(loader))
        first, again, later = (loader.fetch([2, 9], epoch) for epoch in (0, 0, 1))
        assert torch.equal(first.result(), again.result())
        assert torch.equal(later.result(), other.fetch([2, 9], 1).result())
        assert not torch.equal(first.result(), later.result())


@covering(pool=POOLS)
def test_what_is_wrong_is_an_error_of_the_future_and_nothing_is_lost(pool: str) -> None:
    with loader_of(pool, on_error="skip") as loader:
        iterator, read = iter(loader), []
        read.append(next(iterator).tolist())
        far, empty = loader.fetch([1, LENGTH]), loader.fetch([])
        with pytest.raises(IndexError, match="fetch was given the index 40, but the dataset has 40 samples"):
            far.result()
        assert isinstance(far.exception(), IndexError)
        assert isinstance(empty.exception(), ValueError)
        with pytest.warns(LoaderWarning, match="epoch 0, a fetched batch was left out"):
            assert "on_error has left out all" in str(loader.fetch([39]).exception())
        assert read + [batch.tolist() for batch in iterator] == whole()[0]
    with loader_of(pool) as loader:
        error = loader.fetch([1, 39]).exception()
        assert isinstance(error, KeyError)
        assert "epoch 0, a fetched batch, sample 39" in "".join(error.__notes__)


@pytest.mark.parametrize("given", ["ab", 7, None])
def test_what_is_no_list_of_indices_is_rejected(given: Any) -> None:
    with pytest.raises(TypeError, match="must be a list of indices"):
        loader_of().fetch(given)


def test_iterable_data_is_rejected() -> None:
    with pytest.raises(TypeError, match="read by index"):
        ShardedDataLoader(lambda: iter(range(4)), 2).fetch([1])


@covering(pool=POOLS)
def test_after_close_it_is_an_error_and_what_was_not_received_is_too(pool: str) -> None:
    loader = loader_of(pool)
    left, received = loader.fetch([1]), loader.fetch([2])
    value = received.result()
    loader.close()
    with pytest.raises(LoaderClosedError):
        left.result()
    assert left.done()
    assert received.result() is value
    with pytest.raises(LoaderClosedError):
        loader.fetch([1])


@covering(pool=POOLS)
def test_done_and_a_time_limit_look_after_the_workers(pool: str) -> None:
    with loader_of(pool) as loader:
        one = loader.fetch([4, 5])
        assert until(one.done)
        assert one.result(timeout=0).shape == (2, 2)
        assert loader.fetch([6]).result(timeout=PATIENCE).shape == (1, 2)


class Gated:
    """Sample 0 waits until a file is there."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        while index == 0 and not self.file.exists():
            threading.Event().wait(0.001)
        return index


def test_a_time_limit_that_is_over_loses_nothing(tmp_path: Path) -> None:
    with ShardedDataLoader(Gated(tmp_path / "open"), 2, num_workers=1, thread_pool=True) as loader:
        one = loader.fetch([0, 1])
        with pytest.raises(TimeoutError):
            one.result(timeout=0)
        assert not one.done()
        (tmp_path / "open").touch()
        assert one.result().tolist() == [0, 1]


class Deadly(Gated):
    """Sample 3 ends the first worker that reads it."""

    def __getitem__(self, index: int) -> int:
        if index == 3 and not self.file.exists():
            self.file.touch()
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Event().wait()
        return index


@covering(method=PROCESS_POOLS)
def test_a_killed_worker_changes_nothing(method: str, tmp_path: Path) -> None:
    with ShardedDataLoader(Deadly(tmp_path / "died"), 1, pool=ProcessPool(1, start_method=method)) as loader:  # type: ignore[arg-type]
        iterator = iter(loader)
        read = [next(iterator).tolist()]
        loader.prefetch = 1
        assert loader.fetch([3, 6]).result().tolist() == [3, 6]
        assert read + [batch.tolist() for batch in iterator] == [[n] for n in range(8)]


@covering(pool=POOLS)
def test_a_future_that_is_dropped_or_cancelled_leaves_nothing(pool: str) -> None:
    with loader_of(pool) as loader:
        iterator = iter(loader)
        next(iterator)
        futures = [loader.fetch([n]) for n in range(5)]
        assert futures[0].cancel()
        with pytest.raises(CancelledError):
            futures[0].result()
        del futures
        gc.collect()
        next(iterator)
        assert len(loader._pipeline._runs) == 1 + (loader._epochs._kept is not None)


def test_samples_of_a_mixture_are_named_as_indices_names_them() -> None:
    datasets = [[f"a{i}" for i in range(9)], [f"b{i}" for i in range(4)]]
    for given in ({"shuffle": True}, {}):
        loader = ShardedDataLoader(interleave(datasets, **given), 3)  # type: ignore[arg-type]
        assert loader.fetch(loader.indices(0, 1)).result() == [*loader][1]
        assert loader.fetch([(1, 3), (0, -1)]).result() == ["b3", "a8"]
        assert isinstance(loader.fetch([(2, 0)]).exception(), IndexError)
        assert isinstance(loader.fetch([(1, 4)]).exception(), IndexError)


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_batch_of_a_shared_dataset_is_read_in_its_epoch_or_not_at_all(pool: str) -> None:
    mixed = interleave([range(9), range(100, 109)], shuffle=True, stop=12, seed=1)
    with ShardedDataLoader(mixed, 4, pool=make_pool(pool)) as loader:
        expected = loader.fetch([0, 1, 2, 3], epoch=3).result().tolist()
        pending = loader.fetch([0, 1, 2, 3], epoch=3)
        with pytest.raises(ValueError, match="cannot fetch a batch of epoch 1"):
            loader.fetch([0], epoch=1)
        if pool == "inline":
            loader.read(0, epoch=1)  # reads now, and goes back
        else:
            with pytest.raises(RuntimeError, match="cannot read in epoch 1 while threads read epoch 3"):
                loader.read(0, epoch=1)
        assert pending.result().tolist() == expected
        loader.fetch([0], epoch=1).cancel()
        late = loader.fetch([0, 1, 2, 3], epoch=3)
        next(iter(loader))
        with pytest.raises(
            RuntimeError, match=r"epoch 3 was not received before epoch 0 began.* call result\(\) before"
        ):
            late.result()


THREAD = {"num_workers": 1, "thread_pool": True}


@pytest.mark.parametrize("workers", [{}, THREAD, THREAD | {"persistent_workers": True}, {"num_workers": 1}], ids=str)
def test_so_it_is_with_the_drop_in(workers: dict[str, Any]) -> None:
    loader = DataLoader(interleave([range(9), range(100, 109)], shuffle=True, stop=12, seed=1), 4, **workers)
    loader.set_epoch(0)
    batches = iter(loader)
    next(batches)
    expected, late = loader.fetch([0, 1, 2, 3]).result().tolist(), loader.fetch([0, 1, 2, 3])
    list(batches)
    loader.set_epoch(1)
    if workers in ({"num_workers": 1}, THREAD):  # they have read it before they ended with their epoch
        assert late.result().tolist() == expected
        return
    with pytest.raises(RuntimeError, match=r"epoch 0 was not received before epoch 1 began.* call result\(\) before"):
        late.result()
    assert loader.fetch([0, 1, 2, 3]).result().tolist() != expected


def test_it_comes_in_shards_on_devices_and_through_the_transform() -> None:
    loader = ShardedDataLoader(
        range(9), 4, devices=["cpu", "cpu"], device_transform=lambda batch: batch * 10, num_workers=1, thread_pool=True
    )
    with loader:
        assert [shard.tolist() for shard in loader.fetch([5, 1, 2]).result()] == [[50, 10], [20]]


def test_a_loader_lives_as_long_as_its_futures() -> None:
    future = loader_of("thread").fetch([1, 2])
    gc.collect()
    assert future.result().shape == (2, 2)


def test_a_changed_dataset_is_sent_before_a_batch_is_fetched() -> None:
    data = [1, 2, 3, 4]
    with ShardedDataLoader(data, 2, num_workers=1) as loader:
        assert len(list(loader)) == 2
        data[0] = 7
        loader.refresh()
        assert loader.fetch([0]).result().tolist() == [7]
        assert torch.cat(list(loader)).tolist() == [7, 2, 3, 4]


def test_threads_may_ask_for_one_batch_together() -> None:
    with loader_of("thread") as loader:
        future, found = loader.fetch([1, 2]), []
        threads = [threading.Thread(target=lambda: found.append(future.result())) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4 and all(one is found[0] for one in found)
