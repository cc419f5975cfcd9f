"""Tensors become one array or tensor, and tensors and arrays share memory.

    stack_tensors(tensors, empty) -> array, or a tensor where NumPy lacks the dtype
    empty_tensor(shape, dtype, empty) -> (array or None, tensor)      over memory from ``empty``
    as_numpy(tensor) -> array                                         over the tensor's memory

Tensors of a dtype that NumPy lacks (bfloat16, float8) lie in memory of integers of the same size. Tensors that do not
lie in plain host memory (CUDA, sparse, quantised, subclasses) are stacked by torch, in torch's memory. torch is looked
up in ``sys.modules``: where a tensor is, it is loaded.

What can go wrong is a `BatchifyError`: different shapes, layouts that cannot be stacked, tensors that require grad
(autograd cannot follow them between processes).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import reduce
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.batching.protocol import Array, BatchifyError, Empty, ragged
from sharded_loader.batching.tree import is_tensor

if TYPE_CHECKING:
    import torch

dtype_of = attrgetter("dtype")

NUMPY_NAMES = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}


def stack_tensors(tensors: Sequence[Any], empty: Empty, dtype: np.dtype[Any] | None = None) -> Any:
    """Stack torch tensors. Returns a NumPy array where NumPy has the dtype.

    Args and errors: those of `sharded_loader.batching.default.stack`.
    """
    torch: Any = sys.modules["torch"]
    if dtype is None and torch.is_grad_enabled() and is_plain(tensors) and len(set(map(dtype_of, tensors))) == 1:
        # The usual case: torch itself notices what does not fit, and below it is said. 256 tensors of 3 KB: 155 us;
        # to look at the other traits of each takes 80 more.
        out, tensor_out = empty_tensor((len(tensors), *tensors[0].shape), tensors[0].dtype, empty)
        try:
            torch.stack(tuple(tensors), out=tensor_out)
            return tensor_out if out is None else out
        except RuntimeError as error:
            if is_from_outside(error):
                raise
    check_no_grad(tensors)
    if dtype is not None:
        target = torch.from_numpy(np.empty(0, dtype)).dtype
        tensors = [tensor.to(target) for tensor in tensors]
    first = tensors[0]
    if any(tensor.is_nested or tensor.layout not in (torch.strided, torch.sparse_coo) for tensor in tensors):
        raise BatchifyError(
            "nested tensors and tensors of a compressed sparse layout cannot be stacked",
            "leave them apart with sharded_loader.batchify.List, or make the batch in a collate_fn of your own",
        )
    try:
        if not is_plain(tensors):
            return torch.stack(tuple(tensors))
        joint = reduce(torch.promote_types, dict.fromkeys(map(dtype_of, tensors)))
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
            f"a tensor that requires grad (sample {position} of the batch) cannot go into a batch",
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
    return all(dtype_name(tensor.dtype) in NUMPY_NAMES and is_plain([tensor]) for tensor in tensors)


def dtype_name(dtype: Any) -> str:
    """The name that NumPy has for a dtype of torch.

    Example:
        >>> import torch
        >>> dtype_name(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor) -> Array:
    """The memory of a plain host tensor as an array; as integers of the same size where NumPy lacks the dtype.

    Example:
        >>> import torch
        >>> as_numpy(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=int16)
    """
    if dtype_name(tensor.dtype) in NUMPY_NAMES:
        return tensor.numpy()
    torch: Any = sys.modules["torch"]
    array: Array = tensor.view(getattr(torch, f"int{8 * tensor.dtype.itemsize}")).numpy()
    return array


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, empty: Empty) -> tuple[Array | None, torch.Tensor]:
    """A host tensor over memory from ``empty``, and the array that is the same memory where NumPy has the dtype."""
    torch: Any = sys.modules["torch"]
    name = dtype_name(dtype)
    if name in NUMPY_NAMES:
        array = empty(shape, np.dtype(name))
        return array, torch.from_numpy(array)
    # bfloat16, float8, complex32: integers of the same size lend their memory.
    memory = empty(shape, np.dtype(f"i{dtype.itemsize}"))
    # Of size 0 the strides are torch's own: NumPy has others, by how an array was made.
    return None, torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(shape, dtype=dtype, device="cpu")
