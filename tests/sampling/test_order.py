"""A loader's order: an epoch's batches by their numbers, again, after an interruption, from any position on."""

import itertools
import random
from collections import UserList
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch.utils.data as torch_data
from samples import Foreign, NoLength

from sharded_loader import BatchSampler, IntervalSampler, RandomSampler, Sampler, ShardedBatchSampler, ShardedDataLoader
from sharded_loader.engine.messages import Task
from sharded_loader.engine.order import Position
from sharded_loader.randomness.shuffle import Bijection
from sharded_loader.sampling.epoch import MapEpoch, SamplerSource
from sharded_loader.sampling.order import MapOrder
from sharded_loader.sampling.state import Signature, dump, parse


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
    "reused list, rank": {"batch_sampler": NoLength(one_list_again_and_again), "num_replicas": 2, "rank": 0},
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
    if kind != "reused list" and kind != "reused list, rank":
        assert one.length() == len(expected)


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_batch_comes_at_the_next_call(
    kind: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_indices_of_any_kind_become_plain_ints_and_a_given_batch_may_be_a_list_of_shards(
    batch: Any, shards: Any
) -> None:
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
