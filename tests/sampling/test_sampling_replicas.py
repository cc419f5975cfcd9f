"""Ranks share one global order: together they read all of it, and each as much as the others."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign

from sharded_loader import (
    BatchSampler,
    RandomSampler,
    SequentialSampler,
)
from sharded_loader.engine.order import resolve_replicas
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.tables import BLOCK, StridedTable
from sharded_loader.sampling.third_party import table_of

INNER: dict[str, Callable[[int], Any]] = {
    "in constant time": SequentialSampler,
    "own": lambda length: BatchSampler(SequentialSampler(length), 1),
    "foreign": lambda length: Foreign(range(length)),
    "batches": lambda length: BatchSampler(SequentialSampler(3 * length), 3),
    "foreign batches": lambda length: [[3 * place, 3 * place + 1, 3 * place + 2] for place in range(length)],
}


def items_of(sampler: Any) -> list[int]:
    """The numbers of items or batches."""
    return [item[0] // len(item) if isinstance(item, list) else item for item in sampler]


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
                drop_last=truncate,
            )
            # torch refuses or overcounts nothing here except fewer samples than ranks with drop_last.
            expected = [] if truncate and length < replicas else list(reference)
        sampler = ReplicaSampler(INNER[kind](length), partial(resolve_replicas, replicas, rank), truncate=truncate)
        if "batches" not in kind:
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


def test_epoch_and_order_are_those_of_the_sampler_inside() -> None:
    inner = RandomSampler(10, seed=1)
    sampler = ReplicaSampler(inner, partial(resolve_replicas, 2, 1))
    first = list(sampler)
    assert (sampler.epoch, inner.epoch) == (1, 1)
    sampler.set_epoch(0)
    assert list(sampler) == first
    theirs: Any = torch_data.RandomSampler(range(12))
    shares = [list(ReplicaSampler(theirs, partial(resolve_replicas, 3, rank)).iter_epoch(2)) for rank in range(3)]
    assert sorted(sum(shares, [])) == list(range(12))


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
