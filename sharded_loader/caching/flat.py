"""A sample as a short text and flat arrays, and back. Nothing that is read here can run code, as a pickle can.

    flat(sample) -> (node, leaves)                leaves: C-contiguous arrays, in the order of the node
    text_of(node) -> text                         the node as JSON: ``json.loads`` gives the same node
    unflatten(node, take) -> sample               ``take(dtype, shape)`` gives the next leaf
    fits_columns(node), batched(node, columns)    the batch of samples of one structure, by the default rules

A node is a text or None that stands for itself, or a list that begins with its kind:

    ["dict", keys, nodes]   ["list", nodes]   ["tuple", nodes]   ["big", digits]      keys: texts, or JSON of others too
    [kind, dtype, shape]    an array, a tensor (with its dtype as torch calls it), bytes, a number, or a list of numbers

Samples of one structure have leaves of the same dtypes and shapes, so their leaves can be kept as columns. A sample
comes back with the same types and values. Arrays come back C-contiguous, and own their memory.

What can go wrong: a value of any other kind, subclasses included. That is a TypeError that names the field.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.batching.protocol import Array
from sharded_loader.batching.tree import NUMPY_NAMES, as_numpy, dtype_name, is_plain, is_tensor

Node = list[Any] | str | None

MANY = 8
"""Numbers of one type from which on a list of them is one leaf."""

text_of = json.JSONEncoder(separators=(",", ":")).encode
"""The text of a node. `json.dumps` would make an encoder for each sample."""

_NUMBERS: dict[type, type[np.generic]] = {int: np.int64, float: np.float64, bool: np.bool_, complex: np.complex128}
_KEYS = {str, int, bool, type(None)}
_KEPT = "biufcSUmM"
_STACKED = "biufc"


def flat(sample: object) -> tuple[Node, list[Array]]:
    """The node of a sample, and its leaves.

    Raises:
        TypeError: a field is of another kind; names the field.

    Example:
        >>> node, leaves = flat({"x": np.zeros(2, np.float32), "name": "a", "label": 3})
        >>> text_of(node), leaves
        ('["dict",["x","name","label"],[["array","<f4",[2]],"a",["int","<i8",[]]]]', [array([0., 0.], ...), array(3)])
    """
    leaves: list[Array] = []
    return _flat(sample, (), leaves), leaves


def _flat(value: object, path: tuple[Any, ...], leaves: list[Array]) -> Node:
    """A node. After a JPEG was decoded, the processor has none of this code at hand: 0.5 us become 10.

    Args:
        value: of the sample.
        path: of the value: that of what it is in, and its key or position there.
        leaves: to be appended to.
    """
    if value is None or type(value) is str:
        return value
    if type(value) is dict and _KEYS.issuperset(kinds := set(map(type, value))):
        keys = list(value) if kinds <= {str} else text_of(list(value))  # 1 == True
        return ["dict", keys, [_flat(part, (path, key), leaves) for key, part in value.items()]]
    if (leaf := _leaf(value)) is not None:
        kind, array, *rest = leaf
        leaves.append(np.asarray(array, order="C"))
        return [kind, array.dtype.str, list(array.shape), *rest]
    if type(value) in (list, tuple):
        parts: Any = value
        return [type(value).__name__, [_flat(part, (path, number), leaves) for number, part in enumerate(parts)]]
    if type(value) is int:
        return ["big", str(value)]
    raise TypeError(
        f"{f'field {_shown(path)} of the sample' if path else 'the sample'} is {_described(value)}, which a cache "
        "cannot store: make it an array, a tensor, a number, a string, bytes, or a dict, list or tuple of these, "
        "before cache(...)"
    )


def _shown(path: tuple[Any, ...]) -> str:
    return f"{_shown(path[0])}[{path[1]!r}]" if path else ""


def _described(value: Any) -> str:
    """What a value is that cannot be stored: also why, if others of its type can."""
    kind = type(value)
    if kind is dict:
        return f"a dict with {an(type(next(key for key in value if type(key) not in _KEYS)))} as a key"
    if is_tensor(value) and value.requires_grad:
        return f"{an(kind)} that requires grad (call .detach())"
    names = ("dtype", "layout", "device") if is_tensor(value) else ("dtype",)
    details = ", ".join(str(getattr(value, name)) for name in names if hasattr(value, name))
    return f"{an(kind)} ({details})" if details else an(kind)


def _leaf(value: Any) -> tuple[Any, ...] | None:
    """The kind, the array, and what else is needed to build the value again; None: it is no leaf."""
    kind = type(value)
    if kind in (np.ndarray, np.memmap):
        return ("array", value) if value.dtype.kind in _KEPT else None
    try:
        if kind in _NUMBERS:
            return kind.__name__, np.array(value, _NUMBERS[kind])
        if kind in (list, tuple):
            types = set(map(type, value)) if len(value) >= MANY else set()
            one = types.pop() if len(types) == 1 else None
            return (f"{kind.__name__} of numbers", np.array(value, _NUMBERS[one])) if one in _NUMBERS else None
    except OverflowError:  # an int beyond 64 bits
        return None
    if kind is bytes:
        return "bytes", np.frombuffer(value, np.uint8)
    if isinstance(value, np.generic) and value.dtype.kind in _KEPT:
        array = np.asarray(value)
        # NumPy drops zeros at the end of texts.
        is_cut = isinstance(value, (np.str_, np.bytes_)) and len(array[()]) < len(value)
        return None if is_cut else ("scalar", array)
    if is_tensor(value) and is_plain([value]) and not value.requires_grad:
        return "tensor", as_numpy(value.resolve_conj().resolve_neg().contiguous()), dtype_name(value.dtype)
    return None


def _tensor(array: Array, name: str) -> object:
    import torch

    tensor = torch.from_numpy(array)
    return tensor if name in NUMPY_NAMES else tensor.view(getattr(torch, name))


_BUILD: dict[str, Callable[..., object]] = {
    **{kind.__name__: np.ndarray.item for kind in _NUMBERS},
    "list of numbers": np.ndarray.tolist,
    "tuple of numbers": lambda array: tuple(array.tolist()),
    "bytes": np.ndarray.tobytes,
    "array": lambda array: array,
    "scalar": lambda array: array[()],
    "tensor": _tensor,
}


def _keys(found: str | list[str]) -> Any:
    return json.loads(found) if isinstance(found, str) else found


def unflatten(node: Node, take: Callable[[str, list[int]], Array]) -> object:
    """The sample of a node.

    Args:
        node: the structure.
        take: gives the next leaf, of this dtype and shape. An array of the sample is this very array.

    Example:
        >>> node, leaves = flat((np.arange(3), "a", [0.5] * 9))
        >>> rest = iter(leaves)
        >>> unflatten(node, lambda dtype, shape: next(rest))
        (array([0, 1, 2]), 'a', [0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5])
    """
    if not isinstance(node, list):
        return node
    kind, first, *rest = node
    if kind == "dict":
        return dict(zip(_keys(first), [unflatten(part, take) for part in rest[0]], strict=True))
    if kind in ("list", "tuple"):
        parts = [unflatten(part, take) for part in first]
        return parts if kind == "list" else tuple(parts)
    if kind == "big":
        return int(first)
    shape, *extra = rest
    return _BUILD[kind](take(first, shape), *extra)


def fits_columns(node: Node) -> bool:
    """Whether `batched` makes of columns what the default batchify makes of the samples.

    Example:
        >>> fits_columns(flat((1, "a"))[0]), fits_columns(flat([1, 2])[0])
        (True, False)
    """
    if not isinstance(node, list):
        return node is not None
    kind, first, *rest = node
    if kind in ("dict", "tuple"):
        parts = rest[0] if kind == "dict" else first
        return bool(parts) and all(map(fits_columns, parts))
    if kind == "tensor":
        return rest[1] in NUMPY_NAMES
    return kind in ("array", "scalar", *(one.__name__ for one in _NUMBERS)) and np.dtype(first).kind in _STACKED


def batched(node: Node, columns: Iterator[Array], count: int) -> object:
    """The batch of ``count`` samples of one structure, whose leaves are these columns.

    Example:
        >>> batched(flat((1, "a"))[0], iter([np.array([1, 2])]), 2)
        [array([1, 2]), ['a', 'a']]
    """
    if not isinstance(node, list):
        return [node] * count
    kind, first, *rest = node
    if kind == "dict":
        return {key: batched(part, columns, count) for key, part in zip(_keys(first), rest[0], strict=True)}
    return [batched(part, columns, count) for part in first] if kind == "tuple" else next(columns)
