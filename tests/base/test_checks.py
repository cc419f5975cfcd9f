"""What is no number, no size and no argument gets advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sharded_loader import ExpWidthBucket, ShardCache, SimpleDataset
from sharded_loader.base.checks import bytes_of_text, refuse_arguments


def test_sizes_are_numbers_or_texts() -> None:
    given = (5, "5", "5 b", "1kB", "2 MiB", "0.5 GB", "3TB", 7.0)
    assert [bytes_of_text(one) for one in given] == [5, 5, 5, 1000, 2 << 20, 500_000_000, 3 * 10**12, 7]
    assert bytes_of_text(0, 0) == 0


@pytest.mark.parametrize(
    "bad", ["50 %", "", "GB", "5 apples", "1e9", "-1 GB", -1, True, [1], float("inf"), float("nan")]
)
def test_another_size_gets_advice(tmp_path: Path, bad: Any) -> None:
    for make in (lambda: ShardCache(tmp_path, bad), lambda: SimpleDataset([1]).cache(bad)):
        with pytest.raises(ValueError, match="max_bytes is .*give .*, or a text such as '100 GB'"):
            make()


def test_zero_bytes_are_enough_for_samples_and_not_for_shards(tmp_path: Path) -> None:
    assert SimpleDataset([1]).cache(0)[0] == 1
    with pytest.raises(ValueError, match="above 0"):
        ShardCache(tmp_path, 0)


def test_a_cache_of_samples_takes_a_text() -> None:
    assert repr(SimpleDataset([1, 2]).cache("2 KiB")).endswith(".cache(2048)")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SimpleDataset([1]).shard("2", 0), r"shard\('2', 0\): give two ints"),
        (lambda: SimpleDataset([1]).shard(2, 0.5), r"shard\(2, 0\.5\): give two ints"),
        (lambda: SimpleDataset([1]).split("50%"), r"split\('50%'\): give a list of sizes or ratios"),
        (lambda: SimpleDataset([1]).split(0.5), r"split\(0\.5\): give a list of sizes or ratios"),
        (lambda: SimpleDataset([1]).split(["50%", "50%"]), r"sizes and ratios are numbers"),
        (lambda: ExpWidthBucket("2"), r"bucket_len_step must be above 0, got 2"),
    ],
)
def test_another_number_gets_advice(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_unknown_arguments_are_named_all_at_once() -> None:
    refuse_arguments("f", {}, lambda one, other: None)
    with pytest.raises(TypeError, match=r"^f has no argument 'oter'; did you mean 'other'\?$"):
        refuse_arguments("f", {"oter": 1}, lambda one, other: None)
    with pytest.raises(TypeError) as caught:
        refuse_arguments("f", {"oter": 1, "far": 2, "zer": 3}, lambda one, other: None, {"far": "leave it out"})
    assert str(caught.value).splitlines() == [
        "f has none of these 3 arguments:",
        "  'oter'; did you mean 'other'?",
        "  'far': leave it out",
        "  'zer'; see help(f) for those it has",
    ]
