"""The entries of a saved position: to_state, read again, checked and compared, each by what its field says."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from sharded_loader.base.entries import (
    anything,
    check_version,
    dict_of,
    differences,
    entry,
    from_state,
    integer,
    list_of,
    optional,
    string,
    to_state,
    true_or_false,
)

ADVICE = "give a state"


@dataclass(frozen=True)
class Inner:
    over: bool = entry(true_or_false)
    own: Any = entry(anything, default=None)  # noqa: RUF009


@dataclass(frozen=True)
class Outer:
    done: int = entry(integer(0), "{done} was {was}, and is {now}", name="samples")
    kind: str = entry(string)
    seeds: tuple[int | None, ...] = entry(list_of(optional(integer())), write=list, default=())
    inner: Inner | None = entry(dict_of(Inner), write=to_state, default=None)  # noqa: RUF009
    kept = 3  # not an entry


WHOLE = Outer(4, "x", (1, None), Inner(True, {"at": [1]}))


@pytest.mark.parametrize("outer", [WHOLE, Outer(0, "")])
def test_what_is_written_is_read_again_also_through_json(outer: Outer) -> None:
    assert from_state(Outer, json.loads(json.dumps(to_state(outer))), ADVICE) == outer


def test_an_entry_has_its_name_and_is_left_out_where_it_has_its_default() -> None:
    assert to_state(Outer(4, "x")) == {"samples": 4, "kind": "x"}
    assert to_state(WHOLE)["inner"] == {"over": True, "own": {"at": [1]}}
    assert to_state(Inner(False)) == {"over": False}


def test_an_array_may_be_an_entry() -> None:
    assert to_state(Inner(True, np.arange(3)))["own"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"samples": -1}, "the state's 'samples' must be at least 0, got -1: give a state"),
        ({"kind": 3}, "the state's 'kind' is 3; it must be a string: give a state"),
        ({"seeds": 3}, "the state's 'seeds' is 3; it must be a list: give a state"),
        ({"seeds": ["a"]}, "the state's 'seeds' must be an integer, got 'a' of type str: give a state"),
        ({"inner": []}, "the state's 'inner' is []; it must be a dict: give a state"),
        ({"inner": {}}, "the state's 'inner' has no 'over': give a state"),
        (
            {"inner": {"over": 1}},
            "the state's 'inner' is wrong: its 'over' is 1; it must be true or false: give a state",
        ),
    ],
)
def test_an_error_names_the_entry_and_ends_with_the_advice(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        from_state(Outer, {**to_state(WHOLE), **change}, ADVICE)
    assert str(raised.value).startswith(said) and str(raised.value).endswith(": give a state")


def test_an_entry_without_a_default_must_be_there() -> None:
    with pytest.raises(ValueError, match="the state has no 'samples': give a state"):
        from_state(Outer, {"kind": "x"}, ADVICE)


def test_entries_with_a_text_are_compared() -> None:
    assert differences(WHOLE, Outer(5, "y"), done="it") == {"done": "it was 4, and is 5"}
    assert differences(WHOLE, WHOLE, done="it") == {}


@pytest.mark.parametrize(
    ("state", "error", "said"),
    [
        (None, TypeError, "the state is None, a NoneType; it must be a dict: give a state"),
        ({"model": 1}, ValueError, r"no 'version', its keys are \['model'\]: give a state"),
        ({"version": 0}, ValueError, "'version' must be at least 1"),
        ({"version": 9, "epoch": 3}, ValueError, r"update sharded_loader, or begin with set_epoch\(3\)"),
    ],
)
def test_a_state_has_a_version_that_can_be_read(state: Any, error: type[Exception], said: str) -> None:
    check_version({"version": 1}, ADVICE)
    with pytest.raises(error, match=said):
        check_version(state, ADVICE)
