"""Our samplers: every index as often as promised, each epoch a pure function that is read from anywhere."""

import itertools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    FilterSampler,
    FixedBucketSampler,
    IntervalSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    SortedBucketSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.base import limits
from sharded_loader.base.limits import Limit
from sharded_loader.samplers.index_samplers import sort_order, sortable
from sharded_loader.sampling.tables import BLOCK

LENGTHS = [(7 * place) % 29 + 1 for place in range(61)]

OF_INDICES: dict[str, Callable[[int | None], Sampler[Any]]] = {
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


def buckets(**more: Any) -> Callable[[int | None], Sampler[Any]]:
    return lambda seed: FixedBucketSampler(LENGTHS, 4, 5, shuffle=True, seed=seed, **more)


OF_BATCHES: dict[str, Callable[[int | None], Sampler[Any]]] = {
    "keep": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5),
    "discard": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5, "discard"),
    "rollover": lambda seed: BatchSampler(RandomSampler(23, seed=seed), 5, "rollover"),
    "foreign": lambda seed: BatchSampler(torch_data.RandomSampler(range(23)), 5, seed=seed),
    "foreign rollover": lambda seed: BatchSampler(torch_data.RandomSampler(range(23)), 5, "rollover", seed=seed),
    "of batches": lambda seed: BatchSampler(BatchSampler(RandomSampler(23, seed=seed), 2), 3),
    "sharded": lambda seed: ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=seed), 5), 2),
    "sorted bucket": lambda seed: SortedBucketSampler(LENGTHS, 4, 2.7, shuffle=True, seed=seed),
    "budget": lambda seed: BoundedBudgetSampler(LENGTHS, 90, 7, 2, seed=seed),
    "fixed bucket": buckets(),
    "fixed bucket, groups": buckets(num_shards=3),
    "fixed bucket, overlap": buckets(num_shards=3, last_group="overlap"),
    "fixed bucket, discard": buckets(num_shards=3, last_group="discard"),
}
EVERY_KIND = OF_INDICES | OF_BATCHES
SHUFFLED = ["random", "subset", "weighted", "weighted, none twice", "split", *OF_BATCHES]


def flat(batches: Any) -> list[int]:
    return [index for batch in batches for index in (flat(batch) if isinstance(batch, list) else [batch])]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_an_epoch_is_a_pure_function_of_seed_and_epoch_and_as_long_as_it_says(kind: str) -> None:
    one, other = EVERY_KIND[kind](7), EVERY_KIND[kind](7)
    epochs = []
    for epoch in range(6):
        length = len(one)
        epochs.append(list(one))
        assert len(epochs[-1]) == length == one.len_epoch(epoch) and one.epoch == epoch + 1
        assert all(type(index) is int for index in flat(epochs[-1]))
        assert kind in OF_INDICES or all(type(batch) is list for batch in epochs[-1])
    # Another object, other order of asking, nothing iterated before.
    assert [list(other.iter_epoch(epoch)) for epoch in (3, 0)] == [epochs[3], epochs[0]] and other.epoch == 0
    other.set_epoch(2)
    assert list(other) == epochs[2]
    if kind in SHUFFLED:
        assert epochs[0] != epochs[1] and list(EVERY_KIND[kind](8)) != epochs[0]


@pytest.mark.parametrize("kind", EVERY_KIND)
def test_any_place_of_an_epoch_can_be_reached(kind: str) -> None:
    sampler = EVERY_KIND[kind](7)
    for epoch in range(3):
        whole = list(sampler.iter_epoch(epoch))
        for start in range(len(whole) + 2):
            assert list(sampler.iter_epoch(epoch, start)) == whole[start:]
        for step in (1, 2, 7) if kind in OF_INDICES else ():
            found = sampler.epoch_table(epoch).at(np.arange(0, len(whole), step))
            assert found.dtype == np.int64 and found.tolist() == whole[::step]


@pytest.mark.parametrize("kind", sorted({*OF_BATCHES} - {"discard", "rollover", "foreign rollover"}))
def test_every_index_comes_once(kind: str) -> None:
    indices = flat(OF_BATCHES[kind](7))
    count = len(LENGTHS) if "buck" in kind or kind == "budget" else 23
    if "overlap" in kind:
        assert set(indices) == set(range(count))
    elif kind == "fixed bucket, discard":
        assert len(set(indices)) == len(indices) < count
    else:
        assert sorted(indices) == list(range(count))


@pytest.mark.parametrize("kind", ["random", "subset", "weighted", "weighted, none twice", "split"])
def test_without_a_seed_torch_manual_seed_decides(kind: str) -> None:
    torch.manual_seed(3)
    one = EVERY_KIND[kind](None)
    torch.manual_seed(3)
    assert list(EVERY_KIND[kind](None)) == list(one) and isinstance(one.seed, int)


