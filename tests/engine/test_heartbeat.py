"""A heartbeat tells where a worker was when it died."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sharded_loader.engine.heartbeat import (
    BEGINNING,
    IDLE,
    IN_BATCHIFY,
    IN_BULK,
    SENDING,
    WORDS,
    heartbeat_in,
    is_at,
    new_heartbeat,
    phase,
    sample_in,
)
from sharded_loader.engine.messages import Task

TASK = Task(4, 5, 0, 0, ([70, 80], [90]), True)


def test_a_heartbeat_is_at_the_task_of_its_run_and_number_until_it_is_idle() -> None:
    assert not is_at(new_heartbeat(), Task(0, 0, 0, 0, ([1],), False))
    assert is_at([4, 5, 0, BEGINNING], TASK)
    assert not any(is_at(at, TASK) for at in ([4, 6, 0, 0], [3, 5, 0, 0], [4, 5, 0, IDLE]))


def test_the_sample_is_told_by_its_place_in_its_shard_where_a_single_one_is_read() -> None:
    assert [sample_in(TASK, [4, 5, *at]) for at in [(0, 0), (0, 1), (1, 0)]] == [[70], [80], [90]]
    assert [sample_in(TASK, [4, 5, 0, at]) for at in (IN_BULK, IN_BATCHIFY, SENDING, IDLE, BEGINNING)] == [[]] * 5
    assert sample_in(TASK, [4, 5, 2, 0]) == sample_in(TASK, [4, 5, 1, 1]) == []  # places that do not exist


def test_the_sample_of_an_array_is_a_plain_int() -> None:
    (index,) = sample_in(replace(TASK, shards=(np.array([3, 4]),)), [4, 5, 0, 1])
    assert type(index) is int


def test_every_phase_has_words() -> None:
    words = {phase([0, 0, 0, at]) for at in (IN_BULK, IN_BATCHIFY, SENDING, IDLE, BEGINNING, 7)}
    assert len(words) == 6
    assert phase([0, 0, 0, 7]) == "reading a sample"


def test_heartbeats_in_shared_memory_do_not_touch_each_other() -> None:
    memory = bytearray(8 * WORDS * 2)
    first, second = heartbeat_in(memory, 0), heartbeat_in(memory, 1)
    first[:4] = memoryview(np.array([1, 2, 3, 4])).cast("B").cast("q")
    assert (list(first[:4]), list(second[:4])) == ([1, 2, 3, 4], [0, 0, 0, 0])
