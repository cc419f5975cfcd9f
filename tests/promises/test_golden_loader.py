"""The original's answers on whole loaders (mxnet 1.9.1, gluonnlp 0.10.0)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import ArrayDataset, FixedBucketSampler, ShardedDataLoader

CASES = {case["id"]: case for case in json.loads((Path(__file__).parents[1] / "golden/loader.json").read_text())}
RUNS = [name for name in CASES if name.startswith(("loader_None", "loader_keep", "loader_discard", "loader_rollover"))]
SHARDED = [name for name in CASES if name.startswith("loader_sharded")]


def decode(value: Any) -> Any:
    if isinstance(value, list):
        return [decode(item) for item in value]
    if isinstance(value, dict) and "__array__" in value:
        return torch.from_numpy(np.array(value["data"], dtype=value["dtype"]).reshape(value["shape"]))
    if isinstance(value, dict) and "__dict__" in value:
        return {key: decode(item) for key, item in value["__dict__"].items()}
    return value


def assert_epochs(loader: ShardedDataLoader, expected: list[dict[str, Any]]) -> None:
    for epoch in expected:
        assert len(loader) == epoch["len"]
        batches = []
        for batch in loader:
            assert len(loader) == epoch["len"], "the length changed in mid-epoch"
            batches.append(batch)
        assert len(batches) == len(epoch["batches"])
        for found, wanted in zip(batches, epoch["batches"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)  # types and shapes, too


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.costly
def test_epochs_of_a_range(name: str) -> None:
    params = dict(CASES[name]["params"])
    with ShardedDataLoader(range(params.pop("n")), **params) as loader:
        assert_epochs(loader, decode(CASES[name]["expected"]))


@pytest.mark.parametrize("name", SHARDED)
def test_sharded_batches(name: str) -> None:
    x = np.arange(40, dtype=np.float32).reshape(20, 2)
    sampler = FixedBucketSampler([5] * 20, 3, num_buckets=1, num_shards=2, last_group="overlap")
    loader = ShardedDataLoader(
        ArrayDataset(x, np.arange(20, dtype=np.int32)), batch_sampler=sampler, **CASES[name]["params"]
    )
    with loader:
        assert_epochs(loader, decode(CASES[name]["expected"]))


def test_a_numpy_array_is_a_dataset() -> None:
    loader = ShardedDataLoader(np.arange(40, dtype=np.float32).reshape(20, 2), 8)
    assert_epochs(loader, decode(CASES["loader_numpy_direct"]["expected"]))


def test_flat_and_sharded_batches_in_one_sampler() -> None:
    loader = ShardedDataLoader(range(4), batch_sampler=[[0, 1], [[2], [3]]])
    assert_epochs(loader, decode(CASES["mixed_batches"]["expected"]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("err_nobatch", {}),
        ("err_bs_batch_size", {"batch_sampler": [[0]], "batch_size": 2}),
        ("err_bs_sampler", {"batch_sampler": [[0]], "sampler": [0]}),
    ],
)
def test_refusals(name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as caught:
        ShardedDataLoader(range(4), **arguments)
    assert str(caught.value).startswith(CASES[name]["expected"]["message"].rstrip("."))


def test_numbers_that_are_taken_as_0() -> None:
    assert ShardedDataLoader(range(4), 2, num_workers=-3).num_workers == CASES["neg_workers"]["expected"]
    assert ShardedDataLoader(range(4), 2, prefetch=-5).prefetch == CASES["prefetch_neg"]["expected"]


def test_no_case_is_left_out() -> None:
    others = {"loader_numpy_direct", "mixed_batches", "err_nobatch", "err_bs_batch_size", "err_bs_sampler"}
    assert {*RUNS, *SHARDED, *others, "neg_workers", "prefetch_neg"} == set(CASES)
