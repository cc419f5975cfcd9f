"""What a sample draws its random numbers from: its key, when many are read at once, and what its transform holds.

    KeyedIndices                        indices into an inner dataset, and the key of each sample
    each_by_its_key(fn, items, indices) each sample of a bulk read draws its own numbers
    with transform_seed(fn, level):     everything that ``fn`` draws from is seeded by (seed, epoch, index, level)
        fn(sample)
    owners(fn) -> [Seedable, ...]       the objects inside ``fn`` that can be seeded
    reachable(root, children)           an object and those that it refers to, nearest first
    generators(root, name)              the random generators among them
    set_epoch_of(dataset)               what tells a dataset, and those inside it, the epoch

Some libraries give each transform object a generator of its own (albumentations, MONAI). Each worker process has a copy
of that generator, so several workers draw the same numbers. Such objects have a method that seeds them:
``set_random_seed(seed)`` or ``set_random_state(seed=, state=)``. `owners` finds them wherever ``fn`` refers to them: in
attributes, lists and dicts, in the closure, the defaults and the global names of a function. The code of installed
packages is not searched, only what objects hold.

Each object gets its own key, made of the path to it. So two flips in one pipeline draw different numbers, also where a
pipeline would hand one seed to all its members (albumentations does). A pipeline comes before its members.

Threads share the objects. All of this happens inside `seeded_globals`, which lets one thread at a time in.

What can go wrong: an object that ``fn`` makes while it runs, or that lies behind more than `MOST` others, is not found.
"""

from __future__ import annotations

import dis
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from types import CodeType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sharded_loader.base.errors import add_note
from sharded_loader.batching.tree import Children, attributes, parts, reachable
from sharded_loader.randomness import rng
from sharded_loader.randomness.rng import seeded_globals

TOLD = 1000
"""Of a search for datasets with ``set_epoch``: objects, and the entries of a list or dict. It takes 1 ms at most."""

Keys = Sequence[rng.SampleScope] | None
"""The scope of each sample, which keys its random numbers; None outside a loader."""

T = TypeVar("T")


# -- the keys of samples -----------------------------------------------------------------------------------------------


class KeyedIndices(list[int]):
    """Indices into an inner dataset, with the key of each sample."""

    def __init__(self, indices: Iterable[int], keys: Sequence[rng.SampleScope]) -> None:
        super().__init__(indices)
        self.keys = keys
        self.made = tuple(self)


def keys_of(indices: Sequence[object]) -> Keys:
    """Return the keys of these samples."""
    if isinstance(indices, KeyedIndices) and tuple(indices) == indices.made:  # it was not sorted or cut
        return indices.keys
    scope = rng.reading.get()
    if scope is None or scope.is_cached:
        return None
    return [rng.SampleScope(scope.seed, scope.epoch, index, owners=scope.owners) for index in indices]


def translated(inner: Iterable[int], outer: Sequence[object], positions: Sequence[int] | None = None) -> list[int]:
    """The inner indices of the samples that the caller knows by the outer ones.

    ``positions`` says which of the samples ``inner`` are, if not all.

    Example:
        >>> translated([70, 80], [7, 8]), translated([50, 70], [5, 6, 7], [0, 2])
        ([70, 80], [50, 70])
    """
    keys = keys_of(outer)
    if keys is None:
        return list(inner)
    if positions is not None:
        keys = [keys[position] for position in positions]
    copies = [key.index for key in keys]
    if any(isinstance(copy, rng.RepeatedIndex) for copy in copies):  # each copy stays one
        pairs = zip(inner, copies, strict=True)
        inner = [type(copy)(index) if isinstance(copy, rng.RepeatedIndex) else index for index, copy in pairs]
    return KeyedIndices(inner, keys)


def handed_out(indices: Any) -> list[Any]:
    """The same indices as a new list, for code of the user's, which may sort it or empty it."""
    if isinstance(indices, np.ndarray):
        return indices.tolist()  # type: ignore[no-any-return]
    return KeyedIndices(indices, indices.keys) if isinstance(indices, KeyedIndices) else list(indices)


