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
from sharded_loader.sampling.signature import Signature
from sharded_loader.sampling.tracing import Mark

VERSION = 1

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
        raise TypeError(f"the state is {state!r}, a {type(state).__name__}; it must be a dict: {_ADVICE}")
    if "version" not in state:
        raise ValueError(f"the state has no 'version', its keys are {sorted(map(str, state))}: {_ADVICE}")
    version = _integer(state, "version")
    if version > VERSION:
        raise ValueError(
            f"the state is of version {version}, this sharded_loader reads up to version {VERSION}: update "
            f"sharded_loader, or begin with set_epoch({state.get('epoch', '...')})"
        )
    seed, seeds = _integer(state, "seed"), _entry(state, "sampler_seeds")
    if not isinstance(seeds, list | tuple):
        raise ValueError(f"the state's 'sampler_seeds' is {seeds!r}; it must be a list of integers: {_ADVICE}")
    arguments = state.get("sampler_arguments", {})
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the state's 'sampler_arguments' is {arguments!r}; it must be a dict: {_ADVICE}")
    signature = Signature(
        seed=seed,
        dataset_length=_integer(state, "dataset_length", optional=True),
        sampler=_text(state, "sampler"),
        sampler_length=_integer(state, "sampler_length", optional=True),
        sampler_seeds=tuple(_integer({"sampler_seeds": one}, "sampler_seeds", optional=True) for one in seeds),
        batch_size=_integer(state, "batch_size", optional=True),
        last_batch=None if _entry(state, "last_batch") is None else _text(state, "last_batch"),
        sampler_arguments=tuple(arguments.items()),
    )
    epoch, done = _integer(state, "epoch"), _integer(state, signature.unit)
    if version < 1 or epoch < 0 or (done < 0 and signature.last_batch != "rollover"):
        raise ValueError(
            f"the state has version {version}, epoch {epoch}, {signature.unit} {done}; none can be negative: {_ADVICE}"
        )
    length = signature.sampler_length
    if length is not None and done > length:
        raise ValueError(f"the state has {signature.unit} {done}, but the epoch has only {length}: {_ADVICE}")
    return Place(epoch, done, _mark(state.get("passed"))), signature


def _entry(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise ValueError(f"the state has no {name!r}: {_ADVICE}")
    return state[name]


def _integer(state: Mapping[str, Any], name: str, optional: bool = False) -> Any:
    value = _entry(state, name)
    if optional and value is None:
        return None
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise ValueError(f"the state's {name!r} is {value!r}; it must be an integer: {_ADVICE}") from None


def _text(state: Mapping[str, Any], name: str) -> str:
    value = _entry(state, name)
    if not isinstance(value, str):
        raise ValueError(f"the state's {name!r} is {value!r}; it must be a string: {_ADVICE}")
    return value


def _mark(passed: Any) -> Mark | None:
    if passed is None:
        return None
    if not isinstance(passed, Mapping):
        raise ValueError(f"the state's 'passed' is {passed!r}; it must be a dict: {_ADVICE}")
    mark = Mark(
        epoch=_integer(passed, "epoch"),
        items=_integer(passed, "items"),
        checksum=_integer(passed, "checksum"),
        rank=_integer(passed, "rank", optional=True),
        finished=_entry(passed, "finished"),
        state=_entry(passed, "state"),
    )
    if mark.epoch < 0 or mark.items < 0 or not isinstance(mark.finished, bool):
        raise ValueError(
            f"the state's 'passed' has epoch {mark.epoch}, items {mark.items}, finished {mark.finished!r}; the first "
            f"two cannot be negative, the last is true or false: {_ADVICE}"
        )
    return mark
