"""An accelerator without hardware: its streams, events, device memory and page-locked memory.

    Machine()              devices that work late; the fixture `machine` gives them to the library
    Machine(kind="cuda")   the same with values that are there at once; `simulated_cuda` makes it torch's

**Late work.** What a stream is given waits in a queue and reads and writes memory when `Machine.run` gets to it, in an
order that a seed chooses among those that streams and events allow. Copies and kernels know addresses and hold
nothing, so memory that is used again too early shows as wrong values. A block of device memory that is dropped may be
used again at once by work on the stream that it was allocated on, and after the ends of the streams that it was
recorded on. A dropped block of pinned memory is used again at once, unless a copy reads it that torch knows of: its
source has the storage that torch has pinned, or begins where the block begins.

**Work at once.** A stream is busy as long as it was told to sleep and to copy, so events pass late. The error of a
refused call comes up in the next kernel, that of a failed kernel in each call. Races are not seen.

`Machine.faults` lists what would be wrong or slow: a copy from memory that is not pinned, memory unmapped under a copy,
memory freed by a destructor after a kernel has failed, and a call that makes a context on a device that nobody has
named. CUDA does so for the device that is current in the thread. Torch 2.13 makes one current by itself in

- `Event.record`, `Stream.record_event`, `Stream.wait_event`, `Stream(device)`, `set_stream`, `empty_like`, `copy_`,
  `index_select`, `mem_get_info`; `is_pinned` asks a device that has a context. An event that was never recorded,
  `current_stream` and `record_stream` ask none;
- but not in `Event.query`, `Event.elapsed_time`, ``cudaHostRegister``, ``cudaHostUnregister``; nor where memory is
  pinned or the cache emptied, which queries events of blocks that were dropped.

**Not simulated:** how fast anything is, what a driver does when a program ends, whether CUDA can pin shared memory,
sparse tensors, what a graph replays. Source: c10/cuda, torch/cuda, ATen/core/CachingHostAllocator.h of torch 2.13.
"""

import ctypes
import functools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sharded_loader.devices.background import Background, Later

KIND = "privateuseone"  # which torch leaves to others
# Of a device: cycles per second, bytes per second of a copy to it, bytes of memory.
CYCLES, BANDWIDTH, TOTAL = 1.5e9, 20e9, 16 << 30
SOON = 5.0  # seconds in which a thread has begun all copies, unless it waits for the device
ERRORS = {0: "no error", 1: "invalid argument", 712: "already registered", 713: "not registered"}


class Record:
    """What an event has recorded: it passes when its stream gets there, and not before its time."""

    passed, time = False, 0.0


