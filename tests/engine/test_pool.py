"""What every pool is: the verbs that it may leave out, and the arguments that pools share."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.pool import Pool, check_init_fn, check_num_workers, check_timeout


class Least(Pool):
    """A pool with what a pool must have, and no more."""

    started = False  # type: ignore[assignment]
    start = submit = wait = close = lambda *_: None  # type: ignore[assignment]


def test_a_pool_may_leave_out_wake_cancel_and_closer_and_no_other_verb() -> None:
    pool = Least()
    pool.wake()
    pool.cancel(3)
    pool.closer()()
    with pytest.raises(TypeError, match="wait"):
        type("NoWait", (Least,), {"wait": Pool.wait})()


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


def test_numbers_of_workers_are_ints_and_timeouts_seconds() -> None:
    for given in (1, 4, np.int64(2)):
        assert (found := check_num_workers(given)) == given and type(found) is int
    assert (check_timeout(None), check_timeout(3)) == (None, 3.0)
    check_init_fn(None), check_init_fn(print)


@pytest.mark.parametrize(
    ("check", "refused", "error", "text"),
    [
        (check_num_workers, (0, -1), ValueError, "num_workers must be"),
        (check_num_workers, (True, "2", 2.0, None), TypeError, "num_workers must be an integer"),
        (check_timeout, (0, -1.0, float("inf"), True, "1"), (TypeError, ValueError), "timeout is"),
        (check_init_fn, (3,), TypeError, "worker_init_fn is 3"),
    ],
)
def test_other_arguments_are_refused(check: Any, refused: Any, error: Any, text: str) -> None:
    for given in refused:
        with pytest.raises(error, match=text):
            check(given)
