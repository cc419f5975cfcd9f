"""``loader.lease()``: each batch is finished once per epoch, in any order, whatever is killed, on any ranks."""

import base64
import itertools
import json
import random
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import POOLS, PROCESS_POOLS, covering, make_pool
from failures import Fails, kill
from injection import InterruptAtReturn
from samples import Drawing

import sharded_loader.torch
from sharded_loader import (
    BatchSampler,
    Dataset,
    LoaderClosedError,
    RandomSampler,
    RepeatedSampler,
    ShardedBatchSampler,
    ShardedDataLoader,
    SortedBucketSampler,
    interleave,
    leases,
)
from tests.fuzz.run import Difference, run_case

LENGTH = 23
NAMES = [f"0-{position}" for position in range(0, LENGTH, 3)]


def loader_of(data: Any = None, batch_size: int | None = 3, **given: Any) -> ShardedDataLoader[Any]:
    given = {"seed": 5, "shuffle": "batch_sampler" not in given or None, **given}
    return ShardedDataLoader(Drawing(LENGTH) if data is None else data, batch_size, **given)


def ranks_of(count: int, states: Any = None, **given: Any) -> list[ShardedDataLoader[Any]]:
    """A loader for each rank, with the states of all ranks before."""
    loaders = [loader_of(num_replicas=count, rank=rank, **given) for rank in range(count)]
    for loader in loaders if states else ():
        loader.load_state_dict(states)
    return loaders


def some(loader: Any, count: int) -> list[Any]:
    found = [loader.lease() for _ in range(count)]
    assert None not in found
    return found


def rest_of(loader: Any) -> list[Any]:
    """The leases up to the end of the epoch; each is done before the next one."""
    found: list[Any] = []
    while (lease := loader.lease()) is not None:
        lease.done()
        found.append(lease)
    return found


def names(leases: list[Any]) -> list[str]:
    return [lease.name for lease in leases]


def values(leases: list[Any]) -> dict[str, Any]:
    return {lease.name: (lease.indices, np.asarray(lease.batch).tolist()) for lease in leases}


def state_of(loader: Any) -> Any:
    return json.loads(json.dumps(loader.state_dict()))


@covering(1, pool=POOLS)
def test_leases_are_the_batches_of_a_loop_and_come_again_with_the_same_random_numbers(pool: str) -> None:
    with loader_of() as plain:
        wanted = [[batch.tolist() for batch in plain] for _ in range(2)]
    with loader_of(pool=make_pool(pool)) as loader:
        first = some(loader, 8)
        assert names(first) == NAMES and [lease.batch.tolist() for lease in first] == wanted[0]
        for lease in first[2:5]:
            lease.again()
        first[0].refuse()
        again = rest_of(loader)  # at the end of the epoch: nothing new is left
        assert list(values(again).items()) == list(values(first[2:5]).items())
        first[1].again()
        *later, last = rest_of(loader)
        assert [lease.batch.tolist() for lease in later] == wanted[1]
        assert values([last]) == values(first[1:2])  # put back later: at the end of the next epoch


@covering(1, before=(1, 2, 3), now=(1, 2, 3, 7))
@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_what_was_open_comes_again_on_any_number_of_ranks(before: int, now: int, pool: str) -> None:
    loaders, rng = ranks_of(before, pool=pool, num_workers=1), random.Random(1)
    leases = [lease for loader, count in zip(loaders, (3, 2, 1), strict=False) for lease in some(loader, count)]
    done, back, still = leases[::3], leases[1::3], leases[2::3]
    rng.shuffle(done)
    for lease in done:
        lease.done()
    for lease in back:
        lease.again()
    states = [state_of(loader) for loader in loaders]
    for loader in loaders:
        loader.close()
    loaders = ranks_of(now, states, pool=pool, num_workers=1)
    found = [lease for loader in loaders for lease in rest_of(loader)]
    assert sorted(names(done + found)) == sorted(NAMES)
    assert values(found).items() >= values(back + still).items()
    assert {loader.epoch for loader in loaders} == {1}
    for loader in loaders:
        loader.close()


