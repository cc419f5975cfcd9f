"""What all functions that make batches share: the memory of a batch, the error, and the rule about overrides.

    assembler(fn)(samples, empty) -> batch      ``fn.assemble(samples, empty)``, or a user's own ``fn(samples)``

An `Empty` is the caller's allocator: ``empty(shape, dtype)`` returns a writable C-contiguous array, uninitialised. Its
memory belongs to the caller. Our own functions get it as an argument. A user's ``batchify_fn(samples)`` and
``get_batch(indices)`` have no such argument, so `sharded_loader.empty` is the allocator while they run in this thread.
In a sample's ``__getitem__`` it is `numpy.empty`: a cache may keep a sample longer than the memory lives.

What can go wrong: samples that cannot become a batch raise a `BatchifyError`, which is a ValueError. It names the field
within the sample, shows the shapes and says what to do. An array from `empty` that ``batchify_fn`` keeps for itself in
a worker process is overwritten by a later batch. Nothing here imports torch.
"""

from __future__ import annotations

import math
import operator
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import AsyncGeneratorType, CoroutineType
from typing import Any

import numpy as np

Dtype = np.dtype[Any]

Array = np.ndarray[Any, Dtype]
"""A NumPy array of any shape and dtype."""

Samples = Sequence[Any]
"""The samples of a batch, or the values of one of their fields."""

Empty = Callable[[tuple[int, ...], Dtype], Array]
"""A function ``(shape, dtype) -> array`` that gives the memory of a batch."""

Assemble = Callable[[Samples, Empty], Any]

# The parameter is Any, because a user's function may say list where ours say Sequence.
BatchifyFn = Callable[[Any], Any]
"""A collate function: list of samples -> batch."""

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
        self.problem, self.advice, self.field = problem, advice, field

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


def assembler(fn: BatchifyFn) -> Assemble:
    """How to make a batch with ``fn`` in memory that the caller gives.

    Args:
        fn: a function of this library, or any function of a list of samples.

    Returns:
        ``assemble(samples, empty) -> batch``. Arrays may be NumPy arrays (`sharded_loader.batching.tree.to_torch` makes
        them tensors).

    Example:
        >>> assembler(lambda samples: len(samples))([1, 2], np.empty)
        2
    """
    if known_to(type(fn), "assemble", ["__call__"]) is not None or "assemble" in getattr(fn, "__dict__", ()):
        return fn.assemble  # type: ignore[attr-defined, no-any-return]
    return partial(call_with_empty, fn)


def in_fields(
    names: Iterable[object], label: str, makes: Iterable[Assemble], columns: Iterable[Samples], empty: Empty
) -> list[Any]:
    """A batch for each field of the samples. An error says in which field it lies.

    Args:
        names: of the fields.
        label: how errors show a name: ``"[{!r}]"`` or ``".{}"``.
        makes: the function of each field.
        columns: the samples of each field.
        empty: gives the memory.

    Example:
        >>> in_fields("ab", "[{!r}]", [lambda samples, empty: max(samples)] * 2, [(1, 2), (3, 4)], np.empty)
        [2, 4]
    """
    fields = []
    for name, make, column in zip(names, makes, columns, strict=False):
        try:
            fields.append(make(column, empty))
        except BatchifyError as error:
            raise error.within(label.format(name))  # noqa: B904 - the same exception, which now knows more
    return fields


def refuse_async(values: Samples, what: str) -> None:
    """Reject what an ``async def`` returns with a TypeError, where the loader does not await it.

    Args:
        values: samples or batches, of which the first one is looked at.
        what: where they are from.

    Example:
        >>> refuse_async([1, 2], "dataset[index]")
    """
    if values and type(values[0]) in ASYNC:
        for one in values:
            if type(one) is CoroutineType:
                one.close()  # or Python warns of each that it was never awaited
        raise TypeError(
            f"{what} is async: it gives {type(values[0]).__name__} objects, and the loader does not await them there. "
            f"Write it with def instead of async def. Only __getitem__, __getitems__ and functions of "
            f"dataset.transform() are awaited, where they are written as an async def"
        )


ASYNC = (CoroutineType, AsyncGeneratorType)


def check_not_empty(samples: Samples) -> None:
    """Reject an empty batch with a `BatchifyError`.

    Example:
        >>> check_not_empty([1])
    """
    if len(samples) == 0:
        raise BatchifyError("a batch of no samples", "leave empty batches (and empty shards) out of the sampler")


def some(items: Sequence[object], limit: int = 5) -> str:
    """A few of many for an error message.

    Example:
        >>> some([(1,), (2,)])
        '(1,), (2,)'
    """
    return ", ".join(map(str, items[:limit])) + (f", ... ({len(items)} in all)" if len(items) > limit else "")


def ragged(shapes: Sequence[tuple[int, ...]], why: str = "", advice: str = "") -> BatchifyError:
    """The error for samples of different shapes. It shows each shape once, with a sample that has it.

    Example:
        >>> ragged([(1,), (2,), (1,)]).problem.split(": ")[1]
        '(1,) (sample 0 of the batch), (2,) (sample 1 of the batch)'
    """
    first_with: dict[tuple[int, ...], int] = {}
    for position, shape in enumerate(shapes):
        first_with.setdefault(tuple(shape), position)
    shown = some([f"{shape} (sample {position} of the batch)" for shape, position in first_with.items()])
    return BatchifyError(
        f"samples of different shapes cannot be stacked: {shown}{why}",
        advice or "make them equal, pad them with sharded_loader.batchify.Pad, or leave them apart with List",
    )


# -- the memory of the batch that is being made ------------------------------------------------------------------------


class _Current(threading.local):
    allocator: Empty = np.empty


_current = _Current()


def _begin_afresh() -> None:
    """In a forked child: the batch that the parent's thread is making is not this process's."""
    _current.allocator = np.empty


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)


def empty(shape: int | Iterable[int], dtype: Any = np.float64) -> Array:
    """Like `numpy.empty`; in ``batchify_fn`` and ``get_batch``, memory of the batch that is being made.

    A worker process that makes its batch there saves the copy into shared memory. Return the array as (a part
    of) the batch, and keep it no longer: in a worker its memory is used again once the batch has left.

    Args:
        shape: of the array.
        dtype: anything that NumPy takes as one.

    Returns:
        An uninitialised, writable, C-contiguous array. Outside of a loader, and where the batch's memory is
        full, it is `numpy.empty`'s.

    Raises:
        TypeError: the shape holds something other than integers, or NumPy does not know the dtype.
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
    # numpy.empty refuses negative dimensions, and knows how wide a string without a width is.
    allocator = _current.allocator if dtype.itemsize and math.prod(dims) > 0 else np.empty
    return allocator(dims, dtype)


def call_with_empty(fn: Callable[[Any], object], argument: object, allocator: Empty) -> Any:
    """``fn(argument)``. While it runs, `empty` calls ``allocator`` in this thread.

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
