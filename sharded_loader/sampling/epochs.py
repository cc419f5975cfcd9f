"""Which epoch a user has asked for by calling ``set_epoch`` on a sampler.

    sampler.set_epoch(3)            -> the sampler keeps an EpochRequest, numbered over all samplers
    EpochRequests(samplers).take()  -> 3, once; None if nobody has called set_epoch since

A loader counts its own epochs: it reads a sampler as a function of the epoch, and never looks at ``sampler.epoch``,
which moves when somebody iterates over the sampler. timm, Lightning and accelerate call ``set_epoch`` on the samplers
of a loader, so an explicit call still decides the loader's next epoch. Each loader asks for the calls that are new to
it. A sampler knows no loader, so any number of loaders share one.

Samplers of this library keep the request themselves (`sharded_loader.sampling.base.Sampler.set_epoch`). On a sampler of
another library ``set_epoch`` is replaced, on that object alone, by a function that notes the call and passes it on.

Before a loader reads a sampler of another library, it tells the sampler its epoch, by `tell`: those calls are not
noted. Calls that such a sampler makes itself while a loader reads it are not noted either (accelerate's
``SeedableRandomSampler`` ends its epoch with ``set_epoch(epoch + 1)``).

What can go wrong: a sampler of another library with ``__slots__`` cannot be listened to: call ``loader.set_epoch``.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from sharded_loader.sampling.tracing import current_trace

_numbers = itertools.count(1)
_thread = threading.local()


class EpochRequest(NamedTuple):
    """One call of ``set_epoch``.

    Attributes:
        number: greater than those of all calls before in this process.
        epoch: the argument.
    """

    number: int
    epoch: int


def note(before: EpochRequest | None, epoch: int) -> EpochRequest | None:
    """What a sampler keeps after ``set_epoch(epoch)``; ``before``, if it is a loader that tells it the epoch."""
    if getattr(_thread, "telling", False) or current_trace() is not None:
        return before
    return EpochRequest(next(_numbers), epoch)


def tell(call: Callable[..., Any], *arguments: Any) -> None:
    """Make a call that tells samplers their epoch for a loader: no `set_epoch` inside it moves a loader."""
    before = getattr(_thread, "telling", False)
    try:
        _thread.telling = True
        call(*arguments)
    finally:
        _thread.telling = before  # a plain assignment: a Ctrl-C cannot come before it


class EpochRequests:
    """The calls of ``set_epoch`` on some samplers that one loader has not seen yet.

    Args:
        samplers: those of the loader; the ones without ``set_epoch`` are left out.

    Example:
        >>> from sharded_loader.sampling import RandomSampler
        >>> sampler = RandomSampler(4, seed=1)
        >>> requests = EpochRequests([sampler])
        >>> sampler.set_epoch(3)
        >>> requests.take(), requests.take()
        (3, None)
    """

    def __init__(self, samplers: Iterable[Any]) -> None:
        self._holders: list[Any] = []
        self._seen: dict[int, EpochRequest | None] = {}
        self.listen(samplers)

    def listen(self, samplers: Iterable[Any]) -> None:
        """Listen to these samplers from now on; calls on the others do not count any more."""
        found = [holder for one in samplers if (holder := _holder(one)) is not None]
        self._seen = {id(holder): self._seen.get(id(holder)) for holder in found}
        self._holders = found

    def take(self) -> int | None:
        """The epoch of the latest call that is new; None if there is none."""
        # By identity: a sampler that was pickled brings a number that another process gave.
        new = [holder.epoch_request for holder in self._holders if holder.epoch_request is not self._seen[id(holder)]]
        if not new:
            return None
        self.drop()
        latest: EpochRequest = max(one for one in new if one is not None)
        return latest.epoch

    def drop(self) -> None:
        """The calls up to now do not count: the loader itself was given an epoch."""
        self._seen = {id(holder): holder.epoch_request for holder in self._holders}


def _holder(sampler: Any) -> Any:
    """Where the calls of ``set_epoch`` on a sampler are noted; None if they cannot be noted."""
    method = getattr(sampler, "set_epoch", None)
    if not callable(method):
        return None
    if isinstance(method, _Listener):
        return method
    if getattr(getattr(type(sampler), "set_epoch", None), "keeps_request", False):
        return sampler
    listener = _Listener(method, getattr(sampler, "epoch", None))
    try:
        sampler.set_epoch = listener
    except AttributeError:
        return None
    return listener


class _Listener:
    """Stands in for the ``set_epoch`` of a sampler of another library, which may have been called before."""

    def __init__(self, set_epoch: Callable[[int], Any], epoch: Any) -> None:
        self._set_epoch = set_epoch
        self.epoch_request = EpochRequest(next(_numbers), epoch) if isinstance(epoch, int) and epoch > 0 else None

    def __call__(self, epoch: int) -> Any:
        answer = self._set_epoch(epoch)
        self.epoch_request = note(self.epoch_request, epoch)
        return answer
