"""A shard of this machine that changes after the dataset was made is an error: no two versions are ever mixed."""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import platform
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import make_pool
from mutations import Subject, assert_noticed, read_shards
from shards import closed, write_tar  # noqa: F401

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage.files import ShardError, ShardFile
from tests import reference_recordio as reference

FIRST, OTHER = [b"a" * 4, b"b" * 600, b"c" * 4], [b"x" * 600, b"y" * 4, b"z" * 4]
ALIKE = [b"x" * 4, b"y" * 600, b"z" * 4]
LONG_AGO = (10**9, 10**9)


def write(path: Path, values: list[bytes]) -> None:
    write_tar(path, {f"{i:04}.txt": value for i, value in enumerate(values)})
    os.utime(path, LONG_AGO)  # as `tar x`, `cp -p`, `rsync -t` leave it


def make(path: Any) -> ShardDataset:
    return ShardDataset(path, index_folder=Path(path).parent / "indexes")


def values(dataset: ShardDataset) -> list[bytes]:
    return [sample["txt"] for sample in dataset]


CHANGES = ("in place", "in place with its old time", "replaced", "deleted", "grown", "cut")


def change(path: Path, how: str, values: list[bytes]) -> None:
    if how == "grown":
        path.write_bytes(path.read_bytes() + bytes(10_240))
    elif how == "cut":
        os.truncate(path, 512)
    elif how == "replaced":
        write(path.with_suffix(".new"), values)
        os.replace(path.with_suffix(".new"), path)
    else:
        if how == "deleted":
            path.unlink()  # what is written then often has the same inode
        write(path, values)
        if how == "in place":
            os.utime(path)


