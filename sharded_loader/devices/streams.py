"""What an accelerator offers for asynchronous copies: streams, events, pinned memory, and its errors.

    streams_of(device) -> Streams, by torch's module for its kind (torch.cuda, torch.xpu); None on the CPU and mps

This module decides nothing: `devices.copies` says when to copy and what waits for what. Tests replace `Streams` by a
device that does the work of its streams late and in odd orders.

What can go wrong: no device memory (`OUT_OF_MEMORY`), no host memory to pin (RuntimeError of torch).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from sharded_loader.base.errors import add_note, notes_of

OUT_OF_MEMORY: tuple[type[BaseException], ...] = (torch.cuda.OutOfMemoryError,)
"""What torch raises when an accelerator has no memory left; from 2.5 on also called torch.OutOfMemoryError."""


LATE_NOTE = (
    "noticed while a batch was copied to a device. A device reports errors late, so the cause may be an earlier kernel "
    "of your program, and not this batch: set CUDA_LAUNCH_BLOCKING=1 and run again to see which call fails"
)

NOTHING: AbstractContextManager[Any] = nullcontext()
"""There is nothing to set up."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Rows are gathered as numbers of these types: not every torch has a kernel for unsigned numbers and 8-bit floats."""


class Streams:
    """One accelerator, as far as copies to it are concerned.

    What torch does in one call is torch's own function here, and streams and events are torch's own objects
    (``record_event``, ``wait_event``, ``query``, ``synchronize``).

    Args:
        device: with its number.

    Attributes:
        device: as given.
        new_stream: ``new_stream()``, a stream of the device.
        caller_stream: ``caller_stream()``, the current stream of the calling thread.
        set_stream: ``set_stream(stream)`` gives this thread's work on the device to the stream from now on. (Torch's
            context manager for it takes 12 us on an H200's host, two calls of this 3 us.)
        empty_like: ``empty_like(host)``, memory on the device in the layout of a host tensor, taken on the caller's
            stream.
        hollow: ``hollow(dtype=dtype)``, a tensor on the device without memory.
        copy: ``copy(target, source)`` copies from pinned host memory, on the current stream.
        is_pinned: ``is_pinned(host)``, whether the device reads the tensor's memory by itself.
        empty_cache: ``empty_cache()`` gives unused memory back to the device.
        timed_event: ``timed_event()``, an event that tells how long after another one it has passed.
        has_warned: a warning has said that torch cannot pin host memory.
        rest: ``rest(seconds)`` lets the host sleep between two looks at an event.
    """

    has_warned = False

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.get_device_module(device)
        self.device = device
        self._module = module
        self.new_stream: Callable[[], Any] = functools.partial(module.Stream, device)
        # By number: torch takes 3 us to look into a torch.device each time (on an H200's host).
        self.caller_stream: Callable[[], Any] = functools.partial(module.current_stream, device.index)
        self.set_stream: Callable[[Any], None] = module.set_stream
        self.empty_like: Callable[[torch.Tensor], torch.Tensor] = functools.partial(torch.empty_like, device=device)
        self.hollow: Callable[..., torch.Tensor] = functools.partial(torch.empty, 0, device=device)
        self.copy: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        self.copy = functools.partial(torch.Tensor.copy_, non_blocking=True)
        self.is_pinned: Callable[[torch.Tensor], bool] = torch.Tensor.is_pinned
        self.empty_cache: Callable[[], None] = module.empty_cache
        self.timed_event: Callable[[], Any] = functools.partial(module.Event, enable_timing=True)
        self.rest: Callable[[float], None] = time.sleep

    def current(self) -> AbstractContextManager[Any]:
        """``with current():`` makes the device current, as pinning, `set_stream`, `empty_cache` and a look at an event
        (``query``) require. Otherwise CUDA makes a context on the device that is current: in a new thread, device 0.

        What is made in the block can be used after the caller's inference mode, if there is one.
        """
        number, module = self.device.index, self._module
        if torch.is_inference_mode_enabled():
            return in_turn(torch.inference_mode(False), module.device(number))
        return NOTHING if module.current_device() == number else module.device(number)

    def used_on(self, tensors: Iterable[torch.Tensor], stream: Any) -> None:
        """When a tensor is dropped, keep its memory until ``stream`` has done the work that it has by then.

        Tensors that are not on this device are left out.
        """
        for tensor in tensors:
            if self.holds(tensor):
                tensor.record_stream(stream)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on this device."""
        return tensor.device == self.device

    def pin(self, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
        """A copy in pinned memory with these strides; torch uses that again when the copies from it have passed."""
        pinned = torch.empty_strided(host.shape, stride, dtype=host.dtype, device="cpu", pin_memory=True)
        return pinned.copy_(host)

    def pinned_bytes(self, nbytes: int) -> torch.Tensor:
        """Pinned memory of this size."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def runtime(self) -> Any:
        """The CUDA runtime, which pins memory in place (``cudaHostRegister``); None elsewhere."""
        return torch.cuda.cudart() if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def load(self, target: torch.Tensor, host: torch.Tensor) -> None:
        """Copy to memory on the device, for use by any stream: the host waits for it."""
        target.copy_(host)
        self.caller_stream().record_event().synchronize()

    def take(self, column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The rows of a column on the device, gathered by the current stream.

        Args:
            column: on the device.
            rows: their numbers, on the device.
        """
        words = _WORDS.get(column.itemsize, column.dtype)
        if words == column.dtype:  # two views take 3 us
            return column.index_select(0, rows)
        return column.view(words).index_select(0, rows).view(column.dtype)

    def put(self, column: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows into a tensor on the device, by the current stream.

        Args:
            column: the tensor.
            places: the numbers of its rows that are written, on the device.
            rows: what is written there, on the device.
        """
        words = _WORDS.get(column.itemsize, column.dtype)
        column.view(words).index_copy_(0, places, rows.view(words))

    def memory(self) -> tuple[int, int] | None:
        """Bytes that torch can still use on the device, and all its bytes; None if the device does not tell."""
        module = self._module
        if not hasattr(module, "mem_get_info"):  # some accelerators, and old versions of torch
            return None
        free, total = module.mem_get_info(self.device)
        unused = module.memory_reserved(self.device) - module.memory_allocated(self.device)
        return int(free + unused), int(total)

    def peak(self) -> int:
        """Bytes that tensors have taken on the device at once, at most, beyond those that they take now."""
        module = self._module
        return int(module.max_memory_allocated(self.device) - module.memory_allocated(self.device))


@contextmanager
def in_turn(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """One context in another.

    Example:
        >>> with in_turn(torch.inference_mode(), NOTHING):
        ...     torch.zeros(1).is_inference()
        True
    """
    with outer, inner:
        yield


def is_late(error: BaseException) -> bool:
    """Whether an accelerator reports with this error that earlier work failed.

    Example:
        >>> is_late(RuntimeError("CUDA error: device-side assert triggered")), is_late(RuntimeError("no pinned memory"))
        (True, False)
    """
    if not isinstance(error, RuntimeError) or "out of memory" in str(error):
        return False
    kind = getattr(torch, "AcceleratorError", None)  # torch >= 2.8
    return (kind is not None and isinstance(error, kind)) or str(error).startswith(("CUDA error", "HIP error"))


def note_late(error: BaseException) -> bool:
    """Note on an error that `is_late` that the batch may not be the cause; whether the error is late.

    Example:
        >>> note_late(ValueError("no tensor"))
        False
    """
    if not is_late(error):
        return False
    if LATE_NOTE not in notes_of(error):
        add_note(error, LATE_NOTE)
    return True


def capture_probe(kind: str) -> Callable[[], bool] | None:
    """What tells whether the current stream of an accelerator of this kind is being captured into a graph.

    Returns:
        torch's function; None: there is none, or it raises, as in a torch without this accelerator.

    Example:
        >>> capture_probe("cpu") is None
        True
    """
    probe: Callable[[], bool] | None = getattr(getattr(torch, kind, None), "is_current_stream_capturing", None)
    try:
        if probe is not None:
            probe()  # touches no device: where this process has no context on it, nothing is captured
    except RuntimeError:
        return None
    return probe


def streams_of(device: torch.device) -> Streams | None:
    """The streams of a device; None where it has none.

    Example:
        >>> streams_of(torch.device("cpu")) is None
        True
    """
    if device.type in ("cpu", "meta"):
        return None
    module = torch.get_device_module(device)
    return Streams(device) if hasattr(module, "Stream") and hasattr(module, "current_stream") else None
