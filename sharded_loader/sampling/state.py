"""Contents of `state_dict`: a position, and a signature of the order it belongs to. Pure functions.

    Position + Signature  --dump-->  dict  --parse-->  Position, Signature
    differences(saved, own, strict)      reasons why a state does not fit a loader

A state has the entry ``version`` and the fields of `Position` and `Signature`; see `base.entries`. The position counts
in the global order. It is independent of rank, pool, workers and devices. Errors name the entry that is wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sharded_loader.base import entries
from sharded_loader.base.described import brief
from sharded_loader.base.entries import anything, entry, instance, integer, list_of, optional, string, true_or_false
from sharded_loader.engine.order import Position
from sharded_loader.sampling.base import Sampler, is_own, nested
from sharded_loader.sampling.tables import Ranges, check_skip, checksum_of

WEIGHTS_SET = "set_weights"
"""Name in ``sampler_arguments`` of weights set during training. A loader takes them over from a state."""

SUM = "crc32 "
"""Prefix of array checksums in ``sampler_arguments``."""

ORDER_VERSION = "order_version"
"""Name in ``sampler_arguments`` of the version of an order, if it is not 1."""

_ADVICE = "give what state_dict() of a ShardedDataLoader returned"
_BEGINNING = Position(0)


def _arguments(what: str, value: Any, advice: str) -> tuple[tuple[str, Any], ...]:
    for name, argument in instance(Mapping, "a dict")(what, value, advice).items():
        if not isinstance(name, str) or not isinstance(argument, bool | int | float | str | None):
            text = f"{what} has {brief(name)}: {brief(argument)}"
            raise ValueError(f"{text}; it must have names, and numbers or strings: {advice}")
    return tuple(value.items())


def steps_to_skip(what: str, value: object, advice: str) -> Ranges:
    try:
        return check_skip(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{what} is wrong ({error}): {advice}") from None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Position in one epoch of a third-party sampler: the entry ``passed``.

    Attributes:
        items, checksum: number of items it had yielded, and their CRC-32.
        rank: rank of a sampler that yields one rank's share (torch's DistributedSampler); None: the same on all ranks.
        finished: the epoch was exhausted.
        state: the sampler's own state, or None; if finished, a state from before the end.
    """

    epoch: int = entry(integer(0))
    items: int = entry(integer(0))
    checksum: int = entry(integer(0))
    rank: int | None = entry(optional(integer(0)))
    finished: bool = entry(true_or_false)
    state: Any = entry(anything, write=copy.deepcopy)  # noqa: RUF009 - it makes a field


@dataclass(frozen=True, slots=True)
class Signature:
    """Identity of an order: two loaders with equal signatures yield the same batches.

    Attributes:
        sampler_length: items of the global order; None for third-party samplers.
        batch_size, last_batch: of one rank; None: items are batches, possibly lists of shards. Tuples are indices.
        sampler_arguments: other arguments that decide the order: numbers, and checksums of arrays.
        num_replicas: number of ranks; None: one rank, by default.
        step_ranks: number of ranks that the order is made for, until the epoch ends; None: 1, or any number.
        shift: offset, in items, of epoch starts under ``steps_per_epoch``, caused by changes of the rank count.
    """

    seed: int = entry(integer())
    dataset_length: int | None = entry(optional(integer(0)), "the dataset had {was} samples, and has {now}")
    sampler: str = entry(string, "the sampler was {was}, and is {now}")
    sampler_length: int | None = entry(optional(integer(0)), "the sampler had {was} {unit} in the epoch, and has {now}")
    sampler_seeds: tuple[int | None, ...] = entry(list_of(optional(integer()), "a list of integers"), write=list)
    batch_size: int | None = entry(optional(integer(1)), "batch_size was {was}, and is {now}")
    last_batch: str | None = entry(optional(string), "last_batch was {was!r}, and is {now!r}")
    sampler_arguments: tuple[tuple[str, Any], ...] = entry(_arguments, write=dict, default=())
    steps_per_epoch: int | None = entry(optional(integer(1)), "steps_per_epoch was {was}, and is {now}", default=None)
    num_replicas: int | None = entry(optional(integer(1)), "there were {was} ranks, and are {now}", default=None)
    step_ranks: int | None = entry(optional(integer(1)), default=None)
    shift: int = entry(integer(), default=0)
    skip: Ranges = entry(steps_to_skip, write=lambda skip: list(map(list, skip)), default=())  # noqa: RUF009 - it makes a field

    @property
    def rolls_over(self) -> bool:
        """True if samples of an incomplete last batch begin the next epoch."""
        return self.last_batch == "rollover" or self.steps_per_epoch is not None

    @property
    def drops_last(self) -> bool:
        return self.last_batch == "discard"

    @property
    def items_in_step(self) -> int:
        """Items of the global order in one step of all ranks."""
        return (self.batch_size or 1) * (self.num_replicas or 1)

    @property
    def unit(self) -> str:
        return "batches" if self.batch_size is None else "samples"


