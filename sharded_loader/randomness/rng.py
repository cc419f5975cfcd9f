"""Randomness that depends on (seed, epoch, sample) and on nothing else.

Every random number of the library comes from a *key*: a 128-bit hash of a few integers and strings. The
key of an epoch's order is (seed, epoch). The key of the numbers that one sample draws is (seed, epoch, index). The
global generators of a process worker have the key (seed, epoch, position of the batch). So neither the pool, nor the
number of workers, nor history can change the numbers, and a batch that is built again is the same batch.

    derive_key(seed, label, ...) -> key -> philox(...)            our own order, ``sample_rng``
                                        -> seeded_globals(key)    ``random``, ``numpy.random``, torch (if imported)

Every use of a key has a label of its own. Without it, two uses with equal numbers beside the seed would draw the same
random numbers. A test compares this table with the code.

    label                          who draws
    order                          the permutation of an epoch: RandomSampler
    subset                         SubsetRandomSampler
    split sampler                  SplitSampler
    weighted                       WeightedRandomSampler
    shard order                    ShardShuffleSampler: the shards
    shard window                   ShardShuffleSampler: the samples of a window of shards
    sorted bucket                  SortedBucketSampler
    fixed bucket                   FixedBucketSampler
    budget                         BoundedBudgetSampler
    pack                           PackSampler: the documents
    pack rows                      PackSampler: the rows of a window
    kinds                          GroupedBatchSampler: the samples of a kind
    class round                    ClassBalancedBatchSampler: the classes of a round
    class samples                  ClassBalancedBatchSampler: the samples of a class
    foreign sampler                the global generators while another library's sampler starts
    foreign generator              the generator that another library's sampler owns
    split                          Dataset.split
    shuffle buffer                 ShuffleBuffer: the samples of a block
    interleave                     interleave(): which dataset comes first where several may
    interleave shuffle             interleave(shuffle=True): the samples of each dataset, in each pass
    sample                         sample_rng() of a sample
    sample of batchify_fn          sample_rng() in batchify_fn
    torch                          sample_generator() of a sample
    torch of batchify_fn           sample_generator() in batchify_fn
    sample globals                 sample_seed() of a sample
    sample globals of batchify_fn  sample_seed() in batchify_fn
    transform globals              the global generators in transform(fn, seeded=True)
    transform object               the objects that fn owns in transform(fn, seeded=True)
    batch globals                  the global generators of a process worker, for each batch
    worker_init_fn                 the global generators of a process worker while worker_init_fn runs
    part                           get_worker_info().seed of a part of iterable data
    shuffle                        an epoch after the first one: shuffle=True of the drop-in
    replace                        on_error="replace"
    costs                          the steps of costs=
    device transform               the rng of device_transform, for each batch and shard

While a batch is read, the thread or the task that reads it has a `SampleScope` that says which sample it is at;
`sample_rng`, `sample_generator` and `sample_seed` look it up. torch is imported only where a generator or a seed
of its own is asked for.

*The generators that all threads of a process share* are seeded with all 128 bits of the key, with one exception. For
each batch, a process worker seeds NumPy's and torch's with 32 bits: 14 us for all three. So of a million batches about
116 pairs draw the same numbers. All of them are Mersenne Twisters, which draw the same numbers if they get the same
seed. So each gets bits of its own. While they are seeded for one thread, every other thread that wants to seed them
waits: if it hangs in the user's code, so do the others.

Source of the idea: counter-based generators keyed by their position (Salmon et al., "Parallel random
numbers: as easy as 1, 2, 3", SC 2011), as JAX and Grain use them.
"""

from __future__ import annotations

import operator
import os
import random
import re
import sys
import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sharded_loader.base.imports import call_after_import
from sharded_loader.base.private import SEED_BYTES, WORD_BYTES, blake2b, is_owned

if TYPE_CHECKING:
    import torch

FOR_NUMPY, FOR_TORCH = 1, 2
"""A fifth word after the four words of the key. ``random`` has none."""

_lock = threading.RLock()


def _begin_afresh() -> None:
    """In a forked child: another thread, which is gone there, may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)


def seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed ``random`` and NumPy as worker number ``worker`` of torch's own loader does. torch gets their sum.

    Args:
        base_seed: what torch's loader draws for all workers of an iterator.
        worker: the number of the worker, from 0.
    """
    random.seed(base_seed + worker)
    words = np.random.SeedSequence([worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0])
    np.random.seed(words.generate_state(4))


