"""What every sampler of this library is: a pure function of (seed, epoch), plus a counter for its use alone.

    sampler.epoch_table(epoch)         pure: that epoch as a table of items by position       (loaders use this)
    sampler.iter_epoch(epoch, start)   pure: the same items, one after the other
    sampler.len_epoch(epoch)           pure: how many items that epoch has
    iter(sampler), len(sampler)        the epoch that is pending; each iter() moves `epoch` on by one
    sampler.set_epoch(epoch)           sets `epoch`, and the next epoch of the loaders that read the sampler
    repr(sampler)                      its class, its inner sampler, its length, what decides the order, its seed

In: lengths, keys, a seed. Out: Python ints (index samplers) or lists of them (batch samplers). A sampler owns no
threads, no files and no generator state. `epoch` is the only thing that changes in it, and loaders do not look at
`epoch`: they count their own epochs, so iterating over a sampler changes nothing in a loader.

What can go wrong: a subclass that overrides ``__iter__`` alone, as Gluon's users do, has no pure access. It still
works, as a sampler of another library does (`sharded_loader.sampling.foreign`). The repr of a subclass with broken
attributes shows ``?`` for what it cannot read.
"""

from __future__ import annotations

import copy
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from sharded_loader.rng import draw_seed
from sharded_loader.sampling.borrowing import EpochRequest, check_sampler, keeps_request, nested, note, tell_epoch
from sharded_loader.sampling.tables import Table

Item_co = TypeVar("Item_co", covariant=True)


def check_int(name: str, value: Any, least: int, advice: str, wrong_type: type[Exception] = TypeError) -> int:
    """``value`` as an int that is at least ``least``; otherwise an error that names the argument."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise wrong_type(f"{name} must be an integer, got {value!r} of type {type(value).__name__}: {advice}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}: {advice}")
    return number


class DrawnSeed(int):
    """A seed that nobody gave. A loader with a seed of its own uses its own instead: ranks must agree on it."""


def resolve_seed(seed: Any) -> int:
    """The given seed as an int, or one from torch's default generator (imports torch only then)."""
    if seed is None:
        return DrawnSeed(draw_seed())
    try:
        return operator.index(seed)
    except TypeError:
        raise TypeError(
            f"seed must be an integer or None, got {seed!r} of type {type(seed).__name__}: "
            "give an int, or None to draw one from torch's default generator"
        ) from None


SHOWN_WHOLE, SHOWN_FIRST = 6, 3
"""Arrays and lists up to this length are shown whole. Of longer ones the first few are shown, and the length."""

_limits = reprlib.Repr()
_limits.maxstring = _limits.maxother = _limits.maxlong = 60


class Described:
    """Gives a class a repr: its name, its length, and the attributes that decide what it does.

    Attributes:
        decided_by: what decides the order beside seed and length: what a state calls it, and the attribute, a number
            or an array.
        shown: what the repr shows instead, in the same form. None: ``decided_by``.
    """

    decided_by: ClassVar[tuple[tuple[str, str], ...]] = ()
    shown: ClassVar[tuple[tuple[str, str], ...] | None] = None

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        """The class, the inner sampler, the length, what decides the order, and the seed."""
        kind = type(self)
        parts = []
        if hasattr(kind, "inner"):
            parts.append(_or_unknown(lambda: brief(self.inner)))  # type: ignore[attr-defined]
        if hasattr(kind, "__len__"):
            parts.append(_or_unknown(lambda: f"length={len(self)}", "length=?"))  # type: ignore[arg-type]
        for name, attribute in kind.decided_by if kind.shown is None else kind.shown:
            parts.append(f"{name}={_or_unknown(partial(self._brief_attribute, attribute))}")
        if (seed := _or_unknown(lambda: brief(self._shown_seed()))) != "None":
            parts.append(f"seed={seed}")
        return f"{kind.__name__}({', '.join(parts)})"

    def _brief_attribute(self, attribute: str) -> str:
        return brief(getattr(self, attribute))

    def _shown_seed(self) -> Any:
        """The seed that decides what this yields; None if none does."""
        return getattr(self, "seed", None)


def _or_unknown(look: Callable[[], str], unknown: str = "?") -> str:
    """What is found, unless it cannot be told: a repr must not raise."""
    try:
        return look()
    except Exception:
        return unknown


