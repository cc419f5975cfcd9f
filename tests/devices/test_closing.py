"""Pinned memory is given back when no device reads it any more, whatever comes in between. Nobody waits for ever."""

from __future__ import annotations

import ctypes
import gc
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ahead
from injection import InterruptAt
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import copies, placement
from sharded_loader.devices.accelerator import Registrar
from sharded_loader.devices.copies import HOST_AHEAD
from sharded_loader.engine.pool import Pool
from sharded_loader.memory import arena
from sharded_loader.memory.arena import Arena
from sharded_loader.torch import DataLoader


def dataset() -> ArrayDataset:
    return ArrayDataset(np.arange(256 * 1024, dtype=np.float32).reshape(256, 1024))


def registrar(machine: Machine, drain: Callable[[], Any] = lambda: None) -> Registrar:
    return Registrar(SimulatedStreams(machine, machine.devices[0]), drain)


# -- interruptions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used_again", [True, False])
def test_an_interruption_after_the_registration_leaves_nothing_registered(machine: Machine, used_again: bool) -> None:
    register = registrar(machine).register
    interrupts = [signal.SIGINT]

    def interrupted(mapping: Any) -> Any:
        undo = register(mapping)
        if interrupts:
            signal.raise_signal(interrupts.pop())
        return undo

    made = Arena(None, interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.take(1 << 20)
    assert len(machine.registered) == 1
    if used_again:
        assert made.take(1 << 20) is not None
    made.close()
    assert (machine.registered, machine.faults) == ({}, [])


@pytest.mark.slow
def test_an_interruption_at_every_line_of_a_registration_leaves_nothing_registered(machine: Machine) -> None:
    line, fired, before = 0, True, sys.gettrace()
    while fired:
        line += 1
        made, tracer = Arena(None, registrar(machine).register), InterruptAt(line, ("arena.py", "accelerator.py"))
        try:
            sys.settrace(tracer)
            made.take(1 << 20)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        fired = tracer.fired
        if line % 2:
            slot = made.take(1 << 20)
            assert slot is not None and made.segments[slot.segment].unregister is not None
        made.close()
        assert (machine.registered, machine.faults) == ({}, [])
    assert line > 20


def test_a_segment_that_is_registered_already_by_somebody_else_is_refused(machine: Machine) -> None:
    machine.refuse = 712
    made = Arena(None, registrar(machine).register)
    with pytest.warns(UserWarning, match="could not be pinned .*error 712"):
        slot = made.take(1 << 20)
    assert slot is not None and not made.segments[slot.segment].unregister is not None
    made.close()


# -- a device that is broken, or hangs ------------------------------------------------------------------------


def test_every_segment_is_given_up_if_the_context_is_broken(machine: Machine) -> None:
    def drain() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    made = Arena(None, registrar(machine, drain).register)
    made.take(1 << 20)
    made.take(64 << 20)
    assert len(machine.registered) == 2
    made.close()
    assert (made.segments, machine.registered) == ([], {})


def test_every_segment_is_given_up_if_an_undo_raises(machine: Machine) -> None:
    undone: list[int] = []

    def register(mapping: Any) -> Any:
        number = len(made.segments)

        def undo() -> None:
            undone.append(number)
            raise ValueError(f"undo {number}")

        return undo

    made = Arena(None, register)
    made.take(1 << 20)
    made.take(64 << 20)
    with pytest.raises(ValueError, match="undo"):
        made.close()
    assert (sorted(undone), made.segments) == ([1, 2], [])


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.costly
def test_a_loader_can_be_closed_after_a_kernel_has_failed(
    machine: Machine, pool: Pool, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Torch must not be made to free what two streams have used: it would end the process."""
    loader = ShardedDataLoader(dataset(), 32, device=machine.devices[0], pool=pool)
    batches = iter(loader)
    held = [next(batches) for _ in range(4)]
    monkeypatch.setattr(Machine, "cudaHostUnregister", lambda self, address: 710)  # the error stays
    machine.has_failed = True
    with pytest.raises(RuntimeError, match="device-side assert"):
        held += batches
    if end == "close":
        loader.close()
    del loader, batches
    gc.collect()
    assert machine.faults == []
    machine.has_failed = False
    machine.finish()
    lost = copies.LOST.copy()
    copies.LOST.clear()
    del held, lost


@pytest.fixture
def hang(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """When it is called, the device does nothing more until ``machine.hangs`` is False."""

    def hang() -> None:
        machine.hangs = True
        monkeypatch.setattr(placement, "CLOSING_SECONDS", 0.05)

    yield hang
    machine.hangs = False
    machine.finish()
    for closed in (copies.CopyStream(SimulatedStreams(machine, machine.devices[0])), Arena()):
        closed.close()  # and looks again at what was left alone
    assert (copies.STILL_READ, arena.STILL_READ, machine.registered) == (set(), [], {})


def test_a_device_that_hangs_is_not_waited_for_without_end(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    loader = ShardedDataLoader(dataset(), 32, devices=machine.devices, pool=process_pool)
    batches = iter(loader)
    held = [next(batches) for _ in range(3)]
    segments = list(process_pool._transport.arena.segments)
    hang()
    with pytest.warns(UserWarning, match="has not done its copies within .* stays as it is") as caught:
        loader.close()
    assert len(caught) == 2  # one for each device
    # The memory is as it was, and a later mapping cannot be taken for it.
    assert len(machine.registered) == len(segments) > 0
    for segment in segments:
        assert not segment.mapping.closed
        assert segment.fd is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.close()
        placed = loader._placement.closer()
        assert placed() is False  # at once: it has been told
    machine.hangs = False
    machine.finish()
    assert machine.faults == []
    for number, (first, second) in enumerate(held):
        assert [first[0, 0].item(), second[0, 0].item()] == [1024.0 * 32 * number, 1024.0 * (32 * number + 16)]


def test_a_loader_that_is_forgotten_while_its_device_hangs_is_not_waited_for_either(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    batches = iter(ShardedDataLoader(dataset(), 32, device=machine.devices[0], pool=process_pool))
    for _ in range(3):
        next(batches)
    hang()
    with pytest.warns(UserWarning, match="has not done its copies within"):
        del batches
        gc.collect()
    machine.hangs = False
    machine.finish()
    assert machine.faults == []


@pytest.mark.slow
def test_memory_that_was_left_alone_is_given_back_when_the_device_goes_on(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    device = machine.devices[0]
    loader = ShardedDataLoader(dataset(), 32, device=device, pool=process_pool)
    batches = iter(loader)
    held = [next(batches) for _ in range(4)]
    hang()
    with pytest.warns(UserWarning, match="has not done its copies within"):
        loader.close()
    assert machine.registered and arena.STILL_READ and copies.STILL_READ
    machine.hangs = False
    machine.finish()
    with ShardedDataLoader(dataset(), 32, device=device, num_workers=1) as other:
        next(iter(other))
    assert (machine.registered, machine.faults, arena.STILL_READ, copies.STILL_READ) == ({}, [], [], set())
    del held, batches


def test_a_device_that_pauses_in_a_recovery_costs_no_later_segment(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    with ShardedDataLoader(dataset(), 16, device=machine.devices[0], pool=process_pool) as loader:
        batches = iter(loader)
        first = [next(batches) for _ in range(4)]
        hang()
        with pytest.warns(UserWarning, match="has not done its copies within"):
            process_pool.close()  # as the step after a Ctrl-C does
        machine.hangs = False
        assert len(first) + len(list(batches)) == 16
        machine.finish()
    assert (machine.registered, machine.faults) == ({}, [])


def test_ctrl_c_ends_the_wait_for_a_device_that_hangs_while_the_loader_is_closed(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = ShardedDataLoader(dataset(), 32, device=machine.devices[0], pool=process_pool)
    batches = iter(loader)
    next(batches)
    hang()
    monkeypatch.setattr(placement, "CLOSING_SECONDS", 600.0)
    monkeypatch.setattr(SimulatedStreams, "rest", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert process_pool._transport.workers == []  # it was done to its end
    monkeypatch.undo()
    machine.hangs = False
    machine.finish()


AT_EXIT = """
import atexit
@atexit.register  # the first one, so it runs last
def report():
    print("blocked", machine.blocked, "registered", len(machine.registered), machine.faults, len(pool.pids), flush=True)
import numpy, torch, simulated
from sharded_loader.devices import names, placement
machine = simulated.Machine()
names.accelerators = lambda: machine.devices
placement.streams_of, placement.indexed = machine.streams_of, lambda device: device
from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
data = ArrayDataset(numpy.zeros((256, 1024), numpy.float32))
pool = ProcessPool(2)
loader = ShardedDataLoader(data, 32, device=machine.devices[0], pool=pool)
batches = iter(loader)
held = [next(batches) for _ in range(3)]
print("registered", len(machine.registered), flush=True)
machine.blocked = 0
"""


@pytest.mark.slow
def test_at_the_programs_end_the_device_is_neither_waited_for_nor_asked() -> None:
    here = Path(__file__).resolve().parent.parent
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(here)!r})\n{AT_EXIT}"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    first, last = done.stdout.splitlines()
    registered = int(first.split()[1])
    assert registered > 0
    assert (last, done.stderr, done.returncode) == (f"blocked 0 registered {registered} [] 0", "", 0)


# -- what is held ---------------------------------------------------------------------------------------------


def test_no_context_is_made_on_the_first_device_by_a_loader_for_the_second(machine: Machine) -> None:
    """Neither by the thread that waits for copies, nor by another thread that closes the loader."""
    loader = ShardedDataLoader(dataset(), 32, device=machine.devices[1])
    for _ in range(2):
        list(loader)  # copies are under way at the end of the epoch
    next(iter(loader))
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join()
    assert machine.blocked > 0 and machine.faults == []


@pytest.mark.slow
def test_no_more_than_a_few_slots_are_held_and_none_after_the_epoch(
    machine: Machine, process_pool: ProcessPool
) -> None:
    with ShardedDataLoader(dataset(), 4, device=machine.devices[0], pool=process_pool) as loader:
        for _ in range(2):
            for _ in loader:  # the device does nothing until the host has to wait for it
                (one,) = loader._placement.copies.values()
                assert len(one.kept) <= HOST_AHEAD <= 4
            assert (len(one.kept), process_pool._transport.arena.lent) == (0, 0)
    assert machine.faults == []


def test_memory_is_free_after_the_epoch_whoever_reads(machine: Machine, pool: Pool) -> None:
    with ahead(ShardedDataLoader(dataset(), 32, device=machine.devices[0], pool=pool), False) as loader:
        for number, batch in enumerate(loader):
            machine.kernel(machine.devices[0], batch, lambda found: None)
            if number == 1:
                held = batch
        del batch
        gc.collect()
        (one,) = loader._placement.copies.values()
        assert len(one.kept) == 0
        # What pools hold for the next epoch, and the loader's own, is not what batches lie in.
        assert sum(machine.pinned.values()) == 0
        assert ctypes.string_at(held.data_ptr(), 4) == np.float32(32 * 1024).tobytes()


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_who_has_no_workers_waits_for_the_copies_too(machine: Machine, kind: Any, how: str) -> None:
    """Otherwise the memory of batches that nobody has received would be used again while they are copied."""
    loader = kind(dataset(), 32, device=machine.devices[0])
    batches = iter(loader)
    held = next(batches)
    _, copying = machine.streams[machine.devices[0]]
    assert copying.queue
    if how == "closed":
        getattr(loader, "close", getattr(batches, "_shutdown_workers", None))()
    else:
        del batches, loader
        gc.collect()
    assert not copying.queue
    machine.finish()
    assert (held[0, 0].item(), machine.faults) == (0.0, [])
