"""Single batches and samples, looked up or read in this process, without an epoch.

Reading starts no worker and changes no epoch. A dataset with ``set_epoch`` is set to the epoch, and restored
afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from sharded_loader.data.datasets import mixture_of
from sharded_loader.data.inspection import DataIdentity, digest_of_read
from sharded_loader.engine.messages import NOTHING, Job, Task
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.engine.pipeline import Entry
from sharded_loader.engine.reader import Reader
from sharded_loader.engine.split import plain_indices
from sharded_loader.loader.epochs import Epochs
from sharded_loader.pools.task_reader import reader_for, seeded_as_worker
from sharded_loader.randomness.rng import seeded_globals
from sharded_loader.sampling.epoch import MapEpoch
from sharded_loader.sampling.order import checksums, look_up
from sharded_loader.streams.order import StreamOrder


def shown_indices(dataset: Any, indices: Any, epoch: int) -> list[Any]:
    """Return the indices of a task as users see them; those of a mixture as (source, index)."""
    mixture = mixture_of(dataset)
    found = indices.tolist() if isinstance(indices, np.ndarray) else list(indices)
    return found if mixture is None else mixture.pairs(found, epoch)


@contextmanager
def in_epoch(
    set_epoch: Callable[[int], object] | None, epoch: int, back: Callable[[], int], reading: Iterable[int] = ()
) -> Iterator[None]:
    """Set a dataset to ``epoch`` inside the context, and to the epoch that ``back`` returns afterwards.

    ``set_epoch`` is None for a dataset without epochs. A RuntimeError if threads are ``reading`` in another epoch.
    """
    if set_epoch is None:
        yield
        return
    for other in reading:
        if other != epoch:
            text = f"cannot read in epoch {epoch} while threads read epoch {other}: the dataset, which has set_epoch"
            raise RuntimeError(f"{text} and is shared by them, can be in one epoch only; finish that epoch first")
    set_epoch(epoch)
    try:
        yield
    finally:
        set_epoch(back())


class KnownSteps(Protocol):
    """Loader whose steps are known and whose samples can be read here: for `fingerprint` and `check`.

    Its methods raise a TypeError for iterable data, and a ValueError if the order is unknown.
    """

    dataset: Any
    known: DataIdentity

    def job_now(self) -> Job:
        """Return the configuration of the readers."""

    def in_epoch(self, epoch: int) -> AbstractContextManager[None]:
        """Set the dataset to ``epoch`` inside the context, and to the loader's epoch afterwards."""

    def samples_of(self, epoch: int, step: int) -> list[Any]:
        """Return the indices of a step as the first rank reads them: the same on every rank."""

    def checksums(self, epoch: int) -> list[str]:
        """Return `step_checksum`, or `LEFT_OUT`, for each step of an epoch."""

    def length(self, epoch: int) -> int:
        """Return the number of steps in an epoch, including those left out; a TypeError if unknown."""

    def state_of(self, epoch: int) -> dict[str, Any]:
        """Return a state (see `sampling.state`) at the beginning of an epoch."""

    def some_indices(self, epoch: int, steps: Iterable[int], each: int) -> list[Any]:
        """Return the first ``each`` indices of some steps, as far as the epoch has them."""
        found: dict[Any, None] = {}
        for step in steps:
            with suppress(IndexError):  # the epoch may have no step
                found |= dict.fromkeys(self.samples_of(epoch, step)[:each])
        return list(found)

    def sample(self, index: Hashable, epoch: int) -> Any:
        """Return one sample, read here as in ``epoch``."""
        with self.in_epoch(epoch):
            return reader_for(self.job_now(), readers=0).read_sample(index, epoch)

    def digest(self, index: object, epoch: int, seed: int | None = None, key: int = 1) -> str:
        """Return the digest of one sample, read here, or its error as text; ``key`` seeds the global generators."""
        job = self.job_now() if seed is None else replace(self.job_now(), seed=seed)
        with self.in_epoch(epoch), seeded_globals(key):
            return digest_of_read(lambda: reader_for(job, readers=0).read_sample(index, epoch))


