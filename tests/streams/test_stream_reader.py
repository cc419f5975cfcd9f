"""Iterable data as a reader has it: batches from any point, copies, one part, and who is told of it."""

import itertools
import os
import threading

import numpy as np
import pytest
import torch.utils.data as torch_data
from refusing import in_child
from stream_samples import GoOn, Own, Parts, Stateful, WithStatefulRows
from torch.utils.data import get_worker_info

from sharded_loader.engine.heartbeat import IN_BATCHIFY, SAMPLE, SHARD, UNUSED
from sharded_loader.engine.messages import NOTHING, Job, PartBatch, PartIndices, PartPoint, Stream, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.pools.task_reader import reader_for
from sharded_loader.randomness.rng import reading
from sharded_loader.streams.reader import SHARED_BYTES, Copies, StreamReader
from sharded_loader.streams.worker_info import Part, here, patch_torch, set_current_part

SIZE = 4
WORKER = "worker 0 (pid 1)"


def reader_of(dataset, parts=2, drops_last=False, endless=False, **job):
    stream = Stream(parts, SIZE, drops_last, endless)
    made = reader_for(Job(dataset, job.pop("batchify_fn", list), 7, stream=stream, **job), readers=0)
    assert isinstance(made, StreamReader)
    return made


def task_of(part, batch, point=None, parts=2, stream=0, oldest=None, shards=None):
    indices = PartIndices(part, range(batch * SIZE, (batch + 1) * SIZE))
    asked = PartBatch(stream, stream if oldest is None else oldest, part, batch, point or PartPoint())
    cut = [indices[begin:end] for begin, end in itertools.pairwise(shards)] if shards else [indices]
    return Task(0, 9, 0, batch * parts + part, tuple(cut), bool(shards), lane=part, part=asked)


def read(reader, *which, worker=WORKER, heartbeat=None, **options):
    result = reader.read(task_of(*which, **options), worker, heartbeat=heartbeat)
    assert reading.get() is None and here.part is None
    return result


def test_a_job_of_samplers_has_the_plain_reader_and_an_empty_part_cannot_start_over():
    assert type(reader_for(Job([1], None, 0))) is Reader
    result = read(reader_of(Parts((0, 3)), endless=True), 0, 0)
    assert "part 0 of 2 has no samples" in str(result.error)


def test_batches_of_a_part_come_one_after_the_other_with_the_point_behind_them():
    reader = reader_of(Parts((6, 9)))
    results = [read(reader, 1, batch) for batch in range(4)]
    assert [one.batch for one in results[:3]] == [[100, 101, 102, 103], [104, 105, 106, 107], [108]]
    assert results[3].batch is NOTHING and results[3].error is None
    points = [one.point for one in results]
    assert [point and point[:3] for point in points] == [(1, 0, 4), (2, 0, 8), (3, 0, 9), (3, 0, 9)]
    assert [point and point.ended for point in points] == [False, False, True, True]
    assert [one.samples for one in results] == [4, 4, 1, 0]


@pytest.mark.parametrize("kind", [Parts, GoOn, Own, Stateful, WithStatefulRows])
def test_any_batch_can_be_read_at_any_time_from_any_point_before_it(kind):
    straight = reader_of(kind((6, 18)))
    whole = [read(straight, 1, batch) for batch in range(5)]
    for batch, before in itertools.product(range(5), range(5)):
        if before <= batch:
            point = None if not before else whole[before - 1].point
            result = read(reader_of(kind((6, 18))), 1, batch, point)
            assert (result.batch, result.error) == (whole[batch].batch, None), (batch, before)
            assert result.point == whole[batch].point, (batch, before)
    backwards = reader_of(kind((6, 18)))
    assert [read(backwards, 1, batch).batch for batch in (3, 1, 4, 0)] == [whole[i].batch for i in (3, 1, 4, 0)]


def test_parts_and_readings_are_open_side_by_side_and_closed_when_they_are_over():
    opened, closed = [], []

    def noted(part, parts):
        opened.append(part)
        try:
            yield from range(100 * part, 100 * part + 12)
        finally:
            closed.append(part)

    reader, found = reader_of(noted), []
    for batch, part, stream in itertools.product(range(2), range(2), (5, 6)):
        found.append(read(reader, part, batch, stream=stream, oldest=5).batch[0])
    assert found == [0, 0, 100, 100, 4, 4, 104, 104]
    assert (opened, closed) == ([0, 0, 1, 1], [])
    read(reader, 0, 2, stream=6, oldest=6)
    assert (opened, closed) == ([0, 0, 1, 1], [0, 1])


def test_a_part_in_which_an_interruption_has_struck_is_opened_again():
    """A sample that its iterator has given, and nobody has received, is not lost."""
    strikes = [SIZE]

    class Counter:
        number = -1

        def __iter__(self):
            return self

        def __next__(self):
            self.number += 1
            if strikes == [self.number]:
                strikes.pop()
                raise KeyboardInterrupt
            return self.number

    class Numbers:
        def __iter__(self):
            return Counter()

    reader = reader_of(Numbers(), parts=1)
    assert read(reader, 0, 0, worker=None, parts=1).batch == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        read(reader, 0, 1, worker=None, parts=1)
    assert read(reader, 0, 1, worker=None, parts=1).batch == [4, 5, 6, 7]


