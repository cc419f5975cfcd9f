"""The seam between orders and the engine: what every order of batches is, and what one epoch of it is.

    Order.epoch(number, position) -> Epoch       its batches for this rank, from a position on
    Order.load(state) -> Position                where a state goes on, after its seeds were taken over
    resolve_replicas(num_replicas, rank)         ints, "auto" or None -> (num_replicas, rank)
    ranks_of_mesh(mesh)                          a DeviceMesh -> (num_replicas, rank)

    Epoch.task(seq)               -> Task | the error for that place | NOTHING: left out | None behind the last batch
    Epoch.came(seq, result)       -> Result      a batch is finished: what its reader has found out is noted
    Epoch.forget(delivered)                      batches before the last delivered one are not asked for again
    Epoch.position(delivered)     -> Position    where an epoch goes on; Epoch.state(position) writes it

    sampling.order, sampling.epoch    datasets with an index: batches of a sampler, functions of (seed, epoch)
    streams.order, streams.epoch      iterable data: batches of its parts
    drop_in.sampler                   batches of a sampler, drawn as torch draws them

An order owns no worker and no batch. Every epoch is a function of (order, number, position). An epoch has no position
of its own: the run knows how many batches were delivered. After an interruption the pipeline asks again for the batches
that were not delivered.

What can go wrong: arguments that contradict each other; ranks that are not known; a state that does not fit. A sampler
that raises an error, or yields what is no batch: that is the error of that batch. It is raised in the batch's place in
the order, not at the moment when the sampler is asked ahead of time.
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
from sharded_loader.base.system import integer
from sharded_loader.engine.epoch_requests import EpochRequests
from sharded_loader.engine.messages import Nothing, PartPoint, Result, Stream, Task
from sharded_loader.randomness.rng import draw_seed


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
        row_checkpoint: what a sampler with ``counts_by_pass`` finds the position from without a pass; None: nothing.
    """

    epoch: int
    done: int = 0
    mark: Any = None
    counts: Mapping[int, int] = field(default_factory=dict)
    points: Mapping[int, PartPoint] = field(default_factory=dict)
    row_checkpoint: tuple[int, int] | None = None


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
        evaluates: batches may have fillers at their end; `real` tells how many samples are none.
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
    resumed = in_mid_epoch = any_order = takes_turns = evaluates = False
    carry: Position | None = None
    keeps = True
    second_turn = -1
    given_up: Mapping[int, int] = MappingProxyType({})

    @abstractmethod
    def task(self, seq: int) -> Task | Exception | Nothing | None:
        """Batch ``seq`` as a task; the error to raise in its place; `NOTHING`: left out; None after the last one."""

    def came(self, seq: int, result: Result) -> Result:
        """A batch of a part has come back.

        Args:
            seq: its number now; another than its own, if it comes earlier than planned.
            result: the batch.

        Returns:
            The result; an empty one, if the part had ended before this batch.
        """
        return result

    def real(self, task: Task) -> int:
        """How many samples of a batch are no fillers. Asked for where the epoch ``evaluates``."""
        return sum(map(len, task.shards))

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
        """How many batches of the epoch were received, if ``delivered`` numbers are done."""
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

    def discarded(self) -> tuple[int, str]:
        """Samples of this rank that filled no batch of an epoch that is over; and why, if whole parts were left out."""
        return 0, ""

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
    """Give what stands under ``seq`` the number ``to``, and what stands at ``to`` and behind it the next numbers.

    Example:
        >>> table = {4: "a", 5: "b", 7: "d"}
        >>> moved(table, 7, 4)
        >>> table
        {4: 'd', 5: 'a', 6: 'b'}
    """
    numbers = range(to, seq + 1)
    found = [table.pop(number, None) for number in (seq, *numbers[:-1])]
    table.update((number, one) for number, one in zip(numbers, found, strict=True) if one is not None)


# -- orders ------------------------------------------------------------------------------------------------------------

Signature = TypeVar("Signature")
"""What a position is a position in: seeds, sizes, samplers. An order compares its own with that of a state."""


