"""A state that a version has saved is loaded by all later ones; docs/versions.md says how long."""

import json
from typing import Any

import kept_states
import pytest

from sharded_loader import PackStream, ShuffleBuffer, interleave

VERSIONS: dict[str, dict[str, Any]] = json.loads(kept_states.FILE.read_text(encoding="utf-8"))
EVER_SAVED = [(version, kind) for version, states in VERSIONS.items() for kind in states]
NEWEST = {kind: one for states in VERSIONS.values() for kind, one in states.items()}

PARTS = {
    "mixture": lambda: interleave([lambda: iter("ab"), lambda: iter("cd")]),
    "shuffle buffer": lambda: iter(ShuffleBuffer([1, 2, 3], 2)),
    "packed stream": lambda: iter(PackStream([[1], [2]], 4)),
}


@pytest.mark.parametrize(("version", "kind"), EVER_SAVED)
def test_a_state_goes_on_with_the_batches_that_its_version_would_have_read(version: str, kind: str) -> None:
    kept, loader = VERSIONS[version][kind], kept_states.KINDS[kind]()
    loader.load_state_dict(kept["state"])
    assert [*kept_states.batches_of(kind, loader)] == kept["then"]


def test_the_states_of_this_version_are_kept() -> None:
    changed = [kind for kind in kept_states.KINDS if kept_states.state_of(kind) != NEWEST.get(kind)]
    assert changed == [], "python -m tests.kept_states adds them; never change those of an earlier version"


def number_in(state: dict[str, Any]) -> str:
    return "_version" if "_num_yielded" in state else "version"


@pytest.mark.parametrize("kind", NEWEST)
def test_a_state_has_the_number_of_its_format_and_that_of_a_newer_one_is_an_error(kind: str) -> None:
    state, loader = NEWEST[kind]["state"], kept_states.KINDS[kind]()
    assert state[number_in(state)] == 1
    with pytest.raises(
        ValueError, match=r"the state is of version 2, this sharded_loader reads up to version 1: update"
    ):
        loader.load_state_dict({**state, number_in(state): 2})


@pytest.mark.parametrize("kind", PARTS)
def test_so_have_the_states_of_datasets_which_other_loaders_save(kind: str) -> None:
    dataset = PARTS[kind]()
    state = dataset.state_dict()
    assert state["version"] == 1
    dataset.load_state_dict({name: value for name, value in state.items() if name != "version"})  # as 0.1.0 saved it
    with pytest.raises(
        ValueError, match=r"the state is of version 2, .*: update sharded_loader, or begin with set_epoch"
    ):
        dataset.load_state_dict({**state, "version": 2})
