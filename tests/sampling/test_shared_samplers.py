"""Samplers belong to nobody: what is done with a sampler changes nothing in a loader, but for an explicit set_epoch."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
import torch
import torch.utils.data as torch_data
from samples import ByEpoch, GluonStyle
from torch.utils.data import DistributedSampler

from sharded_loader import (
    BatchSampler,
    BoundedBudgetSampler,
    ClassBalancedBatchSampler,
    FixedBucketSampler,
    GroupedBatchSampler,
    IntervalSampler,
    PackSampler,
    RandomSampler,
    RepeatedSampler,
    SequentialSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    ShardShuffleSampler,
    SortedBucketSampler,
    SplitSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from sharded_loader.data.seeding import epoch_setter
from sharded_loader.engine.epoch_requests import EpochRequests
from sharded_loader.torch import DataLoader

LENGTH = 12
LENGTHS = [3, 9, 4, 1, 7, 2, 8, 8, 1, 5, 6, 2]


def shuffled() -> list[int]:
    return torch.randperm(LENGTH).tolist()


class CountsItself(torch_data.RandomSampler):
    """Ends its epoch by going on to the next, as accelerate's ``SeedableRandomSampler`` does."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(LENGTH, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        self.set_epoch(self.epoch + 1)


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"batch_size": 3},
    "shuffle": lambda: {"batch_size": 3, "shuffle": True},
    "rollover": lambda: {"batch_size": 5, "shuffle": True, "last_batch": "rollover"},
    "random": lambda: {"batch_size": 3, "sampler": RandomSampler(LENGTH, seed=1)},
    "random, without a seed": lambda: {"batch_size": 3, "sampler": RandomSampler(LENGTH)},
    "subset": lambda: {"batch_size": 3, "sampler": SubsetRandomSampler(range(9), seed=1)},
    "interval": lambda: {"batch_size": 3, "sampler": IntervalSampler(LENGTH, 2)},
    "split": lambda: {"batch_size": 2, "sampler": SplitSampler(LENGTH, 2, 1, seed=1)},
    "weighted": lambda: {"batch_size": 3, "sampler": WeightedRandomSampler(LENGTHS, 10, seed=1)},
    "batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=1), 5, "rollover")},
    "shards": lambda: {"batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(LENGTH), 4), 2)},
    "sorted buckets": lambda: {"batch_sampler": SortedBucketSampler(LENGTHS, 3, 2, shuffle=True, seed=1)},
    "fixed buckets": lambda: {"batch_sampler": FixedBucketSampler(LENGTHS, 3, 2, shuffle=True, seed=1)},
    "budget": lambda: {"batch_sampler": BoundedBudgetSampler(LENGTHS, 16, seed=1)},
    "gluon style": lambda: {"batch_size": 3, "sampler": GluonStyle(shuffled, LENGTH)},
    "torch": lambda: {"batch_size": 3, "sampler": torch_data.RandomSampler(range(LENGTH))},
    "torch batches of ours": lambda: {"batch_sampler": torch_data.BatchSampler(RandomSampler(LENGTH, seed=1), 5, True)},
    "our batches of torch's": lambda: {"batch_sampler": BatchSampler(torch_data.RandomSampler(range(LENGTH)), 5)},
    "torch distributed": lambda: {"batch_size": 3, "sampler": DistributedSampler(range(LENGTH), 2, 1)},
    "counts itself": lambda: {"batch_size": 3, "sampler": CountsItself(range(LENGTH))},
    "list": lambda: {"batch_size": 3, "sampler": list(range(LENGTH))[::-1]},
    "ranks": lambda: {"batch_size": 2, "shuffle": True, "num_replicas": 2, "rank": 1},
}


def make(kind: str, given: dict[str, Any] | None = None, seed: int | None = 4) -> ShardedDataLoader:
    return ShardedDataLoader(range(LENGTH), seed=seed, **(SAMPLERS[kind]() if given is None else given))


def plain(batch: Any) -> Any:
    return [plain(part) for part in batch] if isinstance(batch, list) else batch.tolist()


