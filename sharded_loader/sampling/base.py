"""What every sampler of this library is: a pure function of (seed, epoch), plus a counter for its use alone.

    sampler.iter_epoch(epoch, start)   pure: the items of any epoch, from any place        (the loader uses this)
    sampler.len_epoch(epoch)           pure: how many items that epoch has
    sampler.chunks(epoch, start)       pure, index samplers only: the same items as int64 arrays
    iter(sampler), len(sampler)        the epoch that is pending; each iter() moves `epoch` on by one
    sampler.set_epoch(epoch)           sets `epoch`, and the next epoch of the loaders that read the sampler

In: lengths, keys, a seed. Out: Python ints (index samplers) or lists of them (batch samplers). A sampler
owns no threads, no files and no generator state. `epoch` is the only thing that changes in it, and loaders do not
look at `epoch`: they count their own epochs, so iterating over a sampler changes nothing in a loader.

What can go wrong: a subclass that overrides ``__iter__`` alone, as Gluon's users do, has no pure access. It
still works, treated as a foreign sampler (see `sharded_loader.sampling.foreign`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from itertools import chain
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from sharded_loader.rng import draw_seed
from sharded_loader.sampling.describing import Described
from sharded_loader.sampling.epochs import EpochRequest, note

Indices = npt.NDArray[np.int64]
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


def check_start(start: Any) -> int:
    return check_int("start", start, 0, "it counts the items of the epoch to leave out")


class DrawnSeed(int):
    """A seed that nobody gave. A loader with a seed of its own puts that in its place: ranks must agree on it."""


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


def keeps_request(method: Any) -> Any:
    """Mark a ``set_epoch`` that keeps its calls in ``epoch_request``: `EpochRequests` need not listen there."""
    method.keeps_request = True
    return method


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
        raise NotImplementedError(
            f"{type(self).__name__} has no order: override __iter__ and __len__, or iter_epoch and len_epoch"
        )

    def len_epoch(self, epoch: int) -> int:
        """How many items an epoch has. Leaves `epoch` alone.

        Args:
            epoch: which epoch, from 0; the number may differ from one to the next.
        """
        raise NotImplementedError(f"{type(self).__name__} has no length: override __len__, or len_epoch")


class IndexSampler(Sampler[int]):
    """Base class of the samplers that yield single indices, made as int64 arrays and handed out as ints.

    A subclass overrides `chunks` and `len_epoch`. Arrays keep a batch sampler at 10 ns an index, where one
    int at a time costs 36.

    Example:
        >>> class Evens(IndexSampler):
        ...     def chunks(self, epoch, start=0): yield np.arange(6)[::2][start:]
        ...     def len_epoch(self, epoch): return 3
        >>> list(Evens()), list(Evens().iter_epoch(0, start=1))
        ([0, 2, 4], [2, 4])
    """

    def chunks(self, epoch: int, start: int = 0) -> Iterator[Indices]:
        """The indices of an epoch from position ``start`` on, as 1-D int64 arrays of any lengths.

        Args:
            epoch: which epoch, from 0.
            start: how many indices to leave out, in constant time where that can be done.
        """
        raise NotImplementedError(f"{type(self).__name__} has no order: override chunks and len_epoch")

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return chain.from_iterable(chunk.tolist() for chunk in self.chunks(epoch, check_start(start)))
