"""``loader.check``: samples that are others when they are read again are named, with the source of their randomness."""

from __future__ import annotations

import datetime
import itertools
import os
import random
import threading
import time
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, covering, make_pool

from sharded_loader import Dataset, LoaderClosedError, ShardedDataLoader, SimpleDataset, sample_rng
from sharded_loader.torch import DataLoader


class Reads(Dataset):
    """What a function gives, for each index."""

    def __init__(self, read: Any, **held: Any) -> None:
        self.read, self.held = read, held

    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return self.read(index, **self.held)


SHARED = np.random.default_rng(3)

SOURCES: dict[str, tuple[Any, str]] = {
    "random": (Reads(lambda index: random.random()), "draws from Python's random"),
    "numpy": (Reads(lambda index: np.random.rand()), "draws from NumPy's global generator"),
    "torch": (Reads(lambda index: torch.rand(2)), "draws from torch's global generator"),
    "two": (Reads(lambda index: (random.random(), torch.rand(2))), "from Python's random and torch's global generator"),
    "time": (Reads(lambda index: time.time()), "the time"),
    "time, in whole numbers": (Reads(lambda index: random.Random(time.time_ns()).random()), "the time"),
    "urandom": (Reads(lambda index: os.urandom(8)), "a new generator without a seed"),
    "new generator": (Reads(lambda index: np.random.default_rng().random()), "a new generator without a seed"),
    "uuid": (Reads(lambda index: str(uuid.uuid4())), "a new generator without a seed"),
    "own": (Reads(lambda index, rng: rng.random(), rng=np.random.default_rng(1)), "draws from dataset.held['rng']"),
    "own, old": (Reads(lambda index, rng: rng.rand(), rng=np.random.RandomState(1)), "draws from dataset.held['rng']"),
    "own, Python's": (Reads(lambda index, rng: rng.random(), rng=random.Random(1)), "draws from dataset.held['rng']"),
    "own, torch's": (Reads(lambda i, rng: torch.rand(1, generator=rng), rng=torch.Generator()), "dataset.held['rng']"),
    "of the module": (Reads(lambda index: SHARED.random()), "globals['SHARED']"),
    "counter": (Reads(lambda index, count: next(count), count=itertools.count()), "something that changes: "),
    "clock in C": (Reads(lambda index: str(datetime.datetime.now())), "the time"),
}


@pytest.mark.parametrize("source", SOURCES)
def test_the_source_of_the_randomness_is_named(source: str) -> None:
    data, named = SOURCES[source]
    before = random.getstate(), torch.get_rng_state()
    with ShardedDataLoader(data, 4, shuffle=True, seed=1) as loader:
        found = loader.check(5)
        state = loader.state_dict()
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert len(found.differing) == found.samples == 5
    assert all(named in why for _, why in found.differing), found
    assert named in str(found) and "Other values each time: " in str(found)
    assert state == loader_state(data)


def loader_state(data: Any) -> Any:
    return ShardedDataLoader(data, 4, shuffle=True, seed=1).state_dict()


@covering(pool=POOLS)
def test_samples_that_depend_on_their_index_alone_are_the_same_everywhere(pool: str) -> None:
    data = Reads(lambda index: (index, sample_rng().random()))
    seeded = SimpleDataset(list(range(30))).transform(lambda x: x + random.random(), seeded=True)
    for one in (data, seeded):
        with ShardedDataLoader(one, 4, shuffle=True, pool=make_pool(pool, 2)) as loader:
            iterator = iter(loader)
            next(iterator)
            found = loader.check()
            assert (found.samples, found.differing, found.failed) == (10, (), None)  # the last step has two
            assert isinstance(found.pickled, int) and found.pickled > 100
            assert (found.worker_bytes or 0) > 1e6 or pool == "thread"
            assert "All are the same each time." in str(found)
            assert len(list(iterator)) == 7


@covering(method=[name for name in POOLS if name not in ("inline", "thread", "ray")])
def test_what_differs_in_a_worker_alone_is_named(method: str) -> None:
    with ShardedDataLoader(Reads(lambda index: os.getpid()), 4, pool=make_pool(method, 1)) as loader:
        assert "The worker reads others." in str(loader.check(2))


def test_what_cannot_be_pickled_and_what_cannot_be_read_is_told() -> None:
    def fails(index: int) -> int:
        raise KeyError(index)

    found = ShardedDataLoader(Reads(lambda index, lock: index, lock=threading.Lock()), 4).check()
    assert "dataset.held['lock'] (lock) cannot be pickled" in str(found.pickled)
    found = ShardedDataLoader(Reads(fails), 4).check()
    assert "The worker could not read: KeyError" in str(found)


def test_a_sample_that_kills_its_worker_is_not_read_here() -> None:
    pool = make_pool("fork" if "fork" in POOLS else "spawn", 1)
    found = ShardedDataLoader(Reads(lambda index: os._exit(3)), 2, pool=pool).check()
    assert str(found.failed).startswith("WorkerDiedError: ") and found.differing == ()


class Opens(Dataset):
    """It notes in which process it was read first, as one that opens a file then."""

    opened: int | None = None

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.opened = self.opened or os.getpid()
        return int(self.opened == os.getpid())


def test_the_worker_reads_before_the_main_process_opens_anything() -> None:
    pool = make_pool("fork" if "fork" in POOLS else "spawn", 1)
    assert ShardedDataLoader(Opens(), 2, pool=pool).check().differing == ()


@pytest.mark.parametrize(("samples", "error"), [(0, ValueError), ("3", TypeError), (1.5, TypeError)])
def test_wrong_numbers_of_samples_are_rejected(samples: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="samples"):
        ShardedDataLoader(range(4), 2).check(samples)


def test_iterable_data_and_a_closed_loader_are_rejected() -> None:
    with pytest.raises(TypeError, match="is iterable data"):
        ShardedDataLoader(lambda: iter(range(4)), 2).check()
    loader = ShardedDataLoader(range(4), 2)
    loader.close()
    for call in (loader.check, loader.fingerprint):
        with pytest.raises(LoaderClosedError):
            call()


@pytest.mark.parametrize("data", [[], [1, 2]])
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_an_epoch_without_steps_has_a_check_and_a_fingerprint(kind: Any, data: list[int]) -> None:
    loader = kind(data, 4, drop_last=True)
    found = loader.check()
    assert (found.samples, found.differing, found.failed) == (0, (), None)
    assert str(found).startswith("The epoch has no samples to read.\nThe pickled dataset has")
    assert (loader.fingerprint().steps, len(str(loader.fingerprint(3)))) == ("", 16)


def test_a_rank_without_steps_has_a_fingerprint() -> None:
    loader = ShardedDataLoader(range(3), 4, last_batch="rollover", num_replicas=2, rank=0)
    assert [len(str(loader.fingerprint(epoch))) for epoch in range(4)] == [16] * 4
