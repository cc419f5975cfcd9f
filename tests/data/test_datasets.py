"""Datasets: Gluon's answers, right indices, bulk reading through every wrapper, and clear refusals."""

import gc
import json
import pickle
import random
import threading
import tracemalloc
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader.batchify import default_batchify_fn
from sharded_loader.data.caching import estimated_bytes
from sharded_loader.data.datasets import ArrayDataset, CachedDataset, ConcatDataset, Dataset, SimpleDataset
from sharded_loader.data.structure import to_torch
from sharded_loader.data.subsets import SubsetDataset, split_sizes
from sharded_loader.rng import SampleScope, reading, sample_rng

GOLDEN = {c["id"]: c for c in json.loads((Path(__file__).parents[1] / "golden" / "dataset.json").read_text())}


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


def decoded(expected):
    if isinstance(expected, dict) and "__tuple__" in expected:
        return tuple(decoded(e) for e in expected["__tuple__"])
    if isinstance(expected, dict) and "__dict__" in expected:
        return {k: decoded(v) for k, v in expected["__dict__"].items()}
    return [decoded(e) for e in expected] if isinstance(expected, list) else expected


def encoded(value):
    if isinstance(value, Dataset):
        return {"len": len(value), "items": list(value)}
    return [encoded(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN.keys())
def test_answers_are_gluons(case):
    if isinstance(case["expected"], dict) and "__error__" in case["expected"]:
        with pytest.raises((ValueError, TypeError), match="(?i)shard|sampler type|length 1 while"):
            CALLS[case["id"]]()
    else:
        assert encoded(CALLS[case["id"]]()) == decoded(case["expected"])


@given(st.integers(0, 50), st.integers(1, 9))
def test_shards_are_disjoint_complete_and_even(length, num_shards):
    parts = [list(SimpleDataset(range(length)).shard(num_shards, i)) for i in range(num_shards)]
    assert list(chain(*parts)) == list(range(length))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 200), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**70))
def test_ratio_splits_are_disjoint_complete_and_pure(length, weights, seed):
    ratios = [w / sum(weights) for w in weights]
    parts = [list(p) for p in SimpleDataset(range(length)).split(ratios, seed=seed)]
    assert sorted(chain(*parts)) == list(range(length))
    assert all(abs(len(p) - r * length) < 1 + 1e-6 for p, r in zip(parts, ratios, strict=True))
    assert parts == [list(p) for p in SimpleDataset(range(length)).split(ratios, seed=seed)]


def test_splits_by_size_and_by_torchs_seed():
    a, b = ten().split([7, 3], seed=0)
    assert (len(a), len(b)) == (7, 3) and a.indices.dtype == np.int64
    torch.manual_seed(3)
    first = list(ten().split([0.5, 0.5])[0])
    torch.manual_seed(3)
    assert first == list(ten().split([0.5, 0.5])[0])
    assert first != list(ten().split([0.5, 0.5])[0])
    assert split_sizes(100, [0.29, 0.71]) == [29, 71]


