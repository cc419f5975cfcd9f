"""Default collation rules, the base class of batchify functions, and stacking.

    fn(samples)                   -> the batch, with torch tensors: for any caller
    fn.assemble(samples, empty)   -> the same with NumPy arrays in memory from ``empty(shape, dtype)``: for the loader

`stack` is the step of the default rules, `Stack` and `Pad` that touches the bytes. It writes the result once, into
memory of the caller's allocator ``empty`` (`numpy.empty`, or a slot of shared memory). For tensors see
`sharded_loader.batching.tree`. Samples that cannot be collated raise a `BatchifyError`, a ValueError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from sharded_loader.base.described import an
from sharded_loader.batching import protocol, tree
from sharded_loader.batching.protocol import Array, BatchifyError, Dtype, Empty, Samples, check_not_empty, new_array


class Batchify:
    """Base class of batchify functions. Subclasses implement `assemble`; calls return torch tensors."""

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """Return the batch as NumPy arrays in memory from ``empty``."""
        raise NotImplementedError

    def __call__(self, samples: Samples) -> Any:
        """Return the batch as torch tensors."""
        # A column of another library may not index like a list: a Series uses its labels.
        values = samples if isinstance(samples, (list, tuple)) else list(samples)
        return tree.to_torch(self.assemble(values, new_array))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class DefaultBatchify(Batchify):
    """The default rules, as one function: `default_batchify_fn`.

    | a sample is | the batch is |
    |---|---|
    | a number, an array, a tensor, a PIL image | one array, first axis the samples |
    | a list of numbers | one array (Gluon) |
    | a tuple, or a list with anything else | a list of fields, each by these rules |
    | a mapping, namedtuple, dataclass | the same type, each field by these rules |
    | a string, bytes, None, any other object | a list of the objects |
    | an object whose class has a static method ``assemble_samples(samples, empty)`` | what that returns |

    Python ints become int64 (uint64 if only that holds them) and floats float64. Dtypes of NumPy and torch are
    preserved.

    Args:
        samples: the samples of one batch, of one structure.

    Returns:
        The batch, with torch tensors.

    Raises:
        ValueError: no samples; shapes or structures differ (names the field and the samples).

    Example:
        >>> default_batchify_fn([(np.zeros(2, np.float32), 0), (np.ones(2, np.float32), 1)])
        [tensor([[0., 0.],
                [1., 1.]]), tensor([0, 1])]
        >>> default_batchify_fn([{"name": "a"}, {"name": "b"}])
        {'name': ['a', 'b']}

    Source of the idea: Gluon's ``default_batchify_fn`` and torch's ``default_collate``.
    """

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """Return the batch as NumPy arrays in memory from ``empty``."""
        types = set(map(type, samples))
        if types == _ARRAYS:
            return stack_arrays(samples, empty)
        if types and types <= PYTHON_NUMBERS:
            return stack_numbers(samples, types, empty)
        kind = "tuple" if types == _TUPLES else _common_kind(samples, types)
        if kind in _VALUES:
            return stack(samples, empty)
        if kind not in _TRAITS:
            protocol.refuse_async(samples, "a field of the samples")
            assemble = getattr(types.pop(), "assemble_samples", None) if len(types) == 1 else None
            return list(samples) if assemble is None else assemble(samples, empty)
        for trait, noun, advice in _TRAITS[kind]:
            if len(set(map(trait, samples))) > 1:
                raise unlike(samples, trait, noun, advice)
        first = samples[0]
        label, names = "[{!r}]", range(len(first)) if kind in _LISTS else first
        if kind == "mapping":
            columns: list[Any] = [list(map(itemgetter(key), samples)) for key in first]
        elif kind == "dataclass":
            label, names = ".{}", tree.field_names(first)
            columns = [list(map(attrgetter(name), samples)) for name in names]
        else:
            columns = list(zip(*samples, strict=True))
            if kind == "namedtuple":
                label, names = ".{}", first._fields
        fields: list[Any] = []
        try:
            for column in columns:
                types = set(map(type, column))
                if types == _ARRAYS:  # the two most common kinds, without a call
                    fields.append(stack_arrays(column, empty))
                elif types <= PYTHON_NUMBERS:
                    fields.append(stack_numbers(column, types, empty))
                else:
                    fields.append(default_batchify_fn.assemble(column, empty))
        except BatchifyError as error:
            raise error.within(label.format(list(names)[len(fields)]))  # noqa: B904 - the same exception, with the field
        return fields if kind in _LISTS else tree.rebuild(first, fields)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A singleton, so that identity survives pickling; instances of subclasses are not.
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__repr__()


default_batchify_fn = DefaultBatchify()


# -- kinds of samples --------------------------------------------------------------------------------------------------

_ARRAYS, _TUPLES = {np.ndarray}, {tuple}

_KINDS: dict[Any, str] = {
    (str, bytes, bytearray): "text",
    (int, float, complex, np.generic): "number",
    np.ndarray: "array",
    Mapping: "mapping",
    list: "list",
}
_VALUES = {"number", "array", "numbers"}
_LISTS = {"list", "tuple"}

_Trait = tuple[Callable[[Any], Any], str, str]

_LENGTH: _Trait = (len, "lengths", "give every sample as many fields")

_TRAITS: dict[str, list[_Trait]] = {
    "list": [_LENGTH],
    "tuple": [_LENGTH],
    "mapping": [(frozenset, "keys", "give every sample the same keys")],
    "namedtuple": [(type, "types", "make them all the same namedtuple")],
    "dataclass": [
        (type, "types", "make them all the same dataclass"),
        (lambda sample: frozenset(tree.field_names(sample)), "fields set", "set the same fields in every sample"),
    ],
}
"""Traits in which all samples of a batch must agree, by kind of structure: see `unlike`."""


def _kind_of(kind: type) -> str:
    """Return the kind that the default rules assign to samples of a type."""
    if issubclass(kind, tuple):
        return "namedtuple" if hasattr(kind, "_fields") and hasattr(kind, "_make") else "tuple"
    for types, name in _KINDS.items():
        if issubclass(kind, types):
            return "object" if name == "mapping" and tree.reads_rows(kind) else name
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclass"
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):  # tensors, PIL images
        return "array"
    return "object"


def _common_kind(samples: Samples, types: set[type]) -> str:
    check_not_empty(samples)
    kinds = set(map(_kind_of, types))
    if "list" in kinds and all(is_numbers(sample) for sample in samples if isinstance(sample, list)):
        kinds = kinds - {"list"} | {"numbers"}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= _VALUES:
        return "array"
    if kinds <= {"text", "object"}:
        return "object"
    raise unlike(samples, type, "types", "make them all alike, or leave the field apart with List")


def unlike(samples: Samples, trait: Callable[[Any], object], noun: str, advice: str) -> BatchifyError:
    """Return the error for samples that differ in a trait such as their keys, naming the first two that differ.

    Example:
        >>> str(unlike(["ab", "cd", "e"], len, "lengths", "make them equal"))
        'samples of different lengths: 2 in sample 0 of the batch, 1 in sample 2: make them equal'
    """
    first, *others = map(trait, samples)
    position, other = next((position, other) for position, other in enumerate(others, 1) if other != first)
    return BatchifyError(
        f"samples of different {noun}: {_shown(first)} in sample 0 of the batch, {_shown(other)} in sample {position}",
        advice,
    )


def _shown(trait: object) -> str:
    if isinstance(trait, frozenset):
        return "{" + protocol.elide(sorted(map(repr, trait)), 8) + "}"
    return trait.__name__ if isinstance(trait, type) else str(trait)


# -- stacking ----------------------------------------------------------------------------------------------------------

_shape_of_array = attrgetter("shape")


def stack(samples: Samples, empty: Empty, dtype: Dtype | None = None) -> Any:
    """Stack n numbers, lists of numbers, arrays or tensors, of one shape, along a new first axis.

    The result has ``dtype``, or by default the dtype to which NumPy promotes the samples' (Python ints are int64,
    floats float64). It is a tensor if NumPy lacks the dtype. A `BatchifyError` rejects different shapes, no samples,
    ints beyond 64 bits, and tensors that require grad.

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
    if tree.are_tensors(types):
        return tree.stack_tensors(samples, empty, dtype)
    numbers = _number_types(samples)
    if numbers is None:
        return stack_arrays(list(map(as_array, samples)), empty, dtype)
    return stack_numbers(samples, numbers, empty, dtype)


