"""Which actor reads a task, what it does with it, and what is known of one that has died. Without Ray."""

from __future__ import annotations

import pickle
import queue
import sys
import threading
import types
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from sharded_loader import RayPool, ShardedDataLoader, WorkerDiedError
from sharded_loader.engine.heartbeat import IDLE, IN_BATCH, UNUSED
from sharded_loader.engine.messages import Job, Result, Task, unpack_reply
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.memory.codec import decode, decode_error, encode
from sharded_loader.pools import task_reader
from sharded_loader.pools.supervised import decode_result
from sharded_loader.ray import actor, cluster
from sharded_loader.ray.actor import Begun, LoaderActor
from sharded_loader.ray.cluster import Lent, cause_of, check_wanted, stop, stop_from_anywhere
from sharded_loader.ray.transport import ActorWorker, RayTransport
from sharded_loader.sampling.epoch import Ahead

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
    worker.is_alone = alone
    worker.tasks.update({(0, seq): task(seq) for seq in seqs})


def chosen(transport: Transport, lane: int) -> int:
    worker = transport.choose(task(0, lane), 1, alone=False)
    assert worker is not None
    return worker.number


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
    assert [one.seq for one in worker.end_call([task(1), task(2)])] == [1, 2]
    assert list(worker.tasks) == [(0, 3)]
    assert worker.end_call("begin") == []


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


def test_what_a_dead_actor_read_is_known_if_it_read_one_task_alone(transport: Transport) -> None:
    supervised(transport, 3)
    worker = transport.workers[0]
    assert transport.explain_death(worker, KILLED).heartbeat == UNUSED
    give(worker, 4, 5)
    death = transport.explain_death(worker, KILLED)
    assert (death.heartbeat, death.is_of_machine, death.is_final) == (None, False, False)
    assert str(death) == "worker 0 (pid 70 on 10.0.0.1) died: SYSTEM_ERROR: It exited."
    worker.end_call([task(4), task(5)])
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


def test_a_batch_that_ray_cannot_bring_is_an_error_with_the_size_of_the_object_store(
    transport: Transport, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor, worker = supervised(transport, 3), transport.workers[0]
    monkeypatch.setattr(cluster, "is_of_call", lambda error: True)
    monkeypatch.setattr(cluster, "store_bytes", lambda: 1000)
    give(worker, 3)
    future: Future[Any] = Future()
    future.set_exception(MemoryError("full"))
    transport.events.append((worker, [task(3)], future))
    [result] = supervisor.wait(block=False)
    assert isinstance(result.error, MemoryError) and result.seq == 3 and worker.tasks == {}
    notes = "\n".join(result.error.__notes__)
    assert "in epoch 0, batch 3" in notes and "The object store of this node has 1,000 bytes" in notes


def test_actors_that_cannot_be_made_break_the_pool_with_the_remedy(transport: Transport) -> None:
    supervisor = supervised(transport, 3)
    for worker in transport.workers:
        worker.ready, worker.begun = False, None
    error = Exception("ModuleNotFoundError: No module named 'sharded_loader'")
    error.actor_init_failed = True  # type: ignore[attr-defined]
    with pytest.raises(PoolBroken) as caught:
        supervisor.replace(transport.workers[0], error)
    assert "py_modules" in "\n".join(caught.value.error.__notes__)


def test_others_read_without_an_actor_that_cannot_be_made(transport: Transport) -> None:
    supervisor = supervised(transport, 1)
    first, second = transport.workers
    first.ready = False
    assert supervisor.replace(first, KILLED) == []
    assert (first.failed, transport.workers) == (True, [first, second])


# -- an actor reads groups of tasks into one memory; here it is a class like any other ---------------------------------


class Images:
    """Sample i is 4 KB of i; sample 13 cannot be read; sample 14 writes."""

    def __init__(self) -> None:
        self.rows = np.repeat(np.arange(50, dtype=np.uint8)[:, None], 4096, axis=1)

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        if index == 13:
            raise KeyError("thirteen")
        if index == 14:
            self.rows[0] = 1
        return self.rows[index]


@pytest.fixture(autouse=True)
def this_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reader, "_tell_torch", lambda *_: None)
    monkeypatch.setattr(actor, "here", lambda: ("node", "10.0.0.1"))


def begun(dataset: Any = None) -> LoaderActor:
    made = LoaderActor(1, 2, 1)
    encoded = encode(Job(dataset or Images(), None, 0))
    buffers = [np.frombuffer(bytes(buffer), np.uint8) for buffer in encoded.buffers]  # read-only, as Ray's
    said = made.begin((encoded.pickled, buffers))
    assert (said.failure, said.node, said.host) == (None, "node", "10.0.0.1")
    return made


