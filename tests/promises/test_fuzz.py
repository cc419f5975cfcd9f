"""Random loaders do what a loader that is too simple to be wrong does; and what such cases have found."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch.utils.data as torch_data
from failures import Boom, boom
from samples import Bad

from sharded_loader import BatchSampler, ShardedDataLoader, ThreadPool
from sharded_loader.engine.pool import Pool
from sharded_loader.sampling import epoch as epochs
from sharded_loader.sampling.third_party import table_of
from tests import naive
from tests.fuzz import cases, run

BLOCK = 100


@pytest.mark.costly
@pytest.mark.parametrize("part", range(2))
def test_random_loaders_do_what_a_naive_one_does(part: int) -> None:
    for case in range(12):
        run.run_case(1000 * (1 + part) + case, processes=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(20))
def test_two_thousand_random_loaders_do_what_a_naive_one_does(part: int) -> None:
    for case in range(BLOCK):
        run.run_case(1_000_000 + BLOCK * part + case)


@pytest.mark.costly
def test_random_loaders_that_are_disturbed_do_what_a_naive_one_does() -> None:
    for case in range(4):
        run.run_case(case, "faults", processes=False)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(5))
def test_a_hundred_random_loaders_of_all_pools_that_are_disturbed_do_what_a_naive_one_does(part: int) -> None:
    for case in range(20):
        run.run_case(1_000_000 + 20 * part + case, "faults")


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


# -- found by such cases ---------------------------------------------------------------------------------------------


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
        assert all(error.__traceback__ is None for _, error in loader.skipped)


@pytest.mark.parametrize("last_batch", ["discard", "rollover"])
def test_the_end_of_given_batches_of_another_librarys_sampler_is_the_next_epochs_beginning(last_batch: str) -> None:
    def make() -> ShardedDataLoader:
        batches = BatchSampler(torch_data.RandomSampler(range(58)), 5, last_batch, seed=1)
        return ShardedDataLoader(range(58), batch_sampler=batches, seed=0)

    loader, resumed = make(), make()
    iterator = iter(loader)
    for _ in range(len(loader)):
        next(iterator)
    resumed.load_state_dict(loader.state_dict())
    assert (resumed.epoch, resumed.position) == (1, 0)
    resumed.set_epoch(0)
    assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in make()]


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