# -- arrays ------------------------------------------------------------------------------------------------------------


def is_new(empty: Empty, nbytes: int) -> bool:
    """Return True if the allocator would take new memory for ``nbytes``, so that any other new memory serves as well.

    Example:
        >>> is_new(np.empty, 1000), is_new(lambda shape, dtype: np.zeros(shape, dtype), 1000)
        (True, False)
    """
    return empty is new_array or nbytes < getattr(empty, "least_bytes", 0)


def stack_arrays(arrays: Sequence[Array], empty: Empty, dtype: Dtype | None = None) -> Array:
    """Stack NumPy arrays; see `stack`."""
    first, count = arrays[0], len(arrays)
    shape, target = first.shape, first.dtype if dtype is None else dtype
    if dtype is None:
        if len(set(map(tree.dtype_of, arrays))) > 1 or not target.isnative:
            target = common_dtype(arrays)
        elif 0 < first.nbytes <= JOINED_BYTES and target.num in JOINABLE:
            new = is_new(empty, count * first.nbytes)
            copied = first.nbytes <= COPIED_BYTES and count * first.nbytes <= COPIED_AT_ONCE
            if (new or copied) and list(map(_shape_of_array, arrays)).count(shape) == count:
                joined = join(arrays, (count, *shape), target, None if new else empty)
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
            raise protocol.ragged([array.shape for array in arrays]) from None
        raise
    return out


