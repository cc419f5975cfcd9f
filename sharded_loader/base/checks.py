"""Checks of what users pass: arguments, returned or rejected with advice, and classes that override methods."""

from __future__ import annotations

import difflib
import inspect
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np

from sharded_loader.base.described import brief

CLOSE = 0.72
"""Minimum similarity for suggesting an argument: shm_size and batch_size have 0.67, data and dataset 0.73."""

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}


def refuse_async_iterable(dataset: object) -> None:
    """Reject data that has only ``__aiter__``: it could only be read sequentially, one sample at a time."""
    if hasattr(type(dataset), "__aiter__") and not any(hasattr(type(dataset), n) for n in ("__getitem__", "__iter__")):
        raise TypeError(
            f"the dataset, {type(dataset).__name__}, is an async iterable (__aiter__), which the loader does not read: "
            f"write __len__ and async def __getitem__(self, index), which is awaited for all samples of a batch, or an "
            f"ordinary __iter__ that reads it with an event loop of its own"
        )


def check_int(name: str, value: Any, least: float, advice: str, wrong_type: type[Exception] = TypeError) -> int:
    """Return ``value`` as an int of at least ``least``, or raise an error that names the argument."""
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
    """Parse a number of bytes, given as a number or as text. The last three arguments serve the check and its message.

    Example:
        >>> bytes_of_text("1.5 GB"), bytes_of_text("2KiB"), bytes_of_text(7)
        (1500000000, 2048, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    unit = _UNITS.get(match[2].upper()) if match else None
    is_fraction = match is not None and unit == 1 and not float(match[1]).is_integer()
    if match is None or unit is None or is_fraction or isinstance(text, bool) or float(match[1]) * unit < least:
        raise ValueError(f"{name} is {text!r}: give {allowed}, or a text such as '100 GB' or '20 GiB'")
    return int(float(match[1]) * unit)


def check_function(name: str, given: object, kind: str, required: bool = False) -> None:
    """Raise a TypeError unless ``given`` is a function, described by ``kind``, that is not async; or not required.

    Example:
        >>> async def halve(sample): return sample / 2
        >>> check_function("filter(fn)", halve, "of a sample")
        Traceback (most recent call last):
        TypeError: filter(fn) is async: it gives coroutine objects, and the loader does not await them there. ...
    """
    if not callable(given) and (required or given is not None):
        raise TypeError(f"{name} is {brief(given)}; it must be a function {kind}")
    if is_async(given):
        raise not_awaited(name, "coroutine")


def is_async(function: object) -> bool:
    """Return True for an ``async def``, and for an object whose ``__call__`` is one."""
    return any(map(inspect.iscoroutinefunction, (function, type(function).__call__ if callable(function) else None)))


def not_awaited(name: str, given: str) -> TypeError:
    """Return the error about a function that gives objects of the type ``given``."""
    return TypeError(
        f"{name} is async: it gives {given} objects, and the loader does not await them there. Write it with def "
        f"instead of async def. Awaited are an async def __getitem__ or __getitems__, and one for dataset.transform()"
    )


def refuse_class(name: str, given: object) -> None:
    """Raise a TypeError if ``given`` is a class where an instance is expected.

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
    """Raise a TypeError that lists all unknown arguments of a call, each with the argument that was probably meant.

    ``instead`` holds advice for arguments that other libraries have; ``also`` lists names accepted through ``**``.

    Example:
        >>> refuse_arguments("max", ["keys"], lambda values, key=None: None)
        Traceback (most recent call last):
        ...
        TypeError: max has no argument 'keys'; did you mean 'key'?
    """
    if not unknown:
        return
    known = [*inspect.signature(function).parameters, *also, *instead]

    def suggest(arg: str) -> str:
        if arg in instead:
            return f"{arg!r}: {instead[arg]}"
        close = difflib.get_close_matches(arg, known, 1, CLOSE)
        if not close:
            return f"{arg!r}; see help({name}) for those it has"
        return f"{arg!r}; did you mean {close[0]!r}?" + (f" Here {instead[close[0]]}" if close[0] in instead else "")

    first, *others = map(suggest, unknown)
    if not others:
        raise TypeError(f"{name} has no argument {first}")
    raise TypeError("\n  ".join([f"{name} has none of these {1 + len(others)} arguments:", first, *others]))


def check_choice(name: str, value: object, known: Sequence[str], owner: str) -> str:
    """Return ``value`` if it is one of the ``known`` texts; otherwise raise a ValueError that lists them."""
    if not isinstance(value, str) or value not in known:
        advice = f"{', '.join(map(repr, known[:-1]))} or {known[-1]!r}"
        raise ValueError(f"{name} is {value!r}, which {owner} does not know: choose {advice}")
    return str(value)


def fast_method(kind: type, fast: str, plain: Sequence[str]) -> Any:
    """Return a class's fast method, or None if a subclass overrides one of the plain methods that it replaces.

    A subclass that overrides ``__getitem__`` changes the samples, of which a base class's bulk method does not know. So
    a fast method counts only if the class that defines it also defines the plain method, or is more derived. The rule
    holds for bulk methods of datasets, and for ``assemble`` and ``__call__`` of batchify functions.

    Example:
        >>> class Base:
        ...     def one(self): ...
        ...     def many(self): ...
        >>> class Derived(Base):
        ...     def one(self): ...
        >>> fast_method(Base, "many", ["one"]) is Base.many, fast_method(Derived, "many", ["one"])
        (True, None)
    """
    for cls in kind.__mro__:
        own = vars(cls)
        if fast in own:
            return own[fast]
        for name in plain:
            if name in own:
                return None
    return None
