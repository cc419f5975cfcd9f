"""The default rules by which a list of samples becomes a batch, and the protocol of all batchify functions.

Two ways to use a batchify object:

    fn(samples)                   -> the batch, with torch tensors: what anyone expects
    fn.assemble(samples, empty)   -> the same structure with NumPy arrays, written straight into memory that
                                     ``empty(shape, dtype)`` gave: what the loader uses, free of torch

`assemble(fn, samples, empty)` takes the second way where there is one; a user's own function is called.

What can go wrong: samples of different shapes or structures, or none at all: a `BatchifyError` (a ValueError)
that names the field within the sample, shows the shapes and says what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.errors import BatchifyError, Empty, check_not_empty, new_array, some
from sharded_loader.batching.stack import is_numbers, stack, stack_arrays
from sharded_loader.batching.tree import (
    dataclass_fields,
    rebuild_dataclass,
    rebuild_mapping,
    rebuild_sequence,
    to_torch,
)
from sharded_loader.data.overrides import known_to
from sharded_loader.memory.allocation import current_empty

# The parameter is Any, because a user's function may say list where ours say Sequence.
BatchifyFn = Callable[[Any], Any]


def assemble(fn: BatchifyFn, samples: Sequence[Any], empty: Empty) -> Any:
    """Make a batch with ``fn``, in memory from ``empty`` where ``fn`` knows how, or calls `sharded_loader.empty`.

    Args:
        fn: one of this module's objects, or any function of a list of samples.
        samples: the samples of one batch.
        empty: called with a shape and a dtype, returns a writable C-contiguous array.

    Returns:
        The batch; arrays may be NumPy arrays (see `sharded_loader.batching.tree.to_torch`).

    Example:
        >>> assemble(default_batchify_fn, [1, 2], np.empty)
        array([1, 2])
        >>> assemble(lambda samples: len(samples), [1, 2], np.empty)
        2
    """
    if has_assemble(fn):
        return fn.assemble(samples, empty)  # type: ignore[attr-defined]
    with current_empty(empty):
        return fn(samples)


def has_assemble(fn: BatchifyFn) -> bool:
    """Whether ``fn.assemble`` makes what ``fn(samples)`` makes: no more derived class overrides ``__call__``.

    Example:
        >>> class Doubled(DefaultBatchify):
        ...     def __call__(self, samples): return 2 * super().__call__(samples)
        >>> has_assemble(default_batchify_fn), has_assemble(Doubled())
        (True, False)
    """
    return known_to(type(fn), "assemble", ["__call__"]) is not None or "assemble" in getattr(fn, "__dict__", ())


def in_field(label: str, fn: BatchifyFn, samples: Sequence[Any], empty: Empty) -> Any:
    """`assemble` for one field of the samples: an error says that it lies there.

    Example:
        >>> in_field("[0]", default_batchify_fn, [1, 2], np.empty)
        array([1, 2])
    """
    try:
        return assemble(fn, samples, empty)
    except BatchifyError as error:
        raise error.within(label)  # noqa: B904 - the same exception, which now knows more


class Batchify:
    """Base of the functions here: subclasses write `assemble`, calling them gives torch tensors."""

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        raise NotImplementedError

    def __call__(self, samples: Sequence[Any]) -> Any:
        """The batch as torch tensors."""
        # The samples may be a column of another library's, which is no list: a Series is indexed by its labels.
        held = samples if isinstance(samples, (list, tuple)) else list(samples)
        return to_torch(self.assemble(held, new_array))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


_SEQUENCE_KINDS = ("list", "tuple")


def _kind_of(kind: type) -> str:
    """What a sample of this type is to the default rules."""
    if issubclass(kind, (str, bytes, bytearray)):
        return "text"
    if issubclass(kind, (int, float, complex, np.generic)):
        return "number"
    if issubclass(kind, np.ndarray):
        return "array"
    if issubclass(kind, Mapping):
        return "mapping"
    if issubclass(kind, tuple):
        return "namedtuple" if hasattr(kind, "_fields") and hasattr(kind, "_make") else "tuple"
    if issubclass(kind, list):
        return "list"
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclass"
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):  # tensors, PIL images
        return "array"
    return "object"


_VALUES = {"number", "array", "numbers"}
_ARRAYS = {np.ndarray}


class DefaultBatchify(Batchify):
    """The default rules, as one function: `default_batchify_fn`.

    | a sample is | the batch is |
    |---|---|
    | a number, an array, a tensor, a PIL image | one array, first axis the samples |
    | a list of numbers | one array (Gluon) |
    | a tuple, or a list that holds anything else | a list of fields, each by these rules |
    | a mapping, namedtuple, dataclass | the same with each field by these rules |
    | a string, bytes, None, any other object | a list of them |

    Python ints become int64 (uint64 where only that holds them), floats float64; dtypes of NumPy and torch
    are kept.

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

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        return self._assemble(samples, empty)

    def _assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        types = set(map(type, samples))
        if types == _ARRAYS:
            return stack_arrays(samples, empty)
        kind = _common_kind(samples, types)
        if kind in _VALUES:
            return stack(samples, empty)
        first = samples[0]
        if kind in _SEQUENCE_KINDS:
            check_same(samples, len, "lengths", "give every sample as many fields")
            return [self._field(f"[{i}]", field, empty) for i, field in enumerate(zip(*samples, strict=True))]
        if kind == "mapping":
            check_same(samples, frozenset, "keys", "give every sample the same keys")
            return rebuild_mapping(first, {k: self._field(f"[{k!r}]", [s[k] for s in samples], empty) for k in first})
        if kind == "namedtuple":
            check_same(samples, type, "types", "make them all the same namedtuple")
            fields = zip(first._fields, zip(*samples, strict=True), strict=True)
            return rebuild_sequence(first, [self._field(f".{name}", field, empty) for name, field in fields])
        if kind == "dataclass":
            check_same(samples, type, "types", "make them all the same dataclass")
            names = [name for name, _ in dataclass_fields(first)]
            check_same(samples, _names_set, "fields set", "set the same fields in every sample")
            columns = [(name, [getattr(sample, name) for sample in samples]) for name in names]
            return rebuild_dataclass(first, [(n, self._field(f".{n}", column, empty)) for n, column in columns])
        return list(samples)

    def _field(self, label: str, samples: Sequence[Any], empty: Empty) -> Any:
        try:
            return self._assemble(samples, empty)
        except BatchifyError as error:
            raise error.within(label)  # noqa: B904 - the same exception, which now knows more

    def __reduce_ex__(self, protocol: Any) -> Any:
        # One object per process: identity survives pickling. A subclass's objects are others.
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__repr__()