JOINED_BYTES = 16384
"""Maximum size of samples that are joined as bytes if the batch lies in new memory.

Measured (256 images of 3 KB at random places of 150 MB, reading included, medians of 9, two runs): joined 124 and 174
us, concatenated 220 and 313.
"""

COPIED_BYTES, COPIED_AT_ONCE = 3072, 1 << 20
"""Maximum sizes of samples and batches that are joined even if the bytes must then be copied into given memory.

Measured as above: 256 of 3 KB: joined 194 to 284 us, concatenated 212 to 346. 1,024 of 256 bytes: 325 and 398. 256 of
12 KB: 870 and 684. Large batches lose: 16,384 of 4,000 bytes take 75 and 24 ms.
"""

JOINABLE = {np.dtype(char).num for char in "?bBhHiIlLqQefdgFDG"}
"""NumPy's type numbers of numeric dtypes, whose values are plain bytes."""


def join(parts: Samples, shape: tuple[int, ...], dtype: Dtype, empty: Empty | None) -> Array | None:
    """Concatenate arrays or bytes in memory from ``empty`` (None: new memory); None if one is not contiguous."""
    try:
        if empty is None:
            return np.frombuffer(bytearray().join(parts), dtype).reshape(shape)
        joined = b"".join(parts)
    except TypeError:  # not C-contiguous
        return None
    out = empty(shape, dtype)
    out.reshape(-1).view(np.uint8).data[:] = joined
    return out


def common_dtype(arrays: Sequence[Array]) -> Dtype:
    """Return the native dtype to which these arrays promote; a `BatchifyError` if NumPy has none.

    Example:
        >>> common_dtype([np.zeros(1, ">i4"), np.zeros(1, "f4")])
        dtype('float64')
    """
    dtypes = set(map(tree.dtype_of, arrays))
    try:
        joint = dtypes.pop() if len(dtypes) == 1 else np.result_type(*dtypes)
    except TypeError:
        shown = protocol.elide(sorted(map(str, dtypes)))
        raise BatchifyError(
            f"samples of dtypes that have no common one: {shown}", "convert them to one dtype in the dataset"
        ) from None
    return joint if joint.isnative else joint.newbyteorder("=")


