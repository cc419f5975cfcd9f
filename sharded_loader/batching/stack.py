"""Many values become one array: the step under default batchify, `Stack` and `Pad` that touches the bytes.

    samples (numbers | number lists | arrays | tensors) + empty(shape, dtype) -> one array of shape (n, ...)

``empty`` is the caller's allocator (`numpy.empty`, or a slot of shared memory), and the result is written into its
memory once, in place. NumPy dtypes give a NumPy array; for tensors see `sharded_loader.batching.tensors`.

What can go wrong is a `BatchifyError`, a ValueError: different shapes, nothing to stack, numbers too large, masked
values, tensors that require grad.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.batching.protocol import (
    Array,
    BatchifyError,
    Empty,
    check_not_empty,
    new_array,
    ragged,
    some,
)
from sharded_loader.batching.tensors import check_no_grad, dtype_name, dtype_of, numpy_can, stack_tensors
from sharded_loader.batching.tree import are_tensors, check_unmasked, is_tensor

_shape_of_array = attrgetter("shape")


def stack(samples: Sequence[Any], empty: Empty, dtype: np.dtype[Any] | None = None) -> Any:
    """Stack numbers, lists of numbers, arrays or tensors along a new first axis.

    Args:
        samples: n values of one shape; kinds may be mixed.
        empty: the allocator.
        dtype: of the result; None keeps the samples' own (promoted as NumPy does where they differ; Python
            ints are int64, floats float64).

    Returns:
        An array of shape (n, *shape of a sample), or a tensor where NumPy lacks the dtype.

    Raises:
        BatchifyError: shapes differ, no samples, an int beyond 64 bits, tensors that require grad.

    Example:
        >>> stack([np.zeros(2), np.ones(2)], new_array)
        array([[0., 0.],
               [1., 1.]])
        >>> stack([1, 2], new_array)
        array([1, 2])
    """
    check_not_empty(samples)
    types = set(map(type, samples))
    if types == {np.ndarray}:
        return stack_arrays(samples, empty, dtype)
    if are_tensors(types):
        return stack_tensors(samples, empty, dtype)
    numbers = _number_types(samples)
    if numbers is None:
        return stack_arrays(list(map(as_array, samples)), empty, dtype)
    return stack_numbers(samples, numbers, empty, dtype)


# -- arrays ------------------------------------------------------------------------------------------------------------


def is_new(empty: Empty, nbytes: int) -> bool:
    """Whether the allocator would make new memory for ``nbytes``. Then any other new memory will do.

    Example:
        >>> is_new(np.empty, 1000), is_new(lambda shape, dtype: np.zeros(shape, dtype), 1000)
        (True, False)
    """
    return empty is new_array or nbytes < getattr(empty, "least_bytes", 0)


def stack_arrays(arrays: Sequence[Array], empty: Empty, dtype: np.dtype[Any] | None = None) -> Array:
    """Stack NumPy arrays; see `stack`."""
    first, count = arrays[0], len(arrays)
    shape, target = first.shape, first.dtype if dtype is None else dtype
    if dtype is None:
        if len(set(map(dtype_of, arrays))) > 1 or not target.isnative:
            target = common_dtype(arrays)
        elif 0 < first.nbytes <= JOINED_BYTES and target.num in JOINABLE:
            new = is_new(empty, count * first.nbytes)
            copied = first.nbytes <= COPIED_BYTES and count * first.nbytes <= COPIED_AT_ONCE
            joined = _join(arrays, None if new else empty) if new or copied else None
            if joined is not None:
                return joined
    if not shape and not any(map(_shape_of_array, arrays)):
        out = empty((count,), target)
        out[...] = np.array(arrays)
        return out
    try:
        if len(set(map(len, arrays))) > 1:
            raise ValueError
        out = empty((count, *shape), target)
        # Concatenating into a flattened view, not np.stack: 256 arrays of 3x32x32 uint8 take 44 us + 11 us of
        # checks against 86 us for np.stack(out=) and 68 us for 256 bare row copies (one core, warm cache).
        np.concatenate(arrays, out=out.reshape((count * shape[0], *shape[1:])), casting="unsafe")
    except (TypeError, ValueError):
        if any(array.shape != shape for array in arrays):
            raise ragged([array.shape for array in arrays]) from None
        raise
    return out


JOINED_BYTES = 16384
"""Samples up to this size are joined as bytes where the batch lies in new memory.

