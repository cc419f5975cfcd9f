"""Iterable data as a reader has it: batches from any point, errors that name part and place, copies, one part."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from failures import raise_lookup
from stream_samples import At, Draws, DrawsOwn, GoOn, Own, Parts, Stateful, Told, WithStatefulRows

from sharded_loader.base.errors import notes_of
from sharded_loader.engine.heartbeat import IN_BATCHIFY, SAMPLE, SHARD, new_heartbeat
from sharded_loader.engine.messages import NOTHING, Job, PartBatch, PartIndices, PartPoint, Result, Stream, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.pools.task_reader import reader_for
from sharded_loader.randomness.rng import reading
from sharded_loader.streams.reader import SHARED_BYTES, Copies, OpenPart, StreamReader
from sharded_loader.streams.worker_info import here

SIZE = 4
WORKER = "worker 0 (pid 1)"


def reader_of(dataset: Any, parts: int = 2, drops_last: bool = False, endless: bool = False, **job: Any) -> Any:
    stream = Stream(parts, SIZE, drops_last, endless)
    made = reader_for(Job(dataset, job.pop("batchify_fn", list), 7, stream=stream, **job), readers=0)
    assert isinstance(made, StreamReader)
    return made


def task_of(
    part: int,
    batch: int,
    point: PartPoint | None = None,
    parts: int = 2,
    stream: int = 0,
    oldest: int | None = None,
    shards: Any = None,
) -> Task:
    indices = PartIndices(part, range(batch * SIZE, (batch + 1) * SIZE))
    asked = PartBatch(stream, stream if oldest is None else oldest, part, batch, point or PartPoint())
    cut = [indices[begin:end] for begin, end in itertools.pairwise(shards)] if shards else [indices]
    return Task(0, 9, 0, batch * parts + part, tuple(cut), bool(shards), lane=part, part=asked)


def read(reader: Any, *which: Any, worker: str | None = WORKER, heartbeat: Any = None, **options: Any) -> Result:
    result: Result = reader.read(task_of(*which, **options), worker, heartbeat=heartbeat)
    assert reading.get() is None and here.part is None
    return result


# -- what is read -------------------------------------------------------------------------------------------------


def test_a_job_of_samplers_has_the_plain_reader() -> None:
    assert type(reader_for(Job([1], None, 0))) is Reader


def test_batches_of_a_part_come_one_after_the_other_with_the_point_behind_them() -> None:
    reader = reader_of(Parts((6, 9)))
    results = [read(reader, 1, batch) for batch in range(4)]
    assert [one.batch for one in results[:3]] == [[100, 101, 102, 103], [104, 105, 106, 107], [108]]
    assert results[3].batch is NOTHING and results[3].error is None
    points = [one.point for one in results]
    assert [point and point[:3] for point in points] == [(1, 0, 4), (2, 0, 8), (3, 0, 9), (3, 0, 9)]
    assert [point and point.ended for point in points] == [False, False, True, True]
    assert [one.samples for one in results] == [4, 4, 1, 0]


@pytest.mark.parametrize("kind", [Parts, GoOn, Own, Stateful, WithStatefulRows])
def test_any_batch_can_be_read_at_any_time_from_any_point_before_it(kind: Any) -> None:
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


def test_parts_and_readings_are_open_side_by_side_and_closed_when_they_are_over() -> None:
    opened, closed = [], []

    def noted(part: int, parts: int) -> Any:
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


def test_a_part_in_which_an_interruption_has_struck_is_opened_again() -> None:
    """A sample that its iterator has given, and nobody has received, is not lost."""
    strikes = [SIZE]

    class Counter:
        number = -1

        def __iter__(self) -> Any:
            return self

        def __next__(self) -> int:
            self.number += 1
            if strikes == [self.number]:
                strikes.pop()
                raise KeyboardInterrupt
            return self.number

    class Numbers:
        def __iter__(self) -> Any:
            return Counter()

    reader = reader_of(Numbers(), parts=1)
    assert read(reader, 0, 0, worker=None, parts=1).batch == [0, 1, 2, 3]
    with pytest.raises(KeyboardInterrupt):
        read(reader, 0, 1, worker=None, parts=1)
    assert read(reader, 0, 1, worker=None, parts=1).batch == [4, 5, 6, 7]


def test_short_batches_are_left_out_and_not_counted_if_so_asked() -> None:
    reader = reader_of(Parts((6, 2)), drops_last=True)
    assert read(reader, 0, 0).batch == [0, 1, 2, 3]
    for part, batch in ((0, 1), (1, 0)):
        result = read(reader, part, batch)
        assert result.batch is NOTHING and result.point is not None
        assert (result.point.batches, result.point.ended) == (batch, True)


def test_a_part_that_has_ended_starts_over_if_there_is_no_end() -> None:
    reader = reader_of(Parts((6, 3)), endless=True)
    assert [read(reader, 0, batch).batch for batch in range(3)] == [[0, 1, 2, 3], [4, 5, 0, 1], [2, 3, 4, 5]]
    results = [read(reader, 1, batch) for batch in range(3)]
    assert [one.batch for one in results] == [[100, 101, 102, 100], [101, 102, 100, 101], [102, 100, 101, 102]]
    assert [one.point and one.point[:3] for one in results] == [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    again = reader_of(Parts((6, 3)), endless=True)
    assert read(again, 1, 2, results[1].point).batch == results[2].batch


def test_a_part_without_samples_cannot_start_over() -> None:
    result = read(reader_of(Parts((0, 3)), endless=True), 0, 0)
    assert "part 0 of 2 has no samples" in str(result.error)


@pytest.mark.parametrize("shards", [(0, 2, 4), (0, 1, 4), (0, 3, 4), (0, 1, 2, 4)])
def test_a_short_batch_has_fewer_shards_of_the_same_shares(shards: Any) -> None:
    for length in range(1, 5):
        result = read(reader_of(Parts((length, 0))), 0, 0, shards=shards)
        assert sum(result.batch, []) == list(range(length)) and all(result.batch)
        assert len(result.batch) == min(length, len(shards) - 1) and result.samples == length


# -- errors -------------------------------------------------------------------------------------------------------


def test_an_error_names_part_and_place_and_the_part_goes_on_if_it_can() -> None:
    for kind, behind in ((GoOn, [[106, 107, 108, 109], [110]]), (Parts, [])):
        reader = reader_of(kind((0, 11), before=At(raise_lookup, 1, 5)))
        assert read(reader, 1, 0).error is None
        result = read(reader, 1, 1)
        assert type(result.error) is LookupError and result.batch is NOTHING
        assert notes_of(result.error)[0].startswith("sharded_loader: in epoch 0, batch 9, sample (1, 5)")
        assert result.point is not None and result.point[:3] == (2, 0, 6)
        assert [read(reader, 1, batch).batch for batch in (2, 3) if behind or batch == 2] == (behind or [NOTHING])


def test_bad_samples_are_left_out() -> None:
    reader = reader_of(GoOn((0, 6), before=At(raise_lookup, 1, 5)), on_error="skip")
    results = [read(reader, 1, batch) for batch in range(2)]
    assert [one.batch for one in results] == [[100, 101, 102, 103], [104]]
    assert [index for index, _ in results[1].skipped] == [(1, 5)]
    again = read(reader_of(GoOn((0, 6), before=At(raise_lookup, 1, 5)), on_error="skip"), 1, 1)
    assert again.batch == [104] and len(again.skipped) == 1


def test_samples_that_are_others_than_before_are_an_error_without_a_point() -> None:
    first = read(reader_of(Parts((0, 9))), 1, 0).point
    for dataset, text in ((Parts((0, 2)), "only 2 samples, where it had yielded 4"), (Draws((0, 9)), "other samples")):
        result = read(reader_of(dataset), 1, 1, first)
        assert isinstance(result.error, ValueError) and result.point is None
        assert "the epoch cannot go on after a resume or a lost worker: part 1" in str(result.error) and text in str(
            result.error
        )


def test_an_interrupt_passes_and_the_batch_is_read_again_from_its_beginning() -> None:
    times = itertools.count()

    def interrupt() -> None:
        if next(times) == 0:
            raise KeyboardInterrupt

    reader = reader_of(GoOn((0, 9), before=At(interrupt, 1, 5)))
    assert read(reader, 1, 0, worker=None).batch == [100, 101, 102, 103]
    with pytest.raises(KeyboardInterrupt):
        read(reader, 1, 1, worker=None)
    assert reading.get() is None and here.part is None
    assert read(reader, 1, 1, worker=None).batch == [104, 105, 106, 107]


def test_a_batchify_fn_that_fails_costs_its_batch_only() -> None:
    def batchify(samples: list[int]) -> Any:
        if 101 in samples:
            raise OverflowError
        return samples

    reader = reader_of(Parts((0, 6)), batchify_fn=batchify)
    failed, good = read(reader, 1, 0), read(reader, 1, 1)
    assert type(failed.error) is OverflowError and failed.point is not None and failed.point.batches == 1
    assert good.batch == [104, 105]


# -- the heartbeat, and random numbers --------------------------------------------------------------------------------


def test_the_heartbeat_says_where_the_reader_is() -> None:
    heartbeat, seen = new_heartbeat(), []

    def look(part: int, place: int) -> None:
        seen.append((heartbeat[SHARD], heartbeat[SAMPLE]))

    for notes in (False, True):  # False: the first batch, whose samples are timed
        seen.clear()
        parts = Parts((4, 0), before=look)
        reader = StreamReader(Job(parts, list, 7, stream=Stream(2, SIZE), notes_samples=notes))
        read(reader, 0, 0, heartbeat=heartbeat, shards=(0, 2, 4))
        assert seen == list(zip((0, 0, 1, 1), (0, 1, 0, 1), strict=True)) and heartbeat[SAMPLE] == IN_BATCHIFY


def test_random_numbers_belong_to_the_sample_however_the_reader_got_there() -> None:
    straight = reader_of(DrawsOwn((0, 10)))
    whole = [read(straight, 1, batch).batch for batch in range(3)]
    assert [one.tolist() for one in read(reader_of(DrawsOwn((0, 10))), 1, 2).batch] == [
        one.tolist() for one in whole[2]
    ]
    samples = [reader_of(DrawsOwn((0, 10))).read_sample((1, place), 0).tolist() for place in range(10)]
    assert samples == [one.tolist() for batch in whole for one in batch]


def test_global_generators_are_seeded_for_each_batch_by_its_position() -> None:
    seeds: list[tuple[int, int]] = []
    stream = Stream(2, SIZE)
    job = Job(Parts((0, 10)), list, 7, stream=stream)
    StreamReader(job, seed=lambda epoch, position: seeds.append((epoch, position))).read(task_of(1, 2), WORKER)
    straight = list(seeds)
    assert straight[-1] == (0, 5) and {(0, 1), (0, 3)} <= set(straight)


def test_one_sample_and_what_is_none() -> None:
    reader = reader_of(Parts((2, 3)))
    assert reader.read_sample((1, 2), 0) == 102
    for wrong in ((1, 3), (0, 2), (2, 0), (-1, 0), (0, -1)):
        with pytest.raises(IndexError, match="there are 2 parts"):
            reader.read_sample(wrong, 0)
    for odd in (1, "ab", (1,), (1, 2, 3), None, (0.5, 1)):
        with pytest.raises(TypeError, match=r"as \(part, position\)"):
            reader.read_sample(odd, 0)
    assert reader_of(Parts((2, 3)), endless=True).read_sample((1, 7), 3) == 101
    assert reading.get() is None and here.part is None


def test_an_open_part_says_where_it_is() -> None:
    reader = reader_of(WithStatefulRows((2, 9)))
    point = reader.prime(task_of(1, 0))
    assert point.batches == 0 and point.state == (None, {"place": 0})
    assert read(reader, 1, 0).batch == [100, 101, 102, 103]


def test_what_keeps_its_place_is_copied_and_what_does_not_is_read_itself() -> None:
    class Plain(Own):
        def __iter__(self) -> Any:
            self.place = 4
            return super().__iter__()

    for dataset, place in ((Plain((9,)), 4), (Stateful((9,)), 0)):
        reader = reader_for(Job(dataset, list, 7, stream=Stream(1, SIZE)), readers=1)
        assert read(reader, 0, 0, parts=1).batch == [0, 1, 2, 3]
        assert dataset.place == place


# -- copies, and one part while it is read ---------------------------------------------------------------------


def advance(part: OpenPart) -> Any:
    """The next sample, read as a reader does."""
    before = part.set_current()
    try:
        return part.next_sample()
    finally:
        here.part = before


def rest_of(part: OpenPart) -> list[Any]:
    found = []
    while True:
        try:
            found.append(advance(part))
        except StopIteration:
            return found


# -- copies -------------------------------------------------------------------------------------------------------


def test_a_copy_is_the_dataset_as_it_was_and_shares_what_is_large() -> None:
    class Holder:
        def __init__(self) -> None:
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


def test_functions_and_what_cannot_be_copied_are_shared() -> None:
    def function() -> Iterator[int]:
        return iter(())

    class Locked:
        def __init__(self) -> None:
            self.lock = threading.Lock()

    locked = Locked()
    assert Copies(function).make() is function and Copies(locked).make() is locked


# -- one part -----------------------------------------------------------------------------------------------------


def test_a_part_is_begun_and_read_to_its_end() -> None:
    part = OpenPart(Parts((2, 3)), 1, 2, seed=5)
    assert rest_of(part) == []
    part.begin(0)
    assert rest_of(part) == [100, 101, 102] and rest_of(part) == []
    part.begin(1)
    assert advance(part) == 100
    part.end()
    assert rest_of(part) == []


def test_functions_take_the_numbers_or_nothing() -> None:
    def both(part: int, parts: int, *, other: int = 0) -> list[Any]:
        return [part, parts]

    def bound(extra: int, part: int, parts: int) -> list[Any]:
        return [extra, part, parts]

    def one(optional: int = 3, another: int = 4) -> list[Any]:
        return [optional]

    for function, expected in ((both, [1, 4]), (functools.partial(bound, 7), [7, 1, 4]), (one, [3]), (list, [])):
        part = OpenPart(function, 1, 4, seed=0)
        part.begin(0)
        assert rest_of(part) == expected


def test_the_dataset_is_told_the_pass_if_it_wants_to_know() -> None:
    dataset = Told((4,))
    part = OpenPart(dataset, 0, 1, 0)
    part.begin(3)
    assert dataset.epoch == 3 and sorted(rest_of(part)) == [3000, 3001, 3002, 3003]
    OpenPart(dataset, 0, 1, 0, sets_epoch=False).begin(5)
    assert dataset.epoch == 3


@pytest.mark.parametrize("kind", [Stateful, WithStatefulRows])
def test_a_part_goes_on_from_its_state_and_the_state_is_a_copy(kind: Any) -> None:
    part = OpenPart(kind((5, 6)), 1, 2, 0)
    part.begin(0)
    assert [advance(part), advance(part)] == [100, 101] and part.is_stateful
    state = part.state()
    assert advance(part) == 102
    other = OpenPart(kind((5, 6)), 1, 2, 0)
    for _ in range(2):
        other.begin(0, state)
        assert rest_of(other) == [102, 103, 104, 105]


def test_without_a_state_there_is_none() -> None:
    part = OpenPart(Parts((5,)), 0, 1, 0)
    part.begin(0)
    assert not part.is_stateful and part.state() is None
