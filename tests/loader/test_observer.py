"""A loader needs nobody who measures: with the observer of the core alone, it reads as it always does."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import covering, made
from samples import Drawing

from sharded_loader import TooManySkippedError
from sharded_loader.base import imports


def outcomes(**options: Any) -> list[Any]:
    """Batches, errors and states of two epochs, and what is told of skipped samples."""
    seen: list[Any] = []
    with made(Drawing(12, bad=[5]), 4, shuffle=True, seed=1, **options) as loader:
        for _ in range(2):
            batches = iter(loader)
            while True:
                try:
                    seen.append(next(batches).tolist())
                except StopIteration:
                    break
                except (ValueError, TooManySkippedError) as error:
                    seen.append(str(error))
                seen.append(loader.state_dict())
        seen += loader.num_skipped, [index for index, _ in loader.skipped]
        assert repr(loader).startswith("ShardedDataLoader(12 samples, 3 batches of 4")
    return seen


@covering(pool=[None, "thread", "process"], on_error=["raise", "skip"], max_skipped=[None, 0])
def test_batches_errors_and_states_are_the_same_without_measuring(
    monkeypatch: pytest.MonkeyPatch, pool: str | None, on_error: str, max_skipped: int | None
) -> None:
    options = {"pool": pool, "num_workers": 2 if pool else 0, "on_error": on_error}
    options["max_skipped"] = max_skipped if on_error == "skip" else None
    expected = outcomes(**options)
    monkeypatch.setitem(imports._providers, ("observer", "instruments"), "sharded_loader.engine.pipeline:Observer")
    assert outcomes(**options) == expected