Measured (256 images of 3 KB at random places of 150 MB, reading included, medians of 9, two runs): joined 124 and 174
us, concatenated 220 and 313."""

COPIED_BYTES, COPIED_AT_ONCE = 3072, 1 << 20
"""Samples and batches up to these sizes are joined even where the bytes have to be copied once more, into given memory.

Measured as above: 256 of 3 KB: joined 194 to 284 us, concatenated 212 to 346. 1,024 of 256 bytes: 325 and 398. 256 of
12 KB: 870 and 684. Large batches lose: 16,384 of 4,000 bytes take 75 and 24 ms."""

JOINABLE = {np.dtype(char).num for char in "?bBhHiIlLqQefdgFDG"}
"""NumPy's numbers for the dtypes of numbers, which are only bytes."""


def _join(arrays: Sequence[Any], empty: Empty | None) -> Array | None:
    """Stack arrays of one native dtype by their bytes; None if their shapes differ, or they have gaps in memory.

    Args:
        arrays: of one dtype.
        empty: the allocator; None: the batch may lie in new memory.
    """
    first, count = arrays[0], len(arrays)
    shape = count, *first.shape
    if list(map(_shape_of_array, arrays)).count(first.shape) < count:
        return None
    try:
        if empty is None:
            return np.frombuffer(bytearray().join(arrays), first.dtype).reshape(shape)
        joined = b"".join(arrays)
    except TypeError:  # not C-contiguous
        return None
    out = empty(shape, first.dtype)
    out.reshape(-1).view(np.uint8).data[:] = joined
    return out


def common_dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """The native dtype that all these arrays promote to; a `BatchifyError` where NumPy has none.

    Example:
        >>> common_dtype([np.zeros(1, ">i4"), np.zeros(1, "f4")])
        dtype('float64')
    """
    dtypes = set(map(dtype_of, arrays))
    try:
        joint = dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)
    except TypeError:
        shown = some(sorted(map(str, dtypes)))
        raise BatchifyError(
            f"samples of dtypes that have no common one: {shown}", "convert them to one dtype in the dataset"
        ) from None
    return joint if joint.isnative else joint.newbyteorder("=")


def as_array(sample: Any) -> Array:
    """One sample as a NumPy array, without a copy where it lies in host memory; a `BatchifyError` if it is none.

    A sample is a number, a (nested) list of numbers or arrays, an array, a host tensor, or any object with
    ``__array__`` or ``__array_interface__`` (PIL images).

    Example:
        >>> as_array([1, 2])
        array([1, 2])
    """
    if isinstance(sample, np.ndarray):
        if type(sample) is not np.ndarray:
            check_unmasked(sample)
        return sample
    if is_tensor(sample):
        check_no_grad([sample])
        if not numpy_can([sample]):
            raise BatchifyError(
                f"a tensor that is no plain host array ({sample.dtype}, {sample.device}, {sample.layout}) beside "
                "samples of other kinds",
                "make all samples tensors, of one device and layout",
            )
        return np.asarray(sample)
    if isinstance(sample, (list, tuple)):
        if not sample:
            return np.array(sample)
        if type(sample[0]) is int:
            # Token ids, the usual case: looking at every number's type first costs more than the conversion.
            with contextlib.suppress(ValueError, TypeError, OverflowError):
                array = np.array(sample)
                if array.dtype == np.int64 and array.ndim == 1:
                    return array
        stacked: Array = stack(sample, new_array)
        return stacked
    array = np.asarray(sample)
    if array.dtype.hasobject or array.dtype.kind in "US":
        raise BatchifyError(
            f"{an(type(sample))} cannot become an array of numbers",
            "turn strings into token ids in the dataset, or leave such fields apart with sharded_loader.batchify.List",
        )
    return array


