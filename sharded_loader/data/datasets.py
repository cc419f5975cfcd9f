"""Datasets: samples by index, and what can be done with them.

    SimpleDataset(anything)        ArrayDataset(columns)        ConcatDataset(datasets)
          .filter .shard .take .sample .split      -> SubsetDataset: fewer samples, by indices
          .transform .transform_first              -> TransformDataset: other samples
          .cache                                   -> `caching.dataset.StoredDataset`: the same samples, kept
          a + b                                    -> ConcatDataset: one after the other

    Wrapper          around other datasets: TransformDataset, ConcatDataset, and what ``cache`` returns
      View           samples of another dataset, by translated indices: SimpleDataset, SubsetDataset

A dataset owns no thread and no process. Where it can it reads in bulk: ``get_batch(indices)`` returns a finished batch,
``__getitems__(indices)`` a list of samples (see `sharded_loader.data.bulk`). A wrapper has ``set_epoch``, ``get_batch``
and ``__getitems__`` exactly where what it wraps has them.

A part of a part is made a part of the dataset at once, so reading a sample takes one look-up, however often a dataset
was cut. A part owns its array of indices, which cannot be changed.

What can go wrong: an index out of range (IndexError with the length), samples whose structure differs in one batch
(ValueError that names the field). Indices that do not fit a dataset are rejected when the subset is made.

Source of the idea: ``mxnet.gluon.data.dataset``.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from inspect import iscoroutinefunction
from itertools import accumulate
from types import CoroutineType
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.base.described import an, brief, briefs
from sharded_loader.base.imports import provided
from sharded_loader.base.limits import check_fits
from sharded_loader.batching.default import default_batchify_fn
from sharded_loader.batching.protocol import Empty, known_to, new_array
from sharded_loader.data import seeding
from sharded_loader.data.bulk import (
    Indices,
    Int64s,
    bulk,
    bulk_method,
    check_one_index,
    checked_index,
    checked_indices,
    each,
    each_sample,
    gather,
    gather_rows,
    read_many,
)
from sharded_loader.data.columns import as_column, check_dataset, is_dataset, named_columns
from sharded_loader.randomness import rng
from sharded_loader.randomness.shuffle import Selection, composed, shuffle, taken

if TYPE_CHECKING:
    from sharded_loader.caching.dataset import StoredDataset

Batches = Callable[[int], Any]
NextBatch = Callable[[], "int | None"]
Translate = Callable[[Any], Any]


class Dataset:
    """Base of datasets: subclasses write ``__getitem__(index)`` and ``__len__()``.

    ``__getitem__`` may be an ``async def``. Loaders then await the samples of a batch together, at most ``concurrency``
    of them (an attribute of the dataset), or 64.

    Example:
        >>> class Squares(Dataset):
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return index ** 2
        >>> list(Squares().filter(lambda x: x % 2 == 0).take(3))
        [0, 4, 16]
    """

    _inside: Any = ()  # the datasets that this one is made of
    _in_columns: Any = None  # of a dataset that reads some batches in bulk: gather(indices, empty), see `as_bulk`

    def __getitem__(self, index: Any) -> Any:
        """The sample at ``index``."""
        raise NotImplementedError

    def __len__(self) -> int:
        """The number of samples."""
        raise NotImplementedError

    def __add__(self, other: object) -> ConcatDataset:
        """This dataset's samples, then the other's."""
        return ConcatDataset([self, other]) if is_dataset(other) else NotImplemented

    def __radd__(self, other: object) -> Any:
        """The other's samples, then this dataset's; ``sum(datasets)`` begins with 0, which adds none."""
        if type(other) is int and other == 0:
            return self
        return ConcatDataset([other, self]) if is_dataset(other) else NotImplemented

    __array_ufunc__ = None  # or ``array + dataset`` would be NumPy's sum, value by value

    def _part(self, index: slice) -> SubsetDataset:
        """The samples of a slice, which are read when they are asked for."""
        return SubsetDataset(self, range(len(self))[index])

    def filter(self, fn: Callable[[Any], Any]) -> SubsetDataset:
        """The samples for which ``fn(sample)`` is true. Every sample is read once, now.

        Example:
            >>> list(SimpleDataset(range(10)).filter(lambda x: x % 3 == 0))
            [0, 3, 6, 9]
        """
        kept = [index for index, sample in enumerate(each_sample(self)) if fn(sample)]
        return SubsetDataset(self, np.array(kept, np.int64))

    def shard(self, num_shards: int, index: int) -> SubsetDataset:
        """Part ``index`` of ``num_shards`` contiguous parts; the first ones are one sample larger where it must be.

        Example:
            >>> [list(SimpleDataset(range(5)).shard(2, i)) for i in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        if not all(isinstance(one, (int, np.integer)) for one in (num_shards, index)):
            raise TypeError(f"shard({num_shards!r}, {index!r}): give two ints: how many parts, and which of them")
        if num_shards < 1:
            raise ValueError(f"shard(num_shards={num_shards}): the number of shards must be greater than 0")
        if not 0 <= index < num_shards:
            raise ValueError(f"shard index {index} is out of bounds for {num_shards} shards: give 0..{num_shards - 1}")
        size, larger = divmod(len(self), num_shards)
        begin = size * index + min(index, larger)
        return SubsetDataset(self, range(begin, begin + size + (index < larger)))

    def take(self, count: int | None) -> SubsetDataset:
        """The first ``count`` samples, or all where there are fewer or ``count`` is None.

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
        """The samples at the indices that ``sampler`` (ours or torch's) yields, read from it once, now (its epoch 0).

        Example:
            >>> from torch.utils.data import SequentialSampler
            >>> list(SimpleDataset("abc").sample(SequentialSampler(range(2))))
            ['a', 'b']
        """
        torchs = getattr(sys.modules.get("torch.utils.data"), "Sampler", ())  # not imported: it may not be needed
        if not (hasattr(type(sampler), "iter_epoch") or isinstance(sampler, torchs)):
            raise TypeError(
                f"Invalid sampler type: {type(sampler)}. Expected a Sampler of sharded_loader or torch; for a list of "
                "indices use SubsetDataset(dataset, indices)"
            )
        # An __iter__ that a subclass overrides is used, whatever it inherits.
        is_pure = any(known_to(type(sampler), name, ["__iter__"]) for name in ("iter_epoch", "chunks"))
        with contextlib.suppress(TypeError, NotImplementedError):  # it has no length
            what = f"sample() keeps all {len(sampler):,} indices of the {type(sampler).__name__}"
            check_fits(8 * len(sampler), what, "give the sampler to the loader, which asks for a batch at a time")
        order = sampler.iter_epoch(0) if is_pure else iter(sampler)
        try:
            return SubsetDataset(self, np.fromiter((operator.index(index) for index in order), np.int64))
        except TypeError:
            raise TypeError(f"{type(sampler).__name__} yields no single indices: give a sampler of samples") from None

    def split(self, sizes_or_ratios: Sequence[float], seed: int | None = None) -> list[SubsetDataset]:
        """Random parts, disjoint and together complete.

        For parts with equal shares of each class, let scikit-learn choose the indices, and take them:
        ``train, test = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels)``, and then
        ``SubsetDataset(dataset, train)`` and ``SubsetDataset(dataset, test)``.

        Args:
            sizes_or_ratios: ints that sum to ``len(self)``, or ratios that sum to 1 (sizes then by largest
                remainder).
            seed: the same seed gives the same parts; None draws one from torch's default generator.

        Returns:
            The parts. Their indices take 8 bytes each. Parts that are cut by ``take``, ``shard`` or a slice take no
            memory.

        Raises:
            ValueError: The sizes or ratios do not sum to the whole.
            MemoryError: There is no room for the indices.

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
        order = shuffle(len(self), rng.draw_seed() if seed is None else operator.index(seed), "split")
        ends = accumulate(sizes)
        return [SubsetDataset(self, order(np.arange(end - size, end))) for size, end in zip(sizes, ends, strict=True)]

    def cache(
        self, max_bytes: int | str | None = None, path: str | os.PathLike[str] | None = None, key: str | None = None
    ) -> StoredDataset:
        """Read each sample once, and keep it. Put what is random behind the cache: ``.cache(...).transform(augment)``.

        All workers of all loaders share one copy, and so do all ranks of a job on this machine (Linux; elsewhere with
        ``path``). With ``path``, later runs share it too.

        Args:
            max_bytes: What the samples may take: a number of bytes, a text such as "8 GB", or a share of what is free,
                such as "50%". None: three quarters of the memory that is free now, or all that is free on the disk of
                ``path``. No sample is ever evicted. The samples that do not fit are read in each epoch.
            path: A file for the samples. Without it they are in memory.
            key: A text for what the loader cannot see, such as the version of your decoder. A file with another key,
                another number of samples or another first sample is rejected with an error.

        Returns:
            A dataset of the same samples. ``loader.stats()`` counts hits and misses.

        Raises:
            CacheMismatchError: The file belongs to another dataset.
            ValueError: A sample draws random numbers, or depends on the epoch. Or there is not as much memory.
            TypeError: A sample holds something other than arrays, tensors, numbers, strings, bytes, None, and dicts,
                lists and tuples of these.
            OSError: The file cannot be made, or belongs to another user.

        Example:
            >>> decoded = SimpleDataset(range(3)).transform(lambda i: np.full(4, i))
            >>> cached = decoded.cache("1 MB")
            >>> [sample.sum().item() for _ in range(2) for sample in cached], cached.cached
            ([0, 4, 8, 0, 4, 8], 3)

        Source of the idea: CoorDL (VLDB 2021). If each epoch is in a new random order, the share of the samples that
        fits is the share of hits, and to evict gains nothing.
        """
        cached: StoredDataset = provided("dataset", "cache")(self, max_bytes, path, key)
        return cached

    def transform(self, fn: Callable[..., Any], lazy: bool = True, seeded: bool = False) -> Dataset:
        """Pass every sample through ``fn``; a tuple sample is unpacked: ``fn(*sample)``.

        Args:
            fn: called with a sample, returns another.
            lazy: False reads and transforms all samples now, once.
            seeded: seed all that ``fn`` draws from by the seed, the epoch and the index of the sample: ``random``,
                NumPy's and torch's global generators, and every object inside ``fn`` that has a method
                ``set_random_seed`` (albumentations) or ``set_random_state`` (MONAI). Then ``fn`` gives the same in
                every pool, with any number of workers. It takes about 0.1 ms per sample, and threads run ``fn`` one
                at a time. An object that ``fn`` makes while it runs is not seeded: make it before. Needs ``lazy=True``.

        Example:
            >>> from sharded_loader import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform(lambda a, b: a + b))
            [11, 22]
        """
        if seeded and not lazy:
            raise ValueError(
                "transform(lazy=False, seeded=True): what is computed once, now, has no epoch to be seeded by: "
                "choose one of the two"
            )
        transformed = TransformDataset(self, fn, seeded)
        return transformed if lazy else SimpleDataset(list(transformed))

    def transform_first(self, fn: Callable[[Any], Any], lazy: bool = True, seeded: bool = False) -> Dataset:
        """Pass the first field of every tuple sample through ``fn`` (or the sample itself, if it is no tuple).

        Example:
            >>> from sharded_loader import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform_first(lambda a: -a))
            [(-1, 10), (-2, 20)]
        """
        return self.transform(partial(_of_first, fn), lazy, seeded)

    def __iter__(self) -> Iterator[Any]:
        """The samples in order."""
        return each_sample(self)

    def __repr__(self) -> str:
        try:
            return f"{type(self).__name__}({len(self)} samples)"
        except Exception:  # a repr must not raise
            return f"{type(self).__name__}(unknown number of samples)"


# -- some samples, by index --------------------------------------------------------------------------------------------


def nested(dataset: object) -> Iterator[Any]:
    """A dataset, and those inside it."""
    yield dataset
    for inner in dataset._inside if isinstance(dataset, Wrapper) else ():
        yield from nested(inner)


def tell_epoch(dataset: object, epoch: int) -> None:
    """Tell a dataset inside another one the epoch, if it has ``set_epoch``."""
    if (tell := seeding.set_epoch_of(dataset)) is not None:
        tell(epoch)


class Wrapper(Dataset):
    """Around another dataset, or several: forwards ``set_epoch`` where one of them has it."""

    _dataset: Any

    @property
    def _inside(self) -> Any:
        return (self._dataset,)

    def __len__(self) -> int:
        return len(self._dataset)

    @bulk
    def set_epoch(self, epoch: int) -> None:
        """Tell the datasets inside which epoch is read."""
        for inner in self._inside:
            tell_epoch(inner, epoch)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        """The datasets inside, each with the function that makes indices of this dataset its own."""
        return ((inner, lambda indices: indices) for inner in self._inside)


class Cache(Wrapper):
    """Base class of caches, which `Dataset.cache` makes: it keeps samples of the dataset inside, ``_dataset``.

    For a cache of your own, write ``__getitem__``, and ``__init__(self, dataset, max_bytes, path, key)`` with the
    arguments of `Dataset.cache`. Then call ``provide("dataset", "cache", YourCache)``.
    """

    counts: Any = (0, 0, 0)
    """Samples that it had, samples that it had not, and the bytes that it holds. The loader's statistics tell them."""


class View(Wrapper):
    """Samples of the other dataset, by translated indices. Subclasses write `_one` and `_inner`, not ``__getitem__``.

    A ``__getitem__`` that is not of the same class as the bulk methods is an override, and they are not used.
    """

    _one: Callable[[Any], Any]  # the sample at one index
    _inner: Callable[[Indices], Int64s]  # indices into the wrapped dataset

    def __getitem__(self, index: Any) -> Any:
        return self._one(index)

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Many samples at once, as the dataset inside returns them."""
        return bulk_method(self._dataset, "__getitems__")(seeding.translated(self._inner(indices).tolist(), indices))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        return gather(self._dataset, self._inner(indices), empty)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        return [(self._dataset, self._inner)]


class SimpleDataset(View):
    """Any object with ``__getitem__`` and ``__len__`` as a dataset with this library's methods.

    Integer indices are checked (negative ones work, whether the object knows them or not); any other index, such as
    a slice or a column name, is passed on.

    Args:
        data: a list, a NumPy array, a torch or Hugging Face dataset, ...

    Example:
        >>> SimpleDataset(range(10))[-1]
        9
    """

    _is_part = True  # its subclasses are not; see `bulk.part_of`

    def __init__(self, data: object) -> None:
        self._dataset = check_dataset(data, "SimpleDataset")

    def _one(self, index: object) -> Any:
        if isinstance(index, (int, np.integer)):
            index = checked_index(index, len(self._dataset))
        return self._dataset[index]

    def _inner(self, indices: Indices) -> Int64s:
        return checked_indices(indices, len(self._dataset))

    def __repr__(self) -> str:
        return f"SimpleDataset({len(self)} samples of {type(self._dataset).__name__})"


class SubsetDataset(View):
    """The samples of ``dataset`` at ``indices``, in that order: what ``take``, ``shard``, ``split``, ... return.

    A part of a part is a part of the dataset: `dataset` is never a `SubsetDataset`, and `indices` always count the
    samples of `dataset`.

    Args:
        dataset: anything with ``__getitem__`` and ``__len__``.
        indices: integers in 0..len(dataset)-1. A range costs no memory.

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

    _is_part = True  # its subclasses are not; see `bulk.part_of`

    def __init__(self, dataset: Any, indices: Selection | Sequence[int]) -> None:
        dataset = check_dataset(dataset, "SubsetDataset")
        chosen: Selection
        if isinstance(indices, range):
            if len(indices):
                checked_indices([indices[0], indices[-1]], len(dataset))
            chosen = indices
        else:
            # A copy: the caller may shuffle an array of indices again, for another subset.
            chosen = np.array(checked_indices(indices, len(dataset)))
        if type(dataset) is SubsetDataset and vars(dataset).keys() == {"_dataset", "_indices"}:  # no method of its own
            dataset, chosen = dataset._dataset, composed(dataset._indices, chosen)
        if isinstance(chosen, np.ndarray):
            chosen.flags.writeable = False
        self._dataset, self._indices = dataset, chosen

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def dataset(self) -> Any:
        """The dataset that the samples are taken from.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").take(4)[2:].dataset
            SimpleDataset(5 samples of str)
        """
        return self._dataset

    @property
    def indices(self) -> Selection:
        """The indices of the samples in `dataset`: a range or an int64 array, both read-only.

        The samples are ``[dataset[index] for index in indices]``. So the labels of a part are ``labels[part.indices]``,
        if ``labels`` is an array of the labels of the whole dataset.

        Example:
            >>> from sharded_loader import SimpleDataset
            >>> SimpleDataset("abcde").shard(2, 1).indices
            range(3, 5)
            >>> train, test = SimpleDataset("abcde").split([3, 2], seed=1)
            >>> sorted([*train.indices.tolist(), *test.indices.tolist()])
            [0, 1, 2, 3, 4]
        """
        return self._indices

    def _one(self, index: object) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        return self._dataset[int(self._indices[checked_index(index, len(self._indices))])]

    def _inner(self, indices: Indices) -> Int64s:
        where = checked_indices(indices, len(self._indices))
        if isinstance(self._indices, range):  # `taken`, without a call
            return self._indices.start + self._indices.step * where
        return taken(self._indices, where)

    def __repr__(self) -> str:
        return f"<{len(self)} of {brief(self._dataset)}>"


# -- the sizes of parts ------------------------------------------------------------------------------------------------


def split_sizes(length: int, parts: list[Any]) -> list[int]:
    """Sizes of parts that sum to ``length``, from sizes or ratios.

    Raises:
        ValueError: they do not sum to the whole, or one is not a number of at least 0.

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
    exact = [Fraction(float(part)) for part in parts]
    return apportioned(length, [part * length / sum(exact) for part in exact], digits=9)


def apportioned(total: int, shares: Sequence[Fraction], digits: int | None = None) -> list[int]:
    """Whole numbers with this total, each a share rounded down or up. The largest remainders are rounded up.

    Args:
        total: what the shares sum to.
        shares: of the total, exact.
        digits: decimal places of the remainders that count. So 0.29 * 100 counts as a whole 29. None: all.

    Returns:
        One number per share; of equal remainders, the earlier one is rounded up.

    Example:
        >>> apportioned(10, [Fraction(10, 3)] * 3)
        [4, 3, 3]
    """
    counts = list(map(math.floor, shares))
    exact = [count - share for count, share in zip(counts, shares, strict=True)]
    below: list[Any] = exact if digits is None else [round(float(one), digits) for one in exact]
    for number in sorted(range(len(counts)), key=below.__getitem__)[: total - sum(counts)]:
        counts[number] += 1
    return counts


# -- through a function ------------------------------------------------------------------------------------------------


class TransformDataset(Wrapper):
    """The samples of a dataset, each passed through a function; made by `Dataset.transform`.

    A slice is a dataset of those samples. Keys, such as strings and tuples, are passed on to the wrapped dataset.

    Example:
        >>> list(TransformDataset(SimpleDataset([1, 2, 3]), str)[1:])
        ['2', '3']
    """

    def __init__(self, dataset: object, fn: Callable[..., Any], seeded: bool = False) -> None:
        self._dataset = check_dataset(dataset, "TransformDataset")
        if not callable(fn):
            raise TypeError(f"transform was given {fn!r}, which is not callable: give a function of a sample")
        self._fn = fn
        self._is_async = iscoroutinefunction(fn) or iscoroutinefunction(type(fn).__call__)
        if self._is_async and seeded:
            raise TypeError(
                f"transform({fn!r}, seeded=True): an async def cannot be seeded: draw from sample_rng() there"
            )
        self._level = seeding.next_level(dataset, TransformDataset) if seeded else None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        check_one_index(index)
        found = self._dataset[index]
        is_coroutine = type(found) is CoroutineType
        return self._apply_async(found, is_coroutine) if is_coroutine or self._is_async else self._apply(found)

    async def _apply_async(self, found: Any, is_coroutine: bool) -> Any:
        sample = self._apply(await found if is_coroutine else found)
        return await sample if self._is_async else sample

    def _apply(self, sample: object) -> Any:
        fields = sample if isinstance(sample, tuple) else (sample,)
        if self._level is None:
            return self._fn(*fields)
        with seeding.transform_seed(self._fn, self._level):
            return self._fn(*fields)

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> Any:
        """Many samples: read at once, then transformed one by one."""
        indices = seeding.translated(indices, indices)
        samples = read_many(self._dataset, indices)  # which hands out a copy: these are looked at again
        if self._is_async:
            return each(self._apply, samples, seeding.keys_of(indices))
        return seeding.each_by_its_key(self._apply, samples, indices)

    def __repr__(self) -> str:
        return f"{brief(self._dataset)}.transform({self._fn!r}{'' if self._level is None else ', seeded=True'})"


def _of_first(fn: Callable[[Any], Any], first: object, *others: object) -> Any:
    """``fn`` of the first field of a sample."""
    return (fn(first), *others) if others else fn(first)


# -- one after the other -----------------------------------------------------------------------------------------------


class ConcatDataset(Wrapper):
    """Several datasets as one, one after the other; nested ones (``a + b + c``) are flattened.

    It reads in bulk where every part does. A batch out of several parts is the default batchify of its samples, which
    each part reads at once.

    Args:
        datasets: at least one; anything with ``__getitem__`` and ``__len__``.

    Example:
        >>> list(ConcatDataset(["ab", "c"]))
        ['a', 'b', 'c']

    Source of the idea: ``torch.utils.data.ConcatDataset``.
    """

    def __init__(self, datasets: Iterable[Any]) -> None:
        flat = (part._parts if type(part) is ConcatDataset else [part] for part in datasets)
        self._parts: list[Any] = [check_dataset(part, "ConcatDataset") for parts in flat for part in parts]
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
        positions = [(number, np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
        return [(self._parts[number], where[chosen] - self._begins[number], chosen) for number, chosen in positions]

    @bulk
    def __getitems__(self, indices: Indices) -> Any:
        """Many samples: each part reads its own at once."""
        outer = seeding.handed_out(indices)
        outer = seeding.translated(outer, outer)
        chunks = [(part, inner.tolist(), positions.tolist()) for part, inner, positions in self._chunks(indices)]
        samples: list[Any] = [None] * len(outer)
        for part, inner, positions in chunks:
            found = read_many(part, seeding.translated(inner, outer, positions))
            for position, sample in zip(positions, found, strict=True):
                samples[position] = sample
        return samples

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch, in memory from ``empty``."""
        chunks = self._chunks(indices)
        if len(chunks) == 1:
            return gather(chunks[0][0], chunks[0][1], empty)
        return default_batchify_fn.assemble(ConcatDataset.__getitems__(self, indices), empty)

    def _routes(self) -> Iterable[tuple[Any, Translate]]:
        return ((part, partial(self._of_part, part)) for part in self._parts)

    def _of_part(self, part: object, indices: Indices) -> Int64s:
        """The indices that lie in one part, as the part counts them."""
        chunks = [inner for owner, inner, _ in self._chunks(indices) if owner is part]
        return np.concatenate([np.zeros(0, np.int64), *chunks])

    def __repr__(self) -> str:
        return " + ".join(briefs(self._parts))


# -- mixed -------------------------------------------------------------------------------------------------------------


class Mixture(View):
    """Base class of several datasets as one, whose order is not that of the indices: see `sharded_loader.mixing`."""

    sources_of: Callable[[Any], Int64s]
    """For each of the datasets, how many of the samples at these indices are its."""

    pairs: Callable[[Any, int], list[tuple[int, int]]]
    """Which dataset each of these samples comes from, and its index in it: of indices, in an epoch."""


def mixture_of(dataset: object) -> Mixture | None:
    """The mixture whose samples a dataset has, at the same indices, perhaps transformed; None if there is none."""
    while type(dataset) is TransformDataset:
        dataset = dataset._dataset
    return dataset if isinstance(dataset, Mixture) else None


def has_mixture(dataset: object) -> bool:
    """Whether a dataset is a mixture, or has one inside."""
    return any(isinstance(one, Mixture) for one in nested(dataset))


# -- datasets that read from servers -----------------------------------------------------------------------------------


def follow(dataset: object, batches: Batches, position: NextBatch, later: Batches) -> None:
    """Tell the datasets inside that have a method ``follow`` which samples come. `ShardDataset` fetches shards by it.

    Args:
        dataset: any; its wrappers translate the indices.
        batches: number -> the indices of a batch; None after the last one. All three functions are called by threads of
            the dataset, at any time in the epoch.
        position: the number of the batch that the user receives next; None: the epoch is not read any more.
        later: number -> the indices of a batch of the next epoch, counted from 0; None after the last one.

    Example:
        >>> class Shards(SimpleDataset):
        ...     def follow(self, batches, position, later): print(batches(0).tolist(), position(), later(0).tolist())
        >>> follow(SimpleDataset(Shards(range(9))).take(5), lambda number: [4, 0], lambda: 0, lambda number: [3])
        [4, 0] 0 [3]
    """
    method = getattr(dataset, "follow", None)
    if callable(method):
        method(batches, position, later)
    elif isinstance(dataset, Wrapper):
        for inner, translate in dataset._routes():
            if can_follow(inner):
                follow(inner, _of_inner(batches, translate), position, _of_inner(later, translate))


def can_follow(dataset: object) -> bool:
    """Whether a dataset, or one inside it, wants to know which samples come.

    Example:
        >>> can_follow([1, 2])
        False
    """
    return any(callable(getattr(one, "follow", None)) for one in nested(dataset))


def _of_inner(batches: Batches, translate: Translate) -> Batches:
    """The indices of each batch, translated."""

    def translated_batch(number: int) -> Any:
        indices = batches(number)
        return None if indices is None else translate(indices)

    return translated_batch


# -- columns in memory -------------------------------------------------------------------------------------------------


class ArrayDataset(Dataset):
    """Columns of the same length: sample i is the i-th entry of each. A batch costs one gather per column.

    Args:
        *arrays: positional columns: NumPy arrays, torch tensors, lists, or any object with ``__getitem__`` and
            ``__len__``. Several give tuple samples and a list of fields per batch, one gives bare samples. A pandas
            or polars Series and a pyarrow column are read by position. An array of zarr, tensorstore, h5py, xarray or
            dask gives its rows as NumPy arrays, and reads those of a batch at once. A DataFrame, a pyarrow Table or a
            dict of columns, given alone, is its columns by name.
        **columns: named columns: dict samples and dict batches. Positional and named together is a TypeError.

    Raises:
        TypeError: positional and named columns, or none; a column that cannot be indexed by position.
        ValueError: the columns have different lengths (names two that do); a column of numbers has missing or masked
            values.

    Example:
        >>> import numpy as np
        >>> dataset = ArrayDataset(image=np.zeros((4, 8, 8)), label=[3, 1, 4, 1])
        >>> dataset[2]["label"], dataset.get_batch([0, 2])["label"]
        (4, array([3, 4]))

    Source of the idea: ``mxnet.gluon.data.ArrayDataset``.
    """

    def __init__(self, *arrays: Any, **columns: Any) -> None:
        if arrays and columns:
            raise TypeError(
                f"ArrayDataset was given {len(arrays)} positional columns and the named columns {list(columns)}: "
                "name all columns or none"
            )
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
                raise TypeError(
                    f"ArrayDataset: column {name} is {an(type(column))} without a length: give arrays, "
                    "tensors, lists or datasets"
                )
        (first, column), *others = labelled.items()
        self._length = len(column)
        for name, other in others:
            if len(other) != self._length:
                raise ValueError(
                    f"All arrays must have the same length; {first} has length {self._length} while {name} has "
                    f"{len(other)}: cut them to one length"
                )
        self._names: tuple[str, ...] | None = tuple(columns) if columns else None
        self._columns: tuple[Any, ...] = tuple(labelled.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            index = checked_index(index, self._length)
        if self._names is not None:
            return {name: column[index] for name, column in zip(self._names, self._columns, strict=True)}
        if len(self._columns) == 1:
            return self._columns[0][index]
        return tuple([column[index] for column in self._columns])

    @property
    def columns(self) -> dict[str, Any] | tuple[Any, ...]:
        """The columns: a dict of the named ones, otherwise a tuple.

        Example:
            >>> ArrayDataset([1, 2], [3, 4]).columns
            ([1, 2], [3, 4])
        """
        return self._columns if self._names is None else dict(zip(self._names, self._columns, strict=True))

    @bulk
    def get_batch(self, indices: Indices, empty: Empty = new_array) -> Any:
        """A finished batch: one array, a list of fields, or a dict of fields.

        Args:
            indices: flat integers; negative ones count from the end.
            empty: gives the memory: ``empty(shape, dtype)`` returns an array. A loader gives its own.

        Returns:
            NumPy arrays for NumPy columns, tensors for tensors, the default batchify of the others.

        Raises:
            IndexError: one is out of range.

        Example:
            >>> import numpy as np
            >>> ArrayDataset(np.arange(5), np.arange(5) * 10).get_batch([4, 0])
            [array([4, 0]), array([40,  0])]
        """
        return self.as_batch(gather_rows(self._columns, checked_indices(indices, self._length), empty))

    def as_batch(self, fields: list[Any]) -> Any:
        """The batch whose columns are these, in the order of the dataset's.

        Example:
            >>> ArrayDataset(x=[1], y=[2]).as_batch(["xs", "ys"])
            {'x': 'xs', 'y': 'ys'}
        """
        if self._names is not None:
            return dict(zip(self._names, fields, strict=True))
        return fields[0] if len(fields) == 1 else fields

    @bulk
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        where = seeding.translated(checked_indices(indices, self._length).tolist(), indices)
        columns = [read_many(column, where) for column in self._columns]
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
