"""A generator that raises has ended: under ``on_error`` its other samples are left out, and a warning says so."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.base.notices import LoaderWarning
from sharded_loader.torch import DataLoader


class Lines(torch.utils.data.IterableDataset[int]):
    """Line 3 is bad; a generator reads the lines, or an iterator that goes on behind it."""

    def __init__(self, goes_on: bool) -> None:
        self.goes_on = goes_on

    def __iter__(self) -> Iterator[int]:
        return map(parsed, range(8)) if self.goes_on else (parsed(line) for line in range(8))


def parsed(line: int) -> int:
    if line == 3:
        raise ValueError("line 3 is bad")
    return line


def loaded(kind: str, goes_on: bool) -> tuple[list[int], list[str]]:
    known: dict[str, Any] = {"threads": {"num_workers": 1, "thread_pool": True}, "processes": {"num_workers": 1}}
    made: Any = DataLoader if kind.startswith("drop-in") else ShardedDataLoader
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = made(Lines(goes_on), 2, on_error="skip", **known.get(kind.removeprefix("drop-in "), {}))
        found = [int(sample) for batch in loader for sample in batch]
        if kind in known or kind == "inline":
            loader.close()
    return found, [str(one.message) for one in caught if issubclass(one.category, LoaderWarning)]


@pytest.mark.parametrize("kind", ["inline", "threads", "processes", "drop-in", "drop-in processes"])
def test_a_warning_says_which_part_has_ended(kind: str) -> None:
    found, said = loaded(kind, goes_on=False)
    assert found == [0, 1, 2]
    [text] = [one for one in said if "has ended too early" in one]
    assert text.startswith("part 0 of 1 has ended too early: its generator raised") and "line 3 is bad" in text


@pytest.mark.parametrize("kind", ["inline", "drop-in"])
def test_an_iterator_that_goes_on_is_read_to_its_end(kind: str) -> None:
    found, said = loaded(kind, goes_on=True)
    assert found == [0, 1, 2, 4, 5, 6, 7] and not any("has ended" in one for one in said)
