"""Several threads, each with its own loops over one loader: every loop is a whole epoch with its own values."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from sharded_loader import ArrayDataset, InlinePool, ProcessPool, ShardedDataLoader
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process import transport

THREADS = 4


@pytest.fixture(autouse=True)
def threads_that_take_turns_often() -> Iterator[None]:
    """A thread may lose its turn between any two lines, as on a busy machine with many cores."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def in_threads(work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` returns for the number of each thread, or raises."""
    found: list[Any] = [None] * THREADS
    begin = threading.Barrier(THREADS)

    def run(number: int) -> None:
        begin.wait()
        try:
            found[number] = work(number)
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def loops_of(pool: Pool) -> int:
    return 400 if isinstance(pool, InlinePool) else 40


@pytest.mark.costly
def test_threads_with_loops_of_their_own_have_whole_epochs(pool: Pool) -> None:
    count = loops_of(pool)
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:

        def work(number: int) -> int:
            for _ in range(count):
                assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]
            return count

        assert in_threads(work) == [count] * THREADS


@pytest.mark.costly
def test_each_loop_of_each_thread_is_an_epoch_of_its_own(pool: Pool) -> None:
    count = loops_of(pool) // 4
    data = ArrayDataset(np.arange(12))
    with ShardedDataLoader(data, 4, shuffle=True, seed=3) as alone:
        epochs = [[batch.tolist() for batch in alone] for _ in range(count * THREADS)]
    with ShardedDataLoader(data, 4, shuffle=True, seed=3, pool=pool) as loader:
        found = in_threads(lambda number: [[batch.tolist() for batch in loader] for _ in range(count)])
    assert [one for one in found if isinstance(one, BaseException)] == []
    assert sorted(epoch for loops in found for epoch in loops) == sorted(epochs)


@pytest.mark.costly
def test_threads_that_break_off_and_threads_that_go_on_do_not_disturb_each_other(pool: Pool) -> None:
    count = loops_of(pool)
    with ShardedDataLoader(range(12), 2, pool=pool, prefetch=3) as loader:

        def work(number: int) -> int:
            for turn in range(count):
                got = []
                for batch in loader:
                    got += batch.tolist()
                    if number % 2 and len(got) > turn % 10:
                        break
                assert got == list(range(len(got))) and (number % 2 or len(got) == 12), got
            return count

        assert in_threads(work) == [count] * THREADS


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
def test_a_fork_while_other_threads_make_pools_keeps_what_is_lent() -> None:
    """What the library does before a fork is done although the set of pools changes meanwhile."""
    done = threading.Event()

    def make_pools() -> None:
        while not done.is_set():
            _ = [ProcessPool(1) for _ in range(50)]

    makers = [threading.Thread(target=make_pools) for _ in range(2)]
    for maker in makers:
        maker.start()
    try:
        for _ in range(2500):
            transport._before_fork()
    finally:
        done.set()
        for maker in makers:
            maker.join()
