"""The structures that samples and batches have: nested lists, tuples, mappings, dataclasses, with leaves.

    map_leaves(fn, tree) -> tree of the same shape, each leaf through ``fn``
    to_torch(tree)       -> the same tree, NumPy arrays turned into torch tensors over the same memory

What can go wrong: an array that torch cannot take as it is (read-only, negative strides, foreign byte order,
unaligned) is copied rather than shared; an array whose dtype torch lacks (strings, objects, dates) stays a
NumPy array. An array with masked values is rejected with an error. torch is looked up, never imported, except by
`to_torch`, whose caller wants tensors.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np

from sharded_loader.batching.errors import BatchifyError

# kind and size of the dtypes that torch.from_numpy takes; keyed so because np.longlong and np.int64 are two
# dtypes of one layout on Linux.
_TORCH_HAS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
_TORCH_TAKES = {np.dtype(name).num for name in _TORCH_HAS}


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is a torch tensor, without importing torch: where torch is not loaded, none exists.

    Example:
        >>> is_tensor(np.zeros(3))
        False
    """
    return are_tensors({type(value)})


def are_tensors(types: set[type]) -> bool:
    """Whether all these types are torch's tensors; quicker than `is_tensor` for each of many values.

    Example:
        >>> are_tensors({int, np.ndarray})
        False
    """
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and all(issubclass(kind, tensor) for kind in types)


def is_masked(value: Any) -> bool:
    """Whether ``value`` is a NumPy array some of whose values are masked.

    Example:
        >>> is_masked(np.zeros(2)), is_masked(np.ma.array([1, 2])), is_masked(np.ma.array([1, 2], mask=[0, 1]))
        (False, False, True)
    """
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is None or not isinstance(value, masked):
        return False
    mask = np.ma.getmask(value)
    return bool(np.ma.flatten_mask(mask).any() if mask.dtype.names else mask.any())


def check_unmasked(value: Any) -> None:
    """Refuse masked values: a batch has no mask, and what lies under the mask is not data.

    Raises:
        BatchifyError: ``value`` has masked values.

    Example:
        >>> check_unmasked(np.ma.array([1, 2]))
    """
    if is_masked(value):
        raise BatchifyError(
            "a masked array with masked values cannot go into a batch, which has no mask",
            "return it from the dataset filled, x.filled(0), or as two fields, x.data and np.ma.getmaskarray(x)",
        )


def is_namedtuple(value: Any) -> bool:
    """Whether ``value`` is an instance of a class made by ``namedtuple`` or ``typing.NamedTuple``.

    Example:
        >>> from collections import namedtuple
        >>> is_namedtuple(namedtuple("Point", "x y")(1, 2)), is_namedtuple((1, 2))
        (True, False)
    """
    return isinstance(value, tuple) and hasattr(value, "_fields") and hasattr(value, "_make")


def is_dataclass_instance(value: Any) -> bool:
    """Whether ``value`` is an instance of a dataclass (not the class itself).

    Example:
        >>> is_dataclass_instance(3)
        False
    """
    return hasattr(type(value), "__dataclass_fields__")


def rebuild_mapping(template: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping of ``template``'s type with these items, or a plain dict where that type cannot be rebuilt.

    Example:
        >>> from collections import OrderedDict
        >>> rebuild_mapping(OrderedDict(a=1, b=2), {"a": 10, "b": 20})["b"]
        20
    """
    if type(template) is dict:
        return items
    try:
        if isinstance(template, MutableMapping):
            # A copy keeps what the constructor may not take back: a defaultdict's factory, own attributes.
            rebuilt = copy.copy(template)
            for key, value in items.items():
                rebuilt[key] = value
            return rebuilt
        return type(template)(items)  # type: ignore[call-arg]
    except (TypeError, ValueError, AttributeError, KeyError):
        return items


def rebuild_sequence(template: Any, items: list[Any]) -> Any:
    """A list, tuple or namedtuple of ``template``'s type with these items.

    Example:
        >>> rebuild_sequence((1, 2), [3, 4])
        (3, 4)
    """
    kind = type(template)
    if kind is list:
        return items
    if kind is tuple:
        return tuple(items)
    try:
        if is_namedtuple(template):
            return template._make(items)
        if isinstance(template, list):
            rebuilt = copy.copy(template)
            rebuilt[:] = items
            return rebuilt
        return kind(items)
    except (TypeError, ValueError, AttributeError):
        return tuple(items) if isinstance(template, tuple) else items


def rebuild_dataclass(template: Any, values: Iterable[tuple[str, Any]]) -> Any:
    """A copy of a dataclass instance with these fields set.

    A copy, not ``dataclasses.replace``: that refuses ``init=False`` fields and runs ``__post_init__`` again.
    ``object.__setattr__`` also reaches frozen ones.

    Example:
        >>> Point = dataclasses.make_dataclass("Point", ["x", "y"], frozen=True)
        >>> rebuild_dataclass(Point(1, 2), [("y", 5)])
        Point(x=1, y=5)
    """
    rebuilt = copy.copy(template)
    for name, value in values:
        object.__setattr__(rebuilt, name, value)
    return rebuilt


def dataclass_fields(value: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass instance that are set, as (name, value).

    Example:
        >>> Point = dataclasses.make_dataclass("Point", ["x", "y"])
        >>> dataclass_fields(Point(1, 2))
        [('x', 1), ('y', 2)]
    """
    return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]


