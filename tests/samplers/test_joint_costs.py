"""``costs=`` of several columns: all ranks have nearly equal work in each, in an order that stays random and pure."""

import itertools
import json
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import ShardedDataLoader
from sharded_loader.samplers import costs as room
from sharded_loader.samplers.costs import CostSampler, JointCostSampler, assigned, borders, sampler_of, similar_order
from sharded_loader.torch import DataLoader

Floats = npt.NDArray[np.float64]


def loads(count: int, text_only: float = 0.5, seed: int = 0) -> Floats:
    """Costs of pictures and text, lognormal up to a limit; some samples are nothing but text."""
    rng = np.random.default_rng(seed)
    text, vision = (np.clip(rng.lognormal(np.log(mean), 0.9, count), 1, 4000) for mean in (300, 500))
    return np.stack([np.where(rng.random(count) < text_only, 0, vision), text], axis=1)


def ratios(costs: Floats, ranks: int, size: int, sampler: CostSampler | None = None) -> Floats:
    """The slowest rank of each step over the mean, shape (steps, columns)."""
    sampler = sampler or JointCostSampler(costs, size, len(costs), seed=2)
    order = np.array(list(sampler.for_ranks(ranks).iter_epoch(0)))
    work = costs[order[: len(order) // (size * ranks) * size * ranks].reshape(-1, size, ranks)].sum(axis=1)
    found: Floats = work.max(axis=1) / np.maximum(work.mean(axis=1), 1e-9)
    return found


@pytest.mark.parametrize(
    ("ranks", "size", "mean", "share"), [(8, 8, 1.03, 0.02), (4, 16, 1.01, 0.0), (8, 32, 1.01, 0.0)]
)
def test_the_slowest_rank_is_near_the_mean_in_each_column(ranks: int, size: int, mean: float, share: float) -> None:
    costs = loads(8_000)
    found = ratios(costs, ranks, size)
    assert (found.mean(axis=0) <= mean).all()
    assert (found.max(axis=1) > 1.10).mean() <= share
    # One column alone leaves the other one to chance.
    alone = ratios(costs, ranks, size, CostSampler(costs[:, 1], size, len(costs), seed=2))
    assert alone[:, 0].mean() > 1.1


@pytest.mark.parametrize("text_only", [0.0, 0.95])
def test_so_it_is_without_texts_and_with_hardly_any_picture(text_only: float) -> None:
    assert (ratios(loads(8_000, text_only), 8, 8).mean(axis=0) <= 1.03).all()


def test_three_columns_are_balanced_too() -> None:
    costs = np.concatenate([loads(8_000), loads(8_000, 0.8, seed=1)[:, :1]], axis=1)
    assert (ratios(costs, 4, 16).mean(axis=0) <= 1.03).all()


@pytest.mark.costly(40)
@given(
    length=st.integers(0, 300),
    size=st.integers(1, 9),
    ranks=st.integers(1, 6),
    epoch=st.integers(0, 3),
    kind=st.sampled_from(["loads", "equal", "one has it", "nothing"]),
)
def test_each_sample_comes_once_and_any_position_at_once(
    length: int, size: int, ranks: int, epoch: int, kind: str
) -> None:
    costs = {
        "loads": loads(length),
        "equal": np.ones((length, 2)),
        "one has it": np.eye(max(length, 2))[:length, :2] + np.array([0, 1]),
        "nothing": np.zeros((length, 2)),
    }[kind]
    sampler = JointCostSampler(costs, size, length, seed=3).for_ranks(ranks)
    order = list(sampler.iter_epoch(epoch))
    assert sorted(order) == list(range(length))
    assert order[7:] == list(sampler.iter_epoch(epoch, 7))
    whole = JointCostSampler(costs, size, length, seed=3, whole_steps=True).for_ranks(ranks)
    assert list(whole.iter_epoch(epoch)) == order[: length // (size * ranks) * size * ranks]
    table = sampler.epoch_table(epoch)
    for position in range(0, length, 13):
        assert table.at(np.array([position])).tolist() == order[position : position + 1]


@pytest.mark.parametrize(("ranks", "size"), [(1, 24), (2, 12), (3, 8), (24, 1)])
def test_a_step_has_the_same_samples_on_any_number_of_ranks(ranks: int, size: int) -> None:
    def steps(ranks: int, size: int) -> list[list[int]]:
        order = list(JointCostSampler(loads(1000), size, 1000, seed=1).for_ranks(ranks).iter_epoch(2))
        return [sorted(order[begin : begin + 24]) for begin in range(0, 1000, 24)]

    assert steps(ranks, size) == steps(4, 6)


def test_the_order_is_another_one_in_each_epoch_and_with_each_seed() -> None:
    costs = loads(6400)
    one, other = (JointCostSampler(costs, 64, 6400, seed=seed) for seed in (1, 2))
    orders = [list(one.iter_epoch(0)), list(one.iter_epoch(1)), list(other.iter_epoch(0))]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    # Of the 63 that a sample meets in a step, it meets hardly more than by chance again in the next epoch.
    where = np.stack([np.argsort(list(one.iter_epoch(epoch))) // 64 for epoch in range(25)])
    again = np.bincount(where[0] * 100 + where[1])
    assert (again * (again - 1)).sum() < 0.06 * 6400 * 63
    # Over many epochs, any two meet as often as in a shuffle: once in 100 epochs.
    pairs = np.random.default_rng(0).integers(0, 6400, (2, 16_000))
    assert 0.7 < (where[:, pairs[0]] == where[:, pairs[1]]).mean() * 100 < 1.3


def test_ranks_resume_on_other_ranks_and_the_drop_in_reads_alike() -> None:
    vision, text = loads(400).T
    given: dict[str, Any] = {"costs": {"vision": vision, "text": text}, "seed": 3}

    def read(ranks: int, size: int, state: Any = None, steps: int | None = None, kind: Any = ShardedDataLoader) -> Any:
        found, after = [], None
        for rank in range(ranks):
            # The drop-in draws its seed from torch's generator.
            loader = kind(range(400), size, num_replicas=ranks, rank=rank, **given)
            if state is not None:
                loader.load_state_dict(state)
            found.append([batch.tolist() for batch in itertools.islice(loader, steps)])
            after = loader.state_dict()
        return [sorted(sum(step, [])) for step in zip(*found, strict=True)], json.loads(json.dumps(after))

    whole, _ = read(4, 6)
    first, state = read(2, 12, steps=5)
    assert first + read(8, 3, state)[0] == whole
    with pytest.raises(ValueError, match="costs of the JointCostSampler changed"):
        ShardedDataLoader(range(400), 24, costs=np.stack([text, text], axis=1), seed=3).load_state_dict(state)
    with pytest.raises(ValueError, match="sampler was JointCostSampler, and is CostSampler"):
        ShardedDataLoader(range(400), 24, costs=text, seed=3).load_state_dict(state)
    del given["seed"]
    assert sorted(sum(read(1, 10, kind=DataLoader)[0], [])) == list(range(400))


def test_over_data_that_have_grown_the_rest_of_an_epoch_is_that_of_before() -> None:
    costs = loads(120)

    def made(length: int) -> ShardedDataLoader[Any]:
        columns = {"vision": costs[:length, 0], "text": costs[:length, 1]}
        return ShardedDataLoader(range(length), 4, costs=columns, seed=3)

    loader = made(100)
    iterator = iter(loader)
    next(iterator)
    grown = made(120)
    grown.load_state_dict(loader.state_dict(), strict=False)
    assert [batch.tolist() for batch in grown] == [batch.tolist() for batch in iterator]
    assert sorted(index for batch in grown for index in batch.tolist()) == list(range(120))


def test_columns_are_given_in_many_ways_and_one_column_is_todays_order() -> None:
    costs = loads(50)
    ways: list[Any] = [costs, costs.tolist(), dict(zip("ab", costs.T, strict=True)), lambda index: tuple(costs[index])]
    orders = [list(ShardedDataLoader(range(50), 5, costs=way, seed=1).sampler.iter_epoch(0)) for way in ways]
    assert orders.count(orders[0]) == 4
    text = costs[:, 1]
    for way in (text[:, None], {"text": text}, lambda index: (text[index],)):
        one = ShardedDataLoader(range(50), 5, costs=way, seed=1).sampler
        assert type(one) is CostSampler and list(one) == list(CostSampler(text, 5, 50, seed=1))


def test_the_orders_of_one_column_and_of_two_are_those_of_earlier_releases() -> None:
    one = CostSampler(np.arange(1, 1001) * 7919 % 997 + 1, 8, 1000, seed=3)
    two = JointCostSampler(np.arange(2000).reshape(1000, 2) * 7919 % 997, 8, 1000, seed=3)
    for sampler, known in ((one, 1978858073), (two, 3355890006)):
        assert zlib.crc32(np.array(list(sampler.for_ranks(4).iter_epoch(2)), "<i8").tobytes()) == known


def test_the_shards_of_a_batch_have_equal_work_too() -> None:
    costs = loads(2000)
    work = (costs / costs.mean(axis=0)).sum(axis=1)
    loader = ShardedDataLoader(range(2000), 32, costs=costs, seed=1, num_shards=4)
    sums = np.array([[work[shard].sum() for shard in shards] for shards in loader][:-1])
    assert (sums.max(axis=1) / sums.mean(axis=1)).mean() < 1.05


WRONG: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: {"a": [1, 2, 3, 4], "b": [1, 2, 3]}, TypeError, "equally many"),
    (lambda: {"a": [1, 2, 3], "b": [1, 2, 3]}, ValueError, "but the dataset has 4 samples"),
    (dict, ValueError, "shape"),
    (lambda: {"a": [1, 2, 3, 4], "b": [1, -2, 3, 4]}, ValueError, "sample 1 is -2.0 in column 'b'"),
    (lambda: [[1, 1], [1, float("nan")], [1, 1], [1, 1]], ValueError, "sample 1 is nan in column 1"),
    (lambda: [[1, 1], [1, float("inf")], [1, 1], [1, 1]], ValueError, "sample 1 is inf in column 1"),
    (lambda: {"a": [1, 2, 0, 3]}, ValueError, "sample 2 is 0.0: costs are finite numbers above 0"),
    (lambda: np.ones((2, 4)), ValueError, r"shape \(2, 4\), but the dataset has 4 samples"),
    (lambda: np.ones((4, 2, 2)), ValueError, "shape"),
    (lambda: np.ones((4, 0)), ValueError, "shape"),
    (lambda: {"a": ["x"] * 4}, TypeError, "costs must be numbers"),
    (lambda: lambda index: (1,) * (index + 1), TypeError, "costs must be numbers"),
]


@pytest.mark.parametrize(("costs", "error", "message"), WRONG)
@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_wrong_costs_are_refused_in_words(costs: Any, error: Any, message: str, kind: Any) -> None:
    with pytest.raises(error, match=message):
        kind(range(4), 2, costs=costs())


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_a_function_is_not_called_for_days(kind: Any) -> None:
    with pytest.raises(ValueError, match="10,000,000,000 samples, and a function of the index"):
        kind(range(10**10), 2, costs=lambda index: index + 1)


def test_neighbours_are_alike_and_ranks_exchange_until_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = np.rint(loads(4096)).astype(np.int64)
    line = costs[similar_order(costs, borders(4096, 256), costs.mean(axis=0))].astype(float).reshape(-1, 16, 2)
    shuffled = np.random.default_rng(0).permutation(costs).astype(float).reshape(-1, 16, 2)
    assert (np.ptp(line, axis=1).mean(axis=0) < 0.25 * np.ptp(shuffled, axis=1).mean(axis=0)).all()

    def worst() -> float:
        steps = costs[: 4096 // 64 * 64].reshape(-1, 64, 2)
        found = (
            np.take_along_axis(steps, assigned(steps, 8).reshape(-1, 64, 1), axis=1).reshape(-1, 8, 8, 2).sum(axis=1)
        )
        return float((found.max(axis=1) / found.mean(axis=1)).mean())

    with_exchange = worst()
    monkeypatch.setattr(room, "ROUNDS", 0)
    assert 1 < with_exchange < 0.75 * worst()


def test_the_sampler_of_a_part_of_the_data_has_the_costs_of_that_part() -> None:
    costs = loads(100)
    part = sampler_of(costs, 4, 60, 1, False, 100)
    assert list(part) == list(JointCostSampler(costs[:60], 4, 60, seed=1))
    assert "JointCostSampler(length=60, costs=" in repr(part)
