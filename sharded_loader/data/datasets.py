"""Datasets: samples read by index, and the operations on them.

    SimpleDataset(anything)        ArrayDataset(columns)        ConcatDataset(datasets)
          .filter .shard .take .sample .split      -> SubsetDataset: some of the samples, by index
          .transform .transform_first              -> TransformDataset: each sample through a function
          .cache                                   -> `caching.dataset.StoredDataset`: the same samples, stored
          a + b                                    -> ConcatDataset: one dataset after the other

A dataset owns no thread and no process. Bulk reads use ``get_batch(indices)``, which returns a collated batch, or
``__getitems__(indices)``, which returns a list of samples (see `sharded_loader.data.bulk`). A wrapper has
``set_epoch``, ``get_batch`` and ``__getitems__`` exactly where the datasets inside it do. A subset of a subset is
flattened, so reading a sample takes one look-up however often a dataset was cut.

Reading raises IndexError (with the length) for an index out of range, and ValueError (with the field) if the samples of
a batch differ in structure.

Source of the idea: ``mxnet.gluon.data.dataset``.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.base.checks import check_function, fast_method, is_async
from sharded_loader.base.described import an, brief, briefs
from sharded_loader.base.imports import provided
from sharded_loader.base.limits import check_fits
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.data import bulk, seeding
from sharded_loader.data.columns import as_column, check_dataset, is_dataset, named_columns
from sharded_loader.randomness import rng

if TYPE_CHECKING:
    from sharded_loader.caching.dataset import StoredDataset

Batches = Callable[[int], Any]
NextBatch = Callable[[], "int | None"]
Translate = Callable[[Any], Any]


class Dataset:
    """Base class of datasets. Subclasses implement ``__getitem__(index)`` and ``__len__()``.

    ``__getitem__`` may be an ``async def``. The samples of a batch are then awaited concurrently, 64 at a time; a
    ``concurrency`` attribute of the dataset changes that number.

    Example:
        >>> class Squares(Dataset):
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return index ** 2
        >>> list(Squares().filter(lambda x: x % 2 == 0).take(3))
        [0, 4, 16]
    """

    _inside: Any = ()  # the wrapped datasets
    _in_columns: Any = None  # gather(indices, empty) of a dataset that reads some batches in bulk, see `as_bulk`

    def __getitem__(self, index: Any) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    def __add__(self, other: object) -> ConcatDataset:
        """Return this dataset's samples followed by the other's."""
        return ConcatDataset([self, other]) if is_dataset(other) else NotImplemented

    def __radd__(self, other: object) -> Any:
        """Return the other's samples followed by this dataset's. ``sum(datasets)`` starts with 0, which is ignored."""
        if type(other) is int and other == 0:
            return self
        return ConcatDataset([other, self]) if is_dataset(other) else NotImplemented

    __array_ufunc__ = None  # otherwise NumPy would evaluate ``array + dataset`` element by element

    def _part(self, index: slice) -> SubsetDataset:
        """Return the samples of a slice as a subset, without reading them."""
        return SubsetDataset(self, range(len(self))[index])

    def filter(self, fn: Callable[[Any], Any]) -> SubsetDataset:
        """Return the samples for which ``fn(sample)`` is true. Reads every sample once, now.

        Example:
            >>> list(SimpleDataset(range(10)).filter(lambda x: x % 3 == 0))
            [0, 3, 6, 9]
        """
        check_function("the function of filter()", fn, "of a sample", required=True)
        chosen = [index for index, sample in enumerate(bulk.each_sample(self)) if fn(sample)]
        return SubsetDataset(self, np.array(chosen, np.int64))

    def shard(self, num_shards: int, index: int) -> SubsetDataset:
        """Return shard ``index`` of ``num_shards`` contiguous shards. The first ones have one sample more if needed.

        Example:
            >>> [list(SimpleDataset(range(5)).shard(2, i)) for i in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        if not all(isinstance(value, (int, np.integer)) for value in (num_shards, index)):
            raise TypeError(f"shard({num_shards!r}, {index!r}): give two ints: how many parts, and which of them")
        if num_shards < 1:
            raise ValueError(f"shard(num_shards={num_shards}): the number of shards must be greater than 0")
        if not 0 <= index < num_shards:
            raise ValueError(f"shard index {index} is out of bounds for {num_shards} shards: give 0..{num_shards - 1}")
        size, larger = divmod(len(self), num_shards)
        begin = size * index + min(index, larger)
        return SubsetDataset(self, range(begin, begin + size + (index < larger)))

    def take(self, count: int | None) -> SubsetDataset:
        """Return the first ``count`` samples, or all if there are fewer or ``count`` is None.

        Example:
            >>> list(SimpleDataset("abc").take(2))
            ['a', 'b']
        """
        if not isinstance(count, (int, np.integer, type(None))):
            raise TypeError(f"take({count!r}): give an int, or None for all")
        if count is not None and count < 0:
            raise ValueError(f"take({count}): the count is negative: give 0 or more, or None for all")
        return SubsetDataset(self, range(len(self))[:count])

    def sample(self, sampler: Any) -> SubsetDataset:
        """Return the samples at the indices that ``sampler`` (ours or torch's) yields. Reads its epoch 0 once, now.

        Example:
            >>> from torch.utils.data import SequentialSampler
            >>> list(SimpleDataset("abc").sample(SequentialSampler(range(2))))
            ['a', 'b']
        """
        torch_kind = getattr(sys.modules.get("torch.utils.data"), "Sampler", ())  # avoids importing torch
        if not (hasattr(type(sampler), "iter_epoch") or isinstance(sampler, torch_kind)):
            text = f"Invalid sampler type: {type(sampler)}. Expected a Sampler of sharded_loader or"
            raise TypeError(f"{text} torch; for a list of indices use SubsetDataset(dataset, indices)")
        # An __iter__ overridden in a subclass takes precedence over an inherited iter_epoch.
        is_pure = fast_method(type(sampler), "iter_epoch", ["__iter__"]) is not None
        with contextlib.suppress(TypeError, NotImplementedError):  # the sampler has no length
            what = f"sample() keeps all {len(sampler):,} indices of the {type(sampler).__name__}"
            check_fits(8 * len(sampler), what, "give the sampler to the loader, which asks for a batch at a time")
        order = sampler.iter_epoch(0) if is_pure else iter(sampler)
        try:
            return SubsetDataset(self, np.fromiter((operator.index(index) for index in order), np.int64))
        except TypeError:
            raise TypeError(f"{type(sampler).__name__} yields no single indices: give a sampler of samples") from None

    def split(self, sizes_or_ratios: Sequence[float], seed: int | None = None) -> list[SubsetDataset]:
        """Split into random, disjoint subsets that together cover the dataset.

        For stratified subsets, split the indices by scikit-learn (``train_test_split(np.arange(len(labels)),
        stratify=labels)``) and make a `SubsetDataset` of each result.

        Args:
            sizes_or_ratios: ints that sum to ``len(self)``, or ratios that sum to 1 (rounded by largest remainder).
            seed: equal seeds give equal subsets; None draws a seed from torch's default generator.

        Returns:
            The subsets. Each index takes 8 bytes; ``take``, ``shard`` and slices store no indices.

        Raises:
            ValueError: The sizes or ratios do not sum to the whole.
            MemoryError: The indices do not fit into memory.

        Example:
            >>> train, test = SimpleDataset(range(10)).split([0.8, 0.2], seed=1)
            >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
            (8, 2, True)

        Source of the idea: ``torch.utils.data.random_split``.
        """
        if isinstance(sizes_or_ratios, str) or not isinstance(sizes_or_ratios, Iterable):
            raise TypeError(f"split({sizes_or_ratios!r}): give a list of sizes or ratios, such as [0.8, 0.2]")
        sizes = split_sizes(len(self), list(sizes_or_ratios))
        check_fits(8 * len(self), f"split() keeps all {len(self):,} indices", "cut it by take(), shard() or a slice")
        order = rng.shuffle(len(self), rng.draw_seed() if seed is None else operator.index(seed), "split")
        ends = accumulate(sizes)
        return [SubsetDataset(self, order(np.arange(end - size, end))) for size, end in zip(sizes, ends, strict=True)]

    def cache(
        self, max_bytes: int | str | None = None, path: str | os.PathLike[str] | None = None, key: str | None = None
    ) -> StoredDataset:
        """Read each sample once and store it. Put random steps after the cache: ``.cache(...).transform(augment)``.

        All workers and loaders share one copy, and so do all ranks on this machine (on Linux; elsewhere with ``path``).
        With ``path``, later runs reuse it.

        Args:
            max_bytes: Limit in bytes, a string such as "8 GB", or a share of the free space such as "50%". None: three
                quarters of the free memory, or all free space on the disk of ``path``. Nothing is evicted; samples that
                do not fit are read in each epoch.
            path: File for the samples. Without it they are stored in memory.
            key: Text for what the loader cannot see, such as the version of your decoder. A file with another key,
                number of samples or first sample is rejected with an error.

        Returns:
            A dataset of the same samples. ``loader.stats()`` counts hits and misses.

        Raises:
            CacheMismatchError: The file belongs to another dataset.
            ValueError: A sample draws random numbers or depends on the epoch, or there is not enough memory.
            TypeError: A sample holds something other than arrays, tensors, numbers, strings, bytes, None, and dicts,
                lists and tuples of these.
            OSError: The file cannot be created, or belongs to another user.

        Example:
            >>> decoded = SimpleDataset(range(3)).transform(lambda i: np.full(4, i))
            >>> cached = decoded.cache("1 MB")
            >>> [sample.sum().item() for _ in range(2) for sample in cached], cached.cached
            ([0, 4, 8, 0, 4, 8], 3)

        Source of the idea: CoorDL (VLDB 2021). With a new random order per epoch, the hit rate is the share of samples
        that fit, so eviction gains nothing.
        """
        cached: StoredDataset = provided("dataset", "cache")(self, max_bytes, path, key)
        return cached

    def transform(self, fn: Callable[..., Any], lazy: bool = True, seeded: bool = False) -> Dataset:
        """Pass every sample through ``fn``; a tuple sample is unpacked: ``fn(*sample)``.

        Args:
            fn: takes a sample and returns the new one.
            lazy: False reads and transforms all samples once, now.
            seeded: seed everything that ``fn`` draws from by the seed, the epoch and the sample's index: the global
                generators of ``random``, NumPy and torch, and every object inside ``fn`` with a method
                ``set_random_seed`` (albumentations) or ``set_random_state`` (MONAI). Results are then the same in every
                pool, with any number of workers. Costs about 0.1 ms per sample, and threads run ``fn`` one at a time.
                Objects that ``fn`` creates while it runs are not seeded: create them beforehand. Needs ``lazy=True``.

        Example:
            >>> from sharded_loader import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform(lambda a, b: a + b))
            [11, 22]
        """
        if seeded and not lazy:
            text = "transform(lazy=False, seeded=True): what is computed once, now, has no epoch to be seeded by"
            raise ValueError(f"{text}: choose one of the two")
        transformed = TransformDataset(self, fn, seeded)
        return transformed if lazy else SimpleDataset(list(transformed))

    def transform_first(self, fn: Callable[[Any], Any], lazy: bool = True, seeded: bool = False) -> Dataset:
        """Pass the first field of every tuple sample through ``fn``, or the sample itself if it is not a tuple.

        ``lazy`` and ``seeded`` as in `transform`.

        Example:
            >>> from sharded_loader import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform_first(lambda a: -a))
            [(-1, 10), (-2, 20)]
        """
        check_function("the function of transform_first()", fn, "of a sample's first field", required=True)
        return self.transform(partial(_apply_to_first, fn), lazy, seeded)

    def __iter__(self) -> Iterator[Any]:
        return bulk.each_sample(self)

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({len(self)} samples)"
        except Exception:  # a repr must not raise
            return f"{type(self).__name__}(unknown number of samples)"


# -- subsets -----------------------------------------------------------------------------------------------------------


def nested(dataset: object) -> Iterator[Any]:
    """Yield a dataset and, recursively, the datasets inside it."""
    yield dataset
    for inner in dataset._inside if isinstance(dataset, Wrapper) else ():
        yield from nested(inner)


def announce_epoch(dataset: object, epoch: int) -> None:
    """Pass the epoch to a wrapped dataset, if it has ``set_epoch``."""
    if (tell := seeding.epoch_setter(dataset)) is not None:
        tell(epoch)


class Wrapper(Dataset):
    """Base class of datasets around other datasets. Forwards ``set_epoch`` if one of them has it."""

    _dataset: Any

    @property
    def _inside(self) -> Any:
        return (self._dataset,)

    def __len__(self) -> int:
        return len(self._dataset)

    @bulk.bulk
    def set_epoch(self, epoch: int) -> None:
        for inner in self._inside:
            announce_epoch(inner, epoch)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        """Return the datasets inside, each with the function that translates indices for it."""
        return ((inner, lambda indices: indices) for inner in self._inside)


class Cache(Wrapper):
    """Base class of the caches that `Dataset.cache` makes: stores samples of the dataset inside, ``_dataset``.

    Your own has ``__getitem__``, and ``__init__(self, dataset, max_bytes, path, key)`` with the arguments of
    `Dataset.cache`. Activate it with ``provide("dataset", "cache", YourCache)``.
    """

    counts: Any = (0, 0, 0)
    """Hits, misses and stored bytes, for the loader's statistics."""


class View(Wrapper):
    """Samples of another dataset at translated indices.

    Subclasses implement `_one` and `_inner`. A subclass that overrides ``__getitem__`` loses the bulk methods.
    """

    _one: Callable[[Any], Any]  # the sample at one index
    _inner: Callable[[bulk.Indices], bulk.Int64s]  # translates to indices into the wrapped dataset

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)

    @bulk.bulk
    def __getitems__(self, indices: Sequence[int]) -> Any:
        return bulk.bulk_method(self._dataset, "__getitems__")(
            seeding.attach_keys(self._inner(indices).tolist(), indices)
        )

    @bulk.bulk
    def get_batch(self, indices: bulk.Indices, empty: Empty = new_array) -> Any:
        return bulk.gather(self._dataset, self._inner(indices), empty)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        return [(self._dataset, self._inner)]


