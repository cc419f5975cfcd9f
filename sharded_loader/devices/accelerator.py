"""Streams, events, errors and pinned memory of one accelerator.

    streams_of(device) -> Streams          from torch's module for its kind (torch.cuda, torch.xpu); None: the CPU, mps
    Registrar.register(mapping) -> undo    pins a process pool's segment; undo() -> True if it is unregistered
    pinned_empty(streams, shape, dtype)    memory for the batches of threads and of the main process
    pinned_copy(streams, host, stride)     pinned copy of memory from elsewhere, on its way to a device

`devices.copies` decides when to copy. Tests replace `Streams` by a device that works late and in odd orders.

A segment is pinned once, when it is made, so a batch goes from the slot that a worker wrote to the device without
another copy. It is unregistered when the pool closes, unless a device may still read it. PyTorch does not guard memory
that it did not pin, so only `devices.copies` reads a segment, holding the slots until its copies are done. The user's
program never sees that memory.

Pinning may be rejected (a limit, no permission, confidential computing). Then there is one warning, and copies go
through memory that torch pins, as on all devices without CUDA; if torch cannot pin either, another warning, and plain
memory. The CUDA runtime would report the error of a rejected call in the next, unrelated call, so it is cleared.

Source of the idea: vLLM and SGLang register their host pools this way, and their reports of how it fails.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from sharded_loader.base.errors import add_note, notes_of, text_of
from sharded_loader.base.interrupts import program_ends, uninterrupted
from sharded_loader.base.notices import warn

OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.cuda.OutOfMemoryError,)
"""Errors of torch when an accelerator has no memory left; from 2.5 on also called torch.OutOfMemoryError."""


THREAD_LOCAL = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: a thread is restricted by its own captures only."""

LATE_NOTE = (
    "noticed while a batch was copied to a device. A device reports errors late, so the cause may be an earlier kernel "
    "of your program, and not this batch: set CUDA_LAUNCH_BLOCKING=1 and run again to see which call fails"
)

NOTHING: AbstractContextManager[Any] = nullcontext()
"""Context manager that does nothing."""


class Streams:
    """The parts of an accelerator's interface that copies need.

    Most attributes are torch's own functions, bound to the device. Streams and events are torch's own objects.

    Args:
        device: with its index.

    Attributes:
        set_stream: makes a stream current for this thread. (Torch's context manager takes 12 us on an H200's host, two
            calls of this 3 us.)
        empty_like: allocates memory on the device in the layout of a host tensor, on the caller's stream.
        empty: makes a tensor on the device, as `torch.empty`.
        copy: ``copy(target, source)`` copies from pinned host memory, on the current stream.
        timed_event: makes an event that measures the time since another one.
        has_warned: a warning has said that torch cannot pin host memory.
        rest: sleeps between two queries of an event, in seconds.
    """

    has_warned = False

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self.device = device
        self._module = module
        self.current_device: Callable[[], int] = module.current_device
        self.new_stream: Callable[[], Any] = functools.partial(module.Stream, device)
        # By index: parsing a torch.device takes torch 3 us each time (on an H200's host).
        self.caller_stream: Callable[[], Any] = functools.partial(module.current_stream, device.index)
        self.set_stream: Callable[[Any], None] = module.set_stream
        self.empty_like: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.empty_like, device=device)
        self.empty: Callable[..., torch.Tensor] = functools.partial(torch.empty, device=device)
        self.copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        self.copy = functools.partial(torch.Tensor.copy_, non_blocking=True)
        self.is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
        self.empty_cache: Callable[[], None] = module.empty_cache
        self.timed_event: Callable[[], Any] = functools.partial(module.Event, enable_timing=True)
        self.rest: Callable[[float], None] = time.sleep

    def current(self) -> AbstractContextManager[Any]:
        """Make the device current, as pinning, `set_stream`, `empty_cache` and ``query`` of an event require.

        Otherwise CUDA creates a context on the current device: in a new thread, device 0. Leaves the caller's inference
        mode, so that tensors made in the block can be used after it.
        """
        number, module = self.device.index, self._module
        if torch.is_inference_mode_enabled():
            return in_turn(torch.inference_mode(False), module.device(number))
        return NOTHING if module.current_device() == number else module.device(number)

    def record_use(self, tensors: Iterable[torch.Tensor], stream: Any) -> None:
        """Keep the memory of dropped tensors on this device until ``stream`` has done the work enqueued by then."""
        for tensor in tensors:
            if self.holds(tensor):
                tensor.record_stream(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True if a tensor is on this device."""
        return tensor.device == self.device

    def pin(self, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """Copy into pinned memory with these strides. Torch reuses the memory when the copies from it are done."""
        return torch.empty_strided(host.shape, stride, dtype=host.dtype, device="cpu", pin_memory=True).copy_(host)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        """Allocate pinned memory."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def leave_captures_alone(self) -> None:
        """Let this thread query events and pin memory while another one captures a CUDA graph.

        In the mode that threads begin with, that ends a capture of ``torch.cuda.graph`` with an error. PyTorch's
        watchdog of NCCL does the same.
        """
        for driver in ("libcuda.so.1", "nvcuda.dll") if self.device.type == "cuda" else ():
            with contextlib.suppress(OSError, AttributeError):
                ctypes.CDLL(driver).cuThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(THREAD_LOCAL)))

    def runtime(self) -> Any:
        """Return the CUDA runtime, which pins memory in place (``cudaHostRegister``); None elsewhere."""
        return torch.cuda.cudart() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]


