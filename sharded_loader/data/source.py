"""`Source`: one dataset of a mixture, read in order, from any position.

    this_worker()                    which of how many workers reads here, or which part of iterable data is read
    Source(number, dataset, point)   .read() -> sample | END      .start_over()      .state() -> SourcePoint

A dataset with ``state_dict`` and ``load_state_dict`` continues by its own state. So does one whose iterator has both.
Other iterable datasets are read again up to the point.

A source opens its dataset when the first sample is asked for. A state is loaded into a shallow copy of the dataset:
some datasets keep it for later passes, and those start at the beginning.

With several workers, a dataset that is read by index is divided: each worker reads every n-th sample. A function may
take two arguments, the number of the worker and the number of workers. Other datasets ask torch's ``get_worker_info``.

What can go wrong: a dataset has fewer samples than when the state was saved (ValueError with both numbers). An
exception of the dataset passes as it is.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sharded_loader.base.described import an
from sharded_loader.base.entries import anything, entry, integer
from sharded_loader.data.inspection import is_indexed, is_stateful, takes_part

END: Any = object()
"""What `Source.read` returns when the dataset has no sample left in this pass."""


_asked_first: list[Callable[[], tuple[int, int] | None]] = []


def ask_first(function: Callable[[], tuple[int, int] | None]) -> None:
    """Let `this_worker` ask a function before it asks torch."""
    _asked_first.append(function)


def this_worker() -> tuple[int, int] | None:
    """The number of this worker, and how many there are, as torch's ``get_worker_info`` says; None outside workers.

    A worker of this library that has not imported torch has no answer of torch's, but knows its part.

    Example:
        >>> this_worker() is None
        True
    """
    for asked in _asked_first:
        if (found := asked()) is not None:
            return found
    torchs: Any = sys.modules.get("torch.utils.data")
    info = None if torchs is None else torchs.get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def is_divided(dataset: Any) -> bool:
    """Whether a source divides a dataset among workers. Other datasets divide themselves."""
    return is_indexed(dataset) or (not hasattr(type(dataset), "__iter__") and takes_part(dataset))


@dataclass(frozen=True)
class SourcePoint:
    """How far one dataset of a mixture has been read.

    Attributes:
        passes: how often it has been read to its end: the entry ``pass``.
        taken: how many samples of this pass were read.
        dataset: its own state; None: it has none, or its iterator has one.
        iterator: the state of its iterator; None: it has none.
    """

    passes: int = entry(integer(0), name="pass")
    taken: int = entry(integer(0))
    dataset: Any = entry(anything, default=None)  # noqa: RUF009 - it makes a field
    iterator: Any = entry(anything, default=None)  # noqa: RUF009


BEGINNING = SourcePoint(0, 0)
"""Of a dataset that has not been read."""


class Source:
    """One dataset in one iteration over a mixture.

    Args:
        number: which of the datasets of the mixture it is, for errors.
        dataset: an object with ``__getitem__`` and ``__len__``, one with ``__iter__``, or a function that returns an
            iterator.
        point: what `state` returned; `BEGINNING` at the beginning.
        worker: what `this_worker` returned when the iteration began.
        has_own_state: False: ``dataset.state_dict`` does not count, because the mixture has this object twice.

    Attributes:
        passes: the number of times that it has been read to its end.
        taken: the number of samples of this pass that were read.

    Example:
        >>> source = Source(0, "abc", BEGINNING)
        >>> source.read(), source.read(), source.state().taken
        ('a', 'b', 2)
        >>> Source(0, "abc", source.state()).read()
        'c'
    """

    def __init__(
        self,
        number: int,
        dataset: Any,
        point: SourcePoint,
        worker: tuple[int, int] | None = None,
        has_own_state: bool = True,
    ) -> None:
        self.number, self.dataset = number, dataset
        self.passes, self.taken = point.passes, point.taken
        self._point = point
        self._worker = worker
        self._has_own_state = has_own_state
        self._opened: Any = None  # what is iterated over: the dataset, or a copy with a state
        self._is_stateful = False
        self._iterator: Any = None

    def read(self) -> Any:
        """The next sample, or `END`."""
        if self._iterator is None:
            self._open()
        sample = next(self._iterator, END)
        self.taken += sample is not END
        return sample

    def start_over(self) -> None:
        """Begin the next pass."""
        self.passes, self.taken = self.passes + 1, 0
        self._point, self._iterator = SourcePoint(self.passes, 0), None

    def state(self) -> SourcePoint:
        """A point from which another source continues."""
        if self._iterator is None:
            return self._point
        point = SourcePoint(self.passes, self.taken)
        if is_indexed(self._opened):
            return point
        if self._iterator is not self._opened and is_stateful(self._iterator):
            return replace(point, iterator=self._iterator.state_dict())
        return replace(point, dataset=self._opened.state_dict()) if self._is_stateful else point

    def _open(self) -> None:
        point, dataset, skipped = self._point, self.dataset, self.taken
        if point.dataset is not None:
            dataset = _copy(dataset)
            dataset.load_state_dict(point.dataset)
        if is_indexed(dataset):
            first, step = self._worker or (0, 1)
            places = range(first + self.taken * step, len(dataset), step)
            iterator: Any = (dataset[index] for index in places)
        else:
            iterator = iter(self._items(dataset))
            if point.iterator is not None:
                iterator.load_state_dict(point.iterator)
            elif point.dataset is None:
                skipped = sum(1 for _ in islice(iterator, self.taken))
        if skipped < self.taken:
            raise ValueError(
                f"interleave: datasets[{self.number}], {an(type(dataset))}, has {skipped} samples, and the "
                f"state was saved after {self.taken}: give the data that it was saved with"
            )
        self._opened, self._iterator = dataset, iterator
        self._is_stateful = self._has_own_state and is_stateful(dataset)

    def _items(self, dataset: Any) -> Any:
        """What is iterated over: the dataset, or what a function returns."""
        worker, is_function = self._worker or (0, 1), not hasattr(type(dataset), "__iter__")
        if not is_function:
            return dataset
        return dataset(*worker) if takes_part(dataset) else dataset()


def _copy(dataset: Any) -> Any:
    """A shallow copy. Hugging Face's datasets share their attributes with what ``copy.copy`` makes of them."""
    made = copy.copy(dataset)
    if hasattr(made, "__dict__"):
        made.__dict__ = dict(vars(made))
    return made
