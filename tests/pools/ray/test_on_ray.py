"""A pool on Ray reads what every pool reads, whatever happens to its actors. All promises: ``make test-ray``."""

from __future__ import annotations

import gc
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import until
from failures import hang, leave
from recovery_samples import until_the_end
from samples import Drawing, Filled

from sharded_loader import RayPool, ShardedDataLoader, WorkerDiedError, WorkerTimeoutError, interleave

pytestmark = pytest.mark.ray


class Rows(Drawing):
    """Sample i: 1,000 numbers that depend on i and on the sample's generator."""

    def read(self, index: int, rng: np.random.Generator) -> Any:
        super().read(index, rng)
        return np.arange(1000) * index + rng.integers(1000)


def bytes_of(batches: Any) -> list[bytes]:
    return [batch.numpy().tobytes() for batch in batches]


def expected(dataset: Any, epochs: int = 1, **options: Any) -> list[bytes]:
    with ShardedDataLoader(dataset, 8, shuffle=True, seed=3, **options) as loader:
        return [one for _ in range(epochs) for one in bytes_of(loader)]


def actors() -> list[psutil.Process]:
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            if "ray::LoaderActor" in " ".join(child.cmdline()):
                found.append(child)
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture
def pool(ray_here: Any) -> Iterator[RayPool]:
    yield RayPool(2, num_cpus=0)
    assert until(lambda: not actors())


@pytest.mark.parametrize("kind", ["by index", "in order", "both"])
def test_a_mixture_has_the_samples_and_states_of_every_pool(pool: RayPool, kind: str) -> None:
    def loader(ranks: int, rank: int, **options: Any) -> ShardedDataLoader:
        def stream(part: int, parts: int) -> Iterator[int]:
            return iter(range(part, 120, parts))

        first = stream if kind != "by index" else range(120)
        second = stream if kind == "in order" else range(1000, 1120)
        mixed = interleave([interleave([first, second], [3, 1]), second])
        order = {"shuffle": True} if kind == "by index" else {"streams": 4}
        return ShardedDataLoader(mixed, 3, num_replicas=ranks, rank=rank, steps_per_epoch=5, **order, **options)

    with loader(2, 1, pool=pool) as one:
        batches = iter(one)
        read = [next(batches).tolist() for _ in range(3)]
        state = one.state_dict()
        read += [batch.tolist() for batch in batches]
    assert read == [batch.tolist() for batch in loader(2, 1)]
    with loader(2, 1, pool=pool) as other:
        other.load_state_dict(state)
        assert [batch.tolist() for batch in other] == read[3:]


def test_more_batches_than_the_object_store_has_room_for_can_be_held(ray_here: Any) -> None:
    large = Filled(200, 500_000)
    with ShardedDataLoader(large, 2, pool=RayPool(2, num_cpus=0)) as loader:  # 400 MB; the store has 300
        held = list(loader)
    assert [batch[:, 7].tolist() for batch in held] == [[2.0 * n, 2.0 * n + 1] for n in range(100)]


def test_a_storm_of_kills_changes_nothing(ray_here: Any) -> None:
    dice, pool = random.Random(0), RayPool(3, num_cpus=0, restarts=100)
    found, killed = [], 0
    with ShardedDataLoader(Rows(2000), 8, shuffle=True, seed=3, pool=pool) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                found.append(batch.numpy().tobytes())
                ready = [one.pid for one in pool.workers if one.pid is not None]
                if number % 40 == 7 and ready:
                    os.kill(dice.choice(ready), signal.SIGKILL)
                    killed += 1
        assert 0 < loader.stats().replaced_workers <= killed
    assert killed > 8
    assert found == expected(Rows(2000), 2)


@pytest.mark.parametrize("restarts", [1, 3])
def test_the_batch_of_a_sample_that_kills_is_named_and_the_others_come(ray_here: Any, restarts: int) -> None:
    with ShardedDataLoader(Rows(400, {205}, leave), 8, pool=RayPool(2, num_cpus=0, restarts=restarts)) as loader:
        batches, (error,) = until_the_end(iter(loader))
    assert isinstance(error, WorkerDiedError) and (len(batches), error.batch, error.index) == (49, 25, None)
    assert re.search(r"worker \d \(pid \d+ on [\d.]+\) died: .*reading the batch, in epoch 0, batch 25", str(error))


def test_a_sample_that_hangs_is_named_and_the_others_come(ray_here: Any) -> None:
    with ShardedDataLoader(Rows(80, {43}, hang), 8, pool=RayPool(2, num_cpus=0, timeout=1.5, restarts=1)) as loader:
        batches, (error,) = until_the_end(iter(loader))
    assert isinstance(error, WorkerTimeoutError) and (len(batches), error.batch, error.index) == (9, 5, 43)


