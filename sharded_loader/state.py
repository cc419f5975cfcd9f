"""What `state_dict` returns: its format. Pure functions.

    Place (where) + Signature (of what)  --dump-->  dict  --parse-->  Place, Signature

A state is a flat dict of ints, strings and lists of ints, so that JSON, pickle and ``torch.save`` keep it. The
place in it counts in the global order; nothing of the rank, the pool, the workers or the devices is in it:

    version         of this format
    epoch           number of the epoch
    samples         of the epoch's global order that are done (with rollover negative, while the last ones of the
                    epoch before are still due); or ``batches``, if a batch sampler was given
    seed            of the loader
    dataset_length  or None
    sampler         its class, with those inside it
    sampler_length  items of the global order; None for foreign samplers
    sampler_seeds   of the samplers that were given
    sampler_arguments   what else decides the order of those of ours, if anything does: numbers, checksums of arrays
    batch_size, last_batch
    passed          foreign samplers only: what was read of them (`sharded_loader.sampling.tracing.Mark`)

What can go wrong: a dict that is no state, or one of a newer version. Whether a state fits a loader is asked in
`sharded_loader.sampling.signature`.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from typing import Any

from sharded_loader.sampling.reading import Place
from sharded_loader.sampling.signature import Signature, out_of_epoch
from sharded_loader.sampling.tracing import Mark

VERSION = 1

LARGEST = 2**62
"""Epochs, samples and batches count up to this: no dataset is longer."""

LEAST_SEED, LARGEST_SEED = -(1 << 128), 1 << 4096
"""Bounds of seeds. A loader takes any seed from the first on; Python does not show the digits of much larger ones."""

_ADVICE = "give what state_dict() of a ShardedDataLoader returned"


def dump(place: Place, signature: Signature) -> dict[str, Any]:
    """A place as a state: a new dict (2 us).

    Example:
        >>> signature = Signature(7, 100, "RandomSampler", 100, (), 8, "keep")
        >>> state = dump(Place(3, 40), signature)
        >>> state["epoch"], state["samples"], parse(state) == (Place(3, 40), signature)
        (3, 40, True)
    """
    state: dict[str, Any] = {
        "version": VERSION,
        "epoch": place.epoch,
        signature.unit: place.done,
        "seed": signature.seed,
        "dataset_length": signature.dataset_length,
        "sampler": signature.sampler,
        "sampler_length": signature.sampler_length,
        "sampler_seeds": list(signature.sampler_seeds),
        "batch_size": signature.batch_size,
        "last_batch": signature.last_batch,
    }
    if signature.sampler_arguments:
        state["sampler_arguments"] = dict(signature.sampler_arguments)
    if place.mark is not None:
        mark = place.mark
        state["passed"] = {
            "epoch": mark.epoch,
            "items": mark.items,
            "checksum": mark.checksum,
            "rank": mark.rank,
            "finished": mark.finished,
            "state": copy.deepcopy(mark.state),
        }
    return state


def parse(state: Any) -> tuple[Place, Signature]:
    """A state as place and signature.

    Args:
        state: what `dump` returned, also after a way through JSON.

    Raises:
        TypeError: it is no dict.
        ValueError: it is no state, or one of a newer version; says which entry is wrong.

    Example:
        >>> parse({"version": 1, "epoch": 0})
        Traceback (most recent call last):
        ...
        ValueError: the state has no 'seed': give what state_dict() of a ShardedDataLoader returned
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is {_show(state)}, a {type(state).__name__}; it must be a dict: {_ADVICE}")
    if "version" not in state:
        raise ValueError(f"the state has no 'version', its keys are {_show(sorted(map(str, state)))}: {_ADVICE}")
    version = _integer(state, "version")
    if version > VERSION:
        raise ValueError(
            f"the state is of version {_show(version)}, this sharded_loader reads up to version {VERSION}: update "
            f"sharded_loader, or begin with set_epoch({_show(state.get('epoch', '...'))})"
        )
    seed, seeds = _integer(state, "seed", least=LEAST_SEED, most=LARGEST_SEED), _entry(state, "sampler_seeds")
    if not isinstance(seeds, list | tuple):
        raise ValueError(f"the state's 'sampler_seeds' is {_show(seeds)}; it must be a list of integers: {_ADVICE}")
    signature = Signature(
        seed=seed,
        dataset_length=_integer(state, "dataset_length", optional=True, least=0),
        sampler=_text(state, "sampler"),
        sampler_length=_integer(state, "sampler_length", optional=True, least=0),
        sampler_seeds=tuple(
            _integer({"sampler_seeds": one}, "sampler_seeds", optional=True, least=-LARGEST_SEED, most=LARGEST_SEED)
            for one in seeds
        ),
        batch_size=_integer(state, "batch_size", optional=True, least=1),
        last_batch=None if _entry(state, "last_batch") is None else _text(state, "last_batch"),
        sampler_arguments=_arguments(state.get("sampler_arguments", {})),
    )
    unit = signature.unit
    if unit not in state:
        raise ValueError(f"the state has no {unit!r}, and its 'batch_size' is {signature.batch_size}: {_ADVICE}")
    epoch, done = _integer(state, "epoch", most=LARGEST), _integer(state, unit, least=-LARGEST, most=LARGEST)
    if version < 1 or epoch < 0 or (done < 0 and signature.last_batch != "rollover"):
        raise ValueError(
            f"the state has version {_show(version)}, epoch {_show(epoch)}, {unit} {_show(done)}; none can be "
            f"negative (with last_batch {_show(signature.last_batch)}): {_ADVICE}"
        )
    if (found := out_of_epoch(signature, signature.sampler_length, epoch, done)) is not None:
        raise ValueError(f"the state has {found}: {_ADVICE}")
    mark = _mark(state.get("passed"))
    if mark is not None and mark.epoch > epoch:
        raise ValueError(f"the state's 'passed' has epoch {mark.epoch}, but the state has epoch {epoch}: {_ADVICE}")
    return Place(epoch, done, mark), signature