def test_each_rank_may_load_its_own_state_and_ranks_may_be_in_other_epochs() -> None:
    loaders = ranks_of(2)
    old = some(loaders[0], 4)
    assert loaders[0].lease() is None
    new = some(loaders[0], 1)
    some(loaders[1], 1)[0].done()
    old[1].done()
    states = [state_of(loader) for loader in loaders]
    again = loader_of(num_replicas=2, rank=1)
    again.load_state_dict(states[1])
    assert names(rest_of(again)) == NAMES[3::2]
    again = loader_of(num_replicas=2, rank=0)
    again.load_state_dict(states[0])
    assert names(some(again, 5)) == [*names(old[:1] + old[2:]), *names(new), "1-6"]
    three = ranks_of(3, states)
    found = Counter(name for loader in three for name in names(rest_of(loader)))
    assert found == Counter({*NAMES} - {"0-3", "0-6"}) + Counter(f"1-{n}" for n in range(0, LENGTH, 3))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_groups_stay_whole_and_nothing_is_padded(ranks: int) -> None:
    loaders = ranks_of(ranks, data=range(7), batch_size=4, sampler=RepeatedSampler(4))
    groups = [lease.indices for loader in loaders for lease in rest_of(loader)]
    assert sorted(groups) == [[prompt] * 4 for prompt in range(7)]
    (lease, *_) = some(loader_of(range(LENGTH)), 1)
    assert all(isinstance(index, int) for group in (*groups, lease.indices) for index in group)


@pytest.mark.parametrize(
    ("given", "ranks", "count"),
    [
        ({"batch_sampler": BatchSampler(RandomSampler(LENGTH, seed=1), 4)}, 2, LENGTH),
        ({"batch_sampler": SortedBucketSampler(list(range(LENGTH)), 4, shuffle=True, seed=1)}, 3, LENGTH),
        ({"batch_sampler": ShardedBatchSampler(BatchSampler(RandomSampler(LENGTH, seed=1), 4), 2)}, 1, LENGTH),
        ({"batch_size": 4, "last_batch": "discard"}, 3, 20),
        ({"batch_size": 4, "num_shards": 2}, 3, LENGTH),
    ],
    ids=["batch sampler", "buckets", "shards", "discard", "split"],
)
def test_every_order_has_each_sample_once_also_after_a_state(given: Any, ranks: int, count: int) -> None:
    given = {"batch_size": None, **given}
    loaders = ranks_of(ranks, data=range(LENGTH), **given)
    done = [lease for loader in loaders for lease in some(loader, 1)]
    open_ = [lease for loader in loaders for lease in some(loader, 1 if ranks < 3 else 0)]
    for lease in done:
        lease.done()
    found = [
        one
        for loader in ranks_of(2, [state_of(one) for one in loaders], data=range(LENGTH), **given)
        for one in rest_of(loader)
    ]
    counts = Counter(index for lease in (*done, *found) for index in lease.indices)
    assert set(counts.values()) == {1} and len(counts) == count and {*names(open_)} <= {*names(found)}


def test_indices_of_a_mixture_are_pairs() -> None:
    loader = loader_of(interleave([["a"] * 3, ["b"] * 3], shuffle=True), 2)
    assert sorted(pair for lease in rest_of(loader) for pair in lease.indices)[:2] == [(0, 0), (0, 1)]


@pytest.mark.slow
def test_2000_open_of_10_to_the_9_take_2_kb() -> None:
    loader, rng = loader_of(range(10**9), 1, seed=0), random.Random(0)
    loader.load_state_dict(loader.state_dict() | {"samples": 10**9 - 12_000})
    opened = some(loader, 2_000)
    for _ in range(8_000):
        opened.pop(rng.randrange(len(opened))).done()
        opened += some(loader, 1)
    text = json.dumps(loader.state_dict())
    assert len(text) <= 2048
    other = loader_of(range(10**9), 1, seed=0)
    other.load_state_dict(json.loads(text))
    assert names(some(other, 2_000)) == sorted(names(opened))  # of equal length


@pytest.mark.parametrize("method", PROCESS_POOLS[:1])
def test_killed_workers_change_nothing(method: str, tmp_path: Path) -> None:
    data = Drawing(LENGTH, bad=[4, 15], fail=Fails(kill, tmp_path / "count", times=1))
    with loader_of(data, pool=make_pool(method)) as loader, loader_of() as calm:
        assert values(rest_of(loader)) == values(rest_of(calm))


def test_an_error_leaves_its_batch_open_and_one_that_on_error_leaves_out_is_finished() -> None:
    loader = loader_of(Drawing(LENGTH, bad=[7]), 1)
    found: list[Any] = []
    with pytest.raises(ValueError, match="bad 7"):
        found += rest_of(loader)
    found += rest_of(loader)
    state = state_of(loader)
    loader = loader_of(batch_size=1)
    loader.load_state_dict(state)
    (lease, *_) = rest_of(loader)
    assert lease.indices == [7] and lease.epoch == 0
    skips = loader_of(Drawing(LENGTH, bad=[7]), 1, on_error="skip")
    with pytest.warns(match="left out"):
        assert len(rest_of(skips)) == LENGTH - 1
    assert "'epoch': 0" not in str(state_of(skips)["leases"])


