"""A loader's order: an epoch's batches by their numbers, again, after an interruption, from any position on."""

import itertools
import random
import sys
from collections import UserList
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from hypothesis import given
from hypothesis import strategies as st
from samples import Foreign, NoLength

from sharded_loader import BatchSampler, IntervalSampler, RandomSampler, Sampler, ShardedBatchSampler, ShardedDataLoader
from sharded_loader.engine.messages import Task
from sharded_loader.engine.order import Position, resolve_replicas
from sharded_loader.engine.split import plain_index
from sharded_loader.randomness.rng import Bijection
from sharded_loader.sampling.epoch import Ahead, MapEpoch, SamplerSource
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.own import ReplicaSampler
from sharded_loader.sampling.state import Signature, dump, parse
from sharded_loader.sampling.tables import (
    BLOCK,
    BatchedTable,
    EndlessTable,
    EpochSegment,
    LazyTable,
    PaddedTable,
    Rollover,
    StridedTable,
    Table,
    parts,
)


def order(length: int | None = 10, **given: Any) -> MapOrder:
    arguments: dict[str, Any] = dict.fromkeys(("sampler", "last_batch", "batch_sampler", "num_replicas", "rank"))
    size = None if "batch_sampler" in given else 3
    return MapOrder(length, **{**arguments, "batch_size": size, "shuffle": False, "seed": 1, **given})


def at(one: MapEpoch, number: int) -> Any:
    """A batch as a list, without the number of its first sample."""
    found = one.batch(number)
    return found and (found[0].tolist() if isinstance(found[0], np.ndarray) else found[0])


def rest(one: MapEpoch, number: int | None = None) -> list[Any]:
    """The batches of an epoch from a number on, or all of them."""
    each = (at(one, number) for number in itertools.count(one.first if number is None else number))
    return list(itertools.takewhile(lambda batch: batch is not None, each))


def test_a_batch_of_one_rank_of_4096_computes_its_own_samples_only(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []
    sampler = RandomSampler(10**12, seed=1)
    monkeypatch.setattr(
        Bijection, "__call__", lambda self, at, real=Bijection.__call__: computed.append(len(at)) or real(self, at)
    )
    one = order(10**12, sampler=sampler, batch_size=256, num_replicas=4096, rank=7).epoch(0)
    batch, first = one.batch(1000)
    assert first == 256_000 * 4096 + 7
    assert computed == [2**15]  # a block of 128 batches
    assert batch.tolist() == [next(sampler.iter_epoch(0, (256_000 + step) * 4096 + 7)) for step in range(256)]


def test_a_signature_says_what_decides_the_order() -> None:
    arguments = ("IntervalSampler.interval", 3), ("IntervalSampler.rollover", True)
    expected = Signature(1, 10, "IntervalSampler", 10, (None,), 3, "keep", arguments)
    assert order(sampler=IntervalSampler(10, 3)).signature(0) == expected
    arguments = ("BatchSampler.batch_size", 4), ("BatchSampler.last_batch", "keep")
    expected = Signature(1, 10, "BatchSampler(torch.RandomSampler)", None, (2, None), None, None, arguments)
    assert order(batch_sampler=BatchSampler(torch_data.RandomSampler(range(10)), 4, seed=2)).signature(0) == expected


def test_the_sampler_of_a_batch_sampler_is_the_one_that_it_cuts() -> None:
    indices = RandomSampler(10, seed=1)
    assert order(batch_sampler=BatchSampler(indices, 4)).sampler is indices
    assert order(batch_sampler=[[1, 2]]).sampler is None


def test_the_open_iterator_of_a_sampler_without_a_length_goes_on_in_the_next_epoch() -> None:
    read: list[int] = []
    sampler = NoLength(lambda: (read.append(number) or number % 50 for number in itertools.count()))
    loader = ShardedDataLoader(range(50), 3, sampler=sampler, steps_per_epoch=4)
    assert [index for _ in range(12) for batch in loader for index in batch.tolist()] == [n % 50 for n in read]
    assert read == list(range(12 * 12))


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_sampler_without_a_length_that_ends_under_steps_per_epoch_is_an_error(ranks: int) -> None:
    ends = NoLength(range(20))
    loader = ShardedDataLoader(range(50), 3, sampler=ends, steps_per_epoch=2, num_replicas=ranks, rank=0)
    with pytest.raises(ValueError, match="has no length and ended after 20 items: give it a __len__, so that it can"):
        for _ in range(4):
            list(loader)


class Pure(Sampler[int]):
    """A user's own pure sampler."""

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return iter(random.Random(epoch).sample(range(23), 23)[start:])

    def len_epoch(self, epoch: int) -> int:
        return 23


def gluon() -> Foreign:
    return Foreign(lambda: random.sample(range(23), 23), 23)


def one_list_again_and_again() -> Iterator[list[int]]:
    batch = [0, 0]
    for number in range(7):
        batch[:] = [2 * number, 2 * number + 1]
        yield batch


ORDERS: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True},
    "rollover": {"shuffle": True, "last_batch": "rollover"},
    "rank": {"shuffle": True, "num_replicas": 2, "rank": 1},
    "rank, rollover": {"shuffle": True, "num_replicas": 2, "rank": 1, "last_batch": "rollover"},
    "pure": {"sampler": Pure()},
    "own batches": {"batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(23, seed=2), 4), 2)},
    "gluon": {"sampler": gluon()},
    "gluon, rollover": {"sampler": gluon(), "last_batch": "rollover"},
    "gluon, rank": {"sampler": gluon(), "num_replicas": 3, "rank": 2},
    "torch batches": {"batch_sampler": torch_data.BatchSampler(torch_data.RandomSampler(range(23)), 4, False)},
    "batches of torch's": {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(23)), 4, "rollover", seed=2)},
    "reused list": {"batch_sampler": NoLength(one_list_again_and_again)},
    "reused list, rank": {"batch_sampler": NoLength(one_list_again_and_again), "num_replicas": 2, "rank": 1},
}
FOREIGN = [kind for kind in ORDERS if any(word in kind for word in ("gluon", "torch", "reused"))]


