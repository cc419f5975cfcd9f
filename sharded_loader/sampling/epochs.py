"""Which epoch a user has asked for by calling ``set_epoch`` on a sampler.

    sampler.set_epoch(3)            -> the sampler keeps an EpochRequest, numbered over all samplers
    EpochRequests(samplers).take()  -> 3, once; None if nobody has called set_epoch since

A loader counts its own epochs: it reads a sampler as a function of the epoch, and never looks at ``sampler.epoch``,
which moves when somebody iterates over the sampler. timm, Lightning and accelerate call ``set_epoch`` on the samplers
of a loader, so an explicit call still decides the loader's next epoch. Each loader asks for the calls that are new to
it. A sampler knows no loader, so any number of loaders share one.

Samplers of this library keep the request themselves (`sharded_loader.sampling.base.Sampler.set_epoch`). On a sampler of
another library ``set_epoch`` is replaced, on that object alone, by a function that notes the call and passes it on.

While a loader reads a sampler of another library, it tells the sampler its epoch, and the sampler may call its own
``set_epoch`` (accelerate's ``SeedableRandomSampler`` ends its epoch so). The user has not made those calls: what was
noted before is put back after each batch. This is not done by a flag that says "reading now": a Ctrl-C could leave such
a flag set, and every later call of the user's would be ignored.

What can go wrong: a sampler of another library with ``__slots__`` cannot be listened to: call ``loader.set_epoch``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

_numbers = itertools.count(1)


class EpochRequest(NamedTuple):
    """One call of ``set_epoch``.

    Attributes:
        number: greater than those of all calls before in this process.
        epoch: the argument.
    """

    number: int
    epoch: int


def note(epoch: int) -> EpochRequest:
    """What a sampler keeps after ``set_epoch(epoch)``."""
    return EpochRequest(next(_numbers), epoch)


def noted(samplers: Iterable[Any]) -> list[tuple[Any, EpochRequest | None]]:
    """The calls of ``set_epoch`` that are noted of some samplers, for `put_back`."""
    holders = [_known_holder(one) for one in samplers]
    return [(holder, holder.epoch_request) for holder in holders if holder is not None]


def put_back(before: list[tuple[Any, EpochRequest | None]]) -> None:
    """Forget the calls of ``set_epoch`` that came since `noted`: a loader has made them."""
    for holder, request in before:
        holder.epoch_request = request


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
    """Where the calls of ``set_epoch`` on a sampler are noted from now on; None if they cannot be noted."""
    known, method = _known_holder(sampler), getattr(sampler, "set_epoch", None)
    if known is not None or not callable(method):
        return known
    listener = _Listener(method, getattr(sampler, "epoch", None))
    try:
        sampler.set_epoch = listener
    except AttributeError:
        return None
    return listener


def _known_holder(sampler: Any) -> Any:
    """Where the calls of ``set_epoch`` on a sampler are noted; None if nobody has asked for it yet."""
    method = getattr(sampler, "set_epoch", None)
    if isinstance(method, _Listener):
        return method
    return sampler if getattr(getattr(type(sampler), "set_epoch", None), "keeps_request", False) else None


class _Listener:
    """Stands in for the ``set_epoch`` of a sampler of another library, which may have been called before."""

    def __init__(self, set_epoch: Callable[[int], Any], epoch: Any) -> None:
        self._set_epoch = set_epoch
        self.epoch_request = note(epoch) if isinstance(epoch, int) and epoch > 0 else None

    def __call__(self, epoch: int) -> Any:
        answer = self._set_epoch(epoch)
        self.epoch_request = note(epoch)
        return answer
