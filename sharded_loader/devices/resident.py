"""Data that lives on the devices: the columns are copied there once, and a batch is gathered there.

    settle()  the columns -> each device that has room for them
    RowNumbers --sampler, plan, InlinePool--> row numbers of the batch --Residence.begin, finish--> batch on the device

The loader reads the row numbers in the place of the samples, so order, shards, ranks, state and errors are those of any
other loader, and nothing is done on the host per sample. A device without room, and the CPU, has its shards gathered
on the host and sent as always (`devices.placement`).

A batch is gathered on the caller's current stream, when it is handed out: there is nothing to wait for, and its
memory is the caller's like that of any tensor. The columns stay until the loader is closed, or refreshed.

What can go wrong: a column that a device cannot hold (strings, objects, a list): a TypeError with ``resident=True``,
read as always with ``"auto"``; no room, or torch says so while they are copied: a warning, and the device is sent
batches.

Source of the idea: pytorch#11372, which asks for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from sharded_loader.batching.stack import is_column
from sharded_loader.batching.tree import to_torch, torch_has
from sharded_loader.data.arrays import ArrayDataset
from sharded_loader.data.bulk import Indices, checked_index, checked_indices, is_gathered
from sharded_loader.data.datasets import Dataset
from sharded_loader.devices.names import indexed
from sharded_loader.devices.placement import Begun, Placement
from sharded_loader.devices.streams import OUT_OF_MEMORY, Streams, streams_of

RESERVE = 0.25
"""Of a device's memory, left for the model and what it computes."""


class RowNumbers(Dataset):
    """A dataset of so many samples, each of which is its own index.

    Example:
        >>> RowNumbers(3)[-1], RowNumbers(3).get_batch([2, 0])
        (2, array([2, 0]))
    """

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> int:
        return checked_index(index, self._length)

    def get_batch(self, indices: Indices) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Row numbers from 0."""
        return checked_indices(indices, self._length)


def check_resident(resident: Any, dataset: Any, devices: Any, batchify_fn: Any) -> bool:
    """Whether columns are to be kept on the devices, if they have room.

    Raises:
        ValueError: it is neither a bool nor ``"auto"``; or True, where there are no devices or a ``batchify_fn``.
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
            raise ValueError("resident=True gathers batches on the device, where batchify_fn cannot run: leave it out")
        if type(dataset) is not ArrayDataset:
            raise TypeError(
                f"resident=True keeps the columns of an ArrayDataset on the devices, and this is a "
                f"{type(dataset).__name__}: make an ArrayDataset of what it reads, or leave resident out"
            )
        for number, column in enumerate(_columns(dataset)):
            if not _fits_a_device(column):
                raise TypeError(
                    f"resident=True: column {_name(dataset, number)} is a {_describe(column)}, which a device cannot "
                    f"hold: give arrays or tensors of numbers, or leave resident out"
                )
    except (TypeError, ValueError):
        if resident is True:
            raise
        return False
    return True


class _OnDevice(NamedTuple):
    """The columns, on one device."""

    streams: Streams
    home: Any
    columns: list[torch.Tensor]


class _Rows(NamedTuple):
    """A shard that is going to be gathered on its device: the row numbers, in pinned host memory."""

    at: _OnDevice
    numbers: torch.Tensor


