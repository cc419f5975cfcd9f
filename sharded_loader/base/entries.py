"""Entries of a saved position: how each is parsed from a dict, serialized, and compared.

    entry(integer(0), "there were {was}, and are {now}")    declares a dataclass field as an entry of the state
    to_state(position)                -> a new dict of the entries
    from_state(kind, state, advice)   -> the dataclass; errors name the invalid entry
    differences(saved, now)           -> messages about the entries whose values differ

A state is a flat dict of numbers, strings and lists, so it survives JSON, pickle and ``torch.save``. Only states from
users' objects may hold anything else. An invalid state, or one of a newer version, raises ValueError or TypeError, with
the caller's advice at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, field, fields
from typing import Any, NamedTuple, TypeVar

from sharded_loader.base.checks import check_int
from sharded_loader.base.described import an, brief

VERSION = 1
"""Format version of states (their entry ``version``); `docs/versions.md` says which versions of the library read it."""

Reader = Callable[[str, Any, str], Any]
"""``read(what, value, advice)`` validates and converts the value in a state; ``what`` names the entry in errors."""

T = TypeVar("T")


# -- readers -----------------------------------------------------------------------------------------------------------


def integer(least: float = -math.inf) -> Reader:
    """Read an int of at least ``least``."""
    return lambda what, value, advice: check_int(what, value, least, advice, ValueError)


def instance(kind: Any, must: str) -> Reader:
    """Read an instance of ``kind``; ``must`` describes it in errors."""

    def read(what: str, value: Any, advice: str) -> Any:
        if not isinstance(value, kind):
            raise ValueError(f"{what} is {brief(value)}; it must be {must}: {advice}")
        return value

    return read


string, true_or_false = instance(str, "a string"), instance(bool, "true or false")
anything = instance(object, "anything")


def optional(read: Reader) -> Reader:
    """Read a value that may be None."""
    return lambda what, value, advice: None if value is None else read(what, value, advice)


def list_of(read: Reader, must: str = "a list") -> Reader:
    """Read a list as a tuple."""
    is_list = instance(list | tuple, must)
    return lambda what, value, advice: tuple(read(what, item, advice) for item in is_list(what, value, advice))


def dict_of(kind: type[object]) -> Reader:
    """Read a nested dict as a dataclass of entries."""
    return lambda what, value, advice: from_state(kind, instance(Mapping, "a dict")(what, value, advice), advice, what)


# -- entries -----------------------------------------------------------------------------------------------------------


class _EntrySpec(NamedTuple):
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
    """Declare a dataclass field that is an entry of the state.

    Args:
        read: validates and converts the value in a dict.
        differs: message for values that differ, with ``{was}`` and ``{now}``; None: the entry is not compared.
        write: converts the value for the dict.
        name: name of the entry; None: that of the field.
        default: a value that is omitted from the dict.
    """
    return field(default=default, metadata={"entry": _EntrySpec(read, differs, write, name)})


_class_entries: dict[Any, list[tuple[str, str, object, _EntrySpec]]] = {}


def _entries(kind: Any) -> list[tuple[str, str, object, _EntrySpec]]:
    """Return name, field, default and `_EntrySpec` of each entry."""
    if kind not in _class_entries:
        specs = [(member, member.metadata["entry"]) for member in fields(kind) if "entry" in member.metadata]
        _class_entries[kind] = [(spec.name or member.name, member.name, member.default, spec) for member, spec in specs]
    return _class_entries[kind]


def to_state(position: object) -> dict[str, Any]:
    """Serialize the entries of a dataclass into a new dict.

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass
        ... class Place:
        ...     epoch: int = entry(integer(0), "the epoch was {was}, and is {now}")
        ...     ranks: int | None = entry(optional(integer(1)), default=None)
        >>> to_state(Place(3)), from_state(Place, {"epoch": 3}, "give a state"), differences(Place(3), Place(4))
        ({'epoch': 3}, Place(epoch=3, ranks=None), {'epoch': 'the epoch was 3, and is 4'})
        >>> from_state(Place, {"epoch": -1}, "give a state")
        Traceback (most recent call last):
        ValueError: the state's 'epoch' must be at least 0, got -1: give a state
    """
    state = {}
    for name, attribute, default, spec in _entries(type(position)):
        value = getattr(position, attribute)
        if value is not default and (default is None or default is MISSING or value != default):
            state[name] = value if spec.write is None else spec.write(value)
    return state


def from_state(kind: type[T], state: Mapping[str, object], advice: str, what: str = "the state") -> T:
    """Build a dataclass from the dict that `to_state` returned, ignoring unknown keys.

    A missing or invalid entry raises a ValueError that begins with ``what`` and ends with ``advice``.
    """
    values = {}
    for name, attribute, default, spec in _entries(kind):
        if name in state or default is MISSING:
            values[attribute] = read_entry(state, name, spec.read, advice, what)
    return kind(**values)


def read_entry(state: Mapping[str, object], name: str, read: Reader, advice: str, what: str = "the state") -> Any:
    """Read a single entry of a dict."""
    if name not in state:
        raise ValueError(f"{what} has no {name!r}: {advice}")
    return read(f"{what}'s {name!r}" if what == "the state" else f"{what} is wrong: its {name!r}", state[name], advice)


def differences(saved: T, now: T, **words: str) -> dict[str, str]:
    """Return a message for each compared entry whose value differs, by field name; ``words`` fill its other braces."""
    messages = {}
    for _, attribute, _, spec in _entries(type(saved)):
        was, is_now = getattr(saved, attribute), getattr(now, attribute)
        if spec.differs is not None and was != is_now:
            messages[attribute] = spec.differs.format(was=was, now=is_now, **words)
    return messages


def check_version(state: object, advice: str, unnumbered: int | None = None) -> None:
    """Raise a TypeError or ValueError unless ``state`` is a state that this version of the library can read.

    ``unnumbered`` is the version of states that lack the entry; with None, such a state is an error.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"the state is {brief(state)}, {an(type(state))}; it must be a dict: {advice}")
    if "version" not in state and unnumbered is None:
        raise ValueError(f"the state has no 'version', its keys are {brief(sorted(map(str, state)))}: {advice}")
    version = read_entry({"version": unnumbered, **state}, "version", integer(1), advice)
    if version > VERSION:
        text = f"the state is of version {brief(version)}, this sharded_loader reads up to version {VERSION}"
        raise ValueError(f"{text}: update sharded_loader, or begin with set_epoch({brief(state.get('epoch', '...'))})")
