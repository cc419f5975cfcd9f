"""``num_workers="auto"``: the policy, on a table and on simulated jobs; what comes is as with any fixed number."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from sharded_loader import InlinePool, ProcessPool, ShardedDataLoader, SimpleDataset, ThreadPool, sample_rng
from sharded_loader.base.limits import Limit
from sharded_loader.engine.pipeline import PER_WORKER
from sharded_loader.instruments import auto
from sharded_loader.instruments.auto import AHEAD, DEEPEST, KEPT, MOST, START, Observed, Setting, Tuner, choose, observe
from sharded_loader.instruments.stats import LoaderStats, Meter
from sharded_loader.instruments.times import StageTimes, WorkerTimes
from sharded_loader.torch import DataLoader
from tests.conftest import PROCESS_POOLS
from tests.samples import Drawing

# -- the policy --------------------------------------------------------------------------------------------------------


def seen(workers: int, rate: float, *, depth: int = PER_WORKER, waits: float = 0.9, **others: float) -> Observed:
    """All workers wait for input, unless the arguments say otherwise."""
    facts = {"starved": waits, "reading": float(workers)} | others
    return Observed(Setting(workers, depth), rate, waits, **facts)


TABLE: dict[str, tuple[list[Observed], Setting]] = {
    "workers wait for input: twice as many": ([seen(2, 100)], Setting(4)),
    "and again": ([seen(2, 100), seen(4, 200)], Setting(8)),
    "at most so many as there is memory for": ([seen(20, 100)], Setting(MOST)),
    "workers compute on all cores: no more": ([seen(4, 100, running=4)], Setting(4)),
    "a core is idle: one more": ([seen(3, 100, running=3)], Setting(4)),
    "they compute half of the time: up to three for each core": ([seen(8, 100, running=4)], Setting(12)),
    "some wait for a core, and most for input: the cores have room": ([seen(12, 100, running=6)], Setting(16)),
    "more than there are cores for: fewer": ([seen(6, 100, running=6)], Setting(4)),
    "which was slower: stay": ([seen(4, 90, running=4), seen(6, 100, running=6)], Setting(6)),
    "it does not wait: those that are at work": ([seen(8, 100, waits=0.01, reading=3.0)], Setting(4)),
    "nearly all of them are": ([seen(8, 100, waits=0.01, reading=5.0)], Setting(8)),
    "all of them are": ([seen(8, 100, waits=0.01, reading=7.5)], Setting(8)),
    "fewer were tried: it waits": ([seen(4, 90, waits=0.1), seen(8, 100, waits=0.01, reading=3.0)], Setting(8)),
    "not even so many are tried": ([seen(6, 90, waits=0.1), seen(12, 100, starved=0.0, reading=4.0)], Setting(12)),
    "fewer were as fast": ([seen(4, 97, waits=0.05), seen(8, 100, waits=0.01, reading=7.5)], Setting(4)),
    "a slower loop is no reason for more": ([seen(2, 100), seen(1, 50, waits=0.01, reading=0.5)], Setting(1)),
    "it waits for the main process alone: no more": ([seen(2, 100, starved=0.0)], Setting(2)),
    "and those that are at work are enough": ([seen(8, 100, starved=0.0, reading=2.0)], Setting(3)),
    "more gained nothing: back": ([seen(4, 200), seen(8, 205)], Setting(4)),
    "and stay": ([seen(2, 100), seen(4, 200), seen(8, 205), seen(4, 200, waits=0.2)], Setting(4)),
    "it waits much: try them once more": ([seen(2, 100), seen(4, 200), seen(8, 205), seen(4, 200)], Setting(8)),
    "the first gain nothing: fewer": (
        [seen(2, 100), seen(4, 100), seen(2, 100), seen(4, 100), seen(2, 100)],
        Setting(1),
    ),
    "which was slower: back": ([seen(2, 100), seen(4, 100), seen(2, 100), seen(1, 50)], Setting(2)),
    "it was luck": ([seen(2, 100), seen(4, 150), seen(8, 160), seen(8, 100), seen(8, 110)], Setting(4)),
    "a disturbed look is no reason to leave": ([seen(2, 60), seen(4, 90), seen(2, 100), seen(2, 40)], Setting(4)),
    "nor a slightly lower rate": (
        [seen(2, 100), seen(8, 210), seen(4, 200), seen(4, 199), seen(4, 198), seen(4, 197, waits=0.2)],
        Setting(4),
    ),
    "single samples: more batches in flight, too": ([seen(2, 100, late=0.5)], Setting(4, 4)),
    "they compute: those alone": ([seen(4, 100, running=4, late=0.5)], Setting(4, 4)),
    "so many for each, and no more": ([seen(2, 100, depth=DEEPEST, late=0.5)], Setting(4, DEEPEST)),
    "so many for all": ([seen(8, 100, depth=DEEPEST)], Setting(16, AHEAD // 16)),
    "the user has set prefetch": ([seen(2, 100, depth=0, late=0.5)], Setting(4, 0)),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table(name: str) -> None:
    looks, expected = TABLE[name]
    assert choose(looks, cores=4, most=MOST) == expected


class Work(NamedTuple):
    """A simulated job: seconds of a sample, in workers and in the loop; how many samples come per second at most."""

    computes: float = 0.0
    waits: float = 0.0
    loop: float = 0.0
    most: float = 1e9
    gil: bool = False

    def observe(self, setting: Setting, cores: int) -> Observed:
        """What is seen after a while; no clock is asked."""
        workers, whole = setting.workers, self.computes + self.waits
        able = [workers / whole, self.most, (1 if self.gil else cores) / self.computes if self.computes else 1e9]
        rate = min(1 / self.loop if self.loop else 1e9, *able)
        waits = max(0.0, 1 - rate * self.loop)
        busy = rate * whole if rate < min(able) else float(workers)
        return Observed(setting, rate, waits, waits, 0.0, busy, busy * self.computes / whole)


WORKS = {
    "processor": Work(computes=0.01),
    "sleep": Work(waits=0.01, loop=0.001),
    "both": Work(computes=0.005, waits=0.005),
    "a third": Work(computes=0.004, waits=0.008, loop=0.0001),
    "slow consumer": Work(waits=0.01, loop=0.05),
    "a bit slower": Work(computes=0.01, loop=0.004),
    "object store": Work(waits=0.05, most=300.0),
    "threads that compute": Work(computes=0.01, gil=True),
    "nothing to do": Work(computes=1e-6, loop=0.01),
}


@pytest.mark.parametrize("cores", [1, 2, 4, 16])
@pytest.mark.parametrize("name", WORKS)
def test_simulated_jobs_are_as_fast_as_with_the_best_number_after_twelve_looks(name: str, cores: int) -> None:
    work, looks, setting = WORKS[name], list[Observed](), Setting()
    for _ in range(12):
        looks.append(work.observe(setting, cores))
        setting = choose(looks, cores, MOST)
    rates = {count: work.observe(Setting(count), cores).rate for count in range(1, MOST + 1)}
    assert rates[setting.workers] >= 0.95 * max(rates.values())
    cheapest = min(count for count, rate in rates.items() if rate >= 0.999 * max(rates.values()))
    assert setting.workers <= 2.5 * cheapest
    for _ in range(5):  # and it stays
        looks.append(work.observe(setting, cores))
        assert choose(looks, cores, MOST) == setting


def test_when_the_job_changes_the_number_does() -> None:
    looks, setting, found = list[Observed](), Setting(), []
    for work in (Work(waits=0.01, loop=0.001), Work(waits=0.01, loop=0.02), Work(waits=0.04, loop=0.002)):
        for _ in range(KEPT + 12):
            looks.append(work.observe(setting, 2))
            setting = choose(looks[-KEPT:], 2, MOST)
        found.append(setting.workers)
    assert found[0] in range(10, 17) and found[1] == 1 and found[2] in range(20, MOST + 1)


# -- what is observed --------------------------------------------------------------------------------------------------


def stats_of(seconds: float, batches: int, workers: dict[int, tuple[float, float]], **causes: float) -> LoaderStats:
    stats = LoaderStats(batches, 4 * batches, seconds, causes={**LoaderStats().causes, **causes})
    stats.__dict__["workers"] = {
        number: WorkerTimes(batches, read, ran, 0.0, 0.0, 0.0, 0.0, 0.0) for number, (read, ran) in workers.items()
    }
    return stats


def test_a_look_tells_shares_of_the_time_without_the_start_of_workers() -> None:
    before = stats_of(10.0, 100, {0: (5.0, 1.0)}, input=1.0)
    after = stats_of(15.0, 200, {-1: (9.0, 9.0), 0: (8.0, 2.0), 1: (1.0, 1.0)}, input=3.4, start=1.0)
    after.__dict__["stages"] = {"behind": StageTimes(0.8, 0.0, 0.0, 0.0, 0.0)}
    found = observe(before, after, Setting())
    assert found == Observed(Setting(), 100.0, pytest.approx(0.6), pytest.approx(0.6), pytest.approx(0.1), 1.0, 0.5)
    for seconds, batches in ((0.5, 1000), (2.0, 3), (1.5, 12)):  # a short look tells nothing
        assert (observe(LoaderStats(), stats_of(seconds, batches, {}), Setting()) is None) == (batches != 12)


class Pretended:
    """A pipeline, its pool, and a meter that tells what it is told to."""

    def __init__(self, workers: int = START, shares_dataset: bool = False) -> None:
        self.pool = self.scheduler = self.meter = self
        self.num_workers, self.wanted, self.shares_dataset = workers, workers, shares_dataset
        self.per_worker, self.scale_by_group, self.tune_at = PER_WORKER, True, 0.0
        self.told = stats_of(0.0, 0, {})

    def stats(self) -> LoaderStats:
        return self.told

    def update_prefetch(self, pool: Any) -> None:
        assert pool is self.pool

    def read(self, tuner: Tuner, now: float) -> int:
        """All workers read for two seconds; how many there are then."""
        for at in (now, now + 0.5, now + 1.2, now + 1.9):
            tuner.look(self, self, at)  # type: ignore[arg-type]
            workers = dict.fromkeys(range(self.num_workers), (10 * at, 0.0))
            self.told = stats_of(10 * at, int(1000 * at * self.num_workers), workers, input=9 * at)
        self.num_workers = self.wanted
        return self.num_workers


def test_the_tuner_waits_for_workers_that_start_and_then_asks_for_more() -> None:
    tuner, pretended = Tuner(Meter()), Pretended()
    assert [pretended.read(tuner, 10.0 * turn) for turn in range(1, 4)] == [4, 8, 16]
    assert tuner.workers == 16


def test_a_pause_of_the_program_is_no_slow_loop() -> None:
    tuner, pretended = Tuner(Meter()), Pretended()
    for at in (1.0, 1.9, 2.8, 9.0):  # an evaluation before the last one
        tuner.look(pretended, pretended, at)  # type: ignore[arg-type]
        pretended.told = stats_of(at, int(100 * at), dict.fromkeys(range(2), (0.1 * at, 0.0)))
    assert pretended.wanted == START
    for at in (9.3, 9.9, 10.3):
        tuner.look(pretended, pretended, at)  # type: ignore[arg-type]
        pretended.told = stats_of(2 * at, int(100 * at), dict.fromkeys(range(2), (0.1 * at, 0.0)))
    assert pretended.wanted == 1


def test_processes_are_as_many_as_there_is_memory_for_on_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    free = itertools.chain([16 << 30, 12 << 30], itertools.repeat(12 << 30))
    monkeypatch.setattr(auto, "free_bytes", lambda: Limit(next(free), "here"))
    tuner, pretended = Tuner(Meter()), Pretended()  # a rank has 4 GB, then 3: each of the two new ones took half of one
    assert [pretended.read(tuner, 10.0 * turn) for turn in range(1, 3)] == [4, 8]
    monkeypatch.setattr(auto, "free_bytes", lambda: Limit(1 << 30, "here"))
    assert pretended.read(tuner, 30.0) == 8  # a rank has 256 MB left: no more
    monkeypatch.setattr(auto, "free_bytes", lambda: Limit(0, "here"))
    assert pretended.read(tuner, 40.0) < 8
    assert Pretended(shares_dataset=True).read(Tuner(Meter()), 1.0) == 4  # threads need no memory of their own
    assert choose([seen(4, 100), seen(8, 200)], cores=4, most=5) == Setting(5)
    assert choose([seen(2, 100)], cores=4, most=-3) == Setting(1)
    assert choose([seen(8, 200)], cores=4, most=12) == Setting(12)


def test_cores_are_those_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[int] = []
    monkeypatch.setattr(auto, "choose", lambda seen, cores, most: found.append(cores) or Setting())
    monkeypatch.setattr(auto, "cores_for_workers", lambda: 8)
    for ranks in (1, 2, 16):
        monkeypatch.setattr(auto, "ranks_on_cores", lambda ranks=ranks: ranks)
        Pretended().read(Tuner(Meter()), 1.0)
    assert list(dict.fromkeys(found)) == [8, 4, 1]


# -- what comes --------------------------------------------------------------------------------------------------------

SAMPLES = 60


class InProcesses(Drawing):
    """It draws from a global generator too, as is right in processes alone."""

    def read(self, index: int, rng: np.random.Generator) -> Any:
        return np.array([*super().read(index, rng), np.random.random()])


FAILING = SAMPLES, (3, 50)
"""Of `Drawing`: two samples raise an error."""


class Counting(SimpleDataset):
    """A dataset with a state, which each worker of the drop-in keeps."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return np.array([index, self.reads])

    def state_dict(self) -> dict[str, Any]:
        return {"reads": self.reads}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.reads = state["reads"]


