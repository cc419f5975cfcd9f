"""Torch tensors as samples: stacked into memory that somebody else gave, without importing torch.

Where a tensor is, torch is loaded already; it is looked up in ``sys.modules``. What can go wrong: tensors that
require grad (autograd cannot follow them between processes) and tensors of different shapes, a `BatchifyError`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.batching.protocol import Array, BatchifyError, Empty, ragged
from sharded_loader.batching.tree import is_tensor

if TYPE_CHECKING:
    import torch


def check_no_grad(tensors: Sequence[Any]) -> None:
    """Refuse tensors that require grad: a batch is data, and autograd cannot follow it between processes.

    Raises:
        BatchifyError: one does.

    Example:
        >>> import torch
        >>> check_no_grad([torch.zeros(2)])
    """
    if any(map(attrgetter("requires_grad"), tensors)):
        position = [bool(tensor.requires_grad) for tensor in tensors].index(True)
        raise BatchifyError(
            f"a tensor that requires grad (sample {position}) cannot go into a batch",
            "return it from the dataset with .detach()",
        )


def stack_tensors(tensors: Sequence[Any], empty: Empty, dtype: np.dtype[Any] | None = None) -> Any:
    """Stack torch tensors; see `stack`. Returns a NumPy array where NumPy has the dtype.

    Example:
        >>> import torch
        >>> stack_tensors([torch.zeros(2), torch.ones(2)], np.empty)
        array([[0., 0.],
               [1., 1.]], dtype=float32)
    """
    torch: Any = sys.modules["torch"]
    check_no_grad(tensors)
    if dtype is not None:
        target = torch.from_numpy(np.empty(0, dtype)).dtype
        tensors = [tensor.to(target) for tensor in tensors]
    first = tensors[0]
    if any(_has_no_stack(tensor) for tensor in tensors):
        raise BatchifyError(
            "nested tensors and tensors of a compressed sparse layout cannot be stacked",
            "leave them apart with sharded_loader.batchify.List, or make the batch in a batchify_fn of your own",
        )
    try:
        if not is_plain(tensors):
            return torch.stack(tuple(tensors))
        target = first.dtype
        for other in {tensor.dtype for tensor in tensors} - {target}:
            target = torch.promote_types(target, other)
        out, tensor_out = empty_tensor((len(tensors), *first.shape), target, empty)
        torch.stack(tuple(tensors), out=tensor_out)
    except RuntimeError:
        if any(tensor.shape != first.shape for tensor in tensors):
            raise ragged([tuple(tensor.shape) for tensor in tensors]) from None
        raise
    return tensor_out if out is None else out


def _has_no_stack(tensor: Any) -> bool:
    compressed = ("torch.sparse_csr", "torch.sparse_csc", "torch.sparse_bs")
    return bool(tensor.is_nested) or str(tensor.layout).startswith(compressed)


def is_plain(tensors: Sequence[Any]) -> bool:
    """Whether these are torch's own dense tensors in host memory, so that their bytes can be written anywhere.

    Example:
        >>> import torch
        >>> is_plain([torch.zeros(2)]), is_plain([torch.zeros(2).to_sparse()])
        (True, False)
    """
    torch: Any = sys.modules["torch"]
    first = tensors[0]
    return (
        set(map(type, tensors)) == {torch.Tensor}
        and bool(first.is_cpu)
        and first.layout is torch.strided
        and not first.is_quantized
        and not first.is_nested
    )


def reads_as_tensor(tensor: Any) -> bool:
    """Whether a tensor's class indexes as torch's own does.

    Example:
        >>> import torch
        >>> reads_as_tensor(torch.zeros(2))
        True
    """
    torch: Any = sys.modules["torch"]
    return type(tensor).__getitem__ is torch.Tensor.__getitem__


def is_column(tensor: Any) -> bool:
    """Whether this is a tensor whose rows can be copied as they lie in memory.

    Example:
        >>> import torch
        >>> is_column(torch.zeros(2, 3)), is_column(torch.zeros(2, requires_grad=True)), is_column(torch.tensor(1))
        (True, False, False)
    """
    if not is_tensor(tensor) or not is_plain([tensor]):
        return False
    return bool(tensor.ndim) and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def numpy_can(tensors: Sequence[Any]) -> bool:
    """Whether these tensors can be read as NumPy arrays without a copy.

    Example:
        >>> import torch
        >>> numpy_can([torch.zeros(2)]), numpy_can([torch.zeros(2, dtype=torch.bfloat16)])
        (True, False)
    """
    return all(dtype_name(tensor.dtype) in _NUMPY_NAMES and is_plain([tensor]) for tensor in tensors)


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name, as NumPy would spell it.

    Example:
        >>> import torch
        >>> dtype_name(torch.int8)
        'int8'
    """
    return str(dtype).removeprefix("torch.")


def as_numpy(tensor: torch.Tensor) -> Array:
    """The memory of a plain host tensor as an array; as integers of the same size where NumPy lacks the dtype.

    Example:
        >>> import torch
        >>> as_numpy(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=int16)
    """
    if dtype_name(tensor.dtype) in _NUMPY_NAMES:
        return tensor.numpy()
    torch: Any = sys.modules["torch"]
    array: Array = tensor.view(getattr(torch, f"int{8 * tensor.dtype.itemsize}")).numpy()
    return array


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, empty: Empty) -> tuple[Array | None, torch.Tensor]:
    """A host tensor over memory from ``empty``, and the array that is the same memory where NumPy has the dtype.

    Example:
        >>> import torch
        >>> array, tensor = empty_tensor((2,), torch.bfloat16, np.empty)
        >>> array is None, tensor.dtype
        (True, torch.bfloat16)
    """
    torch: Any = sys.modules["torch"]
    name = dtype_name(dtype)
    if name in _NUMPY_NAMES:
        array = empty(shape, np.dtype(name))
        return array, torch.from_numpy(array)
    # bfloat16, float8, complex32: integers of the same size lend their memory.
    integers = np.dtype(f"i{dtype.itemsize}")
    memory = empty(shape, integers)
    # Of size 0 the strides are torch's own: NumPy has others, by how an array was made.
    return None, torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(shape, dtype=dtype)


_NUMPY_NAMES = {"bool", "float16", "float32", "float64", "complex64", "complex128"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
