"""What an accelerator offers for copies to it: streams, events, their errors, and pinned memory, which it reads itself.

    streams_of(device) -> Streams          by torch's module for its kind (torch.cuda, torch.xpu); None: the CPU, mps
    Registrar.register(mapping) -> undo    pins a process pool's segment, when it is made; undone when the pool closes,
                                           unless a device may still read it: undo() -> whether it was undone
    pinned_empty(streams, shape, dtype)    memory for the batches of threads and of the main process
    pinned_copy(streams, host, stride)     what lies elsewhere, on its way to a device
    Pinner.begin(batch) -> PinnedCopy      ``pin_memory=True``: a thread copies, and `PinnedCopy.finish` waits for it

`devices.copies` says when to copy and what waits for what. Tests replace `Streams` by a device that does the work of
its streams late and in odd orders.

A segment is pinned once, so a batch goes from the slot that a worker wrote to the device without another copy. PyTorch
does not guard memory that it did not pin. So only `devices.copies` reads a segment, and holds the slots until its
copies are done. The user's program never sees that memory.

What can go wrong: no device memory (`OUT_OF_MEMORY`). Pinning is rejected (a limit, no permission, confidential
computing): one warning says so, and copies go through memory that torch pins, as on all devices without CUDA. The CUDA
runtime keeps the error of the rejected call and would report it in the next, unrelated call. So the error is cleared.
Where torch itself can pin no more, one warning says so too, and batches lie in plain memory.

The thread of a `Pinner` holds no batch while it waits, and no loader. It ends with `Pinner.close`.

Source of the idea: vLLM and SGLang register their host pools this way, and their reports of how it fails.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import queue
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch

from sharded_loader.base.errors import add_note, notes_of, text_of
from sharded_loader.base.interrupts import program_ends, uninterrupted
from sharded_loader.base.notices import warn

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


# -- pinned memory ---------------------------------------------------------------------------------------------------

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device's context, also those made later."""

BROKEN = frozenset({700, 702, 710, 714, 715, 716, 717, 718, 719})
"""Codes of errors of earlier kernels, which break the device's context. The copy of the batch reports them."""

Drain = Callable[[], Any]
"""Waits until no copy reads from the segments any more. False: one may still, and the segments must stay."""

Undo = Callable[[], bool]
"""Unregisters a segment. False: it is still registered, and its mapping must stay."""


class Registrar:
    """Pins the segments of one pool.

    Args:
        streams: of a device of the loader; it is current while a segment is pinned, so that no context appears
            on another one.
        drain: waits until no copy reads from the segments any more.

    The registrar notes each segment that it has pinned. If a Ctrl-C keeps the caller from noting the undo, the caller
    asks again and gets the same undo.
    """

    def __init__(self, streams: Streams, drain: Drain) -> None:
        self._streams = streams
        self._drain = drain
        self._rejected = False
        self._undo: dict[int, Undo] = {}

    def register(self, mapping: mmap.mmap) -> Undo | None:
        """Pin a segment.

        Returns:
            What undoes it, to be called before the memory is unmapped; None if it was rejected.
        """
        address, nbytes = address_of(mapping)
        if self._rejected or address in self._undo:
            return self._undo.get(address)
        with self._streams.current(), uninterrupted():
            try:
                runtime = self._streams.runtime()
                if runtime is None:
                    return None
                code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
                reason = "" if code == 0 else _reason(runtime, code)
                if code in BROKEN:
                    return None
            except RuntimeError as error:
                if is_late(error):
                    return None
                reason = str(error)
            if not reason:
                undo = functools.partial(_undo, self._streams, runtime, address, self._drain, self._undo)
                self._undo[address] = undo
                return undo
        self._rejected = True
        warnings.warn(
            f"{nbytes:,} bytes of shared memory could not be pinned ({reason}): batches are copied once more on "
            f"their way to the device. Free host memory, raise the memory limit of the container, or give the loader "
            f"less with ProcessPool(max_bytes=). WSL and confidential computing allow little pinned memory, or none",
            stacklevel=2,
        )
        return None


def _undo(streams: Streams, runtime: Any, address: int, drain: Drain, noted: dict[int, Undo]) -> bool:
    """Unregister a segment when no copy reads it any more. At the program's end the driver does it."""
    if program_ends():
        return False
    with contextlib.suppress(RuntimeError):  # the device's context is broken: nothing is copied any more
        if drain() is False:
            return False
    # It fails where the segment is not registered, and in a broken context, where nothing can be registered later.
    with contextlib.suppress(RuntimeError), streams.current():
        if int(runtime.cudaHostUnregister(address)) != 0:
            clear_error(runtime)
    noted.pop(address, None)
    return True


def address_of(mapping: mmap.mmap) -> tuple[int, int]:
    """Where a mapping begins, and its size in bytes.

    Example:
        >>> address_of(mmap.mmap(-1, 4096))[1]
        4096
    """
    # An exporter that goes at once: the mapping can be closed only when there is none.
    whole = np.frombuffer(mapping, np.uint8)
    return int(whole.__array_interface__["data"][0]), whole.nbytes


def _reason(runtime: Any, code: int) -> str:
    """What an error code says; the error is cleared."""
    reason = f"cudaHostRegister: error {code}"
    with contextlib.suppress(Exception):
        reason = f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({reason})"
    clear_error(runtime)
    return reason


