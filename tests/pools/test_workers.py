"""Workers of any kind: threads that hang, end and wait; none at all; another number of them while a loader runs."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import platform
import random
import signal
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from conftest import POOLS, PROCESS_POOLS, covering, make_pool, until
from programs import run_script
from recovery_samples import until_the_end
from refusing import in_child
from samples import Gate

from sharded_loader import (
    InlinePool,
    LoaderClosedError,
    ProcessPool,
    ShardedDataLoader,
    SimpleDataset,
    ThreadPool,
    WorkerTimeoutError,
    sample_rng,
    sample_seed,
)
from sharded_loader.base.notices import LoaderWarning
from sharded_loader.engine import reader
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken
from sharded_loader.pools import local as thread_pool

TIMEOUT = 0.5

pytestmark = pytest.mark.filterwarnings("ignore:.*worker processes:sharded_loader.LoaderWarning")


def task(seq: int, *indices: int, run: int = 0) -> Task:
    return Task(run, seq, 0, 0, (list(indices),), False)


def job(dataset: Any) -> Job:
    return Job(dataset, None, 0)


def read_one(pool: ThreadPool, value: int) -> Any:
    """A batch of a dataset of one sample."""
    pool.start(job([value]))
    pool.submit([task(0, 0)])
    return results_of(pool, 1)[0].batch.tolist()


def results_of(pool: ThreadPool, count: int) -> list[Result]:
    """The next results of a pool, by number of the batch."""
    found: list[Result] = []
    while len(found) < count:
        found += pool.wait()
    return sorted(found, key=lambda result: result.seq)


@pytest.fixture
def pool() -> Iterator[ThreadPool]:
    """Two threads."""
    made = ThreadPool(2)
    yield made
    made.close()


# -- the verbs --------------------------------------------------------------------------------------------------


def test_another_job_is_read_by_the_threads_that_run_and_a_pool_that_is_closed_twice_starts_again(
    pool: ThreadPool,
) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("sharded_loader-")}

    assert read_one(pool, 1) == [1]
    before = names()
    assert read_one(pool, 2) == [2] and names() == before and len(before) == 2
    pool.close()
    pool.close()
    assert not pool.started and pool.wait() == () and not names()
    assert read_one(pool, 3) == [3]


def test_wake_ends_a_wait_and_the_closer_what_was_started_after_it_was_made(pool: ThreadPool) -> None:
    closer = pool.closer()
    pool.start(job([1]))
    pool.wake()
    assert pool.wait() == []
    closer()
    assert not pool.started


def test_a_thread_that_a_defect_of_the_loader_ends_breaks_the_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sharded_loader.engine.reader.Reader.read", Mock(side_effect=AssertionError("a defect")))
    with ShardedDataLoader(range(8), 2, pool=ThreadPool(2)) as loader, pytest.raises(AssertionError, match="a defect"):
        next(iter(loader))


def test_a_worker_init_fn_that_fails_breaks_the_pool() -> None:
    pool = ThreadPool(2, worker_init_fn=lambda number: 1 // number)
    pool.start(job([1]))
    with pytest.raises(PoolBroken) as caught:
        results_of(pool, 1)
    assert isinstance(caught.value.error, ZeroDivisionError)
    assert caught.value.error.__notes__[-1].endswith("while thread 0 started (worker_init_fn)")
    assert not pool.started


def test_threads_that_wait_hold_neither_dataset_nor_init_fn() -> None:
    class Held(list[int]):
        def __call__(self, number: int) -> None:
            """Nothing to do."""

    dataset, init = Held([1]), Held()
    refs = [weakref.ref(dataset), weakref.ref(init)]
    pool = ThreadPool(1, worker_init_fn=init)
    pool.start(job(dataset))
    pool.submit([task(0, 0)])
    results_of(pool, 1)
    (thread,) = [one for one in threading.enumerate() if one.name.startswith("sharded_loader-")]
    closer = pool.closer()
    del pool, dataset, init
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    closer()
    assert not thread.is_alive()


def test_a_close_that_a_ctrl_c_interrupts_can_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = ThreadPool(2)
    pool.start(job([1]))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threading.Thread, "join", lambda *_: signal.raise_signal(signal.SIGINT))
        pool.close()
    pool.close()
    assert not [one for one in threading.enumerate() if one.name.startswith("sharded_loader-")]


def test_a_close_waits_a_moment_for_threads_in_user_code(
    pool: ThreadPool, monkeypatch: pytest.MonkeyPatch, host_time: Any
) -> None:
    waits: list[float] = []
    pool.start(job([1]))
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "join", lambda thread, timeout: waits.append(timeout))
        pool.close()
    assert waits == pytest.approx([thread_pool.CLOSING_GRACE] * 2)


# -- threads that hang --------------------------------------------------------------------------------------------


class Stuck:
    """Sample 3 waits until it may go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[threading.Thread] = []

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        if index == 3 and not self.go_on.is_set():
            self.begun.append(threading.current_thread())
            self.go_on.wait()
        return np.array([index])


