"""What a process pool owns: made once, given back once, and never while a process may still write to it."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import os
import signal
import socket
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import multiprocess
import psutil
import pytest
from process_samples import open_descriptors, transport_of, zygote_process

from sharded_loader.engine.heartbeat import SAMPLE
from sharded_loader.engine.messages import Job
from sharded_loader.pools.process import start
from sharded_loader.pools.process import transport as transport_module
from sharded_loader.pools.process.link import Link
from sharded_loader.pools.process.pool import ProcessPool
from sharded_loader.pools.process.transport import ProcessTransport, ProcessWorker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills by signals")

JOB = Job([1, 2, 3], None, 0)


def test_what_is_opened_is_opened_once_and_closed_once() -> None:
    before = open_descriptors()
    owner = ProcessTransport(1, "fork", None)
    owner.wake()  # nobody waits yet
    owner.open()
    opened = owner.waker, owner.heartbeat, owner.parent_guard
    owner.open()
    assert (owner.waker, owner.heartbeat, owner.parent_guard) == opened and opened[1]
    owner.wake()
    assert owner.waker is not None and owner.waker[0].poll()
    for _ in range(2):
        owner.close()
        assert (owner.waker, owner.heartbeat, owner.parent_guard) == (None, None, None)
    assert open_descriptors() == before
    owner.open()
    owner.close()
    assert open_descriptors() == before


STEPS = {
    "before the zygote forks": (start.Zygote, "fork", True),
    "when it was asked": (start.Zygote, "_receive", True),
    "when it has forked": (start.Zygote, "fork", False),
    "before the process is known": (transport_module, "open_pidfd", True),
    "when it is known": (transport_module, "open_pidfd", False),
    "before the heartbeat": (transport_module, "heartbeat_in", True),
    "before it is told": (Link, "send_segment", True),
    "when it is told": (Link, "send_segment", False),
}


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is under /proc")
@pytest.mark.filterwarnings("ignore:the process that workers are forked from:RuntimeWarning")
@pytest.mark.parametrize(
    "step, event",
    [
        *itertools.product(STEPS, ["closed", "zygote killed"]),
        *itertools.product(["before the zygote forks", "before the heartbeat", "before it is told"], ["no memory"]),
    ],
)
def test_whatever_happens_in_a_launch_it_leaves_nothing(step: str, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, children = open_descriptors(), set(psutil.Process().children())
    supervisor = ProcessPool(2, start_method="fork", restarts=2)
    owner = transport_of(supervisor)
    supervisor._start(JOB)
    owner.make_zygote(JOB)
    zygote = zygote_process(supervisor)
    owner.workers[1].ready = True
    owner.workers[1].process.kill()
    owner.workers[1].wait(120.0)
    where, name, is_before = STEPS[step]
    no_memory = Mock(side_effect=MemoryError)
    happen = {"closed": supervisor.close, "zygote killed": zygote.kill, "no memory": no_memory}[event]
    known, happened = getattr(where, name), list[str]()

    def strike(*args: Any) -> Any:
        done = None if is_before else known(*args)
        if not happened:
            happened.append(name)
            happen()
        return known(*args) if is_before else done

    monkeypatch.setattr(where, name, strike)
    with contextlib.suppress(*{"closed": (Exception,), "no memory": (MemoryError,)}.get(event, ())):
        supervisor.replace(owner.workers[1])
    assert happened
    if event == "zygote killed":
        assert [one.is_alive() for one in owner.workers] == [True, True]
    supervisor.close()  # as at the end of the step
    gc.collect()  # heartbeats are mapped until then
    assert (open_descriptors(), set(psutil.Process().children()) - children) == (before, set())


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is under /proc")
def test_a_ctrl_c_while_the_system_is_asked_for_descriptors_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, struck = socket.recv_fds, list[bool]()

    def strike(*args: Any) -> Any:
        received = receive(*args)
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)
        return received

    before, owner = open_descriptors(), ProcessTransport(2, "fork", None)
    monkeypatch.setattr(socket, "recv_fds", strike)
    with pytest.raises(KeyboardInterrupt):
        owner.make_zygote(JOB)
    owner.close()
    assert open_descriptors() == before


@pytest.mark.skipif(sys.platform != "linux", reason="counts what is under /proc")
def test_a_process_that_cannot_be_forked_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    before, pool = open_descriptors(), ProcessPool(2, start_method="fork")
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(errno.EAGAIN, "too many processes")))
    with pytest.warns(RuntimeWarning, match="too many processes"):
        transport_of(pool).make_zygote(JOB)
    with pytest.raises(BlockingIOError):
        pool._start(JOB)
    assert open_descriptors() == before


def test_what_a_worker_that_was_left_behind_may_write_to_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = ProcessTransport(1, "fork", None)
    slot = owner.arena.take(1 << 20)
    reader, writer = os.pipe()
    stays = SimpleNamespace(pid=0, sentinel=reader, kill=lambda: None, close=lambda: None)
    worker = ProcessWorker(0, stays, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
    worker.slots[0, 0] = slot
    monkeypatch.setattr(transport_module, "KILLED_GRACE", 0.0)
    worker.release()
    owner.release(worker)
    os.close(reader)
    os.close(writer)
    assert slot not in [owner.arena.take(1 << 20) for _ in range(10)]
    owner.close()


def test_a_slot_of_a_worker_that_is_over_is_free_if_it_is_not_lent() -> None:
    owner = ProcessTransport(1, "fork", None)
    slot = owner.arena.take(1 << 20)
    worker: Any = SimpleNamespace(slots={(0, 0): slot, (0, 1): None})
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
    monkeypatch.setattr(transport_module, "oom_kills", iter(counts).__next__)
    owner = ProcessTransport(1, "fork", None)
    owner.open()
    assert owner.oom_kills() == told
    owner.close()


@pytest.fixture
def sleeper() -> ProcessWorker:
    """A process that sleeps, and is sent nothing."""
    process = multiprocess.get_context("fork").Process(target=signal.pause, daemon=True)
    process.start()
    return ProcessWorker(0, process, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_worker_that_is_released_has_ended_and_says_how(
    pidfd: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.setattr(transport_module, "open_pidfd", lambda pid: None)
    worker = request.getfixturevalue("sleeper")
    assert worker.is_alive() and not worker.is_busy()
    worker.heartbeat[SAMPLE] = 0
    assert worker.is_busy()
    sentinel = worker.sentinel
    worker.wait(0.0)
    for _ in range(2):
        worker.release()
        worker.kill()  # its pid may be another process's
        assert not worker.is_alive() and worker.exitcode == -signal.SIGKILL
    with pytest.raises(OSError):
        os.fstat(sentinel)


def test_a_worker_that_was_killed_for_its_silence_is_given_up_after_a_while(
    sleeper: ProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not sleeper.is_over()
    monkeypatch.setattr(transport_module, "KILLED_GRACE", -1.0)
    assert not sleeper.is_over()  # nobody has killed it
    monkeypatch.setattr(sleeper.process, "kill", lambda: None)
    sleeper.kill()
    assert not sleeper.is_over()
    sleeper.hung = True
    assert sleeper.is_over()
    monkeypatch.undo()
    sleeper.release()
