"""Ray as this process uses it: the cluster that it joins, its actors, and the object store.

    check_address(address), check_wanted(...)       reject unusable arguments at once
    connect(address)                join a running instance, or start one on this machine
    what_there_is(wanted)           explain a lack of resources
    stop(actors)                    kill them
    cause_of(error) -> text         Ray's explanation of a death, in one line
    is_of_node, is_of_call, is_lost(error)      the node is gone, a call failed, or a reply is lost
    put(value, parts) -> reference  once for all actors: the dataset and how it is read; the order of an epoch
    Lent.take(memory) -> bytes      a writable batch of the object store, mapped in place or copied out

Ray maps the object store into the driver as read-only arrays. A batch's object has no other reader, so the user gets a
writable array over the same memory. It holds Ray's array, so the last view, in any thread, frees the object, with all
batches of its group. Batches are copied out, and the object freed at once, if the user holds `max_bytes` already, or if
a device copies from pinned memory.

Ray is imported on first use, and nothing here waits. Errors: ImportError (Ray is missing), ConnectionError, ValueError
(Ray Client has no object store on this side), MemoryError. Stopping a dead actor is allowed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sharded_loader.extend import Array, Empty, Notices
from sharded_loader.extend.data import new_array
from sharded_loader.extend.engine import ON_HOST, SIZE, Leases, publish
from sharded_loader.extend.tools import is_thread_of_others

Wanted = dict[str, Any]
"""Arguments of ``ray.remote`` for an actor."""

CLIENT = "ray://"

_CAUSE_CHARACTERS = 400
"""Maximum length of Ray's explanation of a death."""

NODE_DIED = "its node has died"
"""Phrase in Ray's error about an actor."""


# -- the cluster -------------------------------------------------------------------------------------------------------


def check_installed() -> None:
    """Raise an ImportError with installation advice if Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("RayPool needs Ray, which is not installed: pip install ray")


def check_address(address: object) -> str | None:
    """Return the address of an instance, or raise an error that says why it cannot be used.

    Example:
        >>> check_address("auto")
        'auto'
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f'address is {address!r}; it must be a string such as "auto" or "10.0.0.1:6379", or None')
    if address is not None and address.startswith(CLIENT):
        text = f"address is {address!r}, which is Ray Client: this process would have no object store, and batches"
        advice = 'Start this program on a node of the cluster, with address="auto"'
        raise ValueError(f"{text} could not come through it. {advice}")
    return address


def connect(address: str | None) -> None:
    """Join an instance: that of this process, of ``address``, of RAY_ADDRESS, on this machine, or a new one here.

    Raises ConnectionError if ``address`` does not answer, ValueError for Ray Client or another cluster than the joined
    one.
    """
    import ray

    if not ray.is_initialized() and address in (None, "auto"):
        check_address(os.environ.get("RAY_ADDRESS"))
    if ray.util.client.ray.is_connected():
        check_address(CLIENT)
    if not ray.is_initialized():
        ray.init(address=address)
    elif address not in (None, "auto", "local", joined := ray.get_runtime_context().gcs_address):
        text = f"address is {address!r}, and this process has joined the cluster {joined}"
        raise ValueError(f"{text}: leave out address, or call ray.shutdown() first")


def session() -> str | None:
    """Return an id of this process's membership of a cluster; None if there is none."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) + here()[0] if ray.is_initialized() else None


def here() -> tuple[str, str]:
    """Return the id and the address of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id()), str(ray.util.get_node_ip_address())


def alive() -> set[str]:
    """Return the ids of the live nodes."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def what_there_is(wanted: Wanted) -> str:
    """Describe the resources that a worker requests, and the cluster's, in total and free.

    Example:
        >>> _amounts({"CPU": 1.0, "reader": 0.5})
        '1 CPU, 0.5 reader'
    """
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    amounts = {"CPU": wanted["num_cpus"], **wanted["resources"]}
    has, left = ({name: some.get(name, 0.0) for name in amounts} for some in (total, free))
    nodes = len(alive())
    text = f"a worker asks for {_amounts(amounts)}; the cluster has {_amounts(has)} on {nodes} node{'s' * (nodes != 1)}"
    return f"{text}, and {_amounts(left)} of that is free"


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"


# -- actors ------------------------------------------------------------------------------------------------------------


def stop(actors: list[Any], only: object = None) -> None:
    """Kill actors, and remove them from the list."""
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():  # calling it would start Ray again
        actors.clear()
        return
    for actor in list(actors) if only is None else [only]:
        with contextlib.suppress(Exception):  # it is dead
            ray.kill(actor)
        with contextlib.suppress(ValueError):
            actors.remove(actor)


def is_of_node(error: BaseException | None) -> bool:
    """Return True if an actor died with its node: its raylet, which reports the exit of processes, is silent."""
    import ray

    is_silent = isinstance(error, ray.exceptions.ActorUnavailableError)
    return is_silent or NODE_DIED in str(error) or bool(getattr(error, "preempted", False))


def stop_from_anywhere(actors: list[Any]) -> None:
    """Run `stop`, but not in one of Ray's threads: during garbage collection there, a call of Ray would deadlock."""
    if is_thread_of_others(threading.current_thread()):
        threading.Thread(target=stop, args=(actors,), daemon=True).start()
    else:
        stop(actors)


