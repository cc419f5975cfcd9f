"""From any Python object to a few buffers and back: how batches leave a worker process.

    encode(obj, slot) -> Encoded(head, places, buffers)     in the worker: pickle protocol 5, large arrays out of band
    decode(head, buffers) -> obj                            in the main process: arrays and tensors over ``buffers``
    SlotWriter(memory)                                      puts arrays into the slot that belongs to the batch

Arrays that are made in the slot (`SlotWriter.empty`) are not copied. Others are copied into it once, as far as it
reaches. What has no room is in ``Encoded.buffers``: views of the object's own arrays, so the object has to stay
unchanged until they are sent. The receiver provides writable memory for each of these, and the decoded arrays own it.

Tensors are taken as bytes: torch's own reduction writes a zip archive per tensor, in band.

Each class arrives as the very class that the user holds: otherwise ``except MyError`` would not catch a worker's error.

    class_reference(cls) -> a reduction that names it       in the worker
    resolve_class(...) -> cls                               in the main process

A worker that was sent its dataset by value has copies of the classes of ``__main__`` and of functions' bodies. A forked
one has the originals, but under names that cannot be looked up. So a class is named by cloudpickle's tracker, by its
address, or by its name. The tables of classes here refer to them weakly.

*Exceptions.* ``encode_error(error) -> EncodedError(payload, texts)``, and ``decode_error`` gives the same exception, or
its stand-in. The payload is a pickle that was tried out in the worker; the texts (summary, traceback, notes) always
travel. An exception is the user's code: its ``__reduce__``, ``__str__`` and ``__getattr__`` may raise anything. Nothing
here does.

What can go wrong: whatever pickling the user's objects raises. A tensor that requires grad is rejected with an error.
The main process may not have the class (AttributeError, with what to do).
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.base import errors
from sharded_loader.base.private import tracked_class, tracker_of
from sharded_loader.batching.tree import ATOMS, dtype_name, has_method, is_tensor, map_leaves, torch_has
from sharded_loader.batching.tree import is_plain as is_plain_host

# Below this an array is cheaper inside the pickle than as a message of its own: a message costs two system
# calls on each side (4-6 us), copying 8 KB twice costs 1 us.
IN_BAND_BYTES = 8192

# An array in a slot costs a place in the table, 16 bytes, and no system call; below this copying it is as cheap.
IN_SLOT_BYTES = 256

ALIGNMENT = 64
"""Arrays in a slot begin at a multiple of this: a cache line, and what vector instructions want."""

# Long doubles (g, G) stay on the host, because torch has no such dtype: they may have to be set apart.
_PLAIN = {np.dtype(char).num for char in "?bBhHiIlLqQefdFD"}

Array = np.ndarray[Any, Any]


class Encoded(NamedTuple):
    """A pickled object: the pickle stream, and the memory that it refers to.

    Attributes:
        head: the pickle.
        places: of each out-of-band buffer, in order, offset and size in the slot. The offset is -1 if the buffer is
            in ``buffers``. The size is negative, and has a mark, if the buffer belongs to an object that is set apart
            (`SetApart`).
        buffers: the buffers that are in no slot.
        modules: what unpickling it imports (of a published job).
    """

    head: bytes
    places: tuple[tuple[int, int], ...]
    buffers: tuple[memoryview, ...]
    modules: frozenset[str] = frozenset()


_NO_MEMORY = np.empty(0, np.uint8)


class SlotWriter:
    """One slot of the main process's memory, while a worker puts a batch into it.

    Args:
        memory: the slot, as bytes; None: there is none, everything is made elsewhere.
    """

    def __init__(self, memory: Array | None) -> None:
        self._memory = _NO_MEMORY if memory is None else memory
        self._address = 0 if memory is None else array_address(memory)
        self._used = 0
        self._outside = 0

    @property
    def used(self) -> int:
        """Bytes of the slot that are taken; a multiple of `ALIGNMENT`, unless the slot ends before it."""
        return min(self._used, self._memory.nbytes)

    @property
    def wanted(self) -> int:
        """Bytes that the batch needed, whether the slot had them or not: the next slot is that large."""
        return self._used + self._outside

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Like `numpy.empty`, in the slot as far as it reaches."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        start = -1 if dtype.hasobject or not nbytes else self._reserve(nbytes)
        return np.empty(shape, dtype) if start < 0 else np.ndarray(shape, dtype, self._memory, start)

    def place(self, raw: memoryview | Array) -> int:
        """Where in the slot these bytes are, copied there if they were elsewhere; -1 if there is no room."""
        if self._memory is _NO_MEMORY:  # 10 us less for a small batch
            self._outside += aligned(raw.nbytes)
            return -1
        source = np.frombuffer(raw, np.uint8)
        start = array_address(source) - self._address
        if 0 <= start <= self._memory.nbytes - source.nbytes:
            return start
        start = self._reserve(source.nbytes)
        if start < 0:
            self._outside += aligned(source.nbytes)
        else:
            self._memory[start : start + source.nbytes] = source
        return start

    def _reserve(self, nbytes: int) -> int:
        start = self._used
        if start + nbytes > self._memory.nbytes:
            return -1
        self._used = start + aligned(nbytes)
        return start


def aligned(nbytes: int) -> int:
    """What an array of this size takes in a slot.

    Example:
        >>> aligned(1), aligned(64)
        (64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def array_address(array: Array) -> int:
    """Where the array's first element is in this process's memory."""
    address: int = array.__array_interface__["data"][0]
    return address


# -- both ways --------------------------------------------------------------------------------------------------------


def encode(obj: object, slot: SlotWriter | None = None, pickler: Any = None) -> Encoded:
    """Pickle ``obj`` for the main process, large buffers out of band.

    Args:
        obj: anything.
        slot: where arrays lie already, or are put if there is room.
        pickler: the pickler class; None: `ReplyPickler`.

    Raises:
        Exception: whatever pickling raises; see `encode_error` for exceptions, which always succeed.

    Example:
        >>> encoded = encode({"x": np.arange(10_000)})
        >>> len(encoded.buffers)
        1
        >>> decode(encoded.head, [bytearray(b) for b in encoded.buffers])["x"].sum()
        np.int64(49995000)
    """
    stream = io.BytesIO()
    places: list[tuple[int, int]] = []
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        nbytes = raw.nbytes
        offset = -1
        if slot is not None and nbytes >= IN_SLOT_BYTES:
            offset = slot.place(raw)
        if offset < 0:
            if nbytes < IN_BAND_BYTES:
                return True
            buffers.append(raw)
        elif apart := getattr(made, "apart", 0):
            nbytes = -(nbytes | apart)
        places.append((offset, nbytes))
        return False

    made: Any = (pickler or ReplyPickler)(stream, protocol=5, buffer_callback=take)
    try:
        made.dump(obj)
        return Encoded(stream.getvalue(), tuple(places), tuple(buffers), frozenset(getattr(made, "modules", ())))
    finally:
        made = None  # otherwise made -> take -> made: what was pickled would wait for the collector


def decode(head: bytes | memoryview, buffers: Sequence[object] = ()) -> Any:
    """The object that `encode` pickled, over the memory in ``buffers``."""
    return pickle.loads(head, buffers=buffers)


class ReplyPickler(pickle.Pickler):
    """Pickles what leaves a worker.

    Attributes:
        apart: the mark of the objects of a `SetApart` that are being pickled; 0: none are.
    """

    apart = 0

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is SetApart:
            self.apart = APART
        elif obj is Moving:
            self.apart = MOVES
        elif obj is End:
            self.apart = 0
        elif isinstance(obj, type):
            # A notebook's cell that is run again gives the name of a class in it to another class.
            if obj.__module__ == "__main__" or not is_findable(obj):
                return class_reference(obj)
        elif type(obj) is np.ndarray:
            return reduce_array(obj)
        elif is_plain_tensor(obj):
            return reduce_tensor(obj)
        elif is_tensor(obj) and obj.requires_grad:
            raise ValueError(
                "a batch holds a tensor that requires grad, which cannot leave its process: "
                "call .detach() on it in the dataset or in collate_fn"
            )
        return NotImplemented


# -- arrays -----------------------------------------------------------------------------------------------------------


def is_plain(array: object) -> bool:
    """Whether this is an array of numbers without gaps, of NumPy's own class: bytes, dtype and shape say it all."""
    return type(array) is np.ndarray and array.dtype.num in _PLAIN and array.flags.c_contiguous


def reduce_array(array: Array) -> Any:
    """A reduction of the arrays that NumPy itself pickles in band, dates and gaps; NotImplemented for the others.

    The order of the axes in memory stays, the gaps go.
    """
    if array.nbytes < IN_SLOT_BYTES or array.dtype.hasobject:
        return NotImplemented
    kind = array.dtype.kind
    # V: a structure, perhaps with dates among its fields. T: strings of any length, which lie elsewhere.
    if kind == "T" or (array.flags.forc and kind not in "mMV"):
        return NotImplemented
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    packed: Any = np.asarray(array.transpose(order), order="C")
    strides = packed.transpose(np.argsort(order)).strides
    return np.ndarray, (array.shape, array.dtype, pickle.PickleBuffer(packed.reshape(-1).view(np.uint8)), 0, strides)


# -- tensors ----------------------------------------------------------------------------------------------------------


def is_plain_tensor(obj: Any) -> bool:
    """Whether ``obj`` is a tensor whose memory is all there is to it: on the CPU, dense, without grad."""
    return is_tensor(obj) and not obj.requires_grad and is_plain_host([obj])


def reduce_tensor(tensor: Any) -> Any:
    """A reduction of a plain tensor (`is_plain_tensor`) that leaves its memory out of band."""
    torch: Any = sys.modules["torch"]
    stored = tensor.resolve_conj().resolve_neg()
    # In the order of its memory: a channels_last tensor stays one, and is not copied.
    order = sorted(range(stored.dim()), key=lambda dim: -stored.stride(dim))
    if not stored.permute(order).is_contiguous():
        stored = stored.contiguous()
    # Not reshape: a tensor of one element is contiguous with any stride, which stays, and which view refuses.
    raw = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy()
    return rebuild_tensor, (raw, dtype_name(tensor.dtype), 0, tuple(stored.shape), stored.stride())


def rebuild_tensor(raw: Array, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """A tensor over the bytes of its storage."""
    import torch

    if not raw.flags.writeable:
        raw = raw.copy()
    whole = _pinned_under(raw)
    storage = (torch.from_numpy(raw) if whole is None else whole).untyped_storage()
    return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(storage, offset, shape, stride)


def _pinned_under(raw: Array) -> Any:
    """The tensor that an array's memory is of, if torch has pinned it for this array; otherwise None.

    A tensor over the same storage is guarded wherever a copy begins.
    """
    base: Any = raw
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    whole = base if is_tensor(base) and base.nbytes == raw.nbytes else None
    return whole if whole is not None and whole.data_ptr() == array_address(raw) else None


# -- arrays over files -------------------------------------------------------------------------------------------------


def view_mapping(whole: Any, kind: type, writeable: bool, shape: Any, dtype: Any, start: int, strides: Any) -> Array:
    """The array of this kind (`numpy.ndarray` or `numpy.memmap`) over an opened mapping."""
    array: Any = np.ndarray(shape, dtype, whole, start, strides)
    array.flags.writeable = writeable
    if kind is np.memmap:
        array = array.view(kind)
        # What numpy.memmap's own slices have. Without it flush() does nothing.
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, whole.mode
    return array  # type: ignore[no-any-return]


# -- what the library does not copy to a device itself ----------------------------------------------------------------


APART, MOVES = 1 << 61, 1 << 62
"""Marks on the size of a buffer, which is negative then: of what is set apart, and of what also moves itself."""

SIZE = APART - 1
"""What of a marked size, made positive, is the size."""


class Moving:
    """Ends those objects of a `SetApart` that do not move themselves."""


class End:
    """Ends the objects of a `SetApart`."""


class SetApart(NamedTuple):
    """A reply, and those objects in it that no device copy of the library's takes to pieces.

    The objects are pickled first. So an array that such an object shares with the rest of the batch counts as the
    object's: pickle refers to it where it comes again.

    Attributes:
        objects: what is set apart, and does not move itself.
        moving: the class `Moving`.
        movers: what is set apart, and moves itself.
        end: the class `End`.
        reply: what the objects belong to.
    """

    objects: list[Any]
    moving: type[Moving]
    movers: list[Any]
    end: type[End]
    reply: Any


def set_apart(tree: object) -> tuple[list[Any], list[Any]]:
    """The parts of a batch that the library does not copy to a device itself, tensor by tensor.

    These are objects of the user's own classes, containers that move themselves, special tensors (sparse, subclasses)
    and arrays that torch has no dtype for. The user may copy from their memory at any time, on any stream.

    Example:
        >>> set_apart({"x": np.zeros(3), "names": ["a"], "when": np.array(["2020"], "M8[Y]")})
        ([array(['2020'], dtype='datetime64[Y]')], [])

    Returns:
        Those that do not move themselves, and those that do.
    """
    found: list[Any] = []
    movers: list[Any] = []

    def look(leaf: Any) -> Any:
        kind = type(leaf)
        plain = torch_has(leaf.dtype) if kind is np.ndarray else is_plain_tensor(leaf)
        if not (plain or isinstance(leaf, (np.generic, type))):
            (movers if has_method(leaf, "to") and not is_tensor(leaf) else found).append(leaf)
        return leaf

    map_leaves(look, tree, own="to", skip=ATOMS)
    return found, movers


# -- classes -----------------------------------------------------------------------------------------------------------


def is_findable(obj: Any) -> bool:
    """Whether the other process finds the same object under the same name."""
    module = sys.modules.get(obj.__module__ or "")
    return module is not None and "<locals>" not in obj.__qualname__ and _look_up(module, obj.__qualname__) is obj


def _look_up(module: object, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def class_reference(cls: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """A reduction that names ``cls`` so that the main process finds its own."""
    return resolve_class, (cls.__module__, cls.__qualname__, tracker_of(cls), id(cls))


def resolve_class(module: str, qualname: str, tracker: str | None, address: int) -> type:
    """The class of this process that `class_reference` named in a worker.

    A class that was sent to the worker by value has a tracker. A class that a function's body makes has no name to
    look up. Among all classes with its name it is the one at the same address, because a forked worker's classes lie
    where they lie here. Or it is the only one: a spawned worker imported the module that makes it.
    """
    tracked = tracked_class(tracker)
    if tracked is not None:
        return tracked
    found = _look_up(sys.modules.get(module), qualname)
    if not isinstance(found, type):
        found = _nameless.get((module, qualname, address))
    if not isinstance(found, type):
        named = [cls for cls in _all_classes() if cls.__qualname__ == qualname and cls.__module__ == module]
        found = next((cls for cls in named if id(cls) == address), named[0] if len(named) == 1 else None)
        if found is None:
            raise AttributeError(
                f"class {module}.{qualname}, used by a worker process, does not exist in this one: "
                f"define it at the top level of a module"
            )
        _nameless[module, qualname, address] = found
    return found


_nameless: weakref.WeakValueDictionary[tuple[str, str, int], type] = weakref.WeakValueDictionary()
"""Classes that `resolve_class` had to look for: without it each batch of such a class takes 15 ms, instead of 0.15."""


def _all_classes() -> set[type]:
    """Every class of this process (10 ms with torch loaded; walked only for classes that have no name)."""
    classes, todo = set[type](), [object]
    while todo:
        found = set(type.__subclasses__(todo.pop())) - classes
        classes |= found
        todo += found
    return classes


# -- exceptions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedError:
    """An exception on its way to the main process: the object where it pickles, and always its text."""

    payload: bytes | None
    summary: str
    traceback: str
    notes: tuple[str, ...]


def encode_error(error: BaseException) -> EncodedError:
    """Make ``error`` ready to travel. Never raises.

    The exception's own reduction is tried first, then one that does not call ``__init__``: a constructor with several
    arguments cannot be called with ``args``. Each is tried out here, because a failure in the main process would come
    too late.
    """
    said, notes = errors.text_of(error), (*errors.notes_of(error),)
    if ("Cannot re-initialize" in said and "forked" in said) or said.startswith("CUDA error: initialization error"):
        notes = *notes, NO_CUDA_HERE
    errors.shorten(error)
    payload, text = None, errors.format_traceback(error, whole=False)
    for pickler in (ReplyPickler, _ByParts):
        with contextlib.suppress(BaseException):  # a __reduce__ may call sys.exit
            # All in band: it has to be read twice, here and there.
            stream = io.BytesIO()
            pickler(stream, protocol=5).dump(error)
            twin = decode(stream.getvalue())
            if type(twin) is type(error) and _text(twin) == _text(error) and len(twin.args) == len(error.args):
                payload = stream.getvalue()
                break
    summary = type(error).__name__ + (f": {said}" if said else "")
    return EncodedError(payload, summary, text, notes)


NO_CUDA_HERE = (
    "sharded_loader: a forked worker cannot use the accelerator that the main process uses. Return CPU tensors from "
    'the dataset, and give the loader device="cuda": it copies batches in the background. If the dataset needs the '
    'accelerator, use ProcessPool(n, start_method="spawn"), or multiprocessing_context="spawn" with the drop-in'
)


def _text(error: BaseException) -> str:
    """What the exception says, without the addresses that a default repr holds."""
    return re.sub("0x[0-9a-fA-F]+", "0x", errors.text_of(error))


def decode_error(encoded: EncodedError) -> BaseException:
    """The exception that `encode_error` packed, with the worker's traceback as its cause. Never raises."""
    error: BaseException = errors.SampleReadError(encoded.summary)
    if encoded.payload is not None:
        with contextlib.suppress(Exception):
            error = decode(encoded.payload)
    if encoded.notes:
        errors.set_notes(error, list(encoded.notes))
    BaseException.__setattr__(error, "__cause__", errors.WorkerTraceback(encoded.traceback))
    return error


class _ByParts(ReplyPickler):
    """Pickles an exception as class, args and attributes; those that it refers to have their own reductions."""

    begun = False

    def reducer_override(self, obj: object) -> Any:
        if self.begun or not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        self.begun = True
        attributes = {}
        for name, value in vars(obj).items():
            with contextlib.suppress(BaseException):  # a __reduce__ again
                if name != "__notes__":  # they travel by themselves
                    encode(value)
                    attributes[name] = value
        return _rebuild, (type(obj), obj.args, attributes)


def _rebuild(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """An exception whose ``__init__`` is not called."""
    try:
        error = cls.__new__(cls, *args)
    except TypeError:  # a __new__ of its own, with parameters of its own
        base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error = base.__new__(cls, *args)
    BaseException.__setattr__(error, "args", args)
    for name, value in attributes.items():
        BaseException.__setattr__(error, name, value)
    return error
