"""``skip=``: some steps are left out, and all other batches stay what they are, to the last bit."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, covering, make_pool
from injection import InterruptAt, next_interrupted
from samples import Augmented, ByEpoch, summed

from sharded_loader import FixedBucketSampler, LoaderWarning, RandomSampler, ShardedDataLoader, interleave
from sharded_loader.torch import DataLoader

LENGTH, SIZE = 22, 3  # 8 steps
SKIP = [(1, 2), (6, 9), (13, 15)]  # inside an epoch, across an end, and up to one


ORDERS: dict[str, Any] = {
    "shuffled": lambda: {"batch_size": SIZE, "shuffle": True},
    "discard": lambda: {"batch_size": SIZE, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": SIZE, "shuffle": True, "last_batch": "rollover"},
    "steps": lambda: {"batch_size": SIZE, "shuffle": True, "steps_per_epoch": 8},
    "buckets": lambda: {
        "batch_sampler": FixedBucketSampler(list(range(1, LENGTH + 1)), SIZE, num_buckets=2, seed=4, shuffle=True)
    },
    "foreign": lambda: {"batch_size": SIZE, "sampler": ByEpoch(LENGTH)},
    "torch": lambda: {"batch_size": SIZE, "sampler": torch_data.RandomSampler(range(LENGTH))},  # type: ignore[arg-type]
    "torch, rollover": lambda: {
        "batch_size": SIZE,
        "sampler": torch_data.RandomSampler(range(LENGTH)),  # type: ignore[arg-type]
        "last_batch": "rollover",
    },
    "evaluate": lambda: {"batch_size": SIZE, "evaluate": True},
}


def loader_of(order: str = "shuffled", **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(Augmented(LENGTH), collate_fn=summed, seed=5, **ORDERS[order](), **given)


def plain(batch: Any) -> Any:
    return (batch[0].tolist(), batch[1]) if isinstance(batch, tuple) else batch.tolist()


def epochs_of(loader: ShardedDataLoader[Any], count: int = 3) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(count)]


def without(epochs: list[list[Any]], skip: list[tuple[int, int]]) -> list[list[Any]]:
    left, step = [], 0
    for batches in epochs:
        numbers = range(step, step + len(batches))
        left.append([b for n, b in zip(numbers, batches, strict=True) if not any(i <= n <= j for i, j in skip)])
        step += len(batches)
    return left


@pytest.mark.parametrize("ranks", [{}, {"num_replicas": 2, "rank": 1}], ids=["alone", "rank 1 of 2"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.costly
def test_the_other_batches_stay_and_a_state_between_any_two_goes_on_exactly(order: str, ranks: Any) -> None:
    whole = epochs_of(loader_of(order, **ranks), 4)
    wanted = without(whole, SKIP)
    loader, states, read = loader_of(order, skip=SKIP, **ranks), [], list[list[Any]]()
    for epoch in range(4):
        loader.set_epoch(epoch)
        assert len(loader) == len(wanted[epoch])
        read.append([])
        for batch in loader:
            read[-1].append(plain(batch))
            states.append((epoch, len(read[-1]), json.loads(json.dumps(loader.state_dict()))))
    assert read == wanted
    for epoch, count, state in states:
        resumed = loader_of(order, **ranks)  # the state has the steps
        resumed.load_state_dict(state)
        rest = [*wanted[epoch][count:], *(batch for later in wanted[epoch + 1 :] for batch in later)]
        found: list[Any] = []
        while len(found) < len(rest):
            one = [plain(batch) for batch in resumed]
            assert one or [] in wanted[epoch:], "an epoch may be skipped whole"
            found += one
        assert found == rest
        assert resumed.skip == SKIP


@covering(pool=POOLS)
def test_every_pool_leaves_the_steps_out(pool: str) -> None:
    with loader_of(skip=SKIP, pool=make_pool(pool, 2)) as loader:
        assert epochs_of(loader) == without(epochs_of(loader_of()), SKIP)


def test_ranks_stay_in_step() -> None:
    loaders = [loader_of(num_replicas=2, rank=rank, skip=[(1, 1), (3, 3), (4, 4)]) for rank in range(2)]
    assert [len(list(loader)) for loader in loaders for _ in range(2)] == [2, 3, 2, 3]


def test_steps_can_be_left_out_when_a_state_is_loaded_and_the_next_state_has_them() -> None:
    whole = epochs_of(loader_of())
    first = loader_of(skip=[(1, 1)])
    iterator = iter(first)
    next(iterator)
    second = loader_of()
    second.load_state_dict(first.state_dict(), skip=[(4, 5)])
    assert second.skip == [(1, 1), (4, 5)]
    assert len(second) == 5
    state = second.state_dict()
    assert state["skip"] == [[1, 1], [4, 5]]
    assert [plain(batch) for batch in second] == [whole[0][n] for n in (2, 3, 6, 7)]
    given = loader_of(skip=[(4, 5)])
    given.load_state_dict(loader_of().state_dict())
    assert epochs_of(given) == without(whole, [(4, 5)])
    given.load_state_dict(first.state_dict())
    assert given.skip == [(1, 1), (4, 5)]
    third = loader_of()
    third.load_state_dict(state)
    third.load_state_dict(loader_of().state_dict())
    assert third.skip == []


def test_looking_up_finds_the_steps_that_are_left_out_and_their_numbers_stay() -> None:
    whole = epochs_of(loader_of())
    loader = loader_of(skip=SKIP)
    assert [plain(loader.batch(0, step)) for step in range(8)] == whole[0]
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.position == 4  # batches 0 and 3
    assert plain(loader.peek()) == whole[1][2]


def test_an_epoch_that_is_left_out_is_empty() -> None:
    loader = loader_of(skip=[(0, 7)])
    assert (len(loader), list(loader)) == (0, [])
    assert len(list(loader)) == 8
    with pytest.raises(IndexError):
        loader_of(skip=[(0, 7)]).peek()


def test_it_goes_with_weights_that_are_set() -> None:
    def make(**given: Any) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(interleave([["a"] * 30, ["b"] * 30], stop=24, shuffle=True), 4, **given)

    found = []
    for skip in (None, [(2, 3)]):
        loader, batches = make(skip=skip), []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 2:
                loader.set_weights([0, 1])
        found.append(batches)
    assert found[1] == found[0][:2] + found[0][4:]


def test_it_holds_on_other_ranks_with_the_same_steps() -> None:
    saved = loader_of(skip=[(5, 6)], num_replicas=2, rank=0)
    sizes = {"batch_size": 2 * SIZE, "shuffle": True}
    one = ShardedDataLoader(Augmented(LENGTH), collate_fn=summed, seed=5, **sizes)
    one.load_state_dict(saved.state_dict())
    assert one.skip == [(5, 6)] and [len(list(one)) for _ in range(2)] == [4, 2]  # of 4 steps, as on two ranks
    other = loader_of()
    with pytest.raises(ValueError, match="skip= counts steps, and the ranks or the batch size were different"):
        other.load_state_dict(saved.state_dict())
    assert other.skip == []


def test_steps_that_were_done_already_are_a_warning() -> None:
    loader = loader_of()
    iterator = iter(loader)
    next(iterator), next(iterator), next(iterator)
    state = loader.state_dict()
    with pytest.warns(LoaderWarning, match=r"skip has the steps \(2, 4\), and some of them were done before"):
        loader_of().load_state_dict(state, skip=[(2, 4)])


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "reversed": ([(3, 1)], ValueError, "last step comes before its first"),
    "overlapping": ([(5, 6), (1, 5)], ValueError, r"\(1, 5\) and \(5, 6\), which overlap"),
    "negative": ([(-1, 3)], ValueError, "at least 0"),
    "no pairs": ([1, 2], TypeError, "pairs of steps"),
    "a number": (7, TypeError, "pairs of steps"),
    "three": ([(1, 2, 3)], TypeError, "pairs of steps"),
    "a float": ([(1, 2.5)], TypeError, "must be an integer"),
    "a text": ("12", TypeError, "pairs of steps"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_range_of_steps_is_rejected(name: str) -> None:
    skip, error, match = BAD[name]
    with pytest.raises(error, match=match):
        loader_of(skip=skip)
    loader = loader_of()
    before = loader.state_dict()
    with pytest.raises(error, match=match):
        loader.load_state_dict(loader_of(skip=[(1, 1)]).state_dict(), skip=skip)
    assert loader.state_dict() == before
    assert len(loader) == 8
    with pytest.raises(ValueError, match="the state's 'skip' is wrong"):
        loader.load_state_dict({**before, "skip": skip})


def test_the_steps_must_be_countable() -> None:
    class NoLength:
        def __iter__(self) -> Iterator[int]:
            return iter(range(LENGTH))

    with pytest.raises(ValueError, match="no length.*steps_per_epoch"):
        ShardedDataLoader(range(LENGTH), 2, sampler=NoLength(), skip=[(1, 1)])
    assert len(list(ShardedDataLoader(range(LENGTH), 2, sampler=NoLength(), skip=[(1, 1)], steps_per_epoch=4))) == 3
    with pytest.raises(TypeError, match="Iterable data must be read"):
        ShardedDataLoader(lambda: iter(range(4)), 2, skip=[(1, 1)])
    with pytest.raises(TypeError, match="Iterable data must be read"):
        loader = ShardedDataLoader(lambda: iter(range(4)), 2)
        loader.load_state_dict(loader.state_dict(), skip=[(1, 1)])


def test_a_long_range_is_left_out_without_reading_it() -> None:
    loader = ShardedDataLoader(range(20_000), 1, sampler=RandomSampler(20_000, seed=1), skip=[(1, 19_998)])
    first, last = loader
    assert torch.cat([first, last]).tolist() == [*loader.indices(0, 0), *loader.indices(0, 19_999)]


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_an_interruption_behind_steps_that_are_left_out_goes_back_before_them(kind: Any) -> None:
    def begin() -> Any:
        sampler: Any = torch_data.RandomSampler(range(20), generator=torch.Generator().manual_seed(1))
        return iter(kind(range(20), 2, sampler=sampler, skip=[(1, 7)], seed=4))

    expected = [batch.tolist() for batch in begin()]
    line, fired = 1, True
    while fired:
        iterator = begin()
        found = [next(iterator)]
        got, fired = next_interrupted(iterator, line, functools.partial(InterruptAt, modules=["iterator.py"]))
        assert [batch.tolist() for batch in [*found, *got, *iterator]] == expected
        line += 23
    assert len(expected) == 3 and line > 100
