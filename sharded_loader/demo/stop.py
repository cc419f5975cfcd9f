"""``sharded-loader demo --stop-resume``: the training run is killed in mid-epoch and goes on from its checkpoint.

    stop_and_resume(options) -- starts --> a process that trains, and saves after half of the steps
                             <-- "saved" --
                             -- SIGKILL, while it goes on training (on Windows TerminateProcess)
                             -- starts --> another one, which goes on from the checkpoint
                             <-- its report --

The process is this module run with Python. Its last line on stdout is for its parent; it has no other output.

What can go wrong: the process fails, or is through before it is killed; RuntimeError with what it said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from sharded_loader import demo

_SAVED = "saved"


def stop_and_resume(options: demo.Options) -> tuple[float, tuple[float, ...], int]:
    """Train, be killed in the middle of an epoch, train on.

    Args:
        options: of the training.

    Returns:
        Accuracy and losses of the run that went on, and after how many steps the other one had saved.

    Raises:
        RuntimeError: a run failed, or ended too soon to be killed.
    """
    with tempfile.TemporaryDirectory(prefix="sharded_loader-") as folder:
        path = Path(folder) / "checkpoint.pt"
        steps_per_epoch = -(-len(demo.load_digits_split()[0]) // demo.BATCH_SIZE)
        step = options.epochs // 2 * steps_per_epoch + steps_per_epoch // 2
        with _start(options, path, step) as first, first.stdout as lines:  # type: ignore[union-attr]
            try:
                said = lines.readline()
            finally:
                first.kill()
        if said.strip() != _SAVED or first.returncode == 0:
            raise RuntimeError(f"the training run ended by itself, exit code {first.returncode}, saying {said!r}")
        with _start(options, path, None) as second, second.stdout as lines:  # type: ignore[union-attr]
            try:
                said = lines.read()
            except BaseException:
                second.kill()
                raise
        if second.returncode != 0:
            raise RuntimeError(f"the resumed training run failed, exit code {second.returncode}; see above")
        report = json.loads(said.splitlines()[-1])
        return report["accuracy"], tuple(report["losses"]), step


def _start(options: demo.Options, path: Path, save_at: int | None) -> subprocess.Popen[str]:
    told = {**asdict(options), "devices": list(map(str, options.devices)), "path": str(path), "save_at": save_at}
    command = [sys.executable, "-m", "sharded_loader.demo_stop", json.dumps(told)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")


def main(argument: str, out: IO[str] = sys.stdout) -> None:
    """The process: train as ``argument``, a JSON text, says; tell the parent."""
    told: dict[str, Any] = json.loads(argument)
    path, save_at = Path(told.pop("path")), told.pop("save_at")
    options = demo.Options(**{**told, "devices": tuple(map(torch.device, told["devices"]))})
    checkpoint = demo.Checkpoint(path, save_at, lambda: print(_SAVED, file=out, flush=True))
    report = demo.run(options, checkpoint=checkpoint)
    print(json.dumps({"accuracy": report.accuracy, "losses": report.losses}), file=out, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)  # the parent says so
