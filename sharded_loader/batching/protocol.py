"""Common ground of all collate functions: the memory of a batch, the error, and the rule for overridden methods.

    assembler(fn)(samples, empty) -> batch      ``fn.assemble(samples, empty)``, or a user's own ``fn(samples)``

An `Empty` is the caller's allocator: ``empty(shape, dtype)`` returns an uninitialised, writable, C-contiguous array,
whose memory belongs to the caller. The library's functions receive it as an argument. A user's ``batchify_fn(samples)``
and ``get_batch(indices)`` cannot, so `sharded_loader.empty` calls it while they run in this thread. In ``__getitem__``
that is `numpy.empty`: a cache may keep a sample longer than the memory lives.

Samples that cannot be collated raise a `BatchifyError` (a ValueError), which names the field, shows the shapes and says
what to do. In a worker, an array from `empty` that ``batchify_fn`` keeps is overwritten by a later batch. Nothing here
imports torch.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import AsyncGeneratorType, CoroutineType
from typing import Any

import numpy as np

from sharded_loader.base.checks import fast_method, not_awaited
from sharded_loader.base.system import after_fork

Dtype = np.dtype[Any]

Array = np.ndarray[Any, Dtype]
"""A NumPy array of any shape and dtype."""

Samples = Sequence[Any]
"""Samples of a batch, or the values of one of their fields."""

Empty = Callable[[tuple[int, ...], Dtype], Array]
"""Allocator of a batch's memory: ``(shape, dtype) -> array``."""

Assemble = Callable[[Samples, Empty], Any]

# The parameter is Any, because users may annotate it as list where ours use Sequence.
BatchifyFn = Callable[[Any], Any]
"""Collate function: list of samples -> batch."""

new_array: Empty = np.empty
"""The default allocator: private memory of this process."""


class BatchifyError(ValueError):
    """Samples that cannot be collated. The message says what happened, in which field, and what to do.

    Args:
        problem: description, with shapes or positions of samples.
        advice: what to do about it.
        field: path of the field within a sample, such as ``[1]`` or ``['tokens']``; '' is the whole sample.

    Example:
        >>> print(BatchifyError("shapes differ: (2,), (3,)", "use Pad", "[0]"))
        shapes differ: (2,), (3,), in field [0]: use Pad
    """

    def __init__(self, problem: str, advice: str, field: str = "") -> None:
        super().__init__(problem, advice, field)
        self.problem, self.advice, self.field = problem, advice, field

    def within(self, label: str) -> BatchifyError:
        """Prepend the label of an enclosing field; return self."""
        self.field = label + self.field
        self.args = (self.problem, self.advice, self.field)
        return self

    def __str__(self) -> str:
        where = f", in field {self.field}" if self.field else ""
        return f"{self.problem}{where}: {self.advice}"


def assembler(fn: BatchifyFn) -> Assemble:
    """Return ``assemble(samples, empty) -> batch`` for any collate function. The batch may hold NumPy arrays."""
    if fast_method(type(fn), "assemble", ["__call__"]) is not None or "assemble" in getattr(fn, "__dict__", ()):
        return fn.assemble  # type: ignore[attr-defined, no-any-return]
    return partial(call_with_empty, fn)


def in_fields(
    names: Iterable[object], label: str, makes: Iterable[Assemble], columns: Iterable[Samples], empty: Empty
) -> list[Any]:
    """Collate each field of the samples; errors name the field with ``label``, such as ``"[{!r}]"`` or ``".{}"``.

    Example:
        >>> in_fields("ab", "[{!r}]", [lambda samples, empty: max(samples)] * 2, [(1, 2), (3, 4)], np.empty)
        [2, 4]
    """
    fields = []
    for name, make, column in zip(names, makes, columns, strict=False):
        try:
            fields.append(make(column, empty))
        except BatchifyError as error:
            raise error.within(label.format(name))  # noqa: B904 - the same exception, with the field
    return fields


