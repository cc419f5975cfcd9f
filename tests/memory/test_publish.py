"""The dataset on its way to spawned workers: once, in one copy, private where it is written to, new when it changed."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, SPAWNED, covering
from memory_samples import Diary

from sharded_loader import ArrayDataset, ProcessPool, ShardedDataLoader, SimpleDataset
from sharded_loader.base.limits import Limit
from sharded_loader.memory.codec import decode
from sharded_loader.memory.publish import SHARED_BYTES, publish, share

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux only")
# multiprocessing keeps the memory of its first value, and a process that looks after names, until the program ends.
KEPT = multiprocessing.get_context("spawn").Value("i", 0)
MEMORY = pytest.mark.parametrize("memory", ["memfd", "shm", "named"])


def reopened(obj):
    encoded = publish(obj)
    return decode(encoded.pickled, [np.frombuffer(bytearray(raw), np.uint8) for raw in encoded.buffers])


class Locked(Mapping[str, Any]):
    """Holds a lock while somebody iterates over its items, as groups of HDF5 do."""

    def __init__(self, lock, names):
        self.lock, self.names = lock, names

    def __getitem__(self, name):
        return Locked(self.lock, "") if name != "lock" else threading.Lock()

    def __len__(self):
        return len(self.names)

    def __iter__(self):
        return iter(self.names)

    def items(self):
        with self.lock:
            yield from ((name, self[name]) for name in self.names)


@pytest.mark.parametrize("is_inside", [True, False])
def test_the_error_of_a_dataset_that_does_not_pickle_holds_no_lock_of_the_dataset(is_inside):
    lock = threading.Lock()
    dataset = Locked(lock, "abc")
    with pytest.raises(TypeError, match=r"dataset(\[0\])?\['a'\]") as caught:
        publish(dataset, dataset=[dataset] if is_inside else dataset)
    assert lock.acquire(blocking=False), "an iterator over the dataset was left where it was"
    del caught


class RingsWhilePickled(SimpleDataset):
    """A signal arrives while it is pickled."""

    def __reduce__(self):
        signal.raise_signal(signal.SIGINT)
        return super().__reduce__()


@SPAWNED
def test_what_a_signal_handler_raises_while_the_dataset_is_pickled_is_no_error_of_pickle(method):
    def time_is_up(*_):
        raise TimeoutError("time is up")

    before = signal.signal(signal.SIGINT, time_is_up)
    loader = ShardedDataLoader(RingsWhilePickled([1]), 1, pool=ProcessPool(1, start_method=method))
    try:
        with loader, pytest.raises(TimeoutError, match="time is up"):
            next(iter(loader))
    finally:
        signal.signal(signal.SIGINT, before)


def test_views_of_one_tensor_are_sent_once_and_stay_views_and_the_same_array_one():
    data = torch.arange(100_000.0)
    dataset = SimpleDataset([data[:10], data, data[50_000:], data.view(100, 1000).T, data.detach().view(torch.int32)])
    encoded = publish(dataset)
    assert sum(raw.nbytes for raw in encoded.buffers) == 400_000
    head, whole, tail, turned, ints = reopened(dataset)
    whole[0], whole[50_000] = -1, -2
    assert (head[0], tail[0], turned[0, 0], ints[0]) == (-1, -2, -1, torch.tensor(-1.0).view(torch.int32))
    assert turned.stride() == (1, 1000)
    array = np.zeros(10_000)
    a, b, c = reopened([array, array, array[::2]])
    assert a is b and c.size == 5000
    windows = torch.arange(20_000.0).unfold(0, 1000, 10)
    encoded = publish([*windows, windows.expand(3, *windows.shape)])
    assert sum(raw.nbytes for raw in encoded.buffers) == 80_000
    got = reopened([*windows])
    assert all(torch.equal(a, b) for a, b in zip(got, windows, strict=True))


def test_tensors_over_arrays_or_without_elements_and_parameters_whatever_the_default_device():
    array, layer = np.arange(3000), torch.nn.Linear(100, 200)
    parts = [torch.zeros(0), torch.zeros(0, 3, dtype=torch.int8), torch.from_numpy(array)]
    parts += [torch.from_numpy(array[:9000]), layer.weight, (layer.weight * 2).detach().requires_grad_()]
    for a, b in zip(parts, reopened(parts), strict=True):
        assert type(a) is type(b) and a.dtype == b.dtype and torch.equal(a, b) and a.requires_grad == b.requires_grad
    data = torch.arange(50_000.0)
    torch.set_default_device("meta")
    try:
        part, whole = reopened([data[:10], data])
    finally:
        torch.set_default_device(None)
    assert torch.equal(part, data[:10]) and torch.equal(whole, data)


def test_a_dataset_too_deep_or_with_a_value_that_is_only_inherited_is_a_clear_error():
    chain = []
    for _ in range(200_000):  # 5,000 are enough up to Python 3.13
        chain = [chain]
    inherited = r"dataset\['count'\].*through inheritance.*start_method=\"fork\""
    for dataset, text in (
        (chain, "cannot send the dataset to worker processes: it cannot be pickled .* recursion"),
        ({"count": KEPT}, inherited),
    ):
        with pytest.raises(TypeError, match=text):
            publish(dataset, dataset=dataset)


def test_the_segment_is_aligned_and_small_jobs_or_those_that_fill_the_memory_need_none(monkeypatch):
    parts = [np.full(n, n % 251, np.uint8) for n in (8192, 8193, 70_001, 100)]
    published, segment = share(publish(parts), -1)
    assert segment is not None and not published.buffers
    assert all(offset % 64 == 0 for offset, _ in published.places)
    memory = np.frombuffer(segment.mapping, np.uint8)
    got = decode(published.pickled, [memory[offset : offset + size] for offset, size in published.places])
    assert all((a == b).all() for a, b in zip(got, parts, strict=True))
    del got, memory
    segment.close()
    segment.close()
    small, segment = share(publish([np.zeros(SHARED_BYTES // 2, np.uint8)]), -1)
    assert segment is None and len(small.buffers) == 1
    monkeypatch.setattr("sharded_loader.memory.publish.free_bytes", lambda: Limit(100_000, "a quarter more is free"))
    large, segment = share(publish(parts), -1)
    assert segment is None and len(large.buffers) == 3


@pytest.mark.parametrize("why", ["no room", "refused"])
@pytest.mark.slow
def test_without_room_the_dataset_goes_through_the_pipe(monkeypatch, why):
    def refuse(number, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("sharded_loader.memory.publish.create", refuse)
    if why == "no room":
        monkeypatch.setattr("sharded_loader.memory.publish.free_bytes", lambda: Limit(1000, "nothing"))
    data = ArrayDataset(np.arange(200_000))
    with ShardedDataLoader(data, 50_000, pool=ProcessPool(2, start_method="spawn")) as loader:
        assert torch.cat(list(loader)).tolist() == list(range(200_000))


@pytest.mark.slow
@linux
@SPAWNED
@pytest.mark.parametrize("mapped", [False, True])
def test_all_workers_share_one_copy_and_a_memmap_costs_them_nothing(tmp_path, method, mapped):
    nbytes = 96 << 20
    rows = np.memmap(tmp_path / "large.bin", np.float64, "w+", shape=(800, nbytes // 6400))
    rows[:] = np.arange(800)[:, None]
    data = ArrayDataset(rows if mapped else np.array(rows))
    assert not mapped or bytes_of(data) < 2000
    pool = ProcessPool(4, start_method=method)
    with ShardedDataLoader(data, 100, pool=pool, batchify_fn=lambda rows: [row.mean() for row in rows]) as loader:
        assert sum(loader, []) == list(range(800))
        memory = [psutil.Process(pid).memory_full_info() for pid in loader.pool.pids]
    assert max(one.uss for one in memory) < nbytes  # none has a copy of its own
    assert sum(one.pss for one in memory) < nbytes + 4 * (60 << 20)  # together: one copy and their interpreters


@METHODS
@MEMORY
@pytest.mark.costly
def test_a_dataset_that_writes_to_itself_keeps_it_to_itself(method, memory, monkeypatch):
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("SHARDED_LOADER_MEMORY", memory)
    data = Diary(40)
    with ShardedDataLoader(data, 4, pool=ProcessPool(2, start_method=method)) as loader:
        seen = {}
        for _ in range(2):
            for indices, counts, pids in loader:
                for key, count in zip(zip(indices.tolist(), pids.tolist(), strict=True), counts.tolist(), strict=True):
                    seen[key] = seen.get(key, 0) + 1
                    assert count == seen[key]  # what this worker wrote, and no other
        assert not data.rows.any()  # nor the trainer


@pytest.mark.slow
@linux
@SPAWNED
def test_refreshing_leaves_one_copy_which_a_worker_in_another_s_place_gets_too(method):
    data = ArrayDataset(np.arange(1_000_000))
    with ShardedDataLoader(data, 100_000, pool=ProcessPool(2, start_method=method)) as loader:
        for _ in range(3):
            list(loader)
        before = _own_descriptors()
        for _ in range(5):
            assert _datasets(loader) == [1, 1]
            loader.refresh()
            list(loader)
        assert _datasets(loader) == [1, 1]
        assert _own_descriptors() == before > 0
        iterator = iter(loader)
        values = next(iterator).tolist()
        psutil.Process(loader.pool.pids[0]).kill()
        assert values + torch.cat(list(iterator)).tolist() == list(range(1_000_000))


def _own_descriptors():
    """Descriptors of published datasets in this process. Those of batches may become more."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the folder itself
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return sum("memfd:sharded_loader--" in link for link in links)


