"""Base classes of samplers: pure functions of (seed, epoch), plus an epoch counter for standalone use.

    sampler.epoch_table(epoch)         pure: the epoch as a table of items by position; used by loaders
    sampler.iter_epoch(epoch, start)   pure: the same items as an iterator
    sampler.len_epoch(epoch)           pure: number of items in the epoch
    iter(sampler), len(sampler)        the pending epoch; each iter() increments `epoch`
    sampler.set_epoch(epoch)           sets `epoch`, and the next epoch of the loaders that read the sampler

A sampler owns no threads, files or generator state; only `epoch` changes. Loaders count their own epochs, so iterating
over a sampler does not affect them. An explicit ``set_epoch`` does, as timm, Lightning and accelerate need it: the
sampler stores the last call, and each loader checks for new calls.

What can go wrong: a subclass that overrides only ``__iter__``, as in Gluon, has no pure access. It still works, like a
third-party sampler (`sharded_loader.sampling.third_party`).
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeGuard, TypeVar

import numpy as np

from sharded_loader.base.checks import check_int, fast_method, refuse_class
from sharded_loader.base.described import Described
from sharded_loader.engine.epoch_requests import EpochRequest, new_request
from sharded_loader.randomness.rng import draw_seed
from sharded_loader.sampling.tables import Table

Item_co = TypeVar("Item_co", covariant=True)

ONE_SHOT = "an iterator can be read once, and each epoch reads the sampler again: pass a list, or a class with __iter__"

EVERY = -1
"""Epoch number that stands for the endless sequence of all epochs; for samplers with `Sampler.counts_by_pass`."""

MAX_NESTING = 16  # deeper nesting is a cycle


class DrawnSeed(int):
    """A seed that was drawn, not passed by the user. A loader with its own seed overrides it."""


def resolve_seed(seed: object) -> int:
    """Return the seed as an int; None draws one from torch's default generator (imports torch only then)."""
    if seed is None:
        return DrawnSeed(draw_seed())
    return check_int("seed", seed, -math.inf, "give an int, or None to draw one from torch's default generator")


def check_sampler(sampler: object, name: str = "sampler") -> None:
    """Reject objects that cannot be samplers: non-iterables, generators and other one-shot iterators."""
    kind = type(sampler)
    method = getattr(kind, "__iter__", None)
    refuse_class(name, sampler)
    if isinstance(sampler, str) or (method is None and not hasattr(kind, "__getitem__")):
        text = f"{name} must be a sampler or another iterable, got {sampler!r} of type {kind.__name__}"
        raise TypeError(f"{text}: pass a sampler, a list, or an object with __iter__ and __len__")
    is_builtin = isinstance(sampler, Iterator) and kind.__module__ in ("builtins", "itertools")
    if is_builtin or method is Iterator.__iter__:
        raise TypeError(f"{name} is a one-shot iterator of type {kind.__name__}: {ONE_SHOT}")


def nested(sampler: object) -> Iterator[Any]:
    """Iterate over the sampler and its inner samplers (``.sampler``, ``.batch_sampler``), outermost first."""
    for _ in range(MAX_NESTING):
        yield sampler
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            inner = getattr(sampler, "batch_sampler", None)
        if not hasattr(type(inner), "__iter__"):
            return
        sampler = inner


def announce_epoch(sampler: object, epoch: int) -> None:
    """Call ``set_epoch`` on a sampler and its inner samplers; torch's BatchSampler does not forward it."""
    for each in nested(sampler):
        if callable(set_epoch := getattr(each, "set_epoch", None)):
            set_epoch(epoch)


