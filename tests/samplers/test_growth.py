"""``loader.grow`` and ``loader.without``: the dataset changes between two steps, and each sample still comes once."""

import copy
import json
import pickle
import sys
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, make_pool
from injection import InterruptAt

from sharded_loader import (
    ArrayDataset,
    Dataset,
    LoaderClosedError,
    LoaderWarning,
    PackSampler,
    Placement,
    RandomSampler,
    RepeatedSampler,
    ShardedDataLoader,
    interleave,
)
from sharded_loader.samplers import growth
from sharded_loader.torch import DataLoader


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


def loader_of(dataset: Any, **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(dataset, **{"batch_size": 4, "shuffle": True, "seed": 5, **given})


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


@pytest.mark.parametrize("pool", POOLS)
def test_what_was_read_stays_and_the_rest_is_mixed_with_the_new(pool: str) -> None:
    with loader_of(np.arange(40), pool=make_pool(pool)) as loader:
        batches = iter(loader)
        early = flat([next(batches), next(batches)])
        loader.grow(np.arange(60))
        assert len(loader) == 15 and len(loader.dataset) == 60
        late = flat(batches)
        assert sorted(early + late) == list(range(60))
        new = [place for place, index in enumerate(late) if index >= 40]
        assert new[0] < 13 and new[-1] > 38  # not in front, and not at the end
        assert [flat([batch]) for batch in loader] == [flat([batch]) for batch in ordinary(60, 1)]


def ordinary(length: int, epoch: int) -> ShardedDataLoader[Any]:
    loader = loader_of(range(length))
    loader.set_epoch(epoch)
    return loader


def test_in_order_the_new_ones_come_last() -> None:
    loader = loader_of(range(10), shuffle=False)
    batches = iter(loader)
    next(batches)
    loader.grow(range(13))
    loader.without([5, 11])
    assert [batch.tolist() for batch in batches] == [[4, 6, 7, 8], [9, 10, 12]]
    assert flat(loader) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12]


def test_samples_left_out_do_not_come_again_in_later_epochs() -> None:
    loader = loader_of(range(40))
    batches = iter(loader)
    early = flat([next(batches)])
    removed = {early[0], 7, 8, 9}
    loader.without(removed)
    assert sorted(early + flat(batches)) == sorted({*range(40)} - removed | {early[0]} | ({*early} & removed))
    for _ in range(2):
        assert sorted(flat(loader)) == sorted({*range(40)} - removed)
    assert all(loader.when(index, 4) == [] for index in removed)


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_state_goes_on_with_any_number_of_ranks(replicas: int) -> None:
    first = [loader_of(range(40), batch_size=2, num_replicas=2, rank=rank) for rank in range(2)]
    batches = [iter(loader) for loader in first]
    seen = flat(map(next, batches))
    for loader in first:
        loader.grow(range(50))
    seen += flat(map(next, batches))
    for loader in first:
        loader.without([49])
    seen += flat(map(next, batches))
    state = through_json(first[1].state_dict())
    later = [loader_of(range(50), batch_size=2, num_replicas=replicas, rank=rank) for rank in range(replicas)]
    for loader in later:
        loader.load_state_dict(state, strict=replicas != 1)
    rest = flat(batch for loader in later for batch in loader)
    assert {*seen, *rest} == {*range(50)} - ({49} - {*seen})
    assert len(seen + rest) - 49 < 3  # a rank may be filled up
    assert len(json.dumps(state)) < 600


def test_a_state_of_fewer_samples_is_loaded_over_more_and_grows_from_there() -> None:
    short = loader_of(range(20))
    early = flat([next(iter(short))])
    state = through_json(short.state_dict())
    loader = loader_of(range(30))
    with pytest.raises(ValueError, match=r"strict=False.*first 20.*loader\.grow\(\) after that mixes the new ones"):
        loader.load_state_dict(state)
    loader.load_state_dict(state, strict=False)
    loader.grow()
    assert sorted(early + flat(loader)) == list(range(30))
    loader.load_state_dict(state, strict=False)  # without grow(): the rest of the first ones, then all
    assert sorted(early + flat(loader)) == list(range(20))
    assert sorted(flat(loader)) == list(range(30))


