"""P8: a worker that stands still for ``timeout`` seconds is an error or a retry, never a wait for ever."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, PROCESS_POOLS, begin, make_pool
from recovery_samples import (
    BadStart,
    Fails,
    hangs,
    hangs_with_the_gil,
    loader_arguments,
    nothing,
    stops_itself,
    until_the_end,
    values_of,
)

from sharded_loader import ProcessPool, ShardedDataLoader, ThreadPool, WorkerDiedError, global_generators, sample_seed
from sharded_loader.engine.board import IDLE, SAMPLE
from sharded_loader.engine.messages import Job, Task
from sharded_loader.errors import WorkerTimeoutError
from sharded_loader.pools import threads as thread_pool
from sharded_loader.workers import resources, supervision, template, worker

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="stops processes by signals")

TIMEOUT = 0.5
BATCH_SIZE = 5
BAD = 3  # the batch of sample 17


def expected(where: str) -> list[Any]:
    with ShardedDataLoader(**loader_arguments(where, nothing), batch_size=BATCH_SIZE, seed=2) as loader:
        return [values_of(batch) for batch in loader]


# -- processes ------------------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize(
    ("where", "how", "restarts", "doing", "index"),
    [
        ("reading", hangs, 1, "reading sample 17", 17),
        pytest.param("reading", hangs, 3, "reading sample 17", 17, marks=pytest.mark.slow),
        ("reading", hangs_with_the_gil, 1, "reading sample 17", 17),
        ("batchify_fn", hangs, 1, "making the batch (batchify_fn)", None),
        ("get_batch", hangs, 1, "reading several samples at once", None),
        ("get_batch", hangs, 2, "reading sample 17", 17),  # the second worker reads them one by one
        ("__getitems__", hangs, 2, "reading sample 17", 17),
        ("encoding", hangs, 1, "sending the batch", None),
    ],
)
def test_a_batch_that_always_hangs_is_one_error_in_its_place(
    method: str,
    where: str,
    how: Callable[[], Any],
    restarts: int,
    doing: str,
    index: int | None,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fail = Fails(how, tmp_path / "count")
    pool = make_pool(method, timeout=TIMEOUT, restarts=restarts)
    with ShardedDataLoader(**loader_arguments(where, fail), batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        batches, errors = until_the_end(iter(loader))
    whole = expected(where)
    assert batches == whole[:BAD] + whole[BAD + 1 :]
    (error,) = errors
    assert isinstance(error, WorkerTimeoutError) and isinstance(error, TimeoutError)
    assert (error.epoch, error.batch, error.index) == (0, BAD, index)
    assert f"no progress for 0.5 s. It was {doing}, in epoch 0, batch {BAD}" in str(error)
    notes = error.__notes__
    assert f"batch {BAD}" in notes[0]
    assert notes[-1].endswith("loader.read(17, epoch=0)" if index else "for i in (15, 16, 17, 18, 19)]")
    assert fail.count == restarts
    if method != "forkserver":  # whose output is elsewhere
        stacks = capfd.readouterr().err
        assert f"in {how.__name__}" in stacks and "recovery_samples.py" in stacks


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at signals that are under way")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_stacks_of_a_hang_are_written_however_late_the_worker_gets_to_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resources, "STACKS_GRACE", 60.0)
    fail = Fails(stops_itself, tmp_path / "count")
    pool = make_pool(method, 1, timeout=TIMEOUT, restarts=1)

    done = threading.Event()

    def continue_late() -> None:
        while not done.wait(0.01):
            if pool.pids and is_pending(pool.pids[0], worker.STACKS_SIGNAL):
                time.sleep(0.3)  # as on a machine that has other things to do
                os.kill(pool.pids[0], signal.SIGCONT)
                return

    with ShardedDataLoader(**loader_arguments("reading", fail), batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        late = threading.Thread(target=continue_late)
        late.start()
        _, errors = until_the_end(iter(loader))
        done.set()
        late.join()
    assert [(error.batch, error.index) for error in errors] == [(BAD, 17)]
    assert "in stops_itself" in capfd.readouterr().err


def is_pending(pid: int, number: int) -> bool:
    """Whether a signal has been sent to a process that has not taken it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    (pending,) = re.findall(r"^ShdPnd:\s*(\w+)$", status, re.MULTILINE)
    return bool(int(pending, 16) >> (number - 1) & 1)


