"""`Pad`: samples of different lengths become one array.

Along one axis, or along every axis, the samples are filled up with ``pad_val`` to the longest of the batch, or to a
multiple of ``round_to``. The other axes must agree. Samples longer than ``max_length`` are cut first. The result is
written once, into memory that the caller's allocator gave: row by row, or, if rows are short, as the bytes of all rows
and of what fills them up. A ``pad_val`` that does not fit the dtype is rejected with an error. Samples are cast to a
given ``dtype`` as NumPy casts them. Lengths and mask are arrays from the same allocator.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Sequence
from functools import reduce
from operator import attrgetter
from typing import Any, Literal

import numpy as np

from sharded_loader.extend import Array, Batchify, BatchifyError, Dtype, Empty, Samples
from sharded_loader.extend import data as core
from sharded_loader.extend.tools import call_of, check_choice, check_int

_SMALL_ROW = 16 * 1024  # bytes

_ndim_of = attrgetter("ndim")


def to_numpy_dtype(dtype: Any) -> Dtype | None:
    """A dtype given in NumPy's, Python's or torch's way, as NumPy's; a TypeError if NumPy lacks it.

    Example:
        >>> import torch
        >>> to_numpy_dtype("float16"), to_numpy_dtype(torch.int32), to_numpy_dtype(None)
        (dtype('float16'), dtype('int32'), None)
    """
    if dtype is None:
        return None
    try:
        return np.dtype(core.dtype_name(dtype) if str(dtype).startswith("torch.") else dtype)
    except (TypeError, ValueError):
        raise TypeError(f"dtype {dtype!r} is unknown to NumPy: give one that is, or convert the batch after") from None


class Pad(Batchify):
    """Pad the samples along one axis, or every axis, to the longest of the batch, and stack them.

    Args:
        axis: the axis of a sample along which lengths differ; negative counts from the end. None: every axis, as MXNet
            2's ``Pad`` does.
        pad_val: what to fill with.
        ret_length: also return the length of each sample, without padding.
        dtype: of the result; None keeps the samples' own (Python ints are int64).
        round_to: pad up to a multiple of this (8 suits tensor cores).
        max_length: The greatest length. Longer samples are cut. None: no limit. With ``axis=None`` it limits every
            axis.
        truncate: Which end of a sample is cut off if it is longer than ``max_length``: ``"end"`` or ``"start"``.
        mask: also return a boolean mask: True where the value comes from a sample, False where it is padding.

    Returns:
        Calling it gives a tensor of shape (n, *padded shape). With ``ret_length`` or ``mask`` it gives a tuple of this
        tensor, the lengths, and the mask. The lengths are an int32 tensor of shape (n,). The mask has the shape
        (n, padded length). With ``axis=None`` the lengths are shapes, of shape (n, axes), and the mask has the shape of
        the padded tensor. Lengths and mask count what is left after the cut.

    Raises:
        TypeError: ``axis`` is neither an int nor None; ``round_to`` or ``max_length`` is no int; ``mask`` is no bool.
        ValueError: ``round_to`` or ``max_length`` < 1, ``max_length`` is no multiple of ``round_to``, or ``truncate``
            is unknown. On a call: no samples, strings, samples without that axis or with another number of axes, other
            axes that differ, ``pad_val`` that the dtype cannot hold.

    Example:
        >>> Pad(pad_val=9)([[1, 2, 3], [4]])
        tensor([[1, 2, 3],
                [4, 9, 9]])
        >>> Pad(ret_length=True, round_to=4)([[1, 2, 3], [4]])[0].shape
        torch.Size([2, 4])
        >>> tokens, mask = Pad(max_length=4, mask=True)([[1, 2, 3, 4, 5], [6]])
        >>> tokens.tolist(), mask.tolist()
        ([[1, 2, 3, 4], [6, 0, 0, 0]], [[True, True, True, True], [True, False, False, False]])
        >>> Pad(max_length=2, truncate="start")([[1, 2, 3], [4]]).tolist()
        [[2, 3], [4, 0]]
        >>> Pad(axis=None)([np.zeros((2, 3)), np.zeros((3, 2))]).shape
        torch.Size([2, 3, 3])

    Source of the idea: ``gluonnlp.data.batchify.Pad``.
    """

    def __init__(
        self,
        axis: int | None = 0,
        pad_val: object = 0,
        ret_length: bool = False,
        dtype: object = None,
        round_to: int | None = None,
        *,
        max_length: int | None = None,
        truncate: Literal["end", "start"] = "end",
        mask: bool = False,
    ) -> None:
        self._axis = _int_or_none("axis", axis, "an int, or None for every axis", -math.inf)
        self._round_to = _int_or_none("round_to", round_to, "a positive int, or None for no rounding")
        self._max_length = _int_or_none("max_length", max_length, "a positive int, or None for no limit")
        if (self._max_length or 0) % (self._round_to or 1):
            text = f"Pad(max_length={max_length}, round_to={round_to}): padded samples would be longer than max_length"
            raise ValueError(f"{text}: give a max_length that is a multiple of round_to")
        if not isinstance(mask, bool):
            raise TypeError(f"Pad(mask={mask!r}): give True to get the mask of the padded batch, or False")
        self._truncate, self._mask = check_choice("truncate", truncate, ("end", "start"), "Pad"), mask
        # Gluon's own default is None, which meant 0 and a warning.
        self._pad_val = 0 if pad_val is None else pad_val
        self._ret_length = ret_length
        self._dtype = to_numpy_dtype(dtype)
        self._fills: dict[Dtype, Any] = {}

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        core.check_not_empty(samples)
        shape: tuple[int, ...]
        lengths: Sequence[Any]
        if isinstance(samples[0], tuple) and not core.is_numbers(samples[0]):
            text = f"samples are tuples of {len(samples[0])} fields, and Pad takes bare sequences"
            raise BatchifyError(text, "say what to do with each field: Tuple(Pad(), Stack()) for sequences and labels")
        if core.are_tensors(set(map(type, samples))) and not core.numpy_can(samples):
            _check_tensors(samples)
            samples = self._cut(samples)
            shape, axis, lengths = self._plan([tuple(tensor.shape) for tensor in samples])
            padded = self._new_tensor(samples, (len(samples), *shape), empty)
            _write(padded, samples, self._pad_val, axis, lengths)
        else:
            samples = self._cut(_to_arrays(samples))
            are_rows = self._axis in (0, -1) and set(map(_ndim_of, samples)) == {1}
            if are_rows:  # the same as `_plan` finds, for 64 samples in 3 us instead of 14
                axis, lengths = 0, list(map(len, samples))
                shape = (self._rounded(max(lengths)),)
            else:
                shape, axis, lengths = self._plan([array.shape for array in samples])
            dtype = self._dtype or core.common_dtype(samples)
            fill = self._fills.get(dtype)
            if fill is None:
                fill = self._fills[dtype] = self._fill_value(dtype)
            padded = _join(samples, fill, lengths, shape[0], dtype, empty) if are_rows else None
            if padded is None:
                padded = empty((len(samples), *shape), dtype)
                _write(padded, samples, fill, axis, lengths)
        made = [padded]
        if self._ret_length:
            counts = empty((len(samples), *np.shape(lengths[0])), np.dtype(np.int32))
            counts[...] = lengths
            made.append(counts)
        if self._mask:
            made.append(_mask(lengths, shape if axis is None else shape[axis : axis + 1], empty))
        return tuple(made) if made[1:] else padded

    def _cut(self, samples: Samples) -> Samples:
        """The samples, cut to ``max_length``."""
        if self._max_length is None:
            return samples
        kept = slice(self._max_length) if self._truncate == "end" else slice(-self._max_length, None)

        def where(ndim: int) -> tuple[slice, ...]:
            return tuple([kept if self._axis in (None, i, i - ndim) else slice(None) for i in range(ndim)])

        return [sample[where(sample.ndim)] for sample in samples]

    def _plan(self, shapes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], int | None, Sequence[Any]]:
        """The padded shape of one sample, the axis from 0, and each sample's length along it (all, with axis=None)."""
        first, axis = shapes[0], self._axis
        if axis is not None and axis < 0:
            axis += len(first)
        axes = set(range(len(first))) if axis is None else {axis}
        if not axes or not axes <= set(range(len(first))):
            text = f"samples of shape {first} have no axis {'' if axis is None else f'{self._axis} '}to pad"
            raise BatchifyError(text, "use Stack for numbers, or pad along an axis that they have")
        sizes = list(zip(*shapes, strict=False))  # by axis
        alike = (len(set(sizes[i])) == 1 for i in range(len(first)) if i not in axes)
        if len(set(map(len, shapes))) > 1 or not all(alike):
            advice = "pad along the axis that differs, or, if all have as many, along every axis with Pad(axis=None)"
            raise core.ragged(shapes, f"; Pad(axis={self._axis}) makes only what it pads equal", advice)
        padded = tuple([self._rounded(max(found)) if i in axes else first[i] for i, found in enumerate(sizes)])
        return padded, axis, shapes if axis is None else sizes[axis]

    def _rounded(self, length: int) -> int:
        return length if self._round_to is None else -(-length // self._round_to) * self._round_to

    def _fill_value(self, dtype: Dtype) -> Any:
        try:
            with np.errstate(all="ignore"):
                value = np.asarray(self._pad_val).astype(dtype)[()]
                exact = dtype.kind not in "biu" or value == self._pad_val
        except (TypeError, ValueError, OverflowError):
            exact = False
        if not exact:
            text = f"pad_val={self._pad_val!r} does not fit samples of dtype {dtype}"
            raise BatchifyError(text, "choose another pad_val, or a dtype that holds both: Pad(dtype=...)")
        return value

    def _new_tensor(self, tensors: Samples, shape: tuple[int, ...], empty: Empty) -> Any:
        """Memory for tensors that NumPy cannot hold: bfloat16 and the like, or on an accelerator."""
        torch: Any = sys.modules["torch"]
        dtype = reduce(torch.promote_types, {tensor.dtype for tensor in tensors})
        if self._dtype is not None:
            dtype = torch.from_numpy(np.empty(0, self._dtype)).dtype
        if core.is_plain(tensors):
            return core.empty_tensor(shape, dtype, empty)[1]
        return torch.empty(shape, dtype=dtype, device=tensors[0].device)

    def __repr__(self) -> str:
        now = {name.removeprefix("_"): value for name, value in vars(self).items()}
        now["dtype"] = self._dtype and self._dtype.name
        arguments = inspect.signature(Pad).parameters.items()
        return call_of(self, **{name: (now[name], argument.default) for name, argument in arguments})


def _int_or_none(name: str, value: object, allowed: str, least: float = 1) -> int | None:
    return None if value is None else check_int(f"Pad({name}={value!r})", value, least, f"give {allowed}")


def _join(
    samples: Samples, fill: object, lengths: Sequence[int], width: int, dtype: Dtype, empty: Empty
) -> Array | None:
    """Short rows of numbers, with what fills them up between, as bytes in one pass; None where that cannot be.

    64 rows of 5 to 500 int64 in new memory: 38 us, in a slot 47; row after row 61 (medians of 9).
    """
    if not 0 < width * dtype.itemsize <= core.JOINED_BYTES or dtype.num not in core.JOINABLE:
        return None
    if set(map(core.dtype_of, samples)) != {dtype}:
        return None
    nbytes = len(samples) * width * dtype.itemsize
    new = core.is_new(empty, nbytes)
    if not new and nbytes > core.COPIED_AT_ONCE:
        return None
    gap = np.full(width, fill, dtype).view(np.uint8).data
    parts: list[Any] = [gap] * (2 * len(samples))
    parts[::2] = samples
    parts[1::2] = [gap[: (width - length) * dtype.itemsize] for length in lengths]
    return core.join(parts, (len(samples), width), dtype, None if new else empty)


def _write(out: Any, samples: Samples, fill: Any, axis: int | None, lengths: Sequence[Any]) -> None:
    """The samples into the rows of an array or a tensor, and ``fill`` into what is left."""
    # Small rows: filling all first halves the calls (64 rows of 500 int64: 15 us against 27); large ones:
    # writing only the tails saves memory traffic (64 x 2000 x 80 float64: 2.8 ms against 4.1).
    small = axis is None or out.nbytes <= _SMALL_ROW * len(out)
    if small:
        out[...] = fill
    head = (slice(None),) * (axis or 0)
    for row, sample, length in zip(out, samples, lengths, strict=True):
        row[tuple(map(slice, sample.shape))] = sample
        if not small:
            row[(*head, slice(length, None))] = fill


def _mask(lengths: Sequence[object], padded: Sequence[int], empty: Empty) -> Array:
    """Where the values of samples of these lengths lie in rows, or boxes, that are padded to one size."""
    sizes = np.asarray(lengths, np.int64).reshape(len(lengths), -1)  # by sample and axis
    out = empty((len(sizes), *padded), np.dtype(bool))
    out[...] = True
    for axis, size in enumerate(padded):
        inside = np.arange(size) < sizes[:, axis, None]
        out &= inside.reshape(len(sizes), *(size if other == axis else 1 for other in range(len(padded))))
    return out


def _check_tensors(tensors: Samples) -> None:
    core.check_no_grad(tensors)
    if any(hasattr(type(tensor), "get_mask") for tensor in tensors):  # torch.masked's: copying drops the mask
        raise BatchifyError("masked tensors cannot be padded", "return .get_data() and .get_mask() as two fields")
    if any(tensor.layout is not sys.modules["torch"].strided for tensor in tensors):
        raise BatchifyError("sparse tensors cannot be padded", "return them from the dataset with .to_dense()")


def _to_arrays(samples: Samples) -> list[Array]:
    if set(map(type, samples)) == {np.ndarray}:
        return list(samples)
    arrays = list(map(core.as_array, samples))
    known = [array for array in arrays if array.size]
    if known and any(isinstance(sample, list) and not sample for sample in samples):
        # An empty list has no dtype of its own: it must not turn a batch of ints into floats.
        dtype = core.common_dtype(known)
        arrays = [array if array.size else array.astype(dtype) for array in arrays]
    return arrays
