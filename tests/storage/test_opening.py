"""A dataset opens without reading data: heads and footers, a list, or one index file beside the shards."""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fsspec
import hypothesis
import numpy as np
import pytest
from conftest import POOLS, make_pool
from hypothesis import strategies as st
from shards import Served, closed, number, serves, tar_of_numbers, write_mds, write_tar  # noqa: F401

from sharded_loader import (
    ImageFolderDataset,
    LoaderWarning,
    RecordFileDataset,
    ShardCache,
    ShardDataset,
    ShardedDataLoader,
    TokenWindows,
    lengths_of,
)
from sharded_loader.cli import main
from sharded_loader.recordio import MXRecordIO
from sharded_loader.storage import dataset as dataset_module
from sharded_loader.storage import indexes as indexes_module
from sharded_loader.storage import indexes as module
from sharded_loader.storage import stores
from sharded_loader.storage.files import ForbiddenShardError, ShardError, Stat
from sharded_loader.storage.indexes import _HEAD as HEAD
from sharded_loader.storage.indexes import VERSION, Indexes, decode_texts, dumped, encode_texts, loaded
from sharded_loader.storage.records import Lines
from sharded_loader.storage.stores import ObjectStore

SHARDS, LENGTH, SIZE = 3, 32, 64 << 10
TOTAL = SHARDS * LENGTH


def value(number: int) -> bytes:
    return random.Random(number).randbytes(SIZE)


