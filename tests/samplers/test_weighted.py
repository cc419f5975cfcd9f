"""Draws by weight: as often as the weights say, of samples and of groups of samples, from any place of the epoch."""

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import WeightedRandomSampler
from sharded_loader.randomness.shuffle import Bijection
from sharded_loader.sampling.tables import BLOCK, StridedTable


def test_weighted_draws_follow_the_weights() -> None:
    count = 3 * BLOCK + 17
    drawn = Counter(WeightedRandomSampler([0, 1, 0, 3, 6, 0], count, seed=5))
    assert set(drawn) == {1, 3, 4}
    for index, share in ((1, 0.1), (3, 0.3), (4, 0.6)):
        assert drawn[index] / count == pytest.approx(share, abs=0.01)


def test_weighted_draws_without_replacement_follow_the_weights() -> None:
    first = Counter()
    for epoch in range(2000):
        drawn = list(WeightedRandomSampler([1, 0, 3], 2, replacement=False, seed=5).iter_epoch(epoch))
        assert sorted(drawn) == [0, 2]
        first[drawn[0]] += 1
    assert first[2] / 2000 == pytest.approx(0.75, abs=0.05)


EXTREME = [1.5e308, 5e-324, 0, 0.5e308, 1e-310, 0]


@pytest.mark.parametrize("replacement", [True, False])
def test_an_index_of_weight_0_is_never_drawn_however_small_or_large_the_others_are(replacement: bool) -> None:
    extreme = [EXTREME, [0, 5e-324, 0, 1e-323], [1e-310, 0, 2e-308, 0], [0, 1.7e308, 1.7e308]]
    for weights in extreme:
        positive = np.flatnonzero(weights)
        for seed in range(30):
            drawn = list(WeightedRandomSampler(weights, len(positive), replacement, seed=seed))
            assert set(drawn) <= set(positive.tolist())
            if not replacement:
                assert sorted(drawn) == positive.tolist()


@pytest.mark.parametrize("replacement", [True, False])
def test_extreme_weights_are_weights_as_any_others(replacement: bool) -> None:
    for scale in (1e-310, 1e-300, 1.0, 1e307) if replacement else (1e-300, 1.0, 3e289):
        weights = [3 * scale, 0, scale]
        if replacement:
            first = list(WeightedRandomSampler(weights, 800, seed=1))
        else:
            first = [next(iter(WeightedRandomSampler(weights, 1, False, seed=seed))) for seed in range(800)]
        assert set(first) == {0, 2} and 520 < first.count(0) < 680  # 600 of 800; 6 sigma are 74
    # What is lighter by 580 orders of magnitude comes last.
    for seed in range(30):
        drawn = list(WeightedRandomSampler([1e290, 1e-300, 0, 3e289, 1e-280, 0], 4, False, seed=seed))
        assert drawn[2:] == [4, 1]
        assert set(WeightedRandomSampler(EXTREME, 50, seed=seed)) == {0, 3}


@given(st.lists(st.floats(0, 1.7e308), min_size=1, max_size=30), st.integers(0, 99))
def test_any_weights_at_all_are_drawn_by(weights: list[float], seed: int) -> None:
    positive = {index for index, weight in enumerate(weights) if weight}
    if not positive:
        return
    assert set(WeightedRandomSampler(weights, len(positive), False, seed=seed)) == positive
    assert set(WeightedRandomSampler(weights, 50, seed=seed)) <= positive


@pytest.mark.parametrize("options", [{}, {"replacement": False}])
def test_ranks_together_read_the_draws_of_one_rank(options: dict[str, Any]) -> None:
    sampler = WeightedRandomSampler([1, 2, 3], 3 if "replacement" in options else 1000, seed=5, **options)
    whole = list(sampler.iter_epoch(2))
    for ranks in (1, 3, 7):
        parts = [list(StridedTable(sampler.epoch_table(2), ranks, rank).items()) for rank in range(ranks)]
        assert [index for step in zip(*parts, strict=True) for index in step][: len(whole)] == whole


def test_draws_are_the_same_from_any_block_on_and_in_every_release() -> None:
    sampler = WeightedRandomSampler([1, 2, 3], 2 * BLOCK + 9, seed=5)
    whole = list(sampler.iter_epoch(0))
    for start in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 8):
        assert list(sampler.iter_epoch(0, start)) == whole[start:]
    assert list(WeightedRandomSampler([1, 2, 3], 8, seed=7)) == [0, 1, 1, 2, 1, 2, 1, 1]  # runs are resumed


def test_a_rank_computes_its_own_draws_only(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    draw = Bijection.__call__
    monkeypatch.setattr(
        Bijection, "__call__", lambda self, positions: asked.append(len(positions)) or draw(self, positions)
    )
    table = StridedTable(WeightedRandomSampler([1, 2, 3], 10**12, seed=5).epoch_table(0), 4096, 4095)
    assert len(table.at(np.arange(10**6, 10**6 + 256))) == 256
    assert asked == [256]


def test_draws_of_ranks_and_epochs_do_not_resemble_each_other() -> None:
    sampler = WeightedRandomSampler(np.ones(64), 10**9, seed=5)
    by_epoch = [
        np.array(StridedTable(sampler.epoch_table(epoch), 4096, rank).at(np.arange(20_000)))
        for epoch, rank in ((0, 0), (0, 1), (1, 0))
    ]
    for one, other in itertools.combinations(by_epoch, 2):
        pairs = np.bincount(one * 64 + other, minlength=64 * 64)
        expected = len(one) / 64**2
        assert abs(((pairs - expected) ** 2).sum() / expected / (64**2 - 1) - 1) < 0.15
