"""Random numbers of samples and transforms, and the propagation of the epoch.

    KeyedIndices                        indices into an inner dataset, with the random key of each sample
    map_with_keys(fn, items, indices)   each sample of a bulk read draws its own numbers
    with transform_seed(fn, level):     everything that ``fn`` draws from is seeded by (seed, epoch, index, level)
        fn(sample)
    owners(fn) -> [Seedable, ...]       the objects inside ``fn`` that can be seeded
    epoch_setter(dataset)               sets the epoch of a dataset, and of those inside it

Some libraries give each transform object its own generator (albumentations, MONAI). Every worker process has a copy of
it, so workers draw the same numbers. Such objects have a method ``set_random_seed(seed)`` or ``set_random_state(seed=,
state=)``. `owners` finds them wherever ``fn`` refers to them: in attributes, lists and dicts, in closures, defaults and
global names of functions. It does not search the code of installed packages, only what objects hold. Objects that
``fn`` creates while it runs, or that lie behind too many others, are not found.

The key of each object includes the path to it, so two flips in one pipeline draw different numbers, even where the
pipeline would seed all its members alike (albumentations). A pipeline is seeded before its members.

Threads share the objects, so seeding and ``fn`` run inside `seeded_globals`, one thread at a time.
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

MAX_SEARCHED = 1000
"""Limit of the search for datasets with ``set_epoch``: objects, and entries of a list or dict. Takes at most 1 ms."""

Keys = Sequence[rng.SampleScope] | None
"""Scope of each sample, which keys its random numbers; None outside a loader."""

T = TypeVar("T")


# -- the keys of samples -----------------------------------------------------------------------------------------------


class KeyedIndices(list[int]):
    """Indices into an inner dataset, with the key of each sample."""

    def __init__(self, indices: Iterable[int], keys: Sequence[rng.SampleScope]) -> None:
        super().__init__(indices)
        self.keys = keys
        self.original = tuple(self)


def keys_of(indices: Sequence[object]) -> Keys:
    """Return the keys of the samples at these indices."""
    if isinstance(indices, KeyedIndices) and tuple(indices) == indices.original:  # not sorted or cut since
        return indices.keys
    scope = rng.reading.get()
    if scope is None or scope.is_cached:
        return None
    return [rng.SampleScope(scope.seed, scope.epoch, index, owners=scope.owners) for index in indices]


def attach_keys(inner: Iterable[int], outer: Sequence[object], positions: Sequence[int] | None = None) -> list[int]:
    """Attach the keys of the outer indices, or of those at ``positions``, to the inner indices.

    Example:
        >>> attach_keys([70, 80], [7, 8]), attach_keys([50, 70], [5, 6, 7], [0, 2])
        ([70, 80], [50, 70])
    """
    keys = keys_of(outer)
    if keys is None:
        return list(inner)
    if positions is not None:
        keys = [keys[position] for position in positions]
    copies = [key.index for key in keys]
    if any(isinstance(copy, rng.RepeatedIndex) for copy in copies):  # repeated samples stay distinct
        pairs = zip(inner, copies, strict=True)
        inner = [type(copy)(index) if isinstance(copy, rng.RepeatedIndex) else index for index, copy in pairs]
    return KeyedIndices(inner, keys)


def copy_indices(indices: Any) -> list[Any]:
    """Copy indices into a new list, because third-party code may sort or clear it."""
    if isinstance(indices, np.ndarray):
        return indices.tolist()  # type: ignore[no-any-return]
    return KeyedIndices(indices, indices.keys) if isinstance(indices, KeyedIndices) else list(indices)


def map_with_keys(fn: Callable[[Any], T], items: Iterable[object], indices: Sequence[object]) -> list[T]:
    """Call ``fn(item)`` for each item, with the random numbers of the sample at its index."""
    before, keys, results = rng.reading.get(), keys_of(indices), []
    try:
        for position, item in enumerate(items):
            if keys is not None:
                rng.reading.set(keys[position])
            results.append(fn(item))
    finally:
        rng.reading.set(before)
    return results


# -- generators of an object -------------------------------------------------------------------------------------------


def generators(root: object, name: str) -> Children:
    """Yield the random generators that an object refers to, with their paths.

    Example:
        >>> [path for path, _ in generators([np.random.default_rng(1)], "data")]
        ['data[0]']
    """
    torch_generator = getattr(sys.modules.get("torch"), "Generator", random.Random)
    kinds = (random.Random, np.random.Generator, np.random.RandomState, torch_generator)
    for path, obj in reachable(root, _references, name):
        yield from ((path + end, child) for end, child in _references(obj) if isinstance(child, kinds))


# -- seeded transforms -------------------------------------------------------------------------------------------------


class Seedable(NamedTuple):
    """The path from ``fn`` to an object that owns a generator, and the function that seeds it."""

    path: str
    seed: Callable[[int], Any]


@contextmanager
def transform_seed(fn: Callable[..., object], level: int) -> Iterator[None]:
    """Seed everything that ``fn`` draws from by the sample being read. Does nothing outside a loader.

    ``level`` is the number of seeded transforms before this one, so that no two draw the same numbers. Raises
    ValueError if several samples are read at once, and any error of an object's ``set_random_seed``.
    """
    scope = rng.reading.get()
    if scope is None:
        yield
        return
    parts = (*rng.key_parts(scope, "transform globals"), level)
    with seeded_globals(rng.derive_key(*parts)):
        seedables: list[Seedable] | None = scope.owners.get(id(fn))
        if seedables is None:
            seedables = scope.owners[id(fn)] = owners(fn)
        for owner in seedables:
            key = rng.derive_key(*rng.key_parts(scope, "transform object"), level, owner.path)
            try:
                owner.seed(key)
            except Exception as error:
                add_note(error, f"raised while transform(fn, seeded=True) seeded {owner.path}")
                raise
        yield


def owners(fn: object) -> list[Seedable]:
    """Return the objects inside ``fn`` that can be seeded, nearest first.

    Example:
        >>> class Flip:
        ...     def set_random_seed(self, seed): self.rng = np.random.default_rng(seed)
        >>> flip = Flip()
        >>> [owner.path for owner in owners([flip, Flip()])]
        ['fn[0]', 'fn[1]']
    """
    seeders = ((path, _find_seeder(obj)) for path, obj in reachable(fn, _references, "fn"))
    return [Seedable(path, seed) for path, seed in seeders if seed is not None]


def next_level(dataset: Any, kind: Any) -> int:
    """Return a level above those of all seeded transforms (instances of ``kind``) inside ``dataset``."""
    levels = (obj._level for _, obj in reachable(dataset, parts) if isinstance(obj, kind))
    return 1 + max((level for level in levels if level is not None), default=-1)


def _find_seeder(obj: object) -> Callable[[int], object] | None:
    """Return a function that seeds the object, or None if it has no method for that."""
    kind = type(obj)
    for name in ("set_random_seed", "set_random_state"):
        if not issubclass(kind, type) and callable(getattr(kind, name, None)):
            method = getattr(obj, name)
            with suppress(ValueError):  # no signature: not written in Python
                if "state" in inspect.signature(method).parameters:
                    return lambda key: method(state=_random_state(key))
            return functools.partial(_call_with_seed, method)
    return None


def _call_with_seed(method: Callable[[int], object], key: int) -> None:
    """Seed with 63 bits of the key, which NumPy, ``random`` and torch accept, or 32 if that is too many."""
    try:
        method(key & 0x7FFFFFFFFFFFFFFF)
    except (OverflowError, ValueError):
        method(key & 0xFFFFFFFF)


def _random_state(key: int) -> np.random.RandomState:
    words = np.array((key & 0xFFFFFFFFFFFFFFFF, key >> 64), dtype=np.uint64)
    # Philox uses all bits of the key, and takes a twentieth of the time of a Mersenne Twister.
    return np.random.RandomState(np.random.Philox(key=words))


def _references(obj: object) -> Children:
    """Yield the objects that ``obj`` refers to, including those in its code."""
    yield from _code_references(obj)
    yield from parts(obj)
    kind = type(obj)
    if not issubclass(kind, type) and not all(_is_installed(base.__module__) for base in kind.__mro__):
        yield ".class", kind


def _code_references(obj: Any) -> Children:
    """Yield the objects that the code of a function, method, property or class refers to."""
    kind = type(obj)
    if kind is FunctionType:
        for name, cell in zip(obj.__code__.co_freevars, obj.__closure__ or (), strict=False):
            with suppress(ValueError):  # not assigned yet
                yield f".closure[{name!r}]", cell.cell_contents
        yield from ((".defaults", obj.__defaults__), (".defaults", obj.__kwdefaults__))
        if not _is_installed(obj.__module__):
            scope = obj.__globals__
            yield from ((f".globals[{name!r}]", scope[name]) for name in _global_names(obj.__code__) if name in scope)
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
def _global_names(code: CodeType) -> tuple[str, ...]:
    """Return the global names that a function and its nested functions look up."""
    names = {op.argval for op in dis.get_instructions(code) if op.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_global_names(constant))
    return tuple(sorted(names))


@functools.lru_cache(maxsize=256)
def _is_installed(module: object) -> bool:
    """Return True for library code, whose global objects are not the user's."""
    top = str(module).partition(".")[0]
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    is_library = top == "sharded_loader" or top in sys.stdlib_module_names
    return is_library or "site-packages" in file or "dist-packages" in file


