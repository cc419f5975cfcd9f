"""Parts of datasets: which samples they have, and that parts of parts are parts."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import ShardedDataLoader, SimpleDataset, SubsetDataset, SubsetRandomSampler
from sharded_loader.batching.default import default_batchify_fn

DERIVED: dict[str, Any] = {
    "take": lambda dataset: dataset.take(7),
    "shard": lambda dataset: dataset.shard(3, 1),
    "slice": lambda dataset: dataset.take(None)[2:-1],
    "backwards": lambda dataset: dataset.take(None)[::-2],
    "filter": lambda dataset: dataset.filter(lambda sample: sample % 3),
    "split": lambda dataset: dataset.split([0.5, 0.5], seed=1)[1],
    "sample": lambda dataset: dataset.sample(SubsetRandomSampler(range(0, len(dataset), 2), seed=1)),
    "subset": lambda dataset: SubsetDataset(dataset, [-1, 0, 0]),
}


@pytest.mark.parametrize("second", DERIVED)
@pytest.mark.parametrize("first", DERIVED)
@pytest.mark.costly(27)
def test_indices_say_which_samples_of_the_dataset_a_part_of_a_part_has(first: str, second: str) -> None:
    dataset = SimpleDataset(range(100))
    part = DERIVED[first](dataset)
    inner = DERIVED[second](part)
    for one in (part, inner):
        assert type(one) is SubsetDataset and one.dataset is dataset
        assert [dataset[int(index)] for index in one.indices] == list(one) == list(map(int, one.indices))
        assert np.asarray(one.indices).tolist() == list(one)
        assert list(pickle.loads(pickle.dumps(one))) == list(one)
    assert list(inner) == list(DERIVED[second](SimpleDataset(list(part))))


def test_arrays_of_indices_are_read_only_and_copies() -> None:
    for kind in (np.array, torch.tensor, list):
        given = kind([3, 1])
        part: Any = SubsetDataset("abcde", given)
        given[0] = 0
        assert np.asarray(part.indices).tolist() == [3, 1] and list(part) == ["d", "b"]
    part = SubsetDataset("abcde", np.array([3, 1]))
    for one in (part, part.take(1), SimpleDataset("abcde").split([2, 3], seed=1)[0]):
        with pytest.raises(ValueError, match="read-only"):
            one.indices[0] = 2
    for name in ("indices", "dataset"):
        with pytest.raises(AttributeError):
            setattr(part, name, "abc")


def test_parts_of_a_huge_dataset_take_no_memory() -> None:
    inner = SimpleDataset(range(10**15)).take(10**14).shard(2, 1)[::-1]
    assert inner.indices == range(10**14 - 1, 5 * 10**13 - 1, -1) and inner[5] == 10**14 - 6
    with pytest.raises(IndexError):
        SubsetDataset(range(10**13), inner.indices)


def test_a_class_of_ones_own_is_not_looked_through() -> None:
    class Negative(SubsetDataset):
        def __getitem__(self, index: Any) -> Any:
            return -super().__getitem__(index)

    assert repr(SimpleDataset(range(100)).take(9)[2:]) == "<7 of SimpleDataset(100 samples of range)>"
    part = Negative(range(100), range(10, 20)).take(3)
    assert list(part) == [-10, -11, -12] and part.indices == range(3) and isinstance(part.dataset, Negative)
    own: Any = SubsetDataset(range(100), range(10, 20))
    own.get_batch = lambda indices: [0 for _ in indices]
    assert SubsetDataset(own, [1]).dataset is own


@pytest.mark.parametrize("indices", [[5], [-6], range(6), range(5, 4, -1), np.array([0, 5]), [0.5]])
def test_indices_that_do_not_fit_are_refused(indices: Any) -> None:
    part = SimpleDataset("abcdefgh").take(5)
    with pytest.raises((IndexError, TypeError)):
        SubsetDataset(part, indices)


def test_parts_of_parts_are_read_alike_in_every_pool(pool: Any) -> None:
    part = SimpleDataset(np.arange(100)).split([0.5, 0.5], seed=1)[0][::-1].filter(lambda sample: sample % 3).take(8)
    with ShardedDataLoader(part, 4, pool=pool) as loader:
        found = [batch.tolist() for batch in loader]
    samples = list(part)
    assert found == [default_batchify_fn(samples[:4]).tolist(), default_batchify_fn(samples[4:]).tolist()]
