"""Data that lives on the devices: rows are copied there once, and a batch is gathered there. No worker reads.

    load()                    the first rows of arrays -> each device, as many as there is room for
    submit -> tasks -> wait   indices of a shard -> pinned memory -> the device gathers its rows -> Result
                              rows that the device does not keep -> pinned memory -> copied into their places

`wait` gathers a task when the batch is asked for, on the caller's current stream: like any tensor that the user makes
there, the batch is ready without waiting. The shards of a device without rows, and of the CPU, are gathered on the
host; the placement sends them as always. Order, shards, ranks, state and errors are those of any other loader, and
nothing is done on the host per sample. Indices that cannot be found are left to a `Reader`.

The indices of several batches are sent at once, and small batches are gathered at once, because the calls cost the host
more than the rows cost the device. The order arrives in blocks (`sampling.tables.BLOCK`), so the indices behind those
of a task are probably those of the next tasks. They are a guess: what was sent or gathered ahead is used only for a
task with exactly these indices, on the same stream. After a wrong guess, one batch is sent, then two, and so on.

Row i on a device is sample i of the dataset. Of a part of another dataset (``take``, ``split``) the devices keep the
part's own rows: a device of each rank, or of each fold, then holds no rows that are never asked for, and a batch needs
no other numbers on the device.

Owns the rows on the devices. They stay while the loader is open, also after an interruption; `load` copies them again
after a refresh, `forget` gives their memory back. Room is looked for once, before the first batch. It also owns the
thread in which `loader.epochs` shuffles the next epoch during this one: that takes as long as a few small batches.

What can go wrong: a device cannot hold a column (strings, objects, a list), or the dataset reads no columns. This is a
TypeError; with ``"auto"`` the dataset is read as always. If a device has no room, there is a warning, and the device is
sent batches, from any moment on. If it has no memory for a batch that is sent, that is the batch's error.

For: data that fits into the memory of the device, or a large part of it.
Costs: one module of about 250 lines. The core asks for it by name where it is given.
Tests: tests/resident, and tests/gpu where there is one.
It goes when: reading rows from host memory is as fast as gathering them on a device.

Source of the idea: pytorch#11372, which asks for it; flodl, which keeps a fraction.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from sharded_loader import ArrayDataset, InlinePool
from sharded_loader.extend import Empty, Int64s, Result
from sharded_loader.extend import data as core
from sharded_loader.extend import engine as placing
from sharded_loader.extend.tools import an, brief, host_clock, pass_on, warn

RESERVE = 0.25
"""Of a device's memory, left for the model and what it computes."""

LEAST = 0.5
"""Of the rows. If fewer fit, ``"auto"`` leaves the reading to the workers, which do it in the background: rows that a
device does not keep are gathered by the main process, and sent inside ``next``. The number was not measured."""

TOGETHER, TOGETHER_BYTES = 8, 4 << 20
"""Limits of the batches whose indices are sent at once, or that are gathered at once: their number, and the bytes on a
device, because a batch that is kept keeps the others. With 8, the host's time for a batch is less than half of that
with 1."""

ALIGNED = 16
"""Rows: the tensors of each batch begin at a multiple, so at a multiple of 16 bytes, as compiled code expects."""

LOADED_AT_ONCE = 64 << 20
"""Bytes of rows that lie in host memory once more while they are copied to a device."""


class Rows(NamedTuple):
    """A dataset whose samples are rows of arrays and tensors.

    Attributes:
        length: the number of samples.
        columns: the arrays and tensors, by name or by number.
        find: the rows of many samples in the columns.
        as_batch: the batch whose fields are these, in the order of the columns.
    """

    length: int
    columns: dict[Any, Any]
    find: Callable[[Any], Int64s]
    as_batch: Callable[[list[Any]], Any]


