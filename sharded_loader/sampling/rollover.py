"""Epochs as one endless sequence: ``last_batch="rollover"``, and ``steps_per_epoch``.

    Rolling(length, size, epoch)        one epoch: which batches it has, and where they lie among all epochs
    Stretch(length, replicas, ...)      the arithmetic: steps of all ranks, in an endless sequence of epochs
    Endless(open, stretch, rank)        the items of such a stretch as a table, for one rank

With rollover the epochs are one endless sequence, which is cut into whole batches. The samples that do not fill a batch
begin the next epoch. An epoch is the stretch between two cuts; ``steps_per_epoch`` says how many batches that is. Where
it begins follows from the lengths alone, so any epoch can be read without those before it.

What can go wrong: a sampler yields more or fewer items than its length says (ValueError).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.randomness.shuffle import Indices
from sharded_loader.sampling.tables import Batched, Dealt, Table, joined, parts

ENDLESS = 1 << 61
"""The length of a sampler that has none, under ``steps_per_epoch``: no run comes to its end."""


class Rolling:
    """The batches of one epoch with rollover: a stretch of the endless sequence of epochs.

    Args:
        length, replicas: items in an epoch, and how many ranks there are.
        size: items of a batch, for each rank.
        epoch: which epoch. It begins where the whole batches of the epochs before it end.
        total: the number of items before the beginning, counted over all epochs from epoch 0. The batches end where
            epoch + 1 begins. None: begin where the epoch begins.
        batches: the number of batches in an epoch, whatever the length; None: those that fit.

    Attributes:
        first: number of the first batch.
        is_begun: some of the epoch's own items come before ``total``.
        is_behind: ``total`` lies behind the beginning of epoch + 1, so there is no batch.
        begin: the number of items before the epoch, counted over all epochs from epoch 0.

    Example:
        Of 5 items in twos epoch 0 has 2 batches, and epoch 1 begins at item 4.

        >>> one, rest = Rolling(5, 2, epoch=1), Rolling(5, 2, epoch=1, total=6)
        >>> one.length(), one.total(0), rest.first, rest.length()
        (3, 4, 1, 2)
    """

    def __init__(
        self,
        length: int,
        size: int,
        epoch: int,
        replicas: int = 1,
        total: int | None = None,
        batches: int | None = None,
    ) -> None:
        whole = Stretch(length, replicas, 0, 0)
        cuts = [e * whole.steps // size if batches is None else e * batches * bool(length) for e in (epoch, epoch + 1)]
        begin, end = whole.total(cuts[0] * size), whole.total(cuts[1] * size)
        self.begin = begin
        total = begin if total is None else total
        self._size, self._end = size, max(end, total)
        self._stretch = Stretch(length, replicas, *divmod(total, max(length, 1)))
        self._count = self._stretch.steps_before(self._end) if total < end else 0
        self.is_begun, self.is_behind = total > begin, total > end
        self.first = max(0, (whole.steps_before(total, cut=True) - whole.steps_before(begin)) // size)

    def items(self, open: Callable[[int], Table], rank: int, name: str) -> Table:
        """The items of one rank. Arguments as `Endless` has them."""
        return Endless(open, self._stretch, rank, self._count, name)

    def table(self, open: Callable[[int], Table], rank: int, name: str, **arrays: bool) -> Table:
        """The batches of one rank. Arguments as `Endless` and `Batched` have them."""
        return Batched(self.items(open, rank, name), self._size, **arrays)

    def length(self) -> int:
        """The number of batches from the beginning on."""
        return parts(self._count, self._size, cut=False)

    def total(self, batches: int) -> int:
        """The number of items before batch number ``batches``, counted over all epochs from epoch 0."""
        return min(self._stretch.total(batches * self._size), self._end)


class Stretch:
    """A stretch of the endless sequence of epochs, in steps. One step is one item per rank.

    Args:
        length: items in an epoch.
        replicas: the number of ranks. ``ceil(length / replicas)`` steps are an epoch.
        epoch, offset: where the stretch begins: after ``offset`` items of this epoch.

    Attributes:
        steps: steps in a whole epoch.
        left: steps in the first epoch, after its ``offset``.

    Example:
        10 items on 3 ranks give 4 steps per epoch. After 4 items of epoch 0 two steps are left. Steps 2 to 5 are
        epoch 1.

        >>> stretch = Stretch(10, 3, 0, 4)
        >>> [stretch.where(step) for step in (1, 2, 6)], [stretch.total(step) for step in (1, 2, 3)]
        ([(0, 0), (1, 2), (2, 6)], [7, 10, 13])
    """

    def __init__(self, length: int, replicas: int, epoch: int, offset: int) -> None:
        self.length, self.replicas, self.epoch, self.offset = length, replicas, epoch, offset
        self.steps = parts(length, replicas, cut=False)
        self.left = parts(length - offset, replicas, cut=False)

    def where(self, step: int) -> tuple[int, int]:
        """The epoch of a step, and the first step of that epoch."""
        if step < self.left or not self.steps:
            return self.epoch, 0
        later = (step - self.left) // self.steps
        return self.epoch + 1 + later, self.left + later * self.steps

    def steps_before(self, total: int, cut: bool = False) -> int:
        """How many steps come before item ``total`` of all epochs; an incomplete last step counts unless ``cut``."""
        epoch, offset = divmod(total, max(self.length, 1))
        if epoch == self.epoch:
            return parts(offset - self.offset, self.replicas, cut)
        return self.left + (epoch - self.epoch - 1) * self.steps + parts(offset, self.replicas, cut)

    def total(self, step: int) -> int:
        """How many items of all epochs, from epoch 0 on, come before a step."""
        epoch, first = self.where(step)
        offset = self.offset if epoch == self.epoch else 0
        return epoch * self.length + offset + (step - first) * self.replicas


class Endless(Table):
    """What one rank gets of a stretch of epochs.

    Args:
        open: epoch -> its table. Each epoch is opened when it is needed.
        stretch, count: where to begin, and how many steps there are.
        rank: which rank this is.
        name: what an error calls the sampler.

    Raises:
        ValueError: an epoch of the sampler has not ``stretch.length`` items.
    """

    def __init__(
        self, open: Callable[[int], Table], stretch: Stretch, rank: int, count: int, name: str = "sampler"
    ) -> None:
        self._open, self._stretch, self._rank, self._count, self._name = open, stretch, rank, count, name
        self._epoch = -1  # none is open
        self._items: Table
        self._dealt: Table

    @property
    def block(self) -> int:
        return 1 if self._epoch < 0 else self._items.block

    def upto(self, begin: int, end: int) -> int:
        return min(end, self._count)

    def at(self, positions: Indices) -> Any:
        found = []
        while len(positions):
            epoch, first = self._stretch.where(int(positions[0]))
            self._go_to(epoch)
            steps = self._stretch.left if epoch == self._stretch.epoch else self._stretch.steps
            here = positions[: np.searchsorted(positions, first + steps)]
            self._check(int(here[0]) - first, int(here[-1]) + 1 - first)
            found.append(self._dealt.at(here - first))
            positions = positions[len(here) :]
        return joined(found)

    def _go_to(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        length = self._stretch.length
        if epoch > self._epoch >= 0 and self._items.upto(length, length + 1) > length:
            self._refuse(f"more than {length}")
        self._items, self._offset = self._open(epoch), self._stretch.offset if epoch == self._stretch.epoch else 0
        self._dealt = Dealt(self._items, self._stretch.replicas, self._rank, self._offset)
        self._epoch = epoch

    def _check(self, begin: int, end: int) -> None:
        """Whether the sampler yields as many items as its length says, as far as these steps of the epoch reach."""
        replicas = self._stretch.replicas
        wanted = min(self._offset + end * replicas, self._stretch.length)
        found = self._items.upto(self._offset + begin * replicas, wanted)
        if found < wanted:
            self._refuse(found)

    def _refuse(self, found: Any) -> None:
        if self._stretch.length == ENDLESS:
            raise ValueError(
                f"the sampler, {an(self._name)}, has no length and ended after {found} items: give it a "
                f"__len__, so that it can start over under steps_per_epoch="
            )
        raise ValueError(
            f"the sampler, {an(self._name)}, yielded {found} items in epoch {self._epoch}, but its length is "
            f"{self._stretch.length}: correct its __len__, or do without last_batch='rollover' and steps_per_epoch="
        )
