"""The drop-in on a device: right batches, two of them ahead, and pinned memory that lives from epoch to epoch."""

from __future__ import annotations

import copy
import os
import pickle
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from drop_in_samples import Parts, Reads, workers
from simulated import Machine, SimulatedStreams

from sharded_loader.devices.copies import CopyStream
from sharded_loader.devices.placement import AHEAD
from sharded_loader.torch import DataLoader

WIDTH, ROWS = 20_000, 48
METHODS = ["inline", "thread", "fork", pytest.param("spawn", marks=pytest.mark.slow)]


def row(index: int) -> Any:
    """Row i is full of i. A batch of four is 640 kB."""
    return np.full(WIDTH, index, np.int64), index


DATASETS: dict[str, Any] = {
    "map-style": Reads(row, ROWS),
    "iterable": Parts(lambda number, count: map(row, range(number, ROWS, count))),
}


def loader_on(machine: Machine, method: str = "fork", kind: str = "map-style", **options: Any) -> DataLoader[Any]:
    return DataLoader(DATASETS[kind], 4, device=machine.devices[0], **workers(method), **options)


class Watched:
    """Reads batches late, on the device, and notes what is wrong."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.wrong, self.seen = machine, [], []  # type: ignore[var-annotated]

    def epoch(self, loader: DataLoader[Any], most: int = 1000) -> None:
        """Read an epoch. The batches are dropped as soon as their work is given to the stream."""
        for number, (rows, labels) in enumerate(loader):
            self.machine.kernel(self.machine.devices[0], labels, lambda found: self.seen.append(found.tolist()))
            self.machine.kernel(self.machine.devices[0], rows, self._compare)
            del rows, labels
            self.machine.run(number % 7)
            if number + 1 == most:
                break
        self.machine.finish()
        assert self.wrong == []

    def _compare(self, found: np.ndarray) -> None:
        if (found != found[:, :1]).any() or found[:, 0].tolist() != self.seen[-1]:
            self.wrong.append(found[:, 0].tolist())


def labels(loader: DataLoader[Any], epochs: int = 1) -> list[list[int]]:
    return [found.tolist() for _ in range(epochs) for _, found in loader]


@pytest.mark.costly
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("in_order", [True, False], ids=["in order", "any order"])
def test_batches_are_those_of_the_host(machine: Machine, method: str, kind: str, in_order: bool) -> None:
    options: dict[str, Any] = {"in_order": in_order}
    if kind == "map-style":
        options |= {"shuffle": True, "seed": 3}
    watched, loader = Watched(machine), loader_on(machine, method, kind, **options)
    for _ in range(2):
        watched.epoch(loader)
    expected = labels(DataLoader(DATASETS[kind], 4, **workers(method), **options), 2)
    assert watched.seen == expected if in_order else sorted(watched.seen) == sorted(expected)
    del loader
    assert machine.registered == {}


@pytest.mark.parametrize("kind", DATASETS)
def test_two_batches_are_copied_ahead(machine: Machine, kind: str) -> None:
    batches, ahead = iter(loader_on(machine, "thread", kind)), []
    pipeline = batches._engine.pipeline  # type: ignore[attr-defined]
    assert pipeline.min_ready > AHEAD  # the pool is asked for those too
    for _ in batches:
        (run,) = pipeline.runs.values()
        ahead.append(sum(entry.begun is not None for entry in run.window))
        machine.finish()
        while any(entry.result is None for entry in run.window if entry not in run.waiting):  # however slow threads are
            pipeline.runs.store(pipeline.pool.wait(True))
    assert max(ahead) == AHEAD


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
@pytest.mark.parametrize("ends", ["the end", "a break", "no batch"])
@pytest.mark.costly
def test_pinned_memory_lives_from_epoch_to_epoch(machine: Machine, method: str, ends: str) -> None:
    register = machine.cudaHostRegister = Mock(wraps=machine.cudaHostRegister)  # type: ignore[method-assign]
    watched, loader = Watched(machine), loader_on(machine, method)
    most = 7 if ends == "a break" else 1000
    for _ in range(2):  # in the first one nobody knows how large a batch is
        watched.epoch(loader, most=most)
    before = register.call_count
    for _ in range(6):
        if ends == "no batch":
            iter(loader)
        watched.epoch(loader, most=most)
    assert before and register.call_count <= before + 2  # more may be in flight than ever before, but not in each epoch
    assert len(machine.streams[machine.devices[0]]) == 2  # torch keeps memory for each: one copy stream is enough
    del loader
    assert machine.registered == {}


def test_the_first_batches_of_an_epoch_lie_in_pinned_slots_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So the host does not copy them once more."""
    pin, pinned = SimulatedStreams.pin, []

    def noted(streams: SimulatedStreams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        pinned.append(host.nbytes)
        return pin(streams, host, stride)

    monkeypatch.setattr(SimulatedStreams, "pin", noted)
    loader = loader_on(machine)
    for _ in range(3):
        labels(loader)
        machine.finish()
    assert max(pinned) < 8 * WIDTH


def test_ready_event_is_that_of_the_last_batch(machine: Machine) -> None:
    loader = loader_on(machine, "inline")
    assert loader.ready_event is None
    events = []
    for _ in loader:
        events.append(loader.ready_event)
        machine.finish()
        with SimulatedStreams(machine, machine.devices[0]).current():
            assert events[-1].query()
    assert len(set(events)) == 12
    assert DataLoader(range(4)).ready_event is None


def test_an_epoch_inside_another_has_memory_of_its_own_and_a_copy_of_the_loader_too(machine: Machine) -> None:
    loader = loader_on(machine)
    watched, outer = Watched(machine), []
    for _, found in loader:
        machine.finish()
        outer.append(found.tolist())
        if len(outer) in (2, 5):
            watched.epoch(loader)
    copies = [copy.copy(loader), pickle.loads(pickle.dumps(loader))]
    del loader
    assert machine.registered == {}
    for one in copies:
        watched.epoch(one)
    assert watched.seen == outer * 4


def test_memory_goes_back_when_the_devices_are_others_or_the_host(machine: Machine) -> None:
    """Also that of an iterator which goes on: what unregisters it waits for the copies to those devices only."""
    register = machine.cudaHostRegister = Mock(wraps=machine.cudaHostRegister)  # type: ignore[method-assign]
    loader = loader_on(machine)
    labels(loader)
    machine.finish()
    batches = iter(loader)
    next(batches)
    loader.device = machine.devices[1]  # as Accelerate does
    before = register.call_count
    labels(loader)
    ours = register.call_count - before
    assert before and ours and len(list(batches)) == 11
    machine.finish()
    assert len(machine.registered) == ours
    loader.device = None
    for rows, _ in loader:
        assert not machine.holds(rows.data_ptr(), 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.slow
def test_what_a_process_that_is_forked_between_two_epochs_holds_stays_as_it_is(machine: Machine) -> None:

    def things(samples: list[Any]) -> Any:
        rows, numbers = zip(*samples, strict=True)
        return SimpleNamespace(rows=np.stack(rows)), torch.tensor(numbers)

    machine.refuse = 2  # so objects stay in the slots
    with pytest.warns(UserWarning, match="could not be pinned"):
        loader = loader_on(machine, collate_fn=things, shuffle=True, seed=1)
        for _ in range(2):
            *_, held = loader
            machine.finish()
    expected, reads, writes = held[0].rows[:, 0].tolist(), os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(reads[0], 1)  # until later epochs have been read
            os.write(writes[1], bytes(held[0].rows[:, 0].tolist()))
        finally:
            os._exit(0)
    del held
    labels(loader, 2)
    machine.finish()
    os.write(reads[1], b".")
    assert list(os.read(writes[0], 4)) == expected
    os.waitpid(child, 0)
    for descriptor in (*reads, *writes):
        os.close(descriptor)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_process_that_is_forked_between_two_epochs_closes_the_descriptors_of_the_memory(machine: Machine) -> None:
    loader = loader_on(machine)
    labels(loader)
    machine.finish()
    segments = [segment for arena, _ in loader._memory._left for segment in arena.segments]
    child = os.fork()
    if child == 0:
        os._exit(sum(segment.fd is not None for segment in segments))
    assert segments and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(labels(loader)) == 12
    machine.finish()


def test_an_interruption_gives_the_memory_up(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows what an exception in the middle of a step has left in it."""
    loader = loader_on(machine)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(CopyStream, "begin", lambda *given: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            for _ in batches:
                pass
    del batches
    machine.finish()
    assert machine.registered == {}
    watched = Watched(machine)
    watched.epoch(loader)
    assert len(watched.seen) == 12
