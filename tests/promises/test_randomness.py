"""P5: what is drawn depends on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from random_samples import (
    DrawingByIndex,
    DrawingEverywhere,
    DrawingGlobally,
    DrawingWithoutIndex,
    Numbers,
    all_kinds,
    augment,
    draw_for_the_batch,
    jitter,
    killing,
)
from samples import Drawing, DrawingInBatches, DrawingInItems

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool, sample_rng
from sharded_loader.engine.pool import Pool
from sharded_loader.randomness import rng


def epochs(dataset: Any, pool: Pool, count: int = 2, **options: Any) -> list[Any]:
    options = {"batch_size": 4, "seed": 3} | options
    with ShardedDataLoader(dataset, pool=pool, **options) as loader:
        return [
            [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in loader]
            for _ in range(count)
        ]


def test_transforms_that_draw_globally_give_the_same_in_every_pool_if_seeded(new_pool: Callable[..., Pool]) -> None:
    dataset = SimpleDataset(Numbers()).transform(jitter, seeded=True)
    expected = epochs(dataset, InlinePool())
    assert epochs(dataset, new_pool(1)) == epochs(dataset, new_pool(3), prefetch=1) == expected
    drawn = [number for epoch in expected for batch in epoch for sample in batch for number in sample[1:]]
    assert len(set(drawn)) == 2 * 2 * 12


def test_a_batchify_fn_draws_by_epoch_batch_and_shard(new_pool: Callable[..., Pool]) -> None:
    options: dict[str, Any] = {"batchify_fn": draw_for_the_batch, "num_shards": 2}
    expected = epochs(Numbers(), InlinePool(), **options)
    assert epochs(Numbers(), new_pool(1), **options) == epochs(Numbers(), new_pool(3), **options) == expected
    assert len({shard[-1] for epoch in expected for batch in epoch for shard in batch}) == 2 * 3 * 2


def test_a_bulk_read_has_to_say_which_sample_draws(pool: Pool) -> None:
    with ShardedDataLoader(DrawingWithoutIndex(), 4, pool=pool) as loader:
        with pytest.raises(ValueError, match=r"call sample_rng\(index\) with the index"):
            next(iter(loader))


def test_an_index_that_comes_twice_draws_the_same_twice_and_another_in_the_next_epoch(pool: Pool) -> None:
    first, second = epochs(Drawing(), pool, sampler=[5, 2, 5, 3])
    (batch,), (later,) = first, second
    assert batch[0] == batch[2] != later[0] == later[2]
    assert batch[0][0] == later[0][0] == 5


@pytest.mark.parametrize("dataset", [DrawingByIndex(), DrawingInItems(), DrawingInBatches()])
def test_what_an_index_draws_does_not_depend_on_its_batch(pool: Pool, dataset: Any) -> None:
    sampler = [7, 7, 3, 7, 5]
    (batches,) = epochs(dataset, pool, 1, batch_size=3, sampler=sampler)
    alone = ShardedDataLoader(Drawing(), 1, seed=3)
    assert [sample for batch in batches for sample in batch] == [alone.read(i, epoch=0).tolist() for i in sampler]


def test_a_bulk_read_that_fails_changes_nothing_that_the_other_samples_draw(pool: Pool) -> None:
    sampler = [7, 7, 3, 7, 5, 8]
    (batches,) = epochs(DrawingInBatches(bad=[3]), pool, 1, batch_size=6, sampler=sampler, on_error="skip")
    alone = ShardedDataLoader(Drawing(), 1, seed=3)
    assert batches == [[alone.read(index, epoch=0).tolist() for index in sampler if index != 3]]


def test_samples_repeated_to_fill_a_rank_draw_the_same_again(pool: Pool) -> None:
    # Rank 1 has sample 1, and sample 1 again to be as long as rank 0.
    options: dict[str, Any] = {"sampler": [1, 1, 0, 2, 5], "num_replicas": 2, "rank": 1, "batch_size": 3}
    (batches,) = epochs(DrawingInBatches(), pool, 1, **options)
    alone = ShardedDataLoader(Drawing(), 1, seed=3)
    assert batches == [[alone.read(index, epoch=0).tolist() for index in (1, 2, 1)]]


def test_no_two_generators_of_a_sample_draw_the_same(pool: Pool) -> None:
    # While one thread has seeded the global generators, another that has not draws from those seeds.
    unseeded = not isinstance(pool, ThreadPool)
    dataset = SimpleDataset(DrawingEverywhere(unseeded)).transform(more_jitter, seeded=True)
    dataset = SimpleDataset(dataset).transform(more_jitter, seeded=True)
    (found,) = epochs(dataset, pool, 1, batchify_fn=drawing_too)
    drawn = [number for batch in found for sample in batch for number in sample]
    assert len(drawn) == 12 * (3 * unseeded + 5 + 3 + 3 + 1)
    assert len(set(drawn)) == len(drawn) - 12 + 3  # the last one is of the batch


def more_jitter(sample: Any) -> Any:
    import random

    import torch

    return np.append(sample, [random.random(), np.random.random(), torch.rand((), dtype=torch.float64).item()])


def drawing_too(samples: list[Any]) -> Any:
    number = sample_rng().random()
    return np.stack([np.append(sample, number) for sample in samples])


@pytest.mark.costly(2)
def test_objects_with_generators_give_the_same_in_every_pool_if_seeded(new_pool: Callable[..., Pool]) -> None:
    dataset = SimpleDataset(Numbers()).transform(all_kinds(), seeded=True).transform(augment, seeded=True)
    expected = epochs(dataset, InlinePool())
    assert epochs(dataset, new_pool(1)) == epochs(dataset, new_pool(3), prefetch=1, batch_size=4) == expected
    drawn = [number for epoch in expected for batch in epoch for sample in batch for number in sample[1:]]
    # No sample has the numbers of another, no object those of another, and no transform those of another.
    assert len(set(drawn)) == len(drawn) == 2 * 12 * (1 + 2 + 2 + 1 + 2)


def test_a_batch_that_is_built_again_has_the_same_augmentations(process_pool: ProcessPool, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    dataset = SimpleDataset(Numbers()).transform(killing(marker, all_kinds(), 6), seeded=True)
    found = epochs(dataset, process_pool, 1)
    assert marker.exists()
    assert found == epochs(dataset, InlinePool(), 1)


def test_ranks_share_what_samples_draw_and_differ_in_the_global_generators(process_pool: ProcessPool) -> None:
    def rank(dataset: Any, number: int) -> list[Any]:
        pool = ProcessPool(1, start_method=process_pool.start_method)
        (found,) = epochs(dataset, pool, 1, num_replicas=2, rank=number, batch_size=3)
        return [sample for batch in found for sample in batch]

    whole = dict(sample for batch in epochs(Drawing(), InlinePool(), 1)[0] for sample in batch)
    assert dict(rank(Drawing(), 0) + rank(Drawing(), 1)) == whole
    drawn = [number for one in (0, 1) for sample in rank(DrawingGlobally(), one) for number in sample[1:]]
    assert len(set(drawn)) == 2 * 12


def test_a_generator_is_made_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    philox = rng.philox
    monkeypatch.setattr(rng, "philox", lambda *key: made.append(key) or philox(*key))
    epochs(Numbers(), InlinePool())
    assert not made
    epochs(Drawing(), InlinePool(), 1)
    assert len(made) == 12


@pytest.mark.parametrize("wrap", [torch_data.Subset, lambda one, _: torch_data.StackDataset(one)])
def test_a_sample_that_torch_reads_one_by_one_knows_its_index(wrap: Callable[..., Any]) -> None:
    """Where nothing inside is faster, the ``__getitems__`` of torch's Subset and StackDataset reads one by one."""
    dataset = SimpleDataset(wrap(Drawing(), list(range(len(Drawing())))))
    loader = ShardedDataLoader(dataset, 4, seed=3, batchify_fn=list)
    for number, sample in enumerate(sample for batch in loader for sample in batch):
        assert np.array_equal(sample, loader.read(number, epoch=0)), number
