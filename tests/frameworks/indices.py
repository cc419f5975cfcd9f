"""What the tests of other libraries share: a dataset whose samples say which they are, and both loaders under one name.

make = LOADERS[name];  make(dataset, batch_size=4, shuffle=True, seed=3)
seen(make(...))        [[sample, ...], ...] of one plain loop: what every library is compared with
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data

from sharded_loader import ShardedDataLoader
from sharded_loader.torch import DataLoader


def without_operators() -> torch.library.Library | None:
    """Let torchvision be imported where its operators cannot be loaded: its build for CUDA beside torch for the CPU.

    Its transforms are Python: its import asks that two operators are declared, as long as what is returned lives.
    Lightning, transformers, timm and fastai import torchvision where it is installed.
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


class Stream(torch.utils.data.IterableDataset[Any]):
    """Iterable data without a length: what a function gives for 0 to 23, in another order in each epoch."""

    epoch = 0

    def __init__(self, read: Callable[[int], Any] = int) -> None:
        self.read = read

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        part: Any = torch.utils.data.get_worker_info()
        first, step = (0, 1) if part is None else (part.id, part.num_workers)
        return (self.read((index * 5 + self.epoch) % 24) for index in range(first, 24, step))


class LongStream(Stream):
    def __len__(self) -> int:
        return 24


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


def recorder() -> Any:
    """Lightning's model that notes what it is trained on and validated with. Lightning's import takes four seconds."""
    import lightning

    class Recorder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.seen: list[tuple[int, int, list[int]]] = []
            self.validated: list[list[int]] = []

        def training_step(self, batch: torch.Tensor, batch_index: int) -> torch.Tensor:
            self.seen.append((self.current_epoch, self.global_step, [int(index) for index in batch]))
            return self.layer(batch.float().reshape(-1, 1)).mean()

        def validation_step(self, batch: torch.Tensor, batch_index: int) -> None:
            self.validated.append([int(index) for index in batch])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    return Recorder