@METHODS
@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("reading", hangs_with_the_gil),
        ("get_batch", hangs),
        ("batchify_fn", hangs),
        pytest.param("reading", hangs, marks=pytest.mark.slow),
        pytest.param("get_batch", hangs_with_the_gil, marks=pytest.mark.slow),
        pytest.param("batchify_fn", hangs_with_the_gil, marks=pytest.mark.slow),
    ],
)
def test_a_hang_that_does_not_come_again_is_not_seen(
    method: str, where: str, how: Callable[[], Any], tmp_path: Path
) -> None:
    fail = Fails(how, tmp_path / "count", times=1)
    pool = make_pool(method, timeout=TIMEOUT)
    with ShardedDataLoader(**loader_arguments(where, fail), batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        assert until_the_end(iter(loader)) == (expected(where), [])
    assert fail.count >= 2


def test_a_worker_that_somebody_has_stopped_is_replaced() -> None:
    class Numbers:
        def __len__(self) -> int:
            return 200

        def __getitem__(self, index: int) -> int:
            time.sleep(0.001)
            return index

    pool = make_pool("fork", timeout=TIMEOUT)
    assert isinstance(pool, ProcessPool)
    with ShardedDataLoader(Numbers(), 2, pool=pool) as loader:
        iterator = iter(loader)
        found = next(iterator).tolist()
        victim = pool.pids[0]
        os.kill(victim, signal.SIGSTOP)
        for batch in iterator:
            found += batch.tolist()
        assert found == list(range(200))


@pytest.mark.slow
@METHODS
def test_a_worker_that_was_stopped_between_batches_is_replaced_too(method: str) -> None:
    pool = make_pool(method, 1, timeout=TIMEOUT)
    assert isinstance(pool, ProcessPool)
    with ShardedDataLoader(range(20), 2, pool=pool) as loader:
        whole = [batch.tolist() for batch in loader]
        until(lambda: pool._workers[0].board[SAMPLE] == IDLE)
        os.kill(pool.pids[0], signal.SIGSTOP)
        assert [batch.tolist() for batch in loader] == whole


@pytest.mark.parametrize("name", ["thread", *PROCESS_POOLS])
def test_a_slow_batch_of_quick_samples_is_no_error(name: str) -> None:
    class Slow:
        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> int:
            time.sleep(0.15)
            return index

    with ShardedDataLoader(Slow(), 6, pool=make_pool(name, timeout=TIMEOUT)) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("thread", marks=pytest.mark.slow), "fork"])
def test_a_trainer_that_is_away_makes_nobody_late(name: str, tmp_path: Path) -> None:
    done = tmp_path / "done"

    class Slow:
        """Sample 2 takes longer than the timeout."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            if index == 2 and not done.exists():
                time.sleep(2 * TIMEOUT)
                done.touch()
            return index

    with ShardedDataLoader(Slow(), 1, pool=make_pool(name, timeout=TIMEOUT), prefetch=4) as loader:
        for _ in range(2):
            iterator = iter(loader)
            first = next(iterator).tolist()
            while not done.exists():
                time.sleep(0.01)
            time.sleep(TIMEOUT * 1.2)  # that is what a long step is; workers are idle
            assert [first, *(batch.tolist() for batch in iterator)] == [[0], [1], [2], [3]]
            time.sleep(TIMEOUT * 1.2)


@pytest.mark.slow
@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_program_that_is_stopped_makes_nobody_late_or_dead(method: str, tmp_path: Path) -> None:
    """Ctrl-Z and fg: trainer, workers and template stand still for longer than the timeout."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time
        from sharded_loader import ProcessPool, ShardedDataLoader
        class Slow:
            def __len__(self): return 60
            def __getitem__(self, i):
                time.sleep(0.02)
                return i
        pool = ProcessPool(2, start_method=sys.argv[1], timeout=1.0, restarts=1)
        with ShardedDataLoader(Slow(), 2, pool=pool) as loader:
            found = []
            for batch in loader:
                if not found:
                    pids = pool.pids
                    print("begun", flush=True)
                found += batch.tolist()
            print(found == list(range(60)), pool.pids == pids)
        """)
    )
    with subprocess.Popen(
        [sys.executable, str(script), method],
        preexec_fn=os.setpgrp,  # a job of its own, as a shell makes it
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "begun\n"
        for _ in range(2):
            os.killpg(trainer.pid, signal.SIGTSTP)
            until(lambda: psutil.Process(trainer.pid).status() == psutil.STATUS_STOPPED)
            time.sleep(1.5)
            os.killpg(trainer.pid, signal.SIGCONT)
            time.sleep(0.1)
        out, err = trainer.communicate(timeout=60)
    assert (trainer.returncode, out, err) == (0, "True True\n", "")


def until(condition: Callable[[], bool]) -> None:
    """Wait for something that is about to happen."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@METHODS
