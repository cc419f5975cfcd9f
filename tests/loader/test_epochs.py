"""An epoch begins when its first batch is asked for: how an iterator gets its run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool
from sharded_loader.data.seeding import MAX_SEARCHED, _datasets_in, epoch_listeners, epoch_setter, reachable


class NoLength:
    """A sampler that does not say how much it yields."""

    def __init__(self, items: Iterable[Any]) -> None:
        self.items = list(items)

    def __iter__(self) -> Any:
        return iter(self.items)


class Told:
    """A dataset that is told its epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


def test_to_choose_a_run_changes_nothing() -> None:
    loader = ShardedDataLoader(range(10), 4)
    run = loader._epochs.choose()
    assert (run.epoch.number, run.delivered, loader.epoch) == (0, 0, 0)
    assert not loader.pool.started


def test_a_run_whose_beginning_was_interrupted_is_chosen_again() -> None:
    loader = ShardedDataLoader(range(10), 4)
    run = loader._epochs.choose()
    loader._epochs.keep(run)
    assert loader._epochs.choose() is run


@pytest.mark.parametrize("change", ["epoch", "dataset"])
def test_a_kept_run_is_dropped_if_something_else_begins(change: str) -> None:
    loader = ShardedDataLoader(range(10), 4)
    run = loader._epochs.choose()
    loader._epochs.keep(run)
    loader.set_epoch(3) if change == "epoch" else loader.refresh()
    again = loader._epochs.choose()
    assert again is not run and again.epoch.number == (3 if change == "epoch" else 0)


def test_the_first_batch_is_read_without_an_epoch() -> None:
    loader = ShardedDataLoader(range(10), 4)
    assert loader._known_steps.first_batch().tolist() == [0, 1, 2, 3]
    assert (loader.epoch, loader.position, loader.pool.started) == (0, 0, False)


def test_an_epoch_without_batches_has_no_first_one() -> None:
    with pytest.raises(IndexError, match="epoch 0 has no batches"):
        ShardedDataLoader([], 4)._known_steps.first_batch()


def test_after_the_end_of_an_epoch_without_a_length_the_next_one_has_the_first_batch() -> None:
    first, second = (ShardedDataLoader(range(6), 3, sampler=NoLength(range(6))) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    assert second.peek().tolist() == [0, 1, 2]
    assert [batch.tolist() for batch in second] == [[0, 1, 2], [3, 4, 5]]


def test_set_epoch_begins_the_epoch_again_whose_end_was_loaded_without_a_length() -> None:
    first, second = (ShardedDataLoader(range(6), 3, sampler=NoLength(range(6))) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    for epoch, after in ((0, 1), (1, 2)):
        second.load_state_dict(first.state_dict())
        second.set_epoch(epoch)
        assert [batch.tolist() for batch in second] == [[0, 1, 2], [3, 4, 5]]
        assert second.epoch == after


def test_so_does_set_epoch_of_a_sampler_of_another_library() -> None:
    class Deaf(NoLength):
        def set_epoch(self, epoch: int) -> None:
            pass

    samplers = Deaf(range(6)), Deaf(range(6))
    first, second = (ShardedDataLoader(range(6), 3, sampler=sampler) for sampler in samplers)
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    samplers[1].set_epoch(0)
    assert [batch.tolist() for batch in second] == [[0, 1, 2], [3, 4, 5]]
    assert second.epoch == 1


def test_a_sample_is_read_in_its_epoch_which_is_put_back() -> None:
    data = Told()
    loader = ShardedDataLoader(data, 2)
    assert loader._known_steps.sample(3, 7) == 3
    assert data.epochs == [7, 0]


def test_a_state_of_the_end_of_an_epoch_without_a_length_goes_on_with_a_dataset_that_is_told() -> None:
    first, second = (ShardedDataLoader(Told(), batch_sampler=NoLength([[0, 1], [2, 3]])) for _ in range(2))
    iterator = iter(first)
    next(iterator), next(iterator)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [[0, 1], [2, 3]]
    assert second.dataset.epochs[-1] == 1


def test_a_dataset_that_all_iterators_share_is_told_and_runs_of_other_epochs_end() -> None:
    data = Told()
    loader = ShardedDataLoader(data, 2)
    first: Any = iter(loader)
    next(first)
    second: Any = iter(loader)
    next(second)
    assert data.epochs == [0, 1]
    with pytest.raises(RuntimeError, match="epoch 0 cannot go on: epoch 1 was begun"):
        next(first)
    assert next(second).tolist() == [2, 3]


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


POOLS: dict[str, Any] = {
    "inline": lambda: None,
    "threads": lambda: ThreadPool(1),
    "fork": lambda: ProcessPool(1, start_method="fork"),
    "spawn": lambda: ProcessPool(1, start_method="spawn"),
}


@pytest.mark.costly
@pytest.mark.parametrize("kind", WRAPPERS)
@pytest.mark.parametrize("pool", POOLS)
def test_set_epoch_of_a_dataset_inside_is_heard_by_every_worker(kind: str, pool: str) -> None:
    data = Stream() if kind == "iterable" else Named()
    with ShardedDataLoader(WRAPPERS[kind](data), 2, pool=POOLS[pool]()) as loader:
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