@contextmanager
def in_turn(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Nest one context in another.

    Example:
        >>> with in_turn(torch.inference_mode(), NOTHING):
        ...     torch.zeros(1).is_inference()
        True
    """
    with outer, inner:
        yield


def is_late(error: BaseException) -> bool:
    """Return True if an accelerator reports with this error that earlier work failed.

    Example:
        >>> is_late(RuntimeError("CUDA error: device-side assert triggered")), is_late(RuntimeError("no pinned memory"))
        (True, False)
    """
    if not isinstance(error, RuntimeError) or "out of memory" in str(error):
        return False
    kind = getattr(torch, "AcceleratorError", None)  # torch >= 2.8
    return (kind is not None and isinstance(error, kind)) or str(error).startswith(("CUDA error", "HIP error"))


def note_late(error: BaseException) -> bool:
    """Note on an error that `is_late` that the batch may not be its cause. Returns True if it is late."""
    if not is_late(error):
        return False
    if LATE_NOTE not in notes_of(error):
        add_note(error, LATE_NOTE)
    return True


def capture_probe(kind: str) -> Callable[[], bool] | None:
    """Return torch's function that tells if the current stream of this kind is being captured into a graph.

    None if there is none, or if it raises, as in a torch without this accelerator.
    """
    probe: Callable[[], bool] | None = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
    try:
        if probe is not None:
            probe()  # touches no device: without a context nothing is captured
    except RuntimeError:
        return None
    return probe


def streams_of(device: torch.device) -> Streams | None:
    """Return the `Streams` of a device, or None if it has none."""
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return Streams(device) if hasattr(module, "Stream") and hasattr(module, "current_stream") else None


# -- pinned memory ---------------------------------------------------------------------------------------------------

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for the contexts of all devices, including later ones."""

BROKEN_CONTEXT = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Codes of errors of earlier kernels, which break the device's context. The copy of the batch reports them."""

Drain = Callable[[], Any]
"""Waits until no copy reads from the segments. False: one may still, and the segments must stay."""

Undo = Callable[[], bool]
"""Unregisters a segment. False: it is still registered, and its mapping must stay."""

REGISTERED: dict[int, int] = {}
"""Begin and end of each segment that is pinned, for all devices. Torch would ask the driver."""


class Registrar:
    """Pins the segments of one pool.

    Each undo is stored, so if a Ctrl-C interrupts the caller before it has received one, it can ask again.

    Args:
        streams: of a device of the loader. It is current while pinning, so that no context appears on another device.
        drain: waits until no copy reads from the segments.
    """

    def __init__(self, streams: Streams, drain: Drain) -> None:
        self._streams = streams
        self._drain = drain
        self._rejected = False
        self._undos: dict[int, Undo] = {}

    def register(self, mapping: mmap.mmap) -> Undo | None:
        """Pin a segment. Returns the undo, to be called before the memory is unmapped; None if pinning was rejected."""
        address, nbytes = address_of(mapping)
        if self._rejected or address in self._undos:
            return self._undos.get(address)
        with self._streams.current(), uninterrupted():
            try:
                runtime = self._streams.runtime()
                if runtime is None:
                    return None
                touch(mapping)
                code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
                reason = "" if code == 0 else _error_text(runtime, code)
                if code in BROKEN_CONTEXT:
                    return None
            except RuntimeError as error:
                if is_late(error):
                    return None
                reason = str(error)
            if not reason:
                undo = functools.partial(_unregister, self._streams, runtime, address, self._drain, self._undos)
                self._undos[address], REGISTERED[address] = undo, address + nbytes
                return undo
        self._rejected = True
        warn(
            f"{nbytes:,} bytes of shared memory could not be pinned ({reason}): batches are copied once more on "
            f"their way to the device. Free host memory, raise the memory limit of the container, or give the loader "
            f"less with ProcessPool(max_bytes=). WSL and confidential computing allow little pinned memory, or none"
        )
        return None


def _unregister(streams: Streams, runtime: Any, address: int, drain: Drain, registered: dict[int, Undo]) -> bool:
    """Unregister a segment when no copy reads it. At the program's end the driver does it."""
    if program_ends():
        return False
    with contextlib.suppress(RuntimeError):  # broken context: nothing is copied any more
        if drain() is False:
            return False
    # Fails if the segment is not registered, and in a broken context, which also rejects later registrations.
    with contextlib.suppress(RuntimeError), streams.current():
        if int(runtime.cudaHostUnregister(address)) != 0:
            clear_error(runtime)
    registered.pop(address, None)
    REGISTERED.pop(address, None)
    return True


def touch(mapping: mmap.mmap) -> None:
    """Touch the pages of a new mapping, several at once: the driver, which does it too, has one thread."""
    pages = np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE]
    with ThreadPoolExecutor() as threads:
        list(threads.map(lambda part: part.fill(0), np.array_split(pages, 8)))


