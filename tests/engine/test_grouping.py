"""Cheap batches travel in groups; nobody sees it but the clock."""

from __future__ import annotations

import pickle
import time
from typing import Any

import numpy as np
import pytest
from conftest import ahead

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.engine.messages import GROUP_SECONDS, MAX_GROUP, Grouping
from sharded_loader.pools.process.link import TASKS


def sizes_sent(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each message to a worker holds, from here on."""
    sizes = []
    for worker in pool._transport.workers:
        send = worker.link.send

        def spy(kind: bytes, *args: Any, send: Any = send, **options: Any) -> None:
            if kind == TASKS:
                sizes.append(len(pickle.loads(options["content"])))
            send(kind, *args, **options)

        monkeypatch.setattr(worker.link, "send", spy)
    return sizes


def row(index: int) -> np.ndarray[Any, Any]:
    return np.full(4, index)


def slow_row(index: int) -> np.ndarray[Any, Any]:
    time.sleep(0.001)
    return row(index)


def is_in_order(loader: Any, count: int) -> bool:
    return all(batch[0, 0] == loader.batch_size * n for n, batch in zip(range(count), loader, strict=False))


@pytest.mark.slow
def test_cheap_batches_travel_several_to_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(2, start_method="fork")
    with ahead(ShardedDataLoader(SimpleDataset(range(4000)).transform(row), 4, pool=pool), False) as loader:
        assert is_in_order(loader, 1000)
        sizes = sizes_sent(pool, monkeypatch)
        assert is_in_order(loader, 1000)
    assert sum(sizes) == 1000
    assert sum(sizes) / len(sizes) > 2


@pytest.mark.slow
def test_batches_that_take_a_millisecond_travel_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(2, start_method="fork")
    with ahead(ShardedDataLoader(SimpleDataset(range(4000)).transform(slow_row), 4, pool=pool), False) as loader:
        assert is_in_order(loader, 10)
        sizes = sizes_sent(pool, monkeypatch)
        assert is_in_order(loader, 60)
        # And each worker holds one beyond the one that it does: uneven batches leave nobody idle.
        assert all(len(worker.tasks) <= 2 for worker in pool._transport.workers)
    assert set(sizes) <= {1, 2}  # two at the beginning of the epoch, when workers have none
    assert sum(sizes) / len(sizes) < 1.2


def test_one_slow_batch_ends_the_grouping() -> None:
    grouping = Grouping()
    for _ in range(200):
        grouping.note(10e-6)
    assert grouping.size == MAX_GROUP
    grouping.note(0.05)
    assert grouping.size == 1
    for _ in range(100):  # which are not cheap
        grouping.note(GROUP_SECONDS)
        assert grouping.size == 1


def test_the_bytes_of_a_message_are_bounded_too() -> None:
    grouping = Grouping(most_bytes=1000)
    assert [grouping.note(10e-6, nbytes) for nbytes in [0] * 200][-1] == MAX_GROUP
    assert [grouping.note(10e-6, nbytes) for nbytes in (100, 101, 1001)] == [10, 9, 1]
