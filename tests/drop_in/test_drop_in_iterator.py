"""Epochs of the drop-in: no worker before the first batch, none after the last; and this library's own arguments."""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import METHODS, _processes, here, remains, until
from drop_in_samples import TORCHS, Order, Parts, Reads, Shared, Squares, assert_same, flat, plain
from failures import Boom, boom
from samples import Bad, Filled

from sharded_loader.drop_in.iterator import LoaderIterator
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

TORCHS_MODULES = (torch.utils.data, torch.utils.data.dataloader)


# -- the place of torch's class -----------------------------------------------------------------------------


@pytest.mark.parametrize("modules", [(torch.utils.data,), (torch.utils.data.dataloader,), TORCHS_MODULES])
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
def test_it_takes_the_place_of_torchs_class_under_its_name(
    modules: Any, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = torch.utils.data.DataLoader(range(6), 4)
    with monkeypatch.context() as swapped:
        for module in modules:
            swapped.setattr(module, "DataLoader", DataLoader)

        class Own(modules[0].DataLoader):  # type: ignore[misc]
            def __init__(self, *given: Any, **named: Any) -> None:
                self.early = True
                super().__init__(*given, **named)

        for kind in (modules[0].DataLoader, Own):
            loader = kind(range(6), 4, **arguments)
            assert isinstance(loader, modules[0].DataLoader)
            assert plain(loader) == plain(copy.copy(loader)) == [[0, 1, 2, 3], [4, 5]]
        assert plain(pickle.loads(pickle.dumps(modules[0].DataLoader(range(6), 4)))) == [[0, 1, 2, 3], [4, 5]]
        assert plain(before) == [[0, 1, 2, 3], [4, 5]]
    assert plain(Own(range(6), 4, **arguments)) == plain(torch.utils.data.DataLoader(range(6), 4))


def test_a_subclass_without_our_constructor_has_a_length() -> None:
    class Apart(DataLoader[Any]):  # as torchdata's class is, after the swap
        def __init__(self, dataset: Any, batch_size: int) -> None:
            torch.utils.data.DataLoader.__init__(self, dataset, batch_size)

    assert len(Apart(range(6), 4)) == 2


# -- workers come and go ------------------------------------------------------------------------------------


@METHODS
def test_no_worker_starts_before_the_first_batch_and_none_is_left_after_the_last(method: str) -> None:
    before = here()
    loader = DataLoader(range(8), 2, num_workers=2, start_method=method)
    batches = iter(loader)
    assert not _processes()
    next(batches)
    assert [worker.is_alive() for worker in batches._workers] == [True, True]
    assert flat(batches) == [2, 3, 4, 5, 6, 7]
    assert until(lambda: not remains(*before))
    assert next(batches, None) is None


def dropped(loader: Any) -> None:
    batches = iter(loader)
    next(batches)
    del batches


def broken(loader: Any) -> None:
    for _ in loader:
        break


def failing(loader: Any) -> None:
    for _ in loader:
        raise Boom("loop", 1)


def never_begun(loader: Any) -> None:
    loader.worker_init_fn = lambda number: boom()
    for _ in range(2):
        with pytest.raises(Boom):
            next(iter(loader))


@METHODS
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("end", [dropped, broken, failing, never_begun, list])
@pytest.mark.slow
def test_nothing_is_left_of_an_epoch_that_does_not_end(end: Any, persistent: bool, method: str) -> None:
    before = here()
    dataset: Any = Bad(boom) if end is list else range(40)
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent, start_method=method)
    with contextlib.suppress(Boom):
        end(loader)
    if persistent:
        del loader
    gc.collect()
    assert until(lambda: not remains(*before))


@pytest.mark.parametrize("dataset", [range(12), Shared(12)], ids=["map-style", "iterable"])
def test_persistent_workers_begin_again_in_the_middle_of_an_epoch(dataset: Any) -> None:
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=True)
    expected = plain(loader)
    for count in (1, 3):
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(count)] == expected[:count]
    assert plain(loader) == expected


@pytest.mark.parametrize("workers", [0, 1])
def test_two_iterators_that_are_made_before_they_are_read_have_the_orders_of_torchs(workers: int) -> None:
    found = []
    for kind in (TORCHS, DataLoader):
        torch.manual_seed(0)
        loader: Any = kind(range(6), 3, shuffle=True, num_workers=workers)
        pairs = [(one.tolist(), other.tolist()) for one, other in zip(loader, loader, strict=True)]
        late, early = iter(loader), iter(loader)
        rest = [[batch.tolist() for batch in batches] for batches in (early, late, loader)]
        found.append((pairs, rest, torch.rand(1)))
    assert found[0] == found[1]
    second, first = iter(loader), iter(loader)
    next(first)
    seen = next(second).tolist()
    other: Any = DataLoader(range(6), 3, shuffle=True)
    other.load_state_dict(loader.state_dict())  # of the one that was read last
    rest = plain(other)
    assert rest == plain(second) and sorted(sum(rest, seen)) == list(range(6))


def test_an_iterator_cannot_be_pickled_as_torchs_cannot() -> None:
    with pytest.raises(NotImplementedError):
        pickle.dumps(iter(DataLoader(range(3))))


def test_an_iterator_has_the_length_of_the_sampler() -> None:
    batches = iter(DataLoader(range(7), 2))
    assert isinstance(batches, LoaderIterator) and len(batches) == 4
    next(batches)
    assert len(batches) == 4


# -- how far is read ----------------------------------------------------------------------------------------


def watched(read: list[int]) -> Order:
    """Indices in turn, each of which is noted when it is read."""
    return Order(lambda: (read.append(index) or index for index in range(60)), 60)  # type: ignore[func-returns-value]