def cause_of(error: BaseException | None) -> str:
    """Return Ray's explanation of a death, without its ids and its advice.

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
    """Return True if a call failed but its actor lives, or can never start because its request cannot be satisfied."""
    from ray import exceptions as of

    lives = of.RayTaskError, of.ObjectStoreFullError, of.OutOfDiskError
    cannot_be = of.RuntimeEnvSetupError, of.ActorUnschedulableError, of.ActorPlacementGroupRemoved
    return isinstance(error, (*lives, *cannot_be))


def is_lost(error: BaseException) -> bool:
    """Return True if a finished reply was lost."""
    from ray import exceptions

    return isinstance(error, exceptions.ObjectLostError)


def check_wanted(num_cpus: Any, resources: Any, runtime_env: Any, scheduling_strategy: Any) -> Wanted:
    """Return the arguments of ``ray.remote``, or raise an error. Ray retries no call: the pool does."""
    if isinstance(num_cpus, bool) or not isinstance(num_cpus, int | float):
        raise TypeError(f"num_cpus is {num_cpus!r}; it must be a number of CPUs for each worker")
    if not 0 <= num_cpus < float("inf"):
        raise ValueError(f"num_cpus is {num_cpus!r}; it must be at least 0")
    for name, value in (("resources", resources), ("runtime_env", runtime_env)):
        if value is not None and not isinstance(value, dict):
            raise TypeError(f"{name} is {value!r}; it must be a dict, or None")
    if scheduling_strategy is None:
        text = "scheduling_strategy is None. Inside a placement group that captures, Ray would then place no worker"
        raise TypeError(f'{text}: give "SPREAD", "DEFAULT" or a strategy object')
    wanted = {"num_cpus": float(num_cpus), "resources": dict(resources or {}), "runtime_env": runtime_env}
    wanted |= {"scheduling_strategy": scheduling_strategy, "concurrency_groups": {"control": 1}}
    wanted |= {"max_restarts": 0, "max_task_retries": 0}
    return {name: value for name, value in wanted.items() if value is not None}


# -- the object store --------------------------------------------------------------------------------------------------


def store_bytes() -> int:
    """Return the capacity of this node's object store in bytes; 0 if unknown."""
    import ray

    node, _ = here()
    stores = [one["Resources"].get("object_store_memory", 0) for one in ray.nodes() if one["NodeID"] == node]
    return int(stores[0]) if stores else 0


def put(value: object, parts: dict[str, Any]) -> Any:
    """Pickle a `Job` or the order of an epoch, and put it into the object store, once for all actors.

    ``parts`` are the user's objects in it, by the names that the user knows. Raises a TypeError that names an attribute
    that cannot be pickled, or a MemoryError.
    """
    import ray

    encoded = publish(value, **parts)
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in encoded.buffers]
    try:
        return ray.put((encoded.pickled, buffers))
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as full:
        nbytes = len(encoded.pickled) + sum(buffer.nbytes for buffer in buffers)
        text = f"the dataset or its order has {nbytes:,} bytes, and Ray's object store on this node {store_bytes():,}"
        advice = "start Ray with a larger object_store_memory, or let the dataset open its data in the worker"
        raise MemoryError(f"{text}: {advice}") from full


class _Writable:
    """Holds an array of Ray's, and exposes its memory as writable."""

    __slots__ = ("__array_interface__", "__weakref__", "_memory")

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "data": (memory.ctypes.data, False)}


class Lent:
    """Counts the bytes of the object store held by the user; past ``max_bytes``, or with `copies_all`, copies batches.

    Example:
        >>> stored = np.arange(3, dtype=np.uint8)
        >>> stored.setflags(write=False)
        >>> lent = Lent(100)
        >>> batch = lent.take(stored)
        >>> batch.tolist(), lent.nbytes
        ([0, 1, 2], 3)
        >>> del batch
        >>> lent.nbytes
        0
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.empty: Empty = new_array
        self.copies_all = False
        self.notices = Notices()
        self._held = 0
        self._leases: Leases[int] = Leases()

    @property
    def nbytes(self) -> int:
        """Bytes of the object store that the user holds."""
        self._held -= sum(self._leases.ended())
        return self._held

    def take(self, memory: Array) -> Array:
        """Return the bytes of a group, for the user."""
        if self.copies_all or self.nbytes + memory.nbytes > self.max_bytes:
            if not self.copies_all:
                text = (
                    f"{memory.nbytes:,} bytes of batches are copied out of Ray's object store: {self._held:,} of the "
                    f"{self.max_bytes:,} bytes that may be held are in use; see RayPool(max_bytes=)"
                )
                self.notices.record("slow_batches", text)
            copy = self.empty(memory.shape, memory.dtype)
            copy[...] = memory
            return copy
        writable = _Writable(memory)
        self._leases.lend(writable, memory.nbytes)
        self._held += memory.nbytes
        return np.asarray(writable)

    def buffers(self, places: Sequence[tuple[int, int]], memory: Array, rest: Sequence[Array]) -> Iterator[Array]:
        """Yield the buffers of a group's batches, over its memory.

        With pinned memory, buffers of the user's objects are copied out: the user may copy from them at any time, and
        torch guards pinned memory by where it begins.
        """
        mapped, others = self.take(memory) if memory.nbytes else memory, map(self.take, rest)
        for offset, size in places:
            part = next(others) if offset < 0 else mapped[offset : offset + (abs(size) & SIZE)]
            yield part.copy() if self.copies_all and size < 0 and -size & ON_HOST else part
