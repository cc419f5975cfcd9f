"""The process that forked workers come from may be killed, or stopped, as they may."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recovery_samples import values_of
from samples import Random

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.pools.process import start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forked workers")


def zygote_pid(pool: ProcessPool) -> int:
    assert pool._transport.zygote is not None
    return int(pool._transport.zygote._process.pid)


@pytest.mark.slow
def test_a_zygote_that_is_killed_with_a_worker_changes_nothing() -> None:
    pool = ProcessPool(2, start_method="fork", restarts=100)
    with ShardedDataLoader(range(400), 4, pool=pool) as loader:
        got = []
        for batch in loader:
            got += batch.tolist()
            # At once, so that its pipe ends while the process itself has not: both orders occur.
            if pool._transport.zygote is not None:  # it is made behind the first batch
                pool._transport.zygote._process.kill()
            os.kill(pool.pids[len(got) // 4 % 2], signal.SIGKILL)
        assert got == list(range(400))


@pytest.mark.filterwarnings("ignore:the process that workers are forked from:RuntimeWarning")
def test_zygotes_that_are_killed_one_after_the_other_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, left = start.Zygote.fork, [0]

    def after_a_kill(self: start.Zygote, number: int, num_workers: int, conn: Any) -> Any:
        if left[0]:
            left[0] -= 1
            self._process.kill()
            self._process.join()
        return fork(self, number, num_workers, conn)

    monkeypatch.setattr(start.Zygote, "fork", after_a_kill)
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = next(iterator).tolist()
        left[0] = 2  # one for each worker
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        got += [index for batch in iterator for index in batch.tolist()]
        while left[0]:  # until the kernel has got round to a worker
            list(loader)
        assert got == list(range(40))


def stop_and_kill_a_worker(pool: ProcessPool) -> int:
    """Stop the zygote, and give it something to do; its pid."""
    stopped = zygote_pid(pool)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(pool.pids[0], signal.SIGKILL)
    pool._transport.workers[0].wait(60)  # until the kernel has got round to it
    return stopped


def test_a_zygote_that_is_slow_is_waited_for_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: a fork may wait for processor time or for swapped memory, and a machine may be paused."""
    monkeypatch.setattr(start, "STEP", 0.01)  # all ten pass, and more
    said: list[str] = []
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(Random(60, 0.002), 4, True, seed=8, pool=pool) as loader:
        whole = [values_of(batch) for batch in loader]
        loader.set_epoch(0)
        found, stopped = [], stop_and_kill_a_worker(pool)

        def warn(text: str) -> None:
            said.append(text)
            threading.Timer(0.1, os.kill, (stopped, signal.SIGCONT)).start()  # ten steps later

        monkeypatch.setattr(start, "warn", warn)
        found = [values_of(batch) for batch in loader]
        assert found == whole
        assert zygote_pid(pool) == stopped  # slow is not gone
    (text,) = said
    assert f"(pid {stopped}) has not answered for 10 s" in text and "keeps waiting" in text


