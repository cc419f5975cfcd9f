"""Samplers of other libraries: what is one, how an epoch of it is started, and how it is left as it was.

    check_sampler(sampler)                rejects what cannot be a sampler
    nested(sampler)                       the sampler and those inside it
    start(sampler, epoch, seed, state)    an iterator over the epoch, under the conditions below
    with undisturbed(samplers):           read them; afterwards they are what they were before
    EpochRequests(samplers).take()        the epoch that the user has asked for by ``sampler.set_epoch``; None: no call

An epoch is started, with its first item, under these conditions:

    1. ``set_epoch(epoch)`` is called on the sampler and on those inside it (``.sampler``, ``.batch_sampler``),
    2. a torch ``generator`` that it carries is replaced by one that is seeded by (seed, its own seed, epoch),
    3. ``random``, NumPy and torch are seeded by (seed, epoch);

and what was there before is put back. The first item belongs to the start because a generator function runs nothing
before it. `undisturbed` keeps the attributes of each sampler, and the states of random generators and the contents of
lists, dicts, sets and arrays that are attributes.

A loader counts its own epochs: it reads a sampler as a function of the epoch, and never looks at ``sampler.epoch``,
which moves when somebody iterates over the sampler. timm, Lightning and accelerate call ``set_epoch`` on the samplers
of a loader, so an explicit call still decides the loader's next epoch. Each loader asks for the calls that are new to
it (`EpochRequests`). A sampler knows no loader, so any number of loaders share one. Samplers of this library keep the
request themselves. On a sampler of another library ``set_epoch`` is replaced, on that object alone, by a function that
notes the call and passes it on.

While a loader reads a sampler of another library, it tells the sampler its epoch, and the sampler may call its own
``set_epoch`` (accelerate's ``SeedableRandomSampler`` ends its epoch so). The user has not made those calls: what was
noted before is put back after each batch. This is not done by a flag that says "reading now": a Ctrl-C could leave such
a flag set, and every later call of the user's would be ignored.

What can go wrong: a sampler that draws from global generators after its first item, or counts epochs by itself, is no
pure function and nobody can make it one. An iterator that is its own ``iter()`` serves one epoch: it is rejected where
it can be recognised, and an error when it comes up empty otherwise. `undisturbed` cannot see what a sampler keeps
elsewhere (a file, an object inside it, a compiled class). A sampler with ``__slots__`` cannot be listened to: call
``loader.set_epoch``.
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, count, islice
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.global_generators import seed_torch, seeded_globals
from sharded_loader.rng import derive_key

_ONE_SHOT = (
    "an iterator can be read once, but every epoch reads the sampler anew: pass a list, or a class with __iter__"
)

# Where the classes of iterators live that are known to be their own ``iter()`` and nothing else.
_PYTHONS_OWN = ("builtins", "itertools")

_numbers = count(1)

MAX_NESTING = 16
"""Samplers inside samplers; more than a handful is a cycle."""

MOST_BYTES = 64 << 20
"""Arrays above this are data, not an order that is shuffled in place: they are not copied. Lists: items of 8 bytes."""


def check_sampler(sampler: Any, name: str = "sampler") -> None:
    """Reject what cannot be a sampler.

    Raises:
        TypeError: for something that is not iterable, and for generators and other one-shot iterators.
    """
    method = getattr(type(sampler), "__iter__", None)
    if method is None and not hasattr(type(sampler), "__getitem__"):
        raise TypeError(
            f"{name} must be a sampler or another iterable, got {sampler!r} of type {type(sampler).__name__}: "
            "pass a sampler, a list, or an object with __iter__ and __len__"
        )
    built_in = isinstance(sampler, Iterator) and type(sampler).__module__ in _PYTHONS_OWN
    if built_in or isinstance(sampler, types.GeneratorType) or method is Iterator.__iter__:
        raise TypeError(f"{name} is a one-shot iterator of type {type(sampler).__name__}: {_ONE_SHOT}")


def nested(sampler: Any) -> Iterator[Any]:
    """The sampler and those inside it (``.sampler``, ``.batch_sampler``), outermost first."""
    for _ in range(MAX_NESTING):
        yield sampler
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            inner = getattr(sampler, "batch_sampler", None)
        if not hasattr(type(inner), "__iter__"):
            return
        sampler = inner


def tell_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` on a sampler and on those inside it: torch's BatchSampler passes nothing on."""
    for one in nested(sampler):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def start(sampler: Any, epoch: int, seed: int, state: Any = None) -> tuple[Iterator[Any], Any]:
    """A foreign sampler's items, from where its own ``state`` says, and what can tell that state (or None)."""
    # set_epoch comes under the lock of seeded_globals too: two threads must not start one sampler at once.
    with seeded_globals(derive_key(seed, "foreign sampler", epoch)), _own_generators(sampler, epoch, seed):
        before = noted(nested(sampler))
        try:
            tell_epoch(sampler, epoch)
        finally:
            put_back(before)
        if state is not None and is_stateful(sampler):
            sampler.load_state_dict(state)
        try:
            items = iter(sampler)
        except StopIteration as error:  # whoever asks for the first batch would take it for the end of the epoch
            raise RuntimeError(f"the sampler, a {type(sampler).__name__}, raised StopIteration in __iter__") from error
        stateful: Any = sampler if is_stateful(sampler) else items if is_stateful(items) else None
        if state is not None and stateful is not None and stateful is not sampler:
            stateful.load_state_dict(state)
        is_itself = items is sampler
        if type(items).__module__ not in _PYTHONS_OWN:
            items = _nexts(items)
        first = list(islice(items, 1))
    if not first and is_itself and state is None and length_or(sampler, 1) > 0:
        raise TypeError(f"the sampler, a {type(sampler).__name__}, has no items left for epoch {epoch}: {_ONE_SHOT}")
    return chain(first, items), stateful


