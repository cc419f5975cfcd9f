"""What the repr of a sampler or a bucket scheme says.

    repr(sampler) -> its class, its inner sampler, its length, what decides the order, its seed

Looking reads attributes and lengths. It starts no epoch, draws no seed, and prints no long array. What can go wrong: a
subclass of a user's with broken attributes; what cannot be read is shown as ``?``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

SHOWN_WHOLE = 6
"""Arrays and lists up to this length are shown whole."""

SHOWN_FIRST = 3
"""Of longer ones the first few are shown, and the length."""

_limits = reprlib.Repr()
_limits.maxstring = _limits.maxother = _limits.maxlong = 60


class Described:
    """Gives a class a repr: its name, its length, and the attributes that decide what it does.

    Attributes:
        decided_by: what decides the order beside seed and length: what a state calls it, and the attribute, a number
            or an array.
        shown: what the repr shows instead, in the same form. None: ``decided_by``.

    Example:
        >>> class Band(Described):
        ...     decided_by = (("width", "_width"), ("edges", "_edges"))
        ...     def __init__(self): self._width, self._edges = 3, range(100)
        >>> Band()
        Band(width=3, edges=[0, 1, 2, ... 100 in all])
    """

    decided_by: ClassVar[tuple[tuple[str, str], ...]] = ()
    shown: ClassVar[tuple[tuple[str, str], ...] | None] = None

    @reprlib.recursive_repr()
    def __repr__(self) -> str:
        """The class, the inner sampler, the length, what decides the order, and the seed."""
        kind = type(self)
        parts = []
        if hasattr(kind, "inner"):
            parts.append(_or_unknown(lambda: brief(self.inner)))  # type: ignore[attr-defined]
        if hasattr(kind, "__len__"):
            parts.append(_or_unknown(lambda: f"length={len(self)}", "length=?"))  # type: ignore[arg-type]
        for name, attribute in kind.decided_by if kind.shown is None else kind.shown:
            parts.append(f"{name}={_or_unknown(partial(self._brief_attribute, attribute))}")
        if (seed := _or_unknown(lambda: brief(self._shown_seed()))) != "None":
            parts.append(f"seed={seed}")
        return f"{kind.__name__}({', '.join(parts)})"

    def _brief_attribute(self, attribute: str) -> str:
        return brief(getattr(self, attribute))

    def _shown_seed(self) -> Any:
        """The seed that decides what this yields; None if none does."""
        return getattr(self, "seed", None)


def _or_unknown(look: Callable[[], str], unknown: str = "?") -> str:
    """What is found, unless it cannot be told: a repr must not raise."""
    try:
        return look()
    except Exception:
        return unknown


def brief(value: Any) -> str:
    """A few words that tell a value, however large it is.

    Args:
        value: a number, a text, an array, a list, a sampler, or anything else.

    Example:
        >>> brief(np.arange(1_000_000)), brief([5, 9]), brief({1: 2})
        ('[0, 1, 2, ... 1000000 in all]', '[5, 9]', '<dict of length 1>')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _limits.repr(value)
    if isinstance(value, Described):
        return repr(value)
    if (isinstance(value, np.ndarray) and value.ndim) or type(value) in (list, tuple, range):
        first = [brief(one) for one in value[: SHOWN_WHOLE if len(value) <= SHOWN_WHOLE else SHOWN_FIRST]]
        if len(value) > SHOWN_WHOLE:
            first.append(f"... {len(value)} in all")
        return f"[{', '.join(first)}]"
    package = type(value).__module__.partition(".")[0]
    name = type(value).__name__ if package == "builtins" else f"{package}.{type(value).__name__}"
    return _or_unknown(lambda: f"<{name} of length {len(value)}>", f"<{name}>")
