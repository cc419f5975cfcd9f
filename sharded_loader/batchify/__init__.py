"""How samples become a batch: the functions to pass as ``ShardedDataLoader(batchify_fn=...)``.

    Tuple(Stack(), Pad())([(image, tokens), ...]) -> (images, padded tokens)

>>> from sharded_loader.batchify import Pad, Stack, Tuple
>>> tokens, label = Tuple(Pad(pad_val=0), Stack())([([1, 2, 3], 0), ([4], 1)])
>>> tokens.tolist(), label.tolist()
([[1, 2, 3], [4, 0, 0]], [0, 1])

Each can be called, and has ``assemble(samples, empty)``, which writes into memory that the caller's allocator gave
(see `sharded_loader.batching.default`). Functions of this module and of the user nest freely in `Tuple`, `Dict` and
`NamedTuple`.

What can go wrong: samples that do not fit the functions: a `BatchifyError` (a ValueError) that names the field.

For: samples whose fields are not just stacked: of different lengths, or left apart.
Costs: about 340 lines. The core imports nothing of this.
Tests: tests/batchify.
It goes when: programs write these functions themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any, Literal

from sharded_loader import default_batchify_fn
from sharded_loader.batchify.pad import Pad, to_numpy_dtype
from sharded_loader.extend import Batchify, BatchifyError, BatchifyFn, Empty, Samples
from sharded_loader.extend.data import Assemble, assembler, check_not_empty, elide, in_fields, is_numbers, stack, unlike
from sharded_loader.extend.tools import an
from sharded_loader.samplers.packing import Pack

__all__ = ["Dict", "List", "NamedTuple", "Pack", "Pad", "Stack", "Tuple", "default_batchify_fn"]


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

    def __init__(self, dtype: object = None) -> None:
        self._dtype = to_numpy_dtype(dtype)

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        check_not_empty(samples)
        if all(isinstance(sample, (str, bytes)) for sample in samples):
            return list(samples)
        if all(isinstance(sample, Mapping) for sample in samples):
            return _by_key(samples, samples[0], self.assemble, empty, "give every sample the same keys")
        try:
            return stack(samples, empty, self._dtype)
        except BatchifyError as error:
            first = samples[0]
            if not isinstance(first, tuple) or is_numbers(first):
                raise
            text = f"samples are tuples of {len(first)} fields, and Stack takes bare values ({error.problem})"
            each = f"Tuple({', '.join(['Stack()'] * min(len(first), 4))})"
            raise BatchifyError(text, f"give a function for each field, {each}, or leave batchify_fn out") from None

    def __repr__(self) -> str:
        return f"Stack({'' if self._dtype is None else self._dtype.name})"


def _by_key(samples: Samples, keys: Iterable[Any], make: Assemble, empty: Empty, advice: str) -> dict[Any, Any]:
    """Batchify the values of each key with ``make``. Raise a BatchifyError if the samples have different keys."""
    if len(set(map(frozenset, samples))) > 1:
        raise unlike(samples, frozenset, "keys", advice)
    columns = ([sample[key] for sample in samples] for key in keys)
    return dict(zip(keys, in_fields(keys, "[{!r}]", repeat(make), columns, empty), strict=True))


class List(Batchify):
    """Return the samples as a list, without joining them.

    Example:
        >>> List()(["a", "b"])
        ['a', 'b']

    Source of the idea: ``gluonnlp.data.batchify.List``.
    """

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The samples, as a list."""
        return list(samples)


class _FieldWise(Batchify):
    """Base: each field of the samples goes through its own function.

    Subclasses write `_problem`, which says what is wrong with a sample, and `assemble`, which joins the batches of the
    fields.
    """

    _advice: str
    _problem: Callable[[object], str | None]

    def __init__(self, fns: Mapping[Any, BatchifyFn], label: str) -> None:
        for key, fn in fns.items():
            if not callable(fn):
                what = f"the function of field {key!r} is {fn!r}, which is not callable"
                raise ValueError(f"{type(self).__name__}: {what}: give functions")
        self._fns = dict(fns)
        self._makes = list(map(assembler, fns.values()))
        self._label = label  # how errors name a field

    def _in_fields(self, samples: Samples, empty: Empty) -> list[Any]:
        """The batch of each field, in the order of the functions."""
        check_not_empty(samples)
        for position, sample in enumerate(samples):
            if (problem := self._problem(sample)) is not None:
                raise BatchifyError(f"sample {position} of the batch {problem}", self._advice)
        return in_fields(self._fns, self._label, self._makes, self._columns(samples), empty)

    def _columns(self, samples: Samples) -> Iterable[Samples]:
        return map(list, zip(*samples, strict=True))


class Tuple(_FieldWise):
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

    _advice = "give Tuple one function per field of a sample"

    def __init__(self, fn: BatchifyFn | Sequence[BatchifyFn], *args: BatchifyFn) -> None:
        fns: Sequence[Any] = fn if isinstance(fn, (list, tuple)) else (fn, *args)
        if fns is fn and args:
            text = f"Tuple was given a list of functions and {len(args)} more beside it"
            raise ValueError(f"{text}: write Tuple(a, b, c) or Tuple([a, b, c])")
        super().__init__(dict(enumerate(fns)), "[{}]")

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        return tuple(self._in_fields(samples, empty))

    def _problem(self, sample: object) -> str | None:
        if not isinstance(sample, (list, tuple)):  # a string or an array has a length too, but no fields
            return f"is {an(type(sample))}, and Tuple has {len(self._fns)} functions"
        if len(sample) != len(self._fns):
            return f"has {len(sample)} fields, and Tuple has {len(self._fns)} functions"
        return None

    def __repr__(self) -> str:
        return f"Tuple({', '.join(map(repr, self._fns.values()))})"


