"""``loader.rescale``: ranks leave and join between two steps, and each sample of the epoch still comes once."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.utils.data as torch_data
from conftest import POOLS, make_pool
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import FixedBucketSampler, LoaderClosedError, PackSampler, RandomSampler, ShardedDataLoader


def through_json(state: Any) -> Any:
    return json.loads(json.dumps(state))


Rank = tuple[ShardedDataLoader[Any], Iterator[Any]]


def joined(replicas: int, rank: int, state: Any = None, **given: Any) -> Rank:
    given = {"dataset": range(48), "batch_size": 2, "shuffle": True, "seed": 5, **given}
    loader: ShardedDataLoader[Any] = ShardedDataLoader(num_replicas=replicas, rank=rank, **given)
    if state is not None:
        loader.load_state_dict(state, strict=False)  # the batches of all ranks may be larger now
    return loader, iter(loader)


def rescaled(ranks: list[Rank], replicas: int, batch_size: int | None = None, **given: Any) -> list[Rank]:
    """The ranks that stay, with others that join."""
    state = ranks[-1][0].state_dict()
    for rank, (loader, _) in enumerate(ranks[:replicas]):
        loader.rescale(replicas, rank, batch_size)
    for loader, _ in ranks[replicas:]:
        loader.close()
    if batch_size is not None:
        given["batch_size"] = batch_size
    return ranks[:replicas] + [joined(replicas, rank, state, **given) for rank in range(len(ranks), replicas)]


def step(ranks: list[Rank]) -> list[list[int]]:
    found = [next(iterator, None) for _, iterator in ranks]
    assert (None in found) is (set(map(type, found)) == {type(None)})
    return [] if found[0] is None else [batch.tolist() for batch in found]


@pytest.mark.parametrize("pool", POOLS)
def test_ranks_leave_and_join_in_the_middle_of_a_loop(pool: str) -> None:
    workers = [make_pool(pool, 1) for _ in range(2)]
    ranks = [
        (loader, iter(loader))
        for rank in range(2)
        for loader in [
            ShardedDataLoader(range(48), 2, shuffle=True, seed=5, num_replicas=2, rank=rank, pool=workers[rank])
        ]
    ]
    try:
        found: Counter[int] = Counter()
        for replicas in (2, 3, 3, 1, 1, 4):
            ranks = rescaled(ranks, replicas)
            found.update(itertools.chain(*step(ranks)))
        while batches := step(ranks):
            found.update(itertools.chain(*batches))
        # 48 samples in steps of 4, 6, 6, 2, 2, and of 8; the last step begins again to fill its batches.
        assert set(found) == set(range(48))
        assert sum(found.values()) - 48 < 8
        assert {loader.epoch for loader, _ in ranks} == {1}
        ranks = [(loader, iter(loader)) for loader, _ in ranks]
        second = [step(ranks) for _ in range(6)]
        assert sorted(itertools.chain(*itertools.chain(*second))) == list(range(48))
        assert step(ranks) == []
    finally:
        for loader, _ in ranks:
            loader.close()
        for worker in workers:
            worker.close()


@given(
    changes=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5), st.integers(1, 4)), max_size=4),
    torchs=st.booleans(),
)
def test_any_changes_leave_each_sample_once(changes: list[tuple[int, int, int]], torchs: bool) -> None:
    def arguments() -> dict[str, Any]:
        return {"shuffle": False, "sampler": torch_data.RandomSampler(range(60))} if torchs else {}

    given = {"dataset": range(60), "evaluate": True}
    ranks, found = [joined(1, 0, **given, **arguments())], Counter[int]()

    def count(batches: list[Any]) -> None:
        for batch, real in batches:
            found.update(batch[:real].tolist())

    for steps, replicas, size in changes:
        for _ in range(steps):
            count([batch for _, iterator in ranks if (batch := next(iterator, None)) is not None])
        if sum(found.values()) == 60:
            break
        ranks = rescaled(ranks, replicas, size, **given, **arguments())
    for batches in zip(*(iterator for _, iterator in ranks), strict=True):
        count(list(batches))
    assert found == Counter(range(60))


def test_the_end_of_an_epoch_is_its_end_for_those_that_stay_and_for_those_that_join() -> None:
    ranks = [joined(2, rank) for rank in range(2)]
    for _ in range(12):
        assert step(ranks)
    ranks = rescaled(ranks, 3)
    assert [next(iterator, None) for _, iterator in ranks[:2]] == [None, None]
    ranks = [(loader, iter(loader)) for loader, _ in ranks]
    assert {loader.epoch for loader, _ in ranks} == {1}
    second = [step(ranks) for _ in range(8)]
    assert sorted(itertools.chain(*itertools.chain(*second))) == list(range(48))


def test_before_the_first_batch_and_between_epochs() -> None:
    loader, _ = joined(2, 1)
    loader.rescale(1, 0, batch_size=8)
    assert (len(loader), loader.batch_size, loader.arguments["num_replicas"]) == (6, 8, 1)
    assert sorted(index for batch in loader for index in batch.tolist()) == list(range(48))
    loader.rescale(4, 3, batch_size=4)
    assert [batch.tolist() for batch in loader] == [
        batch.tolist() for batch in _at_epoch(joined(4, 3, batch_size=4)[0], 1)
    ]
    assert loader.state_dict() == _after(joined(4, 3, batch_size=4)[0], 2)


def test_after_a_loop_that_was_left_the_position_counts_the_steps_of_the_new_ranks() -> None:
    loader = ShardedDataLoader(range(40), 2, num_replicas=2, rank=0)
    for batch in loader:
        if batch[0] == 8:
            break
    assert loader.position == 3
    loader.rescale(1, 0)
    assert (loader.epoch, loader.position, loader.state_dict()["samples"]) == (0, 6, 12)


def _at_epoch(loader: ShardedDataLoader[Any], epoch: int) -> ShardedDataLoader[Any]:
    loader.set_epoch(epoch)
    return loader


def _after(loader: ShardedDataLoader[Any], epochs: int) -> dict[str, Any]:
    for _ in range(epochs):
        for _ in loader:
            pass
    return loader.state_dict()


def test_with_costs_the_step_of_all_ranks_stays() -> None:
    arguments: dict[str, Any] = {"costs": range(1, 49), "shuffle": False}
    ranks = [joined(4, rank, **arguments) for rank in range(4)]
    found = [sum(step(ranks), []) for _ in range(3)]
    before = ranks[0][0].state_dict()
    with pytest.raises(ValueError, match="belongs to the ranks before: .* Give other ranks, or a batch_size="):
        ranks[0][0].rescale(2, 0)
    assert ranks[0][0].state_dict() == before
    ranks = rescaled(ranks, 2, batch_size=4, **arguments)
    found += [sum(step(ranks), []) for _ in range(3)]
    assert sorted(sum(found, [])) == list(range(48))


class Steps:
    """Ranks with ``steps_per_epoch``, beside the endless order that they share."""

    def __init__(self, order: list[Any], **arguments: Any) -> None:
        self.order, self.arguments, self.place = order, arguments, 0
        self.ranks: list[Rank] = []

    def join(self, replicas: int, state: Any = None, **more: Any) -> None:
        arguments = {**self.arguments, **more}
        loaders = [ShardedDataLoader(num_replicas=replicas, rank=rank, **arguments) for rank in range(replicas)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state, strict=False)
        self.ranks = [(loader, iter(loader)) for loader in loaders]

    def read(self, steps: int) -> None:
        """So many steps; each rank has exactly its part of the order."""
        for _ in range(steps):
            found = [next(iterator) for _, iterator in self.ranks]
            size = 1 if "batch_sampler" in self.arguments else len(found[0])
            for rank, batch in enumerate(found):
                wanted = [self.order[self.place + number * len(self.ranks) + rank] for number in range(size)]
                assert list(batch if size > 1 or not isinstance(wanted[0], list) else [batch]) == wanted
            self.place += size * len(self.ranks)

    def end(self) -> None:
        """The epoch ends here, and the next one begins."""
        assert [next(iterator, None) for _, iterator in self.ranks] == [None] * len(self.ranks)
        self.ranks = [(loader, iter(loader)) for loader, _ in self.ranks]


def read_by_changing_ranks(steps: Steps, **more: Any) -> None:
    """Epochs of 5 steps: by 4 ranks, from a state by 2, after `rescale` by 1, from a state by 3."""
    steps.join(4)
    steps.read(5)
    steps.end()
    steps.read(3)
    state = through_json(steps.ranks[2][0].state_dict())
    steps.join(2, state)
    assert (steps.ranks[0][0].position, len(steps.ranks[0][0])) == (3, 5)
    steps.read(2)
    steps.end()
    steps.read(1)
    steps.ranks[0][0].rescale(1, 0)
    steps.ranks = steps.ranks[:1]
    steps.read(4)
    steps.end()
    for _ in range(3):
        steps.read(5)
        steps.end()
    steps.read(5)
    steps.ranks[0][0].rescale(2, 0)  # between two epochs
    state = through_json(steps.ranks[0][0].state_dict())
    steps.join(2, state, **more)
    for _ in range(3):
        steps.read(5)
        steps.end()


def test_with_steps_per_epoch_each_epoch_has_its_steps_and_goes_on_where_the_last_one_ended() -> None:
    sampler = RandomSampler(24, seed=1)
    order = [index for epoch in range(30) for index in sampler.iter_epoch(epoch)]
    arguments = {"dataset": range(24), "batch_size": 1, "sampler": sampler, "steps_per_epoch": 5, "collate_fn": list}
    read_by_changing_ranks(Steps(order, **arguments), batch_size=3)


def test_another_batch_size_reads_no_sample_twice_with_steps_per_epoch_or_is_refused() -> None:
    def made(size: int) -> list[ShardedDataLoader[Any]]:
        given = {"shuffle": True, "seed": 1, "steps_per_epoch": 5, "num_replicas": 2}
        return [ShardedDataLoader(range(11), size, rank=rank, **given) for rank in range(2)]  # 2 does not divide 11

    for epochs in (0, 1):
        before, after = made(3), made(2)
        for loader in before:
            for _ in range(epochs):
                list(loader)
        iterators = list(map(iter, before))
        for _ in range(2):
            for iterator in iterators:
                next(iterator)
        state = before[0].state_dict()
        if epochs:  # epochs of other batches would begin elsewhere
            with pytest.raises(ValueError, match="batch_size was 3, and is 2"):
                after[0].load_state_dict(state, strict=False)
            continue
        for loader, iterator in zip(after, iterators, strict=True):
            loader.load_state_dict(state, strict=False)
            assert next(iter(loader)).tolist() == next(iterator).tolist()[:2]


def test_packed_rows_go_on_by_other_ranks_with_steps_per_epoch() -> None:
    lengths = [1 + index * 7 % 50 for index in range(300)]

    def packed() -> PackSampler:
        return PackSampler(lengths, tokens=128, rows=2, seed=0)

    order = [list(batch) for epoch in range(4) for batch in packed().iter_epoch(epoch)]
    arguments = {"dataset": range(300), "batch_sampler": packed(), "steps_per_epoch": 5, "collate_fn": list}
    read_by_changing_ranks(Steps(order, **arguments))


def test_ranks_that_do_not_divide_what_is_done_are_refused_with_steps_per_epoch() -> None:
    loader, iterator = joined(4, 0, steps_per_epoch=10, batch_size=1)
    next(iterator)
    with pytest.raises(ValueError, match="there were 4 ranks, and are 3"):
        loader.rescale(3, 0)  # 3 divides 48, but not the 4 samples that are done
    assert next(iterator) is not None


def test_buckets_are_made_for_the_new_ranks_from_the_next_epoch_on() -> None:
    lengths = range(1, 49)

    def bucketed() -> dict[str, Any]:
        sampler = FixedBucketSampler(lengths, 2, num_buckets=3, shuffle=True, seed=2)
        return {"batch_sampler": sampler, "batch_size": None, "shuffle": False}

    ranks = [joined(4, rank, **bucketed()) for rank in range(4)]
    found = sum(step(ranks), [])
    ranks = rescaled(ranks, 2, **bucketed())
    while batches := step(ranks):
        found += sum(batches, [])
    assert sorted(found) == list(range(48))
    ranks = [(loader, iter(loader)) for loader, _ in ranks]
    keys = [16, 32, 48]
    for _ in range(12):
        assert len({sum(index >= key for key in keys) for batch in step(ranks) for index in batch}) == 1


def test_wrong_calls_change_nothing() -> None:
    loader, iterator = joined(2, 0)
    next(iterator)
    state = loader.state_dict()
    for wrong in [(0, 0), (2, 2), (2, -1), ("a", 0), (2, None), (2, 0, 0), (2, 0, "x")]:
        with pytest.raises((ValueError, TypeError)):
            loader.rescale(*wrong)  # type: ignore[arg-type]
        assert loader.state_dict() == state
    stream: ShardedDataLoader[Any] = ShardedDataLoader(lambda: iter(range(4)), 2)
    with pytest.raises(TypeError, match="the parts of iterable data belong to ranks"):
        stream.rescale(2, 0)
    given = ShardedDataLoader(range(4), batch_sampler=[[0], [1]])
    with pytest.raises(ValueError, match="batch_sampler decides"):
        given.rescale(2, 0, batch_size=3)
    shared = ShardedDataLoader(range(4), 2, sampler=torch_data.DistributedSampler(range(4), 1, 0))
    with pytest.raises(ValueError, match="would share out the samples twice"):
        shared.rescale(2, 0)
    loader.close()
    with pytest.raises(LoaderClosedError):
        loader.rescale(1, 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_leave_and_join(method: str) -> None:
    program = Path(__file__).with_name("rescaled_ranks.py")
    done = subprocess.run([sys.executable, str(program), method], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "each sample once\n"), done.stderr
