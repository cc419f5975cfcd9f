"""A simulated machine in the place of the accelerators that torch knows."""

from __future__ import annotations

import pytest
import torch
from simulated import KIND, Machine, SimulatedStreams

from sharded_loader.devices import names, placement, resident


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Two accelerators that do their work late."""
    made = Machine()

    def streams_of(device: torch.device) -> SimulatedStreams | None:
        return SimulatedStreams(made, device) if device.type == KIND else None

    monkeypatch.setattr(names, "accelerators", lambda: made.devices)
    for module in (placement, resident):
        monkeypatch.setattr(module, "streams_of", streams_of)
        monkeypatch.setattr(module, "indexed", lambda device: device)
    return made