@pytest.mark.costly
@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_thread_that_hangs_is_an_error_and_another_has_its_place(num_workers: int) -> None:
    data = Stuck()
    with ShardedDataLoader(data, 2, pool=ThreadPool(num_workers, timeout=TIMEOUT)) as loader:
        batches, errors = until_the_end(iter(loader))
        assert batches == [[[[0], [1]]], [[[4], [5]]], [[[6], [7]]], [[[8], [9]]]]
        (error,) = errors
        assert isinstance(error, WorkerTimeoutError)
        assert (error.epoch, error.batch, error.index) == (0, 1, 3)
        assert "reading sample 3" in str(error) and "another has its place" in str(error)
        assert error.__notes__[-1].endswith("loader.read(3, epoch=0)")
        # It is let go, and what it made late is in nobody's stream.
        data.go_on.set()
        for thread in data.begun:
            thread.join(300)
            assert not thread.is_alive()
        for _ in range(2):
            assert [int(value) for batch in loader for value in batch] == list(range(10))


def test_a_thread_that_goes_on_just_when_it_is_abandoned_loses_no_batch() -> None:
    gate, pool = Gate(), ThreadPool(1, timeout=TIMEOUT)
    pool.start(job(gate))
    pool.submit([task(seq, 3 + seq) for seq in range(2)])
    found = results_of(pool, 1)
    gate.opened.release()  # the first sample is let go, and the next one waits too
    while 1 not in [result.seq for result in found if result.error is None]:
        found += pool.wait()
        gate.opened.release()
    assert (found[0].seq, type(found[0].error)) == (0, WorkerTimeoutError)
    gate.open_for_all()
    pool.close()


def test_a_thread_that_hangs_in_batchify_is_an_error() -> None:
    go_on = threading.Event()

    def batchify(samples: list[int]) -> list[int]:
        return samples if 2 not in samples or go_on.wait() else []

    with ShardedDataLoader(range(6), 2, pool=ThreadPool(1, timeout=TIMEOUT), batchify_fn=batchify) as loader:
        iterator = iter(loader)
        assert next(iterator) == [0, 1]
        with pytest.raises(WorkerTimeoutError, match=r"making the batch \(collate_fn\), in epoch 0, batch 1") as caught:
            next(iterator)
        assert caught.value.index is None
        assert next(iterator) == [4, 5]
        go_on.set()


def test_all_threads_may_hang() -> None:
    gate = Gate()
    with ShardedDataLoader(gate, 5, sampler=range(10), pool=ThreadPool(2, timeout=TIMEOUT)) as loader:
        batches, errors = until_the_end(iter(loader))
        assert (batches, [type(error) for error in errors]) == ([], [WorkerTimeoutError] * 2)
        gate.open_for_all()
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_sample_that_comes_while_its_error_is_made_costs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    late, next_begun, go_on = threading.Event(), threading.Event(), threading.Event()

    def read(index: int) -> int:
        if index == 0:
            late.wait()
        if index == 1:
            next_begun.set()
            go_on.wait()
        return index

    make_error = thread_pool.timed_out

    def finish_meanwhile(*arguments: Any, **options: Any) -> WorkerTimeoutError:
        late.set()
        next_begun.wait(300)
        return make_error(*arguments, **options)

    monkeypatch.setattr(thread_pool, "timed_out", finish_meanwhile)
    with ShardedDataLoader(SimpleDataset(range(3)).transform(read), 1, pool=ThreadPool(1, timeout=TIMEOUT)) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0]
        go_on.set()
        assert [batch.tolist() for batch in iterator] == [[1], [2]]