@pytest.mark.parametrize("factor", [1, 2, 5])
@pytest.mark.costly
def test_prefetch_factor_bounds_how_far_the_sampler_is_read(factor: int) -> None:
    read = list[int]()
    loader = DataLoader(range(60), 3, sampler=watched(read), num_workers=2, prefetch_factor=factor)
    assert loader.prefetch_factor == factor
    for count, _ in enumerate(loader, 1):
        assert len(read) <= 3 * (count + 2 * factor)
        if count == 4:
            break


def test_without_workers_nothing_is_read_ahead() -> None:
    read = list[int]()
    for count, _ in enumerate(DataLoader(range(60), 3, sampler=watched(read)), 1):
        assert len(read) <= 3 * (count + 1)


@METHODS
@pytest.mark.parametrize("kind", ["map-style", "iterable"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_in_any_order_finished_batches_come_first_and_each_comes_once(kind: str, method: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def read(index: int) -> int:
        if index == 0:
            pipe.read_text()  # until somebody opens it and closes it
        return index

    parts = Parts(lambda number, count: map(read, range(8 * number, 8 * number + 8)))
    dataset = Reads(read, 16) if kind == "map-style" else parts
    batches = iter(DataLoader(dataset, 2, num_workers=2, in_order=False, start_method=method))
    first = flat(next(batches) for _ in range(2))
    assert 0 not in first
    pipe.write_text("")
    assert sorted(first + flat(batches)) == list(range(16))


@pytest.mark.slow
def test_in_any_order_a_killed_worker_loses_nothing() -> None:
    for dataset in (range(200), Shared(200)):
        batches = iter(DataLoader(dataset, 2, num_workers=2, in_order=False))
        found = [next(batches).tolist() for _ in range(5)]
        batches._workers[0].kill()
        assert sorted(sum(found, []) + flat(batches)) == list(range(200))
        batches = None


# -- this library's own arguments ---------------------------------------------------------------------------


@pytest.mark.costly(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [{"device": "cpu"}, {"device": torch.device("cpu")}, {"max_bytes": 1 << 20}], ids=str)
def test_batches_on_the_host_are_the_same(workers: int, given: dict[str, Any]) -> None:
    assert_same(list(DataLoader(Squares(), 4, num_workers=workers, **given)), list(DataLoader(Squares(), 4)))


def test_a_batch_without_a_good_sample_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="batch 7 was left out"):
        assert flat(DataLoader(Bad(boom), 1, on_error="skip")) == [index for index in range(20) if index != 7]


def test_threads_read_one_dataset_object() -> None:
    readers = list[str]()
    dataset = Reads(lambda index: readers.append(threading.current_thread().name) or index, 12)  # type: ignore[func-returns-value]
    assert flat(DataLoader(dataset, 2, num_workers=2, thread_pool=True)) == list(range(12))
    assert len(readers) == 12 and threading.current_thread().name not in readers


@pytest.mark.costly(2)
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_with_streams_the_order_does_not_depend_on_the_workers(workers: int) -> None:
    expected = [[0, 3], [1, 4], [2, 5], [6, 9], [7, 10], [8]]
    assert plain(DataLoader(Shared(11), 2, num_workers=workers, streams=3)) == expected


def test_snapshot_every_n_steps_changes_nothing() -> None:
    loader = DataLoader(range(8), 2, snapshot_every_n_steps=3)
    next(iter(loader))
    other = DataLoader(range(8), 2)
    other.load_state_dict(loader.state_dict())
    assert flat(other) == [2, 3, 4, 5, 6, 7]


def test_large_batches_lie_in_memory_that_is_used_again_once_they_are_gone() -> None:
    for number, batch in enumerate(DataLoader(Filled(12, 200_000), 2, num_workers=1)):
        assert batch.shape == (2, 200_000)
        assert batch[:, 0].tolist() == [2 * number, 2 * number + 1]
        batch += 1  # it belongs to the loop


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_own_collate_fn_returns_comes_as_it_is(workers: int) -> None:
    def collate(samples: list[int]) -> Any:
        return {"numpy": np.array(samples), "own": samples, "none": None, "text": "x"}

    found = next(iter(DataLoader(range(4), 2, collate_fn=collate, num_workers=workers)))
    assert_same(found, {"numpy": np.array([0, 1]), "own": [0, 1], "none": None, "text": "x"})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_profiler_sees_the_batches_as_with_torchs_loader(workers: int) -> None:
    iterator = iter(DataLoader(range(12), 2, num_workers=workers))
    next(iterator)
    with torch.autograd.profiler.profile(use_kineto=False) as profile:  # the other kind begins for seconds
        next(iterator)
        next(iterator)
    next(iterator)
    seen = [event.count for event in profile.key_averages() if "enumerate(DataLoader)" in event.key]
    assert seen == [2]


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "thread_pool": True}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("num_shards", [None, 2])
def test_an_empty_batch_is_an_error_in_its_place(workers: Any, on_error: Any, num_shards: int | None) -> None:
    kind, text = (IndexError, "out of range") if num_shards is None else (ValueError, "the batch is empty")
    options = {"batch_sampler": [[0, 1], [], [2]], "on_error": on_error, "num_shards": num_shards, **workers}
    batches = iter(DataLoader(range(5), **options))
    assert len(next(batches)) == 2
    with pytest.raises(kind, match=text):
        next(batches)
    assert len(next(batches)) == 1 and not list(batches)


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "thread_pool": True}], ids=str)
def test_collate_fn_may_take_an_empty_batch(workers: Any) -> None:
    for on_error in ("raise", "skip"):
        loader = DataLoader(range(5), batch_sampler=[[0, 1], []], collate_fn=list, on_error=on_error, **workers)
        assert list(loader) == [[0, 1], []]
