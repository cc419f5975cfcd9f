"""The entries of a saved position: how each one is read from a dict, written into one, and compared.

    entry(integer(0), "there were {was}, and are {now}")    a field of a dataclass that is an entry of a state
    written(position)                 the entries as a new dict
    parsed(kind, state, advice)       the dataclass that a dict describes; an error names the entry that is wrong
    differing(saved, now)             what to say of each entry that is another one

A state is a flat dict of numbers, strings and lists, so that JSON, pickle and ``torch.save`` keep it. Only states that
users' objects have returned may be anything. A new entry is one line. An entry with a default is left out where it has
that value, and may be missing.

What can go wrong: a dict that is no state, or one of a newer version (ValueError, TypeError). Each error ends with the
advice of the caller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, NamedTuple, TypeVar

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an, brief

VERSION = 1
"""Of states of loaders: their entry ``version``."""

Reader = Callable[[str, Any, str], Any]
"""``read(what, value, advice)`` checks and converts what a state has. ``what`` names the entry in errors."""

T = TypeVar("T")


# -- readers -----------------------------------------------------------------------------------------------------------


def integer(least: float = -math.inf) -> Reader:
    """Reads an int of at least ``least``."""
    return lambda what, value, advice: check_int(what, value, least, advice, ValueError)


def instance(kind: Any, must: str) -> Reader:
    """Reads an object of a class; ``must`` says in an error what it must be."""

    def read(what: str, value: Any, advice: str) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{what} is {brief(value)}; it must be {must}: {advice}")
        return value

    return read


string, true_or_false = instance(str, "a string"), instance(bool, "true or false")
anything = instance(object, "anything")


def optional(read: Reader) -> Reader:
    """Reads None too."""
    return lambda what, value, advice: None if value is None else read(what, value, advice)


def list_of(read: Reader, must: str = "a list") -> Reader:
    """Reads a list as a tuple."""
    is_list = instance(list | tuple, must)
    return lambda what, value, advice: tuple(read(what, item, advice) for item in is_list(what, value, advice))


def dict_of(kind: type[object]) -> Reader:
    """Reads a dict of entries as the dataclass that they are fields of."""
    return lambda what, value, advice: parsed(kind, instance(Mapping, "a dict")(what, value, advice), advice, what)


# -- entries -----------------------------------------------------------------------------------------------------------


class _Stored(NamedTuple):
    read: Reader
    differs: str | None
    write: Callable[[Any], object] | None
    name: str | None


def entry(
    read: Reader,
    differs: str | None = None,
    *,
    write: Callable[[Any], object] | None = None,
    name: str | None = None,
    default: object = MISSING,
) -> Any:
    """A field of a dataclass that is an entry of a state.

    Args:
        read: checks and converts what a dict has.
        differs: what to say where ``was`` and ``now`` are not the same. None: they are not compared.
        write: makes what a dict gets. None: the value as it is.
        name: of the entry. None: that of the field.
        default: left out of the dict.
    """
    return field(default=default, metadata={"entry": _Stored(read, differs, write, name)})


_known: dict[Any, list[tuple[str, str, object, _Stored]]] = {}


def _entries(kind: Any) -> list[tuple[str, str, object, _Stored]]:
    """Name, field, default and the rest of each entry."""
    if kind not in _known:
        found = [(one, one.metadata["entry"]) for one in fields(kind) if "entry" in one.metadata]
        _known[kind] = [(which.name or one.name, one.name, one.default, which) for one, which in found]
    return _known[kind]


def written(position: object) -> dict[str, Any]:
    """The entries of a dataclass as a new dict.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Place:
        ...     epoch: int = entry(integer(0), "the epoch was {was}, and is {now}")
        ...     ranks: int | None = entry(optional(integer(1)), default=None)
        >>> written(Place(3)), parsed(Place, {"epoch": 3}, "give a state"), differing(Place(3), Place(4))
        ({'epoch': 3}, Place(epoch=3, ranks=None), {'epoch': 'the epoch was 3, and is 4'})
        >>> parsed(Place, {"epoch": -1}, "give a state")
        Traceback (most recent call last):
        ValueError: the state's 'epoch' must be at least 0, got -1: give a state
    """
    state = {}
    for name, attribute, default, one in _entries(type(position)):
        value = getattr(position, attribute)
        if value is not default and (default is None or default is MISSING or value != default):
            state[name] = value if one.write is None else one.write(value)
    return state


def parsed(kind: type[T], state: Mapping[str, object], advice: str, what: str = "the state") -> T:
    """The dataclass that a dict describes. Other entries of the dict do not count.

    Args:
        kind: the dataclass.
        state: what `written` has returned, also after a way through JSON.
        advice: what to do instead, for errors.
        what: names the dict in errors.

    Raises:
        ValueError: an entry is missing or wrong.
    """
    values = {}
    for name, attribute, default, one in _entries(kind):
        if name in state or default is MISSING:
            values[attribute] = read_entry(state, name, one.read, advice, what)
    return kind(**values)


def read_entry(state: Mapping[str, object], name: str, read: Reader, advice: str, what: str = "the state") -> Any:
    """One entry of a dict."""
    if name not in state:
        raise ValueError(f"{what} has no {name!r}: {advice}")
    return read(f"{what}'s {name!r}" if what == "the state" else f"{what} is wrong: its {name!r}", state[name], advice)


def differing(saved: T, now: T, **words: str) -> dict[str, str]:
    """What to say of each entry that is compared and is another one, by the names of the fields.

    Args:
        saved, now: two objects of one class.
        words: what else the texts have in braces.
    """
    found = {}
    for _, attribute, _, one in _entries(type(saved)):
        was, is_now = getattr(saved, attribute), getattr(now, attribute)
        if one.differs is not None and was != is_now:
            found[attribute] = one.differs.format(was=was, now=is_now, **words)
    return found


def check_version(state: object, advice: str) -> None:
    """An error if this is no state of a loader, or one that this version cannot read.

    Raises:
        TypeError: it is no dict.
        ValueError: it has no version, or a newer one.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is {brief(state)}, {an(type(state))}; it must be a dict: {advice}")
    if "version" not in state:
        raise ValueError(f"the state has no 'version', its keys are {brief(sorted(map(str, state)))}: {advice}")
    version = read_entry(state, "version", integer(1), advice)
    if version > VERSION:
        raise ValueError(
            f"the state is of version {brief(version)}, this sharded_loader reads up to version {VERSION}: update "
            f"sharded_loader, or begin with set_epoch({brief(state.get('epoch', '...'))})"
        )
