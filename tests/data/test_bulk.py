"""What the library hands out is the user's to change: no list of ours, and none of the batch sampler's."""

from typing import Any

import numpy as np
import pytest
from conftest import covering
from torch.utils.data import Subset

from sharded_loader import ArrayDataset, InlinePool, ProcessPool, Sampler, ShardedDataLoader, SimpleDataset, ThreadPool
from sharded_loader.data.seeding import KeyedIndices, keys_of
from sharded_loader.randomness.rng import SampleScope


class UsesUp:
    """A reader that sorts its indices and takes them out of the list, by either protocol. One sample is bad."""

    def __init__(self, name: str, bad: int | None = None) -> None:
        self.bad = bad
        self.__dict__[name] = self.read if name == "__getitems__" else lambda indices: np.array(self.read(indices))

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == self.bad:
            raise OSError("disk")
        return index

    def read(self, indices: list[int]) -> list[int]:
        indices.sort(reverse=True)
        return [self[indices.pop()] for _ in range(len(indices))]


WRAPPERS = {
    "bare": lambda d: d,
    "SimpleDataset": SimpleDataset,
    "take": lambda d: SimpleDataset(d).take(20),
    "transform": lambda d: SimpleDataset(d).transform(int),
    "cache": lambda d: SimpleDataset(d).cache(),
    "concatenated": lambda d: SimpleDataset(d) + ArrayDataset(np.arange(0)),
    "torch's Subset": lambda d: Subset(d, range(20)),
    "a column": ArrayDataset,
}
EVENS_FIRST = [*range(0, 20, 2), *range(1, 20, 2)]


@covering(name=["get_batch", "__getitems__"], wrapper=WRAPPERS, on_error=["skip", "replace"])
def test_a_reader_that_uses_its_indices_up_and_fails_loses_no_sample(name: str, wrapper: str, on_error: str) -> None:
    loader = ShardedDataLoader(WRAPPERS[wrapper](UsesUp(name, bad=7)), 5, sampler=EVENS_FIRST, on_error=on_error)
    batches = [batch.tolist() for batch in loader]
    assert {x for batch in batches for x in batch} == set(range(20)) - {7}
    assert [len(batch) for batch in batches] == ([5, 5, 4, 5] if on_error == "skip" else [5, 5, 5, 5])
    assert [index for index, _ in loader.skipped] == [7]
    assert loader.stats().samples == sum(map(len, batches))


@pytest.mark.parametrize("name", ["get_batch", "__getitems__"])
@pytest.mark.parametrize("new", [InlinePool, lambda: ThreadPool(2), lambda: ProcessPool(2)])
def test_a_reader_that_uses_its_indices_up_reads_all_and_its_errors_name_the_sample(name: str, new: Any) -> None:
    with ShardedDataLoader(UsesUp(name), 5, sampler=EVENS_FIRST, pool=new()) as loader:
        assert [batch.tolist() for batch in loader][:2] == [[0, 2, 4, 6, 8], [10, 12, 14, 16, 18]]
        assert loader.stats().samples == 20
    with ShardedDataLoader(UsesUp(name, bad=7), 20, pool=new()) as loader:
        with pytest.raises(OSError, match="disk") as caught:
            next(iter(loader))
    assert "sample 7" in str(getattr(caught.value, "__notes__", "")) + str(caught.value)


@pytest.mark.parametrize("name", ["get_batch", "__getitems__"])
def test_the_users_batch_sampler_keeps_its_lists(name: str) -> None:
    flat, shards = [[3, 1, 2], [6, 5, 4]], [[[3, 1], [2]], [[6], [5, 4]]]
    assert [sorted(batch.tolist()) for batch in ShardedDataLoader(UsesUp(name), batch_sampler=flat)] == [
        [1, 2, 3],
        [4, 5, 6],
    ]
    loader = ShardedDataLoader(UsesUp(name), batch_sampler=shards)
    assert [[sorted(shard.tolist()) for shard in batch] for batch in loader] == [[[1, 3], [2]], [[6], [4, 5]]]
    loader.peek()
    assert flat == [[3, 1, 2], [6, 5, 4]] and shards == [[[3, 1], [2]], [[6], [5, 4]]]


class OneList(Sampler):  # type: ignore[type-arg]
    """Fills one list again for each batch."""

    def __init__(self, sharded: bool) -> None:
        self.sharded = sharded
        super().__init__()

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        batch: list[int] = []
        for begin in range(0, 20, 5):
            batch[:] = range(begin, begin + 5)
            yield [batch] if self.sharded else batch


@pytest.mark.parametrize("sharded", [False, True])
def test_a_batch_sampler_may_fill_one_list_again_and_again(sharded: bool, pool: Any) -> None:
    with ShardedDataLoader(range(20), batch_sampler=OneList(sharded), pool=pool, prefetch=4) as loader:
        batches = [batch[0] if sharded else batch for batch in loader]
        assert [batch.tolist() for batch in batches] == [list(range(begin, begin + 5)) for begin in range(0, 20, 5)]


def test_a_batchify_function_may_empty_its_list() -> None:
    def empties(samples: list[int]) -> Any:
        found = [samples.pop() for _ in range(len(samples))]
        if 7 in found:
            raise ValueError("seven")
        return np.array(found)

    loader = ShardedDataLoader(range(20), 5, batchify_fn=empties)
    batches = iter(loader)
    assert next(batches).tolist() == [4, 3, 2, 1, 0]
    with pytest.raises(ValueError, match="seven"):
        next(batches)
    assert next(batches).tolist() == [14, 13, 12, 11, 10]


def test_places_of_a_list_that_somebody_has_changed_are_not_believed() -> None:
    for change in (list.sort, list.reverse, list.pop, lambda indices: indices.append(4)):
        keys = [SampleScope(seed, 0) for seed in range(3)]
        indices = KeyedIndices([7, 8, 2], keys)
        assert keys_of(indices) is keys
        change(indices)
        assert keys_of(indices) is None
