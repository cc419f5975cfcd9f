"""Finds the function of another library that asks this library for something, where nothing that it passes says so.

    called_by("skip_first_batches", "accelerate") -> its frame, or None
    fetched_by_lightning() -> batches ahead, whether its epoch is over
    counted_by_fabric(3) -> whether Fabric asks for epoch 3 of a loaded state

Accelerate builds torch's loader from the attributes of ours. Lightning saves a position one batch later than the batch
that it trains on. Fabric counts epochs, and does not save the count. What can go wrong: a new version of theirs has
another name for the function. The tests with these libraries notice it.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any


def called_by(function: str, package: str) -> FrameType | None:
    """The frame of a function, at most six calls above the caller; None if it is not there."""
    if package not in sys.modules:
        return None
    frame: FrameType | None = sys._getframe(1)
    for _ in range(6):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return None
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__")).startswith(package):
            return frame
    return None


def fetched_by_lightning(function: str = "on_save_checkpoint") -> tuple[int, bool]:
    """How many batches Lightning has fetched but not trained on, and whether its epoch is over, if a function asks.

    Lightning fetches one batch ahead where the loader has no length. With ``limit_train_batches``, and after the last
    batch of an epoch, only Lightning knows that the next epoch begins.
    """
    frame = called_by(function, "lightning") or called_by(function, "pytorch_lightning")
    loop = None if frame is None else frame.f_locals.get("self")
    fetcher = getattr(loop, "_data_fetcher", None)
    ahead = getattr(fetcher, "batches", ())
    is_over = getattr(getattr(loop, "epoch_loop", None), "_num_ready_batches_reached", bool)
    return len(ahead), is_over() or (getattr(fetcher, "done", False) and not ahead)


def counted_by_fabric(epoch: int) -> bool:
    """Whether a loader of Lightning's Fabric begins an epoch. It goes on to count from this one.

    It names the epoch to the sampler at each ``iter()``, from 0 on, also after a state of a later epoch was loaded.
    """
    frame = called_by("__iter__", "lightning.fabric") or called_by("__iter__", "lightning_fabric")
    counting: Any = None if frame is None else frame.f_locals.get("self")
    if not hasattr(counting, "_num_iter_calls"):
        return False
    counting._num_iter_calls = epoch + 1
    return True


def refuse_skipping(loader: Any) -> None:
    """Raise an error if Accelerate is about to read iterable data with torch's loader, in another order.

    Raises:
        TypeError: it is.
    """
    if called_by("skip_first_batches", "accelerate") is not None:
        raise TypeError(
            f"skip_first_batches() of Accelerate, which transformers' Trainer calls to resume, would read the iterable "
            f"data of this {type(loader).__name__} with torch's loader, in another order: pass the loader through "
            f"prepare() of sharded_loader.integrations.accelerate first"
        )
