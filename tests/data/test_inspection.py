"""What a dataset can do, found out without calling it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from stream_samples import Own, Parts, Stateful, Told

from sharded_loader.data.inspection import is_indexed, is_stateful, is_stream, keeps_place, known_parts, takes_part


class Lines(torch_data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Counted(Lines):
    def __len__(self) -> int:  # how many samples there are: no index
        return 3


class Indexed(torch_data.Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class Both:
    def __iter__(self) -> Iterator[int]:
        return iter(())

    def __getitem__(self, index: int) -> int:
        return index


class CountedBoth(Counted):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Own(), Parts(), Lines(), lambda: range(3), functools.partial(range, 3), {1}, len])
def test_what_can_only_be_read_in_its_own_order_is_iterable_data(dataset: Any) -> None:
    assert is_stream(dataset) and not is_indexed(dataset)


@pytest.mark.parametrize("dataset", [[1], range(3), {"a": 1}, "text", np.arange(3), Indexed(), Both(), Own, Lines, 3])
def test_what_has_an_index_or_is_a_class_or_nothing_is_not(dataset: Any) -> None:
    assert not is_stream(dataset)


def test_what_is_read_by_index_has_a_length_too() -> None:
    assert all(map(is_indexed, ([], range(3), {"a": 1}, np.arange(3), CountedBoth())))
    assert not any(map(is_indexed, (Indexed(), Both(), Counted(), Lines(), iter([]), {1}, len)))


def test_what_keeps_its_state_has_both_methods() -> None:
    class Half:
        def state_dict(self) -> dict[str, Any]:
            return {}

    class AsksHowMuch(Stateful):
        """As MosaicML's: its own loader tells it how many samples were read."""

        def state_dict(self, num_samples: int, from_beginning: bool) -> Any:  # type: ignore[override]
            return {}

    class MayBeAsked(Stateful):
        def state_dict(self, full: bool = True) -> Any:
            return {}

    assert is_stateful(Stateful()) and is_stateful(MayBeAsked())
    assert not any(map(is_stateful, (Own(), None, Half(), AsksHowMuch())))


def test_some_datasets_know_how_many_parts_they_have() -> None:
    class Shards:
        num_shards: Any = 3

    shards = Shards()
    assert known_parts(shards) == 3
    for odd in (0, -1, True, "3", 2.0, None):
        shards.num_shards = odd
        assert known_parts(shards) is None
    shards.n_shards = 5  # type: ignore[attr-defined]
    assert known_parts(shards) == 5 and known_parts(Own()) is None


def test_datasets_that_may_keep_their_place_in_themselves() -> None:
    assert [keeps_place(one) for one in (Stateful(), Told(), iter([]), Own(), Parts())] == [True] * 3 + [False] * 2


def test_a_function_of_two_arguments_takes_its_part() -> None:
    def optional(part: int = 0, parts: int = 1) -> list[int]:
        return []

    def named(*, part: int, parts: int) -> list[int]:
        return []

    assert takes_part(lambda part, parts: [])
    assert not any(map(takes_part, (list, lambda part: [], optional, named, functools.partial(range, 3))))