def test_iter_captures_seed_and_epoch_when_it_is_called_and_iterators_do_not_mix() -> None:
    sampler, reference = RandomSampler(20, seed=1), RandomSampler(20, seed=1)
    pairs = zip(iter(sampler), iter(sampler), strict=True)
    assert list(pairs) == list(zip(reference.iter_epoch(0), reference.iter_epoch(1), strict=True))
    first, batches = iter(sampler), iter(BatchSampler(sampler, 3))
    sampler.set_epoch(5)
    sampler.seed = 99
    assert list(first) == list(reference.iter_epoch(2)) and sampler.epoch == 5
    assert flat(batches) == list(reference.iter_epoch(3))


def test_an_empty_dataset_is_an_empty_epoch() -> None:
    for sampler in (
        SequentialSampler(0),
        RandomSampler(0, seed=1),
        SubsetRandomSampler([], seed=1),
        WeightedRandomSampler([], 0, seed=1),
        FilterSampler(bool, []),
        IntervalSampler(0, 3),
        SortedSampler([]),
        SplitSampler(0, 3, 1, seed=1),
        BatchSampler(SequentialSampler(0), 3),
        BatchSampler(SequentialSampler(0), 3, "rollover"),
        BatchSampler([], 3),
        SortedBucketSampler([], 3),
        BoundedBudgetSampler([], 3, seed=1),
        FixedBucketSampler([], 3),
        FixedBucketSampler([], 3, num_shards=2, last_group="overlap"),
    ):
        assert len(sampler) == 0 and list(sampler) == []


def test_sampling_never_imports_torch_where_a_seed_is_given() -> None:
    code = (
        "import sys\n"
        "from sharded_loader import BatchSampler, FixedBucketSampler, RandomSampler\n"
        "list(BatchSampler(RandomSampler(9, seed=1), 2)); list(BatchSampler([1, 2], 2)); FixedBucketSampler([1], 1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- indices -----------------------------------------------------------------------------------------------------------


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
    assert list(once) == list(range(0, length, interval)) and len(once) == len(list(once))


@given(parts=st.integers(1, 9), extra=st.integers(0, 50), seed=st.integers())
def test_the_parts_of_a_split_are_disjoint_and_complete(parts: int, extra: int, seed: int) -> None:
    split = [list(SplitSampler(parts + extra, parts, part, seed=seed)) for part in range(parts)]
    assert sorted(flat(split)) == list(range(parts + extra))
    assert max(map(len, split)) - min(map(len, split)) <= 1


def test_parts_and_subsets_of_one_dataset_have_orders_of_their_own() -> None:
    for epoch in range(3):
        parts = [list(SplitSampler(400, 4, part, seed=1).iter_epoch(epoch)) for part in range(4)]
        assert len({tuple(index % 100 for index in part) for part in parts}) == 4
    begins = range(0, 400, 100)
    parts = [list(SubsetRandomSampler(range(begin, begin + 100), seed=1)) for begin in begins]
    assert len({tuple(index % 100 for index in part) for part in parts}) == 4
    assert [list(SubsetRandomSampler(np.arange(begin, begin + 100), seed=1)) for begin in begins] == parts


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
    for dtype in (torch.float64, torch.bfloat16) if not isinstance(keys[0], str) else ():
        assert list(SortedSampler(torch.tensor(keys, dtype=dtype))) == expected  # type: ignore[arg-type]


@given(keys=st.lists(st.integers(-5, 5)), reverse=st.booleans())
def test_sorted_sampler_sorts_as_python_does(keys: list[int], reverse: bool) -> None:
    expected = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
    letters, pairs = [chr(70 + key) for key in keys], [(key, "x") for key in keys]
    for given_as in (keys, np.array(keys, dtype=np.float32), pairs, letters):
        assert list(SortedSampler(given_as, reverse)) == expected


@given(keys=st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False))), reverse=st.booleans())
def test_numbers_of_any_size_are_ordered_exactly(keys: list[float], reverse: bool) -> None:
    expected = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
    assert sort_order(sortable(keys), reverse).tolist() == expected


def test_more_keys_and_weights_than_fit_into_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="1,000,000,000 keys.*ShardShuffleSampler"):
        SortedSampler(range(10**9))
    with pytest.raises(MemoryError, match="1,000,000,000 weights.*interleave"):
        WeightedRandomSampler(range(10**9), 5, seed=1)


def test_a_filter_keeps_the_samples_that_pass() -> None:
    assert list(FilterSampler(lambda text: "a" in text, ["a", "b", "ca"])) == [0, 2]


# -- batches -----------------------------------------------------------------------------------------------------------


@given(length=st.integers(0, 60), size=st.integers(1, 70), start=st.integers(0, 5), own=st.booleans())
def test_keep_and_discard_slice_the_epoch(length: int, size: int, start: int, own: bool) -> None:
    sampler: Any = SequentialSampler(length) if own else Foreign(range(length))
    slices = [list(range(length))[begin : begin + size] for begin in range(0, length, size)]
    assert list(BatchSampler(sampler, size).iter_epoch(0, start)) == slices[start:]
    full = [batch for batch in slices if len(batch) == size]
    assert list(BatchSampler(sampler, size, "discard", seed=0).iter_epoch(0, start)) == full[start:]


