"""`interleave`: several datasets as one, mixed by weight, exact at every position.

    interleave(datasets by index) -> InterleavedDataset    a `Dataset`: reads any position, also in bulk
    interleave(datasets in order) -> InterleavedIterable   iterable data (`sharded_loader.mixing.in_order`)
    sampler_of(dataset) -> MixtureSampler                  the order of a mixture in a loader, which asks for it by name
    Sources(dataset, order)(task, result) -> SampleSource  of a batch, with `with_source=True`

A mixture that is shuffled, or whose weights change, has another order each epoch. A loader computes that order in the
main process (`MixtureSampler`) and sends workers numbers from `CODED` on, which identify samples independently of epoch
and weights. So the order is exact also where a batch belongs to two epochs. Other readers call ``set_epoch``.

Errors: TypeError for arguments that are not datasets; ValueError for empty datasets, invalid weights, and shuffled
mixtures that would change their order mid-epoch.
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
from sharded_loader.extend.data import Mixture, announce_epoch, checked_index, checked_indices, mixture_of, nested
from sharded_loader.extend.order import BLOCK, WEIGHTS_SET, IndexSampler
from sharded_loader.extend.tools import an, brief, check_int, refuse_arguments
from sharded_loader.mixing import in_order
from sharded_loader.mixing.schedule import ALL, EACH, FAR, FIRST, Plan, changes_of, whole_numbers
from sharded_loader.samplers.bijections import Bijections

CODED = FAR
"""First of the numbers that identify samples of a mixture in a loader; see `InterleavedDataset.codes`."""


def interleave(
    datasets: Iterable[object],
    weights: Iterable[object] | None = None,
    seed: int = 0,
    stop: str | int = FIRST,
    shuffle: bool = False,
    **unknown: NoReturn,
) -> Any:
    """Combine several datasets into one: samples mixed by weight, each dataset in its own order.

    At every position, each dataset is within a few samples of its share. This also holds for every n-th sample, so each
    of n ranks has the same shares. The source of sample n depends only on weights, seed and n.

    Args:
        datasets: one or more. If all have ``__getitem__`` and ``__len__``, the mixture is indexed. Otherwise it is read
            in order. Datasets may then have only ``__iter__``, or be functions that return a new iterator; these may
            take the number of the worker and of workers.
        weights: one number from 0 per dataset; by default equal. Only ratios count: they are exact for whole numbers
            with a sum of up to 65,536, others are rounded to 65,536ths. Datasets with weight 0 are never read. A
            schedule is a dict or list of pairs (sample, weights), such as ``[(0, [1, 1]), (80_000, [9, 1])]``: the
            second weights hold from sample 80,000 of each epoch on, counted over all ranks (step 1,000 of 8 ranks with
            10 samples per step).
        seed: decides where the schedule starts, and the order of ``shuffle``.
        stop: ``"first_exhausted"``: end when a dataset has no sample left at its turn. ``"all_exhausted"``: shorter
            datasets start over until each has been read to its end. ``"each_once"``: exhausted datasets drop out, and
            the others continue in the ratio of their weights, so every sample comes exactly once. An integer: the
            number of samples; datasets start over.
        shuffle: give each dataset a new random order in every pass: each time it starts over, and each epoch. Requires
            indexed datasets.

    Returns:
        Indexed: a `Dataset`, which ends with the last unread sample if ``stop`` is ``"all_exhausted"``. With
        ``shuffle``, it has ``set_epoch(epoch)``, which a `ShardedDataLoader` does not need.

        In order: an iterable, which torch's ``DataLoader`` accepts as an ``IterableDataset``. Each iteration starts at
        the beginning. It has:

        - ``state_dict()``: position of the iterator that was used last, or the beginning after its end;
          ``load_state_dict(state)`` lets the next iteration continue there.
        - ``set_epoch(epoch)``: passed on; drops a loaded position of another epoch.
        - ``num_shards``: smallest number of shards of its datasets, if any has shards.

        With several workers, or parts of a `ShardedDataLoader`, each mixes its own part of the datasets. Indexed
        datasets are divided by the mixture, iterable ones divide themselves by ``get_worker_info()``, as usual in
        torch.

    Raises:
        TypeError: An argument has the wrong type; a dataset can be read only once, like a generator; ``shuffle`` with
            an iterable dataset.
        ValueError: There are no datasets, weights are invalid, a schedule goes back, or ``stop`` is unknown. A dataset
            with a weight is empty, or never read to its end although ``stop`` waits for that.

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
    ``interleave_datasets``, whose words for ``stop`` these are.
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
    changes, level = changes_of(weights, len(given)), max(map(_levels, given))
    indexed = list(map(in_order.is_indexed, given))
    if not all(indexed) and (shuffle or (stop == EACH and len(changes) > 1)):
        number = indexed.index(False)
        text = f"interleave: datasets[{number}], {an(type(given[number]))}, is read in its own order only"
        why = "shuffle=True, and each_once with a schedule, need datasets that are read by index"
        raise TypeError(f"{text}. {why}. Shuffle that dataset itself")
    if not all(indexed):
        return in_order.InterleavedIterable(given, Plan(changes, seed, level), stop)
    sizes = list(map(len, given)) if stop == EACH else None
    return (ShuffledDataset if shuffle else InterleavedDataset)(given, Plan(changes, seed, level, sizes), stop)


