"""What a batch is made of arrives in its structure; each part is copied by the way that suits it."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from devices_samples import PLAIN, place_now
from simulated import Machine

from sharded_loader import InlinePool, ShardedDataLoader
from sharded_loader.batching.tree import children, to_torch
from sharded_loader.devices import copies
from sharded_loader.devices.copies import PlacementPlan
from sharded_loader.devices.placement import Placer

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    image: Any
    names: list[str]


class Encoding:
    """An object that moves itself, like a tokenizer's."""

    def __init__(self, ids: torch.Tensor, log: list[Any]) -> None:
        self.ids = ids
        self.log = log

    def pin_memory(self) -> Encoding:
        self.log.append("pin")
        return Encoding(self.ids.clone(), self.log)

    def to(self, device: torch.device, non_blocking: bool = False) -> Encoding:
        self.log.append(("to", str(device), non_blocking))
        return Encoding(self.ids, self.log)


class Plain:
    """An object that moves itself, and knows of nothing else."""

    def __init__(self) -> None:
        self.where = "host"

    def to(self, device: torch.device) -> Plain:
        moved = Plain()
        moved.where = str(device)
        return moved


def put(machine: Machine, batch: Any) -> Any:
    placement = Placer([machine.devices[0]], pin_memory=False)
    placed = place_now(placement, batch)
    machine.finish()
    assert machine.faults == []
    return placed


def test_structures_keep_their_types(machine: Machine) -> None:
    array = np.arange(3)
    placed = put(machine, {"a": Pair(array, [array * 2]), "b": Batch(array, ["s"]), "c": OrderedDict(d=(array,))})
    assert type(placed["a"]) is Pair
    assert placed["a"].y[0].tolist() == [0, 2, 4]
    assert type(placed["b"]) is Batch
    assert (placed["b"].image.tolist(), placed["b"].names) == ([0, 1, 2], ["s"])
    assert type(placed["c"]) is OrderedDict
    assert placed["c"]["d"][0] is placed["a"].x


@pytest.mark.parametrize("leaf", ["text", b"bytes", 3, 2.5, None, np.array(["a", "b"]), np.array(["2020"], "M8[Y]")])
def test_what_is_no_tensor_stays_on_the_host(machine: Machine, leaf: Any) -> None:
    placed = put(machine, [leaf, np.zeros(2)])
    assert placed[0] is leaf
    assert sum(kind == "copy" for kind, _ in machine.log) == 1


def test_objects_that_can_pin_and_move_do_so(machine: Machine) -> None:
    log: list[Any] = []
    placed = put(machine, {"ids": Encoding(torch.arange(3), log)})
    assert log == ["pin", ("to", "privateuseone:0", True)]
    assert placed["ids"].ids.tolist() == [0, 1, 2]


def test_objects_that_only_move_do_so(machine: Machine) -> None:
    assert put(machine, Plain()).where == "privateuseone:0"


def test_classes_are_no_objects_to_move(machine: Machine) -> None:
    assert put(machine, [Plain, torch.float32])[0] is Plain


LAYOUTS: dict[str, torch.Tensor] = {
    "channels last": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(12).reshape(3, 4).T,
    "gaps": torch.arange(24).reshape(4, 6)[:, ::2],
    "gaps, transposed": torch.arange(24).reshape(4, 6)[:, ::2].T,
    "expanded": torch.arange(3).expand(4, 3),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "one row": torch.arange(6).reshape(1, 6),
    "half": torch.arange(5).half(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_with_its_values(machine: Machine, name: str) -> None:
    host = LAYOUTS[name]
    placed = put(machine, [host])[0]
    assert torch.equal(placed, host)
    assert placed.dtype == host.dtype
    if name == "channels last":
        assert placed.is_contiguous(memory_format=torch.channels_last)


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gaps": lambda whole: whole[:, ::2],
    "transposed": lambda whole: whole.T,
    "conjugate": lambda whole: whole.conj(),
    "negative": lambda whole: whole.conj().imag,
    "negative without gaps": lambda whole: torch._neg_view(torch.view_as_real(whole)),
}


@pytest.mark.parametrize("name", VIEWS)
def test_every_view_of_pinned_memory_arrives_with_its_values(machine: Machine, name: str) -> None:
    """The device copies bytes: it knows of no gaps, and of no values that torch turns when they are read."""
    whole = machine.pin(4 * 6 * 8).view(torch.complex64).reshape(4, 6)
    whole.copy_(torch.arange(24).reshape(4, 6) * (1 + 2j))
    host = VIEWS[name](whole)
    assert torch.equal(put(machine, [host])[0], host)


def test_a_batch_begun_in_inference_mode_can_be_trained_on_after_it(machine: Machine) -> None:
    placement = Placer([machine.devices[0]], pin_memory=False)
    with torch.inference_mode():
        begun = placement._begin([np.ones(3, np.float32)], PLAIN)
    (batch,) = begun[0].finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    (weight * batch).sum().backward()
    assert weight.grad is not None


def test_fewer_shards_than_devices(machine: Machine) -> None:
    with ShardedDataLoader(range(3), 2, devices=machine.devices, pool=InlinePool()) as loader:
        assert [len(shards) for shards in loader] == [2, 1]


def test_strings_beside_numbers_through_a_loader(machine: Machine) -> None:
    data = [(np.float32(i), f"name {i}") for i in range(4)]
    with ShardedDataLoader(data, 2, device=machine.devices[0]) as loader:
        numbers, names = next(iter(loader))
        machine.finish()
    assert (numbers.tolist(), names) == ([0.0, 1.0], ["name 0", "name 1"])


def test_pin_memory_gives_memory_that_torch_owns_also_to_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    from sharded_loader.devices import placement

    monkeypatch.setattr(placement, "accelerators", lambda: [torch.device("cuda", 0)])
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self.clone())
    log: list[Any] = []

    def batchify(samples: list[int]) -> Any:
        return {"x": torch.tensor(samples), "e": Encoding(torch.arange(2), log), "s": "text"}

    with ShardedDataLoader(range(2), 2, batchify_fn=batchify, pin_memory=True) as loader:
        batch = next(iter(loader))
    assert (len(pinned), log, batch["s"]) == (1, ["pin"], "text")


