"""The simulated device does what torch 2.13 does, and no more, and the tests for a GPU pass where one is pretended.

See the table in `simulated`. A slip in the tests for a GPU would waste a real one's time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

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


CHOSEN = "not (spawn or forkserver or thread or inline) or thread_gets or threads_put or beside_threads"
HERE = Path(__file__).resolve().parent.parent
PARTS = sorted(path.stem.removeprefix("test_gpu_") for path in (HERE / "gpu").glob("test_gpu_*.py"))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", PARTS)
def test_the_tests_for_a_gpu_pass_on_a_pretended_one(part: str) -> None:
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "simulated_cuda", "-p", "no:cacheprovider"]
    command += [str(HERE / "gpu" / f"test_gpu_{part}.py"), "-k", CHOSEN]
    gpus = "2" if part == "processes" else "1"
    env = {**os.environ, "PYTHONPATH": path, "GPU_TESTS_PART": "100", "PRETENDED_GPUS": gpus}
    done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
