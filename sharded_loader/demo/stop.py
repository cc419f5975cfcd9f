"""``sharded-loader demo --stop-resume``: the training run is killed in mid-epoch and goes on from its checkpoint.

    stop_and_resume(options) -- starts --> a process that trains, and saves after half of the steps
                             -- the file is there: SIGKILL, while it goes on training (on Windows TerminateProcess)
                             -- starts --> another one, which goes on from the file
                             <-- its report, through a pipe --

The processes are spawned: they share nothing with this one, as after the restart of a machine.

What can go wrong: a process fails, or ends before it is killed. That is a RuntimeError; the process has said why.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multiprocess

from sharded_loader.demo.train import BATCH_SIZE, CheckpointFile, Options, Report, load_digits_split, train_and_test


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
