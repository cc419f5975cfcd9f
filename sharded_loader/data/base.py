"""The base of all datasets, what every one of them can do, and the simplest two.

`Dataset` has the methods that make a dataset of another: each is a few lines here, the work is done in subsets,
caching and concat. `SimpleDataset` gives them to anything that can be indexed, `TransformDataset` passes samples
through a function. A `Wrapper` has ``set_epoch``, ``get_batch`` and ``__getitems__`` exactly where what it
wraps has them.

What can go wrong: an index out of range is an IndexError that says the length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from sharded_loader.batching.protocol import Empty, new_array
from sharded_loader.data.bulk import (
    check_one_index,
    checked_index,
    checked_indices,
    each_at_its_place,
    gather,
    offered_if,
    read_many,
    translated,
)
from sharded_loader.data.columns import as_dataset
from sharded_loader.data.overrides import has
from sharded_loader.data.seeding import next_level, transform_seed

if TYPE_CHECKING:
    from sharded_loader.data.cache import CachedDataset
    from sharded_loader.data.concat import ConcatDataset
    from sharded_loader.data.subsets import SubsetDataset

Indices = Sequence[int] | np.ndarray[Any, Any]


class Dataset:
    """Base of datasets: subclasses write ``__getitem__(index)`` and ``__len__()``.

    Example:
        >>> class Squares(Dataset):
        ...     def __len__(self): return 10
        ...     def __getitem__(self, index): return index ** 2
        >>> list(Squares().filter(lambda x: x % 2 == 0).take(3))
        [0, 4, 16]
    """

    def __getitem__(self, index: Any) -> Any:
        """The sample at ``index``."""
        raise NotImplementedError

    def __len__(self) -> int:
        """How many samples there are."""
        raise NotImplementedError

    def __add__(self, other: Any) -> ConcatDataset:
        """This dataset's samples, then the other's."""
        from sharded_loader.data.concat import ConcatDataset

        if not is_dataset(other):
            return NotImplemented
        return ConcatDataset([self, other])

    def __radd__(self, other: Any) -> Any:
        """The other's samples, then this dataset's; ``sum(datasets)`` begins with 0, which adds none."""
        from sharded_loader.data.concat import ConcatDataset

        if type(other) is int and other == 0:
            return self
        return ConcatDataset([other, self]) if is_dataset(other) else NotImplemented

    __array_ufunc__ = None  # or ``array + dataset`` would be NumPy's sum, value by value

    def _part(self, index: slice) -> SubsetDataset:
        """The samples of a slice, which are read when they are asked for."""
        from sharded_loader.data.subsets import SubsetDataset

        return SubsetDataset(self, range(len(self))[index])

    def filter(self, fn: Callable[[Any], Any]) -> SubsetDataset:
        """The samples for which ``fn(sample)`` is true. Every sample is read once, now.

        Example:
            >>> list(SimpleDataset(range(10)).filter(lambda x: x % 3 == 0))
            [0, 3, 6, 9]
        """
        from sharded_loader.data.subsets import SubsetDataset

        kept = [index for index in range(len(self)) if fn(self[index])]
        return SubsetDataset(self, np.array(kept, np.int64))

    def shard(self, num_shards: int, index: int) -> SubsetDataset:
        """Part ``index`` of ``num_shards`` contiguous parts; the first ones are one sample larger where it must be.

        Raises:
            ValueError: ``num_shards`` < 1, or ``index`` is not in 0..num_shards-1.

        Example:
            >>> [list(SimpleDataset(range(5)).shard(2, i)) for i in range(2)]
            [[0, 1, 2], [3, 4]]
        """
        from sharded_loader.data.subsets import SubsetDataset, shard_range

        return SubsetDataset(self, shard_range(len(self), num_shards, index))

    def take(self, count: int | None) -> SubsetDataset:
        """The first ``count`` samples, or all where there are fewer or ``count`` is None.

        Raises:
            ValueError: ``count`` is negative.

        Example:
            >>> list(SimpleDataset("abc").take(2))
            ['a', 'b']
        """
        from sharded_loader.data.subsets import SubsetDataset, take_range

        return SubsetDataset(self, take_range(len(self), count))

    def sample(self, sampler: Any) -> SubsetDataset:
        """The samples at the indices that ``sampler`` yields, read from it once, now (its epoch 0).

        Args:
            sampler: a Sampler of ours or of torch.

        Raises:
            TypeError: it is none (a list, say).

        Example:
            >>> from torch.utils.data import SequentialSampler
            >>> list(SimpleDataset("abc").sample(SequentialSampler(range(2))))
            ['a', 'b']
        """
        from sharded_loader.data.subsets import SubsetDataset, sampler_indices

        return SubsetDataset(self, sampler_indices(sampler))

    def split(self, sizes_or_ratios: Sequence[float], seed: int | None = None) -> list[SubsetDataset]:
        """Random parts, disjoint and together complete.

        Args:
            sizes_or_ratios: ints that sum to ``len(self)``, or ratios that sum to 1 (sizes then by largest
                remainder).
            seed: the same seed gives the same parts; None draws one from torch's default generator.

        Raises:
            ValueError: they do not sum to the length or to 1, or one is negative.

        Example:
            >>> train, test = SimpleDataset(range(10)).split([0.8, 0.2], seed=1)
            >>> len(train), len(test), sorted([*train, *test]) == list(range(10))
            (8, 2, True)

        Source of the idea: ``torch.utils.data.random_split``.
        """
        from sharded_loader.data.subsets import SubsetDataset, split_indices

        return [SubsetDataset(self, part) for part in split_indices(len(self), sizes_or_ratios, seed)]

    def cache(self, max_bytes: int | None = None) -> CachedDataset:
        """Remember samples once read, until ``max_bytes`` are full; see `CachedDataset`.

        Example:
            >>> SimpleDataset("abc").cache()[1]
            'b'
        """
        from sharded_loader.data.cache import CachedDataset

        return CachedDataset(self, max_bytes)

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
            >>> from sharded_loader.data.datasets import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform(lambda a, b: a + b))
            [11, 22]
        """
        if lazy:
            return TransformDataset(self, fn, seeded)
        if seeded:
            raise ValueError(
                "transform(lazy=False, seeded=True): what is computed once, now, has no epoch to be seeded by: "
                "choose one of the two"
            )
        return SimpleDataset([*TransformDataset(self, fn)])

    def transform_first(self, fn: Callable[[Any], Any], lazy: bool = True, seeded: bool = False) -> Dataset:
        """Pass the first field of every tuple sample through ``fn`` (or the sample itself, if it is no tuple).

        Example:
            >>> from sharded_loader.data.datasets import ArrayDataset
            >>> list(ArrayDataset([1, 2], [10, 20]).transform_first(lambda a: -a))
            [(-1, 10), (-2, 20)]
        """
        return self.transform(_First(fn), lazy, seeded)

    def __iter__(self) -> Iterator[Any]:
        """The samples in order."""
        return (self[index] for index in range(len(self)))


