"""One copy of a dataset for all processes of a machine: `share`.

    make_dataset() -> pickle and buffers -> nameless memory          in the process that comes first
    memory -> ``numpy.memmap`` in mode "c" -> dataset over it         in every process, that one too

The memory holds a digest of the key, a text (who built, how large the parts are), the pickle and the buffers: arrays,
tensors and Arrow's buffers. Each process that uses it keeps a descriptor with a shared ``flock``. The memory belongs to
these processes together: the system frees it when the last of them has ended or has dropped the dataset, killed or not.

*Finding it.* The descriptor has a link with the label of the key in ``/proc/<pid>/fd``. A process looks there, in its
user's processes only. Memory that no process has locked does not count: it belongs to a forked child of a process that
has died. Forked children close the descriptor, and keep the mapping. Spawned workers map ``/proc/<pid>/fd/<number>`` of
their main process (`publish.MappedFiles`).

*Building.* `system.alone` lets one process at a time look, and build what it does not find. If this process dies, or
its ``make_dataset`` raises, the next one builds. Nothing is seen of what was half built: it was not locked.

*Writing.* The mapping is private. What a process writes to an array stays there, and in the children that it forks
later. Arrays that were written to go to spawned workers by value.

*Without /proc* (macOS, Windows) the memory is a file in the folder for temporary files. The last process that uses the
file deletes it. If all are killed, the next `share` with this key replaces the file. On Windows it always stays that
long.

*Pickles.* Only memory of this user, that no other user may write to, is unpickled.

What can go wrong: another ``make_dataset`` with the same key (ValueError), an object that cannot be pickled (TypeError,
names it), too little memory (MemoryError), a class that this process does not have (TypeError). Large Python objects,
such as lists of strings, cannot be mapped: each process has its own (`LoaderWarning`). A process of another container
finds nothing, and builds its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import struct
import sys
import tempfile
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np

from sharded_loader.base.interrupts import is_from_outside
from sharded_loader.base.limits import check_fits
from sharded_loader.base.notices import logger, warn
from sharded_loader.base.private import blake2b
from sharded_loader.base.system import PREFIX, alone, read_at, write_at
from sharded_loader.caching.rendezvous import HAS_LINKS, joined, links_of, name_of, open_nameless
from sharded_loader.caching.store import Store
from sharded_loader.memory.codec import Encoded, aligned, decode, is_findable
from sharded_loader.memory.publish import SHARED, Lasting, children, culprit_in, dump

VERSION = 1
"""Of the layout. Processes with other versions, of Python and NumPy too, do not find each other's memory."""

PATIENCE = 60
"""Seconds after which a process says that it waits for the one that builds."""

MOST_PICKLED = 32 << 20
"""Bytes of Python objects, which cannot be shared, that are worth a warning."""

MOST_PARTS = 100
"""Parts of an object of which it is asked how large they are, to name the largest in that warning."""

Memory = np.memmap[Any, Any]

_HEAD = struct.Struct("<16sQ")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), PurePath)

_held: set[int] = set()
"""The locked descriptors of this process."""

_kept: list[Memory] = []
"""Memory without arrays, of objects that do not tell when they go: it stays as long as this process."""

_building: dict[str, int] = {}
"""By label the thread that builds."""

Dataset = TypeVar("Dataset")


