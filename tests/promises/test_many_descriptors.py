"""A program with thousands of open files; and workers that cannot start, of which one is heard."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import METHODS, POOLS, make_pool
from refusing import in_child
from samples import Random

from sharded_loader import ProcessPool, ShardedDataLoader, WorkerDiedError
from sharded_loader.pools.process import worker

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX")


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
