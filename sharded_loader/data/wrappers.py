"""How datasets read that are made of other datasets.

    Outer            around other datasets
      Wrapper        around one other dataset
        View         some of its samples, by translated indices: `SimpleDataset`, `SubsetDataset`
        Transformed  its samples through a function: `TransformDataset`
        Remembered   its samples, kept in memory once they have been read: `CachedDataset`
      Joined         several others, one after the other: `ConcatDataset`

The classes here only read. `sharded_loader.data.datasets` gives them the methods of a `Dataset`, which in turn make
these classes. Names and docstrings for users are there. A wrapper has ``set_epoch``, ``get_batch`` and
``__getitems__`` exactly where what it wraps has them.

A cache keeps every sample until ``max_bytes`` are full, and none is evicted: when each epoch visits all samples in a
fresh random order, every policy hits equally often. Each process has its own entries, so ``n`` worker processes hold up
to ``n * max_bytes``. Threads share one cache.

What can go wrong: an index out of range is an IndexError that says the length. The object that a cache returns is the
one that it keeps: if you change it in place, you change it for the next epoch too. What is random or depends on
``set_epoch`` below the cache stays as it was when the sample was read.
"""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from sharded_loader.base.checks import bytes_of_text
from sharded_loader.base.described import an, brief, briefs
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.batching.tensors import as_numpy, is_column
from sharded_loader.batching.tree import is_tensor, map_leaves
from sharded_loader.data.bulk import (
    Indices,
    Int64s,
    bulk,
    check_one_index,
    checked_index,
    checked_indices,
    gather,
    listed,
    new_rows,
    read_many,
)
from sharded_loader.data.columns import check_dataset
from sharded_loader.data.seeding import each_by_its_key, handed_out, next_level, transform_seed, translated


class Outer:
    """Around other datasets: forwards ``set_epoch`` where one of them has it."""

    _dataset: Any
    _part: Callable[[slice], Any]  # of `Dataset`: the samples of a slice

    @property
    def _inside(self) -> Any:
        return (self._dataset,)

    @bulk
    def set_epoch(self, epoch: int) -> None:
        """Tell the datasets inside which epoch is read."""
        for one in self._inside:
            if hasattr(one, "set_epoch"):
                one.set_epoch(epoch)


class Wrapper(Outer):
    """Around one other dataset."""

    def __len__(self) -> int:
        return len(self._dataset)


class View(Wrapper):
    """Samples of the other dataset, by translated indices. Subclasses write `_one` and `_inner`, not ``__getitem__``.

    A ``__getitem__`` that is not of the same class as the bulk methods is an override, and they are not used.
    """

    _one: Callable[[Any], Any]  # the sample at one index
    _inner: Callable[[Indices], Int64s]  # indices into the wrapped dataset

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        return listed(self._dataset.__getitems__(translated(self._inner(indices).tolist(), indices)))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        return gather(self._dataset, self._inner(indices), empty)


# -- through a function ------------------------------------------------------------------------------------------------


class Transformed(Wrapper):
    """Samples of the other dataset, each passed through a function."""

    def __init__(self, dataset: Any, fn: Callable[..., Any], seeded: bool = False) -> None:
        self._dataset = check_dataset(dataset, "TransformDataset")
        if not callable(fn):
            raise TypeError(f"transform was given {fn!r}, which is not callable: give a function of a sample")
        self._fn = fn
        self._level = next_level(dataset, _level_of) if seeded else None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        check_one_index(index)
        return self._apply(self._dataset[index])

    def _apply(self, sample: Any) -> Any:
        fields = sample if isinstance(sample, tuple) else (sample,)
        if self._level is None:
            return self._fn(*fields)
        with transform_seed(self._fn, self._level):
            return self._fn(*fields)

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: read at once, then transformed one by one."""
        indices = translated(indices, indices)
        samples = read_many(self._dataset, indices)  # which hands out a copy: these are looked at again
        with each_by_its_key(indices) as turn_to:
            for position, sample in enumerate(samples):
                turn_to(position)
                samples[position] = self._apply(sample)
        return samples

    def __repr__(self) -> str:
        return f"{brief(self._dataset)}.transform({self._fn!r}{'' if self._level is None else ', seeded=True'})"


def _level_of(dataset: Any) -> int | None:
    return dataset._level if isinstance(dataset, Transformed) else None


class First:
    """``fn`` of the first field of a sample."""

    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, first: Any, *others: Any) -> Any:
        return (self.fn(first), *others) if others else self.fn(first)

    def __repr__(self) -> str:
        return f"first: {self.fn!r}"


# -- kept in memory ----------------------------------------------------------------------------------------------------


class _Store:
    """The entries of one process. Pickled, it is an empty one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # a signal handler, or a finalizer, may read a sample in between
        self.entries: dict[int, Any] = {}
        self.used = 0.0

    def __reduce__(self) -> Any:
        return _Store, ()


_MISS = object()


