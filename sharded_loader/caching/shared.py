"""One copy of a dataset for all processes of a machine: `share`.

    make_dataset() -> pickle and buffers -> nameless memory          in the process that comes first
    memory -> ``numpy.memmap`` in mode "c" -> dataset over it         in every process, that one too

The memory holds a digest of the key, a text (who built, how large the parts are), the pickle and the buffers: arrays,
tensors and Arrow's buffers. `meet` finds it in the processes that hold it, or lets this one build. If the
process that builds dies, or its ``make_dataset`` raises, the next one builds. The digest is written last, so nothing is
seen of what was half built. The system frees the memory when the last process that maps it has ended or has dropped the
dataset, killed or not. Spawned workers map ``/proc/<pid>/fd/<number>`` of their main process (`publish.MappedFiles`).

*Writing.* The mapping is private. What a process writes to an array stays there, and in the children that it forks
later. Arrays that were written to go to spawned workers by value.

*Finding it.* A process that holds memory has a link with its label in ``/proc/<pid>/fd``. So a newcomer finds it in any
process that holds it, also if the one that made it has ended. `locks.alone` lets one process at a time look, and make
what it does not find. Nothing has a name in a folder, so nothing is left if processes are killed: the kernel frees
memory and links with their last process. Caches find each other in the same way.

*Pickles.* Only memory of this user, that no other user may write to, is unpickled.

What can go wrong: another ``make_dataset`` with the same key (ValueError), an object that cannot be pickled (TypeError,
names it), too little memory (MemoryError), a class that this process does not have (TypeError). Large Python objects,
such as lists of strings, cannot be mapped: each process has its own (`LoaderWarning`). Where processes do not find each
other, as without /proc (macOS, Windows) and in another container, each one builds its own.
"""

from __future__ import annotations

import contextlib
import functools
import json
import mmap
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
from sharded_loader.base.system import MAP_OPTIONS, PREFIX, open_memory, read_at, write_at
from sharded_loader.batching.protocol import Array
from sharded_loader.caching.locks import alone, close_locked
from sharded_loader.memory.codec import Encoded, aligned, decode, is_findable
from sharded_loader.memory.publish import SHARED, Lasting, children, culprit_in, dump
from sharded_loader.memory.segments import chosen_backend

VERSION = 1
"""Of the layout. Processes with other versions, of Python and NumPy too, do not find each other's memory."""

PATIENCE = 60
"""Seconds after which a process says that it waits for the one that builds."""

MOST_PICKLED = 32 << 20
"""Bytes of Python objects, which cannot be shared, that are worth a warning."""

Memory = np.memmap[Any, Any]

_HEAD = struct.Struct("<16sQ")
_PLAIN = (str, bytes, int, float, complex, bool, type(None), PurePath)

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
    This is so on Linux; elsewhere each process builds its own dataset.

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
    label = f"share-{seal.hex()}"
    if _building.get(label) == threading.get_ident():
        raise RuntimeError(f"make_dataset calls share(key={key!r}), and is called by it: use another key inside")

    def waiting(seconds: int, pid: int) -> None:
        if seconds and seconds % PATIENCE == 0:
            logger.warning("share(key=%r) waits for process %d, which builds, for %d s", key, pid, seconds)

    def join(fd: int) -> Memory | None:
        whole: Memory | None = SHARED.get(label)  # of another thread of this process, which has been here
        if whole is None and read_at(fd, len(seal), 0) == seal:
            whole = SHARED[label] = _mapped(Opened(fd, name_of(fd), is_temporary=False))
        elif whole is not None:
            close_locked(fd)
        return whole

    def make(label: str) -> Memory:
        _building[label] = threading.get_ident()
        try:
            SHARED[label] = whole = _build(label, seal, maker, _pickled(make_dataset(), key))
        finally:
            del _building[label]
        return whole

    whole: Memory | None = SHARED.get(label)
    dataset: Dataset = _rebuilt(meet(label, join, make, waiting) if whole is None else whole, maker, key)
    return dataset


def maker_of(make_dataset: object) -> dict[str, str]:
    """What tells a function from others: where it is defined, and the plain values that it is given.

    Example:
        >>> maker_of(functools.partial(dict, split="train"))
        {'make_dataset': 'dict', "argument 'split'": "'train'"}
    """
    given: list[tuple[str, object]] = []
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


class _ForRanks(Lasting):
    """Ranks run the same program, so what has a name there goes by this name: a class stays one class."""

    def reducer_override(self, obj: object) -> Any:
        if isinstance(obj, Opened) and obj.path is None:
            raise TypeError("a cache in memory: call cache(...) on what share returns, or give it a path")
        if isinstance(obj, (type, types.FunctionType)) and is_findable(obj):
            return NotImplemented
        return super().reducer_override(obj)


def _pickled(dataset: object, key: str) -> Encoded:
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
            f"share(key={key!r}): the dataset has {len(encoded.head):,} bytes of Python objects, of which each process "
            "has its own copy: use arrays, np.array(strings) too"
        )
    return encoded


