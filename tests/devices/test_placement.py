"""`Placer`, without a loader: each shard on its device, in one step or in two, and memory for batches."""

from __future__ import annotations

import mmap
import signal
import weakref

import numpy as np
import pytest
import torch
from devices_samples import PLAIN, SHARDED, begun, entries, place_now
from injection import TimeIsUp
from simulated import Machine, SimulatedStreams

from sharded_loader.devices import placement
from sharded_loader.devices.copies import CLOSING_SECONDS, CopyStream, PendingCopy
from sharded_loader.devices.placement import AHEAD, PAUSE, Placer, placement_error
from sharded_loader.engine.messages import NOTHING, Task
from sharded_loader.memory.arena import LEAST_BYTES, ReusedMemory

CPU = torch.device("cpu")


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
    assert sum(kind == "copy" for kind, _ in machine.log) == 1


def test_a_batch_may_have_fewer_shards_than_devices(machine: Machine) -> None:
    placed = Placer(machine.devices, pin_memory=False)
    (only,) = place_now(placed, [np.arange(2)], SHARDED)
    machine.finish()
    assert only.tolist() == [0, 1]


# -- two steps ------------------------------------------------------------------------------------------------


def test_what_is_begun_waits_until_it_is_finished(machine: Machine) -> None:
    placed = Placer([machine.devices[1]], pin_memory=False)
    pending = [placed._begin(np.full(3, number), PLAIN) for number in range(3)]
    batches = [copy.finish() for (copy,) in pending]
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
    assert place_now(Placer([machine.devices[0]], pin_memory=False), PendingCopy(tensor)) is tensor
    assert sum(kind == "copy" for kind, _ in machine.log) == 1


def test_one_more_is_copied_ahead_again_after_a_pause(machine: Machine) -> None:
    placed = Placer([machine.devices[0]], pin_memory=False)
    assert placed.ahead == AHEAD
    placed.make_room()
    seen = []
    for _ in range(PAUSE):
        place_now(placed, np.arange(2))
        machine.finish()
        seen.append(placed.ahead)
    assert seen == [AHEAD - 1] * (PAUSE - 1) + [AHEAD]


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
    placed = Placer([machine.devices[0]], pin_memory=False)
    placed.copy_ahead(4)
    window = entries(*map(np.array, range(3)), None, np.array(4), np.array(5))
    batch = placed.place(window)
    assert begun(window) == [0, 1, 2]
    assert placed.place(window[1:]).ndim == 0
    machine.finish()
    assert batch.item() == 0
    assert sum(kind == "copy" for kind, _ in machine.log) == 3  # each one once


def test_the_batches_behind_are_sent_before_the_stream_of_the_user_waits_for_the_next_one(machine: Machine) -> None:
    placed = Placer([machine.devices[0]], pin_memory=False)
    placed.place(entries(np.array(0), np.array(1)))
    home = f"{machine.devices[0]} default"
    assert [step for step in machine.log if step[0] == "copy" or step == ("wait", home)] == [
        *[("copy", f"{machine.devices[0]} 1")] * 2,
        ("wait", home),
    ]


def test_no_more_are_begun_than_are_wanted_ahead(machine: Machine) -> None:
    for ahead in range(3):
        placed = Placer([machine.devices[0]], pin_memory=False)
        placed.copy_ahead(ahead)
        window = entries(*map(np.array, range(4)))
        placed.place(window)
        assert begun(window) == list(range(1 + ahead))


def test_errors_and_empty_batches_behind_the_next_one_are_passed_over(machine: Machine) -> None:
    placed = Placer([machine.devices[0]], pin_memory=False)
    placed.copy_ahead(3)
    window = entries(np.array(0), ValueError("no"), NOTHING, np.array(3))
    placed.place(window)
    assert begun(window) == [0, 3]


def test_what_cannot_be_begun_ahead_is_an_error_in_its_turn(machine: Machine) -> None:
    placed = Placer([machine.devices[0]], pin_memory=False)
    window = entries(np.array(0), Unmovable(), np.array(2))
    placed.place(window)
    assert begun(window) == [0]
    with pytest.raises(ValueError, match="cannot be pinned"):
        placed.place(window[1:])


class Unmovable:
    def pin_memory(self) -> object:
        raise ValueError("this cannot be pinned")

    def to(self, device: object) -> object:
        raise AssertionError


def test_what_a_signal_handler_raises_while_a_batch_is_begun_ahead_is_raised(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    placed, before = Placer([machine.devices[0]], pin_memory=False), SimulatedStreams.copy

    def handler(number: int, frame: object) -> None:
        raise TimeIsUp

    def interrupted(streams: SimulatedStreams, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        if source.item() == 1:
            signal.raise_signal(signal.SIGINT)
        return before(streams, target, source)

    monkeypatch.setattr(SimulatedStreams, "copy", interrupted)
    usual = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeIsUp):
            placed.place(entries(np.array(0), np.array(1)))
    finally:
        signal.signal(signal.SIGINT, usual)


# -- the end --------------------------------------------------------------------------------------------------


def test_the_end_of_an_epoch_waits_for_all_devices(machine: Machine) -> None:
    placed = Placer([CPU, *machine.devices], pin_memory=False)
    place_now(placed, [np.arange(2)] * 3, SHARDED)
    placed.end_epoch()
    assert [len(one.kept) for one in placed.copies.values() if one is not None] == [0, 0]


def test_what_closes_does_not_hold_the_placement(machine: Machine) -> None:
    """It is a finalizer's: what it held would live as long as the loader."""
    placed = Placer([machine.devices[0]], pin_memory=False)
    placed.create_streams()
    close, gone = placed.closer(), weakref.ref(placed)
    del placed
    assert gone() is None
    assert close()


def test_memory_that_batches_were_made_in_goes_with_the_loader() -> None:
    placed = Placer(None, pin_memory=False)
    placed.empty((LEAST_BYTES,), np.dtype(np.uint8))  # comes back at once
    placed.empty((LEAST_BYTES,), np.dtype(np.uint8))
    placed._reused._find_ended()
    assert placed._reused._free
    assert placed.closer()()
    assert not placed._reused._free


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
    array = Placer([machine.devices[0]], pin_memory=False).empty((2, 3), np.dtype("f4"))
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert machine.pinned.keys() == {array.__array_interface__["data"][0]}


def test_a_segment_is_pinned_once_and_a_rejection_is_told_once(machine: Machine) -> None:
    placed, mappings = Placer([machine.devices[0]], pin_memory=False), [mmap.mmap(-1, 4096) for _ in range(3)]
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


def test_what_a_signal_handler_has_raised_is_not_the_error_of_a_batch() -> None:
    def handler(number: int, frame: object) -> None:
        raise TimeIsUp

    usual = signal.signal(signal.SIGINT, handler)
    try:
        with pytest.raises(TimeIsUp):
            try:
                signal.raise_signal(signal.SIGINT)
            except TimeIsUp as raised:
                placement_error(Task(3, 7, 2, 28, ([4, 5],), False), raised, "while it was placed")
    finally:
        signal.signal(signal.SIGINT, usual)
