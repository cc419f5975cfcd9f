"""The interface between orders and the engine: `Order`, `Epoch` and `Position`.

    Order.epoch(number, position) -> Epoch       its batches for this rank, from a position on
    Epoch.task(seq)               -> Task | the error in its place | NOTHING: left out | None after the last batch
    Epoch.record_result(seq, result) -> Result   record the progress that the reader of a part reports
    Epoch.position(delivered)     -> Position    the position to resume from; Epoch.state(position) writes it
    Order.load(state)             -> Position    resume there, with the seeds of the state

`sampling` implements them for datasets with an index, `streams` for iterable data, `drop_in.sampler` for batches drawn
as torch draws them. An epoch is a function of (order, number, position). It owns no worker and no batch, and has no
progress: the run counts delivered batches, and after an interruption the pipeline asks again for the other ones.

A sampler's error, or an item that is no batch, is raised in that batch's place in the order, not when the sampler is
asked ahead of time.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from sharded_loader.base.checks import check_int
from sharded_loader.base.errors import add_note, as_batch_error
from sharded_loader.base.notices import Notices
from sharded_loader.base.system import integer
from sharded_loader.engine.epoch_requests import EpochRequests
from sharded_loader.engine.messages import Nothing, PartPoint, Result, Stream, Task
from sharded_loader.randomness.rng import draw_seed


@dataclass(frozen=True)
class Position:
    """Point in an epoch from which it resumes.

    Attributes:
        done: progress. Of a sampler: items of the global order, negative with rollover while leftover samples of the
            epoch before are due. Of iterable data: batches of this rank.
        mark: how another library's sampler gets there (`sampling.state.Checkpoint`); None: by (seed, epoch).
        counts, points: of each part of iterable data, batches given, and progress at or before the last of them.
        row_checkpoint: where a sampler with ``counts_by_pass`` starts to look for the position, or None.
    """

    epoch: int
    done: int = 0
    mark: Any = None
    counts: Mapping[int, int] = field(default_factory=dict)
    points: Mapping[int, PartPoint] = field(default_factory=dict)
    row_checkpoint: tuple[int, int] | None = None


class Epoch(ABC):
    """Batches of one epoch for one rank, from a position on.

    Attributes:
        number, first: number of the epoch; index of its first batch.
        run: number of the run that reads the epoch, copied into its tasks.
        limit: samples in the dataset, to check indices against; None: not checked.
        resumed, in_mid_epoch: made from a position; from one behind the epoch's first batch.
        carry: beginning of the next epoch, if that is not its own.
        evaluates: batches may be padded at their end; `real` is the number of samples without padding.
        any_order: deliver batches as they are finished.
        takes_turns: successive batches go to the workers in rotation, by the tasks' lanes.
        keeps: batches are kept until `forget`.
        second_pass: index of the first batch after each part has given one; -1: there are no parts.
        abandoned: last batch of each part that cannot be read further. Later ones need not be read.
    """

    number: int
    first: int
    run = 0
    limit: int | None = None
    resumed = in_mid_epoch = any_order = takes_turns = evaluates = False
    carry: Position | None = None
    keeps = True
    second_pass = -1
    abandoned: Mapping[int, int] = MappingProxyType({})

    def opened_by(self, iterator: object) -> None:  # noqa: B027 - most epochs may be read by any iterator
        """Called when an iterator begins to read the epoch. An error changes nothing."""

    @abstractmethod
    def task(self, seq: int) -> Task | Exception | Nothing | None:
        """Return batch ``seq`` as a task; the error in its place; `NOTHING` if left out; None after the last one."""

    def record_result(self, seq: int, result: Result) -> Result:
        """Record a finished batch of a part, now at ``seq``. Return its result, empty if the part had ended."""
        return result

    def real(self, task: Task) -> int:
        """Return the number of samples without padding. Called if the epoch ``evaluates``."""
        return sum(map(len, task.shards))

    @property
    @abstractmethod
    def tables(self) -> tuple[dict[int, Any], ...]:
        """Tables of batches in flight, by their indices."""

    def move(self, seq: int, to: int) -> None:
        """Deliver a batch earlier than planned; those that it overtakes keep their order."""
        for table in self.tables:
            move_item(table, seq, to)

    @abstractmethod
    def forget(self, delivered: int) -> None:
        """Drop batches before the last delivered one, which itself may still be taken back."""

    # -- positions ------------------------------------------------------------------------------------------

    @abstractmethod
    def length(self) -> int:
        """Return the number of batches in the epoch, including those before `first`. TypeError: it is not known."""

    def batches(self, delivered: int) -> int:
        """Return the number of batches received once indices below ``delivered`` are done."""
        return delivered

    @abstractmethod
    def position(self, delivered: int) -> Position:
        """Return the position after the batches before ``delivered`` (at least `first`) were received."""

    @abstractmethod
    def state(self, position: Position) -> dict[str, Any]:
        """Return a position of this epoch, or the beginning of the next one, as a new state dict."""

    def check_parts(self, delivered: int, at_end: bool, notices: Notices) -> None:  # noqa: B027 - iterable data has parts
        """Warn, once, if the parts of iterable data give the same samples. ``at_end``: the epoch is over."""

    def is_over(self) -> bool:
        """Return True if no batch is known to be left at the position in mid-epoch that it began at."""
        return False

    def following(self) -> Position:
        """Return the beginning of the next epoch, if this one `is_over`."""
        return Position(self.number + 1)

    def discarded(self) -> tuple[int, str]:
        """Return the number of this rank's samples that filled no batch; and why, if whole parts were left out."""
        return 0, ""

    def after(self, begin: Position) -> Position:
        """Return the beginning of the next epoch, adjusted for this one."""
        return begin

    def go_on_from(self, before: Epoch) -> None:  # noqa: B027 - most epochs have nothing to do
        """Resume another library's sampler where the epoch before left it, if this one begins in mid-epoch."""


