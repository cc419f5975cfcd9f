"""The training run of ``sharded-loader demo``: handwritten digits, a small network, all devices from one process.

    load_digits_split -> train set  --ShardedDataLoader-->  shards[i] on devices[i]  --`forward`-->  one model
                      -> held-out set  ----------------------------------------------------------->  accuracy

`train_and_test` returns a `Report`. With a checkpoint it goes on from there. No output here, and no terminal: that is
the part of `sharded_loader.cli.runs`.

Everything random follows from the seed: the weights (``torch.manual_seed``), the order (the loader's ``seed``) and the
shift of each image (`sample_rng`, keyed by seed, epoch and index). So the losses are the same to the last bit, in any
pool. Two functions disturb the run to show this:

    stop_and_resume  starts a process that trains, and saves after half of the steps; kills it; goes on from the file
    train_and_kill   trains; after a step, now and then: a worker of its pool is killed

The process is spawned: it shares nothing with this one, as after the restart of a machine. No worker is killed
without a step since the last one, so that training comes to its end even where workers start more slowly than they are
killed. The loader is not warned: it finds out as it would about the kernel's out-of-memory killer.

What can go wrong: scikit-learn is not installed (ImportError); what the loader, the model or a device raises. A process
fails, or ends before it is killed. That is a RuntimeError; the process has said why.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import threadpool_limits
from torch import nn
from torch.nn.functional import cross_entropy

from sharded_loader import ArrayDataset, Dataset, ProcessPool, ShardedDataLoader, sample_rng
from sharded_loader.extend import Pool
from sharded_loader.extend.engine import accelerators

BATCH_SIZE, WORKERS = 64, 2

OnBatch = Callable[[int, str], object]
"""Called after each step with the epoch, and its loss in words."""


class Report(NamedTuple):
    """What came of it.

    Attributes:
        accuracy: share of the held-out scans that were recognised, from 0 to 1.
        losses: mean training loss of each epoch.
        samples_per_second: of the loader that read the training set.
        waiting_share: of the last epoch, that the loop waited for data.
    """

    accuracy: float
    losses: list[float]
    samples_per_second: float
    waiting_share: float


def devices() -> list[torch.device]:
    """All accelerators that this process sees. Without any: the CPU twice, so that there are two shards."""
    return list(accelerators()) or [torch.device("cpu")] * 2


def shift(image: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Move an image by up to one pixel, zeros moving in; by how much depends on (seed, epoch, index) alone.

    Example:
        >>> shift(np.ones((1, 8, 8), np.float32)).shape
        (1, 8, 8)
    """
    down, right = sample_rng().integers(0, 3, size=2)
    padded = np.zeros((1, 10, 10), np.float32)
    padded[:, 1:9, 1:9] = image
    return padded[:, down : down + 8, right : right + 8]


def load_digits_split() -> tuple[Dataset, Dataset]:
    """scikit-learn's digits, 1,797 scans, in two parts.

    Returns:
        The training set, whose images are shifted at random, and the held-out set, the same for every seed. Samples are
        (float32[1, 8, 8] in 0..1, int64 label).

    Example:
        >>> train_set, held_out = load_digits_split()
        >>> len(train_set), len(held_out)
        (1438, 359)
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    train_set, held_out = ArrayDataset(images, digits.target.astype(np.int64)).split([0.8, 0.2], seed=0)
    return train_set.transform_first(shift), held_out


def make_model(seed: int) -> nn.Module:
    """A convolutional network of 58,000 parameters with weights drawn by ``seed``.

    Example:
        >>> make_model(seed=0)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = ((1, 32, 1), (32, 64, 2), (64, 64, 2))
        layers = [(nn.Conv2d(given, made, 3, stride, padding=1), nn.ReLU()) for given, made, stride in sizes]
        return nn.Sequential(*(one for pair in layers for one in pair), nn.Flatten(), nn.Linear(64 * 2 * 2, 10))


