"""``sharded-loader demo --kill``: workers are killed at random while a training run reads with them.

    train_and_kill(options) -- demo.run --> trains; each step --stepped--> a thread that kills a worker of the
                                                                           loader's pool and waits a moment

No kill without a step since the last one, so that training comes to its end even where workers start more slowly
than they are killed. Nothing is told to the loader: it finds out as it would about the kernel's out-of-memory killer.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace

from sharded_loader import demo
from sharded_loader.loader import ShardedDataLoader
from sharded_loader.pools.processes import ProcessPool

EVERY = 0.1
"""Seconds between two kills, on average."""

RESTARTS = 1000
"""By default a batch is given up when it has killed three workers, which kills at random do now and then."""

# On Windows os.kill with any signal but two is TerminateProcess.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def train_and_kill(options: demo.Options) -> tuple[demo.Report, int]:
    """Train, while workers are killed.

    Args:
        options: of the training; ``pool`` is ``"process"``.

    Returns:
        What came of it, and how many workers were killed.

    Raises:
        ValueError: the pool has no worker processes.
        Exception: what the training raises.
    """
    if options.pool != "process":
        raise ValueError(f"pool {options.pool!r} has no worker processes to kill: choose 'process'")
    stepped = threading.Event()
    killed: list[int] = []

    @contextlib.contextmanager
    def killing(loader: ShardedDataLoader) -> Iterator[None]:
        over = threading.Event()
        killer = threading.Thread(target=_kill, args=(loader.pool, stepped, over, killed), name="sharded_loader-killer")
        killer.start()
        try:
            yield
        finally:
            over.set()
            stepped.set()
            killer.join()

    report = demo.run(replace(options, restarts=RESTARTS), lambda epoch, loss: stepped.set(), beside=killing)
    return report, len(killed)


def _kill(pool: ProcessPool, stepped: threading.Event, over: threading.Event, killed: list[int]) -> None:
    while stepped.wait() and not over.is_set():
        stepped.clear()
        pid = random.choice(pool.pids)
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just been killed
            os.kill(pid, _KILL)
            killed.append(pid)
        over.wait(random.uniform(0, 2 * EVERY))