def as_rows(dataset: Any) -> Rows | None:
    """The columns that a dataset reads by index, through any stack of parts; None if it does anything else.

    Args:
        dataset: any. Columns of an `ArrayDataset` may be of any kind, other columns are as for `is_gathered` and
            `is_column`.

    Example:
        >>> from sharded_loader import SubsetDataset
        >>> rows = as_rows(SubsetDataset(ArrayDataset(x=np.arange(5) * 10), [4, 2]))
        >>> rows.columns["x"][rows.find([0, -1])], rows.as_batch(["xs"])
        (array([40, 20]), {'x': 'xs'})
        >>> as_rows(ArrayDataset([1, 2]).transform(str)) is None
        True
    """
    if (inside := core.part_of(dataset)) is not None:
        rows, translate = as_rows(inside[0]), inside[1]
        return rows and rows._replace(length=len(dataset), find=lambda indices: rows.find(translate(indices)))
    if type(dataset) is ArrayDataset and "get_batch" not in vars(dataset):
        arrays, as_batch = dataset.columns, dataset.as_batch
    elif (found := core.arrays_of(dataset)) is not None and core.are_rows(arrays := tuple(found[0]())):
        as_batch = (lambda fields: fields[0]) if found[1] else (lambda fields: fields)
    else:
        return None
    columns = arrays if isinstance(arrays, dict) else dict(enumerate(arrays))
    return Rows(len(dataset), columns, partial(core.checked_indices, length=len(dataset)), as_batch)


def make_resident(
    resident: object, dataset: object, batchify_fn: object, placement: placing.Placer, has_workers: bool
) -> ResidentPool | None:
    """The pool that ``resident=`` of a `Placement` asks for; None: none.

    Raises:
        ValueError: ``resident`` is no bool, no fraction and not ``"auto"``; or it is no ``"auto"``, and there are no
            devices, or there is a ``collate_fn``.
        TypeError: it is no ``"auto"``, and the dataset does not read rows of arrays, or one of these cannot be held on
            a device.
    """
    is_auto = isinstance(resident, str) and resident == "auto"
    is_share = isinstance(resident, float | np.floating) and 0 < resident <= 1
    if not (is_share or is_auto or resident is True):
        text = f'resident is {resident!r}; it must be True, False, "auto", or a fraction of the rows'
        raise ValueError(f"{text}: a float above 0, at most 1.0, such as 0.6")
    try:
        _check_rows(f"resident={resident!r}", dataset, placement.devices, batchify_fn)
    except (TypeError, ValueError):
        if not is_auto:
            raise
        return None
    share = float(resident) if is_share else 1.0  # type: ignore[arg-type]  # it is a number
    least = LEAST if is_auto and has_workers else 0.0
    return ResidentPool(dataset, placement, share, not is_auto, least)


def _check_rows(this: str, dataset: object, devices: object, batchify_fn: object) -> None:
    """Raise if batches of these data cannot be gathered on devices."""
    if devices is None:
        raise ValueError(f"{this} keeps data on devices: give device= or devices= as well")
    if batchify_fn is not None:
        raise ValueError(f"{this} gathers batches on the device, where collate_fn cannot run: leave it out")
    if (rows := as_rows(dataset)) is None:
        text = f"{this} keeps rows of arrays on the devices, and this dataset reads something else: {brief(dataset)}"
        advice = "Give an array, a TensorDataset, an ArrayDataset or a part of one. Apply a transform before"
        raise TypeError(f"{text}. {advice}, or to the batch; or leave resident out")
    for name, column in rows.columns.items():
        if not (core.is_column(column) or (core.is_gathered(column) and core.torch_has(column.dtype))):
            dtype = f" of {column.dtype}" if hasattr(column, "dtype") else ""
            text = f"{this}: column {name!r} is {an(type(column))}{dtype}, which a device cannot hold"
            raise TypeError(f"{text}: give arrays or tensors of numbers, or leave resident out")


class _OnDevice(NamedTuple):
    """The first ``kept`` rows of each column on one device, in memory of the stream ``owner_stream``."""

    copies: placing.CopyStream
    owner_stream: object
    columns: list[torch.Tensor]
    kept: int