class Dict(_FieldWise):
    """Batchify the fields of mapping samples, each with its own function.

    A sample with a key that has no function is rejected with an error, so that no field is lost unnoticed. ``rest``
    says what to do with such keys instead. (GluonNLP's ``Dict`` drops them without a word. Write ``rest="drop"`` to
    get its result.)

    Args:
        fn_dict: The function of each key.
        rest: What to do with all other keys. None (default): reject the sample. ``"drop"``: leave them out of the
            batch. ``"keep"``: batchify each with `default_batchify_fn`. A function: batchify each with this function.

    Returns:
        Calling it gives a dict with one batch per key: first the keys of ``fn_dict``, then the other keys in the order
        of the first sample.

    Raises:
        ValueError: ``fn_dict`` is not a dict of functions, or ``rest`` is unknown. On a call: a sample lacks a key of
            ``fn_dict``, a sample has other keys and ``rest`` is None, or the samples have different other keys and
            ``rest`` keeps them.

    Example:
        >>> samples = [{"x": 1, "id": "a"}, {"x": 2, "id": "b"}]
        >>> Dict({"x": Stack()}, rest="drop")(samples)
        {'x': tensor([1, 2])}
        >>> Dict({"x": Stack()}, rest="keep")(samples)
        {'x': tensor([1, 2]), 'id': ['a', 'b']}

    Source of the idea: ``gluonnlp.data.batchify.Dict``.
    """

    _advice = "give Dict the keys that every sample has, and say with rest='keep' or rest='drop' what others become"

    def __init__(
        self, fn_dict: Mapping[Any, BatchifyFn], *, rest: Literal["keep", "drop"] | BatchifyFn | None = None
    ) -> None:
        if not isinstance(fn_dict, Mapping):
            raise ValueError(f"Dict was given {fn_dict!r}: give a dict of functions by key")
        if not (rest in (None, "keep", "drop") or callable(rest)):
            raise ValueError(f"Dict(rest={rest!r}): give 'keep', 'drop', a function, or None to reject other keys")
        super().__init__(fn_dict, "[{!r}]")
        of_rest = default_batchify_fn if rest == "keep" else rest
        self._rest, self._make_rest = rest, assembler(of_rest) if callable(of_rest) else None

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        batch = dict(zip(self._fns, self._in_fields(samples, empty), strict=True))
        if self._make_rest is None:
            return batch
        keys = [key for key in samples[0] if key not in self._fns]
        advice = "give every sample the same keys, or write Dict(..., rest='drop')"
        return batch | _by_key(samples, keys, self._make_rest, empty, advice)

    def _problem(self, sample: object) -> str | None:
        if not isinstance(sample, Mapping):
            return f"is {an(type(sample))}, and Dict has the keys {elide(list(map(repr, self._fns)), 8)}"
        for key in self._fns:
            if key not in sample:
                return f"has no key {key!r} (it has keys {elide(list(map(repr, sample)), 8)})"
        if self._rest is None and len(sample) > len(self._fns):
            others = [repr(key) for key in sample if key not in self._fns]
            return f"has keys for which Dict has no function: {elide(others, 8)}"
        return None

    def _columns(self, samples: Samples) -> Iterable[Samples]:
        return ([sample[key] for sample in samples] for key in self._fns)

    def __repr__(self) -> str:
        return f"Dict({self._fns!r}{'' if self._rest is None else f', rest={self._rest!r}'})"


class NamedTuple(_FieldWise):
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

    _advice = "make all samples that namedtuple, or use Tuple or Dict"

    def __init__(self, container: type, fn_info: Mapping[str, BatchifyFn] | Sequence[BatchifyFn]) -> None:
        fields: tuple[str, ...] = getattr(container, "_fields", ())
        if not (isinstance(container, type) and issubclass(container, tuple) and fields):
            raise ValueError(f"NamedTuple was given {container!r} as container: give a namedtuple class")
        given = fn_info
        if isinstance(given, (list, tuple)) and len(given) == len(fields):
            given = dict(zip(fields, given, strict=True))
        if not isinstance(given, Mapping) or set(given) != set(fields):
            text = f"NamedTuple was given {fn_info!r} for the fields of {container.__name__}"
            raise ValueError(f"{text}: give a dict, list or tuple with exactly one function for each of {list(fields)}")
        super().__init__({name: given[name] for name in fields}, ".{}")
        self._container: Any = container

    def assemble(self, samples: Samples, empty: Empty) -> Any:
        """The batch as NumPy arrays in memory from ``empty``."""
        return self._container._make(self._in_fields(samples, empty))

    def _problem(self, sample: object) -> str | None:
        if type(sample) is self._container:
            return None
        return f"is {an(type(sample))}, not {an(self._container)}"

    def __repr__(self) -> str:
        return f"NamedTuple({self._container.__name__}, {self._fns!r})"
