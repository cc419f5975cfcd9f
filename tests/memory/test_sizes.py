"""The size of the next slot follows the batches that have come, up at once and down after a while."""

from __future__ import annotations

from conftest import PROCESS_POOLS
from hypothesis import given
from hypothesis import strategies as st
from memory_samples import SHAPE, Filled

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.memory.arena import WINDOW, RecentSizes


@given(st.lists(st.integers(0, 1 << 40), max_size=200), st.integers(1, 70))
def test_it_is_the_largest_of_the_window_and_a_sixteenth(sizes: list[int], window: int) -> None:
    recent = RecentSizes(window)
    assert recent.wanted == 0
    for number, nbytes in enumerate(sizes, 1):
        recent.note(nbytes)
        largest = max(sizes[max(0, number - window) : number])
        assert recent.wanted == largest + largest // 16


def test_one_large_batch_does_not_make_all_later_slots_large() -> None:
    # Batch 4 has 64 samples, every other one has 4.
    starts = range(68, 68 + 4 * (WINDOW + 30), 4)
    order = [[n, n, n, n] for n in range(4)] + [list(range(64))] + [list(range(s, s + 4)) for s in starts]
    with ShardedDataLoader(
        Filled(600), batch_sampler=order, pool=ProcessPool(2, start_method=PROCESS_POOLS[0])
    ) as loader:
        held = []
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == order[number]
            if number == 10:
                assert loader._pipeline.pool._sizes.wanted >= 64 * SHAPE
            if number > WINDOW + 15:
                held.append(batch)
        arena = loader._pipeline.pool._resources.arena
        assert arena.lent == len(held) > 5
        assert all(slot.nbytes < 8 * SHAPE for slot in list(arena._out)[-5:])
