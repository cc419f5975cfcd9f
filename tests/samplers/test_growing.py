"""A batch size that changes at given steps: on all ranks at once, over all epochs, from any position on."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader import BatchSampler, GrowingBatchSampler, RandomSampler, SequentialSampler, ShardedDataLoader

LENGTH = 20
SCHEDULE = [(0, 1), (4, 2), (9, 3)]


def reference(length: int, replicas: int, schedule: list[tuple[int, int]], last: str, epochs: int) -> list[Any]:
    """Of each epoch the steps, and in each step the batches of the ranks, counted one after the other."""
    step, found = 0, []
    for _ in range(epochs):
        steps, done = [], 0
        while done < length:
            size = [size for start, size in schedule if start <= step][-1] * replicas
            if length - done < size and last == "discard":
                break
            size = min(size, length - done)
            each = -(-size // replicas)
            begins = [done + rank * each for rank in range(replicas)]
            steps.append([sorted(place % length for place in range(begin, begin + each)) for begin in begins])
            step, done = step + 1, done + size
        found.append(steps)
    return found


@given(
    length=st.integers(0, 40),
    replicas=st.integers(1, 4),
    changes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 6)), max_size=3, unique_by=lambda one: one[0]),
    last=st.sampled_from(["keep", "discard"]),
)
def test_all_ranks_change_in_the_step_of_the_schedule(
    length: int, replicas: int, changes: list[tuple[int, int]], last: str
) -> None:
    schedule = [(0, 2), *sorted(changes)]
    sampler = GrowingBatchSampler(SequentialSampler(length), schedule, last).for_ranks(replicas)
    for epoch, steps in enumerate(reference(length, replicas, schedule, last, 5)):
        assert [sorted(batch) for batch in sampler.iter_epoch(epoch)] == [batch for step in steps for batch in step]
        assert sampler.len_epoch(epoch) == replicas * len(steps)


def loader_of(inner: str = "own", replicas: int = 1, rank: int = 0, **given: Any) -> ShardedDataLoader[Any]:
    sampler: Any = RandomSampler(LENGTH, seed=3)
    if inner == "torch":
        sampler = torch_data.RandomSampler(range(LENGTH))
    growing = GrowingBatchSampler(sampler, SCHEDULE, **given)
    return ShardedDataLoader(range(LENGTH), batch_sampler=growing, seed=1, num_replicas=replicas, rank=rank)


def epochs_of(loader: ShardedDataLoader[Any], count: int) -> Any:
    return (batch.tolist() for _ in range(count) for batch in loader)


@pytest.mark.slow
@pytest.mark.parametrize("given", [{}, {"last_batch": "discard"}])
@pytest.mark.parametrize("inner", ["own", "torch"])
def test_a_state_after_any_batch_goes_on_with_the_same_batches(inner: str, given: dict[str, Any]) -> None:
    whole = list(epochs_of(loader_of(inner, **given), 4))
    for done in range(len(whole) - 1):
        first = loader_of(inner, **given)
        assert list(islice(epochs_of(first, 4), done)) == whole[:done]
        resumed = loader_of(inner, **given)
        resumed.load_state_dict(first.state_dict())
        assert list(epochs_of(resumed, 4))[: len(whole) - done] == whole[done:]


def test_other_ranks_go_on_with_the_rest_of_the_epoch_and_with_the_schedule_of_the_same_global_batch() -> None:
    first = [loader_of(replicas=2, rank=rank) for rank in range(2)]
    steps = [iter(one) for one in first]
    seen = [index for _ in range(3) for one in steps for index in next(one).tolist()]
    for replicas in (1, 3):
        resumed = [loader_of(replicas=replicas, rank=rank) for rank in range(replicas)]
        for one in resumed:
            one.load_state_dict(first[0].state_dict())
        rest = [index for one in resumed for batch in one for index in batch.tolist()]
        assert set(seen + rest) == set(range(LENGTH))
        assert replicas > 1 or not set(seen) & set(rest)  # three ranks do not divide what is left

    def sizes(scale: int, replicas: int) -> list[int]:
        schedule = [(step, size * scale) for step, size in SCHEDULE]
        sampler = GrowingBatchSampler(SequentialSampler(60), schedule).for_ranks(replicas)
        return [
            sum(map(len, islice(batches, replicas)))
            for epoch in range(3)
            for batches in [sampler.iter_epoch(epoch)]
            for _ in range(sampler.len_epoch(epoch) // replicas)
        ]

    assert sizes(4, 1) == sizes(2, 2) == sizes(1, 4)


def test_one_size_is_an_order_of_equal_batches_and_a_far_epoch_takes_no_time() -> None:
    inner = RandomSampler(LENGTH, seed=2)
    assert list(GrowingBatchSampler(inner, [(0, 3)]).iter_epoch(2)) == list(BatchSampler(inner, 3).iter_epoch(2))
    far = GrowingBatchSampler(inner, SCHEDULE)
    assert [len(batch) for batch in far.iter_epoch(10**9)] == [3] * 6 + [2]


@pytest.mark.parametrize(
    ("schedule", "error", "message"),
    [
        ([], TypeError, "give pairs"),
        ([(5, 8)], ValueError, "begins with step 5: it must begin with 0"),
        ([(0, 8), (10, 16), (10, 32)], ValueError, "goes back, from step 10 to step 10"),
        ([(0, 8), (10, 16), (5, 32)], ValueError, "goes back, from step 10 to step 5"),
        ([(0, 0)], ValueError, "a batch size of the schedule must be at least 1"),
        ([(0, 2.5)], TypeError, "a batch size of the schedule must be an integer"),
        ([0, 8], TypeError, "give pairs"),
        ({0: 8, 10: 16, 5: 32}, ValueError, "goes back, from step 10 to step 5"),
        (8, TypeError, "give pairs"),
    ],
)
def test_a_schedule_that_is_none_is_refused(schedule: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        GrowingBatchSampler(SequentialSampler(4), schedule)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: GrowingBatchSampler(SequentialSampler(4), [(0, 2)], "rollover"), "'keep' or 'discard'"),
        (
            lambda: ShardedDataLoader(
                range(4), batch_sampler=GrowingBatchSampler(SequentialSampler(4), [(0, 2)]), steps_per_epoch=3
            ),
            "steps_per_epoch needs epochs of equally many batches",
        ),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_schedule_may_be_a_dict() -> None:
    pairs = GrowingBatchSampler(SequentialSampler(9), [(0, 1), (2, 3)])
    assert list(GrowingBatchSampler(SequentialSampler(9), {0: 1, 2: 3})) == list(pairs)
