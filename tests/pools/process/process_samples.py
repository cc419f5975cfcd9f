"""What tests of worker processes share. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from sharded_loader import ProcessPool
from sharded_loader.pools.process.transport import ProcessTransport

ALL = list(range(40))


def forked(num_workers: int = 2, **more: Any) -> ProcessPool:
    return ProcessPool(num_workers, start_method="fork", **more)


def transport_of(pool: Any) -> ProcessTransport:
    found: ProcessTransport = pool._transport
    return found


def zygote_process(pool: ProcessPool) -> Any:
    """The process that workers are forked from; None before there is one."""
    zygote = transport_of(pool).zygote
    return None if zygote is None else zygote._process


def kill_a_worker(pool: ProcessPool) -> None:
    """Kill the first worker, and wait until the kernel has got round to it."""
    worker = pool.workers[0]
    worker.process.kill()
    worker.wait(60)


def numbers(batches: Any) -> list[int]:
    """The first number of each sample."""
    return [int(index) for batch in batches for index in np.asarray(batch).reshape(len(batch), -1)[:, 0]]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
