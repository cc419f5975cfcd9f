"""What ``torch.utils.data.get_worker_info()`` says while a part of iterable data is read.

    telling(Part(...), alone=...)   inside, this thread is told of the part; if it reads alone, its process is too
    tell_torch()                    torch has been imported, perhaps in the middle of a part, which is about to ask

torch keeps one answer for the whole process. Threads that read different parts need one each. So torch's function gets
other code, which looks for the thread's answer first. It stays the same object, because datasets import it by name. If
a thread reads alone, torch's own variable is set as well: a dataset may ask in a thread that it has started itself.

Nothing here imports torch. What can go wrong: torch has no such function any more. Then threads get torch's answer.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Part:
    """A part of iterable data, as torch's ``WorkerInfo`` has it.

    Args:
        number, parts: which part, and how many there are.
        seed: a seed for the part.
        dataset: what is read.
    """

    def __init__(self, number: int, parts: int, seed: int, dataset: Any) -> None:
        self._fields = {"id": number, "num_workers": parts, "seed": seed, "dataset": dataset}

    def info(self, torch_worker: Any) -> Any:
        """The same as an object of torch's."""
        return torch_worker.WorkerInfo(**self._fields)


class _Here(threading.local):
    part: Part | None = None


_here = _Here()
_lock = threading.Lock()
_told: list[Part] = []  # what the whole process is told of; the last one counts
_own: Any = None  # torch's own answer
_ours: Any = object()  # ours, as long as it is in its place


def _forget() -> None:
    """After a fork: what the parent reads is not the child's part, and nobody is left who would release the lock."""
    global _lock
    _lock, _here.part = threading.Lock(), None
    _told.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


@contextmanager
def telling(part: Part, *, alone: bool) -> Iterator[None]:
    """Inside, ``get_worker_info()`` tells of this part.

    Args:
        part: the part.
        alone: no other thread of this process reads a part.
    """
    before = _here.part
    try:
        _here.part = part
        if alone:
            _told.append(part)
        tell_torch()
        yield
    finally:
        _here.part = before
        if alone:
            _told[:] = [one for one in _told if one is not part]
            tell_torch()


def tell_torch() -> None:
    """Tell torch, if it is imported."""
    global _own, _ours
    torch_worker: Any = sys.modules.get("torch.utils.data._utils.worker")
    if not hasattr(torch_worker, "get_worker_info"):  # it is not imported, or only half of it
        return
    with _lock:
        if not hasattr(torch_worker, "_sharded_loader_info"):
            torch_worker._sharded_loader_info = _info_here
            code = getattr(torch_worker.get_worker_info, "__code__", None)
            if code is not None and not code.co_freevars:
                torch_worker.get_worker_info.__code__ = _get_worker_info.__code__
        if torch_worker._worker_info is not _ours:
            _own = torch_worker._worker_info
        _ours = _told[-1].info(torch_worker) if _told else object()
        torch_worker._worker_info = _ours if _told else _own


def _info_here() -> Any:
    part = _here.part
    return None if part is None else part.info(sys.modules["torch.utils.data._utils.worker"])


def _get_worker_info() -> Any:
    """Its code runs in torch's module, where these names are."""
    info = _sharded_loader_info()  # type: ignore[name-defined]  # noqa: F821
    return _worker_info if info is None else info  # type: ignore[name-defined]  # noqa: F821