class Remembered(Wrapper):
    """The samples of the other dataset, kept in memory once they have been read."""

    def __init__(self, dataset: Any, max_bytes: int | str | None = None) -> None:
        self._dataset = check_dataset(dataset, "CachedDataset")
        self._max_bytes = None if max_bytes is None else bytes_of_text(max_bytes, 0, "0 or more, or None for no bound")
        self._own_store = _Store()

    @property
    def _store(self) -> _Store:
        if self._own_store.pid != os.getpid():
            self._own_store = _Store()
        return self._own_store

    @property
    def cached(self) -> int:
        """The number of samples that this process keeps."""
        return len(self._store.entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = checked_index(index, len(self._dataset))
        sample = self._store.entries.get(index, _MISS)
        return self._keep(index, self._dataset[index]) if sample is _MISS else sample

    def _keep(self, index: int, sample: Any) -> Any:
        """Keep a sample if there is room; returns the one that is kept, if another thread was faster."""
        size = 0.0
        if self._max_bytes is not None:
            sample, size = own_copy(sample)
        store = self._store
        with store.lock:
            if index in store.entries:
                return store.entries[index]
            if self._max_bytes is None or store.used + size <= self._max_bytes:
                store.entries[index] = sample
                store.used += size
        return sample

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: those not yet kept are read at once."""
        where = checked_indices(indices, len(self._dataset)).tolist()
        entries = self._store.entries
        first: dict[int, int] = {}  # index -> position of its first occurrence: the only one that is read
        for position, index in enumerate(where):
            if index not in entries:
                first.setdefault(index, position)
        fresh = self._dataset.__getitems__(translated(first, indices, list(first.values()))) if first else []
        read = {index: self._keep(index, sample) for index, sample in zip(first, fresh, strict=True)}
        return [read[index] if index in read else entries[index] for index in where]

    def __repr__(self) -> str:
        return f"{brief(self._dataset)}.cache({'' if self._max_bytes is None else self._max_bytes})"


def own_copy(sample: Any) -> tuple[Any, float]:
    """A sample in memory of its own, also where it was a view of a larger array; and about how many bytes it takes.

    Example:
        >>> copy, size = own_copy((np.zeros(10_000)[:1000], "label"))
        >>> copy[0].shape, copy[1], 8000 <= size < 8500
        ((1000,), 'label', True)
    """
    try:  # pickle would write the whole memory that a tensor is a view of
        pickled = pickle.dumps(map_leaves(lambda leaf: leaf.clone() if is_tensor(leaf) else leaf, sample), 5)
        return pickle.loads(pickled), len(pickled)
    except Exception as error:
        warnings.warn(
            f"cache(max_bytes=...) keeps copies that pickle makes, and it cannot copy {an(type(sample))} "
            f"({error}): this sample is read again each time. cache() without max_bytes keeps the samples themselves",
            stacklevel=2,
        )
        return sample, float("inf")


# -- one after the other -----------------------------------------------------------------------------------------------


class Joined(Outer):
    """Several datasets as one, one after the other."""

    def __init__(self, datasets: Iterable[Any]) -> None:
        self._parts = [check_dataset(part, "ConcatDataset") for part in datasets]
        if not self._parts:
            raise ValueError("ConcatDataset was given no datasets: give at least one")
        *self._begins, self._length = accumulate(map(len, self._parts), initial=0)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = checked_index(index, self._length)
        number = bisect_right(self._begins, index) - 1
        return self._parts[number][index - self._begins[number]]

    @property
    def _inside(self) -> Any:
        return self._parts

    def _chunks(self, indices: Indices) -> list[tuple[Any, Int64s, Int64s]]:
        """Which samples lie in which part: the part, where in the part, and where in the batch."""
        where = checked_indices(indices, self._length)
        owners = np.searchsorted(self._begins, where, side="right") - 1
        places = [(number, np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
        return [(self._parts[number], where[place] - self._begins[number], place) for number, place in places]

    @bulk
    def __getitems__(self, indices: Indices) -> list[Any]:
        """Many samples: each part reads its own at once."""
        outer = handed_out(indices)
        outer = translated(outer, outer)
        samples: list[Any] = [None] * len(outer)
        for part, inner, place in self._chunks(indices):
            chosen = place.tolist()
            found = read_many(part, translated(inner.tolist(), outer, chosen))
            for position, sample in zip(chosen, found, strict=True):
                samples[position] = sample
        return samples

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        chunks = self._chunks(indices)
        if len(chunks) == 1:
            return gather(chunks[0][0], chunks[0][1], empty)
        batch = None
        if chunks:
            batches = [gather(part, inner, new_array) for part, inner, _ in chunks]
            batch = _merged(batches, [place for _, _, place in chunks], empty)
        return default_batchify_fn.assemble(Joined.__getitems__(self, indices), empty) if batch is None else batch

    def __repr__(self) -> str:
        return " + ".join(briefs(self._parts))


def _merged(batches: Sequence[Any], places: Sequence[Int64s], empty: Empty) -> Any:
    """Batches of several parts as one, each with its rows in these places.

    None where they are not arrays or tensors of one dtype whose rows have one shape, or lists or dicts of such. Then
    the batch is made of the samples.
    """
    first = batches[0]
    if isinstance(first, np.ndarray) or is_column(first):
        alike = {(type(b), b.dtype, b.shape[1:], is_column(b)) if hasattr(b, "dtype") else None for b in batches}
        if len(alike) > 1 or list(map(len, batches)) != list(map(len, places)):
            return None
        merged, out = new_rows(first, sum(map(len, places)), empty)
        for batch, place in zip(batches, places, strict=True):
            out[place] = batch if isinstance(batch, np.ndarray) else as_numpy(batch)
        return merged
    names = _names(first)
    if names is None or any(_names(batch) != names for batch in batches):
        return None
    fields = [_merged([batch[name] for batch in batches], places, empty) for name in names]
    if any(field is None for field in fields):
        return None
    return dict(zip(names, fields, strict=True)) if isinstance(first, dict) else fields


def _names(batch: Any) -> list[Any] | None:
    """The keys of a batch of several fields."""
    if type(batch) is dict:
        return list(batch)
    return list(range(len(batch))) if type(batch) is list else None