def reading(kind: str, epoch: int = 1, position: Position | None = None) -> MapEpoch:
    return order(23, **ORDERS[kind]).epoch(epoch, position)


@pytest.mark.parametrize("kind", ORDERS)
def test_any_batch_that_is_not_forgotten_can_be_asked_again(kind: str) -> None:
    expected = rest(reading(kind))
    one = reading(kind)
    assert one.keeps == (kind in FOREIGN)
    assert [at(one, number) for number in range(3)] == expected[:3]
    assert [at(one, number) for number in (2, 0, 1)] == [expected[number] for number in (2, 0, 1)]
    one.forget(2)
    assert at(one, 1) == expected[1]  # the last one that was delivered may be taken back
    assert rest(one, 2) == expected[2:]
    assert one.batch(len(expected)) is None and one.batch(len(expected) + 5) is None
    assert at(one, len(expected) - 1) == expected[-1]
    for number in (3, 0, 2, 1) if kind not in FOREIGN else ():
        assert at(reading(kind), number) == expected[number]


@pytest.mark.parametrize("kind", ORDERS)
def test_every_position_leads_on_to_the_same_batches(kind: str) -> None:
    expected = rest(reading(kind))
    one = reading(kind)
    for number in range(len(expected)):
        position = one.position(number)
        assert parse(dump(position, one.source.signature)) == (position, one.source.signature)
        again = reading(kind, 1, position)
        assert at(one, number) == at(again, number) == expected[number]
        assert one.batch(number)[1] == again.batch(number)[1]
        assert (again.first, rest(reading(kind, 1, position))) == (number, expected[number:])
        if not one.keeps:
            assert rest(again.again()) == expected[number:]
    if kind != "reused list" and kind != "reused list, rank":
        assert one.length() == len(expected)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_batch_comes_at_the_next_call(kind, error, monkeypatch):
    from sharded_loader.sampling import third_party

    expected = rest(reading(kind))
    one = reading(kind)
    assert at(one, 0) == expected[0]
    with monkeypatch.context() as patched, pytest.raises(error):
        patched.setattr(third_party, "bytes_of", lambda items: (_ for _ in ()).throw(error()))
        one.batch(1)
    if error is KeyboardInterrupt:
        assert rest(one, 1) == expected[1:]
    else:  # an error ends the epoch
        assert one.batch(2) is None


