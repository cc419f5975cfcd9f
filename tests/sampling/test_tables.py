"""The arithmetic of positions, on numbers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader.engine.split import plain_index
from sharded_loader.sampling.tables import BLOCK, Batched, Dealt, Streamed, Table, parts

quick = settings(max_examples=40, deadline=None)


def numbers(length: int, first: int = 0, block: int = 4) -> Table:
    return Table(length, lambda positions: positions + first, block)


def streamed(length: int, first: int = 0) -> Streamed:
    return Streamed(lambda start: iter(range(first + start, first + length)))


KINDS = {"table": numbers, "stream": streamed}


def asked(*positions: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(positions, np.int64)


@pytest.mark.parametrize(("count", "whole", "cut"), [(0, 0, 0), (1, 1, 0), (3, 1, 1), (7, 3, 2), (9, 3, 3)])
def test_parts_of_three(count: int, whole: int, cut: int) -> None:
    assert (parts(count, 3, False), parts(count, 3, True)) == (whole, cut)


def test_a_table_has_any_item_and_ends_where_it_ends() -> None:
    table = numbers(10, 5)
    assert table.at(asked(9, 0, 3)).tolist() == [14, 5, 8]
    assert (table.upto(0, 4), table.upto(8, 12), table.upto(20, 24)) == (4, 10, 10)
    assert list(table.items(7)) == [12, 13, 14] and list(table.items(10)) == []


def test_a_stream_is_read_no_further_than_asked_and_again_from_anywhere() -> None:
    opened: list[int] = []
    read: list[int] = []

    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        for number in range(start, 10):
            read.append(number)
            yield number

    table = Streamed(open_at)
    assert opened == []
    assert table.upto(2, 4) == 4 and read == [2, 3] and opened == [2]  # it jumps to the first item that is asked for
    assert table.at(asked(2, 3)) == [2, 3]
    assert table.upto(4, 6) == 6 and read == [2, 3, 4, 5]
    assert table.at(asked(5)) == [5]
    assert table.at(asked(0, 3)) == [0, 3] and opened == [2, 0]  # what was returned before is read again
    assert table.upto(8, 20) == 10 and table.at(asked(8, 9)) == [8, 9]
    assert table.upto(10, 12) == 10


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(length=st.integers(0, 40), replicas=st.integers(1, 7), offset=st.integers(0, 45), truncate=st.booleans())
def test_ranks_share_the_rest_of_an_epoch(kind: str, length: int, replicas: int, offset: int, truncate: bool) -> None:
    shares = [list(Dealt(KINDS[kind](length), replicas, rank, offset, truncate).items()) for rank in range(replicas)]
    dealt = [item for group in zip(*shares, strict=True) for item in group]
    rest = max(length - offset, 0)
    padded = parts(rest, replicas, truncate) * replicas
    assert dealt == [(offset + place) % length for place in range(padded)]


def test_a_rank_asks_for_its_own_positions_only() -> None:
    seen: list[int] = []

    def at(positions: Any) -> Any:
        seen.extend(positions.tolist())
        return positions

    batches = Batched(Dealt(Table(10**12, at, BLOCK), 4096, 7, 100), 3)
    assert batches.at(asked(5)) == [[100 + 4096 * step + 7 for step in (15, 16, 17)]]
    assert len(seen) == 3


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), start=st.integers(0, 6))
def test_batches_are_slices(kind: str, length: int, size: int, drop: bool, start: int) -> None:
    slices = [list(range(begin, min(begin + size, length))) for begin in range(0, length, size)]
    expected = [one for one in slices if len(one) == size or not drop]
    assert list(Batched(KINDS[kind](length), size, drop).items(start)) == expected[start:]
    arrays = list(Batched(KINDS[kind](length), size, drop, arrays=True, convert=True).items(start))
    assert all(array.dtype == np.int64 for array in arrays)
    assert [array.tolist() for array in arrays] == expected[start:]
    whole = asked(*range(0, len(expected), 2))
    if len(whole):
        assert Batched(KINDS[kind](length), size, drop).at(whole) == expected[::2]


def test_batches_are_made_a_block_at_a_time_where_indices_cost_nothing() -> None:
    """The fast path of the loader: of 32,768 indices at once."""
    assert Batched(numbers(10**6, block=BLOCK), 64).block == 512
    assert Batched(Dealt(numbers(10**6, block=BLOCK), 3, 1), 64).block == 512
    assert Batched(streamed(10**6), 64).block == 1


def test_numbers_of_any_kind_become_ints_and_keys_stay() -> None:
    items = [np.int32(3), np.array(4), True, "key", 2**70, (1, 2)]
    assert [plain_index(item) for item in items] == [3, 4, 1, "key", 2**70, (1, 2)]
    table = Batched(Streamed(lambda start: iter(items[start:])), 3, arrays=True)
    assert [list(batch) for batch in table.items()] == [[3, 4, 1], ["key", 2**70, (1, 2)]]


@pytest.mark.parametrize("kind", KINDS)
@quick
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), step=st.integers(1, 5))
def test_a_slice_is_what_the_two_questions_answer(kind: str, length: int, size: int, drop: bool, step: int) -> None:
    one, other = (Batched(KINDS[kind](length), size, drop) for _ in range(2))
    for begin in range(0, 12, step):
        end = one.upto(begin, begin + step)
        expected = one.at(np.arange(begin, end)) if end > begin else []
        assert other.slice(begin, begin + step) == expected
    assert other.slice(0, 1) == Batched(KINDS[kind](length), size, drop).slice(0, 1)  # again from the beginning
