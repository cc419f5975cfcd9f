"""Epochs of the drop-in and their workers: they see what torch's see; one that dies or hangs is torch's error.

Also who takes the place of torch's class, this library's own arguments, and what trainers do to a loader.
"""

from __future__ import annotations

import copy
import gc
import itertools
import multiprocessing
import os
import pickle
import random
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from multiprocessing.context import BaseContext, SpawnContext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import METHODS, PROCESS_POOLS, SPAWNED, _descendants, _processes, here, remains, until
from drop_in_samples import (
    SEEDS,
    TORCHS,
    Counting,
    Order,
    Parts,
    Reads,
    Seeds,
    Shared,
    assert_same,
    flat,
    plain,
    seeded,
)
from failures import Boom, boom, kill, leave
from programs import run_script
from refusing import in_child
from samples import Bad
from torch.utils.data import get_worker_info

from sharded_loader import ShardedDataLoader, WorkerDiedError, WorkerTimeoutError
from sharded_loader.drop_in.iterator import WorkerView, make_pool
from sharded_loader.drop_in.trainers import called_by, counted_by_fabric, fetched_by_lightning, refuse_skipping
from sharded_loader.loader.iterator import EpochIterator
from sharded_loader.memory import arena
from sharded_loader.pools.process import transport
from sharded_loader.torch import DataLoader

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Changing(torch.utils.data.Dataset[Any]):
    """Samples that show an attribute."""

    scale = 1

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * self.scale


# -- what a worker sees -------------------------------------------------------------------------------------


@METHODS
@pytest.mark.parametrize("dataset", [Seeds(), SEEDS], ids=["map-style", "iterable"])
@pytest.mark.slow
def test_ids_seeds_and_random_numbers_are_those_of_torchs_workers(method: str, dataset: Any) -> None:
    def epochs(kind: Any, **given: Any) -> list[Any]:
        loader = kind(dataset, 2, num_workers=2, generator=torch.Generator().manual_seed(5), **given)
        return [list(loader) for _ in range(2)]

    assert_same(epochs(DataLoader, multiprocessing_context=method), epochs(TORCHS))
    persistent = epochs(DataLoader, multiprocessing_context=method, persistent_workers=True)
    assert_same(persistent, epochs(TORCHS, persistent_workers=True))


@pytest.mark.parametrize("workers", [0, 2])
def test_seeds_come_from_the_global_generator_where_none_is_given(workers: int) -> None:
    epochs = []
    for kind in (DataLoader, TORCHS):
        torch.manual_seed(9)
        epochs.append(list(kind(Seeds(), 2, num_workers=workers)))
    assert_same(*epochs)


@pytest.mark.parametrize("persistent", [False, True])
def test_worker_init_fn_in_a_thread_asks_torch_which_worker_it_is(persistent: bool) -> None:
    """As that of MONAI does, whose `ThreadDataLoader` may have threads as workers."""
    told, dataset = list[Any](), list(range(6))

    def init(number: int) -> None:
        info = get_worker_info()
        told.append((info.id, info.num_workers, info.seed, info.dataset is dataset))

    loader = DataLoader(dataset, num_workers=2, thread_pool=True, worker_init_fn=init, persistent_workers=persistent)
    torch.manual_seed(3)
    seeds = [torch.empty((), dtype=torch.int64).random_().item() for _ in range(1 if persistent else 2)]
    torch.manual_seed(3)
    for seed in seeds:
        told.clear()
        assert len(list(loader)) == 6
        assert sorted(told) == [(0, 2, seed, True), (1, 2, seed + 1, True)]
    assert get_worker_info() is None


@METHODS
def test_worker_init_fn_runs_once_in_each_worker_and_may_change_its_dataset(method: str, tmp_path: Path) -> None:
    noted = tmp_path / "noted"

    def init(number: int) -> None:
        info = get_worker_info()
        info.dataset.scale = 10 + number
        with noted.open("a") as file:
            file.write(f"{number} {info.id} {info.num_workers} {torch.initial_seed() == info.seed}\n")

    loader = DataLoader(Changing(), 2, num_workers=2, worker_init_fn=init, start_method=method)
    assert flat(loader) == [0, 10, 22, 33, 40, 50]
    assert sorted(noted.read_text().split("\n")[:-1]) == ["0 0 2 True", "1 1 2 True"]


