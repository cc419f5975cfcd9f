"""RecordIO against a second implementation: the same bytes both ways, and the same end of a damaged file."""

from __future__ import annotations

import json
import math
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sharded_loader.recordio import MXIndexedRecordIO, RecordFileDataset
from tests import damaged_records
from tests import reference_recordio as reference
from tests.fuzz import run

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
MAGIC = reference.MAGIC

words = st.one_of(st.just(MAGIC), st.just(MAGIC[:3]), st.binary(max_size=5), st.binary(min_size=4, max_size=4))
dense = st.lists(words, max_size=12).map(b"".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all examples of a property."""
    return tmp_path_factory.mktemp("reference")


def test_the_reference_itself_writes_and_reads_the_file_of_mxnet() -> None:
    cases = json.loads((GOLDEN / "recordio.json").read_text())
    records = [bytes.fromhex(record) for record in cases[0]["params"]["records_hex"]]
    content, offsets = reference.write(records)
    assert content == (GOLDEN / "plain.rec").read_bytes()
    assert reference.read(content) == (records, offsets[:-1], None)


@given(records=st.lists(dense, max_size=5))
@settings(deadline=None)
def test_what_is_written_is_what_the_reference_writes(folder: Path, records: list[bytes]) -> None:
    content, offsets = reference.write(records)
    with MXIndexedRecordIO(folder / "ours.idx", folder / "ours.rec", "w") as file:
        for key, record in enumerate(records):
            file.write_idx(key, record)
    assert (folder / "ours.rec").read_bytes() == content
    lines = [f"{key}\t{offset}\n" for key, offset in enumerate(offsets[:-1])]
    assert (folder / "ours.idx").read_bytes() == "".join(lines).encode()
    assert reference.read(content) == (records, offsets[:-1], None)


@given(records=st.lists(dense, max_size=5))
@settings(deadline=None)
def test_what_the_reference_writes_is_read(folder: Path, records: list[bytes]) -> None:
    content, offsets = reference.write(records)
    (folder / "theirs.rec").write_bytes(content)
    with MXIndexedRecordIO(folder / "theirs.idx", folder / "theirs.rec", "r") as file:  # its index is made
        assert list(iter(file.read, None)) == records
        assert list(file.idx.values()) == offsets[:-1]
    with RecordFileDataset(folder / "theirs.rec") as dataset:
        assert dataset.get_batch(range(len(records))) == records


@given(rng=st.randoms(use_true_random=False))
@settings(max_examples=3 * settings.default.max_examples // 2)
def test_a_damaged_file_is_read_up_to_the_damage_which_is_named(folder: Path, rng: random.Random) -> None:
    damaged_records.check_file(folder, rng)


@pytest.mark.slow
def test_many_damaged_files_are_read_as_the_reference_reads_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run.run(range(200), "records", math.inf) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["cases", "200"] in lines and ["differences", "0"] in lines
    monkeypatch.setattr(RecordFileDataset, "__getitems__", lambda self, indices: [b""] * len(indices))
    assert run.run(range(20), "records", math.inf) == 1


def test_the_comparison_notices_a_read_beyond_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    with open(tmp_path / "a", "rb") as file, damaged_records.reads_within(10):
        assert os.pread(file.fileno(), 10, 0) == b"0123456789"
        with pytest.raises(AssertionError, match="a read of 11 bytes from a file of 10"):
            os.pread(file.fileno(), 11, 0)
