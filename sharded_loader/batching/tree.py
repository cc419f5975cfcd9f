"""Nested structures of samples and batches (lists, tuples, mappings, dataclasses), and the tensors and arrays in them.

    children(tree)           -> its parts | None for a leaf
    rebuild(tree, parts)     -> a structure of the same type with these parts
    map_leaves(fn, tree)     -> a tree of the same shape with ``fn`` applied to each leaf
    to_torch(tree)           -> the same tree, NumPy arrays turned into torch tensors over the same memory
    stack_tensors(tensors, empty) -> array, or a tensor if NumPy lacks the dtype
    empty_tensor(shape, dtype, empty) -> (array or None, tensor)      over memory from ``empty``

Tensors of a dtype that NumPy lacks (bfloat16, float8) use memory of integers of the same size. Tensors outside plain
host memory (CUDA, sparse, quantised, subclasses) are stacked by torch, in its own memory.

Arrays that torch cannot share (read-only, negative strides, non-native byte order, unaligned) are copied. Arrays whose
dtype torch lacks (strings, objects, dates) stay NumPy arrays. Masked values and tensors that require grad are rejected.
Only `to_torch` imports torch; if there are tensors, it is loaded already.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import operator
import random
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import reduce
from itertools import islice
from operator import attrgetter
from types import BuiltinFunctionType, ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.base.interrupts import is_from_outside, pass_on
from sharded_loader.batching.protocol import Array, BatchifyError, Dtype, Empty, Samples, ragged

# Kind and size of the dtypes that torch.from_numpy accepts, because np.longlong and np.int64 are two dtypes of one
# layout on Linux.
_TORCH_HAS = {"b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"}
TORCH_TAKES = {np.dtype(name).num for name in _TORCH_HAS}

_ARRAYS, _FLAT = {np.ndarray}, {list, tuple, dict}

ATOMS: frozenset[type] = frozenset({str, bytes, int, float, bool, complex, type(None), np.str_, np.bytes_})
"""Types of leaves that hold no arrays."""


# -- type checks -------------------------------------------------------------------------------------------------------


def is_tensor(value: object) -> bool:
    """Return True for a torch tensor. Does not import torch: without it no tensor exists."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and issubclass(type(value), tensor)