def epochs(loader: Any, count: int) -> list[Any]:
    return [[plain(batch) for batch in loader] for _ in range(count)]


LOOKS: dict[str, Callable[[Any], Any]] = {
    "iterates": lambda sampler: [list(sampler) for _ in range(3)],
    "iterates in part": lambda sampler: next(iter(sampler)),
    "prints": lambda sampler: (repr(sampler), str(sampler)),
    "measures": lambda sampler: len(sampler),
    "copies": lambda sampler: (copy.copy(sampler), copy.deepcopy(sampler)),
    "pickles": lambda sampler: pickle.loads(pickle.dumps(sampler)),
}


# The __iter__ of "counts itself" calls set_epoch: nobody can tell that from a call of the user's. With ranks, the
# loader's own sampler asks the loader for the rank: it cannot be pickled.
APART = {("counts itself", "iterates"), ("ranks", "pickles")}


@pytest.mark.parametrize(("kind", "look"), [(k, look) for k in SAMPLERS for look in LOOKS if (k, look) not in APART])
@pytest.mark.costly(11)
def test_looking_at_a_sampler_changes_nothing_in_its_loader(kind: str, look: str) -> None:
    expected = epochs(make(kind), 4)
    loader = make(kind)

    def look_at_all() -> None:
        before = loader.epoch, loader.position, loader.state_dict()
        for sampler in (loader.sampler, loader.batch_sampler):
            if sampler is not None:
                LOOKS[look](sampler)
        assert (loader.epoch, loader.position, loader.state_dict()) == before

    look_at_all()
    got = epochs(loader, 1)
    look_at_all()
    iterator = iter(loader)
    part = [plain(next(iterator))]
    look_at_all()  # in mid-epoch
    state = loader.state_dict()
    got.append(part + [plain(batch) for batch in iterator])
    look_at_all()
    got += epochs(loader, 2)
    assert got == expected
    loader.load_state_dict(state)
    look_at_all()  # where a position is pending
    assert epochs(loader, 1) == [expected[1][1:]]


@pytest.mark.parametrize("kind", [kind for kind in SAMPLERS if kind not in ("none", "shuffle", "rollover", "ranks")])
def test_two_loaders_share_a_sampler_as_if_each_had_its_own(kind: str) -> None:
    expected = epochs(make(kind), 5)
    given = SAMPLERS[kind]()
    one, other = make(kind, given), make(kind, given)
    if kind != "counts itself":
        assert [list(batch) for batch in one.batch_sampler] == expected[0]
    iterator = iter(one)
    first = [plain(next(iterator))]
    if "torch" in kind or "gluon" in kind:  # these cannot be read by both in mid-epoch
        first += [plain(batch) for batch in iterator]
    assert epochs(other, 1) == expected[:1]
    assert [first + [plain(batch) for batch in iterator], *epochs(one, 1)] == expected[:2]
    state = one.state_dict()
    assert epochs(one, 1) == expected[2:3] and epochs(other, 3) == expected[1:4]
    assert (one.epoch, other.epoch) == (3, 4)
    one.load_state_dict(state)
    assert (one.epoch, other.epoch) == (2, 4)
    assert epochs(one, 3) == expected[2:] and epochs(other, 1) == expected[4:]


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sampler: {"batch_size": 3, "sampler": sampler},
        lambda sampler: {"batch_sampler": BatchSampler(sampler, 3)},
        lambda sampler: {"batch_sampler": ShardedBatchSampler(BatchSampler(sampler, 3), 1)},
    ],
)
def test_each_loader_gives_a_sampler_without_a_seed_its_own(wrap: Callable[[Any], dict[str, Any]]) -> None:
    expected = [epochs(make("", wrap(RandomSampler(LENGTH)), seed=seed), 3) for seed in (1, 2)]
    assert expected[0] != expected[1]
    sampler = RandomSampler(LENGTH)
    before = sampler.seed
    loaders = [make("", wrap(sampler), seed=seed) for seed in (1, 2)]
    got = [epochs(loader, 1) for loader in loaders]
    got = [first + epochs(loader, 2) for first, loader in zip(got, loaders, strict=True)]
    assert got == expected
    assert sampler.seed == before


