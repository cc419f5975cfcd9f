"""Host memory that a device reads by itself: the pool's segments page-locked in place, or memory that torch pins.

    Registrar.register(mapping) -> undo      a process pool's segment, when it is made; undone when the pool is closed,
                                             unless a device may still read it: undo() -> whether it was undone
    PinnedMemory.empty(shape, dtype)         what threads, and the loop itself, put batches together in

A segment is page-locked once (0.1 s/GB), so a batch goes from the slot that a worker wrote to the device without
another copy. PyTorch does not guard memory that it did not pin: only copies of `devices.lane` read it, which holds the
slots until they are done; the user never gets to see it.

What can go wrong: page-locking is refused (a limit, no permission, confidential computing). One warning, and copies
go through pinned memory of torch's own, as everywhere without CUDA. The refusal also leaves an error behind in the CUDA
runtime, which would come up in the next, unrelated call: it is cleared.

Source of the idea: vLLM and SGLang register their host pools this way; what they met with when it failed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sharded_loader.devices.streams import Streams
from sharded_loader.interrupts import program_ends, uninterrupted

PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every device's context, also those made later."""

ALREADY = 712
"""cudaErrorHostMemoryAlreadyRegistered."""

Drain = Callable[[], Any]
"""Waits until no copy reads from the segments any more. False: one may still, and the segments must stay."""

Undo = Callable[[], bool]
"""Unregisters a segment. False: it is still registered, and its mapping must stay."""


class Registrar:
    """Page-locks the segments of one pool.

    Args:
        streams: of a device of the loader; it is current while a segment is locked, so that no context appears
            on another one.
        drain: waits until no copy reads from the segments any more.

    An interruption may come between the registration and the note of whoever asked for it. So a segment is noted here
    before it is registered. Who asks again gets the same undo, and nothing is registered twice.
    """

    def __init__(self, streams: Streams, drain: Drain) -> None:
        self._streams = streams
        self._drain = drain
        self._refused = False
        self._undo: dict[int, Undo | None] = {}

    def register(self, mapping: mmap.mmap) -> Undo | None:
        """Page-lock a segment.

        Returns:
            What undoes it, to be called before the memory is unmapped; None if it was refused.
        """
        address, nbytes = address_of(mapping)
        known, begun = self._undo.get(address), address in self._undo
        if known is not None or (self._refused and not begun):
            return known
        with self._streams.current(), uninterrupted():
            try:
                runtime = self._streams.runtime()
                if runtime is None:
                    return None
                self._undo[address] = None
                code = int(runtime.cudaHostRegister(address, nbytes, PORTABLE))
                if code == ALREADY and begun:  # by the call that was interrupted
                    clear_error(runtime)
                    code = 0
            except RuntimeError as error:
                self._undo.pop(address, None)
                self._refuse(str(error), nbytes)
                return None
            if code != 0:
                reason = f"cudaHostRegister: error {code}"
                with contextlib.suppress(Exception):
                    reason = f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({reason})"
                clear_error(runtime)
                del self._undo[address]
                self._refuse(reason, nbytes)
                return None
            undo = self._undo[address] = functools.partial(
                _undo, self._streams, runtime, address, self._drain, self._undo
            )
            return undo

    def _refuse(self, reason: str, nbytes: int) -> None:
        self._refused = True
        warnings.warn(
            f"{nbytes:,} bytes of shared memory could not be page-locked ({reason}): batches are copied once more on "
            f"their way to the device. Free host memory, raise the memory limit of the container, or give the loader "
            f"less with ProcessPool(max_bytes=). WSL and confidential computing allow little pinned memory, or none",
            stacklevel=2,
        )


def _undo(streams: Streams, runtime: Any, address: int, drain: Drain, noted: dict[int, Undo | None]) -> bool:
    """Unregister a segment when no copy reads it any more. At the program's end the driver does it."""
    if program_ends():
        return False
    try:
        if drain() is False:
            return False
    except RuntimeError:
        pass  # the device's context is broken: nothing is copied any more
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


def clear_error(runtime: Any) -> None:
    """Take the error that a refused call has left behind in the CUDA runtime."""
    if hasattr(runtime, "cudaGetLastError"):
        runtime.cudaGetLastError()
        return
    for library in _loaded_runtimes():
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(library).cudaGetLastError()
    # Where the runtime was not found so: torch looks for errors after each kernel, and takes the one it finds.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


def _loaded_runtimes(maps: str = "/proc/self/maps") -> list[str]:
    """Paths of the CUDA runtimes that this process has loaded: torch's, perhaps under another name, and others."""
    try:
        lines = Path(maps).read_text(errors="surrogateescape").splitlines()
    except OSError:  # none here, or not for this process
        return []
    paths = {line.split(maxsplit=5)[5].strip() for line in lines if len(line.split()) > 5}
    return sorted(path.removesuffix(" (deleted)") for path in paths if os.path.basename(path).startswith("libcudart"))


class PinnedMemory:
    """Arrays in memory that torch has pinned, and uses again when the copies from it are done.

    Args:
        streams: of the device whose context pins.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
        """Like `numpy.empty`, for any thread."""
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            return np.empty(shape, dtype)
        # A tensor of its own for each array: torch finds the memory that a copy reads by where it begins.
        with self._streams.current():
            raw = self._streams.pinned_bytes(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        return raw.numpy().view(dtype).reshape(shape)
