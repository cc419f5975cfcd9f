"""Other libraries' samplers, left as they were.

    with undisturbed(samplers, but=dataset):
        first = next(iter(sampler))         # draws from the sampler's own generator, counts, shuffles its list
    the sampler goes on as if it had not been asked

Kept: the attributes of each sampler; the states of random generators and the contents of lists, dicts, sets and arrays
that are attributes. Samplers of this library are pure functions and need nothing.

What can go wrong: a sampler that keeps its state elsewhere (a file, an object inside it, a compiled class) goes on from
where it was read to. Nobody can see that from here: `ShardedDataLoader.peek` says so.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from sharded_loader.sampling.foreign import is_own

MOST_BYTES = 64 << 20
"""Arrays above this are data, not an order that is shuffled in place: they are not copied. Lists: items of 8 bytes."""

Undo = Callable[[], Any]


@contextmanager
def undisturbed(samplers: Iterable[Any], but: Any = None) -> Iterator[None]:
    """Inside, other libraries' samplers may be read; afterwards they are what they were before.

    Args:
        samplers: any; those of this library are left alone.
        but: an object that is not copied where a sampler refers to it: the dataset.

    Example:
        >>> class Counting:
        ...     count = 0
        ...     def __iter__(self): self.count += 1; return iter([self.count])
        >>> sampler = Counting()
        >>> with undisturbed([sampler]):
        ...     print(list(sampler), list(sampler))
        [1] [2]
        >>> list(sampler)
        [1]
    """
    undos: list[Undo] = []
    for sampler in samplers:
        attributes = None if is_own(sampler) else getattr(sampler, "__dict__", None)
        if not isinstance(attributes, dict):
            continue
        undos.append(partial(_set_attributes, attributes, dict(attributes)))
        undos += [undo for value in attributes.values() if value is not but and (undo := _kept(value)) is not None]
    try:
        yield
    finally:
        for undo in undos:
            undo()


def _set_attributes(attributes: dict[str, Any], before: dict[str, Any]) -> None:
    for name in attributes.keys() - before.keys():
        del attributes[name]
    attributes.update(before)


def _kept(value: Any) -> Undo | None:
    """What puts the value back into the state that it is in now; None if it is nothing that changes."""
    try:
        if isinstance(value, random.Random):
            return partial(value.setstate, value.getstate())
        if isinstance(value, np.random.RandomState):
            return partial(value.set_state, value.get_state())
        if isinstance(value, np.random.Generator):
            return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    except NotImplementedError:  # random.SystemRandom has no state
        return None
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if type(value) is np.ndarray and value.nbytes <= MOST_BYTES and value.flags.writeable:
        return partial(np.copyto, value, value.copy())
    if type(value) in (list, dict, set, deque) and len(value) * 8 <= MOST_BYTES:
        return partial(_refill, value, value.copy())
    return None


def _refill(container: Any, before: Any) -> None:
    if isinstance(container, list):
        container[:] = before
        return
    container.clear()
    (container.extend if isinstance(container, deque) else container.update)(before)
