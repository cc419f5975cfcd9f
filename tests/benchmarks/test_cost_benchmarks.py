"""The programs behind the tables on orders and on CPU time measure what they say."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import cpu, order, turns
from sharded_loader import SequentialSampler, ShardShuffleSampler


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight shards of 32 samples, batches of 8."""
    for name, value in (("SHARDS", 8), ("LENGTH", 32), ("BATCH", 8), ("BATCHES", 3)):
        monkeypatch.setattr(order, name, value)


@pytest.mark.usefixtures("small")
def test_shards_are_at_hand_from_their_first_to_their_last_sample() -> None:
    assert order.shards_at_hand(np.arange(256)) == (1, 1.0)
    assert order.shards_at_hand(np.arange(256).reshape(8, 32).T.ravel()) == (8, 8.0)
    assert order.shards_at_hand(order.whole(ShardShuffleSampler([32] * 8, window=2, seed=1)))[0] == 2


@pytest.mark.usefixtures("small")
def test_downloads_are_counted_for_each_rank() -> None:
    assert order.downloads(SequentialSampler(256), 4) == 4.0
    assert order.downloads(ShardShuffleSampler([32] * 8, window=2, lanes=4, seed=1), 4) == 1.0


@pytest.mark.usefixtures("small")
def test_a_shuffle_buffer_yields_every_sample_once() -> None:
    assert sorted(order.reservoir(20).tolist()) == list(range(256))


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_the_programs_measure_with_few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, warm, span in ((cpu, 0.05, 0.2), (turns, 0.02, 0.05)):
        monkeypatch.setattr(module, "WARM", warm)
        monkeypatch.setattr(module, "SPAN", span)
    busy = cpu.measure("tiny-inline")
    assert busy.main > 0 and busy.clock > 0
    ratios = turns.compare("tiny-inline", "ours", "torch", turns=3)
    assert len(ratios) == 3 and ratios[0] > 0 and ratios == sorted(ratios)
    for make in order.PLANNED.values():  # on the last of many ranks
        each, first, most = order.planning(make, 4096)
        assert each > 0 and first > 0 and most < 20e6  # bytes, for 10**12 samples
