"""Keys of any kind to send, and replies of any kind to read: what cannot be sent or read is one batch's error."""

from __future__ import annotations

import pickle
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from samples import OneWay

from sharded_loader.engine.messages import Result, Task
from sharded_loader.memory.codec import encode, encode_error
from sharded_loader.pools.supervised import decode_result, fields_of


class Key:
    def __init__(self, name: str) -> None:
        self.name = name


def task(*indices: Any) -> Task:
    return Task(1, 2, 3, 4, (list(indices),), False)


def test_ints_strings_and_arrays_need_no_pickle_of_their_own() -> None:
    for plain in (task(1, "a"), replace(task(), shards=(np.arange(3),))):
        assert fields_of(plain, forked=True) == fields_of(plain, forked=False) == plain.fields


@pytest.mark.parametrize("forked", [True, False])
def test_a_key_of_the_users_own_class_travels_or_is_an_error_that_says_what_to_do(forked: bool) -> None:
    sent = fields_of(task(1, Key("a")), forked=forked)
    assert sent is not None
    got = pickle.loads(sent)
    assert (got[:4], got[4][0][0], got[4][0][1].name) == ((1, 2, 3, 4), 1, "a")
    with pytest.raises(TypeError, match="cannot be sent to a worker process.*thread_pool=True"):
        fields_of(task(threading.Lock()), forked=forked)


def read(reply: Any, sent: Task | None = None) -> Result:
    return decode_result(1, 2, memoryview(encode(reply).head), [], sent)


def test_exceptions_of_a_reply_are_exceptions_again() -> None:
    result = read(Result(1, 2, error=encode_error(KeyError("k")), skipped=((7, encode_error(ValueError("v"))),)))  # type: ignore[arg-type]
    assert isinstance(result.error, KeyError)
    ((index, skipped),) = result.skipped
    assert (index, type(skipped)) == (7, ValueError)


def test_a_reply_without_exceptions_is_the_result() -> None:
    result = read(Result(1, 2, {"x": 3}, 1, lost_shards=(1,)))
    assert (result.batch, result.samples, result.error, result.lost_shards) == ({"x": 3}, 1, None, (1,))


def test_a_batch_that_cannot_be_unpickled_here_is_the_error_of_its_batch() -> None:
    result = read(Result(1, 2, OneWay()), task(5))
    assert isinstance(result.error, TypeError)
    assert "cannot be unpickled in this process (ValueError" in str(result.error)
    assert any("epoch 3, batch 2" in note for note in result.error.__notes__)