def sent(seq: int, *indices: int) -> tuple[int, int, tuple[Any, ...]]:
    return 0, seq, Task(0, seq, 0, 0, (list(indices),), False).fields


def read(made: LoaderActor, *tasks: tuple[int, int, tuple[Any, ...]]) -> tuple[list[Result], Any]:
    replies, places, memory, rest = made.read(pickle.dumps(tasks))
    others = iter(rest)
    buffers = (next(others) if at < 0 else memory[at : at + nbytes].copy() for at, nbytes in places)
    results, content = [], memoryview(replies)
    while len(content):
        run, seq, _, count, pickled, content, _ = unpack_reply(content)
        results.append(decode_result(run, seq, pickled, [next(buffers) for _ in range(count)], None))
    return results, memory


def test_the_batches_of_a_group_lie_in_one_memory_that_is_used_again() -> None:
    made = begun()
    read(made, sent(0, 1, 2))  # what a batch needs is learned
    assert made.where() == [0, 0, 0, IDLE]
    results, memory = read(made, sent(1, 3, 4), sent(2, 5, 6))
    assert [result.batch[:, 0].tolist() for result in results] == [[3, 4], [5, 6]]
    assert memory.nbytes == 4 * 4096
    again, same = read(made, sent(3, 7, 8), sent(4, 9, 10))
    assert [result.batch[:, 0].tolist() for result in again] == [[7, 8], [9, 10]]
    assert same.ctypes.data == memory.ctypes.data


def test_an_error_is_its_batch_s_own_and_who_writes_into_an_array_of_the_dataset_is_told_that_it_is_shared() -> None:
    results, _ = read(begun(), sent(0, 1), sent(1, 13), sent(2, 14), sent(3, 2))
    notes = ["\n".join(result.error.__notes__) if result.error else "" for result in results]
    assert [type(result.error) for result in results] == [type(None), KeyError, ValueError, type(None)]
    assert "on 10.0.0.1" in notes[1] and "all workers of a node share" in notes[2]


def test_the_tasks_of_a_cancelled_run_are_answered_and_not_read() -> None:
    made = begun()
    made.cancel(0)
    (result,), _ = read(made, sent(0, 13))
    assert result.error is None and result.batch is None


class Shards(Images):
    """Notes what it is told of the order."""

    told: Any = None

    def follow(self, *told: Any) -> None:
        Shards.told = told


def test_a_dataset_that_fetches_ahead_is_told_the_order_and_how_far_the_user_is() -> None:
    order_of_all = ShardedDataLoader(range(6), 2)._epochs.order
    encoded = encode(Ahead(order_of_all.epoch(0), order_of_all.epoch(1)))
    made, order = begun(Shards()), (encoded.pickled, encoded.buffers)
    made.follow(7, 2, order)
    batches, position, later = Shards.told
    assert (batches(2).tolist(), later(0).tolist(), later(9)) == ([4, 5], [0, 1], None)
    assert position() == 2
    made.read(pickle.dumps([sent(3, 1)]), 7, 3)
    assert position() == 3
    made.read(pickle.dumps([sent(4, 1)]), 6, 9)  # of an order that is not read any more
    assert position() == 3
    made.follow(8, 0, order)
    assert (position(), Shards.told[1]()) == (None, 0)
    made.cancel(8)
    assert Shards.told[1]() is None
    made.follow(8, 0, order)  # it came behind its end
    assert Shards.told[1]() is None


def test_a_module_that_the_node_lacks_is_told_with_the_remedy() -> None:
    class Lost:
        def __reduce__(self) -> Any:
            return __import__, ("a_module_that_is_not_there",)

    encoded = encode(Job(Lost(), None, 0))
    said = LoaderActor(0, 1, 1).begin((encoded.pickled, []))
    assert said.failure is not None
    error = decode_error(decode(said.failure))
    assert isinstance(error, ModuleNotFoundError)
    assert "runtime_env" in "\n".join(error.__notes__)


def test_the_cause_of_a_death_is_one_line() -> None:
    said = "x\n\tWorker exit type: SYSTEM_ERROR Worker exit detail: It exited.\nSome common causes include: (1) many"
    assert cause_of(Exception(said)) == "SYSTEM_ERROR: It exited."
    assert cause_of(Exception("its node has died")) == "its node has died"
    lacking = cause_of(Exception("word " * 1000 + "ModuleNotFoundError: No module named 'torch'"))
    assert len(lacking) < 410 and lacking.endswith("'torch'")