def test_workers_that_hang_while_they_start_are_one_error(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervision, "START_SECONDS", 0.3)
    fail = Fails(hangs, tmp_path / "count")
    pool = make_pool(method, 1, timeout=0.1, worker_init_fn=BadStart(fail))
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:
        with pytest.raises(WorkerDiedError, match="hung while it started, unpickled the dataset or ran worker_init_fn"):
            next(iter(loader))
        assert not pool.started


def test_without_a_timeout_nobody_is_late() -> None:
    class Slow:
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            time.sleep(0.7)
            return index

    with ShardedDataLoader(Slow(), 1, pool=make_pool("fork")) as loader:
        assert len(list(loader)) == 2


@pytest.mark.parametrize("ending", ["a timeout", "close"])
def test_a_worker_that_not_even_a_kill_ends_is_left_behind(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one inside the kernel, with a network file system that does not answer."""
    monkeypatch.setattr(template.ForkedWorker, "kill", lambda worker: None)
    monkeypatch.setattr(resources.WorkerHandle, "dump_stacks", lambda handle: None)  # it takes no signal at all
    monkeypatch.setattr(resources, "KILLED_GRACE", 0.1)
    fail = Fails(hangs_with_the_gil, tmp_path / "count")
    pool = make_pool("fork", timeout=0.2 if ending == "a timeout" else None, restarts=1)
    with ShardedDataLoader(**loader_arguments("reading", fail), batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        iterator = iter(loader)
        if ending == "a timeout":
            batches, errors = until_the_end(iterator)
            whole = expected("reading")
            assert batches == whole[:BAD] + whole[BAD + 1 :]
            assert [(error.batch, error.index) for error in errors] == [(BAD, 17)]
        else:
            for _ in range(BAD):
                next(iterator)
            while not fail.count:
                time.sleep(0.001)  # the next one would not come
        began = time.monotonic()
        loader.close()
        assert time.monotonic() - began < 5
    assert "was killed and does not end" in capfd.readouterr().err


# -- threads --------------------------------------------------------------------------------------------------


class Stuck:
    """Sample 3 waits until it may go on."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.begun: list[threading.Thread] = []
        self.readers: dict[int, str] = {}

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        self.readers[index] = threading.current_thread().name
        if index == 3 and not self.go_on.is_set():
            self.begun.append(threading.current_thread())
            self.go_on.wait()
        return np.array([index])


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_thread_that_hangs_is_an_error_and_another_has_its_place(num_workers: int) -> None:
    data = Stuck()
    with ShardedDataLoader(data, 2, pool=ThreadPool(num_workers, timeout=TIMEOUT)) as loader:
        iterator = iter(loader)
        batches, errors = until_the_end(iterator)
        assert [batch[0] for batch in batches] == [[[0], [1]], [[4], [5]], [[6], [7]], [[8], [9]]]
        (error,) = errors
        assert isinstance(error, WorkerTimeoutError)
        assert (error.epoch, error.batch, error.index) == (0, 1, 3)
        assert "reading sample 3" in str(error) and "another has its place" in str(error)
        assert error.__notes__[-1].endswith("loader.read(3, epoch=0)")
        # It is let go, and what it made late is in nobody's stream.
        data.go_on.set()
        for thread in data.begun:
            thread.join(5)
            assert not thread.is_alive()
        for _ in range(2):
            assert [int(value) for batch in loader for value in batch] == list(range(10))


def test_a_thread_that_goes_on_just_when_it_is_written_off_loses_no_batch() -> None:
    at_next, go_on = threading.Event(), threading.Event()
    data = Stuck()

    class Then(Stuck):
        """After sample 3 has been let go, sample 4 waits too."""

        def __getitem__(self, index: int) -> Any:
            if index == 3:
                data.go_on.wait()
            if index == 4:
                at_next.set()
                go_on.wait()
            return index

    pool = ThreadPool(1, timeout=0.05)
    pool.start(Job(Then(), None, 0, "raise"))
    pool.submit([Task(0, seq, 0, 0, ([3 + seq],), False) for seq in range(2)])
    try:
        found = []
        while not found:
            for result in pool.wait():
                found.append((result.seq, type(result.error)))
                data.go_on.set()
                assert at_next.wait(5)
        go_on.set()
        deadline = time.monotonic() + 5
        while (1, type(None)) not in found and time.monotonic() < deadline:
            found += [(result.seq, type(result.error)) for result in pool.wait()]
        assert found[0] == (0, WorkerTimeoutError) and (1, type(None)) in found
    finally:
        go_on.set()
        pool.close()


def test_a_thread_that_hangs_in_batchify_is_an_error() -> None:
    go_on = threading.Event()

    def batchify(samples: list[int]) -> list[int]:
        if 2 in samples:
            go_on.wait()
        return samples

    with ShardedDataLoader(range(6), 2, pool=ThreadPool(1, timeout=TIMEOUT), batchify_fn=batchify) as loader:
        iterator = iter(loader)
        assert next(iterator) == [0, 1]
        with pytest.raises(
            WorkerTimeoutError, match=r"making the batch \(batchify_fn\), in epoch 0, batch 1"
        ) as caught:
            next(iterator)
        assert caught.value.index is None
        assert next(iterator) == [4, 5]
        go_on.set()


def test_all_threads_may_hang() -> None:
    data = Stuck()

    class All(Stuck):
        def __getitem__(self, index: int) -> Any:
            data.go_on.wait()
            return index

    with ShardedDataLoader(All(), 5, pool=ThreadPool(2, timeout=TIMEOUT)) as loader:
        batches, errors = until_the_end(iter(loader))
        assert (batches, [type(error) for error in errors]) == ([], [WorkerTimeoutError] * 2)
        data.go_on.set()
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


def test_a_sample_that_comes_while_its_error_is_made_costs_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    late, next_begun, go_on = threading.Event(), threading.Event(), threading.Event()

    class Late:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> int:
            if index == 0:
                late.wait()
            if index == 1:
                next_begun.set()
                go_on.wait()
            return index

    make_error = thread_pool.timed_out

    def finish_meanwhile(*arguments: Any, **options: Any) -> WorkerTimeoutError:
        late.set()
        next_begun.wait(5)
        return make_error(*arguments, **options)

    monkeypatch.setattr(thread_pool, "timed_out", finish_meanwhile)
    with ShardedDataLoader(Late(), 1, pool=ThreadPool(1, timeout=0.1)) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0]
        go_on.set()
        assert [batch.tolist() for batch in iterator] == [[1], [2]]


