"""The indices of parts, of parts of parts, and of shuffles too long for memory."""

from __future__ import annotations

import pickle
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import IndexView
from sharded_loader.randomness import shuffle
from sharded_loader.randomness.indices import bound_of, composed, is_computed, recipe_of, shuffled_parts, taken
from sharded_loader.sampling.tables import checksum_of


@pytest.mark.parametrize("in_memory", [2**24, 0])
def test_parts_of_a_shuffle_are_disjoint_and_complete(monkeypatch: pytest.MonkeyPatch, in_memory: int) -> None:
    monkeypatch.setattr(shuffle, "IN_MEMORY", in_memory)
    parts = shuffled_parts(100, [50, 0, 20, 30], 7, "split")
    assert [len(part) for part in parts] == [50, 0, 20, 30]
    found = [list(map(int, part)) for part in parts]
    assert sorted(index for part in found for index in part) == list(range(100))
    assert found == [list(map(int, part)) for part in shuffled_parts(100, [50, 0, 20, 30], 7, "split")]


def test_a_part_of_a_huge_shuffle_is_a_sequence_that_takes_no_memory() -> None:
    length = 10**15
    first, second = shuffled_parts(length, [10**14, length - 10**14], 3)
    assert isinstance(second, IndexView) and is_computed(second)
    assert (len(first), len(second)) == (10**14, 9 * 10**14)
    some = [second[i] for i in (0, 5, -1)]
    assert len({*some, first[0]}) == 4 and all(0 <= index < length for index in some)
    assert taken(second, np.array([0, 5, len(second) - 1])).tolist() == some
    assert [second[5 :: 10**13][i] for i in (0, 1)] == [second[5], second[5 + 10**13]]
    assert pickle.loads(pickle.dumps(second))[5] == some[1]
    assert np.asarray(second[3:7]).tolist() == [second[i] for i in range(3, 7)]
    with pytest.raises(IndexError):
        second[len(second)]


def test_taken_is_plain_indexing() -> None:
    where = np.array([3, 0, 3])
    for indices in (np.array([5, 6, 7, 8]), range(5, 9), range(20, 0, -5)):
        assert taken(indices, where).tolist() == [indices[3], indices[0], indices[3]]


# -- parts of parts ----------------------------------------------------------------------------------------------------

KINDS = ("range", "array", "view")


def selections(draw: Any, length: int) -> Any:
    """Some indices below ``length``: a range, an array, or a view."""
    kind = draw(st.sampled_from(KINDS))
    if kind == "array" or not length:
        return np.array(draw(st.lists(st.integers(0, length - 1), max_size=9)) if length else [], np.int64)
    cut = range(length)[draw(st.slices(length))]
    return cut if kind == "range" else IndexView(length, (draw(st.integers(0, 99)), "test"), cut)


@given(st.data())
def test_a_part_of_a_part_of_a_part_is_plain_indexing(data: st.DataObject) -> None:
    length = data.draw(st.integers(0, 40))
    found: Any = range(length)
    wanted = list(found)
    for _ in range(data.draw(st.integers(1, 4))):
        inner = selections(data.draw, len(found))
        found, wanted = composed(found, inner), [wanted[index] for index in inner]
        assert list(map(int, found)) == wanted and len(found) == len(wanted)
        assert taken(found, np.arange(len(found))).tolist() == wanted
        assert bound_of(found) > max(wanted, default=-1)
        assert recipe_of(pickle.loads(pickle.dumps(found))) == recipe_of(found)


def test_parts_of_huge_parts_take_no_memory() -> None:
    _, second = shuffled_parts(10**15, [10**14, 9 * 10**14], 3)
    inner, _ = shuffled_parts(len(second), [10**12, len(second) - 10**12], 4)
    found = composed(composed(range(10**16, 0, -10), second), inner)
    assert isinstance(found, IndexView) and len(found) == 10**12
    assert found[7] == range(10**16, 0, -10)[second[inner[7]]]
    assert found.bound == 10**16 + 1


def test_a_view_reads_as_a_sequence_does() -> None:
    view = IndexView(1000, (7, "test"), range(100, 200))
    items = list(view)
    assert items == np.asarray(view).tolist() == view[:].at(np.arange(100)).tolist()
    assert np.asarray(view, np.int32).dtype == np.int32
    assert [view[-1], view[np.int64(3)]] == [items[-1], items[3]]
    assert view[np.array([-1, 0])].tolist() == view[[-1, 0]].tolist() == [items[-1], items[0]]
    assert list(view[5:50:7]) == items[5:50:7] and list(view[::-1]) == items[::-1] and list(view[3:3]) == []
    assert items[4] in view and view.index(items[4]) == 4 and list(reversed(view)) == items[::-1]
    assert np.arange(1000)[view].tolist() == items
    assert repr(view) == "<IndexView of 100 indices below 1000>"


@pytest.mark.parametrize(
    ("index", "error"),
    [
        (100, IndexError),
        (-101, IndexError),
        (np.array([0, 100]), IndexError),
        ([-101], IndexError),
        (np.array([0.5]), TypeError),
        (np.array([True, False]), TypeError),
        ("3", TypeError),
        (1.5, TypeError),
    ],
)
def test_a_view_refuses_what_is_no_position(index: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        IndexView(1000, (7, "test"), range(100))[index]


def test_a_view_cannot_be_changed() -> None:
    view: Any = IndexView(1000, (7, "test"), range(100))
    with pytest.raises(TypeError, match="item assignment"):
        view[0] = 3


def test_checksums_of_computed_indices_are_the_same_in_every_release() -> None:
    """The order of `SubsetRandomSampler` over them, and saved states, depend on it."""
    huge = shuffled_parts(10**12, [10**11, 9 * 10**11], 7, "split")[0]
    assert recipe_of(huge) == "ShuffledPart(1000000000000, (7, 'split'), range(0, 100000000000))"
    assert checksum_of(huge) == zlib.crc32(recipe_of(huge).encode())
    assert checksum_of(range(0, 10**12, 2)) == zlib.crc32(b"range(0, 1000000000000, 2)")
    inside = {checksum_of(composed(outer, huge)) for outer in (range(10**12), range(1, 10**12 + 1), huge)}
    assert len(inside) == 3
