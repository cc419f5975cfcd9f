"""What the tests of this folder do with a GPU: nothing of it happens when the module is imported."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import simulated
import torch

from sharded_loader import ShardedDataLoader
from sharded_loader.devices.copies import CopyStream

POISON = 0x5A
SHORT, LONG = 20_000, 800_000
"""Cycles: some 10 us and half a millisecond."""

SECONDS = 1_500_000_000
"""Cycles: about a second, whatever the clock."""

PART = int(os.environ.get("GPU_TESTS_PART", "1"))
"""One of so many steps is done: to try the tests where a GPU is only pretended."""

needs_cuda = pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU")
needs_two = pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")


PRETENDED = simulated.cuda is not None
"""The GPU is only pretended."""


def sleep(cycles: int) -> None:
    """A kernel on the current stream that takes so long."""
    torch.cuda._sleep(cycles)


def copy_streams_of(loader: ShardedDataLoader) -> list[CopyStream]:
    """The copy streams of a loader that has delivered something."""
    return list(loader._placement.copies.values())


def let_workers_finish(loader: ShardedDataLoader, batches: Any) -> None:
    """Wait until all batches in flight are finished, and begin no copy."""
    while any(entry.result is None for entry in batches.run.window):
        with loader._pipeline.lock:
            loader._pipeline.runs.store(loader._pipeline.pool.wait(True))


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Inside, what makes the host wait for the device is an error, as far as torch knows of it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


@contextmanager
def memory_limit(device: torch.device, nbytes: int) -> Iterator[None]:
    """Inside, torch may have so many bytes more of the device than are in use now."""
    gc.collect()  # what is garbage now would make room later
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + nbytes) / total, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


class OnCuda:
    """A GPU as the target of `stress.stress`.

    Args:
        device: with its number.
        count, width: of the `stress.rows`.
    """

    def __init__(self, device: torch.device, count: int, width: int) -> None:
        self.device = device
        self.side = torch.cuda.Stream(device)
        self._width = width
        self._columns = torch.arange(width, dtype=torch.int64, device=device)
        # The upload of an epoch's order is to be over before any stream reads it: a new tensor each, kept to the end.
        self._orders: list[torch.Tensor] = []
        self._count = count
        # One counter for each stream: two streams must not add to one.
        self._differing: dict[int, torch.Tensor] = {}
        self._seen = 0
        torch.cuda.synchronize(device)

    def begin_epoch(self, indices: list[int]) -> None:
        assert max(indices) < self._count
        self._orders.append(torch.tensor(indices, dtype=torch.int64, device=self.device))
        torch.cuda.synchronize(self.device)

    def compare(self, batch: Any, first: int) -> None:
        values, labels = batch
        assert (values.device, labels.device) == (self.device, self.device)
        expected = self._orders[-1][first : first + len(labels)]
        differing = (values != expected[:, None] * self._width + self._columns).sum() + (labels != expected).sum()
        self._counter().add_(differing)
        self._seen += 1

    def _counter(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream not in self._differing:
            self._differing[stream] = torch.zeros((), dtype=torch.int64, device=self.device)
        return self._differing[stream]

    @contextmanager
    def beside(self, batch: Any) -> Iterator[None]:
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            yield
        for field in batch:
            field.record_stream(self.side)

    def delay(self, rng: random.Random, loader: ShardedDataLoader) -> None:
        streams = [torch.cuda.current_stream(self.device), self.side]
        streams += [copies._stream for copies in copy_streams_of(loader)]
        with torch.cuda.stream(rng.choice(streams)):
            sleep(rng.randrange(SHORT, LONG))

    def poison(self, shapes: Any) -> None:
        for shape, dtype in shapes:
            torch.empty(shape, dtype=dtype, device=self.device).fill_(POISON)

    def wrong(self) -> tuple[int, int]:
        torch.cuda.synchronize(self.device)
        return self._seen, sum(int(counter) for counter in self._differing.values())


class Rows:
    """Compares batches of `stress.rows` with their labels, on the current stream. The host looks at the end.

    Args:
        width: of the rows.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        self._device, self._width = device, width
        self._columns = torch.arange(width, dtype=torch.int64, device=device)
        self._differing = torch.zeros((), dtype=torch.int64, device=device)
        self._labels: list[torch.Tensor] = []

    def compare(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        assert (values.device, labels.device) == (self._device, self._device)
        self._differing.add_((values != labels[:, None] * self._width + self._columns).sum())
        self._labels.append(labels.clone())

    def result(self) -> tuple[list[int], int]:
        """The labels that were seen since the last result, and how many values differed."""
        seen = [label for labels in self._labels for label in labels.tolist()]
        self._labels.clear()
        return seen, int(self._differing)


class Cudart:
    """torch's CUDA runtime, with a count of what is registered.

    Args:
        real: what `torch.cuda.cudart` returns.
        refuse: an error code for every registration instead.
    """

    def __init__(self, real: Any, refuse: int = 0) -> None:
        self.real = real
        self.refuse = refuse
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        self.calls += 1
        if self.refuse:
            return self.refuse
        code = self.real.cudaHostRegister(address, nbytes, flags)
        if int(code) == 0:
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address: int) -> Any:
        self.registered.pop(address)
        return self.real.cudaHostUnregister(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def host_values(batch: Any) -> list[Any]:
    """The fields of a batch as NumPy arrays; the host waits."""
    return [np.asarray(field.cpu()) for field in batch]


def run_program(code: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which pretends to have GPUs if this one does.

    Raises:
        subprocess.TimeoutExpired: it has not ended after so many seconds.
    """
    if PRETENDED:
        code = f"import simulated; simulated.install({torch.cuda.device_count()})\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
