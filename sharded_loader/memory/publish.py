"""The dataset on its way to spawned workers: pickled once, by value where it must be, sent to all.

    publish(job) -> Encoded      cloudpickle, protocol 5: lambdas, classes of ``__main__`` and of notebooks
                                 by value, arrays and tensors out of band, not copied
    load(head, buffers) -> job   in the worker

dill, which ``multiprocess`` uses by itself, pickles in pure Python and puts arrays in band: 0.92 s for a
154 MB dataset with a lambda in it, against 2 ms. Under fork nothing is published: the worker is born with it.

What cannot be pickled is looked for and named: "cannot pickle '_thread.lock' object" alone helps nobody.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import cloudpickle

from sharded_loader.memory.codec import Encoded, dump, reduce_tensor


class _Publisher(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduced = reduce_tensor(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def publish(job: Any, **parts: Any) -> Encoded:
    """Pickle ``job`` for all workers.

    Args:
        job: what the workers get.
        **parts: the user's objects in it, by the name that the user knows, for the error message.

    Raises:
        TypeError: it cannot be pickled; names the attribute and the ways out.
    """
    try:
        return dump(_Publisher, job)
    except Exception as error:
        culprit = next((where for name, part in parts.items() for where in _culprits(part, name, set())), "it")
        fork = 'use ProcessPool(start_method="fork"), which does not pickle, or '
        raise TypeError(
            f"cannot send the dataset to worker processes: {culprit} cannot be pickled ({error}). "
            f"What to do: open it lazily in the worker (in __getitem__, or in __setstate__), "
            f"{'' if sys.platform == 'win32' else fork}read with threads: thread_pool=True"
        ) from error


def load(head: bytes | memoryview, buffers: list[Any]) -> Any:
    """What `publish` pickled; arrays lie in ``buffers``, which become their memory."""
    return pickle.loads(head, buffers=buffers)


def _pickles(obj: Any) -> bool:
    try:
        dump(_Publisher, obj)
    except Exception:
        return False
    return True


def _culprits(obj: Any, path: str, seen: set[int]) -> Iterator[str]:
    """The innermost attributes below ``obj`` that do not pickle, as the user would write them."""
    if id(obj) in seen or _pickles(obj):
        return
    seen.add(id(obj))
    found = False
    for where, child in _children(obj, path):
        for culprit in _culprits(child, where, seen):
            found = True
            yield culprit
    if not found:
        yield f"{path} ({type(obj).__name__})"


def _children(obj: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, Mapping):
        yield from ((f"{path}[{key!r}]", value) for key, value in obj.items())
    elif isinstance(obj, (list, tuple)):
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(obj))
    else:
        yield from ((f"{path}.{name}", value) for name, value in getattr(obj, "__dict__", {}).items())
        closure = getattr(obj, "__closure__", None) or ()
        names = getattr(getattr(obj, "__code__", None), "co_freevars", ())
        for name, cell in zip(names, closure, strict=False):
            try:
                yield f"{path}: variable {name}", cell.cell_contents
            except ValueError:  # an empty cell
                continue