def clear_error(runtime: object) -> None:
    """Take the error that a rejected call has left behind in the CUDA runtime."""
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    # torch's runtime has no such function. But torch looks for errors after each kernel, and takes the one it finds.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def pinned_empty(streams: Streams, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    """Like `numpy.empty`, in memory that torch has pinned, and uses again when the copies from it are done.

    Args:
        streams: of the device whose context pins.
        shape, dtype: as for `numpy.empty`.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject:
        return np.empty(shape, dtype)
    # A tensor of its own for each array: torch finds the memory that a copy reads by where it begins.
    with streams.current():
        try:
            raw = streams.pinned_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        except RuntimeError as error:
            _note_rejected(streams, error)
            return np.empty(shape, dtype)
    return raw.numpy().view(dtype).reshape(shape)


def pinned_copy(streams: Streams, host: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """A copy with these strides in memory that torch pins; in plain memory if it cannot pin any more.

    Args:
        streams: of the device whose context pins.
        host: a tensor in host memory.
        stride: of the copy.
    """
    try:
        return streams.pin(host, stride)
    except RuntimeError as error:
        _note_rejected(streams, error)
    return torch.empty_strided(host.shape, stride, dtype=host.dtype, device="cpu").copy_(host)


def _note_rejected(where: Streams | Pinner, error: RuntimeError) -> None:
    """Warn, once for each, that memory cannot be pinned. An error of another cause is raised again."""
    if not any(words in str(error) for words in ("out of memory", "not supported")):
        raise error
    if not where.has_warned:
        where.has_warned = True
        warn(_UNPINNED.format(text_of(error)))


_UNPINNED = (
    "batches could not be pinned ({}). They lie in plain memory, and their copies to the device make the program wait. "
    "Free host memory, or raise the memory limit of the container. WSL and confidential computing allow little pinned "
    "memory, or none"
)


# -- in the background ---------------------------------------------------------------------------------------

CLOSING_SECONDS = 10.0
"""How long `Pinner.close` waits for an object that pins itself, and does not come to an end."""

LOOKS = 0.1
"""Seconds between two looks of who waits for a copy: on Windows a Ctrl-C does not end the wait for a lock."""


class PinnedCopy:
    """A batch that is being copied into pinned memory.

    Attributes:
        event: None: no device has to be waited for.
    """

    event = None

    def __init__(self, batch: object) -> None:
        self._batch = batch
        self._error: BaseException | None = None
        self._done = threading.Event()

    def make(self, pin: Callable[[Any], object]) -> bool:
        """Copy; whether it has worked."""
        try:
            self._batch = pin(self._batch)
        except BaseException as error:
            self._error = error
        self._done.set()
        return self._error is None

    def drop(self) -> None:
        """Nothing is to be done: the memory goes with this object."""

    def finish(self) -> Any:
        """The batch in pinned memory.

        Raises:
            Exception: an object in it cannot be pinned.
        """
        while not self._done.wait(LOOKS):
            pass
        if self._error is not None:
            error, self._error = self._error, None
            try:
                raise error
            finally:
                del error  # otherwise error -> traceback -> this frame -> error, and the batch waits for the collector
        return self._batch


class Pinner:
    """Copies batches into pinned memory, in the order in which they come, in a thread.

    Args:
        pin: makes a pinned batch of a batch.
        kind: of the accelerator, such as ``"cuda"``. The device that is current at the first batch is the one that
            pins. In a new thread the first device would be, and would get a context.
        in_thread: False: copies at once, in the thread that calls `begin`.

    Attributes:
        has_warned: a warning has said that torch cannot pin host memory.

    Example:
        >>> pinner = Pinner(lambda batch: [*batch, "pinned"], "cpu", in_thread=False)
        >>> pinner.begin(["batch"]).finish()
        ['batch', 'pinned']
        >>> pinner.close()

    Source of the idea: PyTorch's DataLoader, which has such a thread. The copy uses one core, because a copy on all
    cores would slow down the program.
    """

    has_warned = False

    def __init__(self, pin: Callable[[Any], object], kind: str, in_thread: bool = True) -> None:
        self._pin, self._kind, self._in_thread = pin, kind, in_thread
        self._tasks: queue.SimpleQueue[PinnedCopy | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: object) -> PinnedCopy:
        """Have a batch copied."""
        pending = PinnedCopy(batch)
        if not self._in_thread:
            pending.make(self.pin)
            return pending
        if self._thread is None:
            module: Any = torch.get_device_module(self._kind)
            set_device = functools.partial(module.set_device, module.current_device())
            with uninterrupted():
                self._thread = threading.Thread(
                    target=_pin_all, args=(self, self._tasks, set_device), name="sharded_loader-pins", daemon=True
                )
                self._thread.start()
        self._tasks.put(pending)
        return pending

    def pin(self, batch: object) -> Any:
        """The batch in pinned memory, or as it is where torch cannot pin any more."""
        try:
            return self._pin(batch)
        except RuntimeError as error:
            _note_rejected(self, error)
            return batch

    def close(self) -> None:
        """End the thread. A later `begin` starts another one."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._tasks.put(None)
            if thread is not threading.current_thread():
                thread.join(CLOSING_SECONDS)


def _pin_all(pinner: Pinner, tasks: queue.SimpleQueue[PinnedCopy | None], set_device: Callable[[], object]) -> None:
    """The thread of a `Pinner`. What goes wrong before the first copy is the error of a batch, too."""

    def first(batch: object) -> Any:
        import threadpoolctl

        torch.get_num_threads()  # which sets the number for this thread, if nothing has done so before
        # Not `torch.set_num_threads`: it counts for each thread that the program starts later, too.
        threadpoolctl.threadpool_limits(1, user_api="openmp")
        set_device()
        return pinner.pin(batch)

    pin: Callable[[Any], Any] = first
    while (pending := tasks.get()) is not None:
        if pending.make(pin):
            pin = pinner.pin
        del pending
