"""The benchmark of other libraries over a slow server: what it compares, and what its rows say."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest
from fsspec.asyn import get_loop

from benchmarks.range_server import CHANGED, CUT, NO_PARTS, REFUSED, serving
from benchmarks.remote_beside import Check, one, row
from benchmarks.remote_loaders import OURS, Noise, write

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
                one(OURS, url, tmp_path, 1)
        else:
            assert one(OURS, url, tmp_path, 1)["same"] == "right"
