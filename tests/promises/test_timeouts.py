"""P8: a worker that stands still is an error or a retry after ``timeout`` seconds; a long wait says who is at what."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import METHODS, PROCESS_POOLS, ahead, covering, make_pool, until
from failures import Fails, hang, hangs_with_the_gil, stops_itself
from inside import transport_of
from recovery_samples import BadStart, loader_arguments, until_the_end
from samples import Random, wait_for
from test_recovery import BAD, BATCH_SIZE, expected

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool, WorkerDiedError
from sharded_loader.base.errors import WorkerTimeoutError
from sharded_loader.engine import pipeline
from sharded_loader.engine.heartbeat import IDLE, SAMPLE
from sharded_loader.pools import deaths
from sharded_loader.pools.process import start, transport, worker
from sharded_loader.torch import DataLoader

STOPS = pytest.mark.skipif(not hasattr(os, "fork"), reason="stops processes by signals")

TIMEOUT = 0.5
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()
needs_the_gil = pytest.mark.skipif(not HAS_GIL, reason="without it, no thread can see what sample another one reads")


@METHODS
@pytest.mark.parametrize(
    ("where", "how", "restarts", "doing", "index"),
    [
        ("reading", hang, 1, "reading sample 17", 17),
        pytest.param("reading", hang, 3, "reading sample 17", 17, marks=pytest.mark.slow),
        ("reading", hangs_with_the_gil, 1, "reading sample 17", 17),
        pytest.param("batchify_fn", hang, 1, "making the batch (collate_fn)", None, marks=pytest.mark.slow),
        ("get_batch", hang, 1, "reading several samples at once", None),
        ("get_batch", hang, 2, "reading sample 17", 17),  # the second worker reads them one by one
        pytest.param("__getitems__", hang, 2, "reading sample 17", 17, marks=pytest.mark.slow),
        pytest.param("encoding", hang, 1, "sending the batch", None, marks=pytest.mark.slow),
    ],
)
@pytest.mark.costly
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
    arguments = loader_arguments(where, fail)
    with ahead(ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, seed=2, pool=pool), False) as loader:
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
        assert f"in {how.__name__}" in stacks and "samples.py" in stacks
        assert re.search(r"sharded_loader: worker [01] \(pid \d+\) made no progress for .* s\. Its stacks:\n", stacks)


@pytest.mark.costly
@pytest.mark.parametrize("full", [False, True])
def test_a_worker_that_hangs_shows_the_frames_of_the_user(
    full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "SHORT_GRACE", 60.0)
    monkeypatch.setenv("SHARDED_LOADER_FULL_TRACEBACKS", str(int(full)))
    pool = make_pool(PROCESS_POOLS[0], 1, timeout=TIMEOUT, restarts=1)
    arguments = loader_arguments("reading", Fails(hang, tmp_path / "count"))
    with ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        until_the_end(iter(loader))
    stacks = capfd.readouterr().err.partition("Its stacks:\n")[2]
    assert "in hang" in stacks and ("reader.py" in stacks) == full
    reads = (
        r"It is reading sample 17 of epoch 0, batch 3, .*\.\nThe thread that reads \(most recent call last\):\n  File "
    )
    assert re.match(reads, stacks)


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks at signals that are under way")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_stacks_of_a_hang_are_written_however_late_the_worker_gets_to_it(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "STACKS_GRACE", 60.0)
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
@pytest.mark.parametrize("where", ["reading", "get_batch", "batchify_fn"])
@pytest.mark.parametrize("how", [hang, hangs_with_the_gil])
@pytest.mark.slow
def test_a_hang_that_does_not_come_again_is_not_seen(
    method: str, where: str, how: Callable[[], Any], tmp_path: Path
) -> None:
    fail = Fails(how, tmp_path / "count", times=1)
    pool = make_pool(method, timeout=TIMEOUT)
    with ShardedDataLoader(**loader_arguments(where, fail), batch_size=BATCH_SIZE, seed=2, pool=pool) as loader:
        assert until_the_end(iter(loader)) == (expected(where), [])
    assert fail.count >= 2


@pytest.mark.slow
@STOPS
@METHODS
def test_a_worker_that_somebody_has_stopped_is_replaced_in_an_epoch_and_between_two(method: str) -> None:
    pool = ProcessPool(2, start_method=method, timeout=TIMEOUT)
    with ShardedDataLoader(Random(200, 0.001), 2, pool=pool) as loader:
        iterator = iter(loader)
        found = [next(iterator)]
        os.kill(pool.pids[0], signal.SIGSTOP)
        found += iterator
        assert until(lambda: all(one.heartbeat[SAMPLE] == IDLE for one in transport_of(pool).workers))
        for pid in pool.pids:
            os.kill(pid, signal.SIGSTOP)
        found += loader
        assert [index for batch in found for index in batch[:, 0].tolist()] == [*range(200)] * 2


@pytest.mark.parametrize("name", ["thread", *PROCESS_POOLS])
@pytest.mark.slow
def test_a_slow_batch_of_quick_samples_is_no_error(name: str) -> None:
    with ShardedDataLoader(Random(12, 0.25), 6, pool=make_pool(name, timeout=1.0)) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["thread", "fork"])
def test_a_trainer_that_is_away_makes_nobody_late(name: str, tmp_path: Path) -> None:
    done = tmp_path / "done"

    def slow(index: int) -> int:
        if index == 2 and not done.exists():
            time.sleep(2 * TIMEOUT)
            done.touch()
        return index

    dataset = SimpleDataset(range(4)).transform(slow)
    with ShardedDataLoader(dataset, 1, pool=make_pool(name, timeout=TIMEOUT), prefetch=4) as loader:
        for _ in range(2):
            iterator = iter(loader)
            first = next(iterator).tolist()
            until(done.exists)
            time.sleep(TIMEOUT * 1.2)  # that is what a long step is; workers are idle
            assert [first, *(batch.tolist() for batch in iterator)] == [[0], [1], [2], [3]]
            time.sleep(TIMEOUT * 1.2)


@pytest.mark.slow
@STOPS
@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_program_that_is_stopped_makes_nobody_late_or_dead(method: str, tmp_path: Path) -> None:
    """Ctrl-Z and fg: trainer, workers and zygote stand still for longer than the timeout."""
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
        out, err = trainer.communicate(timeout=300)
    assert (trainer.returncode, out, err) == (0, "True True\n", "")


@pytest.mark.slow
@METHODS
def test_workers_that_hang_while_they_start_are_one_error(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deaths, "START_SECONDS", 0.3)
    fail = Fails(hang, tmp_path / "count")
    pool = make_pool(method, 1, timeout=0.1, worker_init_fn=BadStart(fail))
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:
        with pytest.raises(WorkerDiedError, match="hung while it started, unpickled the dataset or ran worker_init_fn"):
            next(iter(loader))
        assert not pool.started


@pytest.mark.skipif(not hasattr(os, "fork"), reason="patches how forked workers are killed")
@pytest.mark.parametrize("ending", ["a timeout", "close"])
@pytest.mark.costly
def test_a_worker_that_not_even_a_kill_ends_is_left_behind(
    ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As one inside the kernel, with a network file system that does not answer."""
    monkeypatch.setattr(start.ForkedWorker, "kill", lambda worker: None)
    monkeypatch.setattr(start._ForkedProcess, "kill", lambda worker: None)
    monkeypatch.setattr(transport, "STACKS_SIGNAL", None)  # it takes no signal at all
    monkeypatch.setattr(transport, "KILLED_GRACE", 0.1)
    fail = Fails(hangs_with_the_gil, tmp_path / "count")
    pool = make_pool("fork", 1, timeout=0.2 if ending == "a timeout" else None, restarts=1)
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
            assert until(lambda: fail.count)  # the next one would not come
        loader.close()
    assert "was killed and does not end" in capfd.readouterr().err


