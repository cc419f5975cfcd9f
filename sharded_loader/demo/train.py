"""The training run of ``sharded-loader demo``: handwritten digits, a small network, all devices from one process.

    load_digits_split -> train set  --ShardedDataLoader-->  shards[i] on devices[i]  --`forward`-->  one model
                      -> held-out set  ------------------------------------------>  `accuracy_on`

`train` takes any loader and model and returns the losses. `train_and_test` builds both from `Options`, owns the
loader and closes it, and returns a `Report`. With a `CheckpointFile` both go on from where the file says. No output
here, and no terminal: that is the part of `sharded_loader.cli.demo`.

Everything random follows from the seed: the weights (``torch.manual_seed``), the order (the loader's ``seed``) and
the shift of each image (`sample_rng`, keyed by seed, epoch and index). So the losses are the same to the last bit
whichever pool reads, with any number of workers. Two functions disturb the run to show this:

    stop_and_resume(options) -- starts --> a process that trains, and saves after half of the steps
                             -- the file is there: SIGKILL, while it goes on training (on Windows TerminateProcess)
                             -- starts --> another one, which goes on from the file
                             <-- its report, through a pipe --
    train_and_kill(options)  trains; after a step, now and then: a worker of its pool is killed

The processes are spawned: they share nothing with this one, as after the restart of a machine. No worker is killed
without a step since the last one, so that training comes to its end even where workers start more slowly than they are
killed. The loader is not warned: it finds out as it would about the kernel's out-of-memory killer.

What can go wrong: scikit-learn is not installed (ImportError); what the loader, the model or a device raises. A process
fails, or ends before it is killed. That is a RuntimeError; the process has said why.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import multiprocess
import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from sharded_loader import ArrayDataset, Dataset, ShardedDataLoader, sample_rng
from sharded_loader.devices.names import accelerators, find_device
from sharded_loader.engine.pool import Pool
from sharded_loader.loader.stats import LoaderStats
from sharded_loader.pools.process.pool import ProcessPool

BATCH_SIZE = 64
HELD_OUT = 0.2
SPLIT_SEED = 0
"""The same scans are held out for every ``--seed``, so that accuracies can be compared."""

EVERY = 0.1
"""Seconds between two kills, on average."""

RESTARTS = 1000
"""By default a batch is given up when it has killed three workers, which kills at random do now and then."""

# On Windows os.kill with any signal but two is TerminateProcess.
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)


@dataclass(frozen=True)
class Options:
    """What to train with.

    Attributes:
        devices: one shard of each batch goes to each; one may stand twice.
        pool: ``"inline"``, ``"thread"``, ``"process"`` or ``"ray"``: who reads the samples.
        workers: how many threads or processes; 0 with ``"inline"``.
        epochs: passes over the training set.
        seed: of weights, order and shifts.
    """

    devices: tuple[torch.device, ...]
    pool: str = "process"
    workers: int = 2
    epochs: int = 20
    seed: int = 0


@dataclass(frozen=True)
class Report:
    """What came of it.

    Attributes:
        accuracy: share of the held-out scans that were recognised, from 0 to 1.
        held_out: how many they are.
        losses: mean training loss of each epoch.
        stats: of the loader that read the training set.
        first: of the first epoch alone, in which the workers start.
    """

    accuracy: float
    held_out: int
    losses: tuple[float, ...]
    stats: LoaderStats
    first: LoaderStats

    @property
    def waiting_share(self) -> float:
        """Share of the time that the loop waited for data, from 0 to 1. The first epoch counts only if it is alone."""
        seconds = self.stats.seconds - self.first.seconds
        if seconds <= 0:
            return self.stats.waiting_share
        return (self.stats.waiting_seconds - self.first.waiting_seconds) / seconds


@dataclass(frozen=True)
class CheckpointFile:
    """A file from which a training run goes on, as any program would keep one.

    Attributes:
        path: begun from if it is there.
        save_at: number of the step after which it is written, from 1; None: never.
    """

    path: Path
    save_at: int | None = None

    def save(self, state: dict[str, Any]) -> None:
        """Write the file whole or not at all."""
        partial = self.path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.path)


def find_devices(names: str) -> tuple[torch.device, ...]:
    """The devices of a list such as ``cuda:0,cuda:1``.

    Args:
        names: separated by commas; or ``auto``: all accelerators that this process sees. Without any these are the CPU
            twice, so that there are two shards.

    Raises:
        ValueError: a device is not there.

    Example:
        >>> find_devices("cpu, cpu")
        (device(type='cpu'), device(type='cpu'))
    """
    if names.strip() == "auto":
        return tuple(accelerators()) or (torch.device("cpu"), torch.device("cpu"))
    return tuple(find_device(name.strip()) for name in names.split(","))


def shift(image: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Move an image by up to one pixel, zeros moving in; by how much depends on (seed, epoch, index) alone.

    Args:
        image: float32, shape (1, 8, 8).

    Returns:
        The same shape and dtype.

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
        The training set, whose images are shifted at random, and the held-out set. Samples are (float32[1, 8, 8] in
        0..1, int64 label).

    Raises:
        ImportError: scikit-learn is not installed.

    Example:
        >>> train_set, held_out = load_digits_split()
        >>> len(train_set), len(held_out)
        (1438, 359)
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images[:, None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int64)
    train_set, held_out = ArrayDataset(images, labels).split([1 - HELD_OUT, HELD_OUT], seed=SPLIT_SEED)
    return train_set.transform_first(shift), held_out


def make_model(seed: int) -> nn.Module:
    """A convolutional network of 58,000 parameters with weights drawn by ``seed``.

    Example:
        >>> make_model(seed=0)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 2 * 2, 10),
        )


