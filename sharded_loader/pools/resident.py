"""Data that lives on the devices: each column is copied there once, and a batch is gathered there. No worker reads.

    load()                    columns of an `ArrayDataset` -> each device that has room for them
    submit -> tasks -> wait   indices of a shard -> pinned memory -> the device gathers its rows -> Result

`wait` gathers one task, when the batch is asked for. So the batch lies in memory of the caller's current stream, like
any tensor that the user makes there, and there is nothing to wait for. The shards of a device without room, and of the
CPU, are gathered on the host; the placement sends them as always. Order, shards, ranks, state and errors are those of
any other loader, and nothing is done on the host per sample.

Owns the columns on the devices. They stay while the loader is open, also after an interruption; `load` copies them
again after a refresh, `forget` gives their memory back.

What can go wrong: a device cannot hold a column (strings, objects, a list). This is a TypeError with ``resident=True``;
with ``"auto"`` the dataset is read as always. If a device has no room for the columns, there is a warning, and the
device is sent batches. If it has no memory for a batch, that is the batch's error.

Source of the idea: pytorch#11372, which asks for it.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from sharded_loader.base.described import an
from sharded_loader.batching.tensors import is_column
from sharded_loader.batching.tree import to_torch, torch_has
from sharded_loader.data.arrays import ArrayDataset
from sharded_loader.data.bulk import checked_indices, is_gathered
from sharded_loader.devices.copies import Placed
from sharded_loader.devices.placement import Placement, not_placed
from sharded_loader.devices.streams import OUT_OF_MEMORY, Streams
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool

RESERVE = 0.25
"""Of a device's memory, left for the model and what it computes."""


def check_resident(resident: Any, dataset: Any, devices: Any, batchify_fn: Any) -> bool:
    """Whether columns are to be kept on the devices, if they have room.

    Raises:
        ValueError: it is neither a bool nor ``"auto"``; or True, where there are no devices or a ``collate_fn``.
        TypeError: True, where the dataset is no `ArrayDataset`, or a column of it cannot be held on a device.

    Example:
        >>> check_resident("auto", ArrayDataset(["a", "b"]), [torch.device("cpu")], None)
        False
    """
    if resident is False:
        return False
    if resident is not True and resident != "auto":
        raise ValueError(f'resident is {resident!r}; it must be True, False or "auto"')
    try:
        if devices is None:
            raise ValueError("resident=True keeps data on devices: give device= or devices= as well")
        if batchify_fn is not None:
            raise ValueError("resident=True gathers batches on the device, where collate_fn cannot run: leave it out")
        if type(dataset) is not ArrayDataset:
            raise TypeError(
                f"resident=True keeps the columns of an ArrayDataset on the devices, and this is a "
                f"{type(dataset).__name__}: make an ArrayDataset of what it reads, or leave resident out"
            )
        for name, column in _named(dataset).items():
            if not (is_column(column) or (is_gathered(column) and torch_has(column.dtype))):
                dtype = f" of {column.dtype}" if hasattr(column, "dtype") else ""
                raise TypeError(
                    f"resident=True: column {name!r} is {an(type(column))}{dtype}, which a device cannot hold: "
                    f"give arrays or tensors of numbers, or leave resident out"
                )
    except (TypeError, ValueError):
        if resident is True:
            raise
        return False
    return True


class _OnDevice(NamedTuple):
    """The columns on one device, in memory of the stream ``home``."""

    streams: Streams
    home: Any
    columns: list[torch.Tensor]


