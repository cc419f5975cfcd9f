"""Random orders on random ranks that leave, join and resume: `tests.fuzz_ranks`, some cases of it."""

from __future__ import annotations

import pytest

from tests.fuzz_ranks import Difference, Run, run_cases


def test_each_rank_has_exactly_its_samples() -> None:
    counts, wrong = run_cases(range(40))
    assert wrong == 0
    assert min(counts[event] for event in ("step", "resume", "rescale", "rest")) > 0


@pytest.mark.parametrize("seed", range(8))
def test_a_rank_that_has_another_sample_is_a_difference(seed: int) -> None:
    case = Run(seed)
    case.expected = [[-1] if case.job.in_batches else -1 for _ in case.expected]
    with pytest.raises(Difference, match="not"):
        case.step()
    for loader, _ in case.ranks:
        loader.close()