class Event:
    """As torch's events. Those that are timed tell when they have passed."""

    def __init__(self, machine: "Machine", timed: bool = False) -> None:
        self.machine, self.timed, self.device = machine, timed, None
        self.last: Record | None = None

    @property
    def passed(self) -> bool:
        return self.last is None or (self.last.passed and self.machine.clock() >= self.last.time)

    def query(self) -> bool:
        self.machine.not_in_capture()
        if self.device is not None:
            self.machine.asks(self.device)
            self.machine.check()
        return self.passed

    def synchronize(self) -> None:
        if not self.query():
            self.machine.pass_time(max(0.0, self.last.time - self.machine.clock()))  # type: ignore[union-attr]

    def record(self, stream: "Stream | None" = None) -> None:
        stream = stream or self.machine.stream()
        self.device = self.device or stream.device
        if self.device != stream.device:
            raise RuntimeError(f"Event device {self.device} does not match recording stream's device {stream.device}.")
        self.last = made = Record()

        def happen() -> None:
            made.passed, made.time = True, max(self.machine.clock(), stream.busy_until)

        stream.give(happen)

    def elapsed_time(self, later: "Event") -> float:
        """In milliseconds."""
        if not (self.timed and later.timed and self.last and later.last):
            raise ValueError("Both events must be created with argument 'enable_timing=True', and be recorded.")
        if not (self.query() and later.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return max(0.0 if self.machine.is_late else 1e-3, (later.last.time - self.last.time) * 1000)


class Stream:
    """A queue of work: (what, whether it can be done now, what it reads). Its time is over at ``busy_until``."""

    def __init__(self, machine: "Machine", device: torch.device, name: str) -> None:
        self.machine, self.device, self.name = machine, device, f"{device} {name}"
        self.queue: deque[tuple[Callable[[], object], Callable[[], bool], range | None]] = deque()
        self.busy_until, self.cuda_stream = 0.0, id(self)

    def give(self, work: Callable[[], object], ready: Any = lambda: True, reads: range | None = None) -> None:
        if self.machine.is_late:
            self.queue.append((work, ready, reads))
        else:
            work()

    def sleep(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, self.machine.clock()) + seconds

    def record_event(self, event: Event | None = None) -> Event:
        self.machine.check()
        self.machine.log.append(("record", self.name))
        event = event or Event(self.machine)
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.machine.log.append(("wait", self.name))
        last = event.last
        self.give(lambda: None, lambda: last is None or last.passed)
        self.busy_until = max(self.busy_until, last.time if last else 0.0)

    def wait_stream(self, stream: "Stream") -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        self.machine.reach(self.device)
        self.machine.pass_time(max(0.0, self.busy_until - self.machine.clock()))


class Machine:
    """So many devices of a kind, and the host memory that they read. A seed orders the work.

    Device memory has so many blocks (None: without end). With `KIND` work is late, with "cuda" it is done at once.
    """

    def __init__(self, seed: int = 0, count: int = 2, blocks: int | None = None, kind: str = KIND) -> None:
        self.is_late = kind == KIND
        self.devices = [torch.device(kind, number) for number in range(count)]
        self.streams: dict[torch.device, list[Stream]] = {one: [Stream(self, one, "default")] for one in self.devices}
        self.usage = {one: SimpleNamespace(allocated=0, peak=0, reserved=0, limit=TOTAL) for one in self.devices}
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.blocks, self.backgrounds = blocks, weakref.WeakSet[Background]()
        self.faults: list[str] = []
        self.log: list[tuple[Any, ...]] = []
        self.allocated = self.peak = self.blocked = self.cleared = self.caches_emptied = self.refuse = 0
        self.hangs = self.has_failed = False
        self.clock: Callable[[], float] = time.perf_counter
        self.pass_time: Callable[[float], object] = time.sleep  # of the host, while it waits
        self.memory_bytes: tuple[int, int] | None = (1 << 30, 1 << 30)
        self.random = random.Random(seed)
        self.contexts: set[torch.device] = set()
        self.beside_captures: set[int] = set()  # threads that no other thread's capture restricts
        self.pinned_blocks: dict[int, SimpleNamespace] = {}
        # As torch.cuda: a pending error of the runtime, the thread that captures and its mode.
        self.pending, self.sync_debug_mode, self.capture_failed, self.capturing = 0, "default", False, (0, "")
        self._recorded: dict[int, tuple[Stream, list[Stream]]] = {}
        self._current = threading.local()
        self._unpinned: list[SimpleNamespace] = []
        self._free: dict[tuple[Stream, int], list[np.ndarray]] = {}
        self._pending: list[tuple[list[Event], Stream, int, np.ndarray]] = []
        self._lock = threading.RLock()

    def streams_of(self, device: torch.device) -> "SimulatedStreams | None":
        """In the place of the library's function of this name."""
        return SimulatedStreams(self, device) if device.type == KIND else None

    def of_rows(self) -> dict[str, Callable[..., Any]]:
        """In the place of functions of `resident`."""
        return {
            "load_rows": lambda streams, *tensors: self.load(streams.device, *tensors),
            "take_rows": lambda *tensors: self.take(*tensors),
            "put_rows": lambda *tensors: self.put(*tensors),
            "memory_of": lambda streams: self.memory_of(streams.device),
        }

    def background(self, name: str) -> Background:
        """In the place of the thread that begins copies: before the device works, it has begun what it was given."""
        made = Background(name)
        self.backgrounds.add(made)
        return made

    def current_device(self) -> torch.device | None:
        """That of the calling thread. Without one CUDA takes the first, and late work takes it for a fault."""
        return getattr(self._current, "device", None) or (None if self.is_late else self.devices[0])

    def numbered(self, device: Any = None) -> torch.device:
        """The device with its number, by default the current one."""
        if isinstance(device, int):
            return self.devices[device]
        device = None if device is None else torch.device(device)
        return device if device is not None and device.index is not None else self.current_device() or self.devices[0]

    def set_device(self, device: Any) -> None:
        self._current.device = self.numbered(device)
        self.contexts.add(self._current.device)

    @contextmanager
    def current(self, device: Any) -> Iterator[None]:
        """Make a device current in this thread."""
        before = getattr(self._current, "device", None)
        self.set_device(device)
        try:
            yield
        finally:
            self._current.device = before

    def stream(self, device: Any = None) -> Stream:
        """The calling thread's current stream."""
        device = self.numbered(device)
        return getattr(self._current, str(device), self.streams[device][0])

    def set_stream(self, stream: Stream) -> None:
        setattr(self._current, str(stream.device), stream)

    @contextmanager
    def on(self, device: torch.device, stream: Stream) -> Iterator[None]:
        before = self.stream(device)
        self.set_stream(stream)
        try:
            with self.current(device):
                yield
        finally:
            self.set_stream(before)

    def new_stream(self, device: Any = None, priority: int = 0) -> Stream:
        streams = self.streams[self.reach(device)]
        streams.append(Stream(self, streams[0].device, str(len(streams))))
        return streams[-1]

    def reach(self, device: Any = None) -> torch.device:
        """A call that is about a device: it has a context from now on."""
        self.check()
        self.contexts.add(self.numbered(device))
        return self.numbered(device)

    def fail(self) -> None:
        """A kernel fails, while no thread stands between the query of an event and what follows from its answer."""
        for background in [*self.backgrounds]:
            background.wait(SOON)
        self.has_failed = True

    def check(self) -> None:
        """After a kernel has failed, each call about an event raises."""
        if self.has_failed:
            raise RuntimeError("CUDA error: device-side assert triggered")

    def not_in_capture(self) -> None:
        """Called by what a capture forbids in its own thread, and in the mode "global" in every thread."""
        me = threading.get_ident()
        if self.capturing[0] == me or (self.capturing[1] == "global" and me not in self.beside_captures):
            self.capture_failed = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def run(self, steps: int) -> int:
        """Do up to so many pieces of work; how many there were."""
        if threading.current_thread() is threading.main_thread():
            for background in [*self.backgrounds]:
                background.wait(SOON)
        for done in range(steps):
            if not self._work_once():
                return done
        return steps

    def _work_once(self) -> bool:
        with self._lock:
            able = [s for streams in self.streams.values() for s in streams if s.queue and s.queue[0][1]()]
            if able:
                stream = self.random.choice(able)
                stream.queue[0][0]()
                stream.queue.popleft()
            return bool(able)

    def finish(self) -> None:
        """Do all of it."""
        while self.run(1000):
            pass
        stuck = [s.name for streams in self.streams.values() for s in streams if s.queue]
        assert not stuck, f"streams that wait for ever: {stuck}"

    def kernel(self, device: torch.device, tensor: torch.Tensor, use: Callable[[np.ndarray], object]) -> None:
        """Give the current stream something that reads a tensor: ``use`` gets its values at that time."""
        address, nbytes, dtype, shape = tensor.data_ptr(), tensor.nbytes, tensor.numpy().dtype, tuple(tensor.shape)
        self.stream(device).give(lambda: use(np.frombuffer(ctypes.string_at(address, nbytes), dtype).reshape(shape)))

    def fill(self, device: torch.device, tensor: torch.Tensor, byte: int = 0) -> None:
        """Give the current stream something that writes over a tensor, which may be dropped at once."""
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        self.stream(device).give(lambda: ctypes.memset(address, byte, nbytes))

    @property
    def in_use(self) -> int:
        """Blocks that are not free. Those that a stream may still use are counted."""
        return self.allocated - sum(map(len, self._free.values()))

    def claim(self, stream: Stream, size: int) -> np.ndarray:
        """A block that was dropped, or a new one."""
        usage = self.usage[stream.device]
        with self._lock:
            self._settle()
            free = self._free.setdefault((stream, size), [])
            if not free:
                if self.blocks is not None and self.allocated >= self.blocks:
                    raise torch.OutOfMemoryError(f"simulated: {self.allocated} blocks are all there are")
                if usage.reserved + size > usage.limit:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes (simulated)")
                free.append(np.full(size if self.is_late else 0, 0xAB, np.uint8))
                self.allocated, usage.reserved = self.allocated + 1, usage.reserved + size
                self.peak = max(self.peak, self.allocated)
            usage.allocated += size
            usage.peak = max(usage.peak, usage.allocated)
            return free.pop()

    def give_back(self, stream: Stream, size: int, block: np.ndarray, recorded: list[Stream]) -> None:
        """A tensor over a block was dropped: others may have it after what these streams have to do."""
        with self._lock:
            self._frees(bool(recorded))
            self.usage[stream.device].allocated -= size
            events = [Event(self) for _ in recorded]
            for event, one in zip(events, recorded, strict=True):
                event.record(one)
            self._pending.append((events, stream, size, block))
            if not events:
                self._settle()

    def _settle(self) -> None:
        for item in [item for item in self._pending if all(event.passed for event in item[0])]:
            self._pending.remove(item)
            self._free.setdefault(item[1:3], []).append(item[3])

    def _frees(self, used: bool) -> None:
        if used and self.has_failed:
            self.faults.append("memory that a second stream has used was freed after a kernel had failed: torch aborts")

    def allocate(self, device: torch.device, host: torch.Tensor) -> torch.Tensor:
        """Memory on the device like that of a host tensor, on the current stream."""
        self.contexts.add(device)
        layout, stream, recorded = torch.empty_like(host), self.stream(device), list[Stream]()
        size = max(8, layout.nbytes)
        block = self.claim(stream, size)
        exporter = np.frombuffer((ctypes.c_uint8 * size).from_buffer(block), np.uint8)
        weakref.finalize(exporter, self.give_back, stream, size, block, recorded).atexit = False
        self.log.append(("allocate", stream.name))
        self._recorded[block.ctypes.data] = stream, recorded
        raw = torch.from_numpy(exporter)[: layout.nbytes]
        return raw.view(host.dtype).as_strided(host.shape, layout.stride())

    def record_stream(self, tensor: torch.Tensor, stream: Stream) -> None:
        found = self._recorded.get(tensor.untyped_storage().data_ptr())
        if found is not None and stream is not found[0]:  # it is on the device, and belongs to another stream
            found[1].append(stream)

    def empty_cache(self) -> None:
        self.caches_emptied += 1
        self.finish()
        with self._lock:
            self._settle()
            for (stream, size), blocks in self._free.items():
                self.allocated -= len(blocks)
                self.usage[stream.device].reserved -= size * len(blocks)
            self._free.clear()

    def load(self, device: torch.device, target: torch.Tensor, host: torch.Tensor) -> None:
        """After what the stream has to do; the host waits for an event."""
        self.asks(device)
        stream, done = self.stream(device), Event(self)
        stream.give(lambda: target.copy_(host))
        done.record(stream)
        while not done.passed:
            assert self.run(1), "the host waits for a copy that is never done"

    def take(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows whose numbers lie on the device when it gets there."""
        taken = self.allocate(self.device_of(column), column.new_empty((len(rows), *column.shape[1:])))
        self._later(column, lambda to, source, numbers: np.copyto(to, source[numbers]), taken, column, rows)
        return taken

    def put(self, column: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        self._later(column, lambda to, source, numbers: to.__setitem__(numbers, source), column, rows, places)

    def _later(self, column: torch.Tensor, move: Callable[..., None], *tensors: torch.Tensor) -> None:
        to, source, numbers = map(rows_of, tensors)

        def check() -> None:
            found = numbers.view(np.int64).ravel()
            assert (found >= 0).all(), "rows that a tensor does not have"
            move(to, source, found)

        self.stream(self.device_of(column)).give(check)

    def device_of(self, tensor: torch.Tensor) -> torch.device:
        return self._recorded[tensor.untyped_storage().data_ptr()][0].device

    def memory_of(self, device: torch.device) -> tuple[int, int] | None:
        return self.memory_bytes

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether host memory is page-locked in place."""
        return any(start <= address and address + nbytes <= start + size for start, size in self.registered.items())

    def is_pinned(self, host: torch.Tensor) -> bool:  # finalizers take entries out of `pinned`
        address = host.data_ptr()
        own = any(start <= address < start + size for start, size in self.pinned.copy().items())
        return own or self.holds(address, host.nbytes)

    def pins(self) -> None:
        """A call that makes a context on whatever device is current in the thread."""
        current = self.current_device()
        if current is None:
            self.faults.append("a call that makes a context, such as pinning, with no device made current")
        else:
            self.contexts.add(current)

    def asks(self, device: torch.device) -> None:
        """The same, and it is about this device."""
        current = self.current_device()
        if current != device:
            self.faults.append(f"{device} was asked with no device made current, or another one")
        self.contexts.add(current or device)

    def pin(self, nbytes: int) -> torch.Tensor:
        """Pinned memory: of a block that was dropped, if no copy reads it that is known of, or new."""
        with self._lock:
            size = 1 << max(6, (nbytes - 1).bit_length())
            fits = (one for one in list(self._unpinned) if len(one.memory) == size)
            block = next((one for one in fits if all(event.passed for event in one.guards)), None)
            if block is None:
                block = SimpleNamespace(memory=bytearray(size), storage=0, guards=[])
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

    def pinned_copy(self, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """A host tensor in pinned memory, with these strides."""
        nbytes = torch.empty_strided(host.shape, stride, dtype=host.dtype, device="cpu").untyped_storage().nbytes()
        raw = self.pin(max(1, nbytes))[:nbytes]
        return raw.view(host.dtype).as_strided(host.shape, stride).copy_(host)

    def _unpin(self, address: int) -> None:
        del self.pinned[address]
        block = self.pinned_blocks.pop(address)
        self._frees(bool(block.guards))
        self._unpinned.append(block)

    def guards(self, source: torch.Tensor) -> list[Record]:
        """The guards of the block that a copy reads, if torch finds it."""
        address, storage = source.data_ptr(), source.untyped_storage()._cdata
        blocks = self.pinned_blocks.copy().items()
        return next((one.guards for start, one in blocks if start == address or one.storage == storage), [])

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert all(type(value) is int for value in (address, nbytes, flags))
        self.pins()
        code, end = self.refuse or int(nbytes == 0), address + nbytes
        if not code and any(address < start + size and start < end for start, size in self.registered.items()):
            self.faults.append("registered twice")
            code = 712
        if not code:
            self.registered[address] = nbytes
        return self._end(code)

    def cudaHostUnregister(self, address: int) -> int:
        assert type(address) is int
        self.pins()
        nbytes = self.registered.pop(address, 0)
        queued = [reads for streams in self.streams.values() for stream in streams for _, _, reads in stream.queue]
        if any(reads is not None and address <= reads.start < address + nbytes for reads in queued):
            self.faults.append("memory was unregistered under a copy")
        return self._end(0 if nbytes else 713)

    def _end(self, code: int) -> int:
        self.pending = code or self.pending
        return code

    def cudaGetLastError(self) -> int:
        self.cleared += 1
        return 0


def rows_of(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor in rows of bytes, as a device knows it: it is not held."""
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return np.ndarray((len(tensor), tensor.nbytes // max(1, len(tensor))), np.uint8, memory)


def rest_beside_the_caller(monkeypatch: Any) -> None:
    """A thread waits for the device only while the main thread waits for it: so time passes in one place."""
    waits, is_made, rest = threading.Event(), Later.is_made, SimulatedStreams.rest

    def noted(later: Later, seconds: float) -> bool:
        waits.set()
        try:
            return is_made(later, seconds)
        finally:
            waits.clear()

    def rest_then(streams: "SimulatedStreams", seconds: float) -> None:
        assert threading.current_thread() is threading.main_thread() or waits.wait(60)
        rest(streams, seconds)

    monkeypatch.setattr(Later, "is_made", noted)
    monkeypatch.setattr(SimulatedStreams, "rest", rest_then)


class SimulatedStreams:
    """A device of late work, as the library sees it: in the place of its `Streams`."""

    has_warned = False

    def __init__(self, machine: "Machine", device: torch.device) -> None:
        self.device, self.machine = device, machine
        self.current_device = lambda: -1  # so each call makes it current
        self.new_stream = functools.partial(machine.new_stream, device)
        self.caller_stream = functools.partial(machine.stream, device)

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.inference_mode(False), self.machine.current(self.device):
            yield

    def set_stream(self, stream: Stream) -> None:
        self.machine.asks(stream.device)
        self.machine.set_stream(stream)

    def empty_like(self, host: torch.Tensor) -> torch.Tensor:
        return self.machine.allocate(self.device, host)

    def empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        host = torch.empty(size, dtype=dtype)
        return self.machine.allocate(self.device, host) if size else host

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        machine, stream = self.machine, self.caller_stream()
        machine.log.append(("copy", stream.name))
        start, nbytes = source.data_ptr(), source.nbytes
        if nbytes and not machine.is_pinned(source):
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

    def is_pinned(self, host: torch.Tensor) -> bool:
        if not self.machine.contexts:
            self.machine.pins()
        return self.machine.is_pinned(host)

    def pin(self, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        self.pinned_bytes(0)  # which has the same causes to fail
        return self.machine.pinned_copy(host, stride)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        self.machine.pins()
        return self.machine.pin(max(1, nbytes))[:nbytes]

    def leave_captures_alone(self) -> None:
        self.machine.beside_captures.add(threading.get_ident())

    def runtime(self) -> Any:
        return self.machine

    def timed_event(self) -> Event:
        return Event(self.machine, timed=True)

    def rest(self, seconds: float) -> None:
        """The host sleeps, and the device works."""
        self.machine.blocked += 1
        if self.machine.hangs:
            self.machine.pass_time(seconds)
        else:
            stuck = not self.machine.run(1) and any(s.queue for one in self.machine.streams.values() for s in one)
            assert not stuck, "the host waits for an event that never passes"

    def empty_cache(self) -> None:
        self.machine.asks(self.device)
        self.machine.empty_cache()
