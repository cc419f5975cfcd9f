"""The first forked workers come from the main process, and their zygote a step later. Nothing else changes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from conftest import ahead
from failures import Fails, kill
from refusing import in_child
from samples import Parents

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.base.limits import private_bytes
from sharded_loader.pools.process import start
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forked workers")

ALL = list(range(40))


def forked(num_workers: int = 2, **more: Any) -> ProcessPool:
    return ProcessPool(num_workers, start_method="fork", **more)


def numbers(batches: Any) -> list[int]:
    return [int(index) for batch in batches for index in np.asarray(batch).reshape(len(batch), -1)[:, 0]]


def kill_a_worker(pool: ProcessPool) -> None:
    worker = pool.workers[0]
    worker.process.kill()
    worker.wait(60)


def pool_of(iterator: Any) -> ProcessPool:
    """The pool of the drop-in's iterator."""
    pool = iterator._engine.pool
    assert isinstance(pool, ProcessPool)
    return pool


class FailsAt:
    """Sample i is i, but one of them fails when it is read."""

    def __init__(self, at: int, fail: Callable[[], Any]) -> None:
        self.at, self.fail = at, fail

    def __len__(self) -> int:
        return len(ALL)

    def __getitem__(self, index: int) -> int:
        if index == self.at:
            self.fail()
        return index


def fail() -> None:
    raise ValueError("the very first sample")


# -- workers that die, and a zygote that cannot be ------------------------------------------------------------------


def test_if_the_zygote_cannot_be_forked_a_warning_says_so_and_reading_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    pool = forked()
    with ShardedDataLoader(Parents(), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        with monkeypatch.context() as here, pytest.warns(RuntimeWarning, match="could not be forked .*as it is now"):
            here.setattr(start, "Zygote", refuse)
            got.append(next(iterator))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            got += iterator
            kill_a_worker(pool)  # one is forked now
            assert numbers(got) == numbers(loader) == ALL
        assert pool._transport.zygote is not None


def test_a_worker_that_dies_before_there_is_a_zygote_changes_nothing() -> None:
    pool = forked()
    with ShardedDataLoader(Parents(), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        assert pool._transport.zygote is None and set(got[0][:, 3].tolist()) == {os.getpid()}
        kill_a_worker(pool)
        got += iterator
        assert numbers(got) == ALL
        made = pool._transport.zygote
        assert made is not None
        assert {row[3] for batch in loader for row in batch.tolist()} <= {os.getpid(), made._process.pid}


@pytest.mark.parametrize("at", [0, 4, 39])
@pytest.mark.parametrize("persistent", [None, True, False])
@pytest.mark.costly(3)
def test_a_sample_that_kills_its_worker_once_is_read_again(at: int, persistent: bool | None, tmp_path: Path) -> None:
    """In the first step too, and where workers live for one epoch and no zygote is made for them."""
    dataset = FailsAt(at, Fails(kill, tmp_path / "count", times=1))
    if persistent is None:
        with ShardedDataLoader(dataset, 4, pool=forked()) as loader:
            assert [numbers(loader) for _ in range(2)] == [ALL, ALL]
    else:
        torchs = DataLoader(
            dataset, 4, num_workers=2, multiprocessing_context="fork", persistent_workers=persistent, on_error="raise"
        )
        assert [numbers(torchs) for _ in range(2)] == [ALL, ALL]


@pytest.mark.parametrize("after", [1, 5, 9])
@pytest.mark.costly
def test_without_persistent_workers_a_death_is_what_makes_a_zygote(after: int) -> None:
    iterator = iter(DataLoader(Parents(), 4, num_workers=2, multiprocessing_context="fork"))
    got = [next(iterator) for _ in range(after)]
    pool = pool_of(iterator)
    assert pool._transport.zygote is None
    kill_a_worker(pool)
    got += iterator
    assert numbers(got) == ALL


@pytest.mark.slow
def test_one_that_takes_too_much_memory_is_replaced_before_there_is_a_zygote() -> None:
    class Leaks:
        kept: ClassVar[list[Any]] = []

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            self.kept.append(np.ones(30 << 20, np.uint8))
            return index

    pool = forked(1, max_worker_memory=in_worker(private_bytes) + (45 << 20))
    with ShardedDataLoader(Leaks(), 1, pool=pool, prefetch=6) as loader:
        assert numbers(loader) == list(range(8))
        assert loader.stats().recycled_workers >= 1


def in_worker(function: Callable[[], int]) -> int:
    """What a function returns in a worker."""

    class Calls:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            return function()

    with ShardedDataLoader(Calls(), 1, pool=forked(1)) as loader:
        return int(next(iter(loader)))


# -- what else may come between the first step and the second ---------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("number", [1, 4])
@pytest.mark.slow
def test_another_number_of_workers_before_there_is_a_zygote(steps: int, number: int) -> None:
    pool = forked()
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator) for _ in range(steps)]
        pool.resize(number)
        got += iterator
        assert numbers(got) == ALL
        assert len(pool.pids) == number


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_loader_may_be_closed_after_any_of_the_first_steps(steps: int) -> None:
    pool = forked()
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    assert (pool._transport.zygote is not None) is (steps == 2)
    loader.close()
    assert pool.pids == [] and pool._transport.zygote is None


