"""How a worker starts: first from the main process, then from the zygote, which may be killed, or stopped."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import socket
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import multiprocess
import pytest
from conftest import ahead
from multiprocess import spawn
from process_samples import ALL, forked, kill_a_worker, numbers, zygote_process
from recovery_samples import values_of
from samples import Parents, Random

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.base.system import ONE_THREAD
from sharded_loader.engine.messages import Job
from sharded_loader.pools.process import spawned, start
from sharded_loader.pools.process.spawned import PRELOAD
from sharded_loader.pools.process.start import ZygoteGone, is_starting_worker, starting_worker
from sharded_loader.pools.process.transport import ProcessTransport

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="forked workers")


def test_only_our_own_workers_do_not_run_the_user_s_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/script.py", raising=False)
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    assert "init_main_from_path" in spawn.get_preparation_data("theirs")
    with starting_worker():
        assert "init_main_from_path" not in spawn.get_preparation_data("ours")


def test_a_start_is_known_in_its_own_thread_alone_and_is_not_interrupted() -> None:
    def held_back() -> bool:
        return hasattr(signal, "pthread_sigmask") and signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    seen: list[bool] = []
    with starting_worker():
        thread = threading.Thread(target=lambda: seen.append(is_starting_worker()))
        thread.start()
        thread.join()
        assert is_starting_worker() and seen == [False]
        assert held_back() or not hasattr(signal, "pthread_sigmask")
    assert not is_starting_worker() and not held_back()


def test_a_worker_process_may_have_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocess.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="num_workers=0, or threads"):
        ProcessTransport(1, "spawn", None).launch(0, Job(range(3), None, 0))


@unix
def test_a_forkserver_imports_what_it_is_told_with_one_thread_and_forgets_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wanted_module.py").write_text("import os\nthreads = os.environ['OMP_NUM_THREADS']\n")
    (tmp_path / "broken_module.py").write_text("raise SystemExit(3)\n")
    for name in ONE_THREAD:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    request = {"modules": ["broken_module", "no_such_module", "wanted_module"], "path": [str(tmp_path), *sys.path]}
    monkeypatch.setenv(PRELOAD, json.dumps(request))
    before = list(sys.path)
    spawned._preload()
    assert sys.modules.pop("wanted_module").threads == "1"
    assert sys.path == before and PRELOAD not in os.environ
    assert {name: os.environ[name] for name in ONE_THREAD if name in os.environ} == {"OMP_NUM_THREADS": "7"}


# -- the first forked workers come from the main process, and their zygote a step later --------------------------------


@unix
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_loader_may_be_closed_after_any_of_the_first_steps(steps: int) -> None:
    pool = forked()
    loader = ShardedDataLoader(Parents(), 4, pool=pool)
    iterator = iter(loader)
    for _ in range(steps):
        assert {*next(iterator)[:, 3].tolist()} == {os.getpid()}
    assert (zygote_process(pool) is not None) is (steps == 2)
    loader.close()
    assert pool.pids == [] and zygote_process(pool) is None


@unix
def test_if_the_zygote_cannot_be_forked_a_warning_says_so_and_reading_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    pool = forked()
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
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


@unix
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.costly
def test_a_ctrl_c_while_the_zygote_is_forked_loses_no_batch(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, pool = start.Zygote, forked()

    def interrupted(*given: Any) -> Any:
        monkeypatch.undo()
        made = make(*given) if when == "after" else None
        signal.raise_signal(signal.SIGINT)
        return made or make(*given)

    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        monkeypatch.setattr(start, "Zygote", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        assert numbers([*got, *iterator]) == ALL
        assert numbers(loader) == ALL and zygote_process(pool) is not None


@unix
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
    assert numbers([*got, *iterator]) == ALL
    loader.close()  # while the child lives
    os.close(writer)
    assert os.waitpid(child, 0)[1] == 0


@unix
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


@unix
def test_what_a_sample_has_printed_is_there_when_its_batch_is(tmp_path: Path) -> None:
    path, before = tmp_path / "out", sys.stdout
    with path.open("a", buffering=1 << 16) as sys.stdout:
        try:
            data = SimpleDataset(["one", "two"]).transform(print)
            with ahead(ShardedDataLoader(data, 1, pool=forked(), batchify_fn=len), False) as loader:
                assert list(loader) == [1, 1]
                printed = path.read_text()
        finally:
            sys.stdout = before
    assert sorted(printed.split()) == ["one", "two"]


# -- the zygote --------------------------------------------------------------------------------------------------------


@unix
def test_if_the_zygote_is_gone_the_worker_is_forked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def gone(*_: Any) -> Any:
        raise ZygoteGone("the zygote process is gone: as a test")

    zygote = SimpleNamespace(fork=gone, close=lambda: closed.append(True))
    monkeypatch.setattr(start, "Zygote", lambda *_: zygote)
    owner = ProcessTransport(1, "fork", None)
    owner._is_up = True  # the first workers do not come from a zygote
    with pytest.warns(RuntimeWarning, match="as it is now") as caught:
        owner.workers.append(owner.launch(0, Job(range(3), None, 0)))
    assert closed == [True] and len(caught) == 1
    assert owner.workers[0].is_alive() and owner.zygote is None
    owner.close()


@unix
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
        got = [next(iterator)]
        left[0] = 2  # one for each worker
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.warns(RuntimeWarning, match=r"that workers are forked from \(pid \d+\) died: killed by SIGKILL"):
            got += iterator
            while left[0]:  # until the kernel has got round to a worker
                list(loader)
        assert numbers(got) == ALL


def stop_and_kill_a_worker(pool: ProcessPool) -> int:
    """Stop the zygote, and give it something to do; its pid."""
    stopped = int(zygote_process(pool).pid)
    os.kill(stopped, signal.SIGSTOP)
    kill_a_worker(pool)
    return stopped


@unix
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
        assert [values_of(batch) for batch in loader] == whole
        assert zygote_process(pool).pid == stopped  # slow is not gone
    (text,) = said
    assert f"(pid {stopped}) has not answered for 10 s" in text and "keeps waiting" in text


@unix
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


@unix
def test_close_does_not_wait_for_a_zygote_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "STEP", 3600.0)  # otherwise the test itself would hang
    pool = forked()
    loader = ShardedDataLoader(range(40), 4, pool=pool)
    iterator = iter(loader)
    next(iterator), next(iterator)  # the zygote is made behind the first batch
    os.kill(zygote_process(pool).pid, signal.SIGSTOP)
    loader.close()


def test_a_warning_that_is_an_error_is_a_line_instead(capsys: pytest.CaptureFixture[str]) -> None:
    """It would cost a batch."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start.warn("it is gone")
    assert capsys.readouterr().err == "sharded_loader: it is gone\n"


