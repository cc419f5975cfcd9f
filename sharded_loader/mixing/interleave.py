"""`interleave`: several datasets as one, mixed by weight, exact at every position.

    interleave(datasets by index) -> InterleavedDataset    a `Dataset`: reads any position, also in bulk
    interleave(datasets in order) -> InterleavedIterable   iterable data (`sharded_loader.mixing.in_order`)
    sampler_of(dataset) -> MixtureSampler                  the order of a mixture in a loader, which asks for it by name

`sharded_loader.mixing.schedule` says which dataset gives the sample at a position. A mixture owns no thread and no
process.

A mixture that is shuffled, or whose weights change, has another order in each epoch. A loader plans that order in the
main process (`MixtureSampler`), and sends workers numbers above `CODED`. Such a number says which sample it is,
whatever the epoch and the weights are. So workers need not be told of either, and the order stays exact where a batch
belongs to two epochs. Other readers, such as PyTorch's ``DataLoader``, call ``set_epoch``.

What can go wrong: an argument is no list of datasets: the error says what to write instead. A dataset has no samples,
weights do not fit, or a shuffled mixture would begin another order in mid-epoch: a ValueError.

Source of the idea: `sharded_loader.mixing.schedule` names it; the words for ``stop`` are those of Hugging Face's
``interleave_datasets``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence, ValuesView
from functools import partial
from typing import Any, NoReturn

import numpy as np

from sharded_loader import ConcatDataset
from sharded_loader.extend import Array, Dataset, Indices, Int64s, Table
from sharded_loader.extend.data import Mixture, checked_index, checked_indices, is_indexed, mixture_of, tell_epoch
from sharded_loader.extend.order import BLOCK, WEIGHTS_SET, Bijections, IndexSampler
from sharded_loader.extend.tools import an, brief, check_int, refuse_arguments
from sharded_loader.mixing import in_order
from sharded_loader.mixing.schedule import ALL, EACH, FAR, FIRST, Plan, changes_of, whole_numbers

CODED = FAR
"""The least of the numbers by which a loader names the samples of a mixture; see `InterleavedDataset.codes`."""


def interleave(
    datasets: Iterable[object],
    weights: Iterable[object] | None = None,
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
    if isinstance(stop, (int, np.integer)) and not isinstance(stop, bool) and 0 < stop <= CODED:
        stop = int(stop)
    elif stop not in (FIRST, ALL, EACH):
        raise ValueError(
            f'interleave(stop={stop!r}): give "{FIRST}", "{ALL}" or "{EACH}", or the number of samples of the mixture'
        )
    if not isinstance(shuffle, (bool, np.bool_)):
        raise TypeError(f"interleave(shuffle={shuffle!r}): give True or False")
    seed = check_int("seed", seed, -math.inf, "give an int")
    if not isinstance(datasets, (list, tuple, Iterator, ValuesView)):
        raise TypeError(f"interleave needs a list of datasets, not {an(type(datasets))}: interleave([first, second])")
    given = [in_order.check_source(dataset, in_order.name_of_source(number)) for number, dataset in enumerate(datasets)]
    if not given:
        raise ValueError("interleave was given no datasets: give at least one")
    changes, level, indexed = changes_of(weights, len(given)), max(map(_levels, given)), list(map(is_indexed, given))
    if not all(indexed) and (shuffle or (stop == EACH and len(changes) > 1)):
        number = indexed.index(False)
        raise TypeError(
            f"interleave: datasets[{number}], {an(type(given[number]))}, is read in its own order only. shuffle=True, "
            "and each_once with a schedule, need datasets that are read by index. Shuffle that dataset itself"
        )
    if not all(indexed):
        return in_order.InterleavedIterable(given, Plan(changes, seed, level), stop)
    is_read = [any(change.weights[number] for change in changes) for number in range(len(given))]
    sizes = [len(one) if read else 0 for one, read in zip(given, is_read, strict=True)] if stop == EACH else None
    return (ShuffledDataset if shuffle else InterleavedDataset)(given, Plan(changes, seed, level, sizes), stop)


def _levels(dataset: object) -> int:
    """How many mixtures lie within each other in a dataset."""
    own = isinstance(dataset, (InterleavedDataset, in_order.InterleavedIterable))
    inside = dataset._inside if isinstance(dataset, (Dataset, in_order.InOrder)) else ()
    return own + max(map(_levels, inside), default=0)


# -- by index ----------------------------------------------------------------------------------------------------------


class InterleavedDataset(Mixture):
    """Datasets that are read by index, mixed by a schedule; made by `interleave`.

    Attributes:
        schedule: of the datasets that have a weight. A fingerprint has it as ``_schedule``.
        stop: where it ends.
        shuffles: whether each dataset has a new order in every pass.
        sizes: the number of samples of each dataset that has a weight.
        number: how many datasets `interleave` was given.
        is_planned: whether the order depends on more than the position: a loader plans it; see `codes`.
    """

    shuffles = False
    _epoch = 0

    def __init__(self, datasets: Sequence[Any], schedule: Plan, stop: str | int) -> None:
        parts = [datasets[number] for number in schedule.sources]
        sizes = list(map(len, parts))
        for number, part, size in zip(schedule.sources, parts, sizes, strict=True):
            if not size:
                raise in_order.no_samples(in_order.name_of_source(number), part)
        self._dataset = ConcatDataset(parts)
        self.schedule = self._schedule = schedule
        self.stop, self.number = stop, len(datasets)
        self.sizes = np.array(sizes, np.int64)
        self._begins = np.cumsum(self.sizes) - self.sizes
        self._total = sum(sizes)
        self._length = int(_length(schedule, sizes, stop))
        self.is_planned = self.shuffles or not schedule.is_fixed or not isinstance(stop, str)

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

    def sources_of(self, indices: Indices) -> Int64s:
        array = np.asarray(indices)
        if _is_coded(array):
            found = np.searchsorted(self._begins, (array - CODED) % self._total, side="right") - 1
        else:
            found = self._schedule.owners(checked_indices(array, self._length))
        return np.bincount(np.array(self._schedule.sources)[found], minlength=self.number)

    def pairs(self, indices: Indices, epoch: int) -> list[tuple[int, int]]:
        inner = self._in_joined(indices, epoch)
        places = np.searchsorted(self._begins, inner, side="right") - 1
        sources = np.array(self.schedule.sources)[places]
        return [*zip(sources.tolist(), (inner - self._begins[places]).tolist(), strict=True)]

    def _placed(self, positions: Int64s, epoch: int, plan: Plan | None = None) -> tuple[Int64s, Int64s]:
        """Where in the joined datasets the samples at these positions are, and in which pass of their dataset."""
        sources, numbers = (plan or self._schedule).at_many(positions)
        passes, places = np.divmod(numbers, self.sizes[sources])
        if self.shuffles:
            shuffle = Bijections(self._schedule.seed, "interleave shuffle", epoch)
            places = shuffle(places, self.sizes[sources], passes * len(self.sizes) + sources)
        return self._begins[sources] + places, passes

    def __len__(self) -> int:
        return self._length

    def _one(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        if isinstance(index, int) and index >= CODED:
            return self._dataset[(index - CODED) % self._total]
        index = checked_index(index, self._length)
        if self.shuffles:
            return self._dataset[int(self._inner([index])[0])]
        source, number = self._schedule.at(index)
        return self._dataset[int(self._begins[source] + number % self.sizes[source])]

    def _inner(self, indices: Indices) -> Int64s:
        return self._in_joined(indices, self._epoch)

    def _in_joined(self, indices: Indices, epoch: int) -> Int64s:
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


def _is_coded(array: Array) -> bool:
    return bool(array.size and array.ndim == 1 and array.dtype.kind in "iu" and array[0] >= CODED)


def _length(schedule: Plan, sizes: list[int], stop: str | int) -> float:
    """The number of samples of a mixture."""
    if isinstance(stop, int):
        return stop
    if schedule.length is not None:
        return schedule.length
    if stop == FIRST:
        return min(schedule.positions(sizes))
    lasts = schedule.positions([size - 1 for size in sizes])
    if math.inf in lasts:
        number = schedule.sources[lasts.index(math.inf)]
        raise ValueError(
            f'interleave(stop="{ALL}"): datasets[{number}] has the weight 0 at the end of the schedule, '
            "before its last sample was read: give it a weight there, or another stop"
        )
    return max(lasts) + 1


def has_shuffled(dataset: object) -> bool:
    """Whether a dataset is a shuffled mixture, or has one inside.

    Example:
        >>> has_shuffled(interleave([[1], [2]], shuffle=True).take(1)), has_shuffled([1])
        (True, False)
    """
    inside = dataset._inside if isinstance(dataset, Dataset) else ()
    return isinstance(dataset, ShuffledDataset) or any(map(has_shuffled, inside))


# -- in a loader ------------------------------------------------------------------------------------------------------

Moment = tuple[int, int, list[int]]
"""Weights that were set while training: the epoch and the position from which they hold, and whole numbers."""


class MixtureSampler(IndexSampler):
    """The samples of a mixture in its own order, as numbers that the mixture takes as indices.

    A loader makes this sampler if the user gives no other order. The main process then computes which sample is where,
    and workers only look it up. So weights that change reach no worker, and the order is exact where an epoch of the
    loader ends in the middle of an epoch of the mixture (``steps_per_epoch``, ``last_batch="rollover"``).

    The sampler owns the weights that were set while training, each with the epoch and the position from which it holds.
    A state of the loader has them as ``set_weights``. The mixture itself is not changed: several loaders may read it.

    Attributes:
        forgotten: the last epoch whose weights are not known, because a state does not tell them; -1: there is none.

    Args:
        mixture: what `interleave` returned for datasets that are read by index.

    Example:
        >>> from sharded_loader import interleave
        >>> mixed = interleave([[*"abcd"], [*"xy"]], stop="each_once", shuffle=True, seed=1)
        >>> sampler = MixtureSampler(mixed)
        >>> [mixed[number] for number in sampler], [mixed[number] for number in sampler]
        (['c', 'y', 'd', 'a', 'x', 'b'], ['c', 'y', 'a', 'b', 'x', 'd'])
    """

    decided_by = (("weights", "_start"), ("seed", "_seed"), ("stop", "_stop"), ("shuffle", "_on"), ("sizes", "_sizes"))
    order_version = 2

    def __init__(self, mixture: InterleavedDataset) -> None:
        self._mixture, self._length = mixture, len(mixture)
        self._base = plan = mixture.schedule
        self._start, self._seed = plan.weights, plan.seed
        self._stop, self._on, self._sizes = mixture.stop, mixture.shuffles, mixture.sizes
        self._set: tuple[Moment, ...] = ()
        self.forgotten = -1
        self._known: tuple[list[tuple[int, list[int]]], Plan] = [], plan

    def epoch_table(self, epoch: int) -> Table:
        return Table(self._length, self._order(epoch), BLOCK // 8)  # less is lost where weights are set

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        return partial(self._mixture.codes, epoch=epoch, plan=self._plan(epoch, self._set))

    def _plan(self, epoch: int, given: Sequence[Moment]) -> Plan:
        """The plan of an epoch. The last one is kept: one more change takes 2 ms, whatever was changed before."""
        changes = [(0, weights) for number, _, weights in given if number < epoch][-1:]
        changes += [(begin, weights) for number, begin, weights in given if number == epoch]
        known, plan = self._known
        if changes[: len(known)] != known:
            known, plan = [], self._base
        for change in changes[len(known) :]:
            plan = plan.changed(*change)
        self._known = changes, plan
        return plan

    def set_weights(self, weights: object, epoch: int, position: int) -> None:
        """Mix by these weights from a position of an epoch on, and in the epochs after it.

        Raises:
            ValueError: weights that do not fit. Nothing has changed then.
        """
        found = whole_numbers(weights, self._mixture.number, "set_weights")
        before = [one for one in self._set if one[:2] < (epoch, position)]
        self._base.changed(0, found)  # the next epoch
        self._plan(epoch, [*before, (epoch, position, found)])
        self._set = (*before, (epoch, position, found))

    @property
    def weights_set(self) -> str:
        """The weights that were set, for a state: what decides the last epoch with weights, and those after it."""
        last = self._set[-1][0] if self._set else 0
        before = [one for one in self._set if one[0] < last][-1:]
        return json.dumps([*before, *(one for one in self._set if one[0] == last)])

    def adopt(self, arguments: dict[str, str]) -> None:
        """Take over the weights that were set, from a state.

        Raises:
            ValueError: they are no such weights. Nothing has changed then.
        """
        before, self._set = self._set, ()
        try:
            for epoch, position, weights in json.loads(arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", "[]")):
                self.set_weights(weights, int(epoch), int(position))
            # A state of one epoch has all that were set before; of the epochs before the last one, it has the last.
            first, last = (self._set[0][0], self._set[-1][0]) if self._set else (0, 0)
            self.forgotten = first if first < last else -1
        except (TypeError, ValueError) as error:
            self._set = before
            raise ValueError(f"load_state_dict: the weights of the state do not fit the mixture: {error}") from error


def sampler_of(dataset: Any, sampler: Any, is_given: bool, rolls_over: bool) -> Any:
    """The sampler of a loader over a mixture, or over a dataset that has one inside.

    Args:
        dataset: the loader's.
        sampler: the loader's; if no other order is given, None or a sampler that repeats the loader's order.
        is_given: whether the user has given another order.
        rolls_over: whether an epoch of the loader may begin inside an epoch of the dataset.

    Raises:
        ValueError: a shuffled mixture that has to know its epoch, and batches that belong to two epochs.
    """
    mixture = None if is_given else mixture_of(dataset)
    if not isinstance(mixture, InterleavedDataset) or not mixture.is_planned:
        mixture = None
    if rolls_over and (has_shuffled(dataset) if mixture is None else any(map(has_shuffled, mixture._inside))):
        raise ValueError(
            "interleave(shuffle=True) inside another dataset, or under a sampler, with steps_per_epoch or rollover: "
            "the mixture would begin another order before all of its samples were read. Give the loader the mixture "
            "itself without a sampler, or leave out steps_per_epoch and rollover"
        )
    if mixture is None:
        return sampler
    planned = MixtureSampler(mixture)
    return planned if sampler is None else sampler.over(planned)