def brief(value: Any) -> str:
    """A few words that tell a value, however large it is.

    Example:
        >>> brief(np.arange(1_000_000)), brief([5, 9]), brief({1: 2})
        ('[0, 1, 2, ... 1000000 in all]', '[5, 9]', '<dict of length 1>')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _limits.repr(value)
    if isinstance(value, Described):
        return repr(value)
    if (isinstance(value, np.ndarray) and value.ndim) or type(value) in (list, tuple, range):
        first = [brief(one) for one in value[: SHOWN_WHOLE if len(value) <= SHOWN_WHOLE else SHOWN_FIRST]]
        if len(value) > SHOWN_WHOLE:
            first.append(f"... {len(value)} in all")
        return f"[{', '.join(first)}]"
    package = type(value).__module__.partition(".")[0]
    name = type(value).__name__ if package == "builtins" else f"{package}.{type(value).__name__}"
    return _or_unknown(lambda: f"<{name} of length {len(value)}>", f"<{name}>")


class Sampler(Described, Generic[Item_co]):
    """Base class of all samplers: an order of indices, or of batches of indices, for each epoch.

    Two ways to write one:

    - As in Gluon, override ``__iter__`` and ``__len__``. The loader starts each epoch of it with the global
      random generators seeded by (seed, epoch).
    - Override `iter_epoch` and `len_epoch` with pure functions of the epoch. ``__iter__``, ``__len__`` and
      `set_epoch` then work by themselves, and the loader can jump into the middle of any epoch.

    Attributes:
        epoch: the epoch that the next ``iter()`` of the sampler begins, from 0. Loaders have an ``epoch`` of their own.
        seed: the integer that, with the epoch, decides the order; None where nothing is random.

    Example:
        >>> class Backwards(Sampler[int]):
        ...     def __iter__(self): return iter([2, 1, 0])
        ...     def __len__(self): return 3
        >>> list(Backwards())
        [2, 1, 0]

    Source of the idea: `mxnet.gluon.data.Sampler`.
    """

    # Class attributes, because Gluon's users write subclasses that never call ``super().__init__()``.
    _epoch: int = 0
    epoch_request: EpochRequest | None = None  # the last call of `set_epoch`, for the loaders
    seed: int | None = None

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = check_int("epoch", epoch, 0, "epochs count from 0", wrong_type=ValueError)

    @keeps_request
    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` begin this epoch, of the sampler and of every loader that reads it.

        Args:
            epoch: number of an epoch, from 0.

        Raises:
            ValueError: if ``epoch`` is negative or not an integer.

        Example:
            >>> class Backwards(Sampler[int]):
            ...     def iter_epoch(self, epoch, start=0): return iter([2, 1, 0][start:])
            ...     def len_epoch(self, epoch): return 3
            >>> sampler = Backwards()
            >>> sampler.set_epoch(5)
            >>> sampler.epoch
            5
        """
        self.epoch = epoch
        self.epoch_request = note(self.epoch)

    def __iter__(self) -> Iterator[Item_co]:
        # Not a generator function: seed and epoch are read now, not when the first item is asked for.
        epoch = self.epoch
        items = self.iter_epoch(epoch)
        self.epoch = epoch + 1
        return items

    def __len__(self) -> int:
        return self.len_epoch(self.epoch)

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[Item_co]:
        """The items of an epoch from position ``start`` on. Leaves `epoch` alone.

        Args:
            epoch: which epoch, from 0.
            start: how many of its items to leave out.

        Returns:
            An iterator over indices, or over lists of them. Seed and epoch are read when this is called, not at the
            first item: not a generator function.
        """
        check_int("start", start, 0, "it counts the items of the epoch to leave out")
        items: Iterator[Item_co] = self.epoch_table(epoch).items(int(start))
        return items

    def epoch_table(self, epoch: int) -> Table:
        """An epoch as a table: any of its items by position. Samplers of this library override this one.

        Seed and epoch are read when this is called. What the whole epoch needs (a shuffled array) is made now.
        """
        raise NotImplementedError(
            f"{type(self).__name__} has no order: override __iter__ and __len__, or iter_epoch and len_epoch"
        )

    def len_epoch(self, epoch: int) -> int:
        """How many items an epoch has. Leaves `epoch` alone.

        Args:
            epoch: which epoch, from 0; the number may differ from one to the next.
        """
        raise NotImplementedError(f"{type(self).__name__} has no length: override __len__, or len_epoch")


_NEVER = 1 << 30


def depth(sampler: Any, method: str) -> int:
    """How many classes up the method is defined; `Sampler`'s own placeholders do not count as definitions."""
    for depth, cls in enumerate(type(sampler).__mro__):
        if method in vars(cls):
            return _NEVER if cls is Sampler and method != "__iter__" else depth
    return _NEVER


def is_own(sampler: Any) -> bool:
    """Whether the sampler gives pure access to its epochs: `epoch_table` or `iter_epoch`, and `len_epoch`.

    A subclass that overrides ``__iter__`` means that ``__iter__`` to be used, whatever it inherits.
    """
    provides = min(depth(sampler, "iter_epoch"), depth(sampler, "epoch_table"))
    return provides <= depth(sampler, "__iter__") and hasattr(sampler, "len_epoch")


def foreign_seed(sampler: Any, seed: Any) -> int:
    """The seed that a wrapper of this sampler keeps: drawn only where the sampler may use it."""
    if seed is None and (is_own(sampler) or isinstance(sampler, Sequence | np.ndarray)):
        return 0
    return resolve_seed(seed)


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
        return self.seed if self._reads_foreign() else None

    def _reads_foreign(self) -> bool:
        inner: Any = self._inner
        return inner._reads_foreign() if isinstance(inner, WrapperSampler) and is_own(inner) else not is_own(inner)


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
