"""P1 order, P2 once each, P5 one stream, P8 no silent hang, P9 errors say where: over every pool."""

from __future__ import annotations

import enum
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from failures import (
    Boom,
    boom,
    exit_,
    kill,
    raise_unpicklable,
    same_again,
)
from samples import Bad, Draws, Immovable, Misfits, Noting, OneWay, Shy, Uneven, wait_for

from sharded_loader import Placement, ProcessPool, SampleReadError, ShardedDataLoader, SimpleDataset
from sharded_loader.base.errors import notes_of
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.devices import names
from sharded_loader.engine.pool import Pool


def flat(batches: Any) -> list[Any]:
    return [value for batch in batches for value in batch.tolist()]


# -- P1, P2 -------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.also_spawned
@pytest.mark.parametrize("prefetch", [0, *[pytest.param(n, marks=pytest.mark.slow) for n in (1, 50)], 3])
def test_batches_come_in_the_samplers_order_whatever_finishes_first(pool: Pool, prefetch: int) -> None:
    with ShardedDataLoader(Uneven(), 3, pool=pool, prefetch=prefetch) as loader:
        assert flat(loader) == list(range(60))


@pytest.mark.parametrize("last_batch", ["keep", "discard", "rollover"])
@pytest.mark.costly
def test_every_index_comes_once(pool: Pool, last_batch: str) -> None:
    with ShardedDataLoader(range(23), 4, True, last_batch=last_batch, pool=pool, seed=5) as loader:
        epochs = [flat(loader) for _ in range(4)]
    if last_batch == "rollover":
        stream = [index for epoch in epochs for index in epoch]
        assert [sorted(stream[i : i + 23]) for i in range(0, 69, 23)] == [list(range(23))] * 3
    else:
        assert all(len(set(epoch)) == len(epoch) == (23 if last_batch == "keep" else 20) for epoch in epochs)
    assert epochs[0] != epochs[1]


# -- P5 -----------------------------------------------------------------------------------------------------


def stream(pool: Pool, **options: Any) -> list[Any]:
    with ShardedDataLoader(Draws(), 4, shuffle=True, seed=11, pool=pool, **options) as loader:
        return [[[part.tolist() for part in batch] for batch in loader] for _ in range(2)]


@pytest.mark.costly(2)
def test_order_and_random_numbers_depend_on_neither_pool_nor_workers(new_pool: Callable[..., Pool]) -> None:
    from conftest import make_pool

    expected = stream(make_pool("inline"))
    assert stream(new_pool(1)) == expected
    assert stream(new_pool(3), prefetch=1) == expected
    assert expected[0] != expected[1]


def test_shards_hold_the_same_samples_as_the_whole_batch(new_pool: Callable[..., Pool]) -> None:
    with ShardedDataLoader(range(50), 8, True, seed=3, pool=new_pool()) as whole:
        expected = [batch.tolist() for batch in whole]
    with ShardedDataLoader(
        range(50), 8, True, seed=3, pool=new_pool(), num_shards=3, device=Placement(shard_weights=[2, 1, 1])
    ) as split:
        found = [[shard.tolist() for shard in shards] for shards in split]
    assert [[index for shard in shards for index in shard] for shards in found] == expected
    assert [len(shard) for shard in found[0]] == [4, 2, 2]
    assert len(found[-1]) == 2


def test_global_generators_are_reproducible_in_process_workers(process_pool: ProcessPool) -> None:
    def drawn(index: int) -> Any:
        return np.array([random.random(), np.random.random(), torch.rand(()).item()])

    def draw(workers: int) -> list[Any]:
        pool = ProcessPool(workers, start_method=process_pool.start_method)
        with ShardedDataLoader(SimpleDataset(range(24)).transform(drawn), 4, seed=1, pool=pool) as loader:
            return [[batch.tolist() for batch in loader] for _ in range(2)]

    first = draw(2)
    assert draw(1) == first
    assert len({str(batch) for epoch in first for batch in epoch}) == 12


def test_the_default_device_of_torch_changes_no_seed(pool: Pool) -> None:
    def order(**arguments: Any) -> list[int]:
        torch.manual_seed(4)
        return flat(ShardedDataLoader(np.arange(30), 5, shuffle=True, **arguments))

    expected = order()
    torch.set_default_device("meta")
    try:
        assert order(pool=pool) == expected
    finally:
        torch.set_default_device(None)


# -- P8 -----------------------------------------------------------------------------------------------------


class DiesWhileAnotherWaits(Noting):
    """Sample 1 kills its worker once. Sample 0 waits until it is there."""

    def __getitem__(self, index: int) -> int:
        died, mended = self.path.with_name("died"), self.path.with_name("mended")
        if index == 0:
            wait_for(mended)
        if index == 1:
            if not died.exists():
                died.touch()
                kill()
            mended.touch()
        return index