@pytest.mark.parametrize("parts", [[7, 2], [0.5, 0.4], [1.2, -0.2], [], [float("nan"), 1.0], [True, 9]])
def test_splits_that_do_not_add_up_are_refused(parts):
    with pytest.raises(ValueError, match=r"split\("):
        ten().split(parts, seed=0)


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="take"):
        ten().take(-2)
    with pytest.raises(TypeError, match="__getitem__"):
        SimpleDataset(iter([1]))
    with pytest.raises(TypeError, match="name all columns or none"):
        ArrayDataset([1], label=[2])
    with pytest.raises(TypeError, match="at least one"):
        ArrayDataset()
    with pytest.raises(TypeError, match="without a length"):
        ArrayDataset(np.array(3))
    with pytest.raises(ValueError, match="image has length 1 while label has 2"):
        ArrayDataset(image=[1], label=[1, 2])
    with pytest.raises(ValueError, match="at least one"):
        ConcatDataset([])
    with pytest.raises(TypeError, match="unsupported operand"):
        ten() + 3
    with pytest.raises(ValueError, match="max_bytes"):
        ten().cache(-1)
    with pytest.raises(TypeError, match="not callable"):
        ten().transform(3)
    with pytest.raises(ValueError, match="lazy"):
        ten().transform(add_one, lazy=False, seeded=True)
    with pytest.raises(TypeError, match="single indices"):
        ten().sample(torch.utils.data.BatchSampler(range(4), 2, False))
    with pytest.raises(IndexError, match="3 samples"):
        SubsetDataset("abc", [3])


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
        with pytest.raises(IndexError):
            dataset[index]
    if not hasattr(dataset, "_fn"):
        with pytest.raises(IndexError, match="5 samples"):
            dataset[5]
    assert list(pickle.loads(pickle.dumps(dataset))) == items
    assert repr(dataset)


def test_sums_are_flat_and_in_order():
    total = SimpleDataset("ab") + SimpleDataset("") + "c" + ConcatDataset(["d", "ef"])
    assert list(total) == list("abcdef") and len(total._parts) == 5


def test_own_samplers_are_read_at_epoch_0():
    samplers = pytest.importorskip("sharded_loader.sampling")
    sampler = samplers.RandomSampler(10, seed=3)
    assert list(ten().sample(sampler)) == list(sampler.iter_epoch(0))


IMAGES = np.arange(40, dtype=np.float32).reshape(10, 2, 2)
LABELS = np.arange(10)


class Bare:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


class Epochal(Bare):
    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


WRAPS = [
    lambda d: d,
    SimpleDataset,
    lambda d: d.take(9),
    lambda d: d.shard(1, 0),
    lambda d: d.split([0.9, 0.1], seed=1)[0].take(None),
    lambda d: d.sample(torch.utils.data.SequentialSampler(range(10))),
    lambda d: d.take(4) + d.shard(2, 1),
]


@pytest.mark.parametrize(
    "dataset",
    [
        ArrayDataset(IMAGES),
        ArrayDataset(IMAGES, LABELS),
        ArrayDataset(image=IMAGES, label=LABELS),
        ArrayDataset(torch.from_numpy(IMAGES), LABELS.tolist(), list("abcdefghij")),
        ArrayDataset(torch.ones(10, 2, dtype=torch.bfloat16)),
        ArrayDataset(IMAGES.astype(">f4"), IMAGES[:, ::-1]),
        ArrayDataset(np.array(list("abcdefghij")), np.arange(10).astype("M8[D]").astype(object).astype(str)),
        ArrayDataset(ArrayDataset(IMAGES), SimpleDataset(Bare())),
        ArrayDataset(torch.arange(10), torch.eye(10).unbind()),
    ],
    ids=repr,
)
def test_a_bulk_batch_is_the_default_batch_of_its_samples(dataset):
    for wrap in WRAPS:
        wrapped = wrap(dataset)
        for indices in ([3, 0, 0, -1, 7], np.array([1, 2, 3])):
            expected = default_batchify_fn([wrapped[i] for i in indices])
            assert same(to_torch(wrapped.get_batch(indices)), expected), wrapped
            assert same(default_batchify_fn(wrapped.__getitems__(indices)), expected), wrapped


def test_bulk_batches_lie_in_memory_that_was_given():
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    x, y = ArrayDataset(IMAGES, torch.from_numpy(IMAGES)).take(5)._gather([1, 2], empty)
    assert x is given[0] and y.data_ptr() == given[1].ctypes.data