class Lines(torch.utils.data.IterableDataset[Any]):
    """Iterable data in parts."""

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        for at in range(10 * (info.id + 1)):
            yield np.array([info.id, info.num_workers, at, sample_rng().random()])


def pool_of(loader: Any, batches: Any) -> Any:
    """The pool that reads for an iterator."""
    return loader.pool if isinstance(loader, ShardedDataLoader) else batches._engine.pool


def outcomes(loader: Any, before: Callable[[Any], Any] = lambda batches: None, epochs: int = 2) -> list[Any]:
    """The batches, errors and states of some epochs."""
    found: list[Any] = []
    for _ in range(epochs):
        batches = iter(loader)
        while True:
            before(batches)
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                break
            except ValueError as error:
                found.append(str(error))
            found.append(loader.state_dict())
    return found


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> list[int]:
    """The number changes at every third step. The numbers that there were."""
    rng, numbers, steps = random.Random(1), list[int](), itertools.count()
    starts_slowly = request.node.callspec.params.get("method") in ("spawn", "forkserver")

    def look(self: Tuner, meter: Meter, pipeline: Any, now: float) -> None:
        numbers.append(pipeline.pool.num_workers)
        if next(steps) % (12 if starts_slowly else 3) == 0:
            self.workers = pipeline.pool.wanted = rng.choice([1, 2, 3, 5])
            pipeline.scheduler.per_worker = rng.choice([1, 2, 8])
            pipeline.scheduler.update_prefetch(pipeline.pool)

    monkeypatch.setattr(Tuner, "look", look)
    return numbers