default_batchify_fn = DefaultBatchify()


def _common_kind(samples: Sequence[Any], types: set[type]) -> str:
    kinds = {_kind_of(t) for t in types}
    if "list" in kinds and all(is_numbers(sample) for sample in samples if isinstance(sample, list)):
        kinds = kinds - {"list"} | {"numbers"}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds <= _VALUES:
        return "array"
    if kinds <= {"text", "object"}:
        return "object"
    check_same(samples, type, "types", "make them all alike, or leave the field apart with List")
    raise AssertionError("kinds differ only where types do")


def _names_set(sample: Any) -> frozenset[str]:
    return frozenset(name for name, _ in dataclass_fields(sample))


def check_same(samples: Sequence[Any], trait: Callable[[Any], Any], what: str, advice: str) -> None:
    """Refuse samples that differ in a trait such as their keys.

    Raises:
        BatchifyError: names the first two that differ, and how.

    Example:
        >>> check_same(["ab", "cd"], len, "lengths", "make them equal")
    """
    first = trait(samples[0])
    for position, sample in enumerate(samples):
        other = trait(sample)
        if other != first:
            here, there = (_shown(value) for value in (first, other))
            raise BatchifyError(
                f"samples of different {what}: {here} in sample 0, {there} in sample {position} of the batch", advice
            )


def _shown(trait: Any) -> str:
    if isinstance(trait, frozenset):
        return "{" + some(sorted(map(repr, trait)), 8) + "}"
    return trait.__name__ if isinstance(trait, type) else str(trait)
