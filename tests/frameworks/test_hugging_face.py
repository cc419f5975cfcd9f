"""Hugging Face datasets: map-style tables in bulk, and streaming ones of several shards, both resumed exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader

pytestmark = IN_FRAMEWORKS


@pytest.fixture(scope="module", autouse=True)
def datasets() -> Any:
    found = pytest.importorskip("datasets")
    found.disable_progress_bars()
    found.Dataset.from_dict({"x": [0]}).with_format("torch")[0]  # what Arrow starts, it starts once in a process
    return found


def table(datasets: Any, length: int = 24) -> Any:
    return datasets.Dataset.from_dict({"x": list(range(length)), "y": [[i, -i] for i in range(length)]})


def xs(loader: Any) -> list[list[int]]:
    return [batch["x"].tolist() for batch in loader]


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_table_in_torchs_format_makes_the_batches_of_torchs_loader(
    datasets: Any, make: Any, num_workers: int
) -> None:
    data = table(datasets).with_format("torch")
    expected = list(torch.utils.data.DataLoader(data, batch_size=5))
    found = list(make(data, batch_size=5, num_workers=num_workers))
    assert len(found) == len(expected) == 5
    for ours, theirs in zip(found, expected, strict=True):
        assert set(ours) == {"x", "y"}
        assert all(torch.equal(ours[name], theirs[name]) and ours[name].dtype == theirs[name].dtype for name in ours)


@BOTH
def test_a_shuffled_table_is_resumed_exactly(datasets: Any, make: Any) -> None:
    options = {"batch_size": 4, "shuffle": True, "seed": 3}
    loader = make(table(datasets).with_format("torch"), **options)
    batches = iter(loader)
    next(batches)
    state, rest = loader.state_dict(), xs(batches)
    again = make(table(datasets).with_format("torch"), num_workers=2, **options)
    again.load_state_dict(state)
    assert xs(again) == rest


@BOTH
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_streaming_reads_every_sample_once(datasets: Any, make: Any, num_workers: int) -> None:
    stream = table(datasets).to_iterable_dataset(num_shards=4).with_format("torch")
    found = xs(make(stream, batch_size=4, num_workers=num_workers))
    assert sorted(sum(found, [])) == list(range(24))


def test_the_drop_in_streams_as_torchs_loader_does(datasets: Any) -> None:
    stream = table(datasets).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=6).with_format("torch")
    found = xs(DataLoader(stream, batch_size=4, num_workers=2))
    assert found == xs(torch.utils.data.DataLoader(copy.deepcopy(stream), batch_size=4, num_workers=2))


def test_streams_do_not_depend_on_the_workers(datasets: Any) -> None:
    stream = table(datasets).to_iterable_dataset(num_shards=4).with_format("torch")
    assert len({str(xs(ShardedDataLoader(stream, 4, num_workers=n))) for n in (0, 1, 3)}) == 1


@BOTH
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("done", [1, 3])
def test_streaming_is_resumed_exactly(datasets: Any, make: Any, num_workers: int, done: int) -> None:
    loaders = [
        make(
            table(datasets).to_iterable_dataset(num_shards=4).with_format("torch"),
            batch_size=4,
            num_workers=num_workers,
        )
        for _ in range(2)
    ]
    batches = iter(loaders[0])
    for _ in range(done):
        next(batches)
    state, rest = loaders[0].state_dict(), xs(batches)
    loaders[1].load_state_dict(state)
    assert rest
    assert xs(loaders[1]) == rest


@BOTH
def test_the_epoch_of_a_shuffled_stream_is_set_on_the_dataset(datasets: Any, make: Any) -> None:
    stream = table(datasets).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=24).with_format("torch")
    loader = make(stream, batch_size=4, num_workers=2)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(xs(loader))
    assert orders[0] == orders[2] != orders[1]
