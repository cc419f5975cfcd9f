"""Seeds what a transform draws from: the global generators, and the generators of objects that the transform holds.

    with transform_seed(fn, level):     everything that ``fn`` draws from is seeded by (seed, epoch, index, level)
        fn(sample)
    owners(fn) -> [Owner, ...]          the objects inside ``fn`` that can be seeded

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
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from sharded_loader import rng
from sharded_loader.errors import add_note
from sharded_loader.global_generators import seeded_globals

MOST = 2000
"""Objects to search, nearest first: about 2 ms. It is done once per batch."""

MANY = 200
"""Items of one list or dict to search: what is longer is data, and no pipeline."""

_LEAVES = frozenset(
    (str, bytes, bytearray, int, float, complex, bool, type(None), range, slice, type(Ellipsis))
    + (np.ndarray, np.dtype, ModuleType, BuiltinFunctionType, set, frozenset, random.Random)
)


class Owner(NamedTuple):
    """An object that owns a generator.

    Attributes:
        path: how ``fn`` refers to it.
        seed: seeds it with a key.
    """

    path: str
    seed: Callable[[int], None]


@contextmanager
def transform_seed(fn: Callable[..., Any], level: int) -> Iterator[None]:
    """Seed all that ``fn`` draws from by the sample being read. Outside a loader nothing is seeded.

    Args:
        fn: the function of a transform.
        level: how many seeded transforms the sample has passed before, so that no two draw the same numbers.

    Raises:
        ValueError: several samples are read at once.
        Exception: what the ``set_random_seed`` of an object raises.
    """
    scope = rng.reading.scope
    if scope is None:
        yield
        return
    parts = (*rng.key_parts(scope, "transform globals"), level)
    with seeded_globals(rng.derive_key(*parts)):
        found: list[Owner] | None = scope.owners.get(id(fn))
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


def owners(fn: Any) -> list[Owner]:
    """The objects inside ``fn`` that can be seeded, nearest first.

    Example:
        >>> class Flip:
        ...     def set_random_seed(self, seed): self.rng = np.random.default_rng(seed)
        >>> flip = Flip()
        >>> [owner.path for owner in owners([flip, Flip()])]
        ['fn[0]', 'fn[1]']
    """
    found = []
    seen: dict[int, Any] = {id(fn): fn}  # the objects too: the address of one that is gone is given to another
    queue = deque([("fn", fn)])
    while queue:
        path, one = queue.popleft()
        seed = _seeder(one)
        if seed is not None:
            found.append(Owner(path, seed))
        for name, child in _children(one):
            if type(child) in _LEAVES or id(child) in seen or isinstance(child, np.generic):
                continue
            if len(seen) >= MOST:
                return found + [Owner(p, s) for p, o in queue if (s := _seeder(o)) is not None]
            seen[id(child)] = child
            queue.append((path + name, child))
    return found


def _seeder(one: Any) -> Callable[[int], None] | None:
    """What seeds an object, if it has a method for that."""
    kind = type(one)
    if issubclass(kind, type):
        return None
    if callable(getattr(kind, "set_random_seed", None)):
        return lambda key: _by_seed(one.set_random_seed, key)
    method = getattr(kind, "set_random_state", None)
    if not callable(method):
        return None
    names = _parameters(method)
    if "state" in names:
        return lambda key: _ignore(one.set_random_state(state=_random_state(key)))
    if "seed" in names:
        return lambda key: _by_seed(lambda seed: one.set_random_state(seed=seed), key)
    return lambda key: _by_seed(one.set_random_state, key)


def _by_seed(method: Callable[[int], Any], key: int) -> None:
    """63 bits of the key, which NumPy's new generators, ``random`` and torch take; 32 where they are too many."""
    try:
        method(key & 0x7FFFFFFFFFFFFFFF)
    except (OverflowError, ValueError):
        method(key & 0xFFFFFFFF)


def _random_state(key: int) -> np.random.RandomState:
    words = np.array((key & 0xFFFFFFFFFFFFFFFF, key >> 64), dtype=np.uint64)
    # A Philox takes all bits of the key, and a twentieth of the time of a Mersenne Twister.
    return np.random.RandomState(np.random.Philox(key=words))


def _ignore(value: Any) -> None:
    """MONAI's method returns the object."""


