"""What an actor is asked for with, and what Ray says about its death."""

from __future__ import annotations

import queue
import sys
import threading
import types

import pytest

from sharded_loader.ray import cluster as actors_module
from sharded_loader.ray.cluster import cause_of, check_wanted, stop, stop_from_anywhere


def test_a_scheduling_strategy_is_always_given_and_ray_repeats_nothing() -> None:
    options = check_wanted(0.5, {"reader": 1}, None, "SPREAD")
    assert options["scheduling_strategy"] == "SPREAD"
    assert options["max_restarts"] == options["max_task_retries"] == 0
    assert (options["num_cpus"], options["resources"]) == (0.5, {"reader": 1})
    assert "runtime_env" not in options


def test_a_runtime_env_is_passed_on() -> None:
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