@METHODS
@pytest.mark.parametrize("persistent", [False, True])
def test_batch_i_is_read_by_worker_i_modulo_their_number(method: str, persistent: bool) -> None:
    dataset = Reads(lambda _: (get_worker_info().id, os.getpid()), 24)
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=persistent, start_method=method)
    epochs = [list(loader) for _ in range(2)]
    assert [[set(numbers.tolist()) for numbers, _ in batches] for batches in epochs] == [[{0}, {1}] * 6] * 2
    first, second = ({pid for _, pids in batches for pid in pids.tolist()} for batches in epochs)
    assert len(first) == len(second) == 2 and len(first | second) == (2 if persistent else 4)


@METHODS
def test_a_changed_dataset_is_seen_by_new_workers_only(method: str) -> None:
    for persistent, seen in ((False, 2), (True, 1)):
        dataset = Changing()
        loader = DataLoader(dataset, 3, num_workers=1, persistent_workers=persistent, start_method=method)
        assert flat(loader) == [0, 1, 2, 3, 4, 5]
        dataset.scale = 2
        assert flat(loader) == [seen * index for index in range(6)]


def test_a_worker_is_shown_as_torch_shows_it() -> None:
    batches = iter(DataLoader(range(8), 2, num_workers=2))
    worker, other = batches._workers
    assert isinstance(worker, WorkerView)
    assert worker.is_alive() and worker.exitcode is None
    worker.terminate()
    worker.join(300)
    assert not worker.is_alive() and other.is_alive()
    assert flat(batches) == list(range(8))
    assert not any(one.is_alive() for one in batches._workers)


@METHODS
@pytest.mark.parametrize("grace", [0.0, None], ids=["killed at once", "as always"])
@pytest.mark.costly
def test_workers_that_the_loader_ends_have_the_exit_code_0(
    method: str, grace: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if grace is not None:  # as on a busy machine, where they take longer than the loader waits
        monkeypatch.setattr(transport, "CLOSING_GRACE", grace)
        monkeypatch.setattr(transport, "BUSY_GRACE", grace)
    for ended in (False, True):
        iterator = iter(DataLoader(range(40), 2, num_workers=2, start_method=method))
        next(iterator)
        workers = list(iterator._workers)
        if ended:
            assert len(list(iterator)) == 19
        else:
            del iterator
        assert [(worker.is_alive(), worker.exitcode) for worker in workers] == [(False, 0)] * 2


# -- death --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "said"),
    [
        (kill, r"DataLoader worker \(pid \d+\) is killed by signal: Killed\. "),
        (leave, r"DataLoader worker \(pid\(s\) \d+\) exited unexpectedly\. "),
    ],
)
@METHODS
@pytest.mark.costly
def test_a_batch_that_kills_its_workers_is_torchs_error_and_the_others_come(
    method: str, fail: Callable[[], Any], said: str
) -> None:
    batches = iter(DataLoader(Bad(fail), 4, num_workers=2, start_method=method))
    assert next(batches).tolist() == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match=said) as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, WorkerDiedError)
    assert "sample 7" in str(caught.value)
    assert flat(batches) == list(range(8, 20))


@pytest.mark.parametrize("restarts", [0, 1, 2])
def test_restarts_says_how_many_workers_a_batch_may_kill(restarts: int, tmp_path: Path) -> None:
    def die(index: int) -> None:
        with (tmp_path / "deaths").open("a") as file:
            file.write("x")
        kill()

    with pytest.raises(RuntimeError, match="is killed by signal"):
        list(DataLoader(Reads(die, 1), num_workers=1, restarts=restarts))
    assert len((tmp_path / "deaths").read_text()) == max(restarts, 1)


def test_a_timeout_turns_off_no_restarts_that_were_asked_for() -> None:
    found = []
    for given in ({}, {"timeout": 5}, {"timeout": 5, "restarts": 3}, {"restarts": 1}):
        pool: Any = make_pool(DataLoader(range(3), num_workers=1, **given))  # type: ignore[arg-type]
        found.append((pool.restarts, pool.timeout))
        pool.close()
    assert found == [(3, None), (0, 5), (3, 5), (1, None)]


