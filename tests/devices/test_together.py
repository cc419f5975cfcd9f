"""Small tensors of a batch travel together: one copy for many columns, and each is a tensor like any other."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ahead
from devices_samples import GOOD, Checks, copied, copies_on, streams_on
from simulated import Machine

from sharded_loader import ShardedDataLoader, SimpleDataset
from sharded_loader.devices.copies import SMALL, CopyStream
from sharded_loader.engine.pool import Pool

COLUMNS = 256
DTYPES = [np.float32, np.int64, np.uint8, np.float16, np.bool_, np.complex128]


def columns(index: int) -> Any:
    """Row i has 256 fields of different types and sizes."""
    return {f"field {k}": np.full(k % 7, (index + k) % 2, DTYPES[k % 6]) for k in range(COLUMNS)}


def nested(index: int) -> Any:
    fields = list(columns(index).values())
    return {"first": fields[:100], "rest": {"a": tuple(fields[100:]), "name": "text"}}


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict):
        return leaves(list(tree.values()))
    return [leaf for part in tree for leaf in leaves(part)] if isinstance(tree, (list, tuple)) else [tree]


@pytest.mark.costly(2)
@pytest.mark.parametrize("make", [columns, nested])
def test_many_columns_cost_one_copy(machine: Machine, pool: Pool, make: Any) -> None:
    data, checks = SimpleDataset(range(16)).transform(make), Checks(machine)
    expected = [leaves(batch) for batch in ShardedDataLoader(data, 8)]
    with ahead(ShardedDataLoader(data, 8, pool=pool, device=machine.devices[0]), False) as loader:
        for number, batch in enumerate(loader):
            for place, (leaf, host) in enumerate(zip(leaves(batch), expected[number], strict=True)):
                if not isinstance(host, torch.Tensor):
                    assert leaf == host
                    continue
                assert (leaf.dtype, leaf.shape, leaf.stride()) == (host.dtype, host.shape, host.stride())
                if leaf.numel():
                    checks.compare(leaf, host.numpy(), (number, place))
                del leaf
            del batch
            machine.run(40)
        empty = sum(not leaf.numel() for leaf in expected[0] if isinstance(leaf, torch.Tensor))
        assert checks.done() == GOOD
    assert copied(machine) == 2 * (1 + empty)  # a tensor without values has a copy of its own


def test_a_large_tensor_keeps_memory_of_its_own(machine: Machine) -> None:
    """So a label that the program keeps does not keep the images."""
    copies = copies_on(machine)
    batch = [np.zeros(SMALL + 1, np.uint8), np.ones(SMALL, np.uint8), np.ones(3)]
    image, label, weight = copies.begin(batch).finish()
    machine.finish()
    copies.drain()
    assert copied(machine) == 2
    assert label.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
    held, in_use = weakref.ref(image), machine.in_use
    del image
    gc.collect()
    assert held() is None and label.sum() == SMALL and machine.in_use == in_use - 1


def test_one_small_tensor_goes_from_where_it_lies(machine: Machine) -> None:
    streams = streams_on(machine)
    with streams.current():
        copies, leaf = CopyStream(streams), streams.pin(torch.arange(9), (1,))
    pending = copies.begin({"only": [leaf]})
    assert pending.sources[0] is leaf
    machine.finish()
    assert pending.finish()["only"][0].tolist() == list(range(9))


def test_tensors_that_lie_together_are_strangers_to_autograd(machine: Machine) -> None:
    """If they were views, to change one would spoil what another is needed for."""
    copies = copies_on(machine)
    x, y = copies.begin([torch.ones(3), torch.ones(3)]).finish()
    machine.finish()
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * x).sum()
    y.add_(1)
    loss.backward()
    assert weight.grad is not None and y._base is None


def test_lazy_signs_and_conjugates_are_carried_out(machine: Machine) -> None:
    copies, number = copies_on(machine), torch.tensor([1 + 2j, 3 - 4j])
    lazy = [number.conj(), number.conj().imag.clone().neg(), torch._neg_view(torch.ones(3)), torch.ones(3)]
    batch = copies.begin(lazy).finish()
    machine.finish()
    assert [found.tolist() for found in batch] == [one.tolist() for one in lazy]


def test_each_begins_where_any_type_may_begin(machine: Machine) -> None:
    copies = copies_on(machine)
    batch = copies.begin([torch.ones(size, dtype=torch.uint8) for size in range(1, 30)]).finish()
    machine.finish()
    first = min(tensor.data_ptr() for tensor in batch)
    assert all((tensor.data_ptr() - first) % 64 == 0 for tensor in batch)
    copies.drain()