def _parameters(method: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a method's parameters; none if it is not written in Python."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _children(one: Any) -> Iterator[tuple[str, Any]]:
    """What an object refers to, each with the end of its path, in an order that is the same in every process."""
    kind = type(one)
    if issubclass(kind, (list, tuple, deque)):
        yield from ((f"[{number}]", child) for number, child in enumerate(tuple(islice(one, MANY))))
    elif issubclass(kind, dict):
        for number, (key, child) in enumerate(tuple(islice(one.items(), MANY))):
            yield f"[{key!r}]" if type(key) in (str, int) else f"[{number}]", child
    elif kind is FunctionType:
        yield from _of_function(one)
    elif kind is MethodType:
        yield from ((".self", one.__self__), (".function", one.__func__))
    elif issubclass(kind, functools.partial):
        yield from ((".func", one.func), (".args", one.args), (".keywords", one.keywords))
    elif kind in (staticmethod, classmethod):
        yield ".function", one.__func__
    elif kind is property:
        yield ".getter", one.fget
    elif issubclass(kind, type):
        yield from _of_class(one)
    if not issubclass(kind, type):
        held = {name: child for name, child in _attributes(one).items() if type(child) not in _LEAVES}
        yield from ((f".{name}", held[name]) for name in sorted(name for name in held if type(name) is str))
        yield from _of_slots(one)
        if not all(base is object or _is_installed(base.__module__) for base in kind.__mro__):
            yield ".class", kind


def _attributes(one: Any) -> dict[Any, Any]:
    """The attributes that an object itself holds; no code of its class runs."""
    try:
        held = object.__getattribute__(one, "__dict__")
    except Exception:
        return {}
    return held.copy() if isinstance(held, dict) else {}


def _of_slots(one: Any) -> Iterator[tuple[str, Any]]:
    for base in type(one).__mro__:
        slots = base.__dict__.get("__slots__")
        if isinstance(slots, (str, list, tuple)):
            for name in (slots,) if isinstance(slots, str) else slots:
                try:
                    yield f".{name}", object.__getattribute__(one, name)
                except AttributeError:  # not assigned, or private: then its name is another
                    continue


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    code = function.__code__
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
        try:
            yield f".closure[{name!r}]", cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from ((".defaults", function.__defaults__), (".defaults", function.__kwdefaults__))
    if not _is_installed(function.__module__):
        for name in _names(code):
            if name in function.__globals__:
                yield f".globals[{name!r}]", function.__globals__[name]


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if base is not object and not _is_installed(base.__module__):
            held = base.__dict__
            yield from ((f".{name}", held[name]) for name in sorted(held) if name not in ("__dict__", "__weakref__"))


@functools.lru_cache(maxsize=1024)
def _names(code: CodeType) -> tuple[str, ...]:
    """The global names that a function looks up, those of functions inside it too."""
    names = {one.argval for one in dis.get_instructions(code) if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(_names(constant))
    return tuple(sorted(names))


def _is_installed(module: Any) -> bool:
    """Whether code is a library's: its own global objects are not the user's."""
    top = module.partition(".")[0] if isinstance(module, str) else ""
    return top == "sharded_loader" or top in sys.stdlib_module_names or _is_site_package(top)


@functools.lru_cache(maxsize=256)
def _is_site_package(top: str) -> bool:
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def next_level(dataset: Any, level_of: Callable[[Any], int | None]) -> int:
    """A number above the levels of all seeded transforms that a sample of ``dataset`` may have passed.

    Args:
        dataset: any. What it holds in attributes, and in lists there, is searched.
        level_of: the level of a seeded transform; None for any other object.

    Example:
        >>> next_level([1, 2, 3], lambda one: None)
        0
    """
    level = 0
    seen: dict[int, Any] = {id(dataset): dataset}
    queue = [dataset]
    while queue and len(seen) < MOST:
        one = queue.pop()
        if (own := level_of(one)) is not None:
            level = max(level, own + 1)
        held = list(_attributes(one).values())
        for part in [*held, *(item for value in held if type(value) in (list, tuple) for item in value[:MOST])]:
            if id(part) not in seen and hasattr(type(part), "__getitem__") and _attributes(part):
                seen[id(part)] = part
                queue.append(part)
    return level
