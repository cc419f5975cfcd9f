"""The first forked workers come from the main process, and their zygote a step later. Nothing else changes."""

from __future__ import annotations

import errno
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from conftest import ahead
from process_samples import ALL, forked, kill_a_worker, numbers, zygote_process
from samples import Parents

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.pools.process import start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forked workers")


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
        assert zygote_process(pool) is not None


def test_a_worker_that_dies_before_there_is_a_zygote_changes_nothing() -> None:
    pool = forked()
    with ShardedDataLoader(Parents(), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        assert zygote_process(pool) is None and set(got[0][:, 3].tolist()) == {os.getpid()}
        kill_a_worker(pool)
        got += iterator
        assert numbers(got) == ALL
        assert {row[3] for batch in loader for row in batch.tolist()} <= {os.getpid(), zygote_process(pool).pid}


# -- what else may come between the first step and the second ---------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_loader_may_be_closed_after_any_of_the_first_steps(steps: int) -> None:
    pool = forked()
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    for _ in range(steps):
        next(iterator)
    assert (zygote_process(pool) is not None) is (steps == 2)
    loader.close()
    assert pool.pids == [] and zygote_process(pool) is None


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
        assert numbers(loader) == ALL and zygote_process(pool) is not None


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


# -- the end ----------------------------------------------------------------------------------------------------------


def test_what_a_sample_has_printed_is_there_when_its_batch_is(tmp_path: Path) -> None:

    def prints(index: int) -> int:
        print("sample", index)
        return index

    path, before = tmp_path / "out", sys.stdout
    with path.open("a", buffering=1 << 16) as sys.stdout:
        try:
            data = SimpleDataset(range(8)).transform(prints)
            with ahead(ShardedDataLoader(data, 4, pool=forked()), False) as loader:
                assert [index for batch in loader for index in batch.tolist()] == list(range(8))
                printed = path.read_text()
        finally:
            sys.stdout = before
    assert sorted(printed.split("\n")[:-1]) == [f"sample {index}" for index in range(8)]
