"""The calls of ``set_epoch`` that a loader has to hear: on samplers, and on a dataset.

    requests.listen([sampler, dataset])     from now on
    requests.take() -> 5, then None         the epoch of the newest call that this loader has not seen
    requests.drop()                         the loader itself was given an epoch

Each object keeps its last call as ``epoch_request``, so several loaders may listen to one. Samplers of this library
note each call. For a dataset, those inside it, and a sampler of another library, the ``set_epoch`` of the class is
replaced by a `_Noted`, which calls it and notes the call. So no copy or pickle of an object has anything of its
original's. A loader's own calls are not noted; see `data.seeding.set_epoch_of`.

What can go wrong: an object with only ``__slots__`` has no room for its last call, which is a TypeError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import Any

from sharded_loader.base.described import an

EpochRequest = tuple[int, int]
"""One call of ``set_epoch``: a number that is greater than those of all calls before in this process, and the epoch."""

_numbers = count(1)


def note(epoch: int) -> EpochRequest:
    """What a sampler keeps after ``set_epoch(epoch)``."""
    return next(_numbers), epoch


def noted(samplers: Iterable[object]) -> list[tuple[Any, EpochRequest | None]]:
    """Samplers that note the calls to ``set_epoch``, each with its last call."""
    return [(sampler, sampler.epoch_request) for sampler in samplers if hasattr(sampler, "epoch_request")]


def put_back(before: list[tuple[Any, EpochRequest | None]]) -> None:
    """Forget the calls to ``set_epoch`` that came since `noted`: a loader has made them."""
    for sampler, request in before:
        if sampler.epoch_request is not request:
            _keep(sampler, request)


def _keep(sampler: Any, request: EpochRequest | None) -> None:
    try:
        sampler.epoch_request = request
    except (AttributeError, TypeError):  # a frozen dataclass
        object.__setattr__(sampler, "epoch_request", request)


class _Noted:
    """The ``set_epoch`` of a class whose objects note the calls. It calls the method of the class or the object."""

    def __init__(self, method: object) -> None:
        self._method = method

    def __get__(self, obj: object, kind: type) -> Any:
        method = vars(obj).get("set_epoch") if self._is_of(obj) else None  # not for super()
        if method is None and self._method is not None:
            method = self._method.__get__(obj, kind) if hasattr(self._method, "__get__") else self._method
        if method is None:
            raise AttributeError(f"{kind.__name__!r} object has no attribute 'set_epoch'")
        if obj is None:
            return method
        listener: Any = partial(_set_epoch, obj, method)
        listener.is_noted, listener.unnoted = True, partial(_pass_on, obj, method)
        return listener

    def _is_of(self, obj: object) -> bool:
        found = (vars(one)["set_epoch"] for one in type(obj).__mro__ if "set_epoch" in vars(one))
        return next(found, None) is self and hasattr(obj, "__dict__")

    def __set__(self, obj: object, method: object) -> None:
        vars(obj)["set_epoch"] = method

    def __delete__(self, obj: object) -> None:
        del vars(obj)["set_epoch"]


def _notes_calls(sampler: object) -> bool:
    """Whether the calls to ``set_epoch`` on a sampler are noted as its ``epoch_request``, from now on.

    Raises:
        TypeError: the object has no room for it.
    """
    method = getattr(sampler, "set_epoch", None)
    if not callable(method):
        return False
    try:
        if "epoch_request" not in vars(sampler):
            # Another epoch than 0 is a call that came before, but not in a copy of an object that was listened to.
            epoch = None if hasattr(type(sampler), "epoch_request") else getattr(sampler, "epoch", None)
            _keep(sampler, note(epoch) if isinstance(epoch, int) and epoch > 0 else None)
        if getattr(method, "is_noted", False) is not True:
            kind: Any = next((one for one in type(sampler).__mro__ if "set_epoch" in vars(one)), type(sampler))
            kind.set_epoch = _Noted(vars(kind).get("set_epoch"))
    except (AttributeError, TypeError) as error:
        raise TypeError(
            f"set_epoch of {an(type(sampler))} cannot be heard: the object takes no attributes, as with __slots__. "
            f"Make it of a subclass without __slots__: class Heard({type(sampler).__name__}): pass"
        ) from error
    return True


def _set_epoch(sampler: object, method: Callable[[int], object], epoch: int) -> Any:
    """A call of ``set_epoch`` of a dataset, or of a sampler of another library."""
    answer = method(epoch)
    with suppress(AttributeError, TypeError):  # no loader listens to an object without room
        _keep(sampler, note(epoch))
    return answer


def _pass_on(sampler: object, method: Callable[[int], object], epoch: int) -> Any:
    """A call of a loader. What a super class notes of it does not count."""
    before = noted([sampler])
    try:
        return method(epoch)
    finally:
        put_back(before)


class EpochRequests:
    """The calls to ``set_epoch`` on some samplers, and on a dataset, that one loader has not seen yet.

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
        """Listen to these samplers and datasets from now on. Calls on others do not count any more."""
        before = {id(sampler): request for sampler, request in self._seen}
        self._seen = [(sampler, before.get(id(sampler))) for sampler in samplers if _notes_calls(sampler)]

    def take(self) -> int | None:
        """The epoch of the latest call that is new; None if there is none."""
        calls: list[tuple[EpochRequest | None, Any]] = [(sampler.epoch_request, seen) for sampler, seen in self._seen]
        # By identity: a sampler that was pickled brings a number that another process gave.
        new = [call for call, seen in calls if call is not None and call is not seen]
        if not new:
            return None
        self.drop()
        return max(new)[1]

    def drop(self) -> None:
        """The calls up to now do not count: the loader itself was given an epoch."""
        self._seen = noted(sampler for sampler, _ in self._seen)
