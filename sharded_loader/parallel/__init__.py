"""Data parallelism: slices of a batch for the devices of one process, and the rank of a process in a mesh of them.

    batch -> split_data -> views -> split_and_load -> slices[i] on devices[i]
    results[i] on devices[i] -> gather -> one result on one device
    DeviceMesh -> ranks_of_mesh -> number of replicas, rank

A batch is a tensor, an array, or any structure of them; lists of strings are cut too. Cutting copies nothing, and a
slice goes straight to its device.

What can go wrong: an uneven split where it has to be even, parts of different lengths, no rows, an absent device:
ValueErrors.

For: programs that split a batch themselves, as with MXNet Gluon, and loaders with ``mesh=``.
Costs: about 130 lines. A loader uses `gather`, `ranks_of_mesh` and the module `shares` alone.
Tests: tests/parallel.
It goes when: programs have one process for each device, and torch says which dimensions of a mesh are data-parallel.

Source of the idea: ``mxnet.gluon.utils.split_data`` and ``split_and_load``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, TypeGuard

import numpy as np
import torch

from sharded_loader import default_batchify_fn
from sharded_loader.extend import DeviceLike
from sharded_loader.extend.data import children, is_dataclass_instance, is_numbers, map_leaves, rebuild, to_torch
from sharded_loader.extend.engine import device_list, shard_sizes
from sharded_loader.extend.tools import an, brief, check_int


def split_data(data: object, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Cut a batch into slices along one axis; the first ones are one row larger where it must be.

    Args:
        data: a tensor, an array (becomes a tensor of its dtype), a list of numbers, or a structure of tensors
            and lists of strings, all with the same number of rows.
        num_slice: how many slices.
        batch_axis: the axis of the rows.
        even_split: raise an error if ``num_slice`` does not divide the rows.

    Returns:
        ``num_slice`` views (empty ones where there are fewer rows), each of the structure of ``data``.

    Raises:
        ValueError: ``num_slice`` < 1; no such axis; not even, with ``even_split``; parts of different length.

    Example:
        >>> [len(part) for part in split_data(torch.arange(10), 4, even_split=False)]
        [3, 3, 2, 2]
    """
    num_slice = check_int("num_slice", num_slice, 1, "give the number of slices", ValueError)
    check_int("batch_axis", batch_axis, -math.inf, "give the number of the axis of the rows")
    if isinstance(data, (list, tuple)) and not hasattr(data, "_fields") and data and is_numbers(data):
        data = default_batchify_fn(data)  # one array, as in default batchify
    tree = to_torch(data)
    shapes = list(_row_shapes(tree, batch_axis))
    if not shapes:
        raise ValueError(f"{an(type(data))} has no rows to split: give tensors, arrays, or a structure of them")
    for shape, axis in shapes:
        if not -len(shape) <= axis < len(shape):
            raise ValueError(f"data with shape {shape} has no axis {batch_axis}: choose another batch_axis")
        size = shapes[0][0][shapes[0][1]]
        if shape[axis] != size:
            text = f"different lengths along axis {batch_axis}: shapes {shapes[0][0]} and {shape}"
            raise ValueError(f"parts of the batch have {text}: split only what has one row per sample")
    if even_split and size % num_slice:
        text = f"data with shape {shapes[0][0]} cannot be evenly split into {num_slice} slices along axis {batch_axis}"
        advice = f"Use a batch size that's multiple of {num_slice} or set even_split=False to allow uneven parts."
        raise ValueError(f"{text}. {advice}")
    bounds = accumulate(shard_sizes(size, num_slice), initial=0)
    return [_slice_rows(tree, begin, end, batch_axis) for begin, end in pairwise(bounds)]


def _is_row_list(tree: object) -> TypeGuard[list[object]]:
    """A batch field of strings or objects: one entry per sample."""
    structure = (torch.Tensor, np.ndarray, list, tuple, Mapping)
    return type(tree) is list and not any(isinstance(x, structure) or is_dataclass_instance(x) for x in tree)