@pytest.mark.parametrize("fails_at", [4, 5, 8])
def test_an_error_of_the_sampler_comes_at_its_batch_and_ends_the_epoch(fails_at: int) -> None:
    def until_it_fails() -> Iterator[int]:
        yield from range(fails_at)
        raise KeyError(fails_at)

    one = order(12, sampler=Foreign(until_it_fails, 12), batch_size=4).epoch(0)
    failing = fails_at // 4
    assert [at(one, number) for number in range(failing)] == [[0, 1, 2, 3], [4, 5, 6, 7]][:failing]
    for _ in range(2):
        with pytest.raises(KeyError):
            one.batch(failing)
        assert one.batch(failing + 1) is None


def test_batches_are_arrays_if_the_sampler_is_ours_or_the_dataset_gathers_by_them() -> None:
    for kind in ("shuffle", "rollover", "rank", "rank, rollover"):
        one = reading(kind)
        found = one.batch(one.first)
        assert found is not None and isinstance(found[0], np.ndarray) and found[0].dtype == np.int64
    for arrays in (False, True):
        one = order(5, sampler=UserList([3, 1, 4, 0, 2]))
        one.arrays = arrays
        found = one.epoch(0).batch(0)
        assert found is not None and isinstance(found[0], np.ndarray) == arrays
        assert list(found[0]) == [3, 1, 4]


def test_with_rollover_a_position_behind_the_next_epochs_beginning_is_carried_there() -> None:
    # Of 10 samples in threes one rank ends epoch 0 at 9. In fives it ends at 10.
    source = order(10, last_batch="rollover", batch_size=5)
    late = source.epoch(0, Position(0, 10))
    assert late.is_over() and late.following() == Position(1, 0)
    threes = order(10, last_batch="rollover", batch_size=3)
    over = threes.epoch(0, Position(0, 10))
    assert (over.carry, over.batch(over.first), over.length() - over.first) == (Position(1, 0), None, 0)
    early = threes.epoch(1, Position(1, -1))
    assert rest(early) == [[9, 0, 1], [2, 3, 4], [5, 6, 7]]
    assert [early.position(number).done for number in range(4)] == [-1, 2, 5, 8]


def test_a_checkpoint_behind_the_position_is_not_used() -> None:
    """Other ranks may have read a group further than the position that a state counts."""
    one = reading("gluon")
    mark = [one.position(number).mark for number in range(4) if one.batch(number)][3]
    assert mark is not None and mark.items == 9
    again = reading("gluon", 1, Position(1, 6, mark))
    assert rest(again) == rest(reading("gluon"))[2:]


def test_a_batch_says_where_its_first_sample_lies() -> None:
    def firsts(**given: Any) -> list[int]:
        one = order(10, **given).epoch(1)
        return [found[1] for number in range(5) if (found := one.batch(number)) is not None]

    assert firsts() == [0, 3, 6, 9]
    assert firsts(last_batch="rollover") == [-1, 2, 5]
    assert firsts(num_replicas=3, rank=2, batch_size=2) == [2, 8]
    assert firsts(batch_sampler=[[1], [2, 3], [4]]) == [0, 1, 2]
    assert firsts(sampler=[1, 2, 3, 4, 5]) == [0, 3]


LISTED = {"list": list, "tuple": tuple, "range": lambda items: range(len(items))}


@pytest.mark.parametrize("kind", LISTED)
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_list_is_read_as_any_sampler_of_another_library_and_has_its_checkpoints(kind: str, replicas: int) -> None:
    given = LISTED[kind](list(range(11)))
    options: dict[str, Any] = {"num_replicas": replicas, "rank": 0} if replicas > 1 else {}
    own = type("Own", (list,), {})(given)  # a subclass may do as it likes
    listed, foreign = (order(11, sampler=one, **options).epoch(0) for one in (given, own))
    assert not listed.keeps and foreign.keeps
    for number in range(6):
        found, wanted = listed.batch(number), foreign.batch(number)
        assert (found is None) == (wanted is None)
        if found is None or wanted is None:
            break
        assert list(found[0]) == list(wanted[0]) and found[1] == wanted[1]
        position = listed.position(number + 1)
        assert position == foreign.position(number + 1)
        again = order(11, sampler=given, **options).epoch(0, position)
        assert rest(again) == rest(foreign)[number + 1 :] if not again.is_over() else True
    assert listed.position(1) == foreign.position(1)  # checkpoints may be asked for in any order


