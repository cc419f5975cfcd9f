"""`Placer`: each shard on its device, in one step or in two, memory for batches, and what it does without any."""

from __future__ import annotations

import mmap
import signal
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from devices_samples import SHARDED, Refusing, begun, copied, entries, place_now, placer_on
from injection import TimeIsUp
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ShardedDataLoader
from sharded_loader.devices import placement
from sharded_loader.devices.copies import CLOSING_SECONDS, SMALL, CopyStream, PendingCopy
from sharded_loader.devices.placement import PAUSE, Placer, placement_error
from sharded_loader.engine.messages import NOTHING, Task
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.arena import ReusedMemory

CPU = torch.device("cpu")


@pytest.fixture
def time_is_up() -> Iterator[None]:
    """A signal handler that raises."""

    def handler(number: int, frame: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGINT, handler)
    yield
    signal.signal(signal.SIGINT, before)


# -- one step -------------------------------------------------------------------------------------------------


def test_in_host_memory_arrays_become_tensors_over_the_same_memory() -> None:
    placed, array = Placer(None, pin_memory=False), np.arange(4)
    batch = place_now(placed, {"x": array, "name": "a"})
    array[0] = 7
    assert (batch["x"].tolist(), batch["name"]) == ([7, 1, 2, 3], "a")
    assert (placed.asynchronous, placed.capture_probes, placed.ahead) == ([], [], 0)


@pytest.mark.parametrize("devices", [None, [CPU, CPU]])
def test_shards_in_host_memory_stay_a_list(devices: list[torch.device] | None) -> None:
    first, second = place_now(Placer(devices, pin_memory=False), [np.arange(2), np.arange(3)], SHARDED)
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 1, 2])


def test_each_shard_goes_to_its_device(machine: Machine) -> None:
    placed = Placer([machine.devices[0], CPU, torch.device("meta")], pin_memory=False)
    host = [np.arange(2), np.arange(3), np.arange(4)]
    first, second, third = place_now(placed, host, SHARDED)
    machine.finish()
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 1, 2])
    assert not np.shares_memory(second.numpy(), host[1])  # it may lie in page-locked memory
    assert (third.device.type, len(third)) == ("meta", 4)
    assert copied(machine) == 1


def test_a_batch_may_have_fewer_shards_than_devices(machine: Machine) -> None:
    (only,) = place_now(Placer(machine.devices, pin_memory=False), [np.arange(2)], SHARDED)
    machine.finish()
    assert only.tolist() == [0, 1]


# -- two steps ------------------------------------------------------------------------------------------------


def test_what_is_begun_waits_until_it_is_finished(machine: Machine) -> None:
    placed, window = placer_on(machine), entries(*(np.full(3, number) for number in range(3)))
    batches = [placed.place(window[number:]) for number in range(3)]
    machine.finish()
    assert [batch.tolist() for batch in batches] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert placed.end_epoch() is None
    assert placed.closer()()


def test_what_is_on_its_device_passes_through(machine: Machine) -> None:
    placed, tensor = Placer(machine.devices, pin_memory=False), torch.arange(3)
    first, second = place_now(placed, [PendingCopy({"x": tensor}), np.arange(2)], SHARDED)
    machine.finish()
    assert first["x"] is tensor
    assert second.tolist() == [0, 1]
    assert place_now(placer_on(machine), PendingCopy(tensor)) is tensor
    assert copied(machine) == 1


def test_only_copy_streams_copy_ahead(machine: Machine) -> None:
    for devices in (None, [CPU], [torch.device("meta")]):
        placed = Placer(devices, pin_memory=False)
        placed.copy_ahead(3)
        assert placed.ahead == 0
    placed = Placer([CPU, machine.devices[0]], pin_memory=False)
    placed.copy_ahead(3)
    assert placed.ahead == 3


# -- batch after batch ----------------------------------------------------------------------------------------


def test_the_batches_behind_the_next_one_are_begun_up_to_the_first_that_is_not_finished(machine: Machine) -> None:
    placed = placer_on(machine)
    placed.copy_ahead(4)
    window = entries(*map(np.array, range(3)), None, np.array(4), np.array(5))
    batch = placed.place(window)
    assert begun(window) == [0, 1, 2]
    assert placed.place(window[1:]).ndim == 0
    machine.finish()
    assert batch.item() == 0
    assert copied(machine) == 3  # each one once


def test_the_batches_behind_are_sent_before_the_stream_of_the_user_waits_for_the_next_one(machine: Machine) -> None:
    placed = placer_on(machine)
    placed.place(entries(np.array(0), np.array(1)))
    home = f"{machine.devices[0]} default"
    assert [step for step in machine.log if step[0] == "copy" or step == ("wait", home)] == [
        *[("copy", f"{machine.devices[0]} 1")] * 2,
        ("wait", home),
    ]


def test_no_more_are_begun_than_are_wanted_ahead_and_errors_and_empty_batches_are_passed_over(
    machine: Machine,
) -> None:
    for ahead in range(3):
        placed, window = placer_on(machine), entries(*map(np.array, range(4)))
        placed.copy_ahead(ahead)
        placed.place(window)
        assert begun(window) == list(range(1 + ahead))
    placed, window = placer_on(machine), entries(np.array(0), ValueError("no"), NOTHING, np.array(3))
    placed.copy_ahead(3)
    placed.place(window)
    assert begun(window) == [0, 3]


