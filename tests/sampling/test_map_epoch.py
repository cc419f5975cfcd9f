"""From batches to numbered tasks: what is right becomes a task, what is wrong becomes the error in its place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.messages import Task
from sharded_loader.sampling.epoch import MapEpoch, SamplerSource
from sharded_loader.sampling.state import Signature


class Given(MapEpoch):
    """Epoch 3 of run 7, of these batches. They have two samples each, as far as positions go."""

    def __init__(self, batches: tuple[Any, ...], max_shards: int | None, given_batches: bool) -> None:
        signature = Signature(1, None, "", None, (), None if given_batches else 2, "keep")
        super().__init__(SamplerSource([], signature, 1, 0, False, max_shards=max_shards), 3, None)
        self.run, self._own = 7, batches

    def batch(self, number: int) -> Any:
        if number >= len(self._own):
            return None
        if isinstance(self._own[number], Exception):
            raise self._own[number]
        return self._own[number], 2 * number


def epoch_of(
    *batches: Any, length: int | None = 10, max_shards: int | None = None, given_batches: bool = False
) -> MapEpoch:
    epoch = Given(batches, max_shards, given_batches)
    epoch.limit = length
    return epoch


def task_of(epoch: MapEpoch, seq: int) -> Task:
    found = epoch.task(seq)
    assert isinstance(found, Task)
    return found


def test_a_batch_is_a_task_that_knows_its_run_number_epoch_and_first_position() -> None:
    task = task_of(epoch_of([5, 6], [7, 8]), 1)
    assert (task.run, task.seq, task.epoch, task.position) == (7, 1, 3, 2)
    assert task.shards == ([7, 8],)
    assert not task.sharded


def test_after_the_last_batch_there_is_none() -> None:
    assert epoch_of([1]).task(1) is None


def test_batches_can_be_asked_for_again_in_any_order() -> None:
    epoch = epoch_of([0], [1], [2])
    assert [task_of(epoch, seq).shards[0] for seq in (2, 0, 2)] == [[2], [0], [2]]


def test_an_array_of_indices_stays_the_same_array() -> None:
    batch = np.array([3, 9])
    assert task_of(epoch_of(batch), 0).shards[0] is batch


@pytest.mark.parametrize(
    "batch", [[np.int64(3), np.int32(9)], np.array([3, 9], np.int32), (3, 9)], ids=["scalars", "int32", "tuple"]
)
def test_other_kinds_of_indices_become_plain_ints(batch: Any) -> None:
    indices = task_of(epoch_of(batch), 0).shards[0]
    assert indices == [3, 9]
    assert {type(index) for index in indices} == {int}


def test_a_list_is_copied_because_a_sampler_may_fill_it_again() -> None:
    batch = [1, 2]
    task = task_of(epoch_of(batch), 0)
    batch[:] = [8, 9]
    assert task.shards == ([1, 2],)


def test_keys_that_are_no_numbers_are_left_to_the_dataset() -> None:
    assert task_of(epoch_of(["a", ("b", 1)]), 0).shards == (["a", ("b", 1)],)


@pytest.mark.parametrize("batch", [[10], [-11], np.array([10]), np.array([3, -11])], ids=str)
def test_an_index_out_of_range_is_the_error_of_its_batch_only(batch: Any) -> None:
    epoch = epoch_of([0], batch, [1])
    assert isinstance(epoch.task(1), IndexError)
    assert "epoch 3, batch 1: the sampler yielded index" in str(epoch.task(1))
    assert isinstance(epoch.task(2), Task)


@pytest.mark.parametrize("batch", [[9, -10], np.array([9, -10])], ids=["list", "array"])
def test_the_first_and_the_last_index_are_in_range_counted_from_either_end(batch: Any) -> None:
    assert list(task_of(epoch_of(batch), 0).shards[0]) == [9, -10]


def test_batches_of_one_block_are_checked_together_and_a_bad_one_alone_is_an_error() -> None:
    good, bad = np.arange(8), np.array([1, 2, 3, 10, 4, 5, -11, 6])
    epoch = epoch_of(*good.reshape(4, 2), *bad.reshape(4, 2))
    for seq in range(4):
        assert task_of(epoch, seq).shards[0].tolist() == [2 * seq, 2 * seq + 1]
        assert epoch._checked_array is good
    for seq in (5, 7):
        assert "the sampler yielded index" in str(epoch.task(seq))
    for seq in (4, 6):
        assert task_of(epoch, seq).shards[0].base is bad


def test_without_a_length_no_index_is_out_of_range() -> None:
    assert list(task_of(epoch_of(np.array([10**12]), length=None), 0).shards[0]) == [10**12]


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
    found = epoch_of([0], batch).task(1)
    assert type(found) is error
    assert "epoch 3, batch 1" in str(found)
    assert text in str(found)


def test_what_a_sampler_raises_is_the_error_in_its_place_with_a_note() -> None:
    raised = KeyError("no file")
    found = epoch_of(raised).task(0)
    assert found is raised
    assert "raised by the sampler, in epoch 3 at batch 0" in "\n".join(raised.__notes__)  # type: ignore[attr-defined]


def test_a_given_batch_may_be_a_list_of_shards() -> None:
    task = task_of(epoch_of([[1, 2], [3]], given_batches=True), 0)
    assert task.shards == ([1, 2], [3])
    assert task.sharded


def test_indices_of_a_sampler_may_be_lists_and_are_no_shards() -> None:
    assert not task_of(epoch_of([(1, 2), (3,)], given_batches=False), 0).sharded


@pytest.mark.parametrize(
    ("batch", "text"),
    [([[1], []], "shard 1 is empty"), ([[1], [2], [3]], "has 3 shards, but there are only 2 devices")],
    ids=["empty shard", "too many"],
)
def test_shards_that_no_device_can_take_are_an_error(batch: Any, text: str) -> None:
    assert text in str(epoch_of(batch, max_shards=2, given_batches=True).task(0))
