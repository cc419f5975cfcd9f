"""The generators that all threads of a process share: ``random``, ``numpy.random``, torch's default one.

    seed_globals(key)                     seeded, and left so: a worker process has them to itself
    with seeded_globals(key):             seeded for one thread, and put back: the others wait
    with lent():                          this thread waits for another one, which may seed them meanwhile
    seed_torch(generator, key)            the same seed for a torch generator of one's own
    global_states()                       what they would draw next, to compare

Every generator is seeded with all 128 bits of the key, with one exception. For each batch, a process worker seeds
NumPy's and torch's with 32 bits: 14 us for all three. So of a million batches about 116 pairs draw the same numbers.
All of the generators are Mersenne Twisters, which draw the same numbers if they get the same seed. So each gets bits of
its own.

What can go wrong: a thread hangs in the user's code while the generators are seeded for it. Every other thread that
wants to seed them waits for it. Nothing here imports torch: where it is not loaded there is nothing of torch's to seed.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from sharded_loader.base.imports import call_after_import
from sharded_loader.base.private import SEED_BYTES, WORD_BYTES, is_owned

if TYPE_CHECKING:
    import torch

FOR_NUMPY, FOR_TORCH = 1, 2
"""A fifth word after the four words of the key. ``random`` has none."""

_lock = threading.RLock()


def _begin_afresh() -> None:
    """In a forked child: another thread, which is gone there, may have held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_afresh)


def seed_as_torch(base_seed: int, worker: int) -> None:
    """Seed ``random`` and NumPy as worker number ``worker`` of torch's own loader does. torch gets their sum.

    Args:
        base_seed: what torch's loader draws for all workers of an iterator.
        worker: the number of the worker, from 0.
    """
    random.seed(base_seed + worker)
    words = np.random.SeedSequence([worker, base_seed & 0xFFFFFFFF, base_seed >> 32, 0])
    np.random.seed(words.generate_state(4))


def seed_globals(key: int, *, whole: bool = True) -> None:
    """Seed ``random``, ``numpy.random`` and, if this process has imported it, torch's CPU generator.

    ``torch.manual_seed`` would also queue a call for every accelerator, with a formatted stack each time.

    Args:
        key: an integer of up to 128 bits; see `sharded_loader.randomness.rng.derive_key`.
        whole: whether NumPy's and torch's generators are seeded with all bits, which takes 11 and 27 us. With 32 bits
            it takes 2 us each. A process worker does this for every batch.

    Example:
        >>> seed_globals(7)
        >>> first = random.random(), np.random.rand()
        >>> seed_globals(7)
        >>> first == (random.random(), np.random.rand())
        True
    """
    random.seed(key)
    for_numpy: Any = _numpy_words(key) if whole else key >> 64 & 0xFFFFFFFF
    if "numpy.random" in sys.modules:
        np.random.seed(for_numpy)
    else:  # as soon as the user's code draws from it; to import it takes 8 ms
        call_after_import("numpy.random", lambda: sys.modules["numpy.random"].seed(for_numpy))
    torch_module = sys.modules.get("torch")
    generator = getattr(torch_module, "default_generator", None)
    if generator is not None:
        if whole:
            seed_torch(generator, key)
        else:
            generator.manual_seed(key & 0x7FFFFFFFFFFFFFFF)


def _numpy_words(key: int) -> npt.NDArray[np.uint32]:
    return np.frombuffer((key | FOR_NUMPY << 128).to_bytes(20, "little"), "<u4").astype(np.uint32)


def seed_torch(generator: torch.Generator, key: int) -> None:
    """Seed a torch CPU generator with all bits of ``key``: ``manual_seed`` ignores all but the lowest 32 on the CPU.

    ``generator.initial_seed()`` is then the lowest 63 bits of the key.

    Args:
        generator: any; one of an accelerator gets the lowest 63 bits, of which it uses all.
        key: an integer of up to 128 bits.

    Example:
        >>> import torch
        >>> generator = torch.Generator()
        >>> seed_torch(generator, 7)
        >>> generator.initial_seed()
        7
    """
    seed = key & 0x7FFFFFFFFFFFFFFF
    template = _torch_state() if generator.device.type == "cpu" else None
    if template is None:
        generator.manual_seed(seed)
        return
    words = random.Random(key | FOR_TORCH << 128).getrandbits(32 * 624).to_bytes(4 * 624, "little")
    state = template.copy()
    state[SEED_BYTES].view(np.uint64)[0] = seed
    state[WORD_BYTES].view(np.uint64)[:] = np.frombuffer(words, "<u4")
    generator.set_state(sys.modules["torch"].from_numpy(state))


@cache
def _torch_state() -> npt.NDArray[Any] | None:
    """The state of a torch generator seeded with 0; None if this version of torch keeps its words elsewhere."""
    generator = sys.modules["torch"].Generator()
    state: npt.NDArray[Any] = generator.manual_seed(0).get_state().numpy().copy()
    # NumPy's Mersenne Twister makes the same words of a seed of 32 bits.
    expected = np.random.RandomState(0).get_state(legacy=False)["state"]["key"]
    if state.nbytes < WORD_BYTES.stop or not np.array_equal(state[WORD_BYTES].view(np.uint64), expected):
        return None
    return state


@contextmanager
def seeded_globals(key: int, *, whole: bool = True) -> Iterator[None]:
    """Seed the global generators inside the block and restore their states after it, one thread at a time.

    Args:
        key: any integer; see `sharded_loader.randomness.rng.derive_key`.
        whole: as of `seed_globals`.
    """
    with _lock:
        python_state, numpy_state = random.getstate(), np.random.get_state()
        generator = getattr(sys.modules.get("torch"), "default_generator", None)
        torch_state = generator and generator.get_state()

        def put_back() -> None:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if generator is not None:
                generator.set_state(torch_state)

        try:
            seed_globals(key, whole=whole)
            yield
            put_back()
        except BaseException:  # also a Ctrl-C that comes while they are restored
            put_back()
            raise


@contextmanager
def lent() -> Iterator[None]:
    """Inside, other threads may seed the generators, though this one has seeded them: it waits for such a thread.

    They find the states that this thread has left, and put these back.
    """
    lock, count = _lock, 0
    while is_owned(lock):
        lock.release()
        count += 1
    try:
        yield
    finally:
        for _ in range(count):
            lock.acquire()


def global_states() -> dict[str, bytes]:
    """What each generator would draw next, by the name that users know it by: equal if nothing was drawn in between.

    Example:
        >>> before = global_states()
        >>> _ = random.random()
        >>> [name for name, state in global_states().items() if state != before[name]]
        ['random']
    """
    found = {"random": repr(random.getstate()).encode()}
    if "numpy.random" in sys.modules:  # to import it takes 8 ms
        of_numpy = np.random.get_state(legacy=False)["state"]
        found["numpy.random"] = repr(of_numpy["pos"]).encode() + of_numpy["key"].tobytes()
    generator = getattr(sys.modules.get("torch"), "default_generator", None)
    if generator is not None:
        found["torch"] = generator.get_state().numpy().tobytes()
    return found
