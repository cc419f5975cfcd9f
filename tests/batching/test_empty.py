"""`sharded_loader.empty`: the batch's own memory for the user's functions, and plain memory everywhere else."""

import subprocess
import sys
import threading

import numpy as np
import pytest
import torch
from samples import halves

from sharded_loader import ShardedDataLoader, SimpleDataset, empty
from sharded_loader.batchify import List, Stack, Tuple
from sharded_loader.batching.protocol import call_with_empty
from sharded_loader.engine.messages import Job, Task
from sharded_loader.engine.reader import Reader
from sharded_loader.memory.codec import SlotWriter, encode


class Columns:
    """A user's dataset with a bulk read of its own."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return np.full(64, index)

    def get_batch(self, indices):
        batch = empty((len(indices), 64), np.int64)
        batch[...] = np.asarray(indices)[:, None]
        return batch


def lies_in(array, memory):
    start = memory.__array_interface__["data"][0]
    return start <= array.__array_interface__["data"][0] < start + memory.nbytes


def read(dataset, batchify_fn, slot):
    result = Reader(Job(dataset, batchify_fn, 0)).read(Task(0, 0, 0, 0, ([3, 1],), False), "worker 0", slot.empty)
    if result.error is not None:
        raise result.error
    return result.batch


@pytest.fixture
def memory():
    return np.zeros(1 << 16, np.uint8)


def test_a_users_function_writes_where_the_batch_is_read_but_no_sample_lies_there(memory):
    batch = read(range(10), halves, SlotWriter(memory))
    assert lies_in(batch["half"], memory) and batch["half"][:, 0].tolist() == [1.5, 0.5]
    batch = read([(i, i) for i in range(5)], Tuple(Stack(), halves), SlotWriter(memory))  # inside one of ours
    assert lies_in(batch[1]["half"], memory)
    assert lies_in(read(Columns(), None, SlotWriter(memory)), memory)
    samples = SimpleDataset(range(5)).transform(lambda index: empty((4,), "i8"))  # a cache may keep them
    assert not any(lies_in(sample, memory) for sample in read(samples, List(), SlotWriter(memory)))
    slot = SlotWriter(memory[:100])  # a full slot is no error
    batch = read(range(10), halves, slot)
    assert not lies_in(batch["half"], memory) and batch["half"][:, 0].tolist() == [1.5, 0.5]
    encode(batch, slot)
    assert slot.wanted == 512  # the next slot is that large


def test_every_pool_delivers_what_was_written(pool):
    with ShardedDataLoader(range(40), 8, batchify_fn=halves, pool=pool) as loader:
        held = list(loader)
    assert torch.cat([batch["half"] for batch in held]).equal(torch.arange(40.0)[:, None].expand(40, 64) / 2)


def test_outside_of_a_loader_it_is_numpys():
    array = empty((2, 3), "int16")
    assert (array.shape, array.dtype, array.flags.owndata) == ((2, 3), np.int16, True)
    assert empty(3).dtype == np.float64 and empty(np.int64(3)).shape == (3,) and empty(()).shape == ()
    assert empty(torch.Size([2, 0])).shape == (2, 0)
    for bad, error in ((-1, ValueError), ((2, -3), ValueError), (2.5, TypeError), ("ab", TypeError)):
        with pytest.raises(error):
            empty(bad)
    code = "import sys, sharded_loader; sharded_loader.empty(3); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_odd_shapes_and_dtypes_never_spoil_the_slot(memory):
    slot = SlotWriter(memory)

    def make(wanted):
        return [empty(shape, dtype) for shape, dtype in wanted]

    with pytest.raises(ValueError):
        call_with_empty(make, [((2, -3), float)], slot.empty)
    nothing, texts, objects, swapped = call_with_empty(
        make, [((-0, 4), float), (2, "S"), (2, object), ([2, 2], ">f8")], slot.empty
    )
    assert nothing.shape == (0, 4) and texts.dtype == "S1" and objects.tolist() == [None, None]
    assert lies_in(swapped, memory) and slot.wanted < 256


def test_calls_nest_and_are_undone_by_errors(memory):
    outer, inner = SlotWriter(memory[:512]), SlotWriter(memory[512:])

    def fails(size):
        assert lies_in(empty(size), memory[512:])
        raise KeyError

    def nests(size):
        with pytest.raises(KeyError):
            call_with_empty(fails, size, inner.empty)
        assert lies_in(empty(size), memory[:512])
        found = []
        thread = threading.Thread(target=lambda: found.append(empty(size)))
        thread.start()
        thread.join()
        assert not lies_in(found[0], memory)  # another thread makes no part of this batch

    call_with_empty(nests, 4, outer.empty)
    assert not lies_in(empty(4), memory)


def test_a_loader_inside_a_batchify_fn_uses_its_own_memory(memory):
    def nested(samples):
        inner = next(iter(ShardedDataLoader(range(2), 2, batchify_fn=halves)))["half"]
        mine = empty((2, 64), np.float32)
        mine[...] = inner.numpy()
        assert not lies_in(inner.numpy(), memory)
        return mine

    assert lies_in(read(range(10), nested, SlotWriter(memory)), memory)
