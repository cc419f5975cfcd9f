"""Where the time of a training loop goes, and what a batch looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sharded_loader.stats import LoaderStats, Meter, describe


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Fields:
    x: Any


def test_a_meter_adds_up_what_it_is_told() -> None:
    meter = Meter()
    meter.handed([1], 4, reading=0.5, placing=0.125, waiting=0.25, working=1.0)
    meter.handed([1], 2, reading=0.5, placing=0.125, waiting=0.25, working=1.0)
    meter.waited(0.5, working=0.5)
    assert meter.report() == LoaderStats(
        2, 6, seconds=3.5, waiting_seconds=1.0, reading_seconds=1.0, placing_seconds=0.25
    )


def test_rates_and_shares_are_of_the_time_in_epochs() -> None:
    stats = LoaderStats(batches=10, samples=640, seconds=2.0, waiting_seconds=0.5)
    assert (stats.samples_per_second, stats.waiting_share) == (320.0, 0.25)
    assert (LoaderStats().samples_per_second, LoaderStats().waiting_share) == (0.0, 0.0)


def test_a_meter_keeps_the_last_samples_that_were_skipped_and_counts_all() -> None:
    meter = Meter()
    for index in range(Meter.KEPT + 5):
        meter.skip([(index, KeyError(index))])
    assert meter.num_skipped == Meter.KEPT + 5
    assert [index for index, _ in meter.skipped] == list(range(5, Meter.KEPT + 5))


def test_a_meter_remembers_what_the_first_batch_looked_like() -> None:
    meter = Meter()
    for batch in (np.zeros((2, 3)), np.zeros(5)):
        meter.handed(batch, 1, 0.0, 0.0, 0.0, 0.0)
    assert meter.looks == "float64[2, 3]"


def test_a_batch_that_does_not_want_to_be_looked_at_is_told_by_its_class() -> None:
    class Shy(tuple):
        def __iter__(self) -> Any:
            raise RuntimeError

    meter = Meter()
    meter.handed(Shy((1,)), 1, 0.0, 0.0, 0.0, 0.0)
    assert meter.looks == "Shy"


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(2, 3), "float32[2, 3]"),
        (torch.zeros(2, device="meta"), "float32[2] on meta"),
        ([torch.zeros(2), torch.zeros(2)], "[float32[2], float32[2]]"),
        ((np.zeros(1, "i8"),), "(int64[1])"),
        ({"x": np.zeros(1, bool), "n": ["a", "b"]}, "{'x': bool[1], 'n': [2 x str]}"),
        (Pair(np.zeros(1), [1, 2]), "Pair(x=float64[1], y=[2 x int])"),
        (Fields(np.zeros(1)), "Fields(x=float64[1])"),
        (3, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_batch_is_described_in_one_line(batch: Any, text: str) -> None:
    assert describe(batch) == text
