"""`Pad`: samples of different lengths become one array.

Along one axis, or along every axis, the samples are filled up with ``pad_val`` to the longest of the batch (or to a
multiple of ``round_to``); the other axes must agree. The result is written once, into memory that the caller's
allocator gave: row by row, or, if rows are short, as the bytes of all rows and of what fills them up. A ``pad_val``
that does not fit the dtype is rejected with an error. Samples are cast to a given ``dtype`` as NumPy casts them.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from functools import reduce
from operator import attrgetter
from typing import Any

import numpy as np

from sharded_loader.batching.default import Batchify
from sharded_loader.batching.protocol import Array, BatchifyError, Empty, check_not_empty, ragged
from sharded_loader.batching.stack import (
    COPIED_AT_ONCE,
    JOINABLE,
    JOINED_BYTES,
    as_array,
    common_dtype,
    is_new,
    is_numbers,
    to_numpy_dtype,
)
from sharded_loader.batching.tensors import check_no_grad, dtype_of, empty_tensor, is_plain, numpy_can
from sharded_loader.batching.tree import are_tensors

_SMALL_ROW = 16 * 1024  # bytes

_ndim_of = attrgetter("ndim")


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
        self._fills: dict[np.dtype[Any], Any] = {}

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        shape: tuple[int, ...]
        lengths: Sequence[Any]
        if isinstance(samples[0], tuple) and not is_numbers(samples[0]):
            raise BatchifyError(
                f"samples are tuples of {len(samples[0])} fields, and Pad takes bare sequences",
                "say what to do with each field: Tuple(Pad(), Stack()) for sequences and labels",
            )
        if are_tensors(set(map(type, samples))) and not numpy_can(samples):
            _check_tensors(samples)
            shape, axis, lengths = self._plan([tuple(tensor.shape) for tensor in samples])
            padded = self._new_tensor(samples, (len(samples), *shape), empty)
            _write(padded, samples, self._pad_val, axis, lengths)
        else:
            samples = _to_arrays(samples)
            are_rows = self._axis in (0, -1) and set(map(_ndim_of, samples)) == {1}
            if are_rows:  # the same as `_plan` finds, for 64 samples in 3 us instead of 14
                axis, lengths = 0, list(map(len, samples))
                shape = (self._rounded(max(lengths)),)
            else:
                shape, axis, lengths = self._plan([array.shape for array in samples])
            dtype = self._dtype or common_dtype(samples)
            fill = self._fills.get(dtype)
            if fill is None:
                fill = self._fills[dtype] = self._fill_value(dtype)
            padded = _join(samples, fill, lengths, shape[0], dtype, empty) if are_rows else None
            if padded is None:
                padded = empty((len(samples), *shape), dtype)
                _write(padded, samples, fill, axis, lengths)
        if not self._ret_length:
            return padded
        counts = empty((len(samples), *np.shape(lengths[0])), np.dtype(np.int32))
        counts[...] = lengths
        return padded, counts

    def _plan(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], int | None, Sequence[Any]]:
        """The padded shape of one sample, the axis from 0, and each sample's length along it (all, with axis=None)."""
        first, axis = shapes[0], self._axis
        if axis is None:
            axes, why = set(range(len(first))), "pads samples of the same number of axes"
            advice = "give every sample the same number of axes in the dataset"
        else:
            axis += len(first) if axis < 0 else 0
            axes, why = {axis}, "makes that axis equal only"
            advice = "pad along the axis that differs, or along every axis with Pad(axis=None)"
        if not axes or not axes <= set(range(len(first))):
            raise BatchifyError(
                f"samples of shape {first} have no axis {'' if axis is None else f'{self._axis} '}to pad",
                "use Stack for numbers, or pad along an axis that they have",
            )
        sizes = list(zip(*shapes, strict=False))  # by axis
        alike = (len(set(sizes[i])) == 1 for i in range(len(first)) if i not in axes)
        if len(set(map(len, shapes))) > 1 or not all(alike):
            raise ragged(shapes, f"; Pad(axis={self._axis}) {why}", advice)
        padded = tuple([self._rounded(max(found)) if i in axes else first[i] for i, found in enumerate(sizes)])
        return padded, axis, shapes if axis is None else sizes[axis]

    def _rounded(self, length: int) -> int:
        return length if self._round_to is None else -(-length // self._round_to) * self._round_to

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

    def _new_tensor(self, tensors: Sequence[Any], shape: tuple[int, ...], empty: Empty) -> Any:
        """Memory for tensors that NumPy cannot hold: bfloat16 and the like, or on an accelerator."""
        torch: Any = sys.modules["torch"]
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
        if self._dtype is not None:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        if is_plain(tensors):
            return empty_tensor(shape, dtype, empty)[1]
        return torch.empty(shape, dtype=dtype, device=tensors[0].device)

    def __repr__(self) -> str:
        given = {
            "axis": (self._axis, 0),
            "pad_val": (self._pad_val, 0),
            "ret_length": (self._ret_length, False),
            "dtype": (self._dtype and self._dtype.name, None),
            "round_to": (self._round_to, None),
        }
        return f"Pad({', '.join(f'{k}={value!r}' for k, (value, usual) in given.items() if value != usual)})"


def _join(
    samples: Sequence[Any], fill: Any, lengths: Sequence[int], width: int, dtype: np.dtype[Any], empty: Empty
) -> Array | None:
    """Short rows of numbers, with what fills them up between, as bytes in one pass; None where that cannot be.

    64 rows of 5 to 500 int64 in new memory: 38 us, in a slot 47; row after row 61 (medians of 9).
    """
    if not 0 < width * dtype.itemsize <= JOINED_BYTES or dtype.num not in JOINABLE:
        return None
    if set(map(dtype_of, samples)) != {dtype}:
        return None
    nbytes = len(samples) * width * dtype.itemsize
    new = is_new(empty, nbytes)
    if not new and nbytes > COPIED_AT_ONCE:
        return None
    gap = np.full(width, fill, dtype).view(np.uint8).data
    parts: list[Any] = [gap] * (2 * len(samples))
    parts[::2] = samples
    parts[1::2] = [gap[: (width - length) * dtype.itemsize] for length in lengths]
    shape = len(samples), width
    try:
        if new:
            return np.frombuffer(bytearray().join(parts), dtype).reshape(shape)
        joined = b"".join(parts)
    except TypeError:  # not C-contiguous
        return None
    out = empty(shape, dtype)
    out.reshape(-1).view(np.uint8).data[:] = joined
    return out


def _write(out: Any, samples: Sequence[Any], fill: Any, axis: int | None, lengths: Sequence[Any]) -> None:
    """The samples into the rows of an array or a tensor, and ``fill`` into what is left."""
    # Small rows: filling all first halves the calls (64 rows of 500 int64: 15 us against 27); large ones:
    # writing only the tails saves memory traffic (64 x 2000 x 80 float64: 2.8 ms against 4.1).
    small = axis is None or out.nbytes <= _SMALL_ROW * len(out)
    if small:
        out[...] = fill
    head = (slice(None),) * (axis or 0)
    for row, sample, length in zip(out, samples, lengths, strict=True):
        if axis == 0:
            row[:length] = sample
        else:
            row[tuple(map(slice, length)) if axis is None else (*head, slice(length))] = sample
        if not small:
            row[(*head, slice(length, None))] = fill


def _check_tensors(tensors: Sequence[Any]) -> None:
    check_no_grad(tensors)
    if any(hasattr(type(tensor), "get_mask") for tensor in tensors):  # torch.masked's: copying drops the mask
        raise BatchifyError("masked tensors cannot be padded", "return .get_data() and .get_mask() as two fields")
    if any(tensor.layout is not sys.modules["torch"].strided for tensor in tensors):
        raise BatchifyError("sparse tensors cannot be padded", "return them from the dataset with .to_dense()")


def _to_arrays(samples: Sequence[Any]) -> list[Array]:
    if set(map(type, samples)) == {np.ndarray}:
        return list(samples)
    arrays = list(map(as_array, samples))
    known = [array for array in arrays if array.size]
    if known and any(isinstance(sample, list) and not sample for sample in samples):
        # An empty list has no dtype of its own: it must not turn a batch of ints into floats.
        dtype = common_dtype(known)
        arrays = [array if array.size else array.astype(dtype) for array in arrays]
    return arrays