def share(make_dataset: Callable[[], Dataset], key: str) -> Dataset:
    """Build a dataset once for all processes of this machine, and map its arrays in each of them.

    Call it in every rank, before you make the loader. The first process builds, the others wait and map its memory:
    arrays, tensors and Arrow's buffers, wherever they are in the dataset. Forked and spawned workers map it too. If the
    process that builds dies, another one builds. When the last process has ended, killed or not, nothing stays behind.

    Args:
        make_dataset: Builds the dataset, or any other object that can be pickled. It must return the same in each rank.
        key: A name for the data, such as "train". Processes of one user that give the same key share one dataset, also
            those of another program. Put into it all that the data depend on.

    Returns:
        The dataset. What you write into its arrays stays in this process, and in workers that start later.

    Raises:
        ValueError: The key belongs to another ``make_dataset``.
        TypeError: The dataset cannot be pickled, or needs a class that this process does not have.
        MemoryError: The dataset does not fit into memory.
        PermissionError: Another user keeps this user from building it.
        Exception: What ``make_dataset`` raises. The next process then calls its own.

    Example:
        >>> from sharded_loader import ArrayDataset
        >>> dataset = share(lambda: ArrayDataset(x=np.arange(5_000)), key="numbers")
        >>> dataset[-1]
        {'x': np.int64(4999)}

    Source of the idea: the ``TorchSerializedList`` of detectron2, which one rank of a machine fills for all; pickle
    protocol 5 and nameless memory make it one for any dataset.
    """
    if not callable(make_dataset):
        raise TypeError(f"share needs a function that makes the dataset, not {make_dataset!r}: share(lambda: ..., key)")
    if not isinstance(key, str) or not key:
        raise TypeError(f"share(key={key!r}): give a text that names the data, such as 'train'")
    maker = maker_of(make_dataset)
    seal = blake2b(repr((VERSION, sys.version_info[:2], np.__version__, key)).encode(), digest_size=16).digest()
    label = f"share-{os.getuid() if hasattr(os, 'getuid') else 0}-{seal.hex()}"
    if _building.get(label) == threading.get_ident():
        raise RuntimeError(f"make_dataset calls share(key={key!r}), and is called by it: use another key inside")

    def waiting(seconds: int, pid: int) -> None:
        if seconds and seconds % PATIENCE == 0:
            logger.warning("share(key=%r) waits for process %d, which builds, for %d s", key, pid, seconds)

    whole = SHARED.get(label)
    if whole is None:
        with alone(f"{PREFIX}-{label}", waiting):
            whole = SHARED.get(label)  # another thread may have been here
            if whole is None:
                _building[label] = threading.get_ident()
                try:
                    whole = _find(label, seal)
                    if whole is None:
                        whole = _build(label, seal, maker, _pickled(make_dataset(), key))
                    SHARED[label] = whole
                finally:
                    del _building[label]
    dataset: Dataset = _rebuilt(whole, maker, key)
    return dataset


def maker_of(make_dataset: Any) -> dict[str, str]:
    """What tells a function from others: where it is defined, and the plain values that it is given.

    Example:
        >>> maker_of(functools.partial(dict, split="train"))
        {'make_dataset': 'dict', "argument 'split'": "'train'"}
    """
    given: list[tuple[str, Any]] = []
    if isinstance(make_dataset, functools.partial):
        arguments = [*enumerate(make_dataset.args), *make_dataset.keywords.items()]
        given = [(f"argument {name!r}", value) for name, value in arguments]
        make_dataset = make_dataset.func
    if not isinstance(make_dataset, type):
        given += children(make_dataset, "make_dataset")
    name = getattr(make_dataset, "__qualname__", type(make_dataset).__qualname__)
    code = getattr(make_dataset, "__code__", None)
    if code is not None:
        name += f" ({os.path.basename(code.co_filename)}, line {code.co_firstlineno})"
        used = code.co_code, code.co_names, [one for one in code.co_consts if isinstance(one, _PLAIN)]
        given.append(("the digest of its code", blake2b(repr(used).encode(), digest_size=4).hexdigest()))
    return {"make_dataset": name} | {where: repr(value) for where, value in given if isinstance(value, _PLAIN)}


# -- building ----------------------------------------------------------------------------------------------------------


