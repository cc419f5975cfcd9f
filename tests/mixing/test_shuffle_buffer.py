"""A shuffle buffer over iterable data: every sample once, in an order that resumes anywhere, with a small state."""

import json
import pickle
import signal
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from conftest import POOLS, PROCESS_POOLS, covering, make_pool
from failures import Fails, kill
from hypothesis import given
from hypothesis import strategies as st
from stream_samples import (
    LENGTHS,
    At,
    DrawsOwn,
    GoOn,
    Own,
    Parts,
    Stateful,
    StatefulRows,
    Told,
    WithStatefulRows,
    values,
)

from sharded_loader import LoaderWarning, ShardedDataLoader, ShuffleBuffer, interleave

KINDS = (Parts, WithStatefulRows, Own, Stateful, Told, DrawsOwn)
EVERY = sorted(100 * part + place for part, length in enumerate(LENGTHS) for place in range(length))


def loader_of(dataset: Any, pool: str = "inline", size: int = 3, **given: Any) -> ShardedDataLoader[Any]:
    buffer = ShuffleBuffer(dataset, size, seed=2)
    return ShardedDataLoader(buffer, 2, pool=make_pool(pool), **{"streams": len(LENGTHS), "seed": 1, **given})


def batches_of(loader: ShardedDataLoader[Any], epochs: int = 1) -> list[Any]:
    with loader:
        return [values(batch) for _ in range(epochs) for batch in loader]


def flat(batches: list[Any]) -> list[Any]:
    return [sample for batch in batches for sample in batch]


@given(length=st.integers(0, 40), size=st.integers(1, 12), seed=st.integers(0, 5))
def test_every_sample_comes_once_and_moves_by_less_than_the_buffer(length: int, size: int, seed: int) -> None:
    found = list(ShuffleBuffer(lambda: iter(range(length)), size, seed))
    assert sorted(found) == list(range(length))
    assert all(abs(place - sample) < size for place, sample in enumerate(found))


def test_the_order_differs_by_seed_epoch_and_part_and_is_the_same_each_time() -> None:
    def order(seed: int = 0, epoch: int = 0) -> list[int]:
        buffer = ShuffleBuffer(lambda: iter(range(50)), 50, seed)
        buffer.set_epoch(epoch)
        return list(buffer)

    assert order() == order() and len({tuple(one) for one in (order(), order(1), order(0, 1))}) == 3
    loader = ShardedDataLoader(ShuffleBuffer(Parts((20, 20)), 20), 20, streams=2, seed=0)
    first, second = (np.array(values(batch)) % 100 for batch in loader)
    assert first.tolist() != second.tolist()
    assert [values(batch) for batch in loader] != [(first).tolist(), (second + 100).tolist()]


def test_the_buffer_holds_no_more_samples_than_its_size() -> None:
    read = 0

    def counted() -> Iterator[int]:
        nonlocal read
        for sample in range(40):
            read += 1
            yield sample

    for given_before, _ in enumerate(ShuffleBuffer(counted, 8)):
        assert read - given_before <= 9  # those that wait, and the one that is given


