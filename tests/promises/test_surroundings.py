"""P7, and the program around the loader: its end, signals, forks, reapers, open files; calls that a kernel refuses."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, POOLS, PROCESS_POOLS, begin, covering, make_pool, shared_memory_names, until
from failures import hangs_with_the_gil
from inside import transport_of, zygote_pids
from programs import run_script
from refusing import CALLS, ERRORS, FCNTL, can_refuse, in_child, refuse
from samples import Random, StartsAndDies

from sharded_loader import ArrayDataset, LoaderWarning, ProcessPool, ShardedDataLoader, SimpleDataset, WorkerDiedError
from sharded_loader.base import system
from sharded_loader.pools.process import transport, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")

TRAINER = """
import ctypes, os, pathlib, sys, time
from sharded_loader import ProcessPool, ShardedDataLoader

method, ending, folder = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])

class Holds:
    def __len__(self): return 8
    def __getitem__(self, i):
        if i >= 2:
            (folder / str(os.getpid())).touch()
            ctypes.PyDLL(None).sleep(600)  # in C, with the GIL
        return i

pool = ProcessPool(2, start_method=method)
loader = ShardedDataLoader(Holds(), 1, pool=pool, prefetch=4)
iterator = iter(loader)
next(iterator), next(iterator)
child = 0
if ending == "child":
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
while not all((folder / str(pid)).exists() for pid in pool.pids):
    time.sleep(0.01)
zygote = pool._transport.zygote
print(child, zygote._process.pid if zygote else 0, *pool.pids, flush=True)
if ending == "_exit":
    os._exit(0)
elif ending != "return":
    time.sleep(60)
"""


def lives(pid: int) -> bool:
    """Whether it is there and no zombie, which is its reaper's affair."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(pids: Iterable[int]) -> None:
    """All of them end. On an idle machine it takes a few hundredths of a second."""
    left = [*pids]
    try:
        assert until(lambda: not any(map(lives, left)), 60.0), left
    finally:
        for pid in filter(lives, left):
            os.kill(pid, signal.SIGKILL)