def test_a_ctrl_c_ends_the_wait_for_a_slow_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STEP", 0.01)
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        list(loader)
        stop_and_kill_a_worker(pool)
        # Not before: on a busy machine a fork of the beginning may take as long.
        monkeypatch.setattr(start, "warn", lambda text: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            list(loader)


@pytest.mark.slow
def test_if_every_zygote_dies_workers_are_forked_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    fork = start.Zygote.fork
    killing = False

    def killed(self: start.Zygote, *given: Any) -> Any:
        if killing:
            self._process.kill()
        return fork(self, *given)

    monkeypatch.setattr(start.Zygote, "fork", killed)
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        list(loader)
        killing = True
        os.kill(pool.pids[0], signal.SIGKILL)
        pool._transport.workers[0].wait(60)
        with pytest.warns(RuntimeWarning, match=r"that workers are forked from \(pid \d+\) died: killed by SIGKILL"):
            assert [value for batch in loader for value in batch.tolist()] == list(range(40))
        os.kill(pool.pids[0], signal.SIGKILL)  # a worker that was forked directly is replaced too
        pool._transport.workers[0].wait(60)
        with pytest.warns(RuntimeWarning, match="as it is now"):
            assert [value for batch in loader for value in batch.tolist()] == list(range(40))


@pytest.mark.slow
def test_where_warnings_are_errors_no_batch_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(range(400), 4, pool=pool) as loader, warnings.catch_warnings():
        warnings.simplefilter("error")
        iterator = iter(loader)
        got = [*next(iterator).tolist(), *next(iterator).tolist()]
        os.kill(first := zygote_pid(pool), signal.SIGKILL)
        os.kill(pool.pids[0], signal.SIGKILL)
        for batch in iterator:
            got += batch.tolist()
        assert got == list(range(400))
        while zygote_pid(pool) == first:  # until the kernel has got round to the worker
            list(loader)
    assert "sharded_loader: the process that workers are forked from" in capsys.readouterr().err


def test_only_the_users_own_forks_are_warned_of(process_pool: ProcessPool) -> None:
    # As in every program with torch: Python 3.12 and later warn of a fork beside threads.
    ended = threading.Event()
    beside = threading.Thread(target=ended.wait)
    beside.start()
    try:
        with (
            warnings.catch_warnings(record=True) as caught,
            ShardedDataLoader(range(40), 4, pool=process_pool) as loader,
        ):
            warnings.simplefilter("always")
            filters = list(warnings.filters)
            list(loader)
            os.kill(process_pool.pids[0], signal.SIGKILL)  # replaced: another fork
            list(loader)
            assert [str(warning.message) for warning in caught] == []
            assert warnings.filters == filters  # they belong to all threads
            child = os.fork()
            if child == 0:
                os._exit(0)
            os.waitpid(child, 0)
            assert ["fork" in str(warning.message) for warning in caught] == [True] * (sys.version_info >= (3, 12))
    finally:
        ended.set()
        beside.join()


def test_close_does_not_wait_for_a_zygote_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STEP", 3600.0)  # otherwise the test itself would hang
    pool = ProcessPool(2, start_method="fork")
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    next(iterator)
    next(iterator)  # the zygote is made behind the first batch
    os.kill(zygote_pid(pool), signal.SIGSTOP)
    loader.close()


def test_a_default_timeout_of_sockets_does_not_end_the_zygote() -> None:
    socket.setdefaulttimeout(0.05)
    try:
        pool = ProcessPool(2, start_method="fork")
        with ShardedDataLoader(range(40), 4, pool=pool) as loader, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            list(loader)
            first = zygote_pid(pool)
            time.sleep(0.15)  # three times as long, or more
            os.kill(pool.pids[0], signal.SIGKILL)
            pool._transport.workers[0].wait(60)
            assert sorted(value for batch in loader for value in batch.tolist()) == list(range(40))
            assert zygote_pid(pool) == first
    finally:
        socket.setdefaulttimeout(None)


class Threads:
    """Sample i: the threads of the process that reads it, after a product of matrices."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        square = np.ones((300, 300))
        assert (square @ square)[0, 0] == 300
        return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.skipif(np.__version__.startswith("1.23."), reason="its OpenBLAS starts one after a fork")
def test_libraries_start_no_threads_in_a_forked_worker() -> None:
    _ = Threads()[0]  # libraries start their threads in the main process
    with ShardedDataLoader(Threads(), 4, pool=ProcessPool(2, start_method="fork")) as loader:
        assert {count for batch in loader for count in batch.tolist()} == {2}  # it reads in one, and receives in one


class Garbage:
    """A cycle. Its end notes the process."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


class Collects:
    """Sample 20 kills its worker once: the next worker comes from the zygote."""

    def __init__(self, killed: Path) -> None:
        self.killed = killed

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> int:
        gc.collect()
        if index == 20 and not self.killed.exists():
            self.killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return os.getpid()


def test_workers_leave_the_garbage_of_the_main_process_alone(tmp_path: Path) -> None:
    """It may be a connection. Its end would wait for a thread that is not there, or close that of the main process."""
    gc.disable()
    try:
        Garbage(tmp_path / "ends")
        pool = ProcessPool(1, start_method="fork")
        with ShardedDataLoader(Collects(tmp_path / "killed"), 4, pool=pool) as loader:
            pids = {pid for batch in loader for pid in batch.tolist()}
        assert len(pids) == 2 and os.getpid() not in pids
        assert not (tmp_path / "ends").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "ends").read_text() == f"{os.getpid()}\n"
