"""A CUDA that is only pretended: what is written for a GPU runs to its end where there is none.

    python -m pytest -p pretend_cuda tests/gpu     (with this folder on PYTHONPATH)
    install()                                      in a program

Replaces torch.cuda's functions, and of torch what makes, moves and pins tensors. A tensor "on the device" is one in
host memory that says where it is and refuses to be mixed with others. Values are there at once; time is not: a stream
is busy as long as it was told to sleep and to copy, so events pass late, in the order of a device's. Memory is counted
as torch's allocator does it, roughly. What a device forbids is an error here too: a pending error of the CUDA runtime
comes up in the next kernel, that of a failed kernel in each call, a call that makes the host wait does while
`set_sync_debug_mode("error")` is on. A device has a context as soon as CUDA would make one: see `simulated` for the
calls that make it on the device that is current.

Nothing is learned from it about a GPU, and races are not seen (`simulated` is there for those). It tells that names
exist, that arguments fit, and that the arithmetic of tests and benchmarks is right.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

CLOCK = 1.5e9
"""Cycles per second."""

BANDWIDTH = 20e9
"""Bytes per second of a copy to the device."""

TOTAL = 16 << 30
ERRORS = {0: "no error", 1: "invalid argument", 712: "already registered", 713: "not registered"}


class Stream:
    """A queue, as far as its time is concerned: work given to it now is done at ``busy_until``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = reach(device)
        owner = state.gpus[self.device.index]
        owner.count += 1
        self.cuda_stream = owner.count * 64
        self.busy_until = 0.0

    def give(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.monotonic()) + seconds

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        self.busy_until = max(self.busy_until, event.at)

    def wait_stream(self, stream: Stream) -> None:
        self.busy_until = max(self.busy_until, stream.busy_until)

    def synchronize(self) -> None:
        reach(self.device)
        time.sleep(max(0.0, self.busy_until - time.monotonic()))


