"""One epoch of a sampler: it is read once, and its places and the workers' states move with the batches."""

from __future__ import annotations

import functools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from drop_in_samples import Order, Resets, Shared, plain
from injection import HANDLERS, InterruptAt, next_interrupted

from sharded_loader.base.entries import from_state
from sharded_loader.drop_in.sampler import EpochCount, SamplerStart, SamplerState, TorchEpoch
from sharded_loader.engine.messages import PartPoint, Result, Task
from sharded_loader.torch import DataLoader


def read(
    sampler: Any, lanes: int = 2, keeps_state: bool = False, state: Any = None, batched: bool = True
) -> TorchEpoch:
    saved = None if state is None else from_state(SamplerState, state, "give a state")
    start = SamplerStart(sampler, saved, False, EpochCount())
    if state is None:
        start.begin()
    start.draw_seed()
    return TorchEpoch(start, lanes, batched, {}, keeps_state, lambda number: ())


def item_of(epoch: TorchEpoch, seq: int) -> Any:
    planned = epoch.batch(seq)
    return None if planned is None else planned.item


def state_after(epoch: TorchEpoch, delivered: int) -> dict[str, Any]:
    return epoch.state(epoch.position(delivered))


def test_an_item_is_read_once_and_kept_until_it_is_forgotten() -> None:
    drawn = list[int]()
    reading = read(Order(lambda: ([drawn.append(index) or index] for index in range(4))))  # type: ignore[func-returns-value]
    assert item_of(reading, 1) == [1]
    assert item_of(reading, 0) == [0] and drawn == [0, 1]
    assert reading.batch(4) is None and drawn == [0, 1, 2, 3]
    reading.forget(3)
    assert reading.batch(0) is None
    assert item_of(reading, 2) == [2]  # the last one delivered may be taken back


def refilled() -> Iterator[list[int]]:
    """One list for all batches."""
    batch = [0]
    for index in range(4):
        batch[0] = index
        yield batch


@pytest.mark.parametrize(
    ("sampler", "batched", "shards"),
    [
        (range(3), False, [(0,), (1,), (2,)]),
        ([range(3), {4: 1}, (1, 2)], True, [[0, 1, 2], [4], (1, 2)]),
        (Order(refilled), True, [[0], [1], [2], [3]]),
    ],
    ids=["single indices", "indices of any sequence", "a list that is filled again"],
)
def test_what_a_sampler_yields_is_a_batch_of_indices(sampler: Any, batched: bool, shards: list[Any]) -> None:
    epoch = read(sampler, batched=batched)
    tasks = [epoch.task(seq) for seq in range(len(shards) + 1)]
    assert [task if task is None else task.shards for task in tasks] == [*((one,) for one in shards), None]


def test_an_error_of_the_sampler_comes_in_its_place_and_ends_the_epoch() -> None:
    def items() -> Iterator[list[int]]:
        yield [0]
        raise OSError("no more")

    tasks = read(Order(items))
    assert isinstance(tasks.task(0), Task)
    error = tasks.task(1)
    assert isinstance(error, OSError) and "raised by the sampler at batch 1" in error.__notes__[-1]
    assert tasks.task(1) is None


def test_what_was_delivered_out_of_order_is_passed_over() -> None:
    batches = [[index] for index in range(6)]
    reading = read(batches)
    tasks = reading
    for seq in range(4):
        tasks.task(seq)
    tasks.move(2, 0)  # batch 2 overtakes two others
    assert [item_of(reading, seq) for seq in range(4)] == [[2], [0], [1], [3]]
    state = state_after(reading, 1)
    assert (state["yielded"], state["ahead"]) == (0, [2])
    again = read(batches, state=state)
    assert [item_of(again, seq) for seq in range(5)] == [[0], [1], [3], [4], [5]]
    assert again.batch(5) is None
    assert "ahead" not in state_after(reading, 3) and state_after(reading, 3)["yielded"] == 3