class _ForRanks(Lasting):
    """Ranks run the same program, so what has a name there goes by this name: a class stays one class."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Store) and obj.path is None:
            raise TypeError("a cache in memory: call cache(...) on what share returns, or give it a path")
        if isinstance(obj, (type, types.FunctionType)) and is_findable(obj):
            return NotImplemented
        return super().reducer_override(obj)


def _pickled(dataset: Any, key: str) -> Encoded:
    try:
        encoded = dump(dataset, _ForRanks)
    except Exception as error:
        if is_from_outside(error):
            raise
        culprit = culprit_in({"dataset": dataset}, _ForRanks)
        raise TypeError(
            f"share(key={key!r}): {culprit} cannot be pickled ({error}), so other processes cannot have it: open it "
            "lazily (in __getitem__, or in __setstate__)"
        ) from error
    if len(encoded.head) > MOST_PICKLED:
        warn(
            f"share(key={key!r}): {_largest(dataset)} holds most of {len(encoded.head):,} bytes of Python objects, of "
            "which each process has its own copy: use arrays, or PackedList for strings"
        )
    return encoded


def _largest(obj: Any, path: str = "dataset") -> str:
    """The innermost attribute that holds most of what is pickled in band."""
    parts = children(obj, path)
    if not 0 < len(parts) <= MOST_PARTS:
        return path
    sizes = [len(dump(child, _ForRanks).head) for _, child in parts]
    where, child = parts[sizes.index(max(sizes))]
    return _largest(child, where) if 2 * max(sizes) > MOST_PICKLED else path


def _build(label: str, seal: bytes, maker: dict[str, str], encoded: Encoded) -> Memory:
    text = json.dumps({"maker": maker, "sizes": [len(encoded.head), *[part.nbytes for part in encoded.buffers]]})
    parts = [_HEAD.pack(seal, len(text)) + text.encode(), encoded.head, *encoded.buffers]
    *begins, end = _places(map(len, parts))
    check_fits(end, "share(...) keeps one copy of the dataset", "share less, or keep the data in files that are mapped")
    fd, name = open_nameless(label)
    try:
        os.ftruncate(fd, end)
        for begin, part in zip(begins, parts, strict=True):
            write_at(fd, part, begin)
        if not HAS_LINKS:
            os.replace(name, name := _file_of(label))
        _join(fd)
        return _open(fd, name)
    except BaseException:
        os.close(fd)
        raise


def _places(sizes: Iterable[int]) -> Iterator[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    return accumulate(map(aligned, sizes), initial=0)


# -- finding -----------------------------------------------------------------------------------------------------------


def _find(label: str, seal: bytes) -> Memory | None:
    def join(fd: int) -> Memory | None:
        return _open(fd, _file_of(label)) if _join(fd) and read_at(fd, len(seal), 0) == seal else None

    return joined(_names(label), join)


def _names(label: str) -> Iterator[str]:
    """By which names this process can open what processes of this user hold under a label."""
    if not HAS_LINKS:
        with contextlib.suppress(OSError):
            if sys.platform == "win32":
                os.unlink(_file_of(label))  # this succeeds if no process has it open
        yield _file_of(label)
        return
    yield from links_of(label)


def _file_of(label: str) -> str:
    return os.path.join(tempfile.gettempdir(), f"{PREFIX}-{label}")


def _join(fd: int) -> bool:
    """Lock memory, together with the other processes that have locked it.

    Returns:
        Whether there are others. On Windows a file that has no others could be deleted, and is not there.
    """
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        has_others = False
    except OSError:
        has_others = True
    fcntl.flock(fd, fcntl.LOCK_SH)
    return has_others


def _open(fd: int, name: str) -> Memory:
    """Map memory that is locked. The descriptor goes with the last array over the memory."""
    name = name_of(fd) if HAS_LINKS else name
    whole = np.memmap(name, np.uint8, "c")
    _held.add(fd)
    weakref.finalize(whole, _let_go, fd, name)
    return whole


def _let_go(fd: int, name: str) -> None:
    if fd in _held:  # otherwise this is a forked child
        _held.discard(fd)
        is_last = not HAS_LINKS and not _join(fd)
        os.close(fd)
        with contextlib.suppress(OSError):
            if is_last:
                os.unlink(name)


def _leave_to_the_parent() -> None:
    """In a forked child: it maps the memory, and is none of the processes that keep it."""
    for fd in _held:
        os.close(fd)
    _held.clear()
    _building.clear()
    for label in list(SHARED):
        if (whole := SHARED.pop(label, None)) is not None:
            SHARED[f"{label}, inherited"] = whole


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_the_parent)


def _rebuilt(whole: Memory, maker: dict[str, str], key: str) -> Any:
    """A new object over the memory."""
    _, size = _HEAD.unpack_from(whole.data)
    about = json.loads(whole[_HEAD.size : _HEAD.size + size].tobytes())
    for name in {**about["maker"], **maker}:
        theirs, ours = about["maker"].get(name), maker.get(name)
        if theirs != ours:
            raise ValueError(
                f"share(key={key!r}): the dataset of this key was built by another function: {name} was {theirs}, "
                f"and here it is {ours}. Give each dataset a key of its own, and the same make_dataset on all ranks"
            )
    sizes = [_HEAD.size + size, *about["sizes"]]
    _, head, *buffers = [whole[begin : begin + nbytes] for begin, nbytes in zip(_places(sizes), sizes, strict=False)]
    try:
        dataset = decode(head.data, buffers)
    except (AttributeError, ImportError) as error:
        raise TypeError(
            f"share(key={key!r}): this process cannot rebuild the dataset that another one has built ({error}): run "
            "the same program on all ranks, and define its classes and functions at the top level of a module"
        ) from error
    try:
        weakref.finalize(dataset, id, whole)  # until the dataset has gone, later processes find it
    except TypeError:  # a list or a dict
        if not buffers:
            _kept.append(whole)
    return dataset