@pytest.mark.slow
def test_a_thread_that_hangs_in_sample_seed_delays_the_others_and_is_an_error() -> None:
    data, before = Stuck(), set(threading.enumerate())

    def seeded(index: int) -> float:
        with sample_seed():
            return random.random() + float(data[index][0])

    random.seed(5)
    states = random.getstate()
    with ShardedDataLoader(SimpleDataset(range(10)).transform(seeded), 2, pool=ThreadPool(2, timeout=0.5)) as loader:
        assert 3 in [error.index for error in until_the_end(iter(loader))[1]]  # type: ignore[attr-defined]
        data.go_on.set()
    for thread in set(threading.enumerate()) - before:  # also those that were given up while they waited for the seed
        thread.join(300)
    assert random.getstate() == states
    sampler = torch.utils.data.RandomSampler(range(10))  # started with the generators seeded
    with ShardedDataLoader(range(10), 5, sampler=sampler, seed=1) as other:
        assert sorted(int(value) for batch in other for value in batch) == list(range(10))


# -- without workers a task is read when somebody waits for it --------------------------------------------------------


def started(error: BaseException | None = None) -> tuple[InlinePool, list[int]]:
    """A pool over indices times ten, and what it reads. The first read raises the error."""
    read: list[int] = []

    def times_ten(index: int) -> int:
        read.append(index)
        if error and len(read) == 1:
            raise error
        return index * 10

    pool = InlinePool()
    pool.start(job(SimpleDataset(range(10)).transform(times_ten)))
    return pool, read


def test_nothing_is_read_before_somebody_waits_and_then_one_task_and_none_that_was_cancelled_or_closed() -> None:
    pool, read = started()
    pool.submit([task(1, 1, run=0), task(2, 2, run=1), task(3, 3, run=1)])
    pool.cancel(0)
    assert list(pool.wait(block=False)) == read == []
    (result,) = pool.wait()
    assert (result.seq, result.batch.tolist(), read) == (2, [20], [2])
    pool.close()
    assert not pool.started and list(pool.wait()) == [] and read == [2]
    pool.start(job(range(10)))
    assert list(pool.wait()) == [], "a task of the time before"


def test_a_task_that_was_interrupted_is_read_again() -> None:
    pool, _ = started(KeyboardInterrupt())
    pool.submit([task(1, 1)])
    with pytest.raises(KeyboardInterrupt):
        pool.wait()
    assert pool.waiting, "the user's code was interrupted, not the pool"
    assert [result.batch.tolist() for result in pool.wait()] == [[10]]


# -- the number of workers changes while a loader runs; batches, order, states, errors and random numbers do not -------


SAMPLES = 120


class Noisy:
    """Some samples raise an error. Each has random numbers; those of the global generators only in worker processes."""

    def __init__(self, bad: tuple[int, ...] = (), in_processes: bool = False) -> None:
        self.bad, self.in_processes = bad, in_processes

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        if index in self.bad:
            raise ValueError(f"bad {index}")
        return np.array([index, sample_rng().random(), np.random.random() if self.in_processes else 0])


class Lines(torch.utils.data.IterableDataset[Any]):
    """Iterable data in parts, which keeps its place in itself: two parts of one object would mix."""

    at = 0

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        part, parts = info.id, info.num_workers
        self.at = 0
        while self.at < 10 * (part + 2):
            self.at += 1
            yield np.array([part, parts, self.at, sample_rng().random()])


def loader_over(dataset: Any, pool: Pool, **options: Any) -> ShardedDataLoader[Any]:
    order = {} if isinstance(dataset, Lines) else {"shuffle": True}
    return ShardedDataLoader(dataset, 4, seed=3, pool=pool, **order, **options)


def outcomes(loader: ShardedDataLoader[Any], change: Callable[[int], Any] = lambda step: None) -> list[Any]:
    """The batches, errors and states of an epoch. Before each `next`, ``change`` is told its number."""
    found, batches = list[Any](), iter(loader)
    for step in range(1000):
        change(step)
        try:
            found.append(next(batches).tolist())
        except StopIteration:
            return found
        except ValueError as error:
            found.append(str(error))
        found.append(loader.state_dict())
    raise AssertionError("the epoch does not end")


