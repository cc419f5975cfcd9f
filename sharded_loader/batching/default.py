"""The default rules by which a list of samples becomes a batch, and the base of all batchify functions.

Two ways to use a batchify object:

    fn(samples)                   -> the batch, with torch tensors: what anyone expects
    fn.assemble(samples, empty)   -> the same structure with NumPy arrays, written straight into memory that
                                     ``empty(shape, dtype)`` gave: what the loader uses, free of torch

What can go wrong: samples of different shapes or structures, or none at all: a `BatchifyError` (a ValueError).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from sharded_loader.batching.protocol import BatchifyError, Empty, check_not_empty, new_array, refuse_async, some
from sharded_loader.batching.stack import PYTHON_NUMBERS, is_numbers, stack, stack_arrays, stack_numbers
from sharded_loader.batching.tree import field_names, reads_rows, rebuild, to_torch


class Batchify:
    """Base of the functions here: subclasses write `assemble`, calling them gives torch tensors."""

    def __new__(cls, *values: Any, **given: Any) -> Any:
        has_none = cls.__init__ is object.__init__  # which takes everything, because of this method
        known = {} if has_none or not given else inspect.signature(cls.__init__).parameters
        takes_all = any(one.kind is one.VAR_KEYWORD for one in known.values())
        unknown = [*(values if has_none else ()), *(() if takes_all else given.keys() - known)]
        if unknown:
            names = ", ".join(name for name in known if name != "self") or "none"
            raise TypeError(
                f"{cls.__name__} has no argument {', '.join(sorted(map(repr, unknown)))}; it has {names}. How a batch "
                f"is split, read and stored is for the loader: ShardedDataLoader(num_shards=2, num_workers=4)"
            )
        return super().__new__(cls)

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
        types = set(map(type, samples))
        if types == _ARRAYS:
            return stack_arrays(samples, empty)
        if types and types <= PYTHON_NUMBERS:
            return stack_numbers(samples, types, empty)
        kind = "tuple" if types == _TUPLES else _common_kind(samples, types)
        if kind in _VALUES:
            return stack(samples, empty)
        if kind not in _TRAITS:
            refuse_async(samples, "a field of the samples")
            return list(samples)
        for trait, what, advice in _TRAITS[kind]:
            if len(set(map(trait, samples))) > 1:
                raise unlike(samples, trait, what, advice)
        first = samples[0]
        label, names = "[{!r}]", range(len(first)) if kind in _LISTS else first
        if kind == "mapping":
            columns: list[Any] = [list(map(itemgetter(key), samples)) for key in first]
        elif kind == "dataclass":
            label, names = ".{}", field_names(first)
            columns = [list(map(attrgetter(name), samples)) for name in names]
        else:
            columns = list(zip(*samples, strict=True))
            if kind == "namedtuple":
                label, names = ".{}", first._fields
        fields: list[Any] = []
        try:
            for column in columns:
                types = set(map(type, column))
                if types == _ARRAYS:  # the two commonest kinds, without a call
                    fields.append(stack_arrays(column, empty))
                elif types <= PYTHON_NUMBERS:
                    fields.append(stack_numbers(column, types, empty))
                else:
                    fields.append(default_batchify_fn.assemble(column, empty))
        except BatchifyError as error:
            raise error.within(label.format(list(names)[len(fields)]))  # noqa: B904 - the same exception, which now knows more
        return fields if kind in _LISTS else rebuild(first, fields)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # One object per process: identity survives pickling. A subclass's objects are others.
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return "default_batchify_fn" if type(self) is DefaultBatchify else super().__repr__()


default_batchify_fn = DefaultBatchify()


# -- what samples are to these rules -----------------------------------------------------------------------------------

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
        (lambda sample: frozenset(field_names(sample)), "fields set", "set the same fields in every sample"),
    ],
}
"""Kinds that have fields, and the traits in which all samples of a batch must agree: see `unlike`."""


def _kind_of(kind: type) -> str:
    """What a sample of this type is to the default rules."""
    if issubclass(kind, tuple):
        return "namedtuple" if hasattr(kind, "_fields") and hasattr(kind, "_make") else "tuple"
    for types, name in _KINDS.items():
        if issubclass(kind, types):
            return "object" if name == "mapping" and reads_rows(kind) else name
    if hasattr(kind, "__dataclass_fields__"):
        return "dataclass"
    if hasattr(kind, "__array__") or hasattr(kind, "__array_interface__"):  # tensors, PIL images
        return "array"
    return "object"


def _common_kind(samples: Sequence[Any], types: set[type]) -> str:
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


def unlike(samples: Sequence[Any], trait: Callable[[Any], Any], what: str, advice: str) -> BatchifyError:
    """The error for samples that differ in a trait such as their keys. It names the first two that differ.

    Example:
        >>> str(unlike(["ab", "cd", "e"], len, "lengths", "make them equal"))
        'samples of different lengths: 2 in sample 0 of the batch, 1 in sample 2: make them equal'
    """
    first, *others = map(trait, samples)
    position, other = next((position, other) for position, other in enumerate(others, 1) if other != first)
    return BatchifyError(
        f"samples of different {what}: {_shown(first)} in sample 0 of the batch, {_shown(other)} in sample {position}",
        advice,
    )


def _shown(trait: Any) -> str:
    if isinstance(trait, frozenset):
        return "{" + some(sorted(map(repr, trait)), 8) + "}"
    return trait.__name__ if isinstance(trait, type) else str(trait)
