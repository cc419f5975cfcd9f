"""Hugging Face datasets: tables in bulk, and streams with buffers and epochs, both resumed exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from indices import BOTH, IN_FRAMEWORKS

import sharded_loader
from sharded_loader import ShardedDataLoader

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
def test_the_epoch_of_a_shuffled_stream_is_set_on_the_dataset(datasets: Any, make: Any) -> None:
    stream = table(datasets).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=24).with_format("torch")
    loader = make(stream, batch_size=4, num_workers=2)
    orders = []
    for epoch in (0, 1, 0):
        loader.set_epoch(epoch)
        orders.append(xs(loader))
    assert orders[0] == orders[2] != orders[1]


def shuffled(datasets: Any, shards: int = 4) -> Any:
    return table(datasets, 64).to_iterable_dataset(num_shards=shards).shuffle(seed=1, buffer_size=10)


def test_each_epoch_of_a_shuffled_stream_has_another_order_without_set_epoch(datasets: Any) -> None:
    loader, told = (ShardedDataLoader(shuffled(datasets), 4, num_workers=1) for _ in range(2))
    orders = [xs(loader) for _ in range(3)]
    told.set_epoch(2)
    assert orders[0] != orders[1] != orders[2] == xs(told)


def plus_one(row: Any) -> Any:
    return {"x": row["x"] + 1}


class Holds(torch.utils.data.IterableDataset[Any]):
    """A dataset of the user's around a stream, which passes its state on."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self) -> Any:
        return iter(self.stream)


def of_one_node(stream: Any) -> Any:
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(stream, rank=1, world_size=2)


STREAMS: dict[str, Any] = {
    "without a buffer": lambda hf: table(hf, 64).to_iterable_dataset(num_shards=4),
    "shuffled": shuffled,
    "one shard": lambda hf: shuffled(hf, shards=1),
    "a buffer of one": lambda hf: table(hf, 64).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=1),
    "mapped after that": lambda hf: shuffled(hf).map(plus_one),
    "interleaved": lambda hf: hf.interleave_datasets([shuffled(hf), shuffled(hf)], probabilities=[0.4, 0.6], seed=2),
    "concatenated": lambda hf: hf.concatenate_datasets([shuffled(hf), table(hf).to_iterable_dataset()]),
    "concatenated, without a buffer": lambda hf: hf.concatenate_datasets(
        [table(hf, 32).to_iterable_dataset(num_shards=4), table(hf, 32).to_iterable_dataset(num_shards=4)]
    ),
    "of one node": lambda hf: of_one_node(shuffled(hf)),
    "held by another dataset": lambda hf: Holds(shuffled(hf)),
    "in a mixture of ours": lambda hf: sharded_loader.interleave([shuffled(hf), shuffled(hf)], weights=[1, 2]),
}


@BOTH
@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize("stream", STREAMS)
def test_no_sample_is_lost_in_a_shuffle_buffer(
    datasets: Any, make: Any, num_workers: int, epoch: int, stream: str
) -> None:
    """The state that such a dataset gives leaves out the samples in its buffer, or cannot be loaded."""
    first, resumed = (make(STREAMS[stream](datasets), batch_size=3, num_workers=num_workers) for _ in range(2))
    first.set_epoch(epoch)
    batches = iter(first)
    for done in range(1, 8):
        next(batches)
        if done in (1, 4, 7):
            resumed.load_state_dict(first.state_dict())
            found = xs(resumed)
    assert found == xs(batches)
    assert len(found) > 2


@BOTH
def test_a_stream_that_draws_its_own_seed_cannot_be_resumed_elsewhere(datasets: Any, make: Any) -> None:
    first, resumed = (
        make(table(datasets).to_iterable_dataset().shuffle(buffer_size=24), batch_size=4) for _ in range(2)
    )
    batches = iter(first)
    next(batches)
    resumed.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="other samples"):
        xs(resumed)
