"""What all functions that make batches share: the allocator, the error, and the rule about overrides.

    assemble(fn, samples, empty) -> batch      ``fn.assemble(samples, empty)``, or a user's own ``fn(samples)``

An `Empty` is the caller's allocator: ``empty(shape, dtype)`` returns a writable C-contiguous array, uninitialised. Its
memory belongs to the caller.

What can go wrong: samples that cannot become a batch raise a `BatchifyError`, which is a ValueError. It names the field
within the sample, shows the shapes and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.allocation import current_empty

Array = np.ndarray[Any, np.dtype[Any]]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], Array]
Assemble = Callable[[Sequence[Any], Empty], Any]
# The parameter is Any, because a user's function may say list where ours say Sequence.
BatchifyFn = Callable[[Any], Any]

new_array: Empty = np.empty
"""The plain allocator: memory of this process."""


class BatchifyError(ValueError):
    """Samples that cannot become one batch. The message: what happened, in which field, what to do.

    Args:
        problem: what is wrong, with shapes or positions of samples.
        advice: what to do about it.
        field: path of the field within a sample, such as ``[1]`` or ``['tokens']``; '' is the whole sample.

    Example:
        >>> print(BatchifyError("shapes differ: (2,), (3,)", "use Pad", "[0]"))
        shapes differ: (2,), (3,), in field [0]: use Pad
    """

    def __init__(self, problem: str, advice: str, field: str = "") -> None:
        super().__init__(problem, advice, field)
        self.problem = problem
        self.advice = advice
        self.field = field

    def within(self, label: str) -> BatchifyError:
        """Say that the field lies inside another one; returns itself."""
        self.field = label + self.field
        self.args = (self.problem, self.advice, self.field)
        return self

    def __str__(self) -> str:
        where = f", in field {self.field}" if self.field else ""
        return f"{self.problem}{where}: {self.advice}"


def known_to(kind: type, fast: str, plain: Sequence[str]) -> Any:
    """A class's fast method, if no more derived class overrides one of the plain methods that it stands for.

    A class that overrides ``__getitem__`` changes the samples, and the bulk method of a base class does not know that.
    So there is one rule everywhere: a fast method is used only if the class that defines it is the class that defines
    the plain method, or a more derived class. The rule holds for bulk methods of datasets, and for ``assemble`` and
    ``__call__`` of batchify functions.

    Args:
        kind: the class.
        fast: name of the method that is faster.
        plain: names of the methods whose work it does.

    Returns:
        What the class has under the name ``fast``; None if there is nothing, or an override is not known to it.

    Example:
        >>> class Base:
        ...     def one(self): ...
        ...     def many(self): ...
        >>> class Derived(Base):
        ...     def one(self): ...
        >>> known_to(Base, "many", ["one"]) is Base.many, known_to(Derived, "many", ["one"])
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


def assemble(fn: BatchifyFn, samples: Sequence[Any], empty: Empty) -> Any:
    """Make a batch with ``fn``, in memory from ``empty`` where ``fn`` knows how, or calls `sharded_loader.empty`.

    Args:
        fn: a function of this library, or any function of a list of samples.
        samples: the samples of one batch.
        empty: gives the memory.

    Returns:
        The batch; arrays may be NumPy arrays (`sharded_loader.batching.tree.to_torch` makes them tensors).

    Example:
        >>> assemble(lambda samples: len(samples), [1, 2], np.empty)
        2
    """
    if known_to(type(fn), "assemble", ["__call__"]) is not None or "assemble" in getattr(fn, "__dict__", ()):
        return fn.assemble(samples, empty)  # type: ignore[attr-defined]
    with current_empty(empty):
        return fn(samples)


def in_field(label: str, make: Assemble, samples: Sequence[Any], empty: Empty) -> Any:
    """``make(samples, empty)`` for one field of the samples. An error says that it lies there.

    Example:
        >>> in_field("[0]", lambda samples, empty: len(samples), [1, 2], np.empty)
        2
    """
    try:
        return make(samples, empty)
    except BatchifyError as error:
        raise error.within(label)  # noqa: B904 - the same exception, which now knows more


def check_not_empty(samples: Sequence[Any]) -> None:
    """Reject an empty batch with a `BatchifyError`.

    Example:
        >>> check_not_empty([1])
    """
    if len(samples) == 0:
        raise BatchifyError("a batch of no samples", "leave empty batches (and empty shards) out of the sampler")


def some(items: Sequence[Any], limit: int = 5) -> str:
    """A few of many for an error message.

    Example:
        >>> some([(1,), (2,)])
        '(1,), (2,)'
    """
    return ", ".join(map(str, items[:limit])) + (f", ... ({len(items)} in all)" if len(items) > limit else "")


def ragged(shapes: Sequence[tuple[int, ...]], why: str = "", advice: str = "") -> BatchifyError:
    """The error for samples of different shapes. It shows each shape once, with a sample that has it.

    Example:
        >>> ragged([(1,), (2,), (1,)], advice="use Pad")
        BatchifyError('samples of different shapes cannot be stacked: (1,) (sample 0), (2,) (sample 1)', 'use Pad', '')
    """
    first_with: dict[tuple[int, ...], int] = {}
    for position, shape in enumerate(shapes):
        first_with.setdefault(tuple(shape), position)
    shown = some([f"{shape} (sample {position})" for shape, position in first_with.items()])
    return BatchifyError(
        f"samples of different shapes cannot be stacked: {shown}{why}",
        advice or "make them equal, pad them with sharded_loader.batchify.Pad, or leave them apart with List",
    )
