"""Actors that come late, never, or go with their nodes: on a simulated cluster of Ray. Part of ``make test-ray``."""

from __future__ import annotations

import hashlib
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ray_environment, until
from pages import blocks, kept, promised, run_block

from benchmarks.on_ray import QUICK
from sharded_loader import RayPool, ShardedDataLoader, SimpleDataset, sample_rng

pytestmark = pytest.mark.ray

PAGE = Path(__file__).parents[3] / "docs/guides/machines.md"


def test_the_simulated_cluster_of_the_page_runs_as_pasted(tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE, "python") if "import ray\n" in block]
    assert kept(block, run_block(block, tmp_path)) == promised(block)


def row(index: int) -> np.ndarray[Any, Any]:
    """50 KB that depend on the index and on the sample's generator; some milliseconds."""
    hashlib.pbkdf2_hmac("sha256", b"", b"", 3000)
    return np.full(6000, index) + sample_rng().integers(1000)


ROWS = SimpleDataset(range(1200)).transform(row)


def bytes_of(batches: Any) -> list[bytes]:
    return [batch.numpy().tobytes() for batch in batches]


@pytest.fixture(scope="module")
def expected() -> list[bytes]:
    with ShardedDataLoader(ROWS, 8, shuffle=True, seed=3, num_workers=4, thread_pool=True) as loader:
        return bytes_of(loader)


@pytest.fixture(scope="module")
def cluster(expected: list[bytes]) -> Iterator[Any]:
    """A head without CPUs, for the driver; tests add nodes that read."""
    import ray
    from ray.cluster_utils import Cluster

    with ray_environment():
        made = Cluster(
            initialize_head=True,
            head_node_args={"num_cpus": 0, "object_store_memory": 200 << 20, "_system_config": QUICK},
        )
        ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
        yield made
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def nodes(cluster: Any) -> Iterator[Any]:
    """Adds nodes that read; they are gone after the test."""
    added: list[Any] = []

    def add(num_cpus: int = 2) -> Any:
        added.append(cluster.add_node(num_cpus=num_cpus, object_store_memory=200 << 20))
        return added[-1]

    def kill(node: Any) -> None:
        added.remove(node)
        cluster.remove_node(node, allow_graceful=False)

    add.kill = kill  # type: ignore[attr-defined]
    yield add
    for node in list(added):
        kill(node)


def loader_of(pool: RayPool) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(ROWS, 8, shuffle=True, seed=3, pool=pool)


def test_a_node_that_is_killed_costs_no_batch(nodes: Any, expected: list[bytes]) -> None:
    nodes(2)
    doomed, found = nodes(2), []
    with loader_of(RayPool(4)) as loader:
        for number, batch in enumerate(loader):
            found.append(batch.numpy().tobytes())
            if number == 40:
                nodes.kill(doomed)
    assert found == expected  # `benchmarks.on_ray` measures the longest wait


def test_those_that_fit_begin_and_the_others_come_when_there_is_room(nodes: Any, expected: list[bytes]) -> None:
    nodes(1)
    pool, found = RayPool(3), []

    def ready() -> int:
        return sum(worker.state == "ready" for worker in pool.workers)

    with loader_of(pool) as loader:
        for number, batch in enumerate(loader):
            found.append(batch.numpy().tobytes())
            if number == 20:
                assert ready() == 1
                nodes(2)
        while ready() < 3:  # a node and its actors take some seconds to start; the timeout of tests ends this
            for _ in loader:
                pass
    assert found == expected


def test_without_room_for_any_there_is_a_warning_and_then_an_error(
    cluster: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sharded_loader.ray.transport.PATIENCE", 0.5)
    with loader_of(RayPool(2, resources={"reader": 1}, start_timeout=2)) as loader:
        with pytest.raises(TimeoutError, match=r"within 2 s \(start_timeout=\).*num_cpus="):
            next(iter(loader))
    assert re.search(r"no worker has begun.*1 CPU, 1 reader.*0 reader", caplog.text)


def test_when_all_have_gone_it_is_said_once_and_waited(
    nodes: Any, expected: list[bytes], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sharded_loader.ray.transport.PATIENCE", 0.5)
    first, found = nodes(2), []
    with loader_of(RayPool(2)) as loader:
        batches = iter(loader)
        while len(found) < 60:
            found.append(next(batches).numpy().tobytes())
        nodes.kill(first)
        rest = threading.Thread(target=lambda: found.extend(bytes_of(batches)))
        rest.start()
        assert until(lambda: "goes on" in caplog.text)  # and the loop still waits
        assert rest.is_alive()
        nodes(2)
        rest.join()
    assert found == expected
    assert caplog.text.count("goes on when there is") == 1


def test_a_module_that_the_nodes_lack_is_told_with_the_remedy(nodes: Any, tmp_path: Any) -> None:
    nodes(1)
    (tmp_path / "only_here.py").write_text("class Only:\n    def __len__(self): return 8\n    __getitem__ = int\n")
    sys.path.insert(0, str(tmp_path))
    try:
        import only_here  # type: ignore[import-not-found]

        with ShardedDataLoader(only_here.Only(), 4, pool=RayPool(1)) as loader:
            with pytest.raises(ModuleNotFoundError) as caught:
                next(iter(loader))
            assert "runtime_env" in "\n".join(caught.value.__notes__)
    finally:
        sys.path.remove(str(tmp_path))
