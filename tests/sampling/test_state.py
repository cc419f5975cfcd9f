"""A state is small, plain and cheap; one that does not fit is refused in words."""

import copy
import dataclasses
import functools
import itertools
import json
import math
import pickle
import re
import timeit
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    ClassBalancedBatchSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    IntervalSampler,
    LoaderClosedError,
    PackSampler,
    RandomSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    SortedBucketSampler,
    SortedSampler,
    WeightedRandomSampler,
)
from sharded_loader.sampling.state import Position, Signature, differences, dump


class Keeping:
    """A sampler that goes on where it was, by a state of its own."""

    at = 0

    def __iter__(self):
        for number in range(self.at % 20, 20):
            self.at = number + 1
            yield number

    def __len__(self):
        return 20

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def state_of(loader: ShardedDataLoader, count: int = 2) -> dict[str, Any]:
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    return loader.state_dict()


STATE: dict[str, Any] = {
    "version": 1,
    "epoch": 0,
    "samples": 8,
    "seed": 9,
    "dataset_length": 20,
    "sampler": "RandomSampler",
    "sampler_length": 20,
    "sampler_seeds": [],
    "batch_size": 4,
    "last_batch": "keep",
}


def test_a_state_says_what_it_is_and_is_a_copy() -> None:
    loader = ShardedDataLoader(range(20), 4, shuffle=True, seed=9)
    state = state_of(loader)
    assert state == STATE
    state["sampler_seeds"].append(1)
    state["epoch"] = 99
    assert loader.state_dict() == STATE
    # Of a sampler of another library it has a checksum, and with a given batch sampler it counts batches.
    sampler = torch_data.BatchSampler(torch_data.RandomSampler(range(20)), 4, False)
    state = state_of(ShardedDataLoader(range(20), batch_sampler=sampler, seed=9))
    assert state["batches"] == 2 and "samples" not in state
    assert state["sampler"] == "torch.BatchSampler(torch.RandomSampler)"
    assert state["passed"]["items"] == 2 and state["passed"]["checksum"] > 0 and state["passed"]["state"] is None
    # Draws without replacement come in the order that they always had.
    loader = ShardedDataLoader(range(24), 4, sampler=WeightedRandomSampler([1] * 24, 24, False, seed=1), seed=1)
    assert "WeightedRandomSampler.order_version" not in state_of(loader)["sampler_arguments"]


def shuffled(length: int = 20, batch_size: int = 4, **other: Any) -> ShardedDataLoader:
    return ShardedDataLoader(range(length), batch_size, True, **other)


def over(sampler: Any, length: int = 20, **other: Any) -> ShardedDataLoader:
    """A loader over a sampler of indices or of batches, or with other arguments that decide its order."""
    of_batches = isinstance(sampler, OF_BATCHES)
    order = {"batch_sampler": sampler} if of_batches else {"sampler": sampler, "batch_size": 4}
    order = {"batch_size": 4, **sampler} if isinstance(sampler, dict) else order
    return ShardedDataLoader(range(length), **{**order, **other})


OF_BATCHES = (
    *(BatchSampler, BoundedBudgetSampler, ClassBalancedBatchSampler, FixedBucketSampler, GroupedBatchSampler),
    PackSampler,
)
LENGTHS, RANDOM, SHARDS, LABELS = [5, 3, 9, 4, 7, 2, 8, 6] * 3, RandomSampler(9, seed=1), [8, 4, 12], [0, 1, 1] * 8


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: shuffled(21), "the dataset had 20 samples, and has 21"),
        (lambda: ShardedDataLoader(range(20), 4), "the sampler was RandomSampler, and is SequentialSampler"),
        (lambda: shuffled(batch_size=5), "batch_size was 4, and is 5.*strict=False allows another batch size"),
        (lambda: shuffled(last_batch="rollover"), "last_batch was 'keep', and is 'rollover'"),
        (lambda: over(torch_data.RandomSampler(range(20))), "sampler was RandomSampler, and is torch.RandomSampler"),
        (lambda: over(BatchSampler(RandomSampler(20), 4)), "RandomSampler, and is BatchSampler.*was 4, and is None"),
        (lambda: over(RandomSampler(17, seed=1)), "the sampler had 20 samples in the epoch, and has 17"),
        (lambda: over(RandomSampler(20, seed=1)), "was made by the loader, and is now passed by the user, or vice"),
        (lambda: shuffled(30, 6, last_batch="discard"), "20 samples, and has 30, batch_size was 4.*last_batch was"),
    ],
)
def test_a_state_of_another_loader_is_refused_saying_what_differs_and_changes_nothing(make: Any, said: str) -> None:
    loader = make()
    before = loader.state_dict(), loader.seed, loader.epoch
    with pytest.raises(ValueError, match=said):
        loader.load_state_dict(state_of(shuffled(seed=77)))
    assert (loader.state_dict(), loader.seed, loader.epoch) == before


