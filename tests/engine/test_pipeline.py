"""Batches in flight: what every pool is, and a pool of numbers that finishes tasks in the order that the test says."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import PROCESS_POOLS, ahead, make_pool

from sharded_loader import ShardedDataLoader
from sharded_loader.base.errors import LoaderClosedError
from sharded_loader.engine import reader
from sharded_loader.engine.messages import (
    GROUP_SECONDS,
    MAX_GROUP,
    NOTHING,
    Grouping,
    Job,
    PartBatch,
    PartPoint,
    Result,
    Task,
)
from sharded_loader.engine.order import Epoch, Position
from sharded_loader.engine.pipeline import Entry, Pipeline, Run
from sharded_loader.engine.pool import Pool, PoolBroken, check_init_fn, check_num_workers, check_timeout
from sharded_loader.engine.split import Split
from sharded_loader.pools.process.link import TASKS, Link

JOB = Job([], None, 0)


class PoolOfNumbers(Pool):
    """Finishes one task per `wait`, the last that was submitted first. The batch of a task is its number."""

    num_workers = 1
    room = 100
    started = False  # type: ignore[assignment]

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.tasks: list[Task] = []
        self.broken: Exception | None = None

    def start(self, job: Job) -> None:
        self.calls.append("start")
        self.started = True

    def submit(self, tasks: Sequence[Task]) -> None:
        self.calls.append([(task.run, task.seq) for task in tasks])
        self.tasks.extend(tasks)

    def wait(self, block: bool = True) -> Sequence[Result]:
        if self.broken is not None:
            raise PoolBroken(self.broken)
        if not self.tasks or not block:
            return []
        task = self.tasks.pop()
        return [Result(task.run, task.seq, task.seq)]

    def cancel(self, run: int) -> None:
        self.calls.append(("cancel", run))

    def close(self) -> None:
        self.calls.append("close")
        self.tasks.clear()
        self.started = False

    def submitted(self) -> list[tuple[int, int]]:
        """Run and number of each task, in the order in which they were submitted; forgets them."""
        found = [key for call in self.calls if isinstance(call, list) for key in call]
        self.calls = [call for call in self.calls if not isinstance(call, list)]
        return found


class Numbers(Epoch):
    """Batches of one index each, their own number."""

    def __init__(self, length: int, first: int) -> None:
        self.number, self.first, self._length = 0, first, length

    def task(self, seq: int) -> Task | None:
        return Task(self.run, seq, 0, seq, ([seq],), False) if seq < self._length else None

    tables = ()  # type: ignore[assignment]

    def forget(self, delivered: int) -> None: ...

    def length(self) -> int:
        return self._length

    def position(self, delivered: int) -> Position:
        return Position(0, delivered)

    def state(self, position: Position) -> dict[str, Any]:
        return {}


class OfAPart(Numbers):
    """The same as batches of one part of iterable data."""

    def task(self, seq: int) -> Task | None:
        task = super().task(seq)
        return task and replace(task, part=PartBatch(0, 0, 0, seq, PartPoint()))


def run_of(number: int, length: int = 10, first: int = 0) -> Run:
    """A run of batches of one index each."""
    return Run(number, Numbers(length, first))


def pipeline_of(*runs: Run, prefetch: int = 4) -> tuple[Pipeline, PoolOfNumbers]:
    pool = PoolOfNumbers()
    pipeline = Pipeline(pool, Split())
    pipeline.scheduler.prefetch = prefetch
    for run in runs:
        pipeline.open(run, JOB)
    return pipeline, pool


def started(prefetch: int = 4, **of_run: Any) -> tuple[Run, Pipeline, PoolOfNumbers]:
    """One run."""
    run = run_of(0, **of_run)
    return run, *pipeline_of(run, prefetch=prefetch)


def deliver(run: Run, entry: Entry) -> bool:
    run.delivered = entry.seq + 1
    return True


def step(pipeline: Pipeline, run: Run) -> Any:
    """One ``next``: the batch, the error, or None at the end."""
    found = pipeline.next(run, deliver)
    if not isinstance(found, Entry):
        return found
    assert found.result is not None
    return found.result.error or found.result.batch


@pytest.mark.parametrize("first", [0, 6])
def test_batches_come_in_order_whatever_finishes_first_and_from_where_it_resumes(first: int) -> None:
    run, pipeline, _ = started(first=first)
    assert [step(pipeline, run) for _ in range(11 - first)] == [*range(first, 10), None]


def test_prefetch_batches_are_in_flight_and_one_more_for_each_that_is_handed_out() -> None:
    for prefetch, first, then in ((3, [0, 1, 2, 3], [4]), (0, [0], [1])):  # 0: one is read when it is asked for
        run, pipeline, pool = started(prefetch=prefetch)
        for expected in (first, then):
            step(pipeline, run)
            assert pool.submitted() == [(0, seq) for seq in expected]


@pytest.mark.parametrize(
    ("takes_turns", "one_by_one", "sent"),
    [
        (False, False, [32, 0, 0, 4, 0, 0, 0, 4, 0]),  # twice four groups: nobody waits while one goes through a group
        (True, False, [32, 0, 0, 0, 0, 0, 0, 8, 0]),  # where workers take turns, each gets its group at once
        (False, True, [5, 1, 1, 1, 1, 1, 1, 1, 1]),
    ],
)
def test_a_group_of_batches_is_submitted_at_once(takes_turns: bool, one_by_one: bool, sent: list[int]) -> None:
    run = run_of(0, length=100)
    run.epoch.takes_turns = takes_turns
    pipeline, pool = pipeline_of(run, prefetch=4)
    pipeline.scheduler.scale_by_group, pipeline.scheduler.one_by_one, pool.group = True, one_by_one, 4
    pool.num_workers = 2 if takes_turns else 1
    assert [len(pool.submitted()) for _ in range(9) if step(pipeline, run) is not None] == sent


def test_no_more_tasks_are_submitted_than_the_pool_has_room_for() -> None:
    run, pipeline, pool = started()
    pool.room = 2
    step(pipeline, run)
    assert max(len(call) for call in pool.calls if isinstance(call, list)) == 2


def test_of_several_runs_the_tasks_that_are_needed_soonest_go_first() -> None:
    first, second = run_of(0), run_of(1)
    pipeline, pool = pipeline_of(first, second, prefetch=3)
    pool.room = 0
    for run in (first, second):
        pipeline.scheduler.tasks(run, pool)
    pool.room = 6
    step(pipeline, second)
    assert pool.submitted()[:6] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


def test_a_result_that_comes_twice_or_of_no_run_counts_once() -> None:
    """As of a thread that was written off, and has read its sample after all."""
    run, pipeline, pool = started(length=4)
    answer, late = pool.wait, TimeoutError("it stands still")
    stray = [Result(9, 0, "stray"), Result(0, 77, "stray"), Result(0, 0, 0), Result(0, 0, "again")]
    stray.append(Result(0, 1, NOTHING, error=late))
    pool.wait = lambda block=True: [stray.pop(0)] if stray else answer(block)  # type: ignore[method-assign]
    assert [step(pipeline, run) for _ in range(5)] == [0, late, 2, 3, None]


def test_behind_the_end_of_a_part_no_batch_is_submitted_and_errors_that_came_early_are_empty() -> None:
    run = Run(0, OfAPart(5, 0))
    pipeline, pool = pipeline_of(run, prefetch=3)
    assert step(pipeline, run) == 0
    run.epoch.abandoned = {0: 1}
    run.window[1].result = Result(0, 2, NOTHING, error=ValueError("of a worker that has lost its place"))
    assert [step(pipeline, run) for _ in range(5)] == [1, NOTHING, 3, NOTHING, None]
    assert (0, 4) not in pool.submitted()


@pytest.mark.parametrize("strikes", ["deliver", "first", "ahead"])
def test_after_an_interrupted_step_everything_is_planned_again_from_the_delivered_count(strikes: str) -> None:
    run, pipeline, pool = started(length=7)
    assert [step(pipeline, run) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyboardInterrupt):
        pipeline.next(run, **{"deliver": deliver, strikes: Mock(side_effect=KeyboardInterrupt)})
    pipeline.fail()
    run.delivered = 3
    pool.calls.clear()
    assert step(pipeline, run) == 3
    assert pool.calls[:2] == ["close", "start"] and pool.submitted()[0] == (0, 3)
    assert [step(pipeline, run) for _ in range(4)] == [4, 5, 6, None]


def test_a_start_of_the_pool_after_an_interrupted_step_leaves_nothing_of_it() -> None:
    """As of a drop-in iterator, made after a Ctrl-C: tasks that no worker has would be waited for."""
    run, pipeline, pool = started(length=7)
    step(pipeline, run)
    pool.submit = Mock(side_effect=KeyboardInterrupt)  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        pipeline.next(run, deliver)
    pipeline.fail()
    run.delivered = 1
    del pool.submit
    pipeline.start(JOB)
    assert not run.window and not run.awaited
    assert [step(pipeline, run) for _ in range(7)] == [1, 2, 3, 4, 5, 6, None]


def test_in_any_order_a_step_blocks_only_while_no_batch_is_finished() -> None:
    run, pipeline, pool = started(prefetch=2, length=4)
    run.epoch.any_order = True
    blocked = []

    def wait(block: bool = True) -> list[Result]:
        """Finish all that is submitted."""
        blocked.append(block)
        tasks, pool.tasks = pool.tasks, []
        return [Result(task.run, task.seq, task.seq) for task in tasks]

    pool.wait = wait  # type: ignore[method-assign]
    assert [step(pipeline, run) for _ in range(5)] == [0, 1, 2, 3, None]
    assert blocked == [True, False, False, False]


def test_a_step_asks_the_pool_while_fewer_than_two_finished_batches_wait_and_blocks_only_without_one() -> None:
    run, pipeline, pool = started(prefetch=6)
    finished, blocked = iter([3, 1]), []

    def wait(block: bool = True) -> list[Result]:
        blocked.append(block)
        return [Result(task.run, task.seq, task.seq) for task in (pool.tasks.pop(0) for _ in range(next(finished)))]

    pool.wait = wait  # type: ignore[method-assign]
    for batch, asked in enumerate([[True], [True], [True, False]]):
        assert (step(pipeline, run), blocked) == (batch, asked)


@pytest.mark.parametrize("ends", ["its iterator is gone", "the pool is broken"])
def test_copies_under_way_of_batches_that_nobody_gets_any_more_are_dropped(ends: str) -> None:
    run, pipeline, pool = started()
    step(pipeline, run)
    copy = Mock()
    run.window[0].begun = [copy]
    if ends == "the pool is broken":
        pool.broken, pipeline.min_ready = OSError("no memory"), 9
        assert step(pipeline, run) is pool.broken
    else:
        pipeline.drop(run.number)
    assert copy.drop.called and not run.window


def test_what_strikes_while_the_pool_only_waits_costs_nothing() -> None:
    run, pipeline, pool = started()
    pipeline.is_open_step = pool.waiting = True
    pipeline.fail()
    pool.calls.clear()
    assert step(pipeline, run) == 0
    assert "close" not in pool.calls


def test_a_step_inside_a_waiting_one_is_told_apart_and_wakes_it() -> None:
    run, pipeline, pool = started()
    woken = []
    pool.wake = lambda: woken.append(True)  # type: ignore[method-assign]
    pipeline.is_open_step = pool.waiting = True
    assert step(pipeline, run) == 0
    assert woken == [True] and pool.waiting and pipeline.is_open_step


def test_a_dropped_run_is_cancelled_and_the_others_go_on_and_inside_a_step_with_the_next_one() -> None:
    first, second, third = runs = [run_of(number) for number in range(3)]
    pipeline, pool = pipeline_of(*runs)
    step(pipeline, first)
    pipeline.drop(0)
    assert ("cancel", 0) in pool.calls

    def drop(run: Run, entry: Entry) -> bool:
        pipeline.drop(2)
        assert ("cancel", 2) not in pool.calls
        return deliver(run, entry)

    pipeline.next(second, drop)
    assert [step(pipeline, second) for _ in range(9)] == list(range(1, 10))
    assert ("cancel", third.number) in pool.calls


def test_a_broken_pool_ends_every_run_with_its_error_once() -> None:
    run, pipeline, pool = started()
    pool.broken = OSError("no memory")
    assert step(pipeline, run) is pool.broken
    assert "this iterator has failed (OSError: no memory)" in str(step(pipeline, run))


def test_a_pool_that_somebody_has_closed_is_started_again() -> None:
    run, pipeline, pool = started()
    step(pipeline, run)
    pool.close()
    assert [step(pipeline, run) for _ in range(9)] == list(range(1, 10))


def test_a_closed_pipeline_says_so_also_to_the_step_that_it_is_closed_in() -> None:
    run, pipeline, pool = started()
    step(pipeline, run)
    pipeline.close()
    pipeline.close()
    assert pool.calls.count("close") == 1
    with ThreadPoolExecutor(1) as other:  # which may be in ``next``, and ends there
        assert other.submit(pipeline.lock.acquire, blocking=False).result()
    with pytest.raises(LoaderClosedError):
        pipeline.check_open()
    pipeline, _ = pipeline_of(run := run_of(0))
    with pytest.raises(LoaderClosedError):
        pipeline.next(run, lambda run, entry: bool(pipeline.close()) or deliver(run, entry))  # type: ignore[func-returns-value]


def test_a_pool_that_a_step_starts_after_it_was_closed_in_is_closed_again() -> None:
    """As by a signal handler that closes the loader while its workers start."""
    pipeline, pool = pipeline_of()

    def opens(run: Run) -> None:
        pipeline.close()
        pipeline.open(run, JOB)

    with pytest.raises(LoaderClosedError):
        pipeline.next(run_of(0), deliver, first=opens)
    assert pool.calls[-2:] == ["start", "close"] and not pipeline.runs


# -- cheap batches travel in groups; nobody sees it but the clock ------------------------------------------------------


def test_one_slow_batch_ends_the_grouping() -> None:
    grouping = Grouping()
    for _ in range(200):
        grouping.note(10e-6)
    assert grouping.size == MAX_GROUP
    grouping.note(0.05)
    assert grouping.size == 1
    for _ in range(100):  # which are not cheap
        grouping.note(GROUP_SECONDS)
        assert grouping.size == 1


def test_the_bytes_of_a_message_are_bounded_too() -> None:
    grouping = Grouping(most_bytes=1000)
    assert [grouping.note(10e-6, nbytes) for nbytes in [0] * 200][-1] == MAX_GROUP
    assert [grouping.note(10e-6, nbytes) for nbytes in (100, 101, 1001)] == [10, 9, 1]


@pytest.mark.skipif("fork" not in PROCESS_POOLS, reason="the worker has this clock by fork")
@pytest.mark.parametrize("seconds", [1e-6, 1.0])
def test_only_cheap_batches_travel_several_to_a_message(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, seconds)  # each look at it takes so long
    monkeypatch.setattr(reader, "host_clock", SimpleNamespace(now=lambda: next(clock)))
    sizes, send = list[int](), Link.send

    def spy(link: Link, kind: bytes = b"", *given: Any, **options: Any) -> None:
        if kind == TASKS:
            sizes.append(len(pickle.loads(options["content"])))
        send(link, kind, *given, **options)

    with ahead(ShardedDataLoader(range(800), 4, pool=make_pool("fork", 1)), False) as loader:
        list(loader)
        assert (loader.pool.group == 1) is (seconds == 1.0)
        monkeypatch.setattr(Link, "send", spy)
        assert [batch[0] for batch in loader] == [*range(0, 800, 4)]
    assert sum(sizes) == 200 and (len(sizes) > 100) is (seconds == 1.0)


# -- what every pool is: the verbs that it may leave out, and the arguments that pools share ---------------------------


class Least(Pool):
    """A pool with what a pool must have, and no more."""

    started = False  # type: ignore[assignment]
    start = submit = wait = close = lambda *_: None  # type: ignore[assignment]


def test_a_pool_may_leave_out_wake_cancel_and_closer_and_no_other_verb() -> None:
    pool = Least()
    pool.wake()
    pool.cancel(3)
    pool.closer()()
    with pytest.raises(TypeError, match="wait"):
        type("NoWait", (Least,), {"wait": Pool.wait})()


def test_a_pool_puts_batches_together_in_the_memory_that_it_is_told() -> None:
    pool, given = Least(), np.empty(3)
    assert pool.empty((2,), np.dtype("f4")).shape == (2,)
    pool.use_memory(lambda shape, dtype: given, lambda mapping: None)
    assert pool.empty((3,), np.dtype("f4")) is given


def test_numbers_of_workers_are_ints_and_timeouts_seconds_and_other_arguments_are_refused() -> None:
    for given in (1, 4, np.int64(2)):
        assert (found := check_num_workers(given)) == given and type(found) is int
    assert (check_timeout(None), check_timeout(3)) == (None, 3.0)
    check_init_fn(None), check_init_fn(print)
    refused: list[tuple[Any, Any, Any, str]] = [
        (check_num_workers, (0, -1), ValueError, "num_workers must be"),
        (check_num_workers, (True, "2", 2.0, None), TypeError, "num_workers must be an integer"),
        (check_timeout, (0, -1.0, float("inf"), True, "1"), (TypeError, ValueError), "timeout is"),
        (check_init_fn, (3,), TypeError, "worker_init_fn is 3"),
    ]
    for check, values, error, text in refused:
        for value in values:
            with pytest.raises(error, match=text):
                check(value)