def test_the_states_of_datasets_move_with_their_batches() -> None:
    reading = read([[index] for index in range(6)], keeps_state=True)
    reading.any_order = True
    tasks = reading
    found = [tasks.task(seq) for seq in range(4)]
    assert [(task.lane, task.part.number, task.part.batch) for task in found] == [
        (0, 0, 0),
        (1, 1, 0),
        (0, 0, 1),
        (1, 1, 1),
    ]
    tasks.record_result(1, Result(3, 1, point=PartPoint(1, state="of worker 1")))
    tasks.move(1, 0)
    assert state_after(reading, 1)["datasets"] == [None, "of worker 1"]
    tasks.record_result(1, Result(3, 0, point=PartPoint(1, state="of worker 0")))
    assert state_after(reading, 2)["datasets"] == ["of worker 0", "of worker 1"]
    again = tasks.task(1)  # as after an interruption
    assert (again.lane, again.part.number, again.part.batch) == (0, 0, 0)
    reading.forget(3)
    assert state_after(reading, 3)["datasets"] == ["of worker 0", "of worker 1"]


@pytest.mark.parametrize(("count", "ahead"), [(0, 5), (2, 3), (1, 0), (8, 0), (9, 0)])
def test_a_state_is_that_of_the_delivered_batches_and_says_whether_the_epoch_is_over(count: int, ahead: int) -> None:
    reading = read(Resets(9), lanes=1)
    for seq in range(count + ahead):
        reading.batch(seq)
    state = state_after(reading, count)
    assert state["state"] == {"place": count, "epoch": 0}
    assert ahead or state["over"] is (count == 9)


def drawn(at: int | None = None, name: str = "SIGINT") -> Order:
    """Batches of two in random order, from a generator that interrupts itself before a batch, once; None: never."""
    left = [at]

    def items() -> Iterator[list[int]]:
        for number, batch in enumerate(torch.randperm(12).reshape(6, 2).tolist()):
            if left == [number]:
                left.clear()
                signal.raise_signal(getattr(signal, name))
            yield batch

    return Order(items, 6)


def seeded(sampler: Order, **given: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    return DataLoader(range(12), batch_sampler=sampler, **given)


# With workers, iter() draws the first batch, as torch's does: a signal in there leaves no iterator.
@pytest.mark.parametrize(("at", "workers"), [(at, workers) for workers in (0, 2) for at in range(workers > 0, 6)])
def test_a_sampler_that_a_signal_ended_is_started_again_where_it_was(at: int, workers: int, signal_name: str) -> None:
    given: dict[str, Any] = {"num_workers": workers, "thread_pool": True} if workers else {}
    expected = plain(seeded(drawn(), **given))
    iterator, found, interrupts = iter(seeded(drawn(at, signal_name), **given)), list[Any](), 0
    while len(found) < 7:
        try:
            found.append(next(iterator, None))
        except HANDLERS[signal_name][0]:
            interrupts += 1
    assert interrupts == 1 and found.pop() is None
    assert plain(found) == expected


@pytest.mark.parametrize("step", [9, pytest.param(1, marks=pytest.mark.slow)])
def test_an_interruption_at_any_line_that_reads_the_sampler_loses_no_batch(step: int, signal_name: str) -> None:
    interrupt = functools.partial(InterruptAt, modules=("sampler.py", "third_party.py"), name=signal_name)
    line, fired = 1, True
    while fired:
        whole, iterator = plain(seeded(drawn())), iter(seeded(drawn()))
        found, fired = next_interrupted(iterator, line, interrupt)
        assert plain([*found, *iterator]) == whole
        line += step
    assert line > 40


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("streams", [None, 4])
def test_an_epoch_named_between_iter_and_the_first_batch_reads_iterable_data(workers: int, streams: int | None) -> None:
    loader = DataLoader(Shared(), 4, num_workers=workers, seed=7, streams=streams, thread_pool=True)
    expected = [batch.tolist() for batch in loader]
    batches = iter(loader)
    loader.set_epoch(0)  # back from a higher one
    assert [batch.tolist() for batch in batches] == expected
