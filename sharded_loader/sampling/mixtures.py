"""`MixtureSampler`: the order of a mixture whose datasets are shuffled, or whose weights change.

    interleave(datasets, shuffle=True) -> sampler_of(dataset) -> MixtureSampler
    epoch, position -> plan of the epoch -> mixture.codes(positions) -> numbers that the mixture takes as indices
    loader.set_weights(weights) -> MixtureSampler.set_weights(weights, epoch, position)

A loader makes this sampler if the user gives no other order. The main process then computes which sample is where, and
workers only look it up. So weights that change reach no worker, and the order is exact where an epoch of the loader
ends in the middle of an epoch of the mixture (``steps_per_epoch``, ``last_batch="rollover"``).

The sampler owns the weights that were set while training, each with the epoch and the position from which it holds. A
state of the loader has them as ``set_weights``. They decide the order together with what the mixture was given: a state
may be loaded on any number of ranks. The mixture itself is not changed, and several loaders may read it.

What can go wrong: weights that do not fit the mixture; a state with other ones. A ValueError says what to give.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from sharded_loader.data.bulk import Int64s
from sharded_loader.data.interleave import InterleavedDataset, has_shuffled, mixture_of
from sharded_loader.data.schedule import Change, Plan, whole_numbers
from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.index_samplers import IndexSampler
from sharded_loader.sampling.state import WEIGHTS_SET


class _SetWeights(NamedTuple):
    """Weights that were set while training, and from where on they hold."""

    epoch: int
    position: int
    weights: list[int]


class MixtureSampler(IndexSampler):
    """The samples of a mixture in its own order, as numbers that say which sample it is; see the module.

    Args:
        mixture: what `interleave` returned for datasets that are read by index.

    Example:
        >>> from sharded_loader import interleave
        >>> mixed = interleave([[*"abcd"], [*"xy"]], stop="each_once", shuffle=True)
        >>> sampler = MixtureSampler(mixed)
        >>> [mixed[number] for number in sampler], [mixed[number] for number in sampler]
        (['y', 'a', 'c', 'x', 'b', 'd'], ['x', 'c', 'a', 'y', 'b', 'd'])
    """

    decided_by = (
        ("weights", "_weights"),
        ("seed", "_mixture_seed"),
        ("stop", "_stop"),
        ("shuffle", "_shuffles"),
        ("sizes", "_sizes"),
    )

    def __init__(self, mixture: InterleavedDataset) -> None:
        self._mixture, self._length = mixture, len(mixture)
        self._weights, self._mixture_seed = mixture.schedule.weights, mixture.schedule.seed
        self._stop, self._shuffles, self._sizes = mixture.stop, mixture.shuffles, mixture.sizes
        self._set: tuple[_SetWeights, ...] = ()

    def _order(self, epoch: int) -> Any:
        mixture, plan = self._mixture, self._plan(epoch, self._set)

        def order(positions: Indices) -> Int64s:
            return mixture.codes(positions, epoch, plan)

        return order

    def _plan(self, epoch: int, given: tuple[_SetWeights, ...]) -> Plan | None:
        """The plan of an epoch; None: that of the mixture."""
        before = [one for one in given if one.epoch < epoch]
        within = [one for one in given if one.epoch == epoch]
        if not before and not within:
            return None
        changes = [Change(0, before[-1].weights)] if before else self._mixture.changes
        for one in within:
            changes = [*(change for change in changes if change.begin < one.position), Change(*one[1:])]
        return self._mixture.replanned(changes)

    def set_weights(self, weights: Any, epoch: int, position: int) -> None:
        """Mix by these weights from a position of an epoch on, and in the epochs after it.

        Raises:
            ValueError: weights that do not fit. Nothing has changed then.
        """
        found = whole_numbers(weights, self._mixture.number, "set_weights")
        self._set = self._checked([*self._set, _SetWeights(epoch, position, found)])

    def _checked(self, given: list[_SetWeights]) -> tuple[_SetWeights, ...]:
        """The weights that decide the order of the last epoch in which some were set, and of those after it."""
        last = given[-1]
        read = set(self._mixture.schedule.sources)
        for number in (number for number, weight in enumerate(last.weights) if weight and number not in read):
            raise ValueError(
                f"set_weights: datasets[{number}] had the weight 0 when the mixture was made, and is never read: give "
                "it a weight there, if only from a late sample on, such as weights=[(0, [1, 0]), (10**12, [1, 1])]"
            )
        earlier = [one for one in given if one.epoch < last.epoch][-1:]
        kept = [one for one in given if one.epoch == last.epoch and one.position < last.position]
        found = (*earlier, *kept, last)
        for epoch in (last.epoch, last.epoch + 1):
            self._plan(epoch, found)
        return found

    @property
    def weights_set(self) -> str:
        """The weights that were set, for a state."""
        return json.dumps(self._set)

    def adopt(self, arguments: dict[str, Any]) -> None:
        """Take over the weights that were set, from a state.

        Raises:
            ValueError: they are no such weights. Nothing has changed then.
        """
        text = arguments.get(f"{type(self).__name__}.{WEIGHTS_SET}", "[]")
        try:
            count = self._mixture.number
            given = [_SetWeights(int(one[0]), int(one[1]), whole_numbers(one[2], count)) for one in json.loads(text)]
            self._set = self._checked(given) if given else ()
        except (TypeError, ValueError, IndexError) as error:
            raise ValueError(f"load_state_dict: the weights of the state do not fit the mixture: {error}") from error


def sampler_of(dataset: Any, is_given: bool, rolls_over: bool) -> MixtureSampler | None:
    """The sampler of a mixture whose order a loader plans; None: the dataset is no such mixture.

    Args:
        dataset: the loader's.
        is_given: whether the user has given another order.
        rolls_over: whether an epoch of the loader may begin inside an epoch of the dataset.

    Raises:
        ValueError: a shuffled mixture that has to know its epoch, and batches that belong to two epochs.
    """
    mixture = None if is_given else mixture_of(dataset)
    if mixture is not None and mixture.is_planned:
        return MixtureSampler(mixture)
    if rolls_over and has_shuffled(dataset):
        raise ValueError(
            "interleave(shuffle=True) inside another dataset, or under a sampler, with steps_per_epoch or rollover: "
            "the mixture would be shuffled anew before all of its samples were read. Give the loader the mixture "
            "itself without a sampler, or leave out steps_per_epoch and rollover"
        )
    return None


def why_not_set(dataset: Any, is_stream: bool) -> str:
    """Why the weights of a loader's dataset cannot be set while training, and what to do."""
    if is_stream:
        return "iterable data is mixed by its workers: give interleave a schedule, weights=[(0, [...]), (1000, [...])]"
    mixture = mixture_of(dataset)
    if mixture is None:
        return "the loader's dataset is not what interleave() returns, nor a transform of it: give it that"
    if mixture.is_planned:
        return "another sampler, or shuffle=True, gives the order: leave it out, and use interleave(..., shuffle=True)"
    return "this mixture has fixed weights: make it with shuffle=True, or with a schedule, weights=[(0, [...])]"