def refuse_async(values: Samples, what: str) -> None:
    """Raise a TypeError if ``values`` (from ``what``) come from an ``async def``, which is not awaited there."""
    if values and type(values[0]) in ASYNC:
        for value in values:
            if type(value) is CoroutineType:
                value.close()  # otherwise Python warns that it was never awaited
        raise not_awaited(what, type(values[0]).__name__)


ASYNC = (CoroutineType, AsyncGeneratorType)


def check_not_empty(samples: Samples) -> None:
    """Reject an empty batch with a `BatchifyError`."""
    if len(samples) == 0:
        raise BatchifyError("a batch of no samples", "leave empty batches (and empty shards) out of the sampler")


def elide(items: Sequence[object], limit: int = 5) -> str:
    """List the first items for an error message.

    Example:
        >>> elide([(1,), (2,)])
        '(1,), (2,)'
    """
    return ", ".join(map(str, items[:limit])) + (f", ... ({len(items)} in all)" if len(items) > limit else "")


def ragged(shapes: Sequence[tuple[int, ...]], why: str = "", advice: str = "") -> BatchifyError:
    """Return the error for samples of different shapes. It shows each shape once, with a sample that has it.

    Example:
        >>> ragged([(1,), (2,), (1,)]).problem.split(": ")[1]
        '(1,) (sample 0 of the batch), (2,) (sample 1 of the batch)'
    """
    first_with: dict[tuple[int, ...], int] = {}
    for position, shape in enumerate(shapes):
        first_with.setdefault(tuple(shape), position)
    shown = elide([f"{shape} (sample {position} of the batch)" for shape, position in first_with.items()])
    return BatchifyError(
        f"samples of different shapes cannot be stacked: {shown}{why}",
        advice or "make them equal, pad them with sharded_loader.batchify.Pad, or leave them apart with List",
    )


# -- memory of the current batch ---------------------------------------------------------------------------------------


class _Current(threading.local):
    allocator: Empty = np.empty


_current = _Current()


@after_fork
def _reset_allocator() -> None:
    """In a forked child, forget the batch that the parent's thread was collating."""
    _current.allocator = np.empty


def empty(shape: int | Iterable[int], dtype: Any = np.float64) -> Array:
    """Like `numpy.empty`; in ``batchify_fn`` and ``get_batch``, memory of the current batch.

    This saves a worker process the copy into shared memory. Return the array as the batch or a part of it, and keep no
    reference: in a worker its memory is reused once the batch has been sent.

    Args:
        shape: shape of the array.
        dtype: anything that NumPy accepts as a dtype.

    Returns:
        An uninitialised, writable, C-contiguous array. Outside a loader, or if the batch's memory is full, it is
        `numpy.empty`'s.

    Raises:
        TypeError: the shape contains non-integers, or NumPy does not know the dtype.
        ValueError: a dimension is negative.

    Example:
        >>> from sharded_loader import ShardedDataLoader
        >>> def batchify(samples):
        ...     batch = empty((len(samples), 2), np.float32)
        ...     for row, sample in zip(batch, samples):
        ...         row[:] = sample
        ...     return batch
        >>> next(iter(ShardedDataLoader([1, 2], 2, batchify_fn=batchify)))
        tensor([[1., 1.],
                [2., 2.]])
    """
    dims = tuple(map(operator.index, shape)) if isinstance(shape, Iterable) else (operator.index(shape),)
    dtype = np.dtype(dtype)
    # numpy.empty rejects negative dimensions, and knows the width of a string dtype without one.
    allocator = _current.allocator if dtype.itemsize and math.prod(dims) > 0 else np.empty
    return allocator(dims, dtype)


def call_with_empty(fn: Callable[[Any], object], argument: object, allocator: Empty) -> Any:
    """Call ``fn(argument)`` with ``allocator`` behind `empty` in this thread.

    Example:
        >>> call_with_empty(lambda size: empty(size, "i4"), 2, np.zeros)
        array([0, 0], dtype=int32)
    """
    before = _current.allocator
    try:
        _current.allocator = allocator
        return fn(argument)
    finally:
        _current.allocator = before
