"""Exceptions whose own code is hostile, and datasets with bad samples. Torch-free, for spawned workers."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader import sample_rng


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
