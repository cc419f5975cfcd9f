"""Weights that change while a loader reads: from the next batch on, on all ranks, in states; older steps stay known."""

from __future__ import annotations

import copy
import json
import os
import pickle
import signal
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, PROCESS_POOLS, covering, make_pool

from sharded_loader import BatchSampler, RepeatedSampler, ShardedBatchSampler, ShardedDataLoader, WeightedRandomSampler
from sharded_loader.instruments.check import first_difference, other_facts
from sharded_loader.samplers import weighted
from sharded_loader.torch import DataLoader

LENGTH, DRAWS, STEP = 60, 48, 12  # samples, draws of an epoch, and draws of all ranks in a step
FIRST = np.arange(1.0, LENGTH + 1)
ENTRY = "WeightedRandomSampler.set_weights"


class Ranks:
    """Loaders of all ranks, each with a sampler of its own, which go in step; ``read`` has what they have read."""

    def __init__(self, ranks: int = 1, replacement: bool = True, pool: str = "inline", state: Any = None) -> None:
        self.samplers = [WeightedRandomSampler(FIRST, DRAWS, replacement, seed=3) for _ in range(ranks)]
        self.loaders = [
            ShardedDataLoader(
                range(LENGTH), STEP // ranks, sampler=sampler, num_replicas=ranks, rank=rank, pool=make_pool(pool, 1)
            )
            for rank, sampler in enumerate(self.samplers)
        ]
        for loader in self.loaders if state is not None else ():
            loader.load_state_dict(json.loads(state))
        self.read: dict[tuple[int, int], list[int]] = {}

    def state(self) -> str:
        return json.dumps(self.loaders[-1].state_dict())

    def epoch(self) -> Any:
        """Read an epoch, and make the change that belongs to each step; yield the state after it."""
        for batches in zip(*self.loaders, strict=True):
            at = self.loaders[0].epoch, self.loaders[0].position - 1
            rows = [batch.tolist() for batch in batches]
            self.read[at] = [row[n] for n in range(len(rows[0])) for row in rows]
            for sampler in self.samplers:
                sampler.update(*change_after(*at))
            yield self.state()

    def known(self) -> dict[tuple[int, int], list[int]]:
        """What the last rank knows of the steps, of all ranks."""
        last, ranks = self.loaders[-1], range(len(self.loaders))
        rows = {at: [last.indices(*at, rank) for rank in ranks] for at in WHOLE}
        return {at: [row[n] for n in range(len(found[0])) for row in found] for at, found in rows.items()}

    def close(self) -> None:
        for loader in self.loaders:
            loader.close()


def change_after(epoch: int, step: int) -> tuple[Any, Any]:
    """A change of a few weights; after some steps none."""
    draw = np.random.default_rng([epoch, step])
    return draw.integers(0, LENGTH, 3 * (step % 3)), draw.random(3 * (step % 3)) * 90 + 0.1


def whole(epochs: int = 3, **options: Any) -> tuple[dict[tuple[int, int], list[int]], list[str]]:
    ranks = Ranks(**options)
    states = [state for _ in range(epochs) for state in ranks.epoch()]
    ranks.close()
    return ranks.read, states


WHOLE, STATES = whole()
ONCE, STATES_ONCE = whole(replacement=False)


@pytest.mark.costly(2)
@covering(pool=POOLS, ranks=[1, 2, 3], replacement=[True, False])
def test_every_pool_and_any_number_of_ranks_read_the_same(pool: str, ranks: int, replacement: bool) -> None:
    assert whole(ranks=ranks, pool=pool, replacement=replacement)[0] == (WHOLE if replacement else ONCE)


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("ranks", [1, 4])
def test_from_any_state_other_ranks_go_on_and_know_what_was_read(replacement: bool, ranks: int) -> None:
    read, states = (WHOLE, STATES) if replacement else (ONCE, STATES_ONCE)
    for done in range(0, len(states), 3):
        other = Ranks(ranks, replacement, state=states[done])
        before = dict(list(read.items())[: done + 1])
        assert {at: one for at, one in other.known().items() if at in before} == before
        while other.loaders[0].epoch < 3:
            for _ in other.epoch():
                pass
        assert other.read == dict(list(read.items())[done + 1 :])
        other.close()


