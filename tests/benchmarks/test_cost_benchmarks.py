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


@pytest.mark.costly(3)
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kind", order.PLANNED)
def test_planning_is_timed_on_the_last_of_many_ranks(kind: str) -> None:
    each, first, most = order.planning(order.PLANNED[kind], 4096)
    assert each > 0 and first > 0
    assert most < 20e6  # bytes, for 10**12 samples


def test_cpu_time_is_that_of_this_process_without_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "WARM", 0.05)
    monkeypatch.setattr(cpu, "SPAN", 0.2)
    busy = cpu.measure("tiny-inline")
    assert busy.workers == 0 and busy.main > 0 and busy.clock > 0


def test_two_loaders_are_read_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "WARM", 0.02)
    monkeypatch.setattr(turns, "SPAN", 0.05)
    ratios = turns.compare("tiny-inline", "ours", "torch", turns=3)
    assert len(ratios) == 3 and ratios[0] > 0 and ratios == sorted(ratios)
