"""How workers start, first from the main process, then from the zygote; and what their pool owns and gives back."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
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
from unittest.mock import Mock

import multiprocess
import numpy as np
import psutil
import pytest
from conftest import ahead
from recovery_samples import values_of
from samples import Parents, Random

from sharded_loader import LoaderWarning, ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.base.system import ONE_THREAD
from sharded_loader.engine.heartbeat import IDLE, SAMPLE, heartbeat_in
from sharded_loader.engine.messages import Job
from sharded_loader.memory.codec import decode
from sharded_loader.pools.process import spawned, start, transport
from sharded_loader.pools.process.link import Link, Poller
from sharded_loader.pools.process.spawned import PRELOAD
from sharded_loader.pools.process.start import ZygoteGone
from sharded_loader.pools.process.transport import ProcessTransport, ProcessWorker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forked workers")
linux = pytest.mark.skipif(sys.platform != "linux", reason="counts what is under /proc")

ALL = list(range(40))
JOB = Job([1, 2, 3], None, 0)


def forked(num_workers: int = 2, **more: Any) -> ProcessPool:
    return ProcessPool(num_workers, start_method="fork", **more)


def transport_of(pool: Any) -> ProcessTransport:
    found: ProcessTransport = pool._transport
    return found


def zygote_process(pool: ProcessPool) -> Any:
    """The process that workers are forked from; None before there is one."""
    zygote = transport_of(pool).zygote
    return None if zygote is None else zygote._process


def kill_a_worker(pool: ProcessPool) -> None:
    """Kill the first worker, and wait until the kernel has got round to it."""
    worker = pool.workers[0]
    worker.process.kill()
    worker.wait(60)


def numbers(batches: Any) -> list[int]:
    """The first number of each sample."""
    return [int(index) for batch in batches for index in np.asarray(batch).reshape(len(batch), -1)[:, 0]]


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0


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


@pytest.mark.parametrize("closes", [True, False])
@pytest.mark.parametrize("raises", [True, False])
def test_a_wait_in_which_a_signal_handler_closes_the_pool_has_no_results(
    closes: bool, raises: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    timeouts: list[float | None] = []

    def wait(poller: Any, timeout: float | None) -> Any:
        timeouts.append(timeout)
        if closes:
            pool.close()
        if raises:
            raise OSError("poll")
        return [], set()

    monkeypatch.setattr(Poller, "wait", wait)
    pool = forked(1)
    pool.start(JOB)
    with pytest.raises(OSError, match="poll") if raises and not closes else contextlib.nullcontext():
        assert list(pool.wait(block=False)) == []
    assert timeouts == [0.0]
    pool.close()


@pytest.mark.parametrize(("options", "noted"), [({}, False), ({"timeout": 5.0}, True), ({"restarts": 1}, True)])
def test_each_sample_is_noted_if_it_has_a_timeout_or_no_second_try_and_only_forked_workers_get_a_zygote(
    options: dict[str, Any], noted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr(ProcessTransport, "start", lambda owner, job: jobs.append(job) or [])
    pools = forked(1, **options), ProcessPool(1, start_method="spawn", **options)
    for pool in pools:
        pool.start(JOB)
    assert [job.notes_samples for job in jobs] == [noted] * 2
    assert [pool.start_unfinished for pool in pools] == [True, False]


def test_workers_that_run_are_sent_another_job_and_all_have_a_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(number: int, job: Job) -> Any:
        return SimpleNamespace(link=Mock(), tasks={}, unread=[])

    owner = ProcessTransport(2, "spawn", None)
    monkeypatch.setattr(owner, "launch", launch)
    for dataset in ([1, 2], [3, 4], [5, 6]):
        assert owner.start(Job(dataset, None, 0)) == []
        sent = [worker.link.send.call_args.kwargs["content"] for worker in owner.workers]
        assert [decode(job).dataset for job in sent] == [dataset] * 2
    assert owner.heartbeat is not None
    heartbeat_in(owner.heartbeat.mapping, transport.ROWS - 1)[SAMPLE] = IDLE
    owner.workers.clear()
    owner.close()


# -- the first forked workers come from the main process, and their zygote a step later --------------------------------


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


def test_if_the_zygote_cannot_be_forked_a_warning_says_so_and_reading_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    pool = forked()
    with ShardedDataLoader(range(40), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        with monkeypatch.context() as here, pytest.warns(LoaderWarning, match="could not be forked .*as it is now"):
            here.setattr(start, "Zygote", refuse)
            got.append(next(iterator))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is said once
            got += iterator
            kill_a_worker(pool)  # one is forked now
            assert numbers(got) == numbers(loader) == ALL
        assert zygote_process(pool) is not None


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


def test_if_the_zygote_is_gone_the_worker_is_forked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []

    def gone(*_: Any) -> Any:
        raise ZygoteGone("the zygote process is gone: as a test")

    zygote = SimpleNamespace(fork=gone, close=lambda: closed.append(True))
    monkeypatch.setattr(start, "Zygote", lambda *_: zygote)
    owner = ProcessTransport(1, "fork", None)
    owner._is_up = True  # the first workers do not come from a zygote
    with pytest.warns(LoaderWarning, match="as it is now") as caught:
        owner.workers.append(owner.launch(0, Job(range(3), None, 0)))
    assert closed == [True] and len(caught) == 1
    assert owner.workers[0].is_alive() and owner.zygote is None
    owner.close()


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
        with pytest.warns(LoaderWarning, match=r"that workers are forked from \(pid \d+\) died: killed by SIGKILL"):
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


def test_a_default_timeout_of_sockets_does_not_end_the_zygote() -> None:
    socket.setdefaulttimeout(1e-6)
    try:
        pool = forked()
        with ahead(ShardedDataLoader(range(40), 4, pool=pool), False) as loader, warnings.catch_warnings():
            warnings.simplefilter("error", LoaderWarning)
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


def test_a_spawned_worker_leaves_no_open_file_that_python_warns_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start.private, "interpreter_flags", lambda: ["-W", "default"])
    with ShardedDataLoader(ALL, 20, pool=ProcessPool(1, start_method="spawn")) as loader:
        assert numbers(loader) == ALL
    assert "ResourceWarning" not in capfd.readouterr().err


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


# -- what a process pool owns: made once, given back once, and never while a process may still write to it ------------


def test_what_is_opened_is_opened_once_and_closed_once() -> None:
    before = open_descriptors()
    owner = ProcessTransport(1, "fork", None)
    owner.wake()  # nobody waits yet
    owner.open()
    opened = owner.waker, owner.heartbeat, owner.parent_guard
    owner.open()
    assert (owner.waker, owner.heartbeat, owner.parent_guard) == opened and opened[1]
    owner.wake()
    assert owner.waker is not None and owner.waker[0].poll()
    for _ in range(2):
        owner.close()
        assert (owner.waker, owner.heartbeat, owner.parent_guard) == (None, None, None)
    assert open_descriptors() == before
    owner.open()
    owner.close()
    assert open_descriptors() == before


STEPS = {
    "before the zygote forks": (start.Zygote, "fork", True),
    "when it was asked": (start.Zygote, "_receive", True),
    "when it has forked": (start.Zygote, "fork", False),
    "before the process is known": (transport, "open_pidfd", True),
    "when it is known": (transport, "open_pidfd", False),
    "before the heartbeat": (transport, "heartbeat_in", True),
    "before it is told": (Link, "send_segment", True),
    "when it is told": (Link, "send_segment", False),
}


@linux
@pytest.mark.costly(4)
@pytest.mark.filterwarnings("ignore:the process that workers are forked from")
@pytest.mark.parametrize(
    "step, event",
    [
        *itertools.product(STEPS, ["closed", "zygote killed"]),
        *itertools.product(["before the zygote forks", "before the heartbeat", "before it is told"], ["no memory"]),
    ],
)
def test_whatever_happens_in_a_launch_it_leaves_nothing(step: str, event: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, children = open_descriptors(), set(psutil.Process().children())
    supervisor = ProcessPool(2, start_method="fork", restarts=2)
    owner = transport_of(supervisor)
    supervisor._start(JOB)
    owner.make_zygote(JOB)
    zygote = zygote_process(supervisor)
    owner.workers[1].ready = True
    owner.workers[1].process.kill()
    owner.workers[1].wait(120.0)
    where, name, is_before = STEPS[step]
    no_memory = Mock(side_effect=MemoryError)
    happen = {"closed": supervisor.close, "zygote killed": zygote.kill, "no memory": no_memory}[event]
    known, happened = getattr(where, name), list[str]()

    def strike(*args: Any) -> Any:
        done = None if is_before else known(*args)
        if not happened:
            happened.append(name)
            happen()
        return known(*args) if is_before else done

    monkeypatch.setattr(where, name, strike)
    with contextlib.suppress(*{"closed": (Exception,), "no memory": (MemoryError,)}.get(event, ())):
        supervisor.replace(owner.workers[1])
    assert happened
    if event == "zygote killed":
        assert [one.is_alive() for one in owner.workers] == [True, True]
    supervisor.close()  # as at the end of the step
    gc.collect()  # heartbeats are mapped until then
    assert (open_descriptors(), set(psutil.Process().children()) - children) == (before, set())


@linux
@linux
def test_a_zygote_keeps_no_descriptors_of_the_workers_that_it_has_forked() -> None:
    pool = forked(restarts=9)
    pool.start(JOB)
    owner = transport_of(pool)
    owner.make_zygote(JOB)
    zygote, found = psutil.Process(zygote_process(pool).pid), set[int]()
    for _ in range(3):
        owner.workers[0].ready = True
        kill_a_worker(pool)
        pool.replace(owner.workers[0])
        found.add(zygote.num_fds())
    pool.close()
    assert len(found) == 1


def test_a_ctrl_c_while_the_system_is_asked_for_descriptors_leaves_none(monkeypatch: pytest.MonkeyPatch) -> None:
    receive, struck = socket.recv_fds, list[bool]()

    def strike(*args: Any) -> Any:
        received = receive(*args)
        if not struck:
            struck.append(True)
            signal.raise_signal(signal.SIGINT)
        return received

    before, owner = open_descriptors(), ProcessTransport(2, "fork", None)
    monkeypatch.setattr(socket, "recv_fds", strike)
    with pytest.raises(KeyboardInterrupt):
        owner.make_zygote(JOB)
    owner.close()
    assert open_descriptors() == before


@linux
def test_a_process_that_cannot_be_forked_leaves_no_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    before, pool = open_descriptors(), ProcessPool(2, start_method="fork")
    monkeypatch.setattr(os, "fork", Mock(side_effect=BlockingIOError(errno.EAGAIN, "too many processes")))
    with pytest.warns(LoaderWarning, match="too many processes"):
        transport_of(pool).make_zygote(JOB)
    with pytest.raises(BlockingIOError):
        pool._start(JOB)
    assert open_descriptors() == before


def test_a_slot_of_a_worker_that_is_over_is_free_and_what_one_that_was_left_behind_may_write_to_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner = ProcessTransport(1, "fork", None)
    slot = owner.arena.take(1 << 20)
    over: Any = SimpleNamespace(slots={(0, 0): slot, (0, 1): None})
    owner.free_slots(over)
    assert over.slots == {} and owner.arena.take(1 << 20) == slot
    reader, writer = os.pipe()
    stays = SimpleNamespace(pid=0, sentinel=reader, kill=lambda: None, close=lambda: None)
    worker = ProcessWorker(0, stays, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]
    worker.slots[0, 0] = slot
    monkeypatch.setattr(transport, "KILLED_GRACE", 0.0)
    worker.release()
    owner.release(worker)
    os.close(reader), os.close(writer)
    assert slot not in [owner.arena.take(1 << 20) for _ in range(10)]
    owner.close()


@pytest.mark.parametrize(
    ("counts", "told"), [([3, 5], 2), ([3, 3], 0), ([3, 1], 0), ([3, None], None), ([None, 5], None)]
)
def test_kills_for_memory_are_counted_from_the_start_on(
    counts: list[int | None], told: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "oom_kills", iter(counts).__next__)
    owner = ProcessTransport(1, "fork", None)
    owner.open()
    assert owner.oom_kills() == told
    owner.close()


@pytest.fixture
def sleeper() -> ProcessWorker:
    """A process that sleeps, and is sent nothing."""
    process = multiprocess.get_context("fork").Process(target=signal.pause, daemon=True)
    process.start()
    return ProcessWorker(0, process, SimpleNamespace(close=lambda: None))  # type: ignore[arg-type]


@pytest.mark.parametrize("pidfd", [True, False])
def test_a_worker_that_is_released_has_ended_and_says_how(
    pidfd: bool, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not pidfd:
        monkeypatch.setattr(transport, "open_pidfd", lambda pid: None)
    worker = request.getfixturevalue("sleeper")
    assert worker.is_alive() and not worker.is_busy()
    worker.heartbeat[SAMPLE] = 0
    assert worker.is_busy()
    sentinel = worker.sentinel
    worker.wait(0.0)
    for _ in range(2):
        worker.release()
        worker.kill()  # its pid may be another process's
        assert not worker.is_alive() and worker.exitcode == -signal.SIGKILL
    with pytest.raises(OSError):
        os.fstat(sentinel)


def test_a_worker_that_was_killed_for_its_silence_is_given_up_after_a_while(
    sleeper: ProcessWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not sleeper.is_over()
    monkeypatch.setattr(transport, "KILLED_GRACE", -1.0)
    assert not sleeper.is_over()  # nobody has killed it
    monkeypatch.setattr(sleeper.process, "kill", lambda: None)
    sleeper.kill()
    assert not sleeper.is_over()
    sleeper.hung = True
    assert sleeper.is_over()
    monkeypatch.undo()
    sleeper.release()
