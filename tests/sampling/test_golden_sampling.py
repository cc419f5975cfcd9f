"""The answers of mxnet 1.9.1 and gluonnlp 0.10.0 on small deterministic cases are ours too."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

import sharded_loader

GOLDEN = Path(__file__).resolve().parent.parent / "golden"
SCHEMES = {
    "const": sharded_loader.ConstWidthBucket(),
    "linear": sharded_loader.LinearWidthBucket(),
    "exp": sharded_loader.ExpWidthBucket(),
    "exp1.5": sharded_loader.ExpWidthBucket(1.5),
}


def cases(group: str) -> list[Any]:
    return [pytest.param(case, id=case["id"]) for case in json.loads((GOLDEN / f"{group}.json").read_text())]


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


@pytest.mark.parametrize("case", cases("sampler"))
def test_index_samplers_answer_as_gluon_does(case: dict[str, Any]) -> None:
    params = dict(case["params"])
    sampler = getattr(sharded_loader, params.pop("cls"))(*params.values())
    expected = case["expected"]["__dict__"]
    assert len(sampler) == expected["len"]
    assert list(sampler) == expected["items"]


@pytest.mark.parametrize("case", cases("batch_sampler"))
def test_batch_sampler_answers_as_gluon_does_epoch_after_epoch(case: dict[str, Any]) -> None:
    params = case["params"]
    sampler = sharded_loader.BatchSampler(
        sharded_loader.SequentialSampler(params["n"]), params["batch_size"], params["last_batch"]
    )
    for expected in case["expected"]:
        assert len(sampler) == expected["__dict__"]["len_before"]
        assert list(sampler) == expected["__dict__"]["batches"]


@pytest.mark.parametrize("case", cases("bucket_scheme"))
def test_bucket_schemes_answer_as_gluonnlp_does(case: dict[str, Any]) -> None:
    params = case["params"]
    scheme = SCHEMES[params["scheme"]]
    assert scheme(params["max_lengths"], params["min_lengths"], params["num_buckets"]) == case["expected"]


@pytest.mark.parametrize("case", cases("nlp_sampler"))
def test_gluonnlp_samplers_answer_as_gluonnlp_does(case: dict[str, Any]) -> None:
    params = dict(case["params"])
    cls = params.pop("cls")
    if cls == "SplitSampler":
        for part, expected in enumerate(case["expected"]):
            sampler = sharded_loader.SplitSampler(params["length"], params["num_parts"], part, shuffle=False)
            wanted = expected["__dict__"]
            # With even_size, GluonNLP adds random samples of other parts. A loader does that for ranks.
            assert list(sampler) == wanted.get("items", wanted.get("own"))
        return
    wanted = case["expected"]["__dict__"]
    if cls == "SortedSampler":
        assert list(sharded_loader.SortedSampler(params["keys"], reverse=params["reverse"])) == wanted["items"]
        return
    bucketed = sharded_loader.SortedBucketSampler(
        params["keys"], params["batch_size"], mult=params["mult"], reverse=params["reverse"]
    )
    assert list(bucketed) == wanted["batches"]
    assert len(bucketed) == len(wanted["batches"])


@pytest.mark.parametrize("case", cases("fixed_bucket"))
def test_fixed_bucket_sampler_answers_as_gluonnlp_does(case: dict[str, Any]) -> None:
    params = dict(case["params"])
    if "bucket_scheme" in params:
        params["bucket_scheme"] = SCHEMES[params["bucket_scheme"]]
    expected = case["expected"]
    if "__error__" in expected:
        with pytest.raises(ValueError, match="give|leave"):
            sharded_loader.FixedBucketSampler(**params)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sampler = sharded_loader.FixedBucketSampler(**params, last_group="overlap")
    assert [str(warning.message) for warning in caught] == case.get("warnings", [])
    wanted = expected["__dict__"]
    assert len(sampler) == wanted["len"]
    assert plain(list(sampler)) == wanted["out"]
    assert sampler.stats() == wanted["stats"]
    assert plain(sampler.bucket_keys) == wanted["bucket_keys"]
    assert sampler.bucket_batch_sizes == wanted["bucket_batch_sizes"]
