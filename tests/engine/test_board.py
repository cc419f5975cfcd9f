"""Where a worker is, read from a few integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from sharded_loader.engine.board import (
    BEGINNING,
    IDLE,
    IN_BATCHIFY,
    IN_BULK,
    SAMPLE,
    WORDS,
    board_in,
    is_at,
    new_board,
    phase,
    sample_in,
)
from sharded_loader.engine.messages import Task

TASK = Task(3, 5, 0, 0, ([7, 8], np.array([9, 10])), True)


@pytest.mark.parametrize(
    ("words", "sample"),
    [
        ([3, 5, 0, 1], [8]),
        ([3, 5, 1, 0], [9]),
        ([3, 5, 1, 2], []),  # it is behind the last one
        ([3, 5, 2, 0], []),
        ([3, 5, 1, IN_BULK], []),
        ([3, 5, 1, IN_BATCHIFY], []),
    ],
)
def test_a_board_names_the_sample_that_is_being_read(words: list[int], sample: list[int]) -> None:
    found = sample_in(TASK, words)
    assert found == sample and all(type(index) is int for index in found)


@pytest.mark.parametrize(
    ("words", "busy"),
    [([3, 5, 0, 1], True), ([3, 5, 0, BEGINNING], True), ([3, 5, 0, IDLE], False), ([2, 5, 0, 1], False)],
)
def test_a_worker_is_at_a_task_that_it_has_begun(words: list[int], busy: bool) -> None:
    assert is_at(words, TASK) == busy


def test_boards_of_workers_lie_side_by_side_in_one_memory() -> None:
    memory: Any = bytearray(3 * WORDS * 8)
    boards = [board_in(memory, number) for number in range(3)]
    boards[1][SAMPLE] = -5
    assert np.frombuffer(memory, np.int64).reshape(3, WORDS)[:, SAMPLE].tolist() == [0, -5, 0]
    for board in boards:
        board.release()


def test_a_new_board_is_idle_and_its_own() -> None:
    board = new_board()
    board[SAMPLE] = 2
    assert phase(new_board()) == "between batches" and phase(board) == "reading a sample"