def _nexts(items: Iterator[Any]) -> Iterator[Any]:
    """The items of an iterator whose ``__iter__`` starts again: itertools would call it."""
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def is_stateful(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


@contextmanager
def _own_generators(sampler: Any, epoch: int, seed: int) -> Iterator[None]:
    """Exchange torch generators that foreign samplers carry (``RandomSampler(..., generator=g)``).

    ``g`` advances with every epoch, so the order of an epoch would depend on history. The seed that ``g``
    was given still counts.
    """
    exchanged = []
    try:
        for one in nested(sampler):
            generator: Any = getattr(one, "generator", None)
            if type(generator).__module__ == "torch._C" and hasattr(generator, "initial_seed"):
                key = derive_key(seed, "foreign generator", generator.initial_seed(), epoch)
                one.generator = type(generator)(device=generator.device)
                seed_torch(one.generator, key)
                exchanged.append((one, generator))
        yield
    finally:
        for one, generator in exchanged:
            one.generator = generator


def length_or(sampler: Any, default: int) -> int:
    try:
        return len(sampler)
    except Exception:
        return default


@contextmanager
def undisturbed(samplers: Iterable[Any], but: Any = None) -> Iterator[None]:
    """Inside, other libraries' samplers may be read; afterwards they are what they were before.

    Args:
        samplers: those of other libraries. Samplers of this library need nothing: they are pure functions.
        but: an object that is not copied where a sampler refers to it: the dataset.

    Example:
        >>> class Counting:
        ...     count = 0
        ...     def __iter__(self): self.count += 1; return iter([self.count])
        >>> sampler = Counting()
        >>> with undisturbed([sampler]):
        ...     print(list(sampler), list(sampler))
        [1] [2]
        >>> list(sampler)
        [1]
    """
    undos: list[Callable[[], Any]] = []
    for sampler in samplers:
        attributes = getattr(sampler, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        undos.append(partial(_set_attributes, attributes, dict(attributes)))
        undos += [undo for value in attributes.values() if value is not but and (undo := _kept(value)) is not None]
    try:
        yield
    finally:
        for undo in undos:
            undo()


def _set_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


def _kept(value: Any) -> Callable[[], Any] | None:
    """What puts the value back into the state that it is in now; None if it is nothing that changes."""
    try:
        if isinstance(value, random.Random):
            return partial(value.setstate, value.getstate())
        if isinstance(value, np.random.RandomState):
            return partial(value.set_state, value.get_state())
        if isinstance(value, np.random.Generator):
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    except NotImplementedError:  # random.SystemRandom has no state
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if type(value) is np.ndarray and value.nbytes <= MOST_BYTES and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if type(value) in (list, dict, set, deque) and len(value) * 8 <= MOST_BYTES:
        return partial(_refill, value, value.copy())
    return None


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(before)


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


def keeps_request(method: Any) -> Any:
    """Mark a ``set_epoch`` that keeps its calls in ``epoch_request``: `EpochRequests` need not listen there."""
    method.keeps_request = True
    return method


class EpochRequests:
    """The calls of ``set_epoch`` on some samplers that one loader has not seen yet.

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
