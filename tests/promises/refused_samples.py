"""Datasets for programs that may not do everything. Torch-free, so that a spawned worker starts fast."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np


class Filled:
    """Sample i is 16 KB of the number i: batches of it lie in shared memory."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return np.full(4096, index)


class StartsAndDies:
    """In one sample, once: starts a process that lives on, and is killed."""

    def __init__(self, how: str, folder: Path) -> None:
        self.how = how
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        started = self.folder / "started"
        if index == 20 and not started.exists():
            if self.how == "fork":
                pid = os.fork()
                if pid == 0:
                    time.sleep(60)
                    os._exit(0)
                started.write_text(str(pid))
            else:  # a program, which inherits what is inheritable
                os.system(f"sleep 60 & echo $! > {started}")
            os.kill(os.getpid(), signal.SIGKILL)
        return index