def is_dataset(value: Any) -> bool:
    """Whether ``value`` has samples by index, and a length.

    Example:
        >>> is_dataset([1]), is_dataset(iter([1]))
        (True, False)
    """
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def check_dataset(value: Any, owner: str) -> Any:
    """Refuse what has no samples by index.

    Returns:
        The dataset, read by position: see `as_dataset`.

    Raises:
        TypeError: no ``__getitem__`` or no ``__len__``, or a table.

    Example:
        >>> check_dataset([1, 2], "SimpleDataset")
        [1, 2]
    """
    if not is_dataset(value):
        raise TypeError(
            f"{owner} needs an object with __getitem__ and __len__, not a {type(value).__name__}: "
            "read a stream into a list, or give a dataset that can be indexed"
        )
    return as_dataset(value, owner)


def _level_of(dataset: Any) -> int | None:
    return dataset._level if isinstance(dataset, TransformDataset) else None


class _First:
    def __init__(self, fn: Callable[[Any], Any]) -> None:
        self.fn = fn

    def __call__(self, first: Any, *others: Any) -> Any:
        return (self.fn(first), *others) if others else self.fn(first)

    def __repr__(self) -> str:
        return f"first: {self.fn!r}"


class Wrapper(Dataset):
    """Base of datasets around one other: forwards ``set_epoch`` where the other has it."""

    _dataset: Any

    def __len__(self) -> int:
        return len(self._dataset)

    @offered_if(has("set_epoch"))
    def set_epoch(self, epoch: int) -> None:
        """Tell the wrapped dataset which epoch is read."""
        self._dataset.set_epoch(epoch)