def test_what_cannot_be_begun_ahead_is_an_error_in_its_turn(machine: Machine) -> None:
    placed = placer_on(machine)
    window = entries(np.array(0), Refusing(), np.array(2))
    placed.place(window)
    assert begun(window) == [0]
    with pytest.raises(ValueError, match="cannot be pinned"):
        placed.place(window[1:])


def test_what_a_signal_handler_raises_while_a_batch_is_begun_ahead_is_raised(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, time_is_up: None
) -> None:
    before = SimulatedStreams.copy

    def interrupted(streams: SimulatedStreams, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.item() == 1:
            signal.raise_signal(signal.SIGINT)
        return before(streams, target, source)

    monkeypatch.setattr(SimulatedStreams, "copy", interrupted)
    with pytest.raises(TimeIsUp):
        placer_on(machine).place(entries(np.array(0), np.array(1)))


# -- the end --------------------------------------------------------------------------------------------------


def test_what_closes_does_not_hold_the_placement(machine: Machine) -> None:
    """It is a finalizer's: what it held would live as long as the loader."""
    placed = placer_on(machine)
    placed.create_streams()
    close, gone = placed.closer(), weakref.ref(placed)
    del placed
    assert gone() is None
    assert close()


@pytest.mark.parametrize("hangs", [0, 1])
def test_all_devices_are_waited_for_together(machine: Machine, monkeypatch: pytest.MonkeyPatch, hangs: int) -> None:
    placed, clock, given = Placer([CPU, *machine.devices], pin_memory=False), [100.0], []
    place_now(placed, [np.arange(2)] * 3, SHARDED)

    def close(copies: CopyStream, seconds: float) -> bool:
        given.append(seconds)
        clock[0] += 0.75 * CLOSING_SECONDS
        return copies.streams.device != machine.devices[hangs]

    monkeypatch.setattr(CopyStream, "close", close)
    monkeypatch.setattr("sharded_loader.base.host_clock.now", lambda: clock[0])
    assert not placed.closer()()
    assert given == [CLOSING_SECONDS, 0.25 * CLOSING_SECONDS]


def test_another_thread_may_meet_a_device_while_the_loader_is_closed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed = Placer(machine.devices, pin_memory=False)
    place_now(placed, [np.arange(2)], SHARDED)
    drain = CopyStream.drain

    def meanwhile(copies: CopyStream, seconds: float) -> bool:
        placed.create_streams()
        return drain(copies, seconds)

    monkeypatch.setattr(CopyStream, "drain", meanwhile)
    assert placed.closer()()


# -- memory, devices, errors ----------------------------------------------------------------------------------


def test_memory_is_pinned_only_if_it_is_copied_from(machine: Machine) -> None:
    assert isinstance(Placer(None, pin_memory=False).empty, ReusedMemory)
    array = placer_on(machine).empty((2, 3), np.dtype("f4"))
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert machine.pinned.keys() == {array.__array_interface__["data"][0]}


def test_a_segment_is_pinned_once_and_a_rejection_is_told_once(machine: Machine) -> None:
    placed, mappings = placer_on(machine), [mmap.mmap(-1, 4096) for _ in range(3)]
    undo = placed.register(mappings[0])
    assert undo is not None and placed.register(mappings[0]) is undo
    machine.refuse = 2
    with pytest.warns(UserWarning, match="could not be pinned") as caught:
        assert [placed.register(mapping) for mapping in mappings[1:]] == [None, None]
    assert len(caught) == 1
    assert undo()
    assert machine.registered == {}


def test_a_device_is_numbered_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def indexed(device: torch.device) -> torch.device:
        asked.append(device)
        return machine.devices[len(asked) - 1]

    monkeypatch.setattr(placement, "indexed", indexed)
    placed = Placer([torch.device("privateuseone")], pin_memory=False)
    assert asked == []  # a loader that is only constructed touches no device
    placed.create_streams()
    first = placed.copies[placed.asynchronous[0]]
    assert first is placed.copies[placed.asynchronous[0]]
    assert first.streams.device == machine.devices[0]
    assert len(asked) == 1


@pytest.mark.parametrize(("error", "samples"), [(ValueError("no"), True), (RuntimeError("CUDA error: assert"), False)])
def test_the_error_of_a_batch_names_it(error: Exception, samples: bool) -> None:
    assert placement_error(Task(3, 7, 2, 28, ([4, 5], [6]), True), error, "while it was placed") is error
    notes = "\n".join(error.__notes__)
    assert "epoch 2, batch 7" in notes
    assert ("loader.read(" in notes) is samples


def test_what_a_signal_handler_has_raised_is_not_the_error_of_a_batch(time_is_up: None) -> None:
    with pytest.raises(TimeIsUp):
        try:
            signal.raise_signal(signal.SIGINT)
        except TimeIsUp as raised:
            placement_error(Task(3, 7, 2, 28, ([4, 5],), False), raised, "while it was placed")


# -- a device without memory -----------------------------------------------------------------------------------


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


def test_all_devices_make_room_and_the_end_of_an_epoch_waits_for_all(machine: Machine) -> None:
    placed = Placer([CPU, *machine.devices], pin_memory=False)
    for wait in (placed.make_room, placed.end_epoch):
        place_now(placed, [np.arange(4)] * 3, SHARDED)
        wait()
        assert [len(copies.in_use) for copies in placed.copies.values() if copies is not None] == [0, 0]
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
