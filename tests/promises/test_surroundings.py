"""The program around the loader: its signals, forks, reapers, open files; calls that the kernel refuses."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import METHODS, POOLS, PROCESS_POOLS, covering, make_pool, until
from failures import odd_errors
from inside import transport_of, zygote_pids
from programs import run_script
from refusing import CALLS, ERRORS, FCNTL, can_refuse, in_child, refuse
from samples import Filled, Odd, Random, StartsAndDies
from test_orphans import assert_gone

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader, WorkerDiedError
from sharded_loader.base import system
from sharded_loader.engine.pool import Pool
from sharded_loader.pools.process import transport, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")
linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux")


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
            warnings.simplefilter("error", RuntimeWarning)
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

    class Asks:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            return int(signal.getsignal(signal.SIGCHLD))  # type: ignore[arg-type]

    def work(handler: Any, pool: ProcessPool) -> int:
        signal.signal(signal.SIGCHLD, handler)
        with ShardedDataLoader(Asks(), 1, pool=pool) as loader:
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
            warnings.simplefilter("error", RuntimeWarning)
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


class Trainer:
    """Holds the loader, whose batchify function is a method of it, and an iterator: a cycle, as people write it."""

    def __init__(self, pool: Pool) -> None:
        self.loader = ShardedDataLoader(range(8), 4, pool=pool, batchify_fn=self.batchify)
        self.iterator = iter(self.loader)

    @staticmethod
    def _length(samples: list[int]) -> int:
        return len(samples)

    def batchify(self, samples: list[int]) -> int:
        return self._length(samples)


@pytest.mark.parametrize("name", ["inline", "thread", "fork"])
def test_a_loader_in_a_cycle_with_its_own_job_is_collected(name: str) -> None:
    trainer = Trainer(make_pool(name))
    assert next(trainer.iterator) == 4
    alive = weakref.ref(trainer)
    del trainer
    assert until(lambda: gc.collect() >= 0 and alive() is None)  # a thread may be reading the next batch yet


def test_exceptions_of_odd_classes_arrive_as_they_are(pool: Pool) -> None:
    with ShardedDataLoader(Odd(), 1, pool=pool) as loader:
        batches = iter(loader)
        for expected in odd_errors():
            with pytest.raises(type(expected)) as caught:
                next(batches)
            assert type(caught.value) is type(expected)
            assert getattr(caught.value, "both", None) == getattr(expected, "both", None)
            assert getattr(caught.value, "code", None) == getattr(expected, "code", None)


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
def test_more_open_files_than_select_takes_are_no_problem(name: str) -> None:
    def work() -> object:
        with ShardedDataLoader(Random(64), 8, pool=make_pool(name)) as loader:
            iterator = iter(loader)
            lengths = [len(next(iterator))]
            if isinstance(loader.pool, ProcessPool):
                os.kill(loader.pool.pids[0], 9)  # the one that takes its place also begins with all these files
            return lengths + [len(batch) for batch in iterator]

    assert with_many_files_open(work) == str([8] * 8)


@METHODS
def test_children_of_the_user_are_followed_with_many_files_open(method: str) -> None:
    """A slot that a forked child may still see comes back when that has ended."""

    def work() -> object:
        with ShardedDataLoader(Random(64), 8, pool=ProcessPool(2, start_method=method)) as loader:
            iterator = iter(loader)
            batches = [next(iterator)]
            pid = os.fork()
            if pid == 0:
                os._exit(0)
            os.waitpid(pid, 0)
            return len(batches + list(iterator))

    assert with_many_files_open(work) == "8"


@contextlib.contextmanager
def stderr_of_all() -> Iterator[Callable[[], str]]:
    """What this process and its workers write to descriptor 2."""
    import tempfile

    with tempfile.TemporaryFile() as file:
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            with contextlib.redirect_stderr(open(2, "w", closefd=False)):
                yield lambda: os.pread(file.fileno(), 1 << 20, 0).decode()
        finally:
            os.dup2(before, 2)
            os.close(before)


def start(pool: ProcessPool) -> tuple[str, str]:
    """The error of a pool that cannot start, and all that was written to stderr."""
    with stderr_of_all() as written, ShardedDataLoader(range(64), 4, pool=pool) as loader:
        with pytest.raises(WorkerDiedError) as caught:
            next(iter(loader))
        return f"{caught.value}{caught.value.__cause__}", written()


def no_thread(*_: Any) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("owner", "method"), [(threading.Thread, "start"), (worker.WorkerThreads, "_open_shared")])
@pytest.mark.filterwarnings("ignore:8 worker processes share")
@pytest.mark.slow
def test_workers_that_cannot_start_write_why(owner: type, method: str) -> None:
    """In the main thread; in the receiver thread, before there is a job."""

    def work() -> object:
        setattr(owner, method, no_thread)
        error, written = start(ProcessPool(8, start_method="fork"))
        assert "died while it started" in error and "its own output on stderr may say more" in error, error
        assert "RuntimeError: can't start new thread" in written and "in no_thread" in written, written
        return "heard"

    assert in_child(work) == "heard"


def test_a_worker_that_cannot_start_once_is_replaced(tmp_path: Path) -> None:
    def work() -> object:
        begin = threading.Thread.start

        def fails_once(self: Any) -> None:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "failed").touch(exist_ok=False)
                no_thread()
            begin(self)

        threading.Thread.start = fails_once  # type: ignore[method-assign]
        with stderr_of_all() as written:
            with ShardedDataLoader(range(64), 4, pool=ProcessPool(2, start_method="fork")) as loader:
                batches = [index for batch in loader for index in batch.tolist()]
            assert written().count("RuntimeError: can't") == written().count("Traceback") == 1, written()
        return batches

    assert in_child(work) == str(list(range(64)))


@pytest.mark.slow
def test_spawned_workers_that_lack_a_library_write_which(tmp_path: Path) -> None:
    (tmp_path / "broken" / "numpy").mkdir(parents=True)
    (tmp_path / "broken" / "numpy" / "__init__.py").write_text("raise ImportError('no such symbol')\n")

    def work() -> object:
        sys.path.insert(0, str(tmp_path / "broken"))  # of this process NumPy is imported
        error, written = start(ProcessPool(4, start_method="spawn"))
        assert "died while it started" in error and "ImportError: no such symbol" in written, (error, written)
        return "heard"

    assert in_child(work) == "heard"


seccomp = pytest.mark.skipif(not can_refuse(), reason="this machine has no seccomp")

USED = ("pidfd_open", "memfd_create", "fallocate", "sendmsg", "recvmsg", "sigaltstack", *FCNTL)

REFUSED = {
    **{call: (call,) for call in USED},
    "everything": tuple(call for call in (*CALLS, *FCNTL) if call != "fcntl"),
}
"""Each optional call that the library makes, alone; and these with others that it might come to use, together."""


def read_and_lose_a_worker(method: str, length: int = 160) -> list[int]:
    """The first numbers of all batches of an epoch in which a worker is killed."""
    pool = ProcessPool(2, start_method=method)
    with ShardedDataLoader(Filled(length), 4, pool=pool) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        os.kill(pool.pids[0], signal.SIGKILL)
        got += iterator
        assert all(batch.shape == (4, 4096) for batch in got)
    assert pool.pids == []
    return [int(batch[0, 0]) for batch in got]


@seccomp
@covering(1, method=PROCESS_POOLS, call=REFUSED, error=ERRORS)
@pytest.mark.filterwarnings("ignore:this system does not pass descriptors:RuntimeWarning")
@pytest.mark.costly(2)
def test_a_refused_call_changes_no_batch_and_no_worker_is_lost(method: str, call: str, error: str) -> None:
    def work() -> object:
        refuse(REFUSED[call], error)
        return read_and_lose_a_worker(method)

    assert in_child(work) == str(list(range(0, 160, 4)))


@seccomp
@covering(1, method=PROCESS_POOLS, call=["memfd_create", "recvmsg", "fallocate", "everything"])
@pytest.mark.filterwarnings("ignore:this system does not pass descriptors:RuntimeWarning")
@pytest.mark.costly
def test_a_large_dataset_reaches_its_workers_without_the_call(method: str, call: str) -> None:
    def work() -> object:
        refuse(REFUSED[call], "EPERM")
        data = ArrayDataset(np.arange(200_000.0))
        with ShardedDataLoader(data, 50_000, pool=ProcessPool(2, start_method=method)) as loader:
            return [batch[-1].item() for batch in loader]

    assert in_child(work) == str([49_999.0, 99_999.0, 149_999.0, 199_999.0])


@seccomp
def test_batches_lie_in_shared_memory_also_where_memfd_create_is_refused() -> None:
    def work() -> object:
        refuse(["memfd_create"], "ENOSYS")
        pool = ProcessPool(1, start_method="fork")
        with ShardedDataLoader(Filled(40), 4, pool=pool) as loader:
            list(loader)
            return len(transport_of(pool).arena.segments) > 0

    assert in_child(work) == "True"


@seccomp
@METHODS
def test_workers_go_with_a_killed_trainer_where_the_kernel_sends_no_signal(method: str) -> None:
    """F_SETSIG is refused: the receiver thread of the worker has to end it."""
    reader, writer = os.pipe()
    trainer = os.fork()
    if trainer == 0:
        try:
            refuse(["F_SETSIG"], "EPERM")
            pool = ProcessPool(2, start_method=method)
            iterator = iter(ShardedDataLoader(range(8), 1, pool=pool))
            next(iterator)
            os.write(writer, " ".join(map(str, pool.pids)).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as stream:
        pids = [int(pid) for pid in os.read(stream.fileno(), 1000).split()]
    os.kill(trainer, signal.SIGKILL)
    os.waitpid(trainer, 0)
    assert len(pids) == 2
    assert_gone(pids)


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

    assert in_child(work, 30) == str(list(range(40)))
    assert (folder / "started").exists()


@linux
def test_a_pidfd_that_is_refused_only_sometimes_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for a descriptor in one moment, room in the next."""
    calls = []

    def every_other(pid: int) -> Any:
        calls.append(pid)
        return None if len(calls) % 2 else system.open_pidfd(pid)

    monkeypatch.setattr(transport, "open_pidfd", every_other)
    assert read_and_lose_a_worker("fork") == list(range(0, 160, 4))
    assert len(calls) == 3
