"""What an actor is asked for with, and what Ray says about its death."""

from __future__ import annotations

import importlib.util
import queue
import sys
import threading
import types

import pytest

from sharded_loader import RayPool
from sharded_loader.ray import cluster as actors_module
from sharded_loader.ray.cluster import cause_of, check_address, check_wanted, stop, stop_from_anywhere


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
