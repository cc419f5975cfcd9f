"""What the library does not copy itself: the user may copy from it at any time."""

from __future__ import annotations

import collections
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, make_pool
from devices_samples import place_now, placer_on, streams_on
from simulated import Machine, SimulatedStreams

from sharded_loader import ProcessPool, ShardedDataLoader, empty
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.codec import ON_HOST
from sharded_loader.ray.cluster import Lent

WIDTH = 4096
"""Numbers per sample: a batch of four is larger than what goes through the pipe."""


class Sample:
    """An object without ``to``."""

    def __init__(self, image: Any) -> None:
        self.image = image


class Slotted:
    """The same without a dictionary."""

    __slots__ = ("image",)

    def __init__(self, image: Any) -> None:
        self.image = image


class Numbers(torch.Tensor):
    """A tensor of the user's own class, which stays where it is."""

    def to(self, *args: Any, **options: Any) -> Any:
        return self


@dataclass
class Record:
    meta: Any


def loader_of(batchify: Any, pool: Pool, machine: Machine | None, count: int = 48) -> ShardedDataLoader:
    """Row i is full of i + 1."""
    data = [np.full(WIDTH, 1 + i, np.float32) for i in range(count)]
    device = None if machine is None else machine.devices[0]
    return ShardedDataLoader(data, 4, batchify_fn=batchify, device=device, pool=pool)


def stacked(samples: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.stack(samples))


def in_slot(samples: list[Any]) -> torch.Tensor:
    """The batch where the library would have put it."""
    array = empty((len(samples), WIDTH), np.float32)
    np.stack(samples, out=array)
    return torch.from_numpy(array)


def beside(samples: list[Any], part: slice) -> Any:
    tensor = in_slot(samples)
    return {"x": tensor, "meta": Sample(tensor[part])}


Build = Callable[[list[Any]], Any]
Find = Callable[[Any], Any]

BATCHES: dict[str, tuple[Build, Find]] = {
    "an object": (lambda samples: Sample(stacked(samples)), lambda batch: batch.image),
    "with slots": (lambda samples: Slotted(stacked(samples)), lambda batch: batch.image),
    "of the slot": (lambda samples: Sample(in_slot(samples)), lambda batch: batch.image),
    "of arrays": (lambda samples: Sample(np.stack(samples)), lambda batch: torch.from_numpy(batch.image)),
    "nested": (lambda samples: [{"a": (Sample(stacked(samples)),)}], lambda batch: batch[0]["a"][0].image),
    "of objects": (lambda samples: Sample([Sample(stacked(samples))]), lambda batch: batch.image[0].image),
    "in a dataclass": (lambda samples: Record(Sample(stacked(samples))), lambda batch: batch.meta.image),
    "in a mapping": (lambda samples: collections.UserDict(a=Sample(stacked(samples))), lambda batch: batch["a"].image),
    "in a deque": (lambda samples: collections.deque([stacked(samples)]), lambda batch: batch[0]),
    "in an object array": (lambda samples: np.array([Sample(stacked(samples))], object), lambda batch: batch[0].image),
    "beside the same tensor": (lambda samples: beside(samples, slice(None)), lambda batch: batch["meta"].image),
    "beside a view": (lambda samples: beside(samples, slice(2)), lambda batch: batch["meta"].image),
    "a tensor subclass": (lambda samples: stacked(samples).as_subclass(Numbers), lambda batch: batch),
    "a sparse tensor": (lambda samples: Sample(stacked(samples).to_sparse()), lambda batch: batch.image._values()),
    "dates": (
        lambda samples: np.stack(samples).astype("i8").view("M8[s]"),
        lambda batch: torch.from_numpy(batch.view("i8")),
    ),
    "long doubles": (
        lambda samples: np.stack(samples).astype(np.longdouble),
        lambda batch: torch.from_numpy(batch.view("f8")),
    ),
}


def test_what_the_user_copies_does_not_lie_in_pinned_slots(machine: Machine, process_pool: ProcessPool) -> None:
    def batchify(samples: list[Any]) -> Any:
        return {kind: build(samples) for kind, (build, _) in BATCHES.items()}

    pinned = set()
    with loader_of(batchify, process_pool, machine) as loader:
        for batch in loader:
            pinned |= {kind for kind, (_, find) in BATCHES.items() if machine.holds(find(batch[kind]).data_ptr(), 1)}
            del batch
        assert machine.registered
    assert (pinned, machine.faults) == (set(), [])


class Moving(collections.UserDict):  # type: ignore[type-arg]
    """It moves itself, and leaves its size on the host."""

    streams: Any = None

    def to(self, device: Any, non_blocking: bool = False) -> Moving:
        assert Moving.streams.is_pinned(self["x"])  # by the pool: the host does not copy it once more
        moved = Moving.streams.empty_like(self["x"])
        Moving.streams.copy(moved, self["x"])
        return Moving(x=moved, size=self["size"])