def _datasets(loader):
    """How many published datasets each worker has mapped: their segments have negative numbers."""
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in loader.pool.pids]
    return [text.count("memfd:sharded_loader--") for text in maps]


# -- memory-mapped files go by name where the worker finds the same file, else by value -------------------------------


OFFSET = 5000
"""No multiple of the page size."""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(OFFSET) + np.arange(300_000, dtype=np.int32).tobytes())
    return path


def mapped(file, mode="r"):
    return np.memmap(file, np.int32, mode, OFFSET, (3000, 100))


def bytes_of(obj):
    encoded = publish(obj)
    return len(encoded.pickled) + sum(buffer.nbytes for buffer in encoded.buffers)


VIEWS = {
    "whole": lambda m: m,
    "slice": lambda m: m[100:200],
    "row": lambda m: m[17],
    "backwards": lambda m: m[::-2, 50:3:-1],
    "transposed": lambda m: m.T,
    "array": lambda m: np.asarray(m),
    "slice of an array": lambda m: np.asarray(m)[5:, ::3],
    "other dtype": lambda m: m.view(np.uint8)[:, 1::4],
    "repeated": lambda m: np.broadcast_to(m[3], (7, 100)),
    "element": lambda m: m[2999:, 99:],
    "from the first byte": lambda m: np.memmap(m.filename, np.uint8, m.mode),
    "windows": lambda m: np.lib.stride_tricks.sliding_window_view(m, 20, axis=0),
    "part of windows": lambda m: np.lib.stride_tricks.sliding_window_view(m.reshape(-1), 50)[1000::7],
    "strided": lambda m: np.lib.stride_tricks.as_strided(m, (20, 20), (800, 4)),
    "strided memmap": lambda m: np.lib.stride_tricks.as_strided(m, (20, 20), (800, 4), subok=True),
    "memoryview": lambda m: np.asarray(memoryview(m)),
    "buffer": lambda m: np.frombuffer(m, np.uint16),
}


