"""The stress of tests/gpu, on a device that does its work late."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from conftest import made
from devices_samples import Checks
from simulated import Machine
from stress import rows, stress

from sharded_loader import ShardedDataLoader
from sharded_loader.devices.copies import PendingCopy
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool

COUNT, WIDTH = 128, 2048


class Simulated(Checks):
    """A device of a `Machine` as the target of `stress.stress`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.device = machine.devices[0]
        self.side = machine.new_stream(self.device)
        self.order: list[int] = []

    def begin_epoch(self, indices: list[int]) -> None:
        self.order = indices

    def compare(self, batch: Any, first: int) -> None:  # type: ignore[override]
        values, labels = batch
        expected = np.array(self.order[first : first + len(labels)])
        super().compare(values, expected[:, None] * WIDTH + np.arange(WIDTH))
        super().compare(labels, expected)

    @contextmanager
    def beside(self, batch: Any) -> Iterator[None]:
        home = self.machine.stream(self.device)
        self.side.wait_event(home.record_event())
        with self.machine.on(self.device, self.side):
            yield
        for field in batch:
            self.machine.record_stream(field, self.side)

    def delay(self, rng: random.Random, loader: ShardedDataLoader) -> None:
        # Its streams are late anyway: here they catch up a little.
        self.machine.run(rng.randrange(20))

    def poison(self, shapes: Any) -> None:
        for shape, dtype in shapes:
            self.machine.fill(self.device, self.machine.allocate(self.device, torch.empty(shape, dtype=dtype)), 0x5A)

    def wrong(self) -> tuple[int, int]:
        self.machine.finish()
        return self.seen // 2, len(self.mismatched)


def loader_of(machine: Machine, **options: Any) -> ShardedDataLoader:
    return made(rows(COUNT, WIDTH), 8, shuffle=True, seed=1, device=machine.devices[0], **options)


@pytest.mark.costly
def test_batches_are_intact_however_they_are_used(machine: Machine, pool: Pool) -> None:
    with loader_of(machine, pool=pool) as loader:
        seen, differing = stress(Simulated(machine), loader, 150, seed=2)
    assert seen > 100
    assert differing == 0


@pytest.mark.parametrize("share", [True, 0.5, 0.1, "auto"])
@pytest.mark.slow
def test_resident_batches_are_intact_however_they_are_used(machine: Machine, share: Any) -> None:
    if share == "auto":
        machine.memory_bytes = 6 * COUNT * WIDTH, 16 * COUNT * WIDTH  # room for half
    with loader_of(machine, resident=share) as loader:
        seen, differing = stress(Simulated(machine), loader, 150, seed=2)
    assert seen > 100
    assert differing == 0


@pytest.mark.parametrize("broken", ["targets of copies are not waited for", "slots are given back at once"])
@pytest.mark.slow
def test_a_library_that_is_careless_is_found_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The stress sees what it is there to see."""
    finish = PendingCopy.finish

    def careless(pending: PendingCopy) -> Any:
        if broken.startswith("slots"):
            pending.copies.in_use.clear()
            return finish(pending)
        pending.targets.clear()
        return pending.batch

    monkeypatch.setattr(PendingCopy, "finish", careless)
    # Memory that torch pins is guarded; that of slots is not.
    monkeypatch.setattr(Placer, "empty", lambda self, shape, dtype: np.empty(shape, dtype))
    with loader_of(machine, num_workers=2) as loader:
        _, differing = stress(Simulated(machine), loader, 100, seed=2)
    assert differing > 0
