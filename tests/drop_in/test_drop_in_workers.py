"""Workers see what torch's workers see. One that dies or hangs loses nothing, or is torch's error."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.context import BaseContext, SpawnContext
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import METHODS
from drop_in_samples import TORCHS, Changing, Parts, Reads, Seeds, assert_same, flat, plain, told_and_drawn
from failures import Boom, boom, kill, leave
from samples import Bad
from torch.utils.data import get_worker_info

from sharded_loader import WorkerDiedError, WorkerTimeoutError
from sharded_loader.drop_in.iterator import WorkerView, in_torchs_words, make_pool
from sharded_loader.pools.process import transport
from sharded_loader.torch import DataLoader

# -- what a worker sees -------------------------------------------------------------------------------------


def which_worker(_: int) -> tuple[int, int]:
    """The number of a sample's worker, and the worker's process."""
    return get_worker_info().id, os.getpid()


WHICH_WORKER = Reads(which_worker, 24)
PARTS = Parts(lambda number, count: (told_and_drawn() for _ in range(4)))


@METHODS
@pytest.mark.parametrize("dataset", [Seeds(), PARTS], ids=["map-style", "iterable"])
@pytest.mark.slow
def test_ids_seeds_and_random_numbers_are_those_of_torchs_workers(method: str, dataset: Any) -> None:
    def epochs(kind: Any, **given: Any) -> list[Any]:
        loader = kind(dataset, 2, num_workers=2, generator=torch.Generator().manual_seed(5), **given)
        return [list(loader) for _ in range(2)]

    assert_same(epochs(DataLoader, multiprocessing_context=method), epochs(TORCHS))
    persistent = epochs(DataLoader, multiprocessing_context=method, persistent_workers=True)
    assert_same(persistent, epochs(TORCHS, persistent_workers=True))


def test_seeds_come_from_the_global_generator_where_none_is_given() -> None:
    epochs = []
    for kind in (DataLoader, TORCHS):
        torch.manual_seed(9)
        epochs.append(list(kind(Seeds(), 2, num_workers=2)))
    assert_same(*epochs)


def test_without_workers_nobody_is_a_worker() -> None:
    assert_same(list(DataLoader(Seeds(), 3)), list(TORCHS(Seeds(), 3)))


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
def test_batch_i_is_read_by_worker_i_modulo_their_number(method: str) -> None:
    loader = DataLoader(WHICH_WORKER, 2, num_workers=2, start_method=method)
    batches = list(loader)
    assert [set(numbers.tolist()) for numbers, _ in batches] == [{i % 2} for i in range(12)]
    assert len({pid for _, pids in batches for pid in pids.tolist()}) == 2


@METHODS
def test_a_changed_dataset_is_seen_by_new_workers_only(method: str) -> None:
    for persistent, seen in ((False, 2), (True, 1)):
        dataset = Changing()
        loader = DataLoader(dataset, 3, num_workers=1, persistent_workers=persistent, start_method=method)
        assert flat(loader) == [0, 1, 2, 3, 4, 5]
        dataset.scale = 2
        assert flat(loader) == [seen * index for index in range(6)]


def test_persistent_workers_are_the_same_processes_in_every_epoch() -> None:
    def pids(loader: Any) -> set[int]:
        return {pid for _, pids in loader for pid in pids.tolist()}

    loader = DataLoader(WHICH_WORKER, 2, num_workers=2, persistent_workers=True)
    assert pids(loader) == pids(loader) == {worker.pid for worker in loader._iterator._workers}
    loader = DataLoader(WHICH_WORKER, 2, num_workers=2)
    assert not pids(loader) & pids(loader)


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


# -- silence ------------------------------------------------------------------------------------------------


def hang() -> None:
    raise WorkerTimeoutError("it hangs", batch=1, epoch=0)


def test_what_says_that_a_worker_hangs_is_torchs_error() -> None:
    batches = iter(DataLoader(Bad(hang), 4, num_workers=1, thread_pool=True, timeout=5))
    next(batches)
    with pytest.raises(RuntimeError, match=r"^DataLoader timed out after 5 seconds\. it hangs") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, WorkerTimeoutError)
    assert flat(batches) == list(range(8, 20))


def test_words_of_a_signal_and_of_a_code() -> None:
    for code, said in ((-signal.SIGSEGV, "is killed by signal: Segmentation fault. "), (3, "exited unexpectedly. ")):
        died = WorkerDiedError("it died", worker=0, exitcode=code, pid=12)
        assert said in str(in_torchs_words(died, 0)) and "12" in str(in_torchs_words(died, 0))
    hangs = WorkerTimeoutError("it hangs", batch=1, epoch=0)
    assert str(in_torchs_words(hangs, 2.5)) == "DataLoader timed out after 2.5 seconds. it hangs"


# -- errors of the dataset ----------------------------------------------------------------------------------


@METHODS
def test_an_error_of_worker_init_fn_is_raised(method: str) -> None:
    def fail(number: int) -> None:
        boom()

    with pytest.raises(Boom, match="went wrong"):
        next(iter(DataLoader(range(4), num_workers=2, worker_init_fn=fail, start_method=method)))


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
