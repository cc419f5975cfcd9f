"""A Lightning model that notes what it is trained on. Imported by the tests that run: Lightning takes four seconds."""

from __future__ import annotations

from typing import Any

import lightning
import torch


class Recorder(lightning.LightningModule):
    """A model that notes the batches it is trained on, and those that it is validated with."""

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
