"""The default rules by which a list of samples becomes a batch, and the base of all batchify functions.

Two ways to use a batchify object:

    fn(samples)                   -> the batch, with torch tensors: what anyone expects
    fn.assemble(samples, empty)   -> the same structure with NumPy arrays, written straight into memory that
                                     ``empty(shape, dtype)`` gave: what the loader uses, free of torch

What can go wrong: samples of different shapes or structures, or none at all: a `BatchifyError` (a ValueError).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.protocol import BatchifyError, Empty, check_not_empty, in_field, new_array, some
from sharded_loader.batching.stack import is_numbers, stack, stack_arrays
from sharded_loader.batching.tree import field_names, rebuild, to_torch


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
        if types == {np.ndarray}:
            return stack_arrays(samples, empty)
        kind = _common_kind(samples, types)
        if kind in _VALUES:
            return stack(samples, empty)
        if kind not in _STRUCTURES:
            return list(samples)
        check_same(samples, *_STRUCTURES[kind])
        first = samples[0]
        if kind in ("list", "tuple"):
            columns = enumerate(zip(*samples, strict=True))
            return [in_field(f"[{i}]", self._assemble, column, empty) for i, column in columns]
        if kind == "mapping":
            named: Any = [(f"[{key!r}]", [sample[key] for sample in samples]) for key in first]
        elif kind == "namedtuple":
            named = [
                (f".{name}", column) for name, column in zip(first._fields, zip(*samples, strict=True), strict=True)
            ]
        else:
            check_same(samples, _names_set, "fields set", "set the same fields in every sample")
            named = [(f".{name}", [getattr(sample, name) for sample in samples]) for name in field_names(first)]
        return rebuild(first, [in_field(label, self._assemble, column, empty) for label, column in named])

    def __reduce_ex__(self, protocol: Any) -> Any:
        # One object per process: identity survives pickling. A subclass's objects are others.
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__repr__()


default_batchify_fn = DefaultBatchify()


# -- what samples are to these rules -----------------------------------------------------------------------------------

_VALUES = {"number", "array", "numbers"}

_STRUCTURES: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "list": (len, "lengths", "give every sample as many fields"),
    "tuple": (len, "lengths", "give every sample as many fields"),
    "mapping": (frozenset, "keys", "give every sample the same keys"),
    "namedtuple": (type, "types", "make them all the same namedtuple"),
    "dataclass": (type, "types", "make them all the same dataclass"),
}
"""Kinds that have fields, and the trait in which all samples of a batch must agree: see `check_same`."""


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
    return frozenset(field_names(sample))


def check_same(samples: Sequence[Any], trait: Callable[[Any], Any], what: str, advice: str) -> None:
    """Reject samples that differ in a trait such as their keys: a `BatchifyError` names the first two that differ.

    Example:
        >>> check_same(["ab", "cd"], len, "lengths", "make them equal")
    """
    first = trait(samples[0])
    for position, sample in enumerate(samples):
        other = trait(sample)
        if other != first:
            raise BatchifyError(
                f"samples of different {what}: {_shown(first)} in sample 0, {_shown(other)} in sample {position} of "
                "the batch",
                advice,
            )


def _shown(trait: Any) -> str:
    if isinstance(trait, frozenset):
        return "{" + some(sorted(map(repr, trait)), 8) + "}"
    return trait.__name__ if isinstance(trait, type) else str(trait)