def test_another_seed_of_a_given_sampler_is_refused_and_batches_are_not_taken_for_samples() -> None:
    with pytest.raises(ValueError, match="the seed of the RandomSampler was 1, and is 2"):
        over(RandomSampler(20, seed=2)).load_state_dict(state_of(over(RandomSampler(20, seed=1))))
    sampler = BatchSampler(RandomSampler(20, seed=1), 4)
    with pytest.raises(ValueError, match="batch_size was None, and is 4"):
        ShardedDataLoader(range(20), 4, sampler=sampler.sampler).load_state_dict(state_of(over(sampler)), strict=False)
    for strict in (True, False):
        with pytest.raises(ValueError, match="a step of all ranks had 4 samples, and has 5"):
            larger = over({"costs": range(1, 21), "batch_size": 5})
            larger.load_state_dict(state_of(over({"costs": range(1, 21)})), strict=strict)


@pytest.mark.parametrize(
    ("make", "was", "now", "said"),
    [
        (IntervalSampler, (24, 3), (24, 2), "interval of the IntervalSampler was 3, and is 2"),
        (WeightedRandomSampler, (LENGTHS, 24), (LENGTHS[::-1], 24), "weights of the WeightedRandomSampler changed"),
        (BoundedBudgetSampler, (LENGTHS, 20), (LENGTHS, 19), "budget of the BoundedBudgetSampler changed after the"),
        (FixedBucketSampler, (LENGTHS, 3, 2), (LENGTHS[::-1], 3, 2), "lengths of the FixedBucketSampler changed after"),
        (BatchSampler, (RANDOM, 4), (RANDOM, 3), "batch_size of the BatchSampler was 4, a"),
        (ShardShuffleSampler, (SHARDS, 2), (SHARDS, 3), "window of the ShardShuffleSampler was 2, and is 3"),
        (ShardShuffleSampler, (SHARDS, 2, 2), (SHARDS, 2, 1), "lanes of the ShardShuffleSampler was 2, and is 1"),
        (ShardShuffleSampler, (SHARDS,), (SHARDS[::-1],), "lengths of the ShardShuffleSampler changed after the state"),
        (PackSampler, (LENGTHS, 9, 3), (LENGTHS, 10, 3), "tokens of the PackSampler"),
        (lambda window: PackSampler(LENGTHS, 9, window=window), (5,), (6,), "window of the PackSampler"),
        (PackSampler, (LENGTHS, 9, 3), (LENGTHS, 9, 2), "rows of the PackSampler"),
        (PackSampler, (LENGTHS, 9, 3), (LENGTHS[::-1], 9, 3), "lengths of the PackSampler"),
        (
            ClassBalancedBatchSampler,
            (LABELS, 2, 2),
            (LABELS[::-1], 2, 2),
            "labels of the ClassBalancedBatchSampler cha",
        ),
        (lambda costs: {"costs": costs}, (LENGTHS,), (LENGTHS[::-1],), "costs of the CostSampler changed"),
        (SortedSampler, (LENGTHS,), (LENGTHS, False), "order of the keys of the SortedSampler changed after the state"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_sampler_with_other_arguments_is_refused_by_name(make: Any, was: Any, now: Any, said: str) -> None:
    loader, other = (over(make(*arguments), 24, seed=1) for arguments in (was, now))
    begin, state = loader.state_dict(), state_of(loader)
    over(make(*was), 24, seed=1).load_state_dict(json.loads(json.dumps(state)))
    with pytest.raises(ValueError, match=said):
        other.load_state_dict(state)
    assert other.position == 0
    if re.match(
        "budget|batch_size|tokens|window of the Pack|a step", said
    ):  # batches that cannot go on: see test_rescale.py
        with pytest.raises(ValueError, match=said):
            other.load_state_dict(state, strict=False)
    else:
        other.load_state_dict(state, strict=False)
    other.load_state_dict(begin)
    other.load_state_dict({key: value for key, value in state.items() if key != "sampler_arguments"})


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1] * 24, 24, seed=1),
        ShardShuffleSampler([8, 8, 8], window=2, seed=1),
        GroupedBatchSampler([0, 1] * 12, 4, seed=1),
        ClassBalancedBatchSampler([0, 1, 2] * 8, classes=2, samples=2, seed=1),
    ],
)
def test_a_state_of_an_older_order_is_refused_in_mid_epoch_by_name(sampler: Any) -> None:
    loader = over(sampler, 24, seed=1)
    begin, state = loader.state_dict(), state_of(loader)
    name = type(sampler).__name__
    assert state["sampler_arguments"].pop(f"{name}.order_version") == 2
    with pytest.raises(ValueError, match=f"the order of the {name} was different in the version of this library"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, strict=False)
    begin["sampler_arguments"].pop(f"{name}.order_version")
    loader.load_state_dict(begin)