def test_threads_share_the_leases_of_a_loader() -> None:
    with loader_of(batch_size=1, num_workers=2, thread_pool=True) as loader:
        found: list[str] = []

        def work() -> None:
            while loader.epoch == 0 and (lease := loader.lease()) is not None:
                found.append(lease.name)
                lease.done()

        threads = [threading.Thread(target=work) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(name for name in found if name.startswith("0-")) == sorted(f"0-{n}" for n in range(LENGTH))


@pytest.mark.parametrize("before", ["nothing", "a state", "again"])
def test_a_ctrl_c_as_any_c_function_returns_loses_no_lease(before: str) -> None:
    for number in itertools.count(1):
        with loader_of() as loader:
            done = some(loader, 8 if before == "again" else 2)
            if before == "again":
                done.pop(3).again()
            elif before == "a state":
                loader.load_state_dict(state_of(loader))
                done = []
            found = None
            with InterruptAtReturn(number, ("leases.py", "iterator.py", "pipeline.py")) as interrupt:
                found = loader.lease()
            done += [] if found is None else [found]
            assert sorted(names(done + rest_of(loader))) == sorted(NAMES), number
        if not interrupt.fired:
            break
    assert number > 5


class ByEpoch(Dataset):
    """Samples that show the epoch, which is set."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        return self.epoch


@pytest.mark.parametrize("pool", ["inline", "thread"])
def test_what_comes_again_is_read_in_its_own_epoch(pool: str) -> None:
    with loader_of(ByEpoch(), pool=pool, num_workers=2) as loader:
        old = some(loader, 8)
        assert loader.lease() is None
        new = some(loader, 2)
        old[3].again()
        new[0].again()
        found = rest_of(loader)
        assert sorted(names(found)) == sorted([old[3].name, *(f"1-{n}" for n in range(0, LENGTH, 3) if n != 3)])
        assert all(set(lease.batch.tolist()) == {lease.epoch} for lease in found)


def test_epochs_are_chosen_as_those_of_a_loop() -> None:
    loader = loader_of()
    loader.set_epoch(4)
    assert (names(some(loader, 1)), loader.epoch, loader.position, len(loader)) == (["4-0"], 4, 1, 8)
    rest_of(loader)
    loader.set_epoch(4)
    with pytest.raises(ValueError, match="epoch 4 cannot begin again while 1 of its leases are open"):
        loader.lease()
    loader.set_epoch(9)
    assert names(some(loader, 1)) == ["9-0"]


def test_a_loop_goes_on_in_leases_and_states_without_leases_stay_as_they_were() -> None:
    plain = loader_of()
    next(iter(plain))
    state = plain.state_dict()
    loader = loader_of()
    loader.load_state_dict(state)
    assert names(some(loader, 2)) == NAMES[1:3]
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert len([*loader]) == 7


def closed(loader: Any, lease: Any) -> None:
    loader.close()
    lease.done()


def loaded(loader: Any, lease: Any) -> None:
    loader.load_state_dict(state_of(loader))
    lease.done()


def pending_iterator(loader: Any, lease: Any) -> None:
    next(iter(loader))


WRONG_USE: dict[Any, tuple[type[Exception], str]] = {
    lambda loader, lease: (lease.done(), lease.refuse()): (RuntimeError, r"lease 0-0: it was finished before, by done"),
    lambda loader, lease: (lease.again(), lease.done()): (RuntimeError, "by again"),
    closed: (LoaderClosedError, "the loader is closed"),
    loaded: (RuntimeError, "has loaded a state since"),
    pending_iterator: (RuntimeError, "make another loader for the loop"),
    lambda loader, lease: loader.rescale(1, 0, batch_size=3): (TypeError, "the order .* cannot change"),
    lambda loader, lease: (loader.close(), loader.lease()): (LoaderClosedError, "closed"),
}


@pytest.mark.parametrize("use", WRONG_USE)
def test_wrong_use_is_an_error(use: Callable[..., object]) -> None:
    loader = loader_of()
    error, text = WRONG_USE[use]
    (lease,) = some(loader, 1)
    with pytest.raises(error, match=text):
        use(loader, lease)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "iterable": ({"data": iter, "shuffle": False}, TypeError, "a dataset that is read by index"),
    "evaluate": ({"evaluate": True}, ValueError, "evaluate"),
    "costs": ({"costs": np.ones(LENGTH), "shuffle": False}, ValueError, "costs"),
    "steps": ({"steps_per_epoch": 3}, ValueError, "steps_per_epoch"),
    "global": ({"batch_size": None, "global_batch": 4, "num_replicas": 2, "rank": 0}, ValueError, "global_batch"),
    "rollover": ({"last_batch": "rollover"}, ValueError, "rollover"),
    "skip": ({"skip": [(1, 2)]}, ValueError, "skip"),
    "list": (
        {"sampler": [3, 4], "shuffle": None},
        TypeError,
        "looks batches up by their position: .* a sampler of this library",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_steps_or_has_no_positions_is_refused(name: str) -> None:
    given, error, text = REFUSED[name]
    loader = loader_of(**given)
    before = None if name == "iterable" else loader.state_dict()
    with pytest.raises(error, match=text):
        loader.lease()
    assert before is None or loader.state_dict() == before


def test_no_lease_is_given_out_beside_a_loop() -> None:
    loader = loader_of()
    batches, later = iter(loader), iter(loader)
    next(batches)
    with pytest.raises(RuntimeError, match="an iterator is in the middle of an epoch"):
        loader.lease()
    del batches
    some(loader, 1)
    with pytest.raises(RuntimeError, match="make another loader for the loop"):
        next(later)
    assert names(some(loader, 1)) == ["1-3"]


def changed(state: Any, **leases: Any) -> Any:
    return {**state, "leases": {**state["leases"], **leases}}


def with_open(state: Any, numbers: list[float], next: int = 2) -> Any:
    """A state whose share of epoch 0 is another one."""
    steps = json.dumps(np.diff(numbers, prepend=0).tolist())
    text = base64.b85encode(zlib.compress(steps.encode())).decode()
    return changed(state, current={"epoch": 0, "next": next, "open": text})


WRONG_STATES: dict[str, tuple[Callable[[list[Any]], Any], str]] = {
    "one of two": (lambda states: states[:1], r"there were 2 ranks, and here are the states of ranks \[0\]"),
    "alone": (lambda states: states[1], "load a list of the states of all 2"),
    "twice": (lambda states: [states[0]] * 2, r"ranks \[0, 0\]"),
    "seed": (lambda states: [states[0], {**states[1], "seed": 6}], "different runs"),
    "without": (lambda states: [states[0], {**states[1]} | {"leases": None}], "'leases' is None"),
    "plain": (lambda states: [states[0], loader_of().state_dict()], "the state has no 'leases'"),
    "size": (lambda states: [{**one, "batch_size": 4} for one in states], "batch_size was 4, and is 3"),
    "data": (lambda states: [{**one, "dataset_length": 40} for one in states], "had 40 samples, and has 23"),
    "damaged": (
        lambda states: [changed(one, current={"epoch": 0, "next": 0, "open": "?"}) for one in states],
        "damaged",
    ),
    "open beyond": (
        lambda states: [with_open(one, [1, 900]) for one in states],
        r"\[1, 900\].* are not of the 8 batches",
    ),
    "open before": (lambda states: [with_open(one, [-3]) for one in states], r"\[-3\].* are not of the 8 batches"),
    "open parts": (lambda states: [with_open(one, [0.5]) for one in states], "damaged"),
    "next beyond": (lambda states: [with_open(one, [0], next=900) for one in states], "next batch 900 of rank 0"),
    "other ranks": (lambda states: [states[0], changed(states[1], ranks=3)], r"there were 2 ranks"),
}


@pytest.mark.parametrize("name", WRONG_STATES)
def test_a_wrong_state_is_an_error_that_changes_nothing(name: str) -> None:
    change, text = WRONG_STATES[name]
    loaders = ranks_of(2)
    for loader in loaders:
        some(loader, 2)
    wrong, loader = change([state_of(loader) for loader in loaders]), loader_of()
    (lease,) = some(loader, 1)
    before = loader.state_dict()
    with pytest.raises(ValueError, match=text):
        loader.load_state_dict(wrong)
    assert loader.state_dict() == before
    lease.done()
    assert names(rest_of(loader)) == NAMES[1:]


def test_the_drop_in_gives_out_leases_too() -> None:
    loader = sharded_loader.torch.DataLoader(range(6), batch_size=2, num_replicas=1)
    (lease,) = some(loader, 1)
    assert (lease.name, lease.batch.tolist()) == ("0-0", [0, 1])
    other = sharded_loader.torch.DataLoader(range(6), batch_size=2, num_replicas=1)
    other.load_state_dict(loader.state_dict())
    assert names(rest_of(other)) == ["0-0", "0-2", "0-4"]
    with pytest.raises(TypeError, match="lease needs the order of ShardedDataLoader"):
        sharded_loader.torch.DataLoader(range(6)).lease()


@pytest.mark.costly
@pytest.mark.parametrize("part", range(4))
def test_random_leases_are_finished_once_whatever_is_killed(part: int) -> None:
    for case in range(5 * part, 5 * part + 5):
        run_case(case, "leases", processes=False)


@pytest.mark.costly
@pytest.mark.parametrize("broken", ["close", "_again"])
def test_the_random_leases_notice_one_that_is_lost_or_comes_twice(monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    owner: Any = {"close": leases.Ledger, "_again": leases.Leasing}[broken]
    monkeypatch.setattr(owner, broken, lambda *_: None)
    with pytest.raises(Difference, match=r"again: python -m tests.fuzz --case \d+ --leases"):
        for case in range(40):
            run_case(case, "leases", processes=False)