def test_a_death_is_mended_while_another_worker_is_busy(process_pool: ProcessPool, tmp_path: Path) -> None:
    with ShardedDataLoader(DiesWhileAnotherWaits(tmp_path / "read"), 1, pool=process_pool, prefetch=2) as loader:
        assert flat(loader) == list(range(12))


def test_an_idle_worker_that_is_killed_is_replaced_and_nothing_is_seen(process_pool: ProcessPool) -> None:
    with ShardedDataLoader(range(6), 2, pool=process_pool) as loader:
        assert flat(loader) == list(range(6))
        victim = process_pool.pids[0]
        os.kill(victim, signal.SIGKILL)
        while victim in process_pool.pids:  # until the kernel has got round to it
            assert flat(loader) == list(range(6))
        assert flat(loader) == list(range(6))


# -- P9 -----------------------------------------------------------------------------------------------------


def test_an_error_is_the_original_and_names_its_place_and_iteration_goes_on(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 4, pool=pool, num_shards=2) as loader:
        list_of = iter(loader)
        assert [shard.tolist() for shard in next(list_of)] == [[0, 1], [2, 3]]
        with pytest.raises(Boom) as caught:
            next(list_of)
        assert (str(caught.value), caught.value.code) == ("sample went wrong", 42)
        where, again = notes_of(caught.value)
        assert "epoch 0, batch 1, shard 1, sample 7" in where
        assert ("worker" in where or "thread" in where) == (pool.num_workers > 0)
        assert again.endswith("loader.read(7, epoch=0)")
        if isinstance(pool, ProcessPool):
            assert "in boom" in str(caught.value.__cause__)
        assert len(list(list_of)) == 3
        with pytest.raises(Boom):
            loader.read(7, epoch=0)


def test_an_exception_that_cannot_travel_has_a_stand_in(process_pool: ProcessPool) -> None:
    with ShardedDataLoader(Bad(raise_unpicklable), 20, pool=process_pool) as loader:
        with pytest.raises(SampleReadError, match="Unpicklable: cannot travel") as caught:
            next(iter(loader))
        assert "sample 7" in notes_of(caught.value)[0]


def test_an_error_in_stacking_keeps_its_sample_on_the_way(pool: Pool) -> None:
    with ShardedDataLoader(Misfits(), 2, pool=pool, num_shards=1, on_error="skip") as loader:
        with pytest.raises(BatchifyError) as caught:
            list(loader)
        assert "batch 3, shard 0, sample 7 (it does not fit sample 6)" in notes_of(caught.value)[0]


def test_the_sampler_s_own_error_comes_at_its_place(pool: Pool) -> None:
    class Ends:
        def __iter__(self) -> Iterator[list[int]]:
            yield [0, 1]
            raise Boom("sampler", 2)

        def __len__(self) -> int:
            return 2

    with ShardedDataLoader(range(4), batch_sampler=Ends(), pool=pool) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(Boom) as caught:
            next(iterator)
        assert "sampler, in epoch 0 at batch 1" in notes_of(caught.value)[0]
        assert list(iterator) == []


# -- on_error -----------------------------------------------------------------------------------------------


def test_a_batch_without_a_good_sample_is_left_out_with_a_warning(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 1, pool=pool, on_error="skip") as loader:
        with pytest.warns(UserWarning, match="epoch 0, batch 7 was left out"):
            assert flat(loader) == [i for i in range(20) if i != 7]


def test_with_replicas_a_shard_without_a_good_sample_raises_or_is_filled(pool: Pool) -> None:
    ranks: dict[str, Any] = {"num_replicas": 1, "rank": 0, "num_shards": 2}
    with ShardedDataLoader(Bad(boom), 2, pool=pool, on_error="skip", **ranks) as loader:
        with pytest.raises(Boom) as caught:
            list(loader)
        where, again = notes_of(caught.value)[-2:]
        assert "epoch 0, batch 3, shard 1, sample 7" in where and again.endswith("loader.read(7, epoch=0)")
        assert any('on_error="replace"' in note for note in notes_of(caught.value))
    with ShardedDataLoader(Bad(boom), 2, on_error="replace", **ranks) as loader:
        assert [shard.tolist() for shard in list(loader)[3]] == [[6], [6]]


def test_shards_move_up_when_one_loses_all_its_samples(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 2, pool=pool, on_error="skip", devices=["cpu", "cpu"]) as loader:
        with pytest.warns(UserWarning, match="epoch 0, batch 3: shard 1 was left out"):
            assert [shard.tolist() for shard in list(loader)[3]] == [[6]]


