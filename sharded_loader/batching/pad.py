"""`Pad`: samples of different lengths become one array.

Along one axis, or along every axis, the samples are filled up with ``pad_val`` to the longest of the batch (or to a
multiple of ``round_to``); the other axes must agree. The result is written row by row, once, into memory that the
caller's allocator gave. A ``pad_val`` that does not fit the dtype is refused; samples are cast to a given ``dtype`` as
NumPy casts them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np

from sharded_loader.batching.default import Batchify
from sharded_loader.batching.errors import Array, BatchifyError, Empty, check_not_empty, raise_ragged
from sharded_loader.batching.stack import as_array, common_dtype, is_numbers, to_numpy_dtype
from sharded_loader.batching.tensors import check_no_grad, empty_tensor, is_plain, numpy_can
from sharded_loader.batching.tree import is_tensor

_SMALL_ROW = 16 * 1024  # bytes


class Pad(Batchify):
    """Pad the samples along one axis, or every axis, to the longest of the batch, and stack them.

    Args:
        axis: the axis of a sample along which lengths differ; negative counts from the end. None: every axis, as MXNet
            2's ``Pad`` does.
        pad_val: what to fill with.
        ret_length: also return the lengths before padding.
        dtype: of the result; None keeps the samples' own (Python ints are int64).
        round_to: pad up to a multiple of this (8 suits tensor cores).

    Returns:
        Calling it gives a tensor of shape (n, *padded shape), or with ``ret_length`` a tuple of it and the
        lengths, an int32 tensor of shape (n,); with ``axis=None`` the shapes, of shape (n, axes).

    Raises:
        TypeError: ``axis`` is neither an int nor None, or ``round_to`` is no int.
        ValueError: ``round_to`` < 1; on a call: no samples, strings, samples without that axis or with another
            number of axes, other axes that differ, ``pad_val`` that the dtype cannot hold.

    Example:
        >>> Pad(pad_val=9)([[1, 2, 3], [4]])
        tensor([[1, 2, 3],
                [4, 9, 9]])
        >>> Pad(ret_length=True, round_to=4)([[1, 2, 3], [4]])[0].shape
        torch.Size([2, 4])
        >>> Pad(axis=None)([np.zeros((2, 3)), np.zeros((3, 2))]).shape
        torch.Size([2, 3, 3])

    Source of the idea: ``gluonnlp.data.batchify.Pad``.
    """

    def __init__(
        self,
        axis: int | None = 0,
        pad_val: Any = 0,
        ret_length: bool = False,
        dtype: Any = None,
        round_to: int | None = None,
    ) -> None:
        try:
            self._axis = None if axis is None else operator.index(axis)
            self._round_to = None if round_to is None else operator.index(round_to)
        except TypeError:
            raise TypeError(
                f"Pad(axis={axis!r}, round_to={round_to!r}): give ints, or axis=None for every axis"
            ) from None
        if self._round_to is not None and self._round_to < 1:
            raise ValueError(f"Pad(round_to={round_to}): give a positive int, or None for no rounding")
        # Gluon's own default is None, which meant 0 and a warning.
        self._pad_val = 0 if pad_val is None else pad_val
        self._ret_length = ret_length
        self._dtype = to_numpy_dtype(dtype)

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        if isinstance(samples[0], tuple) and not is_numbers(samples[0]):
            raise BatchifyError(
                f"samples are tuples of {len(samples[0])} fields, and Pad takes bare sequences",
                "say what to do with each field: Tuple(Pad(), Stack()) for sequences and labels",
            )
        if all(map(is_tensor, samples)) and not numpy_can(samples):
            padded, lengths = self._pad_tensors(samples, empty)
        else:
            padded, lengths = self._pad_arrays(_to_arrays(samples), empty)
        if not self._ret_length:
            return padded
        counts = empty((len(samples), *np.shape(lengths[0])), np.dtype(np.int32))
        counts[...] = lengths
        return padded, counts

    def _rounded(self, length: int) -> int:
        return length if self._round_to is None else -(-length // self._round_to) * self._round_to

    def _every_axis(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        """The padded shape of one sample, with ``axis=None``."""
        if len({len(shape) for shape in shapes}) > 1:
            try:
                raise_ragged(shapes)
            except BatchifyError as error:
                raise BatchifyError(
                    f"{error.problem}; Pad(axis=None) pads samples of the same number of axes",
                    "give every sample the same number of axes in the dataset",
                ) from None
        if not shapes[0]:
            raise BatchifyError("samples of shape () have no axis to pad", "use Stack for numbers")
        return tuple([self._rounded(max(lengths)) for lengths in zip(*shapes, strict=True)])

    def _target(self, shapes: Sequence[tuple[int, ...]]) -> tuple[int, list[int], tuple[int, ...]]:
        """The axis, the lengths along it and the padded shape of one sample."""
        assert self._axis is not None
        first = tuple(shapes[0])
        axis = self._axis + len(first) if self._axis < 0 else self._axis
        if not 0 <= axis < len(first):
            raise BatchifyError(
                f"samples of shape {first} have no axis {self._axis} to pad",
                "pad along an axis that they have, or use Stack for numbers",
            )
        rest = first[:axis] + first[axis + 1 :]
        if any(len(s) != len(first) or tuple(s[:axis]) + tuple(s[axis + 1 :]) != rest for s in shapes):
            try:
                raise_ragged(shapes)
            except BatchifyError as error:
                raise BatchifyError(
                    f"{error.problem}; Pad(axis={self._axis}) makes that axis equal only",
                    "pad along the axis that differs, or along every axis with Pad(axis=None)",
                ) from None
        lengths = [int(shape[axis]) for shape in shapes]
        longest = self._rounded(max(lengths))
        return axis, lengths, (*first[:axis], longest, *first[axis + 1 :])

    def _pad_arrays(self, arrays: Sequence[Array], empty: Empty) -> tuple[Array, Sequence[Any]]:
        if self._axis is None:
            shapes = [array.shape for array in arrays]
            full, dtype = (len(arrays), *self._every_axis(shapes)), self._dtype or common_dtype(arrays)
            fill, out = self._fill_value(dtype), empty(full, dtype)
            out.fill(fill)
            for row, array in zip(out, arrays, strict=True):
                row[tuple(map(slice, array.shape))] = array
            return out, shapes
        axis, lengths, shape = self._target([array.shape for array in arrays])
        dtype = self._dtype or common_dtype(arrays)
        fill = self._fill_value(dtype)
        out = empty((len(arrays), *shape), dtype)
        head = (slice(None),) * axis
        # Small rows: filling all first halves the calls (64 rows of 500 int64: 15 us against 27); large ones:
        # writing only the tails saves memory traffic (64 x 2000 x 80 float64: 2.8 ms against 4.1).
        small = out.nbytes <= _SMALL_ROW * len(out)
        if small:
            out.fill(fill)
        for row, array, length in zip(out, arrays, lengths, strict=True):
            if axis == 0:
                row[:length] = array
            else:
                row[(*head, slice(None, length))] = array
            if not small:
                row[(*head, slice(length, None))] = fill
        return out, lengths

    def _fill_value(self, dtype: np.dtype[Any]) -> Any:
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(self._pad_val).astype(dtype)[()]
                exact = dtype.kind not in "biu" or value == self._pad_val
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            raise BatchifyError(
                f"pad_val={self._pad_val!r} does not fit samples of dtype {dtype}",
                "choose another pad_val, or a dtype that holds both: Pad(dtype=...)",
            )
        return value

    def _pad_tensors(self, tensors: Sequence[Any], empty: Empty) -> tuple[Any, Sequence[Any]]:
        """Tensors that NumPy cannot hold: bfloat16 and the like, or on an accelerator."""
        torch: Any = sys.modules["torch"]
        check_no_grad(tensors)
        if any(hasattr(type(tensor), "get_mask") for tensor in tensors):  # torch.masked's: copying drops the mask
            raise BatchifyError("masked tensors cannot be padded", "return .get_data() and .get_mask() as two fields")
        if any(tensor.layout is not torch.strided for tensor in tensors):
            raise BatchifyError("sparse tensors cannot be padded", "return them from the dataset with .to_dense()")
        shapes = [tuple(tensor.shape) for tensor in tensors]
        lengths: Sequence[Any] = shapes
        if self._axis is None:
            shape = self._every_axis(shapes)
        else:
            axis, lengths, shape = self._target(shapes)
        if self._dtype is not None:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        else:
            dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
        full = (len(tensors), *shape)
        if is_plain(tensors):
            _, out = empty_tensor(full, dtype, empty)
        else:
            out = torch.empty(full, dtype=dtype, device=tensors[0].device)
        if self._axis is None:
            out.fill_(self._pad_val)
            for row, tensor in zip(out, tensors, strict=True):
                row[tuple(map(slice, tensor.shape))].copy_(tensor)
            return out, lengths
        for row, tensor, length in zip(out, tensors, lengths, strict=True):
            row.narrow(axis, 0, length).copy_(tensor)
            row.narrow(axis, length, shape[axis] - length).fill_(self._pad_val)
        return out, lengths

    def __repr__(self) -> str:
        given = {
            "axis": (self._axis, 0),
            "pad_val": (self._pad_val, 0),
            "ret_length": (self._ret_length, False),
            "dtype": (self._dtype and self._dtype.name, None),
            "round_to": (self._round_to, None),
        }
        return f"Pad({', '.join(f'{k}={value!r}' for k, (value, usual) in given.items() if value != usual)})"


def _to_arrays(samples: Sequence[Any]) -> list[Array]:
    if set(map(type, samples)) == {np.ndarray}:
        return list(samples)
    arrays = []
    for position, sample in enumerate(samples):
        if isinstance(sample, (str, bytes)):
            raise BatchifyError(
                f"sample {position} of the batch is a string, which Pad cannot pad",
                "turn strings into token ids first, or leave them apart with sharded_loader.batchify.List",
            )
        arrays.append(as_array(sample))
    if any(not array.size and isinstance(sample, list) for array, sample in zip(arrays, samples, strict=True)):
        # An empty list has no dtype of its own: it must not turn a batch of ints into floats.
        known = [array for array, sample in zip(arrays, samples, strict=True) if array.size]
        if known:
            dtype = common_dtype(known)
            arrays = [array if array.size else array.astype(dtype) for array in arrays]
    return arrays
