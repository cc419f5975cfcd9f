"""Datasets and their parts: Gluon's answers, indices from both ends, parts of parts, sums, and clear refusals."""

import json
import pickle
import random
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader import RandomSampler, SubsetRandomSampler
from sharded_loader.base import limits
from sharded_loader.base.limits import Limit
from sharded_loader.data import bulk, datasets
from sharded_loader.data.datasets import ArrayDataset, ConcatDataset, Dataset, SimpleDataset, SubsetDataset
from sharded_loader.randomness import rng
from sharded_loader.randomness.rng import NO_SAMPLE, SampleScope, reading, sample_rng


def ten():
    return SimpleDataset(range(10))


def add_one(x):
    return x + 1


CALLS = {
    "shard_1": lambda: [ten().shard(1, 0)],
    "shard_4": lambda: [ten().shard(4, i) for i in range(4)],
    "shard_err_hi": lambda: ten().shard(3, 3),
    "shard_err_zero": lambda: ten().shard(0, -1),
    "filter_after_transform": lambda: ten().transform(add_one).filter(lambda x: x % 3 == 0),
    "take_0": lambda: ten().take(0),
    "take_None": lambda: ten().take(None),
    "sample_err": lambda: ten().sample([1, 2]),
    "array2": lambda: ArrayDataset([1, 2, 3], [10, 20, 30]),
    "array2_transform": lambda: ArrayDataset([1, 2, 3], [10, 20, 30]).transform(lambda a, b: (a + b, a)),
    "array1_transform_first": lambda: ArrayDataset([1, 2, 3]).transform_first(lambda a: a * 100),
    "array_len_err": lambda: ArrayDataset([1], [1, 2]),
    "array_slice": lambda: ArrayDataset([1, 2, 3], [10, 20, 30])[0:2],
}


def decoded(entry):
    return tuple(entry["__tuple__"]) if "__tuple__" in entry else entry.get("__dict__", entry)


def encoded(value):
    if isinstance(value, Dataset):
        return {"len": len(value), "items": list(value)}
    return [encoded(v) for v in value] if isinstance(value, list) else value


GOLDEN = (Path(__file__).parents[1] / "golden" / "dataset.json").read_text()
REFUSED = {
    "shard_err_hi": (ValueError, "shard index 3 is out of bounds for 3 shards"),
    "shard_err_zero": (ValueError, "the number of shards must be greater than 0"),
    "sample_err": (TypeError, "Invalid sampler type: <class 'list'>"),
    "array_len_err": (ValueError, r"array\[0\] has length 1 while array\[1\] has 2"),
}


@pytest.mark.parametrize("case", json.loads(GOLDEN, object_hook=decoded), ids=lambda case: case["id"])
def test_answers_are_gluons(case):
    if "__error__" in case["expected"]:
        error, said = REFUSED[case["id"]]
        with pytest.raises(error, match=said):
            CALLS[case["id"]]()
    else:
        assert encoded(CALLS[case["id"]]()) == case["expected"]