def each_by_its_key(fn: Callable[[Any], T], items: Iterable[object], indices: Sequence[object]) -> list[T]:
    """``fn(item)`` of each item. Each draws the numbers of the sample at its index."""
    before, keys, made = rng.reading.get(), keys_of(indices), []
    try:
        for position, item in enumerate(items):
            if keys is not None:
                rng.reading.set(keys[position])
            made.append(fn(item))
    finally:
        rng.reading.set(before)
    return made


# -- what an object refers to ------------------------------------------------------------------------------------------


def generators(root: object, name: str) -> Children:
    """The random generators that an object refers to, each with its path.

    Example:
        >>> [path for path, _ in generators([np.random.default_rng(1)], "data")]
        ['data[0]']
    """
    torchs = getattr(sys.modules.get("torch"), "Generator", random.Random)
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torchs)
    for path, obj in reachable(root, _children, name):
        yield from ((path + end, child) for end, child in _children(obj) if isinstance(child, kinds))


# -- what a transform holds --------------------------------------------------------------------------------------------


class Seedable(NamedTuple):
    """An object that owns a generator.

    Attributes:
        path: how ``fn`` refers to it.
        seed: seeds it with a key.
    """

    path: str
    seed: Callable[[int], Any]


@contextmanager
def transform_seed(fn: Callable[..., object], level: int) -> Iterator[None]:
    """Seed all that ``fn`` draws from by the sample being read. Outside a loader nothing is seeded.

    Args:
        fn: the function of a transform.
        level: how many seeded transforms the sample has passed before, so that no two draw the same numbers.

    Raises:
        ValueError: several samples are read at once.
        Exception: what the ``set_random_seed`` of an object raises.
    """
    scope = rng.reading.get()
    if scope is None:
        yield
        return
    parts = (*rng.key_parts(scope, "transform globals"), level)
    with seeded_globals(rng.derive_key(*parts)):
        found: list[Seedable] | None = scope.owners.get(id(fn))
        if found is None:
            found = scope.owners[id(fn)] = owners(fn)
        for owner in found:
            key = rng.derive_key(*rng.key_parts(scope, "transform object"), level, owner.path)
            try:
                owner.seed(key)
            except Exception as error:
                add_note(error, f"raised while transform(fn, seeded=True) seeded {owner.path}")
                raise
        yield


def owners(fn: object) -> list[Seedable]:
    """The objects inside ``fn`` that can be seeded, nearest first.

    Example:
        >>> class Flip:
        ...     def set_random_seed(self, seed): self.rng = np.random.default_rng(seed)
        >>> flip = Flip()
        >>> [owner.path for owner in owners([flip, Flip()])]
        ['fn[0]', 'fn[1]']
    """
    found = ((path, _seeder(obj)) for path, obj in reachable(fn, _children, "fn"))
    return [Seedable(path, seed) for path, seed in found if seed is not None]


def next_level(dataset: Any, kind: Any) -> int:
    """A number above the levels of all seeded transforms that a sample of ``dataset`` may have passed.

    Args:
        dataset: any. What it holds in attributes, lists and dicts is searched.
        kind: the class of transforms; those with a ``_level`` are seeded.

    Example:
        >>> next_level([1, 2, 3], dict)
        0
    """
    levels = (obj._level for _, obj in reachable(dataset, parts) if isinstance(obj, kind))
    return 1 + max((level for level in levels if level is not None), default=-1)


def _seeder(obj: object) -> Callable[[int], object] | None:
    """What seeds an object, if it has a method for that."""
    kind = type(obj)
    for name in ("set_random_seed", "set_random_state"):
        if not issubclass(kind, type) and callable(getattr(kind, name, None)):
            method = getattr(obj, name)
            with suppress(ValueError):  # a method that is not written in Python tells nothing
                if "state" in inspect.signature(method).parameters:
                    return lambda key: method(state=_random_state(key))
            return functools.partial(_by_seed, method)
    return None


