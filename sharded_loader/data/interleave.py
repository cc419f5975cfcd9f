"""`interleave`: several datasets as one, mixed by weight, exact at every position.

    interleave(datasets by index) -> InterleavedDataset    a `Dataset`: reads any position, also in bulk
    interleave(datasets in order) -> InterleavedIterable   a torch IterableDataset: reads on from a saved state
    Source(number, dataset, point)                         one of its datasets, read in order from any position

`sharded_loader.data.schedule` says which dataset gives the sample at a position. A mixture owns no thread and no
process.

*In order.* A dataset with ``state_dict`` and ``load_state_dict`` continues by its own state. So does one whose iterator
has both. Other iterable datasets are read again up to the point. A source opens its dataset when the first sample is
asked for. A state is loaded into a shallow copy of the dataset: some datasets keep it for later passes, and those start
at the beginning. With several workers, a dataset that is read by index is divided: each worker reads every n-th sample.
A function may take two arguments, the number of the worker and the number of workers. Other datasets ask torch's
``get_worker_info``.

What can go wrong: an argument is no list of datasets: the error says what to write instead. A dataset has no samples: a
ValueError names it. A state is one of another mixture, or was saved with more samples: a ValueError says what differs.
An exception of a dataset passes as it is.

Source of the idea: `sharded_loader.data.schedule` names it; the words for ``stop`` are those of Hugging Face's
``interleave_datasets``.
"""

from __future__ import annotations

import copy
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from sharded_loader.base.checks import refuse_arguments, refuse_class
from sharded_loader.base.described import an, brief
from sharded_loader.base.entries import (
    anything,
    dict_of,
    differing,
    entry,
    integer,
    list_of,
    parsed,
    string,
    written,
)
from sharded_loader.base.imports import call_after_import
from sharded_loader.data.bulk import Indices, Int64s, checked_index, checked_indices
from sharded_loader.data.columns import check_dataset
from sharded_loader.data.datasets import ConcatDataset, Dataset, View
from sharded_loader.data.inspection import is_indexed, is_stateful, iterable_of, known_parts, takes_two, this_worker
from sharded_loader.data.schedule import Schedule, whole_numbers

FIRST, ALL = "first_exhausted", "all_exhausted"


