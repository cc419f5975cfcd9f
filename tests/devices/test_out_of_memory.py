"""A device without memory: less is copied ahead, it is tried again, and at last it is that batch's error."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from devices_samples import SHARDED, Refusing, begun, entries, place_now, placer_on
from simulated import Machine

from sharded_loader import ArrayDataset, ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import SMALL
from sharded_loader.devices.placement import PAUSE, Placer
from sharded_loader.engine.pool import Pool

DATA = ArrayDataset(np.arange(64))


def place_one(placed: Placer, machine: Machine) -> None:
    place_now(placed, np.arange(4))
    machine.finish()


@pytest.fixture
def in_use(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many blocks were in use when the cache was emptied, after all work."""
    found, empty_cache = [], machine.empty_cache

    def noted() -> None:
        machine.finish()
        found.append(machine.in_use)
        empty_cache()

    monkeypatch.setattr(machine, "empty_cache", noted)
    return found


def test_what_is_copied_ahead_gives_way(machine: Machine, worker_pool: Pool) -> None:
    machine.blocks = 2  # one in the consumer's hands, and one more
    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=worker_pool) as loader:
        seen = []
        for batch in loader:
            machine.finish()
            seen.append(batch.tolist())
        assert seen == [list(range(i, i + 4)) for i in range(0, 64, 4)]
        assert loader.device_prefetch == 0


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
@pytest.mark.parametrize("longest", [placement.LONGEST_PAUSE, 3 * PAUSE])
def test_tries_that_fail_become_rare_within_a_bound(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    monkeypatch.setattr(placement, "LONGEST_PAUSE", longest)
    placed, tries = placer_on(machine), []
    placed.copy_ahead(1)
    placed.make_room()
    for step in range(20 * PAUSE):
        place_one(placed, machine)
        if placed.ahead:
            tries.append(step)
            placed.make_room()
    assert np.diff(tries)[:3].tolist() == [min(2**n * PAUSE, longest) for n in (1, 2, 3)]
    placed.copy_ahead(1)  # the user begins anew
    placed.make_room()
    for _ in range(PAUSE):
        assert placed.ahead == 0
        place_one(placed, machine)
    assert placed.ahead == 1


def test_only_a_try_that_fails_makes_the_next_one_rarer(machine: Machine) -> None:
    placed, steps = placer_on(machine), 0
    placed.make_room()
    for _ in range(PAUSE):
        place_one(placed, machine)
    for _ in range(2):  # the try has failed, and the batch before it does not fit either
        placed.make_room()
    while not placed.ahead:
        place_one(placed, machine)
        steps += 1
    assert steps == 2 * PAUSE


def test_all_devices_make_room(machine: Machine) -> None:
    placed = Placer([torch.device("cpu"), *machine.devices], pin_memory=False)
    place_now(placed, [np.arange(4)] * 3, SHARDED)
    placed.make_room()
    assert [len(copies.kept) for copies in placed.copies.values() if copies is not None] == [0, 0]
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
    placed = placer_on(machine)
    placed.make_room()
    assert placed.ahead == 1
    placed.copy_ahead(3)
    assert placed.ahead == 3
    for _ in range(5):
        placed.make_room()
    assert placed.ahead == 0


def test_the_error_stands_in_its_batch_s_place_and_says_where(machine: Machine, pool: Pool) -> None:
    machine.blocks = 1
    with ShardedDataLoader(DATA, 4, devices=[machine.devices[1]], pool=pool) as loader:
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
    with ShardedDataLoader(DATA, 4, device=machine.devices[0], pool=worker_pool) as loader:
        batches = iter(loader)
        for _ in range(3):
            held.append(next(batches))
        machine.finish()
    assert [batch.tolist() for batch in held] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_a_second_try_has_the_memory_of_the_first(machine: Machine, in_use: list[int]) -> None:
    """Of a batch of two parts the first found room: it must not be in the way of the batch itself."""
    pair = ArrayDataset(np.zeros((64, SMALL)), np.ones((64, SMALL)))
    machine.blocks = 3
    with ShardedDataLoader(pair, 4, device=machine.devices[0]) as loader:
        batches = iter(loader)
        held = next(batches)
        with pytest.raises(torch.OutOfMemoryError):
            next(batches)
        assert in_use == [2]
        del held
        next(batches)


def test_what_is_copied_ahead_gives_its_memory_to_a_batch_of_another_size(machine: Machine) -> None:
    """The blocks have to go back to the device: the allocator of torch keeps them for tensors of their size."""
    placed, window = placer_on(machine), entries(np.arange(4), np.arange(4))
    held = placed.place(window)
    machine.blocks = machine.allocated
    window = [*entries(np.arange(100)), window[1]]
    batch = placed.place(window)
    machine.finish()
    assert (batch.tolist(), held.tolist()) == (list(range(100)), list(range(4)))
    assert begun(window) == [0]


@pytest.mark.parametrize("blocks", [2, 3])
def test_parts_of_a_batch_that_does_not_fit_ahead_are_not_in_the_way(
    machine: Machine, in_use: list[int], blocks: int
) -> None:
    machine.blocks = blocks
    window = entries(*([np.arange(SMALL), np.arange(SMALL + 1)] for _ in range(2)))
    first, second = placer_on(machine).place(window)
    assert in_use == [2]  # of the first batch
    machine.finish()
    assert (first.tolist(), second.tolist(), begun(window)) == ([*range(SMALL)], [*range(SMALL + 1)], [0])


def test_an_error_that_is_not_the_memorys_is_not_tried_again(machine: Machine) -> None:
    refusing = Refusing()
    with pytest.raises(ValueError, match="cannot be pinned"):
        placer_on(machine).place(entries(refusing))
    assert (refusing.tries, machine.caches_emptied) == (1, 0)


def test_a_device_that_stays_full_is_tried_twice_for_each_batch(machine: Machine) -> None:
    machine.blocks = 0
    with pytest.raises(torch.OutOfMemoryError):
        placer_on(machine).place(entries(np.arange(4)))
    assert machine.caches_emptied == 1
