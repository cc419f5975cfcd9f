"""Notices when somebody calls ``set_epoch`` on a sampler, as timm, Lightning and accelerate do.

    EpochRequests.listen(samplers); take() -> the epoch that was asked for last, once

Samplers of this library note each call. On a sampler of another library ``set_epoch`` is replaced, on that object
alone, by a function that notes the call and passes it on. A sampler with ``__slots__`` cannot be listened to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from sharded_loader.sampling.base import EpochRequest, note, noted


def _notes_calls(sampler: Any) -> bool:
    """Whether the calls to ``set_epoch`` on a sampler are noted as its ``epoch_request``, from now on."""
    method = getattr(sampler, "set_epoch", None)
    if callable(method) and not getattr(method, "is_noted", False):
        epoch = getattr(sampler, "epoch", None)
        listener: Any = partial(_set_epoch, sampler, method)
        listener.is_noted = True
        try:  # an epoch above 0 is a call that came before
            sampler.epoch_request = note(epoch) if isinstance(epoch, int) and epoch > 0 else None
            sampler.set_epoch = listener
        except AttributeError:  # it has __slots__
            return False
    return callable(method)


def _set_epoch(sampler: Any, method: Callable[[int], Any], epoch: int) -> Any:
    """Stands in for the ``set_epoch`` of a sampler of another library."""
    answer = method(epoch)
    sampler.epoch_request = note(epoch)
    return answer


class EpochRequests:
    """The calls to ``set_epoch`` on some samplers that one loader has not seen yet.

    Example:
        >>> from sharded_loader import RandomSampler
        >>> sampler, requests = RandomSampler(4, seed=1), EpochRequests()
        >>> requests.listen([sampler])
        >>> sampler.set_epoch(3)
        >>> requests.take(), requests.take()
        (3, None)
    """

    def __init__(self) -> None:
        self._seen: list[tuple[Any, EpochRequest | None]] = []

    def listen(self, samplers: Iterable[Any]) -> None:
        """Listen to these samplers from now on; calls on the others do not count any more."""
        before = {id(one): request for one, request in self._seen}
        self._seen = [(one, before.get(id(one))) for one in samplers if _notes_calls(one)]

    def take(self) -> int | None:
        """The epoch of the latest call that is new; None if there is none."""
        new: list[EpochRequest] = []
        for sampler, seen in self._seen:
            request = sampler.epoch_request
            # By identity: a sampler that was pickled brings a number that another process gave.
            if request is not None and request is not seen:
                new.append(request)
        if not new:
            return None
        self.drop()
        return max(new).epoch

    def drop(self) -> None:
        """The calls up to now do not count: the loader itself was given an epoch."""
        self._seen = noted(one for one, _ in self._seen)
