"""What users give is checked, with advice; objects are shown in a few words; entries of states have names and types."""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import (
    ArrayDataset,
    ExpWidthBucket,
    InlinePool,
    ProcessPool,
    RandomSampler,
    ShardCache,
    SimpleDataset,
    ThreadPool,
)
from sharded_loader.base import entries
from sharded_loader.base.checks import bytes_of_text, refuse_arguments
from sharded_loader.base.described import brief, call_of
from sharded_loader.torch import DataLoader


def test_sizes_are_numbers_or_texts_and_zero_is_enough_for_samples_but_not_for_shards(tmp_path):
    given = (5, "5", "5 b", "1kB", "2 MiB", "0.5 GB", "3TB", 7.0)
    assert [bytes_of_text(one) for one in given] == [5, 5, 5, 1000, 2 << 20, 500_000_000, 3 * 10**12, 7]
    assert bytes_of_text(0, 0) == 0
    assert SimpleDataset([1]).cache(0)[0] == 1
    assert [ProcessPool(1, max_bytes=one).max_bytes for one in ("2 MiB", 7, None)] == [2 << 20, 7, None]
    assert len(list(DataLoader([1], num_workers=1, max_bytes="2 MiB"))) == 1
    with pytest.raises(ValueError, match="above 0"):
        ShardCache(tmp_path, 0)
    with pytest.raises((TypeError, ValueError), match="bucket_len_step must be above 0, got '2'"):
        ExpWidthBucket("2")


@pytest.mark.parametrize(
    "bad", ["50 %", "", "GB", "5 apples", "1e9", "-1 GB", -1, True, [1], float("inf"), float("nan")]
)
def test_another_size_gets_advice(tmp_path, bad):
    pools: list[Any] = [lambda: ProcessPool(1, max_bytes=bad), lambda: DataLoader([1], num_workers=1, max_bytes=bad)]
    for make in (lambda: ShardCache(tmp_path, bad), lambda: SimpleDataset([1]).cache(bad), *pools):
        with pytest.raises(ValueError, match="max_bytes is .*give .*, or a text such as '100 GB'"):
            make()


def test_unknown_arguments_are_named_all_at_once():
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


# -- one short line for every object -----------------------------------------------------------------------------------

BASE = SimpleDataset("abcde")
SHOWN = [
    (None, "None"),
    (np.float64(2.5), "2.5"),
    (np.array(3), "<numpy.ndarray>"),
    ("a" * 1000, f"'{'a' * 27}...{'a' * 28}'"),
    ([1, "a", (2, 3)], "[1, 'a', [2, 3]]"),
    (range(10**12), "[0, 1, 2, ... 1000000000000 in all]"),
    (np.zeros((9, 2)), "[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], ... 9 in all]"),
    ({1: 2}, "<dict of length 1>"),
    (torch.zeros(3), "<torch.Tensor of length 3>"),
    (RandomSampler(3, seed=1), "RandomSampler(length=3, seed=1)"),
    (object(), "<object>"),
    (print, "<print>"),
    (RandomSampler, "<RandomSampler>"),
    (BASE, "SimpleDataset(5 samples of str)"),
    (BASE.take(4)[2:], "<2 of SimpleDataset(5 samples of str)>"),
    (BASE.cache("2 KiB"), "SimpleDataset(5 samples of str).cache(2048)"),
    (InlinePool(), "InlinePool()"),
    (ThreadPool(2, timeout=5), "ThreadPool(2, timeout=5.0)"),
]


@pytest.mark.parametrize(("value", "text"), SHOWN, ids=range(len(SHOWN)))
def test_a_value_is_told_in_a_few_words(value, text):
    assert brief(value) == text


