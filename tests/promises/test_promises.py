"""P1 order, P2 once each, P5 one stream, P8 no silent hang, P9 errors say where: over every pool."""

from __future__ import annotations

import enum
import functools
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data as torch_data
from conftest import POOLS, PROCESS_POOLS, covering, make_pool, with_errors
from failures import Boom, boom, exit_, kill, same_again, stop
from odd_samples import (
    HOSTILE,
    Hostile,
    StopsWhenCounted,
    StopsWhenMoved,
    all_kinds,
    augment,
    everywhere,
    jitter,
    killing,
    more_jitter,
    negative,
)
from samples import (
    Bad,
    Drawing,
    DrawingInBatches,
    DrawingInItems,
    Foreign,
    Immovable,
    Misfits,
    OneWay,
    Shy,
    Uneven,
    wait_for,
)

from sharded_loader import (
    InlinePool,
    Placement,
    ProcessPool,
    SampleReadError,
    ShardedDataLoader,
    SimpleDataset,
    ThreadPool,
    sample_rng,
)
from sharded_loader.base.errors import notes_of
from sharded_loader.batchify import Stack
from sharded_loader.batching.protocol import BatchifyError
from sharded_loader.devices import names
from sharded_loader.engine.pool import Pool
from sharded_loader.randomness import rng


def flat(batches: Any) -> list[Any]:
    return [value for batch in batches for value in batch.tolist()]


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


def test_a_death_is_mended_while_another_worker_is_busy(process_pool: ProcessPool, tmp_path: Path) -> None:
    died, mended = tmp_path / "died", tmp_path / "mended"

    def read(index: int) -> int:
        if index == 0:
            wait_for(mended)
        if index == 1:
            if not died.exists():
                died.touch()
                kill()
            mended.touch()
        return index

    with ShardedDataLoader(SimpleDataset(range(12)).transform(read), 1, pool=process_pool, prefetch=2) as loader:
        assert flat(loader) == list(range(12))


def test_an_error_in_stacking_keeps_its_sample_on_the_way(pool: Pool) -> None:
    with ShardedDataLoader(Misfits(), 2, pool=pool, num_shards=1, on_error="skip") as loader:
        with pytest.raises(BatchifyError) as caught:
            list(loader)
        assert "batch 3, shard 0, sample 7 (it does not fit sample 6)" in notes_of(caught.value)[0]


def test_the_sampler_s_own_error_comes_at_its_place(pool: Pool) -> None:
    def ends() -> Iterator[list[int]]:
        yield [0, 1]
        raise Boom("sampler", 2)

    with ShardedDataLoader(range(4), batch_sampler=Foreign(ends, 2), pool=pool) as loader:
        iterator = iter(loader)
        assert next(iterator).tolist() == [0, 1]
        with pytest.raises(Boom) as caught:
            next(iterator)
        assert "sampler, in epoch 0 at batch 1" in notes_of(caught.value)[0]
        assert list(iterator) == []


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


def test_keys_of_any_kind_reach_the_dataset(pool: Pool) -> None:
    class Key(enum.Enum):
        A = 1
        B = 2

    data = type("Data", (), {"__len__": lambda self: 2, "__getitem__": lambda self, key: getattr(key, "value", key)})
    for keys, found in ((list(Key), [1, 2]), ([(0, 1), (2, 3)], [[0, 1], [2, 3]])):
        with ShardedDataLoader(data(), 2, sampler=keys, pool=pool, batchify_fn=np.array) as loader:
            assert flat(loader) == found


def spoilt(make: Callable[[], Any]) -> dict[str, Any]:
    """Batches of which the second becomes what ``make`` gives."""
    batches = [[0, 1], [3, 4], [2]]
    return {"batch_sampler": batches, "batchify_fn": lambda samples: make() if 3 in samples else samples}


def ragged() -> Any:
    return Stack()([{"id": i, "tokens": np.arange(i)} for i in (1, 2)])


