"""``steps_per_epoch``, ``skip`` and ``evaluate``: which steps an epoch has."""

from __future__ import annotations

import functools
import itertools
import json
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, covering, made, make_pool
from injection import InterruptAt, next_interrupted
from samples import Augmented, ByEpoch, Drawing, Foreign, NoLength, summed

from sharded_loader import (
    BatchSampler,
    FixedBucketSampler,
    LoaderWarning,
    PackSampler,
    RandomSampler,
    RepeatedSampler,
    Sampler,
    SequentialSampler,
    ShardedDataLoader,
    WeightedRandomSampler,
    batchify,
    interleave,
)
from sharded_loader.torch import DataLoader

LENGTH, SIZE = 24, 3  # 8 steps, and any number of ranks up to 4 shares them evenly


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "in order": lambda: {"batch_size": SIZE},
    "shuffled": lambda: {"batch_size": SIZE, "shuffle": True},
    "random": lambda: {"batch_size": SIZE, "sampler": RandomSampler(LENGTH, seed=4)},
    "weighted": lambda: {"batch_size": SIZE, "sampler": WeightedRandomSampler(range(1, LENGTH + 1), 8, seed=4)},
    "list": lambda: {"batch_size": SIZE, "sampler": [4, 8, 1, 10, 3, 6]},
    "range": lambda: {"batch_size": SIZE, "sampler": range(2, 9)},
    "foreign": lambda: {"batch_size": SIZE, "sampler": Foreign([7, 3, 5, 1, 9, 0])},
    "by epoch": lambda: {"batch_size": SIZE, "sampler": ByEpoch(6)},
    "torch random": lambda: {"batch_size": SIZE, "sampler": torch_data.RandomSampler(range(LENGTH))},  # type: ignore
    "torch order": lambda: {"batch_size": SIZE, "sampler": torch_data.SequentialSampler(range(LENGTH))},  # type: ignore
    "batches": lambda: {"batch_sampler": BatchSampler(SequentialSampler(LENGTH), SIZE, "discard")},
    "random batches": lambda: {"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=4), SIZE)},
    "list of batches": lambda: {"batch_sampler": [[1, 2], [3], [4, 5, 6], [7]]},
    "torch batches": lambda: {
        "batch_sampler": torch_data.BatchSampler(torch_data.SequentialSampler(range(LENGTH)), SIZE, drop_last=False)
    },
    "buckets": lambda: {"batch_sampler": FixedBucketSampler(list(range(1, LENGTH + 1)), SIZE, num_buckets=2, seed=4)},
}


def loader_of(kind: str, steps: int | None, pool: Any = "inline", **options: Any) -> ShardedDataLoader:
    pool = make_pool(pool, 2) if isinstance(pool, str) else pool
    return made(range(LENGTH), seed=6, steps_per_epoch=steps, pool=pool, **SAMPLERS[kind](), **options)


def endless(kind: str, batches: int) -> list[Any]:
    """The first batches of the sampler's epochs, one after the other, as they follow without ``steps_per_epoch``."""
    found: list[Any] = []
    with loader_of(kind, None) as loader:
        given = loader.batch_size is None
        while len(found) < batches * (1 if given else SIZE):
            epoch = [batch.tolist() for batch in loader]
            found += epoch if given else sum(epoch, [])
    return found[:batches] if given else [found[i : i + SIZE] for i in range(0, batches * SIZE, SIZE)]


@covering(kind=SAMPLERS, steps=[1, 3, 4, 9])
def test_epochs_are_stretches_of_an_endless_order_and_set_epoch_jumps_to_any(kind: str, steps: int) -> None:
    whole = endless(kind, 4 * steps)
    loader = loader_of(kind, steps)
    assert len(loader) == steps
    found = epochs_of(loader, 4)
    assert found == [whole[at : at + steps] for at in range(0, 4 * steps, steps)]
    for epoch in (3, 0, 2, 1):
        loader.set_epoch(epoch)
        assert epochs_of(loader, 1) == [found[epoch]]