# -- from batches to numbered tasks: what is wrong becomes the error in its place --------------------------------------


class Given(MapEpoch):
    """Epoch 3 of run 7, of these batches. They have two samples each, as far as positions go."""

    def __init__(self, batches: tuple[Any, ...], max_shards: int | None, given_batches: bool) -> None:
        signature = Signature(1, None, "", None, (), None if given_batches else 2, "keep")
        super().__init__(SamplerSource([], signature, 1, 0, False, max_shards=max_shards), 3, None)
        self.run, self._own = 7, batches

    def batch(self, number: int) -> Any:
        if number >= len(self._own):
            return None
        if isinstance(self._own[number], Exception):
            raise self._own[number]
        return self._own[number], 2 * number


def epoch_of(
    *batches: Any, length: int | None = 10, max_shards: int | None = None, given_batches: bool = False
) -> MapEpoch:
    epoch = Given(batches, max_shards, given_batches)
    epoch.limit = length
    return epoch


def task_of(epoch: MapEpoch, seq: int) -> Task:
    found = epoch.task(seq)
    assert isinstance(found, Task)
    return found


def test_a_batch_is_a_task_that_knows_its_run_number_epoch_and_first_position() -> None:
    epoch = epoch_of([5, 6], [7, 8])
    for seq in (1, 0, 1):  # again, in any order
        task = task_of(epoch, seq)
        assert (task.run, task.seq, task.epoch, task.position) == (7, seq, 3, 2 * seq)
        assert task.shards == ([5 + 2 * seq, 6 + 2 * seq],) and not task.sharded
    assert epoch.task(2) is None


