"""P4, P8: who dies at any moment costs no batch; a sample that kills its workers is one error that names it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import METHODS, PROCESS_POOLS, SPAWN_FIRST, ahead, covering, make_pool, until
from failures import KILL, Fails, crashes, exit_, kill, leave, nothing, raise_lookup, raise_unpicklable
from inside import transport_of, zygote_pids
from programs import without_notices
from recovery_samples import BadStart, DiesWhileSending, ReadyToDie, loader_arguments, until_the_end, values_of
from samples import DiesInSetState, Filled, Noting, Parents, Random
from test_surroundings import lives

from sharded_loader import ProcessPool, SampleReadError, ShardedDataLoader, WorkerDiedError
from sharded_loader.base.errors import notes_of
from sharded_loader.engine.heartbeat import IDLE, SAMPLE
from sharded_loader.memory import segments
from sharded_loader.pools.deaths import IDLE_DEATHS
from sharded_loader.pools.process import link, transport
from sharded_loader.pools.process.transport import ProcessTransport, ProcessWorker

PHASES = ("reading", "__getitems__", "get_batch", "batchify_fn", "encoding")
NAMED = PHASES[:3]
DEATHS: dict[Callable[[], Any], tuple[int, str]] = {leave: (3, "exit code 3")}
if hasattr(os, "fork"):  # Windows has no signals that end a process
    DEATHS |= {kill: (-9, "SIGKILL"), crashes: (-11, "SIGSEGV")}
HOWS = (raise_lookup, raise_unpicklable, exit_, *DEATHS)
BATCH_SIZE = 5
BAD = 3  # the batch of sample 17


def expected(where: str, **options: Any) -> list[Any]:
    """The stream without any failure."""
    with ShardedDataLoader(**loader_arguments(where, nothing), batch_size=BATCH_SIZE, seed=2, **options) as loader:
        return [values_of(batch) for batch in loader]


@covering(1, spawned=True, method=PROCESS_POOLS, how=HOWS, where=PHASES)
@pytest.mark.costly
def test_a_batch_that_always_fails_is_one_error_in_its_place(
    method: str, where: str, how: Callable[[], Any], tmp_path: Path
) -> None:
    fail = Fails(how, tmp_path / "count")
    arguments = loader_arguments(where, fail)
    with ahead(ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, seed=2, pool=make_pool(method)), False) as loader:
        batches, errors = until_the_end(iter(loader))
        whole = expected(where)
        assert batches == whole[:BAD] + whole[BAD + 1 :]
        (error,) = errors
        if how in DEATHS:
            assert type(error) is WorkerDiedError
            exitcode, text = DEATHS[how]
            assert error.exitcode == exitcode
            assert text in str(error) and f"in epoch 0, batch {BAD}, which has now stopped 3 workers" in str(error)
            assert (error.epoch, error.batch) == (0, BAD)
            assert error.index == (17 if where in NAMED else None)
            assert fail.count == 3
        else:
            kind = TypeError if where == "encoding" else LookupError if how is raise_lookup else SampleReadError
            assert type(error) is kind
            assert f"batch {BAD}" in notes_of(error)[0]
        if where in NAMED:
            assert "sample 17" in notes_of(error)[0]
            assert notes_of(error)[-1].endswith("loader.read(17, epoch=0)")
        else:
            assert notes_of(error)[-1].endswith("[loader.read(i, epoch=0) for i in (15, 16, 17, 18, 19)]")
        assert len(until_the_end(iter(loader))[0]) == 7  # another epoch


@METHODS
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.costly
def test_a_worker_that_cannot_start_is_one_error(method: str, how: Callable[[], Any], tmp_path: Path) -> None:
    fail = Fails(how, tmp_path / "count")
    pool = make_pool(method, worker_init_fn=BadStart(fail))
    with ShardedDataLoader(range(8), 2, pool=pool) as loader:
        with pytest.raises((LookupError, SampleReadError, WorkerDiedError)) as caught:
            next(iter(loader))
        if how in DEATHS:
            assert isinstance(caught.value, WorkerDiedError)
            assert (caught.value.batch, caught.value.index) == (None, None)
            assert DEATHS[how][1] in str(caught.value) and "worker_init_fn" in str(caught.value)
            assert 3 <= fail.count <= 6  # no more than three of each number
        else:
            assert "started" in notes_of(caught.value)[0]
            assert type(caught.value) is (LookupError if how is raise_lookup else SampleReadError)
        assert not pool.started


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_dataset_that_kills_who_unpickles_it_is_one_error(method: str, tmp_path: Path) -> None:
    fail = Fails(kill, tmp_path / "count")
    with ShardedDataLoader(DiesInSetState(fail), 2, pool=make_pool(method)) as loader:
        with pytest.raises(WorkerDiedError, match="unpickled the dataset") as caught:
            next(iter(loader))
        assert caught.value.exitcode == -9
        assert 3 <= fail.count <= 6


@pytest.mark.costly(3)
@pytest.mark.parametrize(("restarts", "deaths"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_restarts_is_how_many_workers_a_batch_may_kill(restarts: int, deaths: int, tmp_path: Path) -> None:
    fail = Fails(kill, tmp_path / "count")
    arguments, pool = loader_arguments("reading", fail), make_pool("fork", restarts=restarts)
    with ahead(ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, pool=pool), False) as loader:
        batches, errors = until_the_end(iter(loader))
    assert (len(batches), len(errors), fail.count) == (7, 1, deaths)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.costly
def test_a_death_is_no_bad_sample(on_error: str, tmp_path: Path) -> None:
    arguments = loader_arguments("reading", Fails(kill, tmp_path / "count"))
    with ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, pool=make_pool("fork"), on_error=on_error) as loader:
        batches, errors = until_the_end(iter(loader))
        assert len(batches) == 7
        assert [type(error) for error in errors] == [WorkerDiedError]
        assert loader.num_skipped == 0


STARTS: dict[str, Any] = {"starting": BadStart, "between batches": ReadyToDie, "sending half a batch": DiesWhileSending}


@covering(1, spawned=True, method=PROCESS_POOLS, where=[*PHASES, *STARTS], how=[leave, kill], num_shards=[None, 2])
@pytest.mark.costly(4)
def test_a_crash_that_does_not_come_again_is_not_seen(
    method: str, where: str, how: Callable[[], Any], num_shards: int | None, tmp_path: Path
) -> None:
    fail = Fails(how, tmp_path / "count", times=1 if where in PHASES else 2)
    options: dict[str, Any] = {"num_shards": num_shards, "shuffle": True}
    phase = where if where in PHASES else "reading"
    arguments = loader_arguments(phase, fail if where in PHASES else nothing)
    pool = make_pool(method, worker_init_fn=STARTS[where](fail) if where in STARTS else None)
    with ShardedDataLoader(**arguments, batch_size=BATCH_SIZE, seed=2, pool=pool, **options) as loader:
        assert until_the_end(iter(loader)) == (expected(phase, **options), [])
    assert fail.count >= 2


def test_a_zygote_that_is_killed_is_not_missed_and_made_again_for_the_next_worker() -> None:
    pool = ProcessPool(2, start_method="fork")
    with ShardedDataLoader(Random(160, 0), 4, True, seed=8, pool=make_pool("fork")) as loader:
        whole = [values_of(batch) for batch in loader]
    with ShardedDataLoader(Random(160, 0.001), 4, True, seed=8, pool=pool) as loader:
        found = []
        for number, batch in enumerate(loader):
            found.append(values_of(batch))
            if number in (1, 30):
                os.kill(zygote_pids(pool)[0], KILL)
            if number in (10, 20, 30):  # at the second death the next zygote is made
                os.kill(pool.pids[number == 20], KILL)
    assert found == whole


@METHODS
def test_what_a_worker_had_sent_when_it_was_killed_is_not_read_again(method: str, tmp_path: Path) -> None:
    path = tmp_path / "read"
    pool = ProcessPool(1, start_method=method)
    with ahead(ShardedDataLoader(Noting(path), 1, pool=pool, prefetch=2), False) as loader:
        batches = iter(loader)
        seen = [int(next(batches))]
        (worker,) = transport_of(pool).workers
        # It has read what is in flight, and sent it.
        assert until(lambda: len(path.read_text().split()) == 3 and worker.heartbeat[SAMPLE] == IDLE)
        os.kill(worker.pid, KILL)
        assert until(lambda: not lives(worker.pid))
        seen += [int(batch) for batch in batches]
        assert loader.stats().replaced_workers == 1
    assert seen == list(range(12))
    assert sorted(map(int, path.read_text().split())) == seen


class DiesOnce(Filled):
    """The first process that reads sample 13 dies, while it has a slot to write to."""

    def __init__(self, die: Callable[[], None]) -> None:
        super().__init__(24, 20_000)
        self.die = die

    def __getitem__(self, index: int) -> Any:
        if index == 13:
            self.die()
        return super().__getitem__(index)


@METHODS
def test_a_slot_is_free_only_when_its_writer_is_over(
    method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    freed: list[tuple[int, bool]] = []

    def watched(self: ProcessTransport, worker: ProcessWorker) -> None:
        freed.append((len(worker.slots), not lives(worker.pid)))
        free_slots(self, worker)

    free_slots = ProcessTransport.free_slots
    monkeypatch.setattr(ProcessTransport, "free_slots", watched)
    data = DiesOnce(Fails(kill, tmp_path / "count", times=1))
    with ShardedDataLoader(data, 2, pool=make_pool(method)) as loader:
        assert [batch[:, 0].tolist() for batch in loader] == [[2 * number, 2 * number + 1] for number in range(12)]
        assert any(slots for slots, _ in freed) and all(over for _, over in freed)


def test_replacements_come_from_the_zygote_and_see_the_dataset_as_it_was() -> None:
    data, pool = Parents(), ProcessPool(2, start_method="fork")
    with ahead(ShardedDataLoader(data, 2, pool=pool), False) as loader:
        before = np.concatenate([np.asarray(batch) for batch in loader])
        data.value = 2
        for pid in pool.pids:
            os.kill(pid, KILL)
        after = np.concatenate([np.asarray(batch) for batch in loader])
        (parent,) = zygote_pids(pool)
    for rows in (before, after):
        assert rows[:, 0].tolist() == list(range(40))
        assert set(rows[:, 1]) == {1}
    assert set(before[:, 3]) == {os.getpid()}
    assert set(after[-10:, 3]) == {parent} != {os.getpid()}
    assert not set(before[:, 2]) & set(after[-10:, 2])


@contextlib.contextmanager
def kills_of_starting(pool: ProcessPool, times: int) -> Iterator[Callable[[], int]]:
    """Inside, so many workers that have not started yet are killed, as soon as they are seen; how many are left."""
    seen: set[int] = set()
    killed: list[int] = []
    stop = threading.Event()

    def run() -> None:
        while len(killed) < times and not stop.wait(0.002):
            for worker in list(transport_of(pool).workers):
                if len(killed) < times and not worker.ready and worker.pid not in seen:
                    seen.add(worker.pid)
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(worker.pid, KILL)
                        killed.append(worker.pid)

    thread = threading.Thread(target=run)
    thread.start()
    yield lambda: times - len(killed)
    stop.set()
    thread.join()


@METHODS
def test_a_storm_that_hits_workers_while_they_start_does_not_end_the_pool(method: str) -> None:
    pool = ProcessPool(2, start_method=method)
    with ShardedDataLoader(Random(60, 0.002), 4, True, seed=8, pool=pool) as loader:
        whole = [values_of(batch) for batch in loader]  # they can start
        with kills_of_starting(
            pool, 8
        ) as left:  # of two workers: four in a row each, unless they start before it looks
            while left():
                loader.set_epoch(0)
                iterator = iter(loader)
                for pid in pool.pids:
                    os.kill(pid, KILL)
                assert until_the_end(iterator) == (whole, [])


@pytest.mark.parametrize("how", [leave, pytest.param(crashes, marks=pytest.mark.slow)])
def test_a_replacement_that_ends_by_itself_is_given_up_soon(how: Any, tmp_path: Path) -> None:
    """Also where workers have started before."""
    broken = tmp_path / "broken"
    fail = Fails(how, tmp_path / "count")

    def starts(number: int) -> None:
        if broken.exists():
            fail()

    pool = ProcessPool(2, start_method="fork", worker_init_fn=starts)
    with ShardedDataLoader(range(40), 2, pool=pool) as loader:
        iterator = iter(loader)
        next(iterator)
        broken.touch()
        for pid in pool.pids:
            os.kill(pid, KILL)
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows kills nobody for memory")
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
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout, without_notices(done.stderr)) == (0, "the same\n", "")
