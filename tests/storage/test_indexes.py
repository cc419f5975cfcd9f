"""Indexes of shards are made once, kept, found again, and made anew for a shard that has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sharded_loader.storage import indexes as module
from sharded_loader.storage.files import Stat
from sharded_loader.storage.indexes import Index, Indexes, decode_texts, encode_texts

STAT = Stat(100, "first")


class Makes:
    """Makes indexes, and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Index:
        self.count += 1
        return {"offsets": np.arange(3), "length": np.array(2)}


def test_an_index_is_made_once(tmp_path: Path) -> None:
    make, folder = Makes(), tmp_path / "not" / "there"
    for _ in range(2):
        found = Indexes(folder).of("tar", "s3://b/a.tar", STAT, make)
        assert found["offsets"].tolist() == [0, 1, 2] and int(found["length"]) == 2
    assert make.count == 1
    assert [path.suffix for path in folder.iterdir() if path.is_file()] == [".arrays"]


@pytest.mark.parametrize(
    "changed",
    [("mds", "s3://b/a.tar", STAT), ("tar", "s3://b/c.tar", STAT), ("tar", "s3://b/a.tar", Stat(100, "second")), None],
)
def test_another_shard_has_another_index(tmp_path: Path, changed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, indexes = Makes(), Indexes(tmp_path)
    indexes.of("tar", "s3://b/a.tar", STAT, make)
    if changed is None:  # as of another version
        monkeypatch.setattr(module, "VERSION", module.VERSION + 1)
    indexes.of(*(changed or ("tar", "s3://b/a.tar", STAT)), make)
    assert make.count == 2


def test_the_folder_of_indexes_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = Makes()
    monkeypatch.chdir(tmp_path)
    indexes = Indexes(Path("here"))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    indexes.of("tar", "a.tar", STAT, make)
    assert [path.name for path in tmp_path.iterdir() if path.name != "other"] == ["here"]


@pytest.mark.parametrize("damage", ["", "nonsense", "cut", "a byte"])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: str) -> None:
    make, indexes = Makes(), Indexes(tmp_path)
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
    assert make.count == 2


def test_a_folder_that_cannot_be_written_to_is_told_of_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    make, indexes = Makes(), Indexes(tmp_path / "file")
    with pytest.warns(UserWarning, match="cannot be kept in .*index_folder="):
        indexes.of("tar", "a.tar", STAT, make)
    indexes.of("tar", "a.tar", STAT, make)
    assert make.count == 2


@given(st.lists(st.text()), st.data())
def test_texts_come_back(texts: list[str], data: st.DataObject) -> None:
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    assert decode_texts(encode_texts(texts)) == texts
    if texts:
        which = data.draw(st.lists(st.integers(0, len(texts) - 1)))
        assert decode_texts(encode_texts(texts), which) == [texts[i] for i in which]
