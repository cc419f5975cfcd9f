"""States that each version of the library has saved, and the batches that must come after them.

    python -m tests.kept_states     adds the states of this version to tests/golden/states.json; older ones stay

A *kind* is a loader of `KINDS`. Its state is taken after two batches, and goes through JSON. The file has for each
version, and each kind whose states or batches are not those of the version before: the state, and the batches after it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, RandomSampler

import sharded_loader as sl
from sharded_loader.torch import DataLoader

FILE = Path(__file__).parent / "golden" / "states.json"
Loader = sl.ShardedDataLoader[Any] | DataLoader[Any]
LENGTHS = [5, 1, 8, 3, 2, 7, 4, 6, 9, 2, 5, 3]


def numbers(part: int, parts: int) -> Iterator[int]:
    return iter(range(part, 24, parts))


def grown() -> Loader:
    loader = sl.ShardedDataLoader(range(12), 3, shuffle=True, seed=3)
    loader.grow(range(20))
    return loader


def weighted() -> Loader:
    sampler = sl.WeightedRandomSampler([1.0] * 12, 12, seed=3)
    sampler.update([1, 2], [0.0, 5.0])
    return sl.ShardedDataLoader(range(12), 3, sampler=sampler, seed=3)


def batched(batch_sampler: Any) -> Loader:
    return sl.ShardedDataLoader(LENGTHS, batch_sampler=batch_sampler, batchify_fn=plain, seed=3)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16))


KINDS: dict[str, Callable[[], Loader]] = {
    "samples": lambda: sl.ShardedDataLoader(range(20), 4, shuffle=True, seed=3),
    "ranks": lambda: sl.ShardedDataLoader(range(20), 2, shuffle=True, seed=3, num_replicas=2, rank=1),
    "steps_per_epoch": lambda: sl.ShardedDataLoader(range(10), 3, shuffle=True, seed=3, steps_per_epoch=4),
    "rollover": lambda: sl.ShardedDataLoader(range(11), 3, last_batch="rollover", seed=3),
    "skip": lambda: sl.ShardedDataLoader(range(20), 4, shuffle=True, seed=3, skip=[(3, 3)]),
    "leases": lambda: sl.ShardedDataLoader(range(20), 4, shuffle=True, seed=3),
    "keep": lambda: sl.ShardedDataLoader(range(24), 3, keep=lambda number: number % 3 > 0, streams=1, seed=3),
    "grow": grown,
    "weights": weighted,
    "buckets": lambda: batched(sl.FixedBucketSampler(LENGTHS, 2, num_buckets=2, shuffle=True)),
    "budget": lambda: batched(sl.BoundedBudgetSampler(LENGTHS, 10, shuffle=True)),
    "packs": lambda: batched(sl.PackSampler(LENGTHS, 10)),
    "mixture": lambda: sl.ShardedDataLoader(
        sl.interleave([range(10), range(100, 130)], weights=[1, 2], shuffle=True, seed=3), 3, seed=3
    ),
    "torch's sampler": lambda: sl.ShardedDataLoader(
        range(12), 3, sampler=RandomSampler(range(12), generator=torch.Generator().manual_seed(3)), seed=3
    ),
    "streams": lambda: sl.ShardedDataLoader(numbers, 3, streams=2, seed=3),
    "shuffle buffer": lambda: sl.ShardedDataLoader(sl.ShuffleBuffer(numbers, 6, seed=3), 3, streams=2, seed=3),
    "mixture of streams": lambda: sl.ShardedDataLoader(sl.interleave([numbers, numbers], seed=3), 3, streams=1, seed=3),
    "packed stream": lambda: sl.ShardedDataLoader(
        sl.PackStream([[n] * n for n in LENGTHS], 10, rows=2, seed=3), 2, batchify_fn=plain, seed=3
    ),
    "drop-in, in order": lambda: DataLoader(range(12), 3),
    "drop-in, shuffled": lambda: DataLoader(range(12), 3, shuffle=True, seed=3),
    "drop-in, streams": lambda: DataLoader(Numbers(), 3, seed=3),
    "drop-in, ranks": lambda: DataLoader(range(20), 2, shuffle=True, seed=3, num_replicas=2, rank=1),
}


def plain(value: Any) -> Any:
    """The value as JSON has it."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [*map(plain, value)]
    return value.tolist() if hasattr(value, "tolist") else value


def batches_of(kind: str, loader: Any) -> Iterator[Any]:
    """The batches of a loader as JSON has them. Of leases, the first stays open."""
    if kind != "leases":
        yield from map(plain, loader)
        return
    first = None
    while lease := loader.lease():
        first = first or lease
        if lease is not first:
            lease.done()
        yield plain(lease.batch)


def state_of(kind: str) -> dict[str, Any]:
    """The state after two batches, and the batches after it."""
    torch.manual_seed(3)  # from which the drop-in draws
    loader = KINDS[kind]()
    batches = batches_of(kind, loader)
    next(batches), next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    other = KINDS[kind]()
    other.load_state_dict(state)
    return {"state": state, "then": [*batches_of(kind, other)]}


def main() -> None:
    versions = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    kept = {kind: one for states in versions.values() for kind, one in states.items()}
    new = {kind: one for kind in KINDS if (one := state_of(kind)) != kept.get(kind)}
    versions.setdefault(sl.__version__, {}).update(new)
    text = ",\n".join(
        f'"{version}": {{\n'
        + ",\n".join(f"{json.dumps(kind)}: {json.dumps(one)}" for kind, one in states.items())
        + "\n}"
        for version, states in versions.items()
    )
    FILE.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
