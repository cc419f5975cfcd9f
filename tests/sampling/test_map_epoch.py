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
    epoch = epoch_of([5, 6], [7, 8])
    for seq in (1, 0, 1):  # again, in any order
        task = task_of(epoch, seq)
        assert (task.run, task.seq, task.epoch, task.position) == (7, seq, 3, 2 * seq)
        assert task.shards == ([5 + 2 * seq, 6 + 2 * seq],) and not task.sharded
    assert epoch.task(2) is None


def test_an_array_of_indices_stays_the_same_array_and_a_list_is_copied() -> None:
    array, batch = np.array([3, 9]), [1, 2]
    assert task_of(epoch_of(array), 0).shards[0] is array
    task = task_of(epoch_of(batch), 0)
    batch[:] = [8, 9]  # a sampler may fill it again
    assert task.shards == ([1, 2],)
    assert task_of(epoch_of(["a", ("b", 1)]), 0).shards == (["a", ("b", 1)],)  # keys are left to the dataset


@pytest.mark.parametrize(
    "batch", [[np.int64(3), np.int32(9)], np.array([3, 9], np.int32), (3, 9)], ids=["scalars", "int32", "tuple"]
)
def test_other_kinds_of_indices_become_plain_ints(batch: Any) -> None:
    indices = task_of(epoch_of(batch), 0).shards[0]
    assert indices == [3, 9]
    assert {type(index) for index in indices} == {int}


def test_batches_of_one_block_are_checked_together_and_a_bad_one_alone_is_an_error() -> None:
    good, bad = np.arange(8), np.array([1, 2, 3, 10, 4, 5, -11, 6])
    epoch = epoch_of(*good.reshape(4, 2), *bad.reshape(4, 2))
    for seq in range(4):
        assert task_of(epoch, seq).shards[0].tolist() == [2 * seq, 2 * seq + 1]
    for seq in (5, 7):
        assert "the sampler yielded index" in str(epoch.task(seq))
    for seq in (4, 6):
        assert task_of(epoch, seq).shards[0].base is bad


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ([], ValueError, "is empty"),
        (np.array([], np.int64), ValueError, "is empty"),
        (7, TypeError, "the batch sampler yielded 7"),
        ("ab", TypeError, "the batch sampler yielded 'ab'"),
        ([10], IndexError, "the sampler yielded index"),
        ([-11], IndexError, "the sampler yielded index"),
        (np.array([10]), IndexError, "the sampler yielded index"),
        (np.array([3, -11]), IndexError, "the sampler yielded index"),
        ([[1], []], ValueError, "shard 1 is empty"),
        ([[1], [2], [3]], ValueError, "has 3 shards, but there are only 2 devices"),
    ],
    ids=str,
)
def test_what_is_no_batch_is_an_error_in_its_place_that_says_where(
    batch: Any, error: type[Exception], text: str
) -> None:
    epoch = epoch_of([0], batch, [9, -10], max_shards=2, given_batches=True)
    found = epoch.task(1)
    assert type(found) is error and "epoch 3, batch 1" in str(found) and text in str(found)
    assert task_of(epoch, 2).shards == ([9, -10],)


def test_indices_count_from_either_end_of_a_dataset_that_has_a_length() -> None:
    assert list(task_of(epoch_of(np.array([9, -10])), 0).shards[0]) == [9, -10]
    assert list(task_of(epoch_of(np.array([10**12]), length=None), 0).shards[0]) == [10**12]


def test_a_given_batch_may_be_a_list_of_shards_and_indices_of_a_sampler_may_be_lists() -> None:
    task = task_of(epoch_of([[1, 2], [3]], given_batches=True), 0)
    assert task.shards == ([1, 2], [3]) and task.sharded
    assert not task_of(epoch_of([(1, 2), (3,)]), 0).sharded


def test_what_a_sampler_raises_is_the_error_in_its_place_with_a_note() -> None:
    raised = KeyError("no file")
    found = epoch_of(raised).task(0)
    assert found is raised
    assert "raised by the sampler, in epoch 3 at batch 0" in "\n".join(raised.__notes__)  # type: ignore[attr-defined]