def _build(label: str, seal: bytes, maker: dict[str, str], encoded: Encoded) -> Memory:
    text = json.dumps({"maker": maker, "sizes": [len(encoded.head), *[part.nbytes for part in encoded.buffers]]})
    parts = [_HEAD.pack(bytes(len(seal)), len(text)) + text.encode(), encoded.head, *encoded.buffers]
    *begins, end = _places(map(len, parts))
    check_fits(end, "share(...) keeps one copy of the dataset", "share less, or keep the data in files that are mapped")
    opened = Opened(*open_nameless(label), is_temporary=True)
    os.ftruncate(opened.fd, end)
    for begin, part in zip(begins, parts, strict=True):
        write_at(opened.fd, part, begin)
    write_at(opened.fd, seal, 0)
    return _mapped(opened)


def _places(sizes: Iterable[int]) -> Iterator[int]:
    """Where parts of these sizes begin, and where the last one ends."""
    return accumulate(map(aligned, sizes), initial=0)


def _mapped(opened: Opened) -> Memory:
    """The memory as an array. The descriptor goes with the last array over the memory."""
    whole = np.memmap(opened.name, np.uint8, "c")
    weakref.finalize(whole, id, opened).atexit = False
    return whole


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


# -- memory that other processes find ----------------------------------------------------------------------------------

HAS_LINKS = os.path.isdir("/proc/self/fd")
"""Whether other processes can open what a process holds."""


def open_named(name: str) -> int:
    """A descriptor of a file, or of another process's memory.

    Raises:
        OSError: there is none of this name.
    """
    return os.open(name, os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))


def name_of(fd: int) -> str:
    """The name by which other processes open this descriptor while this process has it open. Linux."""
    return f"/proc/{os.getpid()}/fd/{fd}"


def open_nameless(label: str) -> tuple[int, str]:
    """New memory, and the name by which other processes open it while this process has it open.

    Where the system has no such names, the memory is a temporary file (see `Opened`). Only this user can open it.
    """
    if HAS_LINKS:
        backend = chosen_backend()
        fd, _ = open_memory(f"{PREFIX}-{label}", None if backend == "named" else backend)
        os.fchmod(fd, 0o600)
        return fd, name_of(fd)
    return tempfile.mkstemp(prefix=f"{PREFIX}-{label}-")


def is_private(found: os.stat_result) -> bool:
    """Whether a file belongs to this user, and no other user may write to it."""
    return sys.platform == "win32" or (found.st_uid == os.getuid() and not found.st_mode & 0o022)


class Opened:
    """A descriptor that is closed with this object, and its mapping. A temporary file is deleted with it.

    Args:
        fd: taken over.
        name: see `open_nameless`.
        is_temporary: the name is that of a temporary file of this process.

    Attributes:
        path: of a cache: its file, or None if it is in memory, which ends with its processes.
    """

    path: str | None = ""

    def __init__(self, fd: int, name: str, is_temporary: bool) -> None:
        self.fd, self.name = fd, name
        weakref.finalize(self, close_locked, fd).atexit = False  # at the end of the program the system closes it
        if is_temporary and not name.startswith("/proc/"):
            weakref.finalize(self, _remove, name, os.getpid())

    def map(self, nbytes: int) -> Array:
        """The first bytes, over the shared memory."""
        return np.frombuffer(mmap.mmap(self.fd, nbytes, **MAP_OPTIONS), np.uint8)


def _remove(name: str, pid: int) -> None:
    if pid == os.getpid():  # not in a forked child
        with contextlib.suppress(OSError):
            os.unlink(name)


Found = TypeVar("Found")


def links_of(label: str) -> Iterator[str]:
    """By which names this process can open what processes of this user hold under a label."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                for number in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        if label in os.readlink(name := f"/proc/{pid}/fd/{number}"):
                            yield name


def meet(
    label: str,
    join: Callable[[int], Found | None],
    make: Callable[[str], Found],
    waiting: Callable[[int, int], object] = lambda seconds, pid: None,
) -> Found:
    """What another process of this user holds under a label, or else what this one makes.

    Args:
        label: a word.
        join: gets a descriptor of memory that only this user can write to, and takes it over; None: it is not what was
            looked for.
        make: makes memory of this label. It is called by one process at a time.
        waiting: see `locks.alone`.

    Raises:
        What ``make`` raises. The next process then calls its own.

    Example:
        >>> def make(label):
        ...     return Opened(*open_nameless(label), is_temporary=True)
        >>> one = meet("doctest", lambda fd: None, make)
        >>> other = meet("doctest", lambda fd: Opened(fd, name_of(fd), is_temporary=False), make)
        >>> os.path.sameopenfile(one.fd, other.fd)
        True
    """
    if not HAS_LINKS:
        return make(label)
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # in a sandbox without sockets, two processes may make it
            stack.enter_context(alone(f"{PREFIX}-{label}-{os.getuid()}", waiting))
        for name in links_of(label):
            try:
                fd, found = open_named(name), None
            except OSError:  # its process has ended
                continue
            try:
                if is_private(os.fstat(fd)) and (found := join(fd)) is not None:
                    return found
            finally:
                if found is None:
                    close_locked(fd)
        return make(label)
