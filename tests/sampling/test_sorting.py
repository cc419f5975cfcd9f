"""Keys of any kind are sorted as Python sorts them; what does not fit into memory is refused at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader import SortedSampler
from sharded_loader.base import limits
from sharded_loader.base.limits import Limit
from sharded_loader.sampling.sorting import order_of_ratios, sort_order, sortable

quick = settings(max_examples=50, deadline=None)


@quick
@given(keys=st.lists(st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False))), reverse=st.booleans())
def test_numbers_of_any_size_are_ordered_exactly(keys: list[float], reverse: bool) -> None:
    expected = sorted(range(len(keys)), key=keys.__getitem__, reverse=reverse)
    assert sort_order(sortable(keys), reverse).tolist() == expected


@quick
@given(pairs=st.lists(st.tuples(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3))))
def test_ratios_are_ordered_as_by_division(pairs: list[tuple[float, float]]) -> None:
    above, below = (np.array([pair[side] for pair in pairs], dtype=np.float64) for side in (0, 1))
    ratios = above / below
    assert (np.diff(ratios[order_of_ratios(above, below)]) >= -1e-12 * ratios.max(initial=0)).all()


def test_more_keys_than_fit_into_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "free_bytes", lambda: Limit(10**9, "the machine's memory"))
    with pytest.raises(MemoryError, match="1,000,000,000 keys.*ShardShuffleSampler"):
        SortedSampler(range(10**9))
