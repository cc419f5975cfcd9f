"""The loaders that are compared, each in the form that its documentation recommends for the workload.

    LOADERS[name].open(plan) -> Stream      made, workers perhaps not yet started
    iter(stream)                            batches as torch tensors, in the plan's order
    stream.close()                          workers gone

`Plan` is the same for all. What a library leaves to its user (padding, reading a batch by its indices) is done
here the cheapest way we know. Ours and torch's are here, the other libraries in `benchmarks.other_loaders`.

A library is imported by `Loader.load`, before anything is timed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks import other_loaders as others
from benchmarks.plans import Plan, Stream, blocks_of, has_columns, keep_nothing, pad_sequence
from benchmarks.workloads import Array, Workload

OURS = "ours"


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
    if workload.iterable:
        stream: Any = ShardedDataLoader(blocks_of(plan), workload.batch_size, pool=pool)
        return Stream(stream, iter, lambda loader: loader.close())
    loader = ShardedDataLoader(
        ArrayDataset(plan.source.columns) if plan.is_columns else plan.source.rows,
        workload.batch_size,
        sampler=plan.sampler,
        batchify_fn=Pad() if workload.padded else None,
        pool=pool,
    )
    return Stream(loader, iter, lambda loader: loader.close())


def _open_drop_in(plan: Plan) -> Stream:
    from sharded_loader.batchify import Pad
    from sharded_loader.torch import DataLoader

    arguments = _torch_arguments(plan)
    if plan.workload.padded:
        arguments["collate_fn"] = Pad()
    return Stream(DataLoader(_torch_dataset(plan), **arguments), iter, keep_nothing)


# -- torch ----------------------------------------------------------------------------------------------------


def _torch_arguments(plan: Plan) -> dict[str, Any]:
    workload = plan.workload
    arguments: dict[str, Any] = {"batch_size": workload.batch_size}
    if not workload.iterable:
        arguments["sampler"] = plan.sampler
    if workload.padded:
        arguments["collate_fn"] = pad_sequence
    if workload.pool != "inline":  # it has no threads: where a row is about threads it gets as many processes
        arguments.update(
            num_workers=plan.workers, persistent_workers=True, multiprocessing_context=workload.start_method
        )
    return arguments


def _torch_dataset(plan: Plan) -> Any:
    if plan.workload.iterable:
        return blocks_of(plan)
    if not plan.is_columns:
        return plan.source.rows
    import torch

    return torch.utils.data.TensorDataset(torch.from_numpy(plan.source.columns))


def _open_torch(plan: Plan) -> Stream:
    from torch.utils.data import DataLoader

    return Stream(DataLoader(_torch_dataset(plan), **_torch_arguments(plan)), iter, keep_nothing)


def _open_torch_bulk(plan: Plan) -> Stream:
    from torch.utils.data import BatchSampler, DataLoader

    arguments = _torch_arguments(plan)
    arguments["sampler"] = BatchSampler(plan.sampler, plan.workload.batch_size, drop_last=False)
    arguments["batch_size"] = None
    return Stream(DataLoader(_torch_dataset(plan), **arguments), iter, keep_nothing)


def _open_stateful(plan: Plan) -> Stream:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return Stream(StatefulDataLoader(_torch_dataset(plan), **_torch_arguments(plan)), iter, keep_nothing)


# -- which is for what ----------------------------------------------------------------------------------------


def _anything(workload: Workload) -> str | None:
    return None


def _only_rates(workload: Workload) -> str | None:
    """The drop-in stands beside ours where samples travel; for the rest they are one engine."""
    return None if workload.kind == "rate" and workload.pool == "process" else "as ours"


def _not_iterable(refuses: Callable[[Workload], str | None]) -> Callable[[Workload], str | None]:
    return lambda workload: "reads no IterableDataset" if workload.iterable else refuses(workload)


def _only_columns(workload: Workload) -> str | None:
    return None if has_columns(workload) else "only for columns"


_spdl, _grain, _seqtools, _tensorflow, _ray = (
    _not_iterable(refuses)
    for refuses in (
        others.spdl_refuses,
        others.grain_refuses,
        others.seqtools_refuses,
        others.tensorflow_refuses,
        others.ray_refuses,
    )
)

LOADERS = {
    loader.name: loader
    for loader in (
        Loader(OURS, "sharded_loader", ("torch", "sharded_loader.loader.loader"), _open_ours, _anything),
        Loader("drop-in", "sharded_loader", ("torch", "sharded_loader.torch"), _open_drop_in, _only_rates),
        Loader("torch", "torch", ("torch",), _open_torch, _anything),
        Loader("torch-bulk", "torch", ("torch",), _open_torch_bulk, _only_columns),
        Loader("stateful", "torchdata", ("torchdata.stateful_dataloader",), _open_stateful, _anything),
        Loader(
            "spdl",
            "spdl_core",
            ("torch", "spdl.dataloader", "spdl.pipeline"),
            others.open_spdl,
            _spdl,
        ),
        Loader("grain", "grain", ("torch", "grain"), others.open_grain, _grain),
        Loader("seqtools", "seqtools", ("torch", "seqtools"), others.open_seqtools, _seqtools),
        Loader(
            "tensorflow",
            "tensorflow_cpu",
            ("torch", "tensorflow"),
            others.open_tensorflow,
            _tensorflow,
        ),
        Loader("ray", "ray", ("torch", "ray.data"), others.open_ray, _ray),
    )
}


def leaves(batch: Any) -> list[Array]:
    """The arrays of a batch, whatever it is wrapped in."""
    if isinstance(batch, bytes):
        return [np.frombuffer(batch, np.uint8)[np.newaxis]]
    if isinstance(batch, Sequence):
        return [leaf for part in batch for leaf in leaves(part)]
    return [np.asarray(batch)]
