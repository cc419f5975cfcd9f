"""Ranks share one global order: together they read all of it, and each as much as the others."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
)
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.tables import BLOCK, StridedTable
from sharded_loader.sampling.third_party import table_of


class Foreign:
    """No pure access."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))

    def __len__(self) -> int:
        return self.length


INNER: dict[str, Callable[[int], Any]] = {
    "in constant time": SequentialSampler,
    "own": lambda length: BatchSampler(SequentialSampler(length), 1),
    "foreign": Foreign,
}


def items_of(sampler: Any) -> list[int]:
    return [item[0] if isinstance(item, list) else item for item in sampler]


@given(
    length=st.integers(0, 40),
    replicas=st.integers(1, 9),
    truncate=st.booleans(),
    kind=st.sampled_from(sorted(INNER)),
    start=st.integers(0, 5),
)
def test_ranks_get_what_torch_distributed_sampler_gives(
    length: int, replicas: int, truncate: bool, kind: str, start: int
) -> None:
    for rank in range(replicas):
        if length == 0:
            expected: list[int] = []
        else:
            reference = torch_data.DistributedSampler(
                range(length),
                replicas,
                rank,
                shuffle=False,
                drop_last=truncate,  # type: ignore[arg-type]
            )
            # torch refuses or overcounts nothing here except fewer samples than ranks with drop_last.
            expected = [] if truncate and length < replicas else list(reference)
        sampler = ReplicaSampler(INNER[kind](length), partial(resolve_replicas, replicas, rank), truncate=truncate)
        assert (sampler.epoch_table(0).block == BLOCK) is (kind != "foreign")
        assert items_of(sampler.iter_epoch(0)) == expected
        assert items_of(sampler.iter_epoch(0, start)) == expected[start:]
        assert len(sampler) == len(expected)


@given(
    length=st.integers(0, 40),
    offset=st.integers(0, 45),
    replicas=st.integers(1, 5),
    truncate=st.booleans(),
    kind=st.sampled_from(sorted(INNER)),
)
def test_the_rest_of_an_epoch_can_be_dealt_to_another_number_of_ranks(
    length: int, offset: int, replicas: int, truncate: bool, kind: str
) -> None:
    def deal(rank: int) -> StridedTable:
        return StridedTable(table_of(INNER[kind](length), 0, 7), replicas, rank, offset, truncate)

    shares = [items_of(deal(rank).items()) for rank in range(replicas)]
    assert len(set(map(len, shares))) == 1
    dealt = [item for group in zip(*shares, strict=True) for item in group]
    rest = max(length - offset, 0)
    padded = rest // replicas * replicas if truncate else -(-rest // replicas) * replicas
    assert dealt == [(offset + place) % length for place in range(padded)]
    assert items_of(deal(0).items(2)) == shares[0][2:]


@pytest.mark.parametrize("replicas", [2, 3, 1000])
def test_ranks_stride_over_the_boundaries_of_blocks(replicas: int) -> None:
    length = 2 * BLOCK + 100
    order = RandomSampler(length, seed=3)
    whole = list(order.iter_epoch(1))
    for rank in {0, 1, replicas - 1}:
        expected = whole[rank::replicas]
        if len(expected) < -(-length // replicas):
            expected.append(whole[(rank + len(expected) * replicas) % length])
        sampler = ReplicaSampler(order, partial(resolve_replicas, replicas, rank))
        assert list(sampler.iter_epoch(1)) == expected
        assert list(sampler.iter_epoch(1, len(expected) - 3)) == expected[-3:]
        assert list(itertools.chain.from_iterable(BatchSampler(sampler, 7).iter_epoch(1))) == expected


@given(length=st.integers(0, 40), size=st.integers(1, 7), replicas=st.integers(1, 5), own=st.booleans())
def test_batches_are_dealt_in_turn_and_padded_by_wrapping(length: int, size: int, replicas: int, own: bool) -> None:
    inner: Any = BatchSampler(SequentialSampler(length), size)
    batches = list(inner.iter_epoch(0))
    if not own:
        inner = batches
    padded = [batches[place % len(batches)] for place in range(-(-len(batches) // replicas) * replicas)]
    for rank in range(replicas):
        sampler = ReplicaSampler(inner, partial(resolve_replicas, replicas, rank))
        assert list(sampler.iter_epoch(0)) == padded[rank::replicas]
        assert list(sampler.iter_epoch(0, 1)) == padded[rank::replicas][1:]
        assert len(sampler) == len(padded) // replicas


def test_ranks_of_a_foreign_random_sampler_share_one_order() -> None:
    shares = [
        list(ReplicaSampler(torch_data.RandomSampler(range(12)), partial(resolve_replicas, 3, rank)).iter_epoch(2))  # type: ignore[arg-type]
        for rank in range(3)
    ]
    assert sorted(itertools.chain.from_iterable(shares)) == list(range(12))


def test_epoch_is_that_of_the_sampler_inside() -> None:
    inner = RandomSampler(10, seed=1)
    sampler = ReplicaSampler(inner, partial(resolve_replicas, 2, 1))
    first = list(sampler)
    assert (sampler.epoch, inner.epoch) == (1, 1)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_replicas_may_be_asked_for_when_they_are_needed() -> None:
    asked: list[str] = []

    def replicas() -> tuple[int, int]:
        asked.append("replicas")
        return 2, 1

    sampler = ReplicaSampler(SequentialSampler(4), replicas)
    assert asked == []
    assert list(sampler) == [1, 3]
    assert (sampler.num_replicas, sampler.rank) == (2, 1)
    assert set(asked) == {"replicas"}


def test_resolve_replicas_reads_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_replicas(None) == (1, 0)
    assert resolve_replicas(1) == (1, 0)
    assert resolve_replicas(4, 3) == (4, 3)
    assert resolve_replicas("auto", environ={}) == (1, 0)
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 8, get_rank=lambda: 5
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (8, 5)
    group.is_initialized = lambda: False
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: resolve_replicas(4), "rank is missing"),
        (lambda: resolve_replicas(None, 1), "num_replicas is missing"),
        (lambda: resolve_replicas("auto", 1), "leave out rank=1"),
        (lambda: resolve_replicas(4, 4), "rank is 4, but there are 4 replicas: give 0 to 3"),
        (lambda: resolve_replicas(4, -1), "ranks count from 0"),
        (lambda: resolve_replicas(0, 0), "num_replicas must be at least 1"),
        (lambda: resolve_replicas("two", 0), "num_replicas must be an integer"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "x"}), "WORLD_SIZE is 'x'"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "2"}), "RANK is missing"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "2", "RANK": "2"}), "give 0 to 1"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "0"}), "variable WORLD_SIZE is '0'.*at least 1"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "2.0", "RANK": "0"}), "WORLD_SIZE is '2.0'"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "2", "RANK": "-1"}), "RANK is '-1'.*at least 0"),
        (lambda: resolve_replicas("auto", environ={"WORLD_SIZE": "2", "RANK": ""}), "RANK is missing"),
        (lambda: resolve_replicas("auto", environ={"RANK": "3"}), "RANK is 3, but WORLD_SIZE is missing: set both"),
        (lambda: resolve_replicas(2, 2), "give 0 to 1"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
