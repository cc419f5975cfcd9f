"""The simulated device does for the library what torch 2.13 does, and no more: see the table in `simulated`."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from simulated import Event, Machine, SimulatedStreams


@pytest.fixture
def streams(machine: Machine) -> SimulatedStreams:
    return SimulatedStreams(machine, machine.devices[1])


def recorded(streams: SimulatedStreams) -> Event:
    """An event with a time, which has passed."""
    event = streams.timed_event()
    event.record(streams.caller_stream())
    streams.machine.finish()
    return event


ALONE: dict[str, Callable[[SimulatedStreams], object]] = {
    "record": lambda s: s.timed_event().record(s.caller_stream()),
    "record_event": lambda s: s.caller_stream().record_event(),
    "wait_event": lambda s: s.caller_stream().wait_event(recorded(s)),
    "an event that was never recorded": lambda s: s.timed_event().query(),
    "a new stream": lambda s: s.new_stream(),
    "memory on the device": lambda s: s.empty_like(torch.ones(3)),
    "record_stream": lambda s: s.record_use([s.empty_like(torch.ones(3))], s.new_stream()),
    "the rows of a column": lambda s: s.machine.take(s.empty_like(torch.ones(3)), s.empty_like(torch.ones(2).long())),
    "how much memory there is": lambda s: s.machine.memory_of(s.device),
}
"""What torch makes the device current for."""

ASKING: dict[str, Callable[[SimulatedStreams], object]] = {
    "query": lambda s: recorded(s).query(),
    "elapsed_time": lambda s: recorded(s).elapsed_time(recorded(s)),
    "pinned memory": lambda s: s.pinned_bytes(64),
    "is_pinned, and no device has a context": lambda s: s.is_pinned(torch.ones(3)),
    "register, unregister": lambda s: (s.machine.cudaHostRegister(4096, 64, 1), s.machine.cudaHostUnregister(4096)),
    "another stream made current, and the one before again": lambda s: s.set_stream(s.new_stream()),
    "a copy that the host waits for": lambda s: s.machine.load(s.device, torch.empty(3), torch.ones(3)),
}
"""Where CUDA makes a context on the device that is current."""


@pytest.mark.parametrize("call", [*ALONE, *ASKING])
def test_a_call_that_torch_does_not_guard_is_a_fault_with_no_device_or_another_one(
    machine: Machine, streams: SimulatedStreams, call: str
) -> None:
    calls = ALONE | ASKING
    calls[call](streams)
    assert bool(machine.faults) is (call in ASKING)
    machine.faults.clear()
    with streams.current():
        calls[call](streams)
    assert machine.faults == []
    if call in ("query", "elapsed_time"):
        with machine.current(machine.devices[0]):
            calls[call](streams)
        assert machine.faults
        machine.faults.clear()


def test_an_event_is_what_was_recorded_last(machine: Machine, streams: SimulatedStreams) -> None:
    stream, waiting = streams.caller_stream(), streams.new_stream()
    event = stream.record_event()
    waiting.wait_event(event)
    machine.finish()
    event.record(stream)
    assert not event.passed
    waiting.wait_event(event)
    machine.finish()
    assert event.passed


def test_to_wait_for_an_event_is_to_wait_for_what_was_recorded_by_then(machine: Machine) -> None:
    first, second = (machine.new_stream(machine.devices[0]) for _ in range(2))
    event, seen = Event(machine), []
    first.wait_event(event)  # never recorded
    event.record(second)
    first.wait_event(event)
    first.give(lambda: seen.append(event.passed))
    second.give(lambda: None, lambda: bool(seen))
    event.record(second)  # would be waited for without end
    machine.finish()
    assert seen == [False]


def test_an_event_belongs_to_the_device_of_its_first_stream(machine: Machine) -> None:
    event = machine.streams[machine.devices[0]][0].record_event()
    with pytest.raises(RuntimeError, match="does not match recording stream's device"):
        event.record(machine.streams[machine.devices[1]][0])


def test_times_are_those_of_events_that_have_them_and_have_passed(machine: Machine, streams: SimulatedStreams) -> None:
    stream = streams.caller_stream()
    with streams.current():
        with pytest.raises(ValueError, match="enable_timing"):
            stream.record_event().elapsed_time(recorded(streams))
        late = streams.timed_event()
        with pytest.raises(ValueError, match="be recorded"):
            recorded(streams).elapsed_time(late)
        early = recorded(streams)
        late.record(stream)
        with pytest.raises(RuntimeError, match="completed"):
            early.elapsed_time(late)
        machine.finish()
        assert early.elapsed_time(late) >= 0


@pytest.mark.parametrize(
    ("part", "guarded"), [("whole", True), ("begin", True), ("behind", False), ("behind, of the storage", True)]
)
def test_torch_knows_of_a_copy_by_the_storage_or_by_where_the_block_begins(
    machine: Machine, streams: SimulatedStreams, part: str, guarded: bool
) -> None:
    with streams.current():
        pinned = streams.pinned_bytes(64)
        array = pinned.numpy()
        sources = {"whole": pinned, "begin": torch.from_numpy(array[:8]), "behind": torch.from_numpy(array[8:16])}
        source = sources.get(part, pinned[8:16])
        streams.copy(streams.empty_like(source), source)
        address = pinned.data_ptr()
        del pinned, array, sources, source
        assert (streams.pinned_bytes(64).data_ptr() != address) is guarded
        machine.finish()
