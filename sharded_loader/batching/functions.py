"""Functions that turn a list of samples into a batch, to compose others from.

    Tuple(Stack(), Pad())([(image, tokens), ...]) -> (images, padded tokens)

Each can be called, and has ``assemble(samples, empty)``, which writes into memory that the caller's allocator gave
(see `sharded_loader.batching.default`). Own and user functions nest freely in `Tuple`, `Dict` and `NamedTuple`. `Pad`
is in `sharded_loader.batching.pad`; users import all of them from `sharded_loader.batchify`.

What can go wrong: samples that do not fit the functions: a `BatchifyError` (a ValueError) that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sharded_loader.batching.default import (
    Batchify,
    BatchifyFn,
    DefaultBatchify,
    assemble,
    check_same,
    default_batchify_fn,
    in_field,
)
from sharded_loader.batching.errors import BatchifyError, Empty, check_not_empty, some
from sharded_loader.batching.stack import is_numbers, stack, to_numpy_dtype

__all__ = [
    "Batchify",
    "BatchifyError",
    "BatchifyFn",
    "DefaultBatchify",
    "Dict",
    "List",
    "NamedTuple",
    "Stack",
    "Tuple",
    "assemble",
    "default_batchify_fn",
]


class Stack(Batchify):
    """Stack the samples along a new first axis.

    Numbers, (nested) lists and tuples of numbers, arrays, tensors and PIL images become one array; strings
    a list; a mapping a mapping of stacks. A sample that is a tuple is one value, not fields: see `Tuple`.

    Args:
        dtype: of the result (NumPy's, or torch's where NumPy has it); None keeps the samples' own.

    Raises:
        ValueError: no samples, or samples of different shapes (shows them, suggests `Pad`).

    Example:
        >>> Stack("float16")([[1, 2], [3, 4]])
        tensor([[1., 2.],
                [3., 4.]], dtype=torch.float16)

    Source of the idea: ``gluonnlp.data.batchify.Stack``.
    """

    def __init__(self, dtype: Any = None) -> None:
        self._dtype = to_numpy_dtype(dtype)

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        if all(isinstance(sample, (str, bytes)) for sample in samples):
            return list(samples)
        if all(isinstance(sample, Mapping) for sample in samples):
            check_same(samples, frozenset, "keys", "give every sample the same keys")
            fields = {k: [sample[k] for sample in samples] for k in samples[0]}
            return {k: in_field(f"[{k!r}]", self, field, empty) for k, field in fields.items()}
        try:
            return stack(samples, empty, self._dtype)
        except BatchifyError as error:
            first = samples[0]
            if not isinstance(first, tuple) or is_numbers(first):
                raise
            raise BatchifyError(
                f"samples are tuples of {len(first)} fields, and Stack takes bare values ({error.problem})",
                f"give a function for each field, Tuple({', '.join(['Stack()'] * min(len(first), 4))}), or leave "
                "batchify_fn out",
            ) from None

    def __repr__(self) -> str:
        return f"Stack({'' if self._dtype is None else self._dtype.name})"


class List(Batchify):
    """Leave the samples apart, as a list of them.

    Example:
        >>> List()(["a", "b"])
        ['a', 'b']

    Source of the idea: ``gluonnlp.data.batchify.List``.
    """

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The samples, as a list."""
        return list(samples)


def _check_callable(fns: Mapping[Any, Any], owner: str) -> None:
    for key, fn in fns.items():
        if not callable(fn):
            raise ValueError(f"{owner}: the function of field {key!r} is {fn!r}, which is not callable: give functions")


class Tuple(Batchify):
    """Batchify the fields of tuple (or list) samples, each with its own function.

    Args:
        fn: the function of the first field, or a list or tuple of all functions.
        *args: the functions of the other fields.

    Returns:
        Calling it gives a tuple, one batch per field.

    Raises:
        ValueError: the functions are neither ``Tuple(a, b)`` nor ``Tuple([a, b])``; on a call, a sample that
            has another number of fields.

    Example:
        >>> Tuple(Stack(), List())([(1, "a"), (2, "b")])
        (tensor([1, 2]), ['a', 'b'])

    Source of the idea: ``gluonnlp.data.batchify.Tuple``.
    """

    def __init__(self, fn: BatchifyFn | Sequence[BatchifyFn], *args: BatchifyFn) -> None:
        if isinstance(fn, (list, tuple)):
            if args:
                raise ValueError(
                    f"Tuple was given a list of functions and {len(args)} more beside it: "
                    "write Tuple(a, b, c) or Tuple([a, b, c])"
                )
            fns: tuple[Any, ...] = tuple(fn)
        else:
            fns = (fn, *args)
        _check_callable(dict(enumerate(fns)), "Tuple")
        self._fns: tuple[BatchifyFn, ...] = fns

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        count = len(self._fns)
        for position, sample in enumerate(samples):
            # A string or an array has a length too, but no fields.
            if not isinstance(sample, (list, tuple)) or len(sample) != count:
                has = f"{len(sample)} fields" if isinstance(sample, (list, tuple)) else f"a {type(sample).__name__}"
                raise BatchifyError(
                    f"Tuple has {count} functions, but sample {position} of the batch is {has}",
                    "give Tuple one function per field of a sample",
                )
        columns = zip(*samples, strict=True)
        return tuple(
            in_field(f"[{i}]", fn, list(column), empty)
            for i, (fn, column) in enumerate(zip(self._fns, columns, strict=True))
        )

    def __repr__(self) -> str:
        return f"Tuple({', '.join(map(repr, self._fns))})"


