"""Why `next` waits: small jobs with one known bottleneck each, and the verdict over it."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, HostClock, made, make_pool

from sharded_loader import ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.engine import reader
from sharded_loader.engine.messages import BatchTimes
from sharded_loader.instruments.stats import LoaderStats
from sharded_loader.instruments.times import CAUSES, WorkerTimes, causes_of, limit_of, slow_worker
from sharded_loader.torch import DataLoader
from tests.failures import Fails, kill
from tests.instruments.test_report import rows_of
from tests.samples import Drawing, Filled, NoLength, pass_time


def check_sum(stats: LoaderStats) -> None:
    assert set(stats.causes) == set(CAUSES)
    assert sum(stats.causes.values()) == pytest.approx(stats.waiting_seconds, rel=0.01)


# -- one bottleneck each, by a clock that stands still -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("slow", "cause"),
    [
        ("sample", "input"),
        ("every 100th sample", "late"),
        ("collate_fn", "collate"),
        ("sampler", "main_process"),
        ("device_transform", "placing"),
        ("step", "loop"),
    ],
)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_what_takes_the_time_is_the_limit(kind: Any, slow: str, cause: str, host_time: HostClock) -> None:
    def takes(what: str, given: Any, seconds: float = 0.01) -> Any:
        host_time.move(seconds * (slow == what))
        return given

    def sample(index: int) -> Any:
        takes("every 100th sample", index, 1.0 if index % 100 == 37 else 0.001)
        return takes("sample", index)

    more: dict[str, Any] = {}
    if slow == "device_transform":
        kind, more = made, {"device_transform": lambda batch: takes("device_transform", batch)}  # the other has none
    loader = kind(
        SimpleDataset(range(400)).transform(sample),
        10,
        sampler=NoLength(lambda: (takes("sampler", index) for index in range(400))),
        collate_fn=lambda samples: takes("collate_fn", np.array(samples)),
        **more,
    )
    for batch in loader:
        takes("step", batch)
    stats = loader.stats()
    check_sum(stats)
    assert limit_of(stats) == cause and stats.verdict
    if slow == "every 100th sample":
        slowest = stats.slowest[:4]
        assert {one.index for one in slowest} == {37, 137, 237, 337} and "index" in stats.verdict
        assert all(one.seconds >= 1.0 and one.epoch == 0 for one in slowest)
        assert [one.seconds for one in stats.slowest] == sorted((one.seconds for one in stats.slowest), reverse=True)


@pytest.mark.parametrize(("computes", "cause"), [(True, "compute"), (False, "input")])
def test_without_workers_the_main_process_computes_or_waits(
    computes: bool, cause: str, host_time: HostClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader, "core_seconds", lambda: (host_time() * computes, 0.0))
    dataset = SimpleDataset(range(40)).transform(lambda index: host_time.move(0.005) or index)
    with ShardedDataLoader(dataset, 10) as loader:
        list(loader)
        stats = loader.stats()
    check_sum(stats)
    assert stats.causes[cause] == pytest.approx(40 * 0.005)
    assert set(stats.workers) == {-1}
    assert limit_of(stats) == cause and "main process" in stats.verdict


@pytest.mark.parametrize("name", ["inline", *(pytest.param(name, marks=pytest.mark.slow) for name in POOLS[1:])])
def test_iterable_data_waits_for_input(name: str, request: pytest.FixtureRequest) -> None:
    if name == "inline":
        request.getfixturevalue("host_time")

    def part(number: int, parts: int) -> Any:
        return (pause(index, 0.002) for index in range(number, 200, parts))

    with ShardedDataLoader(part, 10, streams=2, pool=make_pool(name)) as loader:
        list(loader)
        stats = loader.stats()
    check_sum(stats)
    assert stats.causes["input"] > (0 if name != "inline" else 0.9 * 200 * 0.002) and stats.slowest[0].index[0] in (
        0,
        1,
    )


def test_batches_that_are_held() -> None:
    pool = ProcessPool(2, start_method="fork", max_bytes=1 << 24)
    with ShardedDataLoader(Filled(100, 1 << 17), 8, pool=pool) as loader:
        held = list(loader)
        stats = loader.stats()
    check_sum(stats)
    assert len(held) == 13 and stats.slow_batches > 0


def test_workers_that_end(tmp_path: Path) -> None:
    dataset = Drawing(40, [17], Fails(kill, tmp_path / "count", times=1))
    with ShardedDataLoader(dataset, 5, pool=make_pool("fork", 1), prefetch=1) as loader:  # `next` is there when it ends
        list(loader)
        stats = loader.stats()
    check_sum(stats)
    assert stats.causes["start"] > 0
    limited = dataclasses.replace(stats, causes={"start": stats.waiting_seconds})
    assert limit_of(limited) == "start" and "(1 in the place of others)" in limited.verdict


def test_the_last_batches_are_kept_as_they_were(host_time: HostClock) -> None:
    dataset = SimpleDataset(range(40)).transform(lambda index: host_time.move(0.01) or index)
    with ShardedDataLoader(dataset, 10, pool=make_pool("fork")) as loader:
        list(loader)
        last = rows_of(loader)
    assert [(one.epoch, one.step, one.samples) for one in last] == [(0, number, 10) for number in range(4)]
    for one in last:
        assert one.sent <= one.began <= one.ended <= one.written <= one.taken and one.asked <= one.taken
        assert one.wait_ended - one.wait_began <= one.waited and (one.cause in CAUSES or not one.waited)


# -- the same by real seconds, which a busy machine may stretch --------------------------------------------------------

ALL = ("fork", "spawn", "thread")


@dataclasses.dataclass
class Job:
    """A dataset whose samples take a time that is known."""

    length: int
    seconds: float  # of a sample
    late: float = 0.0  # of every 100th sample
    computes: bool = False  # it does not sleep

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        seconds = self.late if self.late and index % 100 == 37 else self.seconds
        if self.computes:
            until = time.thread_time() + seconds
            while time.thread_time() < until:
                pass
        else:
            pause(index, seconds)
        return index


def pause(given: Any, seconds: float = 0.02) -> Any:
    pass_time(seconds)
    return given


def slow_collate(samples: list[int]) -> Any:
    return pause(np.array(samples), 0.064)


JOBS: dict[str, tuple[tuple[str, ...], Job, dict[str, Any], str, str]] = {
    "too few workers": (ALL, Job(400, 0.002, computes=True), {}, "compute", 'num_workers="auto"'),
    "a slow disk": (ALL, Job(600, 0.004), {}, "input", "wait for a disk or a network"),
    "a slow collate function": (ALL, Job(300, 0.0), {"collate_fn": slow_collate}, "collate", "collate function"),
    "late samples": (ALL, Job(600, 0.0005, late=0.4), {}, "late", "index"),
    "a slow consumer": (ALL[::2], Job(200, 0.0), {"step": 0.03, "epochs": 2}, "loop", "training loop is the limit"),
    "few in flight": (("thread",), Job(300, 0.002), {"workers": 3, "prefetch": 1}, "main_process", "prefetch="),
    "placing": (("fork",), Job(200, 0.0), {"device_transform": pause}, "placing", ""),
    "the start of an epoch": (("fork",), Job(10, 0.02), {}, "start", ""),
    "a slow sampler": (
        ALL[::2],
        Job(100, 0.0001),
        {"sampler": NoLength(lambda: (pause(index, 0.003) for index in range(100)))},
        "main_process",
        "sampler",
    ),
}


def read(dataset: Any, method: str, step: float = 0.0, workers: int = 2, epochs: int = 1, **options: Any) -> Any:
    """The numbers of the last epoch; where interpreters start, of the second one."""
    epochs = max(epochs, 1 + (method == "spawn"))
    with made(dataset, batch_size=10, pool=make_pool(method, workers), **options) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass_time(step)
        return loader.stats(epochs - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("job", "method"), [(name, method) for name in JOBS for method in JOBS[name][0]])
def test_a_job_with_one_bottleneck_names_it(job: str, method: str) -> None:
    _, dataset, options, cause, told = JOBS[job]
    stats = read(dataset, method, **options)
    check_sum(stats)
    assert limit_of(stats) == cause and told in f"{stats.verdict} {stats.advice}"


@pytest.mark.slow
def test_threads_that_take_turns_have_no_late_samples_and_no_slow_worker() -> None:
    stats = read(Job(400, 0.0005, computes=True), "thread", workers=4)
    check_sum(stats)
    # Also `next` waits for its turn, and to start, threads need a core.
    assert limit_of(stats) not in ("late", "worker", "input")
    assert "slow" not in stats.verdict


@pytest.mark.slow
def test_one_slow_worker() -> None:
    slow = threading.local()

    def init(number: int) -> None:
        slow.seconds = 0.05 if number == 0 else 0.005

    uneven = SimpleDataset(range(60)).transform(lambda index: pause(index, slow.seconds))
    with ShardedDataLoader(uneven, 1, pool=make_pool("thread", 2, worker_init_fn=init)) as loader:
        list(loader)
        stats = loader.stats()
    check_sum(stats)
    assert limit_of(stats) == "worker" and "Worker 0 is slow" in stats.verdict


@pytest.mark.slow
def test_stages_and_workers_are_told_with_quantiles_of_the_drop_in_too() -> None:
    loader = DataLoader(Job(40, 0.005), batch_size=10, num_workers=2)
    list(loader)
    stats = loader.stats()
    check_sum(stats)
    read_, batches = stats.stages["read"], sum(worker.batches for worker in stats.workers.values())
    assert batches == stats.batches == 4 and set(stats.workers) <= {0, 1}
    assert 0.04 < read_.p50 <= read_.p90 <= read_.p99 <= read_.longest
    assert read_.seconds == pytest.approx(stats.reading_seconds - stats.stages["collate"].seconds, rel=0.01)


@pytest.mark.slow
def test_of_cheap_batches_few_are_measured_and_stand_for_all() -> None:
    with ShardedDataLoader(range(40_000), 4) as loader:
        list(loader)
        stats, measured = loader.stats(), [one for one in rows_of(loader) if one.weight]
    check_sum(stats)
    assert len(measured) < 1000 or stats.stages["read"].p50 > 1e-3  # if this machine is busy
    assert stats.batches == 10_000 and 5_000 < stats.workers[-1].batches <= 10_000


def test_the_first_batch_alone_waits_for_workers_to_start() -> None:
    with ShardedDataLoader(range(6), 2, num_workers=1, thread_pool=True) as loader:
        assert sum(1 for _ in range(2) for _ in loader) == 6
        assert [one.step for one in rows_of(loader) if one.starts] == [0, 0]


def batch(wait_began: float = 0.0, wait_ended: float = 0.0, **known: Any) -> BatchTimes:
    """A batch that worker 0 began at 11.0, and had at 13.0; `next` was called at 10.0."""
    times = {"worker": 0, "began": 11.0, "seconds": 2.0, "turn": 9.0, "asked": 10.0, "taken": 14.0}
    return BatchTimes(**times, wait_began=wait_began, wait_ended=wait_ended, **known)


MEASURED = {"weight": 1, "idle": 0.5, "processor": 2.0}


@pytest.mark.parametrize(
    ("wait", "known", "causes"),
    [
        ((11.5, 13.5), MEASURED, {"compute": 2.0}),
        ((11.5, 13.5), MEASURED | {"processor": 0.1}, {"compute": 0.1, "input": 1.9}),
        ((11.5, 13.5), MEASURED | {"processor": 0.1, "queued": 1.0}, {"compute": 0.2, "input": 1.8}),
        ((11.5, 13.5), MEASURED | {"per_core": 20.0, "processor": 0.1, "queued": 0.9}, {"compute": 1.0, "input": 1.0}),
        ((11.5, 13.5), MEASURED | {"threads": 30, "processor": 0.1}, {"compute": 2.0}),
        ((10.0, 13.5), MEASURED, {"compute": 3.0, "main_process": 0.5}),
        ((10.0, 13.0), MEASURED | {"is_first": True}, {"start": 1.0, "compute": 2.0}),
        ((10.0, 13.5), MEASURED | {"lacks_tasks": True}, {"main_process": 3.5}),
        ((11.5, 13.5), MEASURED | {"lacks_tasks": True}, {"main_process": 2.0}),
        ((11.5, 13.5), {}, {"compute": 0.5, "input": 1.5}),
        ((0.0, 0.0), MEASURED, {}),
        ((0.0, 0.0), {"worker": -1}, {"compute": 0.5, "input": 1.5}),
        ((10.0, 13.5), MEASURED | {"is_first": True, "is_lost": True}, {"start": 3.5}),
        ((11.5, 13.5), {"starts": True, "placing": 0.5}, {"start": 3.5}),
    ],
)
def test_each_second_of_a_wait_has_one_cause(wait: Any, known: dict[str, Any], causes: dict[str, float]) -> None:
    found: dict[str, float] = {}
    times = batch(*wait)
    times.__dict__.update(known)
    for cause, seconds in causes_of(times, 0.25):
        found[cause] = found.get(cause, 0.0) + seconds
    assert {cause: seconds for cause, seconds in found.items() if seconds} == pytest.approx(causes)


def test_a_worker_is_slow_beside_the_others() -> None:
    def worker(p50: float, batches: int = 9) -> WorkerTimes:
        return WorkerTimes(batches, 1.0, 1.0, 0.0, p50, p50, p50, p50)

    assert slow_worker({0: worker(1.0), 1: worker(4.0), 2: worker(1.2)}) == (1, pytest.approx(1.1))
    assert slow_worker({0: worker(1.0), 1: worker(1.9)}) is None
    assert slow_worker({0: worker(1.0), 1: worker(9.0, batches=2)}) is None
    assert slow_worker({}) is None


def test_a_device_that_is_behind_is_told() -> None:
    stats = LoaderStats(batches=9, seconds=2.0, waiting_seconds=0.01, device_seconds=1.0)
    assert limit_of(stats) == "device" and "waits for it for 50% of the time" in stats.verdict