@pytest.mark.slow
@pytest.mark.parametrize("replacement", [True, False])
def test_after_a_thousand_updates_any_step_can_be_read_again_on_other_ranks(replacement: bool) -> None:
    draw = np.random.default_rng(0)

    def made(ranks: int, rank: int) -> tuple[WeightedRandomSampler, Any]:
        sampler = WeightedRandomSampler(np.ones(5000), 4096, replacement, seed=1)
        options = {"num_replicas": ranks, "rank": rank, "batch_size": 8 // ranks}
        return sampler, ShardedDataLoader(range(5000), sampler=sampler, **options)

    sampler, loader = made(1, 0)
    read = []
    while len(read) < 1000:
        for batch in loader:
            read.append((loader.epoch, loader.position - 1, batch.tolist()))
            sampler.update(draw.integers(0, 5000, 64), draw.random(64) + 0.01)
    other = made(4, 3)[1]
    other.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    for epoch, step, batch in read[::7]:
        assert loader.batch(epoch, step).tolist() == batch
        assert [other.indices(epoch, step, rank) for rank in range(4)] == [batch[rank::4] for rank in range(4)]


def test_an_update_holds_from_the_next_batch_on_whatever_was_prefetched() -> None:
    sampler = WeightedRandomSampler(np.ones(9), 40, seed=1)
    with ShardedDataLoader(range(9), 4, sampler=sampler, num_workers=2, thread_pool=True, prefetch=8) as loader:
        for step, batch in enumerate(loader):
            assert step == 0 or set(batch.tolist()) == {step % 9}
            sampler.weights = np.arange(9) == (step + 1) % 9
    assert sampler.weights.tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0]


