"""Datasets and failures that the tests read in workers. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sharded_loader import SimpleDataset, empty, sample_generator, sample_rng, sample_seed


class Uneven:
    """Early samples take longest, so that results come back in the wrong order."""

    def __init__(self, length: int = 60) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01 if index % 20 < 5 else 0)
        return index


class Draws:
    """A sample of everything random."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        rng = sample_rng()
        assert sample_rng() is rng
        own = rng.random(2)
        tensor = torch.rand(2, generator=sample_generator())
        with sample_seed():
            shared = np.array([random.random(), np.random.random(), torch.rand(()).item()])
        return own, tensor, shared


class Boom(Exception):
    """Cannot be made from its args."""

    def __init__(self, what: str, code: int) -> None:
        super().__init__(f"{what} went wrong")
        self.code = code


class Bad:
    """Sample 7 is bad, in a way of one's choice."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> int:
        if index == 7:
            self.fail()
        return index


class Misfits:
    """Sample 5 raises, 6 is longer than the others, and 9 can be in no batch at all."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("bad")
        return [1 << 70 if index == 9 else 0] * (4 if index == 6 else 3)


def boom() -> None:
    raise Boom("sample", 42)


def sigkill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os._exit(3)


class TwoArguments(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(a, b)
        self.both = (a, b)


def local_error() -> type[Exception]:
    class Local(ValueError):
        marker = "of the class"

        def __init__(self, a: str, *, keyword: int) -> None:
            super().__init__(a)
            self.keyword = keyword

    return Local


Local = local_error()


def raise_two() -> None:
    raise TwoArguments(1, 2)


def raise_local() -> None:
    raise Local("odd", keyword=3)


def raise_os_error() -> None:
    raise FileNotFoundError(2, "No such file or directory", "image.png")


def raise_unicode() -> None:
    b"\xff".decode("utf-8")


class InBulk(SimpleDataset):
    """Reads in bulk, which hides the index that fails."""

    def __getitem__(self, index: int) -> int:
        if index == 7:
            boom()
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


def stop() -> None:
    raise StopIteration("early")


def exit_() -> None:
    raise SystemExit(4)


class Gate:
    """Samples that wait until they are let through, and count themselves. For threads.

    Args:
        free: the sample that does not wait.
    """

    def __init__(self, free: int | None = None) -> None:
        self.free = free
        self.begun = threading.Semaphore(0)
        self.opened = threading.Semaphore(0)
        self.reads = 0

    def open_for_all(self) -> None:
        for _ in range(10_000):
            self.opened.release()

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.begun.release()
        if index != self.free:
            self.opened.acquire()
        return index


_SAME = Boom("always the same", 1)


def same_again() -> None:
    raise _SAME


class OneWay:
    """Pickles, but does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("no number",)


class Immovable:
    """Cannot be moved to a device."""

    def to(self, device: Any) -> Any:
        raise Boom("moving", 1)


@dataclass
class Shy:
    """A batch with a field that is not set."""

    samples: Any
    unset: Any = field(init=False)


@dataclass(frozen=True)
class Frozen(Exception):
    code: int


class NoNotes(Exception):
    __notes__ = ()  # type: ignore[assignment]


class OwnNew(Exception):
    def __new__(cls, a: int, b: int) -> OwnNew:
        return super().__new__(cls)

    def __init__(self, a: int, b: int) -> None:
        self.both = a, b


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def odd_errors() -> list[Exception]:
    return [
        Frozen(3),
        NoNotes("x"),
        OwnNew(1, 2),
        Unprintable(),
        KeyError((1, object())),
        ValueError(np.zeros(100_000)),
    ]


class Odd:
    """Each sample is another of these errors."""

    def __len__(self) -> int:
        return len(odd_errors())

    def __getitem__(self, index: int) -> Any:
        raise odd_errors()[index]


class Told:
    """Samples that say the epoch that they were told."""

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def halves(samples: Sequence[Any]) -> dict[str, Any]:
    """A batchify function that asks for the batch's memory itself."""
    batch = empty((len(samples), 64), np.float32)
    for row, sample in zip(batch, samples, strict=True):
        row[:] = sample / 2
    return {"half": batch, "names": [str(sample) for sample in samples]}
