"""States of iterable data: a position and its signature, as ``state_dict()`` returns them. Pure functions.

    Position + StreamSignature  --dump-->  dict  --parse-->  Position, StreamSignature

Each rank saves the progress of its own parts. `parse` takes a list of the ranks' states, from which another number of
ranks can resume. A state is a flat dict of numbers, strings and lists, and of the dataset's own states as they are.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sharded_loader.base import entries
from sharded_loader.base.entries import anything, entry, from_state, integer, list_of, optional, read_entry, to_state
from sharded_loader.engine.messages import PartPoint, Stream
from sharded_loader.engine.order import Position

_ADVICE = "give what state_dict() of a ShardedDataLoader over iterable data returned"

_PARTS = {
    **dict.fromkeys(("number", "given", "batches", "passes", "samples", "checksum"), list_of(integer(0))),
    "ended": list_of(entries.true_or_false),
    "state": optional(list_of(anything)),
}
"""The entry ``parts``: for each part its number, batches given, and the fields of a `PartPoint`."""


@dataclass(frozen=True)
class StreamSignature:
    """Parameters that a position in iterable data depends on. All are saved in a state."""

    dataset_length: ClassVar[None] = None

    seed: int = entry(integer())
    dataset: str = entry(entries.string, "the dataset was a {was}, and is a {now}")
    streams: int = entry(integer(1), "there were {was} parts (streams), and are {now}")
    batch_size: int = entry(integer(1), "batch_size was {was}, and is {now}")
    last_batch: str = entry(entries.string, "last_batch was {was!r}, and is {now!r}")
    steps_per_epoch: int | None = entry(optional(integer(1)), "steps_per_epoch was {was}, and is {now}")
    num_replicas: int = entry(integer(1))
    rank: int = entry(integer(0))

    @property
    def stream(self) -> Stream:
        return Stream(self.streams, self.batch_size, self.last_batch == "discard", self.steps_per_epoch is not None)

    def parts_of_rank(self) -> range:
        """Return the numbers of this rank's parts."""
        return range(self.rank, self.streams, self.num_replicas)


_STAYS = (
    " (within an epoch{steps} it must stay {was}, because all samples of a batch come from one part of the iterable "
    "data; the number of ranks may change: load the states of all ranks)"
)


def differences(saved: StreamSignature, own: StreamSignature, position: Position, strict: bool = True) -> list[str]:
    """Return the reasons why a state does not fit a loader, one phrase each.

    ``strict`` means that the batch size matters even at the beginning of an epoch.
    """
    texts = []
    is_at_start = not any(position.counts.values())
    same_step = saved.batch_size * saved.num_replicas == own.batch_size * own.num_replicas
    if saved.streams < own.num_replicas:
        texts.append(f"there were {saved.streams} parts (streams), and are {own.num_replicas} ranks: each needs a part")
    phrases = entries.differences(saved, own)
    if is_at_start and (same_step or not strict):
        phrases.pop("batch_size", None)
    elif not is_at_start and "batch_size" in phrases:
        steps = "" if own.steps_per_epoch is None else " and with steps_per_epoch=,"
        phrases["batch_size"] += _STAYS.format(was=saved.batch_size, steps=steps)
    texts += phrases.values()
    missing = [part for part in own.parts_of_rank() if part not in position.counts]
    if not texts and position.counts and missing:
        texts.append(
            f"it is the state of rank {saved.rank} of {saved.num_replicas}, which knows nothing of part {missing[0]}: "
            f"each rank saves its own state, and for another number of ranks load all of them, "
            f"load_state_dict([state of rank 0, state of rank 1, ...])"
        )
    return texts


def dump(position: Position, signature: StreamSignature) -> dict[str, Any]:
    """Return a position as a new state dict.

    Example:
        >>> signature = StreamSignature(7, "Lines", 2, 8, "keep", None, 1, 0)
        >>> position = Position(3, 1, None, {0: 1, 1: 0}, {0: PartPoint(1, 3, 8), 1: PartPoint(passes=3)})
        >>> parse(dump(position, signature), (1, 0)) == (position, signature)
        True
    """
    rows = [(part, given, *position.points.get(part, PartPoint())[:-1]) for part, given in position.counts.items()]
    parts = dict(zip(_PARTS, map(list, zip(*rows, strict=True)) if rows else ([] for _ in _PARTS), strict=True))
    states = copy.deepcopy(parts.pop("state"))
    if any(state is not None for state in states):
        parts["state"] = states
    state = {"version": entries.VERSION, "epoch": position.epoch, "batches": position.done}
    return {**state, **to_state(signature), "parts": parts}


def parse(state: object, replicas: tuple[int, int]) -> tuple[Position, StreamSignature]:
    """Return position and signature from a state, or from a list of the states of all ranks.

    ``replicas`` is the number of ranks, and this rank. TypeError or ValueError: it is no such state.
    """
    states = state if isinstance(state, list | tuple) and state else [state]
    positions, signatures = zip(*map(_parse, states), strict=True)
    first = signatures[0]
    if len(states) == 1 and (first.num_replicas, first.rank) == replicas:
        return positions[0], first
    for signature in signatures:
        if signature.seed != first.seed or entries.differences(signature, first):
            raise ValueError(f"the states are those of different runs: {_ADVICE}, one of each rank")
    compared = {"in different epochs": [position.epoch for position in positions]}
    if first.steps_per_epoch is not None:
        compared["after different steps"] = [position.done for position in positions]
    for where, values in compared.items():
        if len(set(values)) > 1:
            numbers = ", ".join(map(str, values))
            raise ValueError(f"the states of the ranks lie {where} ({numbers}): save them after the same step")
    counts = {part: count for position in positions for part, count in position.counts.items()}
    points = {part: point for position in positions for part, point in position.points.items()}
    batches = positions[0].done
    if first.steps_per_epoch is None and counts:
        batches = sum(counts.get(part, 0) for part in range(replicas[1], first.streams, replicas[0]))
    return Position(positions[0].epoch, batches, None, counts, points), first


def _parse(state: Any) -> tuple[Position, StreamSignature]:
    entries.check_version(state, _ADVICE)
    signature = from_state(StreamSignature, state, _ADVICE)
    epoch, batches = (read_entry(state, name, integer(0), _ADVICE) for name in ("epoch", "batches"))
    parts = {"state": None, **read_entry(state, "parts", entries.instance(Mapping, "a dict"), _ADVICE)}
    where = "the state's 'parts'"
    numbers, given, *columns = (read_entry(parts, name, read, _ADVICE, where) for name, read in _PARTS.items())
    columns[-1] = copy.deepcopy(columns[-1]) or [None] * len(numbers)
    pairs = (one is None or (isinstance(one, list | tuple) and len(one) > 1) for one in columns[-1])
    if any(len(column) != len(numbers) for column in (given, *columns)) or not all(pairs):
        raise ValueError(f"{where} is wrong: its lists have different lengths: {_ADVICE}")
    counts = dict(zip(numbers, given, strict=True))
    return Position(epoch, batches, None, counts, dict(zip(numbers, map(PartPoint, *columns), strict=True))), signature