def seed_globals(key: int, *, whole: bool = True) -> None:
    """Seed ``random``, ``numpy.random`` and, if this process has imported it, torch's CPU generator.

    ``torch.manual_seed`` would also queue a call for every accelerator, with a formatted stack each time.

    Args:
        key: an integer of up to 128 bits; see `sharded_loader.randomness.rng.derive_key`.
        whole: whether NumPy's and torch's generators are seeded with all bits, which takes 11 and 27 us. With 32 bits
            it takes 2 us each. A process worker does this for every batch.

    Example:
        >>> seed_globals(7)
        >>> first = random.random(), np.random.rand()
        >>> seed_globals(7)
        >>> first == (random.random(), np.random.rand())
        True
    """
    random.seed(key)
    for_numpy: Any = key >> 64 & 0xFFFFFFFF
    if whole:
        for_numpy = np.frombuffer((key | FOR_NUMPY << 128).to_bytes(20, "little"), "<u4").astype(np.uint32)
    if "numpy.random" in sys.modules:
        np.random.seed(for_numpy)
    else:  # as soon as the user's code draws from it; to import it takes 8 ms
        call_after_import("numpy.random", lambda: sys.modules["numpy.random"].seed(for_numpy))
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None and whole:
        seed_torch(generator, key)
    elif generator is not None:
        generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def seed_torch(generator: torch.Generator, key: int) -> None:
    """Seed a torch CPU generator with all bits of ``key``: ``manual_seed`` ignores all but the lowest 32 on the CPU.

    ``generator.initial_seed()`` is then the lowest 63 bits of the key.

    Args:
        generator: any; one of an accelerator gets the lowest 63 bits, of which it uses all.
        key: an integer of up to 128 bits.

    Example:
        >>> import torch
        >>> generator = torch.Generator()
        >>> seed_torch(generator, 7)
        >>> generator.initial_seed()
        7
    """
    seed = key & 0x7FFFFFFFFFFFFFFF
    template = _torch_state() if generator.device.type == "cpu" else None
    if template is None:
        generator.manual_seed(seed)
        return
    words = random.Random(key | FOR_TORCH << 128).getrandbits(32 * 624).to_bytes(4 * 624, "little")
    state = template.copy()
    state[SEED_BYTES].view(np.uint64)[0] = seed
    state[WORD_BYTES].view(np.uint64)[:] = np.frombuffer(words, "<u4")
    generator.set_state(sys.modules["torch"].from_numpy(state))


@cache
def _torch_state() -> npt.NDArray[Any] | None:
    """The state of a torch generator seeded with 0; None if this version of torch keeps its words elsewhere."""
    generator = sys.modules["torch"].Generator()
    state: npt.NDArray[Any] = generator.manual_seed(0).get_state().numpy().copy()
    # NumPy's Mersenne Twister makes the same words of a seed of 32 bits.
    expected = np.random.RandomState(0).get_state(legacy=False)["state"]["key"]
    if state.nbytes < WORD_BYTES.stop or not np.array_equal(state[WORD_BYTES].view(np.uint64), expected):
        return None
    return state


@contextmanager
def seeded_globals(key: int, *, whole: bool = True) -> Iterator[None]:
    """Seed the global generators inside the block and restore their states after it, one thread at a time.

    Args:
        key: any integer; see `sharded_loader.randomness.rng.derive_key`.
        whole: as of `seed_globals`.
    """
    with _lock:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        torch_state = generator and generator.get_state()

        def put_back() -> None:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if generator is not None:
                generator.set_state(torch_state)

        try:
            seed_globals(key, whole=whole)
            yield
            put_back()
        except BaseException:  # also a Ctrl-C that comes while they are restored
            put_back()
            raise


@contextmanager
def lent() -> Iterator[None]:
    """Inside, other threads may seed the generators, though this one has seeded them: it waits for such a thread.

    They find the states that this thread has left, and put these back.
    """
    lock, count = _lock, 0
    while is_owned(lock):
        lock.release()
        count += 1
    try:
        yield
    finally:
        for _ in range(count):
            lock.acquire()


reading: ContextVar[SampleScope | None] = ContextVar("reading", default=None)
"""Which sample this thread reads, or this task of an event loop.

Who sets it puts back what was there before (loaders may nest) in a ``finally`` clause, by a plain call of ``set``. A
Ctrl-C can strike where the ``__exit__`` of a context manager begins, and the scope would stay.
"""

if hasattr(os, "register_at_fork"):  # what the parent's thread is reading is not the child's sample
    os.register_at_fork(after_in_child=lambda: reading.set(None))


