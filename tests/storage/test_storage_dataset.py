"""`ShardDataset`: one index over many shards, whatever names them, and of any format; what is wrong is named."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from conftest import PROCESS_POOLS, make_pool
from pages import blocks, promised
from shards import Served, closed, number, serves, tar_of_numbers, write_tar  # noqa: F401

from sharded_loader import ShardedDataLoader
from sharded_loader.storage.dataset import MAX_OPEN, ShardDataset
from sharded_loader.storage.files import ShardError, ShardFile
from sharded_loader.storage.lists import format_of, parse_list

LENGTHS = (3, 0, 5, 1, 4)
TOTAL = sum(LENGTHS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tar shards whose samples are the numbers from 0 on."""
    begins = np.cumsum([0, *LENGTHS])
    for shard, length in enumerate(LENGTHS):
        content = tar_of_numbers(range(begins[shard], begins[shard] + length))
        (tmp_path / f"s-{shard}.tar").write_bytes(content)
    return tmp_path


def make(folder: Path, **changed: Any) -> ShardDataset:
    return ShardDataset(**{"urls": str(folder / "s-*.tar"), "index_folder": folder / "indexes", **changed})


def test_samples_of_all_shards_have_one_index(folder: Path) -> None:
    dataset = make(folder)
    assert len(dataset) == TOTAL and dataset.lengths.tolist() == list(LENGTHS)
    for one in (dataset, pickle.loads(pickle.dumps(dataset))):
        assert [number(one[i]) for i in range(TOTAL)] == list(range(TOTAL))
    assert dataset[-1]["__key__"] == "012"
    assert [number(one) for one in dataset.__getitems__([12, 0, 7, 3, 0])] == [12, 0, 7, 3, 0]
    assert [number(one) for one in dataset[2:5]] == [2, 3, 4]
    assert repr(dataset) == "ShardDataset(5 tar shards, 13 samples)"
    with pytest.raises(IndexError, match="13 samples"):
        dataset[TOTAL]
    listed = make(folder, urls=[folder / f"s-{shard}.tar" for shard in (4, 0, 3)])
    assert [number(one) for one in listed] == [9, 10, 11, 12, 0, 1, 2, 8]


def test_indexes_are_made_once_and_lie_where_they_are_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(folder)
    assert len(list((folder / "indexes").glob("*.arrays"))) == len(LENGTHS)
    unreadable = SimpleNamespace(name="tar", suffixes=(".tar",), index=None, read=None)  # neither is called
    assert len(make(folder, format=unreadable)) == TOTAL
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    make(folder, index_folder=None)
    assert len(list((folder / "cache" / "sharded_loader" / "indexes").glob("*.arrays"))) == len(LENGTHS)


def test_many_shards_are_not_all_open(tmp_path: Path) -> None:
    for shard in range(MAX_OPEN + 5):
        write_tar(tmp_path / f"s-{shard:03}.tar", {f"{shard}.txt": str(shard).encode()})
    dataset = make(tmp_path)
    for _ in range(2):
        assert [number(one) for one in dataset] == list(range(MAX_OPEN + 5))
    assert sum(file.path.endswith(".tar") for file in psutil.Process().open_files()) == MAX_OPEN
    dataset.close()
    assert number(dataset[3]) == 3


@pytest.fixture
def urls(folder: Path, served: Served) -> list[str]:
    """Those of the same shards, served."""
    served.files = {f"/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.tar"))}
    return [f"{served.url}{name}" for name in served.files]


@pytest.mark.parametrize("method", ["inline", "thread", *PROCESS_POOLS])
@pytest.mark.costly
def test_requests_that_were_tried_again_are_counted(folder: Path, served: Served, urls: list[str], method: str) -> None:
    remote = make(folder, urls=urls)
    with ShardedDataLoader(remote.transform(number), 4, pool=make_pool(method)) as loader:
        served.fail, served.truncate = 3, 2
        assert [i for batch in loader for i in batch.tolist()] == list(range(TOTAL))
        assert loader.stats().retries == 5


LISTS = {
    "plain": lambda found: list(found),
    "mosaic": lambda found: {"shards": [{"raw_data": {"basename": one}, "samples": n} for one, n in found.items()]},
    "wids": lambda found: {"wids_version": 1, "shardlist": [{"url": one, "nsamples": n} for one, n in found.items()]},
}


@pytest.mark.costly(2)
@pytest.mark.parametrize("kind", LISTS)
def test_a_file_that_lists_shards_stands_for_them(folder: Path, served: Served, urls: list[str], kind: str) -> None:
    content = json.dumps(LISTS[kind](dict(zip([url[-7:] for url in urls], LENGTHS, strict=True)))).encode()
    (folder / "index.json").write_bytes(content)
    served.files["/index.json"] = content
    for given in (folder / "index.json", f"{served.url}/index.json"):
        assert [number(one) for one in make(folder, urls=given)] == list(range(TOTAL))


