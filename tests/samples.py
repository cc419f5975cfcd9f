"""The catalogue of datasets that the tests read in workers. Torch-free, so that a spawned worker starts fast.

    what comes       Filled (large), Documents (of any length), Told (the epoch), Parents (who reads), Noting (a file)
    random numbers   Drawing, DrawingInItems, DrawingInBatches, Draws, Augmented, Random (slowly)
    errors           Drawing(bad=...), Bad, Misfits, InBulk, Odd
    deaths           Bad(kill), DiesInSetState, StartsAndDies; `failures` says how
    when it comes    Gate (when the test wants), Uneven (early ones late); `pass_time` by the clock of the package
    orders           ByEpoch
    batches          Shy, Immovable, OneWay; `halves` and `summed` make them

A dataset that one test alone needs is ``SimpleDataset(range(n)).transform(function)`` there. Before you add one here,
look whether an argument of these does it.
"""

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from failures import Boom, Fails, boom, odd_errors

from sharded_loader import Sampler, SimpleDataset, empty, sample_generator, sample_rng, sample_seed
from sharded_loader.base import host_clock


def pass_time(seconds: float) -> None:
    """Let time pass by the clock of the package: that of the fixture `host_time` is moved, the real one waited for."""
    getattr(host_clock.now, "move", time.sleep)(seconds)


class Numbers:
    """Sample i is i."""

    length = 20

    def __init__(self, length: int | None = None) -> None:
        self.length = self.length if length is None else length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return index


class Uneven(Numbers):
    """Early samples take longest, so that results come back in the wrong order."""

    length = 60

    def __getitem__(self, index: int) -> int:
        time.sleep(0.01 if index % 20 < 5 else 0)
        return index


class Documents(Numbers):
    """Document i has ``lengths[i]`` tokens. Token j of it is ``1000 * i + j``."""

    def __init__(self, lengths: Any) -> None:
        self.lengths, self.length = lengths, len(lengths)

    def __getitem__(self, index: int) -> Any:
        return 1000 * index + np.arange(self.lengths[index])


class Draws(Numbers):
    """A sample of everything random."""

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        import torch

        rng = sample_rng()
        assert sample_rng() is rng
        own = rng.random(2)
        tensor = torch.rand(2, generator=sample_generator())
        with sample_seed():
            shared = np.array([random.random(), np.random.random(), torch.rand(()).item()])
        return own, tensor, shared


class Augmented(Numbers):
    """Samples that are their index and a random number."""

    def __getitem__(self, index: int) -> Any:
        return np.array([index, sample_rng().random()])


def summed(samples: list[Any]) -> Any:
    """Samples of `Augmented` as a batch, which has a random number of its own."""
    return np.stack(samples) + sample_rng().random()


class ByEpoch:
    """A sampler of another library whose order depends on set_epoch alone."""

    epoch = 0

    def __init__(self, length: int) -> None:
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).permutation(self.length).tolist())

    def __len__(self) -> int:
        return self.length


class Drawing(Numbers):
    """Sample i is (i, a number that it draws). Those in ``bad`` call ``fail``, or raise a ValueError with the index."""

    def __init__(self, length: int = 12, bad: Collection[int] = (), fail: Callable[[], Any] | None = None) -> None:
        self.length, self.bad, self.fail = length, bad, fail

    def read(self, index: int, rng: np.random.Generator) -> Any:
        if index in self.bad:
            if self.fail is None:
                raise ValueError(f"bad {index}")
            self.fail()
        return np.array([index, rng.integers(1 << 30)])

    def __getitem__(self, index: int) -> Any:
        return self.read(index, sample_rng())


class DrawingInItems(Drawing):
    """Read in bulk: lists of samples."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.read(index, sample_rng(index)) for index in indices]


class DrawingInBatches(Drawing):
    """Read in bulk: whole batches."""

    def get_batch(self, indices: Any) -> Any:
        return np.stack([self.read(index, sample_rng(index)) for index in map(int, indices)])


class Filled(Numbers):
    """Sample i is so many numbers i, of four bytes each: of 16 KB, batches lie in shared memory."""

    def __init__(self, length: int = 240, width: int = 4096) -> None:
        self.length, self.width = length, width

    def __getitem__(self, index: int) -> Any:
        return np.full(self.width, index, np.float32)


class Random(Numbers):
    """Samples of everything random, at a pace that leaves time to be killed."""

    def __init__(self, length: int = 200, seconds: float = 0.005) -> None:
        self.length, self.seconds = length, seconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return np.array([index, sample_rng().random(), random.random(), np.random.random()])


class Bad(Numbers):
    """Sample 7 is bad, in a way of one's choice."""

    def __init__(self, fail: Callable[[], Any]) -> None:
        self.fail = fail

    def __getitem__(self, index: int) -> int:
        if index == 7:
            self.fail()
        return index


