"""Which part gives the next batch, where an epoch is after each, and the states of that: nobody reads."""

import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from stream_samples import Own, Parts, batches_of

from sharded_loader.base.entries import VERSION
from sharded_loader.engine.messages import NOTHING, PartBatch, PartPoint, Result
from sharded_loader.engine.order import Position
from sharded_loader.streams.epoch import SharedParts, StreamEpoch
from sharded_loader.streams.order import MOST_PARTS, StreamOrder
from sharded_loader.streams.state import StreamSignature, differences, dump, parse

SIZE = 4


class Reads:
    """Reads what a reading plans, from parts of some lengths."""

    def __init__(self, lengths, reading):
        self.lengths, self.reading = lengths, reading

    def result(self, seq, planned):
        begin, length = planned.batch * SIZE, self.lengths[planned.number]
        count = max(0, min(SIZE, length - begin))
        if self.reading.stream.endless:
            count = SIZE
        given = planned.batch + 1 if count else -(-length // SIZE)
        point = PartPoint(given, 0, min(begin + SIZE, length), ended=count < SIZE)
        batch = [100 * planned.number + i for i in range(begin, begin + count)] or NOTHING
        return Result(0, seq, batch, count, point=point)

    def all(self, window, count=None):
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


def reading_of(parts=3, position=None, steps=None):
    signature = StreamSignature(1, "Rows", parts, SIZE, "keep", steps, 1, 0)
    return StreamEpoch(SharedParts(range(77)), signature, position or Position(0), position is not None)


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 30))
def test_batches_come_in_turns_however_many_are_in_flight(lengths, window):
    reads = Reads(lengths, reading_of(len(lengths)))
    assert reads.all(window) == batches_of(lengths, SIZE)
    assert reads.reading.batches(reads.delivered) == len(batches_of(lengths, SIZE))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 9), st.data())
def test_any_position_is_gone_on_from(lengths, window, other, data):
    whole = batches_of(lengths, SIZE)
    count = data.draw(st.integers(0, len(whole)))
    reads = Reads(lengths, reading_of(len(lengths)))
    assert reads.all(window, count) == whole[:count]
    position = reads.reading.position(reads.delivered)
    assert position.done == count
    rest = Reads(lengths, reading_of(len(lengths), position))
    assert rest.reading.first == count and rest.reading.resumed
    assert rest.all(other) == whole[count:]


def test_a_plan_says_which_part_which_batch_and_where_it_was():
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


def test_a_part_that_is_given_up_ends_and_what_was_planned_behind_is_empty():
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
def test_with_steps_a_part_that_is_given_up_leaves_its_steps_to_the_others(window):
    class GivesUp(Reads):
        def result(self, seq, planned):
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
def test_the_next_epoch_begins_behind_this_one_however_much_of_it_was_read(window):
    for count in range(6):
        reads = Reads([9, 9], reading_of(2, steps=5))
        reads.all(window, count)
        assert reads.reading.counts_at_end() == {0: 3, 1: 2}


def test_an_epoch_is_over_at_its_last_step_or_where_all_parts_have_ended():
    ended = PartPoint(2, 0, 6, ended=True)
    for points, over in (({0: ended, 1: ended}, True), ({0: ended, 1: PartPoint(1, 0, 4)}, False)):
        reading = reading_of(2, Position(4, 4, None, {0: 2, 1: 2}, points))
        assert reading.is_over() == over and reading.in_mid_epoch
        assert reading.following() == Position(5)
    steps = reading_of(2, Position(0, 5, None, {0: 3, 1: 2}, {0: ended, 1: ended}), steps=5)
    assert steps.is_over() and steps.following() == Position(1, 0, None, {0: 3, 1: 2}, {0: ended, 1: ended})
    assert not reading_of(2).is_over() and not reading_of(2).in_mid_epoch


def test_what_is_delivered_is_forgotten_but_for_the_last_batch_and_twice_is_as_once():
    reads = Reads([400], reading_of(1))
    reads.all(3, 50)
    batch, done = reads.reading.batch, reads.delivered
    assert batch(done - 1) is not None and batch(done - 2) is None
    assert reads.reading.position(done - 1).done == 49
    reading = reading_of(2)
    planned = [reading.batch(seq) for seq in range(6)]
    for seq in (0, 1, 2, 0, 1, 2):
        reading.record_result(seq, Reads([40, 40], reading).result(seq, planned[seq]))
    expected = reading.position(3)
    reading.forget(3), reading.forget(3)
    assert reading.position(3) == expected and expected.done == 3


def test_in_any_order_the_part_with_the_fewest_batches_in_flight_is_next():
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


# -- the order of all epochs -----------------------------------------------------------------------------------