def _entry(state: Mapping[str, Any], name: str, inside: str = "") -> Any:
    if name not in state:
        where = f"the state's {inside}" if inside else "the state"
        raise ValueError(f"{where} has no {name!r}: {_ADVICE}")
    return state[name]


def _integer(
    state: Mapping[str, Any],
    name: str,
    optional: bool = False,
    *,
    least: int | None = None,
    most: int = 1 << 64,
    inside: str = "",
) -> Any:
    """An integer entry, checked.

    Args:
        state: the dict that has it.
        name: of the entry.
        optional: None is allowed.
        least, most: the smallest and the largest number allowed. Without ``least`` the caller checks that.
        inside: what the message calls the dict that the entry is in, if that is not the state.
    """
    value = _entry(state, name, inside)
    if optional and value is None:
        return None
    what = f"the state's {inside and inside + ' is wrong: its '}{name!r} is {_show(value)}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{what}; it must be an integer: {_ADVICE}") from None
    if least is not None and number < least:
        raise ValueError(f"{what}; it must be at least {_show(least)}: {_ADVICE}")
    if number > most:
        raise ValueError(f"{what}; it must be at most {_show(most)}: {_ADVICE}")
    return number


def _text(state: Mapping[str, Any], name: str) -> str:
    value = _entry(state, name)
    if not isinstance(value, str):
        raise ValueError(f"the state's {name!r} is {_show(value)}; it must be a string: {_ADVICE}")
    return value


def _arguments(given: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(given, Mapping):
        raise ValueError(f"the state's 'sampler_arguments' is {_show(given)}; it must be a dict: {_ADVICE}")
    for name, value in given.items():
        if not isinstance(name, str) or not (value is None or isinstance(value, bool | int | float | str)):
            raise ValueError(
                f"the state's 'sampler_arguments' has {_show(name)}: {_show(value)}; it must have "
                f"names, and numbers or strings: {_ADVICE}"
            )
    return tuple(given.items())


def _show(value: Any) -> str:
    """A value in an error message: short, and whatever its own repr does."""
    try:
        text = repr(value)
    except Exception:  # also an integer of more than 4,300 digits
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _mark(passed: Any) -> Mark | None:
    if passed is None:
        return None
    if not isinstance(passed, Mapping):
        raise ValueError(f"the state's 'passed' is {_show(passed)}; it must be a dict: {_ADVICE}")
    inside = "'passed'"
    mark = Mark(
        epoch=_integer(passed, "epoch", most=LARGEST, inside=inside),
        items=_integer(passed, "items", most=LARGEST, inside=inside),
        checksum=_integer(passed, "checksum", least=0, most=0xFFFFFFFF, inside=inside),
        rank=_integer(passed, "rank", optional=True, least=0, inside=inside),
        finished=_entry(passed, "finished", inside),
        state=_entry(passed, "state", inside),
    )
    if mark.epoch < 0 or mark.items < 0 or not isinstance(mark.finished, bool):
        raise ValueError(
            f"the state's 'passed' has epoch {_show(mark.epoch)}, items {_show(mark.items)}, finished "
            f"{_show(mark.finished)}; the first "
            f"two cannot be negative, the last is true or false: {_ADVICE}"
        )
    return mark