def forward(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Run the model on the device of the images. Gradients flow back to the model's own weights.

    Example:
        >>> forward(make_model(seed=0), torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    weights = {name: weight.to(images.device) for name, weight in model.named_parameters()}
    logits: torch.Tensor = torch.func.functional_call(model, weights, (images,))
    return logits


def train(
    loader: ShardedDataLoader,
    model: nn.Module,
    epochs: int,
    on_batch: Callable[[int, float], object] = lambda epoch, loss: None,
    checkpoint: CheckpointFile | None = None,
) -> tuple[float, ...]:
    """Train the model on the batches of ``loader``.

    Args:
        loader: its batches are lists of shards, [images, labels] each, on any devices.
        model: on the device of the first shard.
        epochs: number of the epoch to stop before. A fresh loader is passed over this many times.
        on_batch: called after each step with the epoch and the loss of the batch.
        checkpoint: where to go on from and to save to.

    Returns:
        The mean loss of each epoch.

    Raises:
        Exception: what loader, model or ``on_batch`` raise.

    Example:
        >>> dataset = ArrayDataset(np.zeros((4, 1, 8, 8), np.float32), np.zeros(4, np.int64))
        >>> with ShardedDataLoader(dataset, 4, devices=["cpu", "cpu"]) as loader:
        ...     losses = train(loader, make_model(seed=0), epochs=2)
        >>> losses[1] < losses[0]
        True
    """
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.01, total_steps=max(1, epochs * len(loader)))
    learning: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    sums = torch.zeros(epochs, 2, dtype=torch.float64)  # of each epoch: loss times samples, and samples
    if checkpoint is not None and checkpoint.path.exists():
        state = torch.load(checkpoint.path, weights_only=True)
        sums = state["sums"]
        for name, part in learning.items():
            part.load_state_dict(state[name])
    model.train()
    for epoch in range(loader.epoch, epochs):
        for shards in loader:
            sizes = [len(labels) for _, labels in shards]
            losses = [cross_entropy(forward(model, images), labels, reduction="sum") for images, labels in shards]
            loss = loader.gather(losses).sum() / sum(sizes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            sums[epoch, 0] += loss.item() * sum(sizes)
            sums[epoch, 1] += sum(sizes)
            on_batch(epoch, loss.item())
            if checkpoint is not None and checkpoint.save_at == schedule.last_epoch:  # counts the steps
                checkpoint.save({"sums": sums, **{name: part.state_dict() for name, part in learning.items()}})
    return tuple((sums[:, 0] / sums[:, 1].clamp(min=1)).tolist())


def accuracy_on(dataset: Any, model: nn.Module, devices: Sequence[torch.device]) -> float:
    """Share of the samples of ``dataset`` that the model recognises, from 0 to 1.

    Args:
        dataset: samples (image, label).
        model: the trained model, on the first of the devices.
        devices: each one gets a shard of each batch.

    Example:
        >>> dataset = ArrayDataset(np.zeros((3, 1, 8, 8), np.float32), [7, 7, 1])
        >>> accuracy_on(dataset, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), [torch.device("cpu")]) <= 2 / 3
        True
    """
    model.eval()
    right = 0
    with torch.no_grad(), ShardedDataLoader(dataset, 4 * BATCH_SIZE, devices=devices) as loader:
        for shards in loader:
            right += sum(int((forward(model, images).argmax(dim=1) == labels).sum()) for images, labels in shards)
    return right / len(dataset)


def train_and_test(
    options: Options,
    on_batch: Callable[[int, float], object] = lambda epoch, loss: None,
    checkpoint: CheckpointFile | None = None,
    pool: Pool | None = None,
) -> Report:
    """Train on the digits and test on those held out.

    Args:
        options: devices, pool and so on.
        on_batch: called after each step with the epoch and the loss of the batch.
        checkpoint: where to go on from and to save to.
        pool: reads in the place of the one that ``options`` name.

    Raises:
        ImportError: scikit-learn is not installed.
        Exception: what the loader, a device or ``on_batch`` raise. The loader is closed.

    Example:
        >>> report = train_and_test(Options((torch.device("cpu"),) * 2, pool="inline", workers=0, epochs=1))
        >>> report.held_out, report.stats.samples
        (359, 1438)
    """
    train_set, held_out = load_digits_split()
    with (
        contextlib.ExitStack() as steady
    ):  # sums in one order everywhere, so that a seed gives the same accuracy every time
        # So small a network gains nothing from more threads (3.5 s either way on two free cores) and loses much where
        # another program holds a core: 33 s with two, because they wait for each other in every operation.
        steady.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        steady.enter_context(
            torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=True)
        )
        model = make_model(options.seed).to(options.devices[0])
        reads = {"pool": pool} if pool else {"num_workers": options.workers, "pool": options.pool}
        with ShardedDataLoader(
            train_set, BATCH_SIZE, shuffle=True, devices=options.devices, seed=options.seed, **reads
        ) as loader:
            losses = train(loader, model, options.epochs, on_batch, checkpoint)
            stats, first = loader.stats(), loader.stats(0)
        return Report(accuracy_on(held_out, model, options.devices), len(held_out), losses, stats, first)


# -- disturbed ---------------------------------------------------------------------------------------------------------


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
