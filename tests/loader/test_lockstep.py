"""Several loaders in lockstep: batch k of one meets batch k of the others, with one state that resumes anywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import POOLS, covering, make_pool
from stream_samples import Parts

from sharded_loader import Lockstep, ShardedDataLoader

STOPS = ("shortest", "longest")
SIZES = [(7, 10), (10, 7), (6, 6), (2, 9), (5,), (9, 2, 4)]


def made(sizes: tuple[int, ...], stop: str, pool: str = "inline", **given: Any) -> Lockstep:
    loaders = [
        ShardedDataLoader(range(100 * n, 100 * n + size), 2, shuffle=True, seed=n, pool=make_pool(pool), **given)
        for n, size in enumerate(sizes)
    ]
    return Lockstep(*loaders, stop=stop)


def lists(step: tuple[Any, ...]) -> list[Any]:
    return [batch.tolist() for batch in step]


def steps_of(lockstep: Lockstep, count: int) -> list[Any]:
    """Some steps, over as many epochs as it takes."""
    found: list[Any] = []
    while len(found) < count:
        for step in lockstep:
            found.append(lists(step))
            if len(found) == count:
                break
    return found


@pytest.mark.parametrize("sizes", SIZES)
def test_the_epoch_ends_with_the_shortest_loader(sizes: tuple[int, ...]) -> None:
    lockstep = made(sizes, "shortest")
    for epoch in range(3):
        others = made(sizes, "shortest")
        others.set_epoch(epoch)
        alone = [lists(tuple(loader)) for loader in others.loaders]
        assert list(map(lists, lockstep)) == [list(step) for step in zip(*alone, strict=False)]
        assert lockstep.epoch == epoch + 1 and len(lockstep) == min(map(len, alone))


@pytest.mark.parametrize("sizes", SIZES)
def test_the_epoch_ends_with_the_longest_loader_and_shorter_ones_start_over(sizes: tuple[int, ...]) -> None:
    lockstep, others = made(sizes, "longest"), made(sizes, "longest").loaders
    for _ in range(3):
        length = max(map(len, others))
        columns = []
        for loader in others:
            batches: list[Any] = []
            while len(batches) < length:
                batches += [batch.tolist() for batch in loader]
            columns.append(batches[:length])
        found = list(map(lists, lockstep))
        assert found == [list(step) for step in zip(*columns, strict=True)] and len(lockstep) == length
        # Every lockstep epoch begins with new epochs: none goes on in the middle of one that was begun.
        for one, loader in zip(others, lockstep.loaders, strict=True):
            one.set_epoch(loader.epoch + (loader.position > 0))


@pytest.mark.costly(2)
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_a_state_after_any_step_goes_on_with_the_same_steps(sizes: tuple[int, ...], stop: str) -> None:
    whole = steps_of(made(sizes, stop), 14)
    for done in range(14):
        first = made(sizes, stop)
        assert steps_of(first, done) == whole[:done]
        resumed = made(sizes, stop)
        resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert steps_of(resumed, 14 - done) == whole[done:]


@pytest.mark.parametrize("stop", STOPS)
def test_a_state_that_was_saved_after_the_end_of_an_epoch_begins_the_next(stop: str) -> None:
    first = made((7, 10), stop)
    list(first)
    state = first.state_dict()
    expected = list(map(lists, first))
    resumed = made((7, 10), stop)
    resumed.load_state_dict(state)
    assert resumed.epoch == 1
    assert list(map(lists, resumed)) == expected


@covering(1, pool=POOLS, stop=STOPS)
def test_pools_and_ranks_change_nothing_but_who_reads(pool: str, stop: str) -> None:
    with made((7, 10), stop, pool) as lockstep:
        found = steps_of(lockstep, 4)
        state = lockstep.state_dict()
    assert found == steps_of(made((7, 10), stop), 4)
    resumed = made((7, 10), stop)
    resumed.load_state_dict(state)
    assert steps_of(resumed, 2) == steps_of(made((7, 10), stop), 6)[4:]
    ranks = [made((8, 16), stop, num_replicas=2, rank=rank) for rank in range(2)]
    seen = [step for one in ranks for step in steps_of(one, 1)]
    alone = made((8, 16), stop)
    alone.load_state_dict(ranks[0].state_dict())
    rest = [lists(step) for step in alone]
    whole = 0 if stop == "shortest" else 1  # the loader that decides
    indices = sorted(index for step in [*seen, *rest] for index in step[whole])
    assert indices == sorted(alone.loaders[whole].dataset)


class Interrupts:
    """Sample ``at`` interrupts, or fails, the first time that it is read."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error = at, error

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.at = -1
            raise self.error
        return index


