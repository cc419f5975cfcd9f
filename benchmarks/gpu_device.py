"""The device that is measured: how to wait for it and to time its work. The CPU stands in for one to try the programs.

    Device.sync()            all work that it was given is done
    Device.copies(nbytes)    -> a function that times so many bare copies to it, in seconds
    Device.about()           -> what it is called, its driver

On the CPU nothing is asynchronous and nothing is learned about a GPU.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import torch


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

    def copy_calls(self, host: torch.Tensor) -> Callable[[], None]:
        """What calls all of torch that a copy on a side stream takes, once."""
        if not self.is_gpu:
            return lambda: None
        cuda: Any = torch.cuda
        side, device = cuda.Stream(self.device), self.device

        def run() -> None:
            home = cuda.current_stream(device)
            target = torch.empty_like(host, device=device)
            ready = cuda.Event()
            ready.record(home)
            side.wait_event(ready)
            with cuda.stream(side):
                target.copy_(host, non_blocking=True)
            done = cuda.Event()
            done.record(side)
            home.wait_event(done)

        return run

    def about(self) -> dict[str, Any]:
        """Name, driver and the like."""
        found: dict[str, Any] = {"device": "the CPU, in the place of a GPU", "cpus": os.cpu_count()}
        if self.is_gpu:
            properties = torch.cuda.get_device_properties(self.device)
            found["device"] = f"{properties.name}, {properties.total_memory / 1e9:.0f} GB"
            found["cuda"] = torch.version.cuda
            found["driver"] = _driver(self.device.index or 0)
        return found


def _driver(index: int) -> str:
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", f"--id={index}"]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
        return shown.splitlines()[0] if shown else "unknown"
    return "unknown"