def interleave(
    datasets: Iterable[Any],
    weights: Iterable[Any] | None = None,
    seed: int = 0,
    stop: str = FIRST,
    **unknown: NoReturn,
) -> Any:
    """Several datasets as one: their samples mixed by weight, each dataset in its own order.

    Each dataset stays within a few samples of its share, at every position. This also holds for every n-th sample, so
    each of n ranks has the same shares. Which dataset gives sample n depends only on the weights, the seed and n.

    Args:
        datasets: at least one. If all have ``__getitem__`` and ``__len__``, the mixture is read by index. Otherwise it
            is read in order; then a dataset may also be an object with ``__iter__``, or a function that returns a new
            iterator. A function may take the number of the worker and the number of workers.
        weights: one number of 0 or more per dataset; None: equal ones. Only their ratios count. Ratios of whole numbers
            with a sum of up to 65,536 are kept, others are rounded to 65,536ths. A dataset with the weight 0 is never
            read.
        seed: decides where the schedule starts.
        stop: ``"first_exhausted"``: the mixture ends when the dataset whose turn it is has no sample left.
            ``"all_exhausted"``: shorter datasets start over until every dataset has been read to its end once.

    Returns:
        By index: a `Dataset`. With ``"all_exhausted"`` it ends with the last sample that had not been read yet.

        In order: an iterable, which torch's ``DataLoader`` takes as an ``IterableDataset``. Each iteration starts at
        the beginning. An iterable dataset has been read to its end when it is asked for one more sample. The mixture
        has:

        - ``state_dict()``: the position of the iterator that began or yielded last. When the iteration has ended,
          it is the beginning. ``load_state_dict(state)``: the next iteration continues there.
        - ``set_epoch(epoch)``: is passed on. A loaded position stays if the epoch is that of the state.
        - ``num_shards``: the smallest ``num_shards`` (or ``n_shards``) of the iterable datasets that have one.
          If none has one, the attribute is missing.

        With several workers, each worker mixes its own part of the datasets. The mixture divides a dataset that is
        read by index. An iterable dataset divides itself by ``get_worker_info()``, as always in torch. A
        `ShardedDataLoader` cuts the mixture into parts; then each part counts as a worker.

    Raises:
        TypeError: an argument is no list of datasets, no numbers, no seed; one dataset can be read only once, as a
            generator.
        ValueError: no datasets; weights that do not fit; an unknown ``stop``; a dataset with a weight is empty.

    Example:
        >>> from sharded_loader import interleave
        >>> mixed = interleave([range(0, 100), range(100, 200)], weights=[3, 1])
        >>> list(mixed.take(8)), len(mixed)
        ([0, 1, 2, 3, 100, 4, 5, 101], 133)
        >>> stream = interleave([lambda: iter("abc"), [1, 2, 3]])
        >>> samples = iter(stream)
        >>> next(samples), next(samples), next(samples)
        (1, 'a', 'b')
        >>> stream.load_state_dict(stream.state_dict())
        >>> list(stream)
        [2, 3, 'c']

    Source of the idea: H. Weyl, "Über die Gleichverteilung von Zahlen mod. Eins", 1916; Hugging Face's
    ``interleave_datasets``.
    """
    refuse_arguments("interleave", unknown, interleave)
    if stop not in (FIRST, ALL):
        raise ValueError(f'interleave(stop={stop!r}): give "{FIRST}" or "{ALL}"')
    try:
        seed = operator.index(seed)
    except TypeError:
        raise TypeError(f"interleave(seed={seed!r}): give an int") from None
    kind = type(datasets)
    torchs = getattr(sys.modules.get("torch.utils.data"), "Dataset", ())
    is_one = isinstance(datasets, (str, bytes, Mapping, Dataset, InterleavedIterable, torchs))
    if is_one or hasattr(datasets, "__array__") or not isinstance(datasets, Iterable):
        raise TypeError(f"interleave needs a list of datasets, not {an(kind)}: interleave([first, second])")
    given = [check_source(dataset, f"interleave: datasets[{number}]") for number, dataset in enumerate(datasets)]
    if not given:
        raise ValueError("interleave was given no datasets: give at least one")
    schedule = Schedule(whole_numbers(weights, len(given)), seed, max(map(_levels, given)))
    if all(map(is_indexed, given)):
        return InterleavedDataset(given, schedule, stop)
    return InterleavedIterable(given, schedule, stop)


def _levels(dataset: Any) -> int:
    """How many mixtures lie within each other in a dataset."""
    own = isinstance(dataset, (InterleavedDataset, InterleavedIterable))
    inside = dataset._datasets if isinstance(dataset, InterleavedIterable) else getattr(dataset, "_inside", ())
    return own + max(map(_levels, inside), default=0)


def check_source(dataset: Any, name: str) -> Any:
    """One of the datasets. What can be read neither by index nor again and again is rejected."""
    kind = type(dataset)
    refuse_class(name, dataset)
    if isinstance(dataset, (str, bytes)):
        raise TypeError(f"{name} is {an(kind)}, not a dataset: give what it names, or list(text) for its items")
    if is_indexed(dataset):
        return check_dataset(dataset, "interleave")
    torchs = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", ())
    starts_again = isinstance(dataset, torchs) or hasattr(kind, "set_epoch") or hasattr(kind, "state_dict")
    if hasattr(kind, "__next__") and not starts_again:
        raise TypeError(
            f"{name} is {an(kind)}, which can be read only once: give a function that makes a new one, "
            "or an object whose __iter__ begins again"
        )
    if isinstance(dataset, Set):
        raise TypeError(f"{name} is {an(kind)}, whose order is not defined: give sorted(dataset)")
    if not hasattr(kind, "__iter__") and not callable(dataset):
        raise TypeError(
            f"{name} is {an(kind)}, which cannot be read: give an object with __getitem__ and __len__, one with "
            "__iter__, or a function that returns an iterator"
        )
    return dataset


# -- by index ----------------------------------------------------------------------------------------------------------


