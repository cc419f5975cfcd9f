"""An epoch begins when its first batch is asked for: how an iterator gets its run."""

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import make_pool
from samples import NoLength, Told
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.data.seeding import MAX_SEARCHED, _datasets_in, epoch_listeners, epoch_setter, reachable
from sharded_loader.engine.pipeline import Run
from sharded_loader.loader.epochs import At, Progress
from sharded_loader.sampling.order import MapOrder


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


# -- the position of a loader, on numbers: ten samples in threes are four batches --------------------------------------


NUMBERS = itertools.count()


class Held:
    """Stands for an iterator: progress holds it weakly, and asks for its run."""

    run: Run | None = None


def progress_of(**given: Any) -> Progress:
    arguments: dict[str, Any] = dict.fromkeys(("sampler", "last_batch", "batch_sampler", "num_replicas", "rank"))
    return Progress(MapOrder(10, **{**arguments, "batch_size": 3, "shuffle": False, "seed": 1, **given}))


def begin(progress: Progress) -> tuple[Run, Held]:
    """An iterator has been given its first batch."""
    run, iterator = Run(next(NUMBERS), progress.begin()), Held()
    iterator.run = run
    deliver(progress, run)
    progress.begun(run, iterator)
    return run, iterator


def deliver(progress: Progress, run: Run, count: int = 1) -> None:
    run.delivered += count
    progress.current_run = run


def test_the_states_and_what_leads_from_one_to_the_next() -> None:
    progress = progress_of()
    assert (progress.at(), progress.length(), progress.now, progress.run()) == ((0, 0), 4, At.BEGINNING, None)
    before = progress.rollback_point()
    run, iterator = begin(progress)
    progress.roll_back(before, run)  # the first next was interrupted
    assert (progress.at(), progress.rollback_point(), progress.live_runs()) == ((0, 0), before, [])
    run, iterator = begin(progress)
    assert (progress.now, progress.at(), progress.run()) == (At.RUN, (0, 1), run)
    state = progress.state()
    progress.load(state, strict=True)
    assert progress.now is At.LOADED, "whatever iterators are alive"
    progress.set_epoch(0)
    assert progress.now is At.LOADED
    mark = progress.rollback_point()
    again, _other = begin(progress)
    assert progress.now is At.RUN
    progress.roll_back(mark, again)
    assert (progress.now, progress.at()) == (At.LOADED, (0, 1))
    progress.set_epoch(3)
    assert progress.now is At.BEGINNING
    deliver(progress, run)
    assert (progress.now, progress.at()) == (At.RUN, (0, 2)), "its iterator is alive, so its epoch is shown"
    del iterator
    assert (progress.now, progress.at()) == (At.BEGINNING, (3, 0)) and run.epoch.number == 0
    run, _iterator = begin(progress)
    run.ended = True
    assert (progress.now, progress.at(), progress.run()) == (At.BEGINNING, (4, 0), None)


def test_after_a_break_the_position_stays_although_the_iterator_is_gone() -> None:
    progress = progress_of()
    run, iterator = begin(progress)
    del iterator
    assert progress.run() is run and progress.live_runs() == []


@pytest.mark.parametrize("delivered", [1, 2, 3, 4])
def test_a_state_leads_back_to_its_position_and_set_epoch_keeps_it_in_that_epoch_alone(delivered: int) -> None:
    progress = progress_of()
    run, _iterator = begin(progress)
    deliver(progress, run, delivered - 1)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, min(3 * delivered, 10))
    other = progress_of()
    other.load(state, strict=True)
    if delivered == 4:  # the last batch: the next epoch begins
        assert other.at() == (1, 0)
        return
    assert (other.at(), other.now, other.length()) == ((0, delivered), At.LOADED, 4) and other.state() == state
    other.set_epoch(0)
    assert other.at() == (0, delivered)
    for epoch in (1, 0):  # it does not come back with its epoch
        other.set_epoch(epoch)
        assert (other.at(), other.now) == ((epoch, 0), At.BEGINNING)
    with pytest.raises(ValueError, match="batch_size was 3, and is 4"):
        (another := progress_of(batch_size=4)).load(state, strict=True)
    assert (another.at(), another.now) == ((0, 0), At.BEGINNING)


def test_with_rollover_the_rest_of_an_epoch_begins_the_next_one() -> None:
    progress = progress_of(last_batch="rollover")
    run, _iterator = begin(progress)
    deliver(progress, run, 2)
    state = progress.state()
    assert (state["epoch"], state["samples"]) == (0, 9)
    run.ended = True
    assert (progress.state()["epoch"], progress.state()["samples"]) == (1, -1)
