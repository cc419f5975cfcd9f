"""What a loader tells about itself, and what can be set."""

import copy
import pickle
from typing import Any

import pytest
import torch

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool
from sharded_loader import torch as torchs
from sharded_loader.base import imports


def nothing(number: int) -> None:
    """A worker_init_fn."""


def test_what_other_libraries_read_has_the_values_of_torch_s_loader() -> None:
    theirs = torch.utils.data.DataLoader(range(10), 4)  # type: ignore[arg-type]
    loader = ShardedDataLoader(range(10), 4)
    for name in ("prefetch_factor", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"):
        assert getattr(loader, name) == getattr(theirs, name), name
    for name in ("persistent_workers", "in_order", "pin_memory_device", "drop_last", "batch_size", "num_workers"):
        assert getattr(loader, name) == getattr(theirs, name, True), name  # torch 2.4 has no in_order
    assert loader.collate_fn([1, 2]).tolist() == [1, 2]
    assert ShardedDataLoader(range(4), 2, batchify_fn=list).collate_fn is list


def test_with_workers_they_tell_of_the_pool() -> None:
    with ShardedDataLoader(range(10), 4, num_workers=3, prefetch=7, worker_init_fn=nothing, timeout=9) as loader:
        assert (loader.prefetch_factor, loader.persistent_workers, loader.timeout) == (2, True, 9)
        assert loader.worker_init_fn is nothing and isinstance(loader.pool, ProcessPool)
        assert loader.multiprocessing_context.get_start_method() == loader.pool.start_method
        loader.prefetch = 0
        assert loader.prefetch_factor == 1
    with ShardedDataLoader(range(10), 4, pool=ThreadPool(2)) as loader:
        assert loader.multiprocessing_context is None and loader.persistent_workers and loader.timeout == 0


@pytest.mark.parametrize(("workers", "given", "found"), [(3, None, 6), (3, 5, 5), (3, -1, 0), (0, None, 0)])
def test_prefetch_is_twice_the_workers_unless_it_is_given(workers: int, given: Any, found: int) -> None:
    pool = ThreadPool(workers) if workers else InlinePool()
    with ShardedDataLoader(range(10), 4, pool=pool, prefetch=given) as loader:
        assert loader.prefetch == found
        loader.prefetch = 7
        assert loader.prefetch == 7
        for no_number in ("2", True, 2.5, None):
            with pytest.raises(TypeError, match="device_prefetch must be an integer"):
                loader.device_prefetch = no_number
        loader.device_prefetch = 4
        assert loader.device_prefetch == 0  # without devices nothing is copied ahead


def test_shard_weights_are_copied_and_need_shards() -> None:
    loader = ShardedDataLoader(range(10), 4, num_shards=2)
    weights = [3.0, 1.0]
    loader.shard_weights = weights
    weights[0] = 9.0
    assert loader.shard_weights == [3.0, 1.0]
    loader.shard_weights = None
    assert loader.shard_weights is None
    with pytest.raises(ValueError, match="shard_weights need shards"):
        ShardedDataLoader(range(10), 4).shard_weights = [1.0]


def test_a_repr_tells_of_a_dataset_that_is_empty_by_now_and_of_the_end() -> None:
    loader = ShardedDataLoader([1, 2, 3], 2)
    loader.dataset.clear()
    loader.refresh()
    assert repr(loader).startswith("ShardedDataLoader(0 samples, 0 batches of 2")
    loader.close()
    assert repr(loader) == "ShardedDataLoader(closed)"


READ_ONLY = sorted(
    name
    for name in dir(ShardedDataLoader)
    if isinstance(one := getattr(ShardedDataLoader, name), property) and one.fset is None
)


def test_an_attribute_that_is_not_for_setting_cannot_be_set() -> None:
    loader = ShardedDataLoader(range(4), 2)
    for name in READ_ONLY:
        with pytest.raises(AttributeError):
            setattr(loader, name, None)
    loader.mine = 3  # type: ignore[attr-defined]
    assert loader.mine == 3 and len(list(loader)) == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", [ShardedDataLoader, torchs.DataLoader])
def test_iterators_have_the_method_next_of_old_scripts(kind: Any) -> None:
    batches = iter(kind(range(4), 2))
    assert [batches.next().tolist(), batches.next().tolist()] == [[0, 1], [2, 3]]
    with pytest.raises(StopIteration):
        batches.next()


def test_arguments_of_other_loaders_get_advice() -> None:
    advice = {"shm_size": "leave it out", "num_threads": "write num_workers= and", "ctx_list": "write devices= instead"}
    for name, said in (advice | {"batchsize": "did you mean 'batch_size'", "image_size": r"see help\(Sharded"}).items():
        with pytest.raises(TypeError, match=f"'{name}'.*{said}"):
            ShardedDataLoader(range(4), 2, **{name: 1})


def test_what_a_loader_was_given_makes_another_one_like_it() -> None:
    given: dict[str, Any] = {"shuffle": True, "seed": 3, "num_workers": 1, "thread_pool": True}
    data = list(range(10))
    with ShardedDataLoader(data, 4, **given) as loader:
        assert dict(loader.arguments) == {"dataset": data, "batch_size": 4, **given}
        assert loader.arguments["dataset"] is data
        with ShardedDataLoader(**loader.arguments) as other:
            assert [batch.tolist() for batch in other] == [batch.tolist() for batch in loader]
    with pytest.raises(TypeError):
        loader.arguments["seed"] = 4  # type: ignore[index]


def test_a_loader_of_a_users_class_knows_what_its_base_was_given() -> None:
    class Evens(ShardedDataLoader[Any]):
        def __init__(self, size: int, **given: Any) -> None:
            super().__init__(range(0, size, 2), 2, **given)

    loader = Evens(6, drop_last=True)
    assert dict(loader.arguments) == {"dataset": range(0, 6, 2), "batch_size": 2, "drop_last": True}
    assert [batch.tolist() for batch in ShardedDataLoader(**loader.arguments)] == [[0, 2]]


def test_results_are_gathered_on_the_first_device() -> None:
    meta = torch.device("meta")
    for devices in ({"devices": [meta, "cpu"]}, {"device": meta}):
        loader: ShardedDataLoader[Any] = ShardedDataLoader(range(4), 4, **devices)
        assert loader.gather([torch.ones(2), torch.ones(1)]).device.type == "meta"
        assert loader.gather([torch.ones(2), torch.ones(1)], "cpu").tolist() == [1, 1, 1]
    assert ShardedDataLoader(range(4), 4, num_shards=2).gather([{"x": torch.ones(1)}] * 2)["x"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({}, InlinePool),
        ({"num_workers": 2}, ProcessPool),
        ({"num_workers": 2, "thread_pool": True}, ThreadPool),
        ({"num_workers": 2, "pool": "thread"}, ThreadPool),
        ({"num_workers": 2, "pool": "inline"}, InlinePool),
        ({"num_workers": -1}, InlinePool),
        ({"pool": ThreadPool(3)}, ThreadPool),
    ],
    ids=str,
)
def test_the_arguments_choose_the_pool_and_start_nothing(given: dict[str, Any], kind: type) -> None:
    loader = ShardedDataLoader(range(10), 4, **given)
    assert type(loader.pool) is kind and not loader.pool.started


def test_a_loader_over_plain_data_asks_for_no_satellite_but_its_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    instruments = {key: place for key, place in imports.PROVIDED.items() if ".instruments." in place}
    monkeypatch.setattr(imports, "_providers", instruments)
    dataset = SimpleDataset(range(10)).transform(str)
    assert len(list(ShardedDataLoader(dataset, 4, shuffle=True, steps_per_epoch=3))) == 3


@pytest.mark.parametrize("take", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_loader_is_neither_pickled_nor_copied_and_says_what_to_do(take: Any) -> None:
    with ShardedDataLoader(range(4), 2) as loader, pytest.raises(TypeError, match="from the same arguments"):
        take(loader)