@covering(1, kind=SAMPLERS, pool=["inline", "thread", "fork"], count=range(6), epoch=range(3))
def test_a_state_goes_on_in_any_epoch_after_any_step(kind: str, pool: str, count: int, epoch: int) -> None:
    whole = epochs_of(loader_of(kind, 5), 5)
    with loader_of(kind, 5, pool) as loader:
        for _ in range(epoch):
            assert len(list(loader)) == 5
        iterator = iter(loader)
        for _ in range(count):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    with loader_of(kind, 5) as loader:
        loader.load_state_dict(state)
        expected = [one for one in (whole[epoch][count:], *whole[epoch + 1 :]) if one]
        assert [[batch.tolist() for batch in loader] for _ in expected[:2]] == expected[:2]


def test_a_state_of_other_steps_or_ranks_is_rejected() -> None:
    loader = loader_of("shuffled", 4, num_replicas=2, rank=0)
    next(iter(loader))
    for steps, ranks in ((5, 2), (None, 2), (4, 5)):
        with pytest.raises(
            ValueError, match="steps_per_epoch was 4" if ranks == 2 else "there were 2 ranks, and are 5"
        ):
            loader_of("shuffled", steps, num_replicas=ranks, rank=0).load_state_dict(loader.state_dict())


def test_an_empty_dataset_or_sampler_has_no_steps_and_does_not_hang() -> None:
    for options in ({"dataset": []}, {"dataset": range(4), "sampler": []}, {"dataset": [], "shuffle": True}):
        loader = ShardedDataLoader(options.pop("dataset"), 2, steps_per_epoch=3, **options)  # type: ignore[arg-type]
        assert list(loader) == []


def test_a_sampler_whose_length_is_wrong_is_an_error_with_advice() -> None:
    loader = ShardedDataLoader(range(LENGTH), 3, sampler=Foreign(range(7), 9), steps_per_epoch=4)
    with pytest.raises(ValueError, match="yielded 7 items.*its length is 9.*steps_per_epoch="):
        list(loader)


def without_end() -> Iterator[int]:
    """Shuffled passes, one after the other, as detectron2's samplers for training."""
    rng = np.random.default_rng(7)
    while True:
        yield from rng.permutation(LENGTH).tolist()


def batches_without_end() -> Iterator[list[int]]:
    return ([number % LENGTH, number * 3 % LENGTH] for number in itertools.count())


class PureWithoutEnd(Sampler[int]):
    def iter_epoch(self, epoch: int, start: int = 0) -> Iterator[int]:
        return ((epoch * 5 + number) * 7 % LENGTH for number in itertools.count(start))


class StatefulWithoutEnd:
    """It goes on where it has stopped, by a state of its own."""

    def __init__(self) -> None:
        self.number = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.number += 1
            yield self.number * 4 % LENGTH

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class StatefulEpochs(StatefulWithoutEnd):
    """Its epochs have an end, where it starts over."""

    def __iter__(self) -> Iterator[int]:
        for number in range(self.number % len(self), len(self)):
            self.number = number + 1
            yield self.number * 4 % LENGTH

    def __len__(self) -> int:
        return 12


WITHOUT_END: dict[str, Callable[[], dict[str, Any]]] = {
    "samples": lambda: {"batch_size": SIZE, "sampler": NoLength(without_end)},
    "pure": lambda: {"batch_size": SIZE, "sampler": PureWithoutEnd()},
    "stateful": lambda: {"batch_size": SIZE, "sampler": StatefulWithoutEnd()},
    "copies": lambda: {"batch_size": SIZE, "sampler": RepeatedSampler(4, NoLength(without_end))},
    "endless batches": lambda: {"batch_sampler": NoLength(batches_without_end)},
}
WITH_END: dict[str, Callable[[], dict[str, Any]]] = {
    "stateful epochs": lambda: {"batch_size": SIZE, "sampler": StatefulEpochs()},
    "copies of ours": lambda: {"batch_size": SIZE, "sampler": RepeatedSampler(4, RandomSampler(6, seed=4))},
    "copies of torch's": lambda: {
        "batch_size": SIZE,
        "sampler": RepeatedSampler(4, torch_data.RandomSampler(range(6))),
    },
}


def shared(kind: str, replicas: int = 1, rank: int = 0, pool: str = "inline") -> ShardedDataLoader:
    """A loader of steps that have the same samples on any number of ranks."""
    given = {**SAMPLERS, **WITHOUT_END, **WITH_END}[kind]()
    if "batch_size" in given:
        given["batch_size"] = 6 // replicas
    ranks = {"num_replicas": replicas, "rank": rank}
    return ShardedDataLoader(range(LENGTH), seed=6, steps_per_epoch=4, pool=make_pool(pool), **ranks, **given)