@pytest.mark.costly(7)
@pytest.mark.parametrize("later", [OTHER, ALIKE], ids=["other places", "same places"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("how", CHANGES)
def test_a_shard_that_was_changed_is_an_error(tmp_path: Path, how: str, is_open: bool, later: list[bytes]) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset = make(path)
    if is_open:
        assert values(dataset) == FIRST
    change(path, how, later)
    for _ in range(2):
        with pytest.raises(ShardError, match=r"a\.tar (has|was) .* make the dataset again"):
            dataset[0]
    if how not in ("grown", "cut"):
        assert values(make(path)) == later


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be deleted")
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_another_mode_link_or_none_is_no_change_of_what_was_opened(tmp_path: Path, is_open: bool) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset, other = make(path), make(path)
    if is_open:
        dataset[0]
    path.chmod(0o444)
    os.link(path, tmp_path / "backup.tar")
    assert values(dataset) == FIRST
    path.unlink()
    assert values(dataset) == FIRST
    with pytest.raises(FileNotFoundError, match=r"a\.tar"):
        other[0]


@pytest.mark.parametrize("method", ["inline", "thread", *multiprocessing.get_all_start_methods()])
def test_a_shard_that_changes_between_epochs_is_an_error_in_every_pool(tmp_path: Path, method: str) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset = make(path)
    with ShardedDataLoader(dataset, 3, pool=make_pool(method), batchify_fn=list) as loader:
        assert [sample["txt"] for batch in loader for sample in batch] == FIRST
        change(path, "replaced", ALIKE)
        with pytest.raises(ShardError, match=r"a\.tar was replaced"):
            for _ in range(5):  # batches that were prefetched before may still come
                assert [sample["txt"] for batch in loader for sample in batch] == FIRST


def test_a_format_that_opens_the_shard_by_its_path_reads_no_later_version(tmp_path: Path) -> None:
    def read(file: ShardFile, index: Any, rows: list[int]) -> list[bytes]:
        if "mapped" not in file.kept:
            file.kept["mapped"] = Path(str(file.path)).read_bytes()
        return [file.kept["mapped"]]

    index = lambda file: {"length": np.array(1)}  # noqa: E731
    by_path = SimpleNamespace(name="by path", suffixes=(".mds",), index=index, read=read)
    path = tmp_path / "a.mds"
    path.write_bytes(b"first")
    dataset = ShardDataset(path, format=by_path, index_folder=tmp_path / "indexes")
    assert dataset[0] == b"first"
    (tmp_path / "other").write_bytes(b"other")
    os.replace(tmp_path / "other", path)
    with pytest.raises(ShardError, match=r"a\.mds was replaced"):
        dataset[0]


def test_another_machine_may_have_a_copy_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    pickled = pickle.dumps(make(path))
    change(path, "in place", OTHER)
    monkeypatch.setattr(platform, "node", lambda: "another")
    copy = pickle.loads(pickled)
    assert values(copy) == OTHER
    change(path, "in place", FIRST)
    with pytest.raises(ShardError, match=r"a\.tar was replaced"):
        copy[0]
    write(path, [b"x"] * 5)
    with pytest.raises(ShardError, match=r"a\.tar has 5 samples, and had 3"):
        pickle.loads(pickled)[0]


@pytest.mark.parametrize("name", ["train.tar", "*.tar", "file://train.tar", "./train.tar", "list.json", "~/train.tar"])
def test_a_relative_path_is_that_of_where_the_dataset_was_made(tmp_path: Path, name: str, monkeypatch: Any) -> None:
    made = []
    for version, content in (("v1", FIRST), ("v2", OTHER)):
        (tmp_path / version).mkdir()
        write(tmp_path / version / "train.tar", content)
        (tmp_path / version / "list.json").write_text('["train.tar"]')
        monkeypatch.chdir(tmp_path / version)
        for variable in ("HOME", "USERPROFILE"):
            monkeypatch.setenv(variable, str(tmp_path / version))
        made.append(ShardDataset(name, index_folder="~/../indexes" if "~" in name else "../indexes"))
        assert values(made[-1]) == content
    assert [values(pickle.loads(pickle.dumps(dataset))) for dataset in made] == [FIRST, OTHER]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["indexes", "v1", "v2"]
    with pytest.raises(ShardError, match=r"is not a file: .*\*\.tar"):
        ShardDataset(tmp_path, format="tar", index_folder=tmp_path)


DIALECTS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_of(dialect: str, more: int = 0) -> bytes:
    """Samples with long names and, where the dialect has them, extended headers.

    It has an odd number of records: if larger ones were possible, more zeros at the end would be right.
    """
    content = io.BytesIO()
    headers = {"pax_headers": {"comment": "for all members"}} if dialect == "pax" else {}
    with tarfile.open(fileobj=content, mode="w", format=DIALECTS[dialect], **headers) as tar:
        for i in range(9):
            folder = "long/" * 25 if i % 3 == 1 else "" if dialect == "ustar" or i % 3 else "länger/" * 40
            picture, number = (tarfile.TarInfo(f"{folder}{i:03}.{end}") for end in ("jpg", "cls"))
            picture.size, number.size = 100 + 300 * (i % 4) + more, 1
            picture.pax_headers = {"mtime": f"{i}.25"}
            tar.addfile(picture, io.BytesIO(bytes(range(50, 250)) * 30))
            tar.addfile(number, io.BytesIO(b"%d" % i))
    return content.getvalue() if len(content.getvalue()) // 10_240 % 2 else tar_of(dialect, more + 512)


def samples_of_tar(content: bytes) -> list[Any] | None:
    """The samples as tarfile reads them, if the end mark follows the last member, and no more zeros than it writes."""
    samples: dict[str, dict[str, Any]] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as tar:
            for member in tar:
                folder, slash, base = member.name.rpartition("/")
                key, dot, extension = base.partition(".")
                if not dot or not member.isfile():
                    continue
                sample = samples.setdefault(folder + slash + key, {"__key__": folder + slash + key})
                if extension.lower() in sample:
                    return None
                part = tar.extractfile(member)
                sample[extension.lower()] = part.read() if part else None
            rest = content[tar.offset :]
    except (tarfile.TarError, KeyError, ValueError, OverflowError):
        return None
    return None if rest.strip(b"\0") or not 1024 <= len(rest) < 1024 + 10_240 else list(samples.values())


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.slow
def test_damaged_tar_shards_are_noticed(dialect: str, tmp_path: Path) -> None:
    content = tar_of(dialect)
    (tmp_path / "a.tar").write_bytes(content)
    assert read_shards(str(tmp_path / "a.tar")) == samples_of_tar(content)
    assert_noticed(Subject(f"{dialect}.tar", content, reference=samples_of_tar), range(1000, 2700), tmp_path)


RECORDS = [
    *(b"%d" % i * (3 * i) for i in range(12)),
    *(reference.MAGIC * 2 + b"parts" + reference.MAGIC, b"", b"x" * 700, b"four", b"y" * 2000, b"last one"),
]


def whole_records(content: bytes) -> list[bytes] | None:
    """The records of a file that is as a writer leaves it, filling bytes and all; None of another one."""
    records, _, damage = reference.read(content)
    return records if damage is None and reference.write(records)[0] == content else None


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(1000, 1900), marks=pytest.mark.slow)])
def test_damaged_record_shards_are_noticed(seeds: range, tmp_path: Path) -> None:
    assert_noticed(Subject("a.rec", reference.write(RECORDS)[0], reference=whole_records), seeds, tmp_path)
