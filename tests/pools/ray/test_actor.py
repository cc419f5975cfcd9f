"""An actor reads groups of tasks into one memory. Here without Ray: it is a class like any other."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from sharded_loader import ShardedDataLoader
from sharded_loader.engine.heartbeat import IDLE
from sharded_loader.engine.messages import Job, Result, Task, unpack_reply
from sharded_loader.memory.codec import decode, decode_error, encode
from sharded_loader.pools import task_reader
from sharded_loader.pools.supervised import decode_result
from sharded_loader.ray import actor
from sharded_loader.ray.actor import LoaderActor
from sharded_loader.sampling.epoch import Ahead


class Images:
    """Sample i is 4 KB of i; sample 13 cannot be read; sample 14 writes."""

    def __init__(self) -> None:
        self.rows = np.repeat(np.arange(50, dtype=np.uint8)[:, None], 4096, axis=1)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> np.ndarray[Any, Any]:
        if index == 13:
            raise KeyError("thirteen")
        if index == 14:
            self.rows[0] = 1
        return self.rows[index]


@pytest.fixture(autouse=True)
def this_is_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_reader, "_tell_torch", lambda *_: None)
    monkeypatch.setattr(actor, "here", lambda: ("node", "10.0.0.1"))


def begun(dataset: Any = None) -> LoaderActor:
    made = LoaderActor(1, 2, 1)
    encoded = encode(Job(dataset or Images(), None, 0))
    buffers = [np.frombuffer(bytes(buffer), np.uint8) for buffer in encoded.buffers]  # read-only, as Ray's
    said = made.begin((encoded.pickled, buffers))
    assert (said.failure, said.node, said.host) == (None, "node", "10.0.0.1")
    return made


def task(seq: int, *indices: int) -> tuple[int, int, tuple[Any, ...]]:
    return 0, seq, Task(0, seq, 0, 0, (list(indices),), False).fields


def read(made: LoaderActor, *tasks: tuple[int, int, tuple[Any, ...]]) -> tuple[list[Result], Any]:
    replies, places, memory, rest = made.read(pickle.dumps(tasks))
    others = iter(rest)
    buffers = (next(others) if at < 0 else memory[at : at + nbytes].copy() for at, nbytes in places)
    results, content = [], memoryview(replies)
    while len(content):
        run, seq, _, count, pickled, content, _ = unpack_reply(content)
        results.append(decode_result(run, seq, pickled, [next(buffers) for _ in range(count)], None))
    return results, memory


def test_the_batches_of_a_group_lie_in_one_memory_that_is_used_again() -> None:
    made = begun()
    read(made, task(0, 1, 2))  # what a batch needs is learned
    assert made.where() == [0, 0, 0, IDLE]
    results, memory = read(made, task(1, 3, 4), task(2, 5, 6))
    assert [result.batch[:, 0].tolist() for result in results] == [[3, 4], [5, 6]]
    assert memory.nbytes == 4 * 4096
    again, same = read(made, task(3, 7, 8), task(4, 9, 10))
    assert [result.batch[:, 0].tolist() for result in again] == [[7, 8], [9, 10]]
    assert same.ctypes.data == memory.ctypes.data


def test_the_error_of_one_batch_is_its_own() -> None:
    results, _ = read(begun(), task(0, 1), task(1, 13), task(2, 2))
    assert [result.error is None for result in results] == [True, False, True]
    assert isinstance(results[1].error, KeyError)
    assert "on 10.0.0.1" in "\n".join(results[1].error.__notes__)


def test_a_dataset_that_writes_into_its_arrays_is_told_that_they_are_shared() -> None:
    (result,), _ = read(begun(), task(0, 14))
    assert isinstance(result.error, ValueError)
    assert "all workers of a node share" in "\n".join(result.error.__notes__)


def test_the_tasks_of_a_cancelled_run_are_answered_and_not_read() -> None:
    made = begun()
    made.cancel(0)
    (result,), _ = read(made, task(0, 13))
    assert result.error is None
    assert result.batch is None


class Shards(Images):
    """Notes what it is told of the order."""

    told: Any = None

    def follow(self, *told: Any) -> None:
        Shards.told = told


def test_a_dataset_that_fetches_ahead_is_told_the_order_and_how_far_the_user_is() -> None:
    order_of_all = ShardedDataLoader(range(6), 2)._epochs.order
    encoded = encode(Ahead(order_of_all.epoch(0), order_of_all.epoch(1)))
    made, order = begun(Shards()), (encoded.pickled, encoded.buffers)
    made.follow(7, 2, order)
    batches, position, later = Shards.told
    assert (batches(2).tolist(), later(0).tolist(), later(9)) == ([4, 5], [0, 1], None)
    assert position() == 2
    made.read(pickle.dumps([task(3, 1)]), 7, 3)
    assert position() == 3
    made.read(pickle.dumps([task(4, 1)]), 6, 9)  # of an order that is not read any more
    assert position() == 3
    made.follow(8, 0, order)
    assert (position(), Shards.told[1]()) == (None, 0)
    made.cancel(8)
    assert Shards.told[1]() is None
    made.follow(8, 0, order)  # it came behind its end
    assert Shards.told[1]() is None


def test_a_module_that_the_node_lacks_is_told_with_the_remedy() -> None:
    class Lost:
        def __reduce__(self) -> Any:
            return __import__, ("a_module_that_is_not_there",)

    encoded = encode(Job(Lost(), None, 0))
    said = LoaderActor(0, 1, 1).begin((encoded.pickled, []))
    assert said.failure is not None
    error = decode_error(decode(said.failure))
    assert isinstance(error, ModuleNotFoundError)
    assert "runtime_env" in "\n".join(error.__notes__)