def test_a_state_gives_its_seed_to_one_loader_alone() -> None:
    first = make("random, without a seed", seed=1)
    expected = epochs(first, 2)
    state = first.state_dict()
    sampler = RandomSampler(LENGTH)
    loader, other = (make("", {"batch_size": 3, "sampler": sampler}, seed=None) for _ in range(2))
    others = epochs(other, 2)
    loader.load_state_dict(state | {"epoch": 0})
    assert epochs(loader, 2) == expected
    other.set_epoch(0)
    assert epochs(other, 2) == others
    loader.sampler.set_epoch(1)
    assert epochs(loader, 1) == expected[1:]


@pytest.mark.parametrize(
    "kind", [kind for kind in SAMPLERS if hasattr(make(kind).sampler or make(kind).batch_sampler, "set_epoch")]
)
def test_an_explicit_set_epoch_on_a_sampler_moves_its_loaders(kind: str) -> None:
    expected = epochs(make(kind), 6)
    given = SAMPLERS[kind]()
    loaders = [make(kind, given)]
    user = given.get("sampler", given.get("batch_sampler"))
    user = user if hasattr(user, "set_epoch") else getattr(user, "sampler", None)  # torch's BatchSampler has none
    if user is not None:
        loaders.append(make(kind, given))
    (user or loaders[0].sampler).set_epoch(4)
    for loader in loaders:
        assert loader.epoch == 4
        assert epochs(loader, 2) == expected[4:]
    loaders[0].set_epoch(1)
    assert [loader.epoch for loader in loaders] == [1, 6][: len(loaders)]
    assert epochs(loaders[0], 1) == expected[1:2]


def test_of_several_calls_the_latest_counts_also_after_the_dataset_has_grown() -> None:
    data = list(range(5))
    loader = ShardedDataLoader(data, 2, True, seed=1)
    loader.sampler.set_epoch(5)
    loader.batch_sampler.set_epoch(2)
    assert loader.epoch == 2
    loader.set_epoch(3)
    assert loader.epoch == 3
    loader.batch_sampler.set_epoch(2)
    loader.sampler.set_epoch(3)
    data.append(5)
    loader.refresh()
    assert loader.epoch == 3
    loader.sampler.set_epoch(4)
    assert loader.epoch == 4
    loader.sampler.set_epoch(7)
    loader.set_epoch(2)
    assert loader.epoch == 2


