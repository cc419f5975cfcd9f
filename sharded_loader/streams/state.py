"""What ``state_dict()`` returns over iterable data: a position, and what it is a position in. Pure functions.

    StreamPosition (where) + StreamSignature (in what)  --dump-->  dict  --parse-->  StreamPosition, StreamSignature
    differences(saved, own, position, rank)             why a state does not fit a loader, in words

A rank knows its own parts only, so each rank saves a state of its own. `parse` takes a list of them too: then another
number of ranks may go on. A state is a flat dict of numbers, strings and lists, and in ``parts`` of one list per field.
States of the dataset's own are in it as they are.

What can go wrong: no such state, a damaged one, one of a newer version; states of different runs or steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an, brief
from sharded_loader.engine.stream import PartPoint
from sharded_loader.sampling.state import VERSION

_ADVICE = "give what state_dict() of a ShardedDataLoader over iterable data returned"

_SAVED = PartPoint._fields[: PartPoint._fields.index("state")]
"""The fields of a point in ``parts``, in the order of its arguments; ``state`` comes after them."""


@dataclass(frozen=True)
class StreamPosition:
    """Where an epoch over iterable data goes on.

    Attributes:
        epoch: number of the epoch.
        batches: how many batches of it this rank has received.
        counts: of each part, how many batches it has given.
        points: of each part, a point at or before that batch.
    """

    epoch: int
    batches: int = 0
    counts: Mapping[int, int] = field(default_factory=dict)
    points: Mapping[int, PartPoint] = field(default_factory=dict)


@dataclass(frozen=True)
class StreamSignature:
    """What a position in iterable data is a position in. All of it is in a state."""

    dataset_length: ClassVar[None] = None

    seed: int
    dataset: str
    streams: int
    batch_size: int
    last_batch: str
    steps_per_epoch: int | None
    num_replicas: int
    rank: int

    def parts_of_rank(self) -> range:
        """The numbers of the parts that this rank reads."""
        return range(self.rank, self.streams, self.num_replicas)


_COMPARED = {
    "dataset": "the dataset was a {was}, and is a {now}",
    "streams": "there were {was} parts (streams), and are {now}",
    "batch_size": "batch_size was {was}, and is {now}",
    "last_batch": "last_batch was {was!r}, and is {now!r}",
    "steps_per_epoch": "steps_per_epoch was {was}, and is {now}",
}

_STAYS = (
    " (within an epoch{steps} it must stay {was}, because all samples of a batch come from one part of the iterable "
    "data; the number of ranks may change: load the states of all ranks)"
)


def differences(
    saved: StreamSignature, own: StreamSignature, position: StreamPosition, strict: bool = True
) -> list[str]:
    """Why a state does not fit a loader, one phrase each; none if it fits.

    Args:
        saved: of the state.
        own: of the loader.
        position: of the state.
        strict: whether another batch size matters at the beginning of an epoch.
    """
    found = []
    begins = not position.counts  # no batch of the epoch was read
    same_step = saved.batch_size * saved.num_replicas == own.batch_size * own.num_replicas
    if saved.streams < own.num_replicas:
        found.append(f"there were {saved.streams} parts (streams), and are {own.num_replicas} ranks: each needs a part")
    for name, text in _COMPARED.items():
        was, now = getattr(saved, name), getattr(own, name)
        if was == now or (name == "batch_size" and begins and (same_step or not strict)):
            continue
        found.append(text.format(was=was, now=now))
        if name == "batch_size" and not begins:
            found[-1] += _STAYS.format(
                was=was, steps="" if own.steps_per_epoch is None else " and with steps_per_epoch=,"
            )
    missing = [part for part in own.parts_of_rank() if part not in position.counts]
    if not found and position.counts and missing:
        found.append(
            f"it is the state of rank {saved.rank} of {saved.num_replicas}, which knows nothing of part {missing[0]}: "
            f"each rank saves its own state, and for another number of ranks load all of them, "
            f"load_state_dict([state of rank 0, state of rank 1, ...])"
        )
    return found


def dump(position: StreamPosition, signature: StreamSignature) -> dict[str, Any]:
    """A position as a state: a new dict.

    Example:
        >>> signature = StreamSignature(7, "Lines", 2, 8, "keep", None, 1, 0)
        >>> position = StreamPosition(3, 1, {0: 1, 1: 0}, {0: PartPoint(1, 3, 8), 1: PartPoint(passes=3)})
        >>> parse(dump(position, signature), (1, 0)) == (position, signature)
        True
    """
    points = [position.points.get(part, PartPoint()) for part in position.counts]
    state: dict[str, Any] = {"version": VERSION, "epoch": position.epoch, "batches": position.batches}
    state.update(vars(signature))
    state["parts"] = {
        "number": list(position.counts),
        "given": list(position.counts.values()),
        **{name: [getattr(point, name) for point in points] for name in _SAVED},
    }
    states = [copy.deepcopy(point.state) for point in points]
    if any(one is not None for one in states):
        state["parts"]["state"] = states
    return state


def parse(state: Any, replicas: tuple[int, int]) -> tuple[StreamPosition, StreamSignature]:
    """A state, or a list of the states of all ranks, as position and signature.

    Args:
        state: what `dump` returned, also after a way through JSON; or several of them.
        replicas: how many ranks there are, and which is this one.

    Raises:
        TypeError, ValueError: it is no such state.
    """
    if isinstance(state, list | tuple) and state:
        return _merged([_parse(one) for one in state], replicas)
    position, signature = _parse(state)
    if (signature.num_replicas, signature.rank) != replicas:
        return _merged([(position, signature)], replicas)
    return position, signature


def _parse(state: Any) -> tuple[StreamPosition, StreamSignature]:
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is {brief(state)}, {an(type(state))}; it must be a dict: {_ADVICE}")
    if "version" not in state or "parts" not in state:
        raise ValueError(f"the state has no 'parts', its keys are {brief(sorted(map(str, state)))}: {_ADVICE}")
    version = check_int("the state's 'version'", state["version"], 1, _ADVICE, ValueError)
    if version > VERSION:
        raise ValueError(
            f"the state is of version {brief(version)}, this sharded_loader reads up to version {VERSION}: update it"
        )
    try:
        signature = StreamSignature(**{one.name: state[one.name] for one in fields(StreamSignature)})
        parts = state["parts"]
        numbers = [check_int("a part", part, 0, _ADVICE, ValueError) for part in parts["number"]]
        columns = [parts[name] for name in _SAVED]
        states = copy.deepcopy(parts.get("state")) or [None] * len(numbers)
        points = [PartPoint(*one) for one in zip(*columns, states, strict=True)]
        counts = {part: int(count) for part, count in zip(numbers, parts["given"], strict=True)}
        by_part = dict(zip(numbers, points, strict=True))
        epoch, batches = state["epoch"], state["batches"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"the state is damaged ({type(error).__name__}: {error}): {_ADVICE}") from None
    epoch = check_int("the state's 'epoch'", epoch, 0, _ADVICE, ValueError)
    batches = check_int("the state's 'batches'", batches, 0, _ADVICE, ValueError)
    return StreamPosition(epoch, batches, counts, by_part), signature


def _merged(
    found: Iterable[tuple[StreamPosition, StreamSignature]], replicas: tuple[int, int]
) -> tuple[StreamPosition, StreamSignature]:
    """The states of several ranks as the position of one rank."""
    positions, signatures = zip(*found, strict=True)
    first = signatures[0]
    for one in signatures:
        if any(getattr(one, name) != getattr(first, name) for name in ("seed", *_COMPARED)):
            raise ValueError(f"the states are those of different runs: {_ADVICE}, one of each rank")
    if len({position.epoch for position in positions}) > 1:
        epochs = ", ".join(str(position.epoch) for position in positions)
        raise ValueError(f"the states of the ranks lie in different epochs ({epochs}): save them after the same step")
    if first.steps_per_epoch is not None and len({position.batches for position in positions}) > 1:
        steps = ", ".join(str(position.batches) for position in positions)
        raise ValueError(f"the states of the ranks lie after different steps ({steps}): save them after the same step")
    counts = {part: count for position in positions for part, count in position.counts.items()}
    points = {part: point for position in positions for part, point in position.points.items()}
    batches = positions[0].batches
    if first.steps_per_epoch is None and counts:
        batches = sum(counts.get(part, 0) for part in range(replicas[1], first.streams, replicas[0]))
    return StreamPosition(positions[0].epoch, batches, counts, points), first
