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

import pytest
import simulated_cuda
import torch
from stress import order_of

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


PRETENDED = simulated_cuda.cuda is not None
"""The GPU is only pretended."""


def sleep(cycles: int) -> None:
    """A kernel on the current stream that takes so long."""
    torch.cuda._sleep(cycles)


def copies_of(loader: ShardedDataLoader) -> tuple[CopyStream, torch.cuda.Stream]:
    """The copies of a loader of one device that has delivered something, and their stream."""
    (copies,) = loader._placement.copies.values()
    return copies, copies._stream


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


class Late:
    """Compares on the current stream, and counts what differs. The host looks at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # One counter for each stream: two streams must not add to one.
        self.counters: dict[int, torch.Tensor] = {}

    def expect(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.device == self.device
        stream = torch.cuda.current_stream(self.device).cuda_stream
        if stream not in self.counters:
            self.counters[stream] = torch.zeros((), dtype=torch.int64, device=self.device)
        self.counters[stream].add_((found != expected).sum())

    def poison(self, shapes: Any) -> None:
        """Write over memory that the current stream may have, for tensors of these shapes and dtypes."""
        for shape, dtype in shapes:
            torch.empty(shape, dtype=dtype, device=self.device).fill_(POISON)

    def differing(self) -> int:
        torch.cuda.synchronize(self.device)
        return sum(int(counter) for counter in self.counters.values())


class Rows(Late):
    """Compares batches of `stress.rows` with their labels.

    Args:
        width: of the rows.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        super().__init__(device)
        self.width, self.labels = width, list[torch.Tensor]()
        self.columns = torch.arange(width, dtype=torch.int64, device=device)

    def compare(self, values: torch.Tensor, labels: torch.Tensor) -> None:
        self.expect(values, labels[:, None] * self.width + self.columns)
        self.labels.append(labels.clone())

    def result(self) -> tuple[list[int], int]:
        """The labels that were seen since the last result, and how many values differed."""
        seen = [label for labels in self.labels for label in labels.tolist()]
        self.labels.clear()
        return seen, self.differing()


class OnCuda(Late):
    """A GPU as the target of `stress.stress`.

    Args:
        device: with its number.
        width: of the `stress.rows`.
    """

    def __init__(self, device: torch.device, width: int) -> None:
        super().__init__(device)
        self.side, self.width, self.seen = torch.cuda.Stream(device), width, 0
        self.columns = torch.arange(width, dtype=torch.int64, device=device)
        # The upload of an epoch's order is to be over before any stream reads it: a new tensor each, kept to the end.
        self.orders: list[torch.Tensor] = []
        torch.cuda.synchronize(device)

    def begin_epoch(self, indices: list[int]) -> None:
        self.orders.append(torch.tensor(indices, dtype=torch.int64, device=self.device))
        torch.cuda.synchronize(self.device)

    def epochs(self, loader: ShardedDataLoader, count: int) -> Iterator[Any]:
        """The iterators of so many epochs, each of which has begun here too."""
        for epoch in range(count):
            loader.set_epoch(epoch)
            self.begin_epoch(order_of(loader, epoch))
            yield iter(loader)

    def compare(self, batch: Any, first: int) -> None:
        values, labels = batch
        expected = self.orders[-1][first : first + len(labels)]
        self.expect(values, expected[:, None] * self.width + self.columns)
        self.expect(labels, expected)
        self.seen += 1

    @contextmanager
    def beside(self, batch: Any) -> Iterator[None]:
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            yield
        for field in batch:
            field.record_stream(self.side)

    def delay(self, rng: random.Random, loader: ShardedDataLoader) -> None:
        streams = [torch.cuda.current_stream(self.device), self.side, copies_of(loader)[1]]
        with torch.cuda.stream(rng.choice(streams)):
            sleep(rng.randrange(SHORT, LONG))

    def wrong(self) -> tuple[int, int]:
        return self.seen, self.differing()


class Cudart:
    """torch's CUDA runtime, with a count of what is registered.

    Args:
        real: what `torch.cuda.cudart` returns.
    """

    def __init__(self, real: Any) -> None:
        self.real = real
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        self.calls += 1
        code = self.real.cudaHostRegister(address, nbytes, flags)
        if int(code) == 0:
            self.registered[address] = nbytes
        return code

    def cudaHostUnregister(self, address: int) -> Any:
        self.registered.pop(address)
        return self.real.cudaHostUnregister(address)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def run_program(code: str, seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, which pretends to have GPUs if this one does.

    Raises:
        subprocess.TimeoutExpired: it has not ended after so many seconds.
    """
    if PRETENDED:
        code = f"import simulated_cuda; simulated_cuda.install({torch.cuda.device_count()})\n{code}"
    code = f"import sys; sys.path[:0] = {sys.path!r}\n{code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=seconds)