def test_in_the_drop_in_too_a_state_of_fewer_samples_grows() -> None:
    saved = DataLoader(range(8), 2, shuffle=True, seed=1, num_replicas=1)  # type: ignore[arg-type]
    early = flat([next(iter(saved))])
    loader = DataLoader(range(11), 2, shuffle=True, seed=1, num_replicas=1)  # type: ignore[arg-type]
    loader.load_state_dict(saved.state_dict(), strict=False)
    loader.grow()
    assert sorted(early + flat(loader)) == list(range(11))
    plain = DataLoader(range(8), 2)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="strict=False needs the order of ShardedDataLoader.*give num_replicas=1"):
        plain.load_state_dict(plain.state_dict(), strict=False)


def test_the_same_object_may_have_grown() -> None:
    data = list(range(10))
    loader = loader_of(data)
    batches = iter(loader)
    early = flat([next(batches)])
    data += [10, 11]
    loader.grow()
    loader.grow()  # nothing more
    assert sorted(early + flat(batches)) == list(range(12))


def test_before_the_first_batch_and_at_the_end_of_an_epoch() -> None:
    loader = loader_of(range(10), batch_size=5)
    loader.grow(range(12))
    assert [batch.tolist() for batch in loader] == [b.tolist() for b in loader_of(range(12), batch_size=5)]
    assert loader.state_dict() == {**loader.state_dict(), "epoch": 1, "samples": 0}
    batches = iter(loader)
    early = flat([next(batches), next(batches), next(batches)])
    loader.grow(range(15))  # all were read, and the loop has not ended
    assert sorted(flat(batches)) == [12, 13, 14] and sorted(early) == list(range(12))


def test_steps_around_a_short_batch_in_mid_epoch_are_those_that_were_read_or_an_error() -> None:
    data = [0]
    loader = loader_of(data, batch_size=2, shuffle=False)
    batches = iter(loader)
    read = [next(batches).tolist()]
    for more in ([1, 2, 3], [4, 5]):
        data += more
        loader.grow()
        read.append(next(batches).tolist())
    assert read == [[0], [1, 2], [3, 4]] and loader.indices(0, 1) == [3, 4]
    with pytest.raises(ValueError, match="step 0 of epoch 0 was read by other ranks, or in other batches"):
        loader.indices(0, 0)


def test_a_loader_that_goes_back_has_the_epochs_as_they_were() -> None:
    loader = loader_of(range(10))
    before = flat(loader)
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    loader.grow(range(15))
    rest = flat(batches)
    loader.set_epoch(0)
    assert flat(loader) == before
    assert [loader.indices(1, step) for step in range(4)][1:] != []
    loader.load_state_dict(state, strict=False)
    assert sorted(flat(loader)) != sorted(rest) and loader.epoch == 2


def test_a_loader_that_never_grew_has_the_states_of_before_and_takes_over_those_that_did() -> None:
    plain = loader_of(range(12))
    next(iter(plain))
    assert "sampler_arguments" not in plain.state_dict() or "grown" not in plain.state_dict()["sampler_arguments"]
    grown = loader_of(range(10))
    batches = iter(grown)
    next(batches)
    grown.grow(range(12))
    state, rest = through_json(grown.state_dict()), [batch.tolist() for batch in batches]
    plain.load_state_dict(state)
    assert [batch.tolist() for batch in plain] == rest
    other = loader_of(range(12))
    before = other.state_dict()
    for wrong in ({"seed": "x"}, {"batch_size": 3}, {"sampler_arguments": {"grown": "[[1,2]]"}}):
        with pytest.raises(ValueError, match="state"):
            other.load_state_dict({**state, **wrong})
        assert other.state_dict() == before


