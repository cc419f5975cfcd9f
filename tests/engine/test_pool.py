"""What every pool is: the verbs that it may leave out, and the arguments that pools share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.messages import Job, Result, Task
from sharded_loader.engine.pool import Pool, PoolBroken, check_init_fn, check_num_workers, check_timeout


class Least(Pool):
    """A pool with what a pool must have, and no more."""

    started = False  # type: ignore[assignment]

    def start(self, job: Job) -> None: ...

    def submit(self, tasks: Sequence[Task]) -> None: ...

    def wait(self, block: bool = True) -> Sequence[Result]:
        return ()

    def close(self) -> None: ...


def test_a_pool_may_leave_out_wake_cancel_and_closer() -> None:
    pool = Least()
    pool.wake()
    pool.cancel(3)
    pool.closer()()


def test_a_pool_without_a_verb_cannot_be_made() -> None:
    class NoWait(Least):
        wait = Pool.wait  # type: ignore[assignment]

    with pytest.raises(TypeError, match="wait"):
        NoWait()


def test_a_pool_puts_batches_together_in_the_memory_that_it_is_told() -> None:
    pool = Least()
    assert pool.empty((2,), np.dtype("f4")).shape == (2,)
    made: list[Any] = []

    def empty(shape: tuple[int, ...], dtype: Any) -> Any:
        made.append(shape)
        return np.empty(shape, dtype)

    pool.use_memory(empty, lambda mapping: None)
    pool.empty((3,), np.dtype("f4"))
    assert made == [(3,)]


def test_a_broken_pool_says_what_the_user_is_told() -> None:
    error = OSError("no memory")
    assert PoolBroken(error).error is error


@pytest.mark.parametrize("given", [1, 4, np.int64(2)])
def test_a_number_of_workers_is_an_int(given: Any) -> None:
    found = check_num_workers(given)
    assert (found, type(found)) == (given, int)


@pytest.mark.parametrize(("given", "error"), [(0, ValueError), (-1, ValueError), (True, TypeError), ("2", TypeError)])
def test_another_number_of_workers_is_rejected(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="num_workers must be"):
        check_num_workers(given)


@pytest.mark.parametrize("given", [0, -1.0, float("inf"), True, "1"])
def test_a_timeout_that_is_no_positive_number_is_rejected(given: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="timeout is"):
        check_timeout(given)


def test_a_timeout_is_seconds_or_none() -> None:
    assert (check_timeout(None), check_timeout(3)) == (None, 3.0)


def test_a_worker_init_fn_must_be_callable() -> None:
    check_init_fn(None)
    check_init_fn(print)
    with pytest.raises(TypeError, match="worker_init_fn is 3"):
        check_init_fn(3)