def are_tensors(types: set[type]) -> bool:
    """Return True if all these types are tensors; faster than `is_tensor` for each of many values."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor is not None and all(issubclass(kind, tensor) for kind in types)


def is_masked(value: object) -> bool:
    """Return True for a NumPy array with masked values.

    Example:
        >>> is_masked(np.zeros(2)), is_masked(np.ma.array([1, 2])), is_masked(np.ma.array([1, 2], mask=[0, 1]))
        (False, False, True)
    """
    masked = getattr(sys.modules.get("numpy.ma"), "MaskedArray", None)
    if masked is None or not isinstance(value, masked):
        return False
    mask = np.ma.getmask(value)
    return bool(np.ma.flatten_mask(mask).any() if mask.dtype.names else mask.any())


def check_unmasked(value: object) -> None:
    """Reject masked values with a `BatchifyError`: a batch has no mask, and the values under the mask are not data."""
    if is_masked(value):
        raise BatchifyError(
            "a masked array with masked values cannot go into a batch, which has no mask",
            "return it from the dataset filled, x.filled(0), or as two fields, x.data and np.ma.getmaskarray(x)",
        )


def is_dataclass_instance(value: object) -> bool:
    """Return True for an instance of a dataclass, False for the class itself."""
    return hasattr(type(value), "__dataclass_fields__")


def field_names(value: Any) -> list[str]:
    """Return the names of those fields of a dataclass instance that are set."""
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]


def has_own(value: object, method: str) -> bool:
    """Return True if the class of ``value`` defines this method; keys and fields of the object do not count.

    Example:
        >>> from collections import namedtuple
        >>> has_own(namedtuple("Edge", "start to")(1, int), "to"), has_own({"to": int}, "to")
        (False, False)
    """
    fields = getattr(type(value), "__dataclass_fields__", {})
    return callable(getattr(type(value), method, None)) and method not in fields


def has_method(value: object, name: str) -> bool:
    """Return True if an object, which is not itself a class, has a method of this name."""
    try:
        return callable(getattr(value, name, None)) and not isinstance(value, type)
    except Exception:  # e.g. an object that looks up attributes as keys
        return False


def reads_rows(kind: type) -> bool:
    """Return True for mappings indexed and iterated by rows, as a TensorDict is. Their truth value is an error."""
    return issubclass(kind, Mapping) and hasattr(kind, "__torch_function__")


# -- traversal ---------------------------------------------------------------------------------------------------------


def children(tree: object) -> list[Any] | None:
    """Return the parts of a list, tuple, namedtuple, mapping or dataclass instance; None for a leaf.

    Example:
        >>> children({"a": 1, "b": 2}), children((3, 4)), children("ab")
        ([1, 2], [3, 4], None)
    """
    if isinstance(tree, (list, tuple)):
        return list(tree)
    if isinstance(tree, Mapping):
        return [tree[key] for key in tree.keys()]  # noqa: SIM118 - a TensorDict iterates over its rows
    return [getattr(tree, name) for name in field_names(tree)] if is_dataclass_instance(tree) else None


def rebuild(template: Any, parts: Samples) -> Any:
    """Create a structure of ``template``'s type with these parts, in the order of `children`.

    A type that cannot be rebuilt becomes a plain list, tuple or dict.

    Example:
        >>> from collections import OrderedDict
        >>> rebuild(OrderedDict(a=1, b=2), [10, 20])["b"], rebuild((1, 2), [3, 4])
        (20, (3, 4))
    """
    kind = type(template)
    if kind is list or kind is tuple:
        return kind(parts)
    if kind is dict:
        return dict(zip(template, parts, strict=True))
    if isinstance(template, Mapping):
        plain: Any = dict(zip(template.keys(), parts, strict=True))
    elif isinstance(template, (list, tuple)):
        plain = list(parts) if isinstance(template, list) else tuple(parts)
    else:
        # Not `dataclasses.replace`, which rejects ``init=False`` fields and repeats ``__post_init__``.
        rebuilt = _copy(template)
        for name, part in zip(field_names(template), parts, strict=True):
            object.__setattr__(rebuilt, name, part)  # even if frozen
        return rebuilt
    try:
        if isinstance(template, tuple) or not isinstance(template, (list, MutableMapping)):
            return kind._make(plain) if hasattr(kind, "_make") else kind(plain)
        # A copy preserves what the constructor may not accept: a defaultdict's factory, extra attributes.
        rebuilt = _copy(template)
        if isinstance(plain, dict):
            own = getattr(rebuilt, "__dict__", {})
            if not isinstance(template, dict):  # a copy shares the dict in which the class keeps its items
                own.update({name: copy.copy(held) for name, held in own.items() if isinstance(held, dict)})
            # A class may keep its items as attributes, too.
            own.update({name: plain[name] for name in own.keys() & plain if own[name] is template[name]})
            # Like torch, bypass the ``__setitem__`` of a user's dict, which may validate its values. A Counter adds.
            (dict if isinstance(template, Counter) else kind).update(rebuilt, plain)
        else:
            for position, part in enumerate(plain):
                rebuilt[position] = part
        return rebuilt
    except Exception as error:  # the user's class
        pass_on(error)
        return plain


def _copy(template: object) -> Any:
    """Make a shallow copy; an empty one if the class's ``__copy__``, written for samples, fails on parts of a batch."""
    try:
        return copy.copy(template)
    except Exception as error:
        # A TypeError of a dataclass means that it cannot be copied. Other classes may wrap their contents.
        is_failed = is_dataclass_instance(template) and not isinstance(error, TypeError)
        if is_from_outside(error) or not (is_failed or isinstance(template, dict)):
            raise
    kind: Any = type(template)
    blank = kind.__new__(kind)
    getattr(blank, "__dict__", {}).update(getattr(template, "__dict__", {}))  # empty for classes with slots
    return blank


