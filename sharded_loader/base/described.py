"""What objects of this library say of themselves: one short line with the arguments that made them.

    class SplitSampler(Described): shown = (("num_parts", "_parts"), ...)    -> SplitSampler(length=2, num_parts=3)
    call_of(pool, [2], timeout=(30.0, None))                                 -> ThreadPool(2, timeout=30.0)
    brief(value)                                                             -> a few words, however large it is
    an(type(1))                                  -> "an int"

Nothing is kept, and nothing is computed or drawn. What can go wrong: an attribute that cannot be read, because a
subclass never called the constructor, for example. It is shown as ``?``: a repr must not raise.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any, ClassVar

import numpy as np

SHOWN_WHOLE, SHOWN_FIRST = 6, 3  # items: a list of up to 6 is shown whole, a longer one as its first 3 and its length

_limits = reprlib.Repr()
_limits.maxstring = _limits.maxother = _limits.maxlong = 60


class Described:
    """Gives a class a repr: its name, its length, and what decides its order beside seed and length.

    Attributes:
        decided_by: what a state calls it, and the attribute, a number or an array.
        shown: what the repr shows instead, in the same form. Empty: ``decided_by``.
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
        """Names and attributes, in the form of `decided_by`."""
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
    """The call that makes an object like this one, without the options that have their usual values.

    Args:
        value: The object. Its class is called.
        first: The arguments that are always shown, without names.
        options: For each other argument, its value and its usual value.

    Example:
        >>> call_of(range(3), [3], step=(1, 1), start=(7, 0))
        'range(3, start=7)'
    """
    given = [
        f"{name}={brief(found)}" for name, (found, usual) in options.items() if found is not usual and found != usual
    ]
    return f"{type(value).__name__}({', '.join([*map(brief, first), *given])})"


def brief(value: Any) -> str:
    """A few words that tell a value, however large it is.

    Example:
        >>> brief(np.arange(1_000_000)), brief([5, 9]), brief({1: 2})
        ('[0, 1, 2, ... 1000000 in all]', '[5, 9]', '<dict of length 1>')
    """
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return _limits.repr(value)
    if str(getattr(type(value).__repr__, "__module__", "")).startswith("sharded_loader."):
        return repr(value)  # of this library: it is short
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
    """What `brief` says of each item of a sequence; of a long one of the first few, and the length.

    Example:
        >>> briefs([1, "a"]), briefs(range(100))
        (['1', "'a'"], ['0', '1', '2', '... 100 in all'])
    """
    if len(values) <= SHOWN_WHOLE:
        return [brief(one) for one in values]
    return [*map(brief, values[:SHOWN_FIRST]), f"... {len(values)} in all"]


def an(kind: type | str) -> str:
    """The name of a class with its article, for a message.

    Example:
        >>> an(list), an("IterableDataset")
        ('a list', 'an IterableDataset')
    """
    name = kind if isinstance(kind, str) else kind.__name__
    sound = name.lstrip("_").lower()
    return f"{'an' if sound[:1] in set('aeio') and not sound.startswith('one') else 'a'} {name}"
