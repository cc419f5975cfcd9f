"""A shard of this machine that changes after the dataset was made is an error: no two versions are ever mixed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import platform
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import make_pool
from shards import closed, write_mds, write_tar  # noqa: F401

from sharded_loader import ShardDataset, ShardedDataLoader
from sharded_loader.storage import files
from sharded_loader.storage.files import ShardError

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


def in_place(path: Path, values: list[bytes]) -> None:
    write(path, values)
    os.utime(path)


def replaced(path: Path, values: list[bytes]) -> None:
    write(path.with_suffix(".new"), values)
    os.replace(path.with_suffix(".new"), path)


def deleted_first(path: Path, values: list[bytes]) -> None:
    path.unlink()
    write(path, values)  # often with the same inode


def grown(path: Path, values: list[bytes]) -> None:
    path.write_bytes(path.read_bytes() + bytes(10_240))


def cut(path: Path, values: list[bytes]) -> None:
    os.truncate(path, 512)


CHANGES = {"in place": in_place, "in place with its old time": write, "replaced": replaced, "deleted": deleted_first}


@pytest.mark.costly(7)
@pytest.mark.parametrize("later", [OTHER, ALIKE], ids=["other places", "same places"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
@pytest.mark.parametrize("change", [*CHANGES.values(), grown, cut], ids=[*CHANGES, "grown", "cut"])
def test_a_shard_that_was_changed_is_an_error(
    tmp_path: Path, change: Callable[[Path, list[bytes]], None], is_open: bool, later: list[bytes]
) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset = make(path)
    if is_open:
        assert values(dataset) == FIRST
    change(path, later)
    for _ in range(2):
        with pytest.raises(ShardError, match=r"a\.tar (has|was) .* make the dataset again"):
            dataset[0]
    if change in CHANGES.values():
        assert values(make(path)) == later


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
def test_a_change_of_the_mode_or_of_the_links_is_no_change_of_the_shard(tmp_path: Path, is_open: bool) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset = make(path)
    if is_open:
        dataset[0]
    path.chmod(0o444)
    os.link(path, tmp_path / "backup.tar")
    assert values(dataset) == FIRST
    path.chmod(0o644)
    assert values(dataset) == FIRST


@pytest.mark.skipif(os.name == "nt", reason="an open file cannot be deleted")
def test_a_shard_that_was_deleted_is_read_where_it_is_open(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    dataset, other = make(path), make(path)
    dataset[0]
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
        replaced(path, ALIKE)
        with pytest.raises(ShardError, match=r"a\.tar was replaced"):
            for _ in range(5):  # batches that were prefetched before may still come
                assert [sample["txt"] for batch in loader for sample in batch] == FIRST


def test_a_format_that_opens_the_shard_by_its_path_reads_no_later_version(tmp_path: Path) -> None:
    path = tmp_path / "a.mds"
    for content in (b"first", b"other"):
        write_mds(path.with_suffix(f".{content.decode()}"), {"x": ("bytes", None)}, [[content]])

    class ByPath:
        name, suffixes = "by path", (".mds",)

        def index(self, file: files.ShardFile) -> dict[str, Any]:
            import numpy as np

            return {"length": np.array(1)}

        def read(self, file: files.ShardFile, index: Any, rows: list[int]) -> list[bytes]:
            if "mapped" not in file.kept:
                file.kept["mapped"] = Path(str(file.path)).read_bytes()
            return [file.kept["mapped"]]

    shutil.copy(path.with_suffix(".first"), path)
    dataset = ShardDataset(path, format=ByPath(), index_folder=tmp_path / "indexes")
    assert dataset[0] == path.read_bytes()
    os.replace(path.with_suffix(".other"), path)
    with pytest.raises(ShardError, match=r"a\.mds was replaced"):
        dataset[0]


def test_another_machine_may_have_a_copy_of_another_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tar"
    write(path, FIRST)
    pickled = pickle.dumps(make(path))
    in_place(path, OTHER)
    monkeypatch.setattr(platform, "node", lambda: "another")
    copy = pickle.loads(pickled)
    assert values(copy) == OTHER
    in_place(path, FIRST)
    with pytest.raises(ShardError, match=r"a\.tar was replaced"):
        copy[0]
    write(path, [b"x"] * 5)
    with pytest.raises(ShardError, match=r"a\.tar has 5 samples, and had 3"):
        pickle.loads(pickled)[0]


@pytest.mark.parametrize("name", ["train.tar", "*.tar", "file://train.tar", "./train.tar", "list.json", "~/train.tar"])
def test_a_relative_path_is_that_of_the_folder_in_which_the_dataset_was_made(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