def derive_key(*parts: Hashable) -> int:
    """Hash a few integers and strings to a 128-bit integer, the same on every machine.

    Args:
        *parts: integers of any size (NumPy's included), strings, bytes, or tuples of them. Other values count by what
            they hold (floats, enums, frozensets, dataclasses) or by their ``repr``.

    Returns:
        An integer in [0, 2**128).

    Raises:
        TypeError: the ``repr`` of a value shows only where it lies in memory.

    Example:
        >>> derive_key(7, 0, 3) == derive_key(7, 0, np.int64(3))
        True
        >>> derive_key(7, 0, 3) == derive_key(7, 1, 3)
        False
    """
    if not _PLAIN.issuperset(map(type, parts)):
        parts = _canonical(parts)
    digest = blake2b(repr(parts).encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


_PLAIN = {int, str, bytes}


def _canonical(part: Any) -> Any:
    """The same value in plain Python types: ``np.int64(3)`` and ``3`` are one key."""
    if type(part) in _PLAIN:
        return part
    if isinstance(part, RepeatedIndex):
        return "copy", part.copy, int(part)
    if isinstance(part, tuple):
        return tuple(map(_canonical, part))
    try:
        return operator.index(part)
    except TypeError:
        return _by_value(part)


def _by_value(part: object) -> Any:
    """A text or a tuple of what ``part`` holds, the same in every process."""
    if isinstance(part, Enum):
        return type(part).__qualname__, part.name
    if isinstance(part, str):  # of a subclass, as ``np.str_``
        return str.__str__(part)
    if isinstance(part, bytes):
        return bytes(part)
    if isinstance(part, float):
        return "float", float.__repr__(part)
    if isinstance(part, (frozenset, set)):  # Python iterates over strings in another order in each process
        return "set", *sorted(repr(_canonical(one)) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return type(part).__qualname__, *(_canonical(getattr(part, one.name)) for one in fields(part))
    text = repr(part)
    if re.search(r" at 0x[0-9A-Fa-f]+", text):
        raise TypeError(
            f"random numbers of a sample are keyed by its index, and {text} is another text in each run: let the "
            f"sampler yield integers, strings or tuples of them, or give {type(part).__name__} a __repr__ that shows "
            f"its value"
        )
    return type(part).__qualname__, text


class RepeatedIndex(int):
    """The index of a sample that comes again in its epoch. It is an int; each copy has random numbers of its own.

    Attributes:
        copy: which copy of the sample this is, from 1. The first one has a plain int as its index.
    """

    __slots__ = ()
    copy = 0

    def __reduce__(self) -> Any:
        return _repeated, (self.copy, int(self))


@cache
def repeated_index(copy: int) -> type[RepeatedIndex]:
    """The class of the indices of a copy: to make an index then takes a quarter of the time of an attribute."""
    return type("RepeatedIndex", (RepeatedIndex,), {"__slots__": (), "copy": copy})


def _repeated(copy: int, index: int) -> RepeatedIndex:
    return repeated_index(copy)(index)


class OfBatch(NamedTuple):
    """What ``collate_fn`` is keyed by, in the place of the index of a sample."""

    seq: int
    shard: int


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


NO_SAMPLE: Any = object()
"""The index of a `SampleScope` while several samples are read at once."""

OF_BATCH: Any = object()
"""The index while ``collate_fn`` runs: numbers are keyed by `SampleScope.of_batch` then."""


@dataclass(eq=False, slots=True)
class SampleScope:
    """Which sample the thread that owns this scope is reading.

    While samples are read one by one, nothing is noted for each. The reader iterates over ``items``, and how far it is
    follows from `operator.length_hint` when it is asked for.

    Attributes:
        seed: of the loader.
        epoch: of the batch.
        index: of the sample, or `NO_SAMPLE`, or `OF_BATCH`. It counts where ``items`` is None.
        indices: those of the shard.
        items: the iterator over ``indices`` that the reader goes by; None if the samples are not read one by one.
        drawn: what `sample_rng` has returned for this sample, and the sample's `place`.
        owners: what ``transform(seeded=True)`` has found: see `data.seeding`.
        is_cached: a cache keeps the sample for all epochs: to draw is an error.
    """

    seed: int
    epoch: int
    index: Any = NO_SAMPLE
    indices: Sequence[Any] = field(default=(), init=False)
    items: Iterator[Any] | None = field(default=None, init=False)
    drawn: tuple[int, np.random.Generator] | None = field(default=None, init=False)
    owners: dict[int, Any] = field(default_factory=dict)
    is_cached: bool = False

    @property
    def of_batch(self) -> OfBatch:
        """What ``collate_fn`` is keyed by."""
        return OfBatch(0, 0)

    @property
    def place(self) -> int:
        """Position of the sample among ``indices``; -1 if the samples are not read one by one."""
        return -1 if self.items is None else len(self.indices) - operator.length_hint(self.items) - 1


_DRAWS = {
    "sample": "sample_rng()",
    "torch": "sample_generator()",
    "sample globals": "sample_seed()",
    "transform globals": "transform(fn, seeded=True)",
}
"""What draws with a label of a sample, as the user calls it."""


def key_parts(scope: SampleScope, label: str, index: object = None) -> tuple[Any, ...]:
    """The parts of a sample's key: of the sample that is being read, or of ``index``.

    Raises:
        ValueError: several samples are read at once, and ``index`` is None. Or a cache keeps the sample.
    """
    if scope.is_cached:
        raise ValueError(
            f"{_DRAWS[label]} is called below cache(...), which keeps the sample for all epochs: move the transform "
            "that draws behind the cache, dataset.cache(...).transform(fn)"
        )
    if index is None:
        index = scope.index if scope.items is None else scope.indices[scope.place]
        if index is NO_SAMPLE:
            raise ValueError(
                "which sample? get_batch(indices) reads several at once: call sample_rng(index) with the index"
            )
        if index is OF_BATCH:
            label, index = f"{label} of batchify_fn", scope.of_batch
    return scope.seed, label, scope.epoch, index


def sample_rng(index: Hashable | None = None) -> np.random.Generator:
    """The random generator of the sample that is being read.

    The numbers depend on the seed, the epoch and the index that the loader's sampler yielded. They are the same in
    every pool, with any number of workers, and when the batch is built again. If an index comes several times in an
    epoch (`WeightedRandomSampler` with replacement), the sample draws the same numbers each time. `RepeatedSampler`
    gives each copy numbers of its own. In ``batchify_fn`` the numbers depend on the seed, the epoch, the batch and the
    shard. Outside a loader the generator is fresh and unpredictable.

    Args:
        index: only in ``get_batch(indices)``, which reads several samples at once: the index in question. Under a
            wrapper that gives samples other indices (``shard``, ``split``, ``filter``, ``+``) it is the dataset's own
            index. Its numbers then differ from those of a sample that is read alone.

    Returns:
        A `numpy.random.Generator` (Philox). Without ``index``, all calls during one sample return the same object.
        With ``index``, each call returns a new generator that begins with the same numbers: call it once per sample.

    Raises:
        ValueError: in ``get_batch`` without ``index``.
        TypeError: the index is an object whose ``repr`` shows only where it lies in memory.

    Example:
        >>> class Noisy:
        ...     def __len__(self): return 4
        ...     def __getitem__(self, i): return i + sample_rng().normal()
        >>> from sharded_loader import ShardedDataLoader
        >>> a = next(iter(ShardedDataLoader(Noisy(), 4, seed=1)))
        >>> b = next(iter(ShardedDataLoader(Noisy(), 4, seed=1, num_workers=2, pool="thread")))
        >>> bool((a == b).all())
        True
    """
    scope = reading.get()
    if scope is None:
        return np.random.default_rng()
    if index is not None:  # kept, it would go on where an equal index earlier in the batch has stopped
        return philox(*key_parts(scope, "sample", index))
    place = scope.place
    if scope.drawn is None or scope.drawn[0] != place:
        scope.drawn = place, philox(*key_parts(scope, "sample"))
    return scope.drawn[1]


def sample_generator(index: Hashable | None = None) -> torch.Generator:
    """Like `sample_rng`, as a fresh CPU `torch.Generator` for functions that take ``generator=``.

    A sample whose index comes several times in an epoch gets a generator with the same numbers each time.

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

    scope, generator = reading.get(), torch.Generator()
    if scope is None:
        generator.seed()
    else:
        seed_torch(generator, derive_key(*key_parts(scope, "torch", index)))
    return generator


@contextmanager
def sample_seed(index: Hashable | None = None) -> Iterator[None]:
    """Seed ``random``, ``numpy.random`` and torch by the sample inside the block, and restore them after.

    Use it for code that draws from the global generators, such as torchvision's transforms: the code then gives the
    same in every pool. Two blocks for the same sample draw the same numbers. Threads share the global generators, so
    only one thread at a time is inside such a block. Outside a loader the block runs unseeded. Objects with generators
    of their own are not seeded: ``transform(fn, seeded=True)`` does that.

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
    scope = reading.get()
    with nullcontext() if scope is None else seeded_globals(derive_key(*key_parts(scope, "sample globals", index))):
        yield


def draw_seed() -> int:
    """A seed from torch's default generator, so that ``torch.manual_seed`` governs it (as torch's loader).

    Returns:
        An integer in [0, 2**62).
    """
    import torch

    return int(torch.empty((), dtype=torch.int64, device="cpu").random_(0, 2**62).item())
