"""Training runs that are disturbed: stopped and resumed, or with workers that are killed.

    stop_and_resume(options) -- starts --> a process that trains, and saves after half of the steps
                             -- the file is there: SIGKILL, while it goes on training (on Windows TerminateProcess)
                             -- starts --> another one, which goes on from the file
                             <-- its report, through a pipe --
    train_and_kill(options)  trains; after a step, now and then: a worker of its pool is killed

The processes are spawned: they share nothing with this one, as after the restart of a machine. No worker is killed
without a step since the last one, so that training comes to its end even where workers start more slowly than they are
killed. The loader is not warned: it finds out as it would about the kernel's out-of-memory killer.

What can go wrong: a process fails, or ends before it is killed. That is a RuntimeError; the process has said why.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multiprocess

from sharded_loader.demo.train import BATCH_SIZE, CheckpointFile, Options, Report, load_digits_split, train_and_test
from sharded_loader.pools.process.pool import ProcessPool

EVERY = 0.1
"""Seconds between two kills, on average."""

RESTARTS = 1000
"""By default a batch is given up when it has killed three workers, which kills at random do now and then."""

# On Windows os.kill with any signal but two is TerminateProcess.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


def stop_and_resume(options: Options, on_wait: Callable[[str], object] = lambda what: None) -> tuple[Report, str]:
    """Train, be killed in the middle of an epoch, train on.

    Args:
        options: of the training.
        on_wait: called now and then with what the runs do.

    Returns:
        What came of the run that went on, and a text: when the other one was killed.

    Raises:
        RuntimeError: a run failed, or ended too soon to be killed.
    """
    steps_per_epoch = -(-len(load_digits_split()[0]) // BATCH_SIZE)
    step = options.epochs // 2 * steps_per_epoch + steps_per_epoch // 2
    with tempfile.TemporaryDirectory(prefix="sharded_loader-") as folder:
        path = Path(folder) / "checkpoint.pt"
        with _training(options, CheckpointFile(path, step)) as (first, _):
            while first.is_alive() and not path.exists():
                first.join(0.02)
                on_wait("training until it is killed")
        if not path.exists() or first.exitcode == 0:
            raise RuntimeError(f"the training run ended by itself, exit code {first.exitcode}; see above")
        with _training(options, CheckpointFile(path)) as (second, reports):
            try:
                while not reports.poll(0.1):
                    on_wait("training on from the checkpoint")
                report: Report = reports.recv()
            except (EOFError, BrokenPipeError):  # Windows says the second
                second.join()
                raise RuntimeError(f"the resumed training run failed, exit code {second.exitcode}; see above") from None
    return report, f"saved after step {step}, killed in mid-epoch, resumed in a new process"


@contextlib.contextmanager
def _training(options: Options, checkpoint: CheckpointFile) -> Iterator[tuple[Any, Any]]:
    """A process that trains, killed at the end of the block, and the pipe that its report comes through."""
    spawn = multiprocess.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    process = spawn.Process(target=_train, args=(options, checkpoint, sender))
    with receiver:
        try:
            with sender:
                process.start()
            yield process, receiver
        finally:
            if process.pid is not None:
                process.kill()
                process.join()


def _train(options: Options, checkpoint: CheckpointFile, sender: Any) -> None:
    with contextlib.suppress(KeyboardInterrupt):  # the parent says so
        sender.send(train_and_test(options, checkpoint=checkpoint))


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
