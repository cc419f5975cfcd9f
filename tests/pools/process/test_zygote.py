"""The process that forked workers come from may be killed, or stopped, as they may."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ahead
from process_samples import forked, kill_a_worker, zygote_process
from recovery_samples import values_of
from samples import Random

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.pools.process import start

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="forked workers")


def test_zygotes_that_are_killed_one_after_the_other_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, left = start.Zygote.fork, [0]

    def after_a_kill(self: start.Zygote, *given: Any) -> Any:
        if left[0]:
            left[0] -= 1
            zygote_process(pool).kill()
            zygote_process(pool).join()
        return fork(self, *given)

    monkeypatch.setattr(start.Zygote, "fork", after_a_kill)
    pool = forked()
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = next(iterator).tolist()
        left[0] = 2  # one for each worker
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"that workers are forked from \(pid \d+\) died: killed by SIGKILL"):
            got += [index for batch in iterator for index in batch.tolist()]
            while left[0]:  # until the kernel has got round to a worker
                list(loader)
        assert got == list(range(40))


def stop_and_kill_a_worker(pool: ProcessPool) -> int:
    """Stop the zygote, and give it something to do; its pid."""
    stopped = int(zygote_process(pool).pid)
    os.kill(stopped, signal.SIGSTOP)
    kill_a_worker(pool)
    return stopped


def test_a_zygote_that_is_slow_is_waited_for_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes: a fork may wait for processor time or for swapped memory, and a machine may be paused."""
    monkeypatch.setattr(start, "STEP", 0.01)  # all ten pass, and more
    said: list[str] = []
    pool = forked()
    with ShardedDataLoader(Random(60, 0), 4, True, seed=8, pool=pool) as loader:
        whole = [values_of(batch) for batch in loader]
        loader.set_epoch(0)
        stopped = stop_and_kill_a_worker(pool)
        steps = iter(range(10**6))
        # It is asked in each step. Ten of them come after the warning.
        monkeypatch.setattr(start, "should_stop", lambda: next(steps) == 20 and os.kill(stopped, signal.SIGCONT))
        monkeypatch.setattr(start, "warn", said.append)
        found = [values_of(batch) for batch in loader]
        assert found == whole
        assert zygote_process(pool).pid == stopped  # slow is not gone
    (text,) = said
    assert f"(pid {stopped}) has not answered for 10 s" in text and "keeps waiting" in text


def test_a_ctrl_c_ends_the_wait_for_a_slow_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STEP", 0.01)
    pool = forked()
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        list(loader)
        stop_and_kill_a_worker(pool)
        # Not before: on a busy machine a fork of the beginning may take as long.
        monkeypatch.setattr(start, "warn", lambda text: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            list(loader)


def test_a_warning_that_is_an_error_is_a_line_instead(capsys: pytest.CaptureFixture[str]) -> None:
    """It would cost a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start.warn("it is gone")
    assert capsys.readouterr().err == "sharded_loader: it is gone\n"


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
    pool = forked()
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    next(iterator)
    next(iterator)  # the zygote is made behind the first batch
    os.kill(zygote_process(pool).pid, signal.SIGSTOP)
    loader.close()


def test_a_default_timeout_of_sockets_does_not_end_the_zygote() -> None:
    socket.setdefaulttimeout(1e-6)
    try:
        pool = forked()
        with ahead(ShardedDataLoader(range(40), 4, pool=pool), False) as loader, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            list(loader)
            first = zygote_process(pool).pid
            kill_a_worker(pool)
            assert sorted(value for batch in loader for value in batch.tolist()) == list(range(40))
            assert zygote_process(pool).pid == first
    finally:
        socket.setdefaulttimeout(None)


def threads(index: int) -> int:
    """The threads of the process that reads it, after a product of matrices."""
    square = np.ones((300, 300))
    assert (square @ square)[0, 0] == 300
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(sys.platform != "linux", reason="threads are listed in /proc")
@pytest.mark.skipif(np.__version__.startswith("1.23."), reason="its OpenBLAS starts one after a fork")
def test_libraries_start_no_threads_in_a_forked_worker() -> None:
    threads(0)  # libraries start their threads in the main process
    with ShardedDataLoader(SimpleDataset(range(8)).transform(threads), 4, pool=forked()) as loader:
        assert {count for batch in loader for count in batch.tolist()} == {2}  # it reads in one, and receives in one


class Garbage:
    """A cycle. Its end notes the process."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


def test_workers_leave_the_garbage_of_the_main_process_alone(tmp_path: Path) -> None:
    """It may be a connection. Its end would wait for a thread that is not there, or close that of the main process."""
    gc.disable()
    try:
        Garbage(tmp_path / "ends")
        pool, pids = forked(1), set()
        data = SimpleDataset(range(40)).transform(lambda index: gc.collect() * 0 + os.getpid())
        with ahead(ShardedDataLoader(data, 4, pool=pool), False) as loader:
            pids |= {pid for batch in loader for pid in batch.tolist()}
            kill_a_worker(pool)  # the next one comes from the zygote
            pids |= {pid for batch in loader for pid in batch.tolist()}
        assert len(pids) == 2 and os.getpid() not in pids
        assert not (tmp_path / "ends").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "ends").read_text() == f"{os.getpid()}\n"
