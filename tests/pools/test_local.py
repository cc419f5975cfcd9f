"""A pool of threads: what hangs, what ends, and what a thread holds while it waits."""

from __future__ import annotations

import gc
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from recovery_samples import until_the_end
from samples import Gate

from sharded_loader import InlinePool, ShardedDataLoader, SimpleDataset, ThreadPool, WorkerTimeoutError, sample_seed
from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import PoolBroken
from sharded_loader.pools import local as thread_pool

TIMEOUT = 0.5


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


def test_another_job_is_read_by_the_threads_that_run(pool: ThreadPool) -> None:
    def names() -> set[str]:
        return {thread.name for thread in threading.enumerate() if thread.name.startswith("sharded_loader-")}

    assert read_one(pool, 1) == [1]
    before = names()
    assert read_one(pool, 2) == [2]
    assert names() == before and len(before) == 2


def test_a_pool_that_is_closed_twice_starts_again(pool: ThreadPool) -> None:
    for value in (1, 2):
        assert read_one(pool, value) == [value]
        pool.close()
        pool.close()
        assert not pool.started and pool.wait() == ()


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
        if 2 in samples:
            go_on.wait()
        return samples

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


def test_nothing_is_read_before_somebody_waits_and_then_one_task() -> None:
    pool, read = started()
    pool.submit([task(1, 1), task(2, 2)])
    assert list(pool.wait(block=False)) == read == []
    (result,) = pool.wait()
    assert (result.seq, result.batch.tolist(), read) == (1, [10], [1])


def test_a_task_that_was_interrupted_is_read_again() -> None:
    pool, _ = started(KeyboardInterrupt())
    pool.submit([task(1, 1)])
    with pytest.raises(KeyboardInterrupt):
        pool.wait()
    assert pool.waiting, "the user's code was interrupted, not the pool"
    assert [result.batch.tolist() for result in pool.wait()] == [[10]]


def test_cancelled_and_closed_tasks_are_not_read() -> None:
    pool, read = started()
    pool.submit([task(1, 1, run=0), task(2, 2, run=1)])
    pool.cancel(0)
    assert [result.seq for result in pool.wait()] == [2]
    pool.submit([task(3, 3)])
    pool.close()
    assert not pool.started and list(pool.wait()) == [] and read == [2]