@pytest.mark.costly
@pytest.mark.parametrize("pool", ["thread", "process"])
@pytest.mark.parametrize("kind", ["map", "parts"])
def test_batches_states_and_errors_are_those_of_any_number(pool: Any, kind: str, restless: list[int]) -> None:
    data: Any = Lines() if kind == "parts" else (InProcesses if pool == "process" else Drawing)(*FAILING)
    options: Any = {"seed": 3, "pool": pool, "shuffle": kind == "map"}
    with ShardedDataLoader(data, 4, num_workers=START, **options) as loader:
        expected = outcomes(loader)
    with ShardedDataLoader(data, 4, num_workers="auto", **options) as loader:
        assert loader.num_workers == START
        assert outcomes(loader) == expected
    assert len(set(restless)) > 2


DROP_IN = {"map": partial(InProcesses, *FAILING), "state": partial(Counting, range(SAMPLES)), "parts": Lines}


@pytest.mark.costly(3)
@pytest.mark.parametrize("method", [*(name for name in PROCESS_POOLS if name == "fork"), "thread", "persistent"])
@pytest.mark.parametrize("kind", DROP_IN)
def test_so_they_are_of_the_drop_in(method: str, kind: str, restless: list[int]) -> None:
    if (method, kind) == ("thread", "state"):
        pytest.skip("threads share one dataset, whose state depends on who is first")

    def loader(workers: Any) -> Any:
        data: Any = Drawing(*FAILING) if kind == "map" and method == "thread" else DROP_IN[kind]()
        options: dict[str, Any] = {"persistent": {"persistent_workers": True}, "thread": {"thread_pool": True}}.get(
            method, {"start_method": method}
        )
        return DataLoader(data, 4, num_workers=workers, seed=3, shuffle=kind != "parts" or None, **options)

    torch.manual_seed(7)
    expected = outcomes(loader(START))
    torch.manual_seed(7)
    assert outcomes(loader("auto")) == expected
    assert len(set(restless)) > 2 or (kind == "state" and not restless)  # a state belongs to one of two workers


