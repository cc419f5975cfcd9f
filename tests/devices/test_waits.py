"""Who waits for whom: the host for a device that is behind, and a device for data. The numbers tell them apart."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
from conftest import HostClock
from devices_samples import copies_on, streams_on
from simulated import Machine, SimulatedStreams, rest_beside_the_caller

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.devices.background import Later
from sharded_loader.devices.copies import LONGEST_REST, SHORTEST_REST, CopyStream
from sharded_loader.engine.pool import Pool
from sharded_loader.instruments.stats import Counts, Meter


@pytest.fixture
def clock(machine: Machine, host_time: HostClock, monkeypatch: pytest.MonkeyPatch) -> HostClock:
    """The clock of the host, and of the device. While the host rests, a second passes."""
    machine.clock = host_time
    monkeypatch.setattr("sharded_loader.devices.placement.CLOSING_SECONDS", 1e9)  # of this clock
    rest = SimulatedStreams.rest
    monkeypatch.setattr(SimulatedStreams, "rest", lambda *arguments: (host_time.move(1.0), rest(*arguments)))
    return host_time


def slow(machine: Machine, clock: HostClock, keeps_step: bool) -> Any:
    """Rows that take 5 seconds for each batch of 4. A device that does its work at once has done it before."""

    def row(index: int) -> Any:
        if index % 4 == 0:
            if keeps_step:
                machine.finish()
            clock.move(5.0)
        return np.full(1000, index)

    return SimpleDataset(range(64)).transform(row)


def counting(machine: Machine, **options: Any) -> ShardedDataLoader:
    return ShardedDataLoader(np.arange(64.0)[:, None], 4, device=machine.devices[0], **options)


COUNTED = [4.0 * number for number in range(16)]


def firsts(batches: Any) -> list[float]:
    return [batch[0, 0].item() for batch in batches]


def test_to_wait_for_the_device_is_not_to_wait_for_data(
    machine: Machine, clock: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest_beside_the_caller(monkeypatch)
    with ShardedDataLoader(np.zeros((64, 1000)), 4, device=machine.devices[0]) as loader:
        for _ in loader:  # the device does nothing until the host has to wait for it
            pass
        stats = loader.stats()
    assert stats.device_seconds > 10
    assert (stats.waiting_seconds, stats.placing_seconds) == (0, 0)
    assert stats.seconds == stats.device_seconds
    assert "0% of the time waiting for data, 100% of it waiting for the device" in str(stats)


def test_a_device_that_has_nothing_to_do_has_waited_for_data(machine: Machine, clock: HostClock) -> None:
    with ShardedDataLoader(slow(machine, clock, keeps_step=True), 4, device=machine.devices[0]) as loader:
        for _ in range(2):
            for _ in loader:
                machine.finish()
        next(iter(loader))  # looks at the events of the epoch before
        first, second = loader.stats(0), loader.stats(1)
    # Of the first batch of all the device tells nothing: it was not known which device it is. Of sixteen batches the
    # first seven are measured, and one for the next seven.
    assert (first.device_waiting_seconds, second.device_waiting_seconds) == (13 * 5, 14 * 5)
    assert (first.device_seconds, second.device_seconds) == (0, 0)


def test_a_device_that_is_behind_has_not_waited_for_data_however_slow_that_is(
    machine: Machine, clock: HostClock
) -> None:
    with ShardedDataLoader(slow(machine, clock, keeps_step=False), 4, device=machine.devices[0]) as loader:
        batches = iter(loader)
        for _ in range(4):
            next(batches)
        machine.finish()  # it had work all the time
        next(batches)
        stats = loader.stats()
    assert (stats.device_waiting_seconds, stats.device_seconds, stats.waiting_seconds) == (0, 0, 5 * 5)


def test_events_of_two_streams_are_not_compared(machine: Machine, clock: HostClock) -> None:
    """When the one is recorded says nothing of what the other one's stream has to do."""
    device = machine.devices[0]
    streams = [machine.stream(device), machine.new_stream(device)]
    with ShardedDataLoader(slow(machine, clock, keeps_step=True), 4, device=device) as loader:
        batches = iter(loader)
        for number in range(16):
            with machine.on(device, streams[number % 2]):
                next(batches)
            machine.finish()
        assert next(batches, None) is None
        assert loader.stats().device_waiting_seconds == 0


