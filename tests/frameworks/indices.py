"""What the tests of other libraries share: a dataset whose samples say which they are, and both loaders under one name.

make = LOADERS[name];  make(dataset, batch_size=4, shuffle=True, seed=3)
seen(make(...))        [[sample, ...], ...] of one plain loop: what every library is compared with
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader


def without_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its operators cannot be loaded: its build for CUDA beside torch for the CPU.

    Its transforms are Python. All that its import asks for is that two operators have been declared. Lightning,
    transformers, timm and fastai import torchvision where it is installed.

    Returns:
        What declares the operators as long as it lives; None if nothing was needed.
    """
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return None
    try:
        for operators in Path(found.origin).parent.glob("_C.*"):
            torch.ops.load_library(operators)
        return None
    except OSError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return library


KEPT = without_operators()

LOADERS: dict[str, Any] = {"drop-in": DataLoader, "sharded": ShardedDataLoader}

BOTH = pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in LOADERS.items()])
"""The drop-in for torch's loader, and `ShardedDataLoader`."""

IN_FRAMEWORKS = [
    pytest.mark.frameworks,
    # Other libraries warn of their own affairs, of each other's, and that a loader has few workers.
    pytest.mark.filterwarnings("ignore"),
]
"""The marks of a test that needs the extra ``frameworks``."""


class Numbered:
    """Sample i is the number i, and its double: a line that a model of one weight can learn.

    Args:
        length: how many samples.
    """

    def __init__(self, length: int = 24) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([float(index)]), torch.tensor([2.0 * index])


def numbers(batch: Any) -> list[int]:
    """Which samples a batch of `Numbered` has."""
    first = batch[0] if isinstance(batch, list | tuple) else batch
    return [int(number) for number in first.flatten().tolist()]


def seen(loader: Iterable[Any]) -> list[list[int]]:
    """The samples of one epoch, batch by batch."""
    return [numbers(batch) for batch in loader]


def epochs(make: Any, count: int, **options: Any) -> list[list[list[int]]]:
    """The samples of the first epochs in a plain loop over a loader of its own."""
    loader = make(Numbered(), **options)
    return [seen(loader) for _ in range(count)]
