"""One short line for every object, whatever is in it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sharded_loader import InlinePool, ProcessPool, RandomSampler, SimpleDataset, ThreadPool
from sharded_loader.base.described import brief, call_of


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "None"),
        (np.float64(2.5), "2.5"),
        (np.array(3), "<numpy.ndarray>"),
        ("a" * 1000, f"'{'a' * 27}...{'a' * 28}'"),
        ([1, "a", (2, 3)], "[1, 'a', [2, 3]]"),
        (range(10**12), "[0, 1, 2, ... 1000000000000 in all]"),
        (np.zeros((9, 2)), "[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], ... 9 in all]"),
        ({1: 2}, "<dict of length 1>"),
        (torch.zeros(3), "<torch.Tensor of length 3>"),
        (RandomSampler(3, seed=1), "RandomSampler(length=3, seed=1)"),
        (SimpleDataset("abc"), "SimpleDataset(3 samples of str)"),
        (object(), "<object>"),
        (print, "<print>"),
        (RandomSampler, "<RandomSampler>"),
    ],
    ids=range(14),
)
def test_a_value_is_told_in_a_few_words(value: Any, text: str) -> None:
    assert brief(value) == text


def test_a_call_shows_the_options_that_are_not_the_usual_ones() -> None:
    assert call_of([], [1, "x"], usual=(3, 3), other=(4, 3), nothing=(None, None)) == "list(1, 'x', other=4)"


@pytest.mark.parametrize(
    ("pool", "text"),
    [
        (InlinePool(), "InlinePool()"),
        (ThreadPool(2, timeout=5), "ThreadPool(2, timeout=5.0)"),
        (ProcessPool(2, start_method="spawn", restarts=0), "ProcessPool(2, start_method='spawn', restarts=0)"),
        (
            ProcessPool(3, start_method="spawn", timeout=5, max_bytes=1 << 20, worker_init_fn=print),
            "ProcessPool(3, start_method='spawn', worker_init_fn=<print>, timeout=5.0, max_bytes=1048576)",
        ),
    ],
    ids=str,
)
def test_a_pool_shows_what_it_was_made_with(pool: Any, text: str) -> None:
    assert repr(pool) == text