def test_what_says_that_a_worker_hangs_is_torchs_error() -> None:
    def hang() -> None:
        raise WorkerTimeoutError("it hangs", batch=1, epoch=0)

    batches = iter(DataLoader(Bad(hang), 4, num_workers=1, thread_pool=True, timeout=5))
    next(batches)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 5 seconds\. it hangs") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, WorkerTimeoutError)
    assert flat(batches) == list(range(8, 20))


@METHODS
def test_a_part_that_was_empty_in_one_epoch_is_read_in_the_next(method: str) -> None:
    epochs = list[int]()  # of a worker

    def read(number: int, count: int) -> Any:
        epochs.append(number)
        return [] if epochs == [0] else range(10 * number, 10 * number + 4)

    loader = DataLoader(Parts(read), 2, num_workers=2, persistent_workers=True, multiprocessing_context=method)
    assert sorted(flat(loader)) == [10, 11, 12, 13]
    assert sorted(flat(loader)) == [0, 1, 2, 3, 10, 11, 12, 13]


# -- which pool reads ---------------------------------------------------------------------------------------


def context(name: str, **attributes: Any) -> Any:
    """A context of another library, such as MONAI's for threads."""
    return type("Context", (SpawnContext,), {"_name": name, **attributes})()


@pytest.mark.parametrize(
    ("given", "kind", "method"),
    [
        ({"num_workers": 0}, "InlinePool", None),
        ({"start_method": "forkserver"}, "ProcessPool", "forkserver"),
        ({"thread_pool": True}, "ThreadPool", None),
        ({"multiprocessing_context": context("threads", Process=threading.Thread)}, "ThreadPool", None),
        ({"multiprocessing_context": context("spawns")}, "ProcessPool", "spawn"),
        ({"multiprocessing_context": type("Loky", (BaseContext,), {"_name": "loky"})()}, "ProcessPool", "spawn"),
        ({"multiprocessing_context": multiprocessing.get_context("spawn")}, "ProcessPool", "spawn"),
    ],
    ids=["inline", "forkserver", "threads", "context of threads", "other spawns", "loky", "spawn"],
)
def test_arguments_and_contexts_of_other_libraries_name_the_pool(
    given: dict[str, Any], kind: str, method: str | None
) -> None:
    loader = DataLoader(range(4), 2, **{"num_workers": 1, **given})
    assert loader.multiprocessing_context is given.get("multiprocessing_context")
    pool = make_pool(loader)
    assert (type(pool).__name__, getattr(pool, "start_method", None)) == (kind, method)
    pool.close()
    if kind == "ThreadPool":
        assert plain(loader) == [[0, 1], [2, 3]]


# -- the place of torch's class -----------------------------------------------------------------------------


