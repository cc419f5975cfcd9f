"""What an actor of Ray is asked for with, how it is stopped, and what Ray's errors mean.

    Wanted.options() -> arguments of ``ray.remote``
    stop(actors)              kill them
    cause_of(error) -> text   what Ray says about a death, in one line
    is_of_node, is_of_call, is_lost(error)  whether a node has gone, a call has failed, or a reply has gone

Nothing here decides anything, and nothing goes wrong: an actor that is dead can be stopped again.
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from typing import Any, NamedTuple

from sharded_loader.base.private import is_thread_of_others

_CAUSE_CHARACTERS = 400
"""Of what Ray says about a death."""

NODE_DIED = "its node has died"
"""In Ray's text about an actor."""


class Wanted(NamedTuple):
    """What an actor is asked for with; see `RayPool`."""

    num_cpus: float
    resources: dict[str, float]
    runtime_env: dict[str, Any] | None
    scheduling_strategy: Any

    @property
    def amounts(self) -> dict[str, float]:
        """The resources, with the CPUs."""
        return {"CPU": self.num_cpus, **self.resources}

    def options(self) -> dict[str, Any]:
        """As Ray has them. Each call is made once: who does it again is decided here."""
        options = {
            "num_cpus": self.num_cpus,
            "resources": self.resources,
            "scheduling_strategy": self.scheduling_strategy,
            "max_restarts": 0,
            "max_task_retries": 0,
            "concurrency_groups": {"control": 1},
        }
        return options if self.runtime_env is None else {**options, "runtime_env": self.runtime_env}


def stop(actors: list[Any], only: Any = None) -> None:
    """Kill actors, and forget them."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():  # to call it would start Ray again
        actors.clear()
        return
    for actor in list(actors) if only is None else [only]:
        with contextlib.suppress(Exception):  # it is dead
            ray.kill(actor)
        with contextlib.suppress(ValueError):
            actors.remove(actor)


def is_of_node(error: BaseException) -> bool:
    """Whether an actor is gone with its node, and not by itself.

    A process that ends is told of by the program that has started it. If that is silent, the node has gone.
    """
    import ray

    is_silent = isinstance(error, ray.exceptions.ActorUnavailableError)
    return is_silent or NODE_DIED in str(error) or bool(getattr(error, "preempted", False))


def stop_from_anywhere(actors: list[Any]) -> None:
    """`stop`. In a thread of Ray's own, which the collector may run in, a call of Ray would wait for itself."""
    if is_thread_of_others(threading.current_thread()):
        threading.Thread(target=stop, args=(actors,), daemon=True).start()
    else:
        stop(actors)


def cause_of(error: BaseException | None) -> str:
    """What Ray says about a death, without its ids and its advice.

    Example:
        >>> cause_of(Exception("id: 67 Worker exit type: SYSTEM_ERROR Worker exit detail: It exits. Causes include:"))
        'SYSTEM_ERROR: It exits.'
    """
    text = " ".join(str(error).split())
    found = re.search(r"Worker exit type: (\w+) Worker exit detail: (.*?)(?: Some common| Causes include|$)", text)
    if found is not None:
        return f"{found[1]}: {found[2]}"
    return text if len(text) <= _CAUSE_CHARACTERS else f"... {text[-_CAUSE_CHARACTERS:]}"  # a traceback ends with why


def is_of_call(error: BaseException) -> bool:
    """Whether a call has failed, and its actor lives, or never will: what it was asked for with cannot be had."""
    from ray import exceptions

    return isinstance(
        error,
        exceptions.RayTaskError
        | exceptions.ObjectStoreFullError
        | exceptions.OutOfDiskError
        | exceptions.RuntimeEnvSetupError
        | exceptions.ActorUnschedulableError
        | exceptions.ActorPlacementGroupRemoved,
    )


def is_lost(error: BaseException) -> bool:
    """Whether the reply was ready, and has gone."""
    from ray import exceptions

    return isinstance(error, exceptions.ObjectLostError)


def check_wanted(num_cpus: Any, resources: Any, runtime_env: Any, scheduling_strategy: Any) -> Wanted:
    """What each actor is asked for with, or an error that says what is wrong."""
    if isinstance(num_cpus, bool) or not isinstance(num_cpus, int | float):
        raise TypeError(f"num_cpus is {num_cpus!r}; it must be a number of CPUs for each worker")
    if not 0 <= num_cpus < float("inf"):
        raise ValueError(f"num_cpus is {num_cpus!r}; it must be at least 0")
    for name, value in (("resources", resources), ("runtime_env", runtime_env)):
        if value is not None and not isinstance(value, dict):
            raise TypeError(f"{name} is {value!r}; it must be a dict, or None")
    if scheduling_strategy is None:
        raise TypeError(
            "scheduling_strategy is None. Inside a placement group that captures, Ray would then place no worker: give "
            '"SPREAD", "DEFAULT" or a strategy object'
        )
    return Wanted(float(num_cpus), dict(resources or {}), runtime_env, scheduling_strategy)
