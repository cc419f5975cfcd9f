"""What an ``async def`` returns is awaited by nobody: the first batch is a TypeError that says so, in every pool."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from contextlib import closing
from typing import Any

import pytest
import torch
from conftest import covering

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.torch import DataLoader


class Items:
    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        return index


class ItemsOfTorch(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 8

    async def __getitem__(self, index: int) -> int:
        return index


class Many:
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return index

    async def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Stream(torch.utils.data.IterableDataset[int]):
    async def __iter__(self) -> AsyncIterator[int]:  # type: ignore[override, misc]
        for i in range(8):
            yield i


class Coroutine(torch.utils.data.IterableDataset[int]):
    async def __iter__(self) -> Any:  # type: ignore[override]
        return iter(range(8))


async def doubled(sample: int) -> int:
    return 2 * sample


async def collated(samples: list[int]) -> list[int]:
    return samples


CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "item": (Items(), {}, "dataset[index]"),
    "item of torch's": (ItemsOfTorch(), {}, "dataset[index]"),
    "inside": (SimpleDataset(Items()).take(4), {}, "dataset[index]"),
    "subset": (torch.utils.data.Subset(Items(), [1, 2]), {}, "dataset[index]"),  # type: ignore[arg-type]
    "items": (Many(), {}, "dataset.__getitems__"),
    "transform": (SimpleDataset(range(8)).transform(doubled), {}, "dataset[index]"),
    "stream": (Stream(), {}, "the dataset"),
    "coroutine": (Coroutine(), {}, "the dataset"),
    "collate": (SimpleDataset(range(8)), {"collate_fn": collated}, "collate_fn"),
}


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
@covering(case=CASES, kind=["inline", "threads", "processes", "drop-in"])
def test_async_methods_are_an_error_at_the_first_batch(case: str, kind: str) -> None:
    dataset, arguments, where = CASES[case]
    known: dict[str, Any] = {"processes": {"num_workers": 1}, "threads": {"num_workers": 2, "thread_pool": True}}
    workers = known.get(kind, {})
    with pytest.raises(TypeError) as caught:
        if kind == "drop-in":
            next(iter(DataLoader(dataset, 4, **arguments)))
        else:
            with closing(ShardedDataLoader(dataset, 4, **workers, **arguments)) as loader:
                next(iter(loader))
    assert f"{where} is async" in str(caught.value) and "def instead of async def" in str(caught.value)


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited")
def test_a_field_that_is_async_and_one_sample_are_errors_too() -> None:
    dataset = SimpleDataset([(1, 2), (3, 4)]).transform_first(doubled)
    with (
        closing(ShardedDataLoader(dataset, 2)) as loader,
        pytest.raises(TypeError, match="a field .* is async"),
    ):
        next(iter(loader))
    with closing(ShardedDataLoader(Items(), 2)) as loader, pytest.raises(TypeError, match="is async"):
        loader.read(3)


def test_nobody_is_told_that_samples_were_never_awaited() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with closing(ShardedDataLoader(Items(), 8)) as loader, pytest.raises(TypeError, match="is async"):
            next(iter(loader))
