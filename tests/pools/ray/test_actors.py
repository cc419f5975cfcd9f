"""What an actor is asked for with, and what Ray says about its death."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import types
from typing import Any

import numpy as np
import pytest

from sharded_loader import RayPool
from sharded_loader.ray import cluster as actors_module
from sharded_loader.ray.cluster import Lent, cause_of, check_address, check_wanted, stop, stop_from_anywhere


def test_a_scheduling_strategy_is_always_given_and_ray_repeats_nothing() -> None:
    options = check_wanted(0.5, {"reader": 1}, None, "SPREAD")
    assert options["scheduling_strategy"] == "SPREAD"
    assert options["max_restarts"] == options["max_task_retries"] == 0
    assert (options["num_cpus"], options["resources"]) == (0.5, {"reader": 1})
    assert "runtime_env" not in options
    assert check_wanted(1, {}, {"working_dir": "."}, "SPREAD")["runtime_env"] == {"working_dir": "."}


def test_the_cause_of_a_death_is_one_line() -> None:
    said = "x\n\tWorker exit type: SYSTEM_ERROR Worker exit detail: It exited.\nSome common causes include: (1) many"
    assert cause_of(Exception(said)) == "SYSTEM_ERROR: It exited."
    assert cause_of(Exception("its node has died")) == "its node has died"
    lacking = cause_of(Exception("word " * 1000 + "ModuleNotFoundError: No module named 'torch'"))
    assert len(lacking) < 410
    assert lacking.endswith("'torch'")


class Ray:
    """Notes whom it has killed, and in which kind of thread."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, runs: bool = True) -> None:
        self.killed: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        ray = types.SimpleNamespace(is_initialized=lambda: runs, kill=self.kill)
        monkeypatch.setitem(sys.modules, "ray", ray)

    def kill(self, actor: str) -> None:
        self.killed.put((actor, type(threading.current_thread()).__name__))


def test_actors_are_stopped_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, actors = Ray(monkeypatch), ["a", "b"]
    stop(actors, "a")
    assert (ray.killed.get(), actors) == (("a", "_MainThread"), ["b"])
    stop(actors)
    assert (ray.killed.get(), actors) == (("b", "_MainThread"), [])


def test_a_ray_that_was_shut_down_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, actors = Ray(monkeypatch, runs=False), ["a"]
    stop(actors)
    assert ray.killed.empty()
    assert actors == []


def test_in_a_thread_of_rays_own_nobody_waits_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, actors = Ray(monkeypatch), ["a"]
    monkeypatch.setattr(actors_module, "is_thread_of_others", lambda thread: thread is threading.current_thread())
    stop_from_anywhere(actors)
    assert ray.killed.get(timeout=300) == ("a", "Thread")


def test_an_address_is_a_string_and_ray_client_has_no_object_store() -> None:
    with pytest.raises(ValueError, match='Ray Client.*address="auto"'):
        check_address("ray://10.0.0.1:10001")
    for address in (7, b"auto"):
        with pytest.raises(TypeError, match="address is"):
            check_address(address)  # type: ignore[arg-type]


def test_without_ray_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="pip install ray"):
        RayPool(2)


# -- what lies in Ray's object store is lent out writable, and counted while it is held -------------------------------


def stored(nbytes: int) -> np.ndarray[Any, Any]:
    """Bytes as Ray gives them: read-only."""
    memory = np.arange(nbytes, dtype=np.uint8)
    memory.setflags(write=False)
    return memory


def test_a_batch_is_not_copied_and_can_be_written_to() -> None:
    memory = stored(8)
    batch = Lent(100).take(memory)
    batch[0] = 7
    assert memory[0] == 7
    assert np.shares_memory(batch, memory)


def test_the_last_view_gives_the_memory_back() -> None:
    lent = Lent(100)
    batch = lent.take(stored(8))
    view = batch[2:4].reshape(1, 2)
    del batch
    assert lent.nbytes == 8
    del view
    assert lent.nbytes == 0


def test_past_the_bound_batches_are_copied() -> None:
    lent = Lent(12)
    memory = stored(8)
    first, second = lent.take(memory), lent.take(memory)
    assert np.shares_memory(first, memory)
    assert not np.shares_memory(second, memory)
    assert second.tolist() == memory.tolist()
    assert lent.nbytes == 8


def test_where_a_device_copies_all_batches_lie_in_its_memory() -> None:
    lent, made = Lent(100), []

    def empty(shape: Any, dtype: Any) -> np.ndarray[Any, Any]:
        made.append(np.empty(shape, dtype))
        return made[-1]

    lent.empty, lent.copies_all = empty, True
    assert lent.take(stored(8)) is made[0]
    assert lent.nbytes == 0
