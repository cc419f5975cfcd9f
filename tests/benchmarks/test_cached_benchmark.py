"""The benchmark of caches: every loader has to give the same samples, and the table says what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cached
from benchmarks.cached_jobs import Job, load, make
from benchmarks.cached_loaders import LIMIT, OURS, PART, TURBO, UNCACHED


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
