"""Random loaders do what a loader that is too simple to be wrong does; and what such cases have found."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from failures import Boom, boom
from samples import Bad

from sharded_loader import ShardedDataLoader, ThreadPool
from sharded_loader.engine.pool import Pool
from sharded_loader.parallel import shares
from sharded_loader.sampling import epoch as epochs
from sharded_loader.sampling.third_party import table_of
from tests import naive
from tests.fuzz import cases, run
from tests.fuzz.ranks import Ranks, Track
from tests.fuzz.recorded import compare, line
from tests.fuzz.run import Difference, run_case

MANY = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("part", [pytest.param(part, marks=MANY if part else pytest.mark.costly) for part in range(21)])
def test_random_loaders_do_what_a_naive_one_does(part: int) -> None:
    for case in range(100 if part else 12):
        run.run_case((1_000_000 + 100 * part if part else 2000) + case, processes=part > 0)


@pytest.mark.parametrize("part", [pytest.param(part, marks=MANY if part else pytest.mark.costly) for part in range(6)])
def test_random_loaders_that_are_disturbed_do_what_a_naive_one_does(part: int) -> None:
    for case in range(20 if part else 2):
        run.run_case(1_000_000 * (part > 0) + 20 * part + case, "faults", processes=part > 0)


@pytest.mark.costly
@pytest.mark.parametrize("kind", ["plain", "faults"])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("shares", lambda count, shards, weights: [count] + [0] * (shards - 1)),
        ("collate", lambda samples: samples),
    ],
)
def test_the_comparison_notices_other_batches(
    monkeypatch: pytest.MonkeyPatch, name: str, wrong: Any, kind: str
) -> None:
    monkeypatch.setattr(naive, name, wrong)
    monkeypatch.setattr(cases, name, wrong)
    with pytest.raises(
        run.Difference, match=rf"again: python -m tests.fuzz --case \d+{' --faults' * (kind != 'plain')}"
    ):
        for case in range(100):
            run.run_case(case, kind, processes=False)


@pytest.mark.costly
def test_twins_notice_workers_that_read_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    submit = ThreadPool.submit

    def submit_others(self: ThreadPool, tasks: Any) -> None:
        submit(self, [replace(task, epoch=task.epoch + 1) for task in tasks])

    monkeypatch.setattr(ThreadPool, "submit", submit_others)
    with pytest.raises(run.Difference, match="twin: "):
        for case in range(1, 100, 2):
            run.run_case(case, "faults", processes=False)


def test_the_comparison_notices_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "table_of", lambda items, epoch, seed: table_of(items, epoch + 1, seed))
    with pytest.raises(run.Difference):
        for case in range(100):
            run.run_case(case, processes=False)


def test_an_error_that_was_raised_keeps_no_iterator_alive(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 1, pool=pool, on_error="skip", num_replicas=1, rank=0) as loader:
        loader.set_epoch(3)
        iterator = iter(loader)
        with pytest.raises(Boom):
            for _ in range(8):
                next(iterator)
        alive = weakref.ref(iterator)
        del iterator
        gc.collect()
        assert alive() is None
        assert not loader.skipped  # what was raised is not kept there


def test_a_loaded_beginning_of_an_epoch_is_told_until_it_is_used_although_an_older_iterator_delivers() -> None:
    loader = ShardedDataLoader(range(8), 2, shuffle=True, seed=1)
    loader.set_epoch(4)
    state = loader.state_dict()
    loader.set_epoch(0)
    older = iter(loader)
    next(older)
    loader.load_state_dict(state)
    next(older)
    assert (loader.epoch, loader.position) == (4, 0) and loader.state_dict() == state
    next(iter(loader))
    assert (loader.epoch, loader.position) == (4, 1)


def test_a_loaded_beginning_of_an_epoch_fits_a_dataset_that_has_grown() -> None:
    data = list(range(8))
    loader = ShardedDataLoader(data, 2)
    list(loader)
    loader.load_state_dict(loader.state_dict())
    data.append(8)
    loader.refresh()
    assert (loader.epoch, len(list(loader))) == (1, 5)


def test_with_rollover_a_state_fits_after_the_batch_size_has_changed(pool: Pool) -> None:
    def make(batch_size: int, **reading: Any) -> ShardedDataLoader:
        return ShardedDataLoader(range(10), batch_size, last_batch="rollover", **reading)

    first, second = make(100), make(4)
    for _ in range(3):
        assert list(first) == []  # an epoch has fewer samples than a batch: they are due in the next one
    second.load_state_dict(first.state_dict(), strict=False)
    batches = iter(second)
    done = [next(batches).tolist() for _ in range(2)]
    with make(4, pool=pool) as third:
        third.load_state_dict(second.state_dict())
        rest = [batch.tolist() for batch in third]
    assert sum(done + rest, []) == [*range(10)] * 4


def test_each_rank_has_exactly_its_samples() -> None:
    counts = sum((run_case(seed, "ranks") for seed in range(8)), Counter[str]())
    assert min(counts[f"event: {event}"] for event in ("step", "resume", "rescale", "rest", "set_weights")) > 0


@pytest.mark.parametrize("seed", [0, 1, 3, 4, 5, 6, 7, 8])
@pytest.mark.costly
def test_a_rank_that_has_another_sample_is_a_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(track: Track, place: int) -> Any:
        return [-1] if track.job.in_batches else -1

    case = Ranks(seed)
    monkeypatch.setattr(Track, "item", other)
    with pytest.raises(Difference, match="not"):
        case.rest()
    case.close()


@pytest.mark.costly
def test_shares_of_global_batches_are_the_steps_of_one_process_and_others_are_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts = sum((run_case(seed, "shares", processes=False) for seed in range(8)), Counter[str]())
    assert counts["epochs"] and counts["event: kill"] and counts["event: rescale"]
    share = shares._share
    monkeypatch.setattr(shares, "_share", lambda shard, count, number, costs: share(shard, count, 0, costs))
    with pytest.raises(Difference, match="again: python -m tests.fuzz --case .* --shares"):
        for seed in range(8):
            run_case(seed, "shares", processes=False)


@pytest.mark.costly
@pytest.mark.parametrize("other", ["never read", "read in vain"])
def test_a_sample_that_is_not_read_or_too_often_is_a_difference(other: str) -> None:
    for seed in range(100):
        case = Ranks(seed)
        whole = case.track.job.whole
        if whole and not case.track.job.discards:
            break
        case.close()
    assert whole
    if other == "never read":
        whole[other] = 1
    else:
        del whole[next(iter(whole))]
    with pytest.raises(Difference, match="'never read': 1}.* not read" if other == "never read" else "too often"):
        case.rest()
    case.close()


def lines(kind: str, seeds: range) -> list[dict[str, Any]]:
    return [line(kind, seed, processes=False) for seed in seeds]


@pytest.mark.parametrize("kind", ["plain", "twins"])
@pytest.mark.slow
def test_two_recordings_are_equal_and_what_differs_in_another_is_shown(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lines(kind, range(2))
    assert any(len(line["events"]) > 5 for line in first)
    assert compare(first, lines(kind, range(2))) == 0
    assert capsys.readouterr().out == "2 seeds compared, 0 differ\n"
    assert compare(first, lines(kind, range(1, 3))) == 2
    if kind == "plain":
        state_dict = ShardedDataLoader.state_dict
        monkeypatch.setattr(ShardedDataLoader, "state_dict", lambda self: {**state_dict(self), "new": 1})
        assert compare(first, lines("plain", range(2)))
        assert " state/1/new\n        was missing\n        now 1\n" in capsys.readouterr().out