@pytest.mark.parametrize(
    ("batch", "shards"),
    [
        ([np.int64(3), np.int32(9)], [[3, 9]]),
        (np.array([3, 9], np.int32), [[3, 9]]),
        ((3, -10), [[3, -10]]),
        (["a", ("b", 1)], [["a", ("b", 1)]]),  # keys are left to the dataset
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
def test_indices_of_any_kind_become_plain_ints_and_a_given_batch_may_be_a_list_of_shards(batch, shards):
    task = task_of(epoch_of(batch, given_batches=True), 0)
    assert list(task.shards) == shards and task.sharded is (len(shards) > 1)
    assert {type(index) for index in task.shards[0]} in ({int}, {str, tuple})


def test_an_array_of_indices_stays_the_same_array_and_a_list_is_copied() -> None:
    array, batch = np.array([9, -10]), [1, 2]
    assert task_of(epoch_of(array), 0).shards[0] is array
    task = task_of(epoch_of(batch), 0)
    batch[:] = [8, 9]  # a sampler may fill it again
    assert task.shards == ([1, 2],)
    assert task_of(epoch_of(np.array([10**12]), length=None), 0).shards[0].tolist() == [10**12]
    assert not task_of(epoch_of([(1, 2), (3,)]), 0).sharded


def test_batches_of_one_block_are_checked_together_and_a_bad_one_alone_is_an_error() -> None:
    good, bad = np.arange(8), np.array([1, 2, 3, 10, 4, 5, -11, 6])
    epoch = epoch_of(*good.reshape(4, 2), *bad.reshape(4, 2))
    for seq in range(4):
        assert task_of(epoch, seq).shards[0].tolist() == [2 * seq, 2 * seq + 1]
    for seq in (5, 7):
        assert "the sampler yielded index" in str(epoch.task(seq))
    for seq in (4, 6):
        assert task_of(epoch, seq).shards[0].base is bad
    of_another_type = np.array([10, 3], np.uint64).view(np.int64)
    assert "the sampler yielded index 10" in str(epoch_of(of_another_type).task(0))


@pytest.mark.parametrize("kind", ["shuffle", "own batches"])  # flat, and in two shards
def test_a_dataset_that_looks_ahead_is_told_all_indices_of_a_batch_in_one_list(kind: str) -> None:
    ahead = Ahead(reading(kind, 1), reading(kind, 2))
    for epoch, told in ((1, ahead.batches), (2, ahead.later)):
        batches = rest(reading(kind, epoch))
        flat = [list(itertools.chain(*batch)) if kind == "own batches" else batch for batch in batches]
        assert [list(told(number)) for number in range(len(batches))] == flat
        assert told(len(batches)) is None


@pytest.mark.parametrize(
    ("batch", "error", "text"),
    [
        ([], ValueError, "is empty"),
        (np.array([], np.int64), ValueError, "is empty"),
        (7, TypeError, "the batch sampler yielded 7"),
        ("ab", TypeError, "the batch sampler yielded 'ab'"),
        ([10], IndexError, "the sampler yielded index"),
        ([-11], IndexError, "the sampler yielded index"),
        (np.array([10]), IndexError, "the sampler yielded index"),
        (np.array([3, -11]), IndexError, "the sampler yielded index"),
        ([[1], []], ValueError, "shard 1 is empty"),
        ([[1], [2], [3]], ValueError, "has 3 shards, but there are only 2 devices"),
    ],
    ids=str,
)
def test_what_is_no_batch_is_an_error_in_its_place(batch: Any, error: type[Exception], text: str) -> None:
    epoch = epoch_of([0], batch, [9, -10], max_shards=2, given_batches=True)
    found = epoch.task(1)
    assert type(found) is error and "epoch 3, batch 1" in str(found) and text in str(found)
    assert task_of(epoch, 2).shards == ([9, -10],)


def test_what_a_sampler_raises_is_the_error_in_its_place_with_a_note() -> None:
    raised = KeyError("no file")
    found = epoch_of(raised).task(0)
    assert found is raised
    assert "raised by the sampler, in epoch 3 at batch 0" in "\n".join(raised.__notes__)  # type: ignore[attr-defined]


# -- the arithmetic of positions, on numbers; ranks share one global order, and each reads as much as the others -------


def numbers(length: int, first: int = 0, block: int = 4) -> Table:
    return Table(length, lambda positions: positions + first, block)


def streamed(length: int, first: int = 0) -> LazyTable:
    return LazyTable(lambda start: iter(range(first + start, first + length)))


KINDS = {"table": numbers, "stream": streamed}


def asked(*positions: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(positions, np.int64)


def test_a_stream_is_read_no_further_than_asked_and_again_from_anywhere() -> None:
    opened: list[int] = []
    read: list[int] = []

    def open_at(start: int) -> Iterator[int]:
        opened.append(start)
        for number in range(start, 10):
            read.append(number)
            yield number

    table = LazyTable(open_at)
    assert opened == []
    assert table.upto(2, 4) == 4 and read == [2, 3] and opened == [2]  # it jumps to the first item that is asked for
    assert table.at(asked(2, 3)) == [2, 3]
    assert table.upto(4, 6) == 6 and read == [2, 3, 4, 5]
    assert table.at(asked(5)) == [5]
    assert table.at(asked(0, 3)) == [0, 3] and opened == [2, 0]  # what was returned before is read again
    assert table.upto(8, 20) == 10 and table.at(asked(8, 9)) == [8, 9]
    assert table.upto(10, 12) == 10


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), replicas=st.integers(1, 7), offset=st.integers(0, 45), truncate=st.booleans())
def test_ranks_share_the_rest_of_an_epoch(kind: str, length: int, replicas: int, offset: int, truncate: bool) -> None:
    shares = [
        list(StridedTable(KINDS[kind](length), replicas, rank, offset, truncate).items()) for rank in range(replicas)
    ]
    dealt = [item for group in zip(*shares, strict=True) for item in group]
    rest = max(length - offset, 0)
    padded = parts(rest, replicas, truncate) * replicas
    assert dealt == [(offset + place) % length for place in range(padded)]
    assert list(StridedTable(KINDS[kind](length), replicas, 0, offset, truncate).items(2)) == shares[0][2:]


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), start=st.integers(0, 6))
def test_batches_are_slices(kind: str, length: int, size: int, drop: bool, start: int) -> None:
    slices = [list(range(begin, min(begin + size, length))) for begin in range(0, length, size)]
    expected = [one for one in slices if len(one) == size or not drop]
    assert list(BatchedTable(KINDS[kind](length), size, drop).items(start)) == expected[start:]
    arrays = list(BatchedTable(KINDS[kind](length), size, drop, arrays=True, convert=True).items(start))
    assert all(array.dtype == np.int64 for array in arrays)
    assert [array.tolist() for array in arrays] == expected[start:]
    whole = asked(*range(0, len(expected), 2))
    if len(whole):
        assert BatchedTable(KINDS[kind](length), size, drop).at(whole) == expected[::2]


