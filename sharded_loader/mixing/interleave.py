"""`interleave`: several datasets as one, mixed by weight, exact at every position.

    interleave(datasets by index) -> InterleavedDataset    a `Dataset`: reads any position, also in bulk
    interleave(datasets in order) -> InterleavedIterable   a torch IterableDataset: reads on from a saved state
    Source(number, dataset, point)                         one of its datasets, read in order from any position

`sharded_loader.mixing.schedule` says which dataset gives the sample at a position. A mixture owns no thread and no
process.

*By index.* A mixture that is shuffled, or whose weights change, has another order in each epoch. A loader plans that
order in the main process (`MixtureSampler`), and sends workers numbers above `CODED`. Such a number says which
sample it is, whatever the epoch and the weights are. So workers need not be told of either, and the order stays exact
where a batch belongs to two epochs. Other readers, such as PyTorch's ``DataLoader``, call ``set_epoch``.

*In order.* A dataset with ``state_dict`` and ``load_state_dict`` continues by its own state. So does one whose iterator
has both. Other iterable datasets are read again up to the point. A source opens its dataset when the first sample is
asked for. A state is loaded into a shallow copy of the dataset: some datasets keep it for later passes, and those start
at the beginning. With several workers, a dataset that is read by index is divided: each worker reads every n-th sample.
A function may take two arguments, the number of the worker and the number of workers. Other datasets ask torch's
``get_worker_info``.

What can go wrong: an argument is no list of datasets: the error says what to write instead. A dataset has no samples: a
ValueError names it. A state is one of another mixture, or was saved with more samples: a ValueError says what differs.
An exception of a dataset passes as it is.

Source of the idea: `sharded_loader.mixing.schedule` names it; the words for ``stop`` are those of Hugging Face's
``interleave_datasets``.
"""

from __future__ import annotations

import copy
import math
import operator
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from sharded_loader.base.checks import check_int, refuse_arguments, refuse_class
from sharded_loader.base.described import an, brief
from sharded_loader.base.entries import anything, dict_of, differing, entry, integer, list_of, parsed, written
from sharded_loader.base.imports import call_after_import
from sharded_loader.data.bulk import Indices, Int64s, checked_index, checked_indices
from sharded_loader.data.columns import check_dataset
from sharded_loader.data.datasets import ConcatDataset, Dataset, Mixture, tell_epoch
from sharded_loader.data.inspection import is_indexed, is_stateful, iterable_of, known_parts, takes_two, this_worker
from sharded_loader.mixing.schedule import FAR, Plan, Schedule, changes_of
from sharded_loader.randomness.shuffle import Bijections

FIRST, ALL, EACH = "first_exhausted", "all_exhausted", "each_once"

CODED = FAR
"""The least of the numbers by which a loader names the samples of a mixture; see `InterleavedDataset.codes`."""


