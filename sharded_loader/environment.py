"""Environment variables that hold numbers, and those that switch something on.

    integer("LOCAL_WORLD_SIZE", 1, least=1, advice="...") -> int
    is_on("SHARDED_LOADER_PORTABLE") -> bool

What can go wrong: a value that is not an integer, or too small. The error names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def integer(name: str, default: int, *, least: int, advice: str, environ: Mapping[str, str] = os.environ) -> int:
    """The number that an environment variable holds.

    Args:
        name: name of the variable.
        default: what an unset or empty variable means.
        least: the smallest number allowed.
        advice: what to do instead; the end of the error message.
        environ: where to look.

    Raises:
        ValueError: the variable holds something else.

    Example:
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "3"})
        3
        >>> integer("RANK", 0, least=0, advice="unset it", environ={"RANK": "abc"})
        Traceback (most recent call last):
        ...
        ValueError: the environment variable RANK is 'abc'; it must be an integer of at least 0: unset it
    """
    given = environ.get(name)
    try:
        number = int((given or "").strip() or default)
        if number >= least:
            return number
    except ValueError:
        pass
    raise ValueError(
        f"the environment variable {name} is {given!r}; it must be an integer of at least {least}: {advice}"
    )


def is_on(name: str, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether an environment variable switches something on: it is set, and neither empty nor 0.

    Example:
        >>> [is_on("X", environ) for environ in ({}, {"X": ""}, {"X": "0"}, {"X": "1"})]
        [False, False, False, True]
    """
    return environ.get(name, "").strip() not in ("", "0")