@pytest.mark.parametrize(
    ("sampler", "changes"),
    [
        (WeightedRandomSampler([1, 2, 3], 3), {"num_samples": 2}),
        (RandomSampler(3), {"length": 2}),
        (SequentialSampler(3), {"start": 1}),
        (SubsetRandomSampler([0, 2]), {"indices": [1]}),
        (IntervalSampler(4, 2), {"interval": 1}),
        (SplitSampler(4, 2), {"part_index": 1}),
        (ShardShuffleSampler([2, 2]), {"lengths": [1, 3]}),
        (RepeatedSampler(2, RandomSampler(3)), {"copies": 3}),
        (SortedBucketSampler([1, 2, 3], 1), {"sort_keys": [3, 2, 1], "mult": 1}),
        (BoundedBudgetSampler([1, 2, 3], 6), {"max_num_tokens": 3}),
        (FixedBucketSampler([1, 2, 3], 1, 2), {"batch_size": 2, "bucket_keys": [3]}),
        (GroupedBatchSampler([1, 2, 3], 1), {"by": [1, 1, 1]}),
        (ClassBalancedBatchSampler([0, 1, 0, 1], 2, 1), {"labels": [0, 0, 1, 1]}),
        (PackSampler([1, 2, 3], 4), {"tokens": 5, "lengths": [3, 2, 1]}),
    ],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_that_would_change_nothing_is_an_error(sampler: Any, changes: dict[str, Any]) -> None:
    before, kind = list(sampler.iter_epoch(0)), type(sampler).__name__
    for name, value in changes.items():
        said = f"{name} of a {kind} was read when it was made, .*: make another {kind}"
        with pytest.raises(AttributeError, match=said):
            setattr(sampler, name, value)
    assert list(sampler.iter_epoch(0)) == before

    class Own(type(sampler)):  # type: ignore[misc]
        """A class of the user's may have any attributes."""

        def __init__(self) -> None:
            self.weights = self.length = None

    assert Own().weights is None


class Kept(WeightedRandomSampler):
    """A class of the user's that keeps the weights under their name, too."""

    def __init__(self, weights: Any) -> None:
        super().__init__(weights, 3, seed=1)
        self.weights = weights


class Changing(Kept):
    """Its own order follows from the weights, whatever they are."""

    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return iter(self.weights)


class Passing(WeightedRandomSampler):
    weights = property(lambda self: self._now, lambda self, now: setattr(self, "_now", now))


@pytest.mark.parametrize("reader", [ShardedDataLoader, DataLoader])
def test_weights_of_a_users_subclass_are_followed_unless_it_keeps_them_for_itself(reader: Any) -> None:
    class Bare(WeightedRandomSampler):
        pass

    for sampler in (Bare([1, 2, 3], 3), Kept([1, 2, 3])):
        sampler.weights = [0, 0, 9]
        loader = reader(range(3), 3, sampler=sampler, collate_fn=list)
        assert list(loader) == [[2, 2, 2]]
        sampler.weights = [3, 0, 0]
        assert list(loader) == [[0, 0, 0]]
        sampler.colour = "red"  # type: ignore[attr-defined]
    changing, passing = Changing([1, 0, 2]), Passing([1, 2, 3], 3)
    loader = reader(range(3), 3, sampler=changing, collate_fn=list)
    assert list(loader) == [[1, 0, 2]]
    changing.weights = [2, 0, 1]
    assert list(loader) == [[2, 0, 1]]
    list(reader(range(3), 3, sampler=passing))
    passing.weights = [4]
    assert passing.weights == [4]


def test_a_batch_size_that_is_set_counts_from_the_next_epoch_on_and_is_in_states() -> None:
    def made(size: int) -> tuple[BatchSampler, ShardedDataLoader[Any]]:
        sampler = BatchSampler(RandomSampler(12), size)  # the loader's seed counts, so it reads a copy
        return sampler, ShardedDataLoader(range(12), batch_sampler=sampler, seed=1, collate_fn=list)

    sampler, loader = made(4)
    iterator = iter(loader)
    first = next(iterator)
    sampler.batch_size = 3
    assert [first, *iterator] == list(made(4)[1])
    iterator = iter(loader)
    assert len(next(iterator)) == 3
    state = loader.state_dict()
    assert state["sampler_arguments"]["BatchSampler.batch_size"] == 3
    other = made(3)[1]
    other.load_state_dict(state)
    assert list(other) == list(iterator)
    sampler.sampler.seed = 5  # type: ignore[attr-defined]
    wanted = BatchSampler(RandomSampler(12, seed=5), 3)
    assert list(loader) == list(wanted.iter_epoch(2))


# -- calls of set_epoch are noticed, once, whoever makes them ----------------------------------------------------------


class WithEpoch:
    """A sampler of another library."""

    def __init__(self, epoch: Any = 0) -> None:
        self.epoch = epoch

    def set_epoch(self, epoch: int) -> str:
        self.epoch = epoch
        return f"now {epoch}"


class Slotted:
    __slots__ = ("epoch",)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stateful(WithEpoch):
    def __getstate__(self) -> tuple[int, dict[str, Any]]:
        return 1, dict(vars(self))

    def __setstate__(self, state: tuple[int, dict[str, Any]]) -> None:
        vars(self).update(state[1])


class Above(WithEpoch):
    def set_epoch(self, epoch: int) -> str:
        return super().set_epoch(epoch)


def listening(*samplers: Any) -> EpochRequests:
    requests = EpochRequests()
    requests.listen(samplers)
    return requests


def test_requests_are_taken_once_and_may_be_dropped_and_the_latest_counts() -> None:
    one, other, third = WithEpoch(), RandomSampler(4, seed=1), WithEpoch(3)
    requests, others = listening(one, other), listening(other)
    assert requests.take() is None
    one.set_epoch(7)
    other.set_epoch(2)
    assert (requests.take(), requests.take(), others.take()) == (2, None, 2)
    other.set_epoch(4)
    requests.drop()
    assert (requests.take(), others.take()) == (None, 4)
    # A call that came before counts if it can be seen.
    assert listening(third).take() == 3 and listening(WithEpoch(0)).take() is None
    assert listening(WithEpoch("odd")).take() is None
    other.epoch_request = 10**9, 4  # as in a pickle from another process, where more calls were counted
    stranger = pickle.loads(pickle.dumps(other))
    strangers = listening(stranger)
    assert strangers.take() == 4
    stranger.set_epoch(1)
    assert strangers.take() == 1
    # To listen again keeps what was seen, and forgets the others.
    requests.listen([one])
    other.set_epoch(2)
    assert requests.take() is None
    one.set_epoch(3)
    assert requests.take() == 3


def test_a_sampler_of_another_library_is_heard_and_does_what_it_did() -> None:
    sampler = WithEpoch()
    requests, others = listening(sampler), listening(sampler)
    assert sampler.set_epoch(5) == "now 5" and sampler.epoch == 5
    assert (requests.take(), others.take(), requests.take()) == (5, 5, None)
    assert "set_epoch" not in vars(WithEpoch()) and WithEpoch().set_epoch(1) == "now 1"
    torch_sampler = DistributedSampler(range(4), num_replicas=1, rank=0)  # type: ignore[arg-type]
    requests = listening(torch_sampler)
    torch_sampler.set_epoch(2)
    assert requests.take() == 2 and torch_sampler.epoch == 2


def test_a_call_of_a_loader_is_none_of_the_users_also_above_a_class_that_is_listened_to() -> None:
    one, requests = Above(), listening(WithEpoch())
    one.set_epoch = lambda epoch: Above.set_epoch(one, epoch)  # type: ignore[method-assign]
    requests = listening(one)
    epoch_setter(one)(3)
    assert (one.epoch, requests.take()) == (3, None)
    one.set_epoch(4)
    assert (one.epoch, requests.take()) == (4, 4)
    del one.set_epoch
    assert one.set_epoch(5) == "now 5" and requests.take() == 5


def test_a_sampler_that_calls_its_own_set_epoch_while_it_is_read_asks_for_nothing() -> None:
    class Calls(ByEpoch):
        def __iter__(self) -> Iterator[int]:
            for index in range(self.length):
                self.set_epoch(40 + index)
                yield index

    loader = ShardedDataLoader(range(4), 2, sampler=Calls(4))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]] and loader.epoch == 1