# -- a plan for batches of one structure ----------------------------------------------------------------------


def flat(rows: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.arange(rows * 6000.0).reshape(rows, -1), "y": np.arange(rows), "z": np.ones(rows, np.uint8)}


def read_only(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    batch["x"].flags.writeable = False
    return batch


CHANGED: dict[str, Callable[[], Any]] = {
    "fewer rows": lambda: flat(3),
    "another type": lambda: {**flat(), "y": np.arange(4).astype(np.int16)},
    "another type of one layout": lambda: {**flat(), "y": np.arange(4).astype(np.ulonglong)},
    "another byte order": lambda: {**flat(), "y": np.arange(4).astype(">i8")},
    "another layout": lambda: {**flat(), "x": np.asfortranarray(flat()["x"])},
    "read-only": lambda: read_only(flat()),
    "other keys": lambda: dict(zip("zyx", flat().values(), strict=True)),
    "one more": lambda: {**flat(), "more": np.zeros(2)},
    "nothing in it": lambda: {**flat(), "y": np.zeros((0, 3))},
    "text": lambda: {**flat(), "y": np.array(["a", "b"])},
    "a tensor": lambda: {**flat(), "y": torch.arange(4)},
    "a list": lambda: list(flat().values()),
    "a tuple": lambda: tuple(flat().values()),
    "an array": lambda: flat()["x"],
    "one dimension less": lambda: np.array(3.0),
    "nested": lambda: [flat()],
    "no arrays": lambda: {"x": 1, "y": "text", "z": None},
}


@pytest.mark.parametrize("change", CHANGED)
def test_a_batch_of_another_structure_goes_its_own_way(machine: Machine, change: str) -> None:
    placement = Placer([machine.devices[0]], pin_memory=False)
    for batch in (flat(), CHANGED[change](), CHANGED[change](), flat()):
        placed, expected = place_now(placement, batch), to_torch(batch)
        machine.finish()
        assert type(placed) is type(expected)
        if isinstance(placed, dict):
            assert list(placed) == list(expected)
        for found, host in zip(leaves_of(placed), leaves_of(expected), strict=True):
            assert type(found) is type(host)
            if isinstance(host, torch.Tensor):
                assert (found.dtype, found.tolist()) == (host.dtype, host.tolist())
            else:
                assert found is host
    assert machine.faults == []


def leaves_of(tree: Any) -> list[Any]:
    parts = children(tree)
    return [tree] if parts is None else [leaf for part in parts for leaf in leaves_of(part)]


def test_an_array_in_two_places_is_one_tensor_though_the_batch_before_had_two(machine: Machine) -> None:
    placement, array = Placer([machine.devices[0]], pin_memory=False), np.arange(9)
    first, second = place_now(placement, [array, array.copy()])
    assert first is not second
    first, second = place_now(placement, [array, array])
    machine.finish()
    assert first is second and first.tolist() == list(range(9))


def test_the_leaves_of_batches_of_one_structure_are_looked_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Counted(PlacementPlan):
        def __init__(self, batch: Any) -> None:
            made.append(type(batch))
            super().__init__(batch)

    placement = Placer([machine.devices[0]], pin_memory=False)
    placement.create_streams()
    monkeypatch.setattr(copies, "PlacementPlan", Counted)
    for rows in (4, 4, 4, 3, 4, 4):
        place_now(placement, flat(rows))
    assert made == [dict] * 3  # and again for the incomplete batch, and after it