class Sampler(Described, Generic[Item_co]):
    """Base class of all samplers: an order of indices, or of batches of indices, for each epoch.

    Two ways to write one:

    - As in Gluon, override ``__iter__`` and ``__len__``. The loader seeds the global generators for each epoch.
    - Override `iter_epoch` and `len_epoch` with pure functions of the epoch. ``__iter__``, ``__len__`` and `set_epoch`
    then work by themselves, and the loader can jump into the middle of any epoch.

    Attributes:
        epoch: epoch of the next ``iter()``, from 0. Loaders have an ``epoch`` of their own.
        seed: integer that, with the epoch, decides the order; None if nothing is random.
        counts_by_pass: `len_epoch` needs a pass over the data, so loaders do without the length, and epochs may differ
            in length. Under ``steps_per_epoch`` loaders read ``epoch_table(EVERY)``, which is endless.
        is_part: the sampler yields the samples of one rank.
        yields_batches: the sampler is valid only as ``batch_sampler=``.

    Example:
        >>> class Backwards(Sampler[int]):
        ...     def __iter__(self): return iter([2, 1, 0])
        ...     def __len__(self): return 3
        >>> list(Backwards())
        [2, 1, 0]

    Source of the idea: `mxnet.gluon.data.Sampler`.
    """

    # Class attributes, because Gluon-style subclasses never call ``super().__init__()``.
    _epoch: int = 0
    counts_by_pass = is_part = yields_batches = False
    epoch_request: EpochRequest | None = None  # last call of `set_epoch`, read by loaders
    seed: int | None = None
    ranks: int | None = None
    """Number of ranks that the order is made for; None if it is the same for any number."""
    order_version: int = 1
    """Version of the order, part of states: a mid-epoch state of an older order is rejected."""
    cut_by: ClassVar[tuple[str, ...]] = ()
    """Names in ``decided_by`` of the arguments that decide where batches are cut."""
    sized_by: ClassVar[tuple[str, ...]] = ()
    """Attributes that scale with the batch size. The first one is that size, if it is a number."""
    fixed: ClassVar[tuple[str, ...]] = ()
    """Attributes that hold arguments, and whose change would have no effect."""
    dataset_length: int | None = None
    """Number of samples with a known length or label. A dataset of another length is rejected."""
    of_each: ClassVar[str] = "length"
    """Per-sample property that the sampler knows, for errors."""
    plan: Any = None
    """Additional value that two batch samplers must share for their steps to be equal on different numbers of ranks."""

    def __setattr__(self, name: str, value: object) -> None:
        kind: Any = type(self)
        # A user's class may store arguments under any names until its order has been read.
        is_read = kind.__module__.startswith("sharded_loader.") or vars(self).keys() & {"_epoch", "epoch_request"}
        if (is_read and name in _fixed_arguments(kind)) or (name in self.fixed and name in vars(self)):
            text = f"{name} of a {kind.__name__} was read when it was made, and a change would have no effect"
            raise AttributeError(f"{text}: make another {kind.__name__}, and a loader with it")
        super().__setattr__(name, value)

    def check_dataset(self, length: int) -> None:
        """Raise a ValueError unless the sampler fits a dataset of ``length`` samples."""
        if self.dataset_length not in (None, length):
            text = f"the {type(self).__name__} has {self.dataset_length} {self.of_each}s, but the dataset has {length}"
            raise ValueError(f"{text} samples: give one {self.of_each} per sample, in the order of the dataset")

    @property
    def epoch(self) -> int:
        return self._epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._epoch = check_int("epoch", epoch, 0, "epochs count from 0", wrong_type=ValueError)

    def set_epoch(self, epoch: int) -> None:
        """Make the next ``iter()`` begin this epoch, of the sampler and of every loader that reads it.

        Raises:
            ValueError: if ``epoch`` is negative or not an integer.
        """
        self.epoch = epoch
        self.epoch_request = new_request(self.epoch)

    set_epoch.is_recorded = True  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Item_co]:
        # Not a generator function: seed and epoch are read now, not at the first item.
        epoch = self.epoch
        items = self.iter_epoch(epoch)
        self.epoch = epoch + 1
        return items

    def __len__(self) -> int:
        return self.len_epoch(self.epoch)

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[Item_co]:
        """Iterate over the items of an epoch from position ``start`` on. Leaves `epoch` unchanged.

        Not a generator function: seed and epoch are read when this is called, not at the first item.
        """
        start = check_int("start", start, 0, "it counts the items of the epoch to leave out")
        items: Iterator[Item_co] = self.epoch_table(epoch).items(start)
        return items

    def epoch_table(self, epoch: int) -> Table:
        """Return an epoch as a table: any of its items by position. Seed and epoch are read immediately."""
        advice = "override __iter__ and __len__, or iter_epoch and len_epoch"
        raise NotImplementedError(f"{type(self).__name__} has no order: {advice}")

    def len_epoch(self, epoch: int) -> int:
        """Return the number of items in an epoch, which may vary. Leaves `epoch` unchanged."""
        raise NotImplementedError(f"{type(self).__name__} has no length: override __len__, or len_epoch")

    def for_ranks(self, ranks: int) -> Sampler[Item_co]:
        """Return the sampler that loaders with ``num_replicas`` read, for ranks that take its items in turn.

        Override it to give all ranks items of equal cost in a step. Return a copy, because the sampler may be shared.
        """
        return self

    def resized(self, size: int, before: int) -> Sampler[Item_co] | None:
        """Return a copy with batches scaled by ``size / before`` in the same order; None if that is impossible."""
        twin = copy.copy(self)
        for name in self.sized_by:
            value = getattr(self, name)
            found = [divmod(one * size, before) for one in (value if isinstance(value, list) else [value])]
            if any(rest for _, rest in found):
                return None
            sizes = [one for one, _ in found]
            setattr(twin, name, sizes if isinstance(value, list) else sizes[0])
        return twin if self.sized_by else None

    @property
    def samples_in_batch(self) -> object:
        """Number of samples, or of rows, in a batch; not an integer if batches vary in size."""
        return getattr(self, self.sized_by[0], None) if self.sized_by else None