@pytest.mark.costly(4)
@covering(1, pool=POOLS, kind=KINDS)
def test_no_pool_and_no_number_of_workers_changes_what_comes(pool: str, kind: Callable[..., Any]) -> None:
    expected = batches_of(loader_of(kind()), 2)
    assert batches_of(loader_of(kind(), pool), 2) == expected
    if kind not in (Told, DrawsOwn):
        assert sorted(flat(expected[: len(expected) // 2])) == EVERY


def test_data_that_is_read_by_index_and_mixtures_are_buffered_too_and_torchs_loader_takes_them() -> None:
    loader = ShardedDataLoader(ShuffleBuffer(range(10), 4), 2, streams=2, seed=0)
    assert sorted(flat(batches_of(loader))) == list(range(10))
    mixed = interleave([lambda: iter(range(8)), ShuffleBuffer(lambda: iter(range(100, 108)), 4)], seed=1)
    buffer = ShuffleBuffer(mixed, 4)
    assert sorted(buffer) == sorted(mixed)
    assert isinstance(pickle.loads(pickle.dumps(ShuffleBuffer(Parts(), 4))), torch_data.IterableDataset)
    assert list(torch_data.DataLoader(buffer, batch_size=None)) == list(buffer)
    rows = flat(batches_of(loader_of(DrawsOwn())))  # random numbers of a sample are its own
    assert len({number for _, number in rows}) == len(EVERY) and sorted(value for value, _ in rows) == EVERY


def test_a_dataset_that_never_asks_for_its_part_is_warned_of_as_without_the_buffer() -> None:
    loader = ShardedDataLoader(ShuffleBuffer(lambda: iter(range(8)), 4), 2, streams=2)
    with pytest.warns(LoaderWarning, match="has not asked which part"):
        list(loader)


@pytest.mark.slow
@covering(1, kind=KINDS, size=[3, 50, 1])
def test_a_state_after_any_batch_goes_on_with_the_same_samples(kind: Callable[..., Any], size: int) -> None:
    whole = batches_of(loader_of(kind(), size=size), 2)
    for done in range(len(whole)):
        first = loader_of(kind(), size=size)
        before = list(islice((values(batch) for _ in range(2) for batch in first), done))
        state = json.loads(json.dumps(first.state_dict()))
        resumed = loader_of(kind(), "thread", size=size)
        resumed.load_state_dict(state)
        assert before + batches_of(resumed, 2)[: len(whole) - done] == whole


@pytest.mark.filterwarnings("ignore:each rank reads parts of its own")
@pytest.mark.parametrize("kind", [Parts, Stateful])
def test_the_states_of_four_ranks_go_on_on_one_and_an_endless_order_too(kind: Callable[..., Any]) -> None:
    lengths = (7, 2, 3, 12)
    given: dict[str, Any] = {"steps_per_epoch": 3}
    ranks = [loader_of(kind(lengths), **given, num_replicas=4, rank=rank) for rank in range(4)]
    rows = [list(islice(iter(one), 2)) for one in ranks]
    alone = loader_of(kind(lengths), steps_per_epoch=12)
    whole = batches_of(alone, 2)
    assert [values(batch) for step in zip(*rows, strict=True) for batch in step] == whole[:8]
    merged = loader_of(kind(lengths), steps_per_epoch=3, num_replicas=2, rank=0)
    merged.load_state_dict([one.state_dict() for one in ranks])
    assert next(values(batch) for batch in merged) == whole[8]


def test_a_dataset_with_a_state_is_read_again_for_two_buffers_at_most() -> None:
    read: list[int] = []

    class Counts(StatefulRows):
        def __next__(self) -> Any:
            sample = super().__next__()
            read.append(sample)
            return sample

    def rows() -> Iterator[Any]:
        return Counts(Parts((1000,)), 0)

    buffer = ShuffleBuffer(rows, 10, seed=3)
    whole = list(buffer)
    for done in (995, 500, 509, 7):
        samples = iter(buffer)
        assert list(islice(samples, done)) == whole[:done]
        state = json.loads(json.dumps(samples.state_dict()))
        assert len(json.dumps(state)) < 300
        read.clear()
        resumed = iter(buffer)
        resumed.load_state_dict(state)
        assert len(read) <= 20 and state == resumed.state_dict()
        assert list(resumed) == whole[done:]


@pytest.mark.parametrize("method", PROCESS_POOLS[:1])
def test_a_killed_worker_changes_nothing(method: str, tmp_path: Path) -> None:
    expected = batches_of(loader_of(WithStatefulRows()))
    dataset = WithStatefulRows(before=At(Fails(kill, tmp_path / "once", times=1), 3, 8))
    assert batches_of(loader_of(dataset, method)) == expected


@pytest.mark.parametrize("at", [0, 4, 7])
def test_an_error_of_the_dataset_comes_in_its_place_and_costs_no_other_sample(at: int) -> None:
    def fail() -> None:
        raise LookupError("bad")

    def made() -> Iterator[Any]:
        return iter(ShuffleBuffer(lambda: GoOn((12,), before=At(fail, 0, at))(0, 1), 4, seed=1))

    def until_the_end(samples: Iterator[Any], states: list[Any]) -> list[Any]:
        found: list[Any] = []
        while True:
            states.append((len(found), samples.state_dict()))  # type: ignore[attr-defined]
            try:
                found.append(next(samples))
            except LookupError:
                found.append(None)
            except StopIteration:
                return found

    states: list[Any] = []
    whole = until_the_end(made(), states)
    assert whole.count(None) == 1 and len(whole) == 12
    assert sorted(one for one in whole if one is not None) == [place for place in range(12) if place != at]
    for done, state in states:
        resumed = made()
        resumed.load_state_dict(json.loads(json.dumps(state)))  # type: ignore[attr-defined]
        assert until_the_end(resumed, []) == whole[done:]


def test_what_a_signal_handler_raises_is_raised_at_once_and_is_no_error_of_a_sample() -> None:
    def time_is_up(*_: Any) -> None:
        raise TimeoutError("time is up")

    dataset = GoOn((12,), before=At(lambda: signal.raise_signal(signal.SIGINT), 0, 6))
    samples = iter(ShuffleBuffer(lambda: dataset(0, 1), 4, seed=1))
    before = signal.signal(signal.SIGINT, time_is_up)
    try:
        found = [next(samples), next(samples)]  # sample 6 is read for the third one
        with pytest.raises(TimeoutError):
            next(samples)
    finally:
        signal.signal(signal.SIGINT, before)
    assert sorted([*found, *samples]) == [place for place in range(12) if place != 6]
