"""Datasets that are told their epoch (``set_epoch(e)``), where all readers share one object.

    begin_epoch(dataset, e, runs)    an epoch begins: runs of other epochs cannot go on
    in_epoch(dataset, e, ...)        one batch or sample is read out of the way, and the epoch put back

In a process worker the dataset is the worker's own, and its `Reader` tells it. Inline and in threads there is
one object, which can be in one epoch only: a wrong epoch would be a wrong stream, in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from sharded_loader.engine.pipeline import Run


def begin_epoch(dataset: Any, epoch: int, runs: Iterable[Run]) -> None:
    """Tell the dataset, if it wants to know, and stop the runs that were in another epoch."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if set_epoch is None:
        return
    for run in runs:
        if not run.ended:
            run.dead = (
                f"epoch {run.epoch} cannot go on: epoch {epoch} was begun, and the dataset, which has "
                f"set_epoch and is shared by all iterators of this pool, can be in one epoch only; "
                f"use worker processes, or finish one epoch before the next"
            )
    set_epoch(epoch)


@contextmanager
def in_epoch(dataset: Any, epoch: int, back_to: int, runs: Iterable[Run]) -> Iterator[None]:
    """Inside, the dataset is in ``epoch``; afterwards in ``back_to``.

    Args:
        dataset: any dataset; one without ``set_epoch`` is left alone.
        epoch: the epoch to read in.
        back_to: the epoch that it was in.
        runs: those that threads read for at this moment.

    Raises:
        RuntimeError: a thread reads in another epoch.
    """
    set_epoch = getattr(dataset, "set_epoch", None)
    if set_epoch is None:
        yield
        return
    for run in runs:
        if not run.ended and run.dead is None and run.epoch != epoch:
            raise RuntimeError(
                f"cannot read in epoch {epoch} while threads read epoch {run.epoch}: the dataset, which has "
                f"set_epoch and is shared by them, can be in one epoch only; finish that epoch first"
            )
    set_epoch(epoch)
    try:
        yield
    finally:
        set_epoch(back_to)