class ResidentPool(Pool):
    """Gathers batches on the devices that hold the dataset.

    Args:
        dataset: an `ArrayDataset` whose columns can be held on a device.
        devices: of the shards, or of plain batches (the first).
        placement: of the loader.
        insists: warn where there is no room (the user asked for it).
    """

    room = 1

    def __init__(self, dataset: Any, devices: list[torch.device], placement: Placement, *, insists: bool) -> None:
        self._dataset: ArrayDataset = dataset
        self._devices = devices
        self._placement = placement
        self._insists = insists
        self._on: dict[torch.device, _OnDevice | None] = {}
        self._tasks: deque[Task] = deque()
        self._started = False
        self.empty = placement.empty

    # -- the columns ----------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[torch.device]:
        """The devices that hold the columns."""
        return [device for device, found in self._on.items() if found is not None]

    def load(self, *, again: bool) -> bool:
        """Copy the columns to the devices that have room, once.

        Args:
            again: the dataset has changed.

        Returns:
            Whether batches are to be gathered by this pool: a device holds the columns, or all devices are the CPU.
        """
        if again:
            self.forget()
        for device in self._devices:
            if device not in self._on:
                copies = self._placement.copies[device]
                self._on[device] = None if copies is None else self._load(copies.streams)
        return bool(self.devices) or all(device.type == "cpu" for device in self._devices)

    def forget(self) -> None:
        """Give the devices' memory back."""
        self._on = {}

    def _load(self, streams: Streams) -> _OnDevice | None:
        hosts = [to_torch(column) for column in _named(self._dataset).values()]
        nbytes, memory = sum(host.nbytes for host in hosts), streams.memory()
        if memory is None:
            room = nbytes if self._insists else 0  # the device does not tell
        else:
            room = max(0, memory[0] - int(memory[1] * RESERVE))
        if nbytes > room:
            if self._insists:
                _warn(streams, f"{nbytes:,} bytes of columns, room for {room:,}")
            return None
        try:
            with streams.current(), torch.inference_mode(False):
                return _OnDevice(streams, streams.caller_stream(), [streams.load(host) for host in hosts])
        except OUT_OF_MEMORY as error:
            streams.empty_cache()
            _warn(streams, str(error).partition("\n")[0])
            return None

    # -- six verbs ------------------------------------------------------------------------------------------

    @property
    def started(self) -> bool:
        return self._started

    def start(self, job: Job) -> None:
        self._started = True

    def submit(self, tasks: Sequence[Task]) -> None:
        self._tasks.extend(tasks)

    def wait(self, block: bool = True) -> Sequence[Result]:
        if not self._tasks or not block:
            return ()
        task, began = self._tasks.popleft(), time.perf_counter()
        try:
            shards = [self._gather(*shard) for shard in zip(self._devices, task.shards, strict=False)]
        except Exception as raised:
            return (not_placed(task, raised, "while the batch was gathered"),)
        batch = shards if task.sharded else shards[0]
        samples = sum(map(len, task.shards))
        return (Result(task.run, task.seq, batch, samples, seconds=time.perf_counter() - began),)

    def _gather(self, device: torch.device, indices: Sequence[int]) -> Any:
        """A shard: on its device if that holds the columns, otherwise on the host."""
        at = self._on.get(device)  # None too where `load` was interrupted
        if at is None:
            return self._dataset.get_batch(indices, self.empty)
        streams = at.streams
        host = torch.from_numpy(checked_indices(indices, len(self._dataset)))
        with streams.current():
            current = streams.caller_stream()
            # On the caller's stream, so the numbers' memory is used again after the gather without being recorded.
            rows = streams.empty_like(host)
            streams.copy(rows, streams.pin(host, (1,)))
            fields = [streams.take(column, rows) for column in at.columns]
            if current != at.home:
                streams.used_on(at.columns, current)
        return Placed(self._dataset.as_batch(fields))

    def cancel(self, run: int) -> None:
        self._tasks = deque(task for task in self._tasks if task.run != run)

    def close(self) -> None:
        """Drop the tasks. The columns stay: they are the loader's."""
        self._tasks.clear()
        self._started = False


def _warn(streams: Streams, reason: str) -> None:
    warnings.warn(f"{streams.device} does not keep the data ({reason}): it is sent batches", stacklevel=4)


def _named(dataset: ArrayDataset) -> dict[Any, Any]:
    """The columns by name, or by number."""
    columns = dataset.columns
    return columns if isinstance(columns, dict) else dict(enumerate(columns))
