"""Many values become one array: the step under default batchify, `Stack` and `Pad` that touches the bytes.

    samples (numbers | number lists | arrays | tensors) + empty(shape, dtype) -> one array of shape (n, ...)

``empty`` is the caller's allocator (`numpy.empty`, or a slot of shared memory), and the result is written into its
memory once, in place. NumPy dtypes give a NumPy array. Tensors of a dtype that NumPy lacks (bfloat16, float8) give a
tensor over memory from ``empty``; tensors that do not lie in plain host memory (CUDA, sparse, quantised, subclasses)
are stacked by torch, in torch's memory. torch is looked up in ``sys.modules``: where a tensor is, it is loaded.

What can go wrong is a `BatchifyError`, a ValueError: different shapes, nothing to stack, numbers too large, masked
values, tensors that require grad (autograd cannot follow them between processes).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.batching.protocol import (
    Array,
    BatchifyError,
    Empty,
    check_not_empty,
    is_new,
    new_array,
    ragged,
    some,
)
from sharded_loader.batching.tree import are_tensors, check_unmasked, is_tensor

if TYPE_CHECKING:
    import torch

_dtype_of = attrgetter("dtype")
_shape_of_array = attrgetter("shape")


def stack(samples: Sequence[Any], empty: Empty, dtype: np.dtype[Any] | None = None) -> Any:
    """Stack numbers, lists of numbers, arrays or tensors along a new first axis.

    Args:
        samples: n values of one shape; kinds may be mixed.
        empty: the allocator.
        dtype: of the result; None keeps the samples' own (promoted as NumPy does where they differ; Python
            ints are int64, floats float64).

    Returns:
        An array of shape (n, *shape of a sample), or a tensor as the module's docstring says.

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


def stack_arrays(arrays: Sequence[Array], empty: Empty, dtype: np.dtype[Any] | None = None) -> Array:
    """Stack NumPy arrays; see `stack`."""
    first, count = arrays[0], len(arrays)
    shape, target = first.shape, first.dtype if dtype is None else dtype
    if dtype is None:
        if len(set(map(_dtype_of, arrays))) > 1 or not target.isnative:
            target = common_dtype(arrays)
        elif 0 < first.nbytes <= JOINED_BYTES and target.num in _JOINED and is_new(empty, count * first.nbytes):
            joined = _join(arrays)
            if joined is not None:
                return joined
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
        if shape:
            raise
        out = empty((count,), target)
        out[...] = np.array(arrays)
    return out


JOINED_BYTES = 16384
"""Samples up to this size are joined as bytes where the batch lies in new memory.

Measured (256 images of 3 KB at random places of 150 MB, reading included, medians of 14): joined 199 us, concatenated
246. Into a slot, from where the bytes have to be copied once more, joined 275 and concatenated 258."""

_JOINED = {np.dtype(char).num for char in "?bBhHiIlLqQefdgFDG"}
"""NumPy's numbers for the dtypes of numbers, which are only bytes."""


def _join(arrays: Sequence[Any]) -> Array | None:
    """Stack arrays of one native dtype by their bytes; None if their shapes differ, or they have gaps in memory."""
    first, count = arrays[0], len(arrays)
    if list(map(_shape_of_array, arrays)).count(first.shape) < count:
        return None
    try:
        return np.frombuffer(bytearray().join(arrays), first.dtype).reshape((count, *first.shape))
    except TypeError:  # not C-contiguous
        return None


def common_dtype(arrays: Sequence[Array]) -> np.dtype[Any]:
    """The native dtype that all these arrays promote to; a `BatchifyError` where NumPy has none.

    Example:
        >>> common_dtype([np.zeros(1, ">i4"), np.zeros(1, "f4")])
        dtype('float64')
    """
    dtypes = set(map(_dtype_of, arrays))
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
            f"a {type(sample).__name__} cannot become an array of numbers",
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
        return np.dtype(_dtype_name(dtype) if str(dtype).startswith("torch.") else dtype)
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
    out = empty(array.shape, dtype or array.dtype)
    out[...] = array
    return out


