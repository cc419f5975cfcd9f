"""How many cores there are, and whether the workers are far more."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from sharded_loader import LoaderWarning, ShardedDataLoader
from sharded_loader.base import cores
from sharded_loader.base.cores import core_limit, cores_for_workers, warn_of_workers


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"sys/fs/cgroup/cpu.max": "max 100000\n", "sys/fs/cgroup/job/cpu.max": "150000 100000\n"}, 1.5),
        ({"sys/fs/cgroup/cpu.max": "50000 100000\n", "sys/fs/cgroup/job/cpu.max": "max 100000\n"}, 0.5),
        ({"sys/fs/cgroup/job/cpu.max": "nonsense\n"}, None),
    ],
)
def test_the_tightest_limit_of_processor_time_counts(
    files: dict[str, str], limit: float | None, tmp_path: Path
) -> None:
    assert core_limit(write(tmp_path, {"proc/self/cgroup": "0::/job\n"} | files)) == limit


@pytest.mark.parametrize(("quota", "limit"), [("-1", None), ("400000", 4.0)])
def test_the_first_kind_of_cgroups_is_read_too(quota: str, limit: float | None, tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/x\n2:cpu,cpuacct:/job\n",
        "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": "100000",
    }
    assert core_limit(write(tmp_path, files)) == limit


def test_workers_share_what_the_container_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    for limit, number in ((None, 8), (2.5, 3), (0.5, 1), (99.0, 8)):
        monkeypatch.setattr(cores, "core_limit", lambda limit=limit: limit)
        assert cores_for_workers() == number


@pytest.mark.parametrize(
    ("workers", "ranks", "warns"), [(16, "", False), (17, "", True), (16, "2", True), (4, "8", False), (16, "x", False)]
)
def test_far_more_worker_processes_than_cores_are_a_warning(
    workers: int, ranks: str, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cores, "cores_for_workers", lambda: 8)
    monkeypatch.setattr(cores, "usable_cores", lambda: 8)
    monkeypatch.setattr(cores.os, "cpu_count", lambda: 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_workers(workers, {"LOCAL_WORLD_SIZE": ranks})
    assert [one.category for one in caught] == [LoaderWarning] * warns
    assert all("share 8 cores" in str(one.message) for one in caught)


def test_the_loader_warns_when_it_is_made_and_threads_may_be_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "cores_for_workers", lambda: 2)
    with pytest.warns(LoaderWarning, match="64 worker processes share 2 cores") as caught:
        ShardedDataLoader(range(8), 2, num_workers=64)
    assert caught[0].filename == __file__
    ShardedDataLoader(range(8), 2, num_workers=64, thread_pool=True)