def dump(position: Position, signature: Signature) -> dict[str, Any]:
    """Return a position as a new state dict (5 us).

    Example:
        >>> signature = Signature(7, 100, "RandomSampler", 100, (), 8, "keep")
        >>> state = dump(Position(3, 40), signature)
        >>> state["epoch"], state["samples"], parse(state) == (Position(3, 40), signature)
        (3, 40, True)
    """
    state: dict[str, Any] = {"version": entries.VERSION, "epoch": position.epoch, signature.unit: position.done}
    state |= entries.to_state(signature)
    if position.mark is not None:
        state["passed"] = entries.to_state(position.mark)
    if position.row_checkpoint is not None:
        state["landmark"] = list(position.row_checkpoint)
    return state


def parse(state: Any) -> tuple[Position, Signature]:
    """Parse a state from `dump`, possibly after a round trip through JSON. Errors name the wrong entry.

    Example:
        >>> parse({"version": 1, "epoch": 0})
        Traceback (most recent call last):
        ...
        ValueError: the state has no 'seed': give what state_dict() of a ShardedDataLoader returned
    """
    entries.check_version(state, _ADVICE)
    signature = entries.from_state(Signature, state, _ADVICE)
    unit = signature.unit
    if unit not in state:
        raise ValueError(f"the state has no {unit!r}, and its 'batch_size' is {signature.batch_size}: {_ADVICE}")
    epoch = entries.read_entry(state, "epoch", integer(0), _ADVICE)
    may_be_early = signature.last_batch == "rollover"  # an epoch may begin with samples of the previous one
    done = entries.read_entry(state, unit, integer() if may_be_early else integer(0), _ADVICE)
    rows = None if "landmark" not in state else entries.read_entry(state, "landmark", list_of(integer(0)), _ADVICE)
    if rows is not None and len(rows) != 2:
        raise ValueError(f"the state's 'landmark' must have two numbers, got {brief(rows)}: {_ADVICE}")
    if state.get("passed") is None:
        return Position(epoch, done, row_checkpoint=rows), signature
    passed: Checkpoint = entries.read_entry(state, "passed", entries.dict_of(Checkpoint), _ADVICE)
    if passed.epoch > epoch and signature.steps_per_epoch is None:
        raise ValueError(f"the state's 'passed' has epoch {passed.epoch}, but the state has epoch {epoch}: {_ADVICE}")
    return Position(epoch, done, passed), signature


def differences(
    saved: Signature, own: Signature, strict: bool = True, endless: bool = False, position: Position = _BEGINNING
) -> list[str]:
    """Return the reasons why a state does not fit a loader, one phrase each. Seeds are compared elsewhere.

    ``strict`` rejects another batch size, unless a step of all ranks stays equal. ``endless``: the sampler has no end.

    Example:
        >>> one = Signature(7, 100, "RandomSampler", 100, (), 8, "keep")
        >>> other = Signature(7, 90, "RandomSampler", 90, (), 4, "keep")
        >>> for phrase in differences(one, other): print(phrase)
        the dataset had 100 samples, and has 90
        batch_size was 8, and is 4
    """
    phrases = entries.differences(saved, own, unit=own.unit)
    if phrases.keys() & {"dataset_length", "sampler"}:
        phrases.pop("sampler_length", None)  # a consequence
    stays = own.steps_per_epoch is None or shifted(position, saved, own, endless) is not None
    # In epoch 0 of `steps_per_epoch` positions count from the very beginning, so the batch size does not matter.
    same_step = saved.items_in_step == own.items_in_step
    if saved.unit == own.unit and (same_step or (not strict and (stays or not position.epoch))):
        phrases.pop("batch_size", None)
    if stays:
        phrases.pop("num_replicas", None)
    for name in phrases.keys() & {"dataset_length", "sampler_length"}:
        phrases[name] = phrases[name].replace("None", "an unknown number of")
    return list(phrases.values())


