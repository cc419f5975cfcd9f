"""The device that is measured: how to wait for it and to time its work. The CPU stands in for one to try the programs.

    Device.sync()            all work that it was given is done
    Device.copies(nbytes)    -> a function that times so many bare copies to it, in seconds
    Device.timed(work)       -> how long it takes for that
    Device.sleeper(seconds)  -> a function that gives it so much work
    Device.watch()           -> a function that says how much memory was held since
    Device.about()           -> what it is called, its driver

On the CPU nothing is asynchronous and nothing is learned about a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.gpu_feeds import Feed
from sharded_loader import ProcessPool


class Device:
    """A GPU, or the CPU in its place.

    Args:
        name: as torch has it.

    Raises:
        RuntimeError: there is no such device.
    """

    def __init__(self, name: str) -> None:
        device = torch.device(name)
        if device.type not in ("cuda", "cpu"):
            raise RuntimeError(f"--device {name}: this benchmark knows CUDA devices, and the CPU to try it")
        if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
            raise RuntimeError(f"--device {name}: torch sees {torch.cuda.device_count()} CUDA devices")
        self.is_gpu = device.type == "cuda"
        self.device = torch.device("cuda", device.index or 0) if self.is_gpu else torch.device("cpu")
        if self.is_gpu:
            torch.cuda.set_device(self.device)
            torch.zeros(1, device=self.device)  # the context, before anything is timed

    def sync(self) -> None:
        """Wait until all work is done."""
        if self.is_gpu:
            torch.cuda.synchronize(self.device)

    def host(self, shape: tuple[int, ...]) -> torch.Tensor:
        """float32 in host memory, pinned for a GPU."""
        return torch.zeros(shape, pin_memory=self.is_gpu)

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds that the current stream takes for ``work``, by events. On the CPU, that the caller takes."""
        if not self.is_gpu:
            began = time.perf_counter()
            work()
            return time.perf_counter() - began
        cuda: Any = torch.cuda
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        first.record()
        work()
        last.record()
        last.synchronize()
        return float(first.elapsed_time(last)) / 1000

    def copies(self, nbytes: int) -> Callable[[int], float]:
        """A function that times a number of copies from one pinned buffer to one on the device."""
        source = self.host((nbytes // 4,))
        target = torch.empty_like(source, device=self.device)

        def copy(count: int) -> None:
            for _ in range(count):
                target.copy_(source, non_blocking=True)

        return lambda count: self.timed(functools.partial(copy, count))

    def copy_calls(self, hosts: Sequence[torch.Tensor]) -> Callable[[], None]:
        """What calls all of torch that copies of these tensors on a side stream take, once."""
        if not self.is_gpu:
            return lambda: None
        cuda: Any = torch.cuda
        side, device = cuda.Stream(self.device), self.device

        def run() -> None:
            home = cuda.current_stream(device)
            targets = [torch.empty_like(host, device=device) for host in hosts]
            ready = cuda.Event()
            ready.record(home)
            side.wait_event(ready)
            with cuda.stream(side):
                for target, host in zip(targets, hosts, strict=True):
                    target.copy_(host, non_blocking=True)
            done = cuda.Event()
            done.record(side)
            home.wait_event(done)

        return run

    def sleeper(self, seconds: float) -> Callable[[], None]:
        """A function that keeps the current stream busy for so long; on the CPU, the caller."""
        if not self.is_gpu:
            return functools.partial(time.sleep, seconds)
        spin: Callable[[int], None] = torch.cuda._sleep
        return functools.partial(spin, cycles_for(seconds, lambda cycles: self.timed(functools.partial(spin, cycles))))

    def wait_asleep(self) -> None:
        """Wait until the current stream has done its work, and need no processor for it, as `sync` does."""
        if self.is_gpu:
            event: Any = torch.cuda.current_stream(self.device).record_event()
            while not event.query():
                time.sleep(0.0002)

    def watch(self) -> Callable[[Feed], tuple[int, int]]:
        """A function that tells the most bytes held from now on, of a GPU and of pinned memory, before a feed closes.

        Pinned memory is torch's and the segments of a pool. It only grows while a feed is open: its size is its peak.
        """
        cuda: Any = torch.cuda
        gc.collect()
        self.sync()
        cuda.empty_cache()
        with contextlib.suppress(AttributeError):  # an older torch
            torch._C._host_emptyCache()  # else blocks of earlier feeds are used again, and do not count
        before, pinned = cuda.memory_allocated(self.device), _pinned_bytes()
        cuda.reset_peak_memory_stats(self.device)

        def held(feed: Feed) -> tuple[int, int]:
            pool = getattr(feed.loader, "pool", None)
            segments = pool._transport.arena.segments if isinstance(pool, ProcessPool) else ()
            locked = sum(segment.nbytes for segment in segments if segment.unregister)
            return cuda.max_memory_allocated(self.device) - before, _pinned_bytes() - pinned + locked

        return held

    def about(self) -> dict[str, Any]:
        """Name, driver and the like."""
        found: dict[str, Any] = {"device": "the CPU, in the place of a GPU", "cpus": os.cpu_count()}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            found["device"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
            found["cuda"] = torch.version.cuda
            found["driver"] = _driver(self.device.index or 0)
        return found


TRIED = 20_000_000
"""Cycles of a try: some 10 ms."""

WARMING, AT_MOST = 0.5, 3.0
"""Seconds of work that raise the clock of a device, and after which it is taken as it is."""


def cycles_for(seconds: float, spin: Callable[[int], float]) -> int:
    """The cycles of a stretch of work, by the clock of a busy device. The clock of one at rest is slower.

    Args:
        spin: gives the device so many cycles of work, and returns the seconds that they took.
    """
    before, took = math.inf, spin(TRIED)
    busy = took
    while busy < WARMING or (abs(before / took - 1) > 0.01 and busy < AT_MOST):
        before, took = took, spin(TRIED)
        busy += took
    return int(TRIED * seconds / took)


def _pinned_bytes() -> int:
    """Pinned host memory of torch's allocator, in use or kept for later; 0 if this torch has no statistics.

    Not ``active_bytes``: in torch 2.11 it grows by a block with each batch, whatever comes back.
    """
    if not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _driver(index: int) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={index}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        return shown.splitlines()[0] if shown else "unknown"
    return "unknown"