PASSED = {"epoch": 0, "items": 8, "checksum": 1, "rank": None, "finished": False, "state": None}


@pytest.mark.parametrize(
    ("spoilt", "kind", "said"),
    [
        (None, TypeError, "None, a NoneType; it must be a dict"),
        (["version"], TypeError, "a list; it must be a dict: give what state_dict"),
        ({}, ValueError, "no 'version', its keys are []"),
        ({"model": 1}, ValueError, "no 'version', its keys are ['model']"),
        (STATE | {"version": 2}, ValueError, "version 2, this sharded_loader reads up to version 1: update"),
        (STATE | {"samples": True}, ValueError, "'samples' must be an integer, got True"),
        (STATE | {"samples": 21}, ValueError, "samples 21, but the epoch has only 20"),
        (STATE | {"sampler_arguments": {"x": [1]}}, ValueError, "has 'x': [1]; it must have names, and numbers or"),
        (STATE | {"sampler_arguments": {3: 1}}, ValueError, "has 3: 1; it must have names, and numbers or strings"),
        (STATE | {"sampler_seeds": 3}, ValueError, "'sampler_seeds' is 3; it must be a list"),
        (STATE | {"passed": [1]}, ValueError, "'passed' is [1]; it must be a dict"),
        (STATE | {"passed": {"epoch": 0}}, ValueError, "no 'items'"),
        (STATE | {"passed": PASSED | {"items": -1}}, ValueError, "its 'items' must be at least 0, got -1"),
        (STATE | {"passed": PASSED | {"finished": "no"}}, ValueError, "its 'finished' is 'no'; it must be true or"),
    ],
    ids=str,
)
def test_what_is_no_state_is_refused_in_words(spoilt: Any, kind: type[Exception], said: str) -> None:
    loader = shuffled(seed=1)
    with pytest.raises(kind, match=re.escape(said)):
        loader.load_state_dict(spoilt)
    assert loader.seed == 1 and loader.position == 0


def test_numbers_of_numpys_are_numbers_and_a_closed_loader_tells_its_state_and_takes_none() -> None:
    loader = shuffled()
    loader.load_state_dict({**STATE, "epoch": np.int64(0), "samples": np.int32(8)})
    loader.close()
    assert loader.state_dict() == STATE
    with pytest.raises(LoaderClosedError):
        loader.load_state_dict(STATE)


@pytest.mark.slow
@pytest.mark.parametrize("foreign", [False, True])
def test_a_state_costs_microseconds_and_less_than_a_kilobyte(foreign: bool) -> None:
    order: dict[str, Any] = {"sampler": torch_data.RandomSampler(range(100_000))} if foreign else {"shuffle": True}
    loader = ShardedDataLoader(range(100_000), 64, seed=2**62, **order)
    iterator = iter(loader)
    for _ in range(100):
        next(iterator)
    assert len(json.dumps(loader.state_dict())) < 500
    # A few microseconds on a free machine; ten times that is still no reason to save less often.
    assert min(timeit.repeat(loader.state_dict, number=100, repeat=5)) / 100 < 100e-6