class LookUp(KnownSteps):
    def __init__(self, epochs: Epochs) -> None:
        self._epochs, self.order, self._placement = epochs, epochs.order, epochs.placement
        self.dataset, self.known = epochs.dataset, epochs.known
        self._pool, self._split = epochs.pipeline.pool, epochs.pipeline.split  # the pipeline may use another pool

    def job_now(self) -> Job:
        return self._epochs.job_now()

    def in_epoch(self, epoch: int) -> AbstractContextManager[None]:
        pool = self._pool
        reading = [run.epoch.number for run in self._epochs.reading()] if pool.shares_dataset else []
        back = (lambda: reading[0]) if reading else (lambda: self._epochs.progress.at()[0])
        return in_epoch(self._epochs.set_epoch_of_data(), epoch, back, reading if pool.num_workers else ())

    def first_batch(self, epoch: Epoch | None = None) -> Any:
        """Return the first batch of an epoch (None: the next one), read here; an IndexError if it has none."""
        self._placement.check_not_capturing()
        run = self._epochs.new_run(self._epochs.progress.begin() if epoch is None else epoch)
        epoch = run.epoch
        with self.in_epoch(epoch.number):
            reader, seq = reader_for(self.job_now(), readers=0), epoch.first
            while (planned := epoch.task(seq)) is not None:
                batch = NOTHING if planned is NOTHING else self._read_here(reader, epoch, planned)
                if batch is not NOTHING:
                    return batch
                seq += 1
        if epoch.in_mid_epoch and epoch.batches(seq) == epoch.first:  # the position lies at the end: noticed here
            position = epoch.following()
            return self.first_batch(self.order.epoch(position.epoch, position))
        raise IndexError(f"epoch {epoch.number} has no batches to peek at")

    def _read_here(self, reader: Reader, epoch: Epoch, planned: Any) -> Any:
        """Return the batch of a task, or `NOTHING` if ``on_error`` has left out all its samples."""
        if isinstance(planned, BaseException):
            raise planned
        task = self._split.sharded(planned)
        result = reader.read(task)
        if result.error is not None:
            raise result.error
        if task.part is not None:
            result = epoch.record_result(task.seq, result)
        if result.batch is NOTHING:
            return NOTHING
        batch = self._placement.place([Entry(task.seq, task, result)])
        batch = (batch, epoch.real(task)) if epoch.evaluates else batch
        return batch if (sources := self._epochs.sources) is None else (batch, sources(task, result))

    def _looked_up(self, epoch: object, step: object, rank: object = None) -> MapEpoch:
        """Return an epoch positioned at the step; the samplers are restored."""
        order = self.order
        if isinstance(order, StreamOrder):
            raise order.no_steps()
        with order.undisturbed(but=self.dataset):
            return look_up(order, epoch, step, rank)

    def _task_of(self, found: MapEpoch, step: int) -> Task:
        task = found.task(int(step))  # it may be an array or a tensor
        if isinstance(task, Exception):
            raise task
        assert isinstance(task, Task)  # a looked-up epoch leaves no step out
        return task

    def samples_of(self, epoch: int, step: int) -> list[Any]:
        looked_up = self._looked_up(epoch, step, None if self.order.replicas()[0] == 1 else 0)
        return plain_indices(self._task_of(looked_up, step).shards[0])

    def checksums(self, epoch: int) -> list[str]:
        order = self.order
        if isinstance(order, StreamOrder):
            raise order.no_steps()
        with order.undisturbed(but=self.dataset):
            return checksums(order, epoch)

    def length(self, epoch: int) -> int:
        return self.order.length(epoch)

    def state_of(self, epoch: int) -> dict[str, Any]:
        return self.order.epoch(epoch).state(Position(epoch))

    def indices(self, epoch: Any, step: Any, rank: Any) -> Any:
        found = self._looked_up(epoch, step, rank)
        task = self._task_of(found, step)
        shards = [shown_indices(self.dataset, shard, found.number) for shard in task.shards]
        indices = shards if task.sharded else shards[0]
        return (indices, found.real(task)) if found.evaluates else indices

    def batch(self, epoch: Any, step: Any) -> Any:
        batch = self.batch_of(self._looked_up(epoch, step), step)
        if batch is NOTHING:
            raise ValueError(f"epoch {epoch}, batch {step} was left out: on_error has skipped all of its samples")
        return batch

    def batch_of(self, epoch: MapEpoch, step: int) -> Any:
        """Return a batch of an epoch, read here; `NOTHING` if ``on_error`` has left out all its samples."""
        self._placement.check_not_capturing()
        self._epochs.new_run(epoch)
        task, job = self._task_of(epoch, step), self.job_now()
        with self.in_epoch(epoch.number), seeded_as_worker(job.seed, task):
            return self._read_here(reader_for(job, readers=0), epoch, task)
