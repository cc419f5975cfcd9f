"""A device without memory: less is copied ahead, it is tried again, and at last it is that batch's error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices_samples import PLAIN, SHARDED, begun, entries, place_now
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import SMALL
from sharded_loader.devices.placement import PAUSE, Placer
from sharded_loader.engine.pool import Pool


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(64))


def test_what_is_copied_ahead_gives_way(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2  # one in the consumer's hands, and one more
    with ShardedDataLoader(dataset(), 4, device=machine.devices[0], pool=worker_pool) as loader:
        seen = []
        for batch in loader:
            machine.finish()
            seen.append(batch.tolist())
        assert seen == [list(range(i, i + 4)) for i in range(0, 64, 4)]
        assert loader._placement.ahead == 0


@pytest.mark.slow
def test_a_device_that_stays_full_is_not_waited_for_at_every_step(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2
    data = ArrayDataset(np.arange(4 * 2 * PAUSE))
    with ShardedDataLoader(data, 4, device=machine.devices[0], pool=worker_pool) as loader:
        for batch in loader:
            held = batch  # while the next one is asked for
            machine.finish()
        del batch, held
    # From two ahead to one, to none; and one try later.
    assert (machine.caches_emptied, machine.faults) == (3, [])


@pytest.mark.slow
def test_tries_that_fail_become_rare(machine: Machine) -> None:
    machine.blocks = 2
    placed = Placer([machine.devices[0]], pin_memory=False)
    tries = []
    for step in range(20 * PAUSE):
        place_now(placed, np.arange(4))
        machine.finish()
        if placed.ahead and step:
            tries.append(step)
            placed.make_room()
    apart = np.diff(tries[2:])
    assert apart.tolist() == [2 * PAUSE, 4 * PAUSE, 8 * PAUSE]
    placed.copy_ahead(1)  # the user begins anew
    placed.make_room()
    for _ in range(PAUSE):
        assert placed.ahead == 0
        place_now(placed, np.arange(4))
        machine.finish()
    assert placed.ahead == 1


@pytest.mark.slow
def test_the_time_between_two_tries_has_a_bound(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "LONGEST_PAUSE", 3 * PAUSE)
    placed, tries = Placer([machine.devices[0]], pin_memory=False), []
    placed.copy_ahead(1)
    placed.make_room()
    for step in range(11 * PAUSE):
        place_now(placed, np.arange(4))
        machine.finish()
        if placed.ahead:
            tries.append(step)
            placed.make_room()
    assert np.diff(tries).tolist() == [2 * PAUSE, 3 * PAUSE, 3 * PAUSE]


def test_only_a_try_that_fails_makes_the_next_one_rarer(machine: Machine) -> None:
    placed, steps = Placer([machine.devices[0]], pin_memory=False), 0
    placed.make_room()
    for _ in range(PAUSE):
        place_now(placed, np.arange(4))
        machine.finish()
    for _ in range(2):  # the try has failed, and the batch before it does not fit either
        placed.make_room()
    while not placed.ahead:
        place_now(placed, np.arange(4))
        machine.finish()
        steps += 1
    assert steps == 2 * PAUSE


def test_all_devices_make_room(machine: Machine) -> None:
    placed = Placer([torch.device("cpu"), *machine.devices], pin_memory=False)
    place_now(placed, [np.arange(4)] * 3, SHARDED)
    placed.make_room()
    streams = [copies for copies in placed.copies.values() if copies is not None]
    assert [len(copies.kept) for copies in streams] == [0, 0]
    assert machine.caches_emptied == 2


@pytest.mark.costly
def test_a_device_that_has_room_again_is_sent_batches_ahead_again(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2
    data = ArrayDataset(np.arange(4 * 4 * PAUSE))
    with ShardedDataLoader(data, 4, device=machine.devices[0], pool=worker_pool) as loader:
        assert loader.device_prefetch == 2
        for number, batch in enumerate(loader):
            held = batch
            machine.finish()
            if number == 8:
                assert loader.device_prefetch == 0
                machine.blocks = None
        del batch, held
        assert loader.device_prefetch == 2
    assert machine.caches_emptied == 2


def test_what_the_user_sets_is_tried_at_once(machine: Machine) -> None:
    placed = Placer([machine.devices[0]], pin_memory=False)
    placed.make_room()
    assert placed.ahead == 1
    placed.copy_ahead(3)
    assert placed.ahead == 3
    for _ in range(5):
        placed.make_room()
    assert placed.ahead == 0


def test_the_error_stands_in_its_batch_s_place_and_says_where(machine: Machine, pool: Pool) -> None:
    machine.blocks = 1
    with ShardedDataLoader(dataset(), 4, devices=[machine.devices[1]], pool=pool) as loader:
        batches = iter(loader)
        (held,) = next(batches)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            next(batches)
        notes = "\n".join(getattr(caught.value, "__notes__", []))
        assert "copied to privateuseone:1" in notes
        assert "epoch 0, batch 1" in notes
        assert machine.caches_emptied > 0
        del held, caught
        (third,) = next(batches)
        machine.finish()
        assert third.tolist() == [8, 9, 10, 11]


def test_there_is_always_the_next_batch_even_if_the_one_before_it_is_held(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 3
    held = []
    with ShardedDataLoader(dataset(), 4, device=machine.devices[0], pool=worker_pool) as loader:
        batches = iter(loader)
        for _ in range(3):
            held.append(next(batches))
        machine.finish()
    assert [batch.tolist() for batch in held] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_second_try_has_the_memory_of_the_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a batch of two parts the first found room: it must not be in the way of the batch itself."""
    device, in_use = machine.devices[0], []

    def empty_cache(streams: SimulatedStreams) -> None:
        machine.finish()
        in_use.append(machine.allocated - sum(map(len, machine._free.values())))
        machine.empty_cache()

    monkeypatch.setattr(SimulatedStreams, "empty_cache", empty_cache)
    pair = ArrayDataset(np.zeros((64, SMALL)), np.ones((64, SMALL)))
    machine.blocks = 3
    with ShardedDataLoader(pair, 4, device=device) as loader:
        batches = iter(loader)
        held = next(batches)
        with pytest.raises(torch.OutOfMemoryError):
            next(batches)
        assert in_use == [2]
        del held
        next(batches)


