"""``loader.rescale``: ranks leave and join between two steps, and each sample of the epoch still comes once."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch.utils.data as torch_data
from conftest import POOLS, make_pool
from failures import Boom, boom
from samples import Bad

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    ClassBalancedBatchSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    LoaderClosedError,
    LoaderWarning,
    PackSampler,
    RandomSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
)


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
        loader.rescale(replicas, rank, batch_size or 2)
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
    ranks = [joined(2, rank, pool=workers[rank]) for rank in range(2)]
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
    fresh, _ = joined(4, 3, batch_size=4)
    fresh.set_epoch(1)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in fresh]
    assert loader.state_dict() == fresh.state_dict()


@pytest.mark.parametrize(("before", "after"), [(3, 1), (1, 3), (2, 3)])
def test_with_rollover_ranks_that_stay_and_join_go_on_alike_between_epochs(before: int, after: int) -> None:
    given = {"dataset": range(5), "last_batch": "rollover", "shuffle": False}
    ranks = [joined(before, rank, **given) for rank in range(before)]
    for _ in range(3):
        while step(ranks):
            pass
        ranks = [(loader, iter(loader)) for loader, _ in ranks]
    state = ranks[0][0].state_dict()
    for rank, (loader, _) in enumerate(ranks[:after]):
        loader.rescale(after, rank, 2)
    stayed = [(loader, iter(loader)) for loader, _ in ranks[:after]]
    for (loader, stays), rank in zip(stayed, range(after), strict=False):
        other, joins = joined(after, rank, state, **given)
        assert (loader.epoch, loader.position) == (other.epoch, other.position)
        assert next(stays).tolist() == next(joins).tolist()


def test_other_steps_with_skip_are_refused_between_epochs_too() -> None:
    loader, _ = joined(2, 0, skip=[(15, 15)])
    assert len(list(loader)) == 12
    for live in (True, False):
        iterator = iter(loader) if live else None
        with pytest.raises(ValueError, match="skip= counts steps, and the ranks, the batch size or"):
            loader.rescale(1, 0)
        del iterator
    loader.rescale(1, 0, 4)
    assert len(list(loader)) == 11


def test_after_a_loop_that_was_left_the_position_counts_the_steps_of_the_new_ranks() -> None:
    loader = ShardedDataLoader(range(40), 2, num_replicas=2, rank=0)
    for batch in loader:
        if batch[0] == 8:
            break
    assert loader.position == 3
    loader.rescale(1, 0, batch_size=2)
    assert (loader.epoch, loader.position, loader.state_dict()["samples"]) == (0, 6, 12)


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


def test_with_steps_per_epoch_all_ranks_read_on_in_the_endless_order() -> None:
    """Epochs of 5 steps: by 4 ranks, from a state by 2, after `rescale` by 1, from a state by 2 in larger batches."""
    sampler = RandomSampler(24, seed=1)
    order = iter([index for epoch in range(30) for index in sampler.iter_epoch(epoch)])
    given = {"dataset": range(24), "sampler": sampler, "shuffle": False, "steps_per_epoch": 5}

    def begun(replicas: int, state: Any = None, batch_size: int = 1) -> list[Rank]:
        return [joined(replicas, rank, state, batch_size=batch_size, **given) for rank in range(replicas)]

    def read(ranks: list[Rank], steps: int) -> list[Rank]:
        """So many steps. Behind the end of an epoch the next one begins."""
        for _ in range(steps):
            batches = step(ranks)
            if not batches:
                ranks = [(loader, iter(loader)) for loader, _ in ranks]
                batches = step(ranks)
            found = [index for row in zip(*batches, strict=True) for index in row]
            assert found == list(itertools.islice(order, len(found)))
        return ranks

    ranks = read(begun(4), 8)
    ranks = begun(2, through_json(ranks[2][0].state_dict()))
    assert (ranks[0][0].position, len(ranks[0][0])) == (3, 5)
    (one, iterator), _ = read(ranks, 3)
    one.rescale(1, 0, 1)
    read([(one, iterator)], 24)
    assert one.position == 5
    one.rescale(2, 0, 1)  # between two epochs
    read(begun(2, through_json(one.state_dict()), batch_size=3), 15)


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


LENGTHS = [1 + index * 7 % 50 for index in range(96)]
KINDS = [index % 16 for index in range(96)]

OF_SIZE: dict[str, Any] = {
    "batches": lambda size: BatchSampler(RandomSampler(96, seed=1), size),
    "batches of torch's order": lambda size: BatchSampler(torch_data.RandomSampler(range(96)), size, seed=1),
    "shards": lambda size: ShardedBatchSampler(BatchSampler(RandomSampler(96, seed=1), size), 1),
    "sorted": lambda size: SortedBucketSampler(LENGTHS, size, mult=3, shuffle=True, seed=1),
    "buckets": lambda size: FixedBucketSampler(LENGTHS, size, 3, shuffle=True, seed=1),
    "rolling buckets": lambda size: FixedBucketSampler(LENGTHS, size, 3, seed=1, last_batch="rollover"),
    "kinds": lambda size: GroupedBatchSampler(KINDS, {kind: size * (1 + kind % 2) for kind in range(16)}, seed=1),
    "packed": lambda size: PackSampler(LENGTHS, 60, size, window=16, seed=1),
}


def flat(batch: Any) -> list[int]:
    return [index for one in batch for index in (one if isinstance(one, list) else [one])]


def of_batches(sampler: Any, replicas: int, state: Any = None, strict: bool = True, **more: Any) -> list[Rank]:
    """All ranks, which read batches of a sampler that is made by a function."""
    ranks = []
    for rank in range(replicas):
        given = {"batch_sampler": sampler(), "collate_fn": list, "seed": 5, **more}
        loader = ShardedDataLoader(range(96), num_replicas=replicas, rank=rank, **given)
        if state is not None:
            loader.load_state_dict(through_json(state), strict=strict)
        ranks.append((loader, iter(loader)))
    return ranks


def steps_of(ranks: list[Rank], count: int | None = None) -> list[set[int]]:
    """The samples of all ranks in some steps, or in those that are left."""
    iterators = [iterator for _, iterator in ranks]
    steps = itertools.islice(zip(*iterators, strict=True), count)
    return [{index for batch in step for index in flat(batch)} for step in steps]


@pytest.mark.parametrize(("before", "after"), [((1, 4), (4, 1)), ((4, 1), (1, 4)), ((2, 2), (4, 1)), ((4, 2), (2, 4))])
@pytest.mark.parametrize("name", OF_SIZE)
def test_batches_of_another_size_on_other_ranks_go_on_with_the_same_steps(name: str, before: Any, after: Any) -> None:
    def made(replicas: int, size: int, state: Any = None) -> list[Rank]:
        return of_batches(lambda: OF_SIZE[name](size), replicas, state)

    for epochs, done in ((0, 3), (2, 1)):
        ranks = made(*before)
        for _ in range(epochs):
            steps_of(ranks)
            ranks = [(loader, iter(loader)) for loader, _ in ranks]
        steps_of(ranks, done)
        resumed = made(*after, ranks[-1][0].state_dict())
        assert (resumed[0][0].epoch, resumed[0][0].position) == (epochs, done)
        halfway = [ranks[0][0].state_dict(), steps_of(ranks, 2), steps_of(resumed, 2)]
        assert name == "kinds" or halfway[1] == halfway[2]
        back = made(*before, resumed[0][0].state_dict())
        rest = steps_of(ranks)
        # Where the samples do not divide evenly, ranks have fillers: others on another number of ranks.
        assert len(rest) == len(steps_of(back))
        for here, there in zip(rest, steps_of(resumed), strict=True):
            assert here <= there or there <= here


def test_a_loader_without_ranks_goes_on_as_two_that_have_half_its_batches() -> None:
    one = ShardedDataLoader(range(96), batch_sampler=OF_SIZE["batches"](8), collate_fn=list, seed=5)
    iterator = iter(one)
    next(iterator)
    two = of_batches(lambda: OF_SIZE["batches"](4), 2, one.state_dict())
    assert steps_of(two) == [set(batch) for batch in iterator]


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        (lambda size: BatchSampler(RandomSampler(20, seed=1), size), 8),  # the last batch is half of one
        (lambda size: PackSampler(LENGTHS, 60, size, window=16, seed=1, last_batch="discard"), 2),
    ],
    ids=["batches", "rows, discard"],
)
def test_behind_the_last_batch_smaller_ones_begin_the_next_epoch(kind: Any, size: int) -> None:
    [(loader, iterator)] = of_batches(lambda: kind(size), 1)
    for _ in range(len(loader)):
        next(iterator)
    for other, _ in of_batches(lambda: kind(size // 2), 2, loader.state_dict()):
        assert (other.epoch, other.position) == (1, 0)


@pytest.mark.parametrize("name", ["sorted", "buckets", "packed"])
def test_batches_of_another_size_go_on_with_steps_per_epoch(name: str) -> None:
    def made(replicas: int, size: int, state: Any = None) -> list[Rank]:
        return of_batches(lambda: OF_SIZE[name](size), replicas, state, steps_per_epoch=5)

    ranks = made(1, 4)
    steps_of(ranks)
    ranks = [(ranks[0][0], iter(ranks[0][0]))]
    steps_of(ranks, 2)
    resumed = made(4, 1, ranks[0][0].state_dict())
    for _ in range(3):
        for here, there in zip(steps_of(ranks), steps_of(resumed), strict=True):
            assert here <= there or there <= here
        ranks, resumed = ([(loader, iter(loader)) for loader, _ in all_of] for all_of in (ranks, resumed))


@pytest.mark.parametrize("name", OF_SIZE)
def test_rescale_gives_a_batch_sampler_batches_of_another_size(name: str) -> None:
    one, reference = (of_batches(lambda: OF_SIZE[name](4), 1) for _ in range(2))
    steps_of(one, 3), steps_of(reference, 3)
    state = one[0][0].state_dict()
    if name == "kinds":  # its batches have several sizes
        with pytest.raises(ValueError, match="cannot have batches of 2 in the same order: leave out batch_size"):
            one[0][0].rescale(2, 0, batch_size=2)
        return
    one[0][0].rescale(2, 0, batch_size=2)
    joined = of_batches(lambda: OF_SIZE[name](2), 2, state)[1]
    for here, there in zip(steps_of(reference), steps_of([one[0], joined]), strict=True):
        assert here <= there or there <= here
    assert one[0][0].batch_size is None
    again = of_batches(lambda: one[0][0].arguments["batch_sampler"], 1)[0]  # what the loader shows makes it again
    assert len(flat(next(again[1]))) <= len(flat(next(iter(reference[0][0]))))


OTHERS: dict[str, Any] = {
    **OF_SIZE,
    "tokens": lambda size: PackSampler(LENGTHS, size, 4),
    "balanced": lambda size: ClassBalancedBatchSampler(KINDS, size, 2, seed=1),
    "uneven": lambda size: SortedBucketSampler(LENGTHS, size, mult=2.5, shuffle=True, seed=1),
    "budget": lambda size: BoundedBudgetSampler(LENGTHS, 30 * size, seed=1),
}


@pytest.mark.parametrize(
    ("name", "was", "now", "done", "again"),
    [
        ("batches", 4, 3, 1, 1),
        ("packed", 4, 3, 2, 2),
        ("tokens", 60, 70, 1, "up to 96"),
        *((name, 4, 3, 1, "up to 96") for name in ("buckets", "sorted", "kinds")),
        ("sorted", 2, 4, 3, "up to 96"),
        *((name, 4, 2, 1, "up to 96") for name in ("balanced", "uneven", "budget")),
    ],
)
def test_batches_that_cannot_go_on_are_an_error_that_counts_samples(
    name: str, was: int, now: int, done: int, again: Any
) -> None:
    ranks = of_batches(lambda: OTHERS[name](was), 1)
    steps_of(ranks, done)
    loader = of_batches(lambda: OTHERS[name](now), 1)[0][0]
    before = loader.state_dict()
    for strict in (True, False):
        with pytest.raises(ValueError, match=f"Here {again} samples.* would come again, or be lost"):
            loader.load_state_dict(ranks[0][0].state_dict(), strict=strict)
        assert loader.state_dict() == before


@pytest.mark.parametrize("name", ["batches", "packed", "sorted"])
def test_a_larger_step_of_all_ranks_is_allowed_if_the_samples_come_once(name: str) -> None:
    """Two batches of 4 are four of 2, whatever the ranks; only the steps have other samples."""
    ranks = of_batches(lambda: OF_SIZE[name](4), 1)
    done = steps_of(ranks, 2)
    state = ranks[0][0].state_dict()
    with pytest.raises(ValueError, match="was 4, and is 2"):
        of_batches(lambda: OF_SIZE[name](2), 4, state)
    resumed = of_batches(lambda: OF_SIZE[name](2), 4, state, strict=False)
    rest = steps_of(resumed)
    assert set().union(*done, *rest) == set(range(96))
    assert not set().union(*done) & set().union(*rest[:-1]) or name == "packed"  # documents of two rows


def test_rescale_keeps_the_samples_of_a_step_or_says_that_it_does_not() -> None:
    def made(**given: Any) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(range(96), num_replicas=4, rank=0, **given)

    with pytest.warns(LoaderWarning, match="from now on, and 16 before. To keep the 16, take a number of ranks that"):
        made(batch_size=4).rescale(3, 0)
    with pytest.warns(LoaderWarning, match="read 8 samples in a step from now on, and 16 .* the 16, give batch_size=8"):
        made(batch_sampler=OF_SIZE["buckets"](4)).rescale(2, 0)
    with pytest.warns(LoaderWarning, match="read 2 batches in a step from now on, and 4 before"):
        made(batch_sampler=[[0], [1, 2]]).rescale(2, 0)
    for loader in (made(batch_size=4), made(batch_sampler=OF_SIZE["buckets"](4))):
        loader.rescale(4, 1)  # no warning
        loader.rescale(2, 0, batch_size=8)
        loader.rescale(3, 0, batch_size=8)  # the program has said it


def test_a_warning_of_rescale_that_is_an_error_changes_nothing() -> None:
    loader, iterator = joined(2, 0)
    next(iterator)
    state = loader.state_dict()
    with pytest.raises(LoaderWarning):  # an error in these tests
        loader.rescale(1, 0)
    assert loader.state_dict() == state and loader.arguments["num_replicas"] == 2


def test_a_batch_without_a_good_sample_is_then_an_error_as_among_ranks_from_the_beginning() -> None:
    loader: ShardedDataLoader[Any] = ShardedDataLoader(Bad(boom), 2, on_error="skip", seed=5)
    loader.rescale(2, 1, 1)
    with pytest.raises(Boom):
        list(loader)  # left out, it would be missing from the steps of this rank alone


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
