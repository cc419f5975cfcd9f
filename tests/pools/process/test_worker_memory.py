"""``max_worker_memory=``: a worker that has grown past it is replaced between two batches. Nothing else changes."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import ahead

from sharded_loader import ProcessPool, RayPool, ShardedDataLoader, SimpleDataset, ThreadPool, sample_rng
from sharded_loader.base import limits
from sharded_loader.base.limits import own_bytes, private_bytes
from sharded_loader.pools.deaths import GROWN_LIMIT, Deaths
from sharded_loader.torch import DataLoader
from tests.conftest import PROCESS_POOLS, WITH_RAY

MB = 1 << 20


class Leaks:
    """Each sample leaves memory behind."""

    def __init__(self, nbytes: int, count: int = 200) -> None:
        self.nbytes, self.count = nbytes, count
        self.kept: list[Any] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        self.kept.append(np.ones(self.nbytes, np.uint8))
        return np.array([index, sample_rng().random(), psutil.Process().memory_info().rss])


def fresh(method: str) -> int:
    """What a worker takes that has read a batch."""
    data = SimpleDataset([0]).transform(lambda _: private_bytes())
    with ShardedDataLoader(data, 1, pool=ProcessPool(1, start_method=method)) as loader:
        return int(next(iter(loader)))


@pytest.mark.slow
@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_dataset_that_leaks_reads_on_in_bounded_memory(method: str, caplog: Any) -> None:
    data, limit = Leaks(2 * MB), fresh(method) + 40 * MB
    with ShardedDataLoader(data, 4, shuffle=True, seed=1, num_workers=1, thread_pool=True) as loader:
        expected = [batch[:, :2].tolist() for batch in loader]
    data.kept.clear()
    pool = ProcessPool(2, start_method=method, max_worker_memory=limit, restarts=0)
    with ahead(ShardedDataLoader(data, 4, shuffle=True, seed=1, pool=pool), False) as loader:
        for _ in range(2):
            batches = [batch.numpy() for batch in loader]
            assert loader.stats(0).recycled_workers > 0
            loader.set_epoch(0)
            assert [batch[:, :2].tolist() for batch in batches] == expected
        stats = loader.stats()
        growth = np.concatenate(batches)[:, 2].max() - np.concatenate(batches)[:, 2].min()
    assert stats.recycled_workers >= 2 and stats.replaced_workers == 0 and "replaced" not in str(stats)
    assert growth < 200 * MB, "without the limit it is 800 MB"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("method", PROCESS_POOLS[:1])
@pytest.mark.slow
def test_a_limit_below_what_a_new_worker_takes_is_an_error_with_both_numbers(method: str) -> None:
    pool = ProcessPool(2, start_method=method, max_worker_memory="1 MB")
    with ShardedDataLoader(Leaks(0, 100_000), 4, pool=pool) as loader:
        with pytest.raises(MemoryError, match=r"worker \d takes [\d,]{9,} bytes .* max_worker_memory allows 1,000,000"):
            list(loader)
        assert not pool.started


def test_one_large_first_batch_is_no_reason_to_give_up() -> None:
    deaths = Deaths(3)
    assert [deaths.record_growth(0, 1) for _ in range(GROWN_LIMIT - 1)] == [False] * (GROWN_LIMIT - 1)
    assert not deaths.record_growth(0, 50) and not deaths.record_growth(1, 0)
    assert [deaths.record_growth(0, 1) for _ in range(GROWN_LIMIT)] == [*[False] * (GROWN_LIMIT - 1), True]


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (0, "0"),
        (-5, "-5"),
        (True, "True"),
        ("much", "'much': give a number of bytes above 0, or a text such as"),
        ([], "[]"),
    ],
)
def test_wrong_limits(limit: Any, text: str) -> None:
    for make in (ProcessPool, lambda _, **options: DataLoader([1], 1, num_workers=2, **options)):
        with pytest.raises(ValueError, match=re.escape(f"max_worker_memory is {text}")):
            make(2, max_worker_memory=limit)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "thread_pool": True}])
def test_only_worker_processes_have_memory_of_their_own(options: Any) -> None:
    with pytest.raises(ValueError, match="max_worker_memory='2 GB' needs worker processes on this machine"):
        DataLoader([1], 1, max_worker_memory="2 GB", **options)
    with pytest.raises(TypeError, match="max_worker_memory"):
        ThreadPool(2, max_worker_memory=1 << 30)  # type: ignore[call-arg]
    if WITH_RAY:
        with pytest.raises(TypeError, match="max_worker_memory"):
            RayPool(2, max_worker_memory=1 << 30)  # type: ignore[call-arg]


def test_a_text_says_the_bytes_and_the_repr_makes_the_pool_again() -> None:
    with ShardedDataLoader([1], 1, pool=ProcessPool(1, max_worker_memory="1.5 GB")) as loader:
        assert repr(loader.pool).endswith("max_worker_memory=1500000000)")


def test_shared_memory_and_pages_of_a_fork_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/statm").write_text("9999 1000 300 1 0 500 0\n")
    page = os.sysconf("SC_PAGE_SIZE")
    assert own_bytes(tmp_path) == private_bytes(tmp_path) == 700 * page, "where the kernel has no smaps_rollup"
    rollup = "Rss: 5000 kB\nShared_Dirty: 300 kB\nPrivate_Clean: 40 kB\nPrivate_Dirty: 2 kB\nSwap: 9 kB\n"
    (tmp_path / "proc/self/smaps_rollup").write_text(rollup)
    assert (own_bytes(tmp_path), private_bytes(tmp_path)) == (700 * page, 42 << 10)


def test_without_proc_psutil_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert private_bytes(tmp_path) > MB
    monkeypatch.setitem(sys.modules, "psutil", None)
    monkeypatch.setattr(limits.own_bytes, "__defaults__", (tmp_path,))
    with pytest.raises(ImportError, match="max_worker_memory needs psutil on this system: pip install psutil"):
        ProcessPool(1, max_worker_memory="1 GB")
