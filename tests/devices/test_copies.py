"""Batches reach the devices ahead of the consumer, past the host, and intact: on a device that does its work late."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ahead
from devices_samples import GOOD, Checks, copied, copies_on, let_workers_finish, place_now, placer_on
from injection import InterruptAt, next_interrupted
from simulated import Machine, SimulatedStreams
from stress import order_of

from sharded_loader import ArrayDataset, ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import HOST_AHEAD, SMALL
from sharded_loader.engine.pool import Pool

ROWS, WIDTH = 256, 1024
VALUES = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)


def dataset(rows: int = ROWS) -> ArrayDataset:
    return ArrayDataset(VALUES[:rows], np.arange(rows))


class Consumer(Checks):
    """Gives a device's streams work that reads batches of the dataset, and compares what it finds."""

    def use(self, shard: list[torch.Tensor], indices: Any, device: torch.device | None = None) -> None:
        self.compare(shard[0], VALUES[indices], device=device)
        self.compare(shard[1], np.array(indices), device=device)


@pytest.mark.costly(2)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_intact_whatever_the_device_does_when(machine: Machine, pool: Pool, seed: int) -> None:
    rng, consumer, held = random.Random(seed), Consumer(machine), []
    machine.random.seed(seed)
    with ShardedDataLoader(dataset(), 32, shuffle=True, seed=seed, devices=machine.devices, pool=pool) as loader:
        for epoch in range(6):
            order, leave = order_of(loader, epoch), rng.choice([None, None, 3, 5])
            for number, shards in enumerate(loader):
                if number == leave:
                    break
                for device, shard, begin in zip(machine.devices, shards, (0, 16), strict=True):
                    indices = order[32 * number + begin : 32 * number + begin + 16]
                    if rng.random() < 0.9:  # else dropped at once
                        consumer.use(shard, indices, device)
                    if rng.random() < 0.2:
                        held.append((shard, indices, device))
                del shard, shards
                while len(held) > 4:
                    consumer.use(*held.pop(rng.randrange(len(held))))
                machine.run(rng.choice([0, 0, 1, 5, 40]))
        assert consumer.done() == GOOD
    assert consumer.seen > 100
    assert machine.registered == {}


@pytest.mark.costly(2)
def test_the_host_never_waits_for_a_device_that_keeps_step(machine: Machine, pool: Pool) -> None:
    with ShardedDataLoader(dataset(), 8, devices=machine.devices, pool=pool) as loader:
        for _ in loader:
            machine.finish()
    assert machine.blocked == 0


def test_two_batches_are_copied_ahead_and_none_after_a_break(machine: Machine, worker_pool: Pool) -> None:
    device = machine.devices[0]
    with ShardedDataLoader(dataset(64), 8, device=device, pool=worker_pool, prefetch=4) as loader:
        batches = iter(loader)
        next(batches)
        let_workers_finish(loader, batches)
        next(batches)
        assert [entry.begun is not None for entry in batches.run.window][:3] == [True, True, False]
        machine.finish()
        assert machine.in_use > 0
        del batches
        machine.finish()
        machine.allocate(device, torch.empty(1))  # torch looks then which memory has come back
        assert machine.in_use <= 1


def test_the_first_batches_of_the_next_epoch_are_copied_ahead(machine: Machine, worker_pool: Pool) -> None:
    consumer, device = Consumer(machine), machine.devices[0]
    with ahead(ShardedDataLoader(dataset(64), 8, device=device, pool=worker_pool, prefetch=16), True) as loader:
        for epoch in range(2):
            for number, batch in enumerate(loader):
                consumer.use(batch, range(8 * number, 8 * number + 8))
                if number == 6:  # the last batch is copied, and then
                    (coming,) = [run for run in loader._pipeline.runs.values() if run.is_ahead]
                    while not coming.window or coming.window[0].result is None:
                        loader._pipeline.runs.store(loader._pipeline.pool.wait(True))
            assert coming.epoch.number == epoch + 1
            assert coming.window[0].begun is not None
        del batch, coming
        assert consumer.done() == GOOD
    assert consumer.seen == 2 * 2 * 8


def test_shards_of_one_batch_on_one_device_count_as_one_batch(machine: Machine) -> None:
    """Otherwise two shards on a device would leave it half the steps to do while the host waits."""
    with ShardedDataLoader(dataset(), 8, devices=[machine.devices[0]] * 2) as loader:
        batches = iter(loader)
        for _ in range(HOST_AHEAD):
            next(batches)
        assert machine.blocked == 0
        next(batches)
        assert machine.blocked > 0
        del batches