def _row_shapes(tree: object, axis: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """The shape and batch axis of every part that has rows."""
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        yield tuple(tree.shape), axis
    elif _is_row_list(tree):
        yield (len(tree),), 0
    else:
        for child in children(tree) or ():
            yield from _row_shapes(child, axis)


def _slice_rows(tree: object, begin: int, end: int, axis: int) -> object:
    if isinstance(tree, (torch.Tensor, np.ndarray)):  # arrays of strings or dates, which torch lacks
        return tree[(slice(None),) * (axis % tree.ndim) + (slice(begin, end),)]
    if _is_row_list(tree):
        return tree[begin:end]
    parts = children(tree)
    return tree if parts is None else rebuild(tree, [_slice_rows(part, begin, end, axis) for part in parts])


def split_and_load(
    data: object,
    devices: Sequence[DeviceLike] | str | None = None,
    batch_axis: int = 0,
    even_split: bool = True,
    *,
    ctx_list: Sequence[DeviceLike] | None = None,
) -> list[Any]:
    """Cut a batch into one slice per device and put each on its device, with no detour through another.

    Args:
        data: as for `split_data`; dtypes are kept.
        devices: names, indices or `torch.device` objects, or ``"auto"``: all visible accelerators, else the CPU.
        batch_axis: the axis of the rows.
        even_split: raise an error if the number of devices does not divide the rows.
        ctx_list: Gluon's name for ``devices``.

    Returns:
        One slice per device; with fewer rows than devices (and ``even_split=False``) fewer slices.

    Raises:
        ValueError: as `split_data`; a batch without rows; a device that is not there.
        TypeError: neither or both of ``devices`` and ``ctx_list``.

    Example:
        >>> [x.tolist() for x in split_and_load([1, 2, 3], ["cpu", "cpu"], even_split=False)]
        [[1, 2], [3]]

    Source of the idea: ``mxnet.gluon.utils.split_and_load``.
    """
    if devices is None and ctx_list is None:
        raise TypeError('split_and_load was not told where to: give devices, such as ["cuda:0", "cuda:1"], or "auto"')
    if devices is not None and ctx_list is not None:
        raise TypeError("split_and_load was given devices and ctx_list, which is Gluon's name for the same: give one")
    placed = device_list(devices if ctx_list is None else ctx_list)
    slices = split_data(data, len(placed), batch_axis, even_split)
    rows = [next(_row_shapes(part, batch_axis)) for part in slices]
    filled = [part for part, (shape, axis) in zip(slices, rows, strict=True) if shape[axis]]
    if not filled:
        raise ValueError("the batch has no rows: leave empty batches out of the sampler")
    # Slices are filled from the front, so the first len(filled) devices have work.
    return [map_leaves(partial(_moved, device), part) for part, device in zip(filled, placed, strict=False)]


def gather(shards: Sequence[object], device: DeviceLike) -> Any:
    """Join what each device has computed on one device, along the first axis, in the order of the shards.

    Args:
        shards: one result per shard: a tensor, an array, a number, a list of strings, or a structure of them, the same
            one in all. A number, or a tensor without axes, is one row. None in all shards stays None.
        device: where the result is.

    Returns:
        The same structure with joined tensors. Gradients flow back through it to the tensors of each device.

    Raises:
        ValueError: there are no shards, their structures differ, or they hold something else.

    Example:
        >>> gather([(torch.ones(2), 0.5), (torch.zeros(1), 0.25)], "cpu")
        (tensor([1., 1., 0.]), tensor([0.5000, 0.2500]))

    Source of the idea: ``torch.nn.parallel.gather``.
    """
    if not shards:
        raise ValueError("there are no shards to gather: give one result per shard")
    (place,) = device_list([device])
    return _joined([to_torch(shard) for shard in shards], place)


def _joined(trees: list[Any], device: torch.device) -> object:
    first = trees[0]
    if all(isinstance(tree, (int, float, complex)) for tree in trees):
        return torch.tensor(trees, device=device)
    if all(isinstance(tree, torch.Tensor) for tree in trees):
        return torch.cat([_moved(device, tree if tree.ndim else tree.reshape(1)) for tree in trees])
    if all(map(_is_row_list, trees)):
        return [row for tree in trees for row in tree]
    if all(isinstance(tree, np.ndarray) for tree in trees):  # of strings or dates, which torch lacks
        return np.concatenate(trees)
    if all(tree is None for tree in trees):
        return None
    odd = next((tree for tree in trees if _form(tree) != _form(first)), first)
    if odd is not first or children(first) is None:
        advice = "give tensors, arrays, numbers, or a structure of them, the same one for all shards"
        raise ValueError(f"{brief(first)} and {brief(odd)} cannot be joined: {advice}")
    columns = zip(*(children(tree) or () for tree in trees), strict=True)
    return rebuild(first, [_joined(list(column), device) for column in columns])


def _form(tree: object) -> tuple[object, ...]:
    """The type of a structure, how many parts it has, and their names."""
    return type(tree), len(children(tree) or ()), list(tree.keys()) if isinstance(tree, Mapping) else None


def _moved(device: torch.device, leaf: object) -> Any:
    # To the host an asynchronous copy would be read before it has arrived.
    return leaf.to(device, non_blocking=device.type != "cpu") if isinstance(leaf, torch.Tensor) else leaf


# -- ranks of a mesh ---------------------------------------------------------------------------------------------------

_REPLICATED = ("dp", "ddp", "data", "data_parallel", "batch", "replicate", "dp_replicate")
DATA_DIMS = (*_REPLICATED, "shard", "fsdp", "hsdp", "dp_shard")
MODEL_DIMS = ("tp", "cp", "pp", "sp", "ep", "tensor", "context", "pipeline", "pipe", "sequence", "expert", "model")


def ranks_of_mesh(mesh: Any) -> tuple[int, int]:
    """Return the number of replicas, and the rank of this process, from a mesh of processes.

    Args:
        mesh: a `torch.distributed.device_mesh.DeviceMesh`, or one dimension of it, ``mesh["dp"]``. Dimensions named for
            data parallelism (`DATA_DIMS`) give replicas; a one-dimensional mesh may have any name outside `MODEL_DIMS`.
            Processes that differ only in other dimensions are one replica.

    Raises:
        TypeError, ValueError: it is no mesh, has no dimension of data parallelism, or does not include this process.
    """
    if not (hasattr(mesh, "get_coordinate") and hasattr(mesh, "mesh_dim_names")):
        raise TypeError(f"mesh is {mesh!r}; it must be a DeviceMesh, or one dimension of it: mesh['dp']")
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    chosen = [place for place, name in enumerate(names) if name in DATA_DIMS]
    if not chosen and mesh.ndim == 1 and names[0] not in MODEL_DIMS:
        chosen = [0]
    if not chosen:
        text = f"mesh has the dimensions {', '.join(map(repr, names))}, and none is known as one of data parallelism"
        raise ValueError(f"{text} ({', '.join(DATA_DIMS)}): give that dimension, mesh=mesh[name]")
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("this process is not in the mesh: make no loader here, or give num_replicas and rank")
    sizes, own = [mesh.size(place) for place in chosen], tuple(coordinate[place] for place in chosen)
    return int(np.prod(sizes)), int(np.ravel_multi_index(own, sizes))
