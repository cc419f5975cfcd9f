"""One epoch: its batches for one rank, from a position on. The seam between orders and the engine.

    Epoch.task(seq)               -> Task | the error for that place | None behind the last batch
    Epoch.came(seq, result)       -> Result      a batch is finished: what its reader has found out is noted
    Epoch.forget(delivered)                      batches before the last delivered one are not asked for again
    Epoch.position(delivered)     -> Position    where an epoch goes on; Epoch.state(position) writes it

    sampling.epoch.MapEpoch       batches of a sampler, functions of (seed, epoch)
    streams.epoch.StreamEpoch     batches of the parts of iterable data
    drop_in.epoch.TorchEpoch      batches of a sampler, drawn as torch draws them

An epoch has no position of its own: how many batches were delivered is known to the run. After an interruption the
pipeline asks again for the batches that were not delivered.

What can go wrong: the sampler raises an error, or yields what is no batch. That is the error of that batch, raised in
its place in the order, not at the moment when the sampler is asked ahead of time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sharded_loader.base.errors import add_note, as_batch_error
from sharded_loader.engine.messages import Result, Task
from sharded_loader.engine.stream import PartPoint


@dataclass(frozen=True)
class Position:
    """Where an epoch goes on.

    Attributes:
        epoch: number of the epoch.
        done: what is done of it. Of a sampler the items of the global order; with rollover negative while the last
            samples of the epoch before, which begin this one, are still due. Of iterable data the batches of this rank.
        mark: how a sampler of another library gets there (`sampling.state.Checkpoint`); None: by (seed, epoch).
        counts: of each part of iterable data, how many batches it has given.
        points: of each part, a point at or before that batch.
    """

    epoch: int
    done: int = 0
    mark: Any = None
    counts: Mapping[int, int] = field(default_factory=dict)
    points: Mapping[int, PartPoint] = field(default_factory=dict)


class Epoch(ABC):
    """The batches of one epoch for one rank, from a position on.

    Attributes:
        number: of the epoch.
        first: number of the first batch.
        run: number of the run that reads the epoch. Its tasks bear it.
        limit: samples in the dataset, to check indices against; None: not checked.
        resumed: there was a position.
        in_mid_epoch: some of the epoch's own batches were done at it.
        carry: where the next epoch begins, if that is not its own beginning.
        any_order: batches come as they are finished, not in turns.
        takes_turns: batch after batch goes to one worker after the other, by the tasks' lanes.
        keeps: batches are kept until `forget`.
        second_turn: number of the batch before which each part has given one; -1: there are no parts.
        given_up: of each part that cannot be read on, the last batch that it gives. Those behind it need not be read.
    """

    number: int
    first: int
    run = 0
    limit: int | None = None
    resumed = in_mid_epoch = any_order = takes_turns = False
    carry: Position | None = None
    keeps = True
    second_turn = -1
    given_up: Mapping[int, int] = MappingProxyType({})

    @abstractmethod
    def task(self, seq: int) -> Task | Exception | None:
        """Batch ``seq`` as a task; the error to raise in its place; None after the last one."""

    def came(self, seq: int, result: Result) -> Result:
        """A batch of a part has come back.

        Args:
            seq: its number now; another than its own, if it comes earlier than planned.
            result: the batch.

        Returns:
            The result; an empty one, if the part had ended before this batch.
        """
        return result

    @property
    @abstractmethod
    def tables(self) -> tuple[dict[int, Any], ...]:
        """What is kept of batches in flight, by their numbers."""

    def move(self, seq: int, to: int) -> None:
        """A batch comes earlier than planned; those that it overtakes keep their order."""
        for table in self.tables:
            moved(table, seq, to)

    @abstractmethod
    def forget(self, delivered: int) -> None:
        """Batches before the last delivered one are not asked for again (that batch itself may be taken back)."""

    # -- positions ------------------------------------------------------------------------------------------

    @abstractmethod
    def length(self) -> int:
        """The number of batches in the epoch, those before `first` included.

        Raises:
            TypeError: it is not known.
        """

    def batches(self, delivered: int) -> int:
        """How many batches of the epoch were received, if so many numbers are done."""
        return delivered

    @abstractmethod
    def position(self, delivered: int) -> Position:
        """The position after the batches before number ``delivered`` (at least `first`) were received."""

    @abstractmethod
    def state(self, position: Position) -> dict[str, Any]:
        """A position of this epoch, or the beginning of the next one, as a state: a new dict."""

    def is_over(self) -> bool:
        """Whether it began in mid-epoch and no batch was left there, as far as that can be known now."""
        return False

    def following(self) -> Position:
        """Where the next epoch begins, if this one `is_over`."""
        return Position(self.number + 1)

    def after(self, begin: Position) -> Position:
        """The beginning of the next epoch, as it is after this one."""
        return begin

    def go_on_from(self, before: Epoch) -> None:  # noqa: B027 - most epochs have nothing to do
        """Go on where the epoch before has left a sampler of another library, if this one begins in its middle."""


def sampler_error(raised: Exception, where: str) -> Exception:
    """The error that stands in a batch's place, because the sampler has raised it. ``where`` says of which batch."""
    error = as_batch_error(raised, "by the sampler")
    add_note(error, f"sharded_loader: raised by the sampler{where}")
    try:
        return error
    finally:
        del error  # otherwise error -> traceback -> this frame -> error, and the loader waits for the collector


def moved(table: dict[int, Any], seq: int, to: int) -> None:
    """Give what stands under ``seq`` the number ``to``, and what stands from there on the next numbers.

    Example:
        >>> table = {4: "a", 5: "b", 7: "d"}
        >>> moved(table, 7, 4)
        >>> table
        {4: 'd', 5: 'a', 6: 'b'}
    """
    numbers = range(to, seq + 1)
    found = [table.pop(number, None) for number in (seq, *numbers[:-1])]
    table.update((number, one) for number, one in zip(numbers, found, strict=True) if one is not None)