def to_numpy_dtype(dtype: Any) -> np.dtype[Any] | None:
    """A dtype given in NumPy's, Python's or torch's way, as NumPy's; a TypeError if NumPy lacks it.

    Example:
        >>> import torch
        >>> to_numpy_dtype("float16"), to_numpy_dtype(torch.int32), to_numpy_dtype(None)
        (dtype('float16'), dtype('int32'), None)
    """
    if dtype is None:
        return None
    try:
        return np.dtype(dtype_name(dtype) if str(dtype).startswith("torch.") else dtype)
    except TypeError:
        raise TypeError(f"dtype {dtype!r} is unknown to NumPy: give one that is, or convert the batch after") from None


# -- Python's numbers --------------------------------------------------------------------------------------------------

_DTYPES = {complex: np.dtype(complex), float: np.dtype(float), int: np.dtype(np.int64), bool: np.dtype(bool)}
"""The widest type first."""

PYTHON_NUMBERS = set(_DTYPES)
_NUMBERS = (int, float, complex, np.generic)


def is_numbers(sample: Any) -> bool:
    """Whether a list (or tuple) holds numbers only, at any depth, so that it is one array, as in Gluon.

    Example:
        >>> is_numbers([1, 2.5, True]), is_numbers([[1], [2]]), is_numbers(["a"])
        (True, True, False)
    """
    return _number_types(sample) is not None


def _number_types(sample: Any) -> set[type] | None:
    """Types of the numbers in a (nested) sequence; None if it holds anything that is not a number."""
    types = set(map(type, sample))
    if types <= PYTHON_NUMBERS:
        return types
    lists = {kind for kind in types if issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields")}
    found = types - lists
    if not all(issubclass(kind, _NUMBERS) and not issubclass(kind, (str, bytes)) for kind in found):
        return None
    for item in sample:
        if type(item) in lists:
            inner = _number_types(item)
            if inner is None:
                return None
            found |= inner
    return found


def stack_numbers(numbers: Sequence[Any], types: set[type], empty: Empty, dtype: np.dtype[Any] | None = None) -> Array:
    """Stack numbers, or (nested) lists of numbers, of these types; see `stack`.

    Example:
        >>> stack_numbers([1, 2.5], {int, float}, new_array)
        array([1. , 2.5])
    """
    wanted = None
    if types <= PYTHON_NUMBERS:  # neither NumPy's scalars nor subclasses; no types at all: an empty list
        wanted = _DTYPES[next(filter(types.__contains__, _DTYPES), float)]
    try:
        try:
            array = np.array(numbers, wanted)
            if array.dtype.hasobject:  # an int subclass beyond 64 bits
                raise OverflowError
        except OverflowError:
            if np.array(numbers, object).min() < 0:  # NumPy 1 would wrap it around
                raise
            array = np.array(numbers, np.uint64)
    except OverflowError:
        raise BatchifyError(
            "ints that fit neither int64 nor uint64", "store them as strings, as bytes, or in several fields"
        ) from None
    except (ValueError, TypeError) as error:
        shapes = list(map(_shape_of, numbers))
        if len(set(shapes)) > 1:
            raise ragged(shapes) from None
        raise BatchifyError(
            f"nested lists that are no rectangular array ({error})",
            "pad them with sharded_loader.batchify.Pad, or leave them apart with List",
        ) from None
    if dtype is None and is_new(empty, array.nbytes):
        return array
    out = empty(array.shape, dtype or array.dtype)
    out[...] = array
    return out


def _shape_of(sample: Any) -> tuple[int, ...]:
    if not isinstance(sample, (list, tuple)):
        return ()
    return (len(sample), *(_shape_of(sample[0]) if sample else ()))
