"""Deferred imports, and hooks on imports of other libraries.

    call_after_import("torch", then)    calls ``then`` once torch is imported; at once if it already is
    provide("pool", "ray", "sharded_loader.ray.pool:RayPool")    registers an object that the core does not import
    provided("pool", "ray")             -> the class; its module is imported now
    exclude_from_compilation(fn, ...)   excludes functions and their callees from `torch.compile`

Import hooks let a worker configure or seed a library on import; most workers never import torch. If a compiled function
iterates over a loader, Dynamo would compile the engine, the dataset and, since forked workers inherit Dynamo's hook,
the workers' code. That is 100 times slower.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from sharded_loader import PROVIDED
from sharded_loader.base.private import is_being_imported, skip_compiling


def call_after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` when the module is imported, or now if it already is. Replaces an earlier call for the module."""
    forget_import(name)
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def forget_import(name: str) -> None:
    """Cancel `call_after_import` for this module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)]


class _Finder:
    """Import hook for one module. Not a `MetaPathFinder`, whose import takes 3 ms."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> Any:
        if fullname != self.name:
            return None
        forget_import(fullname)
        from importlib.util import find_spec

        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            original = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                original(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


_not_compiled: list[FunctionType] = []

_providers: dict[tuple[str, str], Any] = dict(PROVIDED)


def provide(kind: str, name: str, place: Any) -> None:
    """Register an object that the core looks up by name. ``sharded_loader/__init__.py`` lists the library's own.

    Args:
        kind: kind of object, such as ``"pool"``.
        name: name by which the user or the core refers to it.
        place: the class or function, or ``"package.module:attribute"`` to import the module only on first use.

    Example:
        >>> provide("example", "ordered", "collections:OrderedDict")
        >>> provided("example", "ordered").__name__, names_of("example")
        ('OrderedDict', ['ordered'])
    """
    _providers[kind, name] = place


def provided(kind: str, name: str) -> Any:
    """Return the object registered with `provide`, importing its module if necessary."""
    place = _providers[kind, name]
    if not isinstance(place, str):
        return place
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def names_of(kind: str) -> list[str]:
    """Return the registered names of a kind."""
    return [name for registered_kind, name in _providers if registered_kind == kind]


def exclude_from_compilation(*functions: Any) -> None:
    """Exclude these functions, and everything they call, from compilation by Dynamo.

    The rest of this library is not compiled either, but its callees may be. Before torch 2.7, so may the callees of
    these functions.
    """
    _not_compiled.extend(functions)
    call_after_import("torch._dynamo", lambda: skip_compiling(_not_compiled))
