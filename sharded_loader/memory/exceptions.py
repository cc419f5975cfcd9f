"""Exceptions on their way from a worker process to the main process.

    encode_error(error) -> EncodedError(payload, texts) -> decode_error -> the same exception, or its stand-in

The payload is a pickle that was tried out in the worker; the texts (summary, traceback, notes) always travel. An
exception is the user's code: its ``__reduce__``, ``__str__`` and ``__getattr__`` may raise anything. Nothing here does.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from typing import Any

from sharded_loader.base.errors import (
    SampleReadError,
    WorkerTraceback,
    format_traceback,
    notes_of,
    set_notes,
    shorten,
    text_of,
)
from sharded_loader.base.private import slot_names
from sharded_loader.memory.codec import ReplyPickler, decode, encode


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
    notes = (*notes_of(error), *([NO_CUDA_HERE] if _needs_cuda(error) else ()))
    shorten(error)
    text = format_traceback(error, whole=False)
    # An exception's own reduction knows nothing of slots.
    for pickler in (_ByParts, ReplyPickler) if _slots(error) else (ReplyPickler, _ByParts):
        try:
            # All in band: it has to be read twice, here and there.
            stream = io.BytesIO()
            pickler(stream, protocol=5).dump(error)
            twin = decode(stream.getvalue())
            if type(twin) is type(error) and _text(twin) == _text(error) and len(twin.args) == len(error.args):
                return EncodedError(stream.getvalue(), _summary(error), text, notes)
        except BaseException:  # a __reduce__ may call sys.exit
            continue
    return EncodedError(None, _summary(error), text, notes)


NO_CUDA_HERE = (
    "sharded_loader: a forked worker cannot use the accelerator that the main process uses. Return CPU tensors from "
    'the dataset, and give the loader device="cuda": it copies batches in the background. If the dataset needs the '
    'accelerator, use ProcessPool(n, start_method="spawn"), or multiprocessing_context="spawn" with the drop-in'
)


def _needs_cuda(error: BaseException) -> bool:
    """Whether an accelerator was used in a process that was forked from one that uses it."""
    text = text_of(error)
    return ("Cannot re-initialize" in text and "forked" in text) or text.startswith("CUDA error: initialization error")


def _text(error: BaseException) -> str:
    """What the exception says, without the addresses that a default repr holds."""
    return re.sub("0x[0-9a-fA-F]+", "0x", text_of(error))


def decode_error(encoded: EncodedError) -> BaseException:
    """The exception that `encode_error` packed, with the worker's traceback as its cause. Never raises."""
    error: BaseException = SampleReadError(encoded.summary)
    if encoded.payload is not None:
        with contextlib.suppress(Exception):
            error = decode(encoded.payload)
    if encoded.notes:
        set_notes(error, list(encoded.notes))
    BaseException.__setattr__(error, "__cause__", WorkerTraceback(encoded.traceback))
    return error


def _summary(error: BaseException) -> str:
    text = text_of(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _slots(error: BaseException) -> dict[str, Any]:
    """What the exception has in slots."""
    found = {}
    for name in slot_names(type(error)):
        with contextlib.suppress(Exception):  # it is not set, or private
            found[name] = getattr(error, name)
    return found


def _attributes(error: BaseException) -> dict[str, Any]:
    """What the exception carries beside its args; not its notes, which travel by themselves."""
    found = _slots(error)
    with contextlib.suppress(Exception):  # a __dict__ of the user's
        found |= vars(error)
    found.pop("__notes__", None)
    return found


class _ByParts(ReplyPickler):
    """Pickles an exception as class, args and attributes; those that it refers to have their own reductions."""

    begun = False

    def reducer_override(self, obj: Any) -> Any:
        if self.begun or not isinstance(obj, BaseException):
            return super().reducer_override(obj)
        self.begun = True
        attributes = {}
        for name, value in _attributes(obj).items():
            with contextlib.suppress(BaseException):  # a __reduce__ again
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