class InterleavedDataset(View):
    """Datasets that are read by index, mixed by a schedule; made by `interleave`."""

    def __init__(self, datasets: Sequence[Any], schedule: Schedule, stop: str) -> None:
        parts = [datasets[number] for number in schedule.sources]
        sizes = list(map(len, parts))
        for number, part, size in zip(schedule.sources, parts, sizes, strict=True):
            if not size:
                raise _empty(number, part)
        self._dataset = ConcatDataset(parts)
        self._schedule = schedule
        self._sizes = np.array(sizes, np.int64)
        self._begins = np.cumsum(self._sizes) - self._sizes
        if stop == FIRST:
            self._length = min(schedule.positions(sizes))
        else:
            self._length = max(schedule.positions([size - 1 for size in sizes])) + 1

    def __len__(self) -> int:
        return self._length

    def _one(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        source, number = self._schedule.at(checked_index(index, self._length))
        return self._dataset[int(self._begins[source] + number % self._sizes[source])]

    def _inner(self, indices: Indices) -> Int64s:
        sources, numbers = self._schedule.at_many(checked_indices(indices, self._length))
        return self._begins[sources] + numbers % self._sizes[sources]

    def __repr__(self) -> str:
        return f"interleave({self._dataset!r}, weights={brief(self._schedule.weights)}; {self._length} samples)"


def _empty(number: int, dataset: Any, passes: int = 0) -> ValueError:
    name = f"interleave: datasets[{number}], {an(type(dataset))},"
    if passes:
        return ValueError(f"{name} gave no samples when it was read again: its __iter__ must start at the beginning")
    return ValueError(
        f"{name} has no samples: leave it out, or give it weight 0. With several workers, each one needs a sample of it"
    )


# -- one dataset in order ----------------------------------------------------------------------------------------------


END: Any = object()
"""What `Source.read` returns when the dataset has no sample left in this pass."""


def is_divided(dataset: Any) -> bool:
    """Whether a source divides a dataset among workers. Other datasets divide themselves."""
    return is_indexed(dataset) or (not hasattr(type(dataset), "__iter__") and takes_two(dataset))


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

    name = ""
    """How errors call it; by default by its number in the mixture."""

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
            indices = range(first + self.taken * step, len(dataset), step)
            iterator: Any = (dataset[index] for index in indices)
        else:
            iterator = iter(iterable_of(dataset, lambda: self._worker or (0, 1)))
            if point.iterator is not None:
                iterator.load_state_dict(point.iterator)
            elif point.dataset is None:
                skipped = sum(1 for _ in islice(iterator, self.taken))
        if skipped < self.taken:
            name = self.name or f"interleave: datasets[{self.number}]"
            raise ValueError(
                f"{name}, {an(type(dataset))}, has {skipped} samples, and the state was saved after {self.taken}: give "
                "the data that it was saved with"
            )
        self._opened, self._iterator = dataset, iterator
        self._is_stateful = self._has_own_state and is_stateful(dataset)


def _copy(dataset: Any) -> Any:
    """A shallow copy. Hugging Face's datasets share their attributes with what ``copy.copy`` makes of them."""
    made = copy.copy(dataset)
    if hasattr(made, "__dict__"):
        made.__dict__ = dict(vars(made))
    return made


# -- in order ----------------------------------------------------------------------------------------------------------


_ADVICE = "give what state_dict() of a mixture returned"


@dataclass(frozen=True)
class _MixPosition:
    """Where an iteration goes on, and in which mixture: the state of an `InterleavedIterable`."""

    schedule: int = entry(integer(), "the datasets took turns by another schedule")
    weights: tuple[int, ...] = entry(list_of(integer(0)), "weights was {was}, and is {now}", write=list)
    seed: int = entry(integer(), "seed was {was}, and is {now}")
    stop: str = entry(string, "stop was {was!r}, and is {now!r}")
    epoch: Any = entry(anything)  # noqa: RUF009 - it makes a field
    position: int = entry(integer(0))
    sources: tuple[SourcePoint, ...] = entry(
        list_of(dict_of(SourcePoint)), write=lambda points: list(map(written, points))
    )


class InOrder:
    """Base class of iterable data that torch's DataLoader takes as an IterableDataset: it asks ``isinstance``."""

    def __init__(self) -> None:
        call_after_import("torch.utils.data", _tell_torch)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        call_after_import("torch.utils.data", _tell_torch)


def _tell_torch() -> None:
    sys.modules["torch.utils.data"].IterableDataset.register(InOrder)


class InterleavedIterable(InOrder):
    """Datasets that are read in order, mixed by a schedule; made by `interleave`.

    Attributes:
        num_shards: the smallest number of shards of the datasets. Missing where none has any.
    """

    num_shards: int

    def __init__(self, datasets: Sequence[Any], schedule: Schedule, stop: str) -> None:
        self._datasets = datasets
        self._schedule = schedule
        self._stop = stop
        self._epoch: Any = 0
        self._loaded: _MixPosition | None = None  # where the next iteration begins
        self._last: _Iteration | None = None  # the one that began or yielded last
        iterable = [dataset for dataset in map(datasets.__getitem__, schedule.sources) if not is_indexed(dataset)]
        shards = [number for number in map(known_parts, iterable) if number is not None]
        if shards:
            self.num_shards = min(shards)
        super().__init__()

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_last": None}  # iterators cannot be copied: a copy starts at the beginning

    def __iter__(self) -> Iterator[Any]:
        """The samples. The iteration begins when the first one is asked for."""
        state, self._loaded = self._loaded, None
        schedule, datasets = self._schedule, self._datasets
        reading = _Iteration(self._beginning() if state is None else state, datasets, schedule.sources)
        self._last = reading
        while True:
            source = reading.sources[schedule.owner(reading.position)]
            sample = source.read()
            if sample is END:
                if not source.taken:
                    raise _empty(source.number, source.dataset, source.passes)
                if self._stop == FIRST or all(one.passes or one is source for one in reading.sources):
                    break
                source.start_over()
                continue
            reading.position += 1
            self._last = reading
            yield sample
        if self._last is reading:
            self._last = None

    def set_epoch(self, epoch: Any) -> None:
        """Pass the epoch on to the datasets. A position stays if it is in this epoch."""
        for dataset in self._datasets:
            if hasattr(dataset, "set_epoch"):
                dataset.set_epoch(epoch)
        if epoch != self._epoch:
            self._epoch, self._loaded, self._last = epoch, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the iterator that began or yielded last; see `interleave`."""
        position = self._loaded or self._beginning()
        return written(position if self._last is None else self._last.state())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where `state_dict` was taken.

        Raises:
            ValueError, TypeError: no state, or one of another mixture; says what differs. Nothing has changed then.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"interleave: the state is {brief(state)}, {an(type(state))}; it must be a dict: {_ADVICE}")
        position = parsed(_MixPosition, state, _ADVICE, "interleave: the state")
        differences = list(differing(position, self._beginning()).values())
        if not differences and len(position.sources) != len(self._schedule.sources):
            differences.append(f"it was one of {len(position.sources)} datasets")
        if differences:
            raise ValueError(
                f"interleave: the state is that of another mixture: {', '.join(differences)}. Make the mixture with "
                "the same arguments"
            )
        if position.epoch != self._epoch:
            self.set_epoch(position.epoch)
        self._loaded, self._last = position, None

    def _beginning(self) -> _MixPosition:
        schedule = self._schedule
        sources = (BEGINNING,) * len(schedule.sources)
        return _MixPosition(schedule.step, tuple(schedule.weights), schedule.seed, self._stop, self._epoch, 0, sources)

    def __repr__(self) -> str:
        return f"interleave({brief(self._datasets)}, weights={brief(self._schedule.weights)}, stop={self._stop!r})"


class _Iteration:
    """One iteration: how far it is in the mixture and in each source."""

    def __init__(self, begin: _MixPosition, datasets: Sequence[Any], numbers: Sequence[int]) -> None:
        self._begin, self.position = begin, begin.position
        # Who asks divides the data itself. An iterable dataset asks on its own, or is read by each worker as a whole.
        worker = this_worker() if any(map(is_divided, datasets)) else None
        times = Counter(map(id, datasets))  # two iterators of one object share its state
        self.sources = [
            Source(number, datasets[number], point, worker, times[id(datasets[number])] == 1)
            for number, point in zip(numbers, begin.sources, strict=True)
        ]

    def state(self) -> _MixPosition:
        return replace(self._begin, position=self.position, sources=tuple(source.state() for source in self.sources))