BAD = [
    (lambda: ten().take(-2), ValueError, "the count is negative"),
    (lambda: ten().take(2.5), TypeError, "give an int"),
    (lambda: SimpleDataset(iter([1])), TypeError, "needs an object with __getitem__ and __len__"),
    (lambda: ArrayDataset([1], label=[2]), TypeError, "name all columns or none"),
    (lambda: ArrayDataset(), TypeError, "no columns: give at least one"),
    (lambda: ArrayDataset(np.array(3)), TypeError, "without a length"),
    (lambda: ArrayDataset(image=[1], label=[1, 2]), ValueError, "image has length 1 while label has 2"),
    (lambda: ConcatDataset([]), ValueError, "no datasets: give at least one"),
    *(
        (lambda given=given: ConcatDataset(given), TypeError, "ConcatDataset needs a list of datasets, not an?")
        for given in (3, None, "ab", {"a": [1]})
    ),
    (lambda: ten() + 3, TypeError, "unsupported operand"),
    *((lambda wrong=wrong: wrong + ten(), TypeError, "unsupported operand") for wrong in (1, 0.0, False, None)),
    (lambda: ten().cache(-1), ValueError, "give 0 or more, a share of what is free"),
    (lambda: ten().transform(3), TypeError, "not callable"),
    (lambda: ten().transform_first(None), TypeError, r"transform_first\(\) is None; it must be a function"),
    (lambda: ten().filter(None), TypeError, r"filter\(\) is None; it must be a function of a sample"),
    (lambda: ten().transform(add_one, lazy=False, seeded=True), ValueError, "has no epoch to be seeded by"),
    (lambda: ten().sample(torch.utils.data.BatchSampler(range(4), 2, False)), TypeError, "single indices"),
    (lambda: SubsetDataset("abc", [3]), IndexError, "3 samples"),
    (lambda: SubsetDataset(range(10**13), range(10**14)), IndexError, "samples"),
    *(
        (lambda indices=indices: SubsetDataset(ten().take(5), indices), (IndexError, TypeError), None)
        for indices in ([5], [-6], range(6), range(5, 4, -1), np.array([0, 5]), [0.5])
    ),
    (lambda: ten().shard("2", 0), TypeError, r"shard\('2', 0\): give two ints"),
    (lambda: ten().shard(2, 0.5), TypeError, r"shard\(2, 0\.5\): give two ints"),
    (lambda: ten().split("50%"), TypeError, r"split\('50%'\): give a list of sizes or ratios"),
    (lambda: ten().split(0.5), TypeError, r"split\(0\.5\): give a list of sizes or ratios"),
    (lambda: ten().split(["50%", "50%"]), (TypeError, ValueError), "sizes and ratios are numbers"),
    (lambda: ten().split([7, 2], seed=0), ValueError, "the sizes sum to 9, the dataset has 10 samples"),
    (lambda: ten().split([0.5, 0.4], seed=0), ValueError, r"the ratios sum to 0\.9"),
    (lambda: ten().split([1.2, -0.2], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([float("nan"), 1.0], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([True, 9], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([], seed=0), ValueError, r"split\(\[\]\): give at least one"),
    (lambda: ArrayDataset(torch.ones(3, requires_grad=True)).get_batch([0]), ValueError, "detach"),
    (lambda: ArrayDataset(np.zeros(12)).get_batch([0, 12]), IndexError, "12 samples"),
    (lambda: ArrayDataset(np.zeros(12)).get_batch([-13]), IndexError, "12 samples"),
    (lambda: ArrayDataset(np.zeros(12)).get_batch([0.5]), TypeError, "integers"),
    (lambda: (ArrayDataset(x=[1]) + ArrayDataset(y=[2])).get_batch([0, 1]), ValueError, "different keys"),
    (lambda: ArrayDataset(x=[1, 2], note=["a", 0.5]).get_batch([0, 1]), ValueError, r"float.* in field \['note'\]:"),
    (lambda: ArrayDataset([1, 2], ["a", 0.5]).get_batch([0, 1]), ValueError, r"float in sample 1, in field \[1\]:"),
    (lambda: ArrayDataset(["a", 0.5]).get_batch([0, 1]), ValueError, "float in sample 1: make"),
]


@pytest.mark.parametrize(("call", "error", "said"), BAD)
def test_bad_arguments_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_more_indices_than_fit_into_memory_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(limits, "free_bytes", lambda: Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="keeps all 1,000,000,000,000 indices.*: cut it by take"):
        SimpleDataset(range(10**12)).split([0.9, 0.1], seed=1)
    with pytest.raises(MemoryError, match="all 1,000,000,000,000 indices of the RandomSampler.*to the loader"):
        SimpleDataset(range(10**12)).sample(RandomSampler(10**12, seed=1))


@pytest.mark.parametrize(
    "dataset",
    [
        SimpleDataset(list("abcde")),
        ArrayDataset(list("abcde")),
        SimpleDataset(list("xabcdey")).take(6).filter(lambda c: c != "x"),
        SimpleDataset(list("ab")) + list("cde"),
        SimpleDataset(list("abcde")).cache(),
        SimpleDataset(list("ABCDE")).transform(str.lower),
        SimpleDataset(list("edcba")).sample(torch.utils.data.SubsetRandomSampler(range(5))).filter(bool),
    ],
    ids=repr,
)
def test_indices_work_from_both_ends_and_no_further(dataset):
    items = list(dataset)
    assert sorted(items) == list("abcde")
    assert [dataset[i] for i in range(-5, 0)] == items
    assert dataset[np.int64(2)] == items[2]
    for index in (5, -6):
        with pytest.raises(IndexError, match=None if hasattr(dataset, "_fn") else "5 samples"):
            dataset[index]
    assert list(pickle.loads(pickle.dumps(dataset))) == items


SLICES = [slice(1, 3), slice(None), slice(None, None, -2), slice(-2, None), slice(3, 1)]


@pytest.mark.parametrize("index", SLICES, ids=str)
def test_a_slice_of_a_derived_dataset_is_a_dataset_of_those_samples(index):
    base = SimpleDataset([1, 2, 3, 4])
    doubled = [2, 4, 6, 8]
    transformed = base.transform(lambda x: x * 2)
    parts = transformed.take(2) + transformed.take(4).shard(2, 1)
    for dataset in (transformed, transformed.take(4), transformed.cache(), parts):
        part = dataset[index]
        assert list(part) == doubled[index]
        assert len(part) == len(doubled[index])
    assert list(ArrayDataset([1, 2, 3, 4], [5, 6, 7, 8]).transform(lambda a, b: a + b)[index]) == [6, 8, 10, 12][index]
    assert list(base.transform_first(lambda x: x * 2)[index]) == doubled[index]


@pytest.mark.parametrize("index", [[0, 1], np.array([0, 1]), np.array([True, False]), torch.tensor([0, 1])], ids=str)
def test_several_indices_at_once_are_refused(index):
    transformed = SimpleDataset(np.arange(4)).transform(lambda x: x * 2)
    for dataset in (transformed, transformed.take(4), transformed.cache(), transformed + transformed):
        with pytest.raises(TypeError, match=r"of 2 indices, not one: .*SubsetDataset\(dataset, indices\)"):
            dataset[index]


def test_keys_are_passed_on_by_a_transform_and_samplers_are_read_at_epoch_0():
    transformed = SimpleDataset({"a": 1, (0, 1): 2}).transform(lambda x: x * 2)
    assert transformed["a"] == 2 and transformed[0, 1] == 4

    class Backwards(RandomSampler):
        def __iter__(self):
            return iter([2, 1, 0])

    sampler = RandomSampler(10, seed=3)
    assert list(ten().sample(sampler)) == list(sampler.iter_epoch(0))
    assert list(SimpleDataset([10, 20, 30, 40]).sample(Backwards(3))) == [30, 20, 10]


def test_sums_are_flat_and_in_order_of_datasets_lists_and_arrays():
    total = SimpleDataset("ab") + SimpleDataset("") + "c" + ConcatDataset(["d", "ef"])
    assert list(total) == list("abcdef") == [total[i] for i in range(-6, 0)]
    assert repr(total).count(" + ") == 4
    one = ArrayDataset(np.arange(3))
    assert list(sum([one, SimpleDataset([7, 8])])) == [0, 1, 2, 7, 8] and list(sum([one])) == [0, 1, 2]
    for other in ([5, 6], np.array([5, 6])):
        assert list(other + one) == [5, 6, 0, 1, 2] and list(one + other) == [0, 1, 2, 5, 6]


# -- parts -------------------------------------------------------------------------------------------------------------


@given(st.integers(0, 50), st.integers(1, 9))
@settings(deadline=None)
def test_shards_are_disjoint_complete_and_even_and_no_more_is_taken_than_there_is(length, number):
    dataset = SimpleDataset(range(length))
    parts = [list(dataset.shard(number, i)) for i in range(number)]
    assert list(chain(*parts)) == list(range(length))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
    assert dataset.take(number).indices == range(min(number, length))


@given(st.integers(0, 200), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**70))
@settings(deadline=None)
def test_ratio_splits_are_disjoint_complete_and_pure(length, weights, seed):
    ratios = [w / sum(weights) for w in weights]
    parts = [list(p) for p in SimpleDataset(range(length)).split(ratios, seed=seed)]
    assert sorted(chain(*parts)) == list(range(length))
    assert all(abs(len(p) - r * length) < 1 + 1e-6 for p, r in zip(parts, ratios, strict=True))
    assert parts == [list(p) for p in SimpleDataset(range(length)).split(ratios, seed=seed)]


def test_splits_by_size_and_by_torchs_seed_which_are_the_same_in_every_release(monkeypatch):
    a, b = ten().split([7, 3], seed=0)
    assert (len(a), len(b)) == (7, 3) and a.indices.dtype == np.int64
    torch.manual_seed(3)
    first = list(ten().split([0.5, 0.5])[0])
    torch.manual_seed(3)
    assert first == list(ten().split([0.5, 0.5])[0])
    assert first != list(ten().split([0.5, 0.5])[0])
    assert [len(part) for part in SimpleDataset(range(100)).split([0.29, 0.71])] == [29, 71]
    pinned = {2**24: [[4, 5, 7, 6], [1, 2], [0, 3]], 0: [[7, 1, 6, 5], [4, 0], [3, 2]]}
    for in_memory, indices in pinned.items():
        monkeypatch.setattr(rng, "IN_MEMORY", in_memory)
        parts = SimpleDataset(range(8)).split([0.5, 0.25, 0.25], seed=7)
        assert [part.indices.tolist() for part in parts] == indices


DERIVED = {
    "take": lambda dataset: dataset.take(7),
    "shard": lambda dataset: dataset.shard(3, 1),
    "slice": lambda dataset: dataset.take(None)[2:-1],
    "backwards": lambda dataset: dataset.take(None)[::-2],
    "filter": lambda dataset: dataset.filter(lambda sample: sample % 3),
    "split": lambda dataset: dataset.split([0.5, 0.5], seed=1)[1],
    "sample": lambda dataset: dataset.sample(SubsetRandomSampler(range(0, len(dataset), 2), seed=1)),
    "subset": lambda dataset: SubsetDataset(dataset, [-1, 0, 0]),
}


@pytest.mark.parametrize("second", DERIVED)
@pytest.mark.parametrize("first", DERIVED)
@pytest.mark.costly(27)
def test_indices_say_which_samples_of_the_dataset_a_part_of_a_part_has(first, second):
    dataset = SimpleDataset(range(100))
    part = DERIVED[first](dataset)
    inner = DERIVED[second](part)
    for one in (part, inner):
        assert type(one) is SubsetDataset and one.dataset is dataset
        assert [dataset[int(index)] for index in one.indices] == list(one) == list(map(int, one.indices))
        assert np.asarray(one.indices).tolist() == list(one)
        assert list(pickle.loads(pickle.dumps(one))) == list(one)
    assert list(inner) == list(DERIVED[second](SimpleDataset(list(part))))


def test_indices_are_read_only_copies_and_of_a_huge_dataset_a_range():
    for kind in (np.array, torch.tensor, list):
        given = kind([3, 1])
        part = SubsetDataset("abcde", given)
        given[0] = 0
        assert np.asarray(part.indices).tolist() == [3, 1] and list(part) == ["d", "b"]
    part = SubsetDataset("abcde", np.array([3, 1]))
    for one in (part, part.take(1), SimpleDataset("abcde").split([2, 3], seed=1)[0]):
        with pytest.raises(ValueError, match="read-only"):
            one.indices[0] = 2
    for name in ("indices", "dataset"):
        with pytest.raises(AttributeError):
            setattr(part, name, "abc")
    inner = SimpleDataset(range(10**15)).take(10**14).shard(2, 1)[::-1]
    assert inner.indices == range(10**14 - 1, 5 * 10**13 - 1, -1) and inner[5] == 10**14 - 6


def test_a_class_of_ones_own_is_not_looked_through():
    class Negative(SubsetDataset):
        def __getitem__(self, index):
            return -super().__getitem__(index)

    part = Negative(range(100), range(10, 20)).take(3)
    assert list(part) == [-10, -11, -12] and part.indices == range(3) and isinstance(part.dataset, Negative)
    own = SubsetDataset(range(100), range(10, 20))
    own.get_batch = lambda indices: [0 for _ in indices]
    assert SubsetDataset(own, [1]).dataset is own


# -- wrappers ----------------------------------------------------------------------------------------------------------

IMAGES, LABELS = np.arange(40, dtype=np.float32).reshape(10, 2, 2), np.arange(10)


class Bare:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


class Epochal(Bare):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


@pytest.mark.parametrize("name", ["get_batch", "__getitems__", "set_epoch"])
@pytest.mark.parametrize("base", [Bare(), Epochal(), ArrayDataset(IMAGES, LABELS), ["a"] * 10])
def test_wrappers_have_what_the_wrapped_one_has(base, name):
    simple = SimpleDataset(base)
    wrappers = [simple, simple.take(3), simple.shard(2, 0), simple.split([1.0], seed=0)[0], simple + simple]
    wrappers += [simple.transform(lambda *x: x)] if name != "get_batch" else []
    wrappers += [simple.cache()] if name == "__getitems__" and not isinstance(base, Epochal) else []
    for wrapper in [*wrappers, *[pickle.loads(pickle.dumps(w)) for w in wrappers[:5]]]:
        assert hasattr(wrapper, name) == hasattr(base, name), wrapper
    assert not hasattr(simple.transform(lambda *x: x), "get_batch")


def test_the_epoch_reaches_the_innermost_dataset_and_mixed_parts_give_samples_only():
    base = Epochal()
    deep = (SimpleDataset(base).transform(lambda *x: x).take(5) + Bare()).shard(2, 0)
    deep.set_epoch(7)
    assert base.epoch == 7
    mixed = ArrayDataset(IMAGES, LABELS) + Bare()
    assert not hasattr(mixed, "get_batch") and not hasattr(mixed, "__getitems__")
    assert len(mixed) == 20 and mixed[-1][1] == 9


def noisy(x):
    return x, sample_rng().integers(1000)


def drawing(x, before):
    return noisier(*noisy(x))


def noisier(x, before):
    return x, before, sample_rng().integers(1000), random.random()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d.transform(noisy).transform(noisier, seeded=True),
        lambda d: d.transform(noisy).shard(2, 1).transform(noisier, seeded=True),
        lambda d: d.split([0.5, 0.5], seed=0)[1].transform(noisy).take(4).transform(noisier, seeded=True),
        lambda d: (d.take(5).transform(noisy) + d.transform(noisy)).transform(noisier, seeded=True),
        lambda d: d.transform(lambda x: (x, 0)).cache().transform(drawing, seeded=True),
    ],
)
def test_samples_draw_the_same_one_by_one_and_in_bulk_and_need_no_seed_outside_of_a_loader(wrap):
    indices = [3, 0, 3, 1]
    single = []
    dataset = wrap(ArrayDataset(np.arange(10)))
    try:
        for index in indices:
            reading.set(SampleScope(5, 2, index))
            single.append(dataset[index])
        dataset = wrap(ArrayDataset(np.arange(10)))
        reading.set(SampleScope(5, 2))
        assert dataset.__getitems__(indices) == single
        assert reading.get().index is NO_SAMPLE
    finally:
        reading.set(None)
    assert single[0][1] != single[0][2]
    assert len(dataset.__getitems__(indices)) == 4


@pytest.mark.parametrize(
    "wrapped", [lambda both: both.transform(add_one), lambda both: both.take(1500).transform(add_one)]
)
def test_a_batch_of_wrapped_parts_does_not_ask_all_of_them(wrapped, monkeypatch):
    asked, bulk_method = [], bulk.bulk_method
    monkeypatch.setattr(bulk, "bulk_method", lambda *given: asked.append(given) or bulk_method(*given))
    dataset = wrapped(ConcatDataset([ArrayDataset(np.arange(8) + 8 * part) for part in range(200)]))
    dataset.__getitems__([0])
    asked.clear()
    assert dataset.__getitems__([3, 1000, 7]) == [4, 1001, 8]
    assert len(asked) < 30  # 200 for each wrapper: with 10,000 parts, 0.1 s in each batch


def test_a_sum_of_datasets_checks_each_of_them_once(monkeypatch):
    checked, check = [], datasets.check_dataset
    monkeypatch.setattr(datasets, "check_dataset", lambda *given: checked.append(given) or check(*given))
    parts = [SimpleDataset([number]) for number in range(40)]
    checked.clear()
    assert list(sum(parts)) == list(range(40))
    assert len(checked) <= 40  # it was 819: a sum of 2,000 took 20 s
