"""Random orders on random ranks that leave, join and resume: `tests.fuzz.ranks`, some cases of it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.fuzz.ranks import Ranks, Track
from tests.fuzz.run import Difference, run_case


def test_each_rank_has_exactly_its_samples() -> None:
    counts = sum((run_case(seed, "ranks") for seed in range(8)), Counter[str]())
    assert min(counts[f"event: {event}"] for event in ("step", "resume", "rescale", "rest", "set_weights")) > 0


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 7, 8])
@pytest.mark.costly
def test_a_rank_that_has_another_sample_is_a_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(track: Track, place: int) -> Any:
        return [-1] if track.job.in_batches else -1

    case = Ranks(seed)
    monkeypatch.setattr(Track, "item", other)
    with pytest.raises(Difference, match="not"):
        case.rest()
    case.close()


@pytest.mark.slow
def test_a_sample_that_is_not_read_is_a_difference() -> None:
    case = next(run for run in map(Ranks, range(1000)) if closed_unless(run, run.track.job.whole))
    whole = case.track.job.whole
    assert whole is not None
    whole["never read"] = 1
    with pytest.raises(Difference, match="'never read': 1}.* were not read"):
        case.rest()
    case.close()


def closed_unless(case: Ranks, wanted: Any) -> bool:
    if not wanted or case.track.job.discards:
        case.close()
        return False
    return True