@pytest.mark.slow
@pytest.mark.parametrize("method", PROCESS_POOLS)
@pytest.mark.parametrize("kind", ["map", "parts"])
def test_so_they_are_while_workers_are_killed(method: Any, kind: str, restless: list[int]) -> None:
    rng = random.Random(f"{method} {kind}")
    options: Any = {"seed": 3, "start_method": method, "persistent_workers": True}
    torch.manual_seed(7)
    epochs = 3 if method == "fork" else 1  # others start slowly
    expected = outcomes(DataLoader(DROP_IN[kind](), 4, num_workers=START, **options), epochs=epochs)
    torch.manual_seed(7)
    loader = DataLoader(DROP_IN[kind](), 4, num_workers="auto", restarts=1000, **options)

    def kill(batches: Any) -> None:
        pool = pool_of(loader, batches)
        if pool.started and rng.random() < (0.4 if method == "fork" else 0.05):
            rng.choice(pool.workers).kill()

    assert outcomes(loader, kill, epochs=epochs) == expected


@pytest.fixture
def tuners(monkeypatch: pytest.MonkeyPatch) -> list[Tuner]:
    """Those that are asked. Each finds that three workers are best."""
    asked: list[Tuner] = []

    def look(self: Tuner, meter: Meter, pipeline: Any, now: float) -> None:
        asked.append(self)
        self.workers = 3

    monkeypatch.setattr(Tuner, "look", look)
    return asked


