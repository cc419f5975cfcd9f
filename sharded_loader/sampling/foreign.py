"""Any sampler at all, read as if it were a pure function of (seed, epoch).

    iter_epoch(sampler, epoch, seed, start)    the items of that epoch, from that place
    len_epoch(sampler, epoch)                  how many there are

*Own* samplers (a class that provides ``iter_epoch``) are asked directly. All others are *foreign*: torch's
samplers, plain iterables, lists, and subclasses of `Sampler` that override ``__iter__`` alone. A foreign
sampler is started, with its first item, under these conditions:

    1. ``set_epoch(epoch)`` is called on it and on the samplers inside it (``.sampler``, ``.batch_sampler``),
    2. a ``generator`` of torch's that it carries is exchanged for one seeded by (seed, its own seed, epoch),
    3. ``random``, NumPy and torch are seeded by (seed, epoch);

and what was there before is put back. The first item belongs to the start because a generator function
runs nothing before it.

What can go wrong: a foreign sampler that draws from global generators after its first item, or counts
epochs by itself, is no pure function and nobody can make it one. An iterator that is its own ``iter()``
serves one epoch: refused where it can be recognised, an error when it comes up empty otherwise.
"""

from __future__ import annotations

import copy
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, ClassVar

import numpy as np

from sharded_loader.global_generators import seed_torch, seeded_globals
from sharded_loader.rng import derive_key
from sharded_loader.sampling.base import Indices, Item_co, Sampler, check_start, keeps_request, resolve_seed
from sharded_loader.sampling.epochs import noted, put_back
from sharded_loader.sampling.tracing import current_trace

_ONE_SHOT = (
    "an iterator can be read once, but every epoch reads the sampler anew: pass a list, or a class with __iter__"
)

# Where the classes of iterators live that are known to be their own ``iter()`` and nothing else.
_PYTHONS_OWN = ("builtins", "itertools")

# Samplers inside samplers, outermost first; more than a handful is a cycle.
_MAX_NESTING = 16


def is_own(sampler: Any) -> bool:
    """Whether the sampler gives pure access to its epochs (``iter_epoch`` and ``len_epoch``).

    A subclass that overrides ``__iter__`` means that ``__iter__`` to be used, whatever it inherits.
    """
    provides = min(_depth(sampler, "iter_epoch"), _depth(sampler, "chunks"))
    return provides <= _depth(sampler, "__iter__") and hasattr(sampler, "len_epoch")


def has_chunks(sampler: Any) -> bool:
    """Whether ``sampler.chunks(epoch, start)`` gives the items of its epochs as int64 arrays."""
    return (
        is_own(sampler)
        and _depth(sampler, "chunks") <= _depth(sampler, "iter_epoch")
        and _depth(sampler, "chunks") < _NEVER
        and getattr(sampler, "chunkable", True)
    )


_NEVER = 1 << 30


def _depth(sampler: Any, method: str) -> int:
    """How many classes up the method is defined; `Sampler`'s own placeholders do not count as definitions."""
    for depth, cls in enumerate(type(sampler).__mro__):
        if method in vars(cls):
            return _NEVER if cls is Sampler and method != "__iter__" else depth
    return _NEVER