def test_ten_billion_samples_grow_twenty_times_and_lose_some() -> None:
    length = 10**10
    loader = loader_of(range(length), batch_size=256)
    batches = iter(loader)
    seen = [next(batches)]
    for _ in range(20):
        length += 10**8
        loader.grow(range(length))
        seen.append(next(batches))
    removed = loader.indices(0, 10**6)[:3]
    loader.without(removed)
    read = flat(seen) + [index for step in (22, 10**6, 4 * 10**7) for index in loader.indices(0, step)]
    assert len({*read}) == len(read) and not {*read} & {*removed}
    assert loader.when(read[-1]) == [(0, 4 * 10**7, 0, 255)]
    assert len(json.dumps(loader.state_dict())) < 1500
    assert any(index >= 10**10 for index in read)


class Fields(Dataset):
    def __init__(self, length: int, last: Any = None) -> None:
        self.length, self.last = length, last

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        is_last = self.last is not None and index == self.length - 1
        return self.last if is_last else {"x": index, "y": 2 * index}


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (Fields(9), "has 9 samples, and had 10"),
        (
            Fields(11, last={"x": 1}),
            r"sample 10, the first new one, is a dict with the fields \['x'\], and sample 0 is .* \['x', 'y'\]",
        ),
        (Fields(11, last=(1, 2)), "is a tuple with the fields 2"),
    ],
)
def test_a_dataset_that_is_not_the_old_one_with_more_is_an_error_and_changes_nothing(dataset: Any, text: str) -> None:
    loader = loader_of(Fields(10))
    batches = iter(loader)
    next(batches)
    state = loader.state_dict()
    with pytest.raises(ValueError, match=text):
        loader.grow(dataset)
    assert loader.state_dict() == state and sum(len(batch["x"]) for batch in batches) == 6


def test_wrong_indices_and_wrong_moments_are_errors() -> None:
    loader = loader_of(range(10))
    for wrong in ([3, 10], [-1], range(10)):
        with pytest.raises(IndexError, match="the dataset has 10 samples, from 0 on: give indices of some"):
            loader.without(wrong)
    for wrong in (["a"], [1.5]):
        with pytest.raises(TypeError, match="integer"):
            loader.without(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="dataset"):
        loader.grow(3)
    assert sorted(flat(loader)) == list(range(10))
    loader.close()
    for change in (lambda: loader.grow(range(12)), lambda: loader.without([1])):
        with pytest.raises(LoaderClosedError):
            change()


def test_inside_next_it_is_an_error() -> None:
    class Grows(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            loader.grow(range(9))
            return index

    loader = ShardedDataLoader(Grows(), 4)
    with pytest.raises(RuntimeError, match="inside next"):
        next(iter(loader))


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": RandomSampler(10)},
        {"sampler": RepeatedSampler(2), "shuffle": True},
        {"batch_sampler": PackSampler([1] * 10, 4), "batch_size": None},
        {"costs": np.ones(10)},
        {"steps_per_epoch": 3},
        {"last_batch": "rollover"},
        {"dataset": lambda: iter(range(5)), "streams": 1},
        {"dataset": interleave([range(5), range(5)], shuffle=True)},
        {"dataset": interleave([range(5), range(5)])},
        {"dataset": ArrayDataset(np.arange(10)), "device": Placement("cpu", resident=True)},
    ],
)
def test_other_orders_say_that_they_cannot_change(given: Any) -> None:
    loader = ShardedDataLoader(**{"dataset": range(10), "batch_size": 2, **given})
    for change in (lambda: loader.grow(range(12)), lambda: loader.without([1])):
        with pytest.raises(TypeError, match="only the order of shuffle=True or False can change"):
            change()


