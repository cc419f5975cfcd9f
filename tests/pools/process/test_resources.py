"""What a process pool owns: made once, given back once, and never while somebody may still write to it."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import multiprocess
import pytest

from sharded_loader.engine.board import IDLE, SAMPLE
from sharded_loader.pools.process import resources
from sharded_loader.pools.process.resources import ProcessWorker, WorkerResources

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes by signals")


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


def test_what_is_opened_is_opened_once_and_closed_once() -> None:
    before = open_descriptors()
    owner = WorkerResources(None)
    owner.wake()  # nobody waits yet
    owner.open(2)
    opened = owner.wake_reader, owner.board, owner.lifeline
    owner.open(2)
    assert (owner.wake_reader, owner.board, owner.lifeline) == opened and None not in opened
    owner.wake()
    assert owner.wake_reader.poll()
    for _ in range(2):
        owner.close()
        assert (owner.wake_reader, owner.board, owner.lifeline) == (None, None, None)
    assert open_descriptors() == before
    owner.open(1)
    owner.close()
    assert open_descriptors() == before


def test_what_a_worker_that_was_left_behind_may_write_to_is_not_used_again() -> None:
    owner = WorkerResources(None)
    slot = owner.arena.take(1 << 20)
    owner.free_slots(SimpleNamespace(slots={(0, 0): slot}, left_behind=True))  # type: ignore[arg-type]
    assert slot not in [owner.arena.take(1 << 20) for _ in range(10)]
    owner.close()


def test_a_slot_of_a_worker_that_is_over_is_free_if_it_is_not_lent() -> None:
    owner = WorkerResources(None)
    slot = owner.arena.take(1 << 20)
    worker: Any = SimpleNamespace(slots={(0, 0): slot, (0, 1): None}, left_behind=False)
    owner.free_slots(worker)
    assert worker.slots == {}
    assert owner.arena.take(1 << 20) == slot
    owner.close()


@pytest.mark.parametrize(
    ("counts", "told"), [([3, 5], 2), ([3, 3], 0), ([3, 1], 0), ([3, None], None), ([None, 5], None)]
)
def test_kills_for_memory_are_counted_from_the_start_on(
    counts: list[int | None], told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "oom_kills", iter(counts).__next__)
    owner = WorkerResources(None)
    owner.open(1)
    assert owner.oom_kills() == told
    owner.close()


class Link:
    """Nothing is sent to these workers."""

    def close(self) -> None:
        pass


@pytest.fixture
def sleeper() -> Any:
    process = multiprocess.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    process.start()
    return process


@unix
@pytest.mark.parametrize("pidfd", [True, False])
def test_a_worker_that_is_released_has_ended_and_says_how(
    sleeper: Any, pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.setattr(resources, "open_pidfd", lambda pid: None)
    worker = ProcessWorker(0, sleeper, Link())  # type: ignore[arg-type]
    assert not worker.has_ended() and not worker.is_busy()
    worker.board[SAMPLE] = 0
    assert worker.is_busy()
    sentinel = worker.sentinel
    worker.wait(0.0)
    for _ in range(2):
        worker.release()
        worker.kill()  # its pid may be another process's
        assert worker.has_ended() and worker.exitcode == -signal.SIGKILL
    with pytest.raises(OSError):
        os.fstat(sentinel)


@unix
def test_workers_get_time_to_end_by_themselves_and_busy_ones_less(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = WorkerResources(None)
    waited: list[float] = []

    class Handle(SimpleNamespace):
        def wait(self, timeout: float) -> None:
            waited.append(timeout)

        def is_busy(self) -> bool:
            return bool(self.board[SAMPLE] != IDLE) and self.is_alive()

        def is_alive(self) -> bool:
            return not self.killed

        def kill(self) -> None:
            self.killed = True
            order.append(self.name)

        def release(self) -> None:
            order.append(f"{self.name} released")

    monkeypatch.setattr(resources, "ProcessWorker", Handle)
    order: list[str] = []
    for name, at in (("idle", IDLE), ("busy", 0)):
        board = [0, 0, 0, at]
        owner.workers.append(
            Handle(  # type: ignore[arg-type]
                name=name,
                board=board,
                killed=False,
                was_killed=False,
                ended_by_close=False,
                slots={},
                left_behind=False,
                link=Link(),
            )
        )
    workers = list(owner.workers)
    owner.stop_workers()
    assert [worker.ended_by_close for worker in workers] == [True, True]
    assert order == ["busy", "idle", "idle released", "busy released"]
    assert len(waited) == 4 and max(waited[:2]) <= resources.BUSY_GRACE < resources.CLOSING_GRACE
    assert owner.workers == []
    owner.close()


@unix
def test_a_worker_that_was_killed_for_its_silence_is_given_up_after_a_while(
    sleeper: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = ProcessWorker(0, sleeper, Link())  # type: ignore[arg-type]
    assert not worker.is_over({worker.sentinel})
    monkeypatch.setattr(resources, "KILLED_GRACE", -1.0)
    assert not worker.is_over(set())  # nobody has killed it
    monkeypatch.setattr(worker.process, "kill", lambda: None)
    worker.kill()
    assert not worker.is_over(set())
    worker.hung = True
    assert worker.is_over(set())
    monkeypatch.undo()
    worker.release()
