"""Waits for the import of a module that this library does not import itself.

    call_after_import("torch", then)    calls ``then`` when torch has been imported; at once if it is imported already
    forget_import("torch")              takes that back

It serves what a worker has to say to a library, or has to seed in it. Most workers never import torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any


def call_after_import(name: str, then: Callable[[], None]) -> None:
    """Call ``then`` once, when the module has been imported, in the thread that imports it; at once if it is here.

    Args:
        name: name of the module.
        then: the function; it replaces the function of an earlier call for this module.
    """
    forget_import(name)
    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
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
