"""Samples that stay in memory once they have been read: how `CachedDataset` reads, and how large a sample is.

Every sample is kept until ``max_bytes`` are full, and none is evicted: when each epoch visits all samples in a fresh
random order, every policy hits equally often, and this one never copies, sorts or drops anything.

Who owns what: each process its own entries. They travel neither by pickle nor by fork (a lock inherited in mid-use
would stay locked for ever), so `n` worker processes hold up to ``n * max_bytes``. Threads share one cache.

What can go wrong: the object that is returned is the one that is kept. If you change a sample in place, you change it
for the next epoch too. What is random or depends on ``set_epoch`` below the cache stays as it was when the sample was
read, so random transforms belong above it.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sharded_loader.batching.stack import is_plain
from sharded_loader.batching.tree import children, is_tensor, map_leaves
from sharded_loader.data.bulk import checked_index, checked_indices, has, offered_if, translated
from sharded_loader.data.columns import check_dataset
from sharded_loader.data.wrappers import Wrapper


class _Store:
    """The entries of one process. Pickled, it is an empty one."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.lock = threading.RLock()  # a signal handler, or a finalizer, may read a sample in between
        self.entries: dict[int, Any] = {}
        self.used = 0

    def __reduce__(self) -> Any:
        return _Store, ()


_MISS = object()


class Remembered(Wrapper):
    """The samples of the other dataset, remembered. `sharded_loader.data.datasets.CachedDataset` is one."""

    def __init__(self, dataset: Any, max_bytes: int | None = None) -> None:
        self._dataset = check_dataset(dataset, "CachedDataset")
        if max_bytes is not None and max_bytes < 0:
            raise ValueError(f"cache(max_bytes={max_bytes}): give 0 or more, or None for no bound")
        self._max_bytes = max_bytes
        self._own_store = _Store()

    @property
    def _store(self) -> _Store:
        if self._own_store.pid != os.getpid():
            self._own_store = _Store()
        return self._own_store

    @property
    def cached(self) -> int:
        """How many samples this process keeps."""
        return len(self._store.entries)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = checked_index(index, len(self._dataset))
        sample = self._store.entries.get(index, _MISS)
        return self._keep(index, self._dataset[index]) if sample is _MISS else sample

    def _keep(self, index: int, sample: Any) -> Any:
        """Keep a sample if there is room; returns the one that is kept, if another thread was faster."""
        if self._max_bytes is None:
            size = 0
        else:
            sample = map_leaves(_own_memory, sample)
            size = estimated_bytes(sample)
        store = self._store
        with store.lock:
            if index in store.entries:
                return store.entries[index]
            if self._max_bytes is None or store.used + size <= self._max_bytes:
                store.entries[index] = sample
                store.used += size
        return sample

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: those not yet kept are read at once."""
        where = checked_indices(indices, len(self._dataset)).tolist()
        entries = self._store.entries
        samples = [entries.get(index, _MISS) for index in where]
        first: dict[int, int] = {}  # index -> position of its first occurrence: the only one that is read
        for position, sample in enumerate(samples):
            if sample is _MISS:
                first.setdefault(where[position], position)
        if not first:
            return samples
        fresh = self._dataset.__getitems__(translated(first, indices, list(first.values())))
        read = {index: self._keep(index, sample) for index, sample in zip(first, fresh, strict=True)}
        return [read[i] if sample is _MISS else sample for i, sample in zip(where, samples, strict=True)]

    def __repr__(self) -> str:
        return f"{self._dataset!r}.cache({'' if self._max_bytes is None else self._max_bytes})"


def estimated_bytes(sample: Any) -> int:
    """About how much memory a sample keeps: of arrays and tensors what they lie in, of other objects what they hold.

    Example:
        >>> 8000 <= estimated_bytes((np.zeros(1000), "label")) < 8500
        True
    """
    return _bytes(sample, set())


def _bytes(value: Any, seen: set[int]) -> int:
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        items = sum(_bytes(item, seen) for item in value.flat) if value.dtype.hasobject else 0
        return items + _owner_bytes(value, seen) + 112
    if is_tensor(value):
        return _storage_bytes(value) + 112
    if isinstance(value, memoryview):
        return _bytes(value.obj, seen) + 184
    size = sys.getsizeof(value, 64)
    if isinstance(value, Mapping):
        size += sum(_bytes(key, seen) for key in value)
    parts = list(value) if isinstance(value, (set, frozenset, deque)) else children(value)
    if parts is not None:
        return size + sum(_bytes(part, seen) for part in parts)
    if hasattr(value, "getbands"):  # a PIL image: its pixels lie in C, where getsizeof does not look
        return size + int(value.width * value.height * len(value.getbands()) * (4 if value.mode in "IF" else 1))
    if hasattr(value, "__dict__"):
        size += sum(_bytes(item, seen) for item in vars(value).values())
    for kind in type(value).__mro__:
        slots = vars(kind).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else slots
        size += sum(_bytes(getattr(value, name), seen) for name in names if hasattr(value, name))
    return size


def _owner_bytes(array: np.ndarray[Any, Any], seen: set[int]) -> int:
    """The bytes of the memory that an array keeps, its own or another object's; 0 if it was counted before."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and isinstance(owner.base, np.ndarray):
        owner = owner.base
    if owner is not array:
        if id(owner) in seen:
            return 0
        seen.add(id(owner))
    behind = getattr(owner, "base", None)
    return int(owner.nbytes) if behind is None else max(int(owner.nbytes), _bytes(behind, seen))


def _storage_bytes(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError, AttributeError):  # sparse, nested, ...
        return int(tensor.numel() * tensor.element_size())


def _own_memory(leaf: Any) -> Any:
    """An array or tensor in memory of its own; a copy, if it is a view of memory that may be larger."""
    if isinstance(leaf, np.ndarray):
        if leaf.base is None:
            return leaf
        return np.array(leaf, order="K") if type(leaf) in (np.ndarray, np.memmap) else leaf.copy(order="K")
    if is_tensor(leaf) and is_plain([leaf]) and not leaf.requires_grad:
        storage = leaf.untyped_storage()
        # Memory that torch did not allocate may be part of a larger array.
        if not storage.resizable() or storage.nbytes() > leaf.numel() * leaf.element_size():
            return leaf.clone()
    return leaf
