"""A list, a tuple or a range as the sampler: read in blocks, at any place, and checked where an epoch goes on."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.sampling.foreign import LISTED, Listed
from sharded_loader.sampling.state import Checkpoint

KINDS = pytest.mark.parametrize("kind", [list, tuple, lambda items: range(items[0], items[-1] + 1)])


def table_of(items: Any, mark: Checkpoint | None = None, epoch: int = 0) -> Any:
    return Listed(items, mark).epoch_table(epoch)


@KINDS
def test_items_are_read_in_blocks_at_any_place(kind: Any) -> None:
    items = kind(list(range(3, 3 + 2 * LISTED)))
    table = table_of(items)
    assert table.block == LISTED and Listed(items, None).len_epoch(5) == 2 * LISTED
    for positions in ([0], [LISTED - 1, LISTED], [2 * LISTED - 1], [5, 9, 100]):
        found = table.at(np.array(positions))
        assert isinstance(found, np.ndarray) and found.dtype == np.int64
        assert found.tolist() == [3 + position for position in positions]


def test_a_block_of_a_large_range_is_not_the_whole_range() -> None:
    assert table_of(range(0, 10**15, 7)).at(np.arange(10**12, 10**12 + 3)).tolist() == [
        7 * at for at in range(10**12, 10**12 + 3)
    ]


@pytest.mark.parametrize("items", [["a", "b", "c"], [(1, 2), (3, 4), 5], [1, 2**70, 3], [True, 1, 2], [1, None, 2]])
def test_items_that_are_no_plain_numbers_stay_what_they_are(items: list[Any]) -> None:
    found = table_of(items).at(np.arange(3))
    assert type(found) is list and found == items and list(map(type, found)) == list(map(type, items))


def test_an_epoch_goes_on_where_the_list_is_the_same() -> None:
    items = list(range(50, 0, -1))
    mark = Listed(items, None).checkpoint(2, 20)
    assert (mark.epoch, mark.items, mark.finished) == (2, 20, False)
    assert table_of(list(items), mark, 2).at(np.arange(20, 22)).tolist() == [30, 29]
    behind = items[:20] + ["other"] * 30
    assert table_of(behind, mark, 2)
    for changed in (items[1:], [*items[:19], 0, *items[20:]], items[:10]):
        with pytest.raises(ValueError):
            table_of(changed, mark, 2)
        assert table_of(changed, mark, 3), "another epoch begins from its beginning"
        assert table_of(changed, None, 2)


def test_checkpoints_may_be_asked_for_in_any_order() -> None:
    items = list(range(100))
    listed = Listed(items, None)
    once = {count: Listed(items, None).checkpoint(0, count) for count in (0, 10, 50, 100)}
    for count in (50, 10, 100, 0, 50):
        assert listed.checkpoint(0, count) == once[count]
    assert once[100].finished and listed.checkpoint(0, 1000) == once[100]


@KINDS
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_a_loader_goes_on_in_a_list(kind: Any, count: int) -> None:
    def make() -> ShardedDataLoader:
        return ShardedDataLoader(range(20), 4, sampler=kind(list(range(3, 14))))

    whole = [batch.tolist() for batch in make()]
    loader = make()
    iterator = iter(loader)
    for _ in range(count):
        next(iterator)
    other = make()
    other.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in other] == (whole[count:] or whole)


def test_a_list_that_changes_between_two_epochs_is_read_as_it_is_then() -> None:
    items = [5, 6, 7]
    loader = ShardedDataLoader(range(20), 2, sampler=items)
    assert [batch.tolist() for batch in loader] == [[5, 6], [7]]
    items[:] = [1, 2, 3, 4]
    assert [batch.tolist() for batch in loader] == [[1, 2], [3, 4]]
