"""Random orders on random ranks that leave, join and resume: `tests.fuzz_ranks`, some cases of it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fuzz_ranks import Difference, Run, Track, run_cases


def test_each_rank_has_exactly_its_samples() -> None:
    counts, wrong = run_cases(range(8))
    assert wrong == 0
    assert min(counts[event] for event in ("step", "resume", "rescale", "rest", "set_weights")) > 0


@pytest.mark.parametrize("seed", [0, 1, 2, 4, 5, 6, 7, 8])
@pytest.mark.costly
def test_a_rank_that_has_another_sample_is_a_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(track: Track, place: int) -> Any:
        return [-1] if track.job.in_batches else -1

    case = Run(seed)
    monkeypatch.setattr(Track, "item", other)
    with pytest.raises(Difference, match="not"):
        case.rest()
    case.close()


@pytest.mark.slow
def test_a_sample_that_is_not_read_is_a_difference() -> None:
    case = next(run for run in map(Run, range(1000)) if closed_unless(run, run.tracks[0].job.whole and not run.stop))
    whole = case.tracks[0].job.whole
    assert whole is not None
    whole["never read"] = 1
    with pytest.raises(Difference, match="'never read': 1}.* were not read"):
        case.rest()
    case.close()


def closed_unless(case: Run, wanted: Any) -> bool:
    if not wanted or case.tracks[0].job.discards:
        case.close()
        return False
    return True