def test_what_is_copied_ahead_gives_its_memory_to_a_batch_of_another_size(machine: Machine) -> None:
    """The blocks have to go back to the device: the allocator of torch keeps them for tensors of their size."""
    placed, window = Placer([machine.devices[0]], pin_memory=False), entries(np.arange(100), np.arange(4))
    window[1].begun = placed._begin(np.arange(4), PLAIN)
    machine.blocks = 1
    batch = placed.place(window)
    machine.finish()
    assert batch.tolist() == list(range(100))
    assert begun(window) == [0]


@pytest.mark.parametrize("blocks", [2, 3])
def test_parts_of_a_batch_that_does_not_fit_ahead_are_not_in_the_way(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, blocks: int
) -> None:
    placed, in_use, device = Placer([machine.devices[0]], pin_memory=False), [], machine.devices[0]

    def empty_cache(streams: SimulatedStreams) -> None:
        machine.finish()
        in_use.append(machine.allocated - sum(map(len, machine._free.values())))
        machine.empty_cache()

    monkeypatch.setattr(SimulatedStreams, "empty_cache", empty_cache)
    machine.blocks = blocks
    window = entries(*([np.arange(SMALL), np.arange(SMALL + 1)] for _ in range(2)))
    first, second = placed.place(window)
    assert in_use == [2]  # of the first batch
    machine.finish()
    assert (first.tolist(), second.tolist()) == ([*range(SMALL)], [*range(SMALL + 1)])
    assert (first.device, begun(window), device.index) == (torch.device("cpu"), [0], 0)


def test_an_error_that_is_not_the_memorys_is_not_tried_again(machine: Machine) -> None:
    asked = []

    class Unmovable:
        def pin_memory(self) -> object:
            asked.append(self)
            raise ValueError("this cannot be pinned")

        def to(self, device: object) -> object:
            raise AssertionError

    with pytest.raises(ValueError, match="cannot be pinned"):
        Placer([machine.devices[0]], pin_memory=False).place(entries(Unmovable()))
    assert (len(asked), machine.caches_emptied) == (1, 0)


def test_a_device_that_stays_full_is_tried_twice_for_each_batch(machine: Machine) -> None:
    machine.blocks = 0
    with pytest.raises(torch.OutOfMemoryError):
        Placer([machine.devices[0]], pin_memory=False).place(entries(np.arange(4)))
    assert machine.caches_emptied == 1
