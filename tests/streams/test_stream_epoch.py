"""Which part gives the next batch, and where an epoch is after each: on numbers, with nobody who reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_samples import batches_of

from sharded_loader.engine.messages import NOTHING, PartBatch, PartPoint, Result
from sharded_loader.engine.order import Position
from sharded_loader.streams.epoch import SharedParts, StreamEpoch
from sharded_loader.streams.state import StreamSignature

SIZE = 4


class Reads:
    """Reads what a reading plans, from parts of some lengths."""

    def __init__(self, lengths: Any, reading: StreamEpoch) -> None:
        self.lengths, self.reading = lengths, reading

    def result(self, seq: int, planned: PartBatch) -> Result:
        begin, length = planned.batch * SIZE, self.lengths[planned.number]
        count = max(0, min(SIZE, length - begin))
        if self.reading.stream.endless:
            count = SIZE
        given = planned.batch + 1 if count else -(-length // SIZE)
        point = PartPoint(given, 0, min(begin + SIZE, length), ended=count < SIZE)
        batch = [100 * planned.number + i for i in range(begin, begin + count)] or NOTHING
        return Result(0, seq, batch, count, point=point)

    def all(self, window: int, count: int | None = None) -> list[Any]:
        """The batches of the epoch, ``window`` of them in flight."""
        found, flight, seq, delivered = [], list[Any](), self.reading.first, self.reading.first
        while count is None or len(found) < count:
            while len(flight) < window and (planned := self.reading.batch(seq)) is not None:
                flight.append((seq, planned))
                seq += 1
            if not flight:
                break
            number, planned = flight.pop(0)
            result = self.reading.record_result(number, self.result(number, planned))
            delivered = number + 1
            self.reading.forget(delivered)
            if result.batch is not NOTHING:
                found.append(result.batch)
        self.delivered = delivered
        return found


def reading_of(parts: int = 3, position: Position | None = None, steps: int | None = None) -> StreamEpoch:
    signature = StreamSignature(1, "Rows", parts, SIZE, "keep", steps, 1, 0)
    return StreamEpoch(SharedParts(range(77)), signature, position or Position(0), position is not None)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_batches_come_in_turns_however_many_are_in_flight(lengths: list[int], window: int) -> None:
    reads = Reads(lengths, reading_of(len(lengths)))
    assert reads.all(window) == batches_of(lengths, SIZE)
    assert reads.reading.batches(reads.delivered) == len(batches_of(lengths, SIZE))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9), st.data())
def test_any_position_is_gone_on_from(lengths: list[int], window: int, other: int, data: Any) -> None:
    whole = batches_of(lengths, SIZE)
    count = data.draw(st.integers(0, len(whole)))
    reads = Reads(lengths, reading_of(len(lengths)))
    assert reads.all(window, count) == whole[:count]
    position = reads.reading.position(reads.delivered)
    assert position.done == count
    rest = Reads(lengths, reading_of(len(lengths), position))
    assert rest.reading.first == count and rest.reading.resumed
    assert rest.all(other) == whole[count:]


def test_a_plan_says_which_part_which_batch_and_where_it_was() -> None:
    reading = reading_of(2)
    first, second, third = (reading.batch(seq) for seq in range(3))
    assert first == PartBatch(reading.opening, 0, 0, 0, PartPoint())
    assert second is not None and second.number == 1
    assert third is not None and (third.number, third.batch, third.point.batches) == (0, 1, 0)
    reading.record_result(0, Result(0, 0, [1], point=PartPoint(1, 0, 4)))
    planned = reading.batch(4)
    assert planned is not None and (planned.number, planned.batch, planned.point.batches) == (0, 2, 1)
    assert reading.batch(2) is third
    tasks = [reading.task(seq) for seq in range(2)]
    assert [(task.lane, task.part) for task in tasks if task] == [(0, first), (1, second)]


def test_a_part_that_is_given_up_ends_and_what_was_planned_behind_is_empty() -> None:
    reading = reading_of(2)
    planned = [reading.batch(seq) for seq in range(6)]
    assert [(one.number, one.batch) for one in planned if one] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    error = Result(0, 0, error=KeyError("x"))
    assert reading.record_result(0, error) is error
    assert reading.abandoned == {0: 0}
    for seq in (2, 4):
        again = reading.record_result(seq, Result(0, seq, error=KeyError("again")))
        assert again.batch is NOTHING and again.error is None
    assert all(one is not None and one.number == 1 for one in map(reading.batch, range(6, 9)))
    assert reading.position(5).done == 1  # nothing is known of part 1
    assert reading.position(5).points[0].ended


@pytest.mark.parametrize("window", [1, 4, 20])
def test_with_steps_a_part_that_is_given_up_leaves_its_steps_to_the_others(window: int) -> None:
    class GivesUp(Reads):
        def result(self, seq: int, planned: PartBatch) -> Result:
            if planned.number == 1 and planned.batch >= 1:
                return Result(0, seq, error=KeyError("x"))
            return super().result(seq, planned)

    reads = GivesUp([9, 9, 9], reading_of(3, steps=8))
    found = reads.all(window)
    assert len(found) == 8 and sum(batch is None for batch in found) == 1
    assert [batch[0] // 100 for batch in found if batch] == [0, 1, 2, 0, 2, 0, 2]
    assert reads.reading.batches(reads.delivered) == 8
    assert reads.reading.counts_at_end() == {0: 3, 1: 2, 2: 3}


@pytest.mark.parametrize("window", [1, 5])
def test_the_next_epoch_begins_behind_this_one_however_much_of_it_was_read(window: int) -> None:
    for count in range(6):
        reads = Reads([9, 9], reading_of(2, steps=5))
        reads.all(window, count)
        assert reads.reading.counts_at_end() == {0: 3, 1: 2}


def test_an_epoch_is_over_at_its_last_step_or_where_all_parts_have_ended() -> None:
    ended = PartPoint(2, 0, 6, ended=True)
    for points, over in (({0: ended, 1: ended}, True), ({0: ended, 1: PartPoint(1, 0, 4)}, False)):
        reading = reading_of(2, Position(4, 4, None, {0: 2, 1: 2}, points))
        assert reading.is_over() == over and reading.in_mid_epoch
        assert reading.following() == Position(5)
    steps = reading_of(2, Position(0, 5, None, {0: 3, 1: 2}, {0: ended, 1: ended}), steps=5)
    assert steps.is_over() and steps.following() == Position(1, 0, None, {0: 3, 1: 2}, {0: ended, 1: ended})
    assert not reading_of(2).is_over() and not reading_of(2).in_mid_epoch


def test_what_is_delivered_is_forgotten_but_for_the_last_batch() -> None:
    reads = Reads([400], reading_of(1))
    reads.all(3, 50)
    assert reads.reading.batch(reads.delivered - 1) is not None
    assert reads.reading.position(reads.delivered - 1).done == 49


def test_to_forget_or_to_note_twice_is_the_same_as_once() -> None:
    reading = reading_of(2)
    planned = [reading.batch(seq) for seq in range(6)]
    for seq in (0, 1, 2, 0, 1, 2):
        reading.record_result(seq, Reads([40, 40], reading).result(seq, planned[seq]))  # type: ignore[arg-type]
    expected = reading.position(3)
    reading.forget(3), reading.forget(3)
    assert reading.position(3) == expected and expected.done == 3


def test_in_any_order_the_part_with_the_fewest_batches_in_flight_is_next() -> None:
    reading = reading_of(2)
    reading.any_order = True
    planned = [reading.batch(seq) for seq in range(2)]
    assert [one.number for one in planned if one] == [0, 1]
    for seq, batch in ((1, 1), (2, 2)):
        reading.record_result(seq, Result(0, seq, [1], point=PartPoint(batch, 0, 4 * batch)))
        following = reading.batch(seq + 1)
        assert following is not None and following.number == 1
    reading.record_result(3, Result(0, 3, [1], point=PartPoint(3, 0, 9, ended=True)))
    following = reading.batch(4)
    assert following is not None and following.number == 0


def test_its_length_is_that_of_the_dataset_or_its_steps() -> None:
    assert reading_of(parts=1).length() == 20 and reading_of(steps=5).length() == 5
