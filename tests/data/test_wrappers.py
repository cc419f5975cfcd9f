"""Datasets of datasets: right indices, bulk reads through every wrapper, samples that draw their own numbers."""

import pickle
import random
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader import (
    ArrayDataset,
    ConcatDataset,
    RandomSampler,
    ShardedDataLoader,
    SimpleDataset,
)
from sharded_loader.base import limits
from sharded_loader.base.limits import Limit
from sharded_loader.batchify import default_batchify_fn
from sharded_loader.batching.tree import to_torch
from sharded_loader.randomness import shuffle
from sharded_loader.randomness.rng import NO_SAMPLE, SampleScope, reading, sample_rng


def ten():
    return SimpleDataset(range(10))


@given(st.integers(0, 50), st.integers(1, 9))
@settings(deadline=None)
def test_shards_are_disjoint_complete_and_even(length, num_shards):
    parts = [list(SimpleDataset(range(length)).shard(num_shards, i)) for i in range(num_shards)]
    assert list(chain(*parts)) == list(range(length))
    sizes = [len(part) for part in parts]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1


def test_take_never_takes_more_than_there_are():
    assert [ten().take(count).indices for count in (0, 3, 19, None)] == [range(0), range(3), range(10), range(10)]


@given(st.integers(0, 200), st.lists(st.integers(1, 20), min_size=1, max_size=6), st.integers(0, 2**70))
@settings(deadline=None)
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
    assert [len(part) for part in SimpleDataset(range(100)).split([0.29, 0.71])] == [29, 71]


def test_a_split_is_the_same_in_every_release(monkeypatch):
    pinned = {2**24: [[4, 5, 7, 6], [1, 2], [0, 3]], 0: [[7, 1, 6, 5], [4, 0], [3, 2]]}
    for in_memory, indices in pinned.items():
        monkeypatch.setattr(shuffle, "IN_MEMORY", in_memory)
        parts = SimpleDataset(range(8)).split([0.5, 0.25, 0.25], seed=7)
        assert [part.indices.tolist() for part in parts] == indices


def test_more_indices_than_fit_into_memory_are_refused_at_once(monkeypatch):
    monkeypatch.setattr(limits, "free_bytes", lambda: Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="keeps all 1,000,000,000,000 indices.*: cut it by take"):
        SimpleDataset(range(10**12)).split([0.9, 0.1], seed=1)
    with pytest.raises(MemoryError, match="all 1,000,000,000,000 indices of the RandomSampler.*to the loader"):
        SimpleDataset(range(10**12)).sample(RandomSampler(10**12, seed=1))


def test_sums_are_flat_and_in_order():
    total = SimpleDataset("ab") + SimpleDataset("") + "c" + ConcatDataset(["d", "ef"])
    assert list(total) == list("abcdef") == [total[i] for i in range(-6, 0)]
    assert repr(total).count(" + ") == 4


def test_samplers_are_read_at_epoch_0_by_the_iter_that_a_class_overrides():
    class Backwards(RandomSampler):
        def __iter__(self):
            return iter([2, 1, 0])

    sampler = RandomSampler(10, seed=3)
    assert list(ten().sample(sampler)) == list(sampler.iter_epoch(0))
    assert list(SimpleDataset([10, 20, 30, 40]).sample(Backwards(3))) == [30, 20, 10]


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


def test_bulk_batches_lie_in_memory_that_was_given():
    given = []

    def empty(shape, dtype):
        given.append(np.empty(shape, dtype))
        return given[-1]

    x, y = ArrayDataset(IMAGES, torch.from_numpy(IMAGES)).take(5).get_batch([1, 2], empty)
    assert x is given[0] and y.data_ptr() == given[1].ctypes.data


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


def test_the_epoch_reaches_the_innermost_dataset():
    base = Epochal()
    deep = (SimpleDataset(base).transform(lambda *x: x).take(5) + Bare()).shard(2, 0)
    deep.set_epoch(7)
    assert base.epoch == 7


def test_mixed_parts_give_samples_only():
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
def test_samples_draw_the_same_one_by_one_and_in_bulk(wrap):
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


def test_outside_a_loader_bulk_reading_needs_no_seed():
    assert len(ArrayDataset(np.arange(10)).transform(noisy).__getitems__([1, 2])) == 2


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


PARTS = [
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
    for wrap in PARTS:
        wrapped = wrap(dataset)
        for indices in ([3, 0, 0, -1, 7], np.array([1, 2, 3])):
            expected = default_batchify_fn([wrapped[i] for i in indices])
            assert same(to_torch(wrapped.get_batch(indices)), expected), wrapped
            assert same(default_batchify_fn(wrapped.__getitems__(indices)), expected), wrapped


class NoSamples(ArrayDataset):
    """Fails where a sample is read that should be read in bulk."""

    def __getitem__(self, index):
        raise AssertionError("read one by one")

    def __getitems__(self, indices):
        raise AssertionError("read by samples")

    def get_batch(self, indices, empty=np.empty):
        return super().get_batch(indices, empty)


@pytest.mark.parametrize("wrap", [*PARTS, lambda d: torch.utils.data.Subset(d, range(3, 9))])
def test_wrappers_read_batches_by_get_batch_alone(wrap):
    images, labels = next(iter(ShardedDataLoader(wrap(NoSamples(IMAGES, LABELS)), 3)))
    assert torch.equal(images, torch.from_numpy(IMAGES[labels.numpy()])) and len(labels) == 3
