"""Serialization of arbitrary objects with out-of-band buffers: how batches leave a worker process.

    encode(obj, slot) -> Encoded(pickled, places, buffers)  in the worker: pickle protocol 5, large arrays out of band
    decode(pickled, buffers) -> obj                         in the main process: arrays and tensors over ``buffers``
    SlotWriter(memory)                                      allocates arrays in the slot that belongs to the batch

Arrays created in the slot (`SlotWriter.empty`) are not copied; others are copied into it once while there is room. The
rest are views in ``Encoded.buffers``, so the object must stay unchanged until they are sent. The receiver provides
writable memory for them, which the decoded arrays own. Tensors travel as raw bytes: torch's own reduction writes an
in-band zip archive per tensor.

*Classes* arrive as the very class that the user holds; otherwise ``except MyError`` would not catch a worker's error. A
worker whose dataset came by value has copies of classes of ``__main__`` and function bodies; a forked one has the
originals under names that cannot be looked up. `class_reference` therefore names a class by cloudpickle's tracker, its
address and its name, for `resolve_class` in the main process. All tables of classes hold weak references.

*Exceptions* run user code (``__reduce__``, ``__str__``, ``__getattr__``) that may raise anything, but `encode_error`
and `decode_error` never raise. The pickle is verified in the worker; summary, traceback and notes always travel as
text.

Otherwise, whatever pickling raises is passed on. Tensors that require grad are rejected. If the main process lacks a
class, an AttributeError says what to do.
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

# Smaller arrays are cheaper in band than as separate messages: a message costs two system calls on each side
# (4-6 us), copying 8 KB twice costs 1 us.
IN_BAND_BYTES = 8192

# An array in a slot costs 16 bytes in the table and no system call; below this size copying is as cheap.
IN_SLOT_BYTES = 256

ALIGNMENT = 64
"""Alignment of arrays in a slot: a cache line, as vector instructions require."""

# Without long doubles (g, G): torch lacks the dtype, so they stay on the host.
_PLAIN = {np.dtype(char).num for char in "?bBhHiIlLqQefdFD"}

Array = np.ndarray[Any, Any]


class Encoded(NamedTuple):
    """A pickled object with its out-of-band buffers.

    Attributes:
        pickled: the pickle stream.
        places: offset and size in the slot of each out-of-band buffer. Offset -1: the buffer is in ``buffers``. A size
            is negative, with a mark, if the library does not copy the object to devices (`HostParts`).
        buffers: buffers outside the slot.
        modules: modules that unpickling imports (published jobs only).
    """

    pickled: bytes
    places: tuple[tuple[int, int], ...]
    buffers: tuple[memoryview, ...]
    modules: frozenset[str] = frozenset()


_NO_MEMORY = np.empty(0, np.uint8)


class SlotWriter:
    """Writer of one batch into a slot of shared memory (bytes). Without a slot, all arrays are allocated elsewhere."""

    def __init__(self, memory: Array | None) -> None:
        self._memory = _NO_MEMORY if memory is None else memory
        self._address = 0 if memory is None else array_address(memory)
        self._used = 0
        self._overflow = 0

    @property
    def used(self) -> int:
        """Bytes of the slot in use; a multiple of `ALIGNMENT`, unless the slot ends earlier."""
        return min(self._used, self._memory.nbytes)

    @property
    def wanted(self) -> int:
        """Bytes that the batch needed, inside and outside the slot: the size for the next slot."""
        return self._used + self._overflow

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Like `numpy.empty`, in the slot while there is room."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        start = -1 if dtype.hasobject or not nbytes else self._reserve(nbytes)
        return np.empty(shape, dtype) if start < 0 else np.ndarray(shape, dtype, self._memory, start)

    def place(self, raw: memoryview | Array) -> int:
        """Return the offset of these bytes in the slot, copying them there if necessary; -1 if there is no room."""
        if self._memory is _NO_MEMORY:  # saves 10 us for a small batch
            self._overflow += aligned(raw.nbytes)
            return -1
        source = np.frombuffer(raw, np.uint8)
        start = array_address(source) - self._address
        if 0 <= start <= self._memory.nbytes - source.nbytes:
            return start
        start = self._reserve(source.nbytes)
        if start < 0:
            self._overflow += aligned(source.nbytes)
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
    """Return the space that an array of this size takes in a slot.

    Example:
        >>> aligned(1), aligned(64)
        (64, 64)
    """
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def array_address(array: Array) -> int:
    """Return the address of the array's first element."""
    address: int = array.__array_interface__["data"][0]
    return address


# -- both ways --------------------------------------------------------------------------------------------------------