@pytest.mark.slow
def test_device_memory_stays_flat_with_workers_that_are_ahead_too(machine: Machine, worker_pool: Pool) -> None:
    device = machine.devices[0]
    with ShardedDataLoader(dataset(), 8, device=device, pool=worker_pool) as loader:
        for _ in range(10):
            for batch in loader:
                machine.kernel(device, batch[1], lambda found: None)
        machine.finish()
    # In the consumer's hands, being handed out, and two ahead; two tensors each.
    assert machine.peak <= 2 * 4


def test_a_host_far_ahead_waits_before_sources_pile_up(machine: Machine) -> None:
    with ShardedDataLoader(dataset(), 4, device=machine.devices[0]) as loader:
        for _ in loader:
            assert len(machine.pinned) <= HOST_AHEAD + 2
    assert machine.blocked > 0


def test_a_copy_waits_for_what_the_consumer_did_before(machine: Machine) -> None:
    data = ArrayDataset(np.zeros((8, SMALL)), np.ones((8, SMALL)))
    with ShardedDataLoader(data, 8, device=machine.devices[0]) as loader:
        next(iter(loader))
    home, side = (stream.name for stream in machine.streams[machine.devices[0]])
    assert machine.log == [
        ("allocate", home),
        ("allocate", home),
        ("record", home),  # after the allocations
        ("wait", side),
        ("copy", side),
        ("copy", side),
        ("record", side),
        ("wait", home),
    ]


def test_the_user_s_choice_of_stream_is_respected(machine: Machine) -> None:
    device = machine.devices[0]
    mine = machine.new_stream(device)
    with ShardedDataLoader(dataset(), 8, device=device) as loader, machine.on(device, mine):
        next(iter(loader))
    assert ("wait", mine.name) in machine.log
    assert not any(name.endswith("default") for _, name in machine.log)


def test_a_batch_handed_out_on_another_stream_than_it_was_begun_on_is_recorded_there(machine: Machine) -> None:
    device, copies, checks = machine.devices[0], copies_on(machine), Checks(machine)
    other = machine.new_stream(device)
    pending = copies.begin([torch.arange(1000)])
    with machine.on(device, other):
        (batch,) = pending.finish()
        del pending
        checks.compare(batch, np.arange(1000))
        del batch
    again = copies.begin([torch.zeros(1000, dtype=torch.int64)])  # its memory must not be had by anybody yet
    assert checks.done() == GOOD
    assert ("record_use", other.name) in machine.log
    again.finish()


@pytest.mark.parametrize("dropped", [False, True])
def test_a_batch_that_is_never_handed_out_keeps_its_memory_until_its_copy_is_done(
    machine: Machine, dropped: bool
) -> None:
    copies = copies_on(machine)
    abandoned = copies.begin([torch.arange(1000)])
    if dropped:  # as after a break
        abandoned.drop()
    del abandoned
    gc.collect()
    mine = machine.allocate(machine.devices[0], torch.empty(1000, dtype=torch.int64)).zero_()
    machine.finish()
    assert mine.sum() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("cannot copy")])
def test_what_an_interrupted_begin_has_given_to_the_device_is_kept(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    copies, copy = copies_on(machine), SimulatedStreams.copy

    def interrupted(streams: SimulatedStreams, *tensors: list[torch.Tensor]) -> None:
        copy(streams, *tensors)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedStreams, "copy", interrupted)
        with pytest.raises(type(error)):
            copies.begin([torch.arange(9)])
    copies.begin([torch.arange(3)]).finish()
    assert [[len(tensors) for tensors in kept] for _, kept in copies.in_use] == [[1, 1], [1, 0]]  # sources and targets
    assert copies.drain()
    assert (len(copies.in_use), machine.faults) == (0, [])