@pytest.mark.parametrize(("place", "filler"), [(6, 2), (9, 5), (11, 3)])
def test_a_rank_that_begins_behind_the_end_repeats_its_last_item(place: int, filler: int) -> None:
    table = PaddedTable(Table(6, lambda positions: positions), 6, 0, 12, 4)  # each rank has every fourth item
    assert list(table.at(np.array([place]))) == [filler]


def test_batches_are_made_a_block_at_a_time_where_indices_cost_nothing() -> None:
    """The fast path of the loader: of 32,768 indices at once."""
    assert BatchedTable(numbers(10**6, block=BLOCK), 64).block == 512
    assert BatchedTable(StridedTable(numbers(10**6, block=BLOCK), 3, 1), 64).block == 512
    assert BatchedTable(streamed(10**6), 64).block == 1
    items = EndlessTable(lambda epoch: numbers(10, block=BLOCK), EpochSegment(10, 1, 0, 0), 0, 100, "A")
    endless = BatchedTable(items, 4)
    endless.at(asked(0))
    assert endless.block == BLOCK // 4


def test_numbers_of_any_kind_become_ints_and_keys_stay() -> None:
    items = [np.int32(3), np.array(4), True, "key", 2**70, (1, 2)]
    assert [plain_index(item) for item in items] == [3, 4, 1, "key", 2**70, (1, 2)]
    table = BatchedTable(LazyTable(lambda start: iter(items[start:])), 3, arrays=True)
    assert [list(batch) for batch in table.items()] == [[3, 4, 1], ["key", 2**70, (1, 2)]]


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(0, 40), size=st.integers(1, 9), drop=st.booleans(), step=st.integers(1, 5))
def test_a_slice_is_what_the_two_questions_answer(kind: str, length: int, size: int, drop: bool, step: int) -> None:
    one, other = (BatchedTable(KINDS[kind](length), size, drop) for _ in range(2))
    for begin in range(0, 12, step):
        end = one.upto(begin, begin + step)
        expected = one.at(np.arange(begin, end)) if end > begin else []
        assert other.slice(begin, begin + step) == expected
    assert other.slice(0, 1) == BatchedTable(KINDS[kind](length), size, drop).slice(0, 1)  # again from the beginning


# -- The endless sequence of epochs, cut into whole batches: arithmetic on numbers -------------------------------------


def test_rollover_goes_on_from_any_item() -> None:
    # 10 items on 3 ranks are 4 steps: in threes epoch 0 owns one batch of 9 items, epoch 1 begins at item 9.
    ranks = [Rollover(10, 3, epoch, replicas=3) for epoch in range(2)]
    assert [(one.total(0), one.length()) for one in ranks] == [(0, 1), (9, 1)] and ranks[1].total(1) == 16
    begun = Rollover(5, 2, epoch=1, done=1)
    assert (begun.first, begun.length(), begun.is_begun, begun.is_behind) == (1, 2, True, False)
    # Another batch size left 7 items: the next whole batch is number 2, and the last batch has one item.
    odd = Rollover(5, 2, epoch=1, done=2)
    assert (odd.first, odd.length(), [odd.total(batches) for batches in range(3)]) == (1, 2, [7, 9, 10])
    behind = Rollover(5, 3, epoch=0, done=4)
    assert (behind.length(), behind.is_behind, behind.total(0)) == (0, True, 4)
    assert (Rollover(0, 4, epoch=3).length(), Rollover(0, 4, epoch=3).total(0)) == (0, 0)  # an empty sampler


def dealt_endlessly(length: int, replicas: int, epochs: int) -> list[list[int]]:
    """What each rank gets of epochs of different numbers."""
    shares: list[list[int]] = [[] for _ in range(replicas)]
    for epoch in range(epochs):
        for rank, share in enumerate(shares):
            share += StridedTable(numbers(length, 100 * epoch), replicas, rank).items()
    return shares


