"""Weeks of training: what comes with every epoch goes with it, and numbers are wide enough."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from typing import Any

import multiprocess
import pytest
from conftest import make_pool
from inside import pipeline_of

from sharded_loader import ShardedDataLoader, ThreadPool
from sharded_loader.engine.messages import _REPLY, pack_reply
from sharded_loader.engine.pool import Pool
from sharded_loader.memory.codec import Encoded
from sharded_loader.pools.process.link import CANCEL, Link
from sharded_loader.pools.process.worker import WorkerThreads


def test_threads_remember_only_the_runs_that_are_alive() -> None:
    with ShardedDataLoader(range(8), 2, pool=ThreadPool(1)) as loader:
        for _ in range(5):
            for _ in loader:
                break
        held = iter(loader)
        next(held)
        (shared,) = loader.pool._running  # type: ignore[attr-defined]
        assert shared.live == {held.run.number}


def test_a_worker_forgets_a_cancelled_run_when_its_tasks_are_dropped() -> None:
    ours, theirs = (Link(end, blocks=True) for end in multiprocess.Pipe())
    worker = WorkerThreads(theirs, 0, 1)
    worker._finished.set()
    for run in range(5):
        ours.send(CANCEL, run)
    ours.close()
    worker.run(None)  # until the pipe's end
    theirs.close()
    assert not worker._reader.cancelled


def test_an_iterator_may_be_collected_while_another_one_is_dropped(new_pool: Callable[[], Pool]) -> None:
    pool = new_pool()
    with ShardedDataLoader(range(40), 2, prefetch=2, pool=pool) as loader:
        first, second = iter(loader), iter(loader)
        next(first), next(second)
        pipeline_of(loader).runs[first.run.number].window.append(Collects())  # type: ignore[arg-type]
        second.itself = second  # type: ignore[attr-defined]
        gc.disable()
        try:
            del second
            pipeline_of(loader).drop(first.run.number)
        finally:
            gc.enable()
        assert not pipeline_of(loader).dropped
        assert len(list(loader)) == 20


class Collects:
    """The collector comes when this goes."""

    begun = None

    def __del__(self) -> None:
        gc.collect()


def test_a_reply_may_hold_more_than_four_gigabytes() -> None:
    class Huge(bytes):
        def __len__(self) -> int:
            return 5 << 30

    reply = pack_reply(1, 2, 3, Encoded(Huge(), (), ()))
    assert _REPLY.unpack_from(reply)[-1] == 5 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inline", "thread", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_signal_handler_may_ask_how_far_it_is_at_any_line(name: str) -> None:
    """As one for SIGUSR1 does, which prints the counts, or for SIGTERM, which saves the state."""
    asked = 0

    def ask(frame: Any, event: str, argument: Any) -> Any:
        nonlocal asked
        if event == "line" and not asking:
            asked += 1
            asking.append(True)
            loader.stats(), loader.state_dict(), repr(loader), len(loader)
            asking.clear()
        return ask if "sharded_loader" in frame.f_code.co_filename else None

    def loop() -> None:
        sys.settrace(ask)
        for batch in loader:
            got.append(batch.tolist())
        sys.settrace(None)

    asking: list[bool] = []
    got: list[list[int]] = []
    with ShardedDataLoader(range(8), 2, pool=make_pool(name)) as loader:
        thread = threading.Thread(target=loop, daemon=True)
        thread.start()
        thread.join(300)
        assert not thread.is_alive()
    assert got == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert asked > 200
