"""Workers are started, replaced and given up by one set of rules: the rules alone, and over pretended workers."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from injection import HANDLERS

from sharded_loader import WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.errors import describe_exit
from sharded_loader.base.interrupts import note_handlers
from sharded_loader.base.notices import Notices
from sharded_loader.engine.heartbeat import BEGINNING, IDLE, IN_BULK, ONE_BY_ONE, UNUSED
from sharded_loader.engine.messages import NOTHING, Grouping, Job, PartBatch, PartPoint, Result, Stream, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.memory.codec import encode, encode_error
from sharded_loader.pools.deaths import GROWN_LIMIT, IDLE_DEATHS, LOOK_SECONDS, PROVEN, Death, Deaths, Watch
from sharded_loader.pools.supervised import SupervisedPool, Transport, Worker, decode_result, fields_of

JOB = Job([1, 2, 3], None, 0)


KILLED, TERMINATED, CRASHED, LEFT, UNKNOWN = -9, -15, -11, 1, None


@pytest.mark.parametrize("exitcode", [CRASHED, LEFT, 0, -6])
@pytest.mark.parametrize("proven", [False, True])
def test_starts_that_fail_by_themselves_are_given_up_soon_whatever_is_killed_in_between(
    exitcode: int, proven: bool
) -> None:
    deaths = Deaths(3)
    deaths.begin_starts(proven=proven)
    assert not any(deaths.record_start_death(Death(worker, 71, KILLED)) for worker in range(8))
    assert [deaths.record_start_death(Death(worker, 71, exitcode)) for worker in (0, 1, 2)] == [False, False, True]


@pytest.mark.parametrize("exitcode", [KILLED, TERMINATED, UNKNOWN])
@pytest.mark.parametrize(("proven", "last"), [(False, 2), (True, 3 * PROVEN - 1)])
def test_starts_that_are_killed_are_given_up_by_worker_and_late_where_workers_are_known_to_start(
    exitcode: int | None, proven: bool, last: int
) -> None:
    deaths = Deaths(3)
    deaths.begin_starts(proven=proven)
    assert not any(deaths.record_start_death(Death(worker, 71, exitcode)) for worker in range(64) for _ in range(last))
    assert deaths.record_start_death(Death(0, 71, exitcode))


def test_a_worker_that_is_ready_begins_the_count_anew_and_another_dataset_is_not_proven() -> None:
    deaths = Deaths(2)
    assert not deaths.record_start_death(Death(0, 71, LEFT))
    deaths.begin_starts(proven=True)
    assert not deaths.record_start_death(Death(0, 71, LEFT))
    assert deaths.record_start_death(Death(1, 71, LEFT))
    deaths.begin_starts(proven=False)
    assert not deaths.record_start_death(Death(0, 71, KILLED))
    assert deaths.record_start_death(Death(0, 71, KILLED))


def test_workers_that_die_idle_again_and_again_are_a_reason_to_stop_unless_a_batch_comes() -> None:
    deaths = Deaths(1)
    assert not any(deaths.record_idle_death(worker) for worker in range(64))  # all at once
    deaths = Deaths(3)
    for _ in range(2):
        assert not any(deaths.record_idle_death(0) for _ in range(IDLE_DEATHS - 1))
        assert deaths.unresolved, "the next batch that comes is to be told"
        deaths.resolve(0, 0)
    assert [deaths.record_idle_death(0) for _ in range(IDLE_DEATHS)] == [False] * (IDLE_DEATHS - 1) + [True]


def test_one_large_first_batch_is_no_reason_to_give_up() -> None:
    deaths = Deaths(3)
    assert [deaths.record_growth(0, 1) for _ in range(GROWN_LIMIT - 1)] == [False] * (GROWN_LIMIT - 1)
    assert not deaths.record_growth(0, 50) and not deaths.record_growth(1, 0)
    assert [deaths.record_growth(0, 1) for _ in range(GROWN_LIMIT)] == [*[False] * (GROWN_LIMIT - 1), True]


def test_a_kill_is_told_as_what_is_known_of_it() -> None:
    assert describe_exit(KILLED).endswith(
        "often the kernel's out-of-memory killer: see dmesg, use fewer workers or smaller batches"
    )
    assert "this container's own limit was not the cause" in describe_exit(KILLED, 0)
    assert "has struck in this cgroup, 2 x since the workers started" in describe_exit(KILLED, 2)
    assert "memory" not in describe_exit(TERMINATED, 2) + describe_exit(LEFT, 2)


@pytest.mark.parametrize(("timeout", "to_start"), [(8.0, 600), (700.0, 700)])
def test_a_worker_that_starts_is_given_ten_minutes_or_the_timeout(
    timeout: float, to_start: int, host_time: Any
) -> None:
    watch, late = Watch(timeout), dict[str, float]()
    for look in range(1000):
        for who in watch.stalled([("reading", [0, 1, 0, 2]), ("starting", ())]):
            late.setdefault(who, look)
        host_time.move(1.0)
    assert late == {"reading": timeout, "starting": to_start}


def test_only_a_worker_that_stands_still_while_somebody_looks_is_late(host_time: Any) -> None:
    watch = Watch(4.0)
    assert watch.step == 0.5
    still, moves = [0, 1, 0, 2], [0, 1, 0, 0]

    def look(seconds: float, *others: tuple[str, list[int]]) -> list[str]:
        host_time.move(seconds)
        moves[3] += 1
        return watch.stalled([("moves", moves), *others])

    assert look(0.5, ("still", still)) == []
    assert look(3600, ("still", still)) == []  # the trainer was away: it counts as two steps
    assert [look(0.5, ("still", still)) for _ in range(6)] == [[]] * 5 + [["still"]]
    assert look(0.5) == []  # it has nothing to do
    assert [look(0.5, ("still", still)) for _ in range(9)] == [[]] * 8 + [["still"]]
    assert Watch(None).step == LOOK_SECONDS and Watch(None).stalled([("still", still)]) == []


# -- over workers that are only pretended ------------------------------------------------------------------------------


class Pretended(Worker):
    """A worker whose last words a test writes."""

    def __init__(self, number: int, pid: int, said: list[tuple[Any, ...]]) -> None:
        super().__init__(number)
        self.pid, self.ready, self.said = pid, True, said
        self.heartbeat: Sequence[int] | None = UNUSED
        self.more: dict[str, Any] = {}

    def cancel(self, run: int) -> None:
        self.said.append(("cancel", self.number, run))

    def where(self) -> Sequence[int] | None:
        return self.heartbeat if self.tasks else None

    def tell(self) -> None: ...

    def kill_stalled(self, seconds: float) -> None:
        self.said.append(("late", self.number, seconds))


class PretendedTransport(Transport[Pretended]):
    needs_all = True
    drains = True  # one that is retired answers what it has

    def __init__(self) -> None:
        self.num_workers = 2
        self.workers: list[Pretended] = []
        self.draining: list[Pretended] = []
        self.said: list[tuple[Any, ...]] = []
        self.launched = 0

    def start(self, job: Job) -> list[Task]:
        self.launch_all(job)
        return []

    def launch(self, number: int, job: Job) -> Pretended:
        self.launched += 1
        return Pretended(number, 100 + self.launched, self.said)

    def drain(self, worker: Pretended) -> None:
        self.said.append(("retired", worker.pid))
        if self.drains:
            self.draining.append(worker)

    def explain_death(self, worker: Pretended, error: BaseException | None) -> Death:
        return Death(worker.number, worker.pid, -9, hung=worker.hung, heartbeat=worker.heartbeat, **worker.more)

    def release(self, worker: Pretended) -> None:
        self.said.append(("released", worker.pid))

    def goes_on_without(self, worker: Pretended, error: Exception) -> bool:
        return not self.needs_all

    def close(self) -> None:
        self.workers = []


class Pool(SupervisedPool[Pretended]):
    """A pool of two pretended workers, of which a batch may kill some."""

    started = True
    start, have = SupervisedPool._start, SupervisedPool._have
    submit = wait = _count_room = lambda *_: None  # type: ignore[assignment]

    def __init__(self, restarts: int = 2, timeout: float | None = None, job: Job = JOB) -> None:
        super().__init__(2, None, timeout, restarts, Grouping())
        self.transport = self._transport = PretendedTransport()
        self.notices = Notices()
        self.start(job)

    def give(self, number: int, *tasks: Task, heartbeat: Sequence[int] | None = UNUSED) -> None:
        worker = self.transport.workers[number]
        worker.tasks.update({(task.run, task.seq): task for task in tasks})
        worker.heartbeat = heartbeat

    def kill(self, number: int, **said: Any) -> Any:
        worker = self.transport.workers[number]
        worker.more = said
        return self.replace(worker)

    @property
    def seqs(self) -> list[int]:
        """Of the tasks that wait for another worker."""
        return [task.seq for task in self.requeued]


@pytest.fixture
def pool() -> Pool:
    return Pool()


def task(seq: int, run: int = 0, part: PartBatch | None = None) -> Task:
    return Task(run, seq, 0, 0, ([10, 11, 12],), False, part=part)


def reading(seq: int, sample: int = 1) -> list[int]:
    return [0, seq, 0, sample]


def test_a_dead_worker_is_replaced_by_one_of_its_number_and_counted_once_however_often_it_is_told(pool: Pool) -> None:
    dead = pool.transport.workers[1]
    assert pool.kill(1) == pool.replace(dead) == []
    assert numbers_and_pids(pool.transport.workers) == [(0, 101), (1, 103)]
    assert pool.transport.said == [("released", 102)]
    assert pool.notices.counts["replaced_workers"] == 1


def test_the_tasks_of_a_dead_worker_wait_in_front_of_newer_ones_and_not_if_they_are_cancelled(pool: Pool) -> None:
    pool.give(0, task(3), task(4), task(9, run=1))
    pool.requeued.extend([task(8), task(7, run=1)])
    pool.cancel(1)
    pool.kill(0)
    assert pool.seqs == [3, 4, 8]
    assert ("cancel", 0, 1) in pool.transport.said and ("cancel", 1, 1) not in pool.transport.said


def test_a_cancelled_run_is_forgotten_when_no_worker_has_its_tasks(pool: Pool) -> None:
    for run in range(5):
        pool.give(0, task(0, run))
        pool.cancel(run)
        if run != 1:  # its worker has not answered
            pool.transport.workers[0].tasks.clear()
            pool.give(0, task(0, 1))
    assert pool._cancelled == {1, 4}  # the last one until another one is cancelled
    pool.kill(0)
    assert pool.seqs == []


def test_a_worker_that_is_launched_while_the_pool_is_closed_is_in_the_list_that_is_closed_next(pool: Pool) -> None:
    launch = pool.transport.launch

    def launch_while_another_thread_closes(number: int, job: Job) -> Pretended:
        pool.close()
        return launch(number, job)

    pool.transport.launch = launch_while_another_thread_closes  # type: ignore[method-assign]
    pool.kill(1)
    assert numbers_and_pids(pool.transport.workers) == [(1, 103)]


def test_a_batch_that_kills_too_many_workers_is_given_up_and_its_sample_named() -> None:
    pool = Pool(restarts=2)
    pool.give(0, task(3), task(4), heartbeat=reading(3))
    assert pool.kill(0) == []
    pool.requeued.clear()
    pool.give(1, task(3), task(5), heartbeat=reading(3))
    [given_up] = pool.kill(1)
    assert isinstance(given_up.error, WorkerDiedError)
    assert (given_up.seq, given_up.error.index) == (3, 11)
    assert pool.seqs == [5]


def test_a_death_between_two_words_of_the_heartbeat_is_an_error_without_a_sample() -> None:
    pool = Pool(restarts=1)
    pool.give(0, task(3), heartbeat=[0, 3, 7, 1])  # the shard is still that of an earlier batch
    [given_up] = pool.kill(0)
    assert isinstance(given_up.error, WorkerDiedError) and given_up.error.index is None


@pytest.mark.parametrize("at", [IN_BULK, ONE_BY_ONE, 1], ids=["in bulk", "one by one", "a sample"])
def test_after_a_death_each_sample_is_noted(at: int, pool: Pool) -> None:
    pool.give(0, task(3), task(4), heartbeat=reading(3, at))
    pool.kill(0)
    assert [one.is_suspect for one in pool.requeued] == [True, False]
    pool.give(1, task(3), heartbeat=reading(3, BEGINNING))
    assert len(pool.kill(1)) == 1


def test_a_part_of_iterable_data_ends_with_a_batch_that_is_given_up_and_all_its_deaths_are_settled() -> None:
    stream = Stream(2, 4)
    parts = [PartBatch(0, 0, number, 0, PartPoint()) for number in range(2)]
    pool = Pool(restarts=1, job=Job([1], None, 0, stream=stream))
    pool.give(0, *(task(seq, part=parts[seq % 2]) for seq in range(4)), heartbeat=reading(0))
    pool.requeued.extend(task(seq, part=parts[seq % 2]) for seq in (6, 7))
    pool.deaths.suspect([(0, 2)])
    results = pool.kill(0)
    assert [(one.seq, one.error is None, one.batch is NOTHING) for one in results] == [
        (0, False, False),
        (6, True, True),
        (2, True, True),
    ]
    assert pool.seqs == [1, 3, 7]
    assert not pool.deaths.unresolved


def test_where_nobody_knows_what_a_worker_read_all_its_tasks_are_suspects_and_none_is_blamed() -> None:
    pool = Pool(restarts=1)
    pool.give(0, task(3), task(4), heartbeat=None)
    assert pool.kill(0) == []
    assert pool.deaths.crash_suspects == {(0, 3), (0, 4)}
    pool.deaths.resolve(0, 3)
    pool.give(1, task(4), heartbeat=reading(4))
    [given_up] = pool.kill(1)
    assert given_up.seq == 4
    assert not pool.deaths.crash_suspects


def test_nobody_is_to_blame_where_a_machine_has_gone() -> None:
    pool = Pool(restarts=1)
    pool.give(0, task(3), heartbeat=reading(3))
    for _ in range(2 * IDLE_DEATHS):
        assert pool.kill(0, is_of_machine=True) == []
    assert pool.seqs == [3]


def test_a_worker_that_dies_between_batches_again_and_again_breaks_the_pool(pool: Pool) -> None:
    pool.give(0, task(3), heartbeat=[0, 3, 0, IDLE])  # it was sent, and had not begun
    with pytest.raises(PoolBroken, match="between batches") as caught:
        for _ in range(IDLE_DEATHS):
            pool.kill(0)
    assert isinstance(caught.value.error, WorkerDiedError)
    assert (pool.transport.workers, pool.seqs) == ([], [])


def test_a_batch_that_comes_settles_the_deaths_before_it(pool: Pool) -> None:
    reply = 0, 3, 0, 0, memoryview(encode(Result(0, 3)).pickled), memoryview(b""), None
    for _ in range(2):
        for _ in range(IDLE_DEATHS - 1):
            pool.kill(0)
        pool._result(reply, [], None)
    assert not pool.deaths.unresolved


@pytest.mark.parametrize("said", [{}, {"is_final": True}])
def test_workers_that_cannot_start_break_the_pool(said: dict[str, Any]) -> None:
    pool = Pool(restarts=2)
    pool.transport.workers[0].ready = False
    if not said:
        pool.kill(0)
        pool.transport.workers[0].ready = False
    with pytest.raises(PoolBroken, match="died while it started"):
        pool.kill(0, **said)


def test_a_worker_that_starts_begins_the_count_of_those_that_cannot_anew() -> None:
    pool = Pool(restarts=2)
    for _ in range(5):
        pool.transport.workers[0].ready = False
        pool.kill(0)
        pool.record_start(pool.transport.workers[0])


def test_a_pool_may_go_on_without_a_worker_that_cannot_start(pool: Pool) -> None:
    pool.transport.needs_all, pool.transport.workers[0].ready = False, False
    assert pool.kill(0, is_final=True) == []
    assert pool.transport.launched == 2


def test_a_worker_that_is_late_is_killed_once_and_its_batch_is_an_error(host_time: Any) -> None:
    pool = Pool(restarts=1, timeout=2.0)
    pool.give(0, task(3), heartbeat=reading(3))
    for _ in range(20):
        host_time.move(0.25)
        pool.kill_stalled_workers()
    assert pool.transport.said == [("late", 0, 2.0)]
    [given_up] = pool.kill(0)
    assert isinstance(given_up.error, WorkerTimeoutError)
    assert given_up.error.index == 11
    assert "It was killed; its stack is on stderr" in str(given_up.error)


def test_closed_it_has_neither_workers_nor_tasks_and_may_be_started_again() -> None:
    pool = Pool(restarts=1)
    pool.give(0, task(5), heartbeat=None)
    pool.kill(0)
    pool.close()
    assert (pool.transport.workers, pool.seqs, pool.deaths.crash_suspects) == ([], [], set())
    pool.have(5)  # only the number changes
    assert (pool.num_workers, pool.transport.workers) == (5, [])
    pool.start(JOB)
    assert len(pool.transport.workers) == 5


def numbers_and_pids(workers: Sequence[Pretended]) -> list[tuple[int, int]]:
    return [(worker.number, worker.pid) for worker in workers]


def test_more_workers_are_launched_and_those_that_are_too_many_leave_with_their_tasks(pool: Pool) -> None:
    pool.have(4)
    assert numbers_and_pids(pool.transport.workers) == [(0, 101), (1, 102), (2, 103), (3, 104)]
    pool.give(3, task(7))
    pool.have(1)
    assert numbers_and_pids(pool.transport.workers) == [(0, 101)] and pool.seqs == []
    assert pool.transport.said == [("retired", 104), ("retired", 103), ("retired", 102)]
    (draining, *_) = pool.transport.draining
    assert list(draining.tasks) == [(0, 7)]


def test_a_worker_that_has_left_is_no_death_and_one_that_dies_over_a_batch_is_to_blame() -> None:
    pool = Pool(restarts=1)
    pool.give(1, task(7), task(8), heartbeat=reading(7))
    pool.have(1)
    pool.have(2)
    (draining,) = pool.transport.draining
    (result,) = pool.replace(draining)
    assert isinstance(result.error, WorkerDiedError) and result.seq == 7 and pool.seqs == [8]
    assert numbers_and_pids(pool.transport.workers) == [(0, 101), (1, 103)] and pool.transport.draining == []
    pool.have(1)
    (draining,) = pool.transport.draining
    for _ in range(2):  # told twice
        assert pool.replace(draining) == []
    assert pool.transport.draining == [] and not pool.notices.counts


def test_where_workers_cannot_end_by_themselves_others_get_their_tasks_at_once(pool: Pool) -> None:
    pool.transport.drains = False
    pool.give(1, task(7), task(8))
    pool.have(1)
    assert pool.seqs == [7, 8] and pool.transport.draining == []


@pytest.mark.parametrize(("parts", "renewed"), [(2, True), (1, False), (3, False)])
def test_workers_that_read_one_part_each_are_replaced_before_they_read_several(parts: int, renewed: bool) -> None:
    pool = Pool(job=Job([1], None, 0, stream=Stream(parts, 1)))
    pool.give(0, task(7))
    pool.have(1)
    assert numbers_and_pids(pool.transport.workers) == [(0, 103 if renewed else 101)] and pool.seqs == []
    assert ((0, 101) in numbers_and_pids(pool.transport.draining)) is renewed


def test_a_worker_that_leaves_is_watched_and_told_what_is_cancelled(host_time: Any) -> None:
    pool = Pool(timeout=8.0)
    pool.give(1, task(7), heartbeat=reading(7))
    pool.have(1)
    pool.cancel(0)
    for _ in range(20):
        host_time.move(1.0)
        pool.kill_stalled_workers()
    assert [said[:2] for said in pool.transport.said] == [("retired", 102), ("cancel", 1), ("late", 1)]


def test_if_another_one_cannot_be_launched_there_are_those_that_could_be(pool: Pool) -> None:
    third = pool.transport.launch(2, JOB)
    pool.transport.launch = Mock(side_effect=[third, OSError("no processes")])  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no processes"):
        pool.have(9)
    assert pool.num_workers == len(pool.transport.workers) == 3


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no such signal")
@pytest.mark.parametrize("forked", [True, False])
def test_the_error_of_a_signal_handler_passes_while_a_key_is_pickled(signal_name: str, forked: bool) -> None:
    class Key:
        rings = True

        def __reduce__(self) -> Any:
            if self.rings:
                Key.rings = False  # at the first attempt alone
                signal.raise_signal(getattr(signal, signal_name))
            return Key, ()

    note_handlers()
    with pytest.raises(HANDLERS[signal_name][0]):
        fields_of(Task(0, 0, 0, 0, ([Key()],), False), forked=forked)
    note_handlers()


def test_ints_strings_and_arrays_need_no_pickle_of_their_own() -> None:
    for shard in ([1, "a"], np.arange(3)):
        plain = Task(1, 2, 3, 4, (shard,), False)
        assert fields_of(plain, forked=True) == fields_of(plain, forked=False) == plain.fields


def test_of_iterable_data_only_a_state_needs_a_pickle_of_its_own() -> None:
    for state, kind in ((None, tuple), ({"at": 3}, bytes)):
        part = PartBatch(0, 0, 0, 0, PartPoint(state=state))
        assert type(fields_of(Task(0, 0, 0, 0, ([None],), False, part=part), forked=True)) is kind


def test_exceptions_of_a_reply_are_exceptions_again_and_one_without_is_the_result() -> None:
    def read(reply: Result) -> Result:
        return decode_result(1, 2, memoryview(encode(reply).pickled), [], None)

    result = read(Result(1, 2, error=encode_error(KeyError("k")), skipped=((7, encode_error(ValueError("v"))),)))  # type: ignore[arg-type]
    assert isinstance(result.error, KeyError)
    assert [(index, type(skipped)) for index, skipped in result.skipped] == [(7, ValueError)]
    result = read(Result(1, 2, {"x": 3}, 1, lost_shards=(1,)))
    assert (result.batch, result.samples, result.error, result.lost_shards) == ({"x": 3}, 1, None, (1,))
