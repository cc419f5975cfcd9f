"""Randomness that depends on (seed, epoch, sample) and on nothing else.

Every random number of the library comes from a *key*: a 128-bit hash of a few integers and strings. The
order of an epoch is keyed by (seed, epoch), the numbers that one sample draws by (seed, epoch, index), the
global generators of a process worker by (seed, epoch, place of the batch). So neither the pool, nor the
number of workers, nor history can change a stream, and a batch that is made again is the same batch.

    derive_key(*parts) -> key -> philox(*parts)          our own order, ``sample_rng``
                              -> seeded_globals(key)     ``random``, ``numpy.random``, torch (if imported):
                                                         see `sharded_loader.global_generators`

While a batch is read, the thread that reads it has a `SampleScope` that says which sample it is at;
`sample_rng`, `sample_generator` and `sample_seed` look it up. torch is imported only where a generator or a seed
of its own is asked for.

Source of the idea: counter-based generators keyed by their position (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), as JAX and Grain use them.
"""

from __future__ import annotations

import operator
import os
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.global_generators import seeded_globals

try:
    from _blake2 import blake2b  # as hashlib has it, without OpenSSL: 2 ms
except ImportError:
    from hashlib import blake2b

if TYPE_CHECKING:
    import torch

reading = threading.local()
"""``reading.scope``: the batch that this thread reads.

Who sets it puts back what was there before (loaders may nest) in a ``finally`` clause, by a plain assignment: a
Ctrl-C can strike where the ``__exit__`` of a context manager begins, and the scope would stay for ever.
"""


def _begin_afresh() -> None:
    """In a forked child: the sample that the parent's thread is reading is not this process's."""
    reading.scope = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)


def derive_key(*parts: Hashable) -> int:
    """Hash a few integers and strings to a 128-bit integer, the same on every machine.

    Args:
        *parts: integers of any size (NumPy's included), strings, bytes, or tuples of them.

    Returns:
        An integer in [0, 2**128).

    Example:
        >>> derive_key(7, 0, 3) == derive_key(7, 0, np.int64(3))
        True
        >>> derive_key(7, 0, 3) == derive_key(7, 1, 3)
        False
    """
    digest = blake2b(repr(_canonical(parts)).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def _canonical(part: Any) -> Any:
    """The same value in plain Python types: ``np.int64(3)`` and ``3`` are one key."""
    kind = type(part)
    if kind is int or kind is str or kind is bytes:
        return part
    if isinstance(part, tuple):
        return tuple(map(_canonical, part))
    try:
        return operator.index(part)
    except TypeError:
        return repr(part)


def philox(*parts: Hashable) -> np.random.Generator:
    """A fresh NumPy generator keyed by ``parts`` (6 us).

    Example:
        >>> philox(7, "order", 0).integers(100) == philox(7, "order", 0).integers(100)
        np.True_
    """
    key = derive_key(*parts)
    # Two words, not one big integer: NumPy converts an integer key in Python, 1.5 us slower.
    words = np.array((key & 0xFFFFFFFFFFFFFFFF, key >> 64), dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


class SampleScope:
    """Which sample the thread that owns this scope is reading.

    The reader makes one per batch and, per sample, stores ``index`` and clears ``drawn``: two attribute
    stores, 25 ns, so a dataset that draws nothing pays nothing more.
    """

    __slots__ = ("by_index", "drawn", "epoch", "index", "seed")

    NO_SAMPLE = object()

    def __init__(self, seed: int, epoch: int) -> None:
        self.seed = seed
        self.epoch = epoch
        self.index: Any = SampleScope.NO_SAMPLE
        self.drawn: np.random.Generator | None = None
        self.by_index: dict[Any, np.random.Generator] = {}

    def at(self, index: Any) -> None:
        """Say that ``index`` is read from here on."""
        self.index = index
        self.drawn = None


def current_scope() -> SampleScope | None:
    """The scope of the batch that this thread reads; None outside a loader."""
    scope: SampleScope | None = getattr(reading, "scope", None)
    return scope


def _current_index(scope: SampleScope, index: Any) -> Any:
    if index is not None:
        return index
    if scope.index is SampleScope.NO_SAMPLE:
        raise ValueError(
            "which sample? get_batch(indices) reads several at once: call sample_rng(index) with the index"
        )
    return scope.index


def sample_rng(index: Hashable | None = None) -> np.random.Generator:
    """The random generator of the sample that is being read.

    Keyed by (seed, epoch, index as the loader's sampler yielded it): the same numbers in every pool, with
    any number of workers, and when the batch is made again. All calls during one sample return the same
    object. In ``batchify_fn`` the key is (seed, epoch, batch, shard). Outside a loader: a fresh,
    unpredictable generator.

    Args:
        index: only in ``get_batch(indices)``, which reads several samples at once: the index in question.

    Returns:
        A `numpy.random.Generator` (Philox).

    Raises:
        ValueError: in ``get_batch`` without ``index``.

    Example:
        >>> class Noisy:
        ...     def __len__(self): return 4
        ...     def __getitem__(self, i): return i + sample_rng().normal()
        >>> from sharded_loader import ShardedDataLoader
        >>> a = next(iter(ShardedDataLoader(Noisy(), 4, seed=1)))
        >>> b = next(iter(ShardedDataLoader(Noisy(), 4, seed=1, num_workers=2, thread_pool=True)))
        >>> bool((a == b).all())
        True
    """
    scope = current_scope()
    if scope is None:
        return np.random.default_rng()
    if index is None:
        if scope.drawn is None:
            scope.drawn = philox(scope.seed, "sample", scope.epoch, _current_index(scope, None))
        return scope.drawn
    drawn = scope.by_index.get(index)
    if drawn is None:
        drawn = scope.by_index[index] = philox(scope.seed, "sample", scope.epoch, index)
    return drawn


def sample_generator(index: Hashable | None = None) -> torch.Generator:
    """Like `sample_rng`, as a fresh CPU `torch.Generator` for functions that take ``generator=``.

    Args:
        index: as in `sample_rng`.

    Returns:
        A generator of its own at each call: two of one sample draw the same numbers.

    Raises:
        ValueError: in ``get_batch`` without ``index``.

    Example:
        >>> import torch
        >>> torch.rand(2, generator=sample_generator()).shape
        torch.Size([2])
    """
    import torch

    scope = current_scope()
    generator = torch.Generator()
    if scope is None:
        generator.seed()
        return generator
    key = derive_key(scope.seed, "torch", scope.epoch, _current_index(scope, index))
    return generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


@contextmanager
def sample_seed(index: Hashable | None = None) -> Iterator[None]:
    """Seed ``random``, ``numpy.random`` and torch by the sample inside the block, and restore them after.

    For code that draws from the global generators (torchvision's transforms): it then gives the same in
    every pool. Threads share those generators, so one at a time is inside such a block. Outside a loader the
    block runs unseeded.

    Args:
        index: as in `sample_rng`.

    Raises:
        ValueError: in ``get_batch`` without ``index``.

    Example:
        >>> import random
        >>> with sample_seed():
        ...     value = random.random()
        >>> 0 <= value < 1
        True
    """
    scope = current_scope()
    if scope is None:
        yield
        return
    with seeded_globals(derive_key(scope.seed, "globals", scope.epoch, _current_index(scope, index))):
        yield


def draw_seed() -> int:
    """A seed from torch's default generator, so that ``torch.manual_seed`` governs it (as torch's loader).

    Returns:
        An integer in [0, 2**62).
    """
    import torch

    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(0, 2**62).item())
