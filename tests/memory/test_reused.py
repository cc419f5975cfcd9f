"""Large batches that are made in this process lie in memory that is used again, and never while somebody holds them."""

from __future__ import annotations

import gc
import os
import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_pool
from samples import Filled

from sharded_loader import ArrayDataset, ShardedDataLoader
from sharded_loader.memory.arena import KEPT, LEAST_BYTES, ReusedMemory

LARGE = LEAST_BYTES
U8 = np.dtype(np.uint8)


def address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_that_has_come_back_is_handed_out_again() -> None:
    empty = ReusedMemory()
    first = empty((2, LARGE), U8)
    where = address(first)
    assert first.shape == (2, LARGE) and first.flags.writeable and first.flags.c_contiguous and where % 64 == 0
    second = empty((2, LARGE), U8)
    assert not np.shares_memory(first, second)
    del first
    assert address(empty((LARGE // 2, 4), np.dtype("f4"))) != where  # another size
    assert address(empty((LARGE // 4, 2), np.dtype("f4"))) == where


HOLDS = {
    "a view": lambda array: array[5:7],
    "a view of another dtype": lambda array: array.view(np.int16)[1:][::2],
    "a tensor": torch.from_numpy,
    "a slice of a tensor": lambda array: torch.from_numpy(array)[3:5],
    "a storage": lambda array: torch.from_numpy(array).untyped_storage(),
    "dlpack": lambda array: torch.from_dlpack(array),
    "a memoryview": lambda array: memoryview(array)[4:],
}


@pytest.mark.parametrize("how", HOLDS)
def test_what_is_held_in_any_way_is_not_used_again(how: str) -> None:
    empty = ReusedMemory()
    array = empty((LARGE,), U8)
    where = address(array)
    held = HOLDS[how](array)
    del array
    assert all(address(empty((LARGE,), U8)) != where for _ in range(5))
    del held
    gc.collect()
    assert where in {address(one) for one in [empty((LARGE,), U8) for _ in range(5)]}


def test_small_arrays_and_objects_are_new() -> None:
    empty = ReusedMemory()
    for array in (empty((LARGE - 1,), U8), empty((LARGE,), np.dtype(object)), empty((0, 5), U8)):
        assert array.base is None
    assert empty((LARGE,), np.dtype(object))[0] is None


def test_what_is_not_wanted_any_more_goes() -> None:
    empty = ReusedMemory()

    def kept() -> int:
        return sum(len(block) for blocks in empty._free.values() for _, block in blocks)

    for _ in range(2):
        held = [empty((2 * LARGE,), U8) for _ in range(10)]
        del held
    empty((LARGE,), U8)
    assert kept() >= 20 * LARGE
    for _ in range(KEPT + 1):
        empty((LARGE,), U8)
    assert kept() <= 2 * LARGE
    empty.clear()
    assert kept() == 0


def test_what_is_held_when_it_is_cleared_stays() -> None:
    empty = ReusedMemory()
    held = empty((LARGE,), U8)
    held[...] = 7
    empty.clear()
    others = [empty((LARGE,), U8) for _ in range(3)]
    for other in others:
        other[...] = 1
    assert (held == 7).all()


def test_threads_never_get_the_same_memory() -> None:
    empty = ReusedMemory()
    failures: list[int] = []

    def work(mark: int) -> None:
        draw = random.Random(mark)
        held: list[tuple[np.ndarray[Any, Any], int]] = []
        for number in range(400):
            array = empty((LARGE + draw.randrange(3) * 4096,), U8)
            array[:64] = array[-64:] = value = (mark * 50 + number) % 251
            held.append((array, value))
            for one, wanted in held:
                if not ((one[:64] == wanted).all() and (one[-64:] == wanted).all()):
                    failures.append(number)
            while len(held) > draw.randrange(1, 5):
                held.pop(draw.randrange(len(held)))

    threads = [threading.Thread(target=work, args=(mark,)) for mark in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_forked_child_keeps_what_it_holds() -> None:
    empty = ReusedMemory()
    held = empty((LARGE,), U8)
    held[...] = 7
    go, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(go[0], 1)
        os.write(done[1], b"+" if (held == 7).all() else b"-")
        os._exit(0)
    del held
    empty((LARGE,), U8)[...] = 1
    os.write(go[1], b"x")
    assert os.read(done[0], 1) == b"+" and os.waitpid(pid, 0)
    for end in (*go, *done):
        os.close(end)


ROWS = Filled(40, LARGE // 8)


@pytest.mark.costly(2)
@pytest.mark.parametrize("source", [ROWS, ArrayDataset(np.stack([ROWS[i] for i in range(40)]))], ids=type)
@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_loader_uses_memory_again_and_what_the_user_holds_stays(pool: str, source: Any) -> None:
    with ShardedDataLoader(source, 4, pool=make_pool(pool)) as loader:
        seen: dict[int, int] = {}
        held = []
        for epoch in range(3):
            for number, batch in enumerate(loader):
                seen[batch.data_ptr()] = seen.get(batch.data_ptr(), 0) + 1
                if epoch == 1 and number % 3 == 0:
                    held.append((number, batch[1:3]))
                del batch
        assert max(seen.values()) > 2 and sum(seen.values()) == 30
        for number, rows in held:
            assert [row.unique().tolist() for row in rows] == [[4 * number + 1], [4 * number + 2]]
