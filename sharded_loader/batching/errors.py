"""What batchify functions share: the allocator they are given, and the error they raise.

An `Empty` is the caller's allocator: ``empty(shape, dtype)`` returns a writable C-contiguous array, uninitialised.
`BatchifyError` is the one error for samples that cannot become a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Empty = Callable[[tuple[int, ...], np.dtype[Any]], Array]


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


def new_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """The plain allocator: uninitialised memory of this process.

    Example:
        >>> new_array((2, 3), np.dtype("int8")).shape
        (2, 3)
    """
    return np.empty(shape, dtype)


def check_not_empty(samples: Sequence[Any]) -> None:
    """Refuse an empty batch.

    Raises:
        BatchifyError: there are no samples.

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


def raise_ragged(shapes: Sequence[tuple[int, ...]]) -> NoReturn:
    """Raise the error for samples of different shapes; shows each shape once, with a sample that has it."""
    first_with: dict[tuple[int, ...], int] = {}
    for position, shape in enumerate(shapes):
        first_with.setdefault(tuple(shape), position)
    shown = some([f"{shape} (sample {position})" for shape, position in first_with.items()])
    raise BatchifyError(
        f"samples of different shapes cannot be stacked: {shown}",
        "make them equal, pad them with sharded_loader.batchify.Pad, or leave them apart with List",
    )
