"""The order of iterable data: parts of each rank, epochs, and what is rejected."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from stream_samples import Own, Parts

from sharded_loader.engine.messages import PartPoint, Result
from sharded_loader.engine.order import Position
from sharded_loader.streams.order import MOST_PARTS, StreamOrder
from sharded_loader.streams.state import dump


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
