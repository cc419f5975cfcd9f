"""What ``state_dict()`` returns over iterable data: a position, and what it is a position in. Pure functions.

    Position (where) + StreamSignature (in what)  --dump-->  dict  --parse-->  Position, StreamSignature
    differences(saved, own, position, rank)             why a state does not fit a loader, in words

A rank knows its own parts only, so each rank saves a state of its own. `parse` takes a list of them too: then another
number of ranks may go on. A state is a flat dict of numbers, strings and lists, and in ``parts`` of one list per field.
States of the dataset's own are in it as they are.

What can go wrong: no such state, a damaged one, one of a newer version; states of different runs or steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from sharded_loader.base.entries import (
    VERSION,
    anything,
    check_version,
    dict_of,
    differing,
    entry,
    integer,
    list_of,
    optional,
    parsed,
    read_entry,
    string,
    true_or_false,
    written,
)
from sharded_loader.engine.messages import PartPoint
from sharded_loader.engine.order import Position

_ADVICE = "give what state_dict() of a ShardedDataLoader over iterable data returned"

_COUNTS = list_of(integer(0))


def _copies(states: Iterable[Any]) -> list[Any]:
    return copy.deepcopy(list(states))


@dataclass(frozen=True)
class _Parts:
    """The entry ``parts``: of each part its number, how many batches it has given, and the fields of a `PartPoint`."""

    number: tuple[int, ...] = entry(_COUNTS, write=list)
    given: tuple[int, ...] = entry(_COUNTS, write=list)
    batches: tuple[int, ...] = entry(_COUNTS, write=list)
    passes: tuple[int, ...] = entry(_COUNTS, write=list)
    samples: tuple[int, ...] = entry(_COUNTS, write=list)
    checksum: tuple[int, ...] = entry(_COUNTS, write=list)
    ended: tuple[bool, ...] = entry(list_of(true_or_false), write=list)
    state: tuple[Any, ...] | None = entry(optional(list_of(anything)), write=_copies, default=None)


@dataclass(frozen=True)
class StreamSignature:
    """What a position in iterable data is a position in. All of it is in a state."""

    dataset_length: ClassVar[None] = None

    seed: int = entry(integer())
    dataset: str = entry(string, "the dataset was a {was}, and is a {now}")
    streams: int = entry(integer(1), "there were {was} parts (streams), and are {now}")
    batch_size: int = entry(integer(1), "batch_size was {was}, and is {now}")
    last_batch: str = entry(string, "last_batch was {was!r}, and is {now!r}")
    steps_per_epoch: int | None = entry(optional(integer(1)), "steps_per_epoch was {was}, and is {now}")
    num_replicas: int = entry(integer(1))
    rank: int = entry(integer(0))

    def parts_of_rank(self) -> range:
        """The numbers of the parts that this rank reads."""
        return range(self.rank, self.streams, self.num_replicas)


_STAYS = (
    " (within an epoch{steps} it must stay {was}, because all samples of a batch come from one part of the iterable "
    "data; the number of ranks may change: load the states of all ranks)"
)


def differences(saved: StreamSignature, own: StreamSignature, position: Position, strict: bool = True) -> list[str]:
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
    phrases = differing(saved, own)
    if begins and (same_step or not strict):
        phrases.pop("batch_size", None)
    elif not begins and "batch_size" in phrases:
        steps = "" if own.steps_per_epoch is None else " and with steps_per_epoch=,"
        phrases["batch_size"] += _STAYS.format(was=saved.batch_size, steps=steps)
    found += phrases.values()
    missing = [part for part in own.parts_of_rank() if part not in position.counts]
    if not found and position.counts and missing:
        found.append(
            f"it is the state of rank {saved.rank} of {saved.num_replicas}, which knows nothing of part {missing[0]}: "
            f"each rank saves its own state, and for another number of ranks load all of them, "
            f"load_state_dict([state of rank 0, state of rank 1, ...])"
        )
    return found


def dump(position: Position, signature: StreamSignature) -> dict[str, Any]:
    """A position as a state: a new dict.

    Example:
        >>> signature = StreamSignature(7, "Lines", 2, 8, "keep", None, 1, 0)
        >>> position = Position(3, 1, None, {0: 1, 1: 0}, {0: PartPoint(1, 3, 8), 1: PartPoint(passes=3)})
        >>> parse(dump(position, signature), (1, 0)) == (position, signature)
        True
    """
    rows = [(part, given, *position.points.get(part, PartPoint())[:-1]) for part, given in position.counts.items()]
    names = [one.name for one in fields(_Parts)]
    columns: list[Any] = list(zip(*rows, strict=True)) or [()] * len(names)
    if all(state is None for state in columns[-1]):
        columns[-1] = None
    parts = _Parts(**dict(zip(names, columns, strict=True)))
    state = {"version": VERSION, "epoch": position.epoch, "batches": position.done}
    return {**state, **written(signature), "parts": written(parts)}


def parse(state: Any, replicas: tuple[int, int]) -> tuple[Position, StreamSignature]:
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


def _parse(state: Any) -> tuple[Position, StreamSignature]:
    check_version(state, _ADVICE)
    signature = parsed(StreamSignature, state, _ADVICE)
    epoch, batches = (read_entry(state, name, integer(0), _ADVICE) for name in ("epoch", "batches"))
    parts: _Parts = read_entry(state, "parts", dict_of(_Parts), _ADVICE)
    numbers, given, *columns, _ = (getattr(parts, one.name) for one in fields(parts))
    columns.append(copy.deepcopy(parts.state) or [None] * len(numbers))
    if any(len(column) != len(numbers) for column in (given, *columns)):
        raise ValueError(f"the state's 'parts' is wrong: its lists have different lengths: {_ADVICE}")
    counts = dict(zip(numbers, given, strict=True))
    points = dict(zip(numbers, map(PartPoint, *columns), strict=True))
    return Position(epoch, batches, None, counts, points), signature


def _merged(
    found: Iterable[tuple[Position, StreamSignature]], replicas: tuple[int, int]
) -> tuple[Position, StreamSignature]:
    """The states of several ranks as the position of one rank."""
    positions, signatures = zip(*found, strict=True)
    first = signatures[0]
    for one in signatures:
        if one.seed != first.seed or differing(one, first):
            raise ValueError(f"the states are those of different runs: {_ADVICE}, one of each rank")
    if len({position.epoch for position in positions}) > 1:
        epochs = ", ".join(str(position.epoch) for position in positions)
        raise ValueError(f"the states of the ranks lie in different epochs ({epochs}): save them after the same step")
    if first.steps_per_epoch is not None and len({position.done for position in positions}) > 1:
        steps = ", ".join(str(position.done) for position in positions)
        raise ValueError(f"the states of the ranks lie after different steps ({steps}): save them after the same step")
    counts = {part: count for position in positions for part, count in position.counts.items()}
    points = {part: point for position in positions for part, point in position.points.items()}
    batches = positions[0].done
    if first.steps_per_epoch is None and counts:
        batches = sum(counts.get(part, 0) for part in range(replicas[1], first.streams, replicas[0]))
    return Position(positions[0].epoch, batches, None, counts, points), first
