"""What a batch is made of arrives in its structure; small tensors travel together, and are tensors like any other."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ahead
from devices_samples import GOOD, Checks, copied, copies_on, place_now, placer_on, streams_on
from simulated import Machine

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.batching.tree import children, to_torch
from sharded_loader.devices import copies
from sharded_loader.devices.copies import SMALL, CopyStream, PlacementPlan
from sharded_loader.engine.pool import Pool

Pair = namedtuple("Pair", "x y")


@dataclass
class Batch:
    image: Any
    names: list[str]


def put(machine: Machine, batch: Any) -> Any:
    placed = place_now(placer_on(machine), batch)
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


@pytest.mark.parametrize(
    "leaf", ["text", b"by", 3, 2.5, None, Batch, torch.int8, np.array(["a"]), np.array(["2020"], "M8[Y]")]
)
def test_what_is_no_tensor_stays_on_the_host(machine: Machine, leaf: Any) -> None:
    placed = put(machine, [leaf, np.zeros(2)])
    assert placed[0] is leaf
    assert copied(machine) == 1


LAYOUTS: dict[str, torch.Tensor] = {
    "channels last": torch.arange(2 * 3 * 4 * 5.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.arange(12).reshape(3, 4).T,
    "gaps": torch.arange(24).reshape(4, 6)[:, ::2],
    "gaps, transposed": torch.arange(24).reshape(4, 6)[:, ::2].T,
    "expanded": torch.arange(3).expand(4, 3),
    "conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "negative": torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    "negative without gaps": torch._neg_view(torch.ones(3)),
    "scalar": torch.tensor(7),
    "empty": torch.zeros(0, 3),
    "one row": torch.arange(6).reshape(1, 6),
    "half": torch.arange(5).half(),
    "bool": torch.tensor([True, False]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_arrives_with_its_values_alone_and_beside_another(machine: Machine, name: str) -> None:
    host = LAYOUTS[name]
    for batch in ([host], [host, torch.ones(3)]):
        placed = put(machine, batch)[0]
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


# -- a plan for batches of one structure ----------------------------------------------------------------------


def flat(rows: int = 4) -> dict[str, np.ndarray]:
    return {"x": np.arange(rows * 6000.0).reshape(rows, -1), "y": np.arange(rows), "z": np.ones(rows, np.uint8)}


CHANGED: dict[str, Callable[[], Any]] = {
    "fewer rows": lambda: flat(3),
    "another type": lambda: {**flat(), "y": np.arange(4).astype(np.int16)},
    "another type of one layout": lambda: {**flat(), "y": np.arange(4).astype(np.ulonglong)},
    "another byte order": lambda: {**flat(), "y": np.arange(4).astype(">i8")},
    "another layout": lambda: {**flat(), "x": np.asfortranarray(flat()["x"])},
    "read-only": lambda: {**flat(), "x": np.frombuffer(flat()["x"].tobytes()).reshape(4, -1)},
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
    placement = placer_on(machine)
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


def leaves_of(tree: Any) -> list[Any]:
    parts = children(tree)
    return [tree] if parts is None else [leaf for part in parts for leaf in leaves_of(part)]


def test_an_array_in_two_places_is_one_tensor_though_the_batch_before_had_two(machine: Machine) -> None:
    placement, array = placer_on(machine), np.arange(9)
    first, second = place_now(placement, [array, array.copy()])
    assert first is not second
    first, second = place_now(placement, [array, array])
    machine.finish()
    assert first is second and first.tolist() == list(range(9))


def test_the_leaves_of_batches_of_one_structure_are_looked_at_once(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, placement = list[Any](), placer_on(machine)
    placement.create_streams()
    monkeypatch.setattr(copies, "PlacementPlan", lambda batch: made.append(type(batch)) or PlacementPlan(batch))
    for rows in (4, 4, 4, 3, 4, 4):
        place_now(placement, flat(rows))
    assert made == [dict] * 3  # and again for the incomplete batch, and after it


# -- small tensors together ------------------------------------------------------------------------------------


COLUMNS = 256
DTYPES = [np.float32, np.int64, np.uint8, np.float16, np.bool_, np.complex128]


def columns(index: int) -> Any:
    """Row i has 256 fields of different types and sizes."""
    return {f"field {k}": np.full(k % 7, (index + k) % 2, DTYPES[k % 6]) for k in range(COLUMNS)}


def nested(index: int) -> Any:
    fields = list(columns(index).values())
    return {"first": fields[:100], "rest": {"a": tuple(fields[100:]), "name": "text"}}


@pytest.mark.costly(2)
@pytest.mark.parametrize("make", [columns, nested])
def test_many_columns_cost_one_copy(machine: Machine, pool: Pool, make: Any) -> None:
    data, checks = SimpleDataset(range(16)).transform(make), Checks(machine)
    expected = [leaves_of(batch) for batch in ShardedDataLoader(data, 8)]
    with ahead(ShardedDataLoader(data, 8, pool=pool, device=machine.devices[0]), False) as loader:
        for number, batch in enumerate(loader):
            for place, (leaf, host) in enumerate(zip(leaves_of(batch), expected[number], strict=True)):
                if not isinstance(host, torch.Tensor):
                    assert leaf == host
                    continue
                assert (leaf.dtype, leaf.shape, leaf.stride()) == (host.dtype, host.shape, host.stride())
                if leaf.numel():
                    checks.compare(leaf, host.numpy(), (number, place))
                del leaf
            del batch
            machine.run(40)
        empty = sum(not leaf.numel() for leaf in expected[0] if isinstance(leaf, torch.Tensor))
        assert checks.done() == GOOD
    assert copied(machine) == 2 * (1 + empty)  # a tensor without values has a copy of its own


def test_a_large_tensor_keeps_memory_of_its_own(machine: Machine) -> None:
    """So a label that the program keeps does not keep the images."""
    copies = copies_on(machine)
    batch = [np.zeros(SMALL + 1, np.uint8), np.ones(SMALL, np.uint8), np.ones(3)]
    image, label, weight = copies.begin(batch).finish()
    machine.finish()
    copies.drain()
    assert copied(machine) == 2
    assert label.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    held, in_use = weakref.ref(image), machine.in_use
    del image
    gc.collect()
    assert held() is None and label.sum() == SMALL and machine.in_use == in_use - 1


def test_one_small_tensor_goes_from_where_it_lies(machine: Machine) -> None:
    streams = streams_on(machine)
    with streams.current():
        copies, leaf = CopyStream(streams), streams.pin(torch.arange(9), (1,))
    pending = copies.begin({"only": [leaf]})
    assert pending.sources[0] is leaf
    machine.finish()
    assert pending.finish()["only"][0].tolist() == list(range(9))


def test_tensors_that_lie_together_are_strangers_to_autograd(machine: Machine) -> None:
    """If they were views, to change one would spoil what another is needed for."""
    copies = copies_on(machine)
    x, y = copies.begin([torch.ones(3), torch.ones(3)]).finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    y.add_(1)
    loss.backward()
    assert weight.grad is not None and y._base is None


def test_each_begins_where_any_type_may_begin(machine: Machine) -> None:
    copies = copies_on(machine)
    batch = copies.begin([torch.ones(size, dtype=torch.uint8) for size in range(1, 30)]).finish()
    machine.finish()
    first = min(tensor.data_ptr() for tensor in batch)
    assert all((tensor.data_ptr() - first) % 64 == 0 for tensor in batch)
    copies.drain()
