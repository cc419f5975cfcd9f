"""Fast methods and overrides: a method that does the work of another one is used only if it knows that other one.

    known_to(class, fast, plain)     -> the fast method | None
    bulk_method(dataset, name)       -> ``__getitems__`` or ``get_batch`` of a dataset | None

A class that overrides ``__getitem__`` changes the samples, and a bulk method of a base class does not know that. So
there is one rule, on every path. A fast method is used only if the class that defines it is the class that defines the
plain method, or a more derived one. The same holds for ``assemble`` and ``__call__`` of batchify functions.

A method that a wrapper finds in the wrapped object through ``__getattr__`` is never used: it does not know the wrapper.
What can go wrong: a class whose bulk method comes from a mixin behind the class that defines ``__getitem__`` is read
sample by sample. The samples are right, and reading is slower.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

READS = ("__getitem__", "__getitems__", "get_batch", "_gather")
"""The methods that read samples. Each one does the work of those before it, faster."""


def known_to(kind: type, fast: str, plain: Sequence[str]) -> Any:
    """A class's fast method, if no more derived class overrides one of the plain methods that it stands for.

    Args:
        kind: the class.
        fast: name of the method that is faster.
        plain: names of the methods whose work it does.

    Returns:
        What the class has under the name ``fast``; None if there is nothing, or an override is not known to it.

    Example:
        >>> class Base:
        ...     def one(self): ...
        ...     def many(self): ...
        >>> class Derived(Base):
        ...     def one(self): ...
        >>> known_to(Base, "many", ["one"]) is Base.many, known_to(Derived, "many", ["one"])
        (True, None)
    """
    for cls in kind.__mro__:
        own = vars(cls)
        if fast in own:
            return own[fast]
        for name in plain:
            if name in own:
                return None
    return None


def bulk_method(dataset: Any, name: str) -> Any:
    """A bulk method of a dataset, if it reads what ``dataset[index]`` reads (see the module).

    Args:
        dataset: any.
        name: ``__getitems__``, ``get_batch`` or ``_gather``.

    Returns:
        The bound method, or None.

    Example:
        >>> from sharded_loader.data.datasets import ArrayDataset
        >>> class Negative(ArrayDataset):
        ...     def __getitem__(self, index): return -super().__getitem__(index)
        >>> bulk_method(ArrayDataset([1, 2]), "get_batch") is None, bulk_method(Negative([1, 2]), "get_batch") is None
        (False, True)
    """
    kind = type(dataset)
    if known_to(kind, name, READS[: READS.index(name)]) is None and name not in getattr(dataset, "__dict__", ()):
        return None
    # Where nothing inside is faster, torch's method reads one by one, and nobody knows which sample it is at.
    if name == "__getitems__" and any(bulk_method(inner, name) is None for inner in _read_by_torch(dataset)):
        return None
    return getattr(dataset, name, None)


def _read_by_torch(dataset: Any) -> Iterable[Any]:
    """The datasets whose ``__getitems__`` torch's own method calls, whatever their classes override."""
    torch: Any = sys.modules.get("torch.utils.data")
    method = getattr(type(dataset), "__getitems__", None)
    if method is None:
        return ()
    if method is getattr(getattr(torch, "Subset", None), "__getitems__", None):
        return [dataset.dataset]
    if method is getattr(getattr(torch, "StackDataset", None), "__getitems__", None):
        return list(dataset.datasets.values()) if isinstance(dataset.datasets, dict) else dataset.datasets
    return ()


def offers(dataset: Any, name: str) -> bool:
    """Whether a dataset has this method; of bulk methods, whether it is one to use (`bulk_method`).

    Example:
        >>> offers([1, 2], "__getitems__"), offers([1, 2], "index")
        (False, True)
    """
    return hasattr(dataset, name) if name not in READS else bulk_method(dataset, name) is not None


def has(name: str) -> Callable[[Any], bool]:
    """A condition for `offered_if`: the dataset that the instance wraps as ``_dataset`` offers this method."""
    return lambda wrapper: offers(wrapper.__dict__.get("_dataset"), name)