def _levels(dataset: object) -> int:
    """Return the depth of nested mixtures in a dataset."""
    own = isinstance(dataset, (InterleavedDataset, in_order.InterleavedIterable))
    inside = dataset._inside if isinstance(dataset, (Dataset, in_order.InOrder)) else ()
    return own + max(map(_levels, inside), default=0)


# -- by index ----------------------------------------------------------------------------------------------------------


class InterleavedDataset(Mixture):
    """Indexed datasets, mixed by a schedule; made by `interleave`.

    Attributes:
        schedule, sizes: plan and lengths of the datasets with a weight; fingerprints use ``_schedule``.
        number: number of datasets, including those without a weight.
        is_planned: True if the order depends on more than the position, so that a loader computes it; see `codes`.
    """

    shuffles = False
    epoch = 0

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
        """Return numbers from `CODED` on that identify samples of an epoch; they are valid indices.

        They include the pass, so that repeated samples draw other random numbers. ``plan`` replaces the original
        weights.
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

    def positions_of(self, source: int, index: int, epoch: int, plan: Plan | None = None) -> list[int]:
        """Return the positions in an epoch of a sample of a source: one in each pass of it. ``plan``: as in `codes`."""
        place = self.schedule.sources.index(source) if source in self.schedule.sources else -1
        size, shuffle, found = int(self.sizes[place]), self._shuffle(epoch), list[int]()
        while place >= 0 and 0 <= index < size:
            turn = len(found)
            within = shuffle.inverse(index, size, turn * len(self.sizes) + place) if self.shuffles else index
            position = (plan or self._schedule).position(turn * size + within, place)
            if position >= self._length:
                break
            found.append(int(position))
        return found

    def _placed(self, positions: Int64s, epoch: int, plan: Plan | None = None) -> tuple[Int64s, Int64s]:
        """Return places in the joined datasets, and the pass of each place's dataset."""
        sources, numbers = (plan or self._schedule).at_many(positions)
        passes, places = np.divmod(numbers, self.sizes[sources])
        if self.shuffles:
            places = self._shuffle(epoch)(places, self.sizes[sources], passes * len(self.sizes) + sources)
        return self._begins[sources] + places, passes

    def _shuffle(self, epoch: int) -> Bijections:
        return Bijections(self._schedule.seed, "interleave shuffle", epoch)

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
        return self._in_joined(indices, self.epoch)

    def _in_joined(self, indices: Indices, epoch: int) -> Int64s:
        """Return places in the joined datasets, for positions in an epoch or numbers from `codes`."""
        array = np.asarray(indices)
        if _is_coded(array):
            return (array - CODED) % self._total
        return self._placed(checked_indices(array, self._length), epoch)[0]

    def __repr__(self) -> str:
        return f"interleave({self._dataset!r}, weights={brief(self._schedule.weights)}; {self._length} samples)"


