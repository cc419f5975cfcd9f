"""What a loader tells about itself, and what can be set."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_loader import InlinePool, ShardedDataLoader, ThreadPool


@pytest.mark.parametrize(
    "name",
    [
        "dataset",
        "sampler",
        "batch_sampler",
        "batch_size",
        "drop_last",
        "num_workers",
        "seed",
        "pool",
        "epoch",
        "position",
    ],
)
def test_what_decides_the_batches_cannot_be_set(name: str) -> None:
    loader = ShardedDataLoader(range(10), 4)
    before = getattr(loader, name)
    with pytest.raises(AttributeError):
        setattr(loader, name, None)
    assert getattr(loader, name) is before


@pytest.mark.parametrize(
    ("workers", "given", "found"), [(3, None, 6), (3, 5, 5), (3, 2.0, 2), (3, -1, 0), (0, None, 0)]
)
def test_prefetch_is_twice_the_workers_unless_it_is_given(workers: int, given: Any, found: int) -> None:
    pool = ThreadPool(workers) if workers else InlinePool()
    with ShardedDataLoader(range(10), 4, pool=pool, prefetch=given) as loader:
        assert loader.prefetch == found
        loader.prefetch = 7
        assert loader.prefetch == 7


def test_only_a_prefetch_of_its_own_choice_grows_with_the_groups() -> None:
    loader = ShardedDataLoader(range(10), 4)
    assert loader._pipeline.scale_by_group
    loader.prefetch = 3
    assert not loader._pipeline.scale_by_group


@pytest.mark.parametrize("given", ["2", True, 2.5, None])
def test_a_prefetch_to_devices_is_a_number_of_batches(given: Any) -> None:
    loader = ShardedDataLoader(range(10), 4)
    with pytest.raises(TypeError, match="device_prefetch is"):
        loader.device_prefetch = given


def test_without_devices_nothing_is_copied_ahead() -> None:
    loader = ShardedDataLoader(range(10), 4)
    loader.device_prefetch = 4
    assert loader.device_prefetch == 0


def test_weights_are_copied_and_checked() -> None:
    loader = ShardedDataLoader(range(10), 4, num_shards=2)
    weights = [3.0, 1.0]
    loader.shard_weights = weights
    weights[0] = 9.0
    assert loader.shard_weights == [3.0, 1.0]
    with pytest.raises(ValueError, match="shard_weights need shards"):
        ShardedDataLoader(range(10), 4).shard_weights = [1.0]
    loader.shard_weights = None
    assert loader.shard_weights is None


def test_a_repr_never_raises() -> None:
    class Odd:
        def __len__(self) -> int:
            raise OSError("gone")

        def __getitem__(self, index: int) -> int:
            return index

    with pytest.raises(OSError, match="gone"):
        ShardedDataLoader(Odd(), sampler=[1, 2], batch_size=1)
    loader = ShardedDataLoader([1, 2, 3], 2)
    loader.dataset.clear()
    loader.refresh()
    assert repr(loader).startswith("ShardedDataLoader(0 samples, 0 batches of 2")
    loader.close()
    assert repr(loader) == "ShardedDataLoader(closed)"
