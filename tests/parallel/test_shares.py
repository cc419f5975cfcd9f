"""``global_batch=``: the steps are those of one process on any number of ranks, and each rank reads its share."""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import make_pool
from failures import Boom, boom
from test_mesh import mesh_of

import sharded_loader as ours
from sharded_loader import ShardedDataLoader, batchify
from sharded_loader.torch import DataLoader

COUNT, BATCH = 300, 48
LENGTHS = np.random.default_rng(0).integers(1, 60, COUNT).tolist()
KINDS = [n % 3 for n in range(COUNT)]
DOCUMENTS = [list(range(100 * n, 100 * n + length)) for n, length in enumerate(LENGTHS)]
PACKED = ours.PackSampler(LENGTHS, 64, BATCH, seed=1)

Given = dict[str, Any]

ORDERS: dict[str, Callable[[], Given]] = {
    "shuffle": lambda: {"shuffle": True},
    "weights": lambda: {"sampler": ours.WeightedRandomSampler(LENGTHS, COUNT, seed=1)},
    "repeated": lambda: {"sampler": ours.RepeatedSampler(2, ours.RandomSampler(COUNT, seed=1))},
    "torch": lambda: {"sampler": torch_data.SequentialSampler(range(COUNT))},
    "list": lambda: {"sampler": list(range(COUNT))[::-1]},
    "discard": lambda: {"shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"shuffle": True, "last_batch": "rollover"},
    "steps": lambda: {"shuffle": True, "steps_per_epoch": 5},
    "skip": lambda: {"shuffle": True, "skip": [(1, 2), (8, 8)]},
    "costs": lambda: {"costs": LENGTHS},
    "mixture": lambda: {"dataset": ours.interleave([range(COUNT), range(1000, 1090)], shuffle=True, seed=1)},
    "batches": lambda: {"batch_sampler": ours.BatchSampler(ours.RandomSampler(COUNT, seed=1), BATCH)},
    "torch's": lambda: {"batch_sampler": torch_data.BatchSampler(range(COUNT), BATCH, False), "global_batch": True},
    "buckets": lambda: {"batch_sampler": ours.FixedBucketSampler(LENGTHS, BATCH, num_buckets=3, shuffle=True, seed=1)},
    "sorted": lambda: {"batch_sampler": ours.SortedBucketSampler(LENGTHS, BATCH, mult=3, shuffle=True, seed=1)},
    "budget": lambda: {"batch_sampler": ours.BoundedBudgetSampler(LENGTHS, 1200, seed=1), "global_batch": True},
    "one kind": lambda: {"batch_sampler": ours.GroupedBatchSampler(KINDS, BATCH, seed=1)},
    "classes": lambda: {"batch_sampler": ours.ClassBalancedBatchSampler(KINDS, 3, 16, seed=1), "global_batch": True},
    "shards": lambda: {
        "batch_sampler": ours.ShardedBatchSampler(ours.SortedBucketSampler(LENGTHS, BATCH, mult=2), 3, [2, 1, 1])
    },
    "groups": lambda: {
        "batch_sampler": ours.FixedBucketSampler(LENGTHS, 30, num_buckets=2, num_shards=2, seed=1),
        "global_batch": True,
    },
    "rows": lambda: {"dataset": DOCUMENTS, "batch_sampler": PACKED, "batchify_fn": batchify.Pack(64, pad_id=-1)},
}


def joined(ranks: int, order: Given, **given: Any) -> list[ShardedDataLoader[Any]]:
    arguments = {"dataset": range(COUNT), "global_batch": BATCH, "seed": 7, **order, **given}
    return [ShardedDataLoader(num_replicas=ranks, rank=rank, **arguments) for rank in range(ranks)]


def rows_of(batch: Any) -> list[Any]:
    """The samples, or rows, of a batch, of shards or of micro-batches."""
    if isinstance(batch, list):
        return list(itertools.chain.from_iterable(map(rows_of, batch)))
    found: list[Any] = (batch["input_ids"] if isinstance(batch, dict) else batch).tolist()
    return found


def step(loaders: list[Any], iterators: list[Iterator[Any]]) -> list[Any]:
    """The samples of a step of all ranks, sorted; an empty list at the end, which comes to all at once."""
    batches = [next(iterator, None) for iterator in iterators]
    assert len({batch is None for batch in batches}) == 1
    if batches[0] is None:
        return []
    ranks, sizes = len(loaders), [len(rows_of(batch)) for batch in batches]
    assert max(sizes) - min(sizes) <= 1
    assert sum(loader.share for loader in loaders) == pytest.approx(ranks)
    counted = [rows_of(batch) for batch, loader in zip(batches, loaders, strict=True) if loader.share]
    total = sum(map(len, counted))
    for rows, loader in zip(counted, filter(lambda one: one.share, loaders), strict=True):
        assert loader.share == pytest.approx(len(rows) * ranks / total)
    return sorted(itertools.chain.from_iterable(counted))


def read(loaders: list[Any], most: int | None = None) -> list[list[Any]]:
    iterators = [iter(loader) for loader in loaders]
    steps = iter(lambda: step(loaders, iterators), [])
    return list(itertools.islice(steps, most))


def state_of(loaders: list[Any]) -> Any:
    """The state, which all ranks have, as it comes back from a file."""
    states = [json.loads(json.dumps(loader.state_dict())) for loader in loaders]
    assert all(state == states[0] for state in states)
    return states[0]


@pytest.mark.costly(4)
@pytest.mark.parametrize("name", ORDERS)
def test_any_number_of_ranks_takes_the_steps_of_one_process(name: str) -> None:
    whole = joined(1, ORDERS[name]())
    steps = [read(whole), read(whole)]
    for ranks in (3, 7, 8, 24):
        loaders = joined(ranks, ORDERS[name]())
        assert {len(loader) for loader in loaders} == {len(steps[0])}
        assert [read(loaders), read(loaders)] == steps
        assert loaders[-1].fingerprint(1).steps == whole[0].fingerprint(1).steps


@pytest.mark.costly(4)
@pytest.mark.parametrize("name", ORDERS)
def test_a_state_loads_on_any_number_of_ranks_and_rescale_goes_on_with_the_same_steps(name: str) -> None:
    steps = read(joined(1, ORDERS[name]()))
    first = joined(8, ORDERS[name]())
    found, state = read(first, 2), state_of(first)
    for ranks in (1, 3, 24):
        loaders = joined(ranks, ORDERS[name]())
        for loader in loaders:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in loaders]
        here = [step(loaders, iterators)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # the size of a step stays
            for rank, loader in enumerate(loaders):
                loader.rescale(ranks + 4, rank)
        joining = joined(ranks + 4, ORDERS[name]())[ranks:]
        for loader in joining:
            loader.load_state_dict(state_of(loaders))
        loaders, iterators = loaders + joining, iterators + [iter(loader) for loader in joining]
        assert [*found, *here, *iter(lambda: step(loaders, iterators), [])] == steps  # noqa: B023


@pytest.mark.slow
def test_a_thousand_ranks_have_the_samples_of_one_process_in_their_turn() -> None:
    one = ShardedDataLoader(range(9000), global_batch=4100, shuffle=True, seed=3)
    many = ShardedDataLoader(range(9000), global_batch=4100, shuffle=True, seed=3, num_replicas=1000, rank=4)
    for number in range(3):
        shares = [many.indices(0, number, rank) for rank in range(1000)]
        whole = one.indices(0, number)
        assert {len(share) for share in shares} <= {len(whole) // 1000, -(-len(whole) // 1000)}
        # As without global batches: every thousandth sample of the epoch. At its end some ranks have a copy.
        own = [whole[(rank - 4100 * number) % 1000 :: 1000] for rank in range(1000)]
        assert all(share == samples or not samples for share, samples in zip(shares, own, strict=True))
    assert len(many) == 3


def test_ranks_take_turns_with_the_larger_shares() -> None:
    sizes = np.array([[len(batch) for batch in loader] for loader in joined(7, {"shuffle": True}, dataset=range(336))])
    assert sizes.sum(axis=1).tolist() == [48] * 7
    assert sizes.sum(axis=0).tolist() == [48] * 7


def test_a_step_of_fewer_samples_than_ranks_gives_some_of_them_a_copy_that_does_not_count() -> None:
    loaders = joined(8, {"shuffle": False}, dataset=range(BATCH + 3))
    iterators = [iter(loader) for loader in loaders]
    assert step(loaders, iterators) == list(range(BATCH))
    batches = [next(iterator).tolist() for iterator in iterators]
    assert batches == [[48], [49], [50], [48], [49], [50], [48], [49]]
    assert [loader.share for loader in loaders] == [8 / 3] * 3 + [0] * 5
    assert all(next(iterator, None) is None for iterator in iterators)


@pytest.mark.parametrize("name", ["shuffle", "budget", "rows", "costs"])
@pytest.mark.parametrize("ranks", [1, 7, 24])
def test_an_evaluation_counts_each_sample_once(name: str, ranks: int) -> None:
    loaders, found, sizes = joined(ranks, ORDERS[name](), evaluate=True), [], set()
    for batches in zip(*loaders, strict=True):
        found += [row for batch, real in batches for row in rows_of(batch)[:real]]
        sizes |= {len(rows_of(batch)) for batch, _ in batches}
        assert sum(loader.share for loader in loaders) == pytest.approx(ranks)
    if name == "shuffle":  # padded at its end
        assert sizes <= {BATCH // ranks, -(-BATCH // ranks)}
    whole = read(joined(1, ORDERS[name]()))
    assert sorted(found) == sorted(itertools.chain.from_iterable(whole))


def test_with_costs_ranks_have_equal_work_whether_or_not_they_divide_the_batch() -> None:
    costs = np.random.default_rng(1).lognormal(6, 0.8, 15 * 256 + 100)
    loader = ShardedDataLoader(range(len(costs)), global_batch=256, costs=costs, num_replicas=24, rank=0)
    for ranks, most in ((8, 1.05), (7, 1.05), (24, 1.3)):  # 10 samples, and one of them as costly as 8
        loader.rescale(ranks, 0)
        for number in range(0, 15, 6):  # whole steps
            loads = [costs[loader.indices(0, number, rank)].sum() for rank in range(ranks)]
            assert max(loads) <= most * np.mean(loads)


# -- micro-batches -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["shuffle", "rows", "costs"])
@pytest.mark.parametrize(("ranks", "micro"), [(3, 5), (7, 7), (24, 100), (1, 1)])
def test_micro_batches_are_as_many_on_all_ranks_and_hold_the_samples_of_the_share(
    name: str, ranks: int, micro: int
) -> None:
    loaders, shares = joined(ranks, ORDERS[name](), micro_batch=micro), joined(ranks, ORDERS[name]())
    for lists, whole in zip(zip(*loaders, strict=True), zip(*shares, strict=True), strict=True):
        assert [rows_of(batches) for batches in lists] == list(map(rows_of, whole))
        assert len({len(batches) for batches in lists}) == 1
        sizes = [[len(rows_of(batch)) for batch in batches] for batches in lists]
        assert all(max(some) <= micro and max(some) - min(some) <= 1 for some in sizes)
        assert [loader.share for loader in loaders] == [loader.share for loader in shares]


def test_with_micro_batches_of_one_sample_a_smaller_share_has_one_less() -> None:
    loaders = joined(2, {"shuffle": False}, dataset=range(3), global_batch=3, micro_batch=1)
    assert [[[batch.tolist() for batch in lists] for lists in loader] for loader in loaders] == [[[[0], [2]]], [[[1]]]]


def test_an_evaluation_in_micro_batches_may_end_with_padding_alone_on_some_ranks() -> None:
    given: dict[str, Any] = {"batch_size": 2, "micro_batch": 1, "evaluate": True, "num_replicas": 2}
    for make in (ShardedDataLoader, DataLoader):
        last = list(make(range(5), rank=1, **given))[-1]
        assert ([batch.tolist() for batch in last[0]], last[1]) == ([[3], [3]], 0)


@pytest.mark.parametrize("pool", ["inline", "thread", "fork"])
def test_micro_batches_of_one_rank_are_read_by_any_pool(pool: str) -> None:
    given = {"batch_size": 6, "micro_batch": 4, "pool": make_pool(pool), "device": "cpu"}
    with ShardedDataLoader(range(8), **given) as loader:
        assert [[batch.tolist() for batch in lists] for lists in loader] == [[[0, 1, 2], [3, 4, 5]], [[6, 7]]]
        assert loader.share == 1.0
        assert [batch.tolist() for batch in loader.batch(0, 0)] == [[0, 1, 2], [3, 4, 5]]
        assert loader.indices(0, 1) == [[6, 7]]


def test_a_micro_batch_whose_samples_are_all_skipped_is_left_out_and_an_error_with_ranks() -> None:
    data = ours.SimpleDataset(range(8)).transform(lambda index: index if index > 2 else boom())
    loader = ShardedDataLoader(data, 6, micro_batch=3, on_error="skip")
    with pytest.warns(ours.LoaderWarning, match="shard 0 was left out, those after it moved up"):
        assert [[batch.tolist() for batch in lists] for lists in loader] == [[[3, 4, 5]], [[6, 7]]]
    ranks = ShardedDataLoader(data, global_batch=6, micro_batch=3, on_error="skip", num_replicas=1, rank=0)
    with pytest.raises(Boom, match="went wrong"):
        next(iter(ranks))


# -- what is trained ---------------------------------------------------------------------------------------------------


def losses(ranks: int, steps: int, micro: int | None) -> list[float]:
    """The losses of a small model in float64 whose gradients are the mean over ranks, as DDP's are."""
    features = torch.randn(COUNT, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    targets, weights = features.sin().sum(1), torch.zeros(6, dtype=torch.float64, requires_grad=True)
    loaders, found = joined(ranks, {"shuffle": True}, micro_batch=micro), []
    optimizer = torch.optim.Adam([weights], lr=0.01)
    while len(found) < steps:
        for batches in zip(*loaders, strict=True):
            optimizer.zero_grad()
            mean = 0.0
            for batch, loader in zip(batches, loaders, strict=True):
                micro_batches = batch if micro else [batch]
                mine = sum(map(len, micro_batches))
                for rows in micro_batches:
                    loss = ((features[rows] @ weights - targets[rows]) ** 2).sum() / mine * loader.share / ranks
                    loss.backward()
                    mean += loss.item()
            optimizer.step()
            found.append(mean)
    return found


@pytest.mark.parametrize("steps", [50, pytest.param(1000, marks=pytest.mark.slow)])
def test_the_loss_is_that_of_one_process_to_rounding(steps: int) -> None:
    whole = np.array(losses(1, steps, None))
    assert whole[-1] < whole[0] / 2
    for ranks, micro in ((8, None), (7, None), (3, 5)):
        assert np.abs(np.array(losses(ranks, steps, micro)) / whole - 1).max() < 1e-12


# -- both faces, and what is refused -----------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_both_loaders_take_the_same_arguments_and_are_made_again_from_them(make: Any) -> None:
    mesh = mesh_of((1, 0), (3, 2), "dp", "tp")
    loader = make(range(20), global_batch=8, micro_batch=2, shuffle=True, seed=1, mesh=mesh)
    assert loader.batch_size is None
    assert [len(lists) for lists in loader] == [2, 2, 1]
    assert loader.share == 2 * 3 / 4
    loader.rescale(2, 1)
    assert (loader.batch_size, len(loader)) == (None, 3)
    other = make(range(20), global_batch=8, micro_batch=2, shuffle=True, seed=1, num_replicas=2, rank=1)
    other.set_epoch(1)
    assert [rows_of(lists) for lists in loader] == [rows_of(lists) for lists in other]
    again = copy.copy(loader) if make is DataLoader else make(**loader.arguments)
    assert rows_of(again.batch(0, 0)) == rows_of(other.batch(0, 0))


def test_the_drop_in_without_a_global_batch_has_no_share() -> None:
    with pytest.raises(TypeError, match="share needs the order of ShardedDataLoader"):
        assert DataLoader(range(4)).share


def test_a_dataset_that_looks_ahead_is_told_of_the_samples_of_this_rank_alone() -> None:
    told: list[Any] = []

    class Ahead(ours.SimpleDataset):  # type: ignore[type-arg]
        def follow(self, batches: Any, position: Any, later: Any) -> None:
            told.append(list(map(batches, range(3))))

    loader = ShardedDataLoader(Ahead(range(10)), global_batch=6, num_replicas=4, rank=1)
    assert [batch.tolist() for batch in loader] == [[1, 5], [9]]
    assert told == [[[1, 5], [9], None]]


def test_a_step_is_looked_up_again_after_the_ranks_have_changed() -> None:
    loader = ShardedDataLoader(range(30), global_batch=10, shuffle=True, num_replicas=4, rank=0)
    batches = iter(loader)
    known = [next(batches) for _ in range(2)] and loader.indices(0, 0, 3)
    loader.rescale(1, 0)
    assert set(known) < set(loader.indices(0, 0))


def test_a_state_of_ranks_with_batches_of_their_own_goes_on_with_a_global_batch_of_as_many_samples() -> None:
    before = ShardedDataLoader(range(48), 4, shuffle=True, seed=1, num_replicas=4, rank=0)
    read([before], 2)
    loaders = joined(3, {"shuffle": True}, dataset=range(48), global_batch=16)
    for loader in loaders:
        loader.load_state_dict(before.state_dict())
    whole = ShardedDataLoader(range(48), 48, shuffle=True, seed=1).indices(0, 0)
    assert read(loaders) == [sorted(whole[32:])]


@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"global_batch": 7, "num_replicas": 8, "rank": 0}, ValueError, "global_batch is 7, and there are 8 ranks"),
        ({"global_batch": 0}, ValueError, "global_batch must be at least 1"),
        ({"global_batch": 2.5}, TypeError, "global_batch must be an integer"),
        ({"global_batch": True}, TypeError, "step of all ranks. True is for a batch_sampler="),
        ({"global_batch": 8, "batch_size": 4}, ValueError, "batch_size=4 is of one rank, and global_batch=8 of all"),
        ({"global_batch": 8, "batch_sampler": PACKED}, ValueError, "the PackSampler makes batches of 48: give"),
        ({"global_batch": 8, "batch_sampler": [[0], [1]]}, ValueError, "the list makes batches of None: give"),
        ({"batch_size": 4, "micro_batch": 0}, ValueError, "micro_batch must be at least 1"),
        ({"batch_size": 4, "micro_batch": 2, "num_shards": 2}, ValueError, "leave out devices, num_shards"),
        ({"global_batch": 4, "micro_batch": 2, "devices": ["cpu", "cpu"]}, ValueError, "leave out devices"),
        ({"global_batch": 4, "costs": [1.0] * 9}, ValueError, "costs have shape"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(
    make: Any, given: Given, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        make(range(COUNT), **given)


def test_what_cannot_be_cut_is_refused_where_it_is_met() -> None:
    def stream() -> Iterator[int]:
        return iter(range(4))

    with pytest.raises(ValueError, match="each rank reads parts of iterable data, as with keep=: leave out"):
        ShardedDataLoader(stream, global_batch=4)
    loader = ShardedDataLoader(range(4), batch_sampler=[[[0, 1], [2, 3]]], micro_batch=1)
    with pytest.raises(ValueError, match="epoch 0, batch 0 is a list of shards: leave out micro_batch"):
        next(iter(loader))
    loader = ShardedDataLoader(range(40), global_batch=8, num_replicas=8, rank=1)
    batches = iter(loader)
    found = [next(batches).tolist()]
    with pytest.raises(ValueError, match="global_batch is 8, and there are 9 ranks"):
        loader.rescale(9, 1)
    with pytest.raises(ValueError, match="rescale: the global_batch stays"):
        loader.rescale(4, 1, batch_size=2)
    with pytest.raises(ValueError, match="batch_size was 8, and is 10"):
        ShardedDataLoader(range(40), global_batch=10).load_state_dict(loader.state_dict())
    assert found + [batch.tolist() for batch in batches] == [[1], [9], [17], [25], [33]]