def test_a_shard_that_is_missing_or_must_not_be_read_is_named(folder: Path, served: Served, urls: list[str]) -> None:
    for given in ([folder / "s-0.tar", folder / "gone.tar"], [f"{served.url}/gone.tar"]):
        with pytest.raises(FileNotFoundError, match=r"gone\.tar"):
            make(folder, urls=given)
    with pytest.raises(FileNotFoundError, match=r"no files match .*check the pattern"):
        make(folder, urls=str(folder / "t-*.tar"))
    with pytest.raises(ValueError, match="was given no shards"):
        make(folder, urls=[])
    with pytest.raises(TypeError, match=r"ShardDataset has no argument 'cach'; did you mean 'cache'\?"):
        make(folder, cach=None)
    served.fail, served.status = 1000, 403
    with pytest.raises(ShardError, match=r"s-0\.tar: this process may not read the shard") as caught:
        len(make(folder, urls=urls))
    assert isinstance(caught.value, PermissionError)


@pytest.mark.costly
@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_was_deleted_is_named(folder: Path, served: Served, urls: list[str], workers: int) -> None:
    for here in (False, True):
        dataset = make(folder) if here else make(folder, urls=urls)
        assert len(dataset) == TOTAL
        os.remove(folder / "s-2.tar") if here else served.files.pop("/s-2.tar")
        with ShardedDataLoader(dataset, 1, num_workers=workers) as loader:
            with pytest.raises(ShardError, match=r"s-2\.tar: the shard is missing .*make the dataset again") as caught:
                list(loader)
        assert isinstance(caught.value, FileNotFoundError)
        dataset.close()


def test_a_format_of_the_users_is_an_object_with_index_and_read(tmp_path: Path) -> None:
    def index(file: ShardFile) -> dict[str, Any]:
        [content] = file.ranges([0], [file.size])
        ends = np.flatnonzero(np.frombuffer(content, np.uint8) == ord("\n")) + 1
        return {"ends": ends, "length": np.array(len(ends))}

    def read(file: ShardFile, index: Any, rows: list[int]) -> list[bytes]:
        ends = np.concatenate([[0], index["ends"]])
        return file.ranges([int(ends[row]) for row in rows], [int(ends[row + 1]) - 1 for row in rows])

    (tmp_path / "a.txt").write_text("one\ntwo\n")
    (tmp_path / "b.txt").write_text("three\n")
    own = SimpleNamespace(name="own", suffixes=(".txt",), index=index, read=read)
    dataset = ShardDataset(tmp_path / "*.txt", format=own, index_folder=tmp_path / "indexes")
    assert list(dataset) == [b"one", b"two", b"three"]


def test_the_format_is_that_of_the_names_or_the_one_that_was_given() -> None:
    ends = {".tar": "tar", ".parquet": "parquet", ".pq": "parquet", ".arrow": "arrow", ".mds": "mds", ".rec": "records"}
    assert {end: format_of(None, [f"a{end}"]).name for end in ends} == ends
    assert format_of(None, ["s3://b/a.tar?versionId=3"]).name == "tar"
    assert format_of("mds", ["a.bin"]).name == "mds"
    for urls_of_it in (["a.bin"], ["a.tar", "b.mds"]):
        with pytest.raises(ValueError, match="do not tell one format"):
            format_of(None, urls_of_it)
    with pytest.raises(ValueError, match=r"format 'zip' is unknown: give one of \['tar'"):
        format_of("zip", ["a.zip"])


def test_names_lie_beside_the_list_and_urls_where_they_say() -> None:
    listed, trust = json.dumps(["a.tar", "more/b.tar", "gs://other/c.tar"]).encode(), {"gs://other": dict[str, Any]()}
    for place in ("s3://bucket/set/", "set/"):
        expected = [f"{place}a.tar", f"{place}more/b.tar", "gs://other/c.tar"]
        assert list(parse_list(f"{place}index.json", listed, trust)) == expected


COMPRESSED = [
    {"raw_data": {"basename": "a.mds"}, "zip_data": {"basename": "a.mds.zstd"}},
    {"raw_data": None, "zip_data": {"basename": "a.mds.zstd"}},
    {"raw_meta": {"basename": "a.meta"}},
]


@pytest.mark.parametrize(
    ("listed", "text"),
    [
        *((listed, r"index\.json.*not a list of shards") for listed in (b"no json", b"{}", b"[1, 2]", b"7", b'"abc"')),
        (b"[]", "lists no shards"),
        (b"[" * 100_000, "not a list of shards"),
        (b'{"shards": [7]}', "not a list of shards"),
        (b'{"shardlist": [{"url": "a.tar", "nsamples": Infinity}]}', "not a list of shards"),
        (b'{"shardlist": [{"url": "a.tar", "nsamples": 1%s}]}' % (b"0" * 20), "not a list of shards"),
        (b'{"shards": [{"raw_data": {}}]}', "not a list of shards"),
        *((json.dumps({"shards": [shard]}).encode(), "decompress them first") for shard in COMPRESSED),
    ],
)
def test_a_file_that_lists_no_shards_is_named(listed: bytes, text: str) -> None:
    with pytest.raises(ShardError, match=text):
        parse_list("s3://bucket/index.json", listed)


PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "shards.md"


@pytest.mark.stores
@pytest.mark.parametrize("name", ["ArrayRecord", "Lance"])
def test_a_format_over_another_library_reads_its_files(name: str, tmp_path: Path) -> None:
    [block] = [block for block in blocks(PAGE, "python") if f"class {name}:" in block]
    done = subprocess.run([sys.executable, "-c", block], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == promised(block)