SEES = [name for name in PROCESS_POOLS if name != "forkserver"]
"""Of a fork server's workers the output goes where its own goes."""


class Said:
    """What the program writes to stderr while ``next`` waits. A thread opens the gate when it has seen a text.

    Attributes:
        gate: a file, for which samples wait.
        text: what was written.
        last: what the thread waits for.
    """

    def __init__(self, gate: Path, capfd: pytest.CaptureFixture[str]) -> None:
        self.gate, self.text, self.last, self._capfd = gate, "", "in wait_for", capfd

    def _has_come(self) -> bool:
        self.text += self._capfd.readouterr().err
        return self.last in self.text

    def during(self, waits: Callable[[], Any]) -> Any:
        """What ``waits()`` returns. It tells of waits after a short time."""
        thread = threading.Thread(target=lambda: (until(self._has_come), self.gate.touch()))
        thread.start()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "PATIENCE", 0.05)
            try:
                return waits()
            finally:
                self.gate.touch()
                thread.join()
                self.text += self._capfd.readouterr().err

    def in_epoch(self, batches: Iterable[Any]) -> list[Any]:
        """The batches of an epoch. Both workers have started when it begins to tell."""
        iterator = iter(batches)
        return [next(iterator), next(iterator), *self.during(lambda: list(iterator))]

    def sample_5_waits(self) -> SimpleDataset:
        gate = self.gate

        def read(index: int) -> int:
            if index == 5:
                wait_for(gate)
            return index

        return SimpleDataset(range(12)).transform(read)


