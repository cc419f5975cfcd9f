"""The simulated device as ``torch.cuda`` of this process, so that what is written for a GPU runs where there is none.

    install()                                                  in a program
    python -m pytest -p simulated_cuda tests/gpu               with this folder on PYTHONPATH
    python tests/simulated_cuda.py benchmarks.gpu --quick      a program, as ``python -m`` runs it

Streams, events, memory and errors are those of a `simulated.Machine` whose work is done at once; see there for what is
simulated and what is not. Here torch's functions are replaced: those of ``torch.cuda``, and what makes, moves and pins
tensors. A tensor "on the device" is one in host memory that says where it is and refuses to be mixed with others.
"""

import contextlib
import functools
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from simulated import BANDWIDTH, CYCLES, ERRORS, TOTAL, Event, Machine, SimulatedStreams, Stream

from sharded_loader.devices.accelerator import Streams

cuda: Machine | None = None  # what this process has in the place of ``torch.cuda``
HOST = {name: getattr(torch.Tensor, name) for name in ("to", "copy_")}
FACTORIES = "empty zeros ones full arange tensor randn rand randint empty_strided empty_like zeros_like ones_like"
FACTORIES += " full_like as_tensor eye linspace"
WAITING = ["item", "tolist", "__bool__", "__int__", "__float__", "equal", "nonzero", "unique"]


class CudaTensor(torch.Tensor):
    """A tensor that says that it is on a device."""

    device = property(lambda self: self._on)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [*args, *(kwargs or {}).values()]
        tensors = [x for arg in flat for x in (arg if isinstance(arg, (list, tuple)) else [arg]) if torch.is_tensor(x)]
        on, name = next(x._on for x in tensors if hasattr(x, "_on")), getattr(func, "__name__", "")
        if name not in ("__get__", "__set__", "copy_", "_has_compatible_shallow_copy_type"):
            launch()
            elsewhere = [x for x in tensors if getattr(x, "_on", None) != on and x.dim() and name != "__getitem__"]
            # Of a packed sequence the batch_sizes belong on the host.
            if elsewhere if name != "lstm" else [x is args[1] for x in elsewhere] != [True]:
                raise RuntimeError(f"{name}: Expected all tensors to be on the same device")
        if name in WAITING:
            wait()
        with torch._C.DisableTorchFunctionSubclass():
            return placed(func(*args, **(kwargs or {})), on)

    def numpy(self, *args: Any, **options: Any) -> Any:
        raise TypeError(f"can't convert {self.device} device type tensor to numpy")

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def record_stream(self, stream: Stream) -> None:
        self._recorded.append(stream)


def launch() -> None:
    """A kernel is launched: torch looks for errors then."""
    code, cuda.pending = cuda.pending, 0
    if code:
        raise RuntimeError(f"CUDA error: {ERRORS.get(code, 'unknown error')}")


def wait() -> None:
    """The host is about to wait for the device."""
    if cuda.sync_debug_mode == "error":
        raise RuntimeError("called a synchronizing CUDA operation")
    cuda.stream().synchronize()


def placed(made: Any, on: torch.device) -> Any:
    """The results of something that was done on a device."""
    if isinstance(made, (list, tuple)) and not isinstance(made, torch.Size):
        return type(made)([placed(one, on) for one in made])
    if isinstance(made, torch.Tensor) and not hasattr(made, "_on"):
        made = made if isinstance(made, CudaTensor) else made.as_subclass(CudaTensor)
        made._on, made._recorded = on, []
    return made