class ForeignRandom(RandomSampler):
    """Overrides ``__iter__``, so it is read as a sampler of another library."""

    def __iter__(self) -> Any:
        return super().__iter__()


@given(length=st.integers(0, 30), size=st.integers(1, 40), own=st.booleans(), seed=st.integers(0, 5))
def test_rollover_slices_the_endless_stream_of_epochs(length: int, size: int, own: bool, seed: int) -> None:
    order = RandomSampler(length, seed=seed)
    stream = [index for epoch in range(7) for index in order.iter_epoch(epoch)]
    batches = BatchSampler(order if own else ForeignRandom(length, seed=seed), size, "rollover", seed=0)
    epochs = [list(batches.iter_epoch(epoch)) for epoch in range(7)]
    assert list(map(len, epochs)) == [batches.len_epoch(epoch) for epoch in range(7)]
    assert sum(epochs, []) == [stream[begin : begin + size] for begin in range(0, len(stream) - size + 1, size)]


def test_rollover_is_indifferent_to_abandoned_epochs() -> None:
    walked, fresh = (BatchSampler(RandomSampler(10, seed=1), 4, "rollover") for _ in range(2))
    next(iter(walked))
    iter(walked)
    assert list(walked) == list(fresh.iter_epoch(2))


@pytest.mark.parametrize("size", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK])
def test_batches_cross_the_boundaries_of_blocks(size: int) -> None:
    batches = list(BatchSampler(SequentialSampler(2 * BLOCK + 11), size))
    assert {len(batch) for batch in batches[:-1]} <= {size}
    assert list(itertools.chain.from_iterable(batches)) == list(range(2 * BLOCK + 11))


def test_set_epoch_may_be_called_on_either_of_nested_samplers() -> None:
    inner = RandomSampler(10, seed=1)
    outer = ShardedBatchSampler(BatchSampler(inner, 3), 2)
    expected = list(outer.iter_epoch(4))
    outer.set_epoch(4)
    assert inner.epoch == outer.batch_sampler.epoch == 4  # type: ignore[attr-defined]
    assert list(outer) == expected
    inner.set_epoch(4)
    assert outer.epoch == 4 and list(outer) == expected and inner.epoch == 5
    theirs = torch_data.DistributedSampler(range(10), 2, 0)  # type: ignore[arg-type]
    outer = BatchSampler(theirs, 3, seed=0)
    outer.set_epoch(4)
    assert theirs.epoch == 4 and flat(outer) == list(theirs)


def test_keys_that_are_no_integers_pass_through() -> None:
    assert list(BatchSampler(["a", "b", "c"], 2)) == [["a", "b"], ["c"]]
    for indices in (np.arange(3, dtype=np.int32), torch.arange(3)):
        assert [type(index) for index in flat(BatchSampler(indices, 2, seed=0))] == [int] * 3


@given(
    keys=st.lists(st.integers(0, 9), max_size=60),
    size=st.integers(1, 9),
    mult=st.floats(1, 5),
    shuffle=st.booleans(),
    reverse=st.booleans(),
)
def test_sorted_buckets_hold_every_index_once_in_sorted_batches(
    keys: list[int], size: int, mult: float, shuffle: bool, reverse: bool
) -> None:
    batches = list(sampler := SortedBucketSampler(keys, size, mult, reverse, shuffle, seed=3))
    assert sorted(flat(batches)) == list(range(len(keys))) and len(batches) == len(sampler)
    for batch in batches:
        got = [keys[index] for index in batch]
        assert got == sorted(got, reverse=reverse) and len(batch) <= size


@given(
    lengths=st.lists(st.integers(0, 30), max_size=60),
    budget=st.sampled_from([(-1, 1), (-1, 5), (30, -1), (30, 5), (64, 1), (64, 5), (200, -1), (200, 5)]),
    multiple=st.sampled_from([1, 4]),
    shuffle=st.booleans(),
)
def test_budget_batches_hold_every_index_once_within_the_budget(
    lengths: list[int], budget: tuple[int, int], multiple: int, shuffle: bool
) -> None:
    tokens, sentences = budget
    batches = list(BoundedBudgetSampler(lengths, tokens, sentences, multiple, shuffle, seed=1))
    assert sorted(flat(batches)) == list(range(len(lengths)))
    for batch in batches:
        assert tokens < 0 or max(lengths[index] for index in batch) * len(batch) <= tokens
        assert sentences < 0 or len(batch) <= sentences
    # All but the last are a multiple, or smaller than one.
    if not shuffle:
        assert all(len(batch) % multiple == 0 or len(batch) < multiple for batch in batches[:-1])
        assert [lengths[index] for index in flat(batches)] == sorted(lengths)


def test_budget_batches_are_as_large_as_allowed() -> None:
    assert list(BoundedBudgetSampler([1] * 7, 3, shuffle=False)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(BoundedBudgetSampler([[1, 3], [2, 2]], 6, shuffle=False)) == [[1, 0]]