class StuckInItsSeed(Stuck):
    """Sample 3 waits while the global generators are seeded by it."""

    def __getitem__(self, index: int) -> Any:
        with sample_seed():
            value = random.random()
            super().__getitem__(index)
            return value


def test_a_thread_that_hangs_in_sample_seed_is_the_only_error() -> None:
    data = StuckInItsSeed()
    data.go_on.set()
    with ShardedDataLoader(data, 2, seed=1) as loader:
        expected = [batch.tolist() for batch in loader]
    data.go_on.clear()
    random.seed(5)
    states = random.getstate()
    with ShardedDataLoader(data, 2, seed=1, pool=ThreadPool(2, timeout=0.1)) as loader:
        batches, errors = until_the_end(iter(loader))
        assert [error.index for error in errors] == [3]
        assert [values for (values,) in batches] == expected[:1] + expected[2:]
        assert random.getstate() == states
        random.seed(6)
        states = random.getstate()
        data.go_on.set()
        for thread in data.begun:
            thread.join(5)
        assert random.getstate() == states  # what it would put back is not its affair any more


def test_a_closed_loader_gives_back_the_generators_that_a_thread_hangs_with() -> None:
    data = StuckInItsSeed()
    random.seed(5)
    states = random.getstate()
    with ShardedDataLoader(data, 2, seed=1, pool=ThreadPool(2)) as loader:
        waits = begin(loader)
        while not data.begun:
            time.sleep(0.001)
    waits.join(10)
    assert not waits.is_alive()
    assert random.getstate() == states
    sampler = torch.utils.data.RandomSampler(range(10))  # started with the generators seeded
    with ShardedDataLoader(range(10), 5, sampler=sampler, seed=1) as other:
        assert sorted(int(value) for batch in other for value in batch) == list(range(10))
    data.go_on.set()
    data.begun[0].join(5)


def test_who_waits_for_the_global_generators_says_for_whom(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(global_generators, "PATIENCE", 0.01)
    told = threading.Event()
    monkeypatch.setattr(global_generators, "print", lambda *args, **to: (print(*args, **to), told.set()), raising=False)

    def wait_for_it() -> None:
        with global_generators.seeded_globals(2):
            pass

    waits = threading.Thread(target=wait_for_it, name="impatient")
    with global_generators.seeded_globals(1):
        waits.start()
        assert told.wait(5)
    waits.join(5)
    assert not waits.is_alive()
    said = capsys.readouterr().err
    assert (
        "impatient has waited 0.01 s" in said and threading.current_thread().name in said and "loader.close()" in said
    )