def map_leaves(
    fn: Callable[[Any], object], tree: object, own: str | None = None, skip: frozenset[type] = frozenset()
) -> Any:
    """Apply ``fn`` to every leaf and keep the structure.

    An object that occurs twice is mapped once. Unchanged parts may be returned as they are. Container types and key
    order are preserved if possible.

    Args:
        fn: called with each leaf, at most once per object.
        tree: any structure without cycles.
        own: name of a method; containers whose class has it are leaves.
        skip: types of leaves to leave unchanged: 131,000 ints in lists take 8 ms instead of 480.

    Example:
        >>> map_leaves(lambda leaf: leaf * 10, {"a": [1, 2], "b": (3,)})
        {'a': [10, 20], 'b': (30,)}
    """
    return _mapped(tree, fn, own, skip, {})


_STRUCTURES = (list, tuple, Mapping)

# By `id`, each object and its image. The reference to the object keeps the `id` unique: a mapping may create its values
# on access.
_Seen = dict[int, tuple[Any, Any]]


def _mapped(tree: Any, fn: Callable[[Any], Any], own: str | None, skip: frozenset[type], seen: _Seen) -> Any:
    """Implement `map_leaves`. Not a closure, whose cycle would keep the batch until the collector runs."""
    kind = type(tree)
    if kind in skip:
        return tree
    entry = seen.get(id(tree))
    if entry is not None:
        return entry[1]
    parts: Samples | None = None
    if kind is list or kind is tuple:
        parts = tree
    elif kind is dict:
        parts = list(tree.values())
    elif isinstance(tree, _STRUCTURES) or hasattr(kind, "__dataclass_fields__"):
        parts = None if own is not None and has_own(tree, own) else children(tree)
    if parts is None:
        mapped = fn(tree)
    elif skip.issuperset(map(type, parts)):
        mapped = tree
    else:
        new = [_mapped(part, fn, own, skip, seen) for part in parts]
        mapped = tree if all(map(operator.is_, parts, new)) else rebuild(tree, new)
    seen[id(tree)] = tree, mapped
    return mapped


# -- object graphs -----------------------------------------------------------------------------------------------------

MOST = 2000
"""Maximum number of objects to search, nearest first (about 2 ms, once per batch)."""

MANY = 200
"""Maximum number of items of a list or dict to search: longer ones are data rather than a pipeline."""

_LEAVES = frozenset(
    (str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(Ellipsis))
    + (np.ndarray, np.dtype, ModuleType, BuiltinFunctionType, set, frozenset, random.Random)
)

Children = Iterator[tuple[str, Any]]


def reachable(
    root: object, children: Callable[[Any], Children], name: str = "", most: int = MOST, deepest: int = MOST
) -> Children:
    """Yield an object and those that it refers to, directly or indirectly, nearest first, each with its path.

    ``children(object)`` yields (path suffix, child) pairs, lazily. Numbers, texts, arrays and modules are skipped.
    ``most`` limits the number of objects, ``deepest`` their distance from ``root``.
    """
    seen: dict[int, Any] = {id(root): root}  # references keep the ids unique
    queue = deque([(name, root, 0)])
    while queue:
        path, obj, depth = queue.popleft()
        yield path, obj
        for end, child in children(obj) if depth < deepest else ():
            is_leaf = type(child) in _LEAVES or issubclass(type(child), np.generic)
            if not is_leaf and id(child) not in seen and len(seen) < most:
                seen[id(child)] = child
                queue.append((path + end, child, depth + 1))


