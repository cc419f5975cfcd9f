"""`ConcatDataset`: several datasets as one.

What can go wrong: a batch whose samples come from parts of different structure is a ValueError that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.data.base import Dataset, Indices, check_dataset
from sharded_loader.data.bulk import checked_index, checked_indices, chosen, gather, offered_if, read_many, translated
from sharded_loader.data.merging import NOT_MERGED, Chunk, merge
from sharded_loader.data.overrides import offers


def _all_have(name: str) -> Callable[[Any], bool]:
    return lambda self: all(offers(part, name) for part in self.__dict__.get("_parts", [None]))


def _any_has(name: str) -> Callable[[Any], bool]:
    return lambda self: any(hasattr(part, name) for part in self.__dict__.get("_parts", []))


class ConcatDataset(Dataset):
    """Several datasets as one, one after the other; nested ones (``a + b + c``) are flattened.

    Bulk reading exists where every part has it. ``get_batch`` of indices that lie in one part is that part's;
    of indices in several parts it is the default batchify of their samples (put together by columns, where all
    parts are `ArrayDataset`, or subsets of one, with columns of the same names, dtypes and shapes).

    Args:
        datasets: at least one; anything with ``__getitem__`` and ``__len__``.

    Raises:
        TypeError: a part cannot be indexed.
        ValueError: no parts.

    Example:
        >>> list(ConcatDataset(["ab", "c"]))
        ['a', 'b', 'c']

    Source of the idea: ``torch.utils.data.ConcatDataset``.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        self._parts: list[Any] = []
        for part in datasets:
            part = check_dataset(part, "ConcatDataset")
            self._parts += part._parts if type(part) is ConcatDataset else [part]
        if not self._parts:
            raise ValueError("ConcatDataset was given no datasets: give at least one")
        self._ends = np.cumsum([len(part) for part in self._parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = checked_index(index, len(self))
        number = int(np.searchsorted(self._ends, index, side="right"))
        return self._parts[number][index - self._begin(number)]

    def _begin(self, number: int) -> int:
        return int(self._ends[number - 1]) if number else 0

    @offered_if(_all_have("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: each part reads its own at once."""
        return self._read(indices, checked_indices(indices, len(self)))

    def _read(self, indices: Sequence[int], where: np.ndarray[Any, Any]) -> list[Any]:
        outer = translated(where.tolist(), indices)
        owners = np.searchsorted(self._ends, where, side="right")
        samples: list[Any] = [None] * len(where)
        for number in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == number).tolist()
            begin = self._begin(number)
            inner = [outer[k] - begin for k in positions]
            read = read_many(self._parts[number], chosen(outer, inner, positions))
            for position, sample in zip(positions, read, strict=True):
                samples[position] = sample
        return samples

    @offered_if(_all_have("get_batch"))
    def get_batch(self, indices: Indices) -> Any:
        """A finished batch."""
        return self._gather(indices, new_array)

    @offered_if(_all_have("get_batch"))
    def _gather(self, indices: Indices, empty: Empty) -> Any:
        where = checked_indices(indices, len(self))
        owners = np.searchsorted(self._ends, where, side="right")
        present = np.unique(owners).tolist()
        if len(present) == 1:
            return gather(self._parts[present[0]], where - self._begin(present[0]), empty)
        chunks = []
        for number in present:
            positions = np.flatnonzero(owners == number)
            chunks.append(Chunk(self._parts[number], where[positions] - self._begin(number), positions))
        batch = merge(chunks, empty)
        if batch is not NOT_MERGED:
            return batch
        return default_batchify_fn.assemble(self._read(where.tolist(), where), empty)

    @offered_if(_any_has("set_epoch"))
    def set_epoch(self, epoch: int) -> None:
        """Tell the parts that care which epoch is read."""
        for part in self._parts:
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._parts))