def test_after_a_lost_shard_the_others_are_on_the_devices_of_their_new_positions(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = [torch.device("cpu"), torch.device("meta"), torch.device("cpu")]
    monkeypatch.setattr(names, "accelerators", lambda: [torch.device("meta")])
    with ShardedDataLoader(
        Bad(boom), 7, pool=pool, on_error="skip", devices=Placement(places, shard_weights=[1, 4, 2])
    ) as loader:
        with pytest.warns(UserWarning, match="shard 0 was left out, those after it moved up"):
            found = [[(shard.device, len(shard)) for shard in shards] for shards in loader]
    cpu, meta = places[:2]
    # In batch 1 the bad sample 7 is a shard of its own.
    assert found == [[(cpu, 1), (meta, 4), (cpu, 2)], [(cpu, 4), (meta, 2)], [(cpu, 1), (meta, 3), (cpu, 2)]]


def test_an_error_that_is_raised_again_and_again_tells_its_last_place(pool: Pool) -> None:
    with ShardedDataLoader(Bad(same_again), 4, pool=pool) as loader:
        for _ in range(2):
            with pytest.raises(Boom) as caught:
                list(loader)
        assert len(notes_of(caught.value)) == 2
        assert "epoch 1" in notes_of(caught.value)[0]


# -- what a worker or the trainer cannot unpickle, place, or be told ------------------------------------------


def test_keys_of_any_kind_reach_the_workers(process_pool: ProcessPool) -> None:
    class Key(enum.Enum):
        A = 1
        B = 2

    data = type("Data", (), {"__len__": lambda self: 2, "__getitem__": lambda self, key: key.value})

    with ShardedDataLoader(data(), 2, sampler=list(Key), pool=process_pool) as loader:
        assert flat(loader) == [1, 2]


def test_a_key_that_cannot_be_sent_is_an_error_at_its_place(process_pool: ProcessPool) -> None:
    keys = [0, 1, threading.Lock(), 2]
    with ShardedDataLoader(range(4), 1, sampler=keys, pool=process_pool) as loader:
        iterator = iter(loader)
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0], [1]]
        with pytest.raises(TypeError, match="indices of a batch cannot be sent") as caught:
            next(iterator)
        assert "batch 2" in notes_of(caught.value)[0]
        assert next(iterator).tolist() == [2]


def test_a_batch_that_the_trainer_cannot_unpickle_is_one_batch_s_error(process_pool: ProcessPool) -> None:
    def batchify(samples: list[int]) -> Any:
        return OneWay() if 0 in samples else samples

    with ShardedDataLoader(range(6), 2, batchify_fn=batchify, pool=process_pool) as loader:
        for epoch in range(2):
            iterator = iter(loader)
            with pytest.raises(TypeError, match="cannot be unpickled in this process") as caught:
                next(iterator)
            assert f"epoch {epoch}, batch 0" in notes_of(caught.value)[0]
            assert list(iterator) == [[2, 3], [4, 5]]


def test_a_batch_that_cannot_be_moved_is_one_batch_s_error(pool: Pool) -> None:
    def batchify(samples: list[int]) -> Any:
        return Immovable() if 0 in samples else samples

    with ShardedDataLoader(range(4), 2, batchify_fn=batchify, pool=pool, device=torch.device("meta")) as loader:
        iterator = iter(loader)
        with pytest.raises(Boom) as caught:
            next(iterator)
        assert "copied to meta" in notes_of(caught.value)[0]
        assert "epoch 0, batch 0" in notes_of(caught.value)[1]
        assert next(iterator) == [2, 3]


def test_a_batch_that_cannot_be_looked_at_is_delivered(pool: Pool) -> None:
    with ShardedDataLoader(range(2), 2, batchify_fn=Shy, pool=pool) as loader:
        assert isinstance(next(iter(loader)), Shy)


def test_a_warning_that_is_an_error_is_raised_once(pool: Pool) -> None:
    with ShardedDataLoader(Bad(boom), 1, pool=pool, on_error="skip") as loader:
        iterator = iter(loader)
        for _ in range(7):
            next(iterator)
        with pytest.raises(UserWarning, match="was left out"):  # the tests make errors of warnings
            next(iterator)
        assert next(iterator).tolist() == [8]
        assert loader.num_skipped == 1


def test_a_dataset_whose_set_epoch_fails_is_an_error_with_its_place(process_pool: ProcessPool) -> None:
    class Told(SimpleDataset):
        def set_epoch(self, epoch: int) -> None:
            if epoch == 1:
                boom()

    with ShardedDataLoader(Told(range(4)), 2, pool=process_pool) as loader:
        assert flat(loader) == [0, 1, 2, 3]
        with pytest.raises(Boom) as caught:
            next(iter(loader))
        assert any("set_epoch(1)" in note for note in notes_of(caught.value))
        loader.set_epoch(0)
        assert flat(loader) == [0, 1, 2, 3]


@pytest.mark.parametrize("fail", [exit_, boom])
def test_a_worker_init_fn_that_exits_is_an_error(worker_pool: Pool, fail: Callable[[], Any]) -> None:
    worker_pool.worker_init_fn = lambda number: fail()
    with ShardedDataLoader(range(4), 2, pool=worker_pool) as loader, pytest.raises((Boom, SampleReadError)):
        next(iter(loader))
