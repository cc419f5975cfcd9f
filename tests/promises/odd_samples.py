"""Datasets that draw, and exceptions whose own code is hostile. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from failures import odd_errors

from sharded_loader import sample_generator, sample_rng, sample_seed


def jitter(index: int) -> Any:
    """As a transform that draws from the global generators."""
    return np.array([index, random.random(), np.random.random()])


def globally() -> list[float]:
    import torch

    return [random.random(), float(np.random.random()), torch.rand((), dtype=torch.float64).item()]


def everywhere(index: int, unseeded: bool) -> Any:
    """All that one sample can draw from."""
    import torch

    drawn = globally() if unseeded else []
    with sample_seed():
        drawn += globally()
    own = torch.rand((), dtype=torch.float64, generator=sample_generator()).item()
    return np.array([*drawn, sample_rng().random(), own])


def more_jitter(sample: Any) -> Any:
    return np.append(sample, globally())


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


class ExitsInReduce(Exception):
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class ExitsInStr(Exception):
    def __str__(self) -> str:
        raise SystemExit(4)


class RaisesInGetattr(Exception):
    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


class Refuses(Exception):
    """Takes no attributes, as a frozen dataclass."""

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class WithLock(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()
        self.code = 5


class NoText:
    def __repr__(self) -> str:
        raise ValueError("no text")


class Foreign(BaseException):
    pass


def grouped() -> BaseException:
    if sys.version_info < (3, 11):
        return ValueError("no groups")
    return ExceptionGroup("several", [ValueError(1), WithLock("locked")])  # noqa: F821 - Python 3.11


SEEN = ("both", "code")
HOSTILE: list[tuple[Callable[[], BaseException], str, dict[str, Any]]] = [
    (lambda: ExitsInReduce("x"), "ExitsInReduce", {"args": ("x",)}),
    (lambda: ExitsInStr("x"), "ExitsInStr", {"args": ("x",)}),
    (lambda: RaisesInGetattr("x"), "RaisesInGetattr", {"args": ("x",)}),
    (lambda: WithLock("x"), "WithLock", {"code": 5}),
    (lambda: Refuses("x"), "Refuses", {"args": ("x",)}),
    (lambda: ValueError("x" * 3_000_000), "ValueError", {"args": ("x" * 3_000_000,)}),
    (grouped, type(grouped()).__name__, {}),
    (lambda: SystemExit(NoText()), "SampleReadError", {}),
    (lambda: GeneratorExit(), "SampleReadError", {}),
    (lambda: StopAsyncIteration("x"), "SampleReadError", {}),
    (lambda: Foreign("x"), "SampleReadError", {}),
    *(
        (
            lambda number=number: odd_errors()[number],
            type(one).__name__,
            {k: v for k, v in vars(one).items() if k in SEEN},
        )
        for number, one in enumerate(odd_errors())
    ),
    (lambda: KeyboardInterrupt("x"), "SampleReadError", {}),
]
"""How to make it, the name of the class that arrives, and attributes that arrive with it. The last passes inline."""


class Hostile:
    """Each even sample is one of these errors."""

    def __len__(self) -> int:
        return 2 * len(HOSTILE)

    def __getitem__(self, index: int) -> int:
        if index % 2 == 0:
            raise HOSTILE[index // 2][0]()
        return index


class StopsWhenMoved:
    """A batch whose ``to`` would end the loop."""

    def to(self, device: Any) -> Any:
        raise StopIteration


class StopsWhenCounted:
    """A batch of indices whose length would end the loop."""

    def __len__(self) -> int:
        raise StopIteration


def negative(failed: Any) -> Any:
    """For ``on_error``: where the sample was, and what it draws."""
    return np.array([-failed.index, sample_rng(failed.index).integers(1 << 30)])