def sampler_error(raised: Exception, where: str) -> Exception:
    """Return the error for the place of a batch that the sampler failed on. ``where`` describes the batch."""
    error = as_batch_error(raised, "by the sampler")
    add_note(error, f"sharded_loader: raised by the sampler{where}")
    return error


def move_item(table: dict[int, Any], seq: int, to: int) -> None:
    """Move the item at ``seq`` to ``to``; those from ``to`` up to it move one further.

    Example:
        >>> table = {4: "a", 5: "b", 7: "d"}
        >>> move_item(table, 7, 4)
        >>> table
        {4: 'd', 5: 'a', 6: 'b'}
    """
    numbers = range(to, seq + 1)
    items = [table.pop(number, None) for number in (seq, *numbers[:-1])]
    table.update((number, item) for number, item in zip(numbers, items, strict=True) if item is not None)


# -- orders ------------------------------------------------------------------------------------------------------------

Signature = TypeVar("Signature")
"""Parameters that a position depends on: seeds, sizes, samplers. An order compares its own with those of a state."""


class Order(ABC, Generic[Signature]):
    """All epochs of one loader for one rank. Takes the loader's arguments of the same names.

    Attributes:
        arrays: batches may be int64 arrays instead of lists, from the next epoch on.
        max_shards: maximum number of shards of a batch; None: no limit.
        shard_costs: cost of each sample, by which batches are split into shards; None: equal.
        rolls_over, drops_last: samples of an incomplete last batch begin the next epoch; are left out.
        dataset_length: samples in the dataset, if known.
        skip, given_skip: ranges of steps to leave out; those that the user gave. A state may add others.
        asked: ``set_epoch`` has chosen the next epoch since a state was loaded.
    """

    batch_sampler: Any = None
    shard_costs: Any = None
    arrays = asked = False
    max_shards: int | None = None
    dataset_length: int | None = None
    skip: tuple[tuple[int, int], ...] = ()
    given_skip: tuple[tuple[int, int], ...] = ()

    def __init__(
        self,
        last_batch: object,
        num_replicas: object = None,
        rank: object = None,
        seed: object = None,
        steps_per_epoch: object = None,
    ) -> None:
        self.steps: int | None = None
        if steps_per_epoch is not None:
            if last_batch not in (None, "keep"):
                raise ValueError(
                    f"last_batch={last_batch!r} and steps_per_epoch contradict each other: leave out last_batch. With "
                    f"steps_per_epoch no batch is short, and the samples go on from epoch to epoch"
                )
            self.steps = check_int(
                "steps_per_epoch", steps_per_epoch, 1, "give the number of batches in an epoch, or None"
            )
        self.rolls_over: bool = last_batch == "rollover" or self.steps is not None
        self.drops_last: bool = last_batch == "discard"
        self._replicas: tuple[Any, Any] | None = None  # None: not divided among ranks
        if num_replicas is not None or rank is not None:
            is_late = num_replicas == "auto" and rank is None  # resolved later: a process group may start
            self._replicas = (num_replicas, rank) if is_late else resolve_replicas(num_replicas, rank)
        if seed is None:
            seed = 0 if self.replicated else draw_seed()
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer, or None")
        self._next_epoch = 0
        self._requests = EpochRequests()

    @property
    def replicated(self) -> bool:
        """True if the samples are divided among ranks."""
        return self._replicas is not None

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """The loader's ``sampler`` attribute."""

    @property
    def stream(self) -> Stream | None:
        """Layout of iterable data; None for data with an index."""
        return None

    # -- replicas -------------------------------------------------------------------------------------------

    def replicas(self) -> tuple[int, int]:
        return resolve_replicas(*(self._replicas or (None, None)))

    def settle_replicas(self) -> None:
        """Fix the meaning of ``"auto"``, at the start of an epoch."""
        self._replicas = self._replicas and self.replicas()

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The next epoch, as the loader counts or as ``set_epoch`` of a sampler or dataset has chosen."""
        asked = self._requests.take()
        if asked is not None:
            Order.set_epoch(self, asked)
            self.asked = True
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        self._next_epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        self._requests.drop()

    @abstractmethod
    def epoch(self, number: int, position: Position | None = None) -> Epoch:
        """Return an epoch for this rank, from a position on. A later `resize` has no effect on it."""

    @abstractmethod
    def facts(self, number: int) -> Any:
        """Return all that decides an epoch's batches: equal facts, equal batches. None if unknown."""

    @abstractmethod
    def length(self, number: int) -> int:
        """Return the number of batches in an epoch for this rank. TypeError: it is not known."""

    @abstractmethod
    def resize(self, length: int | None) -> None:
        """Set the length of a dataset that has changed; the next epoch stays the same."""

    def undisturbed(self, but: object) -> AbstractContextManager[None]:
        """Return a context for reading epochs, after which other libraries' samplers are restored, but not ``but``."""
        return nullcontext()

    @abstractmethod
    def add_skip(self, skip: object) -> None:
        """Leave out these steps, too, when a state is loaded; None: none."""

    def begun(self, epoch: Epoch) -> None:
        """Called when an epoch begins."""

    # -- states ---------------------------------------------------------------------------------------------

    def load(
        self,
        state: object,
        strict: bool,
        doing: str = "load_state_dict: the state was saved by another loader: ",
        advice: str = "Make the loader as it was then",
        check: Callable[[], object] = lambda: None,
    ) -> tuple[Position, bool]:
        """Take over the seeds of a state: return the position to resume from, and True if workers need a new job.

        If the state does not fit, or ``check`` raises, nothing changes. ``doing`` begins the error, ``advice`` ends it.
        """
        position, saved, changed = self.take_over(state, strict, doing, advice, check)
        position = self.moved(position, saved)
        while (epoch := self.epoch(position.epoch, position)).is_over():  # continue with the next epoch
            position = epoch.following()
        self.goes_on(position, saved)
        return position, changed

    def take_over(
        self, state: object, strict: bool, doing: str, advice: str, check: Callable[[], object] = lambda: None
    ) -> tuple[Position, Signature, bool]:
        """Take over the seeds of a state, as `load`, and return its position, its signature, and if seeds changed."""
        position, saved = self._parsed(state)
        phrases = self._differences(saved, position, strict)
        if phrases:
            only = phrases[0] if strict and len(phrases) == 1 else ""
            is_size = only.startswith("batch_size") and "None" not in only and "stay" not in only
            hint = "; strict=False allows another batch size" if is_size else ""
            advices = [phrase for phrase in phrases if phrase.endswith(".")] or [advice + hint]
            raise ValueError(f"{doing}{', '.join(one for one in phrases if one not in advices)}. {' '.join(advices)}")
        check()
        return position, saved, self._adopt(saved, position)

    def moved(self, position: Position, saved: Signature) -> Position:
        """Convert a position saved with another signature to this order."""
        return position

    def goes_on(self, position: Position, saved: Signature) -> None:
        """Resume at a position that was saved with this signature."""

    @abstractmethod
    def _parsed(self, state: object) -> tuple[Position, Signature]:
        """Parse a state into position and signature."""

    @abstractmethod
    def _differences(self, saved: Signature, position: Position, strict: bool) -> list[str]:
        """Return the reasons why a state does not fit, one phrase each; empty if `_adopt` can make it fit."""

    @abstractmethod
    def _adopt(self, saved: Signature, position: Position) -> bool:
        """Take over the seeds of a state that fits, and return True if they changed."""


