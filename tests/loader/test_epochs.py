"""An epoch begins when its first batch is asked for: how an iterator gets its run."""

from collections.abc import Iterator
from typing import Any

import pytest
from conftest import make_pool
from samples import NoLength, Told
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.data.seeding import MAX_SEARCHED, _datasets_in, epoch_listeners, epoch_setter, reachable


class Deaf(NoLength):
    def set_epoch(self, epoch: int) -> None:
        pass


def test_what_begins_after_the_end_of_an_epoch_without_a_length_was_loaded() -> None:
    whole, sampler = [[0, 1, 2], [3, 4, 5]], Deaf(range(6))
    first = ShardedDataLoader(range(6), 3, sampler=NoLength(range(6)))
    iterator = iter(first)
    next(iterator), next(iterator)
    state = first.state_dict() | {"sampler": "Deaf"}
    second = ShardedDataLoader(range(6), 3, sampler=sampler)
    for tell, epoch, after in ((None, None, 2), (second, 0, 1), (second, 1, 2), (sampler, 0, 1)):
        second.load_state_dict(state)
        if tell is not None:
            tell.set_epoch(epoch)
        assert second.peek().tolist() == whole[0]
        assert [batch.tolist() for batch in second] == whole and second.epoch == after


def test_a_state_of_the_end_of_an_epoch_without_a_length_goes_on_with_a_dataset_that_is_told() -> None:
    first, second = (ShardedDataLoader(Told(), batch_sampler=NoLength([[0, 1], [2, 3]])) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[100, 101], [102, 103]]


def test_the_first_batch_and_a_sample_are_read_without_an_epoch() -> None:
    loader = ShardedDataLoader(Told(), 4)
    assert loader.peek().tolist() == [0, 1, 2, 3] and loader.read(3, epoch=7) == 703
    assert (loader.epoch, loader.position, loader.pool.started, loader.dataset.epoch) == (0, 0, False, 0)
    with pytest.raises(IndexError, match="epoch 0 has no batches"):
        ShardedDataLoader([], 4).peek()


class Named(Dataset[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class Stream(IterableDataset[int]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from [self.epoch] * 4


class Around:
    """A wrapper of the user's, without a place for attributes."""

    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = {"it": held}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return int(self.held["it"][index])


class AroundStream(IterableDataset[int]):
    def __init__(self, held: Any) -> None:
        self.held = held

    def __iter__(self) -> Iterator[int]:
        return iter(self.held)


WRAPPERS: dict[str, Any] = {
    "Subset": lambda data: Subset(data, range(4)),
    "ConcatDataset": lambda data: ConcatDataset([Subset(range(2), []), Subset(data, range(4))]),
    "the user's": Around,
    "ours around torch's": lambda data: SimpleDataset(Subset(data, range(4))).transform(int),
    "ours": lambda data: SimpleDataset(data).transform(int).take(4),
    "iterable": AroundStream,
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("pool", ["inline", "thread", "fork", "spawn"])
def test_set_epoch_of_a_dataset_inside_is_heard_by_every_worker(kind: str, pool: str) -> None:
    data = Stream() if kind == "iterable" else Named()
    with ShardedDataLoader(WRAPPERS[kind](data), 2, pool=make_pool(pool, 1)) as loader:
        for tell, epoch in ((None, 0), (data, 5), (None, 6), (loader, 2), (data, 9)):
            if tell is not None:
                tell.set_epoch(epoch)
            assert (loader.epoch, {int(one) for batch in loader for one in batch}) == (epoch, {epoch})


def test_the_search_for_datasets_with_set_epoch_is_bounded() -> None:
    """A sample list, however long, and datasets that hold each other."""
    data, other = Around(Named()), Named()
    data.held.update({"samples": [(str(number), number) for number in range(10**5)], "more": [Around(0)] * 10**4})
    data.held["it"].back = other.back = data  # type: ignore[attr-defined]
    assert list(epoch_listeners(data)) == [data.held["it"]]
    many = Around(None)
    many.held = [[Around([Around(number)]) for number in range(100)] for _ in range(100)]  # type: ignore[assignment]
    assert sum(1 for _ in reachable(many, _datasets_in, most=MAX_SEARCHED)) <= MAX_SEARCHED
    assert epoch_setter(many) is None
