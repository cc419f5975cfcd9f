"""The device that is measured: how to wait for it and to time its work. The CPU stands in for one to try the programs.

    Device.sync()            all work that it was given is done
    Device.copies(nbytes)    -> a function that times so many bare copies to it, in seconds
    Device.sleeper(seconds)  -> a function that gives it so much work
    Device.watched()         -> what memory is held meanwhile
    Device.about()           -> what it is called, its driver

On the CPU nothing is asynchronous and nothing is learned about a GPU.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
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

    def copies(self, nbytes: int) -> Callable[[int], float]:
        """What times a number of copies from one pinned buffer to one on the device: by events, on a GPU."""
        source = self.host((nbytes // 4,))
        target = torch.empty_like(source, device=self.device)

        def run(count: int) -> float:
            if not self.is_gpu:
                began = time.perf_counter()
                for _ in range(count):
                    target.copy_(source)
                return time.perf_counter() - began
            cuda: Any = torch.cuda
            first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            first.record()
            for _ in range(count):
                target.copy_(source, non_blocking=True)
            last.record()
            last.synchronize()
            return float(first.elapsed_time(last)) / 1000

        return run

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
        """What keeps the current stream busy for so long, by the device's clock of now. On the CPU, the caller."""
        if not self.is_gpu:
            return functools.partial(time.sleep, seconds)
        cuda: Any = torch.cuda
        tried = 20_000_000  # cycles: some 10 ms
        first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        first.record()
        cuda._sleep(tried)
        last.record()
        last.synchronize()
        return functools.partial(cuda._sleep, int(tried * seconds * 1000 / first.elapsed_time(last)))

    def wait_asleep(self) -> None:
        """Wait until the current stream has done its work, and need no processor for it, as `sync` does."""
        if self.is_gpu:
            event: Any = torch.cuda.current_stream(self.device).record_event()
            while not event.query():
                time.sleep(0.0002)

    @contextlib.contextmanager
    def watched(self) -> Iterator[Held]:
        """What a GPU and its host hold while the block runs, beside what they held before."""
        cuda: Any = torch.cuda
        gc.collect()
        self.sync()
        cuda.empty_cache()
        before = cuda.memory_allocated(self.device)
        cuda.reset_peak_memory_stats(self.device)
        pinned = _pinned_bytes()
        held = Held(lambda: _pinned_bytes() - pinned)
        yield held
        held.device = cuda.max_memory_allocated(self.device) - before

    def about(self) -> dict[str, Any]:
        """Name, driver and the like."""
        found: dict[str, Any] = {"device": "the CPU, in the place of a GPU", "cpus": os.cpu_count()}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            found["device"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
            found["cuda"] = torch.version.cuda
            found["driver"] = _driver(self.device.index or 0)
        return found


class Held:
    """The most bytes that were held.

    Args:
        pinned: how many torch has pinned.

    Attributes:
        device: of the device.
        pinned: of pinned host memory: torch's, and the segments of a pool.
    """

    def __init__(self, pinned: Callable[[], int]) -> None:
        self._pinned = pinned
        self.device = self.pinned = 0

    def look(self, feed: Feed) -> None:
        """Note what is pinned now."""
        pool = getattr(feed.loader, "pool", None)
        segments = pool._transport.arena.segments if isinstance(pool, ProcessPool) else ()
        self.pinned = max(self.pinned, self._pinned() + sum(one.nbytes for one in segments if one.unregister))


def _pinned_bytes() -> int:
    """What torch has handed out of pinned host memory, and not got back. A torch that does not tell: 0."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))


def _driver(index: int) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={index}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        return shown.splitlines()[0] if shown else "unknown"
    return "unknown"