# Programs of their own take seconds each: most are left to `make test-all`.
@pytest.mark.slow
@linux
@METHODS
@pytest.mark.parametrize("ending", ["alone", "child", "_exit", "return"])
def test_workers_that_hold_the_gil_go_with_their_trainer(method: str, ending: str, tmp_path: Path) -> None:
    """Killed; killed while a child that the user forked lives on; left by ``os._exit``; at its end."""
    script, folder = tmp_path / "script.py", tmp_path / "begun"
    folder.mkdir()
    script.write_text(textwrap.dedent(TRAINER))
    names = shared_memory_names()
    with subprocess.Popen(
        [sys.executable, str(script), method, ending, str(folder)], stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        child, *pids = map(int, trainer.stdout.readline().split())
        if ending in ("alone", "child"):
            trainer.kill()
        trainer.wait(300)
        try:
            assert_gone(pid for pid in pids if pid)
            assert (child == 0) or lives(child)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
    assert shared_memory_names() <= names


@linux
@METHODS
def test_close_does_not_wait_for_workers_that_hold_the_gil(method: str, tmp_path: Path) -> None:
    pool = ProcessPool(2, start_method=method)

    def holds(index: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        hangs_with_the_gil()
        return index

    loader = ShardedDataLoader(SimpleDataset(range(8)).transform(holds), 1, pool=pool, prefetch=2)
    waits = begin(loader)
    assert until(lambda: len(os.listdir(tmp_path)) == 2)
    everybody = [*pool.pids, *zygote_pids(pool)]
    loader.close()
    waits.join()
    # Reaped, too: not even a zombie.
    assert [pid for pid in everybody if psutil.pid_exists(pid) and method != "forkserver"] == []
    assert_gone(everybody)


@linux
@pytest.mark.slow
def test_workers_of_a_killed_zygote_end_with_the_trainer(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, sys, time
        from sharded_loader import ProcessPool, ShardedDataLoader
        pool = ProcessPool(2, start_method="fork")
        loader = ShardedDataLoader(range(8), 1, pool=pool)
        iterator = iter(loader)
        next(iterator), next(iterator)  # the zygote is made behind the first batch
        first = pool._transport.zygote._process.pid
        os.kill(first, signal.SIGKILL)
        os.kill(pool.pids[0], signal.SIGKILL)
        assert len(list(iterator)) == 6
        while (zygote := pool._transport.zygote) is None or zygote._process.pid == first:
            os.kill(pool.pids[0], signal.SIGKILL)  # another zygote is made for the next worker
            assert len(list(loader)) == 8
        print(zygote._process.pid, *pool.pids, flush=True)
        time.sleep(60)
        """)
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        pids = list(map(int, trainer.stdout.readline().split()))
        trainer.kill()
    assert len(pids) == 3
    assert_gone(pids)


@pytest.mark.slow
@METHODS
def test_a_handler_for_sigterm_does_not_keep_the_program_from_ending(tmp_path: Path, method: str) -> None:
    run_script(
        tmp_path / "script.py",
        """
        import signal, sys, tempfile
        folder = tempfile.TemporaryDirectory()  # a weakref.finalize before multiprocess comes
        signal.signal(signal.SIGTERM, lambda *_: None)
        from sharded_loader import ProcessPool, ShardedDataLoader
        loader = ShardedDataLoader(range(100), 4, pool=ProcessPool(2, start_method=sys.argv[1]))
        iterator = iter(loader)
        next(iterator)
        """,
        method,
    )


@METHODS
def test_a_forked_child_may_have_a_loader_of_its_own(method: str) -> None:
    """Also where the parent has used the same start method before."""

    def read() -> list[int]:
        with ShardedDataLoader(range(8), 4, pool=ProcessPool(1, start_method=method)) as loader:
            return [index for batch in loader for index in batch.tolist()]

    assert read() == list(range(8))
    assert in_child(read) == str(read())


@pytest.mark.costly
@METHODS
@pytest.mark.parametrize("reaper", ["ignore", "handler", pytest.param("thread", marks=pytest.mark.slow)])
@pytest.mark.parametrize("when", ["before", pytest.param("after", marks=pytest.mark.slow)])
def test_a_worker_is_replaced_in_a_program_that_reaps_all_children(method: str, reaper: str, when: str) -> None:
    """Also again and again: by the zygote that was there from the beginning, without a warning."""

    def work() -> object:
        if when == "before":
            reap_all(reaper)
        pool = ProcessPool(2, start_method=method)
        with warnings.catch_warnings(), ShardedDataLoader(range(400), 4, pool=pool) as loader:
            warnings.simplefilter("error", LoaderWarning)
            iterator = iter(loader)
            # The zygote is made behind the first batch.
            got = [*next(iterator).tolist(), *next(iterator).tolist()]
            zygote = zygote_pids(pool)
            if when == "after":
                reap_all(reaper)
            for batch in iterator:
                got += batch.tolist()
                if len(got) in (40, 120, 200):
                    worker = transport_of(pool).workers[0]
                    worker.kill()
                    worker.wait(300)
            assert zygote_pids(pool) == zygote
            list(loader)
        assert got == list(range(400))
        return "as ever"

    assert in_child(work) == "as ever"


def reap_all(how: str) -> None:
    """As programs do that start many children and look after none."""
    if how == "ignore":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    elif how == "handler":
        signal.signal(signal.SIGCHLD, lambda *_: reap(os.WNOHANG))
    else:
        threading.Thread(target=reap, args=(0,), daemon=True).start()


def reap(options: int) -> None:
    while True:
        try:
            if os.waitpid(-1, options)[0] == 0:
                return
        except ChildProcessError:
            if options:
                return
            threading.Event().wait(0.001)


def test_workers_keep_what_the_program_says_of_its_children(process_pool: ProcessPool) -> None:
    """SIGCHLD ignored is inherited, by fork and by a new program; a handler is the trainer's."""

    asks = SimpleDataset([0]).transform(lambda _: int(signal.getsignal(signal.SIGCHLD)))  # type: ignore[arg-type]

    def work(handler: Any, pool: ProcessPool) -> int:
        signal.signal(signal.SIGCHLD, handler)
        with ShardedDataLoader(asks, 1, pool=pool) as loader:
            return int(next(iter(loader)))

    method = process_pool.start_method
    if method != "forkserver":  # that one has a handler of its own, for all
        assert in_child(lambda: work(signal.SIG_IGN, ProcessPool(1, start_method=method))) == str(int(signal.SIG_IGN))
    assert in_child(lambda: work(print, process_pool)) == str(int(signal.SIG_DFL))


def test_the_trainer_s_signal_handlers_run_in_the_trainer_alone(tmp_path: Path) -> None:
    """A batch system signals the whole process group; the zygote does not save a checkpoint, and lives."""

    def work() -> object:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            signal.signal(number, lambda *_: (tmp_path / str(os.getpid())).touch())
        pool = ProcessPool(2, start_method="fork")
        with warnings.catch_warnings(), ShardedDataLoader(range(40), 4, pool=pool) as loader:
            warnings.simplefilter("error", LoaderWarning)
            iterator = iter(loader)
            # The zygote is made behind the first batch.
            got = [*next(iterator).tolist(), *next(iterator).tolist()]
            (zygote,) = zygote_pids(pool)
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
                for pid in (zygote, os.getpid()):
                    os.kill(pid, number)
            for worker in list(transport_of(pool).workers):  # here a signal ends a worker, which is replaced
                while worker.is_alive():  # before its first line it ignores signals, as the zygote does
                    os.kill(worker.pid, signal.SIGTERM)
                    worker.wait(0.1)
            got += [index for batch in iterator for index in batch.tolist()]
            assert zygote_pids(pool) == [zygote] and got == list(range(40))
        assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
        return "the trainer's"

    assert in_child(work) == "the trainer's"


@pytest.mark.slow
def test_a_worker_forked_while_a_thread_samples_can_sample_too(tmp_path: Path) -> None:
    run_script(
        tmp_path / "script.py",
        """
        import random, threading
        from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool, sample_seed
        inside, leave = threading.Event(), threading.Event()
        class Holds:
            def __len__(self): return 1
            def __getitem__(self, i):
                with sample_seed():
                    inside.set()
                    leave.wait()
                return i
        class Draws:
            def __len__(self): return 2
            def __getitem__(self, i):
                with sample_seed(): return random.random()
        threads = ShardedDataLoader(Holds(), 1, pool=ThreadPool(1))
        reads = threading.Thread(target=list, args=(threads,))
        reads.start()
        inside.wait()
        with ShardedDataLoader(Draws(), 2, pool=ProcessPool(1, start_method="fork")) as loader:
            next(iter(loader))
        leave.set()
        reads.join()
        """,
    )


@pytest.mark.parametrize("name", ["inline", "thread", "fork"])
def test_a_loader_in_a_cycle_with_its_own_job_is_collected(name: str) -> None:
    """As of a trainer with a method that is the batchify function, a loader, and an iterator of it."""
    trainer: Any = type("Trainer", (), {"count": staticmethod(len)})()
    trainer.loader = ShardedDataLoader(
        range(8), 4, pool=make_pool(name), batchify_fn=lambda samples, trainer=trainer: trainer.count(samples)
    )
    trainer.iterator = iter(trainer.loader)
    assert next(trainer.iterator) == 4
    alive = weakref.ref(trainer)
    del trainer
    assert until(lambda: gc.collect() >= 0 and alive() is None)  # a thread may be reading the next batch yet


def with_many_files_open(work: Callable[[], object], count: int = 1500) -> str:
    """What ``work`` returns, as text, in a process whose next descriptor is above what ``select`` takes."""

    def opened() -> object:
        import resource

        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (4000, hard))
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        assert files[-1] > 1023
        return work()

    return in_child(opened)


@pytest.mark.costly
@pytest.mark.parametrize(
    "name", [name if name != "forkserver" else pytest.param(name, marks=pytest.mark.slow) for name in POOLS]
)
def test_more_open_files_than_select_takes_are_no_problem_nor_is_a_child_that_the_user_forks(name: str) -> None:
    def work() -> object:
        with ShardedDataLoader(Random(64), 8, pool=make_pool(name)) as loader:
            iterator = iter(loader)
            lengths = [len(next(iterator))]
            if isinstance(loader.pool, ProcessPool):
                os.kill(loader.pool.pids[0], 9)  # the one that takes its place also begins with all these files
                pid = os.fork()  # a slot that a forked child may still see comes back when that has ended
                if pid == 0:
                    os._exit(0)
                os.waitpid(pid, 0)
            return lengths + [len(batch) for batch in iterator]

    assert with_many_files_open(work) == str([8] * 8)


def start(pool: ProcessPool) -> str:
    """The error of a pool that cannot start."""
    with ShardedDataLoader(range(64), 4, pool=pool) as loader:
        with pytest.raises(WorkerDiedError) as caught:
            next(iter(loader))
        return f"{caught.value}{caught.value.__cause__}"


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("owner", "method"), [(threading.Thread, "start"), (worker.WorkerThreads, "_open_shared")])
@pytest.mark.filterwarnings("ignore:8 worker processes share")
@pytest.mark.slow
def test_workers_that_cannot_start_write_why(owner: type, method: str, capfd: pytest.CaptureFixture[str]) -> None:
    """In the main thread; in the receiver thread, before there is a job."""

    def work() -> object:
        setattr(owner, method, no_thread)
        return start(ProcessPool(8, start_method="fork"))

    error = in_child(work)
    assert "died while it started" in error and "its own output on stderr may say more" in error, error
    written = capfd.readouterr().err
    assert "RuntimeError: can't start new thread" in written and "in no_thread" in written, written


def test_a_worker_that_cannot_start_once_is_replaced(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def work() -> object:
        begin = threading.Thread.start

        def fails_once(self: Any) -> None:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "failed").touch(exist_ok=False)
                no_thread()
            begin(self)

        threading.Thread.start = fails_once  # type: ignore[method-assign]
        with ShardedDataLoader(range(64), 4, pool=ProcessPool(2, start_method="fork")) as loader:
            return [index for batch in loader for index in batch.tolist()]

    assert in_child(work) == str(list(range(64)))
    written = capfd.readouterr().err
    assert written.count("RuntimeError: can't") == written.count("Traceback") == 1, written


@pytest.mark.slow
def test_spawned_workers_that_lack_a_library_write_which(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broken" / "numpy").mkdir(parents=True)
    (tmp_path / "broken" / "numpy" / "__init__.py").write_text("raise ImportError('no such symbol')\n")

    def work() -> object:
        sys.path.insert(0, str(tmp_path / "broken"))  # of this process NumPy is imported
        return start(ProcessPool(4, start_method="spawn"))

    error = in_child(work)
    assert "died while it started" in error and "ImportError: no such symbol" in capfd.readouterr().err, error


seccomp = pytest.mark.skipif(not can_refuse(), reason="this machine has no seccomp")

USED = ("pidfd_open", "memfd_create", "fallocate", "sendmsg", "recvmsg", "sigaltstack", *FCNTL)

REFUSED = {
    **{call: (call,) for call in USED},
    "everything": tuple(call for call in (*CALLS, *FCNTL) if call != "fcntl"),
}
"""Each optional call that the library makes, alone; and these with others that it might come to use, together."""


def read_and_lose_a_worker(method: str) -> tuple[list[float], int]:
    """The numbers of all batches of an epoch in which a worker is killed; in how many segments the batches were."""
    pool = ProcessPool(2, start_method=method)
    data = ArrayDataset(np.repeat(np.arange(160.0), 4096).reshape(160, 4096))  # goes to the workers in memory, too
    with ShardedDataLoader(data, 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        os.kill(pool.pids[0], signal.SIGKILL)
        got += iterator
        segments = len(transport_of(pool).arena.segments)
        assert all(batch.shape == (4, 4096) for batch in got)
    assert pool.pids == []
    return torch.cat(got)[:, -1].tolist(), segments


@seccomp
@covering(1, method=PROCESS_POOLS, call=REFUSED, error=ERRORS)
@pytest.mark.filterwarnings("ignore:this system does not pass descriptors")
@pytest.mark.costly(4)
def test_a_refused_call_changes_no_batch_and_no_worker_is_lost(method: str, call: str, error: str) -> None:
    def work() -> object:
        refuse(REFUSED[call], error)
        found, segments = read_and_lose_a_worker(method)
        assert segments > 0, "batches lie in shared memory"
        return found

    assert in_child(work) == str([float(number) for number in range(160)])


@linux
@METHODS
@pytest.mark.parametrize("how", ["with the GIL", pytest.param("without a signal", marks=seccomp)])
def test_workers_go_with_a_killed_trainer_whatever_they_are_in(method: str, how: str, tmp_path: Path) -> None:
    """In worker_init_fn, before a thread of theirs has had a turn; where F_SETSIG is refused, by that thread."""

    def begins(number: int) -> None:
        c = ctypes.PyDLL(None)
        c.creat(os.fsencode(tmp_path / str(os.getpid())), 0o600)  # not in Python, which lets others have the GIL
        if how == "with the GIL":
            c.sleep(600)

    trainer = os.fork()
    if trainer == 0:
        try:
            if how == "without a signal":
                refuse(["F_SETSIG"], "EPERM")
            pool = ProcessPool(2, start_method=method, worker_init_fn=begins)
            iterator = iter(ShardedDataLoader(range(8), 1, pool=pool))
            next(iterator)
            signal.pause()
        finally:
            os._exit(1)
    assert until(lambda: len(os.listdir(tmp_path)) == 2)
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert_gone(map(int, os.listdir(tmp_path)))


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        os.kill(int((tmp_path / "started").read_text()), signal.SIGKILL)


@linux
@pytest.mark.costly
@covering(1, spawned=True, method=PROCESS_POOLS, how=["fork", "program"], known=["by pidfd", "by pipe"])
def test_a_dead_worker_is_noticed_while_a_process_that_it_started_lives(
    method: str, how: str, known: str, folder: Path
) -> None:
    def work() -> object:
        if known == "by pipe":
            transport.open_pidfd = lambda pid: None
        with ShardedDataLoader(StartsAndDies(how, folder), 4, pool=ProcessPool(2, start_method=method)) as loader:
            return [index for batch in loader for index in batch.tolist()]

    assert in_child(work) == str(list(range(40)))
    assert (folder / "started").exists()


@linux
def test_a_pidfd_that_is_refused_only_sometimes_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a descriptor in one moment, room in the next."""
    calls = []

    def every_other(pid: int) -> Any:
        calls.append(pid)
        return None if len(calls) % 2 else system.open_pidfd(pid)

    monkeypatch.setattr(transport, "open_pidfd", every_other)
    assert read_and_lose_a_worker("fork")[0] == list(range(160))
    assert len(calls) == 3
