"""Environment variables that hold numbers.

    integer("LOCAL_WORLD_SIZE", 1, least=1, advice="...") -> int

What can go wrong: a value that is not an integer, or too small. The error names the variable.
"""

from __future__ import annotations

import os
from collections.abc import Mapping


def integer(name: str, default: int, *, least: int, advice: str, environ: Mapping[str, str] = os.environ) -> int:
    """The number that an environment variable holds.

    Args:
        name: of the variable.
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
    text = environ.get(name, "").strip()
    try:
        number = int(text) if text else default
        if number < least:
            raise ValueError
    except ValueError:
        given = environ.get(name)
        raise ValueError(
            f"the environment variable {name} is {given!r}; it must be an integer of at least {least}: {advice}"
        ) from None
    return number


ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Variables that numerical libraries read once, when they are loaded: a worker process wants one thread of each."""
