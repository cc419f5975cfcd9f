"""A dataset is told which of its own samples come, through any stack of wrappers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from sharded_loader import ArrayDataset, SimpleDataset
from sharded_loader.base.notices import RETRIES, note_retry
from sharded_loader.data.datasets import can_follow, follow


class Told(SimpleDataset):
    """Remembers what it was told."""

    def __init__(self, length: int) -> None:
        super().__init__(range(length))
        self.told: list[Any] = []

    def follow(self, batches: Any, position: Any, later: Any) -> None:
        self.told = [np.asarray(batches(number)).tolist() for number in range(2)]
        assert batches(2) is None and position() == 7
        assert [np.asarray(later(number)).tolist() for number in range(2)] == self.told[::-1]


ORDER = ([0, 5, 3], [4, 1])

STACKS: dict[str, Any] = {
    "itself": (lambda told: told, [[0, 5, 3], [4, 1]]),
    "transformed": (lambda told: told.transform(str).cache(), [[0, 5, 3], [4, 1]]),
    "a part of it": (lambda told: told.shard(2, 1), [[10, 15, 13], [14, 11]]),
    "a part of a part": (lambda told: told.shard(2, 1).transform(str).take(8)[1:], [[11, 16, 14], [15, 12]]),
    "shuffled": (lambda told: SimpleDataset(told).sample(range_sampler([9, 8, 7, 6, 5, 4])), [[9, 4, 6], [5, 8]]),
    "the first of two": (lambda told: told.take(4) + ["x"] * 9, [[0, 3], [1]]),
    "the second of two": (lambda told: ArrayDataset(np.arange(4)) + told, [[1], [0]]),
}


def range_sampler(indices: list[int]) -> Any:
    from torch.utils.data import SubsetRandomSampler

    class InOrder(SubsetRandomSampler):
        def __iter__(self) -> Any:
            return iter(self.indices)

    return InOrder(indices)


@pytest.mark.parametrize("stack", STACKS)
def test_a_dataset_is_told_its_own_indices(stack: str) -> None:
    made, expected = STACKS[stack]
    told = Told(20)
    dataset = made(told)
    assert can_follow(dataset)
    later = ORDER[::-1]
    follow(dataset, lambda number: ORDER[number] if number < 2 else None, lambda: 7, lambda number: later[number])
    assert told.told == expected


def test_who_does_not_want_to_know_is_not_told() -> None:
    for dataset in ([1, 2], SimpleDataset([1, 2]).take(1), ArrayDataset(np.arange(3)) + [4]):
        assert not can_follow(dataset)
        follow(dataset, lambda number: None, lambda: 0, lambda number: None)


def test_every_one_counts_whoever_notes_it() -> None:
    before = len(RETRIES)
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: note_retry(), range(800)))
    assert len(RETRIES) - before == 800