def test_the_heartbeat_says_where_the_reader_is():
    heartbeat, seen = list(UNUSED), []

    def look(part, place):
        seen.append((heartbeat[SHARD], heartbeat[SAMPLE]))

    for notes in (False, True):  # False: the first batch, whose samples are timed
        seen.clear()
        parts = Parts((4, 0), before=look)
        reader = StreamReader(Job(parts, list, 7, stream=Stream(2, SIZE), notes_samples=notes))
        read(reader, 0, 0, heartbeat=heartbeat, shards=(0, 2, 4))
        assert seen == list(zip((0, 0, 1, 1), (0, 1, 0, 1), strict=True)) and heartbeat[SAMPLE] == IN_BATCHIFY


def test_an_open_part_says_where_it_is_and_only_what_keeps_its_place_is_copied():
    reader = reader_of(WithStatefulRows((2, 9)))
    point = reader.prime(task_of(1, 0))
    assert point.batches == 0 and point.state == (None, {"place": 0})
    assert read(reader, 1, 0).batch == [100, 101, 102, 103]

    class Plain(Own):
        def __iter__(self):
            self.place = 4
            return super().__iter__()

    for dataset, place in ((Plain((9,)), 4), (Stateful((9,)), 0)):
        reader = reader_for(Job(dataset, list, 7, stream=Stream(1, SIZE)), readers=1)
        assert read(reader, 0, 0, parts=1).batch == [0, 1, 2, 3]
        assert dataset.place == place


def test_a_copy_is_the_dataset_as_it_was_and_shares_what_is_large_or_cannot_be_copied():
    class Holder:
        def __init__(self):
            self.small, self.large = np.arange(3), np.zeros(SHARED_BYTES, np.uint8)
            self.kind, self.function, self.module, self.items = Own, len, np, [1]

    holder = Holder()
    copies = Copies(holder)
    holder.items.append(2)
    holder.small[0] = 9
    one, other = copies.make(), copies.make()
    assert one is not other and one.items == [1] and one.small.tolist() == [0, 1, 2] and one.small is not other.small
    assert one.large is other.large is holder.large
    assert (one.kind, one.function, one.module) == (Own, len, np)

    def function():
        return iter(())

    class Locked:
        def __init__(self):
            self.lock = threading.Lock()

    locked = Locked()
    assert Copies(function).make() is function and Copies(locked).make() is locked


# -- each thread is told of the part that it reads, and torch of nothing else ------------------------------------------

OF_TORCH = torch_data._utils.worker


def told():
    info = get_worker_info()
    return None if info is None else (info.id, info.num_workers)


def test_this_thread_is_told_and_others_are_not_until_what_was_told_before_comes_back():
    assert told() is None
    before = set_current_part(Part(2, 5, 77, "the dataset"))
    try:
        assert told() == (2, 5)
        info = torch_data.get_worker_info()
        assert type(info) is OF_TORCH.WorkerInfo
        assert info is not None and (info.seed, info.dataset) == (77, "the dataset")
        assert in_a_thread(told) is None
    finally:
        here.part = before
    assert told() is None and before is None
    before = [set_current_part(part) for part in (Part(0, 2, 1, None), Part(3, 4, 1, None), None)]
    for expected in (None, (3, 4), (0, 2), None):
        assert told() == expected
        here.part = before.pop() if before else None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_worker_alone_tells_the_threads_of_the_dataset_too_and_a_forked_child_reads_no_part():
    def work():
        before, found = set_current_part(Part(1, 3, 0, None), alone=True), []
        thread = threading.Thread(target=lambda: found.append(get_worker_info().id))
        thread.start()
        thread.join()
        here.part = before
        return found, get_worker_info()

    patch_torch()
    assert in_child(work) == "([1], None)"
    before = set_current_part(Part(0, 2, 0, None))
    pid = os.fork()
    if pid == 0:
        os._exit(0 if get_worker_info() is None else 1)
    here.part = before
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_the_answer_of_torch_s_own_workers_stays_and_a_torch_without_it_is_left_alone(monkeypatch):
    own = OF_TORCH.WorkerInfo(id=6, num_workers=7, seed=0, dataset=None)
    patch_torch()
    monkeypatch.setattr(OF_TORCH, "_worker_info", own)
    assert get_worker_info() is own
    before = set_current_part(Part(0, 2, 0, None))
    assert told() == (0, 2)
    here.part = before
    assert get_worker_info() is own
    monkeypatch.setattr(OF_TORCH, "get_worker_info", len)
    here.part, before = None, set_current_part(Part(0, 2, 0, None))
    here.part = before
    monkeypatch.delattr(OF_TORCH, "get_worker_info")
    patch_torch()


def in_a_thread(call):
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]
