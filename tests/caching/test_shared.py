"""One copy of a dataset for all processes of a machine: built once, whoever dies, and nothing stays behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from conftest import METHODS, POOLS, covering, make_pool, until

from sharded_loader import ArrayDataset, LoaderWarning, ShardedDataLoader, SimpleDataset, share
from sharded_loader.caching import shared
from sharded_loader.caching.shared import links_of
from sharded_loader.data.inspection import exact
from sharded_loader.memory.publish import SHARED, publish

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="kills processes")
HAS = f"has True {sum(range(100_000))} name 1999 99999"
PROGRAM = Path(__file__).with_name("shared_rank.py")


@pytest.fixture
def key() -> str:
    return f"test {os.getpid()} {os.urandom(4).hex()}"


class Rank:
    """A process that shares a dataset."""

    def __init__(self, key: str, *what: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAM), key, *what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        self.said: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.said.extend(line.rstrip() for line in iter(self.process.stdout.readline, "") if line)  # as they come

    def says(self, word: str) -> None:
        assert until(lambda: any(line.startswith(word) for line in self.said)), (word, self.said)

    def told(self, line: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def killed(self) -> None:
        self.process.kill()
        self.ended()

    def ended(self) -> None:
        self.process.wait()
        self._reader.join()
        for file in (self.process.stdin, self.process.stdout):
            assert file is not None
            file.close()


@pytest.fixture
def start(key: str) -> Iterator[Callable[..., Rank]]:
    ranks: list[Rank] = []

    def start(*what: str, **environment: str) -> Rank:
        ranks.append(Rank(key, *what, **environment))
        return ranks[-1]

    yield start
    for rank in ranks:
        if rank.process.poll() is None:
            rank.killed()
        elif not rank.process.stdin.closed:  # type: ignore[union-attr]
            rank.ended()


def building(ranks: list[Rank]) -> list[Rank]:
    return [rank for rank in ranks if "builds" in rank.said and not any("has" in line for line in rank.said)]


# -- ranks -------------------------------------------------------------------------------------------------------------


def test_one_rank_builds_and_all_have_it(start: Callable[..., Rank]) -> None:
    ranks = [start() for _ in range(3)]
    assert until(lambda: building(ranks))
    (builder,) = building(ranks)
    builder.told()
    for rank in ranks:
        rank.says(HAS)
    assert sum("builds" in rank.said for rank in ranks) == 1


def test_another_rank_takes_over_from_a_builder_that_is_killed(start: Callable[..., Rank]) -> None:
    ranks = [start(), start()]
    assert until(lambda: building(ranks))
    (builder,) = building(ranks)
    builder.killed()
    ranks.remove(builder)
    ranks[0].says("builds")
    ranks[0].told()
    ranks[0].says(HAS)


@pytest.mark.slow
def test_a_late_rank_maps_what_a_rank_has_that_was_killed_since(start: Callable[..., Rank]) -> None:
    first = start()
    first.says("builds")
    first.told()
    first.says(HAS)
    second = start()
    second.says(HAS)
    first.killed()
    third = start()
    third.says(HAS)
    assert "builds" not in (*second.said, *third.said)


@pytest.mark.slow
def test_a_rank_whose_function_raises_leaves_it_to_the_next(start: Callable[..., Rank]) -> None:
    ranks = [start(), start()]
    assert until(lambda: building(ranks))
    (builder,) = building(ranks)
    builder.told("raise")
    builder.says("OSError no such data")
    ranks.remove(builder)
    ranks[0].says("builds")
    ranks[0].told()
    ranks[0].says(HAS)


def holders(key: str) -> list[str]:
    """Who has memory of this key open: its label ends with a digest, so all labels count."""
    found = []
    for process in psutil.process_iter():
        for number in range(256):
            try:
                link = os.readlink(f"/proc/{process.pid}/fd/{number}")
            except OSError:
                continue
            if "sharded_loader-share-" in link:
                found.append(f"{process.pid} {link}")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("when", ["has", "builds"])
def test_nothing_stays_behind_when_all_ranks_are_killed(
    start: Callable[..., Rank], when: str, key: str, tmp_path: Path
) -> None:
    before, names = set(holders(key)), set(os.listdir("/dev/shm"))
    ranks = [start(TMPDIR=str(tmp_path)) for _ in range(2)]
    assert until(lambda: building(ranks))
    if when == "has":
        building(ranks)[0].told()
        for rank in ranks:
            rank.says(HAS)
    for rank in ranks:
        rank.process.kill()
    for rank in ranks:
        rank.ended()
    assert list(tmp_path.iterdir()) == [] and set(os.listdir("/dev/shm")) == names and set(holders(key)) == before
    later = start()
    later.says("builds")  # not what was there before
    later.told()
    later.says(HAS)


@pytest.mark.slow
def test_what_a_forked_child_still_maps_is_found(start: Callable[..., Rank]) -> None:
    rank = start("forks")
    rank.says("builds")
    rank.told()
    rank.says(HAS)
    child = psutil.Process(rank.process.pid).children()[0]
    rank.process.kill()
    rank.process.wait()
    assert child.is_running()
    later = start()
    later.says(HAS)
    assert "builds" not in later.said
    child.kill()


@pytest.mark.slow
def test_another_function_with_the_key_is_an_error_that_names_both(start: Callable[..., Rank]) -> None:
    first = start()
    first.says("builds")
    first.told()
    first.says(HAS)
    second = start("other")
    second.says("ValueError")
    assert "make (shared_rank.py, line" in second.said[-1] and "make_other (shared_rank.py" in second.said[-1]


# -- one process -------------------------------------------------------------------------------------------------------


def data() -> Any:
    return ArrayDataset(
        x=np.arange(20_000).reshape(1000, 20),
        names=np.array([f"name of sample {number}" for number in range(1000)]),
        more=torch.arange(4000.0).reshape(1000, 4),
        times=np.arange(1000 * 8).astype("M8[s]").reshape(1000, 8),
        label=list(range(1000)),
    )


def bytes_of(obj: Any, **options: Any) -> int:
    encoded = publish(obj, **options)
    return len(encoded.head) + sum(buffer.nbytes for buffer in encoded.buffers)


def in_memory(array: Any) -> bool:
    """Whether an array or a tensor lies in shared memory."""
    array = np.asarray(array)
    return any(np.shares_memory(array, whole) for whole in SHARED.values())


@covering(pool=POOLS)
def test_a_loader_reads_what_it_reads_of_a_dataset_of_its_own(pool: str, key: str) -> None:
    options: dict[str, Any] = {"shuffle": True, "seed": 0}

    def batches(dataset: Any) -> list[Any]:
        with ShardedDataLoader(dataset, 50, pool=make_pool(pool), **options) as loader:
            return [exact(batch) for batch in loader]

    assert batches(share(data, key)) == batches(data())


def test_all_large_columns_are_mapped(key: str) -> None:
    dataset = share(data, key)
    assert all(in_memory(dataset.columns[name]) for name in ("x", "more", "times"))
    assert in_memory(dataset.columns["names"])
    again = share(data, key)  # the same memory
    assert again is not dataset and len(SHARED) == 1 and again[7]["names"] == "name of sample 7"


def test_spawned_workers_are_sent_names_of_all_large_columns_and_their_parts(key: str) -> None:
    dataset = share(data, key)
    columns = dataset.columns
    assert bytes_of(dataset) < 15_000 < 200_000 < bytes_of(data())
    assert bytes_of([columns["x"][::2], columns["x"].T, columns["more"][5:, 1], SimpleDataset(columns["x"])]) < 3000


def test_other_machines_and_other_shared_memory_are_sent_the_bytes(key: str) -> None:
    dataset = share(data, key)
    assert bytes_of(dataset, elsewhere=True) > 200_000
    outer = share(lambda: {"inner": share(data, key), "more": 1}, f"{key} outer")
    del dataset
    gc.collect()
    assert list(SHARED) and len(SHARED) == 1 and (outer["inner"].columns["x"] == data().columns["x"]).all()


@METHODS
def test_what_is_written_stays_in_this_process_and_in_workers_that_start_later(method: str, key: str) -> None:
    dataset = share(data, key)
    dataset.columns["x"][5] = -1
    dataset.columns["more"][5] = -1
    label, whole = SHARED.popitem()
    other = share(data, key)  # as another process maps it
    assert other.columns["x"][5, 0] == 100 and other.columns["more"][5, 0] == 20
    del other
    gc.collect()
    SHARED[label] = whole
    assert bytes_of(dataset) > 160_000
    with ShardedDataLoader(dataset, 10, pool=make_pool(method)) as loader:
        batch = next(iter(loader))
    assert (batch["x"][5] == -1).all() and (batch["more"][5] == -1).all() and batch["x"][6, 0] == 120


def test_read_only_arrays_stay_read_only(key: str) -> None:
    def make() -> Any:
        array = np.arange(10_000)
        array.flags.writeable = False
        return array

    array = share(make, key)
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1
    assert in_memory(array) and bytes_of(array) < 2000


@pytest.mark.parametrize("backend", ["memfd", "shm", "file"])
def test_any_memory_is_found_by_its_name_and_nothing_stays(
    backend: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARDED_LOADER_MEMORY", backend)
    first = share(data, key)
    _, kept = SHARED.popitem()  # as in another process
    second = share(data, key)
    assert (second.columns["x"] == first.columns["x"]).all() and not in_memory(first.columns["x"])
    assert len(inodes()) == 1
    del first, kept, second
    gc.collect()
    assert not descriptors()


def descriptors() -> list[int]:
    """Those of this process that hold shared memory."""
    numbers = (name.rsplit("/", 1)[-1] for name in links_of("sharded_loader-share-") if f"/{os.getpid()}/" in name)
    return list(map(int, numbers))


def inodes() -> set[int]:
    """Of the shared memory that this process has open."""
    return {os.fstat(number).st_ino for number in descriptors()}


@pytest.mark.parametrize("how", ["others may write to it", "another user's", "it was not written to its end"])
def test_what_may_not_be_ours_is_not_unpickled(how: str, key: str) -> None:
    dataset = share(data, key)
    SHARED.clear()  # as in another process
    fd = descriptors()[0]
    if how.startswith("others"):
        os.fchmod(fd, 0o622)
    elif how.startswith("another"):
        if os.getuid():
            pytest.skip("only root gives files away")
        os.fchown(fd, 65534, -1)
    else:
        os.pwrite(fd, bytes(16), 0)
    other = share(data, key)
    assert (other.columns["x"] == dataset.columns["x"]).all() and len(inodes()) == 2  # it was built again


def test_threads_build_once(key: str) -> None:
    made, found, barrier = [], [], threading.Barrier(4)

    def make() -> Any:
        made.append(1)
        return np.arange(10_000)

    def work() -> None:
        barrier.wait()
        found.append(share(make, key))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [1] and all(np.shares_memory(one, found[0]) for one in found)


def test_a_dropped_dataset_is_built_again(key: str) -> None:
    made = []

    def make() -> Any:
        made.append(1)
        return np.arange(10_000)

    for _ in range(2):
        array = share(make, key)
        row = array[5:6]
        del array
        assert share(make, key)[5] == row[0]
        del row
        gc.collect()
        assert not SHARED and not descriptors()
    assert made == [1, 1]


def test_without_proc_each_process_builds_and_leaves_nothing(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shared, "HAS_LINKS", False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    first = share(data, key)
    assert bytes_of(first) < 15_000 and len(os.listdir(tmp_path)) == 1  # spawned workers map the file
    del first
    gc.collect()
    assert os.listdir(tmp_path) == []


# -- bad input ---------------------------------------------------------------------------------------------------------


def made(value: int) -> Any:
    return lambda: np.full(10_000, value)


def of_split(split: str) -> Any:
    return np.array([split] * 1000)


class Makes:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> Any:
        return np.zeros(10_000)


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (data, Makes("a"), "make_dataset was data .*, and here it is Makes"),
        (lambda: np.zeros(9999), lambda: np.ones(9999), "the digest of its code was .*, and here it is"),
        (made(1), made(2), "variable value was 1, and here it is 2"),
        (partial(of_split, "train"), partial(of_split, split="val"), "argument 0 was 'train', and here it is None"),
        (Makes("a"), Makes("b"), "path was 'a', and here it is 'b'"),
    ],
)
def test_another_function_with_the_same_key_is_an_error(one: Any, other: Any, message: str, key: str) -> None:
    dataset = share(one, key)
    with pytest.raises(ValueError, match=message):
        share(other, key)
    del dataset


class Opens:
    def __init__(self) -> None:
        self.x = np.zeros(10_000)
        self.inside = {"log": threading.Lock()}


def cached() -> Any:
    return SimpleDataset(range(10)).transform(np.ones).cache("1 MB")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Opens, r"dataset\.inside\['log'\] \(lock\) cannot be pickled"),
        (cached, r"dataset\._store \(Store\) cannot be pickled \(a cache in memory: call cache\(...\) on what share"),
        (lambda: (number for number in range(3)), r"dataset \(generator\) cannot be pickled"),
    ],
)
def test_what_cannot_be_shared_is_an_error_that_names_it(make: Any, message: str, key: str) -> None:
    for _ in range(2):
        with pytest.raises(TypeError, match=message):
            share(make, key)
    assert not SHARED and not descriptors()


def test_large_python_objects_are_a_warning(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "MOST_PICKLED", 10_000)
    with pytest.warns(LoaderWarning, match="the dataset has .* bytes of Python objects"):
        share(lambda: ArrayDataset(np.zeros((1000, 10)), [f"name {number}" for number in range(1000)]), key)


@pytest.mark.parametrize("make", [lambda: {"a": 1}, lambda: SimpleDataset(["a"])])
def test_what_has_no_arrays_is_built_once_too(make: Any, key: str) -> None:
    made = []

    def counted() -> Any:
        made.append(1)
        return make()

    first, second = share(counted, key), share(counted, key)
    assert type(first) is type(second) and made == [1]
    shared._kept.clear()


def test_a_function_that_shares_its_own_key_is_an_error(key: str) -> None:
    with pytest.raises(RuntimeError, match="use another key inside"):
        share(lambda: share(data, key), key)


@pytest.mark.parametrize("wrong", [3, None, "", b"key"])
def test_a_key_is_a_text(wrong: Any) -> None:
    with pytest.raises(TypeError, match="give a text that names the data"):
        share(data, wrong)


def test_a_dataset_in_the_place_of_its_function_is_an_error(key: str) -> None:
    with pytest.raises(TypeError, match="share needs a function that makes the dataset"):
        share(np.zeros(3), key)  # type: ignore[arg-type]


def test_a_class_that_this_process_does_not_have_is_an_error(key: str) -> None:
    class Gone:
        pass

    Gone.__qualname__ = "Gone"
    globals()["Gone"] = Gone
    dataset = share(Gone, key)
    del globals()["Gone"]
    with pytest.raises(TypeError, match="run the same program on all ranks"):
        share(Gone, key)
    del dataset


def test_a_signal_in_make_dataset_is_raised_as_it_is(key: str) -> None:
    with pytest.raises(KeyboardInterrupt):
        share(lambda: signal.raise_signal(signal.SIGINT), key)
    assert share(lambda: np.zeros(2000), key).sum() == 0


def test_columns_of_arrow_and_pandas_are_mapped(key: str) -> None:
    arrow, pandas = pytest.importorskip("pyarrow"), pytest.importorskip("pandas")

    def make() -> Any:
        table = arrow.table({"x": np.arange(50_000), "text": [f"text {number}" for number in range(50_000)]})
        return table, pandas.DataFrame({"x": np.arange(50_000), "y": np.ones(50_000)}), table.to_pandas()

    table, frame, both = share(make, key)
    assert bytes_of((table, frame)) < 5000
    assert table["text"][40_000].as_py() == "text 40000" and frame["x"].sum() == sum(range(50_000))
    assert both["text"][7] == "text 7"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_four_ranks_with_two_workers_each_hold_one_copy(method: str) -> None:
    from benchmarks.shared import ROW, SMALL, measure

    rows = 800
    little, *_ = measure("share", method, SMALL, 4, 2)
    much, *_ = measure("share", method, SMALL + rows, 4, 2)
    assert (much - little) / (rows * ROW) <= 1.15
