"""States of iterable data: flat, JSON-serializable, and rejected where they do not fit."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from sharded_loader.base.entries import VERSION
from sharded_loader.engine.messages import PartPoint
from sharded_loader.engine.order import Position
from sharded_loader.streams.state import StreamSignature, differences, dump, parse

SIGNATURE = StreamSignature(7, "Lines", 3, 8, "keep", None, 1, 0)
POSITION = Position(
    2,
    5,
    None,
    {0: 3, 1: 1, 2: 1},
    {0: PartPoint(3, 2, 24, 99), 1: PartPoint(1, 2, 5, 7, ended=True), 2: PartPoint(1, 2, 8, 3)},
)


def test_a_position_comes_back_also_through_json() -> None:
    state = dump(POSITION, SIGNATURE)
    for one in (state, json.loads(json.dumps(state)), [state], (state,)):
        assert parse(one, (1, 0)) == (POSITION, SIGNATURE)
    assert all(not isinstance(value, dict) or name == "parts" for name, value in state.items())
    assert state["version"] == VERSION and (state["epoch"], state["batches"]) == (2, 5)


def test_a_beginning_has_no_parts() -> None:
    state = dump(Position(4), SIGNATURE)
    assert state["parts"]["number"] == [] and "state" not in state["parts"]
    assert parse(state, (1, 0)) == (Position(4), SIGNATURE)


def test_states_of_the_dataset_are_in_it_as_copies() -> None:
    own = {"at": [1]}
    points = {**POSITION.points, 1: PartPoint(1, 2, 5, state=(own, None))}
    state = dump(replace(POSITION, points=points), SIGNATURE)
    own["at"].append(2)
    found, _ = parse(state, (1, 0))
    assert found.points[1].state == ({"at": [1]}, None) and found.points[0].state is None
    found.points[1].state[0]["at"].append(3)
    assert parse(state, (1, 0))[0].points[1].state == ({"at": [1]}, None)


@pytest.mark.parametrize(
    ("name", "now", "text"),
    [
        ("dataset", "Rows", "the dataset was a Lines, and is a Rows"),
        ("streams", 4, "there were 3 parts (streams), and are 4"),
        ("batch_size", 9, "batch_size was 8, and is 9"),
        ("last_batch", "discard", "last_batch was 'keep', and is 'discard'"),
        ("steps_per_epoch", 5, "steps_per_epoch was None, and is 5"),
    ],
)
def test_differences_are_told(name: str, now: Any, text: str) -> None:
    found = differences(SIGNATURE, replace(SIGNATURE, **{name: now}), POSITION)
    if name == "batch_size":
        assert found[0].startswith(f"{text} (within an epoch it must stay 8, because all samples of a batch come from")
    else:
        assert found == [text]
    loose = differences(SIGNATURE, replace(SIGNATURE, **{name: now}), Position(2), strict=False)
    assert loose == ([] if name == "batch_size" else [text])


def test_the_seed_is_taken_over_and_no_difference() -> None:
    assert differences(SIGNATURE, replace(SIGNATURE, seed=8), POSITION) == []


def test_parts_that_a_state_does_not_know_are_told_and_ranks_without_parts() -> None:
    own = replace(SIGNATURE, num_replicas=2, rank=1)
    of_rank = replace(SIGNATURE, num_replicas=2, rank=0)
    position = replace(POSITION, counts={0: 3, 2: 1})
    (text,) = differences(of_rank, own, position)
    assert "state of rank 0 of 2, which knows nothing of part 1" in text and "load all of them" in text
    assert differences(of_rank, replace(own, rank=0), position) == []
    (text,) = differences(SIGNATURE, replace(SIGNATURE, num_replicas=4, rank=0), Position(0))
    assert text == "there were 3 parts (streams), and are 4 ranks: each needs a part"


def test_the_states_of_all_ranks_are_one_position() -> None:
    states = []
    for rank in range(2):
        mine = range(rank, 3, 2)
        counts, points = ({part: table[part] for part in mine} for table in (POSITION.counts, POSITION.points))
        position = Position(2, sum(counts.values()), None, counts, points)
        states.append(dump(position, replace(SIGNATURE, num_replicas=2, rank=rank)))
    for replicas, batches in (((1, 0), 5), ((3, 0), 3), ((3, 1), 1), ((2, 0), 4)):
        found, _ = parse(states, replicas)
        assert (found.counts, found.points, found.done) == (POSITION.counts, POSITION.points, batches)
    assert parse(states[0], (2, 0))[0].done == 4


def test_states_that_do_not_belong_together_are_rejected() -> None:
    state, rows = dump(POSITION, SIGNATURE), dump(POSITION, replace(SIGNATURE, dataset="Rows"))
    with pytest.raises(ValueError, match="those of different runs"):
        parse([state, rows], (1, 0))
    with pytest.raises(ValueError, match=r"different epochs \(2, 3\)"):
        parse([state, dump(replace(POSITION, epoch=3), SIGNATURE)], (1, 0))
    steps = replace(SIGNATURE, steps_per_epoch=9)
    with pytest.raises(ValueError, match=r"different steps \(5, 6\)"):
        parse([dump(POSITION, steps), dump(replace(POSITION, done=6), steps)], (1, 0))


def test_what_is_no_state_is_rejected() -> None:
    state = dump(POSITION, SIGNATURE)
    for wrong in (None, 3, "x", [3], []):
        with pytest.raises((TypeError, ValueError)):
            parse(wrong, (1, 0))
    for name in state:
        with pytest.raises(ValueError):
            parse({key: value for key, value in state.items() if key != name}, (1, 0))
    parts = state["parts"]
    damaged: list[dict[str, Any]] = [
        {"parts": {**parts, "given": [1]}},
        {"parts": {**parts, "samples": [*parts["samples"], 3]}},
        {"parts": {**parts, "number": [0, 1, "2"]}},
        {"parts": {**parts, "ended": [False, 1, False]}},
        {"parts": {**parts, "number": [0, 1, -2]}},
        {"parts": {key: value for key, value in parts.items() if key != "samples"}},
        {"parts": None},
        {"epoch": -1},
        {"epoch": 1.5},
        {"batches": "5"},
        {"version": 0},
    ]
    for change in damaged:
        with pytest.raises(ValueError):
            parse({**state, **change}, (1, 0))
    with pytest.raises(ValueError, match="update sharded_loader"):
        parse({**state, "version": VERSION + 1}, (1, 0))