class Residence:
    """Puts batches of row numbers where they belong, as the rows themselves; otherwise like a `Placement`.

    Args:
        dataset: whose rows; its columns can be held on a device.
        devices: of the shards, or of plain batches (the first).
        told: warn where there is no room (the user asked for it).
        placement: sends the shards of devices without room.

    Attributes:
        stale: the dataset has changed, and is to be copied again before the next epoch.
    """

    ahead = 0

    def __init__(self, dataset: ArrayDataset, devices: list[torch.device], told: bool, placement: Placement) -> None:
        self.devices = devices
        self._dataset = dataset
        self._told = told
        self._placement = placement
        self.stale = False
        self._on: dict[torch.device, _OnDevice | None] = {}

    def settle(self) -> bool:
        """Copy the columns to the devices that have room, once.

        Returns:
            Whether batches are to be read as row numbers: a device holds the columns, or all of them are the CPU.
        """
        if self.stale:
            self.forget()
        for device in dict.fromkeys(self.devices):
            if device not in self._on:
                streams = streams_of(indexed(self._placement.numbered(device)))
                self._on[device] = None if streams is None else self._load(streams)
        return bool(self.resident) or all(device.type == "cpu" for device in self.devices)

    @property
    def resident(self) -> list[torch.device]:
        """The devices that hold the columns."""
        return [device for device, found in self._on.items() if found is not None]

    def forget(self) -> None:
        """Give the devices' memory back."""
        self._on, self.stale = {}, False

    def begin(self, batch: Any, sharded: bool) -> Any:
        """Send the shards of devices that do not hold the columns on their way.

        Args:
            batch: row numbers, or a list of them for each shard.
            sharded: which of the two.
        """
        shards = batch if sharded else [batch]
        begun = [self._begin_on(device, rows) for rows, device in zip(shards, self.devices, strict=False)]
        return begun if sharded else begun[0]

    def finish(self, begun: Any) -> Any:
        """The batch, ready on the current stream of this thread."""
        return [self._finish(shard) for shard in begun] if type(begun) is list else self._finish(begun)

    def make_room(self) -> None:
        """A device has no memory left: give back what is not used."""
        self._placement.make_room()

    def check_not_capturing(self) -> None:
        """Reject a call inside a graph capture.

        Raises:
            RuntimeError: the current stream is being captured.
        """
        self._placement.check_not_capturing()

    def end_epoch(self) -> None:
        """Wait for the last copies of an epoch, to devices that do not hold the columns."""
        self._placement.end_epoch()

    def _load(self, streams: Streams) -> _OnDevice | None:
        hosts = [to_torch(column) if isinstance(column, np.ndarray) else column for column in _columns(self._dataset)]
        memory = streams.memory()
        if memory is None and not self._told:
            return None  # whether there is room is not known, and nobody insists
        if memory is not None:
            free, total = memory
            nbytes, room = sum(host.nbytes for host in hosts), max(0, free - int(total * RESERVE))
            if nbytes > room:
                self._warn(streams, f"{nbytes:,} bytes of columns, room for {room:,}")
                return None
        try:
            with streams.current(), torch.inference_mode(False):
                return _OnDevice(streams, streams.caller_stream(), [streams.load(host) for host in hosts])
        except OUT_OF_MEMORY as error:
            streams.empty_cache()
            self._told = True
            self._warn(streams, str(error).partition("\n")[0])
            return None

    def _warn(self, streams: Streams, reason: str) -> None:
        if self._told:
            warnings.warn(f"{streams.device} does not keep the data ({reason}): it is sent batches", stacklevel=4)

    def _begin_on(self, device: torch.device, rows: np.ndarray[Any, Any]) -> Any:
        at = self._on[device]
        if at is None:
            shard = to_torch(self._dataset.get_batch(rows, self._placement.empty))
            return Begun([([0], self._placement.send(device, [shard]))], 1, sharded=False)
        with at.streams.current():
            return _Rows(at, at.streams.pin(torch.from_numpy(np.asarray(rows)), (1,)))

    def _finish(self, shard: Any) -> Any:
        if not isinstance(shard, _Rows):
            return self._placement.finish(shard)
        streams, home, columns = shard.at
        with streams.current():
            current = streams.caller_stream()
            # On the caller's stream, so the numbers' memory is used again after the gather without being recorded.
            numbers = streams.empty_like(shard.numbers)
            streams.copy(numbers, shard.numbers)
            fields = [streams.take(column, numbers) for column in columns]
            if current != home:
                for column in columns:
                    streams.used_on(column, current)
        return self._dataset.as_batch(fields)


def _columns(dataset: ArrayDataset) -> Sequence[Any]:
    columns = dataset.columns
    return list(columns.values()) if isinstance(columns, dict) else columns


def _name(dataset: ArrayDataset, number: int) -> str:
    columns = dataset.columns
    return repr(list(columns)[number]) if isinstance(columns, dict) else str(number)


def _fits_a_device(column: Any) -> bool:
    if isinstance(column, np.ndarray):
        return is_gathered(column) and torch_has(column.dtype)
    return isinstance(column, torch.Tensor) and is_column(column) and not column.requires_grad


def _describe(column: Any) -> str:
    kind = type(column).__name__
    return f"{kind} of {column.dtype}" if hasattr(column, "dtype") else kind
