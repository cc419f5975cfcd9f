"""What lies in Ray's object store is lent out writable, and counted while somebody holds it."""

from __future__ import annotations

from typing import Any

import numpy as np

from sharded_loader.ray.cluster import Lent


def stored(nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes as Ray gives them: read-only."""
    memory = np.arange(nbytes, dtype=np.uint8)
    memory.setflags(write=False)
    return memory


def test_a_batch_is_not_copied_and_can_be_written_to() -> None:
    memory = stored(8)
    batch = Lent(100).take(memory)
    batch[0] = 7
    assert memory[0] == 7
    assert np.shares_memory(batch, memory)


def test_the_last_view_gives_the_memory_back() -> None:
    lent = Lent(100)
    batch = lent.take(stored(8))
    view = batch[2:4].reshape(1, 2)
    del batch
    assert lent.nbytes == 8
    del view
    assert lent.nbytes == 0


def test_past_the_bound_batches_are_copied() -> None:
    lent = Lent(12)
    memory = stored(8)
    first, second = lent.take(memory), lent.take(memory)
    assert np.shares_memory(first, memory)
    assert not np.shares_memory(second, memory)
    assert second.tolist() == memory.tolist()
    assert lent.nbytes == 8


def test_where_a_device_copies_all_batches_lie_in_its_memory() -> None:
    lent, made = Lent(100), []

    def empty(shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
        made.append(np.empty(shape, dtype))
        return made[-1]

    lent.empty, lent.copies_all = empty, True
    assert lent.take(stored(8)) is made[0]
    assert lent.nbytes == 0