def test_an_error_in_the_first_batch_is_that_batch_s_alone() -> None:
    pool = forked()
    with ShardedDataLoader(FailsAt(0, fail), 4, pool=pool) as loader:
        iterator = iter(loader)
        with pytest.raises(ValueError, match="the very first sample"):
            next(iterator)
        pids = pool.pids
        assert numbers(iterator) == ALL[4:]
        assert pool.pids == pids and pool._transport.zygote is not None


def test_a_ctrl_c_in_the_first_step_loses_no_batch(tmp_path: Path) -> None:
    main = os.getpid()
    interrupt = Fails(lambda: os.kill(main, signal.SIGINT), tmp_path / "count", times=1)
    with ShardedDataLoader(FailsAt(0, interrupt), 4, pool=forked()) as loader:
        iterator = iter(loader)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
            signal.pause()  # if the batch was faster
        rest = numbers(iterator)
        assert rest in (ALL, ALL[4:])


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.costly
def test_a_ctrl_c_while_the_zygote_is_forked_loses_no_batch(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, pool = start.Zygote, forked()

    def interrupted(*given: Any) -> Any:
        monkeypatch.undo()
        if when == "before":
            signal.raise_signal(signal.SIGINT)
        made = make(*given)
        if when == "after":
            signal.raise_signal(signal.SIGINT)
        return made

    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        monkeypatch.setattr(start, "Zygote", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert numbers([*got, *iterator]) == ALL
        assert numbers(loader) == ALL and pool._transport.zygote is not None


def test_a_child_that_the_user_forks_before_there_is_a_zygote_keeps_nothing_alive() -> None:
    pool = forked()
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    got = [next(iterator)]
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        loader.close()  # the workers are not its own
        os._exit(0 if os.read(reader, 1) == b"" else 1)
    os.close(reader)
    got += [next(iterator), next(iterator)]
    kill_a_worker(pool)
    got += iterator
    assert numbers(got) == ALL
    loader.close()  # while the child lives
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


def test_the_users_handler_of_ended_children_runs_in_the_main_process_alone() -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGCHLD, lambda *_: seen.append(os.getpid()))
    try:
        pool = forked()
        with ShardedDataLoader(range(40), 4, pool=pool) as loader:
            iterator = iter(loader)
            got = [next(iterator)]
            kill_a_worker(pool)
            got += iterator
            assert numbers(got) == numbers(loader) == ALL
        assert set(seen) == {os.getpid()}
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_two_loaders_that_start_at_a_time_do_not_keep_each_other_s_workers() -> None:
    pools = forked(), forked()
    first, second = (ShardedDataLoader(range(40), 4, pool=pool) for pool in pools)
    with first, second:
        one, two = iter(first), iter(second)
        got = [next(one)], [next(two)]  # the workers of the second one know the ends of the first one's
        kill_a_worker(pools[0])
        got[0].append(next(one))  # the first has a zygote, and the second has none
        kill_a_worker(pools[1])
        got[0].extend(one)
        pids = pools[0].pids
        first.close()
        for pid in pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
        got[1].extend(two)
        assert numbers(got[0]) == numbers(got[1]) == ALL


def test_the_zygote_has_the_dataset_as_it_was_in_the_second_step() -> None:
    def read() -> str:
        data, pool = Parents(), forked()
        with ShardedDataLoader(data, 4, pool=pool) as loader:
            iterator = iter(loader)
            next(iterator), next(iterator)
            data.value = 2
            kill_a_worker(pool)
            list(iterator)
            return str({row[1] for batch in loader for row in batch.tolist()})

    assert in_child(read) == "{1}"


# -- the end ----------------------------------------------------------------------------------------------------------


def test_what_a_sample_has_printed_is_there_when_its_batch_is(tmp_path: Path) -> None:

    class Prints:
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> int:
            print("sample", index)
            return index

    path, before = tmp_path / "out", sys.stdout
    with path.open("a", buffering=1 << 16) as sys.stdout:
        try:
            pool = forked()
            with ahead(ShardedDataLoader(Prints(), 4, pool=pool), False) as loader:
                assert numbers(loader) == list(range(8))
                printed = path.read_text()
        finally:
            sys.stdout = before
    assert sorted(printed.split("\n")[:-1]) == [f"sample {index}" for index in range(8)]
