"""From any Python object to a few buffers and back: how batches and errors leave a worker process.

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
import pickle
import re
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np

from sharded_loader.errors import SampleReadError, WorkerTraceback, format_traceback, notes_of, set_notes

# Below this an array is cheaper inside the pickle than as a message of its own: a message costs two system
# calls on each side (4-6 us), copying 8 KB twice costs 1 us.
IN_BAND_BYTES = 8192


@dataclass(frozen=True)
class Encoded:
    """A pickled object: the pickle stream, and the memory that it refers to."""

    head: bytes
    buffers: tuple[memoryview, ...]


def encode(obj: Any) -> Encoded:
    """Pickle ``obj`` for the trainer.

    Raises:
        Exception: whatever pickling raises; see `encode_error` for exceptions, which always succeed.

    Example:
        >>> encoded = encode({"x": np.arange(10_000)})
        >>> len(encoded.buffers)
        1
        >>> decode(encoded.head, [bytearray(b) for b in encoded.buffers])["x"].sum()
        np.int64(49995000)
    """
    return dump(_ReplyPickler, obj)


def dump(pickler: Any, obj: Any) -> Encoded:
    """Pickle ``obj`` with this pickler class, large buffers out of band."""
    stream = io.BytesIO()
    buffers: list[memoryview] = []

    def take(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes < IN_BAND_BYTES:
            return True
        buffers.append(raw)
        return False

    pickler(stream, protocol=5, buffer_callback=take).dump(obj)
    return Encoded(stream.getvalue(), tuple(buffers))


def decode(head: bytes | memoryview, buffers: Sequence[Any] = ()) -> Any:
    """The object that `encode` pickled, over the memory in ``buffers``."""
    return pickle.loads(head, buffers=buffers)


class _ReplyPickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type):
            return NotImplemented if _is_findable(obj) else class_reference(obj)
        if isinstance(obj, types.FunctionType):
            if _is_findable(obj):
                return NotImplemented
            return cloudpickle.loads, (cloudpickle.dumps(obj),)
        reduced = reduce_tensor(obj)
        if reduced is NotImplemented and getattr(obj, "requires_grad", False) is True:
            raise ValueError(
                "a batch holds a tensor that requires grad, which cannot leave its process: "
                "call .detach() on it in the dataset or in batchify_fn"
            )
        return reduced


def reduce_tensor(obj: Any) -> Any:
    """A reduction of plain CPU tensors that leaves their memory out of band; NotImplemented for all else."""
    torch = sys.modules.get("torch")
    # getattr: torch may be in the middle of being imported by another thread.
    tensor_class = getattr(torch, "Tensor", None)
    if tensor_class is None or type(obj) is not tensor_class:
        return NotImplemented
    if obj.requires_grad:
        return NotImplemented
    if obj.layout is not torch.strided or obj.device.type != "cpu" or obj.is_quantized or obj.is_nested:  # type: ignore[union-attr]
        return NotImplemented
    # In the order of its memory: a channels_last tensor stays one, and is not copied.
    order = sorted(range(obj.dim()), key=lambda dim: -obj.stride(dim))
    stored = obj.resolve_conj().resolve_neg().permute(order)
    if not stored.is_contiguous():
        order = list(range(obj.dim()))
        stored = obj.resolve_conj().resolve_neg().contiguous()
    raw = stored.reshape(-1).view(torch.uint8).numpy()  # type: ignore[union-attr]
    return _rebuild_tensor, (raw, str(obj.dtype).removeprefix("torch."), tuple(stored.shape), tuple(order))


def _rebuild_tensor(raw: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...], order: tuple[int, ...]) -> Any:
    import torch

    if not raw.flags.writeable:
        raw = raw.copy()
    stored = torch.from_numpy(raw).view(getattr(torch, dtype)).view(shape)
    return stored.permute(sorted(range(len(order)), key=order.__getitem__))


# -- classes ------------------------------------------------------------------------------------------------


def _is_findable(obj: Any) -> bool:
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
    trackers = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", {})
    return resolve_class, (cls.__module__, cls.__qualname__, trackers.get(cls), id(cls))


def resolve_class(module: str, qualname: str, tracker: str | None, address: int) -> type:
    """The class of this process that `class_reference` named in a worker.

    A class that was sent to the worker by value has a tracker. One that a function's body makes has no name
    to look up: of all classes called so it is the one at the same address (a forked worker's classes lie
    where they lie here), or the only one (a spawned worker imported the module that makes it).
    """
    tracked = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_ID", {}).get(tracker)
    if tracked is not None:
        return tracked  # type: ignore[no-any-return]
    found = _getattr_path(sys.modules.get(module), qualname)
    if not isinstance(found, type):
        named: list[type] = [c for c in _all_classes() if c.__qualname__ == qualname and c.__module__ == module]
        found = next((c for c in named if id(c) == address), named[0] if len(named) == 1 else None)
    if not isinstance(found, type):
        raise AttributeError(
            f"class {module}.{qualname}, used by a worker process, does not exist in this one: "
            f"define it at the top level of a module"
        )
    return found


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


# -- exceptions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EncodedError:
    """An exception on its way to the trainer: the object where it pickles, and always its text."""

    payload: bytes | None
    summary: str
    traceback: str
    notes: tuple[str, ...]


def encode_error(error: BaseException) -> EncodedError:
    """Make ``error`` ready to travel. Never raises.

    The exception's own reduction is tried first, then one that does not call ``__init__`` (a constructor
    with several arguments cannot be called with ``args``); each is tried out here, because a failure in the
    trainer would come too late.
    """
    notes = tuple(notes_of(error))
    text = format_traceback(error)
    for packed in (error, _WithoutInit(error)):
        try:
            # All in band: it has to be read twice, here and there.
            stream = io.BytesIO()
            _ReplyPickler(stream, protocol=5).dump(packed)
            twin = decode(stream.getvalue())
            if isinstance(twin, _WithoutInit):
                twin = twin.error
            if type(twin) is type(error) and _text(twin) == _text(error) and len(twin.args) == len(error.args):
                return EncodedError(stream.getvalue(), _summary(error), text, notes)
        except Exception:
            continue
    return EncodedError(None, _summary(error), text, notes)


def _text(error: BaseException) -> str:
    """What the exception says, without the addresses that a default repr holds."""
    try:
        return re.sub("0x[0-9a-fA-F]+", "0x", str(error))
    except Exception:
        return ""


def decode_error(encoded: EncodedError) -> BaseException:
    """The exception that `encode_error` packed, with the worker's traceback as its cause. Never raises."""
    error: BaseException | None = None
    if encoded.payload is not None:
        try:
            found = decode(encoded.payload)
            error = found.error if isinstance(found, _WithoutInit) else found
        except Exception:
            error = None
    if error is None:
        error = SampleReadError(encoded.summary)
    set_notes(error, list(encoded.notes))
    BaseException.__setattr__(error, "__cause__", WorkerTraceback(encoded.traceback))
    return error


def _summary(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class _WithoutInit:
    """Carries an exception as class, args and attributes."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        attributes = {}
        for name, value in vars(self.error).items():
            try:
                encode(value)
            except Exception:
                continue
            attributes[name] = value
        return _rebuild_without_init, (type(self.error), self.error.args, attributes)


def _rebuild_without_init(cls: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> _WithoutInit:
    try:
        error = cls.__new__(cls, *args)
    except TypeError:  # a __new__ of its own, with parameters of its own
        base = next(base for base in cls.__mro__ if base.__module__ == "builtins")
        error = base.__new__(cls, *args)
    BaseException.__setattr__(error, "args", args)
    for name, value in attributes.items():
        BaseException.__setattr__(error, name, value)
    return _WithoutInit(error)
