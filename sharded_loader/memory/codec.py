"""From any Python object to a few buffers and back: how batches leave a worker process.

    encode(obj) -> Encoded(head, buffers)      pickle protocol 5; large arrays out of band, not copied
    decode(head, buffers) -> obj               arrays and tensors lie in ``buffers``, not copied either

The buffers that `encode` returns are views into the object's own arrays, so the object has to stay
unchanged until they are sent. Whoever receives provides fresh writable memory for each, and the decoded
arrays own it.

Classes travel by reference, and have to arrive as the very class that the user holds, or ``except MyError``
misses. A worker that was sent its dataset by value has copies of the classes of ``__main__`` and of
functions' bodies; a forked one has the originals, but under names that cannot be looked up. `class_reference`
and `resolve_class` name them by cloudpickle's tracker or by address.

Tensors are taken as bytes: torch's own reduction writes a zip archive per tensor, in band.
"""

from __future__ import annotations

import io
import math
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sharded_loader.batching.tree import ATOMS, map_leaves, torch_has

# Below this an array is cheaper inside the pickle than as a message of its own: a message costs two system
# calls on each side (4-6 us), copying 8 KB twice costs 1 us.
IN_BAND_BYTES = 8192

# An array in a slot costs a place in the table, 16 bytes, and no system call; below this copying it is as cheap.
IN_SLOT_BYTES = 256

ALIGNMENT = 64
"""Arrays in a slot begin at a multiple of this: a cache line, and what vector instructions want."""


@dataclass(frozen=True)
class Encoded:
    """A pickled object: the pickle stream, and the memory that it refers to.

    Attributes:
        head: the pickle.
        places: of each out-of-band buffer, in order, offset and size in the slot. The offset is -1 if the buffer is
            in ``buffers``. The size is negative if the buffer belongs to an object that is set apart (`SetApart`).
        buffers: the buffers that are in no slot.
        modules: what unpickling it imports (of a published job).
    """

    head: bytes
    places: tuple[tuple[int, int], ...]
    buffers: tuple[memoryview, ...]
    modules: frozenset[str] = frozenset()