def check_sampler(sampler: Any, name: str = "sampler") -> None:
    """Refuse what cannot be a sampler.

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


def iter_epoch(sampler: Any, epoch: int, seed: int, start: int = 0) -> Iterator[Any]:
    """The items of one epoch of any sampler, from position ``start`` on.

    Args:
        sampler: an own or a foreign sampler, or any iterable that can be read again and again.
        epoch: which epoch, from 0.
        seed: seeds a foreign sampler, together with the epoch. Own samplers have theirs.
        start: how many items to leave out. Own index samplers jump, foreign samplers are read and skipped.

    Returns:
        An iterator. A foreign sampler has been started when this returns.

    Raises:
        TypeError: for an iterator that an earlier epoch has used up.

    Example:
        >>> import random
        >>> class Shuffle:
        ...     def __iter__(self): return iter(random.sample(range(100), 3))
        >>> list(iter_epoch(Shuffle(), 1, seed=7)) == list(iter_epoch(Shuffle(), 1, seed=7))
        True
    """
    check_start(start)
    if is_own(sampler):
        items: Iterator[Any] = sampler.iter_epoch(epoch, start)
        return items
    trace = current_trace()
    if trace is not None and trace.follows(sampler):
        return trace.read(epoch, start, lambda e, state: _start(sampler, e, seed, state), _length_or(sampler, -1))
    items, _ = _start(sampler, epoch, seed)
    return islice(items, start, None) if start else items


def _start(sampler: Any, epoch: int, seed: int, state: Any = None) -> tuple[Iterator[Any], Any]:
    """A foreign sampler's items, from where its own ``state`` says, and what can tell that state (or None)."""
    # set_epoch comes under the lock of seeded_globals too: two threads must not start one sampler at once.
    with seeded_globals(derive_key(seed, "foreign sampler", epoch)), _own_generators(sampler, epoch, seed):
        before = noted(nested(sampler))
        try:
            tell_epoch(sampler, epoch)
        finally:
            put_back(before)
        if state is not None and _is_stateful(sampler):
            sampler.load_state_dict(state)
        try:
            items = iter(sampler)
        except StopIteration as error:  # whoever asks for the first batch would take it for the end of the epoch
            raise RuntimeError(f"the sampler, a {type(sampler).__name__}, raised StopIteration in __iter__") from error
        stateful: Any = sampler if _is_stateful(sampler) else items if _is_stateful(items) else None
        if state is not None and stateful is not None and stateful is not sampler:
            stateful.load_state_dict(state)
        is_itself = items is sampler
        if type(items).__module__ not in _PYTHONS_OWN:
            items = _nexts(items)
        first = list(islice(items, 1))
    if not first and is_itself and state is None and _length_or(sampler, 1) > 0:
        raise TypeError(f"the sampler, a {type(sampler).__name__}, has no items left for epoch {epoch}: {_ONE_SHOT}")
    return chain(first, items), stateful


def _nexts(items: Iterator[Any]) -> Iterator[Any]:
    """The items of an iterator whose ``__iter__`` begins anew: itertools would call it again."""
    while True:
        try:
            item = next(items)
        except StopIteration:
            return
        yield item


def _is_stateful(one: Any) -> bool:
    return callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None))


def tell_epoch(sampler: Any, epoch: int) -> None:
    """Call ``set_epoch`` on a sampler and on those inside it: torch's BatchSampler passes nothing on."""
    for one in nested(sampler):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)


def nested(sampler: Any) -> Iterator[Any]:
    """The sampler and those inside it (``.sampler``, ``.batch_sampler``), outermost first."""
    for _ in range(_MAX_NESTING):
        yield sampler
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            inner = getattr(sampler, "batch_sampler", None)
        if not hasattr(type(inner), "__iter__"):
            return
        sampler = inner


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


def len_epoch(sampler: Any, epoch: int) -> int:
    """How many items an epoch of any sampler has.

    Raises:
        TypeError: if a foreign sampler has no ``__len__``, or one that raises: whatever it raises means that the
            length is unknown.

    Example:
        >>> len_epoch([4, 5, 6], 0)
        3
    """
    if is_own(sampler):
        length: int = sampler.len_epoch(epoch)
        return length
    if not hasattr(type(sampler), "__len__"):
        raise TypeError(
            f"the sampler, a {type(sampler).__name__}, has no length: give its class a __len__ that returns the "
            "number of items in an epoch"
        )
    try:
        return _foreign_length(sampler, epoch)
    except Exception as error:  # other libraries raise what they like where a length is unknown
        cause = f"its __len__ raised {type(error).__name__}: {error}"
        raise TypeError(f"the sampler, a {type(sampler).__name__}, has no length: {cause}") from error


def _foreign_length(sampler: Any, epoch: int) -> int:
    if not isinstance(sampler, Sampler):
        return len(sampler)
    # A subclass of ours that overrides __iter__: its inherited length is that of the pending epoch.
    pending = sampler.epoch
    try:
        sampler.epoch = epoch
        return len(sampler)
    finally:
        sampler.epoch = pending


def _length_or(sampler: Any, default: int) -> int:
    try:
        return len(sampler)
    except Exception:
        return default


def foreign_seed(sampler: Any, seed: Any) -> int:
    """The seed that a wrapper of this sampler keeps: drawn only where the sampler may use it."""
    if seed is None and (is_own(sampler) or isinstance(sampler, Sequence | np.ndarray)):
        return 0
    return resolve_seed(seed)