def in_turns(kind: str, loaders: list[ShardedDataLoader], epochs: int) -> list[Any]:
    """The steps of all ranks as the batches of one rank."""
    found = []
    for _ in range(epochs):
        for step in zip(*loaders, strict=True):
            batches = [batch.tolist() for batch in step]
            found += (
                batches
                if kind == "endless batches"
                else [[index for row in zip(*batches, strict=True) for index in row]]
            )
    return found


OURS = ["in order", "shuffled", "random", "copies of ours"]
SHARED = [*WITHOUT_END, *OURS, "list", "foreign", "by epoch", "stateful epochs", "copies of torch's"]


@covering(1, pool=POOLS, kind=SHARED)
def test_epochs_have_these_steps_in_any_pool_also_of_a_sampler_without_end(pool: str, kind: str) -> None:
    expected = epochs_of(shared(kind), 3)
    assert len(shared(kind)) == 4 and all(len(batches) == 4 for batches in expected)
    assert epochs_of(shared(kind, pool=pool), 3) == expected


@pytest.mark.costly(11)
@covering(0, kind=SHARED, replicas=[2, 3])
def test_ranks_share_the_order_in_turns(kind: str, replicas: int) -> None:
    whole = sum(epochs_of(shared(kind), 2 * replicas), [])
    found = in_turns(kind, [shared(kind, replicas, rank) for rank in range(replicas)], 2)
    assert found == whole[: len(found)]


@pytest.mark.costly(2)
@pytest.mark.parametrize("kind", SHARED)
def test_a_state_goes_on_after_any_step_on_other_ranks_too(kind: str) -> None:
    whole = in_turns(kind, [shared(kind, 2, rank) for rank in range(2)], 4)
    per_step = 2 if kind == "endless batches" else 1
    for done in range(11):
        ranks = [shared(kind, 2, rank) for rank in range(2)]
        for loader in ranks:
            batches = (batch for _ in range(4) for batch in loader)
            for _ in range(done):
                next(batches)
        state = json.loads(json.dumps(ranks[done % 2].state_dict()))
        for replicas in (1, 2, 3) if kind in [*SHARED[:4], *OURS] else (2,):
            resumed = [shared(kind, replicas, rank) for rank in range(replicas)]
            for loader in resumed:
                loader.load_state_dict(state)
            rest = in_turns(kind, resumed, 2)
            assert rest == whole[done * per_step :][: len(rest)]


def test_with_rollover_a_sampler_with_a_state_goes_on_from_epoch_to_epoch() -> None:
    loader = ShardedDataLoader(range(LENGTH), 5, sampler=StatefulEpochs(), last_batch="rollover")
    read = [index for _ in range(4) for batch in loader for index in batch.tolist()]
    assert len(read) == 45 and read == [4 * (place % 12 + 1) % LENGTH for place in range(45)]


@pytest.mark.parametrize("change", ["half the batch", "a larger dataset"])
def test_a_sampler_with_a_state_loses_no_item_when_the_next_epoch_is_another_one(change: str) -> None:
    data = list(range(LENGTH))
    given = {"num_replicas": 1, "rank": 0, "steps_per_epoch": 2}
    loader = ShardedDataLoader(data, 4, sampler=StatefulWithoutEnd(), **given)
    read = [index for batch in loader for index in batch.tolist()]
    if change == "half the batch":
        loader.rescale(1, 0, batch_size=2)
    else:
        data.append(0)
        loader.refresh()
    read += [index for batch in loader for index in batch.tolist()]
    assert read == [4 * (place + 1) % LENGTH for place in range(12 if change == "half the batch" else 16)]


ORDERS: dict[str, Callable[[], dict[str, Any]]] = {
    **SAMPLERS,
    "discard": lambda: {"batch_size": SIZE, "shuffle": True, "last_batch": "discard"},
    "rollover": lambda: {"batch_size": SIZE, "shuffle": True, "last_batch": "rollover"},
    "steps": lambda: {"batch_size": SIZE, "shuffle": True, "steps_per_epoch": 8},
    "torch, rollover": lambda: {**SAMPLERS["torch random"](), "last_batch": "rollover"},
    "evaluate": lambda: {"batch_size": SIZE, "evaluate": True},
}
SKIP = [(1, 2), (6, 9), (13, 15)]  # inside an epoch, across an end, and up to one