# -- the epoch ---------------------------------------------------------------------------------------------------------


def epoch_setter(dataset: object, but: object = None) -> Any:
    """Return a function that sets the epoch of `epoch_listeners`, without notifying listeners; or None."""
    methods = [getattr(one.set_epoch, "unrecorded", one.set_epoch) for one in epoch_listeners(dataset, True, but)]
    return (lambda epoch: [method(epoch) for method in methods]) if methods else None


def epoch_listeners(dataset: object, nearest: bool = False, but: object = None) -> Iterator[Any]:
    """Yield the objects with ``set_epoch`` among a dataset and what it holds in attributes, or in lists there.

    With ``nearest``, objects inside another one are skipped, because the outer one passes the epoch on. ``but`` and
    what it holds are skipped: a loader that its dataset holds, or that is its own dataset.
    """

    def children(obj: object) -> Children:
        return iter(()) if obj is but or (nearest and takes_epoch(obj)) else _datasets_in(obj)

    def takes_epoch(obj: object) -> bool:  # runs no __getattr__ of inner objects
        return (obj is dataset or hasattr(type(obj), "set_epoch")) and callable(getattr(obj, "set_epoch", None))

    return (obj for _, obj in reachable(dataset, children, "", MAX_SEARCHED, 8) if obj is not but and takes_epoch(obj))


def _datasets_in(obj: object) -> Children:
    """Yield what an object holds that has ``set_epoch``, or that is read like a dataset and may contain one."""
    for end, value in attributes(obj):
        values = value.values() if isinstance(value, dict) else value
        for item in tuple(islice(values, MAX_SEARCHED)) if isinstance(value, (list, tuple, dict)) else (value,):
            kind = type(item)
            is_read = hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
            if hasattr(kind, "set_epoch") or (is_read and hasattr(item, "__dict__") and not hasattr(kind, "__array__")):
                yield end, item
