"""Checks what users pass: each function returns the value, or raises an error that says what to pass instead.

check_int("batch_size", 2.5, 1, advice)      -> an int of at least 1
bytes_of_text("100 GB")                      -> 100_000_000_000
check_choice("long", "trim", known, owner)   -> one of the known texts
refuse_class("the dataset", list)            an error: the class stands in the place of an object
refuse_arguments(name, unknown, function)    an error: the function has no such arguments
"""

from __future__ import annotations

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

CLOSE = 0.72
"""From which similarity on an argument is suggested: shm_size and batch_size have 0.67, data and dataset 0.73."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def refuse_async_iterable(dataset: object) -> None:
    """Reject data that has only ``__aiter__``: it would have to be read in one order, one sample after the other."""
    if hasattr(type(dataset), "__aiter__") and not any(hasattr(type(dataset), n) for n in ("__getitem__", "__iter__")):
        raise TypeError(
            f"the dataset, {type(dataset).__name__}, is an async iterable (__aiter__), which the loader does not read: "
            f"write __len__ and async def __getitem__(self, index), which is awaited for all samples of a batch, or an "
            f"ordinary __iter__ that reads it with an event loop of its own"
        )


def check_int(name: str, value: Any, least: float, advice: str, wrong_type: type[Exception] = TypeError) -> int:
    """``value`` as an int that is at least ``least``; otherwise an error that names the argument."""
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise wrong_type(f"{name} must be an integer, got {value!r} of type {type(value).__name__}: {advice}") from None
    if number < least:
        raise ValueError(f"{name} must be at least {least}, got {number}: {advice}")
    return number


def bytes_of_text(
    text: object, least: int = 1, allowed: str = "a number of bytes above 0", name: str = "max_bytes"
) -> int:
    """A number of bytes, from a number or a text.

    Args:
        text: as the user gave it.
        least: the smallest number that is allowed.
        allowed: what the user may give, for the message.
        name: of the argument, for the message.

    Example:
        >>> bytes_of_text("1.5 GB"), bytes_of_text("2KiB"), bytes_of_text(7)
        (1500000000, 2048, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    is_part = match is not None and unit == 1 and not float(match[1]).is_integer()  # 0.5 is no share
    if match is None or unit is None or is_part or isinstance(text, bool) or float(match[1]) * unit < least:
        raise ValueError(f"{name} is {text!r}: give {allowed}, or a text such as '100 GB' or '20 GiB'")
    return int(float(match[1]) * unit)


def refuse_class(name: str, given: object) -> None:
    """A TypeError if a class stands where an object of it belongs.

    Example:
        >>> refuse_class("the dataset", list)
        Traceback (most recent call last):
        TypeError: the dataset is the class list itself: give an object of it, list(...)
    """
    if isinstance(given, type):
        raise TypeError(f"{name} is the class {given.__name__} itself: give an object of it, {given.__name__}(...)")


def refuse_arguments(
    name: str,
    unknown: Iterable[str],
    function: Callable[..., object],
    instead: Mapping[str, str] = MappingProxyType({}),
    also: Iterable[str] = (),
) -> None:
    """Reject arguments that a function does not have: all at once, each with the name that it may mean.

    Args:
        name: of the function, or of the class.
        unknown: the arguments that it does not have.
        function: has the others.
        instead: by the name of an argument of other libraries, what to do about it here.
        also: names that the function takes by ``**``.

    Raises:
        TypeError: there are some.

    Example:
        >>> refuse_arguments("max", ["keys"], lambda values, key=None: None)
        Traceback (most recent call last):
        ...
        TypeError: max has no argument 'keys'; did you mean 'key'?
    """
    if not unknown:
        return
    known = [*inspect.signature(function).parameters, *also, *instead]

    def advice(one: str) -> str:
        if one in instead:
            return f"{one!r}: {instead[one]}"
        close = difflib.get_close_matches(one, known, 1, CLOSE)
        if not close:
            return f"{one!r}; see help({name}) for those it has"
        return f"{one!r}; did you mean {close[0]!r}?" + (f" Here {instead[close[0]]}" if close[0] in instead else "")

    first, *others = map(advice, unknown)
    if not others:
        raise TypeError(f"{name} has no argument {first}")
    raise TypeError("\n  ".join([f"{name} has none of these {1 + len(others)} arguments:", first, *others]))


def check_choice(name: str, value: object, known: Sequence[str], owner: str) -> str:
    """One of the texts that an argument may have; otherwise a ValueError that lists them."""
    if value not in known:
        advice = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ValueError(f"{name} is {value!r}, which {owner} does not know: choose {advice}")
    return str(value)
