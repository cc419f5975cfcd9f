"""Datasets and functions that wait until somebody opens a gate. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

from pathlib import Path

from samples import wait_for


class Waits:
    """Sample 5 waits until somebody has made the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        if index == 5:
            wait_for(self.file)
        return index


class InBulk(Waits):
    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Collates:
    """The collate function waits."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, samples: list[int]) -> list[int]:
        if 5 in samples:
            wait_for(self.file)
        return samples


class Starts:
    """Waits in ``worker_init_fn``."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, number: int) -> None:
        wait_for(self.file)
