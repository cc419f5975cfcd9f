"""Pinned memory is given back when no device reads it any more, whatever comes in between. Nobody waits for ever."""

from __future__ import annotations

import contextlib
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
from conftest import HostClock, ahead
from devices_samples import copies_on, streams_on
from injection import InterruptAt
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import copies, placement
from sharded_loader.devices.accelerator import Registrar
from sharded_loader.engine.pool import Pool
from sharded_loader.memory import arena
from sharded_loader.memory.arena import Arena
from sharded_loader.torch import DataLoader

DATA = ArrayDataset(np.arange(256 * 1024, dtype=np.float32).reshape(256, 1024))


def registrar(machine: Machine, drain: Callable[[], Any] = lambda: None) -> Registrar:
    return Registrar(streams_on(machine), drain)  # type: ignore[arg-type]


def begin(machine: Machine, pool: Pool, count: int, size: int = 32, **options: Any) -> tuple[Any, Any, list[Any]]:
    """A loader of the first device, an iterator, and some of its batches."""
    options = options or {"device": machine.devices[0]}
    loader = ShardedDataLoader(DATA, size, pool=pool, **options)
    batches = iter(loader)
    return loader, batches, [next(batches) for _ in range(count)]


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
    assert machine.registered == {}


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


# -- a device that is broken, or hangs ------------------------------------------------------------------------


@pytest.mark.parametrize("raises", ["the wait", "the undo"])
def test_every_segment_is_given_up_if_the_context_is_broken_or_an_undo_raises(machine: Machine, raises: str) -> None:
    undone: list[int] = []

    def broken() -> None:
        raise RuntimeError("CUDA error: device-side assert triggered")

    def undo() -> bool:
        undone.append(1)
        raise ValueError("undo")

    made = Arena(None, registrar(machine, broken).register if raises == "the wait" else lambda mapping: undo)
    made.take(1 << 20)
    made.take(64 << 20)
    assert len(made.segments) == 2
    with pytest.raises(ValueError, match="undo") if raises == "the undo" else contextlib.nullcontext():
        made.close()
    assert (made.segments, machine.registered, len(undone)) == ([], {}, 2 * (raises == "the undo"))


@pytest.mark.parametrize("end", ["close", "drop"])
@pytest.mark.costly
def test_a_loader_can_be_closed_after_a_kernel_has_failed(
    machine: Machine, pool: Pool, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Torch must not be made to free what two streams have used: it would end the process."""
    loader, batches, held = begin(machine, pool, 4)
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
    """When it is called, the device does nothing more until ``machine.hangs`` is False. Time passes in waits for it."""

    def hang() -> None:
        clock = HostClock()
        machine.hangs, machine.pass_time = True, clock.move
        monkeypatch.setattr("sharded_loader.devices.copies.host_clock.now", clock)

    yield hang
    machine.hangs = False
    machine.finish()
    for closed in (copies_on(machine), Arena()):
        closed.close()  # and looks again at what was left alone
    assert (copies.STILL_READ, arena.STILL_READ, machine.registered) == (set(), [], {})


def test_a_device_that_hangs_is_not_waited_for_without_end(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    loader, _, held = begin(machine, process_pool, 3, devices=machine.devices)
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
        loader.close()  # at once: it has been told
    machine.hangs = False
    machine.finish()
    assert machine.faults == []
    for number, (first, second) in enumerate(held):
        assert [first[0, 0].item(), second[0, 0].item()] == [1024.0 * 32 * number, 1024.0 * (32 * number + 16)]


def test_a_loader_that_is_forgotten_while_its_device_hangs_is_not_waited_for_either(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    started = begin(machine, process_pool, 3)
    hang()
    with pytest.warns(UserWarning, match="has not done its copies within"):
        del started
        gc.collect()
    machine.hangs = False
    machine.finish()


def test_a_device_that_pauses_in_a_recovery_costs_no_later_segment(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None]
) -> None:
    loader, batches, first = begin(machine, process_pool, 4, 16)
    with loader:
        hang()
        with pytest.warns(UserWarning, match="has not done its copies within"):
            process_pool.close()  # as the step after a Ctrl-C does
        machine.hangs = False
        assert len(first) + len(list(batches)) == 16
        machine.finish()
    assert machine.registered == {}


def test_ctrl_c_ends_the_wait_for_a_device_that_hangs_while_the_loader_is_closed(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, _, _ = begin(machine, process_pool, 1)
    hang()
    monkeypatch.setattr(placement, "CLOSING_SECONDS", 600.0)
    monkeypatch.setattr(SimulatedStreams, "rest", lambda *_: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    assert process_pool.pids == []  # it was done to its end
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
    loader = ShardedDataLoader(DATA, 32, device=machine.devices[1])
    for _ in range(2):
        list(loader)  # copies are under way at the end of the epoch
    next(iter(loader))
    closing = threading.Thread(target=loader.close)
    closing.start()
    closing.join()
    assert machine.blocked > 0 and machine.faults == []


def test_memory_is_free_after_the_epoch_whoever_reads(machine: Machine, pool: Pool) -> None:
    with ahead(ShardedDataLoader(DATA, 32, device=machine.devices[0], pool=pool), False) as loader:
        for number, batch in enumerate(loader):
            if number == 1:
                held = batch
        del batch
        gc.collect()
        # What pools hold for the next epoch, and the loader's own, is not what batches lie in.
        assert sum(machine.pinned.values()) == 0
        assert ctypes.string_at(held.data_ptr(), 4) == np.float32(32 * 1024).tobytes()


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize("how", ["forgotten", "closed"])
def test_who_has_no_workers_waits_for_the_copies_too(machine: Machine, kind: Any, how: str) -> None:
    """Otherwise the memory of batches that nobody has received would be used again while they are copied."""
    loader = kind(DATA, 32, device=machine.devices[0])
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