@pytest.mark.parametrize("runs", [True, False])
def test_actors_are_stopped_once_and_a_ray_that_was_shut_down_is_not_started_again(
    runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
    ray = types.SimpleNamespace(is_initialized=lambda: runs)
    ray.kill = lambda actor: killed.put((actor, threading.current_thread()))
    monkeypatch.setitem(sys.modules, "ray", ray)
    actors, main = ["a", "b"], threading.current_thread()
    stop(actors, "a")
    assert actors == ["b"] * runs and (not runs or killed.get(block=False) == ("a", main))
    stop(actors)
    assert actors == [] and (not runs or killed.get(block=False) == ("b", main)) and killed.empty()
    if runs:  # in a thread of Ray's own nobody waits for Ray
        monkeypatch.setattr(cluster, "is_thread_of_others", lambda thread: thread is main)
        stop_from_anywhere(["c"])
        assert (said := killed.get(timeout=300))[0] == "c" and said[1] is not main


# -- what lies in Ray's object store is lent out writable, and counted while it is held -------------------------------


def stored() -> np.ndarray[Any, Any]:
    """Eight bytes as Ray gives them: read-only."""
    memory = np.arange(8, dtype=np.uint8)
    memory.setflags(write=False)
    return memory


def test_a_batch_is_not_copied_can_be_written_to_and_its_last_view_gives_the_memory_back() -> None:
    memory, lent = stored(), Lent(100)
    batch = lent.take(memory)
    batch[2] = 7
    assert memory[2] == 7 and np.shares_memory(batch, memory)
    view = batch[2:4].reshape(1, 2)
    del batch
    assert lent.nbytes == 8
    del view
    assert lent.nbytes == 0


def test_past_the_bound_batches_are_copied_and_where_a_device_copies_all_lie_in_its_memory() -> None:
    lent, memory = Lent(12), stored()
    first, second = lent.take(memory), lent.take(memory)
    assert np.shares_memory(first, memory) and not np.shares_memory(second, memory)
    assert second.tolist() == memory.tolist() and lent.nbytes == 8
    lent, given = Lent(100), np.empty(8, np.uint8)
    lent.empty, lent.copies_all = lambda shape, dtype: given, True
    assert lent.take(memory) is given and given.tolist() == memory.tolist()
    assert lent.nbytes == 0


# -- arguments ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_if_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "check_installed", lambda: None)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"num_workers": 0}, ValueError, "at least 1"),
        ({"num_cpus": "two"}, TypeError, "num_cpus is 'two'"),
        ({"num_cpus": -1}, ValueError, "num_cpus is -1"),
        ({"num_cpus": True}, TypeError, "num_cpus is True"),
        ({"resources": ["reader"]}, TypeError, "resources is"),
        ({"runtime_env": "."}, TypeError, "runtime_env is"),
        ({"scheduling_strategy": None}, TypeError, "SPREAD"),
        ({"address": "ray://head:10001"}, ValueError, 'Ray Client.*address="auto"'),
        ({"address": 7}, TypeError, "address is 7"),
        ({"address": b"auto"}, TypeError, "address is b'auto'"),
        ({"restarts": -1}, ValueError, "restarts"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"start_timeout": None}, TypeError, "start_timeout"),
        ({"start_timeout": -1}, ValueError, "timeout"),
        ({"max_bytes": "1 apple"}, ValueError, "max_bytes"),
        ({"worker_init_fn": 7}, TypeError, "worker_init_fn"),
    ],
)
def test_a_bad_argument_is_named(as_if_installed: None, options: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        RayPool(**{"num_workers": 2, **options})


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install ray"):
        RayPool(2)


def test_a_pool_shows_what_it_was_made_with_and_one_that_is_sent_has_not_been_started(as_if_installed: None) -> None:
    assert repr(RayPool(2)) == "RayPool(2)"
    pool = RayPool(3, num_cpus=0.5, resources={"reader": 1}, restarts=5, timeout=9)
    twin = pickle.loads(pickle.dumps(pool))
    shown = "RayPool(3, num_cpus=0.5, resources=<dict of length 1>, restarts=5, timeout=9.0)"
    assert repr(twin) == repr(pool) == shown and twin.resources == {"reader": 1} and not twin.started


def test_the_word_ray_makes_a_pool_of_that_size(as_if_installed: None) -> None:
    with ShardedDataLoader(range(8), 2, num_workers=3, pool="ray", timeout=7) as loader:
        assert isinstance(loader.pool, RayPool)
        assert (loader.pool.num_workers, loader.pool.timeout, loader.pool.workers) == (3, 7.0, ())


def test_a_scheduling_strategy_is_always_given_and_ray_repeats_nothing() -> None:
    options = check_wanted(0.5, {"reader": 1}, None, "SPREAD")
    assert options["scheduling_strategy"] == "SPREAD"
    assert options["max_restarts"] == options["max_task_retries"] == 0
    assert (options["num_cpus"], options["resources"]) == (0.5, {"reader": 1})
    assert "runtime_env" not in options
    assert check_wanted(1, {}, {"working_dir": "."}, "SPREAD")["runtime_env"] == {"working_dir": "."}
