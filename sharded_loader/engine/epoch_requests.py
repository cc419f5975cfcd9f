"""The calls of ``set_epoch`` that a loader has to hear: on samplers, and on a dataset.

    requests.listen([sampler, dataset])     from now on
    requests.take() -> 5, then None         the epoch of the newest call that this loader has not seen
    requests.drop()                         the loader itself was given an epoch

Each object keeps its last call as ``epoch_request``, so several loaders may listen to one. Samplers of this library
note each call. On a dataset, on those inside it, and on a sampler of another library, ``set_epoch`` is replaced by a
function that notes the call and passes it on. Only that object has it: copies and pickles have their own method. A
loader's own calls go past that function; see `data.inspection.set_epoch_of`.

What can go wrong: an object with ``__slots__`` has no room for that. A warning says that its calls cannot be heard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from sharded_loader.base.described import an
from sharded_loader.base.notices import warn
from sharded_loader.base.private import default_state


class EpochRequest(NamedTuple):
    """One call of ``set_epoch``: its number is greater than those of all calls before in this process."""

    number: int
    epoch: int


_numbers = count(1)


def note(epoch: int) -> EpochRequest:
    """What a sampler keeps after ``set_epoch(epoch)``."""
    return EpochRequest(next(_numbers), epoch)


def noted(samplers: Iterable[Any]) -> list[tuple[Any, EpochRequest | None]]:
    """Samplers that note the calls to ``set_epoch``, each with its last call."""
    return [(sampler, sampler.epoch_request) for sampler in samplers if hasattr(sampler, "epoch_request")]


def put_back(before: list[tuple[Any, EpochRequest | None]]) -> None:
    """Forget the calls to ``set_epoch`` that came since `noted`: a loader has made them."""
    for sampler, request in before:
        if sampler.epoch_request is not request:
            sampler.epoch_request = request


def _notes_calls(sampler: Any) -> bool:
    """Whether the calls to ``set_epoch`` on a sampler are noted as its ``epoch_request``, from now on."""
    method = getattr(sampler, "set_epoch", None)
    if callable(method) and not getattr(method, "is_noted", False):
        epoch, known = getattr(sampler, "epoch", None), getattr(sampler, "epoch_request", None) or EpochRequest(0, 0)
        # Of a method of its class not the bound one: a copy that is unpickled cannot be asked for it until it is whole.
        passed = None if getattr(method, "__self__", None) is sampler else method
        listener: Any = partial(_set_epoch, sampler, passed)
        listener.is_noted, listener.unnoted = True, partial(_pass_on, sampler, passed)
        try:  # another epoch than 0, or than that of the object that it is a copy of, is a call that came before
            if isinstance(epoch, int) and not known.number and 0 < epoch != known.epoch:
                known = note(epoch)
            sampler.epoch_request = known if known.number else None
            sampler.set_epoch, sampler.__getstate__ = listener, partial(_state_of, sampler, passed)
        except (AttributeError, TypeError):
            warn(
                f"set_epoch of {an(type(sampler))} cannot be heard: the object takes no attributes, as with __slots__. "
                "The loader counts the epochs by itself: to choose one, call set_epoch of the loader"
            )
            return False
    return callable(method)


def _state_of(sampler: Any, method: Callable[[int], Any] | None) -> Any:
    """What a copy or a pickle has of an object whose calls are noted: its own method, and the epoch up to now."""
    state = getattr(type(sampler), "__getstate__", default_state)(sampler)
    parts = state if isinstance(state, tuple) else (state,)
    if not (parts and isinstance(parts[0], dict) and "__getstate__" in parts[0]):  # the class says what its state is
        return state
    found = {name: value for name, value in parts[0].items() if name not in ("__getstate__", "set_epoch")}
    found["epoch_request"] = sampler.epoch_request or EpochRequest(0, getattr(sampler, "epoch", 0))
    found.update({} if method is None else {"set_epoch": method})
    return (found, *parts[1:]) if isinstance(state, tuple) else found


def _set_epoch(sampler: Any, method: Callable[[int], Any] | None, epoch: int) -> Any:
    """Stands in for the ``set_epoch`` of a dataset, or of a sampler of another library."""
    answer = _pass_on(sampler, method, epoch)
    sampler.epoch_request = note(epoch)
    return answer


def _pass_on(sampler: Any, method: Callable[[int], Any] | None, epoch: int) -> Any:
    return type(sampler).set_epoch(sampler, epoch) if method is None else method(epoch)


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

    def listen(self, samplers: Iterable[Any]) -> None:
        """Listen to these samplers, and to datasets inside, from now on. Calls on others do not count any more."""
        before = {id(sampler): request for sampler, request in self._seen}
        found = list(samplers)
        for one in found:  # it grows
            found += getattr(one, "_inside", ()) if type(one).__module__.startswith("sharded_loader.data.") else ()
        self._seen = [(sampler, before.get(id(sampler))) for sampler in found if _notes_calls(sampler)]

    def take(self) -> int | None:
        """The epoch of the latest call that is new; None if there is none."""
        calls: list[tuple[EpochRequest | None, Any]] = [(sampler.epoch_request, seen) for sampler, seen in self._seen]
        # By identity: a sampler that was pickled brings a number that another process gave.
        new = [call for call, seen in calls if call is not None and call is not seen]
        if not new:
            return None
        self.drop()
        return max(new).epoch

    def drop(self) -> None:
        """The calls up to now do not count: the loader itself was given an epoch."""
        self._seen = noted(sampler for sampler, _ in self._seen)