class SimpleDataset(View):
    """Wrap any object with ``__getitem__`` and ``__len__`` in a dataset with this library's methods.

    Integer indices are checked and may be negative; others, such as slices and column names, are passed on.

    Args:
        data: a list, a NumPy array, a torch or Hugging Face dataset, ...

    Example:
        >>> SimpleDataset(range(10))[-1]
        9
    """

    _is_part = True  # not inherited, see `bulk.part_of`

    def __init__(self, data: object) -> None:
        self._dataset = check_dataset(data, "SimpleDataset")

    def _one(self, index: object) -> Any:
        if isinstance(index, (int, np.integer)):
            index = bulk.checked_index(index, len(self._dataset))
        return self._dataset[index]

    def _inner(self, indices: bulk.Indices) -> bulk.Int64s:
        return bulk.checked_indices(indices, len(self._dataset))

    def __repr__(self) -> str:
        return f"SimpleDataset({len(self)} samples of {type(self._dataset).__name__})"


class SubsetDataset(View):
    """The samples of ``dataset`` at ``indices``, in that order: the result of ``take``, ``shard``, ``split``, ...

    A subset of a subset is flattened: `dataset` is never a `SubsetDataset`, and `indices` always refer to `dataset`.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        indices: integers in 0..len(dataset)-1. A range takes no memory.

    Raises:
        IndexError: an index is out of range.

    Example:
        >>> list(SubsetDataset("abc", [2, 0]))
        ['c', 'a']
        >>> part = SimpleDataset("abcdefgh").take(5)[1:].filter(lambda letter: letter != "c")
        >>> list(part), part.indices
        (['b', 'd', 'e'], array([1, 3, 4]))

    Source of the idea: ``torch.utils.data.Subset``.
    """

    _is_part = True  # not inherited, see `bulk.part_of`

    def __init__(self, dataset: Any, indices: bulk.Selection | Sequence[int]) -> None:
        dataset = check_dataset(dataset, "SubsetDataset")
        chosen: bulk.Selection
        if isinstance(indices, range):
            if len(indices):
                bulk.checked_indices([indices[0], indices[-1]], len(dataset))
            chosen = indices
        else:
            # A copy, because the caller may reshuffle the array for another subset.
            chosen = np.array(bulk.checked_indices(indices, len(dataset)))
        if type(dataset) is SubsetDataset and vars(dataset).keys() == {"_dataset", "_indices"}:  # no own methods
            dataset, chosen = dataset._dataset, bulk.composed(dataset._indices, chosen)
        if isinstance(chosen, np.ndarray):
            chosen.flags.writeable = False
        self._dataset, self._indices = dataset, chosen

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def dataset(self) -> Any:
        """The dataset that the samples are read from.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").take(4)[2:].dataset
            SimpleDataset(5 samples of str)
        """
        return self._dataset

    @property
    def indices(self) -> bulk.Selection:
        """The indices of the samples in `dataset`: a range or an int64 array, both read-only.

        Use them to select labels, too: ``labels[subset.indices]``, for an array of the whole dataset's labels.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").shard(2, 1).indices
            range(3, 5)
        """
        return self._indices

    def _one(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._dataset[int(self._indices[bulk.checked_index(index, len(self._indices))])]

    def _inner(self, indices: bulk.Indices) -> bulk.Int64s:
        where = bulk.checked_indices(indices, len(self._indices))
        if isinstance(self._indices, range):  # `taken`, inlined
            return self._indices.start + self._indices.step * where
        return bulk.taken(self._indices, where)

    def __repr__(self) -> str:
        return f"<{len(self)} of {brief(self._dataset)}>"


# -- the sizes of parts ------------------------------------------------------------------------------------------------


def split_sizes(length: int, parts: list[Any]) -> list[int]:
    """Return sizes that sum to ``length``, from sizes or ratios, or raise ValueError.

    Example:
        >>> split_sizes(11, [0.8, 0.2]), split_sizes(11, [8, 3])
        ([9, 2], [8, 3])
    """
    if not parts:
        raise ValueError("split([]): give at least one size or ratio")
    if any(isinstance(part, (bool, np.bool_, str)) or not 0 <= part < math.inf for part in parts):
        raise ValueError(f"split({parts}): sizes and ratios are numbers of 0 or more")
    if all(isinstance(part, (int, np.integer)) for part in parts):
        if sum(parts) == length:
            return parts
        advice = "make them sum to its length, or give ratios (floats) that sum to 1"
        raise ValueError(f"split({parts}): the sizes sum to {sum(parts)}, the dataset has {length} samples: {advice}")
    total = math.fsum(parts)
    if abs(total - 1) > 1e-6:
        raise ValueError(f"split({parts}): the ratios sum to {total:g}: make them sum to 1, or give sizes (ints)")
    from fractions import Fraction  # with `decimal`: 3 ms

    exact = [Fraction(float(part)) for part in parts]
    return apportioned(length, [part * length / sum(exact) for part in exact], digits=9)


def apportioned(total: int, shares: Sequence[Any], digits: int | None = None) -> list[int]:
    """Round exact shares (`Fraction`) to integers that sum to ``total``.

    The largest remainders are rounded up; of equal ones, the earlier. ``digits`` limits the decimal places of
    remainders that count (with 9, 0.29 * 100 is a whole 29); None: all.

    Example:
        >>> from fractions import Fraction
        >>> apportioned(10, [Fraction(10, 3)] * 3)
        [4, 3, 3]
    """
    counts = list(map(math.floor, shares))
    exact = [count - share for count, share in zip(counts, shares, strict=True)]
    below: list[Any] = exact if digits is None else [round(float(one), digits) for one in exact]
    for number in sorted(range(len(counts)), key=below.__getitem__)[: total - sum(counts)]:
        counts[number] += 1
    return counts


# -- transforms --------------------------------------------------------------------------------------------------------


class TransformDataset(Wrapper):
    """The samples of a dataset, each passed through a function; made by `Dataset.transform`.

    A slice returns a subset. Keys, such as strings and tuples, are passed on to the wrapped dataset.

    Example:
        >>> list(TransformDataset(SimpleDataset([1, 2, 3]), str)[1:])
        ['2', '3']
    """

    def __init__(self, dataset: object, fn: Callable[..., Any], seeded: bool = False) -> None:
        self._dataset = check_dataset(dataset, "TransformDataset")
        if not callable(fn):
            raise TypeError(f"transform was given {fn!r}, which is not callable: give a function of a sample")
        self._fn = fn
        self._is_async = is_async(fn)
        if self._is_async and seeded:
            text = f"transform({fn!r}, seeded=True): an async def cannot be seeded"
            raise TypeError(f"{text}: draw from sample_rng() there")
        self._level = seeding.next_level(dataset, TransformDataset) if seeded else None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        bulk.check_one_index(index)
        sample = self._dataset[index]
        is_coroutine = type(sample) is CoroutineType
        return self._apply_async(sample, is_coroutine) if is_coroutine or self._is_async else self._apply(sample)

    async def _apply_async(self, found: Any, is_coroutine: bool) -> Any:
        sample = self._apply(await found if is_coroutine else found)
        return await sample if self._is_async else sample

    def _apply(self, sample: object) -> Any:
        fields = sample if isinstance(sample, tuple) else (sample,)
        if self._level is None:
            return self._fn(*fields)
        with seeding.transform_seed(self._fn, self._level):
            return self._fn(*fields)

    @bulk.bulk
    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Read many samples in bulk, then transform them one by one."""
        indices = seeding.attach_keys(indices, indices)
        samples = bulk.read_many(self._dataset, indices)  # passes on a copy of `indices`, which are used again below
        if self._is_async:
            return bulk.await_each(self._apply, samples, seeding.keys_of(indices))
        return seeding.map_with_keys(self._apply, samples, indices)

    def __repr__(self) -> str:
        return f"{brief(self._dataset)}.transform({self._fn!r}{'' if self._level is None else ', seeded=True'})"


def _apply_to_first(fn: Callable[[Any], Any], first: object, *others: object) -> Any:
    """Apply ``fn`` to the first field of a sample."""
    return (fn(first), *others) if others else fn(first)


# -- concatenation -----------------------------------------------------------------------------------------------------


class ConcatDataset(Wrapper):
    """Several datasets, one after the other; nested ones (``a + b + c``) are flattened. Reads in bulk if they all do.

    Args:
        datasets: at least one; anything with ``__getitem__`` and ``__len__``.

    Example:
        >>> list(ConcatDataset(["ab", "c"]))
        ['a', 'b', 'c']

    Source of the idea: ``torch.utils.data.ConcatDataset``.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        if isinstance(datasets, str | Mapping) or not isinstance(datasets, Iterable):
            raise TypeError(f"ConcatDataset needs a list of datasets, not {an(type(datasets))}: give [first, second]")
        self._parts: list[Any] = []
        for one in datasets:  # parts of another one were checked, and `sum` adds one after the other
            self._parts += one._parts if type(one) is ConcatDataset else [check_dataset(one, "ConcatDataset")]
        if not self._parts:
            raise ValueError("ConcatDataset was given no datasets: give at least one")
        *begins, self._length = accumulate(map(len, self._parts), initial=0)
        self._begins = array("q", begins)  # NumPy and `bisect` both read it as it is

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        index = bulk.checked_index(index, self._length)
        number = bisect_right(self._begins, index) - 1
        return self._parts[number][index - self._begins[number]]

    @property
    def _inside(self) -> Any:
        return self._parts

    @cached_property
    def _reads(self) -> tuple[str, ...]:
        # Once: wrappers ask in each batch, and there may be 10,000 parts.
        return tuple(name for name in bulk.READS[1:] if all(bulk.bulk_method(part, name) for part in self._parts))

    def _chunks(self, indices: bulk.Indices) -> list[tuple[Any, bulk.Int64s, bulk.Int64s]]:
        """Group indices by part: the part, the indices in the part, and their positions in the batch."""
        where = bulk.checked_indices(indices, self._length)
        owners = np.searchsorted(self._begins, where, side="right") - 1
        positions = [(number, np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
        return [(self._parts[number], where[chosen] - self._begins[number], chosen) for number, chosen in positions]

    @bulk.bulk
    def __getitems__(self, indices: bulk.Indices) -> Any:
        outer = seeding.copy_indices(indices)
        outer = seeding.attach_keys(outer, outer)
        chunks = [(part, inner.tolist(), positions.tolist()) for part, inner, positions in self._chunks(indices)]
        samples: list[Any] = [None] * len(outer)
        for part, inner, positions in chunks:
            part_samples = bulk.read_many(part, seeding.attach_keys(inner, outer, positions))
            for position, sample in zip(positions, part_samples, strict=True):
                samples[position] = sample
        return samples

    @bulk.bulk
    def get_batch(self, indices: bulk.Indices, empty: Empty = new_array) -> Any:
        chunks = self._chunks(indices)
        if len(chunks) == 1:
            return bulk.gather(chunks[0][0], chunks[0][1], empty)
        return default_batchify_fn.assemble(ConcatDataset.__getitems__(self, indices), empty)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        return ((part, partial(self._indices_in_part, part)) for part in self._parts)

    def _indices_in_part(self, part: object, indices: bulk.Indices) -> bulk.Int64s:
        """Return the indices that lie in one part, relative to the part."""
        chunks = [inner for owner, inner, _ in self._chunks(indices) if owner is part]
        return np.concatenate([np.zeros(0, np.int64), *chunks])

    def __repr__(self) -> str:
        return " + ".join(briefs(self._parts))


# -- mixtures ----------------------------------------------------------------------------------------------------------


class Mixture(View):
    """Base class of datasets that interleave several others in their own order: see `sharded_loader.mixing`."""

    sources_of: Callable[[Any], bulk.Int64s]
    """``sources_of(indices)``: the number of samples from each source."""

    pairs: Callable[[Any, int], list[tuple[int, int]]]
    """``pairs(indices, epoch)``: the source of each sample, and its index there."""


def mixture_of(dataset: object) -> Mixture | None:
    """Return the mixture at the bottom of a stack of transforms, or None."""
    while type(dataset) is TransformDataset:
        dataset = dataset._dataset
    return dataset if isinstance(dataset, Mixture) else None


# -- announcing upcoming samples ---------------------------------------------------------------------------------------


def follow(dataset: object, batches: Batches, position: NextBatch, later: Batches) -> list[Callable[[int], object]]:
    """Announce upcoming samples to the datasets inside that have a method ``follow``, such as `ShardDataset`.

    Args:
        dataset: any; its wrappers translate the indices.
        batches: ``batches(number)`` returns the indices of a batch, or None after the last one. Threads of the dataset
            may call all three functions at any time in the epoch.
        position: returns the number of the batch that the user receives next, or None when the epoch is no longer read.
        later: as ``batches``, for the next epoch, counted from 0.

    Returns:
        The functions that the methods returned. They are called in this process with the number of each batch, before
        a worker is sent it.

    Example:
        >>> class Shards(SimpleDataset):
        ...     def follow(self, batches, position, later): print(batches(0).tolist(), position(), later(0).tolist())
        >>> follow(SimpleDataset(Shards(range(9))).take(5), lambda number: [4, 0], lambda: 0, lambda number: [3])
        [4, 0] 0 [3]
        []
    """
    method = getattr(dataset, "follow", None)
    if callable(method):
        planned = method(batches, position, later)
        return [planned] if callable(planned) else []
    found = []
    for inner, translate in dataset._routes() if isinstance(dataset, Wrapper) else ():
        if can_follow(inner):
            both = _translate_batches(batches, translate), _translate_batches(later, translate)
            found += follow(inner, both[0], position, both[1])
    return found


def can_follow(dataset: object) -> bool:
    """Return True if a dataset, or one inside it, has a method ``follow``."""
    return any(callable(getattr(inner, "follow", None)) for inner in nested(dataset))


def _translate_batches(batches: Batches, translate: Translate) -> Batches:
    """Return ``batches`` with translated indices."""
    return lambda number: None if (indices := batches(number)) is None else translate(indices)


# -- columns in memory -------------------------------------------------------------------------------------------------


class ArrayDataset(Dataset):
    """Columns of equal length: sample i is row i of each. A batch costs one gather per column.

    Args:
        *arrays: positional columns: NumPy arrays, torch tensors, lists, or any object with ``__getitem__`` and
            ``__len__``. Several give tuple samples and a list of fields per batch, one gives bare samples. A Series
            (pandas, polars) or pyarrow column is read by position; an array of zarr, tensorstore, h5py, xarray or dask
            is read in bulk per batch, as NumPy arrays. A single DataFrame, pyarrow Table or dict of columns gives named
            columns.
        **columns: named columns: dict samples and dict batches.

    Raises:
        TypeError: positional and named columns, or none; a column that cannot be indexed by position.
        ValueError: the columns differ in length; a column of numbers has missing or masked values.

    Example:
        >>> import numpy as np
        >>> dataset = ArrayDataset(image=np.zeros((4, 8, 8)), label=[3, 1, 4, 1])
        >>> dataset[2]["label"], dataset.get_batch([0, 2])["label"]
        (4, array([3, 4]))

    Source of the idea: ``mxnet.gluon.data.ArrayDataset``.
    """

    def __init__(self, *arrays: Any, **columns: Any) -> None:
        if arrays and columns:
            text = f"ArrayDataset was given {len(arrays)} positional columns and the named columns {list(columns)}"
            raise TypeError(f"{text}: name all columns or none")
        if len(arrays) == 1:
            table = named_columns(arrays[0])
            if table is not None:
                arrays, columns = (), table
        if not arrays and not columns:
            raise TypeError("ArrayDataset was given no columns: give at least one")
        labelled = dict(columns) if columns else {f"array[{i}]": array for i, array in enumerate(arrays)}
        for name, given in labelled.items():
            labelled[name] = column = as_column(given, f"ArrayDataset: column {name}")
            if not is_dataset(column) or (hasattr(column, "ndim") and column.ndim == 0):
                text = f"ArrayDataset: column {name} is {an(type(column))} without a length"
                raise TypeError(f"{text}: give arrays, tensors, lists or datasets")
        (first, column), *others = labelled.items()
        self._length = len(column)
        for name, other in others:
            if len(other) != self._length:
                text = f"All arrays must have the same length; {first} has length {self._length}"
                raise ValueError(f"{text} while {name} has {len(other)}: cut them to one length")
        self._names: tuple[str, ...] | None = tuple(columns) if columns else None
        self._columns: tuple[Any, ...] = tuple(labelled.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            index = bulk.checked_index(index, self._length)
        if self._names is not None:
            return {name: column[index] for name, column in zip(self._names, self._columns, strict=True)}
        if len(self._columns) == 1:
            return self._columns[0][index]
        return tuple([column[index] for column in self._columns])

    @property
    def columns(self) -> dict[str, Any] | tuple[Any, ...]:
        """The columns: a dict if they are named, otherwise a tuple.

        Example:
            >>> ArrayDataset([1, 2], [3, 4]).columns
            ([1, 2], [3, 4])
        """
        return self._columns if self._names is None else dict(zip(self._names, self._columns, strict=True))

    @bulk.bulk
    def get_batch(self, indices: bulk.Indices, empty: Empty = new_array) -> Any:
        """Return a collated batch: one array, a list of fields, or a dict of fields.

        Args:
            indices: flat integers; negative ones count from the end.
            empty: allocates memory: ``empty(shape, dtype)`` returns an array. A loader passes its own.

        Returns:
            NumPy arrays for NumPy columns, tensors for tensors, the default batchify for other columns.

        Raises:
            IndexError: an index is out of range.

        Example:
            >>> import numpy as np
            >>> ArrayDataset(np.arange(5), np.arange(5) * 10).get_batch([4, 0])
            [array([4, 0]), array([40,  0])]
        """
        rows = bulk.checked_indices(indices, self._length)
        return self.as_batch(bulk.gather_rows(self._columns, rows, empty, self._names))

    def as_batch(self, fields: list[Any]) -> Any:
        """Build a batch from ``fields``, one per column, in the dataset's order.

        Example:
            >>> ArrayDataset(x=[1], y=[2]).as_batch(["xs", "ys"])
            {'x': 'xs', 'y': 'ys'}
        """
        if self._names is not None:
            return dict(zip(self._names, fields, strict=True))
        return fields[0] if len(fields) == 1 else fields

    @bulk.bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        where = seeding.attach_keys(bulk.checked_indices(indices, self._length).tolist(), indices)
        columns = [bulk.read_many(column, where) for column in self._columns]
        if self._names is not None:
            names = self._names
            return [dict(zip(names, fields, strict=True)) for fields in zip(*columns, strict=True)]
        return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))

    def __repr__(self) -> str:
        names = self._names or [""] * len(self._columns)
        shown = [f"{name}{'=' if name else ''}{_describe(c)}" for name, c in zip(names, self._columns, strict=True)]
        return f"ArrayDataset({', '.join(shown)}; {self._length} samples)"


def _describe(column: object) -> str:
    if hasattr(column, "shape") and hasattr(column, "dtype"):
        return f"{str(column.dtype).removeprefix('torch.')}{list(column.shape[1:])}"
    return type(column).__name__