@pytest.mark.parametrize("name", ["get_batch", "__getitems__", "set_epoch"])
@pytest.mark.parametrize("base", [Bare(), Epochal(), ArrayDataset(IMAGES, LABELS), ["a"] * 10])
def test_wrappers_have_what_the_wrapped_one_has(base, name):
    simple = SimpleDataset(base)
    wrappers = [simple, simple.take(3), simple.shard(2, 0), simple.split([1.0], seed=0)[0], simple + simple]
    wrappers += [simple.cache(), simple.transform(lambda *x: x)] if name != "get_batch" else []
    for wrapper in [*wrappers, *[pickle.loads(pickle.dumps(w)) for w in wrappers[:5]]]:
        assert hasattr(wrapper, name) == hasattr(base, name), wrapper
    assert not hasattr(simple.transform(lambda *x: x), "get_batch")
    assert not hasattr(simple.cache(), "get_batch")


def test_the_epoch_reaches_the_innermost_dataset():
    base = Epochal()
    deep = (SimpleDataset(base).transform(lambda *x: x).take(5).cache() + Bare()).shard(2, 0)
    deep.set_epoch(7)
    assert base.epoch == 7


def test_mixed_parts_give_samples_only():
    mixed = ArrayDataset(IMAGES, LABELS) + Bare()
    assert not hasattr(mixed, "get_batch") and not hasattr(mixed, "__getitems__")
    assert len(mixed) == 20 and mixed[-1][1] == 9


def test_bulk_indices_out_of_range_are_refused():
    dataset = ArrayDataset(IMAGES)
    for indices in ([0, 10], [-11]):
        with pytest.raises(IndexError, match="10 samples"):
            dataset.get_batch(indices)
    with pytest.raises(TypeError, match="integers"):
        dataset.get_batch([0.5])
    assert dataset.get_batch([]).shape == (0, 2, 2)


def test_columns_that_require_grad_are_refused():
    with pytest.raises(ValueError, match="detach"):
        ArrayDataset(torch.ones(3, requires_grad=True)).get_batch([0])


# -- randomness ------------------------------------------------------------------------------------------------


def noisy(x):
    return x, sample_rng().integers(1000)


def noisier(x, before):
    return x, before, sample_rng().integers(1000), random.random()


@pytest.mark.parametrize(
    "wrap",
    [
        lambda d: d.transform(noisy).transform(noisier, seeded=True),
        lambda d: d.transform(noisy).shard(2, 1).transform(noisier, seeded=True),
        lambda d: d.split([0.5, 0.5], seed=0)[1].transform(noisy).take(4).transform(noisier, seeded=True),
        lambda d: (d.take(5).transform(noisy) + d.transform(noisy)).transform(noisier, seeded=True),
        lambda d: d.transform(noisy).cache().transform(noisier, seeded=True),
    ],
)
def test_samples_draw_the_same_one_by_one_and_in_bulk(wrap, monkeypatch):
    indices = [3, 0, 3, 1]
    single = []
    dataset = wrap(ArrayDataset(np.arange(10)))
    monkeypatch.setattr(reading, "scope", SampleScope(5, 2), raising=False)
    for index in indices:
        reading.scope.at(index)
        single.append(dataset[index])
    dataset = wrap(ArrayDataset(np.arange(10)))
    monkeypatch.setattr(reading, "scope", SampleScope(5, 2))
    assert dataset.__getitems__(indices) == single
    assert reading.scope.index is SampleScope.NO_SAMPLE
    assert single[0][1] != single[0][2]


def test_outside_a_loader_bulk_reading_needs_no_seed():
    assert len(ArrayDataset(np.arange(10)).transform(noisy).__getitems__([1, 2])) == 2


# -- cache -------------------------------------------------------------------------------------------------------


class Counting:
    def __init__(self):
        self.reads = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.reads.append(index)
        return np.full(1000, index, np.uint8)


def test_each_sample_is_read_once():
    source = Counting()
    cached = SimpleDataset(source).cache()
    for _ in range(2):
        assert [int(x[0]) for x in cached] == list(range(10))
    assert cached[-1] is cached[9]
    assert source.reads == list(range(10))


