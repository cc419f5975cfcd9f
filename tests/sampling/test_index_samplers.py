"""Index samplers: every index as often as promised, the same for the same (seed, epoch), len always right."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    FilterSampler,
    IntervalSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.base import limits
from sharded_loader.base.limits import Limit
from sharded_loader.samplers.index_samplers import sort_order, sortable

EVERY_KIND: dict[str, Callable[[int | None], Sampler[int]]] = {
    "sequential": lambda seed: SequentialSampler(37, 2),
    "random": lambda seed: RandomSampler(37, seed=seed),
    "subset": lambda seed: SubsetRandomSampler(range(5, 60, 2), seed=seed),
    "weighted": lambda seed: WeightedRandomSampler([0, 1, 2, 3], 45, seed=seed),
    "weighted, none twice": lambda seed: WeightedRandomSampler(np.arange(40), 31, replacement=False, seed=seed),
    "filter": lambda seed: FilterSampler(lambda sample: sample % 3, range(50)),
    "interval": lambda seed: IntervalSampler(37, 5),
    "interval, once": lambda seed: IntervalSampler(37, 5, rollover=False),
    "sorted": lambda seed: SortedSampler([5, 1, 4, 1, 2] * 6),
    "split": lambda seed: SplitSampler(50, 3, 2, seed=seed),
    "split, in order": lambda seed: SplitSampler(50, 4, 3, shuffle=False, seed=seed),
}
SHUFFLED = ["random", "subset", "weighted", "weighted, none twice", "split"]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_epoch_is_a_pure_function_of_seed_and_epoch(kind: str) -> None:
    make = EVERY_KIND[kind]
    one, other = make(7), make(7)
    epochs = [list(one) for _ in range(3)]
    assert one.epoch == 3
    # Another object, other order of asking, nothing iterated before.
    assert list(other.iter_epoch(2)) == epochs[2]
    assert list(other.iter_epoch(0)) == epochs[0]
    assert other.epoch == 0
    other.set_epoch(1)
    assert list(other) == epochs[1]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_len_is_what_an_epoch_yields_and_indices_are_python_ints(kind: str) -> None:
    sampler = EVERY_KIND[kind](7)
    for epoch in range(3):
        length = len(sampler)
        items = list(sampler)
        assert len(items) == length == sampler.len_epoch(epoch)
        assert all(type(index) is int for index in items)


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_place_of_an_epoch_can_be_reached(kind: str) -> None:
    sampler = EVERY_KIND[kind](7)
    whole = list(sampler.iter_epoch(1))
    for start in range(len(whole) + 3):
        assert list(sampler.iter_epoch(1, start)) == whole[start:]
    table = sampler.epoch_table(1)
    for step in (1, 2, 7):
        found = table.at(np.arange(0, len(whole), step))
        assert found.dtype == np.int64 and found.tolist() == whole[::step]


@pytest.mark.parametrize("kind", SHUFFLED)
def test_epochs_and_seeds_differ(kind: str) -> None:
    make = EVERY_KIND[kind]
    sampler = make(7)
    assert list(sampler) != list(sampler)
    assert list(make(7)) != list(make(8))


@pytest.mark.parametrize("kind", SHUFFLED)
def test_without_a_seed_torch_manual_seed_decides(kind: str) -> None:
    torch.manual_seed(3)
    one = EVERY_KIND[kind](None)
    torch.manual_seed(3)
    assert list(EVERY_KIND[kind](None)) == list(one)
    assert isinstance(one.seed, int)


def test_iter_captures_seed_and_epoch_when_it_is_called() -> None:
    sampler = RandomSampler(20, seed=1)
    first = iter(sampler)
    sampler.set_epoch(5)
    sampler.seed = 99
    assert list(first) == list(RandomSampler(20, seed=1))
    assert sampler.epoch == 5


def test_interleaved_iterators_each_have_their_own_epoch() -> None:
    sampler, reference = RandomSampler(20, seed=1), RandomSampler(20, seed=1)
    one, two = iter(sampler), iter(sampler)
    pairs = list(zip(one, two, strict=True))
    assert [a for a, _ in pairs] == list(reference.iter_epoch(0))
    assert [b for _, b in pairs] == list(reference.iter_epoch(1))


@given(length=st.integers(0, 300), seed=st.integers(), epoch=st.integers(0, 10**6))
def test_random_sampler_yields_every_index_once(length: int, seed: int, epoch: int) -> None:
    assert sorted(RandomSampler(length, seed=seed).iter_epoch(epoch)) == list(range(length))


@given(indices=st.lists(st.integers(-(2**40), 2**40)), seed=st.integers())
def test_subset_random_sampler_yields_the_given_indices(indices: list[int], seed: int) -> None:
    assert Counter(SubsetRandomSampler(indices, seed=seed)) == Counter(indices)


@given(length=st.integers(1, 200), data=st.data())
def test_interval_sampler_yields_every_index_once(length: int, data: st.DataObject) -> None:
    interval = data.draw(st.integers(1, length))
    expected = [index for first in range(interval) for index in range(first, length, interval)]
    assert list(IntervalSampler(length, interval)) == expected
    once = IntervalSampler(length, interval, rollover=False)
    assert list(once) == list(range(0, length, interval))
    assert len(once) == len(list(once))


@given(parts=st.integers(1, 9), extra=st.integers(0, 50), seed=st.integers())
def test_the_parts_of_a_split_are_disjoint_and_complete(parts: int, extra: int, seed: int) -> None:
    length = parts + extra
    split = [list(SplitSampler(length, parts, part, seed=seed)) for part in range(parts)]
    assert sorted(index for part in split for index in part) == list(range(length))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_each_part_of_a_split_has_an_order_of_its_own() -> None:
    for epoch in range(3):
        parts = [list(SplitSampler(400, 4, part, seed=1).iter_epoch(epoch)) for part in range(4)]
        assert len({tuple(index % 100 for index in part) for part in parts}) == 4


def test_subsets_of_one_dataset_have_orders_of_their_own() -> None:
    parts = [list(SubsetRandomSampler(range(begin, begin + 100), seed=1)) for begin in range(0, 400, 100)]
    assert len({tuple(index % 100 for index in part) for part in parts}) == 4
    again = [list(SubsetRandomSampler(np.arange(begin, begin + 100), seed=1)) for begin in range(0, 400, 100)]
    assert again == parts


class ByLabel:
    """Like a pandas Series whose index is not 0, 1, 2, ...: ``keys[i]`` looks up a label."""

    def __init__(self, values: list[Any]) -> None:
        self._values = values

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
        return np.array(self._values, dtype)

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: int) -> Any:
        return dict(enumerate(self._values[::-1], 1))[label]


@pytest.mark.parametrize("keys", [[3, 9, 4, 1, 7], [0.5, 2.5, 1.5, -1.0, 2.0], ["c", "e", "d", "a", "b"]])
def test_keys_with_labels_and_tensors_are_read_by_position(keys: list[Any]) -> None:
    expected = list(SortedSampler(keys))
    assert list(SortedSampler(ByLabel(keys))) == expected  # type: ignore[arg-type]
    if not isinstance(keys[0], str):
        for dtype in (torch.float64, torch.bfloat16):
            assert list(SortedSampler(torch.tensor(keys, dtype=dtype))) == expected  # type: ignore[arg-type]


@given(keys=st.lists(st.integers(-5, 5)), reverse=st.booleans())
def test_sorted_sampler_sorts_as_python_does(keys: list[int], reverse: bool) -> None:
    expected = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
    assert list(SortedSampler(keys, reverse)) == expected
    assert list(SortedSampler(np.array(keys, dtype=np.float32), reverse)) == expected
    assert list(SortedSampler([(key, "x") for key in keys], reverse)) == expected
    assert list(SortedSampler([chr(70 + key) for key in keys], reverse)) == expected


def test_a_filter_keeps_the_samples_that_pass() -> None:
    assert list(FilterSampler(lambda text: "a" in text, ["a", "b", "ca"])) == [0, 2]


def test_sampling_never_imports_torch_where_a_seed_is_given() -> None:
    code = (
        "import sys\n"
        "from sharded_loader import BatchSampler, FixedBucketSampler, RandomSampler\n"
        "list(BatchSampler(RandomSampler(9, seed=1), 2)); list(BatchSampler([1, 2], 2)); FixedBucketSampler([1], 1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_empty_dataset_is_an_empty_epoch() -> None:
    samplers: list[Sampler[Any]] = [
        SequentialSampler(0),
        RandomSampler(0, seed=1),
        SubsetRandomSampler([], seed=1),
        WeightedRandomSampler([], 0, seed=1),
        FilterSampler(bool, []),
        IntervalSampler(0, 3),
        SortedSampler([]),
        SplitSampler(0, 3, 1, seed=1),
    ]
    for sampler in samplers:
        assert len(sampler) == 0
        assert list(sampler) == []


@pytest.mark.parametrize("epoch", [-1, 1.5, "1", None, True])
def test_a_bad_epoch_is_refused(epoch: Any) -> None:
    with pytest.raises(ValueError, match="epochs count from 0"):
        RandomSampler(3, seed=1).set_epoch(epoch)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SequentialSampler(-1), ValueError, "length must be at least 0, got -1"),
        (lambda: RandomSampler(2.5), TypeError, "length must be an integer"),  # type: ignore[arg-type]
        (lambda: RandomSampler(2**62 + 1), ValueError, "up to 2\\*\\*62"),
        (lambda: RandomSampler(3, seed="x"), TypeError, "seed must be an integer.*or None"),  # type: ignore[arg-type]
        (lambda: SubsetRandomSampler([0.5]), ValueError, "1-D sequence of integers"),  # type: ignore[list-item]
        (lambda: SubsetRandomSampler([True, False]), ValueError, "flatnonzero"),
        (lambda: WeightedRandomSampler([1, -2], 1), ValueError, r"weights\[1\] is -2"),
        (lambda: WeightedRandomSampler([1, float("nan")], 1), ValueError, r"weights\[1\] is nan"),
        (lambda: WeightedRandomSampler([0, 0], 1), ValueError, "all zero"),
        (lambda: WeightedRandomSampler([[1]], 1), ValueError, "1-D"),  # type: ignore[list-item]
        (lambda: WeightedRandomSampler([1, 0], 2, replacement=False), ValueError, "only 1 weights are positive"),
        (lambda: IntervalSampler(3, 4), ValueError, "more than the 3 samples"),
        (lambda: IntervalSampler(3, 0), ValueError, "interval must be at least 1"),
        (lambda: SplitSampler(10, 3, 3), ValueError, "give 0 to 2"),
        (lambda: SplitSampler(10, 3, -1), ValueError, "parts count from 0"),
        (lambda: SplitSampler(2, 3), ValueError, "give fewer parts"),
        (lambda: RandomSampler(3, seed=1).iter_epoch(0, -1), ValueError, "start must be at least 0"),
        (lambda: list(Sampler()), NotImplementedError, "override __iter__ and __len__"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# -- Keys of any kind are sorted as Python sorts them; what does not fit into memory is refused ------------------------


@given(keys=st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False))), reverse=st.booleans())
def test_numbers_of_any_size_are_ordered_exactly(keys: list[float], reverse: bool) -> None:
    expected = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
    assert sort_order(sortable(keys), reverse).tolist() == expected


def test_more_keys_than_fit_into_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="1,000,000,000 keys.*ShardShuffleSampler"):
        SortedSampler(range(10**9))