def write_shard(path: Path, numbers: range) -> None:
    """A shard of the format that its name says."""
    values = [value(number) for number in numbers]
    if path.suffix == ".tar":
        write_tar(path, {f"{number:04}.bin": value(number) for number in numbers})
    elif path.suffix == ".rec":
        with MXRecordIO(str(path), "w") as file:
            for one in values:
                file.write(one)
    elif path.suffix == ".txt":
        path.write_text("".join(f"{one.hex()}\n" for one in values))
    elif path.suffix == ".mds":
        write_mds(path, {"bin": ("bytes", None)}, [[one] for one in values])
    else:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        found = pyarrow.table({"bin": values})
        if path.suffix == ".parquet":
            parquet.write_table(found, path, row_group_size=LENGTH // 2)
            return
        new = pyarrow.ipc.new_file if path.suffix == ".arrow" else pyarrow.ipc.new_stream
        with new(path, found.schema) as file:
            file.write_table(found, max_chunksize=LENGTH // 2)


SUFFIXES = (".tar", ".rec", ".txt", ".mds", ".parquet", ".arrow", ".feather")
SCANNED = (".tar", ".rec", ".txt", ".arrow", ".feather")


def content(sample: Any) -> bytes:
    if isinstance(sample, dict):
        return bytes(sample["bin"])
    return bytes.fromhex(sample) if isinstance(sample, str) else sample


def requests(dataset: ShardDataset) -> int:
    """How many requests it has made."""
    return dataset._shards.store.requests


def fill(served: Served, folder: Path, suffix: str = ".tar", shards: int = SHARDS) -> list[str]:
    """Have shards served; their URLs."""
    for shard in range(shards):
        path = folder / f"{shard}{suffix}"
        write_shard(path, range(shard * LENGTH, (shard + 1) * LENGTH))
        served.files[f"/{path.name}"] = path.read_bytes()
    return [f"{served.url}{name}" for name in served.files]


def bytes_sent(served: Served) -> int:
    """How many bytes of shards were sent."""
    sent = 0
    for path, wanted in served.asked:
        begin, end = (wanted or f"bytes=0-{1 << 40}").removeprefix("bytes=").split("-")
        sent += max(0, min(int(end) + 1, len(served.files.get(path, b""))) - int(begin))
    return sent


# -- what opening reads ------------------------------------------------------------------------------------------------


@pytest.mark.costly(4)
@pytest.mark.parametrize("room", [None, "1 GB"], ids=["in parts", "cache for all"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_opening_reads_no_data_of_any_format(served: Served, tmp_path: Path, suffix: str, room: str | None) -> None:
    urls = fill(served, tmp_path, suffix)
    cache = None if room is None else ShardCache(tmp_path / "cache", room)
    with_cache = {"cache": cache, "index_folder": tmp_path / "indexes"}
    dataset = ShardDataset(urls, **with_cache)  # type: ignore[arg-type]
    assert bytes_sent(served) <= (0 if suffix in SCANNED else sum(map(len, served.files.values())) / 1000)
    assert cache is None or cache.fetched == 0
    assert ("not counted yet: len() reads" in repr(dataset)) == (suffix in SCANNED)
    assert dataset.lengths.tolist() == [LENGTH] * SHARDS
    assert bytes_sent(served) <= 1.001 * sum(map(len, served.files.values())), "none is read twice to count"
    assert [content(dataset[number]) == value(number) for number in (TOTAL - 1, 0, 40)] == [True] * 3
    assert repr(dataset).endswith(f"{TOTAL} samples)")


def test_the_cost_of_the_length_is_told(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = fill(served, tmp_path)
    monkeypatch.setattr(dataset_module, "COSTLY_BYTES", 1 << 20)
    dataset = ShardDataset(urls, index_folder=tmp_path / "indexes")
    with pytest.warns(LoaderWarning, match=r"to count the samples, 6,\d+,\d+ bytes of 3 shards are read once.*index"):
        assert len(dataset) == TOTAL
    dataset.close()
    again = ShardDataset(urls, index_folder=tmp_path / "indexes")
    assert repr(again) == f"ShardDataset(3 tar shards, {TOTAL} samples)"  # without a warning: the indexes are kept


@pytest.mark.parametrize("kind", ["mosaic", "wids"])
def test_lengths_of_a_list_are_believed_until_the_shard_is_read(served: Served, tmp_path: Path, kind: str) -> None:
    urls = fill(served, tmp_path)
    counts = dict.fromkeys(urls, LENGTH)
    for correct in (True, False):
        counts[urls[1]] = LENGTH if correct else 7
        shards = [{"raw_data": {"basename": url}, "samples": n, "url": url, "nsamples": n} for url, n in counts.items()]
        served.files["/index.json"] = json.dumps({"shards" if kind == "mosaic" else "shardlist": shards}).encode()
        served.asked.clear()
        dataset = ShardDataset(f"{served.url}/index.json", index_folder=tmp_path / "indexes")
        assert dataset.lengths.tolist() == [*counts.values()]
        assert [path for path, _ in served.asked if path.endswith(".tar")] == []
        if correct:
            assert content(dataset[TOTAL - 1]) == value(TOTAL - 1)
        else:
            with pytest.raises(
                ShardError, match=r"1\.tar has 32 samples, and had 7 in the list that names it: correct"
            ):
                dataset[LENGTH]


def test_sixteen_heads_are_asked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(16, timeout=60)  # passes only when sixteen wait

    def stat(store: ObjectStore, url: str) -> Stat:
        together.wait()
        return Stat(5, "tag")

    monkeypatch.setattr(ObjectStore, "stat", stat)
    monkeypatch.setattr(ObjectStore, "beginning", lambda store, url, nbytes: (_ for _ in ()).throw(ForbiddenShardError))
    ShardDataset([f"http://host/{number}.tar" for number in range(32)])


@pytest.fixture
def memory() -> Iterator[Any]:
    """A folder in a store that lists: memory://opening."""
    system = fsspec.filesystem("memory")
    yield system
    if system.exists("/opening"):
        system.rm("/opening", recursive=True)


PATTERN = "memory://opening/*.txt"


def lines(memory: Any, count: int, first: int = 0) -> list[str]:
    """Shards of two lines each."""
    for shard in range(first, count):
        memory.pipe_file(f"/opening/{shard:05}.txt", b"%d\n%d\n" % (2 * shard, 2 * shard + 1))
    return [f"memory://opening/{shard:05}.txt" for shard in range(count)]


def indexed(memory: Any, folder: Path, count: int = 3) -> str:
    """The place of an index file of such shards."""
    lines(memory, count)
    return ShardDataset(PATTERN, index_folder=folder / "first").write_index()


def numbers(count: int) -> list[str]:
    return [str(number) for number in range(count)]


@pytest.mark.parametrize("may_list", [True, False])
def test_sizes_come_from_a_list_of_the_folder_if_it_may_be_read(memory: Any, monkeypatch: Any, may_list: bool) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError("AccessDenied: s3:ListBucket")

    urls = lines(memory, 40)
    if not may_list:
        monkeypatch.setattr(type(memory), "glob", forbidden)
        with pytest.raises(ForbiddenShardError, match=r"only forbids lists: give the names of the shards, or a file"):
            ShardDataset(PATTERN)
    dataset = ShardDataset(urls)
    assert requests(dataset) == (2 if may_list else 42)  # one for the index file, which is not there
    assert list(dataset) == numbers(80)


def test_whether_all_shards_fit_the_cache_is_asked_once(memory: Any, tmp_path: Path, monkeypatch: Any) -> None:
    added, excess = list[int](), dataset_module.Shards.excess

    def counted(shards: Any, which: Any) -> int:
        added.append(len(which))
        return excess(shards, which)

    monkeypatch.setattr(dataset_module.Shards, "excess", counted)
    cache = ShardCache(tmp_path / "cache", "1 MB")
    dataset = ShardDataset(lines(memory, 30), cache=cache, index_folder=tmp_path / "indexes")
    assert list(dataset) == numbers(60)
    assert added.count(30) < 3  # once for each shard: with 10,000, 8 s


# -- one index file ----------------------------------------------------------------------------------------------------


@pytest.mark.costly
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_with_an_index_file_opening_is_one_request(served: Served, tmp_path: Path, suffix: str) -> None:
    urls = fill(served, tmp_path, suffix)
    first = ShardDataset(urls, index_folder=tmp_path / "indexes")
    expected = list(first)
    written = first.write_index(tmp_path / "shards.index")
    first.close()
    served.files["/shards.index"] = Path(written).read_bytes()
    for given in (urls, f"{served.url}/shards.index"):
        served.asked.clear()
        dataset = ShardDataset(given, index_folder=tmp_path / f"other {type(given)}")
        assert dataset.lengths.tolist() == [LENGTH] * SHARDS and requests(dataset) == 1
        assert [path for path, _ in served.asked] == ["/shards.index"]
        assert list(map(content, dataset)) == list(map(content, expected))
        assert sum(path == "/shards.index" for path, _ in served.asked) == 1 + SHARDS  # a part of it for each shard


@pytest.mark.costly(2)
@pytest.mark.parametrize("method", POOLS)
def test_workers_read_by_the_index_file(served: Served, tmp_path: Path, method: str) -> None:
    served.files = {f"/{shard}.tar": tar_of_numbers(range(9 * shard, 9 * shard + 9)) for shard in range(3)}
    made = ShardDataset([f"{served.url}{name}" for name in served.files], index_folder=tmp_path / "indexes")
    served.files["/shards.index"] = Path(made.write_index(tmp_path / "remote.index")).read_bytes()
    dataset = ShardDataset(f"{served.url}/shards.index", index_folder=tmp_path / "others")
    with ShardedDataLoader(dataset.transform(number), 5, pool=make_pool(method), shuffle=True, seed=1) as loader:
        for _ in range(2):
            assert sorted(number for batch in loader for number in batch.tolist()) == list(range(27))


def test_ten_thousand_shards_open_with_one_small_request(memory: Any, tmp_path: Path) -> None:
    count, index = 10_000, dumped({"offsets": np.array([0, 2, 4]), "length": np.array(2)})
    urls = [f"memory://opening/{shard:05}.txt" for shard in range(count)]
    stats = [Stat(4, random.Random(shard).randbytes(16).hex()) for shard in range(count)]
    place = indexes_module.index_url(urls)
    assert place == "memory://opening/shards.index"
    memory.pipe_file(place, indexes_module.content(place, "lines", urls, stats, [(2, index)] * count))
    for given in (place, urls):
        dataset = ShardDataset(given, index_folder=tmp_path)
        assert len(dataset) == 2 * count and requests(dataset) == 1
    assert len(memory.cat_file(place)) > indexes_module.FIRST


def test_new_and_changed_shards_are_added_to_the_index_file(memory: Any, tmp_path: Path, monkeypatch: Any) -> None:
    indexed(memory, tmp_path)
    lines(memory, 5, 3)
    scanned: list[str] = []
    index = Lines.index
    monkeypatch.setattr(Lines, "index", lambda self, file: scanned.append(file.name) or index(self, file))
    text = r"shards\.index does not describe 2 of the shards, such as .*00003\.txt \(it is not listed\).*loader index"
    with pytest.warns(LoaderWarning, match=text):
        dataset = ShardDataset(PATTERN, index_folder=tmp_path / "second")
    dataset.write_index()
    assert sorted(scanned) == ["memory://opening/00003.txt", "memory://opening/00004.txt"]
    assert len(ShardDataset(PATTERN, index_folder=tmp_path / "third")) == 10
    memory.pipe_file("/opening/00001.txt", b"x\n\n\n")
    with pytest.warns(LoaderWarning, match=r"1 of the shards, such as .*00001\.txt \(it has changed since then"):
        dataset = ShardDataset(PATTERN, index_folder=tmp_path / "fourth")
    assert dataset.lengths.tolist() == [2, 3, 2, 2, 2] and list(dataset)[1:6] == ["1", "x", "", "", "4"]


def test_a_folder_is_copied_with_its_index_file(memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    indexed(memory, tmp_path)
    memory.get("/opening", str(tmp_path / "copy"), recursive=True)
    with monkeypatch.context() as patched:
        patched.setattr(Lines, "index", None)  # not called
        assert list(ShardDataset(tmp_path / "copy" / "*.txt", index_folder=tmp_path / "second")) == numbers(6)
    (tmp_path / "copy" / "00001.txt").write_bytes(b"x\n\ny\n"[:4])
    changed = ShardDataset(tmp_path / "copy" / "*.txt", index_folder=tmp_path / "second")
    with pytest.raises(
        ShardError, match=r"00001\.txt has changed since .*shards\.index was written.*sharded-loader index"
    ):
        changed[2]


@pytest.mark.parametrize("changed", [False, True])
def test_shards_are_uploaded_with_their_index_file(served: Served, tmp_path: Path, changed: bool) -> None:
    urls = fill(served, tmp_path)
    written = ShardDataset(tmp_path / "*.tar", index_folder=tmp_path / "first").write_index()
    served.files["/shards.index"] = Path(written).read_bytes()
    if changed:
        served.files["/0.tar"] = served.files["/0.tar"][::-1]
    dataset = ShardDataset(urls, index_folder=tmp_path / "second")
    assert dataset.lengths.tolist() == [LENGTH] * SHARDS and bytes_sent(served) == len(served.files["/shards.index"])
    assert content(dataset[TOTAL - 1]) == value(TOTAL - 1)
    if changed:
        with pytest.raises(ShardError, match=r"0\.tar has changed since .*shards\.index was written"):
            dataset[0]


# -- index files that do not fit ---------------------------------------------------------------------------------------


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda whole: b"", "is not an index file"),
    "nonsense": (lambda whole: b"<html>" * 50, "is not an index file"),
    "older": (
        lambda whole: whole[:8] + bytes([VERSION - 1]) + whole[9:],
        f"is an index file of version {VERSION - 1}, and this library",
    ),
    "cut": (lambda whole: whole[:-10], "is cut or damaged: it has"),
    "head only": (lambda whole: whole[:20], "is cut or damaged|is not an index file"),
    "one bit": (lambda whole: whole[:60] + bytes([whole[60] ^ 1]) + whole[61:], "is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_file_that_cannot_be_used_is_named(memory: Any, tmp_path: Path, damage: str) -> None:
    place, (change, text) = indexed(memory, tmp_path), DAMAGE[damage]
    memory.pipe_file(place, change(memory.cat_file(place)))
    with pytest.raises(
        ShardError, match=rf"shards\.index ({text}).*write it again \(sharded-loader index\), or delete it"
    ):
        ShardDataset(place)
    with pytest.warns(LoaderWarning, match=rf"shards\.index ({text}).*shards are indexed one by one"):
        dataset = ShardDataset(PATTERN, index_folder=tmp_path / "second")
    assert list(dataset) == numbers(6)


def parts_of(whole: bytes) -> list[Any]:
    """What an index file has: its table, and an index for each shard."""
    end = HEAD.size + HEAD.unpack_from(whole)[2]
    table = loaded(whole[HEAD.size : end])
    assert table is not None
    ends = [end, *(table["ends"] + end).tolist()]
    return [table, *(loaded(whole[begin:end]) for begin, end in itertools.pairwise(ends))]


CRAFTED: dict[str, Callable[[Any], Any]] = {
    "left out": lambda array: None,
    "empty": lambda array: array[:0],
    "text": lambda array: array.astype(str),
    "fractions": lambda array: array + 0.5,
    "complex": lambda array: array * 1j,
    "no numbers": lambda array: np.full(array.shape, np.nan),
    "negative": lambda array: array.astype(np.int64) - (1 << 50),
    "far": lambda array: np.full(array.shape, np.iinfo(np.int64).max),
    "one number": lambda array: np.array(7),
    "long": lambda array: np.full(1 << 16, -1, np.int64),
}


@pytest.mark.parametrize("crafted", CRAFTED)
@pytest.mark.parametrize(
    ("suffix", "array"),
    [(None, name) for name in ("format", "names", "tags", "lengths", "ends")]
    + [(".txt", "offsets"), (".txt", "length"), (".txt", "checksums"), (".tar", "offsets"), (".tar", "sizes")]
    + [(".tar", "keys"), (".tar", "headers"), (".mds", "offsets"), (".mds", "encodings"), (".rec", "offsets")]
    + [(".parquet", "ends"), (".parquet", "footer"), (".arrow", "ends")]
    + [(".feather", "begins"), (".feather", "stops")],
)
def test_an_index_file_that_lies_is_named(tmp_path: Path, suffix: str | None, array: str, crafted: str) -> None:
    """Its hashes are right. What it says is impossible."""
    write_shard(tmp_path / f"0{suffix or '.txt'}", range(3))
    place = Path(ShardDataset(tmp_path / f"0{suffix or '.txt'}", index_folder=tmp_path / "first").write_index())
    parts = parts_of(place.read_bytes())
    changed = parts[0 if suffix is None else 1]
    if (value := CRAFTED[crafted](np.atleast_1d(changed.pop(array)))) is not None:
        changed[array] = value
    if suffix is not None:
        parts[0]["ends"] = np.array([len(dumped(parts[1]))])
    table, index = map(dumped, parts)
    head = HEAD.pack(*HEAD.unpack_from(place.read_bytes())[:2], len(table), HEAD.size + len(table) + len(index))
    place.write_bytes(head + table + index)
    with pytest.raises(ShardError, match=r"shards\.index"), ExitStack() as opened:
        dataset = ShardDataset(place, index_folder=tmp_path / "second")
        opened.callback(dataset.close)
        _ = suffix is not None and dataset.group_lengths
        list(dataset)


@pytest.mark.parametrize("crafted", [lambda array: array[::-1], lambda array: array + 512], ids=["swapped", "moved"])
def test_an_index_with_wrong_offsets_gives_no_wrong_samples(tmp_path: Path, crafted: Any) -> None:
    write_shard(tmp_path / "0.tar", range(3))
    dataset = ShardDataset(tmp_path / "0.tar", index_folder=tmp_path)
    [place] = tmp_path.glob("*.arrays")
    index = loaded(place.read_bytes()) or {}
    place.write_bytes(dumped({**index, "offsets": crafted(index["offsets"])}))
    with pytest.raises(ShardError, match=r"0\.tar, offset \d+: not the header .*Make the dataset again"):
        dataset.__getitems__([0, 2])


@pytest.mark.parametrize("later", ["cut", "deleted", "of others"])
def test_an_index_file_that_changes_under_way_is_done_without(
    memory: Any, tmp_path: Path, later: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "PAUSE", 0.001)
    place = indexed(memory, tmp_path)
    dataset = ShardDataset(PATTERN, index_folder=tmp_path / "second")
    whole = memory.cat_file(place)
    memory.rm(place)
    if later != "deleted":
        memory.pipe_file(place, whole[:80] if later == "cut" else whole[::-1])
    assert list(dataset) == numbers(6)
    [record] = caplog.records
    assert "was deleted, cut or written again since the dataset was made" in record.getMessage()


def test_shards_without_a_version_have_no_index_file(served: Served, tmp_path: Path) -> None:
    served.tag = None
    with pytest.warns(LoaderWarning, match="neither an ETag"):
        dataset = ShardDataset(fill(served, tmp_path, ".mds"), index_folder=tmp_path / "indexes")
    with pytest.raises(ShardError, match=r"0\.mds: its server names no versions, so an index file cannot tell"):
        dataset.write_index(tmp_path / "shards.index")


def test_the_place_of_an_index_file_must_be_known(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("one")
    dataset = ShardDataset([tmp_path / "a.txt", tmp_path / "b.txt"], index_folder=tmp_path / "indexes")
    with pytest.raises(ValueError, match=r"give the index file a name that ends in \.index, not"):
        dataset.write_index(tmp_path / "shards.json")
    assert indexes_module.index_url(["/a/x/1.tar", "/a/x-y/1.tar", "/a/x/z/1.tar"]) == "/a/shards.index"
    assert (
        indexes_module.index_url(["s3://b/1.tar?key=1"]) is None
        and indexes_module.index_url(["s3://b/1.tar", "/b/2.tar"]) is None
    )


def count_of(urls: list[str], folder: Path) -> int:
    dataset = ShardDataset(urls, index_folder=folder)
    length = len(dataset)
    dataset.close()
    return length


def test_one_of_several_datasets_indexes_and_the_others_wait(served: Served, tmp_path: Path) -> None:
    urls, together = fill(served, tmp_path), threading.Barrier(4)
    with ThreadPoolExecutor(4) as threads:
        counts = [threads.submit(lambda: (together.wait(), count_of(urls, tmp_path / "indexes"))[1]) for _ in range(4)]
    assert [count.result() for count in counts] == [TOTAL] * 4
    assert bytes_sent(served) == sum(map(len, served.files.values()))


def test_a_folder_without_locks_is_used_without_them(served: Served, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(indexes_module, "lock_at", Mock(side_effect=NotImplementedError("no flock")))
    assert [count_of(fill(served, tmp_path), tmp_path / "indexes") for _ in range(2)] == [TOTAL] * 2
    assert bytes_sent(served) == sum(map(len, served.files.values()))


STAT = Stat(100, "first")


MADE = {"offsets": np.arange(3), "length": np.array(2)}


def test_an_index_is_made_once_in_the_folder_that_was_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make, folder = Mock(return_value=MADE), tmp_path / "not" / "there"
    monkeypatch.chdir(tmp_path)
    indexes = Indexes(Path("not") / "there")
    monkeypatch.chdir("/")
    for one in (indexes, Indexes(folder)):
        found = one.of("tar", "s3://b/a.tar", STAT, make)
        assert found["offsets"].tolist() == [0, 1, 2] and int(found["length"]) == 2
    make.assert_called_once()
    assert [path.suffix for path in folder.iterdir() if path.is_file()] == [".arrays"]


@pytest.mark.parametrize(
    "changed",
    [("mds", "s3://b/a.tar", STAT), ("tar", "s3://b/c.tar", STAT), ("tar", "s3://b/a.tar", Stat(100, "second")), None],
)
def test_another_shard_has_another_index(tmp_path: Path, changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, indexes = Mock(return_value=MADE), Indexes(tmp_path)
    indexes.of("tar", "s3://b/a.tar", STAT, make)
    if changed is None:  # as of another version
        monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    indexes.of(*(changed or ("tar", "s3://b/a.tar", STAT)), make)
    assert make.call_count == 2


def test_names_and_tags_need_not_be_utf_8(served: Served, tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff.txt")
    try:
        path.write_text("here\n")
    except OSError:
        pytest.skip("names of files are UTF-8 here")
    served.files, served.tag = {"/a.txt": b"there\n"}, "\xe9"
    remote = ShardDataset(f"{served.url}/a.txt", cache=ShardCache(tmp_path / "cache", "1 MB"))
    assert list(remote) == ["there"]
    assert list(ShardDataset(tmp_path / "*.txt", index_folder=tmp_path)) == ["here"]


@pytest.mark.parametrize("damage", ["", "nonsense", "cut", "a byte"])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: str) -> None:
    make, indexes = Mock(return_value=MADE), Indexes(tmp_path)
    indexes.of("tar", "a.tar", STAT, make)
    [path] = tmp_path.glob("*.arrays")
    whole = path.read_bytes()
    for at in range(0, len(whole), 5) if damage == "a byte" else ():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 32]) + whole[at + 1 :])
        assert module.load(path) is None, at
    if damage != "a byte":
        path.write_bytes(whole[:-30] if damage == "cut" else damage.encode())
    for _ in range(2):
        assert indexes.of("tar", "a.tar", STAT, make)["offsets"].tolist() == [0, 1, 2]
    assert make.call_count == 2


def test_a_folder_that_cannot_be_written_to_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    make, indexes = Mock(return_value=MADE), Indexes(tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot be kept in .*index_folder="):
        indexes.of("tar", "a.tar", STAT, make)
    indexes.of("tar", "a.tar", STAT, make)
    assert make.call_count == 2


@hypothesis.given(st.lists(st.text()), st.data())
def test_texts_come_back(texts: list[str], data: st.DataObject) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    assert decode_texts(encode_texts(texts)) == texts
    if texts:
        which = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert decode_texts(encode_texts(texts), which) == [texts[i] for i in which]


def test_one_of_many_texts_does_not_take_the_memory_of_all() -> None:
    texts = encode_texts(list(map(str, range(200_000))))
    tracemalloc.start()
    try:
        assert decode_texts(texts, [7, 199_999]) == ["7", "199999"]
        assert tracemalloc.get_traced_memory()[1] < 200_000  # it was 1.6 MB in each read
    finally:
        tracemalloc.stop()


def open_picture(path: Path) -> Any:
    return ImageFolderDataset(path.parent.parent)[0]


def open_index_of_records(path: Path) -> Any:
    with MXRecordIO(str(path.with_suffix(".rec")), "w") as file:
        file.write(b"record")
    return RecordFileDataset(path.with_suffix(".rec"))


def open_replaced_shard(path: Path) -> Any:
    os.rename(path, pipe := path.with_name("pipe"))
    path.write_text("one line\n")
    dataset = ShardDataset(path, index_folder=path.parent / "indexes")
    os.replace(pipe, path)
    return dataset[0]


def open_beside(path: Path) -> Any:
    """The index file beside shards is not read."""
    (path.parent / "a.txt").write_text("one line\n")
    with pytest.warns(LoaderWarning, match="it is not a file"):
        assert len(ShardDataset(path.parent / "a.txt", index_folder=path.parent / "indexes")) == 1
    return ShardDataset(path, index_folder=path.parent / "indexes")


PIPES: dict[str, Callable[[Path], Any]] = {
    "class/a.jpg": open_picture,
    "a.idx": open_index_of_records,
    "a.txt": open_replaced_shard,
    "shards.index": open_beside,
    "tokens.npy": lambda path: TokenWindows(path, 4),
    "lengths.npy": lambda path: lengths_of([[1]], path),
    "packed/a.jpg": lambda path: main(["records", "pack", str(path.parent), str(path.parent.parent / "a.rec")]),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", PIPES)
def test_a_named_pipe_in_place_of_a_file_is_an_error(name: str, tmp_path: Path, capsys: Any) -> None:
    """To open it would wait for a writer."""
    path = tmp_path / "data" / name
    path.parent.mkdir(parents=True)
    os.mkfifo(path)
    with pytest.raises(OSError, match=rf"it is not a file.*{path.name}|{path.name}.*it is not a file"):
        if PIPES[name](path) == 2:  # of a command
            raise OSError(capsys.readouterr().err)