class Order(ABC, Generic[Signature]):
    """The epochs of one loader for one rank.

    Args:
        last_batch, num_replicas, rank, seed, steps_per_epoch: the loader's arguments.

    Attributes:
        steps: ``steps_per_epoch``.
        seed: of everything random.
        arrays: batches may be int64 arrays instead of lists, from the next epoch on.
        max_shards: how many shards a batch may have; None: any number.
        shard_costs: what each sample costs, to split a batch into shards by; None: all the same.
        batch_sampler: what the loader shows as this; None: it has none.
        rolls_over: samples of an incomplete last batch begin the next epoch.
        drops_last: an incomplete last batch is left out.
        dataset_length: samples in the dataset, as far as the order knows.
        skip: the steps that are left out, as ranges.
        given_skip: those of them that the user has given; a state may have others.
        asked: ``set_epoch`` has said which epoch is next, since a state was loaded.
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
        self.steps = _check_steps(steps_per_epoch, last_batch)
        self.rolls_over: bool = last_batch == "rollover" or self.steps is not None
        self.drops_last: bool = last_batch == "discard"
        self._replicas: tuple[Any, Any] | None = None  # they are not shared out
        if num_replicas is not None or rank is not None:
            is_late = num_replicas == "auto" and rank is None  # it is looked up later: the process group may come up
            self._replicas = (num_replicas, rank) if is_late else resolve_replicas(num_replicas, rank)
        if seed is None:
            seed = 0 if self.replicated else draw_seed()
        self.seed = check_int("seed", seed, -(1 << 128), "give an integer, or None")
        self._next_epoch = 0
        self._requests = EpochRequests()  # the calls of `set_epoch` that the loader has not seen yet

    @property
    def replicated(self) -> bool:
        """Whether the samples are shared out to ranks."""
        return self._replicas is not None

    @property
    @abstractmethod
    def sampler(self) -> Any:
        """What the loader shows as its sampler."""

    @property
    def stream(self) -> Stream | None:
        """How iterable data is cut into batches; None: the order is one of samplers."""
        return None

    # -- replicas -------------------------------------------------------------------------------------------

    def replicas(self) -> tuple[int, int]:
        """``(num_replicas, rank)``, as far as is known now."""
        return resolve_replicas(*(self._replicas or (None, None)))

    def settle_replicas(self) -> None:
        """An epoch begins: what ``"auto"`` means is not asked again."""
        self._replicas = self._replicas and self.replicas()

    # -- epochs ---------------------------------------------------------------------------------------------

    @property
    def next_epoch(self) -> int:
        """The epoch that comes next: as the loader counts, or as ``set_epoch`` of a sampler or dataset has asked."""
        asked = self._requests.take()
        if asked is not None:
            Order.set_epoch(self, asked)
            self.asked = True
        return self._next_epoch

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the one that comes next."""
        self._next_epoch = check_int("epoch", epoch, 0, "epochs count from 0", ValueError)
        self._requests.drop()

    @abstractmethod
    def epoch(self, number: int, position: Position | None = None) -> Epoch:
        """An epoch's batches for this rank, from a position on. What it reads is settled now: `resize` may come."""

    @abstractmethod
    def facts(self, number: int) -> Any:
        """What decides an epoch's batches: with equal facts they are equal. None: that is not known."""

    @abstractmethod
    def length(self, number: int) -> int:
        """The number of batches in an epoch for this rank.

        Raises:
            TypeError: it is not known.
        """

    @abstractmethod
    def resize(self, length: int | None) -> None:
        """The dataset has changed, and has this length; the epoch that comes next stays."""

    def undisturbed(self, but: object) -> AbstractContextManager[None]:
        """Inside, epochs may be read. Samplers of other libraries are put back. ``but``, the dataset, stays."""
        return nullcontext()

    @abstractmethod
    def add_skip(self, skip: object) -> None:
        """Leave these steps out, too, when a state is loaded; None: no others."""

    def begun(self, epoch: Epoch) -> None:
        """An epoch has begun."""

    # -- states ---------------------------------------------------------------------------------------------

    def load(
        self,
        state: object,
        strict: bool,
        doing: str = "load_state_dict: the state was saved by another loader: ",
        advice: str = "Make the loader as it was then",
        check: Callable[[], object] = lambda: None,
    ) -> tuple[Position, bool]:
        """Take over the seeds of a state. ``doing`` begins the error where it does not fit, and ``advice`` ends it.

        If it fits, ``check`` may still raise an error.

        Returns:
            Where the state goes on, and whether the seeds were others: then the workers have to be told.

        Raises:
            TypeError, ValueError: the state does not fit. Nothing has changed then.
        """
        position, saved, changed = self.take_over(state, strict, doing, advice, check)
        position = self.moved(position, saved)
        while (epoch := self.epoch(position.epoch, position)).is_over():  # the next epoch begins instead
            position = epoch.following()
        self.goes_on(position, saved)
        return position, changed

    def take_over(
        self, state: object, strict: bool, doing: str, advice: str, check: Callable[[], object] = lambda: None
    ) -> tuple[Position, Signature, bool]:
        """Take over the seeds of a state, as `load`, and return its position, its signature, and if seeds changed."""
        position, saved = self._parsed(state)
        found = self._differences(saved, position, strict)
        if found:
            alone = found[0] if strict and len(found) == 1 else ""
            is_size = alone.startswith("batch_size") and "None" not in alone and "stay" not in alone
            hint = "; strict=False allows another batch size" if is_size else ""
            ways = [one for one in found if one.endswith(".")] or [advice + hint]
            raise ValueError(f"{doing}{', '.join(one for one in found if one not in ways)}. {' '.join(ways)}")
        check()
        return position, saved, self._adopt(saved, position)

    def moved(self, position: Position, saved: Signature) -> Position:
        """A position of an order with another signature, as this one counts it."""
        return position

    def goes_on(self, position: Position, saved: Signature) -> None:
        """The order goes on at a position that was saved with this signature."""

    @abstractmethod
    def _parsed(self, state: object) -> tuple[Position, Signature]:
        """A state as position and signature."""

    @abstractmethod
    def _differences(self, saved: Signature, position: Position, strict: bool) -> list[str]:
        """Why a state does not fit, one phrase each; none if `_adopt` can make it fit."""

    @abstractmethod
    def _adopt(self, saved: Signature, position: Position) -> bool:
        """Take over the seeds of a state that fits, and say whether they differ from the ones before."""


