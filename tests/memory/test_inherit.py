"""Locks and shared values of ``multiprocessing`` in a dataset are those of the main process, in spawned workers too."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys

import pytest
from conftest import ahead
from counting import Counting

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.memory.publish import Inherited, needs_inheritance, reduced_lock

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="descriptors are handles there")

# multiprocessing keeps the memory of its first value, and a process that looks after names, until the program ends.
KEPT = multiprocessing.get_context("spawn").Value("i", 0)


@pytest.mark.slow
def test_a_shared_value_counts_in_all_spawned_workers() -> None:
    dataset = Counting("spawn")
    with ahead(ShardedDataLoader(dataset, 3, pool=ProcessPool(2, start_method="spawn")), False) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
        assert dataset.count.value == 12
        assert len(list(loader)) == 4, "the workers live on"
    assert dataset.count.value == 24


@pytest.mark.slow
def test_a_worker_that_replaces_a_killed_one_shares_the_value_too() -> None:
    dataset = Counting("spawn")
    pool = ProcessPool(1, start_method="spawn")
    with ahead(ShardedDataLoader(dataset, 3, pool=pool), False) as loader:
        list(loader)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert len(list(loader)) == 4
        assert dataset.count.value >= 24


def test_a_forkserver_cannot_pass_them_on_and_the_error_says_so() -> None:
    dataset = Counting("spawn")
    with (
        ShardedDataLoader(dataset, 3, pool=ProcessPool(1, start_method="forkserver")) as loader,
        pytest.raises(TypeError, match="through inheritance"),
    ):
        next(iter(loader))


def test_descriptors_are_kept_until_they_are_closed() -> None:
    reader, writer = os.pipe()
    try:
        with Inherited() as inherited:
            number = inherited.duplicate_for_child(reader)
            assert inherited.DupFd(number).detach() == number
        assert inherited.fds == [number]
        os.fstat(number)
        inherited.close()
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(number)
    finally:
        os.close(reader)
        os.close(writer)


def test_outside_of_a_block_nothing_is_pickled_in_that_way() -> None:
    assert reduced_lock(object()) is NotImplemented
    with Inherited():
        assert reduced_lock(object()) is NotImplemented, "an object of no kind that multiprocessing knows"


def test_only_errors_of_multiprocessing_ask_for_inheritance() -> None:
    asked = RuntimeError("Synchronized objects should only be shared between processes through inheritance")
    wrapped = TypeError("cannot be pickled")
    wrapped.__cause__ = asked
    errors = (asked, wrapped, ValueError("no"), None)
    assert list(map(needs_inheritance, errors)) == [True, True, False, False]
