"""The arithmetic of positions, on numbers; ranks share one global order, and each reads as much as the others."""

import itertools
import sys
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import BatchSampler, RandomSampler
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.engine.split import plain_index
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.tables import (
    BLOCK,
    BatchedTable,
    EndlessTable,
    EpochSegment,
    LazyTable,
    Rollover,
    StridedTable,
    Table,
    parts,
)


def numbers(length: int, first: int = 0, block: int = 4) -> Table:
    return Table(length, lambda positions: positions + first, block)


def streamed(length: int, first: int = 0) -> LazyTable:
    return LazyTable(lambda start: iter(range(first + start, first + length)))


KINDS = {"table": numbers, "stream": streamed}


def asked(*positions: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(positions, np.int64)


def test_a_table_has_any_item_and_parts_are_whole_or_cut() -> None:
    table = numbers(10, 5)
    assert table.at(asked(9, 0, 3)).tolist() == [14, 5, 8]
    assert (table.upto(0, 4), table.upto(8, 12), table.upto(20, 24)) == (4, 10, 10)
    assert list(table.items(7)) == [12, 13, 14] and list(table.items(10)) == []
    assert [parts(count, 3, False) for count in (0, 1, 3, 7, 9)] == [0, 1, 1, 3, 3]
    assert [parts(count, 3, True) for count in (0, 1, 3, 7, 9)] == [0, 0, 1, 2, 3]


def test_a_stream_is_read_no_further_than_asked_and_again_from_anywhere() -> None:
    opened: list[int] = []
    read: list[int] = []

    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        for number in range(start, 10):
            read.append(number)
            yield number

    table = LazyTable(open_at)
    assert opened == []
    assert table.upto(2, 4) == 4 and read == [2, 3] and opened == [2]  # it jumps to the first item that is asked for
    assert table.at(asked(2, 3)) == [2, 3]
    assert table.upto(4, 6) == 6 and read == [2, 3, 4, 5]
    assert table.at(asked(5)) == [5]
    assert table.at(asked(0, 3)) == [0, 3] and opened == [2, 0]  # what was returned before is read again
    assert table.upto(8, 20) == 10 and table.at(asked(8, 9)) == [8, 9]
    assert table.upto(10, 12) == 10


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), replicas=st.integers(1, 7), offset=st.integers(0, 45), truncate=st.booleans())
def test_ranks_share_the_rest_of_an_epoch(kind: str, length: int, replicas: int, offset: int, truncate: bool) -> None:
    shares = [
        list(StridedTable(KINDS[kind](length), replicas, rank, offset, truncate).items()) for rank in range(replicas)
    ]
    dealt = [item for group in zip(*shares, strict=True) for item in group]
    rest = max(length - offset, 0)
    padded = parts(rest, replicas, truncate) * replicas
    assert dealt == [(offset + place) % length for place in range(padded)]
    assert list(StridedTable(KINDS[kind](length), replicas, 0, offset, truncate).items(2)) == shares[0][2:]


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), start=st.integers(0, 6))
def test_batches_are_slices(kind: str, length: int, size: int, drop: bool, start: int) -> None:
    slices = [list(range(begin, min(begin + size, length))) for begin in range(0, length, size)]
    expected = [one for one in slices if len(one) == size or not drop]
    assert list(BatchedTable(KINDS[kind](length), size, drop).items(start)) == expected[start:]
    arrays = list(BatchedTable(KINDS[kind](length), size, drop, arrays=True, convert=True).items(start))
    assert all(array.dtype == np.int64 for array in arrays)
    assert [array.tolist() for array in arrays] == expected[start:]
    whole = asked(*range(0, len(expected), 2))
    if len(whole):
        assert BatchedTable(KINDS[kind](length), size, drop).at(whole) == expected[::2]


def test_batches_are_made_a_block_at_a_time_where_indices_cost_nothing() -> None:
    """The fast path of the loader: of 32,768 indices at once."""
    assert BatchedTable(numbers(10**6, block=BLOCK), 64).block == 512
    assert BatchedTable(StridedTable(numbers(10**6, block=BLOCK), 3, 1), 64).block == 512
    assert BatchedTable(streamed(10**6), 64).block == 1
    endless = BatchedTable(EndlessTable(lambda epoch: numbers(10, block=BLOCK), EpochSegment(10, 1, 0, 0), 0, 100), 4)
    endless.at(asked(0))
    assert endless.block == BLOCK // 4


def test_numbers_of_any_kind_become_ints_and_keys_stay() -> None:
    items = [np.int32(3), np.array(4), True, "key", 2**70, (1, 2)]
    assert [plain_index(item) for item in items] == [3, 4, 1, "key", 2**70, (1, 2)]
    table = BatchedTable(LazyTable(lambda start: iter(items[start:])), 3, arrays=True)
    assert [list(batch) for batch in table.items()] == [[3, 4, 1], ["key", 2**70, (1, 2)]]


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), step=st.integers(1, 5))
def test_a_slice_is_what_the_two_questions_answer(kind: str, length: int, size: int, drop: bool, step: int) -> None:
    one, other = (BatchedTable(KINDS[kind](length), size, drop) for _ in range(2))
    for begin in range(0, 12, step):
        end = one.upto(begin, begin + step)
        expected = one.at(np.arange(begin, end)) if end > begin else []
        assert other.slice(begin, begin + step) == expected
    assert other.slice(0, 1) == BatchedTable(KINDS[kind](length), size, drop).slice(0, 1)  # again from the beginning


