"""What every loader is given, and the parts that several loaders share.

    Plan                             the workload, its data, and the order of the samples
    BatchReader, SampleReader        the same order as a sequence, for libraries that map over a sequence
    Stream                           an open loader
    tensor_of, SingleThreaded, ...   collate functions

A spawned worker imports this module for the readers. So this module imports NumPy alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.workloads import Array, Repeated, RepeatedBatches, Source, Workload, epochs_of, order, pad, stack

FASTEST = 8_000_000
"""Samples per second. No loader is faster, so the list of indices lasts as long as the stretch."""


@dataclass(frozen=True)
class Plan:
    """What to load, for any loader.

    Attributes:
        workload: the row of the report.
        source: its data.
        workers: the number of worker processes or threads.
        seconds: how long batches will be read, warming up included. It decides how long ``sampler`` is.
        sampler: the indices of all samples, in order: a plain list. Where memory is measured the list would count, so
            there it is an iterable without end.
        batches: the same order as index arrays, one per batch, practically without end.
    """

    workload: Workload
    source: Source
    workers: int
    seconds: float = 0.0
    sampler: list[int] | Repeated = field(init=False)
    batches: RepeatedBatches = field(init=False)

    def __post_init__(self) -> None:
        workload = self.workload
        epoch = order(len(self.source.rows), workload.shuffled)
        long = workload.kind == "rate" and not workload.records  # other kinds read less than an epoch, or epochs
        checked = workload.check_batches * workload.batch_size
        count = checked + round(FASTEST * self.seconds) if long else 0
        sampler = Repeated(epoch) if workload.kind == "memory" else epochs_of(epoch, count)
        object.__setattr__(self, "sampler", sampler)
        object.__setattr__(self, "batches", RepeatedBatches(epoch, self.workload.batch_size))

    @property
    def is_columns(self) -> bool:
        """Whether the loaders get the columns, not single samples."""
        return has_columns(self.workload)


def has_columns(workload: Workload) -> bool:
    """Whether the loaders get the columns of this workload, not single samples."""
    return workload.name.startswith("columns")


def blocks_of(plan: Plan) -> Any:
    """The samples as an ``IterableDataset`` without end. Of n workers, each yields every n-th batch."""
    from torch.utils.data import IterableDataset, get_worker_info

    rows, size = plan.source.rows, plan.workload.batch_size

    class Blocks(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            info = get_worker_info()
            part, parts = (0, 1) if info is None else (info.id, info.num_workers)
            place, length = part * size, len(rows)
            while True:
                for index in range(place, place + size):
                    yield rows[index % length]
                place += parts * size

    return Blocks()


class BatchReader:
    """A sequence of finished NumPy batches, for libraries that map a function over a sequence."""

    def __init__(self, plan: Plan) -> None:
        self._rows = plan.source.rows
        self._columns = plan.source.columns if plan.is_columns else None
        self._batches = plan.batches
        self._collate = pad if plan.workload.padded else stack

    def __len__(self) -> int:
        return len(self._batches)

    def __getitem__(self, number: int) -> Any:
        return self.read(self._batches[number])

    def read(self, indices: Array) -> Any:
        """The batch of these indices."""
        if self._columns is not None:
            return self._columns[indices]
        rows = self._rows
        return self._collate([rows[index] for index in indices.tolist()])


class SampleReader:
    """The samples in order, one by one, for libraries that read ahead by sample."""

    def __init__(self, plan: Plan) -> None:
        self._rows = plan.source.rows
        self._order = order(len(self._rows)).tolist()

    def __len__(self) -> int:
        return len(self._order) * Repeated.TIMES

    def __getitem__(self, number: int) -> Any:
        return self._rows[self._order[number % len(self._order)]]


class BulkColumns:
    """Columns for libraries that know ``__getitems__``: the "list of samples" is the finished batch."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> Any:
        return self._array[index]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        return self._array[indices]


def tensor_of(batch: Array) -> Any:
    """A collate function: the batch is finished, as an array."""
    import torch

    return torch.from_numpy(batch)


class SingleThreaded:
    """A collate function that does what torch's own workers do first: torch to one thread.

    Without it two forked workers on two cores wait for each other's OpenMP threads and are three to six times slower.
    """

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate
        self._pid: int | None = None

    def __call__(self, samples: Any) -> Any:
        if self._pid != os.getpid():
            import torch

            torch.set_num_threads(1)
            self._pid = os.getpid()
        return self._collate(samples)


def pad_sequence(samples: Sequence[Array]) -> Any:
    """A collate function: torch's own padding."""
    import torch

    return torch.nn.utils.rnn.pad_sequence([torch.from_numpy(sample) for sample in samples], batch_first=True)


def keep_nothing(loader: Any) -> None:
    """A ``close`` for loaders that have none: their workers end with the last reference, which this one was."""


class Stream:
    """An open loader."""

    def __init__(self, loader: Any, batches: Callable[[Any], Iterator[Any]], close: Callable[[Any], None]) -> None:
        self._loader = loader
        self._batches = batches
        self._close = close

    def __iter__(self) -> Iterator[Any]:
        return self._batches(self._loader)

    def close(self) -> None:
        """Stop the workers. The iterator has to be gone."""
        loader, self._loader = self._loader, None
        self._close(loader)
