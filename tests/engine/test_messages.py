"""What travels between the main process and a worker arrives as it was sent."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest

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
from sharded_loader.engine.messages import (
    NOTHING,
    PartBatch,
    PartIndices,
    PartPoint,
    Result,
    Stream,
    Task,
    pack_reply,
    pack_result,
    unpack_reply,
)
from sharded_loader.memory.codec import SlotWriter, decode, encode


@pytest.mark.parametrize(
    "result",
    [
        Result(0, 0, np.ones(2), error=ValueError()),
        Result(0, 0, np.ones(2), skipped=((1, ValueError()),)),
        Result(0, 0, np.ones(2), lost_shards=(1,)),
        Result(0, 0, {"x": np.ones(2)}),
        Result(0, 0, [np.ones(2), 1]),
        Result(0, 0, [np.ones(5000)] * 2),
    ],
    ids=["error", "skipped", "lost", "dict", "number", "one array twice"],
)
def test_only_results_of_plain_arrays_alone_travel_without_their_classes(result: Result) -> None:
    assert pack_result(result, SlotWriter(None)) is None


def test_several_replies_lie_one_behind_the_other_and_nothing_is_itself_in_every_process() -> None:
    rest = memoryview(pack_reply(1, 2, 30, encode("a")) + pack_reply(4, 5, 60, encode(NOTHING)))
    found = []
    while len(rest):
        run, seq, wanted, buffers, pickled, rest, _ = unpack_reply(rest)
        found.append((run, seq, wanted, buffers, decode(pickled, [])))
    assert found == [(1, 2, 30, 0, "a"), (4, 5, 60, 0, NOTHING)] and found[1][-1] is NOTHING


def test_indices_of_a_part_are_a_sequence_and_slices_are_again_and_travel_in_few_bytes() -> None:
    indices = PartIndices(2, range(8, 12))
    assert list(indices) == [(2, 8), (2, 9), (2, 10), (2, 11)] and len(indices) == 4
    assert indices[-1] == (2, 11) and (2, 9) in indices and indices.index((2, 10)) == 2
    part = indices[1:3]
    assert type(part) is PartIndices and list(part) == [(2, 9), (2, 10)]
    assert list(indices[4:]) == [] and not indices[4:]
    pickled = pickle.dumps(PartIndices(3, range(1 << 20)), protocol=5)
    assert len(pickled) < 120
    assert ((found := pickle.loads(pickled)).part, found.places) == (3, range(1 << 20))


def test_a_part_begins_before_its_first_sample_and_its_batches_in_one_reading_are_of_the_same_part() -> None:
    assert PartPoint() == PartPoint(batches=0, passes=0, samples=0, checksum=0, ended=False, state=None)
    assert Stream(3, 8)[:4] == (3, 8, False, False)
    batch = PartBatch(stream=4, oldest=2, number=1, batch=7, point=PartPoint())
    assert batch.is_same(batch._replace(batch=9, oldest=3, point=PartPoint(3)))
    assert not any(map(batch.is_same, (batch._replace(stream=5), batch._replace(number=0), None)))


# -- a heartbeat tells where a worker was when it died ----------------------------------------------------------------


TASK = Task(4, 5, 0, 0, ([70, 80], [90]), True)


def test_a_heartbeat_is_at_the_task_of_its_run_and_number_until_it_is_idle() -> None:
    assert not is_at(new_heartbeat(), Task(0, 0, 0, 0, ([1],), False))
    assert is_at([4, 5, 0, BEGINNING], TASK)
    assert not any(is_at(at, TASK) for at in ([4, 6, 0, 0], [3, 5, 0, 0], [4, 5, 0, IDLE]))


def test_the_sample_is_told_by_its_place_in_its_shard_where_a_single_one_is_read_and_every_phase_has_words() -> None:
    assert [sample_in(TASK, [4, 5, *at]) for at in [(0, 0), (0, 1), (1, 0)]] == [[70], [80], [90]]
    assert sample_in(TASK, [4, 5, 2, 0]) == sample_in(TASK, [4, 5, 1, 1]) == []  # places that do not exist
    (index,) = sample_in(replace(TASK, shards=(np.array([3, 4]),)), [4, 5, 0, 1])
    assert type(index) is int
    phases = (IN_BULK, IN_BATCHIFY, SENDING, IDLE, BEGINNING)
    assert [sample_in(TASK, [4, 5, 0, at]) for at in phases] == [[]] * 5
    assert len({phase([0, 0, 0, at]) for at in phases} | {"reading a sample"}) == 6
    assert phase([0, 0, 0, 7]) == "reading a sample"


def test_heartbeats_in_shared_memory_do_not_touch_each_other() -> None:
    memory = bytearray(8 * WORDS * 2)
    first, second = heartbeat_in(memory, 0), heartbeat_in(memory, 1)
    first[:4] = memoryview(np.array([1, 2, 3, 4])).cast("B").cast("q")
    assert (list(first[:4]), list(second[:4])) == ([1, 2, 3, 4], [0, 0, 0, 0])
