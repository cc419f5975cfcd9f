"""P4: deaths at every moment: of workers that start, that are idle, over pipes of any kind, whatever signals mean."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from conftest import METHODS, SPAWN_FIRST, make_pool
from failures import Fails, crashes, kill, leave
from inside import transport_of
from programs import without_notices
from recovery_samples import BadStart, DiesWhileSending, ReadyToDie, loader_arguments, until_the_end, values_of
from samples import Random

from sharded_loader import ProcessPool, ShardedDataLoader, WorkerDiedError
from sharded_loader.memory import segments
from sharded_loader.pools.deaths import IDLE_DEATHS
from sharded_loader.pools.process import link, transport

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills processes by signals")


class StartKiller:
    """Kills workers that have not started yet, as soon as it sees them: so many of them."""

    def __init__(self, pool: ProcessPool, times: int) -> None:
        self.pool = pool
        self.left = times
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        seen: set[int] = set()
        while self.left and not self._stop.wait(0.002):
            for worker in list(transport_of(self.pool).workers):
                if self.left and not worker.ready and worker.pid not in seen:
                    seen.add(worker.pid)
                    try:
                        os.kill(worker.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        continue
                    self.left -= 1

    def __enter__(self) -> StartKiller:
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stop.set()
        self._thread.join()


@METHODS
def test_a_storm_that_hits_workers_while_they_start_does_not_end_the_pool(method: str) -> None:
    pool = make_pool(method)
    assert isinstance(pool, ProcessPool)
    with ShardedDataLoader(Random(60, 0.002), 4, True, seed=8, pool=pool) as loader:
        whole = [values_of(batch) for batch in loader]  # they can start
        with StartKiller(pool, 8) as killer:  # of two workers: four in a row each, unless they start before it looks
            while killer.left:
                loader.set_epoch(0)
                iterator = iter(loader)
                for pid in pool.pids:
                    os.kill(pid, signal.SIGKILL)
                assert until_the_end(iterator) == (whole, [])


@pytest.mark.parametrize("how", [leave, pytest.param(crashes, marks=pytest.mark.slow)])
def test_a_replacement_that_ends_by_itself_is_given_up_soon(how: Any, tmp_path: Path) -> None:
    """Also where workers have started before."""
    broken = tmp_path / "broken"
    fail = Fails(how, tmp_path / "count")

    def starts(number: int) -> None:
        if broken.exists():
            fail()

    pool = make_pool("fork", worker_init_fn=starts)
    assert isinstance(pool, ProcessPool)
    with ShardedDataLoader(range(40), 2, pool=pool) as loader:
        iterator = iter(loader)
        next(iterator)
        broken.touch()
        for pid in pool.pids:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match="had not begun to read"):
            list(iterator)
        assert fail.count in (3, 4)
        assert not pool.started


@pytest.mark.slow
@METHODS
def test_workers_that_die_between_batches_again_and_again_are_one_error(method: str, tmp_path: Path) -> None:
    fail = Fails(leave, tmp_path / "count")
    pool = make_pool(method, worker_init_fn=ReadyToDie(fail))
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:
        with pytest.raises(WorkerDiedError, match="exit code 3. It was between batches") as caught:
            next(iter(loader))
        assert (caught.value.exitcode, caught.value.batch, caught.value.index) == (3, None, None)
        assert IDLE_DEATHS <= fail.count <= 2 * IDLE_DEATHS
        assert not pool.started


@pytest.mark.slow
def test_workers_that_die_between_batches_for_a_while_are_not_seen(tmp_path: Path) -> None:
    fail = Fails(leave, tmp_path / "count", times=IDLE_DEATHS - 1)
    pool = make_pool("fork", worker_init_fn=ReadyToDie(fail))
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5], [6, 7]]


@METHODS
@pytest.mark.parametrize("how", [kill, leave])
@pytest.mark.costly
def test_half_a_message_from_a_worker_that_has_died_is_made_again(method: str, how: Any, tmp_path: Path) -> None:
    fail = Fails(how, tmp_path / "count", times=2)
    pool = make_pool(method, worker_init_fn=DiesWhileSending(fail))
    with ShardedDataLoader(Random(40, 0), 4, seed=8, pool=make_pool("fork")) as loader:
        whole = [values_of(batch) for batch in loader]
    with ShardedDataLoader(Random(40, 0), 4, seed=8, pool=pool) as loader:
        assert until_the_end(iter(loader)) == (whole, [])
    assert fail.count > 2


def test_a_batch_whose_sending_always_fails_is_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the portable pipes, whose receiving end blocks."""
    for module in (link, transport, segments):
        monkeypatch.setattr(module, "PORTABLE", True)
    fail = Fails(kill, tmp_path / "count", times=3)
    pool = make_pool("fork", 1, worker_init_fn=DiesWhileSending(fail))
    with ShardedDataLoader(Random(12, 0.002), 4, seed=8, pool=pool) as loader:
        batches, errors = until_the_end(iter(loader))
    assert len(batches) == 2
    assert [type(error) for error in errors] == [WorkerDiedError]
    assert "sending the batch, in epoch 0, batch 0, which has now stopped 3 workers" in str(errors[0])