@pytest.fixture
def said(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Said:
    monkeypatch.setattr(deaths, "LOOK_SECONDS", 0.02)
    return Said(tmp_path / "open", capfd)


@needs_the_gil
@covering(pool=["thread", *SEES], timeout=[None, 60])
def test_one_message_names_the_batch_the_sample_and_the_stack(pool: str, timeout: float | None, said: Said) -> None:
    with ShardedDataLoader(said.sample_5_waits(), 2, pool=make_pool(pool, 2, timeout=timeout)) as loader:
        found = said.in_epoch(loader)
    assert [batch.tolist() for batch in found] == [[n, n + 1] for n in range(0, 12, 2)]
    who = r"thread \d" if pool == "thread" else r"worker \d \(pid \d+\)"
    text = (
        rf"sharded_loader: next\(\) has waited 0 s for epoch 0, batch 2, which {who} has\. Its stack:\n"
        r"It is reading sample 5 of epoch 0, batch 2, (for \d+ s|which it began \d+ s ago)\.\n"
        r"The thread that reads \(most recent call last\):\n"
    )
    assert re.search(text, said.text), said.text
    assert said.text.count("has waited") == said.text.count("in wait_for") == 1


@needs_the_gil
@covering(pool=["thread", *SEES], where=["bulk", "collate", "drop-in"])
def test_also_of_what_is_no_single_sample_and_of_the_drop_in(pool: str, where: str, said: Said) -> None:
    gate, data = said.gate, said.sample_5_waits()

    def collate(samples: list[int]) -> list[int]:
        if 5 in samples:
            wait_for(gate)
        return samples

    if where == "drop-in":
        given: dict[str, Any] = {"thread_pool": True} if pool == "thread" else {"start_method": pool}
        assert len(said.in_epoch(DataLoader(data, 2, num_workers=2, **given))) == 6
        doing = "reading sample 5"
    elif where == "bulk":
        bulk = type("InBulk", (SimpleDataset,), {"__getitems__": lambda self, indices: [self[i] for i in indices]})
        with ShardedDataLoader(bulk(data), 2, pool=make_pool(pool, 2)) as loader:
            assert len(said.in_epoch(loader)) == 6
        doing = "reading several samples at once"
    else:
        with ShardedDataLoader(range(12), 2, collate_fn=collate, pool=make_pool(pool, 2)) as loader:
            assert len(said.in_epoch(loader)) == 6
        doing = r"making the batch \(collate_fn\)"
    found = rf"batch 2, which (thread|worker) \d.* has\. Its stack:\nIt is {doing} of epoch 0, batch 2, .*\d+ s"
    assert re.search(found, said.text), said.text


@covering(pool=["thread", *SEES])
def test_a_batch_that_is_held_behind_another_names_that_one(pool: str, said: Said) -> None:
    with ShardedDataLoader(said.sample_5_waits(), 2, pool=make_pool(pool, 1), prefetch=3) as loader:
        iterator = iter(loader)
        next(iterator)
        second = iter(loader)
        assert said.during(lambda: next(second)).tolist() == [0, 1]
        assert len(list(iterator)) == 5
    who = "thread 0" if pool == "thread" else r"worker 0 \(pid \d+\)"
    has = rf"(\. No worker has it yet: all are busy, such as {who}|, which {who} has)"
    assert re.search(rf"for epoch 1, batch 0{has}\. Its stack:", said.text)
    assert not HAS_GIL or "It is reading sample 5 of epoch 0, batch 2" in said.text


def test_without_the_gil_no_thread_looks_at_the_variables_of_another_which_may_crash_python(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    with ShardedDataLoader(said.sample_5_waits(), 2, pool=ThreadPool(2)) as loader:
        assert len(said.in_epoch(loader)) == 6
    text = r"batch 2, which thread \d has\. Its stack:\nThe thread that reads \(most recent call last\):\n"
    assert re.search(text, said.text), said.text


@covering(method=SEES)
def test_a_worker_that_has_not_started_is_named(method: str, said: Said) -> None:
    gate, said.last = said.gate, "Its stack:"
    pool = make_pool(method, 1, worker_init_fn=lambda number: wait_for(gate))
    with ShardedDataLoader(range(4), 2, pool=pool) as loader:
        assert len(said.during(lambda: list(loader))) == 2
    assert "worker 0 (pid" in said.text and "It is not ready: it imports modules, unpickles the dataset" in said.text


@pytest.mark.parametrize("pool", ["thread", "fork"])
def test_quick_batches_say_nothing_and_iterations_after_a_message_say_it_again(
    pool: str, said: Said, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # In the second epoch a worker keeps batch 1, and begins batch 2, which waits for the gate.
    monkeypatch.setattr(worker, "GROUP_SECONDS", 60.0)
    with ahead(ShardedDataLoader(said.sample_5_waits(), 2, pool=make_pool(pool, 2)), False) as loader:
        for _ in range(2):
            said.gate.unlink(missing_ok=True)
            said.text = ""
            said.in_epoch(loader)
            assert said.text.count("has waited") == 1
        monkeypatch.setattr(pipeline, "PATIENCE", 30.0)
        list(loader)
        assert capfd.readouterr().err == ""


def test_a_pool_of_the_users_own_needs_to_know_nothing_of_it(capfd: pytest.CaptureFixture[str]) -> None:
    assert InlinePool().tell_of_wait("next() has waited", None) is None
    assert capfd.readouterr().err == "next() has waited\n"