def order_of(dataset=None, **options):
    names = ("last_batch", "num_replicas", "rank", "streams", "steps_per_epoch")
    given = {"batch_size": 4, "seed": 5, "num_workers": 0, **dict.fromkeys(names), **options}
    return StreamOrder(dataset or Own(), **given)


def beginning(order, epoch):
    """Where an epoch begins, as far as is known."""
    return order.epoch(epoch).at_beginning()


class Shards(Parts):
    num_shards = 100


def test_how_many_parts_there_are():
    for dataset, options, parts in (
        (Own(), {}, 1),
        (Own(), {"num_workers": 3}, 3),
        (Own(), {"num_workers": 3, "streams": 2}, 2),
        (Own(), {"num_workers": 3, "num_replicas": 2, "rank": 1}, 6),
        (Own(), {"num_replicas": 4, "rank": 1}, 4),
        (Shards(), {"num_workers": 3}, MOST_PARTS),
        (Shards(), {"num_replicas": 40, "rank": 1}, 40),
        (Shards(), {"streams": 90}, 90),
    ):
        order = order_of(dataset, **options)
        assert order.parts == order.stream.parts == order.signature().streams == parts


def test_one_rank_draws_a_seed_and_no_two_readings_have_one_number_unless_parts_start_over():
    assert order_of(seed=None, num_replicas=2, rank=0).seed == 0
    assert order_of(seed=None).seed != order_of(seed=None).seed
    # A pool may outlive an order: it must not take a part of a new epoch for one that it has open.
    numbers = [order_of(streams=2).epoch(0).opening for _ in range(3)]
    assert len(set(numbers)) == 3
    assert [order_of(steps_per_epoch=3).epoch(epoch).opening for epoch in range(2)] == [0, 0]


def test_readings_have_numbers_and_the_oldest_one_that_has_begun_and_lives_is_known():
    """Parts of older ones are closed with the next batch."""
    order = order_of(streams=2)

    def oldest():
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


def test_an_endless_order_knows_where_each_epoch_begins():
    order = order_of(streams=3, steps_per_epoch=5)
    for epoch, counts in ((0, [0, 0, 0]), (1, [2, 2, 1]), (2, [4, 3, 3]), (3, [5, 5, 5])):
        begin = beginning(order, epoch)
        assert (begin.epoch, begin.done, begin.counts) == (epoch, 0, dict(enumerate(counts)))
    ranks = order_of(streams=4, num_replicas=2, rank=1, steps_per_epoch=5)
    assert beginning(ranks, 1).counts == {1: 3, 3: 2}
    assert beginning(order_of(streams=3), 7).done == 0


def test_it_goes_on_from_the_farthest_point_that_lies_before_an_epoch():
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


def test_ranks_are_warned_once_unless_steps_are_given():
    order = order_of(streams=2, num_replicas=2, rank=0)
    with pytest.warns(UserWarning, match="give steps_per_epoch="):
        order.settle_replicas()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        order.settle_replicas()
        order_of(streams=2, num_replicas=2, rank=0, steps_per_epoch=3).settle_replicas()
        order_of().settle_replicas()


def test_a_state_after_another_run_forgets_what_that_one_knew():
    order = order_of(streams=2, steps_per_epoch=4)
    reading = order.epoch(0)
    order.begun(reading)
    order.load(dump(Position(0), order_of(seed=9, streams=2, steps_per_epoch=4).signature()), True)
    assert beginning(order, 1).counts == {0: 2, 1: 2}


# -- states: flat, JSON-serializable, and rejected where they do not fit -----------------------------------------------

SIGNATURE = StreamSignature(7, "Lines", 3, 8, "keep", None, 1, 0)
POSITION = Position(
    2,
    5,
    None,
    {0: 3, 1: 1, 2: 1},
    {0: PartPoint(3, 2, 24, 99), 1: PartPoint(1, 2, 5, 7, ended=True), 2: PartPoint(1, 2, 8, 3)},
)


def test_a_position_comes_back_also_through_json_with_copies_of_the_states_of_the_dataset():
    state = dump(POSITION, SIGNATURE)
    for one in (state, json.loads(json.dumps(state)), [state], (state,)):
        assert parse(one, (1, 0)) == (POSITION, SIGNATURE)
    assert all(not isinstance(value, dict) or name == "parts" for name, value in state.items())
    assert state["version"] == VERSION and (state["epoch"], state["batches"]) == (2, 5)
    beginning = dump(Position(4), SIGNATURE)
    assert beginning["parts"]["number"] == [] and "state" not in beginning["parts"]
    assert parse(beginning, (1, 0)) == (Position(4), SIGNATURE)
    own = {"at": [1]}
    points = {**POSITION.points, 1: PartPoint(1, 2, 5, state=(own, None))}
    state = dump(replace(POSITION, points=points), SIGNATURE)
    own["at"].append(2)
    found, _ = parse(state, (1, 0))
    assert found.points[1].state == ({"at": [1]}, None) and found.points[0].state is None
    found.points[1].state[0]["at"].append(3)
    assert parse(state, (1, 0))[0].points[1].state == ({"at": [1]}, None)