@pytest.mark.parametrize(
    ("kills", "text"),
    [(None, "often the kernel"), (0, "own limit was not the cause"), (1, "has struck in this cgroup, 1 x")],
)
@pytest.mark.costly
def test_a_kill_says_whether_the_kernel_has_killed_for_memory(
    kills: int | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = [None, None] if kills is None else [7, 7 + kills]
    monkeypatch.setattr(transport, "oom_kills", lambda: counts.pop(0) if len(counts) > 1 else counts[0])
    fail = Fails(kill, tmp_path / "count")
    with ShardedDataLoader(**loader_arguments("reading", fail), batch_size=5, pool=make_pool("fork")) as loader:
        _, errors = until_the_end(iter(loader))
    assert len(errors) == 1 and text in str(errors[0])
    with ShardedDataLoader(range(8), 2, pool=make_pool("fork", worker_init_fn=BadStart(kill))) as loader:
        with pytest.raises(WorkerDiedError, match="SIGKILL"):
            next(iter(loader))


STORM = """
import os, random, signal, sys
from inside import transport_of
from recovery_samples import values_of
from samples import Random
from sharded_loader import ProcessPool, ShardedDataLoader

def stream(pool, seconds, length):
    with ShardedDataLoader(Random(length, seconds), 4, True, seed=8, pool=pool, num_shards=2) as loader:
        for _ in range(2):
            yield from map(values_of, loader)

if "sigpipe" in sys.argv:
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in programs that are made for `| head`
pool = ProcessPool(2, start_method=sys.argv[1], restarts=100)
length = 120 if sys.argv[1] == "fork" else 32
whole = list(stream(ProcessPool(2, start_method="fork"), 0, length))
found, victims = [], random.Random(0)
for number, batch in enumerate(stream(pool, 0.004, length)):
    found.append(batch)
    if number % 4 == 1:
        victim = victims.choice(transport_of(pool).workers)
        os.kill(victim.pid, signal.SIGKILL)
        if "sigpipe" in sys.argv:
            victim.wait(300)  # so that something is sent to it before anybody looks
assert found == whole
print("the same")
"""


@SPAWN_FIRST
@pytest.mark.parametrize("kind", ["portable", pytest.param("sigpipe", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_storm_changes_nothing(method: str, kind: str, tmp_path: Path) -> None:
    """Over pipes that need no descriptors and no poll, as on Windows; where SIGPIPE ends the program."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STORM))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    if kind == "portable":
        environment |= {"SHARDED_LOADER_PORTABLE": "1", "SHARDED_LOADER_MEMORY": "named"}
    done = subprocess.run(
        [sys.executable, str(script), method, kind],
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert (done.returncode, done.stdout, without_notices(done.stderr)) == (0, "the same\n", "")
