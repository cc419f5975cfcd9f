"""What other libraries ask of the loaders, without these libraries: each test names the one that asked first."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader


class ByColumn(torch.utils.data.IterableDataset[int]):
    """As Hugging Face's: iterable, and ``dataset["name"]`` is a column."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def __getitem__(self, name: str) -> Any:
        raise KeyError(name)


class ToldHowFar(torch.utils.data.IterableDataset[int]):
    """As MosaicML's and litdata's: its own loader says how far it was read."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(6))

    def state_dict(self, num_samples: int, from_beginning: bool) -> Any:
        raise NotImplementedError

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize("make", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize("dataset", [ByColumn(), ToldHowFar()], ids=["by column", "told how far"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_data_with_other_methods_too(make: Any, dataset: Any, num_workers: int) -> None:
    loader = make(dataset, batch_size=4, num_workers=num_workers)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.parametrize("copied", [False, True])
def test_the_epoch_can_be_set_on_the_loader_and_on_its_batch_sampler(copied: bool) -> None:
    """transformers calls the first, and the second after it has wrapped the batch sampler."""
    loader = DataLoader(range(8), batch_size=4, shuffle=True, seed=1)
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    if copied:
        loader = copy.deepcopy(loader)
    assert type(loader.batch_sampler) is torch.utils.data.BatchSampler  # Lightning builds it again
    for told in (loader, loader.batch_sampler):
        for epoch in (1, 0):
            told.set_epoch(epoch)  # type: ignore[union-attr]
            assert [batch.tolist() for batch in loader] == epochs[epoch]