def skipping(order: str = "shuffled", **given: Any) -> ShardedDataLoader[Any]:
    return ShardedDataLoader(Augmented(LENGTH), collate_fn=summed, seed=5, **ORDERS[order](), **given)


def plain(batch: Any) -> Any:
    return (batch[0].tolist(), batch[1]) if isinstance(batch, tuple) else batch.tolist()


def epochs_of(loader: ShardedDataLoader[Any], count: int = 3) -> list[list[Any]]:
    return [[plain(batch) for batch in loader] for _ in range(count)]


def without(epochs: list[list[Any]], skip: list[tuple[int, int]]) -> list[list[Any]]:
    left, step = [], 0
    for batches in epochs:
        numbers = range(step, step + len(batches))
        left.append([b for n, b in zip(numbers, batches, strict=True) if not any(i <= n <= j for i, j in skip)])
        step += len(batches)
    return left


@pytest.mark.parametrize("ranks", [{}, {"num_replicas": 2, "rank": 1}], ids=["alone", "rank 1 of 2"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.costly
def test_the_other_batches_stay_and_a_state_between_any_two_goes_on_exactly(order: str, ranks: Any) -> None:
    whole = epochs_of(skipping(order, **ranks), 4)
    wanted = without(whole, SKIP)
    loader, states, read = skipping(order, skip=SKIP, **ranks), [], list[list[Any]]()
    for epoch in range(4):
        loader.set_epoch(epoch)
        assert len(loader) == len(wanted[epoch])
        read.append([])
        for batch in loader:
            read[-1].append(plain(batch))
            states.append((epoch, len(read[-1]), json.loads(json.dumps(loader.state_dict()))))
    assert read == wanted
    for epoch, count, state in states:
        resumed = skipping(order, **ranks)  # the state has the steps
        resumed.load_state_dict(state)
        rest = [*wanted[epoch][count:], *(batch for later in wanted[epoch + 1 :] for batch in later)]
        found: list[Any] = []
        while len(found) < len(rest):
            one = [plain(batch) for batch in resumed]
            assert one or [] in wanted[epoch:], "an epoch may be skipped whole"
            found += one
        assert found == rest
        assert resumed.skip == SKIP


@covering(pool=POOLS)
def test_every_pool_leaves_the_steps_out(pool: str) -> None:
    with skipping(skip=SKIP, pool=make_pool(pool, 2)) as loader:
        assert epochs_of(loader) == without(epochs_of(skipping()), SKIP)


def test_steps_can_be_left_out_when_a_state_is_loaded_and_the_next_state_has_them() -> None:
    whole = epochs_of(skipping())
    first = skipping(skip=[(1, 1)])
    next(iter(first))
    second = skipping()
    second.load_state_dict(first.state_dict(), skip=[(4, 5)])
    assert second.skip == [(1, 1), (4, 5)]
    assert len(second) == 5
    state = second.state_dict()
    assert state["skip"] == [[1, 1], [4, 5]]
    assert [plain(batch) for batch in second] == [whole[0][n] for n in (2, 3, 6, 7)]
    given = skipping(skip=[(4, 5)])
    given.load_state_dict(skipping().state_dict())
    assert epochs_of(given) == without(whole, [(4, 5)])
    given.load_state_dict(first.state_dict())
    assert given.skip == [(1, 1), (4, 5)]
    third = skipping()
    third.load_state_dict(state)
    third.load_state_dict(skipping().state_dict())
    assert third.skip == []


def test_looking_up_finds_the_steps_that_are_left_out_and_their_numbers_stay() -> None:
    whole = epochs_of(skipping())
    loader = skipping(skip=SKIP)
    assert [plain(loader.batch(0, step)) for step in range(8)] == whole[0]
    iterator = iter(loader)
    next(iterator), next(iterator)
    assert loader.position == 4  # batches 0 and 3
    assert plain(loader.peek()) == whole[1][2]


def test_an_epoch_that_is_left_out_is_empty() -> None:
    loader = skipping(skip=[(0, 7)])
    assert (len(loader), list(loader)) == (0, [])
    assert len(list(loader)) == 8
    with pytest.raises(IndexError):
        skipping(skip=[(0, 7)]).peek()


def test_steps_are_left_out_also_with_weights_that_are_set() -> None:
    def make(**given: Any) -> ShardedDataLoader[Any]:
        return ShardedDataLoader(interleave([["a"] * 30, ["b"] * 30], stop=24, shuffle=True), 4, **given)

    found = []
    for skip in (None, [(2, 3)]):
        loader, batches = make(skip=skip), []
        for batch in loader:
            batches.append(batch)
            if len(batches) == 2:
                loader.set_weights([0, 1])
        found.append(batches)
    assert found[1] == found[0][:2] + found[0][4:]


def test_steps_are_left_out_on_other_ranks_with_the_same_steps() -> None:
    saved = skipping(skip=[(5, 6)], num_replicas=2, rank=0)
    sizes = {"batch_size": 2 * SIZE, "shuffle": True}
    one = ShardedDataLoader(Augmented(LENGTH), collate_fn=summed, seed=5, **sizes)
    one.load_state_dict(saved.state_dict())
    assert one.skip == [(5, 6)] and [len(list(one)) for _ in range(2)] == [4, 2]  # of 4 steps, as on two ranks
    other = skipping()
    with pytest.raises(ValueError, match="skip= counts steps, and the ranks, the batch size or the length were"):
        other.load_state_dict(saved.state_dict(), skip=[(0, 1)])
    assert other.skip == []
    other.load_state_dict(skipping().state_dict())
    assert other.skip == [], "what was refused leaves nothing to the next state"


def test_steps_that_were_done_already_are_a_warning() -> None:
    loader = skipping()
    batches = zip(range(3), loader, strict=False)
    assert len(list(batches)) == 3
    with pytest.warns(LoaderWarning, match=r"skip has the steps \(2, 4\), and some of them were done before"):
        skipping().load_state_dict(loader.state_dict(), skip=[(2, 4)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", LoaderWarning)
        skipping().load_state_dict(loader.state_dict(), skip=[(3, 4)])


@pytest.mark.parametrize("change", ["grow", "without", "refresh"])
@pytest.mark.parametrize("asks", [False, True])
def test_steps_are_counted_alike_whether_or_not_the_next_epoch_was_looked_at(change: str, asks: bool) -> None:
    data = list(range(10))
    loader = ShardedDataLoader(data, 1, skip=[(12, 12)])
    if asks:
        loader.set_epoch(1)
        assert len(loader) == 9
        loader.set_epoch(0)
    batches = iter(loader)
    read = [next(batches).item() for _ in range(9)]
    if change == "without":
        loader.without([9])
    else:
        data += range(10, 15)
        loader.grow() if change == "grow" else loader.refresh()
    read += [batch.item() for batch in batches]
    first = {"grow": [*range(12), 13, 14], "without": [*range(9)], "refresh": [*range(10)]}[change]
    second = {"grow": [*range(15)], "without": [*range(3), *range(4, 9)], "refresh": [0, 1, *range(3, 15)]}[change]
    assert (read, [batch.item() for batch in loader]) == (first, second)


def test_steps_that_are_left_out_do_not_move_in_a_state_over_grown_data() -> None:
    saved = ShardedDataLoader(range(10), 1, skip=[(15, 15)])
    list(saved), next(iter(saved))
    with pytest.raises(ValueError, match="skip= counts steps, and the ranks, the batch size or the length were"):
        ShardedDataLoader(range(14), 1).load_state_dict(saved.state_dict(), strict=False)


def test_steps_are_counted_anew_once_the_dataset_has_grown() -> None:
    data = list(range(6))
    loader = ShardedDataLoader(data, 2, skip=[(7, 7)])
    loader.set_epoch(2)
    assert [batch.tolist() for batch in loader] == [[0, 1], [4, 5]]  # steps 6 to 8
    loader.set_epoch(1)
    data += [6, 7]
    loader.refresh()
    assert len(list(loader)) == 4  # steps 3 to 6
    assert [batch.tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]  # steps 7 to 10


@pytest.mark.parametrize(
    ("skip", "error", "match"),
    [
        ([(3, 1)], ValueError, "last step comes before its first"),
        ([(5, 6), (1, 5)], ValueError, r"\(1, 5\) and \(5, 6\), which overlap"),
        ([(-1, 3)], ValueError, "at least 0"),
        ([1, 2], TypeError, "pairs of steps"),
        ([(1, 2, 3)], TypeError, "pairs of steps"),
        ([(1, 2.5)], TypeError, "must be an integer"),
        ("12", TypeError, "pairs of steps"),
    ],
)
def test_what_is_no_range_of_steps_is_rejected(skip: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        skipping(skip=skip)
    loader = skipping()
    before = loader.state_dict()
    with pytest.raises(error, match=match):
        loader.load_state_dict(skipping(skip=[(1, 1)]).state_dict(), skip=skip)
    assert loader.state_dict() == before
    with pytest.raises(ValueError, match="the state's 'skip' is wrong"):
        loader.load_state_dict({**before, "skip": skip})


def test_the_steps_must_be_countable() -> None:
    given: dict[str, Any] = {"sampler": NoLength(range(LENGTH)), "skip": [(1, 1)]}
    with pytest.raises(ValueError, match="no length.*steps_per_epoch"):
        ShardedDataLoader(range(LENGTH), 2, **given)
    assert len(list(ShardedDataLoader(range(LENGTH), 2, steps_per_epoch=4, **given))) == 3
    with pytest.raises(TypeError, match="Iterable data must be read"):
        ShardedDataLoader(lambda: iter(range(4)), 2, skip=[(1, 1)])
    with pytest.raises(TypeError, match="Iterable data must be read"):
        loader = ShardedDataLoader(lambda: iter(range(4)), 2)
        loader.load_state_dict(loader.state_dict(), skip=[(1, 1)])


def test_a_long_range_is_left_out_without_reading_it() -> None:
    loader = ShardedDataLoader(range(20_000), 1, sampler=RandomSampler(20_000, seed=1), skip=[(1, 19_998)])
    first, last = loader
    assert torch.cat([first, last]).tolist() == [*loader.indices(0, 0), *loader.indices(0, 19_999)]


@pytest.mark.parametrize("kind", [ShardedDataLoader, DataLoader])
def test_an_interruption_behind_steps_that_are_left_out_goes_back_before_them(kind: Any) -> None:
    def begin() -> Any:
        sampler: Any = torch_data.RandomSampler(range(20), generator=torch.Generator().manual_seed(1))
        return iter(kind(range(20), 2, sampler=sampler, skip=[(1, 7)], seed=4))

    expected = [batch.tolist() for batch in begin()]
    line, fired = 1, True
    while fired:
        iterator = begin()
        found = [next(iterator)]
        got, fired = next_interrupted(iterator, line, functools.partial(InterruptAt, modules=["iterator.py"]))
        assert [batch.tolist() for batch in [*found, *got, *iterator]] == expected
        line += 23
    assert len(expected) == 3 and line > 100


KINDS: dict[str, Any] = {
    "in order": dict,
    "shuffled": lambda: {"shuffle": True},
    "sampler": lambda: {"sampler": SequentialSampler(23)},
    "list": lambda: {"sampler": list(range(23))},
    "torch": lambda: {"sampler": torch_data.SequentialSampler(range(23))},
    "torch, random": lambda: {"sampler": torch_data.RandomSampler(range(23))},
    "costs": lambda: {"costs": np.arange(1, 24)},
}


def ranks_of(replicas: int, length: int = 23, **given: Any) -> list[ShardedDataLoader[Any]]:
    given = {"batch_size": 4, "seed": 7, "evaluate": True, **given}
    return [ShardedDataLoader(range(length), num_replicas=replicas, rank=rank, **given) for rank in range(replicas)]


def counted(loaders: list[ShardedDataLoader[Any]], given: bool = False) -> Counter[int]:
    """What counts in one epoch. All ranks take equally many steps of whole batches; or of given ones."""
    found: Counter[int] = Counter()
    for step in zip(*loaders, strict=True):
        for batch, real in step:
            assert real in (0, len(batch)) if given else len(batch) == 4
            found.update(batch[:real].tolist())
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 7])
def test_each_sample_counts_once(kind: str, replicas: int) -> None:
    loaders = ranks_of(replicas, **KINDS[kind]())
    steps = {len(loader) for loader in loaders}
    assert steps == {-(-23 // (4 * replicas))}
    for _ in range(3):
        assert counted(loaders) == Counter(range(23))


@pytest.mark.parametrize("pool", POOLS)
def test_each_sample_counts_once_in_every_pool(pool: str) -> None:
    workers = make_pool(pool)
    with ShardedDataLoader(range(10), 4, num_replicas=3, rank=2, evaluate=True, pool=workers) as loader:
        found = [(batch.tolist(), real) for batch, real in loader]
        assert found == [([2, 5, 8, 8], 3)]
        assert loader.peek()[1] == 3


@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_batches_of_a_batch_sampler_count_or_are_fillers(replicas: int) -> None:
    lengths = np.arange(1, 24)
    for sampler in (
        [list(range(n, min(n + 4, 23))) for n in range(0, 23, 4)],
        FixedBucketSampler(lengths, 4, num_buckets=2),
    ):
        loaders = ranks_of(replicas, batch_sampler=sampler, batch_size=None)
        assert counted(loaders, given=True) == Counter(range(23))


def test_shards_on_devices_are_whole_and_the_first_samples_count() -> None:
    loaders = ranks_of(2, length=9, devices=["cpu", "cpu"])
    found = [[([shard.tolist() for shard in shards], real) for shards, real in loader] for loader in loaders]
    assert found == [[([[0, 2], [4, 6]], 4), ([[8, 8], [8, 8]], 1)], [([[1, 3], [5, 7]], 4), ([[7, 7], [7, 7]], 0)]]


def test_each_sample_of_a_resident_dataset_and_of_a_column_dataset_counts_once() -> None:
    data = torch.arange(10)
    for arguments in ({"device": "cpu", "resident": True}, {"num_workers": 1, "thread_pool": True}):
        found = [
            index
            for rank in range(3)
            for batch, real in made(data, 3, num_replicas=3, rank=rank, evaluate=True, **arguments)
            for index in batch[:real].tolist()
        ]
        assert sorted(found) == list(range(10))


def test_a_sampler_that_yields_fewer_items_than_its_length_is_an_error() -> None:
    with pytest.raises(ValueError, match="fewer items than its length, 6"):
        list(ShardedDataLoader(range(6), 4, sampler=Foreign(range(3), 6), evaluate=True))


def test_an_error_is_raised_in_its_place_and_a_function_may_replace_a_sample() -> None:
    iterator = iter(ShardedDataLoader(Drawing(6, [3]), 2, evaluate=True))
    assert next(iterator)[1] == 2
    with pytest.raises(ValueError, match="bad 3"):
        next(iterator)
    assert next(iterator)[1] == 2
    loader = ShardedDataLoader(Drawing(6, [3]), 4, evaluate=True, on_error=lambda error: np.array([-1, 0]))
    assert [(batch[:, 0].tolist(), real) for batch, real in loader] == [([0, 1, 2, -1], 4), ([4, 5, 5, 5], 2)]


def test_with_packed_documents_real_counts_documents() -> None:
    def reals(rank: int) -> list[int]:
        sampler, pack = PackSampler([3] * 5, tokens=8, rows=2, seed=0), batchify.Pack(tokens=8)
        ranks = {"num_replicas": 3, "rank": rank, "evaluate": True}
        loader = ShardedDataLoader([[1] * 3] * 5, batch_sampler=sampler, batchify_fn=pack, **ranks)
        return [real for _, real in loader]

    assert sorted(map(reals, range(3))) == [[0], [2], [3]]


def test_fillers_are_the_same_after_weights_were_set_and_when_a_step_is_looked_up() -> None:
    ranks = []
    for rank in range(3):
        mixed = interleave([[0, 1, 2], [10]], [1, 1], seed=1, stop="each_once", shuffle=True)
        loader = ShardedDataLoader(mixed, 1, seed=1, evaluate=True, num_replicas=3, rank=rank)
        iterator = iter(loader)
        first = next(iterator)
        loader.set_weights([3, 1])
        rest = list(iterator)  # the last one of two ranks is a filler
        assert [real for _, real in rest] == [int(rank == 0)]
        ranks.append((loader, [first, *rest]))
    for loader, batches in ranks:
        for step, (batch, real) in enumerate(batches):
            again = loader.batch(0, step)
            assert (again[0].tolist(), again[1]) == (batch.tolist(), real)
