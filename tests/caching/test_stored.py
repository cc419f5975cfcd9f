"""``cache(...)``: the samples are those without a cache, in every pool, and each is read once."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import PROCESS_POOLS, covering, make_pool
from samples import Told
from torch.utils.data import Subset

import sharded_loader
from sharded_loader import ShardedDataLoader, SimpleDataset, interleave, sample_generator, sample_rng
from sharded_loader.base.errors import notes_of
from sharded_loader.caching import shared
from sharded_loader.caching.dataset import StoredDataset
from sharded_loader.data.bulk import NOT_IN_BULK, as_bulk
from sharded_loader.data.datasets import SubsetDataset
from sharded_loader.instruments.stats import held_by_caches

COUNT = 24


class Files:
    """Samples that are read one by one; the file notes each read."""

    def __init__(self, kind: str, notes: Path | None = None) -> None:
        self.kind, self.notes = kind, notes

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        if self.notes is not None:
            with open(self.notes, "a") as file:
                file.write(f"{index}\n")
        return KINDS[self.kind](index)

    def reads(self) -> list[int]:
        assert self.notes is not None
        return [int(line) for line in self.notes.read_text().split()]


class InBulk(Files):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


def of(fn: Callable[[int], Any]) -> SimpleDataset:
    return SimpleDataset(range(COUNT)).transform(fn)


KINDS: dict[str, Callable[[int], Any]] = {
    "image": lambda i: np.full((8, 8, 3), i, np.uint8),
    "tuple": lambda i: (np.full(4, i, np.float32), i, i / 7, np.float32(i)),
    "dict": lambda i: {"x": torch.full((3,), i), "y": {"z": np.int16(i), "flag": i % 2 == 0}},
    "constant text": lambda i: (np.full(4, i), "train"),
    "texts": lambda i: {"x": np.full(2, i), "name": f"é{i}" * i, "raw": bytes([i] * i)},
    "ragged": lambda i: ([i] * 9, [float(i)], (i, [i])),
    "lengths": lambda i: np.arange(i % 7, dtype=np.float32),
    "bfloat16": lambda i: torch.full((2,), i, dtype=torch.bfloat16),
}


def batches_of(dataset: Any, pool: Any, epochs: int = 2, **options: Any) -> list[str]:
    with ShardedDataLoader(dataset, 5, shuffle=True, seed=3, pool=pool, **options) as loader:
        return [repr(batch) for _ in range(epochs) for batch in loader]


@covering(pool=("inline", "thread", *PROCESS_POOLS), kind=KINDS, where=("free", "memory", "file", "small"))
def test_batches_are_those_without_a_cache(pool: str, kind: str, where: str, tmp_path: Path) -> None:
    source = Files(kind)
    bounds: dict[str, Any] = {"free": {}, "memory": {"max_bytes": "1 MB"}, "file": {"path": tmp_path / "it.cache"}}
    cached = SimpleDataset(source).cache(**bounds.get(where, {"max_bytes": 400}))
    options = {"batchify_fn": list} if kind == "lengths" else {}
    expected = batches_of(source, make_pool("inline"), epochs=3, **options)
    assert batches_of(cached, make_pool(pool), epochs=3, **options) == expected
    assert isinstance(cached, StoredDataset) and (cached.cached == COUNT or where == "small")
    assert where != "small" or 0 < cached.counts[2] <= 400
    assert os.listdir(tmp_path) == (["it.cache"] if where == "file" else [])


@pytest.mark.parametrize("source", [Files, InBulk])
@pytest.mark.parametrize("where", ["memory", "file"])
def test_each_sample_is_read_once(pool: Any, where: str, source: Any, tmp_path: Path) -> None:
    files = source("tuple", tmp_path / "notes")
    cached = SimpleDataset(files).cache("1 MB", tmp_path / "it.cache" if where == "file" else None)
    with ShardedDataLoader(cached, 5, shuffle=True, seed=1, pool=pool, prefetch=1) as loader:
        for _ in loader:
            pass
        before = len(files.reads())
        assert sorted(set(files.reads())) == list(range(COUNT))
        for _ in range(2):
            for _ in loader:
                pass
        stats = loader.stats()
    assert len(files.reads()) <= before + 2 * 5  # of the next epoch, what was prefetched before a sample was stored
    assert stats.cache_misses >= COUNT and stats.cache_hits >= 2 * COUNT - 10 and stats.cache_bytes > COUNT * 16
    assert stats.cache_hits + stats.cache_misses >= 3 * COUNT


def test_the_statistics_of_epochs_add_up() -> None:
    cached = SimpleDataset(Files("image")).cache("1 MB")
    with ShardedDataLoader(cached, 6) as loader:
        for _ in range(3):
            list(loader)
        first, second, third = (loader.stats(epoch) for epoch in range(3))
        assert (first.cache_hits, first.cache_misses, first.cache_bytes) == (0, COUNT, COUNT * 192)
        assert (second.cache_hits, second.cache_misses, second.cache_bytes) == (COUNT, 0, 0)
        assert third.cache_hits == COUNT and loader.stats().cache_hits == 2 * COUNT
        assert loader.stats().cache_bytes == COUNT * 192


def test_columns_are_gathered_once_all_are_stored() -> None:
    dataset = SimpleDataset(Files("dict")).cache("1 MB")
    gather = as_bulk(dataset)
    assert gather is not None and gather([1, 2], np.empty) is NOT_IN_BULK
    first = dataset.get_batch([1, 2])
    second = gather([2, -1, 1][::2], np.empty)
    assert sorted(first) == sorted(second) == ["x", "y"]
    assert second["x"].tolist() == [[2] * 3, [1] * 3] and second["y"]["flag"].tolist() == [True, False]
    part = dataset.take(4)[1:]
    found = as_bulk(part)
    assert found is not None and found([0, 1], np.empty)["x"].tolist() == [[1] * 3, [2] * 3]
    assert as_bulk(dataset.transform(lambda x: x)) is None


def augment(*fields: Any) -> Any:
    return fields, random.random(), sample_rng().random(), torch.rand(1).item()


@covering(pool=("inline", "thread", *PROCESS_POOLS), kind=("tuple", "ragged"))
@pytest.mark.costly
def test_what_comes_behind_stays_random_and_the_same(pool: str, kind: str) -> None:
    plain = SimpleDataset(Files(kind))
    cut: list[Callable[[Any], Any]] = [
        lambda one: one,
        lambda one: one.shard(2, 1),
        lambda one: SimpleDataset(Subset(one, [3, 1, 7, 2])),
        lambda one: one + one.take(3),
    ]
    found = [part(plain.cache("1 MB")).transform(augment, seeded=True) for part in cut]
    wanted = [part(plain).transform(augment, seeded=True) for part in cut]
    for one, other in zip(found, wanted, strict=True):
        batches = batches_of(one, make_pool(pool))
        assert batches == batches_of(other, make_pool("inline"))
        assert batches[: len(batches) // 2] != batches[len(batches) // 2 :]


# -- what may not be cached --------------------------------------------------------------------------------------------


class Own:
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __call__(self, x: Any) -> Any:
        return self.rng.random()


def seeded(x: Any) -> Any:
    with sharded_loader.sample_seed():
        return random.random()


DRAWS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sample_rng": (lambda d: d.transform(lambda x: sample_rng().random()), r"sample_rng\(\) is called below cache"),
    "sample_rng of an index": (lambda d: d.transform(lambda x: sample_rng(1).random()), r"sample_rng\(\)"),
    "generator": (lambda d: d.transform(lambda x: torch.rand(1, generator=sample_generator())), "sample_generator"),
    "sample_seed": (lambda d: d.transform(seeded), r"sample_seed\(\) is called below"),
    "seeded transform": (lambda d: d.transform(lambda x: x, seeded=True), r"transform\(fn, seeded=True\) is called"),
    "random": (lambda d: d.transform(lambda x: (x, random.random() > 2)), "sample 0 draws from random: move"),
    "NumPy": (lambda d: d.transform(lambda x: np.random.rand()), "sample 0 draws from numpy.random: move"),
    "torch": (lambda d: d.transform(lambda x: torch.rand(1)), "sample 0 draws from torch: move"),
    "both": (lambda d: d.transform(lambda x: (random.random(), torch.rand(1))), "draws from random, torch: move"),
    "its own generator": (lambda d: d.transform(Own()), r"draws from the generator of dataset\._fn\.rng"),
    "nothing known": (lambda d: d.transform(lambda x: os.urandom(8)), "two reads give two samples"),
    "inside others": (lambda d: d.transform(lambda x: sample_rng().random()).take(3) + [1.0], r"sample_rng\(\)"),
    "epoch": (lambda d: SimpleDataset(Told()), "has set_epoch, so they depend on the epoch: cache the"),
    "mixture": (lambda d: SimpleDataset(interleave([[1, 2], [3]], [1, 1], shuffle=True)), "has set_epoch"),
}


@pytest.mark.parametrize("bounds", [[], ["1 MB"]], ids=["free", "1 MB"])
@pytest.mark.parametrize(("wrap", "text"), DRAWS.values(), ids=DRAWS)
def test_what_is_random_below_the_cache_is_named(wrap: Callable[[Any], Any], text: str, bounds: list[str]) -> None:
    with pytest.raises(ValueError, match=text):
        wrap(SimpleDataset(Files("image"))).cache(*bounds)


def test_a_cache_says_that_it_reads_sample_0_and_what_to_do_if_it_is_broken() -> None:
    def decode(index: int) -> int:
        return 10 // index

    files = SimpleDataset(range(4)).transform(decode)
    with pytest.raises(ZeroDivisionError) as caught:
        files.cache()
    assert notes_of(caught.value)[-1].endswith("read sample 0. If it is broken, leave it out: dataset[1:].cache(...)")
    assert list(files[1:].cache()) == [10, 5, 3]


LATE: dict[str, tuple[Callable[[int], Any], type[Exception], str]] = {
    "draws": (lambda i: sample_rng().random() if i == 7 else i, ValueError, r"sample_rng\(\) is called below cache"),
    "cannot be stored": (
        lambda i: {"when": np.array([None]) if i == 7 else i},
        TypeError,
        r"sample 7 cannot be cached: field \['when'\] of the sample is an? ndarray",
    ),
}


@pytest.mark.costly
@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("bounds", [[], ["1 MB"]], ids=["free", "1 MB"])
def test_a_later_sample_that_may_not_be_cached_is_named(pool: Any, bounds: list[str], late: str) -> None:
    fn, error, said = LATE[late]
    with ShardedDataLoader(of(fn).cache(*bounds), 4, pool=pool) as loader:
        with pytest.raises(error, match=said) as caught:
            list(loader)
        assert "sample 7" in f"{caught.value} {caught.value.__notes__}"  # type: ignore[attr-defined]


def test_a_dataset_that_changes_is_an_error() -> None:
    data = [1, 2, 3]
    cached = SimpleDataset(data).cache("1 MB")
    assert cached[2] == 3
    data.append(4)
    for read in (lambda: cached[0], lambda: cached.get_batch([0]), lambda: list(cached)):
        with pytest.raises(ValueError, match="has 4 samples, and had 3 when it was cached: call cache"):
            read()


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "key": ({"max_bytes": 9, "key": 3}, TypeError, r"cache\(key=3\): give a text"),
    "no folder": ({"path": "/nowhere/at/all/it"}, OSError, "No such file or directory: '/nowhere/at/all'"),
    "a folder": ({"path": "/"}, OSError, "cannot be opened|is no file"),
    "path": ({"path": 3.5}, TypeError, "PathLike"),
    "a space": ({"max_bytes": "50 %"}, ValueError, "give 0 or more, a share of what is free, such as '50%', or a text"),
    "more than all": ({"max_bytes": "101%"}, ValueError, "give 0 or more, a share of what is free"),
    "nothing": ({"max_bytes": "0%"}, ValueError, "give 0 or more, a share of what is free"),
    "negative": ({"max_bytes": -1}, ValueError, "max_bytes is -1: give 0 or more"),
    "beyond the machine": ({"max_bytes": "100000 TB"}, ValueError, "leaves .* bytes: give less, or a share"),
    "beyond the disk": ({"max_bytes": "100000 TB", "path": "it"}, ValueError, "leaves .* bytes: give less, or a share"),
}


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD.values(), ids=BAD)
def test_bad_arguments_get_advice(
    arguments: dict[str, Any], kind: type[Exception], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=text):
        SimpleDataset([1, 2]).cache(**arguments)


def test_small_datasets_and_bounds_work(tmp_path: Path) -> None:
    assert list(SimpleDataset([]).cache("1 MB")) == [] and list(SimpleDataset([]).cache(path=tmp_path / "it")) == []
    one = SimpleDataset([5]).cache(0)
    assert [one[0], one[-1]] == [5, 5] and one.cached == 0
    assert list(SimpleDataset([{}, {"a": 1}, ()]).cache("1 MB")) == [{}, {"a": 1}, ()]


def grow(image: Any) -> Any:
    image += 1  # in place
    return image


FORMS: dict[str, dict[str, Any]] = {
    "free": {},
    "key": {"key": "a"},
    "bound": {"max_bytes": "1 MB"},
    "too small": {"max_bytes": 192},
    "file": {"path": "it"},
}


@covering(pool=("inline", "thread", *PROCESS_POOLS), form=FORMS, source=(Files, InBulk))
def test_a_sample_that_is_changed_in_place_changes_no_other(
    pool: str, form: str, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cached = SimpleDataset(source("image")).cache(**FORMS[form])
    dataset = SubsetDataset(cached, [3, 3, 5, 3]).transform(grow)
    with ShardedDataLoader(dataset, 4, pool=make_pool(pool)) as loader:
        assert [batch[:, 0, 0, 0].tolist() for _ in range(3) for batch in loader] == [[4, 4, 6, 4]] * 3


def test_one_sample_that_is_too_large_does_not_keep_the_others_out() -> None:
    cached = of(lambda i: np.zeros(4000) if i == 0 else np.full(10, i)).cache(10_000)
    for _ in range(2):
        assert [len(sample) for sample in cached] == [4000] + [10] * (COUNT - 1)
    assert cached.cached == COUNT - 1 and cached.counts[:2] == (COUNT - 1, COUNT + 1)


@pytest.mark.parametrize("room", [0, 9 * 192 + 191])
def test_a_full_cache_costs_nothing(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = SimpleDataset(Files("image")).cache(room)
    expected = list(map(repr, cached))
    monkeypatch.setattr("sharded_loader.caching.store.flat", None)  # no sample is looked at any more
    assert list(map(repr, cached)) == expected and cached.cached == room // 192


def test_the_dtype_of_a_single_text_is_that_of_its_array(tmp_path: Path) -> None:
    texts = SimpleDataset([np.array("ab", "U9"), np.array("abcdefghi")])
    for _ in range(2):
        cached = texts.cache(path=tmp_path / "it")
        assert [[sample.dtype.str for sample in cached] for _ in range(2)] == [["<U9", "<U9"]] * 2
    assert cached.counts[:2] == (4, 0)


# -- who shares it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PROCESS_POOLS)
def test_a_worker_that_is_killed_changes_nothing(method: str) -> None:
    expected = batches_of(Files("texts"), make_pool("inline"), epochs=3)
    cached = SimpleDataset(Files("texts")).cache("1 MB")
    found = []
    with ShardedDataLoader(cached, 5, shuffle=True, seed=3, pool=make_pool(method)) as loader:
        for epoch in range(3):
            for number, batch in enumerate(loader):
                found.append(repr(batch))
                if epoch < 2 and number == 2:
                    os.kill(loader.pool.pids[0], signal.SIGKILL)  # type: ignore[attr-defined]
    assert found == expected and cached.cached == COUNT


def test_a_copy_and_other_loaders_share_the_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(path: Path | None) -> None:
        cached = SimpleDataset(Files("ragged")).cache("1 MB", path)
        again = pickle.loads(pickle.dumps(cached))
        assert again[3] == cached[3] and again.counts == (1, 1, cached.counts[2])
        assert again.cached == 1
        before = cached.counts
        batches_of(cached, make_pool("thread"), epochs=1)
        batches_of(cached.take(10), make_pool("inline"), epochs=1)
        assert held_by_caches(cached)[:2] == (before[0] + 11, before[1] + COUNT - 1)

    check(None)
    check(tmp_path / "it")
    with pytest.raises(sharded_loader.CacheMismatchError, match="the key of .* is None, and here 'b'"):
        SimpleDataset(Files("ragged")).cache(path=tmp_path / "it", key="b")
    (tmp_path / "more").mkdir()
    monkeypatch.setattr(shared, "HAS_LINKS", False)  # without /proc, the memory is a file that goes
    monkeypatch.setattr(shared.tempfile, "tempdir", str(tmp_path / "more"))
    check(None)
    assert os.listdir(tmp_path / "more") == []


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the memory of a process has a name")
def test_a_copy_that_outlives_the_memory_reads_uncached(tmp_path: Path) -> None:
    cached = SimpleDataset(Files("ragged")).cache("1 MB")
    pickled = pickle.dumps(cached)
    del cached
    again = pickle.loads(pickled)
    assert again[3] == KINDS["ragged"](3) and again.cached == 0 and again.counts == (0, 1, 0)
    assert "StoredDataset" not in repr(again)


def test_a_program_may_end_with_a_cache(tmp_path: Path) -> None:
    """The interpreter clears modules before the last objects: here what the lock of files is made of."""
    program = (
        "from sharded_loader import SimpleDataset\nfrom sharded_loader.caching import shared\n"
        f"caches = [SimpleDataset([1, 2]).cache(99), SimpleDataset([1]).cache(path={str(tmp_path / 'it')!r})]\n"
        "print(caches[0][1])\nshared._file_lock = None\n"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("2\n", "")


def test_shards_are_not_fetched_for_samples_that_are_there() -> None:
    told = []

    class Shards(SimpleDataset):
        def follow(self, batches: Any, position: Any, later: Any) -> None:
            told.append(batches(0).tolist())

    from sharded_loader.data.datasets import follow

    cached = Shards(range(9)).cache("1 MB")
    cached[2], cached[3]
    follow(cached, lambda number: np.array([1, 2, 3, 4]), lambda: 0, lambda number: None)
    assert told == [[1, 4]]


@pytest.mark.parametrize("bounds", [[], ["1 MB"]], ids=["free", "1 MB"])
def test_a_sample_that_is_stored_is_awaited_too(bounds: list[Any]) -> None:
    class Answers(Files):
        async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
            return np.full(3, index)

    cached = SimpleDataset(Answers("")).cache(*bounds)

    async def read() -> Any:
        return [cached[2].tolist() for _ in range(2)] + [len(cached[:3][2])]

    assert asyncio.run(read()) == [[2] * 3, [2] * 3, 3]
    assert [sample.tolist() for sample in cached.take(3)] == [[i] * 3 for i in range(3)]
