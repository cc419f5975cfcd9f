"""Batches reach the devices ahead of the consumer, past the host, and intact: on a device that does its work late."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from conftest import ahead, let_workers_finish, made
from devices_samples import GOOD, Checks, copies_on, place_now, placer_on
from injection import InterruptAt, next_interrupted
from simulated import Machine, SimulatedStreams, Stream
from stress import rows, stress

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import copies as module
from sharded_loader.devices import placement
from sharded_loader.devices.accelerator import REGISTERED
from sharded_loader.devices.copies import HOST_AHEAD, SMALL, PendingCopy
from sharded_loader.devices.placement import Placer
from sharded_loader.engine.pool import Pool

COUNT, WIDTH = 256, 2048


def dataset(count: int = COUNT) -> ArrayDataset:
    return rows(count, WIDTH)


class Consumer(Checks):
    """The first device of a `Machine` as the target of `stress.stress`."""

    def __init__(self, machine: Machine) -> None:
        super().__init__(machine)
        self.device = machine.devices[0]
        self.side = machine.new_stream(self.device)
        self.order = list(range(COUNT))

    def begin_epoch(self, indices: list[int]) -> None:
        self.order = indices

    def compare(self, batch: Any, first: int) -> None:  # type: ignore[override]
        values, labels = batch
        expected = np.array(self.order[first : first + len(labels)])
        super().compare(values, expected[:, None] * WIDTH + np.arange(WIDTH))
        super().compare(labels, expected)

    @contextmanager
    def beside(self, batch: Any) -> Iterator[None]:
        self.side.wait_event(self.machine.stream(self.device).record_event())
        with self.machine.on(self.device, self.side):
            yield
        for field in batch:
            self.machine.record_stream(field, self.side)

    def delay(self, rng: random.Random, loader: ShardedDataLoader) -> None:
        # Its streams are late anyway: here they catch up a little.
        self.machine.run(rng.randrange(20))

    def poison(self, shapes: Any) -> None:
        for shape, dtype in shapes:
            self.machine.fill(self.device, self.machine.allocate(self.device, torch.empty(shape, dtype=dtype)), 0x5A)

    def wrong(self) -> tuple[int, int]:
        self.machine.finish()
        return self.seen // 2, len(self.mismatched)


def stressed(machine: Machine, **options: Any) -> tuple[int, int]:
    with made(dataset(), 8, shuffle=True, seed=1, device=machine.devices[0], **options) as loader:
        return stress(Consumer(machine), loader, 150, seed=2)


@pytest.mark.costly
def test_batches_are_intact_however_they_are_used(machine: Machine, pool: Pool) -> None:
    seen, differing = stressed(machine, pool=pool)
    assert (seen > 100, differing, machine.registered) == (True, 0, {})


@pytest.mark.slow
@pytest.mark.parametrize("share", [True, 0.5, 0.1, "auto"])
def test_resident_batches_are_intact_however_they_are_used(machine: Machine, share: Any) -> None:
    if share == "auto":
        machine.memory_bytes = 6 * COUNT * WIDTH, 16 * COUNT * WIDTH  # room for half
    seen, differing = stressed(machine, resident=share)
    assert (seen > 100, differing) == (True, 0)


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["targets of copies are not waited for", "slots are given back at once"])
def test_a_library_that_is_careless_is_found_out(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """The stress sees what it is there to see."""
    finish = PendingCopy.finish

    def careless(pending: PendingCopy) -> Any:
        if broken.startswith("slots"):
            pending.copies.in_use.clear()
            return finish(pending)
        pending.targets.clear()
        return pending.batch

    monkeypatch.setattr(PendingCopy, "finish", careless)
    # Memory that torch pins is guarded; that of slots is not.
    monkeypatch.setattr(Placer, "empty", lambda self, shape, dtype: np.empty(shape, dtype))
    assert stressed(machine, num_workers=2)[1] > 0


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
                consumer.compare(batch, 8 * number)
                if number == 6:  # the last batch is copied, and then
                    (coming,) = [run for run in loader._pipeline.runs.values() if run.is_ahead]
                    let_workers_finish(loader, SimpleNamespace(run=coming), at_least=1)
            assert coming.epoch.number == epoch + 1
            assert coming.window[0].begun is not None
        del batch, coming
        assert consumer.done() == GOOD
    assert consumer.seen == 2 * 2 * 8


@pytest.mark.parametrize("shards", [1, 2])
def test_some_batches_are_begun_before_the_host_waits_and_shards_on_one_device_count_as_one(
    machine: Machine, shards: int
) -> None:
    """Otherwise two shards on a device would leave it half the steps to do while the host waits."""
    with ShardedDataLoader(dataset(), 8, devices=[machine.devices[0]] * shards) as loader:
        batches = iter(loader)
        for _ in range(HOST_AHEAD):
            next(batches)
        assert machine.blocked == 0
        next(batches)
        assert machine.blocked > 0
        del batches


def test_a_host_far_ahead_waits_before_sources_pile_up(machine: Machine) -> None:
    with ShardedDataLoader(dataset(), 4, device=machine.devices[0]) as loader:
        for _ in loader:
            assert len(machine.pinned) <= HOST_AHEAD + 2
    assert machine.blocked > 0


@pytest.mark.parametrize("chosen", [False, True], ids=["the default stream", "one of the user's"])
def test_a_copy_waits_for_what_the_consumer_did_before_on_its_stream(machine: Machine, chosen: bool) -> None:
    device, data = machine.devices[0], ArrayDataset(np.zeros((8, SMALL)), np.ones((8, SMALL)))
    mine = machine.new_stream(device) if chosen else machine.stream(device)
    with ShardedDataLoader(data, 8, device=device) as loader, machine.on(device, mine):
        next(iter(loader))
    home, side = mine.name, machine.streams[device][-1].name
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


@pytest.mark.parametrize("how", ["forgotten", "dropped", "interrupted"])
def test_a_batch_that_is_never_handed_out_keeps_its_memory_until_its_copy_is_done(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    copies = copies_on(machine)
    pending = copies.begin([torch.arange(1000)])
    if how == "dropped":  # as after a break
        pending.drop()
    elif how == "interrupted":
        monkeypatch.setattr(Stream, "wait_event", mock.Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            pending.finish()
    del pending
    gc.collect()
    mine = machine.allocate(machine.devices[0], torch.empty(1000, dtype=torch.int64)).zero_()
    machine.finish()
    assert mine.sum() == 0


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_what_an_interrupted_begin_has_given_to_the_device_is_kept_until_it_was_read_or_the_context_breaks(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: type[BaseException], broken: bool
) -> None:
    copies, copy = copies_on(machine), SimulatedStreams.copy

    def interrupted(streams: SimulatedStreams, *tensors: Any) -> None:
        copy(streams, *tensors)
        raise error

    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(SimulatedStreams, "copy", interrupted)
        copies.begin([torch.arange(9)]).finish()
    gc.collect()
    assert len(machine.pinned) == 1
    machine.has_failed = broken
    if not broken:
        copies.begin([torch.arange(3)]).finish()
        kept = [[len(tensors) for tensors in kept] for _, kept in copies.in_use]
        assert kept == [[1, 1], [1, 0]]  # sources and targets
    assert copies.close()
    gc.collect()
    assert len(copies.in_use) == 0 and (broken or len(machine.pinned) == 0)
    machine.has_failed = False
    module.LOST.clear()


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
def test_the_device_is_asked_for_once_by_the_consumer_s_thread(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, worker_pool: Pool
) -> None:
    """In a thread that reads, ``cuda`` is the first one, whatever the user has set."""
    asked: list[threading.Thread] = []

    def indexed(device: torch.device) -> torch.device:
        asked.append(threading.current_thread())
        return machine.devices[1]

    monkeypatch.setattr(placement, "indexed", indexed)
    with ShardedDataLoader(dataset(), 8, device=machine.devices[0], pool=worker_pool) as loader:
        assert asked == []  # a loader that is only constructed touches no device
        for _ in range(2):
            list(loader)
        assert len(machine.streams[machine.devices[1]]) == 2  # one of them copies
    assert asked == [threading.current_thread()]


def test_each_device_has_one_copy_stream_in_all_epochs(machine: Machine, pool: Pool) -> None:
    with ShardedDataLoader(dataset(), 64, devices=machine.devices, pool=pool) as loader:
        for _ in range(5):
            for _ in loader:
                machine.run(3)
    assert len({name for kind, name in machine.log if kind == "copy"}) == 2
    assert [len(streams) for streams in machine.streams.values()] == [2, 2]  # the default one, and one for copies


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
                consumer.compare(batch, number)
                number += 1
                machine.run(2)
            del batch, got
            if number > COUNT - 4:
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


def test_only_devices_with_streams_are_copied_to_ahead(machine: Machine) -> None:
    meta, cpu = torch.device("meta"), torch.device("cpu")
    for devices, count in ((None, 0), ([cpu, cpu], 0), ([meta], 0), ([cpu, machine.devices[0]], 3)):
        with ShardedDataLoader(dataset(64), 8, devices=devices) as loader:
            loader.device_prefetch = 3
            assert loader.device_prefetch == count
            with pytest.raises(TypeError, match="device_prefetch must be an integer, got 'many'"):
                loader.device_prefetch = "many"  # type: ignore[assignment]


def columns(count: int, width: int, rows: int = 8) -> ArrayDataset:
    """Columns of which each differs."""
    values = np.arange(rows * width, dtype=np.float32).reshape(rows, width)
    return ArrayDataset({f"c{number}": values + number for number in range(count)})


@pytest.mark.parametrize("count, width, copies", [(256, 4000, 1), (15, 4000, 15), (16, 20_000, 16)])
def test_many_columns_of_medium_size_are_one_copy_where_they_lie_in_one_slot(
    machine: Machine, worker_pool: Pool, count: int, width: int, copies: int
) -> None:
    data, device = columns(count, width), machine.devices[0]
    in_slots = isinstance(worker_pool, ProcessPool)
    with ShardedDataLoader(data, 4, device=device, pool=worker_pool) as loader:
        for number, batch in enumerate(loader):
            machine.finish()
            for name, rows in batch.items():
                assert torch.equal(rows, torch.from_numpy(data[4 * number : 4 * number + 4][name]))
            batch["c0"] += 1  # changes no other
    side = f"{device} 1"  # records an event behind each batch
    of_one = machine.log.count(("copy", side)) / machine.log.count(("record", side))
    assert of_one == (copies if in_slots else count)
    assert not machine.faults


def test_torch_is_not_asked_whether_our_own_segments_are_pinned(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(SimulatedStreams, "is_pinned", lambda streams, host: asked.append(host.nbytes))
    with ShardedDataLoader(columns(1, 20_000), 4, device=machine.devices[0], num_workers=2) as loader:
        for _ in loader:
            machine.finish()
    assert not asked and not REGISTERED and not machine.faults


# -- small things of one copy stream ---------------------------------------------------------------------------


def test_a_batch_without_tensors_asks_nothing_of_the_device(machine: Machine) -> None:
    assert copies_on(machine).begin(["text", 3]).finish() == ["text", 3]
    assert (machine.log, len(machine.streams[machine.devices[0]])) == ([], 1)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "elsewhere": lambda: torch.ones(2, device="meta"),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2)]),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    "with a gradient": lambda: torch.ones(2, requires_grad=True),
    "of a class": lambda: torch.nn.Parameter(torch.ones(2), requires_grad=False),
}


@pytest.mark.parametrize("kind", TENSORS)
@pytest.mark.filterwarnings("ignore")  # torch says of some kinds that it is going to drop them
def test_tensors_that_are_more_than_their_values_move_themselves(kind: str) -> None:
    assert not module._is_plain(TENSORS[kind]())
