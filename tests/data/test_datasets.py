"""Datasets: Gluon's answers, indices from both ends, batches in bulk, and clear refusals."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from sharded_loader.batchify import default_batchify_fn
from sharded_loader.batching.tree import to_torch
from sharded_loader.data.arrays import ArrayDataset
from sharded_loader.data.datasets import ConcatDataset, Dataset, SimpleDataset, SubsetDataset

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


IMAGES = np.arange(40, dtype=np.float32).reshape(10, 2, 2)


LABELS = np.arange(10)


class Bare:
    def __len__(self):
        return 10

    def __getitem__(self, index):
        return IMAGES[index], LABELS[index]


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
