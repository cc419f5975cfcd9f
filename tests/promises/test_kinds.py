"""What every loader promises: `ShardedDataLoader` and the drop-in, over map-style and over iterable data."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import POOLS, PROCESS_POOLS, begin, covering
from failures import KILL, Boom, Fails, boom, exit_, hang, hang_for_a_while, kill, raise_lookup, stop
from kinds import KINDS, OURS, SIZE, numbers_of, rows_of, until_the_end
from samples import wait_for
from stream_samples import values

from sharded_loader import LoaderClosedError, SampleReadError, WorkerDiedError, WorkerTimeoutError
from sharded_loader.base.errors import notes_of

pytestmark = pytest.mark.filterwarnings("ignore:part . of 4 has ended too early", "ignore:This DataLoader will create")


@covering(2, kind=KINDS, pool=POOLS, workers=[1, 3], prefetch=[1, 9])
def test_order_and_random_numbers_are_those_of_seed_epoch_and_sample_whoever_reads(
    kind: str, pool: str, workers: int, prefetch: int
) -> None:
    one = KINDS[kind]
    with one.open(pool, workers=workers, prefetch_factor=prefetch) as loader:
        first, second = rows_of(loader), rows_of(loader)
    assert numbers_of(first) == numbers_of(second) == one.batches
    assert [first, second] == one.epochs(2)
    drawn = [number for epoch in (first, second) for batch in epoch for _, number in batch]
    assert len(set(drawn)) == len(drawn)
    assert not {*drawn} & {number for batch in one.epochs(seed=6)[0] for _, number in batch}
    rows = sorted(sum(first, []))
    assert rows == sorted(sum(one.epochs(batch_size=1)[0], [])), "the batch does not matter"


@covering(2, kind=OURS, pool=POOLS)
def test_the_trainers_generators_are_left_alone(kind: str, pool: str) -> None:
    def drawn() -> tuple[float, float, float]:
        return random.random(), np.random.random(), torch.rand(()).item()

    with KINDS[kind].open(pool) as loader:
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        expected = drawn()
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        list(loader)
        assert drawn() == expected


@pytest.mark.costly(6)
@covering(2, kind=KINDS, saves=POOLS, loads=POOLS)
def test_a_state_after_any_batch_goes_on_exactly_in_any_pool(kind: str, saves: str, loads: str) -> None:
    one, states = KINDS[kind], []
    whole = one.epochs(4)
    with one.open(saves, prefetch_factor=9) as loader:
        for epoch in range(2):
            states.append((epoch, 0, loader.state_dict()))
            for number, batch in enumerate(loader, 1):
                assert values(batch) == whole[epoch][number - 1]
                states.append((epoch, number, loader.state_dict()))
                assert loader.state_dict() == states[-1][-1], "to tell the state changes nothing"
    for epoch, number, state in states[:: 3 if loads in PROCESS_POOLS else 1]:
        assert json.loads(json.dumps(state)) == state
        with one.open(loads, workers=1) as loader:
            loader.load_state_dict(state)
            if one.is_ours:
                begun = number < len(whole[epoch])
                assert values(loader.peek()) == (whole[epoch][number] if begun else whole[epoch + 1][0])
                assert not begun or (loader.epoch, loader.position, loader.state_dict()) == (epoch, number, state)
            found = [*filter(None, (rows_of(loader) for _ in range(2)))]  # behind the last batch an epoch may be empty
            assert found == [*filter(None, [whole[epoch][number:], *whole[epoch + 1 :]])][: len(found)], number
            assert found


@pytest.mark.costly(6)
@covering(2, kind=KINDS, pool=POOLS[:3])
def test_an_epoch_that_is_set_is_that_epoch_and_the_next_one_follows(kind: str, pool: str) -> None:
    whole = KINDS[kind].epochs(4)
    with KINDS[kind].open(pool) as loader:
        for epoch in (2, 0, 1):
            loader.set_epoch(epoch)
            assert [rows_of(loader), rows_of(loader)] == whole[epoch : epoch + 2]


@covering(2, kind=OURS, pool=POOLS[:3], workers=[1, 4])
def test_several_loops_at_a_time_each_have_their_own_epoch(kind: str, pool: str, workers: int) -> None:
    with KINDS[kind].open(pool, workers=workers) as loader:
        loops = [iter(loader) for _ in range(3)]
        found: list[list[Any]] = [[], [], []]
        for turn in itertools.cycle((0, 1, 2, 1)):
            batch = next(loops[turn], None)
            if batch is None:
                break
            found[turn].append(values(batch))
        found = [one + rows_of(loop) for one, loop in zip(found, loops, strict=True)]
        next(iter(loader))
        assert [next(loop, None) for loop in loops] == [None] * 3, "what has ended stays ended"
    assert found == KINDS[kind].epochs(3)


@covering(2, kind=KINDS, pool=POOLS, count=[1, 4])
def test_a_loop_that_is_left_leaves_nothing_to_the_next_one(kind: str, pool: str, count: int) -> None:
    whole = KINDS[kind].epochs(3)
    with KINDS[kind].open(pool) as loader:
        for epoch in range(2):
            assert rows_of(itertools.islice(loader, count)) == whole[epoch][:count]
        assert rows_of(loader) == whole[2]


@covering(2, kind=KINDS, pool=POOLS[:3])
def test_to_read_a_sample_or_to_peek_disturbs_nothing(kind: str, pool: str) -> None:
    one, found = KINDS[kind], []
    whole = one.epochs(3)
    index = {row[0]: row[0] if "map" in kind else divmod(row[0], 100) for batch in whole[0] for row in batch}
    with one.open(pool) as loader:
        if one.is_ours:
            assert values(loader.peek()) == values(loader.peek()) == whole[0][0]
            assert not loader.pool.started
        for batch in loader:
            found.append(values(batch))
            for epoch in (0, 2):
                number, drawn = whole[epoch][len(found) - 1][1]
                assert loader.read(index[number], epoch=epoch).tolist() == [number, drawn]
            assert not one.is_ours or values(loader.peek()) == whole[1][0]
        assert [found, rows_of(loader), rows_of(loader)] == whole


@covering(2, kind=KINDS, pool=POOLS, weights=[None, [2, 1], [1, 3]])
def test_batches_are_split_into_shards_of_which_none_is_empty(kind: str, pool: str, weights: list[int] | None) -> None:
    one = KINDS[kind]
    weighted = {"shard_weights": weights} if one.is_ours else {}
    with one.open(pool, num_shards=2, **weighted) as loader:
        found = rows_of(loader)
    assert [sum(shards, []) for shards in found] == one.epochs()[0]
    assert all(len(shards) == 2 and all(shards) for shards in found)
    sizes = {None: (2, 2), (2, 1): (3, 1), (1, 3): (1, 3)}[weights and tuple(weights) if weighted else None]
    assert [*map(len, found[0])] == [*sizes]


@covering(2, kind=OURS, pool=POOLS)
def test_threads_that_share_an_iterator_get_each_batch_once(kind: str, pool: str) -> None:
    found: list[Any] = []
    with KINDS[kind].open(pool, batch_size=1) as loader:
        iterator = iter(loader)
        threads = [threading.Thread(target=lambda: found.extend(map(values, iterator))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == sorted(KINDS[kind].epochs(batch_size=1)[0])


@covering(2, kind=KINDS, pool=POOLS, fail=[raise_lookup, boom, stop, exit_], prefetch=[1, 20], bad=range(3))
def test_an_error_comes_in_place_of_its_batch_and_names_its_sample(
    kind: str, pool: str, fail: Callable[[], Any], prefetch: int, bad: int
) -> None:
    one = KINDS[kind].at(bad)
    with one.open(pool, fail, prefetch_factor=prefetch) as loader:
        for epoch in range(2):
            places, (error,) = until_the_end(iter(loader))
            assert numbers_of(places) == one.with_error
            known = {raise_lookup: LookupError, boom: Boom}.get(fail)
            assert type(error) is known if known else isinstance(error, SampleReadError | RuntimeError)
            assert (str(error), getattr(error, "code", 42)) == ("sample went wrong", 42) or fail is not boom
            where, again = notes_of(error)[-2:]
            number = places.index(None) if "map" in kind else ""  # an empty part has had its turn
            assert f"in epoch {epoch}, batch {number}" in where and f"sample {one.bad}" in where
            assert ("worker" in where or "thread" in where) == (pool != "inline")
            assert fail is not boom or pool not in PROCESS_POOLS or "in boom" in str(error.__cause__)
            assert again.endswith(f"loader.read({one.bad}, epoch={epoch})")
        with pytest.raises(type(error) if known else BaseException):
            loader.read(one.bad)


def stand_in(error: Any) -> Any:
    return np.array([-1, 0])


@covering(2, kind=KINDS, pool=POOLS, on_error=["skip", "replace", stand_in], bad=range(3))
def test_a_bad_sample_is_left_out_or_replaced(kind: str, pool: str, on_error: Any, bad: int) -> None:
    one = KINDS[kind].at(bad)
    with warnings.catch_warnings(record=True) as warned, one.open(pool, raise_lookup, on_error=on_error) as loader:
        warnings.simplefilter("always")
        found = rows_of(loader)
        ended = [str(one.message) for one in warned if "has ended too early" in str(one.message)]
        if one.is_ours:
            ((index, error),) = loader.skipped
            assert (index, type(error), error.__traceback__, loader.num_skipped) == (one.bad, LookupError, None, 1)
    with one.open("inline", raise_lookup, on_error=on_error) as inline:
        assert found == rows_of(inline)
    place = one.with_error.index(None)
    good = one.skipped[place]
    said = "" if "map" in kind else f"part {one.bad[0]} of 4 has ended too early: its generator raised"
    assert len(ended) == bool(said) and "".join(ended).startswith(said), "its other samples are left out"
    found = numbers_of(found)
    batch, found[place] = found[place], good
    assert found == one.skipped
    [instead] = [number for number in batch if number not in good] or [None]
    assert len(batch) == len(good) + (on_error != "skip")
    assert (instead == -1) == (on_error is stand_in) and (on_error is stand_in or {*batch} == {*good})


@covering(2, kind=KINDS, pool=POOLS)
def test_a_batch_that_cannot_be_made_costs_that_batch_only(kind: str, pool: str) -> None:
    one = KINDS[kind]
    number = one.batches[1][0]

    def collate(samples: list[Any]) -> Any:
        if any(sample[0] == number for sample in samples):
            raise OverflowError("of the test")
        return np.stack(samples)

    with one.open(pool, collate_fn=collate) as loader:
        places, errors = until_the_end(iter(loader))
    assert [type(error) for error in errors] == [OverflowError]
    assert numbers_of(places) == [one.batches[0], None, *one.batches[2:]]


@pytest.mark.costly(4)
@covering(2, kind=KINDS, method=PROCESS_POOLS, how=["a sample", "somebody"])
def test_whoever_is_killed_no_batch_is_lost_and_nothing_drawn_changes(
    kind: str, method: str, how: str, tmp_path: Path
) -> None:
    one = KINDS[kind]
    fail = Fails(kill, tmp_path / "once", times=1) if how == "a sample" else None
    with one.open(method, fail, restarts=100) as loader:
        for epoch in one.epochs(2):
            found, iterator = [], iter(loader)
            for batch in iterator:
                found.append(values(batch))
                if how == "somebody" and len(found) in (1, 3):
                    for pid in one.pids(loader, iterator)[len(found) // 3 :]:
                        os.kill(pid, KILL)
            assert found == epoch
    assert fail is None or fail.count > 1


@pytest.mark.costly(6)
@covering(2, kind=KINDS, method=PROCESS_POOLS, prefetch=[1, 20], workers=[1, 2], bad=range(3))
def test_a_sample_that_kills_every_worker_is_one_error_that_names_it(
    kind: str, method: str, prefetch: int, workers: int, bad: int
) -> None:
    one = KINDS[kind].at(bad)
    with one.open(method, kill, workers, prefetch_factor=prefetch) as loader:
        places, (told,) = until_the_end(iter(loader))
    error: Any = told if one.is_ours else told.__cause__
    assert numbers_of(places) == one.with_error
    assert isinstance(error, WorkerDiedError) and f"sample {one.bad}" in str(told)
    assert (abs(error.exitcode), error.epoch, error.index) == (KILL, 0, one.bad)
    assert not one.is_ours or f"loader.read({one.bad}, epoch=0)" in notes_of(error)[-1]


@pytest.mark.slow
@covering(1, kind=KINDS, pool=POOLS[1:])
def test_a_sample_that_hangs_is_one_error_that_names_it(kind: str, pool: str) -> None:
    one, fail = KINDS[kind], hang_for_a_while if pool == "thread" else hang
    with one.open(pool, fail, timeout=1, **({} if pool == "thread" else {"restarts": 1})) as loader:
        places, (told,) = until_the_end(iter(loader))
    error: Any = told if one.is_ours else told.__cause__
    assert numbers_of(places) == one.with_error
    assert isinstance(error, WorkerTimeoutError) and (error.epoch, error.index) == (0, one.bad)


@pytest.mark.parametrize("kind", OURS)
def test_a_ctrl_c_inside_the_dataset_reads_the_batch_again(kind: str, tmp_path: Path) -> None:
    found, times = [], 0
    with KINDS[kind].open(fail=Fails(lambda: signal.raise_signal(signal.SIGINT), tmp_path / "once", times=1)) as loader:
        iterator = iter(loader)
        while True:
            try:
                found.append(values(next(iterator)))
            except KeyboardInterrupt:
                times += 1
            except StopIteration:
                break
    assert (found, times) == (KINDS[kind].epochs()[0], 1)


@covering(2, kind=OURS, pool=POOLS[1:])
def test_a_loader_that_is_closed_wakes_who_waits_and_gives_nothing_more(kind: str, pool: str, tmp_path: Path) -> None:
    waits = [tmp_path / "waits", tmp_path / "go on"]

    def wait() -> None:
        waits[0].touch()
        wait_for(waits[1])

    with KINDS[kind].open(pool, wait, batch_size=SIZE) as loader:
        iterator = iter(loader)
        for _ in range(KINDS[kind].with_error.index(None)):
            next(iterator)
        thread = begin(iterator)
        wait_for(waits[0])
        loader.close()
        thread.join()
        waits[1].touch()
        assert not loader.pool.started
        for use in (lambda: next(iterator), lambda: iter(loader), loader.peek, loader.refresh, lambda: loader.read(0)):
            with pytest.raises(LoaderClosedError):
                use()


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_warned_of_in_ordinary_use(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with KINDS[kind].open("thread", num_replicas=1, rank=0) as loader:
            assert numbers_of(rows_of(loader)) == KINDS[kind].batches
