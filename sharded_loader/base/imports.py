"""Imports that happen later, or in other libraries.

    call_after_import("torch", then)    calls ``then`` when torch has been imported; at once if it is imported already
    forget_import("torch")              takes that back
    provide("pool", "ray", "sharded_loader.ray.pool:RayPool")    gives the core something that it does not import
    provided("pool", "ray")             the class; its module is imported now
    leave_alone(function, ...)          `torch.compile` compiles neither these functions nor what they call

The first serves what a worker has to say to a library, or has to seed in it. Most workers never import torch.

A loop over a loader may stand in a compiled function. Dynamo would compile the engine, and what the engine calls: the
dataset, and in forked workers, which inherit Dynamo's hook, everything that they do (100 times slower).
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
    """Call ``then`` once, when the module has been imported, in the thread that imports it; at once if it is here.

    Args:
        name: name of the module.
        then: the function; it replaces the function of an earlier call for this module.
    """
    forget_import(name)
    module = sys.modules.get(name)
    if module is not None and not is_being_imported(module):
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def forget_import(name: str) -> None:
    """Take back the call of `call_after_import` for this module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)]


class _Finder:
    """Import hooks are Python's own way to wait for an import. No `MetaPathFinder`: its import takes 3 ms."""

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


_alone: list[FunctionType] = []


_places: dict[tuple[str, str], Any] = dict(PROVIDED)


def provide(kind: str, name: str, place: Any) -> None:
    """Give the core something by name. What its own satellites give stands in ``sharded_loader/__init__.py``.

    Args:
        kind: What it is, such as ``"pool"``.
        name: What the user, or the core, calls it.
        place: The class or function; or where it is, as ``"package.module:attribute"``, to import the module only when
            it is asked for.

    Example:
        >>> provide("example", "ordered", "collections:OrderedDict")
        >>> provided("example", "ordered").__name__, names_of("example")
        ('OrderedDict', ['ordered'])
    """
    _places[kind, name] = place


def provided(kind: str, name: str) -> Any:
    """Return what `provide` was given under this name."""
    place = _places[kind, name]
    if not isinstance(place, str):
        return place
    module, _, attribute = place.partition(":")
    return getattr(importlib.import_module(module), attribute)


def names_of(kind: str) -> list[str]:
    """The names of everything of a kind."""
    return [name for one, name in _places if one == kind]


def leave_alone(*functions: Any) -> None:
    """See to it that Dynamo does not compile these functions of ours, nor what they call.

    Other functions of this library are not compiled either, but what they call may be. Before torch 2.7, so may what
    these call.
    """
    _alone.extend(functions)
    call_after_import("torch._dynamo", lambda: skip_compiling(_alone))
