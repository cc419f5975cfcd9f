"""torch's ``default_collate`` in bulk: the same batches, at the speed of this library.

    Collate().assemble(samples, empty) -> TensorBatch, or the result of ``default_collate``
    Collate().bulk_of(dataset)         -> function that reads whole batches of columns or of a cache
    batchify_fn_of(collate_fn, ...)    -> batchify function of this library for a ``collate_fn``

Arrays, tensors, numbers, and dicts, tuples and lists of them are stacked into memory from ``empty``. torch's own
function collates everything else: other types and shapes, samples that cannot be collated, and all samples if the
program has changed ``default_collate_fn_map``. Only that function makes this module import torch. What it rejects may
have a class with ``assemble_samples(samples, empty)``, which then makes its part of the batch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np

from sharded_loader import ArrayDataset
from sharded_loader.caching.dataset import StoredDataset
from sharded_loader.caching.store import fits_columns
from sharded_loader.extend import Batchify, BatchifyError, Empty
from sharded_loader.extend import data as core

_SCALARS = map(np.dtype, ("?", "i1", "i2", "i4", "i8", "u1", "f2", "f4", "f8", "c8", "c16"))
_NUMBERS = {int: np.dtype(np.int64), float: np.dtype(float), bool: np.dtype(bool)} | {dt.type: dt for dt in _SCALARS}
"""Types of numbers, and the dtypes of their batches."""


class Collate(Batchify):
    """``default_collate`` as a function of this library.

    Example:
        >>> Collate().assemble([(np.zeros(2), 1), (np.ones(2), 2)], np.empty).to_torch()
        [tensor([[0., 0.],
                [1., 1.]], dtype=torch.float64), tensor([1, 2])]
    """

    def assemble(self, samples: Sequence[object], empty: Empty) -> Any:
        """Return the batch, its arrays in memory from ``empty``."""
        try:
            if samples and not _is_changed() and (found := _collated(samples, empty)) is not None:
                return core.TensorBatch(found)
        except (BatchifyError, IndexError, KeyError, OverflowError, ValueError):
            pass  # leave the error to torch's function
        from torch.utils.data import default_collate
        from torch.utils.data._utils.collate import collate, default_collate_fn_map

        try:
            return default_collate(list(samples))
        except TypeError:
            own = _own_functions(next(iter(samples), None), empty)
            if not own:
                raise
        return collate(list(samples), collate_fn_map={**default_collate_fn_map, **own})

    def bulk_of(self, dataset: object) -> core.Gather | None:
        """Return ``gather(indices, empty)``, as of `sharded_loader.data.bulk.as_bulk`, or None if samples must be read.

        Works for a tensor, a ``TensorDataset``, an `ArrayDataset` of arrays and tensors, a cache of them, or a part.
        """
        data: Any = sys.modules.get("torch.utils.data")
        inner = dataset
        while (part := core.part_of(inner)) is not None:
            inner = part[0]
        is_tensors = data is not None and type(inner) in (data.TensorDataset, sys.modules["torch"].Tensor)
        is_stored = type(inner) is StoredDataset and fits_columns(inner.structure) and _is_collated(inner.structure)
        columns: Any = inner.columns if type(inner) is ArrayDataset else ()
        columns = columns.values() if isinstance(columns, dict) else columns
        is_columns = bool(columns) and all(map(_is_stacked, columns))
        gather = core.as_bulk(dataset) if is_tensors or is_stored or is_columns else None
        if gather is None:
            return None

        def read(indices: object, empty: Empty) -> Any:
            batch = core.NOT_IN_BULK if _is_changed() else gather(indices, empty)
            return batch if batch is core.NOT_IN_BULK else core.TensorBatch(batch)

        return read


def _own_functions(sample: object, empty: Empty) -> dict[Any, Callable[..., Any]]:
    """Return the functions, for torch's table, of classes in a sample that make their own batch."""
    found: dict[Any, Callable[..., Any]] = {}

    def function_of(kind: Any) -> Callable[..., Any]:
        return lambda objects, *, collate_fn_map: core.to_torch(kind.assemble_samples(objects, empty))

    def look(leaf: Any) -> Any:
        if hasattr(type(leaf), "assemble_samples"):
            found[type(leaf)] = function_of(type(leaf))
        return leaf

    core.map_leaves(look, sample)
    return found