def resolve_replicas(
    num_replicas: object, rank: object = None, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """Return the number of replicas, and the rank of this process.

    Args:
        num_replicas: an integer; ``"auto"``: torch.distributed if it is initialised, else WORLD_SIZE and RANK, else 1
            and 0; None: 1.
        rank: an integer; None with ``num_replicas="auto"``, None or 1.

    Raises:
        ValueError: one is given without the other, the rank is outside 0 .. num_replicas - 1, or a value is no number.

    Example:
        >>> resolve_replicas(4, 1), resolve_replicas(None), resolve_replicas("auto", environ={})
        ((4, 1), (1, 0), (1, 0))
    """
    if num_replicas == "auto":
        if rank is not None:
            raise ValueError(f'num_replicas="auto" finds the rank itself: leave out rank={rank!r}')
        num_replicas, rank = _replicas_from_environment(environ)
    if num_replicas is None:
        if rank is not None:
            raise ValueError(f"rank is {rank!r}, but num_replicas is missing: give both, or num_replicas='auto' alone")
        return 1, 0
    replicas = check_int("num_replicas", num_replicas, 1, "give the number of processes, or 'auto'", ValueError)
    if rank is None and replicas > 1:
        raise ValueError(f"num_replicas is {replicas}, but rank is missing: give both, or num_replicas='auto'")
    number = check_int("rank", 0 if rank is None else rank, 0, "ranks count from 0", ValueError)
    if number >= replicas:
        raise ValueError(f"rank is {number}, but there are {replicas} replicas: give 0 to {replicas - 1}")
    return replicas, number


def _replicas_from_environment(environ: Mapping[str, str]) -> tuple[int, int]:
    distributed = process_group()
    if distributed is not None:
        return distributed.get_world_size(), distributed.get_rank()
    advice = "start with torchrun, or give num_replicas and rank"
    replicas = integer("WORLD_SIZE", 1, least=1, advice=advice, environ=environ)
    rank = integer("RANK", 0, least=0, advice=advice, environ=environ)
    if replicas > 1 and not environ.get("RANK"):
        raise ValueError(f"WORLD_SIZE is {replicas}, but RANK is missing: start with torchrun, or set both")
    if rank >= replicas:
        known = f"WORLD_SIZE is {replicas}: give 0 to {replicas - 1}"
        if not environ.get("WORLD_SIZE"):
            known = "WORLD_SIZE is missing: set both"
        raise ValueError(f"the environment variable RANK is {rank}, but {known}, or {advice}")
    return replicas, rank


def process_group() -> Any:
    """Return ``torch.distributed`` if this process is in a process group, else None."""
    # Looked up, not imported: a process that has not imported torch has no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed
