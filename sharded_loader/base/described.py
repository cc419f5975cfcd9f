"""Short descriptions of objects for reprs, messages and tables.

    class SplitSampler(Described): shown = (("num_parts", "_parts"), ...)    -> SplitSampler(length=2, num_parts=3)
    call_of(pool, [2], timeout=(30.0, None))                                 -> ThreadPool(2, timeout=30.0)

A repr must not raise: an attribute that cannot be read (for example, because a subclass did not call the constructor)
is shown as ``?``.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

SHOWN_WHOLE, SHOWN_FIRST = 6, 3  # items; a longer list is shown as its first 3 and its length

_limits = reprlib.Repr()
_limits.maxstring = _limits.maxother = _limits.maxlong = 60


class Described:
    """Mixin with a repr: the class name, its length, the arguments that determine its order, and its seed.

    Attributes:
        decided_by: pairs of a name, used by the repr and by saved states, and the attribute (a number or an array).
        shown: pairs for the repr, if they differ from ``decided_by``.
    """

    decided_by: ClassVar[tuple[tuple[str, str], ...]] = ()
    shown: ClassVar[tuple[tuple[str, str], ...]] = ()

    def __repr__(self) -> str:
        kind = type(self)
        parts = [self._brief("inner")] if hasattr(kind, "inner") else []
        if hasattr(kind, "__len__"):
            parts.append(f"length={self._brief('_shown_length')}")
        parts += [f"{name}={self._brief(attribute)}" for name, attribute in self._shown()]
        if (seed := self._brief("_shown_seed")) != "None":
            parts.append(f"seed={seed}")
        return f"{kind.__name__}({', '.join(parts)})"

    def _shown(self) -> Iterable[tuple[str, str]]:
        """Return the (name, attribute) pairs to display."""
        return type(self).shown or type(self).decided_by

    def _brief(self, attribute: str) -> str:
        try:
            return brief(getattr(self, attribute))
        except Exception:  # a repr must not raise
            return "?"

    @property
    def _shown_length(self) -> int:
        return len(self)  # type: ignore[arg-type]

    @property
    def _shown_seed(self) -> Any:
        return getattr(self, "seed", None)


def call_of(value: object, first: Iterable[object] = (), **options: tuple[object, object]) -> str:
    """Format the constructor call of an object: ``first``, then the ``options`` (value, default) that differ.

    Example:
        >>> call_of(range(3), [3], step=(1, 1), start=(7, 0))
        'range(3, start=7)'
    """
    changed = [
        f"{name}={brief(given)}" for name, (given, usual) in options.items() if given is not usual and given != usual
    ]
    return f"{type(value).__name__}({', '.join([*map(brief, first), *changed])})"


def brief(value: Any) -> str:
    """Describe a value in a few words, whatever its size.

    Example:
        >>> brief(np.arange(1_000_000)), brief([5, 9]), brief({1: 2})
        ('[0, 1, 2, ... 1000000 in all]', '[5, 9]', '<dict of length 1>')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _limits.repr(value)
    if str(getattr(type(value).__repr__, "__module__", "")).startswith("sharded_loader."):
        return repr(value)  # short, as it is one of ours
    if (isinstance(value, np.ndarray) and value.ndim) or type(value) in (list, tuple, range):
        return f"[{', '.join(briefs(value))}]"
    if isinstance(getattr(value, "__qualname__", None), str):  # a function or a class
        return f"<{value.__qualname__}>"
    package = type(value).__module__.partition(".")[0]
    name = type(value).__name__ if package == "builtins" else f"{package}.{type(value).__name__}"
    try:
        return f"<{name} of length {len(value)}>"
    except Exception:
        return f"<{name}>"


def briefs(values: Any) -> list[str]:
    """Describe the items of a sequence with `brief`; of a long one only the first items and the length.

    Example:
        >>> briefs([1, "a"]), briefs(range(100))
        (['1', "'a'"], ['0', '1', '2', '... 100 in all'])
    """
    if len(values) <= SHOWN_WHOLE:
        return [brief(value) for value in values]
    return [*map(brief, values[:SHOWN_FIRST]), f"... {len(values)} in all"]


def an(kind: type | str) -> str:
    """Return the name of a class with its article.

    Example:
        >>> an(list), an("IterableDataset")
        ('a list', 'an IterableDataset')
    """
    name = kind if isinstance(kind, str) else kind.__name__
    sound = name.lstrip("_").lower()
    return f"{'an' if sound[:1] in set('aeio') and not sound.startswith('one') else 'a'} {name}"