@pytest.mark.parametrize("thread_pool", [True, False])
def test_the_next_epoch_of_the_drop_in_begins_with_the_number_found(thread_pool: bool, tuners: list[Tuner]) -> None:
    loader = DataLoader(range(8), 2, num_workers="auto", thread_pool=thread_pool)
    assert loader.num_workers == START
    list(loader)
    iterator = iter(loader)
    next(iterator)
    assert tuners and pool_of(loader, iterator).num_workers == 3
    assert iterator._engine.pipeline.scheduler.prefetch == 6  # type: ignore[attr-defined]


def test_a_copy_of_the_drop_in_finds_a_number_of_its_own(tuners: list[Tuner]) -> None:
    loader = DataLoader(range(8), 2, num_workers="auto", thread_pool=True)
    for other in (loader, copy.deepcopy(loader), pickle.loads(pickle.dumps(loader))):
        assert [batch.tolist() for batch in other] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(set(map(id, tuners))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["thread", "process"])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_a_loader_whose_workers_wait_finds_more(kind: Any, pool: str) -> None:
    waiting = SimpleDataset(range(100_000)).transform(lambda index: time.sleep(0.002) or index)
    loader = kind(waiting, 4, num_workers="auto", thread_pool=pool == "thread")
    batches = iter(loader)
    assert any(pool_of(loader, batches).num_workers >= 4 for _ in batches)


def test_auto_beside_other_arguments(tuners: list[Tuner]) -> None:
    given: dict[str, Any] = {"dataset": range(8), "batch_size": 2, "num_workers": "auto"}
    for options, prefetch in (({"prefetch_factor": 3}, 15), ({"prefetch": 3}, 3), ({}, 10)):
        with ShardedDataLoader(**given, thread_pool=True, **options) as loader:
            loader.pool.resize(5)
            assert loader.prefetch == prefetch and loader.arguments["num_workers"] == "auto"
            with ShardedDataLoader(**loader.arguments) as other:
                assert other.num_workers == START and list(map(len, other)) == [2, 2, 2, 2]
    inline = ShardedDataLoader(**given, pool="inline")
    assert inline.num_workers == 0 and list(map(len, inline)) == [2, 2, 2, 2]
    tuners.clear()
    with ShardedDataLoader(**given, pool=ThreadPool(3)) as loader:
        assert loader.num_workers == 3 and list(map(len, loader)) == [2, 2, 2, 2] and tuners
    for make in (ThreadPool, ProcessPool):
        with pytest.raises(TypeError, match="must be an integer, got 'auto'.*give num_workers=\"auto\" to the loader"):
            make("auto")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"pool": "ray"}, ValueError, 'num_workers="auto" is for threads and processes on this machine'),
        ({"pool": InlinePool()}, ValueError, "is for threads and processes on this machine, and the pool is Inline"),
        ({"num_workers": "atuo"}, TypeError, "got 'atuo' of type str: give the number of workers, or \"auto\""),
        ({"num_workers": "2"}, TypeError, "num_workers must be an integer, got '2'"),
        ({"num_workers": 2.0}, TypeError, "num_workers must be an integer, got 2.0"),
        ({"num_workers": None}, TypeError, "num_workers must be an integer, got None"),
    ],
)
def test_wrong_arguments_are_errors(options: dict[str, Any], error: Any, text: str) -> None:
    for kind in (ShardedDataLoader, DataLoader)[: 1 if "pool" in options else 2]:
        with pytest.raises(error, match=re.escape(text)):
            kind(range(8), 2, **{"num_workers": "auto", **options})
