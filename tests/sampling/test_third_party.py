"""Anybody's sampler is read as a pure function of (seed, epoch), and leaves the global generators alone."""

from __future__ import annotations

import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from injection import InterruptAtReturn
from samples import ByEpoch, Foreign, GluonStyle, NoLength

from sharded_loader import BatchSampler, RandomSampler, Sampler, ShardedBatchSampler, ShardedDataLoader
from sharded_loader.sampling.base import is_own
from sharded_loader.sampling.state import Checkpoint
from sharded_loader.sampling.tables import BLOCK
from sharded_loader.sampling.third_party import LIST_BLOCK, ListSampler, len_epoch, table_of
from sharded_loader.torch import DataLoader


def iter_epoch(sampler: Any, epoch: int, seed: int, start: int = 0) -> Iterator[Any]:
    return table_of(sampler, epoch, seed).items(start)


def jumps(sampler: Any) -> bool:
    """Whether any index of an epoch is had in constant time."""
    return table_of(sampler, 0, 7).block == BLOCK


def states() -> list[Any]:
    """Of the global generators, to be compared."""
    return [random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]


def gluon_style(length: int) -> GluonStyle:
    return GluonStyle(lambda: np.random.permutation(length).tolist(), length)


def lazy() -> Iterator[int]:
    """A generator function draws nothing before the first item."""
    order = list(range(20))
    random.shuffle(order)
    yield from order


class EverySecond(RandomSampler):
    """Overrides ``__iter__`` of a sampler of ours: that ``__iter__`` is meant."""

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), 0, None, 2)

    def __len__(self) -> int:
        return (super().__len__() + 1) // 2