class SlotWriter:
    """One slot of the trainer's memory, while a worker puts a batch into it.

    Args:
        memory: the slot, as bytes; None: there is none, everything is made elsewhere.

    Attributes:
        wanted: bytes that the batch needed, whether the slot had them or not: the next slot is that large.
    """

    def __init__(self, memory: np.ndarray[Any, Any] | None) -> None:
        self._memory = memory
        self._size = 0 if memory is None else memory.nbytes
        self._address = 0 if memory is None else _address(memory)
        self._used = 0
        self._outside: dict[int, int] = {}
        self.wanted = 0

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray[Any, Any]:
        """Like `numpy.empty`, in the slot as far as it reaches."""
        dtype = np.dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        start = None if dtype.hasobject or not nbytes else self._reserve(nbytes)
        if start is None or self._memory is None:
            outside = np.empty(shape, dtype)
            if not dtype.hasobject:
                self._outside[_address(outside)] = nbytes
            return outside
        array: np.ndarray[Any, Any] = self._memory[start : start + nbytes].view(dtype).reshape(shape)
        return array

    def place(self, raw: memoryview) -> int:
        """Where in the slot these bytes are, copied there if they were elsewhere; -1 if there is no room."""
        if self._memory is None:
            self.wanted = -(-self.wanted // ALIGNMENT) * ALIGNMENT + raw.nbytes
            return -1
        source = np.frombuffer(raw, np.uint8)
        address = _address(source)
        inside = address - self._address
        if inside >= 0 and inside + source.nbytes <= self._size:
            return inside
        # What `empty` had no room for is wanted once, not a second time here: slots would be twice as large.
        start = self._reserve(source.nbytes, counted=self._outside.get(address, 0) >= source.nbytes)
        if start is None:
            return -1
        self._memory[start : start + source.nbytes] = source
        return start

    def _reserve(self, nbytes: int, *, counted: bool = False) -> int | None:
        start = -(-self._used // ALIGNMENT) * ALIGNMENT
        if not counted:
            self.wanted = -(-self.wanted // ALIGNMENT) * ALIGNMENT + nbytes
        if start + nbytes > self._size:
            return None
        self._used = start + nbytes
        return start


def _address(array: np.ndarray[Any, Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def encode(obj: Any, slot: SlotWriter | None = None) -> Encoded:
    """Pickle ``obj`` for the trainer.

    Args:
        obj: anything.
        slot: where arrays lie already, or are put if there is room.

    Raises:
        Exception: whatever pickling raises; see `memory.exceptions` for exceptions, which always succeed.

    Example:
        >>> encoded = encode({"x": np.arange(10_000)})
        >>> len(encoded.buffers)
        1
        >>> decode(encoded.head, [bytearray(b) for b in encoded.buffers])["x"].sum()
        np.int64(49995000)
    """
    return dump(ReplyPickler, obj, slot)


def encode_packed(packed: Any, slot: SlotWriter | None = None) -> Encoded:
    """`encode` for what `pack_arrays` returned, and tuples, numbers and strings: nobody need be asked about those."""
    return dump(pickle.Pickler, packed, slot)


def dump(pickler: Any, obj: Any, slot: SlotWriter | None = None) -> Encoded:
    """Pickle ``obj`` with this pickler class, large buffers out of band."""
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
        elif getattr(made, "apart", False):
            nbytes = -nbytes
        places.append((offset, nbytes))
        return False

    made = pickler(stream, protocol=5, buffer_callback=take)
    made.dump(obj)
    return Encoded(stream.getvalue(), tuple(places), tuple(buffers), frozenset(getattr(made, "modules", ())))


def decode(head: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """The object that `encode` pickled, over the memory in ``buffers``."""
    return pickle.loads(head, buffers=buffers)


def pack_arrays(tree: Any) -> Any:
    """An array, or a list of different arrays, as what pickle writes without asking anybody: names, sizes, bytes.

    Returns:
        What `unpack_arrays` takes; None for everything else.

    Example:
        >>> unpack_arrays(pack_arrays([np.arange(3), np.zeros((1, 2))]))
        [array([0, 1, 2]), array([[0., 0.]])]
    """
    if type(tree) is np.ndarray:
        return _pack_array(tree)
    if type(tree) is not list or not tree or len({id(item) for item in tree}) != len(tree):
        return None
    packed = [_pack_array(item) for item in tree]
    return None if None in packed else packed


def _pack_array(array: Any) -> tuple[str, tuple[int, ...], pickle.PickleBuffer] | None:
    # Long doubles (char g, G) stay on the host, because torch has no such dtype: they may have to be set apart.
    plain = type(array) is np.ndarray and array.dtype.kind in "biufc" and array.dtype.char not in "gG"
    plain = plain and array.flags.c_contiguous
    return (array.dtype.str, array.shape, pickle.PickleBuffer(array)) if plain else None


def unpack_arrays(packed: Any) -> Any:
    """The arrays, over the memory that their bytes are in."""
    return [_unpack_array(*item) for item in packed] if type(packed) is list else _unpack_array(*packed)


def _unpack_array(dtype: str, shape: tuple[int, ...], raw: Any) -> np.ndarray[Any, Any]:
    # ndarray, not frombuffer: that refuses memory of size 0.
    return np.ndarray(shape, dtype, raw)


class _End:
    """Ends the objects of a `SetApart`."""

    def __reduce__(self) -> str:
        return "END"


END = _End()


class SetApart(NamedTuple):
    """A reply, and those objects in it that no device copy of the library's takes to pieces.

    The objects are pickled first. So an array that such an object shares with the rest of the batch counts as the
    object's: pickle refers to it where it comes again.

    Attributes:
        objects: what is set apart.
        end: `END`.
        reply: what the objects belong to.
    """

    objects: list[Any]
    end: _End
    reply: Any


def set_apart(tree: Any) -> list[Any]:
    """The parts of a batch that the library does not copy to a device itself, tensor by tensor.

    These are objects of the user's own classes, containers that move themselves, special tensors (sparse, subclasses)
    and arrays that torch has no dtype for. The user may copy from their memory at any time, on any stream.

    Example:
        >>> set_apart({"x": np.zeros(3), "names": ["a"], "when": np.array(["2020"], "M8[Y]")})
        [array(['2020'], dtype='datetime64[Y]')]
    """
    found: list[Any] = []

    def look(leaf: Any) -> Any:
        kind = type(leaf)
        plain = torch_has(leaf.dtype) if kind is np.ndarray else is_plain_tensor(leaf)
        if not (plain or isinstance(leaf, (np.generic, type))):
            found.append(leaf)
        return leaf

    map_leaves(look, tree, own="to", skip=ATOMS)
    return found


class ReplyPickler(pickle.Pickler):
    """Pickles what leaves a worker.

    Attributes:
        apart: whether the objects of a `SetApart` are being pickled.
    """

    apart = False

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) in (SetApart, _End):
            self.apart = type(obj) is SetApart
            return NotImplemented
        if isinstance(obj, type) and obj.__module__ == "__main__":
            return class_reference(obj)  # a notebook's cell that is run again gives its name to another class
        if isinstance(obj, type):
            return NotImplemented if is_findable(obj) else class_reference(obj)
        if isinstance(obj, types.FunctionType):
            if is_findable(obj):
                return NotImplemented
            import cloudpickle  # 3 ms that few workers need

            return cloudpickle.loads, (cloudpickle.dumps(obj),)
        reduced = reduce_array(obj)
        if reduced is NotImplemented:
            reduced = reduce_tensor(obj)
        if reduced is NotImplemented and _requires_grad(obj):
            raise ValueError(
                "a batch holds a tensor that requires grad, which cannot leave its process: "
                "call .detach() on it in the dataset or in batchify_fn"
            )
        return reduced


def reduce_array(obj: Any) -> Any:
    """A reduction of the arrays that NumPy itself pickles in band, dates and gaps; NotImplemented for the others.

    The order of the axes in memory stays, the gaps go.
    """
    if type(obj) is not np.ndarray or obj.nbytes < IN_SLOT_BYTES or obj.dtype.hasobject:
        return NotImplemented
    kind = obj.dtype.kind
    # V: a structure, perhaps with dates among its fields. T: strings of any length, which lie elsewhere.
    if kind == "T" or (obj.flags.forc and kind not in "mMV"):
        return NotImplemented
    order = sorted(range(obj.ndim), key=lambda axis: -abs(obj.strides[axis]))
    packed = np.asarray(obj.transpose(order), order="C")
    back = tuple(order.index(axis) for axis in range(obj.ndim))
    return _rebuild_array, (packed.reshape(-1).view(np.uint8), obj.dtype, packed.shape, back)


def _rebuild_array(raw: np.ndarray[Any, Any], dtype: Any, shape: tuple[int, ...], back: tuple[int, ...]) -> Any:
    return raw.view(dtype).reshape(shape).transpose(back)


def is_plain_tensor(obj: Any) -> bool:
    """Whether ``obj`` is a tensor whose memory is all there is to it: on the CPU, dense, without grad."""
    torch = sys.modules.get("torch")
    # getattr: torch may be in the middle of being imported by another thread.
    tensor_class = getattr(torch, "Tensor", None)
    if tensor_class is None or type(obj) is not tensor_class or obj.requires_grad:
        return False
    strided: bool = obj.layout is torch.strided  # type: ignore[union-attr]
    return strided and obj.device.type == "cpu" and not obj.is_quantized and not obj.is_nested


def _requires_grad(obj: Any) -> bool:
    # Only tensors are asked: a dict that gives its keys as attributes raises KeyError.
    tensor_class = getattr(sys.modules.get("torch"), "Tensor", None)
    return tensor_class is not None and issubclass(type(obj), tensor_class) and obj.requires_grad


def reduce_tensor(obj: Any) -> Any:
    """A reduction of plain CPU tensors that leaves their memory out of band; NotImplemented for all else."""
    if not is_plain_tensor(obj):
        return NotImplemented
    torch: Any = sys.modules["torch"]
    # In the order of its memory: a channels_last tensor stays one, and is not copied.
    order = sorted(range(obj.dim()), key=lambda dim: -obj.stride(dim))
    stored = obj.resolve_conj().resolve_neg().permute(order)
    if not stored.is_contiguous():
        order = list(range(obj.dim()))
        stored = obj.resolve_conj().resolve_neg().contiguous()
    # Not reshape: a tensor of one element is contiguous with any stride, which stays, and which view refuses.
    raw = stored.as_strided((stored.numel(),), (1,)).view(torch.uint8).numpy()
    return _rebuild_tensor, (raw, str(obj.dtype).removeprefix("torch."), tuple(stored.shape), tuple(order))


def _rebuild_tensor(raw: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    import torch

    if not raw.flags.writeable:
        raw = raw.copy()
    stored = torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
    return stored.permute(sorted(range(len(order)), key=order.__getitem__))


def rebuild_view(
    raw: np.ndarray[Any, Any], dtype: str, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
) -> Any:
    """A tensor that was published as a view of its storage's bytes."""
    import torch

    storage = torch.from_numpy(raw).untyped_storage()
    return torch.empty(0, dtype=getattr(torch, dtype), device="cpu").set_(storage, offset, shape, stride)


# -- classes ------------------------------------------------------------------------------------------------


def is_findable(obj: Any) -> bool:
    """Whether the other process finds the same object under the same name."""
    module = sys.modules.get(obj.__module__ or "")
    if module is None or "<locals>" in obj.__qualname__:
        return False
    return _getattr_path(module, obj.__qualname__) is obj


def _getattr_path(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def class_reference(cls: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """A reduction that names ``cls`` so that the trainer finds its own."""
    # Where cloudpickle is not loaded, it has brought no class.
    trackers = getattr(sys.modules.get("cloudpickle.cloudpickle"), "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    return resolve_class, (cls.__module__, cls.__qualname__, trackers.get(cls), id(cls))


def resolve_class(module: str, qualname: str, tracker: str | None, address: int) -> type:
    """The class of this process that `class_reference` named in a worker.

    A class that was sent to the worker by value has a tracker. One that a function's body makes has no name
    to look up: of all classes called so it is the one at the same address (a forked worker's classes lie
    where they lie here), or the only one (a spawned worker imported the module that makes it).
    """
    tracked = getattr(sys.modules.get("cloudpickle.cloudpickle"), "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(tracker)
    if tracked is not None:
        return tracked  # type: ignore[no-any-return]
    older = _of_main.get(address)
    # Not an error's: the loop is to catch it by the name that it has now.
    if older is not None and older.__qualname__ == qualname and not issubclass(older, BaseException):
        return older
    found = _getattr_path(sys.modules.get(module), qualname)
    if not isinstance(found, type):
        found = _nameless.get((module, qualname, address))
    if not isinstance(found, type):
        named: list[type] = [c for c in _all_classes() if c.__qualname__ == qualname and c.__module__ == module]
        found = next((c for c in named if id(c) == address), named[0] if len(named) == 1 else None)
        if found is not None:
            _nameless[module, qualname, address] = found
    if not isinstance(found, type):
        raise AttributeError(
            f"class {module}.{qualname}, used by a worker process, does not exist in this one: "
            f"define it at the top level of a module"
        )
    return found


_nameless: weakref.WeakValueDictionary[tuple[str, str, int], type] = weakref.WeakValueDictionary()
"""Classes that `resolve_class` had to look for: a batch of such a class took 15 ms, and takes 0.15."""


_of_main: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
"""Classes of ``__main__`` by address, as they were when a pool was started."""


def classes_of_main() -> list[type]:
    """The classes that ``__main__`` defines now; as long as they are kept, `resolve_class` finds them.

    Workers go on with these, whatever the user defines under their names afterwards.
    """
    todo: list[Any] = [sys.modules.get("__main__")]
    classes: dict[int, type] = {}
    while todo:
        for value in list(getattr(todo.pop(), "__dict__", {}).values()):
            if isinstance(value, type) and value.__module__ == "__main__" and id(value) not in classes:
                classes[id(value)] = value
                todo.append(value)
    _of_main.update(classes)
    return list(classes.values())


def _all_classes() -> Iterator[type]:
    """Every class of this process (10 ms with torch loaded; walked only for classes that have no name)."""
    seen: set[type] = set()
    todo: list[type] = [object]
    while todo:
        subclasses: list[type] = type.__subclasses__(todo.pop())
        for cls in subclasses:
            if cls not in seen:
                seen.add(cls)
                todo.append(cls)
                yield cls