class Event:
    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timed = enable_timing
        self.at = 0.0

    def record(self, stream: Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        reach(stream.device)
        self.at = max(time.monotonic(), stream.busy_until)

    def query(self) -> bool:
        not_in_capture()
        reach(None)
        return time.monotonic() >= self.at

    def synchronize(self) -> None:
        reach(None)
        time.sleep(max(0.0, self.at - time.monotonic()))

    def elapsed_time(self, end: Event) -> float:
        assert self.timed and end.timed, "events without enable_timing=True"
        assert self.query() and end.query(), "events that have not passed"
        return max(1e-3, (end.at - self.at) * 1000)


class Gpu:
    """Memory and streams of one device."""

    def __init__(self) -> None:
        self.count = -1
        self.allocated = self.peak = self.reserved = 0
        self.limit = TOTAL
        self.free: dict[tuple[Stream, int], int] = {}
        self.late: list[tuple[float, Stream, int]] = []
        self.lock = threading.RLock()

    def take(self, stream: Stream, nbytes: int) -> Callable[[list[Stream]], None]:
        """Memory for a tensor; what gives it back, after what those streams have to do."""
        size = -(-nbytes // 512) * 512
        with self.lock:
            self.settle()
            if self.free.get((stream, size)):
                self.free[stream, size] -= 1
            else:
                if self.reserved + size > self.limit:
                    self.release()
                if self.reserved + size > self.limit:
                    raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes (pretended)")
                self.reserved += size
            self.allocated += size
            self.peak = max(self.peak, self.allocated)
        return functools.partial(self.give, stream, size)

    def give(self, stream: Stream, size: int, recorded: list[Stream]) -> None:
        with self.lock:
            self.allocated -= size
            self.late.append((max((one.busy_until for one in recorded), default=0.0), stream, size))

    def settle(self) -> None:
        now = time.monotonic()
        for item in [item for item in self.late if item[0] <= now]:
            self.late.remove(item)
            self.free[item[1:]] = self.free.get(item[1:], 0) + 1

    def release(self) -> None:
        self.settle()
        self.reserved -= sum(size * count for (_, size), count in self.free.items())
        self.free.clear()


class State:
    """Of the process."""

    def __init__(self) -> None:
        self.gpus = [Gpu()]
        self.default: list[Stream] = []
        self.thread = threading.local()
        self.registered: dict[int, int] = {}
        self.pinned: dict[int, int] = {}
        self.contexts: set[int] = set()
        self.pending = 0
        self.broken = False  # a kernel has failed
        self.capture_failed = False
        self.mode = "default"
        self.capturing: tuple[int, str] | None = None  # the thread that captures, and its error mode


state = State()


def one_device(device: Any) -> torch.device:
    """The device with its number."""
    if device is None or isinstance(device, int):
        return torch.device("cuda", getattr(state.thread, "index", 0) if device is None else device)
    device = torch.device(device)
    assert device.type == "cuda", device
    return torch.device("cuda", getattr(state.thread, "index", 0)) if device.index is None else device


def reach(device: Any) -> torch.device:
    """The device with its number, or the current one: it has a context from now on. After a failed kernel, its error.

    Raises:
        RuntimeError: a kernel has failed.
    """
    device = one_device(device)
    state.contexts.add(device.index)
    if state.broken:
        raise RuntimeError("CUDA error: device-side assert triggered (pretended)")
    return device


def fail_on_device(value: torch.Tensor, message: str = "") -> None:
    """`torch._assert_async`: nothing is raised where it is called."""
    state.broken = state.broken or not bool(value.as_subclass(torch.Tensor))


def gpu(device: Any = None) -> Gpu:
    return state.gpus[one_device(device).index]


def current_stream(device: Any = None) -> Stream:
    index = one_device(device).index
    return getattr(state.thread, f"stream{index}", state.default[index])


@contextlib.contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    device, before = one_device(None), current_stream(stream.device)
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)
        set_device(device)


def set_stream(stream: Stream) -> None:
    set_device(stream.device)
    setattr(state.thread, f"stream{stream.device.index}", stream)


@contextlib.contextmanager
def use_device(device: Any) -> Iterator[None]:
    before = one_device(None)
    set_device(device)
    try:
        yield
    finally:
        state.thread.index = before.index  # without a context


def set_device(device: Any) -> None:
    state.thread.index = one_device(device).index
    state.contexts.add(state.thread.index)


def empty_cache() -> None:
    reach(None)
    for one in state.gpus:
        one.release()


def synchronize(device: Any = None) -> None:
    index = reach(device).index
    until = max(stream().busy_until for stream in list(streams) if stream() and stream().device.index == index)
    time.sleep(max(0.0, until - time.monotonic()))


streams: list[Any] = []


def new_stream(device: Any = None, priority: int = 0) -> Stream:
    stream = Stream(device, priority)
    streams.append(weakref.ref(stream))
    return stream


def waits() -> None:
    """The host is about to wait for the device."""
    if state.mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")
    current_stream().synchronize()


class CUDAGraph:
    """Replays nothing: what was done while it was captured was done at once."""

    def replay(self) -> None:
        assert not state.capturing


@contextlib.contextmanager
def capture(graph: CUDAGraph, capture_error_mode: str = "global") -> Iterator[None]:
    state.capturing, state.capture_failed = (threading.get_ident(), capture_error_mode), False
    try:
        with use_stream(new_stream()):
            yield
    finally:
        state.capturing = None
    if state.capture_failed:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def not_in_capture() -> None:
    """Called by what a capture does not allow in its own thread, and in the mode "global" in no thread."""
    thread, mode = state.capturing or (0, "")
    if mode == "global" or thread == threading.get_ident():
        state.capture_failed = True
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


def launch() -> None:
    """A kernel is launched: torch looks for errors then."""
    if state.pending:
        code, state.pending = state.pending, 0
        raise RuntimeError(f"CUDA error: {ERRORS.get(code, 'unknown error')}")


# -- the CUDA runtime -----------------------------------------------------------------------------------------


class cudaError:
    """Like pybind's enum: no int, but can be made one."""

    success: Any

    def __init__(self, code: int) -> None:
        assert type(code) is int
        self.code = code

    def __int__(self) -> int:
        return self.code


class Cudart:
    cudaError = cudaError

    def _end(self, code: int) -> cudaError:
        state.pending = code or state.pending
        return cudaError(code)

    def cudaHostRegister(self, ptr: int, size: int, flags: int) -> cudaError:
        assert all(type(value) is int for value in (ptr, size, flags))
        reach(None)
        if size == 0:
            return self._end(1)
        if any(ptr < start + nbytes and start < ptr + size for start, nbytes in state.registered.items()):
            return self._end(712)
        state.registered[ptr] = size
        return self._end(0)

    def cudaHostUnregister(self, ptr: int) -> cudaError:
        assert type(ptr) is int
        reach(None)
        return self._end(0 if state.registered.pop(ptr, None) else 713)

    def cudaGetErrorString(self, error: cudaError) -> str:
        assert type(error) is cudaError
        return ERRORS.get(error.code, "unrecognized error code")


# -- tensors --------------------------------------------------------------------------------------------------

Host = torch.Tensor
_real: dict[str, Any] = {name: getattr(torch.Tensor, name) for name in ("to", "copy_", "pin_memory", "is_pinned")}
_device_of = torch.Tensor.device.__get__  # type: ignore[attr-defined]
COPIES = {"copy_", "to", "set_"}


class CudaTensor(torch.Tensor):
    """A tensor that says that it is on a device."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).values()]
        flat = [x for arg in flat for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
        tensors = [x for x in flat if isinstance(x, torch.Tensor)]
        on = next(x._on for x in tensors if hasattr(x, "_on"))
        name = getattr(func, "__name__", "")
        if name not in ("__get__", "__set__", "copy_"):
            launch()
            elsewhere = [x for x in tensors if getattr(x, "_on", None) != on and x.dim() and name != "__getitem__"]
            # Of a packed sequence the batch_sizes belong on the host.
            if elsewhere if name != "lstm" else [x is args[1] for x in elsewhere] != [True]:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if name in ("item", "tolist", "__bool__", "__int__", "__float__", "equal", "nonzero", "unique"):
            waits()
        with torch._C.DisableTorchFunctionSubclass():
            return placed(func(*args, **(kwargs or {})), on)

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def record_stream(self, stream: Stream) -> None:
        assert type(stream) is Stream
        self._recorded.append(stream)


def placed(made: Any, on: torch.device) -> Any:
    """The results of something that was done on a device."""
    if isinstance(made, (list, tuple)) and not isinstance(made, torch.Size):
        fields = [placed(one, on) for one in made]
        return type(made)(fields)
    if isinstance(made, torch.Tensor) and not hasattr(made, "_on"):
        if not isinstance(made, CudaTensor):
            made = made.as_subclass(CudaTensor)
        made._on, made._recorded = on, []
    return made


def allocated(made: torch.Tensor, on: torch.device) -> Any:
    """A new tensor on the device, of the memory of the current stream."""
    reach(on)
    launch()
    give = gpu(on).take(current_stream(on), made.nbytes)
    made = placed(made, on)
    weakref.finalize(made, give, made._recorded).atexit = False
    return made


def transfer(source: torch.Tensor, on: torch.device, non_blocking: bool) -> None:
    """The time that a copy from the host takes."""
    if source.nbytes:
        current_stream(on).give(source.nbytes / BANDWIDTH)
        if not non_blocking:
            waits()
        elif not source.is_pinned():  # the host waits too, and torch does not tell
            current_stream(on).synchronize()


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    if hasattr(self, "_on"):
        return False
    address = self.untyped_storage().data_ptr()
    ranges = [*state.registered.items(), *state.pinned.items()]
    return any(start <= address < start + nbytes for start, nbytes in ranges)


def pinned(made: torch.Tensor) -> torch.Tensor:
    not_in_capture()
    reach(None)  # torch queries events of memory that was dropped
    storage = made.untyped_storage()
    state.pinned[storage.data_ptr()] = max(1, storage.nbytes())
    weakref.finalize(storage, state.pinned.pop, storage.data_ptr(), None).atexit = False
    return made


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    assert not hasattr(self, "_on"), "only dense CPU tensors can be pinned"
    return self if is_pinned(self) else pinned(self.clone())


def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **options)
    if args and isinstance(args[0], torch.Tensor) and hasattr(args[0], "_on"):
        device = args[0]._on
    mine = getattr(self, "_on", None)
    if device is None:
        on = mine
    else:
        on = one_device(device) if device.type == "cuda" else None
    options = {} if layout is None else {"memory_format": layout}
    with torch._C.DisableTorchFunctionSubclass():
        cast = _real["to"](self, self.dtype if dtype is None else dtype, copy=on != mine, **options)
    if on == mine:
        return cast if mine is None or hasattr(cast, "_on") else placed(cast, mine)
    if on is None:
        waits()
        plain = cast.as_subclass(torch.Tensor)
        return plain.clone() if hasattr(plain, "_on") else plain
    if mine is None:
        transfer(self, on, non_blocking)
    return allocated(cast, on)


def copy_(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    mine, other = getattr(self, "_on", None), getattr(source, "_on", None)
    if mine is not None and other is None:
        transfer(source, mine, non_blocking)
    elif mine is None and other is not None:
        waits()
    with torch._C.DisableTorchFunctionSubclass():
        _real["copy_"](self, source)
    return self


def factory(real: Any) -> Any:
    @functools.wraps(real)
    def make(*args: Any, **options: Any) -> Any:
        device = options.pop("device", None)
        if device is not None and torch.device(device).type == "cuda":
            on = one_device(device)
            assert not options.get("pin_memory")
            if real is torch_tensor and not (args and hasattr(args[0], "_on")):
                waits()  # copied from memory that is not pinned
            return allocated(real(*args, **options, device="cpu"), on)  # also of a tensor without memory (meta)
        if options.pop("pin_memory", False):
            return pinned(real(*args, **options))
        return real(*args, **options)

    return make


torch_tensor = torch.tensor
FACTORIES = ("empty", "zeros", "ones", "full", "arange", "tensor", "randn", "rand", "randint", "empty_strided")
FACTORIES += ("empty_like", "zeros_like", "ones_like", "full_like", "as_tensor", "eye", "linspace")


def module_to(self: torch.nn.Module, *args: Any, **options: Any) -> torch.nn.Module:
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **options)
    rest: dict[str, Any] = {"dtype": dtype, "memory_format": layout}
    moved = _module_to(self, **{name: value for name, value in rest.items() if value is not None})
    if device is not None:
        for tensor in [*moved.parameters(), *moved.buffers()]:
            tensor.__dict__.pop("_on", None)
            if device.type == "cuda":
                tensor._on = one_device(device)
    return moved


def grad_of(self: torch.nn.Parameter) -> torch.Tensor | None:
    found: torch.Tensor | None = _grad.__get__(self)
    if found is not None and hasattr(self, "_on") and not hasattr(found, "_on"):
        found._on = self._on  # type: ignore[attr-defined]
    return found


_module_to = torch.nn.Module.to
_grad: Any = torch.Tensor.grad
_autocast = torch.autocast


def autocast(device_type: str, *args: Any, **options: Any) -> Any:
    return _autocast("cpu" if device_type == "cuda" else device_type, *args, **options)


def install(gpus: int = 1) -> None:
    """Pretend, for the rest of this process."""
    torch.set_num_threads(1)  # where cores are busy, a copy that is shared by threads takes milliseconds
    state.gpus = [Gpu() for _ in range(gpus)]
    state.default = [new_stream(number) for number in range(gpus)]
    cuda: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: len(state.gpus),
        "current_device": lambda: one_device(None).index,
        "set_device": set_device,
        "device": use_device,
        "Stream": new_stream,
        "Event": Event,
        "stream": use_stream,
        "set_stream": set_stream,
        "current_stream": current_stream,
        "default_stream": lambda device=None: state.default[one_device(device).index],
        "synchronize": synchronize,
        "cudart": Cudart,
        "_sleep": lambda cycles: current_stream().give(cycles / CLOCK),
        "set_sync_debug_mode": lambda mode: setattr(state, "mode", mode),
        "memory_allocated": lambda device=None: gpu(device).allocated,
        "memory_reserved": lambda device=None: gpu(device).reserved,
        "max_memory_allocated": lambda device=None: gpu(device).peak,
        "host_memory_stats": lambda: {"active_bytes.current": sum(state.pinned.copy().values())},
        "reset_peak_memory_stats": lambda device=None: setattr(gpu(device), "peak", gpu(device).allocated),
        "empty_cache": empty_cache,
        "mem_get_info": lambda device=None: (TOTAL - gpu(device).reserved, TOTAL),
        "get_device_properties": lambda device=None: types.SimpleNamespace(name="pretended", total_memory=TOTAL),
        "set_per_process_memory_fraction": lambda part, device=None: setattr(gpu(device), "limit", int(part * TOTAL)),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: (state.capturing or (0, ""))[0] == threading.get_ident(),
        "CUDAGraph": CUDAGraph,
        "graph": capture,
    }
    state.contexts.clear()
    torch._C._cuda_hasPrimaryContext = lambda index: index in state.contexts  # type: ignore[attr-defined]
    torch._assert_async = fail_on_device
    for name, replacement in cuda.items():
        assert hasattr(torch.cuda, name) or name == "host_memory_stats", name  # which torch has since 2.9
        setattr(torch.cuda, name, replacement)
    for name in FACTORIES:
        setattr(torch, name, factory(getattr(torch, name)))
    for name, method in {"to": to, "copy_": copy_, "pin_memory": pin_memory, "is_pinned": is_pinned}.items():
        setattr(torch.Tensor, name, method)
    torch.Tensor.device = property(lambda self: self.__dict__.get("_on") or _device_of(self))  # type: ignore[assignment]
    torch.nn.Parameter.grad = property(grad_of, lambda self, value: _grad.__set__(self, value))  # type: ignore[assignment]
    torch.nn.Module.to = module_to  # type: ignore[method-assign]
    torch.autocast = autocast  # type: ignore[misc, assignment]
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.set_device_index = lambda device: None


def pytest_configure(config: Any) -> None:
    os.environ.setdefault("GPU_TESTS_PART", "50")
    install(int(os.environ.get("PRETENDED_GPUS", "1")))


if __name__ == "__main__":  # python pretend_cuda.py MODULE ARGUMENTS: a program, as `python -m` runs it
    import runpy

    install()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
