"""From the arguments to the parts, and the life of a loader."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from sharded_loader import (
    InlinePool,
    LoaderClosedError,
    ProcessPool,
    ShardedDataLoader,
    SimpleDataset,
    ThreadPool,
    default_batchify_fn,
)
from sharded_loader.base import imports


def test_without_workers_the_loop_reads_itself() -> None:
    loader = ShardedDataLoader(range(10), 4)
    assert isinstance(loader.pool, InlinePool)
    assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"num_workers": 2}, ProcessPool),
        ({"num_workers": 2, "thread_pool": True}, ThreadPool),
        ({"num_workers": 2, "pool": "thread"}, ThreadPool),
        ({"num_workers": 2, "pool": "inline"}, InlinePool),
        ({"num_workers": -1}, InlinePool),
        ({"pool": ThreadPool(3)}, ThreadPool),
    ],
    ids=str,
)
def test_the_arguments_choose_the_pool_and_start_nothing(given: dict[str, Any], kind: type) -> None:
    loader = ShardedDataLoader(range(10), 4, **given)
    assert type(loader.pool) is kind
    assert not loader.pool.started


def test_the_default_batchify_function_given_by_name_is_the_default() -> None:
    loader = ShardedDataLoader(range(10), 4, batchify_fn=default_batchify_fn)
    assert loader._epochs.batchify_fn is None


def test_a_loader_can_be_neither_pickled_nor_copied_and_says_what_to_do() -> None:
    loader = ShardedDataLoader(range(10), 4)
    for take in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="state_dict"):
            take(loader)


def test_a_loader_over_plain_data_asks_for_no_satellite_but_its_instruments(monkeypatch: pytest.MonkeyPatch) -> None:
    instruments = {key: place for key, place in imports.PROVIDED.items() if ".instruments." in place}
    monkeypatch.setattr(imports, "_providers", instruments)
    dataset = SimpleDataset(range(10)).transform(str)
    assert len(list(ShardedDataLoader(dataset, 4, shuffle=True, steps_per_epoch=3))) == 3


def test_closed_twice_is_closed_and_nothing_can_be_asked_of_it() -> None:
    with ShardedDataLoader(range(10), 4) as loader:
        iterator = iter(loader)
        next(iterator)
    loader.close()
    for ask in (lambda: next(iterator), lambda: iter(loader), loader.peek, lambda: loader.read(0), loader.refresh):
        with pytest.raises(LoaderClosedError):
            ask()


def test_a_state_carries_on_in_another_loader() -> None:
    first, second = (ShardedDataLoader(range(10), 4, shuffle=True, seed=3) for _ in range(2))
    iterator = iter(first)
    next(iterator)
    second.load_state_dict(first.state_dict())
    assert [batch.tolist() for batch in second] == [batch.tolist() for batch in iterator]
