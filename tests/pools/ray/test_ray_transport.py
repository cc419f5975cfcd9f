"""Which actor reads a task, and what is known of one that has died. Without Ray."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

from sharded_loader import WorkerDiedError
from sharded_loader.engine.heartbeat import IN_BATCH, UNUSED
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.ray import cluster
from sharded_loader.ray.actor import Begun
from sharded_loader.ray.cluster import check_wanted
from sharded_loader.ray.pool import RayPool
from sharded_loader.ray.transport import ActorWorker, Call, RayTransport

NODE, HOST = "node", "10.0.0.1"
KILLED = Exception("Worker exit type: SYSTEM_ERROR Worker exit detail: It exited.")


class Transport(RayTransport):
    """Actors that are only pretended: ready at once, with nothing behind them."""

    def launch(self, number: int, job: Job) -> ActorWorker:
        worker = ActorWorker(number, object(), self.listen)
        worker.begun, worker.ready = Begun(70 + number, NODE, HOST), True
        return worker

    def _begin(self, worker: ActorWorker) -> None:
        pass


@pytest.fixture
def transport(monkeypatch: pytest.MonkeyPatch) -> Transport:
    errors = types.SimpleNamespace(ActorUnavailableError=ConnectionError)
    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(exceptions=errors, is_initialized=lambda: False))
    monkeypatch.setattr(cluster, "alive", lambda: {NODE})
    monkeypatch.setattr(cluster, "session", lambda: "session")
    monkeypatch.setattr(cluster, "put", lambda value, parts: value)
    monkeypatch.setattr("sharded_loader.ray.cluster.check_installed", lambda: None)
    monkeypatch.setattr(Transport, "listen", lambda *_: None)
    return Transport(2, check_wanted(0, {}, None, "SPREAD"), 600)


def supervised(transport: Transport, restarts: int, timeout: float | None = None) -> RayPool:
    pool = RayPool(transport.num_workers, restarts=restarts, timeout=timeout)
    pool._transport = transport
    pool._start(Job([1], None, 0))
    return pool


def task(seq: int, lane: int | None = None) -> Task:
    return Task(0, seq, 0, 0, ([10 * seq, 10 * seq + 1],), False, lane=lane)


def give(worker: ActorWorker, *seqs: int, alone: bool = False) -> None:
    tasks = [task(seq) for seq in seqs]
    worker.calls.append(Call(tasks, alone))
    worker.tasks.update({(0, seq): task(seq) for seq in seqs})


def chosen(transport: Transport, lane: int) -> int:
    worker = transport.choose(task(0, lane), 1, alone=False)
    assert worker is not None
    return worker.number


# -- tasks -----------------------------------------------------------------------------------------------------


def test_a_lane_stays_with_its_actor_and_an_actor_that_comes_gets_its_share(transport: Transport) -> None:
    supervised(transport, 3)
    first, second = transport.workers
    second.ready = False
    assert [chosen(transport, lane) for lane in range(4)] == [0] * 4
    second.ready = True
    transport.has_begun(second, Begun(71, NODE, HOST))
    assert sorted(chosen(transport, lane) for lane in range(4)) == [0, 0, 1, 1]
    first.ready = False
    assert [chosen(transport, lane) for lane in range(4)] == [1] * 4
    second.ready = False
    assert transport.choose(task(0, 0), 1, alone=False) is None


def test_a_task_that_travels_alone_waits_for_an_actor_that_has_nothing(transport: Transport) -> None:
    supervised(transport, 3)
    first, second = transport.workers
    give(first, 1, 2)
    assert transport.choose(task(3), 4, alone=True) is second
    give(second, 4, alone=True)
    assert transport.choose(task(3), 4, alone=True) is None
    assert transport.choose(task(3), 4, alone=False) is first
    assert transport.choose(task(3, lane=1), 4, alone=False) in (None, first)


def test_a_call_that_has_ended_takes_its_tasks_along(transport: Transport) -> None:
    supervised(transport, 3)
    worker = transport.workers[0]
    give(worker, 1, 2)
    give(worker, 3)
    assert [one.seq for one in worker.end_call(worker.calls[0])] == [1, 2]
    assert list(worker.tasks) == [(0, 3)]
    assert worker.end_call("begin") == []


# -- fetching ahead --------------------------------------------------------------------------------------------


class Actor:
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        call = types.SimpleNamespace(remote=lambda *given: self.calls.append((name, *given)))
        call.options = lambda concurrency_group: call
        return call


def test_one_actor_of_each_node_fetches_ahead_and_another_one_if_it_dies(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    position: list[int | None] = [0]
    transport.num_workers = 3
    supervisor = supervised(transport, 3)
    for worker in transport.workers:
        worker.actor = Actor()
    first, second, elsewhere = transport.workers
    elsewhere.begun = Begun(73, "another node", HOST)
    transport.ahead.follow((7, "the order", lambda: position[0]))

    def sent(worker: ActorWorker) -> list[tuple[Any, ...]]:
        transport.send(worker, [(task(1), ())], alone=False)
        calls, worker.actor.calls = worker.actor.calls, []
        return [call if call[0] != "read" else call[2:] for call in calls]

    assert sent(second) == [("follow", 7, 0, "the order"), (7, 0)]
    assert sent(first) == [()]  # it reads
    assert sent(elsewhere) == [("follow", 7, 0, "the order"), (7, 0)]
    position[0] = 5
    assert sent(second) == [(7, 5)]
    supervisor.replace(second, KILLED)
    assert sent(first) == [("follow", 7, 5, "the order"), (7, 5)]
    transport.ahead.leave(6, transport.workers)  # another run
    assert first.actor.calls == []
    transport.ahead.leave(7, transport.workers)
    assert first.actor.calls == elsewhere.actor.calls == [("cancel", 7)]
    first.actor.calls = []
    assert sent(first) == [()]


def test_an_order_that_cannot_be_sent_is_told_once_and_the_batches_come(
    transport: Transport, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def put(value: Any, parts: Any) -> None:
        raise TypeError("it has a lock")

    supervised(transport, 3)
    monkeypatch.setattr(cluster, "put", put)
    worker = transport.workers[0]
    worker.actor = Actor()
    transport.ahead.follow((7, "the order", lambda: 0))
    for _ in range(2):
        transport.send(worker, [(task(1), ())], alone=False)
    assert [call[0] for call in worker.actor.calls] == ["read", "read"]
    assert [record.message.count("it has a lock") for record in caplog.records] == [1]


# -- last words ------------------------------------------------------------------------------------------------


def test_what_a_dead_actor_read_is_known_if_it_read_one_task_alone(transport: Transport) -> None:
    supervised(transport, 3)
    worker = transport.workers[0]
    assert transport.explain_death(worker, KILLED).heartbeat == UNUSED
    give(worker, 4, 5)
    death = transport.explain_death(worker, KILLED)
    assert (death.heartbeat, death.is_of_machine, death.is_final) == (None, False, False)
    assert str(death) == "worker 0 (pid 70 on 10.0.0.1) died: SYSTEM_ERROR: It exited."
    worker.end_call(worker.calls[0])
    give(worker, 4, alone=True)
    assert transport.explain_death(worker, KILLED).heartbeat == (0, 4, 0, IN_BATCH)


def test_a_death_with_the_node_is_known_as_such(transport: Transport, monkeypatch: pytest.MonkeyPatch) -> None:
    supervised(transport, 3)
    worker = transport.workers[0]
    assert transport.explain_death(worker, Exception("its node has died")).is_of_machine
    assert transport.explain_death(worker, ConnectionError()).is_of_machine
    monkeypatch.setattr(cluster, "alive", set)
    assert transport.explain_death(worker, KILLED).is_of_machine


def test_a_batch_that_kills_is_found_among_its_group_and_named(transport: Transport) -> None:
    supervisor = supervised(transport, 2)
    give(transport.workers[0], 3, 4)
    assert supervisor.replace(transport.workers[0], KILLED) == []
    assert supervisor.deaths.crash_suspects == {(0, 3), (0, 4)}
    for number in (0, 1):
        give(transport.workers[number], 4, alone=True)
        results = supervisor.replace(transport.workers[number], KILLED)
        assert len(results) == number
    error = results[0].error
    assert isinstance(error, WorkerDiedError)
    assert (error.batch, error.index, error.exitcode) == (4, None, None)
    assert "died: SYSTEM_ERROR: It exited.. It was reading the batch, in epoch 0, batch 4" in str(error)
    assert not any(one.is_suspect for one in supervisor.requeued)


def test_an_actor_that_hung_was_in_the_task_that_it_has_said(transport: Transport) -> None:
    supervisor = supervised(transport, 1, 2.0)
    worker = transport.workers[0]
    give(worker, 3, 4)
    worker.hung, worker.heartbeat = True, [0, 4, 0, 1]
    [given_up] = supervisor.replace(worker, KILLED)
    assert (given_up.seq, given_up.error.index) == (4, 41)  # type: ignore[union-attr]


def unborn(transport: Transport) -> Any:
    for worker in transport.workers:
        worker.ready, worker.begun = False, None
    return transport.workers[0]


def test_actors_that_cannot_be_made_break_the_pool_with_the_remedy(transport: Transport) -> None:
    supervisor = supervised(transport, 3)
    error = Exception("ModuleNotFoundError: No module named 'sharded_loader'")
    error.actor_init_failed = True  # type: ignore[attr-defined]
    with pytest.raises(PoolBroken) as caught:
        supervisor.replace(unborn(transport), error)
    assert "py_modules" in "\n".join(caught.value.error.__notes__)


def test_others_read_without_an_actor_that_cannot_be_made(transport: Transport) -> None:
    supervisor = supervised(transport, 1)
    first, second = transport.workers
    first.ready = False
    assert supervisor.replace(first, KILLED) == []
    assert (first.failed, transport.workers) == (True, [first, second])
