"""One part of iterable data, read from any point on.

    Copies(dataset).make()                  a copy of the dataset as it was
    OpenPart(dataset, number, parts)        a part while it is read: ``begin``, ``advance``, ``state``

A dataset knows from ``torch.utils.data.get_worker_info()`` which part to yield, as in torch's own workers: ``id`` is
the number of the part, ``num_workers`` the number of parts. A function may take the two numbers as arguments instead.

A part is read from its beginning, or from a state of the dataset's own ``state_dict``. Without one, getting to a point
means reading all samples before it. A checksum of the first sample of each batch says whether they are the same ones.

An `OpenPart` owns the iterator, and a copy of the dataset where several parts are open in one process: many datasets
keep their position in themselves. What can go wrong is the user's: whatever the dataset raises.
"""

from __future__ import annotations

import copy
import io
import pickle
import types
from collections.abc import Callable
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

from sharded_loader.batching.protocol import refuse_async
from sharded_loader.data.inspection import is_stateful, iterable_of
from sharded_loader.data.seeding import set_epoch_of
from sharded_loader.engine.messages import PartPoint
from sharded_loader.streams.worker_info import Part, here, tell

SHARED_BYTES = 64 << 20
"""Arrays from this size on are data, and all parts share them. Smaller ones may be an order, shuffled in place."""


class Copies:
    """Copies of a dataset as it is now. Functions, classes, modules and large arrays in it are shared.

    Example:
        >>> data = [1, print]
        >>> copies = Copies(data)
        >>> data.append(2)
        >>> copies.make() == [1, print]
        True
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._shared: list[Any] = []
        stream = io.BytesIO()
        try:
            _Copier(stream, self._shared).dump(dataset)
            self._pickled = stream.getvalue()
        except Exception:  # it cannot be pickled
            self._pickled = b""

    def make(self) -> Any:
        """One copy; the dataset itself where it cannot be copied."""
        if not self._pickled:
            return self._dataset
        return _Unpickler(io.BytesIO(self._pickled), self._shared).load()


class _Copier(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(stream, protocol=5)
        self._shared = shared

    def persistent_id(self, obj: Any) -> int | None:
        large = getattr(obj, "nbytes", 0) if hasattr(obj, "__array__") else 0
        if not isinstance(obj, type | types.FunctionType | types.ModuleType) and large < SHARED_BYTES:
            return None
        self._shared.append(obj)
        return len(self._shared) - 1


class _Unpickler(pickle.Unpickler):  # a subclass: in Python 3.13 the method cannot be set
    def __init__(self, stream: io.BytesIO, shared: list[Any]) -> None:
        super().__init__(stream)
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        return self._shared[pid]


class OpenPart:
    """One part of iterable data while it is read.

    Args:
        dataset: the dataset, or a copy of it that this part has to itself.
        number, parts: which part, and how many there are.
        seed: what ``get_worker_info().seed`` is.
        alone: no other thread of this process reads a part.
        told: call the dataset's ``set_epoch``.

    Attributes:
        number: as above.
        point: where the part is. `advance` changes nothing in it; the reader does.
        busy: a thread is in the middle of a batch.
        advance: the next sample; StopIteration at the end of a pass.
    """

    def __init__(
        self, dataset: Any, number: int, parts: int, seed: int, *, alone: bool = False, told: bool = True
    ) -> None:
        self.number = number
        self._dataset, self._parts = dataset, parts
        self._alone, self._told = alone, told
        self._part = Part(number, parts, seed, dataset)
        self._has_state = is_stateful(dataset)
        self._items: Any = None
        self._is_iterator = False
        self._last_state: Any = None
        self.point = PartPoint()
        self.busy = False
        self.advance: Callable[[], Any] = _nothing

    def begin(self, passes: int, state: Any = None) -> None:
        """Begin a pass, or go on from a state that `state` has returned. With a third item: begin after that pass."""
        dataset = self._dataset
        if self._told and (set_epoch := set_epoch_of(dataset)) is not None:
            set_epoch(passes)
        of_dataset, of_items, *begins_anew = state or (None, None)
        if of_dataset is not None:
            dataset.load_state_dict(copy.deepcopy(of_dataset))
        before = self.tell()
        try:
            items = iterable_of(dataset, lambda: self._part.place)
            method: Any = getattr(type(items), "__iter__", None)
            if iscoroutinefunction(method) or isasyncgenfunction(method):
                items = method(items)
            refuse_async([items], "the dataset")
            self._items = iter(items)
            self._is_iterator = self._items is dataset
            if of_items is not None:
                self._items.load_state_dict(copy.deepcopy(of_items))
            if begins_anew:  # the state is that of the end of a pass
                self._items = iter(items)
        finally:
            here.part = before
        self.advance = self._items.__next__

    def tell(self) -> Part | None:
        """Tell this thread of the part; see `streams.worker_info`."""
        # One part in the main process is everything, as in torch: there is no worker.
        is_all = self._parts == 1 and not self._alone
        return tell(None if is_all else self._part, alone=self._alone)

    def end(self) -> None:
        """The part has no more samples: let go of the iterator."""
        self._last_state = self.state()
        self._items, self.advance = None, _nothing

    @property
    def is_over(self) -> bool:
        """Whether the samples come from a generator that has ended, as each one does that raises."""
        return getattr(self._items, "gi_frame", self) is None

    @property
    def asked(self) -> bool:
        """Whether the dataset has asked which part it is to read."""
        return self._part.asked

    @property
    def is_stateful(self) -> bool:
        """Whether the dataset, or its iterator, can say where it is."""
        return self._has_state or self._last_state is not None or is_stateful(self._items)

    def state(self) -> Any:
        """What `begin` goes on from; None if the dataset cannot say."""
        if self._last_state is not None:
            return self._last_state
        # Copies: some return the dict that they go on changing. A dataset that is its own iterator is loaded as that.
        items = self._dataset if self._is_iterator else self._items
        of_items = copy.deepcopy(items.state_dict()) if is_stateful(items) else None
        of_dataset = None
        if not self._is_iterator and self._has_state:
            of_dataset = copy.deepcopy(self._dataset.state_dict())
        return None if of_dataset is None and of_items is None else (of_dataset, of_items)


def _nothing() -> Any:
    raise StopIteration
