"""Which part gives the next batch, where an epoch is after each, and the order of ranks and epochs: nobody reads."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_samples import Own, Parts, batches_of

from sharded_loader.engine.messages import NOTHING, PartBatch, PartPoint, Result
from sharded_loader.engine.order import Position
from sharded_loader.streams.epoch import SharedParts, StreamEpoch
from sharded_loader.streams.order import MOST_PARTS, StreamOrder
from sharded_loader.streams.state import StreamSignature, dump

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
    batch, done = reads.reading.batch, reads.delivered
    assert batch(done - 1) is not None and batch(done - 2) is None
    assert reads.reading.position(done - 1).done == 49


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


# -- the order of all epochs -----------------------------------------------------------------------------------


def order_of(dataset: Any = None, **options: Any) -> StreamOrder:
    given: dict[str, Any] = {
        "batch_size": 4,
        "last_batch": None,
        "num_replicas": None,
        "rank": None,
        "seed": 5,
        "streams": None,
        "steps_per_epoch": None,
        "num_workers": 0,
    }
    return StreamOrder(dataset or Own(), **{**given, **options})


def beginning(order: StreamOrder, epoch: int) -> Position:
    """Where an epoch begins, as far as is known."""
    return order.epoch(epoch).at_beginning()


class Shards(Parts):
    num_shards = 100


class Sized(Own):
    def __len__(self) -> int:
        return 22


# -- parts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dataset", "options", "parts"),
    [
        (Own(), {}, 1),
        (Own(), {"num_workers": 3}, 3),
        (Own(), {"num_workers": 3, "streams": 2}, 2),
        (Own(), {"num_workers": 3, "num_replicas": 2, "rank": 1}, 6),
        (Own(), {"num_replicas": 4, "rank": 1}, 4),
        (Shards(), {"num_workers": 3}, MOST_PARTS),
        (Shards(), {"num_replicas": 40, "rank": 1}, 40),
        (Shards(), {"streams": 90}, 90),
    ],
)
def test_how_many_parts_there_are(dataset: Any, options: dict[str, Any], parts: int) -> None:
    order = order_of(dataset, **options)
    assert order.parts == order.stream.parts == order.signature().streams == parts


def test_each_rank_has_parts_of_its_own() -> None:
    found = []
    for rank in range(3):
        order = order_of(streams=8, num_replicas=3, rank=rank)
        reading = order.epoch(0)
        planned = [reading.batch(seq) for seq in range(rank + 3)]
        found += sorted({one.number for one in planned if one is not None})
    assert sorted(found) == list(range(8))


def test_what_contradicts_iterable_data_is_rejected() -> None:
    for options, text in (
        ({"streams": 2, "num_replicas": 3, "rank": 0}, "streams is 2, but there are 3 ranks"),
        ({"last_batch": "rollover"}, '"keep" or "discard"'),
        ({"last_batch": "odd"}, '"keep" or "discard"'),
        ({"last_batch": "discard", "steps_per_epoch": 3}, "contradict each other"),
        ({"steps_per_epoch": 0}, "steps_per_epoch"),
        ({"batch_size": 0}, "batch_size"),
        ({"streams": 0}, "streams"),
    ):
        with pytest.raises(ValueError, match=text):
            order_of(**options)
    with pytest.raises(ValueError, match="has 100 shards, but there are 101 ranks"):
        _ = order_of(Shards(), num_replicas=101, rank=0).parts


def test_a_seed_is_drawn_where_there_is_one_rank_and_0_where_there_are_several() -> None:
    assert order_of(seed=None, num_replicas=2, rank=0).seed == 0
    assert order_of(seed=None).seed != order_of(seed=None).seed


# -- epochs -------------------------------------------------------------------------------------------------------


def test_epochs_count_from_0_and_may_be_chosen() -> None:
    order = order_of()
    assert order.next_epoch == 0
    order.set_epoch(4)
    assert order.next_epoch == 4
    for wrong in (-1, 1.5, "2", None):
        with pytest.raises(ValueError):
            order.set_epoch(wrong)  # type: ignore[arg-type]
    assert order.facts(4) is None  # nothing is read ahead


def test_readings_have_numbers_and_the_oldest_one_that_has_begun_and_lives_is_known() -> None:
    """Parts of older ones are closed with the next batch."""
    order = order_of(streams=2)

    def oldest() -> int:
        planned = order.epoch(0).batch(0)
        assert planned is not None
        return planned.oldest

    readings = [order.epoch(epoch) for epoch in range(3)]
    numbers = [one.opening for one in readings]
    assert numbers == sorted(numbers)
    for reading in readings:
        order.begun(reading)
    assert oldest() == numbers[0]
    last = order.epoch(3)
    order.begun(last)  # the order itself goes on with the last one
    numbers.append(last.opening)
    del last, reading, readings[0]
    assert oldest() == numbers[1]
    readings.clear()
    assert oldest() == numbers[-1]


def test_no_two_readings_have_the_same_number_whatever_their_orders() -> None:
    # A pool may outlive an order: it must not take a part of a new epoch for one that it has open.
    numbers = [order_of(streams=2).epoch(0).opening for _ in range(3)]
    assert len(set(numbers)) == 3


def test_parts_that_start_over_stay_open_from_epoch_to_epoch() -> None:
    assert [order_of(steps_per_epoch=3).epoch(epoch).opening for epoch in range(2)] == [0, 0]


def test_an_endless_order_knows_where_each_epoch_begins() -> None:
    order = order_of(streams=3, steps_per_epoch=5)
    for epoch, counts in ((0, [0, 0, 0]), (1, [2, 2, 1]), (2, [4, 3, 3]), (3, [5, 5, 5])):
        begin = beginning(order, epoch)
        assert (begin.epoch, begin.done, begin.counts) == (epoch, 0, dict(enumerate(counts)))
    ranks = order_of(streams=4, num_replicas=2, rank=1, steps_per_epoch=5)
    assert beginning(ranks, 1).counts == {1: 3, 3: 2}
    assert beginning(order_of(streams=3), 7).done == 0


def test_it_goes_on_from_the_farthest_point_that_lies_before_an_epoch() -> None:
    order = order_of(streams=2, steps_per_epoch=4)
    reading = order.epoch(0)
    planned = [reading.batch(seq) for seq in range(4)]
    assert all(planned)
    for seq in range(4):
        point = PartPoint(seq // 2 + 1, 0, 4 * (seq // 2 + 1))
        reading.record_result(seq, Result(0, seq, [1], point=point))
    order.begun(reading)
    farthest, unknown = {0: PartPoint(2, 0, 8), 1: PartPoint(2, 0, 8)}, beginning(order_of(streams=2), 0).points
    begin = beginning(order, 1)
    assert (begin.counts, begin.points) == ({0: 2, 1: 2}, farthest)
    assert beginning(order, 0).points == unknown  # they lie behind it
    order.resize(None)
    assert beginning(order, 1).points == unknown


def test_the_length_is_exact_or_an_error() -> None:
    assert [order_of(Sized(), streams=1, last_batch=one).length(0) for one in ("keep", "discard")] == [6, 5]
    for several in ({"streams": 2}, {"num_replicas": 2, "rank": 0}):
        with pytest.raises(TypeError, match="of its 2 parts has.*Give steps_per_epoch="):
            order_of(Sized(), **several).length(0)
    assert order_of(steps_per_epoch=9).length(3) == 9
    with pytest.raises(TypeError, match="only known at its end"):
        order_of().length(0)


def test_ranks_are_warned_once_unless_steps_are_given() -> None:
    order = order_of(streams=2, num_replicas=2, rank=0)
    with pytest.warns(UserWarning, match="give steps_per_epoch="):
        order.settle_replicas()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order.settle_replicas()
        order_of(streams=2, num_replicas=2, rank=0, steps_per_epoch=3).settle_replicas()
        order_of().settle_replicas()


# -- states -------------------------------------------------------------------------------------------------------


def test_seed_and_parts_of_a_state_are_taken_over() -> None:
    saved = order_of(seed=8, streams=6).signature()
    order = order_of(num_workers=2)
    states = [dump(Position(0), saved), dump(Position(0, 2, None, dict.fromkeys(range(6), 1), {}), saved)]
    assert [order.load(state, True)[1] for state in states] == [True, False]
    assert (order.seed, order.parts) == (8, 6)
    with pytest.raises(ValueError, match="there were 6 parts"):
        order_of(streams=2).load(states[0], True)


def test_a_state_after_another_run_forgets_what_that_one_knew() -> None:
    order = order_of(streams=2, steps_per_epoch=4)
    reading = order.epoch(0)
    order.begun(reading)
    order.load(dump(Position(0), order_of(seed=9, streams=2, steps_per_epoch=4).signature()), True)
    assert beginning(order, 1).counts == {0: 2, 1: 2}
