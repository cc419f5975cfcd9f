"""An accelerator that does its work late: streams, events, device memory and page-locked memory, without any hardware.

Work given to a stream waits in a queue and reads and writes memory only when `Machine.run` gets to it, in an order that
a seed chooses among those that streams and events allow. Copies and kernels know addresses and hold nothing, like those
of a real device, so memory that is used again too early shows as wrong values. Device memory is handed out as torch's
allocator does it: a block that is dropped may be used again at once by work on the stream that it was allocated on, and
after the ends of the streams that it was recorded on.

`Machine.faults` lists what would have been wrong or slow on a device: a copy from memory that is not pinned, memory
unmapped under a copy, and a call that makes a context on a device that nobody has named. CUDA does so for the device
that is current in the thread, in a new thread the first one. What torch 2.13 makes current by itself:

| call | torch makes the device current |
|---|---|
| `Event.query`, `Event.synchronize` | no. An event that was never recorded has passed, and no device is asked |
| `Event.elapsed_time` | too late: it queries both events before |
| `Event.record`, `Stream.record_event` | yes, that of the stream. An event stays with the device of its first stream |
| `Stream.wait_event` | yes. It waits for what was recorded by then |
| `Stream(device)`, `empty_like`, `copy_`, `index_select`, `mem_get_info` | yes |
| `torch.cuda.set_stream(stream)` | yes |
| `current_stream`, `record_stream` | they ask no device. A stream whose memory it is anyway is not recorded |
| `is_pinned` | one that has a context; if none has, no |
| pinned memory of torch's | no: it queries events of blocks that were dropped |
| `cudaHostRegister`, `cudaHostUnregister`, `cudaGetLastError` | no |
| `empty_cache` | no: it waits for events, and frees memory |

Pinned memory is torch's: a block that is dropped is used again at once, unless a copy reads it that torch knows of.
Torch knows of a copy if its source has the storage that torch has pinned, or begins where the block begins. (Torch
then waits for all that the stream of the copy had to do when the block was dropped; here, for the copy alone.)

After a kernel has failed (`Machine.has_failed`), calls about events raise. Torch makes such a call when it frees memory
that a second stream has used, in a destructor, and so the process ends. That is a fault too.

Sources: c10/cuda/CUDAEvent.h, c10/cuda/impl/CUDAGuardImpl.h and ATen/core/CachingHostAllocator.h of torch 2.13, torch's
torch/cuda/streams.py and torch/cuda/__init__.py, and for what these call (``setCurrentStream``, ``isPinnedPtr``,
``emptyCache``) PyTorch's repository.
"""

from __future__ import annotations

import ctypes
import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from sharded_loader.devices.accelerator import Streams, in_turn

KIND = "privateuseone"
"""The kind of device that torch leaves to others."""


class Record:
    """What an event has recorded: it passes when its stream gets there."""

    passed, time = False, 0.0