@pytest.mark.parametrize(
    ("at", "stop"), [(0, "shortest"), (4, "shortest"), (8, "shortest"), (4, "longest"), (10, "longest")]
)
def test_an_interruption_in_the_middle_of_a_step_loses_no_batch_and_a_state_lies_before_it(at: int, stop: str) -> None:
    def loaders(at: int) -> Lockstep:
        interrupts = Interrupts(at, KeyboardInterrupt())
        return Lockstep(ShardedDataLoader(range(8), 2), ShardedDataLoader(interrupts, 2), stop=stop)

    whole = steps_of(loaders(-1), 12)
    lockstep = loaders(at)
    steps, found = iter(lockstep), []
    with pytest.raises(KeyboardInterrupt):
        found += map(lists, steps)
    state = lockstep.state_dict()
    resumed = loaders(-1)
    resumed.load_state_dict(state)
    assert steps_of(resumed, 12 - len(found)) == whole[len(found) :]
    rest = [*map(lists, steps), *steps_of(lockstep, 12)]
    assert found + rest[: 12 - len(found)] == whole


def test_an_error_of_one_loader_takes_the_batches_of_its_step_and_no_others() -> None:
    lockstep = Lockstep(ShardedDataLoader(Interrupts(5, ValueError("bad")), 2), ShardedDataLoader(range(12), 2))
    steps, found, errors = iter(lockstep), [], 0
    while True:
        try:
            found.append(lists(next(steps)))
        except ValueError:
            errors += 1
        except StopIteration:
            break
    assert errors == 1 and found == [[[n, n + 1]] * 2 for n in (0, 2, 6, 8, 10)]


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("done", [1, 3, 5])
def test_iterable_data_resumes_with_the_states_of_all_ranks(done: int, stop: str) -> None:
    def loaders(**ranks: int) -> Lockstep:
        stream = ShardedDataLoader(Parts((7, 5)), 2, streams=2, seed=1, **ranks)
        return Lockstep(ShardedDataLoader(range(40), 2, seed=1, **ranks), stream, stop=stop)

    one, alone = loaders(), loaders()
    steps_of(one, done)
    alone.load_state_dict(one.state_dict())
    assert steps_of(alone, 4) == steps_of_rest(done, loaders())
    if done < 3:
        ranks = [loaders(num_replicas=2, rank=rank) for rank in range(2)]
        for each in ranks:
            steps_of(each, done)
        merged = loaders()
        merged.load_state_dict([each.state_dict() for each in ranks])
        assert steps_of(merged, 2) == steps_of_rest(2 * done, loaders())[:2]


def steps_of_rest(done: int, lockstep: Lockstep) -> list[Any]:
    return steps_of(lockstep, done + 4)[done:]


def test_set_epoch_reaches_all_loaders_and_keeps_a_loaded_position_in_it() -> None:
    lockstep = made((7, 10), "longest")
    lockstep.set_epoch(3)
    assert [loader.epoch for loader in lockstep.loaders] == [3, 3] and lockstep.epoch == 3
    steps = steps_of(lockstep, 5)
    other = made((7, 10), "longest")
    other.set_epoch(3)
    steps_of(other, 4)
    state = other.state_dict()
    resumed = made((7, 10), "longest")
    resumed.load_state_dict(state)
    resumed.set_epoch(3)
    assert list(map(lists, resumed)) == steps[4:]


def test_after_a_break_the_next_loop_begins_new_epochs() -> None:
    lockstep = made((7, 10), "shortest")
    steps_of(lockstep, 2)
    assert lockstep.epoch == 0
    second = list(map(lists, lockstep))
    expected = made((7, 10), "shortest")
    expected.set_epoch(1)
    assert second == list(map(lists, expected)) and lockstep.epoch == 2


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    lockstep = made((7, 10), "shortest")
    steps_of(lockstep, 1)
    earlier = lockstep.state_dict()["loaders"][0]
    lockstep = made((7, 10), "shortest")
    steps_of(lockstep, 2)
    state = lockstep.state_dict()
    expected = steps_of(made((7, 10), "shortest"), 4)[2:]
    for bad, message in (
        (made((7, 10), "longest").state_dict(), "stop was 'longest', and is 'shortest'"),
        (made((7,), "shortest").state_dict(), "there were 1 loaders, and are 2"),
        (
            {**state, "loaders": [earlier, made((7, 9), "shortest").loaders[1].state_dict()]},
            "9 samples",
        ),
        ({"step": 1}, "has no 'stop'"),
        (5, "must be a dict"),
        ([state, {**state, "step": 1}], "after different steps"),
    ):
        resumed = made((7, 10), "shortest")
        resumed.load_state_dict(state)
        with pytest.raises((TypeError, ValueError), match=message):
            resumed.load_state_dict(bad)
        assert steps_of(resumed, 2) == expected


def empty_loader() -> Iterator[Any]:
    return iter(Lockstep(ShardedDataLoader(range(4), 2), ShardedDataLoader([], 2), stop="longest"))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Lockstep(), ValueError, "was given no loaders"),
        (lambda: Lockstep(range(3)), TypeError, "loader 0 is a range"),  # type: ignore[arg-type]
        (lambda: Lockstep(ShardedDataLoader), TypeError, "is the class"),  # type: ignore[arg-type]
        (lambda: Lockstep(*[ShardedDataLoader(range(3), 1)] * 2), ValueError, "one loader twice"),
        (lambda: Lockstep(ShardedDataLoader(range(3), 1), stop="first"), ValueError, 'give "shortest" or "longest"'),
        (lambda: next(empty_loader()), ValueError, "loader 1 has no batches"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
