"""The loaders that are compared, each in the form that its documentation recommends for the workload.

    LOADERS[name].open(plan) -> Stream      made, workers perhaps not yet started
    iter(stream)                            batches as torch tensors, in the plan's order, without end
    stream.close()                          workers gone

`Plan` is the same for all. What a library leaves to its user (padding, reading a batch by its indices) is done
here the cheapest way we know: a handicap for ours, if anything.

A library is imported by `Loader.load`, before anything is timed.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.workloads import Array, Repeated, RepeatedBatches, Source, Workload, order, pad, stack

OURS = "ours"


@dataclass(frozen=True)
class Plan:
    """What to load, for any loader."""

    workload: Workload
    source: Source
    workers: int
    sampler: Repeated = field(init=False)
    batches: RepeatedBatches = field(init=False)

    def __post_init__(self) -> None:
        epoch = order(len(self.source.rows), self.workload.shuffled)
        object.__setattr__(self, "sampler", Repeated(epoch))
        object.__setattr__(self, "batches", RepeatedBatches(epoch, self.workload.batch_size))

    @property
    def is_columns(self) -> bool:
        """Whether the loaders get the columns, not single samples."""
        return self.workload.name.startswith("columns")


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
        indices = self._batches[number]
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


@dataclass(frozen=True)
class Loader:
    """One column of names in the report.

    Attributes:
        name: how ``--loaders`` and the tables name it.
        package: its distribution, for the version.
        modules: what a user of it imports.
        open: makes a stream.
        refuses: tells why a workload is not for this loader, or None.
    """

    name: str
    package: str
    modules: tuple[str, ...]
    open: Callable[[Plan], Stream]
    refuses: Callable[[Workload], str | None]

    def load(self) -> None:
        """Import the library.

        Raises:
            ImportError: it is not installed.
        """
        for module in self.modules:
            importlib.import_module(module)

    def version(self) -> str | None:
        """The installed version; None where it is not installed."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None


# -- ours -----------------------------------------------------------------------------------------------------


def _open_ours_records(plan: Plan) -> Stream:
    from sharded_loader import RecordFileDataset

    def batches(dataset: Any) -> Iterator[Any]:
        return (dataset.get_batch(plan.batches[number]) for number in range(len(plan.batches)))

    return Stream(RecordFileDataset(plan.source.rows.path), batches, lambda dataset: dataset.close())


def _open_ours(plan: Plan) -> Stream:
    if plan.workload.records:
        return _open_ours_records(plan)
    from sharded_loader import ArrayDataset, InlinePool, ProcessPool, ShardedDataLoader, ThreadPool
    from sharded_loader.batchify import Pad

    workload = plan.workload
    pool: Any = InlinePool()
    if workload.pool == "thread":
        pool = ThreadPool(plan.workers)
    elif workload.pool == "process":
        pool = ProcessPool(plan.workers, start_method=workload.start_method)
    loader = ShardedDataLoader(
        ArrayDataset(plan.source.columns) if plan.is_columns else plan.source.rows,
        workload.batch_size,
        sampler=plan.sampler,
        batchify_fn=Pad() if workload.padded else None,
        pool=pool,
    )
    return Stream(loader, iter, lambda loader: loader.close())


# -- torch ----------------------------------------------------------------------------------------------------


def _torch_arguments(plan: Plan) -> dict[str, Any]:
    workload = plan.workload
    arguments: dict[str, Any] = {"batch_size": workload.batch_size, "sampler": plan.sampler}
    if workload.padded:
        arguments["collate_fn"] = pad_sequence
    if workload.pool != "inline":  # it has no threads: where a row is about threads it gets as many processes
        arguments.update(
            num_workers=plan.workers, persistent_workers=True, multiprocessing_context=workload.start_method
        )
    return arguments


def _torch_dataset(plan: Plan) -> Any:
    if not plan.is_columns:
        return plan.source.rows
    import torch

    return torch.utils.data.TensorDataset(torch.from_numpy(plan.source.columns))


def _drop(loader: Any) -> None:
    """torch's loaders have no ``close``: the workers end when the last reference does, which was this one."""


def _open_torch(plan: Plan) -> Stream:
    from torch.utils.data import DataLoader

    return Stream(DataLoader(_torch_dataset(plan), **_torch_arguments(plan)), iter, _drop)


def _open_torch_bulk(plan: Plan) -> Stream:
    from torch.utils.data import BatchSampler, DataLoader

    arguments = _torch_arguments(plan)
    arguments["sampler"] = BatchSampler(plan.sampler, plan.workload.batch_size, drop_last=False)
    arguments["batch_size"] = None
    return Stream(DataLoader(_torch_dataset(plan), **arguments), iter, _drop)


def _open_stateful(plan: Plan) -> Stream:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return Stream(StatefulDataLoader(_torch_dataset(plan), **_torch_arguments(plan)), iter, _drop)


# -- SPDL -----------------------------------------------------------------------------------------------------


SPDL_PICKLED_BYTES = 200_000


def _open_spdl(plan: Plan) -> Stream:
    return _open_spdl_threads(plan) if plan.workload.pool == "thread" else _open_spdl_processes(plan)


