"""The number of workers changes while a loader runs. Batches, order, states, errors and random numbers do not."""

from __future__ import annotations

import functools
import itertools
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
import torch
from refusing import in_child
from samples import Gate

from sharded_loader import InlinePool, LoaderClosedError, ProcessPool, ShardedDataLoader, ThreadPool, sample_rng
from sharded_loader.base.notices import LoaderWarning
from sharded_loader.engine import reader
from sharded_loader.engine.pool import Pool
from tests.conftest import POOLS, PROCESS_POOLS, covering, make_pool, until

SAMPLES = 120


pytestmark = pytest.mark.filterwarnings("ignore:.*worker processes:sharded_loader.LoaderWarning")


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


def test_threads_start_and_end_in_the_next_step_between_two_batches() -> None:
    pool, before = ThreadPool(1), threading.active_count()
    with loader_over(Noisy(), pool) as loader:
        batches = iter(loader)
        next(batches)
        pool.resize(5)
        next(batches)
        assert threading.active_count() == before + 5
        pool.resize(2)
        next(batches)
        assert until(lambda: threading.active_count() == before + 2)
        assert len(list(batches)) == SAMPLES // 4 - 3


def test_prefetch_follows_unless_you_have_set_it_and_worker_init_fn_is_called_for_each_worker_that_starts() -> None:
    for prefetch, expected in ((None, [4, 8, 2, 4]), (7, [7, 7, 7, 7])):
        numbers, found = list[int](), []
        with loader_over(Noisy(), ThreadPool(2, worker_init_fn=numbers.append), prefetch=prefetch) as loader:
            for count in (2, 4, 1, 2):
                loader.pool.resize(count)
                list(loader)
                found.append(loader.prefetch)
        assert found == expected and sorted(numbers) == [0, 1, 1, 2, 3]


def test_only_a_step_starts_workers_so_that_close_has_none_to_wait_for() -> None:
    with loader_over(Noisy(), ThreadPool(1)) as loader:
        batches = iter(loader)
        next(batches)
        asks = threading.Thread(target=loader.pool.resize, args=[3])
        asks.start()
        asks.join()
        assert loader.num_workers == 1
        next(batches)
        assert loader.num_workers == 3
        loader.pool.resize(5)
    assert loader.num_workers == 3 and not loader.pool.started


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
