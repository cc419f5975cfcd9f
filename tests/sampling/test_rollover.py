"""The endless sequence of epochs, cut into whole batches: arithmetic on numbers."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_tables import KINDS, asked, numbers, quick, streamed

from sharded_loader.sampling.rollover import Endless, Rolling, Stretch
from sharded_loader.sampling.tables import BLOCK, Batched, Dealt, parts


def test_rollover_is_arithmetic_on_the_items_of_all_epochs() -> None:
    # 5 items in twos: epoch 0 owns the batches of items 0 to 3, epoch 1 those of items 4 to 9.
    epochs = [Rolling(5, 2, epoch) for epoch in range(3)]
    assert [(one.total(0), one.length(), one.first) for one in epochs] == [(0, 2, 0), (4, 3, 0), (10, 2, 0)]
    # 10 items on 3 ranks are 4 steps: in threes epoch 0 owns one batch of 9 items, epoch 1 begins at item 9.
    ranks = [Rolling(10, 3, epoch, replicas=3) for epoch in range(2)]
    assert [(one.total(0), one.length()) for one in ranks] == [(0, 1), (9, 1)]
    assert [ranks[1].total(batches) for batches in (0, 1)] == [9, 16]


def test_rollover_goes_on_from_any_item() -> None:
    begun = Rolling(5, 2, epoch=1, total=6)
    assert (begun.first, begun.length(), begun.is_begun, begun.is_behind) == (1, 2, True, False)
    # Another batch size left 7 items: the next whole batch is number 2, and the last batch has one item.
    odd = Rolling(5, 2, epoch=1, total=7)
    assert (odd.first, odd.length(), [odd.total(batches) for batches in range(3)]) == (1, 2, [7, 9, 10])
    behind = Rolling(5, 3, epoch=0, total=4)
    assert (behind.length(), behind.is_behind, behind.total(0)) == (0, True, 4)


def test_an_empty_sampler_rolls_over_to_nothing() -> None:
    assert (Rolling(0, 4, epoch=3).length(), Rolling(0, 4, epoch=3).total(0)) == (0, 0)


def test_the_endless_sequence_too_is_read_in_blocks() -> None:
    endless = Batched(Endless(lambda epoch: numbers(10, block=BLOCK), Stretch(10, 1, 0, 0), 0, 100), 4)
    endless.at(asked(0))
    assert endless.block == BLOCK // 4


def dealt_endlessly(length: int, replicas: int, epochs: int) -> list[list[int]]:
    """What each rank gets of epochs of different numbers."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for epoch in range(epochs):
        for rank, share in enumerate(shares):
            share += Dealt(numbers(length, 100 * epoch), replicas, rank).items()
    return shares


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(
    length=st.integers(1, 13),
    replicas=st.integers(1, 5),
    size=st.integers(1, 30),
    skip=st.integers(0, 40),
)
def test_the_endless_sequence_is_cut_anywhere(kind: str, length: int, replicas: int, size: int, skip: int) -> None:
    for rank, share in enumerate(dealt_endlessly(length, replicas, 90 // parts(length, replicas, False) + 2)):
        stretch = Stretch(length, replicas, 0, 0)
        endless = Endless(lambda epoch: KINDS[kind](length, 100 * epoch), stretch, rank, 80)
        got = list(Batched(endless, size).items(skip // size))
        assert list(itertools.chain(*got)) == share[skip // size * size : 80]
        for step in range(0, 80, 7):
            epoch, first = stretch.where(step)
            assert share[step] // 100 == epoch and first <= step < first + stretch.steps
            assert stretch.steps_before(stretch.total(step)) == step


def test_a_stretch_may_begin_where_another_number_of_ranks_stopped() -> None:
    stretch = Stretch(10, 3, 1, 4)  # 6 items are left in epoch 1: two steps
    assert [stretch.where(step) for step in (0, 1, 2, 5, 6)] == [(1, 0), (1, 0), (2, 2), (2, 2), (3, 6)]
    assert [stretch.total(step) for step in (0, 1, 2, 3, 6)] == [14, 17, 20, 23, 30]
    endless = Endless(lambda epoch: numbers(10, 100 * epoch), stretch, 1, 7)
    assert endless.at(np.arange(7)).tolist() == [105, 108, 201, 204, 207, 200, 301]


@pytest.mark.parametrize(("yields", "found"), [(3, "yielded 3 items in epoch 0"), (7, "more than 5 items in epoch 0")])
def test_an_epoch_of_another_length_is_an_error_with_rollover(yields: int, found: str) -> None:
    endless = Batched(Endless(lambda epoch: streamed(yields), Stretch(5, 1, 0, 0), 0, 20, "Short"), 2)
    with pytest.raises(ValueError, match=f"a Short, .*{found}.*its length is 5.*__len__"):
        list(endless.items())