ALL_KINDS: dict[str, Callable[[], ShardedDataLoader]] = {
    "shuffled": lambda: shuffled(seed=1),
    "rollover": lambda: shuffled(seed=1, batch_size=3, last_batch="rollover"),
    "rollover, a batch of several epochs": lambda: shuffled(7, 17, seed=1, last_batch="rollover"),
    "discard": lambda: shuffled(seed=1, batch_size=3, last_batch="discard"),
    "ranks": lambda: shuffled(seed=1, num_replicas=3, rank=1, last_batch="rollover"),
    "given": lambda: ShardedDataLoader(range(20), 3, sampler=RandomSampler(20, seed=1), seed=2),
    "seedless": lambda: ShardedDataLoader(range(20), 3, sampler=RandomSampler(20), seed=2),
    "arguments": lambda: ShardedDataLoader(range(20), 3, sampler=IntervalSampler(20, 3), seed=2),
    "weights": lambda: ShardedDataLoader(range(20), 3, sampler=WeightedRandomSampler([1] * 20, 20, seed=2), seed=2),
    "batches": lambda: ShardedDataLoader(range(20), batch_sampler=BatchSampler(RandomSampler(20, seed=1), 4), seed=2),
    **{
        f"batches, {name}": lambda make=make: ShardedDataLoader(  # type: ignore[misc]
            range(20), batch_sampler=make(), seed=2, num_replicas=2, rank=1, collate_fn=list
        )
        for name, make in {
            "sorted": lambda: SortedBucketSampler(LENGTHS[:20], 2, mult=2, shuffle=True, seed=1),
            "buckets": lambda: FixedBucketSampler(LENGTHS[:20], 2, 3, shuffle=True, seed=1),
            "kinds": lambda: GroupedBatchSampler([n % 2 for n in range(20)], 2, seed=1),
            "budget": lambda: BoundedBudgetSampler(LENGTHS[:20], 18, seed=1),
            "classes": lambda: ClassBalancedBatchSampler([n % 4 for n in range(20)], 2, 1, 6, seed=1),
            "packed": lambda: PackSampler(LENGTHS[:20], 10, 2, seed=1, last_batch="discard"),
        }.items()
    },
    "packed, in steps": lambda: ShardedDataLoader(
        range(20), batch_sampler=PackSampler(LENGTHS[:20], 10, 2, seed=1), steps_per_epoch=3, seed=2, collate_fn=list
    ),
    "costs": lambda: ShardedDataLoader(range(20), 3, costs=LENGTHS[:20], seed=2),
    "foreign": lambda: ShardedDataLoader(range(20), 3, sampler=torch_data.RandomSampler(range(20)), seed=2),
    "foreign batches": lambda: ShardedDataLoader(range(6), batch_sampler=[[0, 1], [2, 3], [4, 5]], seed=2),
    "foreign rollover": lambda: ShardedDataLoader(
        range(20), 3, sampler=torch_data.RandomSampler(range(20)), seed=2, last_batch="rollover"
    ),
    "stateful": lambda: ShardedDataLoader(range(20), 3, sampler=Keeping(), seed=2),
}
NUMBERS = (0, -1, 1, 7, -1000, 1000, 2**31, 2**53, -(2**53))
NO_NUMBERS = (None, True, math.nan, math.inf, -math.inf, 1.0, "", "3", "rollover", b"1", [], [1], [None, 2**53], {})
WRONG: list[Any] = [*NUMBERS, *NO_NUMBERS, {"a": 1}, [["x"]], np.arange(3), object()]

# What an error may call an entry, where it compares the loader with the state's.
ALSO_CALLED = {
    "dataset_length": "the dataset had",
    "batch_size": "a step of all ranks had",
    "last_batch": "'samples' must be at least 0",
    "sampler_length": "the sampler had",
    "sampler_seeds": "the seed of the|the sampler was made by the loader",
    "sampler_arguments": "(interval|rollover|weights|replacement|batch_size|last_batch) of the|[a-z_]+ of the [A-Z]",
    "num_replicas": "saved with other batches|ranks",
    "step_ranks": "the sampler had",
}


def entries_of(state: dict[str, Any]) -> list[tuple[str, ...]]:
    return [*((name,) for name in state), *(("passed", name) for name in state.get("passed") or ())]


@functools.cache
def states_of(kind: str) -> list[dict[str, Any]]:
    """States of the first three epochs of a loader, as JSON keeps them."""
    loader = ALL_KINDS[kind]()
    states = [loader.state_dict()]
    for _ in range(3):
        for _ in loader:
            states.append(loader.state_dict())
        states.append(loader.state_dict())
    return [json.loads(json.dumps(state)) for state in states]