def parts(obj: Any, most: int = MANY) -> Children:
    """Yield the contents of an object, at most ``most`` items, as (path suffix, child) in a reproducible order."""
    kind = type(obj)
    if issubclass(kind, (list, tuple, deque)):
        yield from ((f"[{number}]", child) for number, child in enumerate(tuple(islice(obj, most))))
    elif issubclass(kind, dict):
        for number, (key, child) in enumerate(tuple(islice(obj.items(), most))):
            yield f"[{key!r}]" if type(key) in (str, int) else f"[{number}]", child
    elif issubclass(kind, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    if not issubclass(kind, type):
        yield from attributes(obj)


def attributes(obj: object) -> Children:
    """Yield the instance attributes of an object without running code of its class."""
    members: dict[Any, Any] = {}
    with suppress(Exception):
        members = object.__getattribute__(obj, "__dict__").copy()
    yield from ((f".{name}", members[name]) for name in sorted(name for name in members if type(name) is str))
    for base in type(obj).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            with suppress(AttributeError):  # not assigned, or private, whose name is mangled
                yield f".{name}", object.__getattribute__(obj, name)


# -- arrays as tensors -------------------------------------------------------------------------------------------------


class TensorBatch:
    """Arrays and tensors, created by this library, to be converted to tensors by the process that uses the batch."""

    __slots__ = ("arrays",)

    def __init__(self, arrays: object) -> None:
        self.arrays = arrays

    def to_torch(self) -> Any:
        """Return the tensors, over the same memory."""
        return to_torch(self.arrays)

    def __reduce__(self) -> Any:
        return TensorBatch, (self.arrays,)


def to_torch(tree: Any) -> Any:
    """Convert the NumPy arrays and scalars in a structure to torch tensors over the same memory.

    Arrays that torch cannot share are copied; those of strings, objects or dates stay as they are, like all other
    leaves. A `TensorBatch` becomes its tensors.

    Example:
        >>> to_torch({"x": np.ones(2, np.float32), "name": ["a", "b"]})
        {'x': tensor([1., 1.]), 'name': ['a', 'b']}
    """
    if type(tree) is TensorBatch:
        tree = tree.arrays
    kind = type(tree)
    # Fast path for most batches: 2 us for two arrays instead of 9.
    arrays: Any = (tree,) if kind is np.ndarray else ()
    if kind in _FLAT:
        arrays = tree.values() if kind is dict else tree
        if set(map(type, arrays)) != _ARRAYS or len(set(map(id, arrays))) != len(tree):
            arrays = ()
    if not arrays:
        return map_leaves(_leaf_to_torch, tree, skip=_atoms_and_tensors())
    import torch

    leaves: Any = []
    for array in arrays:
        if array.flags.carray and array.dtype.num in TORCH_TAKES and array.dtype.isnative and array.size:
            leaves.append(torch.from_numpy(array))
        else:
            leaves.append(_other_to_torch(array))
    if kind is dict:
        return dict(zip(tree, leaves, strict=True))
    return leaves[0] if kind is np.ndarray else kind(leaves)


@functools.cache
def _atoms_and_tensors() -> frozenset[type]:
    import torch

    return ATOMS | {torch.Tensor}


def _leaf_to_torch(leaf: object) -> Any:
    if type(leaf) in (np.ndarray, TensorBatch):
        return to_torch(leaf)
    return _other_to_torch(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf


def _other_to_torch(array: Any) -> Any:
    """Convert an array or scalar that torch may not accept as it is."""
    check_unmasked(array)
    if not torch_has(array.dtype):
        return array
    import torch

    tensor = torch.from_numpy(_for_torch(np.asarray(array)))
    # The strides of NumPy's empty arrays vary, so torch sets its own.
    return tensor if array.size else torch.empty(array.shape, dtype=tensor.dtype, device="cpu")


def _for_torch(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    size, flags = array.itemsize, array.flags
    # Not only for byte order: np.ulonglong is not np.uint64 on Linux, and torch does not know it.
    plain = np.dtype(f"{array.dtype.kind}{size}")
    # torch warns about read-only memory and rejects the other cases.
    shared = flags.writeable and flags.aligned and array.dtype.isnative
    if shared and all(stride >= 0 and stride % size == 0 for stride in array.strides):
        return array.view(plain)
    return np.array(array, dtype=plain, order="C")


def torch_has(dtype: Dtype) -> bool:
    """Return True if torch has a dtype of this layout.

    Example:
        >>> torch_has(np.dtype("uint16")), torch_has(np.dtype("U3"))
        (True, False)
    """
    return f"{dtype.kind}{dtype.itemsize}" in _TORCH_HAS


# -- tensors and arrays over the same memory ---------------------------------------------------------------------------

if TYPE_CHECKING:
    import torch

dtype_of = attrgetter("dtype")

NUMPY_NAMES = {np.dtype(name).name for name in _TORCH_HAS}
"""Names of the dtypes that NumPy and torch have, which both call the same."""


def stack_tensors(tensors: Samples, empty: Empty, dtype: Dtype | None = None) -> Any:
    """Stack torch tensors as `sharded_loader.batching.default.stack` does; a NumPy array if NumPy has the dtype."""
    torch: Any = sys.modules["torch"]
    if dtype is None and torch.is_grad_enabled() and is_plain(tensors) and len(set(map(dtype_of, tensors))) == 1:
        # Fast path: torch itself detects a mismatch, which is then explained below. 256 tensors of 3 KB: 155 us;
        # checking the other traits takes 80 more.
        out, tensor_out = empty_tensor((len(tensors), *tensors[0].shape), tensors[0].dtype, empty)
        try:
            torch.stack(tuple(tensors), out=tensor_out)
            return tensor_out if out is None else out
        except RuntimeError as error:
            pass_on(error)
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


def check_no_grad(tensors: Samples) -> None:
    """Reject tensors that require grad with a `BatchifyError`: a batch is data."""
    if any(map(attrgetter("requires_grad"), tensors)):
        position = [bool(tensor.requires_grad) for tensor in tensors].index(True)
        raise BatchifyError(
            f"a tensor that requires grad (sample {position} of the batch) cannot go into a batch",
            "return it from the dataset with .detach()",
        )


def is_plain(tensors: Samples) -> bool:
    """Return True for dense tensors of torch's own class in host memory, whose bytes can be written anywhere."""
    torch: Any = sys.modules["torch"]
    if set(map(type, tensors)) != {torch.Tensor}:
        return False
    first = tensors[0]
    return bool(first.is_cpu) and first.layout is torch.strided and not (first.is_quantized or first.is_nested)


def is_column(tensor: Any) -> bool:
    """Return True for a tensor whose rows can be copied bytewise."""
    if not is_tensor(tensor) or not is_plain([tensor]):
        return False
    return bool(tensor.ndim) and not (tensor.requires_grad or tensor.is_conj() or tensor.is_neg())


def numpy_can(tensors: Samples) -> bool:
    """Return True if these tensors can be read as NumPy arrays without a copy."""
    return all(numpy_dtype(tensor.dtype) is not None and is_plain([tensor]) for tensor in tensors)


def dtype_name(dtype: object) -> str:
    """Return NumPy's name of a torch dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@functools.cache  # called for each column of each batch
def numpy_dtype(dtype: object) -> Dtype | None:
    """Return the NumPy dtype of a torch dtype; None if NumPy has none.

    Example:
        >>> import torch
        >>> numpy_dtype(torch.float32), numpy_dtype(torch.bfloat16)
        (dtype('float32'), None)
    """
    return np.dtype(name) if (name := dtype_name(dtype)) in NUMPY_NAMES else None


def as_numpy(tensor: torch.Tensor) -> Array:
    """Return the memory of a plain host tensor as an array; as integers of the same size if NumPy lacks the dtype.

    Example:
        >>> import torch
        >>> as_numpy(torch.ones(2, dtype=torch.bfloat16))
        array([16256, 16256], dtype=int16)
    """
    if numpy_dtype(tensor.dtype) is not None:
        return tensor.numpy()
    torch: Any = sys.modules["torch"]
    return tensor.view(getattr(torch, f"int{8 * tensor.dtype.itemsize}")).numpy()


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, empty: Empty) -> tuple[Array | None, torch.Tensor]:
    """Create a host tensor over memory from ``empty``; return the array (None if NumPy lacks the dtype) and it."""
    torch: Any = sys.modules["torch"]
    if (numpy_equivalent := numpy_dtype(dtype)) is not None:
        array = empty(shape, numpy_equivalent)
        return array, torch.from_numpy(array)
    # bfloat16, float8, complex32: memory of integers of the same size.
    memory = empty(shape, np.dtype(f"i{dtype.itemsize}"))
    # The strides of NumPy's empty arrays vary, so torch sets its own.
    return None, torch.from_numpy(memory).view(dtype) if memory.size else torch.empty(shape, dtype=dtype, device="cpu")
