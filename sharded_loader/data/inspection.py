"""What a dataset of the user's, or an object of another library, can do. Nothing of it is called to find out.

    is_indexed(dataset)       it is read by index, as torch's map-style datasets
    is_stream(dataset)        it is read in its own order only: iterable data
    is_stateful(one)          it has ``state_dict`` and ``load_state_dict``, and the state says all
    keeps_place(dataset)      it may know in itself how far it was read
    known_parts(dataset)      how many parts iterable data is made of
    takes_part(function)      a function asks which part it is to read

What can go wrong: nothing. What cannot be found out counts as missing.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from itertools import islice
from types import FunctionType
from typing import Any


def has_own(kind: type, name: str) -> bool:
    """Whether a class has a method that does something: torch's base classes have some that only raise."""
    method = getattr(kind, name, None)
    module = sys.modules.get("torch.utils.data")
    bases = (getattr(module, base, None) for base in ("Dataset", "IterableDataset"))
    return method is not None and all(method is not getattr(base, name, None) for base in bases)


def is_indexed(dataset: Any) -> bool:
    """Whether a dataset is read by index, and has a length.

    Example:
        >>> is_indexed([1, 2]), is_indexed({1, 2})
        (True, False)
    """
    return has_own(type(dataset), "__getitem__") and hasattr(dataset, "__len__")


def is_stream(dataset: Any) -> bool:
    """Whether a dataset can be read in its own order only.

    Example:
        >>> is_stream(range(3)), is_stream(lambda: range(3)), is_stream({1, 2})
        (False, True, True)
    """
    kind = type(dataset)
    if isinstance(dataset, type):
        return False
    if has_own(kind, "__getitem__"):
        # Hugging Face's IterableDataset has one too: for the name of a column.
        base = getattr(sys.modules.get("torch.utils.data"), "IterableDataset", None)
        return base is not None and isinstance(dataset, base) and not hasattr(kind, "__len__")
    return has_own(kind, "__iter__") or callable(dataset)


def is_stateful(one: Any) -> bool:
    """Whether an object has ``state_dict`` and ``load_state_dict``, to be called as torchdata calls them.

    The state of some Hugging Face streams does not count; see `_is_lossy`.
    """
    if not all(callable(getattr(one, name, None)) for name in ("state_dict", "load_state_dict")):
        return False
    if _is_lossy(one):
        return False
    # MosaicML's and litdata's StreamingDataset want to be told by their own loaders how far they were read.
    function: Any = getattr(one.state_dict, "__func__", None)
    if not isinstance(function, FunctionType):
        return True
    return function.__code__.co_argcount - len(function.__defaults__ or ()) <= 1


def _is_lossy(dataset: Any) -> bool:
    """Whether an object is, or holds, a stream of Hugging Face's from whose state it cannot go on exactly.

    The state leaves out the samples in a shuffle buffer. The state of streams one behind the other
    (``concatenate_datasets``) is an IndexError in workers, from the second epoch on.
    """
    found: list[Any] = [dataset] if "datasets" in sys.modules else []
    seen: set[int] = set()
    while found and len(seen) < 10_000:
        one = found.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        package = type(one).__module__.partition(".")[0]
        is_concatenated = type(one).__name__.startswith("VerticallyConcatenated")
        if package == "datasets" and (is_concatenated or hasattr(one, "buffer_size")):
            return True
        if isinstance(one, list | tuple | dict):
            found += islice(one.values() if isinstance(one, dict) else one, 1000)
        elif package != "sharded_loader":  # a mixture asks each of its sources
            found += getattr(one, "__dict__", {}).values()
    return False


def keeps_place(dataset: Any) -> bool:
    """Whether a dataset may know in itself how far it was read, or in which epoch: then it can be open once only."""
    return any(hasattr(dataset, name) for name in ("state_dict", "__next__", "set_epoch"))


def known_parts(dataset: Any) -> int | None:
    """How many parts a dataset says that it has, as Hugging Face's do; None if it does not."""
    for name in ("num_shards", "n_shards"):
        count = getattr(dataset, name, None)
        if isinstance(count, int) and not isinstance(count, bool) and count > 0:
            return count
    return None


def takes_part(function: Callable[..., Any]) -> bool:
    """Whether a function needs two arguments: the number of its part, and how many parts there are.

    Example:
        >>> takes_part(lambda part, parts: []), takes_part(lambda: []), takes_part(lambda size=3: [])
        (True, False, False)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of some functions in C
        return False
    by_position = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return sum(one.default is one.empty for one in by_position) >= 2