@pytest.mark.costly(8)
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_every_state_of_every_loader_is_taken(kind: str) -> None:
    states = states_of(kind)
    epochs = [None, *(state["epoch"] for state in states), None]
    for number, state in enumerate(states):
        loader = ALL_KINDS[kind]()
        loader.load_state_dict(copy.deepcopy(state))
        told = json.loads(json.dumps(loader.state_dict()))
        # The state after the last batch of an epoch is taken as the beginning of the next epoch.
        before, epoch, after = epochs[number : number + 3]
        assert told == (states[number + 1] if before == epoch != after and after is not None else state)


@pytest.mark.costly(4)
@pytest.mark.parametrize("kind", ALL_KINDS)
@given(data=st.data())
def test_a_spoilt_state_is_refused_by_name_or_read_but_never_half_taken(kind: str, data: st.DataObject) -> None:
    state = copy.deepcopy(data.draw(st.sampled_from(states_of(kind))))
    *inside, name = data.draw(st.sampled_from(entries_of(state)))
    holder = state[inside[0]] if inside else state
    if data.draw(st.integers(0, 9)):
        which = data.draw(st.integers(0, len(WRONG)))
        any_other = st.integers(-50, 50) | st.text(max_size=3)
        holder[name] = WRONG[which] if which < len(WRONG) else data.draw(any_other)
    else:
        del holder[name]
    strict = data.draw(st.booleans())
    loader = ALL_KINDS[kind]()
    given_sampler = pickle.dumps(loader.sampler)
    before = loader.state_dict(), loader.seed, loader.epoch, loader.position, repr(loader)
    try:
        loader.load_state_dict(state, strict=strict)
    except (ValueError, TypeError) as error:
        assert re.search(f"{name}|{ALSO_CALLED.get(name, name)}", str(error)), str(error)
        assert len(str(error)) < 1000
        assert (loader.state_dict(), loader.seed, loader.epoch, loader.position, repr(loader)) == before
        assert pickle.dumps(loader.sampler) == given_sampler
        return
    assert loader.epoch >= 0 and loader.position >= 0
    try:
        first = list(itertools.islice(loader, 3))
        assert all(0 <= int(index) < 20 for batch in first for index in batch)
    except (ValueError, TypeError, LookupError) as error:  # ours, or what the user's sampler makes of a spoilt state
        assert "cannot be resumed" in str(error) or inside, str(error)


def test_a_place_that_its_sampler_has_passed_by_its_own_state_is_refused() -> None:
    state = {**states_of("stateful")[3], "samples": 0}
    assert state["passed"]["items"] == 9
    loader = ALL_KINDS["stateful"]()
    loader.load_state_dict(state)
    with pytest.raises(ValueError, match="cannot be resumed: it goes on at item"):
        list(loader)


@pytest.mark.parametrize("kind", ["rollover", "ranks", "foreign rollover", "rollover, a batch of several epochs"])
@pytest.mark.parametrize("done", [-4000, 1000, -(2**62), 2**62])
@pytest.mark.parametrize("epoch", [0, 150])
def test_a_place_outside_of_its_epoch_is_refused_with_rollover_too(kind: str, done: int, epoch: int) -> None:
    loader = ALL_KINDS[kind]()
    before = loader.state_dict()
    with pytest.raises(ValueError, match="samples"):
        loader.load_state_dict({**before, "samples": done, "epoch": epoch})
    assert loader.state_dict() == before


def test_each_field_of_a_signature_is_saved_read_and_compared() -> None:
    one = Signature(
        7, 100, "RandomSampler", 100, (3, None), 8, "keep", (("RandomSampler.x", 1),), 5, 2, 4, 9, ((3, 5),)
    )
    other = Signature(8, 90, "Other", 90, (4, None), 4, "rollover", (("RandomSampler.x", 2),), 6, 7, 8, 7, ())
    state = dump(Position(2, 16), one)
    assert [name for name in state if name not in ("version", "epoch", "samples")] == [
        field.name for field in dataclasses.fields(Signature)
    ]
    assert differences(one, other) == [
        "the dataset had 100 samples, and has 90",
        "the sampler was RandomSampler, and is Other",
        "batch_size was 8, and is 4",
        "last_batch was 'keep', and is 'rollover'",
        "steps_per_epoch was 5, and is 6",
        "there were 2 ranks, and are 7",
    ]
    shorter = dataclasses.replace(one, sampler_length=None, batch_size=4)
    assert differences(one, shorter, strict=False) == [
        "the sampler had 100 samples in the epoch, and has an unknown number of"
    ]
    assert differences(one, one) == []