def encode(obj: object, slot: SlotWriter | None = None, pickler: Any = None) -> Encoded:
    """Pickle ``obj``, large buffers out of band, into ``slot`` while there is room.

    Whatever pickling raises is passed on; use `encode_error` for exceptions.

    Example:
        >>> encoded = encode({"x": np.arange(10_000)})
        >>> len(encoded.buffers)
        1
        >>> decode(encoded.pickled, [bytearray(b) for b in encoded.buffers])["x"].sum().item()
        49995000
    """
    stream = io.BytesIO()
    places: list[tuple[int, int]] = []
    buffers: list[memoryview] = []

    def export_buffer(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        nbytes = raw.nbytes
        offset = -1
        if slot is not None and nbytes >= IN_SLOT_BYTES:
            offset = slot.place(raw)
        if offset < 0:
            if nbytes < IN_BAND_BYTES:
                return True
            buffers.append(raw)
        elif mark := getattr(active, "apart", 0):
            nbytes = -(nbytes | mark)
        places.append((offset, nbytes))
        return False

    active: Any = (pickler or ReplyPickler)(stream, protocol=5, buffer_callback=export_buffer)
    try:
        active.dump(obj)
        return Encoded(stream.getvalue(), tuple(places), tuple(buffers), frozenset(getattr(active, "modules", ())))
    finally:
        active = None  # breaks the cycle with the callback: the object would otherwise wait for the collector


def decode(pickled: bytes | memoryview, buffers: Sequence[object] = ()) -> Any:
    """Unpickle what `encode` returned, over the memory in ``buffers``."""
    return pickle.loads(pickled, buffers=buffers)


class ReplyPickler(pickle.Pickler):
    """Pickler for replies of a worker. ``apart`` is the mark of the `HostParts` objects being pickled, or 0."""

    apart = 0

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is HostParts:
            self.apart = ON_HOST
        elif obj is Movers:
            self.apart = MOVES
        elif obj is End:
            self.apart = 0
        elif isinstance(obj, type):
            # Re-running a notebook cell binds the name of a class in it to a new class.
            if obj.__module__ == "__main__" or not is_findable(obj):
                return class_reference(obj)
        elif type(obj) is np.ndarray:
            return reduce_array(obj)
        elif is_plain_tensor(obj):
            return reduce_tensor(obj)
        elif is_tensor(obj) and not obj.is_leaf:
            text = "a batch holds a tensor with a gradient function, which cannot leave its process"
            raise ValueError(f"{text}: call .detach() on it in the dataset or in collate_fn")
        return NotImplemented


# -- arrays -----------------------------------------------------------------------------------------------------------


def is_plain(array: object) -> bool:
    """Return True for a contiguous array of numbers of NumPy's own class: bytes, dtype and shape describe it fully."""
    return type(array) is np.ndarray and array.dtype.num in _PLAIN and array.flags.c_contiguous


def reduce_array(array: Array) -> Any:
    """Reduce arrays that NumPy itself pickles in band (dates, non-contiguous); NotImplemented for others.

    The order of the axes in memory is preserved, gaps are not.
    """
    if array.nbytes < IN_SLOT_BYTES or array.dtype.hasobject:
        return NotImplemented
    kind = array.dtype.kind
    # V: a structure, perhaps with date fields. T: variable-length strings, which are stored elsewhere.
    if kind == "T" or (array.flags.forc and kind not in "mMV"):
        return NotImplemented
    order = sorted(range(array.ndim), key=lambda axis: -abs(array.strides[axis]))
    packed: Any = np.asarray(array.transpose(order), order="C")
    strides = packed.transpose(np.argsort(order)).strides
    return np.ndarray, (array.shape, array.dtype, pickle.PickleBuffer(packed.reshape(-1).view(np.uint8)), 0, strides)


# -- tensors ----------------------------------------------------------------------------------------------------------


def is_plain_tensor(obj: Any) -> bool:
    """Return True for a tensor that its memory describes fully: dense, on the CPU, without grad."""
    return is_tensor(obj) and not obj.requires_grad and is_plain_host([obj])


def reduce_tensor(tensor: Any) -> Any:
    """Reduce a plain tensor (`is_plain_tensor`) with its memory out of band."""
    torch: Any = sys.modules["torch"]
    stored = tensor.resolve_conj().resolve_neg()
    # In memory order: a channels_last tensor stays one, without a copy.
    order = sorted(range(stored.dim()), key=lambda dim: -stored.stride(dim))
    if not stored.permute(order).is_contiguous():
        stored = stored.contiguous()
    # Not reshape: a tensor of one element is contiguous with any stride, which is kept, and which view rejects.
    raw = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy()
    return rebuild_tensor, (raw, dtype_name(tensor.dtype), 0, tuple(stored.shape), stored.stride())


def rebuild_tensor(raw: Array, dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Any:
    """Create a tensor over the bytes of its storage."""
    import torch

    if not raw.flags.writeable:
        raw = raw.copy()
    pinned = _pinned_under(raw)
    storage = (torch.from_numpy(raw) if pinned is None else pinned).untyped_storage()
    return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(storage, offset, shape, stride)


def _pinned_under(raw: Array) -> Any:
    """Return the tensor whose memory torch pinned for this array, else None. Copies from its storage are guarded."""
    base: Any = raw
    while isinstance(base, (np.ndarray, memoryview)):
        base = base.obj if isinstance(base, memoryview) else base.base
    whole = base if is_tensor(base) and base.nbytes == raw.nbytes else None
    return whole if whole is not None and whole.data_ptr() == array_address(raw) else None


# -- arrays over files -------------------------------------------------------------------------------------------------


def view_mapping(whole: Any, kind: type, writeable: bool, shape: Any, dtype: Any, start: int, strides: Any) -> Array:
    """Create an array of this kind (`numpy.ndarray` or `numpy.memmap`) over an opened mapping."""
    array: Any = np.ndarray(shape, dtype, whole, start, strides)
    array.flags.writeable = writeable
    if kind is np.memmap:
        array = array.view(kind)
        # Attributes of numpy.memmap's own slices, without which flush() does nothing.
        array._mmap, array.filename, array.offset, array.mode = whole._mmap, whole.filename, whole.offset, whole.mode
    return array  # type: ignore[no-any-return]


# -- objects that the library does not copy to devices ----------------------------------------------------------------


ON_HOST, MOVES = 1 << 61, 1 << 62
"""Marks on the size of a buffer, which is then negative: not copied by the library, and also moves itself."""

SIZE = ON_HOST - 1
"""Mask for the size in a marked size."""


class Movers:
    """Marker after those objects of a `HostParts` that do not move themselves."""


class End:
    """Marker after the objects of a `HostParts`."""


class HostParts(NamedTuple):
    """A reply, preceded by the objects in it that the library does not copy to a device tensor by tensor.

    They are pickled first, so that an array shared with the rest of the batch counts as theirs. ``moving`` and ``end``
    are the marker classes.
    """

    objects: list[Any]
    moving: type[Movers]
    movers: list[Any]
    end: type[End]
    reply: Any


def host_parts(tree: object) -> tuple[list[Any], list[Any]]:
    """Return the parts of a batch that the library must not copy to a device: first those that do not move themselves.

    They are objects of the user's classes, containers that move themselves, special tensors (sparse, subclasses) and
    arrays whose dtype torch lacks. The user may copy from their memory at any time, on any stream.

    Example:
        >>> host_parts({"x": np.zeros(3), "names": ["a"], "when": np.array(["2020"], "M8[Y]")})
        ([array(['2020'], dtype='datetime64[Y]')], [])
    """
    staying: list[Any] = []
    movers: list[Any] = []

    def collect(leaf: Any) -> Any:
        kind = type(leaf)
        plain = torch_has(leaf.dtype) if kind is np.ndarray else is_plain_tensor(leaf)
        if not (plain or isinstance(leaf, (np.generic, type))):
            (movers if has_method(leaf, "to") and not is_tensor(leaf) else staying).append(leaf)
        return leaf

    map_leaves(collect, tree, own="to", skip=ATOMS)
    return staying, movers


# -- classes -----------------------------------------------------------------------------------------------------------


def is_findable(obj: Any) -> bool:
    """Return True if another process finds the same object under its qualified name."""
    module = sys.modules.get(obj.__module__ or "")
    return module is not None and "<locals>" not in obj.__qualname__ and _look_up(module, obj.__qualname__) is obj


def _look_up(module: object, qualname: str) -> Any:
    obj = module
    for name in qualname.split("."):
        obj = getattr(obj, name, None)
    return obj


def class_reference(cls: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """Reduce ``cls`` to a reference that the main process resolves to its own class."""
    return resolve_class, (cls.__module__, cls.__qualname__, tracker_of(cls), id(cls))


def resolve_class(module: str, qualname: str, tracker: str | None, address: int) -> type:
    """Find the class of this process that `class_reference` named in a worker.

    One sent to the worker by value has a tracker. One defined in a function body cannot be looked up. Among all classes
    of its name it is the one at the same address (forked workers), or the only one (spawned workers).
    """
    if (tracked := tracked_class(tracker)) is not None:
        return tracked
    resolved = _searched_classes.get((module, qualname, address)) or _look_up(sys.modules.get(module), qualname)
    is_class = isinstance(resolved, type)
    # A notebook cell that ran again since the fork gives the name to another class. For errors that one is right: the
    # user's loop catches them under it.
    if not is_class or (module == "__main__" and id(resolved) != address and not issubclass(resolved, BaseException)):
        named = [cls for cls in _all_classes() if cls.__qualname__ == qualname and cls.__module__ == module]
        resolved = next((cls for cls in named if id(cls) == address), named[0] if len(named) == 1 else resolved)
        if not isinstance(resolved, type):
            text = f"class {module}.{qualname}, used by a worker process, does not exist in this one"
            raise AttributeError(f"{text}: define it at the top level of a module")
        _searched_classes[module, qualname, address] = resolved
    return resolved


_searched_classes: weakref.WeakValueDictionary[tuple[str, str, int], type] = weakref.WeakValueDictionary()
"""Classes found by search: without this table each batch of such a class takes 15 ms instead of 0.15."""


def _all_classes() -> list[type]:
    """Return every class of this process (10 ms with torch loaded)."""
    classes, todo = dict[int, type](), [object]  # by address: a metaclass may have an `__eq__` of its own
    while todo:
        new = {id(cls): cls for cls in type.__subclasses__(todo.pop()) if id(cls) not in classes}
        classes |= new
        todo += new.values()
    return list(classes.values())


# -- exceptions --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedError:
    """An exception in transit: a pickle if it has a working one, and its text."""

    payload: bytes | None
    summary: str
    traceback: str
    notes: tuple[str, ...]


def encode_error(error: BaseException) -> EncodedError:
    """Encode an exception. Never raises.

    The exception's own reduction is tried first, then one that bypasses ``__init__``, whose parameters may not match
    ``args``. Each is verified here, because a failure in the main process would come too late.
    """
    text, notes = errors.text_of(error), (*errors.notes_of(error),)
    if ("Cannot re-initialize" in text and "forked" in text) or text.startswith("CUDA error: initialization error"):
        notes = *notes, NO_CUDA_HERE
    errors.shorten(error)
    payload, traceback = None, errors.format_traceback(error, whole=False)
    for pickler in (ReplyPickler, _PartsPickler):
        with contextlib.suppress(BaseException):  # a __reduce__ may call sys.exit
            # All in band: it is decoded twice, here and in the main process.
            stream = io.BytesIO()
            pickler(stream, protocol=5).dump(error)
            twin = decode(stream.getvalue())
            if type(twin) is type(error) and _text(twin) == _text(error) and len(twin.args) == len(error.args):
                payload = stream.getvalue()
                break
    summary = type(error).__name__ + (f": {text}" if text else "")
    return EncodedError(payload, summary, traceback, notes)


NO_CUDA_HERE = (
    "sharded_loader: a forked worker cannot use the accelerator that the main process uses. Return CPU tensors from "
    'the dataset, and give the loader device="cuda": it copies batches in the background. If the dataset needs the '
    'accelerator, use ProcessPool(n, start_method="spawn"), or multiprocessing_context="spawn" with the drop-in'
)


def _text(error: BaseException) -> str:
    """Return the exception's message without the addresses in default reprs."""
    return re.sub("0x[0-9a-fA-F]+", "0x", errors.text_of(error))


def decode_error(encoded: EncodedError) -> BaseException:
    """Restore the exception of `encode_error`, with the worker's traceback as its cause. Never raises."""
    error: BaseException = errors.SampleReadError(encoded.summary)
    if encoded.payload is not None:
        with contextlib.suppress(Exception):
            error = decode(encoded.payload)
    if encoded.notes:
        errors.set_notes(error, list(encoded.notes))
    BaseException.__setattr__(error, "__cause__", errors.WorkerTraceback(encoded.traceback))
    return error


class _PartsPickler(ReplyPickler):
    """Pickles an exception as class, args and attributes; exceptions that it refers to use their own reductions."""

    has_started = False

    def reducer_override(self, obj: object) -> Any:
        if self.has_started or not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        self.has_started = True
        attributes = {}
        for name, value in vars(obj).items():
            with contextlib.suppress(BaseException):  # a __reduce__ may raise anything
                if name != "__notes__":  # sent separately
                    encode(value)
                    attributes[name] = value
        return _rebuild_error, (type(obj), obj.args, attributes)


def _rebuild_error(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Create an exception without calling ``__init__``."""
    try:
        error = cls.__new__(cls, *args)
    except TypeError:  # a custom __new__ with other parameters
        base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error = base.__new__(cls, *args)
    BaseException.__setattr__(error, "args", args)
    for name, value in attributes.items():
        BaseException.__setattr__(error, name, value)
    return error