def _collated(column: Sequence[Any], empty: Empty) -> Any:
    """Collate values of one type; return None for those that only torch's function can collate."""
    types = set(map(type, column))
    if len(types) != 1:
        return None
    [kind] = types
    if kind is np.ndarray:
        dtypes, dtype = set(map(core.dtype_of, column)), column[0].dtype
        if len(dtypes) > 1 or dtype.num not in core.JOINABLE or dtype.char in "gG":
            return None
        return core.stack_arrays(column, empty) if dtype.isnative else None
    if kind in _NUMBERS:
        return np.array(column, _NUMBERS[kind])
    if kind is str or kind is bytes:
        return column
    if kind is getattr(sys.modules.get("torch"), "Tensor", None):
        is_one_kind = core.is_plain(column) and len(set(map(core.dtype_of, column))) == 1
        return core.stack_tensors(column, empty) if is_one_kind else None  # an error if one requires grad
    is_named = hasattr(kind, "_fields") and issubclass(kind, tuple)
    if kind not in (dict, tuple, list) and not is_named:
        return None
    parts = [list(map(itemgetter(key), column)) for key in column[0]] if kind is dict else zip(*column, strict=True)
    fields = [_collated(part, empty) for part in parts]
    if not fields or any(field is None for field in fields):
        return None
    return dict(zip(column[0], fields, strict=True)) if kind is dict else kind(*fields) if is_named else fields


def _is_collated(node: object) -> bool:
    """Return True if ``default_collate`` turns samples of this structure (`caching.store`) into their columns."""
    if type(node) is not list:
        return False
    kind, first, *rest = node
    if kind in ("dict", "tuple"):
        parts = rest[0] if kind == "dict" else first
        return bool(parts) and all(map(_is_collated, parts))
    is_known = kind in ("array", "scalar", "tensor", "int", "float", "bool")
    return is_known and np.dtype(first).isnative and core.torch_has(np.dtype(first))


def _is_stacked(column: Any) -> bool:
    """Return True if ``default_collate`` turns rows of this column into one array or tensor."""
    if not core.is_gathered(column):
        return core.is_column(column)
    is_known = column.dtype.type in _NUMBERS if column.ndim == 1 else column.dtype.num in core.JOINABLE
    return is_known and column.dtype.isnative and column.dtype.char not in "gG"


def _is_changed() -> bool:
    """Return True if the program has changed the functions that ``default_collate`` calls."""
    collate: Any = sys.modules.get("torch.utils.data._utils.collate")
    if collate is None:
        return False
    own = {kind: getattr(collate, f"collate_{name}_fn", None) for kind, name in _TYPES.items()}
    own[sys.modules["torch"].Tensor] = getattr(collate, "collate_tensor_fn", None)
    return bool(collate.default_collate_fn_map != own)


_TYPES: dict[Any, str] = {
    np.ndarray: "numpy_array",
    (np.bool_, np.number, np.object_): "numpy_scalar",
    float: "float",
    int: "int",
    str: "str",
    bytes: "str",
}
"""Types in torch's unmodified table, besides tensors, and the names of their functions: collate_..._fn."""


class Assembled(Batchify):
    def __init__(self, batchify_fn: Batchify) -> None:
        self._assemble = core.assembler(batchify_fn)

    def assemble(self, samples: Sequence[object], empty: Empty) -> Any:
        batch = self._assemble(samples, empty)
        kinds = set(map(type, batch)) if type(batch) is list else {type(batch)}
        return core.TensorBatch(batch) if kinds == {np.ndarray} else core.to_torch(batch)


def _of_one(collate_fn: Callable[[Any], object], samples: Sequence[object]) -> Any:
    return collate_fn(samples[0])


def batchify_fn_of(collate_fn: Any, *, batched: bool) -> Any:
    """Return the batchify function for a ``collate_fn`` of torch's loader; ``batched`` is False with
    ``batch_size=None``.
    """
    from torch.utils.data import default_collate

    if not batched:
        return partial(_of_one, collate_fn)
    if collate_fn is default_collate:
        return Collate()
    return Assembled(collate_fn) if isinstance(collate_fn, Batchify) else collate_fn
