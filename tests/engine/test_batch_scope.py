"""Where a reader is: for errors, for the loop around it."""

from __future__ import annotations

import signal
from typing import Any

import numpy as np

from sharded_loader.base.errors import SampleReadError, notes_of
from sharded_loader.engine.heartbeat import SHARD, UNUSED
from sharded_loader.engine.messages import PartIndices, Task
from sharded_loader.engine.reader import BatchScope
from sharded_loader.randomness.rng import OF_BATCH


def scope_of(*shards: Any, worker: str | None = None) -> BatchScope:
    at = BatchScope(7, 2)
    at.task = Task(0, 4, 2, 0, shards, len(shards) > 1)
    at.worker, at.empty, at.heartbeat = worker, np.empty, list(UNUSED)
    at.indices = shards[0]
    return at


def reading(at: BatchScope, position: int) -> None:
    at.items = iter(range(len(at.indices)))
    for _ in range(position + 1):
        next(at.items)


def test_an_error_names_the_sample_that_is_read() -> None:
    at = scope_of([5, 6, 7])
    reading(at, 1)
    error = at.locate_error(KeyError("x"))
    where, again = notes_of(error)
    assert where == "sharded_loader: in epoch 2, batch 4, sample 6" and again.endswith("loader.read(6, epoch=2)")


def test_with_shards_and_a_worker_it_names_them_too() -> None:
    at = scope_of([5], [6, 7], worker="worker 1 (pid 9)")
    at.heartbeat[SHARD], at.indices = 1, [6, 7]
    reading(at, 0)
    assert notes_of(at.locate_error(KeyError("x")))[0].endswith("batch 4, shard 1, sample 6, worker 1 (pid 9)")


def test_samples_of_a_part_are_named_by_part_and_place() -> None:
    at = scope_of(PartIndices(3, range(8, 12)))
    reading(at, 2)
    assert "sample (3, 10)" in notes_of(at.locate_error(KeyError("x")))[0]
    at.set_index(OF_BATCH)
    where, again = notes_of(at.locate_error(KeyError("x")))
    assert "sample" not in where.partition("batch 4")[2]
    assert again.endswith("[loader.read(i, epoch=2) for i in ((3, 8), (3, 9), (3, 10), (3, 11))]")


def test_samples_that_do_not_fit_are_named_both() -> None:
    at = scope_of([5, 6, 7])
    at.set_index(OF_BATCH)
    at.uncollatable = 0, 2
    assert "sample 7 (it does not fit sample 5)" in notes_of(at.locate_error(ValueError("x")))[0]


def test_what_would_end_a_loop_or_a_program_is_an_error_like_others() -> None:
    at = scope_of([5])
    reading(at, 0)
    for error in (StopIteration("x"), SystemExit(3), KeyboardInterrupt()):
        assert type(at.locate_error(error)) is SampleReadError


def test_only_in_the_loop_s_own_thread_an_interrupt_passes() -> None:
    assert scope_of([1]).is_for_caller(KeyboardInterrupt())
    assert not scope_of([1], worker="thread 1").is_for_caller(KeyboardInterrupt())
    assert not scope_of([1]).is_for_caller(ValueError()) and not scope_of([1]).is_for_caller(SystemExit())


def test_a_handler_that_raises_inside_the_dataset_is_the_dataset_s() -> None:
    class TimeIsUp(Exception):
        pass

    def handler(number: int, frame: Any) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGTERM, handler)
    try:
        signal.raise_signal(signal.SIGTERM)
    except TimeIsUp as error:
        assert not scope_of([1]).is_for_caller(error)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_scopes_of_two_batches_share_nothing() -> None:
    one, other = scope_of([1]), scope_of([2])
    one.skipped += ((1, ValueError()),)
    one.dropped += 1
    assert other.skipped == () and other.dropped == 0 and other.point is None