FOREIGN: dict[str, Callable[[], Any]] = {
    "torch random": lambda: torch_data.RandomSampler(range(20)),
    "torch random, with a generator": lambda: torch_data.RandomSampler(
        range(20), generator=torch.Generator().manual_seed(5)
    ),
    "torch random, several rounds": lambda: torch_data.RandomSampler(
        range(20), num_samples=70, generator=torch.Generator().manual_seed(5)
    ),
    "torch subset": lambda: torch_data.SubsetRandomSampler(range(20)),
    "torch weighted": lambda: torch_data.WeightedRandomSampler([1.0] * 20, 20),
    "torch batches": lambda: torch_data.BatchSampler(torch_data.RandomSampler(range(20)), 3, False),
    "torch distributed": lambda: torch_data.DistributedSampler(range(20), 2, 1),  # type: ignore[arg-type]
    "torch batches, distributed": lambda: torch_data.BatchSampler(
        torch_data.DistributedSampler(range(20), 2, 1),  # type: ignore[arg-type]
        3,
        False,
    ),
    "torch batches of ours": lambda: torch_data.BatchSampler(RandomSampler(20, seed=1), 3, False),
    "gluon style": lambda: gluon_style(20),
    "generator function": lambda: NoLength(lazy),
    "overrides __iter__": lambda: EverySecond(20, seed=1),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_foreign_epoch_is_a_pure_function_of_seed_and_epoch_and_draws_nothing_of_the_users(kind: str) -> None:
    one, other, before = FOREIGN[kind](), FOREIGN[kind](), states()
    epochs = [list(iter_epoch(one, epoch, 7)) for epoch in range(3)]
    assert epochs[0] != epochs[1] != epochs[2]
    pairs = list(zip(iter_epoch(one, 0, 7), iter_epoch(one, 1, 7), strict=True))  # two live epochs do not mix
    assert [list(items) for items in zip(*pairs, strict=True)] == epochs[:2]
    assert states() == before
    torch.manual_seed(99)
    for epoch in (2, 0):
        assert list(iter_epoch(other, epoch, 7)) == epochs[epoch]
        assert list(iter_epoch(other, epoch, 7, start=2)) == epochs[epoch][2:]


def test_a_generator_of_the_users_is_left_as_it_was_and_its_seed_counts() -> None:
    def order(seed: int) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        before = generator.get_state()
        sampler = torch_data.RandomSampler(range(20), generator=generator)
        items = list(iter_epoch(sampler, 0, 7))
        assert sampler.generator is generator
        assert torch.equal(generator.get_state(), before)
        return items

    assert order(1) == order(1) != order(2)


def test_distributed_sampler_is_told_the_epoch_and_lists_are_read_again() -> None:
    sampler, reference = (torch_data.DistributedSampler(range(10), 2, 0) for _ in range(2))  # type: ignore[arg-type]
    reference.set_epoch(6)
    assert list(iter_epoch(sampler, 6, 0)) == list(reference)
    batches = [[0, 1], [2]]
    assert list(iter_epoch(batches, 5, 0, start=1)) == [[2]] and len_epoch(batches, 5) == 2


def test_a_used_up_iterator_is_an_error_never_an_empty_epoch() -> None:
    class Single:
        at = 0

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.at += 1
            return self.at if self.at < 6 else next(iter(()))

    batches = BatchSampler(Single(), 2, seed=0)
    with pytest.raises(TypeError, match="a Single, has no length: give its class a __len__"):
        len(batches)
    assert list(batches) == [[1, 2], [3, 4], [5]]
    with pytest.raises(TypeError, match="a Single, has no items left for epoch 1.*pass a list"):
        iter(batches)


def test_own_and_foreign_are_told_apart() -> None:
    class Pure:
        def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
            return iter(range(epoch + 3)[start:])

        def len_epoch(self, epoch: int) -> int:
            return epoch + 3

        def __iter__(self) -> Iterator[int]:
            raise AssertionError

    class Halved(RandomSampler):
        def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
            return itertools.islice(super().iter_epoch(epoch, start), 5)

    assert is_own(RandomSampler(3, seed=1))
    assert jumps(RandomSampler(3, seed=1))
    assert is_own(BatchSampler([1], 1))
    assert not jumps(BatchSampler([1], 1))
    assert is_own(Pure())
    assert list(iter_epoch(Pure(), 2, 0, start=1)) == [1, 2, 3, 4]
    assert len_epoch(Pure(), 2) == 5
    assert is_own(Halved(9, seed=1))
    assert not jumps(Halved(9, seed=1))
    assert [len(batch) for batch in BatchSampler(Halved(9, seed=1), 3)] == [3, 2]
    for foreign in ([1, 2], range(3), gluon_style(3), EverySecond(3, seed=1), torch.arange(3)):
        assert not is_own(foreign)
        assert not jumps(foreign)


ERRORS = [ValueError("steps are ambiguous"), RuntimeError("x"), AttributeError("y"), StopIteration(), KeyError("z")]


@pytest.mark.costly(15)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("kind", [Foreign, type("ForeignOfOurs", (Foreign, Sampler), {})])
@pytest.mark.parametrize("of_batches", [True, False])
def test_whatever_a_length_raises_means_that_it_is_unknown(error: Exception, kind: Any, of_batches: bool) -> None:
    batches = [[0, 1], [2, 3], [4]]

    def make() -> ShardedDataLoader:
        if of_batches:
            return ShardedDataLoader(range(5), batch_sampler=kind(batches, error), seed=1)
        return ShardedDataLoader(range(5), 2, sampler=kind([0, 1, 2, 3, 4], error), seed=1)

    loader = make()
    message = f"the sampler, a {kind.__name__}, has no length: its __len__ raised {type(error).__name__}"
    for _ in range(2):
        assert "unknown number of batches" in repr(loader)
        with pytest.raises(TypeError, match=message) as caught:
            len(loader)
        assert caught.value.__cause__ is error
        assert loader.peek().tolist() == [0, 1]
        assert [batch.tolist() for batch in loader] == batches  # list() asks an iterator how long it is
    assert "length=?" in repr(BatchSampler(kind([1], error), 2))
    iterator = iter(loader)
    next(iterator)
    state = json.loads(json.dumps(loader.state_dict()))
    other = make()
    other.load_state_dict(state)
    assert (other.position, other.epoch) == (1, 2)
    assert [batch.tolist() for batch in other] == batches[1:]
    inner = kind(batches if of_batches else [0, 1, 2, 3, 4], error)
    wrapped: Any = ShardedBatchSampler(inner, 2, seed=1) if of_batches else BatchSampler(inner, 2, seed=1)
    assert len(list(ShardedDataLoader(range(5), batch_sampler=wrapped))) == 3
    replicated = {"batch_sampler": inner} if of_batches else {"sampler": inner, "batch_size": 2}
    assert list(ShardedDataLoader(range(5), num_replicas=2, rank=1, **replicated))
    if not of_batches:
        loader = ShardedDataLoader(range(5), 2, sampler=inner, last_batch="rollover")
        with pytest.raises(TypeError, match=message):  # rollover needs a length
            next(iter(loader))
        assert repr(loader)


def test_an_interruption_while_a_sampler_starts_leaves_its_generator_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def strike(*_: Any) -> None:
        raise KeyboardInterrupt

    generator = torch.Generator().manual_seed(5)
    sampler = torch_data.RandomSampler(range(20), generator=generator)
    monkeypatch.setattr("sharded_loader.sampling.third_party.seed_torch", strike)
    with pytest.raises(KeyboardInterrupt):
        table_of(sampler, 0, seed=1)
    assert sampler.generator is generator


def test_an_error_of_the_samplers_comes_through_and_generators_are_restored() -> None:
    def broken() -> Iterator[int]:
        random.random()
        raise KeyError("mine")

    before = states()
    with pytest.raises(KeyError, match="mine"):
        iter_epoch(NoLength(broken), 0, 0)
    assert states() == before


class OwnState:
    """A sampler that owns what its order comes from, and goes on with it from epoch to epoch."""

    def __init__(self, draw: Callable[[Any], Iterator[int]], **own: Any) -> None:
        self.draw = draw
        self.__dict__.update(own)

    def __len__(self) -> int:
        return 20

    def __iter__(self) -> Iterator[int]:
        return self.draw(self)


def rotated(own: Any) -> Iterator[int]:
    own.items.rotate(7)
    yield from list(own.items)


def counted(own: Any) -> Iterator[int]:
    own.count += 7
    own.latest = own.count  # an attribute that was not there
    try:
        yield from ((own.count + number) % 20 for number in range(20))
    finally:
        own.count += 1


def shuffled_in_place(own: Any) -> Iterator[int]:
    own.shuffle(own.items)
    return iter([int(item) for item in own.items])


def drawn_late(own: Any) -> Iterator[int]:
    left = list(range(20))
    while left:
        yield left.pop(int(own.random.random() * len(left)))


def marked(own: Any) -> Iterator[int]:
    first = len(own.seen) % 20
    own.seen[first] = True
    own.known.add(first)
    yield from sorted(range(20), key=lambda item: (item - 3 * len(own.known) - first) % 20)


OWN_STATES: dict[str, Callable[[], Any]] = {
    "RandomState": lambda: OwnState(lambda own: iter(own.r.permutation(20).tolist()), r=np.random.RandomState(3)),
    "Generator": lambda: OwnState(lambda own: iter(own.r.permutation(20).tolist()), r=np.random.default_rng(3)),
    "Random": lambda: OwnState(drawn_late, random=random.Random(3)),
    "torch": lambda: OwnState(
        lambda own: iter(torch.randperm(20, generator=own.g).tolist()), g=torch.Generator().manual_seed(3)
    ),
    "torch's RandomSampler": lambda: torch_data.RandomSampler(range(20), generator=torch.Generator().manual_seed(3)),
    "counter": lambda: OwnState(counted, count=0),
    "list": lambda: OwnState(shuffled_in_place, items=list(range(20)), shuffle=random.shuffle),
    "array": lambda: OwnState(shuffled_in_place, items=np.arange(20), shuffle=np.random.shuffle),
    "deque": lambda: OwnState(rotated, items=deque(range(20))),
    "dict and set": lambda: OwnState(marked, seen={}, known=set()),
    "system": lambda: OwnState(lambda own: iter(range(20)), random=random.SystemRandom()),
}


@pytest.mark.costly(11)
@pytest.mark.parametrize("of_batches", [False, True])
@pytest.mark.parametrize("kind", OWN_STATES)
def test_peek_changes_nothing_in_a_sampler_that_owns_its_generator(kind: str, of_batches: bool) -> None:
    def make() -> ShardedDataLoader:
        sampler = OWN_STATES[kind]()
        if of_batches:
            return ShardedDataLoader(range(20), batch_sampler=torch_data.BatchSampler(sampler, 6, False), seed=1)
        return ShardedDataLoader(range(20), 6, sampler=sampler, seed=1)

    plain = make()
    expected = [[batch.tolist() for batch in plain] for _ in range(3)]
    looked = make()
    for epoch in expected:
        for _ in range(2):
            assert looked.peek().tolist() == epoch[0]
        batches = []
        for batch in looked:
            batches.append(batch.tolist())
            if len(batches) == 2:
                looked.peek()
        assert batches == epoch


def test_a_ctrl_c_as_any_c_function_returns_leaves_a_sampler_its_attributes() -> None:
    for number in itertools.count(1):
        sampler = OWN_STATES["list"]()
        loader, before = ShardedDataLoader(range(20), 6, sampler=sampler), dict(vars(sampler))
        with InterruptAtReturn(number, ("third_party.py",)) as interrupt:
            loader.peek()
        assert vars(sampler) == before, number
        if not interrupt.fired:
            break
    assert number > 10


def test_peek_copies_neither_the_dataset_nor_large_data_of_a_sampler() -> None:
    class Watched(list):  # type: ignore[type-arg]
        def copy(self) -> Any:
            raise AssertionError("it was copied")

    dataset = list(range(20))
    sampler = OWN_STATES["counter"]()
    sampler.dataset, sampler.watched, sampler.read_only = dataset, Watched(), np.arange(3)
    sampler.read_only.flags.writeable = False
    loader = ShardedDataLoader(dataset, 6, sampler=sampler)
    alias = sampler.dataset
    loader.peek()
    assert sampler.dataset is alias is dataset


KINDS = pytest.mark.parametrize("kind", [list, tuple, lambda items: range(items[0], items[-1] + 1)])


def table_of_list(items: Any, mark: Checkpoint | None = None, epoch: int = 0) -> Any:
    return ListSampler(items, mark).epoch_table(epoch)


@KINDS
def test_items_are_read_in_blocks_at_any_place(kind: Any) -> None:
    items = kind(list(range(3, 3 + 2 * LIST_BLOCK)))
    table = table_of_list(items)
    assert table.block == LIST_BLOCK and ListSampler(items, None).len_epoch(5) == 2 * LIST_BLOCK
    for positions in ([0], [LIST_BLOCK - 1, LIST_BLOCK], [2 * LIST_BLOCK - 1], [5, 9, 100]):
        found = table.at(np.array(positions))
        assert isinstance(found, np.ndarray) and found.dtype == np.int64
        assert found.tolist() == [3 + position for position in positions]
    large = range(0, 10**15, 7)  # a block of it is not the whole range
    assert table_of_list(large).at(np.arange(10**12, 10**12 + 3)).tolist() == list(large[10**12 : 10**12 + 3])


@pytest.mark.parametrize("items", [["a", "b", "c"], [(1, 2), (3, 4), 5], [1, 2**70, 3], [True, 1, 2], [1, None, 2]])
def test_items_that_are_no_plain_numbers_stay_what_they_are(items: list[Any]) -> None:
    found = table_of_list(items).at(np.arange(3))
    assert type(found) is list and found == items and list(map(type, found)) == list(map(type, items))


def test_an_epoch_goes_on_where_the_list_is_the_same() -> None:
    items = list(range(50, 0, -1))
    mark = ListSampler(items, None).checkpoint(2, 20)
    assert (mark.epoch, mark.items, mark.finished) == (2, 20, False)
    assert table_of_list(list(items), mark, 2).at(np.arange(20, 22)).tolist() == [30, 29]
    behind = items[:20] + ["other"] * 30
    assert table_of_list(behind, mark, 2)
    for changed in (items[1:], [*items[:19], 0, *items[20:]], items[:10]):
        with pytest.raises(ValueError, match="the sampler, a list, yields (other indices|only 10 items)"):
            table_of_list(changed, mark, 2)
        assert table_of_list(changed, mark, 3), "another epoch begins from its beginning"
        assert table_of_list(changed, None, 2)


def test_a_list_that_changes_between_two_epochs_is_read_as_it_is_then() -> None:
    items = [5, 6, 7]
    loader = ShardedDataLoader(range(20), 2, sampler=items)
    assert [batch.tolist() for batch in loader] == [[5, 6], [7]]
    items[:] = [1, 2, 3, 4]
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": Foreign([5, 6, 7]), "batch_size": 1, "last_batch": "rollover"},
        {"batch_sampler": Foreign([[5, 6], [7]]), "steps_per_epoch": 4},
    ],
    ids=["rollover", "steps"],
)
def test_a_state_after_the_first_batch_has_no_item_of_the_second(given: dict[str, Any]) -> None:
    loader = ShardedDataLoader(range(9), **given)
    next(iter(loader))
    assert loader.state_dict()["passed"]["items"] == 1