class ShuffledDataset(InterleavedDataset):
    """Mixture whose datasets have a new random order in every pass; made by `interleave`."""

    shuffles = True

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch whose order is read, also for the datasets. A `ShardedDataLoader` does not need it."""
        self.epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        announce_epoch(self._dataset, epoch)


def _is_coded(array: Array) -> bool:
    return bool(array.size and array.ndim == 1 and array.dtype.kind in "iu" and array[0] >= CODED)


def _length(schedule: Plan, sizes: list[int], stop: str | int) -> float:
    if isinstance(stop, int):
        return stop
    if schedule.length is not None:
        return schedule.length
    if stop == FIRST:
        return min(map(schedule.position, sizes, range(len(sizes))))
    lasts = [schedule.position(size - 1, source) for source, size in enumerate(sizes)]
    if math.inf in lasts:
        number = schedule.sources[lasts.index(math.inf)]
        text = f'interleave(stop="{ALL}"): datasets[{number}] has the weight 0 at the end of the schedule'
        raise ValueError(f"{text}, before its last sample was read: give it a weight there, or another stop")
    return max(lasts) + 1


def has_shuffled(dataset: object) -> bool:
    """Return True if a dataset is or contains a shuffled mixture.

    Example:
        >>> has_shuffled(interleave([[1], [2]], shuffle=True).take(1)), has_shuffled([1])
        (True, False)
    """
    return any(isinstance(one, ShuffledDataset) for one in nested(dataset))


# -- in a loader ------------------------------------------------------------------------------------------------------

Moment = tuple[int, int, list[int]]
"""Weights set during training: epoch and position from which they hold, and whole numbers."""


class MixtureSampler(IndexSampler):
    """Order of a mixture, as numbers that the mixture accepts as indices.

    A loader uses it if the user chooses no other order. The main process computes the order and workers only look up
    samples, so changed weights are not sent to workers. The order is exact even if epochs of loader and mixture differ
    (``steps_per_epoch``, ``last_batch="rollover"``). The sampler owns the weights set during training, which loader
    states save as ``set_weights``. The mixture is not modified, so several loaders may share it.

    ``forgotten`` is the last epoch whose weights a loaded state does not contain, or -1.

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
        return Table(self._length, self._order(epoch), BLOCK // 8)  # small blocks: less to discard if weights change

    def _order(self, epoch: int) -> Callable[[Int64s], Int64s]:
        return partial(self._mixture.codes, epoch=epoch, plan=self._plan(epoch, self._set))

    def positions_of(self, index: tuple[int, int], epoch: int) -> list[int]:
        if epoch <= self.forgotten:
            raise ValueError(f"when: the weights of epoch {epoch} are not in the loaded state: ask an older one")
        return self._mixture.positions_of(*index, epoch, self._plan(epoch, self._set))

    def _plan(self, epoch: int, given: Sequence[Moment]) -> Plan:
        """Return the plan of an epoch. The last one is cached, so that one more change takes 2 ms."""
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
        """Change the weights from a position of an epoch on; raise ValueError, changing nothing, if invalid."""
        found = whole_numbers(weights, self._mixture.number, "set_weights")
        before = [one for one in self._set if one[:2] < (epoch, position)]
        self._base.changed(0, found)  # check them for the next epoch
        self._plan(epoch, [*before, (epoch, position, found)])
        self._set = (*before, (epoch, position, found))

    def forgets(self, wrappers: object, epoch: int, position: int) -> bool:
        """Return True if the weights at a position are not known."""
        return epoch <= self.forgotten

    @property
    def weights_set(self) -> str:
        """Changed weights for a state: those that affect the last epoch with changes, and the ones after it."""
        last = self._set[-1][0] if self._set else 0
        before = [one for one in self._set if one[0] < last][-1:]
        return json.dumps([*before, *(one for one in self._set if one[0] == last)])

    def adopt(self, arguments: dict[str, str]) -> None:
        """Restore changed weights from a state; raise ValueError, changing nothing, if they are invalid."""
        before, self._set = self._set, ()
        try:
            for epoch, position, weights in json.loads(arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", "[]")):
                self.set_weights(weights, int(epoch), int(position))
            # States have all changes of the last epoch with any, but only the last one of the epochs before.
            first, last = (self._set[0][0], self._set[-1][0]) if self._set else (0, 0)
            self.forgotten = first if first < last else -1
        except (TypeError, ValueError) as error:
            self._set = before
            raise ValueError(f"load_state_dict: the weights of the state do not fit the mixture: {error}") from error


def sampler_of(dataset: Any, sampler: Any, is_given: bool, rolls_over: bool) -> Any:
    """Return the sampler of a loader over a mixture, or over a dataset that contains one.

    Unless ``is_given``, ``sampler`` is None or repeats the loader's order. Raises a ValueError if a shuffled mixture
    has to know the epoch, but epochs of the loader may begin inside those of the dataset (``rolls_over``).
    """
    mixture = None if is_given else mixture_of(dataset)
    if not isinstance(mixture, InterleavedDataset) or not mixture.is_planned:
        mixture = None
    if rolls_over and (has_shuffled(dataset) if mixture is None else any(map(has_shuffled, mixture._inside))):
        text = "interleave(shuffle=True) inside another dataset, or under a sampler, with steps_per_epoch or rollover"
        why = "the mixture would begin another order before all of its samples were read"
        advice = "Give the loader the mixture itself without a sampler, or leave out steps_per_epoch and rollover"
        raise ValueError(f"{text}: {why}. {advice}")
    if mixture is None:
        return sampler
    planned = MixtureSampler(mixture)
    return planned if sampler is None else sampler.over(planned)