@covering(method=POOLS[1:], dataset=["map", "bad", "parts", "few parts"])
def test_another_number_of_workers_changes_nothing_else(method: str, dataset: str) -> None:
    bad = (3, 50, 51) if dataset == "bad" else ()
    made = Lines if "parts" in dataset else functools.partial(Noisy, bad, method in PROCESS_POOLS)
    options: Any = {"parts": {"streams": 5}, "few parts": {"streams": 2}}.get(dataset, {})
    with loader_over(made(), make_pool(method, 2), **options) as loader:
        expected = [outcomes(loader) for _ in range(2)]
    rng, often = random.Random(f"{method} {dataset}"), 3 if method in ("thread", "fork") else 30  # others start slowly
    with loader_over(made(), make_pool(method, 2), **options) as loader:

        def change(step: int) -> None:
            if step % often == 1:
                loader.pool.resize(rng.choice([1, 2, 3, 4]))

        assert [outcomes(loader, change) for _ in range(2)] == expected
        assert loader.stats().replaced_workers == 0


class Awaiting(torch.utils.data.IterableDataset[int]):
    """Two parts, of which the first one has to wait for the end of the other one."""

    def __init__(self) -> None:
        self.has_ended = threading.Event()

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for number in range(4):
            if info.id == 0 and number == 1:
                assert self.has_ended.wait(120)
            yield 10 * info.id + number
        if info.id == 1:
            self.has_ended.set()


def test_a_part_is_read_by_one_thread_also_when_there_are_more() -> None:
    with ShardedDataLoader(Awaiting(), 1, streams=2, pool=ThreadPool(1), prefetch=12) as loader:
        batches = iter(loader)
        assert next(batches).item() == 0
        loader.pool.resize(2)
        assert [batch.item() for batch in batches] == [10, 1, 11, 2, 12, 3, 13]