class SimpleDataset(Wrapper):
    """Any object with ``__getitem__`` and ``__len__`` as a dataset with this library's methods.

    Integer indices are checked (negative ones work, whether the object knows them or not); any other index, such as
    a slice or a column name, is passed on.

    Args:
        data: a list, a NumPy array, a torch or Hugging Face dataset, ...

    Raises:
        TypeError: it lacks one of the two.

    Example:
        >>> SimpleDataset(range(10))[-1]
        9
    """

    def __init__(self, data: Any) -> None:
        self._dataset = check_dataset(data, "SimpleDataset")

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, (int, np.integer)):
            index = checked_index(index, len(self._dataset))
        return self._dataset[index]

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples at once."""
        inner = checked_indices(indices, len(self._dataset)).tolist()
        return list(self._dataset.__getitems__(translated(inner, indices)))

    @offered_if(has("get_batch"))
    def get_batch(self, indices: Indices) -> Any:
        """A finished batch."""
        return self._gather(indices, new_array)

    @offered_if(has("get_batch"))
    def _gather(self, indices: Indices, empty: Empty) -> Any:
        return gather(self._dataset, checked_indices(indices, len(self._dataset)), empty)

    def __repr__(self) -> str:
        return f"SimpleDataset({len(self)} samples of {type(self._dataset).__name__})"


class TransformDataset(Wrapper):
    """The samples of a dataset, each passed through a function; made by `Dataset.transform`.

    A slice is a dataset of those samples. Keys, such as strings and tuples, are passed on to the wrapped dataset.

    Example:
        >>> TransformDataset(SimpleDataset([1, 2]), str)[0]
        '1'
        >>> list(TransformDataset(SimpleDataset([1, 2, 3]), str)[1:])
        ['2', '3']
    """

    def __init__(self, dataset: Any, fn: Callable[..., Any], seeded: bool = False) -> None:
        self._dataset = check_dataset(dataset, "TransformDataset")
        if not callable(fn):
            raise TypeError(f"transform was given {fn!r}, which is not callable: give a function of a sample")
        self._fn = fn
        self._seeded = seeded
        self._level = next_level(dataset, _level_of) if seeded else None

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._part(index)
        check_one_index(index)
        return self._apply(self._dataset[index])

    def _apply(self, sample: Any) -> Any:
        if self._seeded:
            with transform_seed(self._fn, self._level or 0):
                return self._fn(*sample) if isinstance(sample, tuple) else self._fn(sample)
        return self._fn(*sample) if isinstance(sample, tuple) else self._fn(sample)

    @offered_if(has("__getitems__"))
    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Many samples: read at once, then transformed one by one."""
        indices = translated(indices, indices)
        samples = read_many(self._dataset, indices)  # which hands out a copy: these are looked at again
        with each_at_its_place(indices) as turn_to:
            for position, sample in enumerate(samples):
                turn_to(position)
                samples[position] = self._apply(sample)
        return samples

    def __repr__(self) -> str:
        return f"{self._dataset!r}.transform({self._fn!r}{', seeded=True' if self._seeded else ''})"