def interleave(
    datasets: Iterable[Any],
    weights: Iterable[Any] | None = None,
    seed: int = 0,
    stop: str | int = FIRST,
    shuffle: bool = False,
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
            read. A schedule is pairs (sample, weights), or a dict: ``[(0, [1, 1]), (80_000, [9, 1])]``. The second
            weights hold from sample 80,000 of each epoch on, counted over all ranks. With 8 ranks and 10 samples per
            rank and step, that is step 1,000.
        seed: decides where the schedule starts, and the order of ``shuffle``.
        stop: ``"first_exhausted"``: the mixture ends when the dataset whose turn it is has no sample left.
            ``"all_exhausted"``: shorter datasets start over until every dataset has been read to its end once.
            ``"each_once"``: a dataset that has ended drops out, and the others go on in the ratio of their weights.
            Every sample comes exactly once. An integer: the mixture has this many samples, and datasets start over.
        shuffle: whether each dataset has a new random order in every pass: each time that it starts over, and in each
            epoch. All datasets must be read by index.

    Returns:
        By index: a `Dataset`. With ``"all_exhausted"`` it ends with the last sample that had not been read yet. With
        ``shuffle`` it has ``set_epoch(epoch)``. A `ShardedDataLoader` needs no call of it.

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
            generator; ``shuffle`` with an iterable dataset.
        ValueError: no datasets; weights that do not fit; a schedule that goes back; an unknown ``stop``. A dataset with
            a weight is empty, or is never read to its end, and ``stop`` waits for that.

    Example:
        >>> from sharded_loader import interleave
        >>> mixed = interleave([range(0, 100), range(100, 200)], weights=[3, 1])
        >>> list(mixed.take(8)), len(mixed)
        ([0, 1, 2, 3, 100, 4, 5, 101], 133)
        >>> list(interleave([[*"abcd"], [*"xy"]], stop="each_once"))
        ['x', 'a', 'b', 'y', 'c', 'd']
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
    stop = _checked_stop(stop)
    if not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(f"interleave(shuffle={shuffle!r}): give True or False")
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
    changes, level, is_by_index = changes_of(weights, len(given)), max(map(_levels, given)), all(map(is_indexed, given))
    if not is_by_index and (shuffle or (stop == EACH and len(changes) > 1)):
        number = list(map(is_indexed, given)).index(False)
        raise TypeError(
            f"interleave: datasets[{number}], {an(type(given[number]))}, is read in its own order only. shuffle=True, "
            "and each_once with a schedule, need datasets that are read by index. Shuffle that dataset itself"
        )
    schedule: Schedule | Plan
    if len(changes) == 1 and (stop != EACH or not is_by_index):
        schedule = Schedule(changes[0].weights, seed, level)
    else:
        is_read = [any(one.weights[number] for one in changes) for number in range(len(given))]
        sizes = [len(one) if read else 0 for one, read in zip(given, is_read, strict=True)] if stop == EACH else None
        schedule = Plan(changes, seed, level, sizes)
    if not is_by_index:
        return InterleavedIterable(given, schedule, stop)
    return (ShuffledDataset if shuffle else InterleavedDataset)(given, schedule, stop)


def _checked_stop(stop: Any) -> Any:
    if isinstance(stop, (int, np.integer)) and not isinstance(stop, bool) and 0 < stop <= CODED:
        return int(stop)
    if stop not in (FIRST, ALL, EACH):
        raise ValueError(
            f'interleave(stop={stop!r}): give "{FIRST}", "{ALL}" or "{EACH}", or the number of samples of the mixture'
        )
    return stop


def _levels(dataset: Any) -> int:
    """How many mixtures lie within each other in a dataset."""
    own = isinstance(dataset, (InterleavedDataset, InterleavedIterable))
    inside = dataset._inside if isinstance(dataset, (Dataset, InOrder)) else ()
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


class InterleavedDataset(Mixture):
    """Datasets that are read by index, mixed by a schedule; made by `interleave`.

    Attributes:
        schedule: of the datasets that have a weight.
        stop: where it ends.
        shuffles: whether each dataset has a new order in every pass.
        sizes: the number of samples of each dataset that has a weight.
        number: how many datasets `interleave` was given.
        is_planned: whether the order depends on more than the position: a loader plans it; see `codes`.
    """

    shuffles = False
    _epoch = 0

    def __init__(self, datasets: Sequence[Any], schedule: Schedule | Plan, stop: str | int) -> None:
        parts = [datasets[number] for number in schedule.sources]
        sizes = list(map(len, parts))
        for number, part, size in zip(schedule.sources, parts, sizes, strict=True):
            if not size:
                raise _empty(number, part)
        self._dataset = ConcatDataset(parts)
        self.schedule = self._schedule = schedule
        self.stop, self.number = stop, len(datasets)
        self.sizes = np.array(sizes, np.int64)
        self._begins = np.cumsum(self.sizes) - self.sizes
        self._total = sum(sizes)
        self._length = int(_length(schedule, sizes, stop))

    @property
    def is_planned(self) -> bool:
        return self.shuffles or isinstance(self._schedule, Plan) or not isinstance(self.stop, str)

    def codes(self, positions: Int64s, epoch: int, plan: Plan | None = None) -> Int64s:
        """A number from `CODED` on for the sample at each position of an epoch. The mixture takes it as an index.

        The number also says which pass it is. So a sample that comes again draws other random numbers.

        Args:
            positions: below the length.
            epoch: which epoch.
            plan: of the same datasets, with other weights; None: the weights that the mixture was given.
        """
        inner, passes = self._placed(positions, epoch, plan)
        most = CODED // self._total
        return CODED + inner + self._total * ((epoch * 2_654_435_769 % most + passes) % most)

    def sources_of(self, indices: Any) -> Int64s:
        array = np.asarray(indices)
        if _is_coded(array):
            found = np.searchsorted(self._begins, (array - CODED) % self._total, side="right") - 1
        else:
            found = self._schedule.owners(checked_indices(array, self._length))
        return np.bincount(np.array(self._schedule.sources)[found], minlength=self.number)

    def pairs(self, indices: Any, epoch: int) -> list[tuple[int, int]]:
        inner = self._in_joined(indices, epoch)
        places = np.searchsorted(self._begins, inner, side="right") - 1
        sources = np.array(self.schedule.sources)[places]
        return [*zip(sources.tolist(), (inner - self._begins[places]).tolist(), strict=True)]

    def _placed(self, positions: Int64s, epoch: int, plan: Plan | None = None) -> tuple[Int64s, Int64s]:
        """Where in the joined datasets the samples at these positions are, and in which pass of their dataset."""
        sources, numbers = (plan or self._schedule).at_many(positions)
        places = self._within(sources, numbers, epoch) if self.shuffles else numbers % self.sizes[sources]
        return self._begins[sources] + places, numbers // self.sizes[sources]

    def _within(self, sources: Int64s, numbers: Int64s, epoch: int) -> Int64s:
        """Which of its samples each dataset gives, if it is shuffled in every pass."""
        passes, places = np.divmod(numbers, self.sizes[sources])
        shuffle = Bijections(self._schedule.seed, "interleave shuffle", epoch)
        return shuffle(places, self.sizes[sources], passes * len(self.sizes) + sources)

    def __len__(self) -> int:
        return self._length

    def _one(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        if isinstance(index, int) and index >= CODED:
            return self._dataset[(index - CODED) % self._total]
        index = checked_index(index, self._length)
        source, number = self._schedule.at(index)
        if self.shuffles:
            one = np.array([[source], [number]], np.int64)
            number = int(self._within(one[0], one[1], self._epoch)[0])
        return self._dataset[int(self._begins[source] + number % self.sizes[source])]

    def _inner(self, indices: Indices) -> Int64s:
        return self._in_joined(indices, self._epoch)

    def _in_joined(self, indices: Any, epoch: int) -> Int64s:
        """Where in the joined datasets samples are, by positions in an epoch or by what `codes` has returned."""
        array = np.asarray(indices)
        if _is_coded(array):
            return (array - CODED) % self._total
        return self._placed(checked_indices(array, self._length), epoch)[0]

    def __repr__(self) -> str:
        return f"interleave({self._dataset!r}, weights={brief(self._schedule.weights)}; {self._length} samples)"


class ShuffledDataset(InterleavedDataset):
    """A mixture whose datasets have a new random order in every pass; made by `interleave`."""

    shuffles = True

    def set_epoch(self, epoch: int) -> None:
        """Read in the order of this epoch, and tell the datasets. A `ShardedDataLoader` counts the epochs itself."""
        self._epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        tell_epoch(self._dataset, epoch)


def _is_coded(array: Any) -> bool:
    return bool(array.size and array.ndim == 1 and array.dtype.kind in "iu" and array[0] >= CODED)


def _length(schedule: Schedule | Plan, sizes: list[int], stop: str | int) -> float:
    """The number of samples of a mixture."""
    if isinstance(stop, int):
        return stop
    if isinstance(schedule, Plan) and schedule.length is not None:
        return schedule.length
    if stop == FIRST:
        return min(schedule.positions(sizes))
    lasts: list[float] = [*schedule.positions([size - 1 for size in sizes])]
    if math.inf in lasts:
        number = schedule.sources[lasts.index(math.inf)]
        raise ValueError(
            f'interleave(stop="{ALL}"): datasets[{number}] has the weight 0 at the end of the schedule, '
            "before its last sample was read: give it a weight there, or another stop"
        )
    return max(lasts) + 1


def has_shuffled(dataset: Any) -> bool:
    """Whether a dataset is a shuffled mixture, or has one inside.

    Example:
        >>> has_shuffled(interleave([[1], [2]], shuffle=True).take(1)), has_shuffled([1])
        (True, False)
    """
    inside = dataset._inside if isinstance(dataset, Dataset) else ()
    return isinstance(dataset, ShuffledDataset) or any(map(has_shuffled, inside))


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
    stop: Any = entry(anything, "stop was {was!r}, and is {now!r}")  # noqa: RUF009
    epoch: Any = entry(anything)  # noqa: RUF009 - it makes a field
    position: int = entry(integer(0))
    sources: tuple[SourcePoint, ...] = entry(
        list_of(dict_of(SourcePoint)), write=lambda points: list(map(written, points))
    )


class InOrder:
    """Base class of iterable data that torch's DataLoader takes as an IterableDataset: it asks ``isinstance``."""

    _inside: Any = ()

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

    def __init__(self, datasets: Sequence[Any], schedule: Schedule | Plan, stop: str | int) -> None:
        self._inside = self._datasets = datasets
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
        counts_all = isinstance(schedule, Plan) or not isinstance(self._stop, str)
        begin = self._beginning() if state is None else state
        reading = _Iteration(begin, datasets, schedule.sources, counts_all)
        self._last = reading
        while not isinstance(self._stop, int) or reading.place < self._stop:
            source = reading.sources[schedule.owner(reading.position, reading.place)]
            has_dropped_out = self._stop == EACH and source.passes
            sample = END if has_dropped_out else source.read()
            if sample is END and not has_dropped_out:
                if not source.taken and self._stop != EACH:
                    raise _empty(source.number, source.dataset, source.passes)
                is_last = all(one.passes or one is source for one in reading.sources)
                if self._stop == FIRST or (is_last and self._stop in (ALL, EACH)):
                    break
                source.start_over()
                if self._stop != EACH:
                    continue
            reading.position += 1
            if sample is END:
                continue
            self._last = reading
            yield sample
        if self._last is reading:
            self._last = None

    def set_epoch(self, epoch: Any) -> None:
        """Pass the epoch on to the datasets. A position stays if it is in this epoch."""
        for dataset in self._datasets:
            tell_epoch(dataset, epoch)
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
    """One iteration: how far it is in the mixture and in each source.

    Args:
        begin: where it begins.
        datasets, numbers: of the mixture, and which of them have a weight.
        counts_all: whether `place` counts the samples of all workers.
    """

    def __init__(
        self, begin: _MixPosition, datasets: Sequence[Any], numbers: Sequence[int], counts_all: bool = False
    ) -> None:
        self._begin, self.position = begin, begin.position
        # Who asks divides the data itself. An iterable dataset asks on its own, or is read by each worker as a whole.
        worker = this_worker() if counts_all or any(map(is_divided, datasets)) else None
        self._part, self._parts = (worker or (0, 1)) if counts_all else (0, 1)
        times = Counter(map(id, datasets))  # two iterators of one object share its state
        self.sources = [
            Source(number, datasets[number], point, worker, times[id(datasets[number])] == 1)
            for number, point in zip(numbers, begin.sources, strict=True)
        ]

    @property
    def place(self) -> int:
        """The position among the samples of all workers, if each one has read as many as this one."""
        return self.position * self._parts + self._part

    def state(self) -> _MixPosition:
        return replace(self._begin, position=self.position, sources=tuple(source.state() for source in self.sources))
