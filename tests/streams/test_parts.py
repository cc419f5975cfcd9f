"""Copies of iterable data, and one part while it is read."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from stream_samples import Own, Parts, Stateful, Told, WithStatefulRows

from sharded_loader.streams.reader import SHARED_BYTES, Copies, OpenPart
from sharded_loader.streams.worker_info import here


def advance(part: OpenPart) -> Any:
    """The next sample, read as a reader does."""
    before = part.set_current()
    try:
        return part.next_sample()
    finally:
        here.part = before


def rest_of(part: OpenPart) -> list[Any]:
    found = []
    while True:
        try:
            found.append(advance(part))
        except StopIteration:
            return found


# -- copies -------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_dataset_as_it_was_and_shares_what_is_large() -> None:
    class Holder:
        def __init__(self) -> None:
            self.small, self.large = np.arange(3), np.zeros(SHARED_BYTES, np.uint8)
            self.kind, self.function, self.module, self.items = Own, len, np, [1]

    holder = Holder()
    copies = Copies(holder)
    holder.items.append(2)
    holder.small[0] = 9
    one, other = copies.make(), copies.make()
    assert one is not other and one.items == [1] and one.small.tolist() == [0, 1, 2] and one.small is not other.small
    assert one.large is other.large is holder.large
    assert (one.kind, one.function, one.module) == (Own, len, np)


def test_functions_and_what_cannot_be_copied_are_shared() -> None:
    def function() -> Iterator[int]:
        return iter(())

    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    locked = Locked()
    assert Copies(function).make() is function and Copies(locked).make() is locked


# -- one part -----------------------------------------------------------------------------------------------------


def test_a_part_is_begun_and_read_to_its_end() -> None:
    part = OpenPart(Parts((2, 3)), 1, 2, seed=5)
    assert rest_of(part) == []
    part.begin(0)
    assert rest_of(part) == [100, 101, 102] and rest_of(part) == []
    part.begin(1)
    assert advance(part) == 100
    part.end()
    assert rest_of(part) == []


def test_functions_take_the_numbers_or_nothing() -> None:
    def both(part: int, parts: int, *, other: int = 0) -> list[Any]:
        return [part, parts]

    def bound(extra: int, part: int, parts: int) -> list[Any]:
        return [extra, part, parts]

    def one(optional: int = 3, another: int = 4) -> list[Any]:
        return [optional]

    for function, expected in ((both, [1, 4]), (functools.partial(bound, 7), [7, 1, 4]), (one, [3]), (list, [])):
        part = OpenPart(function, 1, 4, seed=0)
        part.begin(0)
        assert rest_of(part) == expected


def test_the_dataset_is_told_the_pass_if_it_wants_to_know() -> None:
    dataset = Told((4,))
    part = OpenPart(dataset, 0, 1, 0)
    part.begin(3)
    assert dataset.epoch == 3 and sorted(rest_of(part)) == [3000, 3001, 3002, 3003]
    OpenPart(dataset, 0, 1, 0, sets_epoch=False).begin(5)
    assert dataset.epoch == 3


@pytest.mark.parametrize("kind", [Stateful, WithStatefulRows])
def test_a_part_goes_on_from_its_state_and_the_state_is_a_copy(kind: Any) -> None:
    part = OpenPart(kind((5, 6)), 1, 2, 0)
    part.begin(0)
    assert [advance(part), advance(part)] == [100, 101] and part.is_stateful
    state = part.state()
    assert advance(part) == 102
    other = OpenPart(kind((5, 6)), 1, 2, 0)
    for _ in range(2):
        other.begin(0, state)
        assert rest_of(other) == [102, 103, 104, 105]


def test_without_a_state_there_is_none() -> None:
    part = OpenPart(Parts((5,)), 0, 1, 0)
    part.begin(0)
    assert not part.is_stateful and part.state() is None
