"""From batches to numbered tasks: what is right becomes a task, what is wrong becomes the error in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.messages import Task
from sharded_loader.engine.plan import EpochPlan, Split


class Batches:
    """What a plan needs of an `EpochReading`."""

    def __init__(self, batch: Callable[[int], Any]) -> None:
        self.batch, self.ready = batch, dict[int, Any]()


def plan_of(*batches: Any, length: int | None = 10, split: Split | None = None, may_shard: bool = False) -> EpochPlan:
    """A plan of epoch 3 of run 7. The batches have two samples each, as far as positions go."""

    def batch(number: int) -> Any:
        if number >= len(batches):
            return None
        if isinstance(batches[number], Exception):
            raise batches[number]
        return batches[number], 2 * number

    return EpochPlan(7, 3, Batches(batch), length, split or Split(), may_shard=may_shard)


def task_of(plan: EpochPlan, seq: int) -> Task:
    found = plan.task(seq)
    assert isinstance(found, Task)
    return found


def test_a_batch_is_a_task_that_knows_its_run_number_epoch_and_first_position() -> None:
    task = task_of(plan_of([5, 6], [7, 8]), 1)
    assert (task.run, task.seq, task.epoch, task.position) == (7, 1, 3, 2)
    assert task.shards == ([7, 8],)
    assert not task.sharded


def test_after_the_last_batch_there_is_none() -> None:
    assert plan_of([1]).task(1) is None


def test_batches_can_be_asked_for_again_in_any_order() -> None:
    plan = plan_of([0], [1], [2])
    assert [task_of(plan, seq).shards[0] for seq in (2, 0, 2)] == [[2], [0], [2]]


def test_an_array_of_indices_stays_the_same_array() -> None:
    batch = np.array([3, 9])
    assert task_of(plan_of(batch), 0).shards[0] is batch


@pytest.mark.parametrize(
    "batch", [[np.int64(3), np.int32(9)], np.array([3, 9], np.int32), (3, 9)], ids=["scalars", "int32", "tuple"]
)
def test_other_kinds_of_indices_become_plain_ints(batch: Any) -> None:
    indices = task_of(plan_of(batch), 0).shards[0]
    assert indices == [3, 9]
    assert {type(index) for index in indices} == {int}


def test_a_list_is_copied_because_a_sampler_may_fill_it_again() -> None:
    batch = [1, 2]
    task = task_of(plan_of(batch), 0)
    batch[:] = [8, 9]
    assert task.shards == ([1, 2],)


def test_keys_that_are_no_numbers_are_left_to_the_dataset() -> None:
    assert task_of(plan_of(["a", ("b", 1)]), 0).shards == (["a", ("b", 1)],)


@pytest.mark.parametrize("batch", [[10], [-11], np.array([10]), np.array([3, -11])], ids=str)
def test_an_index_out_of_range_is_the_error_of_its_batch_only(batch: Any) -> None:
    plan = plan_of([0], batch, [1])
    assert isinstance(plan.task(1), IndexError)
    assert "epoch 3, batch 1: the sampler yielded index" in str(plan.task(1))
    assert isinstance(plan.task(2), Task)


@pytest.mark.parametrize("batch", [[9, -10], np.array([9, -10])], ids=["list", "array"])
def test_the_first_and_the_last_index_are_in_range_counted_from_either_end(batch: Any) -> None:
    assert list(task_of(plan_of(batch), 0).shards[0]) == [9, -10]


def test_batches_of_one_block_are_checked_together_and_a_bad_one_alone_is_an_error() -> None:
    good, bad = np.arange(8), np.array([1, 2, 3, 10, 4, 5, -11, 6])
    plan = plan_of(*good.reshape(4, 2), *bad.reshape(4, 2))
    for seq in range(4):
        assert task_of(plan, seq).shards[0].tolist() == [2 * seq, 2 * seq + 1]
        assert plan._within is good
    for seq in (5, 7):
        assert "the sampler yielded index" in str(plan.task(seq))
    for seq in (4, 6):
        assert task_of(plan, seq).shards[0].base is bad


def test_without_a_length_no_index_is_out_of_range() -> None:
    assert list(task_of(plan_of(np.array([10**12]), length=None), 0).shards[0]) == [10**12]


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ([], ValueError, "is empty"),
        (np.array([], np.int64), ValueError, "is empty"),
        (7, TypeError, "the batch sampler yielded 7"),
        ("ab", TypeError, "the batch sampler yielded 'ab'"),
    ],
    ids=["empty", "empty array", "number", "string"],
)
def test_what_is_no_batch_is_an_error_that_says_where(batch: Any, error: type[Exception], text: str) -> None:
    found = plan_of([0], batch).task(1)
    assert type(found) is error
    assert "epoch 3, batch 1" in str(found)
    assert text in str(found)


def test_what_a_sampler_raises_is_the_error_in_its_place_with_a_note() -> None:
    raised = KeyError("no file")
    found = plan_of(raised).task(0)
    assert found is raised
    assert "raised by the sampler, in epoch 3 at batch 0" in "\n".join(raised.__notes__)  # type: ignore[attr-defined]


def test_a_given_batch_may_be_a_list_of_shards() -> None:
    task = task_of(plan_of([[1, 2], [3]], may_shard=True), 0)
    assert task.shards == ([1, 2], [3])
    assert task.sharded


def test_indices_of_a_sampler_may_be_lists_and_are_no_shards() -> None:
    assert not task_of(plan_of([(1, 2), (3,)], may_shard=False), 0).sharded


@pytest.mark.parametrize(
    ("batch", "text"),
    [([[1], []], "shard 1 is empty"), ([[1], [2], [3]], "has 3 shards, but there are only 2 devices")],
    ids=["empty shard", "too many"],
)
def test_shards_that_no_device_can_take_are_an_error(batch: Any, text: str) -> None:
    assert text in str(plan_of(batch, split=Split(None, 2), may_shard=True).task(0))


def test_a_flat_batch_is_split_by_the_weights_of_the_moment() -> None:
    split = Split(2)
    plan = plan_of([1, 2, 3, 4], split=split)
    task = task_of(plan, 0)
    assert plan.splits
    assert [list(shard) for shard in plan.split(task).shards] == [[1, 2], [3, 4]]
    split.weights = [3.0, 1.0]
    assert [list(shard) for shard in plan.split(task).shards] == [[1, 2, 3], [4]]


def test_a_batch_that_came_in_shards_is_not_split_again() -> None:
    plan = plan_of([[1, 2, 3], [4]], split=Split(2, 2), may_shard=True)
    task = task_of(plan, 0)
    assert plan.split(task) is task


def test_without_shards_nothing_is_split() -> None:
    plan = plan_of([1, 2])
    assert not plan.splits
