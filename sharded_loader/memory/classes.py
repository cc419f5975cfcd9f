"""Classes on their way from a worker to the main process: each arrives as the very class that the user holds.

    class_reference(cls) -> a reduction that names it       in the worker
    resolve_class(...) -> cls                               in the main process
    classes_of_main() -> classes                            when a pool starts, and as long as it runs

Otherwise ``except MyError`` would not catch a worker's error. A worker that was sent its dataset by value has copies of
the classes of ``__main__`` and of functions' bodies. A forked one has the originals, but under names that cannot be
looked up. So a class is named by cloudpickle's tracker, by its address, or by its name.

Owns nothing: the tables here refer to classes weakly. What can go wrong: the main process does not have the class
(AttributeError, with what to do).
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from sharded_loader.base.private import tracked_class, tracker_of


def is_findable(obj: Any) -> bool:
    """Whether the other process finds the same object under the same name."""
    module = sys.modules.get(obj.__module__ or "")
    return module is not None and "<locals>" not in obj.__qualname__ and _look_up(module, obj.__qualname__) is obj


def _look_up(module: Any, qualname: str) -> Any:
    found = module
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def class_reference(cls: type) -> tuple[Callable[..., type], tuple[Any, ...]]:
    """A reduction that names ``cls`` so that the main process finds its own."""
    return resolve_class, (cls.__module__, cls.__qualname__, tracker_of(cls), id(cls))


def resolve_class(module: str, qualname: str, tracker: str | None, address: int) -> type:
    """The class of this process that `class_reference` named in a worker.

    A class that was sent to the worker by value has a tracker. A class that a function's body makes has no name to
    look up. Among all classes with its name it is the one at the same address, because a forked worker's classes lie
    where they lie here. Or it is the only one: a spawned worker imported the module that makes it.
    """
    tracked = tracked_class(tracker)
    if tracked is not None:
        return tracked
    older = _of_main.get(address)
    # Not an error's: the user's loop is to catch it by the name that it has now.
    if older is not None and older.__qualname__ == qualname and not issubclass(older, BaseException):
        return older
    found = _look_up(sys.modules.get(module), qualname)
    if not isinstance(found, type):
        found = _nameless.get((module, qualname, address))
    if not isinstance(found, type):
        named = [cls for cls in _all_classes() if cls.__qualname__ == qualname and cls.__module__ == module]
        found = next((cls for cls in named if id(cls) == address), named[0] if len(named) == 1 else None)
        if found is None:
            raise AttributeError(
                f"class {module}.{qualname}, used by a worker process, does not exist in this one: "
                f"define it at the top level of a module"
            )
        _nameless[module, qualname, address] = found
    return found


_nameless: weakref.WeakValueDictionary[tuple[str, str, int], type] = weakref.WeakValueDictionary()
"""Classes that `resolve_class` had to look for: without it each batch of such a class takes 15 ms, instead of 0.15."""

_of_main: weakref.WeakValueDictionary[int, type] = weakref.WeakValueDictionary()
"""Classes of ``__main__`` by address, as they were when a pool was started."""


def classes_of_main() -> list[type]:
    """The classes that ``__main__`` defines now; as long as they are kept, `resolve_class` finds them.

    Workers go on with these, whatever the user defines under their names afterwards.
    """
    todo: list[Any] = [sys.modules.get("__main__")]
    classes: dict[int, type] = {}
    while todo:
        for value in list(getattr(todo.pop(), "__dict__", {}).values()):
            if isinstance(value, type) and value.__module__ == "__main__" and id(value) not in classes:
                classes[id(value)] = value
                todo.append(value)
    _of_main.update(classes)
    return list(classes.values())


def _all_classes() -> Iterator[type]:
    """Every class of this process (10 ms with torch loaded; walked only for classes that have no name)."""
    seen: set[type] = set()
    todo: list[type] = [object]
    while todo:
        subclasses: list[type] = type.__subclasses__(todo.pop())
        for cls in subclasses:
            if cls not in seen:
                seen.add(cls)
                todo.append(cls)
                yield cls
