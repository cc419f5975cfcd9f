"""``fingerprint`` and ``check`` of the drop-in: those of `ShardedDataLoader`, as far as the sampler tells the order."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, PROCESS_POOLS, covering
from drop_in_samples import Counting, Shared
from samples import Augmented
from test_drop_in_steps import (
    BY_NUMBER,
    DATA,
    LENGTH,
    NAMED,
    SKIP,
    EachFromGlobals,
    FromPython,
    Told,
    loader_of,
    seeded,
    workers,
)
from torch.utils.data import MapDataPipe

from sharded_loader import Dataset, ShardedDataLoader, interleave, sample_rng
from sharded_loader.sampling.order import step_checksum
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def random_states() -> Any:
    return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()


def checksum_of_steps(loader: DataLoader[Any], epoch: int, steps: int) -> str:
    return "".join(step_checksum([loader.indices(epoch, step)]) for step in range(steps))


# -- fingerprint --------------------------------------------------------------------------------------------------


@covering(pool=POOLS)
def test_it_is_the_same_in_every_pool_before_in_and_after_an_epoch(pool: str) -> None:
    loader, before = seeded(**workers(pool)), random_states()
    found = loader.fingerprint(0)
    assert random_states() == before
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    assert str(loader.fingerprint()) == str(found) == "1112145858cc6203"
    assert loader.state_dict() == state
    assert len([*iterator]) == 7
    assert str(loader.fingerprint(0)) == str(found) != str(loader.fingerprint()) == str(loader.fingerprint(1))


@pytest.mark.parametrize("order", [*BY_NUMBER, *(f"named: {name}" for name in NAMED)])
def test_each_step_of_any_epoch_counts_where_its_number_decides(order: str) -> None:
    named = order.startswith("named: ")
    loader = loader_of(NAMED[order.removeprefix("named: ")] if named else BY_NUMBER[order])
    if named:
        loader.set_epoch(0)
    read = [*loader]
    for epoch in (0, 1):
        assert loader.fingerprint(epoch).steps == checksum_of_steps(loader, epoch, len(read))


@pytest.mark.parametrize("given", [{}, {"drop_last": True}, {"skip": [(1, 2)]}, {"seed": 5}], ids=str)
def test_it_is_that_of_the_other_loader_with_the_same_order(given: dict[str, Any]) -> None:
    loader = DataLoader(Augmented(LENGTH), 3, **given)
    last_batch = {"last_batch": "discard"} if given.pop("drop_last", False) else {}
    other = ShardedDataLoader(Augmented(LENGTH), 3, **{"seed": 0, **given, **last_batch})
    assert str(loader.fingerprint(2)) == str(other.fingerprint(2))


def test_steps_that_are_left_out_are_marked_and_samples_without_a_seed_count_too() -> None:
    steps = seeded(skip=SKIP).fingerprint(1).steps
    wanted = seeded().fingerprint(1).steps
    assert steps == "-" * 8 + wanted[8:40] + "-" * 24 + wanted[64:]
    one, other = (DataLoader([*DATA[:-1], last], 3).fingerprint(0) for last in (0, 1))
    assert one.steps == other.steps and str(one) != str(other)
    mixed = [str(DataLoader(interleave([["a"] * 9, ["b"] * 9]), 4).fingerprint(0)) for _ in range(2)]
    assert mixed[0] == mixed[1]


def test_a_dataset_is_told_the_epoch_and_then_its_own() -> None:
    loader = DataLoader(Told(LENGTH), 3, shuffle=True, seed=5)
    loader.set_epoch(4)
    of_epochs = [loader.fingerprint(epoch).state["digests"] for epoch in (0, 1)]
    assert loader.dataset.epoch == 4
    assert of_epochs[0] != of_epochs[1]


# -- check --------------------------------------------------------------------------------------------------------


class Reads(Dataset):
    """What a function gives, for each index."""

    def __init__(self, read: Callable[[int], Any]) -> None:
        self.read = read

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.read(index)


def own(index: int) -> Any:
    return index, sample_rng().random()


@covering(pool=POOLS)
def test_samples_that_depend_on_their_index_alone_are_the_same_everywhere(pool: str) -> None:
    loader = DataLoader(Reads(own), 3, shuffle=True, seed=5, **workers(pool))
    iterator, before = iter(loader), random_states()
    read = [next(iterator)]
    state = loader.state_dict()
    found = loader.check()
    assert random_states() == before and loader.state_dict() == state
    assert (found.samples, found.differing, found.failed) == (7, (), None)  # the last step has one
    assert (found.worker_bytes or 0) > 1e6 or pool == "thread"
    assert ("ThreadPool" in found.worker) == (pool == "thread")
    read += iterator
    assert str(read) == str([*DataLoader(Reads(own), 3, shuffle=True, seed=5)])


def test_a_check_needs_no_order_that_is_not_drawn_yet() -> None:
    loader = DataLoader(Reads(own), 3, shuffle=True)
    for _ in range(2):
        found, state = loader.check(), loader.state_dict()
        assert (found.samples, found.differing, loader.state_dict()) == (11, (), state)
        list(loader)


def from_python(index: int) -> float:
    return random.random()


def of_process(index: int) -> int:
    return os.getpid()


@covering(method=PROCESS_POOLS)
def test_what_differs_is_named_with_its_source(method: str) -> None:
    given: Any = workers(method)
    assert "draws from Python's random" in str(DataLoader(Reads(from_python), 3, **given).check(2))
    assert "The worker reads others." in str(DataLoader(Reads(of_process), 3, **given).check(2))


def test_a_dataset_with_a_state_keeps_the_one_of_its_workers() -> None:
    read = []
    for checks in (False, True):
        loader = DataLoader(Counting(), 2, num_workers=2)
        iterator = iter(loader)
        read.append([next(iterator)])
        if checks:
            loader.fingerprint(), loader.check(2)
        read[-1] += iterator
    assert str(read[0]) == str(read[1])


# -- what is not known --------------------------------------------------------------------------------------------


class Pipe(MapDataPipe[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return index


class Endless(EachFromGlobals):
    """It has no end, and no length."""

    __len__: Any = None

    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


UNKNOWN: dict[str, tuple[Callable[[], DataLoader[Any]], type[Exception], str]] = {
    "iterable": (lambda: DataLoader(Shared(), num_workers=2), TypeError, "is iterable data.*part 0 of 2"),
    "datapipe": (lambda: DataLoader(Pipe()), TypeError, "datapipes are read by torch's own workers"),
    "shuffle": (lambda: DataLoader(DATA, 3, shuffle=True), ValueError, r"epoch 0 cannot be looked up.*Give .* a seed="),  # type: ignore[arg-type]
    "each drawn": (lambda: loader_of(lambda: {"sampler": EachFromGlobals()}), ValueError, "yields other indices"),
    "drawn": (lambda: loader_of(lambda: {"sampler": FromPython()}), ValueError, "yields other indices"),
}


@pytest.mark.parametrize("row", UNKNOWN)
def test_where_the_order_is_not_known_the_error_is_that_of_indices(row: str) -> None:
    make, error, match = UNKNOWN[row]
    loader = make()
    checks = () if row == "shuffle" else (loader.check,)  # any of its samples will do
    for call in (loader.fingerprint, *checks, lambda: loader.indices(0, 0)):
        with pytest.raises(error, match=match):
            call()


def test_an_order_without_end_a_wrong_number_and_no_samples_are_errors() -> None:
    endless = loader_of(lambda: {"sampler": Endless()})
    with pytest.raises(TypeError, match="has no length"):
        endless.fingerprint()
    assert endless.check(2).differing == ()
    drawn = loader_of(lambda: {"sampler": EachFromGlobals()})
    next(iter(drawn))
    with pytest.raises(ValueError, match="epoch 0 cannot be looked up"):
        drawn.fingerprint()
    with pytest.raises(ValueError, match="count from 0"):
        seeded().fingerprint(-1)
    for wrong in (0, "3"):
        with pytest.raises((ValueError, TypeError), match="samples"):
            seeded().check(wrong)  # type: ignore[arg-type]
    empty = DataLoader([], 2)
    assert empty.fingerprint().steps == ""
    assert empty.check().differing == ()