def test_a_dataset_that_cannot_be_pickled_is_named(pool: RayPool) -> None:
    dataset = Rows(400)
    dataset.lock = threading.Lock()  # type: ignore[attr-defined]
    with (
        ShardedDataLoader(dataset, 8, pool=pool) as loader,
        pytest.raises(TypeError, match=r"dataset\.lock \(lock\) cannot be pickled"),
    ):
        next(iter(loader))


def test_a_loader_that_is_collected_leaves_no_actor(ray_here: Any) -> None:
    loader = ShardedDataLoader(Rows(400), 8, pool=RayPool(2, num_cpus=0))
    next(iter(loader))
    assert actors()
    del loader
    gc.collect()
    assert until(lambda: not actors())


DRIVER = """
import signal, sys
import ray
ray.init(address=sys.argv[1], logging_level="ERROR")
from sharded_loader import RayPool, ShardedDataLoader
loader = ShardedDataLoader(range(10**6), 4, pool=RayPool(2, num_cpus=0))
batches = iter(loader)
next(batches)
print("reads", flush=True)
signal.pause()
"""


def test_a_driver_that_is_killed_leaves_no_actor(ray_here: Any) -> None:
    address = ray_here.get_runtime_context().gcs_address
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, address], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    assert driver.stdout.readline().strip() == "reads"
    assert actors()
    driver.kill()
    driver.wait()
    driver.stdout.close()
    assert until(lambda: not actors())


def test_inside_a_placement_group_that_captures_actors_are_placed(ray_here: Any) -> None:
    @ray_here.remote(num_cpus=1)
    def train() -> int:
        with ShardedDataLoader(range(40), 4, pool=RayPool(2, num_cpus=0)) as loader:
            return sum(int(batch.sum()) for batch in loader)

    group = ray_here.util.placement_group([{"CPU": 1}])
    strategy = ray_here.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_capture_child_tasks=True
    )
    assert ray_here.get(train.options(scheduling_strategy=strategy).remote(), timeout=300) == sum(range(40))
    ray_here.util.remove_placement_group(group)


SHUT_DOWN = """
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
from sharded_loader import RayPool, ShardedDataLoader
with ShardedDataLoader(range(10**6), 4, pool=RayPool(1, num_cpus=0)) as loader:
    for number, _ in enumerate(loader):
        if number == 0:
            ray.shutdown()
"""


def test_a_ray_that_is_shut_down_in_mid_epoch_is_an_error_and_no_hang() -> None:
    done = subprocess.run([sys.executable, "-c", SHUT_DOWN], capture_output=True, text=True, timeout=300)
    assert "RuntimeError: Ray was shut down" in done.stderr


# -- inside Ray Train each worker reads its own part with actors of its own, and a run continues with other workers ----


LENGTH, BATCH = 600, 10


def loop(config: dict[str, Any]) -> None:
    """Read some batches, and write down which samples they had and where the loader was."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    loader = ShardedDataLoader(
        range(LENGTH), BATCH, shuffle=True, seed=5, num_replicas="auto", pool=RayPool(1, num_cpus=0.5)
    )
    with loader:
        if config["state"]:
            loader.load_state_dict(config["state"])
        seen: list[list[int]] = []
        for batch in loader:
            seen.append(batch.tolist())
            if len(seen) == config["batches"]:
                break
        told = {"seen": seen, "state": loader.state_dict()}
    Path(config["folder"], f"{config['name']}-{rank}.json").write_text(json.dumps(told))
    ray.train.report({})


def trained(folder: Path, name: str, workers: int, batches: int, state: Any = None) -> list[dict[str, Any]]:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    config = {"folder": str(folder), "name": name, "batches": batches, "state": state}
    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5})
    storage = RunConfig(name=name, storage_path=str(folder / "results"))
    TorchTrainer(loop, train_loop_config=config, scaling_config=scaling, run_config=storage).fit()
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(workers)]


def dealt(told: list[dict[str, Any]]) -> list[int]:
    """The samples of all ranks in the global order: rank r has every workers-th sample."""
    ranks = [[index for batch in one["seen"] for index in batch] for one in told]
    return [index for row in zip(*ranks, strict=True) for index in row]


@pytest.mark.filterwarnings("default")  # Ray warns of itself
def test_two_trainers_save_and_three_continue(ray_here: Any, tmp_path: Path) -> None:
    with ShardedDataLoader(range(LENGTH), BATCH, shuffle=True, seed=5) as loader:
        everything = [index for batch in loader for index in batch.tolist()]
    two = trained(tmp_path, "two", 2, batches=9)
    assert dealt(two) == everything[: 2 * 9 * BATCH]
    assert two[0]["state"] == two[1]["state"]
    three = trained(tmp_path, "three", 3, batches=-1, state=two[0]["state"])
    assert dealt(three) == everything[2 * 9 * BATCH :]
