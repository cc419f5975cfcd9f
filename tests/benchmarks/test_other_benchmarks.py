"""The smaller benchmarks, of caches, of a slow server, of orders and of processor time, measure what they say."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.asyn import get_loop

from benchmarks import cached, cpu, order, turns
from benchmarks.cached_jobs import Job, load, make
from benchmarks.cached_loaders import LIMIT, OURS, PART, TURBO, UNCACHED
from benchmarks.range_server import CHANGED, CUT, NO_PARTS, REFUSED, serving
from benchmarks.remote_beside import Check, row
from benchmarks.remote_beside import one as one_remote
from benchmarks.remote_loaders import OURS as REMOTE
from benchmarks.remote_loaders import Noise, write
from sharded_loader import SequentialSampler, ShardShuffleSampler


@pytest.mark.costly(2)
@pytest.mark.parametrize("name", [UNCACHED, OURS, "cache, file", PART, LIMIT])
def test_our_ways_give_the_same_samples(name: str, tmp_path: Path) -> None:
    make("rows", tmp_path, 64)
    found = cached.one(name, tmp_path, 0)
    assert found["same"] == "same" and len(found["rates"]) == 3


def test_other_samples_and_missing_ones_are_told(tmp_path: Path) -> None:
    make("rows", tmp_path, 4)
    job: Any = load(tmp_path)
    whole = np.stack([job[index][0] for index in range(4)])
    assert cached.verdict(job, [(whole, np.arange(4))], True) == "same"
    assert cached.verdict(job, [(whole[:3], np.arange(3))], True).startswith("3 SAMPLES")
    assert cached.verdict(job, [(whole, np.array([0, 1, 3, 2]))], True) == "OTHER SAMPLES"


def test_the_table_says_who_is_missing_and_whether_the_bars_are_met(tmp_path: Path) -> None:
    job = Job("500 x 375", ["a"] * 4, [0] * 4, [2], "|u1", 8, str(tmp_path))
    job.tar.touch()
    found: cached.Found = {
        UNCACHED: [{"rates": [100.0, 100.0, 100.0], "same": "same"}] * 2,
        OURS: [{"rates": [98.0, 5000.0, 5000.0], "same": "same"}, {"rates": [90.0, 7000.0, 5000.0], "same": "same"}],
        TURBO: [{"why": "not installed: turboloader"}],
    }
    text = cached.table(job, found)
    assert "| cache, memory | 94 | 6,000 | 5,000 | 1.00 | same |" in text
    assert "| TurboLoader | | | | | not installed: turboloader |" in text
    assert "- epoch 1 with a cache / without: 0.94 (bar 0.97: not met)" in text


get_loop()  # this thread and this memory live as long as the process: no test has left them behind
multiprocessing.get_context("spawn").Array("q", 2)


def test_samples_that_are_missing_twice_or_other_ones_are_told() -> None:
    samples = np.arange(32, dtype=np.uint64).reshape(4, 8)
    for batch, verdict in (
        ((samples, np.arange(4)), "right"),
        ({"x": samples, "index": np.arange(4)}, "right"),
        ((samples, np.array([0, 1, 1, 3])), "1 SAMPLES MISSING, 1 TWICE"),
        ((samples, np.array([0, 1, 3, 2])), "other samples"),
    ):
        check = Check(samples.sum(1))
        check.see(batch)
        assert check.verdict == verdict


def test_a_row_has_the_medians_and_says_what_went_wrong() -> None:
    runs = [
        {"open": second, "first": second, "epoch 1": 1000 * second, "bytes": [1.0, second], "same": "right"}
        for second in (1, 2, 6)
    ]
    runs.append({"why": "error", "says": "it broke"})
    assert row("it", runs) == "| it | 2.00 | 2.00 | 2,000 |  | 1.00 / 2.00 |  |  |  | error it broke, right |"
    assert row("it", [{"why": "not installed: it"}]).endswith("|  | not installed: it |")


@pytest.mark.slow  # a server in a process of its own, and two workers
@pytest.mark.parametrize("fault", ["", REFUSED, CUT, NO_PARTS, CHANGED])
def test_ours_is_right_or_an_error_whatever_the_server_does(fault: str, tmp_path: Path) -> None:
    for folder, version in ((tmp_path, 0), (tmp_path / "changed", 1)):
        write(folder, Noise(512, 64, version), 128)
        (folder / "sizes").write_text("[4, 128, 64]")
    (tmp_path / "changed" / "data" / "tar" / "shards.index").unlink()
    with serving(tmp_path, None, fault) as (url, _):
        if fault == CHANGED:
            with pytest.raises(OSError, match="has changed since"):
                one_remote(REMOTE, url, tmp_path, 1)
        else:
            assert one_remote(REMOTE, url, tmp_path, 1)["same"] == "right"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight shards of 32 samples, batches of 8."""
    for name, value in (("SHARDS", 8), ("LENGTH", 32), ("BATCH", 8), ("BATCHES", 3)):
        monkeypatch.setattr(order, name, value)


@pytest.mark.usefixtures("small")
def test_orders_are_told_by_shards_at_hand_and_downloads_and_a_buffer_yields_each_sample_once() -> None:
    assert order.shards_at_hand(np.arange(256)) == (1, 1.0)
    assert order.shards_at_hand(np.arange(256).reshape(8, 32).T.ravel()) == (8, 8.0)
    assert order.shards_at_hand(order.whole(ShardShuffleSampler([32] * 8, window=2, seed=1)))[0] == 2
    assert order.downloads(SequentialSampler(256), 4) == 4.0
    assert order.downloads(ShardShuffleSampler([32] * 8, window=2, lanes=4, seed=1), 4) == 1.0
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
    for planned in order.PLANNED.values():  # on the last of many ranks
        each, first, most = order.planning(planned, 4096)
        assert each > 0 and first > 0 and most < 20e6  # bytes, for 10**12 samples