def test_one_thread_may_wait_for_the_copies_while_another_begins_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a `close` from elsewhere: a copy that nobody has waited for must not be forgotten."""
    copies = copies_on(machine)
    copies.begin([torch.arange(1000)]).finish()
    other = threading.Thread(target=lambda: copies.begin([torch.arange(1000)]).finish())
    rest = SimulatedStreams.rest

    def slow(streams: SimulatedStreams, seconds: float) -> None:
        rest(streams, seconds)
        if not other.ident:
            other.start()
            other.join(0.1)

    monkeypatch.setattr(SimulatedStreams, "rest", slow)
    copies.drain()
    other.join()
    (kept,) = copies.in_use
    assert not kept[0].passed
    copies.drain()


def test_a_forked_child_does_not_wait_for_the_copies_of_its_parent(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = placer_on(machine)
    place_now(placed, [np.arange(1000)])
    close, pid = placed.closer(), os.getpid()
    with monkeypatch.context() as forked:
        forked.setattr(os, "getpid", lambda: pid + 1)
        assert not close()  # what is pinned stays
    assert machine.blocked == 0
    assert close()
    assert machine.blocked > 0


@pytest.mark.costly
def test_the_device_is_asked_for_by_the_consumer_s_thread_alone(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, worker_pool: Pool
) -> None:
    """In a thread that reads, ``cuda`` is the first one, whatever the user has set."""
    asked: list[threading.Thread] = []

    def indexed(device: torch.device) -> torch.device:
        asked.append(threading.current_thread())
        return machine.devices[1]

    monkeypatch.setattr(placement, "indexed", indexed)
    with ShardedDataLoader(dataset(), 8, device=machine.devices[0], pool=worker_pool) as loader:
        for _ in range(2):
            list(loader)
    assert set(asked) == {threading.current_thread()}


def test_each_device_has_one_copy_stream_in_all_epochs(machine: Machine, pool: Pool) -> None:
    with ShardedDataLoader(dataset(), 64, devices=machine.devices, pool=pool) as loader:
        for _ in range(5):
            for _ in loader:
                machine.run(3)
    assert len({name for kind, name in machine.log if kind == "copy"}) == 2
    assert [len(streams) for streams in machine.streams.values()] == [2, 2]  # the default one, and one for copies


def test_an_array_that_stands_in_several_places_is_copied_once_to_each_shard_of_a_device(machine: Machine) -> None:
    shared = np.arange(10)

    def batchify(samples: list[Any]) -> Any:
        return {"a": shared, "b": [shared, "text"], "n": None, "own": np.array(samples)}

    with ShardedDataLoader(range(4), 4, batchify_fn=batchify, devices=[machine.devices[0]] * 2) as loader:
        shards = next(iter(loader))
        machine.finish()
    assert copied(machine) == 2  # once for each shard
    for shard, own in zip(shards, ([0, 1], [2, 3]), strict=True):
        assert shard["a"] is shard["b"][0] and shard["a"].tolist() == list(range(10))
        assert (shard["b"][1], shard["n"], shard["own"].tolist()) == ("text", None, own)


MODULES = ("iterator.py", "pipeline.py", "placement.py", "copies.py")


@pytest.mark.parametrize("step", [29, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(300)])])
@pytest.mark.costly
def test_an_interrupt_at_every_line_leaves_values_and_order_intact(
    machine: Machine, new_pool: Callable[..., Pool], step: int
) -> None:
    consumer, device = Consumer(machine), machine.devices[0]
    with ShardedDataLoader(dataset(), 1, device=device, pool=new_pool()) as loader:
        line, fired, batches, number = 0, True, iter(loader), 0
        while fired:
            line += step
            got, fired = next_interrupted(batches, line, lambda at: InterruptAt(at, MODULES))
            for batch in (*got, next(batches)):
                consumer.use(batch, [number])
                number += 1
                machine.run(2)
            del batch, got
            if number > ROWS - 4:
                batches, number = iter(loader), 0
        assert consumer.done() == GOOD
    assert line > 100


@pytest.mark.costly(2)
@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_how_many_are_copied_ahead_may_be_chosen(machine: Machine, new_pool: Callable[..., Pool], ahead: int) -> None:
    with ShardedDataLoader(dataset(64), 8, device=machine.devices[0], pool=new_pool()) as loader:
        assert loader.device_prefetch == 2
        loader.device_prefetch = ahead
        assert loader._pipeline.min_ready > ahead  # the pool is asked for those too
        for number, (_, rows) in enumerate(loader):
            machine.finish()
            assert rows.tolist() == list(range(8 * number, 8 * number + 8))
    # In the consumer's hands, being handed out, and ahead; two tensors each.
    assert machine.peak <= 2 * (2 + ahead)


def test_without_accelerators_nothing_is_copied_ahead() -> None:
    with ShardedDataLoader(dataset(64), 8, devices=["cpu", "cpu"]) as loader:
        loader.device_prefetch = 3
        assert loader.device_prefetch == 0
        with pytest.raises(TypeError, match="device_prefetch must be an integer, got 'many'"):
            ShardedDataLoader(dataset(64), 8).device_prefetch = "many"  # type: ignore[assignment]