def has_own(value: Any, method: str) -> bool:
    """Whether the class of ``value`` has this method; builtin containers and plain namedtuples have no ``to``.

    The class is asked, not the object: keys and fields may be attributes of an object too.

    Example:
        >>> from collections import namedtuple
        >>> has_own(namedtuple("Edge", "start to")(1, int), "to"), has_own({"to": int}, "to")
        (False, False)
    """
    fields = getattr(type(value), "__dataclass_fields__", {})
    return callable(getattr(type(value), method, None)) and method not in fields


ATOMS: frozenset[type] = frozenset({str, bytes, int, float, bool, complex, type(None)})
"""Types of leaves that hold no arrays."""


def map_leaves(fn: Callable[[Any], Any], tree: Any, own: str | None = None, skip: frozenset[type] = frozenset()) -> Any:
    """Apply ``fn`` to every leaf and keep the structure.

    Lists, tuples, namedtuples, mappings and dataclass instances are structure, everything else is a leaf.
    An object that stands in two places is mapped once and stands in two places after. Parts in which nothing
    changed may be returned as they are.

    Args:
        fn: called with each leaf, at most once per object.
        tree: any structure without cycles.
        own: the name of a method. A container whose class has it is a leaf.
        skip: leaves of these types stay as they are: 131,000 ints in lists take 8 ms instead of 480.

    Returns:
        The structure with the mapped leaves; container types and key order are kept where they can be.

    Example:
        >>> map_leaves(lambda leaf: leaf * 10, {"a": [1, 2], "b": (3,)})
        {'a': [10, 20], 'b': (30,)}
    """
    return _map(fn, tree, own, skip, {})


def _map(
    fn: Callable[[Any], Any], tree: Any, own: str | None, skip: frozenset[type], seen: dict[int, tuple[Any, Any]]
) -> Any:
    if type(tree) in skip:
        return tree
    known = seen.get(id(tree))
    if known is not None:
        return known[1]
    mapped = _map_new(fn, tree, own, skip, seen)
    # The original is kept beside its image: a mapping that makes its values on access would otherwise hand
    # out a second object at the address of the first.
    seen[id(tree)] = (tree, mapped)
    return mapped


def _map_new(
    fn: Callable[[Any], Any], tree: Any, own: str | None, skip: frozenset[type], seen: dict[int, tuple[Any, Any]]
) -> Any:
    if own is not None and has_own(tree, own):
        return fn(tree)
    if isinstance(tree, (list, tuple)):
        if skip.issuperset(map(type, tree)):
            return tree
        old = list(tree)
        new = [_map(fn, item, own, skip, seen) for item in old]
        return tree if _same(old, new) else rebuild_sequence(tree, new)
    if isinstance(tree, Mapping):
        items = {key: _map(fn, tree[key], own, skip, seen) for key in tree}
        return tree if _same([tree[key] for key in items], items.values()) else rebuild_mapping(tree, items)
    if is_dataclass_instance(tree):
        fields = dataclass_fields(tree)
        changed = [(name, _map(fn, value, own, skip, seen)) for name, value in fields]
        if _same([value for _, value in fields], [value for _, value in changed]):
            return tree
        return rebuild_dataclass(tree, changed)
    return fn(tree)


def _same(old: Iterable[Any], new: Iterable[Any]) -> bool:
    return all(a is b for a, b in zip(old, new, strict=True))


def to_torch(tree: Any) -> Any:
    """Turn the NumPy arrays and scalars in a structure into torch tensors over the same memory.

    Args:
        tree: any structure.

    Returns:
        The same structure. Arrays that torch could not share (read-only, negative or odd strides, foreign
        byte order, unaligned) are copied. Arrays of strings, objects or dates stay as they are; so do tensors
        and all other leaves.

    Example:
        >>> to_torch({"x": np.ones(2, np.float32), "name": ["a", "b"]})
        {'x': tensor([1., 1.]), 'name': ['a', 'b']}
    """
    return _leaf_to_torch(tree) if type(tree) is np.ndarray else map_leaves(_leaf_to_torch, tree, skip=ATOMS)


def _leaf_to_torch(leaf: Any) -> Any:
    if not isinstance(leaf, (np.ndarray, np.generic)):
        return leaf
    dtype, flags = leaf.dtype, leaf.flags
    plain = flags.c_contiguous and flags.writeable and flags.aligned and type(leaf) is np.ndarray
    # What batches are made of, first: 1 us instead of 2.4.
    if not (plain and dtype.num in _TORCH_TAKES and dtype.isnative):
        check_unmasked(leaf)
        if not torch_has(dtype):
            return leaf
        leaf = _for_torch(np.asarray(leaf))
    import torch

    tensor = torch.from_numpy(leaf)
    # NumPy's arrays of size 0 have the strides 0 or others, by how they were made.
    return tensor if leaf.size else torch.empty(leaf.shape, dtype=tensor.dtype)


def _for_torch(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size = array.itemsize
    if not (
        array.flags.writeable  # else torch warns
        and array.flags.aligned
        and array.dtype.isnative
        and all(stride >= 0 and stride % size == 0 for stride in array.strides)
    ):
        array = np.array(array, dtype=array.dtype.newbyteorder("="), order="C")
    plain = np.dtype(f"{array.dtype.kind}{size}")
    # np.ulonglong is not np.uint64 on Linux, and torch does not know it
    return array if array.dtype.num == plain.num else array.view(plain)


def torch_has(dtype: np.dtype[Any]) -> bool:
    """Whether torch has a dtype of this layout.

    Example:
        >>> torch_has(np.dtype("uint16")), torch_has(np.dtype("U3"))
        (True, False)
    """
    return f"{dtype.kind}{dtype.itemsize}" in _TORCH_HAS