def _check_steps(steps: object, last_batch: object) -> int | None:
    if steps is None:
        return None
    if last_batch not in (None, "keep"):
        raise ValueError(
            f"last_batch={last_batch!r} and steps_per_epoch contradict each other: leave out last_batch. With "
            f"steps_per_epoch no batch is short, and the samples go on from epoch to epoch"
        )
    return check_int("steps_per_epoch", steps, 1, "give the number of batches in an epoch, or None")


def resolve_replicas(
    num_replicas: object, rank: object = None, environ: Mapping[str, str] = os.environ
) -> tuple[int, int]:
    """The number of replicas, and which one this process is.

    Args:
        num_replicas: an integer; ``"auto"``: torch.distributed if it is initialised, else WORLD_SIZE and
            RANK, else 1 and 0; None: 1.
        rank: an integer; None with ``num_replicas="auto"``, None or 1.
        environ: where to look for WORLD_SIZE and RANK.

    Returns:
        (num_replicas, rank).

    Raises:
        ValueError: for one without the other, a rank outside 0 .. num_replicas - 1, and what is no number.

    Example:
        >>> resolve_replicas(4, 1), resolve_replicas(None), resolve_replicas("auto", environ={})
        ((4, 1), (1, 0), (1, 0))
    """
    if num_replicas == "auto":
        if rank is not None:
            raise ValueError(f'num_replicas="auto" finds the rank itself: leave out rank={rank!r}')
        num_replicas, rank = _from_surroundings(environ)
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


_REPLICATED = ("dp", "ddp", "data", "data_parallel", "batch", "replicate", "dp_replicate")
DATA_DIMS = (*_REPLICATED, "shard", "fsdp", "hsdp", "dp_shard")
MODEL_DIMS = ("tp", "cp", "pp", "sp", "ep", "tensor", "context", "pipeline", "pipe", "sequence", "expert", "model")


def ranks_of_mesh(mesh: Any) -> tuple[int, int]:
    """The number of replicas and which one this process is, by a mesh of processes.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh`, or one dimension of it, ``mesh["dp"]``. Dimensions with the
            name of data parallelism (`DATA_DIMS`) give replicas; a mesh of one dimension may have any name but those of
            `MODEL_DIMS`. Processes that differ in other dimensions alone are one replica.

    Returns:
        (num_replicas, rank).

    Raises:
        TypeError: it is no mesh.
        ValueError: no dimension is one of data parallelism, or this process is not in the mesh.
    """
    if not (hasattr(mesh, "get_coordinate") and hasattr(mesh, "mesh_dim_names")):
        raise TypeError(f"mesh is {mesh!r}; it must be a DeviceMesh, or one dimension of it: mesh['dp']")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    chosen = [place for place, name in enumerate(names) if name in DATA_DIMS]
    if not chosen and mesh.ndim == 1 and names[0] not in MODEL_DIMS:
        chosen = [0]
    if not chosen:
        raise ValueError(
            f"mesh has the dimensions {', '.join(map(repr, names))}, and none is known as one of data parallelism "
            f"({', '.join(DATA_DIMS)}): give that dimension, mesh=mesh[name]"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not in the mesh: make no loader here, or give num_replicas and rank")
    replicas, rank = 1, 0
    for place in chosen:
        replicas, rank = replicas * mesh.size(place), rank * mesh.size(place) + coordinate[place]
    return int(replicas), int(rank)


def _from_surroundings(environ: Mapping[str, str]) -> tuple[int, int]:
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
    """``torch.distributed``, if this process is in a process group."""
    # Looked up, not imported: a process that has not imported torch has no process group.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        return None
    return distributed