def test_what_was_given_is_shown_unless_it_is_the_usual():
    assert call_of([], [1, "x"], usual=(3, 3), other=(4, 3), nothing=(None, None)) == "list(1, 'x', other=4)"
    pool = ProcessPool(3, start_method="spawn", timeout=5, max_bytes=1 << 20, restarts=0, worker_init_fn=print)
    assert repr(pool) == (
        "ProcessPool(3, start_method='spawn', worker_init_fn=<print>, timeout=5.0, restarts=0, max_bytes=1048576)"
    )
    assert repr(BASE + BASE) == f"{BASE!r} + {BASE!r}"
    assert repr(BASE.transform(str, seeded=True)) == f"{BASE!r}.transform(<class 'str'>, seeded=True)"
    assert repr(ArrayDataset(x=np.zeros((3, 2)), y=[1, 2, 3])) == "ArrayDataset(x=float64[2], y=list; 3 samples)"


# -- the entries of a saved position: written, read again, checked and compared, each by what its field says -----------

ADVICE = "give a state"


@dataclass(frozen=True)
class Inner:
    over: bool = entries.entry(entries.true_or_false)
    own: Any = entries.entry(entries.anything, default=None)  # noqa: RUF009


@dataclass(frozen=True)
class Outer:
    done: int = entries.entry(entries.integer(0), "{done} was {was}, and is {now}", name="samples")
    kind: str = entries.entry(entries.string)
    seeds: tuple[int | None, ...] = entries.entry(
        entries.list_of(entries.optional(entries.integer())), write=list, default=()
    )
    inner: Inner | None = entries.entry(entries.dict_of(Inner), write=entries.to_state, default=None)  # noqa: RUF009
    kept = 3  # not an entry


WHOLE = Outer(4, "x", (1, None), Inner(True, {"at": [1]}))


@pytest.mark.parametrize("outer", [WHOLE, Outer(0, "")])
def test_what_is_written_is_read_again_also_through_json(outer):
    assert entries.from_state(Outer, json.loads(json.dumps(entries.to_state(outer))), ADVICE) == outer


def test_an_entry_has_its_name_and_only_with_a_default_may_be_left_out_and_those_with_a_text_are_compared():
    assert entries.to_state(Outer(4, "x")) == {"samples": 4, "kind": "x"}
    assert entries.to_state(WHOLE)["inner"] == {"over": True, "own": {"at": [1]}}
    assert entries.to_state(Inner(False)) == {"over": False}
    assert entries.to_state(Inner(True, np.arange(3)))["own"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="the state has no 'samples': give a state"):
        entries.from_state(Outer, {"kind": "x"}, ADVICE)
    assert entries.differences(WHOLE, Outer(5, "y"), done="it") == {"done": "it was 4, and is 5"}
    assert entries.differences(WHOLE, WHOLE, done="it") == {}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": -1}, "'samples' must be at least 0, got -1"),
        ({"kind": 3}, "'kind' is 3; it must be a string"),
        ({"seeds": 3}, "'seeds' is 3; it must be a list"),
        ({"seeds": ["a"]}, "'seeds' must be an integer, got 'a' of type str"),
        ({"inner": []}, "'inner' is []; it must be a dict"),
        ({"inner": {}}, "'inner' has no 'over'"),
        ({"inner": {"over": 1}}, "'inner' is wrong: its 'over' is 1; it must be true or false"),
    ],
)
def test_an_error_names_the_entry_and_ends_with_the_advice(change, said):
    with pytest.raises(ValueError) as raised:
        entries.from_state(Outer, {**entries.to_state(WHOLE), **change}, ADVICE)
    assert str(raised.value).startswith(f"the state's {said}: give a state")
    assert str(raised.value).endswith(": give a state")


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (None, TypeError, "the state is None, a NoneType; it must be a dict: give a state"),
        ({"model": 1}, ValueError, r"no 'version', its keys are \['model'\]: give a state"),
        ({"version": 0}, ValueError, "'version' must be at least 1"),
        ({"version": 9, "epoch": 3}, ValueError, r"update sharded_loader, or begin with set_epoch\(3\)"),
    ],
)
def test_a_state_has_a_version_that_can_be_read(state, error, said):
    entries.check_version({"version": 1}, ADVICE)
    with pytest.raises(error, match=said):
        entries.check_version(state, ADVICE)
