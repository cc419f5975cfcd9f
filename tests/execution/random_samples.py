"""Datasets that draw. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from sharded_loader import sample_rng


class Numbers:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


class Drawing(Numbers):
    def __getitem__(self, index: int) -> Any:
        return np.array([index, sample_rng().integers(1 << 30)])


class DrawingInBatches(Numbers):
    def get_batch(self, indices: Any) -> Any:
        return np.stack([np.array([index, sample_rng(int(index)).integers(1 << 30)]) for index in indices])


class DrawingWithoutIndex(Numbers):
    def get_batch(self, indices: Any) -> Any:
        return np.full(len(indices), sample_rng().random())


class DrawingGlobally(Numbers):
    def __getitem__(self, index: int) -> Any:
        return np.array([index, random.random(), np.random.random()])


def jitter(index: int) -> Any:
    """As a transform that draws from the global generators."""
    return np.array([index, random.random(), np.random.random()])


def draw_for_the_batch(samples: list[int]) -> Any:
    """A batchify function that draws."""
    return np.array([*samples, sample_rng().integers(1 << 30)])