def allocated(made: torch.Tensor, on: torch.device) -> Any:
    """A new tensor on the device, of the memory of the current stream."""
    cuda.reach(on)
    launch()
    stream, size = cuda.stream(on), -(-made.nbytes // 512) * 512
    block, made = cuda.claim(stream, size), placed(made, on)
    weakref.finalize(made, cuda.give_back, stream, size, block, made._recorded).atexit = False
    return made


def transfer(source: torch.Tensor, on: torch.device, non_blocking: bool) -> None:
    """The time that a copy from the host takes."""
    cuda.stream(on).sleep(source.nbytes / BANDWIDTH)
    if source.nbytes and not non_blocking:
        wait()
    elif not source.is_pinned():  # the host waits too, and torch does not tell
        cuda.stream(on).synchronize()


def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    return not hasattr(self, "_on") and cuda.is_pinned(self)


def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    cuda.not_in_capture()
    cuda.reach()  # torch queries events of memory that was dropped
    return self if self.is_pinned() else cuda.pinned_copy(self, self.stride())


def to(self: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
    device, dtype, non_blocking, layout = torch._C._nn._parse_to(*args, **options)
    device = getattr(args[0], "_on", device) if args else device
    mine: torch.device | None = getattr(self, "_on", None)
    on = mine if device is None else cuda.numbered(device) if device.type == "cuda" else None
    named = {} if layout is None else {"memory_format": layout}
    with torch._C.DisableTorchFunctionSubclass():
        cast = HOST["to"](self, self.dtype if dtype is None else dtype, copy=on != mine, **named)
    if on == mine:
        return cast if mine is None or hasattr(cast, "_on") else placed(cast, mine)
    if on is None:
        wait()
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
        wait()
    with torch._C.DisableTorchFunctionSubclass():
        HOST["copy_"](self, source)
    return self


def factory(real: Any) -> Any:
    @functools.wraps(real)
    def make(*args: Any, **options: Any) -> Any:
        device, pinned = options.pop("device", None), options.pop("pin_memory", False)
        if device is not None and torch.device(device).type == "cuda":
            if real.__name__ == "tensor":
                wait()  # copied from memory that is not pinned
            return allocated(real(*args, **options, device="cpu"), cuda.numbered(device))
        made = real(*args, **options, **({} if device is None else {"device": device}))
        return pin_memory(made) if pinned else made

    return make


@contextmanager
def capture(graph: object, capture_error_mode: str = "global") -> Iterator[None]:
    cuda.capturing, cuda.capture_failed = (threading.get_ident(), capture_error_mode), False
    with contextlib.ExitStack() as ends:
        ends.callback(setattr, cuda, "capturing", (0, ""))
        ends.enter_context(cuda.on(cuda.numbered(), cuda.new_stream()))
        yield
    if cuda.capture_failed:
        raise RuntimeError("CUDA error: operation failed due to a previous error during capture")


def install(gpus: int = 1) -> None:
    """Put a machine in the place of ``torch.cuda``, for the rest of this process."""
    global cuda
    torch.set_num_threads(1)  # where cores are busy, a copy that is shared by threads takes milliseconds
    cuda = machine = Machine(count=gpus, kind="cuda")

    def of(device: Any) -> SimpleNamespace:
        return machine.usage[machine.numbered(device)]

    runtime = {name: getattr(machine, name) for name in ("cudaHostRegister", "cudaHostUnregister")}
    runtime |= {"cudaError": int, "cudaGetErrorString": lambda error: ERRORS.get(error, "unknown")}

    replaced: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "device_count": lambda: gpus,
        "current_device": lambda: machine.numbered().index,
        "set_device": machine.set_device,
        "device": machine.current,
        "Stream": machine.new_stream,
        "Event": lambda enable_timing=False, **_: Event(machine, enable_timing),
        "stream": lambda stream: machine.on(stream.device, stream) if stream else contextlib.nullcontext(),
        "set_stream": lambda stream: (machine.set_device(stream.device), machine.set_stream(stream)),
        "current_stream": machine.stream,
        "default_stream": lambda device=None: machine.streams[machine.numbered(device)][0],
        "synchronize": lambda device=None: [s.synchronize() for s in machine.streams[machine.numbered(device)]],
        "cudart": lambda: SimpleNamespace(**runtime),
        "_sleep": lambda cycles: machine.stream().sleep(cycles / CYCLES),
        "set_sync_debug_mode": lambda mode: setattr(machine, "sync_debug_mode", mode),
        "memory_allocated": lambda device=None: of(device).allocated,
        "memory_reserved": lambda device=None: of(device).reserved,
        "max_memory_allocated": lambda device=None: of(device).peak,
        "host_memory_stats": lambda: {"allocated_bytes.current": sum(machine.pinned.copy().values())},
        "reset_peak_memory_stats": lambda device=None: setattr(of(device), "peak", of(device).allocated),
        "empty_cache": lambda: (machine.reach(), machine.empty_cache()),
        "mem_get_info": lambda device=None: (TOTAL - of(device).reserved, TOTAL),
        "get_device_properties": lambda device=None: SimpleNamespace(name="pretended", total_memory=TOTAL),
        "set_per_process_memory_fraction": lambda part, device=None: setattr(of(device), "limit", int(part * TOTAL)),
        "_lazy_init": lambda: None,
        "is_current_stream_capturing": lambda: machine.capturing[0] == threading.get_ident(),
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: None),
        "graph": capture,
    }
    for name, replacement in replaced.items():
        assert hasattr(torch.cuda, name) or name == "host_memory_stats", name  # which torch has since 2.9
        setattr(torch.cuda, name, replacement)
    for name in FACTORIES.split():
        setattr(torch, name, factory(getattr(torch, name)))
    for name, method in {"to": to, "copy_": copy_, "pin_memory": pin_memory, "is_pinned": is_pinned}.items():
        setattr(torch.Tensor, name, method)
    Streams.leave_captures_alone = SimulatedStreams.leave_captures_alone  # type: ignore[assignment]
    Streams.machine = machine  # type: ignore[attr-defined]
    autocast = torch.autocast
    torch.autocast = lambda kind, *args, **options: autocast("cpu" if kind == "cuda" else kind, *args, **options)
    torch.__future__.set_overwrite_module_params_on_conversion(True)  # parameters become tensors on the device
    torch._C._cuda_hasPrimaryContext = lambda index: machine.devices[index] in machine.contexts
    torch._assert_async = lambda value: setattr(machine, "has_failed", machine.has_failed or not value.cpu())
    accelerator = {"is_available": True, "current_accelerator": torch.device("cuda"), "current_device_index": 0}
    if hasattr(torch, "accelerator"):  # which torch has since 2.6
        for name, value in {**accelerator, "set_device_index": None}.items():
            setattr(torch.accelerator, name, lambda *_, value=value, **__: value)


def pytest_configure(config: Any) -> None:
    if config.pluginmanager.hasplugin("simulated_cuda"):
        os.environ.setdefault("GPU_TESTS_PART", "50")
        install(int(os.environ.get("PRETENDED_GPUS", "1")))


if __name__ == "__main__":  # MODULE ARGUMENTS: a program, as `python -m` runs it
    import runpy

    from simulated_cuda import install as install_once

    install_once()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