TWO: dict[str, Any] = {"devices": ["cpu", "cpu"]}
META = torch.device("meta")
ALWAYS: dict[str, tuple[Any, type[Exception], str]] = {
    "above": ([3, 10], IndexError, "batch 1: the sampler yielded index 10, but the dataset has 10 samples"),
    "below": ([-11], IndexError, "index -11"),
    "above in a shard": ([[1], [12]], IndexError, "batch 1, shard 1: .* index 12"),
    "empty": ([], ValueError, "batch 1 is empty"),
    "an empty shard": ([[1], []], ValueError, "batch 1, shard 1 is empty"),
    "too many shards": ([[1], [2], [3]], ValueError, "batch 1 has 3 shards, but there are only 2 devices"),
    "no batch": (5, TypeError, "batch 1: the batch sampler yielded 5"),
    "stops": (StopsWhenCounted(), SampleReadError, "StopIteration"),
    "cannot be moved": ({"device": META, **spoilt(Immovable)}, Boom, "copied to meta"),
    "stops when moved": ({"device": META, **spoilt(StopsWhenMoved)}, SampleReadError, "StopIteration"),
    "ragged": (spoilt(ragged), ValueError, r"\(1,\).*\(2,\).*\['tokens'\].*Pad"),
}
SENT: dict[str, tuple[Any, type[Exception], str]] = {
    "indices": ([threading.Lock()], TypeError, "indices of a batch cannot be sent"),
    "from its worker": (spoilt(threading.Lock), TypeError, "cannot leave its worker process.*thread_pool=True"),
    "unpickled": (spoilt(OneWay), TypeError, "cannot be unpickled in this process"),
}


@pytest.mark.parametrize(
    ("name", "method"),
    [(name, m) for cases, pools in ((ALWAYS, POOLS), (SENT, PROCESS_POOLS)) for name in cases for m in pools],
)
@pytest.mark.costly(20)
def test_a_batch_that_cannot_be_read_sent_or_placed_is_an_error_at_its_place(name: str, method: str) -> None:
    given, error, words = {**ALWAYS, **SENT}[name]
    if not isinstance(given, dict):
        given = {"batch_sampler": [[0, 1], given, [2]], **TWO}
    with ShardedDataLoader(range(10), pool=make_pool(method), **given) as loader:
        for epoch in range(2):
            iterator = iter(loader)
            assert len(next(iterator)) == 2
            with pytest.raises(error) as caught:
                next(iterator)
            told = "\n".join([str(caught.value), *notes_of(caught.value)])
            assert re.search(words, told) and (f"epoch {epoch}, batch 1" in told or name == "stops")
            assert len(list(iterator)) == 1


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


def test_errors_whose_own_code_raises_name_their_sample_and_keep_their_class(pool: Pool) -> None:
    with ShardedDataLoader(Hostile(), 1, pool=pool, num_shards=1) as loader:
        batches = iter(loader)
        # A KeyboardInterrupt in the caller's own thread is the user's.
        for number, (_, name, attributes) in enumerate(HOSTILE[: -1 if isinstance(pool, InlinePool) else None]):
            with pytest.raises(Exception) as caught:
                next(batches)
            error = caught.value
            assert type(error).__name__ in (name, "SampleReadError" if name == "ExceptionGroup" else name)
            assert {key: getattr(error, key) for key in attributes} == attributes
            where, again = notes_of(error)
            assert f"epoch 0, batch {2 * number}, shard 0, sample {2 * number}" in where
            assert again.endswith(f"loader.read({2 * number}, epoch=0)")
            assert [shard.tolist() for shard in next(batches)] == [[2 * number + 1]]


def test_whatever_a_sample_raises_it_is_skipped_if_it_is_an_exception(pool: Pool) -> None:
    with ShardedDataLoader(Hostile(), 2, pool=pool, on_error="skip") as loader:
        batches = iter(loader)
        bad = []
        for number, (make, _, _) in enumerate(HOSTILE[:-1]):
            if isinstance(make(), Exception):
                assert next(batches).tolist() == [2 * number + 1]
                bad.append(2 * number)
            else:
                with pytest.raises(SampleReadError):
                    next(batches)
        assert [index for index, _ in loader.skipped] == bad
        assert all(error.__traceback__ is None for _, error in loader.skipped)


@pytest.mark.parametrize(
    "options", [{"batch_size": 2, "sampler": Foreign(stop, 4)}, {"batch_sampler": Foreign(stop, 4)}]
)
def test_a_sampler_that_stops_before_it_has_begun_is_no_empty_epoch(pool: Pool, options: dict[str, Any]) -> None:
    with ShardedDataLoader(range(4), pool=pool, **options) as loader:
        with pytest.raises(RuntimeError, match="StopIteration .*raised by the sampler"):
            list(loader)


