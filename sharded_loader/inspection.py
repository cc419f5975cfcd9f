"""A loader looked at from outside: its first batch, and what its repr says.

first_batch(run, reader, placement) -> the batch, read here and now
describe(loader, ...) -> text
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sharded_loader.arguments import length
from sharded_loader.devices.placement import Placement
from sharded_loader.engine.messages import NOTHING
from sharded_loader.engine.plan import Split
from sharded_loader.engine.reader import Reader
from sharded_loader.engine.run import Run

if TYPE_CHECKING:
    from sharded_loader.loader import ShardedDataLoader


def first_batch(run: Run, reader: Reader, placement: Placement) -> Any:
    """The first batch of a run that has not been opened.

    Raises:
        IndexError: it has no batches.
        RuntimeError: a graph is being captured.
        Exception: what the samples raise.
    """
    placement.check_not_capturing()
    plan, seq = run.plan, run.delivered
    while (planned := plan.task(seq)) is not None:
        if isinstance(planned, BaseException):
            raise planned
        task = plan.split(planned)
        result = reader.read(task)
        if result.error is not None:
            raise result.error
        if result.batch is not NOTHING:
            return placement.place(result.batch, task.sharded)
        seq += 1
    raise IndexError(f"epoch {run.epoch} has no batches to peek at")


def describe(
    loader: ShardedDataLoader, split: Split, placement: Placement, resident: list[Any], looks: str | None, resumes: bool
) -> str:
    """The repr of a loader.

    Args:
        loader: an open one.
        split, placement: its parts.
        resident: the devices that hold the data.
        looks: what its last batch looked like; None: none was read.
        resumes: whether its place was loaded.
    """
    try:
        size = length(loader.dataset)
    except Exception:  # a repr must not raise
        size = None
    parts = [f"{'?' if size is None else size} samples"]
    try:
        parts.append(f"{len(loader)} batches" + (f" of {loader.batch_size}" if loader.batch_size else ""))
    except Exception:
        parts.append("batches without number")
    if placement.devices is not None:
        parts.append("on " + ", ".join(map(str, placement.devices)))
        if resident:
            parts.append("resident on " + ", ".join(map(str, resident)))
    elif split.num_shards is not None:
        parts.append(f"{split.num_shards} shards")
    parts.append(repr(loader.pool))
    parts.append(f"batch: {looks or 'none read yet'}")
    at = "resumes at" if resumes else "at"
    return f"ShardedDataLoader({', '.join(parts)}; epoch {loader.epoch}, {at} batch {loader.position})"
