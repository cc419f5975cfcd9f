"""``loader.fingerprint``: the same on every rank and in every pool; states have it, and other data are rejected."""

from __future__ import annotations

import json
import random
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
    RandomSampler,
    ShardedDataLoader,
    SimpleDataset,
    interleave,
    sample_rng,
)
from sharded_loader.instruments.check import Fingerprint, first_difference, other_facts, read_fingerprint
from sharded_loader.sampling.order import step_checksum
from tests.loader.test_look_up import LENGTH, ORDERS, Counting, loader_of


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
def test_where_epochs_go_on_the_steps_are_those_that_the_ranks_read(
    given: Any, length: int, size: int, ranks: int
) -> None:
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
    alone = loader_of(order, num_replicas=1, rank=0)
    assert len(alone.fingerprint(1).steps) == 8 * epoch_length(alone, 1)
    loaders = [loader_of(order, num_replicas=3, rank=rank) for rank in range(3)]
    one, *others = [loader.fingerprint(1) for loader in loaders]
    assert [str(other) for other in others] == [str(one)] * 2
    assert len(one.steps) == 8 * epoch_length(loaders[0], 1)


def epoch_length(loader: ShardedDataLoader[Any], epoch: int) -> int:
    loader.set_epoch(epoch)
    return len(loader)


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


@pytest.mark.parametrize("change", ["seed", "batch", "data", "order", "one step"])
def test_another_run_has_another_fingerprint(change: str) -> None:
    def of(other: bool) -> str:
        data = SimpleDataset(np.arange(40) + (other and change == "data"))
        size, seed = 8 if other and change == "batch" else 4, 2 if other and change == "seed" else 1
        shuffle = not (other and change == "order")
        skip = [(2, 2)] if other and change == "one step" else None
        return str(ShardedDataLoader(data, size, shuffle=shuffle, seed=seed, skip=skip).fingerprint(0))

    assert of(False) == of(False) != of(True)


def test_a_sample_that_is_another_one_each_time_does_not_count() -> None:
    assert ShardedDataLoader(Hidden(counts=True), 4, seed=1).fingerprint(0).state.get("digests") is None


def test_what_cannot_be_told_is_an_error() -> None:
    with pytest.raises(TypeError, match="is iterable data.*part 0 of 1"):
        ShardedDataLoader(lambda: iter(range(9)), 2).fingerprint()
    with pytest.raises(ValueError, match="epoch 4 cannot be looked up: the sampler, a Counting"):
        ShardedDataLoader(range(LENGTH), 3, sampler=Counting(LENGTH)).fingerprint(4)
    with pytest.raises(ValueError, match="count from 0"):
        ShardedDataLoader(range(9), 2).fingerprint(-1)
    assert ShardedDataLoader([], 2).fingerprint(0).steps == ""


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


# -- states ------------------------------------------------------------------------------------------------------------


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


# -- two runs ----------------------------------------------------------------------------------------------------------


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
    one, other = (
        saved(tmp_path / f"{add}.json", ShardedDataLoader(Hidden(add), 4, seed=1).fingerprint(0).as_dict())
        for add in (0, 1)
    )
    assert first_difference(one, other) is None
    assert len(other_facts(one, other)) == 3 and "the digest of sample 0 was" in other_facts(one, other)[0]
    assert other_facts(one, one) == []


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