@pytest.mark.parametrize("which", [slice(1), slice(1, 2), slice(2)], ids=str)
@pytest.mark.parametrize("arguments", [{}, {"num_workers": 1, "multiprocessing_context": "fork"}])
def test_it_takes_the_place_of_torchs_class_under_its_name(
    which: slice, arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules: Any = (torch.utils.data, torch.utils.data.dataloader)[which]
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


@pytest.mark.parametrize("dataset", [range(12), Shared(12)], ids=["map-style", "iterable"])
def test_persistent_workers_begin_again_in_the_middle_of_an_epoch(dataset: Any) -> None:
    loader = DataLoader(dataset, 2, num_workers=2, persistent_workers=True)
    expected = plain(loader)
    for count in (1, 3):
        batches = iter(loader)
        assert [next(batches).tolist() for _ in range(count)] == expected[:count]
    assert plain(loader) == expected


class Told(torch.utils.data.Dataset[Any]):
    """A sample shows what the dataset was told, in the main process and in `tell`, and random numbers."""

    epoch, init = 0, (-1, -1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return index, self.epoch, self.init, torch.rand(()).item(), np.random.rand(), random.random()


class ToldParts(Told, torch.utils.data.IterableDataset[Any]):
    """The same in parts, one for each worker."""

    def __iter__(self) -> Any:
        info: Any = get_worker_info()
        return iter([(index, self.epoch, self.init) for index in range(info.id, len(self), info.num_workers)])


def tell(number: int) -> None:
    info: Any = get_worker_info()
    info.dataset.init = number, info.dataset.epoch


@pytest.mark.costly
@SPAWNED
@pytest.mark.parametrize("kind", [Told, ToldParts])
def test_persistent_workers_that_were_spawned_live_on_when_they_get_another_dataset(kind: Any, method: str) -> None:
    """To start one takes seconds. Otherwise all is as with forked ones, which are new."""

    def read(method: str) -> tuple[set[int], list[Any]]:
        torch.manual_seed(1)
        order: Any = {} if kind is ToldParts else {"shuffle": True}
        workers = {"num_workers": 2, "persistent_workers": True, "start_method": method, "worker_init_fn": tell}
        data = kind()
        loader, found, pids = DataLoader(data, 2, collate_fn=list, **order, **workers), list[Any](), set[int]()
        for epoch in (None, 3, 4):
            if epoch is not None:
                data.set_epoch(epoch)
            found += loader
            pids |= {*_descendants()}
        found += itertools.islice(loader, 2)  # broken off
        state = loader.state_dict()
        data.set_epoch(9)
        found += itertools.islice(loader, 2)
        loader.load_state_dict(state)
        found += loader
        return pids | {*_descendants()}, found

    helpers = {*_descendants()}
    pids, batches = read(method)
    assert len(pids - helpers) == 2
    if "fork" in PROCESS_POOLS:
        assert batches == read("fork")[1]


@pytest.mark.slow
@SPAWNED
def test_workers_that_wait_for_another_dataset_belong_to_one_iterator(method: str) -> None:
    """Others have workers of their own, and so do a changed loader and a forked process."""
    data, workers = Told(), {"num_workers": 1, "prefetch_factor": 1, "start_method": method}
    collate = lambda samples: (*samples, os.getpid())  # noqa: E731
    loader: Any = DataLoader(data, 2, collate_fn=collate, persistent_workers=True, **workers)
    assert len(list(loader)) == 6
    first = iter(loader)
    data.set_epoch(1)
    second = iter(loader)
    next(second)
    state = loader.state_dict()
    data.set_epoch(2)
    assert next(first)[0][:2] == (0, 2)
    assert [batch[0][:2] for batch in second] == [(index, 1) for index in range(2, 12, 2)]
    loader.load_state_dict(state)
    waiting = iter(loader)
    data.set_epoch(3)
    assert iter(loader) is waiting  # its workers get this one, too
    loader.load_state_dict(state)
    assert data.epoch == 1  # the state's
    data.set_epoch(3)
    if hasattr(os, "fork"):
        assert in_child(lambda: next(iter(loader))[0][:2]) == "(2, 3)"
    loader.worker_init_fn = tell
    sample, _, pid = next(iter(loader))
    assert sample[:3] == (2, 3, (0, 3)) and pid in _descendants()
    loader.load_state_dict(state)
    loader = first = second = waiting = None
    assert until(lambda: pid not in _descendants(), 10), "it waits for the garbage collector"


@METHODS
@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_of_worker_init_fn_is_raised_and_leaves_no_worker(method: str, persistent: bool) -> None:
    before = here()
    options: dict[str, Any] = {"num_workers": 2, "persistent_workers": persistent, "start_method": method}
    loader = DataLoader(range(4), worker_init_fn=lambda number: boom(), **options)
    for _ in range(2):
        with pytest.raises(Boom, match="went wrong"):
            next(iter(loader))
    del loader
    gc.collect()
    assert until(lambda: not remains(*before))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("own", [False, True], ids=["default generator", "own generator"])
def test_two_iterators_that_are_made_before_they_are_read_have_the_orders_of_torchs(workers: int, own: bool) -> None:
    found = []
    for kind in (TORCHS, DataLoader):
        torch.manual_seed(0)
        generator = seeded() if own else None
        loader: Any = kind(range(6), 3, shuffle=True, num_workers=workers, generator=generator)
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


def test_iterators_of_this_process_leave_the_state_of_the_dataset_as_it_is() -> None:
    found = []
    for kind in (TORCHS, DataLoader):
        loader: Any = kind(Counting(6), 3)
        late, early = iter(loader), iter(loader)
        rest = [plain(early), plain(loader)]
        loader.dataset.reads = 50
        found.append((rest, plain(late), loader.dataset.reads))
    assert found[0] == found[1]


def test_epochs_of_this_process_use_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loader = DataLoader([np.zeros(1 << 20, np.uint8)] * 4, 2)
    assert len(list(loader)) == 2
    new = Mock(side_effect=AssertionError("new memory"))
    monkeypatch.setattr(arena.mmap, "mmap", new)
    assert [len(batch) for batch in loader] == [2, 2]
    monkeypatch.undo()


def test_without_workers_a_forked_child_goes_on() -> None:
    if not hasattr(os, "fork"):
        pytest.skip("this platform has no fork")
    for begun in (iter(DataLoader(range(6), 3)), iter(DataLoader(Shared(6), 3))):
        assert next(begun).tolist() == [0, 1, 2]
        for rest in (in_child(lambda begun=begun: plain(begun)), str(plain(begun))):  # type: ignore[misc]
            assert rest == "[[3, 4, 5]]"


# -- how far is read ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given", [{}, *({"num_workers": 2, "prefetch_factor": factor} for factor in (1, 2, 5))], ids=str
)
@pytest.mark.costly(2)
def test_prefetch_factor_bounds_how_far_the_sampler_is_read(given: dict[str, Any]) -> None:
    read = list[int]()
    sampler = Order(lambda: (read.append(index) or index for index in range(60)), 60)  # type: ignore[func-returns-value]
    loader = DataLoader(range(60), 3, sampler=sampler, **given)
    assert loader.prefetch_factor == given.get("prefetch_factor")
    for count, _ in enumerate(itertools.islice(loader, 4), 1):
        assert len(read) <= 3 * (count + (2 * loader.prefetch_factor if given else 1))


@METHODS
@pytest.mark.parametrize("kind", ["map-style", "with a state", "iterable"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_in_any_order_finished_batches_come_first_and_each_comes_once(kind: str, method: str, tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    def read(index: int) -> int:
        if index == 0 and not (tmp_path / "free").exists():
            pipe.read_text()  # until somebody opens it and closes it
        return index

    class Waits(Counting):
        def __getitem__(self, index: int) -> int:
            return read(super().__getitem__(index) % 1000)

    dataset: Any = {"map-style": Reads(read, 16), "with a state": Waits(16)}.get(kind)
    dataset = dataset or Parts(lambda number, count: map(read, range(8 * number, 8 * number + 8)))
    loader = DataLoader(dataset, 2, num_workers=2, in_order=False, start_method=method)
    batches = iter(loader)
    first, state = flat(next(batches) for _ in range(3)), loader.state_dict()
    assert 0 not in first
    if kind == "with a state":
        told = state["_snapshot"]["_worker_snapshots"]
        assert [told[name]["dataset_state"] for name in ("worker_0", "worker_1")] == [None, {"reads": 6}]
    pipe.write_text("")
    assert sorted(first + flat(batches)) == list(range(16))
    (tmp_path / "free").touch()
    for workers in (0, 1, 2):
        resumed = DataLoader(dataset, 2, num_workers=workers, in_order=False)
        resumed.load_state_dict(state)
        assert sorted(first + flat(resumed)) == list(range(16))


# -- this library's own arguments ---------------------------------------------------------------------------


def test_a_batch_without_a_good_sample_is_left_out_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="batch 7 was left out"):
        assert flat(DataLoader(Bad(boom), 1, on_error="skip")) == [index for index in range(20) if index != 7]


@pytest.mark.costly(2)
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("given", [{"device": "cpu"}, {"device": torch.device("cpu")}, {"max_bytes": 1 << 20}], ids=str)
def test_batches_on_the_host_are_the_same(workers: int, given: dict[str, Any]) -> None:
    squares = Reads(lambda i: (np.full(3, i, np.float32), torch.tensor([i, i**2]), i), 17)
    assert_same(list(DataLoader(squares, 4, num_workers=workers, **given)), list(DataLoader(squares, 4)))


def test_more_threads_than_cores_are_no_mistake() -> None:
    many = 2 * (os.cpu_count() or 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(list(DataLoader(range(6), 2, num_workers=many, thread_pool=True))) == 3
        with pytest.raises(UserWarning, match="worker processes"):
            DataLoader(range(6), 2, num_workers=many)


@pytest.mark.parametrize("workers", [0, 1])
def test_what_an_own_collate_fn_returns_comes_as_it_is(workers: int) -> None:
    def collate(samples: list[int]) -> Any:
        return {"numpy": np.array(samples), "own": samples, "none": None, "text": "x"}

    found = next(iter(DataLoader(range(4), 2, collate_fn=collate, num_workers=workers)))
    assert_same(found, {"numpy": np.array([0, 1]), "own": [0, 1], "none": None, "text": "x"})


@pytest.mark.parametrize("workers", [{}, {"num_workers": 1, "thread_pool": True}, {"num_workers": 1}], ids=str)
@pytest.mark.parametrize("on_error", ["raise", "skip", "replace"])
@pytest.mark.parametrize("num_shards", [None, 2])
def test_an_empty_batch_is_an_error_in_its_place(workers: Any, on_error: Any, num_shards: int | None) -> None:
    kind, text = (IndexError, "out of range") if num_shards is None else (ValueError, "the batch is empty")
    options = {"batch_sampler": [[0, 1], [], [2]], "on_error": on_error, **workers}
    batches = iter(DataLoader(range(5), num_shards=num_shards, **options))
    assert len(next(batches)) == 2
    with pytest.raises(kind, match=text):
        next(batches)
    assert len(next(batches)) == 1 and not list(batches)
    if on_error != "replace":  # an own function may take it
        assert list(DataLoader(range(5), collate_fn=list, **options)) == [[0, 1], [], [2]]


@pytest.mark.parametrize("given", [{}, {"num_workers": 1, "thread_pool": True}], ids=str)
def test_every_thread_that_shares_an_iterator_sees_its_end(given: dict[str, Any]) -> None:
    gate, ends = threading.Event(), list[Any]()

    def waits_for_a_batch(thread: threading.Thread) -> bool:
        stack = traceback.walk_stack(sys._current_frames().get(thread.ident or 0))
        return any(frame.f_code is EpochIterator.__next__.__code__ for frame, _ in stack)

    class Waits(Changing):
        def __getitem__(self, index: int) -> int:
            gate.wait(10)
            return index

    batches = iter(DataLoader(Waits(), 2, **given))

    def read() -> None:
        try:
            ends.append([batch.tolist() for batch in batches])
        except Exception as error:
            ends.append(error)

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert until(lambda: all(waits_for_a_batch(thread) for thread in threads))
    gate.set()
    for thread in threads:
        thread.join()
    assert sorted(sum(ends, [])) == [[0, 1], [2, 3], [4, 5]]


# -- what Lightning and Accelerate do is seen from the functions that have called a loader -----------------------------


def library(name: str, function: str, result: str) -> Any:
    """A function of a library of this name, which is not installed here."""
    module = types.ModuleType(name)
    exec(f"def {function}: return {result}", vars(module))
    return getattr(module, function.partition("(")[0])


def test_accelerate_may_skip_what_has_indices_and_no_iterable_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    skip = library("accelerate.data_loader", "skip_first_batches(function)", "function()")
    frame = skip(lambda: called_by("skip_first_batches", "accelerate"))
    assert frame.f_code.co_name == "skip_first_batches"
    for name, package in (("prepare", "accelerate"), ("skip_first_batches", "lightning")):
        assert skip(lambda name=name, package=package: called_by(name, package)) is None
    stream, listed = ShardedDataLoader(lambda: range(4), 2), ShardedDataLoader(range(4), 2)
    refuse_skipping(stream)
    with pytest.raises(TypeError, match=r"prepare\(\)"):
        skip(lambda: stream.multiprocessing_context)
    assert skip(lambda: listed.multiprocessing_context) is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("make", [ShardedDataLoader, DataLoader])
def test_what_lightning_has_fetched_ahead_is_not_done(monkeypatch: pytest.MonkeyPatch, make: Any, stream: bool) -> None:
    monkeypatch.setitem(sys.modules, "lightning", types.ModuleType("lightning"))
    save = library("lightning.pytorch.loops.fit_loop", "on_save_checkpoint(self)", "self.state_dict()")

    def saved(ahead: int, is_over: bool) -> Any:
        """What Lightning's loop knows while it saves a checkpoint."""
        loop = types.SimpleNamespace(_num_ready_batches_reached=lambda: is_over)
        fetcher = types.SimpleNamespace(batches=[None] * ahead)
        return save(types.SimpleNamespace(_data_fetcher=fetcher, epoch_loop=loop, state_dict=loader.state_dict))

    def rest(state: Any) -> list[list[int]]:
        other = make(data, batch_size=2)
        other.load_state_dict(state)
        return plain(other)

    data: Any = Parts(lambda number, count: range(8)) if stream else range(8)
    loader = make(data, batch_size=2)
    batches = iter(loader)
    next(batches), next(batches)
    assert rest(loader.state_dict()) == rest(saved(0, False)) == [[4, 5], [6, 7]]
    assert rest(saved(1, False)) == [[2, 3], [4, 5], [6, 7]]
    if stream or make is DataLoader:  # Lightning tells our samplers the epoch
        assert rest(saved(0, True)) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert fetched_by_lightning() == (0, False)


@pytest.mark.parametrize("package", ["lightning.fabric", "lightning_fabric"])
def test_fabric_goes_on_to_count_from_the_epoch_of_a_state(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, types.ModuleType(package))
    begin = library(f"{package}.wrappers", "__iter__(self)", "self.count()")
    wrapper = types.SimpleNamespace(_num_iter_calls=1, count=lambda: counted_by_fabric(3))  # what it makes of a loader
    assert begin(wrapper) and wrapper._num_iter_calls == 4
    assert not counted_by_fabric(3)
    assert not begin(types.SimpleNamespace(count=wrapper.count))


def refuse(*_: Any) -> Any:
    raise NotImplementedError


class ByColumn(Parts):
    """As Hugging Face's: iterable, and ``dataset["name"]`` is a column."""

    __getitem__ = refuse


class ToldHowFar(Parts):
    """As MosaicML's and litdata's: its own loader says how far it was read."""

    load_state_dict = refuse

    def state_dict(self, num_samples: int, from_beginning: bool) -> Any:
        raise NotImplementedError


@pytest.mark.parametrize("make", [DataLoader, ShardedDataLoader])
@pytest.mark.parametrize("kind", [ByColumn, ToldHowFar])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_iterable_data_may_have_what_other_libraries_give_it(make: Any, kind: Any, num_workers: int) -> None:
    loader = make(kind(lambda number, count: range(6)), batch_size=4, num_workers=num_workers)
    assert plain(loader) == [[0, 1, 2, 3], [4, 5]]


@pytest.mark.slow
def test_numpy_draws_as_in_torchs_workers_however_late_they_import_it(tmp_path: Path) -> None:
    run_script(
        tmp_path / "script.py",
        """
        import sys
        import torch
        from sharded_loader.torch import DataLoader

        class Draws:
            def __len__(self):
                return 8

            def __getitem__(self, index):
                was_there = "numpy.random" in sys.modules
                if index < 4:
                    return was_there, 0.0
                from numpy import random
                return was_there, random.rand()

        def of(make):
            torch.manual_seed(1)
            return [sample for batch in make(Draws(), num_workers=2, collate_fn=list) for sample in batch]

        ours, theirs = of(DataLoader), of(torch.utils.data.DataLoader)
        assert "numpy.random" not in sys.modules
        assert [number for _, number in ours] == [number for _, number in theirs]
        assert [was_there for was_there, _ in ours] == [False] * 4 + [False, False, True, True]
        """,
    )
