"""``with_source=True``: each batch with the source and the index of the samples that were really read."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, make_pool

from sharded_loader import (
    ArrayDataset,
    Dataset,
    LoaderWarning,
    PackSampler,
    Placement,
    SampleSource,
    ShardedDataLoader,
    ShuffleBuffer,
    interleave,
)
from sharded_loader.batchify import Pack
from sharded_loader.torch import DataLoader


class Named(Dataset):
    """Samples that say where they are: 1,000 times the number of the dataset, and the index; some cannot be read."""

    def __init__(self, number: int, length: int, bad: tuple[int, ...] = ()) -> None:
        self.number, self.length, self.bad = number, length, bad

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if index in self.bad:
            raise ValueError(f"sample {index} is damaged")
        return 1000 * self.number + index


def in_dataset(batch: Any, source: SampleSource) -> None:
    """The batch has the samples that its source names."""
    assert source.source.dtype == source.index.dtype == torch.int64
    assert (1000 * source.source + source.index).tolist() == batch.tolist()


DATASETS: dict[str, Callable[[], Any]] = {
    "mixture": lambda: interleave([Named(0, 9), Named(1, 14)], [1, 2]),
    "shuffled mixture": lambda: interleave([Named(0, 9), Named(1, 14)], [1, 2], shuffle=True),
    "transformed mixture": lambda: interleave([Named(0, 9), Named(1, 14)], shuffle=True).transform(int),
    "arrays": lambda: interleave([np.arange(9), 1000 + np.arange(14)], stop="each_once", shuffle=True),
}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("pool", POOLS)
def test_the_batches_stay_what_they_are_and_their_sources_are_true(pool: str, kind: str) -> None:
    given: dict[str, Any] = {"batch_size": 4, "shuffle": kind == "mixture", "seed": 3, "num_replicas": 2, "rank": 1}
    plain = [batch.tolist() for batch in ShardedDataLoader(DATASETS[kind](), **given)]
    with ShardedDataLoader(DATASETS[kind](), pool=make_pool(pool), with_source=True, **given) as loader:
        first, _ = loader.peek()
        found = [in_dataset(*pair) or pair for pair in loader]
        assert [batch.tolist() for batch, _ in found] == plain and first.tolist() == plain[0]
        for step, (batch, source) in enumerate(found):
            again, same = loader.batch(0, step)
            assert again.tolist() == batch.tolist() and same.index.tolist() == source.index.tolist()
            assert list(zip(source.source.tolist(), source.index.tolist(), strict=True)) == loader.indices(0, step)


@pytest.mark.parametrize("pool", ["inline", "fork"])
def test_what_was_left_out_or_replaced_is_not_named(pool: str) -> None:
    data = Named(0, 20, bad=(3, 4, 11))
    for action, size in (("skip", 17), ("replace", 20)):
        for shards in (None, 2):
            with ShardedDataLoader(
                data,
                6,
                shuffle=True,
                seed=2,
                pool=make_pool(pool),
                on_error=action,
                num_shards=shards,
                with_source=True,
            ) as loader:  # type: ignore[call-overload]
                count = 0
                for batch, source in loader:
                    for one, named in zip(
                        [batch] if shards is None else batch, [source] if shards is None else source, strict=True
                    ):
                        in_dataset(one, named)
                        count += len(one)
                assert count == size


def test_a_shard_that_is_lost_has_no_source() -> None:
    with pytest.warns(LoaderWarning, match="left out"):
        for batch, source in ShardedDataLoader(
            Named(0, 8, bad=(0, 1)), 4, on_error="skip", num_shards=2, with_source=True
        ):
            assert len(batch) == len(source)
            [in_dataset(*pair) for pair in zip(batch, source, strict=True)]


def test_evaluation_devices_fields_and_resident_rows() -> None:
    pairs = list(ShardedDataLoader(Named(0, 5), 2, evaluate=True, num_replicas=2, rank=1, with_source=True))
    assert [(batch.tolist(), real, source.index.tolist()) for (batch, real), source in pairs] == [
        ([1, 3], 2, [1, 3]),
        ([3, 3], 0, [3, 3]),
    ]
    data = ArrayDataset(np.arange(6), np.arange(6) * 2)
    for placement in (Placement("cpu", resident=True), Placement("cpu", device_transform=lambda batch: batch)):
        for (numbers, doubles), source in ShardedDataLoader(data, 4, device=placement, shuffle=True, with_source=True):
            assert numbers.tolist() == source.index.tolist() and doubles.tolist() == (2 * source.index).tolist()


def test_packed_rows_name_their_documents() -> None:
    documents = [[n] * (n % 5 + 1) for n in range(1, 20)]
    sampler = PackSampler(list(map(len, documents)), tokens=8, rows=2, seed=1)
    for batch, source in ShardedDataLoader(documents, batch_sampler=sampler, collate_fn=Pack(8), with_source=True):
        begins = batch["cu_seqlens"][:-1].long()
        tokens = batch["input_ids"][batch["segment_ids"] > 0]
        assert (source.index + 1).tolist() == tokens[begins].tolist()


def test_keys_that_are_no_numbers_are_a_list() -> None:
    pairs = list(ShardedDataLoader({"a": 1, "b": 2}, 2, sampler=["b", "a"], with_source=True))
    assert [(batch.tolist(), *source) for batch, source in pairs] == [([2, 1], pytest.approx([0, 0]), ["b", "a"])]


def numbers(part: int, parts: int) -> Any:
    yield from range(part * 1000, part * 1000 + 5 + part)


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_iterable_data_names_the_part_and_the_running_number(pool: str) -> None:
    given: dict[str, Any] = {"batch_size": 3, "streams": 2, "with_source": True}
    with ShardedDataLoader(numbers, pool=make_pool(pool), **given) as loader:
        batches = iter(loader)
        in_dataset(*next(batches))
        state = json.loads(json.dumps(loader.state_dict()))
        rest = [batch.tolist() for batch, source in batches if in_dataset(batch, source) is None]
    other = ShardedDataLoader(numbers, **given)
    other.load_state_dict(state)
    assert [batch.tolist() for batch, source in other if in_dataset(batch, source) is None] == rest


@pytest.mark.parametrize(
    "options",
    [{}, {"weights": [3, 1]}, {"stop": "all_exhausted"}, {"stop": 30}, {"weights": [(0, [1, 3]), (9, [3, 1])]}],
    ids=["first", "weights", "all", "number", "schedule"],
)
def test_a_mixture_of_streams_names_its_datasets(options: Any) -> None:
    def stream(number: int) -> Callable[[int, int], Any]:
        return lambda part, parts: iter([number] * (12 + number))

    mixed = interleave([stream(0), stream(1)], seed=3, **options)
    seen = set()
    for batch, source in ShardedDataLoader(mixed, 3, streams=3, with_source=True):
        assert batch.tolist() == source.source.tolist()
        seen.update(batch.tolist())
    assert seen == {0, 1}


def test_a_mixture_whose_order_is_known_only_where_it_is_read_is_an_error() -> None:
    streams = [lambda: iter(range(5)), lambda: iter(range(5))]
    for mixed, steps in ((interleave(streams, stop="each_once"), None), (interleave(streams), 4)):
        with pytest.raises(TypeError, match="let each stream yield its number with its samples"):
            ShardedDataLoader(mixed, 2, steps_per_epoch=steps, with_source=True)
    buffered = ShardedDataLoader(ShuffleBuffer(lambda: iter(range(5)), 3), 2, streams=1, with_source=True)
    assert next((source.source.tolist(), source.index.tolist()) for _, source in buffered) == ([0, 0], [0, 1])


@pytest.mark.parametrize("kind", ["mixture", "arrays", "one", "parts"])
def test_sources_are_in_host_memory_whatever_the_default_device_of_torch(kind: str) -> None:
    others: dict[str, Callable[[], Any]] = {"one": lambda: range(9), "parts": lambda: lambda part, parts: range(9)}
    loader: Any = ShardedDataLoader({**DATASETS, **others}[kind](), 4, with_source=True, seed=0)
    torch.set_default_device("meta")
    try:
        _, source = next(iter(loader))
    finally:
        torch.set_default_device(None)
    assert source.source.device.type == source.index.device.type == "cpu"


def test_the_drop_in_gives_sources_too() -> None:
    loader = DataLoader(Named(0, 5), batch_size=2, shuffle=True, seed=1, with_source=True)  # type: ignore[arg-type]
    assert sorted(index for batch, source in loader if in_dataset(batch, source) is None for index in source.index) == [
        0,
        1,
        2,
        3,
        4,
    ]
