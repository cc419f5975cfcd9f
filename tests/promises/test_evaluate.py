"""``evaluate=True``: each sample counts once over all ranks, and all ranks take equally many steps of whole batches."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, made, make_pool
from samples import Drawing

from sharded_loader import FixedBucketSampler, PackSampler, SequentialSampler, ShardedDataLoader, batchify, interleave

KINDS: dict[str, Any] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "sampler": lambda: {"sampler": SequentialSampler(23)},
    "list": lambda: {"sampler": list(range(23))},
    "torch": lambda: {"sampler": torch_data.SequentialSampler(range(23))},
    "torch, random": lambda: {"sampler": torch_data.RandomSampler(range(23))},
    "costs": lambda: {"costs": np.arange(1, 24)},
}


def ranks_of(replicas: int, length: int = 23, **given: Any) -> list[ShardedDataLoader[Any]]:
    given = {"batch_size": 4, "seed": 7, "evaluate": True, **given}
    return [ShardedDataLoader(range(length), num_replicas=replicas, rank=rank, **given) for rank in range(replicas)]


def counted(loaders: list[ShardedDataLoader[Any]]) -> Counter[int]:
    """What counts in one epoch. All ranks take equally many steps, and all batches are whole."""
    found: Counter[int] = Counter()
    for step in zip(*loaders, strict=True):
        for batch, real in step:
            assert len(batch) == 4
            found.update(batch[:real].tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_each_sample_counts_once(kind: str, replicas: int) -> None:
    loaders = ranks_of(replicas, **KINDS[kind]())
    steps = {len(loader) for loader in loaders}
    assert steps == {-(-23 // (4 * replicas))}
    for _ in range(3):
        assert counted(loaders) == Counter(range(23))


@pytest.mark.parametrize("pool", POOLS)
def test_in_every_pool(pool: str) -> None:
    workers = make_pool(pool)
    with ShardedDataLoader(range(10), 4, num_replicas=3, rank=2, evaluate=True, pool=workers) as loader:
        found = [(batch.tolist(), real) for batch, real in loader]
        assert found == [([2, 5, 8, 8], 3)]
        assert loader.peek()[1] == 3


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batches_of_a_batch_sampler_count_or_are_fillers(replicas: int) -> None:
    lengths = np.arange(1, 24)
    for sampler in (
        [list(range(n, min(n + 4, 23))) for n in range(0, 23, 4)],
        FixedBucketSampler(lengths, 4, num_buckets=2),
    ):
        loaders = [
            ShardedDataLoader(range(23), batch_sampler=sampler, num_replicas=replicas, rank=rank, evaluate=True)
            for rank in range(replicas)
        ]
        found: Counter[int] = Counter()
        for step in zip(*loaders, strict=True):
            for batch, real in step:
                assert real in (0, len(batch))
                found.update(batch[:real].tolist())
        assert found == Counter(range(23))


def test_shards_on_devices_are_whole_and_the_first_samples_count() -> None:
    loaders = ranks_of(2, length=9, devices=["cpu", "cpu"])
    found = [[([shard.tolist() for shard in shards], real) for shards, real in loader] for loader in loaders]
    assert found == [[([[0, 2], [4, 6]], 4), ([[8, 8], [8, 8]], 1)], [([[1, 3], [5, 7]], 4), ([[7, 7], [7, 7]], 0)]]


def test_a_resident_dataset_and_a_column_dataset() -> None:
    data = torch.arange(10)
    for arguments in ({"device": "cpu", "resident": True}, {"num_workers": 1, "thread_pool": True}):
        found = [
            index
            for rank in range(3)
            for batch, real in made(data, 3, num_replicas=3, rank=rank, evaluate=True, **arguments)
            for index in batch[:real].tolist()
        ]
        assert sorted(found) == list(range(10))


def test_what_leaves_samples_out_or_repeats_them_is_refused() -> None:
    for arguments, words in [
        ({"last_batch": "discard"}, "last_batch='discard'"),
        ({"last_batch": "rollover"}, "last_batch='rollover'"),
        ({"drop_last": True}, "last_batch='discard'"),
        ({"steps_per_epoch": 3}, "steps_per_epoch"),
        ({"on_error": "skip"}, "on_error='skip'"),
        ({"on_error": "replace"}, "on_error='replace'"),
    ]:
        with pytest.raises(ValueError, match=words):
            ShardedDataLoader(range(4), 2, evaluate=True, **arguments)
    with pytest.raises(ValueError, match="iterable data.*leave out evaluate"):
        ShardedDataLoader(lambda: iter(range(4)), 2, evaluate=True)


def test_a_sampler_that_yields_fewer_items_than_its_length_is_an_error() -> None:
    class Short(torch_data.Sampler[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

        def __len__(self) -> int:
            return 6

    with pytest.raises(ValueError, match="fewer items than its length, 6"):
        list(ShardedDataLoader(range(6), 4, sampler=Short(), evaluate=True))


def test_an_error_is_raised_in_its_place_and_a_function_may_replace_a_sample() -> None:
    iterator = iter(ShardedDataLoader(Drawing(6, [3]), 2, evaluate=True))
    assert next(iterator)[1] == 2
    with pytest.raises(ValueError, match="bad 3"):
        next(iterator)
    assert next(iterator)[1] == 2
    loader = ShardedDataLoader(Drawing(6, [3]), 4, evaluate=True, on_error=lambda error: np.array([-1, 0]))
    assert [(batch[:, 0].tolist(), real) for batch, real in loader] == [([0, 1, 2, -1], 4), ([4, 5, 5, 5], 2)]


def test_with_packed_documents_real_counts_documents() -> None:
    def reals(rank: int) -> list[int]:
        sampler, pack = PackSampler([3] * 5, tokens=8, rows=2, seed=0), batchify.Pack(tokens=8)
        ranks = {"num_replicas": 3, "rank": rank, "evaluate": True}
        loader = ShardedDataLoader([[1] * 3] * 5, batch_sampler=sampler, batchify_fn=pack, **ranks)
        return [real for _, real in loader]

    assert sorted(map(reals, range(3))) == [[0], [2], [3]]


def test_fillers_are_the_same_after_weights_were_set_and_when_a_step_is_looked_up() -> None:
    ranks = []
    for rank in range(3):
        mixed = interleave([[0, 1, 2], [10]], [1, 1], seed=1, stop="each_once", shuffle=True)
        loader = ShardedDataLoader(mixed, 1, seed=1, evaluate=True, num_replicas=3, rank=rank)
        iterator = iter(loader)
        first = next(iterator)
        loader.set_weights([3, 1])
        rest = list(iterator)  # the last one of two ranks is a filler
        assert [real for _, real in rest] == [int(rank == 0)]
        ranks.append((loader, [first, *rest]))
    for loader, batches in ranks:
        for step, (batch, real) in enumerate(batches):
            again = loader.batch(0, step)
            assert (again[0].tolist(), again[1]) == (batch.tolist(), real)