class Misfits(Numbers):
    """Sample 5 raises, 6 is longer than the others, and 9 can be in no batch at all."""

    length = 12

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise ValueError("bad")
        return [1 << 70 if index == 9 else 0] * (4 if index == 6 else 3)


class InBulk(SimpleDataset):
    """Reads in bulk, which hides the index that fails."""

    def __getitem__(self, index: int) -> int:
        if index == 7:
            boom()
        return index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Gate(Numbers):
    """Samples that wait until they are let through, but for a free one, and count themselves. For threads."""

    length = 100

    def __init__(self, free: int | None = None) -> None:
        self.free, self.reads = free, 0
        self.begun, self.opened = threading.Semaphore(0), threading.Semaphore(0)

    def open_for_all(self) -> None:
        for _ in range(10_000):
            self.opened.release()

    def __getitem__(self, index: int) -> int:
        self.reads += 1
        self.begun.release()
        if index != self.free:
            self.opened.acquire()
        return index


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


class Odd(Numbers):
    """Each sample is another of these errors."""

    length = len(odd_errors())

    def __getitem__(self, index: int) -> Any:
        raise odd_errors()[index]


class Told(Numbers):
    """Samples that say the epoch that they were told."""

    epoch, length = -1, 12

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


class DiesInSetState(Numbers):
    """Kills the worker that unpickles it."""

    def __init__(self, fail: Fails) -> None:
        self.length, self.fail = 8, fail

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state)
        self.fail()


class Parents(Numbers):
    """Sample: a value of the dataset, the reader's pid and its parent's."""

    length = 40

    def __init__(self) -> None:
        self.value = 1

    def __getitem__(self, index: int) -> Any:
        return np.array([index, self.value, os.getpid(), os.getppid()])


class StartsAndDies(Numbers):
    """In one sample, once: starts a process that lives on, and is killed."""

    length = 40

    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    def __getitem__(self, index: int) -> int:
        started = self.folder / "started"
        if index == 20 and not started.exists():
            if self.how == "fork":
                if (pid := os.fork()) == 0:
                    time.sleep(60)
                    os._exit(0)
                started.write_text(str(pid))
            else:  # a program, which inherits what is inheritable
                os.system(f"sleep 60 & echo $! > {started}")
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def halves(samples: Sequence[Any]) -> dict[str, Any]:
    """A batchify function that asks for the batch's memory itself."""
    batch = empty((len(samples), 64), np.float32)
    for row, sample in zip(batch, samples, strict=True):
        row[:] = sample / 2
    return {"half": batch, "names": [str(sample) for sample in samples]}


class Large(Numbers):
    """Samples of 600 KB."""

    def __getitem__(self, index: int) -> Any:
        return np.ones(150_000, np.float32)


def page_faults(samples: Sequence[Any]) -> int:
    """A batchify function that gives the page faults of its process so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


class Noting(Numbers):
    """A file has the numbers that were read."""

    length = 12

    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: int) -> int:
        with self.path.open("a") as file:
            file.write(f"{index} ")
        return index


def wait_for(file: Path) -> None:
    """Wait until somebody has made the file."""
    while not file.exists():
        time.sleep(0.005)


class NoLength:
    """A sampler of another library: yields these items, or in each iteration what this function returns."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items() if callable(self.items) else self.items)


class Foreign(NoLength):
    """The same with a length: that of the items, or another one; or an error that ``len`` raises."""

    def __init__(self, items: Any, length: int | Exception | None = None) -> None:
        super().__init__(items)
        self.length = len(items) if length is None else length

    def __len__(self) -> int:
        if isinstance(self.length, Exception):
            raise self.length
        return self.length


class GluonStyle(Foreign, Sampler[Any]):
    """A sampler as Gluon's users write it: no constructor call, and a function that draws from global generators."""