# -- The endless sequence of epochs, cut into whole batches: arithmetic on numbers -------------------------------------


def test_rollover_is_arithmetic_on_the_items_of_all_epochs() -> None:
    # 5 items in twos: epoch 0 owns the batches of items 0 to 3, epoch 1 those of items 4 to 9.
    epochs = [Rollover(5, 2, epoch) for epoch in range(3)]
    assert [(one.total(0), one.length(), one.first) for one in epochs] == [(0, 2, 0), (4, 3, 0), (10, 2, 0)]
    # 10 items on 3 ranks are 4 steps: in threes epoch 0 owns one batch of 9 items, epoch 1 begins at item 9.
    ranks = [Rollover(10, 3, epoch, replicas=3) for epoch in range(2)]
    assert [(one.total(0), one.length()) for one in ranks] == [(0, 1), (9, 1)]
    assert [ranks[1].total(batches) for batches in (0, 1)] == [9, 16]


def test_rollover_goes_on_from_any_item() -> None:
    begun = Rollover(5, 2, epoch=1, done=1)
    assert (begun.first, begun.length(), begun.is_begun, begun.is_behind) == (1, 2, True, False)
    # Another batch size left 7 items: the next whole batch is number 2, and the last batch has one item.
    odd = Rollover(5, 2, epoch=1, done=2)
    assert (odd.first, odd.length(), [odd.total(batches) for batches in range(3)]) == (1, 2, [7, 9, 10])
    behind = Rollover(5, 3, epoch=0, done=4)
    assert (behind.length(), behind.is_behind, behind.total(0)) == (0, True, 4)
    assert (Rollover(0, 4, epoch=3).length(), Rollover(0, 4, epoch=3).total(0)) == (0, 0)  # an empty sampler


def dealt_endlessly(length: int, replicas: int, epochs: int) -> list[list[int]]:
    """What each rank gets of epochs of different numbers."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for epoch in range(epochs):
        for rank, share in enumerate(shares):
            share += StridedTable(numbers(length, 100 * epoch), replicas, rank).items()
    return shares


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(1, 13), replicas=st.integers(1, 5), size=st.integers(1, 30), skip=st.integers(0, 40))
def test_the_endless_sequence_is_cut_anywhere(kind: str, length: int, replicas: int, size: int, skip: int) -> None:
    for rank, share in enumerate(dealt_endlessly(length, replicas, 90 // parts(length, replicas, False) + 2)):
        segment = EpochSegment(length, replicas, 0, 0)
        endless = EndlessTable(lambda epoch: KINDS[kind](length, 100 * epoch), segment, rank, 80)
        got = list(BatchedTable(endless, size).items(skip // size))
        assert list(itertools.chain(*got)) == share[skip // size * size : 80]
        for step in range(0, 80, 7):
            epoch, first = segment.where(step)
            assert share[step] // 100 == epoch and first <= step < first + segment.steps
            assert segment.steps_before(segment.total(step)) == step


def test_a_stretch_may_begin_where_another_number_of_ranks_stopped() -> None:
    segment = EpochSegment(10, 3, 1, 4)  # 6 items are left in epoch 1: two steps
    assert [segment.where(step) for step in (0, 1, 2, 5, 6)] == [(1, 0), (1, 0), (2, 2), (2, 2), (3, 6)]
    assert [segment.total(step) for step in (0, 1, 2, 3, 6)] == [14, 17, 20, 23, 30]
    endless = EndlessTable(lambda epoch: numbers(10, 100 * epoch), segment, 1, 7)
    assert endless.at(np.arange(7)).tolist() == [105, 108, 201, 204, 207, 200, 301]


@pytest.mark.parametrize(("yields", "found"), [(3, "yielded 3 items in epoch 0"), (7, "more than 5 items in epoch 0")])
def test_an_epoch_of_another_length_is_an_error_with_rollover(yields: int, found: str) -> None:
    endless = BatchedTable(EndlessTable(lambda epoch: streamed(yields), EpochSegment(5, 1, 0, 0), 0, 20, "Short"), 2)
    with pytest.raises(ValueError, match=f"a Short, .*{found}.*its length is 5.*__len__"):
        list(endless.items())


@pytest.mark.parametrize("replicas", [2, 3, 1000])
def test_ranks_stride_over_the_boundaries_of_blocks(replicas: int) -> None:
    length = 2 * BLOCK + 100
    order = RandomSampler(length, seed=3)
    whole = list(order.iter_epoch(1))
    for rank in {0, 1, replicas - 1}:
        expected = whole[rank::replicas]
        if len(expected) < -(-length // replicas):
            expected.append(whole[(rank + len(expected) * replicas) % length])
        sampler = ReplicaSampler(order, partial(resolve_replicas, replicas, rank))
        assert list(sampler.iter_epoch(1)) == expected
        assert list(sampler.iter_epoch(1, len(expected) - 3)) == expected[-3:]
        assert list(itertools.chain.from_iterable(BatchSampler(sampler, 7).iter_epoch(1))) == expected


def test_resolve_replicas_reads_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_replicas(None) == (1, 0)
    assert resolve_replicas(1) == (1, 0)
    assert resolve_replicas(4, 3) == (4, 3)
    assert resolve_replicas("auto", environ={}) == (1, 0)
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 8, get_rank=lambda: 5
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (8, 5)
    group.is_initialized = lambda: False
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)