def test_an_event_that_waits_to_be_read_is_not_recorded_again(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch raises if the time of an event is asked for that has been recorded, and has not passed."""
    made, make = [], SimulatedStreams.timed_event

    def interrupted(streams: SimulatedStreams) -> Any:
        made.append(1)
        if len(made) == 3:  # that of the third call, when the second batch is ready
            raise KeyboardInterrupt
        return make(streams)

    monkeypatch.setattr(SimulatedStreams, "timed_event", interrupted)
    with counting(machine) as loader:
        batches = iter(loader)
        next(batches)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        for _ in range(15):
            machine.finish()
            batch = next(batches)
        machine.finish()
        assert batch[0, 0].item() == 60


def test_what_a_device_tells_of_an_epoch_that_is_not_kept_counts_in_the_sum(
    machine: Machine, clock: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "KEPT_EPOCHS", 0)
    streams = streams_on(machine)
    copies, old, meter = CopyStream(streams), Counts(), Meter(range(3))  # type: ignore[arg-type]
    meter.begin(0, old)
    meter.begin(1, meter.counts())
    called, ready = streams.timed_event(), streams.timed_event()
    for event in (called, ready):
        event.record(machine.stream(machine.devices[0]))
        machine.finish()
        clock.move(2.0)
    copies._waits.append((called, ready, old, 1))
    copies.begin([np.ones(3)]).finish()
    assert meter.stats().device_waiting_seconds == 2.0


@pytest.mark.costly
def test_ctrl_c_ends_the_wait_for_a_device_that_hangs(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, new_pool: Callable[..., Pool]
) -> None:
    """A wait of the device's own would be deaf, as in a collective whose other ranks are dead."""
    with counting(machine, pool=new_pool()) as loader:
        batches = iter(loader)
        with monkeypatch.context() as hangs:
            hangs.setattr(machine, "hangs", True)
            hangs.setattr(Later, "is_made", lambda later, _: later.done.wait(1) or signal.raise_signal(signal.SIGINT))
            got = []
            with pytest.raises(KeyboardInterrupt):
                while len(got) < 16:
                    got.append(next(batches))
        assert 0 < len(got) < 16
        got += batches
        machine.finish()
    assert firsts(got) == COUNTED


def test_a_device_that_cannot_record_the_call_is_an_error_of_the_batch_at_most(machine: Machine) -> None:
    with counting(machine) as loader:
        batches = iter(loader)
        next(batches)
        loader._placement.clock.records[machine.devices[0]] = mock.Mock(side_effect=RuntimeError("CUDA error"))
        batch = next(batches)
        machine.finish()
        assert batch[0, 0].item() == 4


def test_a_call_that_is_interrupted_before_the_device_knows_of_it_is_not_counted(machine: Machine) -> None:
    """Otherwise the next batch would ask for the time of an event that was never recorded."""
    with counting(machine) as loader:
        batches, clock = iter(loader), loader._placement.clock
        got = [next(batches)]
        clock.records[machine.devices[0]] = mock.Mock(side_effect=KeyboardInterrupt)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        machine.finish()
        clock.records.clear()
        clock.calls -= 1  # the next call records nothing, and must not count by itself
        for batch in batches:
            machine.finish()
            got.append(batch)
    assert firsts(got) == COUNTED


def test_the_longer_the_host_waits_the_longer_it_sleeps(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    def noted(streams: SimulatedStreams, seconds: float) -> None:
        rests.append(seconds)
        if len(rests) == 6:
            machine.finish()

    monkeypatch.setattr(SimulatedStreams, "rest", noted)
    copies = copies_on(machine)
    copies.begin([np.ones(9)]).finish()
    assert copies.drain()
    assert rests == [SHORTEST_REST * 2**k for k in range(4)] + [LONGEST_REST] * 2
