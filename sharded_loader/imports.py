"""Doing something as soon as a module is imported, by whomever, without importing it.

    call_after_import("torch", then)     then() when torch has been imported; at once if it is here already

For what a worker would have to tell a library, or seed in it, if it had it: most workers never import torch, and
``numpy.random`` is a fifth of the import of NumPy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


def call_after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` once, when the module has been imported, in the thread that imports it; at once if it is here.

    Args:
        name: of the module.
        then: takes the place of what an earlier call gave for this module.
    """
    forget_import(name)
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        then()
    else:
        sys.meta_path.insert(0, _Finder(name, then))


def forget_import(name: str) -> None:
    """Take back what `call_after_import` was told about this module."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if not (isinstance(finder, _Finder) and finder.name == name)]


class _Finder:
    """Import hooks are Python's own way to wait for an import. No `MetaPathFinder`: its import takes 3 ms."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name = name
        self._then = then

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
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
