"""A cache reads each sample once, and keeps no more memory than it may."""

import gc
import pickle
import threading
import tracemalloc

import numpy as np
import pytest
import torch

from sharded_loader.batchify import default_batchify_fn
from sharded_loader.data.arrays import ArrayDataset
from sharded_loader.data.datasets import CachedDataset, SimpleDataset, own_copy


class Counting:
    def __init__(self):
        self.reads = []

    def __len__(self):
        return 10

    def __getitem__(self, index):
        self.reads.append(index)
        return np.full(1000, index, np.uint8)


def test_each_sample_is_read_once():
    source = Counting()
    cached = SimpleDataset(source).cache()
    for _ in range(2):
        assert [int(x[0]) for x in cached] == list(range(10))
    assert cached[-1] is cached[9]
    assert source.reads == list(range(10))


def test_a_full_cache_keeps_what_it_has():
    source = Counting()
    cached = CachedDataset(source, max_bytes=3500)
    for _ in range(2):
        list(cached)
    assert cached.cached == 3 and source.reads == [*range(10), *range(3, 10)]


def test_bulk_reads_fetch_only_what_is_missing():
    asked = []

    class Bulk(Counting):
        def __getitems__(self, indices):
            asked.append(list(indices))
            return [self[i] for i in indices]

    cached = CachedDataset(Bulk())
    cached.__getitems__([1, 2])
    assert [int(x[0]) for x in cached.__getitems__([2, 3, -10])] == [2, 3, 0]
    assert asked == [[1, 2], [3, 0]]


def test_a_copy_in_another_process_starts_empty():
    cached = CachedDataset(Counting())
    list(cached)
    assert pickle.loads(pickle.dumps(cached)).cached == 0
    cached._own_store.pid -= 1  # what a forked child sees
    cached._own_store.lock.acquire()
    assert cached.cached == 0 and cached[3][0] == 3 and cached.cached == 1


def test_threads_share_one_entry_per_sample():
    cached = CachedDataset(Counting(), max_bytes=10**6)
    start = threading.Barrier(8)
    seen = []

    def work():
        start.wait()
        seen.append([cached[i] for i in range(10)])

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cached.cached == 10
    assert cached._store.used == sum(own_copy(cached[i])[1] for i in range(10))
    assert all(a is b for row in seen[1:] for a, b in zip(seen[0], row, strict=True))


class Views:
    """Samples that are small parts of large arrays, made for each sample."""

    def __init__(self, view):
        self.view = view

    def __len__(self):
        return 20

    def __getitem__(self, index):
        return self.view(np.full(1_000_000, index, np.uint8))


class Held:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


VIEWS = {
    "view": lambda a: a[:10],
    "strided": lambda a: a[:100:10],
    "view of a view": lambda a: a.reshape(1000, 1000)[3][:10],
    "in a tuple": lambda a: (a[:10], "label"),
    "in a dict": lambda a: {"x": a[:10]},
    "tensor": lambda a: torch.from_numpy(a.copy()).clone()[:10],
    "tensor of a view": lambda a: torch.from_numpy(a[:10]),
    "array of a tensor": lambda a: torch.from_numpy(a).clone()[:10].numpy(),
    "buffer": lambda a: np.frombuffer(a.tobytes(), np.uint8)[:10],
    "in an object": lambda a: Held(a[:10]),
    "in an object array": lambda a: np.array([a[:10], None], object),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
@pytest.mark.costly(3)
def test_a_bounded_cache_holds_no_more_memory_than_it_may(view):
    tracemalloc.start()
    try:
        cached = SimpleDataset(Views(view)).cache(max_bytes=100_000)
        torch_owned = sum(
            leaf.untyped_storage().nbytes() for leaf in [cached[i] for i in range(20)] if isinstance(leaf, torch.Tensor)
        )
        gc.collect()
        held = tracemalloc.get_traced_memory()[0] + torch_owned
    finally:
        tracemalloc.stop()
    assert held < 1_000_000


def test_a_bounded_cache_says_which_samples_it_cannot_copy_and_reads_them_again():
    cached = SimpleDataset(Views(lambda a: memoryview(a)[:10])).cache(max_bytes=100_000)
    with pytest.warns(UserWarning, match="cannot copy a memoryview.*cache\\(\\) without max_bytes"):
        assert bytes(cached[3]) == bytes([3] * 10)
    assert cached.cached == 0
    unbounded = SimpleDataset(Views(lambda a: memoryview(a)[:10])).cache()
    assert unbounded[3] is unbounded[3]


def test_a_cached_view_has_the_values_of_the_sample():
    data = np.arange(60).reshape(20, 3)
    for dataset in (
        ArrayDataset(data),
        ArrayDataset(data.T.copy().T, torch.arange(20)),
        ArrayDataset(torch.arange(20)),
    ):
        cached = dataset.cache(max_bytes=10_000)
        for _ in range(2):
            batch = default_batchify_fn(cached.__getitems__([3, 1, 3]))
            assert repr(batch) == repr(default_batchify_fn([dataset[3], dataset[1], dataset[3]]))
        assert cached.cached == 2 and cached[3] is cached[3]