class Event:
    """As torch's events.

    Args:
        timed: it tells when it has passed.
    """

    def __init__(self, machine: Machine, timed: bool = False) -> None:
        self.machine = machine
        self.timed = timed
        self.device: torch.device | None = None
        self.last: Record | None = None

    @property
    def passed(self) -> bool:
        return self.last is None or self.last.passed

    def query(self) -> bool:
        if self.device is not None:
            self.machine.asks(self.device)
            self.machine.check()
        return self.passed

    def record(self, stream: Stream) -> None:
        self.device = self.device or stream.device
        if self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.last = made = Record()

        def happen() -> None:
            made.passed, made.time = True, self.machine.clock()

        stream.give(happen)

    def elapsed_time(self, later: Event) -> float:
        """In milliseconds."""
        if not (self.timed and later.timed and self.last and later.last):
            raise ValueError("Both events must be created with argument 'enable_timing=True', and be recorded.")
        if not (self.query() and later.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return (later.last.time - self.last.time) * 1000


class PinnedBlock:
    """Host memory that torch has pinned, as long as somebody holds it."""

    def __init__(self, memory: bytearray) -> None:
        self.memory = memory
        self.storage = 0
        self.guards: list[Record] = []


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
        self.machine.check()
        self.machine.log.append(("record", self.name))
        return self.machine.record(self)

    def wait_event(self, event: Event) -> None:
        self.machine.log.append(("wait", self.name))
        last = event.last
        self.give(lambda: None, lambda: last is None or last.passed)


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
        self.hangs = self.has_failed = False
        self.clock: Callable[[], float] = time.perf_counter
        self.memory_bytes: tuple[int, int] | None = (1 << 30, 1 << 30)
        self._random = random.Random(seed)
        self.contexts: set[torch.device] = set()
        self._recorded: dict[int, tuple[Stream, list[Stream]]] = {}
        self._current = threading.local()
        self.pinned_blocks: dict[int, PinnedBlock] = {}
        self._unpinned: list[PinnedBlock] = []
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}
        self._pending: list[tuple[list[Event], Stream, np.ndarray]] = []
        self._lock = threading.RLock()

    def streams_of(self, device: torch.device) -> SimulatedStreams | None:
        """In the place of the library's function of this name."""
        return SimulatedStreams(self, device) if device.type == KIND else None

    def of_rows(self) -> dict[str, Callable[..., Any]]:
        """In the place of functions of `resident`."""

        def beside(tensor: torch.Tensor) -> SimulatedStreams:
            return SimulatedStreams(self, self._recorded[tensor.untyped_storage().data_ptr()][0].device)

        return {
            "load_rows": lambda streams, target, host: streams.load(target, host),
            "take_rows": lambda column, rows: beside(column).take(column, rows),
            "put_rows": lambda column, places, rows: beside(column).put(column, places, rows),
            "memory_of": lambda streams: streams.memory(),
        }

    # -- streams --------------------------------------------------------------------------------------------

    def stream(self, device: torch.device) -> Stream:
        """The calling thread's current stream."""
        return getattr(self._current, str(device), self.streams[device][0])

    @contextmanager
    def on(self, device: torch.device, stream: Stream) -> Iterator[None]:
        before = self.stream(device)
        self.set_stream(device, stream)
        try:
            with self.current(device):
                yield
        finally:
            self.set_stream(device, before)

    def set_stream(self, device: torch.device, stream: Stream) -> None:
        setattr(self._current, str(device), stream)

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        """Make a device current in this thread."""
        before = getattr(self._current, "device", None)
        self._current.device = device
        try:
            yield
        finally:
            self._current.device = before

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

    def check(self) -> None:
        """After a kernel has failed, each call about an event raises."""
        if self.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def _frees(self, used: bool) -> None:
        if used and self.has_failed:
            self.faults.append("memory that a second stream has used was freed after a kernel had failed: torch aborts")

    def record(self, stream: Stream) -> Event:
        event = Event(self)
        event.record(stream)
        return event

    def kernel(self, device: torch.device, tensor: torch.Tensor, use: Callable[[np.ndarray], None]) -> None:
        """Give the current stream something that reads a tensor: ``use`` gets its values at that time."""
        address, nbytes, dtype, shape = tensor.data_ptr(), tensor.nbytes, tensor.numpy().dtype, tuple(tensor.shape)
        self.stream(device).give(lambda: use(np.frombuffer(ctypes.string_at(address, nbytes), dtype).reshape(shape)))

    # -- device memory --------------------------------------------------------------------------------------

    def allocate(self, device: torch.device, host: torch.Tensor) -> torch.Tensor:
        self.contexts.add(device)
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
            self._recorded[block.ctypes.data] = stream, recorded
            raw = torch.from_numpy(exporter)[: layout.nbytes]
            return raw.view(host.dtype).as_strided(host.shape, layout.stride())

    def _freed(self, stream: Stream, block: np.ndarray, recorded: list[Stream]) -> None:
        self._frees(bool(recorded))
        if recorded:
            self._pending.append(([self.record(one) for one in recorded], stream, block))
        else:
            self._free.setdefault((stream, block.nbytes), []).append(block)

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        found = self._recorded.get(tensor.untyped_storage().data_ptr())
        if found is not None and stream is not found[0]:  # it is on the device, and belongs to another stream
            found[1].append(stream)

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
        """A call that makes a context on whatever device is current in the thread."""
        current = getattr(self._current, "device", None)
        if current is None:
            self.faults.append("a call that makes a context, such as pinning, with no device made current")
        else:
            self.contexts.add(current)

    def asks(self, device: torch.device) -> None:
        """The same, and it is about this device."""
        if getattr(self._current, "device", None) != device:
            self.faults.append(f"{device} was asked with no device made current, or another one")
        self.contexts.add(device)

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
        block = self.pinned_blocks.pop(address)
        self._frees(bool(block.guards))
        self._unpinned.append(block)

    def guards(self, source: torch.Tensor) -> list[Record]:
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

    def current(self) -> Any:
        return in_turn(torch.inference_mode(False), self.machine.current(self.device))

    def current_device(self) -> int:
        return -1  # so each call makes it current

    def new_stream(self) -> Stream:
        return self.machine.new_stream(self.device)

    def caller_stream(self) -> Stream:
        return self.machine.stream(self.device)

    def set_stream(self, stream: Stream) -> None:
        self.machine.asks(stream.device)
        self.machine.set_stream(self.device, stream)

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
        to, done = target.data_ptr(), Record()
        machine.guards(source).append(done)

        def move() -> None:
            ctypes.memmove(to, start, nbytes)
            done.passed = True

        stream.give(move, reads=range(start, start + nbytes))
        return target

    def record_use(self, tensors: Iterable[torch.Tensor], stream: Stream) -> None:
        for tensor in tensors:
            self.machine.log.append(("record_use", stream.name))
            self.machine.record_stream(tensor, stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        return True  # all are on the host, where nobody can tell them apart

    def is_pinned(self, host: torch.Tensor) -> bool:  # finalizers take entries out of `pinned`
        machine, address = self.machine, host.data_ptr()
        if not machine.contexts:
            machine.pins()
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

    def timed_event(self) -> Event:
        return Event(self.machine, timed=True)

    def rest(self, seconds: float) -> None:
        """The host sleeps, and the device works."""
        self.machine.blocked += 1
        if self.machine.hangs:
            time.sleep(seconds)
        else:
            assert self.machine.run(1), "the host waits for an event that never passes"

    def load(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """After what the stream has to do; the host waits."""
        self.machine.asks(self.device)  # the host waits for an event
        stream, done = self.caller_stream(), Event(self.machine)
        stream.give(lambda: target.copy_(host))
        done.record(stream)
        while not done.passed:
            assert self.machine.run(1), "the host waits for a copy that is never done"

    def take(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        taken = self.empty_like(torch.empty((len(rows), *column.shape[1:]), dtype=column.dtype))
        self._move_rows(taken, range(len(rows)), column, rows)
        return taken

    def put(self, column: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        self._move_rows(column, places, rows, range(len(places)))

    def _move_rows(self, to: torch.Tensor, places: Any, source: torch.Tensor, rows: Any) -> None:
        """Rows of ``source`` go to places in ``to``. Each of the two is a range, or numbers on the device."""
        size = math.prod(to.shape[1:]) * to.itemsize
        begins, lengths = (to.data_ptr(), source.data_ptr()), (len(to), len(source))
        addresses = [one if isinstance(one, range) else (one.data_ptr(), 8 * len(one)) for one in (places, rows)]

        def move() -> None:
            numbers = [
                one if isinstance(one, range) else np.frombuffer(ctypes.string_at(*one), np.int64).tolist()
                for one in addresses
            ]
            if any(not 0 <= n < count for some, count in zip(numbers, lengths, strict=True) for n in some):
                self.machine.faults.append("rows were gathered or put that a tensor does not have")
                return
            for place, row in zip(*numbers, strict=True):
                ctypes.memmove(begins[0] + place * size, begins[1] + row * size, size)

        self.caller_stream().give(move)

    def empty_cache(self) -> None:
        self.machine.asks(self.device)
        self.machine.empty_cache()

    def memory(self) -> tuple[int, int] | None:
        return self.machine.memory_bytes
