"""The program around the loader: its signal handlers, its own forks, its reapers, its reference cycles."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
from conftest import METHODS, make_pool, until
from failures import odd_errors
from inside import transport_of, zygote_pids
from programs import run_script
from refusing import in_child
from samples import Odd

from sharded_loader import ProcessPool, ShardedDataLoader
from sharded_loader.engine.pool import Pool

unix = pytest.mark.skipif(not hasattr(os, "fork"), reason="this platform has no fork")


@pytest.mark.slow
@unix
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


@unix
@METHODS
def test_a_forked_child_may_have_a_loader_of_its_own(method: str) -> None:
    """Also where the parent has used the same start method before."""

    def read() -> list[int]:
        with ShardedDataLoader(range(8), 4, pool=ProcessPool(1, start_method=method)) as loader:
            return [index for batch in loader for index in batch.tolist()]

    assert read() == list(range(8))
    assert in_child(read) == str(read())


@pytest.mark.costly
@unix
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


@unix
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


@unix
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