def _by_seed(method: Callable[[int], object], key: int) -> None:
    """63 bits of the key, which NumPy's new generators, ``random`` and torch take; 32 where they are too many."""
    try:
        method(key & 0x7FFFFFFFFFFFFFFF)
    except (OverflowError, ValueError):
        method(key & 0xFFFFFFFF)


def _random_state(key: int) -> np.random.RandomState:
    words = np.array((key & 0xFFFFFFFFFFFFFFFF, key >> 64), dtype=np.uint64)
    # A Philox takes all bits of the key, and a twentieth of the time of a Mersenne Twister.
    return np.random.RandomState(np.random.Philox(key=words))


def _children(obj: object) -> Children:
    """What an object refers to, its code included."""
    yield from _code(obj)
    yield from parts(obj)
    kind = type(obj)
    if not issubclass(kind, type) and not all(_is_installed(base.__module__) for base in kind.__mro__):
        yield ".class", kind


def _code(obj: Any) -> Children:
    """What a function, a method, a property or a class refers to."""
    kind = type(obj)
    if kind is FunctionType:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            with suppress(ValueError):  # not assigned yet
                yield f".closure[{name!r}]", cell.cell_contents
        yield from ((".defaults", obj.__defaults__), (".defaults", obj.__kwdefaults__))
        if not _is_installed(obj.__module__):
            known = obj.__globals__
            yield from ((f".globals[{name!r}]", known[name]) for name in _names(obj.__code__) if name in known)
    elif kind is MethodType:
        yield from ((".self", obj.__self__), (".function", obj.__func__))
    elif kind in (staticmethod, classmethod):
        yield ".function", obj.__func__
    elif kind is property:
        yield ".getter", obj.fget
    elif issubclass(kind, type):
        for base in obj.__mro__:
            if not _is_installed(base.__module__):
                names = sorted(base.__dict__.keys() - {"__dict__", "__weakref__"})
                yield from ((f".{name}", base.__dict__[name]) for name in names)


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function looks up, those of functions inside it too."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_names(constant))
    return tuple(sorted(names))


@functools.lru_cache(maxsize=256)
def _is_installed(module: object) -> bool:
    """Whether code is a library's: its own global objects are not the user's."""
    top = str(module).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    known = top == "sharded_loader" or top in sys.stdlib_module_names
    return known or "site-packages" in file or "dist-packages" in file


# -- who is told the epoch ---------------------------------------------------------------------------------------------


def set_epoch_of(dataset: object) -> Any:
    """Return what tells a dataset, or those inside, the epoch, not heard by listeners; None without a ``set_epoch``."""
    methods = [getattr(one.set_epoch, "unnoted", one.set_epoch) for one in told_in(dataset, nearest=True)]
    return (lambda epoch: [method(epoch) for method in methods]) if methods else None


def told_in(dataset: object, nearest: bool = False) -> Iterator[Any]:
    """Those with ``set_epoch`` among a dataset and the objects that it holds in attributes, or in lists there.

    With ``nearest``, one that lies inside another is left out: the outer one passes the epoch on.
    """

    def children(obj: object) -> Children:
        return iter(()) if nearest and is_told(obj) else _datasets_in(obj)

    def is_told(obj: object) -> bool:  # of an object inside, no code that looks up attributes is run
        return (obj is dataset or hasattr(type(obj), "set_epoch")) and callable(getattr(obj, "set_epoch", None))

    return (one for _, one in reachable(dataset, children, most=TOLD, deepest=8) if is_told(one))


def _datasets_in(obj: object) -> Children:
    """What an object holds that has ``set_epoch``, or is read as a dataset is and may hold one."""
    for end, value in attributes(obj):
        held = value.values() if isinstance(value, dict) else value
        for one in tuple(islice(held, TOLD)) if isinstance(value, (list, tuple, dict)) else (value,):
            kind = type(one)
            is_read = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
            if hasattr(kind, "set_epoch") or (is_read and hasattr(one, "__dict__") and not hasattr(kind, "__array__")):
                yield end, one