def shifted(position: Position, saved: Signature, own: Signature, endless: bool) -> int | None:
    """Return the ``shift`` with which the next epoch begins where this one ends, after a change of ranks or batch size.

    None if impossible: unless the sampler is endless, the ranks must divide its length and the number of items done.

    Example:
        After 3 steps of 4 ranks, 2 ranks continue. Epochs begin 6 items later than they would for 2 ranks alone.

        >>> four = Signature(7, 100, "RandomSampler", 100, (), 1, "keep", (), 5, 4)
        >>> two = Signature(7, 100, "RandomSampler", 100, (), 1, "keep", (), 5, 2)
        >>> shifted(Position(0, 12), four, two, endless=False)
        6
    """
    if (saved.num_replicas or 1, saved.batch_size) == (own.num_replicas or 1, own.batch_size):
        return saved.shift
    steps, rest = divmod(position.done, saved.items_in_step)
    steps += position.epoch * (own.steps_per_epoch or 0)
    shift = saved.shift + steps * (saved.items_in_step - own.items_in_step)
    ranks, length = own.num_replicas or 1, own.sampler_length
    if endless:
        return None if rest else shift
    if rest or length is None or length % ranks or length % (saved.num_replicas or 1) or shift % ranks:
        return None
    return shift


def other_arguments(saved: Signature, own: Signature) -> list[str]:
    """Return the changed arguments of the samplers, one phrase each.

    Example:
        >>> one = Signature(7, 9, "IntervalSampler", 9, (), 8, "keep", (("IntervalSampler.interval", 3),))
        >>> other = Signature(7, 9, "IntervalSampler", 9, (), 8, "keep", (("IntervalSampler.interval", 2),))
        >>> other_arguments(one, other)
        ['interval of the IntervalSampler was 3, and is 2']
    """
    before, phrases = dict(saved.sampler_arguments), []
    for name, now in own.sampler_arguments:
        sampler, _, argument = name.partition(".")
        was = before.get(name, 1 if argument == ORDER_VERSION and before else now)
        if was != now and argument != WEIGHTS_SET:
            if argument == ORDER_VERSION:
                text = f"the order of the {sampler} was different in the version of this library that saved it"
                phrases.append(f"{text}, so begin the epoch again, or finish it with that version")
            elif isinstance(was, str) and was.startswith(SUM):
                phrases.append(f"{argument} of the {sampler} changed after the state was saved")
            else:
                phrases.append(f"{argument} of the {sampler} was {was!r}, and is {now!r}")
    return phrases


def arguments_of(samplers: Iterable[object]) -> tuple[tuple[str, Any], ...]:
    """Return the arguments of the library's samplers that decide the order, besides seed and length."""
    return tuple(
        (f"{type(sampler).__name__}.{name}", _summary(getattr(sampler, attribute)))
        for sampler in samplers
        if isinstance(sampler, Sampler) and is_own(sampler)
        for name, attribute in (*sampler.decided_by, *([(ORDER_VERSION,) * 2] if sampler.order_version > 1 else []))
    )


def weights_set(samplers: Iterable[Any]) -> tuple[tuple[str, str], ...]:
    """Return the weights set during training, in the form of `arguments_of`."""
    found = ((f"{type(one).__name__}.{WEIGHTS_SET}", one.weights_set) for one in samplers if has_weights(one))
    return tuple((name, text) for name, text in found if text is not None)


def has_weights(sampler: object) -> bool:
    """Return True if weights of an own sampler may change during training. Each loader reads a copy of it."""
    return hasattr(type(sampler), "weights_set") and is_own(sampler)


def _summary(value: object) -> Any:
    return value if value is None or isinstance(value, bool | int | str) else f"{SUM}{checksum_of(value):08x}"


def kind_of(sampler: object) -> str:
    """Return the class names of a sampler and its inner samplers; torch's classes are prefixed by the package."""
    names = []
    for each in nested(sampler):
        package = type(each).__module__.partition(".")[0]
        names.append(f"torch.{type(each).__name__}" if package == "torch" else type(each).__name__)
    return "(".join(names) + ")" * (len(names) - 1)


def seed_of(sampler: object) -> int | None:
    seed = getattr(sampler, "seed", None)
    return int(seed) if isinstance(seed, int) else None