@pytest.mark.skipif(not PROCESS_POOLS, reason="no worker processes here")
def test_a_killed_worker_changes_nothing() -> None:
    ranks = Ranks(pool="fork" if "fork" in PROCESS_POOLS else "spawn")
    for number, _ in enumerate(ranks.epoch()):
        if number == 1:
            os.kill(ranks.loaders[0].pool.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
    ranks.close()
    assert ranks.read == dict(list(WHOLE.items())[: DRAWS // STEP])


def test_draws_have_the_weights_of_their_time() -> None:
    sampler = WeightedRandomSampler([1, 1, 0, 2], 40_000, seed=1)
    loader = iter(ShardedDataLoader(range(4), 20_000, sampler=sampler))
    before = Counter(next(loader).tolist())
    sampler.update([3, 2, 3], [9, 3, 0])  # the last value of an index counts
    after = Counter(next(loader).tolist())
    for found, shares in ((before, [1 / 4, 1 / 4, 0, 1 / 2]), (after, [1 / 5, 1 / 5, 3 / 5, 0])):
        assert np.abs(np.array([found[n] for n in range(4)]) / 20_000 - shares).max() < 0.015


def test_without_replacement_the_rest_is_drawn_by_the_new_weights_and_no_sample_twice() -> None:
    seconds: Counter[int] = Counter()
    for seed in range(200):
        sampler = WeightedRandomSampler([1, 1, 1, 1], 3, replacement=False, seed=seed)
        batches = iter(ShardedDataLoader(range(4), 1, sampler=sampler))
        first = int(next(batches))
        others = [n for n in range(4) if n != first]
        sampler.update(others, [3, 1, 0.5])
        second, third = (int(batch) for batch in batches)
        assert len({first, second, third}) == 3
        seconds[others.index(second)] += 1
    assert np.abs(np.array([seconds[n] for n in range(3)]) / 200 - np.array([3, 1, 0.5]) / 4.5).max() < 0.12
    for epoch in range(3):
        assert len({index for at, step in ONCE.items() if at[0] == epoch for index in step}) == DRAWS


# -- what it goes through ----------------------------------------------------------------------------------------------

AROUND: dict[str, Any] = {
    "batches": lambda sampler: {"batch_sampler": BatchSampler(sampler, 4)},
    "shards": lambda sampler: {"batch_sampler": ShardedBatchSampler(BatchSampler(sampler, 4), 2)},
    "copies": lambda sampler: {"batch_size": 4, "sampler": RepeatedSampler(4, sampler)},
    "rollover": lambda sampler: {"batch_sampler": BatchSampler(sampler, 5, "rollover")},
    "torch's batches": lambda sampler: {"batch_sampler": torch_data.BatchSampler(sampler, 4, False)},
}


@pytest.mark.parametrize("kind", AROUND)
def test_under_other_samplers_an_update_holds_from_the_next_batch_or_the_next_epoch_and_is_in_states(kind: str) -> None:
    def made() -> tuple[WeightedRandomSampler, Any]:
        sampler = WeightedRandomSampler(FIRST, 16, seed=1)
        return sampler, ShardedDataLoader(range(LENGTH), collate_fn=list, seed=2, **AROUND[kind](sampler))

    (sampler, loader), plain = made(), made()[1]
    epochs, states = [], []
    for _ in range(2):
        epochs.append([])
        for batch in loader:
            epochs[-1].append(batch)
            if len(epochs[-1]) == 2:
                sampler.weights = np.arange(LENGTH) == 7
            states.append(json.loads(json.dumps(loader.state_dict())))
    now, old = epochs[0][2:], list(plain)[2:]
    is_now = kind in ("batches", "shards", "copies")
    assert ({*np.ravel(now)} == {7}) if is_now else now == old
    assert {*np.ravel(epochs[1][-1])} == {7}
    for done in (2, 3, len(epochs[0])):
        sampler, other = made()
        other.load_state_dict(states[done - 1])
        assert sampler.weights[6:8].tolist() == [0, 1]
        assert [*other][: len(epochs[0]) - done] == epochs[0][done:]
        assert loader.indices(0, 1) == other.indices(0, 1)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_in_torchs_order_an_update_holds_from_the_next_epoch_on_and_is_in_states(around: bool, workers: int) -> None:
    def made(workers: int) -> tuple[WeightedRandomSampler, Any]:
        sampler = WeightedRandomSampler(FIRST, 12, seed=1)
        batches = {"batch_sampler": torch_data.BatchSampler(sampler, 4, False)}
        given = batches if around else {"batch_size": 4, "sampler": sampler}
        return sampler, DataLoader(range(LENGTH), num_workers=workers, collate_fn=list, **given)

    sampler, loader = made(workers)
    steps, states = [], []
    for _ in range(3):
        for batch in loader:
            steps.append(batch)
            if len(steps) == 2:
                sampler.weights = np.arange(LENGTH) == 7
            states.append(json.loads(json.dumps(loader.state_dict())))
    assert steps[:3] == list(made(0)[1]) and steps[3:] == [[7] * 4] * 6
    for done in (2, 3, 4):
        other = made(0)[1]
        other.load_state_dict(states[done - 1])
        rest = [*other, *other]
        assert rest == steps[done : done + len(rest)] and len(rest) >= 3
    assert "weights" not in made(0)[1].state_dict()["_sampler"]


@pytest.mark.parametrize("replacement", [True, False])
def test_weights_set_before_the_first_batch_hold_for_the_epoch_in_torchs_order_too(replacement: bool) -> None:
    def made() -> Any:
        sampler = WeightedRandomSampler([50, 1, 1, 1], 4, replacement, seed=3)
        return sampler, DataLoader(range(4), batch_sampler=BatchSampler(sampler, 2), collate_fn=list)

    sampler, loader = made()
    batches = iter(loader)
    sampler.update([0, 3], [1, 50])
    read = [next(batches)]
    state = json.loads(json.dumps(loader.state_dict()))
    read += batches
    assert read == [loader.indices(0, step) for step in range(2)]
    _, other = made()
    other.load_state_dict(state)
    assert list(other) == read[1:]


def test_the_drop_in_with_ranks_follows_from_the_next_batch_on() -> None:
    sampler = WeightedRandomSampler(FIRST, 12, seed=1)
    loader = DataLoader(range(LENGTH), 2, sampler=sampler, num_replicas=2, rank=0, collate_fn=list)
    for step, batch in enumerate(loader):
        assert step == 0 or batch == [7, 7]
        loader.sampler.weights = np.arange(LENGTH) == 7


def test_without_a_loader_an_update_holds_from_the_next_epoch_on() -> None:
    sampler = WeightedRandomSampler(FIRST, 5, seed=1)
    expected, items = list(sampler.iter_epoch(0)), iter(sampler)
    first = next(items)
    sampler.update(np.arange(LENGTH), np.arange(LENGTH) == 7)
    assert [first, *items] == expected == list(sampler.iter_epoch(0))
    assert list(sampler) == [7] * 5
    assert repr(sampler).startswith("WeightedRandomSampler(length=5, weights=[0.0, 0.0, 0.0, ... 60 in all]")
    loader = ShardedDataLoader(range(LENGTH), 5, sampler=sampler)  # begins with the weights of now
    assert next(iter(loader)).tolist() == [7] * 5
    for twin in (copy.copy(sampler), copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert twin.weights.tolist() == sampler.weights.tolist()


def test_two_loaders_of_one_sampler_follow_each_at_its_place_and_a_failure_changes_neither() -> None:
    def made() -> Any:
        return ShardedDataLoader(range(4), 2, sampler=sampler)

    sampler = WeightedRandomSampler([1, 1, 1, 1], 4, replacement=False, seed=1)
    one, other = made(), made()
    ahead, behind = iter(one), iter(other)
    read = next(ahead).tolist()
    expected = [list(map(int, one.indices(0, 1))), other.indices(0, 0)]
    with pytest.raises(ValueError, match="num_samples is 4, but only 3 weights are positive"):
        sampler.update([read[0]], 0)
    assert [one.indices(0, 1), other.indices(0, 0)] == expected
    assert sampler.weights.tolist() == [1, 1, 1, 1]
    last = expected[0][1]
    sampler.update([last], 1e9)
    assert next(ahead).tolist()[0] == last == next(behind).tolist()[0]
    assert one.indices(0, 0) == read
    assert ENTRY in one.state_dict()["sampler_arguments"]
    one.close()
    sampler.update([last], 1)  # a closed loader is left out
    assert next(behind).tolist() != []


def test_the_sampler_shows_the_weights_of_the_newest_loader_while_an_older_one_goes_on_with_its_own() -> None:
    sampler = WeightedRandomSampler([1, 1, 1], 12, seed=1)
    old = ShardedDataLoader(range(3), 2, sampler=sampler)
    batches = iter(old)
    first = next(batches).tolist()
    sampler.update([0, 1], 0)
    new = ShardedDataLoader(range(3), 2, sampler=sampler)
    assert next(batches).tolist() == [2, 2] == new.indices(0, 0)
    assert old.indices(0, 0) == first
    old.close()
    sampler.update([1, 2], [4, 0])
    assert sampler.weights.tolist() == [0, 4, 0] and next(iter(new)).tolist() == [1, 1]
    new.close()
    sampler.update([0, 1], [5, 0])
    assert sampler.weights.tolist() == [5, 0, 0]


def test_an_update_from_another_thread_holds_and_one_inside_next_is_an_error() -> None:
    sampler = WeightedRandomSampler([1, 1, 1], 12, seed=1)
    loader = ShardedDataLoader(range(3), 2, sampler=sampler)
    batches = iter(loader)
    next(batches)
    thread = threading.Thread(target=sampler.update, args=([0, 1, 2], [0, 1, 0]))
    thread.start()
    thread.join()
    assert next(batches).tolist() == [1, 1]

    class Calling:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            sampler.update([0], 1)
            return index

    inside = ShardedDataLoader(Calling(), 2, sampler=sampler)
    with pytest.raises(RuntimeError, match=r"cannot be changed inside next\(\) of the same loader"):
        next(iter(inside))
    assert sampler.weights.tolist() == [0, 1, 0]


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("indices", "values", "said"),
    [
        ([3], [1], "index 3 is unknown, there are 3 weights"),
        ([-1], [1], "index -1 is unknown"),
        ([0.5], [1], "indices must be a 1-D sequence of integers"),
        ([[0]], [1], "indices must be a 1-D sequence"),
        ([0, 1], [1], r"there are 2 indices, and values of shape \(1,\)"),
        ([0, 1], [1, float("nan")], r"weights\[1\] is nan: give finite numbers"),
        ([0, 1], [-1, 1], r"weights\[0\] is -1"),
        ([0], float("inf"), r"weights\[0\] is inf"),
        ([0, 1, 2], 0, "weights are all zero, nothing can be drawn"),
    ],
)
def test_a_wrong_update_is_an_error_that_changes_nothing(indices: Any, values: Any, said: str) -> None:
    sampler = WeightedRandomSampler([1, 2, 3], 6, seed=1)
    loader = ShardedDataLoader(range(3), 2, sampler=sampler)
    batches = iter(loader)
    next(batches)
    state, expected = loader.state_dict(), loader.indices(0, 1)
    with pytest.raises(ValueError, match=said):
        sampler.update(indices, values)
    with pytest.raises(ValueError, match=r"there are 3 indices, and values of shape \(2,\)"):
        sampler.weights = [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        sampler.weights[0] = 5
    assert loader.state_dict() == state and sampler.weights.tolist() == [1, 2, 3]
    assert next(batches).tolist() == expected


def test_without_replacement_enough_samples_must_keep_a_weight() -> None:
    sampler = WeightedRandomSampler([1, 1, 1, 0], 2, replacement=False, seed=1)
    batches = iter(ShardedDataLoader(range(4), 1, sampler=sampler))
    drawn = int(next(batches))
    others = [n for n in range(3) if n != drawn]
    with pytest.raises(ValueError, match="num_samples is 2, but only 1 weights are positive"):
        sampler.update(others, 0)
    sampler.update([*others, 3], [0, 0, 1])
    assert [int(batch) for batch in batches] == [3]


def test_weights_of_a_mixture_and_of_a_sampler_are_not_mistaken_for_each_other() -> None:
    loader = ShardedDataLoader(range(3), 2, sampler=WeightedRandomSampler([1, 1, 1], 3))
    with pytest.raises(TypeError, match=r"For a WeightedRandomSampler, call its update\(\)"):
        loader.set_weights([1, 2, 3])


def test_tensors_of_any_kind_are_taken() -> None:
    sampler = WeightedRandomSampler(torch.ones(3), 3)
    sampler.update(torch.tensor([0, 2]), torch.tensor([0.5, 2.0], dtype=torch.bfloat16, requires_grad=True))
    assert sampler.weights.tolist() == [0.5, 1, 2]


# -- states ------------------------------------------------------------------------------------------------------------


def test_a_state_without_updates_is_as_before_and_one_of_before_an_update_undoes_it() -> None:
    ranks = Ranks()
    state = ranks.state()
    assert ENTRY not in json.loads(state)["sampler_arguments"]
    loader, sampler = ranks.loaders[0], ranks.samplers[0]
    plain = [batch.tolist() for batch in Ranks().loaders[0]]
    sampler.update([0], 1e9)
    assert next(iter(loader)).tolist() == [0] * STEP
    loader.load_state_dict(json.loads(state))
    assert [batch.tolist() for batch in loader] == plain
    assert sampler.weights.tolist() == FIRST.tolist()


@pytest.mark.parametrize(
    "spoilt", ["", "0", "[[0,0]]", '[["x",0,[],[]]]', "[[0,0,[0],[1,2]]]", "[[0,0,[0],[-1]]]", "other length"]
)
def test_a_spoilt_state_is_an_error_that_changes_nothing(spoilt: str) -> None:
    ranks, state = Ranks(), json.loads(STATES[5])
    [loader], [sampler] = ranks.loaders, ranks.samplers
    sampler.update([1], 7)
    before = ranks.state()
    if spoilt == "other length":
        far = WeightedRandomSampler(np.ones(LENGTH + 1), 1, seed=1)
        far.update([LENGTH], 5)
        spoilt = far.weights_set or ""
    state["sampler_arguments"][ENTRY] = spoilt
    with pytest.raises(ValueError, match="the weights of the state do not fit the sampler"):
        loader.load_state_dict(state)
    assert ranks.state() == before and sampler.weights[1] == 7


@pytest.mark.parametrize("limit", ["KEPT", "UPDATES"])
@pytest.mark.parametrize("replacement", [True, False])
def test_beyond_a_number_of_changes_the_oldest_are_joined_and_steps_before_are_unknown(
    replacement: bool, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weighted, limit, 14)
    ranks = Ranks(replacement=replacement)
    [loader], [sampler] = ranks.loaders, ranks.samplers
    sizes, draw = [], np.random.default_rng(0)
    for _ in range(20):
        for batch in loader:
            ranks.read[loader.epoch, loader.position - 1] = batch.tolist()
            sampler.update(draw.integers(0, LENGTH, 5), draw.random(5) + 0.1)
            sizes.append(len(ranks.state()))
    assert max(sizes) < 2 * max(sizes[:20])
    with pytest.raises(ValueError, match="the weights of step 0 in epoch 0 are not known: the loader has later ones"):
        loader.indices(0, 0)
    other = Ranks(3, replacement, state=ranks.state())
    for at in list(ranks.read)[-6:]:
        assert loader.indices(*at) == ranks.read[at]
        assert [other.loaders[0].indices(*at, rank) for rank in range(3)] == [ranks.read[at][n::3] for n in range(3)]
    rest = [
        [batch.tolist() for batch in one] for one in (loader, Ranks(1, replacement, state=ranks.state()).loaders[0])
    ]
    assert rest[0] == rest[1]


def test_ranks_with_different_updates_are_told_apart_by_their_fingerprints() -> None:
    prints = []
    for value in (1, 1, 2):
        ranks = Ranks()
        for step, _ in enumerate(ranks.loaders[0]):
            if step == 1:
                ranks.samplers[0].update([3], value * 1e3)
        prints.append(ranks.loaders[0].fingerprint(0))
    assert first_difference(*prints[:2]) is None and other_facts(*prints[:2]) == []
    assert first_difference(*prints[1:]) == 2
    assert other_facts(*prints[1:]) == [
        "the weights of the WeightedRandomSampler were not changed alike during training: make the same changes after "
        "the same steps, on all ranks"
    ]
