"""Datasets: Gluon's answers, indices from both ends, batches in bulk, and clear refusals."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from sharded_loader.data.datasets import ArrayDataset, ConcatDataset, Dataset, SimpleDataset, SubsetDataset

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


REFUSED = {
    "shard_err_hi": (ValueError, "shard index 3 is out of bounds for 3 shards"),
    "shard_err_zero": (ValueError, "the number of shards must be greater than 0"),
    "sample_err": (TypeError, "Invalid sampler type: <class 'list'>"),
    "array_len_err": (ValueError, r"array\[0\] has length 1 while array\[1\] has 2"),
}


@pytest.mark.parametrize("case", GOLDEN.values(), ids=GOLDEN.keys())
def test_answers_are_gluons(case):
    refused = isinstance(case["expected"], dict) and "__error__" in case["expected"]
    assert refused == (case["id"] in REFUSED)
    if refused:
        error, said = REFUSED[case["id"]]
        with pytest.raises(error, match=said):
            CALLS[case["id"]]()
    else:
        assert encoded(CALLS[case["id"]]()) == decoded(case["expected"])


BAD = [
    (lambda: ten().take(-2), ValueError, "the count is negative"),
    (lambda: ten().take(2.5), TypeError, "give an int"),
    (lambda: SimpleDataset(iter([1])), TypeError, "needs an object with __getitem__ and __len__"),
    (lambda: ArrayDataset([1], label=[2]), TypeError, "name all columns or none"),
    (lambda: ArrayDataset(), TypeError, "no columns: give at least one"),
    (lambda: ArrayDataset(np.array(3)), TypeError, "without a length"),
    (lambda: ArrayDataset(image=[1], label=[1, 2]), ValueError, "image has length 1 while label has 2"),
    (lambda: ConcatDataset([]), ValueError, "no datasets: give at least one"),
    (lambda: ten() + 3, TypeError, "unsupported operand"),
    (lambda: ten().cache(-1), ValueError, "give 0 or more, a share of what is free"),
    (lambda: ten().transform(3), TypeError, "not callable"),
    (lambda: ten().transform(add_one, lazy=False, seeded=True), ValueError, "has no epoch to be seeded by"),
    (lambda: ten().sample(torch.utils.data.BatchSampler(range(4), 2, False)), TypeError, "single indices"),
    (lambda: SubsetDataset("abc", [3]), IndexError, "3 samples"),
    (lambda: ten().split([7, 2], seed=0), ValueError, "the sizes sum to 9, the dataset has 10 samples"),
    (lambda: ten().split([0.5, 0.4], seed=0), ValueError, r"the ratios sum to 0\.9"),
    (lambda: ten().split([1.2, -0.2], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([float("nan"), 1.0], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([True, 9], seed=0), ValueError, "numbers of 0 or more"),
    (lambda: ten().split([], seed=0), ValueError, r"split\(\[\]\): give at least one"),
    (lambda: ArrayDataset(torch.ones(3, requires_grad=True)).get_batch([0]), ValueError, "detach"),
]


@pytest.mark.parametrize(("call", "error", "said"), BAD)
def test_bad_arguments_are_refused(call, error, said):
    with pytest.raises(error, match=said):
        call()


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


def test_a_dataset_shows_what_it_is_made_of():
    base = SimpleDataset(list("abcde"))
    shown = "SimpleDataset(5 samples of list)"
    assert repr(base) == shown
    assert repr(base.take(2)) == f"<2 of {shown}>"
    assert repr(base.cache(9)) == f"{shown}.cache(9)"
    assert repr(base + base) == f"{shown} + {shown}"
    assert repr(base.transform(str, seeded=True)) == f"{shown}.transform(<class 'str'>, seeded=True)"
    assert repr(ArrayDataset(x=np.zeros((3, 2)), y=[1, 2, 3])) == "ArrayDataset(x=float64[2], y=list; 3 samples)"
