"""``loader.fingerprint``, the same on every rank and in every pool, and ``loader.check``: what is other each time."""

from __future__ import annotations

import datetime
import itertools
import json
import os
import random
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, covering, make_pool
from samples import ByEpoch

from sharded_loader import (
    BatchSampler,
    Dataset,
    LoaderClosedError,
    RandomSampler,
    ShardedDataLoader,
    SimpleDataset,
    interleave,
    sample_rng,
)
from sharded_loader.instruments.check import Fingerprint, first_difference, other_facts, read_fingerprint
from sharded_loader.sampling.order import step_checksum
from sharded_loader.torch import DataLoader
from tests.loader.test_look_up import LENGTH, ORDERS, Counting, loader_of, plain


class Hidden(Dataset):
    """Nothing is known of it without a read. Each sample draws random numbers of all kinds."""

    def __init__(self, add: int = 0, epoch: int = 0, counts: bool = False) -> None:
        self.add, self.epoch, self.counts, self.reads = add, epoch, counts, 0

    def __len__(self) -> int:
        return 40

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        drawn = sample_rng().random(), random.random(), np.random.rand(), torch.rand(()).item()
        return {"x": index + self.add, "epoch": self.epoch, "drawn": drawn, "reads": self.reads * self.counts}


def through_json(loader: ShardedDataLoader[Any]) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@covering(pool=POOLS)
def test_it_is_the_same_in_every_pool_and_whatever_was_drawn_before(pool: str) -> None:
    random.seed(pool)
    before = random.getstate()
    with ShardedDataLoader(Hidden(), 4, shuffle=True, seed=3, pool=make_pool(pool, 2)) as loader:
        found = loader.fingerprint(2)
        assert random.getstate() == before
        assert str(found) == "b55afd6855633aae"
        assert len(found.steps) == 8 * len(loader)
        assert [index for _, index, _ in found.state["digests"]] == [loader.indices(2, step)[0] for step in (0, 5, 9)]
        assert len([*loader]) == 10  # to the end: threads that read on would draw from the same generators
        assert str(loader.fingerprint(2)) == str(found)


@pytest.mark.parametrize("given", [{"last_batch": "rollover"}, {"steps_per_epoch": 3}, "batches"], ids=str)
@pytest.mark.parametrize(("length", "size", "ranks"), [(7, 2, 2), (8, 3, 3), (13, 1, 2), (5, 3, 2), (12, 2, 3)])
def test_where_epochs_go_on_the_steps_are_those_of_the_ranks(given: Any, length: int, size: int, ranks: int) -> None:
    more: dict[str, Any] = given if given != "batches" else {"steps_per_epoch": 3}
    kind = {"batch_size": size, "shuffle": True}
    if given == "batches":
        kind = {"batch_sampler": BatchSampler(RandomSampler(length, seed=1), size)}
    ways = [
        ShardedDataLoader(range(length), seed=1, num_replicas=ranks, rank=rank, **kind, **more) for rank in range(ranks)
    ]
    for epoch in range(4):
        steps = zip(*([batch.tolist() for batch in loader] for loader in ways), strict=True)
        if given != "batches":  # samples are dealt in turns
            steps = ([[index for row in zip(*step, strict=True) for index in row]] for step in steps)
        read = "".join(map(step_checksum, steps))
        assert {loader.fingerprint(epoch).steps for loader in ways} == {read}


@pytest.mark.parametrize("order", ORDERS)
def test_all_ranks_have_one_fingerprint_and_each_step_counts(order: str) -> None:
    for ranks in (1, 3):
        loaders = [loader_of(order, num_replicas=ranks, rank=rank) for rank in range(ranks)]
        one, *others = [loader.fingerprint(1) for loader in loaders]
        assert [str(other) for other in others] == [str(one)] * (ranks - 1)
        loaders[0].set_epoch(1)
        assert len(one.steps) == 8 * len(loaders[0])
        if "batch_sampler" in ORDERS[order]():  # whose last batches may be a part of a step
            for loader in loaders[1:]:
                loader.set_epoch(1)
            steps = list(zip(*([plain(batch) for batch in loader] for loader in loaders), strict=True))
            assert one.steps.startswith("".join(map(step_checksum, steps[:-1])))