@pytest.mark.parametrize("kind", KINDS)
@given(length=st.integers(1, 13), replicas=st.integers(1, 5), size=st.integers(1, 30), skip=st.integers(0, 40))
def test_the_endless_sequence_is_cut_anywhere(kind: str, length: int, replicas: int, size: int, skip: int) -> None:
    for rank, share in enumerate(dealt_endlessly(length, replicas, 90 // parts(length, replicas, False) + 2)):
        segment = EpochSegment(length, replicas, 0, 0)
        endless = EndlessTable(lambda epoch: KINDS[kind](length, 100 * epoch), segment, rank, 80, "A")
        got = list(BatchedTable(endless, size).items(skip // size))
        assert list(itertools.chain(*got)) == share[skip // size * size : 80]
        for step in range(0, 80, 7):
            epoch, first = segment.where(step)
            assert share[step] // 100 == epoch and first <= step < first + segment.steps
            assert segment.steps_before(segment.total(step)) == step


def test_a_stretch_may_begin_where_another_number_of_ranks_stopped() -> None:
    segment = EpochSegment(10, 3, 1, 4)  # 6 items are left in epoch 1: two steps
    assert [segment.where(step) for step in (0, 1, 2, 5, 6)] == [(1, 0), (1, 0), (2, 2), (2, 2), (3, 6)]
    assert [segment.total(step) for step in (0, 1, 2, 3, 6)] == [14, 17, 20, 23, 30]
    endless = EndlessTable(lambda epoch: numbers(10, 100 * epoch), segment, 1, 7, "A")
    assert endless.at(np.arange(7)).tolist() == [105, 108, 201, 204, 207, 200, 301]


@pytest.mark.parametrize(("yields", "found"), [(3, "yielded 3 items in epoch 0"), (7, "more than 5 items in epoch 0")])
def test_an_epoch_of_another_length_is_an_error_with_rollover(yields: int, found: str) -> None:
    endless = BatchedTable(EndlessTable(lambda epoch: streamed(yields), EpochSegment(5, 1, 0, 0), 0, 20, "Short"), 2)
    with pytest.raises(ValueError, match=f"a Short, .*{found}.*its length is 5.*__len__"):
        list(endless.items())


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("replicas", [1, 3, 4])
def test_ranks_get_what_torchs_distributed_sampler_gives(replicas: int, truncate: bool) -> None:
    for length, rank in itertools.product((9, 10, 12), range(replicas)):
        torchs = torch_data.DistributedSampler(range(length), replicas, rank, shuffle=False, drop_last=truncate)
        ours = ReplicaSampler(Foreign(range(length)), partial(resolve_replicas, replicas, rank), truncate=truncate)
        assert list(ours.iter_epoch(0)) == list(torchs) and len(ours) == len(torchs)
        assert list(ours.iter_epoch(0, 2)) == list(torchs)[2:]


@pytest.mark.parametrize("replicas", [2, 3, 1000])
def test_ranks_stride_over_the_boundaries_of_blocks(replicas: int) -> None:
    length = 2 * BLOCK + 100
    order = RandomSampler(length, seed=3)
    whole = list(order.iter_epoch(1))
    for rank in {0, 1, replicas - 1}:
        expected = whole[rank::replicas]
        if len(expected) < -(-length // replicas):
            expected.append(whole[(rank + len(expected) * replicas) % length])
        sampler = ReplicaSampler(order, partial(resolve_replicas, replicas, rank))
        assert list(sampler.iter_epoch(1)) == expected
        assert list(sampler.iter_epoch(1, len(expected) - 3)) == expected[-3:]
        assert list(itertools.chain.from_iterable(BatchSampler(sampler, 7).iter_epoch(1))) == expected


def test_resolve_replicas_reads_the_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_replicas(None) == (1, 0)
    assert resolve_replicas(1) == (1, 0)
    assert resolve_replicas(4, 3) == (4, 3)
    assert resolve_replicas("auto", environ={}) == (1, 0)
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)
    group = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_world_size=lambda: 8, get_rank=lambda: 5
    )
    monkeypatch.setitem(sys.modules, "torch.distributed", group)  # type: ignore[arg-type]
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (8, 5)
    group.is_initialized = lambda: False
    assert resolve_replicas("auto", environ={"WORLD_SIZE": "4", "RANK": "2"}) == (4, 2)