@covering(mode=["r", "r+", "c"], view=VIEWS)
def test_views_arrive_the_same_and_go_by_name(file, mode, view):
    array = VIEWS[view](mapped(file, mode))
    got = reopened(array)
    assert (type(got), got.dtype, got.shape) == (type(array), array.dtype, array.shape)
    assert (got == array).all()
    assert bytes_of(array) < 2000
    assert (got.strides, got.flags.writeable) == (array.strides, array.flags.writeable)


def test_views_of_one_mapping_stay_so_and_are_described_once_but_what_is_computed_goes_by_value(file):
    whole = mapped(file)
    computed = [whole + 1, whole.copy(), np.sort(whole), whole[[1, 2, 3]], whole.sum(), whole[:0]]
    for array in (*computed, np.asarray(whole[:9]).view(np.recarray)):  # nor do the user's own kinds of arrays
        got = reopened(array)
        assert type(got) is type(array) and np.array_equal(got, array) and got.dtype == array.dtype
    whole = mapped(file, "r+")
    one, other, third = reopened([whole[:10], np.asarray(whole)[5:], mapped(file, "r+")])
    one[7, 0] = -1
    assert other[2, 0] == -1 and third[7, 0] == -1  # the last one through the file
    assert np.shares_memory(one, other) and not np.shares_memory(one, third)
    rows = list(mapped(file))
    assert bytes_of(rows) < 200 * len(rows)


@pytest.mark.parametrize("mode", ["r+", "w+"])
def test_what_is_written_to_a_writable_file_is_written_to_that_file(file, mode):
    whole = mapped(file, mode)
    whole[5] = 3
    got = reopened(whole)
    assert (got[5] == 3).all()
    got[7] = 4
    got.flush()
    assert (whole[7] == 4).all()
    assert (np.fromfile(file, np.int32, offset=OFFSET).reshape(3000, 100)[7] == 4).all()


def test_copy_on_write_keeps_what_the_trainer_has_written(file):
    for row in (2999, 5):  # the first one is behind what is compared at once
        whole = mapped(file, "c")
        whole[row] = 3
        got = reopened(whole)
        assert (got == whole).all() and (got[row] == 3).all()
    assert bytes_of(whole) > whole.nbytes and bytes_of(whole[6:]) < 2000  # what it has not written goes by name
    got[7] = 4
    assert (whole[7] != 4).all()


@linux
@pytest.mark.parametrize("what", ["deleted", "replaced", "shortened", "without a name"])
def test_a_file_that_is_no_longer_there_goes_by_value(file, what):
    whole = mapped(file)[:500]
    if what == "deleted":
        file.unlink()
    elif what == "replaced":
        other = file.with_name("other")
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
    elif what == "shortened":
        os.truncate(file, OFFSET + whole.nbytes)
    else:
        with tempfile.TemporaryFile(dir=file.parent) as nameless:
            whole = np.memmap(nameless, np.int32, "w+", shape=(3000,))
            whole[:] = range(3000)
    expected, got = np.array(whole), reopened(whole)
    assert type(got) is np.memmap and (got == expected).all()
    # Out of band, so that workers share it.
    assert what == "without a name" or sum(raw.nbytes for raw in publish(whole).buffers) == whole.nbytes