def plain_index(item: Any) -> Any:
    """A NumPy or tensor integer as an int; anything else (a key of the user's) as it is."""
    if type(item) is int:
        return item
    try:
        return operator.index(item)
    except TypeError:
        return item


class WrapperSampler(Sampler[Item_co]):
    """Base class of samplers over another sampler: they share one epoch.

    `epoch` is the inner sampler's where that is one of ours, so ``set_epoch`` may be called on either of
    them, as Lightning, accelerate and timm do, and iterating over the wrapper is iterating over both.

    Args:
        sampler: any sampler.
        seed: starts a foreign ``sampler`` (see the module); None draws one if it is needed.
        name: what error messages call ``sampler``.
    """

    def __init__(self, sampler: Iterable[Any], seed: int | None, name: str) -> None:
        check_sampler(sampler, name)
        self._inner = sampler
        self._shares_epoch = isinstance(sampler, Sampler) and is_own(sampler)
        self.seed: int = foreign_seed(sampler, seed)

    @property
    def inner(self) -> Any:
        """The sampler that this one wraps."""
        return self._inner

    def over(self, inner: Any) -> Any:
        """A copy of this sampler that wraps another one."""
        twin = copy.copy(self)
        twin._inner = inner
        for name in ("sampler", "batch_sampler"):
            if name in vars(twin):
                setattr(twin, name, inner)
        return twin

    @property
    def epoch(self) -> int:
        return self._inner.epoch if self._shares_epoch else self._epoch  # type: ignore[attr-defined]

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self._shares_epoch:
            self._inner.epoch = epoch  # type: ignore[attr-defined]
        else:
            Sampler.epoch.__set__(self, epoch)  # type: ignore[attr-defined]

    @keeps_request
    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        tell_epoch(self._inner, self.epoch)

    def _shown_seed(self) -> int | None:
        return None if find_foreign(self) is None else self.seed

    # True where positions are a rank's, and ``offset`` counts in the global order that ranks share.
    deals: ClassVar[bool] = False

    def _inner_items(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Any]:
        """Items of the inner sampler: without the first ``offset`` of the global order, and ``start`` more."""
        if offset and getattr(self._inner, "deals", False):
            items: Iterator[Any] = self._inner.iter_epoch(epoch, start, offset=offset)  # type: ignore[attr-defined]
            return items
        return iter_epoch(self._inner, epoch, self.seed, start + offset)

    def _inner_length(self, epoch: int, offset: int = 0) -> int:
        if offset and getattr(self._inner, "deals", False):
            length: int = self._inner.len_epoch(epoch, offset=offset)  # type: ignore[attr-defined]
            return length
        return max(len_epoch(self._inner, epoch) - offset, 0)

    def _inner_chunks(self, epoch: int, start: int = 0, offset: int = 0) -> Iterator[Indices]:
        chunks: Callable[..., Iterator[Indices]] = self._inner.chunks  # type: ignore[attr-defined]
        if offset and getattr(self._inner, "deals", False):
            return chunks(epoch, start, offset=offset)
        return chunks(epoch, start + offset)


def with_seeds(sampler: Any, seed_of: Callable[[Any], int | None]) -> Any:
    """The sampler with other seeds. What the user gave is not changed, because other loaders may read it too.

    Args:
        sampler: any sampler.
        seed_of: the new seed of a sampler; None: its own.

    Returns:
        The sampler itself, or a copy where it or one inside it has got another seed. Only a sampler of ours inside a
        sampler of another library is changed: nobody knows how that library's sampler is copied.
    """
    seed, given = seed_of(sampler), sampler
    if isinstance(sampler, WrapperSampler) and is_own(sampler):
        inner = with_seeds(sampler.inner, seed_of)
        if inner is not sampler.inner:
            sampler = sampler.over(inner)
    else:
        for one in islice(nested(sampler), 1, None):
            if (other := seed_of(one)) is not None:
                one.seed = other
    if seed is not None:
        sampler = copy.copy(sampler) if sampler is given else sampler
        sampler.seed = seed
    return sampler


def find_foreign(sampler: Any) -> Any:
    """The foreign sampler at the end of a chain of wrappers, or None."""
    for _ in range(_MAX_NESTING):
        if not (isinstance(sampler, WrapperSampler) and is_own(sampler)):
            break
        sampler = sampler.inner
    return None if is_own(sampler) else sampler