def test_differences_and_parts_that_a_state_does_not_know_are_told_but_not_the_seed():
    for name, now, text in (
        ("dataset", "Rows", "the dataset was a Lines, and is a Rows"),
        ("streams", 4, "there were 3 parts (streams), and are 4"),
        ("batch_size", 9, "batch_size was 8, and is 9"),
        ("last_batch", "discard", "last_batch was 'keep', and is 'discard'"),
        ("steps_per_epoch", 5, "steps_per_epoch was None, and is 5"),
    ):
        own = replace(SIGNATURE, seed=8, **{name: now})
        (found,) = differences(SIGNATURE, own, POSITION)
        assert found.startswith(text) and ("all samples of a batch come from" in found) == (name == "batch_size")
        loose = differences(SIGNATURE, own, Position(2), strict=False)
        assert loose == ([] if name == "batch_size" else [text])
    own = replace(SIGNATURE, num_replicas=2, rank=1)
    of_rank = replace(SIGNATURE, num_replicas=2, rank=0)
    position = replace(POSITION, counts={0: 3, 2: 1})
    (text,) = differences(of_rank, own, position)
    assert "state of rank 0 of 2, which knows nothing of part 1" in text and "load all of them" in text
    assert differences(of_rank, replace(own, rank=0), position) == []
    (text,) = differences(SIGNATURE, replace(SIGNATURE, num_replicas=4, rank=0), Position(0))
    assert text == "there were 3 parts (streams), and are 4 ranks: each needs a part"


def test_the_states_of_all_ranks_are_one_position():
    states = []
    for rank in range(2):
        mine = range(rank, 3, 2)
        counts, points = ({part: table[part] for part in mine} for table in (POSITION.counts, POSITION.points))
        position = Position(2, sum(counts.values()), None, counts, points)
        states.append(dump(position, replace(SIGNATURE, num_replicas=2, rank=rank)))
    for replicas, batches in (((1, 0), 5), ((3, 0), 3), ((3, 1), 1), ((2, 0), 4)):
        found, _ = parse(states, replicas)
        assert (found.counts, found.points, found.done) == (POSITION.counts, POSITION.points, batches)
    assert parse(states[0], (2, 0))[0].done == 4


def test_states_that_do_not_belong_together_and_what_is_none_are_rejected():
    steps = replace(SIGNATURE, steps_per_epoch=9)
    for one, other, text in (
        (dump(POSITION, SIGNATURE), dump(POSITION, replace(SIGNATURE, dataset="Rows")), "those of different runs"),
        (dump(POSITION, SIGNATURE), dump(replace(POSITION, epoch=3), SIGNATURE), r"different epochs \(2, 3\)"),
        (dump(POSITION, steps), dump(replace(POSITION, done=6), steps), r"different steps \(5, 6\)"),
    ):
        with pytest.raises(ValueError, match=text):
            parse([one, other], (1, 0))
    state = dump(POSITION, SIGNATURE)
    for wrong in (None, 3, "x", [3], []):
        with pytest.raises((TypeError, ValueError)):
            parse(wrong, (1, 0))
    parts = state["parts"]
    damaged = [
        *({"parts": {**parts, "given": [1]}}, {"parts": {**parts, "samples": [*parts["samples"], 3]}}),
        *({"parts": {**parts, "number": [0, 1, "2"]}}, {"parts": {**parts, "ended": [False, 1, False]}}),
        *({"parts": {**parts, "number": [0, 1, -2]}}, {"parts": {**parts, "samples": None}}),
        *({"parts": {**parts, "state": [one, None, None]}} for one in (3, [], {}, [None])),
        *({"parts": None}, {"epoch": -1}, {"epoch": 1.5}, {"batches": "5"}, {"version": 0}),
    ]
    whole = [{**state, **change} for change in damaged]
    whole += [{key: value for key, value in state.items() if key != name} for name in state]
    whole += [{**state, "parts": {key: value for key, value in parts.items() if key != "samples"}}]
    for wrong in whole:
        with pytest.raises(ValueError):
            parse(wrong, (1, 0))
    with pytest.raises(ValueError, match="update sharded_loader"):
        parse({**state, "version": VERSION + 1}, (1, 0))