def address_of(mapping: mmap.mmap) -> tuple[int, int]:
    """Return the address of a mapping, and its size in bytes.

    Example:
        >>> address_of(mmap.mmap(-1, 4096))[1]
        4096
    """
    # Dropped at once, because a mapping with an exported buffer cannot be closed.
    whole = np.frombuffer(mapping, np.uint8)
    return int(whole.__array_interface__["data"][0]), whole.nbytes


def _error_text(runtime: Any, code: int) -> str:
    """Return the text of an error code, and clear the error."""
    reason = f"cudaHostRegister: error {code}"
    with contextlib.suppress(Exception):
        reason = f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({reason})"
    clear_error(runtime)
    return reason


def clear_error(runtime: object) -> None:
    """Clear the error that a rejected call has left in the CUDA runtime."""
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    # torch's runtime lacks that function, but torch fetches and clears pending errors after each kernel.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def pinned_empty(streams: Streams, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """Like `numpy.empty`, in memory that torch pins, and reuses when the copies from it are done."""
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    # One tensor per array: torch identifies the memory that a copy reads by its start address.
    with streams.current():
        try:
            raw = streams.pinned_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        except RuntimeError as error:
            note_rejected(streams, error)
            return np.empty(shape, dtype)
    return raw.numpy().view(dtype).reshape(shape)


def pinned_copy(streams: Streams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Copy a host tensor with these strides into memory that torch pins, or into plain memory if it cannot pin."""
    try:
        return streams.pin(host, stride)
    except RuntimeError as error:
        note_rejected(streams, error)
    return torch.empty_strided(host.shape, stride, dtype=host.dtype, device="cpu").copy_(host)


def note_rejected(owner: Any, error: RuntimeError) -> None:
    """Warn once per ``where`` that memory cannot be pinned. Errors of another cause are raised again."""
    if not any(words in str(error) for words in ("out of memory", "not supported")):
        raise error
    if not owner.has_warned:
        owner.has_warned = True
        warn(_PINNING_FAILED.format(text_of(error)))


_PINNING_FAILED = (
    "batches could not be pinned ({}). They lie in plain memory, and their copies to the device make the program wait. "
    "Free host memory, or raise the memory limit of the container. WSL and confidential computing allow little pinned "
    "memory, or none"
)
