"""A worker that may have no more descriptors, and descriptors on their way: slower or a clear error, never a hang."""

from __future__ import annotations

import errno
import os
import socket
import sys
from typing import Any

import multiprocess
import numpy as np
import pytest
from conftest import PROCESS_POOLS, SPAWNED, covering
from memory_samples import SHAPE, allow_no_more, arena_of
from samples import Filled

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader
from sharded_loader.pools.process import link, worker
from sharded_loader.pools.process.link import CANCEL, DEATH, Link

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="descriptors of workers: Linux")


@covering(1, method=PROCESS_POOLS, memory=["memfd", "named"])
@pytest.mark.costly
def test_a_worker_that_can_map_no_segment_sends_batches_through_the_pipe(
    method: str, memory: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", memory)
    pool = ProcessPool(2, start_method=method, worker_init_fn=allow_no_more)
    with ShardedDataLoader(Filled(160), 4, pool=pool) as loader:
        for number, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [4 * number + i for i in range(4)] and batch.shape == (4, SHAPE // 4)
            assert arena_of(loader).lent == 0
        assert number == 39 and len(arena_of(loader).segments) == 1  # the trainer had one
    told = [line for line in capfd.readouterr().err.splitlines() if line]
    assert method == "forkserver" or 1 <= len(told) <= 2  # once by each worker (a forkserver's output is elsewhere)
    assert all("through the pipe" in line and "of open files is reached" in line for line in told)


take = Link.take_descriptor


def refuse(end: Link) -> int:
    os.close(take(end))
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_worker_that_gets_no_descriptor_at_all_reads_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Link, "take_descriptor", refuse)
    with ShardedDataLoader(Filled(160), 4, pool=ProcessPool(2, start_method="fork")) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 160, 4))


@pytest.mark.slow
@SPAWNED
def test_a_worker_that_cannot_map_its_dataset_says_why(method: str) -> None:
    data = ArrayDataset(np.zeros(100_000))
    pool = ProcessPool(2, start_method=method, worker_init_fn=allow_no_more)
    with ShardedDataLoader(data, 1000, pool=pool) as loader:
        assert next(iter(loader)).shape == (1000,)
        loader.refresh()
        with pytest.raises(OSError, match=r"dataset cannot be mapped: the limit of \d+ of open files .*ulimit -n"):
            list(loader)


def test_a_default_timeout_of_sockets_is_the_user_s_own_affair() -> None:
    def init(number: int) -> None:
        socket.setdefaulttimeout(0.01)

    with ShardedDataLoader(Filled(160), 4, pool=ProcessPool(1, start_method="fork", worker_init_fn=init)) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 160, 4))


def test_too_many_descriptors_on_their_way_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    refused = []
    real = link.send_descriptors

    def send_descriptors(*arguments: Any) -> int:
        if len(refused) < 3:
            refused.append(arguments)
            raise OSError(errno.ETOOMANYREFS, "Too many references: cannot splice")
        return real(*arguments)

    monkeypatch.setattr(link, "send_descriptors", send_descriptors)
    with ShardedDataLoader(Filled(160), 4, pool=ProcessPool(1, start_method="fork")) as loader:
        assert [int(batch[0, 0]) for batch in loader] == list(range(0, 160, 4))
    assert len(refused) == 3


def test_a_worker_that_may_open_nothing_from_the_start_lives_and_reads() -> None:
    """The pipe that ends it with the trainer cannot be taken either: that is no reason to end."""
    ours, theirs = multiprocess.Pipe(duplex=True)
    trainer = Link(ours)
    end = Link(theirs, blocks=True)
    reader = worker.WorkerThreads(end, 0, 1)
    read, write = os.pipe()
    try:
        trainer.send(DEATH, descriptor=read)
        trainer.send(CANCEL, 7)
        trainer.close()  # end-of-file after that
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Link, "take_descriptor", refuse)
            reader._finished.set()
            reader.receive()
        assert reader._reader.cancelled == {7}
    finally:
        end.close()
        os.close(read)
        os.close(write)