def test_ranks_are_padded_with_the_first_item_of_the_pass_that_they_have_read() -> None:
    passes = itertools.count()
    sampler = Foreign(lambda: [10 * (number := next(passes)), 10 * number + 1, 10 * number + 2], 3)
    loader = ShardedDataLoader(range(30), 1, sampler=sampler, num_replicas=2, rank=1)
    assert [[batch.tolist() for batch in loader] for _ in range(2)] == [[[1], [0]], [[11], [10]]]


def test_a_sampler_of_another_library_may_have_ranks_of_its_own() -> None:
    theirs: Any = Foreign([[0, 1], [2, 3]])
    theirs.ranks = 4
    loader = ShardedDataLoader(range(4), batch_sampler=theirs, num_replicas=2, rank=1)
    assert [batch.tolist() for batch in loader] == [[2, 3]] and "step_ranks" not in loader.state_dict()


class Curriculum(ByEpoch):
    """Has six more samples in each epoch."""

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.length = 6 + 6 * epoch


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_an_epoch_of_a_sampler_that_grows_has_its_own_length_and_a_resume_loses_nothing_of_it(kind: Any) -> None:
    def made() -> Any:
        return kind(range(30), batch_size=4, sampler=Curriculum(6), drop_last=True)

    loader = made()
    for epoch in range(3):
        loader.set_epoch(epoch)
        assert len(loader) == (6 + 6 * epoch) // 4
        states = [(batch, loader.state_dict()) for batch in loader]
    for step, (_, state) in enumerate(states[:-1]):
        resumed = made()
        resumed.load_state_dict(state)
        assert torch.equal(torch.stack(list(resumed)), torch.stack([batch for batch, _ in states[step + 1 :]]))


def test_an_evaluation_counts_every_sample_of_a_sampler_that_grows() -> None:
    loader = ShardedDataLoader(range(30), 4, sampler=Curriculum(6), evaluate=True)
    assert [sum(real for _, real in loader) for _ in range(3)] == [6, 12, 18]


class Forwarding:
    """Tells its inner sampler what it is told, as samplers of trainers do, and shows no epoch."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        self.sampler.set_epoch(epoch)

    def __iter__(self) -> Any:
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)


class Counting(torch_data.DistributedSampler[int]):
    """Counts the calls of set_epoch."""

    calls = 0

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        self.calls += 1


@pytest.mark.parametrize("epoch", [3, 5])
def test_a_length_that_is_asked_for_leaves_inner_samplers_as_they_are(epoch: int) -> None:
    inner = Counting(range(8), 1, 0)  # type: ignore[arg-type]
    inner.set_epoch(3)
    assert len_epoch(Forwarding(inner), epoch) == 8 and (inner.epoch, inner.calls) == (3, 1)
