"""Calls of ``set_epoch`` on samplers and datasets, as seen by the loaders that use them.

Each object stores its last call as ``epoch_request``, so several loaders can listen to one object. This library's
samplers record each call themselves. For datasets and samplers of other libraries, a `_RecordingSetEpoch` replaces
``set_epoch`` of the class, so copies and pickles hold nothing of the original. A loader's own calls are not recorded;
see `data.seeding.epoch_setter`. An object with only ``__slots__`` cannot store its last call: a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from sharded_loader.base.described import an

EpochRequest = tuple[int, int]
"""One call of ``set_epoch``: a number that increases with each call in this process, and the epoch."""

_numbers = count(1)


def new_request(epoch: int) -> EpochRequest:
    """Return the ``epoch_request`` that a sampler stores after ``set_epoch(epoch)``."""
    return next(_numbers), epoch


def last_requests(samplers: Iterable[object]) -> list[tuple[Any, EpochRequest | None]]:
    """Return the samplers that record calls of ``set_epoch``, each with its last call."""
    return [(sampler, sampler.epoch_request) for sampler in samplers if hasattr(sampler, "epoch_request")]


def restore_requests(before: list[tuple[Any, EpochRequest | None]]) -> None:
    """Discard the calls made since `last_requests`: they were a loader's own."""
    for sampler, request in before:
        if sampler.epoch_request is not request:
            _store(sampler, request)


def _store(sampler: Any, request: EpochRequest | None) -> None:
    try:
        sampler.epoch_request = request
    except (AttributeError, TypeError):  # a frozen dataclass
        object.__setattr__(sampler, "epoch_request", request)


class _RecordingSetEpoch:
    """Descriptor in place of a class's ``set_epoch``: calls the original method, and records the call."""

    def __init__(self, method: object) -> None:
        self._method = method

    def __get__(self, obj: object, kind: type) -> Any:
        method = vars(obj).get("set_epoch") if self._belongs_to(obj) else None  # not for super()
        if method is None and self._method is not None:
            method = self._method.__get__(obj, kind) if hasattr(self._method, "__get__") else self._method
        if method is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'set_epoch'")
        if obj is None:
            return method
        recording: Any = partial(_call_and_record, obj, method)
        recording.is_recorded, recording.unrecorded = True, partial(_call_unrecorded, obj, method)
        return recording

    def _belongs_to(self, obj: object) -> bool:
        methods = (vars(kind)["set_epoch"] for kind in type(obj).__mro__ if "set_epoch" in vars(kind))
        return next(methods, None) is self and hasattr(obj, "__dict__")

    def __set__(self, obj: object, method: object) -> None:
        vars(obj)["set_epoch"] = method

    def __delete__(self, obj: object) -> None:
        del vars(obj)["set_epoch"]


def _start_recording(sampler: object) -> bool:
    """Record calls of ``set_epoch`` on a sampler from now on; False if it has no such method. Raises TypeError."""
    method = getattr(sampler, "set_epoch", None)
    if not callable(method):
        return False
    try:
        if "epoch_request" not in vars(sampler):
            # An epoch above 0 means an earlier call, except in a copy of a sampler that was recorded.
            epoch = None if hasattr(type(sampler), "epoch_request") else getattr(sampler, "epoch", None)
            _store(sampler, new_request(epoch) if isinstance(epoch, int) and epoch > 0 else None)
        if getattr(method, "is_recorded", False) is not True:
            kind: Any = next((one for one in type(sampler).__mro__ if "set_epoch" in vars(one)), type(sampler))
            kind.set_epoch = _RecordingSetEpoch(vars(kind).get("set_epoch"))
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"set_epoch of {an(type(sampler))} cannot be heard: the object takes no attributes, as with __slots__. "
            f"Make it of a subclass without __slots__: class Heard({type(sampler).__name__}): pass"
        ) from error
    return True


def _call_and_record(sampler: object, method: Callable[[int], object], epoch: int) -> Any:
    """Call a class's own ``set_epoch``, and record the call."""
    answer = method(epoch)
    with suppress(AttributeError, TypeError):  # no loader listens to objects that cannot store it
        _store(sampler, new_request(epoch))
    return answer


def _call_unrecorded(sampler: object, method: Callable[[int], object], epoch: int) -> Any:
    """Call ``set_epoch`` for a loader. Calls that a super class records meanwhile are discarded."""
    before = last_requests([sampler])
    try:
        return method(epoch)
    finally:
        restore_requests(before)


class EpochRequests:
    """The calls of ``set_epoch`` that one loader has not seen yet.

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

    def listen(self, samplers: Iterable[object]) -> None:
        """Listen to these samplers and datasets from now on, and to no others."""
        before = {id(sampler): request for sampler, request in self._seen}
        self._seen = [(sampler, before.get(id(sampler))) for sampler in samplers if _start_recording(sampler)]

    def take(self) -> int | None:
        """Return the epoch of the latest unseen call, or None."""
        calls: list[tuple[EpochRequest | None, Any]] = [(sampler.epoch_request, seen) for sampler, seen in self._seen]
        # Compare by identity: a pickled sampler brings a number that another process has counted.
        new = [call for call, seen in calls if call is not None and call is not seen]
        if not new:
            return None
        self.drop()
        return max(new)[1]

    def drop(self) -> None:
        self._seen = last_requests(sampler for sampler, _ in self._seen)
