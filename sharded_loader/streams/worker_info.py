"""What ``torch.utils.data.get_worker_info()`` says while a part of iterable data is read.

    before = tell(Part(...))    this thread is told of the part
    here.part = before          and no more
    told()                      the part of this thread, also where torch is not imported
    this_worker()               its number, or that of torch's worker, and how many there are
    tell_of_worker(number, ...)     this process is a worker of torch's kind

torch keeps one answer for the whole process. Threads that read different parts need one each. So torch's function gets
other code, which looks for the thread's answer first. It stays the same object, because datasets import it by name.

Who tells puts back what was there before in a ``finally`` clause, by a plain assignment, as with `rng.reading`. Nothing
here imports torch, or mixtures: each worker beside torch imports this module. What can go wrong: torch has no such
function any more. Then parts get torch's own answer.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

from sharded_loader.base.private import answer_for_torch, set_worker_info, worker_info
from sharded_loader.engine.messages import Job


class Part:
    """A part of iterable data, as torch's ``WorkerInfo`` has it.

    Attributes:
        number, parts: which part, and how many there are.
        seed: a seed for the part.
        dataset: what is read.
        asked: the dataset has asked which part it is to read.
    """

    asked = False

    def __init__(self, number: int, parts: int, seed: int, dataset: object) -> None:
        self.number, self.parts, self.seed, self.dataset = number, parts, seed, dataset

    @property
    def place(self) -> tuple[int, int]:
        """Which part, and how many there are."""
        self.asked = True
        return self.number, self.parts

    def info(self) -> Any:
        """The same as an object of torch's, which is imported."""
        self.asked = True
        return worker_info(id=self.number, num_workers=self.parts, seed=self.seed, dataset=self.dataset)


class _Here(threading.local):
    part: Part | None = None


here = _Here()
"""The part that this thread is told of."""

_whole: tuple[int, Part] | None = None
"""The last part that a whole process was told of, and the thread that reads it."""


def _forget() -> None:
    """After a fork: what the parent reads is not the child's part."""
    global _whole
    _whole, here.part = None, None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def tell(part: Part | None, *, alone: bool = False) -> Part | None:
    """Tell this thread of a part.

    Args:
        part: the part; None: torch's own answer counts.
        alone: no other thread of this process reads samples. Threads that the dataset has started are told too.

    Returns:
        What the thread was told of before.
    """
    global _whole
    before = here.part
    tell_torch()
    if alone and part is not None:
        _whole = threading.get_ident(), part
    here.part = part
    return before


def tell_torch() -> None:
    """Let torch ask here, if it is imported. To be called again when it is imported in the middle of a part."""
    answer_for_torch(lambda: None if (part := told()) is None else part.info())


def told() -> Part | None:
    """The part that this thread is told of, or that it belongs to: the dataset may have started the thread."""
    part = here.part
    if part is None and _whole is not None and _whole[0] != threading.get_ident():
        part = _whole[1]
    return part


def this_worker() -> tuple[int, int] | None:
    """The number of this part, or of this worker, and how many there are; None outside workers.

    A worker of this library that has not imported torch cannot ask torch, but knows its part.

    Example:
        >>> this_worker() is None
        True
    """
    if (part := told()) is not None:
        return part.place
    torchs: Any = sys.modules.get("torch.utils.data")
    info = None if torchs is None else torchs.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def tell_of_worker(number: int, num_workers: int, seed: int, job: Job) -> None:
    """Tell torch, which has been imported, that this process is a worker."""
    import torch

    torch.set_num_threads(1)
    # The seed is what torch.initial_seed() says in worker_init_fn.
    set_worker_info(id=number, num_workers=num_workers, seed=seed, dataset=job.dataset)
    tell_torch()
    if job.base_seed is not None:
        torch.manual_seed(seed)
