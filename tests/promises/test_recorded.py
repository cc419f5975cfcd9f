"""Recordings of random loaders are equal for equal loaders, and show what differs in others."""

from __future__ import annotations

from typing import Any

import pytest

from sharded_loader import ShardedDataLoader
from tests.fuzz.recorded import compare, line


def lines(kind: str, seeds: range) -> list[dict[str, Any]]:
    return [line(kind, seed, processes=False) for seed in seeds]


@pytest.mark.parametrize("kind", ["plain", "twins"])
@pytest.mark.slow
def test_two_recordings_are_equal_and_another_seed_differs(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = lines(kind, range(2))
    assert any(len(line["events"]) > 5 for line in first)
    assert compare(first, lines(kind, range(2))) == 0
    assert capsys.readouterr().out == "2 seeds compared, 0 differ\n"
    assert compare(first, lines(kind, range(1, 3))) == 2


@pytest.mark.slow
def test_a_state_that_differs_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first, state_dict = lines("plain", range(2)), ShardedDataLoader.state_dict
    monkeypatch.setattr(ShardedDataLoader, "state_dict", lambda self: {**state_dict(self), "new": 1})
    assert compare(first, lines("plain", range(2)))
    assert " state/1/new\n        was missing\n        now 1\n" in capsys.readouterr().out