def as_array(sample: Any) -> Array:
    """Return a number, list, array, host tensor or array-like (PIL image) as a NumPy array, without a copy if possible.

    Anything else raises a `BatchifyError`.

    Example:
        >>> as_array([1, 2])
        array([1, 2])
    """
    if isinstance(sample, np.ndarray):
        if type(sample) is not np.ndarray:
            tree.check_unmasked(sample)
        return sample
    if tree.is_tensor(sample):
        tree.check_no_grad([sample])
        if not tree.numpy_can([sample]):
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
            # Usually token ids: checking the type of every number costs more than the conversion.
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


# -- Python's numbers --------------------------------------------------------------------------------------------------

_DTYPES = {complex: np.dtype(complex), float: np.dtype(float), int: np.dtype(np.int64), bool: np.dtype(bool)}
"""Ordered from the widest type."""

PYTHON_NUMBERS = set(_DTYPES)
_NUMBERS = (int, float, complex, np.generic)


def is_numbers(sample: object) -> bool:
    """Return True for a list or tuple that holds only numbers, at any depth, and so becomes one array, as in Gluon.

    Example:
        >>> is_numbers([1, 2.5, True]), is_numbers([[1], [2]]), is_numbers(["a"])
        (True, True, False)
    """
    return _number_types(sample) is not None


def _number_types(sample: Any) -> set[type] | None:
    """Return the types of the numbers in a (nested) sequence; None if it holds anything else."""
    types = set(map(type, sample))
    if types <= PYTHON_NUMBERS:
        return types
    lists = {kind for kind in types if issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields")}
    types -= lists
    if not all(issubclass(kind, _NUMBERS) and not issubclass(kind, (str, bytes)) for kind in types):
        return None
    for item in sample:
        if type(item) in lists:
            inner = _number_types(item)
            if inner is None:
                return None
            types |= inner
    return types


def stack_numbers(numbers: Samples, types: set[type], empty: Empty, dtype: Dtype | None = None) -> Array:
    """Stack numbers, or (nested) lists of numbers, of these types; see `stack`.

    Example:
        >>> stack_numbers([1, 2.5], {int, float}, new_array)
        array([1. , 2.5])
    """
    dtype_of_types = None
    if types <= PYTHON_NUMBERS:  # no NumPy scalars or subclasses; an empty list has no types
        dtype_of_types = _DTYPES[next(filter(types.__contains__, _DTYPES), float)]
    try:
        try:
            array = np.array(numbers, dtype_of_types)
            if array.dtype.hasobject:  # an int subclass beyond 64 bits
                raise OverflowError
        except OverflowError:
            if np.array(numbers, object).min() < 0:  # NumPy 1 would wrap around
                raise
            array = np.array(numbers, np.uint64)
    except OverflowError:
        raise BatchifyError(
            "ints that fit neither int64 nor uint64", "store them as strings, as bytes, or in several fields"
        ) from None
    except (ValueError, TypeError) as error:
        shapes = list(map(_shape_of, numbers))
        if len(set(shapes)) > 1:
            raise protocol.ragged(shapes) from None
        raise BatchifyError(
            f"nested lists that are no rectangular array ({error})",
            "pad them with sharded_loader.batchify.Pad, or leave them apart with List",
        ) from None
    if dtype is None and is_new(empty, array.nbytes):
        return array
    out = empty(array.shape, dtype or array.dtype)
    out[...] = array
    return out


def _shape_of(sample: object) -> tuple[int, ...]:
    if not isinstance(sample, (list, tuple)):
        return ()
    return (len(sample), *(_shape_of(sample[0]) if sample else ()))
