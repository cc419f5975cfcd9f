"""Our samplers: every index as often as promised, each epoch a pure function that is read from anywhere."""

import itertools
import pickle
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign, NoLength

import sharded_loader
from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    BucketScheme,
    ClassBalancedBatchSampler,
    ExpWidthBucket,
    FilterSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    IntervalSampler,
    PackSampler,
    Placement,
    RandomSampler,
    Sampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    SortedBucketSampler,
    SortedSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.base import limits
from sharded_loader.base.described import Described
from sharded_loader.base.limits import Limit
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.engine.split import check_shares, shard_sizes, split_batch
from sharded_loader.samplers.index_samplers import sort_order, sortable
from sharded_loader.sampling.base import check_sampler
from sharded_loader.sampling.own import ReplicaSampler
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
    "shards": lambda seed: ShardShuffleSampler([5, 9, 3, 8], 2, 2, seed=seed),
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
    "one kind": lambda seed: GroupedBatchSampler([length % 4 for length in LENGTHS], 4, seed=seed),
    "classes": lambda seed: ClassBalancedBatchSampler([length % 4 for length in LENGTHS], 2, 3, seed=seed),
    "fixed bucket": buckets(),
    "fixed bucket, groups": buckets(num_shards=3),
    "fixed bucket, overlap": buckets(num_shards=3, last_group="overlap"),
    "fixed bucket, discard": buckets(num_shards=3, last_group="discard"),
}
EVERY_KIND = OF_INDICES | OF_BATCHES
SHUFFLED = ["random", "subset", "shards", "weighted", "weighted, none twice", "split", *OF_BATCHES]


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
    of_indices = FilterSampler(bool, []), IntervalSampler(0, 3), SplitSampler(0, 3, 1, seed=1)
    of_batches = FixedBucketSampler([], 3), FixedBucketSampler([], 3, num_shards=2, last_group="overlap")
    for sampler in (*of_indices, *of_batches, WeightedRandomSampler([], 0, seed=1), BatchSampler([], 3)):
        assert len(sampler) == 0 and list(sampler) == []


