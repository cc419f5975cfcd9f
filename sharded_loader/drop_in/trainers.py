"""Lightning and Accelerate: recognize their calls from the stack, and adapt to their bookkeeping.

    called_by("skip_first_batches", "accelerate")    frame of a calling function
    fetched_by_lightning()                           batches that Lightning has fetched but not trained on
    name_epoch(order, 3)                             an epoch that Lightning names for iterable data
    refuse_skipping(loader)                          Accelerate would read the data in another order
    length_was_asked(iterator)                       torch's own bookkeeping: its iterator checks a length

The names are not public, as in `base.private`: each use says what happens without them, and the same tests cover them.
The core looks up three of these functions by name: to save states, to follow Lightning's ``set_epoch``, and before
another library rebuilds the loader. Neither library is imported here.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from types import FrameType
from typing import Any

from sharded_loader.extend.tools import warn


def called_by(function: str, package: str) -> FrameType | None:
    """Return the frame of a function at most seven calls above the caller, or None."""
    stack = traceback.walk_stack(sys._getframe(1)) if package in sys.modules else ()
    for frame, _ in itertools.islice(stack, 1, 8):
        if frame.f_code.co_name == function and str(frame.f_globals.get("__name__")).startswith(package):
            return frame
    return None


def fetched_by_lightning(function: str = "on_save_checkpoint") -> tuple[int, bool]:
    """Return the number of batches that Lightning has fetched but not trained on, and whether its epoch is over.

    Lightning fetches one batch ahead if the loader has no length, and then saves a position one batch too late. With
    ``limit_train_batches``, and after the last batch, only Lightning knows that the next epoch begins. Without the
    names, or if ``function`` is not calling: (0, False).
    """
    frame = called_by(function, "lightning") or called_by(function, "pytorch_lightning")
    loop = None if frame is None else frame.f_locals.get("self")
    fetcher = getattr(loop, "_data_fetcher", None)
    ahead = getattr(fetcher, "batches", ())
    is_over = getattr(getattr(loop, "epoch_loop", None), "_num_ready_batches_reached", bool)
    return len(ahead), is_over() or (getattr(fetcher, "done", False) and not ahead)


def name_epoch(order: Any, epoch: int) -> None:
    """Make ``epoch`` the next one of iterable data. Without a length, Lightning calls this after the first batch."""
    ahead, _ = fetched_by_lightning("on_advance_start")
    if not ahead or order.last is None:
        order.set_epoch(epoch)
    elif order.last.number != epoch:
        warn(
            f"Lightning goes on with epoch {epoch}, but it has read the first batch of epoch {order.last.number}: "
            f"it loads no position at the end of an epoch. Give the loader steps_per_epoch="
        )


def length_was_asked(iterator: object) -> bool:
    """Return True if torch's iterator compares its batches with a length. Without the name: True."""
    return getattr(iterator, "_IterableDataset_len_called", 0) is not None


def counted_by_fabric(epoch: int) -> bool:
    """Return True if a loader of Lightning's Fabric begins an epoch, and make it count on from ``epoch``.

    Fabric names epochs to the sampler at each ``iter()``, from 0 on, even after a state of a later epoch was loaded.
    Without the name: False.
    """
    frame = called_by("__iter__", "lightning.fabric") or called_by("__iter__", "lightning_fabric")
    counting: Any = None if frame is None else frame.f_locals.get("self")
    if not hasattr(counting, "_num_iter_calls"):
        return False
    counting._num_iter_calls = epoch + 1
    return True


def rebuilt_by_accelerate(function: str) -> bool:
    """Return True if Accelerate is about to turn our loader into one of torch's, unless our class replaces torch's."""
    theirs = getattr(sys.modules.get("accelerate.data_loader"), "DataLoader", None)
    is_torchs = getattr(theirs, "__module__", "torch.").startswith("torch.")
    return is_torchs and called_by(function, "accelerate") is not None


def refuse_skipping(loader: object) -> None:
    """Raise a TypeError if Accelerate is about to read iterable data with torch's loader, in another order."""
    if rebuilt_by_accelerate("skip_first_batches"):
        text = "skip_first_batches() of Accelerate, which transformers' Trainer calls to resume, would read the"
        advice = "pass the loader through prepare() of sharded_loader.integrations.accelerate first"
        raise TypeError(
            f"{text} iterable data of this {type(loader).__name__} with torch's loader, in another order: {advice}"
        )


# -- what Accelerate is told -------------------------------------------------------------------------------------------


def begin_loader(gradient_state: Any, loader: Any) -> None:
    """Tell Accelerate that a loader begins an epoch: it needs the last batch for gradient accumulation."""
    gradient_state._add_dataloader(loader)


def end_loader(gradient_state: Any, loader: Any) -> None:
    """Tell Accelerate that the epoch has ended."""
    gradient_state._remove_dataloader(loader)


def note_prepared(accelerator: Any, loader: Any) -> None:
    """Add a loader to those that ``accelerator.save_state()`` saves."""
    if loader not in accelerator._dataloaders:
        accelerator._dataloaders.append(loader)
