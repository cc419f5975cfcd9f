"""Inside Ray Train each worker reads its own part with actors of its own, and a run continues with other workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sharded_loader import ShardedDataLoader

pytestmark = pytest.mark.ray

LENGTH, BATCH = 600, 10


def loop(config: dict[str, Any]) -> None:
    """Read some batches, and write down which samples they had and where the loader was."""
    import ray.train

    from sharded_loader import RayPool

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


def run(folder: Path, name: str, workers: int, batches: int, state: Any = None) -> list[dict[str, Any]]:
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
    two = run(tmp_path, "two", 2, batches=9)
    assert dealt(two) == everything[: 2 * 9 * BATCH]
    assert two[0]["state"] == two[1]["state"]
    three = run(tmp_path, "three", 3, batches=-1, state=two[0]["state"])
    assert dealt(three) == everything[2 * 9 * BATCH :]