def test_the_drop_in_grows_too() -> None:
    loader = DataLoader(range(10), batch_size=2, shuffle=True, num_replicas=1)  # type: ignore[arg-type]
    batches = iter(loader)
    early = flat([next(batches)])
    loader.grow(range(12))
    loader.without([11])
    assert sorted(early + flat(batches)) == list(range(11)) and len(loader.dataset) == 12
    for change in ("grow", "without"):
        with pytest.raises(TypeError, match=f"{change} needs the order of ShardedDataLoader"):
            getattr(DataLoader(range(10), 2), change)([1])  # type: ignore[arg-type]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_of_the_drop_in_leaves_out_what_was_left_out(copied: Any) -> None:
    loader = DataLoader(range(8), batch_size=2, shuffle=True, seed=1, num_replicas=1)  # type: ignore[arg-type]
    loader.without([1, 2])
    other = copied(copied(loader))
    assert sorted(flat(other)) == [0, 3, 4, 5, 6, 7]
    assert flat(copied(loader)) == flat(loader) and flat(copied(loader)) == flat(loader)


def test_ranks_leave_after_the_dataset_has_grown() -> None:
    made = [loader_of(range(30), batch_size=2, num_replicas=3, rank=rank) for rank in range(3)]
    batches = [iter(loader) for loader in made]
    seen = flat(map(next, batches))
    for loader in made:
        loader.grow(range(42))
    seen += flat(map(next, batches))
    with pytest.warns(LoaderWarning, match="samples in a step"):
        for rank, loader in enumerate(made[:2]):
            loader.rescale(2, rank)
    seen += flat(batch for iterator in batches[:2] for batch in iterator)
    assert sorted({*seen}) == list(range(42)) and len(seen) - 42 < 2


CHANGES = {"grow": lambda loader: loader.grow(range(30)), "without": lambda loader: loader.without([3, 7, 11])}
LINES = ("growth.py", "epochs.py", "order.py", "own.py", "epoch.py", "pipeline.py", "loader.py", "lookup.py")


@pytest.mark.parametrize("change", CHANGES)
def test_a_ctrl_c_in_a_change_leaves_all_of_it_or_nothing(change: str) -> None:
    def changed(line: int) -> tuple[list[Any], bool]:
        """State and rest of an epoch that was changed until a line, and whether there is such a line."""
        loader = loader_of(range(20), batch_size=2)
        batches = iter(loader)
        early, interrupt = [next(batches).tolist() for _ in range(2)], InterruptAt(line, LINES)
        with suppress(KeyboardInterrupt):
            before = sys.gettrace()
            sys.settrace(interrupt)
            try:
                CHANGES[change](loader)
            finally:
                sys.settrace(before)
        return [early, loader.state_dict(), len(loader), [batch.tolist() for batch in batches]], interrupt.fired

    nothing, everything = changed(1)[0], changed(10**9)[0]
    assert nothing != everything
    seen, line, fired = [nothing], 1, True
    while fired:
        line += 61
        found, fired = changed(line)
        assert found in (nothing, everything), line
        seen.append(found)
    assert len(seen) > 5


@pytest.mark.parametrize("shuffle", [True, False])
def test_one_sample_after_the_other_is_left_out_without_looking_up_those_before_again(
    shuffle: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_up, inverted = list[int](), growth.inverted

    def counted(order: Any, indices: Any) -> Any:
        looked_up.append(len(indices))
        return inverted(order, indices)

    monkeypatch.setattr(growth, "inverted", counted)
    loader = loader_of(range(600), batch_size=2, shuffle=shuffle, seed=11)
    batches, read, removed = iter(loader), list[int](), list[int]()
    for _ in range(60):
        read += next(batches).tolist()
        removed.append(next(index for index in range(599, 0, -1) if index not in {*read, *removed}))
        looked_up.clear()
        loader.without(removed[-1:])
    assert len(looked_up) < 20  # it was hundreds, and the time of one more grew with their square
    assert sorted([*read, *flat(batches), *removed]) == list(range(600))
    again = loader_of(range(600), batch_size=2, shuffle=shuffle, seed=11)
    growth.MADE.clear()
    again.load_state_dict(through_json(loader.state_dict()))
    assert [again.indices(0, step) for step in (30, 70, 200)] == [loader.indices(0, step) for step in (30, 70, 200)]