def forward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Run the model on the device of the images. Gradients flow back to the model's own weights.

    Example:
        >>> forward(make_model(seed=0), torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    weights = {name: weight.to(images.device) for name, weight in model.named_parameters()}
    logits: torch.Tensor = torch.func.functional_call(model, weights, (images,))
    return logits


def train_and_test(
    epochs: int,
    seed: int = 0,
    on_batch: OnBatch = lambda epoch, text: None,
    pool: Pool | None = None,
    checkpoint: Path | None = None,
    save_at: int | None = None,
) -> Report:
    """Train on the digits and test on those held out.

    Args:
        epochs: passes over the training set.
        seed: of weights, order and shifts.
        on_batch: called after each step.
        pool: reads the samples; None: one of two processes.
        checkpoint: gone on from if it is there.
        save_at: number of the step after which it is written, from 1; None: never.

    Raises:
        Exception: what the loader, a device or ``on_batch`` raise. The loader is closed.
    """
    (train_set, held_out), model = load_digits_split(), make_model(seed).to(devices()[0])
    loader = ShardedDataLoader(
        train_set, BATCH_SIZE, shuffle=True, devices=devices(), seed=seed, pool=pool or ProcessPool(WORKERS)
    )
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=epochs * len(loader))
    sums = torch.zeros(epochs, 2, dtype=torch.float64)  # of each epoch: loss times samples, and samples
    learning: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    if checkpoint is not None and checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        sums = state["sums"]
        for name, part in learning.items():
            part.load_state_dict(state[name])
    # Sums in one order everywhere, so that a seed gives the same accuracy every time. So small a network gains nothing
    # from more threads, and loses much where another program holds a core: 33 s with two, in place of 3.5 s.
    cudnn = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True)
    tested = ShardedDataLoader(held_out, 4 * BATCH_SIZE, devices=devices())
    with threadpool_limits(1), cudnn, loader, tested:
        for epoch in range(loader.epoch, epochs):
            for shards in loader:
                losses = [cross_entropy(forward(model, images), labels, reduction="sum") for images, labels in shards]
                total, count = loader.gather(losses).sum(), sum(len(labels) for _, labels in shards)
                optimizer.zero_grad()
                (total / count).backward()
                optimizer.step()
                schedule.step()
                sums[epoch] += torch.tensor([total.item(), count])
                on_batch(epoch, f"loss {total.item() / count:.4f}")
                if checkpoint is not None and save_at == schedule.last_epoch:  # counts the steps
                    partial = checkpoint.with_suffix(".partial")
                    torch.save({"sums": sums, **{name: part.state_dict() for name, part in learning.items()}}, partial)
                    partial.replace(checkpoint)
        with torch.no_grad():
            right = sum(int((forward(model, x).argmax(1) == y).sum()) for shards in tested for x, y in shards)
    mean, last = (sums[:, 0] / sums[:, 1]).tolist(), loader.stats(epochs - 1)
    return Report(right / len(held_out), mean, loader.stats().samples_per_second, last.waiting_share)


# -- disturbed ---------------------------------------------------------------------------------------------------------


def stop_and_resume(epochs: int, seed: int, on_batch: OnBatch) -> tuple[Report, str]:
    """Train, be killed in the middle of an epoch, train on.

    Args:
        epochs, seed: of the training.
        on_batch: called now and then with 0, and with what the runs do.

    Returns:
        What came of the run that went on, and a text: when the other one was killed.

    Raises:
        RuntimeError: a run failed, or ended too soon to be killed.
    """
    steps_per_epoch = -(-len(load_digits_split()[0]) // BATCH_SIZE)
    step = epochs // 2 * steps_per_epoch + steps_per_epoch // 2
    with tempfile.TemporaryDirectory(prefix="sharded_loader-") as folder:
        path = Path(folder) / "checkpoint.pt"
        given = {"checkpoint": path, "save_at": step}
        first = multiprocessing.get_context("spawn").Process(target=train_and_test, args=(epochs, seed), kwargs=given)
        first.start()
        try:
            while first.is_alive() and not path.exists():
                first.join(0.02)
                on_batch(0, "training until it is killed")
        finally:
            first.kill()
            first.join()
        if not path.exists() or first.exitcode == 0:
            raise RuntimeError(f"the training run ended by itself, exit code {first.exitcode}; see above")
        report = train_and_test(epochs, seed, on_batch, checkpoint=path)
        return report, f"saved after step {step}, killed in mid-epoch, resumed in another process"


def train_and_kill(epochs: int, seed: int, on_batch: OnBatch) -> tuple[Report, str]:
    """Train, while workers are killed.

    Returns:
        What came of it, and a text: how many workers were killed.
    """
    # By default a batch is given up when it has killed three workers, which kills at random do now and then.
    pool, killed, due = ProcessPool(WORKERS, restarts=1000), 0, time.monotonic()

    def kill_one(epoch: int, text: str) -> None:
        nonlocal killed, due
        on_batch(epoch, text)
        if time.monotonic() >= due:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just been killed
                # On Windows os.kill with any signal but two is TerminateProcess.
                os.kill(random.choice(pool.pids), getattr(signal, "SIGKILL", signal.SIGTERM))
                killed += 1
            due = time.monotonic() + random.uniform(0, 0.2)  # seconds

    return train_and_test(epochs, seed, kill_one, pool), f"{killed} killed at random while it trained"
