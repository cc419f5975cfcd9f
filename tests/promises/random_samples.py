"""Datasets that draw. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
from samples import Drawing

from sharded_loader import sample_generator, sample_rng, sample_seed


class Numbers:
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return index


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


class DrawingByIndex(Drawing):
    def __getitem__(self, index: int) -> Any:
        return self.read(index, sample_rng(index))


class DrawingEverywhere(Numbers):
    """All that one sample can draw from."""

    def __init__(self, unseeded: bool) -> None:
        self.unseeded = unseeded

    def __getitem__(self, index: int) -> Any:
        import torch

        def globally() -> list[float]:
            return [random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()]

        drawn = globally() if self.unseeded else []
        with sample_seed():
            drawn += globally()
        own = torch.rand((), dtype=torch.float64, generator=sample_generator()).item()
        return np.array([*drawn, sample_rng().random(), own])


class OwnsGenerator:
    """As a transform of albumentations."""

    def __init__(self) -> None:
        self.set_random_seed(None)

    def set_random_seed(self, seed: int | None) -> None:
        self.generator, self.python = np.random.default_rng(seed), random.Random(seed)

    def set_random_state(self, random_generator: Any, py_random: Any) -> None:
        raise AssertionError("set_random_seed is there")

    def __call__(self, *, image: Any) -> Any:
        return np.append(image, [self.generator.random(), self.python.random()])


class OwnsState:
    """As a transform of MONAI."""

    def __init__(self) -> None:
        self.R = np.random.RandomState()

    def set_random_state(self, seed: int | None = None, state: Any = None) -> OwnsState:
        if state is not None and not isinstance(state, np.random.RandomState):
            raise TypeError("state must be a RandomState")
        self.R = np.random.RandomState(seed) if state is None else state
        return self

    def __call__(self, image: Any) -> Any:
        return np.append(image, self.R.uniform())


class Several:
    """As a pipeline of torchvision, which knows nothing of generators."""

    def __init__(self, transforms: list[Any]) -> None:
        self.transforms = transforms

    def __call__(self, image: Any) -> Any:
        for transform in self.transforms:
            image = transform(image)
        return image


OWNS = OwnsGenerator()


def augment(image: Any) -> Any:
    """As a function that calls a global transform with its keywords."""
    return OWNS(image=image)


def all_kinds() -> Several:
    own = OwnsGenerator()
    return Several([Several([OwnsState(), augment]), lambda image: own(image=image), OwnsState()])


def killing(marker: Path, transform: Any, index: int) -> Any:
    """The transform; over one sample the worker dies, once."""

    def killing_once(image: Any) -> Any:
        transformed = transform(image)
        if image == index and not marker.exists():
            marker.touch()
            os._exit(1)
        return transformed

    return killing_once
