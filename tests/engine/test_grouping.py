"""Cheap batches travel in groups; nobody sees it but the clock."""

from __future__ import annotations

import itertools
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import ahead

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.engine import reader
from sharded_loader.engine.messages import GROUP_SECONDS, MAX_GROUP, Grouping
from sharded_loader.pools.process.link import TASKS


def sizes_sent(pool: ProcessPool, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each message to a worker holds, from here on."""
    sizes = []
    for worker in pool.workers:
        send = worker.link.send

        def spy(kind: bytes, *args: Any, send: Any = send, **options: Any) -> None:
            if kind == TASKS:
                sizes.append(len(pickle.loads(options["content"])))
            send(kind, *args, **options)

        monkeypatch.setattr(worker.link, "send", spy)
    return sizes


@pytest.mark.slow
def test_cheap_batches_travel_several_to_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ProcessPool(2, start_method="fork")
    with ahead(ShardedDataLoader(range(4000), 4, pool=pool), False) as loader:
        assert len(list(loader)) == 1000
        sizes = sizes_sent(pool, monkeypatch)
        assert [batch[0] for batch in loader] == [*range(0, 4000, 4)]
    assert sum(sizes) == 1000
    assert sum(sizes) / len(sizes) > 2


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


@pytest.mark.parametrize("seconds", [1e-6, 1.0])
def test_only_cheap_batches_travel_several_to_a_message(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, seconds)  # each look at it takes so long
    monkeypatch.setattr(reader, "host_clock", SimpleNamespace(now=lambda: next(clock)))
    with ShardedDataLoader(range(800), 4, num_workers=1) as loader:
        list(loader)
        assert (loader.pool.group == 1) is (seconds == 1.0)