@unix
def test_only_the_users_own_forks_are_warned_of(process_pool: ProcessPool) -> None:
    # As in every program with torch: Python 3.12 and later warn of a fork beside threads.
    ended = threading.Event()
    beside = threading.Thread(target=ended.wait)
    beside.start()
    loader = ShardedDataLoader(range(40), 4, pool=process_pool)
    try:
        with warnings.catch_warnings(record=True) as caught, loader:
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


@unix
def test_a_default_timeout_of_sockets_does_not_end_the_zygote() -> None:
    socket.setdefaulttimeout(1e-6)
    try:
        pool = forked()
        with ahead(ShardedDataLoader(range(40), 4, pool=pool), False) as loader, warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            list(loader)
            first = zygote_process(pool).pid
            kill_a_worker(pool)
            assert numbers(loader) == ALL
            assert zygote_process(pool).pid == first
    finally:
        socket.setdefaulttimeout(None)


class Garbage:
    """A cycle. Its end notes the process."""

    def __init__(self, path: Path) -> None:
        self.path, self.itself = path, self

    def __del__(self) -> None:
        with open(self.path, "a") as file:
            file.write(f"{os.getpid()}\n")


@unix
def test_workers_leave_the_garbage_of_the_main_process_alone(tmp_path: Path) -> None:
    """It may be a connection. Its end would wait for a thread that is not there, or close that of the main process."""
    gc.disable()
    try:
        Garbage(tmp_path / "ends")
        pool, pids = forked(1), set()
        data = SimpleDataset(range(40)).transform(lambda index: gc.collect() * 0 + os.getpid())
        with ahead(ShardedDataLoader(data, 4, pool=pool), False) as loader:
            pids |= {*numbers(loader)}
            kill_a_worker(pool)  # the next one comes from the zygote
            pids |= {*numbers(loader)}
        assert len(pids) == 2 and os.getpid() not in pids
        assert not (tmp_path / "ends").exists()
    finally:
        gc.enable()
    gc.collect()
    assert (tmp_path / "ends").read_text() == f"{os.getpid()}\n"
