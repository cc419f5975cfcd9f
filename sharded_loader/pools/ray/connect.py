"""Joins an instance of Ray, and says what it has.

    check_address(address)      what no pool can use is rejected at once
    connect(address)            the instance that runs, or one that is started on this machine
    put_job(new) -> reference   the dataset, and how it is read, once for all actors
    store_bytes() -> int        how large this node's object store is
    what_there_is(wanted)       a sentence for somebody who waits for room

Nothing here imports Ray before it is used. What can go wrong: Ray is not installed (ImportError with the line to type),
it is not to be reached (ConnectionError of Ray's own), or it is used through Ray Client, which has no object store on
this side (ValueError).
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np

from sharded_loader.engine.messages import NewJob
from sharded_loader.memory import publish

CLIENT = "ray://"


def check_installed() -> None:
    """Raise an ImportError that says what to install, if Ray is missing."""
    if importlib.util.find_spec("ray") is None:
        raise ImportError("RayPool needs Ray, which is not installed: pip install ray")


def check_address(address: Any) -> str | None:
    """The address of an instance, or an error that says why it cannot be used.

    Example:
        >>> check_address("auto")
        'auto'
    """
    if address is not None and not isinstance(address, str):
        raise TypeError(f'address is {address!r}; it must be a string such as "auto" or "10.0.0.1:6379", or None')
    if address is not None and address.startswith(CLIENT):
        raise ValueError(
            f"address is {address!r}, which is Ray Client: this process would have no object store, and batches could "
            f'not come through it. Start this program on a node of the cluster, with address="auto"'
        )
    return address


def connect(address: str | None) -> None:
    """Join an instance: the one that this process has joined, that of ``address``, that of the environment variable
    RAY_ADDRESS, the one that runs on this machine, or a new one on this machine.

    Raises:
        ConnectionError: there is none at ``address``.
        ValueError: this process uses Ray Client, or has joined another cluster.
    """
    import ray

    if not ray.is_initialized() and address in (None, "auto"):
        check_address(os.environ.get("RAY_ADDRESS"))
    if ray.util.client.ray.is_connected():
        check_address(CLIENT)
    if not ray.is_initialized():
        ray.init(address=address)
    elif address not in (None, "auto", "local", joined := ray.get_runtime_context().gcs_address):
        raise ValueError(
            f"address is {address!r}, and this process has joined the cluster {joined}: leave out address, or call "
            f"ray.shutdown() first"
        )


def session() -> str | None:
    """What tells this membership of a cluster from the next one; None: there is none."""
    import ray

    return str(ray.get_runtime_context().get_job_id()) + here() if ray.is_initialized() else None


def here() -> str:
    """The id of this node."""
    import ray

    return str(ray.get_runtime_context().get_node_id())


def alive() -> set[str]:
    """The ids of the nodes that Ray takes for alive."""
    import ray

    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}


def store_bytes() -> int:
    """How many bytes this node's object store has; 0 if Ray does not tell."""
    import ray

    node = here()
    stores = [one["Resources"].get("object_store_memory", 0) for one in ray.nodes() if one["NodeID"] == node]
    return int(stores[0]) if stores else 0


def put_job(new: NewJob) -> Any:
    """Pickle a job and put it into the object store, once for all actors.

    Raises:
        TypeError: it cannot be pickled; names the attribute.
        MemoryError: it does not fit.
    """
    import ray

    encoded = publish.publish(new, **new.parts)
    buffers = [np.frombuffer(buffer, np.uint8) for buffer in encoded.buffers]
    try:
        return ray.put((encoded.head, buffers))
    except (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError) as full:
        nbytes = len(encoded.head) + sum(buffer.nbytes for buffer in buffers)
        raise MemoryError(
            f"the dataset has {nbytes:,} bytes, and Ray's object store on this node {store_bytes():,}: start Ray "
            f"with a larger object_store_memory, or let the dataset open its data in the worker"
        ) from full


def what_there_is(wanted: dict[str, float]) -> str:
    """What a worker asks for, and what the cluster has of it, free and in all.

    Example:
        >>> _amounts({"CPU": 1.0, "reader": 0.5})
        '1 CPU, 0.5 reader'
    """
    import ray

    total, free = ray.cluster_resources(), ray.available_resources()
    has = {name: total.get(name, 0.0) for name in wanted}
    left = {name: free.get(name, 0.0) for name in wanted}
    nodes = len(alive())
    return (
        f"a worker asks for {_amounts(wanted)}; the cluster has {_amounts(has)} on {nodes} "
        f"node{'' if nodes == 1 else 's'}, and {_amounts(left)} of that is free"
    )


def _amounts(resources: dict[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) or "nothing"