def tolerated(dataset: Any, pool: Pool, on_error: Any, **options: Any) -> Any:
    """All that a user sees of an epoch."""
    seen: list[Any] = []
    with (
        warnings.catch_warnings(record=True) as warned,
        ShardedDataLoader(dataset, 4, pool=pool, on_error=on_error, seed=1, **options) as loader,
    ):
        warnings.simplefilter("always")
        for batch in with_errors(iter(loader)):
            if isinstance(batch, ValueError):
                seen.append(str(batch))
            else:
                seen.append([part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist())
        skipped = sorted(index for index, _ in loader.skipped)
    return seen, skipped, [str(one.message) for one in warned]


@covering(
    1,
    name=POOLS,
    on_error=["skip", "replace", negative],
    options=[{}, {"num_shards": 2}, {"num_replicas": 2, "rank": 0}],
)
@pytest.mark.costly
def test_bad_samples_are_dealt_with_alike_one_by_one_and_in_bulk(
    name: str, on_error: Any, options: dict[str, Any]
) -> None:
    for bad in ([5], [4, 5, 6, 7], [4, 5], list(range(12))):
        expected = tolerated(Drawing(12, bad), InlinePool(), on_error, **options)
        for kind in (Drawing, DrawingInItems, DrawingInBatches):
            assert tolerated(kind(12, bad), make_pool(name, 1), on_error, **options) == expected, (kind, bad)
        seen, skipped, warned = expected
        mine = [index for index in bad if "num_replicas" not in options or index % 2 == 0]
        raised = [int(text.removeprefix("bad ")) for text in seen if isinstance(text, str)]
        assert sorted(skipped + raised) == mine
        if on_error is negative:
            assert not warned
        elif bad == list(range(12)):
            assert seen == (["bad 6", "bad 10"] if "num_replicas" in options else []) and bool(warned) != bool(seen)


def epochs(dataset: Any, pool: Pool, count: int = 2, **options: Any) -> list[Any]:
    options = {"batch_size": 4, "seed": 3} | options
    with ShardedDataLoader(dataset, pool=pool, **options) as loader:
        return [
            [[part.tolist() for part in batch] if isinstance(batch, list) else batch.tolist() for batch in loader]
            for _ in range(count)
        ]


def test_transforms_that_draw_globally_give_the_same_in_every_pool_if_seeded(new_pool: Callable[..., Pool]) -> None:
    dataset = SimpleDataset(range(12)).transform(jitter, seeded=True)
    expected = epochs(dataset, InlinePool())
    assert epochs(dataset, new_pool(1)) == epochs(dataset, new_pool(3), prefetch=1) == expected
    drawn = [number for epoch in expected for batch in epoch for sample in batch for number in sample[1:]]
    assert len(set(drawn)) == 2 * 2 * 12


def test_a_batchify_fn_draws_by_epoch_batch_and_shard(new_pool: Callable[..., Pool]) -> None:
    def draw(samples: list[int]) -> Any:
        return np.array([*samples, sample_rng().integers(1 << 30)])

    options: dict[str, Any] = {"batchify_fn": draw, "num_shards": 2}
    expected = epochs(range(12), InlinePool(), **options)
    assert epochs(range(12), new_pool(1), **options) == epochs(range(12), new_pool(3), **options) == expected
    assert len({shard[-1] for epoch in expected for batch in epoch for shard in batch}) == 2 * 3 * 2


def test_a_bulk_read_has_to_say_which_sample_draws(pool: Pool) -> None:
    read = {"get_batch": lambda self, indices: np.full(len(indices), sample_rng().random())}
    with ShardedDataLoader(type("WithoutIndex", (SimpleDataset,), read)(range(12)), 4, pool=pool) as loader:
        with pytest.raises(ValueError, match=r"call sample_rng\(index\) with the index"):
            next(iter(loader))


def test_an_index_that_comes_twice_draws_the_same_twice_and_another_in_the_next_epoch(pool: Pool) -> None:
    first, second = epochs(Drawing(), pool, sampler=[5, 2, 5, 3])
    (batch,), (later,) = first, second
    assert batch[0] == batch[2] != later[0] == later[2]
    assert batch[0][0] == later[0][0] == 5


BY_INDEX = type("ByIndex", (Drawing,), {"__getitem__": lambda self, index: self.read(index, sample_rng(index))})
SIX = [7, 7, 3, 7, 5, 8]
RANK_1: dict[str, Any] = {"sampler": [1, 1, 0, 2, 5], "num_replicas": 2, "rank": 1, "batch_size": 3}


@pytest.mark.parametrize(
    ("dataset", "options", "indices"),
    [
        (BY_INDEX(), {"sampler": SIX}, SIX),
        (DrawingInItems(), {"sampler": SIX}, SIX),
        (DrawingInBatches(), {"sampler": SIX}, SIX),
        (DrawingInBatches(bad=[3]), {"sampler": SIX, "on_error": "skip"}, [7, 7, 7, 5, 8]),
        (DrawingInBatches(), RANK_1, [1, 2, 1]),  # sample 1 comes again, to be as long as rank 0
    ],
    ids=["by index", "items", "batches", "one fails", "filled"],
)
def test_what_an_index_draws_does_not_depend_on_its_batch(pool: Pool, dataset: Any, options: Any, indices: Any) -> None:
    (batches,) = epochs(dataset, pool, 1, **options)
    alone = ShardedDataLoader(Drawing(), 1, seed=3)
    assert [sample for batch in batches for sample in batch] == [alone.read(i, epoch=0).tolist() for i in indices]


def test_no_two_generators_of_a_sample_draw_the_same(pool: Pool) -> None:
    # While one thread has seeded the global generators, another that has not draws from those seeds.
    unseeded = not isinstance(pool, ThreadPool)
    dataset = SimpleDataset(range(12)).transform(functools.partial(everywhere, unseeded=unseeded))
    for _ in range(2):
        dataset = dataset.transform(more_jitter, seeded=True)

    def drawing_too(samples: list[Any]) -> Any:
        number = sample_rng().random()
        return np.stack([np.append(sample, number) for sample in samples])

    (found,) = epochs(dataset, pool, 1, batchify_fn=drawing_too)
    drawn = [number for batch in found for sample in batch for number in sample]
    assert len(drawn) == 12 * (3 * unseeded + 5 + 3 + 3 + 1)
    assert len(set(drawn)) == len(drawn) - 12 + 3  # the last one is of the batch


@pytest.mark.costly(2)
def test_objects_with_generators_give_the_same_in_every_pool_if_seeded(new_pool: Callable[..., Pool]) -> None:
    dataset = SimpleDataset(range(12)).transform(all_kinds(), seeded=True).transform(augment, seeded=True)
    expected = epochs(dataset, InlinePool())
    assert epochs(dataset, new_pool(1)) == epochs(dataset, new_pool(3), prefetch=1, batch_size=4) == expected
    drawn = [number for epoch in expected for batch in epoch for sample in batch for number in sample[1:]]
    # No sample has the numbers of another, no object those of another, and no transform those of another.
    assert len(set(drawn)) == len(drawn) == 2 * 12 * (1 + 2 + 2 + 1 + 2)


def test_a_batch_that_is_built_again_has_the_same_augmentations(process_pool: ProcessPool, tmp_path: Path) -> None:
    marker = tmp_path / "died"
    dataset = SimpleDataset(range(12)).transform(killing(marker, all_kinds(), 6), seeded=True)
    found = epochs(dataset, process_pool, 1)
    assert marker.exists()
    assert found == epochs(dataset, InlinePool(), 1)


def test_ranks_share_what_samples_draw_and_differ_in_the_global_generators(process_pool: ProcessPool) -> None:
    def rank(dataset: Any, number: int) -> list[Any]:
        pool = ProcessPool(1, start_method=process_pool.start_method)
        (found,) = epochs(dataset, pool, 1, num_replicas=2, rank=number, batch_size=3)
        return [sample for batch in found for sample in batch]

    whole = dict(sample for batch in epochs(Drawing(), InlinePool(), 1)[0] for sample in batch)
    assert dict(rank(Drawing(), 0) + rank(Drawing(), 1)) == whole
    drawn = [
        number
        for one in (0, 1)
        for sample in rank(SimpleDataset(range(12)).transform(jitter), one)
        for number in sample[1:]
    ]
    assert len(set(drawn)) == 2 * 12


def test_a_generator_is_made_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    philox = rng.philox
    monkeypatch.setattr(rng, "philox", lambda *key: made.append(key) or philox(*key))
    epochs(range(12), InlinePool())
    assert not made
    epochs(Drawing(), InlinePool(), 1)
    assert len(made) == 12


@pytest.mark.parametrize("wrap", [torch_data.Subset, lambda one, _: torch_data.StackDataset(one)])
def test_a_sample_that_torch_reads_one_by_one_knows_its_index(wrap: Callable[..., Any]) -> None:
    """Where nothing inside is faster, the ``__getitems__`` of torch's Subset and StackDataset reads one by one."""
    dataset = SimpleDataset(wrap(Drawing(), list(range(len(Drawing())))))
    loader = ShardedDataLoader(dataset, 4, seed=3, batchify_fn=list)
    for number, sample in enumerate(sample for batch in loader for sample in batch):
        assert np.array_equal(np.stack(sample), np.stack(loader.read(number, epoch=0))), number