@pytest.mark.parametrize("given", [{}, {"shuffle": True}, {"last_batch": "discard"}, {"steps_per_epoch": 5}], ids=str)
def test_it_is_the_same_on_another_number_of_ranks_with_the_same_step(given: Any) -> None:
    found = [
        str(ShardedDataLoader(Hidden(), 8 // ranks, seed=1, num_replicas=ranks, rank=ranks - 1, **given).fingerprint(1))
        for ranks in (1, 2, 4)
    ]
    assert len(set(found)) == 1
    assert str(ShardedDataLoader(Hidden(), 4, seed=1, **given).fingerprint(1)) not in found


def test_after_a_rescale_and_a_resume_it_is_that_of_the_whole_job() -> None:
    loader = ShardedDataLoader(Hidden(), 4, shuffle=True, seed=1, num_replicas=2, rank=0)
    wanted = str(loader.fingerprint(1))
    next(iter(loader))
    state = through_json(loader)
    loader.rescale(4, 1, batch_size=2)
    assert str(loader.fingerprint(1)) == wanted
    resumed = ShardedDataLoader(Hidden(), 8, shuffle=True)
    resumed.load_state_dict(state)
    assert str(resumed.fingerprint(1)) == wanted


@pytest.mark.parametrize(
    "change",
    [{"seed": 2}, {"batch_size": 8}, {"dataset": range(1, 41)}, {"shuffle": False}, {"skip": [(2, 2)]}],
    ids=str,
)
def test_another_run_has_another_fingerprint(change: dict[str, Any]) -> None:
    first: dict[str, Any] = {"dataset": range(40), "batch_size": 4, "shuffle": True, "seed": 1}
    one, same, other = (str(ShardedDataLoader(**(first | more)).fingerprint(0)) for more in ({}, {}, change))
    assert one == same != other


def test_what_cannot_be_told_is_an_error_or_left_out() -> None:
    with pytest.raises(TypeError, match="is iterable data: which samples"):
        ShardedDataLoader(lambda: iter(range(9)), 2).fingerprint()
    with pytest.raises(ValueError, match="epoch 4 cannot be looked up: the sampler, a Counting"):
        ShardedDataLoader(range(LENGTH), 3, sampler=Counting(LENGTH)).fingerprint(4)
    with pytest.raises(ValueError, match="count from 0"):
        ShardedDataLoader(range(9), 2).fingerprint(-1)
    assert ShardedDataLoader(Hidden(counts=True), 4, seed=1).fingerprint(0).state.get("digests") is None
    loader = ShardedDataLoader(range(3), 4, last_batch="rollover", num_replicas=2, rank=0)  # this rank has no steps
    assert [len(str(loader.fingerprint(epoch))) for epoch in range(4)] == [16] * 4


def test_other_samplers_and_datasets_have_one_too() -> None:
    sampler = torch_data.DistributedSampler(range(LENGTH), 2, 1)  # type: ignore[arg-type]
    mixed = interleave([["a"] * 9, ["b"] * 9], shuffle=True, stop=12)
    for make in (
        lambda: ShardedDataLoader(range(LENGTH), 3, sampler=sampler),
        lambda: ShardedDataLoader(mixed, 4),
        lambda: ShardedDataLoader({"x": 1, "y": 2}, 1, sampler=["y", "x"]),
        lambda: ShardedDataLoader(torch_data.Subset(range(LENGTH), [5, 3]), 1),  # type: ignore[arg-type]
    ):
        assert str(make().fingerprint(1)) == str(make().fingerprint(1))


def test_a_state_reads_no_sample_and_has_digests_once_they_were_asked_for() -> None:
    data = Hidden()
    loader = ShardedDataLoader(data, 4, shuffle=True, seed=1)
    assert not {"data", "digests"} & loader.state_dict().keys()
    assert data.reads == 0
    loader.fingerprint(0)
    reads = data.reads
    assert [index for _, index, _ in loader.state_dict()["digests"]] == [loader.indices(0, n)[0] for n in (0, 5, 9)]
    assert data.reads == reads <= 6
    loader.refresh()
    assert "digests" not in loader.state_dict()


@pytest.mark.parametrize("seed", [1, 2])
def test_a_state_over_other_hidden_data_is_rejected_and_names_the_sample(seed: int) -> None:
    first = ShardedDataLoader(Hidden(), 4, shuffle=True, seed=1)
    first.fingerprint(3)
    next(iter(first))
    state = through_json(first)
    for same in (Hidden(), Hidden(epoch=9), Hidden(counts=True)):  # the last is another one each time: nobody knows
        loader = ShardedDataLoader(same, 4, shuffle=True, seed=seed)
        loader.load_state_dict(state)
        assert loader.position == 1
    other = ShardedDataLoader(Hidden(add=1), 4, shuffle=True, seed=seed)
    with pytest.raises(ValueError, match=r"other data: the digest of sample \d+ was \w+, and is \w+.*strict=False"):
        other.load_state_dict(state)
    assert (other.position, other.seed) == (0, seed)
    other.load_state_dict(state, strict=False)
    assert other.position == 1
    del state["digests"]
    ShardedDataLoader(Hidden(add=1), 4, shuffle=True).load_state_dict(state)


@pytest.mark.parametrize("digests", [3, [3], [[0, 1]], [[0, [1], "a"]], [["0", 1, "a"]]], ids=str)
def test_damaged_digests_are_an_error(digests: Any) -> None:
    loader = ShardedDataLoader(Hidden(), 4)
    with pytest.raises(ValueError, match="'digests'.*give what state_dict"):
        loader.load_state_dict({**loader.state_dict(), "digests": digests})


def test_a_sample_that_cannot_be_read_any_more_is_other_data() -> None:
    def gone(index: int) -> Any:
        raise OSError("no such file")

    loader = ShardedDataLoader(Hidden(), 4, seed=1)
    loader.fingerprint(0)
    with pytest.raises(ValueError, match="and is OSError: no such file"):
        ShardedDataLoader(SimpleDataset(range(40)).transform(gone), 4).load_state_dict(loader.state_dict())


def saved(path: Path, content: Any) -> Fingerprint:
    path.write_text(json.dumps(content))
    return read_fingerprint(path)


def make(**given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(range(40), **{"batch_size": 4, "shuffle": True, "seed": 1, **given})


RUNS: dict[str, tuple[dict[str, Any], int | None, str]] = {
    "same": ({}, None, ""),
    "ranks": ({"batch_size": 2, "num_replicas": 2, "rank": 1}, None, ""),
    "seed": ({"seed": 2}, 0, "the seed was 1, and is 2"),
    "order": ({"shuffle": False}, 0, "the sampler was RandomSampler, and is SequentialSampler"),
    "batch": ({"batch_size": 8}, 0, "batch_size was 4, and is 8"),
    "skip": ({"skip": [(13, 14)]}, 3, "the skip was (), and is ((13, 14),)"),
    "end": ({"last_batch": "discard", "batch_size": 3}, 0, "last_batch was 'keep', and is 'discard'"),
}


@pytest.mark.parametrize("row", RUNS)
def test_the_first_step_that_differs_is_named(row: str, tmp_path: Path) -> None:
    given, step, fact = RUNS[row]
    loaders = make(), make(**given)
    one, other = (saved(tmp_path / f"{n}", one.fingerprint(1).as_dict()) for n, one in enumerate(loaders))
    assert first_difference(one, other) == step
    assert not fact or fact in other_facts(one, other)


def test_other_data_and_other_samples_are_named(tmp_path: Path) -> None:
    found = [ShardedDataLoader(Hidden(add), 4, seed=1).fingerprint(0).as_dict() for add in (0, 1)]
    one, other = (saved(tmp_path / "a", content) for content in found)
    assert first_difference(one, other) is None and other_facts(one, one) == []
    assert len(other_facts(one, other)) == 3 and "the digest of sample 0 was" in other_facts(one, other)[0]


def test_files_that_do_not_tell_are_errors(tmp_path: Path) -> None:
    foreign = ShardedDataLoader(range(LENGTH), 3, sampler=ByEpoch(LENGTH))
    found = saved(tmp_path / "a", foreign.fingerprint(0).as_dict())
    with pytest.raises(ValueError, match="a has no fingerprint .*'steps'"):
        saved(tmp_path / "a", foreign.state_dict())
    assert first_difference(found, found) is None
    with pytest.raises(ValueError, match="epoch 0, and .* of epoch 2"):
        first_difference(found, saved(tmp_path / "b", foreign.fingerprint(2).as_dict()))
    with pytest.raises(OSError):
        read_fingerprint(tmp_path / "absent")
    for content in ("", "[1]", "{}", '{"fingerprint": 1}', '{"fingerprint": 1, "state": 3}', "\x00"):
        (tmp_path / "c").write_text(content)
        with pytest.raises(ValueError, match="has no fingerprint"):
            read_fingerprint(tmp_path / "c")
    damaged = {**foreign.fingerprint(0).as_dict(), "steps": "abc"}
    with pytest.raises(ValueError, match="'steps'"):
        saved(tmp_path / "d", damaged)


class Reads(SimpleDataset):
    """What a function gives, for each index."""

    def __init__(self, read: Any, **held: Any) -> None:
        super().__init__(range(30))
        self.read, self.held = read, held

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
    assert state == ShardedDataLoader(data, 4, shuffle=True, seed=1).state_dict()


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


def test_the_worker_reads_before_the_main_process_opens_anything_and_dies_in_its_place() -> None:
    pool = make_pool("fork" if "fork" in POOLS else "spawn", 1)
    assert ShardedDataLoader(Opens(range(4)), 2, pool=pool).check().differing == ()
    found = ShardedDataLoader(Reads(lambda index: os._exit(3)), 2, pool=pool).check()
    assert str(found.failed).startswith("WorkerDiedError: ") and found.differing == ()


class Opens(SimpleDataset):
    """It notes in which process it was read first, as one that opens a file then."""

    opened: int | None = None

    def __getitem__(self, index: int) -> int:
        self.opened = self.opened or os.getpid()
        return int(self.opened == os.getpid())


def test_wrong_numbers_of_samples_iterable_data_and_a_closed_loader_are_rejected() -> None:
    loader = ShardedDataLoader(range(4), 2)
    wrong: list[tuple[Any, type[Exception]]] = [(0, ValueError), ("3", TypeError), (1.5, TypeError)]
    for samples, error in wrong:
        with pytest.raises(error, match="samples"):
            loader.check(samples)
    with pytest.raises(TypeError, match="is iterable data"):
        ShardedDataLoader(lambda: iter(range(4)), 2).check()
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