def test_a_full_cache_keeps_what_it_has():
    source = Counting()
    cached = CachedDataset(source, max_bytes=3500)
    for _ in range(2):
        list(cached)
    assert cached.cached == 3 and source.reads == [*range(10), *range(3, 10)]


def test_bulk_reads_fetch_only_what_is_missing():
    asked = []

    class Bulk(Counting):
        def __getitems__(self, indices):
            asked.append(list(indices))
            return [self[i] for i in indices]

    cached = CachedDataset(Bulk())
    cached.__getitems__([1, 2])
    assert [int(x[0]) for x in cached.__getitems__([2, 3, -10])] == [2, 3, 0]
    assert asked == [[1, 2], [3, 0]]


def test_a_copy_in_another_process_starts_empty():
    cached = CachedDataset(Counting())
    list(cached)
    assert pickle.loads(pickle.dumps(cached)).cached == 0
    cached._own_store.pid -= 1  # what a forked child sees
    cached._own_store.lock.acquire()
    assert cached.cached == 0 and cached[3][0] == 3 and cached.cached == 1


def test_threads_share_one_entry_per_sample():
    cached = CachedDataset(Counting(), max_bytes=10**6)
    start = threading.Barrier(8)
    seen = []

    def work():
        start.wait()
        seen.append([cached[i] for i in range(10)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached.cached == 10
    assert cached._store.used == sum(estimated_bytes(cached[i]) for i in range(10))
    assert all(a is b for row in seen[1:] for a, b in zip(seen[0], row, strict=True))


def test_sample_uses_the_iter_that_a_sampler_class_overrides():
    from sharded_loader.sampling import SequentialSampler

    class Backwards(SequentialSampler):
        def __iter__(self):
            return iter([2, 1, 0])

    assert list(SimpleDataset([10, 20, 30, 40]).sample(Backwards(3))) == [30, 20, 10]


class Views:
    """Samples that are small parts of large arrays, made for each sample."""

    def __init__(self, view):
        self.view = view

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.view(np.full(1_000_000, index, np.uint8))


class Held:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


VIEWS = {
    "view": lambda a: a[:10],
    "strided": lambda a: a[:100:10],
    "view of a view": lambda a: a.reshape(1000, 1000)[3][:10],
    "in a tuple": lambda a: (a[:10], "label"),
    "in a dict": lambda a: {"x": a[:10]},
    "tensor": lambda a: torch.from_numpy(a.copy()).clone()[:10],
    "tensor of a view": lambda a: torch.from_numpy(a[:10]),
    "array of a tensor": lambda a: torch.from_numpy(a).clone()[:10].numpy(),
    "buffer": lambda a: np.frombuffer(a.tobytes(), np.uint8)[:10],
    "memoryview": lambda a: memoryview(a)[:10],
    "in an object": lambda a: Held(a[:10]),
    "in an object array": lambda a: np.array([a[:10], None], object),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_bounded_cache_holds_no_more_memory_than_it_may(view):
    tracemalloc.start()
    try:
        cached = SimpleDataset(Views(view)).cache(max_bytes=100_000)
        torch_owned = sum(
            leaf.untyped_storage().nbytes() for leaf in [cached[i] for i in range(20)] if isinstance(leaf, torch.Tensor)
        )
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] + torch_owned
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_a_cached_view_has_the_values_of_the_sample():
    data = np.arange(60).reshape(20, 3)
    for dataset in (
        ArrayDataset(data),
        ArrayDataset(data.T.copy().T, torch.arange(20)),
        ArrayDataset(torch.arange(20)),
    ):
        cached = dataset.cache(max_bytes=10_000)
        for _ in range(2):
            batch = default_batchify_fn(cached.__getitems__([3, 1, 3]))
            assert repr(batch) == repr(default_batchify_fn([dataset[3], dataset[1], dataset[3]]))
        assert cached.cached == 2 and cached[3] is cached[3]