def _shape_of(sample: Any) -> tuple[int, ...]:
    if not isinstance(sample, (list, tuple)):
        return ()
    return (len(sample), *(_shape_of(sample[0]) if sample else ()))


# -- tensors -----------------------------------------------------------------------------------------------------------

_NUMPY_NAMES = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def stack_tensors(tensors: Sequence[Any], empty: Empty, dtype: np.dtype[Any] | None = None) -> Any:
    """Stack torch tensors; see `stack`. Returns a NumPy array where NumPy has the dtype."""
    torch: Any = sys.modules["torch"]
    check_no_grad(tensors)
    if dtype is not None:
        target = torch.from_numpy(np.empty(0, dtype)).dtype
        tensors = [tensor.to(target) for tensor in tensors]
    first = tensors[0]
    if any(tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo) for tensor in tensors):
        raise BatchifyError(
            "nested tensors and tensors of a compressed sparse layout cannot be stacked",
            "leave them apart with sharded_loader.batchify.List, or make the batch in a batchify_fn of your own",
        )
    try:
        if not is_plain(tensors):
            return torch.stack(tuple(tensors))
        joint = reduce(torch.promote_types, map(_dtype_of, tensors))
        out, tensor_out = empty_tensor((len(tensors), *first.shape), joint, empty)
        torch.stack(tuple(tensors), out=tensor_out)
    except RuntimeError:
        if any(tensor.shape != first.shape for tensor in tensors):
            raise ragged([tuple(tensor.shape) for tensor in tensors]) from None
        raise
    return tensor_out if out is None else out


def check_no_grad(tensors: Sequence[Any]) -> None:
    """Reject tensors that require grad with a `BatchifyError`: a batch is data."""
    if any(map(attrgetter("requires_grad"), tensors)):
        position = [bool(tensor.requires_grad) for tensor in tensors].index(True)
        raise BatchifyError(
            f"a tensor that requires grad (sample {position}) cannot go into a batch",
            "return it from the dataset with .detach()",
        )


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are torch's own dense tensors in host memory, so that their bytes can be written anywhere."""
    torch: Any = sys.modules["torch"]
    first = tensors[0]
    return (
        set(map(type, tensors)) == {torch.Tensor}
        and bool(first.is_cpu)
        and first.layout is torch.strided
        and not first.is_quantized
        and not first.is_nested
    )


def is_column(tensor: Any) -> bool:
    """Whether this is a tensor whose rows can be copied as they lie in memory."""
    if not is_tensor(tensor) or not is_plain([tensor]):
        return False
    return bool(tensor.ndim) and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def numpy_can(tensors: Sequence[Any]) -> bool:
    """Whether these tensors can be read as NumPy arrays without a copy."""
    return all(_dtype_name(tensor.dtype) in _NUMPY_NAMES and is_plain([tensor]) for tensor in tensors)


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")  # as NumPy would spell it


def as_numpy(tensor: torch.Tensor) -> Array:
    """The memory of a plain host tensor as an array; as integers of the same size where NumPy lacks the dtype.

    Example:
        >>> import torch
        >>> as_numpy(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=int16)
    """
    if _dtype_name(tensor.dtype) in _NUMPY_NAMES:
        return tensor.numpy()
    torch: Any = sys.modules["torch"]
    array: Array = tensor.view(getattr(torch, f"int{8 * tensor.dtype.itemsize}")).numpy()
    return array


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, empty: Empty) -> tuple[Array | None, torch.Tensor]:
    """A host tensor over memory from ``empty``, and the array that is the same memory where NumPy has the dtype."""
    torch: Any = sys.modules["torch"]
    name = _dtype_name(dtype)
    if name in _NUMPY_NAMES:
        array = empty(shape, np.dtype(name))
        return array, torch.from_numpy(array)
    # bfloat16, float8, complex32: integers of the same size lend their memory.
    memory = empty(shape, np.dtype(f"i{dtype.itemsize}"))
    # Of size 0 the strides are torch's own: NumPy has others, by how an array was made.
    return None, torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(shape, dtype=dtype)