def test_what_has_no_set_epoch_is_left_alone_and_what_cannot_be_heard_is_an_error() -> None:
    assert listening([1, 2], range(3), object()).take() is None
    with pytest.raises(TypeError, match=r"set_epoch of a Slotted cannot be heard.*class Heard\(Slotted\): pass"):
        listening(Slotted())
    frozen = dataclasses.make_dataclass("Frozen", [], frozen=True, namespace={"set_epoch": lambda self, epoch: None})
    for one in (frozen(), type("Heard", (Slotted,), {})()):
        requests = listening(one)
        one.set_epoch(4)
        assert requests.take() == 4


COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda one: pickle.loads(pickle.dumps(one)),
    "cloudpickle": lambda one: cloudpickle.loads(cloudpickle.dumps(one)),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("kind", ["plain", "own state", "own method"])
def test_a_copy_is_told_by_itself(kind: str, way: str) -> None:
    one = Stateful() if kind == "own state" else WithEpoch()
    if kind == "own method":
        one.set_epoch = print  # type: ignore[method-assign]
    requests = listening(one)
    one.epoch = 2  # a loader has told it
    other = COPIES[way](one)
    assert listening(COPIES[way](one)).take() is None
    other.set_epoch(5)
    assert (one.epoch, requests.take()) == (2, None)
    if kind != "own method":
        assert other.epoch == 5 and listening(other).take() == 5
    one.set_epoch(7)
    assert requests.take() == 7 and other.epoch != 7