def _open_spdl_processes(plan: Plan) -> Stream:
    from spdl.dataloader import get_pytorch_dataloader
    from torch.utils.data import default_collate

    # Tensors travel through shared memory, one file each: below some 200 KB, pickled arrays are two to three times
    # faster (tiny rows 46 k samples/s against 20 k), above slower (large samples 0.5 k against 2.0 k).
    small = plan.workload.padded or BatchReader(plan)[0].nbytes < SPDL_PICKLED_BYTES
    collate: Callable[[Any], Any]
    if small:
        collate = pad if plan.workload.padded else stack
    else:
        collate = tensor_of if plan.is_columns else default_collate
    loader = get_pytorch_dataloader(
        BulkColumns(plan.source.columns) if plan.is_columns else plan.source.rows,
        plan.workload.batch_size,
        sampler=plan.sampler,
        num_workers=plan.workers,
        collate_fn=SingleThreaded(collate),
        multiprocessing_context=plan.workload.start_method,
        in_order=True,
    )

    def batches(loader: Any) -> Iterator[Any]:
        for batch in loader:
            yield tensor_of(batch) if small else batch

    def close(loader: Any) -> None:
        # It never removes the pickled dataset: without this 154 MB may stay in shared memory after the process.
        shared = getattr(loader, "_shmem", None)
        if shared is not None:
            shared.close()
            shared.unlink()

    return Stream(loader, batches, close)


def _open_spdl_threads(plan: Plan) -> Stream:
    from spdl.pipeline import PipelineBuilder

    builder = (
        PipelineBuilder()
        .add_source(plan.sampler)
        .pipe(plan.source.rows.__getitem__, concurrency=plan.workers, output_order="input")
        .aggregate(plan.workload.batch_size)
        .pipe(lambda samples: tensor_of(stack(samples)))
        .add_sink(2 * plan.workers)
    )
    pipeline = builder.build(num_threads=plan.workers)

    def batches(pipeline: Any) -> Iterator[Any]:
        with pipeline.auto_stop():
            yield from pipeline

    return Stream(pipeline, batches, _drop)


# -- Grain ----------------------------------------------------------------------------------------------------


def _open_grain(plan: Plan) -> Stream:
    import grain

    workload = plan.workload
    if workload.pool == "thread":
        options = grain.ReadOptions(num_threads=plan.workers, prefetch_buffer_size=4 * plan.workers)
        samples = grain.MapDataset.source(SampleReader(plan))
        dataset = samples.to_iter_dataset(options).batch(workload.batch_size)
    else:
        # No threads inside the workers: the documentation advises against them for data in memory.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        dataset = grain.MapDataset.source(BatchReader(plan)).to_iter_dataset(options)
        if workload.pool == "process":
            dataset = dataset.mp_prefetch(
                grain.MultiprocessingOptions(num_workers=plan.workers, per_worker_buffer_size=2)
            )

    def batches(dataset: Any) -> Iterator[Any]:
        iterator = iter(dataset)
        try:
            for batch in iterator:
                yield tensor_of(batch)
        finally:
            iterator.close()

    return Stream(dataset, batches, _drop)


# -- seqtools -------------------------------------------------------------------------------------------------


def _open_seqtools(plan: Plan) -> Stream:
    import seqtools

    workload = plan.workload
    if workload.pool == "thread":
        samples = seqtools.prefetch(SampleReader(plan), plan.workers, "thread", max_buffered=4 * plan.workers)

        def batched(samples: Any) -> Iterator[Any]:
            size = workload.batch_size
            for start in range(0, len(samples), size):
                yield tensor_of(stack([samples[at] for at in range(start, start + size)]))

        return Stream(samples, batched, _drop)

    multiprocessing.set_start_method(workload.start_method, force=True)  # it always takes the default
    reader = BatchReader(plan)
    buffered = 10  # its default
    largest = max(reader[number].nbytes for number in range(3)) * (3 if workload.padded else 1)
    batches = seqtools.prefetch(
        reader, plan.workers, "process", max_buffered=buffered, shm_size=buffered * (largest + 4096)
    )
    return Stream(batches, lambda batches: (tensor_of(batches[at]) for at in range(len(batches))), _drop)


# -- which is for what ----------------------------------------------------------------------------------------


def _anything(workload: Workload) -> str | None:
    return None


def _only_columns(workload: Workload) -> str | None:
    return None if workload.name.startswith("columns") else "only for columns"


def _not_inline(workload: Workload) -> str | None:
    return "has no inline form" if workload.pool == "inline" else None


def _grain_refuses(workload: Workload) -> str | None:
    if workload.kind == "first" and workload.start_method != "spawn":
        return "only spawns"
    return None


LOADERS = {
    loader.name: loader
    for loader in (
        Loader(OURS, "sharded_loader", ("torch", "sharded_loader.loader"), _open_ours, _anything),
        Loader("torch", "torch", ("torch",), _open_torch, _anything),
        Loader("torch-bulk", "torch", ("torch",), _open_torch_bulk, _only_columns),
        Loader("stateful", "torchdata", ("torchdata.stateful_dataloader",), _open_stateful, _anything),
        Loader(
            "spdl",
            "spdl_core",
            ("torch", "spdl.dataloader", "spdl.pipeline"),
            _open_spdl,
            _not_inline,
        ),
        Loader("grain", "grain", ("torch", "grain"), _open_grain, _grain_refuses),
        Loader("seqtools", "seqtools", ("torch", "seqtools"), _open_seqtools, _not_inline),
    )
}


def leaves(batch: Any) -> list[Array]:
    """The arrays of a batch, whatever it is wrapped in."""
    if isinstance(batch, bytes):
        return [np.frombuffer(batch, np.uint8)[np.newaxis]]
    if isinstance(batch, Sequence):
        return [leaf for part in batch for leaf in leaves(part)]
    return [np.asarray(batch)]