def test_sampling_never_imports_torch_where_a_seed_is_given() -> None:
    code = (
        "import sys\n"
        "from sharded_loader import BatchSampler, FixedBucketSampler, RandomSampler\n"
        "list(BatchSampler(RandomSampler(9, seed=1), 2)); list(BatchSampler([1, 2], 2)); FixedBucketSampler([1], 1)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(indices=st.lists(st.integers(-(2**40), 2**40)), seed=st.integers())
def test_subset_random_sampler_yields_the_given_indices(indices: list[int], seed: int) -> None:
    assert Counter(SubsetRandomSampler(indices, seed=seed)) == Counter(indices)


@given(length=st.integers(1, 200), data=st.data())
def test_interval_sampler_yields_every_index_once(length: int, data: st.DataObject) -> None:
    interval = data.draw(st.integers(1, length))
    rounds = [list(range(first, length, interval)) for first in range(interval)]
    assert list(IntervalSampler(length, interval)) == flat(rounds)
    assert list(IntervalSampler(length, interval, rollover=False)) == rounds[0]


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


@given(
    keys=st.lists(st.integers(0, 9), max_size=60),
    size=st.integers(1, 9),
    mult=st.floats(1, 5),
    shuffle=st.booleans(),
    reverse=st.booleans(),
)
def test_sorted_buckets_hold_every_index_once_in_sorted_batches(keys, size, mult, shuffle, reverse):
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
def test_budget_batches_hold_every_index_once_within_the_budget(lengths, budget, multiple, shuffle):
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


REPRS: list[tuple[Callable[[], Any], str]] = [
    (lambda: SequentialSampler(4, start=3), "SequentialSampler(length=4, start=3)"),
    (lambda: RandomSampler(10**12, seed=7), "RandomSampler(length=1000000000000, seed=7)"),
    (lambda: SubsetRandomSampler([2, 30, 5], seed=7), "SubsetRandomSampler(length=3, indices=[2, 30, 5], seed=7)"),
    (
        lambda: WeightedRandomSampler(np.ones(10**6), 5, seed=3),
        "WeightedRandomSampler(length=5, weights=[1.0, 1.0, 1.0, ... 1000000 in all], replacement=True, seed=3)",
    ),
    (
        lambda: BatchSampler(torch_data.RandomSampler(range(9)), 2, seed=3),
        "BatchSampler(<torch.RandomSampler of length 9>, length=5, batch_size=2, last_batch='keep', seed=3)",
    ),
    (
        lambda: ReplicaSampler([[0, 1], [2, 3], [4]], partial(resolve_replicas, 2, 0)),
        "ReplicaSampler([[0, 1], [2, 3], [4]], length=2, num_replicas=2, rank=0, truncate=False, seed=0)",
    ),
    (
        lambda: PackSampler([3, 5, 2], tokens=7, seed=3),
        "PackSampler(length=3, tokens=7, rows=1, window=1024, long='error', shuffle=True, last_batch='keep', seed=3)",
    ),
    (lambda: ExpWidthBucket(bucket_len_step=2), "ExpWidthBucket(bucket_len_step=2)"),
]


@pytest.mark.parametrize(("make", "shown"), [*REPRS, *((partial(make, 7), None) for make in EVERY_KIND.values())])
def test_a_repr_tells_what_decides_and_changes_nothing(make: Callable[[], Any], shown: str | None) -> None:
    one = make()
    before, generators = pickle.dumps(one), (torch.get_rng_state(), np.random.get_state()[1].copy())
    assert repr(one) == str(one) == (shown or repr(one))
    assert repr(one).startswith(f"{type(one).__name__}(") and "?" not in repr(one) and len(repr(one)) < 300
    assert pickle.dumps(one) == before
    assert torch.equal(torch.get_rng_state(), generators[0]) and (np.random.get_state()[1] == generators[1]).all()


def test_every_sampler_and_scheme_of_the_library_has_its_repr_from_one_place() -> None:
    found = [getattr(sharded_loader, name) for name in sharded_loader.__all__]
    found = [one for one in found if isinstance(one, type) and issubclass(one, (Sampler, BucketScheme))]
    assert len(found) > 20 and all(one.__repr__ is Described.__repr__ for one in found)


def test_a_repr_is_short_however_much_there_is() -> None:
    million = np.arange(1, 1_000_001)
    for one in (
        *(SubsetRandomSampler(million), SortedSampler(million), SortedBucketSampler(million, 10)),
        *(FixedBucketSampler(million, 10, num_buckets=1000), BatchSampler(million, 3)),
        *(ShardedBatchSampler([[1]] * 10**6, 2, costs=million), RandomSampler(10, seed=10**4000)),
    ):
        assert len(repr(one)) < 300


class Broken(RandomSampler):
    """Never calls ``super().__init__()``."""

    def __init__(self) -> None:
        pass

    @property
    def seed(self) -> int:  # type: ignore[override]
        raise RuntimeError("no seed yet")

    def __repr__(self) -> str:
        return f"{super().__repr__()}{self.seed}"


def test_a_subclass_with_broken_attributes_has_a_repr() -> None:
    assert RandomSampler.__repr__(Broken()) == "Broken(length=?, seed=?)"
    assert repr(type("Unsized", (NoLength, Sampler), {})([1])) == "Unsized(length=?)"
    assert repr(BatchSampler(Broken(), 2, seed=1)).startswith("BatchSampler(<")
    assert repr(BatchSampler.__new__(BatchSampler)) == "BatchSampler(?, length=?, batch_size=?, last_batch=?, seed=?)"


ONE: Any = SequentialSampler(1)
auto = partial(resolve_replicas, "auto")

REFUSED: list[tuple[Callable[[], Any], type[Exception], str]] = [
    # indices
    (lambda: SequentialSampler(-1), ValueError, "length must be at least 0, got -1"),
    (lambda: RandomSampler(2**62 + 1), ValueError, "up to 2\\*\\*62"),
    (lambda: RandomSampler(3, seed="x"), TypeError, "seed must be an integer.*or None"),
    (lambda: SubsetRandomSampler([0.5]), ValueError, "1-D sequence of integers"),
    (lambda: SubsetRandomSampler([True, False]), ValueError, "flatnonzero"),
    (lambda: WeightedRandomSampler([1, -2], 1), ValueError, r"weights\[1\] is -2"),
    (lambda: WeightedRandomSampler([1, float("nan")], 1), ValueError, r"weights\[1\] is nan"),
    (lambda: WeightedRandomSampler([0, 0], 1), ValueError, "all zero"),
    (lambda: WeightedRandomSampler([[1]], 1), ValueError, "1-D"),
    (lambda: WeightedRandomSampler([1, 0], 2, replacement=False), ValueError, "only 1 weights are positive"),
    (lambda: IntervalSampler(3, 4), ValueError, "more than the 3 samples"),
    (lambda: SplitSampler(10, 3, 3), ValueError, "give 0 to 2"),
    (lambda: SplitSampler(10, 3, -1), ValueError, "parts count from 0"),
    (lambda: SplitSampler(2, 3), ValueError, "give fewer parts"),
    (lambda: RandomSampler(3, seed=1).iter_epoch(0, -1), ValueError, "start must be at least 0"),
    (lambda: list(Sampler()), NotImplementedError, "override __iter__ and __len__"),
    *((lambda epoch=e: ONE.set_epoch(epoch), ValueError, "epochs count from 0") for e in (-1, 1.5, "1", None, True)),
    # batches
    (lambda: BatchSampler(ONE, 0), ValueError, "batch_size must be at least 1, got 0"),
    (lambda: BatchSampler(ONE, 2.0), TypeError, "batch_size must be an integer, got 2.0"),
    (lambda: BatchSampler(ONE, True), TypeError, "batch_size must be an integer, got True"),
    (lambda: BatchSampler(ONE, 2, "last"), ValueError, "'last'.*'keep', 'discard' or 'rollover'"),
    (lambda: SortedBucketSampler([1], 2, 0.5), ValueError, "mult must be at least 1"),
    (lambda: BoundedBudgetSampler([1]), ValueError, "there is no budget"),
    (lambda: BoundedBudgetSampler([3, 9, 4], 8), ValueError, "sample 1 has 9 tokens.*max_num_tokens=8"),
    (lambda: BoundedBudgetSampler([3.5], 8), ValueError, "lengths must be integers"),
    # samplers of other libraries
    (lambda: BatchSampler(5, 2), TypeError, "sampler must be a sampler or another iterable, got 5"),
    *((partial(check_sampler, one), TypeError, "sampler or another iterable") for one in (None, object())),
    *(
        (partial(BatchSampler, once, 2, seed=0), TypeError, "pass a list, or a class with __iter__")
        for once in ((index for index in range(3)), iter([1, 2]), map(int, "12"), itertools.count())
    ),
    (
        lambda: list(BatchSampler(Foreign([0, 1, 2], 5), 2, "rollover", seed=0)),
        ValueError,
        r"a Foreign, yielded 3 items in epoch 0, but its length is 5.*__len__",
    ),
    (
        lambda: ShardedDataLoader(range(4), 2, sampler=PackSampler([1, 2, 3, 4], 4, 2)),
        TypeError,
        "sampler is a PackSampler, which yields batches: give it as batch_sampler=",
    ),
    # ranks
    (lambda: resolve_replicas(4), ValueError, "rank is missing"),
    (lambda: resolve_replicas(None, 1), ValueError, "num_replicas is missing"),
    (lambda: resolve_replicas(4, 4), ValueError, "rank is 4, but there are 4 replicas: give 0 to 3"),
    (lambda: resolve_replicas(4, -1), ValueError, "ranks count from 0"),
    (lambda: resolve_replicas("two", 0), ValueError, "num_replicas must be an integer"),
    (lambda: auto(environ={"WORLD_SIZE": "x"}), ValueError, "WORLD_SIZE is 'x'"),
    (lambda: auto(environ={"WORLD_SIZE": "2"}), ValueError, "RANK is missing"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": ""}), ValueError, "RANK is missing"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": "2"}), ValueError, "give 0 to 1"),
    (lambda: auto(environ={"WORLD_SIZE": "0"}), ValueError, "variable WORLD_SIZE is '0'.*at least 1"),
    (lambda: auto(environ={"WORLD_SIZE": "2", "RANK": "-1"}), ValueError, "RANK is '-1'.*at least 0"),
    (lambda: auto(environ={"RANK": "3"}), ValueError, "RANK is 3, but WORLD_SIZE is missing: set both"),
    # shards
    (lambda: FilterSampler(None, range(9)), TypeError, "FilterSampler is None; it must be a function of a sample"),
    (lambda: check_shares([1], 2), ValueError, "1 weights for 2 shards: give one weight per shard"),
    (lambda: check_shares([1, -1], 2), ValueError, "weight of shard 1 is -1"),
    (lambda: check_shares([1, float("nan")], 2), ValueError, "weight of shard 1 is nan"),
    (lambda: check_shares([0, 0], 2), ValueError, "all 2 weights are zero"),
    (lambda: check_shares("ab", 2), ValueError, "weights must be numbers"),
    (lambda: shard_sizes(3, 0), ValueError, "num_shards must be at least 1"),
    (lambda: split_batch([0, 5], 2, costs=[1, 2]), ValueError, "sample 5 has no cost, there are 2 costs"),
    (lambda: split_batch([0, -1], 2, costs=[1, 2]), ValueError, "sample -1 has no cost"),
    (lambda: split_batch([0, 1], 2, costs=[1, -2]), ValueError, "cost of sample 1 is -2"),
    (lambda: ShardedBatchSampler([[0]], 2, weights=[1]), ValueError, "1 weights for 2 shards"),
    (lambda: ShardedBatchSampler([[0]], 2, costs=np.zeros((2, 2))), ValueError, "costs must be 1-D"),
    (lambda: list(ShardedBatchSampler([[0], []], 2)), ValueError, "batch 1 is empty"),
    (lambda: list(ShardedBatchSampler([[0], [[1]]], 2)), ValueError, "batch 1 is sharded already"),
    (lambda: list(ShardedBatchSampler([[0], []], 2).iter_epoch(0, 1)), ValueError, "batch 1 is empty"),
    # a loader's order
    (lambda: ShardedDataLoader(range(9)), ValueError, "batch_size must be specified"),
    (lambda: ShardedDataLoader(range(9), batch_sampler=4), TypeError, "batch_sampler is 4, a number"),
    (lambda: ShardedDataLoader(range(9), batch_sampler=4.5), TypeError, "batch_sampler must be a sampler.*got 4.5"),
    (
        lambda: ShardedDataLoader(range(9), batch_sampler=[[1]], shuffle=True),
        ValueError,
        "must not be specified if batch_sampler",
    ),
    (lambda: ShardedDataLoader(range(9), 3, True, sampler=ONE), ValueError, "shuffle must not be specified"),
    (lambda: ShardedDataLoader(range(9), 3, last_batch="last"), ValueError, "last_batch is 'last'"),
    (lambda: ShardedDataLoader(range(9), 3, num_replicas="auto", rank=1), ValueError, "leave out rank=1"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_what_cannot_be_an_order_is_refused_in_words(call: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("weights", [[0, 1], [1, 0, 1], [0, 1, 0]])
def test_a_weight_of_zero_before_a_positive_one_is_rejected_everywhere(weights: list[float]) -> None:
    count = len(weights)
    order = sorted(range(count), key=lambda shard: not weights[shard])
    given = re.escape(f"{sorted(weights, reverse=True)} and list the devices in the order {order}")
    message = rf"weight \d is 0\. .* must come last: give the weights {given}"
    for make in (
        lambda: ShardedBatchSampler([[0, 1]], count, weights=weights),
        lambda: ShardedBatchSampler([[0, 1]], count, weights=weights, costs=[1, 1]),
        lambda: split_batch([0, 1], count, weights),
        lambda: split_batch([0, 1], count, weights, costs=[1, 1]),
        lambda: ShardedDataLoader(range(4), 2, num_shards=count, device=Placement(shard_weights=weights)),
        lambda: setattr(ShardedDataLoader(range(4), 2, devices=["cpu"] * count), "shard_weights", weights),
    ):
        with pytest.raises(ValueError, match=message):
            make()
