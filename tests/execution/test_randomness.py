"""P5: what is drawn depends on seed, epoch and sample, and on nothing else."""

from __future__ import annotations

import timeit
from collections.abc import Callable
from typing import Any

import pytest
from random_samples import (
    Drawing,
    DrawingGlobally,
    DrawingInBatches,
    DrawingWithoutIndex,
    Numbers,
    draw_for_the_batch,
    jitter,
)

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, rng, sample_rng
from sharded_loader.execution.pools.base import Pool
from sharded_loader.rng import SampleScope


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


def test_one_by_one_and_in_bulk_a_sample_draws_the_same(pool: Pool) -> None:
    assert epochs(DrawingInBatches(), pool) == epochs(Drawing(), InlinePool())


def test_a_bulk_read_has_to_say_which_sample_draws(pool: Pool) -> None:
    with ShardedDataLoader(DrawingWithoutIndex(), 4, pool=pool) as loader:
        with pytest.raises(ValueError, match=r"call sample_rng\(index\) with the index"):
            next(iter(loader))


def test_an_index_that_comes_twice_draws_the_same_twice_and_another_in_the_next_epoch(pool: Pool) -> None:
    first, second = epochs(Drawing(), pool, sampler=[5, 2, 5, 3])
    (batch,), (later,) = first, second
    assert batch[0] == batch[2] != later[0] == later[2]
    assert batch[0][0] == later[0][0] == 5


def test_the_order_of_samples_and_their_batches_do_not_matter_to_what_they_draw(pool: Pool) -> None:
    def by_sample(found: list[Any]) -> list[dict[int, int]]:
        return [dict(sample for batch in epoch for sample in batch) for epoch in found]

    assert by_sample(epochs(Drawing(), pool, batch_size=5, shuffle=True)) == by_sample(epochs(Drawing(), InlinePool()))


def test_ranks_share_what_samples_draw_and_differ_in_the_global_generators(process_pool: ProcessPool) -> None:
    def rank(dataset: Any, number: int) -> list[Any]:
        pool = ProcessPool(1, start_method=process_pool.start_method)
        (found,) = epochs(dataset, pool, 1, num_replicas=2, rank=number, batch_size=3)
        return [sample for batch in found for sample in batch]

    whole = dict(sample for batch in epochs(Drawing(), InlinePool(), 1)[0] for sample in batch)
    assert dict(rank(Drawing(), 0) + rank(Drawing(), 1)) == whole
    drawn = [number for one in (0, 1) for sample in rank(DrawingGlobally(), one) for number in sample[1:]]
    assert len(set(drawn)) == 2 * 12


def test_outside_a_loader_a_generator_is_fresh() -> None:
    assert sample_rng() is not sample_rng()
    assert sample_rng().integers(1 << 62) != sample_rng().integers(1 << 62)


def test_read_draws_what_the_loop_drew(pool: Pool) -> None:
    with ShardedDataLoader(Drawing(), 4, pool=pool, seed=3) as loader:
        loader.set_epoch(2)
        assert next(iter(loader))[1].tolist() == loader.read(1, epoch=2).tolist()


def test_a_generator_costs_microseconds_and_is_made_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    scope = SampleScope(3, 0)

    def draw() -> None:
        scope.at(7)
        sample_rng()

    with monkeypatch.context() as patch:
        patch.setattr(rng.reading, "scope", scope, raising=False)
        # 7 on a free machine.
        assert min(timeit.repeat(draw, number=100, repeat=20)) / 100 < 100e-6
    made: list[Any] = []
    philox = rng.philox
    monkeypatch.setattr(rng, "philox", lambda *key: made.append(key) or philox(*key))
    epochs(Numbers(), InlinePool())
    assert not made
    epochs(Drawing(), InlinePool(), 1)
    assert len(made) == 12
