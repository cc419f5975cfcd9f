"""``cache()`` without arguments reads each sample once in each process, and keeps the object."""

import pickle
import threading

import numpy as np

from sharded_loader.data.datasets import CachedDataset, SimpleDataset


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
    assert cached.cached == 0 and cached[3][0] == 3 and cached.cached == 1


def test_threads_share_one_entry_per_sample():
    cached = CachedDataset(Counting())
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
    assert all(a is b for row in seen[1:] for a, b in zip(seen[0], row, strict=True))


def test_it_keeps_any_object():
    cached = SimpleDataset([memoryview(b"abc"), object()]).cache()
    assert cached[0] is cached[0] and cached[1] is cached[1]
