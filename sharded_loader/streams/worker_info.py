"""The answer of ``torch.utils.data.get_worker_info()`` while a part of iterable data is read.

    before = set_current_part(Part(...))    from now on, this thread reads the part
    here.part = before                      no longer; a plain assignment in a ``finally`` clause, as for `rng.reading`

torch keeps one answer per process, but threads may read different parts. So torch's function gets other code, which
looks for the thread's part first; it stays the same object, because datasets import it by name. If torch drops that
function, parts get torch's own answer. Worker processes without torch import this module, so nothing here imports it.
"""

from __future__ import annotations

import threading
from typing import Any

from sharded_loader.base.private import answer_for_torch, set_worker_info, worker_info
from sharded_loader.base.system import after_fork
from sharded_loader.engine.messages import Job


class Part:
    """A part of iterable data, with the fields of torch's ``WorkerInfo``.

    Attributes:
        number, parts: number of the part, and of parts.
        asked: the dataset has asked for its part number.
    """

    asked = False

    def __init__(self, number: int, parts: int, seed: int, dataset: object) -> None:
        self.number, self.parts, self.seed, self.dataset = number, parts, seed, dataset

    @property
    def place(self) -> tuple[int, int]:
        """Number of the part, and of parts."""
        self.asked = True
        return self.number, self.parts

    def info(self) -> Any:
        """Return torch's ``WorkerInfo``, once torch is imported."""
        self.asked = True
        return worker_info(id=self.number, num_workers=self.parts, seed=self.seed, dataset=self.dataset)


class _Here(threading.local):
    part: Part | None = None


here = _Here()
"""The part that this thread reads."""

_whole: tuple[int, Part] | None = None
"""The last part read by a process with a single reader, and its thread."""


@after_fork
def _forget() -> None:
    """Forget the parent's part after a fork."""
    global _whole
    _whole, here.part = None, None


def set_current_part(part: Part | None, *, alone: bool = False) -> Part | None:
    """Announce a part to this thread (None: torch's own answer), and return the part before.

    ``alone`` means that no other thread of this process reads samples: threads of the dataset see the part, too.
    """
    global _whole
    before = here.part
    patch_torch()
    if alone and part is not None:
        _whole = threading.get_ident(), part
    here.part = part
    return before


def patch_torch() -> None:
    """Patch torch's function, if torch is imported. Call this again when torch is imported while a part is read."""
    answer_for_torch(lambda: None if (part := current_part()) is None else part.info())


def current_part() -> Part | None:
    """Return the part of this thread, or of the reader that has started this thread."""
    part = here.part
    if part is None and _whole is not None and _whole[0] != threading.get_ident():
        part = _whole[1]
    return part


def announce_worker(number: int, num_workers: int, seed: int, job: Job) -> None:
    """Announce to torch, which has been imported, that this process is a worker."""
    import torch

    torch.set_num_threads(1)
    # The seed is what torch.initial_seed() says in worker_init_fn.
    set_worker_info(id=number, num_workers=num_workers, seed=seed, dataset=job.dataset)
    patch_torch()
    if job.base_seed is not None:
        torch.manual_seed(seed)
