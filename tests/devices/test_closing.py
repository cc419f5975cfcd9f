"""Pinned memory is given back when no device reads it any more, whatever comes in between. Nobody waits for ever."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, PROCESS_POOLS, HostClock, ahead, make_pool, until
from devices_samples import copies_on, streams_on
from injection import InterruptAt
from simulated import Machine, SimulatedStreams

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.devices import copies as module
from sharded_loader.devices import placement
from sharded_loader.devices.accelerator import Registrar
from sharded_loader.devices.copies import HOST_AHEAD, CopyStream
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


@pytest.mark.costly
@pytest.mark.parametrize("in_arena", [True, False])
def test_an_interruption_at_every_line_of_a_registration_leaves_nothing_registered(
    machine: Machine, in_arena: bool
) -> None:
    line, fired, before = 0, True, sys.gettrace()
    while fired:
        line += 1
        register, mapping = registrar(machine).register, mmap.mmap(-1, 4096)
        made, tracer = Arena(None, register), InterruptAt(line, ("arena.py", "accelerator.py"))
        try:
            sys.settrace(tracer)
            made.take(1 << 20) if in_arena else register(mapping)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
        fired = tracer.fired
        if not in_arena:
            undo = register(mapping)  # who asks again gets it
            assert undo is not None and undo()
        elif line % 2:
            slot = made.take(1 << 20)
            assert slot is not None and made.segments[slot.segment].unregister is not None
        made.close()
        assert (machine.registered, machine.faults) == ({}, [])
    assert line > (20 if in_arena else 5)


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
    machine.fail()
    with pytest.raises(RuntimeError, match="device-side assert"):
        held += batches
    if end == "close":
        loader.close()
    del loader, batches
    gc.collect()
    assert machine.faults == []
    machine.has_failed = False
    machine.finish()
    lost = module.LOST.copy()
    module.LOST.clear()
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
    assert (module.STILL_READ, arena.STILL_READ, machine.registered) == (set(), [], {})


@pytest.mark.parametrize("end", ["close", "forget"])
def test_a_device_that_hangs_is_not_waited_for_without_end(
    machine: Machine, process_pool: ProcessPool, hang: Callable[[], None], end: str
) -> None:
    loader, batches, held = begin(machine, process_pool, 3, devices=machine.devices)
    segments = list(process_pool._transport.arena.segments)
    hang()
    with pytest.warns(UserWarning, match="has not done its copies within .* stays as it is") as caught:
        if end == "close":
            loader.close()
        else:
            del loader, batches
            gc.collect()
    assert len(caught) == 2  # one for each device
    # The memory is as it was, and a later mapping cannot be taken for it.
    assert len(machine.registered) == len(segments) > 0
    for segment in segments:
        assert not segment.mapping.closed
        assert segment.fd is None
    if end == "close":
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loader.close()  # at once: it has been told
    machine.hangs = False
    machine.finish()
    assert machine.faults == []
    for number, (first, second) in enumerate(held):
        assert [first[0, 0].item(), second[0, 0].item()] == [1024.0 * 32 * number, 1024.0 * (32 * number + 16)]


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


@pytest.mark.parametrize("how", ["forgotten", "closed"])
@pytest.mark.parametrize("kind", ["drop-in", *POOLS])
def test_memory_is_given_back_only_when_no_copy_reads_it(machine: Machine, kind: str, how: str) -> None:
    """Otherwise the memory of batches that nobody has received would be used again while they are copied."""
    options: dict[str, Any] = {} if kind == "drop-in" else {"pool": make_pool(kind)}
    loader = (ShardedDataLoader if options else DataLoader)(DATA, 32, device=machine.devices[0], **options)
    batches = iter(loader)
    held = [next(batches) for _ in range(1 + 4 * bool(options))]
    copying = machine.streams[machine.devices[0]][1].queue
    assert any(reads for *_, reads in copying)
    assert bool(machine.registered) is (kind in PROCESS_POOLS)
    if how == "closed":  # in the middle of copies
        getattr(loader, "close", getattr(batches, "_shutdown_workers", None))()
    else:
        del batches, loader, options
        gc.collect()
    assert (machine.registered, machine.faults) == ({}, [])
    assert not any(reads for *_, reads in copying)
    machine.finish()
    assert [batch[0, 0].item() for batch in held] == [1024.0 * 32 * number for number in range(len(held))]


# -- one copy stream by itself --------------------------------------------------------------------------------


@pytest.fixture
def copies(machine: Machine) -> Iterator[CopyStream]:
    yield copies_on(machine)
    module.STILL_READ.clear()
    gc.collect()


def begin_one(copies: CopyStream) -> Any:
    return copies.begin([torch.arange(9)])


def give_up(copies: CopyStream) -> None:
    """Close it while the device hangs."""
    with pytest.warns(UserWarning, match="has not done its copies"):
        assert not copies.close(0.01)


def test_a_signal_handler_may_close_the_loader_while_the_host_waits(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_one(copies)
    rest, signals = SimulatedStreams.rest, [signal.SIGINT]

    def interrupting(streams: SimulatedStreams, seconds: float) -> None:
        if signals:
            signal.raise_signal(signals.pop())
        else:
            rest(streams, seconds)

    def handler(number: int, frame: object) -> None:
        assert copies.close()

    monkeypatch.setattr(SimulatedStreams, "rest", interrupting)
    before = signal.signal(signal.SIGINT, handler)
    try:
        assert copies.drain()
    finally:
        signal.signal(signal.SIGINT, before)
    assert (len(copies.in_use), signals) == (0, [])


def test_a_thread_that_waits_for_a_hanging_device_does_not_keep_another_from_closing(
    machine: Machine, copies: CopyStream, hang: Callable[[], None]
) -> None:
    hang()
    for _ in range(HOST_AHEAD):
        begin_one(copies).finish()
    inside = threading.Thread(target=lambda: begin_one(copies))
    inside.start()
    assert until(lambda: machine.blocked)
    give_up(copies)
    machine.hangs = False
    inside.join()


def test_what_a_hanging_device_reads_stays_and_nobody_waits_for_it_any_more(
    machine: Machine, copies: CopyStream, hang: Callable[[], None]
) -> None:
    def pin_memory() -> Any:
        pinned = copies.streams.pin(torch.arange(9), (1,))
        return SimpleNamespace(values=pinned, to=lambda device, non_blocking: "moved")

    hang()
    for _ in range(HOST_AHEAD):
        copies.begin([torch.arange(9), SimpleNamespace(pin_memory=pin_memory, to=str)]).finish()
    count = len(machine.pinned)
    give_up(copies)
    gc.collect()
    assert len(machine.pinned) == count == 2 * HOST_AHEAD
    blocked = machine.blocked
    assert not copies.close(60.0) and machine.blocked == blocked  # it only looks again
    # A thread that is in `next` at this moment.
    late = threading.Thread(target=lambda: begin_one(copies).finish(), daemon=True)
    late.start()
    late.join(60.0)
    assert not late.is_alive()


def test_what_was_left_alone_is_given_back_when_any_loader_is_closed_and_waited_for_again(
    machine: Machine, copies: CopyStream, hang: Callable[[], None]
) -> None:
    hang()
    begin_one(copies).finish()
    assert not copies.drain(0.01)
    give_up(copies)
    assert copies in module.STILL_READ and len(copies.in_use) == 1
    machine.hangs = False
    machine.finish()
    assert copies_on(machine).close()
    assert (module.STILL_READ, len(copies.in_use)) == (set(), 0)
    for _ in range(3 * HOST_AHEAD):
        begin_one(copies).finish()
        assert len(copies.in_use) <= HOST_AHEAD


def test_at_the_programs_end_the_memory_is_left_to_the_driver(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_one(copies).finish()
    monkeypatch.setattr(module, "program_ends", lambda: True)
    assert not copies.close()  # without a warning
    gc.collect()
    assert (machine.blocked, len(machine.pinned)) == (0, 1)


def test_at_the_programs_end_no_thread_is_left_that_waits_for_a_busy_device(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python would end it in the middle of a call of torch, which aborts the process."""
    resting, ends = threading.Event(), threading.Event()
    monkeypatch.setattr(copies.streams, "rest", lambda seconds: (resting.set(), ends.wait()))
    monkeypatch.setattr(module, "program_ends", ends.is_set)
    machine.hangs = True
    for _ in range(HOST_AHEAD + 1):
        copies.begin([torch.arange(9)])
    assert resting.wait(60.0)
    ends.set()
    assert not copies.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sharded_loader-copies")]
    module.STILL_READ.discard(copies)


@pytest.mark.parametrize("closes", [False, True])
def test_who_waits_for_copies_waits_for_one_that_is_about_to_begin(
    machine: Machine, copies: CopyStream, monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    copy, begun, goes_on = SimulatedStreams.copy, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        begun.set()
        goes_on.wait()
        return copy(*arguments)

    monkeypatch.setattr(SimulatedStreams, "copy", slow)
    if closes:  # and leaves the memory alone
        monkeypatch.setattr(module, "program_ends", lambda: True)
    wait = copies.close if closes else copies.drain
    copies.begin([torch.arange(9)])
    assert begun.wait(60.0)
    waiter = threading.Thread(target=wait)
    waiter.start()
    waiter.join(0.1)
    goes_on.set()
    waiter.join()
    machine.run(0)  # what was begun is enqueued
    assert (len(copies.in_use), len(module.STILL_READ), machine.faults) == (int(closes), int(closes), [])
