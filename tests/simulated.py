"""An accelerator that does its work late: streams, events, device memory and page-locked memory, without any hardware.

Work given to a stream waits in a queue and reads and writes memory only when `Machine.run` gets to it, in an order that
a seed chooses among those that streams and events allow. Copies and kernels know addresses and hold nothing, like those
of a real device, so memory that is used again too early shows as wrong values. Device memory is handed out as torch's
allocator does it: a block that is dropped may be used again at once by work on the stream that it was allocated on, and
after the ends of the streams that it was recorded on.

`Machine.faults` lists what would have been wrong or slow on a device: a copy from memory that is not pinned, memory
unmapped under a copy, memory pinned or an event asked for while another device is current, and so on.

Pinned memory is torch's: a block that is dropped is used again at once, unless a copy reads it that torch knows of.
Torch knows of a copy if its source has the storage that torch has pinned, or begins where the block begins.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharded_loader.devices.streams import Streams

KIND = "privateuseone"
"""The kind of device that torch leaves to others."""


class Event:
    """As torch's events: `Stream.record_event` makes them."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.machine = machine
        self.device = device
        self.passed = False
        self.time = 0.0

    def query(self) -> bool:
        self.machine.asks(self.device)
        return self.passed

    def record(self, stream: Stream) -> None:
        """With its time, as torch's events that have one. Torch makes the device of the event current for it."""
        self.passed = False

        def happen() -> None:
            self.passed, self.time = True, self.machine.clock()

        stream.give(happen)

    def elapsed_time(self, later: Event) -> float:
        """In milliseconds."""
        assert self.passed and later.passed, "torch raises: an event has not passed"
        return (later.time - self.time) * 1000


