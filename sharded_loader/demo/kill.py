"""``sharded-loader demo --kill``: workers are killed at random while a training run reads with them.

    train_and_kill(options) -- train_and_test --> trains; after a step, now and then: a worker of its pool is killed

No kill without a step since the last one, so that training comes to its end even where workers start more slowly
than they are killed. Nothing is told to the loader: it finds out as it would about the kernel's out-of-memory killer.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable

from sharded_loader.demo.train import Options, Report, train_and_test
from sharded_loader.pools.process.pool import ProcessPool

EVERY = 0.1
"""Seconds between two kills, on average."""

RESTARTS = 1000
"""By default a batch is given up when it has killed three workers, which kills at random do now and then."""

# On Windows os.kill with any signal but two is TerminateProcess.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def train_and_kill(
    options: Options, on_batch: Callable[[int, float], object] = lambda epoch, loss: None
) -> tuple[Report, str]:
    """Train, while workers are killed.

    Args:
        options: of the training. The pool is one of processes, whatever they say.
        on_batch: called after each step with the epoch and the loss of the batch.

    Returns:
        What came of it, and a text: how many workers were killed.

    Raises:
        Exception: what the training raises.
    """
    pool = ProcessPool(options.workers, restarts=RESTARTS)
    killed = 0
    due = time.monotonic()

    def kill_one(epoch: int, loss: float) -> None:
        nonlocal killed, due
        on_batch(epoch, loss)
        if time.monotonic() < due:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just been killed
            os.kill(random.choice(pool.pids), _KILL)
            killed += 1
        due = time.monotonic() + random.uniform(0, 2 * EVERY)

    report = train_and_test(options, kill_one, pool=pool)
    return report, f"{killed} killed at random while it trained"