def test_the_host_copies_neither_its_neighbours_nor_what_moves_itself_once_more(
    machine: Machine, process_pool: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batchify(samples: list[Any]) -> Any:
        own = Moving(x=stacked(samples), size=stacked(samples))
        return {"x": stacked(samples), "meta": [Sample(stacked(samples)), "text", 3, None], "own": own}

    monkeypatch.setattr(Moving, "streams", streams_on(machine))
    with loader_of(batchify, process_pool, machine) as loader:
        list(loader)  # from here on the pool knows how large a batch is
        pinned, pin = [], SimulatedStreams.pin
        monkeypatch.setattr(SimulatedStreams, "pin", lambda *what: pinned.append(what) or pin(*what))
        for number, batch in enumerate(loader):
            machine.finish()
            own = batch["own"]
            for found in (batch["x"], batch["meta"][0].image, own["x"], own["size"]):
                assert found[:, -1].tolist() == [4.0 * number + i for i in range(1, 5)]
            assert batch["meta"][1:] == ["text", 3, None]
            assert not machine.holds(own["size"].data_ptr(), 1)  # the user may copy it at any time
        assert pinned == []


class Copier:
    """Copies from pinned memory as the user would: the device reads it late, and nobody holds the source."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.device = machine, machine.devices[0]
        self.streams = streams_on(machine)
        self.found: list[list[float]] = []

    def copy(self, image: torch.Tensor) -> None:
        with self.streams.current():
            moved = self.streams.empty_like(image)
            to = moved.data_ptr()
            if self.streams.is_pinned(image):
                self.streams.copy(moved, image)
            else:  # pageable memory the host reads at once
                copied = image.contiguous().clone()
                self.machine.stream(self.device).give(lambda: ctypes.memmove(to, copied.data_ptr(), copied.nbytes))
        self.machine.kernel(self.device, moved, lambda values: self.found.append(values[:, 0].tolist()))


def objects_of_a_thread(samples: list[Any]) -> Any:
    return {"meta": Sample(in_slot(samples))}


def objects_beside(samples: list[Any]) -> Any:
    """Halves beside a tensor that the loader copies itself."""
    return {"x": in_slot(samples), "meta": Halves(samples)}


class Halves:
    """An object over parts of one array, as a collate function makes it with `empty`."""

    def __init__(self, samples: list[Any]) -> None:
        whole = in_slot(samples)
        self.unread, self.image = whole[:, :8], whole[:, 8:]


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["thread", *PROCESS_POOLS])
def test_the_users_own_copies_from_objects_are_intact(machine: Machine, kind: str) -> None:
    """What an object has from a thread begins where torch guards it. A process has it from where it likes."""
    copier, in_thread = Copier(machine), kind == "thread"
    with loader_of(objects_of_a_thread if in_thread else objects_beside, make_pool(kind), machine, 120) as loader:
        for batch in loader:
            image = batch["meta"].image
            for part in [image] if in_thread else image[:, None]:  # a row has no gaps: the device could read it there
                copier.copy(part)
            del batch, image, part
        machine.finish()
    assert [value for found in copier.found for value in found] == list(range(1, 121))


def test_objects_over_the_memory_of_a_group_of_batches_are_copied_out(machine: Machine) -> None:
    """As `RayPool` brings them: all batches of a group lie in one pinned block."""
    place, copier = placer_on(machine), Copier(machine)
    lent = Lent(0)
    lent.empty, lent.copies_all = place.empty, True
    for step in range(50):
        memory = np.repeat(np.float32([step, step, step + 0.5, step + 0.5]), WIDTH).view(np.uint8)
        size = 4 * WIDTH
        places = [(number * size, -(size | ON_HOST) if number % 2 else size) for number in range(4)]
        group = lent.buffers(places, memory, [])
        for mine, own in zip(group, group, strict=True):
            batch = place_now(place, {"x": mine.view(np.float32), "meta": [Sample(own.view(np.float32))]})
            copier.copy(torch.as_tensor(batch["meta"][0].image)[None])
            del batch, mine, own
    machine.finish()
    place.closer()()
    assert copier.found == [[step + half] for step in range(50) for half in (0.0, 0.5)]


class Bag:
    """Looks its attributes up as keys."""

    def __init__(self, **found: Any) -> None:
        self.__dict__["found"] = found

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["found"][name]


def bags(samples: list[Any]) -> Any:
    return {"bag": Bag(x=np.arange(3)), "y": torch.zeros(3)}


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_an_object_that_looks_attributes_up_as_keys_stays_as_it_is(
    machine: Machine, pool: Pool, on_device: bool
) -> None:
    options: dict[str, Any] = {"device": machine.devices[0]} if on_device else {}
    with ShardedDataLoader(np.arange(8), 4, collate_fn=bags, pool=pool, **options) as loader:
        assert [batch["bag"].x.tolist() for batch in loader] == [[0, 1, 2]] * 2
        machine.finish()


def test_without_devices_objects_stay_in_their_slots(process_pool: ProcessPool) -> None:
    """Nothing is pinned there, so nothing has to be copied out."""
    with loader_of(lambda samples: Sample(stacked(samples)), process_pool, None) as loader:
        list(loader)
        for batch in loader:
            memories = [np.frombuffer(segment.mapping, np.uint8) for segment in process_pool._transport.arena.segments]
            assert any(np.shares_memory(batch.image.numpy(), memory) for memory in memories)
            del memories