@pytest.mark.parametrize("method", ["thread", *PROCESS_POOLS[:1]])
def test_one_worker_is_enough_while_slow_batches_are_in_flight(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # each look at the clock takes a second, so every batch is slow
    monkeypatch.setattr(reader, "host_clock", SimpleNamespace(now=lambda: float(next(seconds))))
    with ShardedDataLoader(range(64), 8, pool=make_pool(method, 4)) as loader:
        for step, batch in enumerate(loader):
            assert batch.tolist() == [*range(8 * step, 8 * step + 8)]
            loader.pool.resize(1 if step % 2 == 0 else 4)


def alive(pids: list[int]) -> set[int]:
    return {pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE}


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_workers_start_and_end_in_the_next_step_between_two_batches(method: str) -> None:
    pool = make_pool(method, 1)
    assert isinstance(pool, ProcessPool)
    with loader_over(Noisy(), pool) as loader:
        pool.resize(2)
        assert pool.pids == [] and repr(pool) == repr(make_pool(method, 2))
        batches = iter(loader)
        next(batches)
        first = pool.pids
        pool.resize(4)
        next(batches)
        assert pool.pids[:2] == first and len(alive(pool.pids)) == 4
        before = pool.pids
        pool.resize(1)
        next(batches)
        assert pool.pids == first[:1]
        next(batches)
        assert until(lambda: alive(before) == {first[0]})
        assert loader.stats().replaced_workers == 0


def test_threads_start_and_end_in_the_next_step_alone_so_that_close_has_none_to_wait_for() -> None:
    pool, before = ThreadPool(1), threading.active_count()
    with loader_over(Noisy(), pool) as loader:
        batches = iter(loader)
        next(batches)
        asks = threading.Thread(target=pool.resize, args=[5])
        asks.start()
        asks.join()
        assert threading.active_count() == before + 1 and loader.num_workers == 1
        next(batches)
        assert threading.active_count() == before + 5 and loader.num_workers == 5
        pool.resize(2)
        next(batches)
        assert until(lambda: threading.active_count() == before + 2)
        assert len(list(batches)) == SAMPLES // 4 - 3
        pool.resize(7)
    assert loader.num_workers == 2 and not pool.started


def test_prefetch_follows_unless_you_have_set_it_and_worker_init_fn_is_called_for_each_worker_that_starts() -> None:
    for prefetch, expected in ((None, [4, 8, 2, 4]), (7, [7, 7, 7, 7])):
        numbers, found = list[int](), []
        with loader_over(Noisy(), ThreadPool(2, worker_init_fn=numbers.append), prefetch=prefetch) as loader:
            for count in (2, 4, 1, 2):
                loader.pool.resize(count)
                list(loader)
                found.append(loader.prefetch)
        assert found == expected and sorted(numbers) == [0, 1, 1, 2, 3]


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_numbers_that_change_faster_than_workers_start_leave_few_of_them(method: str) -> None:
    with loader_over(range(SAMPLES), make_pool(method, 1)) as loader:
        batches = iter(loader)
        next(batches)
        pool: Any = loader.pool
        pool.resize(3)
        pool.adopt()
        started = pool.workers[1:]
        for number in [1, 3] * 20:
            for worker in started:  # as if none of them could start
                worker.ready = False
            pool.resize(number)
            pool.adopt()
        assert (pool.num_workers, pool.wanted, pool._transport.draining) == (1, 3, started[::-1])
        for worker in started:
            worker.ready = True
        pool.adopt()
        rows = {one.row for one in (*pool.workers, *pool._transport.draining)}
        assert len(rows) == 5, "who leaves keeps its place on the heartbeat"
        assert len(list(batches)) == SAMPLES // 4 - 1 and pool.num_workers == 3


def test_while_next_waits_another_thread_may_change_the_number() -> None:
    gate = Gate()
    with ShardedDataLoader(gate, 1, sampler=range(4), pool=ThreadPool(1)) as loader:
        found: list[Any] = []
        asks = threading.Thread(target=lambda: found.extend(loader))
        asks.start()
        assert gate.begun.acquire(timeout=60)
        loader.pool.resize(2)
        assert gate.begun.acquire(timeout=60)  # a second thread reads the next sample
        gate.open_for_all()
        asks.join(60)
        assert [int(batch) for batch in found] == [0, 1, 2, 3] and loader.num_workers == 2


@pytest.mark.parametrize("method", ["thread", *PROCESS_POOLS[:1]])
@pytest.mark.costly
def test_a_signal_handler_may_change_the_number_while_next_waits(method: str) -> None:
    with loader_over(Noisy(), make_pool(method, 1)) as loader:
        expected = outcomes(loader)
        before = signal.signal(signal.SIGALRM, lambda *_: loader.pool.resize(random.choice([1, 2, 3])))
        try:
            loader.set_epoch(0)
            signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
            assert outcomes(loader) == expected
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def test_wrong_numbers_change_nothing() -> None:
    with loader_over(Noisy(), ThreadPool(2)) as loader:
        for count, text in ((0, "at least 1, got 0: InlinePool"), (True, "an integer, got True"), (2.0, "an integer")):
            with pytest.raises((ValueError, TypeError), match=f"num_workers must be {text}"):
                loader.pool.resize(count)
            assert loader.num_workers == 2


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_a_pool_whose_loader_was_collected_reads_the_data_of_the_next_one(pool: str) -> None:
    one = make_pool(pool, 1)
    for start in (0, 10):
        loader = ShardedDataLoader(range(start, start + 4), 2, pool=one)
        assert next(iter(loader)).tolist() == [start, start + 1]
        del loader
        gc.collect()
    one.close()


def test_a_pool_without_workers_or_that_was_closed_says_so_until_another_loader_has_it() -> None:
    with pytest.raises(TypeError, match="InlinePool cannot change its number of workers: give the loader a ThreadPool"):
        InlinePool().resize(2)
    pool = ThreadPool(2)
    with loader_over(Noisy(), pool) as loader:
        next(iter(loader))
    with pytest.raises(LoaderClosedError):
        pool.resize(3)
    with loader_over(Noisy(), pool) as loader:
        pool.resize(3)
        assert loader.num_workers == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_no_workers_to_change() -> None:
    with loader_over(Noisy(), ThreadPool(2)) as loader:
        assert "RuntimeError: this loader was made in process" in in_child(lambda: loader.pool.resize(3))


def test_if_the_system_cannot_start_another_one_the_pool_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    process = "pools.process.transport.ProcessTransport.launch"
    for method, starts in (("thread", "pools.local._Thread.start"), (PROCESS_POOLS[0], process)):
        pool: Any = make_pool(method, 2)
        with loader_over(Noisy(), pool) as loader:
            expected = outcomes(loader)
            loader.set_epoch(0)
            batches = iter(loader)
            found = [next(batches).tolist()]
            with monkeypatch.context() as patch:
                patch.setattr(f"sharded_loader.{starts}", Mock(side_effect=RuntimeError("there is no room")))
                pool.resize(4)
                with pytest.warns(LoaderWarning, match=r"cannot have more workers: .*no room.* It goes on with those"):
                    found.append(next(batches).tolist())
            assert loader.num_workers == 2
            found += [batch.tolist() for batch in batches]
            assert found == [one for one in expected if isinstance(one, list)]


def test_each_thread_that_could_be_started_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, launch = ThreadPool(1), threading.Thread.start
    pool.start(job([1]))
    starts = iter([launch, Mock(side_effect=RuntimeError("there is no room"))])
    monkeypatch.setattr(threading.Thread, "start", lambda thread: next(starts)(thread))
    with pytest.warns(LoaderWarning, match="cannot have more workers"):
        pool.resize(4)
    assert pool.num_workers == 2
    pool.close()


def test_each_thread_that_remains_reads_on() -> None:
    gate, pool = Gate(), ThreadPool(3)
    pool.start(job(gate))
    pool.resize(2)
    pool.submit([task(seq, seq) for seq in range(2)])
    assert gate.begun.acquire(timeout=60) and gate.begun.acquire(timeout=60)
    gate.open_for_all()
    assert [result.batch.tolist() for result in results_of(pool, 2)] == [[0], [1]]
    pool.close()


def test_far_too_many_processes_are_a_warning() -> None:
    with loader_over(Noisy(), ProcessPool(1)) as loader, warnings.catch_warnings():
        warnings.simplefilter("error", LoaderWarning)
        with pytest.raises(LoaderWarning, match="1000 worker processes"):
            loader.pool.resize(1000)
        assert loader.num_workers == 1


@pytest.mark.skipif("fork" not in PROCESS_POOLS, reason="spawned workers start slowly")
@pytest.mark.slow
def test_more_workers_than_the_heartbeats_have_rows() -> None:
    pool = ProcessPool(60, start_method="fork")
    with loader_over(Noisy(), pool) as loader:
        expected = outcomes(loader)
        loader.set_epoch(0)
        changes = {3: 70, 10: 2, 15: 130}
        assert outcomes(loader, lambda step: pool.resize(changes[step]) if step in changes else None) == expected


PICTURES = """
    import resource
    import numpy as np
    from sharded_loader import ShardedDataLoader, SimpleDataset
    from sharded_loader.torch import DataLoader

    class Pictures(SimpleDataset):
        def __getitem__(self, index):
            return np.full((500, 375, 3), 1, np.uint8)

    for number, _ in enumerate({}):
        if number == 7:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
LOADERS = {
    "large batches": "ShardedDataLoader(Pictures(range(512)), 32)",
    "small batches": "ShardedDataLoader(Pictures(range(512)), 32, batchify_fn=len)",
    "drop-in": "DataLoader(Pictures(range(512)), 32, collate_fn=len)",
}


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a setting of glibc")
@pytest.mark.parametrize(
    ("kind", "chosen"), [*((kind, "") for kind in LOADERS), ("large batches", "MALLOC_TRIM_THRESHOLD_")]
)
def test_memory_of_samples_is_used_again_unless_the_user_has_set_it_otherwise(
    tmp_path: Path, kind: str, chosen: str
) -> None:
    """Eight batches, whose samples have 18 MB each: new memory is a page fault per 4 KB, 35,000 in all."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    own |= {chosen: "131072"} if chosen else {}
    faults = int(run_script(tmp_path / "program.py", PICTURES.format(LOADERS[kind]), env=own).stdout)
    assert (faults > 10_000) if chosen else (faults < 3_000)
