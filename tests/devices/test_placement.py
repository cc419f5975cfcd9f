"""`Placement`, without a loader: each shard on its device, in one step or in two, and memory for batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from simulated import Machine

from sharded_loader.devices import placement
from sharded_loader.devices.copies import Placed
from sharded_loader.devices.placement import AHEAD, PAUSE, Placement, not_placed
from sharded_loader.engine.messages import Task
from sharded_loader.memory.reused import ReusedMemory

CPU = torch.device("cpu")


# -- one step -------------------------------------------------------------------------------------------------


def test_in_host_memory_arrays_become_tensors_over_the_same_memory() -> None:
    placed, array = Placement(None, pin_memory=False), np.arange(4)
    batch = placed.place({"x": array, "name": "a"}, sharded=False)
    array[0] = 7
    assert (batch["x"].tolist(), batch["name"]) == ([7, 1, 2, 3], "a")
    assert (placed.asynchronous, placed.capture_probes, placed.ahead) == ([], [], 0)


@pytest.mark.parametrize("devices", [None, [CPU, CPU]])
def test_shards_in_host_memory_stay_a_list(devices: list[torch.device] | None) -> None:
    first, second = Placement(devices, pin_memory=False).place([np.arange(2), np.arange(3)], sharded=True)
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 1, 2])


def test_each_shard_goes_to_its_device(machine: Machine) -> None:
    placed = Placement([machine.devices[0], CPU, torch.device("meta")], pin_memory=False)
    host = [np.arange(2), np.arange(3), np.arange(4)]
    first, second, third = placed.place(host, sharded=True)
    machine.finish()
    assert (first.tolist(), second.tolist()) == ([0, 1], [0, 1, 2])
    assert not np.shares_memory(second.numpy(), host[1])  # it may lie in page-locked memory
    assert (third.device.type, len(third)) == ("meta", 4)
    assert sum(kind == "copy" for kind, _ in machine.log) == 1


def test_a_batch_may_have_fewer_shards_than_devices(machine: Machine) -> None:
    placed = Placement(machine.devices, pin_memory=False)
    (only,) = placed.place([np.arange(2)], sharded=True)
    machine.finish()
    assert only.tolist() == [0, 1]


# -- two steps ------------------------------------------------------------------------------------------------


def test_what_is_begun_waits_until_it_is_finished(machine: Machine) -> None:
    placed = Placement([machine.devices[1]], pin_memory=False)
    begun = [placed.begin(np.full(3, number), sharded=False) for number in range(3)]
    batches = [one.finish() for one in begun]
    machine.finish()
    assert [batch.tolist() for batch in batches] == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert placed.end_epoch() is None
    assert placed.closer()()


def test_what_is_on_its_device_passes_through(machine: Machine) -> None:
    placed, tensor = Placement(machine.devices, pin_memory=False), torch.arange(3)
    first, second = placed.place([Placed({"x": tensor}), np.arange(2)], sharded=True)
    machine.finish()
    assert first["x"] is tensor
    assert second.tolist() == [0, 1]
    assert Placement([machine.devices[0]], pin_memory=False).place(Placed(tensor), sharded=False) is tensor
    assert sum(kind == "copy" for kind, _ in machine.log) == 1


def test_one_more_is_copied_ahead_again_after_a_pause(machine: Machine) -> None:
    placed = Placement([machine.devices[0]], pin_memory=False)
    assert placed.ahead == AHEAD
    placed.make_room()
    seen = []
    for _ in range(PAUSE):
        placed.place(np.arange(2), sharded=False)
        machine.finish()
        seen.append(placed.ahead)
    assert seen == [AHEAD - 1] * (PAUSE - 1) + [AHEAD]


def test_only_copy_streams_copy_ahead(machine: Machine) -> None:
    for devices in (None, [CPU], [torch.device("meta")]):
        placed = Placement(devices, pin_memory=False)
        placed.copy_ahead(3)
        assert placed.ahead == 0
    placed = Placement([CPU, machine.devices[0]], pin_memory=False)
    placed.copy_ahead(3)
    assert placed.ahead == 3


# -- memory, devices, errors ----------------------------------------------------------------------------------


def test_memory_is_pinned_only_if_it_is_copied_from(machine: Machine) -> None:
    assert isinstance(Placement(None, pin_memory=False).empty, ReusedMemory)
    array = Placement([machine.devices[0]], pin_memory=False).empty((2, 3), np.dtype("f4"))
    assert (array.shape, array.dtype) == ((2, 3), np.float32)
    assert machine.pinned.keys() == {array.__array_interface__["data"][0]}


def test_a_device_is_numbered_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def indexed(device: torch.device) -> torch.device:
        asked.append(device)
        return machine.devices[len(asked) - 1]

    monkeypatch.setattr(placement, "indexed", indexed)
    placed = Placement([torch.device("privateuseone")], pin_memory=False)
    assert asked == []  # a loader that is only constructed touches no device
    placed.settle()
    first = placed.copies[placed.asynchronous[0]]
    assert first is placed.copies[placed.asynchronous[0]]
    assert first.streams.device == machine.devices[0]
    assert len(asked) == 1


@pytest.mark.parametrize(("error", "samples"), [(ValueError("no"), True), (RuntimeError("CUDA error: assert"), False)])
def test_the_error_of_a_batch_names_it(error: Exception, samples: bool) -> None:
    result = not_placed(Task(3, 7, 2, 28, ([4, 5], [6]), True), error, "while it was placed")
    assert (result.run, result.seq, result.error) == (3, 7, error)
    notes = "\n".join(error.__notes__)
    assert "epoch 2, batch 7" in notes
    assert ("loader.read(" in notes) is samples