class Dict(Batchify):
    """Batchify the fields of mapping samples, each with its own function; other keys are left out.

    Args:
        fn_dict: key -> function.

    Returns:
        Calling it gives a dict, one batch per key of ``fn_dict``.

    Raises:
        ValueError: ``fn_dict`` is no dict of functions; on a call, a sample lacks a key.

    Example:
        >>> Dict({"x": Stack()})([{"x": 1, "id": "a"}, {"x": 2, "id": "b"}])
        {'x': tensor([1, 2])}

    Source of the idea: ``gluonnlp.data.batchify.Dict``.
    """

    def __init__(self, fn_dict: Mapping[Any, BatchifyFn]) -> None:
        if not isinstance(fn_dict, Mapping):
            raise ValueError(f"Dict was given {fn_dict!r}: give a dict of functions by key")
        _check_callable(fn_dict, "Dict")
        self._fns = dict(fn_dict)

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        for position, sample in enumerate(samples):
            missing = [k for k in self._fns if k not in sample] if isinstance(sample, Mapping) else list(self._fns)
            if missing:
                has = (
                    f"has keys {some(list(map(repr, sample)), 8)}"
                    if isinstance(sample, Mapping)
                    else (f"is a {type(sample).__name__}")
                )
                raise BatchifyError(
                    f"sample {position} of the batch has no key {missing[0]!r} (it {has})",
                    "give Dict only keys that every sample has",
                )
        return {k: in_field(f"[{k!r}]", fn, [s[k] for s in samples], empty) for k, fn in self._fns.items()}

    def __repr__(self) -> str:
        return f"Dict({self._fns!r})"


class NamedTuple(Batchify):
    """Batchify the fields of namedtuple samples, each with its own function.

    Args:
        container: the namedtuple class of the samples and of the batch.
        fn_info: field name -> function, or a list or tuple of functions in the order of the fields.

    Raises:
        ValueError: ``fn_info`` does not match the fields; on a call, a sample of another type.

    Example:
        >>> from collections import namedtuple
        >>> Pair = namedtuple("Pair", "data label")
        >>> NamedTuple(Pair, {"data": Stack(), "label": List()})([Pair(1, "a"), Pair(2, "b")])
        Pair(data=tensor([1, 2]), label=['a', 'b'])

    Source of the idea: ``gluonnlp.data.batchify.NamedTuple``.
    """

    def __init__(self, container: type, fn_info: Mapping[str, BatchifyFn] | Sequence[BatchifyFn]) -> None:
        fields: tuple[str, ...] = getattr(container, "_fields", ())
        if not (isinstance(container, type) and issubclass(container, tuple) and fields):
            raise ValueError(f"NamedTuple was given {container!r} as container: give a namedtuple class")
        if isinstance(fn_info, Mapping):
            if set(fn_info) != set(fields):
                raise ValueError(
                    f"NamedTuple: {container.__name__} has fields {list(fields)}, functions were given for "
                    f"{list(fn_info)}: give exactly one function per field"
                )
            fns = {name: fn_info[name] for name in fields}
        elif isinstance(fn_info, (list, tuple)):
            if len(fn_info) != len(fields):
                raise ValueError(
                    f"NamedTuple: {container.__name__} has {len(fields)} fields, {len(fn_info)} functions were "
                    "given: give exactly one function per field"
                )
            fns = dict(zip(fields, fn_info, strict=True))
        else:
            raise ValueError(f"NamedTuple was given {fn_info!r}: give a dict, list or tuple of functions")
        _check_callable(fns, "NamedTuple")
        self._container: Any = container
        self._fns = fns

    def assemble(self, samples: Sequence[Any], empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        for position, sample in enumerate(samples):
            if type(sample) is not self._container:
                raise BatchifyError(
                    f"sample {position} of the batch is a {type(sample).__name__}, not a {self._container.__name__}",
                    "make all samples that namedtuple, or use Tuple or Dict",
                )
        columns = zip(*samples, strict=True)
        return self._container._make(
            in_field(f".{name}", fn, list(column), empty)
            for (name, fn), column in zip(self._fns.items(), columns, strict=True)
        )

    def __repr__(self) -> str:
        return f"NamedTuple({self._container.__name__}, {self._fns!r})"