class ResidentPool(InlinePool):
    """Gathers batches on the devices that hold rows of the dataset.

    Args:
        dataset: one that `make_resident` allows.
        placement: of the loader.
        share: of the rows, to be kept on each device.
        insists: warn where there is no room (the user asked for it).
        least: of those rows. If fewer fit, none are kept.
    """

    def __init__(self, dataset: object, placement: placing.Placer, share: float, insists: bool, least: float) -> None:
        super().__init__()
        self._dataset, self._devices, self._placement = dataset, placement.devices or [], placement
        self._share, self._insists, self._least = share, insists, least
        self._rows = as_rows(dataset)
        self._on: dict[torch.device, _OnDevice | None] = {}
        # Shards that were gathered ahead, by number of the shard: their stream, and the bytes of the indices of each,
        # with its fields, or with the indices on the device. The next one is last.
        self._ahead: dict[int, tuple[object, list[tuple[bytes, Any]]]] = {}
        self._together = 1
        self.background = placing.Background("sharded_loader-order")
        self.empty = placement.empty

    # -- the rows -------------------------------------------------------------------------------------------

    @property
    def counts(self) -> dict[torch.device, int]:
        """How many rows each device holds that holds any."""
        return {device: found.kept for device, found in self._on.items() if found is not None}

    def load(self, *, again: bool) -> bool:
        """Copy rows to the devices that have room, once.

        Args:
            again: the dataset has changed.

        Returns:
            Whether batches are to be gathered by this pool: a device holds rows, or all devices are the CPU.
        """
        if again:
            self.forget()
            self._rows = as_rows(self._dataset)
        rows, on = self._rows, self._on  # others, if the loader is closed meanwhile
        if rows is None:  # the dataset has changed that much
            return False
        for device in self._devices:
            if device not in on:
                copies = self._placement.copies[device]
                on[device] = None if copies is None else self._load(rows, copies, self._fitting(rows, copies.streams))
        return bool(self.counts) or all(device.type == "cpu" for device in self._devices)

    def forget(self) -> None:
        """Give the devices' memory back, and end the thread."""
        self._on, self._ahead = {}, {}
        self.background.close()

    def _fitting(self, rows: Rows, streams: placing.Streams) -> int:
        """How many rows a device is to keep."""
        nbytes = sum(math.prod(column.shape[1:]) * column.itemsize for column in rows.columns.values())
        wanted, memory = min(rows.length, max(1, round(self._share * rows.length))), memory_of(streams)
        if memory is None:  # the device does not tell
            return wanted if self._insists else 0
        free, total = memory
        room = max(0, free - int(total * RESERVE))
        count = min(wanted, room // nbytes) if nbytes else wanted
        if count < wanted and self._insists:
            _warn(streams, f"{wanted * nbytes:,} bytes of columns, room for {room:,}", count)
        return count if count >= self._least * wanted else 0

    def _load(self, rows: Rows, copies: placing.CopyStream, count: int) -> _OnDevice | None:
        """Copy the first rows to a device, unless it has no memory for them; none are asked for if none fit."""
        if not count:
            return None
        streams = copies.streams
        try:
            with streams.current():
                kinds = [core.to_torch(host[:0]) for host in rows.columns.values()]
                columns = [streams.empty((count, *kind.shape[1:]), dtype=kind.dtype) for kind in kinds]
                step = max(1, LOADED_AT_ONCE * count // max(1, sum(column.nbytes for column in columns)))
                for begin in range(0, count, step):
                    fields = _read(rows, np.arange(begin, min(begin + step, count)), core.new_array)
                    for column, host in zip(columns, fields, strict=True):
                        load_rows(streams, column[begin : begin + step], core.to_torch(host))
                return _OnDevice(copies, streams.caller_stream(), columns, count)
        except placing.OUT_OF_MEMORY as error:
            reason = str(error).partition("\n")[0]
        _give_up(streams, reason)  # not done above: the error's traceback holds the columns that have found room
        return None

    # -- batches --------------------------------------------------------------------------------------------

    def wait(self, block: bool = True) -> Sequence[Result]:
        rows = self._rows
        if not self._tasks or not block or rows is None:
            return super().wait(block)
        task, began = self._tasks[0], host_clock.now()
        try:
            found = [core.checked_indices(shard, rows.length) for shard in task.shards]
        except Exception as error:
            pass_on(error)
            return super().wait(block)  # the reader finds the sample, or knows what to do about it
        self._tasks.popleft()
        try:
            numbered, samples = enumerate(zip(self._devices, found, strict=False)), sum(map(len, found))
            shards = [self._gather(rows, samples, number, *shard) for number, shard in numbered]
        except Exception as raised:
            failure = placing.placement_error(task, raised, "while the batch was gathered")
            return (Result(task.run, task.seq, error=failure),)
        batch = shards if task.sharded else shards[0]
        return (Result(task.run, task.seq, batch, samples, seconds=host_clock.now() - began, began=began),)

    def _gather(self, rows: Rows, step: int, number: int, device: torch.device, where: Int64s) -> object:
        """A shard: on its device if that holds rows, otherwise on the host."""
        at = self._on.get(device)  # None too where `load` was interrupted
        if at is not None:
            try:
                return placing.PendingCopy(rows.as_batch(self._next(at, rows, step, number, where)))
            except placing.OUT_OF_MEMORY as error:
                reason = str(error).partition("\n")[0]
            streams = at.copies.streams
            at = self._on[device] = None  # not done above, as in `_load`
            _give_up(streams, reason)
        return rows.as_batch(_read(rows, where, self.empty))

    def _next(self, at: _OnDevice, rows: Rows, step: int, number: int, where: Int64s) -> list[torch.Tensor]:
        """The fields of a shard: gathered ahead, or now, together with the shards that probably follow."""
        stream, (of, ahead) = at.copies.streams.caller_stream(), self._ahead.get(number, (None, []))
        if ahead:
            if of == stream and ahead[-1][0] == where.tobytes():
                found = ahead.pop()[1]
                return found if type(found) is list else _gathered(at, found)
            ahead.clear()  # before memory is asked for
            self._together = 1
        width = -(-len(where) // ALIGNED) * ALIGNED
        fits = TOGETHER_BYTES * at.kept // max(1, width * sum(column.nbytes for column in at.columns))
        most = min(self._together, fits if fits > 1 else TOGETHER_BYTES // max(1, 8 * width))
        self._together = min(2 * self._together, TOGETHER)
        lines = foreseen(where, step, most if at.kept == rows.length else 1, rows.length)
        if len(lines) == 1:
            return self._take(at, rows, where)
        numbers = np.zeros((len(lines), width), np.int64)
        numbers[:, : len(where)] = lines
        with at.copies.streams.current():
            places = _sent(at.copies.streams, numbers)
            found = places[:, : len(where)].unbind()
            if fits > 1:
                fields = [field.view(*numbers.shape, *field.shape[1:]) for field in _gathered(at, places.view(-1))]
                # Not views: the shards share no version counter, so one may change while autograd needs another.
                shards = ([part.data for part in field[:, : len(where)].unbind()] for field in fields)
                found = list(map(list, zip(*shards, strict=True)))
        self._ahead[number] = stream, [*zip(map(np.ndarray.tobytes, lines), found, strict=True)][:0:-1]
        return found[0] if fits > 1 else _gathered(at, found[0])

    def _take(self, at: _OnDevice, rows: Rows, where: Int64s) -> list[torch.Tensor]:
        """The rows of each column, on the device, in order."""
        streams = at.copies.streams
        absent = np.flatnonzero(where >= at.kept) if at.kept < rows.length else ()
        with streams.current():
            sent: list[torch.Tensor] = []
            numbers = where
            if len(absent):
                sent = at.copies.begin(_read(rows, where[absent], self.empty)).finish()
                if len(absent) == len(where):
                    return sent
                numbers = np.concatenate([np.where(where < at.kept, where, 0), absent])
            places = _sent(streams, numbers)
            fields = _gathered(at, places[: len(where)] if sent else places)
            for field, those in zip(fields, sent, strict=False):
                put_rows(field, places[len(where) :], those)
        return fields


def _sent(streams: placing.Streams, numbers: Int64s) -> torch.Tensor:
    """Numbers of rows on a device, in memory of the caller's stream: it is used again after what that stream does."""
    host = torch.from_numpy(numbers)
    places = streams.empty_like(host)
    return streams.copy(places, placing.pinned_copy(streams, host, host.stride()))


def _gathered(at: _OnDevice, places: torch.Tensor) -> list[torch.Tensor]:
    """The rows of each column, on the device, in order."""
    streams = at.copies.streams
    with streams.current():
        fields, current = [take_rows(column, places) for column in at.columns], streams.caller_stream()
        if current != at.owner_stream:
            streams.record_use(at.columns, current)
    return fields


def foreseen(where: Int64s, step: int, most: int, length: int) -> Int64s:
    """The indices of a shard and of up to ``most`` - 1 that probably follow it, a line each: from the same array.

    Args:
        where: the indices of the shard.
        step: how far apart they are: the samples of a batch.
        length: of the dataset.

    Example:
        >>> order = np.array([5, 2, 8, 9, 0, 3, 1])
        >>> foreseen(order[1:3], 3, 8, 10)
        array([[2, 8], [0, 3]])
        >>> foreseen(order[1:3], 3, 8, 9), foreseen(order[1:3].copy(), 3, 8, 10)
        (array([[2, 8], [0, 3]]), array([[2, 8]]))
    """
    block: Any = where.base
    if isinstance(block, np.ndarray) and block.ndim == 1 and block.strides == where.strides == (where.itemsize,):
        begin = (where.ctypes.data - block.ctypes.data) // where.itemsize
        count = min(most, (len(block) - begin) // step)
        lines = block.view(np.int64)[begin : begin + count * step].reshape(count, step)[:, : len(where)]
        if count > 1 and int(np.maximum.reduce(lines.view(np.uint64), axis=None)) < length:
            return lines
    return where[None]


def _read(rows: Rows, where: Int64s, empty: Empty) -> list[Any]:
    """Rows of each column, in host memory."""
    return core.gather_rows(list(rows.columns.values()), rows.find(where), empty)


def _give_up(streams: placing.Streams, reason: str) -> None:
    """A device had no memory: it keeps no rows."""
    with streams.current():
        streams.empty_cache()
    _warn(streams, reason)


def _warn(streams: placing.Streams, reason: str, count: int = 0) -> None:
    what = f"keeps {count:,} rows only ({reason}): it is sent the others"
    what = what if count else f"does not keep the data ({reason}): it is sent batches"
    warn(f"{streams.device} {what}")


# -- what the device does ----------------------------------------------------------------------------------------------

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Rows are gathered as numbers of these types: not every torch has a kernel for unsigned numbers and 8-bit floats."""


def load_rows(streams: placing.Streams, target: torch.Tensor, host: torch.Tensor) -> None:
    """Copy to memory on the device, for use by any stream: the host waits for it."""
    target.copy_(host)
    streams.caller_stream().record_event().synchronize()


def take_rows(column: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The rows of a column on the device, gathered by the current stream.

    Args:
        column: on the device.
        rows: their numbers, on the device.

    Example:
        >>> take_rows(torch.tensor([1.5, 2.5, 3.5]), torch.tensor([2, 0]))
        tensor([3.5000, 1.5000])
    """
    words = _WORDS.get(column.itemsize, column.dtype)
    if words == column.dtype:  # two views take 3 us
        return column.index_select(0, rows)
    return column.view(words).index_select(0, rows).view(column.dtype)


def put_rows(column: torch.Tensor, places: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows into a tensor on the device, by the current stream.

    Args:
        column: the tensor.
        places: the numbers of its rows that are written, on the device.
        rows: what is written there, on the device.

    Example:
        >>> column = torch.zeros(3)
        >>> put_rows(column, torch.tensor([1]), torch.ones(1))
        >>> column
        tensor([0., 1., 0.])
    """
    words = _WORDS.get(column.itemsize, column.dtype)
    column.view(words).index_copy_(0, places, rows.view(words))


def memory_of(streams: placing.Streams) -> tuple[int, int] | None:
    """Bytes that torch can still use on a device, and all its bytes; None if the device does not tell."""
    module: Any = torch.get_device_module(streams.device)
    if not hasattr(module, "mem_get_info"):  # some accelerators, and old versions of torch
        return None
    free, total = module.mem_get_info(streams.device)
    unused = module.memory_reserved(streams.device) - module.memory_allocated(streams.device)
    return int(free + unused), int(total)