_OF_ORDER = ("__iter__", "iter_epoch", "epoch_table")


@lru_cache
def _fixed_arguments(kind: type[Sampler[Any]]) -> frozenset[str]:
    """Return the inherited arguments of a user's class that are not attributes; none if it defines its own order."""
    base: Any = next(one for one in kind.__mro__ if one.__module__.startswith("sharded_loader."))
    if any(getattr(kind, name, None) is not getattr(base, name, None) for name in _OF_ORDER):
        return frozenset()
    stored = [name for name, attribute in (*kind.decided_by, *kind.shown) if name == attribute]
    names = frozenset(inspect.signature(base).parameters) - {"seed", "sampler", "batch_sampler", *stored}
    return frozenset(name for name in names if getattr(kind, name, None) is getattr(base, name, None))


def is_own(sampler: object) -> bool:
    """Return True if a sampler has a pure `epoch_table` or `iter_epoch`, and no subclass overrides ``__iter__``."""
    methods = (fast_method(type(sampler), name, ["__iter__"]) for name in ("epoch_table", "iter_epoch"))
    placeholders = (None, Sampler.epoch_table, Sampler.iter_epoch)
    return any(method not in placeholders for method in methods) and hasattr(sampler, "len_epoch")


class WrapperSampler(Sampler[Item_co]):
    """Base class of samplers over another sampler. If that is one of this library, both share its `epoch`.

    ``seed`` starts a third-party ``sampler``; None draws one if needed.
    """

    _wraps: ClassVar[str] = "sampler"
    """Name of the attribute that holds the inner sampler."""

    def __init__(self, sampler: Iterable[object], seed: int | None) -> None:
        check_sampler(sampler, self._wraps)
        setattr(self, self._wraps, sampler)
        self._shares_epoch = isinstance(sampler, Sampler) and is_own(sampler)
        self.counts_by_pass = getattr(sampler, "counts_by_pass", False)
        if seed is None and (is_own(sampler) or isinstance(sampler, Sequence | np.ndarray)):
            seed = 0  # unused
        self.seed: int = resolve_seed(seed)

    @property
    def inner(self) -> Any:
        return getattr(self, self._wraps)

    def over(self, inner: object) -> Any:
        """Return a copy that wraps another sampler."""
        twin = copy.copy(self)
        setattr(twin, self._wraps, inner)
        return twin

    def for_ranks(self, ranks: int) -> Sampler[Item_co]:
        inner = for_ranks(self.inner, ranks)
        twin: WrapperSampler[Item_co] = self if inner is self.inner else self.over(inner)
        return twin

    @property
    def epoch(self) -> int:
        return int(self.inner.epoch if self._shares_epoch else self._epoch)

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        if self._shares_epoch:
            self.inner.epoch = epoch
        else:
            Sampler.epoch.__set__(self, epoch)  # type: ignore[attr-defined]

    def set_epoch(self, epoch: int) -> None:
        super().set_epoch(epoch)
        announce_epoch(self.inner, self.epoch)

    set_epoch.is_recorded = True  # type: ignore[attr-defined]

    @property
    def _shown_seed(self) -> int | None:
        return None if find_third_party(self, 0)[0] is None else self.seed


def for_ranks(sampler: object, ranks: int) -> Any:
    return sampler.for_ranks(ranks) if isinstance(sampler, Sampler) and is_own(sampler) else sampler


def ranks_of(sampler: object) -> int | None:
    """Return the number of ranks that a sampler's order is made for; None: any number."""
    own = (one for one in nested(sampler) if isinstance(one, Sampler))
    return next((one.ranks for one in own if one.ranks is not None), None)


def is_wrapper(sampler: object) -> TypeGuard[WrapperSampler[Any]]:
    return isinstance(sampler, WrapperSampler) and is_own(sampler)


def find_third_party(sampler: Any, seed: int) -> tuple[Any, int]:
    """Return the third-party sampler at the end of a chain of wrappers, or None, and the seed that starts it."""
    while is_wrapper(sampler):
        sampler, seed = sampler.inner, sampler.seed
    return None if is_own(sampler) else sampler, seed
