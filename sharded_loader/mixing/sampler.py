"""The order of a mixture in a loader, which asks for it by name.

    sampler_of(dataset) -> MixtureSampler -> numbers that the mixture takes as indices

What can go wrong: weights that do not fit; a shuffled mixture that would begin another order in mid-epoch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from typing import Any

from sharded_loader.data.datasets import mixture_of
from sharded_loader.mixing.interleave import InterleavedDataset, has_shuffled
from sharded_loader.mixing.schedule import Plan, whole_numbers
from sharded_loader.sampling.own import IndexSampler
from sharded_loader.sampling.state import WEIGHTS_SET
from sharded_loader.sampling.tables import BLOCK, Table

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

    decided_by = (
        ("weights", "_start"),
        ("seed", "_seed"),
        ("stop", "_stop"),
        ("shuffle", "_on"),
        ("sizes", "_sizes"),
    )
    order_version = 2

    def __init__(self, mixture: InterleavedDataset) -> None:
        self._mixture, self._length = mixture, len(mixture)
        self._start, self._seed = mixture.schedule.weights, mixture.schedule.seed
        self._stop, self._on, self._sizes = mixture.stop, mixture.shuffles, mixture.sizes
        plan = mixture.schedule
        self._base = plan if isinstance(plan, Plan) else Plan(plan.changes, plan.seed, plan.level)
        self._set: tuple[Moment, ...] = ()
        self.forgotten = -1
        self._known: tuple[list[Any], Plan] = [], self._base

    def epoch_table(self, epoch: int) -> Table:
        return Table(self._length, self._order(epoch), BLOCK // 8)  # less is lost where weights are set

    def _order(self, epoch: int) -> Any:
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

    def set_weights(self, weights: Any, epoch: int, position: int) -> None:
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

    def adopt(self, arguments: dict[str, Any]) -> None:
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
    mixture: Any = None if is_given else mixture_of(dataset)
    mixture = mixture if mixture is not None and mixture.is_planned else None
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