class PinnedBlock:
    """Host memory that torch has pinned, as long as somebody holds it."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.storage = 0
        self.guards: list[Event] = []


class Stream:
    """A queue of work: (what, whether it can be done now, what it reads)."""

    def __init__(self, machine: Machine, device: torch.device, name: str) -> None:
        self.machine = machine
        self.device = device
        self.name = f"{device} {name}"
        self.queue: deque[tuple[Callable[[], None], Callable[[], bool], range | None]] = deque()

    def give(
        self, work: Callable[[], None], ready: Callable[[], bool] = lambda: True, reads: range | None = None
    ) -> None:
        self.queue.append((work, ready, reads))

    def record_event(self) -> Event:
        self.machine.asks(self.device)
        self.machine.log.append(("record", self.name))
        return self.machine.record(self)

    def wait_event(self, event: Event) -> None:
        self.machine.asks(self.device)
        self.machine.log.append(("wait", self.name))
        self.give(lambda: None, lambda: event.passed)


def pretended_sys(root: Path, nodes: dict[int, str], gpus: dict[str, str], **siblings: str) -> Path:
    """The files of a machine under /sys that say what is near what.

    Args:
        root: where it is to stand.
        nodes: the CPUs of each NUMA node.
        gpus: of each PCI address the number of the node.
        siblings: of ``cpu0`` and others, the CPUs that share the core.
    """
    files = {f"devices/system/node/node{number}/cpulist": cpus for number, cpus in nodes.items()}
    files |= {f"bus/pci/devices/{address}/numa_node": node for address, node in gpus.items()}
    files |= {f"devices/system/cpu/{cpu}/topology/thread_siblings_list": cpus for cpu, cpus in siblings.items()}
    for name, text in files.items():
        (root / "sys" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys" / name).write_text(f"{text}\n")
    return root


class Machine:
    """All devices, and the host memory that they read.

    Args:
        seed: of the order in which work is done.
        blocks: device memory, in allocations; None: without end.
    """

    def __init__(self, seed: int = 0, count: int = 2, blocks: int | None = None) -> None:
        self.devices = [torch.device(KIND, number) for number in range(count)]
        self.streams: dict[torch.device, list[Stream]] = {one: [Stream(self, one, "default")] for one in self.devices}
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.blocks = blocks
        self.faults: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.allocated = self.peak = self.blocked = self.cleared = self.caches_emptied = 0
        self.refuse: int = 0
        self.hangs = False
        self.addresses: dict[torch.device, str] = {}
        self.clock: Callable[[], float] = time.perf_counter
        self.memory_bytes: tuple[int, int] | None = (1 << 30, 1 << 30)
        self._random = random.Random(seed)
        self.recorded: dict[int, list[Stream]] = {}
        self._current = threading.local()
        self.pinned_blocks: dict[int, PinnedBlock] = {}
        self._unpinned: list[PinnedBlock] = []
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}
        self._pending: list[tuple[list[Event], Stream, np.ndarray]] = []
        self._lock = threading.RLock()

    def streams_of(self, device: torch.device) -> SimulatedStreams | None:
        """In the place of the library's function of this name."""
        return SimulatedStreams(self, device) if device.type == KIND else None

    # -- streams --------------------------------------------------------------------------------------------

    def stream(self, device: torch.device) -> Stream:
        """The calling thread's current stream."""
        return getattr(self._current, str(device), self.streams[device][0])

    @contextmanager
    def on(self, device: torch.device, stream: Stream) -> Iterator[None]:
        before = self.stream(device)
        setattr(self._current, str(device), stream)
        try:
            yield
        finally:
            setattr(self._current, str(device), before)

    def new_stream(self, device: torch.device) -> Stream:
        self.streams[device].append(Stream(self, device, str(len(self.streams[device]))))
        return self.streams[device][-1]

    def run(self, steps: int) -> int:
        """Do up to so many pieces of work; how many there were."""
        for done in range(steps):
            able = [s for streams in self.streams.values() for s in streams if s.queue and s.queue[0][1]()]
            if not able:
                return done
            stream = self._random.choice(able)
            stream.queue[0][0]()
            stream.queue.popleft()
        return steps

    def finish(self) -> None:
        """Do all of it."""
        while self.run(1000):
            pass
        stuck = [s.name for streams in self.streams.values() for s in streams if s.queue]
        assert not stuck, f"streams that wait for ever: {stuck}"

    def record(self, stream: Stream) -> Event:
        event = Event(self, stream.device)
        stream.give(lambda: setattr(event, "passed", True))
        return event

    def kernel(self, device: torch.device, tensor: torch.Tensor, use: Callable[[np.ndarray], None]) -> None:
        """Give the current stream something that reads a tensor: ``use`` gets its values at that time."""
        address, nbytes, dtype, shape = tensor.data_ptr(), tensor.nbytes, tensor.numpy().dtype, tuple(tensor.shape)
        self.stream(device).give(lambda: use(np.frombuffer(ctypes.string_at(address, nbytes), dtype).reshape(shape)))

    # -- device memory --------------------------------------------------------------------------------------

    def allocate(self, device: torch.device, host: torch.Tensor) -> torch.Tensor:
        with self._lock:
            layout = torch.empty_like(host)
            stream, size = self.stream(device), max(8, layout.nbytes)
            for item in list(self._pending):
                events, home, block = item
                if all(event.passed for event in events):
                    self._pending.remove(item)
                    self._free.setdefault((home, block.nbytes), []).append(block)
            free = self._free.setdefault((stream, size), [])
            if free:
                block = free.pop()
            else:
                if self.blocks is not None and self.allocated >= self.blocks:
                    raise torch.OutOfMemoryError(f"simulated: {self.allocated} blocks on {device} are all there are")
                block = np.full(size, 0xAB, np.uint8)
                self.allocated += 1
                self.peak = max(self.peak, self.allocated)
            exporter = np.frombuffer((ctypes.c_uint8 * size).from_buffer(block), np.uint8)
            recorded: list[Stream] = []
            weakref.finalize(exporter, self._freed, stream, block, recorded).atexit = False
            self.log.append(("allocate", stream.name))
            self.recorded[block.ctypes.data] = recorded
            raw = torch.from_numpy(exporter)[: layout.nbytes]
            return raw.view(host.dtype).as_strided(host.shape, layout.stride())

    def _freed(self, stream: Stream, block: np.ndarray, recorded: list[Stream]) -> None:
        if recorded:
            self._pending.append(([self.record(one) for one in recorded], stream, block))
        else:
            self._free.setdefault((stream, block.nbytes), []).append(block)

    def empty_cache(self) -> None:
        self.caches_emptied += 1
        self.finish()
        self.allocated -= sum(map(len, self._free.values())) + len(self._pending)
        self._free.clear()
        self._pending.clear()

    # -- host memory ----------------------------------------------------------------------------------------

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether host memory is page-locked in place."""
        return any(start <= address and address + nbytes <= start + size for start, size in self.registered.items())

    def pins(self) -> None:
        """Pinning makes a context on the device that is current in the thread, by default the first."""
        if getattr(self._current, "made", None) is None:
            self.faults.append("memory was pinned with no device made current")

    def asks(self, device: torch.device) -> None:
        """So does every call about an event or a stream."""
        if getattr(self._current, "made", None) != device:
            self.faults.append(f"{device} was asked for an event with no device made current, or another one")

    def pin(self, nbytes: int) -> torch.Tensor:
        """Pinned memory: of a block that was dropped, if no copy reads it that is known of, or new."""
        with self._lock:
            size = 1 << max(6, (nbytes - 1).bit_length())
            fits = (one for one in list(self._unpinned) if len(one.memory) == size)
            block = next((one for one in fits if all(event.passed for event in one.guards)), None)
            if block is None:
                block = PinnedBlock(bytearray(size))
            else:
                self._unpinned.remove(block)
                block.guards.clear()
        array = np.frombuffer((ctypes.c_uint8 * size).from_buffer(block.memory), np.uint8)
        address = array.__array_interface__["data"][0]
        whole = torch.from_numpy(array)
        block.storage = whole.untyped_storage()._cdata
        self.pinned[address], self.pinned_blocks[address] = size, block
        weakref.finalize(array, self._unpin, address).atexit = False
        return whole[:nbytes]

    def _unpin(self, address: int) -> None:
        del self.pinned[address]
        self._unpinned.append(self.pinned_blocks.pop(address))

    def guards(self, source: torch.Tensor) -> list[Event]:
        """The guards of the block that a copy reads, if torch finds it."""
        address = source.data_ptr()
        for start, block in self.pinned_blocks.copy().items():
            if start == address or block.storage == source.untyped_storage()._cdata:
                return block.guards
        return []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.pins()
        if self.refuse:
            return self.refuse
        if address in self.registered:
            self.faults.append("registered twice")
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.pins()
        nbytes = self.registered.pop(address)
        for streams in self.streams.values():
            for stream in streams:
                if any(r is not None and address <= r.start < address + nbytes for _, _, r in stream.queue):
                    self.faults.append("memory was unregistered under a copy")
        return 0

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


class SimulatedStreams(Streams):
    """The machine, as the library sees it."""

    def __init__(self, machine: Machine, device: torch.device) -> None:
        self.device = device
        self.machine = machine

    @contextmanager
    def current(self) -> Iterator[None]:
        threads, before = self.machine._current, getattr(self.machine._current, "made", None)
        threads.made = self.device
        try:
            yield
        finally:
            threads.made = before

    def new_stream(self) -> Stream:
        self.machine.asks(self.device)
        return self.machine.new_stream(self.device)

    def caller_stream(self) -> Stream:
        return self.machine.stream(self.device)

    def on(self, stream: Stream) -> Any:
        return self.machine.on(self.device, stream)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self.machine.allocate(self.device, host)

    def hollow(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(0, dtype=dtype)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        machine, stream = self.machine, self.caller_stream()
        machine.log.append(("copy", stream.name))
        start, nbytes = source.data_ptr(), source.nbytes
        if nbytes and not self.is_pinned(source):
            machine.faults.append("a copy from memory that is not pinned: the host waits for it")
        if source.stride() != target.stride():
            machine.faults.append("a copy between layouts: the host makes one first, and waits")
        to, done = target.data_ptr(), Event(machine, self.device)
        machine.guards(source).append(done)

        def move() -> None:
            ctypes.memmove(to, start, nbytes)
            done.passed = True

        stream.give(move, reads=range(start, start + nbytes))
        return target

    def used_on(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        for tensor in tensors:
            self.machine.log.append(("used_on", stream.name))
            recorded = self.machine.recorded.get(tensor.untyped_storage().data_ptr())
            if recorded is not None:  # on the device
                recorded.append(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        return True  # all are on the host, where nobody can tell them apart

    def is_pinned(self, host: torch.Tensor) -> bool:  # finalizers take entries out of `pinned`
        machine, address = self.machine, host.data_ptr()
        own = any(start <= address < start + size for start, size in machine.pinned.copy().items())
        return own or machine.holds(address, host.nbytes)

    def pin(self, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        layout = torch.empty_strided(host.shape, stride, dtype=host.dtype)
        raw = self.pinned_bytes(layout.untyped_storage().nbytes())
        return raw.view(host.dtype).as_strided(host.shape, stride).copy_(host)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        self.machine.pins()
        return self.machine.pin(max(1, nbytes))[:nbytes]

    def runtime(self) -> Any:
        return self.machine

    def address(self) -> str | None:
        return self.machine.addresses.get(self.device)

    def timed_event(self) -> Event:
        return Event(self.machine, self.device)

    def rest(self, seconds: float) -> None:
        """The host sleeps, and the device works."""
        self.machine.blocked += 1
        if self.machine.hangs:
            time.sleep(seconds)
        else:
            assert self.machine.run(1), "the host waits for an event that never passes"

    def load(self, host: torch.Tensor) -> torch.Tensor:
        loaded = self.empty_like(host)
        return loaded.copy_(host)

    def take(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        taken = self.empty_like(torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype))
        source, to = column.numpy(), taken.data_ptr()
        at, count = rows.data_ptr(), len(rows)

        def gather() -> None:
            numbers = np.frombuffer(ctypes.string_at(at, count * 8), np.int64)
            values = np.ascontiguousarray(source[numbers])
            ctypes.memmove(to, values.ctypes.data, values.nbytes)

        self.caller_stream().give(gather)
        return taken

    def empty_cache(self) -> None:
        self.machine.empty_cache()

    def memory(self) -> tuple[int, int] | None:
        return self.machine.memory_bytes
