"""Where the time of a training loop goes, and what a batch looks like."""

from __future__ import annotations

import dataclasses
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


def test_a_meter_reports_what_was_added_to_it() -> None:
    meter = Meter()
    names = [field.name for field in dataclasses.fields(LoaderStats)]
    for number, name in enumerate(names):
        setattr(meter, name, getattr(meter, name) + number)
    assert meter.report() == LoaderStats(*range(len(names)))


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
    meter.look(np.zeros((2, 3)))
    assert meter.looks == "float64[2, 3]"


def test_a_batch_that_does_not_want_to_be_looked_at_is_told_by_its_class() -> None:
    class Shy(tuple):
        def __iter__(self) -> Any:
            raise RuntimeError

    meter = Meter()
    meter.look(Shy((1,)))
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
